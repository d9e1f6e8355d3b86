"""Contents of the wheel: one package, its programs and extras, with and without the engine."""

from __future__ import annotations

import configparser
import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest
from daemon_process import ROOT, binary
from packages import build, copied, files, metadata

if not (ROOT / "clients/python/pyproject.toml").exists():
    pytest.skip("no checkout here, only what a bundle has of it", allow_module_level=True)

VERSION = (ROOT / "VERSION").read_text().strip()


class Wheels(NamedTuple):
    """Wheels built from one copy of the sources. The first contains libspillway."""

    platform: Path
    pure: Path


def real_library() -> Path:
    return binary().resolve().parents[1] / "lib/libspillway.so.1"


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Wheels:
    """Builds the wheel with libspillway and without it."""
    folder = tmp_path_factory.mktemp("wheels")
    package = copied(folder)
    platform = build(package, folder / "platform", real_library())
    # Files of earlier builds are not in the wheels.
    stale = package / "build/lib/spillway_kv/stale.py"
    stale.parent.mkdir(parents=True)
    stale.touch()
    return Wheels(platform, build(package, folder / "pure", None))


def test_programs_and_plugin(wheels: Wheels) -> None:
    for wheel in wheels:
        told = configparser.ConfigParser()
        told.read_string(metadata(wheel, "entry_points.txt"))
        assert dict(told["console_scripts"]) == {
            "spillway-cluster": "spillway_kv.programs:cluster",
            "spillway-lab": "spillway_kv.programs:lab",
        }
        assert dict(told["vllm.general_plugins"]) == {"spillway": "spillway_kv.vllm:register"}


def test_one_package_holds_all(wheels: Wheels) -> None:
    assert {name.split("/")[0] for name in files(wheels.pure)} == {
        "spillway_kv",
        f"spillway_kv-{VERSION}.dist-info",
    }
    nested = {tuple(name.split("/")) for name in files(wheels.pure) if name.count("/") == 2}
    assert {folder for package, folder, _ in nested if package == "spillway_kv"} == {
        "_proto",
        "cluster",
        "lab",
        "transformers",
        "vllm",
    }
    assert {
        "spillway_kv/py.typed",
        "spillway_kv/_proto/attention_service_pb2.pyi",
        "spillway_kv/lab/evaluation/command.py",
    } <= files(wheels.pure)


def test_nothing_called_spillway_is_required(wheels: Wheels) -> None:
    # PyPI's spillway is another project, and whoever owns such a name could send code to users.
    for wheel in wheels:
        told = metadata(wheel, "METADATA")
        assert "\nName: spillway-kv\n" in told
        extras = set(re.findall(r"^Provides-Extra: (.*)$", told, re.M))
        assert extras == {"transformers", "vllm", "ray", "lab", "ruler", "dev"}
        needs = re.findall(r"^Requires-Dist: ([\w.-]+)", told, re.M)
        assert len(needs) > 20
        assert [name for name in needs if "spillway" in name.lower()] == []


def test_libspillway_is_there_when_given(wheels: Wheels) -> None:
    library = "spillway_kv/_lib/libspillway.so.1"
    with zipfile.ZipFile(wheels.platform) as archive:
        assert archive.read(library) == real_library().read_bytes()
    assert files(wheels.pure) == {n for n in files(wheels.platform) if n != library}
    assert wheels.pure.name == f"spillway_kv-{VERSION}-py3-none-any.whl"
    assert wheels.platform.name.startswith(f"spillway_kv-{VERSION}-py3-none-linux_")


def test_licences_come_with_what_an_archive_carries(tmp_path: Path) -> None:
    archive = tmp_path / "archive"
    terms = archive / "share/doc/spillway/licenses/libgrpc++1.51"
    for file in (terms, archive / "lib/libspillway.so.1"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(file.name)
    wheel = build(copied(tmp_path), tmp_path / "made", archive / "lib/libspillway.so.1")
    carried = {n.removeprefix("spillway_kv/_lib/") for n in files(wheel) if "/_lib/" in n}
    assert carried == {"libspillway.so.1", "licenses/libgrpc++1.51"}


def test_a_library_that_is_not_there(tmp_path: Path) -> None:
    package = copied(tmp_path)
    with pytest.raises(AssertionError, match="SPILLWAY_LIBRARY_FILE names /none, which is no file"):
        build(package, tmp_path / "made", Path("/none"))
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


def test_all_goes_through_the_wheel_own_library(
    wheels: Wheels, target: str, tmp_path: Path
) -> None:
    with zipfile.ZipFile(wheels.platform) as archive:
        archive.extractall(tmp_path)
    used = run(
        tmp_path,
        "import sys\n"
        "sys.modules['grpc'] = None\n"
        "import spillway_kv\n"
        f"with spillway_kv.connect({target!r}) as client:\n"
        "    print(client.transport, client.connection.channel.library._name)",
    )
    assert used == f"daemon {tmp_path}/spillway_kv/_lib/libspillway.so.1"


# Modules that take long to load, and the client.
SLOW = "{'torch', 'transformers', 'numpy', 'matplotlib', 'grpc', 'spillway_kv.client'}"


@pytest.fixture(scope="module")
def unpacked(wheels: Wheels, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files of the wheel without libspillway."""
    folder = tmp_path_factory.mktemp("unpacked")
    with zipfile.ZipFile(wheels.pure) as archive:
        archive.extractall(folder)
    return folder


def test_help_loads_nothing_that_is_slow(unpacked: Path) -> None:
    shown = run(
        unpacked,
        "import sys\n"
        "sys.argv = ['spillway-lab', '--help']\n"
        "from spillway_kv.programs import lab\n"
        "try:\n"
        "    lab()\n"
        "except SystemExit as end:\n"
        f"    print('ends with', end.code, 'loaded', {SLOW} & set(sys.modules))",
    )
    assert "Usage: spillway-lab" in shown
    for command in ("bench", "eval", "models", "train-hash", "import-hash"):
        assert command in shown
    assert shown.endswith("ends with 0 loaded set()")


@pytest.mark.parametrize(
    ("program", "missing", "extra"),
    [("lab", "typer", "lab"), ("lab", "matplotlib", "lab"), ("cluster", "ray", "ray")],
)
def test_a_program_names_the_extra_that_is_missing(
    unpacked: Path, program: str, missing: str, extra: str
) -> None:
    asked = {"lab": ["eval", "--help"], "cluster": ["status"]}[program]
    said = run(
        unpacked,
        "import sys\n"
        f"sys.modules[{missing!r}] = None\n"
        f"sys.argv = ['spillway-{program}', *{asked}]\n"
        f"from spillway_kv.programs import {program}\n"
        "try:\n"
        f"    {program}()\n"
        "except SystemExit as end:\n"
        "    print(end.code)",
    )
    assert said == (
        f"spillway-{program} needs {missing}, which is not installed: "
        f"pip install 'spillway-kv[{extra}]'"
    )


def test_modules_name_the_extra_that_is_missing(unpacked: Path) -> None:
    said = run(
        unpacked,
        "import sys\n"
        "sys.modules |= {'torch': None, 'ray': None}\n"
        "import spillway_kv\n"
        "for use in ('import spillway_kv.transformers', \"spillway_kv.connect('ray:')\"):\n"
        "    try:\n"
        "        exec(use)\n"
        "    except ModuleNotFoundError as error:\n"
        "        print(error)",
    )
    assert said.splitlines() == [
        "spillway_kv.transformers needs torch, which is not installed: "
        "pip install 'spillway-kv[transformers]'",
        "ray: needs ray, which is not installed: pip install 'spillway-kv[ray]'",
    ]


def test_names_are_loaded_on_use(unpacked: Path) -> None:
    said = run(
        unpacked,
        "import sys\n"
        "import spillway_kv\n"
        f"print({SLOW} & set(sys.modules))\n"
        "assert spillway_kv.TopK.__module__ == 'spillway_kv.policy'\n"
        "print(set(spillway_kv.__all__) - set(dir(spillway_kv)), spillway_kv.errors.__name__)\n"
        "try:\n"
        "    spillway_kv.nothing\n"
        "except AttributeError as error:\n"
        "    print(error)\n"
        "names = {}\n"
        "exec('from spillway_kv import *', names)\n"
        "print(names['connect'] is spillway_kv.connect)",
    )
    assert said.splitlines() == [
        "set()",
        "set() spillway_kv.errors",
        "module 'spillway_kv' has no attribute 'nothing'",
        "True",
    ]


# What the plugin takes of vLLM: the files of a package of this name, made of their texts.
VLLM = {
    "version.py": "__version__ = {version!r}",
    "config/__init__.py": """
class KVTransferConfig: ...
def get_current_vllm_config_or_none():
    return None
""",
    "engine/arg_utils.py": """
class EngineArgs:
    attention_backend = None
    attention_config = type("Config", (), dict(backend=None))()
    def create_engine_config(self):
        return "stock"
""",
    "platforms/__init__.py": """
class Platform:
    @classmethod
    def get_attn_backend_cls(cls, selected_backend, attn_selector_config):
        return f"stock for {selected_backend}"
current_platform = Platform()
""",
    "v1/attention/backend.py": "class AttentionType: ...",
    "v1/attention/backends/registry.py": """
import enum
class AttentionBackendEnum(enum.Enum):
    CUSTOM = ""
registered = {}
def register_backend(backend, path):
    registered[backend.name] = path
""",
}


def registering(unpacked: Path, tmp_path: Path, version: str, program: str) -> list[str]:
    """Runs a program after the plugin has registered itself with a vLLM of this version."""
    for name, text in VLLM.items():
        file = tmp_path / "vllm" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text.replace("{version!r}", repr(version)))
    code = (
        f"import json, sys\nsys.path.insert(0, {str(tmp_path)!r})\n"
        "from spillway_kv.vllm import register\n"
        "register()\n"
        "ours = sorted(name for name in sys.modules if name.startswith('spillway_kv'))\n"
        f"slow = sorted({SLOW} & set(sys.modules))\n"
        f"said = [ours, slow]\n{program}\nprint(json.dumps(said))"
    )
    said: list[str] = json.loads(run(unpacked, code))
    return said


@pytest.mark.parametrize("version", ["0.32.4", "0.33.0"])
def test_the_plugin_does_nothing_unless_it_is_chosen(
    unpacked: Path, tmp_path: Path, version: str
) -> None:
    said = registering(
        unpacked,
        tmp_path,
        version,
        "from vllm.engine.arg_utils import EngineArgs\n"
        "from vllm.platforms import current_platform\n"
        "from vllm.v1.attention.backends.registry import registered\n"
        "said += [EngineArgs().create_engine_config(), registered]\n"
        "said += [current_platform.get_attn_backend_cls('FLASH_ATTN', None)]",
    )
    assert said == [
        ["spillway_kv", "spillway_kv.vllm", "spillway_kv.vllm.hooks"],
        [],
        "stock",
        {"CUSTOM": "spillway_kv.vllm.backend.SpillwayBackend"},
        "stock for FLASH_ATTN",
    ]


@pytest.mark.parametrize("version", ["0.31.0", "0.34.0", "0.320.1"])
def test_with_another_vllm_only_the_choice_is_an_error(
    unpacked: Path, tmp_path: Path, version: str
) -> None:
    said = registering(
        unpacked,
        tmp_path,
        version,
        "from importlib import import_module\n"
        "from vllm.v1.attention.backends.registry import registered\n"
        "try:\n"
        "    import_module(registered['CUSTOM'].rpartition('.')[0])\n"
        "except ImportError as error:\n"
        "    said.append(str(error))",
    )
    assert said == [
        ["spillway_kv", "spillway_kv.vllm"],
        [],
        "--attention-backend CUSTOM: Spillway's backend is for vLLM 0.32 and 0.33, and this is "
        f"vLLM {version}",
    ]


def test_a_vllm_without_such_a_backend_starts(unpacked: Path, tmp_path: Path) -> None:
    hide = "sys.modules['vllm.v1.attention.backends.registry'] = None\n"
    code = (
        f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\n{hide}"
        "from spillway_kv.vllm import register\n"
        "register()\nprint('starts')"
    )
    registering(unpacked, tmp_path, "0.9.0", "")
    assert run(unpacked, code) == "starts"
