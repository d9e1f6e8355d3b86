"""Decode steps of sequences that go on together: what serves them, and what follows a failure."""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as SequenceABC
from contextlib import suppress
from typing import cast

import torch

from spillway_kv.attend_sums import LayerStatistics
from spillway_kv.client import Client
from spillway_kv.errors import NotFound, SpillwayError
from spillway_kv.kept_decoder import KeptDecoder
from spillway_kv.policy import Policy
from spillway_kv.restart import BROKEN
from spillway_kv.results import AttendResult
from spillway_kv.sequence import Sequence
from spillway_kv.step import DecodeStep
from spillway_kv.step_graph import StepGraph
from spillway_kv.tensors import gpu_uuid

_logger = logging.getLogger(__name__)

# If a decoder cannot be opened because of one of these, steps serve the sequences.
_WITHOUT_DECODER = ("UNIMPLEMENTED", "RESOURCE_EXHAUSTED")


class Decoding:
    """Decode steps of some sequences, with the same number of new tokens for each.

    The first of these that can serves a step:

    - a decoder on the stream of the tensors, if the engine computes on their GPU and decoders
      support the policy;
    - a `DecodeStep`, with any engine and any policy;
    - rows and attends: appends and an attend for each layer, for the rest of a step whose decoder a
      restart of the daemon has ended.

    Call `begin`, `attend` for each layer in order, and `end`, `finish` or the next `begin`. A
    decoder is kept from step to step while the sequences stay the same. It holds them: call
    `release` before they are used in any other way. For one thread.

    Args:
        client: Client of the engine.
        refused: Policies that decoders do not support, as far as known. Decodings of one client can
            share it.
        length_max: Tokens that no sequence will have more of, as far as the caller knows. Decoders
            then take less memory.
        make_room: Frees memory of the engine if there is not enough for a decoder, and returns
            whether it has freed some. It is called once for each.
    """

    def __init__(
        self,
        client: Client,
        refused: list[Policy | None] | None = None,
        length_max: int | None = None,
        make_room: Callable[[], bool] | None = None,
    ) -> None:
        self._client = client
        self._length_max = length_max
        self._make_room = make_room
        self._refused: list[Policy | None] = [] if refused is None else refused
        self._sequences: tuple[Sequence, ...] = ()
        self._starts: tuple[int, ...] = ()
        self._policy: Policy | None = None
        # What serves the step. Rows and attends: none of the two. A decoder is kept after its step.
        self._decoder: KeptDecoder | None = None
        self._step: DecodeStep | None = None
        self._in_step = False
        # Whether a lack of memory for a decoder of these sequences has been logged.
        self._told = False
        self._last: list[AttendResult] = []
        self._counted: dict[int, LayerStatistics] = {}

    @property
    def in_step(self) -> bool:
        """Whether a step has begun and, as far as known, has layers left."""
        return self._in_step and not (self._decoder is not None and self._decoder.between_steps)

    @property
    def has_decoder(self) -> bool:
        """Whether a decoder holds the sequences. It then serves the step."""
        return self._decoder is not None

    def begin(
        self,
        sequences: SequenceABC[Sequence],
        starts: SequenceABC[int],
        *,
        device: torch.device,
        policy: Policy | None = None,
        token_count: int = 1,
        decoder: bool = True,
    ) -> None:
        """Begins a step.

        Args:
            sequences: The sequences B.
            starts: Position of the first new token of each. All layers have as many tokens.
            device: Device of the tensors.
            policy: Overrides the policies of the sequences.
            token_count: Number of new tokens T of each sequence.
            decoder: Whether a decoder may serve the step. It has no `results`.

        Raises:
            SpillwayError: The step, or an earlier one on the GPU, has failed.
        """
        self._end_step()
        same = tuple(sequences) == self._sequences
        self._told = self._told and same
        self._sequences, self._starts = tuple(sequences), tuple(starts)
        self._policy = policy
        self._in_step = True
        suits = decoder and self._suits(device, len(sequences), token_count, policy)
        if not (suits and same and self._serves(policy, token_count)):
            self._close_decoder()
            if suits:
                self._decoder = self._opened(policy, token_count)
        try:
            if self._decoder is not None:
                self._decoder.next()
            else:
                self._step = self._client.begin_step(
                    sequences, token_count=token_count, policy=policy, starts=self._starts
                )
        except BaseException as error:
            self._repair(error)

    def _suits(
        self, device: torch.device, batch_size: int, token_count: int, policy: Policy | None
    ) -> bool:
        """Whether a decoder may serve tensors on this device."""
        if device.type != "cuda" or policy in self._refused:
            return False
        info, limits = self._client.server_info, self._client.server_info.limits
        if self._client.transport == "embedded":
            there = [each.name for each in info.devices] == [f"cuda:{device.index}"]
        else:
            # A daemon may number the GPUs differently.
            uuids = [each.uuid for each in info.devices]
            there = self._client.step_transport == "doorbell" and uuids == [gpu_uuid(device.index)]
        return (
            there
            and token_count <= limits.sparse_query_token_count_max
            and batch_size <= limits.attend_item_count_max
        )

    def _serves(self, policy: Policy | None, token_count: int) -> bool:
        return self._decoder is not None and self._decoder.serves(policy, token_count)

    def _opened(self, policy: Policy | None, token_count: int) -> KeptDecoder | None:
        """Opens a decoder; None if a step must serve the sequences."""
        make_room = self._make_room
        while True:
            try:
                return KeptDecoder(
                    self._client, self._sequences, policy, token_count, self._length_max
                )
            except SpillwayError as error:
                if error.code not in _WITHOUT_DECODER:
                    raise
                if error.code == "UNIMPLEMENTED":
                    self._refused.append(policy)
                    return None
                if make_room is not None and make_room():
                    make_room = None
                    continue
                if not self._told:
                    _logger.warning(
                        "no decoder for %d sequences, whose steps take longer without: %s",
                        len(self._sequences),
                        error,
                    )
                self._told = True
                return None

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Appends the new tokens' K and V at a layer, and attends.

        Args:
            layer: The layer.
            q: Queries [B, T, H_q, d] after the positional encoding.
            k: Keys [B, H_kv, T, d].
            v: Values, with the same shape.
            out: Written and returned if it is given: contiguous, of q's dtype, shape and device.

        Returns:
            Output [B, T, H_q, d] on q's device.

        Raises:
            SpillwayError: The step has failed. It is over, and some layers of some sequences have
                the new tokens.
        """
        self._last = []
        try:
            if self._decoder is not None:
                return self._decoder.attend(layer, q, k, v, out)
            if self._step is not None:
                made, _ = self._step.attend(layer, q, k, v)
                self._count(layer).add_sums(self._step.sums())
                return _given(cast(torch.Tensor, made), out)
        except BaseException as error:
            self._repair(error)
        return _given(self._attend_rows(layer, q, k, v), out)

    def run(self, graph: StepGraph) -> bool:
        """Attends at all layers, as a part of a graph, if an embedded engine's decoder can.

        Args:
            graph: The graph. Of its sequences, the first ones are those of the step.

        Returns:
            Whether it runs. If not, nothing of it does: run its pieces, and call `attend` for each
            layer. With a daemon each attend is a call, and one that fails must not make the caller
            run the pieces before it again.

        Raises:
            SpillwayError: The step has failed before anything of the graph ran.
        """
        self._last = []
        if self._decoder is None or self._client.transport != "embedded":
            return False
        try:
            self._decoder.run(graph)
        except BaseException as error:
            self._repair(error)
            raise
        return True

    def _repair(self, error: BaseException) -> None:
        """Ends what serves the step, and raises the error if the rest cannot be served without."""
        ended, self._decoder = self._decoder, None
        self._step = None
        if ended is None:
            self._in_step = False
            if isinstance(error, BROKEN):
                self._raise_restart()
            raise error
        ended.decoder.close()
        if not isinstance(error, BROKEN):
            self._in_step = False
            raise error
        # A layer may or may not have the new tokens, so each is attended at its own position.
        self._client.connection.restarts.wait(error)

    def _raise_restart(self) -> None:
        """Raises DaemonRestarted if that is why a step broke; its own error does not say so."""
        try:
            self._sequences[0].refresh()
        except NotFound:
            raise
        except SpillwayError:
            return

    def _attend_rows(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        for row, sequence in enumerate(self._sequences):
            sequence.append(layer, self._starts[row], k[row], v[row])
        queries = dict(zip(self._sequences, q, strict=True))
        answers = self._client.attend(layer, queries, self._policy)
        self._last = [answers[sequence] for sequence in self._sequences]
        for result in self._last:
            self._count(layer).add(result)
        return torch.stack([cast(torch.Tensor, each.out) for each in self._last]).to(q.device)

    def results(self) -> list[AttendResult]:
        """Returns the full results of the last attend, one per sequence.

        Raises:
            ValueError: A decoder has served it.
        """
        if self._decoder is not None:
            raise ValueError("a step that a decoder serves has no results")
        return self._last if self._step is None else self._step.results()

    def end(self) -> None:
        """Ends the step without a wait for the GPU.

        If a decoder serves it and it fails on the GPU, its outputs are NaN, and a later `begin` or
        `finish` raises the error.
        """
        self._end_step()

    def finish(self) -> None:
        """Ends the step and waits for it. Its tokens then belong to the sequences.

        Raises:
            SpillwayError: The step has failed on the GPU.
        """
        self._end_step()
        if self._decoder is not None:
            try:
                self._decoder.decoder.finish()
            finally:
                self._take()

    def _end_step(self) -> None:
        step, self._step = self._step, None
        self._in_step = False
        if step is not None:
            step.close()

    def release(self) -> None:
        """The same as `finish`, and lets go of the sequences."""
        try:
            self.finish()
        finally:
            self._close_decoder()

    def _close_decoder(self) -> None:
        """Closes the decoder, if there is one, after its last step."""
        decoder, self._decoder = self._decoder, None
        if decoder is None:
            return
        try:
            decoder.decoder.finish()
        finally:
            self._take(decoder)
            decoder.decoder.close()

    def abandon(self) -> None:
        """Gives up the step, and lets go of the sequences. Layers may have its tokens."""
        # The client may be closed, and the engine gone with it.
        with suppress(SpillwayError, ValueError):
            self.release()

    def _count(self, layer: int) -> LayerStatistics:
        return self._counted.setdefault(layer, LayerStatistics())

    def _take(self, decoder: KeptDecoder | None = None) -> None:
        """Counts what a decoder has served."""
        decoder = decoder or self._decoder
        if decoder is not None:
            for layer, sums in decoder.take():
                self._count(layer).add_sums(sums)

    def take_statistics(self, *, wait: bool = True) -> dict[int, LayerStatistics]:
        """Returns the statistics of each layer since the last call.

        A decoder's step that is not complete is counted later.

        Args:
            wait: Wait for the GPU to end the last step, so that it is counted.
        """
        if self._decoder is not None and self._decoder.between_steps:
            if wait:
                self._decoder.decoder.finish()
            self._take()
        taken, self._counted = self._counted, {}
        return taken


def _given(made: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    return made if out is None else out.copy_(made)
