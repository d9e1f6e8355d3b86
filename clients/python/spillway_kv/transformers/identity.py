"""Tells models apart whose K/V have the same shapes: by their configs and samples of weights."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch

# Fields of configs that change no K/V of given tokens.
_IRRELEVANT = frozenset(
    """
    architectures attention_dropout bos_token_id chunk_size_feed_forward dtype embd_pdrop
    eos_token_id hidden_dropout id2label initializer_range label2id output_attentions
    output_hidden_states pad_token_id pretraining_tp problem_type resid_pdrop return_dict
    tie_word_embeddings torch_dtype transformers_version use_cache vocab_size
    """.split()
)
# Rotary embeddings for which this many positions do not matter.
_PLAIN = "default"
_LENGTH = "max_position_embeddings"
# Elements of each tensor that a digest samples.
_SAMPLE_COUNT = 64


class ModelMismatchError(ValueError):
    """The K/V of a cache were computed by another model than the one that would continue."""


def config_fields(config: Any) -> dict[str, Any]:
    """Returns what may change K/V in a model's config, as values that JSON can hold.

    Fields that have the default value of their kind of config are left out. So fields that a later
    version of transformers adds make no difference.

    Args:
        config: The model's `PreTrainedConfig`. For a composite model, that of the text decoder is
            used.
    """
    text = config.get_text_config(decoder=True)
    fields = text.to_dict()
    quantization = getattr(config, "quantization_config", None)
    if quantization is not None and "quantization_config" not in fields:
        fields["quantization_config"] = (
            quantization if isinstance(quantization, dict) else quantization.to_dict()
        )
    try:
        defaults = type(text)().to_dict()
    except Exception:  # A config of the user's own code may need arguments.
        defaults = {}
    ignored = _IRRELEVANT
    if _rope_types(fields.get("rope_parameters")) <= {_PLAIN}:
        ignored |= {_LENGTH}
    missing = object()
    kept = {
        name: value
        for name, value in fields.items()
        if name == "model_type"
        or name not in ignored
        and not name.startswith("_")
        and value != defaults.get(name, missing)
    }
    made: dict[str, Any] = json.loads(json.dumps(kept, sort_keys=True, default=str))
    return made


def _rope_types(parameters: Any) -> set[Any]:
    """Returns the kinds of rotary embeddings. Some models have one for each kind of layer."""
    if not isinstance(parameters, dict):
        return set()
    if "rope_type" in parameters:
        return {parameters["rope_type"]}
    return set().union(*(_rope_types(value) for value in parameters.values()))


def config_digest(fields: Mapping[str, Any]) -> str:
    """Returns a short digest of `config_fields` for names, the same in every process."""
    text = json.dumps(fields, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:5]


def check_config(saved: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Compares two results of `config_fields`.

    Raises:
        ModelMismatchError: They differ. The error names the fields.
    """

    def told(fields: Mapping[str, Any], name: str) -> str:
        return json.dumps(fields[name], sort_keys=True) if name in fields else "the default"

    names = sorted({*saved, *here})
    pairs = {name: (told(saved, name), told(here, name)) for name in names}
    wrong = [
        f"{name} was {was:.200} and is {now:.200}"
        for name, (was, now) in pairs.items()
        if was != now
    ]
    if wrong:
        more = f"; and {len(wrong) - 8} other fields" if len(wrong) > 8 else ""
        raise ModelMismatchError(
            f"the K/V are from a model with another config: {'; '.join(wrong[:8])}{more}. With "
            "check_model=False they are used all the same"
        )


def weights_digest(module: torch.nn.Module) -> str | None:
    """Returns a digest of a sample of a module's weights.

    It has the names and shapes of all tensors and 64 elements of each, rounded to bfloat16. So the
    same weights in float32 or bfloat16, on any device, have the same digest.

    Returns:
        None if some tensors are not plain: offloaded, spread over processes, or quantised.
    """
    digest = hashlib.sha256()
    samples = []
    for name, tensor in module.state_dict().items():
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.is_meta:
            return None
        digest.update(f"{name} {list(tensor.shape)};".encode())
        flat = tensor.detach().reshape(-1)
        sample = flat[:: max(len(flat) // _SAMPLE_COUNT, 1)][:_SAMPLE_COUNT]
        if sample.is_floating_point():
            sample = sample.to(torch.bfloat16)
        samples.append(sample.contiguous().view(torch.uint8))
    if samples:
        # One copy from the device.
        digest.update(torch.cat(samples).cpu().numpy().tobytes())
    return digest.hexdigest()[:16]
