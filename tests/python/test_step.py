"""Decode steps of several sequences, announced in one call."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import spillway_kv
import torch
from daemon_process import device as daemon_device
from daemon_process import on_gpu
from spillway_kv import Client, Model, Policy, Sequence

pytestmark = pytest.mark.transports("messages", "doorbell", "embedded")

LAYERS, HEADS, KV_HEADS, DIM = 2, 4, 2, 16  # as in the fixture `model`
LENGTHS = (1500, 40, 7)


def normal(rng: np.random.Generator, *shape: int) -> Any:
    return rng.standard_normal(shape, np.float32)


def filled(client: Client, model: Model, rng: np.random.Generator) -> list[Sequence]:
    """Sequences of these lengths. One is long enough for sparse attention."""
    sequences = []
    for length in LENGTHS:
        sequence = client.create_sequence(model)
        k, v = normal(rng, 2, LAYERS, KV_HEADS, length, DIM)
        sequence.append(0, 0, k, v)
        sequences.append(sequence)
    return sequences


def tensors(rng: np.random.Generator, tokens: int = 1, count: int = len(LENGTHS)) -> Any:
    q = normal(rng, count, tokens, HEADS, DIM)
    k, v = normal(rng, 2, count, KV_HEADS, tokens, DIM)
    return q, k, v


def test_sums_are_those_of_the_results(
    client: Client, model: Model, rng: np.random.Generator
) -> None:
    sequences = filled(client, model, rng)
    with client.begin_step(sequences, token_count=3) as step:
        for layer in range(LAYERS):
            step.attend(layer, *tensors(rng, 3))
            sums, results = step.sums(), step.results()
            assert sums.attend_count == 3 * len(LENGTHS)
            touched = sum(result.touched_row_counts.sum() for result in results)
            assert sums.touched_row_count == touched > 0
            # Query t of a sequence sees the tokens before the step and t + 1 new ones.
            visible = sum(length + t for length in LENGTHS for t in (1, 2, 3))
            assert sums.visible_row_count == visible * KV_HEADS
            promises = [str(p) for r in results for p in r.certificate.promises.ravel()]
            assert sums.exact_count == promises.count("exact")
            assert sums.statistical_count == promises.count("statistical")
            assert sums.none_count == promises.count("none")
            assert len(promises) == 3 * HEADS * len(LENGTHS)
            errors = np.concatenate([r.certificate.relative_errors.ravel() for r in results])
            errors = errors[np.isfinite(errors)]
            assert sums.certified_error_count == len(errors)
            assert sums.certified_error_sum == pytest.approx(errors.sum(dtype=np.float64))
            times = [result.message.statistics.device_time_us for result in results]
            assert sums.device_time_us == pytest.approx(sum(times))
            assert min(times) > 0


@pytest.mark.parametrize("tokens", [1, 3, 16])
def test_gives_what_append_and_attend_give(
    client: Client, model: Model, rng: np.random.Generator, tokens: int
) -> None:
    together = filled(client, model, rng)
    alone = [sequence.fork() for sequence in together]
    for _ in range(2):
        with client.begin_step(together, token_count=tokens) as step:
            assert step.starts == tuple(sequence.token_count for sequence in alone)
            for layer in (1, 0):  # in any order
                q, k, v = tensors(rng, tokens)
                out, lse = step.attend(layer, q, k, v)
                assert (out.shape, out.dtype) == (q.shape, q.dtype)
                assert (lse.shape, lse.dtype) == (q.shape[:3], np.float32)
                results = step.results()
                for i, sequence in enumerate(alone):
                    sequence.append(layer, step.starts[i], k[i], v[i])
                    one = client.attend(layer, {sequence: q[i]})[sequence]
                    np.testing.assert_array_equal(out[i], one.out)
                    np.testing.assert_array_equal(lse[i], one.lse)
                    mine, theirs = results[i].certificate, one.certificate
                    np.testing.assert_array_equal(mine.relative_errors, theirs.relative_errors)
                    np.testing.assert_array_equal(mine.promises, theirs.promises)
                    np.testing.assert_array_equal(
                        results[i].touched_row_counts, one.touched_row_counts
                    )
    for sequence, length in zip(together, LENGTHS, strict=True):
        assert sequence.token_count == sequence.refresh().token_count == length + 2 * tokens


def test_a_step_of_which_some_layers_are_there_is_said_again(
    client: Client, model: Model, rng: np.random.Generator
) -> None:
    sequences = filled(client, model, rng)
    layers = [tensors(rng, 2) for _ in range(LAYERS)]
    with client.begin_step(sequences, token_count=2) as step:
        starts = step.starts
        first = step.attend(1, *layers[1])
    for _ in range(2):
        with client.begin_step(sequences, token_count=2, starts=starts) as step:
            assert step.starts == starts == LENGTHS
            for wanted, again in zip(first, step.attend(1, *layers[1]), strict=True):
                np.testing.assert_array_equal(wanted, again)
            step.attend(0, *layers[0])
            assert step.results()[0].certificate is not None
    assert [s.refresh().layer_token_counts for s in sequences] == [(n + 2, n + 2) for n in LENGTHS]
    with client.begin_step(sequences, token_count=2, starts=starts) as step:
        q, k, v = layers[0]
        with pytest.raises(spillway_kv.AlreadyExists):
            step.attend(0, q, k + 1, v)
    with client.begin_step(sequences[:1], starts=[LENGTHS[0] + 4]) as step:
        with pytest.raises(spillway_kv.OutOfRange):
            step.attend(0, *tensors(rng, count=1))


def test_bad_starts(client: Client, model: Model, rng: np.random.Generator) -> None:
    sequences = filled(client, model, rng)
    with pytest.raises(ValueError, match="2 starts for 3 sequences"):
        client.begin_step(sequences, starts=[1, 2])
    with pytest.raises(ValueError, match=f"start -1 of {sequences[1].name} is below 0"):
        client.begin_step(sequences, starts=[0, -1, 0])


def test_equals_attention_computed_here(
    client: Client, model: Model, rng: np.random.Generator
) -> None:
    sequence = client.create_sequence(model)
    k, v = normal(rng, 2, LAYERS, KV_HEADS, 30, DIM)
    sequence.append(0, 0, k[:, :, :28], v[:, :, :28])
    q = normal(rng, 1, 2, HEADS, DIM)
    with client.begin_step([sequence], token_count=2) as step:
        out, lse = step.attend(1, q, k[1:, :, 28:], v[1:, :, 28:])
    for t in range(2):
        for h in range(HEADS):
            seen = slice(0, 29 + t)
            logits = (k[1, h // 2, seen].astype(np.float64) @ q[0, t, h]) / np.sqrt(DIM)
            weights = np.exp(logits)
            np.testing.assert_allclose(lse[0, t, h], np.log(weights.sum()), rtol=1e-5)
            np.testing.assert_allclose(
                out[0, t, h], weights @ v[1, h // 2, seen] / weights.sum(), rtol=1e-4, atol=1e-5
            )


def test_torch_of_any_strides(client: Client, rng: np.random.Generator) -> None:
    model = client.create_model(
        layer_count=1, query_head_count=HEADS, kv_head_count=KV_HEADS, head_dim=DIM
    )
    sequences = [client.create_sequence(model) for _ in range(2)]
    # The layout of models: views of one projection [B, T, heads, d].
    projected = torch.randn(2, 3, HEADS + 2 * KV_HEADS, DIM).bfloat16()
    q, k, v = projected.split([HEADS, KV_HEADS, KV_HEADS], dim=2)
    with client.begin_step(sequences, token_count=3) as step:
        out, lse = step.attend(0, q, k.transpose(1, 2), v.transpose(1, 2))
        assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    turned = [x.transpose(1, 2).float() for x in (q, k, v)]
    wanted = torch.nn.functional.scaled_dot_product_attention(
        turned[0], turned[1], turned[2], is_causal=True, enable_gqa=True
    )
    torch.testing.assert_close(out.float(), wanted.transpose(1, 2), rtol=0.01, atol=0.01)
    with client.begin_step(sequences) as step:
        every = q[:, ::3], k[:, ::3].transpose(1, 2), v[:, ::3].transpose(1, 2)
        whole, _ = step.attend(0, *every, out_dtype="float32")
        assert whole.dtype == torch.float32
    for sequence in sequences:
        sequence.delete()
    client.delete_model(model)


def test_a_policy_holds_for_the_step(
    client: Client, model: Model, rng: np.random.Generator
) -> None:
    sequences = filled(client, model, rng)
    q, k, v = tensors(rng)
    with client.begin_step(sequences, policy=Policy(selector="all")) as step:
        step.attend(0, q, k, v)
        for result, length in zip(step.results(), LENGTHS, strict=True):
            assert (result.touched_row_counts == length + 1).all()
            assert set(result.certificate.promises.ravel()) == {"exact"}


def test_results_are_those_of_the_layer_that_was_attended_last(
    client: Client, model: Model, rng: np.random.Generator
) -> None:
    """Also if those of another layer were asked for before. Layer 1 reads all its rows."""
    length = 6000
    sequence = client.create_sequence(model)
    sequence.append(0, 0, *normal(rng, 2, LAYERS, KV_HEADS, length, DIM))
    policy = Policy(dense_token_count=1024, dense_layers=[1])
    layers = [tensors(rng, count=1) for _ in range(LAYERS)]
    with client.begin_step([sequence], policy=policy) as step:
        for layer in (0, 1, 0, 1):
            out, _ = step.attend(layer, *layers[layer])
            for _ in range(2):
                (result,) = step.results()
                np.testing.assert_array_equal(result.out, out[0])
                assert (result.touched_row_counts == length + 1).all() == (layer == 1)
                assert (result.certificate.promises == "exact").all() == (layer == 1)


@pytest.mark.skipif(not on_gpu(), reason="SPILLWAY_TEST_DEVICE names no GPU")
def test_cuda_tensors_of_steps_one_after_the_other(
    client: Client, model: Model, rng: np.random.Generator
) -> None:
    """Each step attends to tensors that the stream has yet to write."""
    sequences = filled(client, model, rng)
    alone = [sequence.fork() for sequence in sequences]
    device = daemon_device()
    for _ in range(5):
        # Long enough that a copy that did not wait for it would read old values.
        busy = torch.randn(4096, 4096, device=device)
        with client.begin_step(sequences) as step, client.begin_step(alone) as other:
            for layer in range(LAYERS):
                wanted = tensors(rng)
                on_device = [torch.zeros(x.shape, device=device) for x in wanted]
                pinned = [torch.from_numpy(x).pin_memory() for x in wanted]
                for _ in range(20):
                    busy = busy @ busy / 64
                for to, of in zip(on_device, pinned, strict=True):
                    to.copy_(of, non_blocking=True)
                out, lse = step.attend(layer, *on_device)
                assert (out.device.type, lse.device.type) == ("cuda", "cuda")
                expected, sums = other.attend(layer, *wanted)
                np.testing.assert_array_equal(out.cpu().numpy(), expected)
                np.testing.assert_array_equal(lse.cpu().numpy(), sums)


# Misuse.


def test_bad_steps(client: Client, model: Model, rng: np.random.Generator) -> None:
    one, two, _ = filled(client, model, rng)
    other = client.create_model(
        layer_count=1, query_head_count=1, kv_head_count=1, head_dim=16, dtype="float32"
    )
    stranger = client.create_sequence(other)
    q, k, v = tensors(rng, count=2)
    with pytest.raises(ValueError, match=r"0 sequences are not in \[1, 256\]"):
        client.begin_step([])
    for bad, told in (((one, one), "named twice"), ((one, stranger), other.name)):
        with pytest.raises(ValueError, match=told):
            client.begin_step(bad)
    for count in (0, 17, -1):
        with pytest.raises(ValueError, match=r"not in \[1, 16\]"):
            client.begin_step([one, two], token_count=count)
    two.delete()
    with pytest.raises(spillway_kv.NotFound, match=two.name):
        client.begin_step([one, two]).attend(0, q, k, v)
    stranger.delete()
    client.delete_model(other)


def test_bad_tensors_append_nothing(client: Client, model: Model, rng: np.random.Generator) -> None:
    sequences = filled(client, model, rng)
    q, k, v = tensors(rng)
    with client.begin_step(sequences) as step:
        for bad, what in (
            ((q[:2], k, v), "q has shape"),
            ((q, k[:, :1], v), "k has shape"),
            ((q, k, v[..., :8]), "v has shape"),
            ((q, k.astype(np.float16), v), "k has another dtype than the model"),
        ):
            with pytest.raises(ValueError, match=what):
                step.attend(0, *bad)
        for layer in (-1, 2):
            with pytest.raises(spillway_kv.InvalidArgument, match=f"value {layer} is not in"):
                step.attend(layer, q, k, v)
    for name, index in (("q", (1, 0, 3, 5)), ("k", (0, 1, 0, 5)), ("v", (2, 0, 0, 15))):
        bad_tensors = {"q": q.copy(), "k": k.copy(), "v": v.copy()}
        bad_tensors[name][index] = np.nan
        with client.begin_step(sequences) as step:
            with pytest.raises(
                spillway_kv.OutOfRange, match="(?i)" + name + ".* is not finite"
            ) as e:
                step.attend(0, **bad_tensors)
            assert e.value.reason == "NON_FINITE"
            assert sequences[index[0]].name in str(e.value)
    lengths = [sequence.refresh().layer_token_counts for sequence in sequences]
    assert lengths == [(length, length) for length in LENGTHS]


def test_what_went_on_meanwhile_is_said(
    client: Client, model: Model, rng: np.random.Generator
) -> None:
    sequence, *_ = filled(client, model, rng)
    q, k, v = tensors(rng, count=1)
    step = client.begin_step([sequence])
    client.get_sequence(sequence.name).truncate(1000)
    with pytest.raises(spillway_kv.Aborted, match="generation"):
        step.attend(0, q, k, v)
    sequence.refresh()
    with client.begin_step([sequence]) as step:
        step.attend(0, q, k, v)
        # The same rows again are accepted; other rows are refused.
        step.attend(0, q, k, v)
        with pytest.raises(spillway_kv.AlreadyExists, match="other rows"):
            step.attend(0, q, k + 1, v)
    assert sequence.refresh().layer_token_counts == (1001, 1000)


def test_a_closed_step(client: Client, model: Model, rng: np.random.Generator) -> None:
    sequence = client.create_sequence(model)
    step = client.begin_step([sequence])
    step.close()
    step.close()
    with pytest.raises(ValueError, match="is closed"):
        step.attend(0, *tensors(rng, count=1))
    assert sequence.refresh().token_count == 0


def test_a_step_outlives_no_client(model: Model, client: Client, target: str) -> None:
    embedded = client.transport == "embedded"
    own = spillway_kv.connect("embedded:" if embedded else target)
    made = own.create_model(
        layer_count=1, query_head_count=HEADS, kv_head_count=KV_HEADS, head_dim=DIM, dtype="float32"
    )
    sequence = own.create_sequence(made)
    step = own.begin_step([sequence])
    if not embedded:
        sequence.delete()
        own.delete_model(made)
    own.close()
    rng = np.random.default_rng(0)
    with pytest.raises((ValueError, spillway_kv.SpillwayError)):
        step.attend(0, *tensors(rng, count=1))
    step.close()
