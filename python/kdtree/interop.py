"""Trees, masks and caches of other engines, as torch tensors: SGLang, TensorRT-LLM, FlashInfer.

Everything here is a few torch operations on the tensors' device, without a sync, a host read or a
size that depends on data: it runs inside CUDA graphs and, `fused_cache` apart, under torch.compile.
"""

from __future__ import annotations

from typing import Literal

import torch

import kdtree.torch_ops  # noqa: F401  torch.compile traces through its ops
from kdtree._lib import core
from kdtree.records import Accept, Tree

__all__ = [
    "fused_cache",
    "parents_of",
    "read_mask",
    "sglang_accept",
    "sglang_mask",
    "sglang_retrieve",
    "sglang_tree",
    "tree_of",
    "visibility_of",
]

Tensor = torch.Tensor

ROPE_DIM, LATENT_DIM = 64, 512


# ---- masks: bool [B,Q,Q] in the middle, row = slot, column = the slot that it sees


def read_mask(
    mask: Tensor,
    layout: Literal["qlen", "full", "bits", "packed32"],
    qlen: int,
    *,
    batch: int | None = None,
    prefix_lens: Tensor | None = None,
) -> Tensor:
    """A mask of another engine as bool [B,Q,Q].

    Args:
        mask: in its `layout`, flat or not; what it holds past the last request is not looked at.
            "qlen": bool or uint8, B x Q x Q (SGLang's QLEN_ONLY). "full": bool or uint8, one
            request after the other, Q x (prefix + Q) each (SGLang's FULL_MASK, FlashInfer's custom
            mask). "bits": uint8, uint16 or uint32, one word a slot, Q at most as wide (SGLang's
            QLEN_ONLY_BITPACKING). "packed32": int32, B x Q x ceil(Q/32) (TensorRT-LLM). Bit j is
            column j, low bit first.
        qlen: Q.
        batch: B; needed where the mask may be longer, and for "full" taken from prefix_lens.
        prefix_lens: int32 or int64 [B], for "full". How long the mask must be only the device
            knows then: what it lacks is read as False.
    """
    if not 1 <= qlen <= core.MAX_QLEN:
        raise ValueError(f"qlen: expected 1..{core.MAX_QLEN}, got {qlen}")
    flat = mask.reshape(-1)
    if layout in ("qlen", "full") and mask.dtype not in (torch.bool, torch.uint8):
        raise TypeError(f"mask: expected dtype bool or uint8, got {mask.dtype}")
    if layout == "full":
        if prefix_lens is None:
            raise ValueError("prefix_lens: expected an array [B] for layout 'full', got None")
        if prefix_lens.ndim != 1 or batch not in (None, len(prefix_lens)):
            raise ValueError(
                f"prefix_lens: expected shape [{'B' if batch is None else batch}], "
                f"got {list(prefix_lens.shape)}"
            )
        if flat.shape[0] < len(prefix_lens) * qlen * qlen:
            raise ValueError(
                f"mask: expected at least {len(prefix_lens)} x {qlen} x {qlen} elements, "
                f"got {list(mask.shape)}"
            )
        return _read_full(flat, qlen, prefix_lens)
    if layout == "qlen":
        rows = _rows(flat, qlen * qlen, batch, mask)
        return rows.reshape(-1, qlen, qlen) != 0
    if layout == "bits":
        words = _rows(flat, qlen, batch, mask).view(-1, qlen, 1)
        width = 8 * words.element_size()
        if words.dtype not in (torch.uint8, torch.uint16, torch.uint32) or qlen > width:
            raise ValueError(
                f"mask: expected unsigned words of at least {qlen} bits, got {words.dtype}"
            )
    elif layout == "packed32":
        if mask.dtype != torch.int32:
            raise TypeError(f"mask: expected dtype int32, got {mask.dtype}")
        count, width = -(-qlen // 32), 32
        words = _rows(flat, qlen * count, batch, mask).view(-1, qlen, count)
    else:
        raise ValueError(f"layout: expected 'qlen', 'full', 'bits' or 'packed32', got {layout!r}")
    bits = words.long()[..., None] >> torch.arange(width, device=mask.device) & 1
    return bits.flatten(2)[..., :qlen] != 0


def _rows(flat: Tensor, size: int, batch: int | None, mask: Tensor) -> Tensor:
    """`batch` times `size` elements, or all of them."""
    count = flat.shape[0] // size if batch is None else batch
    exact = batch is not None or count * size == flat.shape[0]
    if not exact or not 0 <= count * size <= flat.shape[0]:
        expected = f"{count} x {size}" if batch is not None else f"a multiple of {size}"
        raise ValueError(f"mask: expected {expected} elements, got {list(mask.shape)}")
    return flat[: count * size]


def _read_full(flat: Tensor, qlen: int, prefix_lens: Tensor) -> Tensor:
    prefix = prefix_lens.long()
    wide = prefix + qlen  # columns of each request
    start = qlen * (wide.cumsum(0) - wide) + prefix
    slots = torch.arange(qlen, device=flat.device)
    at = start[:, None, None] + slots[:, None] * wide[:, None, None] + slots
    near = at.clamp(0, max(flat.shape[0] - 1, 0))
    return (flat[near] != 0) & (near == at)


def _square(mask: Tensor) -> None:
    if mask.dtype != torch.bool:
        raise TypeError(f"mask: expected dtype bool, got {mask.dtype}")
    if mask.ndim != 3 or mask.shape[1] != mask.shape[2] or not 1 <= mask.shape[2] <= core.MAX_QLEN:
        raise ValueError(
            f"mask: expected shape [B, Q, Q], Q of 1..{core.MAX_QLEN}, got {list(mask.shape)}"
        )


def visibility_of(mask: Tensor, out: Tensor | None = None) -> Tensor:
    """The ancestor words (`Tree.visibility`) of a mask bool [B,Q,Q]; `out` is int64 [B,Q]."""
    _square(mask)
    if out is not None and (out.dtype != torch.int64 or out.shape != mask.shape[:2]):
        raise ValueError(
            f"out: expected int64 {list(mask.shape[:2])}, got {out.dtype} {list(out.shape)}"
        )
    bits = mask[..., 1:].long() << torch.arange(mask.shape[-1] - 1, device=mask.device)
    # Distinct bits: their sum is their union, bit 63 (the sign) included.
    return bits.sum(-1) if out is None else torch.sum(bits, -1, out=out)


def parents_of(mask: Tensor, num_nodes: Tensor | None = None) -> Tensor:
    """int32 [B,Q]: each slot's last ancestor, for slots in an order of parents before children."""
    _square(mask)
    if num_nodes is not None and num_nodes.shape != mask.shape[:1]:
        raise ValueError(
            f"num_nodes: expected shape {list(mask.shape[:1])}, got {list(num_nodes.shape)}"
        )
    slots = torch.arange(mask.shape[-1], device=mask.device)
    before = mask & (slots < slots[:, None])
    before[..., 1:, 0] = True  # the root is everybody's
    parents = torch.where(before, slots, -1).amax(-1)
    if num_nodes is not None:
        parents = torch.where(slots < num_nodes[:, None], parents, -1)
    return parents.to(torch.int32)


def tree_of(
    mask: Tensor,
    *,
    num_nodes: Tensor | None = None,
    prefix_lens: Tensor | None = None,
    draft_tokens: Tensor | None = None,
) -> Tree:
    """A whole Tree of a mask bool [B,Q,Q]: what `tree_links` makes of its parents."""
    if num_nodes is None:
        num_nodes = mask.new_full((mask.shape[0],), mask.shape[-1], dtype=torch.int32)
    parents = parents_of(mask, num_nodes)
    depths, positions, next_token, next_sibling, visibility = torch.ops.kdtree.tree_links(
        parents, num_nodes, prefix_lens
    )
    return Tree(
        draft_tokens=draft_tokens,
        parents=parents,
        depths=depths,
        positions=positions,
        next_token=next_token,
        next_sibling=next_sibling,
        visibility=visibility,
        num_nodes=num_nodes,
    )


# ---- SGLang


def sglang_retrieve(tree: Tree, *, local: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """(retrieve_index, retrieve_next_token, retrieve_next_sibling), all int64 [B,Q].

    The index counts slots through the whole batch, as SGLang's verify takes it; with `local`,
    within the request. The two others are local in both, and are the tree's own tensors.
    """
    batch, qlen = tree.next_token.shape
    index = torch.arange(qlen, device=tree.next_token.device).repeat(batch, 1)
    if not local:
        index += qlen * torch.arange(batch, device=index.device)[:, None]
    return index, tree.next_token, tree.next_sibling


def sglang_tree(
    draft_tokens: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    *,
    num_nodes: Tensor | None = None,
) -> Tree:
    """What `tree_accept` reads, from the tensors of SGLang's EagleVerifyInput; nothing is copied.

    draft_tokens is [B,Q] or flat.
    """
    batch, qlen = retrieve_next_token.shape
    if num_nodes is None:
        num_nodes = torch.full((batch,), qlen, dtype=torch.int32, device=retrieve_next_token.device)
    return Tree(
        draft_tokens=draft_tokens.view(batch, qlen),
        next_token=retrieve_next_token,
        next_sibling=retrieve_next_sibling,
        num_nodes=num_nodes,
    )


def sglang_accept(
    tree: Tree, target_predict: Tensor, *, depth: int | None = None
) -> tuple[Tensor, Tensor, Tensor, Accept]:
    """(predict, accept_index, accept_token_num, accept) of SGLang's greedy verify.

    predict is int32 [B * Q]: the target's token after each accepted slot, 0 elsewhere;
    accept_index int32 [B, depth]: those slots through the whole batch, -1 beyond. `depth` is the
    longest path with the root, spec_steps + 1; default Q.
    """
    accept = Accept(
        *torch.ops.kdtree.tree_accept(
            tree.draft_tokens, tree.next_token, tree.next_sibling, tree.num_nodes, target_predict
        )
    )
    batch, qlen = target_predict.shape
    slots = accept.accept_index
    taken = slots >= 0
    offset = qlen * torch.arange(batch, device=slots.device, dtype=torch.int32)[:, None]
    index = torch.where(taken, slots + offset, -1)
    # One place past the end takes what is not accepted.
    predict = torch.zeros(batch * qlen + 1, dtype=torch.int32, device=slots.device)
    place = torch.where(taken, index, batch * qlen).long().flatten()
    predict.scatter_(0, place, accept.accept_tokens.to(torch.int32).flatten())
    return predict[:-1], index[:, :depth], accept.accept_token_num, accept


def sglang_mask(tree: Tree) -> Tensor:
    """SGLang's QLEN_ONLY_BITPACKING words of a tree of at most 32 slots, flat [B * Q].

    uint8, uint16 or uint32, as wide as Q needs. `expand_mask` makes its two other layouts.
    """
    qlen = tree.visibility.shape[1]
    if qlen > 32:
        raise ValueError(f"tree: expected Q of 1..32, which a word holds, got {qlen}")
    words: Tensor = (tree.visibility << 1 | 1).flatten()
    dtype = torch.uint8 if qlen <= 8 else torch.uint16 if qlen <= 16 else torch.uint32
    return words.to(dtype)


# ---- FlashInfer


def fused_cache(ckv: Tensor, kpe: Tensor) -> Tensor:
    """The cache [pages, page_size, 576] whose two parts are ckv [..., 512] and kpe [..., 64].

    FlashInfer's MLA takes the parts one by one. Where they are views of one allocation, side by
    side in each row, this is that allocation again, without a copy.
    """
    for name, part, size in (("ckv", ckv, LATENT_DIM), ("kpe", kpe, ROPE_DIM)):
        if part.ndim != 3 or part.shape[-1] != size:
            raise ValueError(
                f"{name}: expected shape [pages, page_size, {size}], got {list(part.shape)}"
            )
    same = ckv.dtype == kpe.dtype and ckv.device == kpe.device and ckv.shape[:2] == kpe.shape[:2]
    if not same:
        raise ValueError(
            f"kpe: expected the pages, dtype and device of ckv, {list(ckv.shape[:2])} "
            f"{ckv.dtype} {ckv.device}, got {list(kpe.shape[:2])} {kpe.dtype} {kpe.device}"
        )
    together = (
        ckv.untyped_storage().data_ptr() == kpe.untyped_storage().data_ptr()
        and ckv.stride() == kpe.stride()
        and ckv.stride(-1) == 1
        and kpe.storage_offset() == ckv.storage_offset() + LATENT_DIM
    )
    if not together:
        raise ValueError(
            "kpe: expected the 64 columns after ckv's 512 in the same rows of one cache "
            "(ckv = cache[..., :512], kpe = cache[..., 512:]), got a cache of its own; "
            "verify_attn reads rows of 576 and copies none: allocate the two parts as one"
        )
    return ckv.as_strided((*ckv.shape[:2], LATENT_DIM + ROPE_DIM), ckv.stride())
