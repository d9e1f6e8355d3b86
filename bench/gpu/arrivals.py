"""Decodes requests that arrive at random: time of a token and wait for the first one, by load.

Requests arrive by a Poisson process, with prompts of `--tokens` less the most new tokens, and
decode a number of tokens that is uniform between the two of --new-tokens. Their prompts are there
already: each takes one of --slots sequences that were prepared before, decodes, and gives it back,
truncated to its prompt. Between steps requests join and leave (continuous batching). A request
waits while all slots are taken.

The steps are real, of --layers layers of an 8B shape (bench/gpu/capacity.py), by
`spillway_kv.decoding.Decoding`, as the vLLM plugin has it: a decoder is opened whenever the set of
sequences changes. The clock does not run by itself: a step advances it by the time that 32 layers
would take on the GPU, scaled from the measured ones, the time to read the weights, and the host's
time to open the decoder, which is not scaled. Attends are enqueued one by one while the GPU is kept
busy, so their launches are not counted, as in a graph of the model; what the host needs to put a
new decoder into such a graph is not counted either.

Dense attention has K/V in GPU memory and as many slots as fit beside the weights. Its time is
measured for each number of sequences, all padded to the longest, and the same requests are served
by that clock. FP8 is computed: half of the time of bf16, and twice the slots.

The rates are --shares of the capacity of the ways in --of: what a way decodes with all slots taken,
while requests leave and others join. A JSON line for each way and rate, the highest first; `share`
is that of the way's own capacity, and above 1 its queue grows as long as the run lasts. The first
fifth of the requests is not counted. `--device cpu` tries the program without a GPU: its times mean
nothing.

    python bench/trace_data.py --tokens 131072 --lengths 61696 65536 124928 --output FOLDER
    python bench/gpu/arrivals.py FOLDER
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dense
import torch
from arrivals_queue import Request, full_step_s, poisson, serve, summary
from capacity import ROW_TYPES, error_fields
from many import DIM, HEADS, KV_HEADS, DenseRows, Rows, Sequences, engine, ran_on
from model_like import Shape, Trace, exact, relative_errors
from spillway_kv.decoding import Decoding
from timing import AHEAD_CYCLES, copy_bytes_per_s, timed
from whole_model import WholeModel, dense_bytes, fitting

# For so many steps after its opening, a decoder makes graphs of its layers. So long the GPU is kept
# busy before the attends of such a step: some 5 ms.
FIRST_STEPS = 4
FIRST_AHEAD_CYCLES = 10 * AHEAD_CYCLES
# Outputs of one request are compared with exact attention in every so many steps.
CHECKED_EVERY = 16
DENSE_BF16, DENSE_FP8 = "dense bf16", "dense fp8"


class Live:
    """Decode steps of whatever requests there are.

    Attributes:
        errors: Relative errors of the outputs that were compared.
        open_ms: The host's time to open each decoder.
        layer_us: Of each step: requests, whether a decoder was opened, microseconds of a layer.
    """

    def __init__(self, sequences: Sequences, slots: int, whole: WholeModel) -> None:
        self._sequences, self._rows, self._whole = sequences, sequences.rows, whole
        sequences.grow(slots)
        device, layers = self._rows.device, len(self._rows.layers)
        self._decoding = Decoding(sequences.client, length_max=self._rows.trace.tokens)
        # The layers' tensors are in the same memory in all steps.
        self._held = [
            tuple(
                torch.empty(shape, dtype=torch.bfloat16, device=device)
                for shape in (
                    (slots, 1, HEADS, DIM),
                    (slots, KV_HEADS, 1, DIM),
                    (slots, KV_HEADS, 1, DIM),
                    (slots, 1, HEADS, DIM),
                )
            )
            for _ in range(layers)
        ]
        # Slots of the step before, and how many steps they have stayed the same.
        self._before: list[int] = []
        self._same = 0
        self.clear()

    def clear(self) -> None:
        """Forgets what was measured."""
        self.errors: list[float] = []
        self.open_ms: list[float] = []
        self.layer_us: list[tuple[int, bool, float]] = []

    def step(self, active: list[Request]) -> float:
        """Decodes a token of each request. Returns seconds of the whole model's step."""
        rows, count = self._rows, len(active)
        device = rows.device
        made = torch.tensor([request.made for request in active], device=device)
        slots = [request.slot for request in active]
        turns = (torch.tensor(slots, device=device) + made) % rows.cycle
        for layer, held in enumerate(self._held):
            new = rows.inputs(layer, turns, rows.prompt + made)
            for to, x in zip(held, new, strict=False):
                to[:count].copy_(x)
        if device.type == "cuda":
            torch.cuda.synchronize()
        changed = slots != self._before
        begin = time.perf_counter()
        self._decoding.begin(
            [self._sequences.all[slot] for slot in slots],
            [rows.prompt + request.made for request in active],
            device=device,
        )
        open_s = time.perf_counter() - begin if changed else 0.0
        if device.type == "cuda" and not self._decoding.has_decoder:
            raise RuntimeError(f"no decoder for {count} sequences")

        def attends() -> None:
            for layer, (q, k, v, out) in enumerate(self._held):
                self._decoding.attend(layer, q[:count], k[:count], v[:count], out[:count])

        self._same = 0 if changed else self._same + 1
        ahead = FIRST_AHEAD_CYCLES if self._same < FIRST_STEPS else AHEAD_CYCLES
        us = timed(attends, device, ahead_cycles=ahead, cold=True) / len(self._held)
        self._decoding.end()
        self._before = slots
        if changed:
            self.open_ms.append(1000 * open_s)
        self._check(active, turns)
        self.layer_us.append((count, changed, us))
        return 1e-6 * self._whole.step_us(us) + open_s

    def _check(self, active: list[Request], turns: torch.Tensor) -> None:
        """Looks at all outputs, and compares those of one request from time to time."""
        count = len(active)
        for *_, out in self._held:
            if not out[:count].isfinite().all():
                raise RuntimeError(f"an output of {count} requests is not finite")
        if len(self.layer_us) % CHECKED_EVERY:
            return
        at = len(self.layer_us) // CHECKED_EVERY % count
        tokens = self._rows.prompt + active[at].made + 1
        for layer, (k, v) in enumerate(self._rows.layers):
            q = self._rows.queries[layer][turns[at]][None]
            right = exact(q, k, v, tokens)
            self.errors += relative_errors(self._held[layer][3][at], right)

    def give_back(self, done: list[Request]) -> None:
        """Removes what requests have decoded."""
        self._decoding.release()
        self._before = []
        for request in done:
            self._sequences.all[request.slot].truncate(self._rows.prompt)

    def told(self) -> dict[str, Any]:
        """Fields of a record about the steps since `clear`."""
        kinds = {
            name: [us for _, changed, us in self.layer_us if changed == wanted]
            for name, wanted in (("layer_us", False), ("layer_us_after_opening", True))
        }
        return {
            **{name: round(statistics.median(us), 1) for name, us in kinds.items() if us},
            "decoders_opened": len(self.open_ms),
            "open_ms": round(statistics.median(self.open_ms), 2),
            **error_fields(self.errors),
        }


def dense_table(rows: Rows, most: int) -> list[float]:
    """Microseconds of a layer of dense attention in bf16, for 1 to `most` sequences."""
    held = DenseRows(rows, most)
    table = []
    for count in range(1, most + 1):
        served, _ = dense.fastest(dense.bf16_candidates(rows.device), *held.batch(count))
        table.append(statistics.median(served.step() for _ in range(8)))
    return table


class Way:
    """One way to serve requests.

    Attributes:
        name: Its name.
        slots: How many requests decode at once.
        full_step_s: Mean seconds of a step with all slots taken.
        capacity: Requests a second with all slots taken.
    """

    def __init__(
        self, name: str, slots: int, steps: Live | list[float], tokens: tuple[int, int]
    ) -> None:
        """steps: real ones, or the seconds of a step of 1 to `slots` requests."""
        self.name, self.slots = name, slots
        self._live = steps if isinstance(steps, Live) else None
        self._step: Callable[[list[Request]], float]
        self._give_back: Callable[[list[Request]], None]
        if isinstance(steps, Live):
            self._step, self._give_back = steps.step, steps.give_back
        else:
            table = steps
            self._step = lambda active: table[len(active) - 1]
            self._give_back = lambda done: None
        self.full_step_s = full_step_s(slots, tokens, self._step, self._give_back)
        self.capacity = slots / self.full_step_s / (sum(tokens) / 2)

    def run(self, requests: list[Request]) -> dict[str, Any]:
        """Serves requests. Returns the fields of a record."""
        if self._live:
            self._live.clear()
        counts = serve(requests, self.slots, self._step, self._give_back)
        return {
            **summary(requests, len(requests) // 5),
            "steps": len(counts),
            "sequences_mean": round(statistics.mean(counts), 1),
            **(self._live.told() if self._live else {}),
        }


def dense_ways(
    rows: Rows, whole: WholeModel, slots: dict[str, int], tokens: tuple[int, int]
) -> list[Way]:
    """Dense attention in bf16, and in FP8 as computed from it."""
    table = dense_table(rows, max(slots.values()))
    half = [us / 2 for us in table]
    return [
        Way(name, slots[name], [1e-6 * whole.step_us(us) for us in of_name[: slots[name]]], tokens)
        for name, of_name in ((DENSE_BF16, table), (DENSE_FP8, half))
        if slots[name]
    ]


class Runs:
    """Serves the same requests in each way, and prints the records."""

    def __init__(self, options: argparse.Namespace, told: dict[str, Any]) -> None:
        self._options, self._told = options, told
        # Capacities, requests a second.
        self.capacities: dict[str, float] = {}

    def know(self, way: Way) -> None:
        """Takes the way's capacity."""
        self.capacities[way.name] = way.capacity

    def rates(self) -> list[float]:
        """The rates of arrival, requests a second. Those of the longest runs come last."""
        of = [each for name, each in self.capacities.items() if name in self._options.of]
        return sorted({round(share * each, 4) for each in of for share in self._options.shares})[
            ::-1
        ]

    def serve(self, way: Way) -> None:
        """Serves the requests of each rate."""
        options, own = self._options, self.capacities[way.name]
        for rate in self.rates():
            requests = poisson(rate, options.requests, tuple(options.new_tokens), options.seed)
            record = {
                "way": way.name,
                **({"computed": "half of the time of dense bf16"} if way.name == DENSE_FP8 else {}),
                "requests_per_s": rate,
                "share": round(rate / own, 3),
                "shares": {n: round(rate / each, 3) for n, each in self.capacities.items()},
                "capacity_requests_per_s": round(own, 4),
                "slots": way.slots,
                "full_step_ms": round(1000 * way.full_step_s, 2),
                **way.run(requests),
                **self._told,
            }
            print(json.dumps(record), flush=True)


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="of bench/trace_data.py")
    parser.add_argument("--tokens", type=int, default=61696, help="prompt and most new tokens")
    parser.add_argument("--new-tokens", type=int, nargs=2, default=[64, 256])
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--slots", type=int, default=48, help="sequences of Spillway")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.5, 0.7, 0.85, 0.95])
    parser.add_argument("--of", nargs="+", default=["spillway bf16"])
    parser.add_argument("--row-types", nargs="+", default=["bf16"], choices=list(ROW_TYPES))
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--memory-gib", type=int, default=100, help="of the engine, in the host")
    parser.add_argument("--gpu-gb", type=float, default=141, help="memory of the GPU, GB")
    parser.add_argument("--dense-slots", type=int, help="in bf16, instead of what fits")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--commit", default="", help="for the records")
    parser.add_argument("--device", default="cuda:0")
    options = parser.parse_args(arguments)
    least, most = options.new_tokens
    if not 1 < least <= most < options.tokens:
        raise SystemExit(f"--new-tokens {least} {most}: not 1 < {least} <= {most} < --tokens")
    for name in ("requests", "slots", "layers", "memory_gib"):
        if getattr(options, name) < 1:
            raise SystemExit(f"--{name.replace('_', '-')} {getattr(options, name)} is less than 1")
    for share in options.shares:
        if not share > 0:
            raise SystemExit(f"--shares: {share} is not above 0")
    known = {DENSE_BF16, DENSE_FP8, *(f"spillway {name}" for name in options.row_types)}
    for name in options.of:
        if name not in known:
            raise SystemExit(f"--of: {name!r} is not one of {sorted(known)}")
    return options


def main() -> None:
    options = parsed()
    device = torch.device(options.device)
    on_gpu = device.type == "cuda"
    whole = WholeModel(
        1e9 * options.gpu_gb, copy_bytes_per_s(device, 4 << 30 if on_gpu else 1 << 26)
    )
    if on_gpu:
        torch.cuda.empty_cache()
    trace = Trace(options.folder, options.tokens, Shape(HEADS, KV_HEADS, DIM, options.layers))
    new_tokens = tuple(options.new_tokens)
    rows = Rows(trace, device, new_tokens[1])
    fit = {
        DENSE_BF16: fitting(whole.free_bytes, dense_bytes(options.tokens, 2)),
        DENSE_FP8: fitting(whole.free_bytes, dense_bytes(options.tokens, 1)),
    }
    if options.dense_slots is not None:
        fit = {DENSE_BF16: options.dense_slots, DENSE_FP8: 2 * options.dense_slots}
    runs = Runs(
        options,
        {
            "prompt": rows.prompt,
            "new_tokens": options.new_tokens,
            "layers": options.layers,
            "scaled": f"32 x a layer of {options.layers} measured, weights_ms, and the opening of "
            "decoders",
            "weights_ms": round(whole.weights_us / 1000, 2),
            **ran_on(device, options.commit),
        },
    )
    dense_of = dense_ways(rows, whole, fit, new_tokens)
    for way in dense_of:
        runs.know(way)
    if on_gpu:
        torch.cuda.empty_cache()
    with engine(options.device, options.memory_gib) as client:
        lives = []
        for name in options.row_types:
            sequences = Sequences(client, rows, ROW_TYPES[name])
            live = Live(sequences, options.slots, whole)
            lives.append(Way(f"spillway {name}", options.slots, live, new_tokens))
            runs.know(lives[-1])
        for way in (*dense_of, *lives):
            runs.serve(way)


if __name__ == "__main__":
    main()
