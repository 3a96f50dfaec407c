from __future__ import annotations

import kdtree
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kdtree import reference
from kdtree.records import Tree
from support import Canary, assert_same, call, random_trees


def check_full(backend, tree, prefix):
    """ "full" into an array of its exact size; CPU ops also make that array themselves."""
    want = reference.expand_mask(tree, "full", prefix_lens=prefix)
    out = Canary(backend, want.shape, np.bool_)
    given_tree, given_prefix = backend.put(tree), backend.array(prefix)
    result = kdtree.expand_mask(given_tree, "full", prefix_lens=given_prefix, out=out.array)
    assert_same(backend.numpy(result), want, "full")
    out.check()
    if not backend.cuda:
        alone = kdtree.expand_mask(given_tree, "full", prefix_lens=given_prefix)
        assert_same(backend.numpy(alone), want, "full")


@given(seed=st.integers(0, 2**32 - 1), qlen=st.integers(1, 65))
def test_every_layout(backend, seed, qlen):
    rng = np.random.default_rng(seed)
    tree = random_trees(rng, 4, qlen, 9)
    prefix = rng.integers(0, 70, 4).astype(np.int32)
    prefix[rng.integers(4)] = 0
    for layout in ("qlen", "packed32"):
        got = call(backend, kdtree.expand_mask, tree, layout)
        assert_same(got, reference.expand_mask(tree, layout), layout)
    check_full(backend, tree, prefix)


def test_bits_at_num_nodes_and_above_are_ignored(backend):
    tree = Tree(visibility=np.full((3, 65), -1), num_nodes=np.array([0, 40, 65], np.int32))
    for layout in ("qlen", "packed32"):
        got = call(backend, kdtree.expand_mask, tree, layout)
        assert_same(got, reference.expand_mask(tree, layout), layout)
    check_full(backend, tree, np.array([3, 0, 1], np.int32))


def test_num_nodes_out_of_range_is_clamped(backend):
    tree = Tree(visibility=np.full((3, 4), -1), num_nodes=np.array([-9, 2**31 - 1, 5], np.int32))
    got = call(backend, kdtree.expand_mask, tree, "qlen")
    assert_same(got, reference.expand_mask(tree, "qlen"))


def test_full_in_a_larger_array_on_cuda(backend, rng):
    if not backend.cuda:
        pytest.skip("on CPU the size is exact")
    tree = random_trees(rng, 3, 9, 9)
    prefix = np.array([0, 40, 5], np.int32)
    want = reference.expand_mask(tree, "full", prefix_lens=prefix)
    out = Canary(backend, (want.size + 1000,), np.bool_)
    kdtree.expand_mask(backend.put(tree), "full", prefix_lens=backend.array(prefix), out=out.array)
    got = backend.numpy(out.array)
    assert_same(got[: want.size], want)
    assert not got[want.size :].any()
    # In a smaller one, nothing is written past its end.
    small = Canary(backend, (want.size - 50,), np.bool_)
    kdtree.expand_mask(
        backend.put(tree), "full", prefix_lens=backend.array(prefix), out=small.array
    )
    assert_same(backend.numpy(small.array), want[:-50])
    small.check()


def test_full_on_cuda_needs_out(backend, rng):
    if not backend.cuda:
        pytest.skip("CPU ops make it themselves")
    tree = backend.put(random_trees(rng, 2, 5, 9))
    with pytest.raises(ValueError, match="out"):
        kdtree.expand_mask(tree, "full", prefix_lens=backend.array(np.array([1, 2], np.int32)))


def test_long_prefixes(device, rng):
    tree = random_trees(rng, 3, 65, 9)
    check_full(device, tree, np.array([30_000, 0, 4097], np.int32))


def test_strided_visibility_is_used_as_it_is(backend, rng):
    tree = random_trees(rng, 6, 30, 9)
    used = np.array([30, 4, 20], np.int32)
    given_tree = Tree(
        visibility=backend.array(tree.visibility)[::2, :20], num_nodes=backend.array(used)
    )
    want = reference.expand_mask(Tree(visibility=tree.visibility[::2, :20], num_nodes=used), "qlen")
    assert_same(backend.numpy(kdtree.expand_mask(given_tree, "qlen")), want)


@pytest.mark.parametrize("batch", [0, 1])
def test_small_batches(backend, rng, batch):
    tree = random_trees(rng, batch, 7, 9)
    for layout in ("qlen", "packed32"):
        got = call(backend, kdtree.expand_mask, tree, layout)
        assert_same(got, reference.expand_mask(tree, layout), layout)
    check_full(backend, tree, np.full(batch, 3, np.int32))


@pytest.mark.parametrize("layout", ["qlen", "packed32"])
def test_prefix_lens_that_are_not_read_are_not_written_either(backend, layout):
    visibility, used = np.zeros((4, 5), np.int64), np.full(4, 5, np.int32)
    tree = backend.put(Tree(visibility=visibility, num_nodes=used))
    raw = backend.array(np.zeros(256, np.uint8))
    shape, dtype = ((4, 5, 5), bool) if layout == "qlen" else ((4, 5, 1), np.int32)
    out = backend.view(raw, 0, shape, dtype)
    with pytest.raises(ValueError, match="out: expected memory of its own, got an overlap"):
        kdtree.expand_mask(tree, layout, prefix_lens=backend.view(raw, 64, (4,), np.int32), out=out)
    assert not backend.numpy(raw).any()
