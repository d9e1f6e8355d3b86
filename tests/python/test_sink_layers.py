"""Models with learned attention sinks give the same tokens as without Spillway."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from random_llama import DEVICE, VOCABULARY, generate, llama, prompt
from spillway_kv import Client, Policy
from spillway_kv.transformers import ModelMismatchError, SpillwayCache, UnsupportedModelError

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.transports("embedded")

WINDOW = 64
EXACT = Policy(selector="all")


def gpt_oss(seed: int = 1) -> Any:
    """A gpt-oss of two layers with a window and two with full attention, and heavy sinks."""
    torch.manual_seed(seed)
    config = transformers.GptOssConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        num_local_experts=2,
        num_experts_per_tok=1,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"] * 2,
        max_position_embeddings=4096,
        initializer_range=0.2,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
        attn_implementation="eager",
    )
    model = transformers.GptOssForCausalLM(config).eval().to(DEVICE)
    for module in model.modules():
        if hasattr(module, "sinks"):
            # From no weight to nearly all of it.
            module.sinks.data = torch.linspace(-4, 9, 8, device=DEVICE)
    return model


MADE: list[Any] = []


@pytest.fixture
def models() -> tuple[Any, Any]:
    """A model with transformers' own attention, and the same with Spillway's."""
    if not MADE:
        spilled = gpt_oss()
        spilled.set_attn_implementation("spillway")
        MADE.extend((gpt_oss(), spilled))
    return MADE[0], MADE[1]


@pytest.mark.parametrize("length", [1, WINDOW, 300])
def test_greedy(client: Client, models: tuple[Any, Any], length: int) -> None:
    eager, spilled = models
    ids = prompt(1, length)
    expected = generate(eager, ids)
    assert len(set(expected[0, length:].tolist())) > 10
    with SpillwayCache(spilled, client, policy=EXACT) as cache:
        assert torch.equal(generate(spilled, ids, cache), expected)
        assert cache.model is not None
        assert cache.model.layer_count == 2
        (row, other) = cache.model.sink_logits
        assert row == other == tuple(torch.linspace(-4, 9, 8).tolist())
    # The sinks matter.
    unsunk = gpt_oss()
    for module in unsunk.modules():
        if hasattr(module, "sinks"):
            module.sinks.data = torch.full((8,), -30.0, device=DEVICE)
    assert not torch.equal(generate(unsunk, ids), expected)


@torch.no_grad()
@pytest.mark.parametrize("chunk", [16, 40, 200])
def test_prompts_in_chunks(client: Client, models: tuple[Any, Any], chunk: int) -> None:
    eager, spilled = models
    ids = prompt(1, 430)
    wanted = eager(ids).logits
    with SpillwayCache(spilled, client, policy=EXACT, prefill_block_token_count=150) as cache:
        parts = [
            spilled(ids[:, at : at + chunk], past_key_values=cache, use_cache=True).logits
            for at in range(0, 430, chunk)
        ]
        torch.testing.assert_close(torch.cat(parts, 1), wanted, atol=2e-3, rtol=1e-3)


@torch.no_grad()
def test_logits_of_a_batch_with_padding(client: Client, models: tuple[Any, Any]) -> None:
    eager, spilled = models
    ids = prompt(2, 120)
    mask = torch.ones_like(ids)
    mask[1, :50] = 0
    token = torch.tensor([[5], [9]], device=DEVICE)
    more = torch.cat([mask, torch.ones(2, 1, dtype=mask.dtype, device=DEVICE)], 1)
    logits = []
    with SpillwayCache(spilled, client, policy=EXACT) as cache:
        for model, given in (
            (eager, transformers.DynamicCache(config=eager.config)),
            (spilled, cache),
        ):
            first = model(ids, attention_mask=mask, past_key_values=given, use_cache=True)
            positions = more.sum(1, keepdim=True) - 1
            second = model(
                token,
                attention_mask=more,
                position_ids=positions,
                past_key_values=given,
                use_cache=True,
            )
            logits.append(torch.cat([first.logits[:, -1:], second.logits], 1))
    torch.testing.assert_close(logits[1], logits[0], atol=2e-3, rtol=1e-3)


def test_forks_have_them_too(client: Client, models: tuple[Any, Any]) -> None:
    _, spilled = models
    ids = prompt(1, 100)
    with SpillwayCache(spilled, client, policy=EXACT) as cache, torch.no_grad():
        spilled(ids, past_key_values=cache, use_cache=True)
        with cache.fork() as fork:
            token = torch.tensor([[7]], device=DEVICE)
            one, other = (
                spilled(token, past_key_values=c, use_cache=True).logits for c in (cache, fork)
            )
        assert torch.equal(one, other)


def test_what_is_refused(client: Client, models: tuple[Any, Any]) -> None:
    _, spilled = models
    with pytest.raises(UnsupportedModelError, match="give SpillwayCache the model itself"):
        SpillwayCache(spilled.config, client)
    ids = prompt(1, 20)
    changed = gpt_oss()
    changed.set_attn_implementation("spillway")
    with SpillwayCache(changed, client) as cache, torch.no_grad():
        changed.model.layers[2].self_attn.sinks.data += 1
        with pytest.raises(ModelMismatchError, match="sinks of layer 2 have changed"):
            changed(ids, past_key_values=cache, use_cache=True)
    # A model of the engine without the sinks.
    without = client.create_model(
        layer_count=2, query_head_count=8, kv_head_count=2, head_dim=32, dtype="float32"
    )
    with SpillwayCache(spilled, client, model=without) as cache, torch.no_grad():
        with pytest.raises(ValueError, match="other learned sinks"):
            spilled(ids, past_key_values=cache, use_cache=True)
    client.delete_model(without)


def test_a_model_of_an_unknown_kind_with_sinks(client: Client) -> None:
    """Its config does not say so, but its attention does."""
    _, spilled = gpt_oss(), gpt_oss()
    spilled.set_attn_implementation("spillway")
    plain = llama(4)
    plain.config.layer_types = spilled.config.layer_types
    plain.config.sliding_window = WINDOW
    with SpillwayCache(plain.config, client) as cache, torch.no_grad():
        with pytest.raises(UnsupportedModelError, match="layer 0 attends with learned sinks"):
            spilled(prompt(1, 20), past_key_values=cache, use_cache=True)


def test_the_model_may_be_given_in_place_of_its_config(client: Client) -> None:
    model = llama()
    model.set_attn_implementation("spillway")
    ids = prompt(1, 50)
    with SpillwayCache(model.config, client) as one, SpillwayCache(model, client) as other:
        first, second = (generate(model, ids, cache) for cache in (one, other))
        assert torch.equal(first, second)
        assert one.model == other.model


def test_saved_and_loaded(client: Client, tmp_path: Any) -> None:
    """As there is no layer with a window, all K/V are in the engine."""
    torch.manual_seed(1)
    model = gpt_oss()
    model.config.layer_types = ["full_attention"] * 4
    model = type(model)(model.config).eval().to(DEVICE)
    for index, layer in enumerate(model.model.layers):
        layer.self_attn.sinks.data = torch.linspace(-4, 5 + index, 8, device=DEVICE)
    model.set_attn_implementation("spillway")
    ids, token = prompt(1, 100), torch.tensor([[7]], device=DEVICE)
    with SpillwayCache(model, client) as cache, torch.no_grad():
        model(ids, past_key_values=cache, use_cache=True)
        cache.save(str(tmp_path / "chat"))
        expected = model(token, past_key_values=cache, use_cache=True).logits
    with SpillwayCache.load(str(tmp_path / "chat"), model, client) as cache, torch.no_grad():
        assert torch.equal(model(token, past_key_values=cache, use_cache=True).logits, expected)
    model.model.layers[3].self_attn.sinks.data += 1
    with SpillwayCache.load(str(tmp_path / "chat"), model, client) as cache, torch.no_grad():
        with pytest.raises(ValueError, match="other"):
            model(token, past_key_values=cache, use_cache=True)
