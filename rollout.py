"""DeLoop in motion: an agent on a tool server under the document's compression harness, one trajectory a line.

    python rollout.py --server http://[::1]:8000 --tasks tasks.jsonl --model Qwen/Qwen3-8B --out base.jsonl

Greedy decoding, at most 30 turns. When the rendered prompt exceeds 4,096 tokens, everything between the task and the
last 6 messages is replaced by a summary that the same model writes. The same command goes on after a kill.

The way of the data: tasks -> `rollout` keeps --batch episodes in flight -> each `episode` is a generator that yields a
Request whenever it needs the model -> a policy answers: `LocalPolicy` all of them in one batch, `ApiPolicy` each on its
own -> append to --out.

Memories (--memory), all but full and state at work only while the prompt is over --budget:
"""
from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import itertools
import json
import os
import re
import shlex
import signal
import sys
import threading
import time
import traceback
import uuid
import zlib
from collections import Counter, deque
from collections.abc import Callable, Generator
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import requests
import urllib3

import deloop
from deloop import HEAD, InputError, compacted, option

SUMMARY_REQUEST = (
    "Pause here and write a summary of the conversation so far; it will replace these messages. State, in short lines: "
    "the facts learnt; the calls already made with their results; the current values; what is not yet done. "
    "Write only what the conversation shows. Do not plan and do not call a function.")
NOTE_REQUEST = (                # the wording of both guards that speak is ours (DEV-19)
    "That call was made before and returned the same. In one or two sentences, say what went wrong and what to do "
    "differently from now on. Do not call a function.")
NOTE_HEADER = "Note to myself:"


@dataclass(frozen=True)
class Config:
    """Every setting of a rollout. A trajectory carries all of them."""
    server: str = option("environment server, several separated by commas, e.g. http://[::1]:8000 (CodeGym's manager)")
    tasks: str = option("JSONL of task rows (CodeGym: ability and prompt; AgentGym: item_id)")
    out: str = option("trajectory file to append to; episodes with a result in it are not run again")
    model: str = option("model name or folder, run in process with transformers; with --api its tokenizer renders")
    adapter: str | None = option("PEFT adapter folder on top of the model", None)
    env: str = option("what speaks at --server", "codegym", choices=("codegym", "agentgym"))
    api: str | None = option("OpenAI-compatible server that runs the model instead: http://localhost:8080/v1", None)
    served_name: str | None = option("the model's name at --api, if it is not --model", None)
    chat: bool = option("--api: chat completions, rendered by the server, instead of completions on our own rendering; "
                        "needs no tokenizer, counts characters/4", False)
    api_key_file: str | None = option("--api: file that holds the key", None)
    api_key_env: str | None = option("--api: environment variable that holds the key", None)
    api_fields: str = option("--api: JSON object laid over each request's fields; null removes one", "{}")
    api_timeout: float = option("--api: seconds one completion may take", 600.0)
    memory: str = option("what becomes of a long history, see above (document: summary)", "summary",
                         choices=("summary", "full", "truncate", "mask", "hybrid", "ledger", "state"))
    budget: int = option("compress a prompt of more tokens (document: 4,096; 8,192 and 2,048 also studied)", 4096)
    count: str = option("how the budget is counted: exact with the tokenizer, or characters/4 (DEV-1)", "exact",
                        choices=("exact", "chars"))
    keep_last: int = option("messages never compressed, even (document: 6)", 6)
    max_turns: int = option("turns an episode may take (document: 30)", 30)
    max_new_tokens: int = option("tokens of one reply (not stated in the document; DEV-2)", 1024)
    summary_tokens: int = option("tokens of one summary, state or note (not stated; DEV-2)", 512)
    summary_request: str = option("what asks for a summary (not stated; DEV-3)", SUMMARY_REQUEST)
    thinking: bool = option("let Qwen3 think before it acts (not stated; DEV-4)", False)
    temperature: float = option("0 is greedy (document: greedy)", 0.0)
    samples: int = option("rollouts of each task; more than 1 needs a temperature (document: 1)", 1)
    seed: int = option("seed of the sampling", 0)
    intercept: bool = option("guard: never execute a call that was executed before (document: interceptor)", False)
    reflect: bool = option("guard: after a loop step the model writes a note to itself (document: Reflexion)", False)
    loop_temperature: float = option("guard: temperature of the reply after a loop step, 0: unchanged (ours)", 0.0)
    limit: int = option("run only the first N tasks, 0 for all", 0)
    shard: str | None = option("i/n: run the i-th of n equal parts (1/4 ... 4/4), each into an --out of its own name; "
                               "accelerate launch sets it", None)
    max_observation_chars: int = option("characters of an observation shown to the model (not stated; DEV-5)", 8000)
    batch: int = option("episodes in flight", 16)
    dtype: str = option("auto: bfloat16 on a GPU, float32 elsewhere", "auto", choices=("auto", "float32", "bfloat16"))
    step_timeout: float = option("seconds a tool call may run on the server (CodeGym's own default)", 30.0)
    wait: float = option("seconds to wait for a free environment or a busy model server before giving up", 600.0)
    overwrite: bool = option("start --out anew instead of going on with it", False)
    verbose: bool = option("print the first episode as it happens", False)
    dry_run: bool = option("print the first prompt as the model sees it, with token counts, and stop", False)


# ---------------------------------------------------------------------------------------------------------------------
# Memory. A strategy is a pure function (messages, budget, state) -> (prompt, event). event is None where the view stays
# as it was, else what context_at needs to rebuild it; with "ask" in it, the model must first write its summary. Each
# does nothing while the prompt fits the budget or nothing is older than the last messages, so none can act twice on one
# turn; whole pairs of call and observation go or stay; system and task always stay, byte for byte.

class State(NamedTuple):
    """What a strategy may look at beside the messages."""
    event: dict | None                      # the latest event
    turns: list[dict]
    keep_last: int
    count: Callable[[list[dict]], int]      # tokens of a prompt
    settings: dict


def over(messages: list[dict], budget: float, state: State) -> tuple[list[dict], int]:
    """(the prompt as it stands, the start of the kept tail if something is to be done about what is older, else 0)"""
    prompt, end = compacted(messages, state.event, state.settings), len(messages) - state.keep_last
    gone = state.event["dropped"][1] if state.event else HEAD
    return prompt, end if end > gone and state.count(prompt) > budget else 0


def removed(end: int) -> dict:
    """The event that drops the messages before `end` and says so."""
    return {"dropped": [HEAD, end], "header": f"[{end - HEAD} earlier messages removed]", "summary": ""}


def full(messages: list[dict], budget: float, state: State) -> tuple[list[dict], dict | None]:
    """The whole conversation, until the model's context is full. (document: full history)"""
    return compacted(messages, state.event, state.settings), None


def truncate(messages: list[dict], budget: float, state: State) -> tuple[list[dict], dict | None]:
    """Between the task and the last 6 messages: "[k earlier messages removed]". (document: truncation; text: DEV-7)"""
    prompt, end = over(messages, budget, state)
    return (compacted(messages, removed(end), state.settings), removed(end)) if end else (prompt, None)


def summary(messages: list[dict], budget: float, state: State) -> tuple[list[dict], dict | None]:
    """Between the task and the last 6 messages: a summary that the same model writes, greedily, from the earlier
    summary and the messages that now leave. (document: summary)"""
    prompt, end = over(messages, budget, state)
    if not end:
        return prompt, None
    ask = compacted(messages[:end], state.event, state.settings)
    ask[-1]["content"] += f"\n\n{state.settings['summary_request']}"   # two user messages in a row break some templates
    return prompt, {"dropped": [HEAD, end], "header": deloop.SUMMARY_HEADER, "ask": ask}


def mask(messages: list[dict], budget: float, state: State) -> tuple[list[dict], dict | None]:
    """All calls stay; of observations before the last messages only the length. (SWE-agent's last_n_observations)"""
    prompt, end = over(messages, budget, state)
    event = {**{"dropped": [HEAD, HEAD], "header": "", "summary": "", **(state.event or {})}, "masked": end}
    shorter = compacted(messages, event, state.settings) if end else prompt
    return (prompt, None) if shorter == prompt else (shorter, event)


def hybrid(messages: list[dict], budget: float, state: State) -> tuple[list[dict], dict | None]:
    """mask; if the prompt is still over the budget, summary. (ours, after arXiv 2508.21433)"""
    masked = mask(messages, budget, state)
    if state.count(masked[0]) <= budget:
        return masked
    summarised = summary(messages, budget, state)
    return summarised if summarised[1] else masked


def ledger(messages: list[dict], budget: float, state: State) -> tuple[list[dict], dict | None]:
    """Between the task and the last 6 messages: a table written by code, a line for each distinct step with the numbers
    of all steps that equal it. (document: action ledger; its layout: DEV-7)"""
    prompt, end = over(messages, budget, state)
    if not end:
        return prompt, None
    rows: dict[str, list] = {}              # signature -> [the line, its step numbers]
    for number, step in enumerate(deloop.steps({"turns": state.turns}), 1):
        if state.turns[step.turn]["message"] < end:
            line = f"{spelled(step.action)} -> {short(step.observation, 200)}"
            rows.setdefault(deloop.signature(step.action, step.observation), [line]).append(str(number))
    table = "\n".join(f"{', '.join(row[1:])}: {row[0]}" for row in rows.values())
    event = {"dropped": [HEAD, end], "header": "Calls made so far (step numbers: call -> result):",
             "summary": deloop.harmless(table, state.settings)}
    return compacted(messages, event, state.settings), event


def state(messages: list[dict], budget: float, state: State) -> tuple[list[dict], dict | None]:
    """One state that the model rewrites after every turn, and the last call with its observation. (MEM1, MemAgent)"""
    return summary(messages, -1, state._replace(keep_last=2))


MEMORIES = {each.__name__: each for each in (summary, full, truncate, mask, hybrid, ledger, state)}


def spelled(action: Any) -> str:
    """A call as one short line."""
    if isinstance(action, str):
        return short(action, 200)
    return short(f"{action['name']}({json.dumps(action['parameters'], ensure_ascii=False)})", 200)


def short(text: str, width: int) -> str:
    """text on one line, its middle left out where it is longer than width."""
    text = " ".join(text.split())
    return text if len(text) <= width else f"{text[:width * 2 // 3]} ... {text[-width // 4:]}"


def remember(key: Any, messages: list[dict], turns: list[dict], compactions: list[dict], policy: Any, config: Config,
             settings: dict) -> Generator[Request, Completion, list[dict]]:
    """The prompt messages of the next turn, by the strategy of --memory; whatever it did is added to compactions."""
    last = compactions[-1] if compactions else None
    count = functools.partial(tokens, policy) if config.count == "exact" else characters
    state = State(last, turns, config.keep_last, count, settings)
    prompt, view = MEMORIES[config.memory](messages, config.budget, state)
    if view is None:
        return prompt
    event = {"before_turn": len(turns), "generation": len(compactions) + 1, "prompt_tokens": 0, "completion_tokens": 0,
             "finish": None, "tokens_before": count(compacted(messages, last, settings)),
             **{name: view[name] for name in ("dropped", "header", "summary", "masked") if name in view}}
    if "ask" in view:
        reply = yield from write(key, view["ask"], policy, config)
        text = deloop.harmless(reply.text.strip(), settings) or (last["summary"] if last else "")
        event |= {"summary": text, "finish": reply.finish, "prompt_tokens": reply.prompt_tokens,
                  "completion_tokens": reply.completion_tokens}
        if not text:                        # nothing was written: truncation for this turn (DEV-7)
            event |= removed(event["dropped"][1])
    prompt = compacted(messages, event, settings)
    event["tokens_after"] = count(prompt)
    compactions.append(event)
    return prompt


def characters(messages: list[dict]) -> int:
    """The estimate of a prompt's tokens that needs no tokenizer."""
    return sum(len(message["content"]) for message in messages) // 4


def write(key: Any, ask: list[dict], policy: Any, config: Config) -> Generator[Request, Completion, Completion]:
    """Text that the model writes beside its calls, greedy; empty where the request does not fit its context."""
    try:
        return (yield request(policy, key, ask, config.summary_tokens, shrink=True))
    except ContextOverflow:
        return Completion("", [], "length", 0.0, 0, 0)


# ---------------------------------------------------------------------------------------------------------------------
# Guards: what may be done about loops without training. Off by default; the detector alone never changes an episode.

class Guards:
    """The interceptor, the note and the temperature of one episode."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.detector = deloop.LoopDetector()
        self.calls: dict[str, int] = {}         # kappa of every executed call -> its first step
        self.repeated = False                   # whether the turn before was a loop step, or a call that was held back

    def blocks(self, action: Any) -> Outcome | None:
        """Instead of executing it: what the agent is told about a call that was executed before."""
        first = self.calls.get(deloop.kappa(action))
        if not self.config.intercept or first is None:
            return None
        return Outcome(False, None, f"Error: this exact call was already executed as step {first + 1} and was not "
                                    "executed again. Make another call.")

    def saw(self, action: Any, outcome: Outcome, held: bool) -> None:
        """Tell the detector what became of a turn."""
        self.repeated = held
        if outcome.executed:
            self.calls.setdefault(deloop.kappa(action), self.detector.count)
            self.repeated = self.detector.push(action, outcome.observation) is not None

    def temperature(self) -> float:
        """Of the next reply."""
        return (self.repeated and self.config.loop_temperature) or self.config.temperature

    def note(self, key: Any, messages: list[dict], event: dict | None, turn: dict, policy: Any,
             settings: dict) -> Generator[Request, Completion, None]:
        """After a loop step: what the model makes of it stands behind the observation from now on, and in the turn."""
        if not (self.config.reflect and self.repeated):
            return
        ask = compacted(messages, event, settings)
        ask[-1]["content"] += f"\n\n{NOTE_REQUEST}"
        reply = yield from write(key, ask, policy, self.config)
        text = deloop.harmless(reply.text.strip(), settings)
        turn["note"] = {"text": text, "prompt_tokens": reply.prompt_tokens,
                        "completion_tokens": reply.completion_tokens}
        if text:
            messages[-1] = {**messages[-1], "content": f"{messages[-1]['content']}\n\n{NOTE_HEADER} {text}"}


# ---------------------------------------------------------------------------------------------------------------------
# One episode.

class Request(NamedTuple):
    """What an episode asks of the policy. key names the episode, whose earlier prompts may still be cached."""
    key: Any
    messages: list[dict]
    prompt: list[int] | None            # None: the server renders
    max_new_tokens: int
    temperature: float = 0.0


class Completion(NamedTuple):
    """The policy's answer. ids as sampled, with the end-of-turn token iff finish is "stop" (else "length")."""
    text: str
    ids: list[int] | None               # None: the server does not tell
    finish: str
    seconds: float
    prompt_tokens: int
    completion_tokens: int


class ContextOverflow(Exception):
    """The prompt and its reply do not fit the model's context."""


class PolicyError(Exception):
    """The model's server failed for good. The episode is run again on resume."""


def quiet(text: str) -> None:
    """What is done with the account of an episode that nobody watches."""


def episode(task: dict, sample: int, env: Any, policy: Any, config: Config, settings: dict,
            say: Callable[[str], None] = quiet) -> Generator[Request, Completion, dict]:
    """One rollout: yields a Request whenever the model is needed, takes its Completion, returns the trajectory."""
    key, guards = (task["task_id"], sample), Guards(config)
    messages: list[dict] = []
    turns: list[dict] = []
    compactions: list[dict] = []
    status, reward, failure = "turn_limit", None, None
    try:
        messages += env.start(task)
        say(f"{messages[0]['content']}\n\n{messages[1]['content']}")
        while len(turns) < config.max_turns:
            try:
                context = yield from remember(key, messages, turns, compactions, policy, config, settings)
                asked = request(policy, key, context, config.max_new_tokens, guards.temperature())
                reply = yield asked
            except ContextOverflow:
                status = "context_overflow"
                break
            action, parse, text = env.parse(reply.text, reply.finish)
            held = guards.blocks(action) if action else None
            outcome = held or (env.step(action) if action else Outcome(False, None, env.advice(parse)))
            guards.saw(action, outcome, held is not None)
            turns.append(record(len(messages), action, parse, outcome, held, asked, reply))
            messages += [{"role": "assistant", "content": deloop.harmless(text, settings)},
                         {"role": "user", "content": outcome.detail}]       # the role: DEV-6
            say(told(turns, messages, compactions))
            if outcome.executed and env.done():
                status = "done"
                break
            yield from guards.note(key, messages, compactions[-1] if compactions else None, turns[-1], policy, settings)
        reward = env.reward()
    except EnvError as error:
        status, failure = "env_error", str(error)
    except PolicyError as error:
        status, failure = "policy_error", str(error)
    except Exception:                   # a fault of ours or of the tokenizer: told, and the other episodes go on
        status, failure = "policy_error", traceback.format_exc()
    finally:
        env.close()
    return {"format": "deloop-trajectory/1", "task_id": task["task_id"], "sample": sample, "seed": config.seed,
            "env": env.kind, "policy": policy.name, "config": settings, "status": status, "reward": reward,
            "error": failure, "messages": messages, "turns": turns, "compactions": compactions}


def record(message: int, action: Any, parse: str, outcome: Outcome, held: Outcome | None, asked: Request,
           reply: Completion) -> dict:
    """A turn as the trajectory keeps it. guard: the call was proposed and held back; it is no step."""
    return {"message": message, "action": action, "executed": outcome.executed, "observation": outcome.observation,
            "parse": parse, "finish": reply.finish, "prompt_tokens": reply.prompt_tokens,
            "completion_tokens": reply.completion_tokens, "completion_ids": reply.ids,
            "prompt_sha256": deloop.prompt_hash(asked.messages),
            "prompt_ids_sha256": None if asked.prompt is None else deloop.ids_hash(asked.prompt),
            "seconds": round(reply.seconds, 3),
            **({"guard": "intercepted"} if held else {}),
            **({"temperature": asked.temperature} if asked.temperature else {})}


def told(turns: list[dict], messages: list[dict], compactions: list[dict]) -> str:
    """The newest turn in plain text, for --verbose."""
    turn, lines = turns[-1], []
    if compactions and compactions[-1]["before_turn"] == len(turns) - 1:
        event = compactions[-1]
        lines.append(f"-- memory: {event['tokens_before']} -> {event['tokens_after']} tokens, without messages "
                     f"{event['dropped']}, masked before {event.get('masked', 0)}")
        lines += [event["header"], event["summary"]]
    lines.append(f"-- turn {len(turns)}: prompt {turn['prompt_tokens']} tokens, reply {turn['completion_tokens']}, "
                 f"{turn['parse']}, {turn['finish']}\n{messages[-2]['content']}\n-> {messages[-1]['content']}")
    return "\n".join(lines)


# ---------------------------------------------------------------------------------------------------------------------
# What the model wrote.

BEGIN, END = "<|FunctionCallBegin|>", "<|FunctionCallEnd|>"
FORM = f'{BEGIN}[{{"name": "function_name", "parameters": {{"key": "value"}}}}]{END}'
ADVICE = {      # what the agent reads after a reply that holds no call to execute; keyed by its parse status
    "no_call": "Error: no function call found. Call exactly one function, written as {}",
    "cut": "Error: your reply reached the token limit before the call was complete. Be brief and call one function.",
    "bad_json": "Error: the function call is not valid JSON. Write it as {}",
    "no_name": "Error: the function call has no name. Write it as {}",
    "bad_parameters": "Error: parameters must be an object. Write the call as {}",
}


def parse_call(text: str, finish: str) -> tuple[dict | None, str, str]:
    """(action or None, parse status, the part of the text that stays in the conversation).

    ok: exactly one call, at the end. extra: more after the first call; the first is run and the rest is cut off.
    unclosed: a complete call without its end marker. The others are the keys of ADVICE: nothing is executed.
    """
    start = text.find(BEGIN)
    if start < 0:
        return None, "cut" if finish == "length" else "no_call", text
    begin = re.compile(r"\s*\[?\s*").match(text, start + len(BEGIN)).end()
    try:
        call, end = json.JSONDecoder().raw_decode(text, begin)
        json.dumps(call, ensure_ascii=False).encode()       # too deep, or half a surrogate pair: it could not be sent
    except (ValueError, RecursionError):
        return None, "cut" if finish == "length" and END not in text[begin:] else "bad_json", text
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"]:
        return None, "no_name", text
    parameters = call.get("parameters", call.get("arguments"))
    if not isinstance(parameters, dict) and parameters not in (None, ""):
        return None, "bad_parameters", text
    action, tail = {"name": call["name"], "parameters": parameters or {}}, re.sub(r"^\s*\]?\s*", "", text[end:])
    if tail.rstrip() == END:
        return action, "ok", text
    return (action, "extra", text[:end] + "]" + END) if tail.strip() else (action, "unclosed", text)


def parse_text(text: str, finish: str) -> tuple[str | None, str, str]:
    """parse_call for environments whose actions are text: the line after the first "Action:" is the action."""
    found = re.search(r"Action:\s*(\S[^\n]*)", text)
    if not found:
        return None, "cut" if finish == "length" else "no_call", text
    if text[found.end():].strip():
        return found[1].strip(), "extra", text[:found.end()]
    return (None, "cut", text) if finish == "length" else (found[1].strip(), "ok", text)


# ---------------------------------------------------------------------------------------------------------------------
# HTTP and the environments. An environment is opened by a pool, then: start(task) -> prompt, step(action) -> Outcome,
# done(), reward(), close().

GRACE = 5.0         # seconds beyond its own timeout in which CodeGym's server surely has ended a step and said so


class EnvError(Exception):
    """The environment or its server failed. Not the policy's doing: the episode is run again on resume."""


class Outcome(NamedTuple):
    """What became of one call. executed: the environment's state may have changed and observation is its answer."""
    executed: bool
    observation: str | None
    detail: str         # what the agent reads: the observation, or why the call was not executed


def http(session: requests.Session, method: str, url: str, seconds: float, body: Any = None) -> tuple[int, bytes, Any]:
    """(status, body, headers) of one exchange that ends within seconds, however slowly the bytes come.

    Raises requests.RequestException; then the request may or may not have been carried out.
    """
    deadline, data = time.monotonic() + seconds, bytearray()
    reply = session.request(method, url, json=body, timeout=(min(10, seconds), seconds), stream=True)
    try:
        while part := reply.raw.read1(1 << 20, decode_content=True):
            data += part
            if time.monotonic() > deadline:
                raise requests.Timeout(f"the answer did not end within {seconds:.0f} s")
    except (requests.Timeout, urllib3.exceptions.HTTPError, OSError) as error:
        reply.close()
        raise error if isinstance(error, requests.Timeout) else requests.ConnectionError(error) from None
    reply.raw.release_conn()
    return reply.status_code, bytes(data), reply.headers


def get(session: requests.Session, method: str, url: str, body: Any = None, seconds: float = 30.0) -> dict:
    """The JSON object of a 200 answer to a call that may be repeated: it changes nothing, or always to the same."""
    for pause in (0.2, 1.0, None):
        try:
            status, data, _ = http(session, method, url, seconds, body)
            return json_object(status, data, url)
        except requests.RequestException as error:
            status, reason = 0, f"{url}: {error}"
        except EnvError as error:
            reason = str(error)
        if pause is None or status in (404, 500):       # that is the server's own answer; others may be a proxy's
            raise EnvError(reason)
        time.sleep(pause)
    raise AssertionError("unreachable")


def json_object(status: int, data: bytes, url: str) -> dict:
    """The JSON object in a 200 answer."""
    try:
        answer = json.loads(data) if status == 200 else None
    except (ValueError, RecursionError):
        answer = None
    if not isinstance(answer, dict):
        raise EnvError(f"{url}: HTTP {status}, {detail(data)}")
    return answer


def detail(data: bytes) -> str:
    """The reason in an error's body: CodeGym's {"detail"}, OpenAI's {"error": {"message"}}, or how it begins."""
    try:
        answer = json.loads(data)
        reason = answer["detail"] if "detail" in answer else answer["error"]
        return str(reason["message"] if isinstance(reason, dict) and "message" in reason else reason)[:500]
    except (ValueError, KeyError, TypeError, RecursionError):
        return repr(data[:200].decode("utf-8", "replace"))


def field(answer: dict, name: str, kinds: tuple, url: str) -> Any:
    """A field of a server's answer that must have one of these types."""
    value = answer.get(name)
    if type(value) not in kinds:
        raise EnvError(f"{url}: {name} is {str(value)[:100]!r} in {str(answer)[:200]}")
    return value


class CodeGymPool:
    """The worker instances of one or several managers. Whatever is lent is given back, sooner or later."""

    def __init__(self, config: Config) -> None:
        self.managers = [each.strip().rstrip("/") for each in config.server.split(",") if each.strip()]
        self.turn = itertools.count()
        self.timeout = config.step_timeout
        self.owed: deque[str] = deque()                 # releases that failed and are to be tried again
        self.http = requests.Session()

    def open(self) -> CodeGym | str:
        """An environment on a free worker that answers, or a str that says why there is none just now."""
        self.settle()
        first, reason = next(self.turn), "--server is empty"
        for manager in (self.managers[(first + i) % len(self.managers)] for i in range(len(self.managers))):
            for _ in range(4):                          # past workers that are dead or still starting
                try:
                    status, data, _ = http(self.http, "GET", f"{manager}/get_instance", 30)
                    if status != 200:
                        reason = f"{manager}: HTTP {status}, every worker is taken"
                        break
                    uid, port = (json.loads(data)[key] for key in ("uid", "port"))
                    release = f"{manager}/release_instance?uid={uid}"
                    worker = f"{urlsplit(manager).scheme}://{bracketed(manager)}:{int(port)}"
                except (requests.RequestException, ValueError, KeyError, TypeError) as error:
                    reason = f"{manager}: {error}"
                    break
                try:                                    # any answer will do: an unknown session is 404
                    http(self.http, "GET", f"{worker}/is_done?session_id=none", 10)
                    return CodeGym(worker, lambda: self.release(release), self.timeout)
                except requests.RequestException as error:
                    reason = f"worker {worker} does not answer: {error}"
                    self.release(release)
        return reason

    def release(self, url: str) -> None:
        """Give an instance back; if that fails, it is tried again before the next one is taken."""
        try:
            if http(self.http, "GET", url, 10)[0] == 200:
                return
        except requests.RequestException:
            pass
        self.owed.append(url)

    def settle(self) -> int:
        """Try the releases that failed once more; how many instances stay taken."""
        for _ in range(len(self.owed)):
            self.release(self.owed.popleft())
        return len(self.owed)


def bracketed(url: str) -> str:
    """The host of a URL as it stands in a URL: IPv6 in brackets."""
    host = urlsplit(url).hostname or ""
    return f"[{host}]" if ":" in host else host


class CodeGym:
    """One session on one worker, from start to close."""
    kind = "codegym"

    def __init__(self, worker: str, release: Callable[[], None], timeout: float) -> None:
        self.worker, self.release, self.timeout = worker, release, timeout
        self.session = uuid.uuid4().hex
        self.applied = 0                        # steps the server has answered; equals its step_count
        self.http = requests.Session()

    def start(self, task: dict) -> list[dict]:
        """Create the environment (idempotent on the server); the prompt messages of the task."""
        get(self.http, "POST", f"{self.worker}/start",
            {"session_id": self.session, "env_str": task["env_str"], "env_name": "codegym_v1"})
        return self.prompt(task)

    @staticmethod
    def prompt(task: dict) -> list[dict]:
        """System prompt and task; a row's other fields (name) are not the template's business."""
        return [{"role": each["role"], "content": each["content"]} for each in task["prompt"]]

    def step(self, action: dict, again: bool = True) -> Outcome:
        """Execute one call, never twice: sent again only where the server's step_count proves it was not applied."""
        url, deadline = f"{self.worker}/step", time.monotonic() + self.timeout + GRACE
        body = {"session_id": self.session, "action": json.dumps(action, ensure_ascii=False), "timeout": self.timeout}
        try:
            status, data, _ = http(self.http, "POST", url, self.timeout + GRACE, body)
        except requests.RequestException as error:      # the call or its answer was lost: which of the two?
            return self._lost(action, again, deadline, str(error))
        if status in (502, 503, 504):                   # so says a proxy, which cannot know
            return self._lost(action, again, deadline, f"HTTP {status}")
        if status == 500 and self._count() in (None, self.applied):     # it raised or ran out of time: state kept
            return Outcome(False, None, f"Error: the call was not executed ({detail(data)})")
        observation = field(json_object(status, data, url), "observation", (str,), url)
        observation = observation.encode("utf-8", "replace").decode()       # half a surrogate pair cannot be stored
        self.applied += 1
        return Outcome(True, observation, observation)

    def _lost(self, action: dict, again: bool, deadline: float, reason: str) -> Outcome:
        """Until the server's own time for the step is over, it may still be applied: only then unchanged is a proof."""
        while again and self._count() == self.applied:
            if time.monotonic() > deadline:
                return self.step(action, again=False)
            time.sleep(min(0.5, self.timeout))
        raise EnvError(f"the observation of step {self.applied} is lost ({reason})")

    def _count(self) -> Any:
        """Steps that the server has applied."""
        url = f"{self.worker}/get_attribute?session_id={self.session}&attribute_name=step_count"
        return get(self.http, "GET", url).get("attribute_value")

    def done(self) -> bool:
        url = f"{self.worker}/is_done?session_id={self.session}"
        return field(get(self.http, "GET", url), "done", (bool,), url)

    def reward(self) -> float:
        url = f"{self.worker}/reward?session_id={self.session}"
        return float(field(get(self.http, "GET", url), "reward", (int, float), url))

    def close(self) -> None:
        """Stop the session, then release the instance; a dead worker's session is gone anyway."""
        try:
            http(self.http, "POST", f"{self.worker}/stop", 10, {"session_id": self.session})
        except requests.RequestException as error:
            print(f"warning: session {self.session} on {self.worker} was not stopped ({error})", file=sys.stderr)
        self.release()
        self.http.close()

    @staticmethod
    def parse(text: str, finish: str) -> tuple[dict | None, str, str]:
        return parse_call(text, finish)

    @staticmethod
    def advice(status: str) -> str:
        return ADVICE[status].format(FORM)


INSTRUCTIONS = {        # system prompts of ours, where a task row brings none; the goal is in the observation (DEV-20)
    "textcraft": 'You craft items in Minecraft with the recipes you are given. Actions: "craft [count] [item] using '
                 '[count] [ingredient], ..."; "get [count] [item]"; "inventory".',
    "babyai": "You act in a grid of rooms until the goal is reached, with the available actions.",
    "alfworld": "You act in a household until the task is done. Choose one of the available actions.",
    "sciworld": "You do a science experiment in a text world until the task is done. Describe each action in words, "
                "such as: look around; open door to kitchen; pick up thermometer; focus on water; wait.",
}
TEXT_FORM = "Thought:\nyour thoughts\n\nAction:\none action"


class AgentGymPool:
    """Environments of AgentGym servers: created on demand, the servers in turn."""

    def __init__(self, config: Config) -> None:
        self.servers = itertools.cycle(each.strip().rstrip("/") for each in config.server.split(","))
        self.timeout = config.step_timeout

    def open(self) -> AgentGym | str:
        server, session = next(self.servers), requests.Session()
        try:
            answer = get(session, "POST", f"{server}/create", {}, 60)
            return AgentGym(server, session, field(answer, "id", (int, str), server), self.timeout)
        except EnvError as error:
            return str(error)

    def settle(self) -> int:
        """Nothing is owed: an environment is closed by its own episode."""
        return 0


class AgentGym:
    """One environment of an AgentGym server (TextCraft, BabyAI, ALFWorld, SciWorld): actions are text.

    Its failures are HTTP 200 with {"error"}. It keeps no step count, so a lost answer always ends the episode.
    """

    def __init__(self, server: str, session: requests.Session, number: Any, timeout: float) -> None:
        self.server, self.http, self.number, self.timeout = server, session, number, timeout
        self.kind, self.last = "agentgym", {}

    def start(self, task: dict) -> list[dict]:
        """Reset to the task; the prompt messages: instructions, then the first observation with the goal."""
        self.kind = f"agentgym/{task['world']}"
        answer = self._post("reset", {"data_idx": task["index"], "game": task["index"], "world_type": "Text"})
        if "error" in answer:
            raise EnvError(f"{self.server}/reset: {answer['error']}")
        goal = [answer["task_description"]] if "task_description" in answer else []
        system = task.get("system") or f"{INSTRUCTIONS[task['world']]}\nAnswer each observation with:\n{TEXT_FORM}"
        return [{"role": "system", "content": system},
                {"role": "user", "content": "\n".join([*goal, self._observation(answer)])}]

    def step(self, action: str) -> Outcome:
        answer = self._post("step", {"action": action})
        if "error" in answer:                           # an action that raised; or a session that is gone
            if re.search("not valid|deleted", str(answer["error"])):
                raise EnvError(f"{self.server}/step: {answer['error']}")
            return Outcome(False, None, f"Error: {str(answer['error'])[:500]}")
        self.last, observation = answer, self._observation(answer)
        return Outcome(True, observation, observation)

    def done(self) -> bool:
        return field(self.last, "done", (bool,), self.server)

    def reward(self) -> float:
        """The score where the server keeps one (SciWorld's is out of 100), else the last reward."""
        score = float(self.last.get("score", self.last.get("reward", 0.0)))
        return score / 100 if self.kind.endswith("sciworld") else score

    def close(self) -> None:
        try:
            http(self.http, "POST", f"{self.server}/close", 10, {"id": self.number})
        except requests.RequestException as error:
            print(f"warning: environment {self.number} on {self.server} was not closed ({error})", file=sys.stderr)
        self.http.close()

    def _post(self, path: str, body: dict) -> dict:
        """One exchange, never repeated: the server cannot tell whether the first one was carried out."""
        url = f"{self.server}/{path}"
        try:
            status, data, _ = http(self.http, "POST", url, self.timeout + GRACE, {"id": self.number, **body})
        except requests.RequestException as error:
            raise EnvError(f"{url}: {error}") from None
        return json_object(status, data, url)

    def _observation(self, answer: dict) -> str:
        choices = answer.get("available_actions")
        shown = f"\nAvailable actions: {', '.join(map(str, choices))}" if isinstance(choices, list) else ""
        return field(answer, "observation", (str,), self.server) + shown

    @staticmethod
    def parse(text: str, finish: str) -> tuple[str | None, str, str]:
        return parse_text(text, finish)

    @staticmethod
    def advice(status: str) -> str:
        return ADVICE[status].format(TEXT_FORM)


# ---------------------------------------------------------------------------------------------------------------------
# Policies: encode(messages) -> prompt tokens, complete(requests) -> completions, name, max_context, settings, and
# lock_step: whether the requests of all episodes are to be answered together.

def request(policy: Any, key: Any, messages: list[dict], limit: int, temperature: float = 0.0,
            shrink: bool = False) -> Request:
    """A Request that fits the policy's context (shrink: with fewer tokens of reply); ContextOverflow if it cannot."""
    prompt = policy.encode(messages)
    room = policy.max_context - len(prompt or ())
    if room < (1 if shrink else limit):
        raise ContextOverflow
    return Request(key, messages, prompt, min(limit, room), temperature)


def tokens(policy: Any, messages: list[dict]) -> int:
    """Tokens of a rendered prompt; the estimate where nobody here can render it."""
    prompt = policy.encode(messages)
    return characters(messages) if prompt is None else len(prompt)


def draw_seed(seed: int, asked: Request) -> int:
    """The seed of one completion (63 bits): hangs on seed, episode and prompt, not on the batch or the order."""
    prompt = deloop.prompt_hash(asked.messages) if asked.prompt is None else deloop.ids_hash(asked.prompt)
    return int.from_bytes(hashlib.sha256(f"{seed} {asked.key} {prompt}".encode()).digest()[:8], "little") >> 1


class ScriptedPolicy:
    """A function from the prompt messages to the reply, for tests and for teaching. A token is a word."""
    max_context, name, settings, lock_step = 10**9, "scripted", {}, True

    def __init__(self, reply: Callable[[list[dict]], str]) -> None:
        self.reply = reply

    def encode(self, messages: list[dict]) -> list[int]:
        return [zlib.crc32(word.encode()) for each in messages for word in each["content"].split()]

    def complete(self, asked: list[Request]) -> list[Completion]:
        answers = []
        for each in asked:
            text = self.reply(each.messages)
            ids = self.encode([{"content": text}])
            answers.append(Completion(text, ids, "stop", 0.0, len(each.prompt), len(ids)))
        return answers


class Renderer:
    """A model's tokenizer and chat template."""

    def __init__(self, config: Config) -> None:
        import transformers
        transformers.utils.logging.disable_progress_bar()
        try:
            self.tokenizer = transformers.AutoTokenizer.from_pretrained(config.model)
        except (OSError, ValueError) as error:
            raise InputError(f"--model {config.model}: no tokenizer ({str(error).splitlines()[0]})") from None
        if self.tokenizer.chat_template is None:
            raise InputError(f"--model {config.model}: its tokenizer has no chat template; use an instruct model")
        self.template = {"enable_thinking": config.thinking}
        self.settings = {
            "transformers": transformers.__version__, "chat_template_kwargs": self.template,
            "control_tokens": sorted(self.tokenizer.all_special_tokens)
                              + ([] if config.thinking else ["<think>", "</think>"])}
        self._encode = functools.lru_cache(256)(self._rendered)     # a turn asks for the same prompt more than once

    def encode(self, messages: list[dict]) -> list[int]:
        """The token ids of a prompt, the header of the next assistant message included. Not to be changed."""
        return self._encode(tuple((each["role"], each["content"]) for each in messages))

    def _rendered(self, messages: tuple) -> list[int]:
        return self.tokenizer.apply_chat_template([{"role": role, "content": content} for role, content in messages],
                                                  add_generation_prompt=True, return_dict=False, **self.template)


class LocalPolicy:
    """A transformers model in this process, decoding all requests of a batch in lock step.

    One key-value cache is kept over the turns. A row of it holds an episode's tokens so far; a new prompt keeps the
    longest common prefix and computes the rest. Rows are left-padded; the mask says which slots count. In float32 the
    tokens equal those of one-at-a-time generation; in bfloat16 they depend on the batch.
    """
    lock_step = True

    def __init__(self, config: Config) -> None:
        import torch
        import transformers
        renderer = Renderer(config)
        self.tokenizer, self.encode = renderer.tokenizer, renderer.encode
        self.device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu"
        model, adapter = config.model, config.adapter
        dtype = {"auto": "float32" if self.device == "cpu" else "bfloat16"}.get(config.dtype, config.dtype)
        try:
            self.model = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
            known = inspect.signature(self.model.forward).parameters        # transformers is renaming it
            self.cache_name = "cache" if "cache" in known else "past_key_values"
            if adapter:
                import peft
                self.model = peft.PeftModel.from_pretrained(self.model, adapter)
                if dtype == "float32":          # bfloat16 would round the small update away
                    self.model = self.model.merge_and_unload()
        except (OSError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise InputError(f"--model {model}, --adapter {adapter}: cannot be loaded ({reason})") from None
        self.model.to(self.device).eval()
        stops = self.model.generation_config.eos_token_id
        self.stops = {*(stops if isinstance(stops, list) else [stops]), self.tokenizer.eos_token_id} - {None}
        self.max_context = self.model.config.max_position_embeddings
        self.name = f"{model} + {adapter}" if adapter else model
        self.seed = config.seed
        self.settings = {"dtype": dtype, "device": self.device.split(":")[0], "torch": torch.__version__,
                         **renderer.settings}
        self.rows: dict[Any, tuple[int, list[int]]] = {}    # episode -> (row of the cache, the tokens it holds)
        self.cache: list[tuple[Any, Any]] = []              # keys and values of each layer  (rows, heads, slots, width)
        self.mask: Any = None                               # which slots count               (rows, slots)

    def complete(self, asked: list[Request]) -> list[Completion]:
        """Decode every request until its end-of-turn token or its limit."""
        import torch
        began = time.monotonic()
        with torch.inference_mode():
            kept = [self._common(each) for each in asked]
            groups: dict[int, list[int]] = {}               # rows with a similar number of new tokens share a forward
            for index, each in enumerate(asked):
                groups.setdefault((len(each.prompt) - kept[index]).bit_length(), []).append(index)
            order = [index for _, group in sorted(groups.items()) for index in group]
            parts = [self._prefill([asked[index] for index in group], [kept[index] for index in group])
                     for _, group in sorted(groups.items())]
            ids = self._decode([asked[index] for index in order], *self._joined(parts))
        seconds = time.monotonic() - began
        self.rows = {asked[index].key: (row, asked[index].prompt + ids[row][:-1]) for row, index in enumerate(order)}
        answers = {index: self._completion(asked[index], ids[row], seconds) for row, index in enumerate(order)}
        return [answers[index] for index in range(len(asked))]

    def _completion(self, asked: Request, ids: list[int], seconds: float) -> Completion:
        stopped = ids[-1] in self.stops
        text = self.tokenizer.decode(ids[:-1] if stopped else ids, skip_special_tokens=True,
                                     clean_up_tokenization_spaces=False)
        return Completion(text, ids, "stop" if stopped else "length", seconds, len(asked.prompt), len(ids))

    def _common(self, asked: Request) -> int:
        """Tokens of the prompt that the episode's cache row already holds, one fewer than the prompt at most."""
        held = self.rows.get(asked.key, (0, []))[1]
        most = min(len(held), len(asked.prompt) - 1)
        return next((i for i in range(most) if held[i] != asked.prompt[i]), most)

    def _prefill(self, asked: list[Request], kept: list[int]) -> tuple[list, Any, Any]:
        """Cache, mask and next-token logits after the prompts of some requests, computed from what is kept of each."""
        import torch
        old, new = max(kept), max(len(each.prompt) - keep for each, keep in zip(asked, kept))
        slots = torch.zeros(len(asked), old, dtype=torch.long)
        mask = torch.zeros(len(asked), old + new, dtype=torch.long)
        ids, positions = torch.zeros(len(asked), new, dtype=torch.long), torch.zeros(len(asked), new, dtype=torch.long)
        rows = torch.tensor([self.rows.get(each.key, (0, []))[0] for each in asked])
        for b, (each, keep) in enumerate(zip(asked, kept)):
            fresh = len(each.prompt) - keep
            if keep:
                slots[b, old - keep:] = self.mask[rows[b]].nonzero().flatten()[:keep].cpu()
            mask[b, old - keep:old] = mask[b, old + new - fresh:] = 1
            ids[b, new - fresh:] = torch.tensor(each.prompt[keep:])
            positions[b, new - fresh:] = torch.arange(keep, len(each.prompt))
        cache = [(keys[rows[:, None], :, slots].transpose(1, 2), values[rows[:, None], :, slots].transpose(1, 2))
                 for keys, values in self.cache] if old else []
        logits, cache = self._forward(ids, positions, mask, cache)
        return cache, mask, logits

    def _forward(self, ids: Any, positions: Any, mask: Any, cache: list | Any) -> tuple[Any, Any]:
        """Logits at the last position (rows, vocabulary), and the cache with the new tokens in it."""
        import transformers
        if isinstance(cache, list):
            layers, cache = cache, transformers.DynamicCache()
            for index, (keys, values) in enumerate(layers):
                cache.update(keys, values, index)
        out = self.model(input_ids=ids.to(self.device), position_ids=positions.to(self.device),
                         attention_mask=mask.to(self.device), use_cache=True, logits_to_keep=1,
                         **{self.cache_name: cache})
        return out.logits[:, -1].float(), cache

    def _joined(self, parts: list[tuple]) -> tuple[Any, Any, Any]:
        """Several prefilled groups as one batch, left-padded to the longest."""
        import torch
        longest = max(mask.shape[1] for _, mask, _ in parts)
        pad = torch.nn.functional.pad
        layers = []
        for index in range(len(parts[0][0].layers)):
            pairs = [(part[0].layers[index], longest - part[1].shape[1]) for part in parts]
            layers.append((torch.cat([pad(layer.keys, (0, 0, gap, 0)) for layer, gap in pairs]),
                           torch.cat([pad(layer.values, (0, 0, gap, 0)) for layer, gap in pairs])))
        mask = torch.cat([pad(mask, (longest - mask.shape[1], 0)) for _, mask, _ in parts])
        return layers, mask, torch.cat([logits for _, _, logits in parts])

    def _decode(self, asked: list[Request], cache: list, mask: Any, logits: Any) -> list[list[int]]:
        """Sampled ids of each request; leaves cache and mask as the next turn will find them."""
        import torch
        ids: list[list[int]] = [[] for _ in asked]
        live = list(range(len(asked)))
        draws = [torch.Generator().manual_seed(draw_seed(self.seed, each)) if each.temperature else None
                 for each in asked]
        while True:
            chosen = self._sample(logits, asked, draws)
            for row in live:
                ids[row].append(chosen[row])
            live = [row for row in live if chosen[row] not in self.stops and len(ids[row]) < asked[row].max_new_tokens]
            if not live:
                break
            column = torch.zeros(len(asked), 1, dtype=torch.long)
            column[live] = 1                            # a finished row only keeps step: its new slots do not count
            mask = torch.cat([mask, column], 1)
            logits, cache = self._forward(torch.tensor(chosen)[:, None], mask.sum(1, keepdim=True) - 1, mask, cache)
        self.mask = mask
        self.cache = cache if isinstance(cache, list) else [(layer.keys, layer.values) for layer in cache.layers]
        return ids

    def _sample(self, logits: Any, asked: list[Request], draws: list) -> list[int]:
        """The next token of each row: the likeliest, or drawn from the row's own source of chance."""
        import torch
        chosen = logits.argmax(-1).tolist()
        for row, draw in enumerate(draws):
            if draw is not None:
                chances = torch.softmax(logits[row] / asked[row].temperature, -1).cpu()
                chosen[row] = int(torch.multinomial(chances, 1, generator=draw))
        return chosen


class ApiPolicy:
    """A model behind an OpenAI-compatible server (vLLM, SGLang, llama.cpp): each request on its own, as they come.

    Completions on the token ids that our own tokenizer renders, so that prompts are those of LocalPolicy; with --chat
    the server renders. A completion changes nothing, so it may be asked for again.
    """
    lock_step = False

    def __init__(self, config: Config) -> None:
        self.config, self.chat = config, config.chat
        base = config.api.rstrip("/")
        self.base = base if base.endswith("/v1") else f"{base}/v1"
        self.model = config.served_name or config.model
        self.name, self.session = f"{self.model} at {self.base}", requests.Session()
        if key := read_key(config):
            self.session.headers["Authorization"] = f"Bearer {key}"
        self.fields = read_fields(config.api_fields)
        self.max_context = self._look() or 10**9        # not told: the server's own 400 ends the episode
        if self.chat:
            self.settings = {"chat_template_kwargs": {"enable_thinking": config.thinking}, "control_tokens": [
                "<|endoftext|>", "<|im_end|>", "<|im_start|>"] + ([] if config.thinking else ["<think>", "</think>"])}
            return
        renderer = Renderer(config)
        self.settings, self._encode, eos = renderer.settings, renderer.encode, renderer.tokenizer.eos_token_id
        self.stops = [] if eos is None else [eos]

    def encode(self, messages: list[dict]) -> list[int] | None:
        return None if self.chat else self._encode(messages)

    def complete(self, asked: list[Request]) -> list[Completion]:
        return [self._one(each) for each in asked]

    def _look(self) -> int | None:
        """Check the model's name against the server's list, where it has one; the context length, where it tells."""
        try:
            status, data, _ = http(self.session, "GET", f"{self.base}/models", 30)
            served = {each["id"]: each for each in json.loads(data)["data"]} if status == 200 else {}
        except requests.ConnectionError as error:
            raise InputError(f"--api {self.base}: cannot be reached ({error}); is the server up?") from None
        except (requests.RequestException, ValueError, KeyError, TypeError):
            return None                                 # no such list: the first completion will tell
        if served and self.model not in served:
            raise InputError(f"--api {self.base} serves {sorted(served)}, not {self.model!r}: --served-name takes one")
        return served.get(self.model, {}).get("max_model_len")

    def _one(self, asked: Request) -> Completion:
        """One completion; asked for again, with growing pauses, while the server is busy, loading or out of reach."""
        url = f"{self.base}/{'chat/' if self.chat else ''}completions"
        began, pause, garbled = time.monotonic(), 0.5, 0
        while True:
            sent, pause_asked = time.monotonic(), 0.0
            try:
                status, data, headers = http(self.session, "POST", url, self.config.api_timeout, self._body(asked))
                if status == 200:
                    return self._completion(json.loads(data), asked, time.monotonic() - sent)
                reason = f"HTTP {status}: {detail(data)}"
                asked_for = headers.get("Retry-After", "")
                pause_asked = float(asked_for) if asked_for.isdigit() else 0.0
                if status not in (408, 429) and status < 500:
                    raise self._refusal(status, detail(data))
            except requests.RequestException as error:
                reason = str(error)
            except (ValueError, KeyError, IndexError, TypeError) as error:
                reason, garbled = f"no completion in the answer, {type(error).__name__}: {error}", garbled + 1
            if garbled == 3 or time.monotonic() + max(pause, pause_asked) - began > self.config.wait:
                raise PolicyError(f"{url}: {reason} (--wait {self.config.wait:.0f})")
            time.sleep(max(pause, pause_asked))
            pause = min(pause * 2, 30.0)

    def _body(self, asked: Request) -> dict:
        """Every sampling field is sent: servers fill gaps from the model's generation_config.json."""
        if self.chat:
            given = {"messages": asked.messages, "chat_template_kwargs": self.settings["chat_template_kwargs"]}
        else:
            given = {"prompt": asked.prompt, "stop_token_ids": self.stops, "return_token_ids": True}
        body = {"model": self.model, **given, "max_tokens": asked.max_new_tokens, "temperature": asked.temperature,
                "top_p": 1.0, "top_k": -1, "min_p": 0.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
                "repetition_penalty": 1.0, "repeat_penalty": 1.0, "seed": draw_seed(self.config.seed, asked) >> 32,
                "n": 1, "stream": False, "cache_prompt": False, **self.fields}
        return {name: value for name, value in body.items() if value is not None}

    def _completion(self, answer: dict, asked: Request, seconds: float) -> Completion:
        """The completion in an answer; KeyError, TypeError, ValueError if none; InputError if another model's."""
        model, choice = answer.get("model", self.model), answer["choices"][0]
        if not re.fullmatch(re.escape(self.model) + r"(-\d{4}(-\d\d-\d\d)?)?", model):
            raise InputError(f"--api {self.base}: asked for {self.model!r}, answered by {model!r} (--served-name)")
        finish, usage = choice["finish_reason"], answer["usage"]
        if finish not in ("stop", "length"):
            raise ValueError(f"finish_reason {finish!r}")
        text, ids = choice["message"]["content"] or "" if self.chat else choice["text"], choice.get("token_ids")
        if asked.prompt is not None and usage["prompt_tokens"] != len(asked.prompt):
            raise InputError(f"--api {self.base} counts {usage['prompt_tokens']} prompt tokens, --model's tokenizer "
                             f"{len(asked.prompt)}: is it the tokenizer of the served model?")
        if ids is not None and (ids[-1:] == self.stops) != (finish == "stop"):
            ids = None                                  # not as sampled: training encodes the text instead
        return Completion(str(text), ids, finish, seconds, int(usage["prompt_tokens"]), int(usage["completion_tokens"]))

    def _refusal(self, status: int, reason: str) -> Exception:
        """What a 4xx answer means here."""
        if status in (400, 413, 422) and re.search(r"context|too long|maximum.*length|exceed", reason, re.IGNORECASE):
            return ContextOverflow(reason)
        if status in (401, 403):
            return InputError(f"--api {self.base}: HTTP {status}, the key is missing or wrong (--api-key-file, "
                              f"--api-key-env): {reason}")
        if status == 404:
            return InputError(f"--api {self.base}: HTTP 404, no model {self.model!r} (--served-name) or path: {reason}")
        return InputError(f"--api {self.base}: HTTP {status}: {reason}; --api-fields can change or remove a field")


def read_key(config: Config) -> str | None:
    """The key for --api, from the file or the environment variable that a flag names."""
    if config.api_key_file:
        try:
            return Path(config.api_key_file).read_text(encoding="utf-8").strip()
        except OSError as error:
            raise InputError(f"--api-key-file {config.api_key_file}: {error}") from None
    if config.api_key_env and not os.environ.get(config.api_key_env):
        raise InputError(f"--api-key-env {config.api_key_env}: there is no such environment variable")
    return os.environ[config.api_key_env] if config.api_key_env else None


def read_fields(text: str) -> dict:
    """--api-fields as a mapping."""
    try:
        fields = json.loads(text)
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        raise InputError(f"--api-fields {text}: must be a JSON object")
    return fields


# ---------------------------------------------------------------------------------------------------------------------
# Many episodes.

def read_tasks(path: str, limit: int = 0) -> list[dict]:
    """The tasks of a file: CodeGym rows {ability, prompt} or AgentGym rows {item_id, system (optional)}."""
    tasks: dict[str, dict] = {}
    for line, row in deloop.read_jsonl(path):
        try:
            task = agentgym_task(row) if "item_id" in row else codegym_task(row)
        except (KeyError, TypeError, IndexError, AttributeError, ValueError) as error:
            raise InputError(f"{path}, line {line}: not a task row ({type(error).__name__}: {error})") from None
        if task["task_id"] in tasks:
            raise InputError(f"{path}, line {line}: task {task['task_id']} stands twice in the file")
        tasks[task["task_id"]] = task
    if not tasks:
        raise InputError(f"{path}: no tasks")
    return list(tasks.values())[:limit or None]


def codegym_task(row: dict) -> dict:
    """task_id (from the content), env_str (what /start takes) and the two prompt messages."""
    ability, prompt = row["ability"], row["prompt"]
    if [each["role"] for each in prompt] != ["system", "user"]:
        raise ValueError("prompt must be a system and a user message")
    env_str = ability.split("@", 1)[1]
    name = row.get("code_id") or env_str.split("__")[0]
    digest = hashlib.sha256(ability.encode()).hexdigest()
    return {"task_id": f"{name}-{digest[:8]}", "env_str": env_str, "prompt": prompt}


def agentgym_task(row: dict) -> dict:
    """item_id "textcraft_12" is task 12 of the world textcraft; system replaces our own instructions."""
    world, index = row["item_id"].rsplit("_", 1)
    if world not in INSTRUCTIONS and not row.get("system"):
        raise ValueError(f"no instructions for {world!r}: give the row a field system")
    return {"task_id": row["item_id"], "world": world, "index": int(index), "system": row.get("system")}


def share(config: Config) -> tuple[int, int]:
    """(i, n): this process runs every n-th episode from the i-th on; from --shard, or as accelerate launch says."""
    text = config.shard or f"{int(os.environ.get('RANK', 0)) + 1}/{os.environ.get('WORLD_SIZE', 1)}"
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if not found or not 1 <= int(found[1]) <= int(found[2]):
        raise InputError(f"--shard {text}: must be i/n with i from 1 to n, such as 1/4")
    return int(found[1]), int(found[2])


def own_out(config: Config) -> Config:
    """The configuration with this process's own output file: base.jsonl, or base.1-of-4.jsonl."""
    i, n = share(config)
    path = Path(config.out)
    return config if n == 1 else dataclasses.replace(config, shard=f"{i}/{n}", out=str(
        path.with_name(f"{path.stem}.{i}-of-{n}{path.suffix}")))


def resume(out: str, settings: dict) -> set[tuple[str, int]]:
    """The episodes that already have a result in the output file; a half-written last line and errors are removed."""
    if settings.get("overwrite") and Path(out).exists():
        os.remove(out)
    if not Path(out).exists():
        return set()
    kept, bad = set(), False
    temporary = f"{out}.{os.getpid()}.tmp"
    with (open(out, encoding="utf-8", errors="surrogateescape") as old,     # a line may be torn within a character
          open(temporary, "w", encoding="utf-8", errors="surrogateescape") as new):
        for line in old:                    # one at a time: a file may be larger than the memory
            trajectory = whole(line, out)
            if trajectory:
                same_settings(out, trajectory.get("config") or {}, settings)
            key = trajectory and (trajectory["task_id"], trajectory["sample"])
            if trajectory and trajectory["status"] in deloop.RESULTS and key not in kept:
                kept.add(key)
                new.write(line)
            else:
                bad = True
        new.flush()
        os.fsync(new.fileno())
    os.replace(temporary, out) if bad else os.remove(temporary)
    return kept


def whole(line: str, out: str) -> dict | None:
    """The trajectory on a line, None if the line is the torn last one. Another kind of file is refused untouched."""
    try:
        trajectory = json.loads(line)
    except ValueError:
        trajectory = None
    if line.endswith("\n") and (not isinstance(trajectory, dict) or trajectory.get("format") != "deloop-trajectory/1"):
        raise InputError(f"{out} holds a line that is no trajectory: choose another --out, or --overwrite")
    return trajectory if line.endswith("\n") else None


def same_settings(out: str, stored: dict, settings: dict) -> None:
    """Refuse to mix episodes of different settings. A setting that the file does not know had its default."""
    default = {each.name: each.default for each in dataclasses.fields(Config)}
    differ = sorted(key for key in settings.keys() | stored.keys() if key not in deloop.MAY_DIFFER
                    and settings.get(key, default.get(key)) != stored.get(key, default.get(key)))
    if differ:
        raise InputError(f"{out} was written with other settings of {', '.join(differ)}: "
                         "use them again, another --out, or --overwrite")


def rollout(config: Config, policy: Any) -> dict[str, int]:
    """Run every (task, sample) that has no result yet; returns how many episodes ended with which status."""
    config = own_out(config)
    settings = {**dataclasses.asdict(config), **policy.settings}
    tasks, (i, n) = read_tasks(config.tasks, config.limit), share(config)
    kept = resume(config.out, settings)
    every = [(task, sample) for task in tasks for sample in range(config.samples)][i - 1::n]
    jobs = deque(each for each in every if (each[0]["task_id"], each[1]) not in kept)
    progress, environments = Progress(len(jobs), len(kept)), POOLS[config.env](config)
    crew, pool = Crew(config.out, policy, environments), ThreadPoolExecutor(config.batch)
    first = jobs[0] if config.verbose and jobs else None
    live: dict[Future, Any] = {}                        # what runs now, and the environment that it moves on
    try:
        while jobs or live:
            while jobs and len(live) < config.batch and (env := wait_for(pool, crew, config, bool(live))):
                job = jobs.popleft()
                say = print if job is first else quiet
                crew.runs[env] = episode(*job, env, policy, config, settings, say)
                live[pool.submit(crew.advance, env, None)] = env
            asked: dict[Any, Request] = {}
            for future in finished(live, policy.lock_step):
                env, (wanted, trajectory) = live.pop(future), future.result()
                if trajectory is None:
                    asked[env] = wanted
                else:
                    progress.add(trajectory)
            for env, answer in zip(asked, policy.complete(list(asked.values())) if asked else ()):
                live[pool.submit(crew.advance, env, answer)] = env
    finally:
        crew.stop.set()
        pool.shutdown()                                 # what is being written is finished first
        crew.close()
        if owed := environments.settle():
            print(f"warning: {owed} instances stay taken until the server frees them itself", file=sys.stderr)
    progress.end(config.out)
    return dict(progress.statuses)


def finished(live: dict[Future, Any], lock_step: bool) -> list[Future]:
    """Wait for the calls in flight: in lock step for all, but not long for stragglers; otherwise for the first."""
    done = wait(live, timeout=STRAGGLE, return_when=ALL_COMPLETED)[0] if lock_step else None
    return list(done or wait(live, return_when=FIRST_COMPLETED)[0])


STRAGGLE = 2.0          # seconds that a batch waits for slow tools; whoever comes later joins the next one
POOLS = {"codegym": CodeGymPool, "agentgym": AgentGymPool}


class Crew:
    """What lends environments and moves episodes on, in threads: an interrupt meets the main thread alone, so no line
    is left half written and no environment is forgotten."""

    def __init__(self, out: str, policy: Any, environments: Any) -> None:
        self.out, self.policy, self.environments = out, policy, environments
        self.stop, self.lock = threading.Event(), threading.Lock()
        self.runs: dict[Any, Generator | None] = {}     # every environment that is open, and its episode

    def open(self) -> Any:
        """A free environment, or why there is none."""
        env = self.environments.open()
        if not isinstance(env, str):
            self.runs[env] = None
        return env

    def advance(self, env: Any, answer: Completion | None) -> tuple[Request | None, dict | None]:
        """Let one episode go on to its next request, or to its end and into the file -> (request, trajectory)."""
        run = self.runs[env]
        while not self.stop.is_set():
            try:
                asked = run.throw(answer) if isinstance(answer, Exception) else run.send(answer)
            except StopIteration as end:
                with self.lock:
                    deloop.append_jsonl(self.out, end.value)
                del self.runs[env]
                return None, end.value
            if self.policy.lock_step:
                return asked, None
            try:
                [answer] = self.policy.complete([asked])
            except (ContextOverflow, PolicyError) as error:
                answer = error
        return None, None

    def close(self) -> None:
        """Interrupted: stop the sessions and release the instances of all open episodes, those not yet begun too."""
        with ThreadPoolExecutor(16) as pool:
            for env, run in list(self.runs.items()):
                begun = run and inspect.getgeneratorstate(run) != inspect.GEN_CREATED
                pool.submit(run.close if begun else env.close)


def wait_for(pool: ThreadPoolExecutor, crew: Crew, config: Config, busy: bool) -> Any:
    """A free environment. None while others of ours are running and will free one; else waits, with growing pauses."""
    began, pause = time.monotonic(), 0.5
    while isinstance(env := pool.submit(crew.open).result(), str):
        if busy:
            return None
        if pause == 0.5:
            print(f"waiting up to {config.wait:.0f} s for an environment: {env}", flush=True)
        if time.monotonic() - began > config.wait:
            raise InputError(f"no environment in {config.wait:.0f} s ({env}): is the server at --server up?")
        time.sleep(pause)
        pause = min(pause * 2, 30.0)
    return env


class Progress:
    """What one sees: at most one line in two seconds, and a table at the end."""

    def __init__(self, total: int, kept: int) -> None:
        self.total, self.done, self.results, self.looping, self.won, self.tokens = total, 0, 0, 0, 0, 0
        self.began, self.last = time.monotonic(), 0.0
        self.statuses: Counter = Counter()
        print(f"{total} episodes to run, {kept} already have a result", flush=True)

    def add(self, trajectory: dict) -> None:
        self.done, self.told = self.done + 1, False
        self.statuses[trajectory["status"]] += 1
        self.tokens += sum(each["completion_tokens"] for each in trajectory["turns"] + trajectory["compactions"])
        if trajectory["status"] in deloop.RESULTS:      # an error says nothing about the policy
            self.results += 1
            self.won += bool(deloop.success(trajectory))
            self.looping += any(deloop.loop_flags((step.action, step.observation) for step in deloop.steps(trajectory)))
        if time.monotonic() - self.last > 2:
            self.line()

    def line(self) -> None:
        self.last, self.told = time.monotonic(), True
        seconds, n = self.last - self.began, self.results or 1
        left, (low, high) = (self.total - self.done) * seconds / self.done, deloop.wilson(self.looping, n)
        print(f"{self.done}/{self.total} episodes, {self.done / seconds * 60:.1f}/min, "
              f"{self.tokens / seconds:.0f} tokens/s, {left:.0f} s left, loop rate {self.looping / n:.1%} "
              f"[{low:.1%}, {high:.1%}], success {self.won / n:.1%}", flush=True)

    def end(self, out: str) -> None:
        if self.done and not self.told:
            self.line()
        for status in (*deloop.RESULTS, *deloop.ERRORS):
            if self.statuses[status]:
                print(f"  {status:16} {self.statuses[status]:6}  {self.statuses[status] / self.done:6.1%}")
        pairs = Path(out).with_suffix(".pairs.jsonl")
        print(f"next: python deloop.py mine {shlex.quote(out)} --out {shlex.quote(str(pairs))}", flush=True)


def dry_run(config: Config) -> int:
    """The first prompt exactly as the model sees it, with token counts. CodeGym's server is not needed for it."""
    task = read_tasks(config.tasks, 1)[0]
    if config.env == "codegym":
        messages = CodeGym.prompt(task)
    else:
        env = AgentGymPool(config).open()
        if isinstance(env, str):
            raise InputError(env)
        try:
            messages = env.start(task)
        finally:
            env.close()
    if config.api and config.chat:
        print(json.dumps(messages, indent=1, ensure_ascii=False))
        print(f"\n--chat: the server renders; about {characters(messages)} tokens (characters/4)")
        return 0
    renderer = Renderer(config)
    ids = renderer.encode([dict(each) for each in messages])
    print(renderer.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
    alone = [len(renderer.tokenizer.encode(each["content"], add_special_tokens=False)) for each in messages]
    print(f"\n{task['task_id']}: {len(ids)} tokens (system {alone[0]}, task {alone[1]}, "
          f"template {len(ids) - sum(alone)}); memory {config.memory}, budget {config.budget}")
    return 0


def check(config: Config) -> None:
    """Refuse what cannot work before minutes go into loading a model."""
    if config.keep_last < 2 or config.keep_last % 2:
        raise InputError(f"--keep-last {config.keep_last}: must be even and at least 2 (pairs of call and observation)")
    if config.samples > 1 and not config.temperature:
        raise InputError("--samples above 1 needs a --temperature: greedy rollouts of one task are all the same")
    if config.api and config.adapter:
        raise InputError("--adapter goes with --model in process; a server has its adapter under a name: --served-name")
    if config.chat and not config.api:
        raise InputError("--chat needs --api")
    if config.batch < 1 or config.samples < 1 or config.max_turns < 1:
        raise InputError("--batch, --samples and --max-turns must be at least 1")
    tasks = read_tasks(config.tasks, config.limit)
    if ("world" in tasks[0]) != (config.env == "agentgym"):
        raise InputError(f"--env {config.env}: {config.tasks} holds tasks of the other kind")
    share(config)


def interrupted(*_: Any) -> None:
    """Ctrl-C: what is in flight at a server comes to its end; the second one does not wait for it."""
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    print("\nfinishing the requests in flight; Ctrl-C again leaves at once", file=sys.stderr)
    raise KeyboardInterrupt


def main(argv: list[str]) -> int:
    """The command line; returns the exit code: 1 if episodes ended in an error, 130 after Ctrl-C."""
    memories = "\n".join(f"  {name:9} {' '.join(each.__doc__.split())}" for name, each in MEMORIES.items())
    config = deloop.config_from_args(Config, argv, f"{__doc__}{memories}")
    check(config)
    if config.dry_run:
        return dry_run(config)
    Path(config.out).parent.mkdir(parents=True, exist_ok=True)
    policy = ApiPolicy(config) if config.api else LocalPolicy(config)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))     # a polite kill releases the instances too
    signal.signal(signal.SIGINT, interrupted)
    print(json.dumps({**dataclasses.asdict(own_out(config)), **policy.settings}, indent=1), flush=True)
    try:
        statuses = rollout(config, policy)
    except KeyboardInterrupt:
        print(f"\ninterrupted: what has ended is in {own_out(config).out}, every environment is released. To go on:\n"
              f"  {shlex.join([sys.executable, *sys.argv])}", file=sys.stderr)
        return 130
    failed = sum(count for status, count in statuses.items() if status in deloop.ERRORS)
    if failed:
        print(f"{failed} episodes ended in an error of the environment or the model's server (see error in the file); "
              "the same command runs them again", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    deloop.run(main)
