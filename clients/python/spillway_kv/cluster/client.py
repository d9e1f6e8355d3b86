"""A client of several daemons. Each sequence is on one of them, or in parts on several."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as SequenceABC
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, TypeVar

import spillway_kv
from spillway_kv.cluster.connection import ClusterConnection
from spillway_kv.cluster.models import Models
from spillway_kv.cluster.placement import Dealt, Placement, part_folder, part_name
from spillway_kv.cluster.sequence import ClusterSequence, attend
from spillway_kv.cluster.sequence_parts import SequenceParts
from spillway_kv.cluster.shares import local_policy
from spillway_kv.cluster.step import ClusterStep
from spillway_kv.errors import Cancelled, SpillwayError, Unavailable
from spillway_kv.policy import Policy
from spillway_kv.results import Model, SequenceInfo
from spillway_kv.server import ServerInfo
from spillway_kv.tensors import Array, OutDType

C = TypeVar("C", bound="ClusterClient")


class ClusterClient:
    """A client of several daemons, with the calls of `spillway_kv.Client`.

    A sequence is on one daemon as a whole, or it is split over several daemons by KV heads, and
    on request by layers too. It is never split by tokens. Calls that concern several daemons are
    sent to all of them at the same time. Outputs, heavy sets and certificates are bit-identical to
    those of one daemon with the whole model, unless the audit of a daemon has raised an
    inflation. Thread-safe.

    Attributes:
        placement: The daemons, and which sequences are on them.
        target: Target to which the client was connected.
        server_info: The info of one daemon, but with the devices of all daemons and their
            smallest limits, from the time when the client was created.
    """

    def __init__(self, placement: Placement, target: str) -> None:
        """Takes the placement over: closing the client closes it."""
        self._wire = ClusterConnection(placement, target)
        self._models = Models(self._wire)
        self._parts = SequenceParts(self._wire, self._models)
        self.placement = placement
        self.target = target
        self.server_info = self.get_server_info()

    def __enter__(self: C) -> C:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.target!r})"

    def close(self) -> None:
        """Closes the connections, as `Client.close` does."""
        self._wire.close()

    @property
    def clients(self) -> tuple[spillway_kv.Client, ...]:
        """One client for each daemon that serves now."""
        return tuple(self.placement.client(daemon) for daemon in self.placement.daemons())

    @property
    def transport(self) -> str:
        """`cluster`: several daemons, each with its best transport."""
        return "cluster"

    @property
    def step_transport(self) -> str:
        """Like `transport`. The client of each daemon has its own."""
        return "cluster"

    # Models.

    def create_model(
        self,
        model_id: str = "",
        *,
        layer_count: int,
        kv_head_count: int,
        part_count: int | None = None,
        layer_groups: int | None = None,
        **options: Any,
    ) -> Model:
        """Creates a model on the daemons that its next sequence would use, and later on others.

        Args:
            model_id: As for `Client.create_model`.
            layer_count: As for `Client.create_model`.
            kv_head_count: As for `Client.create_model`.
            part_count: Number of daemons that share each sequence. None means as given to
                `connect`, by default 1.
            layer_groups: Number of groups of consecutive layers. The KV heads of each group are
                split over `part_count / layer_groups` daemons. None means as given to `connect`, by
                default 1.
            **options: All other arguments of `Client.create_model`.

        Raises:
            ValueError: The model has fewer KV heads, or layers, than there are parts.
            SpillwayError: As for `Client.create_model`. No daemon that answers then keeps a part
                that this call has created.
        """
        return self._models.create(
            model_id,
            layer_count=layer_count,
            kv_head_count=kv_head_count,
            part_count=part_count,
            layer_groups=layer_groups,
            **options,
        )

    def get_model(self, name: str) -> Model:
        """Returns a model by its resource name.

        Raises:
            NotFound: No such model is recorded.
        """
        return self._models.get(name)

    def upload_hash_weights(
        self, model: Model | str, path: str | Path, *, timeout: float | None = None
    ) -> Model:
        """Uploads trained hash weights. Every daemon gets what its part needs.

        Arguments and errors are those of `Client.upload_hash_weights`. `path` has the weights of
        the whole model. The file must stay there, at the same path on all hosts: if a daemon joins
        later, or a part moves to a daemon, the client or node that needs the weights there reads
        them from the file. A second call with the same file uploads them to daemons that have
        joined meanwhile.

        Raises:
            FailedPrecondition: The model has other weights, or waits for none.
        """
        return self._models.upload_hash_weights(_name(model), path, timeout)

    def list_models(self) -> Iterator[Model]:
        """Yields every recorded model of which a daemon has a part, ordered by name."""
        return self._models.listed()

    def delete_model(self, model: Model | str) -> None:
        """Deletes all parts of a model.

        Raises:
            NotFound: No daemon has a part.
            FailedPrecondition: It has sequences.
            Unavailable: A daemon is being restarted, and may have a part that would stay.
        """
        self._models.delete(_name(model))

    # Sequences.

    def create_sequence(
        self,
        model: Model | str,
        sequence_id: str = "",
        *,
        policy: Policy | None = None,
        ttl: datetime.timedelta | float | None = None,
    ) -> ClusterSequence:
        """Creates an empty sequence, on the daemons with the most free memory.

        Raises:
            SpillwayError: As for `Client.create_sequence`. No daemon then keeps a part that this
                call has created.
        """

        def create(dealt: Dealt, number: int, daemon: str) -> spillway_kv.Sequence:
            return self._models.with_part(
                dealt,
                number,
                daemon,
                lambda part: self.placement.client(daemon).create_sequence(
                    part,
                    part_name(sequence_id, number, dealt.part_count),
                    policy=local_policy(policy, dealt.shares[number]),
                    ttl=ttl,
                ),
            )

        return self._placed(model, sequence_id, create)

    def _placed(
        self,
        model: Model | str,
        sequence_id: str,
        make: Callable[[Dealt, int, str], spillway_kv.Sequence],
    ) -> ClusterSequence:
        """Creates a sequence whose parts `make` creates."""
        return ClusterSequence(self._parts, self._parts.place(_name(model), sequence_id, make))

    def get_sequence(self, name: str) -> ClusterSequence:
        """Returns a handle of an existing sequence. If it is in parts, it must have been named.

        Raises:
            NotFound: There is no such sequence, or a daemon does not have its part.
        """
        return ClusterSequence(self._parts, self._parts.find(name))

    def load_sequence(
        self,
        folder: str | Path,
        sequence_id: str = "",
        *,
        model: Model | str,
        policy: Policy | None = None,
        **options: Any,
    ) -> tuple[ClusterSequence, bytes]:
        """Creates a sequence with the parts that `ClusterSequence.save` has saved.

        Arguments and errors are those of `Client.load_sequence`, but the model must be named.
        Each daemon reads the folder on its own host.
        """
        data: dict[int, bytes] = {}

        def load(dealt: Dealt, number: int, daemon: str) -> spillway_kv.Sequence:
            loaded, data[number] = self._models.with_part(
                dealt,
                number,
                daemon,
                lambda part: self.placement.client(daemon).load_sequence(
                    part_folder(folder, number, dealt.part_count),
                    part_name(sequence_id, number, dealt.part_count),
                    model=part,
                    policy=local_policy(policy, dealt.shares[number]),
                    **options,
                ),
            )
            return loaded

        return self._placed(model, sequence_id, load), data[0]

    def list_sequences(self, model: Model | str = "") -> Iterator[SequenceInfo]:
        """Yields the sequences of a model, ordered by name, or those of all models in turn.

        Sequences in parts without a name are left out, because they have other names on each
        daemon.
        """
        for each in [model] if model else list(self.list_models()):
            yield from self._parts.infos(_name(each))

    # Attention.

    def attend(
        self,
        layer: int,
        queries: Mapping[ClusterSequence, Array],
        policy: Policy | None = None,
        visible: Mapping[ClusterSequence, SequenceABC[int]] | None = None,
        *,
        out_dtype: OutDType | None = None,
        timeout: float | None = None,
        return_errors: bool = False,
    ) -> Any:
        """Attends at one layer for several sequences of one model, like `Client.attend`."""
        results = attend(self._wire, layer, queries, policy, visible or {}, out_dtype, timeout)
        if not return_errors:
            for result in results.values():
                if isinstance(result, SpillwayError):
                    raise result
        return results

    def begin_step(
        self,
        sequences: SequenceABC[ClusterSequence],
        *,
        token_count: int = 1,
        policy: Policy | None = None,
        starts: SequenceABC[int] | None = None,
    ) -> ClusterStep:
        """Announces a decode step to all the daemons, like `Client.begin_step`."""
        return ClusterStep(self.placement, sequences, token_count, policy, starts)

    def open_decoder(self, *_: Any, **__: Any) -> NoReturn:
        """Not supported: a decoder works only with one daemon.

        Raises:
            SpillwayError: Always, with UNIMPLEMENTED.
        """
        raise SpillwayError(
            "a cluster has no decoders: begin_step makes the same steps, and "
            "spillway_kv.connect(TARGET) of one daemon opens decoders (spillway-cluster status "
            "shows the targets)",
            code="UNIMPLEMENTED",
        )

    # The daemons.

    def get_server_info(self) -> ServerInfo:
        """Asks the daemons for their descriptions, and combines them.

        Raises:
            Unavailable: A daemon does not answer, or none serves.
        """
        return _whole_info(
            self._wire.each(
                lambda daemon: self.placement.client(daemon).get_server_info(), self._wire.serving()
            )
        )

    def statistics(self, model: Model | str = "") -> list[spillway_kv.Statistics]:
        """Statistics about the memory and the work of each daemon, in their order."""
        return self._wire.each(lambda client: client.statistics(model), self.clients)

    def health(self) -> bool:
        """Whether all daemons report that they are serving. False if there are none."""
        try:
            answers = self._wire.each(lambda client: client.health(), self.clients)
            return bool(answers) and all(answers)
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
        # If the rows of one part are gone, those of the others are of no use.
        store_id=",".join(stores) if all(stores) else "",
        devices=tuple(device for info in infos for device in info.devices),
        limits=dataclasses.replace(first.limits, **limits),
        region_socket="",
    )


def _name(model: Model | str) -> str:
    return model if isinstance(model, str) else model.name
