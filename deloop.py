"""DeLoop on data: what a loop is, where a trajectory has one, and which preference pairs follow from it.

A step is one executed tool call with the observation it returned. Its signature is x_t = (kappa(a_t), o_t), where
kappa forgets JSON whitespace and parameter order and nothing else. Step t is a loop step, s_t = 1, iff x_t equals x_u
for an earlier u < t. A loop action (rejected) is paired with the first later action of the same rollout that escapes:
t' = min{u > t : s_u = 0 and kappa(a_u) != kappa(a_t)} (chosen). No label, reward or judge is used.

>>> look = {"name": "read", "parameters": {"path": "a.py", "line": 1}}
>>> again = {"name": "read", "parameters": '{"line": 1, "path": "a.py"}'}       # other order, given as JSON text
>>> kappa(look) == kappa(again)
True
>>> run = [(look, "x = 1"), ({"name": "ls", "parameters": {}}, "a.py"), (again, "x = 1"), (again, "x = 2")]
>>> loop_flags(run)         # the last call is the same, but it returned something new: a useful re-check, no loop
[False, False, True, False]
>>> detector = LoopDetector()
>>> [detector.push(action, observation) for action, observation in run]         # online: which step is repeated
[None, None, 0, None]

To paste into an agent: the section between the first two rules of this file; it needs nothing else. In the loop:

    detector, stuck = LoopDetector(), set()                             # interceptor, OpenAI-style messages
    for call in message["tool_calls"]:
        if kappa(call) in stuck:                                        # it has looped: answered, not run
            result = "You know this already. Try something else."
        elif detector.push(call, result := run_tool(call)) is None:
            stuck.clear()                                               # something new: the world may have changed
        else:
            stuck.add(kappa(call))
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})

    for call in ai_message.tool_calls:                                  # warning, LangChain-style dicts
        result = tools[call["name"]](**call["args"])
        earlier = detector.push(call, result)
        if earlier is not None:
            result += f"\\n(Step {earlier} made this very call and got this very result.)"

    rate = sum(loop_flags(run)) / len(run)                              # metric, run = [(call, result), ...]

Commands: python deloop.py detect FILE... | explain FILE TASK_ID | mine FILE... --out pairs.jsonl
"""
from __future__ import annotations

# ---------------------------------------------------------------------------------------------------------------------
# The detector. To use it in another project, take everything from here to the next rule.

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal
from typing import Any


def kappa(action: Any) -> str:
    """Canonical form of one action (document, section "method"): equal strings mean the same call.

    action: {"name", "parameters" | "arguments" | "args" | "input"}, or OpenAI's {"function": {"name", "arguments"}}, or
    a str where actions are text. Parameters may be a mapping or JSON text, also JSON text that was encoded twice.
    Keys are sorted at every depth and structural whitespace goes; everything else is kept apart (array order, letter
    case, 1 from 1.0, true from 1, null from absent, Unicode forms). Names are compared exactly. Never raises on data.
    """
    if isinstance(action, str):
        return action.strip()
    if isinstance(action, Mapping):
        call = action["function"] if isinstance(action.get("function"), Mapping) else action
        if "name" in call:
            given = (call[key] for key in ("parameters", "arguments", "args", "input") if call.get(key) is not None)
            return _json({"name": call["name"], "parameters": _parameters(next(given, None))})
    return _json(action)


def signature(action: Any, observation: Any) -> str | None:
    """Hex digest of x_t = (kappa(action), observation), the observation byte for byte; None if observation is None."""
    return None if observation is None else _digest(kappa(action), _text(observation)).hex()


def loop_flags(steps: Iterable[tuple[Any, Any]]) -> list[bool]:
    """s_t for each (action, observation): True iff an earlier step has the same signature. One pass, O(n)."""
    push = LoopDetector().push
    return [push(action, observation) is not None for action, observation in steps]


class LoopDetector:
    """The same rule online, one push a step. No window, no threshold, no reset; a digest for each distinct step."""
    SHORT = 64                                  # characters of a step that is kept as it is: hashing would cost more

    def __init__(self) -> None:
        self.first: dict[Any, int] = {}         # what stands for a signature -> index of the first step that had it
        self.count = 0                          # steps pushed so far

    def push(self, action: Any, observation: Any) -> int | None:
        """Record one step; return the 0-based index of the first equal step if this one is a loop, else None."""
        index = self.count
        self.count = index + 1
        if observation is None:                 # no answer was recorded: it equals nothing
            return None
        call, seen = kappa(action), observation if isinstance(observation, str) else _text(observation)
        key = (call, seen) if len(call) + len(seen) <= self.SHORT else _digest(call, seen)
        first = self.first.setdefault(key, index)
        return None if first == index else first


def _digest(call: str, seen: str) -> bytes:
    # The length goes first, so that no other split of the same text collides.
    return hashlib.sha256(f"{len(call)} {call}{seen}".encode("utf-8", "surrogatepass")).digest()


def _text(observation: Any) -> str:
    """An observation as text: bytes equal the text they encode; a live object is marked, so that it equals no text."""
    if isinstance(observation, (bytes, bytearray)):
        return observation.decode("utf-8", "surrogateescape")
    return observation if isinstance(observation, str) else f"\0live {_json(observation)}"


def _parameters(given: Any) -> Any:
    """The value of a call's parameters: JSON text decoded until it is no string; a call without parameters is {}."""
    value = given if isinstance(given, str) else _json(given, _PLAIN)   # a live value: first as a log would write it
    while isinstance(value, str):
        text = value.strip()
        try:
            value = _load(text or "{}")
        except (ValueError, RecursionError):    # not JSON, or nested too deeply to parse: the text itself
            return text
    return {} if value is None else value


def _load(text: str | bytes) -> Any:
    """json.loads in which an integer beyond Python's limit (4,300 digits) becomes marked text."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        raise
    except ValueError:
        return json.loads(text, parse_int=lambda n: int(n) if len(n.lstrip("-")) <= 4300 else f"integer {n}")


def _foreign(value: Any) -> Any:
    """What stands for a value that JSON does not know: its repr. A set has no order, so its members are sorted."""
    if isinstance(value, Mapping):
        return dict(value)
    return f"{{{', '.join(sorted(map(repr, value)))}}}" if isinstance(value, (set, frozenset)) else repr(value)


_PLAIN = json.JSONEncoder(default=_foreign).encode
_SORTED = json.JSONEncoder(default=_foreign, sort_keys=True, separators=(",", ":")).encode


def _json(value: Any, encode: Any = _SORTED) -> str:
    """value as ASCII JSON, by default compact and with sorted keys; what json refuses is spelled out."""
    try:
        return encode(value)
    except (TypeError, ValueError, RecursionError):     # odd keys, a cycle, a huge integer, deep nesting
        return _spell(value)


def _spell(value: Any) -> str:
    """Sorted compact JSON without recursion: any depth, cycles, keys of any type, integers of any length."""
    out: list[str] = []
    inside = {0: 0}                             # id of each value now being written -> its depth
    stack: list[Iterator[Any]] = [iter([(value,)])]
    while stack:
        part = next(stack[-1], None)
        if part is None:
            stack.pop()
            inside.popitem()
        elif isinstance(part, str):
            out.append(part)
        elif id(part[0]) in inside:             # it contains itself: say how many levels up
            out.append(f'"<cycle {len(inside) - inside[id(part[0])]}>"')
        else:
            inside[id(part[0])] = len(inside)
            stack.append(_parts(part[0]))
    return "".join(out)


def _parts(value: Any) -> Iterator[Any]:
    """What _spell writes for one value, in order: texts, and (member,) for each member."""
    if isinstance(value, Mapping):
        members = {key if isinstance(key, str) else _json(key): member for key, member in value.items()}
        for index, key in enumerate(sorted(members)):
            yield f"{',' if index else '{'}{_SORTED(key)}:"
            yield (members[key],)
        yield "}" if members else "{}"
    elif isinstance(value, (list, tuple)):
        for index, member in enumerate(value):
            yield "," if index else "["
            yield (member,)
        yield "]" if value else "[]"
    else:
        try:
            yield _SORTED(value)
        except (ValueError, RecursionError):    # an integer beyond Python's limit, or a repr that fails
            yield f'"integer {Decimal(value)}"' if isinstance(value, int) else f'"<{type(value).__name__}>"'

# ---------------------------------------------------------------------------------------------------------------------
# Trajectories: one JSON object for each rollout (format "deloop-trajectory/1", described in the README).

import argparse
import dataclasses
import glob
import gzip
import html
import io
import math
import os
import random
import re
import sys
import zlib
from collections import Counter
from collections.abc import Callable
from typing import BinaryIO, NamedTuple, TypedDict

RESULTS = ("done", "turn_limit", "context_overflow")    # the statuses that say something about the policy
ERRORS = ("env_error", "policy_error")                  # the others: run again on resume
MAY_DIFFER = (          # settings that may change within one file: where, how fast and how much of it was run
    "server", "tasks", "out", "limit", "batch", "wait", "samples", "shard", "overwrite", "verbose", "dry_run", "api",
    "api_key_file", "api_key_env", "api_timeout")
SUMMARY_HEADER = "Summary of the earlier steps:"
HEAD = 2                                                # messages never dropped: the system prompt and the task
Z = 1.959963984540054                                   # the two-sided 95% point of the normal distribution


class Step(NamedTuple):
    """One executed action. turn: its index in trajectory["turns"]."""
    turn: int
    action: Any
    observation: Any


def steps(trajectory: Mapping) -> list[Step]:
    """The executed actions in order. A turn without a call, or whose call was never answered, is no step."""
    return [Step(index, turn["action"], turn["observation"]) for index, turn in enumerate(trajectory["turns"])
            if turn["executed"] and turn["action"] is not None]


def success(trajectory: Mapping) -> bool | None:
    """Whether the environment gave full reward; None where the log does not say."""
    return None if trajectory.get("reward") is None else trajectory["reward"] >= 1


def context_at(trajectory: Mapping, turn: int) -> list[dict]:
    """The exact prompt messages the policy saw at a turn (index into trajectory["turns"]).

    The system prompt and the task always; then, where a compaction has happened, its summary at the end of the task
    message and only the messages after the dropped range; observations as `shown` to the model. Of a foreign log, which
    does not say what was compacted, all messages before the call.
    """
    messages, config = trajectory["messages"], trajectory.get("config") or {}
    past = [event for event in trajectory.get("compactions", ()) if event["before_turn"] <= turn]
    end = trajectory["turns"][turn]["message"]
    return compacted(messages[:end], past[-1] if past else None, config)


def compacted(messages: list[dict], event: Mapping | None, config: Mapping) -> list[dict]:
    """messages as the model is to see them after the latest compaction event (None: there was none).

    The messages in event["dropped"] are left out; event["header"] and event["summary"] stand at the end of the task
    message; of the observations before the index event["masked"] only the length stays, where that is shorter.
    """
    head, start, masked = [dict(message) for message in messages[:HEAD]], HEAD, 0
    if event:
        start, masked = event["dropped"][1], event.get("masked", 0)
        header = event.get("header", SUMMARY_HEADER if event["summary"] else "")
        note = "\n".join(text for text in (header, event["summary"]) if text)
        head[-1]["content"] += f"\n\n{note}" if note else ""
    return head + [shown(omitted(message) if index < masked else message, config)
                   for index, message in enumerate(messages[start:], start)]


def omitted(message: Mapping) -> dict:
    """A message whose observation is replaced by its length, where that is shorter."""
    message = dict(message)
    if message["role"] != "assistant":
        note = f"[observation omitted: {len(message['content'])} characters]"
        message["content"] = min(message["content"], note, key=len)
    return message


def shown(message: Mapping, config: Mapping) -> dict:
    """A message as the model sees it: an observation over config["max_observation_chars"] loses its middle (the log
    keeps the whole text, and detection reads the log); control tokens in it are broken."""
    message = dict(message)
    if message.get("role") != "assistant" and isinstance(message.get("content"), str):
        text, limit = message["content"], config.get("max_observation_chars") or sys.maxsize
        if len(text) > limit:
            head, tail = text[:limit - limit // 2], text[len(text) - limit // 2:]
            text = f"{head}\n[{len(text) - limit} characters omitted]\n{tail}"
        message["content"] = harmless(text, config)
    return message


def harmless(text: str, config: Mapping) -> str:
    """text in which no token of config["control_tokens"] can end a turn: <|im_end|> becomes <|im_end| >."""
    for token in config.get("control_tokens") or ():
        text = text.replace(token, f"{token[:-1]} {token[-1]}")
    return text


def prompt_hash(messages: Iterable[Mapping]) -> str:
    """Hex digest of prompt messages; stored as prompt_sha256."""
    return hashlib.sha256(_json(list(messages)).encode()).hexdigest()


def ids_hash(ids: Iterable[int]) -> str:
    """Hex digest of a rendered prompt's token ids; stored as prompt_ids_sha256."""
    return hashlib.sha256(" ".join(map(str, ids)).encode()).hexdigest()


def with_mask(trajectory: dict, mask: re.Pattern | None) -> dict:
    """trajectory with each match of mask in its observations replaced, so that counters and clocks compare equal.

    This is not the definition: the copy carries "mask", and what is printed of it says so. Its messages stay whole.
    """
    if mask is None:
        return trajectory
    turns = [{**turn, "observation": mask.sub("<masked>", turn["observation"])}
             if isinstance(turn["observation"], str) else turn for turn in trajectory["turns"]]
    return {**trajectory, "turns": turns, "mask": mask.pattern}


# ---------------------------------------------------------------------------------------------------------------------
# Pairs: one JSON object each (format "deloop-pairs/1"); TRL's DPOTrainer loads the file unchanged.

# t and t_escape count executed steps from 0; ids are the sampled tokens where known.
Pair = TypedDict("Pair", {
    "format": str, "prompt": list[dict], "chosen": list[dict], "rejected": list[dict],
    "chosen_ids": list[int] | None, "rejected_ids": list[int] | None, "prompt_sha256": str,
    "prompt_ids_sha256": str | None, "chat_template_kwargs": dict,
    "task_id": str, "sample": int, "t": int, "t_escape": int, "success": bool | None})


def escapes(flags: list[bool], kappas: list[str]) -> list[int | None]:
    """t' for every loop step t: min{u > t : s_u = 0 and kappa_u != kappa_t}, None where there is none. O(n)."""
    found: list[int | None] = [None] * len(flags)
    near = other = None     # the first step after t with s = 0; the first after it with s = 0 and another kappa than it
    for t in range(len(flags) - 1, -1, -1):
        if flags[t]:
            found[t] = other if near is not None and kappas[near] == kappas[t] else near
        else:
            other = near if near is not None and kappas[near] != kappas[t] else other
            near = t
    return found


def loops(run: list[Step]) -> list[tuple[int, int | str] | None]:
    """For each step None, or of a loop step (the step it repeats, its escape t' or the reason why it has none)."""
    detector = LoopDetector()
    repeats = [detector.push(step.action, step.observation) for step in run]
    flags = [first is not None for first in repeats]
    newest = max((t for t, flag in enumerate(flags) if not flag), default=-1)
    found = escapes(flags, [kappa(step.action) for step in run])
    reasons = ["identical after kappa" if newest > t else "no escape" for t in range(len(run))]
    return [None if first is None else (first, reason if escape is None else escape)
            for first, escape, reason in zip(repeats, found, reasons)]


def mine_pairs(trajectory: Mapping, reasons: Counter | None = None) -> list[Pair]:
    """The DeLoop rule: for each loop step t with an escape t', the pair (context h_t, chosen a_t', rejected a_t).

    reasons, where given, counts what became of every loop step: "pair", or why there is none ("no escape": no new step
    follows; "identical after kappa": only the same call, with another answer; "same message"; "context lost").
    """
    run, reasons, pairs = steps(trajectory), Counter() if reasons is None else reasons, []
    for t, (_, fate) in ((t, loop) for t, loop in enumerate(loops(run)) if loop):
        pair = fate if isinstance(fate, str) else _pair(trajectory, run, t, fate)
        reasons[pair if isinstance(pair, str) else "pair"] += 1
        pairs += [] if isinstance(pair, str) else [pair]
    return pairs


def _pair(trajectory: Mapping, run: list[Step], t: int, t_escape: int) -> Pair | str:
    """The pair of loop step t, or the reason why there can be none."""
    turn, escape = (trajectory["turns"][run[step].turn] for step in (t, t_escape))
    rejected, chosen = _completion(trajectory, turn), _completion(trajectory, escape)
    if chosen == rejected:
        return "same message"
    prompt = context_at(trajectory, run[t].turn)
    if turn.get("prompt_sha256") not in (None, prompt_hash(prompt)):
        return "context lost"                   # the log was edited: what the model saw can no longer be rebuilt
    return Pair(
        format="deloop-pairs/1", prompt=prompt, chosen=[chosen], rejected=[rejected],
        chosen_ids=_sampled(escape), rejected_ids=_sampled(turn),
        prompt_sha256=prompt_hash(prompt), prompt_ids_sha256=turn.get("prompt_ids_sha256"),
        chat_template_kwargs=(trajectory.get("config") or {}).get("chat_template_kwargs") or {},
        task_id=trajectory["task_id"], sample=trajectory.get("sample", 0), t=t, t_escape=t_escape,
        success=success(trajectory))


PAIRINGS = ("escape", "random", "first-different", "other", "shuffled")     # all but the first: ablations of the rule


def repaired(trajectory: Mapping, pairs: Iterable[Pair], pairing: str, seed: int) -> Iterator[Pair]:
    """The pairs with another later action of the rollout as chosen side; contexts and rejected sides stay.

    first-different: min{u > t : kappa(a_u) != kappa(a_t)}, so s_u may be 1. random: any u > t with another message; the
    draw depends on seed, task, sample and t. Other pairings leave the pairs as they are: see dealt.
    """
    run = steps(trajectory)
    messages = [_completion(trajectory, trajectory["turns"][step.turn]) for step in run]
    for pair in pairs:
        t, u = pair["t"], pair["t_escape"]
        later = [u for u in range(t + 1, len(run)) if messages[u] != messages[t]]       # the escape is one of them
        if pairing == "first-different":
            u = next(u for u in later if kappa(run[u].action) != kappa(run[t].action))
        elif pairing == "random":
            u = random.Random(f"random/{seed}/{pair['task_id']}/{pair['sample']}/{t}").choice(later)
        yield pair if u == pair["t_escape"] else _pair(trajectory, run, t, u)


def dealt(pairs: Iterable[Pair], sides: list[tuple], pairing: str, seed: int) -> Iterator[Pair]:
    """The pairs with sides of others; contexts stay. sides: for each pair (chosen, rejected), a side: (messages, ids).

    other: the chosen side is another pair's. shuffled: both are drawn from all sides of all pairs. Never equal ones.
    """
    draw, used = random.Random(f"{pairing}/{seed}"), 2 if pairing == "shuffled" else 1
    pool = [side for both in sides for side in both[:used]]
    if len({_json(messages) for messages, _ in pool}) < 3:
        raise InputError(f"--pairing {pairing} needs at least three pairs with different messages")
    for own, pair in zip(sides, pairs):
        rejected = own[1] if pairing == "other" else draw.choice(pool)
        chosen = rejected
        while chosen[0] == rejected[0] or chosen is own[0]:
            chosen = draw.choice(pool)
        yield Pair({**pair, "chosen": chosen[0], "chosen_ids": chosen[1], "rejected": rejected[0],
                    "rejected_ids": rejected[1], "t_escape": None})


def _completion(trajectory: Mapping, turn: Mapping) -> dict:
    """The assistant message of a turn; of several calls in one message only the turn's own."""
    message = trajectory["messages"][turn["message"]]
    return {**message, "tool_calls": [turn["action"]]} if len(message.get("tool_calls") or ()) > 1 else message


def _sampled(turn: Mapping) -> list[int] | None:
    """The sampled token ids, where they spell exactly the message that stands in the log."""
    return turn.get("completion_ids") if turn.get("parse") == "ok" else None


# ---------------------------------------------------------------------------------------------------------------------
# Reading logs. Every reader takes one JSON document and returns its trajectories, or None if the format is another.

LOG = re.compile(r"(\.traj)?\.(jsonl?|traj|txt|log)(\.gz)?$")       # the files looked at in a folder


def read_trajectories(path: str | os.PathLike, problems: list[str] | None = None) -> Iterator[dict]:
    """The trajectories in a log of any supported format, recognised by content; path: as in read_jsonl.

    What cannot be read (a broken line, an object of another kind) is noted in problems, with its line, and reading goes
    on; without that list it raises InputError at the end. A file that is no log at all raises it in any case.
    """
    noted, count, name = [], 0, LOG.sub("", os.path.basename(path))
    for number, document, error in _documents(path):
        try:
            found = _recognised(document, name if number == 1 else f"{name}:{number}")
        except (AttributeError, IndexError, KeyError, TypeError) as problem:
            found, error = None, f"malformed ({type(problem).__name__}: {problem}), {_kind(document)}"
        if found is None:
            noted.append(f"{path}, line {number}: {error or f'no trajectory but {_kind(document)}'}")
        count += len(found or ())
        yield from found or ()
    if noted and not count:
        raise InputError(f"{noted[0]}. Tried: {', '.join(str(reader.__doc__).partition(':')[0] for reader in READERS)}")
    if problems is not None:
        problems += noted
    elif noted:
        raise InputError("; ".join(noted))


def _documents(path: str | os.PathLike) -> Iterator[tuple[int, Any, str | None]]:
    """_rows in which messages that stand one a line are one document, and steps {action, observation} are another."""
    chat, run = [], []
    for number, document, error in _rows(path):
        keys = document.keys() if isinstance(document, dict) else set()
        if "messages" not in keys and ("role" in keys or "choices" in keys):
            chat.append(document)
        elif {"action", "observation"} <= keys:
            run.append(document)
        else:
            yield number, document, error
    yield from ((1, whole, None) for whole in (chat, run) if whole)


def _recognised(document: Any, name: str) -> list[dict] | None:
    """The trajectories of the first reader that knows the document, or of every member of a list."""
    def first(each: Any, label: str) -> list[dict] | None:
        return next((found for reader in READERS if (found := reader(each, label)) is not None), None)
    found = first(document, name)
    if found is None and isinstance(document, list) and document:
        parts = [first(each, f"{name}:{index}") for index, each in enumerate(document)]
        found = None if None in parts else [trajectory for part in parts for trajectory in part or ()]
    return found


def _kind(document: Any) -> str:
    """What a document is, for an error message."""
    if isinstance(document, list) and document:
        return f"a list of {len(document)}, first {'a list' if isinstance(document[0], list) else _kind(document[0])}"
    return f"an object with the keys {sorted(document)[:8]}" if isinstance(document, dict) else repr(document)[:60]


def read_native(document: Any, name: str) -> list[dict] | None:
    """deloop-trajectory/1: what rollout.py writes."""
    if not isinstance(document, dict) or document.get("format") != "deloop-trajectory/1":
        return None
    for needed, part in [(("task_id", "sample", "status", "messages", "turns"), document)] + [
            (("message", "action", "executed", "observation"), turn) for turn in document.get("turns", ())]:
        if missing := [key for key in needed if key not in part]:
            raise KeyError(f"a deloop-trajectory/1 without {', '.join(missing)}")
    return [document]


def read_tau_bench(document: Any, name: str) -> list[dict] | None:
    """tau-bench results: {task_id, trial, reward, traj: OpenAI messages}, usually many in one list."""
    known = isinstance(document, dict) and _is_chat(document.get("traj"))
    return [_from_chat("tau-bench", document, document["traj"], name)] if known else None


def read_swe_agent(document: Any, name: str) -> list[dict] | None:
    """SWE-agent .traj (0.x, 1.x): {trajectory: [{action, observation, response}], history, info}, or such a list alone.

    Observations are those of trajectory (what a model is sent may hold elided ones), messages those of history. An
    empty action is no call; exit_cost and its like are written by the harness, so a pair must not choose them.
    """
    record = document if isinstance(document, dict) else {"trajectory": document}
    run = record.get("trajectory")
    if not isinstance(run, list) or run is document and not run or not all(
            isinstance(step, dict) and {"action", "observation"} <= step.keys() for step in run):
        return None
    messages = list(record.get("history") or ())
    places = [n for n, m in enumerate(messages) if m.get("role") == "assistant" and not m.get("is_demo")]
    if len(places) != len(run):                 # the history is not that of these steps: spell it from them
        messages = messages[:places[0] if places else None]
        places = list(range(len(messages), len(messages) + 2 * len(run), 2))
        for step in run:
            messages += [{"role": "assistant", "content": step.get("response") or text_of(step["action"])},
                         {"role": "user", "content": step["observation"]}]
    turns = [_turn(place, None if re.fullmatch(r"\s*(exit_\w+)?\s*", text_of(step["action"])) else step["action"],
                   step["observation"]) for place, step in zip(places, run)]
    return [_log("SWE-agent", record, messages, turns, name)]


def read_openhands(document: Any, name: str) -> list[dict] | None:
    """OpenHands output.jsonl: history of events {id, action, args} and {cause, observation, content}.

    Also its older dialects: events without ids, arguments beside the action, [action, observation] pairs. Thoughts,
    confirmations and times are no arguments; messages, recalls, thoughts and the like are no tool calls.
    """
    record = document if isinstance(document, dict) else {"history": document}
    items = record["history"] if isinstance(record.get("history"), list) else []
    events = [event for item in items for event in (item if isinstance(item, list) else [item])]
    if not (events or {"instance_id", "history"} <= record.keys()) or not all(
            isinstance(event, dict) and {"action", "observation"} & event.keys() for event in events):
        return None
    messages: list[dict] = []
    turns: list[dict] = []
    waiting: dict[Any, dict] = {}               # id of each action without an answer -> its turn
    for event in events:
        args, kind = event["args"] if isinstance(event.get("args"), dict) else event, event.get("action")
        if "observation" in event:
            if turn := waiting.pop(event.get("cause"), None):
                turn.update(executed=True, observation=text_of(event.get("content")))
                messages.append({"role": "tool", "tool_call_id": turn["action"]["id"], "content": turn["observation"]})
        elif kind in ("message", "system"):
            role = "system" if kind == "system" else "assistant" if event.get("source") == "agent" else "user"
            messages.append({"role": role, "content": text_of(args.get("content"))})
        elif kind not in NO_CALLS and event.get("source", "agent") == "agent":
            arguments = json.dumps({key: value for key, value in args.items() if key not in NO_ARGUMENTS})
            call = {"id": str(event.get("id", len(turns))), "type": "function",
                    "function": {"name": kind, "arguments": arguments}}
            turns.append(_turn(len(messages), call, None))
            waiting[event.get("id")] = turns[-1]
            messages.append({"role": "assistant", "content": args.get("thought") or None, "tool_calls": [call]})
    return [_log("OpenHands", record, messages, turns, name)]


NO_CALLS = {"recall", "finish", "think", "null", "change_agent_state", "condensation", "condensation_request"}
NO_ARGUMENTS = {"id", "action", "source", "message", "timestamp", "thought", "hidden", "blocking", "is_confirmed",
                "confirmation_state", "security_risk", "action_risk", "tool_call_metadata", "llm_metrics", "timeout"}


def read_mini_swe_agent(document: Any, name: str) -> list[dict] | None:
    """mini-swe-agent: messages with extra.actions and extra.raw_output (2.x), or one fenced block a reply (1.x)."""
    record = document if isinstance(document, dict) else {"messages": document}
    messages = record.get("messages")
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        return None
    extras = [message.get("extra") or {} for message in messages]
    new = any(extra.get("actions") for extra in extras)
    if not new and (any(message.get("tool_calls") for message in messages) or not any(
            text_of(message.get("content")).startswith("<returncode>") for message in messages)):
        return None
    turns: list[dict] = []
    for index, message in enumerate(messages):
        commands = [action["command"] for action in extras[index].get("actions") or ()]
        if message.get("role") == "assistant" and not new:
            blocks = re.findall(r"```(?:bash|mswea_bash_command)\s*\n(.*?)\n```", text_of(message.get("content")), re.S)
            commands = blocks if len(blocks) == 1 else [None]           # none or several: refused, not executed
        for number, command in enumerate(commands):
            answer: dict = messages[index + 1 + number] if index + 1 + number < len(messages) else {"role": "exit"}
            call = message["tool_calls"][number] if message.get("tool_calls") else command
            turns.append(_turn(index, call, _returned(answer, answer.get("extra") or {})))
    return [_log("mini-swe-agent", record, messages, turns, name)]


def _returned(message: Mapping, extra: Mapping) -> str | None:
    """What the environment returned: extra.raw_output with a failing return code, else the message's text."""
    if extra.get("exception_info") == "action was not executed" or message.get("role") in ("assistant", "exit"):
        return None
    code = f"\n[return code {extra['returncode']}]" if extra.get("returncode") else ""
    return f"{extra['raw_output']}{code}" if "raw_output" in extra else text_of(message.get("content"))


REACT = re.compile(r"^[ \t]*(Question|Thought|Action|Observation)(?: (\d+))?:[ \t]*", re.M)


def read_react(document: Any, name: str) -> list[dict] | None:
    """ReAct text: Thought n: / Action n: / Observation n:, one run or many; or an object that holds such texts."""
    if isinstance(document, dict) and all(isinstance(text, str) for text in document.values()):
        return [log for key, text in document.items() for log in read_react(text, key) or ()] or None
    heads = list(REACT.finditer(document)) if isinstance(document, str) else []
    if not {"Action", "Observation"} <= {head[1] for head in heads}:
        return None
    runs: list[tuple[list, list]] = [([{"role": "user", "content": document[:heads[0].start()].strip()}], [])]
    thought = ""
    for head, end in zip(heads, [head.start() for head in heads[1:]] + [len(document)]):
        kind, body, whole = head[1], document[head.end():end].strip(), document[head.start():end].strip()
        if runs[-1][1] and (kind == "Question" or kind != "Observation" and head[2] == "1"):    # the next run begins
            runs.append(([], []))
        messages, turns = runs[-1]
        if kind == "Action":
            turns.append(_turn(len(messages), body, None))
            messages.append({"role": "assistant", "content": thought + whole})
        elif kind == "Question" or kind == "Observation" and turns and not turns[-1]["executed"]:
            messages.append({"role": "user", "content": whole})
            if turns:
                turns[-1].update(executed=True, observation=body)
        thought = f"{whole}\n" if kind == "Thought" else ""
    runs = [run for run in runs if run[1]]
    return [_log("ReAct text", {}, *run, f"{name}:{number}" if number else name) for number, run in enumerate(runs)]


def read_openai(document: Any, name: str) -> list[dict] | None:
    """OpenAI messages: a list, {messages: [...]}, or one a line; chat completions; tool_calls or function_call."""
    record = document if isinstance(document, dict) else {"messages": document}
    request, answer = (record[key] if isinstance(record.get(key), dict) else record for key in ("request", "response"))
    messages = next((m for m in (request.get("messages"), record.get("history")) if isinstance(m, list)), [])
    messages = [*messages, answer] if "choices" in answer else messages
    return [_from_chat("OpenAI messages", record, messages, name)] if _is_chat(messages) else None


READERS: tuple[Callable[[Any, str], list[dict] | None], ...] = (
    read_native, read_tau_bench, read_swe_agent, read_openhands, read_mini_swe_agent, read_react, read_openai)


def _is_chat(messages: Any) -> bool:
    return isinstance(messages, list) and bool(messages) and all(
        isinstance(message, dict) and ("role" in message or message.get("choices")) for message in messages)


def _from_chat(format: str, record: Mapping, messages: list[dict], name: str) -> dict:
    """A trajectory of OpenAI messages; a chat completion among them stands for its message. Several calls in one
    message are several steps; an unanswered call is no step; text beside a call is no part of it."""
    messages = [message["choices"][0]["message"] if message.get("choices") else message for message in messages]
    turns = []
    for index, message in enumerate(messages):
        calls = message.get("tool_calls") or [call for call in [message.get("function_call")] if call]
        turns += [_turn(index, call, answer) for call, answer in zip(calls, _answers(calls, messages, index + 1))]
    return _log(format, record, messages, turns, name)


def _answers(calls: list[dict], messages: list[dict], start: int) -> list[str | None]:
    """The observation of each call: the first result with its id before the next assistant message, None if none came.
    A result without an id answers the first open call; a second result for a call is ignored."""
    answers: list[str | None] = [None] * len(calls)
    for index in range(start, len(messages)):
        message, key = messages[index], messages[index].get("tool_call_id")
        if message.get("role") == "assistant":
            break
        if message.get("role") in ("tool", "function"):
            open_calls = (n for n, call in enumerate(calls) if answers[n] is None and key in (None, call.get("id")))
            if (place := next(open_calls, None)) is not None:
                answers[place] = text_of(message.get("content"))
    return answers


def _turn(message: int, action: Any, observation: Any) -> dict:
    """A turn of a foreign log. message: the index of its assistant message; executed iff an answer was recorded."""
    done = action is not None and observation is not None
    return {"message": message, "action": action, "executed": done,
            "observation": text_of(observation) if done else None}


def _log(format: str, record: Mapping, messages: list[dict], turns: list[dict], name: str) -> dict:
    """A trajectory of a foreign log, with what its record says of task, sample, status and reward."""
    known = {**(record["info"] if isinstance(record.get("info"), dict) else {}), **record}

    def first(default: Any, kinds: tuple, *keys: str) -> Any:
        return next((known[key] for key in keys if isinstance(known.get(key), kinds)), default)
    reward = first(None, (int, float), "reward", "resolved", "success")
    return {"format": format, "task_id": str(first(name, (str, int), "task_id", "instance_id", "id")),
            "sample": first(0, (int,), "sample", "trial"), "status": first(None, (str,), "status", "exit_status"),
            "reward": None if reward is None else float(reward), "messages": messages, "turns": turns}


def text_of(content: Any) -> str:
    """Message content as text: blocks are joined, what is no text block is kept as its JSON."""
    if isinstance(content, list):
        return "".join(block["text"] if isinstance(block, dict) and isinstance(block.get("text"), str)
                       else text_of(block) for block in content)
    return content if isinstance(content, str) else "" if content is None else _json(content)


# ---------------------------------------------------------------------------------------------------------------------
# Files and command lines, the same for all four scripts.

class InputError(Exception):
    """Bad input from a person, a file or a server. The message names the place and the way out; scripts exit with 2."""


def read_jsonl(path: str | os.PathLike) -> Iterator[tuple[int, Any]]:
    """(line number, object) for each line of a JSONL file, or (1, object) for a file that is one JSON document.

    path: a file, gzip-compressed or not, or "-" for standard input. Raises InputError that names the line.
    """
    for number, document, error in _rows(path):
        if error:
            raise InputError(f"{path}, line {number}: {error}")
        yield number, document


def _rows(path: str | os.PathLike) -> Iterator[tuple[int, Any, str | None]]:
    """(line number, object, None) for each line that is JSON, (line number, text, what is wrong) for each other."""
    try:
        with open(0 if str(path) == "-" else path, "rb") as raw:
            file, first = gzip.open(raw) if raw.peek(2)[:2] == b"\x1f\x8b" else raw, True
            for number, line in enumerate(file, 1):
                if line.strip():
                    row = (number, *_parsed(line))
                    yield from _whole(number, line + file.read()) if first and row[2] else [row]
                    first = False
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path}: cannot be read ({error})") from None


def _whole(start: int, data: bytes) -> list[tuple[int, Any, str | None]]:
    """The rows of a file whose first line is no JSON: one document on many lines, a broken line, or text."""
    document, error = _parsed(data)
    rows = [(n, *_parsed(line)) for n, line in enumerate(data.split(b"\n"), start) if error and line.strip()]
    if any(row[2] is None for row in rows):
        return rows
    return [(1, document, error and f"neither JSON nor JSONL ({error}) but text that begins {document[:40]!r}")]


def _parsed(data: bytes) -> tuple[Any, str | None]:
    try:
        return _load(data), None
    except (ValueError, RecursionError) as error:
        return data.decode("utf-8", "replace"), f"not JSON: {error}"


def files(names: Iterable[str]) -> Iterator[tuple[str, bool]]:
    """(path, named) for each file: named by a person, or else found in a folder or by a pattern, in sorted order."""
    for name in names:
        found = [name] if name == "-" or os.path.exists(name) else sorted(glob.glob(name, recursive=True))
        if not found:
            raise InputError(f"{name}: no such file or folder, and as a pattern it matches nothing")
        for path in found:
            if os.path.isdir(path):
                inside = sorted(glob.glob(os.path.join(glob.escape(path), "**", "*"), recursive=True))
                yield from ((file, False) for file in inside if LOG.search(file) and os.path.isfile(file))
            else:
                yield path, path == name


def append_jsonl(path: str | os.PathLike, record: Mapping) -> None:
    """Append one object as one line and force it to the disk: a kill loses at most the line being written."""
    with open(path, "ab") as file:
        file.write(json_line(record))
        file.flush()
        os.fsync(file.fileno())


def json_line(record: Mapping) -> bytes:
    """record as one line of UTF-8; as ASCII where it holds half a surrogate pair, which UTF-8 cannot."""
    try:
        return (json.dumps(record, ensure_ascii=False) + "\n").encode()
    except UnicodeEncodeError:
        return (json.dumps(record) + "\n").encode()


def write_atomic(path: str | os.PathLike, content: str | Iterable[bytes]) -> None:
    """Write a whole file so that a reader sees the old one or the new one, never a part."""
    content, temporary = [content.encode()] if isinstance(content, str) else content, f"{path}.{os.getpid()}.tmp"
    try:
        with open(temporary, "wb") as file:
            file.writelines(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror})") from None


def option(help: str, default: Any = dataclasses.MISSING, **keywords: Any) -> Any:
    """A field of a configuration dataclass that is also a command-line flag; without default it is required."""
    return dataclasses.field(default=default, metadata={"help": help, **keywords})


class Parser(argparse.ArgumentParser):
    """argparse that answers a wrong command line with one line and keeps the line breaks of a description."""

    def __init__(self, **keywords: Any) -> None:
        super().__init__(**keywords, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)

    def error(self, message: str) -> Any:
        self.exit(2, f"error: {message}; see: {self.prog} --help\n")


def config_from_args(Config: type, argv: list[str], description: str) -> Any:
    """An instance of the frozen dataclass Config from a command line; every field is a flag of the same name."""
    parser = Parser(description=description)
    for field in dataclasses.fields(Config):
        keywords, required = dict(field.metadata), field.default is dataclasses.MISSING
        text = keywords.pop("help").replace("%", "%%") + (" (required)" if required else f" [{field.default}]")
        if field.type == "bool":
            keywords["action"] = argparse.BooleanOptionalAction
        else:
            keywords["type"] = {"int": int, "float": float, "str": str}[field.type.split(" |")[0]]
        parser.add_argument("--" + field.name.replace("_", "-"), required=required, help=text,
                            default=None if required else field.default, **keywords)
    return Config(**vars(parser.parse_args(argv)))


def run(main: Callable[[list[str]], int | None]) -> None:
    """Run a script's main(argv) and leave with its exit code; InputError becomes one line and exit code 2."""
    for stream in (sys.stdout, sys.stderr):     # a log may hold what the terminal cannot show
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        sys.exit(main(sys.argv[1:]))
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:                     # the reader of our output has gone (| head)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


# ---------------------------------------------------------------------------------------------------------------------
# Commands

def logs(options: argparse.Namespace, names: list[str] | None = None) -> Iterator[tuple[str, dict]]:
    """(file, trajectory) for every log in names (options.files); what cannot be read goes to options.problems.

    A file that a person named must be a log; what a folder or a pattern holds besides logs is passed over.
    """
    count, seen, names = 0, 0, options.files if names is None else names
    for path, named in files(names):
        seen += 1
        try:
            for trajectory in read_trajectories(path, options.problems):
                count += 1
                yield path, with_mask(trajectory, options.mask)
        except InputError:
            if named:
                raise
    if not count:
        raise InputError(f"{' '.join(names)}: no trajectory in {seen} file{'s' * (seen != 1)}")


def wilson(k: int, n: int) -> tuple[float, float]:
    """Wilson's 95% interval for a share k / n, n > 0: (p + z^2/2n -+ z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n)."""
    p, z2 = k / n, Z * Z / n
    centre, half = p + z2 / 2, Z * math.sqrt(p * (1 - p) / n + z2 / (4 * n))
    return (0.0 if k == 0 else (centre - half) / (1 + z2)), (1.0 if k == n else (centre + half) / (1 + z2))


def report(trajectory: Mapping) -> dict:
    """What detect says of one trajectory, for machines."""
    flags = loop_flags((step.action, step.observation) for step in steps(trajectory))
    return {"task_id": trajectory["task_id"], "sample": trajectory.get("sample", 0), "steps": len(flags),
            "loop_steps": [t for t, flag in enumerate(flags) if flag], "status": trajectory.get("status"),
            "success": success(trajectory), "turns_without_step": len(trajectory["turns"]) - len(flags),
            **({"mask": trajectory["mask"]} if "mask" in trajectory else {})}


def totals(reports: list[dict]) -> dict:
    """Sums over reports; errors of environment or policy are no results and stay out of the loop rate."""
    results = [each for each in reports if each["status"] not in ERRORS]
    looping = sum(bool(each["loop_steps"]) for each in results)
    return {"trajectories": len(results), "errors": len(reports) - len(results), "with_loop": looping,
            "loop_rate": looping / len(results) if results else None, "steps": sum(each["steps"] for each in results),
            "loop_steps": sum(len(each["loop_steps"]) for each in results),
            "without_step": sum(not each["steps"] for each in results),
            **({"mask": reports[0]["mask"]} if "mask" in reports[0] else {})}


def detect(options: argparse.Namespace) -> int:
    """One line for each trajectory, and the totals with the loop rate."""
    reports = [{**report(trajectory), "file": path} for path, trajectory in logs(options)]
    reports.sort(key=lambda each: (_natural(each["task_id"]), each["sample"], each["file"]))
    total = totals(reports)
    if not any(each["steps"] for each in reports):
        options.problems.append("no trajectory has a step: are the calls in a dialect that is not read here?")
    if options.json:
        print("\n".join(json.dumps(each) for each in [*reports, {"totals": total}]))
        return 0
    width, several = max(len(each["task_id"]) for each in reports), len({each["file"] for each in reports}) > 1
    print(f"{'task':{width}}  sample  steps  loops  first  {'status':18}  success{'  file' if several else ''}")
    for each in reports:
        found, won = each["loop_steps"], {None: "-", True: "yes", False: "no"}[each["success"]]
        print(f"{each['task_id']:{width}}  {each['sample']:6}  {each['steps']:5}  {len(found):5}  "
              f"{found[0] if found else '-':>5}  {_short(each['status'] or '-', 18):18}  {won:7}"
              f"{'  ' + each['file'] if several else ''}".rstrip())
    rate = "-" if total["loop_rate"] is None else f"{total['loop_rate']:.1%}"
    print(f"\n{total['trajectories']} trajectories ({total['errors']} errors left out, {total['without_step']} without "
          f"a step): {total['with_loop']} with a loop = {rate}; "
          f"{total['loop_steps']} loop steps of {total['steps']}{_label(total)}")
    return 0


def _natural(text: str) -> list:
    """A sort key that puts task 9 before task 10."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", text)]


def _label(result: Mapping) -> str:
    return f"; MASKED by {result['mask']}" if "mask" in result else ""


def _short(text: str, width: int) -> str:
    """text on one line, cut to width characters with its whole length named."""
    text = " ".join(text.split())
    tail = f" ... ({len(text)} characters)" if width > 40 else "..."
    return text if len(text) <= width else text[:width - len(tail)] + tail


def explain(options: argparse.Namespace) -> int:
    """One trajectory, step by step: its loops, what they repeat and where they escape, its compactions."""
    for _, trajectory in logs(options):
        if trajectory["task_id"].startswith(options.task_id) and trajectory.get("sample", 0) == options.sample:
            if options.html:
                write_atomic(options.html, [page(list(story(trajectory))).encode("utf-8", "replace")])
            else:
                print("\n".join(lines(story(trajectory), options.width, sys.stdout.isatty())))
            return 0
    raise InputError(f"{options.files[0]}: no task {options.task_id!r}, sample {options.sample}; `detect` lists them")


def story(trajectory: Mapping) -> Iterator[tuple[str, str, str, str, str]]:
    """What explain tells, in order: (kind, step number, head, body, mark); kinds: title, compaction, turn, step."""
    run = steps(trajectory)
    numbers, found = {step.turn: t for t, step in enumerate(run)}, loops(run)
    yield ("title", "", f"task {trajectory['task_id']}, sample {trajectory.get('sample', 0)}: {sum(map(bool, found))} "
           f"loop steps of {len(run)} in {len(trajectory['turns'])} turns, status {trajectory.get('status')}, "
           f"reward {trajectory.get('reward')}{_label(trajectory)}", "", "")
    for index, turn in enumerate(trajectory["turns"]):
        for event in trajectory.get("compactions", ()):
            if event["before_turn"] == index:
                first, end = event["dropped"]
                head = f"compaction: messages {first} to {end - 1} become" if end > first else (
                    f"compaction: of the observations before message {event.get('masked')} only the length stays")
                yield "compaction", "", head, event["summary"] or event.get("header") or "", ""
        t = numbers.get(index)
        if t is None:
            head = f"no step ({turn.get('parse') or ('unanswered' if turn['action'] else 'no call')})"
            yield "turn", "", head, text_of(trajectory["messages"][turn["message"]].get("content")), ""
        else:
            first, fate = found[t] or (None, None)
            fate = f"escapes at step {fate}" if isinstance(fate, int) else f"no pair: {fate}"
            mark = "" if first is None else f"LOOP: repeats step {first}, {fate}"
            yield "step", str(t), _call(turn["action"]), text_of(turn["observation"]), mark


def _call(action: Any) -> str:
    """An action as a person reads it: the name, then the parameters."""
    call = _load(kappa(action)) if isinstance(action, Mapping) else {}
    named = "name" in call and "parameters" in call
    return f"{call['name']} {json.dumps(call['parameters'], ensure_ascii=False)}" if named else kappa(action)


def lines(told: Iterable[tuple[str, str, str, str, str]], width: int, colour: bool) -> Iterator[str]:
    """The story for a terminal."""
    red, plain = ("\033[1;31m", "\033[0m") if colour else ("", "")
    for kind, number, head, body, mark in told:
        if kind == "title":
            yield head
        else:
            yield f"  {number:>4}  {_short(head, width)}{f'   {red}{mark}{plain}' if mark else ''}"
            yield f"        {'->' if kind == 'step' else '  '} {_short(body, width)}"


def page(told: list[tuple[str, str, str, str, str]]) -> str:
    """The story as one HTML page: no script, nothing from a network, long texts folded."""
    def linked(text: str) -> str:
        return re.sub(r"step (\d+)", r'<a href="#\1">step \1</a>', text)
    rows = [f'<li id="{number}" class="{kind} {"loop" if mark else ""}"><b>{number}</b><div><div class="call">'
            f"{_folded(head)}</div><p>{linked(mark)}</p>{_folded(body)}</div></li>"
            for kind, number, head, body, mark in told[1:]]
    start, end = PAGE.split("ROWS")
    found = ", ".join(f"step {number}" for _, number, _, _, mark in told if mark) or "none"
    return start.replace("LOOPS", linked(found)).replace("TITLE", html.escape(told[0][2])) + "\n".join(rows) + end


def _folded(text: str) -> str:
    shown = f"<pre>{html.escape(text) or '(empty)'}</pre>"
    if len(text) <= 300 and text.count("\n") < 6:
        return shown
    return f"<details><summary>{html.escape(_short(text, 120))}</summary>{shown}</details>"


PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>TITLE</title><style>
:root { color-scheme: light dark; } h1 { font-size: 1.1rem; } ol { list-style: none; padding: 0; }
body { font: 15px/1.45 system-ui, sans-serif; max-width: 60rem; margin: auto; padding: 1rem; overflow-wrap: anywhere; }
li { display: flex; gap: .7rem; padding: .6rem .5rem; border-left: 4px solid #0000; border-bottom: 1px solid #8884; }
li.loop { border-left-color: #d33; } li.turn, li.compaction { font-style: italic; }
li > b { min-width: 1.6rem; text-align: right; opacity: .6; } li > div { flex: 1; min-width: 0; }
p, p a { color: #d33; font-weight: 600; margin: .1rem 0; } .call > * { font-weight: 700; }
pre { font: 13px/1.4 ui-monospace, monospace; white-space: pre-wrap; margin: .2rem 0; }
summary { cursor: pointer; opacity: .8; }
</style></head><body><h1>TITLE</h1><p>Loop steps: LOOPS</p><ol>
ROWS
</ol></body></html>
"""


def mine(options: argparse.Namespace) -> int:
    """All pairs of all files into one file, with a count of what became of every loop step."""
    import tempfile                             # here, because nothing else needs it and it is slow to import
    if not 0 <= options.share <= 1 or (options.share > 0) != bool(options.mix):
        raise InputError(f"--share {options.share}: a share between 0 and 1 goes with --mix, and --mix with a share")
    reasons: Counter[str] = Counter()
    with tempfile.TemporaryFile() as spool:     # a pair holds its whole prompt: only the keys are kept in memory
        both = [sorted(mined(options, names, spool, reasons)) for names in (options.files, options.mix)]
        places = mixed(*both, options.share, options.limit, options.seed)

        def ordered() -> Iterator[bytes]:       # the same bytes whatever the order of the files
            for _, _, place, length in places:
                spool.seek(place)
                yield spool.read(length)
        if options.pairing in ("other", "shuffled"):
            sides = [tuple((pair[side], pair[f"{side}_ids"]) for side in ("chosen", "rejected"))
                     for pair in map(json.loads, ordered())]
            write_atomic(options.out, map(json_line, dealt(map(json.loads, ordered()), sides, options.pairing,
                                                           options.seed)))
        else:
            write_atomic(options.out, ordered())
    print(f"{sum(reasons.values())} loop steps{_label({'mask': options.mask.pattern} if options.mask else {})}")
    for reason, count in sorted(reasons.items(), key=lambda item: (-item[1], item[0])):
        print(f"{count:8}  {reason}")
    if options.mix:
        print(f"mixed from {len(both[0])} pairs of FILE and {len(both[1])} of --mix: "
              f"{len(set(places) & set(both[1]))} of {len(places)} are of --mix")
    print(f"{len(places)} pairs in {options.out}, {sum(place[1] for place in places)} of them from failed tasks")
    return 0 if places else 1


Place = tuple[tuple, bool, int, int]            # of a pair: its sort key, whether its task failed, where its line is


def mined(options: argparse.Namespace, names: list[str], spool: BinaryIO, reasons: Counter[str]) -> Iterator[Place]:
    """Mine the logs of some names; each pair goes as a line into spool, its place is yielded."""
    for _, trajectory in logs(options, names) if names else ():
        if trajectory.get("status") in ERRORS:
            reasons[f"run ended in {trajectory['status']}"] += sum(map(bool, loops(steps(trajectory))))
            continue
        for pair in repaired(trajectory, mine_pairs(trajectory, reasons), options.pairing, options.seed):
            line = json_line({**pair, **({"mask": trajectory["mask"]} if options.mask else {}),
                              **({"pairing": options.pairing} if options.pairing != "escape" else {})})
            key = (pair["task_id"], pair["sample"], pair["t"], hashlib.sha256(line).digest())
            yield key, pair["success"] is False, spool.seek(0, os.SEEK_END), spool.write(line)


def mixed(own: list[Place], other: list[Place], share: float, limit: int, seed: int) -> list[Place]:
    """The pairs that are written, sorted: all, or as many as share and limit allow, a share of them from other."""
    total = min(len(own) / (1 - share) if share < 1 else math.inf, len(other) / share if share else math.inf,
                limit or math.inf)
    draw, foreign = random.Random(f"mix/{seed}"), round(int(total) * share)
    return sorted(draw.sample(own, int(total) - foreign) + draw.sample(other, foreign))


EXAMPLES = """examples:
  python deloop.py detect trajectories.jsonl
  python deloop.py explain trajectories.jsonl max-1a2b3c4d
  python deloop.py mine trajectories.jsonl --out pairs.jsonl"""


def main(argv: list[str]) -> int:
    """The command line; returns the exit code."""
    parser = Parser(prog="deloop.py", description=__doc__.split("\n\n")[0], epilog=EXAMPLES)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for command in (detect, explain, mine):
        sub = commands.add_parser(command.__name__, help=command.__doc__, description=command.__doc__)
        sub.add_argument("files", nargs=1 if command is explain else "+", metavar="FILE",
                         help="logs, folders, patterns, or - for standard input; formats are recognised by content")
        sub.add_argument("--mask", metavar="REGEX", help="every match in an observation counts as equal; not the "
                         "definition, so the output says MASKED [off]")
        sub.set_defaults(command=command, problems=[])
        if command is detect:
            sub.add_argument("--json", action="store_true", help="one object for each trajectory, then one of totals")
        elif command is explain:
            sub.add_argument("task_id", help="task id, or its beginning")
            sub.add_argument("--sample", type=int, default=0, help="which rollout of the task [%(default)s]")
            sub.add_argument("--width", type=int, default=100, help="characters to show of a text [%(default)s]")
            sub.add_argument("--html", metavar="PAGE", help="write one HTML page instead [off]")
        else:
            sub.add_argument("--out", required=True, help="the pairs file to write (required)")
            sub.add_argument("--pairing", default="escape", choices=PAIRINGS, help="ablations of the rule, with the "
                             "same contexts and counts: the chosen side is any later action (random), the first of "
                             "another kappa (first-different), another pair's (other); or both sides are any pair's "
                             "(shuffled) [%(default)s]")
            sub.add_argument("--mix", nargs="+", default=[], metavar="FILE", help="logs of another domain [none]")
            sub.add_argument("--share", type=float, default=0.0, help="share of the pairs that come from --mix; as "
                             "many pairs as that allows are written (document: .37 is best) [%(default)s]")
            sub.add_argument("--limit", type=int, default=0, help="most pairs written, by draw; 0: all [%(default)s]")
            sub.add_argument("--seed", type=int, default=0, help="of every draw [%(default)s]")
    options = parser.parse_args(argv)
    if "command" not in options:
        parser.print_help()
        return 0
    try:
        options.mask = re.compile(options.mask) if options.mask else None
    except re.error as error:
        raise InputError(f"--mask {options.mask}: no regular expression ({error})") from None
    code = options.command(options)
    for problem in options.problems:
        print(f"warning: {problem}", file=sys.stderr)
    return 1 if options.problems else code


if __name__ == "__main__":
    run(main)
