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

Commands: python deloop.py detect FILE... | explain FILE TASK_ID | mine FILE... --out pairs.jsonl
This file needs nothing but the standard library and works alone in an empty folder.
"""
from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

# ---------------------------------------------------------------------------------------------------------------------
# The detector. To use it in another project, copy from here to the next rule (it needs hashlib, json and Mapping).

PARAMETER_KEYS = ("parameters", "arguments", "args", "input")


def kappa(action: Any) -> str:
    """Canonical form of one action (document, section "method"): equal strings mean the same call.

    action: {"name", "parameters" | "arguments" | "args" | "input"}, the OpenAI form {"function": {"name", "arguments"}},
    or a str where actions are text. Parameters may be a mapping or JSON text, also JSON text that was encoded twice.
    Keys are sorted at every depth and structural whitespace goes; everything else is kept apart (array order, letter
    case, 1 from 1.0, true from 1, null from absent, Unicode forms). Names are compared exactly. Never raises on data.
    """
    if isinstance(action, str):
        return action.strip()
    if not isinstance(action, Mapping):
        return _dump(action)
    call = action["function"] if isinstance(action.get("function"), Mapping) else action
    if "name" not in call:
        return _dump(action)
    given = next((call[key] for key in PARAMETER_KEYS if key in call), None)
    return _dump({"name": call["name"], "parameters": _parameters(given)})


def signature(action: Any, observation: Any) -> str | None:
    """Hex digest of x_t = (kappa(action), observation), the observation byte for byte; None if observation is None."""
    if observation is None:
        return None
    call = kappa(action).encode("utf-8", "surrogatepass")
    if isinstance(observation, str):
        seen = observation.encode("utf-8", "surrogatepass")
    elif isinstance(observation, (bytes, bytearray)):
        seen = bytes(observation)
    else:                                       # a live object: the marker keeps it apart from its own JSON text
        seen = b"\0json " + _dump(observation).encode("utf-8", "surrogatepass")
    return hashlib.sha256(b"%d %b%b" % (len(call), call, seen)).hexdigest()     # the length: no two splits collide


def loop_flags(steps: Iterable[tuple[Any, Any]]) -> list[bool]:
    """s_t for each (action, observation): True iff an earlier step has the same signature. One pass, O(n)."""
    detector = LoopDetector()
    return [detector.push(action, observation) is not None for action, observation in steps]


class LoopDetector:
    """The same rule online, one push a step. No window, no threshold; keeps one digest for each distinct step."""

    def __init__(self) -> None:
        self.first: dict[str, int] = {}         # signature -> index of the first step that had it
        self.count = 0                          # steps pushed so far

    def push(self, action: Any, observation: Any) -> int | None:
        """Record one step; return the 0-based index of the first equal step if this one is a loop, else None."""
        index, self.count = self.count, self.count + 1
        key = signature(action, observation)
        if key is None:                         # no answer was recorded: it equals nothing
            return None
        first = self.first.setdefault(key, index)
        return first if first != index else None


def _parameters(given: Any) -> Any:
    """The value of a call's parameters: JSON text decoded until it is no string; a call without parameters is {}."""
    while isinstance(given, str):
        text = given.strip()
        if not text:
            return {}
        try:
            given = _load(text)
        except (ValueError, RecursionError):    # not JSON, or nested too deeply to parse: the text itself
            return text
    return {} if given is None else given


def _load(text: str) -> Any:
    """json.loads that survives integers beyond Python's 4,300-digit limit (those stay text, marked as integers)."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        raise
    except ValueError:
        return json.loads(text, parse_int=lambda digits: int(digits) if len(digits) < 4000 else {"integer": digits})


def _dump(value: Any) -> str:
    """Sorted, compact, ASCII JSON; what JSON cannot hold is written as its repr."""
    try:
        return json.dumps(value, sort_keys=True, separators=(",", ":"), default=_foreign)
    except (TypeError, ValueError, RecursionError):     # mixed keys, a cycle, a huge integer, deep nesting
        return _spell(value)


def _foreign(value: Any) -> Any:
    """What json.dumps is to write for a value it does not know. A set has no order: its members are sorted."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (set, frozenset)):
        return "{" + ", ".join(sorted(_dump(member) for member in value)) + "}"
    return repr(value)


def _spell(value: Any) -> str:
    """_dump without recursion and without limits: any depth, cycles, keys of any type, integers of any length."""
    out: list[str] = []
    todo: list[tuple[str, Any]] = [("value", value)]
    inside: set[int] = set()                    # containers now open: meeting one again is a cycle
    while todo:
        kind, item = todo.pop()
        if kind == "text":
            out.append(item)
        elif kind == "close":
            inside.discard(id(item))
            out.append("}" if isinstance(item, Mapping) else "]")
        elif not isinstance(item, (Mapping, list, tuple)):
            out.append(_leaf(item))
        elif id(item) in inside:
            out.append('"<cycle>"')
        else:
            inside.add(id(item))
            named = isinstance(item, Mapping)
            members = [(_key(key), item[key]) for key in item] if named else [("", member) for member in item]
            out.append("{" if named else "[")
            todo.append(("close", item))
            for index, (key, member) in reversed(list(enumerate(sorted(members, key=lambda m: m[0]) if named else members))):
                todo += [("value", member), ("text", "," * (index > 0) + (json.dumps(key) + ":") * named)]
    return "".join(out)


def _leaf(value: Any) -> str:
    """One scalar as JSON; an integer too long for decimal as its hexadecimal text."""
    if isinstance(value, int) and value.bit_length() > 12000:
        return f'"{value:#x}"'
    return json.dumps(value, default=_foreign)


def _key(key: Any) -> str:
    """A mapping key as json.dumps writes it, or its repr."""
    return key if isinstance(key, str) else _leaf(key) if isinstance(key, (int, float, type(None))) else repr(key)


# ---------------------------------------------------------------------------------------------------------------------
# Trajectories: one JSON object for each rollout (format "deloop-trajectory/1", described in the README).

RESULTS = ("done", "turn_limit", "context_overflow")    # the statuses that say something about the policy
ERRORS = ("env_error", "policy_error")                  # the others: run again on resume
SUMMARY_HEADER = "Summary of the earlier steps:"
HEAD = 2                                                # messages never dropped: the system prompt and the task


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
    message and only the messages after the dropped range; observations as `shown` to the model.
    """
    messages, config = trajectory["messages"], trajectory.get("config") or {}
    past = [event for event in trajectory.get("compactions", ()) if event["before_turn"] <= turn]
    end = trajectory["turns"][turn]["message"]
    return compacted(messages[:end], past[-1] if past else None, config)


def compacted(messages: list[dict], event: Mapping | None, config: Mapping) -> list[dict]:
    """messages as the model is to see them after the latest compaction event (None: there was none)."""
    head, start = [dict(message) for message in messages[:HEAD]], HEAD
    if event:
        start = event["dropped"][1]
        if event["summary"]:
            head[-1]["content"] = f"{head[-1]['content']}\n\n{SUMMARY_HEADER}\n{event['summary']}"
    return head + [shown(message, config) for message in messages[start:]]


def shown(message: Mapping, config: Mapping) -> dict:
    """A message as the model sees it: an observation over config["max_observation_chars"] loses its middle (the log
    keeps the whole text, and detection reads the log); control tokens in it are broken."""
    message = dict(message)
    if message["role"] != "assistant" and isinstance(message.get("content"), str):
        text, limit = message["content"], config.get("max_observation_chars") or sys.maxsize
        if len(text) > limit:
            head, tail = text[:limit - limit // 2], text[len(text) - limit // 2:]
            text = f"{head}\n[{len(text) - limit} characters omitted]\n{tail}"
        message["content"] = harmless(text, config)
    return message


def harmless(text: str, config: Mapping) -> str:
    """text in which none of config["control_tokens"] can end a turn or open a thought: <|im_end|> becomes <|im_end| >."""
    for token in config.get("control_tokens") or ():
        text = text.replace(token, f"{token[:-1]} {token[-1]}")
    return text


def prompt_hash(messages: Iterable[Mapping]) -> str:
    """Hex digest of prompt messages; stored as prompt_sha256."""
    return hashlib.sha256(_dump(list(messages)).encode()).hexdigest()


def ids_hash(ids: Iterable[int]) -> str:
    """Hex digest of a rendered prompt's token ids; stored as prompt_ids_sha256."""
    return hashlib.sha256(" ".join(map(str, ids)).encode()).hexdigest()


# ---------------------------------------------------------------------------------------------------------------------
# Pairs: one JSON object each (format "deloop-pairs/1"); TRL's DPOTrainer loads the file unchanged.

class Pair(TypedDict):
    """One preference pair. t and t_escape count executed steps from 0; ids are the sampled tokens where known."""
    format: str
    prompt: list[dict]
    chosen: list[dict]
    rejected: list[dict]
    chosen_ids: list[int] | None
    rejected_ids: list[int] | None
    prompt_sha256: str
    prompt_ids_sha256: str | None
    chat_template_kwargs: dict
    task_id: str
    sample: int
    t: int
    t_escape: int
    success: bool | None


def escapes(flags: list[bool], kappas: list[str]) -> list[int | None]:
    """t' for every loop step t: min{u > t : s_u = 0 and kappa_u != kappa_t}, None where there is none. One pass, O(n)."""
    found: list[int | None] = [None] * len(flags)
    near = other = None     # the first step after t with s = 0; the first after it with s = 0 and another kappa than it
    for t in range(len(flags) - 1, -1, -1):
        if flags[t]:
            found[t] = other if near is not None and kappas[near] == kappas[t] else near
        else:
            other = near if near is not None and kappas[near] != kappas[t] else other
            near = t
    return found


def mine_pairs(trajectory: Mapping, reasons: Counter | None = None) -> list[Pair]:
    """The DeLoop rule: for each loop step t with an escape t', the pair (context h_t, chosen a_t', rejected a_t).

    reasons, where given, counts what became of every loop step: "pair" or why there was none.
    """
    run, reasons = steps(trajectory), Counter() if reasons is None else reasons
    flags = loop_flags((step.action, step.observation) for step in run)
    found = escapes(flags, [kappa(step.action) for step in run])
    pairs: list[Pair] = []
    for t, flag in enumerate(flags):
        if flag:
            pair = "no escape" if found[t] is None else _pair(trajectory, run, t, found[t])
            reasons[pair if isinstance(pair, str) else "pair"] += 1
            if not isinstance(pair, str):
                pairs.append(pair)
    return pairs


def _pair(trajectory: Mapping, run: list[Step], t: int, t_escape: int) -> Pair | str:
    """The pair of loop step t, or the reason why there can be none."""
    turn, escape = (trajectory["turns"][run[step].turn] for step in (t, t_escape))
    rejected, chosen = (trajectory["messages"][each["message"]] for each in (turn, escape))
    if chosen == rejected:                      # both calls stand in one message, or two messages read the same
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


def _sampled(turn: Mapping) -> list[int] | None:
    """The sampled token ids, where they spell exactly the message that stands in the log."""
    return turn.get("completion_ids") if turn.get("parse") == "ok" else None


# ---------------------------------------------------------------------------------------------------------------------
# Reading logs. Every reader takes one JSON document and returns its trajectories, or None if the format is another.

def read_trajectories(path: str | os.PathLike) -> Iterator[dict]:
    """The trajectories in a file of any supported format, recognised by content (JSON or JSONL, UTF-8).

    Raises InputError that names the file and the line for what is neither.
    """
    for line, document in read_jsonl(path):
        found = next((found for reader in READERS if (found := reader(document, f"{Path(path).stem}:{line}")) is not None), None)
        if found is None:
            kind = f"an object with the keys {sorted(document)[:8]}" if isinstance(document, dict) else type(document).__name__
            raise InputError(f"{path}, line {line}: no trajectory. Tried: deloop-trajectory/1, OpenAI messages. Found: {kind}")
        yield from found


def read_native(document: Any, name: str) -> list[dict] | None:
    """Format "deloop-trajectory/1": what rollout.py writes."""
    if not isinstance(document, dict) or document.get("format") != "deloop-trajectory/1":
        return None
    missing = [key for key in ("task_id", "sample", "status", "messages", "turns") if key not in document]
    if missing:
        raise InputError(f"{name}: a deloop-trajectory/1 without {missing}")
    return [document]


def read_openai(document: Any, name: str) -> list[dict] | None:
    """OpenAI chat messages: a list of them, or {"messages": [...]} with task_id, sample, reward where known.

    Results are matched to calls by id within the turn; a second result for a call is ignored; an unanswered call is no
    step; several calls in one message are several steps; a list of text blocks is its joined text.
    """
    record = document if isinstance(document, dict) else {"messages": document}
    messages = record.get("messages")
    if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) and "role" in m for m in messages):
        return None
    turns = []
    for index, message in enumerate(messages):
        calls = (message.get("tool_calls") or []) if message["role"] == "assistant" else []
        for call, observation in zip(calls, _answers(calls, messages[index + 1:])):
            turns.append({"message": index, "action": call, "executed": observation is not None, "observation": observation})
    return [{"format": "openai", "task_id": str(record.get("task_id", name)), "sample": record.get("sample", 0),
             "status": record.get("status"), "reward": record.get("reward"), "messages": messages, "turns": turns}]


def _answers(calls: list[dict], following: list[dict]) -> list[str | None]:
    """The observation of each call: the first result with its id before the next assistant message, None if none came."""
    results: dict[Any, str] = {}
    for message in following:
        if message["role"] == "assistant":
            break
        if message["role"] == "tool":
            results.setdefault(message.get("tool_call_id"), text_of(message.get("content")))
    return [results.get(call.get("id")) for call in calls]


def text_of(content: Any) -> str:
    """Message content as text: blocks are joined, what is no text block is kept as its JSON."""
    if isinstance(content, list):
        return "".join(block["text"] if isinstance(block, dict) and isinstance(block.get("text"), str) else _dump(block)
                       for block in content)
    return content if isinstance(content, str) else "" if content is None else _dump(content)


READERS: tuple[Callable[[Any, str], list[dict] | None], ...] = (read_native, read_openai)


# ---------------------------------------------------------------------------------------------------------------------
# Files and command lines, the same for all four scripts.

class InputError(Exception):
    """Bad input from a person, a file or a server. The message names the place and the way out; scripts exit with 2."""


def read_jsonl(path: str | os.PathLike) -> Iterator[tuple[int, Any]]:
    """(line number, object) for each line of a JSONL file, or (1, object) for a file that is one JSON document."""
    try:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    document = json.loads(line)
                except ValueError as error:
                    if number > 1:
                        raise InputError(f"{path}, line {number}: not JSON ({error})") from None
                    document = json.loads(line + file.read())
                yield number, document
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read ({error})") from None
    except ValueError as error:
        raise InputError(f"{path}: neither JSON nor JSONL ({error})") from None


def append_jsonl(path: str | os.PathLike, record: Mapping) -> None:
    """Append one object as one line and force it to the disk: a kill loses at most the line being written."""
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(record, ensure_ascii=False) + "\n")
        file.flush()
        os.fsync(file.fileno())


def write_atomic(path: str | os.PathLike, text: str) -> None:
    """Write a whole file so that a reader sees the old one or the new one, never a part."""
    temporary = f"{path}.{os.getpid()}.tmp"
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def option(help: str, default: Any = dataclasses.MISSING, **keywords: Any) -> Any:
    """A field of a configuration dataclass that is also a command-line flag; without default it is required."""
    return dataclasses.field(default=default, metadata={"help": help, **keywords})


def config_from_args(Config: type, argv: list[str], description: str) -> Any:
    """An instance of the frozen dataclass Config from a command line; every field is a flag of the same name."""
    parser = argparse.ArgumentParser(description=description, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    for field in dataclasses.fields(Config):
        keywords = dict(field.metadata)
        text, required = keywords.pop("help").replace("%", "%%"), field.default is dataclasses.MISSING
        if field.type == "bool":
            keywords["action"] = argparse.BooleanOptionalAction
        else:
            keywords["type"] = {"int": int, "float": float, "str": str}[field.type.split(" |")[0]]
        parser.add_argument("--" + field.name.replace("_", "-"), required=required, default=None if required else field.default,
                            help=text + (" (required)" if required else f" [{field.default}]"), **keywords)
    return Config(**vars(parser.parse_args(argv)))


def run(main: Callable[[list[str]], int | None]) -> None:
    """Run a script's main(argv) and leave with its exit code; InputError becomes one line and exit code 2."""
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

def report(trajectory: Mapping) -> dict:
    """What detect says of one trajectory, for machines."""
    flags = loop_flags((step.action, step.observation) for step in steps(trajectory))
    return {"task_id": trajectory["task_id"], "sample": trajectory.get("sample", 0), "steps": len(flags),
            "loop_steps": [t for t, flag in enumerate(flags) if flag], "status": trajectory.get("status"),
            "success": success(trajectory), "turns_without_step": len(trajectory["turns"]) - len(flags)}


def totals(reports: list[dict]) -> dict:
    """Sums over reports; errors of environment or policy are no results and stay out of the loop rate."""
    results = [each for each in reports if each["status"] not in ERRORS]
    looping, count = sum(bool(each["loop_steps"]) for each in results), sum(each["steps"] for each in results)
    return {"trajectories": len(results), "errors": len(reports) - len(results), "with_loop": looping,
            "loop_rate": looping / len(results) if results else None, "steps": count,
            "loop_steps": sum(len(each["loop_steps"]) for each in results)}


def detect(options: argparse.Namespace) -> int:
    """One line for each trajectory and the totals."""
    reports = [report(trajectory) for path in options.files for trajectory in read_trajectories(path)]
    total = totals(reports)
    if options.json:
        print("\n".join(json.dumps(each) for each in reports + [{"totals": total}]))
        return 0
    width = max([len(each["task_id"]) for each in reports] + [4])
    print(f"{'task':{width}}  sample  steps  loops  first  success  status")
    for each in sorted(reports, key=lambda each: (each["task_id"], each["sample"])):
        loops, won = each["loop_steps"], {None: "-", True: "yes", False: "no"}[each["success"]]
        print(f"{each['task_id']:{width}}  {each['sample']:6}  {each['steps']:5}  {len(loops):5}  {loops[0] if loops else '-':>5}  "
              f"{won:>7}  {each['status'] or '-'}")
    rate = "-" if total["loop_rate"] is None else f"{total['loop_rate']:.1%}"
    print(f"\n{total['trajectories']} trajectories ({total['errors']} errors left out): {total['with_loop']} with a loop = {rate}; "
          f"{total['loop_steps']} loop steps of {total['steps']}")
    return 0


def explain(options: argparse.Namespace) -> int:
    """One trajectory, turn by turn, with its loops, escapes and compactions."""
    for trajectory in read_trajectories(options.file):
        if trajectory["task_id"].startswith(options.task_id) and trajectory.get("sample", 0) == options.sample:
            print("\n".join(explain_lines(trajectory, options.width)))
            return 0
    raise InputError(f"{options.file}: no task {options.task_id!r} with sample {options.sample}; `detect` lists them")


def explain_lines(trajectory: Mapping, width: int = 100) -> list[str]:
    """The lines of explain: each turn's call and observation, what a loop step repeats and where it escapes."""
    run = steps(trajectory)
    numbers = {step.turn: index for index, step in enumerate(run)}
    detector = LoopDetector()
    repeats = [detector.push(step.action, step.observation) for step in run]
    found = escapes([first is not None for first in repeats], [kappa(step.action) for step in run])
    dropped = {event["before_turn"]: event for event in trajectory.get("compactions", ())}
    lines = [f"task {trajectory['task_id']}, sample {trajectory.get('sample', 0)}: status {trajectory.get('status')}, "
             f"reward {trajectory.get('reward')}, {len(run)} steps in {len(trajectory['turns'])} turns"]
    for index, turn in enumerate(trajectory["turns"]):
        if index in dropped:
            event = dropped[index]
            lines.append(f"  -- compaction: messages {event['dropped'][0]} to {event['dropped'][1] - 1} become "
                         f"{_short(event['summary'] or 'nothing', width)}")
        if index not in numbers:
            lines.append(f"        no step ({turn.get('parse', 'unanswered')}): "
                         f"{_short(text_of(trajectory['messages'][turn['message']].get('content')), width)}")
            continue
        t = numbers[index]
        mark = "" if repeats[t] is None else f"   LOOP: repeats step {repeats[t]}, " + (
            f"escapes at step {found[t]}" if found[t] is not None else "never escapes")
        lines.append(f"  {t:4}  {_short(kappa(turn['action']), width)}{mark}")
        lines.append(f"        -> {_short(text_of(turn['observation']), width)}")
    return lines


def _short(text: str, width: int) -> str:
    text = " ".join(text.split())
    return text if len(text) <= width else f"{text[:width - 20]} ... ({len(text)} characters)"


def mine(options: argparse.Namespace) -> int:
    """All pairs of all files into one file, with a count of what became of every loop step."""
    reasons: Counter = Counter()
    pairs = [pair for path in options.files for trajectory in read_trajectories(path)
             if trajectory.get("status") not in ERRORS for pair in mine_pairs(trajectory, reasons)]
    pairs.sort(key=lambda pair: (pair["task_id"], pair["sample"], pair["t"]))   # the same bytes whatever the file order
    write_atomic(options.out, "".join(json.dumps(pair, ensure_ascii=False) + "\n" for pair in pairs))
    failed = sum(pair["success"] is False for pair in pairs)
    print(f"{sum(reasons.values())} loop steps")
    for reason, count in sorted(reasons.items(), key=lambda item: -item[1]):
        print(f"{count:8}  {reason}")
    print(f"{len(pairs)} pairs in {options.out}, {failed} of them from failed tasks")
    return 0 if pairs else 1


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="deloop.py", allow_abbrev=False, description=__doc__.split("\n\n")[0], epilog="""examples:
  python deloop.py detect trajectories.jsonl
  python deloop.py explain trajectories.jsonl max-1a2b3c4d
  python deloop.py mine trajectories.jsonl --out pairs.jsonl""", formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for command, files in ((detect, "+"), (explain, None), (mine, "+")):
        sub = commands.add_parser(command.__name__, help=command.__doc__, description=command.__doc__, allow_abbrev=False)
        sub.add_argument("files" if files else "file", nargs=files, help="logs, JSON or JSONL; the format is recognised by content")
        sub.set_defaults(command=command)
        if command is detect:
            sub.add_argument("--json", action="store_true", help="one object for each trajectory, then one of totals")
        elif command is explain:
            sub.add_argument("task_id", help="task id, or its beginning")
            sub.add_argument("--sample", type=int, default=0, help="which rollout of the task [%(default)s]")
            sub.add_argument("--width", type=int, default=100, help="characters of a call or observation to show [%(default)s]")
        else:
            sub.add_argument("--out", required=True, help="the pairs file to write (required)")
    options = parser.parse_args(argv)
    if "command" not in options:
        parser.print_help()
        return 0
    return options.command(options)


if __name__ == "__main__":
    run(main)
