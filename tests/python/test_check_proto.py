"""The check that notices every change of the API."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pb2, text_format

ROOT = Path(__file__).resolve().parents[2]

BEFORE = """
file {
  package: "spillway.v1"
  message_type {
    name: "Step"
    field { name: "chunk" number: 1 type: TYPE_BYTES label: LABEL_OPTIONAL }
    field { name: "layer" number: 2 type: TYPE_INT32 label: LABEL_OPTIONAL }
  }
  message_type { name: "Old" field { name: "x" number: 1 type: TYPE_INT32 label: LABEL_OPTIONAL } }
  enum_type { name: "Kind" value { name: "KIND_UNSPECIFIED" number: 0 } }
  service { name: "S" method { name: "Run" input_type: "Step" output_type: "Step" } }
}
"""


@pytest.fixture(scope="module")
def check_proto() -> Any:
    """The script, loaded as a module."""
    pytest.importorskip("grpc_tools")
    spec = importlib.util.spec_from_file_location("check_proto", ROOT / "scripts/check_proto.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def names(check_proto: Any, *edits: tuple[str, str]) -> set[str]:
    """The names that the changelog must have after the edits."""
    after = BEFORE
    for old, new in edits:
        assert after.count(old) == 1
        after = after.replace(old, new)
    apis = [
        check_proto.elements(text_format.Parse(text, descriptor_pb2.FileDescriptorSet()))
        for text in (BEFORE, after)
    ]
    return {name for change in check_proto.changes(*apis) for name in change.names}


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("number: 1 type: TYPE_BYTES", "number: 3 type: TYPE_BYTES", {"Step.chunk"}),
        ("number: 1 type: TYPE_BYTES", "number: 1 type: TYPE_STRING", {"Step.chunk"}),
        ('name: "chunk"', 'name: "append"', {"Step.chunk", "Step.append"}),
        ('name: "Old"', 'name: "New"', {"Old", "New"}),
        (
            '"KIND_UNSPECIFIED" number: 0 }',
            '"KIND_UNSPECIFIED" number: 0 } value { name: "KIND_A" number: 1 }',
            {"KIND_A"},
        ),
        ('output_type: "Step"', 'output_type: "Old"', {"S.Run"}),
        ('name: "Run"', 'name: "Go"', {"S.Run", "S.Go"}),
    ],
)
def test_a_change_is_to_be_named(check_proto: Any, old: str, new: str, named: set[str]) -> None:
    assert names(check_proto, (old, new)) == named


def test_the_same_api_has_nothing_to_name(check_proto: Any) -> None:
    assert names(check_proto) == set()


def test_names_count_in_the_section_unreleased_alone(check_proto: Any) -> None:
    change = check_proto.Change("", frozenset({"Step.chunk", "KIND_A"}))
    text = "# Changelog\n\n## Unreleased\n\n- `Step.chunk` is gone.\n\n## 0.1.0\n\n- `KIND_A`\n"
    assert check_proto.unnamed([change], text) == ["KIND_A"]
    assert check_proto.unnamed([change], "# Changelog\n") == ["KIND_A", "Step.chunk"]
    both = text.replace("is gone", "is gone, `KIND_A` new")
    assert check_proto.unnamed([change], both) == []
