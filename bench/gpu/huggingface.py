"""Compares decoding of a Llama with transformers' caches and with SpillwayCache.

Four layers of an 8B shape with random weights, bf16, batch 1, over the same synthetic K/V:
transformers' offloaded cache, its cache in GPU memory (`resident`), and SpillwayCache with
a daemon that this program starts, and with an engine in this process (`embedded`). Writes
one JSON object per line. Times are medians of whole steps, from a token's id to the next
token's id on the host.

K/V are Gaussian. With `flat` keys, which are as large as the model's own, attention has no
heavy hitters, and the error bound of the default policy needs nearly every row. The output of
a policy with a fixed budget would be noise, so these policies are not timed with flat keys.
`peaked` keys are five times as large, and few of them have most of the softmax weight. The
attention and the logits of the first step are compared with those of the resident cache, and
the differences are in the records. The program ends if the policy `all` differs by more than
rounding. The resident cache runs first, so all its steps run once before they are timed.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

os.environ["HF_HUB_OFFLINE"] = "1"

import spillway_kv
import torch
import transformers
from spillway_kv import DecodeStep, Policy, TopK
from spillway_kv.lab import serving
from spillway_kv.transformers import SpillwayCache
from spillway_kv.transformers import layer as layer_module
from spillway_kv.transformers import rows as rows_module
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

ROOT = Path(__file__).resolve().parents[2]
SHAPES: dict[str, dict[str, int]] = {
    "8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "num_hidden_layers": 4,
    },
    # For trying out the program.
    "tiny": {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_hidden_layers": 2,
    },
}
VOCABULARY = 1024
# Standard deviation of the queries, keys and values that the model computes itself: the weights of
# the 8B shape have a standard deviation of 0.02.
DEVIATION = 1.28
SPREADS = {"flat": 1, "peaked": 5}
ALL = Policy(selector="all")
# By name: the policy, and whether its budget is fixed.
POLICIES: dict[str, tuple[Policy, bool]] = {
    "heavy 2 %, no tail": (Policy(heavy=TopK(fraction=0.02), tail="none"), True),
    "at most 2,500 rows": (Policy(row_count_max=2500), True),
    "default": (Policy(), False),
}
# Relative differences that rounding to bf16 explains: for attention in the first layer, whose input
# is the same, and for the logits after all layers.
ATTENTION_TOLERANCE = 0.01
LOGITS_TOLERANCE = 0.05
# Steps of each cache and policy before the timed ones.
WARM_UP_COUNT = 10


class Step(NamedTuple):
    """The results of one step.

    Attributes:
        logits: [vocabulary], float32.
        attention: For each layer, the output of attention [H_q * d], float32.
    """

    logits: torch.Tensor
    attention: list[torch.Tensor]


def report(**fields: object) -> None:
    print(json.dumps(fields), flush=True)


def say(text: str) -> None:
    print(f"{time.perf_counter() - START:7.1f} s  {text}", file=sys.stderr, flush=True)


START = time.perf_counter()


def difference(ours: torch.Tensor, wanted: torch.Tensor) -> float:
    """The relative difference, in norm."""
    return float((ours - wanted).norm() / wanted.norm())


class Bench:
    """The model, and the K/V that fill each cache."""

    def __init__(self, shape: str, tokens: int, device: torch.device) -> None:
        self.tokens = tokens
        self.device = device
        config = LlamaConfig(
            **SHAPES[shape],
            vocab_size=VOCABULARY,
            max_position_embeddings=tokens + 4096,
            rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
            initializer_range=DEVIATION / SHAPES[shape]["hidden_size"] ** 0.5,
            attn_implementation="sdpa",
        )
        torch.manual_seed(1)
        with device:
            model: Any = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
        self.model = model.eval()
        self.layer_count: int = config.num_hidden_layers
        self.row_bytes = (
            2 * 2 * config.num_key_value_heads * config.head_dim * tokens * self.layer_count
        )
        generator = torch.Generator().manual_seed(2)
        self.ids = torch.randint(VOCABULARY, (4096,), generator=generator).to(device)

    def rows(self, layer: int, spread: float) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V [1, H_kv, tokens - 1, d] of one layer, the same in each call.

        They have the standard deviation of the model's own projections; keys have `spread` times
        as much.
        """
        config = self.model.config
        generator = torch.Generator(self.device).manual_seed(3 + layer)
        shape = (2, 1, config.num_key_value_heads, self.tokens - 1, config.head_dim)
        made = torch.randn(shape, generator=generator, device=self.device, dtype=torch.bfloat16)
        made *= DEVIATION
        return made[0] * spread, made[1]

    def fill(self, cache: Any, spread: float, put: Callable[..., object]) -> float:
        """Runs the model on the first token, and puts the K/V of the others; returns seconds."""
        begin = time.perf_counter()
        self.forward(cache, 0)
        for layer in range(self.layer_count):
            put(layer, *self.rows(layer, spread))
        self.synchronize()
        return time.perf_counter() - begin

    @torch.inference_mode()
    def forward(self, cache: Any, index: int) -> torch.Tensor:
        """Reads one token and returns the logits [vocabulary] after it."""
        ids = self.ids[None, index : index + 1]
        logits: torch.Tensor = self.model(input_ids=ids, past_key_values=cache).logits[0, -1]
        return logits

    def first_step(self, cache: Any) -> Step:
        """Decodes the first token after the context. Returns logits and attention outputs."""
        seen: list[torch.Tensor] = []
        with ExitStack() as hooks:
            for layer in self.model.model.layers:
                hook = layer.self_attn.o_proj.register_forward_pre_hook(
                    lambda _, inputs: seen.append(inputs[0][0, -1].float())
                )
                hooks.callback(hook.remove)
            logits = self.forward(cache, 1)
        return Step(logits.float(), seen)

    def times(self, cache: Any, count: int, warm_up: int = WARM_UP_COUNT) -> list[float]:
        """Milliseconds of each of `count` steps, after `warm_up` other steps."""
        made = []
        for index in range(warm_up + count):
            self.synchronize()
            begin = time.perf_counter()
            self.forward(cache, 2 + index).argmax().item()
            made.append(1000 * (time.perf_counter() - begin))
        return made[warm_up:]

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def compared(self, step: Step, wanted: Step) -> dict[str, Any]:
        """How far a step's results are from those of the resident cache."""
        attention = [
            difference(*pair) for pair in zip(step.attention, wanted.attention, strict=True)
        ]
        logits = difference(step.logits, wanted.logits)
        return {
            "logits_difference_max": float((step.logits - wanted.logits).abs().max()),
            "logits_relative_difference": logits,
            "attention_relative_difference": attention,
        }

    def checked(self, step: Step, wanted: Step) -> dict[str, Any]:
        """The same as `compared`, and whether rounding explains the differences."""
        compared = self.compared(step, wanted)
        near = (
            compared["attention_relative_difference"][0] <= ATTENTION_TOLERANCE
            and compared["logits_relative_difference"] <= LOGITS_TOLERANCE
        )
        return {**compared, "equal_but_for_rounding": near}

    def timed(self, times: list[float]) -> dict[str, Any]:
        """The record's fields for these times."""
        step = statistics.median(times)
        return {
            "step_ms": step,
            "layer_ms": step / self.layer_count,
            "tokens_per_s": 1000 / step,
            "step_ms_min": min(times),
            "step_ms_max": max(times),
            "steps": len(times),
        }


def transformers_cache(bench: Bench, keys: str, offloading: bool) -> Any:
    """transformers' own cache, filled with the context."""
    bench.model.set_attn_implementation("sdpa")
    cache = DynamicCache(config=bench.model.config, offloading=offloading)
    bench.fill(cache, SPREADS[keys], lambda layer, k, v: cache.update(k, v, layer))
    return cache


def rehearse(bench: Bench, keys: str, steps: int) -> None:
    """Runs the steps of the resident cache once, so that its timed run is not the first."""
    say("rehearsing")
    cache = transformers_cache(bench, keys, False)
    bench.first_step(cache)
    bench.times(cache, steps)


def measure_transformers(
    bench: Bench, keys: str, offloading: bool, steps: int, wanted: Step | None
) -> Step:
    """Measures transformers' own cache; returns its first step."""
    name = "transformers, offloaded" if offloading else "transformers, resident"
    say(f"{name}, {keys} keys")
    cache = transformers_cache(bench, keys, offloading)
    first = bench.first_step(cache)
    checked = {} if wanted is None else bench.checked(first, wanted)
    fields = bench.timed(bench.times(cache, steps))
    report(name=name, keys=keys, tokens=bench.tokens, **fields, **checked)
    return first


def measure_link(bench: Bench) -> None:
    """Copies all rows from pinned memory, one copy per layer.

    This is the least time that a cache in host memory needs if it reads all rows.
    """
    layer_bytes = bench.row_bytes // bench.layer_count
    host = torch.empty(layer_bytes, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(layer_bytes, dtype=torch.uint8, device=bench.device)
    times = []
    for _ in range(5):
        bench.synchronize()
        begin = time.perf_counter()
        for _ in range(bench.layer_count):
            device.copy_(host, non_blocking=True)
        bench.synchronize()
        times.append(1000 * (time.perf_counter() - begin))
    report(
        name="all rows over the link",
        tokens=bench.tokens,
        **bench.timed(times),
        gb_per_s=bench.row_bytes / statistics.median(times) / 1e6,
    )


@contextmanager
def running_daemon(device: str, memory_bytes: int) -> Iterator[str]:
    """Starts spillwayd on a new socket and yields the target."""
    binary = serving.find_binary(ROOT)
    flags = ("--device", device, "--memory-limit", str(memory_bytes))
    with tempfile.TemporaryDirectory(prefix="spillway-bench-") as folder:
        log = Path(folder) / "spillwayd.log"
        with serving.running_daemon(binary, log, *flags, timeout=60) as target:
            yield target


@contextmanager
def stopwatches(bench: Bench) -> Iterator[dict[str, float]]:
    """Sums the wall time of the parts of an attend, in seconds.

    Waits for the GPU before each attend, so that the time of work that it still had to do counts as
    the model's.
    """
    sums: dict[str, float] = {}

    def watch(name: str, function: Callable[..., Any], first: Callable[[], None]) -> Any:
        sums[name] = 0.0

        @functools.wraps(function)
        def watched(*args: Any, **kwargs: Any) -> Any:
            first()
            begin = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                sums[name] += time.perf_counter() - begin

        return watched

    places = {
        "attend": (layer_module.SpillwayLayer, "attend"),
        "q, k, v to the host": (rows_module, "to_host"),
        "the step's attend": (DecodeStep, "attend"),
        "output to the device": (layer_module, "to_device"),
    }
    with ExitStack() as stack:
        for name, (owner, attribute) in places.items():
            first = bench.synchronize if name == "attend" else lambda: None
            watched = watch(name, getattr(owner, attribute), first)
            stack.enter_context(patch.object(owner, attribute, watched))
        yield sums


def parts_of_a_step(bench: Bench, cache: SpillwayCache, steps: int) -> dict[str, float]:
    """The parts of a step's time: means per layer, in microseconds."""
    cache.statistics.reset()
    with stopwatches(bench) as sums:
        times = bench.times(cache, steps, warm_up=0)
    per_layer = 1e6 / (steps * bench.layer_count)
    device = sum(layer.device_time_us for layer in cache.statistics.layers)
    named = {name: seconds * per_layer for name, seconds in sums.items() if seconds > 0}
    attend = named.pop("attend")
    return {
        "step / layers": 1000 * statistics.mean(times) / bench.layer_count,
        "attend": attend,
        **named,
        # Attends on the model's stream have no device time. The parts above exist only with a
        # daemon.
        **({"the daemon's device": device / (steps * bench.layer_count)} if device else {}),
        "other Python within attend": attend - sum(named.values()),
        "the model": 1000 * statistics.mean(times) / bench.layer_count - attend,
    }


def measure_policy(
    bench: Bench, cache: SpillwayCache, way: str, name: str, keys: str, steps: int, wanted: Step
) -> None:
    """Measures SpillwayCache with one policy."""
    say(f"spillway, {way}, {keys} keys: {name}")
    policy, fixed = POLICIES[name]
    cache.request_policy = policy
    compared = bench.compared(bench.first_step(cache), wanted)
    bench.times(cache, WARM_UP_COUNT, warm_up=0)
    cache.statistics.reset()
    times = bench.times(cache, steps, warm_up=0)
    layers = cache.statistics.layers
    report(
        name=f"spillway, {way}",
        policy=name,
        budget="fixed budget, no error bound" if fixed else "by the error bound",
        keys=keys,
        tokens=bench.tokens,
        **bench.timed(times),
        rows_fraction=cache.statistics.rows_touched_fraction,
        # Without a tail, the error is not known.
        certified_error_mean=cache.statistics.certified_error_mean or None,
        device_us_per_layer=[layer.device_time_us / steps for layer in layers],
        **compared,
    )
    report(
        name=f"spillway, {way}, where the time goes",
        policy=name,
        keys=keys,
        tokens=bench.tokens,
        us_per_layer=parts_of_a_step(bench, cache, steps),
    )
    cache.crop(bench.tokens - cache.get_seq_length())


@contextmanager
def filled(
    bench: Bench, way: str, client: spillway_kv.Client, keys: str
) -> Iterator[tuple[SpillwayCache, float]]:
    """Yields a SpillwayCache that holds the context, and the seconds that filling it took."""
    say(f"spillway, {way}, {keys} keys: appending")
    bench.model.set_attn_implementation("spillway")
    with SpillwayCache(bench.model.config, client) as cache:

        def put(layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
            cache.sequences[0].append(layer, 1, k[0], v[0], timeout=300)
            cache.layers[layer].length = bench.tokens

        yield cache, bench.fill(cache, SPREADS[keys], put)


def measure_spillway(
    bench: Bench, way: str, client: spillway_kv.Client, keys: str, steps: int, wanted: Step
) -> None:
    """Measures SpillwayCache with each policy whose outputs are meaningful with these keys."""
    with filled(bench, way, client, keys) as (cache, seconds):
        info = cache.sequences[0].refresh()
        cache.request_policy = ALL
        checked = bench.checked(bench.first_step(cache), wanted)
        report(
            name=f"spillway, {way}, all rows",
            keys=keys,
            tokens=bench.tokens,
            append_s=seconds,
            append_gb_per_s=bench.row_bytes / seconds / 1e9,
            host_row_bytes=info.row_bytes,
            device_code_bytes=info.index_bytes,
            **checked,
        )
        if not checked["equal_but_for_rounding"]:
            sys.exit(f"huggingface: what is computed from all rows is wrong, {way}")
        cache.crop(-1)
        for name, (_, fixed) in POLICIES.items():
            if keys != "flat" or not fixed:
                measure_policy(bench, cache, way, name, keys, steps, wanted)


def measure_turns(
    bench: Bench, clients: dict[str, spillway_kv.Client], keys: str, steps: int, rounds: int
) -> None:
    """Measures the default policy and transformers' resident cache in turns.

    The speed of a machine changes from minute to minute; with turns, this affects all alike. Each
    turn fills a new cache, and there is no other cache at that time.
    """
    resident = "transformers, resident"
    times: dict[str, list[float]] = {}
    compared: dict[str, dict[str, Any]] = {resident: {}}
    wanted: Step | None = None

    def turn(name: str, cache: Any) -> None:
        nonlocal wanted
        first = bench.first_step(cache)
        wanted = wanted or first
        compared[name] = {} if name == resident else bench.compared(first, wanted)
        times.setdefault(name, []).extend(bench.times(cache, steps))

    say(f"{keys} keys: in turns")
    for _ in range(rounds):
        turn(resident, transformers_cache(bench, keys, False))
        for way, client in clients.items():
            with filled(bench, way, client, keys) as (cache, _):
                turn(f"spillway, {way}", cache)
    peer = statistics.median(times[resident])
    for name, of_way in times.items():
        report(
            name=f"{name}, in turns",
            keys=keys,
            tokens=bench.tokens,
            rounds=rounds,
            **bench.timed(of_way),
            step_over_resident=statistics.median(of_way) / peer,
            **compared[name],
        )


def round_trip_us(client: spillway_kv.Client) -> float:
    """The median round trip of an empty call."""
    times = []
    for _ in range(300):
        begin = time.perf_counter()
        client.health()
        times.append(1e6 * (time.perf_counter() - begin))
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=131072)
    parser.add_argument("--device", default="cuda:0", help="the daemon's and the model's")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="8b")
    parser.add_argument("--keys", nargs="+", choices=sorted(SPREADS), default=list(SPREADS))
    parser.add_argument("--steps", type=int, default=50, help="timed steps")
    parser.add_argument("--offloaded-steps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=10, help="of caches that take turns")
    parser.add_argument("--only-turns", action="store_true", help="no more than those")
    options = parser.parse_args()

    device = torch.device(options.device)
    bench = Bench(options.shape, options.tokens, device)
    on_gpu = device.type == "cuda"
    with ExitStack() as stack:
        memory_bytes = bench.row_bytes * 5 // 4 + (2 << 30)
        target = stack.enter_context(running_daemon(options.device, memory_bytes))
        client = stack.enter_context(spillway_kv.connect(target))
        settings = {
            "memory.limit": memory_bytes,
            "device.name": options.device,
            "models.sampling_seed": 0,
        }
        ways = {
            "daemon": client,
            "embedded": stack.enter_context(spillway_kv.connect("embedded:", settings=settings)),
        }
        if on_gpu:
            settings["device.gpu_resident_limit"] = memory_bytes
            ways["embedded, all rows on the GPU too"] = stack.enter_context(
                spillway_kv.connect("embedded:", settings=settings)
            )
        report(
            name="environment",
            torch=torch.__version__,
            transformers=transformers.__version__,
            device=client.server_info.devices[0].description,
            daemon=client.server_info.version,
            transport=client.step_transport,
            shape=SHAPES[options.shape],
            tokens=options.tokens,
            row_bytes=bench.row_bytes,
            round_trip_us=round_trip_us(client),
        )
        if on_gpu:
            measure_link(bench)
        rehearse(bench, options.keys[0], options.steps)
        for keys in options.keys:
            # With flat keys, the default policy reads nearly every row.
            if keys != "flat":
                measure_turns(bench, ways, keys, options.steps, options.rounds)
        if options.only_turns:
            return
        for index, keys in enumerate(options.keys):
            wanted = measure_transformers(bench, keys, False, options.steps, None)
            if on_gpu and index == 0:
                # Measured only once, because what this cache copies does not depend on the keys.
                measure_transformers(bench, keys, True, options.offloaded_steps, wanted)
            for way, one in ways.items():
                measure_spillway(bench, way, one, keys, options.steps, wanted)
        if not on_gpu:
            say("transformers' offloaded cache needs CUDA: not measured")
    say("done")


if __name__ == "__main__":
    main()
