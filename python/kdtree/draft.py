"""From drafter logits to candidates: `draft_topk`, and `merge_topk` for vocabulary shards."""

from __future__ import annotations

from kdtree._lib import Array, Stream, core, record
from kdtree.records import DraftTopK

__all__ = ["draft_topk", "merge_topk"]


def draft_topk(
    logits: Array,
    k: int,
    *,
    vocab_start: int = 0,
    vocab_size: int | None = None,
    normalize: bool = True,
    root_tokens: Array | None = None,
    out: DraftTopK | None = None,
    stream: Stream = None,
) -> DraftTopK:
    """Top-k candidates of each row of logits, best first, and the row's log-sum-exp.

    Descending; equal logits: smallest id first; NaN counts as -inf. The order is exact, so that
    ranks of a tensor-parallel group agree.

    Args:
        logits: bfloat16, float16 or float32 [..., V], the vocabulary dense; up to 6 leading
            dimensions of any stride.
        k: candidates per row, 1..64 and at most V.
        vocab_start: id of column 0, for a shard of the vocabulary.
        vocab_size: size of the whole vocabulary, for a shard too. Columns with
            vocab_start + column >= vocab_size are padding and never chosen.
        normalize: log-probs (logit - lse). False leaves raw logits, for `merge_topk`.
        root_tokens: int32 or int64 [B], for logits of [B, ..., V]: a request whose root token is
            negative is padding, a captured graph's spare row. What its logits are does not matter,
            and 4 live requests of 64 take little longer than 4 of 4.
        out: the result's arrays, contiguous: logprobs float32 [..., k], ids int64 [..., k],
            lse float32 [...].
        stream: see `kdtree`.

    Returns:
        DraftTopK. With fewer than k real columns the rest is -inf with id -1. A row of -inf has
        lse -inf. A padding row has log-probs and lse -inf, and ids of -1.

    Raises:
        ValueError, TypeError: naming the argument, before anything is launched.
    """
    if out is not None:
        record("out", out, DraftTopK)
    logprobs, ids, lse = core.draft_topk(
        logits,
        k,
        vocab_start,
        vocab_size,
        normalize,
        root_tokens,
        out,
        stream,
    )
    return DraftTopK(logprobs, ids, lse) if out is None else out


def merge_topk(
    values: Array,
    ids: Array,
    lse: Array,
    *,
    out: DraftTopK | None = None,
    stream: Stream = None,
) -> DraftTopK:
    """One top-K from those of S vocabulary shards, equal to the unsharded one in every id.

    Args:
        values: float32 [S, ..., K], the shards' `draft_topk(..., normalize=False)` stacked.
        ids: int32 or int64 [S, ..., K]; -1 marks an empty place.
        lse: float32 [S, ...].
        out: the result's arrays, contiguous: logprobs float32 [..., K], ids int64 [..., K],
            lse float32 [...].
        stream: see `kdtree`.

    Returns:
        DraftTopK, normalized.

    Raises:
        ValueError, TypeError: naming the argument, before anything is launched.
    """
    if out is not None:
        record("out", out, DraftTopK)
    logprobs, merged, total = core.merge_topk(
        values,
        ids,
        lse,
        out,
        stream,
    )
    return DraftTopK(logprobs, merged, total) if out is None else out
