"""Graphs of libspillway, as far as they need no GPU."""

from __future__ import annotations

import pytest
import spillway_kv
from daemon_process import binary
from spillway_kv._native_graph import NativeGraph, available
from spillway_kv.lab.serving import prefer_library


def test_a_graph_without_a_capture() -> None:
    """It has no pieces. A library without CUDA has no graphs, and says so."""
    prefer_library(binary())
    if not available():
        with pytest.raises(spillway_kv.SpillwayError, match="built without CUDA"):
            NativeGraph()
        return
    graph = NativeGraph()
    with pytest.raises(spillway_kv.FailedPrecondition, match="the graph is not complete"):
        graph.run_piece(0, 0)
    graph.handle.close()
    with pytest.raises(ValueError, match="the graph is closed"):
        graph.run_piece(0, 0)
