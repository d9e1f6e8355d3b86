"""The KV connector: carries the scheduler's plans to the workers, and their reports back."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.core.sched.output import SchedulerOutput

from spillway_kv.quality import policy_of
from spillway_kv.vllm import flash, graphs, layers, memory
from spillway_kv.vllm.backend import SpillwayBackend, SpillwayImpl
from spillway_kv.vllm.metrics import SpillwayMetrics, SpillwayStats
from spillway_kv.vllm.requests import Requests, Scheduled
from spillway_kv.vllm.sequences import Shapes
from spillway_kv.vllm.settings import Settings, settings_from
from spillway_kv.vllm.step_plan import Loss, StepPlan, StepReport
from spillway_kv.vllm.worker import Worker

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

logger = init_logger("vllm.spillway")


@dataclass
class PlanMetadata(KVConnectorMetadata):
    """A plan on its way to the workers."""

    plan: StepPlan


class ReportMetadata(KVConnectorWorkerMetadata):
    """A report on its way to the scheduler.

    The worker makes it before the GPU has run the step. vLLM reads or pickles it with the tokens
    that the step has sampled, and thus later, so that there is nothing to wait for.

    Args:
        report: What is known so far.
        failures: Returns what the GPU adds. Called once, when the report is read.
    """

    def __init__(
        self, report: StepReport, failures: Callable[[], dict[int, Loss]] | None = None
    ) -> None:
        self._report = report
        self._failures = failures

    @property
    def report(self) -> StepReport:
        """The report. Waits until the GPU has run the step."""
        failures, self._failures = self._failures, None
        if failures is not None:
            self._report.losses = failures() | self._report.losses
        return self._report

    def __reduce__(self) -> tuple[Any, ...]:
        return ReportMetadata, (self.report,)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Adds the report of another rank."""
        assert isinstance(other, ReportMetadata)
        self.report.merge(other.report)
        return self


class SpillwayConnector(KVConnectorBase_V1, SupportsHMA):
    """The connector. vLLM creates one for its scheduler and one for each worker."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._settings = settings_from(os.environ)
        if self._settings.seed < 0:
            drawn = vllm_config.kv_transfer_config.kv_connector_extra_config["seed"]
            self._settings = replace(self._settings, seed=drawn)
        self._report = StepReport()
        self._failures: Callable[[], dict[int, Loss]] | None = None
        self._pool_bytes = 0
        self._in_step = False
        self._group, names = _our_group(kv_cache_config)
        if role == KVConnectorRole.SCHEDULER:
            self._block_size = kv_cache_config.kv_cache_groups[self._group].kv_cache_spec.block_size
            alone = len(names) == _layer_count(kv_cache_config)
            self._requests = Requests(self._settings.kept_sequence_count, reuses=alone)
            if not alone:
                logger.info(
                    "Spillway reuses no prefixes, and preempted requests are computed again: "
                    "vLLM keeps K/V or states of %d other layers, which it cannot restore",
                    _layer_count(kv_cache_config) - len(names),
                )
            self._running: set[str] = set()
            # To list a request's blocks takes the longer, the more tokens it has.
            self._needs_blocks = not graphs.names_requests(vllm_config)

    @property
    def requires_kv_delivery(self) -> bool:
        """False: no K/V are passed to other instances."""
        return False

    # Workers.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Starts the engine, or connects to the daemon. Called when the layers are known."""
        # Layers of several groups share memory. A layer with a state may have several tensors.
        tensors = (each for cache in kv_caches.values() for each in _listed(cache))
        storages = (tensor.untyped_storage() for tensor in tensors)
        self._pool_bytes = sum({each.data_ptr(): each.nbytes() for each in storages}.values())
        self._open()

    def _open(self) -> layers.Attending:
        found = layers.attending()
        if found is None:
            found = _open_attending(self._vllm_config, self._settings, self._pool_bytes)
            layers.set_attending(found)
        return found

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Stores the step's plan. vLLM calls this before anything else of the step."""
        assert isinstance(kv_connector_metadata, PlanMetadata)
        self._in_step = True
        self._open().plan(kv_connector_metadata.plan)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Begins the step, if vLLM says which requests are in the batch (V2 model runner).

        The host is here while the GPU still runs the step before.
        """
        if "request_ids" in kwargs:
            self._open().begin(kwargs["request_ids"])

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Does nothing: no K/V are loaded into vLLM's pool."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Does nothing: the layers themselves append K/V."""

    def wait_for_save(self) -> None:
        """Ends the step on the host. The GPU may still run it."""
        self._end()

    def _end(self) -> None:
        """Ends the step, once."""
        if self._in_step:
            self._in_step = False
            found = self._open()
            self._report, self._failures = found.end(), found.worker.failures()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Returns what the step has lost, or None.

        With drafts, vLLM calls this before `wait_for_save`. The model has run.
        """
        self._end()
        report, self._report = self._report, StepReport()
        failures, self._failures = self._failures, None
        if not (report.losses or report.gone or failures):
            return None
        return ReportMetadata(report, failures)

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Returns the counts since the last call."""
        if self.role == KVConnectorRole.SCHEDULER:
            count, self._requests.reused_token_count = self._requests.reused_token_count, 0
            return SpillwayStats.of_reuse(count) if count else None
        found = layers.attending()
        return None if found is None else SpillwayStats.taken_from(found.worker)

    def shutdown(self) -> None:
        """Ends the engine with its worker."""
        found = layers.attending()
        if self.role == KVConnectorRole.WORKER and found is not None:
            layers.set_attending(None)
            found.worker.close()

    # The scheduler.

    def on_new_request(self, request: Request) -> None:
        """Adds a request."""
        self._requests.add(
            request.request_id,
            _tokens(request, request.prompt_token_ids),
            request.num_prompt_tokens,
            _salt(request),
        )

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Returns for how many tokens rows exist already. None: vLLM shall ask again later."""
        assert num_computed_tokens == 0
        others = bool(self._running - {request.request_id})
        return self._requests.matched(request.request_id, request.num_tokens, others), False

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Does nothing: the plan contains what was matched."""

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Plans a step."""
        # Makes vLLM call `start_load_kv` before the model runs, and not after it.
        scheduler_output.has_sync_kv_loads = True
        state = scheduler_output.kv_connector_block_state
        assert state is not None
        computed = {r.req_id: r.num_computed_tokens for r in scheduler_output.scheduled_new_reqs}
        cached = scheduler_output.scheduled_cached_reqs
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        scheduled = []
        for name, count in scheduler_output.num_scheduled_tokens.items():
            block = None
            if self._needs_blocks:
                newest = (computed[name] + count - 1) // self._block_size
                block = state.resolve_block_ids(name)[self._group][newest]
            drafts = len(scheduler_output.scheduled_spec_decode_tokens.get(name, ()))
            scheduled.append(Scheduled(name, computed[name], count, block, drafts))
        preempted = set(scheduler_output.preempted_req_ids or ())
        self._running -= preempted | scheduler_output.finished_req_ids
        self._running.update(computed)
        return PlanMetadata(self._requests.plan(scheduled, preempted))

    def take_report(self, report: StepReport, running_count: int) -> tuple[list[str], list[str]]:
        """Returns the requests to compute again, and those that fail.

        Args:
            report: Merged report of all ranks for one step.
            running_count: Number of requests that are being computed.
        """
        for loss in report.losses.values():
            logger.warning("a request's rows are lost: %s", loss.reason)
        again, failed = self._requests.take_report(report, running_count)
        for name in failed:
            logger.error("request %s ends with an error", name)
        self._running -= {*again, *failed}
        return again, failed

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Keeps the sequence for later requests with the same prefix."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Keeps the sequence for later requests with the same prefix."""
        self._running.discard(request.request_id)
        self._requests.finish(request.request_id, _tokens(request, request.all_token_ids))
        return False, None

    def reset_cache(self) -> bool | None:
        """Drops the sequences of finished requests."""
        self._requests.reset()
        return True

    # Metrics.

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> KVConnectorStats | None:
        """Wraps sums that another process has sent."""
        return SpillwayStats(data=data) if data is not None else SpillwayStats()

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> SpillwayMetrics:
        """Returns the counters for vLLM's /metrics."""
        return SpillwayMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


def _tokens(request: Request, tokens: Sequence[int] | None) -> Sequence[int] | None:
    """Returns the tokens, if they alone determine the K/V; otherwise None."""
    if request.mm_features or request.prompt_embeds is not None or tokens is None:
        return None
    return list(tokens)


def _listed(cache: torch.Tensor | Iterable[torch.Tensor]) -> Iterable[torch.Tensor]:
    return [cache] if isinstance(cache, torch.Tensor) else cache


def _salt(request: Request) -> str:
    adapter = request.lora_request
    return f"{'' if adapter is None else adapter.lora_name}\n{request.cache_salt or ''}"


def _layer_count(kv_cache_config: KVCacheConfig) -> int:
    return sum(len(group.layer_names) for group in kv_cache_config.kv_cache_groups)


def _our_group(kv_cache_config: KVCacheConfig) -> tuple[int, list[str]]:
    """Returns the index of the pool's group with Spillway's first layer, and all its layers."""
    names = {
        name: index
        for index, group in enumerate(kv_cache_config.kv_cache_groups)
        if getattr(group.kv_cache_spec, "sliding_window", None) == memory.WINDOW_TOKEN_COUNT
        for name in group.layer_names
    }
    if not names:
        raise ValueError("Spillway cannot serve this: no layer has full attention")
    return names[_in_order(names)[0]], list(names)


def _in_order(names: Iterable[str]) -> list[str]:
    """Returns layers in the model's order.

    Raises:
        ValueError: A name does not tell the number of its layer. Where layers share the weights of
            their attention, vLLM numbers the uses of each weight, one weight after the other.
    """
    for name in names:
        parts = name.split(".")
        if sum(part.isdecimal() for part in parts) != 1 or parts[-1].isdecimal():
            raise ValueError(
                f"Spillway cannot serve this: the attention {name} is not named by its layer, so "
                "the order of the layers is not known"
            )
    return sorted(names, key=extract_layer_index)


def _open_attending(
    vllm_config: VllmConfig, settings: Settings, pool_bytes: int
) -> layers.Attending:
    """Starts this rank's engine for the layers that use the backend."""
    found = get_layers_from_vllm_config(vllm_config, Attention)
    ours = {n: layer for n, layer in found.items() if layer.attn_backend is SpillwayBackend}
    names = _in_order(ours)
    unequal = [n for n in names if ours[n].head_size_v != ours[n].head_size]
    if unequal:
        layer = ours[unequal[0]]
        raise ValueError(
            f"Spillway cannot serve this: values of {unequal[0]} have {layer.head_size_v} "
            f"elements, and keys {layer.head_size}"
        )
    shapes = {
        Shapes(
            layer_count=len(names),
            query_head_count=layer.num_heads,
            kv_head_count=layer.num_kv_heads,
            head_dim=layer.head_size,
            dtype=layer.kv_cache_torch_dtype,
            scale=layer.impl.scale,
        )
        for layer in ours.values()
    }
    if len(shapes) != 1:
        raise ValueError(
            "Spillway cannot serve this: its layers with full attention have several "
            f"shapes: {sorted(map(str, shapes))}"
        )
    (shape,) = shapes
    device = torch.device(vllm_config.device_config.device_type)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
        if len(ours) < len(found):
            flash.note_full_attention()
    group = shape.query_head_count // shape.kv_head_count
    serves = flash.use_for(shape.dtype, shape.head_dim, group, device)
    settings = memory.with_limits(
        settings, vllm_config, shape, device, pool_bytes, prompts_stay=serves
    )
    length_max = vllm_config.model_config.max_model_len
    read_sinks = partial(_sinks_of, [ours[name].impl for name in names])
    worker = Worker(settings, shape, device, policy_of(settings.quality), length_max, read_sinks())
    logger.info("Spillway serves %d of %d attention layers: %s", len(names), len(found), shape)
    if settings.gpu_memory:
        logger.info(
            "Spillway's GPU memory: %s bytes, of which copies of K/V rows may take %s",
            settings.gpu_memory,
            settings.gpu_resident or "0",
        )
    return layers.Attending(worker, names, read_sinks)


def _sinks_of(impls: list[SpillwayImpl]) -> list[torch.Tensor | None]:
    """Returns the learned sinks of layers, each [H_q] float32, or None. Empty: no layer has any."""
    sinks = [impl.sinks for impl in impls]
    if all(each is None for each in sinks):
        return []
    return [None if x is None else x.detach().to(torch.float32, copy=True) for x in sinks]
