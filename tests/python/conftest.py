"""One daemon for the whole session, and small fixtures."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import spillway_kv
from daemon_process import connected, running_daemon
from helpers import delete_model, held


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The target of the session's daemon."""
    with running_daemon(tmp_path_factory.mktemp("daemon")) as target:
        yield target


def pytest_configure(config: pytest.Config) -> None:
    """Registers markers. Restores SIGHUP, because under nohup, daemons would inherit SIG_IGN."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    config.addinivalue_line(
        "markers",
        "transports(*names): runs with a client of each. messages, doorbell: of the session's "
        "daemon, by what moves decode steps, and appends in messages; regions: doorbell, and "
        "appends by regions; embedded. Without the marker doorbell",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Gives tests with the marker `transports` a client of each transport."""
    marker = metafunc.definition.get_closest_marker("transports")
    if marker is not None and "client" in metafunc.fixturenames:
        metafunc.parametrize("client", marker.args, indirect=True, scope="session")


@pytest.fixture(scope="session")
def client(request: pytest.FixtureRequest) -> Iterator[spillway_kv.Client]:
    """A client of the session's daemon, or of an embedded engine."""
    transport = getattr(request, "param", "doorbell")
    with connected(transport, request) as client:
        assert client.step_transport == ("doorbell" if transport == "regions" else transport)
        yield client


@pytest.fixture(scope="module")
def engine(request: pytest.FixtureRequest) -> Iterator[spillway_kv.Client]:
    """An embedded engine for one module, so that tests can count what it holds."""
    with connected("embedded", request) as client:
        yield client


@pytest.fixture
def folder(client: spillway_kv.Client, tmp_path: Path, request: pytest.FixtureRequest) -> str:
    """A folder where a cache may be saved."""
    if client.transport == "embedded":
        return str(tmp_path / "chat")
    return f"chats/{abs(hash(request.node.nodeid)):x}"


@pytest.fixture
def rng() -> np.random.Generator:
    """Random numbers, the same in every run."""
    return np.random.default_rng(1)


@pytest.fixture
def model(
    client: spillway_kv.Client, request: pytest.FixtureRequest
) -> Iterator[spillway_kv.Model]:
    """A model with two layers, four query heads, two KV heads, head_dim 16, float32.

    A parameter gives the bits of its value codes; without it, there are none.
    """
    model = client.create_model(
        layer_count=2,
        query_head_count=4,
        kv_head_count=2,
        head_dim=16,
        dtype="float32",
        hash_weights=spillway_kv.RotationHash(value_bits=getattr(request, "param", 0)),
    )
    yield model
    delete_model(client, model)


@pytest.fixture
def no_leak(client: spillway_kv.Client) -> Iterator[Callable[[], None]]:
    """Checks, when called and at the end, that the memory is as at the start."""
    before = held(client)

    def check() -> None:
        deadline = time.monotonic() + 10
        # The daemon may notice a dead client, or finish an abandoned request, a little later.
        while (now := held(client)) != before and time.monotonic() < deadline:
            time.sleep(0.02)
        assert now == before

    yield check
    check()
