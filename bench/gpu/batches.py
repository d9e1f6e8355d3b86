"""Serves requests by the worker of the vLLM plugin, without vLLM, as its scheduler would.

The model has random weights and the shape of Qwen2.5-Coder-1.5B by default. All requests arrive at
once. Prompts are computed in chunks, together with the decode steps of requests whose prompts are
done. The host begins a step before it has the tokens of the step before. `dense` is torch's
attention over K/V in GPU memory, in the same steps. K/V are random, so decode steps mean something
only where they attend to all rows: give --gpu-resident room for them. With --vllm, prompts are
attended by the FlashAttention of vLLM, which must be installed, and with --prompt-memory their K/V
stay in GPU memory until their last chunk.

Prints a JSON line for each engine: seconds to the first token of the first and of the last
request, milliseconds of a decode step (median), milliseconds of the host's thread for a step of
each kind (median), and, if it is profiled, how long the GPU idled, in which gaps, and which kernels
ran how long.

    python bench/gpu/batches.py [--tokens 16384] [--requests 8] [--profile]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from spillway_kv.prefill_kernels import attention_with_lse, joins
from spillway_kv.vllm.bench import medians
from spillway_kv.vllm.sequences import Shapes
from spillway_kv.vllm.settings import Settings
from spillway_kv.vllm.step_plan import PlannedRequest, StepPlan
from spillway_kv.vllm.worker import Worker
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu
from torch.profiler import ProfilerActivity, profile

# Shorter gaps between kernels are not counted as idle time.
GAP_US = 20.0
SHOWN_GAPS = 12
SHOWN_KERNELS = 16
SHOWN_NAME = 60


class Attends(Protocol):
    """What both engines have of the plugin's worker."""

    def begin(self, plan: StepPlan, begins: dict[int, int]) -> None: ...

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor
    ) -> None: ...

    def end(self) -> Any: ...


class Dense:
    """torch's attention over K/V in GPU memory."""

    def __init__(self, shapes: Shapes, token_count_max: int, device: torch.device) -> None:
        self._shapes, self._room, self._device = shapes, token_count_max, device
        self._kv: dict[tuple[int, int], torch.Tensor] = {}
        self._plan, self._begins = StepPlan(), dict[int, int]()

    def begin(self, plan: StepPlan, begins: dict[int, int]) -> None:
        self._plan, self._begins = plan, begins
        for key in plan.dropped:
            for layer in range(self._shapes.layer_count):
                self._kv.pop((key, layer), None)

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor
    ) -> None:
        for request in self._plan.requests:
            first = self._begins[request.key]
            new = slice(first, first + request.token_count)
            length = request.start + request.token_count
            shape = (2, self._shapes.kv_head_count, self._room, self._shapes.head_dim)
            if (request.key, layer) not in self._kv:
                self._kv[request.key, layer] = torch.empty(shape, dtype=k.dtype, device=k.device)
            held = self._kv[request.key, layer]
            held[0, :, request.start : length] = k[new].transpose(0, 1)
            held[1, :, request.start : length] = v[new].transpose(0, 1)
            one = request.token_count == 1
            keys, values = held[:, :, :length]
            if not one and joins(q[new], keys):
                out[new], _ = attention_with_lse(
                    q[new], keys, values, causal=True, scale=self._shapes.scale
                )
                continue
            made = scaled_dot_product_attention(
                q[new].transpose(0, 1)[None],
                keys[None],
                values[None],
                attn_mask=None if one else causal_lower_right(request.token_count, length),
                enable_gqa=True,
            )
            out[new] = made[0].transpose(0, 1)

    def end(self) -> None:
        pass


class Model:
    """Layers like those of Llama, without positions."""

    def __init__(self, shapes: Shapes, options: argparse.Namespace, device: torch.device) -> None:
        self._shapes, self._device = shapes, device
        draw = torch.Generator(device).manual_seed(1)
        heads, kv_heads, d = shapes.query_head_count, shapes.kv_head_count, shapes.head_dim
        self._widths = [heads * d, kv_heads * d, kv_heads * d]
        hidden, inner = options.hidden_size, options.intermediate_size

        def drawn(rows: int, columns: int) -> torch.Tensor:
            made = torch.randn(rows, columns, generator=draw, device=device, dtype=shapes.dtype)
            return made * rows**-0.5

        self._layers = [
            (
                drawn(hidden, sum(self._widths)),
                drawn(heads * d, hidden),
                drawn(hidden, 2 * inner),
                drawn(inner, hidden),
            )
            for _ in range(shapes.layer_count)
        ]
        self._inputs = drawn(options.chunk, hidden) * hidden**0.5
        self._head = drawn(hidden, options.vocabulary)

    def step(self, engine: Attends, token_count: int, ends: list[int]) -> torch.Tensor:
        """Runs a step. Returns the tokens after positions `ends`, on the way to host memory."""
        x = self._inputs[:token_count]
        for layer, (of_qkv, of_out, of_gate, of_inner) in enumerate(self._layers):
            parts = (rms_norm(x, x.shape[1:]) @ of_qkv).split(self._widths, 1)
            q, k, v = (part.unflatten(1, (-1, self._shapes.head_dim)) for part in parts)
            out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
            engine.attend(layer, q, k, v, out)
            x = x + out.flatten(1) @ of_out
            gate, up = (rms_norm(x, x.shape[1:]) @ of_gate).chunk(2, 1)
            x = x + (silu(gate) * up) @ of_inner
        on_gpu = self._device.type == "cuda"
        places = torch.tensor(ends, device="cpu")
        places = places.pin_memory() if on_gpu else places
        made = (x[places.to(self._device, non_blocking=True)] @ self._head).argmax(1)
        tokens = torch.empty(made.shape, dtype=made.dtype, device="cpu", pin_memory=on_gpu)
        return tokens.copy_(made, non_blocking=True)


@dataclass
class Request:
    """A request, its tokens so far, and when its first new token came."""

    key: int
    at: int = 0
    made: int = 0
    first: float | None = None


@dataclass
class Steps:
    """What a run has shown: the end of each step, and whether it had prompts."""

    start: float
    ends: list[tuple[float, bool]] = field(default_factory=list)
    # Of each kind of step: milliseconds of the host to begin it, and to enqueue it.
    host: dict[str, list[tuple[float, float]]] = field(default_factory=dict)

    def host_ms(self) -> dict[str, tuple[float, float]]:
        """Returns the medians of the host's times."""
        return {
            kind: (
                round(statistics.median(begin for begin, _ in times), 2),
                round(statistics.median(rest for _, rest in times), 2),
            )
            for kind, times in self.host.items()
        }


class Run:
    """Serves requests with an engine."""

    def __init__(self, engine: Attends, model: Model, options: argparse.Namespace) -> None:
        self._engine, self._model, self._options = engine, model, options
        self._on_gpu = options.device != "cpu"
        self._keys = 0
        self._decoding: list[int] = []
        self.steps = Steps(0.0)

    def _planned(self, requests: list[Request]) -> list[PlannedRequest]:
        """The requests of the next step: prompts take what the chunk has room for."""
        room, planned = self._options.chunk, []
        for request in requests:
            decodes = request.at >= self._options.tokens
            count = 1 if decodes else min(room, self._options.tokens - request.at)
            if request.made == self._options.new_tokens or not 0 < count <= room:
                continue
            room -= count
            planned.append(
                PlannedRequest(
                    request.key,
                    0,
                    request.at,
                    count,
                    decodes,
                    request.key,
                    prompt_token_count=self._options.tokens,
                )
            )
        return planned

    def serve(self) -> dict[str, Any]:
        """Serves all requests once."""
        requests = {}
        for _ in range(self._options.requests):
            self._keys += 1
            requests[self._keys] = Request(self._keys)
        steps = Steps(time.perf_counter())
        # Waits for the step before, and takes its tokens.
        before: Any = None
        while planned := self._planned(list(requests.values())):
            after = self._begin(planned, requests, steps)
            if before is not None:
                before()
            before = after
        before()
        self._engine.begin(StepPlan(dropped=list(requests)), {})
        self._engine.end()
        firsts = sorted(request.first or 0.0 for request in requests.values())
        decoding = [end for end, prompts in steps.ends if not prompts]
        gaps = [b - a for a, b in zip(decoding, decoding[1:], strict=False)]
        self.steps = steps
        return {
            "first_token_first_s": round(firsts[0], 4),
            "first_token_last_s": round(firsts[-1], 4),
            "decode_step_ms": round(1e3 * statistics.median(gaps), 3) if gaps else None,
        }

    def _begin(
        self, planned: list[PlannedRequest], requests: dict[int, Request], steps: Steps
    ) -> Any:
        begins, count = {}, 0
        for each in planned:
            begins[each.key] = count
            count += each.token_count
        at = time.perf_counter()
        self._engine.begin(StepPlan(planned), begins)
        begun = time.perf_counter()
        ends = [begins[each.key] + each.token_count - 1 for each in planned]
        tokens = self._model.step(self._engine, count, ends)
        self._engine.end()
        ended = time.perf_counter()
        decoding = [each.key for each in planned if each.decodes]
        kind = "prompt" if not decoding else "decode" if len(decoding) == len(planned) else "mixed"
        if decoding != self._decoding:
            kind += ", other requests"
        self._decoding = decoding
        steps.host.setdefault(kind, []).append((1e3 * (begun - at), 1e3 * (ended - begun)))
        done = torch.cuda.Event() if self._on_gpu else None
        if done is not None:
            done.record()
        made = []
        for each in planned:
            request = requests[each.key]
            request.at += each.token_count
            if request.at >= self._options.tokens:
                request.made += 1
                made.append(request)

        def finish() -> None:
            if done is not None:
                done.synchronize()
            tokens.tolist()
            now = time.perf_counter() - steps.start
            steps.ends.append((now, any(not each.decodes for each in planned)))
            for request in made:
                request.first = now if request.first is None else request.first

        return finish


def idle(trace: dict[str, Any]) -> dict[str, Any]:
    """How long the GPU ran no kernel while steps were made, and which kernels ran."""
    events = trace["traceEvents"]
    of_gpu = [e for e in events if e.get("cat") in ("kernel", "gpu_memset")]
    kernels = sorted((e["ts"], e["ts"] + e["dur"]) for e in of_gpu)
    notes = [e for e in events if e.get("cat") == "cuda_runtime"]
    run: Counter[str] = Counter()
    for e in of_gpu:
        run[e["name"][:SHOWN_NAME]] += e["dur"] / 1e3
    end, gaps = kernels[0][0], []
    for begin, until in kernels:
        if begin - end > GAP_US:
            gaps.append((end, begin))
        end = max(end, until)
    longest = sorted(gaps, key=lambda gap: gap[0] - gap[1])[:SHOWN_GAPS]
    shown = []
    for begin, until in sorted(longest):
        over: Counter[str] = Counter()
        for note in notes:
            shared = min(until, note["ts"] + note["dur"]) - max(begin, note["ts"])
            if shared > 0:
                over[note["name"]] += round(shared / 1e3, 2)
        shown.append(
            {
                "at_ms": round((begin - kernels[0][0]) / 1e3, 2),
                "ms": round((until - begin) / 1e3, 2),
                "host": dict(over.most_common(4)),
            }
        )
    return {
        "span_ms": round((end - kernels[0][0]) / 1e3, 1),
        "idle_ms": round(sum(b - a for a, b in gaps) / 1e3, 1),
        "longest_gaps": shown,
        "kernels_ms": {name: round(ms, 1) for name, ms in run.most_common(SHOWN_KERNELS)},
    }


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=16384, help="of each prompt")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=24)
    parser.add_argument("--chunk", type=int, default=8192, help="most tokens of a step")
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--hidden-size", type=int, default=1536)
    parser.add_argument("--intermediate-size", type=int, default=8960)
    parser.add_argument("--vocabulary", type=int, default=151936)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--gpu-memory", default="16GiB", help="of the engine")
    parser.add_argument("--gpu-resident", default="8GiB", help="the part for copies of rows")
    parser.add_argument("--prompt-memory", type=int, default=0, help="MiB, with --vllm")
    parser.add_argument("--vllm", action="store_true", help="FlashAttention of vLLM for prompts")
    parser.add_argument("--ready-gib", type=int, default=8, help="host memory pinned at the start")
    parser.add_argument("--engines", default="dense,spillway")
    parser.add_argument("--repetitions", type=int, default=3, help="after one that is not counted")
    parser.add_argument("--profile", action="store_true", help="a further run, profiled by torch")
    return parser.parse_args()


def main() -> None:
    """Runs the program."""
    options = parsed()
    device = torch.device(options.device)
    shapes = Shapes(
        options.layers,
        options.heads,
        options.kv_heads,
        options.head_dim,
        torch.bfloat16,
        options.head_dim**-0.5,
    )
    length_max = options.tokens + options.new_tokens
    if options.vllm:
        # Imports vLLM.
        from spillway_kv.vllm import flash  # noqa: PLC0415

        group = shapes.query_head_count // shapes.kv_head_count
        flash.use_for(shapes.dtype, shapes.head_dim, group, device)
    model = Model(shapes, options, device)
    for name in options.engines.split(","):
        engine: Any
        if name == "dense":
            engine = Dense(shapes, length_max, device)
        else:
            of_gpu = device.type == "cuda"
            settings = Settings(
                device=options.device,
                gpu_memory=options.gpu_memory if of_gpu else "",
                gpu_resident=options.gpu_resident if of_gpu else "",
                ready_bytes=options.ready_gib << 30,
                prompt_bytes=options.prompt_memory << 20,
                kept_sequence_count=0,
            )
            engine = Worker(settings, shapes, device, None, length_max)
        run = Run(engine, model, options)
        runs = [run.serve() for _ in range(options.repetitions + 1)][1:]
        record: dict[str, Any] = {
            "engine": name,
            "tokens": options.tokens,
            "requests": options.requests,
            **medians(runs),
            "host_ms": run.steps.host_ms(),
            "runs": runs,
        }
        if options.profile:
            # Not the host's: that would take longer than what it measures.
            with profile(activities=[ProfilerActivity.CUDA]) as found:
                run.serve()
            with tempfile.NamedTemporaryFile(suffix=".json") as file:
                found.export_chrome_trace(file.name)
                record["profile"] = idle(json.loads(Path(file.name).read_text()))
        print(json.dumps(record), flush=True)
        if name != "dense":
            engine.close()


if __name__ == "__main__":
    main()
