"""The trainer: ids, log-probs, objectives, gradients, the reference, resume; tiny random models, one thread."""
import dataclasses
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
import xml.dom.minidom
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers
from accelerate import Accelerator
from peft import PeftModel
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import deloop
import train
from deloop import InputError
from train import Config, Row, pair_logps, token_logps

torch.set_num_threads(1)
ROOT, ONE_THREAD = Path(train.__file__).parent, {**os.environ, "OMP_NUM_THREADS": "1"}
CHATML = """\
{%- for m in messages %}
{%- set text = m.content.split('</think>')[-1] if m.role == 'assistant' else m.content %}
{{- '<|im_start|>' + m.role + '\\n' + text + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""                             # Qwen3's habits: strips thoughts, adds a newline and an empty think block
START, END, VOCAB = 256, 257, 300           # <|im_start|>, <|im_end|>, the model's vocabulary


# ---------------------------------------------------------------------------------------------------------------------
# Tiny models, tokenizers and pairs

def tokenizer_of(merges=(), template=CHATML):
    """A byte-level BPE with the given merges and Qwen's control tokens."""
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<|im_start|>", "<|im_end|>", *map("".join, merges)]
    bpe = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=list(merges)))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>")
    tokenizer.chat_template = template
    return tokenizer


def base_model(family="qwen3", kv_heads=2, dtype=torch.float32, **changes):
    """A random model of two layers, the same at every call."""
    config = transformers.AutoConfig.for_model(family, **{
        "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": kv_heads, "head_dim": 8, "tie_word_embeddings": True,
        "initializer_range": 0.3, "eos_token_id": END, "bos_token_id": None, "pad_token_id": None, **changes})
    torch.manual_seed(5)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A function: family and config changes -> a saved model folder with a tokenizer."""
    made = {}

    def make(family="qwen3", **changes):
        key = (family, *sorted(changes.items()))
        if key not in made:
            made[key] = str(tmp_path_factory.mktemp("model"))
            base_model(family, **changes).save_pretrained(made[key])
            tokenizer_of().save_pretrained(made[key])
        return made[key]
    return make


def chat(text, *more):
    """A prompt: a system message, the task, then (assistant, user) messages."""
    roles = ["system", "user"] + ["assistant", "user"] * len(more)
    return [{"role": role, "content": content} for role, content in zip(roles, ("You act.", text, *more))]


def pair_of(prompt, chosen, rejected, **changes):
    """A deloop-pairs/1 object from texts."""
    say = [[{"role": "assistant", "content": text}] for text in (chosen, rejected)]
    return {"format": "deloop-pairs/1", "prompt": prompt, "chosen": say[0], "rejected": say[1], "chosen_ids": None,
            "rejected_ids": None, "prompt_sha256": deloop.prompt_hash(prompt), "prompt_ids_sha256": None,
            "chat_template_kwargs": {"enable_thinking": False}, "task_id": "t", "sample": 0, "t": 1, "t_escape": 2,
            "success": False, **changes}


def pairs_file(path, count, seed=0):
    """A file of random pairs whose sides begin alike; returns its name."""
    rng = random.Random(seed)

    def word(start, shortest, longest):
        return start + "".join(rng.choice("abcdef ") for _ in range(rng.randrange(shortest, longest)))

    pairs = [pair_of(chat(word(f"{i} ", 5, 30)), word("go ", 1, 12), word("go ", 1, 12)) for i in range(count)]
    path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return str(path)


def row_of(rng, prompt=12, lengths=(5, 7), common=0):
    """A random row; its branches share their first `common` ids."""
    def ids(n):
        return [rng.randrange(VOCAB) for _ in range(n)]

    head = ids(common)
    return Row("row", ids(prompt), [(head + [i] + ids(n))[:n] for i, n in enumerate(lengths)])


def open_run(tmp_path, model, rows, shake=0.1, **settings):
    """A Run on a model folder, its adapter moved off the start by `shake`, so that the policy is not the reference."""
    config = Config(pairs="", model=model, out=str(tmp_path / "out"), **settings)
    about = {"config": dataclasses.asdict(config), "pairs": "", "step": 0, "done": False}
    run = train.open_run(config, Accelerator(), rows, about)
    move(run, shake)
    return run


def move(run, size):
    """Add the same random numbers to a run's adapter at every call."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in run.weights:
            weight += size * torch.randn(weight.shape, generator=generator)


def command(tmp_path, model, count=12, **settings):
    """Arguments of train.py for a short run: `count` pairs, 4 a step, 2 epochs."""
    settings = {"pairs": tmp_path / "pairs.jsonl", "model": model, "out": tmp_path / "out", "batch": 4, "epochs": 2,
                "beta": 1.0, "lr": 1e-2, **settings}
    if count:
        pairs_file(tmp_path / "pairs.jsonl", count)
    flags = {"--" + key.replace("_", "-"): value for key, value in settings.items()}
    return [part for flag, value in flags.items() for part in ([flag] if value is True else [flag, str(value)])]


def process(arguments):
    """train.py in a process of its own."""
    return subprocess.Popen([sys.executable, str(ROOT / "train.py"), *arguments], text=True, env=ONE_THREAD,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def metrics(out):
    """metrics.jsonl without what a clock or the memory says."""
    rows = [json.loads(line) for line in (Path(out) / "metrics.jsonl").read_text().splitlines()]
    clocks = ("seconds", "tokens_per_second", "gb")
    return [{key: value for key, value in row.items() if key not in clocks} for row in rows]


def adapter(out):
    return load_file(Path(out) / "adapter_model.safetensors")


def same(a, b):
    """Two state dicts are equal bit for bit."""
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def close(a, b, relative):
    """The distance of two vectors is within a share of the larger one."""
    a, b = a.detach(), b.detach()
    return float((a - b).norm()) <= relative * max(float(a.norm()), float(b.norm()))


def gradient(run):
    return train.flat(weight.grad for weight in run.weights)


# ---------------------------------------------------------------------------------------------------------------------
# Pairs to ids

def test_prompt_ids_are_those_of_the_rollout_and_completions_end_as_sampled():
    """The prompt rendered from a turn's messages hashes to what the rollout saw; a sampled completion keeps its end."""
    tokenizer = tokenizer_of()
    prompt = chat("task", "<think>hm</think>call", "seen")
    seen = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False, enable_thinking=False)
    assert tokenizer.decode(seen).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    pair = pair_of(prompt, "ab", "abc", prompt_ids_sha256=deloop.ids_hash(seen), chosen_ids=[1, 2, END],
                   rejected_ids=[1, 2, 3])
    row = train.encode_pair(pair, tokenizer, "p")
    assert row.prompt == seen and row.branches == [[1, 2, END], [1, 2, 3]]      # the second was cut: no end of turn
    row = train.encode_pair(pair_of(prompt, "ab", "abc"), tokenizer, "p")
    assert [tokenizer.decode(ids) for ids in row.branches] == ["ab<|im_end|>", "abc<|im_end|>"]
    whole = tokenizer.apply_chat_template(prompt + pair["chosen"], return_dict=False, enable_thinking=False)
    assert row.prompt + row.branches[0] != whole[:-1]       # the trap: the finished chat renders to what nobody sampled


def test_mined_pairs_of_a_trajectory_become_rows(tmp_path):
    """From a trajectory with a loop, by deloop.mine_pairs, to a row: the rollout's prompt and sampled ids."""
    tokenizer, messages, turns = tokenizer_of(), chat("task"), []
    for x in "aab":
        call, seen = {"name": "get", "parameters": {"x": x}}, f"value of {x}"
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False,
                                               enable_thinking=False)
        turns.append({"message": len(messages), "action": call, "executed": True, "observation": seen, "parse": "ok",
                      "prompt_sha256": deloop.prompt_hash(messages), "prompt_ids_sha256": deloop.ids_hash(prompt),
                      "completion_ids": train.encode_text(json.dumps(call), tokenizer)})
        messages = [*messages, {"role": "assistant", "content": json.dumps(call)}, {"role": "user", "content": seen}]
    pairs = deloop.mine_pairs({"format": "deloop-trajectory/1", "task_id": "t", "sample": 0, "status": "turn_limit",
                               "reward": 0.0, "messages": messages, "turns": turns, "compactions": [],
                               "config": {"chat_template_kwargs": {"enable_thinking": False}}})
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    [row], _ = train.load_rows(Config(pairs=str(tmp_path / "p.jsonl"), model="", out=""), tokenizer)
    assert row.branches == [turns[2]["completion_ids"], turns[1]["completion_ids"]] and row.branches[0][-1] == END
    assert deloop.ids_hash(row.prompt) == turns[1]["prompt_ids_sha256"]


def test_pairs_of_a_foreign_log_become_rows(tmp_path):
    """An OpenAI log whose messages hold tool calls and no text: each side is what the chat template writes for the
    call behind the prompt, closed by one end-of-turn token; the prompt is the log up to the loop."""
    template = ("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
                "{% for c in m.tool_calls or [] %}<{{ c.function.name }}{{ c.function.arguments }}>{% endfor %}"
                "<|im_end|>\n{% endfor %}"
                "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
    tokenizer, messages = tokenizer_of(template=template), chat("task")
    for number, x in enumerate("aab"):
        call = {"id": str(number), "type": "function", "function": {"name": "get", "arguments": json.dumps({"x": x})}}
        messages += [{"role": "assistant", "content": None, "tool_calls": [call]},
                     {"role": "tool", "tool_call_id": str(number), "content": f"value of {x}"}]
    (tmp_path / "log.json").write_text(json.dumps(messages))
    [log] = deloop.read_trajectories(tmp_path / "log.json")
    [pair] = deloop.mine_pairs(log)
    row = train.encode_pair(pair, tokenizer, "p")
    assert [tokenizer.decode(ids) for ids in row.branches] == [f'<get{{"x": "{x}"}}><|im_end|>' for x in "ba"]
    assert tokenizer.decode(row.prompt).endswith("value of a<|im_end|>\n<|im_start|>assistant\n")


def test_end_of_turn_is_the_template_s_and_falls_back_to_eos():
    """Exactly one closing token: the one the template writes, also where eos is another; eos where it writes none."""
    tokenizer = tokenizer_of()
    tokenizer.eos_token = "a"
    assert train.end_of_turn(tokenizer) == END
    bare = tokenizer_of(template="{% for m in messages %}{{ m.content }}\n{% endfor %}")
    assert train.end_of_turn(bare) == END == bare.eos_token_id
    assert train.encode_text("xy", bare)[-1] == END and len(train.encode_text("xy", bare)) == 3


def test_no_merge_crosses_the_border_of_prompt_and_completion():
    """With a merge over the border, slicing the joint ids at the prompt's end leaves nothing; encoding apart does."""
    tokenizer = tokenizer_of(merges=[("x", "y")], template="{% for m in messages %}{{ m.content }}{% endfor %}")
    prompt = [{"role": "user", "content": "ax"}]
    row = train.encode_pair(pair_of(prompt, "y", "z", chat_template_kwargs={}), tokenizer, "p")
    joint = tokenizer.encode("axy")
    assert joint[len(row.prompt):] == []
    assert [tokenizer.decode(ids) for ids in row.branches] == ["y<|im_end|>", "z<|im_end|>"]


@pytest.mark.parametrize("change, message", [
    ({"prompt_ids_sha256": "0" * 64}, "template drift"), ({"prompt_sha256": "0" * 64}, "edited after it was mined"),
    ({"format": "deloop-pairs/2"}, "deloop-pairs/1"), ({"prompt": []}, "prompt must be a list of messages"),
    ({"chosen": "text"}, "chosen must be a list"), ({"rejected": [{"role": "assistant"}]}, "rejected must be a list"),
    ({"chosen": [{"role": "assistant", "content": "a"}] * 2}, "chosen must be a list of one"),
    ({"chosen_ids": [1, "2"]}, "chosen_ids must be"), ({"chosen_ids": [9999]}, "vocabulary")])
def test_a_bad_pair_is_refused_with_its_place(tmp_path, change, message):
    """Template drift, edited prompts and malformed pairs are errors that name file, line and fault, never skipped."""
    lines = [json.dumps(pair_of(chat("a"), "b", "c")), json.dumps({**pair_of(chat("a"), "b", "c"), **change})]
    (tmp_path / "p.jsonl").write_text("\n".join(lines))
    with pytest.raises(InputError, match=rf"p\.jsonl, line 2: .*{message}"):
        train.load_rows(Config(pairs=str(tmp_path / "p.jsonl"), model="", out=""), tokenizer_of())


def test_template_that_refuses_a_prompt_is_an_input_error():
    """A template that raises (roles must alternate, say) ends in an InputError with the template's own words."""
    tokenizer = tokenizer_of(template="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InputError, match="roles must alternate"):
        train.encode_pair(pair_of(chat("a"), "b", "c"), tokenizer, "p")


def test_over_long_pairs_are_dropped_never_cut_and_equal_sides_too(tmp_path):
    """4,499 and 4,500 tokens stay whole, 4,501 goes, by the longer side; equal ids go; each fate is counted."""
    tokenizer, prompt = tokenizer_of(), chat("task")
    base = len(train.encode_pair(pair_of(prompt, "a", "b"), tokenizer, "p").prompt)
    sides = [[7] * (total - base) for total in (4499, 4500, 4501)]
    pairs = [pair_of(prompt, "a", "b", chosen_ids=[8, END], rejected_ids=ids) for ids in sides]
    pairs += [pair_of(prompt, "a", "b", chosen_ids=sides[2], rejected_ids=[8]), pair_of(prompt, "a", "a")]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    rows, counts = train.load_rows(Config(pairs=str(tmp_path / "p.jsonl"), model="", out=""), tokenizer)
    assert [row.branches[1] for row in rows] == sides[:2]
    assert counts == {"read": 5, "usable": 2, "over-long": 2, "with identical sides": 1, "used": 2}
    with pytest.raises(InputError, match="no pairs left"):
        train.load_rows(Config(pairs=str(tmp_path / "p.jsonl"), model="", out="", max_length=10), tokenizer)


def test_limit_draws_by_seed(tmp_path):
    """--limit takes a subset that depends on the seed alone and keeps the file's order; 0 takes all."""
    path = pairs_file(tmp_path / "p.jsonl", 30)

    def draw(limit, seed):
        config = Config(pairs=path, model="", out="", limit=limit, seed=seed)
        return [row.name for row in train.load_rows(config, tokenizer_of())[0]]

    everything = draw(0, 0)
    assert len(everything) == 30 and draw(10, 1) == draw(10, 1) != draw(10, 2)
    assert draw(10, 1) == [name for name in everything if name in draw(10, 1)] and len(draw(10, 1)) == 10


def test_every_epoch_is_a_permutation_of_its_own():
    """Each epoch uses every pair once, in an order of its own that the seed decides; only its last batch is smaller."""
    rows, config = [None] * 37, Config(pairs="", model="", out="", batch=16)
    epochs = [[train.batch_at(step, rows, config) for step in range(first, first + 3)] for first in (0, 3)]
    assert [len(batch) for batch in epochs[0]] == [16, 16, 5]
    orders = [sum(epoch, []) for epoch in epochs]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(37)) and orders[0] != orders[1]
    assert train.batch_at(0, rows, dataclasses.replace(config, seed=1)) != epochs[0][0]


def test_common_beginning_and_digest():
    """common counts equal leading ids; the digest changes with any id and with where the parts meet."""
    assert Row("", [1], [[5, 6, 7], [5, 6, 8, 7]]).common == 2 and Row("", [1], [[5], [5, 6]]).common == 1
    parts = [([1, 2], [[3], [4]]), ([1], [[2, 3], [4]]), ([1, 2], [[3, 4], []]), ([1, 2], [[3], [5]])]
    rows = [Row("", *part) for part in parts]
    assert len({row.digest() for row in rows}) == 4 and rows[0]._replace(name="x").digest() == rows[0].digest()


# ---------------------------------------------------------------------------------------------------------------------
# Log-probs

def test_log_softmax_is_taken_in_fp32():
    """On bf16 logits gather_logps agrees with float64; a bf16 log-softmax errs by tenths of a nat over 100 tokens."""
    logits = (4 * torch.randn(100, 4000, generator=torch.Generator().manual_seed(0))).bfloat16()
    targets = logits.argmax(-1)
    exact = logits.double().log_softmax(-1).gather(-1, targets[:, None]).sum()
    assert abs(float(train.gather_logps(logits, targets).sum() - exact)) < 1e-3
    assert abs(float(logits.log_softmax(-1).gather(-1, targets[:, None]).sum() - exact)) > 0.1


@pytest.mark.parametrize("family, kv_heads, lengths, checkpointing", [
    ("qwen3", 2, (5, 9), False), ("qwen3", 4, (1, 1), False), ("qwen3", 1, (1, 8, 3), True), ("qwen3", 2, (6,), True),
    ("llama", 2, (3, 1, 4, 1, 5, 9, 2, 6), False), ("llama", 1, (7, 2), True)])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_prefix_equals_naive(family, kv_heads, lengths, checkpointing, dtype, tolerance):
    """One prefix-shared row has the log-probs and LoRA gradients of a row a side (GQA, 1 to 8 branches, length 1)."""
    model = base_model(family, kv_heads, dtype)
    if dtype == torch.float64:                          # transformers' norms round to fp32 in any model; torch's do not
        norms = {name: norm for name, norm in model.named_modules() if "RMSNorm" in type(norm).__name__}
        for name, norm in norms.items():
            model.set_submodule(name, torch.nn.RMSNorm(norm.weight.shape, norm.variance_epsilon, dtype=dtype))
    model.set_attn_implementation("deloop_prefix")
    lora = train.LoraConfig(r=4, target_modules=list(train.PROJECTIONS))
    model = train.get_peft_model(model, lora, autocast_adapter_dtype=False).train()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    torch.manual_seed(0)
    for weight in weights:
        torch.nn.init.normal_(weight, std=0.2)
    row = row_of(random.Random(3), prompt=17, lengths=lengths)
    found = []
    for impl in ("prefix", "naive"):
        tokens = train.token_logps(model, row, impl)
        assert [len(each) for each in tokens] == list(lengths) and tokens[0].dtype == dtype
        signs = torch.tensor([(-1.0) ** i for i in range(len(lengths))], dtype=dtype)
        grads = torch.autograd.grad(signs @ pair_logps(model, row, impl), weights)
        found.append((torch.cat(tokens), train.flat(grads)))
    assert close(found[0][0], found[1][0], tolerance) and close(found[0][1], found[1][1], tolerance)
    assert float(found[0][1].norm()) > 0.01


def test_branches_do_not_see_each_other():
    """Changing a token of one branch leaves the other branch's log-probs bitwise as they were."""
    model = base_model()
    model.set_attn_implementation("deloop_prefix")
    row = row_of(random.Random(0), lengths=(6, 6))
    for changed in (0, 1):
        other = [list(branch) for branch in row.branches]
        other[changed][2] = (other[changed][2] + 1) % VOCAB
        before, after = token_logps(model, row), token_logps(model, row._replace(branches=other))
        assert torch.equal(before[1 - changed], after[1 - changed]) and not torch.equal(before[changed], after[changed])
        assert torch.equal(before[changed][:2], after[changed][:2])       # nor does a token see what follows it


def test_pair_logps_against_the_definition():
    """Both ways equal sum_t log softmax(f(x, y_<t))[y_t] from one plain forward pass over every prefix."""
    model = base_model(dtype=torch.float64)
    row = row_of(random.Random(1), prompt=4, lengths=(3, 2))
    plain = [0, 0]
    for side, branch in enumerate(row.branches):
        for t, target in enumerate(branch):
            plain[side] += model(torch.tensor([row.prompt + branch[:t]])).logits[0, -1].log_softmax(-1)[target]
    naive = pair_logps(model, row, "naive")
    model.set_attn_implementation("deloop_prefix")
    for found in (naive, pair_logps(model, row, "prefix")):
        assert torch.allclose(found, torch.stack(plain), rtol=1e-10)


def test_another_family_falls_back_to_naive(folder, tmp_path, capsys):
    """A family that is not known to work trains with naive, and one line says so."""
    assert train.main(command(tmp_path, folder("qwen2"), count=4, epochs=1)) == 0
    output = capsys.readouterr().out
    assert "--impl naive: prefix sharing is tested for qwen3 and llama, not for qwen2" in output
    assert '"impl": "naive"' in output


# ---------------------------------------------------------------------------------------------------------------------
# Objectives

PI = torch.tensor([[-38.5, -12, -70.25], [-31, -15.5, -60]], dtype=torch.float64)
REF = torch.tensor([[-40, -12.5, -65], [-25, -11, -62]], dtype=torch.float64)
LENGTHS = torch.tensor([[20, 8, 33], [10, 9, 30]], dtype=torch.float64)
BOTH = (*PI, *REF)


def config_of(objective, **settings):
    return Config(pairs="", model="", out="", objective=objective, **settings)


def test_golden_values():
    """The values that the peers' own functions give on three pairs, to the last digits."""
    golden = {"dpo": [0.5231232641398401, 0.5759394198788436, 0.8907338064773699], "ipo": [6.25, 25.0, 297.5625],
              "mean ipo": [86.955625, 89.06640625, 104.56611799816346],
              "kto+": [0.49062609847833927, 0.5031249593105317, 0.5744425168116589],
              "kto-": [0.41641688448272474, 0.4347492524329001, 0.5156199157230156]}
    plus, minus = train.kto_losses(*BOTH, 0.05, kl=0.75)
    found = {"dpo": train.dpo_loss(*BOTH, 0.05), "ipo": train.ipo_loss(*BOTH, 0.05), "kto+": plus, "kto-": minus,
             "mean ipo": train.ipo_loss(*BOTH, 0.05, *LENGTHS)}
    for name, values in golden.items():
        torch.testing.assert_close(found[name], torch.tensor(values, dtype=torch.float64), rtol=1e-12, atol=0)


def test_gradients_at_the_start():
    """At pi = ref, beta = 0.05: dL/dlog pi of dpo is -+0.025, of averaged ipo -1 and +2 at L = 100, of kto -+0.0125."""
    ref, lengths = REF.T[:1], LENGTHS.T[:1]
    losses, weights = train.loss_weights(config_of("dpo"), ref, ref, lengths)
    torch.testing.assert_close(losses, torch.full((1,), math.log(2), dtype=torch.float64))
    torch.testing.assert_close(weights, torch.tensor([[-0.025, 0.025]], dtype=torch.float64))
    losses, weights = train.loss_weights(config_of("ipo", ipo_average=True), ref, ref, lengths)
    assert losses.tolist() == [pytest.approx(100)] and weights.tolist() == [[pytest.approx(-1), pytest.approx(2)]]
    weights = train.loss_weights(config_of("kto"), ref, ref, lengths)[1]
    torch.testing.assert_close(2 * weights, torch.tensor([[-0.0125, 0.0125]], dtype=torch.float64))


def test_dpo_gradient_in_closed_form():
    """The two weights of dpo are -beta g and +beta g with g = sigma(-z) (app. H.3), at any margin."""
    z = 0.3 * ((PI[0] - REF[0]) - (PI[1] - REF[1]))
    weights = train.loss_weights(config_of("dpo", beta=0.3), PI.T, REF.T, LENGTHS.T)[1]
    torch.testing.assert_close(weights, torch.stack([-0.3 * torch.sigmoid(-z), 0.3 * torch.sigmoid(-z)], -1))


@pytest.mark.parametrize("name", [*train.OBJECTIVES, "ipo averaged"])
def test_objectives_are_pure_and_differentiate_right(name):
    """Finite differences in float64 agree; inputs stay untouched; a pair's loss does not depend on its neighbours."""
    config = config_of(name.split()[0], beta=0.1, ipo_average=" " in name, anchor=0.7)
    pi, ref, lengths = (PI / 40).T.clone(), (REF / 40).T.clone(), LENGTHS.T.clone()
    leaf = pi.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda pi: train.pair_losses(config, pi, ref, lengths, 0.2), leaf)
    losses, weights = train.loss_weights(config, pi, ref, lengths, 0.2)
    assert torch.equal(pi, (PI / 40).T) and torch.equal(ref, (REF / 40).T) and not pi.requires_grad
    alone = [train.loss_weights(config, pi[i], ref[i], lengths[i], 0.2) for i in range(3)]
    torch.testing.assert_close(losses, torch.stack([each[0] for each in alone]), rtol=1e-14, atol=0)
    torch.testing.assert_close(weights, torch.stack([each[1] for each in alone]), rtol=1e-14, atol=0)


def test_swapping_the_sides_negates_the_margin():
    """z(y-, y+) = -z(y+, y-), hence L(swapped) = L + z for dpo; reference-free likewise; ipo without target is even."""
    swapped = (PI[1], PI[0], REF[1], REF[0])
    z = train.margin(*BOTH, 0.05)
    assert torch.equal(train.margin(*swapped, 0.05), -z)
    torch.testing.assert_close(train.dpo_loss(*swapped, 0.05), train.dpo_loss(*BOTH, 0.05) + z)
    free, free_swapped = train.reference_free_loss(*PI, 0.05), train.reference_free_loss(PI[1], PI[0], 0.05)
    torch.testing.assert_close(free_swapped, free + 0.05 * (PI[0] - PI[1]))
    torch.testing.assert_close(train.ipo_loss(*swapped, 1e9), train.ipo_loss(*BOTH, 1e9))


def test_reference_free_is_dpo_with_reference_zero_and_anchor_adds_nll_per_token():
    """Two identities between siblings: ref = 0 in dpo; dpo-anchor - dpo = anchor * NLL / |y+|."""
    torch.testing.assert_close(train.reference_free_loss(*PI, 0.05), train.dpo_loss(*PI, 0 * PI[0], 0 * PI[0], 0.05))
    extra = train.pair_losses(config_of("dpo-anchor", anchor=0.5), PI.T, REF.T, LENGTHS.T) - train.dpo_loss(*BOTH, 0.05)
    torch.testing.assert_close(extra, 0.5 * -PI[0] / LENGTHS[0])


def test_unlikelihood_near_probability_one():
    """fp32 log(1 - e^x) is right on both sides of -ln 2, finite at p = 1, and still pushes down there."""
    x = torch.tensor([-0.1, -0.3, -0.69, -0.7, -3.0, -20.0, -80.0])
    exact = torch.tensor([-math.log1p(-math.exp(v)) if v < -1 else -math.log(-math.expm1(v)) for v in x.tolist()])
    torch.testing.assert_close(train.unlikelihood_loss(x), exact, rtol=1e-6, atol=0)
    near = torch.tensor([-0.02, -0.01, -1e-3, -1e-8, 0.0], requires_grad=True)
    losses = train.unlikelihood_loss(near)
    slopes = torch.autograd.grad(losses.sum(), near)[0]
    assert torch.isfinite(losses).all() and (losses.diff() >= 0).all()
    torch.testing.assert_close(slopes, torch.tensor([1 / math.expm1(0.02)] + [1 / math.expm1(0.01)] * 4))
    assert torch.isinf(-torch.log(1 - near.detach().bfloat16().exp()))[3]       # the trap: the plain form in bf16


@pytest.mark.slow
@pytest.mark.parametrize("loss_type, settings", [("sigmoid", {}), ("ipo", {"objective": "ipo", "ipo_average": True})])
def test_losses_equal_trl(tmp_path, folder, loss_type, settings):
    """Where TRL is installed: its DPOTrainer loads our pairs file unchanged, and on our ids its loss is ours."""
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    rows = [row_of(random.Random(i), lengths=(3 + i, 6)) for i in range(4)]
    run = open_run(tmp_path, folder(), rows, shake=0.0, beta=0.5, impl="naive", **settings)
    config = trl.DPOConfig(str(tmp_path / "trl"), beta=0.5, loss_type=[loss_type], use_cpu=True, bf16=False,
                           report_to="none")
    data = datasets.Dataset.from_json(pairs_file(tmp_path / "pairs.jsonl", 4), cache_dir=str(tmp_path / "cache"))
    trainer = trl.DPOTrainer(run.model, args=config, train_dataset=data, processing_class=tokenizer_of())
    move(run, 0.1)                                          # after TRL has copied the adapter as its reference
    ids = [{"prompt_ids": row.prompt, "chosen_ids": row.branches[0], "rejected_ids": row.branches[1]} for row in rows]
    theirs = float(trainer.compute_loss(trainer.model, trainer.data_collator(ids)))
    run.references.fill(run, range(4))
    with torch.no_grad():
        pi, ref, lengths = zip(*(train.sides(run, row, token_logps(run.model, row, "naive")) for row in rows))
    ours = train.pair_losses(run.config, torch.stack(pi), torch.stack(ref), torch.stack(lengths)).mean()
    assert float(ours) == pytest.approx(theirs, rel=1e-5) and abs(theirs - math.log(2)) > 0.01


# ---------------------------------------------------------------------------------------------------------------------
# One step

@pytest.mark.parametrize("impl", ["prefix", "naive"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_step_zero_is_ln_2_bit_for_bit(tmp_path, folder, impl, dtype):
    """Policy and reference run one path, so at the start log-probs are bitwise equal, z = 0 and the loss is ln 2."""
    rows = [row_of(random.Random(i), lengths=(4 + i, 6)) for i in range(5)]
    run = open_run(tmp_path, folder(), rows, shake=0.0, impl=impl, dtype=dtype)
    record = train.train_step(run, 0)
    assert record["logp_chosen"] == record["ref_chosen"] and record["logp_rejected"] == record["ref_rejected"]
    assert record["margin"] == 0.0 and record["accuracy"] == 0.5 and record["g"] == 0.5
    assert record["loss"] == float(torch.tensor(2.0).log()) and record["grad_norm"] > 0


def test_only_an_fp32_adapter_is_trained(tmp_path, folder):
    """On a bf16 base every trainable weight is fp32 and a LoRA factor of the seven projections; the base never moves;
    no random number is drawn; two train-mode passes agree bitwise; the reference pass leaves requires_grad alone."""
    run = open_run(tmp_path, folder(), [row_of(random.Random(i)) for i in range(4)], dtype="bfloat16")
    named = dict(run.model.named_parameters())
    trained = {name for name, weight in named.items() if weight.requires_grad}
    before = {name: weight.detach().clone() for name, weight in named.items()}
    assert {name.split(".")[-4] for name in trained} == set(train.PROJECTIONS) and len(trained) == 2 * 7 * 2
    assert all((weight.dtype == torch.float32) == (name in trained) for name, weight in named.items())
    assert run.model.training and torch.equal(pair_logps(run.model, run.rows[0]), pair_logps(run.model, run.rows[0]))
    state = torch.get_rng_state()
    train.train_step(run, 1)
    assert torch.equal(state, torch.get_rng_state())
    assert {name for name, weight in named.items() if weight.requires_grad} == trained
    assert {name for name, weight in named.items() if not torch.equal(weight, before[name])} == trained


@pytest.mark.parametrize("objective", train.OBJECTIVES)
def test_accumulation_equals_one_graph(tmp_path, folder, objective):
    """The gradient added up pair by pair is that of the batch-mean loss in one graph, also in a smaller last batch."""
    rows = [row_of(random.Random(i), lengths=(3 + i % 4, 5)) for i in range(11)]
    run = open_run(tmp_path, folder(), rows, batch=8, objective=objective, beta=0.5, max_grad_norm=0, lr=0.0)
    for step, size in ((2, 8), (3, 3)):                     # the second epoch
        batch = train.batch_at(step, rows, run.config)
        train.train_step(run, step)
        pi = torch.stack([pair_logps(run.model, rows[i], "naive") for i in batch])
        ref = torch.tensor([run.references.known[rows[i].digest()] for i in batch])
        lengths = torch.tensor([[len(branch) for branch in rows[i].branches] for i in batch])
        kl = train.mismatch_kl(run, batch) if objective == "kto" else 0.0
        mean = train.pair_losses(run.config, pi, ref, lengths, kl).mean()
        assert len(batch) == size and close(gradient(run), train.flat(torch.autograd.grad(mean, run.weights)), 1e-5)


@pytest.mark.parametrize("objective", ["dpo", "ipo", "kto", "dpo-anchor"])
def test_ablations_change_the_gradient_and_not_the_loss(tmp_path, folder, objective):
    """The loss is bit-equal under every ablation; plus + minus is the full gradient; freeze-g has weights -+beta/2."""
    rows = [row_of(random.Random(i), lengths=(4, 6), common=2) for i in range(4)]
    found = {}
    for mode in ("none", "plus", "minus", "freeze-g"):
        run = open_run(tmp_path / mode, folder(), rows, ablate=mode, objective=objective, beta=0.5, max_grad_norm=0)
        found[mode] = (train.train_step(run, 1), gradient(run))
    for mode in ("plus", "minus", "freeze-g"):
        for key in train.METRICS:
            assert found[mode][0][key] == found["none"][0][key], (mode, key)
        assert not close(found[mode][1], found["none"][1], 0.01)
    assert close(found["plus"][1] + found["minus"][1], found["none"][1], 1e-6)
    if objective == "dpo":
        run = open_run(tmp_path / "again", folder(), rows)
        pi = torch.stack([pair_logps(run.model, row) for row in rows])
        expected = torch.autograd.grad(0.25 * (pi[:, 1] - pi[:, 0]).mean(), run.weights)
        assert close(found["freeze-g"][1], train.flat(expected), 1e-5)


def test_suffix_only_leaves_out_the_common_beginning(tmp_path, folder):
    """Under --suffix-only the loss is bit-equal; a term's gradient is that of the tokens after the common beginning;
    the whole gradient of dpo stays, since there the common tokens cancel."""
    rows, found = [row_of(random.Random(i), lengths=(5, 7), common=3) for i in range(3)], {}
    for mode in ("plus", "none"):
        for flag in (False, True):
            run = open_run(tmp_path / mode / str(flag), folder(), rows, suffix_only=flag, ablate=mode, beta=0.5,
                           max_grad_norm=0, lr=0.0)
            record = train.train_step(run, 1)
            found[mode, flag] = [record[key] for key in train.METRICS], gradient(run)
    assert all(record == found["none", False][0] for record, _ in found.values())
    surrogate = 0
    for row in rows:
        tokens = token_logps(run.model, row, "naive")
        pi, ref, _ = train.sides(run, row, tokens)
        g = torch.sigmoid(-train.margin(*pi.detach(), *ref, 0.5))
        surrogate = surrogate - 0.5 * g * tokens[0][3:].sum() / 3
    assert close(found["plus", True][1], train.flat(torch.autograd.grad(surrogate, run.weights)), 1e-5)
    assert not close(found["plus", False][1], found["plus", True][1], 0.05)
    assert close(found["none", False][1], found["none", True][1], 1e-5)


def test_logged_terms_add_up_and_logging_changes_nothing(tmp_path, folder):
    """|G|^2 = |T+|^2 + |T-|^2 + 2 <T+, T->, on all tokens and on suffixes; the step is bitwise that without logging;
    activations computed twice give the same terms."""
    rows = [row_of(random.Random(i), lengths=(5, 7), common=2) for i in range(5)]
    settings = {"batch": 4, "beta": 0.5, "max_grad_norm": 0, "lr": 1e-3}
    runs = [open_run(tmp_path / str(n), folder(), rows, log_terms=n, **settings) for n in (0, 1)]
    plain, record = train.measured_step(runs[0], 2), train.measured_step(runs[1], 2)
    terms = record.pop("terms")
    assert record == plain and all(map(torch.equal, runs[0].weights, runs[1].weights))
    suffix = open_run(tmp_path / "suffix", folder(), rows, suffix_only=True, **settings)
    for name, norm in (("all", record["grad_norm"]), ("suffix", train.train_step(suffix, 2)["grad_norm"])):
        plus, minus, cosine = (terms[name][key] for key in ("norm_plus", "norm_minus", "cosine"))
        assert math.sqrt(plus ** 2 + minus ** 2 + 2 * cosine * plus * minus) == pytest.approx(norm, rel=1e-4)
    assert terms["g_quartiles"] == sorted(terms["g_quartiles"]) and -1 <= terms["update_plus"] <= 1
    assert abs(terms["suffix"]["cosine"]) < abs(terms["all"]["cosine"])     # a common beginning makes them look alike
    twice = open_run(tmp_path / "twice", folder(), rows, gradient_checkpointing="on", **settings)
    assert train.log_terms(twice, 2)[0]["suffix"] == pytest.approx(terms["suffix"], rel=1e-4)


def test_update_cosine_is_that_of_the_real_update(tmp_path, folder):
    """With the plus term alone, Adam's first step is -T+ / (|T+| + eps), entry by entry: that is the cosine logged."""
    run = open_run(tmp_path, folder(), [row_of(random.Random(0))], ablate="plus", log_terms=1, lr=1e-3, max_grad_norm=0)
    plus = train.log_terms(run, 1)[1]["update_plus"]
    found = train.measured_step(run, 1)["terms"]["update_plus"]
    assert found == pytest.approx(train.cosine(plus / (plus.abs() + 1e-8), plus), abs=1e-3) and found > 0.3


def test_kto_kl_is_zero_at_the_start_and_a_clamped_mean_later(tmp_path, folder):
    """0 at the start; later the batch mean of log pi/ref of the next pair's chosen side, and never below 0."""
    rows = [row_of(random.Random(i), lengths=(3 + i, 4)) for i in range(4)]
    start = open_run(tmp_path / "a", folder(), rows, shake=0.0, objective="kto")
    assert train.mismatch_kl(start, [0, 1, 2, 3]) == 0.0
    run, batch, means = open_run(tmp_path / "b", folder(), rows, objective="kto"), [2, 0, 3], []
    for i, j in zip(batch, [0, 3, 2]):
        row = Row("", rows[i].prompt, [rows[j].branches[0]])
        with torch.no_grad():
            means.append(float(pair_logps(run.model, row, "naive")) - train.reference_logps(run, [row])[0][0])
    assert train.mismatch_kl(run, batch) == pytest.approx(max(0.0, sum(means) / 3), abs=1e-5)


def test_learning_rate_schedule():
    """Rises in equal parts over the first 10%, peaks at --lr, then cosine to 0; clipping scales the norm to 1."""
    rates = [train.lr_at(step, 100, config_of("dpo", lr=1.0)) for step in range(100)]
    assert rates[:10] == pytest.approx([0.1 * i for i in range(1, 11)]) and rates[10] == 1.0
    assert rates[55] == pytest.approx(0.5) and 0 < rates[99] < 0.001 and rates[10:] == sorted(rates[10:], reverse=True)
    assert train.lr_at(55, 100, config_of("dpo", lr=1.0, schedule="linear")) == pytest.approx(0.5)
    assert train.lr_at(99, 100, config_of("dpo", lr=1.0, schedule="constant", warmup=0.0)) == 1.0


def test_gradient_clipping(tmp_path, folder):
    """The logged norm is the raw one; what the optimiser sees has at most --max-grad-norm."""
    run = open_run(tmp_path, folder(), [row_of(random.Random(i)) for i in range(2)], beta=5.0, max_grad_norm=0.5)
    record = train.train_step(run, 1)
    assert record["grad_norm"] > 0.5 and float(gradient(run).norm()) == pytest.approx(0.5, rel=1e-4)


def test_metrics_are_means_over_the_optimiser_batch(tmp_path, folder):
    """Every metric is its formula's mean over all pairs of the batch, not the last micro-batch's value."""
    rows = [row_of(random.Random(i), lengths=(4, 3 + i)) for i in range(6)]
    run = open_run(tmp_path, folder(), rows, batch=6, lr=0.0)
    record = train.train_step(run, 1)
    pi = torch.stack([pair_logps(run.model, row, "naive") for row in rows]).detach()
    ref = torch.tensor([run.references.known[row.digest()] for row in rows])
    z = 0.05 * ((pi - ref)[:, 0] - (pi - ref)[:, 1])
    expected = {"loss": -F.logsigmoid(z).mean(), "margin": z.mean(), "accuracy": (z > 0).float().mean(),
                "logp_chosen": pi[:, 0].mean(), "logp_rejected": pi[:, 1].mean(), "ref_chosen": ref[:, 0].mean(),
                "g": torch.sigmoid(-z).mean(), "tokens": sum(12 + 4 + 3 + i for i in range(6)) / 6}
    for key, value in expected.items():
        assert record[key] == pytest.approx(float(value), rel=1e-4), key


# ---------------------------------------------------------------------------------------------------------------------
# The reference cache

def test_references_are_found_by_content_only(tmp_path, folder):
    """A second run over the same pairs computes nothing; a changed id, another base, dtype or way finds nothing."""
    cache, rows = tmp_path / "cache.jsonl", [row_of(random.Random(i)) for i in range(3)]
    run = open_run(tmp_path / "a", folder(), rows, reference_cache=str(cache))
    run.references.fill(run, [0, 1, 2])
    written = cache.read_text()
    again = open_run(tmp_path / "b", folder(), rows, reference_cache=str(cache), objective="ipo")
    assert again.references.known == run.references.known and len(again.references.known) == 3
    again.references.fill(again, [0, 1, 2])
    assert cache.read_text() == written
    changed = [row._replace(prompt=[*row.prompt[:-1], (row.prompt[-1] + 1) % VOCAB]) for row in rows]
    assert not {row.digest() for row in changed} & again.references.known.keys()
    for settings in ({"model": folder(initializer_range=0.2)}, {"model": folder("llama")}, {"dtype": "bfloat16"},
                     {"impl": "naive"}):
        config = Config(**{"pairs": "", "model": folder(), "out": "", **settings})
        other = train.load_model(config, torch.device("cpu"))
        assert train.References(cache, train.fingerprint(other, config.impl)).known == {}, settings


def test_stale_or_broken_references_are_refused(tmp_path, folder):
    """A number that is no longer true, or not finite, is refused by name; a line cut by a kill is dropped."""
    cache, rows = tmp_path / "cache.jsonl", [row_of(random.Random(i)) for i in range(3)]
    run = open_run(tmp_path / "a", folder(), rows, reference_cache=str(cache))
    run.references.fill(run, [0, 1, 2])
    good = json.loads(cache.read_text())
    with cache.open("a") as file:
        file.write('{"base": "x", "lo')
    assert len(train.References(cache, good["base"]).known) == 3 and len(cache.read_text().splitlines()) == 1
    good["logps"][rows[1].digest()][0] += 0.5
    cache.write_text(json.dumps(good) + "\n")
    with pytest.raises(InputError, match="cache.jsonl is stale"):
        open_run(tmp_path / "b", folder(), rows, reference_cache=str(cache))
    good["logps"][rows[1].digest()][0] = math.nan
    cache.write_text(json.dumps(good) + "\n")
    with pytest.raises(InputError, match="line 1: a reference log-prob is not finite"):
        open_run(tmp_path / "c", folder(), rows, reference_cache=str(cache))


# ---------------------------------------------------------------------------------------------------------------------
# Whole runs

@pytest.mark.parametrize("objective, side, rises", [
    ("dpo", "margin", True), ("ipo", "margin", True), ("kto", "margin", True), ("sft", "logp_chosen", True),
    ("unlikelihood", "logp_rejected", False), ("dpo-anchor", "logp_chosen", True), ("reference-free", "margin", True)])
def test_every_objective_moves_what_it_names(tmp_path, folder, capsys, objective, side, rises):
    """A short run on two pairs by the command line: the objective's own quantity moves its way, all files are whole."""
    beta = {"ipo": 0.05, "reference-free": 0.2}.get(objective, 0.5)
    argv = command(tmp_path, folder(), count=2, objective=objective, epochs=12, beta=beta, plot=True)
    assert train.main(argv) == 0
    rows = metrics(tmp_path / "out")
    assert (rows[-1][side] > rows[0][side]) == rises and len(rows) == 12
    output = capsys.readouterr().out
    assert output.startswith("config {") and "12/12" in output and "python rollout.py" in output
    state = json.loads((tmp_path / "out/state.json").read_text())
    assert state["done"] and state["step"] == 12 and state["config"]["objective"] == objective
    assert len(xml.dom.minidom.parse(str(tmp_path / "out/curves.svg")).getElementsByTagName("polyline")) == 6


def test_adapter_loads_with_peft_and_is_what_was_trained(tmp_path, folder):
    """PeftModel on the saved folder is the trained policy; its config has r, alpha, seven projections, no dropout."""
    assert train.main(command(tmp_path, folder(), count=4)) == 0
    config = json.loads((tmp_path / "out/adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["lora_dropout"]) == (32, 64, 0.0)
    assert set(config["target_modules"]) == set(train.PROJECTIONS)
    assert {weight.dtype for weight in adapter(tmp_path / "out").values()} == {torch.float32}
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder())
    row = row_of(random.Random(0))
    before = pair_logps(plain, row, "naive")
    loaded = PeftModel.from_pretrained(plain, str(tmp_path / "out"))
    assert not torch.allclose(pair_logps(loaded, row, "naive"), before, atol=0.01)
    rows, _ = train.load_rows(Config(pairs=str(tmp_path / "pairs.jsonl"), model="", out=""), tokenizer_of())
    with torch.no_grad():
        change = sum(pair_logps(loaded, row, "naive") for row in rows)
        with loaded.disable_adapter():
            change -= sum(pair_logps(loaded, row, "naive") for row in rows)
    assert change[0] - change[1] > 1


def test_the_same_command_gives_the_same_bytes_and_checkpointing_the_same_adapter(tmp_path, folder, capsys):
    """Two runs agree bitwise; another seed does not; naive and gradient checkpointing agree to 1e-4; --keep keeps."""
    outs = {}
    variants = {"a": {}, "b": {}, "seed": {"seed": 1}, "naive": {"impl": "naive"},
                "on": {"gradient_checkpointing": "on"}}
    for name, settings in variants.items():
        outs[name] = tmp_path / name
        assert train.main(command(tmp_path, folder(), out=outs[name], save_every=1, keep=2, lr=1e-3, **settings)) == 0
    first = adapter(outs["a"])
    assert same(first, adapter(outs["b"])) and metrics(outs["a"]) == metrics(outs["b"])
    assert not same(first, adapter(outs["seed"]))
    vector = train.flat(first.values())
    for name in ("naive", "on"):
        assert close(vector, train.flat(adapter(outs[name]).values()), 1e-3), name
    assert sorted(path.name for path in outs["a"].glob("*check*")) == ["checkpoint-000005", "checkpoint-000006"]
    assert train.main(command(tmp_path, folder(), out=outs["a"], save_every=1, keep=2, lr=1e-3)) == 0
    assert "is finished, nothing to do" in capsys.readouterr().out


def test_an_unfinished_run_is_not_continued_with_other_settings(tmp_path, folder):
    """--out of a run with another setting, other pairs, another base model, or a foreign adapter is refused by name."""
    assert train.main(command(tmp_path, folder(), count=4)) == 0
    for settings, word in (({"lr": 5e-3}, "--lr 0.01"), ({"count": 6}, "other pairs"),
                           ({"model": folder("llama")}, "other base model")):
        model = settings.pop("model", folder())
        if "base" in word:                              # an unfinished run: a finished one is answered before loading
            state = json.loads((tmp_path / "out/state.json").read_text())
            (tmp_path / "out/state.json").write_text(json.dumps({**state, "done": False}))
        with pytest.raises(InputError, match=f"another run .*{word}"):
            train.main(command(tmp_path, model, **{"count": 4, **settings}))
    (tmp_path / "out/state.json").unlink()
    with pytest.raises(InputError, match="holds an adapter of .* that this script did not write"):
        train.main(command(tmp_path, folder(), count=4))
    with pytest.raises(InputError, match="an adapter, not a base model"):
        train.main(command(tmp_path, str(tmp_path / "out"), count=4, out=tmp_path / "other"))


def test_a_loss_that_is_not_ln_2_is_refused(tmp_path, folder):
    """A base with dropout: policy and reference differ before training, by the self-check and by the first loss."""
    noisy = folder(attention_dropout=0.5)
    with pytest.raises(InputError, match="self-check on .*: prefix and naive differ"):
        train.main(command(tmp_path, noisy))
    with pytest.raises(InputError, match=r"the loss at step 0 is [\d.]+, not ln 2 = 0.693147"):
        train.main(command(tmp_path, noisy, impl="naive", out=tmp_path / "b"))
    assert not list((tmp_path / "b").glob("checkpoint*")) and not (tmp_path / "b/adapter_model.safetensors").exists()


def test_a_loss_that_is_no_number_saves_what_it_has(tmp_path, folder):
    """A rate of 1e30 destroys the policy in one step: the run ends with the reason, and the adapter so far is there."""
    with pytest.raises(InputError, match=r"step 2: the loss is (nan|inf).* the adapter of step 1 is saved"):
        train.main(command(tmp_path, folder(), lr=1e30, warmup=0.0))
    assert (tmp_path / "out/adapter_model.safetensors").exists() and len(metrics(tmp_path / "out")) == 1
    assert json.loads((tmp_path / "out/checkpoint-000001/state.json").read_text())["step"] == 1


def test_out_of_memory_names_the_flags_that_help():
    """A real allocation failure becomes one line with flags; any other error passes through."""
    with pytest.raises(InputError, match="out of memory; what helps: --gradient-checkpointing on"):
        with train.memory_hint(config_of("dpo")):
            torch.empty(1 << 60, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="size of tensor"):
        with train.memory_hint(config_of("dpo")):
            torch.ones(2) + torch.ones(3)


def test_defaults_are_the_document_s():
    """The document's recipe is what runs without flags."""
    stated = {"objective": "dpo", "beta": 0.05, "lr": 8e-6, "batch": 16, "max_length": 4500, "epochs": 1, "limit": 8000,
              "rank": 32, "alpha": 64}
    assert stated.items() <= {field.name: field.default for field in dataclasses.fields(Config)}.items()


def test_command_line_errors_are_one_line_and_exit_2(tmp_path, folder, capsys):
    """A real process ends on template drift with exit 2 and one plain line; a bad flag, model or file are as clear."""
    drift = {**pair_of(chat("a"), "b", "c"), "prompt_ids_sha256": "0" * 64}
    (tmp_path / "drift.jsonl").write_text(json.dumps(drift))
    child = process(command(tmp_path, folder(), count=0, pairs=tmp_path / "drift.jsonl"))
    error = child.communicate(timeout=120)[1]
    assert child.returncode == 2 and error.startswith("error: ") and error.count("\n") == 1
    assert "template drift" in error
    with pytest.raises(SystemExit, match="2"):
        train.main(command(tmp_path, folder()) + ["--nonsense"])
    assert "unrecognized arguments: --nonsense" in capsys.readouterr().err
    with pytest.raises(InputError, match="--model .*nowhere: "):
        train.main(command(tmp_path, str(tmp_path / "nowhere")))
    with pytest.raises(InputError, match="--save-every must be at least 1"):
        train.main(command(tmp_path, folder(), save_every=0))
    with pytest.raises(InputError, match="gone.jsonl: cannot be read"):
        train.main(command(tmp_path, folder(), count=0, pairs=tmp_path / "gone.jsonl"))


# ---------------------------------------------------------------------------------------------------------------------
# Kills and several processes

def resume_is_exact(tmp_path, model, kills, seed):
    """Kill a run `kills` times, at random moments after a step, let it finish, compare it with an undisturbed one."""
    rng, moments = random.Random(seed), []
    settings = {"count": 12, "epochs": 20, "save_every": 3}
    assert train.main(command(tmp_path, model, out=tmp_path / "whole", **settings)) == 0
    argv = command(tmp_path, model, out=tmp_path / "killed", **settings)
    for _ in range(kills):
        child = process(argv)
        next(line for line in child.stdout if line.startswith("step "))
        time.sleep(rng.random() * 0.5)
        child.send_signal(signal.SIGKILL)
        child.communicate()
        moments.append((child.returncode, (tmp_path / "killed/metrics.jsonl").read_bytes().count(b"\n")))
    assert all(code == -signal.SIGKILL and steps < 60 for code, steps in moments), f"killed too late: {moments}"
    final = process(argv)
    assert final.communicate(timeout=300)[1] == "" and final.returncode == 0
    assert same(adapter(tmp_path / "whole"), adapter(tmp_path / "killed")), moments
    rows = metrics(tmp_path / "killed")
    assert rows == metrics(tmp_path / "whole") and len(rows) == 60, moments
    states = [torch.load(tmp_path / name / "checkpoint-000060/optimizer.pt")["state"] for name in ("whole", "killed")]
    assert len(states[0]) == 28 and all(same(states[0][i], states[1][i]) for i in states[0])
    assert not list((tmp_path / "killed").glob(".*.tmp"))


def test_resume_after_kill_9_is_bitwise_exact(tmp_path, folder):
    """Killed at a random moment and run again: adapter, optimiser and metrics are those of an undisturbed run."""
    resume_is_exact(tmp_path, folder(), kills=1, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_resume_after_many_kills_is_bitwise_exact(tmp_path, folder, seed):
    """The same with four kills in a row."""
    resume_is_exact(tmp_path, folder(), kills=4, seed=100 + seed)


@pytest.mark.slow
def test_two_processes_equal_one(tmp_path, folder):
    """accelerate launch with two CPU processes gives the adapter and metrics of one to 1e-5, odd batches included."""
    argv = command(tmp_path, folder(), count=13, out=tmp_path / "one", lr=1e-3, objective="kto")
    assert train.main(argv) == 0
    argv[argv.index(str(tmp_path / "one"))] = str(tmp_path / "two")
    flags = "--cpu --num_processes 2 --num_machines 1 --mixed_precision no --dynamo_backend no --main_process_port 0"
    launch = [sys.executable, "-m", "accelerate.commands.launch", *flags.split(), str(ROOT / "train.py")]
    done = subprocess.run(launch + argv, capture_output=True, text=True, timeout=300, env=ONE_THREAD)
    assert done.returncode == 0, done.stderr[-2000:]
    one, two = (train.flat(adapter(tmp_path / name).values()) for name in ("one", "two"))
    assert close(one, two, 1e-5) and done.stdout.count("step 1/") == 1
    for a, b in zip(metrics(tmp_path / "one"), metrics(tmp_path / "two")):
        assert a == pytest.approx(b, rel=1e-4, abs=1e-5)
