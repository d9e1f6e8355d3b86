"""The attention backend: layers with full attention use Spillway."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from vllm.config import VllmConfig, get_current_vllm_config_or_none
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
)
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    SlidingWindowSpec,
)

from spillway_kv.vllm import graphs, layers, memory


class SpillwayBackend(AttentionBackend):
    """K/V in host memory or in a daemon. vLLM's pool only has a window of the newest tokens."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [
        torch.float16,
        torch.bfloat16,
        torch.float32,
    ]

    @staticmethod
    def get_name() -> str:
        """Returns the name for `--attention-backend`."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[SpillwayImpl]:
        """Returns the class that attends."""
        return SpillwayImpl

    @staticmethod
    def get_builder_cls() -> type[SpillwayMetadataBuilder]:
        """Returns the class that describes a batch."""
        return SpillwayMetadataBuilder

    @classmethod
    def supports_sink(cls) -> bool:
        """Returns whether layers may have learned sinks."""
        return True

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """Replaces full attention by a window of the newest tokens, for vLLM's pool."""
        if not isinstance(spec, FullAttentionSpec):
            return spec
        window = SlidingWindowSpec(
            block_size=spec.block_size,
            num_kv_heads=spec.num_kv_heads,
            head_size=spec.head_size,
            dtype=spec.dtype,
            sliding_window=memory.WINDOW_TOKEN_COUNT,
        )
        if not layers.pool_is_thin():
            return window
        # Nothing reads these pages.
        return replace(window, num_head_slots=1, state_content_bytes=memory.THIN_BYTES)


@dataclass
class SpillwayMetadata(AttentionMetadata):
    """Which tokens of the batch belong to which row (request).

    Attributes:
        starts: Position in the batch of each row's first token, and the end of the last, [B + 1].
        lengths: Number of tokens of each row, including the new ones, [B].
        block_table: Blocks of each row in the pool, [B, blocks].
        block_size: Number of tokens of a block.
        token_count: Number of tokens of the batch, without padding.
    """

    starts: torch.Tensor
    lengths: torch.Tensor
    block_table: torch.Tensor
    block_size: int
    token_count: int

    def newest_blocks(self) -> list[tuple[int, int]]:
        """Returns (block of the newest token, position of the first new one) of each active row."""
        starts = self.starts.tolist()
        last = (self.lengths.long() - 1).clamp(min=0) // self.block_size
        blocks = self.block_table.gather(1, last[:, None].to(self.block_table.device))
        return [
            (block, start)
            for block, start, end in zip(blocks[:, 0].tolist(), starts, starts[1:], strict=False)
            if end > start
        ]


class SpillwayMetadataBuilder(AttentionMetadataBuilder[SpillwayMetadata]):
    """Selects the needed parts of vLLM's description of a batch."""

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    @classmethod
    def get_cudagraph_support(
        cls, vllm_config: VllmConfig, kv_cache_spec: KVCacheSpec
    ) -> AttentionCGSupport:
        """Returns which batches can be captured with the model around them."""
        if not graphs.supported(vllm_config):
            return AttentionCGSupport.NEVER
        graphs.install()
        return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

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
        """Checks that the layer is supported.

        Raises:
            ValueError: Spillway does not support this kind of layer.
        """
        refused = {
            "ALiBi": alibi_slopes is not None,
            f"a sliding window of {sliding_window} tokens": sliding_window is not None,
            f"a soft cap of {logits_soft_cap} on its logits": bool(logits_soft_cap),
            "K/V of another layer": kv_sharing_target_layer_name is not None,
            f"attention of the kind {attn_type}": attn_type != AttentionType.DECODER,
            **{name: value is not None and value is not False for name, value in others.items()},
        }
        for what, is_so in refused.items():
            if is_so:
                raise ValueError(f"Spillway cannot serve this: a layer has {what}")
        config = get_current_vllm_config_or_none()
        layers.set_pool_is_thin(config is not None and memory.is_thin(config))
        memory.note_available()
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        # Among the model's weights, which are loaded later.
        self.sinks = sinks

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Called when weights are loaded, also while the model is served."""
        attending = layers.attending()
        if attending is not None and self.sinks is not None:
            attending.note_new_weights()

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
            value: Values, with the same shape.
            kv_cache: vLLM's pool, which is not used.
            attn_metadata: The batch. None while vLLM measures memory.
            output: Written, [N, H_q, d].
            output_scale: Must be None.
            output_block_scale: Must be None.
        """
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("quantised outputs of attention are not served")
        attending = layers.attending()
        if attn_metadata is None or attending is None:
            if attending is None:
                # vLLM measures memory, and thus what an attend takes besides its output.
                memory.take_for_attend(query)
            return output.zero_()
        graph = layers.capturing()
        if graph is not None:
            graph.leave_open(attending.number(layer.layer_name), query, key, value, output)
            return output
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
