from __future__ import annotations

import kdtree
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kdtree import reference
from support import FULL, assert_close, assert_same, call, draft_rows


def check(backend, logprobs, ids, roots, prefix, **options):
    """Every integer to the bit; so are the scores, whose sums are float64 on both sides."""
    got = call(backend, kdtree.build_ddtree, logprobs, ids, roots, prefix, **options)
    assert_same(got, reference.build_ddtree(logprobs, ids, roots, prefix, **options), "tree")
    return got


def case(rng, batch, depth, k, *, ties=False, dead=0.0):
    logprobs, ids = draft_rows(rng, batch, depth, k, ties=ties, dead=dead)
    roots = rng.integers(0, 163_840, batch)
    prefix = rng.integers(0, 100_000, batch).astype(np.int32)
    return logprobs, ids, roots, prefix


def random_options(rng, budget):
    """chain_seed in a third of the calls, a stop rule in a quarter."""
    options = {"budget": budget, "chain_seed": bool(rng.random() < 0.33)}
    if rng.random() < 0.25:
        cost = np.cumsum(rng.random(budget + 1)) * rng.choice([0.003, 0.05, 0.3])
        options |= {"node_cost": cost.astype(np.float32), "base_cost": float(rng.random() + 0.5)}
    return options


def test_scores_that_differ_in_their_last_bits(device, rng):
    inputs = case(rng, 20, 8, 16, ties=True)
    near = -1 - rng.integers(0, 6, inputs[0].shape) * 2.0**-23
    inputs[0][:] = -np.sort(-near.astype(np.float32), axis=-1)
    for chain_seed in (False, True):
        check(device, *inputs, budget=64, chain_seed=chain_seed)


@pytest.mark.parametrize("ties", [False, True])
def test_log_probs_of_a_drafter(device, rng, ties):
    """From one that is not sure, whose nodes are the root's children, to one that mostly is."""
    for scale in (1.5, 3, 6):
        logits = np.sort(scale * rng.standard_normal((30, 15, 4000)))[..., ::-1]
        if ties:  # as of a 16-bit type
            logits = np.round(logits * 16) / 16
        inputs = case(rng, 30, 15, 64)
        inputs[0][:] = logits[..., :64] - np.log(np.exp(logits).sum(-1, keepdims=True))
        for budget in (64, 33):
            check(device, *inputs, budget=budget)


def test_random_cases(device, rng):
    """200,000 with KDTREE_TEST_FULL=1, half of them full of exact ties."""
    for number in range(2000 if FULL else 40):
        depth, k = int(rng.integers(0, 17)), int(rng.integers(1, 65))
        options = random_options(rng, int(rng.integers(0, 65)))
        dead = float(rng.choice([0.0, 0.0, 0.5, 3.0]))
        inputs = case(rng, 100, depth, k, ties=number % 2 == 0, dead=dead)
        inputs[2][rng.random(100) < 0.03] = -1
        check(device, *inputs, **options)


@given(
    seed=st.integers(0, 2**32 - 1),
    depth=st.integers(0, 16),
    k=st.integers(1, 64),
    budget=st.integers(0, 64),
    ties=st.booleans(),
)
def test_any_case(backend, seed, depth, k, budget, ties):
    rng = np.random.default_rng(seed)
    inputs = case(rng, 3, depth, k, ties=ties, dead=0.3)
    check(backend, *inputs, **random_options(rng, budget))


@pytest.mark.parametrize(
    ("depth", "k", "budget"),
    [(0, 1, 64), (1, 1, 1), (1, 64, 64), (64, 1, 64), (100, 2, 64), (16, 64, 64), (3, 3, 0)],
)
@pytest.mark.parametrize("chain_seed", [False, True])
def test_limits(backend, rng, depth, k, budget, chain_seed):
    check(backend, *case(rng, 4, depth, k, ties=True), budget=budget, chain_seed=chain_seed)


def test_all_equal_scores_come_in_lexicographic_order(backend):
    # With log-prob 0 everywhere, a prefix precedes its extensions: the tree is a chain.
    inputs = np.zeros((1, 8, 8), np.float32), np.zeros((1, 8, 8), int), np.array([1]), np.int32([0])
    tree = check(backend, *inputs, budget=12)
    assert tree.parents[0].tolist() == [-1, 0, 1, 2, 3, 4, 5, 6, 7, 7, 7, 7, 7]


def test_sums_that_differ_in_the_last_bit(backend, rng):
    # Close log-probs: float32 sums, or sums in another order, would order them differently.
    base = rng.standard_normal((50, 6, 1)).astype(np.float32)
    logprobs = base - 1e-7 * rng.integers(0, 8, (50, 6, 12)).astype(np.float32)
    logprobs = -np.sort(-logprobs, axis=-1)
    ids = rng.integers(0, 99, logprobs.shape)
    check(backend, logprobs, ids, np.arange(50), np.zeros(50, np.int32), budget=64)


def test_dead_candidates(backend):
    inf, nan = np.inf, np.nan
    rows = [
        [[-1, -inf, -2], [-1, -1, -1]],  # what follows a dead candidate is dead
        [[nan, -1, -2], [-1, -1, -1]],
        [[-1, -2, nan], [-inf, -1, -1]],
        [[-inf] * 3, [nan] * 3],
    ]
    ids = np.arange(24).reshape(4, 2, 3)
    tree = check(
        backend, np.array(rows, np.float32), ids, np.arange(4), np.zeros(4, np.int32), budget=20
    )
    assert tree.num_nodes.tolist() == [5, 1, 3, 1]
    assert np.isfinite(tree.scores[np.arange(21) < tree.num_nodes[:, None]]).all()


@pytest.mark.parametrize("ties", [False, True])
def test_scores_of_any_sign(device, rng, ties):
    """Raw logits instead of log-probs: sums rise and fall, cross zero and come to be equal."""
    for depth, k, budget in ((15, 64, 64), (6, 7, 40), (64, 3, 64)):
        logprobs, ids, roots, prefix = case(rng, 40, depth, k, ties=ties)
        logprobs += rng.integers(0, 5, (40, depth, 1)).astype(np.float32) / 2
        logprobs[rng.random(logprobs.shape) < 0.05] *= np.float32(-0.0)
        logprobs = -np.sort(-logprobs, axis=-1)
        for chain_seed in (False, True):
            check(device, logprobs, ids, roots, prefix, budget=budget, chain_seed=chain_seed)


@pytest.mark.parametrize("depth", [30, 31, 32, 33, 40, 63])
def test_a_long_chain_and_what_hangs_on_it(device, rng, depth):
    """Up to 64 entries to choose from, of which the last to be opened may be the best."""
    for ties in (False, True):
        logprobs, ids, roots, prefix = case(rng, 30, depth, 40, ties=ties)
        logprobs[:, :, 0] = 0 if ties else -np.geomspace(2, 1e-3, depth)
        logprobs = -np.sort(-logprobs, axis=-1)
        check(device, logprobs, ids, roots, prefix, budget=64, chain_seed=True)


@pytest.mark.parametrize("budget", [31, 32, 33, 34, 62, 63, 64])
def test_a_child_of_every_node(device, rng, budget):
    """As many nodes with something left to take as there can be: the root's children are many, and
    each has a child, which costs about as much."""
    logprobs, ids, roots, prefix = case(rng, 40, 2, 64, ties=False)
    logprobs[:, 0] = -3 - np.sort(rng.random((40, 64)), axis=-1)
    logprobs[:, 1] = np.float32(-0.5) * rng.random((40, 1)) - np.arange(64)
    check(device, logprobs, ids, roots, prefix, budget=budget)


@pytest.mark.parametrize("options", [{}, {"chain_seed": True}])
def test_infinite_candidates(backend, rng, options):
    logprobs, ids, roots, prefix = case(rng, 40, 4, 5, ties=False)
    logprobs[:, :, 0][rng.random((40, 4)) < 0.4] = np.inf
    logprobs[:, 1, :3] = np.inf
    cost = np.linspace(0.1, 1, 13).astype(np.float32)
    for stop in ({}, {"node_cost": cost, "base_cost": 1.0}):
        check(backend, logprobs, ids, roots, prefix, budget=12, **options, **stop)


def test_padding_requests(backend, rng):
    logprobs, ids, roots, prefix = case(rng, 5, 4, 4)
    roots[[0, 3]] = [-1, -(2**40)]
    tree = check(backend, logprobs, ids, roots, prefix, budget=10)
    for b in (0, 3):
        assert tree.num_nodes[b] == 0
        assert (tree.parents[b] == -1).all()
        assert not tree.draft_tokens[b].any()
        assert np.isneginf(tree.scores[b]).all()
        assert (tree.positions[b] == prefix[b]).all()


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_id_dtypes(backend, rng, dtype):
    logprobs, ids, roots, prefix = case(rng, 3, 4, 5)
    if dtype == np.int64:
        ids = ids + 2**40
        roots = roots + 2**40
    tree = check(backend, logprobs, ids.astype(dtype), roots.astype(dtype), prefix, budget=16)
    assert tree.draft_tokens.dtype == np.int64


def test_node_cost_stops_the_tree(backend, rng):
    inputs = case(rng, 40, 8, 8)
    cost = np.linspace(0, 2, 65).astype(np.float32)
    tree = check(backend, *inputs, node_cost=cost, base_cost=1.0)
    whole = check(backend, *inputs)
    assert (tree.num_nodes < whole.num_nodes).any()
    for b in range(40):  # the same tree, cut short
        n = tree.num_nodes[b]
        assert_same(tree.draft_tokens[b, :n], whole.draft_tokens[b, :n])
    free = check(backend, *inputs, node_cost=np.zeros(65, np.float32), base_cost=1.0)
    assert_same(free, whole)
    steep = np.where(np.arange(65) > 8, np.float32(1e6), cost)
    chain = check(backend, *inputs, node_cost=100 * steep, base_cost=1.0, chain_seed=True)
    assert (chain.num_nodes == 9).all()  # the chain is not subject to the rule


def test_node_cost_takes_no_node_for_an_equal_value(backend):
    # Score 0 gains 1 a node: with cost n + 1 the value is 1 for every n.
    inputs = np.zeros((1, 4, 1), np.float32), np.zeros((1, 4, 1), int), np.array([1]), np.int32([0])
    cost = np.arange(5, dtype=np.float32)
    assert check(backend, *inputs, budget=4, node_cost=cost, base_cost=1.0).num_nodes[0] == 1
    assert check(backend, *inputs, budget=4, node_cost=cost, base_cost=1.5).num_nodes[0] == 5


@pytest.mark.parametrize("batch", [0, 1, 20_000])
def test_batch_sizes(device, rng, batch):
    few = case(rng, min(batch, 8), 3, 4)
    inputs = [np.concatenate([x] * max(batch // 8, 1)) for x in few]
    got = call(device, kdtree.build_ddtree, *inputs, budget=6)
    want = reference.build_ddtree(*few, budget=6)
    for name in ("draft_tokens", "visibility", "next_sibling", "num_nodes"):
        tiled = np.concatenate([getattr(want, name)] * max(batch // 8, 1))
        assert_same(getattr(got, name), tiled, name)


def test_strided_inputs_are_used_as_they_are(backend, rng):
    logprobs, ids, roots, prefix = case(rng, 6, 8, 12)
    want = reference.build_ddtree(
        logprobs[::2, 1:7:2, :5], ids[1::2, :6:2, 3:8], roots[:3], prefix[:3], budget=9
    )
    a, b, c, d = backend.put((logprobs, ids, roots, prefix))
    got = kdtree.build_ddtree(a[::2, 1:7:2, :5], b[1::2, :6:2, 3:8], c[:3], d[:3], budget=9)
    assert_same(backend.get(got), want)


def test_scores_are_paths(backend, rng):
    logprobs, ids, roots, prefix = case(rng, 4, 6, 6)
    tree = call(backend, kdtree.build_ddtree, logprobs, ids, roots, prefix, budget=30)
    for b, slot in np.ndindex(4, 31):
        path, at = 0.0, slot
        while at > 0:
            rank = ids[b, tree.depths[b, at] - 1].tolist().index(tree.draft_tokens[b, at])
            path += float(logprobs[b, tree.depths[b, at] - 1, rank])
            at = tree.parents[b, at]
        assert_close(tree.scores[b, slot], np.float64(path), atol=1e-5)
