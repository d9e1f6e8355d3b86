"""Arrays whose memory does not simply hold their numbers: they are converted or refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import spillway_kv
import torch
from helpers import step as step_of_one
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from spillway_kv import Client, Model
from spillway_kv.prefill import Prefill
from spillway_kv.tensors import engine_array
from torch._subclasses.fake_tensor import FakeTensorMode

HEADS, KV_HEADS, DIM = 4, 2, 16
TOKENS = 20  # few, so that every attend is exact


class _OfNumpy(np.ndarray):
    pass


class _OfTorch(torch.Tensor):
    pass


def unaligned(array: Any) -> Any:
    """The same numbers, one byte after an aligned address."""
    held = np.empty(array.nbytes + 1, np.uint8)[1:].view(array.dtype).reshape(array.shape)
    held[...] = array
    return held


def turned(array: Any, axis: int) -> Any:
    """The same numbers with a negative stride."""
    return np.flip(np.flip(array, axis).copy(), axis)


def read_only(array: Any) -> Any:
    array = array.copy()
    array.setflags(write=False)
    return array


def spread(tensor: Any) -> Any:
    """The same numbers, with others between them."""
    return torch.stack([tensor, -tensor], dim=-1)[..., 0]


NUMPY: list[Callable[[Any], Any]] = [
    lambda a: a.astype(a.dtype.newbyteorder(">")),
    unaligned,
    lambda a: turned(a, 0),
    lambda a: turned(a, -1),
    lambda a: a.swapaxes(0, -1).copy().swapaxes(0, -1),
    lambda a: np.repeat(a, 2, axis=-1)[..., ::2],
    read_only,
    lambda a: a.view(_OfNumpy),
]
TORCH: list[Callable[[Any], Any]] = [
    lambda t: torch._neg_view(-t),
    lambda t: torch.complex(t.float(), -t.float()).conj().imag.to(t.dtype),
    lambda t: t.clone().requires_grad_(),
    torch.nn.Parameter,
    lambda t: t.as_subclass(_OfTorch),
    lambda t: t.transpose(0, -1).clone().transpose(0, -1),
    spread,
]


@st.composite
def views(draw: st.DrawFn, count: int) -> list[Callable[[Any], Any]]:
    """Functions that return a numpy array as another array with the same numbers."""
    of_torch = draw(st.booleans())
    made: list[Callable[[Any], Any]] = []
    for _ in range(count):
        steps = draw(st.lists(st.sampled_from(TORCH if of_torch else NUMPY), max_size=3))

        def view(array: Any, steps: Any = steps) -> Any:
            array = torch.from_numpy(array.copy()) if of_torch else array
            for step in steps:
                array = step(array)
            return array

        made.append(view)
    return made


def plain(array: Any) -> Any:
    """Any result as a numpy array of float64."""
    if isinstance(array, torch.Tensor):
        array = array.detach().resolve_neg().numpy()
    return np.asarray(array, np.float64)


def reference(q: Any, k: Any, v: Any) -> Any:
    """Attention of one query [H_q, d] over rows [H_kv, n, d]."""
    out = np.empty((HEADS, DIM))
    for head in range(HEADS):
        keys, values = (x[head * KV_HEADS // HEADS].astype(np.float64) for x in (k, v))
        weights = np.exp(keys @ q[head].astype(np.float64) / np.sqrt(DIM))
        out[head] = weights @ values / weights.sum()
    return out


@pytest.fixture(scope="module")
def both(client: Client) -> dict[str, Model]:
    """A model of each dtype that numpy has."""
    return {
        dtype: client.create_model(
            layer_count=1,
            query_head_count=HEADS,
            kv_head_count=KV_HEADS,
            head_dim=DIM,
            dtype=dtype,
        )
        for dtype in ("float32", "float16")
    }


@pytest.mark.transports("messages", "doorbell", "regions", "embedded")
@settings(
    max_examples=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    dtype=st.sampled_from(["float32", "float16"]), seed=st.integers(0, 2**32 - 1), looks=views(5)
)
def test_every_entry_takes_the_numbers(
    client: Client,
    both: dict[str, Model],
    dtype: str,
    seed: int,
    looks: list[Callable[[Any], Any]],
) -> None:
    rng = np.random.default_rng(seed)
    k, v = rng.standard_normal((2, 1, KV_HEADS, TOKENS, DIM)).astype(dtype)
    q = rng.standard_normal((1, HEADS, DIM)).astype(dtype)
    sequence = client.create_sequence(both[dtype])
    most = TOKENS - 2
    sequence.append(0, 0, looks[0](k[:, :, :most]), looks[1](v[:, :, :most]))
    tolerance = 1e-2 if dtype == "float16" else 1e-4

    def check(out: Any, count: int) -> None:
        wanted = reference(q[0], k[0, :, :count], v[0, :, :count])
        got = plain(out).reshape(HEADS, DIM)
        np.testing.assert_allclose(got, wanted, rtol=tolerance, atol=tolerance)

    def row(at: int) -> tuple[Any, Any]:
        return looks[3](k[0, :, at : at + 1]), looks[4](v[0, :, at : at + 1])

    check(sequence.attend(0, looks[2](q)).out, most)
    with client.begin_step([sequence]) as step:
        new = (looks[3](k[:, :, most : most + 1]), looks[4](v[:, :, most : most + 1]))
        out, lse = step.attend(0, looks[2](q[None]), *new)
        taken: Any = engine_array(looks[2](q), "q")
        assert type(out) is type(lse) is type(taken)
        assert str(out.dtype).removeprefix("torch.") == dtype
        check(out, most + 1)
    check(step_of_one(sequence, 0, looks[2](q), *row(most + 1)).out, TOKENS)
    # Also into such arrays, if they can be written to.
    into = tuple(looks[i](np.zeros((KV_HEADS, TOKENS, DIM), dtype)) for i in (0, 1))
    if not any(isinstance(x, np.ndarray) and not x.flags.writeable for x in into):
        sequence.fetch(0, into=into)
        np.testing.assert_array_equal(plain(into[0]), k[0])
        np.testing.assert_array_equal(plain(into[1]), v[0])
    rows = sequence.fetch(0)
    np.testing.assert_array_equal(rows[0], k[0])
    np.testing.assert_array_equal(rows[1], v[0])
    sequence.delete()


def test_bfloat16_of_any_memory(rng: np.random.Generator) -> None:
    bits = rng.integers(0, 1 << 15, (2, 3, 4), dtype=np.uint16)
    for held in (unaligned(bits), turned(bits, 0), bits.view(_OfNumpy)):
        taken = engine_array(spillway_kv.BFloat16(held), "k")
        assert isinstance(taken, spillway_kv.BFloat16)
        np.testing.assert_array_equal(taken.bits, bits)
        assert taken.bits.flags.aligned


def test_prompts_take_the_negative_bit() -> None:
    q, k = torch.randn(3, HEADS, DIM), torch.randn(KV_HEADS, 3, DIM)
    nothing: Any = None
    with Prefill() as prefill:
        wanted = prefill.attend(nothing, 0, q, k, k, start=0, scale=1.0)
        told = prefill.attend(
            nothing, 0, torch._neg_view(-q), torch._neg_view(-k), k, start=0, scale=1.0
        )
    assert torch.equal(wanted, told)


def odd_arrays() -> dict[str, tuple[Any, str]]:
    """Arrays of one token's K that cannot be taken, and what their error says."""
    plain = torch.ones(KV_HEADS, 1, DIM)
    with FakeTensorMode():
        fake = torch.ones(KV_HEADS, 1, DIM)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they are prototypes
        nested = torch.nested.nested_tensor([plain[0], plain[1]])
        csr = plain[:, 0].to_sparse_csr()
        quantized = torch.quantize_per_tensor(plain, 0.1, 0, torch.quint8)
    return {
        "masked": (np.ma.masked_equal(plain.numpy(), 7), "a masked array"),
        "meta": (plain.to("meta"), "a meta tensor"),
        "fake": (fake, "FakeTensor that has no memory"),
        "sparse": (plain.to_sparse(), "a sparse_coo tensor, not dense"),
        "csr": (csr, "a sparse_csr tensor, not dense"),
        "nested": (nested, "a nested tensor, not dense"),
        "quantized": (quantized, "elements of torch.quint8"),
        "complex": (plain.to(torch.complex64), "elements of torch.complex64"),
        "bool": (plain.numpy() > 0, "elements of bool"),
        "integers": (plain.int(), "elements of torch.int32"),
        "doubles": (plain.double(), "elements of torch.float64"),
        "list": (plain.tolist(), "is a list"),
        "objects": (plain.numpy().astype(object), "elements of object"),
    }


@pytest.mark.transports("messages", "embedded")
@pytest.mark.parametrize("kind", odd_arrays())
def test_what_cannot_be_taken_is_named(client: Client, both: dict[str, Model], kind: str) -> None:
    bad, told = odd_arrays()[kind]
    good = torch.ones(KV_HEADS, 1, DIM)
    q = torch.ones(1, HEADS, DIM)
    sequence = client.create_sequence(both["float32"])
    step = client.begin_step([sequence])
    uses: dict[str, Callable[[], Any]] = {
        "k": lambda: sequence.append(0, 0, bad, good),
        "v": lambda: sequence.append(0, 0, good, bad),
        "q": lambda: sequence.attend(0, bad),
        "q of a step": lambda: step.attend(0, bad, good[None], good[None]),
        "k of a step": lambda: step.attend(0, q[None], bad, good[None]),
        "v of a step": lambda: step.attend(0, q[None], good[None], bad),
    }
    for use, call in uses.items():
        with pytest.raises(TypeError, match=f"^{use[0]} (is|has) .*{told.removeprefix('is ')}"):
            call()
    step.close()
    assert sequence.refresh().token_count == 0
    sequence.delete()


def test_vmap_is_named() -> None:
    with pytest.raises(TypeError, match="q is a Tensor that has no memory of its own"):
        torch.func.vmap(lambda t: engine_array(t, "q"))(torch.ones(2, 3))


@pytest.mark.transports("messages", "embedded")
def test_rows_are_not_written_to_shared_elements(client: Client, both: dict[str, Model]) -> None:
    sequence = client.create_sequence(both["float32"])
    rows = np.ones((1, KV_HEADS, 3, DIM), np.float32)
    sequence.append(0, 0, rows, rows)
    one = torch.zeros(KV_HEADS, 1, DIM)
    with pytest.raises(ValueError, match="v has elements that share memory"):
        sequence.fetch(0, into=(one.repeat(1, 3, 1), one.expand(-1, 3, -1)))
    with pytest.raises(TypeError, match="k is a meta tensor"):
        sequence.fetch(0, into=_meta(rows))
    sequence.delete()


def _meta(rows: Any) -> tuple[Any, Any]:
    made = torch.empty(rows.shape[1:], device="meta")
    return made, made


@pytest.mark.parametrize(
    ("indices", "error", "told"),
    [
        ([0.0, 1.0], TypeError, "selection.indices has elements of float64, not integers"),
        ([-1, 1], ValueError, "index -1 is below 0"),
    ],
)
def test_indices_are_integers(
    client: Client, model: Model, indices: list[float], error: type[Exception], told: str
) -> None:
    sequence = client.create_sequence(model)
    rows = np.ones((2, 2, 3, 16), np.float32)
    sequence.append(0, 0, rows, rows)
    chosen = sequence.select(0, np.ones((1, 4, 16), np.float32))
    held = np.asarray(indices)
    wrong = spillway_kv.Selection(np.array([0, 1, 2]), held, held, held, chosen.certificate)
    with pytest.raises(error, match=told):
        sequence.fetch(0, selection=wrong)
