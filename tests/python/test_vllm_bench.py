"""The bench of vLLM with and without Spillway, as far as it runs without vLLM."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from spillway_kv.vllm import bench


def test_times_of_two_requests() -> None:
    """Decoding counts from the last first token to the first end."""
    recorder = bench.Recorder()
    recorder.add("a", 0.0)
    recorder.add("b", 0.5)
    for name, at, count in [
        ("a", 1.0, 1),
        ("b", 2.0, 1),
        ("a", 3.0, 1),
        ("b", 3.0, 1),
        ("a", 4.0, 2),
        ("b", 4.0, 1),
        ("b", 6.0, 1),
    ]:
        recorder.note(name, at, count)
    made = recorder.summary()
    assert made["seconds"] == 6.0
    assert made["first_token_first"] == 1.0
    assert made["first_token_last"] == 1.5
    # From 2 to 4: tokens at 3 (two) and at 4 (three).
    assert made["decode_tokens_per_second"] == 2.5
    assert made["step_median"] == 1.0
    # a: 3 seconds for 3 tokens after the first, b: 4 seconds for 3.
    assert made["token_p50"] == pytest.approx(4 / 3)
    assert made["output_tokens_per_second"] == pytest.approx(8 / 6)


def test_one_token_each_has_no_decoding() -> None:
    recorder = bench.Recorder()
    recorder.add("a", 0.0)
    recorder.note("a", 1.0, 1)
    made = recorder.summary()
    assert made["decode_tokens_per_second"] is None
    assert made["token_p50"] is None
    assert made["step_median"] is None


def test_tokens_of_a_step_come_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The median time of a step is not the time between two requests' tokens of one step."""

    class FakeEngine:
        steps = 0

        def add_request(self, *_: object) -> None:
            pass

        def has_unfinished_requests(self) -> bool:
            return self.steps < 4

        def step(self) -> Iterator[SimpleNamespace]:
            self.steps += 1
            time.sleep(0.05)
            answers = [
                SimpleNamespace(request_id=name, outputs=[SimpleNamespace(token_ids=[7])])
                for name in ("0", "1", "2")
            ]
            return iter(answers)

    output = SimpleNamespace(RequestOutputKind=SimpleNamespace(DELTA=2))
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=dict))
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", output)
    engine = bench.Engine.__new__(bench.Engine)
    engine._llm = SimpleNamespace(llm_engine=FakeEngine(), get_metrics=list)
    engine._texts = bench.Texts(range(100))
    made = engine.run({"tokens": 4, "requests": 3, "new_tokens": 4, "seed": 0})
    assert made["step_median"] >= 0.05


def test_percentiles() -> None:
    values = [5.0, 1.0, 3.0, 2.0, 4.0]
    assert bench.percentile(values, 0.5) == 3.0
    assert bench.percentile(values, 0.99) == 5.0
    assert bench.percentile([7.0], 0.5) == 7.0


def test_texts_differ() -> None:
    """Pieces follow each other, and the second round begins elsewhere."""
    texts = bench.Texts(range(100))
    taken = [tuple(texts.take(30)) for _ in range(8)]
    assert taken[:3] == [tuple(range(30)), tuple(range(30, 60)), tuple(range(60, 90))]
    assert len(set(taken)) == 8
    with pytest.raises(ValueError, match="101 tokens, but the text has 100"):
        texts.take(101)


def test_arrivals_have_the_rate() -> None:
    times = bench.arrivals(4.0, 4000, seed=1)
    assert times == sorted(times)
    # The time of 4,000 arrivals has a standard deviation of 16 s / 63.
    assert times[-1] == pytest.approx(1000, abs=80)
    assert times == bench.arrivals(4.0, 4000, seed=1)
    assert times != bench.arrivals(4.0, 4000, seed=2)


def test_counts() -> None:
    counts = Counter(
        rows_read=10,
        rows_visible=100,
        certified_errors=4,
        certified_error_millionths=200_000,
        outputs_none=1,
        outputs_statistical=3,
    )
    assert bench._of_counts(counts) == {
        "rows_read": 0.1,
        "certified_error": 0.05,
        "without_a_promise": 0.25,
    }
    assert bench._of_counts(Counter()) == {}


def test_medians() -> None:
    runs: list[dict[str, Any]] = [{"a": 3.0, "b": 1.0}, {"a": 1.0, "b": None}, {"a": 2.0, "b": 1.0}]
    assert bench.medians(runs) == {"a": 2.0, "b": None}


def test_engines_take_turns() -> None:
    """The first run of each engine is not counted, and memory is that of all processes."""
    order: list[tuple[str, int]] = []

    class FakeProcess:
        def __init__(self, name: str) -> None:
            self.name = name

        def run(self, case: dict[str, Any]) -> dict[str, Any]:
            order.append((self.name, case["seed"]))
            return {"seconds": float(len(order)), "gpu_bytes_in_use": 5}

    results: list[dict[str, Any]] = []
    engines: Any = [FakeProcess("stock"), FakeProcess("default")]
    bench._measure(engines, {"tokens": 8, "requests": 1}, 2, results)
    assert order == [(name, seed) for seed in (0, 1, 2) for name in ("stock", "default")]
    assert [(each["engine"], each["runs"]) for each in results] == [
        ("stock", [{"seconds": 3.0}, {"seconds": 5.0}]),
        ("default", [{"seconds": 4.0}, {"seconds": 6.0}]),
    ]
    bench._measure(engines[:1], {"tokens": 8, "requests": 1}, 1, results)
    assert results[2]["runs"] == [{"seconds": 8.0, "gpu_bytes_in_use": 5}]


def _result(engine: str, **median: Any) -> dict[str, Any]:
    case = {"tokens": 4096, "requests": 16, "new_tokens": 8}
    return {"engine": engine, "case": case, "median": median}


def test_tables() -> None:
    made = bench.table(
        [
            _result("stock", first_token_first=0.5, seconds=2.0),
            _result("default", first_token_first=0.25, seconds=3.0, rows_read=0.1),
        ]
    )
    assert made.splitlines() == [
        "| tokens | requests | engine | first token, s | all, s | rows read |",
        "|---|---|---|---|---|---|",
        "| 4,096 | 16 | stock | 0.500 | 2.00 |  |",
        "| 4,096 | 16 | default | 0.250 | 3.00 | 10.0% |",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cases", "4096"], "'4096' is not like 4096x16"),
        (["--cases", "0x1"], "'0x1' is not like"),
        (["--together"], "set kv_cache_memory_bytes"),
        (["--engines", "stock,best"], "'best' is not one of stock, exact, high, default, fast"),
        (["--repeats", "0"], "--repeats is 0, at least 1"),
        (["--new-tokens", "0"], "--new-tokens is 0, at least 1"),
        ([], "vLLM is not installed in this environment"),
    ],
)
def test_wrong_arguments(arguments: list[str], message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        bench.main(["--model", "m", *arguments])


def test_folder_named_vllm_is_not_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "vllm").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SystemExit, match="vLLM is not installed in this environment"):
        bench.main(["--model", "m", "--output", str(tmp_path / "made.json")])


class FakeProcess:
    """An engine that answers at once."""

    served: list[tuple[str, Any]]

    def __init__(self, name: str, *_: Any) -> None:
        self.name = name

    def wait(self) -> None:
        pass

    def run(self, case: dict[str, Any]) -> dict[str, Any]:
        self.served.append((self.name, case))
        # The first run is slow.
        return {"seconds": 90.0 if case["seed"] == 0 else 4.0 + case["seed"]}

    def close(self) -> None:
        self.served.append((self.name, "closed"))


def test_engines_get_the_same_cases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first run is not counted. The rates of arrivals follow from the first engine."""
    FakeProcess.served = []
    monkeypatch.setattr(bench, "Process", FakeProcess)
    installed = SimpleNamespace(origin="vllm/__init__.py")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: installed)
    output = tmp_path / "made.json"
    arguments = ["--model", "m", "--cases", "100x1,200x4", "--arrivals", "0.5", "--repeats", "3"]
    bench.main([*arguments, "--output", str(output)])
    made = json.loads(output.read_text())
    assert made["options"] == {"model": "m", "max_model_len": 200 + 128}
    first, second = ([r for r in made["results"] if r["engine"] == e] for e in ("stock", "default"))
    assert [each["case"] for each in first] == [each["case"] for each in second]
    assert [each["median"]["seconds"] for each in first] == [6.0, 6.0, 6.0]
    # 4 requests in 6 seconds, and half of that.
    assert first[2]["case"]["requests"] == 8
    assert first[2]["case"]["rate"] == pytest.approx(1 / 3)
    names = [name for name, _ in FakeProcess.served]
    assert names == ["stock"] * 13 + ["default"] * 13
    assert [what for _, what in FakeProcess.served].count("closed") == 2


# An engine that starts another process, and answers until its input ends.
_ENGINE = """#!{python}
import json, signal, subprocess, sys, time
other = subprocess.Popen([sys.executable, "-c", {prelude!r} + "import time; time.sleep(600)"])
{prelude}
print("ready", flush=True)
for line in sys.stdin:
    print(json.dumps({{"other": other.pid}}), flush=True)
    {at_work}
{at_end}
"""
_STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN);"


def _started(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    prelude: str = "",
    at_work: str = "",
    at_end: str = "",
) -> bench.Process:
    """An engine with a script in place of vLLM."""
    script = folder / "engine.py"
    script.write_text(
        _ENGINE.format(python=sys.executable, prelude=prelude, at_work=at_work, at_end=at_end)
    )
    script.chmod(0o700)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", str(script))
        process = bench.Process("stub", [], folder / "log", {})
    process.wait()
    return process


def _runs(pid: int) -> bool:
    """Whether a process runs. One that has ended may still wait for its parent."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def _ends(pid: int) -> bool:
    """Whether a process ends within seconds."""
    until = time.monotonic() + 10
    while _runs(pid) and time.monotonic() < until:
        time.sleep(0.02)
    return not _runs(pid)


def _end(pid: int) -> None:
    """Ends a process that a failed test has left."""
    if _runs(pid):
        os.kill(pid, 9)


@pytest.mark.parametrize("prelude", ["", _STUBBORN])
@pytest.mark.parametrize("at_end", ["", "time.sleep(600)"])
def test_an_engine_leaves_no_process(
    prelude: str, at_end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes that end by themselves, after SIGTERM, or not at all."""
    monkeypatch.setattr(bench, "_END_SECONDS", 0.5)
    monkeypatch.setattr(bench, "_TERMINATE_SECONDS", 0.5)
    process = _started(tmp_path, monkeypatch, prelude, at_end=at_end)
    with ExitStack() as stack, closing(process):
        other = process.run({})["other"]
        stack.callback(_end, other)
        assert _runs(other)
        process.close()
        assert _ends(other)
        assert process._process.poll() is not None


def test_an_interrupt_reaches_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though it serves a case and does not read its input."""
    note = tmp_path / "note"
    prelude = f"""
import os, pathlib, signal, sys
def end(*_):
    pathlib.Path({str(note)!r} + str(os.getpid())).touch()
    sys.exit()
signal.signal(signal.SIGINT, end)
"""
    process = _started(tmp_path, monkeypatch, prelude, at_work="time.sleep(600)")
    start = time.monotonic()
    with ExitStack() as stack:
        with pytest.raises(KeyboardInterrupt), closing(process):
            other = process.run({})["other"]
            stack.callback(_end, other)
            raise KeyboardInterrupt
        assert _ends(other)
    assert Path(f"{note}{process._process.pid}").exists()
    assert time.monotonic() - start < bench._END_SECONDS / 2


@pytest.mark.parametrize(
    ("given", "answers"), [("", "ready\n"), ("3\n", "ready\n4\n"), ('"x"\n', "ready\n")]
)
def test_a_server_ends_its_engine(given: str, answers: str) -> None:
    """At the end of its input, and when a case fails."""
    program = """
from spillway_kv.vllm import bench
class Engine:
    def __init__(self, *given):
        pass
    def run(self, case):
        return case + 1
    def close(self):
        print("closed")
bench.Engine = Engine
bench.serve("stock", {}, "")
"""
    done = subprocess.run(
        [sys.executable, "-c", program], input=given, capture_output=True, text=True, check=False
    )
    assert done.stdout == answers
    # What the engine prints goes there too.
    assert "closed\n" in done.stderr
    assert ("TypeError" in done.stderr) == (given == '"x"\n')


def test_vllms_engine_is_shut_down() -> None:
    calls: list[str] = []
    core = SimpleNamespace(shutdown=lambda: calls.append("shutdown"))
    engine = bench.Engine.__new__(bench.Engine)
    engine._llm = SimpleNamespace(llm_engine=SimpleNamespace(engine_core=core))
    engine.close()
    assert calls == ["shutdown"]
