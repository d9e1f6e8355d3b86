"""TLS files and the token with which a client connects to a daemon."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

_TLS = "tls:"
_TOKEN = re.compile(r"[A-Za-z0-9._~+/=-]*")
_PLAIN = ("tcp:", "unix:", "/")


@dataclass(frozen=True)
class Access:
    """How a connection is encrypted and authenticated.

    Attributes:
        tls: Whether TLS is used.
        ca: PEM file with the authorities that sign the daemon's certificate; empty: the system's.
        cert: PEM file with the client's certificate; empty: none.
        key: PEM file with its key.
        token: Bearer token; empty: none.
    """

    tls: bool = False
    ca: str = ""
    cert: str = ""
    key: str = ""
    token: str = ""

    def __repr__(self) -> str:
        # Without the token, which would end up in logs.
        return f"Access(tls={self.tls}, ca={self.ca!r}, cert={self.cert!r})"

    @staticmethod
    def of(
        target: str,
        ca: str | Path | None,
        cert: str | Path | None,
        key: str | Path | None,
        token: str | None,
    ) -> Access:
        """Returns the access to a target, from the arguments or else from the environment.

        Args:
            target: The target as the user wrote it.
            ca: PEM file, or None for `SPILLWAY_TLS_CA`.
            cert: PEM file, or None for `SPILLWAY_TLS_CERT`.
            key: PEM file, or None for `SPILLWAY_TLS_KEY`.
            token: None for `SPILLWAY_TOKEN`.

        Raises:
            ValueError: TLS files for a target without TLS, a certificate without its key, or a
                token with invalid characters.
        """
        named = ca is not None or cert is not None or key is not None
        files = {
            name: os.environ.get(f"SPILLWAY_TLS_{name.upper()}", "") if path is None else str(path)
            for name, path in (("ca", ca), ("cert", cert), ("key", key))
        }
        if token is None:
            token = os.environ.get("SPILLWAY_TOKEN", "")
        if not _TOKEN.fullmatch(token):
            # The message does not contain the token, which is a secret.
            raise ValueError("the token has characters other than letters, digits and -._~+/=")
        plain = target.startswith(_PLAIN)
        if plain and named:
            raise ValueError(
                f"ca, cert and key are for TLS, which {target} does not use: name tls:host:port"
            )
        tls = target.startswith(_TLS) or (not plain and bool(files["ca"] or files["cert"]))
        if not tls:
            return Access(token=token)
        if bool(files["cert"]) != bool(files["key"]):
            raise ValueError(
                "a client's certificate and its key must both be named: one is missing"
            )
        return Access(tls=True, token=token, **files)
