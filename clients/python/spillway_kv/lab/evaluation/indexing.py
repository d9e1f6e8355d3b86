"""The data that the daemon keeps of keys for a method, and files for uploads."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from spillway_kv.client import Client
from spillway_kv.indices import HashWeights, KeyIndices, MlpHash, RotationHash
from spillway_kv.lab.evaluation.setting import SAMPLING_SEED
from spillway_kv.lab.training.hash_mlp import HashMlp, Hyperplanes, describe_hash, save_hash
from spillway_kv.policy import Candidates, Policy, TopK, TopP
from spillway_kv.results import Model
from spillway_kv.row_types import RowType
from spillway_kv.transformers.support import Shapes


class NotServedError(RuntimeError):
    """The daemon does not support what a method needs."""


@dataclass(frozen=True)
class Index:
    """A model of the daemon, without its shapes.

    Attributes:
        hash_weights: How codes are computed. None means no codes.
        key_indices: Other data that is kept for every key.
        weights: Safetensors file of hash weights to upload.
        rotation_seed: For an `MlpHash` without a file: the weights are stacked random rotations
            with this seed, which is LSH with any number of bits.
        resident_sample_fraction: As in the model. None means the daemon's default.
        ungrouped: Whether every query head has its own keys, copies of those of its group.
        row_type: How rows are stored.
    """

    hash_weights: HashWeights | None = None
    key_indices: KeyIndices | None = None
    weights: Path | None = None
    rotation_seed: int | None = None
    resident_sample_fraction: float | None = None
    ungrouped: bool = False
    row_type: RowType = "model"

    def storing(self, row_type: RowType) -> Index | None:
        """Returns the same with other rows. None: the engine does not store rows of it so."""
        reads_keys = self.key_indices is not None or isinstance(self.hash_weights, MlpHash)
        if reads_keys and row_type != "model":
            return None
        return dataclasses.replace(self, row_type=row_type)

    def described(self) -> dict[str, Any]:
        """Returns what distinguishes it from others, for JSON."""
        told = dataclasses.asdict(self)
        told["kind"] = type(self.hash_weights).__name__
        if self.weights is not None:
            told["weights"] = [self.weights.name, self.weights.stat().st_size]
        if self.row_type == "model":
            # As before there were others, so that earlier results are found.
            del told["row_type"]
        return told


def stacked_rotations(hash_bits: int, head_dim: int, raw_keys: bool = False) -> Index:
    """LSH with any number of bits: the signs of projections on columns of random rotations."""
    weights = MlpHash(hash_bits=hash_bits, hidden_dim=2 * head_dim, raw_keys=raw_keys)
    return Index(weights, rotation_seed=0)


def index_of_file(path: Path) -> Index:
    """Returns the index for a file with hash weights that describes itself."""
    return Index(describe_hash(path), weights=path)


def write_rotations(path: Path, described: MlpHash, shapes: Shapes, seed: int) -> None:
    """Writes random rotations in the form of MLPs that compute them."""
    tensors: dict[str, torch.Tensor] = {}
    for layer in range(shapes.layer_count):
        own_seed = seed * shapes.layer_count + layer
        rotations = Hyperplanes(shapes.head_dim, described.hash_bits, own_seed, torch.device("cpu"))
        planes = rotations.planes.expand(shapes.kv_head_count, -1, -1)
        tensors |= HashMlp.linear(planes).tensors(layer)
    save_hash(path, tensors, shapes.layer_count, described)


def write_channels(path: Path, channels: torch.Tensor) -> None:
    """Writes label channels [layers, H_kv, r]."""
    tensors = {
        f"layers.{layer}.channels": chosen.to(torch.int32).contiguous()
        for layer, chosen in enumerate(channels)
    }
    part = path.with_name(path.name + ".part")
    save_file(tensors, part)
    part.replace(path)


def create_model(
    client: Client,
    index: Index,
    shapes: Shapes,
    scaling: float,
    upload: Callable[[Index], Path | None],
) -> Model:
    """Creates the daemon's model for an index, of K/V in bfloat16, and uploads its weights.

    Args:
        client: Connection to the daemon.
        index: The index.
        shapes: Shapes of the language model.
        scaling: Factor on q.k.
        upload: Returns the file that an index needs, or None.

    Raises:
        NotServedError: The daemon does not support a part of the index.
    """
    kv_heads = shapes.query_head_count if index.ungrouped else shapes.kv_head_count
    file = upload(index)
    model = client.create_model(
        **{**dataclasses.asdict(shapes), "kv_head_count": kv_heads},
        dtype="bfloat16",
        softmax_scale=scaling,
        hash_weights=index.hash_weights,
        key_indices=index.key_indices,
        resident_sample_fraction=index.resident_sample_fraction,
        row_type=index.row_type,
        policy=Policy(seed=SAMPLING_SEED),
    )
    # An older daemon ignores fields that it does not know.
    asked = index.key_indices or KeyIndices()
    heard = model.hash_weights
    if isinstance(heard, MlpHash):
        heard = dataclasses.replace(heard, hidden_layer_count=heard.hidden_layer_count or 1)
    made = heard, model.key_indices, model.row_type
    wanted = index.hash_weights, asked, index.row_type
    if made != wanted:
        client.delete_model(model)
        raise NotServedError(
            f"this daemon made a model of {made}, not of {wanted}; it is older than this client"
        )
    return model if file is None else client.upload_hash_weights(model, file)


def check_policy(client: Client, model: Model, policy: Policy) -> None:
    """Checks that the daemon knows every field of a policy.

    Raises:
        NotServedError: The daemon ignored a field.
    """
    sequence = client.create_sequence(model, policy=policy)
    heard = sequence.refresh().policy
    sequence.delete()
    for field in dataclasses.fields(Policy):
        wanted, got = getattr(policy, field.name), getattr(heard, field.name)
        if wanted is not None and not _equal(wanted, got):
            raise NotServedError(
                f"this daemon took {field.name} {wanted} for {got}; it is older than this client"
            )


def _equal(wanted: Any, got: Any) -> bool:
    """Whether every field that is set in `wanted` is equal in `got`."""
    if isinstance(wanted, (TopK, TopP, Candidates)):
        set_of = {name: value for name, value in vars(wanted).items() if value is not None}
        return type(got) is type(wanted) and all(
            _equal(value, getattr(got, name)) for name, value in set_of.items()
        )
    if isinstance(wanted, float):
        return got is not None and abs(wanted - got) <= 1e-9
    return bool(wanted == got)


def policy_told(policy: Policy) -> dict[str, Any]:
    """Returns the fields that are set, for JSON."""
    told = {
        field.name: getattr(policy, field.name)
        for field in dataclasses.fields(Policy)
        if getattr(policy, field.name) is not None
    }
    for name in ("heavy", "candidates"):
        if name in told:
            kind = type(told[name]).__name__
            told[name] = {"kind": kind} | {
                key: value for key, value in vars(told[name]).items() if value is not None
            }
    return json.loads(json.dumps(told))


DEFAULT_INDEX = Index(RotationHash())
