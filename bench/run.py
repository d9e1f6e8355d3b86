"""Runs the benchmarks and writes docs/results: JSON files, plots and a page with tables.

`make bench` calls it after a release build. Every result is checked against a reference before
it is timed. In the same run, in turns with it, a plain read and the methods that it is compared
with are timed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Idle threads of torch must not spin beside the process that is measured.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import attend
import demo
import environment
import memory
import plot
import report
import trace_data

ROOT = environment.ROOT


def run_score(binaries: Path, data: Path, repetitions: int) -> dict[str, Any]:
    command = [binaries / "bench/cpu/score_bench", data, "--repetitions", str(repetitions)]
    run = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    result = json.loads(run.stdout)
    for row in result["passes"]:
        print(
            f"  {row['selector']}, {row['thread_count']} threads: "
            f"{row['us_per_million_keys']:.0f} us per million keys, "
            f"{row['share_of_read_rate']:.0%} of the read rate",
            flush=True,
        )
    return {
        "shape": "one KV head, 4 query heads, 128 dimensions, cold caches",
        "repetitions": repetitions,
        **result,
    }


def run_rpc(binaries: Path, scratch: Path) -> dict[str, Any]:
    path = scratch / "rpc.json"
    subprocess.run(
        [binaries / "bench/rpc/rpc_bench", "--spillwayd", daemon(binaries), "--json", path],
        check=True,
    )
    return json.loads(path.read_text())


def daemon(binaries: Path) -> Path:
    return binaries / "daemon" / "spillwayd"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "names",
        nargs="*",
        help="attend, score, memory, rpc, demo; all of them when none is named",
    )
    parser.add_argument("--build", type=Path, default=ROOT / "build" / "release")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results")
    parser.add_argument(
        "--tokens", type=int, default=trace_data.LENGTHS[-1], help="longest context"
    )
    parser.add_argument("--repetitions", type=int, default=12)
    arguments = parser.parse_args()
    os.environ["SPILLWAYD"] = str(daemon(arguments.build))
    data = trace_data.ensure(arguments.tokens)
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    benches: dict[str, Callable[[], dict[str, Any]]] = {
        "attend": lambda: attend.run(arguments.build, data, arguments.repetitions),
        "score": lambda: run_score(arguments.build, data, arguments.repetitions),
        "memory": lambda: memory.run(data),
        "rpc": lambda: run_rpc(arguments.build, data.parent),
        "demo": lambda: demo.run(data.parent, out),
    }
    unknown = set(arguments.names) - set(benches)
    if unknown:
        parser.error(f"no benchmark {', '.join(sorted(unknown))}")
    for name, bench in benches.items():
        if arguments.names and name not in arguments.names:
            continue
        print(f"{name}:", flush=True)
        head = environment.describe()
        start = time.monotonic()
        result = bench()
        head["seconds"] = round(time.monotonic() - start, 1)
        (out / f"{name}.json").write_text(json.dumps({**head, **result} | head, indent=2) + "\n")
    plot.draw(out)
    report.write(out)
    print(f"results in {os.path.relpath(out)}")


if __name__ == "__main__":
    sys.exit(main())
