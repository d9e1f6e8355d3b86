"""Records in a file of JSON lines, which is appended to. An interrupted run continues from it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Record = dict[str, Any]


class Records:
    """The records of a file, by key. A later one with the same key replaces an earlier one."""

    def __init__(self, path: Path) -> None:
        """Reads a file, if it exists. A last line that was cut off is removed.

        Raises:
            ValueError: A line is not a JSON object with a key.
        """
        self._path = path
        self._by_key: dict[str, Record] = {}
        whole = path.read_bytes() if path.exists() else b""
        end = whole.rfind(b"\n") + 1
        if end < len(whole):
            with path.open("r+b") as file:
                file.truncate(end)
        for number, line in enumerate(whole[:end].splitlines(), 1):
            try:
                record = json.loads(line)
                self._by_key[record["key"]] = record
            except (ValueError, KeyError, TypeError):
                raise ValueError(f"{path}, line {number}, is not a record") from None

    def get(self, key: str) -> Record | None:
        """Returns the record of a key, or None."""
        return self._by_key.get(key)

    def add(self, key: str, told: Mapping[str, Any]) -> None:
        """Appends a record: the key, and what is told."""
        record = {"key": key, **told}
        with self._path.open("a") as file:
            file.write(json.dumps(record) + "\n")
        self._by_key[key] = record
