"""KV caches on several Spillway daemons."""

from spillway_kv.cluster.client import ClusterClient
from spillway_kv.cluster.connect import connect
from spillway_kv.cluster.sequence import ClusterSequence
from spillway_kv.cluster.shares import Share, deal
from spillway_kv.cluster.step import ClusterStep

__all__ = [
    "ClusterClient",
    "ClusterSequence",
    "ClusterStep",
    "Share",
    "connect",
    "deal",
]
