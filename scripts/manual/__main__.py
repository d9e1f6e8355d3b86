"""Makes the man page of a program, and its completion for bash and zsh, from what --help says.

    python3 scripts/manual --version 1.2.3 --output SHARE [--section 8] PROGRAM
    python3 scripts/manual --version 1.2.3 --output SHARE --typer NAME MODULE

SHARE gets man/, bash-completion/ and zsh/ as /usr/share has them. PROGRAM is written with CLI11;
the main() of MODULE is the program NAME, written with Typer. The build runs this, so that none is
older than its program. Needs the standard library alone.
"""

from __future__ import annotations

import argparse
import gzip
import subprocess
from pathlib import Path

import bash
import man_page
import read_cli11
import read_typer
import zsh


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="gets what belongs in share/")
    parser.add_argument("--section", default="1", help="of the manual")
    parser.add_argument("--typer", metavar="NAME", help="of a program written with Typer")
    parser.add_argument("--version", required=True)
    parser.add_argument("program", help="its file, or with --typer its module")
    options = parser.parse_args()
    try:
        if options.typer:
            program = read_typer.read(options.program, options.typer)
        else:
            program = read_cli11.read(options.program, Path(options.program).name)
    except subprocess.CalledProcessError as error:
        raise SystemExit(f"{error.cmd} ended with {error.returncode}: {error.stderr}") from None
    name = program.path[0]
    page = man_page.write(program, options.section, options.version)
    share: Path = options.output
    write(share / f"bash-completion/completions/{name}", bash.write(program))
    write(share / f"zsh/site-functions/_{name}", zsh.write(program))
    path = share / f"man/man{options.section}/{name}.{options.section}.gz"
    path.parent.mkdir(parents=True, exist_ok=True)
    # Without a time stamp, so that the same program gives the same file.
    path.write_bytes(gzip.compress(page.encode(), mtime=0))


if __name__ == "__main__":
    main()
