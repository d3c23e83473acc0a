"""The whole method on a laptop: python tests/demo.py [--out runs/demo] [--seed 0]

Starts the miniature CodeGym, then runs the repository's own commands one after another on the shipped tiny policy and
prints each before it runs; ends with the tables, a paragraph in plain words and the goals. Exit code 1: a goal was
missed. A second run goes on where the first one stopped; what is finished is not run again.

    python tests/demo.py --store        # after seeds 0, 1 and 2: their figures into tests/results/demo/ and the README
    python tests/demo.py --table        # the README's tables from tests/results/demo/ alone

What was searched for before these figures came out: the form of the gym's observations, the tokenizer's label tokens,
the copying exercises and the length of the warm start (five warm starts, judged by their loss and by the base's
rollouts); BUDGET (on the scripted agent alone); which elements the scripted agent asks for again, so that fewer pairs
end in Done. The settings of DPO below were the first ones tried.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import minigym

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
sys.path.insert(0, str(ROOT))
import deloop
import eval as evaluation

RESULTS, README = TESTS / "results", ROOT / "README.md"
BUDGET, SUMMARY_REQUEST = 134, "Summarise."  # the warm start of the policy used the same two
HARNESS = ["--budget", str(BUDGET), "--summary-request", SUMMARY_REQUEST, "--max-new-tokens", "32",
           "--summary-tokens", "64", "--batch", "64"]
DPO = ["--beta", "2.0", "--lr", "3e-4", "--epochs", "2", "--batch", "16", "--limit", "640"]
TASKS = {"train": 384, "heldout": 256, "family": 96}
SEEDS = (0, 1, 2)
SHOWN = {  # set of tasks -> the figures that the README shows
    "heldout": "loop_rate,loop_rate_6_10,loop_rate_11_20,loop_steps,success,unfinished,premature_done,unparsable,steps,"
               "tokens,compacted,failure_loop,failure_no_loop",
    "family": "loop_rate,loop_steps,success,premature_done,unparsable"}


def run(*command, capture: bool = False) -> str:
    """Print one command as a person would type it, run it, stop when it fails; returns what it wrote if capture."""
    words = [os.path.relpath(word, ROOT) if isinstance(word, Path) else str(word) for word in command]
    print(f"\n$ python {shlex.join(words)}", flush=True)
    began = time.monotonic()
    done = subprocess.run([sys.executable, *words], cwd=ROOT, check=True, text=True,
                          stdout=subprocess.PIPE if capture else None, env={"OMP_WAIT_POLICY": "passive", **os.environ})
    print(f"({time.monotonic() - began:.0f} s)", flush=True)
    return done.stdout


def rollout(url: str, out: Path, split: str, adapter: Path | None = None) -> Path:
    """Roll the base or the trained policy out on one task file; returns the trajectory file."""
    file = out / (f"{split}-{adapter.name}.jsonl" if adapter else f"{split}-base.jsonl")
    run("rollout.py", "--server", url, "--tasks", out / f"{split}.tasks.jsonl", "--model", TESTS / "tiny", *HARNESS,
        *(["--adapter", adapter] if adapter else []), "--out", file)
    return file


def pipeline(out: Path, seed: int) -> tuple[Path, list[Path], list[Path]]:
    """Every command of the method, in order; returns the pairs and [base, trained] rollouts of both held-out sets."""
    adapter, pairs = out / f"seed{seed}", out / "pairs.jsonl"
    for split, count in TASKS.items():
        run("tests/minigym.py", "tasks", "--split", split, "--count", count, "--out", out / f"{split}.tasks.jsonl")
    with minigym.serve(workers=64) as url:
        base = rollout(url, out, "train")
        run("deloop.py", "detect", base)
        run("deloop.py", "mine", base, "--out", pairs)
        run("train.py", "--pairs", pairs, "--model", TESTS / "tiny", "--out", adapter, "--seed", seed, *DPO)
        sets = [[rollout(url, out, split, which) for which in (None, adapter)] for split in ("heldout", "family")]
    for files in sets:
        run("eval.py", *files)
    return pairs, *sets


def figures(files: list[Path]) -> dict[str, dict]:
    """eval.py's figures: metric -> {"A": base, "B": trained, "B-A": difference}, each with value, low and high."""
    result = json.loads(run("eval.py", *files, "--json", capture=True))
    return {metric["key"]: metric["figures"] for metric in result["metrics"]}


def goals(ours: dict[str, dict]) -> dict[str, bool]:
    """What the run must show on the held-out tasks, in words, and whether it did."""
    base, trained = ours["loop_rate"]["A"]["value"], ours["loop_rate"]["B"]["value"]
    return {
        "base loop rate at least 40%": base >= 40,
        "trained loop rate at most a third of the base's": trained <= base / 3,
        "95% interval of the difference below -25 points": ours["loop_rate"]["B-A"]["high"] < -25,
        "success not lower: interval of the difference above -5 points": ours["success"]["B-A"]["low"] > -5,
        "premature Done at most 2%": ours["premature_done"]["B"]["value"] <= 2,
        "unparsable turns at most 2%": ours["unparsable"]["B"]["value"] <= 2,
    }


def story(ours: dict[str, dict], moved: dict[str, dict], pairs: Path) -> str:
    """The run in plain words, every number taken from it."""
    chosen = [json.loads(line)["chosen"][0]["content"] for line in pairs.read_text(encoding="utf-8").splitlines()]
    final = sum('"Done"' in text for text in chosen) / len(chosen)

    def change(of: dict, key: str) -> str:
        base, trained, gap = (of[key][run] for run in ("A", "B", "B-A"))
        return (f"{base['value']:.1f}% to {trained['value']:.1f}% "
                f"(difference {gap['value']:+.1f} points, 95% interval {gap['low']:+.1f} to {gap['high']:+.1f})")

    return textwrap.fill(
        f"What happened: the tiny policy worked through {TASKS['train']} training tasks; the exact-repeat rule found "
        f"its loops and made {len(chosen)} pairs of them (chosen is the final answer in {final:.0%}), without reward, "
        f"answers or a judge. After DPO on these pairs the share of held-out tasks with a loop went from "
        f"{change(ours, 'loop_rate')}, success from {change(ours, 'success')}, steps per task from "
        f"{ours['steps']['A']['value']:.1f} to {ours['steps']['B']['value']:.1f}. On {TASKS['family']} tasks of a "
        f"family that gave no pairs ({minigym.HELD_OUT_FAMILY}) the loop rate went from {change(moved, 'loop_rate')} "
        f"and success from {change(moved, 'success')}. What it does not show: that language models loop. This policy "
        "imitates a scripted agent that was built to repeat itself, on tasks with about a dozen sensible calls, so "
        "fewer loops come cheaply here. How large the effect is on real models, and which objective is best, has to be "
        "measured on them.", 110)


# ---------------------------------------------------------------- the README's tables


def store(out: Path, results: Path) -> None:
    """eval.py's figures of all seeds on both held-out sets, into results/demo."""
    (results / "demo").mkdir(parents=True, exist_ok=True)
    for split, keys in SHOWN.items():
        base, *trained = [out / f"{split}-{policy}.jsonl" for policy in ("base", *(f"seed{seed}" for seed in SEEDS))]
        seeds = ",".join(os.path.relpath(file, ROOT) for file in trained)
        found = run("eval.py", base, seeds, "--json", "--only", keys, capture=True)
        deloop.write_atomic(results / "demo" / f"{split}.json", found)


def tables(results: Path) -> str:
    """What eval.py --markdown prints for the stored figures of both held-out sets, the notes once, at the end."""
    shown = [evaluation.as_markdown(json.loads((results / "demo" / f"{split}.json").read_text())).split("\n\n")
             for split in SHOWN]
    return "\n\n".join([part for runs, table, _ in shown for part in (runs, table)] + [shown[0][-1]])


def put(readme: Path, name: str, text: str) -> None:
    """Replace what stands between two markers of the README."""
    begin, end = f"<!-- {name}:begin -->\n", f"<!-- {name}:end -->"
    before, found, rest = readme.read_text(encoding="utf-8").partition(begin)
    _, closed, after = rest.partition(end)
    if not (found and closed):
        raise deloop.InputError(f"{readme} lacks the line {begin.strip()} or, after it, {end}")
    deloop.write_atomic(readme, before + begin + text + end + after)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "demo", help="folder of all that is written")
    parser.add_argument("--seed", type=int, default=0, help="seed of the training (default: 0)")
    parser.add_argument("--store", action="store_true", help="store the figures of three finished seeds, write the "
                        "README's tables, run nothing")
    parser.add_argument("--table", action="store_true", help="only write the README's tables from the stored figures")
    args = parser.parse_args(argv)
    out, began = args.out.resolve(), time.monotonic()
    try:
        if args.store:
            store(out, RESULTS)
        if args.store or args.table:
            put(README, "demonstration", tables(RESULTS))
            return 0
        out.mkdir(parents=True, exist_ok=True)
        pairs, heldout, family = pipeline(out, args.seed)
        ours, moved = figures(heldout), figures(family)
    except subprocess.CalledProcessError as error:
        print(f"error: the command above failed (exit code {error.returncode}); run this again to go on from here",
              file=sys.stderr)
        return 2
    print(f"\n{story(ours, moved, pairs)}\n")
    reached = goals(ours)
    for goal, met in reached.items():
        print(f"{'met' if met else 'NOT MET'}: {goal}")
    print(f"{time.monotonic() - began:.0f} s in all; everything is in {out}")
    return 0 if all(reached.values()) else 1


if __name__ == "__main__":
    deloop.run(main)
