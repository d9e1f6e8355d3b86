"""The commands of docs/operations.md run here."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from daemon_process import ROOT, binary
from test_cli import BINARY as CLI

PAGE = ROOT / "docs/operations.md"
# Matches a daemon in the background, so that a wait can be added after it.
STARTED = re.compile(r"(spillwayd (?:[^\n]|\\\n)*?) &\n")
BEGIN = f"""set -euo pipefail
export PATH={binary().resolve().parent}:{Path(CLI).resolve().parent}:$PATH
python3() {{ {sys.executable} "$@"; }}
trap 'kill $(jobs -p) 2>/dev/null; wait' EXIT
"""


def script_of(*sections: str) -> str:
    """The commands of several sections, which build on each other, as a script that can run."""
    page = PAGE.read_text()
    text = "".join(
        page.split(f"\n## {section}\n", 1)[1].split("\n## ", 1)[0] for section in sections
    )
    script = "".join(re.findall(r"```sh\n(.*?)```", text, re.DOTALL))
    for port in sorted(set(re.findall(r":(731\d)", script))):
        script = script.replace(f":{port}", f":{free_port()}")
    started = 0

    def wait_too(found: re.Match[str]) -> str:
        nonlocal started
        started += 1
        log = f"spillwayd.{started}.log"
        wait = f"until grep -q ' serving ' {log} || ! kill -0 $!; do sleep 0.05; done"
        flags = f"--memory-limit 256MiB --device cpu > {log} 2>&1"
        return f"{found[1]} {flags} &\n{wait}\n"

    return BEGIN + STARTED.sub(wait_too, script)


def free_port() -> int:
    """A port that is not in use."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port


@pytest.mark.parametrize("sections", [("TLS", "Tokens")])
def test_the_commands_of_a_section_run(sections: tuple[str, ...], tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "SPILLWAY_TARGET"}
    done = subprocess.run(
        ["bash", "-c", script_of(*sections)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    logs = "\n".join(log.read_text() for log in sorted(tmp_path.glob("spillwayd.*.log")))
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{logs}"
    assert "cannot_start" not in logs
