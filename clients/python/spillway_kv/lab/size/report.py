"""What `spillway-lab size` says: as data, and as tables for people."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from spillway_kv.lab.size.described import Described
from spillway_kv.lab.size.fit import Fit
from spillway_kv.lab.size.layout import (
    CODED_FROM,
    PAGE_TOKENS,
    gpu_bytes,
    row_bytes,
)
from spillway_kv.lab.size.layout import code_bytes as codes_of
from spillway_kv.lab.size.units import bytes_text, tokens_text

Report = dict[str, Any]


def report(
    model: str,
    described: Described,
    fit: Fit,
    *,
    rank_count: int,
    token_count: int,
    sequence_count: int,
) -> Report:
    """Returns sizes in bytes, and lengths in tokens, of one rank.

    Args:
        model: As given on the command line.
        described: What its config says.
        fit: What the rank stores, and where.
        rank_count: Ranks of the model.
        token_count: Tokens of a sequence.
        sequence_count: Sequences whose sum is given.
    """
    layout, machine = fit.layout, fit.machine
    page = layout.page()
    on_gpu = machine.gpu is not None
    of_token = {
        "rows": layout.row_bytes * layout.kv_head_count,
        **{name: size * layout.kv_head_count / PAGE_TOKENS for name, size in asdict(page).items()},
        "resident_sample": (
            layout.resident_sample * layout.row_bytes * layout.kv_head_count if on_gpu else 0
        ),
    }
    of_sequence: dict[str, int] = {"rows": row_bytes(layout, token_count)}
    if on_gpu:
        of_sequence |= asdict(gpu_bytes(layout, token_count))
    else:
        of_sequence["codes"] = codes_of(layout, token_count)
    of_sequence["windows"] = fit.window_bytes(token_count)
    host_most, host_many = fit.host_tokens(), fit.host_sequences(token_count)
    fits: Report = {"host_tokens": host_most, "host_sequences": host_many}
    if on_gpu:
        fits |= {"gpu_tokens": fit.gpu_tokens(), "gpu_sequences": fit.gpu_sequences(token_count)}
    most, many = fits.get("gpu_tokens", host_most), fits.get("gpu_sequences", host_many)
    fits |= {
        "tokens": min(most, host_most),
        "tokens_limited_by": "gpu" if most < host_most else "host",
        "sequences": min(many, host_many),
        "sequences_limited_by": "gpu" if many < host_many else "host",
        "asked": fit.fits_host(token_count, sequence_count)
        and fit.fits_gpu(token_count, sequence_count),
        "dense_tokens": fit.dense_tokens(),
        "dense_sequences": fit.dense_sequences(token_count),
    }
    return {
        "model": model,
        "type": described.name,
        "dtype": described.dtype,
        "rank_count": rank_count,
        "position_count": described.position_count,
        "window_layers": {str(window): count for window, count in described.windows.items()},
        "layout": asdict(layout),
        "context": token_count,
        "sequence_count": sequence_count,
        "bytes_per_token_and_layer": of_token,
        "bytes_per_token": {name: size * layout.layer_count for name, size in of_token.items()},
        "bytes_per_sequence": of_sequence,
        "bytes_per_model": {"rotations": layout.rotation_bytes},
        "host": {"memory": machine.host, **asdict(fit.host())},
        "gpu": {
            "memory": machine.gpu,
            "weights": machine.weights,
            **asdict(fit.gpu(token_count, sequence_count)),
        }
        if on_gpu
        else None,
        "fits": fits,
    }


def show(said: Report, console: Console) -> None:
    """Prints a report as tables."""
    layout, gpu = said["layout"], said["gpu"]
    ranks = said["rank_count"]
    console.print(
        f"{said['type']}: {_count(layout['layer_count'], 'layer')} with full attention, "
        f"{_count(layout['kv_head_count'], 'KV head')} of {layout['head_dim']}, {said['dtype']}"
        + (f"; one of {ranks} ranks" if ranks > 1 else "")
    )
    for window, count in said["window_layers"].items():
        console.print(
            f"{_count(count, 'layer')} with a window of {window} tokens: K/V on the model's "
            "device, not in Spillway"
        )
    tables = {
        "A token takes": _of_a_token(said),
        f"A sequence of {tokens_text(said['context'])} tokens takes": _of_sequences(said),
        "Memory of the engine": _memory(said),
        "What fits": _fits(said),
    }
    for title, table in tables.items():
        # A table's own title would be as narrow as the table.
        console.print(f"\n{title}", style="bold", highlight=False)
        console.print(table)
    console.print(f"{_verdict(said)}\n")
    positions = said["position_count"]
    if positions is not None and said["context"] > positions:
        console.print(
            f"The config has positions for {tokens_text(positions)} tokens; the context of "
            f"{tokens_text(said['context'])} needs a model that was extended."
        )
    if said["context"] < CODED_FROM:
        console.print(f"Sequences below {tokens_text(CODED_FROM)} tokens have no codes.")
    if gpu is not None:
        console.print(
            "GPU memory that codes and workspaces do not take can hold copies of rows. Nothing "
            "here counts activations of the model, its CUDA graphs, or prompts."
        )


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"


def _table(*columns: str) -> Table:
    table = Table()
    table.add_column(columns[0])
    for column in columns[1:]:
        table.add_column(column, justify="right")
    return table


def _of_a_token(said: Report) -> Table:
    gpu = "GPU" if said["gpu"] is not None else "host"
    layout = said["layout"]
    rows = {
        "rows": ("K/V rows" + (", 8 bits" if layout["row_type"] == "int8" else ""), "host"),
        "key_codes": (f"codes of keys, {layout['key_bits']} bits", gpu),
        "key_metadata": ("  factors, norms, centres", gpu),
        "value_codes": (f"codes of values, {layout['value_bits']} bits", gpu),
        "value_metadata": ("  factors, centres", gpu),
        "resident_sample": (f"resident sample, {layout['resident_sample']:.2%}", gpu),
    }
    table = _table("", "in", "a layer", _count(layout["layer_count"], "layer"))
    of_layer, of_all = said["bytes_per_token_and_layer"], said["bytes_per_token"]
    for name, (words, place) in rows.items():
        if of_all[name]:
            table.add_row(words, place, bytes_text(of_layer[name]), bytes_text(of_all[name]))
    return table


def _of_sequences(said: Report) -> Table:
    gpu = "GPU" if said["gpu"] is not None else "host"
    count = said["sequence_count"]
    columns = ["", "in", "one"] + ([str(count)] if count > 1 else [])
    table = _table(*columns)
    rows = {
        "rows": ("K/V rows", "host"),
        "codes": ("codes", gpu),
        "resident": ("rows of the first 64 tokens and the sample", gpu),
        "recent": ("rows of the newest 128 tokens", gpu),
        "tables": ("tables of pages, statistics", gpu),
        "windows": ("K/V of windows, not in Spillway", gpu),
    }
    for name, (words, place) in rows.items():
        size = said["bytes_per_sequence"].get(name, 0)
        if size:
            sums = [bytes_text(size)] + ([bytes_text(count * size)] if count > 1 else [])
            table.add_row(words, place, *sums)
    return table


def _memory(said: Report) -> Table:
    host, gpu = said["host"], said["gpu"]
    ranks = said["rank_count"]
    table = _table("", "bytes")
    table.add_row("host" + (" (a rank's part)" if ranks > 1 else ""), bytes_text(host["memory"]))
    table.add_row("  memory.limit", bytes_text(host["limit"]))
    what = "rows" if gpu is not None else "rows and codes"
    table.add_row(f"    for {what}", bytes_text(host["arena"]))
    if gpu is None:
        return table
    table.add_row("GPU", bytes_text(gpu["memory"]))
    table.add_row("  the model's weights", bytes_text(gpu["weights"]))
    table.add_row("  device.gpu_memory_limit", bytes_text(gpu["limit"]))
    table.add_row("    for workspaces", bytes_text(gpu["workspaces"]))
    table.add_row("      of a decode step, at most", bytes_text(gpu["step_workspace"]))
    table.add_row("    for codes, resident rows, tables", bytes_text(gpu["arena"]))
    return table


def _fits(said: Report) -> Table:
    fits = said["fits"]
    on_gpu = said["gpu"] is not None
    columns = ["", *(["GPU", "host", "both"] if on_gpu else ["host"]), "a dense cache"]
    table = _table(*columns)
    table.add_row("tokens of one sequence", *_cells(fits, "tokens", tokens_text, on_gpu))
    table.add_row(
        f"sequences of {tokens_text(said['context'])} tokens",
        *_cells(fits, "sequences", str, on_gpu),
    )
    return table


def _cells(fits: Report, name: str, text: Any, on_gpu: bool) -> list[str]:
    names = [f"gpu_{name}", f"host_{name}", name] if on_gpu else [f"host_{name}"]
    return [text(fits[key]) for key in [*names, f"dense_{name}"]]


def _verdict(said: Report) -> str:
    fits, count = said["fits"], said["sequence_count"]
    what = f"{_count(count, 'sequence')} of {tokens_text(said['context'])} tokens"
    place = {"gpu": "GPU memory", "host": "host memory"}[fits["sequences_limited_by"]]
    if fits["asked"]:
        return f"{what} fit{'' if count > 1 else 's'}. The limit is {place}."
    return f"{what} do{'' if count > 1 else 'es'} not fit: {place} is the limit."
