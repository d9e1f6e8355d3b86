"""KV caches on several Spillway daemons."""

from spillway_cluster.client import SplitClient
from spillway_cluster.sequence import SplitSequence
from spillway_cluster.shares import Share, deal
from spillway_cluster.step import SplitStep
from spillway_cluster.stream import SplitStream

__all__ = ["Share", "SplitClient", "SplitSequence", "SplitStep", "SplitStream", "deal"]
