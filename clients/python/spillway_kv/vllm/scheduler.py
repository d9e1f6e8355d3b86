"""vLLM's schedulers, extended to compute requests again whose rows were lost."""

from __future__ import annotations

import time
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import RequestStatus


class _Recovering:
    """The extension of both schedulers."""

    def update_from_output(
        self: Any, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Preempts requests that a step has lost, then does what vLLM does."""
        again: list[str] = []
        failed: list[str] = []
        connected = model_runner_output.kv_connector_output
        if connected is not None and connected.kv_connector_worker_meta is not None:
            report = connected.kv_connector_worker_meta.report
            again, failed = self.connector.take_report(report, len(self.running))
        for request_id in again + failed:
            request = self.requests[request_id]
            if request.status == RequestStatus.RUNNING:
                self.running.remove(request)
                # The output that the step sampled for this request is not valid.
                self._preempt_request(request, time.monotonic(), drop_stale_output=True)
            elif request.num_stale_output_tokens > 0:
                # vLLM has preempted it since, and would still deliver that output.
                request.drop_stale_output = True
        outputs = super().update_from_output(  # type: ignore[misc]
            scheduler_output, model_runner_output
        )
        for request in self.finish_requests(failed, RequestStatus.FINISHED_ERROR) if failed else ():
            made = outputs.setdefault(request.client_index, EngineCoreOutputs())
            made.outputs.append(
                EngineCoreOutput(
                    request_id=request.request_id,
                    new_token_ids=[],
                    finish_reason=request.get_finished_reason(),
                    events=request.take_events(),
                    trace_headers=request.trace_headers,
                )
            )
        return outputs


class SpillwayScheduler(_Recovering, Scheduler):
    """vLLM's scheduler that waits for each step."""


class SpillwayAsyncScheduler(_Recovering, AsyncScheduler):
    """vLLM's scheduler that schedules one step ahead.

    A request sits out the step after its prompt. Its first decode step begins only when the GPU has
    run the prompt. If vLLM launched that step ahead, the host would wait in it, with the first
    token in hand and the prompts of other requests not yet launched.
    """

    def _update_after_schedule(self: Any, scheduler_output: SchedulerOutput) -> None:
        super()._update_after_schedule(scheduler_output)
        for request_id, token_count in scheduler_output.num_scheduled_tokens.items():
            request = self.requests[request_id]
            # With drafts, vLLM has its other scheduler.
            decodes = token_count == 1 and request.num_output_tokens > 0
            if not decodes and not request.is_prefill_chunk:
                # vLLM counts a step before it compares, so this leaves out one step.
                request.next_decode_eligible_step = self.current_step + 2
