"""Speed and memory of the detector: python tests/bench_deloop.py [STEPS ...]

For each size a fresh process generates the steps (not timed) and flags them, so that the peak is that run's own. Times
are of one thread. floor: what json itself costs on the same calls (loads + dumps), or, for text actions, a bare set of
(action, observation) tuples, which keeps every text. naive: the definition as two nested loops.
"""
from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import deloop

SIZES = (10_000, 100_000, 1_000_000, 10_000_000)


def text_steps(count: int) -> Iterator[tuple[str, str]]:
    """Short text actions; every second step is new, so that the memory of the detector grows with the run."""
    return ((f"go to shelf {t // 2}", f"you see box {t // 2}") for t in range(count))


def call_steps(count: int) -> Iterator[tuple[dict, str]]:
    """Tool calls as OpenAI logs hold them, parameters as JSON text."""
    return (({"name": "search", "arguments": f'{{"query": "item {t // 2}", "limit": 10, "filters": {{"open": true}}}}'},
             f"found {t // 2}") for t in range(count))


def large_steps(count: int) -> Iterator[tuple[str, str]]:
    """Observations of 100 kB, each of them a new string."""
    return ((f"cat {t // 2}", f"{t // 2}" + "x" * 100_000) for t in range(count))


def timed(work) -> float:
    """CPU seconds of one call."""
    began = time.process_time()
    work()
    return time.process_time() - began


def naive(run: list) -> list[bool]:
    """The definition itself, O(n^2)."""
    seen = [(deloop.kappa(action), observation) for action, observation in run]
    return [any(seen[u] == seen[t] for u in range(t)) for t in range(len(seen))]


def floor(kind: str, run: list) -> float:
    """Seconds of the least that could be done with these steps."""
    if kind == "call":
        return timed(lambda: [json.dumps(json.loads(action["arguments"])) for action, _ in run])
    return timed(lambda: len(set(run)))


def measure(kind: str, count: int) -> dict:
    """One measurement, meant for a process of its own. Large observations are streamed, never held in a list."""
    source = {"text": text_steps, "call": call_steps, "large": large_steps}[kind](count)
    run = source if kind == "large" else list(source)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds = timed(lambda: deloop.loop_flags(run))
    result = {"kind": kind, "steps": count, "seconds": seconds,
              "peak_mb": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024}
    if kind != "large":
        result["floor"] = floor(kind, run)
        if count == SIZES[0]:                   # a quarter of the square is timed, the rest follows from it
            result["naive"] = 4 * timed(lambda: naive(run[:count // 2]))
    return result


def main() -> None:
    """Measure every size, each in its own process, and print a markdown table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("steps", nargs="*", type=int, help=f"sizes [{' '.join(map(str, SIZES))}]")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.one, options.steps[0])))
        return
    print("| steps | count | steps/s | peak memory above the input | against the floor | naive |")
    print("|---|---|---|---|---|---|")
    for kind, count in [(kind, n) for kind in ("text", "call") for n in options.steps or SIZES] + [("large", 10_000)]:
        command = [sys.executable, __file__, "--one", kind, str(count)]
        result = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        ratio = f"{result['seconds'] / result['floor']:.1f} x" if "floor" in result else "-"
        slow = f"{result['naive'] / result['seconds']:.0f} x slower" if "naive" in result else "-"
        rate, peak = f"{count / result['seconds']:,.0f}", f"{result['peak_mb']:.0f} MB"
        print(f"| {kind} | {count:,} | {rate} | {peak} | {ratio} | {slow} |", flush=True)


if __name__ == "__main__":
    main()
