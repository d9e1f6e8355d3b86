"""Converts weights that were published for other systems to files for the daemon."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from spillway_kv.indices import MlpHash
from spillway_kv.lab.training.hash_mlp import HashMlp


def _load(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    # For files that torch did not save, torch.load raises various errors of its unpickler.
    except Exception as error:
        raise ValueError(f"{path} is not a file that torch.save wrote: {error}") from error


def import_spotlight(path: Path, layer_count: int) -> tuple[dict[str, torch.Tensor], MlpHash]:
    """Reads a checkpoint of Spotlight Attention (github.com/wenhaoli-xmu/spotlight).

    It is a list of tensors without names, four per layer: P1 [1, H_q, d, d], c1 [1, H_q, 1, d], P2,
    c2. The code of x consists of the signs of z P2 + c2 + z with z = SiLU(x P1 + c1) + x. There is
    one function per query head, and keys are not centred.

    Args:
        path: The `.pth` file.
        layer_count: Number of layers of the model.

    Returns:
        Tensors for `save_hash`, and their description.

    Raises:
        ValueError: The file is not such a list for this number of layers.
    """
    loaded = _load(path)
    if not isinstance(loaded, list) or not all(torch.is_tensor(t) for t in loaded):
        raise ValueError(f"{path} is not a list of tensors")
    if len(loaded) != 4 * layer_count:
        raise ValueError(
            f"{path} has {len(loaded)} tensors, and {layer_count} layers need {4 * layer_count}: "
            "some published checkpoints lack layers"
        )
    head_count, dim = loaded[0].shape[1], loaded[0].shape[-1]
    shapes = [(1, head_count, dim, dim), (1, head_count, 1, dim)] * 2
    tensors: dict[str, torch.Tensor] = {}
    for layer in range(layer_count):
        parts = loaded[4 * layer : 4 * layer + 4]
        for i, (part, shape) in enumerate(zip(parts, shapes, strict=True)):
            if tuple(part.shape) != shape:
                raise ValueError(
                    f"{path}: tensor {4 * layer + i} is {tuple(part.shape)}, not {shape}"
                )
        w1, b1, w2, b2 = (part[0].float() for part in parts)
        tensors |= HashMlp(w1, b1[:, 0], w2, b2[:, 0], residual=True).tensors(layer)
    described = MlpHash(
        hash_bits=dim, hidden_dim=dim, residual=True, per_query_head=True, raw_keys=True
    )
    return tensors, described


def import_hata(folder: Path) -> tuple[dict[str, torch.Tensor], int, MlpHash]:
    """Reads the layers of HATA (github.com/gpzlx1/HATA).

    hash_weight_layer_00.pt and so on have W [H_kv, d, bits] each. The code of x consists of the
    signs of x W, and keys are not centred. It is converted to an MLP: SiLU(x) - SiLU(-x) is x, so a
    hidden layer of width 2 d computes x W up to rounding.

    Args:
        folder: Folder with the files.

    Returns:
        Tensors for `save_hash`, the number of layers, and the description of the tensors.

    Raises:
        ValueError: A file is missing or has a wrong shape.
    """
    paths = sorted(folder.glob("hash_weight_layer_*.pt"))
    wanted = [folder / f"hash_weight_layer_{layer:02d}.pt" for layer in range(len(paths))]
    if not paths or paths != wanted:
        raise ValueError(f"{folder} does not hold hash_weight_layer_00.pt and those that follow")
    tensors: dict[str, torch.Tensor] = {}
    shape: tuple[int, ...] = ()
    for layer, path in enumerate(paths):
        weight = _load(path)
        if torch.is_tensor(weight):
            shape = shape or tuple(weight.shape)
        if not torch.is_tensor(weight) or weight.dim() != 3 or tuple(weight.shape) != shape:
            raise ValueError(f"{path} is not one tensor [H_kv, d, bits], the same in all layers")
        tensors |= HashMlp.linear(weight.float()).tensors(layer)
    described = MlpHash(hash_bits=shape[2], hidden_dim=2 * shape[1], raw_keys=True)
    return tensors, len(paths), described
