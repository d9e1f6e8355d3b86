"""Compares the API with its frozen descriptor set, so that no change is made unnoticed.

The frozen set is proto/spillway_v1.txtpb, in protobuf's text format, so that reviewers see what a
change does. Without arguments, the check prints the differences, and fails if there are any.
--update freezes the current API. Before this, the section "Unreleased" of CHANGELOG.md must name
every message, field, enum, value, service and call that was added, changed or removed, such as
`DecodeStep.parts`.
"""

import argparse
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import NamedTuple

from google.protobuf import descriptor_pb2, text_format
from grpc_tools import protoc

ROOT = pathlib.Path(__file__).resolve().parent.parent
PROTO = ROOT / "proto"
FROZEN = PROTO / "spillway_v1.txtpb"
CHANGELOG = ROOT / "CHANGELOG.md"

# Maps the path of an element to its properties on which the binary or source of a client depends.
Elements = dict[str, tuple[object, ...]]


def compile_api() -> descriptor_pb2.FileDescriptorSet:
    """Returns the descriptors of our own files, without their imports."""
    sources = sorted(str(p.relative_to(PROTO)) for p in (PROTO / "spillway").rglob("*.proto"))
    well_known = pathlib.Path(protoc.__file__).parent / "_proto"
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder) / "api.binpb"
        arguments = [f"-I{PROTO}", f"-I{well_known}", f"--descriptor_set_out={out}", *sources]
        subprocess.run([sys.executable, "-m", "grpc_tools.protoc", *arguments], check=True)
        return descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes())


def message_elements(
    scope: str, message: descriptor_pb2.DescriptorProto
) -> Iterator[tuple[str, tuple[object, ...]]]:
    name = f"{scope}.{message.name}"
    yield f"message {name}", ()
    for field in message.field:
        oneof = ""
        if field.HasField("oneof_index"):
            oneof = message.oneof_decl[field.oneof_index].name
        yield (
            f"field {name} = {field.number}",
            (field.name, field.type, field.label, field.type_name, oneof),
        )
    for enum in message.enum_type:
        yield from enum_elements(name, enum)
    for nested in message.nested_type:
        yield from message_elements(name, nested)


def enum_elements(
    scope: str, enum: descriptor_pb2.EnumDescriptorProto
) -> Iterator[tuple[str, tuple[object, ...]]]:
    name = f"{scope}.{enum.name}"
    yield f"enum {name}", ()
    for value in enum.value:
        yield f"value {name} = {value.number}", (value.name,)


def elements(files: descriptor_pb2.FileDescriptorSet) -> Elements:
    found: Elements = {}
    for file in files.file:
        for message in file.message_type:
            found.update(message_elements(file.package, message))
        for enum in file.enum_type:
            found.update(enum_elements(file.package, enum))
        for service in file.service:
            name = f"{file.package}.{service.name}"
            found[f"service {name}"] = ()
            for method in service.method:
                found[f"rpc {name}/{method.name}"] = (
                    method.input_type,
                    method.client_streaming,
                    method.output_type,
                    method.server_streaming,
                )
    return found


class Change(NamedTuple):
    """A difference between two APIs.

    Attributes:
        text: Describes the change for people.
        names: The names that the changelog must have.
    """

    text: str
    names: frozenset[str]


def short_name(element: str, shape: tuple[object, ...]) -> str:
    """`DecodeStep.parts` for the element "field spillway.v1.DecodeStep = 1"."""
    kind, name = element.split(" = ")[0].split(" ")
    name = re.sub(r"^spillway\.v\d+\.", "", name)
    if kind == "field":
        return f"{name}.{shape[0]}"
    if kind == "value":
        return str(shape[0])
    return name.replace("/", ".")


def within(element: str) -> str:
    """The message, enum or service that has a field, value or call; "" for other elements."""
    holders = {"field": "message", "value": "enum", "rpc": "service"}
    kind, name = element.split(" = ")[0].split(" ")
    return f"{holders[kind]} {name.split('/')[0]}" if kind in holders else ""


def changes(frozen: Elements, current: Elements) -> list[Change]:
    """What was removed, changed and added, in this order.

    If a whole message, enum or service was added or removed, its members need no names.
    """
    found = []
    for element, shape in frozen.items():
        if element not in current:
            names = {short_name(element, shape)} if within(element) in {"", *current} else set()
            found.append(Change(f"removed: {element} {shape or ''}".rstrip(), frozenset(names)))
    for element, shape in frozen.items():
        if element in current and current[element] != shape:
            names = {short_name(element, shape), short_name(element, current[element])}
            text = f"changed: {element} from {shape} to {current[element]}"
            found.append(Change(text, frozenset(names)))
    for element, shape in current.items():
        if element not in frozen:
            names = {short_name(element, shape)} if within(element) in {"", *frozen} else set()
            found.append(Change(f"added: {element} {shape or ''}".rstrip(), frozenset(names)))
    return found


def unnamed(found: list[Change], changelog: str) -> list[str]:
    """The names that are missing in the section "Unreleased" of a changelog, sorted."""
    section = re.search(r"^## \[?Unreleased\]?\n(.*?)(?=^## |\Z)", changelog, re.M | re.S)
    said = set(re.findall(r"`([^`]+)`", section[1])) if section else set()
    return sorted({name for change in found for name in change.names} - said)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--update", action="store_true", help="freeze the API as it is")
    update = parser.parse_args().update

    api = compile_api()
    current = elements(api)
    frozen = descriptor_pb2.FileDescriptorSet()
    if FROZEN.exists():
        text_format.Parse(FROZEN.read_text(), frozen)
    found = changes(elements(frozen), current)
    if not found:
        print(f"The API matches its frozen descriptor: {len(current)} elements.")
        return 0
    print(f"The API differs from {FROZEN.relative_to(ROOT)}:", *(c.text for c in found), sep="\n  ")
    missing = unnamed(found, CHANGELOG.read_text())
    if missing:
        print(f"{CHANGELOG.name}, section Unreleased, does not name:", *missing, sep="\n  ")
        return 1
    if not update:
        print("Not frozen yet: run scripts/check_proto.py --update")
        return 1
    FROZEN.write_text(text_format.MessageToString(api))
    print(f"Froze {len(found)} changes.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
