"""How the engine stores rows."""

from __future__ import annotations

from typing import Literal

from spillway_kv._proto import model_service_pb2

RowType = Literal["model", "int8"]

_NUMBERS: dict[str, int] = {
    "model": model_service_pb2.ROW_TYPE_MODEL,
    "int8": model_service_pb2.ROW_TYPE_INT8,
}
_NAMES = {number: name for name, number in _NUMBERS.items()}


def row_type_number(name: RowType) -> int:
    """Returns the number of a row type in messages.

    Raises:
        ValueError: There is no such row type.
    """
    if name not in _NUMBERS:
        raise ValueError(f"row_type {name!r} is not one of {sorted(_NUMBERS)}")
    return _NUMBERS[name]


def row_type_name(number: int) -> RowType:
    """Returns the name of a number in a message. Daemons that do not know row types send none."""
    return _NAMES.get(number, "model")  # type: ignore[return-value]


def row_bytes(head_dim: int, element_bytes: int, row_type: RowType) -> int:
    """Returns the bytes of a row, K and V of one token and KV head, as it is stored.

    Args:
        head_dim: Elements of a key.
        element_bytes: Bytes of an element in the model's dtype.
        row_type: How rows are stored.

    Raises:
        ValueError: There is no such row type.
    """
    if row_type_number(row_type) == model_service_pb2.ROW_TYPE_MODEL:
        return 2 * head_dim * element_bytes
    high_parts = 4 + (12 if head_dim < 32 else 26)
    return -(-(2 * head_dim + 4 + 2 * high_parts) // 64) * 64
