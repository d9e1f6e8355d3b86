"""The commands of `spillway-lab eval`."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, cast, get_args

import typer
from rich.console import Console
from rich.markup import escape

from spillway_kv.connecting import connect
from spillway_kv.errors import SpillwayError
from spillway_kv.lab._console import layer_ranges
from spillway_kv.lab.evaluation import (
    ablation,
    adversarial,
    families,
    fidelity,
    guarantee,
    joining,
    longctx,
    needle,
    perplexity,
    presets,
    report,
    results,
    retrieval,
    reuse,
    sources,
    suite,
)
from spillway_kv.lab.evaluation import biases as model_biases
from spillway_kv.lab.evaluation.asking import ASKED
from spillway_kv.lab.evaluation.indexing import NotServedError
from spillway_kv.lab.evaluation.serving import running_daemon
from spillway_kv.lab.evaluation.setting import Setting
from spillway_kv.lab.evaluation.workbench import Workbench
from spillway_kv.row_types import RowType

console = Console(highlight=False)
app = typer.Typer(
    help="Compares methods of sparse attention: their errors, the rows that they read, and their "
    "error bounds.",
    no_args_is_help=True,
)


def _layers(text: str) -> tuple[int, ...] | None:
    """Parses a list of layers such as "0,4-6". None means all layers."""
    if text in ("", "all"):
        return None
    layers: set[int] = set()
    for _, first, last in layer_ranges(text):
        layers.update(range(first, last + 1))
    return tuple(sorted(layers))


def _setting(
    model: Annotated[
        str, typer.Argument(help="folder, name on the Hugging Face hub, or .gguf file")
    ],
    texts: Annotated[
        list[Path],
        typer.Argument(help="text files, also compressed (.gz)", exists=True, dir_okay=False),
    ],
    output: Annotated[Path, typer.Option(help="folder for the results", file_okay=False)],
    length: Annotated[int, typer.Option(min=1024, help="tokens of a segment of the text")] = 8192,
    stretches: Annotated[
        int, typer.Option(min=1, help="number of segments, from the end of the text")
    ] = 1,
    queries: Annotated[
        int, typer.Option(min=2, help="queries of a segment, in its last eighth")
    ] = 64,
    layers: Annotated[str, typer.Option(help='layers, such as "0,4-6"; all by default')] = "all",
    seed: Annotated[int, typer.Option(min=0, help="seed of all random choices")] = 0,
    device: Annotated[str, typer.Option(help="device of the model: cpu or cuda:N")] = "cpu",
    daemon: Annotated[
        str | None,
        typer.Option(help="target of a running daemon; by default $SPILLWAYD is started"),
    ] = None,
    daemon_device: Annotated[
        str, typer.Option(help="device of the daemon that is started: auto, cpu or cuda:N")
    ] = "auto",
    calibration: Annotated[
        list[Path] | None,
        typer.Option(
            help="text files for offline choices; by default the text before the segments",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    mlp: Annotated[
        Path | None,
        typer.Option(
            help="file with hash weights of spillway-lab train-hash", exists=True, dir_okay=False
        ),
    ] = None,
    hashattention: Annotated[
        Path | None,
        typer.Option(
            help="file with hash weights in HashAttention's form", exists=True, dir_okay=False
        ),
    ] = None,
) -> Setting:
    return Setting(
        model=model,
        texts=tuple(texts),
        output=output,
        token_count=length,
        stretch_count=stretches,
        query_count=queries,
        layers=_layers(layers),
        seed=seed,
        device=device,
        daemon=daemon,
        daemon_device=daemon_device,
        calibration=tuple(calibration or ()),
        mlp=mlp,
        hashattention=hashattention,
    )


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """Prints errors. Makes SIGTERM raise, so that a daemon that was started inside is ended."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    except (
        NotServedError,
        SpillwayError,
        ValueError,
        FileNotFoundError,
        ModuleNotFoundError,
    ) as error:
        console.print(f"[red]{type(error).__name__}:[/] {escape(str(error))}", soft_wrap=True)
        raise typer.Exit(1) from error
    finally:
        signal.signal(signal.SIGTERM, before)


def _section(run: Callable[..., None]) -> Callable[..., None]:
    """Makes a command with the options of a setting and those of `run` after its bench."""
    shared = list(inspect.signature(_setting, eval_str=True).parameters.values())
    own = list(inspect.signature(run, eval_str=True).parameters.values())[1:]

    def command(**options: Any) -> None:
        setting = _setting(**{p.name: options.pop(p.name) for p in shared})
        with _told(), Workbench(setting, console) as bench:
            run(bench, **options)
        report.make(setting.output, console)

    arguments = [p for p in shared if p.default is inspect.Parameter.empty]
    options = [p for p in shared if p.default is not inspect.Parameter.empty]
    parameters = [
        p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in (*arguments, *own, *options)
    ]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    command.__doc__ = run.__doc__
    return command


def _numbers(text: str) -> list[float]:
    """Parses numbers separated by commas."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a list of numbers separated by commas") from None


def _row_type(text: str) -> RowType:
    """Reads a row type."""
    if text not in get_args(RowType):
        raise typer.BadParameter(f"{text!r} is not {' or '.join(get_args(RowType))}")
    return cast(RowType, text)


_RowTypeText = Annotated[
    str,
    typer.Option(
        help="how the methods' rows are stored, model or int8; exact and dense attention, with "
        "which they are compared, are over rows in bfloat16 with both"
    ),
]


def _names(numbers: tuple[float, ...]) -> str:
    return ",".join(f"{number:g}" for number in numbers)


def _fidelity(
    bench: Workbench,
    methods: Annotated[str, typer.Option(help="comma-separated names; all by default")] = "",
    row_type: _RowTypeText = "model",
) -> None:
    """Measures the error against the rows read, as a curve for each method."""
    fidelity.run(bench, methods, _row_type(row_type))


def _guarantee(
    bench: Workbench,
    promises: Annotated[str, typer.Option(help="comma-separated names; all by default")] = "",
    epsilons: Annotated[str, typer.Option(help="comma-separated relative errors")] = _names(
        guarantee.EPSILONS
    ),
    deltas: Annotated[str, typer.Option(help="comma-separated shares delta")] = _names(
        guarantee.DELTAS
    ),
    seeds: Annotated[int, typer.Option(min=1, help="samples drawn for each query")] = 1,
    row_type: _RowTypeText = "model",
) -> None:
    """Measures how often errors exceed epsilon, and compares it with delta."""
    kind = _row_type(row_type)
    guarantee.run(bench, promises, _numbers(epsilons), _numbers(deltas), seeds, kind)


def _retrieval(
    bench: Workbench,
    rankings: Annotated[str, typer.Option(help="comma-separated names; all by default")] = "",
) -> None:
    """Compares the tokens that rankings put first with the true ones, by bytes per key."""
    retrieval.run(bench, rankings)


def _ablation(
    bench: Workbench,
    parts: Annotated[str, typer.Option(help="comma-separated names; all by default")] = "",
) -> None:
    """Measures the default policy with one part changed at a time."""
    ablation.run(bench, parts)


def _reuse(bench: Workbench) -> None:
    """Measures which rows neighbouring steps and layers have in common."""
    reuse.run(bench)


def _perplexity(
    bench: Workbench,
    methods: Annotated[str, typer.Option(help="comma-separated names; all by default")] = "",
    tokens: Annotated[int, typer.Option(min=32, help="tokens to decode of a segment")] = 256,
    budgets: Annotated[int, typer.Option(min=1, help="points of each method's curve")] = 3,
    row_type: _RowTypeText = "model",
) -> None:
    """Compares next tokens with those of dense attention: agreement, divergence, perplexity."""
    perplexity.run(bench, methods, tokens, budgets, _row_type(row_type))


def _lengths(text: str) -> list[int]:
    """Parses lengths in tokens, separated by commas."""
    return [int(number) for number in _numbers(text)]


def _needle(
    bench: Workbench,
    methods: Annotated[
        str, typer.Option(help="comma-separated names, each NAME or NAME=BUDGET")
    ] = ASKED,
    lengths: Annotated[
        str, typer.Option(help="comma-separated lengths of the contexts, tokens")
    ] = "4096,8192",
    depths: Annotated[
        str, typer.Option(help="comma-separated places of the needle, from 0 (start) to 1 (end)")
    ] = "0,0.25,0.5,0.75,1",
    samples: Annotated[int, typer.Option(min=1, help="samples for each depth and length")] = 2,
) -> None:
    """Finds a needle in a haystack, by depth and length, beside dense attention."""
    needle.run_needle(bench, methods, _lengths(lengths), _numbers(depths), samples)


def _ruler(
    bench: Workbench,
    methods: Annotated[
        str, typer.Option(help="comma-separated names, each NAME or NAME=BUDGET")
    ] = ASKED,
    lengths: Annotated[
        str,
        typer.Option(help="comma-separated lengths, tokens; with YaRN if longer than the model's"),
    ] = "4096,8192",
    tasks: Annotated[str, typer.Option(help="comma-separated names; all by default")] = "",
    samples: Annotated[int, typer.Option(min=1, help="samples for each task and length")] = 5,
) -> None:
    """Solves tasks like those of RULER: keys, variable tracking, common words."""
    needle.run_ruler(bench, methods, _lengths(lengths), tasks, samples)


def _longctx(
    bench: Workbench,
    preset: Annotated[
        str, typer.Option(help="small (minutes on two cores) or gpu (minutes on an H200)")
    ] = "gpu",
    lengths: Annotated[
        str, typer.Option(help="comma-separated lengths, tokens; by default the preset's")
    ] = "",
    rounds: Annotated[
        int, typer.Option(min=0, help="rounds, each with new contexts; 0: as many as in the preset")
    ] = 0,
    minutes: Annotated[
        float, typer.Option(min=0, help="start no new part after this time; 0: no limit")
    ] = 0,
) -> None:
    """Measures answers and next tokens in long contexts; TEXTS: a file of `sources`, and prose."""
    if preset not in longctx.PLANS:
        raise ValueError(f"no preset {preset!r}; there are {', '.join(longctx.PLANS)}")
    plan = longctx.PLANS[preset]
    if lengths:
        plan = dataclasses.replace(plan, lengths=tuple(_lengths(lengths)))
    if rounds:
        plan = dataclasses.replace(plan, rounds=rounds)
    longctx.run(bench, plan, minutes)


def _tasks(
    bench: Workbench,
    tasks: Annotated[
        str, typer.Option(help="comma-separated tasks, or all of ruler or extraction")
    ] = "ruler",
    methods: Annotated[
        str, typer.Option(help="comma-separated methods beside dense attention; all by default")
    ] = "",
    lengths: Annotated[
        str,
        typer.Option(help="comma-separated lengths, tokens; with YaRN if longer than the model's"),
    ] = "4096,8192",
    samples: Annotated[int, typer.Option(min=1, help="samples for each task and length")] = 5,
    minutes: Annotated[
        float, typer.Option(min=0, help="ask no new question after this time; 0: no limit")
    ] = 0,
    row_type: _RowTypeText = "model",
) -> None:
    """Solves RULER's tasks, and extracts records as JSON; TEXTS: prose for the essays."""
    suite.run(bench, tasks, _lengths(lengths), samples, methods, minutes, _row_type(row_type))


def _all(
    bench: Workbench,
    preset: Annotated[str, typer.Option(help="small (minutes on two cores) or full")] = "full",
) -> None:
    """Runs all of these except `adversarial`, `longctx`, `tasks` and `reuse`, with a preset."""
    if preset not in presets.PRESETS:
        raise ValueError(f"no preset {preset!r}; there are {', '.join(presets.PRESETS)}")
    for run, options in presets.PRESETS[preset]:
        run(bench, **options)
    report.show(bench.setting.output, console)


_RUNS = (
    _fidelity,
    _guarantee,
    _retrieval,
    _ablation,
    _perplexity,
    _needle,
    _ruler,
    _longctx,
    _tasks,
    _reuse,
    _all,
)
for _run in _RUNS:
    app.command(_run.__name__[1:])(_section(_run))
app.command("agreement", help="The same as `perplexity`.")(_section(_perplexity))


@app.command("adversarial")
def _adversarial(
    output: Annotated[Path, typer.Option(help="folder for the results", file_okay=False)],
    names: Annotated[
        str, typer.Option("--families", help="comma-separated names; all by default")
    ] = "",
    length: Annotated[int, typer.Option(min=2049, help="tokens of each context")] = 8192,
    head_dim: Annotated[int, typer.Option(min=16, help="elements of a key")] = 128,
    group: Annotated[int, typer.Option(min=1, max=16, help="query heads per KV head")] = 4,
    contexts: Annotated[int, typer.Option(min=1, help="contexts of each family")] = 5,
    draws: Annotated[int, typer.Option(min=1, help="samples drawn for each attend")] = 13,
    epsilon: Annotated[float, typer.Option(help="relative error of the error bound")] = 0.1,
    delta: Annotated[float, typer.Option(help="share of the attends that may exceed it")] = 0.1,
    seed: Annotated[int, typer.Option(min=0, help="seed of all random choices")] = 0,
    value_bits: Annotated[
        int, typer.Option(min=0, max=3, help="bits of the codes of values, 0: none")
    ] = 0,
    biases: Annotated[
        Path | None,
        typer.Option(
            help=".gguf file of a model; adds a family with the biases of its keys",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    daemon: Annotated[
        str | None,
        typer.Option(help="target of a running daemon; by default $SPILLWAYD is started"),
    ] = None,
    daemon_device: Annotated[
        str, typer.Option(help="device of the daemon that is started: auto, cpu or cuda:N")
    ] = "auto",
) -> None:
    """Measures how often error bounds are violated on adversarial data; needs no model."""
    shape = families.Shape(length, head_dim, group, adversarial.QUERY_COUNT)
    plan = adversarial.Plan(shape, contexts, draws, epsilon, delta, seed, value_bits)
    with _told(), contextlib.ExitStack() as exits:
        wanted = families.chosen(names)
        if biases is not None:
            wanted += (model_biases.family(biases),)
        output.mkdir(parents=True, exist_ok=True)
        if daemon is None:
            log = output / "spillwayd.log"
            daemon = exits.enter_context(running_daemon(log, daemon_device))
        client = exits.enter_context(connect(daemon))
        adversarial.run(client, output, wanted, plan, console)
    report.make(output, console)


@app.command("sources")
def _sources(
    output: Annotated[Path, typer.Argument(help="text file to write", dir_okay=False)],
    folder: Annotated[
        Path | None,
        typer.Option(
            help="folder of Python's standard library; by default this Python's",
            exists=True,
            file_okay=False,
        ),
    ] = None,
) -> None:
    """Writes files of Python's standard library as one text, for `longctx`."""
    with _told():
        names = sources.write(output, folder)
    size = output.stat().st_size
    console.print(f"{output}: {len(names)} files, {size:,} bytes", soft_wrap=True)


@app.command("join")
def _join(
    folders: Annotated[
        list[Path], typer.Argument(help="folders of the runs", exists=True, file_okay=False)
    ],
    output: Annotated[Path, typer.Option(help="folder for the results", file_okay=False)],
) -> None:
    """Joins runs of `tasks` with different tasks, which ran side by side, into one result."""
    with _told():
        joining.join(folders, output)
    report.make(output, console)


@app.command("report")
def _report(
    folder: Annotated[
        Path, typer.Argument(help="folder with results", exists=True, file_okay=False)
    ],
) -> None:
    """Writes the Markdown and the pictures of a folder again, from its JSON."""
    if not results.read(folder):
        raise typer.BadParameter(f"{folder} has no results, such as fidelity.json")
    report.make(folder, console)
