"""Writes the API as HTML pages: services, messages and enums with their comments."""

from __future__ import annotations

import re
import tempfile
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path

import jinja2
from google.protobuf import descriptor_pb2 as pb
from grpc_tools import protoc
from markupsafe import Markup, escape

HERE = Path(__file__).resolve().parent
PROTO = HERE.parents[1] / "proto"
PACKAGE = "spillway.v1"
# Matches what may become a link: a name in the API, such as Policy or Policy.epsilon.
NAME = re.compile(r"[A-Z]\w+(?:\.\w+)*")


@dataclass
class Entry:
    """A call, a field, or a value of an enum.

    Attributes:
        type: Text with names that may become links, such as repeated Tensor; for a call, its
            request and response.
    """

    name: str
    comment: str
    type: str = ""
    number: int | None = None


@dataclass
class Thing:
    """A service, a message or an enum; `kind` says which."""

    kind: str
    name: str
    comment: str
    entries: list[Entry] = field(default_factory=list)


@dataclass
class File:
    """A .proto file."""

    name: str
    things: list[Thing] = field(default_factory=list)


def read() -> list[File]:
    """The files of the API, with the comments in front of each name."""
    sources = sorted((PROTO / "spillway/v1").glob("*.proto"))
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch, "descriptors")
        code = protoc.main(
            [
                *("protoc", f"-I{PROTO}", f"-I{resources.files('grpc_tools') / '_proto'}"),
                *("--include_source_info", f"--descriptor_set_out={out}"),
                *map(str, sources),
            ]
        )
        if code != 0:
            raise RuntimeError(f"protoc ended with {code}")
        described = pb.FileDescriptorSet.FromString(out.read_bytes())
    return [_file(one) for one in described.file]


def _file(described: pb.FileDescriptorProto) -> File:
    comments = {
        tuple(place.path): place.leading_comments.strip() or place.trailing_comments.strip()
        for place in described.source_code_info.location
    }
    made = File(Path(described.name).stem)
    # The numbers are field numbers of FileDescriptorProto, DescriptorProto and so on.
    for i, service in enumerate(described.service):
        entries = [
            Entry(call.name, comments.get((6, i, 2, j), ""), _signature(call))
            for j, call in enumerate(service.method)
        ]
        made.things.append(Thing("service", service.name, comments.get((6, i), ""), entries))
    for i, message in enumerate(described.message_type):
        made.things += _message(message, message.name, (4, i), comments)
    for i, enum in enumerate(described.enum_type):
        made.things.append(_enum(enum, enum.name, (5, i), comments))
    return made


def _message(
    message: pb.DescriptorProto, name: str, path: tuple[int, ...], comments: dict[tuple, str]
) -> list[Thing]:
    """The message and its nested messages."""
    thing = Thing("message", name, comments.get(path, ""))
    for i, one in enumerate(message.field):
        kind = _short(one.type_name) or pb.FieldDescriptorProto.Type.Name(one.type)[5:].lower()
        if one.label == pb.FieldDescriptorProto.LABEL_REPEATED:
            kind = f"repeated {kind}"
        elif one.proto3_optional:
            kind = f"optional {kind}"
        elif one.HasField("oneof_index"):
            kind = f"{kind}, one of {message.oneof_decl[one.oneof_index].name}"
        comment = comments.get((*path, 2, i), "")
        thing.entries.append(Entry(one.name, comment, kind, one.number))
    found = [thing]
    for i, inner in enumerate(message.nested_type):
        found += _message(inner, f"{name}.{inner.name}", (*path, 3, i), comments)
    for i, enum in enumerate(message.enum_type):
        found.append(_enum(enum, f"{name}.{enum.name}", (*path, 4, i), comments))
    return found


def _enum(
    enum: pb.EnumDescriptorProto, name: str, path: tuple[int, ...], comments: dict[tuple, str]
) -> Thing:
    entries = [
        Entry(value.name, comments.get((*path, 2, i), ""), number=value.number)
        for i, value in enumerate(enum.value)
    ]
    return Thing("enum", name, comments.get(path, ""), entries)


def _short(name: str) -> str:
    """A type's name without the API's package."""
    return name.lstrip(".").removeprefix(f"{PACKAGE}.")


def _signature(call: pb.MethodDescriptorProto) -> str:
    taken = "stream " * call.client_streaming + _short(call.input_type)
    given = "stream " * call.server_streaming + _short(call.output_type)
    return f"({taken}) returns ({given})"


class Links:
    """Turns text into HTML in which names of the API link to their descriptions."""

    def __init__(self, files: list[File]) -> None:
        self._places = {}
        for file in files:
            for thing in file.things:
                names = [thing.name, *(f"{thing.name}.{e.name}" for e in thing.entries)]
                self._places.update({name: f"{file.name}.html#{name}" for name in names})

    def line(self, text: str) -> Markup:
        """One line of text, with links."""
        made = []
        end = 0
        for found in NAME.finditer(text):
            if found[0] in self._places:
                made.append(escape(text[end : found.start()]))
                link = '<a href="{}">{}</a>'
                made.append(Markup(link).format(self._places[found[0]], found[0]))
                end = found.end()
        return Markup("").join([*made, escape(text[end:])])

    def paragraphs(self, text: str) -> Markup:
        """A comment. Empty lines separate its paragraphs."""
        parts = [" ".join(part.split()) for part in re.split(r"\n\s*\n", text) if part.strip()]
        return Markup("").join(Markup("<p>{}</p>").format(self.line(part)) for part in parts)


def _template(name: str, files: list[File]) -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    links = Links(files)
    environment.filters.update(line=links.line, paragraphs=links.paragraphs)
    return environment.get_template(name)


def write(files: list[File], folder: Path) -> None:
    """Writes a page for each file."""
    folder.mkdir(parents=True)
    template = _template("api.html", files)
    for file in files:
        (folder / f"{file.name}.html").write_text(template.render(file=file, package=PACKAGE))


def index(files: list[File], modules: list[str]) -> str:
    """The page with links to all others."""
    return _template("index.html", files).render(files=files, modules=modules)
