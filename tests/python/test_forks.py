"""A process forked from one with a client: only the parent may use the client."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from daemon_process import binary
from spillway_kv import forks
from spillway_kv.lab import serving

PROGRAM = """
import json, os, signal, sys

import numpy as np
import spillway_kv
from spillway_kv._native import Carrier

target = sys.argv[1]
embedded = target == "embedded:"
settings = {"device.name": "cpu", "memory.limit": "256MiB"} if embedded else None
client = spillway_kv.connect(target, settings=settings)
model = client.create_model(
    layer_count=1, query_head_count=2, kv_head_count=2, head_dim=16, dtype="float32"
)
sequence = client.create_sequence(model)
other = client.create_sequence(model)
third = client.create_sequence(model)
large = np.ones((1, 2, 16384, 16), np.float32)
# By way of a region of its own, where there are any.
sequence.append(0, 0, large, large)
row, q = np.ones((2, 1, 16), np.float32), np.ones((1, 2, 16), np.float32)
if not embedded:
    client.connection.carrier = Carrier.MESSAGES
messages = client.begin_step([third])
messages.attend(0, q[None], row[None], row[None])
client.connection.carrier = Carrier.BEST
step = client.begin_step([sequence])
rows = sequence.fetch(0, 0, 16)


def tried(use):
    try:
        use()
    except BaseException as error:
        return type(error).__name__, str(error)
    return None


def in_child():
    uses = {
        "call": client.get_server_info,
        "list": lambda: list(client.list_sequences()),
        "append": lambda: other.append(0, 0, row[None], row[None]),
        "large": lambda: other.append(0, 0, large, large),
        "fetch": lambda: sequence.fetch(0, 0, 16),
        "messages": lambda: messages.attend(0, q[None], row[None], row[None]),
        "step": lambda: step.attend(0, q[None], row[None], row[None]),
        "results": lambda: step.results(),
        "begin": lambda: client.begin_step([sequence]),
    }
    said = {name: tried(use) for name, use in uses.items()}
    closed = [tried(gone.close) for gone in (step, messages, client)]
    anew = tried(lambda: spillway_kv.connect(target, settings=settings))
    return {"pid": os.getpid(), "said": said, "closed": closed, "anew": anew}


reader, writer = os.pipe()
child = os.fork()
if child == 0:
    # A child that hangs is ended.
    signal.alarm(60)
    os.write(writer, json.dumps(in_child()).encode())
    sys.exit(0)
os.close(writer)
told = json.loads(open(reader).read())
# Its exit, too, is none of the parent's.
_, status = os.waitpid(child, 0)
if os.fork() == 0:
    signal.alarm(60)
    sys.exit(0)
_, idle = os.wait()
step.attend(0, q[None], row[None], row[None])
step.close()
messages.attend(0, q[None], row[None], row[None])
messages.close()
sequence.append(0, sequence.token_count, large, large)
left = [s.abandoned for s in client.list_sequences() if s.name == sequence.name]
print(json.dumps({
    **told, "parent": os.getpid(), "statuses": [status, idle], "abandoned": left,
    "tokens": [s.refresh().token_count for s in (sequence, other, third)],
}))
"""


@pytest.mark.parametrize("transport", ["daemon", "embedded"])
def test_a_client_is_of_the_process_that_made_it(
    request: pytest.FixtureRequest, transport: str
) -> None:
    serving.prefer_library(binary())
    target = "embedded:" if transport == "embedded" else request.getfixturevalue("target")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, target],
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    error = (
        f"this client was made in process {told['parent']}, and this is process {told['pid']}, "
        f"forked from it: {forks._ADVICE}"
    )
    assert len(told["said"]) == 9
    for use, said in told["said"].items():
        assert said == ["RuntimeError", error], use
    assert told["closed"] == [None, None, None]
    assert told["anew"] == [
        "RuntimeError",
        f"this is process {told['pid']}, forked from process {told['parent']}, which had connected "
        f"before: it cannot connect. Instead, {forks._ADVICE}",
    ]
    assert told["statuses"] == [0, 0]
    assert told["abandoned"] == [False]
    assert told["tokens"] == [2 * 16384 + 1, 0, 1]


# What a child may do after each of these, and the workers of a pool, which are children too.
BEFORE = """
import json, multiprocessing, os, signal, sys

import numpy as np
import spillway_kv

target, before = sys.argv[1:]
settings = {"device.name": "cpu", "memory.limit": "64MiB"} if target == "embedded:" else None


def used(_=None):
    with spillway_kv.connect(target, settings=settings) as client:
        model = client.create_model(
            layer_count=1, query_head_count=2, kv_head_count=2, head_dim=16, dtype="float32"
        )
        sequence = client.create_sequence(model)
        rows, q = np.ones((2, 1, 16), np.float32), np.ones((1, 1, 2, 16), np.float32)
        with client.begin_step([sequence]) as step:
            step.attend(0, q, rows[None], rows[None])
        sequence.delete()
        client.delete_model(model)
    return sequence.layer_token_counts


def in_child(call):
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # ends a child that hangs
        try:
            os.write(writer, json.dumps(call()).encode())
        except RuntimeError as error:
            os.write(writer, json.dumps(str(error)).encode())
        sys.exit(0)
    os.close(writer)
    told = json.loads(open(reader).read())
    return told, os.waitpid(child, 0)[1]


if before == "open":
    kept = spillway_kv.connect(target, settings=settings)
elif before != "imported":
    used()
child = in_child(used)
with multiprocessing.get_context("fork").Pool(2) as pool:
    try:
        workers = pool.map(used, range(2))
    except RuntimeError as error:
        workers = str(error)
if before == "open":
    kept.health()
print(json.dumps([*child, workers]))
"""


@pytest.mark.parametrize(
    ("transport", "before", "may"),
    [
        ("daemon", "closed", False),
        ("daemon", "imported", True),
        ("daemon", "open", False),
        ("embedded", "imported", True),
        ("embedded", "closed", False),
    ],
)
def test_where_a_child_may_connect(
    request: pytest.FixtureRequest, transport: str, before: str, may: bool
) -> None:
    serving.prefer_library(binary())
    target = "embedded:" if transport == "embedded" else request.getfixturevalue("target")
    done = subprocess.run(
        [sys.executable, "-c", BEFORE, target, before],
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    child, status, workers = json.loads(done.stdout)
    assert status == 0
    if may:
        assert [child, workers] == [[1], [[1], [1]]]
    else:
        for told in (child, workers):
            assert "it cannot connect. Instead, start processes with" in told
