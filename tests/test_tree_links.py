from __future__ import annotations

import kdtree
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kdtree import reference
from support import assert_same, call, draft_rows, random_parents


def check(backend, parents, num_nodes, **options):
    got = call(backend, kdtree.tree_links, parents, num_nodes, **options)
    assert_same(got, reference.tree_links(parents, num_nodes, **options), "tree")
    return got


@given(seed=st.integers(0, 2**32 - 1), qlen=st.integers(1, 65), broken=st.booleans())
def test_any_parents(backend, seed, qlen, broken):
    rng = np.random.default_rng(seed)
    parents = random_parents(rng, 5, qlen)
    if broken:
        holes = rng.random(parents.shape) < 0.2
        parents[holes] = rng.integers(-3, qlen + 3, holes.sum())
        parents[0] = rng.integers(-(2**31), 2**31, qlen)
    used = rng.integers(-2, qlen + 3, 5).astype(np.int32)
    prefix = rng.integers(0, 2**31, 5).astype(np.int32)
    tokens = rng.integers(0, 99, (5, qlen))
    check(backend, parents, used, prefix_lens=prefix, draft_tokens=tokens)


def test_cycles_and_orphans_end_as_not_visible(backend):
    parents = np.array(
        [
            [-1, 2, 1, 0],  # 1 and 2 are each other's parent
            [-1, 1, 0, 2],  # 1 is its own
            [-1, -1, 1, 1],  # an orphan and its children
            [3, 0, 0, 0],  # the root's own entry means nothing
            [-1, 0, 2**31 - 1, -(2**31)],
        ],
        np.int32,
    )
    tree = check(backend, parents, np.full(5, 4, np.int32))
    assert tree.visibility.tolist() == [
        [0, 0, 0, 4],
        [0, 0, 2, 6],
        [0, 0, 0, 0],
        [0, 1, 2, 4],
        [0, 1, 0, 0],
    ]
    assert tree.next_token[:, 0].tolist() == [3, 2, -1, 1, 1]
    assert tree.next_token[2].tolist() == [-1] * 4


def test_chain_and_star_of_65(backend):
    chain = np.arange(-1, 64, dtype=np.int32)
    star = np.zeros(65, np.int32)
    tree = check(backend, np.stack([chain, star]), np.array([65, 65], np.int32))
    assert tree.visibility[0, 64] == -1
    assert tree.depths[0, 64] == 64
    assert tree.visibility[1, 64] == -(2**63)
    assert tree.next_sibling[1, 1:].tolist() == [*range(2, 65), -1]


def test_passes_through_what_it_was_given(backend):
    parents, used, tokens = backend.put(
        (np.array([[-1, 0]], np.int32), np.array([2], np.int32), np.array([[3, 4]]))
    )
    tree = kdtree.tree_links(parents, used, draft_tokens=tokens)
    assert tree.parents is parents
    assert tree.num_nodes is used
    assert tree.draft_tokens is tokens
    assert tree.scores is None


def test_equals_the_links_of_a_built_tree(backend, rng):
    logprobs, ids = draft_rows(rng, 8, 6, 6, ties=False)
    prefix = rng.integers(0, 50, 8).astype(np.int32)
    roots = np.array([1, -1, 1, 1, 1, 1, 1, 1])
    built = kdtree.build_ddtree(*backend.put((logprobs, ids, roots, prefix)), budget=20)
    links = kdtree.tree_links(built.parents, built.num_nodes, prefix_lens=backend.array(prefix))
    built, links = backend.get(built), backend.get(links)
    for name in ("depths", "positions", "next_token", "next_sibling", "visibility"):
        assert_same(getattr(links, name), getattr(built, name), name)


def test_strided_parents_are_used_as_they_are(backend, rng):
    parents = random_parents(rng, 6, 30)
    used = np.array([20, 15, 3], np.int32)
    got = kdtree.tree_links(backend.array(parents)[::2, :20], backend.array(used))
    want = reference.tree_links(parents[::2, :20], used)
    assert_same(backend.numpy(got.visibility), want.visibility)
    assert_same(backend.numpy(got.next_sibling), want.next_sibling)


@pytest.mark.parametrize("batch", [0, 1, 65_537])
def test_batch_sizes(device, rng, batch):
    few = random_parents(rng, min(batch, 1), 5)
    parents = np.repeat(few, batch, axis=0)
    got = call(device, kdtree.tree_links, parents, np.full(batch, 5, np.int32))
    want = reference.tree_links(few, np.full(len(few), 5, np.int32))
    assert_same(got.visibility, np.repeat(want.visibility, batch, axis=0))
