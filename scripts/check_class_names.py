"""Checks that no two files define a class of the same name in the same namespace.

A program that contains both would use the functions of one for objects of the other (the one
definition rule), without an error of compiler or linker. libspillway contains daemon and client.

Nor may two files of one library have a constant of one name at the beginning of a
line, in namespaces without a name: `make demo` compiles many files as one, and which ones changes
whenever a file is added.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("clients/cpp/spillway", "clients/cpp/cli", "daemon", "engine", "gpu", "host", "lib")
FOLDERS += ("services",)
SUFFIXES = {".h", ".cc", ".cu", ".cuh"}
# A definition at the beginning of a line: not a nested class, and no declaration.
_CLASS = re.compile(r"(?:class|struct) (?:alignas\(\w+\) )?(\w+)(?: final)?(?: :| \{)")
_CONSTANT = re.compile(r"(?:inline )?constexpr [\w:<>, ]*?(k[A-Z]\w*)\b")
# Not in the build of `make demo`.
_APART = ("host/methods/",)
_NAMESPACE = re.compile(r"namespace ([\w:]+ )?\{")


def constants_of(text: str) -> list[str]:
    """Returns the constants that a file defines at the beginning of a line."""
    return [found[1] for line in text.splitlines() if (found := _CONSTANT.match(line))]


def classes_of(text: str) -> list[str]:
    """Returns the names, with namespaces, of the classes that a file defines outside of others."""
    names = []
    namespaces: list[str] = []
    for line in text.splitlines():
        if opened := _NAMESPACE.match(line):
            namespaces.append((opened[1] or "").strip())
        elif line.startswith("}  // namespace"):
            namespaces.pop()
        elif (found := _CLASS.match(line)) and "" not in namespaces:
            names.append("::".join([*namespaces, found[1]]))
    return names


def main() -> int:
    """Prints the names that several files define. Returns the number of them, at most 1."""
    listed = subprocess.run(
        ["git", "ls-files", *FOLDERS], cwd=ROOT, check=True, capture_output=True, text=True
    )
    places: dict[str, list[str]] = defaultdict(list)
    for name in listed.stdout.split():
        if Path(name).suffix in SUFFIXES and (ROOT / name).exists():
            text = (ROOT / name).read_text()
            joined = name.endswith(".cc") and name.startswith(
                ("daemon/", "engine/", "host/", "services/")
            )
            constants = constants_of(text) if joined and not name.startswith(_APART) else []
            of_library = [f"{name.split('/')[0]}: {constant}" for constant in constants]
            for each in classes_of(text) + of_library:
                places[each].append(name)
    twice = {name: files for name, files in places.items() if len(set(files)) > 1}
    for name, files in sorted(twice.items()):
        print(f"{name} is defined in {' and in '.join(sorted(set(files)))}")
    return min(len(twice), 1)


if __name__ == "__main__":
    sys.exit(main())
