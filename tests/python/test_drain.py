"""A daemon that is about to end: what it still does, what it refuses, and what it reports."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import spillway_kv
from daemon_process import binary, device_flags, on_gpu
from helpers import refused, settles
from raw_grpc import raw
from spillway_kv import _split
from spillway_kv._proto import admin_service_pb2, attention_service_pb2
from spillway_kv.starting import wait_until_serving
from test_long_creation import LONG
from test_service_manager import Manager, has_systemd


class Ending:
    """A daemon that a test ends, with a client and an append stream that stays open."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.manager = Manager(folder / "notify")
        self.target = f"unix:{folder}/spillwayd.sock"
        self.log = folder / "log"
        flags = ("--listen", self.target, "--memory-limit", "4GiB", "--log-format", "json", *flags)
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                [binary(), *device_flags(*flags), "--http-listen", "tcp:127.0.0.1:0"],
                stderr=output,
                env={"NOTIFY_SOCKET": str(self.manager.path), "PATH": "/usr/bin:/bin"},
            )
        try:
            wait_until_serving(self.process.poll, self.target, self.log, 30)
            self.client = spillway_kv.connect(self.target)
        except BaseException:
            self.close()
            raise
        self.model = self.client.create_model(
            layer_count=1, query_head_count=1, kv_head_count=1, head_dim=16, dtype="float32"
        )
        self.sequence = self.client.create_sequence(self.model)
        self._done = threading.Event()

    def begin_append(self) -> Any:
        """Appends ten rows at once, and ten more when the stream is to end."""
        sent = threading.Event()

        def requests() -> Iterator[attention_service_pb2.AppendRequest]:
            rows = np.ones((1, 1, 10, 16), np.float32)
            for start in (0, 10):
                request = attention_service_pb2.AppendRequest()
                _split.fill_chunk(request.chunk, self.sequence.name, 0, 0, start, rows, rows)
                yield request
                sent.set()
                self._done.wait()

        running = raw(self.target).attention.Append.future(requests())
        assert sent.wait(10)
        assert settles(lambda: self.statistics()["spillway_open_streams"] == 1)
        return running

    def end_append(self) -> None:
        self._done.set()

    def statistics(self) -> dict[str, float]:
        """The metrics without labels, from GetStatistics."""
        request = admin_service_pb2.GetStatisticsRequest(include_metrics=True)
        response = self.client.connection.stubs.admin.GetStatistics(request)
        return {f.name: f.metrics[0].value for f in response.metrics if len(f.metrics) == 1}

    def ask(self, path: str) -> tuple[int, Any]:
        """Status and JSON from the HTTP server."""
        address = next(e["address"] for e in self.events() if e["event"] == "serving_http")
        try:
            with urllib.request.urlopen(f"http://{address}{path}", timeout=10) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.read_text().splitlines()]

    def said(self, event: str) -> list[dict[str, Any]]:
        return [e for e in self.events() if e["event"] == event]

    def terminate(self) -> None:
        self.process.terminate()
        assert settles(lambda: bool(self.said("draining")))

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.manager.close()


@contextmanager
def ending(folder: Path, *flags: str) -> Iterator[Ending]:
    daemon = Ending(folder, *flags)
    try:
        yield daemon
    finally:
        daemon.end_append()
        daemon.client.close()
        daemon.close()


def test_what_runs_goes_on_new_work_is_refused_and_all_see_how_far_it_is(tmp_path: Path) -> None:
    with ending(tmp_path, "--grace", "60") as daemon:
        append = daemon.begin_append()
        before = daemon.statistics()
        assert (before["spillway_draining"], before["spillway_open_calls"]) == (0, 0)
        assert daemon.ask("/readyz") == (200, {"ready": True})
        assert daemon.ask("/status.json")[1]["drain_seconds_left"] is None
        daemon.terminate()

        new_work = [
            lambda: daemon.client.create_sequence(daemon.model),
            lambda: daemon.client.create_model(
                layer_count=1, query_head_count=1, kv_head_count=1, head_dim=16, dtype="float32"
            ),
            daemon.sequence.refresh,
        ]
        for call in new_work:
            error = refused(call)
            assert (error.code, error.reason) == ("UNAVAILABLE", "DRAINING")
            assert "the daemon is draining: it takes no new work, and ends in" in error.message
        with pytest.raises(spillway_kv.Unavailable, match="the daemon is draining"):
            spillway_kv.connect(daemon.target)
        assert not daemon.client.health()

        now = daemon.statistics()
        assert now["spillway_draining"] == 1
        assert now["spillway_ready"] == 0
        assert (now["spillway_open_calls"], now["spillway_open_streams"]) == (0, 1)
        assert 0 < now["spillway_drain_left_seconds"] <= 60
        assert daemon.ask("/healthz") == (200, {"serving": True})
        status, readiness = daemon.ask("/readyz")
        assert status == 503
        assert re.fullmatch(
            r"draining: open calls: 0, open streams: 1, \d+ s left", readiness["reason"]
        )
        page = daemon.ask("/status.json")[1]
        assert (page["open_calls"], page["open_streams"]) == (0, 1)
        assert 0 < page["drain_seconds_left"] <= 60
        assert settles(lambda: bool(daemon.said("still_draining")))
        told = daemon.said("still_draining")[0]
        assert (told["calls"], told["streams"]) == ("0", "1")
        if has_systemd():
            stopping = daemon.manager.until("STOPPING")
            assert re.fullmatch(
                r"Draining: open calls: 0, open streams: 1, \d+ s left", stopping["STATUS"]
            )
            # The rest of the grace time, and a minute to free memory.
            assert 100e6 < float(stopping["EXTEND_TIMEOUT_USEC"]) <= 120e6

        daemon.end_append()
        assert append.result(timeout=10).appended_chunk_count == 2
        assert daemon.process.wait(timeout=30) == 0
        assert not daemon.said("grace_is_over")
        assert daemon.events()[-1]["event"] == "stopped"


def test_after_the_grace_what_still_runs_is_cancelled(tmp_path: Path) -> None:
    with ending(tmp_path, "--grace", "0.2") as daemon:
        append = daemon.begin_append()
        daemon.terminate()
        assert daemon.process.wait(timeout=30) == 0
        (over,) = daemon.said("grace_is_over")
        assert (over["calls"], over["streams"]) == ("0", "1")
        assert append.exception(timeout=10) is not None


@pytest.mark.skipif(on_gpu(), reason="models that take long are the CPU's")
def test_a_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    with ending(tmp_path, "--grace", "3600") as daemon:
        create = raw(daemon.target).models.CreateModel.future(LONG)
        assert settles(lambda: daemon.statistics()["spillway_open_calls"] == 1)
        daemon.terminate()
        assert settles(lambda: bool(daemon.said("still_draining")))
        assert daemon.said("still_draining")[0]["calls"] == "1"
        daemon.process.send_signal(signal.SIGINT)
        assert daemon.process.wait(timeout=30) == 0
        (cut,) = daemon.said("drain_cut_short")
        assert (cut["calls"], cut["streams"]) == ("1", "0")
        assert create.exception(timeout=10) is not None
        assert daemon.events()[-1]["event"] == "stopped"
