"""Picture of `retrieval.json`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from spillway_lab.evaluation import style

COLOURS = {
    "ours": style.RED,
    "LSH, centred": style.BLUE,
    "LSH, raw keys": style.SKY,
    "Quest": style.GREEN,
    "Double Sparsity": style.PURPLE,
    "Twilight's 4-bit keys": style.ORANGE,
    "Spotlight MLP": style.BLACK,
    "HashAttention": style.GREY,
}


def draw(told: dict[str, Any], folder: Path) -> list[Path]:
    """IoU and captured mass over bytes a key, a line a family."""
    rankings = told["found"]["rankings"]
    share = f"{100 * told['parameters']['share']:g} %"
    title = f"What rankings find of the true top {share}: upper left is better"
    figure = style.make_figure(13, 5.2, title)
    panels = figure.subplots(1, 2)
    values = (
        ("iou_group", "intersection over union with the group's true top"),
        ("mass", "softmax mass captured"),
    )
    families: dict[str, list[dict[str, Any]]] = {}
    for ranking in rankings:
        families.setdefault(ranking["family"], []).append(ranking)
    ends: list[list[tuple[float, float, str, str]]] = []
    for axes, (name, label) in zip(panels, values, strict=True):
        labels = []
        for family, members in families.items():
            if family == "oracle":
                best = members[0][name]["mean"]
                axes.axhline(best, color=style.GREY, linestyle=":", linewidth=1)
                axes.text(
                    0.99,
                    best,
                    f"oracle {best:.2f}",
                    transform=axes.get_yaxis_transform(),
                    ha="right",
                    va="bottom",
                    fontsize=8,
                    color=style.GREY,
                )
                continue
            members.sort(key=lambda ranking: ranking["bytes_per_key"])
            x = [ranking["bytes_per_key"] for ranking in members]
            y = [ranking[name]["mean"] for ranking in members]
            colour = COLOURS[family]
            axes.plot(x, y, "o-", color=colour, markersize=4.5, linewidth=1.6)
            labels.append((x[-1], y[-1], family, colour))
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
        low, high = axes.get_xlim()
        axes.set_xlim(low, high * 2.6)
        axes.set_ylim(0, 1.05)
        axes.set_xlabel("bytes kept of a key")
        axes.set_ylabel(label)
        axes.grid(alpha=0.25)
        ends.append(labels)
    figure.canvas.draw()
    for axes, labels in zip(panels, ends, strict=True):
        style.label_ends(axes, labels)
    return [style.save(figure, told, folder / "retrieval.png")]
