"""kdtree: the GPU side of one tree-speculation round for MLA models.

    draft_topk      drafter logits -> top-K log-probs and ids per future position
    build_ddtree    best-first draft tree under a node budget
    verify_attn     MLA-absorbed attention: paged prefix + ancestor-masked tree
    tree_accept     walk the tree along the target's own tokens
    commit_kv       move the accepted tokens' KV rows to their final places

`Round` holds the buffers of a round and runs these steps in order.

Every op takes NumPy arrays, torch tensors (CPU or CUDA) and any other DLPack producer, all on
one device, and returns arrays of the same library. Importing this module imports neither NumPy
nor torch and touches no CUDA state.

On CUDA an op only starts its work, on `stream=`: a cudaStream_t as an int, or an object with
`cuda_stream` (torch) or `__cuda_stream__` (CUDA's stream protocol). None is the current stream of
the library of the first array, for producers other than torch and CuPy the legacy default one.
Results are ready in that stream's order, and so is the memory of theirs that an op allocates; that
of producers other than torch and CuPy waits for the whole device when it is dropped: with
`out=` nothing is allocated.
"""

from kdtree._version import __version__ as __version__
from kdtree.accept import tree_accept, tree_accept_logits
from kdtree.attention import verify_attn, verify_attn_workspace
from kdtree.commit import commit_kv
from kdtree.draft import draft_topk, merge_topk
from kdtree.records import Accept, DraftTopK, Tree
from kdtree.round import Round
from kdtree.tree import build_ddtree, expand_mask, tree_links

#: Most tree slots of a request, root included: 64 nodes fit one 64-bit ancestor word.
MAX_QLEN = 65
#: Most candidates per draft position.
MAX_K = 64

__all__ = [
    "MAX_K",
    "MAX_QLEN",
    "Accept",
    "DraftTopK",
    "Round",
    "Tree",
    "build_ddtree",
    "commit_kv",
    "draft_topk",
    "expand_mask",
    "merge_topk",
    "tree_accept",
    "tree_accept_logits",
    "tree_links",
    "verify_attn",
    "verify_attn_workspace",
]
