"""The models of a cluster's client, and their parts, which are created on daemons on demand."""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as SequenceABC
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import spillway_kv
from spillway_kv.cluster.model_parts import created_part, ensure_part, upload_part, whole_model
from spillway_kv.cluster.placement import Dealt, Placement, check_id, part_name, whole_of
from spillway_kv.cluster.shares import deal
from spillway_kv.cluster.weights import WeightsFile
from spillway_kv.errors import Cancelled, NotFound, SpillwayError, Unavailable
from spillway_kv.results import Model

T = TypeVar("T")
X = TypeVar("X")

# Most calls to daemons that one client has in progress.
_THREADS_MAX = 64


class ClusterModels:
    """The model calls of `ClusterClient`, and its calls to several daemons at once. Thread-safe.

    Attributes:
        placement: The daemons, and which sequences are on them.
        target: Target to which the client was connected.
    """

    def __init__(self, placement: Placement, target: str) -> None:
        self.placement = placement
        self.target = target
        self._threads = ThreadPoolExecutor(_THREADS_MAX, "spillway-cluster")
        self._models: dict[str, Dealt] = {}
        # Parts that are known to be on a daemon, and ready if the model is: (daemon, name of the
        # part, `Dealt.made` of the model).
        self._there: set[tuple[str, str, str]] = set()

    def each(self, call: Callable[[X], T], of: Iterable[X]) -> list[T]:
        """Makes a call for each element, all at the same time, and waits for all of them.

        Raises:
            SpillwayError: The first error, in the order of the elements, after all calls have
                ended.
        """
        all_of = list(of)
        if not all_of:
            return []
        first, *others = all_of
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
        if part_count is None:
            part_count = self.placement.part_count
        if layer_groups is None:
            layer_groups = self.placement.layer_groups
        shares = deal(layer_count, kv_head_count, part_count, layer_groups)
        for name in ("first_layer", "first_kv_head"):
            if options.pop(name, 0):
                raise ValueError(f"{name}: not for a cluster, which splits whole models itself")
        query_heads = options["query_head_count"]
        if query_heads % kv_head_count:
            raise spillway_kv.InvalidArgument(
                f"query_head_count {query_heads} is not a multiple of kv_head_count {kv_head_count}"
            )
        # All parts have the same id, so it is chosen here.
        model_id = model_id or f"model-{secrets.token_hex(8)}"
        check_id(model_id)
        name = f"models/{model_id}"
        if self.placement.dealt(name) is not None:
            raise spillway_kv.AlreadyExists(f"{name} exists")
        created: list[tuple[spillway_kv.Client, Model]] = []
        daemons = self.placement.choose(part_count, "")
        try:
            for number, (daemon, share) in enumerate(zip(daemons, shares, strict=True)):
                client = self.placement.client(daemon)
                part = created_part(
                    client, part_name(model_id, number, part_count), share, kv_head_count, options
                )
                created.append((client, part))
                # Chosen by the first daemon if the caller names none. All parts have it.
                policy = options.get("policy") or spillway_kv.Policy()
                options["policy"] = dataclasses.replace(policy, seed=part.policy.seed)
            whole = whole_model(name, [part for _, part in created], shares)
            dealt = Dealt(whole, part_count, layer_groups, options, secrets.token_hex(8))
            self.placement.add_model(dealt)
        except BaseException:
            for client, part in created:
                with contextlib.suppress(SpillwayError):
                    client.delete_model(part)
            raise
        self._models[name] = dealt
        self._note(dealt, zip(daemons, (part.name for _, part in created), strict=True))
        return whole

    def _note(self, dealt: Dealt, parts: Iterable[tuple[str, str]]) -> None:
        """Notes that daemons have parts."""
        if dealt.model.ready:
            self._there |= {(daemon, name, dealt.made) for daemon, name in parts}

    def get_model(self, name: str) -> Model:
        """Returns a model by its resource name.

        Raises:
            NotFound: No such model is recorded.
        """
        dealt = self.placement.dealt(name)
        if dealt is None:
            raise NotFound(f"there is no {name}")
        self._models[name] = dealt
        return dealt.model

    def described(self, model: str, *, anew: bool = False) -> Dealt:
        """Returns a model, and how it is split.

        Args:
            model: Resource name of the model.
            anew: Ask again even if it is known, because another client may have created it again.
        """
        if anew or model not in self._models:
            self.get_model(model)
        return self._models[model]

    def _ensure(self, dealt: Dealt, number: int, daemon: str) -> str:
        """Makes sure that a daemon has a part of a model. Returns the part's name."""
        name = part_name(dealt.model.name, number, dealt.part_count)
        if (daemon, name, dealt.made) not in self._there:
            ensure_part(self.placement.client(daemon), dealt, number)
        self._note(dealt, [(daemon, name)])
        return name

    def with_part(self, dealt: Dealt, number: int, daemon: str, use: Callable[[str], T]) -> T:
        """Calls with the name of a model's part, which the daemon then has."""
        part = self._ensure(dealt, number, daemon)
        try:
            return use(part)
        except NotFound as error:
            if error.reason != "MODEL_NOT_FOUND" or not self._is_recorded(dealt):
                raise
        # The model was to be deleted, which another daemon has refused after this one deleted it.
        self._there.discard((daemon, part, dealt.made))
        return use(self._ensure(dealt, number, daemon))

    def _is_recorded(self, dealt: Dealt) -> bool:
        recorded = self.placement.dealt(dealt.model.name)
        return recorded is not None and recorded.made == dealt.made

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
        dealt = self.described(model if isinstance(model, str) else model.name, anew=True)
        weights = WeightsFile.of(path)
        if dealt.weights is None:
            if dealt.model.ready:
                raise spillway_kv.FailedPrecondition(
                    f"{dealt.model.name} does not wait for hash weights"
                )
            dealt = self._uploaded(dealt, weights, timeout)
        elif dealt.weights.sha256 != weights.sha256:
            raise spillway_kv.FailedPrecondition(
                f"{dealt.model.name} already has the hash weights of {dealt.weights.path}, and "
                "this file has other bytes"
            )
        self._models[dealt.model.name] = dealt
        self._spread(dealt, timeout)
        return dealt.model

    def _uploaded(self, dealt: Dealt, weights: WeightsFile, timeout: float | None) -> Dealt:
        """Uploads weights to one daemon for each part. Returns the model with them."""
        daemons = self.placement.choose(dealt.part_count, "", dealt)
        ready = dataclasses.replace(
            dealt, model=dataclasses.replace(dealt.model, ready=True), weights=weights
        )
        try:
            for number, daemon in enumerate(daemons):
                client = self.placement.client(daemon)
                name = ensure_part(client, dealt, number)
                if not client.get_model(name).ready:
                    upload_part(client, ready, number, timeout=timeout)
            self.placement.note_weights(ready)
        except BaseException:
            # Parts that have these weights accept no others, so they are created again.
            for number, daemon in enumerate(daemons):
                client = self.placement.client(daemon)
                with contextlib.suppress(SpillwayError):
                    part = client.get_model(part_name(dealt.model.name, number, dealt.part_count))
                    if part.ready:
                        client.delete_model(part)
                        ensure_part(client, dealt, number)
            raise
        return ready

    def _spread(self, dealt: Dealt, timeout: float | None) -> None:
        """Uploads a model's weights to all daemons, for every part that they may get."""

        def one(daemon: str) -> None:
            client = self.placement.client(daemon)
            for number in range(dealt.part_count):
                ensure_part(client, dealt, number, timeout=timeout)

        def tried(daemon: str) -> None:
            # A daemon that does not answer gets them before its first sequence of the model.
            with contextlib.suppress(Unavailable, Cancelled):
                one(daemon)

        self.each(tried, self.placement.daemons())

    def list_models(self) -> Iterator[Model]:
        """Yields every recorded model of which a daemon has a part, ordered by name."""
        listed = self.each(
            lambda daemon: [each.name for each in self.placement.client(daemon).list_models()],
            self.placement.daemons(),
        )
        for name in sorted({whole_of(name)[0] for names in listed for name in names}):
            dealt = self.placement.dealt(name)
            if dealt is not None:
                yield dealt.model

    def serving(self) -> list[str]:
        """Returns the names of the daemons that serve.

        Raises:
            Unavailable: There are none.
        """
        daemons = self.placement.daemons()
        if not daemons:
            raise Unavailable(f"no daemon of {self.target} serves")
        return daemons

    def may_have(self, restarting: SequenceABC[str], name: str) -> Unavailable:
        """Returns the error if something may be on daemons that are being restarted."""
        return Unavailable(f"{', '.join(restarting)}, which may have {name}, is being restarted")

    def delete_model(self, model: Model | str) -> None:
        """Deletes all parts of a model.

        Raises:
            NotFound: No daemon has a part.
            FailedPrecondition: It has sequences.
            Unavailable: A daemon is being restarted, and may have a part that would stay.
        """
        name = model if isinstance(model, str) else model.name
        count = self.described(name, anew=True).part_count
        restarting = self.placement.restarting()
        daemons = self.serving()
        if restarting:
            raise self.may_have(restarting, name)
        parts = [
            (daemon, part_name(name, number, count))
            for daemon in daemons
            for number in range(count)
        ]
        # Asked first, because a daemon without sequences of the model would delete its part.
        self.each(self._check_unused, parts)
        self.gone(lambda part: self.placement.client(part[0]).delete_model(part[1]), parts)
        self.placement.drop_model(name)
        dealt = self._models.pop(name, None)
        if dealt is not None:
            self._there.difference_update((*part, dealt.made) for part in parts)

    def _check_unused(self, place: tuple[str, str]) -> None:
        daemon, part = place
        with contextlib.suppress(NotFound):
            for info in self.placement.client(daemon).list_sequences(part):
                raise spillway_kv.FailedPrecondition(
                    f"{part} has sequences on {daemon}, such as {info.name}", reason="MODEL_IN_USE"
                )

    def gone(self, delete: Callable[[X], None], of: Iterable[X]) -> None:
        """Deletes parts. Parts that do not exist are an error only if none exists.

        Parts on a daemon that is lost count as deleted.
        """

        def one(part: X) -> NotFound | None:
            try:
                delete(part)
            except NotFound as error:
                return error
            except Unavailable as error:
                if error.reason != "DAEMON_LOST":
                    raise
            return None

        missing = self.each(one, of)
        if missing and all(error is not None for error in missing):
            assert missing[0] is not None
            raise missing[0]
