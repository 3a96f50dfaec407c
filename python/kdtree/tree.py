"""Draft trees: `build_ddtree`, `tree_links` for trees built elsewhere, `expand_mask`."""

from __future__ import annotations

from typing import Any, Literal

from kdtree._lib import Array, Stream, core, record
from kdtree.records import Tree

__all__ = ["build_ddtree", "expand_mask", "tree_links"]


def build_ddtree(
    logprobs: Array,
    ids: Array,
    root_tokens: Array,
    prefix_lens: Array,
    *,
    budget: int = 64,
    chain_seed: bool = False,
    node_cost: Array | None = None,
    base_cost: float | None = None,
    out: Tree | None = None,
    stream: Stream = None,
) -> Tree:
    """Best-first draft trees of at most `budget` nodes; Q = budget + 1 slots, slot 0 the root.

    The rule is DDTree's, to the bit: nodes are prefixes of rank tuples; a node's score is the sum
    of its log-probs, in float64, accumulated step by step from its heap parent (sibling =
    w - lp[d,r] + lp[d,r+1], child = w + lp[d+1,0]). Pop order: larger score; on equal scores the
    lexicographically smaller rank tuple, a prefix before its extension. Slots are in pop order.
    The first -inf or NaN candidate of a row ends it.

    Args:
        logprobs: float32 [B,L,K], L >= 0, K 1..64, each row descending, K dense.
        ids: int32 or int64 [B,L,K], K dense.
        root_tokens: int32 or int64 [B], the last emitted token; negative marks a padding
            request, whose num_nodes is 0.
        prefix_lens: int32 [B], tokens before the root.
        budget: most nodes without the root, 0..64.
        chain_seed: for weak drafters: the top-1 chain takes the first min(L, budget) slots, in
            depth order; the rest is best-first over what remains.
        node_cost: float32 [Q]; with base_cost, stops each tree where it pays best: with n nodes
            (root excluded) the value is (1 + sum of e^score) / (base_cost + node_cost[n]), in
            float64, and the next node is taken while that makes the value larger. The chain of
            chain_seed is taken first, the rule starts after it.
        base_cost: cost of a pass with no node, in the units of node_cost.
        out: the result's arrays, contiguous, every field of Tree.
        stream: see `kdtree`.

    Returns:
        Tree, every field filled.

    Raises:
        ValueError, TypeError: naming the argument, before anything is launched.
    """
    if out is not None:
        record("out", out, Tree)
    fields = core.build_ddtree(
        logprobs,
        ids,
        root_tokens,
        prefix_lens,
        budget,
        chain_seed,
        node_cost,
        base_cost,
        out,
        stream,
    )
    return Tree(*fields) if out is None else out


def tree_links(
    parents: Array,
    num_nodes: Array,
    *,
    prefix_lens: Array | None = None,
    draft_tokens: Array | None = None,
    out: Tree | None = None,
    stream: Stream = None,
) -> Tree:
    """What follows from parents alone, for trees built elsewhere (EAGLE, MTP, n-gram).

    A slot whose parent is out of range, at or above itself, or itself broken, is broken:
    visibility 0, depth 0, links -1, nobody's child. So a cycle or an orphan ends as "not visible".

    Args:
        parents: int32 [B,Q], slot of the parent; -1 for the root and unused slots; Q dense.
        num_nodes: int32 [B], used slots, root included.
        prefix_lens: int32 [B]; without it, positions are depths.
        draft_tokens: int32 or int64 [B,Q], carried over to the result as it is.
        out: Tree whose depths int32, positions, next_token, next_sibling and visibility int64,
            all [B,Q] and contiguous, are filled; its other fields become the inputs.
        stream: see `kdtree`.

    Returns:
        Tree: depths, positions, next_token, next_sibling and visibility computed; parents,
        num_nodes and draft_tokens the arrays given; scores None.

    Raises:
        ValueError, TypeError: naming the argument, before anything is launched.
    """
    if out is not None:
        record("out", out, Tree)
    depths, positions, next_token, next_sibling, visibility = core.tree_links(
        parents, num_nodes, prefix_lens, draft_tokens, out, stream
    )
    tree = Tree() if out is None else out
    tree.depths, tree.positions, tree.visibility = depths, positions, visibility
    tree.next_token, tree.next_sibling = next_token, next_sibling
    tree.parents, tree.num_nodes, tree.draft_tokens = parents, num_nodes, draft_tokens
    tree.scores = None
    return tree


def expand_mask(
    tree: Tree,
    layout: Literal["qlen", "full", "packed32"],
    *,
    prefix_lens: Array | None = None,
    out: Array | None = None,
    stream: Stream = None,
) -> Any:
    """The visibility words as a mask of another engine's layout. True, or a set bit: is seen.

    An unused row sees the prefix and the root.

    Args:
        tree: of which visibility and num_nodes are read.
        layout: "qlen": bool [B,Q,Q]. "full": flat bool, per request Q x (prefix + Q), one after
            the other. "packed32": int32 [B,Q,ceil(Q/32)], bit j = column j, low bit first.
        prefix_lens: int32 [B], needed for "full".
        out: the result, contiguous. Needed for "full" on CUDA, where only the caller knows the
            size; there, what is past the last request is set to False.
        stream: see `kdtree`.

    Raises:
        ValueError, TypeError: naming the argument, before anything is launched.
    """
    record("tree", tree, Tree)
    return core.expand_mask(tree.visibility, tree.num_nodes, layout, prefix_lens, out, stream)
