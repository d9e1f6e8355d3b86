"""`spillway-lab eval retrieval`: how well rankings find the important keys, by bytes per key.

The measures are those of table 1 of Spotlight Attention: the intersection over union of the keys
found and the true top of the same size, and the softmax mass of the keys found.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from spillway_kv.indices import KeyIndices, RotationHash
from spillway_kv.lab.evaluation import intervals, results
from spillway_kv.lab.evaluation.attends import LAYER_BLOCK, rows_in_daemon
from spillway_kv.lab.evaluation.indexing import (
    DEFAULT_INDEX,
    Index,
    check_policy,
    index_of_file,
    stacked_rotations,
)
from spillway_kv.lab.evaluation.methods import label_channel_count
from spillway_kv.lab.evaluation.recording import Recording
from spillway_kv.lab.evaluation.setting import Setting
from spillway_kv.lab.evaluation.workbench import Workbench
from spillway_kv.policy import Policy, Selector, TopK
from spillway_kv.sequence import Sequence
from spillway_kv.transformers.support import Shapes

SHARE = 0.02
HEAVY_STRATUM = 2
LSH_BITS = (32, 64, 128, 256, 512)
Doubles = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Ranking:
    """A way to rank keys.

    Attributes:
        name: Name for `--rankings`.
        label: Name for people.
        family: Rankings of the same family are one line of the plot.
        selector: Selector of the daemon.
        index: Index that the selector needs.
    """

    name: str
    label: str
    family: str
    selector: Selector
    index: Index


def rankings(setting: Setting, shapes: Shapes) -> list[Ranking]:
    """Returns every ranking of a setting. Trained ones only if weights were given."""
    made = [Ranking("oracle", "oracle", "oracle", "oracle", DEFAULT_INDEX)]
    for bits in LSH_BITS:
        for raw, family in ((True, "LSH, raw keys"), (False, "LSH, centred")):
            index = stacked_rotations(bits, shapes.head_dim, raw)
            name = f"lsh-{bits}{'-raw' if raw else ''}"
            made.append(Ranking(name, f"{family}, {bits} bits", family, "hamming", index))
    for bits in (1, 2, 3, 4):
        index = Index(RotationHash(bits_per_dim=bits))
        name, label = (
            f"codes-{bits}",
            f"our codes, {bits} bit{'s' if bits > 1 else ''} per dimension",
        )
        made.append(Ranking(name, label, "ours", "asymmetric", index))
    for page in (16, 32, 64):
        index = Index(key_indices=KeyIndices(quest_page_token_count=page))
        made.append(Ranking(f"quest-{page}", f"Quest, pages of {page}", "Quest", "quest", index))
    usual = label_channel_count(shapes.head_dim)
    for count in sorted({max(8, usual // 2), usual, min(2 * usual, shapes.head_dim)}):
        index = Index(key_indices=KeyIndices(label_channel_count=count))
        name, label = f"double-sparsity-{count}", f"Double Sparsity, {count} channels"
        made.append(Ranking(name, label, "Double Sparsity", "double_sparsity", index))
    int4 = Index(key_indices=KeyIndices(int4_keys=True))
    made.append(
        Ranking("int4", "Twilight's 4-bit keys", "Twilight's 4-bit keys", "int4_keys", int4)
    )
    for name, label, path in (
        ("mlp", "Spotlight MLP", setting.mlp),
        ("hashattention", "HashAttention", setting.hashattention),
    ):
        if path is not None:
            made.append(Ranking(name, label, label, "hamming", index_of_file(path)))
    return made


def run(bench: Workbench, names: str = "") -> None:
    """Measures the rankings and writes `retrieval.json`."""
    chosen = _chosen(rankings(bench.setting, bench.shapes), names)
    found: dict[str, list[dict[str, Doubles]]] = {ranking.name: [] for ranking in chosen}
    blocks = [
        bench.layers[first : first + LAYER_BLOCK]
        for first in range(0, len(bench.layers), LAYER_BLOCK)
    ]
    with bench.progress("retrieval") as progress:
        bar = progress.add_task("", total=len(bench.recordings) * len(blocks) * len(chosen))
        for recording in bench.recordings:
            for layers in blocks:
                part = _Block(bench, recording, layers)
                for ranking in chosen:
                    found[ranking.name].append(part.scores(ranking))
                    progress.advance(bar)
    told = [_told(bench, ranking, found[ranking.name], len(blocks)) for ranking in chosen]
    parameters = {"share": SHARE, "rankings": [ranking.name for ranking in chosen]}
    results.write(bench, "retrieval", parameters, {"rankings": told})


def _chosen(known: list[Ranking], names: str) -> list[Ranking]:
    if not names:
        return known
    by_name = {ranking.name: ranking for ranking in known}
    unknown = [name for name in names.split(",") if name not in by_name]
    if unknown:
        raise ValueError(f"no ranking {', '.join(unknown)}; there are {', '.join(by_name)}")
    return [by_name[name] for name in names.split(",")]


def index_bytes(bench: Workbench, ranking: Ranking) -> float:
    """Bytes that are stored per key for a ranking, without the resident sample."""
    if ranking.selector == "oracle":
        return float("nan")
    index = dataclasses.replace(ranking.index, resident_sample_fraction=0.0)
    model = bench.daemon_model(index, bench.recordings[0].scaling)
    return model.index_bytes_per_token / (model.layer_count * model.kv_head_count)


def _told(
    bench: Workbench, ranking: Ranking, parts: list[dict[str, Doubles]], block_count: int
) -> dict[str, Any]:
    """Summarises a ranking. parts: for each segment, blocks of layers."""
    # [L, Q, H_q], with the queries of the segments in order.
    whole = {
        name: np.concatenate(
            [
                np.concatenate([part[name] for part in parts[first : first + block_count]])
                for first in range(0, len(parts), block_count)
            ],
            axis=1,
        )
        for name in parts[0]
    }
    told: dict[str, Any] = {
        "name": ranking.name,
        "label": ranking.label,
        "family": ranking.family,
        "bytes_per_key": index_bytes(bench, ranking),
    }
    for name, values in whole.items():
        by_position = values.mean(axis=(0, 2))
        by_head = values.mean(axis=1)
        layer, head = np.unravel_index(by_head.argmin(), by_head.shape)
        told[name] = {
            "mean": by_position.mean(),
            "interval": intervals.of_mean(by_position, bench.setting.seed),
            "by_layer": values.mean(axis=(1, 2)).tolist(),
            "worst": {"layer": layer, "head": head, "mean": by_head[layer, head]},
        }
    return told


def true_tops(
    queries: torch.Tensor, keys: torch.Tensor, scaling: float, share: float
) -> dict[str, npt.NDArray[Any]]:
    """Returns the keys that a query should find at a layer.

    Args:
        queries: Queries of one token, [H_q, d].
        keys: Keys that are ranked, [H_kv, n, d].
        scaling: Factor on q.k.
        share: Size of the top as a share of the keys, rounded up.

    Returns:
        `own`: the top of each query head by its logits, ascending, [H_q, k]. `shared`: the top of
        each group by the sum of its heads' softmax weights, [H_kv, k]. `lse`: log-sum-exp of each
        query head's logits, [H_q].
    """
    kv_heads, n, _ = keys.shape
    # Rounded as in the daemon: a share of all visible tokens, including the newest.
    count = min(n, math.ceil(share * (n + 1)))
    logits = scaling * torch.einsum("hgd,hnd->hgn", queries.unflatten(0, (kv_heads, -1)), keys)
    lse = torch.logsumexp(logits, dim=-1)
    summed = (logits - lse[..., None]).exp().sum(1)
    own = logits.flatten(0, 1).topk(count, dim=-1).indices.sort(dim=-1).values
    shared = summed.topk(count, dim=-1).indices.sort(dim=-1).values
    return {
        "own": own.int().numpy(),
        "shared": shared.int().numpy(),
        "lse": lse.flatten().numpy(),
    }


class _Block:
    """Some layers of a recording."""

    def __init__(self, bench: Workbench, recording: Recording, layers: tuple[int, ...]) -> None:
        self.bench = bench
        self.recording = recording
        self.layers = layers
        self.positions = recording.spread(bench.setting.query_count)

    def scores(self, ranking: Ranking) -> dict[str, Doubles]:
        """IoU with the group's top and with each head's top, and captured mass, [L, Q, H_q]."""
        store = self.bench.store
        key = {
            "select": self.recording.name,
            "layers": list(self.layers),
            "positions": list(self.positions),
            "share": SHARE,
            "selector": ranking.selector,
            "index": ranking.index.described(),
            "daemon": self.bench.daemon_told,
        }
        if not store.has(key):
            with rows_in_daemon(self.bench, self.recording, ranking.index, self.layers) as sequence:
                store.put(key, self._measure(sequence, ranking))
        return store.get(key)

    def _truth(self, layer: int, share: float = SHARE) -> dict[str, npt.NDArray[Any]]:
        """`true_tops` for all queries, [Q, ...]."""
        store, recording = self.bench.store, self.recording
        key = {
            "tops": recording.name,
            "layer": layer,
            "positions": list(self.positions),
            "share": share,
        }
        if not store.has(key):
            seen = recording.layer(layer)
            keys = seen.keys.float()
            tops = []
            for position in self.positions:
                query = seen.queries[recording.positions.index(position)]
                tops.append(true_tops(query, keys[:, :position], recording.scaling, share))
            # Tops of later positions are larger, so the others are padded with -1.
            width = max(top["own"].shape[-1] for top in tops)
            for top in tops:
                for name in ("own", "shared"):
                    lack = width - top[name].shape[-1]
                    top[name] = np.pad(top[name], ((0, 0), (0, lack)), constant_values=-1)
            store.put(key, {name: np.stack([top[name] for top in tops]) for name in tops[0]})
        return store.get(key)

    def _measure(self, sequence: Sequence, ranking: Ranking) -> dict[str, Doubles]:
        # The sink is ranked too. The smallest window that is allowed is excluded.
        policy = Policy(
            selector=ranking.selector,
            heavy=TopK(fraction=SHARE),
            tail="none",
            sink_token_count=0,
            window_token_count=1,
        )
        model = self.bench.daemon_model(ranking.index, self.recording.scaling)
        check_policy(self.bench.client, model, policy)
        kept: dict[str, list[list[Doubles]]] = {}
        for layer in self.layers:
            scored = list(self._layer(sequence, layer, policy))
            for name in scored[0]:
                kept.setdefault(name, []).append([scores[name] for scores in scored])
        return {name: np.array(values) for name, values in kept.items()}

    def _layer(
        self, sequence: Sequence, layer: int, policy: Policy
    ) -> Iterator[dict[str, Doubles]]:
        recording, truth = self.recording, self._truth(layer)
        seen = recording.layer(layer)
        for number, position in enumerate(self.positions):
            query = seen.queries[recording.positions.index(position)]
            chosen = sequence.select(layer, query[None].numpy(), policy, position + 1)
            found = []
            for first, last in zip(chosen.offsets[:-1], chosen.offsets[1:], strict=True):
                heavy = chosen.strata[first:last] == HEAVY_STRATUM
                found.append(chosen.indices[first:last][heavy])
            top = {name: values[number] for name, values in truth.items()}
            yield score(found, query, seen.keys, recording.scaling, top)


def score(
    found: list[npt.NDArray[Any]],
    query: torch.Tensor,
    keys: torch.Tensor,
    scaling: float,
    top: dict[str, npt.NDArray[Any]],
) -> dict[str, Doubles]:
    """Scores what a query found at a layer, with one value per query head.

    Args:
        found: Tokens that each KV head found.
        query: [H_q, d].
        keys: [H_kv, n, d].
        scaling: Factor on q.k.
        top: The keys that it should have found, from `true_tops`.

    Returns:
        `iou_group`, `iou_head` and `mass`, [H_q].
    """
    group = len(query) // len(found)
    scores: dict[str, list[float]] = {"iou_group": [], "iou_head": [], "mass": []}
    for head in range(len(query)):
        tokens = found[head // group]
        tops = {"iou_group": top["shared"][head // group], "iou_head": top["own"][head]}
        for name, padded in tops.items():
            wanted = padded[padded >= 0]
            both = len(np.intersect1d(tokens, wanted, assume_unique=True))
            scores[name].append(both / (len(tokens) + len(wanted) - both))
        rows = keys[head // group, torch.from_numpy(tokens.astype(np.int64))].float()
        logits = scaling * (rows @ query[head])
        scores["mass"].append(float((logits - float(top["lse"][head])).exp().sum()))
    return {name: np.array(values) for name, values in scores.items()}
