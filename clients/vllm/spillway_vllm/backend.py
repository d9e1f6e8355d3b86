"""The attention backend: layers with full attention go through Spillway."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
)
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec, SlidingWindowSpec

from spillway_vllm import layers

# What stays in vLLM's pool. Nothing reads it: vLLM counts requests by it. No model has a
# window of so many tokens, which tells these layers' groups of the pool from others.
WINDOW_TOKEN_COUNT = 61


class SpillwayBackend(AttentionBackend):
    """K/V in host memory, or in a daemon; vLLM's pool keeps a window of the newest tokens."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [
        torch.float16,
        torch.bfloat16,
        torch.float32,
    ]

    @staticmethod
    def get_name() -> str:
        """The name that `--attention-backend` takes."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[SpillwayImpl]:
        """What attends."""
        return SpillwayImpl

    @staticmethod
    def get_builder_cls() -> type[SpillwayMetadataBuilder]:
        """What describes a batch."""
        return SpillwayMetadataBuilder

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """A window of the newest tokens in place of all."""
        if not isinstance(spec, FullAttentionSpec):
            return spec
        return SlidingWindowSpec(
            block_size=spec.block_size,
            num_kv_heads=spec.num_kv_heads,
            head_size=spec.head_size,
            dtype=spec.dtype,
            sliding_window=WINDOW_TOKEN_COUNT,
        )


@dataclass
class SpillwayMetadata(AttentionMetadata):
    """Which of the batch's tokens are whose.

    Attributes:
        starts: Position in the batch of each row's first token, and the end, [B + 1].
        lengths: Tokens of each row, the new ones among them, [B].
        block_table: The pool's blocks of each row, [B, blocks].
        block_size: Tokens of a block.
        token_count: Tokens of the batch, padding left out.
    """

    starts: torch.Tensor
    lengths: torch.Tensor
    block_table: torch.Tensor
    block_size: int
    token_count: int

    def newest_blocks(self) -> list[tuple[int, int]]:
        """The block of each row's newest token, and where its first new token is."""
        starts = self.starts.tolist()
        last = (self.lengths.long() - 1).clamp(min=0) // self.block_size
        blocks = self.block_table.gather(1, last[:, None].to(self.block_table.device))
        return [
            (block, start)
            for block, start, end in zip(blocks[:, 0].tolist(), starts, starts[1:], strict=False)
            if end > start
        ]


class SpillwayMetadataBuilder(AttentionMetadataBuilder[SpillwayMetadata]):
    """Takes over what is needed of vLLM's description of a batch."""

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> SpillwayMetadata:
        """Describes a batch."""
        common = common_attn_metadata
        return SpillwayMetadata(
            starts=common.query_start_loc_cpu[: common.num_reqs + 1],
            lengths=common.seq_lens[: common.num_reqs],
            block_table=common.block_table_tensor[: common.num_reqs],
            block_size=self.kv_cache_spec.block_size,
            token_count=common.num_actual_tokens,
        )


class SpillwayImpl(AttentionImpl[SpillwayMetadata]):
    """Attends at one layer."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
        **others: Any,
    ) -> None:
        """Checks what the layer is.

        Raises:
            ValueError: It is of a kind that Spillway does not serve.
        """
        refused = {
            "ALiBi": alibi_slopes is not None,
            f"a sliding window of {sliding_window} tokens": sliding_window is not None,
            f"a soft cap of {logits_soft_cap} on its logits": bool(logits_soft_cap),
            "learned attention sinks": sinks is not None,
            "K/V of another layer": kv_sharing_target_layer_name is not None,
            f"attention of the kind {attn_type}": attn_type != AttentionType.DECODER,
            **{name: value is not None and value is not False for name, value in others.items()},
        }
        for what, is_so in refused.items():
            if is_so:
                raise ValueError(f"spillway-vllm cannot serve this: a layer has {what}")
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: SpillwayMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Appends the new tokens' K/V and attends.

        Args:
            layer: vLLM's layer.
            query: Queries [N, H_q, d] after the positional encoding.
            key: Keys [N, H_kv, d].
            value: Values, the same shape.
            kv_cache: vLLM's pool, which is not used.
            attn_metadata: The batch; None while vLLM measures memory.
            output: Is written, [N, H_q, d].
            output_scale: Must be None.
            output_block_scale: Must be None.
        """
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("quantised outputs of attention are not served")
        attending = layers.attending()
        if attn_metadata is None or attending is None:
            return output.zero_()
        count = attn_metadata.token_count
        attending.attend(
            layer.layer_name,
            attn_metadata,
            query[:count],
            key[:count],
            value[:count],
            output[:count],
        )
        return output
