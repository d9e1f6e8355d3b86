"""A client of several daemons, each with a share of every model's layers and KV heads."""

from __future__ import annotations

import dataclasses
import datetime
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as SequenceABC
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import spillway
from spillway.errors import Cancelled, NotFound, SpillwayError, Unavailable
from spillway.policy import Policy
from spillway.results import AttendResult, Model, SequenceInfo
from spillway.server import ServerInfo
from spillway.tensors import Array, OutDType

from spillway_cluster.merging import heads_of, merged_info, merged_results
from spillway_cluster.sequence import Piece, SplitSequence, local_policy, part_folder
from spillway_cluster.shares import Share, deal
from spillway_cluster.step import SplitStep
from spillway_cluster.stream import SplitStream

T = TypeVar("T")
X = TypeVar("X")


class SplitClient:
    """What `spillway.Client` is for one daemon, for several that hold a part of each model.

    The KV heads of a layer, or its layers too, are dealt to the daemons; tokens never are. What
    is asked goes to all of them at once. Outputs, sets and certificates are those of one daemon
    with the whole model, bit for bit, while no daemon's audit has raised an inflation. Thread-safe.

    Attributes:
        clients: One for each daemon, in the order of the heads.
        server_info: The first daemon's, with the devices and the smallest limits of all.
    """

    def __init__(self, clients: SequenceABC[spillway.Client], layer_groups: int = 1) -> None:
        """Takes the clients over: closing this one closes them.

        Args:
            clients: One for each daemon, of one version.
            layer_groups: Groups of consecutive layers, each dealt to as many daemons.

        Raises:
            ValueError: There is no client, a daemon is named twice, or their number is no
                multiple of `layer_groups`.
            VersionMismatch: A daemon has another version than the first.
        """
        if not clients:
            raise ValueError("no daemons are named")
        if layer_groups < 1 or len(clients) % layer_groups:
            raise ValueError(
                f"{len(clients)} daemons cannot be dealt to {layer_groups} groups of layers evenly"
            )
        seen: dict[str, str] = {}
        first = clients[0].server_info
        for client in clients:
            info = client.server_info
            if info.boot_id in seen:
                raise ValueError(f"{client.target} is the daemon that {seen[info.boot_id]} is too")
            seen[info.boot_id] = client.target
            if info.version != first.version:
                raise spillway.VersionMismatch(
                    f"the daemon at {client.target} has version {info.version}, "
                    f"{clients[0].target} has {first.version}"
                )
        self.clients = tuple(clients)
        self.target = ",".join(client.target for client in clients)
        self._layer_groups = layer_groups
        self._threads = ThreadPoolExecutor(max(1, len(clients) - 1), "spillway-split")
        self._models: dict[str, tuple[Model, list[Share]]] = {}
        self.server_info = _whole_info([client.server_info for client in clients])

    def __enter__(self) -> SplitClient:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"SplitClient({self.target!r})"

    def close(self) -> None:
        """Closes the connections, as `Client.close` does."""
        for client in self.clients:
            client.close()
        self._threads.shutdown()

    @property
    def transport(self) -> str:
        """`split`: several daemons."""
        return "split"

    @property
    def step_transport(self) -> str:
        """Likewise; each daemon's client has its own."""
        return "split"

    def each(self, call: Callable[[X], T], of: Iterable[X]) -> list[T]:
        """Calls for several daemons at once, and waits for all of them.

        Raises:
            SpillwayError: The first one's in order, once all have ended.
        """
        first, *others = of
        waiting = [self._threads.submit(call, other) for other in others]
        failed: BaseException | None = None
        answers: list[T] = []
        try:
            answers.append(call(first))
        except BaseException as error:  # noqa: BLE001  (raised once the others have ended)
            failed = error
        for future in waiting:
            broken = future.exception()
            if broken is None:
                answers.append(future.result())
            else:
                failed = failed or broken
        if failed is not None:
            raise failed
        return answers

    # Models.

    def create_model(
        self, model_id: str = "", *, layer_count: int, kv_head_count: int, **options: Any
    ) -> Model:
        """Creates a model: its part on each daemon. Arguments as of `Client.create_model`.

        Raises:
            ValueError: The model has fewer KV heads, or layers, than there are parts.
            SpillwayError: As of `Client.create_model`. No daemon has a part then that this
                call has created.
        """
        shares = deal(layer_count, kv_head_count, len(self.clients), self._layer_groups)
        for name in ("first_layer", "first_kv_head"):
            if options.pop(name, 0):
                raise ValueError(f"{name}: the model that is split is a whole one")
        query_heads = options.pop("query_head_count")
        if query_heads % kv_head_count:
            raise spillway.InvalidArgument(
                f"query_head_count {query_heads} is no multiple of kv_head_count {kv_head_count}"
            )
        policy: Policy | None = options.pop("policy", None)
        # The parts have one name.
        model_id = model_id or f"split-{secrets.token_hex(8)}"
        created: list[tuple[spillway.Client, Model]] = []
        try:
            for client, share in zip(self.clients, shares, strict=True):
                part = client.create_model(
                    model_id,
                    layer_count=len(share.layers),
                    kv_head_count=len(share.kv_heads),
                    query_head_count=len(share.kv_heads) * query_heads // kv_head_count,
                    policy=local_policy(policy, share),
                    first_layer=share.layers.start,
                    first_kv_head=share.kv_heads.start,
                    **options,
                )
                created.append((client, part))
        except BaseException:
            for client, part in created:
                client.delete_model(part)
            raise
        return self._whole([part for _, part in created])

    def get_model(self, name: str) -> Model:
        """Returns a model by its resource name.

        Raises:
            NotFound: A daemon has no part of it.
            ValueError: The parts do not make up a model, or are dealt otherwise than this
                client deals.
        """
        return self._whole(self.each(lambda client: client.get_model(name), self.clients))

    def _whole(self, parts: SequenceABC[Model]) -> Model:
        """The model that parts make up."""
        shares = [
            Share(
                range(part.first_layer, part.first_layer + part.layer_count),
                range(part.first_kv_head, part.first_kv_head + part.kv_head_count),
            )
            for part in parts
        ]
        layer_count = max(share.layers.stop for share in shares)
        kv_head_count = max(share.kv_heads.stop for share in shares)
        if shares != deal(layer_count, kv_head_count, len(shares), self._layer_groups):
            held = ", ".join(
                f"{client.target} has layers {share.layers.start} to {share.layers.stop - 1} and "
                f"KV heads {share.kv_heads.start} to {share.kv_heads.stop - 1}"
                for client, share in zip(self.clients, shares, strict=True)
            )
            raise ValueError(f"{parts[0].name} is not dealt to these daemons in order: {held}")
        first = parts[0]
        whole = dataclasses.replace(
            first,
            layer_count=layer_count,
            kv_head_count=kv_head_count,
            query_head_count=kv_head_count * first.query_head_count // first.kv_head_count,
            first_layer=0,
            first_kv_head=0,
            ready=all(part.ready for part in parts),
            row_bytes_per_token=sum(part.row_bytes_per_token for part in parts),
            index_bytes_per_token=sum(part.index_bytes_per_token for part in parts),
        )
        self._models[whole.name] = whole, shares
        return whole

    def described(self, model: str) -> tuple[Model, list[Share]]:
        """A model, and what each daemon holds of it; asks for it once."""
        if model not in self._models:
            self.get_model(model)
        return self._models[model]

    def list_models(self) -> Iterator[Model]:
        """Yields every model that lies on all the daemons, by name."""
        names = {model.name for model in self.clients[-1].list_models()}
        for model in self.clients[0].list_models():
            if model.name in names:
                try:
                    yield self.get_model(model.name)
                except (NotFound, ValueError):
                    continue

    def delete_model(self, model: Model | str) -> None:
        """Deletes a model's parts.

        Raises:
            NotFound: No daemon has one.
            FailedPrecondition: It has sequences.
        """
        name = model if isinstance(model, str) else model.name
        self.gone(lambda client: client.delete_model(name), self.clients)
        self._models.pop(name, None)

    def gone(self, delete: Callable[[X], None], of: Iterable[X]) -> None:
        """Deletes parts; that some are gone already is no error."""

        def one(part: X) -> NotFound | None:
            try:
                delete(part)
            except NotFound as error:
                return error
            return None

        missing = self.each(one, of)
        if all(error is not None for error in missing):
            assert missing[0] is not None
            raise missing[0]

    # Sequences.

    def create_sequence(
        self,
        model: Model | str,
        sequence_id: str = "",
        *,
        policy: Policy | None = None,
        ttl: datetime.timedelta | float | None = None,
    ) -> SplitSequence:
        """Creates an empty sequence: its part on each daemon. As `Client.create_sequence`.

        Raises:
            SpillwayError: As of `Client.create_sequence`. No daemon has a part then that this
                call has created.
        """
        name = model if isinstance(model, str) else model.name
        _, shares = self.described(name)

        def create(number: int) -> spillway.Sequence:
            return self.clients[number].create_sequence(
                name, sequence_id, policy=local_policy(policy, shares[number]), ttl=ttl
            )

        return self.opened(create)

    def opened(self, make: Callable[[int], spillway.Sequence]) -> SplitSequence:
        """The sequence of the parts that calls make; where one fails the others are deleted."""
        made: dict[int, spillway.Sequence] = {}

        def one(number: int) -> None:
            made[number] = make(number)

        try:
            self.each(one, range(len(self.clients)))
            return self._sequence([made[number] for number in range(len(self.clients))])
        except BaseException:
            for part in made.values():
                part.delete()
            raise

    def _sequence(self, parts: SequenceABC[spillway.Sequence]) -> SplitSequence:
        """The sequence of parts, one of each daemon."""
        whole, shares = self.described(parts[0].model)
        pieces = [Piece(share, part) for share, part in zip(shares, parts, strict=True)]
        return SplitSequence(self, whole, pieces)

    def get_sequence(self, name: str) -> SplitSequence:
        """Returns a handle of a sequence that was named when it was created.

        Raises:
            NotFound: A daemon has no part of it.
        """
        return self._sequence(self.each(lambda client: client.get_sequence(name), self.clients))

    def load_sequence(
        self, folder: str | Path, sequence_id: str = "", **options: Any
    ) -> tuple[SplitSequence, bytes]:
        """Makes a sequence of what `SplitSequence.save` has saved, of as many daemons.

        Arguments and errors as of `Client.load_sequence`.
        """
        data: dict[int, bytes] = {}

        def load(number: int) -> spillway.Sequence:
            part, data[number] = self.clients[number].load_sequence(
                part_folder(folder, number), sequence_id, **options
            )
            return part

        return self.opened(load), data[0]

    def list_sequences(self, model: Model | str = "") -> Iterator[SequenceInfo]:
        """Yields the sequences that lie on all the daemons under one name, by name.

        Parts of a sequence that nobody has named have other names on each.
        """
        name = model if isinstance(model, str) else model.name
        listed = self.each(
            lambda client: {info.name: info for info in client.list_sequences(name)}, self.clients
        )
        for each in listed[0]:
            parts = [infos.get(each) for infos in listed]
            there = [part for part in parts if part is not None]
            if len(there) == len(parts) and {part.model for part in there} == {there[0].model}:
                try:
                    whole, shares = self.described(there[0].model)
                except (NotFound, ValueError):
                    continue
                yield merged_info(shares, there, whole.layer_count)

    # Attention.

    def attend(
        self,
        layer: int,
        queries: Mapping[SplitSequence, Array],
        policy: Policy | None = None,
        visible: Mapping[SplitSequence, SequenceABC[int]] | None = None,
        *,
        out_dtype: OutDType | None = None,
        timeout: float | None = None,
        return_errors: bool = False,
    ) -> Any:
        """Attends at one layer for several sequences of one model; as `Client.attend`."""
        sequences = list(queries)
        if not sequences:
            return {}
        at = sequences[0].pieces_of(layer)

        def ask(number: int) -> dict[spillway.Sequence, AttendResult | SpillwayError]:
            share = sequences[0].pieces[number].share
            parts = {sequence: sequence.pieces[number].sequence for sequence in sequences}
            heads = share.query_heads(sequences[0].group)
            client = self.clients[number]
            return client.attend(
                share.local(layer),
                {part: heads_of(queries[s], heads, 1) for s, part in parts.items()},
                local_policy(policy, share),
                None if visible is None else {parts[s]: seen for s, seen in visible.items()},
                out_dtype=out_dtype,
                timeout=timeout,
                return_errors=True,
            )

        answers = self.each(ask, at)
        results: dict[SplitSequence, AttendResult | SpillwayError] = {}
        for sequence in sequences:
            parts: list[AttendResult] = []
            failed: SpillwayError | None = None
            for number, answer in zip(at, answers, strict=True):
                one = answer[sequence.pieces[number].sequence]
                if isinstance(one, SpillwayError):
                    failed = failed or one
                else:
                    parts.append(one)
            if failed is not None:
                if not return_errors:
                    raise failed
                results[sequence] = failed
            else:
                heads = [len(sequence.pieces[number].share.kv_heads) for number in at]
                results[sequence] = merged_results(parts, heads)
        return results

    def begin_step(
        self,
        sequences: SequenceABC[SplitSequence],
        *,
        token_count: int = 1,
        policy: Policy | None = None,
    ) -> SplitStep:
        """Announces a decode step to all the daemons; as `Client.begin_step`."""
        return SplitStep(self, sequences, token_count, policy)

    def decode(self, *, timeout: float | None = None) -> SplitStream:
        """Opens a stream of decode steps to each daemon; as `Client.decode`."""
        return SplitStream(self, timeout)

    # The daemons.

    def get_server_info(self) -> ServerInfo:
        """Asks the daemons what they are."""
        return _whole_info(self.each(lambda client: client.get_server_info(), self.clients))

    def statistics(self, model: Model | str = "") -> list[spillway.Statistics]:
        """Memory and work of each daemon, in their order."""
        return self.each(lambda client: client.statistics(model), self.clients)

    def health(self) -> bool:
        """Whether all the daemons say that they serve."""
        try:
            return all(self.each(lambda client: client.health(), self.clients))
        except (Unavailable, Cancelled):
            return False


def _whole_info(infos: SequenceABC[ServerInfo]) -> ServerInfo:
    first = infos[0]
    stores = [info.store_id for info in infos]
    limits = {
        field.name: min(getattr(info.limits, field.name) for info in infos)
        for field in dataclasses.fields(first.limits)
    }
    return dataclasses.replace(
        first,
        boot_id=",".join(info.boot_id for info in infos),
        # Rows of which a part is gone are no use.
        store_id=",".join(stores) if all(stores) else "",
        devices=tuple(device for info in infos for device in info.devices),
        limits=dataclasses.replace(first.limits, **limits),
        region_socket="",
    )
