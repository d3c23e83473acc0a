"""The harness over real HTTP on loopback: protocol, memories, guards, policies, batching, faults, kills, resume."""
import contextlib
import dataclasses
import http.server
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time

import minigym
import pytest
import requests
from conftest import ROOT

import deloop
import rollout

WORKERS = 4


@pytest.fixture(scope="module")
def url():
    with minigym.serve(workers=WORKERS) as address:
        yield address


@pytest.fixture
def tasks(tmp_path):
    path = tmp_path / "tasks.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in minigym.make_tasks("train", 8, 0)))
    return str(path)


def config(url, tasks, tmp_path, **changes):
    given = dict(server=url, tasks=tasks, out=str(tmp_path / "out.jsonl"), model="none", memory="full")
    return rollout.Config(**{**given, **changes})


def call(name, **parameters):
    return rollout.BEGIN + json.dumps([{"name": name, "parameters": parameters}]) + rollout.END


def run(settings, policy):
    """All trajectories of one rollout, by (task, sample)."""
    rollout.rollout(settings, policy)
    return {(each["task_id"], each["sample"]): each for each in deloop.read_trajectories(settings.out)}


def free_instances(url):
    """How many instances the manager will lend now; takes them all and gives them back."""
    taken = []
    while (reply := requests.get(f"{url}/get_instance")).status_code == 200:
        taken.append(reply.json()["uid"])
    for uid in taken:
        requests.get(f"{url}/release_instance", params={"uid": uid})
    return len(taken)


def bare(trajectory):
    """A trajectory without what may differ between two equal runs: times, configuration, the policy's address."""
    return {**trajectory, "turns": [{**turn, "seconds": 0} for turn in trajectory["turns"]], "config": 0, "policy": 0}


class Counter:
    """A scripted agent that reads places 0, 1, 0, 1, ... and gives up (Done) after `steps` calls. Keeps what it saw."""

    def __init__(self, steps=10**9, words=0):
        self.steps, self.words, self.calls, self.seen = steps, words, {}, []

    def __call__(self, messages):
        if "function_call" in messages[-1]["content"] or messages[-1]["content"].endswith("SUMMARISE"):
            return f"So far {len(messages)} messages."
        self.seen.append(json.loads(json.dumps(messages)))
        name = messages[0]["content"].split("def ")[1].split("(")[0]
        parameter = messages[0]["content"].split("(")[1].split(":")[0]
        task = re.split(r"\n\n(Summary|Calls|\[\d)", messages[1]["content"])[0]
        n = self.calls[task] = self.calls.get(task, -1) + 1
        return "word " * self.words + (call("Done", answer=0) if n >= self.steps else call(name, **{parameter: n % 2}))


def test_an_episode_is_what_the_server_did(url, tasks, tmp_path):
    """Invariants: 30 turns at most; each turn one assistant and one user message; a step's observation is the message
    the agent read next; steps 0, 1, 0, 1, ... of an array are loops from the third on; every instance is given back."""
    found = run(config(url, tasks, tmp_path), rollout.ScriptedPolicy(Counter()))
    assert len(found) == 8 and free_instances(url) == WORKERS
    for each in found.values():
        assert each["status"] == "turn_limit" and each["reward"] == 0.0 and len(each["turns"]) == 30
        assert len(each["messages"]) == 2 + 2 * len(each["turns"]) == 62
        for index, turn in enumerate(each["turns"]):
            assert turn["message"] == 2 + 2 * index and each["messages"][turn["message"]]["role"] == "assistant"
            assert each["messages"][turn["message"] + 1] == {"role": "user", "content": turn["observation"]}
        array = "walk" not in each["task_id"]
        assert deloop.report(each)["loop_steps"] == list(range(2, 30)) or not array


def test_done_ends_an_episode_and_is_graded(url, tasks, tmp_path):
    """Done is a step; after it the episode has ended with the server's reward, whatever it was."""
    found = run(config(url, tasks, tmp_path), rollout.ScriptedPolicy(Counter(steps=3)))
    assert {each["status"] for each in found.values()} == {"done"}
    for each in found.values():
        assert len(deloop.steps(each)) == 4 and deloop.steps(each)[-1].action["name"] == "Done"
        assert each["reward"] == float("reward=1" in each["turns"][-1]["observation"])


@pytest.mark.parametrize("budget,cap", [(150, 0), (200, 6), (10**9, 6), (1, 0)])
def test_context_at_rebuilds_what_the_model_saw(url, tasks, tmp_path, budget, cap):
    """Property: for every turn of every episode, context_at gives exactly the messages the policy was shown, and their
    hash is the stored one - with and without compactions, with capped observations and broken control tokens."""
    agent = Counter(words=5)
    policy = rollout.ScriptedPolicy(agent)
    policy.settings = {"control_tokens": ["left"]}
    settings = config(url, tasks, tmp_path, memory="summary", budget=budget, batch=1, summary_request="SUMMARISE",
                      max_observation_chars=cap)
    rebuilt, stored = [], []
    found = run(settings, policy)
    for each in found.values():
        assert (len(each["compactions"]) > 0) == (budget < 10**9)
        for index, turn in enumerate(each["turns"]):
            rebuilt.append(deloop.context_at(each, index))
            stored.append(turn["prompt_sha256"])
    assert rebuilt == agent.seen and stored == [deloop.prompt_hash(messages) for messages in rebuilt]
    assert any("lef t" in message["content"] for messages in rebuilt for message in messages[2:]) == (cap != 6)


def test_the_document_memory(url, tasks, tmp_path):
    """The document's rule: at the turn that exceeds the budget everything between task and the last 6 messages is
    replaced by the summary; never twice in one turn; never while nothing is older than the 6."""
    agent = Counter(words=5)
    settings = config(url, tasks, tmp_path, memory="summary", budget=150, summary_request="SUMMARISE", batch=1, limit=1)
    [each] = run(settings, rollout.ScriptedPolicy(agent)).values()
    events = {event["before_turn"]: event for event in each["compactions"]}
    assert events and len(events) == len(each["compactions"])
    for index, seen in enumerate(agent.seen):
        if index in events:
            event = events[index]
            assert event["tokens_before"] > 150 and event["dropped"] == [2, each["turns"][index]["message"] - 6]
            assert seen[0] == each["messages"][0] and seen[2:] == each["messages"][event["dropped"][1]:][:6]
            task = each["messages"][1]["content"]
            assert seen[1]["content"] == f"{task}\n\n{deloop.SUMMARY_HEADER}\n{event['summary']}"
        else:
            assert each["turns"][index]["prompt_tokens"] <= 150 or len(seen) <= 8
    assert [event["generation"] for event in each["compactions"]] == list(range(1, len(events) + 1))


def test_an_empty_summary_is_a_truncation(url, tasks, tmp_path):
    """When the model writes nothing, the middle goes all the same and the prompt says how much is missing."""
    agent = Counter(words=5)
    policy = rollout.ScriptedPolicy(lambda m: "" if m[-1]["content"].endswith("SUMMARISE") else agent(m))
    settings = config(url, tasks, tmp_path, memory="summary", budget=150, summary_request="SUMMARISE", batch=1, limit=1)
    [each] = run(settings, policy).values()
    assert each["compactions"] and all(event["summary"] == "" for event in each["compactions"])
    for event in each["compactions"]:
        seen = agent.seen[event["before_turn"]]
        assert len(seen) == 2 + 6
        told = f"[{event['dropped'][1] - 2} earlier messages removed]"
        assert seen[1]["content"] == f"{each['messages'][1]['content']}\n\n{told}"


GOOD = '{"name": "Get", "parameters": {"index": 1}}'


@pytest.mark.parametrize("text,finish,status,kept", [
    (f"{rollout.BEGIN}[{GOOD}]{rollout.END}", "stop", "ok", None),
    (f"I think.\n{rollout.BEGIN} [ {GOOD} ] {rollout.END}\n", "stop", "ok", None),
    (f"{rollout.BEGIN}{GOOD}{rollout.END}", "stop", "ok", None),
    (f"{rollout.BEGIN}[{GOOD}]", "stop", "unclosed", None),
    (f"{rollout.BEGIN}[{GOOD}", "length", "unclosed", None),
    (f"a{rollout.BEGIN}[{GOOD}]{rollout.END}\nuser: 7", "length", "extra", f"a{rollout.BEGIN}[{GOOD}]{rollout.END}"),
    (f"{rollout.BEGIN}[{GOOD}, {GOOD}]{rollout.END}", "stop", "extra", f"{rollout.BEGIN}[{GOOD}]{rollout.END}"),
    ("The answer is 3.", "stop", "no_call", None),
    ("Let me think about", "length", "cut", None),
    (f"{rollout.BEGIN}[{GOOD[:20]}", "length", "cut", None),
    (f"{rollout.BEGIN}[{GOOD[:20]}{rollout.END}", "length", "bad_json", None),
    (f"{rollout.BEGIN}[{GOOD[:20]}", "stop", "bad_json", None),
    (rollout.BEGIN + "[" * 100_000, "stop", "bad_json", None),
    (f'{rollout.BEGIN}[{{"name": "Get", "parameters": {{"x": "\\ud800"}}}}]{rollout.END}', "stop", "bad_json", None),
    (f'{rollout.BEGIN}[{{"name": "Get", "parameters": []}}]{rollout.END}', "stop", "bad_parameters", None),
    (f'{rollout.BEGIN}[{{"name": "Get", "arguments": {{"index": 1}}}}]{rollout.END}', "stop", "ok", None),
    (f"{rollout.BEGIN}[]{rollout.END}", "stop", "bad_json", None),
    (f'{rollout.BEGIN}[{{"parameters": {{}}}}]{rollout.END}', "stop", "no_name", None),
    (f'{rollout.BEGIN}["Get"]{rollout.END}', "stop", "no_name", None),
    (f'{rollout.BEGIN}[{{"name": "Get", "parameters": 3}}]{rollout.END}', "stop", "bad_parameters", None)])
def test_every_reply_has_a_parse_status(text, finish, status, kept):
    """Table of replies. A call is executed iff its status is ok, extra or unclosed; only extra shortens the message; an
    "ok" message parses again to the same call."""
    action, found, shown = rollout.parse_call(text, finish)
    assert found == status and shown == (kept or text)
    assert (action == json.loads(GOOD)) == (found in ("ok", "extra", "unclosed")) != (found in rollout.ADVICE)
    if kept:
        assert rollout.parse_call(kept, "stop") == (action, "ok", kept)


def test_a_turn_without_a_call_is_no_step(url, tasks, tmp_path):
    """Turns whose message holds no call use budget, reach no server, are answered with advice and are left out."""
    found = run(config(url, tasks, tmp_path, max_turns=3), rollout.ScriptedPolicy(lambda messages: "Hm."))
    for each in found.values():
        assert deloop.steps(each) == [] and {turn["parse"] for turn in each["turns"]} == {"no_call"}
        assert [m["content"] for m in each["messages"][3::2]] == [rollout.CodeGym.advice("no_call")] * 3


def test_a_call_that_raised_is_not_executed(url, tasks, tmp_path):
    """HTTP 500 from /step means that nothing was applied: the turn is no step and the episode goes on."""
    policy = rollout.ScriptedPolicy(lambda messages: call("Get", index=[]))     # a list cannot be looked up: it raises
    found = run(config(url, tasks, tmp_path, max_turns=2), policy)
    raised = [each for each in found.values() if "max" in each["task_id"]]
    assert raised and all(deloop.steps(each) == [] and each["status"] == "turn_limit" for each in raised)
    assert all("not executed" in message["content"] for each in raised for message in each["messages"][3::2])


# ---- the policy in process

@pytest.fixture
def settings(url, tasks, tmp_path, random_model):
    return config(url, tasks, tmp_path, model=random_model, memory="summary", budget=700, keep_last=2, max_turns=4,
                  max_new_tokens=12, summary_tokens=9)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_batched_decoding_equals_one_at_a_time(settings, tmp_path, temperature):
    """In float32 a batch with refilled rows, compactions and one cache over the turns gives, token for token, what each
    episode gives alone; sampling too, since its randomness hangs on the episode and not on the batch."""
    runs = []
    for batch in (1, 3, 8):
        one = dataclasses.replace(settings, batch=batch, out=str(tmp_path / f"{batch}.jsonl"), temperature=temperature)
        found = run(one, rollout.LocalPolicy(one))
        runs.append({key: bare(each) for key, each in found.items()})
    assert runs[0] == runs[1] == runs[2]
    assert all(each["compactions"] for each in runs[0].values())
    texts = {each["messages"][2]["content"] for each in runs[0].values()}
    assert len(texts) > 1                       # the rows differ, so a mix-up of rows could not go unseen


def test_greedy_decoding_equals_transformers_generate(settings):
    """Oracle: for prompts of different lengths, answered in one batch, the ids are those of model.generate."""
    import torch
    policy = rollout.LocalPolicy(settings)
    asked = []
    for index, words in enumerate((1, 40, 3, 90)):
        messages = [{"role": "system", "content": "x " * words}, {"role": "user", "content": f"{index}?"}]
        asked.append(rollout.Request(index, messages, policy.encode(messages), 10))
    for request, answer in zip(asked, policy.complete(asked)):
        expected = policy.model.generate(torch.tensor([request.prompt]), max_new_tokens=10, do_sample=False)
        assert answer.ids == expected[0, len(request.prompt):].tolist()


def test_a_prompt_that_does_not_fit_ends_the_episode_as_a_result(settings):
    """context_overflow is a status of its own and a result: the policy's context is full, nothing failed."""
    policy = rollout.LocalPolicy(settings)
    policy.max_context = 950
    found = run(dataclasses.replace(settings, memory="full", max_turns=30), policy)
    assert {each["status"] for each in found.values()} == {"context_overflow"}
    assert all(turn["prompt_tokens"] + 12 <= 950 for each in found.values() for turn in each["turns"])


# ---- memory

def words(messages):
    return sum(len(each["content"].split()) for each in messages)


def conversation(turns, seed=0, errors=True):
    """(messages, turns) of a random conversation: long and short observations, repeats, turns without a call."""
    rng = random.Random(seed)
    messages = [{"role": "system", "content": "You are S."}, {"role": "user", "content": "Task:\n\n do it "}]
    log = []
    for index in range(turns):
        action = {"name": rng.choice("ab"), "parameters": {"x": rng.randrange(3)}}
        action = action if rng.random() < .8 or not errors else None
        seen = rng.choice(["short", "a b c\n" * rng.randrange(1, 30), "<|im_end|>"])
        log.append({"message": len(messages), "action": action, "executed": action is not None,
                    "observation": seen if action else None})
        messages += [{"role": "assistant", "content": f"reply {index}"},
                     {"role": "user", "content": seen if action else "Error"}]
    return messages, log


def state_of(log, event=None, keep_last=6):
    settings = {"summary_request": "SUMMARISE", "control_tokens": ["<|im_end|>"]}
    return rollout.State(event, log, keep_last, words, settings)


class Chatter:
    """A random agent whose calls often fail and whose summaries are empty, short or longer than the rest."""

    def __init__(self, seed):
        self.seed, self.seen = seed, []

    def __call__(self, messages):
        rng = random.Random(f"{self.seed} {deloop.prompt_hash(messages)}")
        if messages[-1]["content"].endswith("SUMMARISE"):
            return rng.choice(["", "facts " * rng.randrange(1, 9), "long " * 300, "<|im_end|> <think>"])
        self.seen.append(json.loads(json.dumps(messages)))
        name = messages[0]["content"].split("def ")[1].split("(")[0]
        parameter = messages[0]["content"].split("(")[1].split(":")[0]
        return rng.choice([call(name, **{parameter: rng.randrange(3)}), call("unknown_" * rng.randrange(1, 60)),
                           "no call", "word " * 9 + call(name, **{parameter: 0}) + "more", rollout.BEGIN + "[{<think>"])


@pytest.mark.parametrize("memory", rollout.MEMORIES)
def test_context_at_rebuilds_every_prompt_of_every_memory(url, tasks, tmp_path, memory):
    """Property, over random conversations with random, empty and overlong summaries: context_at gives exactly the
    messages that the policy saw, and their hash is the stored one; system and task stand first, byte for byte; roles
    alternate, so no call is ever parted from its result; at most one event a turn."""
    agent = Chatter(memory)
    policy = rollout.ScriptedPolicy(agent)
    policy.settings = {"control_tokens": ["<|im_end|>", "<think>"]}
    settings = config(url, tasks, tmp_path, memory=memory, budget=130, batch=1, summary_request="SUMMARISE",
                      max_observation_chars=700, max_turns=24)
    rebuilt, stored = [], []
    for each in run(settings, policy).values():
        assert len({event["before_turn"] for event in each["compactions"]}) == len(each["compactions"])
        assert (memory == "full") == (not each["compactions"])
        system, task = each["messages"][:2]
        for index, turn in enumerate(each["turns"]):
            prompt = deloop.context_at(each, index)
            rebuilt.append(prompt)
            stored.append(turn["prompt_sha256"])
            assert prompt[0] == system and prompt[1]["content"].startswith(task["content"])
            assert [m["role"] for m in prompt[1:]] == ["user", *["assistant", "user"] * ((len(prompt) - 2) // 2)]
            assert not any("<think>" in m["content"] for m in prompt)
    assert rebuilt == agent.seen and stored == [deloop.prompt_hash(messages) for messages in rebuilt]


@pytest.mark.parametrize("memory", rollout.MEMORIES)
def test_a_strategy_is_pure_and_acts_only_over_the_budget(memory):
    """Property over random conversations: the arguments stay as they were; within the budget nothing happens (state
    excepted); nothing older than the tail, nothing happens; the tail stays byte for byte; the prompt is what the event
    says, and never longer than before where no model writes."""
    strategy = rollout.MEMORIES[memory]
    for turns in range(14):
        for seed in range(6):
            messages, log = conversation(turns, seed)
            before = json.dumps([messages, log])
            for budget in (0, 40, 10**6):
                state = state_of(log)
                prompt, event = strategy(messages, budget, state)
                assert json.dumps([messages, log]) == before
                whole = deloop.compacted(messages, None, state.settings)
                old = turns > (1 if memory == "state" else 3)
                if event is None:
                    assert prompt == whole and (memory in ("full", "mask") or budget >= words(whole) or not old)
                    continue
                assert old and memory != "full" and (words(whole) > budget or memory == "state")
                if "ask" not in event:
                    assert prompt == deloop.compacted(messages, event, state.settings)
                    assert prompt[-6:] == whole[-6:] and (memory == "ledger" or words(prompt) <= words(whole) + 4)
                else:
                    assert prompt == whole and event["ask"][-1]["content"].endswith("\n\nSUMMARISE")
                    assert event["ask"][:-1] == whole[:event["dropped"][1]][:-1]


def test_what_each_strategy_writes():
    """Worked examples on one conversation of five calls, the first and the third of them equal."""
    messages, log = conversation(5, errors=False)
    for index, (x, seen) in enumerate([(1, "one"), (2, "two " * 20), (1, "one"), (3, "three"), (4, "four")]):
        log[index] |= {"action": {"name": "get", "parameters": {"x": x}}, "observation": seen}
        messages[3 + 2 * index] = {"role": "user", "content": seen}
    task = messages[1]["content"]
    prompt, event = rollout.truncate(messages, 10, state_of(log))
    told = {"role": "user", "content": f"{task}\n\n[4 earlier messages removed]"}
    assert prompt == [messages[0], told, *messages[6:]]
    prompt, event = rollout.mask(messages, 10, state_of(log))
    assert prompt[:5] == messages[:5] and prompt[5]["content"] == "[observation omitted: 80 characters]"    # not "one"
    assert prompt[6:] == messages[6:] and event["masked"] == 6
    prompt, event = rollout.ledger(messages, 10, state_of(log, keep_last=2))
    assert prompt[1]["content"] == (
        f"{task}\n\nCalls made so far (step numbers: call -> result):\n"
        f'1, 3: get({{"x": 1}}) -> one\n2: get({{"x": 2}}) -> {" ".join(["two"] * 20)}\n4: get({{"x": 3}}) -> three')
    assert prompt[2:] == messages[10:]
    assert rollout.hybrid(messages, 35, state_of(log))[1]["masked"] == 6             # masking is enough
    assert "ask" in rollout.hybrid(messages, 10, state_of(log))[1]                   # it is not: a summary
    masked = rollout.mask(messages[:-4], 10, state_of(log, keep_last=2))[1]
    assert masked["masked"] == 6 and rollout.hybrid(messages, 10, state_of(log, masked))[1]["dropped"] == [2, 6]
    _, event = rollout.state(messages, 10**6, state_of(log))
    assert event["dropped"] == [2, 10] and event["ask"][:-1] == messages[:9]


def test_a_second_summary_is_made_of_the_first():
    """Rolling: the request for the second summary holds the first one and only the messages that came after it."""
    messages, log = conversation(9)
    first = {"dropped": [2, 8], "header": deloop.SUMMARY_HEADER, "summary": "so far"}
    prompt, event = rollout.summary(messages, 10, state_of(log, first))
    assert event["dropped"] == [2, 14] and len(event["ask"]) == 2 + 6
    assert event["ask"][1]["content"].endswith("Summary of the earlier steps:\nso far")


def test_the_last_messages_alone_over_the_budget(url, tasks, tmp_path):
    """A budget that the kept tail alone exceeds, and a summary longer than what it replaces: one compaction a turn at
    most, one summary a turn at most, and the episode goes to its end."""
    agent = Counter(words=5)
    policy = rollout.ScriptedPolicy(lambda m: "long " * 500 if m[-1]["content"].endswith("SUMMARISE") else agent(m))
    settings = config(url, tasks, tmp_path, memory="summary", budget=1, summary_request="SUMMARISE", batch=1, limit=1)
    [each] = run(settings, policy).values()
    assert [event["before_turn"] for event in each["compactions"]] == list(range(4, 30)) and len(agent.seen) == 30
    assert all(event["tokens_after"] > event["tokens_before"] for event in each["compactions"][:1])


def test_characters_count_where_no_tokenizer_is_wanted(url, tasks, tmp_path):
    """--count chars triggers by characters/4; the events are counted in the same unit."""
    settings = config(url, tasks, tmp_path, memory="truncate", budget=260, count="chars", batch=1, limit=1)
    [each] = run(settings, rollout.ScriptedPolicy(Counter(words=5))).values()
    for event in each["compactions"]:
        prompt = deloop.context_at(each, event["before_turn"])
        assert event["tokens_before"] > 260 and event["tokens_after"] == sum(len(m["content"]) for m in prompt) // 4
    assert each["compactions"]


# ---- guards

def test_the_interceptor_executes_no_call_twice(url, tasks, tmp_path):
    """A repeated call reaches no server: it is a proposal (guard), no step, and the agent is told which step it was."""
    log = []
    with minigym.serve(workers=4, log=log) as address:
        found = run(config(address, tasks, tmp_path, intercept=True, max_turns=6), rollout.ScriptedPolicy(Counter()))
    assert len(log) == len(set(log))
    for each in found.values():
        guards = [turn.get("guard") for turn in each["turns"]]
        assert guards == [None] * 2 + ["intercepted"] * 4 and len(deloop.steps(each)) == 2
        assert all(turn["action"] and turn["observation"] is None for turn in each["turns"][2:])
        assert "executed as step 1" in each["messages"][7]["content"] and each["config"]["intercept"] is True


def test_a_note_follows_a_loop_step(url, tasks, tmp_path):
    """Reflexion: exactly after loop steps the model is asked, and its note stands behind the observation, which itself
    stays what the server said; with the guard off nothing of it is there."""
    agent = Counter()
    policy = rollout.ScriptedPolicy(
        lambda m: "I repeat myself." if m[-1]["content"].endswith(rollout.NOTE_REQUEST) else agent(m))
    for each in run(config(url, tasks, tmp_path, reflect=True, max_turns=5), policy).values():
        loops = deloop.report(each)["loop_steps"]
        for index, turn in enumerate(each["turns"]):
            said = each["messages"][turn["message"] + 1]["content"]
            assert said == turn["observation"] + ("\n\nNote to myself: I repeat myself." if index in loops else "")
            assert ("note" in turn) == (index in loops)


def test_the_temperature_rises_for_the_reply_after_a_loop(url, tasks, tmp_path):
    """Only the reply after a loop step is sampled; the trajectory says so."""
    settings = config(url, tasks, tmp_path, loop_temperature=0.7, max_turns=5)
    for each in run(settings, rollout.ScriptedPolicy(Counter())).values():
        loops = deloop.report(each)["loop_steps"]
        assert [turn.get("temperature", 0) for turn in each["turns"]] == [0.7 * (i - 1 in loops) for i in range(5)]


# ---- an OpenAI-compatible server

class Stub(http.server.BaseHTTPRequestHandler):
    """Speaks /v1/models, /v1/completions, /v1/chat/completions. server.script holds what goes wrong, one a request."""
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def send(self, status, body, **headers):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        self.send(200, {"data": [{"id": name} for name in self.server.names]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        if self.server.key and self.headers.get("Authorization") != f"Bearer {self.server.key}":
            return self.send(401, {"error": {"message": "invalid api key"}})
        fault = self.server.script.pop(0) if self.server.script else None
        if isinstance(fault, tuple):
            return self.send(fault[0], {"error": {"message": fault[1]}}, Retry_After="0")
        if fault == "hang":
            time.sleep(2)
        if fault == "reset":
            self.close_connection = True
            return self.connection.shutdown(2)
        if fault == "garbage":
            return self.send(200, b'{"choi')
        text, ids, finish = self.server.agent(body)
        choice = {"message": {"content": text}} if "messages" in body else {"text": text, "token_ids": ids}
        usage = {"prompt_tokens": len(body.get("prompt", "12")), "completion_tokens": len(ids)}
        self.send(200, {"model": fault or body["model"], "choices": [{**choice, "finish_reason": finish}],
                        "usage": usage})


@contextlib.contextmanager
def api(agent, names=("stub",), key=None, script=()):
    """The stub server; yields (its URL, the server)."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Stub)
    server.daemon_threads = True
    server.agent, server.names, server.key, server.script, server.bodies = agent, names, key, list(script), []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", server
    finally:
        server.shutdown()
        server.server_close()


def chat_agent(reply):
    """A function from messages to text as the stub's agent."""
    return lambda body: (reply(body["messages"]), [1, 2, 3], "stop")


def reads_all(messages):
    """A deterministic agent without memory of its own: reads places 0, 1, 2, ... by the number of its messages."""
    name = messages[0]["content"].split("def ")[1].split("(")[0]
    parameter = messages[0]["content"].split("(")[1].split(":")[0]
    n = len(messages) // 2 - 1
    return call("Done", answer=0) if n == 5 else call(name, **{parameter: n})


def chatting(url, tasks, tmp_path, address, **changes):
    return config(url, tasks, tmp_path, model="stub", api=address, chat=True, wait=3, **changes)


def test_a_model_behind_an_api_gives_the_tokens_of_the_same_model_in_process(settings, tmp_path):
    """Completions on our own rendering: with the same float32 model behind the server, every id, text, hash and count
    of every turn and summary equals the in-process rollout's. Every sampling field is sent."""
    local = rollout.LocalPolicy(settings)
    lock = threading.Lock()

    def agent(body):
        with lock:
            [answer] = local.complete([rollout.Request(tuple(body["prompt"]), [], body["prompt"], body["max_tokens"])])
        return answer.text, answer.ids, answer.finish

    with api(agent, names=[settings.model]) as (address, server):
        behind = dataclasses.replace(settings, api=address, out=str(tmp_path / "api.jsonl"))
        found = run(behind, rollout.ApiPolicy(behind))
    expected = run(settings, rollout.LocalPolicy(settings))
    for key, each in expected.items():
        assert bare(each) == bare(found[key])
    assert all({"temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
                "seed", "stop_token_ids"} <= body.keys() for body in server.bodies)


def test_chat_completions_need_no_tokenizer(url, tasks, tmp_path):
    """--chat: messages go out, characters/4 trigger, usage counts; ids are unknown and say so."""
    with api(chat_agent(reads_all)) as (address, server):
        settings = chatting(url, tasks, tmp_path, address, api_fields='{"top_k": null, "logprobs": true}')
        found = run(settings, rollout.ApiPolicy(settings))
    assert {each["status"] for each in found.values()} == {"done"} and len(found) == 8
    turns = [turn for each in found.values() for turn in each["turns"]]
    assert {turn["completion_tokens"] for turn in turns} == {3} and {turn["prompt_tokens"] for turn in turns} == {2}
    assert {turn["completion_ids"] for turn in turns} == {None} == {turn["prompt_ids_sha256"] for turn in turns}
    assert all("top_k" not in body and body["logprobs"] is True for body in server.bodies)


def test_a_busy_or_failing_api_is_asked_again(url, tasks, tmp_path):
    """503 while loading, 429, a reset, a broken body, a hung request: a completion changes nothing, so each is asked
    for again, and the trajectories equal those of a healthy server."""
    script = [(503, "loading"), (429, "slow down"), "reset", "garbage", (500, "oops"), "hang"]
    sides = []
    for name, faults in (("a", ()), ("b", script)):
        with api(chat_agent(reads_all), script=faults) as (address, server):
            settings = dataclasses.replace(chatting(url, tasks, tmp_path, address, api_timeout=1.0, batch=2),
                                           wait=60, out=str(tmp_path / f"{name}.jsonl"))
            found = run(settings, rollout.ApiPolicy(settings))
            assert not server.script
        sides.append({key: bare(each) for key, each in found.items()})
    assert sides[0] == sides[1]


def test_an_api_that_stays_down_is_a_policy_error_and_run_again(url, tasks, tmp_path):
    """After --wait the episode ends as policy_error, which is no result: the next run makes it anew."""
    for faults, expected in ([(503, "loading")] * 1000, "policy_error"), ([], "done"):
        with api(chat_agent(reads_all), script=faults) as (address, _):
            settings = dataclasses.replace(chatting(url, tasks, tmp_path, address, limit=2), wait=1)
            found = run(settings, rollout.ApiPolicy(settings))
        assert {each["status"] for each in found.values()} == {expected} and free_instances(url) == WORKERS


def test_an_api_whose_context_is_full_ends_the_episode_as_a_result(url, tasks, tmp_path):
    """400 with a message about the context length: context_overflow, not an error."""
    with api(chat_agent(reads_all), script=[(400, "maximum context length is 9 tokens")]) as (address, _):
        settings = chatting(url, tasks, tmp_path, address, limit=1)
        [each] = run(settings, rollout.ApiPolicy(settings)).values()
    assert each["status"] == "context_overflow" and each["turns"] == [] and each["reward"] == 0.0


@pytest.mark.parametrize("changes,faults,said", [
    (dict(model="other"), (), "--served-name"), (dict(), ["base-model"], "answered by 'base-model'"),
    (dict(), [(404, "no such model")], "404"), (dict(), [(400, "unknown field top_k")], "--api-fields"),
    (dict(api_key_env="DELOOP_ABSENT"), (), "DELOOP_ABSENT"), (dict(api_key_file="absent"), (), "absent"),
    (dict(api_fields="[]"), (), "--api-fields"), (dict(api="http://127.0.0.1:9"), (), "server up")])
def test_an_api_that_refuses_is_named(url, tasks, tmp_path, changes, faults, said):
    """A wrong name, another model's answer, a refused field, a missing key: one clear error, and instances free."""
    with api(chat_agent(reads_all), script=list(faults) * 9) as (address, _):
        settings = dataclasses.replace(chatting(url, tasks, tmp_path, address), **changes)
        with pytest.raises(deloop.InputError, match=re.escape(said)):
            run(settings, rollout.ApiPolicy(settings))
    assert free_instances(url) == WORKERS


def test_the_key_is_sent_and_never_stored(url, tasks, tmp_path):
    """The key comes from the file that a flag names; without it 401 is a clear error; no trajectory holds it."""
    (tmp_path / "key").write_text("sk-secret\n")
    with api(chat_agent(reads_all), key="sk-secret") as (address, _):
        settings = chatting(url, tasks, tmp_path, address)
        with pytest.raises(deloop.InputError, match="key is missing or wrong"):
            run(settings, rollout.ApiPolicy(settings))
        settings = dataclasses.replace(settings, api_key_file=str(tmp_path / "key"))
        assert {each["status"] for each in run(settings, rollout.ApiPolicy(settings)).values()} == {"done"}
    assert "sk-secret" not in open(settings.out).read()


# ---- AgentGym

class World(http.server.BaseHTTPRequestHandler):
    """An AgentGym server with one world: say the number of the task. Every failure is HTTP 200 with {"error"}."""
    protocol_version, log_message, send = "HTTP/1.1", Stub.log_message, Stub.send

    def do_POST(self):
        body, worlds = json.loads(self.rfile.read(int(self.headers["Content-Length"]))), self.server.worlds
        if self.path == "/create":
            worlds[len(worlds)] = None
            return self.send(200, {"id": len(worlds) - 1})
        if self.path == "/close":
            self.server.closed.append(body["id"])
            return self.send(200, True)
        if self.path == "/reset":
            worlds[body["id"]] = body["data_idx"]
            return self.send(200, {"observation": "Say it.", "task_description": f"Your number is {body['data_idx']}."})
        if body["action"] == "crash":
            return self.send(200, {"error": "list index out of range"})
        won = body["action"] == f"say {worlds[body['id']]}"
        self.send(200, {"observation": "Well done." if won else "No.", "reward": 0, "score": 100 * won, "done": won,
                        "available_actions": ["say", "crash"]})


def test_agentgym_is_a_second_environment(tmp_path):
    """create, reset, step, close: text actions are steps, an {"error"} is no step, SciWorld's score of 100 is success,
    every environment is closed, and the trajectory is one that detect and mine read."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), World)
    server.worlds, server.closed = {}, []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    path = tmp_path / "tasks.jsonl"
    path.write_text("".join(json.dumps({"item_id": f"sciworld_{index}"}) + "\n" for index in range(5)))

    def agent(messages):
        number = re.search(r"number is (\d)", messages[1]["content"])[1]
        says = ["hm", "Action: say x", "Thought: again.\nAction: say x\nObservation: invented", "Action: crash",
                f"Thought:\nnow\n\nAction:\nsay {number}"]
        return says[len(messages) // 2 - 1]

    found = run(config(f"http://127.0.0.1:{server.server_port}", str(path), tmp_path, env="agentgym", batch=2),
                rollout.ScriptedPolicy(agent))
    server.shutdown()
    server.server_close()
    assert len(found) == 5 and sorted(server.closed) == list(range(5))
    for each in found.values():
        assert each["env"] == "agentgym/sciworld" and each["status"] == "done" and each["reward"] == 1.0
        assert [turn["parse"] for turn in each["turns"]] == ["no_call", "ok", "extra", "ok", "ok"]
        assert [step.action for step in deloop.steps(each)][:2] == ["say x", "say x"]
        assert deloop.report(each)["loop_steps"] == [1] and each["turns"][3]["executed"] is False
        assert "Available actions: say, crash" in each["turns"][1]["observation"]
        [pair] = deloop.mine_pairs(each)
        assert pair["chosen"][0]["content"].endswith(f"say {each['task_id'][-1]}")


# ---- faults

@pytest.fixture
def quick(monkeypatch):
    """Short time limits, so that what a server may take too long for is over in a second."""
    monkeypatch.setattr(rollout, "GRACE", 0.3)


def faulty(fault, path, times=1, skip=0):
    """A fault that `times` requests to a path meet, after the first `skip` of them."""
    state, lock = {"seen": 0}, threading.Lock()

    def choose(kind, method, asked):
        with lock:
            if asked != path:
                return None
            state["seen"] += 1
            return fault if skip < state["seen"] <= skip + times else None
    return choose


def proved(log):
    """No session's step was applied twice: the agent's calls within an episode are all different here."""
    return len(log) == len(set(log))


STEP_FAULTS = [      # fault of the third /step, what becomes of the episode, steps of it that the server applied
    ("500", "done", 5), ("503", "done", 6), ("reset before", "done", 6), ("reset after", "env_error", 3),
    ("slow", "env_error", 3), ("garbage", "env_error", 3), ("wrong types", "env_error", 3),
    ("no fields", "env_error", 3), ("huge", "done", 6), ("die", "env_error", 2)]


@pytest.mark.parametrize("fault,status,applied", STEP_FAULTS)
def test_a_fault_of_a_step(tasks, tmp_path, quick, fault, status, applied):
    """Table of what a step may meet. A step is sent again only where the server's step_count proves that it was not
    applied; a lost observation ends the episode as env_error, which runs anew; 500 is a turn without a step; in no case
    is a step applied twice, and every instance is given back."""
    log = []
    with minigym.serve(workers=2, faults=faulty(fault, "/step", skip=2), log=log) as url:
        settings = config(url, tasks, tmp_path, limit=1, step_timeout=0.7, batch=1)
        [each] = run(settings, rollout.ScriptedPolicy(reads_all)).values()
        assert each["status"] == status and len(log) == applied and proved(log), each["error"]
        assert free_instances(url) == 2
        if status == "env_error":
            assert each["reward"] is None and each["error"]
            [each] = run(settings, rollout.ScriptedPolicy(reads_all)).values()
            assert each["status"] == "done" and len(log) == applied + 6 and proved(log)
        if fault == "500":
            assert [turn["executed"] for turn in each["turns"]] == [True, True, False, True, True, True]
        if fault == "huge":
            assert len(each["turns"][2]["observation"]) > 3_000_000
            assert len(deloop.context_at(each, 3)[-1]["content"]) < 9_000


@pytest.mark.parametrize("path", ["/start", "/is_done", "/reward", "/get_instance"])
@pytest.mark.parametrize("fault", ["503", "reset before", "reset after", "garbage", "wrong types", "no fields"])
def test_a_fault_of_a_call_that_may_be_repeated(tasks, tmp_path, path, fault):
    """Whatever changes nothing is asked for again: one fault of it leaves no trace in the trajectory. An answer of the
    wrong shape is never taken for a "not done" or a reward of 0: at worst the episode is env_error."""
    log = []
    with minigym.serve(workers=2, faults=faulty(fault, path, skip=1), log=log) as url:
        settings = config(url, tasks, tmp_path, limit=2, batch=1)
        found = run(settings, rollout.ScriptedPolicy(reads_all)).values()
        shape = fault in ("wrong types", "no fields") and path in ("/is_done", "/reward")
        assert sorted(each["status"] for each in found) == (["done", "env_error"] if shape else ["done", "done"])
        lent_to_nobody = path == "/get_instance" and fault not in ("503", "reset before")
        assert proved(log) and free_instances(url) == 2 - lent_to_nobody


def test_a_failed_release_is_made_up_for(tasks, tmp_path):
    """A release that the manager did not get is tried again: with one instance, the next episode hangs on it."""
    with minigym.serve(workers=1, faults=faulty("reset before", "/release_instance", times=2)) as url:
        found = run(config(url, tasks, tmp_path, limit=3, batch=1), rollout.ScriptedPolicy(reads_all))
        assert {each["status"] for each in found.values()} == {"done"} and free_instances(url) == 1


def test_dead_workers_are_passed_over(tasks, tmp_path):
    """Half of the pool are ports that nobody listens on: no episode fails for it."""
    with minigym.serve(workers=2, dead=2) as url:
        found = run(config(url, tasks, tmp_path), rollout.ScriptedPolicy(reads_all))
        assert len(found) == 8 and {each["status"] for each in found.values()} == {"done"}


def test_several_managers_share_the_work(tasks, tmp_path):
    """Two managers: both lend, all episodes end, both pools are full again; one that is down is passed over."""
    logs = [], []
    with minigym.serve(workers=2, log=logs[0]) as one, minigym.serve(workers=2, log=logs[1]) as two:
        settings = config(f"{one}, http://127.0.0.1:9, {two}/", tasks, tmp_path, batch=8)
        assert len(run(settings, rollout.ScriptedPolicy(reads_all))) == 8
        assert logs[0] and logs[1] and free_instances(one) == free_instances(two) == 2


def test_a_manager_that_is_gone_and_comes_back(tasks, tmp_path):
    """The run waits for it and goes on."""
    with minigym.serve(workers=1) as url:
        port = int(url.rsplit(":", 1)[1])
    answers = []
    thread = threading.Thread(target=lambda: answers.append(
        run(config(url, tasks, tmp_path, limit=2), rollout.ScriptedPolicy(reads_all))))
    thread.start()
    time.sleep(1.2)
    with minigym.serve(workers=1, port=port):
        thread.join()
    assert {each["status"] for each in answers[0].values()} == {"done"}


def test_no_environment_within_the_wait_is_a_clear_error(tasks, tmp_path):
    with pytest.raises(deloop.InputError, match="is the server at --server up"):
        run(config("http://127.0.0.1:9", tasks, tmp_path, wait=0.5), rollout.ScriptedPolicy(reads_all))


def test_ipv6(tasks, tmp_path, monkeypatch):
    """[::1] works as a base URL: the worker's URL keeps the brackets."""
    monkeypatch.setattr(minigym, "HOST", "::1")
    with minigym.serve(workers=2) as url:
        assert url.startswith("http://[::1]:")
        assert len(run(config(url, tasks, tmp_path), rollout.ScriptedPolicy(reads_all))) == 8


def test_two_hundred_episodes_among_all_faults_at_random(tmp_path, quick):
    """Chaos: every request may meet any fault. Run again until nothing is left: every episode has exactly one result;
    the server applied exactly the steps that its trajectory tells, and no step twice in any session."""
    rows, rng, lock = minigym.make_tasks("train", 200, 1), random.Random(7), threading.Lock()
    path, log, died = tmp_path / "tasks.jsonl", [], []
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def choose(kind, method, asked):
        with lock:
            fault = rng.choice(minigym.FAULTS) if rng.random() < 0.04 else None
            if fault == "die":
                fault = None if kind == "Manager" or len(died) >= 6 else died.append(1) or fault
            return None if fault == "slow" and rng.random() < 0.8 else fault

    with minigym.serve(workers=24, faults=choose, log=log) as url:
        settings = config(url, str(path), tmp_path, batch=20, step_timeout=0.3)
        policy = rollout.ScriptedPolicy(reads_all)
        policy.lock_step = False                        # every episode on its own, as behind an API
        for attempt in range(12):
            found = run(settings, policy)
            if all(each["status"] in deloop.RESULTS for each in found.values()):
                break
    assert len(found) == 200 == sum(1 for _ in open(settings.out)) and attempt > 0
    assert proved(log)
    sessions = {}
    for session, env_str, action in log:
        sessions.setdefault(env_str, {}).setdefault(session, []).append(json.loads(action))
    env_strs = {task["task_id"]: task["env_str"] for task in rollout.read_tasks(str(path))}
    for (task_id, _), each in found.items():
        assert each["status"] in ("done", "turn_limit")     # the latter where a 500 met the agent's only Done
        assert [step.action for step in deloop.steps(each)] in sessions[env_strs[task_id]].values()


# ---- resume, kills

def command(settings, *more):
    flags = ["--server", settings.server, "--tasks", settings.tasks, "--out", settings.out, "--model", settings.model]
    return [sys.executable, str(ROOT / "rollout.py"), *flags, "--budget", "700", "--keep-last", "2", "--max-turns", "4",
            "--max-new-tokens", "12", "--summary-tokens", "9", "--batch", "2", *more]


def results(path):
    return {each["task_id"]: bare(each) for each in deloop.read_trajectories(path)}


def test_twenty_kills_at_random_moments(tmp_path):
    """Kill a real process (SIGKILL) 20 times at random moments, start it again each time: in the end the file holds
    the episodes of an uninterrupted run, each once, whatever the batch sizes were."""
    path, rng = tmp_path / "tasks.jsonl", random.Random(3)
    path.write_text("".join(json.dumps(row) + "\n" for row in minigym.make_tasks("train", 60, 2)))
    slow = lambda messages: time.sleep(0.02) or reads_all(messages)
    with minigym.serve(workers=400) as url, api(chat_agent(slow)) as (address, _):
        mine = chatting(url, str(path), tmp_path, address)
        kills = 0
        while kills < 20:
            flags = ["--api", address, "--chat", "--wait", "20", "--max-turns", "30",
                     "--batch", str(rng.choice((1, 2, 5)))]
            process = subprocess.Popen(command(mine, *flags), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
            process.stdout.readline()
            time.sleep(rng.uniform(0, 0.25))
            if process.poll() is not None:
                break
            process.kill()
            process.communicate()
            kills += 1
        with open(mine.out, "a") as file:
            file.write('{"format": "deloop-traj')
        again = subprocess.run(command(mine, *flags), capture_output=True, text=True)
        whole = dataclasses.replace(mine, out=str(tmp_path / "whole.jsonl"))
        subprocess.run(command(whole, *flags, "--batch", "16"), check=True, capture_output=True)
    assert again.returncode == 0 and kills == 20, again.stderr
    assert results(mine.out) == results(whole.out) and sum(1 for _ in open(mine.out)) == 60


@pytest.mark.parametrize("how,code,said", [(signal.SIGINT, 130, "To go on:"), (signal.SIGTERM, 143, "")] * 2)
def test_a_polite_kill_finishes_writing_and_releases(tasks, tmp_path, how, code, said):
    """Ctrl-C and SIGTERM: whole lines only, every instance free at once; Ctrl-C says how to go on, and that works."""
    slow = lambda messages: time.sleep(0.05) or reads_all(messages)
    with minigym.serve(workers=8) as url, api(chat_agent(slow)) as (address, _):
        mine = chatting(url, tasks, tmp_path, address)
        flags = ["--api", address, "--chat", "--max-turns", "30"]
        process = subprocess.Popen(command(mine, *flags), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        while not os.path.exists(mine.out) and process.poll() is None:
            time.sleep(0.005)
        time.sleep(random.uniform(0, 0.1))
        process.send_signal(how)
        errors = process.communicate()[1]
        assert process.returncode == code and said in errors and "Traceback" not in errors, errors
        assert free_instances(url) == 8 and 0 < len(results(mine.out)) < 8
        assert subprocess.run(command(mine, *flags), capture_output=True).returncode == 0
    assert len(results(mine.out)) == 8


@pytest.mark.slow
def test_a_killed_rollout_with_a_model_in_process_goes_on(settings, tmp_path):
    """The same with the model in process: the tokens after the kill are those of an uninterrupted run."""
    whole = dataclasses.replace(settings, out=str(tmp_path / "whole.jsonl"))
    subprocess.run(command(whole), check=True, capture_output=True)
    with minigym.serve(workers=8) as other:
        mine = dataclasses.replace(settings, server=other)
        process = subprocess.Popen(command(mine), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while not os.path.exists(mine.out) and process.poll() is None:
            time.sleep(0.005)
        process.kill()
        process.wait()
        again = subprocess.run(command(mine), capture_output=True, text=True)
    assert again.returncode == 0 and "already have a result" in again.stdout, again.stderr
    assert results(whole.out) == results(mine.out)


def test_more_episodes_than_instances(tasks, tmp_path):
    """A pool smaller than the batch slows the run down and loses nothing."""
    with minigym.serve(workers=2) as url:
        found = run(config(url, tasks, tmp_path, batch=8, max_turns=3), rollout.ScriptedPolicy(Counter()))
    assert len(found) == 8 and {each["status"] for each in found.values()} == {"turn_limit"}


def test_other_settings_do_not_mix_in_one_file(url, tasks, tmp_path):
    """Resuming with another budget is refused by name; another batch size is not."""
    settings = config(url, tasks, tmp_path, max_turns=2)
    run(settings, rollout.ScriptedPolicy(Counter()))
    with pytest.raises(deloop.InputError, match="budget"):
        run(dataclasses.replace(settings, budget=99), rollout.ScriptedPolicy(Counter()))
    assert len(run(dataclasses.replace(settings, batch=1), rollout.ScriptedPolicy(Counter()))) == 8
    stored = [json.loads(line) for line in open(settings.out)]
    for each in stored:
        del each["config"]["intercept"]                 # written before there was such a setting: it had its default
    (tmp_path / "out.jsonl").write_text("".join(json.dumps(each) + "\n" for each in stored))
    assert len(run(settings, rollout.ScriptedPolicy(Counter()))) == 8
    run(dataclasses.replace(settings, budget=99, overwrite=True), rollout.ScriptedPolicy(Counter()))
    assert {each["config"]["budget"] for each in deloop.read_trajectories(settings.out)} == {99}


def test_another_file_is_never_overwritten(url, tasks, tmp_path):
    """--out that holds something else is refused and stays as it was."""
    (tmp_path / "out.jsonl").write_text('{"a": 1}\n{"half')
    with pytest.raises(deloop.InputError, match="no trajectory"):
        run(config(url, tasks, tmp_path), rollout.ScriptedPolicy(Counter()))
    assert (tmp_path / "out.jsonl").read_text() == '{"a": 1}\n{"half'


def test_shards_cut_the_work_into_files_that_concatenate(url, tasks, tmp_path, monkeypatch):
    """3 shards, one of them by accelerate launch's variables: disjoint, and together the episodes of one process."""
    for i in (1, 2):
        settings = config(url, tasks, tmp_path, shard=f"{i}/3")
        rollout.rollout(settings, rollout.ScriptedPolicy(reads_all))
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "3")
    rollout.rollout(dataclasses.replace(settings, shard=None), rollout.ScriptedPolicy(reads_all))
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.delenv("RANK")
    parts = [results(tmp_path / f"out.{i}-of-3.jsonl") for i in (1, 2, 3)]
    whole = run(config(url, tasks, tmp_path), rollout.ScriptedPolicy(reads_all))
    assert [len(part) for part in parts] == [3, 3, 2] and len(whole) == 8
    assert {**parts[0], **parts[1], **parts[2]} == results(tmp_path / "out.jsonl")
    with pytest.raises(deloop.InputError, match="i/n"):
        rollout.share(dataclasses.replace(settings, shard="4/3"))


def test_what_one_sees(url, tasks, tmp_path, capsys):
    """Progress with interval and success, the table of statuses, the mine command; --verbose tells one episode."""
    settings = config(url, tasks, tmp_path, verbose=True, memory="ledger", budget=100, batch=3)
    run(settings, rollout.ScriptedPolicy(Counter()))
    text = capsys.readouterr().out
    assert re.search(r"8/8 episodes, [\d.]+/min, \d+ tokens/s, 0 s left, "
                     r"loop rate 100.0% \[67.6%, 100.0%\], success 0.0%", text)
    assert re.search(r"\n  turn_limit +8  100.0%\n", text)
    assert f"python deloop.py mine {tmp_path}/out.jsonl --out" in text
    assert text.count("-- turn 1:") == 1 and text.count("-- turn 6:") == 1 and "-- memory:" in text


def test_dry_run_shows_the_first_prompt(settings):
    """--dry-run prints the rendered prompt and its token count and runs nothing; no server, no model is needed."""
    flags = ["--dry-run", "--server", "http://127.0.0.1:9"]
    found = subprocess.run(command(settings, *flags), capture_output=True, text=True)
    renderer, task = rollout.Renderer(settings), rollout.read_tasks(settings.tasks)[0]
    ids = renderer.encode(rollout.CodeGym.prompt(task))
    assert found.returncode == 0 and renderer.tokenizer.decode(ids) in found.stdout
    assert f"{len(ids)} tokens" in found.stdout
    assert not os.path.exists(settings.out)


@pytest.mark.parametrize("flags,said", [
    (["--frobnicate"], "--frobnicate"), (["--tasks", "absent.jsonl"], "absent.jsonl"),
    (["--model", "absent"], "absent"),
    (["--keep-last", "3"], "--keep-last"), (["--samples", "2"], "--temperature"), (["--memory", "none"], "--memory"),
    (["--chat"], "--api"), (["--shard", "5/4"], "--shard"), (["--env", "agentgym"], "--env")])
def test_bad_input_is_one_clear_line_and_exit_code_2(settings, flags, said):
    """Every refusal names what is wrong and leaves with 2; no traceback."""
    found = subprocess.run(command(settings, *flags), capture_output=True, text=True)
    assert found.returncode == 2 and said in found.stderr.splitlines()[-1] and "Traceback" not in found.stderr


def test_a_bad_task_row_is_named(tmp_path):
    """The line number of a row that is no CodeGym task stands in the message; so does a task that stands twice."""
    rows = minigym.make_tasks("train", 2, 0)
    for bad in (json.dumps({"prompt": []}), "{", json.dumps(rows[0]), "[]", '{"item_id": "unknown_1"}',
                '{"item_id": "babyai"}'):
        path = tmp_path / "tasks.jsonl"
        path.write_text("\n".join([*map(json.dumps, rows), bad]) + "\n")
        with pytest.raises(deloop.InputError, match="line 3"):
            rollout.read_tasks(str(path))
