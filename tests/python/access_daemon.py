"""Daemons on TCP, with certificates or with a token file, for tests of access control."""

from __future__ import annotations

import hashlib
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from daemon_process import binary, device_flags, tail
from spillway_kv.lab import serving

_EC = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-noenc")


def openssl(folder: Path, *arguments: str) -> None:
    """Runs openssl in a folder."""
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)


def make_authority(folder: Path, name: str = "ca") -> None:
    """Makes a certificate authority: NAME.pem and NAME.key."""
    subject = ("-subj", f"/CN=Test {name}", "-days", "2")
    openssl(folder, "req", "-x509", *_EC, *subject, "-keyout", f"{name}.key", "-out", f"{name}.pem")


def make_certificate(folder: Path, name: str, authority: str = "ca") -> None:
    """Makes NAME.pem and NAME.key for this host, signed by an authority; replaces old ones."""
    alternatives = ("-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1")
    asked = ("-subj", f"/CN={name}", *alternatives, "-keyout", "new.key", "-out", "new.csr")
    openssl(folder, "req", *_EC, *asked)
    signer = ("-CA", f"{authority}.pem", "-CAkey", f"{authority}.key", "-CAcreateserial")
    signed = ("-in", "new.csr", "-out", "new.pem", "-days", "2", "-copy_extensions", "copy")
    openssl(folder, "x509", "-req", *signer, *signed)
    (folder / "new.key").rename(folder / f"{name}.key")
    (folder / "new.pem").rename(folder / f"{name}.pem")


def token_entry(name: str, token: str, **settings: str | int) -> str:
    """An entry of a token file, as `spillway tokens new` prints it."""
    digest = hashlib.sha256(token.encode()).hexdigest()
    lines = [f'name = "{name}"', f'sha256 = "{digest}"']
    lines += [
        f"{key} = {value}" if isinstance(value, int) else f'{key} = "{value}"'
        for key, value in settings.items()
    ]
    return "\n".join(["[[token]]", *lines, ""])


class Served:
    """A daemon on TCP.

    Attributes:
        address: The address for clients, as the daemon logs it.
        log: Its log.
        pid: Its process.
    """

    def __init__(self, address: str, log: Path, pid: int) -> None:
        self.address = address
        self.log = log
        self.pid = pid

    @property
    def port(self) -> int:
        """The daemon's port."""
        return int(self.address.rsplit(":", 1)[1])

    def await_log(self, text: str, since: int = 0) -> None:
        """Waits until the log contains the text, from byte `since` on."""
        wait_for(lambda: text in self.log.read_text(errors="replace")[since:], text)


def wait_for(check: Callable[[], bool], what: str) -> None:
    """Waits until the check is true."""
    deadline = time.monotonic() + 30
    while not check():
        assert time.monotonic() < deadline, f"in vain: {what}"
        time.sleep(0.05)


@contextmanager
def served(folder: Path, *flags: str) -> Iterator[Served]:
    """Runs a daemon on a free port of 127.0.0.1, or where --listen says."""
    serving.prefer_library(binary())
    log = folder / "spillwayd.log"
    listen = () if "--listen" in flags else ("--listen", "tcp:127.0.0.1:0")
    limit = () if "--memory-limit" in flags else ("--memory-limit", "1GiB")
    common = (*limit, "--snapshot-folder", str(folder / "snapshots"))
    with log.open("wb") as output:
        process = subprocess.Popen(
            [binary(), *listen, *common, *device_flags(*flags)],
            stdout=output,
            stderr=subprocess.STDOUT,
        )

    def address() -> str:
        lines = [line for line in log.read_text().splitlines() if " serving address=" in line]
        return lines[0].split(" address=")[1].split(" ")[0] if lines else ""

    try:
        wait_for(lambda: bool(address()) or process.poll() is not None, "the daemon serves")
        assert address(), tail(log)
        yield Served(address(), log, process.pid)
    finally:
        serving.end(process)
    assert process.returncode == 0, tail(log)
