"""The wheel for a user without a checkout. scripts/wheels-test.sh tests more."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from daemon_process import ROOT, binary
from packages import build, copied, metadata

if not (ROOT / "clients/python/pyproject.toml").exists():
    pytest.skip("no checkout here, only what a bundle has of it", allow_module_level=True)

# Libraries that a manylinux wheel may take from the system. All others are in the wheel.
SYSTEM = re.compile(r"lib(c|m|stdc\+\+|gcc_s|z)\.so\.\d+|ld-linux-x86-64\.so\.2")


class Wheel(NamedTuple):
    """The wheel, and the folder with its unpacked files."""

    file: Path
    unpacked: Path


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Wheel:
    """The wheel of scripts/wheels.sh, from the library under test without symbols."""
    folder = tmp_path_factory.mktemp("wheels")
    library = folder / "libspillway.so.1"
    built = binary().resolve().parents[1] / "lib/libspillway.so.1"
    subprocess.run(["strip", "-o", library, built], check=True)
    made = folder / "made"
    raw = build(copied(folder), folder / "raw", library)
    programs = Path(sys.executable).parent
    done = subprocess.run(
        [sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", made, raw],
        env={"PATH": f"{programs}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    (file,) = made.glob("spillway_kv-*.whl")
    with zipfile.ZipFile(file) as archive:
        archive.extractall(folder / "unpacked")
    return Wheel(file, folder / "unpacked")


def needed(file: Path) -> set[str]:
    """The libraries that the file needs."""
    told = subprocess.run(
        ["readelf", "--dynamic", "--wide", file], capture_output=True, text=True, check=True
    ).stdout
    return set(re.findall(r"\(NEEDED\).*\[(.*)\]", told))


def test_any_python_of_systems_with_a_newer_glibc(wheel: Wheel) -> None:
    tag = re.fullmatch(
        r"spillway_kv-[\d.]+-py3-none-manylinux_2_(\d+)_x86_64\.whl", wheel.file.name
    )
    assert tag is not None, wheel.file.name
    # It is built on Debian 12, which has glibc 2.36; Ubuntu 24.04 has 2.39.
    assert int(tag[1]) <= 36


def test_what_it_needs_is_beside_it(wheel: Wheel) -> None:
    own = wheel.unpacked / "spillway_kv/_lib/libspillway.so.1"
    carried = list((wheel.unpacked / "spillway_kv.libs").iterdir())
    assert {name.name.split("-")[0] for name in carried} >= {"libgrpc", "libprotobuf", "libtbb"}
    names = {path.name for path in carried}
    for file in (own, *carried):
        left = {n for n in needed(file) - names if not SYSTEM.fullmatch(n)}
        assert left == set(), file.name
    # No other package's library has these names. The loader identifies libraries by name.
    assert all(re.search(r"-[0-9a-f]{8}\.so", name) for name in names)


def test_it_has_the_licence(wheel: Wheel) -> None:
    assert metadata(wheel.file, "licenses/LICENSE") == (ROOT / "LICENSE").read_text()


def test_in_an_empty_environment(wheel: Wheel, tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    # Other packages come from this environment, but not its links to the checkout.
    borrowed = sysconfig.get_path("purelib")
    done = subprocess.run(
        [
            *(sys.executable, ROOT / "scripts/try_wheel.py", wheel.file.parent),
            *("--borrow", borrowed, "--output", output),
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(output.read_text())
    assert result["attend"]["transport"] == "embedded"
    assert result["attend"]["devices"][0].startswith(("cpu", "cuda"))
    assert result["programs"] == [
        "spillway-lab [OPTIONS] COMMAND [ARGS]...",
        "spillway-cluster [OPTIONS] COMMAND [ARGS]...",
    ]
    assert result["vllm_plugin"] == "register"


def test_a_folder_without_them(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "scripts/try_wheel.py", tmp_path], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert f"{tmp_path} has 0 wheels of Spillway, not 1" in done.stderr
