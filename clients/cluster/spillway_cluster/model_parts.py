"""The parts of a model. Each part is an ordinary model of one daemon."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from collections.abc import Sequence as SequenceABC
from typing import Any

import spillway
from spillway.errors import NotFound
from spillway.results import Model

from spillway_cluster.placement import Dealt, part_name
from spillway_cluster.sequence import local_policy
from spillway_cluster.shares import Share
from spillway_cluster.weights import weights_of


def ensure_part(
    client: spillway.Client, dealt: Dealt, number: int, *, timeout: float | None = None
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
        FailedPrecondition: The options with which the model was created are not known, or the file
            with its weights is not on this host.
    """
    name = part_name(dealt.model.name, number, dealt.part_count)
    try:
        part = client.get_model(name)
    except NotFound:
        if dealt.options is None:
            raise spillway.FailedPrecondition(
                f"{client.target} has no {name}, and how that was created is not known"
            ) from None
        try:
            part_id = name.removeprefix("models/")
            kv_heads = dealt.model.kv_head_count
            part = created_part(client, part_id, dealt.shares[number], kv_heads, dealt.options)
        except spillway.AlreadyExists:
            part = client.get_model(name)  # another client has created it meanwhile
    if dealt.weights is not None and not part.ready:
        dealt.weights.check()
        try:
            upload_part(client, dealt, number, timeout=timeout)
        except spillway.FailedPrecondition:
            if not client.get_model(name).ready:
                raise
            # Another client has uploaded them meanwhile.
    return name


def upload_part(
    client: spillway.Client, dealt: Dealt, number: int, *, timeout: float | None
) -> None:
    """Uploads the weights of a daemon's part of a model. Arguments as for `ensure_part`."""
    assert dealt.weights is not None
    name = part_name(dealt.model.name, number, dealt.part_count)
    with weights_of(dealt.weights.path, dealt.model, dealt.shares[number]) as path:
        client.upload_hash_weights(name, path, timeout=timeout)


def created_part(
    client: spillway.Client,
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
        },
    )


def whole_model(name: str, parts: SequenceABC[Model], shares: SequenceABC[Share]) -> Model:
    """Returns the description of the whole model that consists of these parts."""
    first = parts[0]
    kv_head_count = max(share.kv_heads.stop for share in shares)
    return dataclasses.replace(
        first,
        name=name,
        layer_count=max(share.layers.stop for share in shares),
        kv_head_count=kv_head_count,
        query_head_count=kv_head_count * first.query_head_count // first.kv_head_count,
        first_layer=0,
        first_kv_head=0,
        ready=all(part.ready for part in parts),
        row_bytes_per_token=sum(part.row_bytes_per_token for part in parts),
        index_bytes_per_token=sum(part.index_bytes_per_token for part in parts),
    )
