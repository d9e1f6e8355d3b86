"""Traces: queries and keys of a model's attention, recorded while it reads a text."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from spillway_kv.transformers.support import shapes_of

_META = "traces.json"
_RECORDING = "spillway_recording"


@dataclass(frozen=True)
class Sample:
    """Keys and queries of one layer for one segment of text, after the positional encoding.

    Attributes:
        keys: [H_kv, n, d], float32.
        queries: Queries of some of the tokens, [H_q, m, d], float32.
        positions: Positions of these tokens, int64 [m], ascending. Query t sees positions[t] + 1
            keys.
    """

    keys: torch.Tensor
    queries: torch.Tensor
    positions: torch.Tensor


@dataclass(frozen=True)
class Traces:
    """A folder of samples, stored as bfloat16.

    Attributes:
        folder: The folder.
        model: Name of the model, from its config.
        layer_count: Transformer layers.
        query_head_count: Query heads per layer, H_q.
        kv_head_count: K/V heads per layer, H_kv.
        head_dim: Elements of a key, d.
        sample_count: Number of segments of text.
        token_count: Number of tokens of a segment, n.
    """

    folder: Path
    model: str
    layer_count: int
    query_head_count: int
    kv_head_count: int
    head_dim: int
    sample_count: int
    token_count: int

    @classmethod
    def open(cls, folder: Path) -> Traces:
        """Opens a folder that `collect` filled.

        Raises:
            ValueError: `collect` did not fill the folder, or did not finish.
        """
        path = folder / _META
        if not path.exists():
            raise ValueError(f"{folder} holds no traces: {_META} is not there")
        return cls(folder=folder, **json.loads(path.read_text()))

    def meta(self) -> dict[str, Any]:
        """Returns the description of the traces, without the folder."""
        return {name: value for name, value in asdict(self).items() if name != "folder"}

    def sample(self, layer: int, index: int, device: torch.device) -> Sample:
        """Reads one sample of one layer."""
        tensors = load_file(_path(self.folder, layer, index))
        return Sample(
            keys=tensors["keys"].to(device).float(),
            queries=tensors["queries"].to(device).float(),
            positions=tensors["positions"].to(device),
        )


def _path(folder: Path, layer: int, index: int) -> Path:
    return folder / f"layer_{layer:03d}_sample_{index:03d}.safetensors"


def read_text(files: Sequence[Path]) -> str:
    """Returns the concatenated text of files. `.gz` files are decompressed.

    Raises:
        ValueError: A `.gz` file is not a gzip file.
    """
    parts = []
    for file in files:
        data = file.read_bytes()
        if file.suffix == ".gz":
            try:
                data = gzip.decompress(data)
            except (gzip.BadGzipFile, EOFError, zlib.error) as error:
                raise ValueError(f"{file} is not a gzip file: {error}") from error
        parts.append(data.decode(errors="replace"))
    return "\n".join(parts)


@contextmanager
def attention_seen(model: Any, see: Callable[..., None]) -> Iterator[None]:
    """Lets the model attend as usual, and passes the inputs of its attention to `see`.

    Args:
        model: A transformers model.
        see: Called before each layer attends, with the layer's index, queries [1, H_q, T, d], keys
            and values [1, H_kv, n, d], all after the positional encoding, and the factor on q.k.
    """

    def attend(
        module: Any, query: Any, key: Any, value: Any, *args: Any, scaling: float, **kwargs: Any
    ) -> Any:
        see(module.layer_idx, query, key, value, scaling)
        return sdpa_attention_forward(module, query, key, value, *args, scaling=scaling, **kwargs)

    AttentionInterface.register(_RECORDING, attend)
    AttentionMaskInterface.register(_RECORDING, sdpa_mask)
    before = model.config._attn_implementation
    model.set_attn_implementation(_RECORDING)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def collect(
    model: Any,
    tokens: torch.Tensor,
    folder: Path,
    *,
    token_count: int,
    sample_count: int | None = None,
    query_count: int = 2048,
    seed: int = 0,
    on_sample: Callable[[int, int], None] | None = None,
) -> Traces:
    """Lets the model read a text in segments, and stores queries and keys of its attention.

    Args:
        model: A transformers model with plain causal attention (Llama, Qwen, Mistral without a
            window, SmolLM and others).
        tokens: Token ids of the text, int64 [N].
        folder: Folder for the samples; created if necessary.
        token_count: Number of tokens of a segment, at least 256.
        sample_count: Most segments, spread over the text. None means all.
        query_count: Number of queries that are stored for a segment, drawn at random.
        seed: Seed of these draws.
        on_sample: Called with the number of segments read so far, and the number of all segments.

    Returns:
        The traces.

    Raises:
        ValueError: The text is too short for two segments: one for training and one for evaluation.
        UnsupportedModelError: The model's attention is not plain softmax attention.
    """
    shapes = shapes_of(model.config)
    whole = len(tokens) // token_count
    count = whole if sample_count is None else min(whole, sample_count)
    if token_count < 256 or count < 2:
        raise ValueError(
            f"{len(tokens)} tokens are {whole} segments of {token_count}; at least 2 segments of "
            "at least 256 tokens are needed, one of them for evaluation"
        )
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    positions = torch.empty(0, dtype=torch.int64, device="cpu")
    index = 0

    def keep(layer: int, query: torch.Tensor, key: torch.Tensor, *_: Any) -> None:
        queries = query[0][:, positions.to(query.device)]
        save_file(
            {
                "keys": key[0].to("cpu", torch.bfloat16).contiguous(),
                "queries": queries.to("cpu", torch.bfloat16).contiguous(),
                "positions": positions,
            },
            _path(folder, layer, index),
        )

    with attention_seen(model, keep):
        for index in range(count):
            # The first and the last segment, and others at even distances in between.
            start = index * (whole - 1) // max(1, count - 1) * token_count
            drawn = torch.randperm(token_count, generator=generator, device="cpu")
            positions = drawn[:query_count].sort().values
            stretch = tokens[start : start + token_count].to(model.device)
            with torch.inference_mode():
                model.base_model(input_ids=stretch[None], use_cache=False)
            if on_sample is not None:
                on_sample(index + 1, count)
    traces = Traces(
        folder=folder,
        model=getattr(model.config, "_name_or_path", "") or model.config.model_type,
        layer_count=shapes.layer_count,
        query_head_count=shapes.query_head_count,
        kv_head_count=shapes.kv_head_count,
        head_dim=shapes.head_dim,
        sample_count=count,
        token_count=token_count,
    )
    (folder / _META).write_text(json.dumps(traces.meta(), indent=1) + "\n")
    return traces
