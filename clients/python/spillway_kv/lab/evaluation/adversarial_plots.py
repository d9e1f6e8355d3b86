"""Picture of `adversarial.json`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from spillway_kv.lab.evaluation import style

COLOURS = {
    "kept": style.BLUE,
    "exact": style.GREEN,
    "silent": style.GREY,
    "open": style.ORANGE,
    "broken": style.RED,
}
VERDICTS = {
    "kept": "holds",
    "exact": "exact or NONE",
    "silent": "at least 99 % NONE",
    "open": "undecided",
    "broken": "violated",
}
MEANINGS = {**VERDICTS, "kept": "the bound holds", "open": "too few outputs to tell"}


def draw(told: dict[str, Any], folder: Path) -> list[Path]:
    """Draws a line for each family: violation rate with interval, share of NONE, and rows."""
    families = told["found"]["families"]
    delta, epsilon = told["parameters"]["delta"], told["parameters"]["epsilon"]
    broken = sum(family["verdict"] == "broken" for family in families)
    undecided = sum(family["verdict"] == "open" for family in families)
    if len(families) == 1 and families[0]["verdict"] == "kept":
        title = f"The error bound holds on the adversarial family {families[0]['name']}"
    elif broken:
        title = f"The error bound is violated on {broken} of {len(families)} adversarial families"
    elif undecided:
        title = (
            f"The error bound is violated on none of {len(families)} adversarial families; "
            f"{undecided} {'has' if undecided == 1 else 'have'} too few outputs to tell"
        )
    else:
        title = f"The error bound is violated on none of {len(families)} adversarial families"
    figure = style.make_figure(9.5, 0.24 * len(families) + 1.7, title)
    shares, silence, rows = figure.subplots(
        1, 3, sharey=True, gridspec_kw={"width_ratios": (2.4, 1, 1)}
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
    shares.text(100 * delta, -0.9, f" allowed: delta = {100 * delta:g} %", fontsize=8, va="center")
    shares.set_yticks(range(len(families)), [family["name"] for family in families], fontsize=8)
    uppers = [100 * f["interval"][1] for f in families if f["statistical_count"]]
    right = min(101, 1.1 * max([250 * delta, *uppers]))
    shares.set(xlim=(-right / 100, right), ylim=(len(families) - 0.4, -1.4))
    shares.set_xlabel(f"outputs with error > {epsilon:g}, % (95 %)", fontsize=9)
    silence.set_xlabel("NONE, % of certificates", fontsize=9)
    silence.set_xlim(0, 100)
    rows.set_xlabel("rows read by a KV head", fontsize=9)
    for axes in (shares, silence, rows):
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    used = {family["verdict"] for family in families}
    handles = [
        shares.plot([], [], "o", color=COLOURS[name], label=text)[0]
        for name, text in MEANINGS.items()
        if name in used
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=5, frameon=False, fontsize=9)
    return [style.save(figure, told, folder / "adversarial.png")]
