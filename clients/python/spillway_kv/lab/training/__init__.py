"""Trains the hash functions for the selector `hamming`."""

from spillway_kv.lab.training.hash_mlp import HashMlp, Hyperplanes, describe_hash, save_hash
from spillway_kv.lab.training.published import import_hata, import_spotlight
from spillway_kv.lab.training.traces import Sample, Traces, collect, read_text
from spillway_kv.lab.training.trainer import LayerResult, Training, train_layer

__all__ = [
    "HashMlp",
    "Hyperplanes",
    "LayerResult",
    "Sample",
    "Traces",
    "Training",
    "collect",
    "describe_hash",
    "import_hata",
    "import_spotlight",
    "read_text",
    "save_hash",
    "train_layer",
]
