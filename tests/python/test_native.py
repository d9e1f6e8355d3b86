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


def loaded(target: str) -> str:
    """Connects, and returns the name of the library that was loaded."""
    with spillway_kv.connect(target) as client:
        assert client.transport == "daemon"
        name: str = client.connection.channel.library._name
        return name


def built() -> Path:
    """The library under test: $SPILLWAY_LIBRARY, or else the one beside the daemon."""
    return Path(NAMED or binary().resolve().parents[1] / "lib/libspillway.so.1")


def own(monkeypatch: pytest.MonkeyPatch, path: Path) -> Path:
    """The path of the package's own library, while no other is named or installed."""
    monkeypatch.delenv("SPILLWAY_LIBRARY", raising=False)
    monkeypatch.setattr(_library, "_OWN", path)
    monkeypatch.setattr(_library, "_INSTALLED", "libspillway-is-not-here.so.1")
    return path


def test_by_environment(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own(monkeypatch, tmp_path / "libspillway.so.1")
    monkeypatch.setenv("SPILLWAY_LIBRARY", str(built()))
    assert loaded(target) == str(built())
    _library.library.cache_clear()
    # An empty name is none.
    monkeypatch.setenv("SPILLWAY_LIBRARY", "")
    with pytest.raises(OSError, match="libspillway-is-not-here"):
        spillway_kv.connect(target)
    monkeypatch.setattr(_library, "_INSTALLED", str(built()))
    assert loaded(target) == str(built())


@pytest.mark.parametrize("target", ["unix:/nowhere", "embedded:"])
def test_a_file_that_is_named_must_be_one(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_library, "_INSTALLED", str(built()))
    monkeypatch.setenv("SPILLWAY_LIBRARY", str(tmp_path / "libspillway.so.1"))
    with pytest.raises(OSError, match=r"libspillway\.so\.1.*SPILLWAY_LIBRARY"):
        spillway_kv.connect(target)


@pytest.mark.parametrize("target", ["unix:/nowhere", "embedded:"])
def test_not_installed(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own(monkeypatch, tmp_path / "libspillway.so.1")
    told = "libspillway-is-not-here.*; SPILLWAY_LIBRARY can name another file"
    with pytest.raises(OSError, match=told):
        spillway_kv.connect(target)


def test_the_package_own_comes_before_the_system(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = own(monkeypatch, tmp_path / "libspillway.so.1")
    monkeypatch.setattr(_library, "_INSTALLED", str(built()))
    assert loaded(target) == str(built())
    _library.library.cache_clear()
    shutil.copy(built(), path)
    assert _library.library()._name == str(path)
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
    with pytest.raises(OSError, match=rf"{path}: .*(short|header).*; libspillway-is-not-here"):
        spillway_kv.connect(target)
    monkeypatch.setattr(_library, "_INSTALLED", str(built()))
    told = rf"the system's {built()} is used: {path}: .*(short|header)"
    with pytest.warns(RuntimeWarning, match=told) as warned:
        assert loaded(target) == str(built())
    # The warning is of the line that connects.
    assert [each.filename for each in warned] == [__file__]


def test_the_one_beside_a_daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPILLWAY_LIBRARY", "mine")
    prefer_library(binary())
    assert os.environ["SPILLWAY_LIBRARY"] == "mine"
    monkeypatch.delenv("SPILLWAY_LIBRARY")
    archive = tmp_path / "spillway" / "lib" / "libspillway.so.1"
    archive.parent.mkdir(parents=True)
    archive.touch()
    prefer_library(tmp_path / "spillway" / "bin" / "spillwayd")
    with pytest.raises(OSError, match=str(archive)):
        _library.library()
