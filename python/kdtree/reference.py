"""The ops of kdtree in NumPy: what each of them means, written to be read.

Same names and keywords as the public ops, NumPy arrays in, NumPy arrays out (`out=`, `stream=`
and `workspace=` have no place here). Nothing is checked and nothing is fast; the arithmetic is
float64 inside. This module shares no code with the C++ library, so that the tests and
`python -m kdtree check` compare two independent answers.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from .records import Accept, DraftTopK, Tree

__all__ = [
    "build_ddtree",
    "commit_kv",
    "draft_topk",
    "expand_mask",
    "merge_topk",
    "tree_accept",
    "tree_accept_logits",
    "tree_links",
    "verify_attn",
]

Array = npt.NDArray[Any]

LATENT = 512  # values are the first 512 of a 576-wide key


# ---- candidates


def draft_topk(
    logits: Array,
    k: int,
    *,
    vocab_start: int = 0,
    vocab_size: int | None = None,
    normalize: bool = True,
    root_tokens: Array | None = None,
) -> DraftTopK:
    """Top-k of each row, descending; equal logits: smallest id first; NaN counts as -inf.

    The rows of a request whose root token is negative are padding: -inf, with ids of -1.
    """
    columns = logits.shape[-1]
    if vocab_size is not None:  # columns beyond it are padding
        columns = min(max(vocab_size - vocab_start, 0), columns)
    x = _dead_nan(logits[..., :columns].astype(np.float64))
    if root_tokens is not None:
        x[root_tokens < 0] = -np.inf
    lse = _logsumexp(x)
    order = np.argsort(-x, axis=-1, kind="stable")[..., :k]
    values = np.take_along_axis(x, order, axis=-1)
    ids = order.astype(np.int64) + vocab_start
    if root_tokens is not None:
        ids[root_tokens < 0] = -1
    return _topk_record(values, ids, lse, k, normalize)


def merge_topk(values: Array, ids: Array, lse: Array) -> DraftTopK:
    """The un-normalized top-k of S vocabulary shards -> one normalized top-k."""
    k = values.shape[-1]
    # Shards side by side: [S,...,K] -> [...,S*K].
    x = np.concatenate(list(_dead_nan(values.astype(np.float64))), axis=-1)
    i = np.concatenate(list(ids.astype(np.int64)), axis=-1)
    x = np.where(i < 0, -np.inf, x)  # an empty place
    order = np.lexsort((i, i < 0, -x), axis=-1)[..., :k]
    x = np.take_along_axis(x, order, axis=-1)
    i = np.take_along_axis(i, order, axis=-1)
    return _topk_record(x, i, _logsumexp(np.moveaxis(lse.astype(np.float64), 0, -1)), k, True)


def _topk_record(values: Array, ids: Array, lse: Array, k: int, normalize: bool) -> DraftTopK:
    missing = [(0, 0)] * (values.ndim - 1) + [(0, k - values.shape[-1])]
    values = np.pad(values, missing, constant_values=-np.inf)
    ids = np.pad(ids, missing, constant_values=-1)
    if normalize:
        sure, dead = np.isposinf(values), np.isneginf(values)  # 0, -inf
        with np.errstate(invalid="ignore"):
            values = values - np.where(np.isneginf(lse), 0, lse)[..., None]
        values = np.where(sure, 0, np.where(dead, -np.inf, values))
    return DraftTopK(
        logprobs=values.astype(np.float32), ids=ids, lse=np.asarray(lse, dtype=np.float32)
    )


def _dead_nan(x: Array) -> Array:
    return np.where(np.isnan(x), -np.inf, x)


def _logsumexp(x: Array) -> Array:
    if x.shape[-1] == 0:
        return np.full(x.shape[:-1], -np.inf)
    top = x.max(axis=-1, keepdims=True)
    top = np.where(np.isinf(top), 0, top)
    with np.errstate(divide="ignore", over="ignore"):
        total: Array = np.exp(x - top).sum(axis=-1)
        return np.asarray(np.log(total) + top[..., 0])


# ---- the tree


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
) -> Tree:
    """The best-first tree of at most `budget` nodes. Slots are in pop order.

    A negative root token marks a padding request: num_nodes 0, all slots unused.
    """
    batch, qlen = len(root_tokens), budget + 1
    tokens = np.zeros((batch, qlen), np.int64)
    parents = np.full((batch, qlen), -1, np.int32)
    scores = np.full((batch, qlen), -np.inf, np.float32)
    num_nodes = np.zeros(batch, np.int32)
    stop = None if node_cost is None else (node_cost.tolist(), float(base_cost or 0.0))
    for b in range(batch):
        if root_tokens[b] < 0:
            continue
        rows = [_alive(row) for row in logprobs[b].tolist()]
        slot_of: dict[tuple[int, ...], int] = {(): 0}
        tokens[b, 0] = root_tokens[b]
        scores[b, 0] = 0
        for slot, (ranks, score) in enumerate(_best_first(rows, budget, chain_seed, stop), 1):
            slot_of[ranks] = slot
            tokens[b, slot] = ids[b, len(ranks) - 1, ranks[-1]]
            parents[b, slot] = slot_of[ranks[:-1]]
            scores[b, slot] = score if score < 1e300 else math.inf
        num_nodes[b] = len(slot_of)
    tree = tree_links(parents, num_nodes, prefix_lens=prefix_lens, draft_tokens=tokens)
    tree.scores = scores
    return tree


def _alive(row: list[float]) -> list[float]:
    """Candidates up to the first -inf or NaN. +inf counts as finite, beyond any float: an infinite
    score would make NaN of its siblings."""
    for r, logprob in enumerate(row):
        if math.isnan(logprob) or logprob == -math.inf:
            row = row[:r]
            break
    return [min(logprob, 1e300) for logprob in row]


def _best_first(
    rows: list[list[float]],
    budget: int,
    chain_seed: bool,
    stop: tuple[list[float], float] | None,
) -> list[tuple[tuple[int, ...], float]]:
    """(rank tuple, score) of each node in the order taken.

    A node is the tuple of the ranks chosen so far; its score is accumulated in float64 from the
    node that put it on the heap. The heap's own order is the rule: larger score first, then the
    lexicographically smaller tuple, in which a prefix precedes its extension.
    """
    taken: list[tuple[tuple[int, ...], float]] = []
    heap: list[tuple[float, tuple[int, ...]]] = []

    def push_child(ranks: tuple[int, ...], score: float) -> None:
        depth = len(ranks)
        if depth < len(rows) and rows[depth]:
            heapq.heappush(heap, (-(score + rows[depth][0]), (*ranks, 0)))

    def push_sibling(ranks: tuple[int, ...], score: float) -> None:
        row, rank = rows[len(ranks) - 1], ranks[-1]
        if rank + 1 < len(row):
            score = score - row[rank] + row[rank + 1]
            heapq.heappush(heap, (-score, (*ranks[:-1], rank + 1)))

    push_child((), 0.0)
    if chain_seed:
        chain = []
        while heap and len(taken) < budget:
            negated, ranks = heapq.heappop(heap)
            taken.append((ranks, -negated))
            chain.append((ranks, -negated))
            push_child(ranks, -negated)  # the only node on the heap, so the chain goes on with it
        for ranks, score in chain:
            push_sibling(ranks, score)
    gain = 1.0 + _sum(_exp(score) for _, score in taken)
    while heap and len(taken) < budget:
        negated, ranks = heapq.heappop(heap)
        score = -negated
        if stop is not None:
            # Expected tokens per cost: take the node while that raises it.
            node_cost, base_cost = stop
            n = len(taken)
            now = _ratio(gain, base_cost + node_cost[n])
            gain += _exp(score)
            if not _ratio(gain, base_cost + node_cost[n + 1]) > now:
                break
        taken.append((ranks, score))
        push_sibling(ranks, score)
        push_child(ranks, score)
    return taken


def _sum(terms: Iterable[float]) -> float:
    total = 0.0
    for term in terms:  # in order: sum() compensates rounding from Python 3.12 on
        total += term
    return total


def _exp(score: float) -> float:
    try:
        return math.exp(score)
    except OverflowError:
        return math.inf


def _ratio(value: float, cost: float) -> float:
    with np.errstate(divide="ignore", invalid="ignore"):
        return float(np.float64(value) / np.float64(cost))


def tree_links(
    parents: Array,
    num_nodes: Array,
    *,
    prefix_lens: Array | None = None,
    draft_tokens: Array | None = None,
) -> Tree:
    """What follows from parents alone: links, depths, positions, visibility.

    A slot whose parent is out of range, at or above itself, or itself broken, is broken: it sees
    nothing and nobody links to it.
    """
    batch, qlen = parents.shape
    depths = np.zeros((batch, qlen), np.int32)
    next_token = np.full((batch, qlen), -1, np.int64)
    next_sibling = np.full((batch, qlen), -1, np.int64)
    visibility = np.zeros((batch, qlen), np.int64)
    for b in range(batch):
        ancestors: dict[int, set[int]] = {0: set()}  # of whole slots: the nodes that they see
        youngest: dict[int, int] = {}  # the last child so far
        for slot in range(1, _used(num_nodes, b, qlen)):
            parent = int(parents[b, slot])
            if parent not in ancestors:  # only lower slots are in it yet
                continue
            ancestors[slot] = ancestors[parent] | {slot}
            depths[b, slot] = len(ancestors[slot])
            visibility[b, slot] = _word(ancestors[slot])
            if parent in youngest:
                next_sibling[b, youngest[parent]] = slot
            else:
                next_token[b, parent] = slot
            youngest[parent] = slot
    start = np.zeros(batch, np.int64) if prefix_lens is None else prefix_lens.astype(np.int64)
    return Tree(
        draft_tokens=draft_tokens,
        parents=parents,
        depths=depths,
        positions=start[:, None] + depths,
        next_token=next_token,
        next_sibling=next_sibling,
        visibility=visibility,
        num_nodes=num_nodes,
    )


def _used(num_nodes: Array | None, b: int, qlen: int) -> int:
    return qlen if num_nodes is None else min(max(int(num_nodes[b]), 0), qlen)


def _word(nodes: set[int]) -> int:
    """Bit (j - 1) of a signed 64-bit word for each node j."""
    word = sum(1 << (j - 1) for j in nodes)
    return word - (1 << 64) if word >> 63 else word


def _sees(words: Array | None, num_nodes: int, qlen: int) -> npt.NDArray[np.bool_]:
    """bool[Q,Q]: which slot sees which. Every slot sees the root, an unused one nothing more."""
    sees = np.zeros((qlen, qlen), np.bool_)
    sees[:, 0] = True
    for slot in range(num_nodes):
        for node in range(1, num_nodes):
            sees[slot, node] = (
                node <= slot if words is None else bool(int(words[slot]) >> (node - 1) & 1)
            )
    return sees


def expand_mask(tree: Tree, layout: str, *, prefix_lens: Array | None = None) -> Array:
    """Visibility words -> "qlen" bool[B,Q,Q], "full" flat bool, or "packed32" int32[B,Q,W]."""
    batch, qlen = tree.visibility.shape
    masks = np.zeros((batch, qlen, qlen), np.bool_)
    for b in range(batch):
        masks[b] = _sees(tree.visibility[b], _used(tree.num_nodes, b, qlen), qlen)
    if layout == "qlen":
        return masks
    if layout == "full":
        assert prefix_lens is not None
        whole = [np.ones((qlen, max(int(prefix), 0)), np.bool_) for prefix in prefix_lens]
        rows = [np.concatenate(pair, axis=1).ravel() for pair in zip(whole, masks, strict=True)]
        return np.concatenate([np.zeros(0, np.bool_), *rows])
    assert layout == "packed32"
    words = np.zeros((batch, qlen, -(-qlen // 32)), np.uint32)
    for column in range(qlen):
        bit = masks[:, :, column].astype(np.uint32) << np.uint32(column % 32)
        words[:, :, column // 32] |= bit
    return words.view(np.int32)


# ---- attention


def verify_attn(
    q: Array,
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
    return_lse: bool = False,
) -> Any:
    """softmax(sm_scale q k^T + mask) v, each slot over the prefix, the root and what it sees.

    Returns out[B,Q,H,512], and lse[B,Q,H] with return_lse, in float64: rounded to no 16-bit dtype,
    so that an error measured against it is the other side's. kv_split changes no value here.
    """
    query = q.astype(np.float64)
    if q_rope is not None:
        query = np.concatenate([query, q_rope.astype(np.float64)], axis=-1)
    cache = kv_cache[:, :, 0] if kv_cache.ndim == 4 else kv_cache
    page_size = cache.shape[1]
    scale = 1.0 if kv_scale is None else float(np.asarray(kv_scale).reshape(()))
    batch, qlen, heads, _ = query.shape
    out = np.zeros((batch, qlen, heads, LATENT))
    lse = np.full((batch, qlen, heads), -np.inf)
    for b in range(batch):
        used, prefix = _used(num_nodes, b, qlen), max(int(prefix_lens[b]), 0)
        if used == 0:
            continue  # padding: nothing of it is read
        sees = _sees(None if visibility is None else visibility[b], used, qlen)
        slots = np.flatnonzero(sees.any(axis=0))  # keys that no slot sees may hold anything
        mask = np.concatenate([np.ones((qlen, prefix), np.bool_), sees[:, slots]], axis=1)
        positions = np.concatenate([np.arange(prefix), prefix + slots])
        if block_table is not None:
            rows = cache[block_table[b, positions // page_size], positions % page_size]
        else:
            assert kv_indptr is not None
            assert kv_indices is not None
            rows = cache[kv_indices[kv_indptr[b] + positions], 0]
        keys = rows.astype(np.float64) * scale
        logits = sm_scale * (query[b].reshape(qlen * heads, -1) @ keys.T)
        logits = logits.reshape(qlen, heads, -1)
        logits = np.where(mask[:, None, :], logits, -np.inf)
        lse[b] = _logsumexp(logits)
        out[b] = np.exp(logits - lse[b][..., None]) @ keys[:, :LATENT]
    return (out, lse) if return_lse else out


# ---- acceptance


def tree_accept(tree: Tree, target_predict: Array) -> Accept:
    """From the root, on to the child that holds the target's token, lowest slot on duplicates."""
    batch, qlen = target_predict.shape
    return _walk(tree, (batch, qlen), lambda b, slot, step: int(target_predict[b, slot]))


def tree_accept_logits(
    tree: Tree,
    logits: Array,
    *,
    temperature: float | Array | None = None,
    seeds: Array | None = None,
    vocab_size: int | None = None,
) -> Accept:
    """The same walk, with the target's token at a visited slot drawn from its logits.

    Temperature 0 is argmax, lowest id on ties. Above 0 the token maximises logit / temperature +
    Gumbel noise, which samples the softmax; the noise depends on the seed, the slot's position
    and the token id, and on nothing else.
    """
    batch, qlen, vocab = logits.shape
    columns = vocab if vocab_size is None else min(max(vocab_size, 0), vocab)
    heat = np.float32(0) if temperature is None else np.asarray(temperature, np.float32)
    heat = np.broadcast_to(heat, (batch,))

    def token(b: int, slot: int, step: int) -> int | None:
        row = _dead_nan(logits[b, slot, :columns].astype(np.float64))
        if not np.isfinite(row).any():
            return None
        if heat[b] >= 1e-6:  # below that it is 0
            position = step if tree.positions is None else int(tree.positions[b, slot])
            assert seeds is not None
            row = row / float(heat[b]) + gumbel(int(seeds[b]), position, columns)
        return int(np.argmax(row))  # the first of equals

    return _walk(tree, (batch, qlen), token)


def gumbel(seed: int, position: int, columns: int) -> Array:
    """Standard Gumbel noise of token ids 0..columns-1 at one position, -log(-log(1 - w)).

    w is (word + 1/2) / 2^32, with the word of token v the (v % 4)-th of Philox's block v // 4.
    """
    blocks = -(-columns // 4)
    counter = np.zeros((4, blocks), np.uint64)
    counter[0] = np.arange(blocks)
    counter[2:] = np.array([[position & 0xFFFFFFFF], [position >> 32 & 0xFFFFFFFF]])
    words = philox4x32_10(counter, (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF))
    w = (words.T.ravel()[:columns] + 0.5) / 2.0**32
    return np.asarray(-np.log(-np.log1p(-w)))


def philox4x32_10(counter: Array, key: tuple[int, int]) -> Array:
    """Philox4x32-10 (Salmon et al., 2011): counters [4, ...] as uint64 -> words [4, ...]."""
    low, high = np.uint64(0xFFFFFFFF), np.uint64(32)
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        a, b = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1 = (b >> high) ^ c1 ^ np.uint64(k0), b & low
        c2, c3 = (a >> high) ^ c3 ^ np.uint64(k1), a & low
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3])


def _walk(
    tree: Tree, shape: tuple[int, int], token_at: Callable[[int, int, int], int | None]
) -> Accept:
    """token_at(request, slot, step) is the target's token at a visited slot; None ends the walk."""
    batch, qlen = shape
    accept = Accept(
        accept_index=np.full((batch, qlen), -1, np.int32),
        accept_token_num=np.zeros(batch, np.int32),
        accept_tokens=np.full((batch, qlen), -1, np.int64),
    )
    for b in range(batch):
        used = _used(tree.num_nodes, b, qlen)
        slot, step = 0, 0
        while slot < used:
            token = token_at(b, slot, step)
            accept.accept_index[b, step] = slot
            accept.accept_tokens[b, step] = -1 if token is None else token
            accept.accept_token_num[b] = step
            children = _chain(tree, b, slot, used)
            slot = next((c for c in children if int(tree.draft_tokens[b, c]) == token), used)
            step += 1
    return accept


def _chain(tree: Tree, b: int, slot: int, used: int) -> list[int]:
    """The children of a slot. A link that does not ascend, or leaves the tree, counts as -1."""
    children: list[int] = []
    at, link = slot, int(tree.next_token[b, slot])
    while at < link < used:
        children.append(link)
        at, link = link, int(tree.next_sibling[b, link])
    return children


# ---- the cache


def commit_kv(
    kv_caches: Any,
    block_table: Array | None,
    prefix_lens: Array | None,
    accept: Accept,
    *,
    cache_loc: Array | None = None,
) -> None:
    """In every layer, in place: the row of slot accept_index[b,i] goes to position prefix + i.

    With cache_loc, the row of slot s is cache_loc[b,s], and the row of accept_index[b,i] goes to
    cache_loc[b,i]. Rows outside the cache are left alone.
    """
    pages, page_size = kv_caches[0].shape[:2]
    qlen = accept.accept_index.shape[1]

    def row_of(b: int, slot: int) -> int:
        """The flat row of a slot, or of the position as far above the prefix; -1: none."""
        if not 0 <= slot < qlen:
            return -1
        if cache_loc is not None:
            row = int(cache_loc[b, slot])
        else:
            assert block_table is not None
            assert prefix_lens is not None
            position = int(prefix_lens[b]) + slot
            if not 0 <= position < block_table.shape[1] * page_size:
                return -1
            row = int(block_table[b, position // page_size]) * page_size + position % page_size
        return row if 0 <= row < pages * page_size else -1

    moves = [
        (row_of(b, int(accept.accept_index[b, i])), row_of(b, i))
        for b in range(len(accept.accept_token_num))
        for i in range(min(int(accept.accept_token_num[b]) + 1, qlen))
    ]
    moves = [(source, to) for source, to in moves if source >= 0 and to >= 0]
    for layer in kv_caches:
        rows = [layer[source // page_size, source % page_size].copy() for source, _ in moves]
        for (_, to), row in zip(moves, rows, strict=True):
            layer[to // page_size, to % page_size] = row
