"""`spillway-lab models`."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Annotated

import torch
import transformers
import typer
from rich.console import Console

from spillway_kv.connecting import connect
from spillway_kv.lab._console import progress
from spillway_kv.lab.models.check import Scale, Verdict, check
from spillway_kv.lab.models.page import write
from spillway_kv.lab.models.tiny import causal_types

console = Console()
_STYLES = {Verdict.SERVED: "green", Verdict.WRONG: "bold red"}


def models(
    names: Annotated[
        list[str] | None, typer.Argument(help="Architectures, such as qwen3; without any, all.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Folder for a page and the data.", file_okay=False)
    ] = None,
    prompt: Annotated[int, typer.Option(help="Tokens of the prompt.", min=2100, max=8000)] = 3000,
    new: Annotated[int, typer.Option(help="Tokens to generate.", min=1, max=192)] = 64,
    forced: Annotated[
        int, typer.Option(help="Tokens to decode with quality default.", min=1, max=192)
    ] = 64,
    head_dim: Annotated[
        int, typer.Option(help="Dimensions of a head, where an architecture lets them be chosen.")
    ] = 128,
    seed: Annotated[int, typer.Option(help="Of weights, tokens and samples.", min=0)] = 0,
    threads: Annotated[int, typer.Option(help="Threads of torch.", min=1)] = 2,
) -> None:
    """Finds out which architectures of the installed transformers are served.

    Makes a tiny random model of each, and compares a SpillwayCache with the model's own cache.
    Ends with status 1 if an answer is wrong.
    """
    known = causal_types()
    for name in names or ():
        if name not in known:
            raise typer.BadParameter(f"transformers {transformers.__version__} has no {name}")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    warnings.filterwarnings("ignore", module="transformers")
    torch.set_num_threads(threads)
    scale = Scale(prompt, new, forced, head_dim, seed)
    findings = []
    settings = {
        "memory.limit": "4GiB",
        "device.name": "cpu",
        "models.sampling_seed": str(seed + 1),
    }
    with connect("embedded:", settings=settings) as client, progress("models", console) as bar:
        task = bar.add_task("", total=len(names or known))
        for name in names or known:
            bar.update(task, description=name)
            finding = check(name, client, scale)
            findings.append(finding)
            style = _STYLES.get(finding.verdict)
            bar.console.print(f"{name}: {finding.verdict.value} {finding.words}", style=style)
            bar.advance(task)
    counts = {verdict: sum(f.verdict is verdict for f in findings) for verdict in Verdict}
    console.print(", ".join(f"{count} {verdict.value}" for verdict, count in counts.items()))
    if output is not None:
        write(output, transformers.__version__, scale, findings)
    if counts[Verdict.WRONG]:
        raise typer.Exit(1)
