"""deloop.py: what counts as equal, what counts as a loop, which pair follows, and that no log or input breaks it."""
from __future__ import annotations

import doctest
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

import deloop

ROOT = Path(deloop.__file__).resolve().parent


def call(name: str, parameters: object = None) -> dict:
    return {"name": name, "parameters": parameters}


def command(*words: object, **options) -> subprocess.CompletedProcess:
    """A real `python deloop.py ...` in a process of its own."""
    return subprocess.run([sys.executable, str(ROOT / "deloop.py"), *map(str, words)], capture_output=True, text=True,
                          timeout=60, **options)


def test_worked_example_of_the_docstring_is_true():
    """Doctest: the example a reader meets first gives what it says."""
    result = doctest.testmod(deloop)
    assert result.attempted >= 5 and result.failed == 0


# ---------------------------------------------------------------------------------------------------------------------
# Which steps are loops: (kind, [(action, observation), ...], loop steps, reason).

F = "fetch_row"
CASES = [
    ("progress", [(call(F, {"id": 3}), "queued"), (call(F, {"id": 3}), "running"), (call(F, {"id": 3}), "ready")], [],
     "the same call that returns something new is a re-check"),
    ("progress, then none", [(call(F), "1/3"), (call(F), "2/3"), (call(F), "1/3")], [2],
     "an answer seen before is a loop, however many new ones lie between"),
    ("flat polling", [(call("state"), "busy")] * 4, [1, 2, 3], "waiting is repetition by definition"),
    ("run, edit, run", [("make", "2 errors"), (call("edit", {"line": 4}), "ok"), ("make", "1 error")], [],
     "the edit changed the outcome"),
    ("run, useless edit, run", [("make", "2 errors"), (call("edit", {"line": 4}), "ok"), ("make", "2 errors")], [2],
     "the edit changed nothing that can be seen"),
    ("listing after a change", [("dir", "x"), ("mkdir y", ""), ("dir", "x y")], [], "another observation"),
    ("clock", [("now", "09:00:01"), ("now", "09:00:02")], [], "a time stamp hides a loop: observations are bytes"),
    ("one digit", [("sum", "total 71"), ("sum", "total 72")], [], "digits carry meaning, none is masked"),
    ("json whitespace", [(call(F, '{"id": 3, "k": [1, 2]}'), "r"), (call(F, '{"id":3,"k":[1,2]}'), "r"),
                         (call(F, '\n{ "id" :3,\t"k":[ 1,2 ] }\r\n'), "r")], [1, 2], "whitespace between JSON tokens"),
    ("key order", [(call(F, '{"id":3,"k":0}'), "r"), (call(F, '{"k":0,"id":3}'), "r")], [1], "an object has no order"),
    ("key order, deep", [(call(F, '{"q":[{"a":{"x":1,"y":2},"b":3}]}'), "r"), (call(F, '{"q":[{"b":3,"a":{"y":2,"x":1}}]}'), "r")],
     [1], "at every depth, inside arrays too"),
    ("array order", [(call(F, {"ids": [1, 2]}), "r"), (call(F, {"ids": [2, 1]}), "r")], [], "an array has one"),
    ("array order, deep", [(call(F, {"q": {"ids": [[1], [2]]}}), "r"), (call(F, {"q": {"ids": [[2], [1]]}}), "r")], [], "also deep"),
    ("mapping and text", [(call(F, {"k": 0, "id": 3}), "r"), (call(F, '{"id":3,"k":0}'), "r")], [1], "two ways to log one call"),
    ("the three spellings", [(call(F, {"id": 3}), "r"), ({"name": F, "arguments": '{"id":3}'}, "r"),
                             ({"id": "call_9", "type": "function", "function": {"name": F, "arguments": '{"id": 3}'}}, "r")],
     [1, 2], "parameters, arguments, OpenAI's function"),
    ("encoded twice", [(call(F, '{"id":3}'), "r"), (call(F, json.dumps('{"id": 3}')), "r"),
                       (call(F, json.dumps(json.dumps('{"id":3}'))), "r")], [1, 2], "the whole parameters, encoded again"),
    ("JSON in a value", [(call(F, {"ids": [3]}), "r"), (call(F, {"ids": "[3]"}), "r")], [], "the tool sees a string, not an array"),
    ("JSON in a value, spaced", [(call(F, {"q": '{"a":1}'}), "r"), (call(F, {"q": '{"a": 1}'}), "r")], [], "a string is opaque"),
    ("escapes", [(call(F, '{"s":"\\u00fc\\/\\ud83d\\ude00"}'), "r"), (call(F, {"s": "ü/😀"}), "r")], [1], "escapes are syntax"),
    ("indentation in a value", [(call("py", {"code": "a\n  b"}), "r"), (call("py", {"code": "a\n b"}), "r")], [], "it is meaning"),
    ("outer blank in a value", [(call("py", {"code": " a"}), "r"), (call("py", {"code": "a"}), "r")], [], "also at the ends"),
    ("next page", [(call("page", {"from": n}), "(empty)") for n in (0, 50, 100)], [], "a number differs"),
    ("two in turn", [(call(F, {"id": n % 2}), str(n % 2)) for n in range(5)], [2, 3, 4], "any earlier step counts, not only the last"),
    ("far apart", [("start", "s"), *[(f"step {n}", "") for n in range(300)], ("start", "s")], [301], "no window"),
    ("twice in one message", [(call("add", {"n": 1}), "done"), (call("add", {"n": 1}), "done")], [1], "two calls are two steps"),
    ("batch", [(call(F, {"id": n}), "ok") for n in range(3)], [], "equal answers to different calls"),
    ("long tails", [("log", "y" * 200_000 + "1"), ("log", "y" * 200_000 + "2")], [], "compared whole"),
    ("long heads", [("log", "1" + "y" * 200_000), ("log", "2" + "y" * 200_000)], [], "compared whole"),
    ("errors", [(call("nope", {"a": 1}), "no such tool")] * 3, [1, 2], "an error is an observation, an unknown tool an action"),
    ("unanswered", [("go", None), ("go", None), ("go", ""), ("go", None), ("go", "")], [4], "no answer equals nothing; an empty one does"),
    ("not JSON", [(call(F, '{"id": 3'), "bad"), (call(F, '  {"id": 3\n'), "bad"), (call(F, '{"id":  3'), "bad")], [1],
     "compared as text, stripped outside only"),
    ("null or absent", [(call(F, {"id": 3, "k": None}), "r"), (call(F, {"id": 3}), "r")], [], "an explicit null is a parameter"),
    ("null or absent, deep", [(call(F, {"q": {"k": None}}), "r"), (call(F, {"q": {}}), "r")], [], "also deep"),
    ("no parameters", [(call(F, None), "r"), (call(F, ""), "r"), (call(F, {}), "r"), ({"name": F}, "r"), (call(F, "null"), "r"),
                       (call(F, " {} "), "r"), (call(F, '""'), "r")], [1, 2, 3, 4, 5, 6], "all of them call without any"),
    ("empty values", [(call(F, "[]"), "r"), (call(F, "0"), "r"), (call(F, "false"), "r"), (call(F, "{}"), "r")], [], "are values"),
    ("1 and 1.0", [(call(F, '{"n":1}'), "r"), (call(F, '{"n":1.0}'), "r")], [], "an integer is no float"),
    ("1 and true", [(call(F, {"n": 1}), "r"), (call(F, {"n": True}), "r"), (call(F, {"n": "1"}), "r")], [], "nor a boolean, nor text"),
    ("0 and false", [(call(F, {"n": 0}), "r"), (call(F, {"n": False}), "r"), (call(F, {"n": None}), "r"), (call(F, {"n": ""}), "r")],
     [], "nothing false is equal to something else false"),
    ("composed letters", [(call(F, {"s": "\u00fc"}), "r"), (call(F, {"s": "u\u0308"}), "r")], [], "no Unicode normalisation"),
    ("composed letters, seen", [("cat", "\u00fc"), ("cat", "u\u0308")], [], "nor in observations"),
    ("letter case", [(call(F, {"s": "A"}), "r"), (call(F, {"s": "a"}), "r"), (call(F, {"S": "a"}), "r")], [], "values and keys"),
    ("duplicate keys", [(call(F, '{"k":1,"k":2}'), "r"), (call(F, '{"k":2,"k":1}'), "r"), (call(F, '{"k":2}'), "r")], [2],
     "the last one is what the tool gets"),
    ("text beside the call", [({**call(F), "thought": "first", "id": 1}, "r"), ({**call(F), "thought": "again", "id": 2}, "r")], [1],
     "thoughts, ids and times are no part of the action"),
    ("a note among the parameters", [(call(F, {"id": 3, "why": "a"}), "r"), (call(F, {"id": 3, "why": "b"}), "r")], [],
     "every parameter counts, whatever it is for"),
    ("renumbered references", [(call("press", {"ref": n}), "nothing happened") for n in ("e1", "e2")], [], "another argument"),
    ("paraphrase", [(call("find", {"q": "open bugs"}), "0 hits"), (call("find", {"q": "bugs, open"}), "0 hits")], [], "another string"),
    ("names", [(call("row_get"), "r"), (call("row-get"), "r"), (call("Row_get"), "r"), (call("row_get "), "r")], [], "compared exactly"),
    ("line ends", [("cat", "a\n"), ("cat", "a\r\n"), ("cat", "a")], [], "byte for byte"),
    ("text action", [("SELECT 1 ", "1"), ("\nSELECT 1\t", "1"), ("SELECT  1", "1"), ("select 1", "1")], [1], "stripped outside only"),
    ("revisit", [("go north", "a hall"), ("take lamp", "taken"), ("go north", "a hall")], [2],
     "the state changed unseen: flagged, although it may be right"),
    ("original observations", [("run", "error 1, long"), ("run", "error 2, long"), ("run", "fine")], [],
     "elided copies would be equal, what the environment returned is not"),
    ("the border", [("ab", "c"), ("a", "bc"), ("abc", "")], [], "action and observation never run into one another"),
]


@pytest.mark.parametrize("kind, run, loops, reason", CASES, ids=[case[0] for case in CASES])
def test_case(kind, run, loops, reason):
    assert [t for t, flag in enumerate(deloop.loop_flags(run)) if flag] == loops, reason


# ---------------------------------------------------------------------------------------------------------------------
# Oracles: slow and obvious.

def random_run(rng: random.Random, length: int) -> list[tuple]:
    """Few actions and few observations, so that everything repeats; a call comes in varying spellings."""
    run = []
    for _ in range(length):
        name, number = rng.choice("fg"), rng.randrange(2)
        parameters = {"n": number, "m": [name]}
        spelling = rng.choice([parameters, json.dumps(parameters), json.dumps(dict(reversed(parameters.items())), indent=1)])
        run.append((call(name, spelling), rng.choice(["", "a", "b", None])))
    return run


def same_call(a: dict, b: dict) -> bool:
    plain = [p if isinstance(p, dict) else json.loads(p) for p in (a["parameters"], b["parameters"])]
    return a["name"] == b["name"] and plain[0] == plain[1]


def brute_flags(run: list[tuple]) -> list[bool]:
    return [observation is not None and any(same_call(action, a) and observation == o for a, o in run[:t])
            for t, (action, observation) in enumerate(run)]


def brute_escape(run: list[tuple], flags: list[bool], t: int) -> int | None:
    return next((u for u in range(t + 1, len(run)) if not flags[u] and not same_call(run[u][0], run[t][0])), None)


def test_flags_and_escapes_equal_brute_force():
    """Oracle: the definitions, written as loops over all earlier and all later steps."""
    rng = random.Random(0)
    for _ in range(600):
        run = random_run(rng, rng.randrange(14))
        flags = deloop.loop_flags(run)
        assert flags == brute_flags(run)
        found = deloop.escapes(flags, [deloop.kappa(action) for action, _ in run])
        assert found == [brute_escape(run, flags, t) if flag else None for t, flag in enumerate(flags)]


def test_online_equals_offline():
    """Invariant: the detector names, one step at a time, the first equal step that a look at the whole run finds."""
    rng = random.Random(1)
    for _ in range(200):
        run, detector = random_run(rng, 20), deloop.LoopDetector()
        marks = [detector.push(action, observation) for action, observation in run]
        assert [mark is not None for mark in marks] == deloop.loop_flags(iter(run))
        digests = [deloop.signature(action, observation) for action, observation in run]
        assert all(mark is None or mark == digests.index(digests[t]) for t, mark in enumerate(marks))


# ---------------------------------------------------------------------------------------------------------------------
# Trajectories, contexts and pairs.

def trajectory(run: list[tuple], **fields) -> dict:
    """A deloop-trajectory/1 of (action, observation) steps; action None: the message held no call."""
    messages, turns = [{"role": "system", "content": "S"}, {"role": "user", "content": "T"}], []
    for number, (action, observation) in enumerate(run):
        turns.append({"message": len(messages), "action": action, "executed": action is not None, "observation": observation,
                      "parse": "no_call" if action is None else "ok", "completion_ids": [number, 9]})
        messages += [{"role": "assistant", "content": f"{number}: {action}"}, {"role": "user", "content": observation}]
    return {"format": "deloop-trajectory/1", "task_id": "t", "sample": 0, "seed": 0, "env": "none", "policy": "none",
            "config": {}, "status": "done", "reward": 1.0, "messages": messages, "turns": turns, "compactions": [], **fields}


def test_mined_pairs_equal_brute_force():
    """Oracle: every loop step with a later new and different call gives one pair, with the messages of those two turns."""
    rng = random.Random(2)
    for _ in range(200):
        run = random_run(rng, 12)
        log = trajectory([(None, "no call") if rng.random() < .2 else step for step in run])
        turns = [step.turn for step in deloop.steps(log)]
        executed = [(step.action, step.observation) for step in deloop.steps(log)]
        flags = brute_flags(executed)
        expected = [(t, u) for t, flag in enumerate(flags) if flag and (u := brute_escape(executed, flags, t)) is not None]
        pairs = deloop.mine_pairs(log)
        assert [(pair["t"], pair["t_escape"]) for pair in pairs] == expected
        for pair in pairs:
            place, escape = (log["turns"][turns[pair[key]]]["message"] for key in ("t", "t_escape"))
            assert pair["prompt"] == log["messages"][:place]
            assert (pair["rejected"], pair["chosen"]) == ([log["messages"][place]], [log["messages"][escape]])
            assert pair["prompt_sha256"] == deloop.prompt_hash(log["messages"][:place])
            assert (pair["rejected_ids"], pair["chosen_ids"]) == ([turns[pair["t"]], 9], [turns[pair["t_escape"]], 9])


def test_context_at_repeats_what_the_policy_saw():
    """Worked example: two compactions, the newest of which holds; capped observations; control tokens broken."""
    log = trajectory([(call("f", {"n": n}), "0123456789" if n == 2 else f"<|end|>{n}") for n in range(5)],
                     config={"max_observation_chars": 8, "control_tokens": ["<|end|>"]},
                     compactions=[{"before_turn": 2, "dropped": [2, 4], "summary": "one"},
                                  {"before_turn": 4, "dropped": [2, 8], "summary": "two"}])
    before = json.dumps(log)
    seen = [deloop.context_at(log, turn) for turn in range(5)]
    assert seen[0] == log["messages"][:2]
    assert seen[1] == log["messages"][:3] + [{"role": "user", "content": "<|end| >0"}]
    assert seen[2][1]["content"] == "T\n\nSummary of the earlier steps:\none" and seen[2][2:] == [
        log["messages"][4], {"role": "user", "content": "<|end| >1"}]
    assert seen[3][2:4] == seen[2][2:] and seen[3][-1]["content"] == "0123\n[2 characters omitted]\n6789"
    assert seen[4] == [log["messages"][0], {"role": "user", "content": "T\n\nSummary of the earlier steps:\ntwo"},
                       log["messages"][8], {"role": "user", "content": "<|end| >3"}]
    assert json.dumps(log) == before, "the log itself stays whole"


def test_empty_summary_means_that_messages_were_only_dropped():
    log = trajectory([("a", "1"), ("b", "2")], compactions=[{"before_turn": 1, "dropped": [2, 4], "summary": ""}])
    assert deloop.context_at(log, 1) == log["messages"][:2]


def test_every_loop_step_is_counted_with_its_reason():
    """Invariant: reasons sum to the loop steps, and each reason occurs where its kind was made."""
    a, b, c, again = ("a", "1"), ("b", "2"), ("c", "3"), ("a", "new")
    reasons: Counter = Counter()
    assert len(deloop.mine_pairs(trajectory([a, a, b, a, c]), reasons)) == 2 and reasons == {"pair": 2}
    assert deloop.mine_pairs(trajectory([a, b, a, b]), reasons := Counter()) == [] and reasons == {"no escape": 2}
    edited = trajectory([a, a, b])
    edited["turns"][1]["prompt_sha256"] = "0" * 64
    assert deloop.mine_pairs(edited, reasons := Counter()) == [] and reasons == {"context lost": 1}
    shared = trajectory([a, a, b])
    shared["turns"][2]["message"] = shared["turns"][1]["message"]
    assert deloop.mine_pairs(shared, reasons := Counter()) == [] and reasons == {"same message": 1}
    assert deloop.mine_pairs(trajectory([b, c]), reasons := Counter()) == [] and not reasons


def test_hashes_are_fixed():
    """Golden values: these hashes stand in files, so they never change."""
    assert deloop.prompt_hash([{"role": "user", "content": "é"}]) == \
        deloop.hashlib.sha256(b'[{"content":"\\u00e9","role":"user"}]').hexdigest()
    assert deloop.ids_hash([1, 2]) == deloop.hashlib.sha256(b"1 2").hexdigest()


# ---------------------------------------------------------------------------------------------------------------------
# Files.

def test_a_kill_loses_at_most_the_line_being_written(tmp_path):
    """Kill: whatever stands before the last line end is whole, and lines are in the order they were written."""
    path = tmp_path / "log.jsonl"
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import deloop, itertools\n" \
           f"for n in itertools.count(): deloop.append_jsonl({str(path)!r}, {{'n': n, 'text': 'é' * 50_000}})"
    process = subprocess.Popen([sys.executable, "-c", code])
    while not path.exists() or path.stat().st_size < 2_000_000:
        assert process.poll() is None
        time.sleep(.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    whole = path.read_bytes().rpartition(b"\n")[0].splitlines()
    assert [json.loads(line)["n"] for line in whole] == list(range(len(whole))) and len(whole) > 5


def test_a_whole_file_is_replaced_or_left(tmp_path):
    """Property: a write that fails leaves the old file; one that succeeds leaves nothing beside the new one."""
    path = tmp_path / "pairs.jsonl"
    deloop.write_atomic(path, "old")
    with pytest.raises(UnicodeEncodeError):
        deloop.write_atomic(path, "new \ud800")
    assert path.read_text() == "old"
    deloop.write_atomic(path, "newer")
    assert path.read_text() == "newer" and os.listdir(tmp_path) == ["pairs.jsonl"]


# ---------------------------------------------------------------------------------------------------------------------
# Commands, as a person runs them.

@pytest.fixture
def logs(tmp_path):
    """Three trajectories: one with two loop steps and an escape, one clean failure, one that the environment broke."""
    path = tmp_path / "trajectories.jsonl"
    for log in (trajectory([("a", "1"), ("a", "1"), ("b", "2"), ("a", "1"), ("c", "3")], task_id="loops"),
                trajectory([("a", "1"), (None, "no call")], task_id="clean", status="turn_limit", reward=0.0),
                trajectory([("a", "1"), ("a", "1"), ("b", "2")], task_id="broken", status="env_error", reward=None)):
        deloop.append_jsonl(path, log)
    return path


def test_detect(logs):
    result = command("detect", logs)
    assert result.returncode == 0 and not result.stderr
    rows = {line.split()[0]: line.split() for line in result.stdout.splitlines() if line}
    assert rows["loops"][1:] == ["0", "5", "2", "1", "done", "yes"]
    assert rows["clean"][1:] == ["0", "1", "0", "-", "turn_limit", "no"]
    assert "50.0%" in result.stdout and "1 errors left out" in result.stdout


def test_detect_for_machines(logs):
    *reports, last = [json.loads(line) for line in command("detect", logs, "--json").stdout.splitlines()]
    by_task = {each["task_id"]: each for each in reports}
    assert by_task["loops"]["loop_steps"] == [1, 3] and by_task["loops"]["steps"] == 5
    assert by_task["clean"]["turns_without_step"] == 1
    assert last["totals"] == last["totals"] | {"trajectories": 2, "errors": 1, "with_loop": 1, "loop_rate": .5, "loop_steps": 2}


def test_explain(logs):
    text = command("explain", logs, "loops").stdout
    assert "repeats step 0" in text and "step 2" in text and "step 4" in text
    missing = command("explain", logs, "nothere")
    assert missing.returncode == 2 and missing.stderr.count("\n") == 1 and "nothere" in missing.stderr


def test_mine(logs, tmp_path):
    result = command("mine", logs, "--out", tmp_path / "pairs.jsonl")
    pairs = [json.loads(line) for line in (tmp_path / "pairs.jsonl").read_text().splitlines()]
    assert result.returncode == 0 and [(pair["t"], pair["t_escape"]) for pair in pairs] == [(1, 2), (3, 4)]
    assert {pair["format"] for pair in pairs} == {"deloop-pairs/1"} and "2  pair" in result.stdout


def test_exit_codes(logs, tmp_path):
    """0 fine, 1 result not met, 2 bad input with one clear line."""
    clean = tmp_path / "clean.jsonl"
    deloop.append_jsonl(clean, trajectory([("a", "1")]))
    assert command("mine", clean, "--out", tmp_path / "none.jsonl").returncode == 1
    for words in (["detect", tmp_path / "absent.jsonl"], ["detect", ROOT / "LICENSE"]):
        result = command(*words)
        assert result.returncode == 2 and result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    assert command("detect", logs, "--fast").returncode == 2 and command("detect").returncode == 2
    assert command("--help").returncode == 0 and command().returncode == 0
