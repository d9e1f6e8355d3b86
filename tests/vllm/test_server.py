"""vLLM's server over HTTP: clients that stream, that leave, and that share a prompt."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from comparison import Comparison
from engines import Engine, running
from hardware import ON_GPU
from models import VOCABULARY
from server import Server, serving

_CLIENTS = 32
_NEW_TOKENS = 24
_SHARED_TOKENS = 16_384 if ON_GPU else 4096
_ARGUMENTS = {
    "max_model_len": 2 * _SHARED_TOKENS,
    "max_num_batched_tokens": 512,
    "max_num_seqs": 16,
}
_ENVIRONMENT = {"VLLM_SPILLWAY_QUALITY": "exact", "VLLM_SPILLWAY_MEMORY": "1GiB"}


@pytest.fixture(scope="module")
def stock(model_folder, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Stock vLLM."""
    log = tmp_path_factory.mktemp("stock") / "log"
    with running(model_folder("llama"), log, **_ARGUMENTS) as engine:
        yield engine


@pytest.fixture(scope="module")
def server(model_folder, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with the plugin and exact attention."""
    log: Path = tmp_path_factory.mktemp("server") / "log"
    with serving(model_folder("llama"), log, _ENVIRONMENT, **_ARGUMENTS) as found:
        yield found


def _prompt(draw: random.Random, length: int) -> list[int]:
    return [draw.randrange(1, VOCABULARY) for _ in range(length)]


def _idle(server: Server) -> bool:
    """Whether no request runs or waits, within 30 seconds."""
    until = time.monotonic() + 30
    while time.monotonic() < until:
        found = server.metrics()
        if found["num_requests_running"] == found["num_requests_waiting"] == 0:
            return True
        time.sleep(0.1)
    return False


def test_clients_stream_and_some_leave(server: Server, stock: Engine) -> None:
    """Twice as many clients as run at once. Those that stay get stock vLLM's tokens."""
    draw = random.Random(3)
    prompts = [_prompt(draw, draw.choice([5, 60, 300, 900])) for _ in range(_CLIENTS)]
    leaves = [3 if i % 4 == 1 else None for i in range(_CLIENTS)]
    with ThreadPoolExecutor(_CLIENTS) as pool:
        got = list(pool.map(server.stream, prompts, [_NEW_TOKENS] * _CLIENTS, leaves))
    schedule = [
        {
            "arrives": 0,
            "prompt": prompt,
            "max_tokens": _NEW_TOKENS,
            "aborted": None if leave is None else -1,
        }
        for prompt, leave in zip(prompts, leaves, strict=True)
    ]
    seen = Comparison()
    seen.add(schedule, stock.ask(schedule), {"tokens": [[tokens] for tokens in got]})
    assert not seen.differing
    assert seen.token_count > 300
    stayed = [tokens for tokens, leave in zip(got, leaves, strict=True) if leave is None]
    assert {len(tokens) for tokens in stayed} == {_NEW_TOKENS}
    # Requests whose clients have left end too.
    assert _idle(server)


def test_a_shared_prompt_is_computed_once(server: Server, stock: Engine) -> None:
    """Eight clients ask about one document at once."""
    draw = random.Random(4)
    shared = _prompt(draw, _SHARED_TOKENS)
    prompts = [shared + _prompt(draw, 7 + i) for i in range(8)]
    before = server.metrics()
    with ThreadPoolExecutor(8) as pool:
        got = list(pool.map(server.stream, prompts, [8] * 8))
    after = server.metrics()
    schedule = [{"arrives": 0, "prompt": prompt, "max_tokens": 8} for prompt in prompts]
    seen = Comparison()
    seen.add(schedule, stock.ask(schedule), {"tokens": [[tokens] for tokens in got]})
    assert not seen.differing
    computed, reused = (
        after[f"spillway_{name}_total"] - before.get(f"spillway_{name}_total", 0)
        for name in ("prompt_tokens", "reused_tokens")
    )
    # The document once, the ends, and for each client at most a chunk that had begun already.
    assert computed < _SHARED_TOKENS + 8 * 20 + _ARGUMENTS["max_num_batched_tokens"]
    assert computed + reused == sum(map(len, prompts))
