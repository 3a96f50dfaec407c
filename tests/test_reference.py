"""The oracle against brute force: each op again, by the slowest way that cannot be wrong."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kdtree import reference
from kdtree.records import Tree
from support import (
    BF16,
    F16,
    FP8,
    assert_close,
    assert_same,
    attn_case,
    draft_rows,
    random_parents,
    random_trees,
)

RngSeed = st.integers(0, 2**32 - 1)


# ---- draft_topk, merge_topk


@pytest.mark.parametrize("normalize", [True, False])
def test_topk_against_sorted_rows(rng, normalize):
    logits = rng.integers(-4, 4, (7, 3, 40)).astype(np.float32)
    logits[0, 0, 3:] = np.nan
    logits[1, 1] = -np.inf
    got = reference.draft_topk(logits, 5, vocab_start=100, vocab_size=130, normalize=normalize)
    for row in np.ndindex(7, 3):
        pairs = [(-math.inf if math.isnan(x) else x, c) for c, x in enumerate(logits[row][:30])]
        total = sum(math.exp(x) for x, _ in pairs)
        lse = math.log(total) if total else -math.inf
        best = sorted(pairs, key=lambda pair: (-pair[0], pair[1]))[:5]
        assert [c + 100 for _, c in best] == got.ids[row].tolist()
        assert got.lse[row] == pytest.approx(lse, abs=1e-5)
        shift = lse if normalize and total else 0
        assert got.logprobs[row].tolist() == pytest.approx([x - shift for x, _ in best], abs=1e-5)


def test_topk_with_fewer_real_columns_than_k():
    logits = np.zeros((1, 8), np.float32)
    got = reference.draft_topk(logits, 4, vocab_start=6, vocab_size=8)
    assert got.ids.tolist() == [[6, 7, -1, -1]]
    assert got.logprobs[0, 2:].tolist() == [-math.inf] * 2
    assert got.logprobs[0, 0] == pytest.approx(-math.log(2))
    nothing = reference.draft_topk(logits, 4, vocab_start=9, vocab_size=8)
    assert nothing.ids.tolist() == [[-1] * 4]
    assert nothing.lse.tolist() == [-math.inf]


def test_merge_of_shards_is_the_whole(rng):
    logits = rng.integers(-3, 3, (5, 4, 96)).astype(np.float32)
    whole = reference.draft_topk(logits, 10, vocab_size=90)
    shards = [
        reference.draft_topk(part, 10, vocab_start=32 * s, vocab_size=90, normalize=False)
        for s, part in enumerate(np.split(logits, 3, axis=-1))
    ]
    merged = reference.merge_topk(
        *(np.stack([getattr(s, f) for s in shards]) for f in ("logprobs", "ids", "lse"))
    )
    assert_same(merged.ids, whole.ids)
    assert_close(merged.logprobs, whole.logprobs, atol=1e-6)
    assert_close(merged.lse, whole.lse, atol=1e-6)


# ---- build_ddtree


def exhaustive(logprobs, budget):
    """Best-first over the list of every rank tuple, with no heap and no order of discovery.

    Sums of multiples of 1/4 are exact, so a node's score does not depend on the path by which the
    heap would reach it.
    """
    rows = []
    for row in logprobs.tolist():
        alive = list(itertools.takewhile(lambda x: not math.isnan(x) and x > -math.inf, row))
        rows.append(range(len(alive)))
    nodes = [
        ranks for depth in range(1, len(rows) + 1) for ranks in itertools.product(*rows[:depth])
    ]
    score = {ranks: sum(float(logprobs[d, r]) for d, r in enumerate(ranks)) for ranks in nodes}
    order = sorted(nodes, key=lambda ranks: (-score[ranks], ranks))
    return [(ranks, score[ranks]) for ranks in order[:budget]]


@given(seed=RngSeed, depth=st.integers(0, 4), k=st.integers(1, 5), budget=st.integers(0, 20))
def test_build_against_every_rank_tuple(seed, depth, k, budget):
    rng = np.random.default_rng(seed)
    logprobs, ids = draft_rows(rng, 3, depth, k, ties=True, dead=0.5)
    tree = reference.build_ddtree(
        logprobs, ids, np.array([5, 0, -1]), np.array([10, 0, 7], np.int32), budget=budget
    )
    assert tree.num_nodes[2] == 0
    for b in range(2):
        nodes = exhaustive(logprobs[b], budget)
        slots = {(): 0} | {ranks: slot for slot, (ranks, _) in enumerate(nodes, 1)}
        assert tree.num_nodes[b] == len(slots)
        for slot, (ranks, score) in enumerate(nodes, 1):
            assert tree.parents[b, slot] == slots[ranks[:-1]]
            assert tree.draft_tokens[b, slot] == ids[b, len(ranks) - 1, ranks[-1]]
            assert tree.depths[b, slot] == len(ranks)
            assert tree.positions[b, slot] == [10, 0][b] + len(ranks)
            assert tree.scores[b, slot] == score


def test_build_scores_come_from_the_heap_parent():
    # (w - a) + b is not the plain sum: the rule is the path of the heap, to the bit.
    logprobs = np.array([[[-0.1, -0.7], [-0.3, -1.1]]], np.float32)
    tree = reference.build_ddtree(
        logprobs, np.zeros((1, 2, 2), int), np.array([1]), np.array([0]), budget=6
    )
    a, b, c, d = (float(x) for x in logprobs.ravel())
    top = 0.0 + a
    first = {top, top + c, (top + c) - c + d, (top - a) + b}
    second = {((top - a) + b) + c, (((top - a) + b) + c) - c + d}
    want = sorted((np.float32(x) for x in first | second), reverse=True)
    assert tree.scores[0, 1:].tolist() == want


def test_build_chain_seed(rng):
    logprobs, ids = draft_rows(rng, 1, 3, 4, ties=False)
    tree = reference.build_ddtree(
        logprobs, ids, np.array([9]), np.array([0]), budget=8, chain_seed=True
    )
    assert tree.parents[0, :4].tolist() == [-1, 0, 1, 2]
    assert tree.draft_tokens[0, 1:4].tolist() == ids[0, :, 0].tolist()
    # The rest is the best-first order with the chain taken out.
    plain = reference.build_ddtree(logprobs, ids, np.array([9]), np.array([0]), budget=11)
    chain = {1, 2, 3}
    rest = [s for s in plain.scores[0, 1:].tolist() if s not in tree.scores[0, 1:4].tolist()]
    assert tree.scores[0, 4:].tolist() == rest[: 8 - len(chain)]
    short = reference.build_ddtree(
        logprobs, ids, np.array([9]), np.array([0]), budget=2, chain_seed=True
    )
    assert short.parents[0].tolist() == [-1, 0, 1]


@pytest.mark.parametrize("chain_seed", [False, True])
def test_build_stops_at_the_best_value(rng, chain_seed):
    logprobs, ids = draft_rows(rng, 1, 5, 8, ties=False)
    root, prefix = np.array([3]), np.array([0])
    options = {"budget": 32, "chain_seed": chain_seed}
    whole = reference.build_ddtree(logprobs, ids, root, prefix, **options)
    cost = np.cumsum(rng.random(33)).astype(np.float32) / 20
    tree = reference.build_ddtree(
        logprobs, ids, root, prefix, node_cost=cost, base_cost=1.0, **options
    )
    n = int(tree.num_nodes[0]) - 1
    gains = np.exp(whole.scores[0].astype(np.float64))  # the root's is 1
    values = np.cumsum(gains) / (1.0 + cost)
    first = 5 if chain_seed else 0
    assert first < n < 32
    assert (np.diff(values[first : n + 1]) > 0).all()
    assert values[n + 1] <= values[n]
    assert_same(tree.scores[0, : n + 1], whole.scores[0, : n + 1])
    assert np.isneginf(tree.scores[0, n + 1 :]).all()


# ---- tree_links, expand_mask


@given(seed=RngSeed, qlen=st.integers(1, 65))
def test_links_against_climbs(seed, qlen):
    rng = np.random.default_rng(seed)
    parents = random_parents(rng, 4, qlen)
    parents[2:] = rng.integers(-2, qlen + 2, (2, qlen))  # cycles, orphans, anything
    used = rng.integers(-1, qlen + 2, 4).astype(np.int32)
    tree = reference.tree_links(parents, used, prefix_lens=np.array([0, 5, 6, 7], np.int32))
    for b in range(4):
        count = min(max(used[b], 0), qlen)
        paths = {}
        for slot in range(count):
            path, at = [], slot
            while at > 0 and 0 <= parents[b, at] < at:
                path.append(at)
                at = int(parents[b, at])
            if at == 0:
                paths[slot] = path
        children = {
            slot: [c for c in paths if c > 0 and parents[b, c] == slot] for slot in range(qlen)
        }
        for slot in range(qlen):
            path = paths.get(slot, [])
            assert nodes_of(tree.visibility[b, slot]) == set(path)
            assert tree.depths[b, slot] == len(path)
            assert tree.positions[b, slot] == [0, 5, 6, 7][b] + len(path)
            assert tree.next_token[b, slot] == min(children[slot], default=-1)
            siblings = children.get(int(parents[b, slot]), []) if path else []
            later = [s for s in siblings if s > slot]
            assert tree.next_sibling[b, slot] == min(later, default=-1)


def nodes_of(word) -> set[int]:
    return {j for j in range(1, 65) if int(word) >> (j - 1) & 1}


def test_links_without_prefix_and_passed_through():
    parents, used = np.array([[-1, 0, 0]], np.int32), np.array([3], np.int32)
    tokens = np.array([[1, 2, 3]])
    tree = reference.tree_links(parents, used, draft_tokens=tokens)
    assert tree.parents is parents
    assert tree.num_nodes is used
    assert tree.draft_tokens is tokens
    assert tree.scores is None
    assert tree.positions.tolist() == [[0, 1, 1]]


@given(seed=RngSeed, qlen=st.integers(1, 65))
def test_masks_agree(seed, qlen):
    rng = np.random.default_rng(seed)
    tree = random_trees(rng, 3, qlen, 8)
    prefix = rng.integers(0, 9, 3).astype(np.int32)
    mask = reference.expand_mask(tree, "qlen")
    full = reference.expand_mask(tree, "full", prefix_lens=prefix)
    packed = reference.expand_mask(tree, "packed32").view(np.uint32)
    start = 0
    for b in range(3):
        for slot in range(qlen):
            row = {0} | (nodes_of(tree.visibility[b, slot]) if slot < tree.num_nodes[b] else set())
            assert set(np.flatnonzero(mask[b, slot])) == row
            width = int(prefix[b]) + qlen
            assert full[start : start + prefix[b]].all()
            assert_same(full[start + prefix[b] : start + width], mask[b, slot])
            start += width
            for j in range(packed.shape[2] * 32):
                assert bool(packed[b, slot, j // 32] >> np.uint32(j % 32) & 1) == (j in row)
    assert start == full.size


def test_mask_ignores_bits_at_num_nodes_and_above():
    tree = Tree(visibility=np.full((1, 5), -1), num_nodes=np.array([3], np.int32))
    assert reference.expand_mask(tree, "qlen")[0].tolist() == [
        *[[True, True, True, False, False]] * 3,
        *[[True, False, False, False, False]] * 2,
    ]


# ---- verify_attn


@pytest.mark.parametrize("visibility", ["tree", "any", "causal"])
@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "form"),
    [(F16, F16, "pages"), (BF16, BF16, "rope"), (BF16, FP8, "pages"), (F16, F16, "csr")],
)
def test_attention_row_by_row(rng, visibility, dtype, kv_dtype, form):
    case = attn_case(
        rng,
        prefix_lens=[0, 5, 17],
        qlen=6,
        heads=2,
        page_size=1 if form == "csr" else 4,
        dtype=dtype,
        kv_dtype=kv_dtype,
        visibility=visibility,
        num_nodes=[6, 4, 0],
        rope=form == "rope",
        csr=form == "csr",
    )
    out, lse = case.reference()
    q = case.q.astype(np.float64)
    if form == "rope":
        q = np.concatenate([q, case.options["q_rope"].astype(np.float64)], axis=-1)
    flat = case.kv_cache.reshape(-1, 576)
    for b, slot, head in np.ndindex(3, 6, 2):
        used = [6, 4, 0][b]
        if used == 0:
            assert not out[b].any()
            assert np.isneginf(lse[b]).all()
            continue
        prefix = int(case.prefix_lens[b])
        nodes = set(range(1, slot + 1))
        if case.visibility is not None:
            nodes = nodes_of(case.visibility[b, slot])
        nodes = {j for j in nodes if j < used} if slot < used else set()
        weights, values = [], []
        for position in [*range(prefix), *(prefix + j for j in sorted({0} | nodes))]:
            if case.block_table is None:
                row = case.options["kv_indices"][case.options["kv_indptr"][b] + position]
            else:
                row = case.block_table[b, position // 4] * 4 + position % 4
            key = flat[row].astype(np.float64) * case.options.get("kv_scale", 1.0)
            weights.append(math.exp(576**-0.5 * float(q[b, slot, head] @ key)))
            values.append(key[:512])
        total = sum(weights)
        assert lse[b, slot, head] == pytest.approx(math.log(total))
        want = sum(w * v for w, v in zip(weights, values, strict=True)) / total
        assert_close(out[b, slot, head], np.asarray(want), atol=1e-12)


# ---- tree_accept, tree_accept_logits


@given(seed=RngSeed)
def test_accept_against_paths(seed):
    rng = np.random.default_rng(seed)
    tree = random_trees(rng, 6, 12, 3)
    target = rng.integers(0, 3, (6, 12))
    got = reference.tree_accept(tree, target)
    for b in range(6):
        slots, tokens = [], []
        slot = 0 if tree.num_nodes[b] else None
        while slot is not None:
            slots.append(slot)
            tokens.append(int(target[b, slot]))
            fits = [
                c
                for c in range(1, tree.num_nodes[b])
                if tree.parents[b, c] == slot and tree.draft_tokens[b, c] == tokens[-1]
            ]
            slot = fits[0] if fits else None
        rest = [-1] * (12 - len(slots))
        assert got.accept_index[b].tolist() == slots + rest
        assert got.accept_tokens[b].tolist() == tokens + rest
        assert got.accept_token_num[b] == max(len(slots) - 1, 0)


def test_accept_logits_at_temperature_0_is_accept_of_argmax(rng):
    tree = random_trees(rng, 20, 9, 4)
    logits = rng.integers(0, 3, (20, 9, 6)).astype(np.float32)
    logits[:, :, 4:] = 9  # padding
    logits[rng.random(logits.shape) < 0.2] = np.nan
    logits[..., 0] = np.maximum(np.nan_to_num(logits[..., 0]), 0)
    best = np.argmax(np.nan_to_num(logits[..., :4], nan=-np.inf), axis=-1)
    got = reference.tree_accept_logits(tree, logits, temperature=0.0, vocab_size=4)
    assert_same(got, reference.tree_accept(tree, best))


def test_accept_logits_ends_where_no_logit_is_finite():
    tree = reference.tree_links(
        np.array([[-1, 0, 1]], np.int32),
        np.array([3], np.int32),
        draft_tokens=np.array([[7, 1, -1]]),
    )
    logits = np.array([[[0, 1], [np.nan, -np.inf], [0, 0]]], np.float32)
    got = reference.tree_accept_logits(tree, logits)
    assert got.accept_index.tolist() == [[0, 1, -1]]
    assert got.accept_tokens.tolist() == [[1, -1, -1]]
    assert got.accept_token_num.tolist() == [1]


def test_philox_known_answers():
    """From the test vectors of the authors' Random123."""
    f = 0xFFFFFFFF
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    for counter, key, want in [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((f, f, f, f), (f, f), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (pi, (0xA4093822, 0x299F31D0), (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
    ]:
        words = reference.philox4x32_10(np.array(counter, np.uint64), key)
        assert tuple(int(w) for w in words) == want


def test_gumbel_is_a_function_of_seed_position_and_token():
    noise = reference.gumbel(-5, 2**33 + 1, 11)
    assert np.array_equal(noise[:6], reference.gumbel(-5, 2**33 + 1, 6))
    for seed, position in [(-4, 2**33 + 1), (-5 + 2**32, 2**33 + 1), (-5, 1), (-5, 2**33)]:
        assert (noise != reference.gumbel(seed, position, 11)).all()
    # The law: mean and variance of the standard Gumbel distribution.
    noise = reference.gumbel(1, 2, 1_000_000)
    assert noise.mean() == pytest.approx(np.euler_gamma, abs=0.01)
    assert noise.var() == pytest.approx(np.pi**2 / 6, abs=0.02)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_samples_follow_the_softmax(rng, temperature):
    count = 6000
    tree = Tree(
        draft_tokens=np.zeros((count, 1), int),
        next_token=np.full((count, 1), -1),
        next_sibling=np.full((count, 1), -1),
        num_nodes=np.ones(count, np.int32),
    )
    logits = np.array([1.0, 0.0, -1.0, 0.5], np.float32)
    got = reference.tree_accept_logits(
        tree,
        np.broadcast_to(logits, (count, 1, 4)),
        temperature=temperature,
        seeds=np.arange(count),
    )
    law = np.exp(logits / temperature) / np.exp(logits / temperature).sum()
    seen = np.bincount(got.accept_tokens[:, 0], minlength=4)
    assert ((seen - count * law) ** 2 / (count * law)).sum() < 16.27  # 0.1 % of 3 degrees


# ---- commit_kv


@pytest.mark.parametrize("form", ["table", "cache_loc"])
def test_commit_moves_rows(rng, form):
    tree = random_trees(rng, 5, 8, 2)
    accept = reference.tree_accept(tree, rng.integers(0, 2, (5, 8)))
    prefix = rng.integers(0, 9, 5).astype(np.int32)
    layers = [rng.standard_normal((30, 4, 3), np.float32) for _ in range(2)]
    before = [layer.reshape(-1, 3).copy() for layer in layers]
    table = rng.permutation(30)[:25].reshape(5, 5).astype(np.int32)
    where = rng.permutation(120)[:40].reshape(5, 8)
    if form == "table":
        reference.commit_kv(layers, table, prefix, accept)
        position = prefix[:, None] + np.arange(8)
        where = np.take_along_axis(table, position // 4, axis=1) * 4 + position % 4
    else:
        reference.commit_kv(layers, None, None, accept, cache_loc=where)
    for layer, old in zip(layers, before, strict=True):
        want = old.copy()
        for b in range(5):
            if tree.num_nodes[b] == 0:
                continue
            for i in range(accept.accept_token_num[b] + 1):
                want[where[b, i]] = old[where[b, accept.accept_index[b, i]]]
        assert_same(layer.reshape(-1, 3), want)
