"""Files with which people and tools start name only what exists."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import yaml
from daemon_process import ROOT

if not (ROOT / "Makefile").exists():
    pytest.skip("no checkout here, only what a bundle has of it", allow_module_level=True)

MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = set(re.findall(r"^([a-z-]+):.*## ", MAKEFILE, re.MULTILINE))


def hooks() -> list[dict[str, Any]]:
    """The hooks of the only repository in the file, which is this one."""
    configured = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    (repository,) = configured["repos"]
    assert repository["repo"] == "local"
    return list(repository["hooks"])


def test_hooks_download_nothing() -> None:
    assert {hook["language"] for hook in hooks()} == {"system"}


def test_hooks_and_lint_are_one() -> None:
    (recipe,) = re.findall(r"^lint: .*\n((?:\t.*\n)+)", MAKEFILE, re.MULTILINE)
    assert recipe.strip() == "$(PYTHON) -m pre_commit run --all-files --show-diff-on-failure"
    assert [hook["id"] for hook in hooks()] == [
        *("clang-format", "includes", "class-names", "imports", "ruff", "ruff-format", "mypy"),
        "proto",
    ]


def test_hooks_run_what_is_there() -> None:
    for hook in hooks():
        for word in hook["entry"].split():
            if word.startswith("scripts/"):
                assert (ROOT / word).is_file(), hook["id"]


def test_every_target_is_phony_and_there() -> None:
    (phony,) = re.findall(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)
    rules = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE))
    assert set(phony.split()) == rules


def test_pages_name_targets_that_are() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / ".github").rglob("*.*")]
    for page in pages:
        for target in re.findall(r"`make ([a-z-]+)", page.read_text()):
            assert target in TARGETS, (page.name, target)


def test_the_container_for_developers_is_the_builds() -> None:
    told = json.loads((ROOT / ".devcontainer/devcontainer.json").read_text())
    build = told["build"]
    file = ROOT / ".devcontainer" / build["dockerfile"]
    assert f" AS {build['target']}\n" in file.read_text()
    assert (ROOT / ".devcontainer" / build["context"]).samefile(ROOT)
    command = told["postCreateCommand"].split()
    assert command[0] == "make"
    assert set(command[1:]) <= TARGETS


# Dates, for people. Durations are of clocks that nobody sets: SteadyTime, time.monotonic.
DATES = {
    "clients/cpp/cli/lists.cc",
    "clients/cpp/cli/status.cc",
    "clients/cpp/cli/top.cc",
    "clients/python/spillway_kv/lab/bench/link.py",
    "clients/python/spillway_kv/lab/evaluation/results.py",
    "services/convert/model.cc",
    "engine/engine.cc",
    "services/server.cc",
}
WALL_CLOCK = re.compile(
    r"absl::Now\b|system_clock|CLOCK_REALTIME|gettimeofday|\btime\.time\b|\bdatetime\.(utc)?now\b"
)


def test_durations_are_not_of_the_wall_clock() -> None:
    read = {
        str(path.relative_to(ROOT))
        for folder in ("clients", "daemon", "engine", "gpu", "host", "lib", "services")
        for kind in ("cc", "cu", "cuh", "h", "py")
        for path in (ROOT / folder).rglob(f"*.{kind}")
        if WALL_CLOCK.search(path.read_text())
    }
    assert read == DATES


def test_forms_are_forms() -> None:
    for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("[!c]*.yml"):
        form = yaml.safe_load(path.read_text())
        assert {"name", "description", "body"} <= set(form), path.name
        assert {field["type"] for field in form["body"]} == {"textarea"}
