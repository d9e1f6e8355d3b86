"""Clients of generated stubs, with TLS and a token."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from access_daemon import make_authority, make_certificate, served, token_entry
from daemon_process import ROOT, binary

EXAMPLE = ROOT / "docs/examples/stubs"
TOKEN = "one-token"

if not EXAMPLE.exists():
    pytest.skip("no checkout here, only what a bundle has of it", allow_module_level=True)


@pytest.fixture(scope="module")
def arguments(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """Address, authority and token of a daemon."""
    folder = tmp_path_factory.mktemp("stubs")
    make_authority(folder)
    make_certificate(folder, "server")
    tokens = folder / "tokens.toml"
    tokens.write_text(token_entry("runner", TOKEN))
    tokens.chmod(0o600)
    flags = ("--tls-certificate", folder / "server.pem", "--tls-key", folder / "server.key")
    with served(folder, *map(str, flags), "--tokens-file", str(tokens)) as daemon:
        yield [f"localhost:{daemon.port}", str(folder / "ca.pem"), TOKEN]


def run(command: list[str | Path], made: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Runs a client, with the generated modules on Python's path."""
    environment = {**os.environ, "PYTHONPATH": str(made)} if made else dict(os.environ)
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def python_client(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str | Path], Path]:
    """The client in Python, and the folder of its stubs."""
    made = tmp_path_factory.mktemp("made")
    protos = ROOT / "proto"
    names = [*protos.glob("google/rpc/*.proto"), *protos.glob("spillway/v1/*.proto")]
    out = [f"--python_out={made}", f"--grpc_python_out={made}"]
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{protos}", *out, *map(str, names)]
    subprocess.run(command, check=True)
    return [sys.executable, EXAMPLE / "stubs.py"], made


def test_python(python_client: tuple[list[str | Path], Path], arguments: list[str]) -> None:
    command, made = python_client
    done = run([*command, *arguments], made)
    assert done.returncode == 0, done.stderr
    said = re.fullmatch(
        r"attended to 3000 tokens; certified error of head 0: (0\.\d+)\n"
        r"decoded token 3000; largest difference from numpy: (\S+)\n",
        done.stdout,
    )
    assert said, done.stdout
    assert float(said[1]) <= 0.1
    assert float(said[2]) < 1e-5


def test_cpp(arguments: list[str]) -> None:
    program = binary().resolve().parents[1] / "clients/cpp/stubs_example"
    done = run([program, *arguments])
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(
        r"attended to 3000 tokens; certified error of head 0: 0\.\d+\n"
        r"decoded token 3000: 1024 bytes of output\n",
        done.stdout,
    ), done.stdout


def test_a_wrong_token_is_refused(
    python_client: tuple[list[str | Path], Path], arguments: list[str]
) -> None:
    command, made = python_client
    done = run([*command, *arguments[:2], "another"], made)
    assert done.returncode != 0
    assert "UNAUTHENTICATED" in done.stderr
