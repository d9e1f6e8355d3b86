"""Times the forward pass of a prompt through transformers, with appends in parallel.

A Llama of an 8B shape with random weights, bf16, batch 1: with transformers' own cache in
GPU memory, and with SpillwayCache and an engine in this process or a daemon, both also
with each append before the next layer (`in turn`). With --threads the daemon is also
measured with other numbers of append threads. Prints the seconds of each repetition; the
first includes the warm-up.

    python bench/gpu/prefill.py [--tokens 32768] [--layers 8]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import spillway_kv
import torch
from spillway_kv.lab import serving
from spillway_kv.transformers import SpillwayCache, appends
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

ROOT = Path(__file__).resolve().parents[2]
VOCABULARY = 1024


def in_turn(
    self: appends.Appends,
    sequence: spillway_kv.Sequence,
    layer: int,
    start: int,
    k: torch.Tensor,
    v: torch.Tensor,
) -> None:
    sequence.append(layer, start, k, v)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden-size", type=int, default=4096)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--device", default="cuda:0", help="the daemon's and the model's")
    parser.add_argument("--threads", action="store_true", help="several numbers of them, too")
    options = parser.parse_args()
    device = torch.device(options.device)
    config = LlamaConfig(
        hidden_size=options.hidden_size,
        intermediate_size=options.hidden_size * 7 // 2,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        num_hidden_layers=options.layers,
        vocab_size=VOCABULARY,
        max_position_embeddings=options.tokens,
        attn_implementation="sdpa",
    )
    torch.manual_seed(1)
    with device:
        model: Any = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).eval()
        ids = torch.randint(VOCABULARY, (1, options.tokens))
    row_bytes = 2 * 2 * 8 * 128 * options.tokens * options.layers
    print(f"{row_bytes / 1e9:.2f} GB of K/V")

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def measure(name: str, make: Callable[[], Any]) -> None:
        seconds = []
        for _ in range(options.repetitions):
            cache = make()
            wait()
            begin = time.perf_counter()
            with torch.no_grad():
                model(ids, past_key_values=cache, logits_to_keep=1)
            if isinstance(cache, SpillwayCache):
                # Appends may continue after the forward pass. Reading `sequences` waits for them.
                assert cache.sequences
            wait()
            seconds.append(time.perf_counter() - begin)
            if isinstance(cache, SpillwayCache):
                stored = cache.sequences[0].token_count
                if stored != options.tokens:
                    raise RuntimeError(f"{stored} tokens are in the daemon")
                cache.close()
        print(f"{name:24}" + "".join(f"{s:8.2f}" for s in seconds), flush=True)

    measure("transformers, resident", lambda: DynamicCache(config=config))
    model.set_attn_implementation("spillway")
    limit = 2 * row_bytes + (4 << 30)
    settings = {"memory.limit": limit, "device.name": options.device}
    with spillway_kv.connect("embedded:", settings=settings) as embedded:

        def make_embedded() -> SpillwayCache:
            return SpillwayCache(config, embedded)

        measure("spillway, embedded", make_embedded)
        with patch.object(appends.Appends, "start", in_turn):
            measure("embedded, in turn", make_embedded)
    binary = serving.find_binary(ROOT)
    flags = ("--device", options.device, "--memory-limit", str(limit))
    with (
        tempfile.TemporaryDirectory(prefix="spillway-bench-") as folder,
        serving.running_daemon(binary, Path(folder) / "log", *flags, timeout=60) as target,
        spillway_kv.connect(target) as client,
    ):

        def make() -> SpillwayCache:
            return SpillwayCache(config, client)

        measure("spillway, daemon", make)
        with patch.object(appends.Appends, "start", in_turn):
            measure("in turn", make)
        for count in (1, 2, 3, 4, 6) if options.threads else ():
            with patch.object(appends, "_THREAD_COUNT", count):
                measure(f"{count} threads", make)


if __name__ == "__main__":
    main()
