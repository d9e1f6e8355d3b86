"""Runs a daemon for as long as its node is there: `python -m spillway_cluster.guard`.

Arguments: the process id of Ray's raylet on the node, the file that the daemon's own process id
is written to, and after `--` the daemon's command line. It lives on when the actor that started
it is killed, so that the next one finds the daemon; and where the raylet ends, it ends
the daemon, which nobody would find any more.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType

# As long as a daemon's own grace and a little more.
_GRACE_SECONDS = 30.0


def main(arguments: list[str]) -> int:
    """Returns the daemon's exit status, 128 and its signal where one ended it."""
    raylet_text, pid_file, dashes, *command = arguments
    if dashes != "--" or not command:
        raise SystemExit(f"not RAYLET_PID PID_FILE -- COMMAND: {arguments}")
    raylet = os.pidfd_open(int(raylet_text))
    process = subprocess.Popen(command)

    def passed_on(number: int, _: FrameType | None) -> None:
        process.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2):
        signal.signal(number, passed_on)
    # Whole or not at all, for who reads it meanwhile.
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
