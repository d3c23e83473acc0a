"""How fast rollout.py is on this machine, in one run, with exactness.

    python tests/bench_rollout.py            # about 4 minutes on 2 cores; --model DIR for a model of your own

Decoding: the same 16 episodes of 10 turns on the miniature server, one episode at a time (each prompt computed anew;
cache kept over the turns) and all in one batch. tokens/s are generated tokens over the time in the model, then over
wall time with the server's calls; "equal" counts the episodes whose every token equals that of the first way. Client:
milliseconds of one executed step in a scripted episode, beyond what the same HTTP calls cost a bare client.
"""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import io
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch: spinning threads cost 10x on a loaded machine
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

TINY = str(ROOT / "tests" / "tiny")

import minigym

import deloop
import rollout
from deloop import option


@dataclasses.dataclass(frozen=True)
class Config:
    model: str | None = option("one model folder to measure instead of the two", None)
    episodes: int = option("episodes", 16)
    turns: int = option("turns of each", 10)
    new_tokens: int = option("tokens of a reply at most", 24)
    dtype: str = option("dtype of the model", "float32")
    threads: int = option("torch threads, 0: torch's own choice", 0)


def random_qwen3(folder: str) -> str:
    """An untrained 20M-parameter Qwen3 with the tiny policy's tokenizer, saved as a normal transformers folder."""
    import torch
    import transformers
    tokenizer = transformers.AutoTokenizer.from_pretrained(TINY)
    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=384, intermediate_size=1536, num_hidden_layers=9, num_attention_heads=6,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=32768, initializer_range=0.08,
        eos_token_id=tokenizer.eos_token_id, bos_token_id=None, tie_word_embeddings=True))
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    return folder


class Timed(rollout.LocalPolicy):
    """The policy with a clock: seconds spent in decoding."""
    decoded = 0.0

    def complete(self, asked):
        began = time.monotonic()
        answers = super().complete(asked)
        self.decoded += time.monotonic() - began
        return answers


class Forgetful(Timed):
    """The same without a cache between turns: what one-at-a-time generation usually does."""

    def complete(self, asked):
        self.rows = {}
        return super().complete(asked)


WAYS = (("one at a time, prompt anew", Forgetful, 1), ("one at a time, cache kept", Timed, 1),
        ("all in one batch", Timed, 0))


def decoding(model: str, url: str, folder: str, config: Config) -> None:
    """Print a line for each way of decoding."""
    tasks = f"{folder}/tasks.jsonl"
    Path(tasks).write_text("".join(json.dumps(row) + "\n" for row in minigym.make_tasks("train", config.episodes, 0)))
    first, base = None, None
    for name, Policy, batch in WAYS:
        settings = rollout.Config(
            server=url, tasks=tasks, out=f"{folder}/out.jsonl", model=model, memory="full", overwrite=True,
            batch=batch or config.episodes, max_turns=config.turns, max_new_tokens=config.new_tokens,
            dtype=config.dtype)
        policy = Policy(settings)
        with contextlib.redirect_stdout(io.StringIO()):
            began = time.monotonic()
            rollout.rollout(settings, policy)
            seconds = time.monotonic() - began
        found = {each["task_id"]: each for each in deloop.read_trajectories(settings.out)}
        ids = {key: [turn["completion_ids"] for turn in each["turns"]] for key, each in found.items()}
        made = sum(turn["completion_tokens"] for each in found.values() for turn in each["turns"])
        decoded = policy.decoded
        first, base = first or ids, base or made / decoded
        equal = sum(ids[key] == first[key] for key in ids)
        print(f"  {name:26} {made / decoded:6.0f} tokens/s {made / decoded / base:6.2f}x, with the server "
              f"{made / seconds:6.0f} tokens/s {len(ids) / seconds * 60:7.1f} episodes/min, "
              f"{equal}/{len(ids)} equal", flush=True)


def client(url: str, folder: str) -> None:
    """Print the client's milliseconds a step beyond the server's own; the best of three rounds of each."""
    tasks = f"{folder}/steps.jsonl"
    Path(tasks).write_text(json.dumps(minigym.make_tasks("train", 1, 0)[0]) + "\n")
    settings = rollout.Config(server=url, tasks=tasks, out=f"{folder}/steps.out.jsonl", model="scripted", batch=1,
                              memory="summary", samples=10, overwrite=True)
    ours, theirs = min(scripted(settings) for _ in range(3)), min(bare(settings) for _ in range(3))
    print(f"  10 scripted episodes of 30 steps, one at a time, with start, stop, log: {ours:.2f} ms a step; "
          f"a bare client {theirs:.2f} ms; beyond it {ours - theirs:.2f} ms")


def scripted(settings: rollout.Config) -> float:
    """Milliseconds of a step of rollout.py, everything included but a model."""
    call = f'{rollout.BEGIN}[{{"name": "Get", "parameters": {{"index": 0}}}}]{rollout.END}'
    with contextlib.redirect_stdout(io.StringIO()):
        began = time.monotonic()
        rollout.rollout(settings, rollout.ScriptedPolicy(lambda messages: call))
        return (time.monotonic() - began) / 300 * 1e3


def bare(settings: rollout.Config) -> float:
    """Milliseconds of a step's two HTTP calls with nothing around them."""
    env = rollout.CodeGymPool(settings).open()
    env.start(rollout.read_tasks(settings.tasks)[0])
    connection = http.client.HTTPConnection(env.worker.split("//")[1])
    body = json.dumps({"session_id": env.session, "action": '{"name": "Get", "parameters": {"index": 0}}'})
    began = time.monotonic()
    for _ in range(300):
        for method, path, data in (("POST", "/step", body), ("GET", f"/is_done?session_id={env.session}", None)):
            connection.request(method, path, data)
            connection.getresponse().read()
    seconds = time.monotonic() - began
    connection.close()
    env.close()
    return seconds / 300 * 1e3


@contextlib.contextmanager
def server(workers: int) -> Iterator[str]:
    """The miniature server in a process of its own, as a real one is; yields its URL."""
    command = [sys.executable, str(ROOT / "tests" / "minigym.py"), "serve", "--workers", str(workers)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process.stdout.readline().strip()
        finally:
            process.terminate()


def main(argv: list[str]) -> int:
    config = deloop.config_from_args(Config, argv, __doc__)
    import torch
    if config.threads:
        torch.set_num_threads(config.threads)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {os.cpu_count()} cores, "
          f"load {os.getloadavg()[0]:.1f}")
    with tempfile.TemporaryDirectory() as folder, server(config.episodes) as url:
        print("client")
        client(url, folder)
        models = [config.model] if config.model else [TINY, random_qwen3(f"{folder}/random")]
        for model in models:
            print(f"{Path(model).name}: {config.episodes} episodes x {config.turns} turns, {config.dtype}")
            decoding(model, url, folder, config)
    return 0


if __name__ == "__main__":
    deloop.run(main)
