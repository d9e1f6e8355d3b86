"""Times decode steps on a CUDA stream of the caller, eagerly and in a CUDA graph.

Four layers in bf16 over model-like K/V (bench/trace_data.py), one sequence or several, with
the default policy unless --top or --exact says otherwise, and 32 query heads over 8 KV heads
of 128. --layers, --heads, --kv-heads and --dim change the shape. These ways take turns in each
round, over sequences with the same rows:

- job: `Client.begin_step` with tensors in host memory. Its time is that of the engine's
  kernels, between two events on the engine's own stream.
- eager: `Client.open_decoder`, attends enqueued one by one.
- graph: the same, captured once and replayed for each token.
- resident: the same, with an engine that also keeps all rows in GPU memory
  (`device.gpu_resident_limit`) and chooses rows all the same (`device.reproducible`).
- auto: the same without `device.reproducible`: dense while that is faster.
- halves: two decoders, each with half of the sequences. Their graphs run at once on two
  streams. The comparison with `graph` of half as many sequences shows how far they overlap.
- sdpa: torch's attention (cuDNN, or else flash) with K/V in GPU memory, in a graph.

Times are measured on the GPU, between events around the attends of all layers, and are per
layer. `next` and `attend` are times on the host, per step and per layer. Before anything is
timed, the outputs of all ways except auto and sdpa must be equal. Errors compared with exact
attention are printed with the times. One JSON object per line.

With --kernels, also the kernels of `graph` and `resident` by name: how long they run, and how
long each of them keeps the others waiting. Kernels begin while those before them run, so the
first is more than the layer's time in sum, and the second is that time.

--value-bits N gives the model codes of its values.

With --shared N, all sequences are forks of one that has the first N tokens. They have up to four
different queries, in turn.

With --link-load R, another process copies R GB/s to the GPU, so that rows have what is left of
the link. What it has reached is printed as `load_gb_per_s`. Only ways whose rows cross the link
are timed then.

KV heads of 64 are halves of those of the data, KV heads of 256 are two of them. A group of
more than four takes the queries of further tokens too.

    python bench/trace_data.py --tokens 131072 --output FOLDER
    python bench/gpu/decoder.py FOLDER --tokens 131072
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import spillway_kv
import torch
from link_load import LinkLoad
from model_like import Shape, Trace, exact, relative_errors
from timing import AHEAD_CYCLES, timed
from torch.nn.attention import SDPBackend, sdpa_kernel

STEPS = 24
ROUNDS = 5
KERNEL_STEPS = 8
# The GPU pauses longer than that between steps.
PAUSE_US_MAX = 50
# Tokens that are decoded: a warm-up, the rounds, and the steps whose kernels are timed.
DECODED = STEPS * (ROUNDS + 2) + KERNEL_STEPS
WAYS = ("job", "eager", "graph", "halves", "resident", "auto")


def report(**fields: object) -> None:
    print(json.dumps(fields), flush=True)


class Way:
    """One way to decode, with its own sequences. Each step runs all layers."""

    def __init__(
        self,
        client: spillway_kv.Client,
        model: spillway_kv.Model,
        trace: Trace,
        count: int,
        policy: spillway_kv.Policy,
        room: int | None,
        shared: int = 0,
    ) -> None:
        self.client = client
        self.room = room
        self.layer_count = trace.shape.layers
        start = trace.tokens - DECODED
        first = client.create_sequence(model, policy=policy)
        if shared > 0:
            self._append([first], trace, 0, shared)
            self.sequences = [first, *(first.fork() for _ in range(count - 1))]
        else:
            others = range(count - 1)
            self.sequences = [
                first,
                *(client.create_sequence(model, policy=policy) for _ in others),
            ]
        self._append(self.sequences, trace, shared, start)
        self.new: list[tuple[torch.Tensor, ...]] = []  # per layer: q, and k and v of all steps
        for layer in range(self.layer_count):
            _, k, v = trace.layer(layer)
            qs = [trace.query(layer, i if shared > 0 else 0) for i in range(count)]
            new = (x[None, :, start:].expand(count, -1, -1, -1) for x in (k, v))
            self.new.append((torch.stack(qs)[:, None], *new))
        self.step_count = 0
        self.next_us: list[float] = []
        self.attend_us: list[float] = []

    @staticmethod
    def _append(
        sequences: Sequence[spillway_kv.Sequence], trace: Trace, begin: int, end: int
    ) -> None:
        for layer in range(trace.shape.layers):
            _, k, v = trace.layer(layer)
            for sequence in sequences:
                sequence.append(layer, begin, k[:, begin:end], v[:, begin:end])

    def inputs(self, layer: int, device: str) -> tuple[torch.Tensor, ...]:
        q, k, v = self.new[layer]
        now = slice(self.step_count, self.step_count + 1)
        return tuple(x.contiguous().to(device) for x in (q, k[:, :, now], v[:, :, now]))

    def close(self) -> None:
        for sequence in self.sequences:
            sequence.delete()


class Job(Way):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        # Of each step: rows that came over the link, for all sequences; mean over the layers.
        self.moved_row_counts: list[float] = []

    def step(self) -> tuple[list[torch.Tensor], float]:
        outs, times, moved = [], [], []
        with self.client.begin_step(self.sequences) as step:
            for layer in range(self.layer_count):
                out, _ = step.attend(layer, *self.inputs(layer, "cpu"))
                outs.append(out)
                results = step.results()
                times.append(results[0].device_time_us)
                moved.append(sum(result.moved_row_count for result in results))
        self.moved_row_counts.append(statistics.mean(moved))
        self.step_count += 1
        return outs, sum(times) / self.layer_count


class Eager(Way):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.decoder = self.client.open_decoder(self.sequences, token_count_max=self.room)

    def close(self) -> None:
        self.decoder.close()
        super().close()

    def step(self) -> tuple[list[torch.Tensor], float]:
        inputs = [self.inputs(layer, "cuda") for layer in range(self.layer_count)]
        torch.cuda.current_stream().synchronize()
        begin = time.perf_counter()
        self.decoder.next()
        self.next_us.append((time.perf_counter() - begin) * 1e6)
        outs: list[torch.Tensor] = []

        def attend() -> None:
            begin = time.perf_counter()
            outs.extend(
                self.decoder.attend(layer, *inputs[layer])[0] for layer in range(self.layer_count)
            )
            self.attend_us.append((time.perf_counter() - begin) * 1e6 / self.layer_count)

        taken = timed(attend, ahead_cycles=AHEAD_CYCLES)
        self.step_count += 1
        return outs, taken / self.layer_count


class Captured(Way):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.decoder = self.client.open_decoder(self.sequences, token_count_max=self.room)
        # No step waits for the link before its attends.
        self.new = [tuple(x.cuda() for x in of_layer) for of_layer in self.new]
        self.held = [self.inputs(layer, "cuda") for layer in range(self.layer_count)]
        self.graph = torch.cuda.CUDAGraph()
        self.outs: list[torch.Tensor] = []

    def close(self) -> None:
        self.decoder.close()
        super().close()

    def prepare(self) -> None:
        """Announces the next token and puts its tensors where the graph reads them."""
        begin = time.perf_counter()
        changed = self.decoder.next()
        self.next_us.append((time.perf_counter() - begin) * 1e6)
        if changed:
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.outs = [
                    self.decoder.attend(layer, *self.held[layer])[0]
                    for layer in range(self.layer_count)
                ]
        for layer in range(self.layer_count):
            for to, new in zip(self.held[layer], self.inputs(layer, "cuda"), strict=True):
                to.copy_(new)
        torch.cuda.current_stream().synchronize()
        self.step_count += 1

    def step(self) -> tuple[list[torch.Tensor], float]:
        self.prepare()
        taken = timed(self.graph.replay)
        return [out.clone() for out in self.outs], taken / self.layer_count

    def kernels(self) -> list[dict[str, Any]]:
        """Kernels of a layer by name: calls, microseconds, and those that others wait for it."""
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            for _ in range(KERNEL_STEPS):
                self.prepare()
                self.graph.replay()
                torch.cuda.synchronize()
        runs = sorted(
            (
                (e.time_range.end, e.time_range.start, _kernel_name(e.name))
                for e in profile.events()
                if "spillway::cuda::" in e.name and "TableUpdate" not in e.name
            ),
        )
        found: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
        last = 0.0
        for end, start, name in runs:
            of_name = found[name]
            of_name[0] += 1
            of_name[1] += end - start
            # What no earlier kernel hides.
            of_name[2] += end - max(last, start)
            if 0 < start - last < PAUSE_US_MAX:
                found["(pauses)"][0] += 1
                found["(pauses)"][2] += start - last
            last = end
        per_layer = KERNEL_STEPS * self.layer_count
        return sorted(
            (
                {
                    "kernel": name,
                    "calls": round(calls / per_layer, 2),
                    "us": round(us / per_layer, 1),
                    "alone_us": round(alone / per_layer, 1),
                }
                for name, (calls, us, alone) in found.items()
            ),
            key=lambda row: -row["alone_us"],
        )


def _kernel_name(name: str) -> str:
    found = re.search(r"spillway::cuda::(?:\(anonymous namespace\)::)?(\w+)", name)
    return found[1] if found else name


class Halves(Way):
    def __init__(self, *arguments: Any) -> None:
        client, model, trace, count, *others = arguments
        self.halves = [Captured(client, model, trace, count // 2, *others) for _ in range(2)]
        self.streams = [torch.cuda.Stream() for _ in range(2)]
        self.sequences = [x for half in self.halves for x in half.sequences]
        self.next_us: list[float] = []
        self.attend_us: list[float] = []

    def step(self) -> tuple[list[torch.Tensor], float]:
        for half in self.halves:
            half.prepare()

        def both() -> None:
            now = torch.cuda.current_stream()
            for half, stream in zip(self.halves, self.streams, strict=True):
                stream.wait_stream(now)
                with torch.cuda.stream(stream):
                    half.graph.replay()
            for stream in self.streams:
                now.wait_stream(stream)

        taken = timed(both)
        outs = [torch.cat(pair) for pair in zip(*(half.outs for half in self.halves), strict=True)]
        return outs, taken / self.halves[0].layer_count

    def close(self) -> None:
        for half in self.halves:
            half.close()


class Sdpa:
    """torch's attention over all rows in GPU memory. All sequences have the same rows."""

    def __init__(self, trace: Trace, count: int) -> None:
        self.count = count
        self.layers = [tuple(x.cuda() for x in trace.layer(i)) for i in range(trace.shape.layers)]
        backends = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]
        for self.backend in backends:
            try:
                self.run()
                break
            except RuntimeError:
                continue
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.run()

    def run(self) -> list[torch.Tensor]:
        with sdpa_kernel(self.backend):
            return [
                torch.nn.functional.scaled_dot_product_attention(
                    q[None, :, None], k[None], v[None], enable_gqa=True
                )
                for q, k, v in self.layers
                for _ in range(self.count)
            ]

    def step(self) -> float:
        return timed(self.graph.replay) / len(self.layers)


def host_us(times: list[float] | None) -> float | None:
    return round(statistics.median(times), 1) if times else None


def measure(
    engines: dict[str, spillway_kv.Client],
    trace: Trace,
    count: int,
    names: Sequence[str],
    policy: spillway_kv.Policy,
    options: argparse.Namespace,
) -> None:
    shape = trace.shape
    models = {
        name: engine.create_model(
            layer_count=shape.layers,
            query_head_count=shape.heads,
            kv_head_count=shape.kv_heads,
            head_dim=shape.dim,
            dtype="bfloat16",
            hash_weights=spillway_kv.RotationHash(value_bits=options.value_bits),
            row_type=options.row_type,
        )
        for name, engine in engines.items()
    }
    kinds = {"job": Job, "eager": Eager, "halves": Halves}
    ways: dict[str, Any] = {}
    for name in names:
        if name == "halves" and count % 2 != 0:
            continue
        engine = name if name in engines else "plain"
        kind = kinds.get(name, Captured)
        of_engine = engines[engine], models[engine]
        ways[name] = kind(*of_engine, trace, count, policy, options.room, options.shared)
    streams = [name for name in ways if name not in ("job", "auto")]
    rows_bytes = models["plain"].row_bytes_per_token * trace.tokens * count
    for name in ("resident", "auto"):
        if name in ways:
            (gpu,) = engines[name].get_server_info().devices
            assert gpu.resident_used_bytes > 0.9 * rows_bytes, gpu
    start = trace.tokens - DECODED
    for step in range(2 * STEPS):  # warm-up, in which outputs are checked
        outs = {name: way.step()[0] for name, way in ways.items()}
        for layer in range(shape.layers):
            wanted = outs["job"][layer].cuda()
            for name in streams:
                assert torch.equal(outs[name][layer], wanted), (step, layer, name)
    errors: dict[str, list[float]] = {name: [] for name in ("job", "auto") if name in ways}
    for layer in range(shape.layers):
        q, k, v = (x.cuda() for x in trace.layer(layer))
        right = exact(q[None], k, v, start + 2 * STEPS)[0]
        for name, of_way in errors.items():
            of_way += relative_errors(outs[name][layer].cuda()[0, 0], right)
    sdpa = Sdpa(trace, count)
    for way in ways.values():
        way.next_us.clear()
        way.attend_us.clear()
    ways["job"].moved_row_counts.clear()
    times: dict[str, list[float]] = {name: [] for name in (*ways, "sdpa")}
    load = LinkLoad(options.link_load) if options.link_load else None
    if load:
        load.begin()
    for _ in range(ROUNDS):
        for name, way in ways.items():

            def steps(way: Any = way) -> list[float]:
                return [way.step()[1] for _ in range(STEPS)]

            times[name] += load.beside(steps) if load else steps()
        if load is None:
            times["sdpa"] += [sdpa.step() for _ in range(STEPS)]
    if load:
        load.end()
    times = {name: of_way for name, of_way in times.items() if of_way}
    job = statistics.median(times["job"])
    moved_rows = statistics.median(ways["job"].moved_row_counts)
    row_bytes = models["plain"].row_bytes_per_token // (shape.layers * shape.kv_heads)
    moved_bytes = moved_rows * row_bytes
    for name, all_of in times.items():
        way = ways.get(name)
        of_way = errors.get(name, errors["job"])
        report(
            tokens=trace.tokens,
            sequences=count,
            layers=shape.layers,
            heads=f"{shape.heads}/{shape.kv_heads} x {shape.dim}",
            way=name if name != "sdpa" else f"sdpa {sdpa.backend.name}",
            layer_us=round(statistics.median(all_of), 1),
            p90_us=round(float(np.percentile(all_of, 90)), 1),
            beyond_job_us=round(statistics.median(all_of) - job, 1),
            moved_rows=round(moved_rows),
            moved_gb_per_s=round(moved_bytes / statistics.median(all_of) / 1000, 1)
            if name in ("job", "eager", "graph", "halves")
            else None,
            next_host_us=host_us(way and way.next_us),
            attend_host_us=host_us(way and way.attend_us),
            error_median=round(statistics.median(of_way), 4),
            error_max=round(max(of_way), 4),
            **(
                {"top": policy.heavy.fraction} if isinstance(policy.heavy, spillway_kv.TopK) else {}
            ),
            value_bits=options.value_bits,
            row_type=options.row_type,
            **({"shared": options.shared} if options.shared else {}),
            **({"load_gb_per_s": round(statistics.median(load.rates), 1)} if load else {}),
            rounds=ROUNDS,
            steps=STEPS,
        )
    for name in ("graph", "resident", "auto") if options.kernels else ():
        for row in ways[name].kernels() if name in ways else ():
            where = {"tokens": trace.tokens, "sequences": count, "way": name}
            report(**where, value_bits=options.value_bits, row_type=options.row_type, **row)
    for way in ways.values():
        way.close()
    for name, each in engines.items():
        each.delete_model(models[name])


def _row_bytes(shape: Shape) -> int:
    """Bytes of K/V of a token, in all layers."""
    return shape.layers * shape.kv_heads * shape.dim * 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="of bench/trace_data.py")
    parser.add_argument("--tokens", type=int, nargs="+", default=[131072])
    parser.add_argument("--sequences", type=int, nargs="+", default=[1])
    parser.add_argument("--heads", type=int, default=32, help="query heads")
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--dim", type=int, default=128, choices=(64, 128, 256))
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--kernels", action="store_true", help="also times kernels by name")
    parser.add_argument("--ways", nargs="+", default=WAYS, choices=WAYS, help="besides job")
    parser.add_argument("--top", type=float, help="this share of the rows, in place of the default")
    parser.add_argument("--exact", action="store_true", help="all rows, in place of the default")
    parser.add_argument("--room", type=int, help="tokens for which decoders are opened")
    parser.add_argument("--gpu-memory", help="of the engine without copies of rows, like 1GiB")
    parser.add_argument("--value-bits", type=int, default=0, choices=range(4))
    parser.add_argument("--row-type", default="model", choices=("model", "int8"))
    parser.add_argument("--shared", type=int, default=0, help="tokens of a common prefix")
    parser.add_argument("--link-load", type=float, help="share the link with copies, in GB/s")
    parser.add_argument("--device", default="cuda:0")
    arguments = parser.parse_args()
    policy = spillway_kv.Policy()
    if arguments.top is not None:
        policy = spillway_kv.Policy(heavy=spillway_kv.TopK(fraction=arguments.top), tail="none")
    if arguments.exact:
        policy = spillway_kv.Policy(selector="all")
    shape = Shape(arguments.heads, arguments.kv_heads, arguments.dim, arguments.layers)
    if shape.layers < 1:
        raise SystemExit(f"--layers {shape.layers} is less than 1")
    if shape.heads % shape.kv_heads != 0:
        raise SystemExit(f"--heads {shape.heads} is not a multiple of --kv-heads {shape.kv_heads}")
    if arguments.link_load is not None:
        if not arguments.link_load > 0:
            raise SystemExit(f"--link-load {arguments.link_load} is not above 0")
        if arguments.kernels:
            raise SystemExit("--link-load: not with --kernels, which are timed without it")
        if {"resident", "auto"} & set(arguments.ways):
            raise SystemExit("--link-load: choose --ways whose rows cross the link, like graph")
    report(gpu=torch.cuda.get_device_name(), torch=torch.__version__)
    ways = ["job", *(name for name in WAYS[1:] if name in arguments.ways)]
    for tokens in arguments.tokens:
        # Room for all rows of the largest batch, in whole slabs of each sequence.
        rows = _row_bytes(shape) * tokens * max(arguments.sequences)
        resident_limit = f"{(rows + rows // 8 >> 20) + 2048}MiB"
        settings = {
            "memory.limit": "100GiB",
            "device.name": arguments.device,
            "models.sampling_seed": 0,
        }
        resident = {"device.gpu_resident_limit": resident_limit}
        limit = {"device.gpu_memory_limit": arguments.gpu_memory} if arguments.gpu_memory else {}
        kinds = {
            "plain": limit | {"device.gpu_resident_limit": "0"},
            "resident": resident | {"device.reproducible": "true"},
            "auto": resident,
        }
        with ExitStack() as stack:
            engines = {
                name: stack.enter_context(
                    spillway_kv.connect("embedded:", settings=settings | more)
                )
                for name, more in kinds.items()
                if name in ("plain", *ways)
            }
            trace = Trace(arguments.folder, tokens, shape)
            for count in arguments.sequences:
                measure(engines, trace, count, ways, policy, arguments)


if __name__ == "__main__":
    main()
