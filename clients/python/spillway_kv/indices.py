"""Data that a model stores for every key, to choose rows."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields

from spillway_kv._proto import model_service_pb2


@dataclass(frozen=True)
class RotationHash:
    """Codes from a random rotation with a seed. They need no training.

    Attributes:
        bits_per_dim: Bits per dimension of a key's code, in [1, 4].
        seed: Seed of the rotations.
        raw_keys: Whether codes are computed from the keys themselves. Otherwise the centre of
            the page is subtracted first.
        value_bits: Bits per dimension of the codes of values, in [0, 3]. With them, the codes
            answer for all tokens, and the rows that are read correct the answer: fewer rows are
            read. Attends take longer, unless the link to a GPU is the limit. 0 means none.
    """

    bits_per_dim: int = 3
    seed: int = 0
    raw_keys: bool = False
    value_bits: int = 0


@dataclass(frozen=True)
class MlpHash:
    """Codes from trained MLPs, for every layer. See `Client.upload_hash_weights`.

    Attributes:
        hash_bits: Bits of the code of an MLP, a multiple of 32 in [32, 1024]. With
            `per_query_head`, all codes of a key together (query_head_count // kv_head_count of
            them) may have 1024 bits.
        hidden_dim: Width of the hidden layers, in [1, 4096]. None means head_dim.
        residual: Whether each layer's input is added to its output.
        per_query_head: Whether there is one MLP per query head, each with its own code of a key,
            instead of one per KV head.
        raw_keys: Whether the keys themselves are hashed. Otherwise the mean of the KV head's
            first 1,024 keys is subtracted first.
        hidden_layer_count: 1, or 2 as in HashAttention.
        query_weights: Whether queries have their own MLPs, one per query head.
    """

    hash_bits: int = 128
    hidden_dim: int | None = None
    residual: bool = False
    per_query_head: bool = False
    raw_keys: bool = False
    hidden_layer_count: int = 1
    query_weights: bool = False


HashWeights = RotationHash | MlpHash


@dataclass(frozen=True)
class KeyIndices:
    """Additional data that is stored for every key, for the selectors and tails that need it.

    Attributes:
        int4_keys: Whether the key is stored with 4 bits per element, for selector `int4_keys`.
        quest_page_token_count: Number of tokens per page with bounds of its keys: 16, 32, 64 or
            128, for selector `quest`. 0 for none.
        label_channel_count: Number of channels of a key that are stored with 4 bits, a multiple
            of 8 in [8, head_dim], for selector `double_sparsity`. 0 for none.
            `Client.upload_hash_weights` says which channels.
        lsh_table_count: Number of LSH tables, in [1, 512], for tail `lsh_sampling`. 0 for none.
        lsh_bits: Bits of a bucket index in each table, in [1, 16].
        lsh_seed: Seed of the random projections of LSH.
    """

    int4_keys: bool = False
    quest_page_token_count: int = 0
    label_channel_count: int = 0
    lsh_table_count: int = 0
    lsh_bits: int = 0
    lsh_seed: int = 0

    def to_proto(self) -> model_service_pb2.KeyIndices:
        """Returns the message `spillway.v1.KeyIndices`."""
        return model_service_pb2.KeyIndices(**asdict(self))

    @classmethod
    def from_proto(cls, message: model_service_pb2.KeyIndices) -> KeyIndices:
        """Reads a `spillway.v1.KeyIndices`."""
        return cls(**{field.name: getattr(message, field.name) for field in fields(cls)})


def value_code_bytes(head_dim: int, value_bits: int) -> float:
    """Returns the bytes of a value's codes and factor, and its share of the centre of its page.

    Args:
        head_dim: Elements of a value.
        value_bits: As of a `RotationHash`.
    """
    if value_bits == 0:
        return 0.0
    page_token_count, element_bytes = 128, 2
    return head_dim * value_bits / 8 + 2 + head_dim * element_bytes / page_token_count


def hash_to_proto(weights: HashWeights | None) -> model_service_pb2.HashWeights | None:
    """Returns the message `spillway.v1.HashWeights`. Fields that are None stay unset."""
    if weights is None:
        return None
    values = {name: value for name, value in asdict(weights).items() if value is not None}
    message = model_service_pb2.HashWeights()
    kind = message.rotation if isinstance(weights, RotationHash) else message.mlp
    kind.SetInParent()
    for name, value in values.items():
        setattr(kind, name, value)
    return message


def hash_from_proto(message: model_service_pb2.HashWeights) -> HashWeights | None:
    """Reads a `spillway.v1.HashWeights` as the daemon returns it."""
    kind = message.WhichOneof("kind")
    if kind is None:
        return None
    cls = RotationHash if kind == "rotation" else MlpHash
    values = getattr(message, kind)
    return cls(**{field.name: getattr(values, field.name) for field in fields(cls)})
