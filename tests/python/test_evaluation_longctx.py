"""`spillway-lab eval longctx` on a tiny random model, and questions about source code."""

from __future__ import annotations

import json
import random
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from spillway_kv.lab.evaluation import intervals, longctx, sections, sources
from spillway_kv.lab.evaluation.asking import Answer, Asker
from spillway_kv.lab.evaluation.attends import EXACT, Case
from spillway_kv.lab.evaluation.command import app
from spillway_kv.lab.evaluation.contenders import INDEX, Contender, comparable, contenders, given
from spillway_kv.lab.evaluation.indexing import DEFAULT_INDEX
from spillway_kv.lab.evaluation.longctx import Outcome
from spillway_kv.lab.evaluation.setting import Setting
from spillway_kv.lab.evaluation.workbench import Workbench
from spillway_kv.policy import Policy, TopK
from spillway_kv.quality import policy_of
from tiny_model import WORDS, draw_words, save_tiny_llama
from typer.testing import CliRunner

LENGTH = 2600
CODE = '''\
"""A module."""

LIMIT = 4711
MODE = 'cautious'
TWICE = 25
_TABLE = {1: 2}


class Pump:
    """A pump."""

    RATE = 2.5

    def __init__(self, pressure, valve="brass", depth=25):
        """Makes a pump of a pressure."""
        if pressure < 0:
            raise ValueError("pressure is negative")
        self.pressure = pressure

    def drain(self, start, stop):
        raise NotImplementedError

    def level(self):
        return 977


def refill(bucket, speed, *, patience=86400):
    """Fills a bucket again.

    At a speed.
    """
    if not bucket:
        raise LookupError("no bucket is there")
    if speed > 1:
        raise ValueError("too fast a speed")
    return bucket


def empty(bucket):
    raise OSError(f"{bucket} leaks")
'''


def text_of(**files: str) -> str:
    return "".join(f"{sources.named(f'{name}.py')}{text}" for name, text in files.items())


def facts_of(text: str) -> dict[str, str]:
    pieces = sources.read(text)
    asked = sources._askable(pieces, text)
    return {fact.subject: fact.answer for fact in asked}


def test_facts_are_what_the_source_says() -> None:
    assert facts_of(text_of(plumbing=CODE)) == {
        "LIMIT": "4711",
        "MODE": "cautious",
        "Pump.RATE": "2.5",
        "Pump.__init__(valve)": "brass",
        "Pump.__init__.__doc__": "Makes a pump of a pressure.",
        "Pump.__init__!ValueError": "pressure is negative",
        "Pump.drain()": "start, stop",
        "Pump.drain!": "NotImplementedError",
        "Pump.level->": "977",
        "refill(patience)": "86400",
        "refill.__doc__": "Fills a bucket again.",
        "refill!LookupError": "no bucket is there",
        "refill!no bucket is there": "LookupError",
        "refill!ValueError": "too fast a speed",
        "empty!": "OSError",
    }


def test_what_a_text_has_twice_is_not_asked() -> None:
    other = "SIZE = 4711\n\n\ndef refill(water, patience=12):\n    return 4711\n"
    found = facts_of(text_of(plumbing=CODE, other=other))
    assert "LIMIT" not in found
    assert "SIZE" not in found
    # This name is in two files, and each question names its file.
    assert found["refill(patience)"] in ("86400", "12")
    twice = "def go(a=314):\n    pass\n\n\ndef go(a=315):\n    pass\n"
    assert facts_of(text_of(twice=twice)) == {}
    assert not sources._has_once("x 1.25 y", "25")
    assert not sources._has_once("_25 25a 25_", "25")
    assert sources._has_once("(25, 125)", "25")


def test_questions_of_sources() -> None:
    pieces = sources.read(text_of(plumbing=CODE, other="SPEED = 1234\n"))
    assert "".join(piece.text for piece in pieces) == f"{CODE}SPEED = 1234\n"
    make = sources.questions_about(6)
    task = make(random.Random(1), pieces, len(pieces))
    assert task == make(random.Random(1), pieces, len(pieces))
    assert len(task.questions) == 6
    assert '#### File: plumbing.py ####\n"""A module' in task.context
    assert "#### File: other.py ####\nSPEED" in task.context
    for question in task.questions:
        assert question.quoted
        assert question.start.endswith("`")
        assert question.score(f"{question.answers[0]}` and") == 1
        assert question.score("something else`") == 0
    assert len({question.answers for question in task.questions}) == 6
    # Only questions about pieces that are in the context.
    few = make(random.Random(1), pieces, 3)
    assert {question.answers[0] for question in few.questions} == {"4711", "cautious"}
    questions = {question.text for question in make(random.Random(0), pieces, 99).questions}
    assert len(questions) == 6
    every = sources.questions_about(99)(random.Random(0), pieces, 99).questions
    texts = {question.text.strip(): question.answers[0] for question in every}
    assert texts["In other.py, which value is assigned to `SPEED`?"] == "1234"
    assert (
        texts["In plumbing.py, what is the default value of the parameter `valve` of "
              "`Pump.__init__`?"]
        == "brass"
    )  # fmt: skip
    asked = "In plumbing.py, which parameters does `Pump.drain` take after `self`?"
    assert texts[asked] == "start, stop"


def test_the_text_of_this_pythons_library(tmp_path: Path) -> None:
    folder = Path(sysconfig.get_path("stdlib"))
    some = tmp_path / "library"
    some.mkdir()
    for name in ("cmd", "argparse"):
        (some / f"{name}.py").write_bytes((folder / f"{name}.py").read_bytes())
    output = tmp_path / "sources.txt"
    answer = CliRunner().invoke(app, ["sources", str(output), "--folder", str(some)])
    assert answer.exit_code == 0, answer.output
    text = output.read_text()
    assert sources.is_sources(text)
    pieces = sources.read(text)
    assert {piece.file for piece in pieces} == {"cmd.py", "argparse.py"}
    # Files are cut at the end of a statement.
    long = "".join(piece.text for piece in pieces if piece.file == "argparse.py")
    assert sources.FILE_BYTE_COUNT_MAX * 0.8 < len(long) <= sources.FILE_BYTE_COUNT_MAX
    assert (folder / "argparse.py").read_text().startswith(long)
    found = facts_of(text)
    assert found["Cmd.misc_header"] == "Miscellaneous help topics:"
    assert not sources.is_sources("Some prose.\n")
    empty = CliRunner().invoke(app, ["sources", str(output), "--folder", str(tmp_path)])
    assert empty.exit_code == 1
    assert "holds no file such as argparse.py" in " ".join(empty.output.split())


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """A random model, a text of words in its vocabulary, and one of source code."""
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny_llama(
        folder, num_hidden_layers=2, max_position_embeddings=4096, initializer_range=0.2
    )
    prose, code, library = folder / "prose.txt", folder / "code.txt", folder / "library"
    prose.write_text(" ".join(WORDS[i] + "." * (i % 10 == 0) for i in draw_words(6000)))
    library.mkdir()
    for name in ("cmd", "csv", "shlex", "sched"):
        source = Path(sysconfig.get_path("stdlib")) / f"{name}.py"
        (library / f"{name}.py").write_bytes(source.read_bytes())
    sources.write(code, library)
    return folder, prose, code


def test_longctx_from_end_to_end(
    tiny: tuple[Path, Path, Path], target: str, tmp_path: Path
) -> None:
    folder, prose, code = tiny

    def invoke(*words: object) -> Any:
        own = ["longctx", folder, *words, "--output", tmp_path, "--daemon", target]
        return CliRunner().invoke(app, [str(word) for word in own], catch_exceptions=False)

    def evaluate(*more: object) -> Any:
        answer = invoke(code, prose, "--preset", "small", "--lengths", LENGTH, *more)
        assert answer.exit_code == 0, answer.output
        return json.loads((tmp_path / "longctx.json").read_text())

    def refused(*words: object) -> str:
        answer = invoke(*words)
        assert answer.exit_code == 1
        return " ".join(answer.output.split("ValueError: ")[1].split())

    told = evaluate()
    names = [method["name"] for method in told["found"]["methods"]]
    assert names == [
        "exact",
        "high",
        "default",
        "fast",
        "codes",
        "quest",
        "twilight-quest",
        "vattention-codes",
        "window",
    ]
    points = {method["name"]: method["points"][0] for method in told["found"]["methods"]}
    dense = points["exact"]
    assert dense["row_share"] == 1
    assert dense["all"]["more_than_dense"] == 0
    # Three needles, two RULER tasks, four questions about sources.
    counts = {kind: found["count"] for kind, found in dense["kinds"].items()}
    assert counts == {"needles": 3, "ruler": 2, "sources": 4}
    assert dense["all"]["count"] == 9
    for text in ("code", "prose"):
        assert dense["texts"][text]["agreement"]["mean"] == 1
        assert abs(dense["texts"][text]["divergence"]["mean"]) < 1e-6
        exact, default = (points[name]["texts"][text] for name in ("exact", "default"))
        # The divergences of such a small model are hardly larger than rounding.
        assert exact["divergence"]["mean"] < default["divergence"]["mean"] + 1e-6
    shares = {name: point["row_share"] for name, point in points.items()}
    # Contexts of source code end at the end of a statement, so some are shorter.
    assert 128 / LENGTH <= shares["window"] < 1.5 * 128 / LENGTH
    assert shares["window"] < shares["fast"] < shares["default"] < shares["high"] < 1
    # Budgets are chosen by the rows on code.
    rows = {name: point["texts"]["code"]["rows"]["share"] for name, point in points.items()}
    for name in ("codes", "quest", "twilight-quest", "vattention-codes"):
        assert rows[name] == pytest.approx(rows["default"], rel=0.35), name

    # Finished parts are not measured again. More rounds add to them.
    parts = sorted((tmp_path / "work/parts").iterdir())
    times = [part.stat().st_mtime_ns for part in parts]
    assert evaluate()["found"] == told["found"]
    assert [part.stat().st_mtime_ns for part in parts] == times
    more = evaluate("--rounds", "2")["found"]["methods"][0]["points"][0]
    assert more["all"]["count"] == 18

    page = (tmp_path / "README.md").read_text()
    assert "| Spillway, quality `default` |" in page
    assert f"{LENGTH:,} tokens" in page
    assert (tmp_path / "longctx.png").stat().st_size > 10_000
    assert refused(code, prose, "--minutes", "0.00001") == "nothing was measured in the time given"
    missing = "longctx takes a file of `spillway-lab eval sources` and at least one of prose"
    assert refused(prose) == missing
    assert refused(code) == missing
    assert "there are small, gpu" in refused(code, prose, "--preset", "large")


@pytest.fixture
def bench(tiny: tuple[Path, Path, Path], target: str, tmp_path: Path) -> Any:
    folder, prose, _ = tiny
    setting = Setting(str(folder), (prose,), tmp_path, token_count=LENGTH, daemon=target)
    with Workbench(setting, Console(quiet=True)) as bench:
        yield bench


def test_one_index_serves_all_as_their_own_do(bench: Workbench) -> None:
    """The rows that a method reads do not depend on which other indices the keys have."""
    asker = Asker(bench, LENGTH)
    tokens = torch.tensor(draw_words(LENGTH))
    for policy in (Policy(), policy_of("fast") or Policy(), Policy(heavy=TopK(fraction=0.05))):
        dense = Case(INDEX, EXACT)
        together = given(asker, tokens, 16, [dense, Case(INDEX, policy)])[1]
        own = given(asker, tokens, 16, [Case(DEFAULT_INDEX, EXACT), Case(DEFAULT_INDEX, policy)])[1]
        np.testing.assert_array_equal(together["rows"], own["rows"])
        np.testing.assert_allclose(together["divergence"], own["divergence"], rtol=1e-3, atol=1e-6)


def test_budgets_are_near_the_defaults_rows(bench: Workbench) -> None:
    default = Policy()
    rivals = {one.name: one for one in contenders(bench, 8192)}
    codes = comparable(rivals["codes"], {default: 0.1}.__getitem__, 8192)
    assert codes[0] == "0.084"
    assert codes[1].heavy == TopK(fraction=0.084)
    assert codes[1].selector == "asymmetric"
    policies = [Policy(epsilon=epsilon) for epsilon in (0.1, 0.2, 0.3)]
    shares = dict(zip(policies, (0.3, 0.12, 0.06), strict=True)) | {default: 0.1}
    curve = tuple((f"{one.epsilon}", one) for one in policies)
    assert comparable(Contender("x", "x", "Twilight", "", curve), shares.__getitem__, 8192) == (
        "0.2",
        policies[1],
    )
    for one in rivals.values():
        if len(one.points) == 1:
            assert comparable(one, shares.__getitem__, 8192) == one.points[0]


def test_accuracy_and_what_is_lost() -> None:
    def outcome(*scores: float) -> Outcome:
        answers = [Answer("", score, 0.1) for score in scores]
        return Outcome(4096, "needles", "depth 0", "?", ("x",), answers)

    same = longctx._accuracy(1, [outcome(1, 1)] * 20, 0)
    assert same["score"] == 1
    assert same["interval"] == intervals.wilson(1, 20)
    assert same["more_interval"] == (-intervals.wilson(0, 20)[1], intervals.wilson(0, 20)[1])
    worse = longctx._accuracy(1, [outcome(1, 1)] * 14 + [outcome(1, 0.5)] * 5 + [outcome(0, 1)], 0)
    assert worse["more_than_dense"] == pytest.approx(-1.5 / 20)
    assert (worse["lost"], worse["won"]) == (5, 1)
    low, high = worse["more_interval"]
    assert low < -1.5 / 20 < high


def test_the_page_tells_all_lengths_together() -> None:
    """The first method is dense attention. The second differs from it in two of eight questions."""

    def point(length: int, row_share: float, score: float) -> dict[str, Any]:
        found = {
            "score": score,
            "interval": [0, 1],
            "count": 4,
            "more_than_dense": 0,
            "more_interval": [0, 0],
            "lost": 0,
            "won": 0,
        }
        mean = {"mean": 0.0, "interval": [0, 0]}
        text = {"token_count": 1, "divergence": mean, "agreement": mean, "perplexity_ratio": mean}
        return {
            "length": length,
            "value": "",
            "row_share": row_share,
            "all": found,
            "kinds": {"needles": found},
            "texts": {"code": text, "prose": text},
        }

    def method(label: str, row_share: float) -> dict[str, Any]:
        return {"label": label, "knob": "", "points": [point(n, row_share, 1) for n in (10, 20)]}

    told = {
        "parameters": {"lengths": [10, 20], "intervals": ""},
        "setting": {"seed": 0},
        "found": {
            "methods": [method("dense", 1), method("worse", 0.5), method("same", 0.5)],
            "told_apart": [{"scores": [1, 0, 1]}, {"scores": [0.5, 0.75, 0.5]}],
        },
    }
    lines = sections.longctx(told)
    dense, worse, same = (next(x for x in lines if x.startswith(f"| {w} |"))
                          for w in ("dense", "worse", "same"))  # fmt: skip
    assert dense.endswith("| 100 %: 100 (0-100) | - |")
    # Over eight questions, one loses 1 and another gains 0.25.
    assert "| -9.4 (-" in worse
    assert worse.endswith("), 1, 1 |")
    # Wilson's bound for 0 of 8.
    assert same.endswith("| +0.0 (-32.4 to +32.4), 0, 0 |")
