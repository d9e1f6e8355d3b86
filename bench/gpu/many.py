"""Sequences of one engine that decode together, over the rows of bench/trace_data.py.

Every sequence has all rows in memory of its own. The data's queries (four a length) take turns:
in a step, neighbouring sequences have different ones, and a sequence has another one in the next
step.
"""

from __future__ import annotations

import datetime
import statistics
from typing import Any, Protocol

import spillway_kv
import torch
from dense import Layers
from model_like import Trace, exact, relative_errors
from timing import AHEAD_CYCLES, timed

HEADS, KV_HEADS, DIM = 32, 8, 128


def engine(device: str, memory_gib: int) -> spillway_kv.Client:
    """An engine whose rows are in host memory alone. device: as `device.name`."""
    settings: dict[str, str | int] = {
        "memory.limit": f"{memory_gib}GiB",
        "device.name": device,
        "device.gpu_resident_limit": "0",
        "models.sampling_seed": 0,
    }
    return spillway_kv.connect("embedded:", settings=settings)


def ran_on(device: torch.device, commit: str) -> dict[str, str]:
    """Fields of every record: where and when it was measured."""
    on_gpu = device.type == "cuda"
    return {
        "gpu": torch.cuda.get_device_name() if on_gpu else "none: the CPU device",
        "torch": torch.__version__,
        "commit": commit,
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
    }


class Rows:
    """A length's rows on the device, and its queries.

    Attributes:
        layers: k and v [H_kv, N, d] of each layer.
        prompt: Tokens that sequences begin with; the others are decoded.
        cycle: Number of queries that take turns.
    """

    def __init__(self, trace: Trace, device: torch.device, decoded: int) -> None:
        if not 0 < decoded < trace.tokens:
            raise ValueError(f"{decoded} tokens to decode, of {trace.tokens}")
        self.trace, self.device = trace, device
        self.prompt = trace.tokens - decoded
        layers = range(trace.shape.layers)
        rows = (trace.layer(i)[1:] for i in layers)
        self.layers = [(k.to(device), v.to(device)) for k, v in rows]
        self.cycle = trace.queries.shape[1] // trace.shape.group
        # Of each layer, [queries, H_q, d].
        self.queries = [
            torch.stack([trace.query(i, at) for at in range(self.cycle)]).to(device) for i in layers
        ]

    def turns(self, count: int, step: int) -> torch.Tensor:
        """Which query each of `count` sequences has in a step, [count]."""
        return (torch.arange(count, device=self.device) + step) % self.cycle

    def inputs(
        self, layer: int, turns: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """A step's q [B, 1, H_q, d], and k and v [B, H_kv, 1, d] of the new tokens.

        turns: which query each sequence has, [B]. positions: of its new token, [B].
        """
        k, v = (x[:, positions].transpose(0, 1)[:, :, None] for x in self.layers[layer])
        return self.queries[layer][turns][:, None], k, v

    def inputs_of_step(
        self, layer: int, count: int, step: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The same for sequences that have all made `step` steps."""
        turns = self.turns(count, step)
        return self.inputs(layer, turns, torch.full_like(turns, self.prompt + step))

    def right(self, layer: int, count: int, tokens: int, step: int) -> torch.Tensor:
        """Exact outputs [B, H_q, d] of a step's queries over the first `tokens` tokens."""
        k, v = self.layers[layer]
        of_queries = exact(self.queries[layer], k, v, tokens)
        return of_queries[self.turns(count, step)]


class Steps(Protocol):
    """Decode steps of some sequences."""

    def step(self, at: int) -> tuple[float, list[torch.Tensor]]:
        """Runs step `at`: microseconds of a layer, and each layer's outputs [B, 1, H_q, d]."""

    def moved_rows(self) -> float:
        """Rows of the last step that crossed the link, of all sequences; mean of the layers."""

    def close(self) -> None:
        """Lets go of the sequences."""


def moved(results: list[list[spillway_kv.AttendResult]]) -> float:
    """Mean of the layers. results: of each layer, one a sequence."""
    return statistics.mean(sum(each.moved_row_count for each in layer) for layer in results)


class OnStream:
    """All layers of a step in one CUDA graph."""

    def __init__(
        self, client: spillway_kv.Client, sequences: list[spillway_kv.Sequence], rows: Rows
    ) -> None:
        self._rows, self._count = rows, len(sequences)
        self._layers = range(len(rows.layers))
        self._decoder = client.open_decoder(sequences, token_count_max=rows.trace.tokens)
        self._held = [
            tuple(x.contiguous() for x in rows.inputs_of_step(layer, self._count, 0))
            for layer in self._layers
        ]
        self._graph = torch.cuda.CUDAGraph()
        self._outs: list[torch.Tensor] = []

    def step(self, at: int) -> tuple[float, list[torch.Tensor]]:
        if self._decoder.next():
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._outs = [
                    self._decoder.attend(layer, *self._held[layer])[0] for layer in self._layers
                ]
        for layer in self._layers:
            new = self._rows.inputs_of_step(layer, self._count, at)
            for to, x in zip(self._held[layer], new, strict=True):
                to.copy_(x)
        torch.cuda.synchronize()
        return timed(self._graph.replay, ahead_cycles=AHEAD_CYCLES, cold=True) / len(
            self._layers
        ), self._outs

    def moved_rows(self) -> float:
        return moved([self._decoder.results(layer) for layer in self._layers])

    def close(self) -> None:
        self._decoder.close()


class AsJobs:
    """`Client.begin_step` with tensors in host memory: for the CPU device."""

    def __init__(
        self, client: spillway_kv.Client, sequences: list[spillway_kv.Sequence], rows: Rows
    ) -> None:
        self._client, self._sequences, self._rows = client, sequences, rows
        self._results: list[list[spillway_kv.AttendResult]] = []

    def step(self, at: int) -> tuple[float, list[torch.Tensor]]:
        outs, self._results = [], []
        with self._client.begin_step(self._sequences) as step:
            for layer in range(len(self._rows.layers)):
                new = self._rows.inputs_of_step(layer, len(self._sequences), at)
                outs.append(step.attend(layer, *(x.contiguous().cpu() for x in new))[0])
                self._results.append(step.results())
        return statistics.mean(layer[0].device_time_us for layer in self._results), outs

    def moved_rows(self) -> float:
        return moved(self._results)

    def close(self) -> None:
        pass


class Sequences:
    """Sequences of a model of their own, each with the rows of the prompt."""

    def __init__(self, client: spillway_kv.Client, rows: Rows, row_type: Any) -> None:
        self.client, self.rows = client, rows
        self.model = client.create_model(
            layer_count=len(rows.layers),
            query_head_count=HEADS,
            kv_head_count=KV_HEADS,
            head_dim=DIM,
            dtype="bfloat16",
            hash_weights=spillway_kv.RotationHash(),
            row_type=row_type,
        )
        self.all: list[spillway_kv.Sequence] = []
        # What the device holds without sequences.
        self.empty_bytes = self.device_bytes()

    def grow(self, count: int) -> None:
        """Makes more sequences, until there are `count`."""
        new = [self.client.create_sequence(self.model) for _ in range(count - len(self.all))]
        self.all += new
        for layer, of_layer in enumerate(self.rows.layers if new else ()):
            k, v = (x[:, : self.rows.prompt].contiguous() for x in of_layer)
            for sequence in new:
                sequence.append(layer, 0, k, v)

    def device_bytes(self) -> int:
        """GPU memory of codes, resident samples and workspaces; codes in the host's on the CPU."""
        (device,) = self.client.get_server_info().devices
        if device.memory_limit_bytes:
            return device.memory_used_bytes
        return self.client.statistics().memory.index_bytes

    def row_bytes(self) -> int:
        """Host memory of the rows of all sequences."""
        return sum(each.row_bytes for each in self.client.statistics(self.model).sequences)

    def steps(self, count: int) -> Steps:
        """Decode steps of the first `count` sequences."""
        kind = OnStream if self.rows.device.type == "cuda" else AsJobs
        return kind(self.client, self.all[:count], self.rows)

    def back(self, count: int) -> None:
        """Removes what was decoded."""
        for sequence in self.all[:count]:
            sequence.truncate(self.rows.prompt)

    def errors(self, outs: list[torch.Tensor], step: int) -> list[float]:
        """Relative errors of a step's outputs [B, 1, H_q, d] of each layer, by head."""
        tokens = self.rows.prompt + step + 1
        found: list[float] = []
        for layer, out in enumerate(outs):
            right = self.rows.right(layer, len(out), tokens, step)
            found += relative_errors(out[:, 0].to(right.device), right)
        return found

    def delete(self) -> None:
        """Deletes all of it."""
        for sequence in self.all:
            sequence.delete()
        self.client.delete_model(self.model)


class DenseRows:
    """All rows of sequences in the device's memory, each its own.

    Args:
        rows: The rows.
        most: Number of sequences.
    """

    def __init__(self, rows: Rows, most: int) -> None:
        self._rows = rows
        self._held = [tuple(x[None].repeat(most, 1, 1, 1) for x in of_kv) for of_kv in rows.layers]

    def batch(self, count: int) -> tuple[Layers, list[torch.Tensor]]:
        """The layers' tensors of the first sequences, and exact outputs [B, H_q, d] of each."""
        layers, right = [], []
        for layer, (k, v) in enumerate(self._held):
            q = self._rows.inputs_of_step(layer, count, 0)[0].transpose(1, 2)
            layers.append((q, k[:count], v[:count]))
            right.append(self._rows.right(layer, count, self._rows.trace.tokens, 0))
        return layers, right
