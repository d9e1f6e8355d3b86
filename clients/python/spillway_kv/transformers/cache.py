"""A transformers cache whose K/V are in the daemon."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from collections.abc import Sequence as SequenceABC
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, TypeVar

import torch
from transformers import Cache

from spillway_kv.client import Client
from spillway_kv.indices import HashWeights, RotationHash
from spillway_kv.policy import Policy
from spillway_kv.prefill import BLOCK_TOKEN_COUNT
from spillway_kv.quality import chosen_policy
from spillway_kv.results import Model
from spillway_kv.row_types import RowType
from spillway_kv.sequence import Sequence
from spillway_kv.sinks import filled, sink_rows
from spillway_kv.transformers.chats import Chats
from spillway_kv.transformers.contents import Contents
from spillway_kv.transformers.daemon_model import DaemonModel
from spillway_kv.transformers.handed import uncompiled
from spillway_kv.transformers.identity import config_fields
from spillway_kv.transformers.layer import Shared
from spillway_kv.transformers.rows import RowStore
from spillway_kv.transformers.selection import row_numbers
from spillway_kv.transformers.sinks import sinks_of
from spillway_kv.transformers.statistics import CacheStatistics, OnAttend
from spillway_kv.transformers.support import continues_one_by_one, layers_of, shapes_of
from spillway_kv.transformers.turns import Turns

Self = TypeVar("Self", bound="SpillwayCache")


@uncompiled
def _announce(contents: Contents, token_count: int) -> None:
    contents.announce(token_count)


class SpillwayCache(Cache):
    """A cache whose K/V are in the daemon, with one sequence per batch row.

    Use it with `model.set_attn_implementation("spillway")`, and pass it as `cache`, or as
    `past_key_values` before transformers 5.24 (`cache_argument`). Prompts are attended on the
    model's device, to all tokens, while their K/V are appended. If a prompt comes in chunks, the
    K/V of earlier tokens are fetched block by block (`spillway_kv.prefill`), so the device holds
    two blocks of one layer, whatever the length of the prompt. Later tokens are appended and
    attended in the daemon. Attention is sparse for decoding, including the candidates of
    assisted decoding (up to 16 at once). It is exact for the short ends of prompts, also up to
    16 tokens. Batches with left padding, beam search, assisted decoding and later turns on the
    same cache are supported. It is not thread-safe.

    Several tokens at once belong to a prompt, except for candidates of assisted decoding. One
    token is a decode step. Directly after two or more forward passes of a prompt it may be the
    last chunk of the prompt, and is attended exactly. These are still taken for decoding: the
    last token of a prompt with one token more than `prefill_chunk_size`, chunks of one token,
    and the first tokens of a direct call of the model after `generate()` has done assisted
    decoding on the cache.

    For layers with a sliding window, the newest K/V stay on the model's device: those of the window
    and 128 tokens more, so that 128 tokens can be removed again. Layers with a state (linear
    attention, state spaces) keep it there, and a copy of before the last forward pass, to which
    alone they can go back: there is no assisted decoding. Convolutions can go back by 128 tokens.
    The daemon's model has only the layers with full attention (`model_layers`). `save` stores the
    others too, but `detach` and `attach` refuse such models.

    Ctrl-C or an exception in a forward pass leaves the cache as it was before. `length` tells
    how long that is, and the next use undoes the rest. `save` and `load` store a cache, `detach`
    and `attach` pass it to another process, and `mark` and `truncate` go back to a turn.

    The sequences are deleted by `close()`, by `reset()`, at the end of a `with` block, or when
    the cache is garbage-collected. The daemon's model, which caches of the same config share,
    stays. `client.delete_model(cache.model)` deletes it.

    A forward pass raises `spillway_kv.NotFound` if a sequence was deleted or has expired, and its
    subclass `spillway_kv.DaemonRestarted` if the daemon has restarted and lost it. After `reset()`
    the cache starts empty on the present daemon, with a model of the same kind.

    Attributes:
        statistics: Sums over the attends in the daemon.
    """

    def __init__(
        self,
        config: Any,
        client: Client,
        *,
        policy: Policy | None = None,
        quality: str | None = None,
        model: Model | None = None,
        hash_weights: HashWeights | None = RotationHash(),  # noqa: B008
        ttl: datetime.timedelta | float | None = None,
        on_attend: OnAttend | None = None,
        prefill_block_token_count: int = BLOCK_TOKEN_COUNT,
        row_type: RowType = "model",
    ) -> None:
        """Checks that the model is supported. Nothing is sent yet.

        Args:
            config: The model's config, or the model. One with learned attention sinks (gpt-oss) is
                needed itself, because they are not in its config.
            client: Connection to the daemon. It must outlive the cache.
            policy: Policy of the sequences. None means the daemon's default.
            quality: The policy in one word: `exact`, `high`, `default` or `fast`
                (`spillway_kv.quality`). Not together with `policy`.
            model: The daemon's model to use. If the daemon restarts, it must be created again.
                None finds or creates a model by the config, the dtype of the keys and the scale
                of the layers.
            hash_weights: How that model computes codes.
            ttl: Idle time after which a sequence is deleted, seconds. None means an hour, 0
                means never.
            on_attend: Called after each attend in the daemon. It may attend
                to `event.sequence` itself.
            prefill_block_token_count: Number of tokens of a block. Two blocks are on the device
                while a prompt is processed in chunks.
            row_type: How that model stores K/V: "model", in the dtype of the keys, or "int8", with
                8 bits an element. A model that is given, and those of saves and of other processes,
                must store them in the same way.

        Raises:
            UnsupportedModelError: The daemon does not support the model's kind of attention, or
                this is the config of a model with learned sinks.
            ValueError: Both `policy` and `quality` are given, or `quality` is another word, or
                there is no such `row_type`.
        """
        given = config
        if isinstance(given, torch.nn.Module):
            config = given.config
        shapes, sinks = shapes_of(config), sinks_of(given)
        full = [sinks.get(layer) for layer, kind in enumerate(layers_of(config)) if kind.is_full]
        store = RowStore(
            client,
            DaemonModel(
                client,
                shapes,
                config_fields(config),
                hash_weights,
                model,
                sink_rows(filled(full), shapes.layer_count, shapes.query_head_count),
                row_type,
            ),
            policy=chosen_policy(policy, quality),
            ttl=ttl,
            prefill_block_token_count=prefill_block_token_count,
        )
        self._take(
            Contents(
                Shared(store, on_attend),
                layers_of(config),
                sinks,
                one_by_one=continues_one_by_one(config),
            )
        )

    def _take(self, contents: Contents) -> None:
        Cache.__init__(self, layers=contents.layers)
        self.contents = contents
        """@private For other modules of the package."""
        self._turns = Turns(contents)
        self._chats = Chats(contents, self._turns)

    def __enter__(self) -> SpillwayCache:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> SpillwayCache:
        return self.fork()

    @property
    def model(self) -> Model | None:
        """The daemon's model. None before the first forward pass."""
        return self.contents.shared.store.model.found

    @property
    def sequences(self) -> tuple[Sequence, ...]:
        """The sequences of the rows, after all appends. Empty before the first forward pass.

        Raises:
            SpillwayError: An append has failed.
        """
        return self.contents.sequences()

    @property
    def statistics(self) -> CacheStatistics:
        """Sums over the attends that the daemon served."""
        self.contents.shared.count()
        return self.contents.shared.statistics

    @property
    def on_attend(self) -> OnAttend | None:
        """Called after each attend in the daemon."""
        return self.contents.shared.on_attend

    @on_attend.setter
    def on_attend(self, callback: OnAttend | None) -> None:
        self.contents.shared.on_attend = callback

    @property
    def request_policy(self) -> Policy | None:
        """Policy that overrides that of the sequences for the following attends, or None."""
        return self.contents.shared.store.request_policy

    @request_policy.setter
    def request_policy(self, policy: Policy | None) -> None:
        self.contents.shared.store.request_policy = policy

    @property
    def model_layers(self) -> tuple[int, ...]:
        """The layers of the model that are in the daemon: those with full attention."""
        return tuple(index for index, kind in enumerate(self.contents.kinds) if kind.is_full)

    @property
    def batch_size(self) -> int:
        """Number of rows. -1 before the first forward pass."""
        return len(self.contents.shared.store.rows) or -1

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Passes the new K/V of a layer to its attention function."""
        if layer_idx == self.contents.attending[0].model_index:
            self.contents.begin_forward(key_states.shape[0])
        return self.layers[layer_idx].update(key_states, value_states, *args, **kwargs)

    # The first call of a forward pass is that for a mask. Models with a state then read it.

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Returns how many positions a mask covers, and the first of them. Begins a forward pass.

        Raises:
            UnsupportedModelError: The model cannot continue with so many tokens.
        """
        if self.contents.states:
            _announce(self.contents, query_length)
        return super().get_mask_sizes(query_length, layer_idx)

    def has_previous_state(self, *args: Any, **kwargs: Any) -> bool:
        """Whether a layer has a state. As in transformers."""
        self.contents.begin_states()
        return super().has_previous_state(*args, **kwargs)

    def get_conv_state(self, *args: Any, **kwargs: Any) -> torch.Tensor | None:
        """Returns a convolution's newest inputs. As in transformers."""
        self.contents.begin_states()
        return super().get_conv_state(*args, **kwargs)

    def update_conv_state(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Takes inputs of a convolution. As in transformers."""
        self.contents.begin_states()
        return super().update_conv_state(*args, **kwargs)

    @property
    def _is_user_defined(self) -> bool:
        """True. generate() of transformers 5.17 or later sets it on a cache that it was given."""
        return True

    @_is_user_defined.setter
    def _is_user_defined(self, value: bool) -> None:
        self.contents.shared.phase.begin_generation()

    def activate_past_recording(self) -> None:
        """Notes that assisted decoding begins, whose candidates do not belong to a prompt.

        Raises:
            UnsupportedModelError: Layers keep one state, from which no tokens can be removed.
        """
        self.contents.check_candidates()
        self.contents.shared.phase.begin_assisted_decoding()

    # Rows and lengths.

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Replaces row i by a copy of row beam_idx[i], for beam search."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keeps only the rows in indices [n] (numbers, or a mask [B])."""
        self.contents.settle()
        if self.sequences:
            self.contents.select(row_numbers(indices, len(self.sequences)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats every row, next to itself."""
        self.contents.settle()
        if self.sequences:
            if repeats < 1:
                raise ValueError(f"rows cannot be repeated {repeats} times")
            self.contents.repeat(repeats)

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the newest tokens.

        Args:
            tokens_to_remove: Minus the number of tokens to remove, as transformers passes it. 0
                removes none.

        Raises:
            ValueError: More tokens than a layer can remove: one with a sliding window or a
                convolution keeps 128 tokens more, one with a state that before the last forward
                pass.
        """
        if tokens_to_remove > 0:
            raise ValueError(
                f"crop({tokens_to_remove}): pass a negative number to remove that many tokens"
            )
        # In assisted decoding the number is a tensor on the model's device.
        self.contents.remove(-int(tokens_to_remove))

    def fork(self) -> SpillwayCache:
        """Copies the cache. The sequences of the copy share the daemon's pages.

        The copy has its own statistics and no `on_attend`. `copy.deepcopy(cache)`
        does the same.
        """
        made: SpillwayCache = SpillwayCache.__new__(SpillwayCache)
        made._take(self.contents.fork())
        return made

    def reset(self) -> None:
        """Deletes the sequences and starts empty."""
        self.contents.reset()

    def close(self) -> None:
        """Deletes the sequences. The cache is then empty and may be used again."""
        self.reset()

    @property
    def length(self) -> int:
        """Number of positions of completed forward passes, including left padding.

        After Ctrl-C or an exception in a forward pass: those before it. That forward pass is
        undone when the cache is next used.
        """
        return self.contents.length

    @property
    def paddings(self) -> tuple[int, ...]:
        """Left padding of each row, positions."""
        return self.contents.paddings

    # Tokens and turns.

    @property
    def tokens(self) -> list[list[int]]:
        """The tokens of each row, without padding, as far as they are known.

        A cache does not see tokens. `note_tokens` and `spillway_kv.transformers.generate` pass them
        to it.
        """
        return self._turns.tokens

    def note_tokens(self, ids: torch.Tensor) -> None:
        """Tells the cache the tokens whose K/V it holds or will hold.

        transformers multiplies the rows of a batch for beams and samples. The cache repeats tokens
        that were noted before, and moves them with the rows.

        Args:
            ids: [B, n], from the first position on, including left padding.

        Raises:
            ValueError: The ids do not have one row for each row of the cache.
        """
        self._turns.note_tokens(ids)

    def forget_tokens(self) -> None:
        """Forgets the tokens. The K/V stay."""
        self._turns.note_tokens(None)

    def check_tokens(self, ids: torch.Tensor) -> None:
        """Compares a text with the known tokens of the cache.

        Args:
            ids: [B, n], the whole text, as a model would get it.

        Raises:
            TokenMismatchError: The text differs from `position` on, or is shorter.
        """
        self._turns.check_tokens(ids)

    @property
    def turns(self) -> Mapping[str, int]:
        """Positions where turns end, by the names given to `mark`."""
        return self._turns.ends

    def mark(self, name: str) -> int:
        """Names the present end of the text, for `truncate`. Returns the position.

        A turn is forgotten when the cache is cut before its end.
        """
        return self._turns.mark(name)

    def truncate(self, to: int | str) -> None:
        """Cuts the cache to a length or to the end of a turn.

        Later tokens are appended from there. Call `fork()` before to make a branch.

        Args:
            to: Number of positions to keep, including left padding, or the name of a turn.

        Raises:
            KeyError: There is no such turn.
            ValueError: More positions than the cache has, or a layer cannot go back so far, as for
                `crop`.
        """
        self._turns.truncate(to)

    # Other processes.

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
        self._chats.save(folder, timeout)

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
        device: torch.device | str | None = None,
        **options: Any,
    ) -> Self:
        """Creates a cache from the files that `save` has written, in any process, with any engine.

        Args:
            folder: The folder that was given to `save`.
            config: The model's config, or the model.
            client: Connection to the daemon. It must outlive the cache.
            policy: Overrides the saved policy, field by field.
            quality: The policy in one word, as for `SpillwayCache`.
            model: The daemon's model. None means the saved one, which is created if it does not
                exist (`Client.load_sequence`).
            ttl: Idle time of the sequences. None means the saved one.
            timeout: Seconds for each row. None means no limit.
            check_model: Whether the model must be the one that computed the K/V, as far as its
                config tells. The first forward pass also compares a sample of its weights.
            device: The model's device, for layers with a window or a state. None means that on
                which they were, or the CPU if it does not exist.
            **options: As for `SpillwayCache`.

        Raises:
            ModelMismatchError: The config differs. The error names the fields.
            ValueError: The model has other shapes or another row type, or the rows come from
                different saves.
            SpillwayError: As for `Client.load_sequence`.
        """
        made = cls(config, client, policy=policy, quality=quality, model=model, ttl=ttl, **options)
        made._chats.load(folder, model, ttl, timeout, check_model=check_model, device=device)
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
            config: The model's config, or the model.
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
            ValueError: The model has other shapes or another row type, or the rows have other
                lengths.
        """
        made = cls(config, client, **options)
        made._chats.attach(sequences, paddings, tokens, keep=keep, check_model=check_model)
        return made

    def detach(self) -> tuple[str, ...]:
        """Releases the sequences and returns their names. They stay in the daemon until their ttl.

        The cache is then empty. `attach` continues with the sequences, here or in another
        process. Delete them when they are no longer needed.
        """
        return self._chats.detach()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuses pickle and torch.save."""
        raise TypeError(
            "a SpillwayCache cannot be pickled: its K/V are in the daemon. cache.save(folder) and "
            "SpillwayCache.load(folder, config, client) keep it; cache.detach() and "
            "SpillwayCache.attach(config, client, names) hand it to another process"
        )
