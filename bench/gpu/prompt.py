"""Compares prompts whose earlier K/V stream from the engine with K/V in GPU memory.

One layer, by default of an 8B shape with 32 query heads over 8 KV heads of 128, bf16, Gaussian
rows, an engine in this process:

- `last chunk`: the last tokens of the prompt over all earlier ones, by `spillway_kv.prefill`;
  by the same kernels with all K/V in GPU memory (`resident`); by FlashAttention in one call
  over them; and the copies alone (`fetch`), block by block into the same buffers.
- `whole prompt`: all chunks through some layers, with appends, compared with the same kernels
  over K/V in GPU memory, to which the rows of each chunk are copied.

Times are medians. Outputs are compared with those of the resident K/V in the same run, and a
few queries with double precision. Prints a table; --json writes the records.

    python bench/gpu/prompt.py [--json prompt.json]
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import spillway_kv
import torch
from spillway_kv.lab import serving
from spillway_kv.prefill import BLOCK_TOKEN_COUNT, Prefill, attention_with_lse
from spillway_kv.prefill_kernels import kernel_of, merge_into, trials
from spillway_kv.transformers.appends import Appends

ROOT = Path(__file__).resolve().parents[2]
DTYPE = torch.bfloat16
# Relative difference in norm that rounding to bf16 explains; outputs are means of Gaussian values.
TOLERANCE = 0.02
# How many queries are compared with double precision.
CHECKED = 3


class Bench:
    """State that the measurements share."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.device = torch.device(options.device)
        self.query_heads: int = options.heads
        self.kv_heads: int = options.kv_heads
        self.head_dim: int = options.dim
        self.chunk: int = options.chunk
        self.block: int = options.block
        self.repetitions: int = options.repetitions
        self.records: list[dict[str, Any]] = []
        self.failed = False

    @property
    def row_bytes(self) -> int:
        """Of a token's K and V."""
        return 2 * self.kv_heads * self.head_dim * DTYPE.itemsize

    def report(self, **fields: Any) -> None:
        self.records.append(fields)
        shown = (
            f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
            for name, value in fields.items()
            if name != "name"
        )
        print(f"{fields['name']:40} " + ", ".join(shown), flush=True)

    def made(self, *shape: int, seed: int) -> torch.Tensor:
        generator = torch.Generator(self.device).manual_seed(seed)
        return torch.randn(shape, generator=generator, device=self.device, dtype=DTYPE)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def seconds(self, run: Callable[[], object], repetitions: int | None = None) -> float:
        """The median time of several runs, after a warm-up."""
        times = []
        for _ in range(1 + (repetitions or self.repetitions)):
            self.synchronize()
            begin = time.perf_counter()
            run()
            self.synchronize()
            times.append(time.perf_counter() - begin)
        return statistics.median(times[1:])

    def compared(self, mine: torch.Tensor, wanted: torch.Tensor) -> float:
        """The relative difference in norm. Sets `failed` if rounding does not explain it."""
        difference = float((mine.double() - wanted.double()).norm() / wanted.double().norm())
        # Written so that NaN fails.
        if not difference <= TOLERANCE:
            self.failed = True
            print(f"prompt: a relative difference of {difference}", file=sys.stderr, flush=True)
        return difference


def scale_of(q: torch.Tensor) -> float:
    """The softmax scale of queries [..., d]."""
    return float(q.shape[-1] ** -0.5)


def resident(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int) -> torch.Tensor:
    """Attention of the last T of L tokens over all L, with k and v [H_kv, L, d].

    Uses the same kernels as `spillway_kv.prefill` uses for chunks.
    """
    out, lse = attention_with_lse(q, k[:, start:], v[:, start:], causal=True, scale=scale_of(q))
    if start == 0:
        return out
    total, lse = out.float(), lse.clone()
    merge_into(
        total,
        lse,
        *attention_with_lse(q, k[:, :start], v[:, :start], causal=False, scale=scale_of(q)),
    )
    return total.to(q.dtype)


def one_call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The same in one FlashAttention call. Its causal mask aligns the last query and last key."""
    out, *_ = torch.ops.aten._flash_attention_forward(
        q[None],
        k.transpose(0, 1)[None],
        v.transpose(0, 1)[None],
        None,
        None,
        q.shape[0],
        k.shape[1],
        0.0,
        True,
        False,
        scale=scale_of(q),
    )
    return out[0]


def exact(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int, query: int
) -> torch.Tensor:
    """The output [H_q, d] of one query in double precision, computed head by head."""
    group = q.shape[1] // len(k)
    seen = start + query + 1
    made = []
    for head in range(len(k)):
        queries = q[query, head * group : (head + 1) * group].double()
        logits = queries @ k[head, :seen].double().T * scale_of(q)
        made.append(logits.softmax(-1) @ v[head, :seen].double())
    return torch.cat(made)


def filled(
    client: spillway_kv.Client,
    model: spillway_kv.Model,
    k: torch.Tensor,
    v: torch.Tensor,
    piece: int,
) -> spillway_kv.Sequence:
    """A sequence that holds K and V [H_kv, L, d] at layer 0."""
    sequence = client.create_sequence(model)
    for start in range(0, k.shape[1], piece):
        part = slice(start, start + piece)
        sequence.append(0, start, k[:, part], v[:, part], timeout=300)
    return sequence


def measure_last_chunk(
    bench: Bench, client: spillway_kv.Client, model: spillway_kv.Model, earlier: int
) -> None:
    """Measures the last chunk of a prompt, after `earlier` tokens."""
    name = f"last chunk over {earlier // 1024}K"
    k, v = (
        bench.made(bench.kv_heads, earlier + bench.chunk, bench.head_dim, seed=s) for s in (1, 2)
    )
    q = bench.made(bench.chunk, bench.query_heads, bench.head_dim, seed=3)
    begin = time.perf_counter()
    sequence = filled(client, model, k[:, :earlier], v[:, :earlier], 1 << 17)
    append = time.perf_counter() - begin
    new = k[:, earlier:], v[:, earlier:]
    flops = 4 * bench.query_heads * bench.head_dim * bench.chunk * (earlier + bench.chunk / 2)
    row_bytes = bench.row_bytes * earlier

    with Prefill(block_token_count=bench.block) as prefill:

        def chunk() -> torch.Tensor:
            return prefill.attend(sequence, 0, q, *new, start=earlier, scale=scale_of(q))

        mine = chunk()
        wanted = resident(q, k, v, earlier)
        queries = [int(x) for x in torch.linspace(0, bench.chunk - 1, CHECKED)]
        truth = torch.stack([exact(q, k, v, earlier, query) for query in queries])
        checks = {
            "difference_from_resident": bench.compared(mine, wanted),
            "difference_from_double": bench.compared(mine[queries], truth),
        }
        streamed_s = bench.seconds(chunk)
        resident_s = bench.seconds(lambda: resident(q, k, v, earlier))
        block = k.new_empty((2, 2, bench.kv_heads, bench.block, bench.head_dim))

        def fetch() -> None:
            for index, start in enumerate(range(0, earlier, bench.block)):
                end = min(start + bench.block, earlier)
                into = block[index % 2, 0, :, : end - start], block[index % 2, 1, :, : end - start]
                sequence.fetch(0, start, end, into=into)

        fetch_s = bench.seconds(fetch, 3)
        bench.report(
            name=name,
            streamed_s=streamed_s,
            resident_s=resident_s,
            streamed_over_resident=streamed_s / resident_s,
            kernel=prefill.kernel,
            resident_kernel=kernel_of(q, k[:, :earlier], causal=False),
            tflops=flops / streamed_s / 1e12,
            resident_tflops=flops / resident_s / 1e12,
            gb_per_s=row_bytes / streamed_s / 1e9,
            fetch_s=fetch_s,
            fetch_gb_per_s=row_bytes / fetch_s / 1e9,
            # Copies and kernels overlap, so the slower of the two is a lower bound.
            over_the_slower_of_both=streamed_s / max(fetch_s, resident_s),
            append_gb_per_s=row_bytes / append / 1e9,
            earlier_tokens=earlier,
            **checks,
        )
    if bench.device.type == "cuda":
        try:
            difference = bench.compared(one_call(q, k, v), wanted)
        except RuntimeError as error:
            # The record says so; no other kernel replaces it.
            bench.report(name=f"{name}, FlashAttention at once", refused=str(error)[:200])
        else:
            seconds = bench.seconds(lambda: one_call(q, k, v))
            bench.report(
                name=f"{name}, FlashAttention at once",
                seconds=seconds,
                tflops=flops / seconds / 1e12,
                difference_from_resident=difference,
            )
    sequence.delete()


def measure_prompt(
    bench: Bench, client: spillway_kv.Client, model: spillway_kv.Model, tokens: int, layers: int
) -> None:
    """Measures all chunks of a prompt through some layers, including appends."""
    shape = (layers, bench.kv_heads, tokens, bench.head_dim)
    k, v = (bench.made(*shape, seed=s) for s in (4, 5))
    q = bench.made(layers, tokens, bench.query_heads, bench.head_dim, seed=6)
    parts = [slice(at, min(at + bench.chunk, tokens)) for at in range(0, tokens, bench.chunk)]
    flops = layers * 4 * bench.query_heads * bench.head_dim * tokens * tokens / 2
    streamed = torch.empty_like(q)
    in_memory = torch.empty_like(q)

    def by_memory() -> None:
        keys, values = torch.empty_like(k), torch.empty_like(v)
        for part in parts:
            for layer in range(layers):
                keys[layer, :, part] = k[layer, :, part]
                values[layer, :, part] = v[layer, :, part]
                rows = keys[layer, :, : part.stop], values[layer, :, : part.stop]
                in_memory[layer, part] = resident(q[layer, part], *rows, part.start)

    with Prefill(block_token_count=bench.block) as prefill:
        sequence: spillway_kv.Sequence | None = None
        appends = Appends()

        def by_engine(hidden: bool = True) -> None:
            nonlocal sequence
            if sequence is not None:
                sequence.delete()
            sequence = client.create_sequence(model)
            for part in parts:
                for layer in range(layers):
                    rows = k[layer, :, part], v[layer, :, part]
                    appends.wait_for(sequence, layer)
                    appends.start(sequence, layer, part.start, *rows)
                    if not hidden:
                        appends.finish()
                    streamed[layer, part] = prefill.attend(
                        sequence, layer, q[layer, part], *rows, start=part.start, scale=scale_of(q)
                    )
            appends.finish()

        by_engine()
        by_memory()
        difference = bench.compared(streamed, in_memory)
        assert sequence is not None
        for layer in range(layers):
            into = torch.empty_like(k[layer]), torch.empty_like(v[layer])
            sequence.fetch(layer, into=into)
            if not (torch.equal(into[0], k[layer]) and torch.equal(into[1], v[layer])):
                bench.failed = True
                print(f"prompt: layer {layer} holds other rows", file=sys.stderr)
        streamed_s = bench.seconds(by_engine)
        in_turn_s = bench.seconds(lambda: by_engine(False))
        resident_s = bench.seconds(by_memory)
        bench.report(
            name=f"whole prompt of {tokens // 1024}K",
            chunk=bench.chunk,
            layers=layers,
            streamed_s=streamed_s,
            appends_waited_for_s=in_turn_s,
            resident_s=resident_s,
            streamed_over_resident=streamed_s / resident_s,
            tflops=flops / streamed_s / 1e12,
            resident_tflops=flops / resident_s / 1e12,
            rows_over_the_link_gb=bench.row_bytes
            * layers
            * (tokens + sum(part.start for part in parts))
            / 1e9,
            difference_from_resident=difference,
        )
        assert sequence is not None
        sequence.delete()


def measure_engine(
    bench: Bench, client: spillway_kv.Client, model: spillway_kv.Model, earlier: int
) -> None:
    """Measures the engine's own attend of a chunk over all rows, once."""
    k, v = (
        bench.made(bench.kv_heads, earlier + bench.chunk, bench.head_dim, seed=s) for s in (1, 2)
    )
    q = bench.made(bench.chunk, bench.query_heads, bench.head_dim, seed=3)
    sequence = filled(client, model, k, v, 1 << 17)
    begin = time.perf_counter()
    answer = sequence.attend(0, q, spillway_kv.Policy(selector="all"), timeout=300)
    seconds = time.perf_counter() - begin
    bench.report(
        name=f"last chunk over {earlier // 1024}K, in the engine",
        seconds=seconds,
        difference_from_resident=bench.compared(answer.out, resident(q, k, v, earlier)),
    )
    sequence.delete()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--earlier", type=int, nargs="*", default=[1 << 18, 1 << 20])
    parser.add_argument("--tokens", type=int, default=1 << 16, help="of the whole prompt")
    parser.add_argument("--layers", type=int, default=2, help="of the whole prompt")
    parser.add_argument("--chunk", type=int, default=8192)
    parser.add_argument("--block", type=int, default=BLOCK_TOKEN_COUNT)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--engine", action="store_true", help="the engine's own attends, too")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    bench = Bench(options)
    serving.prefer_library(ROOT / "build/release/daemon/spillwayd")
    most = max([*options.earlier, options.layers * options.tokens, options.chunk])
    limit = 2 * bench.row_bytes * (most + options.chunk) + (2 << 30)
    settings = {"memory.limit": limit, "device.name": options.device}
    with spillway_kv.connect("embedded:", settings=settings) as client, torch.inference_mode():
        model = client.create_model(
            layer_count=options.layers,
            query_head_count=bench.query_heads,
            kv_head_count=bench.kv_heads,
            head_dim=bench.head_dim,
            dtype="bfloat16",
        )
        tried = trials(bench.device, DTYPE, bench.head_dim, bench.query_heads // bench.kv_heads)
        bench.report(
            name="environment",
            date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="minutes"),
            torch=torch.__version__,
            device=client.server_info.devices[0].description,
            heads=f"{bench.query_heads}/{bench.kv_heads} x {bench.head_dim}",
            block=options.block,
            chunk=options.chunk,
            kernels={trial.kernel: trial.refusal or "taken" for trial in tried},
        )
        if options.tokens:
            measure_prompt(bench, client, model, options.tokens, options.layers)
        if options.engine:
            measure_engine(bench, client, model, options.tokens - options.chunk)
        for earlier in options.earlier:
            measure_last_chunk(bench, client, model, earlier)
    if options.json:
        options.json.write_text(json.dumps(bench.records, indent=2) + "\n")
    if bench.failed or any(
        isinstance(value, float) and not math.isfinite(value)
        for record in bench.records
        for value in record.values()
    ):
        sys.exit("prompt: what was computed is wrong")


if __name__ == "__main__":
    main()
