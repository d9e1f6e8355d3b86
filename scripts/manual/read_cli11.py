"""Reads the --help of a program that is written with CLI11."""

from __future__ import annotations

import os
import re
import subprocess

from command import Command, Option

# The column at which descriptions begin.
WIDTH = 30
# Without this, printed defaults would depend on this machine and user.
ENVIRONMENT = {"PATH": os.environ["PATH"], "LC_ALL": "C", "XDG_RUNTIME_DIR": "/run/user/UID"}


def read(program: str, *path: str) -> Command:
    """Runs the program, and each of its commands, with --help."""
    run = [program, *path[1:], "--help"]
    text = subprocess.run(run, env=ENVIRONMENT, check=True, capture_output=True, text=True).stdout
    command = parse(text, list(path))
    command.commands = [read(program, *path, known.path[-1]) for known in command.commands]
    return command


def parse(text: str, path: list[str]) -> Command:
    """Reads one --help. Of the subcommands, it has only names and summaries."""
    command = Command(path)
    summary, rest = text.split("Usage: ", 1)
    command.summary = " ".join(summary.split())
    usage, rest = rest.split("\n", 1)
    command.usage = usage.removeprefix(" ".join(path)).strip()
    lines = rest.split("\n")
    group = ""
    at = 0
    while at < len(lines):
        line = lines[at]
        heading = re.fullmatch(r"(\w[\w ]*):", line)
        if heading:
            group = heading[1]
        elif line.startswith("  "):
            following = lines[at + 1] if at + 1 < len(lines) else ""
            if following.startswith(" " * WIDTH):
                left, told = line, following
                at += 1
            else:
                left, told = line[:WIDTH], line[WIDTH:]
            add(command, group, left.strip(), told.strip())
        elif line:
            command.footer = "\n".join(lines[at:]).strip()
            break
        at += 1
    return command


def add(command: Command, group: str, left: str, told: str) -> None:
    """Adds an entry of --help, given the left and the right column."""
    if group == "Subcommands":
        command.commands.append(Command([*command.path, left], summary=told))
        return
    names, _, kind = left.partition(" ")
    option = Option(names.split(","), help=told, group=group)
    if excluded := re.search(r" ?Excludes: (.*)$", kind):
        option.notes.append(f"not with {excluded[1].replace(' ', ', ')}")
        kind = kind[: excluded.start()]
    if variable := re.search(r" ?\(Env:(\w+)\)", kind):
        option.notes.append(f"environment: {variable[1]}")
        kind = kind[: variable.start()]
    if kind.endswith(" REQUIRED"):
        kind = kind.removesuffix(" REQUIRED")
    many = kind.endswith(" ...")
    kind, _, default = kind.removesuffix(" ...").partition("=")
    if default:
        option.notes.insert(0, f"default: {default}")
    option.value, _, check = kind.partition(":")
    if check.startswith("{"):
        option.choices = check.strip("{}").split(",")
    elif "|" in option.value:
        option.choices = option.value.split("|")
    elif " in [" in check:
        option.notes.insert(0, check.split(" in ", 1)[1].replace(" - ", " to "))
    if group == "Positionals":
        option.value = f"{names}..." if many else names
        command.arguments.append(option)
    else:
        command.options.append(option)
