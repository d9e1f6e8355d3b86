"""Models with trained hash weights over several daemons."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import spillway_kv
from daemon_process import binary, device_flags
from local_cluster import LocalCluster, local_cluster
from safetensors.numpy import save_file
from spillway_kv.cluster import ClusterClient

LAYERS, KV_HEADS, GROUP, DIM, TOKENS = 2, 2, 2, 32, 1500
HIDDEN, BITS = 16, 64
SHAPES: dict[str, Any] = {
    "layer_count": LAYERS,
    "query_head_count": KV_HEADS * GROUP,
    "kv_head_count": KV_HEADS,
    "head_dim": DIM,
    "dtype": "float32",
}
FEW: dict[str, Any] = {"heavy": spillway_kv.TopK(count=64), "tail": "none"}
POLICY = spillway_kv.Policy(dense_token_count=1024, selector="hamming", **FEW)
FLAGS = ("--memory-limit", "256MiB", "--grace", "1")


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


K, V = (normal(seed, LAYERS, KV_HEADS, TOKENS, DIM) for seed in (1, 2))
Q = normal(3, 1, KV_HEADS * GROUP, DIM)


def weights(seed: int = 7) -> dict[str, np.ndarray]:
    """One MLP per KV head for keys, and one per query head for queries."""
    made: dict[str, np.ndarray] = {}
    for layer in range(LAYERS):
        for prefix, heads in (("", KV_HEADS), ("query_", KV_HEADS * GROUP)):
            for name, shape in (("w1", (DIM, HIDDEN)), ("b1", (HIDDEN,)), ("w2", (HIDDEN, BITS))):
                made[f"layers.{layer}.{prefix}{name}"] = normal(seed + len(made), heads, *shape)
    return made


MLP = spillway_kv.MlpHash(BITS, HIDDEN, query_weights=True)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save_file(weights(), tmp_path / "weights.safetensors")
    return tmp_path / "weights.safetensors"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with local_cluster(tmp_path_factory.mktemp("cluster"), 3, *FLAGS) as made:
        yield made


def answers(client: Any, model: Any) -> list[Any]:
    sequence = client.create_sequence(model)
    sequence.append(0, 0, K, V)
    made = [sequence.attend(layer, Q) for layer in range(LAYERS)]
    sequence.delete()
    return made


def expect_same(a: list[Any], b: list[Any]) -> None:
    for one, other in zip(a, b, strict=True):
        np.testing.assert_array_equal(one.out, other.out)
        np.testing.assert_array_equal(one.touched_row_counts, other.touched_row_counts)
    # The attends really use the codes.
    assert (a[0].certificate.heavy_token_counts == 64).all()


@contextmanager
def model_of(client: ClusterClient, **options: Any) -> Iterator[spillway_kv.Model]:
    model = client.create_model("m", **SHAPES, policy=POLICY, hash_weights=MLP, **options)
    assert not model.ready
    yield model
    client.delete_model(model)


@pytest.fixture(scope="module")
def expected(cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The answers of one daemon."""
    file = tmp_path_factory.mktemp("weights") / "weights.safetensors"
    save_file(weights(), file)
    with spillway_kv.connect(cluster.directory.daemon("daemon-0").target) as client:
        model = client.create_model("alone", **SHAPES, policy=POLICY, hash_weights=MLP)
        client.upload_hash_weights(model, file)
        made = answers(client, model)
        client.delete_model(model)
    return made


@pytest.mark.parametrize(("parts", "groups"), [(1, 1), (2, 1), (2, 2)])
def test_each_daemon_gets_what_its_part_needs(
    cluster: LocalCluster, path: Path, expected: list[Any], parts: int, groups: int
) -> None:
    with cluster.connect(parts, groups) as client, model_of(client) as model:
        with pytest.raises(spillway_kv.FailedPrecondition):
            client.create_sequence(model)
        assert client.upload_hash_weights(model, path).ready
        assert client.get_model(model.name).ready
        for _ in range(3):  # on any of the daemons
            expect_same(answers(client, model), expected)
        # The model of another client, on a daemon that does not have it yet.
        with cluster.connect() as other:
            expect_same(answers(other, "models/m"), expected)


def test_label_channels_are_dealt_too(cluster: LocalCluster, tmp_path: Path) -> None:
    file = tmp_path / "channels.safetensors"
    save_file(
        {
            f"layers.{layer}.channels": np.arange(KV_HEADS * 16, dtype=np.int64).reshape(2, 16)
            % DIM
            for layer in range(LAYERS)
        },
        file,
    )
    options: dict[str, Any] = {
        "policy": spillway_kv.Policy(dense_token_count=1024, selector="double_sparsity", **FEW),
        "key_indices": spillway_kv.KeyIndices(label_channel_count=16),
        "hash_weights": None,
    }
    made = []
    for target in (cluster.directory.daemon("daemon-0").target, ""):
        with spillway_kv.connect(target) if target else cluster.connect(2) as client:
            model = client.create_model("labels", **SHAPES, **options)
            assert client.upload_hash_weights(model, file).ready
            made.append(answers(client, model))
            client.delete_model(model)
    expect_same(*made)


def test_what_is_refused(cluster: LocalCluster, path: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.safetensors"
    with cluster.connect(2) as client, model_of(client) as model:
        bad.write_bytes(b"\x08\0\0\0\0\0\0\0nonsense")
        with pytest.raises(spillway_kv.InvalidArgument, match="is not a safetensors file"):
            client.upload_hash_weights(model, bad)
        save_file({**weights(), "layers.1.w1": normal(1, 3, DIM, HIDDEN)}, bad)
        with pytest.raises(
            spillway_kv.InvalidArgument,
            match=r"layers\.1\.w1 has shape \[3, 32, 16\], and its first dimension is neither the "
            "model's 2 KV heads nor its 4 query heads",
        ):
            client.upload_hash_weights(model, bad)
        whole = weights()
        del whole["layers.0.b1"]
        save_file(whole, bad)
        with pytest.raises(spillway_kv.InvalidArgument, match=r"layers\.0\.b1"):
            client.upload_hash_weights(model, bad)
        assert not client.get_model(model.name).ready
        # A part that already had weights must accept others.
        save_file(weights(99), bad)
        client.upload_hash_weights(model, bad)
        client.upload_hash_weights(model, bad)
        with pytest.raises(spillway_kv.FailedPrecondition, match="has the hash weights .*bad"):
            client.upload_hash_weights(model, path)
        plain = client.create_model("plain", **SHAPES)
        with pytest.raises(
            spillway_kv.FailedPrecondition, match="plain does not wait for hash weights"
        ):
            client.upload_hash_weights(plain, path)
        client.delete_model(plain)


def test_a_daemon_that_is_killed_has_them_again(
    tmp_path: Path, path: Path, expected: list[Any]
) -> None:
    folder = tmp_path / "nodes"
    folder.mkdir()
    command = [str(binary()), "--sampling-seed", "0", *device_flags()]
    with local_cluster(folder, 2, *FLAGS, command=command) as cluster, cluster.connect(2) as client:
        model = client.create_model("m", **SHAPES, policy=POLICY, hash_weights=MLP)
        client.upload_hash_weights(model, path)
        sequence = client.create_sequence(model)
        sequence.append(0, 0, K, V)
        pid = cluster.nodes["daemon-1"].pid
        assert pid is not None
        os.kill(pid, 9)
        expect_same([sequence.attend(layer, Q) for layer in range(LAYERS)], expected)
        expect_same(answers(client, model), expected)


def test_a_daemon_that_comes_later_gets_them_from_the_file(
    tmp_path: Path, path: Path, expected: list[Any]
) -> None:
    folder = tmp_path / "nodes"
    folder.mkdir()
    with local_cluster(folder, 2, *FLAGS) as cluster, cluster.connect() as client:
        model = client.create_model("m", **SHAPES, policy=POLICY, hash_weights=MLP)
        client.upload_hash_weights(model, path)
        sequence = client.create_sequence(model)
        sequence.append(0, 0, K, V)
        (source,) = sequence.daemons
        (other,) = {"daemon-0", "daemon-1"} - {source}
        # As if this daemon had not been in the cluster at the upload.
        client.placement.client(other).delete_model("models/m")
        moved = path.with_name("elsewhere")
        path.rename(moved)
        with pytest.raises(
            spillway_kv.FailedPrecondition,
            match=f"{path}, which a daemon is to get, cannot be read",
        ):
            cluster.nodes[source].drain()
        moved.rename(path)
        cluster.nodes[source].drain()
        expect_same([sequence.attend(layer, Q) for layer in range(LAYERS)], expected)
        assert sequence.daemons == [other]
