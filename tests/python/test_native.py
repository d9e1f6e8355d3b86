"""Which libspillway is loaded, and the message if there is none."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import spillway_kv
from daemon_process import binary
from spillway_kv import _library
from spillway_kv.lab.serving import prefer_library

NAMED = os.environ.get("SPILLWAY_LIBRARY")  # its value before tests change it


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """Forgets the library that was loaded, before the test and after it."""
    _library.library.cache_clear()
    yield
    _library.library.cache_clear()


def transport(target: str, native: bool | None = None) -> str:
    with spillway_kv.connect(target, native=native) as client:
        return client.transport


def test_by_environment(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert transport(target) == "libspillway"
    assert transport(target, native=False) == "grpcio"
    _library.library.cache_clear()
    monkeypatch.setenv("SPILLWAY_LIBRARY", "")
    assert transport(target) == "grpcio"
    with pytest.raises(OSError, match="SPILLWAY_LIBRARY is empty"):
        spillway_kv.connect(target, native=True)


def test_a_file_that_is_named_must_be_one(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPILLWAY_LIBRARY", str(tmp_path / "libspillway.so.1"))
    for native in (None, True):
        with pytest.raises(OSError, match=r"libspillway\.so\.1.*SPILLWAY_LIBRARY"):
            spillway_kv.connect(target, native=native)
    assert transport(target, native=False) == "grpcio"


def test_not_installed(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPILLWAY_LIBRARY")
    monkeypatch.setattr(_library, "_INSTALLED", "libspillway-is-not-here.so.1")
    assert transport(target) == "grpcio"
    with pytest.raises(OSError, match="libspillway-is-not-here"):
        spillway_kv.connect(target, native=True)


def own(monkeypatch: pytest.MonkeyPatch, path: Path) -> Path:
    """The path of the package's own library, while no other is named or installed."""
    monkeypatch.delenv("SPILLWAY_LIBRARY")
    monkeypatch.setattr(_library, "_OWN", path)
    monkeypatch.setattr(_library, "_INSTALLED", "libspillway-is-not-here.so.1")
    return path


def built() -> Path:
    """The library under test: $SPILLWAY_LIBRARY, or else the one beside the daemon."""
    return Path(NAMED or binary().resolve().parents[1] / "clients/c/libspillway.so.1")


def test_the_package_own_comes_before_the_system(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = own(monkeypatch, tmp_path / "libspillway.so.1")
    assert transport(target) == "grpcio"
    _library.library.cache_clear()
    shutil.copy(built(), path)
    monkeypatch.setattr(_library, "_INSTALLED", str(built()))
    loaded = _library.library()
    assert loaded is not None
    assert loaded._name == str(path)
    # The environment variable comes before both.
    _library.library.cache_clear()
    monkeypatch.setenv("SPILLWAY_LIBRARY", str(tmp_path / "mine.so"))
    with pytest.raises(OSError, match=r"mine\.so"):
        _library.library()


def test_a_package_own_that_does_not_load_is_told(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = own(monkeypatch, tmp_path / "libspillway.so.1")
    path.write_text("not machine code")
    with pytest.warns(RuntimeWarning, match=rf"go through grpcio: {path}: .*(short|header)"):
        assert transport(target) == "grpcio"
    with pytest.raises(OSError, match=rf"{path}: .*; libspillway-is-not-here"):
        spillway_kv.connect(target, native=True)
    _library.library.cache_clear()
    monkeypatch.setattr(_library, "_INSTALLED", str(built()))
    with pytest.warns(RuntimeWarning, match=rf"the system's .*: {path}: "):
        assert transport(target) == "libspillway"


def test_the_one_beside_a_daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPILLWAY_LIBRARY", "mine")
    prefer_library(binary())
    assert _library._INSTALLED == "libspillway.so.1"
    monkeypatch.delenv("SPILLWAY_LIBRARY")
    archive = tmp_path / "spillway" / "lib" / "libspillway.so.1"
    archive.parent.mkdir(parents=True)
    archive.touch()
    prefer_library(tmp_path / "spillway" / "bin" / "spillwayd")
    with pytest.raises(OSError, match=str(archive)):
        _library.library()
