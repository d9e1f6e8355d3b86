"""`spillway-lab bench link`: how fast rows travel between host memory and a GPU.

The C++ program spillway-link-bench measures. This module runs it, shows the progress, and writes
link.csv, link.json and plots. docs/link.md describes the columns.
"""

from __future__ import annotations

import contextlib
import csv
import datetime
import enum
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Annotated, Any, TextIO

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

from spillway_kv.lab.bench import link_plots
from spillway_kv.lab.bench.link_plots import Limit
from spillway_kv.lab.serving import end

PROGRAM = "spillway-link-bench"
# Path of the program in a checkout's release build.
BUILT = Path(__file__).resolve().parents[4] / "build/release/bench/gpu/link" / PROGRAM
ENVIRONMENT = "SPILLWAY_LINK_BENCH"

COLUMNS = (
    "experiment",
    "engine",
    "direction",
    "row_bytes",
    "span_bytes",
    "density",
    "order",
    "sm_count",
    "numa_node",
    "pinning",
    "rows",
    "bytes",
    "seconds_median",
    "seconds_min",
    "seconds_max",
    "repetitions",
    "gb_per_s",
    "rows_per_s",
    "checked",
    "allocation_bytes",
    "huge_page_bytes",
    "pin_seconds",
    "register_seconds",
)

# The program's exit code when nothing could be measured.
UNUSABLE = 2


class Experiment(str, enum.Enum):
    """What is measured."""

    ALL = "all"
    ENGINES = "engines"
    ROWS = "rows"
    SPANS = "spans"
    DENSITY = "density"
    SMS = "sms"
    DIRECTIONS = "directions"
    NUMA = "numa"
    PINNING = "pinning"


class LinkError(Exception):
    """The program is missing, or ended before it was finished.

    Attributes:
        exit_code: Exit code of the command.
    """

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass
class Results:
    """What the program has reported so far.

    Attributes:
        device: The GPU and its host. None until they are known.
        link: Generations, widths and rate of the PCIe link. None if not known.
        rows: Measurements. Keys are COLUMNS.
        unavailable: Engines that were left out, with the reasons.
        skipped: Measurements that are not possible here, with the reasons.
        total: Number of planned measurements.
    """

    device: dict[str, Any] | None = None
    link: dict[str, Any] | None = None
    rows: list[dict[str, Any]] = field(default_factory=list)
    unavailable: dict[str, str] = field(default_factory=dict)
    skipped: list[dict[str, Any]] = field(default_factory=list)
    total: int = 0


def measure_link(
    quick: Annotated[bool, typer.Option("--quick", help="Fewer points and repetitions.")] = False,
    out: Annotated[
        Path, typer.Option(help="Folder for the results. Those of an earlier run are replaced.")
    ] = Path("spillway-link"),
    experiment: Annotated[Experiment, typer.Option(help="What to measure.")] = Experiment.ALL,
    span: Annotated[
        str | None,
        typer.Option(
            help="Size of the pinned host memory, such as 4GiB. By default 16GiB, or half of the "
            "available memory if that is less.",
            show_default=False,
        ),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            help="Index of the GPU, or the start of its UUID. By default the first GPU.",
            show_default=False,
        ),
    ] = None,
    repetitions: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Timed runs of each measurement. By default 7, with --quick 3.",
            show_default=False,
        ),
    ] = None,
    program: Annotated[
        Path | None,
        typer.Option(
            help=f"The program that measures. By default ${ENVIRONMENT}, the checkout's release "
            f"build, or {PROGRAM} on the PATH.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Measures how fast rows move between host memory and a GPU, and plots it."""
    console = Console(highlight=False)
    # Errors remain visible if the output goes to a file.
    errors = Console(stderr=True, highlight=False, soft_wrap=True)
    options = ["--experiment", experiment.value]
    options += ["--quick"] if quick else []
    for name, value in (("--span", span), ("--gpu", gpu), ("--repetitions", repetitions)):
        options += [name, str(value)] if value is not None else []

    results = Results()
    failure: LinkError | None = None
    try:
        command = [str(find_program(program)), *options]
        measure(command, out, results, console)
    except LinkError as error:
        failure = error
    except KeyboardInterrupt:
        failure = LinkError("interrupted", 128 + signal.SIGINT)
    if results.rows:
        files = write(results, command, out)
        print_summary(results, console)
        written = ", ".join(os.path.relpath(file) for file in files)
        console.print(f"Written: {written}", markup=False, soft_wrap=True)
    if failure is not None:
        errors.print(f"[red]spillway-lab bench link:[/] {escape(str(failure))}")
        raise typer.Exit(failure.exit_code)


def find_program(given: Path | None) -> Path:
    """Returns the program to run: `given`, $SPILLWAY_LINK_BENCH, a build's, or that on the PATH.

    Raises:
        LinkError: There is no program, or the one that was named cannot be run.
    """
    named = given or (Path(os.environ[ENVIRONMENT]) if os.environ.get(ENVIRONMENT) else None)
    if named is not None:
        if not os.access(named, os.X_OK) or named.is_dir():
            raise LinkError(f"{named} is not a program", UNUSABLE)
        # Absolute, because a name without a folder would be searched on the PATH.
        return named.absolute()
    found = BUILT if os.access(BUILT, os.X_OK) else shutil.which(PROGRAM)
    if found is None:
        raise LinkError(
            f"{PROGRAM} was not found: build it (make build, on a machine with the CUDA compiler "
            f"nvcc), or name it with --program or ${ENVIRONMENT}",
            UNUSABLE,
        )
    return Path(found)


def measure(command: Sequence[str], out: Path, results: Results, console: Console) -> None:
    """Runs the program until it ends. Writes each measurement to out/link.csv at once.

    Args:
        command: The program and its options.
        out: Folder for the results; created if necessary.
        results: Filled during the run, so that it has the results before an error.
        console: Where the progress bar is drawn.

    Raises:
        LinkError: The program failed, or its output is not valid.
    """
    columns = (
        SpinnerColumn(),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}", markup=False),
    )
    with contextlib.ExitStack() as stack:
        progress = stack.enter_context(Progress(*columns, console=console, transient=True))
        task = progress.add_task("starting", total=None)
        file: TextIO | None = None

        def show(done: int, what: str) -> None:
            progress.update(task, completed=done, total=results.total, description=what)

        # Closed at once after an error, so that the program ends too.
        for record in stack.enter_context(contextlib.closing(run(command, results))):
            _take(record, results, show)
            if "experiment" not in record:
                continue
            if file is None:
                # Created only now, so that earlier results stay if nothing can be measured.
                out.mkdir(parents=True, exist_ok=True)
                file = stack.enter_context((out / "link.csv").open("w", newline=""))
                csv.writer(file).writerow(COLUMNS)
            csv.writer(file).writerow([_cell(record.get(name)) for name in COLUMNS])
            file.flush()


def run(command: Sequence[str], results: Results) -> Generator[dict[str, Any], None, None]:
    """Yields the objects that the program writes, one per line. Closing it ends the program.

    Raises:
        LinkError: After the output if the program failed, or at once if a line is not a JSON
            object.
    """
    # Its messages go to a file, because a pipe that nobody reads could fill up.
    with tempfile.TemporaryFile("w+") as messages:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=messages,
                text=True,
            )
        except OSError as error:
            raise LinkError(f"{command[0]} cannot be run: {error.strerror}", UNUSABLE) from None
        try:
            assert process.stdout is not None
            yield from _records(process.stdout)
            code = process.wait()
        finally:
            _end(process)
        messages.seek(0)
        said = messages.read().strip()
        if code != 0:
            raise LinkError(_failure(code, said, results), code if code > 0 else 1)
        if said:
            print(said, file=sys.stderr)


def _records(lines: IO[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if not isinstance(record, dict):
            raise LinkError(f"{PROGRAM} wrote a line that is not a JSON object: {line.strip()}", 1)
        yield record


def _end(process: subprocess.Popen[str]) -> None:
    # Waits, because unpinning much memory takes time.
    end(process)
    if process.stdout is not None:
        process.stdout.close()


def _failure(code: int, said: str, results: Results) -> str:
    if code == UNUSABLE and not results.rows:
        return said.removeprefix(f"{PROGRAM}: ") or f"{PROGRAM} could not start"
    how = f"ended with {code}" if code > 0 else f"was ended by signal {-code}"
    message = f"{PROGRAM} {how} after {len(results.rows)} of {results.total} measurements"
    return f"{message}:\n{said}" if said else message


def _take(record: dict[str, Any], results: Results, show: Callable[[int, str], None]) -> None:
    """Stores a record in the results, according to its kind."""
    if "progress" in record:
        results.total = record["total"]
        show(record["progress"], record["what"])
    elif "experiment" in record:
        results.rows.append(record)
    elif "device" in record:
        results.device = record
    elif "link" in record:
        results.link = record["link"]
    elif "unavailable" in record:
        results.unavailable[record["unavailable"]] = record["why"]
    elif "skipped" in record:
        results.skipped.append(record)


def _cell(value: Any) -> Any:
    # Spelled as in JSON, which most readers of CSV understand.
    return str(value).lower() if isinstance(value, bool) else value


def write(results: Results, command: Sequence[str], out: Path) -> list[Path]:
    """Writes link.json and the plots next to link.csv. Returns all files, the plots last."""
    about = {
        "command": shlex.join(command),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        **(results.device or {}),
        "link": results.link,
        "unavailable": results.unavailable,
        "skipped": results.skipped,
    }
    path = out / "link.json"
    with path.open("w") as file:
        _dump(about, file)
    caption = f"{about.get('device', '')}, {about['date']}"
    return [out / "link.csv", path, *link_plots.draw(results.rows, results.link, caption, out)]


def _dump(value: Any, file: TextIO) -> None:
    json.dump(value, file, indent=2)
    file.write("\n")


def _best(rows: list[dict[str, Any]], direction: str, limits: Mapping[str, Limit]) -> str:
    rates = [row["gb_per_s"] for row in rows if row["direction"] == direction]
    if not rates:
        return ""
    limit = limits.get(direction)
    share = f" ({max(rates) / limit.gb_per_s:.0%})" if limit else ""
    return f"{max(rates):.1f}{share}"


def print_summary(results: Results, console: Console) -> None:
    """Prints the best rates, the pinning times, and what was left out."""
    limits = link_plots.limits(results.rows, results.link)
    title = results.device["device"] if results.device else ""
    if results.link:
        title += f", PCIe {results.link['generation']} x{results.link['width']}"
    table = Table(title=f"{title}: best GB/s (share of the limit)")
    table.add_column("", no_wrap=True)
    for name in link_plots.DIRECTIONS.values():
        table.add_column(name, justify="right")
    table.add_column("most rows/s", justify="right")
    measured = [row for row in results.rows if row["gb_per_s"] is not None]
    for engine, name in link_plots.ENGINES.items():
        own = [row for row in measured if row["engine"] == engine]
        if own:
            rates = (_best(own, direction, limits) for direction in link_plots.DIRECTIONS)
            most = max(row["rows_per_s"] for row in own)
            table.add_row(name, *rates, f"{most / 1e6:.1f} M")
    console.print(table)
    if limits:
        texts = dict.fromkeys(limit.label for limit in limits.values())
        console.print("Limit: " + "; ".join(texts))
    pinned = link_plots.pinnings(results.rows)
    if pinned:
        table = Table(title="Pinning host memory")
        table.add_column("how")
        for name in ("size", "seconds", "GiB/s", "in huge pages"):
            table.add_column(name, justify="right")
        for row in pinned:
            gib = row["allocation_bytes"] / 2**30
            table.add_row(
                link_plots.PINNINGS.get(row["pinning"], row["pinning"]),
                link_plots.format_bytes(row["allocation_bytes"]),
                f"{row['pin_seconds']:.2f}",
                f"{gib / row['pin_seconds']:.1f}",
                f"{row['huge_page_bytes'] / row['allocation_bytes']:.0%}",
            )
        console.print(table)
    wrong = sum(not row["checked"] for row in results.rows)
    if wrong:
        console.print(f"[red]{wrong} of {len(results.rows)} transfers moved wrong bytes.[/]")
    for engine, why in results.unavailable.items():
        console.print(f"Left out: {link_plots.ENGINES.get(engine, engine)}: {why}", markup=False)
    for skipped in results.skipped:
        console.print(f"Skipped: {skipped['skipped']} measurements: {skipped['why']}", markup=False)
