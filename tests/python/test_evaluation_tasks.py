"""`spillway-lab eval tasks`: RULER and extraction, with checkers that read the contexts."""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from spillway_kv.lab.evaluation import extraction, ruler, suite, suite_page, suite_summary, words
from spillway_kv.lab.evaluation.command import app
from spillway_kv.lab.evaluation.extraction import Counts, Extraction
from spillway_kv.lab.evaluation.fitting import largest
from spillway_kv.lab.evaluation.records import Records
from spillway_kv.lab.evaluation.tasks import Question, Task
from tiny_model import WORDS, draw_words, save_tiny_llama
from typer.testing import CliRunner

PROSE = [f"Word{i}{'.' * (i % 9 == 0)}" for i in range(500)]
UUID = "[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"


def made(name: str, size: int, seed: int = 1, token_count: int = 4096) -> tuple[Task, Question]:
    """Makes a task twice, which must be the same, and returns it with its question."""
    task = ruler.maker(name, token_count)(random.Random(seed), PROSE, size)
    assert task == ruler.maker(name, token_count)(random.Random(seed), PROSE, size)
    assert task != ruler.maker(name, token_count)(random.Random(seed + 1), PROSE, size)
    (question,) = task.questions
    return task, question


def needles_of(task: Task) -> dict[str, list[str]]:
    """Reads all needles of a context: for each key its values, in the order of the text."""
    found: dict[str, list[str]] = {}
    line = r"One of the special magic (?:numbers|uuids) for (\S+(?: \S+)*?) is: (\S+)\."
    for key, value in re.findall(line, task.context):
        found.setdefault(key, []).append(value)
    return found


def asked_of(question: Question) -> list[str]:
    """Reads the keys that a question asks for."""
    (listed,) = re.findall(r" for (.*) mentioned in the text above\?$", question.text)
    return re.split(r", and |, ", listed)


# For each task: keys in the text if its haystack has 40 units, values of a key, keys that are asked
# for, and what keys and values look like.
NEEDLES = {
    "niah_single_1": (1, 1, 1, r"[A-Za-z -]+-[A-Za-z -]+", r"\d{7}"),
    "niah_single_2": (1, 1, 1, r"[A-Za-z -]+-[A-Za-z -]+", r"\d{7}"),
    "niah_single_3": (1, 1, 1, r"[A-Za-z -]+-[A-Za-z -]+", UUID),
    "niah_multikey_1": (4, 1, 1, r"[A-Za-z -]+-[A-Za-z -]+", r"\d{7}"),
    "niah_multikey_2": (41, 1, 1, r"[A-Za-z -]+-[A-Za-z -]+", r"\d{7}"),
    "niah_multikey_3": (41, 1, 1, UUID, UUID),
    "niah_multivalue": (1, 4, 1, r"[A-Za-z -]+-[A-Za-z -]+", r"\d{7}"),
    "niah_multiquery": (4, 1, 4, r"[A-Za-z -]+-[A-Za-z -]+", r"\d{7}"),
}


@pytest.mark.parametrize("name", NEEDLES)
def test_needles(name: str) -> None:
    keys, values, asked, key_form, value_form = NEEDLES[name]
    task, question = made(name, 40)
    found = needles_of(task)
    assert len(found) == keys
    assert all(re.fullmatch(key_form, key) for key in found)
    assert all(len(several) == values for several in found.values())
    assert all(re.fullmatch(value_form, one) for several in found.values() for one in several)
    wanted = [value for key in asked_of(question) for value in found[key]]
    assert len(wanted) == asked * values
    assert question.new_token_count == 128
    assert asked_of(question) == asked_of_start(question)

    assert question.score(f"{', '.join(wanted)}.") == 1
    assert question.score(" and ".join(reversed(wanted)).upper()) == 1
    # Near misses: one value is missing, one character is another, or the value is another key's.
    assert question.score(" ".join(wanted[1:])) == pytest.approx(1 - 1 / len(wanted))
    changed = wanted[0][:-1] + ("1" if wanted[0][-1] != "1" else "2")
    assert question.score(" ".join([changed, *wanted[1:]])) == pytest.approx(1 - 1 / len(wanted))
    others = [v for several in found.values() for v in several if v not in wanted]
    assert question.score(" ".join(others)) == 0
    assert question.score("") == 0


def asked_of_start(question: Question) -> list[str]:
    """Reads the keys that the start of the answer names."""
    (listed,) = re.findall(r" for (.*) mentioned in the text (?:is|are)$", question.start)
    return re.split(r", and |, ", listed)


def test_haystacks() -> None:
    noise, _ = made("niah_single_1", 40)
    assert noise.context.count("The grass is green.") == 40
    essay, _ = made("niah_single_2", 40)
    assert [word for word in essay.context.split() if word.startswith("Word")] == PROSE[:40]
    # A text that is too short begins again. Needles stand between its sentences.
    long, _ = made("niah_multikey_1", 700)
    assert [word for word in long.context.split() if word.startswith("Word")] == [
        *PROSE,
        *PROSE[:200],
    ]
    for before in re.findall(r"(\S+) One of the special", long.context):
        assert before.endswith(".")
    # Depths are even over the text, at the start and at the end too.
    at = [made("niah_single_2", 500, seed)[0].context.index("One of") for seed in range(200)]
    length = len(made("niah_single_2", 500)[0].context)
    quarters = Counter(4 * place // length for place in at)
    assert all(30 <= quarters[quarter] <= 75 for quarter in range(4)), quarters


def test_variable_tracking() -> None:
    task, question = made("vt", 60)
    (value,) = re.findall(r"assigned the value (\d{5})\?$", question.text)
    example, context = task.context.split("\n\nTrack the chain")
    assert context.count("The grass is green.") == 60

    def variables(text: str, value: str) -> list[str]:
        """Follows the chain, in the order of the text."""
        holds: dict[str, str] = {}
        for name, given in re.findall(r"^VAR (\w+) = (?:VAR )?(\w+)$", text, re.M):
            holds[name] = holds.get(given, given)
        return [name for name, held in holds.items() if held == value]

    wanted = variables(context, value)
    assert len(wanted) == 5
    assert all(re.fullmatch("[A-Z]{5}", name) for name in wanted)
    # The example is a smaller task of the same kind, with its answer.
    (shown,) = re.findall(r"are assigned the value (\d{5}), they are: ", example)
    assert example.endswith(f"they are: {' '.join(variables(example, shown))}")
    assert all(re.fullmatch("[A-Z]{3}", name) for name in variables(example, shown))

    assert question.score(f" {', '.join(wanted)}") == 1
    assert question.score(" ".join(wanted[:4])) == pytest.approx(0.8)
    assert question.score(" ".join([*wanted[:4], wanted[4][::-1]])) == pytest.approx(0.8)
    assert question.score(" ".join(variables(example, shown))) == 0
    assert question.new_token_count == 30


def test_common_words() -> None:
    for token_count, often, rarely in ((4096, 30, 3), (4095, 6, 1)):
        task, question = made("cwe", 40, token_count=token_count)
        example, context = task.context.split("\n\n")
        listed = re.split(r" ?\d+\. ", context.split("\n")[1])[1:]
        counts = Counter(listed)
        assert set(counts.values()) == {often, rarely}
        assert len(counts) == 40
        wanted = [word for word, count in counts.items() if count == often]
        assert len(wanted) == 10
        assert set(wanted) <= set(words.usual())
        assert question.score(" ".join(f"{i}. {word}" for i, word in enumerate(wanted, 1))) == 1
        few = [word for word in counts if word not in wanted]
        found = question.score(" ".join([*wanted[:9], few[0]]))
        assert found == pytest.approx(0.9) or wanted[9] in " ".join([*wanted[:9], few[0]])
        assert question.score(" ".join(w for w in few if not any(c in w for c in wanted))) == 0
        assert question.new_token_count == 120
        # The example has its ten words as its answer.
        shown, answer = example.split("appear most often in the list are: ")
        counted = Counter(re.split(r" ?\d+\. ", shown.split("\n")[1])[1:]).most_common(10)
        assert {word for word, _ in counted} == set(re.split(r" ?\d+\. ", answer)[1:])
    # Beyond wonderwords' number of words, words come from the larger list.
    task, _ = made("cwe", 9000)
    assert len(words.usual()) < 9000
    assert len(set(re.split(r" ?\d+\. ", task.context.split("\n\n")[1].split("\n")[1])[1:])) == 9000


def test_frequent_words() -> None:
    task, question = made("fwe", 2000)
    coded = task.context.split("appear most often. ")[1].split()
    ranked = Counter(coded).most_common()
    assert ranked[0] == ("...", 1215)
    wanted = [word for word, _ in ranked[1:4]]
    # 2,000 / zeta(2) / rank^2, rounded down.
    assert [count for _, count in ranked[1:5]] == [303, 135, 75, 48]
    assert all(re.fullmatch("[a-z]{6}", word) for word, _ in ranked[1:])
    # The vocabulary has a fiftieth of the length, but the rarest words do not occur.
    assert len(ranked) == 34 < 4096 // 50
    assert question.score(f"{wanted[2]}, {wanted[0]} and {wanted[1]}") == 1
    assert question.score(" ".join([*wanted[:2], ranked[4][0]])) == pytest.approx(2 / 3)
    assert question.score("...") == 0
    assert question.new_token_count == 50


def test_words_name_the_extra_that_they_need(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(words.adjectives()) > 800
    assert len(words.nouns()) > 6000
    assert all(word == word.strip() != "" for word in words.usual())
    assert len(words.many()) > 200_000
    assert set(words.versions()) == {"english-words", "wonderwords"}

    def missing(name: str, *args: Any, **kwargs: Any) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    words.many.cache_clear()
    monkeypatch.setattr(words, "import_module", missing)
    told = r"a RULER task needs english_words, .*: pip install 'spillway-kv\[ruler\]'"
    with pytest.raises(ModuleNotFoundError, match=told):
        words.many()


# Extraction.


def document(name: str, size: int, seed: int = 1) -> tuple[str, Extraction]:
    task = extraction.maker(name)(random.Random(seed), PROSE, size)
    assert task == extraction.maker(name)(random.Random(seed), PROSE, size)
    (question,) = task.questions
    assert isinstance(question, Extraction)
    return task.context, question


def read_records(text: str) -> list[dict[str, Any]]:
    """Reads the records of a document, from its sentences and tables, in their order."""
    sentences = (
        r"Shipment (?P<id>K\d+) took (?P<units>\d+) units of (?P<item>\w+ \w+) to (?P<town>\w+) in "
        r"(?P<crates>\d+) crates\.",
        r"To (?P<town>\w+) went (?P<id>K\d+), which is (?P<crates>\d+) crates with (?P<units>\d+) "
        r"units of (?P<item>\w+ \w+)\.",
        r"The (?P<units>\d+) units of (?P<item>\w+ \w+) under (?P<id>K\d+) left for (?P<town>\w+), "
        r"packed in (?P<crates>\d+) crates\.",
        r"In (?P<crates>\d+) crates for (?P<town>\w+), number (?P<id>K\d+) holds "
        r"(?P<item>\w+ \w+), (?P<units>\d+) units of it\.",
    )
    found: dict[int, dict[str, str]] = {}
    for sentence in sentences:
        found |= {match.start(): match.groupdict() for match in re.finditer(sentence, text)}
    columns: list[str] = []
    for match in re.finditer(r"^\| (.*) \|$", text, re.M):
        cells = match[1].split(" | ")
        if "id" in cells:
            columns = cells
        else:
            found[match.start()] = dict(zip(columns, cells, strict=True))
    return [
        {**record, "units": int(record["units"]), "crates": int(record["crates"])}
        for _, record in sorted(found.items())
    ]


@pytest.mark.parametrize("size", [50, 400])
def test_all_records_are_extracted(size: int) -> None:
    text, question = document("extract_all", size)
    records = read_records(text)
    assert len(records) == size
    assert len({record["id"] for record in records}) == size
    assert text.count("| id |") + text.count("| id\n") > 0
    assert text.count("Shipment K") > 0
    assert question.counts(f"[{json.dumps(records)[1:]}") == Counts(4 * size, 4 * size, 4 * size)
    assert question.score(json.dumps(records, indent=2) + "\n```\nThat is all.") == 1
    assert question.new_token_count > 0.6 * len(json.dumps(records))


def test_the_records_of_a_town_are_extracted() -> None:
    text, question = document("extract_some", 100)
    (town,) = re.findall(r"List all shipments to (\w+) in the text above", question.text)
    wanted = [
        {name: value for name, value in record.items() if name != "town"}
        for record in read_records(text)
        if record["town"] == town
    ]
    assert 3 < len(wanted) < 30
    assert question.score(json.dumps(wanted)) == 1
    # All records of the document: each one more is wrong.
    found = question.counts(json.dumps(read_records(text)))
    assert (found.right, found.wanted) == (3 * len(wanted), 3 * len(wanted))
    assert found.given == 4 * 100


def test_near_misses_of_records_are_wrong() -> None:
    wanted = [
        {"id": "K1", "item": "old lamp", "town": "Oslo", "units": 12, "crates": 34},
        {"id": "K2", "item": "new lamp", "town": "Vienna", "units": 56, "crates": 78},
    ]
    question = Extraction("?", "", tuple(json.dumps(record) for record in wanted), 100)

    def counts(*records: dict[str, Any]) -> tuple[int, int, int]:
        found = question.counts(json.dumps(records))
        return found.right, found.given, found.wanted

    one, two = wanted
    assert counts(one, two) == (8, 8, 8)
    assert counts(two, one) == (8, 8, 8)
    # Numbers as text, other case and spaces are right.
    assert counts({**one, "id": " k1", "units": "12", "item": "Old  Lamp"}, two) == (8, 8, 8)
    # The value of another record, of another field, and a number that is nearly right.
    assert counts({**one, "town": "Vienna"}, two) == (7, 8, 8)
    assert counts({**one, "units": 34, "crates": 12}, two) == (6, 8, 8)
    assert counts({**one, "units": 13}, two) == (7, 8, 8)
    assert counts({**one, "units": "12 units"}, two) == (7, 8, 8)
    assert counts({**one, "units": None, "crates": [34]}, two) == (6, 8, 8)
    # A record under the id of another, an unknown id, no id, and a record twice.
    assert counts({**two, "id": "K1"}) == (0, 4, 8)
    assert counts(one, {**two, "id": "K3"}) == (4, 8, 8)
    assert counts({"item": "old lamp"}) == (0, 1, 8)
    assert counts(one, one) == (4, 8, 8)
    # A field is missing, and one has another name.
    assert counts({"id": "K1", "item": "old lamp"}) == (1, 1, 8)
    assert counts({**one, "colour": "red"}) == (4, 5, 8)

    half = question.counts(json.dumps([one]))
    assert (half.precision, half.recall) == (1, 0.5)
    assert half.f1 == pytest.approx(2 / 3)
    assert question.details(json.dumps([one])) == {
        "right": 4,
        "given": 4,
        "wanted": 8,
        "precision": 1,
        "recall": 0.5,
    }
    for nothing in ("", "[]", "I cannot.", "{", "[{]"):
        assert question.counts(nothing) == Counts(0, 0, 8), nothing
        assert question.score(nothing) == 0

    # An answer that is cut off has its complete records. What follows the list does not count.
    cut = json.dumps(wanted)
    assert question.counts(cut[:-8]).right == 4
    assert not question.ended(cut[:-1])
    assert question.ended(cut)
    assert question.counts(f"{json.dumps([one])} {json.dumps([two])}").right == 4
    assert question.counts(f"{json.dumps(one)}\n{json.dumps(two)}\n```").right == 8


def test_longer_documents_have_prose_between_records() -> None:
    text, _ = document("extract_all", 400 + 1200)
    assert len(read_records(text)) == 400
    assert [w for w in text.split() if w.startswith("Word")] == [*PROSE, *PROSE, *PROSE[:200]]
    assert text.split("\n\n")[2].startswith("Word0.")


# Fitting, records and summaries.


def test_the_largest_size_that_fits_is_found() -> None:
    for offset, each, wanted in ((100, 7, 557), (0, 1, 4000), (3990, 3, 3), (10, 2000, 1)):
        counted: list[int] = []

        def count(
            size: int, offset: int = offset, each: int = each, counted: list[int] = counted
        ) -> int:
            counted.append(size)
            return offset + each * size

        for guess in (None, 1, 300, 9000):
            counted.clear()
            assert largest(count, 4000, guess=guess) == wanted, (offset, each, guess)
            assert len(counted) < 40
    with pytest.raises(ValueError, match="no task fits 4,000 tokens"):
        largest(lambda size: 100 * size, 4000, least=50)
    with pytest.raises(ValueError, match="no task fits 4,000 tokens"):
        largest(lambda size: 100 * size, 4000, least=50, guess=70)
    # A count that is not monotonic: what is found fits, and the next does not.
    noisy = {size: 10 * size + random.Random(size).randrange(30) for size in range(1000)}
    found = largest(noisy.__getitem__, 4000)
    assert noisy[found] <= 4000 < noisy[found + 1]


def test_records_survive_an_interruption(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    records = Records(path)
    records.add("a", {"score": 1})
    records.add("b", {"score": 0.5})
    with path.open("a") as file:
        file.write('{"key": "c", "sco')
    again = Records(path)
    assert again.get("a") == {"key": "a", "score": 1}
    assert again.get("c") is None
    again.add("c", {"score": 0})
    assert [json.loads(line)["key"] for line in path.read_text().splitlines()] == ["a", "b", "c"]
    path.write_text('{"key": "a"}\n[]\n')
    with pytest.raises(ValueError, match=r"records.jsonl, line 2, is not a record"):
        Records(path)


def test_methods_are_compared_where_dense_attention_can_answer() -> None:
    found: dict[suite_summary.Place, dict[str, Any]] = {}
    # At 4K dense attention answers all eight questions, at 8K a quarter of them.
    scores: dict[int, dict[str, list[float]]] = {
        4096: {"exact": [1, 1, 1, 1, 1, 1, 1, 1], "quest": [1, 1, 1, 0, 1, 0.5, 1, 1]},
        8192: {"exact": [1, 0, 0, 0, 1, 0, 0, 0], "quest": [0] * 8},
    }
    for length, by_method in scores.items():
        for method, several in by_method.items():
            for i, score in enumerate(several):
                place = (length, ("vt", "cwe")[i // 4], i % 4, method)
                found[place] = {"score": score, "row_share": 0.1, "setting": "share 0.08"}
    samples = dict.fromkeys(scores, range(4))
    told = suite_summary.benchmark(found, "quest", ("vt", "cwe"), samples, seed=0)
    near, far = told["points"]
    assert (near["compared"], far["compared"]) == (True, False)
    assert near["score"] == pytest.approx(6.5 / 8)
    assert near["more_than_dense"] == pytest.approx(-1.5 / 8)
    assert (near["lost"], near["won"]) == (2, 0)
    low, high = near["more_interval"]
    assert low < -1.5 / 8 < high <= 0
    assert near["tasks"]["vt"]["score"] == 0.75
    assert near["tasks"]["cwe"]["score"] == 0.875
    assert far["score"] == 0
    assert "more_than_dense" not in far
    # Only the questions of 4K.
    assert told["compared_lengths"]["more_than_dense"] == pytest.approx(-1.5 / 8)
    none = suite_summary.benchmark(found, "quest", ("vt", "cwe"), {8192: range(4)}, seed=0)
    assert none["compared_lengths"] is None

    methods = [
        {
            "label": name,
            "knob": "",
            "benchmarks": {
                "ruler": suite_summary.benchmark(found, name, ("vt", "cwe"), samples, seed=0)
            },
        }
        for name in ("exact", "quest")
    ]
    parameters = {
        "lengths": [4096, 8192],
        "sample_counts": [4, 4],
        "tasks": {"ruler": ["vt", "cwe"]},
        "intervals": "",
    }
    lines = suite_page.page({"parameters": parameters, "found": {"methods": methods}})
    assert (
        "| exact | 10.0 %: 100.0 (68-100) | 10.0 %: 25.0 (7-59), too low to compare | - |" in lines
    )
    (row,) = (line for line in lines if line.startswith("| quest | 10.0 %: 81.2 ("))
    assert re.search(
        r"\), -18\.8 \(-\d+\.\d to [+-]\d+\.\d\), 2, 0 \| 10\.0 %: 0\.0 \(0-32\) \|", row
    )
    assert "| 8K | quest | share 0.08 | 0.0, 10.0 % | 0.0, 10.0 % |" in lines


# From end to end.


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A random model, and a text of words in its vocabulary."""
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny_llama(
        folder, num_hidden_layers=2, max_position_embeddings=4096, initializer_range=0.2
    )
    prose = folder / "prose.txt"
    prose.write_text(" ".join(WORDS[i] + "." * (i % 10 == 0) for i in draw_words(6000)))
    return folder, prose


def test_tasks_from_end_to_end(
    tiny: tuple[Path, Path], target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, prose = tiny
    # This model gives no JSON, however many tokens it may use.
    monkeypatch.setattr(extraction, "_TOKENS_PER_CHARACTER", 0)

    def invoke(*words: object) -> Any:
        own = ["tasks", folder, prose, *words, "--output", tmp_path, "--daemon", target]
        return CliRunner().invoke(app, [str(word) for word in own], catch_exceptions=False)

    def evaluate(*more: object) -> Any:
        tasks = "vt,fwe,extract_some"
        answer = invoke("--tasks", tasks, "--lengths", 2600, "--methods", "default,quest", *more)
        assert answer.exit_code == 0, answer.output
        return json.loads((tmp_path / "tasks.json").read_text())

    def lines() -> list[Any]:
        return [json.loads(line) for line in (tmp_path / "tasks.jsonl").read_text().splitlines()]

    told = evaluate("--samples", 1)
    assert told["parameters"]["tasks"] == {
        "ruler": ["vt", "fwe"],
        "extraction": ["extract_some"],
    }
    assert [method["name"] for method in told["found"]["methods"]] == ["exact", "default", "quest"]
    dense, default, quest = (
        method["benchmarks"]["ruler"]["points"][0] for method in told["found"]["methods"]
    )
    assert dense["row_share"] == 1
    assert 0 < default["row_share"] < 1
    # The budget is set by the rows on prose, which differ from those of tasks.
    assert 128 / 2600 < quest["row_share"] < 0.5
    assert quest["setting"].startswith("share 0.")
    assert dense["count"] == 2
    # A random model answers nothing, so nothing is compared.
    assert not dense["compared"]
    # Three budgets, and a line for each task and method.
    kept = lines()
    assert len(kept) == 3 + 3 * 3
    one = next(line for line in kept if line.get("task") == "vt")
    assert (one["length"], one["sample"], one["method"]) == (2600, 0, "exact")
    assert 2600 - 60 < one["tokens"] + 30 <= 2600
    assert len(one["wanted"]) == 5
    some = next(line for line in kept if line.get("task") == "extract_some")
    assert some["wanted"] > 0
    assert (some["given"], some["precision"]) == (0, 0)

    # Records are kept: only what is missing is asked, here the second sample.
    again = evaluate("--samples", 1)
    assert lines() == kept
    assert again["found"] == told["found"]
    assert evaluate("--samples", 2)["parameters"]["sample_counts"] == [2]
    assert lines()[: len(kept)] == kept
    assert len(lines()) == 3 + 2 * 3 * 3

    page = (tmp_path / "README.md").read_text()
    assert "## RULER and extraction" in page
    assert "| Spillway, quality `default` |" in page
    assert "too low to compare" in page

    def refused(*words: object) -> str:
        answer = invoke(*words)
        assert answer.exit_code == 1
        return " ".join(answer.output.split("ValueError: ")[1].split())

    assert refused("--tasks", "niah").startswith("no task niah; there are ruler, extraction, niah_")
    assert refused("--methods", "x").startswith("no method x; there are exact, high, default, fast")
    assert (
        refused("--tasks", "extract_all", "--lengths", "600", "--methods", "default")
        == "extract_all: no task fits 600 tokens"
    )
    assert (
        refused("--minutes", "0.00001", "--samples", 3, "--lengths", "2500")
        == "no sample of every task was answered in the time given"
    )


def test_tasks_of_rows_of_8_bits(tiny: tuple[Path, Path], target: str, tmp_path: Path) -> None:
    """Dense attention has rows in bfloat16, and there is one over the stored rows."""

    def evaluate(methods: str, *more: str) -> list[str]:
        own = ["tasks", *map(str, tiny), "--tasks", "fwe", "--lengths", "2600", "--samples", "1"]
        own += ["--methods", methods, *more, "--output", str(tmp_path), "--daemon", target]
        answer = CliRunner().invoke(app, own, catch_exceptions=False)
        assert answer.exit_code == 0, answer.output
        told = json.loads((tmp_path / "tasks.json").read_text())
        assert told["parameters"]["row_type"] == ("int8" if more else "model")
        return [method["name"] for method in told["found"]["methods"]]

    rows = ("--row-type", "int8")
    assert evaluate("stored,default,codes", *rows) == ["exact", "stored", "default", "codes"]
    lines = [json.loads(line) for line in (tmp_path / "tasks.jsonl").read_text().splitlines()]
    shares = {line["method"]: line["row_share"] for line in lines if "task" in line}
    assert shares["exact"] == shares["stored"] == 1
    assert 0 < shares["default"] < 1
    # Records of other rows are others.
    assert evaluate("default") == ["exact", "default"]
    assert len((tmp_path / "tasks.jsonl").read_text().splitlines()) == len(lines) + 2 + 2
    own = ["tasks", *map(str, tiny), "--methods", "quest", *rows, "--output", str(tmp_path)]
    answer = CliRunner().invoke(app, [*own, "--daemon", target])
    assert "no method quest; there are exact, stored, high" in " ".join(answer.output.split())


def test_generators_are_those_of_the_version() -> None:
    """If this fails, raise suite.VERSION: answers to other tasks must not be taken for these."""
    # Without tasks whose words are those of a package; keys of records have its version.
    makers = {name: ruler.maker(name, 4096) for name in ("niah_multikey_3", "vt", "fwe")}
    makers |= {name: extraction.maker(name) for name in extraction.NAMES}
    tasks = {name: make(random.Random(5), PROSE, 450) for name, make in makers.items()}
    told = json.dumps(
        [[name, task.context, vars(task.questions[0])] for name, task in tasks.items()]
    )
    digest = hashlib.sha256(told.encode()).hexdigest()[:16]
    assert (suite.VERSION, digest) == (1, "a9e78b2f2788e222")


def test_budgets_are_chosen_on_text_that_ends_once() -> None:
    text = torch.arange(1000)
    short = suite.stretch(text, 300, seed=1)
    assert short.tolist() == [(int(short[0]) + i) % 1000 for i in range(300)]
    assert torch.equal(short, suite.stretch(text, 300, seed=1))
    assert not torch.equal(short, suite.stretch(text, 300, seed=2))
    # Of a text that is too short, the beginning comes twice.
    long = suite.stretch(text, 1600, seed=1)
    first = int(long[0])
    assert long.tolist() == [(first + i % 1000) % 1000 for i in [*range(600), *range(1000)]]
    assert not set(long[-64:].tolist()) & set(long[:-64].tolist())
    assert len(suite.stretch(text, 1936, seed=1)) == 1936
    told = "the text has 1,000 tokens; for 2,000 it takes at least 1,032"
    with pytest.raises(ValueError, match=told):
        suite.stretch(text, 2000, seed=1)


def test_the_command_names_the_extra(
    tiny: tuple[Path, Path], target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(_: str) -> Any:
        raise ModuleNotFoundError("No module named 'wonderwords'", name="wonderwords")

    words._listed.cache_clear()
    words.usual.cache_clear()
    monkeypatch.setattr("importlib.resources.files", missing)
    options = ["--output", tmp_path, "--daemon", target, "--tasks", "vt,cwe"]
    answer = CliRunner().invoke(app, ["tasks", *(str(word) for word in (*tiny, *options))])
    assert answer.exit_code == 1
    told = (
        "a RULER task needs wonderwords, which is not installed: pip install 'spillway-kv[ruler]'"
    )
    assert told in " ".join(answer.output.split())
    # Tasks without such words are served.
    served = {name for name in ruler.NAMES if not ruler.needs_words(name)}
    assert served == {"niah_multikey_3", "vt", "fwe"}


def test_names_of_tasks() -> None:
    assert suite.chosen_tasks("ruler") == list(ruler.NAMES)
    assert len(ruler.NAMES) == 11
    assert suite.chosen_tasks("vt, extraction,vt") == ["vt", "extract_all", "extract_some"]
