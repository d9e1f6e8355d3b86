"""What the daemon serves over HTTP: metrics, health, readiness, and the data of its page."""

from __future__ import annotations

import http.client
import json
import queue
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import numpy as np
import pytest
import spillway_kv
from daemon_process import binary, running_daemon, wait_for_log
from helpers import settles
from raw_grpc import raw
from spillway_kv._proto import admin_service_pb2, attention_service_pb2
from spillway_kv.step import DecodeStep

ROOT = Path(__file__).resolve().parents[2]
PROMISING = spillway_kv.Policy(dense_token_count=1024)
ANY_PORT = ("--http-listen", "tcp:127.0.0.1:0")

OPERATIONS = ROOT / "docs" / "operations"


class Answer(NamedTuple):
    """An answer over HTTP."""

    status: int
    headers: dict[str, str]
    body: str


class Watched(NamedTuple):
    """A daemon, with a client and its HTTP address."""

    client: spillway_kv.Client
    address: str  # of the HTTP server
    sequence: spillway_kv.Sequence


def ask(address: str, path: str, method: str = "GET", **headers: str) -> Answer:
    """A request that follows no redirects and may have any Host header."""
    connection = http.client.HTTPConnection(address, timeout=10)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    body = answer.read().decode()
    connection.close()
    return Answer(answer.status, {k.lower(): v for k, v in answer.getheaders()}, body)


def http_address(log: Path) -> str:
    """The address of a daemon's HTTP server, which starts after gRPC's, from its log."""
    said = wait_for_log(log, "serving_http address=")
    return said.split("serving_http address=")[1].split()[0]


def decode(sequence: spillway_kv.Sequence, steps: int) -> None:
    """Decodes several tokens with queries that look for some of the keys."""
    rng = np.random.default_rng(2)
    for _ in range(steps):
        token = 3 * rng.standard_normal((2, 1, 2, 1, 32), dtype=np.float32)
        with DecodeStep(sequence.state.connection, [sequence], 1, PROMISING) as step:
            for layer in range(2):
                q = np.repeat(token[0].transpose(0, 2, 1, 3), 2, axis=2)
                step.attend(layer, q, token[0], token[1])


@contextmanager
def decoded(folder: Path) -> Iterator[Watched]:
    """A daemon that has decoded twenty tokens and audited all of them."""
    audit = ("--audit-share", "1", "--audit-cpu-share", "1")
    with (
        running_daemon(folder, *ANY_PORT, *audit) as target,
        spillway_kv.connect(target) as client,
    ):
        model = client.create_model(
            "seen",
            layer_count=2,
            query_head_count=4,
            kv_head_count=2,
            head_dim=32,
            dtype="float32",
        )
        sequence = client.create_sequence(model)
        rows = np.random.default_rng(1).standard_normal((2, 2, 2, 3000, 32), dtype=np.float32)
        sequence.append(0, 0, 3 * rows[0], rows[1])
        decode(sequence, 20)
        assert settles(lambda: client.statistics().audit.check_count > 0)
        yield Watched(client, http_address(folder / "spillwayd.log"), sequence)


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    with decoded(tmp_path_factory.mktemp("watched")) as made:
        yield made


def metrics_of(text: str) -> dict[str, float]:
    """The series, by name and labels."""
    series = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            series[name] = float(value)
    return series


def families(client: spillway_kv.Client) -> dict[str, Any]:
    """All metrics in GetStatistics."""
    request = admin_service_pb2.GetStatisticsRequest(include_metrics=True)
    response = client.connection.stubs.admin.GetStatistics(request)
    return {family.name: family for family in response.metrics}


def test_metrics_say_what_was_done(watched: Watched) -> None:
    answer = ask(watched.address, "/metrics")
    assert answer.status == 200
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    seen = metrics_of(answer.body)
    # Twenty tokens over two layers and two KV heads.
    assert seen["spillway_attends_total"] == 40
    assert seen['spillway_model_attended_tokens_total{model="seen"}'] == 20
    assert seen["spillway_rows_appended_total"] == 2 * 2 * 3020
    assert seen["spillway_rows_visible_total"] == 2 * 2 * sum(range(3001, 3021))
    assert 0 < seen["spillway_rows_touched_total"] < seen["spillway_rows_visible_total"]
    assert seen["spillway_attend_duration_seconds_count"] == 40
    (device,) = watched.client.server_info.devices
    queue = f'spillway_device_queue_seconds_count{{device="{device.name}",kind="step"}}'
    assert seen[queue] == 40
    for stage in ("append", "score", "cut", "sample", "fold"):
        count = seen[f'spillway_attend_stage_seconds_count{{stage="{stage}"}}']
        assert count == 40, stage
    assert seen['spillway_attend_stage_seconds_count{stage="dense"}'] == 0
    promises = ("exact", "statistical", "none")
    certificates = [seen[f'spillway_certificates_total{{promise="{p}"}}'] for p in promises]
    assert sum(certificates) == 4 * 40
    assert certificates[1] > 0
    assert seen["spillway_certified_relative_error_count"] >= certificates[1]
    assert seen["spillway_tokens"] == 3020
    assert seen["spillway_ready"] == 1
    assert seen["spillway_connections"] >= 1
    method = 'method="SequenceService/CreateSequence"'
    assert seen[f'spillway_requests_total{{{method},status="OK"}}'] == 1
    assert seen[f"spillway_request_duration_seconds_count{{{method}}}"] == 1
    checks = [v for k, v in seen.items() if k.startswith("spillway_audit_checks_total{")]
    assert sum(checks) == watched.client.statistics().audit.check_count


def test_a_call_that_fails_is_counted_by_its_status(watched: Watched) -> None:
    series = 'spillway_requests_total{method="SequenceService/GetSequence",status="NOT_FOUND"}'
    before = metrics_of(ask(watched.address, "/metrics").body).get(series, 0)
    with pytest.raises(spillway_kv.NotFound):
        watched.client.get_sequence("sequences/nobody")
    assert metrics_of(ask(watched.address, "/metrics").body)[series] == before + 1


def test_a_stream_of_steps_is_counted_when_it_ends(watched: Watched) -> None:
    series = 'spillway_requests_total{method="AttentionService/Step",status="OK"}'

    def count() -> float:
        return metrics_of(ask(watched.address, "/metrics").body).get(series, 0)

    before = count()
    requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
    step = raw(watched.client.target).attention.Step
    answers = step(iter(requests.get, None), timeout=30)
    attend = attention_service_pb2.StepAttend()
    requests.put(attention_service_pb2.StepRequest(attend=attend))
    assert next(answers).status.code == grpc.StatusCode.FAILED_PRECONDITION.value[0]
    assert count() == before
    requests.put(None)
    assert list(answers) == []
    assert settles(lambda: count() == before + 1)


def test_the_api_has_the_same_metrics(watched: Watched) -> None:
    told = families(watched.client)
    helps = dict(re.findall(r"# HELP (\S+) (.*)", ask(watched.address, "/metrics").body))
    assert {name: family.help for name, family in told.items()} == helps
    (attends,) = told["spillway_attends_total"].metrics
    assert attends.value == 40
    (durations,) = told["spillway_attend_duration_seconds"].metrics
    assert durations.histogram.cumulative_counts[-1] == 40
    assert durations.histogram.upper_bounds[-1] == float("inf")
    # Clients that do not ask for metrics do not get them.
    plain = watched.client.connection.stubs.admin.GetStatistics(
        admin_service_pb2.GetStatisticsRequest()
    )
    assert not plain.metrics


@pytest.mark.skipif(
    not OPERATIONS.exists(), reason="no checkout here, only what a bundle has of it"
)
@pytest.mark.parametrize("name", ["grafana.json", "alerts.yml"])
def test_dashboard_and_alerts_ask_for_what_there_is(watched: Watched, name: str) -> None:
    text = (OPERATIONS / name).read_text()
    if name.endswith(".json"):
        panels = json.loads(text)["panels"]
        text = "\n".join(target["expr"] for panel in panels for target in panel["targets"])
    types = dict(re.findall(r"# TYPE (\S+) (\S+)", ask(watched.address, "/metrics").body))
    asked = set(re.findall(r"\bspillway_[a-z_]+", text))
    assert len(asked) > 10
    for metric in asked:
        family = re.sub(r"_(bucket|sum|count)$", "", metric)
        assert types.get(family) is not None, metric
        assert (metric != family) == (types[family] == "histogram"), metric
    # Counters are only used with rate() or increase().
    for function, metric in re.findall(r"(\w*)\(?\b(spillway_[a-z_]+)", text):
        assert (function in ("rate", "increase")) == (types.get(metric) != "gauge"), metric


def test_the_pages_numbers_are_the_daemons(watched: Watched) -> None:
    answer = ask(watched.address, "/status.json")
    assert answer.headers["content-type"] == "application/json"
    status = json.loads(answer.body)
    info = watched.client.server_info
    assert (status["version"], status["boot_id"]) == (info.version, info.boot_id)
    (model,) = status["models"]
    assert (model["name"], model["tokens"], model["layers"]) == ("seen", 3020, 2)
    assert model["free_tokens"] == watched.client.statistics().models[0].free_token_count
    assert model["work"]["attends"] == sum(status["attend"]["counts"]) == 40
    uses = {use["name"]: use["bytes"] for use in status["memory"]["uses"]}
    assert 0 < sum(uses.values()) < status["memory"]["limit_bytes"]
    assert uses["rows and codes"] > 0
    audited = model["audit"]["layers"]
    assert sum(x["checks"] for x in audited) == watched.client.statistics().audit.check_count


@pytest.mark.parametrize(
    "path", ["/", "/status.css", "/status.js", "/status.svg", "/status.json", "/nothing"]
)
def test_answers_tell_browsers_to_trust_nothing_else(watched: Watched, path: str) -> None:
    answer = ask(watched.address, path, Origin="http://elsewhere.example")
    assert answer.status == (404 if path == "/nothing" else 200)
    assert answer.headers["content-security-policy"].startswith("default-src 'self';")
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH"])
def test_it_only_reads(watched: Watched, method: str) -> None:
    answer = ask(watched.address, "/", method)
    assert answer.status == 405
    assert answer.headers["allow"] == "GET, HEAD"


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:9464", 200),
        ("127.0.0.1", 200),
        ("[::1]:9464", 200),
        ("elsewhere.example", 421),
        ("127.0.0.1.elsewhere.example", 421),
        ("localhost.elsewhere.example:80", 421),
    ],
)
def test_another_sites_name_for_this_machine_is_refused(
    watched: Watched, host: str, status: int
) -> None:
    for path in ("/status.json", "/metrics"):
        assert ask(watched.address, path, Host=host).status == status


def test_who_scrapes_by_a_hosts_name_is_served_where_remote_ones_are_allowed(
    tmp_path: Path,
) -> None:
    """As Prometheus does, which sends the name that it was given."""
    with running_daemon(tmp_path, *ANY_PORT, "--allow-remote"):
        address = http_address(tmp_path / "spillwayd.log")
        for host in ("gpu-7.example:9464", "10.1.2.3:9464", "localhost"):
            answer = ask(address, "/metrics", Host=host)
            assert answer.status == 200, host
            assert metrics_of(answer.body)["spillway_ready"] == 1


def test_it_serves_and_is_ready(watched: Watched) -> None:
    assert ask(watched.address, "/healthz").status == 200
    ready = ask(watched.address, "/readyz")
    assert (ready.status, json.loads(ready.body)) == (200, {"ready": True})
    assert ask(watched.address, "/readyz", "HEAD").status == 200
    with grpc.insecure_channel(watched.client.target) as channel:
        check: Any = channel.unary_unary("/grpc.health.v1.Health/Check")
        # The request's first field is the service. Status 1 of the response is SERVING.
        assert check(b"\x0a\x09readiness", timeout=10) == b"\x08\x01"


def start(*flags: str) -> subprocess.CompletedProcess[str]:
    """Starts a daemon that must fail."""
    return subprocess.run(
        [binary(), *flags], capture_output=True, text=True, timeout=30, check=False
    )


def test_addresses_that_cannot_be_had_are_named(watched: Watched, tmp_path: Path) -> None:
    flags = ("--listen", f"unix:{tmp_path}/s", "--device", "cpu", "--memory-limit", "256MiB")
    done = start(*flags, "--http-listen", f"tcp:{watched.address}")
    assert done.returncode == 1
    assert f"cannot listen on {watched.address}: Address already in use" in done.stderr
    done = start(*flags, "--http-listen", "tcp:0.0.0.0:0")
    assert done.returncode == 1
    assert "0.0.0.0:0 is not a loopback address" in done.stderr
    assert "--allow-remote" in done.stderr
    done = start(*flags, "--http-listen", "localhost")
    assert done.returncode == 2
    assert "tcp:host:port" in done.stderr
