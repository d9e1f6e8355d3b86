"""What one tenant's giant attends cost another's decode steps, by a daemon with tokens.

`small` decodes by a doorbell, one token after the other, over 16K tokens by the default policy.
`giant` attends to all rows of a long context, 16 queries a call, from as many threads as
--giants says, without a pause. Times of `small` alone and beside `giant` come from turns in one
run. Prints a JSON object: milliseconds, and the ratios of beside to alone.

    python bench/rpc/fairness.py [--device cpu] [--tokens 65536] [--giants 2] [--seconds 4]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import spillway
from spillway import Client, Policy, Sequence
from spillway_lab import serving

ROOT = Path(__file__).resolve().parents[2]
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
SMALL_TOKENS, CHUNK, QUERIES, ROUNDS = 16384, 4096, 16, 4
TOKENS = {"small": "small-token-of-the-benchmark", "giant": "giant-token-of-the-benchmark"}


def entries() -> str:
    """The file of tokens."""
    digests = {name: hashlib.sha256(token.encode()).hexdigest() for name, token in TOKENS.items()}
    return "\n".join(
        f'[[token]]\nname = "{name}"\nsha256 = "{digest}"' for name, digest in digests.items()
    )


def normal(seed: int, *shape: int) -> np.ndarray:
    """Standard normal numbers in half precision."""
    return np.random.default_rng(seed).standard_normal(shape, np.float32).astype(np.float16)


def filled(client: Client, token_count: int) -> Sequence:
    """A sequence of a model of one layer."""
    model = client.create_model(
        layer_count=1,
        query_head_count=HEADS,
        kv_head_count=KV_HEADS,
        head_dim=HEAD_DIM,
        dtype="float16",
    )
    sequence = client.create_sequence(model)
    rows = normal(1, KV_HEADS, CHUNK, HEAD_DIM)
    for _ in range(0, token_count, CHUNK):
        sequence.append(0, None, rows, rows)
    return sequence


def steps(client: Client, sequence: Sequence, seconds: float) -> list[float]:
    """Milliseconds of each decode step."""
    q = normal(2, 1, 1, HEADS, HEAD_DIM)
    row = normal(3, 1, KV_HEADS, 1, HEAD_DIM)
    took = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        with client.begin_step([sequence]) as step:
            begin = time.perf_counter()
            step.attend(0, q, row, row)
            took.append(1000 * (time.perf_counter() - begin))
    return took


class Giants:
    """Attends over all rows without a pause, until it is left."""

    def __init__(self, sequence: Sequence, count: int) -> None:
        self._sequence = sequence
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run) for _ in range(count)]
        self.took: list[float] = []

    def _run(self) -> None:
        q = normal(4, QUERIES, HEADS, HEAD_DIM)
        while not self._stop.is_set():
            begin = time.perf_counter()
            self._sequence.attend(0, q, policy=Policy(selector="all"))
            self.took.append(1000 * (time.perf_counter() - begin))

    def __enter__(self) -> Giants:
        for thread in self._threads:
            thread.start()
        time.sleep(0.2)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--giants", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=4)
    options = parser.parse_args()
    binary = serving.find_binary(ROOT)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "tokens.toml"
        file.touch(0o600)
        file.write_text(entries())
        flags = ("--device", options.device, "--tokens-file", str(file))
        log = Path(folder) / "log"
        # Who waits until the daemon serves asks it something.
        os.environ["SPILLWAY_TOKEN"] = TOKENS["small"]
        with serving.running_daemon(binary, log, *flags, timeout=60) as target:
            small = spillway.connect(target, token=TOKENS["small"])
            giant = spillway.connect(target, token=TOKENS["giant"], timeout=600)
            sequence = filled(small, SMALL_TOKENS)
            large = filled(giant, options.tokens)
            steps(small, sequence, 0.5)  # not timed
            alone: list[float] = []
            beside: list[float] = []
            took: list[float] = []
            for _ in range(ROUNDS):
                alone += steps(small, sequence, options.seconds / ROUNDS)
                with Giants(large, options.giants) as giants:
                    beside += steps(small, sequence, options.seconds / ROUNDS)
                took += giants.took
            told = {"transport": small.step_transport, "giant_ms": float(np.median(took))}
            for name, share in (("p50", 50), ("p99", 99)):
                one, both = np.percentile(alone, share), np.percentile(beside, share)
                told[f"alone_{name}_ms"] = float(one)
                told[f"beside_{name}_ms"] = float(both)
                told[f"ratio_{name}"] = float(both / one)
            print(json.dumps(vars(options) | told | {"steps": [len(alone), len(beside)]}))
            small.close()
            giant.close()


if __name__ == "__main__":
    main()
