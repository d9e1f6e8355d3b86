"""The models of a cluster, and their parts, which are created on daemons on demand."""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import spillway_kv
from spillway_kv.cluster.connection import ClusterConnection, may_have
from spillway_kv.cluster.model_parts import created_part, ensure_part, upload_part, whole_model
from spillway_kv.cluster.placement import Dealt, check_id, part_name, whole_of
from spillway_kv.cluster.shares import deal
from spillway_kv.cluster.weights import WeightsFile
from spillway_kv.errors import Cancelled, NotFound, SpillwayError, Unavailable
from spillway_kv.results import Model
from spillway_kv.sinks import sink_rows

T = TypeVar("T")


class Models:
    """Creates, finds and deletes models, and their parts on daemons. Thread-safe."""

    def __init__(self, connection: ClusterConnection) -> None:
        self._wire = connection
        self.placement = connection.placement
        self._known: dict[str, Dealt] = {}
        # Parts that are known to be on a daemon, and ready if the model is: (daemon, name of the
        # part, `Dealt.made` of the model).
        self._there: set[tuple[str, str, str]] = set()

    def create(
        self,
        model_id: str = "",
        *,
        layer_count: int,
        kv_head_count: int,
        part_count: int | None = None,
        layer_groups: int | None = None,
        **options: Any,
    ) -> Model:
        """As `ClusterClient.create_model`."""
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
        # Cut into the shares of the parts, also for daemons that join later.
        options["sink_logits"] = sink_rows(options.get("sink_logits"), layer_count, query_heads)
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
        self._known[name] = dealt
        self._note(dealt, zip(daemons, (part.name for _, part in created), strict=True))
        return whole

    def _note(self, dealt: Dealt, parts: Iterable[tuple[str, str]]) -> None:
        """Notes that daemons have parts."""
        if dealt.model.ready:
            self._there |= {(daemon, name, dealt.made) for daemon, name in parts}

    def get(self, name: str) -> Model:
        """As `ClusterClient.get_model`."""
        dealt = self.placement.dealt(name)
        if dealt is None:
            raise NotFound(f"there is no {name}")
        self._known[name] = dealt
        return dealt.model

    def knows(self, name: str) -> bool:
        """Whether a model is known, perhaps from before another client has deleted it."""
        return name in self._known

    def described(self, model: str, *, anew: bool = False) -> Dealt:
        """Returns a model, and how it is split.

        Args:
            model: Resource name of the model.
            anew: Ask again even if it is known, because another client may have created it again.
        """
        if anew or model not in self._known:
            self.get(model)
        return self._known[model]

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

    def upload_hash_weights(self, model: str, path: str | Path, timeout: float | None) -> Model:
        """As `ClusterClient.upload_hash_weights`."""
        dealt = self.described(model, anew=True)
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
        self._known[dealt.model.name] = dealt
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

        self._wire.each(tried, self.placement.daemons())

    def listed(self) -> Iterator[Model]:
        """As `ClusterClient.list_models`."""
        listed = self._wire.each(
            lambda daemon: [each.name for each in self.placement.client(daemon).list_models()],
            self.placement.daemons(),
        )
        for name in sorted({whole_of(name)[0] for names in listed for name in names}):
            dealt = self.placement.dealt(name)
            if dealt is not None:
                yield dealt.model

    def delete(self, name: str) -> None:
        """As `ClusterClient.delete_model`."""
        count = self.described(name, anew=True).part_count
        restarting = self.placement.restarting()
        daemons = self._wire.serving()
        if restarting:
            raise may_have(restarting, name)
        parts = [
            (daemon, part_name(name, number, count))
            for daemon in daemons
            for number in range(count)
        ]
        # Asked first, because a daemon without sequences of the model would delete its part.
        self._wire.each(self._check_unused, parts)
        self._wire.gone(lambda part: self.placement.client(part[0]).delete_model(part[1]), parts)
        self.placement.drop_model(name)
        dealt = self._known.pop(name, None)
        if dealt is not None:
            self._there.difference_update((*part, dealt.made) for part in parts)

    def _check_unused(self, place: tuple[str, str]) -> None:
        daemon, part = place
        with contextlib.suppress(NotFound):
            for info in self.placement.client(daemon).list_sequences(part):
                raise spillway_kv.FailedPrecondition(
                    f"{part} has sequences on {daemon}, such as {info.name}", reason="MODEL_IN_USE"
                )
