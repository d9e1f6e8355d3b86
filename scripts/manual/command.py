"""What a program takes on its command line."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass
class Option:
    """An option, or an argument without dashes.

    Attributes:
        names: Such as -h and --help; of an argument its one name.
        value: What stands for its value, such as TEXT; empty: it takes none.
        choices: All values that it takes, where they are listed.
        help: What it does.
        notes: What else is said of it: its default, the variable of the environment.
        group: The heading that it stands under.
    """

    names: list[str]
    value: str = ""
    choices: list[str] = field(default_factory=list)
    help: str = ""
    notes: list[str] = field(default_factory=list)
    group: str = "Options"

    @property
    def takes(self) -> str:
        """What completes its value: "choices", "files", "folders" or "nothing"."""
        if self.choices:
            return "choices"
        name, value = self.names[-1], self.value.strip("<>")
        if name.endswith(("-folder", "-directory")) or value == "dir":
            return "folders"
        told = re.search(r"\bfile\b", self.help, re.IGNORECASE)
        return "files" if self.value and (told or value in ("file", "path")) else "nothing"


@dataclass
class Command:
    """A program or a command of it.

    Attributes:
        path: The program's name and the commands' down to this.
        summary: What it does.
        usage: The line that says how it is called, without the path.
        options: In the order of --help.
        arguments: The same.
        commands: The same.
        footer: What --help says at its end.
    """

    path: list[str]
    summary: str = ""
    usage: str = ""
    options: list[Option] = field(default_factory=list)
    arguments: list[Option] = field(default_factory=list)
    commands: list[Command] = field(default_factory=list)
    footer: str = ""

    def all(self) -> Iterator[Command]:
        """This one, and all below it."""
        yield self
        for command in self.commands:
            yield from command.all()
