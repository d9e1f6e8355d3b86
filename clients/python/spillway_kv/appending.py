"""Appends K/V to a sequence: read in place, through a staging region, or in messages."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from spillway_kv import _split
from spillway_kv._proto import attention_service_pb2, tensor_pb2
from spillway_kv.errors import OutOfRange, ResourceExhausted, SpillwayError
from spillway_kv.region import copied_to
from spillway_kv.regions import ANSWERED
from spillway_kv.results import AppendResult
from spillway_kv.sequence_state import SequenceState
from spillway_kv.tensors import (
    Array,
    dtype_of,
    engine_array,
    itemsize,
    keep_for_a_while,
    on_gpu,
    wait_for_stream,
)

# Most bytes of K and V that an engine reads in place for one message. An append that is given up
# ends after the message that is being read.
_IN_PLACE_BYTES = 256 << 20

# Most bytes of K and V in GPU memory that are copied to the host at once, if the engine cannot read
# them there. Of more, each message copies its part.
_COPIED_BYTES = 1 << 30

# Places of K and V in regions.
_Places = tuple[tensor_pb2.RegionSlice, tensor_pb2.RegionSlice]


def _place_at(place: tensor_pb2.RegionSlice, layer: int, token: int) -> tensor_pb2.RegionSlice:
    """Returns the place of a part of K or V [layers, H_kv, T, d] that begins there."""
    offset = place.offset + layer * place.strides[0] + token * place.strides[2]
    return tensor_pb2.RegionSlice(region=place.region, offset=offset, strides=place.strides)


def append(
    sequence: SequenceState,
    layer: int,
    start: int | None,
    k: Array,
    v: Array,
    timeout: float | None,
) -> AppendResult:
    """Appends as `Sequence.append` says."""
    k, v = engine_array(k, "k"), engine_array(v, "v")
    if len(k.shape) == 3:
        k, v = k[None], v[None]
    shape = _split.check_shape(k, ("layers", "H_kv", "T", "d"), "k")
    if tuple(v.shape) != shape:
        raise ValueError(f"v has shape {list(v.shape)}, k has {list(shape)}")
    first = sequence.token_counts()[layer] if start is None else start
    if on_gpu(k) and on_gpu(v) and not sequence.connection.regions.reads_on_gpu(k, v):
        k, v = _copied(k, v)
    since = sequence.change_count
    made = Append(sequence, layer, first, k, v, timeout)
    try:
        result = sequence.connection.restarts.again(made.run)
    except BaseException:
        sequence.forget()
        raise
    sequence.note(result.layer_token_counts, since)
    return result


def _copied(*tensors: Any) -> Any:
    """Copies CUDA tensors to the host, unless they are large."""
    large = sum(tensor.nbytes for tensor in tensors) > _COPIED_BYTES
    return tensors if large else [tensor.cpu() for tensor in tensors]


class Append:
    """An append to consecutive layers of a sequence.

    Args:
        sequence: The sequence.
        layer: The first layer.
        start: Position of the first token.
        k: Keys [layers, H_kv, T, d], as `engine_array` returns them.
        v: Values, with the same shape.
        timeout: Seconds. None means the client's timeout.
    """

    def __init__(
        self,
        sequence: SequenceState,
        layer: int,
        start: int,
        k: Array,
        v: Array,
        timeout: float | None,
    ) -> None:
        self._sequence, self._wire = sequence, sequence.connection
        self._generation = sequence.generation
        self._layer, self._start = layer, start
        self._k, self._v = k, v
        self._timeout = timeout
        _, kv_heads, _, head_dim = k.shape
        self._token_bytes = 2 * kv_heads * head_dim * itemsize(dtype_of(k, "k"))

    def run(self) -> AppendResult:
        """Appends. May be called again after a failure, because it cuts the same pieces."""
        result = self._run_staged()
        return self._run() if result is None else result

    def request(
        self, layer: int, token: int, piece: tuple[Array, Array], places: _Places | None
    ) -> attention_service_pb2.AppendRequest:
        """Makes the request for a piece: its K and V, or where they are.

        Args:
            layer: The piece's first layer, among those of the append.
            token: Its first token, likewise.
            piece: Its K and V.
            places: Where they are in regions. None: in the request.
        """
        made = attention_service_pb2.AppendRequest()
        layer, start = self._layer + layer, self._start + token
        name, generation = self._sequence.name, self._generation
        _split.fill_chunk(made.chunk, name, generation, layer, start, *piece, places)
        return made

    def _pieces(self, budget: int) -> Iterator[tuple[int, int, int, int]]:
        """Returns layers and tokens [l0, l1), [t0, t1) of pieces of up to `budget` bytes."""
        layers, _, token_count, _ = self._k.shape
        return _split.kv_pieces(layers, token_count, self._token_bytes, budget)

    def _run(self) -> AppendResult:
        """Appends in place, or else in messages."""
        regions, budget = self._wire.regions, self._wire.budget_bytes
        k, v = self._k, self._v
        k_place, v_place = regions.slice_of(k), regions.slice_of(v)
        places: _Places | None = None
        if k_place is not None and v_place is not None and on_gpu(k) == on_gpu(v):
            places = k_place, v_place
            wait_for_stream(k)
            # Whole messages, because a restart may remove the region after some pieces. The rest
            # is then sent in messages.
            budget = _split.whole_messages(_IN_PLACE_BYTES, self._token_bytes, budget)

        def requests() -> Iterator[attention_service_pb2.AppendRequest]:
            for l0, l1, t0, t1 in self._pieces(budget):
                piece = k[l0:l1, :, t0:t1], v[l0:l1, :, t0:t1]
                there = places and (_place_at(places[0], l0, t0), _place_at(places[1], l0, t0))
                yield self.request(l0, t0, piece, there)

        method = self._wire.stubs.attention.Append
        try:
            response = self._sequence.call(method, requests(), timeout=self._timeout)
        except BaseException as error:
            if places is not None and not isinstance(error, ANSWERED):
                # The call was given up, but an embedded engine may still read a piece.
                keep_for_a_while(k, v)
            raise
        return AppendResult(
            response.appended_chunk_count,
            response.already_present_chunk_count,
            tuple(response.layer_token_counts),
        )

    def _run_staged(self) -> AppendResult | None:
        """Appends through a staging region of the client.

        Returns:
            None if there is no such region, or if rows must be compared with those already there.
        """
        regions = self._wire.regions
        if not regions.stages(self._k, self._v) or regions.slice_of(self._k) is not None:
            return None
        if 0 in (self._k.shape[0], self._k.shape[2]):
            return None
        try:
            return self._run_through_region()
        except SpillwayError as error:
            # Sent in messages, rows are compared with those already there, and no region is needed.
            there = isinstance(error, OutOfRange) and error.reason != "NON_FINITE"
            if there or error.reason == "REGION_NOT_FOUND":
                return None
            # The memory that the staging region uses may be what is missing.
            if isinstance(error, ResourceExhausted) and regions.give_up_host_memory():
                return None
            raise

    def _run_through_region(self) -> AppendResult | None:
        regions, k, v = self._wire.regions, self._k, self._v
        deadline = None if self._timeout is None else time.monotonic() + self._timeout
        counts: tuple[int, ...] = ()
        appended = present = 0
        with regions.staged(k, v) as region:
            if region is None or dtype_of(v, "v") != dtype_of(k, "k"):
                return None
            # Minus the space that alignment takes.
            room = region.byte_count - 1024
            # Whole messages, because the rest may have to be sent in messages.
            room = _split.whole_messages(room, self._token_bytes, self._wire.budget_bytes)
            for l0, l1, t0, t1 in self._pieces(room):
                region.reset()
                parts = [copied_to(region, whole[l0:l1, :, t0:t1]) for whole in (k, v)]
                wait_for_stream(k)
                k_place, v_place = regions.slice_of(parts[0]), regions.slice_of(parts[1])
                if k_place is None or v_place is None:
                    return None  # the daemon has restarted in between
                request = self.request(l0, t0, (parts[0], parts[1]), (k_place, v_place))
                method = self._wire.stubs.attention.Append
                left = None if deadline is None else max(deadline - time.monotonic(), 0.0)
                response = self._sequence.call(method, iter([request]), timeout=left)
                appended += response.appended_chunk_count
                present += response.already_present_chunk_count
                counts = tuple(response.layer_token_counts)
        return AppendResult(appended, present, counts)
