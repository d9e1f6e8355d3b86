"""Generates K/V rows and queries with the statistics of a real model's.

Gaussian keys say nothing about sparse attention, because their softmax is flat. So the
data comes from SmolLM2-135M reading a real document, made wider and longer:

- Wider. A KV head of 128 dimensions consists of two of the model's KV heads of 64, of
  the same layer, side by side. Its four query heads are pairs of their query heads.
  Spectrum, mean and covariance of keys and of values stay the same in each half.
- Longer. The first 64 tokens of the source, with the attention sink, come first. Then
  blocks of 64 consecutive tokens of the source are drawn with replacement. A drawn token
  is c + sqrt(1 - a^2) (x - c) + a e, where c is the mean, e is Gaussian with the covariance
  of x, and a = 0.3. This keeps mean and covariance, and no two tokens are equal. Keys are
  drawn before the rotary embedding, which is then applied at the token's new position, with
  the frequencies of YaRN (arXiv 2309.00071) for 131072 tokens, or for the longest length
  if that is more: as in a model whose context is extended to that length.
- Before each measured length come the last 256 tokens of the source, and the queries
  are those of four of these tokens. So every query has its own local context.
- A query head is scaled until its 256 largest weights among 8192 tokens sum to the
  mean of these sums of the two heads from which it is made.

`meta.json` has what was compared, of the source and at each length: this sum, the
effective number exp(entropy) of the other keys, the spectrum of the keys and the mean of
the values.

If the model is not installed, a file can replace it. Its K and V are rounded to float16,
whose step is an eighth of that of bfloat16, to which everything is rounded later:

    python bench/trace_data.py --save-source FILE
    python bench/trace_data.py --source FILE --tokens 1048576 --output FOLDER

The same seed on the same kind of device gives the same data. A GPU draws other numbers
than a CPU.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from dataclasses import fields as dataclass_fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = Path("/usr/share/common-licenses/GPL-3")
LENGTHS = (4096, 8192, 16384, 32768, 65536, 131072)
QUERIES_PER_LENGTH = 4
QUERY_STRIDE = 32  # tokens between the queries of one length
KV_HEADS = 8
GROUP = 4
HALF = 64  # head_dim of the source
SINK = 64
ENDING = 256
BLOCK = 64
JITTER = 0.3
TOP = 256
CALIBRATION_LENGTH = 8192
Shapes = dict[str, list[dict[str, float]]]  # spectra by what they are of


@dataclass(frozen=True)
class Pair:
    """Two KV heads of one layer, which make one KV head of the wider data."""

    layer: int
    heads: tuple[int, int]

    def query_heads(self, g: int, group: int) -> tuple[int, int]:
        """Source query heads of the wider query head g."""
        a, b = self.heads
        return a * group + g % group, b * group + (g + g // group) % group


def pairs(layer_count: int) -> list[Pair]:
    """Eight pairs from layers spread over the model."""
    choices = ((0, 1), (1, 2), (2, 0))
    layers = np.linspace(1, layer_count - 2, KV_HEADS).round().astype(int)
    return [Pair(int(layer), choices[i % 3]) for i, layer in enumerate(layers)]


@dataclass
class Source:
    """Queries, keys and values of the model, before the rotary embedding; P pairs of KV heads."""

    pairs: list[Pair]
    q: torch.Tensor  # [P, ENDING, query heads of the layer, 64], for the last ENDING tokens
    k: torch.Tensor  # [P, 2, N, 64]
    v: torch.Tensor  # [P, 2, N, 64]
    group: int  # query heads per KV head
    theta: float
    original_length: int
    model: str
    document: str
    precision: str  # of k and v: float32 or float16

    @property
    def token_count(self) -> int:
        return self.k.shape[2]

    def to(self, device: torch.device) -> Source:
        moved = {name: getattr(self, name).to(device) for name in ("q", "k", "v")}
        return replace(self, **moved)

    def save(self, path: Path) -> None:
        if max(float(x.abs().max()) for x in (self.k, self.v)) > torch.finfo(torch.float16).max:
            raise ValueError("the source's rows are beyond float16")
        fields = {field.name: getattr(self, field.name) for field in dataclass_fields(self)}
        fields["pairs"] = [(pair.layer, *pair.heads) for pair in self.pairs]
        fields |= {name: fields[name].half() for name in ("k", "v")} | {"precision": "float16"}
        torch.save(fields, path)

    @staticmethod
    def load(path: Path) -> Source:
        fields = torch.load(path, map_location="cpu", weights_only=True)
        fields["pairs"] = [Pair(layer, (a, b)) for layer, a, b in fields["pairs"]]
        fields |= {name: fields[name].float() for name in ("k", "v")}
        return Source(**fields)


@torch.inference_mode()
def read_source() -> Source:
    """Runs the model on the document. Needs the model's package and transformers."""
    sys.path.append(str(ROOT / "scripts"))
    from demonstration import model as demonstration_model

    model, tokenizer = demonstration_model.load(ROOT / "build" / "models")
    config = model.config
    chosen = pairs(config.num_hidden_layers)
    ids = tokenizer(DOCUMENT.read_text(), return_tensors="pt").input_ids
    # At most the context length for which the model was trained.
    count = min(ids.shape[1], config.max_position_embeddings) // ENDING * ENDING
    rope = getattr(config, "rope_parameters", None) or {}
    outputs: dict[str, dict[int, torch.Tensor]] = {"q_proj": {}, "k_proj": {}, "v_proj": {}}
    hooks = []
    for layer in {pair.layer for pair in chosen}:
        attention = model.model.layers[layer].self_attn
        for name, into in outputs.items():

            def keep(_module: Any, _args: Any, out: Any, into: Any = into, at: int = layer) -> None:
                into[at] = out[0].reshape(count, -1, HALF).float().clone()

            hooks.append(getattr(attention, name).register_forward_hook(keep))
    model.model(ids[:, :count], use_cache=False)
    for hook in hooks:
        hook.remove()

    def rows(name: str) -> torch.Tensor:
        return torch.stack(
            [outputs[name][p.layer][:, list(p.heads)].transpose(0, 1) for p in chosen]
        )

    return Source(
        pairs=chosen,
        q=torch.stack([outputs["q_proj"][pair.layer][-ENDING:] for pair in chosen]),
        k=rows("k_proj"),
        v=rows("v_proj"),
        group=config.num_attention_heads // config.num_key_value_heads,
        theta=rope.get("rope_theta") or config.rope_theta,
        original_length=config.max_position_embeddings,
        model=demonstration_model.NAME,
        document=str(DOCUMENT),
        precision="float32",
    )


def plain_frequencies(theta: float) -> torch.Tensor:
    return theta ** (-torch.arange(0, HALF, 2, dtype=torch.float64) / HALF)


def yarn_frequencies(theta: float, original: int, target: int) -> torch.Tensor:
    """YaRN's interpolation per dimension, with alpha 1 and beta 32 as in the paper."""
    plain = plain_frequencies(theta)
    turns = original * plain / (2 * math.pi)
    keep = ((turns - 1) / (32 - 1)).clamp(0, 1)
    return plain * keep + plain * (original / target) * (1 - keep)


def rotate(x: torch.Tensor, positions: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of x [T, ..., 64], halves paired as in Llama."""
    angle = (positions.double()[:, None] * frequencies).float()
    angle = angle.reshape(angle.shape[0], *[1] * (x.dim() - 2), -1)
    cos, sin = angle.cos(), angle.sin()
    first, second = x[..., : HALF // 2], x[..., HALF // 2 :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def softmax_statistics(logits: torch.Tensor) -> tuple[float, float]:
    """Mass of the TOP largest weights, and exp(entropy) of the others, renormalised."""
    p = logits.double().softmax(-1).sort(descending=True).values
    rest = p[TOP:] / p[TOP:].sum()
    entropy = -(rest * rest.clamp_min(1e-300).log()).sum()
    return float(p[:TOP].sum()), float(entropy.exp())


def spectrum(x: torch.Tensor) -> dict[str, float]:
    """Statistics of vectors [T, d]: how the variance spreads over directions, the mean's share."""
    x = x.double()
    mean = x.mean(0)
    values = torch.linalg.eigvalsh(torch.cov((x - mean).T)).clamp_min(0)
    total = values.sum()
    return {
        "effective_dims": float(total**2 / (values**2).sum()),
        "top_direction_share": float(values[-1] / total),
        "mean_share": float(mean.square().sum() / x.square().sum(-1).mean()),
    }


def resample(
    x: torch.Tensor, order: torch.Tensor, jittered: torch.Tensor, random: torch.Generator
) -> torch.Tensor:
    """Source rows x [N, 64] in the given order, some of them jittered."""
    body = x[SINK:].double()
    mean = body.mean(0)
    values, vectors = torch.linalg.eigh(torch.cov((body - mean).T))
    root = (vectors * values.clamp_min(0).sqrt()).float()
    mean = mean.float()
    noise = torch.randn(len(order), HALF, generator=random, device=random.device) @ root.T
    moved = mean + math.sqrt(1 - JITTER**2) * (x[order] - mean) + JITTER * noise
    return torch.where(jittered[:, None], moved, x[order])


def token_order(
    count: int, total: int, lengths: Sequence[int], random: torch.Generator
) -> torch.Tensor:
    """The source token for each new position."""
    device = random.device
    blocks = (total + BLOCK - 1) // BLOCK
    starts = torch.randint(SINK, count - BLOCK + 1, (blocks,), generator=random, device=device)
    order = (starts[:, None] + torch.arange(BLOCK, device=device)).reshape(-1)[:total].clone()
    order[:SINK] = torch.arange(SINK, device=device)
    for length in lengths:
        order[length - ENDING : length] = torch.arange(count - ENDING, count, device=device)
    return order


def source_statistics(source: Source, pair_index: int, g: int) -> list[tuple[float, float]]:
    """softmax_statistics of the two source heads, for the queries that are used."""
    frequencies = plain_frequencies(source.theta).to(source.k.device)
    n = source.token_count
    positions = torch.arange(n, device=source.k.device)
    heads = source.pairs[pair_index].query_heads(g, source.group)
    found = []
    for half, head in enumerate(heads):
        k = rotate(source.k[pair_index, half], positions, frequencies)
        for i in range(QUERIES_PER_LENGTH):
            back = 1 + i * QUERY_STRIDE
            q = source.q[pair_index, -back, head][None]
            q = rotate(q, positions[n - back : n - back + 1], frequencies)[0]
            found.append(softmax_statistics(k[: n - back + 1] @ q / math.sqrt(HALF)))
    return found


def calibrate(logits: list[torch.Tensor], target: float) -> float:
    """The factor on the logits with which the mean mass of the TOP largest weights is `target`."""
    low, high = 0.05, 20.0
    for _ in range(40):
        middle = math.sqrt(low * high)
        mass = np.mean([softmax_statistics(middle * x)[0] for x in logits])
        low, high = (middle, high) if mass < target else (low, middle)
    return math.sqrt(low * high)


def query(
    source: Source, pair_index: int, g: int, n: int, i: int, frequencies: torch.Tensor
) -> torch.Tensor:
    """Query head g of the i-th query before length n, [128], not yet scaled."""
    back = 1 + i * QUERY_STRIDE
    position = torch.tensor([n - back], device=frequencies.device)
    heads = source.pairs[pair_index].query_heads(g, source.group)
    rows = source.q[pair_index, -back]
    return torch.cat([rotate(rows[head][None], position, frequencies)[0] for head in heads])


def means(shapes: Shapes) -> dict[str, dict[str, float]]:
    return {
        name: {key: float(np.mean([x[key] for x in found])) for key in found[0]}
        for name, found in shapes.items()
    }


def default_lengths(total: int) -> list[int]:
    """The shortest length, doubled again and again up to `total`."""
    lengths = [LENGTHS[0]]
    while 2 * lengths[-1] <= total:
        lengths.append(2 * lengths[-1])
    return lengths


@torch.inference_mode()
def generate(
    directory: Path,
    total: int,
    seed: int = 0,
    *,
    source: Source | None = None,
    lengths: Sequence[int] = (),
    device: torch.device | str = "cpu",
) -> None:
    """Writes k.bf16 and v.bf16 [8][total][128], queries.f32 [length][4][32][128], meta.json.

    The queries are rounded to bf16, too.

    source: None means that the model is run. lengths: ascending, the last is at most total; empty
    means default_lengths.
    """
    device = torch.device(device)
    random = torch.Generator(device).manual_seed(seed)
    source = (source or read_source()).to(device)
    lengths = list(lengths) or default_lengths(total)
    if lengths != sorted(set(lengths)) or lengths[0] < SINK + ENDING or lengths[-1] > total:
        raise ValueError(f"lengths {lengths} do not ascend within [{SINK + ENDING}, {total}]")
    # The queries also come before the length at which they are calibrated.
    calibration = min(CALIBRATION_LENGTH, total)
    marks = sorted({calibration, *lengths})
    target = max(LENGTHS[-1], lengths[-1])
    frequencies = yarn_frequencies(source.theta, source.original_length, target).to(device)
    order = token_order(source.token_count, total, marks, random)
    position = torch.arange(total, device=device)
    # The sink keeps its exact rows, because its keys are not distributed like the others.
    jittered = position >= SINK
    k = torch.empty(total, 2 * HALF, dtype=torch.bfloat16, device=device)
    v = torch.empty_like(k)
    q = torch.empty(len(marks), QUERIES_PER_LENGTH, KV_HEADS * GROUP, 2 * HALF, device=device)
    statistics: dict[str, list[tuple[float, float]]] = {"source": []}
    shapes: Shapes = {}
    shapes_at: dict[int, Shapes] = {n: {} for n in lengths}
    directory.mkdir(parents=True, exist_ok=True)
    meta_file = directory / "meta.json"
    meta_file.unlink(missing_ok=True)
    with (directory / "k.bf16").open("wb") as k_file, (directory / "v.bf16").open("wb") as v_file:
        for kv_head in range(KV_HEADS):
            for half in range(2):
                part = slice(half * HALF, (half + 1) * HALF)
                raw = {"keys": source.k[kv_head, half], "values": source.v[kv_head, half]}
                drawn = {name: resample(x, order, jittered, random) for name, x in raw.items()}
                for name in raw:
                    shapes.setdefault(f"source_{name}", []).append(spectrum(raw[name][SINK:]))
                    shapes.setdefault(f"generated_{name}", []).append(spectrum(drawn[name][SINK:]))
                    for n in lengths:
                        shapes_at[n].setdefault(name, []).append(spectrum(drawn[name][SINK:n]))
                k[:, part] = rotate(drawn["keys"], position, frequencies).bfloat16()
                v[:, part] = drawn["values"].bfloat16()
            keys = k.float()
            scale = 1 / math.sqrt(2 * HALF)
            for g in range(GROUP):
                head = kv_head * GROUP + g
                for j, n in enumerate(marks):
                    for i in range(QUERIES_PER_LENGTH):
                        q[j, i, head] = query(source, kv_head, g, n, i, frequencies)
                wanted = source_statistics(source, kv_head, g)
                statistics["source"] += wanted
                j = marks.index(calibration)
                logits = [
                    scale * (keys[: calibration - i * QUERY_STRIDE] @ q[j, i, head])
                    for i in range(QUERIES_PER_LENGTH)
                ]
                q[:, :, head] *= calibrate(logits, float(np.mean([mass for mass, _ in wanted])))
                for j, n in enumerate(marks):
                    for i in range(QUERIES_PER_LENGTH):
                        logits_n = scale * (keys[: n - i * QUERY_STRIDE] @ q[j, i, head])
                        statistics.setdefault(str(n), []).append(softmax_statistics(logits_n))
            k.view(torch.int16).cpu().numpy().tofile(k_file)
            v.view(torch.int16).cpu().numpy().tofile(v_file)
    measured = [marks.index(n) for n in lengths]
    # As those of a model in bf16 are.
    q[measured].bfloat16().float().cpu().numpy().tofile(directory / "queries.f32")
    meta = {
        "query_head_count": KV_HEADS * GROUP,
        "kv_head_count": KV_HEADS,
        "head_dim": 2 * HALF,
        "token_count": total,
        "lengths": lengths,
        "queries_per_length": QUERIES_PER_LENGTH,
        "query_stride": QUERY_STRIDE,
        "source_model": source.model,
        "source_document": source.document,
        "source_token_count": source.token_count,
        "source_layers": [pair.layer for pair in source.pairs],
        "source_precision": source.precision,
        "yarn_target_length": target,
        "generated_on": device.type,
        "seed": seed,
        "attention": {
            at: {
                "top_256_mass_mean": float(np.mean([mass for mass, _ in found])),
                "top_256_mass_quartiles": np.quantile([m for m, _ in found], (0.25, 0.75)).tolist(),
                "tail_effective_count_median": float(np.median([count for _, count in found])),
            }
            for at, found in statistics.items()
        },
        "vectors": means(shapes),
        "vectors_at": {str(n): means(found) for n, found in shapes_at.items()},
    }
    # Written last, so that an interrupted run does not look complete.
    meta_file.write_text(json.dumps(meta, indent=2) + "\n")


def ensure(total: int = LENGTHS[-1]) -> Path:
    """The folder with the data. Generates them if this version does not exist."""
    version = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]
    directory = ROOT / "build" / "bench" / f"data-{total}-{version}"
    if not (directory / "meta.json").exists():
        print(f"generating {total} tokens", flush=True)
        generate(directory, total)
    return directory


def main() -> None:
    parser = argparse.ArgumentParser(description="Makes the data, or the file it is made from.")
    parser.add_argument("--save-source", type=Path, metavar="FILE", help="read the model into FILE")
    parser.add_argument("--source", type=Path, metavar="FILE", help="instead of reading the model")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="of the data")
    parser.add_argument("--tokens", type=int, default=LENGTHS[-1])
    parser.add_argument("--lengths", type=int, nargs="+", default=[], help="doublings by default")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    if (options.save_source is None) == (options.output is None):
        parser.error("give --save-source FILE or --output FOLDER")
    source = read_source() if options.source is None else Source.load(options.source)
    if options.save_source is not None:
        source.save(options.save_source)
        return
    generate(
        options.output,
        options.tokens,
        options.seed,
        source=source,
        lengths=options.lengths,
        device=options.device,
    )


if __name__ == "__main__":
    main()
