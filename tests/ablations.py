"""The ablations that carry the document's argument, on the tiny policy: python tests/ablations.py [--only GROUP]

A cell is one row of GROUPS with one seed: mine pairs, train, roll out on the held-out tasks, evaluate, by the
repository's own commands with the settings of tests/demo.py. Its result is a small JSON file in tests/results/; a cell
that has one is not run again. The README's table is written from these files alone: --table writes it without running.

    python tests/ablations.py                       # every cell, then the table
    python tests/ablations.py --only gradient --seeds 5
    python tests/ablations.py --table

Verdicts are a rule, no judgement: the loop rate of a row minus that of the row it is compared with, both pooled over
their seeds, on the same tasks, with a 95% interval from a bootstrap over tasks. It excludes 0 on the side where the
document has the row: agrees. It includes 0: does not separate. It excludes 0 on the other side: disagrees.
"""
from __future__ import annotations

import argparse
import datetime
import functools
import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

import demo
import minigym
from demo import README, RESULTS, deloop, evaluation

TINY = demo.TESTS / "tiny"
LIMIT = int(demo.DPO[demo.DPO.index("--limit") + 1])
SEEDS = 3
# The document's 8,192 / 4,096 / 2,048 tokens, scaled to the demonstration's budget; half of it would hold less than the
# task and the six messages that are always kept.
WIDE, TIGHT = ["--budget", str(demo.BUDGET * 3 // 2)], ["--budget", str(demo.BUDGET * 4 // 5)]


class Row(NamedTuple):
    """One line of a table: a policy under one memory, all its seeds together."""
    name: str                       # its results: tests/results/NAME-SEED.json
    document: str                   # the document's loop rate, "" where it gives none
    than: str = ""                  # row it is compared with
    expected: str = ""              # "lower" or "higher": the document's side of that row, "" where it gives none
    train: tuple[str, ...] = ()     # flags of train.py beside demo.DPO
    pairing: str = "escape"         # deloop.py mine --pairing
    share: float = 1.0              # of the pairs, drawn by train.py --limit
    after: str = ""                 # row whose policy, adapter merged into the base, the training starts from
    policy: str = ""                # row whose policy is used as it is; "base": the untrained one; "": its own
    harness: tuple[str, ...] = ()   # flags of rollout.py beside demo.HARNESS

    def seeds(self, count: int) -> range:
        """Its seeds; greedy rollouts of the untrained policy have one."""
        return range(1 if self.policy == "base" else count)


def against_dpo(name: str, flag: str, document: str = "", expected: str = "higher") -> Row:
    """A row that differs from dpo in one flag of train.py, whose value is the row's name."""
    return Row(name, document, "dpo", expected, (flag, name))


def memory(name: str, document: str, expected: str, harness: list[str]) -> list[Row]:
    """The base and the trained policy under one memory; the document has figures for the base alone."""
    return [Row(f"base-{name}", document, "base", expected, policy="base", harness=tuple(harness)),
            Row(f"dpo-{name}", "", f"base-{name}", policy="dpo", harness=tuple(harness))]


GROUPS = {  # group -> (the document's ordering, rows)
    "method": ("DPO on the mined pairs lowers the loop rate.", [
        Row("base", "57.3", policy="base"), Row("dpo", "6.1", "base", "lower")]),
    "objectives": ("DPO below IPO, KTO, DPO with a likelihood anchor and SFT on the chosen side, in this order, all on "
                   "the same pairs. It gives no figure for unlikelihood of the rejected side alone.", [
                       against_dpo("ipo", "--objective", "11.7"),
                       Row("ipo-tau-1-4", "11.7", "dpo", "higher", ("--objective", "ipo", "--beta", "0.25")),
                       against_dpo("kto", "--objective", "12.6"),
                       against_dpo("dpo-anchor", "--objective", "27.0"), against_dpo("sft", "--objective", "37.7"),
                       against_dpo("unlikelihood", "--objective", expected="")]),
    "gradient": ("The plus term alone, a weighted SFT, cannot suppress loops (app. H.3). It gives no figures.", [
        against_dpo("plus", "--ablate"), against_dpo("minus", "--ablate", expected=""),
        against_dpo("freeze-g", "--ablate", expected="")]),
    "pairs": ("Fewer pairs leave more loops: 1,000, 2,000, 4,000 of 8,000 pairs. Here as there, at equal epochs, fewer "
              "pairs are also fewer steps.", [
        Row("pairs-1-8", "45.1", "dpo", "higher", share=1 / 8), Row("pairs-1-4", "34.5", "dpo", "higher", share=1 / 4),
        Row("pairs-1-2", "18.6", "dpo", "higher", share=1 / 2)]),
    "pairings": ("The escape as chosen side (5.7) below a random later action, another pair's chosen side and random "
                 "pairs. It gives no figure for the first different action.", [
                     Row("random", "41.9", "dpo", "higher", pairing="random"),
                     Row("other", "36.1", "dpo", "higher", pairing="other"),
                     Row("shuffled", "54.8 to 69.5", "dpo", "higher", pairing="shuffled"),
                     Row("first-different", "", "dpo", "", pairing="first-different")]),
    "contexts": ("The base loops least with its full history (29.0), and more the less of it is left: summary at "
                 "8,192 (51.0), 4,096 (57.3: base), 2,048 tokens (64.7), truncation (65.3). It gives no figures for "
                 "the trained policy.", [
                     *memory("full", "29.0", "lower", ["--memory", "full"]), *memory("wide", "51.0", "lower", WIDE),
                     *memory("tight", "64.7", "higher", TIGHT),
                     *memory("truncate", "65.3", "higher", ["--memory", "truncate"])]),
    "after": ("SFT on the chosen side after DPO brings loops back (6.5 to 29.7).", [
        Row("sft-after-dpo", "29.7", "dpo", "higher", ("--objective", "sft"), after="dpo")]),
}
ROWS = {row.name: row for _, rows in GROUPS.values() for row in rows}
FIGURES = ("loop_rate", "loop_steps", "success", "steps", "unfinished", "unparsable", "premature_done")


# ---------------------------------------------------------------------------------------------------------------------
# Running

class Lab(NamedTuple):
    """Where the cells run: a folder for this policy and these tasks, the environment's address, one lock an adapter."""
    work: Path
    url: str
    locks: defaultdict

    def tasks(self, split: str) -> Path:
        """The task file of a split."""
        return self.work / f"{split}.tasks.jsonl"

    def rollout(self, split: str, out: Path, model: Path, *flags) -> Path:
        """Roll a policy out; what an earlier call finished is not run again."""
        with self.locks[out]:
            command("rollout.py", "--server", self.url, "--tasks", self.tasks(split), "--model", model, "--out", out,
                    *demo.HARNESS, *flags)
        return out

    def base(self, split: str) -> Path:
        """Rollouts of the untrained policy under the demonstration's memory."""
        return self.rollout(split, self.work / f"{split}-base-0.jsonl", TINY)

    def mine(self, pairing: str, seed: int) -> Path:
        """The pairs of the untrained policy's training rollouts."""
        seed = 0 if pairing == "escape" else seed               # the rule draws nothing
        out = self.work / f"pairs-{pairing}-{seed}.jsonl"
        with self.locks[out]:
            if not out.exists():
                command("deloop.py", "mine", self.base("train"), "--out", out, "--pairing", pairing, "--seed", seed)
        return out

    def model(self, row: Row, seed: int) -> Path:
        """The folder that a row's training starts from."""
        return self.merged(ROWS[row.after], seed) if row.after else TINY

    def adapter(self, row: Row, seed: int) -> Path:
        """The trained adapter of a row; train.py does nothing where it is finished."""
        out = self.work / f"{row.name}-{seed}"
        with self.locks[out]:
            pairs = self.mine(row.pairing, seed)
            limit = round(row.share * min(LIMIT, sum(1 for _ in deloop.read_jsonl(pairs))))
            command("train.py", "--pairs", pairs, "--model", self.model(row, seed), "--out", out, "--seed", seed,
                    "--threads", 1, *demo.DPO, *row.train, "--limit", limit)
        return out

    def merged(self, row: Row, seed: int) -> Path:
        """A row's trained policy as a model folder: its adapter added to the base's weights."""
        adapter = self.adapter(row, seed)
        out, temporary = adapter.with_name(f"{adapter.name}-merged"), adapter.with_name(f".{adapter.name}-merged")
        with self.locks[out]:
            if not out.exists():
                import peft
                import transformers
                transformers.utils.logging.disable_progress_bar()
                shutil.rmtree(temporary, ignore_errors=True)
                shutil.copytree(TINY, temporary)
                base = transformers.AutoModelForCausalLM.from_pretrained(TINY, dtype="float32")
                peft.PeftModel.from_pretrained(base, adapter).merge_and_unload().save_pretrained(temporary)
                os.replace(temporary, out)
        return out

    def cell(self, row: Row, seed: int) -> dict:
        """Run one cell and return what its file will hold."""
        began, flags, adapter = time.monotonic(), list(row.harness), None
        trained = ROWS[row.policy] if row.policy else row
        if trained.policy != "base":
            adapter = self.adapter(trained, seed)
            flags += ["--adapter", adapter]
        base = self.base("heldout")
        out = self.rollout("heldout", self.work / f"heldout-{row.name}-{seed}.jsonl", self.model(trained, seed), *flags)
        shown = json.loads(command("eval.py", base, out, "--json", "--draws", 40))      # intervals come later, pooled
        figures = {metric["key"]: metric["figures"]["B"]["value"] for metric in shown["metrics"]}
        return {**recipe(row, seed), "figures": {key: figures[key] for key in FIGURES},
                "log_pi": adapter and log_pi(adapter),
                "loops": [episode.loops for episode in evaluation.load(str(out)).episodes.values()],
                "seconds": round(time.monotonic() - began)}


def command(*words) -> str:
    """Run one of the repository's commands on one thread; returns what it printed, RuntimeError if it failed."""
    words = [os.path.relpath(word, demo.ROOT) if isinstance(word, Path) else str(word) for word in words]
    done = subprocess.run([sys.executable, *words], cwd=demo.ROOT, text=True, capture_output=True,
                          env={**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"})
    if done.returncode:
        raise RuntimeError(f"{words[0]} failed: {(done.stderr.strip() or done.stdout.strip())[-500:]}")
    return done.stdout


def log_pi(adapter: Path) -> dict[str, list[float]]:
    """[start, end] of log pi of both sides: means over the last quarter of the steps, of the reference's and of the
    policy's log-probs of the same pairs."""
    records = [record for _, record in deloop.read_jsonl(adapter / "metrics.jsonl")]
    records = records[-max(1, len(records) // 4):]
    return {side: [round(sum(record[f"{who}_{side}"] for record in records) / len(records), 3)
                   for who in ("ref", "logp")] for side in ("chosen", "rejected")}


def tasks_text(split: str) -> str:
    """The task file of a split, as minigym.py tasks writes it."""
    return "".join(json.dumps(row) + "\n" for row in minigym.make_tasks(split, demo.TASKS[split], 0))


@functools.cache
def subject() -> str:
    """Hash of what all cells share: the policy's files and the tasks."""
    digest = hashlib.sha256("".join(map(tasks_text, ("train", "heldout"))).encode())
    for file in sorted(TINY.iterdir()):
        digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def recipe(row: Row, seed: int) -> dict:
    """All that determines a cell's result but the code."""
    return {"row": row.name, "seed": seed, "subject": subject(), "settings": json.loads(json.dumps(
        [demo.DPO, demo.HARNESS, row._replace(document="", than="", expected="")]))}


def finished(results: Path, row: Row, seed: int) -> bool:
    """Whether a cell has a result that its present recipe made."""
    file = results / f"{row.name}-{seed}.json"
    return file.exists() and recipe(row, seed).items() <= json.loads(file.read_text()).items()


def run(cells: list[tuple[Row, int]], out: Path, results: Path, jobs: int) -> int:
    """Run cells side by side, in their order; a failed one is reported and left out. Returns how many failed."""
    work, began, failed = out / subject(), time.monotonic(), 0
    work.mkdir(parents=True, exist_ok=True)
    with minigym.serve(workers=64 * jobs) as url, ThreadPoolExecutor(jobs) as pool:
        lab = Lab(work, url, defaultdict(threading.RLock))
        for split in ("train", "heldout"):
            deloop.write_atomic(lab.tasks(split), tasks_text(split))
        waiting = {pool.submit(lab.cell, row, seed): f"{row.name}-{seed}" for row, seed in cells}
        for done, future in enumerate(as_completed(waiting), 1):
            name, left = waiting[future], (time.monotonic() - began) / done * (len(cells) - done)
            try:
                result = future.result()
            except (RuntimeError, deloop.InputError) as error:
                failed += 1
                print(f"{done}/{len(cells)}  {name} FAILED: {error}", flush=True)
                continue
            deloop.write_atomic(results / f"{name}.json", json.dumps(result) + "\n")
            figures, left = result["figures"], datetime.timedelta(seconds=round(left))
            print(f"{done}/{len(cells)}  {name}: loop rate {figures['loop_rate']:.1f}%, success "
                  f"{figures['success']:.1f}%  ({result['seconds']} s)  {left} left", flush=True)
    return failed


# ---------------------------------------------------------------------------------------------------------------------
# The table

HEAD = ("| row | document | loop rate, % [95%], by seed | loop steps | success, % | steps | unfinished / unparsable / "
        "premature Done, % | log pi(y+) | log pi(y-) | loop rate against | verdict |\n|" + "---|" * 11 + "\n")
RULE = ("Written by `python tests/ablations.py --table` from the files in `tests/results/`. {tasks} held-out tasks, "
        "up to {seeds} training seeds a row, all with the step size and the epochs that the demonstration uses for "
        "DPO: no row was tuned for itself. Verdict: the difference in loop rate to the named row, pooled over seeds, "
        "on the same tasks, has a 95% interval (bootstrap over tasks) that excludes 0 on the document's side (agrees), "
        "includes 0 (does not separate), or excludes 0 on the other side (disagrees). It judges the order, not the "
        "size of a difference, and tells what other tasks would change: what other seeds would, stands beside each "
        "rate. log pi: mean over the pairs of the last quarter of the steps, before training -> then. ipo-tau-1-4 aims "
        "at a margin of 2 nats, about what dpo reaches; ipo, at dpo's beta, at 1/4 nat. Document: Qwen3-8B on "
        "CodeGym.\n")


def table(results: Path) -> str:
    """All groups in Markdown, from the result files alone."""
    found = {name: [json.loads(file.read_text()) for file in sorted(results.glob(f"{name}-[0-9]*.json"))]
             for name in ROWS}
    cells = sum(found.values(), [])
    if not cells:
        raise deloop.InputError(f"{results} holds no results; make them with: python tests/ablations.py")
    if len({(cell["subject"], len(cell["loops"])) for cell in cells}) > 1:
        raise deloop.InputError(f"{results} holds results of different policies or tasks; run tests/ablations.py again")
    samples = evaluation.resample(len(cells[0]["loops"]), 2000, 0)
    rates = {name: pooled("rate", [list(map(bool, cell["loops"])) for cell in of_row], samples)
             for name, of_row in found.items() if of_row}
    text = RULE.format(tasks=len(cells[0]["loops"]), seeds=max(map(len, found.values())))
    for group, (document, rows) in GROUPS.items():
        lines = [line(row, found[row.name], rates) for row in rows]
        text += f"\n**{group}**. The document: {document}\n\n{HEAD}{''.join(lines)}"
    return text


def pooled(kind: str, seeds: list[list[int]], samples: list[list[int]]) -> list[float]:
    """The figure over all seeds (a rate in %), then in every bootstrap sample of tasks. A seed: one count a task."""
    sums = list(map(sum, zip(*seeds, strict=True)))
    columns, factor = [sums, [len(seeds)] * len(sums)], 100 if kind == "rate" else 1
    return [factor * each for each in (evaluation.figure(kind, list(map(sum, columns))),
                                       *evaluation.bootstrap(kind, columns, samples))]


def line(row: Row, cells: list[dict], rates: dict) -> str:
    """One row of a table."""
    if not cells:
        return f"| {row.name} | {row.document or '-'} | not run |" + " |" * 8 + "\n"

    def mean(key: str, digits: int = 1) -> str:
        return f"{sum(cell['figures'][key] for cell in cells) / len(cells):.{digits}f}"

    def moved(side: str) -> str:
        ends = [cell["log_pi"][side] for cell in cells if cell["log_pi"]]
        return " -> ".join(f"{sum(end) / len(ends):.2f}" for end in zip(*ends)) if ends and not row.policy else "-"

    value, *boot = rates[row.name]
    low, high = evaluation.percentiles(boot)
    seeds = ", ".join(f"{cell['figures']['loop_rate']:.1f}" for cell in cells)
    against = judged = "-"
    if row.than in rates:
        gap, (least, most) = value - rates[row.than][0], evaluation.percentiles(
            map(functools.partial(evaluation.compare, "rate"), rates[row.than][1:], boot))
        against = f"{row.than}: {gap:+.1f} [{least:+.1f}, {most:+.1f}]"
        judged = verdict(least, most, row.expected)
    return "| " + " | ".join([
        row.name, row.document or "-", f"{value:.1f} [{low:.1f}, {high:.1f}]" + f"; {seeds}" * (len(cells) > 1),
        mean("loop_steps", 2), mean("success"), mean("steps", 2),
        " / ".join(map(mean, ("unfinished", "unparsable", "premature_done"))), moved("chosen"), moved("rejected"),
        against, judged]) + " |\n"


def verdict(low: float, high: float, expected: str) -> str:
    """What the interval of a difference says about the document's ordering: see the module's rule."""
    if not expected:
        return "not stated"
    if low <= 0 <= high:
        return "does not separate"
    return "agrees" if (low > 0) == (expected == "higher") else "disagrees"


def main(argv: list[str]) -> int:
    """Run what has no result yet, then write the table; exit code 1 if a cell failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=GROUPS, action="append", help="run this group; may be repeated [all]")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="training seeds a row [%(default)s]")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="cells at a time, a core each [%(default)s]")
    parser.add_argument("--out", type=Path, default=demo.ROOT / "runs" / "ablations", help="folder of what is made")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results [tests/results]")
    parser.add_argument("--readme", type=Path, default=README, help="file whose table is written [README.md]")
    parser.add_argument("--table", action="store_true", help="write the table and run nothing")
    options = parser.parse_args(argv)
    failed = 0
    if not options.table:
        cells = [(row, seed) for group in options.only or GROUPS for row in GROUPS[group][1]
                 for seed in row.seeds(options.seeds) if not finished(options.results, row, seed)]
        print(f"{len(cells)} cells to run, {options.jobs} at a time", flush=True)
        options.results.mkdir(parents=True, exist_ok=True)
        failed = run(cells, options.out.resolve(), options.results, options.jobs)
    demo.put(options.readme, "ablations", table(options.results))
    return 1 if failed else 0


if __name__ == "__main__":
    deloop.run(main)
