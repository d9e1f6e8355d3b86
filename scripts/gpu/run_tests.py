"""Runs every test of GoogleTest programs in its own process.

A kernel with an invalid memory access makes the GPU context of its process unusable. With one
process per test, only the test that did this fails. Prints a line per failure, writes a JSON
report, and exits with 1 if a test failed.
"""

import argparse
import concurrent.futures
import json
import subprocess
import sys
import time
from pathlib import Path


def list_tests(program: Path, pattern: str) -> list[str]:
    out = subprocess.run(
        [program, "--gtest_list_tests", f"--gtest_filter={pattern}"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    tests, suite = [], ""
    for line in out.splitlines():
        name = line.split("#")[0].rstrip()
        if name.endswith(".") and not name.startswith(" "):
            suite = name
        elif name.startswith("  "):
            tests.append(suite + name.strip())
    return tests


def run_test(program: Path, name: str, prefix: list[str], timeout: float) -> dict[str, object]:
    begin = time.monotonic()
    command = [*prefix, str(program), f"--gtest_filter={name}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
        code, output = done.returncode, done.stdout + done.stderr
    except subprocess.TimeoutExpired as late:
        code = -1
        output = f"no end after {timeout} s\n{(late.stdout or b'').decode(errors='replace')}"
    skipped = "[  SKIPPED ] 1 test" in output
    return {
        "program": program.name,
        "test": name,
        "result": "failed" if code != 0 else "skipped" if skipped else "passed",
        "seconds": round(time.monotonic() - begin, 3),
        "output": f"exit code {code}\n{output}" if code != 0 else "",
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("programs", nargs="+", type=Path)
    parser.add_argument("--filter", default="*")
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--timeout", type=float, default=120)
    parser.add_argument("--prefix", default="", help="a checker to run the tests under")
    parser.add_argument("--report", type=Path)
    options = parser.parse_args()
    tests = [(p, t) for p in options.programs for t in list_tests(p, options.filter)]
    results = []
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        futures = [
            pool.submit(run_test, p, t, options.prefix.split(), options.timeout) for p, t in tests
        ]
        for future in concurrent.futures.as_completed(futures):
            result = future.result()
            results.append(result)
            if result["result"] == "failed":
                lines = str(result["output"]).splitlines()
                shown = [x for x in lines if not x.startswith(("[---", "[===", "Note:"))]
                print(f"FAILED {result['test']}", *shown[:14], sep="\n    ", flush=True)
    counts = {
        kind: sum(r["result"] == kind for r in results) for kind in ("passed", "failed", "skipped")
    }
    print(", ".join(f"{n} {kind}" for kind, n in counts.items()))
    if options.report is not None:
        results.sort(key=lambda r: (str(r["program"]), str(r["test"])))
        options.report.write_text(json.dumps({"counts": counts, "tests": results}, indent=1) + "\n")
    return 1 if counts["failed"] or not results else 0


if __name__ == "__main__":
    sys.exit(main())
