"""Which requests the plugin's scheduler puts into a step, without an engine."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from hardware import ENGINE
from spillway_kv.vllm.scheduler import SpillwayAsyncScheduler
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

_BLOCK = 16


class Steps:
    """A scheduler that is one step ahead of the tokens."""

    def __init__(self, scheduler: SpillwayAsyncScheduler) -> None:
        self._scheduler = scheduler
        # Steps whose tokens are not taken, and the requests that get one.
        self._before: list[tuple[SchedulerOutput, set[str]]] = []

    def add(self, name: str, prompt: int) -> None:
        """A request with a prompt of so many tokens."""
        parameters = SamplingParams(max_tokens=8, ignore_eos=True)
        self._scheduler.add_request(Request(name, [1] * prompt, parameters, None))

    def preempt(self, name: str) -> None:
        """Takes a request's place. It begins again with all its tokens."""
        request = self._scheduler.requests[name]
        self._scheduler.running.remove(request)
        self._scheduler._preempt_request(request, time.monotonic(), drop_stale_output=True)

    def next(self) -> dict[str, int]:
        """Schedules a step, then takes the tokens of the one before. Returns tokens to compute."""
        made = self._scheduler.schedule()
        requests = self._scheduler.requests
        sampled = {
            name for name in made.num_scheduled_tokens if not requests[name].is_prefill_chunk
        }
        self._before.append((made, sampled))
        if len(self._before) == 2:
            self._take(*self._before.pop(0))
        return dict(made.num_scheduled_tokens)

    def _take(self, step: SchedulerOutput, sampled: set[str]) -> None:
        names = list(step.num_scheduled_tokens)
        places = {name: place for place, name in enumerate(names)}
        tokens = [[7] if name in sampled else [] for name in names]
        self._scheduler.update_from_output(step, ModelRunnerOutput(names, places, tokens))


@pytest.fixture
def steps(model_folder) -> Steps:
    """A scheduler for steps of up to 64 tokens."""
    arguments: dict[str, Any] = {"max_num_batched_tokens": 64, "enable_prefix_caching": False}
    config = EngineArgs(
        model=str(model_folder("llama")),
        max_model_len=1024,
        block_size=_BLOCK,
        **arguments,
        **ENGINE,
    ).create_engine_config()
    config.cache_config.num_gpu_blocks = 256
    spec = FullAttentionSpec(block_size=_BLOCK, num_kv_heads=2, head_size=32, dtype=torch.float32)
    groups = [KVCacheGroupSpec(["layer"], spec)]
    return Steps(
        SpillwayAsyncScheduler(
            config, KVCacheConfig(256, [], groups), StructuredOutputManager(config), _BLOCK
        )
    )


def test_a_request_sits_out_the_step_after_its_prompt(steps: Steps) -> None:
    """It then decodes in each step, though its tokens are known a step later."""
    steps.add("a", 100)
    assert steps.next() == {"a": 64}
    assert steps.next() == {"a": 36}
    assert steps.next() == {}
    assert [steps.next() for _ in range(3)] == [{"a": 1}] * 3


def test_others_go_on_meanwhile(steps: Steps) -> None:
    steps.add("a", 40)
    steps.add("b", 60)
    assert steps.next() == {"a": 40, "b": 24}
    assert steps.next() == {"b": 36}
    assert steps.next() == {"a": 1}
    assert steps.next() == {"a": 1, "b": 1}
    assert steps.next() == {"a": 1, "b": 1}


def test_a_prompt_of_one_token_is_a_prompt(steps: Steps) -> None:
    steps.add("a", 1)
    assert [steps.next() for _ in range(4)] == [{"a": 1}, {}, {"a": 1}, {"a": 1}]


def test_a_preempted_request_sits_out_the_step_after_it_is_back(steps: Steps) -> None:
    steps.add("a", 40)
    assert [steps.next() for _ in range(4)] == [{"a": 40}, {}, {"a": 1}, {"a": 1}]
    # The first two of its tokens are known. That of the last step is dropped.
    steps.preempt("a")
    assert [steps.next() for _ in range(4)] == [{"a": 42}, {}, {"a": 1}, {"a": 1}]
