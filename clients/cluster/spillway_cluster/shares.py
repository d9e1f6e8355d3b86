"""Which layers and KV heads of a model lie on which daemon."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Share:
    """What one daemon holds of a model.

    Attributes:
        layers: Of the whole model.
        kv_heads: Of the whole model.
    """

    layers: range
    kv_heads: range

    def local(self, layer: int) -> int:
        """What the daemon calls a layer of the whole model."""
        return layer - self.layers.start

    @property
    def heads(self) -> slice:
        """Its KV heads, of an array that has all of them."""
        return slice(self.kv_heads.start, self.kv_heads.stop)

    def query_heads(self, group: int) -> slice:
        """The query heads that read its KV heads, `group` each."""
        return slice(self.kv_heads.start * group, self.kv_heads.stop * group)


def even_ranges(count: int, part_count: int) -> list[range]:
    """Cuts range(count) into parts as even as they go, the larger ones first."""
    small, larger = divmod(count, part_count)
    bounds = [part * small + min(part, larger) for part in range(part_count + 1)]
    return [range(a, b) for a, b in zip(bounds, bounds[1:], strict=False)]


def deal(
    layer_count: int, kv_head_count: int, daemon_count: int, layer_groups: int = 1
) -> list[Share]:
    """Deals a model out.

    Args:
        layer_count: Of the model.
        kv_head_count: Of the model.
        daemon_count: Daemons; a multiple of `layer_groups`.
        layer_groups: Groups of consecutive layers. Each has as many daemons, which share its
            KV heads.

    Returns:
        The daemons' shares, by layers and then by heads.

    Raises:
        ValueError: There are more daemons than KV heads or layers to deal.
    """
    if not 1 <= layer_groups <= layer_count:
        raise ValueError(f"layer_groups {layer_groups} is not in [1, {layer_count}], the layers")
    if daemon_count < 1 or daemon_count % layer_groups:
        raise ValueError(
            f"{daemon_count} daemons cannot be dealt to {layer_groups} groups of layers evenly"
        )
    head_parts = daemon_count // layer_groups
    if head_parts > kv_head_count:
        raise ValueError(
            f"{head_parts} daemons cannot share {kv_head_count} KV heads: at most one each"
        )
    return [
        Share(layers, heads)
        for layers in even_ranges(layer_count, layer_groups)
        for heads in even_ranges(kv_head_count, head_parts)
    ]
