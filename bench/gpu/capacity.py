"""Tokens a second of an 8B shape on one GPU, as sequences are added.

32 query heads over 8 KV heads of 128 in bf16, over model-like K/V (bench/trace_data.py), default
policy. --layers of them are measured, in one CUDA graph, and scaled to 32 layers; the time to read
16 GB of weights once is added, at the rate of a copy within the GPU's memory. Each record says so
in `scaled`. Nothing else of a model is counted. Ways:

- `spillway bf16`, `spillway int8`: rows in host memory, in bf16 and in 8 bits. The new token's
  append is a part of the time.
- `dense bf16`: torch's attention over K/V in GPU memory: the fastest of cuDNN and flash, over
  the batch or one sequence after the other. Without the append.
- `dense fp8`: vLLM's FlashAttention 3 if it can be imported (`measured`), else half of the time of
  `dense bf16` (`computed`).

All sequences have memory of their own. Besides --sequences, the counts are measured at which the
memory of each way is full. Times are on the GPU, between events around all layers, with its cache
emptied before each step; `layer_us` is the median over cycles of the data's queries. Errors are
those of each head's output against exact attention. Bytes are those that the engine reports, scaled
to 32 layers.

A JSON line for each point; one that cannot be measured here has `skipped`, and says why. With
--link-load R, another process copies R GB/s to the GPU, and dense attention is left out.
`--device cpu` tries the program without a GPU: its times mean nothing.

    python bench/trace_data.py --tokens 131072 --lengths 65536 124928 --output FOLDER
    python bench/gpu/capacity.py FOLDER --tokens 65536 124928
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import dense
import numpy as np
import spillway_kv
import torch
from dense import Layers
from link_load import LinkLoad
from many import DIM, HEADS, KV_HEADS, DenseRows, Rows, Sequences, engine, ran_on
from model_like import Shape, Trace
from spillway_kv.lab.size.layout import Layout, gpu_slab_bytes
from spillway_kv.row_types import RowType, row_bytes
from timing import copy_bytes_per_s
from whole_model import (
    GIB,
    HOSTS_GIB,
    LAYERS,
    WholeModel,
    dense_bytes,
    ends,
    fitting,
    of_all_layers,
)

ROW_TYPES: dict[str, RowType] = {"bf16": "model", "int8": "int8"}
# A larger median error shows that something is broken. The policy's epsilon.
ERROR_MEDIAN_MAX = 0.1


def cycles(step: Callable[[int], float], count: int, first: int, length: int) -> list[float]:
    """The mean of each of `count` cycles of `length` steps from step `first` on."""
    return [
        statistics.mean(step(first + cycle * length + at) for at in range(length))
        for cycle in range(count)
    ]


def decoded(cycles: int, length: int) -> int:
    """Tokens that a point decodes: a cycle before the timed ones, and one after them."""
    return length * (cycles + 2)


def counts_of(given: Iterable[int], at_end: dict[str, int]) -> list[int]:
    """The counts to measure: those given, and those at which a way's memory is full."""
    return sorted({*given, *at_end.values()} - {0})


def times(us: list[float], sequences: int, whole: WholeModel, layers: int) -> dict[str, Any]:
    """The fields of a record that follow from the times of a layer."""
    layer_us = statistics.median(us)
    return {
        "layer_us": round(layer_us, 1),
        "layer_p90_us": round(float(np.percentile(us, 90)), 1),
        "step_ms": round(whole.step_us(layer_us) / 1000, 2),
        "tokens_per_s": round(whole.tokens_per_s(sequences, layer_us), 1),
        "scaled": f"{LAYERS} x a layer of {layers} measured, and weights_ms",
        "weights_ms": round(whole.weights_us / 1000, 2),
    }


def memory(
    host_bytes: int, gpu_bytes: int, workspace_bytes: int, sequences: int, whole: WholeModel
) -> dict[str, Any]:
    """The fields about memory. Bytes are of all sequences and layers, workspaces are shared.

    `sequences_max`: how many fit, None where they take none of that memory.
    """
    room = whole.free_bytes - workspace_bytes
    most: dict[str, int | None] = {"gpu": fitting(room, gpu_bytes / sequences)}
    for gib in HOSTS_GIB:
        each = host_bytes / sequences
        most[f"host_{gib}_gib"] = fitting(gib * GIB, each) if host_bytes else None
    return {
        "host_bytes": host_bytes,
        "gpu_bytes": gpu_bytes,
        "workspace_bytes": workspace_bytes,
        "fits_gpu": gpu_bytes <= room,
        **{f"fits_host_{gib}_gib": host_bytes <= gib * GIB for gib in HOSTS_GIB},
        "sequences_max": most,
    }


def error_fields(errors: list[float], median_max: float = ERROR_MEDIAN_MAX) -> dict[str, Any]:
    """Median and worst error. median_max: a larger median is no error of the method.

    Raises:
        RuntimeError: The outputs are wrong.
    """
    median, worst = float(np.median(errors)), max(errors)
    if not (median <= median_max and worst < 1):
        raise RuntimeError(f"outputs are wrong: relative error {median:.3g}, worst {worst:.3g}")
    return {"error_median": round(median, 4), "error_max": round(worst, 4)}


class Capacity:
    """Measures all points of a length.

    Args:
        rows: The length's rows.
        whole: What they are scaled to.
        options: Of the command line.
        told: Fields of every record.
    """

    def __init__(
        self, rows: Rows, whole: WholeModel, options: argparse.Namespace, told: dict[str, Any]
    ) -> None:
        self._rows, self._whole, self._options = rows, whole, options
        self._layers, self._tokens = len(rows.layers), rows.trace.tokens
        self._told = {"layers": self._layers, **told}
        # Bytes of a token's rows in a layer.
        self._row_bytes = {
            name: KV_HEADS * row_bytes(DIM, 2, of_engine) for name, of_engine in ROW_TYPES.items()
        }
        of_all = {name: LAYERS * each for name, each in self._row_bytes.items()}
        self._ends = ends(whole, self._tokens, of_all)
        self.counts = counts_of(options.sequences, self._ends if options.ends else {})

    def _report(self, way: str, sequences: int, **fields: Any) -> None:
        record = {
            "way": way,
            "tokens": self._tokens,
            "sequences": sequences,
            **fields,
            **self._told,
        }
        print(json.dumps(record), flush=True)

    def _cycles(self, step: Callable[[int], float], first: int) -> list[float]:
        return cycles(step, self._options.cycles, first, self._rows.cycle)

    def dense(self) -> None:
        """Dense attention, in bf16 and in FP8."""
        tokens, layers = self._tokens, self._layers
        # With the copy in FP8.
        each = 3 * layers * KV_HEADS * DIM * 2 * tokens
        on_gpu = self._rows.device.type == "cuda"
        room = torch.cuda.mem_get_info()[0] if on_gpu else self._options.memory_gib * GIB
        most = fitting(0.95 * room, each)
        possible = [count for count in self.counts if count <= most]
        for count in self.counts[len(possible) :]:
            why = f"with --layers {layers} K/V in bf16 and FP8 take {count * each / GIB:.1f} GiB"
            self._report("dense bf16", count, skipped=f"{why}, {room / GIB:.1f} are free")
        if not possible:
            return
        held = DenseRows(self._rows, max(possible))
        for count in possible:
            try:
                self._dense_point(count, *held.batch(count))
            except RuntimeError as error:
                self._report("dense bf16", count, skipped=f"failed: {error}")

    def _dense_point(self, count: int, layers: Layers, right: list[torch.Tensor]) -> None:
        candidates = dense.bf16_candidates(self._rows.device)
        served, refused = dense.fastest(candidates, layers, right)
        us = self._cycles(lambda _: served.step(), 0)
        self._report(
            "dense bf16",
            count,
            measured=served.name,
            **({"refused": refused} if refused else {}),
            **times(us, count, self._whole, self._layers),
            **memory(0, count * dense_bytes(self._tokens, 2), 0, count, self._whole),
            **error_fields(served.errors),
            moved_rows=0,
        )
        fields: dict[str, Any]
        try:
            attends = dense.fp8_attends()
            of_fp8 = dense.serve(
                "FlashAttention 3 of vLLM",
                attends,
                dense.fp8_layers(layers),
                right,
                dense.FP8_ERROR_MAX,
            )
            us = self._cycles(lambda _: of_fp8.step(), 0)
            fields = {"measured": of_fp8.name, **error_fields(of_fp8.errors, dense.FP8_ERROR_MAX)}
        except (ImportError, RuntimeError) as error:
            us = [each / 2 for each in us]
            why = str(error).splitlines()[0]
            fields = {
                "computed": f"half of the time of dense bf16 ({why})",
                "error_median": None,
                "error_max": None,
            }
        self._report(
            "dense fp8",
            count,
            **times(us, count, self._whole, self._layers),
            **memory(0, count * dense_bytes(self._tokens, 1), 0, count, self._whole),
            **fields,
            moved_rows=0,
        )

    def spillway(self, name: str, load: LinkLoad | None) -> None:
        """Spillway with rows of a type."""
        way = f"spillway {name}"
        most = self._ends[f"{name}, {HOSTS_GIB[-1]} GiB"]
        with engine(self._options.device, self._options.memory_gib) as client:
            sequences = Sequences(client, self._rows, ROW_TYPES[name])
            for count in self.counts:
                needs = count * self._tokens * self._layers * self._row_bytes[name] / GIB
                if self._options.ends and count > most:
                    why = f"{HOSTS_GIB[-1]} GiB of host memory hold {most} in all layers"
                elif needs > 0.95 * self._options.memory_gib:
                    why = f"with --layers {self._layers} rows take {needs:.1f} GiB, --memory-gib is"
                    why += f" {self._options.memory_gib}"
                else:
                    why = self._spillway_point(way, sequences, count, load)
                if why:
                    self._report(way, count, skipped=why)
            sequences.delete()

    def _spillway_point(
        self, way: str, sequences: Sequences, count: int, load: LinkLoad | None
    ) -> str:
        """Measures a point. Returns why it has failed, or nothing."""
        try:
            sequences.grow(count)
            held = sequences.device_bytes() - sequences.empty_bytes
            of_rows = sequences.row_bytes()
            steps = sequences.steps(count)
        except spillway_kv.SpillwayError as error:
            return f"failed: {error}"
        cycle = self._rows.cycle
        errors: list[float] = []
        moved: list[float] = []

        def checked(first: int) -> None:
            for at in range(first, first + cycle):
                _, outs = steps.step(at)
                moved.append(steps.moved_rows())
                errors.extend(sequences.errors(outs, at))

        def measured() -> list[float]:
            return self._cycles(lambda at: steps.step(at)[0], cycle)

        try:
            checked(0)
            us = load.beside(measured) if load else measured()
            workspaces = sequences.device_bytes() - held
            checked(cycle * (self._options.cycles + 1))
            found = error_fields(errors)
        except (spillway_kv.SpillwayError, RuntimeError) as error:
            return f"failed: {error}"
        finally:
            steps.close()
            sequences.back(count)
        host = of_all_layers(of_rows, self._layers)
        whole = Layout(LAYERS, KV_HEADS, DIM, row_type=ROW_TYPES[way.removeprefix("spillway ")])
        gpu = gpu_slab_bytes(whole, self._tokens, count)
        self._report(
            way,
            count,
            **times(us, count, self._whole, self._layers),
            **memory(host, gpu, workspaces, count, self._whole),
            **found,
            moved_rows=round(statistics.mean(moved)),
            **({"load_gb_per_s": round(load.rates[-1], 1)} if load else {}),
        )
        return ""


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="of bench/trace_data.py")
    parser.add_argument("--tokens", type=int, nargs="+", default=[65536])
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 2, 4, 8, 16, 24, 32, 48])
    parser.add_argument(
        "--no-ends", dest="ends", action="store_false", help="only the counts of --sequences"
    )
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--cycles", type=int, default=10, help="of the data's queries, timed")
    parser.add_argument("--row-types", nargs="*", default=list(ROW_TYPES), choices=list(ROW_TYPES))
    parser.add_argument("--no-dense", dest="dense", action="store_false")
    parser.add_argument("--memory-gib", type=int, default=100, help="of the engine, in the host")
    parser.add_argument("--gpu-gb", type=float, default=141, help="memory of the GPU, GB")
    parser.add_argument("--link-load", type=float, help="share the link with copies, in GB/s")
    parser.add_argument("--commit", default="", help="for the records")
    parser.add_argument("--device", default="cuda:0")
    options = parser.parse_args(arguments)
    for name, least in (("tokens", 1024), ("sequences", 1)):
        for value in getattr(options, name):
            if value < least:
                raise SystemExit(f"--{name}: {value} is less than {least}")
    for name in ("layers", "cycles", "memory_gib"):
        if getattr(options, name) < 1:
            raise SystemExit(f"--{name.replace('_', '-')} {getattr(options, name)} is less than 1")
    if options.link_load is not None:
        if not options.link_load > 0:
            raise SystemExit(f"--link-load {options.link_load} is not above 0")
        if options.device == "cpu":
            raise SystemExit("--link-load: --device cpu has no link")
    return options


def main() -> None:
    options = parsed()
    device = torch.device(options.device)
    on_gpu = device.type == "cuda"
    rate = copy_bytes_per_s(device, 4 << 30 if on_gpu else 1 << 26)
    whole = WholeModel(1e9 * options.gpu_gb, rate)
    told = {
        **ran_on(device, options.commit),
        "copy_gb_per_s": round(rate / 1e9),
    }
    if on_gpu:
        torch.cuda.empty_cache()
    load = LinkLoad(options.link_load) if options.link_load else None
    if load:
        load.begin()
    try:
        for tokens in options.tokens:
            shape = Shape(HEADS, KV_HEADS, DIM, options.layers)
            trace = Trace(options.folder, tokens, shape)
            rows = Rows(
                trace, device, decoded(options.cycles, trace.queries.shape[1] // shape.group)
            )
            capacity = Capacity(rows, whole, options, told)
            for name in options.row_types:
                capacity.spillway(name, load)
            if load is None and options.dense:
                capacity.dense()
            if on_gpu:
                torch.cuda.empty_cache()
    finally:
        if load:
            load.end()


if __name__ == "__main__":
    main()
