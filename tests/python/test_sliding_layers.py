"""Models with sliding-window layers: the same tokens as without Spillway."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from random_llama import DEVICE, VOCABULARY, generate, prompt
from spillway_kv import Client, Policy, TopK
from spillway_kv.transformers import SpillwayCache, UnsupportedModelError
from spillway_kv.transformers.sliding import SPARE_TOKEN_COUNT
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    MistralConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
)

pytestmark = pytest.mark.transports("embedded")

WINDOW = 64
SHAPES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "initializer_range": 0.2,
    "sliding_window": WINDOW,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
SLIDING, FULL = "sliding_attention", "full_attention"


def gemma() -> Any:
    """A Gemma: first layers slide, keys are normalised, positions depend on a layer's type."""
    kinds = [SLIDING, SLIDING, FULL, SLIDING, FULL]
    torch.manual_seed(1)
    config = Gemma3TextConfig(
        **SHAPES,
        head_dim=32,
        num_hidden_layers=len(kinds),
        layer_types=kinds,
        query_pre_attn_scalar=32,
        # With tied embeddings, it would repeat its last token.
        tie_word_embeddings=False,
        attn_implementation="eager",
    )
    return Gemma3ForCausalLM(config).to(DEVICE).eval()


def qwen() -> Any:
    """A Qwen2 whose last layers slide."""
    torch.manual_seed(1)
    config = Qwen2Config(
        **SHAPES,
        num_hidden_layers=4,
        use_sliding_window=True,
        max_window_layers=2,
        attn_implementation="eager",
    )
    assert config.layer_types == [FULL, FULL, SLIDING, SLIDING]
    return Qwen2ForCausalLM(config).to(DEVICE).eval()


MADE: dict[str, tuple[Any, Any]] = {}


@pytest.fixture(params=[gemma, qwen])
def models(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    """A model with transformers' own attention, and the same with Spillway's."""
    make: Callable[[], Any] = request.param
    if make.__name__ not in MADE:
        spilled = make()
        spilled.set_attn_implementation("spillway")
        MADE[make.__name__] = make(), spilled
    return MADE[make.__name__]


@pytest.mark.parametrize("length", [1, WINDOW, 300])
def test_greedy(client: Client, models: tuple[Any, Any], length: int) -> None:
    eager, spilled = models
    ids = prompt(1, length)
    expected = generate(eager, ids, max_new_tokens=200)
    assert len(set(expected[0, length:].tolist())) > (10 if length > 1 else 0)
    with SpillwayCache(spilled.config, client) as cache:
        assert torch.equal(generate(spilled, ids, cache, max_new_tokens=200), expected)
        # The engine has only the layers with full attention.
        full = [i for i, kind in enumerate(spilled.config.layer_types) if kind == FULL]
        assert cache.model_layers == tuple(full)
        assert cache.sequences[0].refresh().layer_token_counts == (length + 199,) * len(full)
        assert cache.model is not None
        assert cache.model.layer_count == len(full)
        for index, layer in enumerate(cache.layers):
            if index in full:
                assert layer.keys is None
            else:
                assert layer.keys is not None
                kept = min(length + 199, WINDOW - 1 + SPARE_TOKEN_COUNT)
                assert layer.keys.shape == (1, 2, kept, getattr(spilled.config, "head_dim", 16))


@pytest.mark.parametrize("chunk", [16, 40, 64, 200])
def test_prompt_in_chunks(client: Client, models: tuple[Any, Any], chunk: int) -> None:
    eager, spilled = models
    ids = prompt(1, 333)
    expected = generate(eager, ids)
    with SpillwayCache(spilled.config, client) as cache:
        assert torch.equal(generate(spilled, ids, cache, prefill_chunk_size=chunk), expected)


@pytest.mark.parametrize("chunk", [None, 50])
def test_left_padding(client: Client, models: tuple[Any, Any], chunk: int | None) -> None:
    eager, spilled = models
    ids = prompt(4, 200)
    # Paddings shorter and longer than the window, and one that fills two chunks.
    for row, padding in enumerate([50, 0, 133, 199]):
        ids[row, :padding] = 0
    expected = generate(eager, ids)
    with SpillwayCache(spilled.config, client) as cache:
        assert torch.equal(generate(spilled, ids, cache, prefill_chunk_size=chunk), expected)
        assert [s.token_count for s in cache.sequences] == [213, 263, 130, 64]


def test_beam_search(client: Client, models: tuple[Any, Any]) -> None:
    eager, spilled = models
    ids = prompt(2, 150)
    ids[0, :20] = 0
    options = {"num_beams": 3, "num_return_sequences": 2}
    expected = generate(eager, ids, **options)
    with SpillwayCache(spilled.config, client) as cache:
        assert torch.equal(generate(spilled, ids, cache, **options), expected)


def test_prompt_lookup(client: Client, models: tuple[Any, Any]) -> None:
    eager, spilled = models
    ids = prompt(1, 100).repeat(1, 3)
    expected = generate(eager, ids, max_new_tokens=150)
    with SpillwayCache(spilled.config, client) as cache:
        made = generate(spilled, ids, cache, prompt_lookup_num_tokens=5, max_new_tokens=150)
        assert torch.equal(made, expected)
        # Wrong candidates were removed.
        assert cache.sequences[0].refresh().generation > 0


def test_assistant_model(client: Client, models: tuple[Any, Any]) -> None:
    eager, spilled = models
    ids = prompt(1, 200)
    assistant = copy.deepcopy(eager)
    with torch.no_grad():
        weight = assistant.lm_head.weight
        noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(3))
        assistant.lm_head.weight = torch.nn.Parameter(
            weight + 0.3 * weight.std() * noise.to(DEVICE)
        )
    expected = generate(eager, ids)
    with SpillwayCache(spilled.config, client) as cache:
        assert torch.equal(generate(spilled, ids, cache, assistant_model=assistant), expected)
        assert 0 < cache.sequences[0].refresh().generation < 63


def test_second_turn(client: Client, models: tuple[Any, Any]) -> None:
    eager, spilled = models
    with SpillwayCache(spilled.config, client) as cache:
        first = generate(spilled, prompt(1, 150), cache)
        turn = torch.cat([first, prompt(1, 90)], dim=1)
        expected = generate(eager, turn)
        assert torch.equal(generate(spilled, turn, cache), expected)


def test_fork_and_reset(client: Client, models: tuple[Any, Any]) -> None:
    eager, spilled = models
    ids = prompt(1, 150)
    with SpillwayCache(spilled.config, client) as cache:
        first = generate(spilled, ids, cache, max_new_tokens=20)
        with copy.deepcopy(cache) as fork:
            # Both continue independently.
            other = torch.cat([first, prompt(1, 30)], dim=1)
            made = generate(spilled, other, fork)
            assert torch.equal(made, generate(eager, other))
        assert torch.equal(generate(spilled, first, cache), generate(eager, first))
        cache.reset()
        assert all(layer.keys is None for layer in cache.layers)
        assert torch.equal(generate(spilled, ids, cache), generate(eager, ids))


def test_batch_operations(client: Client, models: tuple[Any, Any]) -> None:
    eager, spilled = models
    ids = prompt(3, 100)
    ids[1, :70] = 0
    with SpillwayCache(spilled.config, client) as cache, torch.no_grad():
        mask = (ids != 0).long()
        position = (mask.cumsum(1) - 1).clamp(min=0)
        spilled(ids, attention_mask=mask, position_ids=position, past_key_values=cache)
        cache.batch_select_indices(torch.tensor([1, 2]))
        cache.batch_repeat_interleave(2)
        token = prompt(4, 1)
        rows = torch.cat([ids[[1, 1, 2, 2]], token], dim=1)
        mask = (rows != 0).long()
        position = (mask.cumsum(1) - 1).clamp(min=0)
        last = position[:, -1:]
        mine = spilled(token, attention_mask=mask, position_ids=last, past_key_values=cache)
        wanted = eager(rows, attention_mask=mask, position_ids=position)
        torch.testing.assert_close(mine.logits[:, -1], wanted.logits[:, -1], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("removed", [1, 100, SPARE_TOKEN_COUNT])
def test_crop(client: Client, models: tuple[Any, Any], removed: int) -> None:
    eager, spilled = models
    ids = prompt(1, 500)
    with SpillwayCache(spilled.config, client) as cache, torch.no_grad():
        for start in range(0, 500, 250):
            spilled(ids[:, start : start + 250], past_key_values=cache)
        cache.crop(-removed)
        other = torch.cat([ids[:, : 500 - removed], prompt(1, 30)], dim=1)
        made = spilled(other[:, 500 - removed :], past_key_values=cache).logits
        wanted = eager(other).logits[:, 500 - removed :]
        torch.testing.assert_close(made, wanted, rtol=1e-3, atol=1e-3)


def test_crop_of_too_much(client: Client, models: tuple[Any, Any]) -> None:
    eager, spilled = models
    ids = prompt(1, 500)
    with SpillwayCache(spilled.config, client) as cache, torch.no_grad():
        spilled(ids, past_key_values=cache)
        with pytest.raises(
            ValueError, match=r"129 tokens cannot be removed.*window of 64.*128 can"
        ):
            cache.crop(-(SPARE_TOKEN_COUNT + 1))
        # Nothing has changed.
        assert cache.get_seq_length() == 500
        assert cache.sequences[0].token_count == 500
        made = spilled(prompt(1, 30), past_key_values=cache).logits
        wanted = eager(torch.cat([ids, prompt(1, 30)], dim=1)).logits[:, 500:]
        torch.testing.assert_close(made, wanted, rtol=1e-3, atol=1e-3)


def test_crop_before_anything_is_dropped(client: Client, models: tuple[Any, Any]) -> None:
    eager, spilled = models
    ids = prompt(2, 150)
    ids[0, :20] = 0
    mask = (ids != 0).long()
    with SpillwayCache(spilled.config, client) as cache, torch.no_grad():
        spilled(ids, attention_mask=mask, past_key_values=cache)
        # Crops to within the first row's padding, and appends again.
        cache.crop(-140)
        assert [s.token_count for s in cache.sequences] == [0, 10]
        rest = torch.cat([ids[:, :10], prompt(2, 100)], dim=1)
        mask = (rest != 0).long()
        position = (mask.cumsum(1) - 1).clamp(min=0)
        made = spilled(
            rest[:, 10:],
            attention_mask=mask,
            position_ids=position[:, 10:],
            past_key_values=cache,
        ).logits
        wanted = eager(rest, attention_mask=mask, position_ids=position).logits[:, 10:]
        torch.testing.assert_close(made, wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("count", [1, 5, 200])
def test_interruption(client: Client, models: tuple[Any, Any], count: int) -> None:
    """A forward pass that is interrupted in any layer leaves all layers unchanged."""
    eager, spilled = models
    ids = prompt(1, 300 + count)
    wanted = eager(ids).logits[:, 300:]

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    layers = spilled.model.layers
    with SpillwayCache(spilled.config, client, policy=Policy(selector="all")) as cache:
        with torch.no_grad():
            spilled(ids[:, :150], past_key_values=cache)
            spilled(ids[:, 150:300], past_key_values=cache)
            for layer in range(len(layers)):
                for part in (layers[layer].self_attn, layers[layer].self_attn.o_proj):
                    hook = part.register_forward_pre_hook(interrupt)
                    with pytest.raises(KeyboardInterrupt):
                        spilled(ids[:, 300:], past_key_values=cache)
                    hook.remove()
                    last = layer == len(layers) - 1 and part is not layers[layer].self_attn
                    assert cache.length == (300 + count if last else 300)
            if count <= SPARE_TOKEN_COUNT:
                # The last pass was complete. Remove its tokens and repeat it.
                cache.crop(-count)
                made = spilled(ids[:, 300:], past_key_values=cache).logits
                torch.testing.assert_close(made, wanted, rtol=1e-3, atol=1e-3)
    with SpillwayCache(spilled.config, client) as cache, torch.no_grad():
        # Interrupts the first forward pass of the cache.
        hook = layers[-1].self_attn.register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            spilled(ids[:, :300], past_key_values=cache)
        hook.remove()
        assert cache.length == 0
        spilled(ids[:, :300], past_key_values=cache)
        hook = layers[-1].self_attn.register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            spilled(ids[:, 300:], past_key_values=cache)
        hook.remove()
        made = spilled(ids[:, 300:], past_key_values=cache).logits
        torch.testing.assert_close(made, wanted, rtol=1e-3, atol=1e-3)


def test_interrupted_crop(
    client: Client, models: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    eager, spilled = models
    ids = prompt(1, 330)
    with SpillwayCache(spilled.config, client) as cache, torch.no_grad():
        spilled(ids[:, :310], past_key_values=cache)
        spilled(ids[:, :5], past_key_values=cache)

        def interrupt(*_: Any) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(cache.contents.shared.store, "truncate", interrupt)
        with pytest.raises(KeyboardInterrupt):
            cache.crop(-3)
        monkeypatch.undo()
        assert cache.length == 312
        other = torch.cat([ids[:, :310], ids[:, :2], ids[:, 300:]], dim=1)
        made = spilled(ids[:, 300:], past_key_values=cache).logits
        torch.testing.assert_close(made, eager(other).logits[:, 312:], rtol=1e-3, atol=1e-3)


def test_what_is_in_this_process_is_not_handed_on(client: Client, models: tuple[Any, Any]) -> None:
    _, spilled = models
    with SpillwayCache(spilled.config, client) as cache, torch.no_grad():
        spilled(prompt(1, 20), past_key_values=cache)
        for call in (
            cache.detach,
            lambda: SpillwayCache.attach(spilled.config, client, [cache.sequences[0]]),
        ):
            with pytest.raises(UnsupportedModelError, match="of the kind sliding_attention"):
                call()
        assert cache.length == 20


@pytest.mark.parametrize("length", [20, 300])
def test_save_and_load(
    client: Client, models: tuple[Any, Any], length: int, tmp_path: Path
) -> None:
    """The K/V of the windows are saved too."""
    eager, spilled = models
    ids = prompt(2, length + 1)
    ids[1, :9] = 0
    mask = (ids != 0).long()
    with SpillwayCache(spilled.config, client, quality="exact") as cache, torch.no_grad():
        spilled(ids[:, :length], attention_mask=mask[:, :length], past_key_values=cache)
        cache.save(tmp_path / "chat")
    with SpillwayCache.load(tmp_path / "chat", spilled.config, client) as cache, torch.no_grad():
        got = spilled(ids[:, length:], attention_mask=mask, past_key_values=cache).logits
        expected = eager(ids, attention_mask=mask).logits[:, length:]
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)
        cache.crop(-1)
        assert cache.length == length


def test_sparse_layers(client: Client, models: tuple[Any, Any]) -> None:
    """Only layers with full attention are sparse, and only they are counted."""
    _, spilled = models
    policy = Policy(dense_token_count=1024, heavy=TopK(count=16), tail="none")
    with SpillwayCache(spilled.config, client, policy=policy) as cache:
        generate(spilled, prompt(1, 1200), cache, max_new_tokens=4)
        assert len(cache.statistics.layers) == len(cache.model_layers)
        for layer in cache.statistics.layers:
            assert layer.attend_count == 3
            assert 0 < layer.touched_row_count < layer.visible_row_count / 3


def test_other_padding_is_refused(client: Client, models: tuple[Any, Any]) -> None:
    _, spilled = models
    ids = prompt(1, 10)
    with SpillwayCache(spilled.config, client) as cache, torch.no_grad():
        spilled(ids, past_key_values=cache)
        mask = ids.new_ones(1, 11)
        mask[0, :3] = 0
        with pytest.raises(ValueError, match="0 padding positions in the cache, 3"):
            spilled(ids[:, :1], attention_mask=mask, past_key_values=cache)
    with SpillwayCache(spilled.config, client) as cache, torch.no_grad():
        spilled(prompt(2, 10), past_key_values=cache)
        with pytest.raises(ValueError, match="holds 2 rows, the batch has 3"):
            spilled(prompt(3, 1), past_key_values=cache)


def test_bidirectional_windows_are_refused(client: Client) -> None:
    model = gemma()
    model.config.use_bidirectional_attention = True
    model.set_attn_implementation("spillway")
    with SpillwayCache(model.config, client) as cache, torch.no_grad():
        with pytest.raises(UnsupportedModelError):
            model(prompt(1, 10), past_key_values=cache)


def test_refused_models(client: Client) -> None:
    with pytest.raises(UnsupportedModelError, match="no layer has full attention"):
        SpillwayCache(MistralConfig(**SHAPES), client)
    only = {**SHAPES, "num_hidden_layers": 2, "layer_types": [SLIDING] * 2}
    with pytest.raises(UnsupportedModelError, match="no layer has full attention"):
        SpillwayCache(Gemma3TextConfig(**only), client)


def test_layers_of_other_shapes_are_refused(client: Client) -> None:
    model = qwen()
    model.set_attn_implementation("spillway")
    changed = copy.deepcopy(model.config)
    changed.num_key_value_heads = 4
    with SpillwayCache(changed, client) as cache, torch.no_grad():
        with pytest.raises(UnsupportedModelError, match="layer 0 has 8 query heads, 2 K/V heads"):
            model(prompt(1, 10), past_key_values=cache)


@pytest.mark.parametrize("made", [2, WINDOW // 2])
def test_other_window_is_refused(client: Client, made: int) -> None:
    model = qwen()
    model.set_attn_implementation("spillway")
    changed = copy.deepcopy(model.config)
    changed.sliding_window = made
    with SpillwayCache(changed, client) as cache, torch.no_grad():
        with pytest.raises(UnsupportedModelError, match=f"window of 64 tokens.*of {made}"):
            model(prompt(1, 10), past_key_values=cache)


@pytest.mark.parametrize("make", [gemma, qwen])
def test_interrupted_in_every_layer(client: Client, make: Callable[[], Any]) -> None:
    """Everything since the last complete forward pass is undone, including the windows."""
    model = make()
    model.set_attn_implementation("spillway")
    ids = prompt(1, 150)

    def forward(cache: SpillwayCache, end: int) -> torch.Tensor:
        with torch.no_grad():
            out = model(ids[:, cache.get_seq_length() : end], past_key_values=cache)
        logits: torch.Tensor = out.logits[:, -1]
        return logits

    def fail(*arguments: Any) -> None:
        raise KeyboardInterrupt

    layers = model.model.layers
    for start in (0, 100):
        for number, layer in enumerate(layers):
            with SpillwayCache(model.config, client) as cache:
                if start:
                    forward(cache, start)
                hook = layer.self_attn.register_forward_hook(fail)
                with pytest.raises(KeyboardInterrupt):
                    forward(cache, 149)
                hook.remove()
                whole = number == len(layers) - 1
                assert cache.length == (149 if whole else start)
                if not whole:
                    forward(cache, 149)
                logits = forward(cache, 150)
                assert {one.length for one in cache.layers} == {150}
            with SpillwayCache(model.config, client) as cache:
                if start:
                    forward(cache, start)
                forward(cache, 149)
                torch.testing.assert_close(logits, forward(cache, 150))
