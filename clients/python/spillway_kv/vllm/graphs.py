"""Full CUDA graphs: vLLM captures the model's decode steps, and leaves Spillway's attends open."""

from __future__ import annotations

import functools
from typing import Any

import torch
from vllm.forward_context import is_forward_context_available
from vllm.platforms import current_platform
from vllm.utils.torch_utils import weak_ref_tensor

from spillway_kv import _native_graph
from spillway_kv.vllm import layers
from spillway_kv.vllm.model_graph import ModelGraph

_MARK = "_spillway_captures"


def names_requests(config: Any) -> bool:
    """Whether vLLM tells the connector which requests are in the batch before the model runs.

    Its V2 model runner does, on CUDA.

    Args:
        config: The complete `VllmConfig`.
    """
    on_cuda: bool = current_platform.is_cuda()
    return on_cuda and bool(config.use_v2_model_runner)


def supported(config: Any) -> bool:
    """Whether steps can be captured: with libspillway with CUDA, where vLLM names the requests.

    Args:
        config: The complete `VllmConfig`.
    """
    return names_requests(config) and _native_graph.available()


def install() -> None:
    """Makes vLLM's V2 model runner capture graphs that leave attends open, once in a process."""
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager  # noqa: PLC0415

    if getattr(CudaGraphManager, _MARK, False):
        return
    setattr(CudaGraphManager, _MARK, True)
    capture = CudaGraphManager.capture
    of_torch = torch.cuda.CUDAGraph

    class OpenGraph(of_torch):  # type: ignore[misc, valid-type]
        """A graph that is captured outside of a forward pass of the model, and thus around it."""

        def __new__(cls, keep_graph: bool = False) -> Any:
            if is_forward_context_available():
                # A piece of the model. It has no attends.
                return of_torch(keep_graph)
            return super().__new__(cls, keep_graph=True)

        def __init__(self, keep_graph: bool = False) -> None:
            super().__init__(keep_graph=True)
            self._graph: ModelGraph | None = None
            # Whether there was no engine yet, so that attends are captured as zeros.
            self._of_profile = False

        def capture_begin(self, *args: Any, **kwargs: Any) -> None:
            super().capture_begin(*args, **kwargs)
            attending = layers.attending()
            self._of_profile = attending is None
            if attending is not None:
                layers.set_capturing(attending.new_graph(weak_ref_tensor))

        def capture_end(self) -> None:
            graph = layers.capturing()
            layers.set_capturing(None)
            super().capture_end()
            if graph is None or not graph.layers:
                self.instantiate()
                return
            graph.step.complete_raw(self.raw_cuda_graph())
            self._graph = graph

        def replay(self) -> None:
            attending = layers.attending()
            if self._graph is not None:
                assert attending is not None
                attending.run(self._graph)
            elif self._of_profile and attending is not None:
                raise RuntimeError("vLLM runs a graph that it captured before the engine was there")
            else:
                super().replay()

    @functools.wraps(capture)
    def capture_open(self: Any, *args: Any, **kwargs: Any) -> None:
        torch.cuda.CUDAGraph = OpenGraph  # type: ignore[misc]
        try:
            capture(self, *args, **kwargs)
        finally:
            layers.set_capturing(None)
            torch.cuda.CUDAGraph = of_torch  # type: ignore[misc]

    CudaGraphManager.capture = capture_open
