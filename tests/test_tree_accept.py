from __future__ import annotations

from dataclasses import replace

import kdtree
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kdtree import reference
from kdtree.records import Tree
from support import assert_same, call, draft_rows, random_parents, random_trees


def check(backend, tree, target):
    got = call(backend, kdtree.tree_accept, tree, target)
    assert_same(got, reference.tree_accept(tree, target), "accept")
    return got


def tree_of(parents, tokens, num_nodes=None):
    parents, tokens = np.array([parents], np.int32), np.array([tokens])
    used = np.array([parents.shape[1] if num_nodes is None else num_nodes], np.int32)
    return reference.tree_links(parents, used, draft_tokens=tokens)


@given(seed=st.integers(0, 2**32 - 1), qlen=st.integers(1, 65), vocab=st.integers(1, 4))
def test_any_tree(backend, seed, qlen, vocab):
    rng = np.random.default_rng(seed)
    tree = random_trees(rng, 8, qlen, vocab)
    check(backend, tree, rng.integers(0, vocab, (8, qlen)))


@given(seed=st.integers(0, 2**32 - 1), qlen=st.integers(1, 65))
def test_any_arrays_end_the_walk(backend, seed, qlen):
    """Links of a broken tree, or no tree at all."""
    rng = np.random.default_rng(seed)
    parents = rng.integers(-2, qlen + 2, (4, qlen)).astype(np.int32)
    used = rng.integers(-2, qlen + 3, 4).astype(np.int32)
    tokens, target = rng.integers(0, 2, (2, 4, qlen))
    check(backend, reference.tree_links(parents, used, draft_tokens=tokens), target)
    wild = Tree(
        draft_tokens=tokens,
        next_token=rng.integers(-2, qlen + 2, (4, qlen)),
        next_sibling=rng.choice([-(2**40), 0, 1, qlen - 1, qlen, 2**62], (4, qlen)),
        num_nodes=used,
    )
    check(backend, wild, target)


def test_token_0(backend):
    # Unused slots hold token 0, which is a token like any other.
    tree = tree_of([-1, 0, 1, -1], [5, 0, 0, 0], num_nodes=3)
    got = check(backend, tree, np.zeros((1, 4), int))
    assert got.accept_index.tolist() == [[0, 1, 2, -1]]
    assert got.accept_tokens.tolist() == [[0, 0, 0, -1]]
    got = check(backend, tree_of([-1, -1], [5, 0], num_nodes=1), np.zeros((1, 2), int))
    assert got.accept_token_num.tolist() == [0]


def test_duplicate_siblings_take_the_lowest_slot(backend):
    tree = tree_of([-1, 0, 0, 0, 1, 2], [9, 4, 7, 7, 1, 2])
    got = check(backend, tree, np.array([[7, 0, 2, 3, 0, 6]]))
    assert got.accept_index.tolist() == [[0, 2, 5, -1, -1, -1]]
    assert got.accept_tokens.tolist() == [[7, 2, 6, -1, -1, -1]]


def test_chain_of_65(backend):
    tokens = np.arange(65)
    tree = tree_of(np.arange(-1, 64), tokens)
    target = (tokens + 1)[None]
    got = check(backend, tree, target)
    assert got.accept_token_num.tolist() == [64]
    assert got.accept_tokens[0].tolist() == list(range(1, 66))
    target[0, 30] = 0
    assert check(backend, tree, target).accept_token_num.tolist() == [30]


def test_star_of_65(backend):
    tree = tree_of([-1] + [0] * 64, np.arange(65))
    for token, slot in [(64, 64), (1, 1), (33, 33)]:
        got = check(backend, tree, np.full((1, 65), token))
        assert got.accept_index[0, :2].tolist() == [0, slot]
    assert check(backend, tree, np.full((1, 65), 65)).accept_token_num.tolist() == [0]


def test_root_only_and_padding(backend):
    tree = tree_of([-1, 0], [3, 4], num_nodes=1)
    got = check(backend, tree, np.array([[4, 4]]))
    assert got.accept_index.tolist() == [[0, -1]]
    assert got.accept_tokens.tolist() == [[4, -1]]
    got = check(backend, tree_of([-1, 0], [3, 4], num_nodes=0), np.array([[4, 4]]))
    assert got.accept_index.tolist() == [[-1, -1]]
    assert got.accept_tokens.tolist() == [[-1, -1]]
    assert got.accept_token_num.tolist() == [0]


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_id_dtypes(backend, rng, dtype):
    tree = random_trees(rng, 6, 12, 2)
    target = rng.integers(0, 2, (6, 12))
    if dtype == np.int64:  # only equal in all 64 bits
        tree.draft_tokens = tree.draft_tokens + (1 << 40)
        target = target + (1 << 40) * rng.integers(0, 2, target.shape)
    names = ("draft_tokens", "next_token", "next_sibling")
    tree = replace(tree, **{name: getattr(tree, name).astype(dtype) for name in names})
    got = check(backend, tree, target.astype(dtype))
    assert got.accept_tokens.dtype == np.int64


def test_a_tree_that_contains_another_never_accepts_less(backend, rng):
    """Targets follow from the path, as a model's do."""
    logprobs, ids = draft_rows(rng, 64, 8, 8, ties=True)
    ids[:] = np.argsort(rng.random(ids.shape), axis=-1)  # siblings differ
    roots, prefix = np.zeros(64, int), np.zeros(64, np.int32)
    before = np.zeros(64, int)
    for budget in (0, 1, 2, 5, 13, 30, 64):
        tree = reference.build_ddtree(logprobs, ids, roots, prefix, budget=budget)
        target = np.zeros((64, budget + 1), int)
        for b, slot in np.ndindex(target.shape):
            path, at = [b], slot
            while at > 0:
                path.append(int(tree.draft_tokens[b, at]))
                at = tree.parents[b, at]
            target[b, slot] = hash(tuple(path)) % 3
        accepted = check(backend, tree, target).accept_token_num
        assert (accepted >= before).all()
        before = accepted
    assert before.max() > 2


def test_strided_inputs_are_used_as_they_are(backend, rng):
    tree = random_trees(rng, 8, 20, 2)
    tree.num_nodes = np.minimum(tree.num_nodes[::2], 15)
    target = rng.integers(0, 2, (12, 18))
    names = ("draft_tokens", "next_token", "next_sibling")
    part = replace(tree, **{name: getattr(tree, name)[::2, :15] for name in names})
    given_tree = replace(
        backend.put(tree), **{name: backend.array(getattr(tree, name))[::2, :15] for name in names}
    )
    got = kdtree.tree_accept(given_tree, backend.array(target)[::3, 2:17])
    assert_same(backend.get(got), reference.tree_accept(part, target[::3, 2:17]))


@pytest.mark.parametrize("batch", [0, 1, 65_537])
def test_batch_sizes(device, rng, batch):
    parents = random_parents(rng, min(batch, 1), 6)
    few = reference.tree_links(
        parents, np.full(len(parents), 6, np.int32), draft_tokens=rng.integers(0, 2, parents.shape)
    )
    target = rng.integers(0, 2, parents.shape)
    names = ("draft_tokens", "next_token", "next_sibling", "num_nodes")
    tree = Tree(**{name: np.repeat(getattr(few, name), batch, axis=0) for name in names})
    got = call(device, kdtree.tree_accept, tree, np.repeat(target, batch, axis=0))
    want = reference.tree_accept(few, target)
    assert_same(got.accept_index, np.repeat(want.accept_index, batch, axis=0))


def test_only_the_fields_it_reads_are_needed(backend, rng):
    tree = random_trees(rng, 3, 7, 2)
    target = rng.integers(0, 2, (3, 7))
    want = reference.tree_accept(tree, target)
    for name in ("parents", "depths", "positions", "visibility", "scores"):
        setattr(tree, name, None)
    assert_same(call(backend, kdtree.tree_accept, tree, target), want)
