"""Plots of the results of spillway-link-bench, each with the limit of the link."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from spillway_kv.lab.evaluation import style

# A measurement. Keys are the columns of link.csv.
Row = Mapping[str, Any]

ENGINES = {
    "copy_engine": "copy engine, row by row",
    "sm": "SM loads and stores",
    "bulk": "SM bulk copies",
    "batch": "copy engine, batched",
}
ORDERS = {"sorted": "rows sorted by address", "shuffled": "rows in random order"}
DIRECTIONS = {"h2d": "host to device", "d2h": "device to host", "both": "both at once"}
_COLOURS = (style.BLUE, style.ORANGE, style.GREEN, style.RED, style.PURPLE, style.SKY, style.BLACK)
PINNINGS = {
    "cuda_host_alloc": "cudaHostAlloc",
    "huge_pages": "huge pages, registered",
    "small_pages": "4 KiB pages, registered",
}


@dataclass(frozen=True)
class Limit:
    """The rate that no transfer in a direction exceeds.

    Attributes:
        gb_per_s: In 1e9 bytes per second. For both directions at once: their sum.
        label: Source of the number.
    """

    gb_per_s: float
    label: str


def limits(rows: Sequence[Row], link: Mapping[str, Any] | None) -> dict[str, Limit]:
    """Returns the limit of each direction: the link's rate, or else the rate of large copies.

    Args:
        rows: All measurements.
        link: The link as the driver reports it. None if it reports nothing.
    """
    if link is not None:
        name = f"PCIe {link['generation_max']} x{link['width_max']}"
        each = Limit(link["gb_per_s"], f"{name}: {link['gb_per_s']:.1f} GB/s each way")
        return {
            "h2d": each,
            "d2h": each,
            "both": Limit(2 * each.gb_per_s, each.label),
        }
    found = {}
    for row in rows:
        if row["experiment"] == "peak" and row["gb_per_s"] is not None:
            direction = row["direction"]
            label = f"copy engine's measured peak, {DIRECTIONS[direction]}"
            found[direction] = Limit(row["gb_per_s"], f"{label}: {row['gb_per_s']:.1f} GB/s")
    return found


def pinnings(rows: Sequence[Row]) -> list[Row]:
    """Returns one measurement of each allocation of the pinning experiment, in order."""
    found: dict[Hashable, Row] = {}
    for row in rows:
        if row["experiment"] == "pinning":
            found.setdefault((row["allocation_bytes"], row["pinning"]), row)
    return list(found.values())


def format_bytes(count: int) -> str:
    """Formats a byte count such as `16 GiB`, with the largest binary unit that gives an integer."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count % 1024 or count == 0:
            return f"{count} {unit}"
        count //= 1024
    return f"{count} TiB"


def draw(
    rows: Sequence[Row], link: Mapping[str, Any] | None, caption: str, folder: Path
) -> list[Path]:
    """Draws every experiment that has results.

    Args:
        rows: Measurements. Those whose check failed are left out.
        link: The link as the driver reports it, or None.
        caption: Small print below the plots: device and date.
        folder: Where the PNG files go.

    Returns:
        The files, in the order of the experiments.
    """
    bounds = limits(rows, link)
    drawers: dict[str, Callable[[Sequence[Row], Mapping[str, Limit]], Figure]] = {
        "engines": draw_engines,
        "rows": draw_rows,
        "spans": draw_spans,
        "density": draw_density,
        "sms": draw_sms,
        "directions": draw_directions,
        "numa": draw_numa,
        "pinning": draw_pinning,
    }
    files = []
    for name, drawer in drawers.items():
        chosen = [r for r in rows if r["experiment"] == name and r["gb_per_s"] is not None]
        if not chosen:
            continue
        figure = drawer(chosen, bounds)
        figure.text(0.004, 0.004, caption, fontsize=7, color="gray")
        path = folder / f"link_{name}.png"
        figure.savefig(path, dpi=110)
        files.append(path)
    return files


def redraw(folder: Path) -> list[Path]:
    """Draws link.csv and link.json of a folder again. Returns the files."""
    with (folder / "link.csv").open(newline="") as file:
        rows = [
            {name: _typed(name, text) for name, text in row.items()} for row in csv.DictReader(file)
        ]
    about = json.loads((folder / "link.json").read_text())
    return draw(rows, about["link"], f"{about['device']}, {about['date']}", folder)


def _typed(name: str, text: str) -> Any:
    """Parses a cell of link.csv. Empty cells were not measured."""
    if name in ("experiment", "engine", "direction", "order", "pinning"):
        return text
    return json.loads(text) if text else None


def draw_engines(rows: Sequence[Row], bounds: Mapping[str, Limit]) -> Figure:
    """Rates by row size, with a curve for each engine and a panel for each direction."""
    directions = [d for d in ("h2d", "d2h") if any(r["direction"] == d for r in rows)]
    figure, panels = _panels(
        len(directions),
        _engines_message([row for row in rows if row["direction"] == directions[0]]),
        _common(rows, "density", "order"),
    )
    for axes, direction in zip(panels, directions, strict=True):
        chosen = [row for row in rows if row["direction"] == direction]
        curves = _curves(axes, chosen, "row_bytes", lambda row: ENGINES[row["engine"]])
        _sizes(axes, chosen, "row_bytes", "row size")
        _rates(axes, bounds, direction)
        # On a logarithmic axis, because engines differ by orders of magnitude at the same row size.
        _logarithmic(axes)
        axes.set_title(DIRECTIONS[direction])
        style.label_ends(axes, curves)
    return figure


def draw_rows(rows: Sequence[Row], bounds: Mapping[str, Limit]) -> Figure:
    """Rates by row size, with a curve for each span and a panel for each order."""
    span = max(row["span_bytes"] for row in rows)
    least = min(row["row_bytes"] for row in rows)
    return _by_order(
        rows,
        bounds,
        f"Rows of {format_bytes(least)} in {format_bytes(span)}: "
        + _orders_message(rows, row_bytes=least, span_bytes=span),
        "row_bytes",
        "row size",
        lambda row: f"span of {format_bytes(row['span_bytes'])}",
    )


def draw_spans(rows: Sequence[Row], bounds: Mapping[str, Limit]) -> Figure:
    """Rates by span, with a curve for each row size and a panel for each order."""
    sizes = sorted({row["row_bytes"] for row in rows})
    size = sizes[len(sizes) // 2]
    low, high = (pick(row["span_bytes"] for row in rows) for pick in (min, max))
    return _by_order(
        rows,
        bounds,
        f"Rows of {format_bytes(size)} in {format_bytes(low)}: "
        f"{_orders_message(rows, row_bytes=size, span_bytes=low)}; in {format_bytes(high)}: "
        + _orders_message(rows, row_bytes=size, span_bytes=high),
        "span_bytes",
        "span of pinned memory",
        lambda row: f"rows of {format_bytes(row['row_bytes'])}",
    )


def draw_density(rows: Sequence[Row], bounds: Mapping[str, Limit]) -> Figure:
    """Rates by density, with a curve for each engine and SM count and a panel for each order."""
    orders = _orders(rows)
    figure, panels = _panels(
        len(orders),
        f"Best rate by the share of the rows that is read: {_density_message(rows)}",
        _common(rows, "row_bytes", "span_bytes"),
    )
    for axes, order in zip(panels, orders, strict=True):
        chosen = [row for row in rows if row["order"] == order]
        curves = _curves(
            axes, chosen, "density", lambda row: f"{ENGINES[row['engine']]}, {_sms(row)}"
        )
        axes.set_xscale("log")
        ticks = sorted({row["density"] for row in chosen})
        axes.set_xticks(ticks, [f"{100 * t:g}" for t in ticks])
        axes.minorticks_off()
        axes.set_xlabel("% of the span's rows")
        _rates(axes, bounds, "h2d")
        axes.set_title(ORDERS[order])
        style.label_ends(axes, curves)
    return figure


def draw_sms(rows: Sequence[Row], bounds: Mapping[str, Limit]) -> Figure:
    """Rates by SM count, with a curve for each order and density and a panel for each engine."""
    engines = [e for e in ("sm", "bulk") if any(r["engine"] == e for r in rows)]
    best = max(rows, key=lambda row: float(row["gb_per_s"]))
    figure, panels = _panels(
        len(engines),
        f"Best rate: {best['gb_per_s']:.0f} GB/s, by {ENGINES[best['engine']]} on {_sms(best)}",
        _common(rows, "row_bytes", "span_bytes"),
    )
    for axes, engine in zip(panels, engines, strict=True):
        chosen = [row for row in rows if row["engine"] == engine]
        curves = _curves(
            axes, chosen, "sm_count", lambda row: f"{100 * row['density']:g} %, {row['order']}"
        )
        axes.set_xscale("log", base=2)
        ticks = sorted({row["sm_count"] for row in chosen})
        axes.set_xticks(ticks, [str(t) for t in ticks], fontsize=7)
        axes.minorticks_off()
        axes.set_xlabel("SMs")
        _rates(axes, bounds, "h2d")
        axes.set_title(ENGINES[engine])
        style.label_ends(axes, curves)
    return figure


def draw_directions(rows: Sequence[Row], bounds: Mapping[str, Limit]) -> Figure:
    """Rates of engines, with a bar for each row size and a panel for each direction."""
    directions = [d for d in DIRECTIONS if any(r["direction"] == d for r in rows)]
    most = (
        f"{DIRECTIONS[d]} {max(r['gb_per_s'] for r in rows if r['direction'] == d):.0f} GB/s"
        for d in directions
    )
    title = f"Best rate: {', '.join(most)}"
    figure, panels = _panels(len(directions), title, _common(rows, "density"))
    for axes, direction in zip(panels, directions, strict=True):
        chosen = [row for row in rows if row["direction"] == direction]
        _bars(
            axes,
            chosen,
            group=lambda row: ENGINES[row["engine"]].replace(", ", ",\n"),
            bar=lambda row: f"rows of {format_bytes(row['row_bytes'])}",
            value=lambda row: row["gb_per_s"],
        )
        axes.tick_params(axis="x", labelsize=7)
        _rates(axes, bounds, direction)
        axes.set_title(DIRECTIONS[direction])
    _legend(figure, panels[0])
    return figure


def draw_numa(rows: Sequence[Row], bounds: Mapping[str, Limit]) -> Figure:
    """Rates by NUMA node, with a bar for each engine and order and a panel for each direction."""
    directions = [d for d in ("h2d", "d2h") if any(r["direction"] == d for r in rows)]
    best = max(rows, key=lambda row: float(row["gb_per_s"]))
    title = f"Best rate: {best['gb_per_s']:.0f} GB/s, with memory of NUMA node {best['numa_node']}"
    figure, panels = _panels(len(directions), title)
    for axes, direction in zip(panels, directions, strict=True):
        chosen = [row for row in rows if row["direction"] == direction]
        _bars(
            axes,
            chosen,
            group=lambda row: f"node {row['numa_node']}",
            bar=lambda row: (
                f"{ENGINES[row['engine']]}, {format_bytes(row['row_bytes'])}, "
                f"{100 * row['density']:g} %, {row['order']}"
            ),
            value=lambda row: row["gb_per_s"],
        )
        _rates(axes, bounds, direction)
        axes.set_title(DIRECTIONS[direction])
    _legend(figure, panels[0])
    return figure


def draw_pinning(rows: Sequence[Row], bounds: Mapping[str, Limit]) -> Figure:
    """Time to allocate and pin, by size, and the rates of copies from this memory."""
    size = max(row["allocation_bytes"] for row in rows)
    times = sorted(
        (row["pin_seconds"], PINNINGS[row["pinning"]])
        for row in pinnings(rows)
        if row["allocation_bytes"] == size
    )
    title = f"To allocate and pin {format_bytes(size)}: " + "; ".join(
        f"{name} {seconds:.1f} s" for seconds, name in times
    )
    figure, (left, right) = _panels(2, title)
    _bars(
        left,
        pinnings(rows),
        group=lambda row: format_bytes(row["allocation_bytes"]),
        bar=lambda row: PINNINGS[row["pinning"]],
        value=lambda row: row["pin_seconds"],
    )
    left.set_ylabel("seconds to allocate and pin")
    left.set_title("time")
    _bars(
        right,
        [row for row in rows if row["allocation_bytes"] == rows[-1]["allocation_bytes"]],
        group=lambda row: row["order"],
        bar=lambda row: PINNINGS[row["pinning"]],
        value=lambda row: row["gb_per_s"],
    )
    last = rows[-1]
    right.set_title(
        f"rows of {format_bytes(last['row_bytes'])}, {100 * last['density']:g} % of "
        f"{format_bytes(last['allocation_bytes'])}"
    )
    _rates(right, bounds, "h2d")
    left.grid(alpha=0.3)
    _legend(figure, left)
    return figure


def _by_order(
    rows: Sequence[Row],
    bounds: Mapping[str, Limit],
    title: str,
    key: str,
    axis: str,
    kind: Callable[[Row], str],
) -> Figure:
    """Rates by a column, with a panel for each order."""
    orders = _orders(rows)
    figure, panels = _panels(len(orders), title, _common(rows, "engine", "density", "sm_count"))
    for axes, order in zip(panels, orders, strict=True):
        chosen = [row for row in rows if row["order"] == order]
        curves = _curves(axes, chosen, key, kind)
        _sizes(axes, rows, key, axis)
        _rates(axes, bounds, "h2d")
        axes.set_title(ORDERS[order])
        style.label_ends(axes, curves)
    return figure


def _engines_message(rows: Sequence[Row]) -> str:
    """Names the fastest and the slowest engine for rows of 512 B, or of the nearest size."""
    size = min({row["row_bytes"] for row in rows}, key=lambda size: abs(size - 512))
    rates = sorted(
        (row["gb_per_s"], ENGINES[row["engine"]]) for row in rows if row["row_bytes"] == size
    )
    (low, slowest), (high, fastest) = rates[0], rates[-1]
    return (
        f"Rows of {format_bytes(size)}, {DIRECTIONS[rows[0]['direction']]}: {fastest} "
        f"{high:.0f} GB/s; {slowest} {low:.1f} GB/s"
    )


def _orders_message(rows: Sequence[Row], **columns: int) -> str:
    """Returns the rate of each order at given values of some columns."""
    found = (
        f"{order} {row['gb_per_s']:.0f} GB/s"
        for order in _orders(rows)
        for row in rows
        if row["order"] == order and all(row[name] == at for name, at in columns.items())
    )
    return ", ".join(found)


def _density_message(rows: Sequence[Row]) -> str:
    """Returns, for each order, the best rate, and the smallest density with 95 % of it."""
    found = []
    for order in _orders(rows):
        chosen = [row for row in rows if row["order"] == order]
        most = max(row["gb_per_s"] for row in chosen)
        least = min(row["density"] for row in chosen if row["gb_per_s"] >= 0.95 * most)
        found.append(f"{order} {most:.0f} GB/s from {100 * least:g} % on")
    return ", ".join(found)


def _orders(rows: Sequence[Row]) -> list[str]:
    return [order for order in ORDERS if any(row["order"] == order for row in rows)]


def _panels(count: int, title: str, conditions: str = "") -> tuple[Figure, list[Axes]]:
    """Makes panels of equal height below a title and the common conditions of all measurements."""
    figure = style.make_figure(5.8 * count + 0.8, 4.8, title)
    if conditions:
        figure.suptitle(f"{title}\n{conditions}", fontsize=11)
    return figure, list(figure.subplots(1, count, squeeze=False)[0])


def _common(rows: Sequence[Row], *names: str) -> str:
    """Describes those of the columns `names` that have the same value in all rows."""
    texts: dict[str, Callable[[Any], str]] = {
        "engine": lambda value: ENGINES[value],
        "density": lambda value: f"{100 * value:g} % of the rows",
        "order": lambda value: ORDERS[value],
        "row_bytes": lambda value: f"rows of {format_bytes(value)}",
        "span_bytes": lambda value: f"span of {format_bytes(value)}",
        "sm_count": lambda value: f"{value} SM{'' if value == 1 else 's'}",
    }
    common = []
    for name in names:
        values = {row[name] for row in rows}
        if len(values) == 1:
            common.append(texts[name](values.pop()))
    return ", ".join(common)


def _sms(row: Row) -> str:
    return f"{row['sm_count']} SM{'' if row['sm_count'] == 1 else 's'}"


def _grouped(rows: Iterable[Row], label: Callable[[Row], str]) -> dict[str, list[Row]]:
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(label(row), []).append(row)
    return groups


def _curves(
    axes: Axes, rows: Sequence[Row], key: str, kind: Callable[[Row], str]
) -> list[tuple[float, float, str, str]]:
    """Draws rates by a column, with a curve for each kind. Returns the labels of the curves."""
    labels = []
    for colour, (name, curve) in zip(_COLOURS, _grouped(rows, kind).items(), strict=False):
        curve.sort(key=lambda row: row[key])
        x = [row[key] for row in curve]
        y = [row["gb_per_s"] for row in curve]
        axes.plot(x, y, "o-", color=colour, markersize=4)
        labels.append((float(x[-1]), float(y[-1]), name, colour))
    return labels


def _bars(
    axes: Axes,
    rows: Sequence[Row],
    group: Callable[[Row], str],
    bar: Callable[[Row], str],
    value: Callable[[Row], float],
) -> None:
    """Draws groups of bars, with a colour for each label. Missing measurements have no bar."""
    groups = list(_grouped(rows, group))
    bars = _grouped(rows, bar)
    width = 0.8 / len(bars)
    for i, (name, members) in enumerate(bars.items()):
        x = [groups.index(group(row)) + (i - (len(bars) - 1) / 2) * width for row in members]
        colour = _COLOURS[i % len(_COLOURS)]
        axes.bar(x, [value(row) for row in members], width, label=name, color=colour)
    axes.set_xticks(range(len(groups)), groups)


def _rates(axes: Axes, bounds: Mapping[str, Limit], direction: str) -> None:
    """Formats the axis of rates, and draws the limit."""
    limit = bounds.get(direction)
    if limit is not None:
        axes.axhline(limit.gb_per_s, color="black", linestyle=":", linewidth=1.5)
        axes.annotate(
            limit.label,
            (0.01, limit.gb_per_s),
            (0, 3),
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            fontsize=8,
        )
        axes.set_ylim(top=1.12 * limit.gb_per_s)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("GB/s")
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _logarithmic(axes: Axes) -> None:
    axes.set_yscale("log")
    axes.autoscale(axis="y")
    axes.yaxis.set_major_formatter("{x:g}")


def _legend(figure: Figure, axes: Axes) -> None:
    """Draws one legend for all panels, below them."""
    handles, names = axes.get_legend_handles_labels()
    figure.legend(handles, names, fontsize=8, frameon=False, ncols=3, loc="outside lower center")


def _sizes(axes: Axes, rows: Sequence[Row], key: str, label: str) -> None:
    axes.set_xscale("log", base=2)
    ticks = sorted({row[key] for row in rows})
    axes.set_xticks(ticks, [format_bytes(t) for t in ticks], rotation=45, fontsize=7)
    axes.minorticks_off()
    axes.set_xlabel(label)
