"""Runs a daemon as long as its Ray node exists: `python -m spillway_kv.cluster.guard`.

Arguments: the process id of Ray's raylet on the node, the file to which the daemon's process id is
written, and after `--` the daemon's command line. The guard survives the actor that started it, so
that the next actor finds the daemon. If the raylet ends, the guard ends the daemon, because no
actor could find it any more.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType

# A little longer than the daemon's own grace time.
_GRACE_SECONDS = 30.0


def main(arguments: list[str]) -> int:
    """Returns the daemon's exit status, or 128 plus the signal that ended it."""
    raylet_text, pid_file, dashes, *command = arguments
    if dashes != "--" or not command:
        raise SystemExit(f"not RAYLET_PID PID_FILE -- COMMAND: {arguments}")
    raylet = os.pidfd_open(int(raylet_text))
    process = subprocess.Popen(command)

    def passed_on(number: int, _: FrameType | None) -> None:
        process.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2):
        signal.signal(number, passed_on)
    # Written aside and renamed, so that readers see the whole file or none.
    aside = Path(f"{pid_file}.{os.getpid()}")
    aside.write_text(str(process.pid))
    aside.replace(pid_file)
    daemon = os.pidfd_open(process.pid)
    ended, _, _ = select.select([raylet, daemon], [], [])
    if daemon not in ended:
        process.terminate()
        try:
            process.wait(_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
    status = process.wait()
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
