"""deloop.py: what counts as equal, what counts as a loop, which pair follows, and that no log or input breaks it."""
from __future__ import annotations

import datetime
import decimal
import doctest
import gzip
import html.parser
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
import types
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
    ("key order, deep", [(call(F, '{"q":[{"a":{"x":1,"y":2},"b":3}]}'), "r"),
                         (call(F, '{"q":[{"b":3,"a":{"y":2,"x":1}}]}'), "r")],
     [1], "at every depth, inside arrays too"),
    ("array order", [(call(F, {"ids": [1, 2]}), "r"), (call(F, {"ids": [2, 1]}), "r")], [], "an array has one"),
    ("array order, deep", [(call(F, {"q": {"ids": [[1], [2]]}}), "r"), (call(F, {"q": {"ids": [[2], [1]]}}), "r")],
     [], "also deep"),
    ("mapping and text", [(call(F, {"k": 0, "id": 3}), "r"), (call(F, '{"id":3,"k":0}'), "r")], [1],
     "two ways to log one call"),
    ("the three spellings", [(call(F, {"id": 3}), "r"), ({"name": F, "arguments": '{"id":3}'}, "r"),
                             ({"id": "call_9", "type": "function", "function": {"name": F, "arguments": '{"id": 3}'}},
                              "r")],
     [1, 2], "parameters, arguments, OpenAI's function"),
    ("encoded twice", [(call(F, '{"id":3}'), "r"), (call(F, json.dumps('{"id": 3}')), "r"),
                       (call(F, json.dumps(json.dumps('{"id":3}'))), "r")], [1, 2],
     "the whole parameters, encoded again"),
    ("JSON in a value", [(call(F, {"ids": [3]}), "r"), (call(F, {"ids": "[3]"}), "r")], [],
     "the tool sees a string, not an array"),
    ("JSON in a value, spaced", [(call(F, {"q": '{"a":1}'}), "r"), (call(F, {"q": '{"a": 1}'}), "r")], [],
     "a string is opaque"),
    ("escapes", [(call(F, '{"s":"\\u00fc\\/\\ud83d\\ude00"}'), "r"), (call(F, {"s": "ü/😀"}), "r")], [1],
     "escapes are syntax"),
    ("indentation in a value", [(call("py", {"code": "a\n  b"}), "r"), (call("py", {"code": "a\n b"}), "r")], [],
     "it is meaning"),
    ("outer blank in a value", [(call("py", {"code": " a"}), "r"), (call("py", {"code": "a"}), "r")], [],
     "also at the ends"),
    ("next page", [(call("page", {"from": n}), "(empty)") for n in (0, 50, 100)], [], "a number differs"),
    ("two in turn", [(call(F, {"id": n % 2}), str(n % 2)) for n in range(5)], [2, 3, 4],
     "any earlier step counts, not only the last"),
    ("far apart", [("start", "s"), *[(f"step {n}", "") for n in range(300)], ("start", "s")], [301], "no window"),
    ("twice in one message", [(call("add", {"n": 1}), "done"), (call("add", {"n": 1}), "done")], [1],
     "two calls are two steps"),
    ("batch", [(call(F, {"id": n}), "ok") for n in range(3)], [], "equal answers to different calls"),
    ("long tails", [("log", "y" * 200_000 + "1"), ("log", "y" * 200_000 + "2")], [], "compared whole"),
    ("long heads", [("log", "1" + "y" * 200_000), ("log", "2" + "y" * 200_000)], [], "compared whole"),
    ("errors", [(call("nope", {"a": 1}), "no such tool")] * 3, [1, 2],
     "an error is an observation, an unknown tool an action"),
    ("unanswered", [("go", None), ("go", None), ("go", ""), ("go", None), ("go", "")], [4],
     "no answer equals nothing; an empty one does"),
    ("not JSON", [(call(F, '{"id": 3'), "bad"), (call(F, '  {"id": 3\n'), "bad"), (call(F, '{"id":  3'), "bad")], [1],
     "compared as text, stripped outside only"),
    ("null or absent", [(call(F, {"id": 3, "k": None}), "r"), (call(F, {"id": 3}), "r")], [],
     "an explicit null is a parameter"),
    ("null or absent, deep", [(call(F, {"q": {"k": None}}), "r"), (call(F, {"q": {}}), "r")], [], "also deep"),
    ("no parameters", [(call(F, None), "r"), (call(F, ""), "r"), (call(F, {}), "r"), ({"name": F}, "r"),
                       (call(F, "null"), "r"),
                       (call(F, " {} "), "r"), (call(F, '""'), "r")], [1, 2, 3, 4, 5, 6],
     "all of them call without any"),
    ("empty values", [(call(F, "[]"), "r"), (call(F, "0"), "r"), (call(F, "false"), "r"), (call(F, "{}"), "r")], [],
     "are values"),
    ("1 and 1.0", [(call(F, '{"n":1}'), "r"), (call(F, '{"n":1.0}'), "r")], [], "an integer is no float"),
    ("1 and true", [(call(F, {"n": 1}), "r"), (call(F, {"n": True}), "r"), (call(F, {"n": "1"}), "r")], [],
     "nor a boolean, nor text"),
    ("0 and false", [(call(F, {"n": 0}), "r"), (call(F, {"n": False}), "r"), (call(F, {"n": None}), "r"),
                     (call(F, {"n": ""}), "r")],
     [], "nothing false is equal to something else false"),
    ("composed letters", [(call(F, {"s": "\u00fc"}), "r"), (call(F, {"s": "u\u0308"}), "r")], [],
     "no Unicode normalisation"),
    ("composed letters, seen", [("cat", "\u00fc"), ("cat", "u\u0308")], [], "nor in observations"),
    ("letter case", [(call(F, {"s": "A"}), "r"), (call(F, {"s": "a"}), "r"), (call(F, {"S": "a"}), "r")], [],
     "values and keys"),
    ("duplicate keys", [(call(F, '{"k":1,"k":2}'), "r"), (call(F, '{"k":2,"k":1}'), "r"), (call(F, '{"k":2}'), "r")],
     [2],
     "the last one is what the tool gets"),
    ("text beside the call", [({**call(F), "thought": "first", "id": 1}, "r"),
                              ({**call(F), "thought": "again", "id": 2}, "r")], [1],
     "thoughts, ids and times are no part of the action"),
    ("a note among the parameters", [(call(F, {"id": 3, "why": "a"}), "r"), (call(F, {"id": 3, "why": "b"}), "r")], [],
     "every parameter counts, whatever it is for"),
    ("renumbered references", [(call("press", {"ref": n}), "nothing happened") for n in ("e1", "e2")], [],
     "another argument"),
    ("paraphrase", [(call("find", {"q": "open bugs"}), "0 hits"), (call("find", {"q": "bugs, open"}), "0 hits")], [],
     "another string"),
    ("names", [(call("row_get"), "r"), (call("row-get"), "r"), (call("Row_get"), "r"), (call("row_get "), "r")], [],
     "compared exactly"),
    ("line ends", [("cat", "a\n"), ("cat", "a\r\n"), ("cat", "a")], [], "byte for byte"),
    ("text action", [("SELECT 1 ", "1"), ("\nSELECT 1\t", "1"), ("SELECT  1", "1"), ("select 1", "1")], [1],
     "stripped outside only"),
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
        spelling = rng.choice([parameters, json.dumps(parameters),
                               json.dumps(dict(reversed(parameters.items())), indent=1)])
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
# Never raises, never slow.

def odd_value(rng: random.Random, depth: int = 0) -> object:
    """Anything that could stand in an action: what JSON holds, what only Python holds, and what neither likes."""
    if depth < 4 and rng.random() < .45:
        members = [odd_value(rng, depth + 1) for _ in range(rng.randrange(4))]
        if rng.random() < .5:
            return rng.choice([list, tuple])(members)
        keys = [rng.choice(["a", "b", "", "\ud800", 1, 1.0, None, True, (1, 2), b"k", frozenset("xy")])
                for _ in members]
        made = dict(zip(keys, members))
        if rng.random() < .05:
            made["me"] = made                   # a cycle
        return made if rng.random() < .9 else types.MappingProxyType(made)
    return rng.choice([
        None, True, False, 0, 1, -1, 1.0, -0.0, 1e999, float("nan"), 10 ** 400, "", " ", "a", "\ud800",
                       "\udc80\ud83d", "\0", "ü",
        "😀", '{"a": 1}', "[1,", "null", '"x"', '"\\"x\\""', "NaN", "[" * 50, b"", b"\xff\x00", bytearray(b"x"),
        set(), {"x", "y", "z"}, frozenset({1, "1"}), 3 + 4j, range(3), object, len, Ellipsis, decimal.Decimal("1.10"),
        datetime.date(2024, 2, 29)])


def odd_action(rng: random.Random) -> object:
    key = rng.choice(["parameters", "arguments", "args", "input", "function", "other"])
    return rng.choice([lambda: odd_value(rng), lambda: {"name": odd_value(rng, 3), key: odd_value(rng)},
                       lambda: {"function": {"name": "f", key: odd_value(rng)}}, lambda: {key: odd_value(rng)}])()


DEEP_TEXT = "[" * 100_000 + "]" * 100_000


def deep_value(kind: str) -> object:
    value: object = []
    for _ in range(100_000):
        value = {"b": 1, "a": value} if kind == "dict" else [value] if kind == "list" else (value,)
    return value


def test_100_000_odd_actions():
    """Property: kappa and signature answer for everything, and kappa of a parsed kappa is itself."""
    rng, began = random.Random(3), time.process_time()
    for _ in range(100_000):
        action, observation = odd_action(rng), odd_value(rng)
        canonical = deloop.kappa(action)
        assert isinstance(canonical, str)
        digest = deloop.signature(action, observation)
        assert digest is None if observation is None else re.fullmatch("[0-9a-f]{64}", digest)
        if isinstance(action, dict):
            assert deloop.kappa(json.loads(canonical)) == canonical
        assert deloop.kappa(canonical) == canonical.strip()
    assert time.process_time() - began < 40


@pytest.mark.parametrize("make", [
    lambda: deep_value("dict"), lambda: deep_value("list"), lambda: deep_value("tuple"), lambda: DEEP_TEXT,
                                  lambda: '{"a":' * 100_000,
    lambda: "x" * 1_000_000, lambda: json.dumps("x" * 1_000_000), lambda: {"n": 10 ** 6000}, lambda: '{"n": -'
                                  + "7" * 6000 + "}",
    lambda: json.dumps({str(n): n for n in range(100_000)}), lambda: {n: str(n) for n in range(100_000)},
                                  lambda: "\\" * 1_000_000,
    lambda: json.dumps(json.dumps(json.dumps("x" * 200_000))), lambda: [[]] * 100_000, lambda: '"' * 1_000_000,
                                  lambda: b"\xff" * 1_000_000])
def test_large_actions_are_not_slow(make):
    """Property: seconds at most, as parameters and as an observation; and still exact."""
    value, other, began = make(), make(), time.process_time()
    first = deloop.signature(call("f", value), value if isinstance(value, (str, bytes)) else "x")
    assert time.process_time() - began < 10
    assert first == deloop.signature(call("f", other), other if isinstance(other, (str, bytes)) else "x")
    assert first != deloop.signature(call("f", [value]), value if isinstance(value, (str, bytes)) else "x")


def test_deep_values_stay_exact():
    """Invariant: far beyond the recursion limit, key order still does not count and everything else does."""
    def nested(order, leaf):
        value = leaf
        for _ in range(50_000):
            value = {key: {"a": value, "b": 2}[key] for key in order}
        return deloop.kappa(call("f", value))
    assert nested("ab", 1) == nested("ba", 1) != nested("ab", True)


def test_cycles_are_named_not_followed():
    inner: dict = {}
    inner["up"], twin = [inner], {}
    twin["up"] = [twin]
    assert deloop.kappa(call("f", inner)) == deloop.kappa(call("f",
        twin)) == '{"name":"f","parameters":{"up":["<cycle 2>"]}}'
    shared = [1]
    flat = call("f", {"x": [1], "y": [1]})
    assert deloop.kappa(call("f", {"x": shared, "y": shared})) == deloop.kappa(flat), "met twice is no cycle"


def tagged(value: object) -> object:
    """Oracle of equality: every value with its type beside it; an object as a sorted list of its members."""
    if isinstance(value, dict):
        return "object", sorted((key, repr(tagged(member))) for key, member in value.items())
    if isinstance(value, list):
        return "array", [tagged(member) for member in value]
    return type(value).__name__, repr(value)


def plain_value(rng: random.Random, depth: int = 0) -> object:
    if depth < 3 and rng.random() < .5:
        members = [plain_value(rng, depth + 1) for _ in range(rng.randrange(3))]
        return members if rng.random() < .4 else dict(zip(rng.sample(["a", "b", "A", "é", "e\u0301", ""],
            len(members)), members))
    return rng.choice([None, True, False, 0, 1, 1.0, 1.5, -0.0, 10 ** 30, "", "1", "null", "a ", "é", "e\u0301",
                       '{"a":1}', "\ud800"])


def respelled(value: object, rng: random.Random) -> object:
    """The same JSON value with its members in another order."""
    if isinstance(value, dict):
        keys = list(value)
        rng.shuffle(keys)
        return {key: respelled(value[key], rng) for key in keys}
    return [respelled(member, rng) for member in value] if isinstance(value, list) else value


def spelling(value: dict, rng: random.Random) -> object:
    """Parameters as a log may hold them: a mapping, or JSON text in any layout, once or twice encoded."""
    value = respelled(value, rng)
    if rng.random() < .3:
        return value
    text = json.dumps(value, ensure_ascii=rng.random() < .5, indent=rng.choice([None, 0, 3]),
                      separators=rng.choice([None, (" , ", ": ")]))
    return rng.choice([text, f" \n{text}\t", json.dumps(text)])


def test_kappa_is_equal_exactly_when_the_oracle_says_so():
    """Oracle: two calls are one iff names and typed parameters are equal, whatever the spelling."""
    rng = random.Random(4)
    for _ in range(700):
        values = [{"p": plain_value(rng)} for _ in range(4)]
        calls = [(name, value, deloop.kappa(call(name, spelling(value, rng)))) for value in values * 2
                 for name in ("f", "F")]
        for name, value, canonical in calls:
            for other_name, other, other_canonical in calls:
                assert (canonical == other_canonical) == (name == other_name and tagged(value) == tagged(other))


def test_integers_beyond_the_limit_of_python():
    """Invariant: 6,000 digits are the same call as a number and as JSON text, and one digit more is another."""
    text = "9" * 6000
    live, logged = call("f", {"n": 10 ** 6000 - 1, "a": 1}), call("f", f'{{"a":1,"n" : {text}}}')
    assert deloop.kappa(live) == deloop.kappa(logged) != deloop.kappa(call("f", f'{{"a":1,"n":{text}9}}'))
    for digits in (4299, 4300, 4301):
        for sign in ("", "-"):
            value = int(f"{sign}1") * 10 ** (digits - 1)
            assert deloop.kappa(call("f", [value])) == deloop.kappa(call("f", f"[{sign}1{'0' * (digits - 1)}]"))


def test_digests_do_not_depend_on_the_hash_seed():
    """Determinism: two processes with other PYTHONHASHSEEDs, sets and odd keys included, agree on every digest."""
    code = ("import random, sys; sys.path[:0] = sys.argv[1:]; import test_deloop as t, deloop, hashlib\n"
            "rng = random.Random(5); h = hashlib.sha256()\n"
            "for _ in range(3000): h.update(str(deloop.signature(t.odd_action(rng), 'x')).encode())\n"
            "h.update(deloop.kappa(t.call('f', {'s': set('abcdefgh'), frozenset('abcdefgh'): 1})).encode())\n"
            "print(h.hexdigest())")
    found = {subprocess.run([sys.executable, "-c", code, str(ROOT), str(ROOT / "tests")], capture_output=True,
                            text=True, check=True,
                            env={**os.environ, "PYTHONHASHSEED": seed}).stdout for seed in ("1", "2", "77")}
    assert len(found) == 1


def test_short_and_long_steps_follow_one_rule():
    """Invariant: the detector keeps short steps as text and long ones as digests; the flags never show it."""
    rng = random.Random(6)
    run = [("a" * rng.randrange(60, 68), "b" * rng.randrange(0, 3)) for _ in range(300)]
    run = [step for action, observation in run for step in ((action, observation), (action, observation.encode()))]
    seen = [(action, observation if isinstance(observation, str) else observation.decode()) for action,
            observation in run]
    assert deloop.loop_flags(run) == [step in seen[:t] for t, step in enumerate(seen)]


# ---------------------------------------------------------------------------------------------------------------------
# Trajectories, contexts and pairs.

def trajectory(run: list[tuple], **fields) -> dict:
    """A deloop-trajectory/1 of (action, observation) steps; action None: the message held no call."""
    messages, turns = [{"role": "system", "content": "S"}, {"role": "user", "content": "T"}], []
    for number, (action, observation) in enumerate(run):
        turns.append({"message": len(messages), "action": action, "executed": action is not None,
                      "observation": observation,
                      "parse": "no_call" if action is None else "ok", "completion_ids": [number, 9]})
        messages += [{"role": "assistant", "content": f"{number}: {action}"}, {"role": "user", "content": observation}]
    return {"format": "deloop-trajectory/1", "task_id": "t", "sample": 0, "seed": 0, "env": "none", "policy": "none",
            "config": {}, "status": "done", "reward": 1.0, "messages": messages, "turns": turns, "compactions": [],
            **fields}


def test_mined_pairs_equal_brute_force():
    """Oracle: every loop step with a later new and different call gives one pair, with the messages of those turns."""
    rng = random.Random(2)
    for _ in range(200):
        run = random_run(rng, 12)
        log = trajectory([(None, "no call") if rng.random() < .2 else step for step in run])
        turns = [step.turn for step in deloop.steps(log)]
        executed = [(step.action, step.observation) for step in deloop.steps(log)]
        flags = brute_flags(executed)
        expected = [(t, u) for t, flag in enumerate(flags) if flag
                    and (u := brute_escape(executed, flags, t)) is not None]
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


def test_a_compaction_may_bring_a_header_or_shorten_observations():
    """Worked example: the header stands in the task; old observations become their length where that is shorter."""
    log = trajectory([("a", "x" * 99), ("b", "y"), ("c", "z" * 99)], compactions=[
        {"before_turn": 2, "dropped": [2, 2], "header": "", "summary": "", "masked": 6},
        {"before_turn": 3, "dropped": [2, 4], "header": "[2 earlier messages removed]", "summary": ""}])
    log["turns"].append({"message": 8, "action": None, "executed": False, "observation": None})
    log["messages"].append({"role": "assistant", "content": "end"})
    assert [message["content"] for message in deloop.context_at(log, 2)] == [
        "S", "T", "0: a", "[observation omitted: 99 characters]", "1: b", "y"]
    assert [message["content"] for message in deloop.context_at(log, 3)] == [
        "S", "T\n\n[2 earlier messages removed]", "1: b", "y", "2: c", "z" * 99]
    told = [(head, body) for kind, _, head, body, _ in deloop.story(log) if kind == "compaction"]
    assert told == [("compaction: of the observations before message 6 only the length stays", ""),
                    ("compaction: messages 2 to 3 become", "[2 earlier messages removed]")]


def test_every_loop_step_is_counted_with_its_reason():
    """Invariant: reasons sum to the loop steps, and each reason occurs where its kind was made."""
    a, b, c, again = ("a", "1"), ("b", "2"), ("c", "3"), ("a", "new")
    reasons: Counter = Counter()
    assert len(deloop.mine_pairs(trajectory([a, a, b, a, c]), reasons)) == 2 and reasons == {"pair": 2}
    assert deloop.mine_pairs(trajectory([a, b, a, b]), reasons := Counter()) == [] and reasons == {"no escape": 2}
    assert deloop.mine_pairs(trajectory([a, a, again]), reasons := Counter()) == []
    assert reasons == {"identical after kappa": 1}, "what follows is new, but the same call"
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
# Logs of other projects: (format, document, loop steps of each trajectory), every one in our own words and values.

def asked(*calls: tuple, text: str | None = None) -> dict:
    """An OpenAI assistant message with (id, name, arguments) calls."""
    return {"role": "assistant", "content": text, "tool_calls": [
        {"id": key, "type": "function", "function": {"name": name, "arguments": arguments}} for key, name,
        arguments in calls]}


def answered(key: str | None, content: object) -> dict:
    return {"role": "tool", "content": content, **({} if key is None else {"tool_call_id": key})}


USER = {"role": "user", "content": "find the key"}
CHAT = [USER, asked(("1", "look", '{"at": "desk"}')), answered("1", "dust"),
        asked(("1", "look", '{"at":"desk"}'), text="hm"),
        answered("1", "dust"), asked(("1", "open", "{}")), answered("1", "a key")]
EVENTS = [
    {"id": 0, "source": "user", "action": "message", "args": {"content": "fix it"}},
    {"id": 1, "source": "agent", "action": "run", "args": {"command": "make", "thought": "first",
        "is_confirmed": "confirmed"}},
    {"id": 2, "source": "agent", "observation": "run", "content": "2 errors", "cause": 1},
    {"id": 3, "source": "agent", "action": "think", "args": {"thought": "hm"}},
          {"id": 4, "observation": "think", "content": "ok", "cause": 3},
    {"id": 5, "source": "agent", "action": "run", "args": {"command": "make", "thought": "again", "blocking": True}},
    {"id": 6, "observation": "agent_state_changed", "content": ""},
          {"id": 7, "observation": "run", "content": "2 errors", "cause": 5},
    {"id": 8, "source": "user", "action": "run", "args": {"command": "make"}},
          {"id": 9, "observation": "run", "content": "2 errors", "cause": 8},
    {"id": 10, "source": "agent", "action": "read", "args": {"path": "a.c"}},
          {"id": 11, "observation": "error", "content": "no file", "cause": 10},
    {"id": 12, "source": "agent", "action": "finish", "args": {}}]
FLAT = [{"action": "message", "content": "fix it", "wait_for_response": False},
        {"action": "run", "command": "make", "thought": "a", "action_risk": None},
        {"observation": "run", "content": "2 errors", "exit_code": 2},
        {"action": "run", "command": "make", "thought": "b", "action_risk": None},
        {"observation": "run", "content": "2 errors", "exit_code": 2},
        {"action": "finish", "outputs": {}, "thought": "c"}]
SWE = [("find key", "nothing"), ("find key", "nothing"), ("", ""), ("", ""), ("cat a", "x"), ("exit_cost", "Exited")]
SWE_STEPS = [{"action": action, "observation": seen, "response": f"I run\n```\n{action}\n```", "thought": "",
              "state": "{}"} for action, seen in SWE]
SWE_HISTORY = [{"role": "system", "content": "s"}, {"role": "assistant", "content": "demo", "is_demo": True}, USER] + [
    message for step in SWE_STEPS for message in ({"role": "assistant", "content": step["response"]},
        {"role": "user", "content": "(elided)"})]


def fenced(command: str, output: str, code: int = 0) -> list[dict]:
    return [{"role": "assistant", "content": f"THOUGHT: so\n\n```bash\n{command}\n```"},
            {"role": "user", "content": f"<returncode>{code}</returncode>\n<output>\n{output}</output>"}]


def acted(*commands: tuple) -> list[dict]:
    """mini-swe-agent 2.x: the message shows a shortened output, extra holds what was returned."""
    return [{"role": "assistant", "content": "", "extra": {"actions": [{"command": command} for command,
        *_ in commands]}}] + [
        {"role": "user", "content": "<output>...</output>", "extra": {
            "raw_output": output, "returncode": code, "exception_info": "action was not executed" if code == -1
            else None}}
        for _, output, code in commands]


REACT = """Question: who?
Thought 1: I search.
Action 1: Search[key]
Observation 1: Nothing
is found.
Thought 2: Again.
Action 2: Search[key]
Observation 2: Nothing
is found.
Action 3: Finish[none]
Observation 3: done

Question: what?
Action 1: Search[key]
Observation 1: Nothing
is found.
"""

FORMATS = [
    ("OpenAI messages, a list", CHAT, [[1]]),
    ("OpenAI messages, an object", {"messages": CHAT, "id": "chat-7"}, [[1]]),
    ("OpenAI messages, many objects in a list", [{"messages": CHAT}, {"messages": CHAT[:3]}], [[1], []]),
    ("results out of order", [asked(("1", "f", "{}"), ("2", "g", "{}")), answered("2", "G"), answered("1", "F"),
                              asked(("3", "g", "{}")),
                              answered("3", "G")], [[2]]),
    ("a second result for a call", [asked(("1", "f", "{}")), answered("1", "F"), answered("1", "late"),
                                    asked(("2", "f", "{}")),
                                    answered("2", "late")], [[]]),
    ("an id used again in every turn", [*CHAT[:3], asked(("1", "look", '{"at":"desk"}'))], [[]]),
    ("unanswered, then asked again", [asked(("1", "f", "{}")), USER, asked(("2", "f", "{}")), answered("2", "F")],
     [[]]),
    ("results without ids", [asked(("1", "f", "{}"), ("2", "g", "{}")), answered(None, "F"), answered(None, "G"),
                             asked(("3", "g", "{}")),
                             answered(None, "G")], [[2]]),
    ("text blocks", [asked(("1", "f", "{}")), answered("1",
        [{"type": "text", "text": "F"}, {"type": "text", "text": "1"}]), asked(("2", "f", "{}")),
                     answered("2", "F1")], [[1]]),
    ("the same call twice in one message", [asked(("1", "f", "{}"), ("2", "f", "{}")), answered("1", "F"),
                                            answered("2", "F")], [[1]]),
    ("user turns between", [*CHAT[:3], USER, {"role": "assistant", "content": "on it"}, USER, *CHAT[1:3]], [[1]]),
    ("text alone", [USER, {"role": "assistant", "content": "look"}, USER, {"role": "assistant", "content": "look"}],
     [[]]),
    ("function_call", [USER, *[{"role": "assistant", "content": None,
                                "function_call": {"name": "f", "arguments": "{}"}},
                               {"role": "function", "name": "f", "content": "F"}] * 2], [[1]]),
    ("chat completions among messages", [USER, {"id": "r1",
                                                "choices": [{"index": 0, "message": asked(("1", "f", "{}"))}]},
                                         answered("1", "F"),
                                         {"id": "r2", "choices": [{"index": 0, "message": asked(("2", "f", "{}"))}]},
                                         answered("2", "F")], [[1]]),
    ("request and response", {"request": {"messages": CHAT[:5]},
                              "response": {"choices": [{"message": asked(("2", "open", "{}"))}]}}, [[1]]),
    ("tau-bench", [{"task_id": 3, "trial": 1, "reward": 1.0, "info": {"task": {}}, "traj": CHAT},
                   {"task_id": 4, "trial": 0, "reward": 0.0, "info": {}, "traj": CHAT[:4]}], [[1], []]),
    ("SWE-agent", {"environment": "e", "trajectory": SWE_STEPS, "history": SWE_HISTORY,
                   "info": {"exit_status": "submitted"}}, [[1]]),
    ("SWE-agent, another history", {"trajectory": SWE_STEPS, "history": SWE_HISTORY[:6], "info": {}}, [[1]]),
    ("SWE-agent, no history", {"trajectory": SWE_STEPS}, [[1]]),
    ("OpenHands", {"instance_id": "o-1", "history": EVENTS}, [[1]]),
    ("OpenHands, bare events", EVENTS, [[1]]),
    ("OpenHands, without ids", {"history": FLAT}, [[1]]),
    ("OpenHands, pairs", {"history": [[FLAT[0], {"observation": "null", "content": ""}], FLAT[1:3], FLAT[3:5]]}, [[1]]),
    ("mini-swe-agent 1.x, a list", [USER, *fenced("ls", "a"), *fenced("ls", "a"), *fenced("ls", "a", 1)], [[1]]),
    ("mini-swe-agent 1.x, refused replies", {"info": {"exit_status": "Submitted"}, "messages": [
        USER, *fenced("ls", "a"), {"role": "assistant", "content": "no block"},
        {"role": "user", "content": "one block, please"},
        {"role": "assistant", "content": "no block"}, {"role": "user", "content": "one block, please"}]}, [[]]),
    ("mini-swe-agent 2.x", {"trajectory_format": "mini-swe-agent-1.1", "messages": [
        USER, *acted(("ls", "a\n", 0)), *acted(("ls", "a\n", 0), ("cat a", "", 1)), *acted(("cat a", "", 0)),
        *acted(("cat a", "", -1)),
        {"role": "exit", "content": "", "extra": {"exit_status": "Submitted"}}]}, [[1]]),
    ("mini-swe-agent 2.x, tool calls", {"messages": [
        {**asked(("1", "bash", '{"command": "ls"}')), "extra": {"actions": [{"command": "ls", "tool_call_id": "1"}]}},
        {**answered("1", "short"), "extra": {"raw_output": "long a", "returncode": 0}},
        {**asked(("2", "bash", '{"command": "ls"}')), "extra": {"actions": [{"command": "ls", "tool_call_id": "2"}]}},
        {**answered("2", "short"), "extra": {"raw_output": "long b", "returncode": 0}}]}, [[]]),
    ("ReAct text", REACT, [[1], []]),
    ("ReAct text in an object", {"one": REACT, "two": "Action 1: a\nObservation 1: b\nAction 2: a\nObservation 2: b"},
     [[1], [], [1]]),
    ("ReAct text without numbers", "Action: a\nAction Input: 1\nObservation: b\nThought: so\n"
                                   "Action: a\nAction Input: 1\nObservation: b", [[1]]),
    ("SWE-agent, stopped before its first step", {"trajectory": [], "history": SWE_HISTORY[:3], "info": {}}, [[]]),
    ("OpenHands, stopped before its first step", {"instance_id": "o-1", "history": None, "error": "no runtime"}, [[]]),
    ("actions and observations", [{"action": {"name": "f", "arguments": "{}"}, "observation": "F"}] * 2, [[1]]),
    ("deloop-trajectory/1", trajectory([("a", "1"), ("a", "1"), (None, "no call")]), [[1]]),
]


@pytest.mark.parametrize("kind, document, loops", FORMATS, ids=[case[0] for case in FORMATS])
def test_format(kind, document, loops, tmp_path):
    """Each format is known by its content: as one document, on many lines, compressed, and as a line among others."""
    text = document if isinstance(document, str) else json.dumps(document)
    files = {"one.json": text.encode(), "zipped": gzip.compress(text.encode())}
    if not isinstance(document, str):
        files |= {"many": json.dumps(document, indent=2).encode(), "lines.jsonl": f"{text}\n\n{text}\n".encode()}
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
        found = [deloop.report(log)["loop_steps"] for log in deloop.read_trajectories(tmp_path / name)]
        assert found == loops * (2 if name == "lines.jsonl" else 1), name


def damaged(document: object, rng: random.Random) -> object:
    """document with one node, anywhere in it, replaced by something else."""
    if isinstance(document, (dict, list)) and document and rng.random() < .8:
        key = rng.choice(list(document) if isinstance(document, dict) else range(len(document)))
        copy = document.copy()
        copy[key] = damaged(document[key], rng)
        return copy
    return rng.choice([None, 0, 1.5, True, "", "text", "1", [], {}, [1], ["x"], {"a": 1}, {"role": "assistant"}, [[]],
                       [{"role": "user"}], {"text": 1}, {"name": 1}])


def test_a_damaged_log_is_read_or_refused(tmp_path):
    """Fuzz: one wrong node anywhere in a foreign log gives trajectories or InputError, never another error, from the
    file to detect, explain and mine."""
    rng, path, read = random.Random(8), tmp_path / "log.json", 0
    documents = [document for _, document, _ in FORMATS[:-1] if not isinstance(document, str)]
    for _ in range(1200):
        path.write_text(json.dumps(damaged(rng.choice(documents), rng)))
        try:
            logs = list(deloop.read_trajectories(path))
        except deloop.InputError:
            continue
        read += 1
        for log in logs:
            deloop.totals([deloop.report(log)])
            deloop.page(list(deloop.story(log)))
            json.dumps(deloop.mine_pairs(log))
    assert 300 < read < 1150


def test_what_a_foreign_log_says_of_its_task(tmp_path):
    def read(document):
        (tmp_path / "x.traj.json").write_text(json.dumps(document))
        return [(log["task_id"], log["sample"], log["status"], deloop.success(log))
                for log in deloop.read_trajectories(tmp_path / "x.traj.json")]
    assert read(FORMATS[15][1]) == [("3", 1, None, True), ("4", 0, None, False)]
    assert read({"trajectory": SWE_STEPS, "info": {"exit_status": "submitted"}}) == [("x", 0, "submitted", None)]
    assert read({"instance_id": "o-1", "history": EVENTS, "resolved": False}) == [("o-1", 0, None, False)]


def test_one_message_a_line(tmp_path):
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(message) + "\n" for message in CHAT))
    [log] = deloop.read_trajectories(tmp_path / "chat.jsonl")
    assert log["task_id"] == "chat" and deloop.report(log)["loop_steps"] == [1]


def test_pairs_of_foreign_logs(tmp_path):
    """Property: the prompt is the message list before the call; of several calls in a message a pair holds its own;
    what the harness wrote itself (exit_cost) is never chosen."""
    def mined(document):
        (tmp_path / "log.json").write_text(json.dumps(document))
        [log] = deloop.read_trajectories(tmp_path / "log.json")
        return deloop.mine_pairs(log)
    [pair] = mined(CHAT)
    assert (pair["prompt"], pair["rejected"], pair["chosen"]) == (CHAT[:3], [CHAT[3]], [CHAT[5]])
    both = [*CHAT[:3], asked(("1", "look", '{"at":"desk"}'), ("2", "open", "{}")), answered("1", "dust"),
            answered("2", "a key")]
    [pair] = mined(both)
    assert pair["prompt"] == CHAT[:3] and [pair[side][0]["tool_calls"] for side in ("rejected", "chosen")] == [
        both[3]["tool_calls"][:1], both[3]["tool_calls"][1:]]
    [pair] = mined({"trajectory": SWE_STEPS, "history": SWE_HISTORY})
    assert pair["chosen"][0]["content"] == SWE_STEPS[4]["response"] and pair["prompt"] == SWE_HISTORY[:5]
    assert mined({"trajectory": [*SWE_STEPS[:2], SWE_STEPS[-1]]}) == []


def test_lines_that_cannot_be_read(tmp_path):
    """Property: everything else is read; each bad line is named, online in the list or as the error at the end."""
    good = json.dumps({"messages": CHAT}).encode()
    for bad in (b'{"messages": [', b"\xff\xfe", b"[" * 100_000, b'{"a": 1}', b'{"format": "deloop-trajectory/1"}'):
        for place in (0, 1, 2):
            lines = [good, good]
            lines.insert(place, bad)
            (tmp_path / "log.jsonl").write_bytes(b"\n".join(lines))
            found = list(deloop.read_trajectories(tmp_path / "log.jsonl", problems := []))
            assert len(found) == 2 and len(problems) == 1 and f"log.jsonl, line {place + 1}: " in problems[0]
            seen = []
            with pytest.raises(deloop.InputError, match=f"line {place + 1}"):
                for log in deloop.read_trajectories(tmp_path / "log.jsonl"):
                    seen.append(log)
            assert len(seen) == 2


def test_read_jsonl_names_the_line(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"a": 1}\n\n{"a": 2}\n{"a": \n')
    rows = deloop.read_jsonl(tmp_path / "rows.jsonl")
    assert [next(rows), next(rows)] == [(1, {"a": 1}), (3, {"a": 2})]
    with pytest.raises(deloop.InputError, match="line 4: not JSON"):
        next(rows)
    (tmp_path / "empty").write_text("")
    assert list(deloop.read_jsonl(tmp_path / "empty")) == list(deloop.read_trajectories(tmp_path / "empty")) == []


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
    assert last["totals"] == last["totals"] | {"trajectories": 2, "errors": 1, "with_loop": 1, "loop_rate": .5,
                                               "loop_steps": 2}


def test_explain(logs):
    text = command("explain", logs, "loops").stdout
    assert "LOOP: repeats step 0, escapes at step 2" in text and "LOOP: repeats step 0, escapes at step 4" in text
    assert "\033" not in text, "colour is for terminals"
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


def test_explain_tells_compactions_and_why_there_is_no_pair(tmp_path):
    path = tmp_path / "t.jsonl"
    deloop.append_jsonl(path, trajectory([("a", "1"), (None, "no call"), ("a", "1"), ("a", "2")], task_id="first",
                                         compactions=[
        {"before_turn": 2, "dropped": [2, 4], "summary": "the summary"}]))
    text = command("explain", path, "fir").stdout
    order = [text.index(part) for part in ("no step (no_call)", "messages 2 to 3 become", "the summary",
                                           "no pair: identical after kappa")]
    assert order == sorted(order)


def test_colour_on_a_terminal(logs):
    """Property: the same text, with colour, when the output is a terminal."""
    reader, writer = os.openpty()
    subprocess.run([sys.executable, str(ROOT / "deloop.py"), "explain", str(logs), "loops"], stdout=writer,
                   check=True, timeout=60)
    assert "\033[1;31mLOOP" in os.read(reader, 100_000).decode()
    os.close(reader), os.close(writer)


class Page(html.parser.HTMLParser):
    """What a browser would see: the tags, their attributes and the text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags, self.text = [], ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_data(self, data):
        self.text += data


def test_page_is_self_contained_and_shows_any_text(tmp_path):
    """Property: no script, no address, every link inside the page, markup in a log is text, long texts are folded."""
    path, evil = tmp_path / "t.jsonl", "<script>alert(1)</script> TITLE ROWS {x} \ud800 &amp;"
    deloop.append_jsonl(path, trajectory([("a", evil), ("a", evil), (call("b", {"x": evil}), "long line\n" * 50)],
                                         task_id=evil))
    result = command("explain", path, "<script>", "--html", tmp_path / "page.html")
    assert result.returncode == 0, result.stderr
    text = (tmp_path / "page.html").read_text()
    page = Page(text)
    tags = {tag for tag, _ in page.tags}
    assert not tags & {"script", "link", "img", "iframe"} and "http" not in text and "url(" not in text
    ids = {attributes["id"] for tag, attributes in page.tags if "id" in attributes}
    links = {attributes["href"] for tag, attributes in page.tags if tag == "a"}
    assert links == {"#0", "#1", "#2"} and ids >= {"0", "1", "2"} and "details" in tags and "summary" in tags
    assert page.text.count("<script>alert(1)</script> TITLE ROWS {x} ? &amp;") >= 3


def test_files_folders_patterns_and_standard_input(logs, tmp_path):
    """Property: the same trajectories however they are named; what a folder holds besides logs is passed over."""
    folder = tmp_path / "runs" / "a"
    folder.mkdir(parents=True)
    (folder / "zipped.jsonl.gz").write_bytes(gzip.compress(logs.read_bytes()))
    (folder / "config.json").write_text('{"model": "m"}')
    (folder / "model.bin").write_bytes(b"\0" * 10)
    def seen(*names, **options):
        result = command("detect", "--json", *names, **options)
        assert result.returncode == 0, result.stderr
        return [{key: value for key, value in json.loads(line).items() if key != "file"}
                for line in result.stdout.splitlines()]
    expected = seen(logs)
    assert seen(tmp_path / "runs") == seen(tmp_path / "runs/*/*.gz") == seen(tmp_path / "**/zipped*") == expected
    with open(folder / "zipped.jsonl.gz", "rb") as file:
        assert seen("-", stdin=file) == expected
    assert command("detect", folder / "config.json").returncode == 2
    (folder / "zipped.jsonl.gz").unlink()
    assert command("detect", tmp_path / "runs").returncode == 2


def test_a_broken_line_is_told_and_the_rest_is_read(logs):
    """0 would hide it, 2 would stop: every other line is read and the exit code is 1."""
    whole = command("detect", logs).stdout
    lines = logs.read_bytes().splitlines(keepends=True)
    logs.write_bytes(lines[0] + b'{"format": \n' + b"".join(lines[1:]))
    result = command("detect", logs)
    assert (result.returncode, result.stdout) == (1, whole)
    assert "line 2: not JSON" in result.stderr and result.stderr.count("\n") == 1
    assert command("mine", logs, "--out", logs.with_name("pairs.jsonl")).returncode == 1


def test_mining_gives_the_same_bytes_in_any_order(tmp_path):
    """Determinism: two files in both orders, and tasks that stand in both."""
    rng = random.Random(7)
    for name in ("a", "b"):
        for task in range(5):
            deloop.append_jsonl(tmp_path / f"{name}.jsonl",
                                trajectory(random_run(rng, 12), task_id=f"t{task}", sample=task % 2))
    made = []
    for names in (("a", "b"), ("b", "a")):
        result = command("mine", *[tmp_path / f"{name}.jsonl" for name in names], "--out", tmp_path / "pairs.jsonl")
        made.append((result.stdout, (tmp_path / "pairs.jsonl").read_bytes()))
    assert made[0] == made[1] and made[0][1].count(b"\n") > 20


def test_mask_is_off_by_default_and_labelled(tmp_path):
    """Property: a counter hides a loop from the definition; with --mask it is found, and every output says so."""
    path = tmp_path / "clock.jsonl"
    deloop.append_jsonl(path, trajectory([("date", "09:00:01"), ("date", "09:00:02"), ("ls", "a")]))
    out, mask = tmp_path / "pairs.jsonl", r"\d\d:\d\d:\d\d"
    assert command("mine", path, "--out", out).returncode == 1 and "MASKED" not in command("detect", path).stdout
    assert command("mine", path, "--out", out, "--mask", mask).returncode == 0
    [pair] = map(json.loads, out.read_text().splitlines())
    assert pair["mask"] == mask and pair["prompt"][-1]["content"] == "09:00:01", "the prompt stays as it was"
    for words in (["detect", path], ["explain", path, "t"], ["mine", path, "--out", out]):
        assert f"MASKED by {mask}" in command(*words, "--mask", mask).stdout
    report, last = map(json.loads, command("detect", path, "--json", "--mask", mask).stdout.splitlines())
    assert report["loop_steps"] == [1] and report["mask"] == last["totals"]["mask"] == mask
    bad = command("detect", path, "--mask", "(")
    assert bad.returncode == 2 and bad.stderr.count("\n") == 1 and "--mask (" in bad.stderr


def test_help_has_examples_that_parse(logs, tmp_path):
    """Property: bare python deloop.py prints three commands; they run once their files are ours."""
    shown = [line.split()[2:] for line in command().stdout.splitlines() if line.startswith("  python deloop.py ")]
    assert [words[0] for words in shown] == ["detect", "explain", "mine"]
    ours = {"trajectories.jsonl": logs, "pairs.jsonl": tmp_path / "pairs.jsonl", shown[1][2]: "loops"}
    assert [command(*[ours.get(word, word) for word in words]).returncode for words in shown] == [0, 0, 0]


# ---------------------------------------------------------------------------------------------------------------------
# Alone in an empty folder, and pasted.

def isolated(code: str, folder: Path, python: str = sys.executable) -> str:
    """What code prints in a Python that sees no site-packages, no environment and only this folder."""
    return subprocess.run([python, "-S", "-I", "-c", f"import sys; sys.path.insert(0, {str(folder)!r})\n{code}"],
                          cwd=folder,
                          capture_output=True, text=True, check=True, timeout=60).stdout


@pytest.fixture
def alone(tmp_path):
    folder = tmp_path / "alone"
    folder.mkdir()
    (folder / "deloop.py").write_bytes((ROOT / "deloop.py").read_bytes())
    return folder


def interpreter(version: str) -> str:
    """A Python of that version: this one, one on the path or one of pyenv's; skips the test where there is none."""
    found = [sys.executable, shutil.which(f"python{version}"),
             *Path.home().glob(f".pyenv/versions/{version}.*/bin/python")]
    for python in filter(None, found):
        asked = subprocess.run([python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"],
                               capture_output=True, text=True)
        if asked.stdout.strip() == version:
            return str(python)
    pytest.skip(f"no Python {version} here")


@pytest.mark.parametrize("version", ["3.10", "3.11", "3.12", "3.13", "3.14"])
def test_works_alone(version, alone, logs):
    """Property: the file by itself, in each supported Python that is here, without a single package or a warning."""
    python = interpreter(version)
    result = subprocess.run([python, "-S", "-I", "-W", "error", "deloop.py", "detect", str(logs)], cwd=alone,
                            capture_output=True, text=True)
    assert result.returncode == 0 and "50.0%" in result.stdout, result.stderr
    assert isolated("import doctest, deloop; print(doctest.testmod(deloop))", alone,
                    python).startswith("TestResults(failed=0")


def test_import_is_light(alone):
    """Property: less than 0.1 s over bare Python (best of five), and nothing heavy comes along."""
    code = ("import time; began = time.process_time(); import deloop; spent = time.process_time() - began\n"
            "heavy = {'asyncio', 'requests', 'torch', 'numpy', 'http', 'urllib.request', 'unittest'}\n"
            "print(spent, sorted(heavy & set(sys.modules)))")
    found = [isolated(code, alone).split(" ", 1) for _ in range(5)]
    assert min(float(spent) for spent, _ in found) < .1 and {heavy.strip() for _, heavy in found} == {"[]"}


def pasted() -> str:
    rule = "# " + "-" * 117 + "\n"
    return (ROOT / "deloop.py").read_text().split(rule)[1]


def test_the_pasted_section_stands_by_itself(tmp_path):
    """Property: at most 150 lines, nothing else of the file, and the same digests as the whole."""
    assert pasted().startswith("# The detector.") and pasted().count("\n") <= 150
    (tmp_path / "pasted.py").write_text(pasted())
    code = ("import pasted\nclass Odd(dict): pass\n"
            "deep = []\nfor _ in range(5000): deep = [deep]\n"
            "for a in [{'name': 'f', 'args': {'b': [1, {'x': None}], 'a': 'é'}}, 't ', 7, deep, None,\n"
            "          {'function': {'name': 'f', 'arguments': '[1,'}}, {'name': 'f', 'input': '9' * 5000},\n"
            "          {'name': 'f', 'input': {(1, 2): {3}, 4: 10 ** 5000}}, {'name': 'f', 'input': Odd(x=b'1')}]:\n"
            "    for o in ['', 'x' * 99, b'y', {'k': 1}, None]: print(pasted.signature(a, o))\n"
            "print(pasted.loop_flags([('a', 'b'), ('a', 'b')]), pasted.LoopDetector().push('a', 'b'))")
    assert isolated(code, tmp_path) == isolated(code.replace("pasted", "deloop"), ROOT)


def test_the_examples_of_use_run():
    """Property: the interceptor, warning and metric of the module docstring, run as they stand, do what they say: a
    call that has looped is not run again until some other call returns something new."""
    examples = textwrap.dedent(re.search(r"In the loop:\n\n(.*?)\n\nCommands:", deloop.__doc__, re.S)[1])
    ran, messages = [], []
    def run_tool(call):
        ran.append(call)
        return "the same"
    names = {"LoopDetector": deloop.LoopDetector, "kappa": deloop.kappa, "loop_flags": deloop.loop_flags,
             "run_tool": run_tool,
             "message": asked(*[(str(n), name, "{}") for n, name in enumerate(["look"] * 4 + ["move", "look"])]),
             "messages": messages,
             "tools": {"find": lambda q: f"no {q}"},
             "ai_message": types.SimpleNamespace(tool_calls=[{"name": "find", "args": {"q": "x"}, "id": str(n)}
                 for n in range(2)]),
             "run": [("a", "1"), ("a", "1")]}
    exec(examples, names)
    assert len(ran) == 4 and [each["content"] for each in messages] == [
        *["the same"] * 2, *["You know this already. Try something else."] * 2, *["the same"] * 2]
    assert names["result"] == "no x\n(Step 4 made this very call and got this very result.)" and names["rate"] == .5


@pytest.mark.parametrize("pairing", ["first-different", "random", "other", "shuffled"])
def test_a_pairing_changes_the_sides_alone(tmp_path, pairing):
    """Invariants on random logs, against the rule's own pairs: as many, for the same steps, each with its context; the
    rejected side stays but for shuffled; sides never equal; what is chosen is what the pairing says; same seed, same
    bytes, and another seed draws otherwise where something is drawn."""
    rng, path, by_task = random.Random(4), tmp_path / "logs.jsonl", {}
    for n in range(40):
        log = by_task[f"t{n}"] = trajectory(random_run(rng, 12), task_id=f"t{n}")
        for each in log["messages"][2::2]:                      # one call, one text: equal sides become possible
            each["content"] = each["content"].partition(": ")[2]
        deloop.append_jsonl(path, log)

    def mine(pairing, *flags):
        assert deloop.main(["mine", str(path), "--pairing", pairing, *flags, "--out", str(tmp_path / "pairs")]) == 0
        return (tmp_path / "pairs").read_text()
    text = mine(pairing)
    rule, pairs = ([json.loads(line) for line in lines.splitlines()] for lines in (mine("escape"), text))
    drawn = pairing != "first-different"
    assert text == mine(pairing) and len({mine(pairing, "--seed", str(seed)) for seed in range(4)}) == 1 + 3 * drawn
    kept = ("task_id", "sample", "t", "success", "prompt", "prompt_sha256", "prompt_ids_sha256") + (
        ("rejected", "rejected_ids") if pairing != "shuffled" else ())
    assert len(rule) > 40 and [[pair[key] for key in kept] for pair in pairs] == [
        [pair[key] for key in kept] for pair in rule]
    sides = {side: {json.dumps([pair[side], pair[f"{side}_ids"]]) for pair in rule} for side in ("chosen", "rejected")}
    for pair, own in zip(pairs, rule):
        assert pair["chosen"] != pair["rejected"] and pair["pairing"] == pairing
        log = by_task[pair["task_id"]]
        made = [(step.action, log["messages"][log["turns"][step.turn]["message"]]) for step in deloop.steps(log)]
        t, u = pair["t"], pair["t_escape"]
        if pairing == "first-different":
            assert u == next(u for u in range(t + 1, len(made)) if deloop.kappa(made[u][0]) != deloop.kappa(made[t][0]))
        if pairing in ("first-different", "random"):
            assert u > t and pair["chosen"] == [made[u][1]]
        else:
            taken = json.dumps([pair["chosen"], pair["chosen_ids"]])
            assert u is None and taken in sides["chosen"] | (sides["rejected"] if pairing == "shuffled" else set())
    assert pairs != [{**pair, "pairing": pairing} for pair in rule]
    few = [json.loads(line) for line in mine(pairing, "--limit", "20").splitlines()]
    asked = [json.loads(line) for line in mine("escape", "--limit", "20").splitlines()]
    assert len(few) == 20 and [pair["prompt"] for pair in few] == [pair["prompt"] for pair in asked]


@pytest.mark.parametrize("share, limit, from_mix, total", [
    (0.0, 0, 0, 6), (0.0, 4, 0, 4), (0.25, 0, 2, 8), (0.5, 0, 4, 8), (0.5, 4, 2, 4), (1.0, 0, 4, 4), (1.0, 3, 3, 3)])
def test_mine_mixes_domains_by_share_and_seed(tmp_path, share, limit, from_mix, total):
    """Closed form: of 6 pairs of one domain and 4 of another, as many as share and limit allow; the same bytes whatever
    the order of the files; another draw with another seed wherever there is something to draw."""
    for domain, count in (("own", 6), ("mix", 4)):
        for n in range(count):
            call = [{"name": "look", "parameters": {"n": n}}, {"name": "move", "parameters": {}}]
            run = [{"action": json.dumps(call[k]), "observation": f"{domain} {k}"} for k in (0, 0, 1)]
            (tmp_path / f"{domain}{n}.traj").write_text(json.dumps({"trajectory": run, "task_id": f"{domain}-{n}"}))
    own, mix = ([str(path) for path in sorted(tmp_path.glob(f"{domain}*"))] for domain in ("own", "mix"))

    def mine(own, mix, seed=0):
        flags = ["--mix", *mix, "--share", str(share)] if share else []
        assert deloop.main(["mine", *own, *flags, "--limit", str(limit), "--seed", str(seed),
                            "--out", str(tmp_path / "pairs")]) == 0
        return (tmp_path / "pairs").read_text()
    text = mine(own, mix)
    tasks = [json.loads(line)["task_id"] for line in text.splitlines()]
    assert (len(tasks), sum(task.startswith("mix") for task in tasks)) == (total, from_mix)
    assert tasks == sorted(set(tasks)) and text == mine(own[::-1], mix[::-1])
    if total < 10 and (from_mix < 4 and from_mix or total - from_mix < 6 and total > from_mix):
        assert len({mine(own, mix, seed) for seed in range(8)}) > 1
