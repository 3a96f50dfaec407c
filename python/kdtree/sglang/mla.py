"""The attention backend `kdtree_mla`: SGLang's decoding and tree verification on `verify_attn`.

A batch's metadata are three arrays, made on the device by operations that a CUDA graph records:
the page table (request rows of SGLang's req_to_token, every page_size-th token id), the lengths
before the root, and for trees the ancestor words, from the mask that the draft stage wrote. They
are made once a forward and read by every layer.
"""

from __future__ import annotations

# pyright: reportMissingImports=false
import logging
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.attention.verify_mask import VerifyMask
from sglang.srt.mem_cache.memory_pool import KVWriteLoc, MLATokenToKVPool
from sglang.srt.runtime_context import (
    attention_backends,
    get_disagg,
    get_exec,
    get_parallel,
    get_spec,
)
from sglang.srt.speculative.eagle_utils import TreeMaskMode

import kdtree
from kdtree import interop
from kdtree.sglang import ALGORITHM, BACKEND

__all__ = ["KdtreeMLABackend", "create_backend"]

Tensor = torch.Tensor

LATENT_DIM, ROPE_DIM = interop.LATENT_DIM, interop.ROPE_DIM
DTYPES = (torch.bfloat16, torch.float16, torch.float8_e4m3fn)

logger = logging.getLogger(__name__)


def create_backend(runner: Any) -> KdtreeMLABackend:
    """What SGLang's registry calls. Raises ValueError where the server's setting is not served."""
    reason = _unsupported(runner)
    if reason is not None:
        raise ValueError(f"{BACKEND} {reason}")
    return KdtreeMLABackend(runner)


def _unsupported(runner: Any) -> str | None:
    spec = get_spec()
    pool = runner.token_to_kv_pool
    page_size = getattr(runner, "page_size", 1) or 1
    algorithm = runner.spec_algorithm
    prefill, _ = attention_backends()
    if prefill == BACKEND:
        return "does not prefill: add --prefill-attention-backend triton"
    if getattr(runner, "is_draft_worker", False):
        return "serves the target model: add --speculative-draft-attention-backend triton"
    if not runner.use_mla_backend or not isinstance(pool, MLATokenToKVPool):
        return f"serves MLA models, got a cache of {type(pool).__name__}"
    if (pool.kv_lora_rank, pool.qk_rope_head_dim) != (LATENT_DIM, ROPE_DIM) or pool.use_dsa:
        return (
            f"serves dense MLA of {LATENT_DIM} + {ROPE_DIM}, got {pool.kv_lora_rank} + "
            f"{pool.qk_rope_head_dim}{' with sparse attention' if pool.use_dsa else ''}"
        )
    if pool.dtype not in DTYPES:
        return f"serves caches of {', '.join(map(str, DTYPES))}, got {pool.dtype}"
    if page_size > 128 or page_size & (page_size - 1):
        return f"needs --page-size to be a power of two up to 128, got {page_size}"
    if get_parallel().attn_dcp_size > 1:
        return "does not serve decode context parallelism (--dcp-size 1)"
    if runner.kv_index_translator is not None and runner.kv_index_translator.reads_are_translated:
        return "does not serve the unified memory pool"
    if algorithm is None or algorithm.is_none():
        return None
    served = algorithm.is_eagle() or algorithm.is_standalone() or algorithm.is_dflash()
    if not served or algorithm.is_frozen_kv_mtp():
        return f"verifies EAGLE, EAGLE3, NEXTN, STANDALONE, DFLASH and DDTREE, got {algorithm}"
    if not 1 <= spec.speculative_num_draft_tokens <= kdtree.MAX_QLEN:
        return (
            f"needs --speculative-num-draft-tokens of 1..{kdtree.MAX_QLEN}, got "
            f"{spec.speculative_num_draft_tokens}"
        )
    if get_exec().overlap.enable_two_batch_overlap or get_disagg().enable_pdmux:
        return "verifies with one backend for the whole batch, without two-batch overlap or pdmux"
    if spec.speculative_attention_mode != "decode":
        logger.warning(
            "kdtree_mla does not verify: %s does, without --speculative-attention-mode decode",
            prefill,
        )
    return None


@dataclass
class Metadata:
    """One forward's arrays; words is None for a chain, or plain decoding."""

    qlen: int
    block_table: Tensor  # int32 [B,M]
    prefix_lens: Tensor  # int32 [B]
    words: Tensor | None  # int64 [B,Q]
    workspace: Tensor | None  # None: verify_attn allocates its own


class KdtreeMLABackend(AttentionBackend):
    needs_cpu_seq_lens = False

    def __init__(self, runner: Any) -> None:
        self.page_size = getattr(runner, "page_size", 1) or 1
        self.req_to_token = runner.req_to_token_pool.req_to_token
        self.device: torch.device = self.req_to_token.device
        self.token_to_kv_pool = runner.token_to_kv_pool
        self.kv_index_translator = runner.kv_index_translator
        self.max_context_len = runner.model_config.context_len
        self.num_heads = runner.model_config.num_attention_heads // get_parallel().attn_tp_size
        self.columns = -(-self.req_to_token.shape[1] // self.page_size)
        self.qlen = 0  # widest verification
        self._verify_mask: VerifyMask | None = None
        self._is_tree = False
        if runner.spec_algorithm is not None and not runner.spec_algorithm.is_none():
            self.qlen = get_spec().speculative_num_draft_tokens
            # DFlash verifies a chain, and so does EAGLE with one candidate a step.
            self._is_tree = runner.spec_algorithm.name == ALGORITHM or (
                not runner.spec_algorithm.is_dflash()
                and (get_spec().speculative_eagle_topk or 1) > 1
            )
            # Large enough for every batch, so that the draft stage never falls back to a mask over
            # the whole context.
            requests = runner.req_to_token_pool.size
            self._verify_mask = VerifyMask(
                buffer=torch.zeros(requests * self.qlen**2, dtype=torch.bool, device=self.device),
                mode=TreeMaskMode.QLEN_ONLY,
                max_bs=requests,
                is_read=self._is_tree,
            )
        self._buffers: Metadata | None = None  # what CUDA graphs read, of the largest batch
        self.forward_metadata: Metadata | None = None

    # -- metadata

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        widths = {1, max(self.qlen, 1)}
        self._buffers = self._allocate(max_bs, max(widths))
        # One for all graphs, which run one after the other.
        size = max(
            kdtree.verify_attn_workspace(batch, width, self.num_heads, self.device)
            for batch in range(1, max_bs + 1)
            for width in widths
        )
        self._buffers.workspace = torch.empty(size, dtype=torch.uint8, device=self.device)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1  # one token, the one being decoded; a verification has it before its root

    @property
    def verify_mask(self) -> VerifyMask | None:
        return self._verify_mask

    def update_verify_buffers_to_fill_after_draft(
        self, spec_info: Any, cuda_graph_bs: int | None
    ) -> None:
        """Nothing: the mask is read when the forward runs."""

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Chooses the arrays; on the host alone."""
        mode = forward_batch.forward_mode
        batch = forward_batch.req_pool_indices.shape[0]
        if mode.is_target_verify():
            width = getattr(forward_batch.spec_info, "draft_token_num", None) or self.qlen
        elif mode.is_decode_or_idle():
            width = 1
        else:
            raise ValueError(
                f"kdtree_mla decodes and verifies, got a forward of {mode.name}: add "
                "--prefill-attention-backend triton"
            )
        held = self._buffers
        if held is None or batch > held.prefix_lens.shape[0] or width > held.qlen:
            held = self._allocate(batch, width)
        words = None
        if mode.is_target_verify() and self._is_tree and held.words is not None:
            words = held.words.view(-1)[: batch * width].view(batch, width)
        self.forward_metadata = Metadata(
            width, held.block_table[:batch], held.prefix_lens[:batch], words, held.workspace
        )

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Fills them; on the device alone, and recorded by a CUDA graph."""
        held = self.forward_metadata
        assert held is not None
        batch = held.prefix_lens.shape[0]
        first_tokens = self.req_to_token[:, :: self.page_size]
        torch.index_select(first_tokens, 0, forward_batch.req_pool_indices, out=held.block_table)
        if self.page_size > 1:
            held.block_table >>= self.page_size.bit_length() - 1
        # A decoding step counts its own token, a verification none of its slots.
        verifies = forward_batch.forward_mode.is_target_verify()
        torch.sub(forward_batch.seq_lens, 0 if verifies else 1, out=held.prefix_lens)
        if held.words is not None:
            assert self._verify_mask is not None
            mask = interop.read_mask(self._verify_mask.buffer, "qlen", held.qlen, batch=batch)
            interop.visibility_of(mask, out=held.words)

    def _allocate(self, batch: int, qlen: int) -> Metadata:
        def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=self.device)

        words = empty(batch, qlen, dtype=torch.int64) if self._is_tree else None
        return Metadata(qlen, empty(batch, self.columns), empty(batch), words, None)

    # -- attention

    def forward_decode(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        q_rope: Tensor | None = None,
        k_rope: Tensor | None = None,
        **unknown: Any,
    ) -> Tensor:
        """q is [T,H,576], or [T,H,512] beside q_rope [T,H,64]; k likewise, of one head."""
        asked = [name for name, value in unknown.items() if value is not None]
        if asked:
            raise ValueError(f"kdtree_mla does not know what a layer asks for: {', '.join(asked)}")
        held = self.forward_metadata
        assert held is not None
        scale = 1.0 if layer.k_scale is None else layer.k_scale_float
        if save_kv_cache and k is not None:
            self._store(layer, forward_batch, k, k_rope, v)
        heads = layer.tp_q_head_num
        width = LATENT_DIM if q_rope is not None else LATENT_DIM + ROPE_DIM
        q = self._by_request(q.view(-1, heads, width))
        if q_rope is not None:
            q_rope = self._by_request(q_rope.view(-1, heads, ROPE_DIM))
        batch = q.shape[0]
        cache = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        out = q.new_empty(batch, held.qlen, heads, LATENT_DIM)
        kdtree.verify_attn(
            q,
            cache.view(-1, self.page_size, LATENT_DIM + ROPE_DIM),
            held.block_table[:batch],
            held.prefix_lens[:batch],
            None if held.words is None else held.words[:batch],
            sm_scale=layer.scaling,
            q_rope=q_rope,
            kv_scale=scale,
            out=out,
            workspace=held.workspace,
        )
        return out.view(-1, heads * LATENT_DIM)

    # Verification comes here; what else would, stopped at its metadata.
    forward_extend = forward_decode

    def _by_request(self, rows: Tensor) -> Tensor:
        """[T,H,D] as [B,Q,H,D], in place whatever its strides."""
        assert self.forward_metadata is not None
        qlen = self.forward_metadata.qlen
        step = rows.stride(0)
        return rows.as_strided(
            (rows.shape[0] // qlen, qlen, *rows.shape[1:]), (step * qlen, step, *rows.stride()[1:])
        )

    def _store(
        self, layer: Any, forward_batch: Any, k: Tensor, k_rope: Tensor | None, v: Tensor | None
    ) -> None:
        place = KVWriteLoc.for_batch(forward_batch)
        if layer.k_scale is not None:
            k = k / layer.k_scale
            k_rope = None if k_rope is None else k_rope / layer.k_scale
        if k_rope is None:
            self.token_to_kv_pool.set_kv_buffer(layer, place, k, v)
        else:
            self.token_to_kv_pool.set_mla_kv_buffer(layer, place, k, k_rope)
