"""Pictures of `ablation.json`."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from spillway_kv.lab.evaluation import style

Told = dict[str, Any]


def draw(told: Told, folder: Path) -> list[Path]:
    """Draws variants, errors of neighbouring steps, and heavy sets of groups, if measured."""
    found, files = told["found"], []
    if found["variants"]:
        files.append(_variants(told, folder / "ablation.png"))
    if found.get("bands"):
        files.append(_bands(told, folder / "ablation_bands.png"))
    if found.get("group"):
        files.append(_group(told, folder / "ablation_group.png"))
    return files


def _variants(told: Told, path: Path) -> Path:
    """Rows and violations, with a line for each variant below the name of its part."""
    variants = told["found"]["variants"]
    epsilon, delta = told["parameters"]["epsilon"], told["parameters"]["delta"]
    default = _default(variants)
    parts = list(dict.fromkeys(variant["part"] for variant in variants))
    height = 0.2 * (len(variants) + len(parts)) + 1.6
    figure = style.make_figure(9.5, height, _title(variants, default))
    rows, rates = figure.subplots(1, 2, sharey=True)
    names: list[tuple[float, str, bool]] = []
    line = 0
    for part in parts:
        names.append((line, part, True))
        for variant in (v for v in variants if v["part"] == part):
            line += 1
            names.append((line, variant["label"], False))
            same = default is not None and _key(variant) == _key(default)
            colour = style.RED if same else style.BLUE
            rows.barh(line, variant["rows"]["mean"], color=colour, height=0.6)
            share = 100 * variant["violations"]["share"]
            low, high = (100 * bound for bound in variant["violations"]["interval"])
            rates.plot((low, high), (line, line), color=colour, lw=1.2)
            rates.plot(share, line, "o", color=colour, ms=4.5)
        line += 1
    rows.set_yticks([at for at, _, _ in names], [name for _, name, _ in names], fontsize=8)
    for label, (_, _, heading) in zip(rows.get_yticklabels(), names, strict=True):
        if heading:
            label.set_weight("bold")
    rows.set_ylim(line - 0.4, -0.6)
    rows.set_xlabel("rows read by a KV head, mean", fontsize=9)
    rows.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
    rates.axvline(100 * delta, color=style.BLACK, linestyle="--", linewidth=1)
    rates.text(100 * delta, -0.4, f" delta {100 * delta:g} %", fontsize=8, va="center")
    rates.set_xscale("symlog", linthresh=0.1, linscale=0.5)
    rates.set_xlim(-0.01, 100)
    rates.set_xticks([0, 0.1, 1, 10, 100], ["0", "0.1", "1", "10", "100"])
    rates.minorticks_off()
    rates.set_xlabel(f"outputs with error > {epsilon:g}, % (95 %)", fontsize=9)
    for axes in (rows, rates):
        axes.grid(alpha=0.25, axis="x", linewidth=0.5)
        axes.tick_params(labelsize=8, length=0)
        axes.spines[["top", "right", "left"]].set_visible(False)
    return style.save(figure, told, path)


def _key(variant: Told) -> tuple[float, float, float]:
    return variant["rows"]["mean"], variant["error"]["mean"], variant["violations"]["share"]


def _default(variants: list[Told]) -> Told | None:
    """Returns the default policy: it is a variant of each part, and was measured once."""
    counts = Counter(_key(variant) for variant in variants)
    key, count = counts.most_common(1)[0]
    return next(v for v in variants if _key(v) == key) if count > 1 else None


def _title(variants: list[Told], default: Told | None) -> str:
    """Names the change that costs the most rows."""
    if default is None:
        return "The default policy with one part changed"
    most = max(variants, key=lambda variant: float(variant["rows"]["mean"]))
    times = most["rows"]["mean"] / default["rows"]["mean"]
    return (
        f"One changed part of the default (orange) costs up to {times:.1f} times the rows "
        f"({most['part']}: {most['label']})"
    )


def _bands(told: Told, path: Path) -> Path:
    """Cosines between the errors of two steps."""
    bands = told["found"]["bands"]
    none = next((band["cosines_1"]["mean"] for band in bands if band["label"] == "no tail"), None)
    sampled = [band["cosines_1"]["mean"] for band in bands if band["label"] != "no tail"]
    title = "Do neighbouring steps repeat each other's error?"
    if none is not None and sampled:
        title = (
            f"Cosine of neighbouring steps' errors: at most {max(sampled):.2f} with a sampled "
            f"tail, {none:.2f} without a tail"
        )
    figure = style.make_figure(7.6, 0.42 * len(bands) + 1.3, title)
    axes = figure.subplots()
    for offset, lag, colour in ((-0.19, 1, style.BLUE), (0.19, 8, style.ORANGE)):
        entries = [band[f"cosines_{lag}"] for band in bands]
        known = [(i, e) for i, e in enumerate(entries) if e["mean"] is not None]
        axes.barh(
            [i + offset for i, _ in known],
            [e["mean"] for _, e in known],
            0.36,
            xerr=np.array(
                [[abs(bound - e["mean"]) for bound in e["interval"]] for _, e in known]
            ).T,
            color=colour,
            error_kw={"elinewidth": 0.8},
        )
        i, last = known[-1]
        name = f"  {lag} step{'s' if lag > 1 else ''} apart"
        axes.text(last["interval"][1], i + offset, name, color=colour, fontsize=8, va="center")
    axes.set_yticks(range(len(bands)), [band["label"] for band in bands], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(right=1)
    axes.set_xlabel("cosine of the errors of two steps, mean (bars: 95 %)", fontsize=9)
    axes.grid(alpha=0.25, axis="x", linewidth=0.5)
    axes.tick_params(labelsize=8)
    return style.save(figure, told, path)


def _group(told: Told, path: Path) -> Path:
    """Errors of heavy sets, by the rows of a group."""
    figure = style.make_figure(6.4, 3.9, _group_title(told["found"]["group"]))
    axes = figure.subplots()
    ends = []
    for rule, colour, label in (
        ("sum", style.RED, "sum of the heads' scores"),
        ("union", style.BLUE, "union of the heads' sets"),
    ):
        for entry in (e for e in told["found"]["group"] if e["rule"] == rule):
            x = np.array([point["rows"] for point in entry["points"]])
            y = np.array([point["error"] for point in entry["points"]])
            bars = np.abs(np.array([point["interval"] for point in entry["points"]]).T - y)
            axes.errorbar(x, y, bars, fmt="o-", color=colour, markersize=4, elinewidth=0.8)
            ends.append((float(x[-1]), float(y[-1]), label, colour))
    axes.set(xscale="log", yscale="log")
    axes.set_xlabel("rows of a group, mean", fontsize=9)
    axes.set_ylabel("error of the heavy set alone, mean (bars: 95 %)", fontsize=9)
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_formatter(style.minor_label)
    axes.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
    axes.grid(alpha=0.25, linewidth=0.5)
    axes.tick_params(labelsize=8, which="both")
    low, high = axes.get_xlim()
    axes.set_xlim(low, high * 2.6)
    figure.draw_without_rendering()
    style.label_ends(axes, ends)
    return style.save(figure, told, path)


def _group_title(rules: list[Told]) -> str:
    """States the largest difference between the two rules at equal rows."""
    curves = {
        entry["rule"]: np.log([(point["rows"], point["error"]) for point in entry["points"]]).T
        for entry in rules
    }
    if set(curves) != {"sum", "union"}:
        return "Error of a group's heavy set"
    (x, y), (rows, errors) = curves["sum"], curves["union"]
    both = (rows >= x[0]) & (rows <= x[-1])
    if not both.any():
        return "Error of a group's heavy set: by the sum of scores, or the union of sets"
    apart = float(np.abs(np.expm1(errors[both] - np.interp(rows[both], x, y))).max())
    return (
        "A group's heavy set: at equal rows, the errors of the two rules differ by at most "
        f"{100 * apart:.0f} %"
    )
