"""How long a call that restarts interrupt is tried again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from spillway_kv import restart
from spillway_kv.errors import Cancelled, DataLoss, SpillwayError, Unavailable
from spillway_kv.restart import Restarts


class FakeConnection:
    """A daemon that answers at once. `boots`: boot IDs of its next answers; the last one stays."""

    def __init__(self, *boots: str, store_id: str = "s") -> None:
        self._infos = [SimpleNamespace(store_id=store_id, boot_id=boot) for boot in boots]
        self.server_info: Any = self._infos[0]

    def get_server_info(self, *, timeout: float | None = None) -> Any:
        return self._infos.pop(0) if len(self._infos) > 1 else self._infos[0]

    def go_on_with(self, now: Any) -> None:
        self.server_info = now


class Call:
    """A call that fails several times and then succeeds."""

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
    assert Restarts(FakeConnection("b"), 60).again(call) == "answer"
    assert call.count == 41


def test_it_is_not_tried_longer() -> None:
    call = Call(10**6, Unavailable("connection refused"))
    with pytest.raises(Unavailable, match="connection refused"):
        Restarts(FakeConnection("b"), 0.05).again(call)
    assert 2 <= call.count <= 60


def test_five_restarts_are_survived_and_not_six() -> None:
    boots = [str(number) for number in range(9)]
    call = Call(5, Unavailable("gone"))
    client: Any = FakeConnection(*boots)
    client.get_server_info()
    assert Restarts(client, 60).again(call) == "answer"
    call = Call(6, Unavailable("gone"))
    client = FakeConnection(*boots)
    client.get_server_info()
    with pytest.raises(Unavailable, match="gone"):
        Restarts(client, 60).again(call)
    assert call.count == 6


def test_what_was_cancelled_without_a_restart_is_not_tried_again() -> None:
    call = Call(1, Cancelled("by the caller"))
    with pytest.raises(Cancelled, match="by the caller"):
        Restarts(FakeConnection("b"), 60).again(call)
    assert call.count == 1


@pytest.mark.parametrize(
    ("store_id", "seconds"), [("", 60), ("s", 0)], ids=["no store", "no resume"]
)
def test_without_a_store_nothing_is_tried_again(store_id: str, seconds: float) -> None:
    call = Call(1, Unavailable("gone"))
    client: Any = FakeConnection("a", "b", store_id=store_id)
    with pytest.raises(Unavailable, match="gone"):
        Restarts(client, seconds).again(call)
    assert call.count == 1


class Clock:
    """Time that passes only during sleeps."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(restart, "time", clock)
    return clock


class DeadClient(FakeConnection):
    """A daemon that does not answer, or only after some calls."""

    def __init__(self, *, silent: int = 10**6, store_id: str = "s") -> None:
        super().__init__("b", store_id=store_id)
        self.silent = silent
        self.timeouts: list[float | None] = []

    def get_server_info(self, *, timeout: float | None = None) -> Any:
        self.timeouts.append(timeout)
        if len(self.timeouts) <= self.silent:
            raise Unavailable("nobody is there")
        return super().get_server_info()


class Judge:
    """Declares a daemon lost at the n-th question; None: never."""

    def __init__(self, at: int | None) -> None:
        self._at = at
        self.count = 0

    def __call__(self) -> SpillwayError | None:
        self.count += 1
        return DataLoss("the node is gone") if self.count == self._at else None


def judged(client: Any, seconds: float, at: int | None) -> tuple[Restarts, Judge]:
    restarts, judge = Restarts(client, seconds), Judge(at)
    restarts.given_up = judge
    return restarts, judge


def test_one_that_is_given_up_is_not_waited_for(clock: Clock) -> None:
    client = DeadClient()
    restarts, judge = judged(client, 3600, 3)
    call = Call(10**6, Unavailable("gone"))
    with pytest.raises(DataLoss, match="the node is gone"):
        restarts.again(call)
    assert (call.count, judge.count) == (1, 3)
    # Asked at once, and then about once per second.
    assert 102 <= clock.now <= 103
    # A daemon that does not answer does not delay the question.
    assert set(client.timeouts) == {1.0}


def test_it_is_asked_more_seldom_than_the_daemon(clock: Clock) -> None:
    client = DeadClient(silent=3)
    restarts, judge = judged(client, 60, None)
    assert restarts.again(Call(1, Unavailable("gone"))) == "answer"
    assert (len(client.timeouts), judge.count) == (4, 1)


@pytest.mark.parametrize(("at", "error"), [(None, Unavailable), (2, DataLoss)])
def test_it_is_asked_last_of_all(clock: Clock, at: int | None, error: type[SpillwayError]) -> None:
    restarts, judge = judged(DeadClient(), 0.5, at)
    with pytest.raises(error):
        restarts.again(Call(1, Unavailable("gone")))
    assert judge.count == 2


@pytest.mark.parametrize(
    ("store_id", "seconds"), [("", 60), ("s", 0)], ids=["no store", "no resume"]
)
@pytest.mark.parametrize(("at", "error"), [(None, Unavailable), (1, DataLoss)])
def test_who_does_not_wait_learns_it_too(
    store_id: str, seconds: float, at: int | None, error: type[SpillwayError]
) -> None:
    restarts, judge = judged(DeadClient(store_id=store_id), seconds, at)
    with pytest.raises(error):
        restarts.again(Call(1, Unavailable("gone")))
    assert judge.count == 1


def test_of_a_daemon_that_answers_nobody_is_asked() -> None:
    restarts, judge = judged(FakeConnection("a", "b"), 60, 1)
    assert restarts.again(Call(3, Unavailable("gone"))) == "answer"
    assert judge.count == 0


def test_one_that_took_another_store_may_be_given_up() -> None:
    client: Any = FakeConnection("a")
    client.server_info = SimpleNamespace(store_id="before", boot_id="a")
    restarts, judge = judged(client, 60, 1)
    with pytest.raises(DataLoss, match="the node is gone"):
        restarts.again(Call(1, Unavailable("gone")))
    assert judge.count == 1
