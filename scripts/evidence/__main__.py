"""Makes the tables and pictures of the pages from their records, and measures these again.

Without options and PARTS, all tables and pictures are made again from the committed records.
With PARTS, their steps run, in --work. Complete steps are not run again, and an interrupted one
continues.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from pathlib import Path

# Only what is drawn to files.
import matplotlib

matplotlib.use("Agg")

import pages
import running
from inputs import ROOT
from parts import PARTS, RESULTS
from tables import TABLES


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="evidence", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help="PART, PART/STEP, or all")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--list", action="store_true", help="list the parts and what they need")
    what.add_argument(
        "--render", action="store_true", help="only make pages from the committed records"
    )
    what.add_argument(
        "--check", action="store_true", help="fail if a page differs from what the records give"
    )
    what.add_argument(
        "--adopt",
        action="store_true",
        help="put the records of complete steps in place of the committed ones, and render",
    )
    parser.add_argument("--work", type=Path, default=ROOT / "build/evidence", help="for PARTS")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    runner = running.Runner(options.work, say)
    try:
        chosen = running.choose(options.parts or ["all"], PARTS)
        parts = [part for part, _ in chosen]
        start = time.monotonic()
        if options.list:
            print("\n".join(running.list_parts(parts, runner, bool(options.parts))))
        elif options.check:
            differences = pages.check(parts, TABLES, RESULTS.parent)
            print("\n".join(differences[:200]))
            say(f"{len(differences)} lines differ" if differences else "all pages agree")
            return 1 if differences else 0
        elif options.adopt or options.render or not options.parts:
            if options.adopt:
                for path in runner.adopt(chosen, RESULTS):
                    say(f"adopted {path.relative_to(ROOT)}")
                # Tables of other parts may be from these records, too.
                parts += [part._replace(reports=(), scripts=()) for part in PARTS]
            pages.render(parts, TABLES, RESULTS.parent, draw=True)
            say(f"made from the records in {running.told(time.monotonic() - start)}")
        else:
            runner.run(chosen)
            say(f"complete: {', '.join(part.name for part in parts)}; --adopt takes the records")
    except (FileNotFoundError, RuntimeError, ValueError) as error:
        print(f"evidence: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("evidence: interrupted; the same command continues", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
