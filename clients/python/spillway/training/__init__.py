"""Trains the hash functions that `Selector hamming` ranks keys by.

Needs torch, transformers and safetensors: `pip install 'spillway[train]'`.
"""

from spillway.training.hash_mlp import HashMlp, Hyperplanes, describe_hash, save_hash
from spillway.training.published import import_hata, import_spotlight
from spillway.training.traces import Sample, Traces, collect, read_text
from spillway.training.trainer import LayerResult, Training, train_layer

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
