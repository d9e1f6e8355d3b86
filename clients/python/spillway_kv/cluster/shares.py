"""Which layers and KV heads of a model are on which daemon."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from spillway_kv.policy import Policy


@dataclass(frozen=True)
class Share:
    """The part of a model that one daemon holds.

    Attributes:
        layers: Its layers, as numbers of the whole model.
        kv_heads: Its KV heads, as numbers of the whole model.
    """

    layers: range
    kv_heads: range

    def local(self, layer: int) -> int:
        """The daemon's number of a layer of the whole model."""
        return layer - self.layers.start

    @property
    def heads(self) -> slice:
        """The part of an array of all KV heads that it holds."""
        return slice(self.kv_heads.start, self.kv_heads.stop)

    def query_heads(self, group: int) -> slice:
        """The query heads that read its KV heads, with `group` per KV head."""
        return slice(self.kv_heads.start * group, self.kv_heads.stop * group)


def local_policy(policy: Policy | None, share: Share) -> Policy | None:
    """Converts a policy to the layer numbers of a daemon with a share."""
    if policy is None or policy.dense_layers is None:
        return policy
    dense = [share.local(layer) for layer in policy.dense_layers if layer in share.layers]
    return dataclasses.replace(policy, dense_layers=dense)


def even_ranges(count: int, part_count: int) -> list[range]:
    """Splits range(count) into parts of about equal size, the larger ones first."""
    small, larger = divmod(count, part_count)
    bounds = [part * small + min(part, larger) for part in range(part_count + 1)]
    return [range(a, b) for a, b in zip(bounds, bounds[1:], strict=False)]


def deal(
    layer_count: int, kv_head_count: int, daemon_count: int, layer_groups: int = 1
) -> list[Share]:
    """Splits a model over daemons.

    Args:
        layer_count: Layers of the model.
        kv_head_count: KV heads of the model.
        daemon_count: Number of daemons, a multiple of `layer_groups`.
        layer_groups: Number of groups of consecutive layers. Each group has the same number of
            daemons, which share its KV heads.

    Returns:
        The shares of the daemons, ordered by layers and then by heads.

    Raises:
        ValueError: There are more daemons than KV heads or layers.
    """
    if not 1 <= layer_groups <= layer_count:
        raise ValueError(f"layer_groups {layer_groups} is not in [1, {layer_count}], the layers")
    if daemon_count < 1 or daemon_count % layer_groups:
        raise ValueError(
            f"{daemon_count} daemons cannot be split evenly over {layer_groups} groups of layers"
        )
    head_parts = daemon_count // layer_groups
    if head_parts > kv_head_count:
        raise ValueError(
            f"{head_parts} daemons cannot share {kv_head_count} KV heads: each needs at least one"
        )
    return [
        Share(layers, heads)
        for layers in even_ranges(layer_count, layer_groups)
        for heads in even_ranges(kv_head_count, head_parts)
    ]
