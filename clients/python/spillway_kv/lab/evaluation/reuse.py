"""`spillway-lab eval reuse`: what neighbouring steps, and neighbouring layers, have in common.

Rows that an attend needs and that are not in GPU memory cross the link. This measures three ways to
move fewer of them, or to move them earlier, with consecutive queries of a model:

- a cache of the heavy rows of earlier steps, which drops the least recently used rows;
- a sample of the tail that stays the same for some steps, instead of a new one each time;
- rows of the next layer, chosen with a prediction of its query: the layer's norm, query
  projection and rotary embedding, applied to the input of the layer before it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from spillway_kv.lab.evaluation import results
from spillway_kv.lab.evaluation.attends import EXACT, rows_in_daemon
from spillway_kv.lab.evaluation.indexing import DEFAULT_INDEX
from spillway_kv.lab.evaluation.recording import RUN_LENGTH, Recording
from spillway_kv.lab.evaluation.sampling import resident_sample
from spillway_kv.lab.evaluation.workbench import Workbench
from spillway_kv.policy import Policy, TopK
from spillway_kv.sequence import Sequence as DaemonSequence

CAPACITIES = (1, 2, 4, 8)
GUESS_BUDGETS = (1, 2)
# Steps that fill a cache before hits are counted.
WARM_UP = 8
_HEAVY = 2  # and above: the tail's strata

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Step:
    """The rows that one KV head of one layer needs in one step.

    Attributes:
        heavy: Heavy tokens, without sink and window.
        sampled: Sampled tokens of the tail, including those that are resident on the GPU.
        moved: Heavy and sampled tokens that are not in the resident sample.
    """

    heavy: frozenset[int]
    sampled: frozenset[int]
    moved: frozenset[int]


def run(bench: Workbench) -> None:
    """Measures and writes `reuse.json`."""
    found: dict[str, Any] = {"layers": []}
    guesses = _guessed_queries(bench, bench.recordings[0])
    with bench.progress("reuse") as progress:
        bar = progress.add_task("", total=len(bench.layers))
        for layer in bench.layers:
            found["layers"].append(_layer(bench, bench.recordings[0], layer, guesses))
            progress.advance(bar)
    found |= summed(found["layers"])
    parameters = {
        "capacities": list(CAPACITIES),
        "guess_budgets": list(GUESS_BUDGETS),
        "steps": RUN_LENGTH,
        "warm_up": WARM_UP,
    }
    results.write(bench, "reuse", parameters, found)


def summed(layers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Means over layers. Shares are weighted by the number of rows of each layer."""

    def mean(name: str) -> float:
        return float(np.mean([layer[name] for layer in layers]))

    def share(of: str, name: str, number: int | None = None) -> float | None:
        """Share of the rows `of` each layer, over all layers. None if there are no such rows."""
        told = [layer for layer in layers if layer[name] is not None]
        needed = sum(layer[of] for layer in told)
        if not needed:
            return None
        shares = [layer[name] if number is None else layer[name][number] for layer in told]
        return sum(layer[of] * x for layer, x in zip(told, shares, strict=True)) / needed

    return {
        "heavy": mean("heavy"),
        "sampled": mean("sampled"),
        "moved": mean("moved"),
        "heavy_share_of_moved": share("moved", "heavy_share"),
        "hit_shares": [share("heavy", "hit_shares", i) for i in range(len(CAPACITIES))],
        "neighbours_share": share("heavy", "neighbours_share"),
        "sample_kept_share": share("sampled", "sample_kept_share"),
        "sample_kept_share_held": share("sampled", "sample_kept_share_held"),
        "error_correlation": mean("error_correlation"),
        "error_correlation_held": mean("error_correlation_held"),
        "guessed_shares": [share("heavy", "guessed_shares", i) for i in range(len(GUESS_BUDGETS))],
    }


def hit_share(steps: Sequence[Collection[int]], capacity: int, warm_up: int) -> float:
    """Share of the rows of the steps from `warm_up` on that are in a cache of earlier steps.

    Args:
        steps: The rows that each step needs.
        capacity: Number of rows that the cache can hold. The least recently used row is dropped
            first.
        warm_up: Number of steps that only fill the cache.
    """
    cache: OrderedDict[int, None] = OrderedDict()
    hits = needed = 0
    for number, rows in enumerate(steps):
        if number >= warm_up:
            hits += sum(row in cache for row in rows)
            needed += len(rows)
        for row in sorted(rows):
            cache.pop(row, None)
            cache[row] = None
        while len(cache) > capacity:
            cache.popitem(last=False)
    return hits / needed if needed else 0.0


def kept_share(steps: Sequence[Collection[int]]) -> float:
    """Share of the rows of all steps except the first that the previous step also had."""
    kept = sum(len(set(now) & set(before)) for before, now in zip(steps, steps[1:], strict=False))
    needed = sum(len(now) for now in steps[1:])
    return kept / needed if needed else 0.0


def correlation(errors: Floats) -> float:
    """Mean cosine between the errors [T, H, d] of neighbouring steps."""
    a, b = errors[:-1], errors[1:]
    norms = np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1)
    return float(np.mean((a * b).sum(-1) / np.maximum(norms, 1e-30)))


def _layer(
    bench: Workbench, recording: Recording, layer: int, guesses: dict[int, torch.Tensor]
) -> dict[str, Any]:
    first = recording.positions.index(recording.run[0])
    queries = recording.queries(layer)[first:].numpy()
    visible = [position + 1 for position in recording.run]
    heads = range(bench.shapes.kv_head_count)
    held = [resident_sample(layer, h, visible[-1]) for h in heads]
    with rows_in_daemon(bench, recording, DEFAULT_INDEX, [layer]) as sequence:
        own = _steps(sequence, layer, queries, visible, held)
        # The phase of the sample depends only on the visible length, which is constant here.
        still = _steps(sequence, layer, queries, [visible[0]] * len(visible), held)
        budget = max(1, round(np.mean([len(own[h][t].heavy) for h in heads for t in range(8)])))
        errors = _errors(sequence, layer, queries, visible)
        still_errors = _errors(sequence, layer, queries, [visible[0]] * len(visible))
        guessed = None
        if layer in guesses:
            guessed = [
                _guessed_share(sequence, layer, guesses[layer].numpy(), visible, own, b * budget)
                for b in GUESS_BUDGETS
            ]
    heavy = [[step.heavy for step in own[h]] for h in heads]
    mean_heavy = np.mean([len(rows) for of_head in heavy for rows in of_head])

    def mean(of: Iterable[float]) -> float:
        return float(np.mean(list(of)))

    moved = mean(len(step.moved) for of_head in own for step in of_head)
    return {
        "layer": layer,
        "heavy": mean_heavy,
        "sampled": mean(len(step.sampled) for of_head in own for step in of_head),
        "moved": moved,
        "heavy_share": mean(len(step.moved & step.heavy) for of_head in own for step in of_head)
        / max(moved, 1),
        "hit_shares": [
            mean(hit_share(heavy[h], max(1, round(c * mean_heavy)), WARM_UP) for h in heads)
            for c in CAPACITIES
        ],
        "neighbours_share": mean(kept_share(heavy[h]) for h in heads),
        "sample_kept_share": mean(kept_share([s.sampled for s in own[h]]) for h in heads),
        "sample_kept_share_held": mean(kept_share([s.sampled for s in still[h]]) for h in heads),
        "error_correlation": correlation(errors),
        "error_correlation_held": correlation(still_errors),
        "guessed_shares": guessed,
    }


def _steps(
    sequence: DaemonSequence,
    layer: int,
    queries: npt.NDArray[np.float32],
    visible: Sequence[int],
    held: Sequence[npt.NDArray[np.bool_]],
) -> list[list[Step]]:
    """Returns the rows of each KV head and step, [H_kv][T]."""
    steps: list[list[Step]] = [[] for _ in held]
    for q, count in zip(queries, visible, strict=True):
        chosen = sequence.select(layer, q[None], Policy(), count)
        for h, of_head in enumerate(steps):
            part = slice(chosen.offsets[h], chosen.offsets[h + 1])
            tokens, strata = chosen.indices[part], chosen.strata[part]
            needed = tokens[strata >= _HEAVY]
            of_head.append(
                Step(
                    heavy=frozenset(tokens[strata == _HEAVY].tolist()),
                    sampled=frozenset(tokens[strata > _HEAVY].tolist()),
                    moved=frozenset(needed[~held[h][needed]].tolist()),
                )
            )
    return steps


def _errors(
    sequence: DaemonSequence,
    layer: int,
    queries: npt.NDArray[np.float32],
    visible: Sequence[int],
) -> Floats:
    """Differences between outputs and those of exact attention, [T, H_q, d]."""
    made = []
    for policy in (Policy(), EXACT):
        outs = [
            sequence.attend(layer, q[None], policy, [count], out_dtype="float32").out
            for q, count in zip(queries, visible, strict=True)
        ]
        made.append(np.concatenate(outs).astype(np.float64))
    return made[0] - made[1]


def _guessed_share(
    sequence: DaemonSequence,
    layer: int,
    guesses: npt.NDArray[np.float32],
    visible: Sequence[int],
    own: Sequence[Sequence[Step]],
    count: int,
) -> float:
    """Share of the heavy rows that are among the top `count` rows for the predicted query."""
    policy = Policy(heavy=TopK(count=count), tail="none")
    found = needed = 0
    for t, (q, n) in enumerate(zip(guesses, visible, strict=True)):
        chosen = sequence.select(layer, q[None], policy, n)
        for h, of_head in enumerate(own):
            tokens = set(chosen.indices[chosen.offsets[h] : chosen.offsets[h + 1]].tolist())
            found += len(of_head[t].heavy & tokens)
            needed += len(of_head[t].heavy)
    return found / needed if needed else 0.0


def _guessed_queries(bench: Workbench, recording: Recording) -> dict[int, torch.Tensor]:
    """Returns predicted queries [T, H_q, d], float32, for each layer except the first."""
    key = {"guessed queries": recording.name, "layers": list(bench.layers)}
    wanted = [layer for layer in bench.layers if layer > 0]
    if not bench.store.has(key):
        model = bench.load()
        run = torch.tensor(recording.run, device="cpu")
        guesses: dict[str, npt.NDArray[Any]] = {}
        layers = model.base_model.layers

        def guess(number: int) -> Any:
            def hook(module: Any, args: Any, kwargs: Any) -> None:
                entering = args[0] if args else kwargs["hidden_states"]
                after = layers[number + 1]
                normed = after.input_layernorm(entering[:, run.to(entering.device)])
                guesses[str(number + 1)] = _rotated_query(model, after, normed, run)

            return hook

        hooks = [
            layers[layer - 1].register_forward_pre_hook(guess(layer - 1), with_kwargs=True)
            for layer in wanted
        ]
        try:
            with torch.inference_mode():
                model.base_model(input_ids=recording.tokens[None].to(model.device), use_cache=False)
        finally:
            for hook in hooks:
                hook.remove()
        bench.store.put(key, guesses)
    return {int(name): torch.from_numpy(q) for name, q in bench.store.get(key).items()}


def _rotated_query(
    model: Any, layer: Any, normed: torch.Tensor, positions: torch.Tensor
) -> npt.NDArray[np.float32]:
    """Returns the layer's queries [T, H_q, d] for normed hidden states [1, T, hidden]."""
    q = layer.self_attn.q_proj(normed)
    q = q.view(1, len(positions), -1, layer.self_attn.head_dim).transpose(1, 2)
    cos, sin = model.base_model.rotary_emb(normed, positions[None].to(normed.device))
    half = q.shape[-1] // 2
    turned = torch.cat((-q[..., half:], q[..., :half]), dim=-1)
    rotated = q * cos[:, None] + turned * sin[:, None]
    queries: npt.NDArray[np.float32] = rotated[0].transpose(0, 1).float().cpu().numpy()
    return queries
