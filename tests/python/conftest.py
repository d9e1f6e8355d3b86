"""One daemon for the whole session, and small things that tests share."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import spillway
from daemon_process import connected, running_daemon
from helpers import delete_model, held


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Target of the session's daemon."""
    with running_daemon(tmp_path_factory.mktemp("daemon")) as target:
        yield target


def pytest_configure(config: pytest.Config) -> None:
    """Names the markers, and lets daemons reload: under nohup they would inherit no SIGHUP."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    config.addinivalue_line(
        "markers",
        "transports(*names): runs with a client of each. grpcio, libspillway: of the session's "
        "daemon, by what moves decode steps, and appends in messages; regions: libspillway, and "
        "appends by regions; embedded. Without the marker libspillway",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Gives tests that name transports a client of each."""
    marker = metafunc.definition.get_closest_marker("transports")
    if marker is not None and "client" in metafunc.fixturenames:
        metafunc.parametrize("client", marker.args, indirect=True, scope="session")


@pytest.fixture(scope="session")
def client(request: pytest.FixtureRequest) -> Iterator[spillway.Client]:
    """A connection to the session's daemon, or an engine in this process."""
    transport = getattr(request, "param", "libspillway")
    with connected(transport, request) as client:
        assert client.transport == ("libspillway" if transport == "regions" else transport)
        yield client


@pytest.fixture(scope="module")
def engine(request: pytest.FixtureRequest) -> Iterator[spillway.Client]:
    """An engine in this process of a module's own: what it holds can be counted."""
    with connected("embedded", request) as client:
        yield client


@pytest.fixture
def rng() -> np.random.Generator:
    """Random numbers, the same in every run."""
    return np.random.default_rng(1)


@pytest.fixture
def model(client: spillway.Client) -> Iterator[spillway.Model]:
    """Two layers, four query heads over two KV heads of sixteen, float32."""
    model = client.create_model(
        layer_count=2, query_head_count=4, kv_head_count=2, head_dim=16, dtype="float32"
    )
    yield model
    delete_model(client, model)


@pytest.fixture
def no_leak(client: spillway.Client) -> Iterator[Callable[[], None]]:
    """Checks, when called and at the end, that memory is as it was at the start."""
    before = held(client)

    def check() -> None:
        deadline = time.monotonic() + 10
        # The daemon may learn of a dead client, or finish an abandoned
        # request, a moment later.
        while (now := held(client)) != before and time.monotonic() < deadline:
            time.sleep(0.02)
        assert now == before

    yield check
    check()
