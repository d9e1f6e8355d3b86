#!/usr/bin/env python3
"""Prints the tables of sizes in docs/models.md, from the shapes in docs/results/sizes/models.json.

Run with the package's environment: .venv/bin/python scripts/size_table.py
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from spillway_kv.lab.size.described import Described, describe, load_config, weight_count
from spillway_kv.lab.size.fit import Fit, Machine, rank_layout
from spillway_kv.lab.size.layout import Layout
from spillway_kv.lab.size.units import bytes_of, tokens_text
from spillway_kv.transformers.support import UnsupportedModelError

SHAPES = Path(__file__).resolve().parents[1] / "docs/results/sizes/models.json"
GPUS = ("24GB", "48GB", "80GB", "141GB")
HOSTS = ("64GB", "128GB", "256GB", "512GB", "1TB")

OF_GPUS = (
    "Tokens of one sequence that GPU memory holds: with codes of keys / of values too / of a dense "
    "cache:"
)
OF_HOSTS = (
    "Tokens of one sequence whose rows host memory holds. Eight ranks share the host. The smaller "
    "number, of GPU and host, is what fits:"
)


class Served(NamedTuple):
    """A model of the list that is served. Sizes are those of one rank."""

    name: str
    rank_count: int
    described: Described
    weights: int  # bytes


def read(entry: dict[str, Any], folder: Path) -> Served | str:
    """Returns the model, or why it is refused."""
    path = folder / "config.json"
    path.write_text(json.dumps(entry["config"]))
    config = load_config(str(path))
    try:
        described = describe(config)
    except UnsupportedModelError as error:
        return str(error)
    count = weight_count(config)
    assert count == entry["published_weights"], (entry["name"], count)
    ranks = entry.get("ranks", 1)
    # Published as quantised weights.
    weights = entry.get("weight_bytes", count * described.element_bytes)
    return Served(entry["name"], ranks, described, weights // ranks)


def layout_of(model: Served, value_bits: int) -> Layout:
    return rank_layout(model.described, model.rank_count, value_bits=value_bits)


def fit(model: Served, gpu: str, host: str, value_bits: int = 0) -> Fit:
    """What fits one rank of the model, with as much of the host as it has ranks."""
    machine = Machine(
        host=bytes_of(host) // model.rank_count, gpu=bytes_of(gpu), weights=model.weights
    )
    return Fit(layout_of(model, value_bits), model.described, model.rank_count, machine)


def gpu_bytes_per_token(layout: Layout) -> float:
    """Codes and resident sample."""
    return layout.heads * (layout.page().total / 128 + layout.resident_sample * layout.row_bytes)


def in_gpu(model: Served, gpu: str) -> str:
    """Tokens with codes of keys, with codes of values too, and of a dense cache."""
    if model.weights >= bytes_of(gpu):
        return "-"
    found = [fit(model, gpu, "1TB", bits).gpu_tokens() for bits in (0, 2)]
    return " / ".join(map(tokens_text, [*found, fit(model, gpu, "1TB").dense_tokens()]))


def line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def tables(models: list[Served], refused: dict[str, str]) -> str:
    """The tables, in Markdown."""
    lines = [
        line(
            "model",
            "layers with full attention, KV heads, head_dim",
            "weights, GB",
            "rows a token, KiB",
            "codes and sample a token, KiB",
            "with codes of values",
            "windows a sequence, MiB",
        ),
        line(*["---"] * 7),
    ]
    for model in models:
        layout = layout_of(model, 0)
        windows = fit(model, "141GB", "1TB").window_bytes(2**20)
        lines.append(
            line(
                model.name,
                f"{layout.layer_count}, {layout.kv_head_count}, {layout.head_dim}",
                f"{model.weights / 1e9:.1f}",
                f"{layout.heads * layout.row_bytes / 1024:.1f}",
                f"{gpu_bytes_per_token(layout) / 1024:.1f}",
                f"{gpu_bytes_per_token(layout_of(model, 2)) / 1024:.1f}",
                f"{windows / 2**20:.0f}" if windows else "",
            )
        )
    lines += ["", OF_GPUS, "", line("model", *(f"GPU of {gpu}" for gpu in GPUS))]
    lines.append(line(*["---"] * (1 + len(GPUS))))
    lines += [line(m.name, *(in_gpu(m, gpu) for gpu in GPUS)) for m in models]
    lines += ["", OF_HOSTS, "", line("model", *(f"host of {host}" for host in HOSTS))]
    lines.append(line(*["---"] * (1 + len(HOSTS))))
    lines += [
        line(m.name, *(tokens_text(fit(m, "141GB", host).host_tokens()) for host in HOSTS))
        for m in models
    ]
    lines += ["", "Refused are:", ""]
    lines += [f"- {name}: {reason}" for name, reason in refused.items()]
    return "\n".join(lines)


def main() -> None:
    """Prints the tables."""
    models, refused = [], {}
    with tempfile.TemporaryDirectory() as folder:
        for entry in json.loads(SHAPES.read_text())["models"]:
            found = read(entry, Path(folder))
            if isinstance(found, str):
                refused[entry["name"]] = found
            else:
                models.append(found)
    print(tables(models, refused))


if __name__ == "__main__":
    main()
