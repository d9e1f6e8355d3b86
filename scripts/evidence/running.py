"""Runs the steps of parts. An interrupted part continues; a complete one is not run again."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from inputs import INPUTS, environment, prepare
from parts import Part, Step
from spillway_kv.lab.evaluation.records import Records

# Seconds between two lines about a step that runs.
REPORT_SECONDS = 60.0
Chosen = list[tuple[Part, list[Step]]]


class StepError(RuntimeError):
    """A step failed."""


def choose(names: Sequence[str], parts: Sequence[Part]) -> Chosen:
    """The parts of a selection: `PART`, `PART/STEP` for one of its steps, or `all`.

    Raises:
        ValueError: There is no such part or step. The message lists those that there are.
    """
    by_name = {part.name: part for part in parts}
    if "all" in names:
        return [(part, list(part.steps)) for part in parts]
    chosen: dict[str, list[Step]] = {}
    for name in names:
        of_part, _, of_step = name.partition("/")
        if of_part not in by_name:
            raise ValueError(f"no part {of_part!r}; there are {', '.join(by_name)}")
        part = by_name[of_part]
        steps = [step for step in part.steps if of_step in ("", step.name)]
        if of_step and not steps:
            there = ", ".join(step.name for step in part.steps) or "none"
            raise ValueError(f"{of_part} has no step {of_step!r}; there are {there}")
        own = chosen.setdefault(of_part, [])
        own += [step for step in steps if step not in own]
    return [(by_name[name], steps) for name, steps in chosen.items()]


class Runner:
    """Runs steps in a folder, and knows which ones are complete.

    PART/ has the work of a part, with a log for each step. PART/steps.jsonl has a record for each
    complete step. inputs/ has the models and texts.
    """

    def __init__(self, work: Path, say: Callable[[str], None]) -> None:
        self._work = work.resolve()
        self._say = say

    @property
    def inputs(self) -> Path:
        """The folder of models and texts."""
        return self._work / "inputs"

    def is_complete(self, part: Part, step: Step) -> bool:
        """Whether this command made all files of the step, and they are there."""
        record = self._records(part).get(step.name)
        return (
            record is not None
            and record["command"] == step.command
            and all((self._folder(part) / name).exists() for name in step.makes)
        )

    def left(self, part: Part) -> list[Step]:
        """The steps of a part that are not complete."""
        return [step for step in part.steps if not self.is_complete(part, step)]

    def run(self, chosen: Chosen) -> None:
        """Runs the steps that are not complete.

        Raises:
            StepError: A step failed, or needs a GPU that is not there.
            FileNotFoundError, RuntimeError, ValueError: An input is not as it should be.
        """
        for part, steps in chosen:
            if not steps:
                raise StepError(f"{part.name} has nothing to run: its records cannot be made again")
            waiting = [step for step in steps if not self.is_complete(part, step)]
            if waiting and part.device == "GPU" and not has_gpu():
                raise StepError(f"{part.name} needs a GPU, and nvidia-smi finds none")
        for number, (part, steps) in enumerate(chosen, 1):
            for i, step in enumerate(steps):
                where = (
                    f"[part {number} of {len(chosen)}, {part.name}] step {i + 1} of {len(steps)}"
                )
                if self.is_complete(part, step):
                    self._say(f"{where}, {step.name}: is complete")
                    continue
                self._say(f"{where}, {step.name}: begins")
                seconds = self._run(part, step, f"{where}, {step.name}")
                self._say(
                    f"{where}, {step.name}: done in {told(seconds)}, "
                    f"{len(steps) - i - 1} steps of {part.name} and "
                    f"{len(chosen) - number} parts left"
                )

    def adopt(self, chosen: Chosen, results: Path) -> list[Path]:
        """Copies what complete steps made to docs/results, and returns these files.

        Raises:
            StepError: No step is complete.
        """
        copied = []
        for part, steps in chosen:
            for step in steps:
                if step.is_result and self.is_complete(part, step):
                    for name in step.makes:
                        target = results / name
                        target.parent.mkdir(parents=True, exist_ok=True)
                        shutil.copy(self._folder(part) / name, target)
                        copied.append(target)
        if not copied:
            names = ", ".join(part.name for part, _ in chosen)
            raise StepError(f"no step of {names} is complete in {self._work}")
        return copied

    def _folder(self, part: Part) -> Path:
        return self._work / part.name

    def _records(self, part: Part) -> Records:
        return Records(self._folder(part) / "steps.jsonl")

    def _run(self, part: Part, step: Step, where: str) -> float:
        """Runs a step, and returns the seconds that it took."""
        folder = self._folder(part)
        for name in step.makes:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            if not step.continues:
                (folder / name).unlink(missing_ok=True)
        folder.mkdir(parents=True, exist_ok=True)
        for name in step.inputs:
            source = prepare(name, self.inputs)
            (folder / name).unlink(missing_ok=True)
            (folder / name).symlink_to(source)
        start = time.monotonic()
        log = folder / f"{step.name}.log"
        with log.open("w") as output:
            process = subprocess.Popen(
                ["bash", "-euo", "pipefail", "-c", step.command],
                cwd=folder,
                env=environment(),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                while True:
                    try:
                        status = process.wait(REPORT_SECONDS)
                        break
                    except subprocess.TimeoutExpired:
                        said = log.read_text(errors="replace").strip().splitlines()[-1:]
                        passed = told(time.monotonic() - start)
                        self._say(f"{where}: {passed}; {' '.join(said)[:120]}")
            except BaseException:
                # The programs of the step are in its process group.
                os.killpg(process.pid, signal.SIGTERM)
                process.wait()
                raise
        if status != 0:
            last = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
            raise StepError(f"{part.name}/{step.name} ended with {status}; {log} ends with\n{last}")
        lacking = [name for name in step.makes if not (folder / name).exists()]
        if lacking:
            raise StepError(f"{part.name}/{step.name} ended without making {', '.join(lacking)}")
        seconds = time.monotonic() - start
        date = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
        record = {"command": step.command, "date": date, "seconds": round(seconds, 1)}
        self._records(part).add(step.name, record)
        return seconds


def has_gpu() -> bool:
    """Whether there is a GPU with its driver."""
    if shutil.which("nvidia-smi") is None:
        return False
    return subprocess.run(["nvidia-smi", "-L"], capture_output=True).returncode == 0


def told(seconds: float) -> str:
    """A duration for a reader."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def list_parts(parts: Sequence[Part], runner: Runner, with_steps: bool) -> list[str]:
    """For each part: what it shows, what it needs, and what of it is complete."""
    lines = []
    for part in parts:
        lines.append(f"{part.name}: {part.about}")
        if not part.steps:
            lines.append("    tables and pictures only")
            continue
        inputs = sorted({name for step in part.steps for name in step.inputs})
        done = len(part.steps) - len(runner.left(part))
        needs = [part.device, f"{part.hours:g} h", *inputs]
        lines.append(f"    {len(part.steps)} steps, {done} complete; needs {', '.join(needs)}")
        for step in part.steps if with_steps else ():
            state = "complete" if runner.is_complete(part, step) else "to run"
            lines.append(f"    {part.name}/{step.name}: {state}")
    given = sorted(name for name, one in INPUTS.items() if not one.command)
    lines.append(f"Put into {runner.inputs} first: {', '.join(given)}. Other inputs are made.")
    return lines
