"""From a measured layer to a step of the whole model: its time, its memory, and what fits.

The model is of the shape of Llama 3.1 8B: 32 layers of 8 KV heads of 128 in bf16, and 16 GB of
weights, which a step reads once. Nothing else of the model's time is counted.
"""

from __future__ import annotations

from dataclasses import dataclass

LAYERS = 32
KV_HEADS = 8
DIM = 128
WEIGHT_BYTES = 16e9
GIB = 1 << 30
HOSTS_GIB = (256, 512)


@dataclass(frozen=True)
class WholeModel:
    """The machine and the model that a measured layer is scaled to.

    Attributes:
        gpu_bytes: Memory of the GPU, bytes.
        copy_bytes_per_s: What the GPU reads and writes in a second of a copy within its memory.
    """

    gpu_bytes: float
    copy_bytes_per_s: float

    @property
    def weights_us(self) -> float:
        """Time to read the weights once, microseconds."""
        return 1e6 * WEIGHT_BYTES / self.copy_bytes_per_s

    @property
    def free_bytes(self) -> float:
        """GPU memory beside the weights."""
        return self.gpu_bytes - WEIGHT_BYTES

    def step_us(self, layer_us: float) -> float:
        """A step of all layers. layer_us: of one layer, for all sequences."""
        return LAYERS * layer_us + self.weights_us

    def tokens_per_s(self, sequences: int, layer_us: float) -> float:
        """Tokens of all sequences in a second."""
        return 1e6 * sequences / self.step_us(layer_us)


def dense_bytes(tokens: int, element_bytes: int) -> int:
    """K/V of a sequence in all layers. element_bytes: 2 for bf16, 1 for FP8."""
    return 2 * LAYERS * KV_HEADS * DIM * tokens * element_bytes


def of_all_layers(byte_count: float, layers: int) -> int:
    """Bytes of all layers, from those of the measured ones."""
    return round(byte_count / layers * LAYERS)


def fitting(room: float, each: float) -> int:
    """How many sequences of `each` bytes fit `room` bytes."""
    if each <= 0:
        raise ValueError(f"a sequence takes {each} bytes, at least 1")
    return max(int(room // each), 0)


def ends(whole: WholeModel, tokens: int, row_bytes: dict[str, int]) -> dict[str, int]:
    """How many sequences fit, by way and what limits it.

    row_bytes: bytes of K/V of a token in host memory, in all layers, by row type.
    """
    found = {
        "dense bf16": fitting(whole.free_bytes, dense_bytes(tokens, 2)),
        "dense fp8": fitting(whole.free_bytes, dense_bytes(tokens, 1)),
    }
    for row_type, of_token in row_bytes.items():
        for gib in HOSTS_GIB:
            found[f"{row_type}, {gib} GiB"] = fitting(gib * GIB, of_token * tokens)
    return found
