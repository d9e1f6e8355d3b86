"""Targets that name a cluster are passed to the package for clusters."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import spillway_kv


class FakePackage(ModuleType):
    """Stands for that package, and notes the targets."""

    def __init__(self) -> None:
        super().__init__("spillway_kv.cluster")
        self.made = object()
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def connect(self, target: str, **options: Any) -> Any:
        self.calls.append((target, options))
        return self.made


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> FakePackage:
    package = FakePackage()
    monkeypatch.setitem(sys.modules, "spillway_kv.cluster", package)
    return package


def test_is_handed_over_with_what_was_asked_for(package: FakePackage) -> None:
    assert spillway_kv.connect("ray:kv") is package.made
    options = {
        "timeout": 2.0,
        "ca": "ca.pem",
        "cert": "cert.pem",
        "key": "key.pem",
        "token": "secret",
        "resume_seconds": 3.0,
    }
    assert spillway_kv.connect("ray:kv", **options) is package.made  # type: ignore[arg-type]
    unsaid = {**dict.fromkeys(options), "timeout": 60.0, "resume_seconds": 60.0}
    assert package.calls == [("ray:kv", unsaid), ("ray:kv", options)]


def test_may_be_named_by_the_environment(
    package: FakePackage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPILLWAY_TARGET", "ray:kv")
    assert spillway_kv.connect() is package.made
    assert package.calls[0][0] == "ray:kv"


def test_takes_no_settings_of_an_engine(package: FakePackage) -> None:
    with pytest.raises(ValueError, match="settings are for embedded:, not for the daemons of ray:"):
        spillway_kv.connect("ray:kv", settings={"memory.limit": "1GiB"})
    assert package.calls == []
