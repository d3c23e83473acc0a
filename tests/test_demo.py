"""The tiny policy and the demonstration: the warm start saw what the harness sends, and the shipped folder loads."""

import json
import random
import subprocess
import sys

import deloop
import demo
import minigym
import pytest
import rollout
import torch
from conftest import ROOT
from transformers import AutoModelForCausalLM, AutoTokenizer

import tiny_policy
from tiny_policy import GYMS

FOLDER = ROOT / "tests" / "tiny"


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def tokenizers(tokenizer):
    """Family -> the tokenizer of the policy that works on it: the shipped one, or that of the hunts."""
    return dict.fromkeys(minigym.FAMILIES, tokenizer) | dict.fromkeys(
        minigym.HUNTS, tiny_policy.make_tokenizer(list(minigym.HUNTS)))


def test_the_shipped_checkpoint_is_an_ordinary_small_folder(tokenizer):
    """Property: transformers loads it by name alone; fp16 under 3 MB; greedy, ends a turn at its end-of-turn token."""
    model = AutoModelForCausalLM.from_pretrained(FOLDER)
    assert model.config.model_type == "qwen3" and model.dtype == torch.float16
    assert sum(p.numel() for p in model.parameters()) < 1_000_000
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) < 3_000_000
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == tokenizer.convert_tokens_to_ids("<|end|>")
    assert not model.generation_config.do_sample


def test_the_script_makes_the_shipped_tokenizer(tokenizer):
    """Property: the tokenizer made from nothing has the shipped one's vocabulary and template."""
    made = tiny_policy.make_tokenizer(list(minigym.FAMILIES))
    assert made.get_vocab() == tokenizer.get_vocab() and made.chat_template == tokenizer.chat_template


@pytest.mark.parametrize("family", minigym.ALL)
def test_an_observation_has_the_same_tokens_in_a_summary(tokenizers, family):
    """Property: an observation's first line is a run of the summary's tokens; every digit or label is one token."""
    encode = tiny_policy.Encoder(tokenizers[family])
    row = minigym.make_tasks("train", 1, 0, levels=(3,), families=(family,))[0]
    spec = json.loads(row["ability"].split("@", 2)[2])
    lines = [text.splitlines()[0] for text in minigym.reads(family, spec).values()]
    pieces = [encode.text(line) for line in lines]
    newline = encode.text("\n")
    assert encode.text("\n".join(lines)) == sum((piece + newline for piece in pieces), [])[:-1]
    assert [len(encode.text(digit)) for digit in "0123456789"] == [1] * 10
    if family in minigym.HUNTS:
        assert [len(encode.text(f"{letter}:")) for _, letter in minigym.HUNTS[family].places] == [1] * len(lines)


class Recorder(rollout.ScriptedPolicy):
    """The scripted agent as a policy of the harness: the tiny policy's tokens, perfect summaries, every prompt kept."""

    def __init__(self, tokenizer, agent):
        super().__init__(self.answer)
        self.tokenizer, self.agent, self.prompts, self.compressed = tokenizer, agent, [], False

    def encode(self, messages):
        messages = [{"role": "assistant", **message} for message in messages]  # a lone reply comes without a role
        return self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False,
                                                  enable_thinking=False)

    def answer(self, messages):
        self.prompts.append(self.encode(messages))
        if messages[-1]["content"].endswith(demo.SUMMARY_REQUEST):
            self.compressed = True
            return perfect_summary(messages)
        compressed, self.compressed = self.compressed, False
        return self.agent.act(compressed)[0]


@pytest.mark.parametrize("family", ["count", "charcount", "walk", "max", "boxes", "shelves"])
def test_the_warm_start_trains_on_the_prompts_the_harness_sends(tokenizers, family, tmp_path):
    """Property: driven by the scripted agent, rollout.py asks for exactly the prompts before the learnt tokens."""
    row = minigym.make_tasks("train", 1, 5, levels=(3,), families=(family,))[0]
    spec = json.loads(row["ability"].split("@", 2)[2])
    tokenizer = tokenizers[family]
    encode, learnt, budget = tiny_policy.Encoder(tokenizer), [], (GYMS["order"][0] | GYMS["hunts"][0])[family]
    seed = next(seed for seed in range(99) if len(tiny_policy.Agent(family, spec, random.Random(seed)).plan)
                > (11 if family in minigym.HUNTS else 8))
    agent = tiny_policy.Agent(family, spec, random.Random(seed))            # long enough to be compressed
    for ids, loss in tiny_policy.episode(agent, row["prompt"], encode, budget):
        learnt += [ids[:i] for i in range(len(ids)) if loss[i] and not loss[i - 1]]
    (tmp_path / "tasks.jsonl").write_text(json.dumps(row))
    policy = Recorder(tokenizer, tiny_policy.Agent(family, spec, random.Random(seed)))
    with minigym.serve(workers=1) as url:
        config = rollout.Config(server=url, tasks=str(tmp_path / "tasks.jsonl"), out=str(tmp_path / "out.jsonl"),
                                model="", budget=budget, summary_request=demo.SUMMARY_REQUEST, batch=1)
        assert rollout.rollout(config, policy)["done"] == 1
    assert policy.prompts == learnt
    assert any(tiny_policy.SUMMARY_HEADER in tokenizer.decode(ids) for ids in learnt)


def perfect_summary(messages):
    """The lines of the earlier summary and of the observations that leave, each once."""
    lines = messages[1]["content"].partition(tiny_policy.SUMMARY_HEADER + "\n")[2].splitlines()
    lines += [message["content"].splitlines()[0] for message in messages[3::2]]
    return "\n".join(dict.fromkeys(lines))


def test_two_short_warm_starts_give_the_same_weights(tokenizer):
    """Property: same seed, same machine, same bytes."""
    def weights():
        model = tiny_policy.make_model(tokenizer)
        source = tiny_policy.sequences(0, tiny_policy.Encoder(tokenizer), GYMS["order"][0])
        tiny_policy.warm_start(model, tiny_policy.batches(source, 4, tokenizer.pad_token_id), 3)
        return model.state_dict()

    first, second = weights(), weights()
    assert all(torch.equal(first[name], second[name]) for name in first)


def figure(low, high):
    return {"value": (low + high) / 2, "low": low, "high": high}


@pytest.mark.parametrize("number, missed", list(enumerate([
    {"loop_rate": {"A": figure(30, 40), "B": figure(5, 10), "B-A": figure(-60, -50)}},
    {"loop_rate": {"A": figure(60, 70), "B": figure(20, 30), "B-A": figure(-60, -50)}},
    {"loop_rate": {"A": figure(60, 70), "B": figure(5, 10), "B-A": figure(-60, -24)}},
    {"success": {"B-A": figure(-6, 9)}}, {"premature_done": {"B": figure(2, 3)}},
    {"unparsable": {"B": figure(2, 3)}}])))
def test_the_goals_are_judged_by_the_figures(number, missed):
    """Property: a run that meets every goal passes; each single miss fails just that goal."""
    good = {"loop_rate": {"A": figure(60, 70), "B": figure(5, 10), "B-A": figure(-60, -50)},
            "success": {"B-A": figure(-4, 9)}, "premature_done": {"B": figure(0, 1)}, "unparsable": {"B": figure(0, 1)}}
    assert all(demo.goals(good).values())
    reached = demo.goals({**good, **missed})
    assert [goal for goal, met in reached.items() if not met] == [list(reached)[number]]


def test_the_readme_holds_the_tables_of_the_stored_figures():
    """Property: what stands between the README's markers is, byte for byte, what --table writes there."""
    text = demo.README.read_text(encoding="utf-8")
    shown = text.partition("<!-- demonstration:begin -->\n")[2].partition("<!-- demonstration:end -->")[0]
    assert shown == demo.tables(demo.RESULTS)


def test_put_changes_nothing_outside_the_markers(tmp_path):
    """Property: all other bytes stay, a second time changes nothing, a README without markers is refused."""
    file = tmp_path / "README.md"
    file.write_text("before\n<!-- part:begin -->\nold\n<!-- part:end -->\nafter\n")
    for _ in range(2):
        demo.put(file, "part", "new\n")
        assert file.read_text() == "before\n<!-- part:begin -->\nnew\n<!-- part:end -->\nafter\n"
    file.write_text("no markers\n")
    with pytest.raises(deloop.InputError, match="lacks the line"):
        demo.put(file, "part", "new\n")


@pytest.mark.slow
def test_the_demonstration_reaches_its_goals_and_resumes(tmp_path):
    """Property: exit code 0 from nothing but the shipped checkpoint; run again, it appends nothing."""
    command = [sys.executable, demo.__file__, "--out", str(tmp_path)]
    assert subprocess.run(command).returncode == 0
    before = {file: file.read_bytes() for file in tmp_path.glob("*.jsonl")}
    assert subprocess.run(command).returncode == 0
    assert before == {file: file.read_bytes() for file in tmp_path.glob("*.jsonl")}


@pytest.mark.slow
def test_the_policy_can_be_made_again(tmp_path):
    """Property: the script's policy, made here from nothing, loops and succeeds often enough to give pairs."""
    subprocess.run([sys.executable, tiny_policy.__file__, "--out", str(tmp_path / "tiny")], check=True)
    minigym.main(["tasks", "--split", "heldout", "--count", "96", "--out", str(tmp_path / "tasks.jsonl")])
    with minigym.serve(workers=64) as url:
        files = [word for name, file in (("tasks", "tasks.jsonl"), ("model", "tiny"), ("out", "out.jsonl"))
                 for word in (f"--{name}", str(tmp_path / file))]
        subprocess.run([sys.executable, str(ROOT / "rollout.py"), "--server", url, *files, *demo.HARNESS], check=True)
    runs = list(deloop.read_trajectories(tmp_path / "out.jsonl"))
    looping = [any(deloop.loop_flags((s.action, s.observation) for s in deloop.steps(run))) for run in runs]
    assert sum(looping) >= 0.4 * len(runs) and sum(run["reward"] >= 1 for run in runs) >= 0.4 * len(runs)
