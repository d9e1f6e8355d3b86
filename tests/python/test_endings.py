"""Steps and clients that end, or a program that ends, while other threads are in their calls."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from daemon_process import binary
from spillway_kv.lab import serving

PROGRAM = """
import collections, json, sys, threading, time

import numpy as np
import spillway_kv
from spillway_kv._native import Carrier

target, transport = sys.argv[1:]
embedded = target == "embedded:"
settings = {"device.name": "cpu", "memory.limit": "512MiB"} if embedded else None


def connected():
    client = spillway_kv.connect(target, settings=settings)
    if transport == "messages":
        client.connection.carrier = Carrier.MESSAGES
    assert client.step_transport == transport
    return client


client = connected()
shape = dict(layer_count=1, query_head_count=16, kv_head_count=4, head_dim=64, dtype="float32")
model = client.create_model(**shape)
TOKENS = 6000
k = np.random.default_rng(0).standard_normal((1, 4, TOKENS, 64)).astype(np.float32)
q, new = np.ones((1, 16, 16, 64), np.float32), k[:, :, :16]
exact = spillway_kv.Policy(selector="all")


def filled(one):
    sequence = one.create_sequence(one.create_model(**shape))
    sequence.append(0, 0, k, k)
    return sequence


def begun(one, sequence):
    return one.begin_step([sequence], token_count=16, policy=exact, starts=[TOKENS])


# A step, and a client, that another thread closes.
ended = collections.Counter()


def attend(step, inside):
    try:
        while True:
            step.attend(0, q, new, new)
            inside.set()
    except Exception as error:
        ended[f"{type(error).__name__}: {error}"] += 1


def race(step, close):
    inside = threading.Event()
    thread = threading.Thread(target=attend, args=(step, inside))
    thread.start()
    inside.wait(30)
    close()
    thread.join(30)
    assert not thread.is_alive()


sequence = filled(client)
for _ in range(10):
    step = begun(client, sequence)
    race(step, step.close)
other = connected()
race(begun(other, filled(other)), other.close)
print(json.dumps(ended), flush=True)

# The end of the program.
calls = collections.Counter()


def step():
    with begun(client, sequence) as one:
        one.attend(0, q, new, new)


def append():
    short = client.create_sequence(model)
    short.append(0, 0, k[:, :, :2000], k[:, :, :2000])
    short.delete()


asked = filled(client)
kept = begun(client, filled(client))
uses = {
    "step": step,
    "begin": lambda: client.begin_step([asked]).close(),
    "append": append,
    "attend": lambda: asked.attend(0, np.ones((64, 16, 64), np.float32)),
    "layer": lambda: kept.attend(0, q, new, new),
    "fetch": lambda: asked.fetch(0),
}


def again(name):
    while True:
        try:
            uses[name]()
        except (ValueError, RuntimeError, spillway_kv.SpillwayError):
            return  # the client ends
        calls[name] += 1


for name in uses:
    threading.Thread(target=again, args=(name,), daemon=True).start()
deadline = time.monotonic() + 60
while len(calls) < len(uses) and time.monotonic() < deadline:
    time.sleep(0.01)
print(sorted(calls), flush=True)
"""


@pytest.mark.parametrize("transport", ["messages", "doorbell", "embedded"])
def test_calls_of_other_threads_outlive_what_they_use(
    request: pytest.FixtureRequest, transport: str
) -> None:
    serving.prefer_library(binary())
    target = "embedded:" if transport == "embedded" else request.getfixturevalue("target")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, target, transport],
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    closed, used = done.stdout.splitlines()
    told: dict[str, Any] = json.loads(closed)
    assert sum(told.values()) == 11
    assert set(told) <= {"ValueError: the step is closed", "ValueError: the client is closed"}
    assert used == "['append', 'attend', 'begin', 'fetch', 'layer', 'step']"
