"""Compares the API with its frozen descriptor set and allows only additions.

The frozen set is proto/spillway_v1.txtpb, in protobuf's text form so that a
review shows what a change adds. Without arguments the check fails on a breaking
change, and on an addition that has not been frozen; --update freezes additions
and still refuses a breaking change.
"""

import argparse
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator

from google.protobuf import descriptor_pb2, text_format
from grpc_tools import protoc

ROOT = pathlib.Path(__file__).resolve().parent.parent
PROTO = ROOT / "proto"
FROZEN = PROTO / "spillway_v1.txtpb"

# Maps the path of an element ("spillway.v1.Policy field 3") to what a client's
# binary or source depends on.
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


def breaking_changes(frozen: Elements, current: Elements) -> list[str]:
    changes = []
    for element, shape in frozen.items():
        if element not in current:
            changes.append(f"removed: {element} {shape or ''}".rstrip())
        elif current[element] != shape:
            changes.append(f"changed: {element} from {shape} to {current[element]}")
    return changes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--update", action="store_true", help="freeze what was added")
    update = parser.parse_args().update

    api = compile_api()
    current = elements(api)
    frozen_set = descriptor_pb2.FileDescriptorSet()
    if FROZEN.exists():
        text_format.Parse(FROZEN.read_text(), frozen_set)
    frozen = elements(frozen_set)

    changes = breaking_changes(frozen, current)
    if changes:
        print(f"The API breaks clients of {FROZEN.relative_to(ROOT)}:", *changes, sep="\n  ")
        return 1
    added = sorted(current.keys() - frozen.keys())
    if update:
        FROZEN.write_text(text_format.MessageToString(api))
        print(f"Froze {len(added)} additions.")
        return 0
    if added:
        print("Not frozen yet; run scripts/check_proto.py --update:", *added, sep="\n  ")
        return 1
    print(f"The API matches its frozen descriptor: {len(current)} elements.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
