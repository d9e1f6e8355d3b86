"""K/V are not used with another model of the same shapes, unless the caller says so."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from random_llama import DEVICE, llama, prompt
from spillway_kv import Client
from spillway_kv.transformers import ModelMismatchError, SpillwayCache, generate
from spillway_kv.transformers.identity import (
    check_config,
    config_digest,
    config_fields,
    weights_digest,
)
from spillway_kv.transformers.texts import RowNote
from transformers import Gemma3TextConfig, LlamaConfig, PreTrainedConfig, Qwen2VLConfig

pytestmark = pytest.mark.transports("regions", "embedded")
OPTIONS: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}


def spilled(**more: Any) -> Any:
    """A model of two layers with Spillway's attention."""
    model = llama(2, **more)
    model.set_attn_implementation("spillway")
    return model


@pytest.fixture(scope="module")
def model() -> Any:
    """The model that computes the K/V."""
    return spilled()


@pytest.fixture
def folder(client: Client, tmp_path: Path, request: pytest.FixtureRequest) -> str:
    """A folder where a cache may be saved."""
    if client.transport == "embedded":
        return str(tmp_path / "chat")
    return f"chats/{abs(hash(request.node.nodeid)):x}"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rope_parameters", {"rope_type": "default", "rope_theta": 5e5}),
        ("rope_parameters", dict(YARN)),
        ("rms_norm_eps", 1e-5),
        ("hidden_act", "gelu"),
        ("attention_bias", True),
        ("intermediate_size", 64),
        ("quantization_config", {"quant_method": "gptq", "bits": 4}),
    ],
)
def test_fields_that_matter(name: str, value: Any) -> None:
    plain, other = config_fields(LlamaConfig()), config_fields(LlamaConfig(**{name: value}))
    with pytest.raises(ModelMismatchError, match=f"config: {name} was the default and is "):
        check_config(plain, other)
    with pytest.raises(ModelMismatchError, match=f"config: {name} was .* and is the default"):
        check_config(other, plain)
    check_config(other, config_fields(LlamaConfig(**{name: value})))
    assert config_digest(plain) != config_digest(other)


def test_fields_that_do_not_matter(tmp_path: Path) -> None:
    config = LlamaConfig(
        dtype="bfloat16",
        use_cache=False,
        vocab_size=77,
        eos_token_id=[1, 2],
        attention_dropout=0.5,
        id2label={0: "no"},
        max_position_embeddings=9999,
        attn_implementation="spillway",
        architectures=["Llama"],
    )
    assert config_fields(config) == {"model_type": "llama"} == config_fields(LlamaConfig())
    # With other rotary embeddings, the number of positions may matter.
    assert config_fields(LlamaConfig(max_position_embeddings=99, rope_parameters=dict(YARN))) == {
        "model_type": "llama",
        "max_position_embeddings": 99,
        "rope_parameters": {**YARN, "original_max_position_embeddings": 99},
    }
    # The same after it was saved, and written out so that no version changes the digest unseen.
    config.save_pretrained(tmp_path)
    assert config_fields(LlamaConfig.from_pretrained(tmp_path)) == {"model_type": "llama"}
    assert config_digest({"model_type": "llama"}) == "81ddd"


class Stubborn(PreTrainedConfig):
    """A config that cannot be made without arguments."""

    model_type = "stubborn"

    def __init__(self, size: int, **more: Any) -> None:
        super().__init__(**more)
        self.size = size


def test_configs_of_other_kinds() -> None:
    window = config_fields(Gemma3TextConfig(sliding_window=512))
    with pytest.raises(ModelMismatchError, match="sliding_window was 512 and is the default"):
        check_config(window, config_fields(Gemma3TextConfig()))
    # Values that differ late.
    kinds = ["sliding_attention"] * 25
    late = [
        config_fields(Gemma3TextConfig(layer_types=[*kinds, kind]))
        for kind in ("sliding_attention", "full_attention")
    ]
    with pytest.raises(ModelMismatchError, match="layer_types was"):
        check_config(*late)
    # Of a composite config, that of the text decoder counts, and the quantisation of the whole.
    whole = Qwen2VLConfig(text_config={"hidden_size": 64})
    whole.quantization_config = {"bits": 4}
    fields = config_fields(whole)
    assert (fields["model_type"], fields["hidden_size"]) == ("qwen2_vl_text", 64)
    assert fields["quantization_config"] == {"bits": 4}
    with pytest.raises(ModelMismatchError, match="size was 3 and is 4"):
        check_config(config_fields(Stubborn(3)), config_fields(Stubborn(4)))


def test_loaded_for_another_config(client: Client, model: Any, folder: str) -> None:
    ids = prompt(2, 40)
    with SpillwayCache(model.config, client) as cache:
        answer = generate(model, cache, ids, **OPTIONS)
        cache.save(folder)
        expected = generate(model, cache, answer, **OPTIONS)
    other = copy.deepcopy(model.config)
    other.rope_parameters = {"rope_type": "default", "rope_theta": 5e5}
    before = len(list(client.list_sequences()))
    with pytest.raises(ModelMismatchError, match=r'"rope_theta": 500000\.0'):
        SpillwayCache.load(folder, other, client)
    assert len(list(client.list_sequences())) == before
    with SpillwayCache.load(folder, other, client, check_model=False) as cache:
        assert cache.length == 43
    with SpillwayCache.load(folder, model.config, client) as cache:
        assert torch.equal(generate(model, cache, answer, **OPTIONS), expected)


def test_loaded_for_other_weights(client: Client, model: Any, folder: str) -> None:
    ids = prompt(1, 40)
    with SpillwayCache(model.config, client) as cache:
        answer = generate(model, cache, ids, **OPTIONS)
        with cache.fork() as fork:
            fork.save(folder)
        expected = generate(model, cache, answer, **OPTIONS)
    other = spilled(seed=2)
    with SpillwayCache.load(folder, model.config, client) as cache:
        with pytest.raises(ModelMismatchError, match="layer 0 were computed with other weights"):
            generate(other, cache, answer, **OPTIONS)
        # Nothing was appended. The weights stay known until the model itself continues.
        cache.save(folder)
        assert {s.refresh().layer_token_counts for s in cache.sequences} == {(43, 43)}
    with SpillwayCache.load(folder, model.config, client) as cache:
        assert torch.equal(generate(spilled(), cache, answer, **OPTIONS), expected)
        with pytest.raises(ModelMismatchError, match="weights"):
            generate(other, cache, expected, **OPTIONS)
    # A layer that alone has other weights is found too.
    other = spilled()
    with torch.no_grad():
        other.model.layers[1].self_attn.k_proj.weight += 0.1
    with SpillwayCache.load(folder, model.config, client) as cache:
        with pytest.raises(ModelMismatchError, match="layer 1"):
            generate(other, cache, answer, **OPTIONS)
        assert torch.equal(generate(model, cache, answer, **OPTIONS), expected)
    with SpillwayCache.load(folder, model.config, client, check_model=False) as cache:
        generate(other, cache, answer, **OPTIONS)


def test_attached_for_another_config(client: Client, model: Any) -> None:
    cache = SpillwayCache(model.config, client)
    generate(model, cache, prompt(1, 40), **OPTIONS)
    names = cache.detach()
    other = copy.deepcopy(model.config)
    other.rms_norm_eps = 1e-3
    with pytest.raises(ModelMismatchError, match="another config"):
        SpillwayCache.attach(other, client, names)
    SpillwayCache.attach(other, client, names, check_model=False).close()
    with SpillwayCache.attach(model.config, client, names, keep=False) as cache:
        assert cache.length == 43


def test_digest_of_weights() -> None:
    rounded = llama(1).to(torch.bfloat16).float().model.layers[0].self_attn
    digest = weights_digest(rounded)
    assert digest is not None
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        assert weights_digest(copy.deepcopy(rounded).to(dtype)) == digest
    changed = copy.deepcopy(rounded)
    with torch.no_grad():
        changed.v_proj.weight *= 1.01
    assert weights_digest(changed) != digest
    assert weights_digest(copy.deepcopy(rounded).to("meta")) is None
    # Weights that are not contiguous, of other types, and none at all.
    odd = torch.nn.Module()
    odd.register_buffer("codes", torch.arange(600, device=DEVICE).reshape(20, 30).T)
    assert weights_digest(odd) != weights_digest(torch.nn.Module()) is not None


def test_notes_without_a_model() -> None:
    """A save by an earlier version says nothing about the model, and damaged notes are refused."""
    note = RowNote("a", 0, 1, 3, 0, {}, torch.tensor([4, 5, 6]))
    read = RowNote.from_bytes(note.to_bytes())
    assert (read.config, read.weights, read.ids.tolist()) == (None, (), [4, 5, 6])
    packed = note.to_bytes().replace(b'"config": null', b'"config": 1234')
    for damaged in (packed, packed.replace(b"1234", b"[[[[")):
        with pytest.raises(ValueError, match=r"not saved by SpillwayCache\.save"):
            RowNote.from_bytes(damaged)
