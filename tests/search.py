"""Where does DPO part from SFT on the chosen side, each at its own best step size? python tests/search.py

The demonstration's policy has about a dozen sensible calls, mostly one that goes on: raising the escape is lowering the
loop. This search asks whether the two objectives part where many calls are sensible at any time (HUNTS in
tests/minigym.py), by number of places, number of pairs, variety of the pairs and step size. For each gym the base rolls
out once and gives one set of pairs; a cell trains on a share of them and is screened on 128 tasks. The best of the step
sizes then runs with three other seeds on 256 fresh tasks. Every cell is a small JSON file in tests/results/search/;
what has one is not run again (delete the folder after a change of policies or settings).

    python tests/search.py              # make the policies, run every cell, write the README's table
    python tests/search.py --table      # the table from the files alone

Best: the lowest loop rate on the screening tasks among the step sizes whose success there is at most 5 points below the
base's (among all, if there is none). Clear: the interval of the difference excludes 0, the difference is as large as
CLEAR, and all seeds of one objective lie on the same side of all seeds of the other; the last condition was added when
the third seed turned a difference round that two seeds had shown.
"""
from __future__ import annotations

import argparse
import json
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import demo
import minigym
from ablations import LIMIT, command, pooled
from demo import README, deloop, evaluation

RESULTS = demo.RESULTS / "search"
FINAL, SCREEN, SEEDS = 256, 128, (1, 2, 3)        # seed 0 is for screening
OBJECTIVES, RATES = ("dpo", "sft"), ("3e-4", "6e-4", "1e-3", "2e-3")
PLACES = (("boxes", 1.0), ("boxes", 0.25), ("boxes-sampled", 1.0), ("bags", 1.0), ("order", 1.0))
# (gym, share of its pairs, of which at most LIMIT are used)
MEASURES = {  # name -> (kind of figure, what is counted, as what)
    "loop rate": ("rate", "loops", bool), "loop steps": ("mean", "loops", int), "success": ("rate", "solved", bool)}
CLEAR = {"loop rate": 5, "loop steps": 0.5, "success": 5}


class Gym(NamedTuple):
    """One kind of task and the policy that works on it."""
    name: str
    calls: str                                  # what is sensible at any time
    families: tuple[str, ...] | None            # None: the demonstration's
    budget: int
    train: int                                  # training tasks: for LIMIT pairs, or as many as the demonstration has
    policy: str = "hunts"                       # of tiny_policy.GYMS
    temperature: float = 0.0                    # of the training rollouts; held-out ones are greedy

    def tasks(self, split: str) -> list[dict]:
        """Task rows. The first 256 held-out ones are final (the demonstration's own for order), the next screen."""
        if split == "train":
            return minigym.make_tasks("train", self.train, 0, families=self.families)
        rows = minigym.make_tasks("heldout", FINAL + SCREEN, 0, families=self.families)
        return rows[:FINAL] if split == "final" else rows[FINAL:]


GYMS = {gym.name: gym for gym in (
    Gym("order", "about a dozen calls, mostly one that goes on", None, demo.BUDGET, 384, "order"),
    Gym("bags", "12 arguments, in any order", ("bags",), 120, 768),
    Gym("boxes", "20 arguments, in any order", ("boxes",), 150, 768),
    Gym("boxes-sampled", "the same, training rollouts sampled at temperature 1", ("boxes",), 150, 768,
        temperature=1.0))}


class Cell(NamedTuple):
    """One training run. seed None: for screening."""
    gym: str
    share: float
    objective: str
    rate: str
    seed: int | None = None

    @property
    def name(self) -> str:
        """Its result: tests/results/search/NAME.json."""
        return "_".join(str(part) for part in self if part is not None)


# ---------------------------------------------------------------------------------------------------------------------
# Running

class Lab(NamedTuple):
    """Where the cells run, and the environment's address."""
    work: Path
    url: str
    locks: defaultdict                          # one for each thing that several cells need

    def policy(self, gym: Gym) -> Path:
        """The folder of a gym's policy; what is not shipped is made."""
        out = demo.TESTS / "tiny" if gym.policy == "order" else self.work / gym.policy
        with self.locks[out]:
            if not (out / "tokenizer.json").exists():
                print(f"warm start of {gym.policy}", flush=True)
                command(demo.TESTS / "tiny_policy.py", "--gym", gym.policy, "--out", out)
        return out

    def pairs(self, gym: Gym) -> Path:
        """The pairs of a gym's training rollouts; they are made when they are not there."""
        out = self.work / f"{gym.name}-pairs.jsonl"
        with self.locks[out]:
            if not out.exists():
                rollouts = self.rollout(gym, "train", gym.name, "--temperature", gym.temperature)
                command("deloop.py", "mine", rollouts, "--out", out)
        return out

    def rollout(self, gym: Gym, split: str, name: str, *flags) -> Path:
        """Roll the gym's policy out on one split; what is finished is not run again."""
        out, tasks = self.work / f"{name}-{split}.jsonl", self.work / f"{gym.name}-{split}.tasks.jsonl"
        command("rollout.py", "--server", self.url, "--tasks", tasks, "--model", self.policy(gym), "--out", out,
                *demo.HARNESS, "--budget", gym.budget, "--summary-tokens", 96, *flags)
        return out

    def measured(self, gym: Gym, split: str, name: str, *flags) -> dict:
        """Roll out; for every task its loop steps and whether it was solved."""
        episodes = evaluation.load(str(self.rollout(gym, split, name, *flags))).episodes
        return {"loops": [episodes[key].loops for key in sorted(episodes)],
                "solved": [int(episodes[key].success) for key in sorted(episodes)]}

    def base(self, gym: Gym) -> dict:
        """The untrained policy on both held-out splits; how many pairs its training rollouts give, how many of them
        differ in their two calls."""
        calls = [(str(pair["chosen"]), str(pair["rejected"])) for _, pair in deloop.read_jsonl(self.pairs(gym))]
        return {"pairs": len(calls), "different": len(set(calls)),
                **{split: self.measured(gym, split, gym.name) for split in ("screen", "final")}}

    def cell(self, cell: Cell) -> dict:
        """Train; then screen or, with a seed, run on the final tasks."""
        gym, adapter = GYMS[cell.gym], self.work / cell.name
        pairs = self.pairs(gym)
        limit = round(cell.share * min(LIMIT, sum(1 for _ in deloop.read_jsonl(pairs))))
        command("train.py", "--pairs", pairs, "--model", self.policy(gym), "--out", adapter, "--threads", 1,
                *demo.DPO, "--objective", cell.objective, "--lr", cell.rate, "--limit", limit,
                "--seed", cell.seed or 0)
        split = "screen" if cell.seed is None else "final"
        return {"pairs": limit, split: self.measured(gym, split, cell.name, "--adapter", adapter)}


def work_through(cells: Iterable, make: Callable, jobs: int) -> None:
    """Run what has no result yet, side by side."""
    left = [each for each in cells if not (RESULTS / f"{each.name}.json").exists()]

    def one(each) -> None:
        deloop.write_atomic(RESULTS / f"{each.name}.json", json.dumps(make(each)) + "\n")
        print(each.name, flush=True)
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(one, left))


# ---------------------------------------------------------------------------------------------------------------------
# The table

def read(name: str) -> dict:
    """A stored result."""
    file = RESULTS / f"{name}.json"
    if not file.exists():
        raise deloop.InputError(f"{file} is missing; make it with: python tests/search.py")
    return json.loads(file.read_text())


def figures(results: list[dict], split: str, samples: list | tuple = ()) -> dict[str, list[float]]:
    """Of each measure the value over all results, then the values in the bootstrap samples of tasks."""
    return {name: pooled(kind, [list(map(count, result[split][key])) for result in results], samples)
            for name, (kind, key, count) in MEASURES.items()}


def shown(of: dict[str, list[float]]) -> str:
    """Loop rate, loop steps and success."""
    return f"{of['loop rate'][0]:.1f} / {of['loop steps'][0]:.2f} / {of['success'][0]:.1f}"


def best(gym: str, share: float, objective: str) -> str:
    """The step size that goes on to the final tasks: see the module's rule."""
    least, found = figures([read(gym)], "screen")["success"][0] - CLEAR["success"], []
    for rate in RATES:
        of = figures([read(Cell(gym, share, objective, rate).name)], "screen")
        found.append((of["success"][0] < least, of["loop rate"][0], -of["success"][0], rate))
    return min(found)[-1]


def parted(dpo: list[dict], sft: list[dict], samples: list) -> str:
    """SFT minus DPO on the final tasks with 95% intervals, and which measures differ clearly; each a result a seed."""
    both, told, clear = [figures(results, "final", samples) for results in (dpo, sft)], [], []
    for name, least in CLEAR.items():
        gap, *gaps = (b - a for a, b in zip(*(each[name] for each in both)))
        low, high = evaluation.percentiles(gaps)
        told.append("{:+.{n}f} [{:+.{n}f}, {:+.{n}f}]".format(gap, low, high, n=1 if least >= 1 else 2))
        a, b = ([figures([result], "final")[name][0] for result in results] for results in (dpo, sft))
        apart = max(a) < min(b) or max(b) < min(a)
        clear += [name] * (abs(gap) >= least and not low <= 0 <= high and apart)
    return " / ".join(told) + " | " + (", ".join(clear) or "no")


def table() -> str:
    """The whole grid in Markdown, from the result files alone."""
    samples = evaluation.resample(FINAL, 2000, 0)
    text = (f"Each entry: loop rate, % / loop steps / success, %. Screened on {SCREEN} tasks with one seed; the best "
            f"step size of each row (bold) then ran on {FINAL} others with {len(SEEDS)} other seeds (loop rate of each "
            "at the end). In a base's row: pairs mined (pairs of calls that differ). "
            + "; ".join(f"{gym.name}: {gym.calls}" for gym in GYMS.values()) + ".\n\n"
            f"| gym | pairs | objective | {' | '.join(f'screened, {rate}' for rate in RATES)} | final | SFT - DPO "
            f"[95%] | clear |\n|{'---|' * (6 + len(RATES))}\n")
    for gym, share in PLACES:
        base, ends = read(gym), []
        if share == 1:
            text += (f"| {gym} | {base['pairs']} ({base['different']}) | base | {shown(figures([base], 'screen'))} |"
                     f"{' |' * (len(RATES) - 1)} {shown(figures([base], 'final'))} | | |\n")
        for objective in OBJECTIVES:
            rate = best(gym, share, objective)
            cells = [read(Cell(gym, share, objective, rate, seed).name) for seed in SEEDS]
            ends.append(cells)
            screened = [shown(figures([read(Cell(gym, share, objective, each).name)], "screen")) for each in RATES]
            screened[RATES.index(rate)] = f"**{screened[RATES.index(rate)]}**"
            seeds = ", ".join(f"{figures([cell], 'final')['loop rate'][0]:.1f}" for cell in cells)
            text += (f"| {gym} | {cells[0]['pairs']} | {objective} | {' | '.join(screened)} | "
                     f"{shown(figures(cells, 'final'))}; {seeds} | "
                     f"{parted(*ends, samples) if len(ends) == 2 else '|'} |\n")
    return text


def main(argv: list[str]) -> int:
    """Run what has no result yet, then write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=demo.ROOT / "runs" / "search", help="folder of what is made")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="cells at a time, a core each [%(default)s]")
    parser.add_argument("--table", action="store_true", help="write the table and run nothing")
    options = parser.parse_args(argv)
    if not options.table:
        work = options.out.resolve()
        work.mkdir(parents=True, exist_ok=True)
        RESULTS.mkdir(parents=True, exist_ok=True)
        grid = [(gym, share, objective) for gym, share in PLACES for objective in OBJECTIVES]
        with minigym.serve(workers=64 * options.jobs) as url:
            lab = Lab(work, url, defaultdict(threading.RLock))
            for gym in GYMS.values():
                for split in ("train", "screen", "final"):
                    tasks = "".join(json.dumps(row) + "\n" for row in gym.tasks(split))
                    deloop.write_atomic(work / f"{gym.name}-{split}.tasks.jsonl", tasks)
            work_through(reversed(GYMS.values()), lab.base, options.jobs)
            work_through((Cell(*place, rate) for place in grid for rate in RATES), lab.cell, options.jobs)
            work_through((Cell(*place, best(*place), seed) for place in grid for seed in SEEDS), lab.cell, options.jobs)
    demo.put(README, "search", table())
    return 0


if __name__ == "__main__":
    deloop.run(main)
