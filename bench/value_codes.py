"""Rows that an attend needs with and without codes of values, on a model's own K/V.

    spillway-lab eval guarantee MODEL TEXT --length 32768 --queries 8 --output DIR ...
    python bench/value_codes.py DIR/work/recordings/* --layers 2,7,12 --output FILE

The first command records the keys, values and queries of a text
(docs/results/evaluation/command.md); the second appends them, layer by layer, to an embedded engine
on the CPU. It counts the rows that would cross the link of a GPU: heavy and sampled rows that are
not in the resident sample.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import environment
import numpy as np
import torch
from safetensors.torch import load_file
from spillway_kv import Client, Policy, RotationHash, Sequence, connect
from spillway_kv.lab.evaluation.recording import RUN_LENGTH, grid_of
from spillway_kv.lab.evaluation.sampling import resident_sample

HEAVY, TAIL = 2, 3
QUERIES_PER_ATTEND = 8
# The resident sample of `resident_sample` is that of this seed.
SEED = 0


class Layer:
    """One layer of a recording.

    Attributes:
        keys, values: [H_kv, n, d], bfloat16.
        queries: [T, H_q, d] at evenly spaced positions of the text's last eighth.
        visible: Tokens that each of them sees.
        exact: Output of exact attention, [T, H_q, d].
    """

    def __init__(self, folder: Path, number: int, query_count: int) -> None:
        data = load_file(folder / f"layer_{number:03d}.safetensors")
        self.keys, self.values = data["keys"].contiguous(), data["values"].contiguous()
        token_count = self.keys.shape[1]
        positions = sorted({*grid_of(token_count), *range(token_count - RUN_LENGTH, token_count)})
        chosen = np.linspace(0, len(positions) - 1, query_count).round().astype(int)
        self.queries = data["queries"][chosen]
        self.visible = [positions[i] + 1 for i in chosen]
        self.exact = torch.empty(0)

    def batches(self) -> Iterator[slice]:
        for first in range(0, len(self.visible), QUERIES_PER_ATTEND):
            yield slice(first, first + QUERIES_PER_ATTEND)

    def attend_exactly(self, sequence: Sequence) -> None:
        """Sets `exact`, which does not depend on codes."""
        whole = Policy(selector="all")
        self.exact = torch.cat(
            [
                sequence.attend(0, self.queries[at], policy=whole, visible=self.visible[at]).out
                for at in self.batches()
            ]
        )

    def append(self, client: Client, scale: float, seed: int, key_bits: int, bits: int) -> Sequence:
        model = client.create_model(
            layer_count=1,
            query_head_count=self.queries.shape[1],
            kv_head_count=self.keys.shape[0],
            head_dim=self.keys.shape[2],
            softmax_scale=scale,
            policy=Policy(seed=SEED),
            hash_weights=RotationHash(bits_per_dim=key_bits, seed=seed, value_bits=bits),
        )
        sequence = client.create_sequence(model)
        sequence.append(0, 0, self.keys, self.values)
        return sequence


class Sums:
    """What is measured of one setting, over layers, positions and heads."""

    def __init__(self) -> None:
        self.moved: list[int] = []
        self.heavy: list[int] = []
        self.touched: list[np.ndarray[Any, Any]] = []
        self.errors: list[np.ndarray[Any, Any]] = []  # [L][seeds T, H_q]
        self.certified: list[np.ndarray[Any, Any]] = []
        self.none = 0

    def add(self, layer: Layer, sequence: Sequence, epsilon: float, seed_count: int) -> None:
        """Adds a layer. Rows over the link are those of the first seed of the sampling."""
        errors, certified = [], []
        for seed, at in itertools.product(range(SEED, SEED + seed_count), layer.batches()):
            policy = Policy(epsilon=epsilon, seed=seed)
            visible = layer.visible[at]
            result = sequence.attend(0, layer.queries[at], policy=policy, visible=visible)
            exact = layer.exact[at]
            errors.append(((result.out - exact).norm(dim=-1) / exact.norm(dim=-1)).numpy())
            certified.append(np.asarray(result.certificate.relative_errors))
            self.none += int((result.certificate.promises == "none").sum())
            self.touched.append(result.touched_row_counts)
            for i, count in enumerate(visible if seed == SEED else ()):
                query = layer.queries[at][i : i + 1]
                self._add_rows(sequence.select(0, query, policy=policy, visible=count))
        self.errors.append(np.concatenate(errors))
        self.certified.append(np.concatenate(certified))

    def _add_rows(self, selection: Any) -> None:
        for head in range(len(selection.offsets) - 1):
            of_head = slice(selection.offsets[head], selection.offsets[head + 1])
            tokens = np.asarray(selection.indices)[of_head]
            strata = np.asarray(selection.strata)[of_head]
            resident = resident_sample(0, head, int(tokens[-1]) + 1)[tokens]
            crosses = (strata == HEAVY) | ((strata >= TAIL) & ~resident)
            self.moved.append(int(crosses.sum()))
            self.heavy.append(int((strata == HEAVY).sum()))

    def told(self, epsilon: float) -> dict[str, Any]:
        errors = np.concatenate([x.ravel() for x in self.errors])
        certified = np.concatenate([x.ravel() for x in self.certified])
        by_head = [(e > c).mean(axis=0) for e, c in zip(self.errors, self.certified, strict=True)]
        return {
            "rows_over_the_link": float(np.mean(self.moved)),
            "heavy_rows": float(np.mean(self.heavy)),
            "rows_read": float(np.mean(np.concatenate([x.ravel() for x in self.touched]))),
            "mean_error": float(errors.mean()),
            "median_certified_error": float(np.median(certified)),
            "above_epsilon": float((errors > epsilon).mean()),
            "above_epsilon_worst_head": float(
                max((e > epsilon).mean(axis=0).max() for e in self.errors)
            ),
            "above_certificate": float((errors > certified).mean()),
            "above_certificate_worst_head": float(max(x.max() for x in by_head)),
            "none": self.none / errors.size,
            "outputs": errors.size,
        }


def measure(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    client = connect("embedded:", settings={"device.name": "cpu"})
    scale = json.loads((options.recording / "recording.json").read_text())["scaling"]
    found: dict[tuple[int, int, float], Sums] = {}
    for number in options.layers:
        layer = Layer(options.recording, number, options.queries)
        for key_bits in options.key_bits:
            for bits in options.value_bits:
                sequence = layer.append(client, scale, number, key_bits, bits)
                if not len(layer.exact):
                    layer.attend_exactly(sequence)
                for epsilon in options.epsilons:
                    sums = found.setdefault((key_bits, bits, epsilon), Sums())
                    sums.add(layer, sequence, epsilon, options.seeds)
                sequence.delete()
    for (key_bits, bits, epsilon), sums in found.items():
        yield {
            "name": options.name,
            "bits_per_dim": key_bits,
            "value_bits": bits,
            "epsilon": epsilon,
            "seeds": options.seeds,
            **sums.told(epsilon),
        }


def numbers(kind: type) -> Any:
    return lambda text: [kind(x) for x in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recording", type=Path, help="folder of a recording")
    parser.add_argument("--name", required=True, help="what was recorded, for the records")
    parser.add_argument("--layers", type=numbers(int), required=True)
    parser.add_argument("--queries", type=int, default=32, help="positions of each layer")
    parser.add_argument("--seeds", type=int, default=1, help="seeds of the sampling")
    parser.add_argument("--key-bits", type=numbers(int), default=[3])
    parser.add_argument("--value-bits", type=numbers(int), default=[0, 1, 2, 3])
    parser.add_argument("--epsilons", type=numbers(float), default=[0.1, 0.05])
    parser.add_argument("--output", type=Path, help="records are appended, one a line")
    options = parser.parse_args()
    described = environment.describe()
    for record in measure(options):
        line = json.dumps(record | {"measured": described})
        print(json.dumps(record))
        if options.output is not None:
            with options.output.open("a") as file:
                file.write(line + "\n")


if __name__ == "__main__":
    main()
