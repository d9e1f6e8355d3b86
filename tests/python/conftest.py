"""One daemon for the whole session, and small things that tests share."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import spillway
from daemon_process import running_daemon
from helpers import delete_model, held


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Target of the session's daemon."""
    with running_daemon(tmp_path_factory.mktemp("daemon")) as target:
        yield target


@pytest.fixture(scope="session")
def client(target: str) -> Iterator[spillway.Client]:
    """A connection to the session's daemon."""
    with spillway.connect(target) as client:
        yield client


@pytest.fixture(params=["grpcio", "libspillway"])
def decoding(request: pytest.FixtureRequest, target: str) -> Iterator[spillway.Client]:
    """A connection whose decode streams go through either."""
    with spillway.connect(target, native=request.param == "libspillway") as client:
        with client.decode() as stream:
            assert stream.transport == request.param
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
