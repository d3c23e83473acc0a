"""The metrics against answers worked out by hand, the intervals against published values, the command from outside."""

import csv
import io
import json
import math
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import eval as evaluation
import pytest
from deloop import InputError, kappa, steps
from eval import METRICS, bootstrap, evaluate, load, mcnemar, measure, percentiles, resample, wilson, woolf

ROOT = Path(__file__).resolve().parent.parent


def trajectory(task_id, calls, reward=1.0, status="done", sample=0, compactions=(), tokens=None, **config):
    """A trajectory in rollout.py's format. calls: "f 1 2:x" is the call f(a=1, b=2) with answer x, "!f 1 2" the same
    call blocked, "" a reply without a call."""
    turns = []
    for i, call in enumerate(calls):
        text, _, answer = call.lstrip("!").partition(":")
        name, *values = text.split() or [""]
        executed = bool(call) and call[0] != "!"
        prompt, completion = tokens[i] if tokens else (100 + 20 * i, 10)
        action = {"name": name, "parameters": dict(zip("abc", values))} if call else None
        turns.append({"message": 2 + 2 * i, "action": action, "executed": executed,
                      "observation": answer if executed else None, "finish": "stop",
                      "prompt_tokens": prompt, "completion_tokens": completion, "parse": "ok" if call else "no_call"})
    return {"format": "deloop-trajectory/1", "task_id": task_id, "sample": sample, "seed": 0, "env": "codegym",
            "policy": "tiny", "config": {"memory": "summary", "budget": 160, **config}, "status": status,
            "reward": reward, "messages": [], "turns": turns, "compactions": list(compactions)}


def write(path, trajectories):
    path.write_text("".join(json.dumps(each) + "\n" for each in trajectories), encoding="utf-8")
    return str(path)


def read(path):
    return list(map(json.loads, Path(path).read_text().splitlines()))


def command(*arguments):
    return subprocess.run([sys.executable, str(ROOT / "eval.py"), *map(str, arguments)], capture_output=True, text=True)


def columns(*arguments):
    """The columns of a command line: files, or files with commas between."""
    return [[load(path) for path in argument.split(",")] for argument in arguments]


def figures(*paths, **keywords):
    """{"A.loop_rate": {value, ...}, ...} of some files."""
    result = evaluate(columns(*paths), **{"draws": 200, **keywords})
    return {f"{label}.{metric['key']}": one for metric in result["metrics"] for label, one in metric["figures"].items()}


# Four tasks whose figures can be read off: two loop (a three times equal, b twice), one re-checks, one never calls.
HAND = [trajectory("max-1", ["a:1", "b:2", "a:1", "a:1", "Done:"], 0.0),
        trajectory("max-2", ["a:1", "b:2", "c:3", "d:4", "e:5", "b:2", "Done:"], 1.0),
        trajectory("min-1", ["a:1", "a:2", "", "Done:"], 1.0),
        trajectory("min-2", ["", ""], 0.0, "turn_limit")]


def test_metrics_equal_the_figures_worked_out_by_hand(tmp_path):
    """Every metric on four hand-made trajectories equals its formula evaluated by hand."""
    found = {key[2:]: one["value"] for key, one in figures(write(tmp_path / "a.jsonl", HAND)).items()}
    assert found == pytest.approx({
        "loop_rate": 50.0, "loop_rate_1_5": 50.0, "loop_rate_6_10": 100.0, "loop_rate_11_20": None,
        "loop_rate_21": None, "loop_steps": 0.75, "loop_share": 100 * 3 / 15, "selectivity": 25.0, "success": 50.0,
        "unfinished": 25.0, "premature_done": 25.0, "unparsable": 100 * 3 / 18, "steps": 15 / 4, "turns": 18 / 4,
        "tokens": (750 + 1190 + 560 + 240) / 4, "prompt_tokens": (700 + 1120 + 520 + 220) / 4,
        "completion_tokens": 45.0, "transcript_tokens": (190 + 230 + 170 + 130) / 4, "compacted": 0.0,
        "failure_loop": 50.0, "failure_no_loop": 50.0, "failure_odds": 1.0, "loop_cost_steps": 6 - 1.5,
        "loop_cost_tokens": 210 - 150, "proposal_rate": 75.0, "proposal_share": 100 * 4 / 18, "near_share": 0.0,
        "redundant_share": 0.0, "thrash_share": 0.0, "productive_share": 100 / 15, "near_rate": 0.0, "near_odds": None,
        "redundant_odds": None, "thrash_odds": None, "productive_odds": 0.5 * 1.5 / (1.5 * 2.5), "loops_c": 0.0,
        "work_c": 0.0, "ambiguity": None, "ceiling": None}, abs=1e-6)


def test_transcript_counts_the_conversation_once_whatever_the_memory():
    """The same messages give the same transcript with and without compaction; cut replies never count negative."""
    full = trajectory("t-1", ["a:1", "b:1", "c:1"], tokens=[(100, 10), (130, 20), (180, 5)])
    event = {"before_turn": 2, "dropped": [2, 4], "summary": "s", "tokens_before": 180, "tokens_after": 90,
             "prompt_tokens": 140, "completion_tokens": 7}
    packed = trajectory("t-1", ["a:1", "b:1", "c:1"], tokens=[(100, 10), (130, 20), (90, 5)], compactions=[event])
    assert measure(full).transcript == measure(packed).transcript == 180 + 5        # the last prompt and its reply
    assert measure(packed).prompt == 100 + 130 + 90 + 140 and measure(packed).completion == 10 + 20 + 5 + 7
    short = trajectory("t-1", ["a:1", "b:1"], tokens=[(100, 50), (120, 5)])         # 50 written, 20 shown again
    assert measure(short).transcript == 100 + 50 + 5
    unused = {**event, "before_turn": 3, "tokens_before": 999}                      # overflow: no turn came after it
    assert measure({**full, "compactions": [unused]}).transcript == 185
    assert measure(trajectory("t-1", [], 0.0, "context_overflow")).transcript == 0


SIGNATURES = [      # calls, then how many steps are a loop, productive, near, redundant, thrash
    (["get 1:x", "get 1:x", "get 1:y"], 1, 1, 0, 0, 0),
    (["get 1:x", "get 2:y", "get 3:z"], 0, 0, 2, 0, 0),             # one parameter: every other value is near
    (["get 1 1:x", "get 2 2:y", "get 1 2:z", "get 1:v", "put 1 1:w"], 0, 0, 1, 0, 0),   # one of two, same function
    (["get 1:x", "get 2:y", "get 2:z"], 0, 1, 1, 0, 0),             # a repeat is never near, whatever it returns
    (["get 1:x", "put 1:x", "get 1:x"], 1, 0, 0, 1, 0),             # the same answer to another call; then a loop
    (["get 1:x", "put 1:y", "get 1:y"], 0, 1, 0, 1, 0),             # productive for the call, yet nothing new
    (["get 1:x", "get 2:y", "get 1:z"], 0, 1, 1, 0, 1),             # A-B-A
    (["get 1:x", "get 2:y", "get 1:x", "get 2:y"], 2, 0, 1, 0, 2),  # A-B-A-B, each return a loop as well
    (["get 1:x", "put 2:y", "get 1:z", "get 1:v"], 0, 2, 0, 0, 0),  # the call between is another function; A-A
    (["get 1:x", "get 2:y", "get 3:z", "get 1:v"], 0, 1, 2, 0, 0),  # A-B-C-A
    (["get 1:x", "", "get 2:y", "!get 3", "get 1:z"], 0, 1, 1, 0, 1)]      # turns that are no steps do not count


@pytest.mark.parametrize("calls, loops, productive, near, redundant, thrash", SIGNATURES)
def test_signatures_of_repetition_on_hand_made_runs(calls, loops, productive, near, redundant, thrash):
    """Each definition at its edges, counted by hand."""
    e = measure(trajectory("t-1", calls))
    assert (e.loops, e.productive, e.near, e.redundant, e.thrash) == (loops, productive, near, redundant, thrash)


def test_signatures_equal_their_definitions_written_as_quantifiers():
    """On random runs the one-pass counts equal the definitions in O(n^2); loop, productive and new calls add up to the
    steps; a proposal needs no interceptor: blocking every repeated call leaves their number as it was."""
    rng, seen = random.Random(5), [0] * 5
    for _ in range(500):
        calls = [" ".join([rng.choice("fg"), *rng.choices("123", k=rng.randrange(3))])
                 for _ in range(rng.randrange(14))]
        run = trajectory("t-1", [f"{call}:{rng.choice('xyz')}" for call in calls])
        e, done = measure(run), steps(run)
        k, o, n = [kappa(each.action) for each in done], [each.observation for each in done], range(len(done))
        name, values = zip(*[(each.action["name"], each.action["parameters"]) for each in done]) if done else ((), ())

        def near(t, u):
            return name[t] == name[u] and values[t].keys() == values[u].keys() and sum(
                values[t][key] != values[u][key] for key in values[t]) == 1
        new = [all(k[u] != k[t] for u in range(t)) for t in n]
        loop = [any((k[u], o[u]) == (k[t], o[t]) for u in range(t)) for t in n]
        found = (sum(loop), sum(not new[t] and not loop[t] for t in n),
                 sum(new[t] and any(near(t, u) for u in range(t)) for t in n),
                 sum(not loop[t] and o[t] in o[:t] for t in n),
                 sum(t > 1 and k[t] == k[t - 2] != k[t - 1] and name[t - 1] == name[t] for t in n))
        assert found == (e.loops, e.productive, e.near, e.redundant, e.thrash)
        assert e.loops + e.productive + e.distinct == e.steps
        blocked = trajectory("t-1", [f"{call}:x" if new[i] else f"!{call}" for i, call in enumerate(calls)])
        assert measure(blocked).proposals == e.proposals == e.repeats
        assert measure(blocked).repeats == measure(blocked).loops == 0
        seen = [total + each for total, each in zip(seen, found)]
    assert min(seen) > 50                                           # none of them was compared at 0 alone


def test_text_actions_have_words_for_parameters():
    """ "go to desk 1", "go to desk 2", "go to desk 1": one near-repeat and one A-B-A, as for calls."""
    run = trajectory("t-1", ["a:x", "a:y", "a:z"])
    for turn, text in zip(run["turns"], ("go to desk 1", "go to desk 2", " go to desk 1")):
        turn["action"] = text
    assert (measure(run).near, measure(run).thrash, measure(run).productive) == (1, 1, 1)


def test_amplification_is_the_ratio_of_shares(tmp_path):
    """Loops are 1 of 10 steps in A and 3 of 8 in B: x3.75 in every bootstrap sample, as all tasks are alike; without
    a loop in A there is no ratio."""
    def run(name, new, again):
        calls = [f"f{i}:x{i}" for i in range(new)] + ["f0:x0"] * again
        return write(tmp_path / name, [trajectory(f"max-{i}", calls) for i in range(6)])
    a, b, none = run("a", 9, 1), run("b", 5, 3), run("none", 4, 0)
    assert figures(a, b)["B/A.loop_share"] == {"value": 3.75, "low": 3.75, "high": 3.75, "p": None}
    assert figures(b, a)["B/A.loop_share"]["value"] == pytest.approx(1 / 3.75, abs=1e-6)
    assert figures(none, b)["B/A.loop_share"]["value"] is None and "B-A.loop_share" not in figures(a, b)


def test_the_odds_ratio_of_a_signature_has_its_four_cells(tmp_path):
    """3 failed and 1 solved task with a near-repeat, 1 and 3 without: (3.5 * 3.5) / (1.5 * 1.5)."""
    run = [trajectory(f"max-{i}", ["f 1:x", "f 2:y" if i < 4 else "g:y"], float(i in (3, 4, 5, 6))) for i in range(8)]
    found = figures(write(tmp_path / "a.jsonl", run))["A.near_odds"]
    assert found["value"] == pytest.approx(3.5 ** 2 / 1.5 ** 2, abs=1e-6) and found["n"] == 8
    assert (found["low"], found["high"]) == pytest.approx(woolf((3, 1, 1, 3)), abs=1e-6)


def test_the_ceiling_is_run_a_s_own_work_and_falls_with_the_loops(tmp_path):
    """After the compaction A has 2 loops and 4 useful steps a task: delta 1/2, ceiling 4, its own work. B has 1 loop
    and 3 useful steps: ceiling 2, which it exceeds, delta 2/3 of A's. Without compaction nothing is estimated."""
    event = {"before_turn": 2, "dropped": [2, 4], "summary": "s", "tokens_before": 180, "tokens_after": 90,
             "prompt_tokens": 140, "completion_tokens": 7}
    second = {**event, "before_turn": 5}
    def run(name, calls, events=(event, second)):
        return write(tmp_path / name, [trajectory(f"max-{i}", calls, compactions=events) for i in range(4)])
    a = run("a", ["a:1", "a:1", "b:2", "", "a:1", "c:3", "d:4", "b:2", "Done:"])
    b = run("b", ["a:1", "b:2", "c:3", "a:1", "d:4", "Done:"])
    found = {key: one["value"] for key, one in figures(a, b, run("full", ["a:1", "a:1", "Done:"], ())).items()}
    assert [found[f"A.{key}"] for key in ("loops_c", "work_c", "ambiguity", "ceiling")] == [2, 4, 0.5, 4]
    assert [found[f"B.{key}"] for key in ("loops_c", "work_c", "ceiling")] == [1, 3, 2]
    assert found["B.ambiguity"] == pytest.approx(1 / 3, abs=1e-6)
    assert found["B/A.ambiguity"] == pytest.approx(2 / 3, abs=1e-6) and found["B-A.ceiling"] is None
    assert found["C.ambiguity"] is None and found["C.ceiling"] == 0


def test_premature_done_needs_failure_done_and_fewer_different_calls_than_any_success_of_the_base(tmp_path):
    """The yardstick is run A's for every run, per family; repeating a call does not count as looking further."""
    base = write(tmp_path / "base.jsonl", [
        trajectory("max-1", ["a:1", "b:1", "c:1", "Done:"]), trajectory("max-2", ["a:1", "b:1", "c:1", "d:1", "Done:"]),
        trajectory("max-3", ["a:1", "b:1", "c:1", "Done:"], 0.0), trajectory("max-4", ["a:1", "Done:"], 0.0),
        trajectory("sum-1", ["Done:"], 0.0)])                                       # never solved: no yardstick
    other = write(tmp_path / "other.jsonl", [
        trajectory("max-1", ["a:1", "a:1", "a:1", "a:1", "Done:"], 0.0), trajectory("max-2", ["a:1", "Done:"]),
        trajectory("max-3", ["a:1", "b:1", "Done:"], 0.0), trajectory("max-4", ["a:1"], 0.0, "turn_limit"),
        trajectory("sum-1", ["Done:"], 0.0)])
    found = figures(base, other)
    assert (found["A.premature_done"]["value"], found["A.premature_done"]["n"]) == (25.0, 4)
    assert (found["B.premature_done"]["value"], found["B.premature_done"]["n"]) == (50.0, 4)
    assert found["B-A.premature_done"]["p"] == 1.0                                  # 1 against 2 discordant tasks


def test_bins_of_length_share_no_task_and_a_test_needs_the_same_tasks(tmp_path):
    """1, 5 | 6, 10 | 11, 20 | 21 steps: every length from 1 is in one bin. McNemar's p is given for a bin only where
    both runs have the same tasks in it."""
    sizes, bins = (0, 1, 5, 6, 10, 11, 20, 21), ("1_5", "6_10", "11_20", "21")
    runs = [[trajectory(f"max-{i:02}", [f"f{j}:x" for j in range(size + (extra and i == 2))], 0.0, "turn_limit")
             for i, size in enumerate(sizes)] for extra in (0, 1)]          # in the second run 5 steps become 6
    found = figures(*(write(tmp_path / f"{i}.jsonl", run) for i, run in enumerate(runs)))
    assert [found[f"A.loop_rate_{each}"]["n"] for each in bins] == [2, 2, 2, 1]
    assert [found[f"B.loop_rate_{each}"]["n"] for each in bins] == [1, 3, 2, 1]
    assert [found[f"B-A.loop_rate_{each}"]["p"] for each in bins] == [None, None, 1.0, 1.0]


@pytest.mark.parametrize("k, n, low, high", [
    (81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)])
def test_wilson_equals_the_published_values(k, n, low, high):
    """The four examples of Newcombe (1998, Statistics in Medicine 17:857, table I, method 3), and the mirror image."""
    assert wilson(k, n) == pytest.approx((low, high), abs=5e-5)
    assert wilson(n - k, n) == pytest.approx((1 - high, 1 - low), abs=5e-5)


def test_mcnemar_equals_binomial_tails():
    """Closed forms: no discordant task 1; all n of them on one side 2^(1-n); 1 of 6: 2 * 7/64; ties capped at 1."""
    def p(b, c, agree=3):
        return mcnemar([1] * b + [0] * c + [1, 0] * agree, [0] * b + [1] * c + [1, 0] * agree)
    assert p(0, 0) == 1.0 and p(4, 4) == 1.0
    assert p(10, 0) == p(0, 10) == 2.0 ** -9
    assert p(5, 1) == pytest.approx(14 / 64)
    assert p(12, 2) == pytest.approx(2 * (1 + 14 + 91) / 2 ** 14)
    assert p(700, 700) == 1.0 and 0 < p(900, 500) < 1e-25                           # large counts stay exact


def test_woolf_equals_the_textbook_interval():
    """exp(ln OR -+ 1.96 sqrt(1/a + 1/b + 1/c + 1/d)) with 1/2 in every cell; finite with an empty cell; undefined
    where all tasks, or none, have a loop."""
    ratio, spread = 9.5 * 7.5 / (1.5 * 3.5), 1.959964 * math.sqrt(1 / 9.5 + 1 / 1.5 + 1 / 3.5 + 1 / 7.5)
    assert evaluation.figure("odds", (9, 1, 3, 7)) == pytest.approx(ratio)
    assert woolf((9, 1, 3, 7)) == pytest.approx((ratio / math.exp(spread), ratio * math.exp(spread)), rel=1e-6)
    assert all(map(math.isfinite, woolf((9, 0, 3, 7))))
    assert evaluation.figure("odds", (0, 0, 3, 7)) is None and evaluation.figure("odds", (3, 7, 0, 0)) is None


def test_bootstrap_depends_on_its_seed_alone_and_approaches_the_normal_interval():
    """Equal arguments give equal samples of n tasks each; the interval of a mean is close to mean -+ 1.96 s/sqrt(n)."""
    assert resample(30, 50, 1) == resample(30, 50, 1) != resample(30, 50, 2)
    assert all(sum(weights) == 30 for weights in resample(30, 50, 1))
    rng = random.Random(0)
    values = [rng.randrange(20) for _ in range(400)]
    mean = sum(values) / 400
    half = 1.96 * math.sqrt(sum((value - mean) ** 2 for value in values) / 400 / 400)
    assert percentiles(bootstrap("mean", [values, [1] * 400], resample(400, 1000, 0))) == pytest.approx(
        (mean - half, mean + half), abs=0.15 * half)


def test_percentiles_cut_both_tails_alike_and_refuse_what_is_mostly_undefined():
    """Of 1..1000 the middle 95% is [26, 975]; up to 5% undefined values are left out, more give no interval."""
    assert percentiles(range(1, 1001)) == (26, 975)
    assert percentiles([*range(95), *[None] * 5]) == (2, 92)
    assert percentiles([*range(94), *[None] * 6]) == (None, None)


def test_samples_of_a_task_are_one_cluster(tmp_path):
    """Copying every episode as a second sample leaves values and intervals of means as they were: no false precision.
    Rates then have the cluster bootstrap, and McNemar's test, which needs independent tasks, is not given."""
    other = [{**each, "reward": 1 - each["reward"]} for each in HAND]
    one = figures(write(tmp_path / "a.jsonl", HAND), write(tmp_path / "b.jsonl", other))
    twice = figures(*(write(tmp_path / f"{name}2.jsonl", run + [{**each, "sample": 1} for each in run])
                      for name, run in (("a", HAND), ("b", other))))
    for key in ("A.steps", "B.loop_share", "B-A.success", "B-A.tokens"):
        assert all(twice[key][part] == one[key][part] for part in ("value", "low", "high"))
    assert one["B-A.success"]["p"] == 1.0 and twice["B-A.success"]["p"] is None
    assert twice["A.success"]["low"] == 0.0 < one["A.success"]["low"]


def test_the_paired_difference_knows_that_the_tasks_are_the_same(tmp_path):
    """A run that needs one step less on each task differs by exactly 1 with an interval of no width, whatever the
    spread between tasks; runs without a defined figure have no difference."""
    rng = random.Random(3)
    lengths = [rng.randrange(2, 30) for _ in range(40)]
    runs = [[trajectory(f"max-{i}", [f"f{j}:x" for j in range(length - less)]) for i, length in enumerate(lengths)]
            for less in (0, 1)]
    found = figures(*(write(tmp_path / f"{i}.jsonl", run) for i, run in enumerate(runs)))
    assert found["B-A.steps"] == {"value": -1.0, "low": -1.0, "high": -1.0, "p": None}
    assert found["A.steps"]["high"] - found["A.steps"]["low"] > 3
    assert found["A.selectivity"]["value"] is None and found["B-A.selectivity"]["value"] is None


def test_seeds_in_one_column_are_samples_of_their_tasks(tmp_path):
    """Three seeds: the value is the mean of theirs, each is listed, the order of the files changes no figure, and a
    seed that is counted thrice under three names has the interval of one: tasks are drawn, not episodes."""
    rng, paths = random.Random(2), []
    for seed in range(4):
        run = [trajectory(f"max-{i:02}", ["a:1"] * rng.randrange(1, 5), float(rng.random() < 0.5), seed=seed,
                          adapter=f"seed{seed}") for i in range(20)]
        paths.append(write(tmp_path / f"{seed}.jsonl", run))
    base, *seeds = paths
    found, single = figures(base, ",".join(seeds)), [figures(base, seed) for seed in seeds]
    for key in ("B.steps", "B.loop_rate", "B.success", "B-A.steps", "B-A.success"):
        values = [each[key]["value"] for each in single]
        assert found[key]["value"] == pytest.approx(sum(values) / 3, abs=1e-6)
        assert key[1] == "-" or found[key]["files"] == values
    assert "files" not in found["A.steps"] and found["B-A.success"]["p"] is None
    turned = figures(base, ",".join(reversed(seeds)))
    for key, one in found.items():
        assert {**turned[key], "files": None} == {**one, "files": None}
    copies = [write(tmp_path / f"copy{i}.jsonl", read(seeds[0])) for i in "12"]
    thrice = figures(base, ",".join([seeds[0], *copies]))
    for key in ("B.steps", "B.loop_share", "B-A.steps", "B/A.loop_share", "B.ceiling"):
        assert all(thrice[key][part] == single[0][key][part] for part in ("value", "low", "high"))


def test_what_no_task_shows_in_any_seed_still_has_an_interval(tmp_path):
    """0 of 2 x 10 episodes: Wilson's interval for 0 of the 10 tasks, not a bootstrap of zeros without width."""
    paths = [write(tmp_path / f"{seed}.jsonl", [trajectory(f"max-{i}", ["a:1"], seed=seed) for i in range(10)])
             for seed in (0, 1)]
    found = figures(",".join(paths))
    assert (found["A.loop_rate"]["low"], found["A.loop_rate"]["high"]) == pytest.approx(
        [100 * end for end in wilson(0, 10)], abs=1e-6)
    assert found["A.success"]["high"] == 100 and found["A.success"]["low"] == pytest.approx(100 * wilson(10, 10)[0])


def test_a_column_of_files_that_are_no_seeds_of_one_policy_is_refused(tmp_path):
    """A file named twice, another budget, a task too few: one line that names the files and the difference."""
    one, two = write(tmp_path / "1.jsonl", HAND), write(tmp_path / "2.jsonl", HAND[:-1])
    wide = write(tmp_path / "wide.jsonl", [{**each, "config": {**each["config"], "budget": 999}} for each in HAND])
    for column, text in ((f"{one},{one}", "named twice"), (f"{one},{wide}", "differ in budget"),
                         (f"{one},{two}", "lacks"), (f"{one},", "cannot be read")):
        reply = command(column)
        assert reply.returncode == 2 and text in reply.stderr and reply.stderr.count("\n") == 1


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Three runs of 24 tasks in 4 families, shuffled on disk: a base that loops and two that loop less."""
    folder, rng = tmp_path_factory.mktemp("runs"), random.Random(7)
    paths = []
    for index, chance in enumerate((0.6, 0.2, 0.1)):
        run = []
        for i in range(24):
            calls = [f"read{j}:{j}" for j in range(rng.randrange(4, 12))]
            calls += [rng.choice(calls) for _ in range(6) if rng.random() < chance]
            reward = float(rng.random() < 0.6)
            run.append(trajectory(f"env{i % 4}-{i:08x}", [*calls, "Done:"], reward, adapter=index or None))
        rng.shuffle(run)
        paths.append(write(folder / f"run{index}.jsonl", run))
    return paths


@pytest.mark.parametrize("form", ["--markdown", "--json", "--csv", "--seed=0"])
def test_the_order_of_lines_does_not_change_a_byte(runs, form):
    """Each output of shuffled copies, from a fresh process with another hash seed, equals the first, byte for byte."""
    texts = [Path(path).read_text() for path in runs]
    first = command(*runs, form, "--draws", 100)
    assert first.returncode == 0 and first.stderr == ""
    try:
        for path, text in zip(runs, texts):
            Path(path).write_text("".join(reversed(text.splitlines(keepends=True))))
        assert command(*runs, form, "--draws", 100).stdout == first.stdout
    finally:
        for path, text in zip(runs, texts):
            Path(path).write_text(text)


def test_the_terminal_table_fits_and_names_every_metric(runs):
    """At most 110 columns for one, two and three runs; with --all every metric stands in it once a block, beside its
    run, without it the main ones, with --only those named, in their order."""
    labels = {metric.key: metric.label for metric in METRICS}
    main = [labels[key] for key in evaluation.MAIN]
    for count, flags, shown in (*((n, ["--all"], METRICS) for n in (1, 2, 3)), (2, [], main),
                                (1, ["--only", "steps,loop_rate"], ["steps", "loop rate"])):
        lines = command(*runs[:count], *flags, "--draws", 100).stdout.splitlines()
        assert max(map(len, lines)) <= 110
        places = [next(n for n, line in enumerate(lines) if line.startswith(getattr(label, "label", label)))
                  for label in shown]
        assert places == sorted(places)
        assert flags or not any(line.startswith("odds: ") for line in lines)
        header = " ".join(line for line in lines if line.startswith("   "))
        assert all(f"{label}-A" in header for label in "BC"[:count - 1]) and "paper" in header


def test_markdown_json_and_csv_hold_the_same_figures(runs):
    """The Markdown is one well-formed table; its cells, the CSV and the JSON agree with evaluate()."""
    runs, result = [*runs, "--draws", 100], evaluate(columns(*runs), draws=100)
    lines = [line for line in command(*runs, "--markdown", "--all").stdout.splitlines() if line.startswith("|")]
    assert len(lines) == 2 + len(METRICS) and set(lines[1]) == set("-|")
    assert {line.count("|") for line in lines} == {1 + 1 + 3 + 2 + 1}               # metric, runs, differences, paper
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    steps = next(metric for metric in result["metrics"] if metric["key"] == "steps")["figures"]["A"]
    cell = next(row for row in rows if row[0] == "steps")[1]
    assert cell == f"{steps['value']:.2f} [{steps['low']:.2f}, {steps['high']:.2f}]"
    assert json.loads(command(*runs, "--json").stdout) == json.loads(json.dumps(result))
    table = list(csv.DictReader(io.StringIO(command(*runs, "--csv").stdout)))
    assert len(table) == 5 * len(METRICS)
    assert next(row for row in table if (row["run"], row["metric"]) == ("A", "steps"))["low"] == str(steps["low"])


def test_expect_holds_or_names_what_does_not(runs, tmp_path):
    """Exit 0 if every figure lies in its interval, ends included; 1 with the figure if not; 2 for a bad file."""
    runs = [*runs, "--draws", 100]
    found = json.loads(command(*runs, "--json").stdout)
    rate = next(metric for metric in found["metrics"] if metric["key"] == "loop_rate")["figures"]
    good = tmp_path / "good.json"
    good.write_text(json.dumps({"A.loop_rate": [rate["A"]["value"]] * 2, "B-A.loop_rate.high": [None, 0],
                                "A.steps.n": [24, 24], "C-A.loop_rate.p": [0, 1]}, indent=1))
    assert command(*runs, "--expect", good).returncode == 0
    for bad, code, text in (({"A.loop_rate": [0, 1]}, 1, "A.loop_rate is"),
                            ({"A.loop_rate_21": [0, 100]}, 1, "is None"),
                            ({"A.loop_rat": [0, 1]}, 2, "'A.loop_rat'"), ({"A.loop_rate": [0]}, 2, "[low, high]"),
                            ({"A.loop_rate": [0, "x"]}, 2, "[low, high]"), ([1], 2, "[low, high]")):
        good.write_text(json.dumps(bad))
        reply = command(*runs, "--expect", good)
        assert reply.returncode == code and text in reply.stderr and reply.stderr.count("\n") == 1


def damaged(base):
    """What makes a run none: {name: (trajectories of B, text that the error must hold)}."""
    last = base[-1]
    without = {key: value for key, value in last["turns"][0].items() if key != "prompt_tokens"}
    return {
        "missing": (base[:-1], f"lacks task {last['task_id']}"),
        "extra": (base + [trajectory("env0-new", ["a:1"])], "A.jsonl lacks task env0-new"),
        "twice": (base + [last], f"task {last['task_id']} (sample 0) stands twice"),
        "mixed": (base[:-1] + [{**last, "config": {**last["config"], "budget": 99}}], "differ in budget"),
        "mixed policy": (base[:-1] + [{**last, "policy": "other"}], "differ in policy"),
        "sample": (base + [{**last, "sample": 1}], "lacks task"),
        "error": (base[:-1] + [{**last, "status": "env_error", "reward": None}], "run the same rollout command again"),
        "no reward": (base[:-1] + [{**last, "reward": None}], last["task_id"]),
        "no tokens": (base[:-1] + [{**last, "turns": [without]}], "prompt_tokens"),
        "unknown status": (base[:-1] + [{**last, "status": "finished"}], "finished"),
        "empty": ([], "no trajectories"),
        "foreign": ([{"messages": [{"role": "user", "content": "hi"}]}], "no trajectory of rollout.py"),
    }


@pytest.mark.parametrize("fault", damaged(HAND))
def test_what_is_no_complete_run_is_refused_by_name(tmp_path, fault):
    """A missing, extra or repeated task, mixed settings, an unfinished run or a foreign log is never counted as a
    result: InputError names the file and the thing."""
    run, text = damaged(HAND)[fault]
    paths = write(tmp_path / "A.jsonl", HAND), write(tmp_path / "B.jsonl", run)
    with pytest.raises(InputError, match=".jsonl") as caught:
        evaluate(columns(*paths), draws=40)
    assert text in str(caught.value)


def test_the_command_line_refuses_in_one_line(tmp_path):
    """Exit 2 and a line that names the thing, for unknown flags, absent and broken files, two formats, few draws."""
    good, bad = write(tmp_path / "A.jsonl", HAND), tmp_path / "bad.jsonl"
    bad.write_text(json.dumps(HAND[0]) + "\nnot JSON\n")
    for arguments, text in ((["--unknown", good], "--unknown"), ([], "FILE"), ([tmp_path / "none.jsonl"], "none.jsonl"),
                            ([bad], "bad.jsonl, line 2"), ([good, "--json", "--csv"], "--csv"),
                            ([good, "--draws", 3], "--draws"),
                            ([good, "--expect", tmp_path / "none.json"], "none.json"),
                            ([write(tmp_path / "twice.jsonl", HAND[:1] * 2)], "stands twice")):
        reply = command(*arguments)
        assert reply.returncode == 2 and text in reply.stderr.splitlines()[-1] and "Traceback" not in reply.stderr
    assert command("--help").returncode == 0


def test_drop_errors_leaves_the_task_out_of_every_run(tmp_path):
    """With --drop-errors a task without a result in one run counts in none, and the table says so."""
    failed = {**HAND[0], "status": "env_error", "reward": None}
    paths = write(tmp_path / "A.jsonl", HAND), write(tmp_path / "B.jsonl", [failed, *HAND[1:]])
    whole = write(tmp_path / "C.jsonl", HAND[1:])
    found, expected = figures(*paths, drop_errors=True), figures(whole, whole)
    assert found == expected
    reply = command(*paths, "--drop-errors")
    assert reply.returncode == 0
    assert all(text in " ".join(reply.stdout.split()) for text in ("1 env_error", "task max-1 (sample 0)"))
    assert command(paths[1], "--drop-errors").returncode == 0
    assert command(write(tmp_path / "D.jsonl", [failed]), "--drop-errors").returncode == 2


def test_every_metric_is_total_and_defined_once():
    """Keys are unique, every terms function accepts the emptiest episode, and every paper figure names its place."""
    assert len({metric.key for metric in METRICS}) == len(METRICS)
    empty = measure(trajectory("x-1", [], 0.0, "context_overflow"))
    for metric in METRICS:
        assert len(metric.terms(empty)) == (4 if metric.kind in ("odds", "gap", "ceiling") else 2)
        assert bool(metric.place) == any(known is not None for known in (metric.base, metric.deloop, metric.times))


def test_pictures_that_the_runs_allow_are_drawn(runs, tmp_path):
    """Five pictures from runs that differ in budget and number of pairs; those that need such a difference are left
    out, with the reason, where there is none. The steps histogram counts every episode."""
    pytest.importorskip("matplotlib")
    result, names = evaluate(columns(*runs), draws=40), ("loop_rate", "loops_success", "steps", "budget", "pairs")
    lines = evaluation.plot(result, tmp_path / "few")
    assert sorted(path.stem for path in (tmp_path / "few").iterdir()) == sorted(names[:3])
    assert [line for line in lines if line.startswith("not drawn")] == [
        "not drawn: budget.png, which needs runs that differ in: context",
        "not drawn: pairs.png, which needs runs that differ in: preference pairs trained on"]
    assert all(sum(run["lengths"]) == run["episodes"] == 24 for run in result["runs"])
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "state.json").write_text('{"counts": {"used": 1000}}')
    changes = {"memory": "full"}, {"adapter": str(tmp_path / "adapter")}
    more = [write(tmp_path / f"{i}.jsonl", [{**each, "config": {**each["config"], **change}} for each in read(runs[0])])
            for i, change in enumerate(changes)]
    reply = command(runs[0], *more, "--draws", 40, "--plot", tmp_path / "all")
    assert reply.returncode == 0 and "not drawn" not in reply.stderr
    for name in names:
        assert (tmp_path / "all" / f"{name}.png").read_bytes()[1:4] == b"PNG"


def test_plot_without_matplotlib_says_what_to_install(runs, tmp_path, monkeypatch):
    """InputError with the command, before any folder is made; the table needs no matplotlib."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(InputError, match="pip install matplotlib"):
        evaluation.plot(evaluate(columns(*runs), draws=40), tmp_path / "pictures")
    assert not (tmp_path / "pictures").exists()


def test_the_number_of_pairs_is_read_from_the_adapter_or_unknown(tmp_path):
    """0 without an adapter, counts.used of its state.json with one, None where that is absent or something else."""
    (tmp_path / "state.json").write_text('{"counts": {"used": 7}}')
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "state.json").write_text("[]")
    for adapter, pairs in ((None, 0), (str(tmp_path), 7), ([str(tmp_path), "x"], 7), (str(tmp_path / "other"), None),
                           ("absent", None)):
        assert evaluation.pairs_of({"config": {"adapter": adapter}}) == pairs


def episodes_of(rng, tasks, chance):
    """Episodes drawn from a known law: tasks differ in how easily they loop, and one with loops fails more often."""
    episodes, empty = [], measure(trajectory("max-0", [], 0.0))
    for i in range(tasks):
        ease, size = rng.random(), rng.randrange(4, 16)
        loops = sum(rng.random() < chance * ease for _ in range(size))
        won = rng.random() < 0.6 - 0.3 * (loops > 0)
        episodes.append(replace(empty, task_id=f"max-{i:05}", steps=size + loops, loops=loops, success=won))
    return episodes


@pytest.mark.slow
def test_intervals_cover_the_truth_as_often_as_they_say():
    """400 pairs of runs of 150 tasks drawn from a known law: each 95% interval, of a rate, a mean, a share, an odds
    ratio, a gap, a difference and an amplification, holds the value of 40,000 tasks in 92 to 98 of 100 cases."""
    rng = random.Random(11)
    keys = ("loop_rate", "loop_steps", "loop_share", "failure_odds", "loop_cost_steps", "success")
    chosen = {metric.key: metric for metric in METRICS if metric.key in keys}
    samples, hits = resample(150, 400, 0), {}
    large = {label: [episodes_of(rng, 40_000, chance)] for label, chance in (("A", 0.3), ("B", 0.1))}
    truth = {key: evaluation.figures(metric, large, [[1] * 40_000]) for key, metric in chosen.items()}
    for _ in range(400):
        small = {label: [episodes_of(rng, 150, chance)] for label, chance in (("A", 0.3), ("B", 0.1))}
        for key, metric in chosen.items():
            for label, one in evaluation.figures(metric, small, samples).items():
                if one["low"] is not None:
                    inside = one["low"] <= truth[key][label]["value"] <= one["high"]
                    hits.setdefault((label, key), []).append(inside)
    assert len(hits) == 3 * len(keys) - 1                           # a difference of odds ratios is not estimated
    for name, inside in hits.items():
        assert len(inside) > 360 and 0.92 <= sum(inside) / len(inside) <= 0.98, (name, sum(inside) / len(inside))
