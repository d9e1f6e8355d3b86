"""`spillway-lab try`."""

from __future__ import annotations

import json
import sysconfig
import warnings
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from spillway_kv.client import Client
from spillway_kv.connecting import connect
from spillway_kv.lab._console import from_pretrained
from spillway_kv.lab.size.units import bytes_of, tokens_of
from spillway_kv.lab.trial.report import Row, as_data, table_of, verdict
from spillway_kv.lab.trial.running import Text, run_dense, run_spillway
from spillway_kv.transformers.support import UnsupportedModelError, shapes_of

QUALITIES = ("high", "default", "fast")


def try_model(
    model: Annotated[
        str,
        typer.Argument(
            help="A folder of a transformers model, a .gguf file, or the name of a model that was "
            "downloaded before. Nothing is downloaded."
        ),
    ],
    context: Annotated[
        str, typer.Option(help="Tokens of the prompt, such as 32K (1024 each).")
    ] = "8K",
    text: Annotated[
        Path | None,
        typer.Option(
            help="The prompt's text. By default the source code of Python's standard library.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    new: Annotated[
        int, typer.Option(help="Tokens to decode: those that follow in the text.", min=4)
    ] = 32,
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda:0. By default a GPU, if there is one.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="Of the model: auto, bfloat16, float32 ...")] = "auto",
    chunk: Annotated[str, typer.Option(help="Tokens of a prompt's part.")] = "8K",
    gpu_memory_limit: Annotated[
        str | None,
        typer.Option(help="The engine's device.gpu_memory_limit, such as 2GiB."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Decodes one text by dense attention and by Spillway, and says which is the better choice.

    Prints memory, time to the first token, tokens a second, rows that were read, certified and
    observed errors, and how often the next token is that of dense attention. Ends with status 1 if
    the model is not served.
    """
    prompt_count = _read("--context", tokens_of, context)
    chunk_count = _read("--chunk", tokens_of, chunk)
    if gpu_memory_limit is not None:
        _read("--gpu-memory-limit", bytes_of, gpu_memory_limit)
    place = device or ("cuda:0" if torch.cuda.is_available() else "cpu")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    warnings.filterwarnings("ignore", module="transformers")
    loaded = from_pretrained(AutoModelForCausalLM, model, dtype=dtype, local_files_only=True)
    try:
        shapes_of(loaded.config)
    except UnsupportedModelError as error:
        typer.echo(f"{model}: {error}", err=True)
        raise typer.Exit(1) from error
    loaded = loaded.to(place).eval()
    tokenizer = from_pretrained(AutoTokenizer, model, local_files_only=True)
    ids = _tokens(tokenizer, text, prompt_count + new).to(place)
    console = Console(stderr=as_json)
    rows = _measure(loaded, Text(ids, prompt_count), chunk_count, place, gpu_memory_limit, console)
    if as_json:
        typer.echo(json.dumps(as_data(rows), indent=2))
        return
    console.print(table_of(rows, place != "cpu"))
    console.print(verdict(rows))


def _measure(
    model: Any, text: Text, chunk: int, place: str, gpu_memory_limit: str | None, console: Console
) -> list[Row]:
    """Dense attention first, then each quality, which reads the prompt again."""
    own = model.config._attn_implementation
    with console.status("dense attention"):
        rows = [Row("dense", run_dense(model, text, chunk))]
    settings: dict[str, str | int | float] = {"device.name": place}
    if gpu_memory_limit is not None:
        settings["device.gpu_memory_limit"] = gpu_memory_limit
    model.set_attn_implementation("spillway")
    try:
        with connect("embedded:", settings=settings) as client:
            for quality in QUALITIES:
                with console.status(f"Spillway, quality {quality}"):
                    rows.append(_of_quality(model, client, quality, text, chunk))
    finally:
        model.set_attn_implementation(own)
    return rows


def _of_quality(model: Any, client: Client, quality: str, text: Text, chunk: int) -> Row:
    used = _Used()
    found, errors = run_spillway(model, client, quality, text, chunk, used.note)
    return Row(quality, found, errors, used.gpu, used.host)


class _Used:
    """What the engine has of memory."""

    def __init__(self) -> None:
        self.gpu = self.host = 0

    def note(self, client: Client) -> None:
        self.gpu = sum(d.memory_used_bytes for d in client.get_server_info().devices)
        self.host = client.statistics().memory.row_bytes


def _read(option: str, read: Any, given: str) -> int:
    try:
        return int(read(given))
    except ValueError as error:
        raise typer.BadParameter(f"{option}: {error}") from error


def _tokens(tokenizer: Any, text: Path | None, count: int) -> torch.Tensor:
    """The first `count` tokens of a text."""
    files = [text] if text is not None else sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    ids: list[int] = []
    for file in files:
        ids += tokenizer(file.read_text(errors="replace"), verbose=False).input_ids
        if len(ids) >= count:
            return torch.tensor(ids[:count], device="cpu")
    where = "--text" if text is not None else "the standard library"
    raise typer.BadParameter(f"{where} has {len(ids)} tokens, and {count} are needed")
