"""The harness over real HTTP on loopback: protocol, memory, exact prompts, batching, resume, faults."""
import contextlib
import dataclasses
import json
import os
import random
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


def without_time(trajectory):
    return {**trajectory, "turns": [{**turn, "seconds": 0} for turn in trajectory["turns"]]}


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
        task = messages[1]["content"].split("\n\nSummary")[0]
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


def test_an_empty_summary_drops_without_a_trace(url, tasks, tmp_path):
    """An empty summary never stands in the prompt: the task message stays as it was, the middle is gone."""
    agent = Counter(words=5)
    policy = rollout.ScriptedPolicy(lambda m: "" if m[-1]["content"].endswith("SUMMARISE") else agent(m))
    settings = config(url, tasks, tmp_path, memory="summary", budget=150, summary_request="SUMMARISE", batch=1, limit=1)
    [each] = run(settings, policy).values()
    assert each["compactions"] and all(event["summary"] == "" for event in each["compactions"])
    assert all(seen[1] == each["messages"][1] for seen in agent.seen)
    assert all(len(agent.seen[event["before_turn"]]) == 2 + 6 for event in each["compactions"])


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
        assert [m["content"] for m in each["messages"][3::2]] == [rollout.ADVICE["no_call"]] * 3


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
        runs.append({key: {**without_time(each), "config": None} for key, each in found.items()})
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


# ---- resume, kills, faults

def command(settings, *more):
    flags = ["--server", settings.server, "--tasks", settings.tasks, "--out", settings.out, "--model", settings.model]
    return [sys.executable, str(ROOT / "rollout.py"), *flags, "--budget", "700", "--keep-last", "2", "--max-turns", "4",
            "--max-new-tokens", "12", "--summary-tokens", "9", "--batch", "2", *more]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_rollout_goes_on_as_if_nothing_had_happened(settings, tmp_path, how):
    """Kill a real process at a random moment, tear its last line, run the same command again: the episodes equal those
    of an uninterrupted run. After a polite kill the instances are free at once."""
    whole = dataclasses.replace(settings, out=str(tmp_path / "whole.jsonl"))
    subprocess.run(command(whole), check=True, capture_output=True)
    with minigym.serve(workers=8) as other:
        mine = dataclasses.replace(settings, server=other)
        process = subprocess.Popen(command(mine), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while not os.path.exists(mine.out) and process.poll() is None:
            time.sleep(0.005)
        time.sleep(random.uniform(0, 0.3))
        process.send_signal(how)
        process.wait()
        if how == signal.SIGTERM:
            assert free_instances(other) == 8
        with open(mine.out, "a") as file:
            file.write('{"format": "deloop-traj')
        again = subprocess.run(command(mine), capture_output=True, text=True)
    assert again.returncode == 0 and "already have a result" in again.stdout, again.stderr
    sides = [{each["task_id"]: {**without_time(each), "config": None} for each in deloop.read_trajectories(s.out)}
             for s in (whole, mine)]
    assert sides[0] == sides[1] and len(sides[0]) == 8
    assert sum(1 for _ in open(mine.out)) == 8


@contextlib.contextmanager
def lossy(applied):
    """A manager with one worker that loses one reply of /step: with the step applied before, or not applied at all."""
    state = {"lost": 0, "ran": []}

    class Handler(minigym._Handler):
        def _answer(self, method, path, args):
            if path == "/step":
                if not state["lost"] and len(state["ran"]) == 2:
                    state["lost"] += 1
                    if applied:
                        self.server.app.handle(method, path, args)
                        state["ran"].append(args["action"])
                    self.close_connection = True
                    self.connection.shutdown(2)
                    return
                state["ran"].append(args["action"])
            super()._answer(method, path, args)

    worker = minigym._Server(minigym.Worker())
    worker.RequestHandlerClass = Handler
    manager = minigym._Server(minigym.Manager([worker.server_port]))
    for server in (worker, manager):
        threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{manager.server_port}", state
    for server in (worker, manager):
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("applied", [True, False])
def test_a_step_is_never_sent_twice_unless_proved_not_applied(tasks, tmp_path, applied):
    """A reply is lost. If the server's step_count shows that the step ran, its observation is gone: env_error, and the
    step is not sent again. If it shows that it did not run, it is sent once more and the episode goes on."""
    with lossy(applied) as (url, state):
        settings = config(url, tasks, tmp_path, limit=1, max_turns=5)
        [each] = run(settings, rollout.ScriptedPolicy(Counter())).values()
        assert state["lost"] == 1 and free_instances(url) == 1
        if applied:
            assert each["status"] == "env_error" and "lost" in each["error"] and len(each["turns"]) == 2
            assert len(state["ran"]) == 3                   # sent once, never again
            [again] = run(settings, rollout.ScriptedPolicy(Counter())).values()     # the error is run anew
            assert again["status"] == "turn_limit" and len(again["turns"]) == 5
        else:
            assert each["status"] == "turn_limit" and len(each["turns"]) == 5 == len(state["ran"])


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


@pytest.mark.parametrize("flags,said", [
    (["--frobnicate"], "--frobnicate"), (["--tasks", "absent.jsonl"], "absent.jsonl"), (["--model", "absent"], "absent"),
    (["--keep-last", "3"], "--keep-last"), (["--samples", "2"], "--temperature"), (["--memory", "none"], "--memory")])
def test_bad_input_is_one_clear_line_and_exit_code_2(settings, flags, said):
    """Every refusal names what is wrong and leaves with 2; no traceback."""
    found = subprocess.run(command(settings, *flags), capture_output=True, text=True)
    assert found.returncode == 2 and said in found.stderr.splitlines()[-1] and "Traceback" not in found.stderr


def test_a_bad_task_row_is_named(tmp_path):
    """The line number of a row that is no CodeGym task stands in the message; so does a task that stands twice."""
    rows = minigym.make_tasks("train", 2, 0)
    for bad in (json.dumps({"prompt": []}), "{", json.dumps(rows[0]), "[]"):
        path = tmp_path / "tasks.jsonl"
        path.write_text("\n".join([*map(json.dumps, rows), bad]) + "\n")
        with pytest.raises(deloop.InputError, match="line 3"):
            rollout.read_tasks(str(path))
