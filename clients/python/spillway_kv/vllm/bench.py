"""Compares vLLM with and without Spillway on your GPU and model.

    python -m spillway_kv.vllm.bench --model MODEL

Each engine runs in a process of its own: `stock` is vLLM as it is, `default`, `exact`, `high` and
`fast` are Spillway's qualities. All get the same prompts, which are pieces of the sources of
Python's standard library (`--text` takes other files), no two the same. Each case is measured
`--repeats` times after one that is not counted, and the medians are printed: time to the first
token of the first and of the last request, decode tokens per second while all requests decode,
milliseconds of a step, GPU memory in use (of all processes; not with `--together`), and the rows
and errors that Spillway reports.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any

from spillway_kv.quality import QUALITIES

STOCK = "stock"
ENGINES = (STOCK, *QUALITIES)
_GIB = 1 << 30
# How long an engine may take to end by itself, and its processes after SIGTERM.
_END_SECONDS = 30.0
_TERMINATE_SECONDS = 10.0


def percentile(values: Sequence[float], share: float) -> float:
    """Returns the smallest value that is at least as large as `share` of the values."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


class Texts:
    """Prompts of real text, no two the same until the text ends.

    Args:
        tokens: Token ids of the text.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = tokens
        self._at = 0

    def take(self, length: int) -> list[int]:
        """Returns the next `length` tokens.

        Raises:
            ValueError: The text is shorter than that.
        """
        if length > len(self._tokens):
            raise ValueError(f"a prompt of {length} tokens, but the text has {len(self._tokens)}")
        if self._at + length > len(self._tokens):
            # From another place than before, so that no prompt occurs twice.
            self._at = (self._at + 17) % max(len(self._tokens) - length, 1)
        taken = self._tokens[self._at : self._at + length]
        self._at += length
        return list(taken)


def arrivals(rate: float, count: int, seed: int) -> list[float]:
    """Returns the times in seconds of `count` requests of a Poisson process."""
    drawn = random.Random(seed)  # noqa: S311
    times, at = [], 0.0
    for _ in range(count):
        at += drawn.expovariate(rate)
        times.append(at)
    return times


class Recorder:
    """The times at which the tokens of requests arrived.

    Attributes:
        begun: When each request was added, in seconds.
        tokens: For each request, pairs of the time and the number of tokens that came then.
    """

    def __init__(self) -> None:
        self.begun: dict[str, float] = {}
        self.tokens: dict[str, list[tuple[float, int]]] = {}

    def add(self, name: str, at: float) -> None:
        """Adds a request."""
        self.begun[name] = at
        self.tokens[name] = []

    def note(self, name: str, at: float, count: int) -> None:
        """Notes that tokens came."""
        self.tokens[name].append((at, count))

    def summary(self) -> dict[str, Any]:
        """Returns what the tables show. Times are in seconds."""
        firsts = {name: came[0][0] for name, came in self.tokens.items()}
        waits = [firsts[name] - at for name, at in self.begun.items()]
        begin = max(firsts.values())
        end = min(came[-1][0] for came in self.tokens.values())
        events = [event for came in self.tokens.values() for event in came]
        decoded = sum(count for at, count in events if begin < at <= end)
        moments = sorted({at for at, _ in events if begin <= at <= end})
        gaps = [b - a for a, b in zip(moments, moments[1:], strict=False)]
        each = [
            (came[-1][0] - came[0][0]) / (sum(count for _, count in came) - came[0][1])
            for came in self.tokens.values()
            if sum(count for _, count in came) > came[0][1]
        ]
        total = max(at for at, _ in events) - min(self.begun.values())
        return {
            "seconds": total,
            "output_tokens_per_second": sum(count for _, count in events) / total,
            "first_token_first": min(waits),
            "first_token_last": max(waits),
            "first_token_p50": percentile(waits, 0.5),
            "first_token_p99": percentile(waits, 0.99),
            "token_p50": percentile(each, 0.5) if each else None,
            "token_p99": percentile(each, 0.99) if each else None,
            "decode_tokens_per_second": decoded / (end - begin) if end > begin else None,
            "step_median": statistics.median(gaps) if gaps else None,
        }


class Engine:
    """One vLLM engine in this process."""

    def __init__(self, name: str, options: dict[str, Any], text: str) -> None:
        if name != STOCK:
            options = {**options, "attention_backend": "CUSTOM"}
            os.environ["VLLM_SPILLWAY_QUALITY"] = name
        from transformers import AutoTokenizer  # noqa: PLC0415
        from vllm import LLM  # noqa: PLC0415

        tokenizer = AutoTokenizer.from_pretrained(options["model"])
        self._texts = Texts(tokenizer.encode(text, add_special_tokens=False))
        self._llm: Any = LLM(**options, disable_log_stats=False)

    def counts(self) -> Counter[str]:
        """Returns Spillway's counters."""
        found: Counter[str] = Counter()
        for metric in self._llm.get_metrics():
            if "spillway" in metric.name and hasattr(metric, "value"):
                found[metric.name.rpartition("spillway_")[2]] += metric.value
        return found

    def run(self, case: dict[str, Any]) -> dict[str, Any]:
        """Serves the requests of a case once."""
        from vllm import SamplingParams  # noqa: PLC0415
        from vllm.sampling_params import RequestOutputKind  # noqa: PLC0415

        engine = self._llm.llm_engine
        count, rate = case["requests"], case.get("rate")
        prompts = [self._texts.take(case["tokens"]) for _ in range(count)]
        times = arrivals(rate, count, case["seed"]) if rate else [0.0] * count
        parameters = SamplingParams(
            temperature=0,
            max_tokens=case["new_tokens"],
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        recorder, before, added = Recorder(), self.counts(), 0
        start = time.perf_counter()
        while added < count or engine.has_unfinished_requests():
            now = time.perf_counter() - start
            while added < count and times[added] <= now:
                engine.add_request(f"{added}", {"prompt_token_ids": prompts[added]}, parameters)
                recorder.add(f"{added}", times[added])
                added += 1
            if not engine.has_unfinished_requests():
                time.sleep(max(times[added] - (time.perf_counter() - start), 0))
                continue
            answers = engine.step()
            # One time for all tokens of a step, so that times between steps are those of steps.
            at = time.perf_counter() - start
            for answer in answers:
                came = len(answer.outputs[0].token_ids)
                if came:
                    recorder.note(answer.request_id, at, came)
        counts = self.counts()
        counts.subtract(before)
        return {**recorder.summary(), **_of_counts(counts), **_gpu_memory()}

    def close(self) -> None:
        """Ends the engine and its processes."""
        self._llm.llm_engine.engine_core.shutdown()


def _of_counts(counts: Counter[str]) -> dict[str, float]:
    made = {}
    if counts["rows_visible"]:
        made["rows_read"] = counts["rows_read"] / counts["rows_visible"]
    if counts["certified_errors"]:
        millionths = counts["certified_error_millionths"] / counts["certified_errors"]
        made["certified_error"] = millionths / 1e6
    outputs = sum(counts[f"outputs_{kind}"] for kind in ("exact", "statistical", "none"))
    if outputs:
        made["without_a_promise"] = counts["outputs_none"] / outputs
    return made


def _gpu_memory() -> dict[str, int]:
    """Returns the memory in use on the GPU, by all processes."""
    import torch  # noqa: PLC0415

    if not torch.cuda.is_available():
        return {}
    free, total = torch.cuda.mem_get_info()
    return {"gpu_bytes_in_use": total - free}


def serve(name: str, options: dict[str, Any], text: str) -> None:
    """Runs an engine: reads cases from standard input, and writes results.

    The engine ends with the input, and thus also if the process that writes it is killed.
    """
    out = os.fdopen(os.dup(1), "w")
    # vLLM prints to standard output too.
    os.dup2(2, 1)
    with closing(Engine(name, options, text)) as engine:
        print("ready", file=out, flush=True)
        for line in sys.stdin:
            print(json.dumps(engine.run(json.loads(line))), file=out, flush=True)


class Process:
    """An engine in other processes: one that it starts, and those that vLLM starts for it.

    They have a session of their own, so that `close` can end all of them.
    """

    def __init__(
        self, name: str, arguments: list[str], log: Path, environment: dict[str, str]
    ) -> None:
        self.name = name
        self._log = log
        self._closed = self._interrupted = False
        command = [sys.executable, "-m", "spillway_kv.vllm.bench", *arguments, "--engine", name]
        with log.open("w") as messages:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=messages,
                text=True,
                env={**os.environ, **environment},
                start_new_session=True,
            )

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            end = "\n".join(self._log.read_text(errors="replace").splitlines()[-12:])
            raise SystemExit(f"the engine {self.name} has ended; {self._log} ends with\n{end}")
        return line

    def wait(self) -> None:
        """Waits until it has started."""
        self._line()

    def run(self, case: dict[str, Any]) -> dict[str, Any]:
        """Serves a case once."""
        assert self._process.stdin is not None
        print(json.dumps(case), file=self._process.stdin, flush=True)
        made: dict[str, Any] = json.loads(self._line())
        return made

    def close(self) -> None:
        """Ends it. Does nothing if it has been called before."""
        if self._closed:
            return
        self._closed = True
        assert self._process.stdin is not None
        if isinstance(sys.exc_info()[1], KeyboardInterrupt):
            self.interrupt()
        try:
            with suppress(BrokenPipeError):
                self._process.stdin.close()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_SECONDS)
            self._signal(signal.SIGTERM)
            until = time.monotonic() + _TERMINATE_SECONDS
            while self._signal(0) and time.monotonic() < until:
                # A process that has ended belongs to the session until it is waited for.
                self._process.poll()
                time.sleep(0.05)
        finally:
            # Also if a second Ctrl+C comes.
            self._signal(signal.SIGKILL)
            self._process.wait()

    def interrupt(self) -> None:
        """Passes Ctrl+C on, once. It does not reach another session."""
        if not self._interrupted:
            self._interrupted = True
            self._signal(signal.SIGINT)

    def _signal(self, number: int) -> bool:
        """Sends a signal to all its processes. Returns whether there are any."""
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            return False
        return True


@contextmanager
def _all_interrupted(started: Iterable[Process]) -> Iterator[None]:
    """Passes Ctrl+C on to all processes at once, since each may take a while to end."""
    try:
        yield
    except KeyboardInterrupt:
        for process in started:
            process.interrupt()
        raise


def medians(runs: list[dict[str, Any]]) -> dict[str, float | None]:
    """Returns the median of each value over runs. None where a run has none."""
    names = {name: None for run in runs for name in run}
    made: dict[str, float | None] = {}
    for name in names:
        values = [run.get(name) for run in runs]
        known = [value for value in values if value is not None]
        made[name] = statistics.median(known) if len(known) == len(values) else None
    return made


_COLUMNS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("first token, s", "first_token_first", "{:.3f}".format),
    ("of the last request", "first_token_last", "{:.3f}".format),
    ("decode tokens/s", "decode_tokens_per_second", "{:,.0f}".format),
    ("step, ms", "step_median", lambda x: f"{1e3 * x:.2f}"),
    ("all, s", "seconds", "{:.2f}".format),
    ("GPU memory, GiB", "gpu_bytes_in_use", lambda x: f"{x / _GIB:.1f}"),
    ("rows read", "rows_read", "{:.1%}".format),
    ("certified error", "certified_error", "{:.3f}".format),
    ("no promise", "without_a_promise", "{:.2%}".format),
)
_ARRIVING: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("first token p50, s", "first_token_p50", "{:.3f}".format),
    ("p99", "first_token_p99", "{:.3f}".format),
    ("a token p50, ms", "token_p50", lambda x: f"{1e3 * x:.1f}"),
    ("p99", "token_p99", lambda x: f"{1e3 * x:.1f}"),
    ("output tokens/s", "output_tokens_per_second", "{:,.0f}".format),
)


def table(results: Iterable[dict[str, Any]]) -> str:
    """Returns the results as tables in Markdown."""
    lines: list[str] = []
    results = list(results)
    for columns, arriving in ((_COLUMNS, False), (_ARRIVING, True)):
        chosen = [each for each in results if ("rate" in each["case"]) is arriving]
        if not chosen:
            continue
        shown = [c for c in columns if any(each["median"].get(c[1]) for each in chosen)]
        rate = ["arrivals a second"] if arriving else []
        heads = ["tokens", "requests", *rate, "engine", *(head for head, _, _ in shown)]
        lines += ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
        for each in chosen:
            case, median = each["case"], each["median"]
            cells = [f"{case['tokens']:,}", f"{case['requests']}"]
            cells += [f"{case['rate']:.2f}"] if arriving else []
            cells += [each["engine"]]
            for _, name, form in shown:
                value = median.get(name)
                cells.append("" if value is None else form(value))
            lines.append("| " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)


def _text(paths: list[Path]) -> str:
    if not paths:
        paths = sorted(Path(os.__file__).parent.glob("*.py"))
        paths += sorted(Path(os.__file__).parent.glob("*/*.py"))
    return "\n".join(path.read_text(errors="replace") for path in paths)[: 24 << 20]


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m spillway_kv.vllm.bench",
        description=(__doc__ or "").partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--model", required=True, help="the model's name or folder")
    parser.add_argument(
        "--engines", default="stock,default", help=f"which to compare, of {', '.join(ENGINES)}"
    )
    parser.add_argument(
        "--cases",
        default="4096x1,4096x16,16384x1,16384x16",
        help="tokens of a prompt, and how many requests are served at a time",
    )
    parser.add_argument("--new-tokens", type=int, default=128, help="tokens of each answer")
    parser.add_argument("--repeats", type=int, default=3, help="runs that are counted")
    parser.add_argument(
        "--arrivals",
        default="",
        help="shares of the first engine's capacity, such as 0.5,0.8,0.95: requests arrive by a "
        "Poisson process, twice as many as in the largest case, at the same times for all engines",
    )
    parser.add_argument("--options", default="{}", help="vLLM's engine arguments, a JSON object")
    parser.add_argument(
        "--together",
        action="store_true",
        help="start all engines at once and measure them in turn, which is fairer on a machine "
        "whose speed varies; needs kv_cache_memory_bytes in --options",
    )
    parser.add_argument("--text", type=Path, nargs="*", default=[], help="files for the prompts")
    parser.add_argument("--output", type=Path, default=Path("vllm-bench.json"))
    parser.add_argument("--engine", default="", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def _cases(text: str, new_tokens: int) -> list[dict[str, Any]]:
    cases = []
    for part in text.split(","):
        tokens, _, count = part.partition("x")
        if not (tokens.isdigit() and count.isdigit() and int(tokens) and int(count)):
            raise SystemExit(f"--cases: {part!r} is not like 4096x16, tokens and requests")
        cases.append({"tokens": int(tokens), "requests": int(count), "new_tokens": new_tokens})
    return cases


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the program."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parsed = _parsed(given)
    options = {"model": parsed.model, **json.loads(parsed.options)}
    if parsed.engine:
        serve(parsed.engine, options, _text(parsed.text))
        return
    if parsed.together and "kv_cache_memory_bytes" not in options:
        raise SystemExit(
            "--together: set kv_cache_memory_bytes in --options, so that no engine "
            "takes the memory of another"
        )
    names = [name for name in parsed.engines.split(",") if name]
    for name in names:
        if name not in ENGINES:
            raise SystemExit(f"--engines: {name!r} is not one of {', '.join(ENGINES)}")
    for option, value in (("--new-tokens", parsed.new_tokens), ("--repeats", parsed.repeats)):
        if value < 1:
            raise SystemExit(f"{option} is {value}, at least 1 is needed")
    cases = _cases(parsed.cases, parsed.new_tokens)
    found = importlib.util.find_spec("vllm")
    # A folder of that name beside the program, such as a clone, has no origin.
    if found is None or found.origin is None:
        raise SystemExit("vLLM is not installed in this environment: pip install 'vllm>=0.32'")
    longest = max(case["tokens"] for case in cases) + parsed.new_tokens
    if "max_model_len" not in options:
        options["max_model_len"] = longest
        given += ["--options", json.dumps({k: v for k, v in options.items() if k != "model"})]
    results: list[dict[str, Any]] = []

    def start(name: str) -> Process:
        environment = {}
        if parsed.together:
            # Engines that start at the same time do not write to one cache of compiled code.
            root = os.environ.get("VLLM_CACHE_ROOT", str(Path.home() / ".cache/vllm"))
            environment["VLLM_CACHE_ROOT"] = f"{root}/bench-{name}"
        return Process(name, given, parsed.output.with_suffix(f".{name}.log"), environment)

    for group in [names] if parsed.together else [[name] for name in names]:
        with ExitStack() as stack:
            started: list[Process] = []
            for name in group:
                started.append(start(name))
                stack.callback(started[-1].close)
            with _all_interrupted(started):
                for process in started:
                    process.wait()
                # The arrivals follow from what the cases before them have shown.
                for case in chain(cases, _arriving(parsed, cases, results)):
                    _measure(started, case, parsed.repeats, results)
                    made = {"options": options, "results": results}
                    parsed.output.write_text(json.dumps(made, indent=1))
    print(table(results))


def _measure(
    engines: list[Process], case: dict[str, Any], repeats: int, results: list[dict[str, Any]]
) -> None:
    # Engines take turns, because a machine is not equally fast at all times. The first run of each
    # is not counted.
    runs: dict[str, list[dict[str, Any]]] = {engine.name: [] for engine in engines}
    for seed in range(repeats + 1):
        for engine in engines:
            runs[engine.name].append(engine.run({**case, "seed": seed}))
    for name, made in runs.items():
        counted = made[1:]
        if len(engines) > 1:
            # What a process sees is the memory of all of them.
            for run in counted:
                run.pop("gpu_bytes_in_use", None)
        results.append({"engine": name, "case": case, "median": medians(counted), "runs": counted})
    print(table(results[-len(engines) :]), file=sys.stderr, flush=True)


def _arriving(
    parsed: argparse.Namespace, cases: list[dict[str, Any]], results: list[dict[str, Any]]
) -> Iterable[dict[str, Any]]:
    """Yields the cases with arrivals, once the first engine has served the others."""
    shares = [float(part) for part in parsed.arrivals.split(",") if part]
    most = max(case["requests"] for case in cases)
    for case in cases:
        if not shares or case["requests"] != most:
            continue
        found = next(each for each in results if each["case"] == case)
        capacity = case["requests"] / found["median"]["seconds"]
        for share in shares:
            yield {**case, "requests": 2 * most, "rate": share * capacity}


if __name__ == "__main__":
    main()
