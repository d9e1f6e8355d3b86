"""Man pages and completions have all commands and options, and completion works in bash."""

from __future__ import annotations

import gzip
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from daemon_process import ROOT, binary
from packages import build, copied, files

MANUAL = ROOT / "scripts/manual"
if not MANUAL.exists():
    pytest.skip("no checkout here, only what a bundle has of it", allow_module_level=True)

BUILT = binary().resolve().parents[1]
VERSION = (ROOT / "VERSION").read_text().strip()


class Program(NamedTuple):
    """A program: its name, how it is called here, and the folder with its pages."""

    name: str
    command: list[str]
    share: Path


def typer_program(name: str, module: str, folder: Path) -> Program:
    """A program written in Python, with pages that are made here."""
    make = ["--version", VERSION, "--output", str(folder), "--typer", name, module]
    subprocess.run([sys.executable, "-B", str(MANUAL), *make], check=True)
    return Program(name, [sys.executable, "-m", module], folder)


@pytest.fixture(
    scope="module", params=["spillway", "spillwayd", "spillway-cluster", "spillway-lab"]
)
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Program:
    """The programs of the build with the pages that the build made, and those written in Python."""
    share = BUILT / "packaging/share"
    if request.param == "spillway":
        return Program("spillway", [str(BUILT / "clients/cpp/spillway")], share)
    if request.param == "spillwayd":
        return Program("spillwayd", [str(BUILT / "daemon/spillwayd")], share)
    folder = tmp_path_factory.mktemp("share")
    module = request.param.replace("spillway-", "spillway_kv.")
    return typer_program(request.param, f"{module}.cli", folder)


def helps(command: list[str], *path: str) -> Iterator[tuple[tuple[str, ...], str]]:
    """The --help of the program and of all commands below it."""
    environment = {"PATH": "/usr/bin:/bin", "TYPER_USE_RICH": "0", "COLUMNS": "80"}
    environment["PYTHONPATH"] = ":".join(p for p in sys.path if p)
    if command[0] == sys.executable:
        # Runs in one process, because some modules take seconds to load.
        reader = str(Path(__file__).with_name("typer_helps.py"))
        told = [sys.executable, reader, command[-1]]
        done = subprocess.run(told, env=environment, capture_output=True, text=True, check=True)
        yield from ((tuple(words), text) for words, text in json.loads(done.stdout))
        return
    text = subprocess.run(
        [*command, *path, "--help"], env=environment, capture_output=True, text=True, check=True
    ).stdout
    yield path, text
    listed = re.search(r"^Subcommands:\n((?:  .*\n)+)", text, re.MULTILINE)
    for name in re.findall(r"^  (\S+)", listed[1], re.MULTILINE) if listed else []:
        yield from helps(command, *path, name)


def options_in(text: str) -> set[str]:
    """The option names with two dashes."""
    return set(re.findall(r"^  (?:-\w,)?(--[\w-]+)", text, re.MULTILINE))


def page(program: Program) -> str:
    """The man page without roff's escapes."""
    (path,) = program.share.glob(f"man/man?/{program.name}.?.gz")
    return gzip.decompress(path.read_bytes()).decode().replace("\\-", "-")


def section(text: str, path: tuple[str, ...], name: str) -> str:
    """The section of the page for a command."""
    if not path:
        return text.split(".SH OPTIONS\n")[1].split(".SH COMMANDS\n")[0]
    wanted = re.escape(" ".join((name, *path)))
    (found,) = re.findall(rf"^\.SS {wanted} \[.*\n((?:(?!\.S[SH]).*\n)*)", text, re.MULTILINE)
    return str(found)


def completed(program: Program, *words: str) -> list[str]:
    """The completions of bash for the last word."""
    script = (
        'source "$1"; shift; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); '
        f"_{program.name.replace('-', '_')}; "
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    file = program.share / f"bash-completion/completions/{program.name}"
    done = subprocess.run(
        ["bash", "-c", script, "bash", str(file), program.name, *words],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split()


def test_all_is_there(program: Program) -> None:
    manual = page(program)
    zsh = (program.share / f"zsh/site-functions/_{program.name}").read_text()
    count = 0
    for path, text in helps(program.command):
        options = options_in(text)
        assert options, path
        told = section(manual, path, program.name)
        for option in options - ({"--help"} if path else set()):
            assert re.search(rf"^\.TP\n.*\\fB{option}\\fR", told, re.MULTILINE), (path, option)
        assert options <= set(completed(program, *path, "--")), path
        function = "_" + "_".join((program.name, *path)).replace("-", "_")
        body = zsh.split(f"\n{function}() {{\n")[1].split("\n}\n")[0]
        for option in options:
            assert f"{option}[" in body, (path, option)
        if path:
            assert path[-1] in completed(program, *path[:-1], ""), path
            assert f"{path[-1]}) {function} ;;" in zsh
        count += len(options)
    # There are no other entries, such as those of commands or options that no longer exist.
    assert manual.count(".TP\n\\fB") == count - len(list(helps(program.command))) + 1


def test_values_are_completed(program: Program, tmp_path: Path) -> None:
    (tmp_path / "a.toml").touch()
    (tmp_path / "folder").mkdir()
    here = f"{tmp_path}/"
    if program.name == "spillway":
        assert completed(program, "--format", "") == ["table", "json"]
        assert completed(program, "attend-bench", "--dtype", "b") == ["bf16"]
        # The program's options are also completed after a command.
        assert completed(program, "models", "delete", "--form") == ["--format"]
        assert completed(program, "tokens", "new", "--file", here + "a") == [here + "a.toml"]
        assert completed(program, "--timeout", "") == []
    elif program.name == "spillwayd":
        assert completed(program, "--config", here + "a") == [here + "a.toml"]
        assert completed(program, "--arena-directory", here) == [here + "folder"]
    elif program.name == "spillway-lab":
        assert completed(program, "train-hash", "--method", "h") == ["hashattention"]
        assert completed(program, "eval", "fidelity", "--mlp", here + "a") == [here + "a.toml"]
        assert completed(program, "eval", "fidelity", "--output", here) == [here + "folder"]
    else:
        assert completed(program, "up", "--strategy", "strict") == ["strict-spread", "strict-pack"]
        assert completed(program, "up", "--config", here + "a") == [here + "a.toml"]


def test_files_are_shell(program: Program) -> None:
    file = program.share / f"bash-completion/completions/{program.name}"
    subprocess.run(["bash", "-n", file], check=True)
    assert completed(program, "no-such-command", "") == completed(program, "")


def test_the_page_says_whose_version(program: Program) -> None:
    assert f'"Spillway {VERSION}"' in page(program).splitlines()[0]


def test_the_wheel_brings_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "share/man/man1").mkdir(parents=True)
    (tmp_path / "share/man/man1/spillway-cluster.1.gz").touch()
    monkeypatch.setenv("SPILLWAY_SHARE", str(tmp_path / "share"))
    wheel = build(copied(tmp_path), tmp_path / "made", None)
    page = f"spillway_kv-{VERSION}.data/data/share/man/man1/spillway-cluster.1.gz"
    assert page in files(wheel)
