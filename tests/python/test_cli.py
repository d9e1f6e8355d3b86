"""The command-line tool `spillway` with a running daemon."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import spillway_kv

ROOT = Path(__file__).resolve().parents[2]
BINARY = os.environ.get("SPILLWAY_CLI", str(ROOT / "build/release/clients/cpp/spillway"))

# A small shape, so that tests are fast.
SHAPE = ["--query-heads", "4", "--kv-heads", "2", "--head-dim", "32", "--tokens", "300"]


@pytest.fixture(autouse=True)
def few_models(client: spillway_kv.Client) -> None:
    """Deletes models that other tests have left without a sequence: `top` lists only 16."""
    for model in client.list_models():
        if not list(client.list_sequences(model)):
            client.delete_model(model)


def run(target: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the tool with pipes for its output."""
    return subprocess.run(
        [BINARY, "--target", target, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def run_json(target: str, *arguments: str) -> Any:
    done = run(target, "--format", "json", *arguments)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def columns(table: str) -> int:
    """The length of the longest line."""
    return max(len(line) for line in table.splitlines())


def run_on_terminal(target: str, *arguments: str) -> str:
    """Runs the tool with its output on a terminal, and returns what it shows."""
    master, slave = pty.openpty()
    try:
        subprocess.run(
            [BINARY, "--target", target, *arguments], stdout=slave, timeout=60, check=True
        )
    finally:
        os.close(slave)
    shown = b""
    while True:
        try:
            part = os.read(master, 65536)
        except OSError:  # Linux reports this if the other end is closed
            break
        if not part:
            break
        shown += part
    os.close(master)
    return shown.decode().replace("\r\n", "\n")


def names(client: spillway_kv.Client) -> list[str]:
    return [model.name for model in client.list_models()]


def test_status_tells_the_tokens_that_still_fit(
    target: str, client: spillway_kv.Client, model: spillway_kv.Model
) -> None:
    status = run_json(target, "status")
    assert status["boot_id"] == client.server_info.boot_id
    assert status["memory"]["limit_bytes"] == client.statistics().memory.limit_bytes
    (ours,) = [entry for entry in status["models"] if entry["model"] == model.name]
    assert 0 < ours["free_token_count"]
    # Rows of 2 layers and 2 KV heads, K and V of 16 floats each. No more tokens can fit than the
    # bytes of rows alone allow.
    assert ours["free_token_count"] <= status["memory"]["limit_bytes"] / (2 * 2 * 2 * 16 * 4)


def test_status_on_a_terminal_is_a_table(target: str, model: spillway_kv.Model) -> None:
    shown = run_on_terminal(target, "status")
    assert shown.startswith("spillwayd ")
    model_id = model.name.removeprefix("models/")
    header, row = (line for line in shown.splitlines() if "MODEL" in line or model_id in line)
    assert "TOKENS THAT FIT" in header
    assert row.split()[:3] == [model_id, "0", "0"]


def test_top_once_is_of_one_second(target: str, model: spillway_kv.Model) -> None:
    shown = run(target, "top", "--once").stdout
    assert shown.startswith("spillwayd ")
    assert ", ready, up " in shown.splitlines()[0]
    (row,) = [x for x in shown.splitlines() if model.name.removeprefix("models/") in x]
    assert row.split()[1:3] == ["0", "0"]
    assert row.split()[-1] == "0"
    assert columns(shown) <= 120
    top = run_json(target, "top", "--once")
    assert 0.9 < top["seconds"] < 10
    (ours,) = [x for x in top["models"] if x["model"] == model.name.removeprefix("models/")]
    assert (ours["token_count"], ours["tokens_per_second"]) == (0, 0)
    assert ours["free_token_count"] > 0
    assert set(top["memory_bytes"]) >= {"pages", "messages"}


@pytest.mark.parametrize("command", [("top",), ("status", "--watch")], ids=str)
def test_what_is_watched_comes_again_until_it_is_stopped(
    target: str, command: tuple[str, ...]
) -> None:
    process = subprocess.Popen(
        [BINARY, "--target", target, *command], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    heads = 0
    while heads < 2:
        line = process.stdout.readline()
        assert line, "it has ended"
        assert "\x1b" not in line  # no escape sequences, because the output is not a terminal
        heads += line.startswith("spillwayd ")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    # SIGINT is the normal way to end it.
    assert process.returncode == 0


def test_the_doctor_needs_no_daemon(target: str, tmp_path: Path) -> None:
    found = {x["what"]: x for x in run_json(target, "doctor")["findings"]}
    assert found["daemon"]["ok"]
    assert found["memory"]["found"].endswith("GiB")
    assert {"huge pages", "NUMA", "locked memory", "open files", "memory"} <= set(found)
    done = run(f"unix:{tmp_path}/none.sock", "doctor")
    assert done.returncode == 0
    assert "WARN  daemon         none at" in done.stdout
    assert all(line[:4] in ("OK  ", "WARN", "    ") for line in done.stdout.splitlines())


def test_a_pipe_gets_what_a_terminal_gets(target: str, model: spillway_kv.Model) -> None:
    assert run(target, "models").stdout == run_on_terminal(target, "models")
    assert run(target, "models", "--format", "table").stdout == run(target, "models").stdout
    on_terminal = run_on_terminal(target, "models", "--format", "json")
    assert on_terminal == run(target, "--format", "json", "models").stdout
    assert model.name in [entry["name"] for entry in json.loads(on_terminal)["models"]]
    done = run(target, "models", "--format", "xml")
    assert done.returncode == 2
    assert "xml" in done.stderr


def test_lists_models_and_sequences(
    target: str, client: spillway_kv.Client, model: spillway_kv.Model
) -> None:
    sequence = client.create_sequence(model)
    (listed,) = [m for m in run_json(target, "models")["models"] if m["name"] == model.name]
    assert (listed["layer_count"], listed["query_head_count"]) == (2, 4)
    assert listed["dtype"] == "f32"
    listed = run_json(target, "sequences", "--model", model.name)["sequences"]
    assert [entry["name"] for entry in listed] == [sequence.name]
    # The ID without `models/` is enough.
    assert listed == run_json(target, "sequences", "--model", model.name.split("/")[1])["sequences"]
    sequence.delete()
    assert run_json(target, "sequences", "--model", model.name) == {"sequences": []}


def test_tables_fit_in_a_hundred_columns(
    target: str, client: spillway_kv.Client, model: spillway_kv.Model
) -> None:
    sequence = client.create_sequence(model)
    rows = np.zeros((2, 2, 12_345, 16), np.float32)
    sequence.append(0, 0, rows, rows)
    # The name is as long as those that a cache of transformers gives.
    other = client.create_model(
        "hf-01234-0123456789abcdef0123",
        layer_count=2,
        query_head_count=8,
        kv_head_count=2,
        head_dim=32,
        dtype="float32",
        hash_weights=spillway_kv.RotationHash(value_bits=2),
    )
    for command in ("sequences", "models"):
        shown = run(target, command).stdout
        assert columns(shown) <= 100
    client.delete_model(other)
    (row,) = [x for x in run(target, "sequences").stdout.splitlines() if sequence.name[10:] in x]
    # Rows of 2 layers and 2 KV heads, K and V of 16 floats each, in whole pages: 97 pages of 128
    # tokens.
    row_mib = 2 * 2 * 2 * 16 * 4 * 97 * 128 / 2**20
    assert row.split()[:3] == [sequence.name[10:], model.name[7:], "12,345"]
    assert row_mib < float(row.split()[3]) < 1.3 * row_mib
    assert row.split()[4] == "MiB"


def test_deletes_sequences_and_models_by_name_and_by_id(
    target: str, client: spillway_kv.Client, model: spillway_kv.Model
) -> None:
    other = client.create_model(
        layer_count=1, query_head_count=1, kv_head_count=1, head_dim=16, dtype="float32"
    )
    first, second, third = (client.create_sequence(other).name for _ in range(3))
    done = run(target, "sequences", "delete", first, second.removeprefix("sequences/"))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"deleted {first}\ndeleted {second}\n"
    assert [info.name for info in client.list_sequences(other)] == [third]

    done = run(target, "models", "delete", other.name)
    assert done.returncode == 1
    assert f"{other.name} has 1 sequences" in done.stderr
    assert run_json(target, "sequences", "delete", third) == {"deleted": [third]}
    assert run_json(target, "models", "delete", other.name) == {"deleted": [other.name]}
    assert other.name not in names(client)
    assert model.name in names(client)


def test_deletes_snapshots_by_folder(
    target: str, client: spillway_kv.Client, model: spillway_kv.Model
) -> None:
    sequence = client.create_sequence(model)
    for folder in ("cli/one", "cli/two"):
        sequence.save(folder)
    sequence.delete()
    assert run(target, "snapshots", "delete", "cli/one").stdout == "deleted cli/one\n"
    assert run_json(target, "snapshots", "delete", "cli/two") == {"deleted": ["cli/two"]}
    done = run(target, "snapshots", "delete", "cli/one")
    assert done.returncode == 1
    assert "there is no snapshot at" in done.stderr
    assert run(target, "snapshots").returncode == 2


def test_what_cannot_be_deleted_is_named_and_the_rest_is_deleted(
    target: str, client: spillway_kv.Client, model: spillway_kv.Model
) -> None:
    kept, gone = (client.create_sequence(model) for _ in range(2))
    done = run(target, "sequences", "delete", "no-such-one", gone.name, "NO NAME")
    assert done.returncode == 1
    assert done.stdout == f"deleted {gone.name}\n"
    missing, wrong = done.stderr.splitlines()
    assert "sequences/no-such-one" in missing
    assert "NOT_FOUND" in missing
    assert "sequences/NO NAME" in wrong
    assert [info.name for info in client.list_sequences(model)] == [kept.name]
    assert run(target, "sequences", "delete").returncode == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["statu"], 'there is no command "statu"; did you mean "status"?'),
        (["sequence"], 'there is no command "sequence"; did you mean "sequences"?'),
        (["sequences", "delet", "x"], 'there is no command "delet"; did you mean "delete"?'),
        (["frobnicate"], 'there is no command "frobnicate"; commands are status, models'),
        (["--bogus", "status"], "there is no option --bogus"),
        (["status", "--bogus"], "there is no option --bogus"),
        ([], "A subcommand is required"),
        (["status", "--timeout", "soon"], "soon"),
    ],
    ids=str,
)
def test_a_wrong_command_line_names_the_word(words: list[str], said: str) -> None:
    done = run("unix:/nonexistent/spillwayd.sock", *words)
    assert done.returncode == 2
    assert done.stdout == ""
    assert said in done.stderr


@pytest.mark.parametrize("mode", ["attend", "decode"])
def test_attend_bench_measures_and_leaves_nothing(
    target: str, client: spillway_kv.Client, mode: str
) -> None:
    before = names(client)
    result = run_json(
        target, "attend-bench", "--mode", mode, "--layers", "2", "--iterations", "7", *SHAPE
    )
    assert result["mode"] == mode
    assert result["iteration_count"] == 7
    for kind in ("round_trip_us", "device_time_us", "beyond_device_us"):
        assert 0 < result[kind]["median"] <= result[kind]["p99"]
    # 300 tokens are fewer than dense_token_count, so attention is dense.
    assert result["touched_row_fraction"] == 1
    assert result["promises"] == {"exact": 7 * 4, "statistical": 0, "none": 0}
    # Decode appends tokens: 10 warm-up and 7 measured steps over 2 layers.
    assert result["touched_rows_per_kv_head"] >= 300
    assert (result["touched_rows_per_kv_head"] > 300) == (mode == "decode")
    assert names(client) == before


def test_attend_bench_deletes_after_an_interrupt(target: str, client: spillway_kv.Client) -> None:
    before = names(client)
    arguments = ["attend-bench", "--iterations", "1000000", *SHAPE]
    process = subprocess.Popen([BINARY, "--target", target, *arguments], stdout=subprocess.PIPE)
    deadline = time.monotonic() + 30
    while names(client) == before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert names(client) != before
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGINT
    assert output == b""
    assert names(client) == before


def test_a_refusal_names_the_field(target: str, client: spillway_kv.Client) -> None:
    before = names(client)
    done = run(target, "attend-bench", "--epsilon", "2", *SHAPE)
    assert done.returncode == 1
    assert "epsilon" in done.stderr
    assert "INVALID_ARGUMENT" in done.stderr
    # The message appears only once.
    assert done.stderr.count("epsilon: ") == 1
    assert len(done.stderr.splitlines()) == 1
    assert done.stdout == ""
    assert names(client) == before


def test_exit_codes_of_a_wrong_command_line_and_no_daemon(target: str, tmp_path: Path) -> None:
    assert run(target).returncode == 2
    assert run(target, "status", "--nonsense").returncode == 2
    assert run(target, "attend-bench", "--selector", "guess").returncode == 2
    done = run(f"unix:{tmp_path}/none.sock", "status")
    assert done.returncode == 3
    assert f"unix:{tmp_path}/none.sock" in done.stderr


def test_the_environment_names_the_target(target: str) -> None:
    environment = {**os.environ, "SPILLWAY_TARGET": target}
    done = subprocess.run(
        [BINARY, "models"], env=environment, capture_output=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


def test_size_is_a_command_of_the_python_package(tmp_path: Path) -> None:
    lab = tmp_path / "spillway-lab"
    lab.write_text('#!/bin/sh\nprintf \'%s\\n\' "$#" "$@"\nexit 7\n')
    lab.chmod(0o755)
    words = ["--gpu", "24GB", "a folder", "--format", "x", "--help"]

    def ran(path: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PATH": path}
        return subprocess.run(
            [BINARY, *arguments], env=environment, capture_output=True, text=True, check=False
        )

    done = ran(f"{tmp_path}:/usr/bin:/bin", "size", *words)
    assert (done.returncode, done.stdout.splitlines()) == (7, ["7", "size", *words])
    done = ran(f"{tmp_path}:/usr/bin:/bin", "--format", "json", "size", "model")
    assert done.stdout.splitlines() == ["3", "size", "model", "--json"]
    done = ran(str(tmp_path / "none"), "size", "model")
    assert done.returncode == 1
    assert "spillway-lab of the Python package, which is not in PATH: pip install" in done.stderr
