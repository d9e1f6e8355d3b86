"""Times fetches of rows by the Python client: by messages, into a region, in the same process.

Starts a daemon. Appends float16 rows of 8 layers of 8 KV heads of 128, 1 GiB, once, and then
fetches them with one call per layer: all tokens, and a random tenth of them as a selection. On a
GPU, an embedded engine also fetches into CUDA tensors, one layer after the other and two at once.
The bytes of every fetch are compared with those that were appended. For comparison: one thread's
copy of the same bytes and, on a GPU, its copy from pinned memory. The ways take turns. Prints
medians, one JSON object per line.

    python bench/rpc/python_fetch.py [--device cpu] [--tokens 32768]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import spillway_kv
import torch
from bulk import HEAD_DIM, KV_HEADS, LAYERS, REPETITIONS, report, seconds
from spillway_kv import Client, Selection, Sequence
from spillway_kv.lab import serving

ROOT = Path(__file__).resolve().parents[2]


class Way(NamedTuple):
    """A sequence to fetch, and the target: K and V [2, LAYERS, KV_HEADS, T, HEAD_DIM]."""

    sequence: Sequence
    target: Any


def filled(client: Client, source: Any) -> Sequence:
    """A new sequence with these rows and without codes."""
    model = client.create_model(
        layer_count=LAYERS,
        query_head_count=KV_HEADS,
        kv_head_count=KV_HEADS,
        head_dim=HEAD_DIM,
        dtype="float16",
        hash_weights=None,
    )
    sequence = client.create_sequence(model)
    sequence.append(0, 0, *source)
    return sequence


def like(source: Any, target: Any) -> Any:
    """The source on the device of the target, so that they can be compared there."""
    return source if isinstance(target, np.ndarray) else torch.from_numpy(source).to(target.device)


def check(got: Any, expected: Any) -> None:
    """Raises unless all bytes are equal."""
    # All elements are finite and none is -0, so equal elements have equal bytes.
    if not bool((got == expected).all()):
        raise SystemExit("a fetch brought other rows than were appended")


def fetch_all(way: Way, source: Any) -> float:
    """Seconds of fetching all tokens of all layers."""
    sequence, target = way
    target[:] = 0
    tokens = target.shape[3]
    took = 0.0
    for layer in range(LAYERS):
        into = target[0, layer], target[1, layer]
        took += seconds(lambda into=into, layer=layer: sequence.fetch(layer, 0, tokens, into=into))  # type: ignore[misc]
    check(target, like(source, target))
    return took


def fetch_two_at_once(way: Way, source: Any) -> float:
    """The same with two threads, so that one makes a call while the other's rows are copied."""
    sequence, target = way
    target[:] = 0
    torch.cuda.synchronize()
    tokens = target.shape[3]

    def fetch(layer: int) -> None:
        sequence.fetch(layer, 0, tokens, into=(target[0, layer], target[1, layer]))

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda _: time.sleep(0.01), range(2)))  # starts both threads
        took = seconds(lambda: list(threads.map(fetch, range(LAYERS))))
    check(target, like(source, target))
    return took


def fetch_chosen(way: Way, source: Any, heads: list[Any]) -> float:
    """Seconds of fetching the selected rows of all layers."""
    sequence, target = way
    offsets = np.cumsum([0, *map(len, heads)])
    chosen = Selection(offsets=offsets, indices=np.concatenate(heads))
    took = 0.0
    for layer in range(LAYERS):
        k, v = (side.reshape(-1, HEAD_DIM)[: offsets[-1]] for side in target[:, layer])
        k[:] = v[:] = 0
        took += seconds(
            lambda into=(k, v), layer=layer: sequence.fetch(layer, selection=chosen, into=into)  # type: ignore[misc]
        )
        for got, rows in ((k, source[0, layer]), (v, source[1, layer])):
            expected = np.concatenate([rows[h, head] for h, head in enumerate(heads)])
            check(got, like(expected, target))
    return took


def link_seconds(source: Any) -> float:
    """Seconds of a copy from pinned memory to the GPU."""
    pinned = torch.from_numpy(source).pin_memory()
    there = torch.empty_like(pinned, device="cuda")

    def copy() -> None:
        there.copy_(pinned, non_blocking=True)
        torch.cuda.synchronize()

    copy()
    return min(seconds(copy) for _ in range(3))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--ways", nargs="+", help="only those that begin so, as they are named")
    arguments = parser.parse_args()
    on_gpu = arguments.device.startswith("cuda")
    rng = np.random.default_rng(0)
    shape = (2, LAYERS, KV_HEADS, arguments.tokens, HEAD_DIM)
    source = rng.random(shape, np.float32).astype(np.float16)
    heads = [
        np.flatnonzero(rng.random(arguments.tokens) < 0.1).astype(np.uint32)
        for _ in range(KV_HEADS)
    ]
    share = sum(map(len, heads)) / KV_HEADS / arguments.tokens
    copy = np.zeros_like(source)
    flags = ("--device", arguments.device)
    settings = {"device.name": arguments.device}
    with (
        tempfile.TemporaryDirectory() as folder,
        serving.running_daemon(
            serving.find_binary(ROOT), Path(folder, "log"), *flags, timeout=60
        ) as target,
        spillway_kv.connect(target) as daemon,
        spillway_kv.connect("embedded:", settings=settings) as embedded,
    ):
        # Only fetches into the region's array use the region. Those into `copy` use messages.
        shared = daemon.attach_region(source.nbytes).array(source.shape, np.float16)
        shared[:] = source
        theirs, mine = filled(daemon, shared), filled(embedded, source)
        ways = {"messages": Way(theirs, copy), "region": Way(theirs, shared)}
        ways["embedded"] = Way(mine, copy)
        if on_gpu:
            there = torch.zeros(shape, dtype=torch.float16, device=arguments.device)
            ways["embedded, CUDA"] = Way(mine, there)
        for name in [*ways] if arguments.ways else ():
            if not name.startswith(tuple(arguments.ways)):
                del ways[name]
        times: dict[str, list[float]] = {}
        for repetition in range(REPETITIONS + 1):
            took = {"memcpy": seconds(lambda: np.copyto(copy, source))}
            for name, way in ways.items():
                took[f"{name}, all tokens"] = fetch_all(way, source)
                took[f"{name}, a tenth of them"] = fetch_chosen(way, source, heads)
                if name == "embedded, CUDA":
                    told = f"{name}, all tokens, two layers at once"
                    took[told] = fetch_two_at_once(way, source)
            if on_gpu:
                took["link"] = link_seconds(source)
            # The first repetition is a warm-up.
            for name, one in took.items() if repetition else ():
                times.setdefault(name, []).append(one)
    report(mebibytes=source.nbytes >> 20, device=arguments.device, repetitions=REPETITIONS)
    rates = {
        name: source.nbytes
        * (share if name.endswith("them") else 1)
        / statistics.median(many)
        / 1e9
        for name, many in times.items()
    }
    for name, rate in rates.items():
        beside = "link" if "CUDA" in name or name == "link" else "memcpy"
        report(
            name=name, gb_per_s=round(rate, 2), **{f"of_{beside}": round(rate / rates[beside], 2)}
        )


if __name__ == "__main__":
    main()
