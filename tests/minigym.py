"""A miniature CodeGym: families of small tool-use tasks behind CodeGym's own wire protocol, standard library only.

Every task hides a short list that can only be read one element a call; the question needs several reads, and
Done(answer) is graded 0 or 1. In nine families (an array, a string, a path, a row of doors) one reads in order; in
the four hunts a thing lies in one of many places, to be looked at in any order: many calls are sensible at any time.

    python tests/minigym.py serve --workers 64                              # prints its URL, runs until it is stopped
    python tests/minigym.py tasks --split train --count 384 --out t.jsonl   # task rows in CodeGym's format
    with minigym.serve(workers=8) as url: ...                               # the same server inside a test
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import random
import socket
import socketserver
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple
from urllib.parse import parse_qs, urlsplit

LEVELS = {1: (4, 6), 2: (7, 8), 3: (9, 10)}  # difficulty -> shortest and longest hidden list
HOST = "127.0.0.1"  # or "::1"
SYMBOLS = "abcdefgh@"  # "@" also separates the parts of CodeGym's `ability`: a client must not split there
ITEMS = ("bone", "book", "coin", "lamp", "nothing", "rope")
THINGS = ("bone", "book", "coin", "lamp", "rope", "ring", "cup", "map")
HELD_OUT_FAMILY = "findchar"  # never in a training or held-out-instance set, so that it measures transfer
RULES = (
    "Answer the question with the functions, one call a message:\n"
    '<|FunctionCallBegin|>[{"name": "function_name", "parameters": {"key": value}}]<|FunctionCallEnd|>\n'
    "Wait for the result of a call before the next one.\n\nQuestion:\n"
)
DOC = (
    '\nFunction:\n\ndef {name}({0.parameter}: {0.type}):\n    r"""\n\n    {0.does}\n\n'
    '    Args:\n        {0.parameter} ({0.type}): {0.meaning}\n\n    Returns:\n        str: {0.returns}\n\n    """\n'
)


# ---------------------------------------------------------------- task families


class Function(NamedTuple):
    """What an agent is told about one function."""

    parameter: str
    does: str
    meaning: str
    returns: str
    type: str = "int"


@dataclass(frozen=True)
class Family:
    """One kind of task. verdict(values read so far, target, at the end?) is the answer once it is known, else None."""

    function: str
    question: str
    verdict: Callable[[list, object, bool], object]
    draw: Callable[[random.Random, int], tuple[list, object]]

    @property
    def functions(self) -> tuple[str, ...]:
        return (self.function,)

    def reads(self, spec: dict) -> dict[tuple, str]:
        """(function, argument) -> observation, in the natural reading order."""
        values = spec["values"]
        places = [spec["target"], *values[:-1]] if self.function == "Next" else range(len(values))
        left = range(len(values) - 1, -1, -1)
        return {(self.function, p): f"{p}:{value}\n{n} left" for p, value, n in zip(places, values, left)}

    def answer(self, spec: dict) -> object:
        values, target = spec["values"], spec["target"]
        known = (self.verdict(values[:n], target, n == len(values)) for n in range(1, len(values) + 1))
        return next(answer for answer in known if answer is not None)

    def solve(self, target, call: Callable[[dict], str]) -> int:
        """The reference solver: see solve below."""
        values, place = [], target if self.function == "Next" else 0
        while True:
            text = call(action(self.function, place))
            value, left = text.partition(":")[2].split("\n")
            values.append(int(value) if self.function in ("Get", "Next") else value)
            answer = self.verdict(values, target, left == "0 left")
            if answer is not None:
                call(action("Done", answer))
                return len(values) + 1
            place = values[-1] if self.function == "Next" else place + 1


FUNCTIONS = {
    "Get": Function("index", "Read one element of the hidden array.", "Position, from 0.",
                    "Position:element, and how many are left."),
    "CharAt": Function("index", "Read one character of the hidden string.", "Position, from 0.",
                       "Position:character, and how many are left."),
    "Next": Function("node", "Follow the way out of a node.", "The node to leave.",
                     "From:to, and how many steps are left."),
    "Open": Function("door", "Open one door and look behind it.", "Number of the door, from 0.",
                     "Door:what is there, and how many are left."),
    "Done": Function("answer", "Submit the answer.", "The answer.", "Correct or wrong."),
    "Box": Function("letter", "Look into one box.", "From a to t.", "Letter:thing.", "str"),
    "Jar": Function("letter", "Look into one jar.", "From a to t.", "Letter:thing.", "str"),
    "Bag": Function("letter", "Look into one bag.", "From a to l.", "Letter:thing.", "str"),
    "Top": Function("letter", "Look at the top shelf.", "From a to j.", "Top letter:thing.", "str"),
    "Low": Function("letter", "Look at the low shelf.", "From a to j.", "Low letter:thing.", "str"),
}


@dataclass(frozen=True)
class Hunt:
    """A family with many sensible calls at any time: things lie among many places, to be looked at in any order."""

    places: dict[tuple[str, str], str]  # (function, argument) -> what answers and observations call the place
    question: str = "Where is this?\n{}"

    @property
    def functions(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(function for function, _ in self.places))

    def draw(self, rng: random.Random, n: int) -> tuple[list, str]:
        """What lies in every place, and the one thing that is asked for; it lies in one place."""
        target = rng.choice(THINGS)
        values = rng.choices([thing for thing in THINGS if thing != target], k=len(self.places))
        values[rng.randrange(len(values))] = target
        return values, target

    def reads(self, spec: dict) -> dict[tuple, str]:
        return {place: f"{name}:{value}" + "\nfound" * (value == spec["target"])
                for (place, name), value in zip(self.places.items(), spec["values"])}

    def answer(self, spec: dict) -> str:
        return list(self.places.values())[spec["values"].index(spec["target"])]

    def solve(self, target: str, call: Callable[[dict], str], rng: random.Random | None = None) -> int:
        """The reference solver looks in the natural order, or in a random one with rng."""
        order = list(self.places)
        for calls, place in enumerate(rng.sample(order, len(order)) if rng else order, 2):
            text = call(action(*place))
            if text.endswith("found"):
                call(action("Done", text.partition(":")[0]))
                return calls
        raise ValueError(f"{target} lies nowhere")


def _digits(rng: random.Random, n: int, target: bool = False, times: int | None = None) -> tuple[list, object]:
    """n digits; with a target, it stands in exactly `times` places (default: anywhere from one place to half)."""
    if not target:
        return [rng.randrange(10) for _ in range(n)], None
    return _planted(rng, n, rng.randrange(10), range(10), times)


def _planted(rng: random.Random, n: int, target, others, times: int | None) -> tuple[list, object]:
    """n values of `others`, `times` of them replaced by the target; a single one is never among the first two."""
    times = rng.randint(1, n // 2) if times is None else times
    values = [rng.choice([o for o in others if o != target]) for _ in range(n)]
    for place in rng.sample(range(2 if times == 1 else 0, n), times):
        values[place] = target
    return values, target


def _twin(rng: random.Random, n: int) -> tuple[list, object]:
    """n digits, all different but for one that stands twice."""
    values = rng.sample(range(10), n - 1)
    values.insert(rng.randrange(n), rng.choice(values))
    return values, None


FAMILIES = {
    "max": Family("Get", "What is the largest element of the array?", lambda v, x, end: max(v) if end else None,
                  _digits),
    "min": Family("Get", "What is the smallest element of the array?", lambda v, x, end: min(v) if end else None,
                  _digits),
    "count": Family("Get", "How many elements of the array equal {}?", lambda v, x, end: v.count(x) if end else None,
                    lambda rng, n: _digits(rng, n, True)),
    "find": Family("Get", "At which position of the array is {}?", lambda v, x, end: v.index(x) if x in v else None,
                   lambda rng, n: _digits(rng, n, True, 1)),
    "twin": Family("Get", "Which value stands in the array twice?",
                   lambda v, x, end: v[-1] if v[-1] in v[:-1] else None, _twin),
    "charcount": Family("CharAt", "How many characters of the string are this one?\n{}",
                        lambda v, x, end: v.count(x) if end else None,
                        lambda rng, n: _planted(rng, n, rng.choice(SYMBOLS), SYMBOLS, None)),
    "findchar": Family("CharAt", "At which position of the string is this character?\n{}",
                       lambda v, x, end: v.index(x) if x in v else None,
                       lambda rng, n: _planted(rng, n, rng.choice(SYMBOLS), SYMBOLS, 1)),
    "walk": Family("Next", "Starting at node {}, which node is the last one?", lambda v, x, end: v[-1] if end else None,
                   lambda rng, n: ((path := rng.sample(range(10), n))[1:], path[0])),
    "doors": Family("Open", "Behind which door is the key?", lambda v, x, end: v.index("key") if "key" in v else None,
                    lambda rng, n: (_planted(rng, n, "key", ITEMS, 1)[0], None)),
}
HUNTS = {
    "boxes": Hunt({("Box", letter): letter for letter in "abcdefghijklmnopqrst"}),
    "jars": Hunt({("Jar", letter): letter for letter in "abcdefghijklmnopqrst"}),
    "bags": Hunt({("Bag", letter): letter for letter in "abcdefghijkl"}),
    "shelves": Hunt({(name, letter): f"{name.lower()} {letter}" for name in ("Top", "Low") for letter in "abcdefghij"}),
}
ALL = FAMILIES | HUNTS


def action(function: str, argument) -> dict:
    """A call, as the agent writes it."""
    return {"name": function, "parameters": {FUNCTIONS[function].parameter: argument}}


class Env:
    """One task in progress. Attributes are readable over the wire (get_attribute), step_count among them."""

    def __init__(self, family: str, spec: dict):
        self.family, self.spec = family, spec
        self.reads = reads(family, spec)
        self.reset()

    @classmethod
    def from_env_str(cls, env_str: str) -> Env:
        """'Mini_max_I__MaxEnv@{json}' -> Env; ValueError for an unknown environment."""
        name, _, spec = env_str.partition("@")
        family = name.split("__")[0].removeprefix("Mini_").removesuffix("_I")
        if family not in ALL or name != env_name(family):
            raise ValueError("No valid environment found.")
        return cls(family, json.loads(spec))

    def reset(self) -> None:
        self.finished, self.reward, self.step_count = False, 0.0, 0

    def step(self, action: str) -> tuple[bool, str]:
        """Run the JSON text of one call -> (ran?, observation). The agent's own mistakes are observations."""
        self.step_count += 1
        try:
            call = json.loads(action)
        except ValueError as error:
            return False, f"Error: {error}"
        for field in ("name", "parameters"):
            if not isinstance(call, dict) or field not in call:
                return False, f"Error: function call doesn't have `{field}`"
        return self._call(call["name"], call["parameters"])

    def _call(self, name, parameters) -> tuple[bool, str]:
        if name not in (*ALL[self.family].functions, "Done"):
            return False, f"Error: there is no function {name}"
        parameter = FUNCTIONS[name].parameter
        if parameter not in parameters:  # a TypeError when parameters is a number: the server answers 500
            return False, f"Error: {name} needs the parameter {parameter}"
        value = parameters[parameter]
        if name == "Done":
            return True, self._grade(value)
        if (name, value) not in self.reads:
            return False, f"Error: {parameter} {value} is out of range"
        return True, self.reads[name, value]

    def _grade(self, answer) -> str:
        right = str(answer) == str(self.reference_answer())
        self.finished, self.reward = True, float(right)
        return f"Result: {'Correct' if right else 'Wrong'}, reward={int(right)}"

    def reference_answer(self):
        return ALL[self.family].answer(self.spec)


def reads(family: str, spec: dict) -> dict[tuple, str]:
    """(function, argument) -> observation of every reading call, in the natural reading order."""
    return ALL[family].reads(spec)


def solve(family: str, target, call: Callable[[dict], str]) -> int:
    """The reference solver: reads in order through call(action) -> observation, then submits; -> calls made."""
    return ALL[family].solve(target, call)


# ---------------------------------------------------------------- task rows


def env_name(family: str) -> str:
    return f"Mini_{family}_I__{family.capitalize()}Env"


def prompt(family: str, target) -> list[dict]:
    """What the agent is told: function documentation and question, in CodeGym's two messages."""
    rule = ALL[family]
    docs = "".join(DOC.format(FUNCTIONS[name], name=name) for name in (*rule.functions, "Done"))
    return [{"role": "system", "content": docs, "name": "functions"},
            {"role": "user", "content": RULES + rule.question.format(target), "name": ""}]


def task_row(family: str, level: int, spec: dict) -> dict:
    """One row of CodeGym's task format; the prompt names the target but never the hidden list."""
    env = Env(family, spec)
    calls = solve(family, spec["target"], lambda action: env.step(json.dumps(action))[1])
    return {
        "ability": f"codegym_v1@{env_name(family)}@{json.dumps(spec)}",
        "answer": "There is no answer",
        "code_id": f"Mini_{family}_I",
        "data_source": "minigym_v1",
        "extra_info": {"family": family, "level": level, "solve_fc_round": calls},
        "plugin_call_max_round": 30,
        "prompt": prompt(family, spec["target"]),
        "reward_model": {"ground_truth": None, "style": "agent_env"},
    }


def split_of(family: str, spec: dict) -> str:
    """'train' or 'heldout', fixed by the instance itself: no choice of seed or size can put one into both."""
    digest = hashlib.sha256(json.dumps([family, spec]).encode()).digest()
    return "heldout" if digest[0] < 64 else "train"


def make_tasks(split: str, count: int, seed: int, levels: tuple[int, ...] = (1, 2, 3),
               families: tuple[str, ...] | None = None) -> list[dict]:
    """`count` distinct task rows of a split ('train', 'heldout', 'family'), families and levels in equal shares.

    families: names; by default those that are read in order, without the held-out one. 'family' draws that one, from
    the held-out half of its instances. Same arguments, same rows.
    """
    if families is None:
        families = (HELD_OUT_FAMILY,) if split == "family" else tuple(f for f in FAMILIES if f != HELD_OUT_FAMILY)
    rng = random.Random(f"{split}/{seed}")
    rows: dict[str, dict] = {}
    while len(rows) < count:
        family, level = families[len(rows) % len(families)], levels[len(rows) // len(families) % len(levels)]
        values, target = ALL[family].draw(rng, rng.randint(*LEVELS[level]))
        spec = {"values": values, "target": target}
        if (split_of(family, spec) == "train") == (split == "train"):
            row = task_row(family, level, spec)
            rows.setdefault(row["ability"], row)
    return list(rows.values())


# ---------------------------------------------------------------- the server


class HttpError(Exception):
    """An answer other than 200: status and body, as CodeGym's server would send them."""

    def __init__(self, status: int, detail: str):
        super().__init__(detail)
        self.status = status


# What a request may meet instead of a proper answer. "500", "503", "reset before" and "die" leave the server as it was;
# with the others the request has been carried out. After "die" the worker answers nobody.
FAULTS = ("500", "503", "reset before", "reset after", "slow", "garbage", "wrong types", "no fields", "huge", "die")
SLOW = 1.5  # seconds that the answer takes with the fault "slow"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # header and body are two writes: without this a reply waits 40 ms for an ACK
    wbufsize = -1

    def do_GET(self):
        url = urlsplit(self.path)
        self._answer("GET", url.path, {k: v[0] for k, v in parse_qs(url.query, keep_blank_values=True).items()})

    def do_POST(self):
        try:
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))))
        except ValueError:
            body = None
        self._answer("POST", urlsplit(self.path).path, body if isinstance(body, dict) else {})

    def _answer(self, method: str, path: str, args: dict):
        fault = self.server.faults(type(self.server.app).__name__, method, path)
        if fault in ("reset before", "die"):
            return self._break(fault)
        if fault in ("500", "503"):
            status, body = int(fault), {"detail": "fault"}
        else:
            status, body = self._handled(method, path, args)
        if fault == "reset after":
            return self._break(fault)
        if fault == "slow":
            time.sleep(SLOW)
        if status == 200 and fault in ("wrong types", "no fields", "huge"):
            body = {"wrong types": {name: [body[name]] for name in body}, "no fields": {},
                    "huge": {name: f"{value}{'x' * 3_000_000}" if name == "observation" else value
                             for name, value in body.items()}}[fault]
        plain = status == 500 and isinstance(self.server.app, Manager)
        data = b"Internal Server Error" if plain else b'{"obs' if fault == "garbage" else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/plain" if plain else "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _handled(self, method: str, path: str, args: dict) -> tuple[int, dict]:
        try:
            return 200, self.server.app.handle(method, path, args)
        except KeyError as error:
            return 422, {"detail": f"missing field {error}"}
        except HttpError as error:
            return error.status, {"detail": str(error)}

    def _break(self, fault: str):
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)
        if fault == "die":
            self.server.faults = lambda *request: "reset before"  # until nobody listens any more
            threading.Thread(target=lambda: (self.server.shutdown(), self.server.server_close())).start()

    def log_message(self, *args):
        pass


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, app, port: int = 0, faults: Callable[[str, str, str], str | None] = lambda *request: None):
        self.app, self.faults = app, faults
        self.address_family = socket.AF_INET6 if ":" in HOST else socket.AF_INET
        super().__init__((HOST, port), _Handler)

    def server_bind(self):  # HTTPServer's own looks the host's name up, which can take seconds without a network
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]


class Worker:
    """One environment worker: sessions by id. A step that raises changes nothing and is answered with 500."""

    def __init__(self, log: list | None = None):
        self.sessions: dict[str, Env] = {}
        self.lock = threading.Lock()
        self.log = [] if log is None else log  # (session, env_str, action) of every step that was applied
        self.env_strs: dict[str, str] = {}

    def handle(self, method: str, path: str, args: dict) -> dict:
        route = getattr(self, f"_{method}_{path[1:]}".lower(), None)
        if route is None:
            raise HttpError(404, "Not Found")
        with self.lock:
            return route(args)

    def _session(self, args: dict) -> Env:
        if args["session_id"] not in self.sessions:
            raise HttpError(404, "Session not found")
        return self.sessions[args["session_id"]]

    def _post_start(self, args: dict) -> dict:
        session_id = args.get("session_id") or str(uuid.uuid4())
        try:
            if args["env_name"] != "codegym_v1":
                raise ValueError("No valid environment found.")
            self.sessions[session_id] = Env.from_env_str(args["env_str"])
            self.env_strs[session_id] = args["env_str"]
        except ValueError as error:
            raise HttpError(500, str(error)) from error
        return {"session_id": session_id, "observation": "successfully start"}

    def _post_step(self, args: dict) -> dict:
        env = self._session(args)
        before = dict(vars(env))
        try:
            status, observation = env.step(args["action"])
        except (TypeError, ValueError, RecursionError) as error:
            vars(env).update(before)
            raise HttpError(500, f"Step failed: {error}") from error
        self.log.append((args["session_id"], self.env_strs[args["session_id"]], args["action"]))
        return {"status": status, "observation": observation}

    def _get_is_done(self, args: dict) -> dict:
        return {"done": self._session(args).finished}

    def _get_reward(self, args: dict) -> dict:
        return {"reward": self._session(args).reward}

    def _get_get_attribute(self, args: dict) -> dict:
        value = getattr(self._session(args), args["attribute_name"], None)
        return {"attribute_value": value() if callable(value) else value}

    def _post_reset(self, args: dict) -> dict:
        self._session(args).reset()
        return {"message": "Environment reset."}

    def _post_stop(self, args: dict) -> dict:
        self.sessions.pop(args["session_id"], None)
        return {"message": "Session stopped."}


class Manager:
    """Lends workers: each has a port of its own, and a lent one is lent to nobody else until it is released."""

    def __init__(self, ports: list[int]):
        self.free, self.lent, self.lock = list(ports), {}, threading.Lock()

    def handle(self, method: str, path: str, args: dict) -> dict:
        with self.lock:
            if (method, path) == ("GET", "/get_instance"):
                return self._lend()
            if (method, path) == ("GET", "/release_instance"):
                port = self.lent.pop(args["uid"], None)
                self.free += [] if port is None else [port]
                return {"uid": args["uid"], "status": "released"}
        raise HttpError(404, "Not Found")

    def _lend(self) -> dict:
        if not self.free:
            raise HttpError(500, "Internal Server Error")
        uid = str(uuid.uuid4())
        self.lent[uid] = self.free.pop(0)
        return {"uid": uid, "port": self.lent[uid]}


@contextlib.contextmanager
def serve(workers: int = 8, port: int = 0, faults: Callable[[str, str, str], str | None] = lambda *request: None,
          log: list | None = None, dead: int = 0) -> Iterator[str]:
    """Run a manager and its workers on loopback in threads of this process; yields the manager's URL.

    faults("Manager" | "Worker", method, path) names the fault (of FAULTS) that a request is to meet, or None. log takes
    (session, env_str, action) of every applied step. dead: so many workers of the pool are ports nobody listens on.
    """
    servers = [_Server(Worker(log), 0, faults) for _ in range(workers)]
    gone = [_Server(Worker()) for _ in range(dead)]
    ports = [server.server_port for server in gone + servers]
    for server in gone:
        server.server_close()
    servers.insert(0, _Server(Manager(ports), port, faults))
    host = f"[{HOST}]" if ":" in HOST else HOST
    for server in servers:
        threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://{host}:{servers[0].server_port}"
    finally:
        stops = [threading.Thread(target=server.shutdown) for server in servers]  # up to 0.5 s each: all at once
        for thread in stops:
            thread.start()
        for thread, server in zip(stops, servers):
            thread.join()
            server.server_close()


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    server = commands.add_parser("serve", help="run the server; its URL is the first line it prints")
    server.add_argument("--port", type=int, default=0, help="manager's port (default: a free one)")
    server.add_argument("--workers", type=int, default=64, help="size of the pool (default: %(default)s)")
    tasks = commands.add_parser("tasks", help="write task rows")
    tasks.add_argument("--split", choices=("train", "heldout", "family"), required=True)
    tasks.add_argument("--count", type=int, required=True)
    tasks.add_argument("--seed", type=int, default=0)
    tasks.add_argument("--levels", type=int, nargs="+", choices=sorted(LEVELS), default=sorted(LEVELS))
    tasks.add_argument("--out", required=True)
    args = parser.parse_args(argv)
    if args.command == "tasks":
        rows = make_tasks(args.split, args.count, args.seed, tuple(args.levels))
        with open(args.out, "w", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
        return
    with serve(args.workers, args.port) as url, contextlib.suppress(KeyboardInterrupt):
        print(url, flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    sys.exit(main())
