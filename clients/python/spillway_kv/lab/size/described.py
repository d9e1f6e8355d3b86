"""A model as its config describes it: shapes, windows, weights. Nothing is downloaded."""

from __future__ import annotations

import warnings
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from spillway_kv.transformers.sliding import SPARE_TOKEN_COUNT
from spillway_kv.transformers.support import (
    Shapes,
    UnsupportedModelError,
    layers_of,
    shapes_of,
)

DTYPES = {"bfloat16": 2, "float16": 2, "float32": 4}


class UnknownWeightsError(ValueError):
    """The bytes of the model's weights do not follow from its config."""


@dataclass(frozen=True)
class Described:
    """What a config says.

    Attributes:
        name: The model's type.
        shapes: Shapes of the layers with full attention.
        dtype: Element type of weights and of K/V: a key of `DTYPES`.
        windows: Layers with a sliding window, by the window's tokens.
        position_count: Most tokens that the model was made for; None: the config does not say.
    """

    name: str
    shapes: Shapes
    dtype: str
    windows: dict[int, int]
    position_count: int | None

    @property
    def element_bytes(self) -> int:
        """Bytes of an element."""
        return DTYPES[self.dtype]

    def window_bytes(self, token_count: int, *, spare: int = 2 * SPARE_TOKEN_COUNT - 1) -> int:
        """Returns the bytes that one sequence's layers with a sliding window take.

        A SpillwayCache keeps them on the model's device.

        Args:
            token_count: Tokens of the sequence.
            spare: Tokens that are kept beside the window, at most.
        """
        row = 2 * self.shapes.kv_head_count * self.shapes.head_dim * self.element_bytes
        return sum(
            count * min(token_count, window + spare) * row for window, count in self.windows.items()
        )


def load_config(model: str) -> Any:
    """Loads a config of transformers: from a folder, a file, or the hub's folder on this machine.

    Args:
        model: A folder with a config.json, such a file, or the name of a model that was
            downloaded before.

    Raises:
        ValueError: There is none, or transformers does not know this kind of model.
    """
    path = Path(model)
    if path.is_dir() and not (path / "config.json").is_file():
        raise ValueError(f"{model}: the folder has no config.json")
    if not path.exists() and (path.suffix == ".json" or path.is_absolute()):
        raise ValueError(f"{model}: there is no such file or folder")
    # Its warnings about configs are for those who load the model.
    transformers.utils.logging.set_verbosity_error()
    try:
        return transformers.AutoConfig.from_pretrained(
            str(path if path.exists() else model), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:
        # Of any kind: configs check themselves, and each in its own way.
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        if not path.exists():
            reason = "there is no such file or folder, and it was not downloaded from the hub"
        raise ValueError(f"{model}: {reason}") from error


def describe(config: Any, dtype: str | None = None) -> Described:
    """Reads a config.

    Args:
        config: A `PreTrainedConfig`.
        dtype: A key of `DTYPES`. None: the config's, or bfloat16 if it has none.

    Raises:
        UnsupportedModelError: Spillway does not serve the model, or it does not write text.
        ValueError: K/V of the config's dtype are not served.
    """
    shapes = shapes_of(config)
    if not _classes(config):
        raise UnsupportedModelError(
            f"a {config.model_type} model cannot be served: transformers has no class of it that "
            "writes text"
        )
    windows = Counter(kind.window for kind in layers_of(config) if kind.window is not None)
    text = config.get_text_config(decoder=True)
    if dtype is None:
        known = getattr(config, "dtype", None) or getattr(text, "dtype", None) or "bfloat16"
        dtype = str(known).removeprefix("torch.")
    if dtype not in DTYPES:
        raise ValueError(
            f"the config's dtype is {dtype}, and K/V of {', '.join(DTYPES)} are served: "
            "give --dtype"
        )
    positions = getattr(text, "max_position_embeddings", None)
    return Described(
        name=config.model_type,
        shapes=shapes,
        dtype=dtype,
        windows=dict(windows),
        position_count=positions if isinstance(positions, int) else None,
    )


def weight_count(config: Any) -> int:
    """Returns the number of weights of the config's model, which is not made.

    Of a composite model all parts count, and weights that are tied count once.

    Raises:
        UnknownWeightsError: They are quantised, or the model cannot be laid out.
    """
    quantised = getattr(config, "quantization_config", None)
    if quantised is not None:
        method = quantised.get("quant_method") if isinstance(quantised, dict) else None
        raise UnknownWeightsError(f"the weights are quantised ({method or 'an unknown method'})")
    kind, of = _classes(config)[0]
    try:
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = kind.from_config(of, dtype=torch.bfloat16)
    except Exception as error:
        # Of any kind: what a config lacks shows when its model is made.
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UnknownWeightsError(f"the model cannot be laid out ({reason})") from error
    return sum(parameter.numel() for parameter in model.parameters())


def _classes(config: Any) -> list[tuple[Any, Any]]:
    """Returns the classes of transformers that write text, each with the config it is made of.

    The first one has all parts of the model.
    """
    text = config.get_text_config(decoder=True)
    causal = transformers.AutoModelForCausalLM, transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    wide = (
        transformers.AutoModelForImageTextToText,
        transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    )
    found = []
    for (kind, known), of in ((wide, config), (causal, config), (causal, text)):
        if type(of) in known:
            found.append((kind, of))
    return found
