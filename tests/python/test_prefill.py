"""Exact attention of a prompt's chunks, compared with double precision."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import spillway_kv
import torch
from daemon_process import on_gpu
from helpers import delete_model
from spillway_kv import prefill_kernels
from spillway_kv.prefill import Prefill, attend_bytes, attention_with_lse, buffer_bytes, merge
from spillway_kv.prefill_kernels import copy_rows, kernel_of, trials, window_attention

GPU = on_gpu()
DEVICE = torch.device("cuda:0" if GPU else "cpu")
# Differences that rounding explains, for inputs and outputs with standard deviation 1.
TOLERANCES = {torch.float32: 2e-3 if GPU else 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
DTYPES = list(TOLERANCES)


def made(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


def reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    seen: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [T, H_q, d], log-sum-exp [T, H_q], in float64. seen: which keys are visible [T, L]."""
    query, keys, values = (x.cpu().double() for x in (q, k, v))
    group = q.shape[1] // k.shape[0]
    keys, values = (x.repeat_interleave(group, 0) for x in (keys, values))
    logits = torch.einsum("thd,hld->htl", query, keys) * scale
    if seen is not None:
        logits = logits.masked_fill(~seen.cpu(), -math.inf)
    out = torch.einsum("htl,hld->thd", logits.softmax(-1), values)
    return out, logits.logsumexp(-1).T


def causal(token_count: int, length: int, window: int | None = None) -> torch.Tensor:
    """Which keys the last T of L tokens see."""
    at = torch.arange(length - token_count, length)[:, None]
    key = torch.arange(length)
    seen = key <= at
    return seen if window is None else seen & (key > at - window)


def expect(mine: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype) -> None:
    assert mine.shape == wanted.shape
    difference = (mine.cpu().double() - wanted).abs()
    # Written so that NaN fails.
    assert difference.max() <= TOLERANCES[dtype], int(difference.argmax())


class Held:
    """Stands for a sequence with K and V, and notes the fetches."""

    def __init__(self, k: torch.Tensor, v: torch.Tensor) -> None:
        self.k, self.v = k, v
        self.asked: list[tuple[int, int]] = []

    def fetch(
        self,
        layer: int,
        start: int = 0,
        end: int | None = None,
        *,
        into: tuple[Any, Any] | None = None,
    ) -> tuple[Any, Any]:
        assert layer == 3
        assert end is not None
        assert into is not None
        self.asked.append((start, end))
        into[0].copy_(self.k[:, start:end])
        into[1].copy_(self.v[:, start:end])
        return into


# Kernels.


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [15, 16, 40, 64, 128, 192, 256])
@pytest.mark.parametrize("group", [1, 3, 8])
def test_attention_with_lse(dtype: torch.dtype, head_dim: int, group: int) -> None:
    scale = 0.7 / head_dim**0.5
    shapes = ((1, 1), (1, 300), (7, 64), (130, 333), (256, 512))
    for (count, length), masked in itertools.product(shapes, (False, True)):
        if masked:
            length = count
        q = made(count, 2 * group, head_dim, dtype=dtype)
        k, v = made(2, 2, length, head_dim, dtype=dtype, seed=2)
        out, lse = attention_with_lse(q, k, v, causal=masked, scale=scale)
        assert out.dtype == dtype
        assert lse.dtype == torch.float32
        wanted = reference(q, k, v, scale, causal(count, length) if masked else None)
        expect(out, wanted[0], dtype)
        expect(lse, wanted[1], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["cudnn", "flash", "efficient", "flash_cpu", "plain"])
def test_each_kernel(name: str, dtype: torch.dtype) -> None:
    """A kernel's results are used as returned, above all the base and layout of the log-sum-exp."""
    for head_dim, group in ((64, 1), (128, 4), (128, 8)):
        known = {trial.kernel: trial.refusal for trial in trials(DEVICE, dtype, head_dim, group)}
        if name != "plain" and known.get(name, "of another device"):
            pytest.skip(f"{name}: {known.get(name, 'of another device')}")
        q = made(256, 2 * group, head_dim, dtype=dtype)
        k, v = made(2, 2, 512, head_dim, dtype=dtype, seed=2)
        out, lse = prefill_kernels._KERNELS[name](q, k, v, False, 0.125)
        wanted = reference(q, k, v, 0.125)
        expect(out, wanted[0], dtype)
        expect(lse, wanted[1], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_kernels_of_this_device(dtype: torch.dtype) -> None:
    q, k = made(1024, 8, 128, dtype=dtype), made(2, 2048, 128, dtype=dtype)
    if not GPU:
        expected = "flash_cpu"
    elif dtype == torch.float32:
        expected = "efficient"
    else:
        expected = "cudnn" if torch.cuda.get_device_capability() >= (9, 0) else "flash"
    tried = trials(DEVICE, dtype, 128, 4)
    assert kernel_of(q, k, causal=False) == expected, tried
    if GPU and dtype != torch.float32:
        # A length that occurs only once, so no plan is made for it.
        assert kernel_of(q[:500], k, causal=False) == "flash", tried


@pytest.mark.parametrize(
    ("count", "length", "expected"),
    [
        (1024, 2048, [((1024, 2048), "cudnn")]),
        (
            700,
            5000,
            [
                ((512, 4096), "cudnn"),
                ((512, 904), "flash"),
                ((188, 4096), "flash"),
                ((188, 904), "flash"),
            ],
        ),
        (3, 2049, [((3, 2048), "flash"), ((3, 1), "flash")]),
        (512, 100, [((512, 100), "flash")]),
    ],
)
def test_parts(
    monkeypatch: pytest.MonkeyPatch, count: int, length: int, expected: list[Any]
) -> None:
    """Lengths for which cuDNN would make a new plan are split into lengths that occur again."""
    ran: list[Any] = []

    def noted(name: str) -> Any:
        def run(q: torch.Tensor, k: torch.Tensor, *rest: Any) -> Any:
            ran.append(((q.shape[0], k.shape[1]), name))
            return prefill_kernels._plain(q, k, *rest)

        return run

    monkeypatch.setattr(
        prefill_kernels,
        "trials",
        lambda *_: [prefill_kernels.Trial(name, "") for name in ("cudnn", "flash")],
    )
    for name in ("cudnn", "flash"):
        monkeypatch.setitem(prefill_kernels._KERNELS, name, noted(name))
    q, (k, v) = made(count, 2, 16), made(2, 1, length, 16, seed=2)
    new = made(2, 1, count, 16, seed=3)
    with Prefill(block_token_count=8192) as prefill:
        held = Held(k, v)
        out = prefill.attend(held, 3, q, *new, start=length, scale=0.25)
        assert ran[1:] == expected
        assert prefill.kernel == expected[0][1]
    keys, values = (torch.cat(pair, dim=1) for pair in zip((k, v), new, strict=True))
    wanted = reference(q, keys, values, 0.25, causal(count, count + length))
    expect(out, wanted[0], torch.float32)


def test_a_wrong_kernel_is_not_taken() -> None:
    def wrong(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = prefill_kernels._plain(*args)
        return out, lse / math.log(2)

    def failing(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        raise RuntimeError("no such head_dim\nand more")

    def refusal(kernel: Any) -> str:
        return prefill_kernels._refusal(kernel, DEVICE, torch.float32, 16, 2)

    assert refusal(prefill_kernels._plain) == ""
    assert refusal(wrong) == "the log-sum-exp differs from plain arithmetic"
    assert refusal(failing) == "no such head_dim"


def test_no_keys() -> None:
    q, k = made(3, 4, 16), made(2, 0, 16)
    out, lse = attention_with_lse(q, k, k, causal=False, scale=1.0)
    assert (out == 0).all()
    assert (lse == -math.inf).all()
    assert attention_with_lse(q[:0], k, k, causal=True, scale=1.0)[0].shape == (0, 4, 16)
    with pytest.raises(ValueError, match="causal attention of 3 queries over 0 keys"):
        attention_with_lse(q, k, k, causal=True, scale=1.0)
    with pytest.raises(TypeError, match="float64"):
        attention_with_lse(q.double(), made(2, 5, 16), k, causal=False, scale=1.0)


def test_inputs_of_any_strides() -> None:
    wide = made(2, 3, 50, 20, 16)
    q = wide[0, 0, :, :8].transpose(1, 0).contiguous().transpose(1, 0)  # [50, 8, 16]
    k, v = (wide[1, index, :, ::10].transpose(0, 1) for index in range(2))
    across = q.transpose(1, 2).contiguous().transpose(1, 2)
    assert across.stride(-1) != 1
    for query in (q, across):
        out, lse = attention_with_lse(query, k, v, causal=True, scale=0.3)
        wanted = reference(q, k, v, 0.3, causal(50, 50))
        expect(out, wanted[0], torch.float32)
        expect(lse, wanted[1], torch.float32)


@pytest.mark.parametrize(
    ("columns", "first", "head_dim"),
    # Rows of 256 bytes; of 32; a first element, a row and a stride that are not multiples of 16.
    [(1536, 512, 128), (96, 32, 16), (1024, 1, 128), (120, 40, 20), (1025, 0, 128)],
)
def test_copies_of_rows(columns: int, first: int, head_dim: int) -> None:
    """Two heads side by side in each token's row, as a model has them."""
    drawn = torch.randn(50, columns).to(torch.bfloat16).to(DEVICE)
    rows = drawn[:, first : first + 2 * head_dim].unflatten(1, (2, head_dim)).transpose(0, 1)
    to = torch.zeros(2, 70, head_dim, dtype=torch.bfloat16, device=DEVICE)
    copy_rows(to[:, 20:], rows)
    for token in range(50):
        expected = drawn[token, first : first + 2 * head_dim].view(2, head_dim)
        assert torch.equal(to[:, 20 + token], expected)
    assert not to[:, :20].any()


def test_merge() -> None:
    q, (k, v) = made(9, 6, 32), made(2, 3, 100, 32, seed=2)
    for cut in (0, 1, 60, 100):
        first = attention_with_lse(q, k[:, :cut], v[:, :cut], causal=False, scale=0.2)
        second = attention_with_lse(q, k[:, cut:], v[:, cut:], causal=False, scale=0.2)
        before = [x.clone() for x in (*first, *second)]
        out, lse = merge(*first, *second)
        assert all(map(torch.equal, before, (*first, *second)))
        wanted = reference(q, k, v, 0.2)
        expect(out, wanted[0], torch.float32)
        expect(lse, wanted[1], torch.float32)
    nothing = attention_with_lse(q, k[:, :0], v[:, :0], causal=False, scale=0.2)
    out, lse = merge(*nothing, *nothing)
    assert (out == 0).all()
    assert (lse == -math.inf).all()


def test_merge_of_far_apart_sums() -> None:
    # With logits in the hundreds, the weights of neither part may overflow.
    q, (k, v) = made(4, 2, 16), made(2, 2, 40, 16, seed=2)
    k[:, :20] *= 100
    parts = [
        attention_with_lse(q, k[:, part], v[:, part], causal=False, scale=1.0)
        for part in (slice(0, 20), slice(20, 40))
    ]
    assert parts[0][1].abs().max() > 100
    for pair in (parts, parts[::-1]):
        out, _ = merge(*pair[0], *pair[1])
        expect(out, reference(q, k, v, 1.0)[0], torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [1, 5, 64, 600, 5000])
def test_window_attention(dtype: torch.dtype, window: int) -> None:
    for count, length in ((1, 1), (1, 700), (30, 100), (1100, 1100), (530, 1400)):
        q = made(count, 6, 24, dtype=dtype)
        k, v = made(2, 3, length, 24, dtype=dtype, seed=2)
        out = window_attention(q, k, v, window=window, scale=0.25)
        expect(out, reference(q, k, v, 0.25, causal(count, length, window))[0], dtype)


# Chunks.


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("group", "head_dim"), [(1, 16), (4, 128), (2, 256), (3, 17)])
@pytest.mark.parametrize("block", [1, 100, 4096])
def test_chunks(dtype: torch.dtype, group: int, head_dim: int, block: int) -> None:
    length = 40 if block == 1 else 777
    k, v = made(2, 2, length, head_dim, dtype=dtype)
    q = made(length, 2 * group, head_dim, dtype=dtype, seed=5)
    scale = head_dim**-0.5
    wanted, _ = reference(q, k, v, scale, causal(length, length))
    held = Held(k, v)
    with Prefill(block_token_count=block) as prefill:
        start = 0
        for end in (length // 3, length // 3 + 1, length - 5, length):
            part = slice(start, end)
            out = prefill.attend(held, 3, q[part], k[:, part], v[:, part], start=start, scale=scale)
            assert out.dtype == dtype
            assert out.is_contiguous()
            expect(out, wanted[part], dtype)
            blocks = [(at, min(at + block, start)) for at in range(0, start, block)]
            assert sorted(held.asked) == blocks
            held.asked.clear()
            start = end
        assert prefill.buffer_bytes == buffer_bytes(
            kv_heads=2, head_dim=head_dim, dtype=dtype, block_token_count=block
        )
    assert prefill.buffer_bytes == 0


@pytest.fixture
def only_plain(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Plain arithmetic is the only kernel. It takes more keys than queries with a causal mask."""
    monkeypatch.setattr(prefill_kernels, "_TRIED", {})
    trials.cache_clear()
    yield
    trials.cache_clear()


@pytest.mark.usefixtures("only_plain")
@pytest.mark.parametrize("block", [50, 100, 1000])
def test_a_chunk_is_attended_in_one_call_with_the_last_block(
    block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk that has no room behind the block is attended in a call of its own."""
    calls: list[tuple[int, int, bool]] = []
    real = prefill_kernels.attention_with_lse

    def noted(q: torch.Tensor, k: torch.Tensor, *more: Any, causal: bool, **other: Any) -> Any:
        calls.append((q.shape[0], k.shape[1], causal))
        return real(q, k, *more, causal=causal, **other)

    monkeypatch.setattr(prefill_kernels, "attention_with_lse", noted)
    monkeypatch.setattr("spillway_kv.prefill.attention_with_lse", noted)
    k, v = made(2, 2, 300, 16)
    q = made(300, 4, 16, seed=5)
    wanted, _ = reference(q, k, v, 0.25, causal(300, 300))
    with Prefill(block_token_count=block, joined_token_count=60) as prefill:
        for start, end in ((120, 180), (100, 150), (200, 300)):
            part = slice(start, end)
            calls.clear()
            out = prefill.attend(
                Held(k, v), 3, q[part], k[:, part], v[:, part], start=start, scale=0.25
            )
            assert out.is_contiguous()
            expect(out, wanted[part], torch.float32)
            count, last = end - start, start % block or min(block, start)
            masked = [call for call in calls if call[2]]
            assert masked == [(count, last + count if count <= 60 else count, True)]
        assert prefill.buffer_bytes == buffer_bytes(
            kv_heads=2, head_dim=16, dtype=torch.float32, block_token_count=block + 60
        )


class Layers(Held):
    """A sequence with other K and V in each layer."""

    def __init__(self, rows: list[torch.Tensor]) -> None:
        super().__init__(*rows[0])
        self.rows = rows
        self.layers: list[int] = []
        self.fails = -1

    def fetch(self, layer: int, start: int = 0, end: int | None = None, **more: Any) -> Any:
        self.layers.append(layer)
        if layer == self.fails:
            raise spillway_kv.Unavailable("gone")
        into = more["into"]
        into[0].copy_(self.rows[layer][0][:, start:end])
        into[1].copy_(self.rows[layer][1][:, start:end])
        return into


def _eventually(held: Layers, expected: list[int]) -> None:
    for _ in range(500):
        if held.layers == expected:
            return
        time.sleep(0.01)
    assert held.layers == expected


@pytest.mark.parametrize("block", [40, 100, 1000])
def test_rows_of_the_next_layer_are_fetched_meanwhile(block: int) -> None:
    """They are used if that layer comes next, and dropped if another one does."""
    rows = [made(2, 2, 150, 16, seed=seed) for seed in range(4)]
    q = made(50, 4, 16, seed=9)
    held = Layers(rows)
    count = -(-100 // block)

    def attend(prefill: Prefill, layer: int, next_layer: int | None, start: int = 100) -> None:
        k, v = rows[layer]
        new = slice(start, start + 50)
        out = prefill.attend(
            held, layer, q, k[:, new], v[:, new], start=start, scale=0.25, next_layer=next_layer
        )
        wanted = reference(q, k[:, : new.stop], v[:, : new.stop], 0.25, causal(50, new.stop))
        expect(out, wanted[0], torch.float32)

    with Prefill(block_token_count=block) as prefill:
        attend(prefill, 0, 1)
        ahead = min(count, 2)
        _eventually(held, [0] * count + [1] * ahead)
        attend(prefill, 1, None)
        assert held.layers == [0] * count + [1] * count
        attend(prefill, 2, 3)
        # Another layer, and another start.
        attend(prefill, 0, 3)
        attend(prefill, 3, None, start=60)
        held.layers.clear()
        held.fails = 1
        attend(prefill, 0, 1)
        attend(prefill, 2, 1)
        with pytest.raises(spillway_kv.Unavailable, match="gone"):
            attend(prefill, 1, None)
        held.fails = -1
        attend(prefill, 1, 2)


def test_a_kernel_of_somebody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is tried before all others, and serves if its results are right."""
    monkeypatch.setattr(prefill_kernels, "_KERNELS", dict(prefill_kernels._KERNELS))
    monkeypatch.setattr(prefill_kernels, "_TRIED", dict(prefill_kernels._TRIED))
    monkeypatch.setattr(prefill_kernels, "_JOINING", set(prefill_kernels._JOINING))
    q, k = made(30, 4, 16), made(2, 30, 16)
    served_before = kernel_of(q, k, causal=True)

    def from_the_first_key(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v, masked, scale = args
        return prefill_kernels._plain(q, k[:, : q.shape[0]] if masked else k, v, masked, scale)

    try:
        prefill_kernels.add_kernel(DEVICE.type, "wrong", from_the_first_key)
        assert kernel_of(q, k, causal=True) == served_before
        prefill_kernels.add_kernel(DEVICE.type, "theirs", lambda *a: prefill_kernels._plain(*a))
        prefill_kernels.add_kernel(DEVICE.type, "theirs", from_the_first_key)
        assert kernel_of(q, k, causal=True) == "theirs"
        assert prefill_kernels.joins(q, k)
        out, _ = attention_with_lse(q[:10], k, k, causal=True, scale=0.25)
        expect(out, reference(q[:10], k, k, 0.25, causal(10, 30))[0], torch.float32)
    finally:
        trials.cache_clear()


def test_kernel_is_told() -> None:
    k, v = made(2, 2, 100, 64)
    q = made(100, 4, 64)
    with Prefill() as prefill:
        assert prefill.kernel == ""
        prefill.attend(Held(k, v), 3, q, k, v, start=0, scale=1.0)
        assert prefill.kernel == ("efficient" if GPU else "flash_cpu")
        assert prefill.buffer_bytes == 0
        prefill.attend(Held(k, v), 3, q, k, v, start=100, scale=1.0, window=3)
        assert prefill.kernel == "window"


@pytest.mark.parametrize("window", [1, 2, 50, 300, 1000])
def test_window(window: int) -> None:
    k, v = made(2, 2, 400, 32)
    q = made(400, 6, 32, seed=5)
    wanted, _ = reference(q, k, v, 0.2, causal(400, 400, window))
    with Prefill(block_token_count=64) as prefill:
        for start, end in ((0, 250), (250, 251), (251, 400)):
            held = Held(k, v)
            part = slice(start, end)
            out = prefill.attend(
                held, 3, q[part], k[:, part], v[:, part], start=start, scale=0.2, window=window
            )
            expect(out, wanted[part], torch.float32)
            before = min(start, window - 1)
            assert held.asked == ([(start - before, start)] if before else [])


def test_views_of_a_model() -> None:
    # The layout of transformers: [B, H, T, d], as a view of a projection [B, T, H * d].
    q = made(1, 300, 8 * 32).view(1, 300, 8, 32).transpose(1, 2)
    k, v = (made(1, 300, 2 * 32, seed=s).view(1, 300, 2, 32).transpose(1, 2) for s in (2, 3))
    wanted, _ = reference(q[0].transpose(0, 1), k[0], v[0], 0.2, causal(300, 300))
    with Prefill(block_token_count=50) as prefill:
        out = prefill.attend(
            Held(k[0], v[0]),
            3,
            q[0, :, 120:].transpose(0, 1),
            k[0, :, 120:],
            v[0, :, 120:],
            start=120,
            scale=0.2,
        )
    expect(out, wanted[120:], torch.float32)


def test_misuse() -> None:
    q, (k, v) = made(5, 4, 16), made(2, 2, 5, 16)
    held = Held(k, v)
    with Prefill() as prefill:
        for changed, told in (
            ({"q": q[0]}, r"q has shape \[4, 16\]"),
            ({"v": v[:, 1:]}, r"v \[2, 4, 16\]"),
            ({"q": q[:, :3]}, "a multiple of H_kv"),
            ({"q": q[:4]}, "T and d must be the same"),
            ({"q": q.half()}, "differ in dtype"),
            ({"start": -1}, "start is -1"),
            ({"window": 0}, "window is 0"),
        ):
            given: dict[str, Any] = {"q": q, "k": k, "v": v, "start": 0, "scale": 1.0, **changed}
            tensors = [given.pop(name) for name in "qkv"]
            with pytest.raises(ValueError, match=told):
                prefill.attend(held, 3, *tensors, **given)
        assert held.asked == []
    with pytest.raises(ValueError, match="block_token_count is 0"):
        Prefill(block_token_count=0)


class Interrupted(BaseException):
    """An exception like Ctrl-C."""


class Failing(Held):
    """Slow fetches. The fetch at one token fails."""

    def __init__(self, k: torch.Tensor, v: torch.Tensor, at: int, error: BaseException) -> None:
        super().__init__(k, v)
        self.at, self.error = at, error
        self.running = 0
        self.lock = threading.Lock()

    def fetch(self, layer: int, start: int = 0, end: int | None = None, **more: Any) -> Any:
        with self.lock:
            self.running += 1
        try:
            time.sleep(0.02)
            if start == self.at:
                raise self.error
            return super().fetch(layer, start, end, **more)
        finally:
            with self.lock:
                self.running -= 1


@pytest.mark.parametrize("at", [0, 40, 90])
def test_failed_fetch(at: int) -> None:
    k, v = made(2, 2, 100, 16)
    q = made(100, 4, 16)
    held = Failing(k, v, at, spillway_kv.Unavailable("gone"))
    with Prefill(block_token_count=10) as prefill:
        with pytest.raises(spillway_kv.Unavailable, match="gone"):
            prefill.attend(held, 3, q, k, v, start=100, scale=0.25)
        assert held.running == 0
        # Blocks far behind the failed one were not requested.
        assert max(held.asked, default=(0, 0))[0] <= at + 10
        # It can be used again.
        out = prefill.attend(Held(k, v), 3, q, k, v, start=100, scale=0.25)
    keys, values = (torch.cat([x, x], dim=1) for x in (k, v))
    expect(out, reference(q, keys, values, 0.25, causal(100, 200))[0], torch.float32)


def test_interruption(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the caller is interrupted, no thread writes to the buffers any more."""
    k, v = made(2, 2, 100, 16)
    held = Failing(k, v, -1, ValueError())
    calls = itertools.count()
    real = prefill_kernels.merge_into

    def interrupted(*args: Any) -> None:
        if next(calls) == 3:
            raise Interrupted
        real(*args)

    monkeypatch.setattr("spillway_kv.prefill.merge_into", interrupted)
    with Prefill(block_token_count=10) as prefill:
        with pytest.raises(Interrupted):
            prefill.attend(held, 3, made(100, 4, 16), k, v, start=100, scale=0.25)
        assert held.running == 0
        count = len(held.asked)
        time.sleep(0.1)
        assert len(held.asked) == count < 10


def test_one_at_a_time() -> None:
    k, v = made(2, 2, 100, 16)
    entered, go = threading.Event(), threading.Event()

    class Waiting(Held):
        def fetch(self, *args: Any, **more: Any) -> Any:
            entered.set()
            assert go.wait(10)
            return super().fetch(*args, **more)

    with Prefill() as prefill:
        given: dict[str, Any] = {"start": 100, "scale": 0.25}
        first = threading.Thread(
            target=lambda: prefill.attend(Waiting(k, v), 3, made(100, 4, 16), k, v, **given)
        )
        first.start()
        assert entered.wait(10)
        with pytest.raises(ValueError, match="another attend"):
            prefill.attend(Held(k, v), 3, made(100, 4, 16), k, v, **given)
        go.set()
        first.join()
    assert not any(t.name.startswith("spillway-prefill") for t in threading.enumerate())


# With an engine.


@pytest.fixture(params=DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def of_engine(
    client: spillway_kv.Client, request: pytest.FixtureRequest
) -> Iterator[tuple[spillway_kv.Sequence, torch.dtype]]:
    model = client.create_model(
        layer_count=2,
        query_head_count=8,
        kv_head_count=2,
        head_dim=64,
        dtype=str(request.param).removeprefix("torch."),  # type: ignore[arg-type]
    )
    yield client.create_sequence(model), request.param
    delete_model(client, model)


@pytest.mark.transports("messages", "doorbell", "embedded")
def test_prompt_by_chunks(of_engine: tuple[spillway_kv.Sequence, torch.dtype]) -> None:
    sequence, dtype = of_engine
    length, layer = 3000, 1
    k, v = made(2, 2, length, 64, dtype=dtype)
    q = made(length, 8, 64, dtype=dtype, seed=5)
    wanted, _ = reference(q, k, v, 0.125, causal(length, length))
    with Prefill(block_token_count=700) as prefill:
        for start in range(0, length, 800):
            part = slice(start, min(start + 800, length))
            rows = k[:, part], v[:, part]
            out = prefill.attend(sequence, layer, q[part], *rows, start=start, scale=0.125)
            sequence.append(layer, start, *rows)
            expect(out, wanted[part], dtype)


@pytest.mark.transports("messages", "doorbell", "embedded")
def test_modes_of_torch(of_engine: tuple[spillway_kv.Sequence, torch.dtype]) -> None:
    """Buffers work in any torch mode, and nothing is recorded for gradients."""
    sequence, dtype = of_engine
    k, v = made(2, 2, 300, 64, dtype=dtype)
    q = made(100, 8, 64, dtype=dtype, seed=5)
    sequence.append(0, 0, k[:, :200], v[:, :200])
    wanted, _ = reference(q, k, v, 0.125, causal(100, 300))
    new = k[:, 200:], v[:, 200:]
    with Prefill(block_token_count=70) as prefill:
        for inference in (True, False, True):
            with torch.inference_mode(inference):
                out = prefill.attend(sequence, 0, q, *new, start=200, scale=0.125)
                expect(out, wanted, dtype)
        learned = q.clone().requires_grad_()
        assert not prefill.attend(sequence, 0, learned, *new, start=200, scale=0.125).requires_grad


def test_rows_that_are_not_there(of_engine: tuple[spillway_kv.Sequence, torch.dtype]) -> None:
    sequence, dtype = of_engine
    k, v = made(2, 2, 100, 64, dtype=dtype)
    sequence.append(0, 0, k, v)
    with Prefill(block_token_count=60) as prefill, pytest.raises(spillway_kv.OutOfRange):
        prefill.attend(sequence, 0, made(100, 8, 64, dtype=dtype), k, v, start=101, scale=1.0)


@pytest.mark.skipif(not GPU, reason="needs SPILLWAY_TEST_DEVICE=cuda:N")
def test_memory() -> None:
    """A prompt eight times as large as what fits needs only two blocks and one chunk."""
    dtype, chunk, block, heads = torch.bfloat16, 1024, 1024, 32
    length = 16 * chunk
    k, v = (x.cpu().pin_memory() for x in made(2, 8, length, 128, dtype=dtype))
    q = made(chunk, heads, 128, dtype=dtype)
    new = k[:, :chunk].to(DEVICE), v[:, :chunk].to(DEVICE)
    with Prefill(block_token_count=block) as prefill:
        # The memory of the trials and of cuDNN does not count.
        prefill.attend(Held(k, v), 3, q, *new, start=2 * block, scale=0.1)
        held = buffer_bytes(kv_heads=8, head_dim=128, dtype=dtype, block_token_count=block)
        assert prefill.buffer_bytes == held
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        prefill.attend(Held(k, v), 3, q, *new, start=length, scale=0.1)
        torch.cuda.synchronize()
        allowed = attend_bytes(query_heads=heads, head_dim=128, token_count=chunk, dtype=dtype)
        assert torch.cuda.max_memory_allocated() - before <= allowed


@pytest.mark.skipif(not GPU, reason="needs SPILLWAY_TEST_DEVICE=cuda:N")
def test_buffers_are_not_overwritten_while_they_are_read() -> None:
    """Fetches wait for the kernels of the block before, even if those are late."""
    k, v = made(2, 2, 4096, 64, dtype=torch.float16)
    q = made(512, 8, 64, dtype=torch.float16, seed=5)
    keys, values = (torch.cat([x, x[:, :512]], dim=1) for x in (k, v))
    wanted, _ = reference(q, keys, values, 0.125, causal(512, 4608))

    class Eager(Held):
        """Writes like an engine: on its own stream, after the current one."""

        def __init__(self, k: torch.Tensor, v: torch.Tensor) -> None:
            super().__init__(k, v)
            self.stream = torch.cuda.Stream()

        def fetch(self, *args: Any, **more: Any) -> Any:
            torch.cuda.current_stream().synchronize()
            with torch.cuda.stream(self.stream):
                into = super().fetch(*args, **more)
                self.stream.synchronize()
            return into

    with Prefill(block_token_count=512) as prefill:
        held = Eager(k, v)
        for _ in range(3):
            torch.cuda._sleep(100_000_000)
            out = prefill.attend(held, 3, q, k[:, :512], v[:, :512], start=4096, scale=0.125)
            expect(out, wanted, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES)
def test_learned_sinks(dtype: torch.dtype) -> None:
    """They add to the denominator alone: less than the rows, as much, more, and nothing."""
    q = made(300, 4, 32, dtype=dtype)
    k, v = made(2, 420, 32, dtype=dtype, seed=2), made(2, 420, 32, dtype=dtype, seed=3)
    sinks = torch.tensor([-2.0, 5.0, 9.0, -math.inf], device=DEVICE)
    for window in (40, None):
        out, lse = reference(q, k, v, 0.2, causal(300, 420, window))
        wanted = out * torch.sigmoid(lse - sinks.cpu().double())[..., None]
        if window is not None:
            mine = window_attention(q, k, v, window=window, scale=0.2, sinks=sinks)
            expect(mine, wanted, dtype)
        given = prefill_kernels.with_sinks(
            out.to(DEVICE, dtype), lse.float().to(DEVICE), sinks, dtype
        )
        expect(given, wanted, dtype)
