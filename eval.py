"""What came out: every figure of one or more runs with its 95% interval, beside the DeLoop document's figure.

    python eval.py base.jsonl                       # one run
    python eval.py base.jsonl dpo.jsonl [MORE...]   # each further run is compared with the first, task by task
    python eval.py base.jsonl dpo-0.jsonl,dpo-1.jsonl,dpo-2.jsonl       # three seeds of one policy, one column
    python eval.py full.jsonl summary.jsonl --plot pictures             # and pictures (needs matplotlib)

The way of the data: a trajectory is measured once (`measure` -> Episode); a metric is a pure function of an Episode
that returns the terms of its fraction; `figure` turns their sums over the run into the value. So one bootstrap over
tasks serves every metric, and METRICS is the only list that the tables, --json, --csv and --expect are made from.
Runs are named A, B, C ... in the order given; B-A is the paired difference. Standard library only.

What the document leaves open, decided here:
    DEV-15  the signatures near-repeat, redundant observation, argument thrash and productive repeat (`repetition`)
    DEV-16  a proposal of an executed call: any turn whose call was executed before, blocked or not (`proposals`)
    DEV-17  how delta, W_c and eps of the activity ceiling are estimated, and on what assumption (`ceiling`)
    DEV-18  seeds of one policy: their mean, intervals over tasks; each seed's figure is listed (`evaluate`)
"""
from __future__ import annotations

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
from pathlib import Path
from typing import Any, NamedTuple

import deloop
from deloop import ERRORS, MAY_DIFFER, RESULTS, Z, InputError, wilson

WIDTH = 110                     # columns of the terminal the table is laid out for
SEEDED = ("seed", "adapter", "policy", "model")     # settings that may differ between the seeds of one policy


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
    near: int               # of these: signatures of repetition beside the loop, see repetition
    redundant: int
    thrash: int
    distinct: int           # different calls
    work_c: int             # useful steps (s_t = 0) after the first compaction
    loops_c: int            # loop steps after it
    turns: int              # replies of the model, those without an executed call included
    unparsable: int         # of these: replies without a call that could be parsed
    proposals: int          # of these: replies whose call was executed before
    prompt: int             # tokens read: every prompt of every turn and of every summary
    completion: int         # tokens written: every reply and every summary
    transcript: int         # tokens of the conversation written once, see transcript_tokens
    compactions: int
    needed: int | None = None   # fewest different calls with which run A solved a task of this family; None: never
    base: tuple[int, int] = (0, 0)      # (work_c, loops_c) of this task in run A

    @property
    def tokens(self) -> int:
        """Tokens read and written: what a server without a prefix cache computes."""
        return self.prompt + self.completion

    @property
    def productive(self) -> int:
        """Repeated calls that returned what they had not returned before."""
        return self.repeats - self.loops


def measure(trajectory: Mapping) -> Episode:
    """The Episode of one trajectory with a result. KeyError or TypeError if a field of the format is missing."""
    run = deloop.steps(trajectory)
    flags = deloop.loop_flags((step.action, step.observation) for step in run)
    distinct = len({deloop.kappa(step.action) for step in run})
    turns, events = trajectory["turns"], trajectory["compactions"]
    notes = [turn["note"] for turn in turns if turn.get("note")]        # what a Reflexion-style guard had written
    since = min((event["before_turn"] for event in events), default=len(turns))
    return Episode(
        trajectory["task_id"], trajectory["sample"], trajectory["status"], trajectory["reward"] >= 1,
        steps=len(run), loops=sum(flags), repeats=len(run) - distinct, distinct=distinct, turns=len(turns),
        compactions=len(events), **repetition(run), proposals=proposals(turns),
        work_c=sum(not flag for flag, step in zip(flags, run) if step.turn >= since),
        loops_c=sum(flag for flag, step in zip(flags, run) if step.turn >= since),
        unparsable=sum(turn["action"] is None for turn in turns),
        prompt=sum(part["prompt_tokens"] for part in (*turns, *events, *notes)),
        completion=sum(part["completion_tokens"] for part in (*turns, *events, *notes)),
        transcript=transcript_tokens(turns, events))


def repetition(run: Iterable[deloop.Step]) -> dict[str, int]:
    """Steps that show each signature of repetition beside the loop. They may overlap, and thrash may be a loop too.

    near: a call not executed before that differs from an earlier one in the value of exactly one parameter.
    redundant: s_t = 0, but the observation, byte for byte, came before in answer to another call.
    thrash: A-B-A, the call of two steps ago again, after one call of the same function with other parameters.
    A productive repeat needs no flag: a call executed before, with s_t = 0.                            DEV-15
    """
    found, last, before = Counter(near=0, redundant=0, thrash=0), ("", ""), ("", "")    # (function, kappa) of the
    calls, answers, signatures, masks = set(), set(), set(), set()                      # last step and the one before
    for _, action, observation in run:
        name, parameters = parts(action)
        call, answer = deloop.kappa(action), deloop.signature("", observation)
        open_ = {(key, deloop.kappa({"name": name, "parameters": {k: v for k, v in parameters.items() if k != key}}))
                 for key in parameters}                     # the call with the value of one parameter left open
        found["near"] += call not in calls and not open_.isdisjoint(masks)
        found["redundant"] += answer is not None and answer in answers and (call, answer) not in signatures
        found["thrash"] += before == (name, call) != last and last[0] == name
        before, last = last, (name, call)
        for known, new in ((calls, {call}), (answers, {answer}), (signatures, {(call, answer)}), (masks, open_)):
            known |= new
    return dict(found)


def parts(action: Any) -> tuple[str, Mapping]:
    """(function, parameters) of a call; of a text action its first word, and the others by their place."""
    if isinstance(action, str):
        name, *words = action.split() or [""]
        return name, dict(enumerate(words))
    return action["name"], action["parameters"] if isinstance(action["parameters"], Mapping) else {}


def proposals(turns: Iterable[Mapping]) -> int:
    """Turns whose call (same kappa) was executed in an earlier turn, whether or not this one was executed: the same
    with an interceptor, which blocks them, and without, where they are the repeated calls.             DEV-16
    """
    executed, count = set(), 0
    for turn in turns:
        if turn["action"] is not None:
            call = deloop.kappa(turn["action"])
            count += call in executed
            executed |= {call} if turn["executed"] else set()
    return count


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


def per_task(what: str, e: Episode) -> Terms:
    """Sum of an Episode field (loops, steps, turns, tokens, prompt, completion, transcript: defined there) / tasks."""
    return getattr(e, what), 1


def tasks_with(what: str, e: Episode) -> Terms:
    """Tasks in which an Episode field (loops, near, proposals, compactions) is not 0 / tasks."""
    return getattr(e, what) > 0, 1


def share(what: str, among: str, e: Episode) -> Terms:
    """Steps with a signature (loops, near, redundant, thrash, productive) / steps, or proposals / turns, over the run.
    Between two runs: the amplification, share in B / share in A."""
    return getattr(e, what), getattr(e, among)


def selectivity(e: Episode) -> Terms:
    """Repeated calls (same kappa earlier) whose observation this call had not returned before / repeated calls."""
    return e.repeats - e.loops, e.repeats


def loop_rate_at(low: int, high: float, e: Episode) -> Terms:
    """Tasks of low to high steps with a loop / tasks of low to high steps: the loop rate at matched length."""
    inside = low <= e.steps <= high
    return inside and e.loops > 0, inside


def success(e: Episode) -> Terms:
    """Tasks with reward >= 1 / tasks."""
    return e.success, 1


def unfinished(e: Episode) -> Terms:
    """Tasks that ended without Done (turn_limit, context_overflow) / tasks."""
    return e.status != "done", 1


def premature_done(e: Episode) -> Terms:
    """Tasks given up: ended by Done, failed, and after fewer different calls than any success of run A in the same
    family / tasks of families that run A ever solved. One yardstick for all runs, so that giving up shows as a rise.
    """
    if e.needed is None:
        return 0, 0
    return e.status == "done" and not e.success and e.distinct < e.needed, 1


def failure_with(loop: bool, e: Episode) -> Terms:
    """Failed tasks with (without) a loop / tasks with (without) a loop."""
    inside = (e.loops > 0) == loop
    return inside and not e.success, inside


def failure_odds(what: str, e: Episode) -> Terms:
    """(failed, solved) tasks with a signature, (failed, solved) without: odds of failure with it / odds without. An
    association: a longer run has more room for both."""
    shown = getattr(e, what) > 0
    return shown and not e.success, shown and e.success, not shown and not e.success, not shown and e.success


def loop_cost(what: str, e: Episode) -> Terms:
    """Mean of `what` (an Episode field) over tasks with a loop - mean over tasks without: an association, no cause."""
    loop, amount = e.loops > 0, getattr(e, what)
    return loop * amount, loop, (not loop) * amount, not loop


def ambiguity(e: Episode) -> Terms:
    """delta: loop steps / useful steps (s_t = 0), both after the first compaction, over the whole run."""
    return e.loops_c, e.work_c


def ceiling(e: Episode) -> Terms:
    """eps / delta_A: the useful work after compression that this run could do if it told repeats from new actions no
    better than run A does. eps: this run's loop steps after the first compaction / tasks; delta_A: ambiguity of A.

    The proposition reads E[loops_c] >= delta E[work_c] for a policy that cannot tell them apart, so work_c <= eps /
    delta. Assumed: A is such a policy and meets the bound (for A the ceiling is its own work_c); delta belongs to
    tasks and harness, not to how long a run is. A run whose W_c is above its ceiling discriminates better than A; at
    it, it only does less.                                                                              DEV-17
    """
    return e.loops_c, 1, *e.base


class Metric(NamedTuple):
    """kind: rate (of tasks) | mean | share | times (a share, compared as a ratio) | odds | gap | ceiling. base, deloop:
    the document's figures for Qwen3-8B on CodeGym, times: its ratio full history -> compressed; None where it gives
    none. place: where they stand in it."""
    group: str
    key: str
    label: str
    terms: Callable[[Episode], Terms]
    kind: str
    unit: str
    base: float | None = None
    deloop: float | None = None
    place: str = ""
    times: float | None = None


TABLE, MECHANISM, TOKENS = "Table 1", "results, on mechanism", "Table 1 (kind of tokens not stated)"
NOVELTY, BY_LOOP, COST = "novelty, on signatures", "figure on failure by loop", "figure on the cost of loops"
LIMITS, INTERCEPTOR = "limitations", "motivation, on interceptors"
METRICS = (
    Metric("loops", "loop_rate", "loop rate", partial(tasks_with, "loops"), "rate", "%", 57.3, 6.1, TABLE),
    Metric("loops", "loop_rate_1_5", "  of 1-5 steps", partial(loop_rate_at, 1, 5), "rate", "%"),
    Metric("loops", "loop_rate_6_10", "  of 6-10 steps", partial(loop_rate_at, 6, 10), "rate", "%", 33.2, 13.1,
           MECHANISM),
    Metric("loops", "loop_rate_11_20", "  of 11-20 steps", partial(loop_rate_at, 11, 20), "rate", "%"),
    Metric("loops", "loop_rate_21", "  of 21 or more", partial(loop_rate_at, 21, math.inf), "rate", "%"),
    Metric("loops", "loop_steps", "loop steps", partial(per_task, "loops"), "mean", ""),
    Metric("loops", "selectivity", "selectivity", selectivity, "share", "%", 29.9, 69.8, MECHANISM),
    Metric("loops", "proposal_rate", "re-proposing tasks", partial(tasks_with, "proposals"), "rate", "%", 71.3, None,
           INTERCEPTOR),
    Metric("loops", "proposal_share", "re-proposing turns", partial(share, "proposals", "turns"), "share", "%"),
    Metric("repetition", "loop_share", "share: loop", partial(share, "loops", "steps"), "times", "%", 24.8, None,
           NOVELTY, 3.77),
    Metric("repetition", "near_share", "share: near-repeat", partial(share, "near", "steps"), "times", "%", None,
           None, NOVELTY, 0.73),
    Metric("repetition", "redundant_share", "share: redundant", partial(share, "redundant", "steps"), "times", "%",
           None, None, NOVELTY, 1.07),
    Metric("repetition", "thrash_share", "share: thrash", partial(share, "thrash", "steps"), "times", "%", 0.3, None,
           LIMITS),
    Metric("repetition", "productive_share", "share: productive", partial(share, "productive", "steps"), "times", "%"),
    Metric("repetition", "near_rate", "near-repeat tasks", partial(tasks_with, "near"), "rate", "%", 77.9, None,
           LIMITS),
    Metric("outcome", "success", "success", success, "rate", "%", 25.1, 25.9, TABLE),
    Metric("outcome", "unfinished", "unfinished", unfinished, "rate", "%"),
    Metric("outcome", "premature_done", "premature Done", premature_done, "rate", "%"),
    Metric("outcome", "unparsable", "unparsable turns", partial(share, "unparsable", "turns"), "share", "%"),
    Metric("effort", "steps", "steps", partial(per_task, "steps"), "mean", "", 15.00, 4.67, TABLE),
    Metric("effort", "turns", "turns", partial(per_task, "turns"), "mean", ""),
    Metric("effort", "tokens", "tokens", partial(per_task, "tokens"), "mean", "tokens", 23900, 12700, TOKENS),
    Metric("effort", "prompt_tokens", "  prompt", partial(per_task, "prompt"), "mean", "tokens"),
    Metric("effort", "completion_tokens", "  completion", partial(per_task, "completion"), "mean", "tokens"),
    Metric("effort", "transcript_tokens", "transcript tokens", partial(per_task, "transcript"), "mean", "tokens",
           23900, 12700, TOKENS),
    Metric("failure", "failure_loop", "failure with loop", partial(failure_with, True), "rate", "%", 85.0, None,
           BY_LOOP),
    Metric("failure", "failure_no_loop", "failure without", partial(failure_with, False), "rate", "%", 68.0, None,
           BY_LOOP),
    Metric("failure", "failure_odds", "odds: loop", partial(failure_odds, "loops"), "odds", ""),
    Metric("failure", "near_odds", "odds: near-repeat", partial(failure_odds, "near"), "odds", ""),
    Metric("failure", "redundant_odds", "odds: redundant", partial(failure_odds, "redundant"), "odds", ""),
    Metric("failure", "thrash_odds", "odds: thrash", partial(failure_odds, "thrash"), "odds", "", 3.10, None, LIMITS),
    Metric("failure", "productive_odds", "odds: productive", partial(failure_odds, "productive"), "odds", "", 2.00,
           None, LIMITS),
    Metric("failure", "loop_cost_steps", "loop runs: steps", partial(loop_cost, "steps"), "gap", "", 10.5, None, COST),
    Metric("failure", "loop_cost_tokens", "loop runs: tokens", partial(loop_cost, "transcript"), "gap", "tokens",
           11000, None, COST),
    Metric("compression", "compacted", "with a compaction", partial(tasks_with, "compactions"), "rate", "%"),
    Metric("compression", "loops_c", "loop steps after", partial(per_task, "loops_c"), "mean", ""),
    Metric("compression", "work_c", "useful steps after", partial(per_task, "work_c"), "mean", ""),
    Metric("compression", "ambiguity", "delta", ambiguity, "times", ""),
    Metric("compression", "ceiling", "ceiling eps/delta", ceiling, "ceiling", ""),
)
MAIN = ("loop_rate", "loop_rate_1_5", "loop_rate_6_10", "loop_rate_11_20", "loop_rate_21", "loop_steps", "selectivity",
        "loop_share", "success", "unfinished", "premature_done", "unparsable", "steps", "tokens", "transcript_tokens",
        "compacted", "failure_loop", "failure_no_loop")          # what a table shows without --all


# ---------------------------------------------------------------------------------------------------------------------
# Estimates: all of them pure, and the same for every metric.

def figure(kind: str, sums: Sequence[float]) -> float | None:
    """The value from the summed terms; None where it is undefined.

    rate, mean, share, times: s0 / s1. gap: s0 / s1 - s2 / s3. ceiling: s0 / s1 * s2 / s3. odds: (s0 + 1/2)(s3 + 1/2) /
    ((s1 + 1/2)(s2 + 1/2)), the halves (Haldane, Anscombe) so that an empty cell gives a finite figure; undefined if
    all tasks or none show what is asked about.
    """
    if kind == "odds":
        a, b, c, d = (s + 0.5 for s in sums)
        return a * d / (b * c) if sums[0] + sums[1] and sums[2] + sums[3] else None
    if kind == "gap":
        return sums[0] / sums[1] - sums[2] / sums[3] if sums[1] and sums[3] else None
    if kind == "ceiling":
        return sums[0] / sums[1] * sums[2] / sums[3] if sums[1] and sums[3] else None
    return sums[0] / sums[1] if sums[1] else None


def compare(kind: str, a: float | None, b: float | None) -> float | None:
    """The figure b of a run against a of run A: b - a, for times b / a; None for odds and ceiling, or if undefined."""
    if a is None or b is None or kind in ("odds", "ceiling"):
        return None
    if kind == "times":
        return b / a if a else None
    return b - a


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


def check_seeds(runs: Sequence[Run]) -> None:
    """InputError unless the files of one column are different files of one policy with equal settings."""
    for i, run in enumerate(runs[1:], 1):
        if any(run.path == earlier.path for earlier in runs[:i]):
            raise InputError(f"{run.path} is named twice in one column")
        differ = [key for key in sorted(run.config.keys() | runs[0].config.keys())
                  if key not in SEEDED and run.config.get(key) != runs[0].config.get(key)]
        if differ:
            raise InputError(f"{run.path} and {runs[0].path} differ in {', '.join(differ)}: these are no seeds of one "
                             "policy; give them as two runs, with a space between")


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


def evaluate(columns: Sequence[Sequence[Run]], draws: int = 2000, seed: int = 0, drop_errors: bool = False) -> dict:
    """Everything that can be printed, in the units of the tables: what --json writes.

    columns: the runs A, B, ..., each a list of files: one, or the seeds of one policy, whose episodes count as samples
    of their task (DEV-18). Each metric has figures {"A": {value, low, high, n}, "B": ..., "B-A": {value, low,
    high, p}}, "B/A" for a ratio; n is the denominator; "files" the values of the seeds. Intervals are 95%: Wilson
    (rate) and Woolf (odds) for one episode a task, else bootstrap over tasks, for a comparison over the same tasks in
    both runs. They tell what other tasks would change; what another training seed would, only "files" shows.
    """
    dropped = check_runs([run for runs in columns for run in runs], drop_errors)
    for runs in columns:
        check_seeds(runs)
    kept = [[[e for key, e in run.episodes.items() if key not in dropped] for run in runs] for runs in columns]
    base = with_base(kept[0])
    kept = [[[base(e) for e in file] for file in files] for files in kept]
    tasks = len({e.task_id for e in kept[0][0]})
    labels, samples = [chr(ord("A") + i) for i in range(len(columns))], resample(tasks, draws, seed)
    metrics = [{key: value for key, value in metric._asdict().items() if key != "terms"}
               | {"figures": figures(metric, dict(zip(labels, kept)), samples)} for metric in METRICS]
    return {"runs": list(map(head, labels, columns, kept)), "tasks": tasks, "left_out": dropped, "draws": draws,
            "seed": seed, "metrics": metrics}


def head(label: str, runs: Sequence[Run], files: list[list[Episode]]) -> dict:
    """What stands above the table for one column; lengths[i]: how many episodes have i steps."""
    lengths = Counter(e.steps for e in sum(files, []))
    statuses = Counter(e.status for e in sum(files, [])) + Counter(each for run in runs for each in run.errors.values())
    return {"run": label, "files": [run.path for run in runs], "policy": common([run.policy for run in runs]),
            "episodes": lengths.total(), "statuses": dict(statuses),
            "config": {key: common([run.config.get(key) for run in runs]) for key in runs[0].config},
            "lengths": [lengths[i] for i in range(max(lengths) + 1)]}


def common(values: list) -> Any:
    """The value that all share, else the list of them."""
    return values if any(value != values[0] for value in values) else values[0]


def with_base(files: list[list[Episode]]) -> Callable[[Episode], Episode]:
    """A function that adds to an episode what some metrics need of run A, whose files these are: needed and base."""
    base, after = sum(files, []), {}
    for e in base:
        work, loops = after.get(e.task_id, (0, 0))
        after[e.task_id] = work + e.work_c, loops + e.loops_c
    needed = needed_calls(base)
    return lambda e: dataclasses.replace(e, needed=needed.get(family(e.task_id)), base=after[e.task_id])


def figures(metric: Metric, runs: Mapping[str, list[list[Episode]]], samples: list[list[int]]) -> dict[str, dict]:
    """The figures of one metric: of every run, and of every later run against the first."""
    found, made = {}, {}
    for label, files in runs.items():
        columns = task_sums(sum(files, []), metric)
        made[label] = columns, bootstrap(metric.kind, columns, samples), len(samples[0]) == sum(map(len, files))
        found[label] = estimate(metric, *made[label])
        if len(files) > 1:
            each = [figure(metric.kind, [sum(column) for column in task_sums(file, metric)]) for file in files]
            found[label]["files"] = [scaled(metric.unit, value)["value"] for value in each]
    base = made.pop("A")
    for label, other in made.items():
        found[f"{label}{'/' if metric.kind == 'times' else '-'}A"] = difference(metric, base, other)
    return found


def estimate(metric: Metric, columns: list[list[int]], boot: list[float | None], single: bool) -> dict:
    """Value, interval and denominator of one run. single: one episode a task, so tasks are independent trials."""
    sums = [sum(column) for column in columns]
    value, (low, high) = figure(metric.kind, sums), percentiles(boot)
    if single and value is not None and metric.kind in ("rate", "odds"):
        low, high = wilson(*sums) if metric.kind == "rate" else woolf(sums)
    elif value in (0, 1) and metric.kind == "rate":     # where all samples are alike, the bootstrap sees no spread:
        tasks = sum(map(bool, columns[1]))              # count each task once, as if its episodes had to agree
        low, high = wilson(value * tasks, tasks)
    parts = {"odds": sums, "gap": sums[1::2]}.get(metric.kind, sums[1:2])
    return {**scaled(metric.unit, value, low, high), "n": sum(parts)}


def difference(metric: Metric, base: Sequence, other: Sequence) -> dict:
    """Another run against A, its paired interval, and McNemar's p for a rate over the same tasks, one episode each."""
    (first, boot, single), (second, boot2, single2) = base, other
    a, b = (figure(metric.kind, [sum(column) for column in columns]) for columns in (first, second))
    value, ends = compare(metric.kind, a, b), (None, None)
    if value is not None:
        ends = percentiles(map(partial(compare, metric.kind), boot, boot2))
    same = value is not None and single and single2 and metric.kind == "rate" and first[1] == second[1]
    p = round(mcnemar(first[0], second[0]), 9) if same else None
    return {**scaled("" if metric.kind == "times" else metric.unit, value, *ends), "p": p}


def scaled(unit: str, *values: float | None) -> dict:
    """value, low and high in the unit of the tables, rounded so that they read the same on every machine."""
    factor = 100 if unit == "%" else 1
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
    """The column of a run or a comparison: "value [low, high]" and p where there is one, all aligned."""
    cells, paired = [], "-" in label
    for metric in metrics:
        ratio = label not in metric["figures"]
        one = metric["figures"][label.replace("-", "/") if ratio else label]
        texts = ["" if one[key] is None else number(one[key], "" if ratio else metric["unit"], signed=not ratio and (
            paired or metric["kind"] == "gap")) for key in ("value", "low", "high")]
        p = one.get("p")
        p = "" if p is None else "<.001" if p < 0.001 else f"{min(p, 0.999):.3f}"[1:] if p < 1 else "1"
        value = "x" * ratio + texts[0] + "%" * (metric["unit"] == "%" and not paired) if texts[0] else "-"
        cells.append((value, *texts[1:], p))
    wide = [max(len(cell[i]) for cell in cells) for i in range(4)]
    return [label + ", p" * (wide[3] > 0)] + [
        f"{value:>{wide[0]}} " + (f"[{low:>{wide[1]}}, {high:>{wide[2]}}]" if low else " " * (wide[1] + wide[2] + 4))
        + f" {p:{wide[3]}}" * (wide[3] > 0) for value, low, high, p in cells]


def columns_of(result: dict) -> tuple[list[list[str]], list[str]]:
    """The table by columns, header first (metric, runs, differences, document), and the notes that stand below it."""
    metrics, labels = result["metrics"], [run["run"] for run in result["runs"]]
    places = list(dict.fromkeys(metric["place"] for metric in metrics if metric["place"]))
    paper = ["paper"]
    for metric in metrics:
        known = [number(metric[side], metric["unit"], metric["kind"] == "gap") for side in ("base", "deloop")
                 if metric[side] is not None]
        known = [" -> ".join(known), f"x{metric['times']}" if metric["times"] else "",
                 chr(ord("a") + places.index(metric["place"])) if metric["place"] else ""]
        paper.append(" ".join(filter(None, known)))
    left = result["left_out"]
    notes = [f"Left out of every run, for an error status in one: {names(left)}."] if left else []
    if any(len(run["files"]) > 1 for run in result["runs"]):
        notes.append("Several files in one column: seeds of one policy, as samples of each task; the interval tells "
                     "what other tasks would change, the figures by file what another seed would.")
    notes += ["[low, high]: 95%; Wilson for shares of tasks, Woolf for the odds ratio, bootstrap over tasks for the "
              f"rest and for differences ({result['draws']} draws, seed {result['seed']}). B-A: on the same tasks, in "
              "points where the unit is per cent; x: their ratio B/A instead; p: exact McNemar. -: undefined.",
              "paper: the DeLoop document's Qwen3-8B on CodeGym (300 tasks, summary at 4,096 tokens), base -> DeLoop; "
              "x: full history -> compressed: "
              + "; ".join(f"{chr(ord('a') + i)} {place}" for i, place in enumerate(places)) + "."]
    first = ["", *(metric["label"] for metric in metrics)]
    return [first, *(column(metrics, each) for each in (*labels, *(f"{each}-A" for each in labels[1:]))), paper], notes


def heads(result: dict) -> list[str]:
    """One line a run: tasks, statuses, policy, memory; and its settings that are not those of A."""
    lines, base, shown = [], result["runs"][0]["config"], ("memory", "budget", "keep_last")
    metrics = {each["key"]: each["figures"] for each in result["metrics"]}
    for run in result["runs"]:
        config, statuses = run["config"], run["statuses"]
        counts = ", ".join(f"{statuses[each]} {each}" for each in (*RESULTS, *ERRORS) if each in statuses)
        memory = "".join(f", {key.replace('_', ' ')} {config[key]}" for key in shown if key in config)
        differ = "".join(f", {key} {str(config.get(key))[:40]} (A: {str(base.get(key))[:40]})"
                         for key in sorted((config.keys() | base.keys()) - {*shown, "adapter"})     # policy names it
                         if config.get(key) != base.get(key))
        policy = " | ".join(run["policy"]) if isinstance(run["policy"], list) else run["policy"]
        tasks = f"{result['tasks']} tasks" + f", {run['episodes']} episodes" * (run["episodes"] != result["tasks"])
        seeds = "".join(f"; {each.replace('_', ' ')} by file " + ", ".join(
            "-" if value is None else f"{value:.1f}%" for value in metrics[each][run["run"]]["files"])
            for each in ("loop_rate", "success") if len(run["files"]) > 1 and each in metrics)
        lines.append(f"{run['run']}  {', '.join(run['files'])}: {tasks} ({counts}); {policy}{memory}{differ}{seeds}")
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
    parts, paper = ("value", "low", "high", "n", "p"), ("base", "deloop", "times", "place")
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
                runs = ", ".join(metrics.get(metric, metrics["loop_rate"]))
                raise InputError(f"{path}: no figure {key!r}; runs: {runs}; "
                                 f"metrics: {', '.join(metrics)}; parts: value, low, high, n, p")
            if found[part] is None or not low <= found[part] <= high:
                failed.append(f"{key} is {found[part]}, expected {low} to {high}")
    return failed


# ---------------------------------------------------------------------------------------------------------------------
# Pictures. Colours after Okabe and Ito, each with a marker and a line style of its own: they read in grey too.

STYLES = (("#000000", "o", "-"), ("#D55E00", "s", "--"), ("#0072B2", "^", "-."), ("#009E73", "D", ":"),
          ("#CC79A7", "v", "-"), ("#E69F00", "P", "--"), ("#56B4E9", "X", "-."))
LOOK = {"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": "#dddddd",
        "axes.axisbelow": True, "legend.frameon": False, "figure.constrained_layout.use": True, "savefig.dpi": 150,
        "font.size": 9, "errorbar.capsize": 2.5}
LOOPING, SOLVED = "tasks with a loop, % (95% interval)", "tasks solved, % (95% interval)"


def plot(result: dict, folder: Path) -> list[str]:
    """Draw what the runs allow as PNG into folder, which is made; returns a line for each picture. Everything stands in
    result but the number of pairs (pairs_of). InputError without matplotlib."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise InputError("--plot needs matplotlib: python -m pip install matplotlib") from None
    lines, wanted = [], [each for each in result["metrics"] if each["key"] in ("loop_rate", "success", "steps")]
    runs = [run | {each["key"]: each["figures"][run["run"]] for each in wanted} for run in result["runs"]]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--plot {folder}: cannot be made ({error})") from None
    for draw in (draw_loop_rate, draw_budget, draw_pairs, draw_loops_success, draw_steps):
        name = draw.__name__.removeprefix("draw_") + ".png"
        with matplotlib.rc_context(LOOK):
            picture = Figure(figsize=(6.4, 4))
            missing = draw(picture, runs)
            if not missing:
                picture.savefig(folder / name, metadata={"Software": None})
        lines.append(f"not drawn: {name}, {missing}" if missing else f"drawn: {folder / name}")
    return lines


def bars(figures: Iterable[Mapping]) -> list[list[float]]:
    """Intervals as matplotlib's error bars: how far they reach below the values, and above."""
    return [[0.0 if one[end] is None else abs(one[end] - one["value"]) for one in figures] for end in ("low", "high")]


def caption(run: Mapping) -> str:
    """The letter and the file of a run, short enough for an axis."""
    name = Path(run["files"][0]).stem
    name = name if len(name) <= 28 else f"{name[:12]}...{name[-13:]}"
    return f"{run['run']}  {name}" + f" and {len(run['files']) - 1} more" * (len(run["files"]) > 1)


def series(axes: Any, i: int, runs: Sequence[Mapping], x: Sequence[float], y: Sequence[float], line: bool = False,
           **keywords: Any) -> None:
    """The values of some runs with their intervals and letters, in the i-th style."""
    colour, marker, style = STYLES[i % len(STYLES)]
    axes.errorbar(x, y, fmt=marker, linestyle=style if line else "", color=colour, ecolor="#888888", elinewidth=1,
                  **keywords)
    for run, *place in zip(runs, x, y):
        axes.annotate(run["run"], place, (4, 4), textcoords="offset points")


def draw_loop_rate(picture: Any, runs: Sequence[Mapping]) -> None:
    """Loop rate by run, the first on top."""
    picture.set_size_inches(6.4, 0.9 + 0.35 * len(runs))
    axes = picture.add_subplot(xlim=(0, 100), ylim=(len(runs) - 0.5, -0.5), xlabel=LOOPING, yticks=range(len(runs)),
                               yticklabels=map(caption, runs))
    for i, run in enumerate(runs):
        series(axes, i, [], [run["loop_rate"]["value"]], [i], xerr=bars([run["loop_rate"]]))


def draw_loops_success(picture: Any, runs: Sequence[Mapping]) -> None:
    """Loop rate against success, a point for each run."""
    picture.set_size_inches(6.4, 4 + 0.1 * len(runs))
    axes = picture.add_subplot(xlabel=LOOPING, ylabel=SOLVED)
    for i, run in enumerate(runs):
        x, y = run["loop_rate"], run["success"]
        series(axes, i, [run], [x["value"]], [y["value"]], xerr=bars([x]), yerr=bars([y]), label=caption(run))
    axes.set(xlim=(0, None), ylim=(0, None))
    picture.legend(loc="outside lower center", ncols=2)


def draw_steps(picture: Any, runs: Sequence[Mapping]) -> None:
    """Histogram of steps, a panel for each run, all with the same axes; the dashed line is the mean."""
    picture.set_size_inches(6.4, 0.8 + 1.1 * len(runs))
    panels = picture.subplots(len(runs), sharex=True, sharey=True, squeeze=False)[:, 0]
    for axes, run in zip(panels, runs):
        axes.bar(range(len(run["lengths"])), [100 * n / run["episodes"] for n in run["lengths"]], color="#9a9a9a")
        axes.axvline(run["steps"]["value"], color="#000000", linestyle="--", linewidth=1)
        axes.set_title(caption(run), loc="left", fontsize="medium")
    panels[-1].set_xlabel("steps")
    panels[-1].locator_params(axis="x", integer=True)
    picture.supylabel("tasks, %", fontsize="medium")


def draw_budget(picture: Any, runs: Sequence[Mapping]) -> str | None:
    """Loop rate by context setting, the tightest first, a line for each policy."""
    return draw_lines(picture, runs, "context", context_of, lambda run: str(run["policy"]))


def draw_pairs(picture: Any, runs: Sequence[Mapping]) -> str | None:
    """Loop rate by number of preference pairs, 0 without an adapter, a line for each context setting."""
    return draw_lines(picture, [run for run in runs if pairs_of(run) is not None], "preference pairs trained on",
                      lambda run: (pairs_of(run), f"{pairs_of(run):,}"), lambda run: context_of(run)[1])


def context_of(run: Mapping) -> tuple[float, str]:
    """(budget, name) of a run's context setting: the full history is the widest."""
    memory, budget = run["config"].get("memory", ""), run["config"].get("budget") or 0
    return (math.inf, "full") if memory == "full" else (budget, f"{memory} {budget:,}")


def pairs_of(run: Mapping) -> int | None:
    """How many pairs a run's adapter was trained on: counts.used in its state.json; None if that cannot be read."""
    adapter = run["config"].get("adapter")
    try:
        adapter = adapter[0] if isinstance(adapter, list) else adapter
        return json.loads((Path(adapter) / "state.json").read_text())["counts"]["used"] if adapter else 0
    except (OSError, ValueError, KeyError, TypeError):
        return None


def draw_lines(picture: Any, runs: Sequence[Mapping], xlabel: str, place: Callable, group: Callable) -> str | None:
    """Loop rate over evenly spaced places (order, label), a line for each group of runs in two places or more; what is
    missing, if there is none. No line where a group has two runs in one place: nothing says which to join."""
    groups: dict[str, list[Mapping]] = {}
    for run in sorted(runs, key=place):
        groups.setdefault(group(run), []).append(run)
    groups = {name: members for name, members in groups.items() if len(set(map(place, members))) > 1}
    if not groups:
        return f"which needs runs that differ in: {xlabel}"
    places = sorted({place(run) for members in groups.values() for run in members})
    axes = picture.add_subplot(ylim=(0, 100), xlabel=xlabel, ylabel=LOOPING, xticks=range(len(places)),
                               xticklabels=[label for _, label in places])
    for i, (name, members) in enumerate(groups.items()):
        rates, x = [run["loop_rate"] for run in members], [places.index(place(run)) for run in members]
        beside = 0.06 * (i - (len(groups) - 1) / 2)             # intervals of different groups side by side
        series(axes, i, members, [each + beside for each in x], [one["value"] for one in rates],
               line=len(set(x)) == len(x), yerr=bars(rates), label=name)
    picture.legend(loc="outside lower center")
    return None             # nothing is missing


def main(argv: list[str]) -> int:
    """The command line; returns the exit code: 1 if a figure of --expect is not met."""
    parser = deloop.Parser(prog="eval.py", description=__doc__)
    parser.add_argument("files", nargs="+", metavar="FILE[,FILE...]", help="runs of rollout.py, the first is the base; "
                        "with commas between: the seeds of one policy, counted as one run")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--markdown", action="store_true", help="print a Markdown table [a table for the terminal]")
    form.add_argument("--json", action="store_true", help="print everything, for machines [off]")
    form.add_argument("--csv", action="store_true", help="print one line for each figure [off]")
    parser.add_argument("--all", action="store_true", help="tables of every figure [the main ones; --json and --csv "
                        "always hold all]")
    parser.add_argument("--only", metavar="KEY,KEY", help="only these figures, by their keys in --json [none]")
    parser.add_argument("--expect", metavar="JSON", help="exit 1 if a figure is outside the interval that this file "
                        'states, such as {"A.loop_rate": [40, null], "B-A.loop_rate.high": [null, -25]} [none]')
    parser.add_argument("--plot", metavar="DIR", help="also draw pictures into this folder (needs matplotlib) [none]")
    parser.add_argument("--drop-errors", action="store_true", help="leave episodes that ended in env_error or "
                        "policy_error in one run out of all runs [off: they are refused]")
    parser.add_argument("--draws", type=int, default=2000, help="bootstrap samples (not stated) [%(default)s]")
    parser.add_argument("--seed", type=int, default=0, help="seed of the bootstrap (not stated) [%(default)s]")
    options = parser.parse_args(argv)
    if options.draws < 40 or len(options.files) > 26:
        raise InputError("--draws must be at least 40 (for a 95% interval) and FILEs at most 26")
    columns = [[load(path) for path in argument.split(",")] for argument in options.files]
    result = evaluate(columns, options.draws, options.seed, options.drop_errors)
    failed = unmet(result, options.expect) if options.expect else []
    if options.only or not (options.all or options.json or options.csv):
        wanted, known = options.only.split(",") if options.only else MAIN, {m["key"]: m for m in result["metrics"]}
        if unknown := [key for key in wanted if key not in known]:
            raise InputError(f"--only: no figure {', '.join(unknown)}; known: {', '.join(known)}")
        result["metrics"] = [known[key] for key in wanted]
    if options.json:
        print(json.dumps(result, indent=1))
    else:
        print((as_markdown if options.markdown else as_csv if options.csv else as_text)(result), end="")
    for line in plot(result, Path(options.plot)) if options.plot else []:
        print(line, file=sys.stderr)
    for line in failed:
        print(f"not met: {line}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    deloop.run(main)
