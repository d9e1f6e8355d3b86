"""Models with layers that keep a state: the same tokens as with the cache of transformers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from random_llama import DEVICE, VOCABULARY, generate, prompt
from spillway_kv import Client
from spillway_kv.transformers import SpillwayCache, UnsupportedModelError
from spillway_kv.transformers import generate as spillway_generate
from spillway_kv.transformers.sliding import SPARE_TOKEN_COUNT
from transformers import (
    FalconH1Config,
    FalconH1ForCausalLM,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    JambaConfig,
    JambaForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

pytestmark = pytest.mark.transports("embedded")

SHAPES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
FULL, LINEAR, CONVOLUTION = "full_attention", "linear_attention", "conv"
MAMBA: dict[str, Any] = {"mamba_d_state": 8, "mamba_n_heads": 4, "mamba_chunk_size": 16}


def made(model: Any, config: Any) -> Any:
    torch.manual_seed(1)
    return model(config).to(DEVICE).eval()


def qwen() -> Any:
    """Linear attention first, full attention last."""
    config = Qwen3NextConfig(
        **SHAPES,
        layer_types=[LINEAR, LINEAR, LINEAR, FULL],
        head_dim=32,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
    )
    return made(Qwen3NextForCausalLM, config)


def granite() -> Any:
    """A state space last, so that a forward pass ends with a state that changes in place."""
    config = GraniteMoeHybridConfig(
        **SHAPES,
        **MAMBA,
        layer_types=[LINEAR, FULL, FULL, LINEAR],
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=32,
    )
    return made(GraniteMoeHybridForCausalLM, config)


def lfm() -> Any:
    """Convolutions, which can forget tokens again."""
    config = Lfm2Config(**SHAPES, layer_types=[CONVOLUTION, FULL, CONVOLUTION, CONVOLUTION])
    return made(Lfm2ForCausalLM, config)


def falcon() -> Any:
    """Every layer has attention and a state space."""
    return made(FalconH1ForCausalLM, FalconH1Config(**SHAPES, **MAMBA, mamba_d_ssm=64))


def jamba() -> Any:
    """State spaces that forget their state when several tokens follow."""
    config = JambaConfig(
        **SHAPES,
        attn_layer_period=2,
        attn_layer_offset=1,
        mamba_d_state=8,
        num_experts=2,
        num_experts_per_tok=1,
    )
    return made(JambaForCausalLM, config)


ALL = [qwen, granite, lfm, falcon, jamba]
# Those that take several tokens after a prompt.
CONTINUING = [qwen, granite, lfm, falcon]
ATTENDING = {"qwen": (3,), "granite": (1, 2), "lfm": (1,), "falcon": (0, 1, 2, 3), "jamba": (1, 3)}
MADE: dict[str, tuple[Any, Any]] = {}


@pytest.fixture(params=ALL)
def models(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    """A model with transformers' own cache, and the same with Spillway's."""
    return pair(request.param)


def pair(make: Callable[[], Any]) -> tuple[Any, Any]:
    if make.__name__ not in MADE:
        spilled = make()
        spilled.set_attn_implementation("spillway")
        spilled.name = make.__name__
        MADE[make.__name__] = make(), spilled
    return MADE[make.__name__]


def logits(model: Any, ids: torch.Tensor, cache: Any = None) -> torch.Tensor:
    """Logits of the last position [B, V]."""
    with torch.no_grad():
        out: torch.Tensor = model(ids, past_key_values=cache, use_cache=cache is not None).logits
    return out[:, -1]


@pytest.mark.parametrize("length", [1, 3, 150])
def test_greedy(client: Client, models: tuple[Any, Any], length: int) -> None:
    own, spilled = models
    ids = prompt(1, length)
    expected = generate(own, ids)
    assert len(set(expected[0, length:].tolist())) > 10
    with SpillwayCache(spilled.config, client, quality="exact") as cache:
        assert torch.equal(generate(spilled, ids, cache), expected)
        attending = ATTENDING[spilled.name]
        assert cache.model_layers == attending
        assert cache.sequences[0].refresh().layer_token_counts == (length + 63,) * len(attending)
        assert cache.length == length + 63
        assert cache.model is not None
        assert cache.model.layer_count == len(attending)


@pytest.mark.parametrize("make", CONTINUING)
@pytest.mark.parametrize("chunk", [2, 7, 100])
def test_prompt_in_chunks(client: Client, make: Callable[[], Any], chunk: int) -> None:
    own, spilled = pair(make)
    ids = prompt(1, 150)
    with SpillwayCache(spilled.config, client, quality="exact") as cache:
        got = generate(spilled, ids, cache, prefill_chunk_size=chunk)
        assert torch.equal(got, generate(own, ids))


def test_left_padding(client: Client, models: tuple[Any, Any]) -> None:
    own, spilled = models
    ids = prompt(3, 60)
    ids[1, :1] = 0
    ids[2, :37] = 0
    with SpillwayCache(spilled.config, client, quality="exact") as cache:
        assert torch.equal(generate(spilled, ids, cache), generate(own, ids))
        assert cache.paddings == (0, 1, 37)


def test_beam_search(client: Client, models: tuple[Any, Any]) -> None:
    own, spilled = models
    ids = prompt(2, 40)
    options = {"num_beams": 3, "max_new_tokens": 20}
    with SpillwayCache(spilled.config, client, quality="exact") as cache:
        assert torch.equal(generate(spilled, ids, cache, **options), generate(own, ids, **options))


def test_beams_after_a_first_turn(client: Client) -> None:
    """The rows of the states are multiplied before any layer reads them."""
    own, spilled = pair(qwen)
    ids = prompt(2, 40)
    options = {"num_beams": 3, "max_new_tokens": 12, "do_sample": False}
    with SpillwayCache(spilled.config, client, quality="exact") as cache:
        logits(spilled, ids[:, :30], cache)
        got = spillway_generate(spilled, cache, ids, **options)
        assert torch.equal(got, generate(own, ids, **options))


@pytest.mark.parametrize("make", CONTINUING)
def test_second_turn(client: Client, make: Callable[[], Any]) -> None:
    own, spilled = pair(make)
    ids = prompt(1, 60)
    with SpillwayCache(spilled.config, client, quality="exact") as cache:
        first = spillway_generate(spilled, cache, ids, max_new_tokens=20, do_sample=False)
        text = torch.cat([first, prompt(1, 30)], dim=1)
        # The padding id is a token too.
        options = {"max_new_tokens": 20, "attention_mask": torch.ones_like(text)}
        got = spillway_generate(spilled, cache, text, do_sample=False, **options)
        assert torch.equal(got, generate(own, text, **options))


@pytest.mark.parametrize("by", ["chunks", "a later turn", "the model itself"])
def test_a_model_that_continues_by_one_token(client: Client, by: str) -> None:
    """transformers' own cache answers wrongly here, so nothing is computed."""
    _, spilled = pair(jamba)
    ids = prompt(1, 60)
    with SpillwayCache(spilled.config, client) as cache:
        chunks = {"prefill_chunk_size": 20} if by == "chunks" else {}
        if by != "chunks":
            logits(spilled, ids[:, :30], cache)
        length = cache.length
        with pytest.raises(UnsupportedModelError, match="kind linear_attention .* forget their"):
            if by == "the model itself":
                logits(spilled, ids[:, 30:], cache)
            else:
                spillway_generate(spilled, cache, ids, max_new_tokens=5, **chunks)
        assert cache.length == length
        logits(spilled, ids[:, length : length + 1] if length else ids, cache)


def test_prompt_lookup(client: Client) -> None:
    own, spilled = pair(lfm)
    ids = prompt(1, 20).repeat(1, 4)
    with SpillwayCache(spilled.config, client, quality="exact") as cache:
        got = generate(spilled, ids, cache, prompt_lookup_num_tokens=4)
        assert torch.equal(got, generate(own, ids))
        assert cache.length == got.shape[1] - 1


@pytest.mark.parametrize("make", [qwen, granite, falcon])
@pytest.mark.parametrize("ours", [True, False])
def test_candidates_are_refused_before_the_prompt(
    client: Client, make: Callable[[], Any], ours: bool
) -> None:
    _, spilled = pair(make)
    ids = prompt(1, 40)
    with SpillwayCache(spilled.config, client) as cache:
        with pytest.raises((UnsupportedModelError, ValueError), match=r"assisted|stateful"):
            if ours:
                spillway_generate(spilled, cache, ids, prompt_lookup_num_tokens=4)
            else:
                generate(spilled, ids, cache, prompt_lookup_num_tokens=4)
        assert cache.length == 0


def test_fork_and_reset(client: Client, models: tuple[Any, Any]) -> None:
    own, spilled = models
    ids = prompt(2, 50)
    with SpillwayCache(spilled.config, client, quality="exact") as cache:
        logits(spilled, ids, cache)
        branch = copy.deepcopy(cache)
        tokens = [prompt(2, 3)[:, i : i + 1] for i in range(3)]
        for token in tokens:
            logits(spilled, token, cache)
        got = logits(spilled, tokens[2], branch)
        expected = logits(own, torch.cat([ids, tokens[2]], dim=1))
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)
        branch.close()
        cache.reset()
        assert cache.length == 0
        # Also for another number of rows.
        assert torch.equal(generate(spilled, ids[:1], cache), generate(own, ids[:1]))


def test_batch_operations(client: Client, models: tuple[Any, Any]) -> None:
    own, spilled = models
    ids = prompt(3, 30)
    with SpillwayCache(spilled.config, client, quality="exact") as cache:
        logits(spilled, ids, cache)
        cache.batch_select_indices(torch.tensor([2, 0], device=DEVICE))
        cache.batch_repeat_interleave(2)
        rows = torch.tensor([2, 2, 0, 0], device=DEVICE)
        token = prompt(4, 1)
        expected = logits(own, torch.cat([ids[rows], token], dim=1))
        got = logits(spilled, token, cache)
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)


def test_crop(client: Client, models: tuple[Any, Any]) -> None:
    """A state goes back by one forward pass; a convolution by many tokens."""
    own, spilled = models
    ids = prompt(1, 300)
    with SpillwayCache(spilled.config, client, quality="exact") as cache:
        logits(spilled, ids[:, :298], cache)
        for i in (298, 299):
            logits(spilled, ids[:, i : i + 1], cache)
        cache.crop(-1)
        assert cache.length == 299
        expected = logits(own, ids)
        got = logits(spilled, ids[:, 299:], cache)
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)
        if spilled.name == "lfm":
            cache.crop(-SPARE_TOKEN_COUNT)
            cut = ids[:, : 300 - SPARE_TOKEN_COUNT]
            got = logits(spilled, prompt(1, 1), cache)
            torch.testing.assert_close(
                got, logits(own, torch.cat([cut, prompt(1, 1)], dim=1)), rtol=1e-3, atol=1e-3
            )
            with pytest.raises(ValueError, match="of the kind conv, and the layer keeps the inp"):
                cache.truncate(5)
        else:
            with pytest.raises(ValueError, match=r"2 tokens cannot .*keeps one state, and that b"):
                cache.crop(-2)
        assert cache.length > 5
        cache.truncate(0)
        assert torch.equal(generate(spilled, ids, cache), generate(own, ids))


class Interrupt(Exception):
    pass


def interrupted(model: Any, layer: int, ids: torch.Tensor, cache: Any, *, after: bool) -> None:
    """A forward pass that ends in an exception, before a layer or after it."""
    block = model.model.layers[layer]

    def stop(*_: Any) -> None:
        raise Interrupt

    hook = block.register_forward_hook(stop) if after else block.register_forward_pre_hook(stop)
    try:
        with pytest.raises(Interrupt):
            logits(model, ids, cache)
    finally:
        hook.remove()


@pytest.mark.parametrize("make", ALL)
@pytest.mark.parametrize("layer", [0, 1, 2, 3])
@pytest.mark.parametrize("after", [False, True])
def test_interruption(client: Client, make: Callable[[], Any], layer: int, after: bool) -> None:
    """The next forward pass begins where the interrupted one began, or where it ended."""
    own, spilled = pair(make)
    ids = prompt(2, 80)
    expected = logits(own, ids)
    with SpillwayCache(spilled.config, client, quality="exact") as cache:
        interrupted(spilled, layer, ids[:, :79], cache, after=after)
        done = after and layer == 3
        assert cache.length == (79 if done else 0)
        if not done:
            logits(spilled, ids[:, :79], cache)
        interrupted(spilled, layer, ids[:, 79:], cache, after=after)
        assert cache.length == (80 if done else 79)
        if done:
            cache.crop(-1)
        got = logits(spilled, ids[:, 79:], cache)
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)


def test_text_after_the_last_layer_is_continued(client: Client, models: tuple[Any, Any]) -> None:
    """The whole prompt is computed again, because the state goes back by a forward pass only."""
    own, spilled = models
    ids = prompt(1, 60)
    with SpillwayCache(spilled.config, client, quality="exact") as cache:
        logits(spilled, ids, cache)
        got = spillway_generate(spilled, cache, ids, max_new_tokens=10, do_sample=False)
        assert torch.equal(got, generate(own, ids, max_new_tokens=10))


def test_save_and_load(client: Client, models: tuple[Any, Any], tmp_path: Path) -> None:
    own, spilled = models
    ids = prompt(2, 60)
    ids[1, :7] = 0
    folder = tmp_path / "chat"
    mask = (ids != 0).long()
    with SpillwayCache(spilled.config, client, quality="exact") as cache:
        for end in (40, 59):
            if end == 59 and cache.length and spilled.name == "jamba":
                cache.reset()
            with torch.no_grad():
                spilled(
                    ids[:, cache.length : end],
                    attention_mask=mask[:, :end],
                    past_key_values=cache,
                    use_cache=True,
                )
            cache.save(folder)
    # Only what the last save needs is there.
    saved = sorted(each.parent.name[:10] for each in folder.glob("*/manifest.json"))
    assert saved == ["row-0", "row-0-kept", "row-1", "row-1-kept"]
    before = len(list(client.list_sequences()))
    with SpillwayCache.load(folder, spilled.config, client) as cache:
        assert cache.length == 59
        assert cache.paddings == (0, 7)
        with torch.no_grad():
            got = spilled(
                ids[:, 59:], attention_mask=mask, past_key_values=cache, use_cache=True
            ).logits[:, -1]
            expected = own(ids, attention_mask=mask).logits[:, -1]
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)
    assert len(list(client.list_sequences())) == before


def test_what_stays_here_is_not_handed_on(client: Client) -> None:
    _, spilled = pair(qwen)
    with SpillwayCache(spilled.config, client) as cache:
        logits(spilled, prompt(1, 9), cache)
        with pytest.raises(UnsupportedModelError, match=r"\[0, 1, 2\] are of the kind linear_at"):
            cache.detach()
        assert cache.length == 9
    with pytest.raises(UnsupportedModelError, match="cannot be attached or detached"):
        SpillwayCache.attach(spilled.config, client, ["sequences/none"])


def test_other_batch_size(client: Client) -> None:
    for make in (qwen, granite):
        _, spilled = pair(make)
        with SpillwayCache(spilled.config, client) as cache:
            logits(spilled, prompt(2, 9), cache)
            with pytest.raises((ValueError, RuntimeError)):
                logits(spilled, prompt(3, 1), cache)
            assert cache.length == 9
            logits(spilled, prompt(2, 1), cache)
