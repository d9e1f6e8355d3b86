"""`make release` refuses what is not ready, and otherwise collects the files and their sums."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from pathlib import Path

import pytest
from daemon_process import ROOT

SCRIPT = ROOT / "scripts/release.sh"
if not SCRIPT.exists():
    pytest.skip("no checkout here, only what a bundle has of it", allow_module_level=True)

CHANGELOG = """# Changelog

## Unreleased

## 1.2.3 - 2026-05-04

### Added

- A thing.

## 1.2.2 - 2026-01-01

- An old thing.
"""
# Stands for make targets that take minutes.
MAKEFILE = """
package wheels:
\tmkdir -p build/$@ && cd build/$@ && $(foreach n,$(FILES_$@),echo $(n) > $(n);)
FILES_package = spillway_1.2.3_amd64.deb spillway-dev_1.2.3_amd64.deb
FILES_package += spillway-1.2.3-linux-x86_64.tar.gz
FILES_wheels = spillway_kv-1.2.3-py3-none-any.whl
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout that is ready for a release, with its files committed."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(SCRIPT, tmp_path / "scripts")
    (tmp_path / "scripts/wheels-test.sh").write_text("#!/bin/sh\necho wheels are tried\n")
    (tmp_path / "scripts/wheels-test.sh").chmod(0o755)
    (tmp_path / "VERSION").write_text("1.2.3\n")
    (tmp_path / "CHANGELOG.md").write_text(CHANGELOG)
    (tmp_path / "Makefile").write_text(MAKEFILE)
    (tmp_path / ".gitignore").write_text("/build/\n")
    git(tmp_path, "init", "--quiet")
    commit(tmp_path)
    return tmp_path


def git(folder: Path, *arguments: str) -> None:
    who = ("-c", "user.name=nobody", "-c", "user.email=nobody@example.com")
    subprocess.run(["git", *who, *arguments], cwd=folder, check=True)


def commit(folder: Path) -> None:
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "all")


def release(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["scripts/release.sh"], cwd=folder, capture_output=True, text=True)


def test_all_is_collected(checkout: Path) -> None:
    done = release(checkout)
    assert done.returncode == 0, done.stderr
    assert "wheels are tried" in done.stdout
    assert "git tag --sign v1.2.3" in done.stdout
    made = checkout / "build/release-1.2.3"
    files = {path.name for path in made.iterdir()} - {"NOTES.md", "SHA256SUMS"}
    assert files == {
        "spillway_1.2.3_amd64.deb",
        "spillway-dev_1.2.3_amd64.deb",
        "spillway-1.2.3-linux-x86_64.tar.gz",
        "spillway_kv-1.2.3-py3-none-any.whl",
    }
    lines = (made / "SHA256SUMS").read_text().splitlines()
    sums = {name: digest for digest, name in (line.split() for line in lines)}
    assert sums == {n: hashlib.sha256((made / n).read_bytes()).hexdigest() for n in files}
    assert (made / "NOTES.md").read_text() == "\n### Added\n\n- A thing.\n\n"


def refused(checkout: Path, message: str) -> None:
    done = release(checkout)
    assert done.returncode == 1
    assert message in done.stderr
    assert not (checkout / "build").exists()


def test_what_no_commit_has(checkout: Path) -> None:
    (checkout / "new").touch()
    refused(checkout, "the checkout has changes that no commit has:\n?? new")


def test_a_version_without_its_changes(checkout: Path) -> None:
    (checkout / "VERSION").write_text("1.2.4\n")
    commit(checkout)
    refused(checkout, "CHANGELOG.md has no line '## 1.2.4 - YYYY-MM-DD'")


def test_a_version_that_is_none(checkout: Path) -> None:
    (checkout / "VERSION").write_text("1.2\n")
    commit(checkout)
    refused(checkout, "VERSION says '1.2', not three numbers with dots")


def test_changes_that_are_left_in_unreleased(checkout: Path) -> None:
    text = CHANGELOG.replace("## Unreleased\n", "## Unreleased\n\n- Left behind.\n")
    (checkout / "CHANGELOG.md").write_text(text)
    commit(checkout)
    refused(checkout, "CHANGELOG.md has changes in Unreleased, which 1.2.3 has too")


def test_a_version_that_is_out(checkout: Path) -> None:
    git(checkout, "tag", "v1.2.3")
    refused(checkout, "the tag v1.2.3 is there already")
