"""`spillway-lab train-hash` and `spillway-lab import-hash`."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file

from spillway_kv.indices import MlpHash
from spillway_kv.lab._console import from_pretrained, layer_ranges
from spillway_kv.lab._console import progress as progress_of
from spillway_kv.lab.training.hash_mlp import save_hash
from spillway_kv.lab.training.published import import_hata, import_spotlight
from spillway_kv.lab.training.traces import Traces, collect, read_text
from spillway_kv.lab.training.trainer import (
    LayerResult,
    Method,
    Training,
    held_out_count,
    train_layer,
)

console = Console()


@contextmanager
def _refusals() -> Iterator[None]:
    """Turns ValueErrors into errors of the command line."""
    try:
        yield
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def _load(model: str, device: torch.device) -> tuple[Any, Any]:
    """Loads a model without its head, and its tokenizer, from a folder, a name or a GGUF file."""
    from transformers import AutoModel, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    loaded = from_pretrained(AutoModel, model, dtype=dtype)
    return loaded.to(device).eval(), from_pretrained(AutoTokenizer, model)


def _layers(text: str, layer_count: int) -> list[int]:
    """Parses a list of layers such as "0,4-6". Empty means all."""
    if not text:
        return list(range(layer_count))
    layers: set[int] = set()
    for part, begin, end in layer_ranges(text):
        if not begin <= end < layer_count:
            raise typer.BadParameter(f"layers {part} are not in [0, {layer_count - 1}]")
        layers.update(range(begin, end + 1))
    return sorted(layers)


def _named(layers: list[int]) -> str:
    """Formats layers so that `_layers` can read them."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and runs[-1][-1] == layer - 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


class _Parts:
    """The layers that are already trained, so that an interrupted training can continue."""

    def __init__(self, folder: Path, traces: Traces, training: Training) -> None:
        self.folder = folder
        told = [dataclasses.asdict(training), traces.meta()]
        self.key = hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()

    def _path(self, layer: int) -> Path:
        return self.folder / f"layer_{layer:03d}.safetensors"

    def read(self, layer: int) -> tuple[dict[str, torch.Tensor], LayerResult] | None:
        """Returns a layer that was trained with the same options, or None."""
        path = self._path(layer).with_suffix(".json")
        if not path.exists():
            return None
        told = json.loads(path.read_text())
        if told.pop("key") != self.key:
            return None
        return load_file(self._path(layer)), LayerResult(**told)

    def write(self, tensors: dict[str, torch.Tensor], result: LayerResult) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, self._path(result.layer))
        told = {"key": self.key, **dataclasses.asdict(result)}
        # Written last: a layer counts as trained if this file exists.
        part = self.folder / "part.json"
        part.write_text(json.dumps(told))
        part.replace(self._path(result.layer).with_suffix(".json"))


def _means(results: list[LayerResult]) -> tuple[float, float, float]:
    """Means over layers and heads: IoU of the trained codes, that of LSH, and their ratio."""
    iou = [x for r in results for x in r.iou]
    lsh = [x for r in results for x in r.lsh_iou]
    return sum(iou) / len(iou), sum(lsh) / len(lsh), sum(iou) / sum(lsh)


def _show(results: list[LayerResult], training: Training) -> None:
    table = Table(title=f"held-out IoU with the true top {training.share:.0%}")
    for name in ("layer", "trained", "worst head", "LSH", "trained / LSH", "steps", "seconds"):
        table.add_column(name, justify="right")

    def row(name: str, of: list[LayerResult], *rest: str) -> None:
        iou, lsh, gain = _means(of)
        worst = min(x for r in of for x in r.iou)
        table.add_row(name, f"{iou:.3f}", f"{worst:.3f}", f"{lsh:.3f}", f"{gain:.2f}", *rest)

    for r in results:
        row(str(r.layer), [r], f"{r.best_step} of {r.step_count}", f"{r.seconds:.0f}")
    row("all", results, "", f"{sum(r.seconds for r in results):.0f}")
    console.print(table)


def _report(
    results: list[LayerResult], traces: Traces, training: Training, device: torch.device
) -> dict[str, Any]:
    iou, lsh, gain = _means(results)
    return {
        "model": traces.model,
        "sample_count": traces.sample_count,
        "held_out_count": held_out_count(traces),
        "token_count": traces.token_count,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "training": dataclasses.asdict(training),
        "iou": iou,
        "lsh_iou": lsh,
        "gain": gain,
        "layers": [dataclasses.asdict(r) | {"gain": r.gain} for r in results],
    }


def train_hash(
    model: Annotated[
        str, typer.Argument(help="folder, name on the Hugging Face hub, or .gguf file")
    ],
    texts: Annotated[
        list[Path],
        typer.Argument(help="text files, also compressed (.gz)", exists=True, dir_okay=False),
    ],
    output: Annotated[Path, typer.Option(help="safetensors file to write", dir_okay=False)],
    traces_folder: Annotated[
        Path | None,
        typer.Option(
            "--traces", help="folder that keeps the traces; traces already there are used"
        ),
    ] = None,
    tokens: Annotated[int, typer.Option(min=256, help="tokens of a segment of the text")] = 8192,
    samples: Annotated[int, typer.Option(min=2, help="most segments")] = 8,
    layers: Annotated[str, typer.Option(help='layers, such as "0,4-6"; all by default')] = "",
    method: Annotated[
        Method, typer.Option(help="method whose MLPs and loss are used")
    ] = "spotlight",
    hash_bits: Annotated[
        int | None,
        typer.Option(
            min=32,
            max=1024,
            help="bits of a code, a multiple of 32; by default 128, for hashattention 32",
        ),
    ] = None,
    hidden: Annotated[
        int, typer.Option(min=0, max=4096, help="width of the hidden layers; 0: head_dim")
    ] = 0,
    per_query_head: Annotated[
        bool, typer.Option(help="one MLP per query head, not per KV head")
    ] = False,
    raw_keys: Annotated[
        bool, typer.Option(help="hash keys without subtracting their mean")
    ] = False,
    steps: Annotated[int, typer.Option(min=1, help="most training steps of a layer")] = 1000,
    queries: Annotated[int, typer.Option(min=1, help="queries of a training step")] = 32,
    share: Annotated[
        float, typer.Option(min=1e-4, max=0.5, help="share of the keys that are a query's top")
    ] = 0.02,
    alpha: Annotated[float, typer.Option(help="margin of the loss")] = 3.0,
    beta: Annotated[
        float, typer.Option(min=0, help="factor on differences of scores in the loss")
    ] = 1.0,
    gamma: Annotated[float, typer.Option(min=0, help="steepness of the soft sign")] = 64.0,
    learning_rate: Annotated[float, typer.Option(min=0, help="learning rate")] = 1e-3,
    judge_every: Annotated[int, typer.Option(min=1, help="steps between evaluations")] = 100,
    patience: Annotated[
        int, typer.Option(min=1, help="evaluations without a gain after which training ends")
    ] = 4,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto")] = "auto",
    seed: Annotated[int, typer.Option(min=0, help="seed of all random choices")] = 0,
) -> None:
    """Trains hash functions for the selector `hamming`, as Spotlight Attention or HashAttention do.

    The model reads the text in segments. The hash functions are trained on its queries and
    keys, and evaluated on the last tenth of the segments. If the training was interrupted,
    start it again with the same options, and it continues.
    """
    if hash_bits is None:
        hash_bits = 32 if method == "hashattention" else 128
    if hash_bits % 32:
        raise typer.BadParameter(f"{hash_bits} is not a multiple of 32", param_hint="--hash-bits")
    where = _device(device)
    if method == "hashattention":
        # As published: keys without centring, one MLP per query head, 128 wide.
        per_query_head = raw_keys = True
        hidden = hidden or 128
    training = Training(
        method=method,
        hash_bits=hash_bits,
        hidden_dim=hidden or None,
        per_query_head=per_query_head,
        raw_keys=raw_keys,
        step_count=steps,
        query_count=queries,
        share=share,
        alpha=alpha,
        beta=beta,
        gamma=gamma,
        learning_rate=learning_rate,
        judge_every=judge_every,
        patience=patience,
        seed=seed,
    )
    parts_folder = output.with_name(output.name + ".parts")
    folder = traces_folder or parts_folder / "traces"
    traces = _traces(model, texts, folder, tokens, samples, where, seed)
    wanted = _layers(layers, traces.layer_count)
    parts = _Parts(parts_folder, traces, training)
    with progress_of("training", console) as progress:
        bar = progress.add_task("", total=len(wanted) * steps)
        for at, layer in enumerate(wanted):
            if parts.read(layer) is None:

                def on_step(step: int, loss: float, iou: float, at: int = at) -> None:
                    progress.update(
                        bar,
                        completed=at * steps + step,
                        description=f"layer {wanted[at]}: loss {loss:.3f}, held-out IoU {iou:.3f}",
                    )

                function, result = train_layer(traces, layer, training, where, on_step)
                parts.write(function.tensors(layer), result)
            progress.update(bar, completed=(at + 1) * steps)
    trained = [parts.read(layer) for layer in range(traces.layer_count)]
    _show([part[1] for part in trained if part is not None], training)
    missing = [layer for layer, part in enumerate(trained) if part is None]
    if missing:
        console.print(
            f"{output} waits for layers {_named(missing)}: the daemon takes all or none. What is "
            f"trained is in {parts_folder}."
        )
        return
    done = [part for part in trained if part is not None]
    described = MlpHash(
        hash_bits=hash_bits,
        hidden_dim=hidden or traces.head_dim,
        per_query_head=per_query_head,
        raw_keys=raw_keys,
        hidden_layer_count=2 if method == "hashattention" else 1,
        query_weights=method == "hashattention",
    )
    tensors = {name: tensor for part, _ in done for name, tensor in part.items()}
    save_hash(output, tensors, traces.layer_count, described)
    report = output.with_suffix(".json")
    told = _report([result for _, result in done], traces, training, where)
    report.write_text(json.dumps(told, indent=1) + "\n")
    shutil.rmtree(parts_folder)
    console.print(f"Written: {output}, {report}")


def _traces(
    model: str,
    texts: list[Path],
    folder: Path,
    tokens: int,
    samples: int,
    device: torch.device,
    seed: int,
) -> Traces:
    """Returns the traces in the folder if they have these options, or collects new ones."""
    asked = {
        "model": model,
        "texts": [[str(text), text.stat().st_size] for text in texts],
        "tokens": tokens,
        "samples": samples,
        "seed": seed,
    }
    request = folder / "request.json"
    if request.exists():
        if json.loads(request.read_text()) != asked:
            raise typer.BadParameter(
                f"{folder} has traces made with other options: {request.read_text().strip()}; "
                "remove it, or name another folder",
                param_hint="--traces",
            )
        console.print(f"Taking the traces in {folder}")
        return Traces.open(folder)
    with _refusals():
        text = read_text(texts)
    loaded, tokenizer = _load(model, device)
    ids = tokenizer(text, return_tensors="pt", verbose=False).input_ids[0]
    with progress_of("reading", console) as progress, _refusals():
        bar = progress.add_task("")
        traces = collect(
            loaded,
            ids,
            folder,
            token_count=tokens,
            sample_count=samples,
            seed=seed,
            on_sample=lambda done, total: progress.update(bar, completed=done, total=total),
        )
    request.write_text(json.dumps(asked) + "\n")
    return traces


import_app = typer.Typer(
    help="Converts published hash weights to a file for the daemon.", no_args_is_help=True
)


@import_app.command("spotlight")
def _spotlight(
    checkpoint: Annotated[Path, typer.Argument(help=".pth file", exists=True, dir_okay=False)],
    output: Annotated[Path, typer.Option(help="safetensors file to write", dir_okay=False)],
    layers: Annotated[int, typer.Option(min=1, help="layers of the model")],
) -> None:
    """Imports weights of Spotlight Attention: one MLP per query head, tensors without names."""
    with _refusals():
        tensors, described = import_spotlight(checkpoint, layers)
    save_hash(output, tensors, layers, described)
    console.print(f"Written: {output}: {described}")


@import_app.command("hata")
def _hata(
    folder: Annotated[
        Path,
        typer.Argument(help="folder with hash_weight_layer_*.pt", exists=True, file_okay=False),
    ],
    output: Annotated[Path, typer.Option(help="safetensors file to write", dir_okay=False)],
) -> None:
    """Imports weights of HATA: one matrix per KV head and layer."""
    with _refusals():
        tensors, layer_count, described = import_hata(folder)
    save_hash(output, tensors, layer_count, described)
    console.print(f"Written: {output}: {described}")
