"""What rows of eight bits would change in the output of exact attention, on a model's own K/V.

    spillway-lab eval guarantee MODEL TEXT --length 32768 --queries 8 --output DIR ...
    python bench/row_types.py DIR/work/recordings/* --name NAME --layers 2,7,12 --output FILE

The first command records the keys, values and queries of a text
(docs/results/evaluation/command.md); the second rounds keys and values in several ways, each of one
byte an element, and attends exactly.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import environment
import torch
from value_codes import Layer

# A row's keys and values of a head, [..., d] to what is read back.
Rounding = Callable[[torch.Tensor], torch.Tensor]
# The tokens whose mean is the centre: not the first ones, which are unlike all others.
CENTRE = slice(64, 192)
E4M3_MAX = torch.finfo(torch.float8_e4m3fn).max
INT8_MAX = 127


def e4m3(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float()


def scaled(rounding: Rounding, largest: float) -> Rounding:
    """Rounds with one scale in bfloat16 for each token and half row."""

    def of_rows(x: torch.Tensor) -> torch.Tensor:
        # Not below the largest element's, after the scale is rounded.
        scale = (x.abs().amax(-1, keepdim=True) * (1.004 / largest)).bfloat16().float()
        scale = scale.clamp(min=1e-30)
        return rounding(x / scale) * scale

    return of_rows


def int8(x: torch.Tensor) -> torch.Tensor:
    return x.round().clamp(-INT8_MAX, INT8_MAX)


def rotated(rounding: Rounding) -> Rounding:
    """Rounds after signs and a Walsh-Hadamard transform over the head's dimensions."""

    def of_rows(x: torch.Tensor) -> torch.Tensor:
        d = x.shape[-1]
        h = torch.ones(1, 1)
        while len(h) < d:
            h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
        signs = torch.randint(0, 2, (d,), generator=torch.Generator().manual_seed(0)) * 2 - 1
        h = h * signs / d**0.5
        return rounding(x @ h.T) @ h

    return of_rows


def with_high_parts(count: int) -> Rounding:
    """Rounds as rows of 8 bits do: the `count` largest elements have 16 bits."""

    def of_rows(x: torch.Tensor) -> torch.Tensor:
        sizes = x.abs()
        top = sizes.topk(count + 1, -1).values
        least = torch.maximum(top[..., -1:] / INT8_MAX, top[..., :1] / (254 * INT8_MAX + 126))
        mantissa, exponent = least.frexp()
        scale = torch.ldexp((mantissa * 128).ceil() / 128, exponent).clamp(min=1e-30)
        return ((x / scale).round() * scale).bfloat16().float()

    return of_rows


def centred(rounding: Rounding) -> Rounding:
    """Rounds the distance from one vector of the layer and KV head."""

    def of_rows(x: torch.Tensor) -> torch.Tensor:
        centre = x[:, CENTRE].mean(1, keepdim=True).bfloat16().float()
        return rounding(x - centre) + centre

    return of_rows


ROUNDINGS: dict[str, Rounding | tuple[Rounding, Rounding]] = {
    # Of keys, and of values: host/base/int8_row.h.
    "int8, high parts": (
        with_high_parts(26),
        with_high_parts(4),
    ),
    "e4m3": e4m3,
    "e4m3, scaled": scaled(e4m3, E4M3_MAX),
    "e4m3, centred, rotated, scaled": centred(rotated(scaled(e4m3, E4M3_MAX))),
    "int8, scaled": scaled(int8, INT8_MAX),
    "int8, centred, scaled": centred(scaled(int8, INT8_MAX)),
    "int8, rotated, scaled": rotated(scaled(int8, INT8_MAX)),
    "int8, centred, rotated, scaled": centred(rotated(scaled(int8, INT8_MAX))),
}


def attend(layer: Layer, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Exact attention, [T, H_q, d] in float32. k, v: [H_kv, n, d]."""
    outs = []
    for q, n in zip(layer.queries, layer.visible, strict=True):
        of_heads = q.float().view(len(k), -1, k.shape[-1])
        logits = of_heads @ k[:, :n].transpose(1, 2) / k.shape[-1] ** 0.5
        outs.append((logits.softmax(-1) @ v[:, :n]).flatten(0, 1))
    return torch.stack(outs)


def errors(
    layer: Layer, rounding: Rounding | tuple[Rounding, Rounding]
) -> tuple[torch.Tensor, ...]:
    """Relative errors of the outputs: of rounded rows, of rounded keys alone, of values alone."""
    k, v = layer.keys.float(), layer.values.float()
    right = attend(layer, k, v)
    of_keys, of_values = rounding if isinstance(rounding, tuple) else (rounding, rounding)
    rounded_k, rounded_v = of_keys(k), of_values(v)
    return tuple(
        ((attend(layer, *rows) - right).norm(dim=-1) / right.norm(dim=-1)).flatten()
        for rows in ((rounded_k, rounded_v), (rounded_k, v), (k, rounded_v))
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recording", type=Path, help="folder of a recording's layers")
    parser.add_argument("--name", required=True, help="of the model and length")
    parser.add_argument("--layers", required=True, help="like 2,7,12")
    parser.add_argument("--queries", type=int, default=12, help="positions of each layer")
    parser.add_argument("--roundings", nargs="+", default=list(ROUNDINGS), choices=ROUNDINGS)
    parser.add_argument("--output", type=Path, required=True, help="a JSON lines file, appended to")
    arguments = parser.parse_args()
    numbers = [int(i) for i in arguments.layers.split(",")]
    layers = [Layer(arguments.recording, i, arguments.queries) for i in numbers]
    with arguments.output.open("a") as file:
        for name in arguments.roundings:
            parts = [errors(layer, ROUNDINGS[name]) for layer in layers]
            all_of, of_keys, of_values = (torch.cat(x) for x in zip(*parts, strict=True))
            record = {
                "name": arguments.name,
                "rounding": name,
                "mean": round(all_of.mean().item(), 4),
                "p99": round(all_of.quantile(0.99).item(), 4),
                "largest": round(all_of.max().item(), 4),
                "mean_keys": round(of_keys.mean().item(), 4),
                "mean_values": round(of_values.mean().item(), 4),
                "layers": numbers,
                "queries": arguments.queries,
                **environment.describe(),
            }
            print(json.dumps(record), file=file, flush=True)


if __name__ == "__main__":
    main()
