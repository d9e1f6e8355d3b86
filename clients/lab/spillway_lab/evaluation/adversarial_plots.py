"""Picture of `adversarial.json`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from spillway_lab.evaluation import style

COLOURS = {
    "kept": style.BLUE,
    "exact": style.GREEN,
    "silent": style.GREY,
    "open": style.ORANGE,
    "broken": style.RED,
}
MEANINGS = {
    "kept": "kept",
    "exact": "exact or NONE",
    "silent": "no promise made",
    "open": "not decided",
    "broken": "broken",
}


def draw(told: dict[str, Any], folder: Path) -> list[Path]:
    """A line a family: the share beyond epsilon with its interval, NONE and rows beside it."""
    families = told["found"]["families"]
    delta, epsilon = told["parameters"]["delta"], told["parameters"]["epsilon"]
    broken = sum(family["verdict"] == "broken" for family in families)
    undecided = sum(family["verdict"] == "open" for family in families)
    if broken:
        title = f"On {broken} of {len(families)} families built against it the promise breaks"
    elif undecided:
        title = (
            f"The promise holds on {len(families) - undecided} of {len(families)} families built "
            f"against it; too few outputs to decide on {undecided}"
        )
    else:
        title = f"The promise holds on all {len(families)} families built against it"
    figure = style.make_figure(9.5, 0.28 * len(families) + 1.6, title)
    shares, silence, rows = figure.subplots(
        1, 3, sharey=True, gridspec_kw={"width_ratios": (3, 1, 1)}
    )
    for line, family in enumerate(families):
        colour = COLOURS[family["verdict"]]
        if family["statistical_count"]:
            low, high = (100 * bound for bound in family["interval"])
            shares.plot((low, high), (line, line), color=colour, lw=1.5)
            shares.plot(100 * family["share"], line, "o", color=colour, ms=5)
        silence.barh(line, 100 * family["none_share"], color=colour, height=0.6)
        rows.barh(line, family["rows"], color=colour, height=0.6)
    shares.axvline(100 * delta, color=style.BLACK, lw=1, ls="--")
    shares.text(100 * delta, -0.9, f" delta {100 * delta:g} %", fontsize=8, va="center")
    shares.set_yticks(range(len(families)), [family["name"] for family in families], fontsize=8)
    uppers = [100 * f["interval"][1] for f in families if f["statistical_count"]]
    right = min(101, 1.1 * max([250 * delta, *uppers]))
    shares.set(xlim=(-right / 100, right), ylim=(len(families) - 0.4, -1.4))
    shares.set_xlabel(f"STATISTICAL outputs farther off than {epsilon:g}, %", fontsize=9)
    silence.set_xlabel("NONE, %", fontsize=9)
    silence.set_xlim(0, 100)
    rows.set_xlabel("rows a KV head", fontsize=9)
    for axes in (shares, silence, rows):
        axes.tick_params(labelsize=8)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    used = {family["verdict"] for family in families}
    handles = [
        shares.plot([], [], "o", color=COLOURS[name], label=text)[0]
        for name, text in MEANINGS.items()
        if name in used
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=5, frameon=False, fontsize=9)
    return [style.save(figure, told, folder / "adversarial.png")]
