"""`verify_attn`: MLA-absorbed attention over a paged prefix and an ancestor-masked tree."""

from __future__ import annotations

from typing import Any, Literal, overload

from kdtree._lib import Array, ArrayT, Stream, core, parse_device

__all__ = ["verify_attn", "verify_attn_workspace"]


@overload
def verify_attn(
    q: ArrayT,
    kv_cache: Array,
    block_table: Array | None,
    prefix_lens: Array,
    visibility: Array | None = None,
    *,
    num_nodes: Array | None = None,
    sm_scale: float,
    q_rope: Array | None = None,
    kv_scale: float | Array | None = None,
    kv_split: int | None = None,
    kv_indptr: Array | None = None,
    kv_indices: Array | None = None,
    out: Array | None = None,
    lse: Array | None = None,
    return_lse: Literal[False] = False,
    workspace: Array | None = None,
    stream: Stream = None,
) -> ArrayT: ...


@overload
def verify_attn(
    q: ArrayT,
    kv_cache: Array,
    block_table: Array | None,
    prefix_lens: Array,
    visibility: Array | None = None,
    *,
    num_nodes: Array | None = None,
    sm_scale: float,
    q_rope: Array | None = None,
    kv_scale: float | Array | None = None,
    kv_split: int | None = None,
    kv_indptr: Array | None = None,
    kv_indices: Array | None = None,
    out: Array | None = None,
    lse: Array | None = None,
    return_lse: Literal[True],
    workspace: Array | None = None,
    stream: Stream = None,
) -> tuple[ArrayT, ArrayT]: ...


def verify_attn(
    q: Any,
    kv_cache: Array,
    block_table: Array | None,
    prefix_lens: Array,
    visibility: Array | None = None,
    *,
    num_nodes: Array | None = None,
    sm_scale: float,
    q_rope: Array | None = None,
    kv_scale: float | Array | None = None,
    kv_split: int | None = None,
    kv_indptr: Array | None = None,
    kv_indices: Array | None = None,
    out: Array | None = None,
    lse: Array | None = None,
    return_lse: bool = False,
    workspace: Array | None = None,
    stream: Stream = None,
) -> Any:
    """softmax(sm_scale * q k^T + mask) v, with k the whole 576-wide cache row and v its first 512.

    The absorbed form of DeepSeek's MLA: one latent key/value head for all query heads. Slot s of
    the tree has its key in the cache at position prefix_lens[b] + s. Every slot sees the whole
    prefix, the root, and the nodes of its visibility word. What no slot sees is not read: it
    may hold NaN. Deterministic: same input, same bits.

    Args:
        q: bfloat16 or float16 [B,Q,H,576], H 1..128, Q 1..65; with q_rope [B,Q,H,512]. Base and
            strides in multiples of 16 bytes, innermost dense.
        kv_cache: q's dtype or float8_e4m3fn, [pages, page_size, 576] or
            [pages, page_size, 1, 576]; page_size a power of two from 1 to 128. Base and strides
            as q's.
        block_table: int32 [B,M], page of each page_size positions; None with kv_indptr.
        prefix_lens: int32 [B], positions before the root.
        visibility: int64 [B,Q], as `Tree.visibility`; bits at num_nodes or above are ignored.
            None: causal, slot s sees slots 0..s (a chain, or plain decoding at Q 1).
        num_nodes: int32 [B], used slots; default all Q. 0 marks a padding request: output 0, lse
            -inf, nothing of it is read. Rows of unused slots are written, finite.
        sm_scale: scale of the scores, such as 192 ** -0.5.
        q_rope: q's dtype [B,Q,H,64], for engines that keep the two parts apart.
        kv_scale: what the cache's numbers are multiplied by: a float or a float32 array of one
            element. Default 1.
        kv_split: a multiple of 64: pins the length of the splits of the keys, so that a request's
            bits depend on neither its neighbours nor the batch size. Default: chosen for speed.
        kv_indptr: int32 [B+1], with kv_indices and page_size 1: request b's prefix rows and then
            its Q tree rows are kv_indices[kv_indptr[b]:kv_indptr[b+1]].
        kv_indices: int32 or int64, cache rows.
        out: q's dtype [B,Q,H,512], contiguous.
        lse: float32 [B,Q,H], contiguous, filled with the natural log-sum-exp of the scores.
        return_lse: also return lse.
        workspace: uint8, at least `verify_attn_workspace` bytes; default: allocated.
        stream: see `kdtree`.

    Returns:
        out, or (out, lse) with return_lse.

    Raises:
        ValueError, TypeError: naming the argument, before anything is launched.
    """
    return core.verify_attn(
        q,
        kv_cache,
        block_table,
        prefix_lens,
        visibility,
        num_nodes,
        sm_scale,
        q_rope,
        kv_scale,
        kv_split,
        kv_indptr,
        kv_indices,
        out,
        lse,
        return_lse,
        workspace,
        stream,
    )


def verify_attn_workspace(B: int, Q: int, H: int, device: Any) -> int:
    """Bytes of uint8 that `verify_attn(workspace=)` needs at most, for every length and kv_split.

    Args:
        B: requests. Q: tree slots, 1..65. H: heads, 1..128.
        device: a torch.device, "cpu" or "cuda:N".

    Raises:
        ValueError, TypeError: naming the argument.
    """
    return core.verify_attn_workspace(B, Q, H, *parse_device(device))
