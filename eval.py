"""What came out: every figure of one or more runs with its 95% interval, beside the DeLoop document's figure.

    python eval.py base.jsonl                       # one run
    python eval.py base.jsonl dpo.jsonl [MORE...]   # each further run is compared with the first, task by task

The way of the data: a trajectory is measured once (`measure` -> Episode); a metric is a pure function of an Episode
that returns the terms of its fraction; `figure` turns their sums over the run into the value. So one bootstrap over
tasks serves every metric, and METRICS is the only list that the tables, --json, --csv and --expect are made from.
Runs are named A, B, C ... in the order given; B-A is the paired difference. Standard library only.
"""
from __future__ import annotations

import argparse
import csv
import dataclasses
import io
import json
import math
import random
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import mul
from typing import NamedTuple

import deloop
from deloop import ERRORS, RESULTS, InputError

Z = 1.959963984540054           # the two-sided 95% point of the normal distribution
WIDTH = 110                     # columns of the terminal the table is laid out for
# Settings that may change within a run: where it ran, how much of it ran so far (rollout.py's resume allows the same).
MAY_DIFFER = ("server", "tasks", "out", "limit", "batch", "wait", "samples")


# ---------------------------------------------------------------------------------------------------------------------
# One episode in numbers.

@dataclass(frozen=True)
class Episode:
    """What the metrics need of one trajectory; counts of executed steps unless the name says otherwise."""
    task_id: str
    sample: int
    status: str             # done | turn_limit | context_overflow
    success: bool           # reward >= 1
    steps: int              # executed calls
    loops: int              # of these: s_t = 1, an equal (call, observation) came before
    repeats: int            # of these: an equal call came before, whatever it returned
    distinct: int           # different calls
    turns: int              # replies of the model, those without an executed call included
    unparsable: int         # of these: replies without a call that could be parsed
    prompt: int             # tokens read: every prompt of every turn and of every summary
    completion: int         # tokens written: every reply and every summary
    transcript: int         # tokens of the conversation written once, see transcript_tokens
    compactions: int
    needed: int | None = None   # fewest different calls with which run A solved a task of this family; None: never

    @property
    def tokens(self) -> int:
        """Tokens read and written: what a server without a prefix cache computes."""
        return self.prompt + self.completion


def measure(trajectory: Mapping) -> Episode:
    """The Episode of one trajectory with a result. KeyError or TypeError if a field of the format is missing."""
    run = deloop.steps(trajectory)
    flags = deloop.loop_flags((step.action, step.observation) for step in run)
    distinct = len({deloop.kappa(step.action) for step in run})
    turns, events = trajectory["turns"], trajectory["compactions"]
    return Episode(
        trajectory["task_id"], trajectory["sample"], trajectory["status"], trajectory["reward"] >= 1,
        steps=len(run), loops=sum(flags), repeats=len(run) - distinct, distinct=distinct, turns=len(turns),
        compactions=len(events),
        unparsable=sum(turn["action"] is None for turn in turns),
        prompt=sum(part["prompt_tokens"] for part in (*turns, *events)),
        completion=sum(part["completion_tokens"] for part in (*turns, *events)),
        transcript=transcript_tokens(turns, events))


def transcript_tokens(turns: Sequence[Mapping], compactions: Sequence[Mapping]) -> int:
    """Tokens of the conversation written once: P_0 + sum_t C_t + sum_{t>0} max(0, B_t - P_{t-1} - C_{t-1}).

    P_t and C_t are the tokens of turn t's prompt and reply; B_t is the prompt of turn t before any compaction at that
    turn, so B_t - P_{t-1} is what reply t-1 and its observation added, and compaction takes nothing away. Exact for
    histories that only grow by messages; summaries are not counted, nor the last observation, which no prompt holds.
    The max is for replies that the next prompt shows shortened (text after the call, thinking): never less than C.
    """
    before = [turn["prompt_tokens"] for turn in turns] + [0]        # + [0]: a compaction that no turn followed
    for event in compactions:
        before[event["before_turn"]] = event["tokens_before"]
    grown = [before[t + 1] - turn["prompt_tokens"] - turn["completion_tokens"] for t, turn in enumerate(turns[:-1])]
    return sum(turn["prompt_tokens"] for turn in turns[:1]) + sum(turn["completion_tokens"] for turn in turns) + sum(
        max(0, tokens) for tokens in grown)


def family(task_id: str) -> str:
    """The environment of a task: its id without the hash of its instance ("max-1a2b3c4d" -> "max")."""
    return task_id.rpartition("-")[0] or task_id


def needed_calls(base: Iterable[Episode]) -> dict[str, int]:
    """Family -> fewest different calls among the successful episodes of run A; families it never solved are absent."""
    fewest: dict[str, int] = {}
    for e in base:
        if e.success:
            fewest[family(e.task_id)] = min(e.distinct, fewest.get(family(e.task_id), e.distinct))
    return fewest


# ---------------------------------------------------------------------------------------------------------------------
# Metrics. Each returns the terms whose sums over the run make the figure: (numerator, denominator) of a fraction, or
# the four terms of a gap or an odds ratio (see figure). "Share of tasks" is a share of episodes if samples > 1.

Terms = tuple[int, ...]


def loop_rate(e: Episode) -> Terms:
    """Tasks with at least one loop step / tasks."""
    return e.loops > 0, 1


def per_task(e: Episode, what: str) -> Terms:
    """Sum of an Episode field (loops, steps, turns, tokens, prompt, completion, transcript: defined there) / tasks."""
    return getattr(e, what), 1


def loop_share(e: Episode) -> Terms:
    """Loop steps / steps, over the whole run."""
    return e.loops, e.steps


def selectivity(e: Episode) -> Terms:
    """Repeated calls (same kappa earlier) whose observation this call had not returned before / repeated calls."""
    return e.repeats - e.loops, e.repeats


def loop_rate_at(e: Episode, low: int, high: float) -> Terms:
    """Tasks of low to high steps with a loop / tasks of low to high steps: the loop rate at matched length."""
    inside = low <= e.steps <= high
    return inside and e.loops > 0, inside


def compacted(e: Episode) -> Terms:
    """Tasks with at least one compaction / tasks."""
    return e.compactions > 0, 1


def success(e: Episode) -> Terms:
    """Tasks with reward >= 1 / tasks."""
    return e.success, 1


def unfinished(e: Episode) -> Terms:
    """Tasks that ended without Done (turn_limit, context_overflow) / tasks."""
    return e.status != "done", 1


def unparsable(e: Episode) -> Terms:
    """Replies that hold no call that can be parsed / replies."""
    return e.unparsable, e.turns


def premature_done(e: Episode) -> Terms:
    """Tasks given up: ended by Done, failed, and after fewer different calls than any success of run A in the same
    family / tasks of families that run A ever solved. One yardstick for all runs, so that giving up shows as a rise.
    """
    if e.needed is None:
        return 0, 0
    return e.status == "done" and not e.success and e.distinct < e.needed, 1


def failure_with(e: Episode, loop: bool) -> Terms:
    """Failed tasks with (without) a loop / tasks with (without) a loop."""
    inside = (e.loops > 0) == loop
    return inside and not e.success, inside


def failure_odds(e: Episode) -> Terms:
    """(failed, solved) with a loop, (failed, solved) without: odds of failure with a loop / odds without."""
    loop = e.loops > 0
    return loop and not e.success, loop and e.success, not loop and not e.success, not loop and e.success


def loop_cost(e: Episode, what: str) -> Terms:
    """Mean of `what` (an Episode field) over tasks with a loop - mean over tasks without: an association, no cause."""
    loop, amount = e.loops > 0, getattr(e, what)
    return loop * amount, loop, (not loop) * amount, not loop


class Metric(NamedTuple):
    """kind: rate (of tasks) | mean | share (of steps, turns) | odds | gap. base, deloop: the document's figures for
    Qwen3-8B on CodeGym, None where it gives none; place: where they stand in it."""
    group: str
    key: str
    label: str
    terms: Callable[[Episode], Terms]
    kind: str
    unit: str
    base: float | None = None
    deloop: float | None = None
    place: str = ""


TABLE, MECHANISM, TOKENS = "Table 1", "results, on mechanism", "Table 1 (kind of tokens not stated)"
NOVELTY, BY_LOOP, COST = "novelty, on signatures", "figure on failure by loop", "figure on the cost of loops"
METRICS = (
    Metric("loops", "loop_rate", "loop rate", loop_rate, "rate", "%", 57.3, 6.1, TABLE),
    Metric("loops", "loop_rate_1_5", "  of 1-5 steps", partial(loop_rate_at, low=1, high=5), "rate", "%"),
    Metric("loops", "loop_rate_6_10", "  of 6-10 steps", partial(loop_rate_at, low=6, high=10), "rate", "%",
           33.2, 13.1, MECHANISM),
    Metric("loops", "loop_rate_11_20", "  of 11-20 steps", partial(loop_rate_at, low=11, high=20), "rate", "%"),
    Metric("loops", "loop_rate_21", "  of 21 or more", partial(loop_rate_at, low=21, high=math.inf), "rate", "%"),
    Metric("loops", "loop_steps", "loop steps", partial(per_task, what="loops"), "mean", ""),
    Metric("loops", "loop_share", "loops among steps", loop_share, "share", "%", 24.8, None, NOVELTY),
    Metric("loops", "selectivity", "selectivity", selectivity, "share", "%", 29.9, 69.8, MECHANISM),
    Metric("outcome", "success", "success", success, "rate", "%", 25.1, 25.9, TABLE),
    Metric("outcome", "unfinished", "unfinished", unfinished, "rate", "%"),
    Metric("outcome", "premature_done", "premature Done", premature_done, "rate", "%"),
    Metric("outcome", "unparsable", "unparsable turns", unparsable, "share", "%"),
    Metric("effort", "steps", "steps", partial(per_task, what="steps"), "mean", "", 15.00, 4.67, TABLE),
    Metric("effort", "turns", "turns", partial(per_task, what="turns"), "mean", ""),
    Metric("effort", "tokens", "tokens", partial(per_task, what="tokens"), "mean", "tokens", 23900, 12700, TOKENS),
    Metric("effort", "prompt_tokens", "  prompt", partial(per_task, what="prompt"), "mean", "tokens"),
    Metric("effort", "completion_tokens", "  completion", partial(per_task, what="completion"), "mean", "tokens"),
    Metric("effort", "transcript_tokens", "transcript tokens", partial(per_task, what="transcript"), "mean",
           "tokens", 23900, 12700, TOKENS),
    Metric("effort", "compacted", "with a compaction", compacted, "rate", "%"),
    Metric("failure", "failure_loop", "failure with loop", partial(failure_with, loop=True), "rate", "%",
           85.0, None, BY_LOOP),
    Metric("failure", "failure_no_loop", "failure without", partial(failure_with, loop=False), "rate", "%",
           68.0, None, BY_LOOP),
    Metric("failure", "failure_odds", "failure odds ratio", failure_odds, "odds", ""),
    Metric("failure", "loop_cost_steps", "loop runs: steps", partial(loop_cost, what="steps"), "gap", "",
           10.5, None, COST),
    Metric("failure", "loop_cost_tokens", "loop runs: tokens", partial(loop_cost, what="transcript"), "gap", "tokens",
           11000, None, COST),
)


# ---------------------------------------------------------------------------------------------------------------------
# Estimates: all of them pure, and the same for every metric.

def figure(kind: str, sums: Sequence[float]) -> float | None:
    """The value from the summed terms; None where it is undefined.

    rate, mean, share: s0 / s1. gap: s0 / s1 - s2 / s3. odds: (s0 + 1/2)(s3 + 1/2) / ((s1 + 1/2)(s2 + 1/2)), the halves
    (Haldane, Anscombe) so that an empty cell gives a finite figure; undefined if all tasks or none have a loop.
    """
    if kind == "odds":
        a, b, c, d = (s + 0.5 for s in sums)
        return a * d / (b * c) if sums[0] + sums[1] and sums[2] + sums[3] else None
    if kind == "gap":
        return sums[0] / sums[1] - sums[2] / sums[3] if sums[1] and sums[3] else None
    return sums[0] / sums[1] if sums[1] else None


def wilson(k: int, n: int) -> tuple[float, float]:
    """Wilson's 95% interval for a share k / n, n > 0: (p + z^2/2n -+ z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n)."""
    p, z2 = k / n, Z * Z / n
    centre, half = p + z2 / 2, Z * math.sqrt(p * (1 - p) / n + z2 / (4 * n))
    return (0.0 if k == 0 else (centre - half) / (1 + z2)), (1.0 if k == n else (centre + half) / (1 + z2))


def woolf(cells: Sequence[int]) -> tuple[float, float]:
    """Woolf's 95% interval for the odds ratio: exp(ln OR -+ z sqrt(sum 1/cell)), 1/2 added to each cell."""
    ratio, spread = figure("odds", cells), Z * math.sqrt(sum(1 / (cell + 0.5) for cell in cells))
    return ratio * math.exp(-spread), ratio * math.exp(spread)


def mcnemar(first: Sequence[int], second: Sequence[int]) -> float:
    """Two-sided exact p of McNemar's test for 0/1 outcomes of two runs on the same tasks.

    2 P(X <= min(b, c)), X ~ Binomial(b + c, 1/2), at most 1; b and c are the tasks with the event in one run alone.
    """
    b, c = sum(x > y for x, y in zip(first, second)), sum(x < y for x, y in zip(first, second))
    return min(1.0, 2 * sum(math.comb(b + c, i) for i in range(min(b, c) + 1)) / 2 ** (b + c))


def resample(n: int, draws: int, seed: int) -> list[list[int]]:
    """draws bootstrap samples of n tasks, each as how often every task was drawn. Depends on its arguments alone."""
    rng, samples = random.Random(seed), []
    for _ in range(draws):
        weights = [0] * n
        for i in rng.choices(range(n), k=n):
            weights[i] += 1
        samples.append(weights)
    return samples


def bootstrap(kind: str, columns: Sequence[Sequence[int]], samples: list[list[int]]) -> list[float | None]:
    """The figure in every bootstrap sample. columns: one list per term, with one value per task."""
    return [figure(kind, [sum(map(mul, weights, column)) for column in columns]) for weights in samples]


def percentiles(values: Iterable[float | None]) -> tuple[float | None, float | None]:
    """The middle 95% of bootstrap values; (None, None) if the figure is undefined in more than 5% of the samples."""
    values = list(values)
    known = sorted(value for value in values if value is not None)
    if not known or len(known) < 0.95 * len(values):
        return None, None
    cut = int(0.025 * len(known))
    return known[cut], known[-1 - cut]


# ---------------------------------------------------------------------------------------------------------------------
# Runs.

Key = tuple[str, int]           # (task_id, sample)


class Run(NamedTuple):
    """One file. episodes: those with a result, sorted by key; errors: the status of those without."""
    path: str
    policy: str
    config: dict
    episodes: dict[Key, Episode]
    errors: dict[Key, str]


def load(path: str) -> Run:
    """Read one run. InputError names what makes it none: a task twice, a sample missing, mixed settings, a field."""
    episodes: dict[Key, Episode] = {}
    errors: dict[Key, str] = {}
    settings: dict[str, Key] = {}                   # what the run was made with -> the first episode that says so
    for trajectory in deloop.read_trajectories(path):
        key = (trajectory["task_id"], trajectory["sample"])
        if key in episodes or key in errors:
            raise InputError(f"{path}: {names([key])} stands twice; keep one of the two")
        try:
            if trajectory["status"] in ERRORS:
                errors[key] = trajectory["status"]
            elif trajectory["status"] in RESULTS:
                episodes[key] = measure(trajectory)
            else:
                raise KeyError(f"no status {trajectory['status']!r}")
            fixed = {k: v for k, v in trajectory["config"].items() if k not in MAY_DIFFER}
            made = json.dumps({"policy": trajectory["policy"], **fixed}, sort_keys=True)
        except (KeyError, TypeError, AttributeError) as error:
            raise InputError(f"{path}: {names([key])} is no trajectory of rollout.py "
                             f"({type(error).__name__}: {error})") from None
        settings[made] = min(key, settings.get(made, key))
    if not settings:
        raise InputError(f"{path}: no trajectories")
    check_run(path, settings, episodes.keys() | errors.keys())
    config = json.loads(min(settings))
    return Run(path, str(config.pop("policy")), config, dict(sorted(episodes.items())), errors)


def names(keys: Iterable[Key]) -> str:
    """The first of some keys, and how many there are besides."""
    keys = sorted(keys)
    return f"task {keys[0][0]} (sample {keys[0][1]})" + (f" and {len(keys) - 1} more" if len(keys) > 1 else "")


def check_run(path: str, settings: Mapping[str, Key], have: set[Key]) -> None:
    """InputError if the episodes of one file were made with different settings, or a task lacks a sample."""
    if len(settings) > 1:
        one, two = (json.loads(made) for made in sorted(settings, key=settings.get)[:2])
        differ = [key for key in sorted(one.keys() | two.keys()) if one.get(key) != two.get(key)]
        first, second = (names([key]) for key in sorted(settings.values())[:2])
        raise InputError(f"{path}: {first} and {second} differ in {', '.join(differ)}; put the two runs in two files")
    if lacking := {(task, sample) for task, _ in have for _, sample in have} - have:
        raise InputError(f"{path} lacks {names(lacking)}; run the same rollout command again, it goes on")


def check_runs(runs: Sequence[Run], drop_errors: bool) -> list[Key]:
    """InputError unless all runs have results of the same (task, sample) keys; returns those to leave out, sorted."""
    for run in runs:
        if run.errors and not drop_errors:
            raise InputError(f"{run.path}: {names(run.errors)} ended in {run.errors[min(run.errors)]}, which is no "
                             "result; run the same rollout command again, or leave it out of all runs: --drop-errors")
        ours, base = (each.episodes.keys() | each.errors.keys() for each in (run, runs[0]))
        for lacking, here, there in ((base - ours, run, runs[0]), (ours - base, runs[0], run)):
            if lacking:
                raise InputError(f"{here.path} lacks {names(lacking)} of {there.path}; compare finished runs of the "
                                 "same tasks")
    dropped = sorted({key for run in runs for key in run.errors})
    if runs[0].episodes.keys() <= set(dropped):
        raise InputError(f"{runs[0].path}: no episode with a result is left")
    return dropped


def task_sums(episodes: Sequence[Episode], metric: Metric) -> list[list[int]]:
    """One list per term of the metric, with one value per task in sorted order: its sum over the task's samples."""
    tasks: dict[str, list[Terms]] = {}
    for e in episodes:
        tasks.setdefault(e.task_id, []).append(metric.terms(e))
    return [list(column) for column in zip(*(map(sum, zip(*terms)) for terms in tasks.values()))]


def evaluate(runs: Sequence[Run], draws: int = 2000, seed: int = 0, drop_errors: bool = False) -> dict:
    """Everything that can be printed, in the units of the tables: what --json writes.

    Each metric has figures {"A": {value, low, high, n}, "B": ..., "B-A": {value, low, high, p}}; n is the denominator.
    Intervals are 95%: Wilson (rate) and Woolf (odds) for one sample a task, else bootstrap over tasks, and for a
    difference bootstrap over the same tasks in both runs.
    """
    dropped = check_runs(runs, drop_errors)
    kept = [[e for key, e in run.episodes.items() if key not in dropped] for run in runs]
    needed = needed_calls(kept[0])
    kept = [[dataclasses.replace(e, needed=needed.get(family(e.task_id))) for e in episodes] for episodes in kept]
    tasks = len({e.task_id for e in kept[0]})
    single, samples = tasks == len(kept[0]), resample(tasks, draws, seed)
    labels = [chr(ord("A") + i) for i in range(len(runs))]
    metrics = []
    for metric in METRICS:
        columns = [task_sums(episodes, metric) for episodes in kept]
        boots = [bootstrap(metric.kind, each, samples) for each in columns]
        figures = {label: estimate(metric, *each, single) for label, *each in zip(labels, columns, boots)}
        for label, *other in list(zip(labels, columns, boots))[1:]:
            figures[f"{label}-A"] = difference(metric, (columns[0], boots[0]), other, single)
        metrics.append({key: value for key, value in metric._asdict().items() if key != "terms"} | {"figures": figures})
    heads = [{"run": label, "file": run.path, "policy": run.policy, "episodes": len(episodes), "config": run.config,
              "statuses": dict(Counter(e.status for e in episodes) + Counter(run.errors.values()))}
             for label, run, episodes in zip(labels, runs, kept)]
    return {"runs": heads, "tasks": tasks, "left_out": dropped, "draws": draws, "seed": seed, "metrics": metrics}


def estimate(metric: Metric, columns: list[list[int]], boot: list[float | None], single: bool) -> dict:
    """Value, interval and denominator of one run. single: one sample a task, so tasks are independent trials."""
    sums = [sum(column) for column in columns]
    value, (low, high) = figure(metric.kind, sums), percentiles(boot)
    if single and value is not None and metric.kind in ("rate", "odds"):
        low, high = wilson(*sums) if metric.kind == "rate" else woolf(sums)
    return {**scaled(metric, value, low, high), "n": sum(sums if metric.kind == "odds" else sums[1::2])}


def difference(metric: Metric, base: Sequence, other: Sequence, single: bool) -> dict:
    """Other run - base, its paired interval, and McNemar's p for a rate over the same tasks. None for odds ratios."""
    (first, boot), (second, boot2) = base, other
    values = [figure(metric.kind, [sum(column) for column in columns]) for columns in (first, second)]
    if metric.kind == "odds" or None in values:
        return {"value": None, "low": None, "high": None, "p": None}
    same = single and metric.kind == "rate" and first[1] == second[1]
    ends = percentiles(None if a is None or b is None else b - a for a, b in zip(boot, boot2))
    p = round(mcnemar(first[0], second[0]), 9) if same else None
    return {**scaled(metric, values[1] - values[0], *ends), "p": p}


def scaled(metric: Metric, *values: float | None) -> dict:
    """value, low and high in the unit of the tables, rounded so that they read the same on every machine."""
    factor = 100 if metric.unit == "%" else 1
    return {key: None if value is None else round(value * factor, 6) + 0.0
            for key, value in zip(("value", "low", "high"), values)}


# ---------------------------------------------------------------------------------------------------------------------
# Output.

def number(value: float, unit: str, signed: bool = False) -> str:
    """A figure as the tables print it: one decimal for per cent, whole tokens or thousands of them, else two."""
    kilo = unit == "tokens" and abs(value) >= 9999.5
    digits = 1 if unit == "%" or kilo else 0 if unit == "tokens" else 2
    value = round(value / (1000 if kilo else 1), digits) + 0.0      # + 0.0: never "-0.0"
    return f"{value:{'+' if signed else ''}.{digits}f}" + "k" * kilo


def column(metrics: Sequence[dict], label: str) -> list[str]:
    """The column of a run or a difference: "value [low, high]" and p where there is one, all aligned."""
    parts = []
    for metric in metrics:
        one, paired = metric["figures"][label], "-" in label
        texts = ["" if one[key] is None else number(one[key], metric["unit"], paired or metric["kind"] == "gap")
                 for key in ("value", "low", "high")]
        p = one.get("p")
        p = "" if p is None else "<.001" if p < 0.001 else f"{min(p, 0.999):.3f}"[1:] if p < 1 else "1"
        parts.append((texts[0] + "%" * (metric["unit"] == "%" and not paired) if texts[0] else "-", *texts[1:], p))
    wide = [max(len(part[i]) for part in parts) for i in range(4)]
    return [label + ", p" * (wide[3] > 0)] + [
        f"{value:>{wide[0]}} " + (f"[{low:>{wide[1]}}, {high:>{wide[2]}}]" if low else " " * (wide[1] + wide[2] + 4))
        + f" {p:{wide[3]}}" * (wide[3] > 0) for value, low, high, p in parts]


def columns_of(result: dict) -> tuple[list[list[str]], list[str]]:
    """The table by columns, header first (metric, runs, differences, document), and the notes that stand below it."""
    metrics, labels = result["metrics"], [run["run"] for run in result["runs"]]
    places = list(dict.fromkeys(metric["place"] for metric in metrics if metric["place"]))
    paper = ["paper"]
    for metric in metrics:
        known = [number(metric[side], metric["unit"], metric["kind"] == "gap") for side in ("base", "deloop")
                 if metric[side] is not None]
        paper.append(f"{' -> '.join(known)} {chr(ord('a') + places.index(metric['place']))}" if known else "")
    left = result["left_out"]
    notes = [f"Left out of every run, for an error status in one: {names(left)}."] if left else []
    notes += ["[low, high]: 95%; Wilson for shares of tasks, Woolf for the odds ratio, bootstrap over tasks for the "
              f"rest and for differences ({result['draws']} draws, seed {result['seed']}). B-A: on the same tasks, in "
              "points where the unit is per cent; p: exact McNemar. -: undefined.",
              "paper: the DeLoop document's Qwen3-8B on CodeGym (300 tasks, summary at 4,096 tokens), base -> DeLoop: "
              + "; ".join(f"{chr(ord('a') + i)} {place}" for i, place in enumerate(places)) + "."]
    first = ["", *(metric["label"] for metric in metrics)]
    return [first, *(column(metrics, each) for each in (*labels, *(f"{each}-A" for each in labels[1:]))), paper], notes


def heads(result: dict) -> list[str]:
    """One line a run: tasks, statuses, policy, memory; and its settings that are not those of A."""
    lines, base = [], result["runs"][0]["config"]
    for run in result["runs"]:
        config, statuses = run["config"], run["statuses"]
        counts = ", ".join(f"{statuses[each]} {each}" for each in (*RESULTS, *ERRORS) if each in statuses)
        memory = "".join(f", {key.replace('_', ' ')} {config[key]}" for key in ("memory", "budget", "keep_last")
                         if key in config)
        differ = "".join(f", {key} {str(config.get(key))[:40]} (A: {str(base.get(key))[:40]})"
                         for key in sorted(config.keys() | base.keys()) if config.get(key) != base.get(key))
        tasks = f"{result['tasks']} tasks" + f", {run['episodes']} episodes" * (run["episodes"] != result["tasks"])
        lines.append(f"{run['run']}  {run['file']}: {tasks} ({counts}); {run['policy']}{memory}{differ}")
    return lines


def as_text(result: dict) -> str:
    """The table for a terminal of WIDTH columns; columns that do not fit go into further blocks."""
    columns, notes = columns_of(result)
    wide = [max(map(len, each)) for each in columns]
    gap = 2 if sum(wide) + 2 * len(wide) <= WIDTH else 1
    blocks = [[0]]
    for i in range(1, len(columns)):
        if sum(wide[j] + gap for j in [*blocks[-1], i]) - gap > WIDTH:
            blocks.append([0])
        blocks[-1].append(i)
    groups = [None, *(metric["group"] for metric in result["metrics"])]
    wrap = partial(textwrap.fill, width=WIDTH, break_on_hyphens=False, break_long_words=False)
    lines = [wrap(line, subsequent_indent="   ") for line in heads(result)]
    for block in blocks:
        for row, group in enumerate(groups):
            lines += [""] * (row == 0 or group != groups[row - 1])
            lines.append((" " * gap).join(f"{columns[i][row]:{'<' if row else '^'}{wide[i]}}" for i in block).rstrip())
    return "\n".join([*lines, "", *map(wrap, notes)]) + "\n"


def as_markdown(result: dict) -> str:
    """The same table for a README."""
    columns, notes = columns_of(result)
    rows = ["| " + " | ".join(" ".join(each.split()) for each in row) + " |" for row in zip(*columns)]
    rows.insert(1, "|" + "---|" * len(columns))
    return "\n".join([*(f"- {' '.join(line.split())}" for line in heads(result)), "", *rows, "", *notes]) + "\n"


def as_csv(result: dict) -> str:
    """One line for each figure of each run and difference."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    parts, paper = ("value", "low", "high", "n", "p"), ("base", "deloop", "place")
    writer.writerow(["run", "metric", "unit", *parts, *(f"paper_{each}" for each in paper)])
    for metric in result["metrics"]:
        for label, one in metric["figures"].items():
            writer.writerow([label, metric["key"], metric["unit"], *map(one.get, parts), *map(metric.get, paper)])
    return out.getvalue()


def unmet(result: dict, path: str) -> list[str]:
    """The lines of an --expect file that do not hold: {"A.loop_rate": [40, null], "B-A.loop_rate.high": [null, -25]}.

    A key is RUN.METRIC, with .low, .high, .n or .p for another part of the figure than its value; its value is the
    interval that the figure must lie in, ends included, null where open, in the units of the table.
    """
    metrics, failed = {metric["key"]: metric["figures"] for metric in result["metrics"]}, []
    for _, expected in deloop.read_jsonl(path):
        try:
            wanted = [(key, -math.inf if low is None else low + 0, math.inf if high is None else high + 0)
                      for key, (low, high) in expected.items()]
        except (AttributeError, TypeError, ValueError):
            raise InputError(f"{path}: must be an object of RUN.METRIC: [low, high], numbers or null") from None
        for key, low, high in wanted:
            run, metric, part = (key + "..").split(".")[:3]
            found, part = metrics.get(metric, {}).get(run, {}), part or "value"
            if part not in found:
                raise InputError(f"{path}: no figure {key!r}; runs: {', '.join(metrics['loop_rate'])}; "
                                 f"metrics: {', '.join(metrics)}; parts: value, low, high, n, p")
            if found[part] is None or not low <= found[part] <= high:
                failed.append(f"{key} is {found[part]}, expected {low} to {high}")
    return failed


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="eval.py", allow_abbrev=False, description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", metavar="FILE", help="runs of rollout.py; the first is the base")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--markdown", action="store_true", help="print a Markdown table [a table for the terminal]")
    form.add_argument("--json", action="store_true", help="print everything, for machines [off]")
    form.add_argument("--csv", action="store_true", help="print one line for each figure [off]")
    parser.add_argument("--expect", metavar="JSON", help="exit 1 if a figure is outside the interval that this file "
                        'states, such as {"A.loop_rate": [40, null], "B-A.loop_rate.high": [null, -25]} [none]')
    parser.add_argument("--drop-errors", action="store_true", help="leave episodes that ended in env_error or "
                        "policy_error in one run out of all runs [off: they are refused]")
    parser.add_argument("--draws", type=int, default=2000, help="bootstrap samples (not stated) [%(default)s]")
    parser.add_argument("--seed", type=int, default=0, help="seed of the bootstrap (not stated) [%(default)s]")
    options = parser.parse_args(argv)
    if options.draws < 40 or len(options.files) > 26:
        raise InputError("--draws must be at least 40 (for a 95% interval) and FILEs at most 26")
    result = evaluate([load(path) for path in options.files], options.draws, options.seed, options.drop_errors)
    failed = unmet(result, options.expect) if options.expect else []
    if options.json:
        print(json.dumps(result, indent=1))
    else:
        print((as_markdown if options.markdown else as_csv if options.csv else as_text)(result), end="")
    for line in failed:
        print(f"not met: {line}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    deloop.run(main)
