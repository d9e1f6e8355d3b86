"""Plot of `retrieval.json`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from spillway_kv.lab.evaluation import style

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
    """Draws IoU and captured mass over bytes per key, with a line for each family."""
    rankings = told["found"]["rankings"]
    share = f"{100 * told['parameters']['share']:g} %"
    figure = style.make_figure(11, 4.6, _title(rankings, share))
    panels = figure.subplots(1, 2)
    values = (
        ("iou_group", f"IoU with the group's true top {share}"),
        ("mass", "captured share of the softmax mass"),
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
            ours = family == "ours"
            axes.plot(
                x,
                y,
                "o-",
                color=colour,
                alpha=1 if ours else style.MUTED,
                markersize=4.5,
                linewidth=2.2 if ours else 1.3,
                zorder=3 if ours else 2,
            )
            labels.append((x[-1], y[-1], "Spillway's codes" if ours else family, colour))
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
        low, high = axes.get_xlim()
        axes.set_xlim(low, high * 2.6)
        axes.set_ylim(0, 1.05)
        axes.set_xlabel("bytes per key", fontsize=9)
        axes.set_ylabel(label, fontsize=9)
        axes.grid(alpha=0.25)
        ends.append(labels)
    figure.draw_without_rendering()
    # On the right, the curves are too close together for labels.
    style.label_ends(panels[0], ends[0])
    panels[1].set_title("colours as on the left", fontsize=9)
    return [style.save(figure, told, folder / "retrieval.png")]


def _title(rankings: list[dict[str, Any]], share: str) -> str:
    """Compares the default's codes with the best other ranking of at most as many bytes."""
    codes = next((ranking for ranking in rankings if ranking["name"] == "codes-3"), None)
    if codes is None:
        return f"How well rankings find the true top {share}: upper left is better"
    others = [
        ranking
        for ranking in rankings
        if ranking["family"] not in ("ours", "oracle")
        and ranking["bytes_per_key"] <= codes["bytes_per_key"]
    ]
    text = f"IoU with the true top {share}: Spillway's 3-bit codes {codes['iou_group']['mean']:.2f}"
    if others:
        best = max(others, key=lambda ranking: float(ranking["iou_group"]["mean"]))
        text += (
            f"; the best other ranking with as few bytes {best['iou_group']['mean']:.2f} "
            f"({best['label']})"
        )
    return text
