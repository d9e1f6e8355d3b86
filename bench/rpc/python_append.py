"""Times bulk appends of the Python client: by messages, by regions, to an embedded engine.

Starts a daemon. Appends float16 rows of 8 layers of 8 KV heads of 128 to a model without codes
(`rows alone`), with codes of keys of 3 bits a dimension (`with codes`), and with codes of values of
2 bits too (`with codes of values`), in memory that the engine has used before. Some rows are read
back and compared. On a GPU, CUDA tensors are appended too: to an embedded engine, also into new
memory that it gets from the system and pins during the append; and to the daemon, from a region of
its GPU and through the client's own region. For comparison: one thread's copy of the same bytes
(`memcpy`) and the GPU's copy to pinned memory (`link`). The ways take turns. Prints medians, one
JSON object per line.

    python bench/rpc/python_append.py [--device cpu] [--tokens 16384]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import spillway_kv
import torch
from bulk import HEAD_DIM, KV_HEADS, LAYERS, REPETITIONS, report, seconds
from spillway_kv import Client
from spillway_kv.lab import serving

ROOT = Path(__file__).resolve().parents[2]


# What a model has besides rows.
KINDS = {
    "rows alone": None,
    "with codes": spillway_kv.RotationHash(),
    "with codes of values": spillway_kv.RotationHash(value_bits=2),
}


def append(client: Client, k: Any, v: Any, kind: str, new_memory: bool = False) -> float:
    """Seconds of one append to a new sequence of a model of KINDS.

    Without new_memory, the sequence uses memory that another one used before. With new_memory, it
    must be the client's first sequence.
    """
    model = client.create_model(
        layer_count=LAYERS,
        query_head_count=KV_HEADS,
        kv_head_count=KV_HEADS,
        head_dim=HEAD_DIM,
        dtype="float16",
        hash_weights=KINDS[kind],
    )
    # The first sequence gets memory from the system. The second uses it after the first is deleted.
    if not new_memory:
        first = client.create_sequence(model)
        first.append(0, 0, k, v)
        first.delete()
    sequence = client.create_sequence(model)
    took = seconds(lambda: sequence.append(0, 0, k, v))
    chosen = spillway_kv.Selection(
        offsets=np.arange(KV_HEADS + 1) * 2,
        indices=np.tile(np.array([0, k.shape[2] - 1], np.uint32), KV_HEADS),
    )
    for rows, given in zip(
        sequence.fetch(LAYERS - 1, selection=chosen, like=k), (k, v), strict=True
    ):
        for h in range(KV_HEADS):
            for row, token in zip(rows[2 * h : 2 * h + 2], (0, -1), strict=True):
                assert (row == given[-1, h, token]).all()
    sequence.delete()
    client.delete_model(model)
    return took


def link_seconds(source: Any) -> float:
    """Seconds of a copy from the GPU to pinned memory."""
    there = torch.from_numpy(source).cuda()
    pinned = torch.empty(source.shape, dtype=torch.float16, pin_memory=True)
    pinned.copy_(there)

    def copy() -> None:
        pinned.copy_(there)
        torch.cuda.synchronize()

    return min(seconds(copy) for _ in range(3))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--ways", nargs="+", help="only those that begin so, as they are named")
    arguments = parser.parse_args()
    binary = serving.find_binary(ROOT)
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((2, LAYERS, KV_HEADS, arguments.tokens, HEAD_DIM), np.float32)
    source = rows.astype(np.float16)
    del rows
    copy = np.zeros_like(source)
    gigabytes = source.nbytes / 1e9
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        flags = ("--device", arguments.device)
        with serving.running_daemon(binary, log, *flags, timeout=60) as target:
            with (
                spillway_kv.connect(target) as messages,
                spillway_kv.connect(target) as regions,
                spillway_kv.connect(
                    "embedded:", settings={"device.name": arguments.device}
                ) as embedded,
            ):
                shared = regions.attach_region(source.nbytes).array(source.shape, np.float16)
                shared[:] = source
                messages.connection.regions.staged_bytes_min = 1 << 62
                ways = {"messages": (messages, source), "region": (regions, shared)}
                ways["the client's own region"] = (regions, source)
                ways["embedded"] = (embedded, source)
                on_gpu = arguments.device.startswith("cuda")
                if on_gpu:
                    there = torch.from_numpy(source).to(arguments.device)
                    ways["embedded, CUDA"] = (embedded, there)
                    ways["daemon, CUDA, by the client's own region"] = (regions, there)
                    region = regions.attach_region(source.nbytes, device=arguments.device)
                    ways["daemon, CUDA, region"] = (
                        regions,
                        region.tensor(source.shape, "float16").copy_(there),
                    )
                for name in [*ways] if arguments.ways else ():
                    if not name.startswith(tuple(arguments.ways)):
                        del ways[name]
                times: dict[str, list[float]] = {}
                for repetition in range(REPETITIONS + 1):
                    took = {"memcpy": seconds(lambda: np.copyto(copy, source))}
                    for name, (client, (k, v)) in ways.items():
                        for kind in KINDS:
                            took[f"{name}, {kind}"] = append(client, k, v, kind)
                    if on_gpu:
                        took["link"] = link_seconds(source)
                        for kind in KINDS:
                            settings = {"device.name": arguments.device}
                            with spillway_kv.connect("embedded:", settings=settings) as new:
                                took[f"CUDA, new memory, {kind}"] = append(
                                    new, *there, kind, new_memory=True
                                )
                    # The first repetition is a warm-up.
                    for name, one in took.items() if repetition else ():
                        times.setdefault(name, []).append(one)
    memcpy = statistics.median(times["memcpy"])
    report(mebibytes=source.nbytes >> 20, device=arguments.device, repetitions=REPETITIONS)
    for name, many in times.items():
        median = statistics.median(many)
        report(
            name=name,
            gb_per_s=round(gigabytes / median, 2),
            of_memcpy=round(memcpy / median, 2),
        )


if __name__ == "__main__":
    main()
