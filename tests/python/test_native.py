"""Which libspillway is taken, and what is said where there is none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import spillway
from daemon_process import binary
from spillway import _native
from spillway_lab.serving import prefer_library


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """No library is known from before, nor afterwards what a test named."""
    _native.library.cache_clear()
    yield
    _native.library.cache_clear()


def transport(target: str, **options: bool) -> str:
    with spillway.connect(target, **options) as client, client.decode() as stream:
        return stream.transport


def test_by_environment(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert transport(target) == "libspillway"
    assert transport(target, native=False) == "grpcio"
    _native.library.cache_clear()
    monkeypatch.setenv("SPILLWAY_LIBRARY", "")
    assert transport(target) == "grpcio"
    with pytest.raises(OSError, match="SPILLWAY_LIBRARY is empty"):
        spillway.connect(target, native=True)


def test_a_file_that_is_named_must_be_one(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPILLWAY_LIBRARY", str(tmp_path / "libspillway.so.1"))
    for native in (None, True):
        with pytest.raises(OSError, match=r"libspillway\.so\.1.*SPILLWAY_LIBRARY"):
            spillway.connect(target, native=native)
    assert transport(target, native=False) == "grpcio"


def test_not_installed(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPILLWAY_LIBRARY")
    monkeypatch.setattr(_native, "_INSTALLED", "libspillway-is-not-here.so.1")
    assert transport(target) == "grpcio"
    with pytest.raises(OSError, match="libspillway-is-not-here"):
        spillway.connect(target, native=True)


def test_the_one_beside_a_daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPILLWAY_LIBRARY", "mine")
    prefer_library(binary())
    assert _native._INSTALLED == "libspillway.so.1"
    monkeypatch.delenv("SPILLWAY_LIBRARY")
    archive = tmp_path / "spillway" / "lib" / "libspillway.so.1"
    archive.parent.mkdir(parents=True)
    archive.touch()
    prefer_library(tmp_path / "spillway" / "bin" / "spillwayd")
    with pytest.raises(OSError, match=str(archive)):
        _native.library()
