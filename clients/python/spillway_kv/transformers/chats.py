"""Long-lived chats: saving a cache, loading it, and passing it to another process."""

from __future__ import annotations

import datetime
import re
import secrets
from collections.abc import Sequence as SequenceABC
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from spillway_kv.errors import SpillwayError
from spillway_kv.results import Model
from spillway_kv.sequence import Sequence
from spillway_kv.transformers.contents import Contents
from spillway_kv.transformers.identity import check_config
from spillway_kv.transformers.kept import from_sequences, kept_layers, to_sequence
from spillway_kv.transformers.rows import Row
from spillway_kv.transformers.texts import RowNote
from spillway_kv.transformers.turns import Turns

# The id of a call of `save`.
_CALL = re.compile(r"[0-9a-f]{16}")


class Chats:
    """Saves and loads what a cache holds, and passes it on. `SpillwayCache` documents the calls.

    `load` and `attach` fill a cache that is empty. `save` changes nothing, and `detach` leaves the
    cache empty. `attach` and `detach` refuse layers whose contents are not in the daemon.

    Args:
        contents: The contents of the cache.
        turns: The text of the cache.
    """

    def __init__(self, contents: Contents, turns: Turns) -> None:
        self._contents = contents
        self._turns = turns
        # For each folder, the last save of what layers keep in this process, and its rows.
        self._kept: dict[str, tuple[str, int]] = {}

    def save(self, folder: str | Path, timeout: float | None) -> None:
        """As `SpillwayCache.save`."""
        contents = self._contents
        contents.settle()
        store, texts = contents.shared.store, contents.texts
        store.suspend()
        if not store.rows:
            raise ValueError("the cache is empty: there is nothing to save")
        call = secrets.token_hex(8)
        weights = tuple(layer.find_weights() for layer in contents.attending)
        ids = texts.rows(len(store.rows))
        if ids is None:
            ids = torch.empty(len(store.rows), 0, dtype=torch.int64, device="cpu")
        for index, row in enumerate(store.rows):
            note = RowNote(
                save=call,
                row=index,
                row_count=len(store.rows),
                length=contents.length,
                padding=row.padding,
                turns=dict(texts.turns),
                ids=ids[index, : contents.length].cpu(),
                config=store.model.config_fields,
                weights=weights,
            )
            self._save_kept(folder, index, call, timeout)
            row.sequence.save(
                _row_folder(folder, index), client_data=note.to_bytes(), timeout=timeout
            )
        self._replace_kept(folder, call, len(store.rows))

    def _save_kept(self, folder: str | Path, row: int, call: str, timeout: float | None) -> None:
        """Saves what layers keep in this process, beside what was saved before."""
        if kept_layers(self._contents):
            sequence, text = to_sequence(self._contents, row)
            try:
                sequence.save(_kept_folder(folder, row, call), client_data=text, timeout=timeout)
            finally:
                sequence.delete()

    def _replace_kept(self, folder: str | Path, call: str, row_count: int) -> None:
        """Deletes what the save before has kept, if this cache knows of it."""
        if not kept_layers(self._contents):
            return
        before, count = self._kept.get(str(folder), ("", 0))
        self._kept[str(folder)] = (call, row_count)
        for row in range(count):
            with suppress(SpillwayError):
                self._contents.shared.store.client.delete_snapshot(
                    _kept_folder(folder, row, before)
                )

    def _load_kept(
        self, folder: str | Path, notes: list[RowNote], device: Any, timeout: float | None
    ) -> None:
        """Loads what layers keep in this process."""
        contents = self._contents
        if not kept_layers(contents):
            return
        if not _CALL.fullmatch(notes[0].save):
            raise ValueError(f"{folder} was not saved by SpillwayCache.save")
        client = contents.shared.store.client
        rows: list[tuple[Sequence, bytes]] = []
        try:
            for index, note in enumerate(notes):
                name = _kept_folder(folder, index, note.save)
                rows.append(client.load_sequence(name, timeout=timeout))
            from_sequences(contents, rows, device)
        finally:
            for sequence, _ in rows:
                sequence.delete()
        self._kept[str(folder)] = (notes[0].save, len(notes))

    def load(
        self,
        folder: str | Path,
        model: Model | None,
        ttl: datetime.timedelta | float | None,
        timeout: float | None,
        *,
        check_model: bool,
        device: torch.device | str | None,
    ) -> None:
        """As `SpillwayCache.load`. If this fails, the cache is empty."""
        try:
            notes = self._load_rows(folder, model, ttl, timeout, check_model=check_model)
            self._contents.adopt(notes[0].length, check_config=False)
            self._load_kept(folder, notes, device, timeout)
        except BaseException:
            self._contents.reset()
            raise
        if check_model:
            for layer, weights in zip(self._contents.attending, notes[0].weights, strict=False):
                layer.weights = weights
        texts = self._contents.texts
        texts.turns = dict(notes[0].turns)
        if len({len(note.ids) for note in notes}) == 1 and len(notes[0].ids):
            texts.note(torch.stack([note.ids for note in notes]))
        texts.cut(self._contents.length)

    def _load_rows(
        self,
        folder: str | Path,
        model: Model | None,
        ttl: datetime.timedelta | float | None,
        timeout: float | None,
        *,
        check_model: bool,
    ) -> list[RowNote]:
        """Loads the rows into the store. Returns what was saved with each."""
        store = self._contents.shared.store
        notes: list[RowNote] = []
        while not notes or len(notes) < notes[0].row_count:
            sequence, packed = store.client.load_sequence(
                _row_folder(folder, len(notes)),
                model="" if model is None else model,
                policy=store.policy,
                ttl=ttl,
                timeout=timeout,
            )
            store.rows.append(Row(sequence))
            note = RowNote.from_bytes(packed)
            _check_note(note, len(notes), notes[0] if notes else note, folder)
            if check_model and note.config is not None:
                check_config(note.config, store.model.config_fields)
            store.rows[-1].padding = note.padding
            notes.append(note)
        return notes

    def attach(
        self,
        sequences: SequenceABC[str | Sequence],
        paddings: SequenceABC[int] | None,
        tokens: torch.Tensor | None,
        *,
        keep: bool,
        check_model: bool,
    ) -> None:
        """As `SpillwayCache.attach`. If this fails, the sequences stay as they are."""
        if isinstance(sequences, str):
            raise ValueError("sequences is a list of names, one for each batch row")
        if paddings is not None and len(paddings) != len(sequences):
            raise ValueError(f"{len(paddings)} paddings for {len(sequences)} sequences")
        contents, store = self._contents, self._contents.shared.store
        contents.check_all_in_daemon()
        store.keeps = True
        handles = [
            store.client.get_sequence(one if isinstance(one, str) else one.name)
            for one in sequences
        ]
        pads = [0] * len(handles) if paddings is None else list(paddings)
        store.rows = [Row(handle, pad) for handle, pad in zip(handles, pads, strict=True)]
        lengths = [row.padding + row.sequence.token_count for row in store.rows]
        if len(set(lengths)) != 1:
            raise ValueError(f"the rows end at different positions: {lengths}")
        contents.adopt(lengths[0], check_config=check_model)
        for row in store.rows:
            if len(set(row.sequence.layer_token_counts)) > 1:
                row.sequence.truncate(row.sequence.token_count)
        store.keeps = keep
        if keep:
            for handle in handles:
                handle.keep()
        if tokens is not None:
            self._turns.note_tokens(tokens)
            contents.texts.cut(contents.length)

    def detach(self) -> tuple[str, ...]:
        """As `SpillwayCache.detach`."""
        contents, store = self._contents, self._contents.shared.store
        contents.settle()
        contents.check_all_in_daemon()
        store.suspend()
        names = tuple(row.sequence.keep().name for row in store.rows)
        store.abandon()
        store.rows = []
        contents.set_length(0)
        contents.begin_empty()
        return names


def _row_folder(folder: str | Path, row: int) -> str:
    if not str(folder):
        raise ValueError("the name of the folder is empty")
    return f"{folder}/row-{row}"


def _kept_folder(folder: str | Path, row: int, save: str) -> str:
    return f"{_row_folder(folder, row)}-kept-{save}"


def _check_note(note: RowNote, row: int, first: RowNote, folder: str | Path) -> None:
    """Raises ValueError if a row does not belong to the others."""
    if note.row != row or not 0 < note.row_count or note.padding > note.length:
        raise ValueError(f"{folder}/row-{row} was not saved as row {row}")
    if (note.save, note.row_count, note.length) != (first.save, first.row_count, first.length):
        raise ValueError(
            f"{folder}: row {row} is from another save than row 0: the save was interrupted; save "
            "again"
        )
