"""A whole decode step of an 8B model, of all 32 layers, on one GPU.

Llama 3.1 8B's shape with random weights in bf16: projections, rotary embedding, norms, MLPs and the
logits are computed as in the model, and the step is one CUDA graph. Random weights would attend to
random tokens. So attends take the queries and the new token's K and V of bench/trace_data.py, over
rows of the same data; their outputs go on through the model. Ways:

- `spillway bf16`, `spillway int8`: rows in host memory.
- `dense bf16`: torch's attention (the fastest of cuDNN and flash) with K/V in GPU memory, and the
  new token's K and V written there.

A record (JSON) for each count of sequences: milliseconds of a step (median), tokens a second, GPU
memory in use, host memory of rows, and errors against exact attention of all layers of one step. A
count that does not fit has `skipped`, and says why.

    python bench/trace_data.py --tokens 65536 --lengths 65536 --output FOLDER
    python bench/gpu/whole_step.py FOLDER --way "spillway int8" --sequences 1 4 8 16
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dense
import numpy as np
import spillway_kv
import torch
from capacity import ROW_TYPES, error_fields
from many import DIM, HEADS, KV_HEADS, Rows, Sequences, engine, moved, ran_on
from model_like import Shape, Trace, relative_errors
from timing import AHEAD_CYCLES, timed
from torch.nn.functional import linear, rms_norm, silu
from whole_model import LAYERS

HIDDEN, MLP, VOCABULARY = 4096, 14336, 128256
WAYS = ("spillway bf16", "spillway int8", "dense bf16")
# Attends of a layer, from q [B, 1, H_q, d], k and v [B, H_kv, 1, d] to [B, 1, H_q, d].
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Model:
    """Random weights of the shape of Llama 3.1 8B."""

    def __init__(self, device: torch.device, layers: int, width: int) -> None:
        """width: divides the hidden sizes, for a trial without a GPU."""
        hidden, mlp = HIDDEN // width, MLP // width
        self.hidden = hidden

        def made(*shape: int) -> torch.Tensor:
            weights = torch.empty(shape, dtype=torch.bfloat16, device=device)
            return weights.normal_(std=shape[-1] ** -0.5)

        projected = (HEADS + 2 * KV_HEADS) * DIM
        self.embedding = made(VOCABULARY // width, hidden)
        self.layers = [
            (
                made(projected, hidden),
                made(hidden, HEADS * DIM),
                made(2 * mlp, hidden),
                made(hidden, mlp),
            )
            for _ in range(layers)
        ]
        self.head = made(VOCABULARY // width, hidden)
        self.angles = torch.rand(DIM // 2, device=device)

    def _rotated(self, x: torch.Tensor) -> torch.Tensor:
        """Rotary embedding of [B, heads, d]."""
        a, b = x.float().chunk(2, dim=-1)
        cos, sin = self.angles.cos(), self.angles.sin()
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)

    def step(self, tokens: torch.Tensor, attend: Callable[[int], torch.Tensor]) -> torch.Tensor:
        """The next tokens [B]. attend: outputs [B, 1, H_q, d] of a layer's attends."""
        x = self.embedding[tokens]
        for layer, (qkv, out, up, down) in enumerate(self.layers):
            projected = linear(rms_norm(x, (self.hidden,)), qkv).view(len(x), -1, DIM)
            self._rotated(projected[:, : HEADS + KV_HEADS])
            x = x + linear(attend(layer).reshape(len(x), -1), out)
            gate, wide = linear(rms_norm(x, (self.hidden,)), up).chunk(2, dim=-1)
            x = x + linear(silu(gate) * wide, down)
        return linear(rms_norm(x, (self.hidden,)), self.head).argmax(dim=-1)


class Step:
    """Decode steps of a way, each in one CUDA graph; without a GPU, step by step."""

    def __init__(self, model: Model, rows: Rows, count: int) -> None:
        self._model, self._rows, self._count = model, rows, count
        self._tokens = torch.zeros(count, dtype=torch.int64, device=rows.device)
        self._held = [
            tuple(x.contiguous() for x in rows.inputs_of_step(layer, count, 0))
            for layer in range(len(rows.layers))
        ]
        self._graph: torch.cuda.CUDAGraph | None = None
        self.outs: list[torch.Tensor] = []

    def _run(self, attend: Attend) -> None:
        self.outs = []

        def of_layer(layer: int) -> torch.Tensor:
            out = attend(layer, *self._held[layer])
            self.outs.append(out)
            return out

        self._tokens.copy_(self._model.step(self._tokens, of_layer))

    def _warm(self, layer: int) -> torch.Tensor:
        """Outputs in place of a layer's attends, for the run before the first capture."""
        return torch.zeros_like(self._held[layer][0])

    def _capture(self, attend: Attend) -> None:
        if self._graph is None:
            # Libraries allocate and choose kernels when they are first called.
            self._model.step(self._tokens, self._warm)
            torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._run(attend)

    def _announce(self, at: int) -> tuple[Attend, bool]:
        """Begins step `at`: its attends, and whether a captured graph does not serve it."""
        raise NotImplementedError

    def step(self, at: int) -> float:
        """Runs step `at`; microseconds."""
        attend, changed = self._announce(at)
        for layer, held in enumerate(self._held):
            new = self._rows.inputs_of_step(layer, self._count, at)
            for to, x in zip(held, new, strict=True):
                to.copy_(x)
        if self._rows.device.type == "cpu":
            return timed(lambda: self._run(attend), "cpu")
        if changed or self._graph is None:
            self._capture(attend)
        assert self._graph is not None
        torch.cuda.synchronize()
        return timed(self._graph.replay, ahead_cycles=AHEAD_CYCLES)

    def moved_rows(self) -> float:
        """Rows of the last step that crossed the link, a layer."""
        return 0

    def close(self) -> None:
        """Lets go of what the steps hold."""


class OfEngine(Step):
    """Attends of a decoder."""

    def __init__(self, model: Model, sequences: Sequences, count: int) -> None:
        super().__init__(model, sequences.rows, count)
        self._engine = sequences
        self._sequences = sequences.all[:count]
        self._decoder: Any = None
        self._results: list[list[spillway_kv.AttendResult]] = []
        if self._rows.device.type == "cuda":
            self._decoder = sequences.client.open_decoder(
                self._sequences, token_count_max=sequences.rows.trace.tokens
            )

    def _announce(self, at: int) -> tuple[Attend, bool]:
        if self._decoder is None:
            return self._as_job, False
        changed = bool(self._decoder.next())
        return lambda layer, q, k, v: self._decoder.attend(layer, q, k, v)[0], changed

    def _as_job(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        if layer == 0:
            self._step = self._engine.client.begin_step(self._sequences).__enter__()
            self._results = []
        out = self._step.attend(layer, q, k, v)[0]
        self._results.append(self._step.results())
        if layer == len(self._held) - 1:
            self._step.__exit__(None, None, None)
        return out.to(q.dtype)

    def moved_rows(self) -> float:
        if self._decoder is None:
            return moved(self._results)
        return moved([self._decoder.results(layer) for layer in range(len(self._held))])

    def close(self) -> None:
        if self._decoder is not None:
            self._decoder.close()


class Dense(Step):
    """Attention over all rows, in the device's memory."""

    def __init__(self, model: Model, rows: Rows, count: int, attends: dense.Attends) -> None:
        super().__init__(model, rows, count)
        self._attends = attends
        self._kv = [
            tuple(x[None].repeat(count, 1, 1, 1) for x in of_layer) for of_layer in rows.layers
        ]

    def _announce(self, at: int) -> tuple[Attend, bool]:
        return self._attend, False

    def _warm(self, layer: int) -> torch.Tensor:
        return self._attend(layer, *self._held[layer])

    def _attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        # Written where the first decoded token has its rows, and all tokens are attended to.
        at = self._rows.prompt
        for to, x in zip(self._kv[layer], (k, v), strict=True):
            to[:, :, at : at + 1] = x
        (out,) = self._attends([(q.transpose(1, 2), *self._kv[layer])])
        return out.transpose(1, 2)


def measured(step: Step, right: Callable[[int, int], torch.Tensor], count: int) -> dict[str, Any]:
    """Fields of a record. right: exact outputs of a layer and step."""
    errors: list[float] = []
    step.step(0)
    for layer, out in enumerate(step.outs):
        of_layer = right(layer, 0)
        errors += relative_errors(out[:, 0].to(of_layer.device), of_layer)
    of_errors = error_fields(errors)
    us = [step.step(at) for at in range(1, count + 1)]
    median = statistics.median(us)
    return {
        "step_ms": round(median / 1000, 2),
        "p90_ms": round(float(np.percentile(us, 90)) / 1000, 2),
        "moved_rows": round(step.moved_rows()),
        **of_errors,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="of bench/trace_data.py")
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--way", choices=WAYS, default=WAYS[0])
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--steps", type=int, default=24, help="timed ones")
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--width", type=int, default=1, help="divides the weights, for a trial")
    parser.add_argument("--memory-gib", type=int, default=112, help="of the engine, in the host")
    parser.add_argument("--commit", default="", help="for the records")
    parser.add_argument("--device", default="cuda:0")
    options = parser.parse_args()
    device = torch.device(options.device)
    on_gpu = device.type == "cuda"
    trace = Trace(options.folder, options.tokens, Shape(HEADS, KV_HEADS, DIM, options.layers))
    rows = Rows(trace, device, options.steps + 2)
    model = Model(device, options.layers, options.width)
    told = {
        "way": options.way,
        "tokens": options.tokens,
        "layers": options.layers,
        **ran_on(device, options.commit),
    }

    def report(count: int, **fields: Any) -> None:
        print(json.dumps({**told, "sequences": count, **fields}), flush=True)

    def run(count: int, step: Step, tokens: int, host_bytes: int) -> None:
        try:
            found = measured(
                step,
                lambda layer, at: rows.right(layer, count, tokens + at, at),
                options.steps,
            )
            used = 0
            if on_gpu:
                free, total = torch.cuda.mem_get_info()
                # Without the rows from which this program takes its inputs.
                used = total - free - sum(x.nbytes for of_layer in rows.layers for x in of_layer)
            report(
                count,
                **found,
                tokens_per_s=round(1000 * count / found["step_ms"], 1),
                gpu_used_bytes=used,
                host_bytes=host_bytes,
            )
        finally:
            step.close()

    if options.way == "dense bf16":
        layers = [
            (rows.inputs_of_step(0, 1, 0)[0].transpose(1, 2), *(x[None] for x in rows.layers[0]))
        ]
        right = [rows.right(0, 1, trace.tokens, 0)]
        served, _ = dense.fastest(dense.bf16_candidates(device), layers, right)
        attends = dense.bf16_candidates(device)[served.name]
        for count in options.sequences:
            try:
                step = Dense(model, rows, count, attends)
            except torch.OutOfMemoryError as error:
                report(count, skipped=f"out of GPU memory: {str(error).splitlines()[0]}")
                break
            run(count, step, trace.tokens, 0)
            del step
        return
    with engine(options.device, options.memory_gib) as client:
        sequences = Sequences(client, rows, ROW_TYPES[options.way.removeprefix("spillway ")])
        for count in options.sequences:
            try:
                sequences.grow(count)
            except spillway_kv.SpillwayError as error:
                report(count, skipped=str(error))
                break
            run(count, OfEngine(model, sequences, count), rows.prompt + 1, sequences.row_bytes())
            sequences.back(count)
        sequences.delete()


if __name__ == "__main__":
    sys.exit(main())
