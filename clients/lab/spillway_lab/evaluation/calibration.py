"""Double Sparsity's offline choice: the channels of keys that matter most to logits."""

from __future__ import annotations

import torch

from spillway_lab.evaluation.recording import Recording


def choose_channels(recording: Recording, count: int) -> torch.Tensor:
    """Chooses channels by the mean of |q_c k_c| (arXiv 2408.07092, section 3).

    The mean over all pairs of a recorded query and a key, which factors into
    those of |q_c| and |k_c|; a KV head's channels are one set, so its query
    heads' means are summed.

    Args:
        recording: Of text that is not evaluated.
        count: Channels of a head.

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
