"""Measures how much one tenant's long attends slow down another tenant's decode steps.

The tenant `small` decodes by doorbell, one token after the other, over 16K tokens with the
default policy. The tenant `giant` attends to all rows of a long context without a pause, with 16
queries a call and --giants threads. In turns, `small` decodes the same tokens alone and with
`giant`. The outputs must be bit-identical, or the run fails. Prints a JSON object: the
milliseconds of a step's attend alone (`alone`) and with `giant` (`beside`), and the ratios of
`beside` to `alone`, over all rounds and for each round. Unknown flags are passed to the daemon.

    python bench/rpc/fairness.py [--device cpu] [--tokens 65536] [--giants 2] [--steps 100]
        [--rounds 4]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import tempfile
import threading
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import spillway_kv
from decoding import (
    CHUNK,
    ERROR_MAX,
    HEAD_DIM,
    HEADS,
    ROOT,
    Decoder,
    error_of,
    filled,
    normal,
    quantiles,
    surroundings,
)
from spillway_kv import Policy, Sequence
from spillway_kv.lab import serving

SMALL_TOKENS, QUERIES = 16384, 16
TOKENS = {"small": "small-token-of-the-benchmark", "giant": "giant-token-of-the-benchmark"}


def entries() -> str:
    """The content of the token file."""
    digests = {name: hashlib.sha256(token.encode()).hexdigest() for name, token in TOKENS.items()}
    return "\n".join(
        f'[[token]]\nname = "{name}"\nsha256 = "{digest}"' for name, digest in digests.items()
    )


class Giants:
    """A context manager: while it is active, threads attend to all rows without a pause.

    Attributes:
        took: Milliseconds of each attend.
        error: Relative error of the first attend, compared with double precision.
    """

    def __init__(self, sequence: Sequence, count: int) -> None:
        self._sequence, self._count = sequence, count
        self._q = normal(4, QUERIES, HEADS, HEAD_DIM)
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self._failures: list[BaseException] = []
        self.took: list[float] = []
        out = self._attend()
        self._answer = zlib.crc32(out)
        # The last query sees every row.
        self.error = error_of(out[-1], self._q[-1], sequence.token_count // CHUNK)
        if not self.error <= ERROR_MAX:
            raise SystemExit(f"a giant's error is {self.error}, more than {ERROR_MAX}")

    def _attend(self) -> np.ndarray:
        result = self._sequence.attend(
            0, self._q, policy=Policy(selector="all"), out_dtype="float32"
        )
        return np.ascontiguousarray(result.out)

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                begin = time.perf_counter()
                out = self._attend()
                self.took.append(1000 * (time.perf_counter() - begin))
                if zlib.crc32(out) != self._answer:
                    raise SystemExit("a giant answers otherwise than before")
        except BaseException as error:
            self._failures.append(error)

    def __enter__(self) -> Giants:
        self._stop.clear()
        self._threads = [threading.Thread(target=self._run) for _ in range(self._count)]
        for thread in self._threads:
            thread.start()
        time.sleep(0.2)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        if self._failures:
            raise self._failures[0]


def compared(alone: np.ndarray, beside: np.ndarray) -> dict[str, Any]:
    """Quantiles of both, and their ratios."""
    one, both = quantiles(alone), quantiles(beside)
    ratios = {f"ratio_{name.removesuffix('_ms')}": both[name] / one[name] for name in one}
    return {"alone": one, "beside": both, **ratios}


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--giants", type=int, default=2)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=4)
    options, more = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "tokens.toml"
        file.touch(0o600)
        file.write_text(entries())
        # No audit, because its results change later answers.
        flags = ("--device", options.device, "--tokens-file", str(file), "--audit-share", "0")
        log = Path(folder) / "log"
        # running_daemon calls the daemon until it answers, and needs a token for this.
        os.environ["SPILLWAY_TOKEN"] = TOKENS["small"]
        with (
            serving.running_daemon(
                serving.find_binary(ROOT), log, *flags, *more, timeout=60
            ) as target,
            spillway_kv.connect(target, token=TOKENS["small"]) as small,
            spillway_kv.connect(target, token=TOKENS["giant"], timeout=600) as giant,
        ):
            facts = surroundings(small)
            decoder = Decoder(small, filled(small, SMALL_TOKENS))
            giants = Giants(filled(giant, options.tokens), options.giants)
            decoder.turn(options.steps)  # not timed
            alone, beside = [], []
            for _ in range(options.rounds):
                alone.append(decoder.turn(options.steps)[:, 0])
                with giants:
                    beside.append(decoder.turn(options.steps)[:, 0])
            told = compared(np.concatenate(alone), np.concatenate(beside))
            told["each_round"] = [compared(*both) for both in zip(alone, beside, strict=True)]
            told["giant_p50_ms"] = float(np.median(giants.took))
            told["giant_count"] = len(giants.took)
            told["steps_compared"] = decoder.checked
            told["errors"] = {"small": decoder.error, "giant": giants.error}
            told["load_after"] = os.getloadavg()[0]
            print(json.dumps(vars(options) | {"flags": more} | facts | told))


if __name__ == "__main__":
    main()
