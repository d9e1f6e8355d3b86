"""Writes a program's completion for zsh."""

from __future__ import annotations

import re
import shlex

from command import Command, Option


def function(command: Command) -> str:
    return "_" + "_".join(command.path).replace("-", "_")


def told(text: str) -> str:
    """Escapes a description for _arguments, where brackets and colons have a meaning."""
    return re.sub(r"([\[\]:\\])", r"\\\1", text)


def action(option: Option) -> str:
    """The zsh action that completes an option's value."""
    return {
        "choices": f"({' '.join(option.choices)})",
        "files": "_files",
        "folders": "_files -/",
        "nothing": "",
    }[option.takes]


def entries(option: Option) -> list[str]:
    """Entries of _arguments, one for each name of the option."""
    value = f":{told(option.value.strip('<>'))}:{action(option)}" if option.value else ""
    other = f"({' '.join(option.names)})" if len(option.names) > 1 else ""
    return [shlex.quote(f"{other}{name}[{told(option.help)}]{value}") for name in option.names]


def body(command: Command, program: Command) -> list[str]:
    """The function of a command. It calls the functions of its subcommands."""
    options = [e for option in command.options for e in entries(option)]
    if command is not program:
        # The program's options are also allowed after a command.
        options += [
            e
            for option in program.options
            for e in entries(option)
            if option.names[-1] not in {o.names[-1] for o in command.options}
        ]
    arguments = [
        shlex.quote(f"{'*' if a.value.endswith('...') else ''}:{told(a.names[0])}:{action(a)}")
        for a in command.arguments
    ]
    lines = [f"{function(command)}() {{"]
    if not command.commands:
        return [*lines, "  _arguments -s \\", *listed([*options, *arguments]), "}"]
    lines += [
        "  local context state state_descr line",
        "  typeset -A opt_args",
        "  _arguments -C \\",
        *listed([*options, "'1: :->command'", "'*:: :->rest'"]),
        "  case $state in",
        "    command)",
        "      local -a commands=(",
        *(
            f"        {shlex.quote(each.path[-1] + ':' + told(each.summary))}"
            for each in command.commands
        ),
        "      )",
        "      _describe command commands ;;",
        "    rest)",
        "      case $line[1] in",
        *(f"        {each.path[-1]}) {function(each)} ;;" for each in command.commands),
        "      esac ;;",
        "  esac",
        "}",
    ]
    return lines


def listed(items: list[str]) -> list[str]:
    """The items as continued lines of one shell command."""
    return [f"    {item}{' ' + chr(92) if item is not items[-1] else ''}" for item in items]


def write(program: Command) -> str:
    """The completion file, for a folder of fpath."""
    lines = [f"#compdef {program.path[0]}", f"# Completion of {program.path[0]} for zsh."]
    for command in program.all():
        lines += body(command, program)
    name = function(program)
    # The file is either autoloaded as a function or sourced.
    lines += [
        f'if [[ $zsh_eval_context[-1] == loadautofunc ]]; then {name} "$@"; '
        f"else compdef {name} {program.path[0]}; fi"
    ]
    return "\n".join(lines) + "\n"
