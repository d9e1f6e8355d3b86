"""`spillway-lab bench link` with a program that prints recorded measurements."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from spillway_kv.lab.bench import app, link, link_plots
from typer.testing import CliRunner, Result

GIB = 2**30
DEVICE = {"device": "NVIDIA Test", "uuid": "GPU-0", "sm_count": 132, "host": {"core_count": 16}}
LINK = {"generation_max": 5, "width_max": 16, "generation": 5, "width": 16, "gb_per_s": 63.015}

# Stands for the measuring program: prints the file beside it, writes down its arguments, and ends
# as requested.
PROGRAM = """\
#!{python}
import json, os, pathlib, signal, sys, time
here = pathlib.Path(__file__).parent
(here / "arguments.json").write_text(json.dumps(sys.argv[1:]))
print((here / "lines").read_text(), end="", flush=True)
print((here / "messages").read_text(), end="", file=sys.stderr, flush=True)
end = (here / "end").read_text()
if end == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
if end == "wait":
    (here / "pid").write_text(str(os.getpid()))
    time.sleep(600)
sys.exit(int(end))
"""


def measurement(experiment: str, **values: Any) -> dict[str, Any]:
    """A line as the program writes it, for a span of 16 GiB, rows of 512 B and a density of 2 %."""
    row = {
        "experiment": experiment,
        "engine": "sm",
        "direction": "h2d",
        "row_bytes": 512,
        "span_bytes": 16 * GIB,
        "density": 0.02,
        "order": "sorted",
        "sm_count": 8,
        "numa_node": -1,
        "pinning": "huge_pages",
        "rows": 671089,
        "bytes": 343597568,
        "seconds_median": 0.0068,
        "seconds_min": 0.0067,
        "seconds_max": 0.0069,
        "repetitions": 7,
        "gb_per_s": 50.5,
        "rows_per_s": 98.7e6,
        "checked": True,
        "allocation_bytes": 16 * GIB,
        "huge_page_bytes": 16 * GIB,
        "pin_seconds": 0.7,
        "register_seconds": 0.3,
    }
    unknown = values.keys() - row.keys()
    assert not unknown
    return row | values


def every_experiment() -> list[dict[str, Any]]:
    """A few measurements of each experiment."""
    rows = [
        measurement("peak", engine="copy_engine", direction=d, row_bytes=2**26, gb_per_s=rate)
        for d, rate in (("h2d", 55.5), ("d2h", 54.0), ("both", 101.6))
    ]
    rows += [
        measurement("engines", engine=engine, direction=d, row_bytes=size, gb_per_s=size / 2e4)
        for engine in link_plots.ENGINES
        for d in ("h2d", "d2h")
        for size in (128, 4096, 2**20)
    ]
    for order in ("sorted", "shuffled"):
        rows += [measurement("rows", order=order, row_bytes=size) for size in (128, 2048)]
        rows += [measurement("spans", order=order, span_bytes=n * GIB) for n in (1, 4, 16)]
        rows += [
            measurement("density", order=order, density=density, sm_count=count)
            for density in (0.0005, 0.02, 1.0)
            for count in (4, 132)
        ]
    rows += [
        measurement("sms", engine=engine, sm_count=count)
        for engine in ("sm", "bulk")
        for count in (1, 8, 132)
    ]
    rows += [
        measurement("directions", engine=engine, direction=d, row_bytes=size, density=1.0)
        for engine in ("copy_engine", "sm")
        for d in link_plots.DIRECTIONS
        for size in (4096, 65536)
    ]
    rows += [measurement("numa", numa_node=node) for node in (0, 1)]
    rows += [
        measurement("pinning", pinning=pinning, order=order, pin_seconds=seconds)
        for pinning, seconds in (("cuda_host_alloc", 5.5), ("huge_pages", 0.7))
        for order in ("sorted", "shuffled")
    ]
    return rows


Fake = Callable[..., Path]


@pytest.fixture
def fake(tmp_path: Path) -> Fake:
    """Makes the program, given its output, its messages on stderr, and how it ends."""

    def make(lines: list[Any], messages: str = "", end: str = "0") -> Path:
        folder = tmp_path / "program"
        folder.mkdir()
        text = "".join(x if isinstance(x, str) else json.dumps(x) + "\n" for x in lines)
        (folder / "lines").write_text(text)
        (folder / "messages").write_text(messages)
        (folder / "end").write_text(end)
        program = folder / "spillway-link-bench"
        program.write_text(PROGRAM.format(python=sys.executable))
        program.chmod(0o755)
        return program

    return make


def with_progress(rows: list[dict[str, Any]], total: int) -> list[Any]:
    """The device, and then each row after a progress line."""
    lines: list[Any] = [DEVICE]
    for done, row in enumerate(rows):
        lines += [{"progress": done, "total": total, "what": row["experiment"]}, row]
    return lines


def run(program: Path, out: Path, *arguments: str) -> Result:
    return CliRunner().invoke(
        app, ["link", "--program", str(program), "--out", str(out), *arguments]
    )


def read_csv(out: Path) -> list[dict[str, str]]:
    with (out / "link.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def is_png(path: Path) -> bool:
    data = path.read_bytes()
    return data.startswith(b"\x89PNG\r\n\x1a\n") and len(data) > 5000


def test_every_measurement_is_a_row_and_every_experiment_a_plot(fake: Fake, tmp_path: Path) -> None:
    rows = every_experiment()
    lines = with_progress(rows, len(rows))
    lines += [{"link": LINK}, {"progress": len(rows), "total": len(rows), "what": "done"}]
    out = tmp_path / "deep" / "out"
    done = run(fake(lines), out)
    assert done.exit_code == 0, done.output

    read = read_csv(out)
    assert len(read) == len(rows)
    assert list(read[0]) == list(link.COLUMNS)
    for text, row in zip(read, rows, strict=True):
        assert text["engine"] == row["engine"]
        assert int(text["span_bytes"]) == row["span_bytes"]
        assert float(text["density"]) == row["density"]
        assert float(text["gb_per_s"]) == row["gb_per_s"]
        assert text["checked"] == "true"

    names = [f"link_{x.value}.png" for x in link.Experiment if x is not link.Experiment.ALL]
    assert sorted(path.name for path in out.glob("*.png")) == sorted(names)
    assert all(is_png(out / name) for name in names)
    about = json.loads((out / "link.json").read_text())
    assert about["device"] == "NVIDIA Test"
    assert about["link"] == LINK
    assert "--experiment all" in about["command"]
    assert "55.5 (88%)" in done.output  # of 63.0
    assert "101.6 (81%)" in done.output  # of both directions
    assert "cudaHostAlloc" in done.output
    assert "link.csv" in done.output


def test_options_reach_the_program(fake: Fake, tmp_path: Path) -> None:
    program = fake(with_progress([measurement("sms")], 1))
    options = ["--quick", "--span", "4GiB", "--gpu", "GPU-1a", "--repetitions", "9"]
    assert run(program, tmp_path / "out", "--experiment", "sms", *options).exit_code == 0
    told = json.loads((program.parent / "arguments.json").read_text())
    assert told == ["--experiment", "sms", *options]
    assert run(program, tmp_path / "out", "--repetitions", "0").exit_code == 2
    assert run(program, tmp_path / "out", "--experiment", "guess").exit_code == 2


@pytest.mark.parametrize(
    ("end", "how", "exit_code"), [("1", "ended with 1", 1), ("kill", "ended by signal 9", 1)]
)
def test_a_failure_keeps_what_was_measured(
    fake: Fake, tmp_path: Path, end: str, how: str, exit_code: int
) -> None:
    rows = [measurement("rows", row_bytes=size) for size in (128, 512)]
    messages = "spillway-link-bench: rows: cudaErrorIllegalAddress [unspecified]\n"
    done = run(fake(with_progress(rows, 40), messages, end), tmp_path / "out")
    assert done.exit_code == exit_code
    assert how in done.stderr
    assert "after 2 of 40 measurements" in done.stderr
    assert "cudaErrorIllegalAddress [unspecified]" in done.stderr
    assert [row["row_bytes"] for row in read_csv(tmp_path / "out")] == ["128", "512"]
    assert is_png(tmp_path / "out" / "link_rows.png")


def test_without_a_gpu_nothing_is_written(fake: Fake, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "link.csv").write_text("earlier")
    message = "no NVIDIA GPU can be used here: the driver shows none"
    done = run(fake([], f"spillway-link-bench: {message}\n", "2"), out)
    assert done.exit_code == 2
    assert done.stderr.strip() == f"spillway-lab bench link: {message}"
    assert (out / "link.csv").read_text() == "earlier"
    assert not list(out.glob("*.png"))


def test_a_missing_program_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake: Fake
) -> None:
    monkeypatch.delenv(link.ENVIRONMENT, raising=False)
    done = run(tmp_path / "nowhere", tmp_path / "out")
    assert done.exit_code == 2
    assert f"{tmp_path}/nowhere is not a program" in done.stderr

    monkeypatch.setattr(link, "BUILT", tmp_path / "not" / "built")
    monkeypatch.setenv("PATH", str(tmp_path))
    done = CliRunner().invoke(app, ["link", "--out", str(tmp_path / "out")])
    assert done.exit_code == 2
    assert "spillway-link-bench was not found" in done.stderr
    assert "--program" in done.stderr

    # On the PATH, in the build, in the environment, on the command line. Each takes precedence over
    # those before it.
    program = fake([])
    monkeypatch.setenv("PATH", str(program.parent))
    assert link.find_program(None) == program
    built = tmp_path / "built"
    built.symlink_to(program)
    monkeypatch.setattr(link, "BUILT", built)
    assert link.find_program(None) == built
    monkeypatch.setenv(link.ENVIRONMENT, str(program))
    assert link.find_program(None) == program
    assert link.find_program(built) == built
    # This file cannot be executed.
    program.write_text("no script, no binary")
    done = run(program, tmp_path / "out")
    assert done.exit_code == 2
    assert "cannot be run" in done.stderr


def test_a_line_that_is_no_json_ends_it(fake: Fake, tmp_path: Path) -> None:
    lines = [*with_progress([measurement("rows")], 5), "Segmentation fault\n"]
    done = run(fake(lines, end="wait"), tmp_path / "out")
    assert done.exit_code == 1
    assert "not a JSON object: Segmentation fault" in done.stderr
    assert len(read_csv(tmp_path / "out")) == 1


def test_wrong_bytes_are_told_and_not_drawn(fake: Fake, tmp_path: Path) -> None:
    nothing = dict.fromkeys(
        ("seconds_median", "seconds_min", "seconds_max", "gb_per_s", "rows_per_s")
    )
    wrong = measurement("sms", checked=False, repetitions=0, **nothing)
    lines = with_progress([measurement("rows"), wrong], 2)
    done = run(fake(lines, "7 words differ\n", "1"), tmp_path / "out")
    assert done.exit_code == 1
    assert "1 of 2 transfers moved wrong bytes" in done.output
    assert "7 words differ" in done.stderr
    last = read_csv(tmp_path / "out")[-1]
    assert last["checked"] == "false"
    assert last["gb_per_s"] == ""
    assert not (tmp_path / "out" / "link_sms.png").exists()
    assert (tmp_path / "out" / "link_rows.png").exists()


def test_what_was_left_out_is_told(fake: Fake, tmp_path: Path) -> None:
    lines = with_progress([measurement("rows")], 8)
    lines += [
        {"unavailable": "bulk", "why": "needs compute capability 9.0"},
        {"skipped": 6, "pinning": "huge_pages", "numa_node": 1, "why": "cannot bind [EPERM]"},
    ]
    done = run(fake(lines), tmp_path / "out")
    assert done.exit_code == 0
    assert "SM bulk copies: needs compute capability 9.0" in done.output
    assert "6 measurements: cannot bind [EPERM]" in done.output
    about = json.loads((tmp_path / "out" / "link.json").read_text())
    assert about["unavailable"] == {"bulk": "needs compute capability 9.0"}
    assert about["skipped"][0]["numa_node"] == 1


def test_an_interrupt_ends_the_program_and_keeps_the_rows(fake: Fake, tmp_path: Path) -> None:
    program = fake(with_progress([measurement("rows")], 9), end="wait")
    out = tmp_path / "out"
    # A shell's background job and its children ignore the signal. `env` restores it. No code
    # between fork and exec does this, because a fork of a process with gRPC's threads may abort.
    listening = ["env", "--default-signal=INT"]
    command = [*listening, sys.executable, "-m", "spillway_kv.lab.cli", "bench", "link"]
    process = subprocess.Popen(
        [*command, "--program", str(program), "--out", str(out)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    pid_file = program.parent / "pid"
    deadline = time.monotonic() + 60
    while not (pid_file.exists() and (out / "link.csv").exists()) and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT, stderr
    assert "interrupted" in stderr
    assert len(read_csv(out)) == 1
    assert is_png(out / "link_rows.png")
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)


def test_the_command_names_its_subcommands() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "spillway_kv.lab.cli", "--help"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert "bench" in done.stdout
    assert "attend-bench) are in the program spillway" in done.stdout


def test_limits_come_from_the_link_or_the_peak() -> None:
    rows = every_experiment()
    known = link_plots.limits(rows, LINK)
    assert known["h2d"].gb_per_s == pytest.approx(63.015)
    assert known["both"].gb_per_s == pytest.approx(126.03)
    assert "PCIe 5 x16" in known["h2d"].label
    measured = link_plots.limits(rows, None)
    assert measured["d2h"].gb_per_s == 54.0
    assert measured["both"].gb_per_s == 101.6
    assert "measured peak" in measured["d2h"].label
    assert link_plots.limits([], None) == {}


def test_plots_need_no_limit_and_no_second_point(tmp_path: Path) -> None:
    rows = [measurement(x.value) for x in link.Experiment if x is not link.Experiment.ALL]
    files = link_plots.draw(rows, None, "caption", tmp_path)
    assert len(files) == len(rows)
    assert all(is_png(file) for file in files)
    assert link_plots.draw([], LINK, "caption", tmp_path) == []


def test_sizes_are_whole_binary_units() -> None:
    sizes = {128: "128 B", 1536: "1536 B", 2**20: "1 MiB", 3 * GIB: "3 GiB", 2**40: "1 TiB"}
    assert {size: link_plots.format_bytes(size) for size in sizes} == sizes
