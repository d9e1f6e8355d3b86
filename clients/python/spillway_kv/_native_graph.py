"""Graphs of libspillway: CUDA graphs of a model's step whose attends are left open."""

from __future__ import annotations

from typing import Any

from spillway_kv import _library
from spillway_kv._handle import Handle, Handles


class NativeGraph:
    """A spillway_step_graph. For one thread at a time.

    Attributes:
        handle: The graph, for a decoder that runs it.

    Raises:
        SpillwayError: The library was built without CUDA.
        OSError: There is no libspillway.
    """

    def __init__(self) -> None:
        library = self._library = _library.library()
        made = library.spillway_step_graph_new()
        if not made:
            raise _library.last_error(library)
        self.handle = Handle(made, library.spillway_step_graph_free, "graph", Handles())

    def leave_open(self, layer: int, tensors: Any, stream: int) -> None:
        """Leaves a layer's attend open. tensors: a spillway_step_tensors, by reference."""
        self._call(self._library.spillway_step_graph_attend, layer, tensors, stream)

    def complete(self, captured: int) -> None:
        """Takes a copy of a captured graph, a cudaGraph_t."""
        self._call(self._library.spillway_step_graph_complete, captured)

    def run_piece(self, piece: int, stream: int) -> None:
        """Enqueues a piece between two open attends."""
        self._call(self._library.spillway_step_graph_run_piece, piece, stream)

    def _call(self, function: Any, *arguments: Any) -> None:
        if self.handle.call(function, *arguments):
            raise _library.last_error(self._library)


def available() -> bool:
    """Whether there is a libspillway with CUDA."""
    try:
        library = _library.library()
    except OSError:
        return False
    graph = library.spillway_step_graph_new()
    if not graph:
        return False
    library.spillway_step_graph_free(graph)
    return True
