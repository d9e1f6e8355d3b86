"""Short runs of `make chaos` and `make soak`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import spillway_kv

TESTS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TESTS))

from chaos.contents import LAYERS, SHAPES, Tally, check_sequence, rows  # noqa: E402

# The folder tests/vllm must not stand for the package in other tests.
sys.path.remove(str(TESTS))


def run(module: str, flags: list[str]) -> str:
    """Runs a program of tests/chaos, which must find nothing wrong; returns its output."""
    folders = [str(TESTS), str(TESTS / "python"), os.environ.get("PYTHONPATH", "")]
    path = os.pathsep.join(filter(None, folders))
    done = subprocess.run(
        [sys.executable, "-m", module, *flags],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


class Late:
    """A sequence to which the last rows of a writer come just before the first attend."""

    def __init__(self, sequence: spillway_kv.Sequence, late: Any) -> None:
        self._sequence, self._late = sequence, late

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sequence, name)

    def attend(self, *arguments: Any) -> Any:
        if self._late is not None:
            self._sequence.append(0, 1000, self._late, -self._late)
            self._late = None
        return self._sequence.attend(*arguments)


def test_what_a_writer_has_sent_may_come_late(client: spillway_kv.Client) -> None:
    model = client.create_model("late", **SHAPES)
    sequence = client.create_sequence(model)
    try:
        k = rows(1, 0, 1000)
        sequence.append(0, 0, k, -k)
        tally = Tally()
        late: Any = Late(sequence, rows(1, 1000, 500))
        check_sequence(late, 1, [1000] * LAYERS, tally)
        assert sequence.refresh().token_count == 1500
        assert not tally.wrong_answers
        assert tally.lost_rows == 0
        # It says so where they are not the writer's.
        check_sequence(sequence, 2, [1500] * LAYERS, tally)
        assert len(tally.wrong_answers) == 2 * LAYERS
    finally:
        sequence.delete()
        client.delete_model(model)


def test_chaos() -> None:
    counts = {
        "--daemon-kills": 8,
        "--client-kills": 8,
        "--runner-kills": 6,
        "--rounds": 2,
        "--messages": 3000,
    }
    flags = [str(word) for pair in counts.items() for word in pair]
    told = run("chaos", flags)
    assert "acknowledged rows lost: 0\nwrong answers: 0\n" in told
    assert "8 daemon killed" in told


def test_soak() -> None:
    # Too short for a trend of memory. This only tests that the program works and leaves nothing.
    told = run("chaos.soak", ["--minutes", "0.15", "--every", "1", "--limit", "1000000"])
    assert "'client killed': 1" in told
    assert "wrong: []" in told
