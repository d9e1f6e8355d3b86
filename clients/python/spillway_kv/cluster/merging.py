"""Merges the answers of daemons that each have a share of the KV heads."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from spillway_kv._proto import attention_service_pb2
from spillway_kv.cluster.shares import Share
from spillway_kv.results import AttendResult, Certificate, Selection, SequenceInfo
from spillway_kv.tensors import BFloat16, decoder_like, is_torch

_PER_HEAD = (
    "visible_token_counts",
    "heavy_token_counts",
    "sampled_token_counts",
    "relative_errors",
    "tail_masses",
    "promises",
)


def joined(arrays: Sequence[Any], axis: int) -> Any:
    """Concatenates arrays of the same type."""
    if len(arrays) == 1:
        return arrays[0]
    if is_torch(arrays[0]):
        import torch  # noqa: PLC0415  (only where its tensors are)

        return torch.cat(list(arrays), dim=axis)
    if isinstance(arrays[0], BFloat16):
        return BFloat16(np.concatenate([array.bits for array in arrays], axis))
    return np.concatenate(arrays, axis)


def heads_of(array: Any, heads: slice, axis: int) -> Any:
    """Returns the part of an array that belongs to some heads. axis: the heads' dimension."""
    return array[(slice(None),) * axis + (heads,)]


def _interleaved(values: Sequence[Sequence[Any]], query_count: int) -> list[Any]:
    """Merges lists [T, heads], one of each part, to one list [T, all heads]."""
    widths = [len(each) // query_count for each in values]
    return [
        value
        for t in range(query_count)
        for each, width in zip(values, widths, strict=True)
        for value in each[t * width : (t + 1) * width]
    ]


def merged_certificate(
    parts: Sequence[attention_service_pb2.Certificate], query_count: int
) -> attention_service_pb2.Certificate:
    """Merges the certificates of all heads. epsilon, delta and inflation are equal in all parts."""
    whole = attention_service_pb2.Certificate()
    whole.CopyFrom(parts[0])
    for name in _PER_HEAD:
        whole.ClearField(name)
        getattr(whole, name).extend(_interleaved([getattr(p, name) for p in parts], query_count))
    return whole


def merged_results(parts: Sequence[AttendResult], head_counts: Sequence[int]) -> AttendResult:
    """Merges the results of parts to the result for all heads.

    Args:
        parts: Results in the order of the heads.
        head_counts: Number of KV heads of each part.
    """
    if len(parts) == 1:
        return parts[0]
    query_count = parts[0].message.out.shape[0]
    message = attention_service_pb2.AttendResult()
    shape = parts[0].message.out.shape
    heads = sum(part.message.out.shape[1] for part in parts)
    message.out.dtype = parts[0].message.out.dtype
    message.out.shape.extend((query_count, heads, shape[2]))
    message.certificate.CopyFrom(
        merged_certificate([part.message.certificate for part in parts], query_count)
    )
    inflations = [part.certificate.head_inflations for part in parts]
    if any(each.size for each in inflations):
        # A daemon without raised inflations lists none: its heads have the inflation of the policy.
        message.certificate.ClearField("head_inflations")
        for each, count in zip(inflations, head_counts, strict=True):
            same = [message.certificate.inflation] * count
            message.certificate.head_inflations.extend(each.tolist() if each.size else same)
    statistics = [part.message.statistics for part in parts]
    message.statistics.touched_row_counts.extend(
        _interleaved([each.touched_row_counts for each in statistics], query_count)
    )
    message.statistics.moved_row_count = sum(each.moved_row_count for each in statistics)
    # The daemons work at the same time.
    message.statistics.device_time_us = max(each.device_time_us for each in statistics)
    result = AttendResult(message, decoder_like(None))
    result.__dict__.update(
        out=joined([part.out for part in parts], 1), lse=joined([part.lse for part in parts], 1)
    )
    return result


def merged_selections(parts: Sequence[Selection], query_head_count: int) -> Selection:
    """Merges the selected rows of all heads. parts: in the order of the heads."""
    if len(parts) == 1:
        return parts[0]
    ends = np.cumsum([0] + [int(part.offsets[-1]) for part in parts])
    offsets = [np.zeros(1, np.int64)]
    offsets += [part.offsets[1:] + end for part, end in zip(parts, ends, strict=False)]
    certificates = [part.certificate for part in parts if part.certificate is not None]
    certificate = None
    if len(certificates) == len(parts):
        message = merged_certificate([each.message for each in certificates], 1)
        certificate = Certificate(message, (1, query_head_count))
    return Selection(
        offsets=np.concatenate(offsets),
        indices=joined([part.indices for part in parts], 0),
        log_weights=joined([part.log_weights for part in parts], 0),
        strata=joined([part.strata for part in parts], 0),
        certificate=certificate,
    )


def selection_of(whole: Selection, groups: slice) -> tuple[Selection, slice]:
    """Returns the selected rows of some groups of query heads, and their place among all rows."""
    place = slice(int(whole.offsets[groups.start]), int(whole.offsets[groups.stop]))
    chosen = Selection(
        offsets=np.asarray(whole.offsets[groups.start : groups.stop + 1], np.int64) - place.start,
        indices=whole.indices[place],
    )
    return chosen, place


def merged_counts(
    shares: Sequence[Share], counts: Sequence[Sequence[int]], layer_count: int
) -> tuple[int, ...]:
    """Returns, for each layer, the number of tokens that all its parts have."""
    return tuple(
        min(
            part[layer - share.layers.start]
            for share, part in zip(shares, counts, strict=True)
            if layer in share.layers
        )
        for layer in range(layer_count)
    )


def merged_info(
    shares: Sequence[Share], parts: Sequence[SequenceInfo], layer_count: int
) -> SequenceInfo:
    """Merges the infos of the parts to that of the whole sequence."""
    counts = merged_counts(shares, [part.layer_token_counts for part in parts], layer_count)
    return dataclasses.replace(
        parts[0],
        token_count=min(counts),
        layer_token_counts=counts,
        row_bytes=sum(part.row_bytes for part in parts),
        index_bytes=sum(part.index_bytes for part in parts),
        abandoned=any(part.abandoned for part in parts),
    )
