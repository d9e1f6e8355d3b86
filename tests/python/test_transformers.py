"""SpillwayCache in transformers' generate(): the same tokens as without it."""

from __future__ import annotations

import copy
import gc
import inspect
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import spillway_kv
import torch
from random_llama import DEVICE, VOCABULARY, generate, llama, prompt
from spillway_kv import Client, Policy, TopK
from spillway_kv.transformers import AttendEvent, SpillwayCache, UnsupportedModelError, appends
from spillway_kv.transformers import generate as transformers_generate
from transformers import (
    DynamicCache,
    GemmaConfig,
    GPTBigCodeConfig,
    GPTBigCodeForCausalLM,
    PreTrainedConfig,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
)

pytestmark = pytest.mark.transports("regions", "embedded")
ALL = Policy(selector="all")


@pytest.fixture(scope="module")
def dense() -> Any:
    """The model with transformers' own attention."""
    return llama()


@pytest.fixture(scope="module")
def spilled() -> Any:
    """The same model with Spillway's attention."""
    model = llama()
    model.set_attn_implementation("spillway")
    return model


@pytest.fixture(autouse=True)
def no_sequence_stays(client: Client) -> Iterator[None]:
    # Sequences of other tests may be collected at any time.
    before = {info.name for info in client.list_sequences()}
    yield
    gc.collect()
    assert {info.name for info in client.list_sequences()} <= before


@pytest.mark.parametrize("policy", [None, ALL], ids=["default", "all"])
@pytest.mark.parametrize("length", [1, 200, 300])
def test_greedy(
    client: Client, dense: Any, spilled: Any, length: int, policy: Policy | None
) -> None:
    ids = prompt(1, length)
    expected = generate(dense, ids)
    assert len(set(expected[0, length:].tolist())) > 10
    with SpillwayCache(spilled.config, client, policy=policy) as cache:
        assert torch.equal(generate(spilled, ids, cache), expected)
        (sequence,) = cache.sequences
        assert sequence.refresh().layer_token_counts == (length + 63,) * 3
        statistics = cache.statistics
    # 63 steps used the daemon, and all were dense.
    assert [layer.attend_count for layer in statistics.layers] == [63] * 3
    visible = 2 * sum(range(length + 1, length + 64))
    assert [layer.visible_row_count for layer in statistics.layers] == [visible] * 3
    assert statistics.rows_touched_fraction == 1
    assert statistics.layers[0].exact_count == 63 * 8
    assert statistics.certified_error_mean == 0


def test_left_padded_batch(client: Client, dense: Any, spilled: Any) -> None:
    ids = prompt(4, 200)
    for row, padding in enumerate([50, 0, 133, 199]):
        ids[row, :padding] = 0
    expected = generate(dense, ids)
    with SpillwayCache(spilled.config, client) as cache:
        assert torch.equal(generate(spilled, ids, cache), expected)
        # Padding was never appended.
        assert [s.token_count for s in cache.sequences] == [213, 263, 130, 64]
        assert cache.batch_size == 4


def test_prompt_in_chunks(client: Client, dense: Any, spilled: Any) -> None:
    ids = prompt(3, 224)
    ids[0, :50] = 0
    ids[2, :133] = 0  # The first two chunks are only padding.
    expected = generate(dense, ids)
    with SpillwayCache(spilled.config, client) as cache:
        made = generate(spilled, ids, cache, prefill_chunk_size=64)
        assert torch.equal(made, expected)
        # Only decode steps were attended in the daemon.
        assert cache.statistics.layers[0].attend_count == 3 * 63


def test_beam_search(client: Client, dense: Any, spilled: Any) -> None:
    ids = prompt(2, 150)
    ids[0, :20] = 0
    options = {"num_beams": 3, "num_return_sequences": 2}
    expected = generate(dense, ids, **options)
    with SpillwayCache(spilled.config, client) as cache:
        assert torch.equal(generate(spilled, ids, cache, **options), expected)
        assert len(cache.sequences) == 6


def test_prompt_lookup(client: Client, dense: Any, spilled: Any) -> None:
    ids = prompt(1, 100).repeat(1, 3)
    expected = generate(dense, ids, prompt_lookup_num_tokens=5)
    with SpillwayCache(spilled.config, client) as cache:
        assert torch.equal(generate(spilled, ids, cache, prompt_lookup_num_tokens=5), expected)
        # Wrong candidates were truncated.
        assert cache.sequences[0].refresh().generation > 0


def test_assistant_model(client: Client, dense: Any, spilled: Any) -> None:
    ids = prompt(1, 200)
    assistant = llama()
    with torch.no_grad():
        for parameter in assistant.lm_head.parameters():
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3))
            parameter += 0.3 * parameter.std() * noise.to(DEVICE)
    expected = generate(dense, ids, assistant_model=assistant)
    assert torch.equal(expected, generate(dense, ids))
    with SpillwayCache(spilled.config, client) as cache:
        assert torch.equal(generate(spilled, ids, cache, assistant_model=assistant), expected)
        # Some candidates were wrong and some right, so there are fewer forward passes than tokens.
        assert 0 < cache.sequences[0].refresh().generation < 63


@pytest.mark.parametrize("length", [5, 16, 17, 90])
def test_second_turn(client: Client, dense: Any, spilled: Any, length: int) -> None:
    ids = prompt(2, 100)
    ids[0, :30] = 0
    own = DynamicCache(config=dense.config)
    first = generate(dense, ids, own)
    mask = torch.ones_like(first)
    mask[0, :30] = 0
    turn = torch.cat([first, prompt(2, length)], dim=1)
    turn_mask = torch.cat([mask, mask.new_ones(2, length)], dim=1)
    expected = generate(dense, turn, own, attention_mask=turn_mask)
    with SpillwayCache(spilled.config, client) as cache:
        assert torch.equal(generate(spilled, ids, cache), first)
        # One query more than the turn has tokens: the last token of the first turn.
        made = generate(spilled, turn, cache, attention_mask=turn_mask)
        assert torch.equal(made, expected)


def test_logits_in_bfloat16(client: Client) -> None:
    dense, spilled = (llama(dtype=torch.bfloat16) for _ in range(2))
    spilled.set_attn_implementation("spillway")
    exact = llama()
    ids = prompt(1, 200)
    with torch.no_grad(), SpillwayCache(spilled.config, client) as cache:
        own = DynamicCache(config=dense.config)
        spilled(ids[:, :150], past_key_values=cache)
        dense(ids[:, :150], past_key_values=own)
        assert cache.model is not None
        assert cache.model.dtype == "bfloat16"
        truth = exact(ids).logits[:, 150:]
        mine, theirs = [], []
        for t in range(150, 200):
            one = ids[:, t : t + 1]
            mine.append(spilled(one, past_key_values=cache).logits.float())
            theirs.append(dense(one, past_key_values=own).logits.float())
    # The error against the float32 model is about that of transformers in bfloat16.
    my_error = (torch.cat(mine, 1) - truth).norm()
    their_error = (torch.cat(theirs, 1) - truth).norm()
    assert 0 < my_error < 1.2 * their_error


def test_sparse_steps(client: Client, dense: Any, spilled: Any) -> None:
    events: list[AttendEvent] = []
    policy = Policy(
        dense_token_count=1024,
        heavy=TopK(count=64),
        epsilon=0.3,
        pilot_token_count=16,
        dense_layers=(1,),
    )
    ids = prompt(1, 1500)
    with (
        torch.no_grad(),
        SpillwayCache(spilled.config, client, policy=policy, on_attend=events.append) as cache,
    ):
        spilled(ids[:, :1490], past_key_values=cache)
        assert not events
        for t in range(1490, 1500):
            spilled(ids[:, t : t + 1], past_key_values=cache)
        assert [(e.layer, e.row) for e in events] == [(layer, 0) for layer in range(3)] * 10
        assert len(events) == 30
        for event in events:
            assert event.query.shape == (1, 8, 32)
            promises = set(event.result.certificate.promises.flatten().tolist())
            assert promises <= ({"exact"} if event.layer == 1 else {"statistical", "none", "exact"})
        last = events[-1]
        exact = last.sequence.attend(last.layer, last.query, ALL).out
        certificate = last.result.certificate
        error = (last.result.out - exact).norm(dim=-1) / exact.norm(dim=-1)
        assert (error < 3 * torch.from_numpy(certificate.relative_errors) + 1e-5).all()
        touched = cache.statistics.rows_touched_fraction
        fractions = [
            layer.touched_row_count / layer.visible_row_count for layer in cache.statistics.layers
        ]
        assert fractions[1] == 1
        assert fractions[0] < 1 or fractions[2] < 1
        assert touched == pytest.approx(sum(fractions) / 3)
        # The cache's request policy overrides that of the sequence.
        cache.request_policy = ALL
        cache.statistics.reset()
        spilled(ids[:, :1], past_key_values=cache)
        assert cache.statistics.rows_touched_fraction == 1


def test_fork_and_deepcopy(client: Client, dense: Any, spilled: Any) -> None:
    ids = prompt(1, 120)
    with torch.no_grad(), SpillwayCache(spilled.config, client) as cache:
        spilled(ids[:, :100], past_key_values=cache)
        copies = [cache.fork(), copy.deepcopy(cache)]
        expected = generate(dense, ids)
        for each in (*copies, cache):
            assert torch.equal(generate(spilled, ids, each), expected)
        for each in copies:
            each.close()


def test_reset_and_reuse(client: Client, dense: Any, spilled: Any) -> None:
    cache = SpillwayCache(spilled.config, client)
    for ids in (prompt(1, 30), prompt(2, 50)):
        assert torch.equal(generate(spilled, ids, cache), generate(dense, ids))
        assert cache.get_seq_length() == ids.shape[1] + 63
        cache.reset()
        assert cache.get_seq_length() == 0
        assert cache.sequences == ()


def test_collected_cache_deletes_its_sequences(client: Client, spilled: Any) -> None:
    cache = SpillwayCache(spilled.config, client)
    generate(spilled, prompt(2, 20), cache, max_new_tokens=2)
    names = {s.name for s in cache.sequences}
    assert names <= {info.name for info in client.list_sequences()}
    del cache
    gc.collect()
    assert not names & {info.name for info in client.list_sequences()}


def test_batch_operations(client: Client, dense: Any, spilled: Any) -> None:
    ids = prompt(3, 60)
    own = DynamicCache(config=dense.config)
    with torch.no_grad(), SpillwayCache(spilled.config, client) as cache:
        for model, each in ((dense, own), (spilled, cache)):
            model(ids, past_key_values=each)
            each.batch_repeat_interleave(2)
            each.batch_select_indices(torch.tensor([5, 0, 0, 3]))
            each.reorder_cache(torch.tensor([1, 1, 2, 3]))
            each.crop(-7)
        step = prompt(4, 1)
        mine = spilled(step, past_key_values=cache).logits
        theirs = dense(step, past_key_values=own).logits
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
        assert [s.token_count for s in cache.sequences] == [54] * 4


def test_crop_into_padding(client: Client, spilled: Any) -> None:
    ids = prompt(2, 20)
    ids[0, :15] = 0
    with torch.no_grad(), SpillwayCache(spilled.config, client) as cache:
        spilled(ids, attention_mask=(ids != 0).long(), past_key_values=cache)
        cache.crop(-10)
        assert cache.get_seq_length() == 10
        assert [s.token_count for s in cache.sequences] == [0, 10]
        with pytest.raises(ValueError, match="negative"):
            cache.crop(10)


def test_caches_of_one_shape_share_a_model(client: Client, spilled: Any) -> None:
    with SpillwayCache(spilled.config, client) as one, SpillwayCache(spilled.config, client) as two:
        for cache in (one, two):
            generate(spilled, prompt(1, 5), cache, max_new_tokens=2)
        assert one.model == two.model


def test_own_model(client: Client, spilled: Any) -> None:
    model = client.create_model(
        layer_count=3, query_head_count=8, kv_head_count=2, head_dim=32, dtype="float16"
    )
    with SpillwayCache(spilled.config, client, model=model) as cache:
        with pytest.raises(ValueError, match=r"holds float16, the keys are torch\.float32"):
            generate(spilled, prompt(1, 5), cache)
    client.delete_model(model)


BASE: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


class Odd(PreTrainedConfig):
    """A config with any attributes."""

    model_type = "odd"


def config(**changes: Any) -> Odd:
    made = Odd()
    for name, value in {**BASE, **changes}.items():
        setattr(made, name, value)
    return made


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"sliding_window": 4096}, "sliding window of 4096"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"layer_types": ["linear_attention"] * 2}, "no layer has full .*linear_attention"),
        ({"layer_types": ["indexed_attention", "full_attention"]}, "types .'indexed_attention'"),
        ({"layer_types": ["linear_attention", "full_attention"], "kv_lora_rank": 8}, "latent"),
        ({"attention_chunk_size": 8192}, "chunks of 8192"),
        ({"attn_logit_softcapping": 50.0}, "caps its logits at 50"),
        ({"kv_lora_rank": 512}, "latent"),
        ({"model_type": "gpt_oss"}, "sinks, which are not in its config"),
        ({"alibi": True}, "ALiBi"),
        ({"num_kv_shared_layers": 1}, "share"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"is_causal": False}, "not causal"),
        ({"scale_attn_by_inverse_layer_idx": True}, "each in a way of their own"),
        ({"head_dim": 72}, "head_dim of 72, and multiples of 16 up to 256"),
        ({"head_dim": 272}, "head_dim of 272"),
        ({"num_attention_heads": 6, "num_key_value_heads": 4}, "6 query heads, which 4 KV heads"),
        ({"num_attention_heads": None}, "no num_attention_heads"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_refused_configs(client: Client, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedModelError, match=said):
        SpillwayCache(config(**changes), client)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"sliding_window": None},
        {"sliding_window": 4096, "use_sliding_window": False},
        {"layer_types": ["full_attention"] * 2},
        {"num_attention_heads": 48, "num_key_value_heads": 1},
    ],
)
def test_served_configs(client: Client, changes: dict[str, Any]) -> None:
    with SpillwayCache(config(**changes), client) as cache:
        assert len(cache) == 2


def test_real_configs_of_refused_models(client: Client) -> None:
    transformers = pytest.importorskip("transformers")
    for name in ("MistralConfig", "Gemma2Config", "GptOssConfig", "DeepseekV3Config", "T5Config"):
        with pytest.raises(UnsupportedModelError):
            SpillwayCache(getattr(transformers, name)(), client)
    for name in ("LlamaConfig", "Qwen2Config", "Qwen3Config", "DbrxConfig", "BioGptConfig"):
        SpillwayCache(getattr(transformers, name)(), client).close()
    SpillwayCache(GemmaConfig(), client).close()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("FalconConfig", "not behind transformers' attention interface"),
        ("XGLMConfig", "not behind transformers' attention interface"),
        ("RoFormerConfig", "not behind transformers' attention interface"),
        ("RwkvConfig", "no num_attention_heads"),
        ("xLSTMConfig", "no num_attention_heads"),
        ("BltConfig", "no num_hidden_layers and no num_attention_heads"),
        ("Dots3NoteConfig", "indexed_attention"),
        ("BertConfig", "is_decoder=False"),
        ("XLMRobertaConfig", "is_decoder=False"),
        ("DiffLlamaConfig", "attend twice to the same keys"),
        ("DogeConfig", "adds learned values to its logits"),
        ("DoryConfig", "several times for each token"),
        ("JetMoeConfig", "changes keys after they were cached"),
        ("MiMoV2FlashConfig", "its values have fewer elements than its keys"),
        ("MiniMaxConfig", "takes only a cache of its own kind"),
        ("KimiLinearConfig", "multi-head latent attention"),
        ("MllamaTextConfig", "cross-attention"),
    ],
)
def test_models_that_no_cache_can_serve(client: Client, name: str, said: str) -> None:
    """Before, they raised other errors, or in the middle of a prompt."""
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, name):
        pytest.skip(f"this version of transformers has no {name}")
    with pytest.raises(UnsupportedModelError, match=said):
        SpillwayCache(getattr(transformers, name)(), client)


@pytest.mark.parametrize("changes", [{"head_dim": 72}, {"head_dim": 272}, {"query_head_count": 5}])
def test_the_engine_refuses_these_shapes_too(client: Client, changes: dict[str, int]) -> None:
    shapes: Any = {"query_head_count": 4, "kv_head_count": 2, "head_dim": 256, **changes}
    with pytest.raises(spillway_kv.InvalidArgument):
        client.create_model(layer_count=1, dtype="float32", **shapes)
    for served in ({"head_dim": 16}, {"head_dim": 256}, {"query_head_count": 34}):
        shapes = {"query_head_count": 4, "kv_head_count": 2, "head_dim": 32, **served}
        client.delete_model(client.create_model(layer_count=1, dtype="float32", **shapes))


@pytest.mark.parametrize(("heads", "multi_query"), [(4, True), (4, False), (24, True)])
def test_one_kv_head_for_all(client: Client, heads: int, multi_query: bool) -> None:
    """GPTBigCode's config says so in a field of its own."""
    models = []
    for _ in range(2):
        torch.manual_seed(3)
        made = GPTBigCodeForCausalLM(
            GPTBigCodeConfig(
                vocab_size=VOCABULARY,
                n_embd=16 * heads,
                n_layer=2,
                n_head=heads,
                n_positions=512,
                multi_query=multi_query,
                bos_token_id=1,
                eos_token_id=None,
                pad_token_id=0,
            )
        )
        models.append(made.eval().to(DEVICE))
    wanted = generate(models[0], prompt(1, 60), max_new_tokens=8)
    models[1].set_attn_implementation("spillway")
    with SpillwayCache(models[1].config, client, quality="exact") as cache:
        assert torch.equal(generate(models[1], prompt(1, 60), cache, max_new_tokens=8), wanted)
        assert cache.model is not None
        assert cache.model.kv_head_count == (1 if multi_query else heads)


def test_autocast(client: Client, dense: Any, spilled: Any) -> None:
    """K of a float32 model are in float32 then, and V in bfloat16.

    Tokens may differ: products are in bfloat16, and on a GPU they are rounded in another order.
    """
    ids = prompt(1, 70)
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16), torch.no_grad():
        wanted = dense(ids).logits
        with SpillwayCache(spilled.config, client, quality="exact") as cache:
            made = [spilled(ids[:, :60], past_key_values=cache, use_cache=True).logits]
            for at in range(60, 70):
                one = spilled(ids[:, at : at + 1], past_key_values=cache, use_cache=True)
                made.append(one.logits)
            assert cache.model is not None
            assert cache.model.dtype == "float32"
    error = (torch.cat(made, 1) - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    assert error.max() < 0.1  # another text gives about 1


def test_a_compiled_model(client: Client) -> None:
    """Rows of a batch have padding. Attention is outside of the graphs."""
    if client.transport != "embedded":
        pytest.skip("compiling takes seconds")
    ids = prompt(2, 60)
    ids[0, :20] = 0
    wanted = generate(llama(layer_count=1), ids, max_new_tokens=6)
    model = llama(layer_count=1)
    model.set_attn_implementation("spillway")
    model.forward = torch.compile(model.forward, backend="eager", dynamic=True)
    try:
        with SpillwayCache(model.config, client, quality="exact") as cache:
            made = generate(model, ids, cache, max_new_tokens=6)
            assert cache.length == 65
        assert torch.equal(made, wanted)
    finally:
        torch._dynamo.reset()


def test_a_graph_of_the_whole_model_is_refused(client: Client) -> None:
    model = llama(layer_count=1)
    model.set_attn_implementation("spillway")
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    says_why = "reason" in inspect.signature(torch.compiler.disable).parameters
    said = "outside of torch's graphs" if says_why else ""
    try:
        with SpillwayCache(model.config, client) as cache, torch.no_grad():
            with pytest.raises(torch._dynamo.exc.Unsupported, match=said):
                compiled(prompt(1, 60), past_key_values=cache)
            assert cache.length == 0
    finally:
        torch._dynamo.reset()


def test_a_client_is_no_config(client: Client) -> None:
    with pytest.raises(TypeError, match="the model's config is expected first, not a Client"):
        SpillwayCache(client, client)


def test_a_model_that_also_reads_images(client: Client) -> None:
    """Only its text decoder has Spillway's attention."""
    torch.manual_seed(1)
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    shapes = {k: BASE[k] for k in BASE if k != "head_dim"}
    config = Qwen2VLConfig(
        text_config={**shapes, "vocab_size": 257, "rope_parameters": rope},
        vision_config={"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2},
    )
    model: Any = Qwen2VLForConditionalGeneration(config).to(DEVICE).eval()
    patches = torch.randn(16, 3 * 2 * 14 * 14).to(DEVICE)
    grid = torch.tensor([[1, 4, 4]], device=DEVICE)
    wanted = generate(model, prompt(1, 20), max_new_tokens=8)
    model.set_attn_implementation({"text_config": "spillway"})
    with SpillwayCache(model.config, client, quality="exact") as cache:
        assert torch.equal(generate(model, prompt(1, 20), cache, max_new_tokens=8), wanted)
    with torch.no_grad():
        model.model.visual(patches, grid_thw=grid)
        model.set_attn_implementation("spillway")
        with pytest.raises(UnsupportedModelError, match=r"VisionAttention.*'text_config'"):
            model.model.visual(patches, grid_thw=grid)


def test_early_exit_is_refused_before_it_begins(client: Client, spilled: Any) -> None:
    layers = spilled.config.num_hidden_layers
    with (
        SpillwayCache(spilled.config, client) as cache,
        pytest.raises(UnsupportedModelError, match="assistant_early_exit"),
    ):
        transformers_generate(
            spilled, cache, prompt(1, 10), assistant_early_exit=1, max_new_tokens=4
        )
    assert spilled.config.num_hidden_layers == layers


def test_other_attention_with_the_cache(client: Client, dense: Any) -> None:
    with SpillwayCache(dense.config, client) as cache:
        with pytest.raises(RuntimeError, match="set_attn_implementation"):
            generate(dense, prompt(1, 10), cache)


def test_other_cache_with_the_attention(spilled: Any) -> None:
    with pytest.raises(RuntimeError, match="SpillwayCache"):
        generate(spilled, prompt(1, 10))


def test_masks_that_are_no_left_padding(client: Client, spilled: Any) -> None:
    ids = prompt(1, 10)
    for hole in (4, 9):
        mask = torch.ones_like(ids)
        mask[0, hole] = 0
        with SpillwayCache(spilled.config, client) as cache, torch.no_grad():
            with pytest.raises(ValueError, match="not on the left"):
                spilled(ids, attention_mask=mask, past_key_values=cache)
    with SpillwayCache(spilled.config, client) as cache, torch.no_grad():
        with pytest.raises(ValueError, match="4 dimensions"):
            spilled(ids, attention_mask=ids.new_ones(1, 1, 10, 10).bool(), past_key_values=cache)
        # A failure in the middle of a forward pass is noticed.
        cache.reset()
        spilled(ids, past_key_values=cache)
        with pytest.raises(ValueError, match="covers every position"):
            spilled(ids[:, :1], attention_mask=ids.new_zeros(1, 1), past_key_values=cache)
        mask = ids.new_ones(1, 11)
        mask[0, :3] = 0
        with pytest.raises(ValueError, match="0 padding positions in the cache, 3"):
            spilled(ids[:, :1], attention_mask=mask, past_key_values=cache)


def test_other_batch_size(client: Client, spilled: Any) -> None:
    with SpillwayCache(spilled.config, client) as cache, torch.no_grad():
        spilled(prompt(2, 10), past_key_values=cache)
        with pytest.raises(ValueError, match="holds 2 rows, the batch has 3"):
            spilled(prompt(3, 1), past_key_values=cache)


def test_gradients_are_refused(client: Client, spilled: Any) -> None:
    with SpillwayCache(spilled.config, client) as cache:
        with pytest.raises(ValueError, match="no_grad"):
            spilled(prompt(1, 4), past_key_values=cache)


def test_lost_sequence_is_an_error(client: Client, spilled: Any) -> None:
    with SpillwayCache(spilled.config, client) as cache, torch.no_grad():
        spilled(prompt(1, 10), past_key_values=cache)
        cache.sequences[0].delete()
        with pytest.raises(spillway_kv.NotFound):
            spilled(prompt(1, 1), past_key_values=cache)
        cache.reset()
        spilled(prompt(1, 10), past_key_values=cache)
        assert cache.sequences[0].token_count == 10


def test_an_append_that_fails(
    client: Client, spilled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    append = spillway_kv.Sequence.append

    def fail(self: spillway_kv.Sequence, layer: int, *arguments: Any) -> Any:
        if layer == 0:
            raise spillway_kv.ResourceExhausted("no room", code="RESOURCE_EXHAUSTED")
        return append(self, layer, *arguments)

    with SpillwayCache(spilled.config, client) as cache, torch.no_grad():
        monkeypatch.setattr(spillway_kv.Sequence, "append", fail)
        for count in (10, 1, 30):
            with pytest.raises(spillway_kv.ResourceExhausted, match="no room"):
                spilled(prompt(1, count), past_key_values=cache)
                assert cache.sequences
        monkeypatch.undo()
        cache.reset()
        spilled(prompt(1, 10), past_key_values=cache)
        assert cache.sequences[0].layer_token_counts == (10,) * spilled.config.num_hidden_layers


@pytest.mark.parametrize("most", [2 << 30, 0])
def test_appends_run_beside_each_other(
    client: Client, spilled: Any, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    append = spillway_kv.Sequence.append
    running: list[int] = []
    done: list[int] = []
    met = threading.Event()

    def slow(self: spillway_kv.Sequence, layer: int, *arguments: Any) -> Any:
        running.append(layer)
        if len(running) > 1:
            met.set()
        # Wait long if another append must come, so that this works on a busy machine.
        met.wait(60 if most > 0 else 0.05)
        result = append(self, layer, *arguments)
        running.remove(layer)
        done.append(layer)
        return result

    monkeypatch.setattr(spillway_kv.Sequence, "append", slow)
    # With a limit of 0, no append may wait.
    monkeypatch.setattr(appends, "BYTES_MAX", most)
    with SpillwayCache(spilled.config, client) as cache, torch.no_grad():
        spilled(prompt(1, 10), past_key_values=cache)
        # Appends may continue until the sequences are used.
        assert len(cache.sequences) == 1
        assert not running
        assert met.is_set() == (most > 0)
        assert sorted(done) == list(range(spilled.config.num_hidden_layers))
        assert cache.sequences[0].layer_token_counts == (10,) * len(done)


def test_rows_that_cannot_all_be_made_leave_nothing(
    client: Client, spilled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[spillway_kv.Sequence] = []

    def third_fails(make: Any) -> Any:
        def call(*arguments: Any, **keywords: Any) -> Any:
            if len(made) == 2:
                raise spillway_kv.ResourceExhausted("no room")
            made.append(make(*arguments, **keywords))
            return made[-1]

        return call

    def assert_gone() -> None:
        for sequence in made:
            with pytest.raises(spillway_kv.NotFound):
                sequence.refresh()
        made.clear()

    with SpillwayCache(spilled.config, client) as cache, torch.no_grad():
        monkeypatch.setattr(client, "create_sequence", third_fails(client.create_sequence))
        with pytest.raises(spillway_kv.ResourceExhausted, match="no room"):
            spilled(prompt(3, 10), past_key_values=cache)
        assert_gone()
        monkeypatch.undo()
        spilled(prompt(1, 10), past_key_values=cache)
        (kept,) = cache.sequences
        monkeypatch.setattr(spillway_kv.Sequence, "fork", third_fails(spillway_kv.Sequence.fork))
        with pytest.raises(spillway_kv.ResourceExhausted, match="no room"):
            cache.batch_repeat_interleave(4)
        assert cache.sequences == (kept,)
        assert_gone()
