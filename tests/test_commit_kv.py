from __future__ import annotations

import kdtree
import numpy as np
import pytest
from kdtree import reference
from kdtree.records import Accept
from support import BF16, F16, FP8, assert_same, random_trees, skip_unsupported

DTYPES = [F16, BF16, FP8, np.dtype("f4"), np.dtype("i8"), np.dtype("u1"), np.dtype("f8")]


def accepted(rng, batch, qlen):
    tree = random_trees(rng, batch, qlen, 2)
    return reference.tree_accept(tree, rng.integers(0, 2, (batch, qlen)))


def filled(rng, shape, dtype):
    """Any bits, NaN among them: rows are moved, not read as numbers."""
    dtype = np.dtype(dtype)
    size = int(np.prod(shape)) * dtype.itemsize
    return rng.integers(0, 256, size).astype(np.uint8).view(dtype).reshape(shape)


def check(backend, caches, block_table, prefix_lens, accept, **options):
    """The whole of every layer, moved rows and all the others, to the bit."""
    skip_unsupported(backend, caches, options)
    given = backend.put((caches, block_table, prefix_lens, accept))
    given_options = {k: backend.put(v) for k, v in options.items()}
    assert kdtree.commit_kv(*given, **given_options) is None
    want = [layer.copy() for layer in caches]
    reference.commit_kv(want, block_table, prefix_lens, accept, **options)
    got = backend.get(given[0])
    for layer in range(len(want)):
        assert_same(got[layer], want[layer], f"layer {layer}")
    assert_same(backend.get(given[1:]), (block_table, prefix_lens, accept))


def paged(rng, batch, qlen, page_size, accept, prefix_lens=None):
    """Pages of no other request, and wild entries where nothing is needed."""
    if prefix_lens is None:
        prefix_lens = rng.integers(0, 40, batch)
    needed = -(-(prefix_lens + qlen) // page_size)
    table = rng.choice(np.array([2**31 - 1, -7], np.int32), (batch, int(needed.max()) + 2))
    order = rng.permutation(int(needed.sum()) + 3)
    for b, at in enumerate(np.cumsum(needed) - needed):
        if accept.accept_index[b, 0] >= 0:
            table[b, : needed[b]] = order[at : at + needed[b]]
    return table, prefix_lens.astype(np.int32), len(order)


@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
@pytest.mark.parametrize("width", [1, 3, 64, 576])
@pytest.mark.parametrize("stacked", [False, True])
def test_against_the_oracle(backend, rng, page_size, width, stacked):
    accept = accepted(rng, 7, 12)
    table, prefix, pages = paged(rng, 7, 12, page_size, accept)
    layers = filled(rng, (3, pages, page_size, width), np.float16)
    check(backend, layers if stacked else list(layers), table, prefix, accept)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [5, 576])
def test_dtypes(backend, rng, dtype, width):
    accept = accepted(rng, 5, 9)
    table, prefix, pages = paged(rng, 5, 9, 8, accept)
    check(backend, list(filled(rng, (2, pages, 8, width), dtype)), table, prefix, accept)


@pytest.mark.parametrize("layers", [1, 61, 300])
def test_many_layers(backend, rng, layers):
    accept = accepted(rng, 3, 6)
    table, prefix, pages = paged(rng, 3, 6, 4, accept)
    check(backend, list(filled(rng, (layers, pages, 4, 16), np.float16)), table, prefix, accept)


@pytest.mark.parametrize("stacked", [False, True])
def test_caches_with_a_head_dimension(backend, rng, stacked):
    accept = accepted(rng, 4, 6)
    table, prefix, pages = paged(rng, 4, 6, 16, accept)
    layers = filled(rng, (2, pages, 16, 1, 24), np.float16)
    check(backend, layers if stacked else list(layers), table, prefix, accept)


def test_cache_loc(backend, rng):
    accept = accepted(rng, 6, 10)
    layers = filled(rng, (2, 25, 4, 32), np.float16)
    loc = rng.permutation(100)[:60].reshape(6, 10)
    check(backend, list(layers), None, None, accept, cache_loc=loc)
    prefix = np.zeros(6, np.int32)
    check(backend, list(layers), None, prefix, accept, cache_loc=loc)


def test_a_chain_of_65_through_a_tree_of_65(backend, rng):
    """Every row moves down by its own distance, onto rows that move too."""
    steps = np.sort(rng.permutation(np.arange(1, 65))[:40])
    index = np.full((2, 65), -1, np.int32)
    index[0, :41] = [0, *steps]
    index[1] = np.arange(65)  # the identity: nothing changes
    accept = Accept(index, np.array([40, 64], np.int32), np.zeros((2, 65), int))
    table, prefix, pages = paged(rng, 2, 65, 16, accept)
    check(backend, list(filled(rng, (2, pages, 16, 576), np.float16)), table, prefix, accept)


def test_rows_that_swap(backend, rng):
    # All rows are read before any is written, whatever the order.
    index = np.array([[2, 3, 0, 1, -1]], np.int32)
    accept = Accept(index, np.array([3], np.int32), np.zeros((1, 5), int))
    table, prefix, pages = paged(rng, 1, 5, 2, accept)
    check(backend, list(filled(rng, (2, pages, 2, 576), np.float16)), table, prefix, accept)


def test_of_rows_to_one_place_the_last_wins(backend, rng):
    # Also one that stays where it is, after others that went there.
    index = rng.integers(0, 24, (20, 24)).astype(np.int32)
    index = np.where(rng.random(index.shape) < 0.5, np.arange(24, dtype=np.int32), index)
    accept = Accept(index, rng.integers(0, 24, 20).astype(np.int32), np.zeros((20, 24), int))
    loc = 16 * np.arange(20)[:, None] + rng.integers(0, 16, (20, 24))
    layers = filled(rng, (2, 80, 4, 8), np.float16)
    check(backend, list(layers), None, None, accept, cache_loc=loc)


def test_rows_outside_the_cache_are_left_alone(backend, rng):
    accept = accepted(rng, 12, 8)
    accept.accept_token_num[accept.accept_index[:, 0] >= 0] = 7
    used = accept.accept_index[:, 0] >= 0
    accept.accept_index[used] = np.arange(8)[::-1]
    layers = filled(rng, (2, 30, 4, 8), np.float16)
    loc = rng.permutation(120)[:96].reshape(12, 8)
    loc[rng.random(loc.shape) < 0.3] = rng.choice([-1, 120, 2**62, -(2**62)])
    check(backend, list(layers), None, None, accept, cache_loc=loc)
    table = rng.permutation(30)[:24].reshape(12, 2).astype(np.int32)
    table[::3, 1] = [2**31 - 1, -7, 30, -(2**31)]
    prefix = np.array([0, 3, -2, 1000, 2**31 - 1, -(2**31), 5, 7, 1, 2, 4, 6], np.int32)
    check(backend, list(layers), table, prefix, accept)


def test_wild_accept_records_do_no_harm(backend, rng):
    index = rng.integers(-3, 12, (10, 8)).astype(np.int32)
    index[3] = 2**31 - 1
    count = np.array([-1, 0, 7, 8, 2**31 - 1, -(2**31), 3, 4, 5, 6], np.int32)
    accept = Accept(index, count, np.zeros((10, 8), int))
    loc = np.arange(80).reshape(10, 8)
    check(backend, list(filled(rng, (2, 20, 4, 8), np.float16)), None, None, accept, cache_loc=loc)


def test_strided_layers_are_used_as_they_are(backend, rng):
    accept = accepted(rng, 5, 7)
    table, prefix, pages = paged(rng, 5, 7, 4, accept)
    whole = filled(rng, (pages, 2, 4, 40), np.float16)  # layers side by side in a page
    given = backend.array(whole)
    layers = [given[:, layer, :, 4:36] for layer in range(2)]
    kdtree.commit_kv(layers, *backend.put((table, prefix, accept)))
    reference.commit_kv([whole[:, layer, :, 4:36] for layer in range(2)], table, prefix, accept)
    assert_same(backend.numpy(given), whole)


@pytest.mark.parametrize("batch", [0, 1, 5000])
def test_batch_sizes(device, rng, batch):
    accept = accepted(rng, batch, 3)
    layers = list(filled(rng, (2, 3 * batch + 1, 1, 8), np.float16))
    loc = rng.permutation(3 * batch).reshape(batch, 3)
    check(device, layers, None, None, accept, cache_loc=loc)


def test_more_columns_than_one_launch_takes(device, rng):
    accept = Accept(np.array([[1, 0]], np.int32), np.array([1], np.int32), np.zeros((1, 2), int))
    layers = filled(rng, (3, 1, 2, 2**23 - 1), "u1")
    check(device, list(layers), None, None, accept, cache_loc=np.array([[0, 1]]))


def test_rows_past_four_million(device, rng):
    """Offsets past 2^31 elements. Untouched pages of a CPU cache cost no memory."""
    if device.cuda:
        import torch

        free = torch.cuda.mem_get_info()[0]
        if free < 16 * 2**30:
            pytest.skip(f"needs 16 GB of GPU memory, {free / 2**30:.0f} free")
    cache = device.empty((4_200_000, 1, 576), np.float16)
    rows = filled(rng, (4, 1, 576), np.float16)
    cache[4_100_000:4_100_004] = device.array(rows)
    loc = np.array([[4_100_003, 4_100_001, 4_100_000, 4_100_002]])
    accept = Accept(
        np.array([[0, 2, 3, -1]], np.int32), np.array([2], np.int32), np.zeros((1, 4), int)
    )
    kdtree.commit_kv([cache], None, None, device.put(accept), cache_loc=device.array(loc))
    got = device.numpy(cache[4_100_000:4_100_004])
    assert_same(got, rows[[2, 0, 2, 3]])
