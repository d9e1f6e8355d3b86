"""The offline choice of Double Sparsity: the channels of keys that matter most for logits."""

from __future__ import annotations

import torch

from spillway_kv.lab.evaluation.recording import Recording


def choose_channels(recording: Recording, count: int) -> torch.Tensor:
    """Chooses channels by the mean of |q_c k_c| (arXiv 2408.07092, section 3).

    The mean is over all pairs of a recorded query and a key, so it is the product of the means of
    |q_c| and |k_c|. A KV head has one set of channels, so the means of its query heads are summed.

    Args:
        recording: Recording of a text that is not evaluated.
        count: Number of channels of a head.

    Returns:
        Channels [layers, H_kv, count], ascending, int64.
    """
    chosen = []
    for layer in range(recording.layer_count):
        seen = recording.layer(layer)
        keys = seen.keys.float().abs().mean(1)
        queries = seen.queries.abs().mean(0).unflatten(0, (keys.shape[0], -1)).sum(1)
        chosen.append((keys * queries).topk(count, dim=-1).indices.sort(dim=-1).values)
    return torch.stack(chosen)
