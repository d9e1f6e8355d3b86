"""The client with the daemon: every call does what it says."""

from __future__ import annotations

import datetime
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import spillway_kv
import torch
from daemon_process import binary
from helpers import encode, step
from raw_grpc import raw
from reference import dense_attention
from spillway_kv import BFloat16, Client, Model, Policy, Sequence, TopK, TopP
from spillway_kv._proto import admin_service_pb2 as admin
from spillway_kv._proto import attention_service_pb2 as attention
from spillway_kv.appending import Append
from spillway_kv.tensors import decoder_like, encode_indices

F32 = np.float32
TOLERANCE: dict[str, Any] = {"rtol": 2e-5, "atol": 2e-6}

EVERY_TRANSPORT = pytest.mark.transports("messages", "doorbell", "regions", "embedded")
pytestmark = pytest.mark.transports("doorbell", "regions", "embedded")


def kv(rng: np.random.Generator, *shape: int) -> tuple[Any, Any]:
    return rng.standard_normal(shape, F32), rng.standard_normal(shape, F32)


def test_server(client: Client) -> None:
    info = client.server_info
    assert info.version.count(".") == 2
    assert info.boot_id
    assert info.devices
    assert info.limits.message_bytes_max == 4 << 20
    assert client.health()
    age = datetime.datetime.now(datetime.timezone.utc) - info.start_time
    assert datetime.timedelta(0) <= age < datetime.timedelta(hours=1)


def test_no_daemon(tmp_path: Path) -> None:
    with pytest.raises(spillway_kv.Unavailable, match=r"nobody\.sock.*spillwayd"):
        spillway_kv.connect(str(tmp_path / "nobody.sock"))


def test_target_by_environment(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPILLWAY_TARGET", target)
    with spillway_kv.connect() as client:
        assert client.target == target
    monkeypatch.delenv("SPILLWAY_TARGET")
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    assert spillway_kv.default_target() == "unix:/run/user/7/spillway/spillwayd.sock"
    # Without it, the folder is the user's own too, and the daemon's default is the same.
    monkeypatch.setenv("HOME", "/home/her")
    for runtime in ("", "relative"):
        monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
        config = subprocess.run([binary(), "--print-config"], capture_output=True, check=True)
        default = spillway_kv.default_target()
        assert f'listen = "{default}"' in config.stdout.decode()
        user = f"/run/user/{os.geteuid()}"
        if os.geteuid() == 0:
            assert default == "unix:/run/spillway/spillwayd.sock"
        elif Path(user).exists():
            assert default == f"unix:{user}/spillway/spillwayd.sock"
        else:
            assert default == "unix:/home/her/.spillway/spillwayd.sock"


def test_models(client: Client) -> None:
    policy = Policy(
        epsilon=0.2, dense_layers=(0,), heavy=TopP(mass=0.9), tail="uniform", bound="paper"
    )
    made = client.create_model(
        "test-models",
        layer_count=3,
        query_head_count=6,
        kv_head_count=3,
        head_dim=32,
        dtype="bfloat16",
        softmax_scale=0.5,
        policy=policy,
        hash_weights=spillway_kv.RotationHash(bits_per_dim=3, seed=5),
        resident_sample_fraction=0.0,
    )
    assert made.name == "models/test-models"
    assert (made.layer_count, made.query_head_count, made.kv_head_count) == (3, 6, 3)
    assert made.row_bytes_per_token == 3 * 3 * 2 * 32 * 2
    assert made.hash_weights == spillway_kv.RotationHash(bits_per_dim=3, seed=5)
    assert made.resident_sample_fraction == 0
    assert made.policy.epsilon == 0.2
    assert made.policy.bound == "paper"
    assert made.ready
    assert client.get_model(made.name) == made
    assert made in list(client.list_models())
    with pytest.raises(spillway_kv.AlreadyExists):
        client.create_model(
            "test-models", layer_count=1, query_head_count=1, kv_head_count=1, head_dim=16
        )
    client.delete_model(made)
    with pytest.raises(spillway_kv.NotFound) as caught:
        client.get_model(made.name)
    assert caught.value.reason == "MODEL_NOT_FOUND"


def test_defaults_are_filled_in(client: Client, model: Model) -> None:
    assert model.softmax_scale == pytest.approx(0.25)
    assert model.hash_weights == spillway_kv.RotationHash(bits_per_dim=3, seed=0)
    assert model.resident_sample_fraction == 0.01


def test_listing_goes_over_pages(client: Client, model: Model) -> None:
    made = {client.create_sequence(model).name for _ in range(130)}
    assert {info.name for info in client.list_sequences(model)} == made


def test_invalid_model_names_the_field(client: Client) -> None:
    with pytest.raises(spillway_kv.InvalidArgument) as caught:
        client.create_model(layer_count=1, query_head_count=3, kv_head_count=2, head_dim=16)
    assert any("query_head_count" in v.field for v in caught.value.fields)
    assert isinstance(caught.value, ValueError)


def test_upload_hash_weights(client: Client, tmp_path: Path, rng: np.random.Generator) -> None:
    save_file = pytest.importorskip("safetensors.numpy").save_file
    model = client.create_model(
        layer_count=2,
        query_head_count=2,
        kv_head_count=1,
        head_dim=64,
        dtype="float32",
        hash_weights=spillway_kv.MlpHash(hash_bits=64, hidden_dim=4096),
    )
    assert not model.ready
    with pytest.raises(spillway_kv.FailedPrecondition):
        client.create_sequence(model)
    weights = {}
    for layer in range(2):
        weights[f"layers.{layer}.w1"] = rng.standard_normal((1, 64, 4096), F32)
        weights[f"layers.{layer}.b1"] = rng.standard_normal((1, 4096), F32)
        weights[f"layers.{layer}.w2"] = rng.standard_normal((1, 4096, 64), F32)
    path = tmp_path / "weights.safetensors"
    save_file({name: weights[name] for name in list(weights)[:-1]}, path)
    with pytest.raises(spillway_kv.InvalidArgument, match=r"layers\.1\.w2"):
        client.upload_hash_weights(model, path)
    assert not client.get_model(model.name).ready
    save_file(weights, path)
    assert path.stat().st_size > 4 << 20
    assert client.upload_hash_weights(model, path).ready
    sequence = client.create_sequence(model)
    assert sequence.token_count == 0
    sequence.delete()
    client.delete_model(model)


@EVERY_TRANSPORT
def test_errors_while_requests_are_made_reach_the_caller(
    client: Client, model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sequence = client.create_sequence(model)

    def failing(*_: Any) -> Any:
        raise RuntimeError("the disk is on fire")

    monkeypatch.setattr(Append, "request", failing)
    rows = np.ones((2, 2, 40000, 16), F32)
    with pytest.raises(RuntimeError, match="^the disk is on fire$"):
        sequence.append(0, 0, rows, rows)
    monkeypatch.undo()
    sequence.append(0, 0, rows, rows)
    assert sequence.refresh().token_count == 40000
    for path, error in ((tmp_path, IsADirectoryError), (tmp_path / "none", FileNotFoundError)):
        with pytest.raises(error):
            client.upload_hash_weights(model, path)


def test_mlps_of_query_heads(client: Client, tmp_path: Path, rng: np.random.Generator) -> None:
    save_file = pytest.importorskip("safetensors.numpy").save_file
    hidden, bits, tokens, heavy = 16, 128, 1500, 50
    options = spillway_kv.MlpHash(bits, hidden, per_query_head=True, raw_keys=True)
    model = client.create_model(
        layer_count=1,
        query_head_count=6,
        kv_head_count=2,
        head_dim=16,
        dtype="float32",
        policy=Policy(
            dense_token_count=1024, selector="hamming", heavy=TopK(count=heavy), tail="none"
        ),
        hash_weights=options,
        resident_sample_fraction=0,
    )
    assert client.get_model(model.name).hash_weights == options
    # For each of 2 KV heads, the codes of 3 query heads.
    assert model.index_bytes_per_token == 2 * 3 * bits // 8

    def weights(heads: int) -> dict[str, Any]:
        shapes = {"w1": (heads, 16, hidden), "b1": (heads, hidden), "w2": (heads, hidden, bits)}
        return {
            f"layers.0.{name}": rng.standard_normal(shape, F32) for name, shape in shapes.items()
        }

    path = tmp_path / "weights.safetensors"
    save_file(weights(2), path)
    with pytest.raises(
        spillway_kv.InvalidArgument, match=r"layers\.0\.w1.* \[2, 16, 16\], not \[6, 16, 16\]"
    ):
        client.upload_hash_weights(model, path)
    assert not client.get_model(model.name).ready
    uploaded = weights(6)
    save_file(uploaded, path)
    client.upload_hash_weights(model, path)

    def code(head: int, x: Any) -> Any:
        w1, b1, w2 = (
            uploaded[f"layers.0.{name}"][head].astype(float) for name in ("w1", "b1", "w2")
        )
        z = x.astype(float) @ w1 + b1
        return z / (1 + np.exp(-z)) @ w2 > 0

    sequence = client.create_sequence(model)
    k, v = kv(rng, 1, 2, tokens, 16)
    k += 2  # an index that centres keys would get other codes
    sequence.append(0, 0, k, v)
    q = rng.standard_normal((1, 6, 16), F32)
    selection = sequence.select(0, q)
    result = sequence.attend(0, q)
    for kv_head in range(2):
        scores = np.sum(
            [
                (code(h, k[0, kv_head]) == code(h, q[0, h])).sum(-1)
                for h in range(3 * kv_head, 3 * kv_head + 3)
            ],
            axis=0,
        )
        # Among equal scores, the newest tokens are heavy. Sink and window are not candidates.
        candidates = np.arange(64, tokens - 64)
        best = candidates[np.lexsort((-candidates, -scores[candidates]))][:heavy]
        span = slice(*selection.offsets[kv_head : kv_head + 2])
        chosen = selection.indices[span][selection.strata[span] == 2]
        # Rounding in fp32 may change a bit.
        assert len(np.intersect1d(chosen, best)) >= heavy - 1
        rows = selection.indices[span].astype(int)
        heads = slice(3 * kv_head, 3 * kv_head + 3)
        out, lse = dense_attention(
            q[:, heads], k[0, kv_head, rows][None], v[0, kv_head, rows][None]
        )
        np.testing.assert_allclose(result.out[:, heads], out, **TOLERANCE)
        np.testing.assert_allclose(result.lse[:, heads], lse, **TOLERANCE)
    sequence.delete()
    client.delete_model(model)


def test_sequences(client: Client, model: Model, rng: np.random.Generator) -> None:
    sequence = client.create_sequence(model, "test-sequence", policy=Policy(epsilon=0.3), ttl=60)
    assert sequence.name == "sequences/test-sequence"
    info = sequence.refresh()
    assert info.policy.epsilon == 0.3
    assert info.expire_time is not None
    left = info.expire_time - datetime.datetime.now(datetime.timezone.utc)
    assert datetime.timedelta(seconds=50) < left < datetime.timedelta(seconds=70)
    k, v = kv(rng, 2, 2, 10, 16)
    sequence.append(0, 0, k, v)
    assert sequence.token_count == 10
    again = client.get_sequence(sequence.name)
    assert again.layer_token_counts == (10, 10)
    copy = sequence.fork("test-copy")
    assert copy.name == "sequences/test-copy"
    assert copy.token_count == 10
    assert sequence.truncate(4).generation == 1
    assert (sequence.token_count, copy.token_count) == (4, 10)
    with pytest.raises(spillway_kv.Aborted):
        again.append(0, 4, k, v)
    forever = client.create_sequence(model, ttl=0)
    assert forever.refresh().expire_time is None
    for each in (sequence, copy, forever):
        each.delete()
    with pytest.raises(spillway_kv.NotFound) as caught:
        sequence.refresh()
    assert caught.value.reason == "SEQUENCE_NOT_FOUND"
    assert caught.value.metadata["boot_id"] == client.server_info.boot_id


def test_attend_equals_dense(client: Client, model: Model, rng: np.random.Generator) -> None:
    sequence = client.create_sequence(model)
    k, v = kv(rng, 2, 2, 300, 16)
    sequence.append(0, 0, k, v)
    q = rng.standard_normal((5, 4, 16), F32)
    for layer in range(2):
        for visible in (None, [1, 300, 7, 128, 129]):
            result = sequence.attend(layer, q, Policy(selector="all"), visible)
            out, lse = dense_attention(q, k[layer], v[layer], visible)
            np.testing.assert_allclose(result.out, out, **TOLERANCE)
            np.testing.assert_allclose(result.lse, lse, **TOLERANCE)
            certificate = result.certificate
            seen = visible or range(296, 301)
            np.testing.assert_array_equal(
                certificate.visible_token_counts, np.repeat(np.array(seen)[:, None], 4, axis=1)
            )
            assert (certificate.promises == "exact").all()
            assert (certificate.relative_errors == 0).all()
            np.testing.assert_array_equal(
                result.touched_row_counts, np.repeat(np.array(seen)[:, None], 2, axis=1)
            )
            assert result.device_time_us > 0


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_result_type_follows_the_query(
    client: Client, rng: np.random.Generator, kind: str, dtype: Any
) -> None:
    model = client.create_model(
        layer_count=1, query_head_count=2, kv_head_count=1, head_dim=64, dtype=dtype
    )
    sequence = client.create_sequence(model)
    exact = [torch.from_numpy(rng.standard_normal((1, 50, 64), F32)) for _ in range(2)]
    exact.append(torch.from_numpy(rng.standard_normal((3, 2, 64), F32)))
    tensors = [x.to(getattr(torch, dtype)) for x in exact]
    arrays: list[Any] = list(tensors)
    if kind == "numpy":
        for i, x in enumerate(tensors):
            bits = x.view(torch.int16).numpy() if dtype == "bfloat16" else x.numpy()
            arrays[i] = BFloat16(bits.view(np.uint16)) if dtype == "bfloat16" else bits
    k, v, q = arrays
    sequence.append(0, None, k, v)
    result = sequence.attend(0, q)
    wide_k, wide_v, wide_q = (x.float().numpy() for x in tensors)
    out, _ = dense_attention(wide_q, wide_k, wide_v)
    if kind == "torch":
        assert result.out.dtype == getattr(torch, dtype)
        assert isinstance(result.lse, torch.Tensor)
        near = result.out.float().numpy()
    elif dtype == "bfloat16":
        near = result.out.to_float32()
    else:
        assert result.out.dtype == dtype
        near = result.out
    step = {"float32": 1e-6, "float16": 1e-3, "bfloat16": 8e-3}[dtype]
    np.testing.assert_allclose(near, out, rtol=step, atol=step / 4)
    wide = sequence.attend(0, q, out_dtype="float32").out
    np.testing.assert_allclose(wide, out, rtol=2e-4, atol=2e-5)
    assert type(sequence.fetch(0, like=k)[0]) is type(k)
    sequence.delete()
    client.delete_model(model)


def test_appends_to_different_layers_may_overlap(
    client: Client, model: Model, rng: np.random.Generator
) -> None:
    sequence = client.create_sequence(model)
    k, v = kv(rng, 2, 2, 64, 16)

    def append(layer: int) -> None:
        for start in range(0, 64, 4):
            new = slice(start, start + 4)
            sequence.append(layer, start, k[layer, :, new], v[layer, :, new])

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(append, range(2)))
    assert sequence.layer_token_counts == (64, 64)
    sequence.delete()


def test_lengths_that_may_be_old_are_asked_for(
    client: Client, model: Model, rng: np.random.Generator
) -> None:
    sequence = client.create_sequence(model)
    state, since = sequence.state, sequence.state.change_count
    # An answer to a later call overtakes that to an earlier one.
    sequence.append(0, 0, *kv(rng, 2, 3, 16))
    state.note((0, 0), since)
    assert sequence.layer_token_counts == (3, 0)
    # What no other call has overlapped is not asked for.
    state.note((5, 0), state.change_count)
    assert sequence.layer_token_counts == (5, 0)
    sequence.delete()


def test_long_appends_and_attends_are_split(client: Client, rng: np.random.Generator) -> None:
    # Rows of 12 MiB and queries of 8 MiB are sent in messages of at most 4 MiB. An embedded engine
    # reads the rows in place, and a daemon from a region of 16 MiB.
    model = client.create_model(
        layer_count=2, query_head_count=16, kv_head_count=8, head_dim=128, dtype="float32"
    )
    sequence = client.create_sequence(model)
    k, v = kv(rng, 2, 8, 700, 128)
    result = sequence.append(0, 0, k, v)
    in_messages = client.transport != "embedded" and client.connection.regions.staged_bytes_min > 0
    if in_messages:
        assert result.appended_chunk_count >= 3
    else:
        assert result.appended_chunk_count == 1
    assert result.layer_token_counts == (700, 700)
    repeated = sequence.append(0, 0, k, v)
    assert repeated.appended_chunk_count == 0
    assert repeated.already_present_chunk_count == result.appended_chunk_count
    q = rng.standard_normal((600, 16, 128), F32)
    attended = sequence.attend(1, q)
    picks = [0, 17, 299, 300, 599]
    out, lse = dense_attention(q[picks], k[1], v[1], [101 + p for p in picks])
    np.testing.assert_allclose(attended.out[picks], out, **TOLERANCE)
    np.testing.assert_allclose(attended.lse[picks], lse, **TOLERANCE)
    assert (attended.certificate.promises == "exact").all()
    np.testing.assert_array_equal(attended.touched_row_counts[:, 0], np.arange(101, 701))
    sequence.delete()
    client.delete_model(model)


def test_split_attends_keep_to_any_policy(client: Client, rng: np.random.Generator) -> None:
    # The policy allows so few rows that a heavy set of 256 would be refused. The 17 queries are
    # split into parts that are short enough for the policy.
    model = client.create_model(
        layer_count=1, query_head_count=256, kv_head_count=16, head_dim=256, dtype="float32"
    )
    policy = Policy(heavy=TopK(count=64), row_count_max=300)
    sequence = client.create_sequence(model, policy=policy)
    k, v = kv(rng, 1, 16, 64, 256)
    sequence.append(0, 0, k, v)
    q = rng.standard_normal((17, 256, 256), F32)
    attended = sequence.attend(0, q)
    out, _ = dense_attention(q, k[0], v[0])
    np.testing.assert_allclose(attended.out, out, **TOLERANCE)
    assert (attended.certificate.promises == "exact").all()
    sequence.delete()
    client.delete_model(model)


def test_attend_several_sequences(client: Client, model: Model, rng: np.random.Generator) -> None:
    sequences = [client.create_sequence(model) for _ in range(4)]
    rows = [kv(rng, 2, 30 + 50 * i, 16) for i in range(4)]
    for sequence, (k, v) in zip(sequences, rows, strict=True):
        sequence.append(1, 0, k, v)
    queries = {s: rng.standard_normal((i + 1, 4, 16), F32) for i, s in enumerate(sequences)}
    results = client.attend(1, queries, visible={sequences[0]: [7]})
    for i, sequence in enumerate(sequences):
        out, _ = dense_attention(queries[sequence], *rows[i], [7] if i == 0 else None)
        np.testing.assert_allclose(results[sequence].out, out, **TOLERANCE)


def test_one_bad_item_leaves_the_others(
    client: Client, model: Model, rng: np.random.Generator
) -> None:
    sequences = [client.create_sequence(model) for _ in range(2)]
    for sequence in sequences:
        sequence.append(0, 0, *kv(rng, 2, 2, 20, 16))
    q = rng.standard_normal((1, 4, 16), F32)
    queries = {sequences[0]: q, sequences[1]: np.full_like(q, 3e38)}
    with pytest.raises(spillway_kv.OutOfRange):
        client.attend(0, queries)
    results = client.attend(0, queries, return_errors=True)
    assert isinstance(results[sequences[0]], spillway_kv.AttendResult)
    assert isinstance(results[sequences[1]], spillway_kv.OutOfRange)


@EVERY_TRANSPORT
def test_decode_steps(client: Client, model: Model, rng: np.random.Generator) -> None:
    sequence = client.create_sequence(model)
    k, v = kv(rng, 2, 2, 40, 16)
    sequence.append(0, 0, k[:, :, :20], v[:, :, :20])
    q = rng.standard_normal((40, 4, 16), F32)
    # One token per step, then several.
    for block in [slice(t, t + 1) for t in range(20, 30)] + [slice(30, 40)]:
        end = block.stop
        with client.begin_step([sequence], token_count=end - block.start) as step:
            for layer in range(2):
                made, _ = step.attend(
                    layer, q[None, block], k[[layer], :, block], v[[layer], :, block]
                )
                out, lse = dense_attention(q[block], k[layer, :, :end], v[layer, :, :end])
                np.testing.assert_allclose(made[0], out, **TOLERANCE)
                (result,) = step.results()
                np.testing.assert_allclose(result.out, out, **TOLERANCE)
                np.testing.assert_allclose(result.lse, lse, **TOLERANCE)
        assert sequence.layer_token_counts == (end, end)
    # Without an append.
    result = client.attend(1, {sequence: q[:1]}, visible={sequence: [3]})[sequence]
    out, _ = dense_attention(q[:1], k[1], v[1], [3])
    np.testing.assert_allclose(result.out, out, **TOLERANCE)
    assert sequence.refresh().layer_token_counts == (40, 40)


@EVERY_TRANSPORT
def test_errors_of_steps_stay_in_place(
    client: Client, model: Model, rng: np.random.Generator
) -> None:
    sequence, other = client.create_sequence(model), client.create_sequence(model)
    k, v = kv(rng, 2, 8, 16)
    q = rng.standard_normal((1, 4, 16), F32)

    def one(layer: int, t: int, start: int | None = None) -> spillway_kv.AttendResult:
        return step(sequence, layer, q, k[:, t : t + 1], v[:, t : t + 1], start=start)

    one(0, 0)
    for start in (5, 6):
        with pytest.raises(spillway_kv.OutOfRange):
            one(0, 1, start=start)
    # Steps of another sequence and another layer still work.
    step(other, 0, q, k[:, :1], v[:, :1])
    one(1, 0)
    # The client has asked for the length again.
    one(0, 1)
    one(0, 2)
    bad = k[:, 3:4].copy()
    bad[1, 0, 4] = np.nan
    with client.begin_step([sequence], starts=[3]) as begun:
        with pytest.raises(spillway_kv.OutOfRange, match="3"):
            begun.attend(0, q[None], bad[None], v[None, :, 3:4])
        assert sequence.layer_token_counts == (3, 1)
        # The same step goes on.
        made, _ = begun.attend(0, q[None], k[None, :, 3:4], v[None, :, 3:4])
    out, _ = dense_attention(q, k[:, :4], v[:, :4])
    np.testing.assert_allclose(made[0], out, **TOLERANCE)
    assert sequence.refresh().layer_token_counts == (4, 1)


@pytest.mark.transports("messages", "doorbell", "embedded")
def test_steps_of_a_stream_share_nothing(
    client: Client, model: Model, rng: np.random.Generator
) -> None:
    """The daemon uses memory of a stream again. Its old contents must not appear again."""
    sequence = client.create_sequence(model)
    k, v = kv(rng, 2, 40, 16)
    q = rng.standard_normal((40, 4, 16), F32)
    sequence.append(0, 0, k[None, :, :30], v[None, :, :30])
    many = [client.create_sequence(model) for _ in range(64)]
    requests: list[attention.StepRequest] = []
    # Status, number of sequences, output, log-sum-exp and epsilon of each answer.
    expected: list[tuple[int, int, Any, Any, float]] = []

    def ask(
        sequences: list[Sequence], at: slice, policy: Policy | None = None, start: int | None = None
    ) -> None:
        begin = attention.DecodeStep(
            token_count=at.stop - at.start, policy=None if policy is None else policy.to_proto()
        )
        for each in sequences:
            begin.parts.add(sequence=each.name, token_start=at.start if start is None else start)
        by_token = [q[at], k[:, at].swapaxes(0, 1), v[:, at].swapaxes(0, 1)]
        parts = [encode(np.stack([x] * len(sequences)), "a tensor") for x in by_token]
        attend = attention.StepAttend(q=parts[0], k=parts[1], v=parts[2])
        requests.append(attention.StepRequest(begin=begin, attend=attend))
        out, lse = dense_attention(q[at], k[:, : at.stop], v[:, : at.stop])
        expected.append(
            (0 if start is None else 11, len(sequences), out, lse, 0.3 if policy else 0.1)
        )

    for t in range(30, 40):
        ask([sequence], slice(t, t + 1))
        # Tokens that are there, with another policy, with an error, and many at once.
        ask([sequence], slice(t - 2, t + 1), Policy(epsilon=0.3))
        ask([sequence], slice(t, t + 1), start=1000)
        if t % 3 == 0:
            ask(many, slice(0, 16))
    # grpcio reads answers while it sends requests, and libspillway's stubs only afterwards.
    by_grpcio = client.step_transport == "messages"
    services = raw(client.target) if by_grpcio else client.connection.stubs
    answers = list(services.attention.Step(iter(requests), timeout=60))
    for answer, (code, count, out, lse, epsilon) in zip(answers, expected, strict=True):
        assert answer.status.code == code, answer.status
        if code:
            assert not answer.results
            assert not answer.out.data
            assert not answer.lse.data
            continue
        made = decoder_like(None)
        np.testing.assert_allclose(made(answer.out), np.stack([out] * count), **TOLERANCE)
        np.testing.assert_allclose(made(answer.lse), np.stack([lse] * count), **TOLERANCE)
        assert [each.certificate.epsilon for each in answer.results] == [epsilon] * count


SPARSE = Policy(
    dense_token_count=1024,
    sink_token_count=8,
    window_token_count=8,
    heavy=TopK(count=64),
    epsilon=0.3,
    pilot_token_count=16,
)


@pytest.fixture
def long_sequence(
    client: Client, model: Model, rng: np.random.Generator
) -> tuple[Sequence, Any, Any]:
    """A sequence of 3,000 tokens, some of which have large weights."""
    sequence = client.create_sequence(model, policy=SPARSE)
    k, v = kv(rng, 2, 3000, 16)
    k[:, ::100] *= 4
    v += 1
    sequence.append(0, 0, k, v)
    return sequence, k, v


def test_select_and_fetch(
    long_sequence: tuple[Sequence, Any, Any], rng: np.random.Generator
) -> None:
    sequence, k, v = long_sequence
    q = 2 * rng.standard_normal((1, 4, 16), F32)
    chosen = sequence.select(0, q)
    assert chosen.offsets[0] == 0
    assert len(chosen.offsets) == 3
    for head in range(2):
        span = slice(chosen.offsets[head], chosen.offsets[head + 1])
        indices, strata = chosen.indices[span].astype(int), chosen.strata[span]
        weights = chosen.log_weights[span]
        assert (np.diff(indices) > 0).all()
        np.testing.assert_array_equal(indices[strata == 0], np.arange(8))
        # The window, and the open page: 3,000 is 23 * 128 + 56.
        np.testing.assert_array_equal(indices[strata == 1], np.arange(2944, 3000))
        # Every hundredth key may be a stray, and is then heavy in addition to the 64.
        heavy = indices[strata == 2]
        assert len(heavy) - (heavy % 100 == 0).sum() <= 64 <= len(heavy)
        assert (weights[strata <= 2] == 0).all()
        assert (weights[strata > 2] >= 0).all()
        assert 0 < (strata > 2).sum() < 2900
        # The weights count every token once: the sum of exp(w) is n.
        assert np.exp(weights.astype(np.float64)).sum() == pytest.approx(3000, rel=1e-4)
    # The same request selects the same rows. Attention over them with their weights equals the
    # attend.
    result = sequence.attend(0, q)
    np.testing.assert_array_equal(result.touched_row_counts[0], np.diff(chosen.offsets))
    assert chosen.certificate is not None
    np.testing.assert_array_equal(
        chosen.certificate.sampled_token_counts, result.certificate.sampled_token_counts
    )
    fetched_k, fetched_v = sequence.fetch(0, selection=chosen)
    numerator = np.zeros((4, 16))
    denominator = np.zeros(4)
    for kv_head in range(2):
        span = slice(chosen.offsets[kv_head], chosen.offsets[kv_head + 1])
        indices = chosen.indices[span].astype(int)
        np.testing.assert_array_equal(fetched_k[span], k[kv_head, indices])
        np.testing.assert_array_equal(fetched_v[span], v[kv_head, indices])
        for head in (2 * kv_head, 2 * kv_head + 1):
            logits = fetched_k[span].astype(np.float64) @ q[0, head].astype(np.float64) / 4
            weights = np.exp(logits + chosen.log_weights[span])
            numerator[head] += weights @ fetched_v[span].astype(np.float64)
            denominator[head] += weights.sum()
    np.testing.assert_allclose(result.out[0], numerator / denominator[:, None], **TOLERANCE)
    np.testing.assert_allclose(result.lse[0], np.log(denominator), **TOLERANCE)
    exact = sequence.attend(0, q, Policy(selector="all")).out
    assert np.linalg.norm(result.out - exact) < 0.3 * np.linalg.norm(exact)


def test_a_fetch_is_a_stream_of_rows_by_kv_head(
    client: Client, long_sequence: tuple[Sequence, Any, Any]
) -> None:
    sequence, k, v = long_sequence
    indices = np.array([3, 500, 2999, 0, 128], np.uint32)
    request = attention.FetchPagesRequest(
        sequence=sequence.name,
        selection=attention.Selection(offsets=[0, 3, 5], indices=encode_indices(indices)),
    )
    pages = list(client.connection.stubs.attention.FetchPages(request))
    decode = decoder_like(None)
    for head, expected in ((0, [3, 500, 2999]), (1, [0, 128])):
        got = [page for page in pages if page.kv_head == head]
        np.testing.assert_array_equal(np.concatenate([decode(p.indices) for p in got]), expected)
        rows = np.concatenate([decode(page.rows) for page in got])
        np.testing.assert_array_equal(rows, np.stack([k[head, expected], v[head, expected]], 1))


def test_abandoned_fetch_is_cancelled(
    client: Client, long_sequence: tuple[Sequence, Any, Any], rng: np.random.Generator
) -> None:
    sequence, _, _ = long_sequence
    q = rng.standard_normal((1, 4, 16), F32)
    request = attention.FetchPagesRequest(sequence=sequence.name)
    request.tokens.count = sequence.layer_token_counts[0]
    pages = sequence.state.stream(client.connection.stubs.attention.FetchPages, request)
    next(iter(pages))
    pages.close()  # type: ignore[attr-defined]
    assert sequence.attend(0, q).out.shape == (1, 4, 16)


@EVERY_TRANSPORT
def test_statistics_say_how_the_engine_is_reached(client: Client) -> None:
    told = client.statistics().transport
    assert told.steps == client.step_transport
    gpus = [gpu for gpu in client.server_info.devices if gpu.uuid]
    assert told.mps == (bool(gpus) and all(gpu.mps for gpu in gpus))
    if client.transport == "embedded":
        assert told == spillway_kv.Transport("embedded", "in place", told.mps, "")
        return
    # A new client, because other tests have attached regions to the old one.
    with spillway_kv.connect(client.target) as fresh:
        fresh.connection.carrier = client.connection.carrier
        told = fresh.statistics().transport
        assert told.steps == client.step_transport
        assert ("not shared through MPS" in told.reason) == (bool(gpus) and not told.mps)
        assert told.rows == "regions"
        assert told.reason.startswith("the engine is in a daemon")
        assert told.reason.endswith("arrays in a region of Client.attach_region are not copied")
        assert ("no doorbell" in told.reason) == (client.step_transport == "messages")
        region = fresh.attach_region(4096)
        assert fresh.statistics().transport.rows == "regions"
        assert "region" not in fresh.statistics().transport.reason
        region.detach()
        assert fresh.statistics().transport == told


def test_statistics(client: Client, model: Model, rng: np.random.Generator) -> None:
    sequence = client.create_sequence(model)
    sequence.append(0, 0, *kv(rng, 2, 2, 200, 16))
    sequence.attend(0, rng.standard_normal((3, 4, 16), F32))
    statistics = client.statistics(model)
    mine = next(m for m in statistics.models if m.model == model.name)
    assert (mine.sequence_count, mine.token_count) == (1, 200)
    assert mine.free_token_count > 1000
    assert mine.work.attend_count == 3
    assert mine.work.appended_row_count == 2 * 2 * 200
    assert mine.work.touched_row_count == mine.work.visible_row_count == 2 * (198 + 199 + 200)
    assert mine.work.exact_count == 3 * 4
    (listed,) = statistics.sequences
    assert (listed.sequence, listed.token_count) == (sequence.name, 200)
    assert listed.row_bytes >= 200 * model.row_bytes_per_token
    assert statistics.memory.row_bytes >= listed.row_bytes
    assert statistics.memory.used_bytes <= statistics.memory.limit_bytes


def test_statistics_come_in_pages(
    client: Client, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = sorted(client.create_sequence(model).name for _ in range(5))
    call = client.connection.stubs.admin.GetStatistics
    pages = []
    request = admin.GetStatisticsRequest(model=model.name, page_size=2)
    while True:
        page = call(request)
        assert [m.model for m in page.models] == [model.name]
        pages.append([s.sequence for s in page.sequences])
        request.page_token = page.next_page_token
        if not request.page_token:
            break
    assert pages == [names[:2], names[2:4], names[4:]]
    shapes: dict[str, Any] = {"layer_count": 1, "query_head_count": 1, "kv_head_count": 1}
    others = [
        client.create_model(f"paged-{i}", **shapes, head_dim=16, dtype="float32") for i in range(3)
    ]
    listed = []
    request = admin.GetStatisticsRequest(page_size=1)
    while True:
        page = call(request)
        assert not page.sequences
        listed += [m.model for m in page.models]
        request.page_token = page.next_page_token
        if not request.page_token:
            break
    assert listed == [m.model for m in client.statistics().models]
    assert {m.name for m in [model, *others]} <= set(listed)
    for other in others:
        client.delete_model(other)
    # The client follows the page tokens.
    whole = client.statistics(model)
    assert [s.sequence for s in whole.sequences] == names
    monkeypatch.setattr(client.connection.stubs.admin, "GetStatistics", in_pages_of_two(call))
    paged = client.statistics(model)
    assert (paged.sequences, paged.models) == (whole.sequences, whole.models)


def in_pages_of_two(call: Any) -> Any:
    """The call, with small pages of results."""

    def small(request: admin.GetStatisticsRequest, **more: Any) -> Any:
        return call(
            admin.GetStatisticsRequest(
                model=request.model, page_size=2, page_token=request.page_token
            ),
            **more,
        )

    return small


def test_same_request_same_bits(
    long_sequence: tuple[Sequence, Any, Any], rng: np.random.Generator
) -> None:
    sequence, _, _ = long_sequence
    q = rng.standard_normal((2, 4, 16), F32)
    first, second = (sequence.attend(0, q).message for _ in range(2))
    for result in (first, second):
        result.statistics.device_time_us = 0
    assert first == second


def test_wrong_shapes_are_seen_here(client: Client, model: Model) -> None:
    sequence = client.create_sequence(model)
    with pytest.raises(ValueError, match="q has shape"):
        sequence.attend(0, np.zeros((4, 16), F32))
    with pytest.raises(ValueError, match="v has shape"):
        sequence.append(0, 0, np.zeros((2, 3, 16), F32), np.zeros((2, 4, 16), F32))
    with pytest.raises(TypeError, match="float64"):
        sequence.append(0, 0, np.zeros((2, 3, 16)), np.zeros((2, 3, 16)))


@pytest.mark.parametrize("embedded", [False, True])
def test_closed_client(embedded: bool, target: str) -> None:
    client = spillway_kv.connect("embedded:" if embedded else target)
    model = client.create_model(
        layer_count=1, query_head_count=1, kv_head_count=1, head_dim=16, dtype="float32"
    )
    sequence = client.create_sequence(model)
    step = client.begin_step([sequence])
    if not embedded:
        sequence.delete()
        client.delete_model(model)
    client.close()
    with pytest.raises(ValueError, match="closed"):
        sequence.refresh()
    with pytest.raises(ValueError, match="closed"):
        client.begin_step([sequence])
    row = np.ones((1, 1, 1, 16), F32)
    with pytest.raises(ValueError, match="closed"):
        step.attend(0, row, row, row)
    client.close()


def test_errors_name_a_field_once() -> None:
    why = "value 2 is not in (0, 1)"
    told = spillway_kv.InvalidArgument(
        f"policy.epsilon: {why}",
        reason="INVALID_FIELD",
        fields=[spillway_kv.FieldViolation("policy.epsilon", why)],
    )
    assert str(told) == f"INVALID_ARGUMENT: policy.epsilon: {why} [INVALID_FIELD]"
    apart = spillway_kv.OutOfRange(
        "K is not finite at token 3", fields=[spillway_kv.FieldViolation("chunk.k", "at token 3")]
    )
    assert str(apart) == "OUT_OF_RANGE: K is not finite at token 3; chunk.k: at token 3"
