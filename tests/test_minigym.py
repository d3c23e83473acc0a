"""The miniature CodeGym: every task solvable, splits disjoint, the wire protocol answer by answer over real HTTP."""

import json
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import minigym
import pytest
import requests


def env_str(row):
    return row["ability"].split("@", 1)[1]


def json_of(row):
    return json.loads(row["ability"].split("@", 2)[2])


class Session:
    """One lent worker with one session, spoken to with plain requests."""

    def __init__(self, url, row, session_id="s"):
        self.url, self.id, self.http = url, session_id, requests.Session()
        self.lent = self.http.get(f"{url}/get_instance").json()
        self.worker = f"{url.rsplit(':', 1)[0]}:{self.lent['port']}"
        self.started = self.post("start", env_str=env_str(row), env_name="codegym_v1")

    def post(self, path, **fields):
        return self.http.post(f"{self.worker}/{path}", json={"session_id": self.id, **fields})

    def get(self, path, **fields):
        return self.http.get(f"{self.worker}/{path}", params={"session_id": self.id, **fields})

    def step(self, action):
        return self.post("step", action=action if isinstance(action, str) else json.dumps(action), timeout=30)

    def close(self):
        self.post("stop")
        return self.http.get(f"{self.url}/release_instance", params={"uid": self.lent["uid"]})


@pytest.fixture(scope="module")
def url():
    with minigym.serve(workers=4) as address:
        yield address


@pytest.fixture
def session(url):
    opened = Session(url, minigym.make_tasks("train", 1, 0, families=("count",))[0])
    yield opened
    opened.close()


@pytest.mark.parametrize("family", minigym.ALL)
def test_every_task_is_solvable_within_30_turns(family):
    """Property: the reference solver sees only target and observations, needs 2-21 calls and gets reward 1."""
    for row in minigym.make_tasks("train", 150, 1, families=(family,)):
        env = minigym.Env.from_env_str(env_str(row))
        calls = minigym.solve(family, json_of(row)["target"], lambda action: env.step(json.dumps(action))[1])
        assert env.finished and env.reward == 1.0
        assert calls == env.step_count == row["extra_info"]["solve_fc_round"] and 2 <= calls <= 21


@pytest.mark.parametrize("family", minigym.HUNTS)
def test_a_hunt_may_look_in_any_order(family):
    """Property: in a random order the thing is found too, after each number of looks; one place alone says found."""
    rng, needed = random.Random(0), set()
    for row in minigym.make_tasks("train", 200, 3, families=(family,)):
        env = minigym.Env.from_env_str(env_str(row))
        needed.add(minigym.HUNTS[family].solve(env.spec["target"], lambda call: env.step(json.dumps(call))[1], rng))
        assert env.reward == 1.0 and sum(text.endswith("\nfound") for text in env.reads.values()) == 1
    assert needed == set(range(2, len(minigym.HUNTS[family].places) + 2))


@pytest.mark.parametrize("family", minigym.ALL)
def test_thousands_of_instances_and_every_read_different(family):
    """Property: 2,000 distinct instances exist; no two reads of a task are the same step: reading alone is no loop."""
    rows = minigym.make_tasks("train", 2000, 2, families=(family,))
    assert len({row["ability"] for row in rows}) == 2000
    assert {row["extra_info"]["level"] for row in rows} == {1, 2, 3}
    for row in rows[:50]:
        seen = minigym.reads(family, json_of(row))
        assert len(seen) >= 3 and len(set(seen.values())) == len(seen)


def test_splits_never_share_an_instance():
    """Property: whatever the seeds, the splits are disjoint; same arguments, same rows; families as asked for."""
    train = {row["ability"] for seed in range(3) for row in minigym.make_tasks("train", 500, seed)}
    held_out = {row["ability"] for seed in range(3) for row in minigym.make_tasks("heldout", 500, seed)}
    family = minigym.make_tasks("family", 300, 0)
    assert not train & held_out and not (train | held_out) & {row["ability"] for row in family}
    assert {row["extra_info"]["family"] for row in family} == {minigym.HELD_OUT_FAMILY}
    assert not any(minigym.HELD_OUT_FAMILY in ability for ability in train | held_out)
    assert family == minigym.make_tasks("family", 300, 0) == minigym.make_tasks("family", 400, 0)[:300]
    hunts = [{row["ability"] for row in minigym.make_tasks(split, 300, 0, families=("boxes", "jars"))}
             for split in ("train", "heldout")]
    assert not hunts[0] & hunts[1] and {ability.split("_")[2] for ability in hunts[0]} == {"boxes", "jars"}


def test_rows_have_codegyms_fields_and_hide_the_list():
    """Property: the row has the fields of CODEGYM's rows; "@" inside the JSON survives a split at the first two."""
    rows = minigym.make_tasks("train", 300, 0) + minigym.make_tasks("train", 100, 0, families=tuple(minigym.HUNTS))
    assert any("@" in json_of(row)["values"] for row in rows)
    for row in rows:
        system, user = row["prompt"]
        assert row["ability"].startswith(f"codegym_v1@{row['code_id']}__") and row["plugin_call_max_round"] == 30
        assert (system["role"], system["name"], user["role"]) == ("system", "functions", "user")
        assert "def Done(answer" in system["content"] and "<|FunctionCallBegin|>" in user["content"]
        assert str(json_of(row)["values"]) not in system["content"] + user["content"]


def test_an_episode_over_http(session):
    """Property: start, reads, Done, reward as on CodeGym's wire; a step after Done answers and done stays true."""
    assert (session.started.status_code, session.started.json()) == (
        200, {"session_id": "s", "observation": "successfully start"})
    row = minigym.make_tasks("train", 1, 0, families=("count",))[0]
    assert session.get("is_done").json() == {"done": False}
    minigym.solve("count", json_of(row)["target"], lambda action: session.step(action).json()["observation"])
    assert session.get("is_done").json() == {"done": True} and session.get("reward").json() == {"reward": 1.0}
    assert session.step({"name": "Get", "parameters": {"index": 0}}).json()["status"] is True
    assert session.get("is_done").json() == {"done": True}
    assert session.post("reset").status_code == 200 and session.get("is_done").json() == {"done": False}


@pytest.mark.parametrize("action, text", [
    ([{"name": "Get", "parameters": {"index": 0}}], "Error: function call doesn't have `name`"),
    ({"name": "Get"}, "Error: function call doesn't have `parameters`"),
    ({"name": "Open", "parameters": {"door": 0}}, "Error: there is no function Open"),
    ({"name": "Get", "parameters": {"i": 0}}, "Error: Get needs the parameter index"),
    ({"name": "Get", "parameters": {"index": 99}}, "Error: index 99 is out of range"),
    ("Get(0)", "Error: Expecting value"),
])
def test_the_agents_mistakes_are_observations(session, action, text):
    """Property: 200 with an observation that starts with "Error", and the step counts."""
    answer = session.step(action)
    assert answer.status_code == 200 and answer.json()["observation"].startswith(text)
    assert session.get("get_attribute", attribute_name="step_count").json() == {"attribute_value": 1}


def test_a_step_that_raises_is_500_and_changes_nothing(session):
    """Property: an unhashable argument raises in the environment: 500 with detail, state and step_count as before."""
    answer = session.step({"name": "Get", "parameters": {"index": [0]}})
    assert answer.status_code == 500 and answer.json()["detail"].startswith("Step failed")
    assert session.get("get_attribute", attribute_name="step_count").json() == {"attribute_value": 0}


def test_unknown_sessions_environments_and_paths(session):
    """Property: 404 for a session nobody started, 500 with detail for an unknown environment, 404 for other paths."""
    session.id = "nobody"
    for answer in (session.step({}), session.get("is_done"), session.get("reward"), session.post("reset")):
        assert answer.status_code == 404 and "detail" in answer.json()
    assert session.post("stop").status_code == 200
    for bad in ("Mini_max_I__CountEnv@{}", "codegym_v1@Mini_max_I__MaxEnv@{}", "Mini_max_I__MaxEnv@{"):
        answer = session.post("start", env_str=bad, env_name="codegym_v1")
        assert answer.status_code == 500 and "detail" in answer.json()
    assert session.get("is_success").status_code == 404


def test_two_sessions_on_one_worker_do_not_mix(session):
    """Property: sessions of one worker hold separate tasks and counts; starting one again begins it anew."""
    row = minigym.make_tasks("train", 1, 0, families=("walk",))[0]
    session.step({"name": "Get", "parameters": {"index": 0}})
    session.id = "other"
    session.post("start", env_str=env_str(row), env_name="codegym_v1")
    assert session.get("get_attribute", attribute_name="step_count").json() == {"attribute_value": 0}
    session.id = "s"
    assert session.get("get_attribute", attribute_name="step_count").json() == {"attribute_value": 1}


def test_the_pool_is_bounded(url):
    """Property: when every worker is lent: 500 in plain text; a release, even a repeated one, frees exactly one."""
    row = minigym.make_tasks("train", 1, 0)[0]
    lent = [Session(url, row) for _ in range(4)]
    assert len({s.lent["port"] for s in lent}) == 4
    refused = requests.get(f"{url}/get_instance")
    assert (refused.status_code, refused.text) == (500, "Internal Server Error")
    for _ in range(2):
        assert lent[0].close().json() == {"uid": lent[0].lent["uid"], "status": "released"}
    again = Session(url, row)
    assert requests.get(f"{url}/get_instance").status_code == 500
    for opened in [*lent[1:], again]:
        opened.close()


def test_many_clients_at_once(url):
    """Property: eight clients that share four workers all reach reward 1; nobody's worker is lent twice."""
    rows = minigym.make_tasks("heldout", 16, 0)

    def play(row):
        opened = None
        while opened is None:
            try:
                opened = Session(url, row)
            except requests.JSONDecodeError:  # "Internal Server Error": every worker is taken
                continue
        minigym.solve(row["extra_info"]["family"], json_of(row)["target"],
                      lambda action: opened.step(action).json()["observation"])
        reward = opened.get("reward").json()["reward"]
        opened.close()
        return reward

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(play, rows)) == [1.0] * 16


def test_the_serve_command(tmp_path):
    """Property: `serve` prints its URL first, answers there, and ends with the process."""
    command = [sys.executable, minigym.__file__, "serve", "--workers", "2"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        address = process.stdout.readline().strip()
        assert requests.get(f"{address}/get_instance").status_code == 200
    finally:
        process.terminate()
        process.wait(10)
    with pytest.raises(requests.ConnectionError):
        requests.get(f"{address}/get_instance")


def test_the_tasks_command(tmp_path):
    """Property: `tasks` writes the rows that make_tasks returns."""
    out = tmp_path / "tasks.jsonl"
    minigym.main(["tasks", "--split", "heldout", "--count", "5", "--seed", "3", "--out", str(out)])
    assert [json.loads(line) for line in out.open()] == minigym.make_tasks("heldout", 5, 3)
