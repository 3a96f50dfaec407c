"""The walk along the target's own tokens: `tree_accept` and `tree_accept_logits`."""

from __future__ import annotations

from kdtree._lib import Array, Stream, core, record
from kdtree.records import Accept, Tree

__all__ = ["tree_accept", "tree_accept_logits"]


def tree_accept(
    tree: Tree,
    target_predict: Array,
    *,
    out: Accept | None = None,
    stream: Stream = None,
) -> Accept:
    """Walk each tree along the target's tokens; emit the accepted ones and the bonus.

    From the root: the child whose token equals target_predict at the current slot, lowest slot on
    duplicates, until there is none.

    Args:
        tree: of which draft_tokens, next_token and next_sibling (int32 or int64 [B,Q]) and
            num_nodes (int32 [B]) are read. Links that do not ascend count as none, so any array
            ends the walk.
        target_predict: int32 or int64 [B,Q], the target's token after each slot; Q dense.
        out: the result's arrays, contiguous.
        stream: see `kdtree`.

    Returns:
        Accept. With n = accept_token_num[b]: accept_tokens[b,:n+1] are the new tokens, the last
        one the bonus; accept_index[b,:n+1] the slots walked, the root first; both -1 beyond.
        A padding request has n = 0 and all -1.

    Raises:
        ValueError, TypeError: naming the argument, before anything is launched.
    """
    record("tree", tree, Tree)
    if out is not None:
        record("out", out, Accept)
    fields = core.tree_accept(
        tree.draft_tokens,
        tree.next_token,
        tree.next_sibling,
        tree.num_nodes,
        target_predict,
        out,
        stream,
    )
    return Accept(*fields) if out is None else out


def tree_accept_logits(
    tree: Tree,
    logits: Array,
    *,
    temperature: float | Array | None = None,
    seeds: Array | None = None,
    vocab_size: int | None = None,
    out: Accept | None = None,
    stream: Stream = None,
) -> Accept:
    """The walk of `tree_accept` straight from the target's logits, reading only visited rows.

    Temperature 0 takes the argmax: lowest id on ties, NaN as -inf. Above 0, the target is sampled
    at every visited slot, which is lossless since the tree was fixed before sampling. The sample
    is the argmax of logit / temperature + Gumbel noise, with noise from a counter-based generator
    (Philox4x32-10; Salmon et al., 2011) keyed by the seed and counted by the slot's position and
    the token id: same seed, same tokens, in any batch slot, and in a tree as in plain decoding.
    A request may therefore keep one seed for its whole text.

    Args:
        tree: as for `tree_accept`; positions (int64 [B,Q]) count the noise, or, where None, the
            depth in the walk does: then give every round a seed of its own.
        logits: bfloat16, float16 or float32 [B,Q,V], the vocabulary dense.
        temperature: a float or float32 [B]; None is 0. Negative or NaN entries of an array
            count as 0, and so does a temperature below 1e-6.
        seeds: int64 [B]; needed with a temperature.
        vocab_size: columns at or above it are padding and never chosen.
        out: the result's arrays, contiguous.
        stream: see `kdtree`.

    Returns:
        Accept, as `tree_accept`. A row without a finite logit gives token -1 and ends the walk.

    Raises:
        ValueError, TypeError: naming the argument, before anything is launched.
    """
    record("tree", tree, Tree)
    if out is not None:
        record("out", out, Accept)
    fields = core.tree_accept_logits(
        tree.draft_tokens,
        tree.next_token,
        tree.next_sibling,
        tree.num_nodes,
        tree.positions,
        logits,
        temperature,
        seeds,
        vocab_size,
        out,
        stream,
    )
    return Accept(*fields) if out is None else out
