"""Makes the tiny policy of the demonstration from nothing: tokenizer, 0.89M-parameter Qwen3 model, warm start.

    python tests/tiny_policy.py                                 # 18 minutes on 2 busy cores; shipped as tests/tiny
    python tests/tiny_policy.py --gym hunts --out runs/hunts    # 11 minutes on 2 cores; for tests/search.py

The warm start imitates a scripted agent that writes perfect summaries and is imperfect: above all it repeats itself
(see Agent). Its repeats are likelier than any other call, so greedy decoding makes them for certain; so are its
recoveries, so greedy decoding also escapes, and loops give pairs. Nothing is injected at rollout time. These loops are
imitated from an agent built to loop: the demonstration shows that the method's whole line works, not that models loop.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch: spinning threads cost 10x on a loaded machine

import argparse
import functools
import itertools
import json
import math
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import minigym
import torch
from demo import BUDGET, SUMMARY_REQUEST
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

VOCABULARY = 768
SPECIAL = ["<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
# One digit a token, and one token for a digit with a colon: in "7:rope" the model can look up what followed "7:"
# earlier. The tokens are the same in an observation and on a line of a summary. All else may become long tokens.
LETTER = r"(?<=\"|top |low )[a-z](?=\")|\b[a-z]:"  # one that stands alone in a call, or in front of what lies there
PIECES = rf"\d:|\d|{LETTER}|\n\s*|(?:(?!{LETTER})[^\d\n])+"
GYMS = {  # name -> (budget of the harness by family, steps of exercises, steps of episodes, sequences a step)
    "order": (dict.fromkeys(minigym.FAMILIES, BUDGET), 140, 860, 40),
    "hunts": ({"boxes": 150, "jars": 150, "bags": 120, "shelves": 185}, 400, 1300, 32)}
SUMMARY_HEADER = "Summary of the earlier steps:"  # as rollout.py writes it
KEEP_LAST = 6


# ---------------------------------------------------------------- the scripted agent


def call_text(action: dict) -> str:
    return f"<|FunctionCallBegin|>[{json.dumps(action)}]<|FunctionCallEnd|>"


class Agent:
    """The imperfect agent: it sees the truth and has a plan - in a hunt a random order of places, else the one order -
    and repeats itself with these probabilities."""

    reorient = 0.7  # right after a compression it starts over: makes the first call of its plan again
    check = 0.65  # asks again for an element that matters: one to be counted, a 9 for max, a 0 for min
    stuck = 0.3  # after a repeat, repeats again instead of going on; never in a hunt, where each way on is unlikely
    stray = 0.03  # repeats any earlier call
    wrong = 0.05  # submits a wrong answer

    def __init__(self, family: str, spec: dict, rng: random.Random):
        self.env, self.rng, self.family, self.target = minigym.Env(family, spec), rng, family, spec["target"]
        self.plan: list[dict] = []
        if family in minigym.HUNTS:
            self.stuck = 0.0
            minigym.HUNTS[family].solve(self.target, self._planned, rng)
        else:
            minigym.solve(family, self.target, self._planned)
        self.env.reset()
        self.made: list[dict] = []  # calls so far
        self.read = 0  # calls of the plan made so far
        self.repeated = False

    def _planned(self, action: dict) -> str:
        self.plan.append(action)
        return self.env.step(json.dumps(action))[1]

    def act(self, compressed: bool) -> tuple[str, str]:
        """One turn -> (assistant message, observation)."""
        action = self._repeat(compressed)
        self.repeated = action is not None
        if action is None:
            action = self.plan[self.read]
            self.read += 1
        if action["name"] == "Done" and self.rng.random() < self.wrong:
            action = {"name": "Done", "parameters": {"answer": self._wrong()}}
        self.made.append(action)
        return call_text(action), self.env.step(json.dumps(action))[1]

    def _repeat(self, compressed: bool) -> dict | None:
        """The earlier call that is made again now, or None to go on with the plan."""
        if not self.made:
            return None
        draw = self.rng.random
        if compressed:
            return self.plan[0] if draw() < self.reorient else None
        if self.repeated:
            return self.made[-1] if draw() < self.stuck else None
        if self._matters(self.made[-1]) and draw() < self.check:
            return self.made[-1]
        return self.rng.choice(self.made) if draw() < self.stray else None

    def _wrong(self):
        """Any answer; a wrong one, most often."""
        hunt = minigym.HUNTS.get(self.family)
        return self.rng.choice(list(hunt.places.values())) if hunt else self.rng.randrange(10)

    def _matters(self, action: dict) -> bool:
        value = self.env.reads[action["name"], *action["parameters"].values()].splitlines()[0].partition(":")[2]
        notable = {"max": "9", "min": "0"}.get(self.family, str(self.target))
        return self.family in ("max", "min", "count", "charcount") and value == notable


# ---------------------------------------------------------------- episodes as training sequences


class Encoder:
    """Token ids of messages, exactly as the chat template renders them (a test compares the two)."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast):
        self.text = functools.lru_cache(maxsize=100_000)(lambda text: tokenizer.encode(text, add_special_tokens=False))
        self.role = {role: tokenizer.convert_tokens_to_ids(f"<|{role}|>") for role in ("system", "user", "assistant")}
        self.end = tokenizer.convert_tokens_to_ids("<|end|>")

    def message(self, message: dict) -> list[int]:
        return [self.role[message["role"]], *self.text(message["content"]), self.end]


def episode(agent: Agent, head: list[dict], encode: Encoder, budget: float) -> list[tuple[list[int], list[bool]]]:
    """One scripted episode -> (ids, which ids carry loss) of each stretch between compressions and each summary."""
    messages, sequences, summary, start = list(head), [], "", len(head)  # from start on, messages are still shown
    task = dict(head[1])
    ids, loss = _render([head[0], task], encode)
    for _ in range(30):
        compressed = len(ids) + 1 > budget and len(messages) - KEEP_LAST > start
        if compressed:
            end = len(messages) - KEEP_LAST
            request = dict(messages[end - 1], content=f"{messages[end - 1]['content']}\n\n{SUMMARY_REQUEST}")
            asked, _ = _render([head[0], task, *messages[start : end - 1], request], encode)
            lines = [observation["content"].splitlines()[0] for observation in messages[start + 1 : end : 2]]
            summary = "\n".join(dict.fromkeys([*summary.splitlines(), *lines]))
            reply = encode.message({"role": "assistant", "content": summary})
            sequences += [(ids, loss), (asked + reply, [False] * (len(asked) + 1) + [True] * (len(reply) - 1))]
            start, task["content"] = end, f"{head[1]['content']}\n\n{SUMMARY_HEADER}\n{summary}"
            ids, loss = _render([head[0], task, *messages[start:]], encode)
        said, observation = agent.act(compressed)
        for message in ({"role": "assistant", "content": said}, {"role": "user", "content": observation}):
            messages.append(message)
            piece = encode.message(message)
            ids, loss = ids + piece, loss + [False] + [message["role"] == "assistant"] * (len(piece) - 1)
        if agent.env.finished:
            break
    return [s for s in [*sequences, (ids, loss)] if any(s[1])]


def _render(messages: list[dict], encode: Encoder) -> tuple[list[int], list[bool]]:
    ids = [i for message in messages for i in encode.message(message)]
    return ids, [False] * len(ids)


def sequences(seed: int, encode: Encoder, budgets: dict[str, int]) -> Iterator[tuple[list[int], list[bool]]]:
    """Endless training sequences over all families of budgets; only instances of the training half."""
    rng = random.Random(f"warm start/{seed}")
    while True:
        family, level = rng.choice(list(budgets)), rng.choice((1, 2, 3))
        values, target = minigym.ALL[family].draw(rng, rng.randint(*minigym.LEVELS[level]))
        spec = {"values": values, "target": target}
        if minigym.split_of(family, spec) != "train":
            continue
        # One episode in five has more room, one in ten all of it, so that the policy also works with other memories.
        budget = budgets[family]
        room = rng.choice([budget] * 8 + [rng.randint(budget, 2 * budget), math.inf])
        yield from episode(Agent(family, spec, rng), minigym.prompt(family, target), encode, room)


def drills(seed: int, encode: Encoder, families: Sequence[str]) -> Iterator[tuple[list[int], list[bool]]]:
    """Endless exercises. Lines of a summary in; out come the same lines, sorted; of a hunt the lines as they are, or
    calls for the places not seen.

    They teach in minutes to look a label up and copy what follows it, and in hunts to leave out what was seen; from
    episodes alone, where few tokens carry that signal, it takes far longer than the whole warm start.
    """
    rng = random.Random(f"drills/{seed}")
    hunts = [minigym.HUNTS[family] for family in families if family in minigym.HUNTS]
    letters = {encode.text(letter)[0] for hunt in hunts for place in hunt.places for letter in place[1]}
    while True:
        if hunts:
            asked, said = _hunt_drill(rng.choice(hunts), rng)
        else:
            values = rng.choice((range(10), minigym.SYMBOLS, (*minigym.ITEMS, "key")))
            lines = [f"{label}:{rng.choice(values)}" for label in rng.sample(range(10), rng.randint(2, 10))]
            asked, said = "\n".join(lines) + f"\n\n{SUMMARY_REQUEST}", "\n".join(sorted(lines))
        ids, reply = (encode.message({"role": role, "content": text})
                      for role, text in (("user", asked), ("assistant", said)))
        calls = not asked.endswith(SUMMARY_REQUEST)  # of these only the places are learnt: the rest would drown them
        yield ids + reply, [False] * (len(ids) + 1) + [not calls or i in letters for i in reply[1:]]


def _hunt_drill(hunt: minigym.Hunt, rng: random.Random) -> tuple[str, str]:
    """Some places were seen: copy what lies there, or call for up to 12 of the others, in any order."""
    order = rng.sample(list(hunt.places), len(hunt.places))
    seen = rng.randint(0, len(order) - 1)
    lines = "\n".join(f"{hunt.places[place]}:{rng.choice(minigym.THINGS)}" for place in order[:seen])
    if rng.random() < 0.15:
        return f"{lines}\n\n{SUMMARY_REQUEST}", lines
    return lines, "".join(call_text(minigym.action(*place)) for place in order[seen : seen + 12])


# ---------------------------------------------------------------- tokenizer and model


def make_tokenizer(families: Sequence[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE over the gym's own texts, with role markers, one end-of-turn token and a chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(PIECES), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=SPECIAL, show_progress=False,
                                  initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()))
    tokenizer.train_from_iterator(_texts(families), trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<|pad|>", eos_token="<|end|>",
                                   additional_special_tokens=SPECIAL[2:], clean_up_tokenization_spaces=False)
    fast.chat_template = TEMPLATE
    return fast


def _texts(families: Sequence[str]) -> Iterator[str]:
    """What the tokenizer is trained on: prompts, calls, observations and summary texts of every family."""
    rng = random.Random("tokenizer")
    for family in families:
        for _ in range(40):
            values, target = minigym.ALL[family].draw(rng, 8)
            agent = Agent(family, {"values": values, "target": target}, rng)
            yield from (message["content"] for message in minigym.prompt(family, target))
            yield f"{SUMMARY_HEADER}\n"
            yield SUMMARY_REQUEST
            while not agent.env.finished:
                yield from agent.act(False)


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=4096, tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id, bos_token_id=None))


# ---------------------------------------------------------------- warm start


def batches(source: Iterator, size: int, pad: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """ids and labels (-100: no loss), each (size, T); sequences of like length share a batch, to pad less."""
    while True:
        pool = sorted((next(source) for _ in range(16 * size)), key=lambda sequence: len(sequence[0]))
        groups = [pool[i : i + size] for i in range(0, len(pool), size)]
        random.Random(len(pool[0][0])).shuffle(groups)
        for group in groups:
            width = max(len(ids) for ids, _ in group)
            ids = torch.tensor([ids + [pad] * (width - len(ids)) for ids, _ in group])
            loss = torch.tensor([loss + [False] * (width - len(loss)) for _, loss in group])
            yield ids, ids.masked_fill(~loss, -100)


def warm_start(model: Qwen3ForCausalLM, source: Iterator, steps: int) -> None:
    """Cross-entropy on the agent's own tokens; Muon on the matrices, AdamW on embeddings and norms."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    rest = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    optimisers = [torch.optim.Muon(matrices, lr=0.02, weight_decay=0.01),
                  torch.optim.AdamW(rest, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0)]
    rate = lambda step: min(1, (step + 1) / 20, 0.02 + (steps - step) / (0.5 * steps))  # flat, then linear to 2%
    schedules = [torch.optim.lr_scheduler.LambdaLR(optimiser, rate) for optimiser in optimisers]
    began, recent = time.monotonic(), []
    for step in range(steps):
        ids, labels = next(source)
        keep = labels[:, 1:] != -100
        hidden = model.model(input_ids=ids).last_hidden_state[:, :-1][keep]  # logits only where a token is learnt
        loss = torch.nn.functional.cross_entropy(model.lm_head(hidden), labels[:, 1:][keep])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimiser, schedule in zip(optimisers, schedules):
            optimiser.step()
            schedule.step()
            optimiser.zero_grad()
        recent.append(loss.item())
        if (step + 1) % 25 == 0:
            mean, seconds = sum(recent) / len(recent), time.monotonic() - began
            print(f"step {step + 1}/{steps}  loss {mean:.4f}  {seconds:.0f} s", flush=True)
            recent.clear()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "tiny")
    parser.add_argument("--gym", choices=GYMS, default="order", help="families it learns (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    budgets, drill_steps, steps, batch = GYMS[args.gym]
    tokenizer = make_tokenizer(list(budgets))
    model = make_model(tokenizer)
    encode, pad = Encoder(tokenizer), tokenizer.pad_token_id
    source = itertools.chain(
        itertools.islice(batches(drills(args.seed, encode, list(budgets)), 64, pad), drill_steps),
        batches(sequences(args.seed, encode, budgets), batch, pad))
    warm_start(model, source, drill_steps + steps)
    model.generation_config = GenerationConfig(do_sample=False, eos_token_id=tokenizer.eos_token_id,
                                               pad_token_id=tokenizer.pad_token_id)
    model.half().save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)


if __name__ == "__main__":
    main()
