"""Contents of the two wheels: the client without a program, the research tools with one."""

from __future__ import annotations

import configparser
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest
from daemon_process import ROOT, binary
from packages import build, copied, files

if not (ROOT / "clients/python/pyproject.toml").exists():
    pytest.skip("no checkout here, only what a bundle has of it", allow_module_level=True)

# All packages have the version of the project.
VERSION = (ROOT / "VERSION").read_text().strip()


class Wheels(NamedTuple):
    """Wheels built from one copy of the sources. The first contains libspillway."""

    platform: Path
    pure: Path
    lab: Path


def real_library() -> Path:
    return binary().resolve().parents[1] / "clients/c/libspillway.so.1"


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Wheels:
    """Builds both wheels, and the client's also with libspillway."""
    folder = tmp_path_factory.mktemp("wheels")
    clients = copied(folder, "python", "lab")
    platform = build(clients / "python", folder / "platform", real_library())
    # Files of earlier builds are not in the wheels.
    stale = clients / "python/build/lib/spillway/stale.py"
    stale.parent.mkdir(parents=True)
    stale.touch()
    pure = build(clients / "python", folder / "pure", None)
    return Wheels(platform, pure, build(clients / "lab", folder / "lab", None))


def programs(wheel: Path) -> dict[str, str]:
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.endswith(".dist-info/entry_points.txt"):
                told = configparser.ConfigParser()
                told.read_string(archive.read(name).decode())
                return dict(told["console_scripts"])
    return {}


def test_programs(wheels: Wheels) -> None:
    assert programs(wheels.pure) == {}
    assert programs(wheels.platform) == {}
    assert programs(wheels.lab) == {"spillway-lab": "spillway_kv.lab.cli:main"}


def test_neither_holds_the_other(wheels: Wheels) -> None:
    for wheel, package in zip(wheels, ("spillway", "spillway", "spillway_kv.lab"), strict=True):
        assert {name.split("/")[0] for name in files(wheel)} == {
            package,
            f"{package}-{VERSION}.dist-info",
        }
        assert {f"{package}/__init__.py", f"{package}/py.typed"} <= files(wheel)
    assert "spillway/_proto/attention_service_pb2.pyi" in files(wheels.pure)
    nested = {tuple(name.split("/")) for name in files(wheels.pure) if name.count("/") == 2}
    subpackages = {folder for package, folder, _ in nested if package == "spillway"}
    assert subpackages == {"_proto", "transformers"}
    assert "spillway_kv/lab/evaluation/command.py" in files(wheels.lab)


def test_libspillway_is_there_when_given(wheels: Wheels) -> None:
    library = "spillway/_lib/libspillway.so.1"
    with zipfile.ZipFile(wheels.platform) as archive:
        assert archive.read(library) == real_library().read_bytes()
    assert files(wheels.pure) == {n for n in files(wheels.platform) if n != library}
    assert wheels.pure.name == f"spillway_kv-{VERSION}-py3-none-any.whl"
    assert wheels.lab.name == f"spillway_lab-{VERSION}-py3-none-any.whl"
    assert wheels.platform.name.startswith(f"spillway-{VERSION}-py3-none-linux_")


def test_licences_come_with_what_an_archive_carries(tmp_path: Path) -> None:
    archive = tmp_path / "archive"
    terms = archive / "share/doc/spillway/licenses/libgrpc++1.51"
    for file in (terms, archive / "lib/libspillway.so.1"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(file.name)
    clients = copied(tmp_path, "python")
    wheel = build(clients / "python", tmp_path / "made", archive / "lib/libspillway.so.1")
    carried = {n.removeprefix("spillway/_lib/") for n in files(wheel) if "/_lib/" in n}
    assert carried == {"libspillway.so.1", "licenses/libgrpc++1.51"}


def test_a_library_that_is_not_there(tmp_path: Path) -> None:
    clients = copied(tmp_path, "python")
    with pytest.raises(AssertionError, match="SPILLWAY_LIBRARY_FILE names /none, which is no file"):
        build(clients / "python", tmp_path / "made", Path("/none"))
    assert not list(tmp_path.glob("made/*.whl"))


def run(unpacked: Path, code: str) -> str:
    """Runs code with the wheel's files before all other installed packages."""
    environment = {k: v for k, v in os.environ.items() if k != "SPILLWAY_LIBRARY"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**environment, "PYTHONPATH": str(unpacked)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_streams_go_through_the_wheel_own_library(
    wheels: Wheels, target: str, tmp_path: Path
) -> None:
    with zipfile.ZipFile(wheels.platform) as archive:
        archive.extractall(tmp_path)
    used = run(
        tmp_path,
        f"import spillway_kv\n"
        f"with spillway_kv.connect({target!r}, native=True) as client, client.decode() as stream:\n"
        f"    print(stream.transport, client._native.library._name)",
    )
    assert used == f"libspillway {tmp_path}/spillway/_lib/libspillway.so.1"


def test_help_loads_nothing_that_is_slow(wheels: Wheels, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheels.lab) as archive:
        archive.extractall(tmp_path)
    shown = run(
        tmp_path,
        "import sys\n"
        "sys.argv = ['spillway-lab', '--help']\n"
        "from spillway_kv.lab.cli import main\n"
        "try:\n"
        "    main()\n"
        "except SystemExit as end:\n"
        "    slow = {'torch', 'transformers', 'numpy', 'matplotlib', 'grpc', 'spillway'}\n"
        "    print('ends with', end.code, 'loaded', slow & set(sys.modules))",
    )
    assert "Usage: spillway-lab" in shown
    for command in ("bench", "eval", "train-hash", "import-hash"):
        assert command in shown
    assert shown.endswith("ends with 0 loaded set()")
