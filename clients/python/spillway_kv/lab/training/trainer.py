"""Trains the hash MLPs of a layer on its traces."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from spillway_kv.lab.training.hash_mlp import HashAttentionMlps, HashMlp, Hyperplanes, ThreeLayerMlp
from spillway_kv.lab.training.ranking import (
    classification_loss,
    intersection_over_union,
    ranking_loss,
    softsign,
    true_scores,
)
from spillway_kv.lab.training.traces import Sample, Traces

# The daemon's centre is the mean of this many first keys (docs/adr/0002).
CENTRE_TOKEN_COUNT = 1024
_JUDGED_QUERY_COUNT = 64  # per segment


Method = Literal["spotlight", "hashattention"]
Function = HashMlp | HashAttentionMlps


@dataclass(frozen=True)
class Training:
    """Parameters of hash functions and their training.

    The defaults of loss and optimiser are those of Spotlight Attention (arXiv 2508.19740, section 4
    and table 7).

    Attributes:
        method: `spotlight`, or `hashattention` (arXiv 2412.14468): MLPs with two hidden layers,
            with separate ones for queries, which learn to distinguish a query's top from the other
            keys. Signs are smoothed by tanh. It needs `per_query_head`.
        hash_bits: Bits of a code, a multiple of 32.
        hidden_dim: Width of the hidden layers. None means head_dim.
        per_query_head: Whether there is one MLP per query head, each with its own code of a key,
            instead of one per KV head.
        raw_keys: Whether keys are hashed without subtracting the centre of their head.
        step_count: Most training steps of a layer.
        query_count: Number of queries of a step.
        top_sample_count: Number of keys drawn from each query's top in a step.
        other_sample_count: Number of keys drawn from all visible keys in a step.
        share: Size of a query's top as a share of the visible keys.
        alpha: Margin of the loss.
        beta: Factor on the difference of two scores.
        gamma: Steepness of the soft sign.
        learning_rate: Learning rate of AdamW, after the warm-up and before the cosine decay.
        weight_decay: Weight decay of AdamW.
        judge_every: Number of steps between evaluations on the held-out segments.
        patience: Number of evaluations without a better result after which training ends.
        seed: Seed of weights and draws.
    """

    method: Method = "spotlight"
    hash_bits: int = 128
    hidden_dim: int | None = None
    per_query_head: bool = False
    raw_keys: bool = False
    step_count: int = 1000
    query_count: int = 32
    top_sample_count: int = 32
    other_sample_count: int = 128
    share: float = 0.02
    alpha: float = 3.0
    beta: float = 1.0
    gamma: float = 64.0
    learning_rate: float = 1e-3
    weight_decay: float = 0.1
    judge_every: int = 100
    patience: int = 4
    seed: int = 0


@dataclass(frozen=True)
class LayerResult:
    """The result of training a layer.

    Attributes:
        layer: Index of the layer.
        iou: IoU of the trained codes on the held-out segments, per query head.
        lsh_iou: IoU of random hyperplanes with the same number of bits, per query head.
        step_count: Number of steps.
        best_step: Step after which the kept weights were best.
        seconds: Time taken.
    """

    layer: int
    iou: list[float]
    lsh_iou: list[float]
    step_count: int
    best_step: int
    seconds: float

    @property
    def gain(self) -> float:
        """Mean IoU of the trained codes, divided by that of LSH."""
        return sum(self.iou) / sum(self.lsh_iou)


class _Stretch:
    """A sample in the shapes of the hash functions: H heads, G query heads that share each of them.

    Attributes:
        keys: Keys that are ranked, [H, n, d].
        hashed: Inputs of the hash functions, [H, n, d].
        queries: [H, G, m, d].
        positions: int64 [m].
    """

    def __init__(self, sample: Sample, training: Training) -> None:
        group = sample.queries.shape[0] // sample.keys.shape[0]
        self.keys, shared = sample.keys, group
        if training.per_query_head:
            self.keys, shared = sample.keys.repeat_interleave(group, 0), 1
        self.hashed = self.keys
        if not training.raw_keys:
            self.hashed = self.keys - self.keys[:, :CENTRE_TOKEN_COUNT].mean(1, keepdim=True)
        self.queries = sample.queries.unflatten(0, (-1, shared))
        self.positions = sample.positions


class _Task:
    """Some queries of a segment, and their true scores.

    Attributes:
        hashed: Inputs of the hash functions for keys, [H, n, d].
        queries: [H, G, Q, d].
        visible: int64 [Q].
        scores: True scores, [H, G, Q, n].
    """

    def __init__(self, stretch: _Stretch, which: torch.Tensor) -> None:
        self.hashed = stretch.hashed
        self.queries = stretch.queries[:, :, which]
        self.visible = stretch.positions[which] + 1
        self.scores = true_scores(self.queries, stretch.keys, self.visible)

    def codes(self, function: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns values whose signs are the codes, of keys [H, n, b] and queries [H, G, Q, b]."""
        ask = function.of_queries if isinstance(function, HashAttentionMlps) else function
        of_queries = ask(self.queries.flatten(1, 2)).unflatten(1, self.queries.shape[1:3])
        return function(self.hashed), of_queries


class _Layer:
    """The segments of a layer for training, and tasks on the held-out ones."""

    def __init__(
        self, traces: Traces, layer: int, held_out: int, training: Training, device: torch.device
    ) -> None:
        self.training = training
        self.device = device
        stretches = [
            _Stretch(traces.sample(layer, i, device), training) for i in range(traces.sample_count)
        ]
        self.learned = stretches[:-held_out]
        self.judged = [self._later_half(stretch) for stretch in stretches[-held_out:]]

    def _later_half(self, stretch: _Stretch) -> _Task:
        """Returns a task with queries of the second half, which see enough keys."""
        seen = stretch.positions.numel()
        count = min(_JUDGED_QUERY_COUNT, seen - seen // 2)
        kind: Any = {"dtype": torch.float32, "device": "cpu"}
        which = torch.linspace(seen // 2, seen - 1, count, **kind)
        return _Task(stretch, which.long().to(self.device))

    def input_scale(self) -> torch.Tensor:
        """Root mean square of the inputs of the hash functions, [H]."""
        stretch = self.learned[0]
        keys = stretch.hashed.square().mean((1, 2))
        queries = stretch.queries.square().mean((1, 2, 3))
        return ((keys + queries) / 2).sqrt().clamp(min=1e-6)

    @torch.no_grad()
    def judge(self, function: nn.Module) -> torch.Tensor:
        """Intersection over union on the held-out segments, per query head [H_q]."""
        parts = []
        for task in self.judged:
            y_keys, y_queries = task.codes(function)
            found = intersection_over_union(
                y_keys > 0, y_queries > 0, task.scores, task.visible, self.training.share
            )
            parts.append(found.flatten(0, 1))
        return torch.cat(parts, dim=1).mean(1)

    def loss(self, function: Function, generator: torch.Generator) -> torch.Tensor:
        """Loss for a random segment and some of its queries, also random."""
        training = self.training
        index = torch.randint(len(self.learned), (), generator=generator, device=self.device)
        stretch = self.learned[int(index)]
        count = len(stretch.positions)
        size = (min(training.query_count, count),)
        which = torch.randint(count, size, generator=generator, device=self.device)
        task = _Task(stretch, which)
        y_keys, y_queries = task.codes(function)
        if training.method == "hashattention":
            return classification_loss(
                torch.einsum("hgqb,hnb->hgqn", y_queries.tanh(), y_keys.tanh()),
                task.scores,
                task.visible,
                share=training.share,
                top_sample_count=training.top_sample_count,
                other_sample_count=training.other_sample_count,
                generator=generator,
            )
        estimates = torch.einsum(
            "hgqb,hnb->hgqn", softsign(y_queries, training.gamma), softsign(y_keys, training.gamma)
        )
        return ranking_loss(
            estimates,
            task.scores,
            task.visible,
            share=training.share,
            top_sample_count=training.top_sample_count,
            other_sample_count=training.other_sample_count,
            alpha=training.alpha,
            beta=training.beta,
            generator=generator,
        )


def held_out_count(traces: Traces) -> int:
    """Number of segments for evaluation: the last tenth, at least one."""
    return max(1, traces.sample_count // 10)


def _random(traces: Traces, layer: int, training: Training, input_scale: torch.Tensor) -> Function:
    """Returns the MLPs before training."""
    generator = torch.Generator().manual_seed(training.seed + layer)
    sizes = (
        traces.query_head_count if training.per_query_head else traces.kv_head_count,
        traces.head_dim,
        training.hidden_dim or traces.head_dim,
        training.hash_bits,
        input_scale,
        generator,
    )
    if training.method == "hashattention":
        if not training.per_query_head:
            raise ValueError("method hashattention has one MLP per query head")
        return HashAttentionMlps(ThreeLayerMlp(*sizes), ThreeLayerMlp(*sizes))
    return HashMlp.random(*sizes)


def train_layer(
    traces: Traces,
    layer: int,
    training: Training,
    device: torch.device,
    on_step: Callable[[int, float, float], None] | None = None,
) -> tuple[Function, LayerResult]:
    """Trains the MLPs of all heads of one layer together.

    Args:
        traces: Traces with at least two samples. The last ones are held out.
        layer: Index of the layer.
        training: Parameters of the training.
        device: Device for the training.
        on_step: Called with the step, its loss and the best held-out IoU so far.

    Returns:
        The MLPs that were best on the held-out segments, and their results.
    """
    begin = time.perf_counter()
    data = _Layer(traces, layer, held_out_count(traces), training, device)
    generator = torch.Generator(device).manual_seed(training.seed + layer)
    function = _random(traces, layer, training, data.input_scale())
    optimizer = torch.optim.AdamW(
        function.parameters(),
        lr=training.learning_rate,
        betas=(0.9, 0.98),
        weight_decay=training.weight_decay,
    )
    warm_up = max(1, training.step_count // 100)

    def rate(step: int) -> float:
        if step < warm_up:
            return (step + 1) / warm_up
        return 0.5 * (1 + math.cos(math.pi * step / training.step_count))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    best = data.judge(function)
    kept = {name: value.clone() for name, value in function.state_dict().items()}
    best_step = step = 0
    for step in range(1, training.step_count + 1):
        loss = data.loss(function, generator)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(function.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % training.judge_every == 0 or step == training.step_count:
            judged = data.judge(function)
            if judged.mean() > best.mean():
                best, best_step = judged, step
                kept = {name: value.clone() for name, value in function.state_dict().items()}
            elif step - best_step >= training.patience * training.judge_every:
                break
        if on_step is not None and (step % 10 == 0 or step == training.step_count):
            on_step(step, loss.item(), best.mean().item())
    function.load_state_dict(kept)
    lsh = data.judge(Hyperplanes(traces.head_dim, training.hash_bits, training.seed, device))
    result = LayerResult(
        layer=layer,
        iou=best.tolist(),
        lsh_iou=lsh.tolist(),
        step_count=step,
        best_step=best_step,
        seconds=time.perf_counter() - begin,
    )
    return function, result
