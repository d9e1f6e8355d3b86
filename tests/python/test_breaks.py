"""How long a call is tried again that restarts break."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from spillway import restart
from spillway.errors import Cancelled, Unavailable
from spillway.restart import Restarts


class FakeClient:
    """A daemon that answers at once; `boots` are those of its next answers, the last one stays."""

    def __init__(self, *boots: str, store_id: str = "s") -> None:
        self._infos = [SimpleNamespace(store_id=store_id, boot_id=boot) for boot in boots]
        self.server_info: Any = self._infos[0]
        self._regions = SimpleNamespace(forget=lambda: None)

    def get_server_info(self) -> Any:
        return self._infos.pop(0) if len(self._infos) > 1 else self._infos[0]


class Call:
    """Fails some times and then answers."""

    def __init__(self, failures: int, error: Exception) -> None:
        self.count = 0
        self._failures, self._error = failures, error

    def __call__(self) -> str:
        self.count += 1
        if self.count <= self._failures:
            raise self._error
        return "answer"


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restart, "_RECONNECT_SECONDS", 0.001)


def test_a_connection_that_finds_no_daemon_is_tried_as_long_as_a_restart_may_take() -> None:
    call = Call(40, Unavailable("connection refused"))
    assert Restarts(FakeClient("b"), 60).again(call) == "answer"  # type: ignore[arg-type]
    assert call.count == 41


def test_it_is_not_tried_longer() -> None:
    call = Call(10**6, Unavailable("connection refused"))
    with pytest.raises(Unavailable, match="connection refused"):
        Restarts(FakeClient("b"), 0.05).again(call)  # type: ignore[arg-type]
    assert 2 <= call.count <= 60


def test_five_restarts_are_survived_and_not_six() -> None:
    boots = [str(number) for number in range(9)]
    call = Call(5, Unavailable("gone"))
    client: Any = FakeClient(*boots)
    client.get_server_info()
    assert Restarts(client, 60).again(call) == "answer"
    call = Call(6, Unavailable("gone"))
    client = FakeClient(*boots)
    client.get_server_info()
    with pytest.raises(Unavailable, match="gone"):
        Restarts(client, 60).again(call)
    assert call.count == 6


def test_what_was_cancelled_without_a_restart_is_not_tried_again() -> None:
    call = Call(1, Cancelled("by the caller"))
    with pytest.raises(Cancelled, match="by the caller"):
        Restarts(FakeClient("b"), 60).again(call)  # type: ignore[arg-type]
    assert call.count == 1


@pytest.mark.parametrize(
    ("store_id", "seconds"), [("", 60), ("s", 0)], ids=["no store", "no resume"]
)
def test_without_a_store_nothing_is_tried_again(store_id: str, seconds: float) -> None:
    call = Call(1, Unavailable("gone"))
    client: Any = FakeClient("a", "b", store_id=store_id)
    with pytest.raises(Unavailable, match="gone"):
        Restarts(client, seconds).again(call)
    assert call.count == 1
