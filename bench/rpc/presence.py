"""Measures how much the Connect streams of other clients slow down one client's decode steps.

One client decodes by doorbell, one token after the other, with 1 and 100 open Connect streams: its
own, and those of 99 other clients, which do nothing and have a connection each. The turns take
another order in every round and decode the same tokens. The outputs must be bit-identical, or the
run fails. Prints a JSON object. It has, for each number of streams, the milliseconds of a step's
attend, and of a step including its announcement, over all rounds and for each round, and the ratios
to the first number. Unknown flags are passed to the daemon.

    python bench/rpc/presence.py [--device cpu] [--tokens 16384] [--steps 200] [--rounds 6]
        [--clients 1 100]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import tempfile
import time
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import spillway_kv
from decoding import ROOT, Decoder, filled, quantiles, surroundings
from spillway_kv import Client
from spillway_kv._proto import sequence_service_pb2
from spillway_kv.lab import serving


def others(target: str, ask: Connection) -> None:
    """Runs in a process of its own: keeps as many other clients connected as `ask` requests.

    Each client has its own connection with one Connect stream.
    """
    # Without this, channels to the same target share a connection.
    own = [("grpc.use_local_subchannel_pool", 1)]
    streams: list[Any] = []
    channels: list[Any] = []
    while (count := ask.recv()) is not None:
        while len(streams) > count:
            streams.pop().cancel()
            channels.pop().close()
        while len(streams) < count:
            channels.append(grpc.insecure_channel(target, options=own))
            connect = channels[-1].unary_stream(
                "/spillway.v1.SequenceService/Connect",
                request_serializer=sequence_service_pb2.ConnectRequest.SerializeToString,
                response_deserializer=sequence_service_pb2.ConnectResponse.FromString,
            )
            name = uuid.uuid4().hex
            streams.append(
                connect(
                    sequence_service_pb2.ConnectRequest(client_id=name),
                    metadata=(("spillway-client", name),),
                )
            )
        ask.send(None)


class Clients:
    """Sets how many clients are connected: the one that decodes, and others."""

    def __init__(self, log: Path, ask: Connection) -> None:
        self._ask = ask
        address = re.findall(r"serving_http address=(\S+)", log.read_text())[-1]
        self._metrics = f"{address if '://' in address else 'http://' + address}/metrics"

    def set(self, count: int) -> None:
        """Connects or disconnects others. Returns when the daemon counts `count` clients."""
        self._ask.send(count - 1)
        self._ask.recv()
        deadline = time.monotonic() + 60
        while (there := self._there()) != count:
            if time.monotonic() > deadline:
                raise SystemExit(f"{there} clients are connected, not {count}")
            time.sleep(0.05)
        # Let the daemon finish the work of clients that came and went.
        time.sleep(0.5)

    def _there(self) -> int:
        with urllib.request.urlopen(self._metrics, timeout=30) as response:
            text = response.read().decode()
        return int(float(re.findall(r"^spillway_clients (\S+)$", text, re.MULTILINE)[0]))


@contextmanager
def connected(client: Client, log: Path) -> Iterator[Clients]:
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    process = spawn.Process(target=others, args=(client.target, there))
    process.start()
    try:
        yield Clients(log, here)
    finally:
        here.send(None)
        process.join(10)
        process.kill()


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 100])
    options, more = parser.parse_known_args()
    if min(options.clients) < 1:
        parser.error("--clients: the one that decodes is always connected")
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        # No audit, because its results change later answers.
        flags = ("--device", options.device, "--http-listen", "tcp:127.0.0.1:0")
        flags += ("--audit-share", "0", *more)
        binary = serving.find_binary(ROOT)
        with (
            serving.running_daemon(binary, log, *flags, timeout=60) as target,
            spillway_kv.connect(target) as client,
            connected(client, log) as clients,
        ):
            facts = surroundings(client)
            decoder = Decoder(client, filled(client, options.tokens))
            decoder.turn(options.steps)  # not timed
            took: dict[int, list[np.ndarray]] = {count: [] for count in options.clients}
            for number in range(options.rounds):
                first = number % len(options.clients)
                for count in options.clients[first:] + options.clients[:first]:
                    clients.set(count)
                    took[count].append(decoder.turn(options.steps))
            told: dict[str, Any] = {}
            for column, what in enumerate(("attend", "step")):
                each = {n: np.concatenate(turns)[:, column] for n, turns in took.items()}
                told[what] = {str(n): quantiles(times) for n, times in each.items()}
                least = quantiles(each[options.clients[0]])
                for n, times in each.items():
                    own = told[what][str(n)]
                    own |= {f"ratio_{k[:3]}": v / least[k] for k, v in quantiles(times).items()}
                    own["each_round"] = [quantiles(turn[:, column]) for turn in took[n]]
            told["steps_compared"] = decoder.checked
            told["error"] = decoder.error
            told["load_after"] = os.getloadavg()[0]
            print(json.dumps(vars(options) | {"flags": more} | facts | told))


if __name__ == "__main__":
    main()
