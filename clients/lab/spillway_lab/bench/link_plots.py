"""Plots of what spillway-link-bench measured, each with the link's own limit."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

# A measurement, keyed by the columns of link.csv.
Row = Mapping[str, Any]

ENGINES = {
    "copy_engine": "copy engine, row by row",
    "sm": "SM loads and stores",
    "bulk": "SM bulk copies",
    "batch": "copy engine, batched",
}
DIRECTIONS = {"h2d": "host to device", "d2h": "device to host", "both": "both at once"}
PINNINGS = {
    "cuda_host_alloc": "cudaHostAlloc",
    "huge_pages": "huge pages, registered",
    "small_pages": "4 KiB pages, registered",
}


@dataclass(frozen=True)
class Limit:
    """What no transfer in a direction exceeds.

    Attributes:
        gb_per_s: 1e9 bytes a second, both ways together where both are used.
        label: Where the figure comes from.
    """

    gb_per_s: float
    label: str


def limits(rows: Sequence[Row], link: Mapping[str, Any] | None) -> dict[str, Limit]:
    """The limit of each direction: the link's rate, else what large copies reached.

    Args:
        rows: All measurements.
        link: The link as the driver reports it, or None where it says nothing.
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
    """One measurement of each allocation of the pinning experiment, in order."""
    found: dict[Hashable, Row] = {}
    for row in rows:
        if row["experiment"] == "pinning":
            found.setdefault((row["allocation_bytes"], row["pinning"]), row)
    return list(found.values())


def format_bytes(count: int) -> str:
    """`16 GiB`: with the largest binary unit that leaves a whole number."""
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
        rows: Measurements; those whose check failed are left out.
        link: The link as the driver reports it, or None.
        caption: Small print: where and when.
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


def draw_engines(rows: Sequence[Row], bounds: Mapping[str, Limit]) -> Figure:
    """Rates by row size, a line an engine and a panel a direction."""
    directions = [d for d in ("h2d", "d2h") if any(r["direction"] == d for r in rows)]
    figure, panels = _panels(len(directions), _what("Engines", rows, "density", "order"))
    for axes, direction in zip(panels, directions, strict=True):
        chosen = [row for row in rows if row["direction"] == direction]
        _lines(axes, chosen, "row_bytes", lambda row: ENGINES[row["engine"]])
        _sizes(axes, chosen, "row_bytes", "row size")
        _rates(axes, bounds, direction)
        # A row size apart, engines differ by orders of magnitude.
        _logarithmic(axes)
        axes.set_title(DIRECTIONS[direction])
        _legend(axes)
    return figure


def draw_rows(rows: Sequence[Row], bounds: Mapping[str, Limit]) -> Figure:
    """Rates by row size, a line an order and span; beside them rows a second."""

    def kind(row: Row) -> str:
        return f"span of {format_bytes(row['span_bytes'])}"

    return _rates_and_rows(rows, bounds, "Row sizes", "row_bytes", "row size", kind)


def draw_spans(rows: Sequence[Row], bounds: Mapping[str, Limit]) -> Figure:
    """Rates by span, a line a row size and order; beside them rows a second."""

    def kind(row: Row) -> str:
        return f"rows of {format_bytes(row['row_bytes'])}"

    return _rates_and_rows(rows, bounds, "Spans", "span_bytes", "span of pinned memory", kind)


def draw_density(rows: Sequence[Row], bounds: Mapping[str, Limit]) -> Figure:
    """Rates by density, a line an engine and SM count and a panel an order."""
    orders = [o for o in ("sorted", "shuffled") if any(r["order"] == o for r in rows)]
    figure, panels = _panels(len(orders), _what("Densities", rows, "row_bytes", "span_bytes"))
    for axes, order in zip(panels, orders, strict=True):
        chosen = [row for row in rows if row["order"] == order]
        _lines(axes, chosen, "density", lambda row: f"{ENGINES[row['engine']]}, {_sms(row)}")
        axes.set_xscale("log")
        ticks = sorted({row["density"] for row in chosen})
        axes.set_xticks(ticks, [f"{100 * t:g}" for t in ticks])
        axes.minorticks_off()
        axes.set_xlabel("% of the span's rows")
        _rates(axes, bounds, "h2d")
        axes.set_title(f"{order} by address" if order == "sorted" else order)
        _legend(axes)
    return figure


def draw_sms(rows: Sequence[Row], bounds: Mapping[str, Limit]) -> Figure:
    """Rates by SM count, a line an order and density and a panel an engine."""
    engines = [e for e in ("sm", "bulk") if any(r["engine"] == e for r in rows)]
    figure, panels = _panels(len(engines), _what("SM counts", rows, "row_bytes", "span_bytes"))
    for axes, engine in zip(panels, engines, strict=True):
        chosen = [row for row in rows if row["engine"] == engine]
        _lines(axes, chosen, "sm_count", lambda row: f"{100 * row['density']:g} % of the rows")
        axes.set_xscale("log", base=2)
        ticks = sorted({row["sm_count"] for row in chosen})
        axes.set_xticks(ticks, [str(t) for t in ticks], fontsize=7)
        axes.minorticks_off()
        axes.set_xlabel("SMs")
        _rates(axes, bounds, "h2d")
        axes.set_title(ENGINES[engine])
        _legend(axes)
    return figure


def draw_directions(rows: Sequence[Row], bounds: Mapping[str, Limit]) -> Figure:
    """Rates of engines, a bar a row size and a panel a direction."""
    directions = [d for d in DIRECTIONS if any(r["direction"] == d for r in rows)]
    figure, panels = _panels(len(directions), _what("Directions", rows, "density"))
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
        _legend(axes)
    return figure


def draw_numa(rows: Sequence[Row], bounds: Mapping[str, Limit]) -> Figure:
    """Rates by NUMA node, a bar an engine and order and a panel a direction."""
    directions = [d for d in ("h2d", "d2h") if any(r["direction"] == d for r in rows)]
    figure, panels = _panels(len(directions), "NUMA nodes")
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
        _legend(axes)
    return figure


def draw_pinning(rows: Sequence[Row], bounds: Mapping[str, Limit]) -> Figure:
    """What pinning takes by size, and the rates that the memory gives."""
    figure, (left, right) = _panels(2, "Ways of pinning")
    _bars(
        left,
        pinnings(rows),
        group=lambda row: format_bytes(row["allocation_bytes"]),
        bar=lambda row: PINNINGS[row["pinning"]],
        value=lambda row: row["pin_seconds"],
    )
    left.set_ylabel("seconds to obtain and pin")
    left.set_title("Time")
    _bars(
        right,
        [row for row in rows if row["allocation_bytes"] == rows[-1]["allocation_bytes"]],
        group=lambda row: row["order"],
        bar=lambda row: PINNINGS[row["pinning"]],
        value=lambda row: row["gb_per_s"],
    )
    last = rows[-1]
    right.set_title(
        f"Rows of {format_bytes(last['row_bytes'])}, {100 * last['density']:g} % of "
        f"{format_bytes(last['allocation_bytes'])}"
    )
    _rates(right, bounds, "h2d")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        _legend(axes)
    return figure


def _rates_and_rows(
    rows: Sequence[Row],
    bounds: Mapping[str, Limit],
    title: str,
    key: str,
    axis: str,
    kind: Callable[[Row], str],
) -> Figure:
    figure, (left, right) = _panels(2, _what(title, rows, "engine", "density", "sm_count"))
    _lines(left, rows, key, kind)
    _rates(left, bounds, "h2d")
    _lines(right, rows, key, kind, value="rows_per_s", factor=1e-6)
    right.set_ylabel("million rows/s")
    _logarithmic(right)
    right.grid(alpha=0.3)
    for axes in (left, right):
        _sizes(axes, rows, key, axis)
        _legend(axes)
    return figure


def _panels(count: int, title: str) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(5.8 * count + 0.8, 5.4), layout="constrained")
    figure.get_layout_engine().set(rect=(0, 0.025, 1, 0.975))  # type: ignore[union-attr, call-arg]
    figure.suptitle(title)
    return figure, list(figure.subplots(1, count, squeeze=False)[0])


def _what(title: str, rows: Sequence[Row], *names: str) -> str:
    """The title with what all rows have in common of the columns named."""
    texts: dict[str, Callable[[Any], str]] = {
        "engine": lambda value: ENGINES[value],
        "density": lambda value: f"{100 * value:g} % of the rows",
        "order": str,
        "row_bytes": lambda value: f"rows of {format_bytes(value)}",
        "span_bytes": lambda value: f"span of {format_bytes(value)}",
        "sm_count": lambda value: f"{value} SM{'' if value == 1 else 's'}",
    }
    common = []
    for name in names:
        values = {row[name] for row in rows}
        if len(values) == 1:
            common.append(texts[name](values.pop()))
    return f"{title}: {', '.join(common)}" if common else title


def _sms(row: Row) -> str:
    return f"{row['sm_count']} SM{'' if row['sm_count'] == 1 else 's'}"


def _grouped(rows: Iterable[Row], label: Callable[[Row], str]) -> dict[str, list[Row]]:
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(label(row), []).append(row)
    return groups


def _lines(
    axes: Axes,
    rows: Sequence[Row],
    key: str,
    kind: Callable[[Row], str],
    value: str = "gb_per_s",
    factor: float = 1,
) -> None:
    """A line a kind and order: a colour a kind, dashed where shuffled."""
    several = len({row["order"] for row in rows}) > 1
    for i, (name, members) in enumerate(_grouped(rows, kind).items()):
        for order, line in _grouped(members, lambda row: str(row["order"])).items():
            line.sort(key=lambda row: row[key])
            axes.plot(
                [row[key] for row in line],
                [row[value] * factor for row in line],
                "o-" if order == "sorted" else "o--",
                color=f"C{i}",
                markersize=4,
                label=f"{name}, {order}" if several else name,
            )


def _bars(
    axes: Axes,
    rows: Sequence[Row],
    group: Callable[[Row], str],
    bar: Callable[[Row], str],
    value: Callable[[Row], float],
) -> None:
    """Groups of bars, a colour a bar label; a bar that was not measured stays empty."""
    groups = list(_grouped(rows, group))
    bars = _grouped(rows, bar)
    width = 0.8 / len(bars)
    for i, (name, members) in enumerate(bars.items()):
        x = [groups.index(group(row)) + (i - (len(bars) - 1) / 2) * width for row in members]
        axes.bar(x, [value(row) for row in members], width, label=name)
    axes.set_xticks(range(len(groups)), groups)


def _rates(axes: Axes, bounds: Mapping[str, Limit], direction: str) -> None:
    """The axis of rates, with the limit drawn in."""
    limit = bounds.get(direction)
    if limit is not None:
        axes.axhline(limit.gb_per_s, color="black", linestyle=":", linewidth=1.5, label=limit.label)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("GB/s")
    axes.grid(alpha=0.3)


def _logarithmic(axes: Axes) -> None:
    axes.set_yscale("log")
    axes.autoscale(axis="y")
    axes.yaxis.set_major_formatter("{x:g}")


def _legend(axes: Axes) -> None:
    """Below the panel, where it hides nothing."""
    axes.legend(fontsize=8, frameon=False, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.17))


def _sizes(axes: Axes, rows: Sequence[Row], key: str, label: str) -> None:
    axes.set_xscale("log", base=2)
    ticks = sorted({row[key] for row in rows})
    axes.set_xticks(ticks, [format_bytes(t) for t in ticks], rotation=45, fontsize=7)
    axes.minorticks_off()
    axes.set_xlabel(label)
