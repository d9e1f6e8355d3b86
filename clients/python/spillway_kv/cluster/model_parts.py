"""The parts of a model. Each part is an ordinary model of one daemon."""

from __future__ import annotations

import dataclasses
import reprlib
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as SequenceABC
from typing import Any

import spillway_kv
from spillway_kv.cluster.placement import Dealt, part_name
from spillway_kv.cluster.shares import Share, local_policy
from spillway_kv.cluster.weights import weights_of
from spillway_kv.errors import NotFound
from spillway_kv.results import Model

# Fields of a model that follow from the others and from the share, or change with an upload.
_OF_THE_SHARE = ("ready", "row_bytes_per_token", "index_bytes_per_token")


def ensure_part(
    client: spillway_kv.Client, dealt: Dealt, number: int, *, timeout: float | None = None
) -> str:
    """Creates a part of a model if a daemon does not have it, and uploads its weights.

    Args:
        client: Client of the daemon.
        dealt: The model.
        number: Index of the part.
        timeout: Seconds for an upload. None means the client's timeout.

    Returns:
        Name of the part.

    Raises:
        FailedPrecondition: The daemon has another model with the part's name, or the file with its
            weights is not on this host.
    """
    name = part_name(dealt.model.name, number, dealt.part_count)
    try:
        part = client.get_model(name)
    except NotFound:
        try:
            part_id = name.removeprefix("models/")
            kv_heads = dealt.model.kv_head_count
            part = created_part(client, part_id, dealt.shares[number], kv_heads, dealt.options)
        except spillway_kv.AlreadyExists:
            part = client.get_model(name)  # another client has created it meanwhile
    _check(client, part, dealt, number)
    if dealt.weights is not None and not part.ready:
        dealt.weights.check()
        try:
            upload_part(client, dealt, number, timeout=timeout)
        except spillway_kv.FailedPrecondition:
            if not client.get_model(name).ready:
                raise
            # Another client has uploaded them meanwhile.
    return name


def _check(client: spillway_kv.Client, part: Model, dealt: Dealt, number: int) -> None:
    """Raises FailedPrecondition if a daemon's model is not this part, but left by an earlier model.

    The policy is compared except for the dense layers, which every part numbers differently.
    """
    whole, share = dealt.model, dealt.shares[number]
    group = whole.query_head_count // whole.kv_head_count
    expected = dataclasses.replace(
        whole,
        name=part.name,
        layer_count=len(share.layers),
        query_head_count=len(share.kv_heads) * group,
        kv_head_count=len(share.kv_heads),
        first_layer=share.layers.start,
        first_kv_head=share.kv_heads.start,
        sink_logits=_sinks_of(whole.sink_logits, share, group),
        policy=dataclasses.replace(whole.policy, dense_layers=part.policy.dense_layers),
    )
    for name, there, wanted in _differences(part, expected):
        if name not in _OF_THE_SHARE:
            # Sink logits may be thousands.
            values = f"{reprlib.repr(there)} and not {reprlib.repr(wanted)}"
            raise spillway_kv.FailedPrecondition(
                f"{client.target} has an older {part.name}, with {name} {values}: delete it there, "
                f"with spillway_kv.connect({client.target!r}).delete_model({part.name!r})"
            )


def _sinks_of(
    logits: tuple[tuple[float, ...], ...], share: Share, group: int
) -> tuple[tuple[float, ...], ...]:
    """Returns the sink logits of a share, from those of the whole model."""
    layers = logits[share.layers.start : share.layers.stop]
    return tuple(row[share.query_heads(group)] for row in layers)


def _differences(there: Any, wanted: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yields the fields in which two dataclasses differ, with both values."""
    for field in dataclasses.fields(wanted):
        one, other = getattr(there, field.name), getattr(wanted, field.name)
        if type(one) is type(other) and dataclasses.is_dataclass(one):
            for name, *values in _differences(one, other):
                yield f"{field.name}.{name}", *values
        elif one != other:
            yield field.name, one, other


def upload_part(
    client: spillway_kv.Client, dealt: Dealt, number: int, *, timeout: float | None
) -> None:
    """Uploads the weights of a daemon's part of a model. Arguments as for `ensure_part`."""
    assert dealt.weights is not None
    name = part_name(dealt.model.name, number, dealt.part_count)
    with weights_of(dealt.weights.path, dealt.model, dealt.shares[number]) as path:
        client.upload_hash_weights(name, path, timeout=timeout)


def created_part(
    client: spillway_kv.Client,
    part_id: str,
    share: Share,
    kv_head_count: int,
    options: Mapping[str, Any],
) -> Model:
    """Creates a part of a model on a daemon."""
    group = options["query_head_count"] // kv_head_count
    return client.create_model(
        part_id,
        layer_count=len(share.layers),
        kv_head_count=len(share.kv_heads),
        first_layer=share.layers.start,
        first_kv_head=share.kv_heads.start,
        **{
            **options,
            "query_head_count": len(share.kv_heads) * group,
            "policy": local_policy(options.get("policy"), share),
            "sink_logits": _sinks_of(options.get("sink_logits", ()), share, group),
        },
    )


def whole_model(name: str, parts: SequenceABC[Model], shares: SequenceABC[Share]) -> Model:
    """Returns the description of the whole model that consists of these parts."""
    first = parts[0]
    kv_head_count = max(share.kv_heads.stop for share in shares)
    sinks: dict[int, tuple[float, ...]] = {}
    for part, share in zip(parts, shares, strict=True):
        for layer, row in zip(share.layers, part.sink_logits, strict=False):
            sinks[layer] = sinks.get(layer, ()) + row
    return dataclasses.replace(
        first,
        name=name,
        layer_count=max(share.layers.stop for share in shares),
        kv_head_count=kv_head_count,
        query_head_count=kv_head_count * first.query_head_count // first.kv_head_count,
        first_layer=0,
        first_kv_head=0,
        sink_logits=tuple(sinks[layer] for layer in sorted(sinks)),
        ready=all(part.ready for part in parts),
        row_bytes_per_token=sum(part.row_bytes_per_token for part in parts),
        index_bytes_per_token=sum(part.index_bytes_per_token for part in parts),
    )
