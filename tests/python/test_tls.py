"""TLS and mutual TLS: who may connect, wrong files, and certificates that change."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import spillway_kv
from access_daemon import Served, make_authority, make_certificate, served, wait_for
from helpers import delete_model, step
from test_cli import BINARY as CLI
from test_cli import run as run_cli
from test_daemon import run

Files = dict[str, Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Certificates of a server and a client, and an authority that nobody trusts."""
    folder = tmp_path_factory.mktemp("tls")
    make_authority(folder)
    make_authority(folder, "stranger")
    make_certificate(folder, "server")
    make_certificate(folder, "client")
    make_certificate(folder, "strange", "stranger")
    return folder


@pytest.fixture(scope="module")
def daemon(folder: Path) -> Iterator[Served]:
    """A daemon that requires client certificates."""
    certificate = ("--tls-certificate", str(folder / "server.pem"))
    others = ("--tls-key", str(folder / "server.key"), "--tls-client-ca", str(folder / "ca.pem"))
    with served(folder, *certificate, *others) as daemon:
        yield daemon


def files(folder: Path, ca: str = "ca", client: str = "client") -> Files:
    """The files of a client."""
    return {
        "ca": str(folder / f"{ca}.pem"),
        "cert": str(folder / f"{client}.pem"),
        "key": str(folder / f"{client}.key"),
    }


def decode_and_check(client: spillway_kv.Client) -> None:
    """Appends and attends, in calls and in a step."""
    model = client.create_model(
        layer_count=1, query_head_count=2, kv_head_count=1, head_dim=16, dtype="float32"
    )
    rng = np.random.default_rng(1)
    k, v = rng.standard_normal((2, 1, 1, 8, 16)).astype(np.float32)
    sequence = client.create_sequence(model)
    sequence.append(0, 0, k[0], v[0])
    q = np.zeros((1, 2, 16), np.float32)
    result = sequence.attend(0, q)
    np.testing.assert_allclose(result.out[0, 0], v[0, 0].mean(0), rtol=1e-5, atol=1e-6)
    result = step(sequence, 0, q, k[0, :, :1], v[0, :, :1])
    expected = (v[0, 0].sum(0) + v[0, 0, 0]) / 9
    np.testing.assert_allclose(result.out[0, 0], expected, rtol=1e-5, atol=1e-6)
    delete_model(client, model)


def test_mutual_tls_carries_calls_and_steps(daemon: Served, folder: Path) -> None:
    assert daemon.address.startswith("tls:127.0.0.1:")
    with spillway_kv.connect(daemon.address, **files(folder)) as client:
        assert (client.transport, client.step_transport) == ("daemon", "messages")
        assert client.target == daemon.address
        decode_and_check(client)


def test_a_name_of_the_host_and_an_authority_ask_for_tls(daemon: Served, folder: Path) -> None:
    with spillway_kv.connect(f"localhost:{daemon.port}", **files(folder)) as client:
        assert client.health()
        assert client.target == f"tls:localhost:{daemon.port}"


def test_the_environment_names_the_files(
    daemon: Served, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, path in files(folder).items():
        monkeypatch.setenv(f"SPILLWAY_TLS_{name.upper()}", path)
    monkeypatch.setenv("SPILLWAY_TARGET", daemon.address)
    with spillway_kv.connect() as client:
        assert client.health()
    done = subprocess.run([CLI, "status"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_the_tool_takes_the_files(daemon: Served, folder: Path) -> None:
    named = files(folder)
    own = ("--tls-cert", named["cert"], "--tls-key", named["key"])
    assert run_cli(daemon.address, "--tls-ca", named["ca"], *own, "models").returncode == 0
    refused = run_cli(daemon.address, "--timeout", "5", "--tls-ca", named["ca"], "models")
    assert refused.returncode == 3
    missing = run_cli(daemon.address, "--tls-ca", "/nowhere.pem", *own, "models")
    assert missing.returncode == 2
    assert "the authorities: /nowhere.pem: cannot be read: No such file" in missing.stderr
    halved = run_cli(daemon.address, "--tls-ca", named["ca"], *own[:2], "models")
    assert halved.returncode == 2
    assert "must both be set" in halved.stderr


def test_the_socket_for_its_machine_takes_no_tls(folder: Path, tmp_path: Path) -> None:
    local = f"unix:{tmp_path}/own/local.sock"
    flags = (
        "--tls-certificate",
        str(folder / "server.pem"),
        "--tls-key",
        str(folder / "server.key"),
    )
    with served(folder, *flags, "--local-socket", local) as daemon:
        with spillway_kv.connect(local) as near:
            assert near.step_transport == "doorbell"
            decode_and_check(near)
        with spillway_kv.connect(daemon.address, ca=folder / "ca.pem") as far:
            decode_and_check(far)


@pytest.mark.parametrize(
    ("ca", "client"), [("stranger", "client"), ("ca", "strange"), ("ca", ""), ("", "client")]
)
def test_strangers_do_not_get_in(daemon: Served, folder: Path, ca: str, client: str) -> None:
    named: Files = {}
    if ca:
        named["ca"] = str(folder / f"{ca}.pem")
    if client:
        named |= {key: value for key, value in files(folder, client=client).items() if key != "ca"}
    with pytest.raises(spillway_kv.Unavailable):
        spillway_kv.connect(daemon.address, timeout=5, **named)


def test_without_tls_nobody_gets_in(daemon: Served) -> None:
    for target in (f"127.0.0.1:{daemon.port}", f"tcp:127.0.0.1:{daemon.port}"):
        with pytest.raises(spillway_kv.Unavailable):
            spillway_kv.connect(target, timeout=5)


def test_files_for_a_target_without_tls_are_refused(target: str, folder: Path) -> None:
    for plain in (target, target.removeprefix("unix:"), "tcp:127.0.0.1:1"):
        with pytest.raises(ValueError, match="are for TLS, which"):
            spillway_kv.connect(plain, ca=folder / "ca.pem")
    with pytest.raises(ValueError, match="must both be named"):
        spillway_kv.connect("tls:localhost:1", cert=folder / "client.pem")
    with pytest.raises(
        spillway_kv.InvalidArgument, match=r"/nowhere\.pem: cannot be read: No such"
    ):
        spillway_kv.connect("tls:localhost:1", ca="/nowhere.pem")


def test_certificates_change_while_clients_are_connected(folder: Path, tmp_path: Path) -> None:
    for name in ("ca", "server", "client", "stranger", "strange"):
        for kind in ("pem", "key"):
            shutil.copy(folder / f"{name}.{kind}", tmp_path)
    certificate, key = tmp_path / "server.pem", tmp_path / "server.key"
    flags = ("--tls-certificate", str(certificate), "--tls-key", str(key))
    with served(tmp_path, *flags) as daemon:
        by_old = spillway_kv.connect(daemon.address, ca=tmp_path / "ca.pem")
        decode_and_check(by_old)
        # A broken certificate changes nothing and is logged once.
        certificate.write_text("no certificate")
        daemon.await_log("tls_not_reloaded")
        assert f"{certificate} holds no certificate in PEM" in daemon.log.read_text()
        spillway_kv.connect(daemon.address, ca=tmp_path / "ca.pem").close()
        # A certificate without its key changes nothing either. This happens for a moment during a
        # change.
        before = len(daemon.log.read_text())
        shutil.copy(tmp_path / "strange.pem", certificate)
        daemon.await_log("of the certificate", since=before)
        spillway_kv.connect(daemon.address, ca=tmp_path / "ca.pem").close()
        shutil.copy(tmp_path / "strange.key", key)
        daemon.await_log("tls_reloaded", since=before)

        def connects(ca: str) -> bool:
            try:
                spillway_kv.connect(daemon.address, ca=tmp_path / f"{ca}.pem", timeout=5).close()
            except spillway_kv.Unavailable:
                return False
            return True

        wait_for(lambda: connects("stranger"), "the new certificate is shown")
        assert not connects("ca")
        # Existing connections continue.
        decode_and_check(by_old)
        by_old.close()


def test_what_is_no_certificate_stops_nothing_and_is_told(folder: Path, tmp_path: Path) -> None:
    certificate, key = tmp_path / "server.pem", tmp_path / "server.key"
    for path in (certificate, key):
        shutil.copy(folder / path.name, path)
    flags = ("--tls-certificate", str(certificate), "--tls-key", str(key))
    with served(tmp_path, *flags) as daemon:

        def replaced(make: Callable[[Path], object], said: str) -> None:
            before = len(daemon.log.read_text())
            make(tmp_path / "new")
            (tmp_path / "new").replace(certificate)  # never missing in between
            await_alone(said, before)

        def await_alone(said: str, before: int) -> None:
            daemon.await_log(said, since=before)
            # The daemon's turns go on, and in each of them it finds the same file.
            with spillway_kv.connect(daemon.address, ca=folder / "ca.pem") as client:
                model = client.create_model(
                    layer_count=1, query_head_count=1, kv_head_count=1, head_dim=16
                )
                client.create_sequence(model, ttl=0.01)
                daemon.await_log("expired", since=before)
                delete_model(client, model)
            assert daemon.log.read_text()[before:].count("tls_") == 1

        replaced(os.mkfifo, f"{certificate}: is not a regular file")
        replaced(lambda new: new.write_text(""), f"{certificate} holds no certificate in PEM")
        replaced(lambda new: new.symlink_to("/dev/zero"), f"{certificate}: is not a regular file")
        before = len(daemon.log.read_text())
        certificate.unlink()
        await_alone(f"{certificate}: cannot be read: No such file", before)
        replaced(lambda new: shutil.copy(folder / "server.pem", new), "tls_reloaded")
        replaced(os.mkfifo, f"{certificate}: is not a regular file")
    # It has ended in good order.


@pytest.mark.parametrize(
    ("certificate", "key", "client_ca", "said"),
    [
        (
            "missing",
            "server.key",
            "",
            "tls.certificate (--tls-certificate): {}/missing: cannot be read",
        ),
        ("server.pem", "missing", "", "tls.key (--tls-key): {}/missing: cannot be read"),
        (
            "server.pem",
            "server.key",
            "missing",
            "tls.client_ca (--tls-client-ca): {}/missing: cannot",
        ),
        ("server.key", "server.key", "", "{}/server.key holds no certificate in PEM"),
        ("server.pem", "server.pem", "", "{}/server.pem holds no key in PEM"),
        ("server.pem", "client.key", "", "of the certificate {}/server.pem: key values mismatch"),
        ("server.pem", "locked.key", "", "{}/locked.key holds no key in PEM, without a password"),
        ("server.pem", "server.key", "server.key", "{}/server.key holds no certificates in PEM"),
    ],
)
def test_wrong_files_are_named_at_the_start(
    folder: Path, certificate: str, key: str, client_ca: str, said: str
) -> None:
    locked = folder / "locked.key"
    if not locked.exists():
        lock = ["openssl", "pkcs8", "-topk8", "-in", str(folder / "server.key")]
        subprocess.run([*lock, "-passout", "pass:secret", "-out", str(locked)], check=True)
    flags = ["--tls-certificate", str(folder / certificate), "--tls-key", str(folder / key)]
    if client_ca:
        flags += ["--tls-client-ca", str(folder / client_ca)]
    done = run("--listen", "tcp:127.0.0.1:0", "--device", "cpu", *flags)
    assert done.returncode == 1
    assert said.format(folder) in done.stderr


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--tls-certificate", "a"], "must both be set"),
        (["--tls-key", "a"], "must both be set"),
        (["--tls-client-ca", "a"], "without tls.certificate"),
        (
            ["--listen", "unix:/tmp/a/b", "--tls-certificate", "a", "--tls-key", "b"],
            "TLS is only for a TCP address",
        ),
    ],
)
def test_settings_that_do_not_go_together(flags: list[str], said: str) -> None:
    done = run("--listen", "tcp:127.0.0.1:0", *flags) if "--listen" not in flags else run(*flags)
    assert done.returncode == 2
    assert said in done.stderr


def test_plaintext_beyond_this_machine_is_warned_of(tmp_path: Path) -> None:
    with served(tmp_path, "--listen", "tcp:0.0.0.0:0", "--allow-remote") as daemon:
        assert "remote_plaintext" in daemon.log.read_text()
    with served(tmp_path) as daemon:
        assert "remote_plaintext" not in daemon.log.read_text()
