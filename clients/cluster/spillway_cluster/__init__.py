"""KV caches on several Spillway daemons."""

from spillway_cluster.client import ClusterClient, SplitClient
from spillway_cluster.connect import connect
from spillway_cluster.sequence import ClusterSequence
from spillway_cluster.shares import Share, deal
from spillway_cluster.step import ClusterStep
from spillway_cluster.stream import ClusterStream

__all__ = [
    "ClusterClient",
    "ClusterSequence",
    "ClusterStep",
    "ClusterStream",
    "Share",
    "SplitClient",
    "connect",
    "deal",
]
