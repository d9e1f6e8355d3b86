"""K/V rows and queries with the statistics of a real model's.

Gaussian keys say nothing about sparse attention: their softmax is flat. So the
data comes from SmolLM2-135M reading a real document, made wider and longer:

- Wider. A KV head of 128 dimensions is two of the model's KV heads of 64, of
  one layer, side by side; its four query heads are pairs of theirs. Spectrum,
  mean and covariance of keys and of values stay as they are, half by half.
- Longer. The source's blocks of 64 consecutive tokens are drawn with
  replacement behind its own first 64 tokens (with the attention sink). A drawn
  token is c + sqrt(1 - a^2) (x - c) + a e, c the mean and e Gaussian with the
  covariance of x, a = 0.3: mean and covariance are kept and no two tokens are
  equal. Keys are drawn before the rotary embedding, which is then applied at
  the token's new position with YaRN's frequencies (arXiv 2309.00071) for
  131072 tokens, as a model stretched to that length would.
- Before each measured length stand the source's last 256 tokens, and the
  queries are four of theirs: every query has its own local context.
- A query head is scaled until the mass of its 256 largest weights among 8192
  tokens is the mean of that of the two heads it was made from.

`meta.json` holds what was compared: that mass, the effective count exp(entropy)
of the rest, key spectrum and value mean, of the source and at each length.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "scripts"))

from demonstration import model as demonstration_model  # noqa: E402

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


@dataclass
class Source:
    """Per layer used: q [N, 9, 64], k and v [N, 3, 64], before the rotary embedding."""

    q: dict[int, torch.Tensor]
    k: dict[int, torch.Tensor]
    v: dict[int, torch.Tensor]
    token_count: int
    theta: float
    original_length: int


@dataclass(frozen=True)
class Pair:
    """Two KV heads of a layer that make one of the wider data."""

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


@torch.inference_mode()
def read_source() -> tuple[Source, list[Pair]]:
    model, tokenizer = demonstration_model.load(ROOT / "build" / "models")
    config = model.config
    chosen = pairs(config.num_hidden_layers)
    ids = tokenizer(DOCUMENT.read_text(), return_tensors="pt").input_ids
    # Not beyond what the model was trained for.
    count = min(ids.shape[1], config.max_position_embeddings) // ENDING * ENDING
    rope = getattr(config, "rope_parameters", None) or {}
    theta = rope.get("rope_theta") or config.rope_theta
    source = Source({}, {}, {}, count, theta, config.max_position_embeddings)
    hooks = []
    for layer in {pair.layer for pair in chosen}:
        attention = model.model.layers[layer].self_attn
        for name, into in (("q_proj", source.q), ("k_proj", source.k), ("v_proj", source.v)):

            def keep(_module: Any, _args: Any, out: Any, into: Any = into, at: int = layer) -> None:
                into[at] = out[0].reshape(count, -1, HALF).float().clone()

            hooks.append(getattr(attention, name).register_forward_hook(keep))
    model.model(ids[:, :count], use_cache=False)
    for hook in hooks:
        hook.remove()
    return source, chosen


def plain_frequencies(theta: float) -> torch.Tensor:
    return theta ** (-torch.arange(0, HALF, 2, dtype=torch.float64) / HALF)


def yarn_frequencies(theta: float, original: int, target: int) -> torch.Tensor:
    """YaRN's per-dimension interpolation, with its paper's alpha 1 and beta 32."""
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
    """Of vectors [T, d]: how many directions carry the variance, and the mean's share."""
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
    noise = torch.randn(len(order), HALF, generator=random) @ root.T
    moved = mean + math.sqrt(1 - JITTER**2) * (x[order] - mean) + JITTER * noise
    return torch.where(jittered[:, None], moved, x[order])


def token_order(count: int, total: int, random: torch.Generator) -> torch.Tensor:
    """Source token of each new position."""
    blocks = (total + BLOCK - 1) // BLOCK
    starts = torch.randint(SINK, count - BLOCK + 1, (blocks,), generator=random)
    order = (starts[:, None] + torch.arange(BLOCK)).reshape(-1)[:total].clone()
    order[:SINK] = torch.arange(SINK)
    for length in (n for n in LENGTHS if n <= total):
        order[length - ENDING : length] = torch.arange(count - ENDING, count)
    return order


def source_statistics(source: Source, pair: Pair, g: int) -> list[tuple[float, float]]:
    """Statistics of the two source heads over the queries used."""
    frequencies = plain_frequencies(source.theta)
    n = source.token_count
    positions = torch.arange(n)
    group = source.q[pair.layer].shape[1] // source.k[pair.layer].shape[1]
    found = []
    for half, head in enumerate(pair.heads):
        k = rotate(source.k[pair.layer][:, head], positions, frequencies)
        for i in range(QUERIES_PER_LENGTH):
            at = n - 1 - i * QUERY_STRIDE
            q = source.q[pair.layer][at : at + 1, pair.query_heads(g, group)[half]]
            q = rotate(q, positions[at : at + 1], frequencies)[0]
            found.append(softmax_statistics(k[: at + 1] @ q / math.sqrt(HALF)))
    return found


def calibrate(logits: list[torch.Tensor], target: float) -> float:
    """The factor on logits that makes the mean mass of the largest the target."""
    low, high = 0.05, 20.0
    for _ in range(40):
        middle = math.sqrt(low * high)
        mass = np.mean([softmax_statistics(middle * x)[0] for x in logits])
        low, high = (middle, high) if mass < target else (low, middle)
    return math.sqrt(low * high)


@torch.inference_mode()
def generate(directory: Path, total: int, seed: int = 0) -> None:
    """Writes k.bf16 and v.bf16 [8][total][128], queries.f32 [length][4][32][128], meta.json."""
    random = torch.Generator().manual_seed(seed)
    source, chosen = read_source()
    lengths = [n for n in LENGTHS if n <= total]
    calibration = min(CALIBRATION_LENGTH, total)
    frequencies = yarn_frequencies(source.theta, source.original_length, LENGTHS[-1])
    order = token_order(source.token_count, total, random)
    position = torch.arange(total)
    # The sink keeps its exact rows: its key is no sample of the others.
    jittered = position >= SINK
    k = torch.empty(KV_HEADS, total, 2 * HALF, dtype=torch.bfloat16)
    v = torch.empty_like(k)
    q = torch.empty(len(lengths), QUERIES_PER_LENGTH, KV_HEADS * GROUP, 2 * HALF)
    statistics: dict[str, list[tuple[float, float]]] = {"source": []}
    shapes: dict[str, list[dict[str, float]]] = {}
    for kv_head, pair in enumerate(chosen):
        group = source.q[pair.layer].shape[1] // source.k[pair.layer].shape[1]
        for half, head in enumerate(pair.heads):
            part = slice(half * HALF, (half + 1) * HALF)
            raw = {"keys": source.k[pair.layer][:, head], "values": source.v[pair.layer][:, head]}
            drawn = {name: resample(x, order, jittered, random) for name, x in raw.items()}
            for name in raw:
                shapes.setdefault(f"source_{name}", []).append(spectrum(raw[name][SINK:]))
                shapes.setdefault(f"generated_{name}", []).append(spectrum(drawn[name][SINK:]))
            k[kv_head, :, part] = rotate(drawn["keys"], position, frequencies).bfloat16()
            v[kv_head, :, part] = drawn["values"].bfloat16()
            for g in range(GROUP):
                rows = source.q[pair.layer][:, pair.query_heads(g, group)[half]]
                for j, n in enumerate(lengths):
                    for i in range(QUERIES_PER_LENGTH):
                        back = 1 + i * QUERY_STRIDE
                        q[j, i, kv_head * GROUP + g, part] = rotate(
                            rows[-back][None], torch.tensor([n - back]), frequencies
                        )[0]
        keys = k[kv_head].float()
        scale = 1 / math.sqrt(2 * HALF)
        for g in range(GROUP):
            head = kv_head * GROUP + g
            wanted = source_statistics(source, pair, g)
            statistics["source"] += wanted
            j = lengths.index(calibration)
            logits = [
                scale * (keys[: calibration - i * QUERY_STRIDE] @ q[j, i, head])
                for i in range(QUERIES_PER_LENGTH)
            ]
            q[:, :, head] *= calibrate(logits, float(np.mean([mass for mass, _ in wanted])))
            for j, n in enumerate(lengths):
                for i in range(QUERIES_PER_LENGTH):
                    logits_n = scale * (keys[: n - i * QUERY_STRIDE] @ q[j, i, head])
                    statistics.setdefault(str(n), []).append(softmax_statistics(logits_n))
    directory.mkdir(parents=True, exist_ok=True)
    k.view(torch.int16).numpy().tofile(directory / "k.bf16")
    v.view(torch.int16).numpy().tofile(directory / "v.bf16")
    q.numpy().tofile(directory / "queries.f32")
    meta = {
        "query_head_count": KV_HEADS * GROUP,
        "kv_head_count": KV_HEADS,
        "head_dim": 2 * HALF,
        "token_count": total,
        "lengths": lengths,
        "queries_per_length": QUERIES_PER_LENGTH,
        "query_stride": QUERY_STRIDE,
        "source_model": demonstration_model.NAME,
        "source_document": str(DOCUMENT),
        "source_token_count": source.token_count,
        "source_layers": [pair.layer for pair in chosen],
        "seed": seed,
        "attention": {
            at: {
                "top_256_mass_mean": float(np.mean([mass for mass, _ in found])),
                "top_256_mass_quartiles": np.quantile([m for m, _ in found], (0.25, 0.75)).tolist(),
                "tail_effective_count_median": float(np.median([count for _, count in found])),
            }
            for at, found in statistics.items()
        },
        "vectors": {
            name: {key: float(np.mean([x[key] for x in found])) for key in found[0]}
            for name, found in shapes.items()
        },
    }
    # Last, so that an interrupted run leaves nothing that looks complete.
    (directory / "meta.json").write_text(json.dumps(meta, indent=2) + "\n")


def ensure(total: int = LENGTHS[-1]) -> Path:
    """The folder of the data, made if this version of it is not there."""
    version = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]
    directory = ROOT / "build" / "bench" / f"data-{total}-{version}"
    if not (directory / "meta.json").exists():
        print(f"generating {total} tokens from {demonstration_model.NAME}", flush=True)
        generate(directory, total)
    return directory
