"""The records that the ops of one round hand to each other.

They are plain: built by keyword from their fields, fields read by name. Each field is an array
of whichever library the caller uses (NumPy, torch, or any DLPack producer), or None where the op
at hand does not need it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["Accept", "DraftTopK", "Tree"]


@dataclass(eq=False)
class DraftTopK:
    """Top-K candidates of each row of logits, best first.

    Attributes:
        logprobs: float32 [..., K], descending; raw logits where not normalized.
        ids: int64 [..., K] token ids; -1 where there are fewer than K real columns.
        lse: float32 [...], log-sum-exp of the row.
    """

    logprobs: Any = None
    ids: Any = None
    lse: Any = None


@dataclass(eq=False)
class Tree:
    """Draft trees of a batch: B requests, Q slots each, slot 0 the root.

    The root is the last emitted token, whose KV is not yet written. 64 nodes fit one 64-bit
    ancestor word, and the root, which every node sees, needs no bit: Q is at most 65.

    Attributes:
        draft_tokens: int64 [B,Q]; 0 in unused slots.
        parents: int32 [B,Q], slot of the parent; -1 for the root and unused slots.
        depths: int32 [B,Q]; 0 for the root and in unused slots.
        positions: int64 [B,Q], prefix_lens[b] + depth.
        next_token: int64 [B,Q], first child; -1 = none.
        next_sibling: int64 [B,Q], next sibling in ascending slot order; -1 = none.
        visibility: int64 [B,Q]; bit (j-1) set: this slot sees node j (its ancestors and itself).
        scores: float32 [B,Q], sum of log-probs along the path; -inf in unused slots.
        num_nodes: int32 [B], used slots, root included; 0 marks a padding request.
    """

    draft_tokens: Any = None
    parents: Any = None
    depths: Any = None
    positions: Any = None
    next_token: Any = None
    next_sibling: Any = None
    visibility: Any = None
    scores: Any = None
    num_nodes: Any = None


@dataclass(eq=False)
class Accept:
    """What the target model accepted of each tree.

    Attributes:
        accept_index: int32 [B,Q], the slots walked, the root first; -1 beyond accept_token_num.
        accept_token_num: int32 [B], accepted draft tokens, without the bonus.
        accept_tokens: int64 [B,Q], the new tokens, the bonus last; -1 beyond accept_token_num.
    """

    accept_index: Any = None
    accept_token_num: Any = None
    accept_tokens: Any = None
