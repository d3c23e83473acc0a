"""DeLoop in motion: an agent on a CodeGym server under the document's compression harness, one trajectory a line.

    python rollout.py --server http://[::1]:8000 --tasks tasks.jsonl --model Qwen/Qwen3-8B --out base.jsonl

Greedy decoding, at most 30 turns. When the rendered prompt exceeds 4,096 tokens, everything between the task and the
last 6 messages is replaced by a summary that the same model writes. The same command goes on after a kill.

The way of the data: tasks -> `rollout` keeps --batch episodes in flight -> each `episode` is a generator that yields a
Request whenever it needs the model -> `LocalPolicy.complete` answers all of them in one batch -> append to --out.
"""
from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
import re
import signal
import sys
import time
import uuid
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import requests

import deloop
from deloop import HEAD, InputError, compacted, option

SUMMARY_REQUEST = (
    "Pause here and write a summary of the conversation so far; it will replace these messages. State, in short lines: "
    "the facts learnt; the calls already made with their results; the current values; what is not yet done. "
    "Write only what the conversation shows. Do not plan and do not call a function.")


@dataclass(frozen=True)
class Config:
    """Every setting of a rollout. A trajectory carries all of them."""
    server: str = option("CodeGym manager URL, several separated by commas, e.g. http://[::1]:8000")
    tasks: str = option("JSONL of CodeGym task rows (fields ability and prompt)")
    out: str = option("trajectory file to append to; episodes with a result in it are not run again")
    model: str = option("model name or folder, run in process with transformers")
    adapter: str | None = option("PEFT adapter folder on top of the model", None)
    memory: str = option("what becomes of a long history (document: summary)", "summary", choices=("summary", "full"))
    budget: int = option("summary: compress a prompt of more tokens (document: 4,096; the count: DEV-1)", 4096)
    keep_last: int = option("summary: messages kept behind the summary, even (document: 6)", 6)
    max_turns: int = option("turns an episode may take (document: 30)", 30)
    max_new_tokens: int = option("tokens of one reply (not stated in the document; DEV-2)", 1024)
    summary_tokens: int = option("tokens of one summary (not stated; DEV-2)", 512)
    summary_request: str = option("what asks for a summary (not stated; DEV-3)", SUMMARY_REQUEST)
    thinking: bool = option("let Qwen3 think before it acts (not stated; DEV-4)", False)
    temperature: float = option("0 is greedy (document: greedy)", 0.0)
    samples: int = option("rollouts of each task; more than 1 needs a temperature (document: 1)", 1)
    seed: int = option("seed of the sampling", 0)
    limit: int = option("run only the first N tasks, 0 for all", 0)
    max_observation_chars: int = option("characters of an observation shown to the model (not stated; DEV-5)", 8000)
    batch: int = option("episodes in flight", 16)
    dtype: str = option("auto: bfloat16 on a GPU, float32 elsewhere", "auto", choices=("auto", "float32", "bfloat16"))
    step_timeout: float = option("seconds a tool call may run on the server (CodeGym's own default)", 30.0)
    wait: float = option("seconds to wait for a free environment before giving up", 600.0)


MAY_DIFFER = ("server", "tasks", "out", "limit", "batch", "wait", "samples")       # between a run and its resume


# ---------------------------------------------------------------------------------------------------------------------
# The environment: CodeGym's manager and workers.

class EnvError(Exception):
    """The environment or its server failed. Not the policy's doing: the episode is run again on resume."""


class Outcome(NamedTuple):
    """What became of one call. executed: the environment's state may have changed and observation is its answer."""
    executed: bool
    observation: str | None
    detail: str         # what the agent reads: the observation, or why the call was not executed


def acquire(servers: Iterable[str]) -> tuple[str, str, str] | str:
    """(manager, uid, worker URL) of a free environment instance, or a str that says why there is none just now."""
    reason = "no server given"
    for manager in servers:
        try:
            reply = requests.get(f"{manager}/get_instance", timeout=30)
            if reply.status_code == 200:
                instance = reply.json()
                host = urlsplit(manager).hostname or ""
                host = f"[{host}]" if ":" in host else host
                return manager, str(instance["uid"]), f"{urlsplit(manager).scheme}://{host}:{int(instance['port'])}"
            reason = f"{manager}: HTTP {reply.status_code}, every worker is taken"
        except (requests.RequestException, ValueError, KeyError, TypeError) as error:
            reason = f"{manager}: {error}"
    return reason


class CodeGym:
    """One session on one worker, from start to close."""

    def __init__(self, instance: tuple[str, str, str], env_str: str, timeout: float) -> None:
        self.manager, self.uid, self.worker = instance
        self.env_str, self.timeout = env_str, timeout
        self.session = uuid.uuid4().hex
        self.applied = 0                        # steps the server has answered; equals its step_count
        self.http = requests.Session()

    def start(self) -> None:
        """Create the environment. Idempotent on the server, but a failure here means a bad task or a dead worker."""
        self._call("POST", "/start", {"session_id": self.session, "env_str": self.env_str, "env_name": "codegym_v1"})

    def step(self, action: dict, again: bool = True) -> Outcome:
        """Execute one call, never twice: sent again only where the server's step_count proves it was not applied."""
        body = {"session_id": self.session, "action": json.dumps(action, ensure_ascii=False), "timeout": self.timeout}
        try:
            reply = self.http.post(f"{self.worker}/step", json=body, timeout=self.timeout + 10)
        except requests.RequestException as error:      # the call or its answer was lost: which of the two?
            applied = self._call("GET", f"/get_attribute?session_id={self.session}&attribute_name=step_count")
            if applied.get("attribute_value") == self.applied and again:
                return self.step(action, again=False)
            raise EnvError(f"the observation of step {self.applied} is lost ({error})") from None
        if reply.status_code == 500:                    # it raised or ran out of time: the server kept the old state
            return Outcome(False, None, f"Error: the call was not executed ({_detail(reply)})")
        answer = self._checked(reply, "/step")
        if not isinstance(answer.get("observation"), str):
            raise EnvError(f"{self.worker}/step answered without an observation: {str(answer)[:200]}")
        self.applied += 1
        return Outcome(True, answer["observation"], answer["observation"])

    def done(self) -> bool:
        return bool(self._call("GET", f"/is_done?session_id={self.session}").get("done"))

    def reward(self) -> float:
        return float(self._call("GET", f"/reward?session_id={self.session}").get("reward", 0.0))

    def close(self) -> None:
        """Stop the session, then release the instance; a failure of either leaves it to the server's own clean-up."""
        for send in (lambda: self.http.post(f"{self.worker}/stop", json={"session_id": self.session}, timeout=10),
                     lambda: requests.get(f"{self.manager}/release_instance", params={"uid": self.uid}, timeout=10)):
            try:
                send()
            except requests.RequestException as error:
                print(f"warning: instance {self.uid} may stay taken ({error})", file=sys.stderr)
        self.http.close()

    def _call(self, method: str, path: str, body: dict | None = None) -> dict:
        """A call that may be repeated: it changes nothing, or (start) gives the same result."""
        for pause in (0.2, 1.0, None):
            try:
                return self._checked(self.http.request(method, self.worker + path, json=body, timeout=30), path)
            except requests.RequestException as error:
                if pause is None:
                    raise EnvError(f"{self.worker}{path}: {error}") from None
                time.sleep(pause)
        raise AssertionError("unreachable")

    def _checked(self, reply: requests.Response, path: str) -> dict:
        """The JSON object of a 200 answer."""
        try:
            answer = reply.json() if reply.status_code == 200 else None
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise EnvError(f"{self.worker}{path}: HTTP {reply.status_code}, {_detail(reply)}")
        return answer


def _detail(reply: requests.Response) -> str:
    """The reason in a server's error body."""
    try:
        return str(reply.json()["detail"])[:500]
    except (ValueError, KeyError, TypeError):
        return reply.text[:200]


# ---------------------------------------------------------------------------------------------------------------------
# What the model wrote.

BEGIN, END = "<|FunctionCallBegin|>", "<|FunctionCallEnd|>"
FORM = f'{BEGIN}[{{"name": "function_name", "parameters": {{"key": "value"}}}}]{END}'
ADVICE = {      # what the agent reads after a reply that holds no call to execute; keyed by its parse status
    "no_call": f"Error: no function call found. Call exactly one function, written as {FORM}",
    "cut": "Error: your reply reached the token limit before the call was complete. Be brief and call one function.",
    "bad_json": f"Error: the function call is not valid JSON. Write it as {FORM}",
    "no_name": f"Error: the function call has no name. Write it as {FORM}",
    "bad_parameters": f"Error: parameters must be an object. Write the call as {FORM}",
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
    except (ValueError, RecursionError):
        return None, "cut" if finish == "length" and END not in text[begin:] else "bad_json", text
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"]:
        return None, "no_name", text
    parameters = call.get("parameters") or {}
    if not isinstance(parameters, dict):
        return None, "bad_parameters", text
    action, tail = {"name": call["name"], "parameters": parameters}, re.sub(r"^\s*\]?\s*", "", text[end:])
    if tail.rstrip() == END:
        return action, "ok", text
    return (action, "extra", text[:end] + "]" + END) if tail.strip() else (action, "unclosed", text)


# ---------------------------------------------------------------------------------------------------------------------
# One episode.

class Request(NamedTuple):
    """What an episode asks of the policy. key names the episode, whose earlier prompts may still be cached."""
    key: Any
    messages: list[dict]
    prompt: list[int]
    max_new_tokens: int


class Completion(NamedTuple):
    """The policy's answer. ids as sampled, with the end-of-turn token iff finish is "stop" (else "length")."""
    text: str
    ids: list[int]
    finish: str
    seconds: float


def episode(task: dict, sample: int, env: CodeGym, policy: Any, config: Config,
            settings: dict) -> Generator[Request, Completion, dict]:
    """One rollout: yields a Request whenever the model is needed, takes its Completion, returns the trajectory."""
    messages: list[dict] = [{"role": each["role"], "content": each["content"]} for each in task["prompt"]]
    turns: list[dict] = []
    compactions: list[dict] = []
    status, reward, failure = "turn_limit", None, None
    try:
        env.start()
        while len(turns) < config.max_turns:
            yield from compact((task["task_id"], sample), messages, compactions, len(turns), policy, config, settings)
            context = compacted(messages, compactions[-1] if compactions else None, settings)
            prompt = policy.encode(context)
            if len(prompt) + config.max_new_tokens > policy.max_context:
                status = "context_overflow"
                break
            reply = yield Request((task["task_id"], sample), context, prompt, config.max_new_tokens)
            action, parse, text = parse_call(reply.text, reply.finish)
            outcome = env.step(action) if action else Outcome(False, None, ADVICE[parse])
            turns.append({
                "message": len(messages), "action": action, "executed": outcome.executed,
                "observation": outcome.observation, "parse": parse, "finish": reply.finish,
                "prompt_tokens": len(prompt), "completion_tokens": len(reply.ids), "completion_ids": reply.ids,
                "prompt_sha256": deloop.prompt_hash(context),
                "prompt_ids_sha256": deloop.ids_hash(prompt), "seconds": round(reply.seconds, 3)})
            messages += [{"role": "assistant", "content": deloop.harmless(text, settings)},
                         {"role": "user", "content": outcome.detail}]       # the role: DEV-6
            if outcome.executed and env.done():
                status = "done"
                break
        reward = env.reward()
    except EnvError as error:
        status, failure = "env_error", str(error)
    finally:
        env.close()
    return {"format": "deloop-trajectory/1", "task_id": task["task_id"], "sample": sample, "seed": config.seed,
            "env": "codegym", "policy": policy.name, "config": settings, "status": status, "reward": reward,
            "error": failure, "messages": messages, "turns": turns, "compactions": compactions}


def compact(key: Any, messages: list[dict], compactions: list[dict], turn: int, policy: Any, config: Config,
            settings: dict) -> Generator[Request, Completion, None]:
    """The document's memory: over the budget, all but system, task and the last messages becomes a summary.

    At most once a turn, so a long tail cannot summarise its own summary for ever. The summary is rolling: it is written
    from the earlier summary and the messages that now leave. An empty one drops them without a trace (DEV-7).
    """
    last = compactions[-1] if compactions else None
    start, end = (last["dropped"][1] if last else HEAD), len(messages) - config.keep_last
    if config.memory != "summary" or end <= start:
        return
    before = len(policy.encode(compacted(messages, last, settings)))
    if before <= config.budget:
        return
    leaving = compacted(messages[:end], last, settings)
    leaving[-1]["content"] += f"\n\n{config.summary_request}"       # two user messages in a row break some templates
    prompt = policy.encode(leaving)
    limit = min(config.summary_tokens, policy.max_context - len(prompt))
    reply = (yield Request(key, leaving, prompt, limit)) if limit > 0 else Completion("", [], "length", 0.0)
    event = {"before_turn": turn, "dropped": [HEAD, end], "generation": len(compactions) + 1, "finish": reply.finish,
             "summary": deloop.harmless(reply.text.strip(), settings) or (last["summary"] if last else ""),
             "prompt_tokens": len(prompt), "completion_tokens": len(reply.ids), "tokens_before": before}
    event["tokens_after"] = len(policy.encode(compacted(messages, event, settings)))
    compactions.append(event)


# ---------------------------------------------------------------------------------------------------------------------
# Policies: encode(messages) -> prompt tokens, complete(requests) -> completions, name, max_context.

class ScriptedPolicy:
    """A function from the prompt messages to the reply, for tests and for teaching. A token is a word."""
    max_context, name, settings = 10**9, "scripted", {}

    def __init__(self, reply: Callable[[list[dict]], str]) -> None:
        self.reply, self.words = reply, {}

    def encode(self, messages: list[dict]) -> list[int]:
        return [self.words.setdefault(word, len(self.words)) for each in messages for word in each["content"].split()]

    def complete(self, asked: list[Request]) -> list[Completion]:
        texts = [self.reply(each.messages) for each in asked]
        return [Completion(text, self.encode([{"content": text}]), "stop", 0.0) for text in texts]


class LocalPolicy:
    """A transformers model in this process, decoding all requests of a batch in lock step.

    One key-value cache is kept over the turns. A row of it holds an episode's tokens so far; a new prompt keeps the
    longest common prefix and computes the rest. Rows are left-padded; the mask says which slots count. In float32 the
    tokens equal those of one-at-a-time generation; in bfloat16 they depend on the batch.
    """

    def __init__(self, config: Config) -> None:
        import torch
        import transformers
        transformers.utils.logging.disable_progress_bar()
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        model, adapter = config.model, config.adapter
        dtype = {"auto": "bfloat16" if self.device == "cuda" else "float32"}.get(config.dtype, config.dtype)
        try:
            self.tokenizer = transformers.AutoTokenizer.from_pretrained(model)
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
        if self.tokenizer.chat_template is None:
            raise InputError(f"--model {model}: its tokenizer has no chat template; use an instruct model")
        self.model.to(self.device).eval()
        stops = self.model.generation_config.eos_token_id
        self.stops = {*(stops if isinstance(stops, list) else [stops]), self.tokenizer.eos_token_id} - {None}
        self.max_context = self.model.config.max_position_embeddings
        self.name = f"{model} + {adapter}" if adapter else model
        self.template = {"enable_thinking": config.thinking}
        self.temperature, self.seed = config.temperature, config.seed
        self.settings = {
            "dtype": dtype, "device": self.device, "torch": torch.__version__, "transformers": transformers.__version__,
            "chat_template_kwargs": self.template,
            "control_tokens": sorted(self.tokenizer.all_special_tokens)
                              + ([] if config.thinking else ["<think>", "</think>"])}
        self.rows: dict[Any, tuple[int, list[int]]] = {}    # episode -> (row of the cache, the tokens it holds)
        self.cache: list[tuple[Any, Any]] = []              # keys and values of each layer  (rows, heads, slots, width)
        self.mask: Any = None                               # which slots count               (rows, slots)

    def encode(self, messages: list[dict]) -> list[int]:
        """The token ids of a prompt, the header of the next assistant message included."""
        return self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False,
                                                  **self.template)

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
        answers = {index: self._completion(ids[row], seconds) for row, index in enumerate(order)}
        return [answers[index] for index in range(len(asked))]

    def _completion(self, ids: list[int], seconds: float) -> Completion:
        stopped = ids[-1] in self.stops
        text = self.tokenizer.decode(ids[:-1] if stopped else ids, skip_special_tokens=True,
                                     clean_up_tokenization_spaces=False)
        return Completion(text, ids, "stop" if stopped else "length", seconds)

    def _common(self, request: Request) -> int:
        """Tokens of the prompt that the episode's cache row already holds, one fewer than the prompt at most."""
        held = self.rows.get(request.key, (0, []))[1]
        most = min(len(held), len(request.prompt) - 1)
        return next((i for i in range(most) if held[i] != request.prompt[i]), most)

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
        draws = [self._generator(each) for each in asked]
        while True:
            chosen = self._sample(logits, draws)
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

    def _generator(self, request: Request) -> Any:
        """The source of chance of one completion: depends on seed, episode and prompt, not on the batch."""
        import torch
        if not self.temperature:
            return None
        digest = hashlib.sha256(f"{self.seed} {request.key} {deloop.ids_hash(request.prompt)}".encode()).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)

    def _sample(self, logits: Any, draws: list) -> list[int]:
        import torch
        if not self.temperature:
            return logits.argmax(-1).tolist()
        chances = torch.softmax(logits / self.temperature, -1).cpu()
        return [int(torch.multinomial(chances[row], 1, generator=draw)) for row, draw in enumerate(draws)]


# ---------------------------------------------------------------------------------------------------------------------
# Many episodes.

def read_tasks(path: str, limit: int = 0) -> list[dict]:
    """CodeGym rows as tasks: task_id (from the content), env_str (what /start takes) and the two prompt messages."""
    tasks: dict[str, dict] = {}
    for line, row in deloop.read_jsonl(path):
        try:
            ability, prompt = row["ability"], row["prompt"]
            assert [each["role"] for each in prompt] == ["system", "user"], "prompt must be a system and a user message"
            env_str = ability.split("@", 1)[1]
            name = row.get("code_id") or env_str.split("__")[0]
        except (KeyError, TypeError, IndexError, AttributeError, AssertionError) as error:
            raise InputError(f"{path}, line {line}: not a CodeGym task row ({type(error).__name__}: {error})") from None
        task_id = f"{name}-{hashlib.sha256(ability.encode()).hexdigest()[:8]}"
        if task_id in tasks:
            raise InputError(f"{path}, line {line}: task {task_id} stands twice in the file")
        tasks[task_id] = {"task_id": task_id, "env_str": env_str, "prompt": prompt}
    if not tasks:
        raise InputError(f"{path}: no tasks")
    return list(tasks.values())[:limit or None]


def resume(out: str, settings: dict) -> dict[tuple[str, int], dict]:
    """The episodes that already have a result in the output file; a half-written last line and errors are removed."""
    if not Path(out).exists():
        return {}
    text = Path(out).read_text(encoding="utf-8")
    if text and not text.endswith("\n"):
        deloop.write_atomic(out, text[:text.rfind("\n") + 1])
    kept = {}
    for trajectory in deloop.read_trajectories(out):
        stored = trajectory.get("config") or {}
        differ = sorted(key for key in settings.keys() | stored.keys()
                        if key not in MAY_DIFFER and settings.get(key) != stored.get(key))
        if differ:
            raise InputError(f"{out} was written with other settings of {', '.join(differ)}: "
                             "use them again, or another --out")
        if trajectory["status"] in deloop.RESULTS:
            kept[trajectory["task_id"], trajectory["sample"]] = trajectory
    deloop.write_atomic(out, "".join(json.dumps(each, ensure_ascii=False) + "\n" for each in kept.values()))
    return kept


def rollout(config: Config, policy: Any) -> dict[str, int]:
    """Run every (task, sample) that has no result yet; returns how many episodes ended with which status."""
    settings = {**dataclasses.asdict(config), **policy.settings}
    tasks = read_tasks(config.tasks, config.limit)
    kept = resume(config.out, settings)
    jobs = [(task, sample) for task in tasks for sample in range(config.samples)
            if (task["task_id"], sample) not in kept]
    progress = Progress(len(jobs), len(kept))
    live: dict[Generator, Completion | None] = {}       # each episode in flight and what it waits to be told
    pool = ThreadPoolExecutor(config.batch)             # the episodes' calls to the server run side by side
    try:
        while jobs or live:
            while jobs and len(live) < config.batch and (instance := wait_for_instance(config, bool(live))):
                task, sample = jobs.pop(0)
                env = CodeGym(instance, task["env_str"], config.step_timeout)
                live[episode(task, sample, env, policy, config, settings)] = None
            asked: dict[Generator, Request] = {}
            for run, request, trajectory in pool.map(_advance, live.items()):
                if trajectory is None:
                    asked[run] = request
                else:
                    deloop.append_jsonl(config.out, trajectory)
                    progress.add(trajectory)
            live = dict(zip(asked, policy.complete(list(asked.values())))) if asked else {}
    finally:
        for run in live:                                # interrupted: stop the sessions and release their instances
            run.close()
        pool.shutdown()
    progress.line(final=True)
    return progress.statuses


def _advance(item: tuple[Generator, Completion | None]) -> tuple[Generator, Request | None, dict | None]:
    """Let one episode go on to its next request or to its end."""
    try:
        return item[0], item[0].send(item[1]), None
    except StopIteration as end:
        return item[0], None, end.value


def wait_for_instance(config: Config, busy: bool) -> tuple[str, str, str] | None:
    """A free instance. None while others of ours are running and will free one; else waits, with growing pauses."""
    began, pause = time.monotonic(), 0.5
    while isinstance(instance := acquire(config.server.split(",")), str):
        if busy:
            return None
        if time.monotonic() - began > config.wait:
            raise InputError(f"no environment in {config.wait:.0f} s ({instance}): is the server at --server up?")
        time.sleep(pause)
        pause = min(pause * 2, 30.0)
    return instance


class Progress:
    """done / total, rate, time left and the running loop rate, at most once in two seconds."""

    def __init__(self, total: int, kept: int) -> None:
        self.total, self.done, self.looping, self.began, self.last = total, 0, 0, time.monotonic(), 0.0
        self.statuses: dict[str, int] = {}
        print(f"{total} episodes to run, {kept} already have a result", flush=True)

    def add(self, trajectory: dict) -> None:
        self.done += 1
        self.looping += any(deloop.loop_flags((step.action, step.observation) for step in deloop.steps(trajectory)))
        self.statuses[trajectory["status"]] = self.statuses.get(trajectory["status"], 0) + 1
        self.line()

    def line(self, final: bool = False) -> None:
        now = time.monotonic()
        if self.done and (final or now - self.last > 2):
            self.last, rate = now, self.done / (now - self.began)
            print(f"{self.done}/{self.total} episodes, {rate:.2f}/s, {(self.total - self.done) / rate:.0f} s left, "
                  f"loop rate {self.looping / self.done:.1%}, {self.statuses}", flush=True)


def main(argv: list[str]) -> int:
    config = deloop.config_from_args(Config, argv, __doc__)
    if config.keep_last < 2 or config.keep_last % 2:
        raise InputError(f"--keep-last {config.keep_last}: must be even and at least 2 (pairs of call and observation)")
    if config.samples > 1 and not config.temperature:
        raise InputError("--samples above 1 needs a --temperature: greedy rollouts of one task are all the same")
    read_tasks(config.tasks, config.limit)              # a bad file is told before minutes go into loading the model
    policy = LocalPolicy(config)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))     # a polite kill releases the instances too
    print(json.dumps({**dataclasses.asdict(config), **policy.settings}, indent=1), flush=True)
    statuses = rollout(config, policy)
    failed = sum(count for status, count in statuses.items() if status in deloop.ERRORS)
    if failed:
        print(f"{failed} episodes ended in an error of the environment; the same command runs them again",
              file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    deloop.run(main)
