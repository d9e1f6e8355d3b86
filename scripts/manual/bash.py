"""Writes a program's completion for bash."""

from __future__ import annotations

import shlex

from command import Command, Option


def words(command: Command, program: Command) -> str:
    """The words that may follow the command: its subcommands, its and the program's options."""
    names = [each.path[-1] for each in command.commands]
    names += [name for option in command.options for name in option.names]
    names += [name for option in program.options for name in option.names]
    return shlex.quote(" ".join(dict.fromkeys(names)))


def reply(option: Option) -> str:
    """The bash code that completes an option's value."""
    return {
        "choices": f'COMPREPLY=($(compgen -W {shlex.quote(" ".join(option.choices))} -- "$cur"))',
        "files": 'COMPREPLY=($(compgen -f -- "$cur"))',
        "folders": 'COMPREPLY=($(compgen -d -- "$cur"))',
        "nothing": "COMPREPLY=()",
    }[option.takes]


def write(program: Command) -> str:
    """The completion function. It needs only bash."""
    name = program.path[0]
    function = "_" + name.replace("-", "_")
    lines = [
        f"# Completion of {name} for bash.",
        f"{function}() {{",
        "  local cur=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]} at= i",
        "  COMPREPLY=()",
        "  # Which command the words before lead to.",
        "  for ((i = 1; i < COMP_CWORD; ++i)); do",
        '    case "$at ${COMP_WORDS[i]}" in',
    ]
    below = [command for command in program.all() if command is not program]
    for command in below:
        path = " ".join(command.path[1:])
        lines.append(f"      {shlex.quote(' ' + path)}) at={shlex.quote(' ' + path)} ;;")
    lines += ["    esac", "  done"]
    # Complete an option's value. The program's options are also allowed after a command.
    lines.append('  case "$at $before" in')
    for command in program.all():
        at = " " + " ".join(command.path[1:]) if command is not program else ""
        for option in command.options:
            if option.value:
                anywhere = "*" if command is program else shlex.quote(at)
                cases = "|".join(f"{anywhere}{shlex.quote(' ' + n)}" for n in option.names)
                lines.append(f"    {cases}) {reply(option)}; return ;;")
    lines += ["  esac", "  local words", '  case "$at" in']
    for command in below:
        path = " " + " ".join(command.path[1:])
        lines.append(f"    {shlex.quote(path)}) words={words(command, program)} ;;")
    lines += [
        f"    *) words={words(program, program)} ;;",
        "  esac",
        '  COMPREPLY=($(compgen -W "$words" -- "$cur"))',
    ]
    for command in below:
        kinds = {argument.takes for argument in command.arguments}
        for kind, flag in (("files", "-f"), ("folders", "-d")):
            if kind in kinds:
                path = shlex.quote(" " + " ".join(command.path[1:]))
                lines.append(f'  [[ $at == {path} ]] && COMPREPLY+=($(compgen {flag} -- "$cur"))')
    lines += ["  return 0", "}", f"complete -o filenames -F {function} {name}"]
    return "\n".join(lines) + "\n"
