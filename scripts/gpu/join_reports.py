"""Joins the reports that run_all.sh wrote to several folders into one tests.json.

  join_reports.py FOLDER... > docs/results/gpu/tests.json

A test that is in several folders counts once, with the result in the last folder. So after an
incomplete run, another run may add the missing tests. The runs with sanitizers are left out,
because they repeat tests of other suites.
"""

import argparse
import json
import xml.etree.ElementTree
from collections import Counter
from pathlib import Path

SUITES = ("conformance", "statistics", "gpu")
KEPT = ("program", "test", "result", "seconds")
RESULTS = {"failure": "failed", "error": "failed", "skipped": "skipped"}


def of_suite(report: Path) -> list[dict[str, object]]:
    tests = json.loads(report.read_text())["tests"]
    return [{name: test[name] for name in KEPT} for test in tests]


def of_pytest(report: Path) -> list[dict[str, object]]:
    found = []
    for case in xml.etree.ElementTree.parse(report).iter("testcase"):
        kinds = [RESULTS[child.tag] for child in case if child.tag in RESULTS]
        found.append(
            {
                "program": report.stem,
                "test": f"{case.get('classname', '')}.{case.get('name', '')}",
                "result": kinds[0] if kinds else "passed",
                "seconds": float(case.get("time", 0)),
            }
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path)
    tests: dict[tuple[object, object], dict[str, object]] = {}
    for folder in parser.parse_args().folders:
        for name in SUITES:
            if (folder / f"{name}.json").exists():
                found = of_suite(folder / f"{name}.json")
                tests |= {(test["program"], test["test"]): test for test in found}
        for report in sorted(folder.glob("*.xml")):
            tests |= {(test["program"], test["test"]): test for test in of_pytest(report)}
    counts = Counter(str(test["result"]) for test in tests.values())
    told = {name: counts[name] for name in ("passed", "failed", "skipped")}
    print("{", f'"counts": {json.dumps(told)},', '"tests": [', sep="\n")
    print(",\n".join(json.dumps(test) for test in tests.values()), "]", "}", sep="\n")


if __name__ == "__main__":
    main()
