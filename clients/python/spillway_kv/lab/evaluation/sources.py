"""Questions about Python sources, whose answers are taken from their syntax trees.

The text consists of files of Python's standard library, each after a line with its name.
`spillway-lab eval sources` writes it. A question is asked only if the context has its answer once,
and the function or constant in the question once.
"""

from __future__ import annotations

import ast
import random
import re
import sysconfig
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from spillway_kv.lab.evaluation.tasks import Maker, Question, Task

# Files of such sizes that a context of a few thousand tokens has a good part of one.
FILES = (
    "argparse asynchat asyncore base64 bdb bz2 calendar cgi cgitb chunk cmd code codecs codeop "
    "colorsys compileall configparser contextlib copy csv difflib dis filecmp fileinput fnmatch "
    "fractions ftplib functools getopt gettext glob graphlib gzip heapq hmac imaplib ipaddress "
    "linecache mailbox mimetypes modulefinder netrc nntplib numbers optparse pathlib pickle "
    "pipes pkgutil plistlib poplib pprint profile pstats py_compile pyclbr queue quopri random "
    "reprlib rlcompleter runpy sched selectors shelve shlex shutil smtplib socketserver "
    "statistics string sunau symtable tabnanny tarfile telnetlib tempfile textwrap timeit "
    "tokenize trace tracemalloc urllib/robotparser uuid warnings wave weakref webbrowser xdrlib "
    "zipapp zipfile zipimport"
).split()
# Longer files are cut after a statement.
FILE_BYTE_COUNT_MAX = 32768
_NAMED = re.compile(r"^#### File: (\S+) ####\n", re.MULTILINE)
_BEFORE = (
    "Here are files of Python's standard library. Read them; a question about them follows.\n\n"
)
# Messages and docstrings that may be asked for: short, and without quotes.
_TEXT = re.compile(r"[\w ,.:;()=<>/-]{8,60}")
# Most tokens of an answer, far more than any correct answer needs.
_NEW_TOKEN_COUNT = 32


@dataclass(frozen=True)
class Fact:
    """A fact in a file, and the question about it.

    Attributes:
        kind: Kind of fact.
        subject: Subject of the question. It is asked only if there is one fact with this subject.
        text: The question.
        start: Start of the answer, up to its first quote.
        answer: The answer as it is written in the file.
    """

    kind: str
    subject: str
    text: str
    start: str
    answer: str


@dataclass(frozen=True)
class Piece:
    """A statement of a file, at its top level or in the body of a class.

    Attributes:
        file: Name of the file.
        text: Text of the statement, with everything between it and the previous one.
        facts: Facts in the statement.
    """

    file: str
    text: str
    facts: tuple[Fact, ...]


def write(output: Path, folder: Path | None = None) -> list[str]:
    """Writes the text of the files in a folder, by default those of this Python.

    Returns:
        Names of the files in the text.

    Raises:
        FileNotFoundError: The folder has none of the files.
    """
    folder = folder or Path(sysconfig.get_path("stdlib"))
    texts = {}
    for name in FILES:
        path = folder / f"{name}.py"
        # Other versions of Python may not have all of them.
        if path.exists():
            texts[f"{name}.py"] = _bounded(path.read_text())
    if not texts:
        raise FileNotFoundError(f"{folder} holds no file such as {FILES[0]}.py")
    output.write_text("".join(f"{named(name)}{text}" for name, text in texts.items()))
    return list(texts)


def named(file: str) -> str:
    """Returns the line before a file."""
    return f"#### File: {file} ####\n"


def is_sources(text: str) -> bool:
    """Whether a text consists of files with lines that name them."""
    return _NAMED.match(text) is not None


def read(text: str) -> list[Piece]:
    """Returns the pieces of a text of files, in order."""
    parts = _NAMED.split(text)[1:]
    pieces: list[Piece] = []
    for file, source in zip(parts[::2], parts[1::2], strict=True):
        pieces += _pieces(file, source)
    return pieces


def questions_about(count: int) -> Maker:
    """Returns a maker of tasks with at most `count` questions."""

    def make(rng: random.Random, pieces: Sequence[Piece], size: int) -> Task:
        held = pieces[:size]
        context = _BEFORE + "".join(_told(held))
        asked = [_question(fact) for fact in _drawn(rng, _askable(held, context), count)]
        return Task(context, tuple(asked))

    return make


def _bounded(source: str) -> str:
    """Returns the first statements of a source, up to the size limit, with a newline at the end."""
    lines = source.splitlines(keepends=True)
    for end in reversed(_ends(ast.parse(source))):
        text = "".join(lines[:end])
        if len(text.encode()) <= FILE_BYTE_COUNT_MAX:
            return text if text.endswith("\n") else f"{text}\n"
    return ""


def _ends(tree: ast.Module) -> list[int]:
    """Returns the lines after which a source may be cut: the ends of statements."""
    ends = set()
    for statement in tree.body:
        inner = statement.body if isinstance(statement, ast.ClassDef) else [statement]
        ends |= {inside.end_lineno or 0 for inside in inner}
    return sorted(ends)


def _pieces(file: str, source: str) -> Iterator[Piece]:
    tree, lines = ast.parse(source), source.splitlines(keepends=True)
    facts = [(line, fact) for line, fact in _facts(file, tree, source)]
    first = 0
    for end in _ends(tree):
        here = tuple(fact for line, fact in facts if first < line <= end)
        yield Piece(file, "".join(lines[first:end]), here)
        first = end


def _told(pieces: Sequence[Piece]) -> Iterator[str]:
    """Yields the text of the pieces, with the name of each file before its first piece."""
    file = ""
    for piece in pieces:
        if piece.file != file:
            file = piece.file
            yield named(file)
        yield piece.text


def _facts(file: str, tree: ast.Module, source: str) -> Iterator[tuple[int, Fact]]:
    """Yields facts, each with the line where its statement begins."""
    for statement in tree.body:
        if isinstance(statement, ast.ClassDef):
            for inside in statement.body:
                yield from _facts_of(file, inside, source, f"{statement.name}.")
        else:
            yield from _facts_of(file, statement, source, "")


def _facts_of(
    file: str, statement: ast.stmt, source: str, owner: str
) -> Iterator[tuple[int, Fact]]:
    if isinstance(statement, ast.FunctionDef):
        for fact in _of_function(file, statement, source, owner):
            yield statement.lineno, fact
    elif isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        target, answer = statement.targets[0], _literal(statement.value, source)
        if isinstance(target, ast.Name) and answer is not None:
            name = f"{owner}{target.id}"
            text = f"In {file}, which value is assigned to `{name}`?"
            yield statement.lineno, Fact("value", name, text, f"The value of `{name}` is `", answer)


def _of_function(file: str, function: ast.FunctionDef, source: str, owner: str) -> Iterator[Fact]:
    name, arguments = f"{owner}{function.name}", function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    pairs = [
        *zip(reversed(positional), reversed(arguments.defaults), strict=False),
        *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True),
    ]
    for argument, value in pairs:
        answer = None if value is None else _literal(value, source)
        if answer is not None:
            what = f"the default value of the parameter `{argument.arg}` of `{name}`"
            subject = f"{name}({argument.arg})"
            start = f"The default value of `{argument.arg}` of `{name}` is `"
            yield Fact("default", subject, f"In {file}, what is {what}?", start, answer)
    names = [argument.arg for argument in positional]
    own = names[:1] if owner and names[:1] in (["self"], ["cls"]) else []
    names = names[len(own) :]
    plain = not (pairs or arguments.vararg or arguments.kwarg or arguments.kwonlyargs)
    if plain and 2 <= len(names) <= 5:
        after = f" after `{own[0]}`" if own else ""
        text = f"In {file}, which parameters does `{name}` take{after}?"
        yield Fact(
            "parameters",
            f"{name}()",
            text,
            f"The parameters of `{name}`{after} are `",
            ", ".join(names),
        )
    yield from _of_raises(file, name, function)
    returned = [node.value for node in ast.walk(function) if isinstance(node, ast.Return)]
    answer = _literal(returned[0], source) if len(returned) == 1 and returned[0] else None
    if answer is not None:
        text = f"In {file}, which value does `{name}` return?"
        yield Fact("return", f"{name}->", text, f"`{name}` returns `", answer)
    line = (ast.get_docstring(function) or "").partition("\n")[0].strip()
    if _TEXT.fullmatch(line):
        text = f"In {file}, what is the first line of the docstring of `{name}`?"
        yield Fact(
            "docstring",
            f"{name}.__doc__",
            text,
            f"The docstring of `{name}` begins with the line `",
            line,
        )


def _of_raises(file: str, name: str, function: ast.FunctionDef) -> Iterator[Fact]:
    raised = [node.exc for node in ast.walk(function) if isinstance(node, ast.Raise)]
    calls = [exc for exc in raised if isinstance(exc, ast.Call)]
    kinds = Counter(ast.unparse(call.func) for call in calls)
    for call in calls:
        kind = ast.unparse(call.func)
        message = _text(call.args)
        if message is not None:
            if kinds[kind] == 1:
                text = f"In {file}, with which message does `{name}` raise `{kind}`?"
                yield Fact(
                    "message",
                    f"{name}!{kind}",
                    text,
                    f"The message of `{kind}` in `{name}` is `",
                    message,
                )
            text = f"In {file}, which exception does `{name}` raise with the message {message!r}?"
            yield Fact(
                "exception", f"{name}!{message}", text, f"The exception of `{name}` is `", kind
            )
    only = raised[0] if len(raised) == 1 else None
    kind = ast.unparse(only.func if isinstance(only, ast.Call) else only) if only else ""
    # Only if it is a class and not a variable.
    if re.fullmatch(r"([a-z]\w*\.)?[A-Z]\w*", kind):
        text = f"In {file}, which exception does `{name}` raise?"
        yield Fact("exception", f"{name}!", text, f"The exception of `{name}` is `", kind)


def _text(arguments: Sequence[ast.expr]) -> str | None:
    """Returns the text if it is the only argument of a call."""
    if len(arguments) == 1 and isinstance(arguments[0], ast.Constant):
        value = arguments[0].value
        return value if isinstance(value, str) and _TEXT.fullmatch(value) else None
    return None


def _literal(value: ast.expr, source: str) -> str | None:
    """Returns a number or a short string as in the source. None if it could be guessed."""
    if isinstance(value, ast.UnaryOp) and isinstance(value.operand, ast.Constant):
        inner = value.operand.value
    elif isinstance(value, ast.Constant):
        inner = value.value
    else:
        return None
    if isinstance(inner, bool) or not isinstance(inner, (int, float, str)):
        return None
    if isinstance(inner, str) and not re.fullmatch(r"[\w ,.:/%+-]{2,40}", inner):
        return None
    if isinstance(inner, str):
        return inner
    return ast.get_source_segment(source, value)


def _askable(pieces: Sequence[Piece], context: str) -> list[Fact]:
    """Returns facts whose subject occurs once in the pieces and whose answer once in context."""
    facts = [(piece.file, fact) for piece in pieces for fact in piece.facts]
    subjects = Counter((file, fact.subject) for file, fact in facts)
    return [
        fact
        for file, fact in facts
        if subjects[file, fact.subject] == 1 and _has_once(context, fact.answer)
    ]


def _has_once(context: str, answer: str) -> bool:
    """Whether an answer occurs once in a text, not counting parts of words or numbers."""
    found, at = 0, context.find(answer)
    while at >= 0 and found < 2:
        before, after = context[at - 1], context[at + len(answer) : at + len(answer) + 1]
        found += not (before.isalnum() or before in "_." or after.isalnum() or after == "_")
        at = context.find(answer, at + 1)
    return found == 1


def _drawn(rng: random.Random, facts: Sequence[Fact], count: int) -> list[Fact]:
    """Draws up to `count` facts with different answers, evenly by kind, in the given order."""
    by_kind: dict[str, list[Fact]] = {}
    for fact in rng.sample(facts, len(facts)):
        by_kind.setdefault(fact.kind, []).append(fact)
    # The first fact of each kind, then the second of each kind, and so on.
    ranked = [
        (place, number, fact)
        for number, several in enumerate(by_kind.values())
        for place, fact in enumerate(several)
    ]
    chosen: dict[str, Fact] = {}
    for _, _, fact in sorted(ranked, key=lambda entry: entry[:2]):
        if len(chosen) < count:
            chosen.setdefault(fact.answer, fact)
    return [fact for fact in facts if chosen.get(fact.answer) is fact]


def _question(fact: Fact) -> Question:
    return Question(
        f"\n\n{fact.text}",
        fact.start,
        (fact.answer,),
        _NEW_TOKEN_COUNT,
        quoted=True,
    )
