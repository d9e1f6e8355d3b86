"""Writes a program's man page."""

from __future__ import annotations

from command import Command, Option


def escaped(text: str) -> str:
    """The text, escaped so that roff prints it unchanged."""
    text = text.replace("\\", "\\e").replace("-", "\\-")
    return f"\\&{text}" if text.startswith((".", "'")) else text


def described(option: Option) -> list[str]:
    """The entry of an option: its names and value, then what it does."""
    names = ", ".join(f"\\fB{escaped(name)}\\fR" for name in option.names)
    value = f" \\fI{escaped(option.value)}\\fR" if option.value else ""
    notes = f" ({'; '.join(option.notes)})" if option.notes else ""
    if option.choices and "|" not in option.value:
        notes = f": {', '.join(option.choices)}{notes}"
    return [".TP", names + value, escaped(f"{option.help}{notes}".strip() or "see above")]


def options_of(command: Command, heading: str) -> list[str]:
    """The options by group. The heading of each group begins with `heading`."""
    lines = []
    group = "Options"
    for option in command.options:
        if option.names[-1] == "--help" and len(command.path) > 1:
            continue
        if option.group != group:
            group = option.group
            lines += [heading, escaped(f"{group}:")]
        lines += described(option)
    return lines


def write(program: Command, section: str, version: str) -> str:
    """The man page. Commands and their options are sections of it."""
    name = program.path[0]
    summary = program.summary.split(". ")[0].rstrip(".")
    lines = [
        f'.TH {name.upper()} {section} "" "Spillway {version}"',
        ".SH NAME",
        f"{escaped(name)} \\- {escaped(summary)}",
        ".SH SYNOPSIS",
        f"\\fB{escaped(name)}\\fR {escaped(program.usage)}",
        ".SH DESCRIPTION",
        escaped(program.summary),
        ".SH OPTIONS",
        *options_of(program, ".PP"),
    ]
    if program.commands:
        lines.append(".SH COMMANDS")
    for command in program.all():
        if command is program:
            continue
        lines.append(f".SS {escaped(' '.join(command.path))} {escaped(command.usage)}".rstrip())
        lines += [escaped(command.summary)]
        for argument in command.arguments:
            lines += [".TP", f"\\fI{escaped(argument.value)}\\fR", escaped(argument.help)]
        lines += options_of(command, ".PP")
        if command.footer and command.footer != program.footer:
            lines += [".PP", *map(escaped, command.footer.splitlines())]
    if program.footer:
        lines += [".SH NOTES", *map(escaped, program.footer.splitlines())]
    return "\n".join(lines) + "\n"
