"""Misuse of every RPC: a clear status, and no changed state."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc
import numpy as np
import pytest
import spillway_kv
from google.rpc import code_pb2
from helpers import held, refused
from raw_grpc import error_of
from spillway_kv import Client, Model, Sequence
from spillway_kv._proto import (
    admin_service_pb2 as admin,
)
from spillway_kv._proto import (
    attention_service_pb2 as attention,
)
from spillway_kv._proto import (
    model_service_pb2 as models,
)
from spillway_kv._proto import (
    policy_pb2 as policies,
)
from spillway_kv._proto import (
    sequence_service_pb2 as sequences,
)
from spillway_kv._proto import (
    tensor_pb2 as tensors,
)
from spillway_kv.errors import error_from_status

pytestmark = pytest.mark.transports("doorbell", "regions", "embedded")
INVALID = "INVALID_ARGUMENT"
RANGE = "OUT_OF_RANGE"
EITHER = (INVALID, RANGE)
MISSING = "NOT_FOUND"
F32 = tensors.DTYPE_F32
HUGE = 2**62


@dataclass
class Scene:
    """A model with a sequence of ten tokens in both layers, and the raw stubs."""

    client: Client
    model: Model
    sequence: Sequence
    k: Any
    v: Any

    def state(self) -> Any:
        """All state that misuse might change."""
        stubs = self.client.connection.stubs
        listed = stubs.sequences.ListSequences(sequences.ListSequencesRequest()).sequences
        for sequence in listed:
            sequence.ClearField("expire_time")  # every call renews it
        return (
            [str(m) for m in stubs.models.ListModels(models.ListModelsRequest()).models],
            [str(s) for s in listed],
            held(self.client),
        )


@pytest.fixture
def scene(client: Client, model: Model, rng: np.random.Generator) -> Iterator[Scene]:
    sequence = client.create_sequence(model)
    k, v = rng.standard_normal((2, 2, 2, 10, 16), np.float32)
    sequence.append(0, 0, k, v)
    scene = Scene(client, model, sequence, k, v)
    # What other tests have left may be collected at any time.
    gc.collect()
    before = scene.state()
    yield scene
    assert scene.state() == before
    out = sequence.attend(0, np.ones((1, 4, 16), np.float32)).out
    assert np.isfinite(out).all()


def refuse(call: Callable[[], Any], codes: str | tuple[str, ...]) -> spillway_kv.SpillwayError:
    """Runs the call, which must fail with one of the codes and have a message."""
    error = refused(call)
    assert error.code in codes, str(error)
    assert len(error.message) > 8, str(error)
    return error


def tensor(shape: Any, data: bytes | None = None, dtype: int = F32) -> tensors.Tensor:
    if data is None:
        data = bytes(4 * math.prod(shape))
    return tensors.Tensor(dtype=dtype, shape=shape, data=data)  # type: ignore[arg-type]


def spec(**changes: Any) -> models.Model:
    fields: dict[str, Any] = {
        "layer_count": 2,
        "query_head_count": 4,
        "kv_head_count": 2,
        "head_dim": 16,
        "dtype": F32,
        "hash_weights": models.HashWeights(rotation=models.RotationHash()),
    }
    fields.update(changes)
    return models.Model(**{name: value for name, value in fields.items() if value is not None})


def policy(**fields: Any) -> policies.Policy:
    return policies.Policy(**fields)


def candidates(**size: Any) -> policies.Policy:
    return policy(
        candidates=policies.Candidates(selector=policies.SELECTOR_HAMMING, **size),
    )


NO_HASH: dict[str, Any] = {"hash_weights": None}
MLP = models.HashWeights(mlp=models.MlpHash())


def indices(**fields: Any) -> dict[str, Any]:
    return {"key_indices": models.KeyIndices(**fields)}


BAD_SPECS = {
    "no layers": {"layer_count": 0},
    "negative layers": {"layer_count": -1},
    "many layers": {"layer_count": 1025},
    "most layers": {"layer_count": 2**31 - 1},
    "no query heads": {"query_head_count": 0},
    "heads do not divide": {"query_head_count": 5},
    "MLPs for 17 query heads": {"query_head_count": 34, "kv_head_count": 2, "hash_weights": MLP},
    "no kv heads": {"kv_head_count": 0},
    "negative kv heads": {"kv_head_count": -2},
    "head_dim 8": {"head_dim": 8},
    "head_dim 24": {"head_dim": 24},
    "head_dim 272": {"head_dim": 272},
    "no dtype": {"dtype": 0},
    "integers": {"dtype": tensors.DTYPE_U32},
    "unknown dtype": {"dtype": 99},
    "scale 0": {"softmax_scale": 0.0},
    "negative scale": {"softmax_scale": -1.0},
    "scale NaN": {"softmax_scale": math.nan},
    "scale infinite": {"softmax_scale": math.inf},
    "negative resident sample": {"resident_sample_fraction": -0.01},
    "wide resident sample": {"resident_sample_fraction": 0.07},
    "resident sample NaN": {"resident_sample_fraction": math.nan},
    "bits 0": {"hash_weights": models.HashWeights(rotation=models.RotationHash(bits_per_dim=0))},
    "bits 5": {"hash_weights": models.HashWeights(rotation=models.RotationHash(bits_per_dim=5))},
    "value bits 4": {
        "hash_weights": models.HashWeights(rotation=models.RotationHash(value_bits=4))
    },
    "value bits -1": {
        "hash_weights": models.HashWeights(rotation=models.RotationHash(value_bits=-1))
    },
    "hash bits 33": {"hash_weights": models.HashWeights(mlp=models.MlpHash(hash_bits=33))},
    "hash bits 0": {"hash_weights": models.HashWeights(mlp=models.MlpHash(hash_bits=0))},
    "hash bits 1056": {"hash_weights": models.HashWeights(mlp=models.MlpHash(hash_bits=1056))},
    "hash bits of all query heads": {
        "hash_weights": models.HashWeights(mlp=models.MlpHash(hash_bits=544, per_query_head=True))
    },
    "hidden 0": {"hash_weights": models.HashWeights(mlp=models.MlpHash(hidden_dim=0))},
    "hidden 4097": {"hash_weights": models.HashWeights(mlp=models.MlpHash(hidden_dim=4097))},
    "residual shapes": {"hash_weights": models.HashWeights(mlp=models.MlpHash(residual=True))},
    "no hidden layers": {
        "hash_weights": models.HashWeights(mlp=models.MlpHash(hidden_layer_count=0))
    },
    "three hidden layers": {
        "hash_weights": models.HashWeights(mlp=models.MlpHash(hidden_layer_count=3))
    },
    "residual of two": {
        "hash_weights": models.HashWeights(
            mlp=models.MlpHash(hash_bits=16, residual=True, hidden_layer_count=2)
        )
    },
    "pages of 8": indices(quest_page_token_count=8),
    "pages of 48": indices(quest_page_token_count=48),
    "pages of 256": indices(quest_page_token_count=256),
    "pages of -16": indices(quest_page_token_count=-16),
    "12 channels": indices(label_channel_count=12),
    "more channels than dimensions": indices(label_channel_count=24),
    "-8 channels": indices(label_channel_count=-8),
    "513 tables": indices(lsh_table_count=513, lsh_bits=8),
    "-1 tables": indices(lsh_table_count=-1, lsh_bits=8),
    "names of no bits": indices(lsh_table_count=75),
    "names of 17 bits": indices(lsh_table_count=75, lsh_bits=17),
    "bits without tables": indices(lsh_bits=8),
    "tables of raw keys": {
        "hash_weights": models.HashWeights(rotation=models.RotationHash(raw_keys=True)),
        **indices(lsh_table_count=75, lsh_bits=8),
    },
    "int4 keys without any": {"default_policy": policy(selector=policies.SELECTOR_INT4_KEYS)},
    "asymmetric without codes": {
        **NO_HASH,
        "default_policy": policy(selector=policies.SELECTOR_ASYMMETRIC),
    },
    "hamming without codes": {
        **NO_HASH,
        "default_policy": policy(selector=policies.SELECTOR_HAMMING),
    },
    "asymmetric by MLP": {
        "hash_weights": MLP,
        "default_policy": policy(selector=policies.SELECTOR_ASYMMETRIC),
    },
}

# The policy's field that the error must name, and the policy.
BAD_POLICIES = {
    "sink": ("sink_token_count", policy(sink_token_count=-1)),
    "sink large": ("sink_token_count", policy(sink_token_count=2**20 + 1)),
    "window": ("window_token_count", policy(window_token_count=0)),
    "window overflow": ("window_token_count", policy(window_token_count=HUGE)),
    "dense": ("dense_token_count", policy(dense_token_count=1023)),
    "dense large": ("dense_token_count", policy(dense_token_count=2**40 + 1)),
    "dense layer": ("dense_layers", policy(dense_layers=policies.LayerList(layers=[2]))),
    "dense layer < 0": ("dense_layers", policy(dense_layers=policies.LayerList(layers=[-1]))),
    "dense layer twice": ("dense_layers", policy(dense_layers=policies.LayerList(layers=[1, 1]))),
    "selector": ("selector", policy(selector=77)),
    "top_k -1": ("top_k", policy(top_k=policies.HeavyTopK(count=-1))),
    "top_k large": ("top_k", policy(top_k=policies.HeavyTopK(count=2**31))),
    "fraction 0": ("top_k", policy(top_k=policies.HeavyTopK(fraction=0.0))),
    "fraction 1.5": ("top_k", policy(top_k=policies.HeavyTopK(fraction=1.5))),
    "fraction NaN": ("top_k", policy(top_k=policies.HeavyTopK(fraction=math.nan))),
    "mass 0": ("top_p", policy(top_p=policies.HeavyTopP(mass=0.0))),
    "mass NaN": ("top_p", policy(top_p=policies.HeavyTopP(mass=math.nan))),
    "floor 0": ("top_p", policy(top_p=policies.HeavyTopP(floor_token_count=0))),
    "ceiling under floor": (
        "top_p",
        policy(top_p=policies.HeavyTopP(floor_token_count=100, ceiling_token_count=99)),
    ),
    "top_p of matches": (
        "top_p",
        policy(selector=policies.SELECTOR_HAMMING, top_p=policies.HeavyTopP()),
    ),
    "tail": ("tail", policy(tail=9)),
    "bound": ("bound", policy(tail=policies.TAIL_UNIFORM, bound=9)),
    "bound of strata": (
        "bound",
        policy(tail=policies.TAIL_STRATIFIED, bound=policies.BOUND_PAPER),
    ),
    "epsilon 0": ("epsilon", policy(epsilon=0.0)),
    "epsilon 1": ("epsilon", policy(epsilon=1.0)),
    "epsilon NaN": ("epsilon", policy(epsilon=math.nan)),
    "delta 0": ("delta", policy(delta=0.0)),
    "delta .21": ("delta", policy(delta=0.21)),
    "delta .51": (
        "delta",
        policy(delta=0.51, tail=policies.TAIL_UNIFORM, bound=policies.BOUND_DENOMINATOR),
    ),
    "pilot": ("pilot_token_count", policy(pilot_token_count=15)),
    "pilot large": ("pilot_token_count", policy(pilot_token_count=65537)),
    "inflation": ("inflation", policy(inflation=0.9)),
    "inflation large": ("inflation", policy(inflation=17)),
    "inflation NaN": ("inflation", policy(inflation=math.nan)),
    "row_count_max": ("row_count_max", policy(row_count_max=64 + 127 + 64 + 15)),
    "row_count_max < 0": ("row_count_max", policy(row_count_max=-1)),
    "no int4 keys": ("selector", policy(selector=policies.SELECTOR_INT4_KEYS)),
    "no bounds": ("selector", policy(selector=policies.SELECTOR_QUEST)),
    "no labels": ("selector", policy(selector=policies.SELECTOR_DOUBLE_SPARSITY)),
    "candidates without int4 keys": (
        "candidates.selector",
        policy(candidates=policies.Candidates(selector=policies.SELECTOR_INT4_KEYS)),
    ),
    "all candidates": (
        "candidates.selector",
        policy(candidates=policies.Candidates(selector=policies.SELECTOR_ALL)),
    ),
    "unknown candidates": (
        "candidates.selector",
        policy(candidates=policies.Candidates(selector=77)),  # type: ignore[arg-type]
    ),
    "candidates for hamming": (
        "candidates",
        policy(
            selector=policies.SELECTOR_HAMMING,
            candidates=policies.Candidates(selector=policies.SELECTOR_ASYMMETRIC),
        ),
    ),
    "no candidates": ("candidates.count", candidates(count=0)),
    "negative candidates": ("candidates.count", candidates(count=-1)),
    "many candidates": ("candidates.count", candidates(count=2**31)),
    "candidates fraction 0": ("candidates.fraction", candidates(fraction=0.0)),
    "candidates fraction 1.5": ("candidates.fraction", candidates(fraction=1.5)),
    "candidates fraction NaN": ("candidates.fraction", candidates(fraction=math.nan)),
    "no tables": ("tail", policy(tail=policies.TAIL_LSH_SAMPLING)),
}


@pytest.mark.parametrize("changes", BAD_SPECS.values(), ids=BAD_SPECS)
def test_bad_spec(scene: Scene, changes: dict[str, Any]) -> None:
    request = models.CreateModelRequest(model=spec(**changes))
    error = refuse(lambda: scene.client.connection.stubs.models.CreateModel(request), INVALID)
    last = list(changes)[-1]
    assert any(last in violation.field for violation in error.fields), error.fields


@pytest.mark.parametrize(("field", "bad"), BAD_POLICIES.values(), ids=BAD_POLICIES)
def test_bad_policy_everywhere(scene: Scene, field: str, bad: policies.Policy) -> None:
    stubs, name = scene.client.connection.stubs, scene.sequence.name
    item = attention.AttendItem(sequence=name, q=tensor((1, 4, 16)), policy=bad)
    calls = {
        "default_policy.": lambda: stubs.models.CreateModel(
            models.CreateModelRequest(model=spec(default_policy=bad))
        ),
        "policy.": lambda: stubs.sequences.CreateSequence(
            sequences.CreateSequenceRequest(
                sequence=sequences.Sequence(model=scene.model.name, policy=bad)
            )
        ),
        "items[0].policy.": lambda: stubs.attention.Attend(
            attention.AttendRequest(layer=0, items=[item])
        ),
        "item.policy.": lambda: stubs.attention.Select(attention.SelectRequest(layer=0, item=item)),
    }
    for prefix, call in calls.items():
        error = refuse(call, INVALID)
        assert any(prefix + field in violation.field for violation in error.fields), error.fields
    request = step_request(new_part(scene), new_attend(), policy=bad)
    (answer,) = stubs.attention.Step(iter([request]))
    failure = error_from_status(answer.status)
    assert any(f"policy.{field}" in violation.field for violation in failure.fields)


@pytest.mark.parametrize(
    "bad_id", ["A", "a b", "-a", "a-", "a" * 64, "a/b", "ä", "../x", "a\n"], ids=repr
)
def test_bad_ids(scene: Scene, bad_id: str) -> None:
    stubs = scene.client.connection.stubs
    request = models.CreateModelRequest(model_id=bad_id, model=spec())
    refuse(lambda: stubs.models.CreateModel(request), INVALID)
    made = sequences.CreateSequenceRequest(
        sequence_id=bad_id, sequence=sequences.Sequence(model=scene.model.name)
    )
    refuse(lambda: stubs.sequences.CreateSequence(made), INVALID)
    fork = sequences.ForkSequenceRequest(name=scene.sequence.name, sequence_id=bad_id)
    refuse(lambda: stubs.sequences.ForkSequence(fork), INVALID)


@pytest.mark.parametrize("name", ["", "models/nobody", "nobody", "sequences/nobody", "models/"])
def test_unknown_model(scene: Scene, name: str) -> None:
    stubs = scene.client.connection.stubs
    codes = (MISSING,) if name == "models/nobody" else (MISSING, INVALID)
    upload = models.UploadHashWeightsRequest(name=name, total_bytes=8, data=bytes(8))
    created = sequences.CreateSequenceRequest(sequence=sequences.Sequence(model=name))
    for call in (
        lambda: stubs.models.GetModel(models.GetModelRequest(name=name)),
        lambda: stubs.models.DeleteModel(models.DeleteModelRequest(name=name)),
        lambda: stubs.models.UploadHashWeights(iter([upload])),
        lambda: stubs.sequences.CreateSequence(created),
    ):
        error = refuse(call, codes)
        if error.code == MISSING:
            assert error.reason == "MODEL_NOT_FOUND"
    if name:
        for call in (
            lambda: stubs.admin.GetStatistics(admin.GetStatisticsRequest(model=name)),
            lambda: stubs.sequences.ListSequences(sequences.ListSequencesRequest(model=name)),
        ):
            refuse(call, codes)


@pytest.mark.parametrize("name", ["", "sequences/nobody", "nobody", "models/nobody"])
def test_unknown_sequence(scene: Scene, name: str) -> None:
    stubs = scene.client.connection.stubs
    codes = (MISSING,) if name == "sequences/nobody" else (MISSING, INVALID)
    item = attention.AttendItem(sequence=name, q=tensor((1, 4, 16)))
    chunk = attention.KvChunk(sequence=name, k=tensor((1, 2, 1, 16)), v=tensor((1, 2, 1, 16)))
    good = attention.AttendItem(sequence=scene.sequence.name, q=tensor((1, 4, 16)))
    for call in (
        lambda: stubs.sequences.GetSequence(sequences.GetSequenceRequest(name=name)),
        lambda: stubs.sequences.ForkSequence(sequences.ForkSequenceRequest(name=name)),
        lambda: stubs.sequences.TruncateSequence(sequences.TruncateSequenceRequest(name=name)),
        lambda: stubs.sequences.SealSequence(sequences.SealSequenceRequest(name=name)),
        lambda: stubs.sequences.DeleteSequence(sequences.DeleteSequenceRequest(name=name)),
        lambda: stubs.sequences.DeleteSequence(
            sequences.DeleteSequenceRequest(name=name, if_sealed=True)
        ),
        lambda: stubs.attention.Append(iter([attention.AppendRequest(chunk=chunk)])),
        lambda: stubs.attention.Attend(attention.AttendRequest(items=[item])),
        lambda: stubs.attention.Attend(attention.AttendRequest(items=[good, item])),
        lambda: stubs.attention.Select(attention.SelectRequest(item=item)),
        lambda: list(stubs.attention.FetchPages(attention.FetchPagesRequest(sequence=name))),
    ):
        error = refuse(call, codes)
        if error.code == MISSING:
            assert error.reason == "SEQUENCE_NOT_FOUND"
            assert error.metadata["boot_id"] == scene.client.server_info.boot_id


def test_bad_pages_of_lists(scene: Scene) -> None:
    stubs = scene.client.connection.stubs
    bad: tuple[dict[str, Any], ...]
    bad = ({"page_size": -1}, {"page_size": 1001}, {"page_token": "\x01?"})
    for fields in bad:
        refuse(partial(stubs.models.ListModels, models.ListModelsRequest(**fields)), INVALID)
        refuse(
            partial(stubs.sequences.ListSequences, sequences.ListSequencesRequest(**fields)),
            INVALID,
        )


def test_model_in_use(scene: Scene) -> None:
    request = models.DeleteModelRequest(name=scene.model.name)
    refuse(lambda: scene.client.connection.stubs.models.DeleteModel(request), "FAILED_PRECONDITION")


def test_taken_ids(scene: Scene) -> None:
    stubs = scene.client.connection.stubs
    taken = scene.sequence.name.removeprefix("sequences/")
    made = sequences.CreateSequenceRequest(
        sequence_id=taken, sequence=sequences.Sequence(model=scene.model.name)
    )
    refuse(lambda: stubs.sequences.CreateSequence(made), "ALREADY_EXISTS")
    fork = sequences.ForkSequenceRequest(name=scene.sequence.name, sequence_id=taken)
    refuse(lambda: stubs.sequences.ForkSequence(fork), "ALREADY_EXISTS")
    request = models.CreateModelRequest(
        model_id=scene.model.name.removeprefix("models/"), model=spec()
    )
    refuse(lambda: stubs.models.CreateModel(request), "ALREADY_EXISTS")


@pytest.mark.parametrize("seconds", [-1, 366 * 86400, 2**40])
def test_bad_ttl(scene: Scene, seconds: int) -> None:
    request = sequences.CreateSequenceRequest(
        sequence=sequences.Sequence(model=scene.model.name, ttl={"seconds": seconds})
    )
    refuse(lambda: scene.client.connection.stubs.sequences.CreateSequence(request), INVALID)


@pytest.mark.parametrize("token_count", [-1, 11, HUGE, -HUGE])
def test_bad_truncation(scene: Scene, token_count: int) -> None:
    request = sequences.TruncateSequenceRequest(name=scene.sequence.name, token_count=token_count)
    codes: Any = RANGE if token_count > 0 else EITHER
    refuse(lambda: scene.client.connection.stubs.sequences.TruncateSequence(request), codes)


def upload(name: str, *parts: bytes, total: int) -> Iterator[models.UploadHashWeightsRequest]:
    for index, data in enumerate(parts):
        yield models.UploadHashWeightsRequest(
            name=name if index == 0 else "", total_bytes=total if index == 0 else 0, data=data
        )


def test_bad_uploads(client: Client) -> None:
    stubs = client.connection.stubs
    rotation = client.create_model(
        layer_count=1, query_head_count=1, kv_head_count=1, head_dim=16, dtype="float32"
    )
    mlp = client.create_model(
        layer_count=1,
        query_head_count=1,
        kv_head_count=1,
        head_dim=16,
        dtype="float32",
        hash_weights=spillway_kv.MlpHash(hash_bits=32),
    )

    def send(name: str, *parts: bytes, total: int) -> Callable[[], Any]:
        return lambda: stubs.models.UploadHashWeights(upload(name, *parts, total=total))

    refuse(send(rotation.name, bytes(8), total=8), "FAILED_PRECONDITION")
    refuse(send(mlp.name, bytes(8), total=0), INVALID)
    refuse(send(mlp.name, bytes(8), total=-1), INVALID)
    refuse(send(mlp.name, bytes(8), total=2**30 + 1), (INVALID, "RESOURCE_EXHAUSTED"))
    refuse(send(mlp.name, bytes(8), total=HUGE), (INVALID, "RESOURCE_EXHAUSTED"))
    refuse(send(mlp.name, bytes(8), bytes(9), total=16), INVALID)
    refuse(send(mlp.name, bytes(8), total=16), INVALID)
    refuse(send(mlp.name, bytes(64), total=64), INVALID)
    refuse(send(mlp.name, b"\xff" * 64, total=64), INVALID)
    refuse(lambda: stubs.models.UploadHashWeights(iter([])), INVALID)
    assert not client.get_model(mlp.name).ready
    for model in (rotation, mlp):
        client.delete_model(model)


def chunk(scene: Scene, **changes: Any) -> attention.KvChunk:
    """A valid chunk of one new token for both layers, with changes."""
    fields: dict[str, Any] = {
        "sequence": scene.sequence.name,
        "token_start": 10,
        "k": tensor((2, 2, 1, 16)),
        "v": tensor((2, 2, 1, 16)),
    }
    fields.update(changes)
    return attention.KvChunk(**{name: value for name, value in fields.items() if value is not None})


def both(shape: Any, data: bytes | None = None, dtype: int = F32) -> dict[str, Any]:
    return {"k": tensor(shape, data, dtype), "v": tensor(shape, data, dtype)}


BAD_CHUNKS: dict[str, tuple[Any, dict[str, Any]]] = {
    "no k": (INVALID, {"k": None}),
    "no v": (INVALID, {"v": None}),
    "no dtype": (INVALID, both((2, 2, 1, 16), dtype=0)),
    "other dtype": (INVALID, both((2, 2, 1, 16), bytes(128), tensors.DTYPE_F16)),
    "unknown dtype": (INVALID, both((2, 2, 1, 16), dtype=42)),
    "short data": (INVALID, both((2, 2, 1, 16), bytes(255))),
    "long data": (INVALID, both((2, 2, 1, 16), bytes(257))),
    "no data": (INVALID, both((2, 2, 1, 16), b"")),
    "three dimensions": (INVALID, both((2, 1, 16))),
    "five dimensions": (INVALID, both((1, 2, 2, 1, 16))),
    "no dimensions": (INVALID, both(())),
    "zero tokens": (INVALID, both((2, 2, 0, 16))),
    "zero layers": (INVALID, both((0, 2, 1, 16))),
    "negative": (INVALID, both((2, 2, -1, 16), bytes(256))),
    "two negatives": (INVALID, both((-2, 2, -1, 16), bytes(256))),
    "huge tokens": (INVALID, both((2, 2, HUGE, 16), bytes(256))),
    "huge layers": (INVALID, both((HUGE, 2, 1, 16), bytes(256))),
    "product overflows to 256": (INVALID, both((2**58 + 1, 2, 2, 16), bytes(256))),
    "product overflows to 0": (INVALID, both((2**32, 2, 2**32, 16), b"")),
    "heads": (INVALID, both((2, 4, 1, 16))),
    "head_dim": (INVALID, both((2, 2, 1, 32))),
    "v differs": (INVALID, {"v": tensor((2, 2, 2, 16))}),
    "layer -1": (EITHER, {"layer_start": -1}),
    "layer 2": (EITHER, {"layer_start": 2}),
    "layers beyond": (EITHER, {"layer_start": 1}),
    "layer overflow": (EITHER, {"layer_start": 2**31 - 1}),
    "start -1": (EITHER, {"token_start": -1}),
    "gap": (RANGE, {"token_start": 11}),
    "far gap": (RANGE, {"token_start": HUGE}),
    "end overflows": (RANGE, {"token_start": 2**63 - 1}),
    "straddle": (RANGE, {"token_start": 9, **both((2, 2, 2, 16))}),
    "other bytes": ("ALREADY_EXISTS", {"token_start": 9}),
    "other bytes at 0": ("ALREADY_EXISTS", {"token_start": 0}),
    "generation": ("ABORTED", {"generation": 1}),
    "generation -1": (("ABORTED", INVALID), {"generation": -1}),
}


@pytest.mark.parametrize(("codes", "changes"), BAD_CHUNKS.values(), ids=BAD_CHUNKS)
def test_bad_append(scene: Scene, codes: Any, changes: dict[str, Any]) -> None:
    request = attention.AppendRequest(chunk=chunk(scene, **changes))
    error = refuse(lambda: scene.client.connection.stubs.attention.Append(iter([request])), codes)
    if error.code == RANGE and changes.get("token_start", -1) >= 0:
        assert "10" in error.message  # the layer's length


def new_part(scene: Scene, **changes: Any) -> attention.DecodeStep.Part:
    """A valid part of a step, with changes."""
    fields: dict[str, Any] = {"sequence": scene.sequence.name, "token_start": 10, **changes}
    return attention.DecodeStep.Part(**fields)


def new_attend(**changes: Any) -> attention.StepAttend:
    """A valid attend of one new token of one sequence, with changes."""
    fields: dict[str, Any] = {"q": tensor((1, 1, 4, 16)), **both((1, 1, 2, 16)), **changes}
    return attention.StepAttend(**{name: x for name, x in fields.items() if x is not None})


def step_request(
    part: attention.DecodeStep.Part, attend: attention.StepAttend, **begin: Any
) -> attention.StepRequest:
    """A step of one new token of one sequence, with changes of what begins it."""
    fields: dict[str, Any] = {"parts": [part], "token_count": 1, **begin}
    return attention.StepRequest(begin=attention.DecodeStep(**fields), attend=attend)


def ask_step(client: Client, *requests: attention.StepRequest) -> list[str]:
    """The code of each answer. Answers with an error must have a message, and nothing else."""
    codes = []
    for answer in client.connection.stubs.attention.Step(iter(requests)):
        if answer.status.code:
            assert len(answer.status.message) > 8
            assert not answer.out.data
        codes.append(code_pb2.Code.Name(answer.status.code))
    return codes


BAD_TENSORS: dict[str, tuple[Any, dict[str, Any]]] = {
    "no k": (INVALID, {"k": None}),
    "no v": (INVALID, {"v": None}),
    "no dtype": (INVALID, both((1, 1, 2, 16), dtype=0)),
    "unknown dtype": (INVALID, both((1, 1, 2, 16), dtype=42)),
    "short data": (INVALID, both((1, 1, 2, 16), bytes(127))),
    "long data": (INVALID, both((1, 1, 2, 16), bytes(129))),
    "no data": (INVALID, both((1, 1, 2, 16), b"")),
    "two dimensions": (INVALID, both((2, 16))),
    "no dimension for sequences": (INVALID, both((1, 2, 16))),
    "no dimensions": (INVALID, both(())),
    "zero tokens": (INVALID, both((1, 0, 2, 16))),
    "two tokens": (INVALID, both((1, 2, 2, 16))),
    "negative": (INVALID, both((1, -1, 2, 16), bytes(128))),
    "huge tokens": (INVALID, both((1, HUGE, 2, 16), bytes(128))),
    "product overflows to 128": (INVALID, both((1, 2**57 + 1, 2, 16), bytes(128))),
    "product overflows to 0": (INVALID, both((1, 2**57, 2, 16), b"")),
    "heads": (INVALID, both((1, 1, 4, 16))),
    "two sequences": (INVALID, both((2, 1, 2, 16))),
    "v differs": (INVALID, {"v": tensor((1, 2, 2, 16))}),
    "no q": (INVALID, {"q": None}),
    "q dtype": (INVALID, {"q": tensor((1, 1, 4, 16), dtype=tensors.DTYPE_U32)}),
    "q no dtype": (INVALID, {"q": tensor((1, 1, 4, 16), dtype=0)}),
    "q head_dim": (INVALID, {"q": tensor((1, 1, 4, 32))}),
    "q two dimensions": (INVALID, {"q": tensor((4, 16))}),
    "q of no sequence": (INVALID, {"q": tensor((0, 1, 4, 16))}),
    "nothing of no sequence": (INVALID, {"q": tensor((0, 1, 4, 16)), **both((0, 1, 2, 16))}),
    "q of -1 sequences": (INVALID, {"q": tensor((-1, 1, 4, 16), bytes(256))}),
    "all of -1 sequences": (
        INVALID,
        {"q": tensor((-1, 1, 4, 16), b""), **both((-1, 1, 2, 16), b"")},
    ),
    "no queries": (INVALID, {"q": tensor((1, 0, 4, 16))}),
    "two queries": (INVALID, {"q": tensor((1, 2, 4, 16))}),
    "short q": (INVALID, {"q": tensor((1, 1, 4, 16), bytes(255))}),
    "huge q": (INVALID, {"q": tensor((HUGE, 1, 4, 16), bytes(256))}),
    "q overflows to 256": (INVALID, {"q": tensor((2**56 + 1, 1, 4, 16), bytes(256))}),
    "part -1": (INVALID, {"part_start": -1}),
    "part 2^31 - 1": (INVALID, {"part_start": 2**31 - 1}),
    "out_dtype U8": (INVALID, {"out_dtype": tensors.DTYPE_U8}),
    "out_dtype 99": (INVALID, {"out_dtype": 99}),
}


@pytest.mark.parametrize(("codes", "changes"), BAD_TENSORS.values(), ids=BAD_TENSORS)
def test_bad_tensors_of_a_step(scene: Scene, codes: Any, changes: dict[str, Any]) -> None:
    request = step_request(new_part(scene), new_attend(**changes))
    (code,) = ask_step(scene.client, request)
    assert code in codes


BAD_PARTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "no name": ((INVALID, MISSING), {"sequence": ""}),
    "unknown": (MISSING, {"sequence": "sequences/none"}),
    "a model": ((INVALID, MISSING), {"sequence": "models/none"}),
    "start -1": (EITHER, {"token_start": -1}),
    "gap": (RANGE, {"token_start": 11}),
    "far gap": (RANGE, {"token_start": HUGE}),
    "end overflows": (RANGE, {"token_start": 2**63 - 1}),
    "other bytes": ("ALREADY_EXISTS", {"token_start": 9}),
    "other bytes at 0": ("ALREADY_EXISTS", {"token_start": 0}),
    "generation": ("ABORTED", {"generation": 1}),
    "generation -1": (("ABORTED", INVALID), {"generation": -1}),
}


@pytest.mark.parametrize(("codes", "changes"), BAD_PARTS.values(), ids=BAD_PARTS)
def test_bad_part_of_a_step(scene: Scene, codes: Any, changes: dict[str, Any]) -> None:
    request = step_request(new_part(scene, **changes), new_attend())
    (code,) = ask_step(scene.client, request)
    assert code in codes


def test_a_step_that_straddles_the_end(scene: Scene) -> None:
    q, rows = tensor((1, 2, 4, 16)), both((1, 2, 2, 16))
    request = step_request(new_part(scene, token_start=9), new_attend(q=q, **rows), token_count=2)
    assert ask_step(scene.client, request) == [RANGE]


@pytest.mark.parametrize("count", [0, 17, -1, 2**31 - 1, -(2**31)])
def test_bad_token_count_of_a_step(scene: Scene, count: int) -> None:
    # With tensors of so many tokens, if they are few.
    shown = count if 0 <= count <= 17 else 1
    attend = new_attend(q=tensor((1, shown, 4, 16)), **both((1, shown, 2, 16)))
    (code,) = ask_step(scene.client, step_request(new_part(scene), attend, token_count=count))
    assert code in EITHER


def test_bad_parts_of_a_step(scene: Scene) -> None:
    other = scene.client.create_model(
        layer_count=2, query_head_count=4, kv_head_count=2, head_dim=16, dtype="float32"
    )
    stranger = scene.client.create_sequence(other)
    good, foreign = new_part(scene), new_part(scene, sequence=stranger.name, token_start=0)
    for parts in ([], [good, good], [good] * 257, [good, foreign]):
        count = len(parts)
        attend = new_attend(q=tensor((count, 1, 4, 16)), **both((count, 1, 2, 16)))
        assert ask_step(scene.client, step_request(good, attend, parts=parts)) == [INVALID]
    stranger.delete()
    scene.client.delete_model(other)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["k", "v"])
def test_append_of_what_is_not_finite_names_the_position(
    scene: Scene, name: str, value: float
) -> None:
    shape = (2, 2, 5, 16)
    arrays = {n: np.zeros(shape, np.float32) for n in ("k", "v")}
    arrays[name][1, 0, 3, 7] = value
    changes = {n: tensor(shape, a.tobytes()) for n, a in arrays.items()}
    request = attention.AppendRequest(chunk=chunk(scene, **changes))
    error = refuse(lambda: scene.client.connection.stubs.attention.Append(iter([request])), EITHER)
    assert "13" in error.message  # position 10 + 3


def test_empty_append(scene: Scene) -> None:
    stubs = scene.client.connection.stubs
    refuse(lambda: stubs.attention.Append(iter([attention.AppendRequest()])), INVALID)


def test_first_bad_chunk_ends_the_stream(scene: Scene) -> None:
    copy = scene.sequence.fork()
    good = chunk(scene, sequence=copy.name)
    bad = chunk(scene, sequence=copy.name, token_start=13)
    stream = [attention.AppendRequest(chunk=c) for c in (good, bad, good)]
    refuse(lambda: scene.client.connection.stubs.attention.Append(iter(stream)), RANGE)
    assert copy.refresh().layer_token_counts == (11, 11)
    copy.delete()


def item(scene: Scene, **changes: Any) -> attention.AttendItem:
    fields: dict[str, Any] = {"sequence": scene.sequence.name, "q": tensor((1, 4, 16))}
    fields.update(changes)
    return attention.AttendItem(
        **{name: value for name, value in fields.items() if value is not None}
    )


BAD_ITEMS: dict[str, tuple[Any, dict[str, Any]]] = {
    "no q": (INVALID, {"q": None}),
    "q dtype": (INVALID, {"q": tensor((1, 4, 16), dtype=tensors.DTYPE_U32)}),
    "q no dtype": (INVALID, {"q": tensor((1, 4, 16), dtype=0)}),
    "q heads": (INVALID, {"q": tensor((1, 2, 16))}),
    "q head_dim": (INVALID, {"q": tensor((1, 4, 32))}),
    "q two dimensions": (INVALID, {"q": tensor((4, 16))}),
    "no queries": (INVALID, {"q": tensor((0, 4, 16))}),
    "negative queries": (INVALID, {"q": tensor((-1, 4, 16), bytes(256))}),
    "short q": (INVALID, {"q": tensor((1, 4, 16), bytes(255))}),
    "huge q": (INVALID, {"q": tensor((HUGE, 4, 16), bytes(256))}),
    "q overflows to 256": (INVALID, {"q": tensor((2**56 + 1, 4, 16), bytes(256))}),
    "more queries than tokens": (EITHER, {"q": tensor((11, 4, 16))}),
    "1025 queries": (
        EITHER,
        {"q": tensor((1025, 4, 16)), "visible_token_counts": [1] * 1025},
    ),
    "visible 0": (EITHER, {"visible_token_counts": [0]}),
    "visible -1": (EITHER, {"visible_token_counts": [-1]}),
    "visible 11": (EITHER, {"visible_token_counts": [11]}),
    "visible huge": (EITHER, {"visible_token_counts": [HUGE]}),
    "visible of two": (INVALID, {"visible_token_counts": [1, 2]}),
}


@pytest.mark.parametrize(("codes", "changes"), BAD_ITEMS.values(), ids=BAD_ITEMS)
def test_bad_item_everywhere(scene: Scene, codes: Any, changes: dict[str, Any]) -> None:
    stubs, bad = scene.client.connection.stubs.attention, item(scene, **changes)
    refuse(lambda: stubs.Attend(attention.AttendRequest(items=[bad])), codes)
    refuse(lambda: stubs.Select(attention.SelectRequest(item=bad)), codes)


@pytest.mark.parametrize("layer", [-1, 2, 2**31 - 1, -(2**31)])
def test_bad_layer(scene: Scene, layer: int) -> None:
    stubs, good = scene.client.connection.stubs.attention, item(scene)
    refuse(lambda: stubs.Attend(attention.AttendRequest(layer=layer, items=[good])), EITHER)
    refuse(lambda: stubs.Select(attention.SelectRequest(layer=layer, item=good)), EITHER)
    tokens = attention.TokenRange(count=1)
    fetch = attention.FetchPagesRequest(layer=layer, sequence=scene.sequence.name, tokens=tokens)
    refuse(lambda: list(stubs.FetchPages(fetch)), EITHER)
    (code,) = ask_step(scene.client, step_request(new_part(scene), new_attend(layer=layer)))
    assert code in EITHER


def test_bad_attends(scene: Scene, client: Client) -> None:
    stubs, good = client.connection.stubs.attention, item(scene)
    other = client.create_model(
        layer_count=2, query_head_count=4, kv_head_count=2, head_dim=16, dtype="float32"
    )
    stranger = client.create_sequence(other)
    foreign = item(scene, sequence=stranger.name)
    empty = client.create_sequence(scene.model)
    for request, codes in (
        (attention.AttendRequest(), INVALID),
        (attention.AttendRequest(items=[good, good]), INVALID),
        (attention.AttendRequest(items=[good] * 257), INVALID),
        (attention.AttendRequest(items=[good, foreign]), INVALID),
        (attention.AttendRequest(items=[item(scene, sequence=empty.name)]), EITHER),
        (attention.AttendRequest(items=[good], out_dtype=tensors.DTYPE_U32), INVALID),
        (attention.AttendRequest(items=[good], out_dtype=99), INVALID),  # type: ignore[arg-type]
    ):
        refuse(partial(stubs.Attend, request), codes)
    stranger.delete()
    empty.delete()
    client.delete_model(other)


def test_query_that_is_not_finite(scene: Scene) -> None:
    for value in (math.nan, math.inf):
        q = tensor((1, 4, 16), np.full((1, 4, 16), value, np.float32).tobytes())
        request = attention.AttendRequest(items=[item(scene, q=q)])
        try:
            (result,) = scene.client.connection.stubs.attention.Attend(request).results
            code = code_pb2.Code.Name(result.status.code)
        except spillway_kv.SpillwayError as error:
            code = error.code
        assert code in EITHER


def test_bad_steps_leave_their_stream_open(scene: Scene) -> None:
    other = scene.sequence.fork()
    bad = [
        attention.StepRequest(attend=new_attend()),
        step_request(new_part(scene, sequence="sequences/none"), new_attend()),
        attention.StepRequest(attend=new_attend()),
        *(step_request(new_part(scene, **part), new_attend()) for _, part in BAD_PARTS.values()),
        *(step_request(new_part(scene), new_attend(**x)) for _, x in BAD_TENSORS.values()),
    ]
    good = step_request(new_part(scene, sequence=other.name), new_attend(layer=1))
    *refusals, last = ask_step(scene.client, *bad, good)
    assert len(refusals) == len(bad)
    assert refusals[:3] == ["FAILED_PRECONDITION", MISSING, MISSING]
    assert "OK" not in refusals
    assert last == "OK"
    assert other.refresh().layer_token_counts == (10, 11)
    other.delete()


def test_select_takes_one_query(scene: Scene) -> None:
    stubs, two = scene.client.connection.stubs.attention, item(scene, q=tensor((2, 4, 16)))
    refuse(lambda: stubs.Select(attention.SelectRequest(item=two)), INVALID)


@pytest.fixture
def lsh_sequence(scene: Scene) -> Iterator[Sequence]:
    """A sequence of a model with LSH tables and a policy with LSH sampling."""
    model = scene.client.create_model(
        layer_count=2,
        query_head_count=4,
        kv_head_count=2,
        head_dim=16,
        dtype="float32",
        key_indices=spillway_kv.KeyIndices(lsh_table_count=20, lsh_bits=4),
        policy=spillway_kv.Policy(tail="lsh_sampling"),
    )
    sequence = scene.client.create_sequence(model)
    sequence.append(0, 0, scene.k, scene.v)
    yield sequence
    sequence.delete()
    scene.client.delete_model(model)


def test_no_rows_of_lsh_sampling(scene: Scene, lsh_sequence: Sequence) -> None:
    stubs = scene.client.connection.stubs.attention
    asked = item(scene, sequence=lsh_sequence.name)
    error = refuse(lambda: stubs.Select(attention.SelectRequest(item=asked)), INVALID)
    assert ["item.policy.tail"] == [violation.field for violation in error.fields]
    assert "TAIL_LSH_SAMPLING" in error.message
    (result,) = stubs.Attend(attention.AttendRequest(items=[asked])).results
    assert result.status.code == 0
    # A policy of the request that uses another tail is accepted.
    other = item(scene, sequence=lsh_sequence.name, policy=policy(tail=policies.TAIL_NONE))
    stubs.Select(attention.SelectRequest(item=other))
    limit = policy(row_count_max=1000)
    limited = item(scene, sequence=lsh_sequence.name, policy=limit)
    error = refuse(lambda: stubs.Attend(attention.AttendRequest(items=[limited])), INVALID)
    assert "row_count_max" in error.fields[0].field


def chosen(
    offsets: list[int], indices: list[int], message: tensors.Tensor | None = None
) -> attention.Selection:
    data = np.array(indices, np.uint32).tobytes()
    good = tensors.Tensor(dtype=tensors.DTYPE_U32, shape=[len(indices)], data=data)
    return attention.Selection(offsets=offsets, indices=message or good)


BAD_SELECTIONS = {
    "no offsets": chosen([], [1]),
    "few offsets": chosen([0, 2], [1, 2]),
    "many offsets": chosen([0, 1, 1, 2], [1, 2]),
    "first offset": chosen([1, 1, 2], [1, 2]),
    "falling": chosen([0, 2, 1], [1, 2]),
    "beyond": chosen([0, 1, 3], [1, 2]),
    "within": chosen([0, 1, 1], [1, 2]),
    "huge offset": chosen([0, 1, HUGE], [1, 2]),
    "negative offset": chosen([0, -1, 2], [1, 2]),
    "index 10": chosen([0, 1, 2], [1, 10]),
    "index 2^32 - 1": chosen([0, 1, 2], [1, 2**32 - 1]),
    "not ascending": chosen([0, 2, 2], [2, 1]),
    "twice": chosen([0, 2, 2], [2, 2]),
    "floats": chosen([0, 1, 2], [1, 2], tensor((2,))),
    "short": chosen([0, 1, 2], [1, 2], tensor((2,), bytes(7), tensors.DTYPE_U32)),
    "huge": chosen([0, 1, 2], [1, 2], tensor((HUGE,), bytes(8), tensors.DTYPE_U32)),
}


@pytest.mark.parametrize("selection", BAD_SELECTIONS.values(), ids=BAD_SELECTIONS)
def test_bad_selection(scene: Scene, selection: attention.Selection) -> None:
    request = attention.FetchPagesRequest(sequence=scene.sequence.name, selection=selection)
    stubs = scene.client.connection.stubs.attention
    refuse(lambda: list(stubs.FetchPages(request)), EITHER)


def test_message_too_large(scene: Scene, target: str) -> None:
    # The daemon itself refuses messages above the limit.
    options = [("grpc.max_send_message_length", 64 << 20)]
    with grpc.insecure_channel(target, options) as channel:
        append = channel.stream_unary(
            "/spillway.v1.AttentionService/Append",
            request_serializer=attention.AppendRequest.SerializeToString,
            response_deserializer=attention.AppendResponse.FromString,
        )
        token_count = (5 << 20) // (2 * 2 * 2 * 16 * 4)
        shape = (2, 2, token_count, 16)
        request = attention.AppendRequest(chunk=chunk(scene, **both(shape)))
        refuse(lambda: append(iter([request])), "RESOURCE_EXHAUSTED")


def test_bytes_that_are_no_message(scene: Scene, target: str) -> None:
    with grpc.insecure_channel(target) as channel:
        for method in ("ModelService/CreateModel", "AttentionService/Attend"):
            call: Any = channel.unary_unary(f"/spillway.v1.{method}")
            with pytest.raises(grpc.RpcError):
                call(b"\xff\xff\xff\xff", timeout=10)
        nothing: Any = channel.unary_unary("/spillway.v1.ModelService/Nothing")
        with pytest.raises(grpc.RpcError) as caught:
            nothing(b"", timeout=10)
    assert error_of(caught.value).code == "UNIMPLEMENTED"
