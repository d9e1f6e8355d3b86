"""A model's step as a CUDA graph whose attends are left open."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from spillway_kv._native_graph import NativeGraph
from spillway_kv.batch import HeadShapes, check_tensors
from spillway_kv.layer_tensors import LayerTensors, current_stream
from spillway_kv.results import Model
from spillway_kv.tensors import OutDType


class StepGraph:
    """A decode step of a model, captured into a CUDA graph that leaves the model's attends open.

    A decoder runs the graph with its own attends in their places. One graph thus serves different
    sequences, and need not be captured again when they grow:

        graph = StepGraph(model)
        with graph.capture():
            logits = decode(tokens)  # calls graph.attend() for every layer
        while ...:
            decoder.next()
            decoder.run(graph)

    Steps may have fewer sequences than the graph. Then the rest of its outputs is not written.
    Sample outside of the graph: random numbers that are drawn in it would be the same in each run.
    Not thread-safe.

    Attributes:
        counts: Sequences and new tokens of each, as captured. (0, 0) before the first attend.
        attend_count: Attends left open.
        native: libspillway's graph.

    Args:
        model: Model of the sequences, or the shapes of its heads.

    Raises:
        SpillwayError: UNIMPLEMENTED without CUDA.
        OSError: There is no libspillway.
    """

    def __init__(self, model: Model | HeadShapes) -> None:
        self.native = NativeGraph()
        self.counts = 0, 0
        self.attend_count = 0
        self._model = model
        self._tensors = LayerTensors(self._checked)
        self._captured: torch.cuda.CUDAGraph | None = None
        self._device: torch.device | None = None

    def _checked(self, q: Any, k: Any, v: Any, out_dtype: OutDType | None) -> int:
        counts = (q.shape[0], q.shape[1]) if not self.attend_count and q.ndim == 4 else self.counts
        return check_tensors(self._model, counts, (q, k, v), out_dtype)

    @contextmanager
    def capture(self, pool: Any = None) -> Iterator[None]:
        """Captures what is put on torch's current stream, as `torch.cuda.graph` does.

        After an exception it can be captured again.

        Args:
            pool: Memory pool that it shares with other graphs, see `torch.cuda.graph`.

        Raises:
            SpillwayError: The attends do not follow one another, or the graph is complete already.
        """
        if self._captured is None:
            self.counts, self.attend_count = (0, 0), 0
        captured = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(captured, pool=pool):
            yield
        self.complete(captured)

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        out_dtype: OutDType | None = None,
        wants_lse: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Leaves a layer's attend open in the capture.

        Args:
            layer: The layer.
            q: Queries [B, T, H_q, d].
            k: Keys of the new tokens [B, H_kv, T, d].
            v: Values, with the same shape.
            out: Written when the graph runs: contiguous, aligned to 16 bytes. None: a new tensor.
            out_dtype: Element type of the output. None means that of q.
            wants_lse: Whether the log-sum-exp is computed.

        Returns:
            Output [B, T, H_q, d], and log-sum-exp [B, T, H_q] in float32 or None.

        Raises:
            SpillwayError: The current stream is not being captured, or the layer is open already.
            ValueError: A shape does not fit.
        """
        out, lse, kept = self._tensors.fill(q, k, v, out, out_dtype, wants_lse=wants_lse)
        self.native.leave_open(layer, self._tensors.at, current_stream(q.device))
        self._device = q.device
        del kept
        self.counts = q.shape[0], q.shape[1]
        self.attend_count += 1
        return out, lse

    def complete(self, captured: torch.cuda.CUDAGraph) -> None:
        """Takes the graph after its capture, if the caller captures it without `capture`.

        Args:
            captured: The graph, made with `keep_graph=True`. It is kept, because it owns the memory
                of its tensors.

        Raises:
            SpillwayError: The attends do not follow one another, or were left open in another
                capture.
            ValueError: No attend was left open.
        """
        self.complete_raw(captured.raw_cuda_graph())
        self._captured = captured

    def complete_raw(self, captured: int) -> None:
        """The same for a cudaGraph_t. The caller keeps the memory of its tensors."""
        if not self.attend_count:
            raise ValueError("no attend was left open in the capture")
        self.native.complete(captured)

    def run_piece(self, piece: int) -> None:
        """Runs the part of the graph before its attend with this index, on the current stream.

        For steps that no decoder serves. The part after the last attend has the index
        `attend_count`.
        """
        self.native.run_piece(piece, current_stream(self._device))

    def close(self) -> None:
        """Frees the graph."""
        self.native.handle.close()
        self._captured = None
