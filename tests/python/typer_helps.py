"""Prints what --help says of a program written with Typer, and of all commands below it, as JSON.

python typer_helps.py MODULE
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import re
import sys
from collections.abc import Iterator


def helps(module: str, *path: str) -> Iterator[tuple[tuple[str, ...], str]]:
    """Calls main() of the module."""
    sys.argv = [module, *path, "--help"]
    told = io.StringIO()
    with contextlib.redirect_stdout(told), contextlib.suppress(SystemExit):
        importlib.import_module(module).main()
    yield path, told.getvalue()
    listed = re.search(r"^Commands:\n((?:  .*\n)+)", told.getvalue(), re.MULTILINE)
    for name in re.findall(r"^  (\S+)", listed[1], re.MULTILINE) if listed else []:
        yield from helps(module, *path, name)


if __name__ == "__main__":
    json.dump(list(helps(sys.argv[1])), sys.stdout)
