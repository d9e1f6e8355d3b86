"""`make evidence`: selection, resuming, and pages that agree with their records."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from daemon_process import ROOT

SCRIPTS = ROOT / "scripts/evidence"
if not SCRIPTS.exists():
    pytest.skip("no checkout here, only what a bundle has of it", allow_module_level=True)
sys.path.insert(0, str(SCRIPTS))
import inputs  # noqa: E402
import pages  # noqa: E402
import processes  # noqa: E402
import running  # noqa: E402
from parts import PARTS, RESULTS, Part, Step, joined, recorded  # noqa: E402
from tables import TABLES  # noqa: E402

sys.path.remove(str(SCRIPTS))

FIRST = Step("first", "echo one >> log; echo 1 > fake/one.json", ("fake/one.json",))
SECOND = Step("second", "echo two >> log; echo 2 > fake/two.json", ("fake/two.json",))
FAKE = Part("fake", "two numbers", steps=(FIRST, SECOND))
OTHER = Part("other", "nothing", steps=(Step("only", "true", ()),))


class Lines(list[str]):
    """What a runner says."""

    def __call__(self, text: str) -> None:
        self.append(text)


def runner(folder: Path) -> tuple[running.Runner, Lines]:
    said = Lines()
    return running.Runner(folder, said), said


def ran(folder: Path) -> list[str]:
    """The steps that ran, in order."""
    return (folder / "fake/log").read_text().split()


def test_a_selection_has_parts_and_steps() -> None:
    assert running.choose(["fake"], [FAKE, OTHER]) == [(FAKE, [FIRST, SECOND])]
    assert running.choose(["fake/second", "fake"], [FAKE]) == [(FAKE, [SECOND, FIRST])]
    assert [part.name for part, _ in running.choose(["all"], [FAKE, OTHER])] == ["fake", "other"]


def test_an_unknown_part_is_named_with_those_that_there_are() -> None:
    with pytest.raises(ValueError, match="no part 'fale'; there are fake, other"):
        running.choose(["fale"], [FAKE, OTHER])
    with pytest.raises(ValueError, match="fake has no step 'third'; there are first, second"):
        running.choose(["fake/third"], [FAKE, OTHER])
    command = [sys.executable, str(SCRIPTS), "nonsense"]
    done = subprocess.run(command, capture_output=True, text=True, env=inputs.environment())
    assert done.returncode == 1
    assert done.stderr.startswith("evidence: no part 'nonsense'; there are bound, errors, ")


def test_a_complete_part_is_not_run_again(tmp_path: Path) -> None:
    own, said = runner(tmp_path)
    own.run([(FAKE, [FIRST])])
    assert [step.name for step in own.left(FAKE)] == ["second"]
    own.run([(FAKE, [FIRST, SECOND])])
    own.run([(FAKE, [FIRST, SECOND])])
    assert ran(tmp_path) == ["one", "two"]
    assert said[-1] == "[part 1 of 1, fake] step 2 of 2, second: is complete"
    assert "done in 0 s, 0 steps of fake and 0 parts left" in said[-3]


def test_another_command_or_a_lost_record_makes_a_step_incomplete(tmp_path: Path) -> None:
    own, _ = runner(tmp_path)
    own.run([(FAKE, [FIRST, SECOND])])
    changed = FIRST._replace(command=FIRST.command + " ")
    assert not own.is_complete(FAKE, changed)
    (tmp_path / "fake/fake/two.json").unlink()
    assert [step.name for step in own.left(FAKE)] == ["second"]


def test_an_interrupted_part_continues(tmp_path: Path) -> None:
    """The process is ended in its second step, which leaves half of its records."""
    slow = Step(
        "slow",
        "echo slow >> log; echo half >> fake/slow.json; test -e again || sleep 60; "
        "echo whole >> fake/slow.json",
        ("fake/slow.json",),
    )
    part = f"Part('fake', '', steps=({FIRST!r}, {slow!r}))"
    program = (
        "import sys, signal; signal.signal(signal.SIGTERM, lambda *_: sys.exit(143)); "
        f"sys.path.insert(0, {str(SCRIPTS)!r}); import running; from parts import Part, Step; "
        f"part = {part}; from pathlib import Path; "
        f"running.Runner(Path({str(tmp_path)!r}), print).run([(part, list(part.steps))])"
    )
    process = subprocess.Popen([sys.executable, "-c", program], env=inputs.environment())
    half = tmp_path / "fake/fake/slow.json"
    limit = time.monotonic() + 60
    while not half.exists() or not half.read_text():
        assert time.monotonic() < limit, "the slow step has not begun"
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 143
    fake = Part("fake", "", steps=(FIRST, slow))
    own, _ = runner(tmp_path)
    assert [step.name for step in own.left(fake)] == ["slow"]
    (tmp_path / "fake/again").touch()
    own.run([(fake, list(fake.steps))])
    # The first step did not run again, and the second continued what it had left.
    assert ran(tmp_path) == ["one", "slow", "slow"]
    assert half.read_text().split() == ["half", "half", "whole"]
    # One that does not continue begins from nothing.
    anew = slow._replace(command=f"{slow.command} ", continues=False)
    own.run([(Part("fake", "", steps=(anew,)), [anew])])
    assert half.read_text().split() == ["half", "whole"]


def test_a_step_that_fails_is_told_with_its_last_lines(tmp_path: Path) -> None:
    own, _ = runner(tmp_path)
    bad = Step("bad", "echo this is why; exit 3", ())
    part = Part("fake", "", steps=(bad,))
    with pytest.raises(running.StepError, match=r"(?s)fake/bad ended with 3.*\nthis is why$"):
        own.run([(part, [bad])])
    empty = Step("empty", "true", ("fake/nothing.json",))
    with pytest.raises(running.StepError, match="without making fake/nothing.json"):
        own.run([(part, [empty])])
    assert own.left(part) == [bad]


def test_parts_that_cannot_run_say_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, _ = runner(tmp_path)
    monkeypatch.setattr(running, "has_gpu", lambda: False)
    with pytest.raises(running.StepError, match="fake needs a GPU, and nvidia-smi finds none"):
        own.run([(FAKE._replace(device="GPU"), [FIRST])])
    with pytest.raises(running.StepError, match="old has nothing to run"):
        own.run([(Part("old", ""), [])])


def test_an_input_must_be_that_of_the_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {
        "own": inputs.Input("a word", sha256="0" * 64),
        "made": inputs.Input("another word", "echo -n word > made", "1" * 64),
        "right": inputs.Input("no word", "printf '' > right", inputs.digest(Path(os.devnull))),
        "failing": inputs.Input("a word", "echo no such package >&2; false"),
    }
    monkeypatch.setattr(inputs, "INPUTS", given)
    with pytest.raises(FileNotFoundError, match="own is missing: a word, sha256 000"):
        inputs.prepare("own", tmp_path)
    with pytest.raises(ValueError, match="made has sha256 98c1eb4e.*, not 111"):
        inputs.prepare("made", tmp_path)
    with pytest.raises(RuntimeError, match=r"failing \(a word\) cannot be made: no such package"):
        inputs.prepare("failing", tmp_path)
    assert inputs.prepare("right", tmp_path).read_bytes() == b""


def test_adopting_takes_what_is_complete(tmp_path: Path) -> None:
    own, _ = runner(tmp_path / "work")
    results = tmp_path / "results"
    with pytest.raises(running.StepError, match="no step of fake is complete"):
        own.adopt([(FAKE, [FIRST, SECOND])], results)
    own.run([(FAKE, [FIRST])])
    assert own.adopt([(FAKE, [FIRST, SECOND])], results) == [results / "fake/one.json"]
    assert (results / "fake/one.json").read_text() == "1\n"


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    """A copy of a part's records and of the pages with its tables."""
    copy = tmp_path / "docs"
    shutil.copytree(RESULTS / "evaluation/adversarial", copy / "results/evaluation/adversarial")
    shutil.copy(RESULTS / "evaluation/bound.md", copy / "results/evaluation")
    return copy


ADVERSARIAL = [part for part in PARTS if part.name == "adversarial"]


def contents(docs: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in docs.rglob("*") if path.is_file()}


def test_making_twice_gives_the_same_bytes(docs: Path) -> None:
    before = contents(docs)
    pages.render(ADVERSARIAL, TABLES, docs, draw=True)
    once = contents(docs)
    pages.render(ADVERSARIAL, TABLES, docs, draw=True)
    assert contents(docs) == once
    # The pages are those that are committed, and the pictures show the same.
    assert all(once[path] == before[path] for path in before if path.suffix == ".md")
    shown = json.loads((RESULTS.parent / pages.MANIFEST).read_text())
    found = json.loads(once[docs / pages.MANIFEST])
    assert len(found) == len(ADVERSARIAL[0].reports)
    assert found.items() <= shown.items()


def test_a_changed_figure_is_found(docs: Path) -> None:
    pages.render(ADVERSARIAL, TABLES, docs, draw=False)
    assert pages.check(ADVERSARIAL, TABLES, docs) == []
    page = docs / "results/evaluation/bound.md"
    text = page.read_text()
    assert text.count("| 7.3 % (far-start) |") == 1
    page.write_text(text.replace("| 7.3 % (far-start) |", "| 6.3 % (far-start) |"))
    found = pages.check(ADVERSARIAL, TABLES, docs)
    assert [line[:60] for line in found if line.startswith(("---", "+++"))] == [
        "--- docs/results/evaluation/bound.md",
        "+++ docs/results/evaluation/bound.md, from the records",
    ]
    assert any(line.startswith("+") and "| 7.3 % (far-start) |" in line for line in found)


def test_a_picture_of_other_records_is_found(docs: Path) -> None:
    pages.render(ADVERSARIAL, TABLES, docs, draw=False)
    path = docs / "results/evaluation/adversarial/8k/adversarial.json"
    told = json.loads(path.read_text())
    told["found"]["families"][0]["share"] = 0.05
    path.write_text(json.dumps(told))
    found = "\n".join(pages.check(ADVERSARIAL, TABLES, docs))
    assert re.search(r'^\+ "results/evaluation/adversarial/8k/adversarial.png": ', found, re.M)
    assert "docs/results/evaluation/adversarial/8k/README.md" in found


def test_marks_name_tables_that_there_are(docs: Path) -> None:
    page = docs / "results/evaluation/bound.md"
    text = page.read_text()
    page.write_text(text.replace(": ablation -->", ": ablations -->"))
    with pytest.raises(ValueError, match="marks of ablations and ablation; tables are bound, "):
        pages.render(ADVERSARIAL, TABLES, docs, draw=False)
    page.write_text(text.replace("made by make evidence: adversarial -->", "adversarial -->"))
    with pytest.raises(ValueError, match="no page has marks of adversarial"):
        pages.render(ADVERSARIAL, TABLES, docs, draw=False)


def inverse(number: int) -> float:
    if number == 13:
        os.kill(os.getpid(), signal.SIGKILL)
    return 1 / number


def test_processes_give_results_or_say_what_failed() -> None:
    """A pool of processes hung at its end, where SIGTERM has a handler, as in the command."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        assert (
            sorted(processes.called(inverse, [1, 2, 4] * 20)) == [0.25] * 20 + [0.5] * 20 + [1] * 20
        )
        with pytest.raises(RuntimeError, match="0: ZeroDivisionError: division by zero"):
            list(processes.called(inverse, [1, 0, 2, 3]))
        with pytest.raises(RuntimeError, match="13 ended with -9"):
            list(processes.called(inverse, [2, 13, 3]))
        assert not multiprocessing.active_children()
    finally:
        signal.signal(signal.SIGTERM, before)


def test_every_table_is_of_one_part() -> None:
    assert sorted(name for part in PARTS for name in part.tables) == sorted(TABLES)
    names = [part.name for part in PARTS]
    assert len(set(names)) == len(names)
    for part in PARTS:
        steps = [step.name for step in part.steps]
        assert len(set(steps)) == len(steps), part.name


def test_tables_agree_with_the_records() -> None:
    """The tables on all pages; other tests compare pages that are made as a whole."""
    only_tables = [part._replace(reports=(), scripts=()) for part in PARTS]
    assert pages.check(only_tables, TABLES, RESULTS.parent) == []


def test_steps_have_the_commands_of_the_records() -> None:
    (step,) = recorded("reuse", "reuse-smollm2-8k")
    assert step.name == "reuse-reuse-smollm2-8k"
    assert step.command == (
        "spillway-lab eval reuse SmolLM2-135M-Instruct code.txt --output "
        "evaluation/reuse-smollm2-8k --length 8192 --daemon-device cpu"
    )
    assert step.inputs == ("SmolLM2-135M-Instruct", "code.txt")
    with pytest.raises(ValueError, match="no command of spillway-lab eval: spillway eval"):
        recorded("fidelity", "8k")


def test_joined_records_have_a_step_for_each_run() -> None:
    folder = "evaluation/qwen2.5-coder-1.5b-ruler-64k"
    *runs, join = joined("tasks", "qwen2.5-coder-1.5b-ruler-64k")
    assert [step.makes for step in runs] == [(f"{folder}-{i}/tasks.json",) for i in (1, 2)]
    assert not any(step.is_result for step in runs)
    assert runs[0].command.startswith(
        "spillway-lab eval tasks Qwen2.5-Coder-1.5B-Instruct.gguf policy.txt.gz --lengths 65536 "
    )
    assert runs[0].inputs == ("Qwen2.5-Coder-1.5B-Instruct.gguf", "policy.txt.gz")
    assert join.command == f"spillway-lab eval join {folder}-1 {folder}-2 --output {folder}"
    assert join.makes == (f"{folder}/tasks.json", f"{folder}/tasks.jsonl")
