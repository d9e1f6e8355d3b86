"""Where the K/V of prompts in chunks are in GPU memory, and when they may go."""

from __future__ import annotations

import pytest
import torch
from spillway_kv.vllm.prompt_rows import PromptRows

CPU = torch.device("cpu")


class Rows(PromptRows):
    """Room for 100 tokens of 2 layers, 3 KV heads and 4 dimensions. `read` is still read."""

    def __init__(self, tokens: int = 100) -> None:
        self.read: set[int] = set()
        count = 2 * 2 * 3 * 4 * tokens
        super().__init__(2, 3, 4, torch.float16, CPU, 2 * count, self.read.__contains__)


def _place(rows: Rows, key: int, end: int, start: int = 0) -> int | None:
    """Extends a prompt, and returns where its K/V are, in tokens."""
    made = rows.extend(key, start, end)
    return None if made is None else made.storage_offset() // (2 * 2 * 3 * 4)


def test_chunks_follow_each_other() -> None:
    rows = Rows()
    rows.open(1, 40, [])
    first = rows.extend(1, 0, 30)
    assert first is not None
    assert first.shape == (2, 2, 3, 30, 4)
    first[:] = torch.arange(30)[:, None]
    later = rows.extend(1, 30, 40)
    assert later is not None
    assert later.shape == (2, 2, 3, 40, 4)
    assert torch.equal(later[1, 1, 2, :30, 3], torch.arange(30).half())
    rows.close_complete()
    assert rows.extend(1, 40, 41) is None


@pytest.mark.parametrize(("start", "end"), [(29, 40), (31, 40), (30, 41)])
def test_what_does_not_follow_has_no_memory(start: int, end: int) -> None:
    """Tokens are missing or there already, or it is longer than was told."""
    rows = Rows()
    rows.open(1, 40, [])
    assert _place(rows, 1, 30) == 0
    assert rows.extend(1, start, end) is None
    # Its memory is free.
    rows.open(2, 100, [])
    assert _place(rows, 2, 10) == 0


def test_memory_that_is_read_is_not_given_away() -> None:
    rows = Rows()
    rows.open(1, 60, [])
    assert _place(rows, 1, 60) == 0
    rows.read.add(1)
    rows.close_complete()
    rows.open(2, 60, [])
    assert _place(rows, 2, 10) is None
    rows.open(3, 40, [])
    assert _place(rows, 3, 10) == 60
    rows.read.clear()
    rows.open(2, 60, [3])
    assert _place(rows, 2, 10) == 0


def test_gaps_are_used_and_others_make_room() -> None:
    rows = Rows()
    for key in (1, 2, 3):
        rows.open(key, 30, [1, 2, 3])
        assert _place(rows, key, 10) == 30 * (key - 1)
    rows.close(2)
    rows.open(4, 31, [1, 3])
    assert _place(rows, 4, 10) is None
    rows.open(5, 30, [1, 3])
    assert _place(rows, 5, 10) == 30
    # Others than 3 and 5 may lose theirs.
    rows.open(6, 30, [3, 5])
    assert _place(rows, 6, 10) == 0
    assert rows.extend(1, 10, 20) is None
    assert _place(rows, 3, 20, 10) == 60


def test_a_prompt_that_never_fits_takes_nothing() -> None:
    rows = Rows()
    rows.open(1, 101, [])
    assert rows.extend(1, 0, 50) is None
    nothing = Rows(0)
    nothing.open(1, 1, [])
    assert nothing.extend(1, 0, 1) is None


def test_without_memory_prompts_fetch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is said once."""

    def full(*_: object, **__: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    rows = Rows()
    monkeypatch.setattr(torch, "empty", full)
    for key in (1, 2):
        rows.open(key, 40, [])
        assert rows.extend(key, 0, 30) is None
    assert [each.message for each in caplog.records] == [
        "prompts fetch the K/V of earlier chunks: CUDA out of memory"
    ]
