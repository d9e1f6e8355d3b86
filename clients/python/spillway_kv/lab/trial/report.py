"""What a trial has found, as a table and a sentence."""

from __future__ import annotations

from typing import Any, NamedTuple

from rich.table import Table

from spillway_kv.lab.size.units import bytes_text
from spillway_kv.lab.trial.running import Errors, Run


class Row(NamedTuple):
    """One way to attend. `run` is None if its K/V do not fit the GPU."""

    name: str
    run: Run | None
    errors: Errors | None = None
    engine_bytes: int = 0  # of the engine on the GPU; 0 without one
    host_bytes: int = 0  # of the engine in host memory


def same_tokens(row: Row, reference: Row) -> float:
    """The share of next tokens that are those of the reference."""
    assert row.run is not None
    assert reference.run is not None
    return float((row.run.next_tokens == reference.run.next_tokens).float().mean())


def table_of(rows: list[Row], on_gpu: bool) -> Table:
    """A line for each way to attend."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    for name in (
        "GPU\nmemory" if on_gpu else "K/V of\nthe model",
        "host\nmemory",
        "first\ntoken",
        "tokens\n/s",
        "rows\nread",
        "certified\nerror",
        "observed,\nlargest",
        "same\ntoken",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(row.name, *_cells(row, rows[0]))
    return table


def _cells(row: Row, first: Row) -> list[str]:
    if row.run is None:
        return ["too much"]
    cells = [
        bytes_text(row.run.kv_bytes + row.engine_bytes),
        bytes_text(row.host_bytes) if row.host_bytes else "",
        f"{row.run.first_token_seconds:.2f} s",
        f"{row.run.tokens_per_second:.1f}",
    ]
    if row.errors is None:
        return cells
    e = row.errors
    cells += [f"{e.rows_read:.1%}", f"{e.certified:.3f}"]
    cells.append(f"{e.observed:.3f}, {e.observed_largest:.3f}")
    return cells if first.run is None else [*cells, f"{same_tokens(row, first):.0%}"]


def verdict(rows: list[Row]) -> str:
    """Which way is the better choice here. rows: dense attention, then Spillway's qualities."""
    dense, *others = rows
    best = max(others, key=lambda row: row.run.tokens_per_second if row.run else 0.0)
    assert best.run is not None
    if dense.run is None:
        return "Dense attention does not fit this GPU at this length."
    ratio = best.run.tokens_per_second / dense.run.tokens_per_second
    if ratio <= 1:
        return (
            "Dense attention is the better choice here: it fits, and decodes "
            f"{1 / ratio:.1f} times as fast as Spillway."
        )
    return (
        f"Spillway decodes {ratio:.1f} times as fast as dense attention, with quality {best.name}."
    )


def as_data(rows: list[Row]) -> list[dict[str, Any]]:
    """The same for machines: sizes in bytes, times in seconds."""
    told: list[dict[str, Any]] = []
    for row in rows:
        if row.run is None:
            told.append({"name": row.name, "fits": False})
            continue
        data: dict[str, Any] = {
            "name": row.name,
            "fits": True,
            "device_bytes": row.run.kv_bytes + row.engine_bytes,
            "host_bytes": row.host_bytes,
            "first_token_seconds": row.run.first_token_seconds,
            "tokens_per_second": row.run.tokens_per_second,
        }
        if row.errors is not None:
            data |= row.errors._asdict()
            if rows[0].run is not None:
                data["same_next_token"] = same_tokens(row, rows[0])
        told.append(data)
    return told
