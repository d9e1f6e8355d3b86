"""Long-lived chats: saving a cache, loading it, and passing it to another process."""

from __future__ import annotations

import datetime
import secrets
from collections.abc import Sequence as SequenceABC
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch

from spillway_kv.client import Client
from spillway_kv.policy import Policy
from spillway_kv.results import Model
from spillway_kv.sequence import Sequence
from spillway_kv.transformers.identity import check_config
from spillway_kv.transformers.rows import Row
from spillway_kv.transformers.support import UnsupportedModelError
from spillway_kv.transformers.texts import RowNote
from spillway_kv.transformers.turns import Turns

Self = TypeVar("Self", bound="Chats")


class Chats(Turns):
    """Saves, loads, attaches and detaches a `SpillwayCache`."""

    def __init__(self, config: Any, client: Client, **options: Any) -> None:
        raise NotImplementedError

    def _set_length(self, length: int) -> None:
        raise NotImplementedError

    def _begin_empty(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """As in `SpillwayCache`."""
        raise NotImplementedError

    def save(self, folder: str | Path, *, timeout: float | None = None) -> None:
        """Saves K/V, tokens and turns, for `load`.

        If the cache is saved again to the same folder, only what is new is written. Each batch
        row has its own snapshot, folder/row-0 and so on (`Sequence.save`). If saving a batch is
        interrupted between rows, it must be repeated before the batch can be loaded.

        Args:
            folder: With a daemon: a name below its setting `snapshots.folder`. With an embedded
                engine: any path.
            timeout: Seconds for each row. None means no limit.

        Raises:
            ValueError: The cache is empty, or has more tokens than can be saved.
            SpillwayError: As for `Sequence.save`.
        """
        self._settle()
        self._check_all_in_daemon()
        store = self._shared.store
        store.suspend()
        if not store.rows:
            raise ValueError("the cache is empty: there is nothing to save")
        call = secrets.token_hex(8)
        weights = tuple(layer.find_weights() for layer in self.layers)
        ids = self._texts.rows(len(store.rows))
        if ids is None:
            ids = torch.empty(len(store.rows), 0, dtype=torch.int64, device="cpu")
        for index, row in enumerate(store.rows):
            note = RowNote(
                save=call,
                row=index,
                row_count=len(store.rows),
                length=self.length,
                padding=row.padding,
                turns=dict(self._texts.turns),
                ids=ids[index, : self.length].cpu(),
                config=store.config_fields,
                weights=weights,
            )
            row.sequence.save(
                _row_folder(folder, index), client_data=note.to_bytes(), timeout=timeout
            )

    @classmethod
    def load(
        cls: type[Self],
        folder: str | Path,
        config: Any,
        client: Client,
        *,
        policy: Policy | None = None,
        quality: str | None = None,
        model: Model | None = None,
        ttl: datetime.timedelta | float | None = None,
        timeout: float | None = None,
        check_model: bool = True,
        **options: Any,
    ) -> Self:
        """Creates a cache from the files that `save` has written, in any process, with any engine.

        Args:
            folder: The folder that was given to `save`.
            config: The model's config.
            client: Connection to the daemon. It must outlive the cache.
            policy: Overrides the saved policy, field by field.
            quality: The policy in one word, as for `SpillwayCache`.
            model: The daemon's model. None means the saved one, which is created if it does not
                exist (`Client.load_sequence`).
            ttl: Idle time of the sequences. None means the saved one.
            timeout: Seconds for each row. None means no limit.
            check_model: Whether the model must be the one that computed the K/V, as far as its
                config tells. The first forward pass also compares a sample of its weights.
            **options: As for `SpillwayCache`.

        Raises:
            ModelMismatchError: The config differs. The error names the fields.
            ValueError: The model has other shapes, or the rows come from different saves.
            SpillwayError: As for `Client.load_sequence`.
        """
        made = cls(config, client, policy=policy, quality=quality, model=model, ttl=ttl, **options)
        made._check_all_in_daemon()
        rows = made._shared.store.rows
        notes: list[RowNote] = []
        try:
            while not notes or len(notes) < notes[0].row_count:
                sequence, packed = client.load_sequence(
                    _row_folder(folder, len(notes)),
                    model="" if model is None else model,
                    policy=made._shared.store.policy,
                    ttl=ttl,
                    timeout=timeout,
                )
                rows.append(Row(sequence))
                note = RowNote.from_bytes(packed)
                _check_note(note, len(notes), notes[0] if notes else note, folder)
                if check_model and note.config is not None:
                    check_config(note.config, made._shared.store.config_fields)
                rows[-1].padding = note.padding
                notes.append(note)
            made._adopt(notes[0].length)
        except BaseException:
            made.close()
            raise
        if check_model:
            for layer, weights in zip(made.layers, notes[0].weights, strict=False):
                layer.weights = weights
        made._texts.turns = dict(notes[0].turns)
        if len({len(note.ids) for note in notes}) == 1 and len(notes[0].ids):
            made._texts.note(torch.stack([note.ids for note in notes]))
        made._texts.cut(made.length)
        return made

    @classmethod
    def attach(
        cls: type[Self],
        config: Any,
        client: Client,
        sequences: SequenceABC[str | Sequence],
        *,
        paddings: SequenceABC[int] | None = None,
        tokens: torch.Tensor | None = None,
        keep: bool = True,
        check_model: bool = True,
        **options: Any,
    ) -> Self:
        """Creates a cache from sequences in a daemon, for example those of another process.

        The other process must not continue with them: call `detach` there. If a step was
        interrupted, the tokens that it left in some layers are removed.

        Args:
            config: The model's config.
            client: Connection to the daemon with the sequences. It must outlive the cache.
            sequences: One sequence, or its name, for each batch row.
            paddings: Left padding of each row. None means none.
            tokens: The text, as for `note_tokens`, if it is known.
            keep: Whether the sequences stay when the cache is closed, reset or
                garbage-collected. Rows that beam search or `batch_select_indices` remove are
                deleted in any case.
            check_model: Whether the model's config must be that of the cache which created the
                sequences. Nothing compares its weights, nor the config if that cache was given
                its `model`.
            **options: As for `SpillwayCache`. The sequences keep their own policy and ttl.

        Raises:
            NotFound: A sequence was deleted or has expired.
            ModelMismatchError: The config differs.
            ValueError: The model has other shapes, or the rows have other lengths.
        """
        if isinstance(sequences, str):
            raise ValueError("sequences is a list of names, one for each batch row")
        if paddings is not None and len(paddings) != len(sequences):
            raise ValueError(f"{len(paddings)} paddings for {len(sequences)} sequences")
        made = cls(config, client, **options)
        made._check_all_in_daemon()
        store = made._shared.store
        store.keeps = True
        handles = [
            client.get_sequence(one if isinstance(one, str) else one.name) for one in sequences
        ]
        pads = [0] * len(handles) if paddings is None else list(paddings)
        store.rows = [Row(handle, pad) for handle, pad in zip(handles, pads, strict=True)]
        lengths = [row.padding + row.sequence.token_count for row in store.rows]
        if len(set(lengths)) != 1:
            raise ValueError(f"the rows end at different positions: {lengths}")
        made._adopt(lengths[0], check_config=check_model)
        for row in store.rows:
            if len(set(row.sequence.layer_token_counts)) > 1:
                row.sequence.truncate(row.sequence.token_count)
        store.keeps = keep
        if keep:
            for handle in handles:
                handle.keep()
        if tokens is not None:
            made.note_tokens(tokens)
            made._texts.cut(made.length)
        return made

    def detach(self) -> tuple[str, ...]:
        """Releases the sequences and returns their names. They stay in the daemon until their ttl.

        The cache is then empty. `attach` continues with the sequences, here or in another
        process. Delete them when they are no longer needed.
        """
        self._settle()
        self._check_all_in_daemon()
        store = self._shared.store
        store.suspend()
        names = tuple(row.sequence.keep().name for row in store.rows)
        store.abandon()
        store.rows = []
        self._set_length(0)
        self._begin_empty()
        return names

    def _check_all_in_daemon(self) -> None:
        """Raises UnsupportedModelError if this process alone has the K/V of some layers."""
        here = [layer.model_index for layer in self.layers if layer.window is not None]
        if here:
            raise UnsupportedModelError(
                f"the layers {here} have a sliding window, and their K/V are in this process "
                "only: such a cache cannot be saved, loaded, attached or detached"
            )

    def _adopt(self, length: int, *, check_config: bool = False) -> None:
        """Makes the store's rows, which have `length` positions, those of this cache."""
        store = self._shared.store
        model = store.client.get_model(store.rows[0].sequence.model)
        if any(row.sequence.model != model.name for row in store.rows):
            raise ValueError("the sequences of the rows are of several models")
        store.check_shapes(model)
        if check_config:
            store.check_config(model)
        store.model = model
        for layer in self.layers:
            layer.length = length
            layer.is_initialized = True

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuses pickle and torch.save."""
        raise TypeError(
            "a SpillwayCache cannot be pickled: its K/V are in the daemon. cache.save(folder) and "
            "SpillwayCache.load(folder, config, client) keep it; cache.detach() and "
            "SpillwayCache.attach(config, client, names) hand it to another process"
        )


def _row_folder(folder: str | Path, row: int) -> str:
    if not str(folder):
        raise ValueError("the name of the folder is empty")
    return f"{folder}/row-{row}"


def _check_note(note: RowNote, row: int, first: RowNote, folder: str | Path) -> None:
    """Raises ValueError if a row does not belong to the others."""
    if note.row != row or not 0 < note.row_count or note.padding > note.length:
        raise ValueError(f"{folder}/row-{row} was not saved as row {row}")
    if (note.save, note.row_count, note.length) != (first.save, first.row_count, first.length):
        raise ValueError(
            f"{folder}: row {row} is from another save than row 0: the save was interrupted; save "
            "again"
        )
