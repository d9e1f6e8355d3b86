"""`spillway-lab size`, which `spillway size` runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated, cast, get_args

import typer
from rich.console import Console

from spillway_kv.lab.size.described import (
    DTYPES,
    Described,
    UnknownWeightsError,
    describe,
    load_config,
    weight_count,
)
from spillway_kv.lab.size.fit import Fit, Machine, rank_layout
from spillway_kv.lab.size.layout import Layout
from spillway_kv.lab.size.report import report, show
from spillway_kv.lab.size.units import bytes_of, bytes_text, tokens_of
from spillway_kv.row_types import RowType
from spillway_kv.transformers.support import UnsupportedModelError

_SIZE = "such as 24GB (10^9 bytes each) or 64GiB (2^30 each)"


def size(
    model: Annotated[
        str,
        typer.Argument(
            metavar="CONFIG_OR_MODEL",
            help="A folder with a config.json, such a file, or the name of a model that was "
            "downloaded before. Nothing is downloaded.",
        ),
    ],
    host: Annotated[str, typer.Option(help=f"Memory of the host, {_SIZE}.")],
    gpu: Annotated[
        str | None,
        typer.Option(help=f"Memory of a GPU, {_SIZE}. Without it the engine runs on the CPU."),
    ] = None,
    context: Annotated[
        str, typer.Option(help="Tokens of a sequence, such as 128K (1024 each) or 1M (1024^2).")
    ] = "128K",
    sequences: Annotated[int, typer.Option(help="Sequences of that length.", min=1)] = 1,
    key_bits: Annotated[
        int, typer.Option(help="Bits a dimension of the codes of keys.", min=1, max=4)
    ] = 3,
    value_bits: Annotated[
        int, typer.Option(help="Bits a dimension of the codes of values; 0: none.", min=0, max=3)
    ] = 0,
    row_type: Annotated[
        str,
        typer.Option(
            help="How K/V rows are stored: model, in their dtype, or int8, with 8 bits an element."
        ),
    ] = "model",
    resident_sample: Annotated[
        float, typer.Option(help="Share of the tokens whose rows a GPU keeps.", min=0, max=0.0625)
    ] = 0.01,
    dtype: Annotated[
        str | None,
        typer.Option(help=f"Of weights and K/V: {', '.join(DTYPES)}. By default the config's."),
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option(
            help="Bytes of the model's weights in GPU memory, over all ranks, if they are "
            "quantised. By default those of the config's shapes and dtype."
        ),
    ] = None,
    tensor_parallel: Annotated[
        int,
        typer.Option(
            help="Ranks among which heads and weights are divided, one on each GPU. They share "
            "the host's memory. The sizes are those of one.",
            min=1,
        ),
    ] = 1,
    memory_limit: Annotated[
        str | None,
        typer.Option(help="The engine's memory.limit. By default three quarters of the host's."),
    ] = None,
    gpu_memory_limit: Annotated[
        str | None,
        typer.Option(
            help="The engine's device.gpu_memory_limit. By default nine tenths of what weights "
            "and windows leave of the GPU."
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON, sizes in bytes and lengths in tokens.")
    ] = False,
) -> None:
    """Says what a model takes with Spillway, and what fits into a host and a GPU.

    K/V rows are in host memory, codes and the resident sample in GPU memory. A dense cache, for
    comparison, has all K/V in GPU memory. Ends with status 1 if the model is not served.
    """
    token_count = _parsed("--context", tokens_of, context)
    host_bytes = _parsed("--host", bytes_of, host) // tensor_parallel
    gpu_bytes = _parsed("--gpu", bytes_of, gpu) if gpu is not None else None
    weight_bytes = _parsed("--weights", bytes_of, weights) if weights is not None else None
    limits = {
        "host_limit": _limit("--memory-limit", memory_limit, "--host", host_bytes),
        "gpu_limit": _limit("--gpu-memory-limit", gpu_memory_limit, "--gpu", gpu_bytes),
    }
    if dtype is not None and dtype not in DTYPES:
        raise _wrong("--dtype", f"{dtype!r} is none of {', '.join(DTYPES)}")
    if row_type not in get_args(RowType):
        raise _wrong("--row-type", f"{row_type!r} is none of {', '.join(get_args(RowType))}")
    try:
        config = load_config(model)
    except ValueError as error:
        raise _wrong("CONFIG_OR_MODEL", str(error)) from error
    try:
        described = describe(config, dtype)
    except UnsupportedModelError as error:
        _refuse(model, str(error), as_json)
    except ValueError as error:
        raise _wrong("--dtype", str(error)) from error
    if gpu_bytes is not None and weight_bytes is None:
        try:
            weight_bytes = weight_count(config) * described.element_bytes
        except UnknownWeightsError as error:
            reason = f"{error}: say how many bytes they take in GPU memory"
            raise _wrong("--weights", reason) from error
    of_rank = -(-(weight_bytes or 0) // tensor_parallel)
    layout = _layout(
        described, tensor_parallel, key_bits, value_bits, resident_sample, cast(RowType, row_type)
    )
    machine = Machine(host=host_bytes, gpu=gpu_bytes, weights=of_rank, **limits)
    _check_room(machine)
    fit = Fit(layout, described, tensor_parallel, machine)
    said = report(
        model,
        described,
        fit,
        rank_count=tensor_parallel,
        token_count=token_count,
        sequence_count=sequences,
    )
    if as_json:
        typer.echo(json.dumps(said, indent=2))
    else:
        show(said, Console())


def _layout(
    described: Described,
    ranks: int,
    key_bits: int,
    value_bits: int,
    resident_sample: float,
    row_type: RowType,
) -> Layout:
    try:
        return rank_layout(
            described,
            ranks,
            key_bits=key_bits,
            value_bits=value_bits,
            resident_sample=resident_sample,
            row_type=row_type,
        )
    except ValueError as error:
        raise _wrong("--tensor-parallel", str(error)) from error


def _check_room(machine: Machine) -> None:
    """Raises if the weights leave nothing, or less than the engine is to have."""
    if machine.gpu is None:
        return
    left = machine.gpu - machine.weights
    of = f"weights of {bytes_text(machine.weights)} on a GPU of {bytes_text(machine.gpu)}"
    if left <= 0:
        raise _wrong("--gpu", f"{of} leave nothing for Spillway; see --tensor-parallel")
    if machine.gpu_limit is not None and machine.gpu_limit > left:
        asked = bytes_text(machine.gpu_limit)
        raise _wrong("--gpu-memory-limit", f"{asked} is more than {of} leave: {bytes_text(left)}")


def _limit(name: str, text: str | None, of: str, most: int | None) -> int | None:
    if text is None:
        return None
    value = _parsed(name, bytes_of, text)
    if most is None:
        raise _wrong(name, f"there is no {of}")
    if value > most:
        raise _wrong(name, f"{bytes_text(value)} is more than {of}: {bytes_text(most)}")
    return value


def _parsed(name: str, read: Callable[[str], int], text: str) -> int:
    try:
        return read(text)
    except ValueError as error:
        raise _wrong(name, str(error)) from error


def _wrong(name: str, reason: str) -> typer.BadParameter:
    return typer.BadParameter(reason, param_hint=name)


def _refuse(model: str, reason: str, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps({"model": model, "refused": reason}, indent=2))
    else:
        typer.echo(f"{model}: {reason}", err=True)
    raise typer.Exit(1)
