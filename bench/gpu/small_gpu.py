"""Compares caches at contexts whose K/V do not fit into the memory of a small GPU.

A Llama of the shape of Llama 3.2 1B with random weights, bf16, batch 1. The GPU is made small:
the memory that torch and Spillway's engine may use together, in addition to the weights, is
limited. Prompts of several lengths run in chunks, and tokens are decoded after them, with
transformers' own cache, its offloaded cache, and SpillwayCache with an engine in this process. A
method stops when memory is exhausted; transformers' caches also stop after --seconds.
Transformers' own cache with the whole GPU runs first, and the attention and logits of the others
are compared with it. Prints a line for each length, and writes the records and a plot.

Queries are scaled so that attention is peaked: with the flat attention of random weights, only
all rows would be enough. Spillway decodes with its default policy. The prompt and the first step
after it are attended exactly, and may differ only by rounding.

With --model and --text a real model reads a real text, with YaRN beyond its own context length.
All methods decode the same tokens of the text (teacher forcing), and their most likely next
tokens are compared.

    python bench/gpu/small_gpu.py --out DIRECTORY
    python bench/gpu/small_gpu.py --out DIRECTORY --model MODEL.gguf --text TEXT --ratios 0.25,1,2
"""

from __future__ import annotations

import argparse
import datetime
import gc
import hashlib
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

os.environ["HF_HUB_OFFLINE"] = "1"
# Lets growing caches use memory that others have freed.
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

import spillway_kv
import torch
import transformers
from small_gpu_plot import (
    GIB,
    OFFLOADED,
    RESIDENT,
    SPILLWAY,
    WHOLE,
    is_wrong,
    plot,
    plot_decoding,
)
from spillway_kv.lab import serving
from spillway_kv.lab.evaluation import language
from spillway_kv.transformers import SpillwayCache, prompt_memory
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

ROOT = Path(__file__).resolve().parents[2]
SHAPES: dict[str, dict[str, int]] = {
    "1b": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_hidden_layers": 16,
    },
    # For trying out the program.
    "tiny": {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_hidden_layers": 2,
    },
}
VOCABULARY = 1024
# Standard deviation of the model's own keys and values, and how much larger queries are. The
# logits then have a standard deviation of about seven.
DEVIATION = 1.28
QUERY_FACTOR = 4
# Bytes of K/V, divided by the memory that is left beside the weights.
RATIOS = (0.25, 0.5, 1, 2, 4)


class Outcome(NamedTuple):
    """The results of one prompt and the steps after it.

    Attributes:
        prompt_s: Seconds until the last token of the prompt is processed.
        step_ms: Milliseconds of each timed step.
        logits: After the prompt and after the first step, [2, vocabulary].
        attention: Output of the first layer's attention at the same two tokens.
        next_tokens: The most likely token after the prompt and after each step.
    """

    prompt_s: float
    step_ms: list[float]
    logits: torch.Tensor
    attention: torch.Tensor
    next_tokens: torch.Tensor


def token_bytes_of(config: Any) -> int:
    """Bytes of K and V of one token in all layers, in bf16."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim)


class Bench:
    """The model, and the memory that is left beside its weights."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.device = torch.device(options.device)
        self.on_gpu = self.device.type == "cuda"
        self.chunk: int = options.chunk
        self.steps: int = options.steps
        self.left = int(options.left * GIB)
        self.factor = 1.0
        if options.model is None:
            self.model = self._random_model(options.shape)
        else:
            self.model = self._model(options)
        config = self.model.config
        self.token_bytes = token_bytes_of(config)
        tokens = [int(ratio * self.left / self.token_bytes) for ratio in options.ratios]
        # Round down to whole chunks.
        self.lengths = [max(n // self.chunk, 1) * self.chunk for n in tokens]
        count = self.lengths[-1] + self.steps
        if options.model is None:
            generator = torch.Generator().manual_seed(2)
            ids = torch.randint(VOCABULARY, (count,), generator=generator)
        else:
            tokenizer = language.load_tokenizer(options.model)
            ids = language.tokenize(tokenizer, (options.text,))[:count]
            if len(ids) < count:
                raise SystemExit(f"{options.text} has {len(ids)} tokens, and {count} are needed")
        self.ids = ids[None].to(self.device)

    def _model(self, options: argparse.Namespace) -> Any:
        config = language.load_config(options.model)
        longest = int(options.ratios[-1] * self.left / token_bytes_of(config)) + self.steps
        # A power of two times the model's own length, as its authors use it.
        factor = longest / config.max_position_embeddings
        self.factor = 1.0 if factor <= 1 else 2.0 ** math.ceil(math.log2(factor * 0.98))
        return language.load_model(options.model, options.device, self.factor)

    def _random_model(self, shape: str) -> Any:
        config = LlamaConfig(
            **SHAPES[shape],
            vocab_size=VOCABULARY,
            max_position_embeddings=1 << 21,
            rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
            initializer_range=DEVIATION / SHAPES[shape]["hidden_size"] ** 0.5,
            attn_implementation="sdpa",
        )
        torch.manual_seed(1)
        with self.device:
            model: Any = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
        with torch.no_grad():
            for layer in model.model.layers:
                layer.self_attn.q_proj.weight *= QUERY_FACTOR
        return model.eval()

    def limit(self, byte_count: int | None) -> None:
        """Limits the memory that torch may use beside the weights. None: no limit."""
        gc.collect()
        if not self.on_gpu:
            return
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(self.device).total_memory
        fraction = 1.0
        if byte_count is not None:
            fraction = min((torch.cuda.memory_reserved(self.device) + byte_count) / total, 1.0)
        torch.cuda.set_per_process_memory_fraction(fraction, self.device)

    def synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    @torch.inference_mode()
    def run(self, cache: Any, length: int) -> Outcome:
        """Runs a prompt in chunks and then decodes the given tokens that follow it."""
        attention: list[torch.Tensor] = []
        first = self.model.model.layers[0].self_attn.o_proj
        hook = first.register_forward_pre_hook(
            lambda _, inputs: attention.append(inputs[0][0, -1].float())
        )
        try:
            self.synchronize()
            begin = time.perf_counter()
            for start in range(0, length, self.chunk):
                attention.clear()
                part = self.ids[:, start : start + self.chunk]
                made = self.model(part, past_key_values=cache, logits_to_keep=1).logits[0, -1]
            self.synchronize()
            prompt_s = time.perf_counter() - begin
            logits = [made.float()]
            next_tokens = [made.argmax()]
            times = []
            for index in range(self.steps):
                begin = time.perf_counter()
                at = length + index
                made = self.model(self.ids[:, at : at + 1], past_key_values=cache).logits[0, -1]
                next_tokens.append(made.argmax())
                self.synchronize()
                times.append(1000 * (time.perf_counter() - begin))
                if index == 0:
                    logits.append(made.float())
        finally:
            hook.remove()
        # Leave out the first steps: they are a warm-up, and Spillway attends exactly in the first
        # step, as in the prompt.
        return Outcome(
            prompt_s,
            times[len(times) // 4 :],
            torch.stack(logits[:2]),
            torch.stack(attention[:2]),
            torch.stack(next_tokens).cpu(),
        )


def difference(mine: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((mine - wanted).norm() / wanted.norm())


def attempt(run: Callable[[], Outcome]) -> Outcome | str:
    """The outcome, or the reason why there is none. Holds no memory of a run that failed."""
    try:
        return run()
    except torch.OutOfMemoryError:
        return "torch is out of GPU memory"
    except spillway_kv.ResourceExhausted as error:
        return f"the engine is out of memory: {error.message}"


def measure(
    bench: Bench,
    way: str,
    make: Callable[[], Any],
    left: int | None,
    seconds: float,
    wanted: dict[int, Outcome],
    records: list[dict[str, Any]],
) -> None:
    """Measures one way at the lengths in ascending order, until it fails or its time is over."""
    begin, before = time.perf_counter(), 0.0
    for length in bench.lengths:
        known = wanted.get(length)
        fields: dict[str, Any] = {
            "name": way,
            "tokens": length,
            "kv_bytes": length * bench.token_bytes,
        }
        spent = time.perf_counter() - begin
        # Twice the length may take four times as long.
        if spent + 4 * before > seconds:
            records.append({**fields, "ended": f"by its {seconds:.0f} seconds"})
            print(f"{way:32} {length:8} tokens: not in time", flush=True)
            return
        bench.limit(left)
        if bench.on_gpu:
            torch.cuda.reset_peak_memory_stats(bench.device)
        started = time.perf_counter()

        def run(length: int = length, fields: dict[str, Any] = fields) -> Outcome:
            cache = make()
            try:
                made = bench.run(cache, length)
                if isinstance(cache, SpillwayCache):
                    fields["rows_fraction"] = cache.statistics.rows_touched_fraction
                    fields["certified_error_mean"] = cache.statistics.certified_error_mean
                return made
            finally:
                if isinstance(cache, SpillwayCache):
                    cache.close()

        outcome = attempt(run)
        before = time.perf_counter() - started
        if isinstance(outcome, str):
            records.append({**fields, "ended": outcome})
            print(f"{way:32} {length:8} tokens: {outcome}", flush=True)
            return
        if known is None:
            wanted[length] = known = outcome
        step = statistics.median(outcome.step_ms)
        fields |= times(length, outcome.prompt_s, step) | {
            "attention_relative_difference": difference(outcome.attention, known.attention),
            "logits_relative_difference": difference(outcome.logits, known.logits),
            "same_next_token": float((outcome.next_tokens == known.next_tokens).double().mean()),
        }
        if bench.on_gpu:
            fields["torch_peak_bytes"] = torch.cuda.max_memory_allocated(bench.device)
        records.append(fields)
        print(
            f"{way:32} {length:8} tokens: prompt {outcome.prompt_s:7.2f} s, "
            f"{1000 / step:7.1f} tokens/s, attention differs by "
            f"{fields['attention_relative_difference']:.2g}, logits by "
            f"{fields['logits_relative_difference']:.2g}, same next token "
            f"{fields['same_next_token']:.1%}",
            flush=True,
        )


def times(token_count: int, prompt_s: float, step_ms: float) -> dict[str, float]:
    """The fields for the times of a prompt and of a step, and the rates that follow."""
    return {
        "prompt_s": prompt_s,
        "prompt_tokens_per_s": token_count / prompt_s,
        "step_ms": step_ms,
        "tokens_per_s": 1000 / step_ms,
    }


def check_alike(environment: dict[str, Any], earlier: dict[str, Any]) -> None:
    """Raises ValueError if two runs differ in model, chunks, memory or GPU."""
    for name in ("device", "shape_name", "left_bytes", "engine_bytes", "chunk"):
        if environment[name] != earlier[name]:
            raise ValueError(f"the runs differ in {name}: {environment[name]}, {earlier[name]}")


def merged(records: list[dict[str, Any]], earlier: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Merges two runs: the faster prompt and step of each way and length; `runs` has all times.

    Python launches the steps, so other work on the host slows a run down.
    """
    before = {(r["name"], r["tokens"]): r for r in earlier if "step_ms" in r}
    kept = []
    for record in records:
        old = before.get((record["name"], record.get("tokens")))
        if old is not None and "step_ms" in record:
            runs = [
                run
                for of in (old, record)
                for run in of.get("runs", [{name: of[name] for name in ("prompt_s", "step_ms")}])
            ]
            prompt = min(run["prompt_s"] for run in runs)
            step = min(run["step_ms"] for run in runs)
            record = record | times(record["tokens"], prompt, step) | {"runs": runs}
        kept.append(record)
    return kept


def told_model(options: argparse.Namespace, factor: float) -> dict[str, Any]:
    """The fields that say which model and text were used."""
    if options.model is None:
        return {"shape_name": options.shape, "shape": SHAPES[options.shape]}
    path = Path(options.model)
    hashes = {
        name: hashlib.sha256(file.read_bytes()).hexdigest()
        for name, file in (("model_sha256", path), ("text_sha256", options.text))
        if file.is_file()
    }
    return {
        "shape_name": options.name or path.stem,
        "text": options.text.name,
        "yarn_factor": factor,
        **hashes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--left", type=float, default=1.75, help="GiB beside the weights")
    parser.add_argument(
        "--engine", type=float, default=1.25, help="GiB of them that are the engine's"
    )
    parser.add_argument("--chunk", type=int, default=2048)
    parser.add_argument("--block", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=20, help="of transformers' caches")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="1b")
    parser.add_argument("--model", help="a folder or a .gguf file, in place of random weights")
    parser.add_argument("--name", help="the model's, for the picture")
    parser.add_argument("--text", type=Path, help="what the model reads")
    parser.add_argument(
        "--ratios",
        type=lambda text: tuple(float(part) for part in text.split(",")),
        default=RATIOS,
        help="K/V over what is left, ascending",
    )
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--out", type=Path, required=True, help="for small_gpu.json and pictures")
    parser.add_argument(
        "--earlier", type=Path, help="small_gpu.json of a run; the faster of both is kept"
    )
    options = parser.parse_args()
    earlier = None if options.earlier is None else json.loads(options.earlier.read_text())
    serving.prefer_library(ROOT / "build/release/daemon/spillwayd")
    bench = Bench(options)
    config = bench.model.config
    engine_bytes = int(options.engine * GIB)
    longest = bench.lengths[-1]
    told = prompt_memory(
        config,
        token_count=longest,
        chunk_token_count=bench.chunk,
        block_token_count=options.block,
    )
    settings: dict[str, Any] = {
        "models.sampling_seed": 0,
        "memory.limit": longest * bench.token_bytes * 5 // 4 + 2 * GIB,
        "device.name": options.device,
    }
    if bench.on_gpu:
        settings["device.gpu_memory_limit"] = engine_bytes
    with spillway_kv.connect("embedded:", settings=settings) as client:
        records: list[dict[str, Any]] = [
            {
                "name": "environment",
                "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "device": client.server_info.devices[0].description,
                **told_model(options, bench.factor),
                "weight_bytes": sum(p.nbytes for p in bench.model.parameters()),
                "token_bytes": bench.token_bytes,
                "left_bytes": bench.left,
                "engine_bytes": engine_bytes,
                "limited": bench.on_gpu,
                "chunk": bench.chunk,
                "prompt_memory": told._asdict(),
            }
        ]
        print(json.dumps(records[0]), flush=True)
        if earlier is not None:
            # Check this first, because the measurements take minutes.
            check_alike(records[0], earlier[0])
        wanted: dict[int, Outcome] = {}

        def own(offloading: bool = False) -> Any:
            bench.model.set_attn_implementation("sdpa")
            return DynamicCache(config=config, offloading=offloading)

        def spilled() -> Any:
            bench.model.set_attn_implementation("spillway")
            return SpillwayCache(config, client, prefill_block_token_count=options.block)

        # Warm up: memory that libraries allocate at first use must not count for any way.
        bench.limit(None)
        for make in (own, spilled):
            cache = make()
            bench.run(cache, bench.lengths[0])
            if isinstance(cache, SpillwayCache):
                cache.close()
            del cache
        given: tuple[Any, ...] = (options.seconds, wanted, records)
        # Runs at all lengths, because the others are compared with it. The first pass is not
        # recorded: torch's attention makes a plan for every new length, which takes longer than a
        # step.
        measure(bench, WHOLE, own, None, math.inf, wanted, [])
        measure(bench, WHOLE, own, None, math.inf, wanted, records)
        measure(bench, RESIDENT, own, bench.left, *given)
        if bench.on_gpu:
            measure(bench, OFFLOADED, lambda: own(True), bench.left, *given)
        measure(bench, SPILLWAY, spilled, bench.left - engine_bytes, math.inf, wanted, records)
        bench.limit(None)
        records[0]["engine_gpu_bytes"] = client.get_server_info().devices[0].memory_used_bytes
    if earlier is not None:
        records = merged(records, earlier)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "small_gpu.json").write_text(json.dumps(records, indent=2) + "\n")
    plot(records, options.out / "small_gpu.png")
    plot_decoding(records, options.out / "decoding.png")
    wrong = [(r["name"], r["tokens"]) for r in records if is_wrong(r)]
    if wrong:
        print(f"small_gpu: attention differs from the reference: {wrong}")
    # Only Spillway's errors fail this program, not those of transformers' caches.
    if any(name == SPILLWAY for name, _ in wrong):
        sys.exit(1)
    reached = [r["tokens"] for r in records if r["name"] == SPILLWAY and "step_ms" in r]
    if longest not in reached:
        sys.exit(f"small_gpu: Spillway has not read {longest} tokens")


if __name__ == "__main__":
    main()
