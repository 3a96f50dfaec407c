"""kdtree.interop: other engines' trees, masks and caches, against the reference."""

from __future__ import annotations

import importlib

import kdtree
import numpy as np
import pytest
from kdtree import reference
from support import TorchBackend, assert_same, missing_backends, random_parents, random_trees

torch = pytest.importorskip("torch", reason="torch is not installed")
interop = importlib.import_module("kdtree.interop")

QLENS = [1, 2, 7, 8, 9, 16, 17, 32, 33, 64, 65]


@pytest.fixture(params=["torch", "torch-cuda"])
def on(request: pytest.FixtureRequest) -> TorchBackend:
    if request.param in missing_backends():
        pytest.skip(missing_backends()[request.param])
    return TorchBackend("cpu" if request.param == "torch" else "cuda")


def whole_trees(rng, batch, qlen):
    """Every slot used, as the engines' trees of fixed width are."""
    num_nodes = np.full(batch, qlen, np.int32)
    prefix = rng.integers(0, 50, batch).astype(np.int32)
    tokens = rng.integers(0, 3, (batch, qlen))
    parents = random_parents(rng, batch, qlen)
    return prefix, reference.tree_links(parents, num_nodes, prefix_lens=prefix, draft_tokens=tokens)


@pytest.mark.parametrize("qlen", QLENS)
def test_masks_of_other_engines(on, rng, qlen):
    prefix, tree = whole_trees(rng, 4, qlen)
    want = reference.expand_mask(tree, "qlen")
    given = on.put(tree)
    layouts = {
        "qlen": kdtree.expand_mask(given, "qlen"),
        "packed32": kdtree.expand_mask(given, "packed32"),
        "full": on.array(reference.expand_mask(tree, "full", prefix_lens=prefix)),
    }
    if qlen <= 32:
        layouts["bits"] = interop.sglang_mask(given)
        bytes = np.packbits(want, axis=-1, bitorder="little")
        size = layouts["bits"].element_size()
        assert size == {1: 1, 2: 2, 3: 4, 4: 4}[bytes.shape[-1]]
        got = layouts["bits"].cpu().numpy().view(np.uint8).reshape(4, qlen, size)
        assert_same(got[..., : bytes.shape[-1]].copy(), bytes)
    for layout, mask in layouts.items():
        prefix_lens = on.array(prefix) if layout == "full" else None
        for given_mask in (mask, mask.flatten()):
            got = interop.read_mask(given_mask, layout, qlen, prefix_lens=prefix_lens)
            assert_same(on.get(got), want)
        # A longer buffer, of which the first requests are meant.
        longer = torch.cat([mask.flatten(), mask.flatten()[:7]])
        got = interop.read_mask(longer, layout, qlen, batch=4, prefix_lens=prefix_lens)
        assert_same(on.get(got), want)
        assert_same(on.get(interop.visibility_of(got)), tree.visibility)
        assert_same(on.get(interop.parents_of(got)), tree.parents)
    if qlen > 1:
        got = interop.read_mask(layouts["qlen"].to(torch.uint8), "qlen", qlen)
        assert_same(on.get(got), want)


def test_a_whole_tree_of_a_mask(on, rng):
    trees = random_trees(rng, 6, 9, 4)
    prefix = trees.positions[:, 0].astype(np.int32)
    got = interop.tree_of(
        on.array(reference.expand_mask(trees, "qlen")),
        num_nodes=on.array(trees.num_nodes),
        prefix_lens=on.array(prefix),
        draft_tokens=on.array(trees.draft_tokens),
    )
    assert_same(on.get(got), trees)
    prefix, whole = whole_trees(rng, 3, 12)
    got = interop.tree_of(on.array(reference.expand_mask(whole, "qlen")))
    assert_same(on.get(got.visibility), whole.visibility)
    assert_same(on.get(got.next_sibling), whole.next_sibling)


def test_masks_that_do_not_fit_are_refused(on):
    mask = torch.zeros(10, dtype=torch.bool, device=on.device())
    with pytest.raises(ValueError, match="mask: expected a multiple of 9 elements, got"):
        interop.read_mask(mask, "qlen", 3)
    with pytest.raises(ValueError, match="mask: expected 2 x 9 elements, got"):
        interop.read_mask(mask, "qlen", 3, batch=2)
    with pytest.raises(ValueError, match="prefix_lens: expected an array"):
        interop.read_mask(mask, "full", 3)
    with pytest.raises(ValueError, match="layout: expected 'qlen'"):
        interop.read_mask(mask, "rows", 3)
    with pytest.raises(ValueError, match="expected unsigned words of at least 9 bits"):
        interop.read_mask(mask[:9].to(torch.uint8), "bits", 9)
    with pytest.raises(TypeError, match="mask: expected dtype int32"):
        interop.read_mask(mask, "packed32", 5)
    with pytest.raises(TypeError, match="mask: expected dtype bool or uint8"):
        interop.read_mask(mask[:9].int(), "qlen", 3)
    for qlen in (0, 66):
        with pytest.raises(ValueError, match=rf"qlen: expected 1\.\.65, got {qlen}"):
            interop.read_mask(mask, "qlen", qlen)
    with pytest.raises(ValueError, match="mask: expected -1 x 9 elements"):
        interop.read_mask(mask, "qlen", 3, batch=-1)
    two = torch.zeros(2, dtype=torch.int32, device=on.device())
    with pytest.raises(ValueError, match=r"prefix_lens: expected shape \[3\], got \[2\]"):
        interop.read_mask(mask, "full", 2, batch=3, prefix_lens=two)
    with pytest.raises(ValueError, match="mask: expected at least 2 x 3 x 3 elements"):
        interop.read_mask(mask, "full", 3, prefix_lens=two)
    for refused in (torch.zeros(1, 66, 66), torch.zeros(2, 4, 5), torch.zeros(4, 4)):
        for call in (interop.visibility_of, interop.parents_of, interop.tree_of):
            with pytest.raises(ValueError, match=r"mask: expected shape \[B, Q, Q\]"):
                call(refused.bool())
            with pytest.raises(TypeError, match="mask: expected dtype bool"):
                call(refused)
    square = torch.ones(1, 4, 4, dtype=torch.bool, device=on.device())
    for out in (torch.zeros(1, 4, dtype=torch.int32), torch.zeros(1, 5, dtype=torch.int64)):
        with pytest.raises(ValueError, match=r"out: expected int64 \[1, 4\]"):
            interop.visibility_of(square, out.to(on.device()))
    with pytest.raises(ValueError, match=r"num_nodes: expected shape \[1\], got \[2\]"):
        interop.parents_of(square, two)
    wide = kdtree.Tree(visibility=torch.zeros(1, 33, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"tree: expected Q of 1\.\.32"):
        interop.sglang_mask(wide)


def test_what_a_full_mask_lacks_is_false(on, rng):
    """Its length against prefix_lens is the device's knowledge: no read outside, no invention."""
    prefix, tree = whole_trees(rng, 3, 5)
    full = reference.expand_mask(tree, "full", prefix_lens=prefix)
    want = reference.expand_mask(tree, "qlen")
    wide = prefix + 5
    start = 5 * (np.cumsum(wide) - wide) + prefix
    slots = np.arange(5)
    at = start[:, None, None] + slots[:, None] * wide[:, None, None] + slots
    for size in range(3 * 5 * 5, len(full), 11):
        got = interop.read_mask(on.array(full[:size]), "full", 5, prefix_lens=on.array(prefix))
        assert_same(on.get(got), want & (at < size))
    negative = on.array(np.array([-1000, 3, 1 << 30], np.int32))
    ones = on.array(np.ones(100, np.bool_))
    assert not interop.read_mask(ones, "full", 5, prefix_lens=negative)[[0, 2]].any()


def test_masks_without_the_ancestors_ancestors(on, rng):
    """Only the last ancestor counts, as the parent; whatever is above the diagonal is ignored."""
    mask = rng.random((40, 65, 65)) < 0.1
    parents = np.full((40, 65), -1, np.int32)
    for b, slot in np.ndindex(40, 65):
        if slot:
            parents[b, slot] = max(np.flatnonzero(mask[b, slot, :slot]), default=0)
    num_nodes = rng.integers(0, 66, 40).astype(np.int32)
    parents[np.arange(65) >= num_nodes[:, None]] = -1
    got = on.get(interop.tree_of(on.array(mask), num_nodes=on.array(num_nodes)))
    want = reference.tree_links(parents, num_nodes)
    assert_same(got, want)


def test_retrieve_global_and_local(on, rng):
    _, tree = whole_trees(rng, 3, 5)
    given = on.put(tree)
    index, next_token, next_sibling = interop.sglang_retrieve(given)
    assert_same(on.get(index), np.arange(15).reshape(3, 5))
    assert next_token is given.next_token
    assert next_sibling is given.next_sibling
    index, _, _ = interop.sglang_retrieve(given, local=True)
    assert_same(on.get(index), np.tile(np.arange(5), (3, 1)))


@pytest.mark.parametrize("depth", [None, 4])
def test_accept_in_sglangs_form(on, rng, depth):
    batch, qlen = 20, 8
    _, tree = whole_trees(rng, batch, qlen)
    predict = rng.integers(0, 3, (batch, qlen))
    given = on.put(tree)
    back = interop.sglang_tree(given.draft_tokens.flatten(), given.next_token, given.next_sibling)
    assert back.next_token is given.next_token
    flat, index, count, accept = interop.sglang_accept(back, on.array(predict), depth=depth)
    want = reference.tree_accept(tree, predict)
    assert_same(on.get(accept), want)
    assert_same(on.get(count), want.accept_token_num)
    assert want.accept_token_num.max() > 1
    tokens = np.zeros(batch * qlen, np.int32)
    rows = np.full((batch, qlen), -1, np.int32)
    for b in range(batch):
        for i in range(want.accept_token_num[b] + 1):
            rows[b, i] = b * qlen + want.accept_index[b, i]
            tokens[rows[b, i]] = predict[b, want.accept_index[b, i]]
    assert_same(on.get(flat), tokens)
    assert_same(on.get(index), rows[:, :depth])


# ---- FlashInfer's two parts of a cache


@pytest.mark.parametrize("padded", [False, True])
def test_two_views_of_one_cache_are_the_cache(on, padded):
    cache = torch.randn(6, 4, 640 if padded else 576, device=on.device()).half()[2:, :, -576:]
    got = interop.fused_cache(cache[..., :512], cache[..., 512:])
    assert got.data_ptr() == cache.data_ptr()
    assert got.stride() == cache.stride()
    assert torch.equal(got, cache)


def test_a_true_split_is_refused(on):
    cache = torch.zeros(3, 4, 576, device=on.device())
    ckv, kpe = cache[..., :512], cache[..., 512:]
    with pytest.raises(ValueError, match="kpe: expected the 64 columns after ckv's 512"):
        interop.fused_cache(ckv, kpe.contiguous())
    with pytest.raises(ValueError, match="kpe: expected the 64 columns after ckv's 512"):
        interop.fused_cache(ckv[:-1], kpe[1:])
    with pytest.raises(ValueError, match="ckv: expected shape"):
        interop.fused_cache(cache, kpe)
    with pytest.raises(ValueError, match="kpe: expected the pages, dtype and device of ckv"):
        interop.fused_cache(ckv, kpe[:-1])


# ---- compiled, and in a graph


def test_compiles_without_a_break(on, rng):
    prefix, tree = whole_trees(rng, 3, 9)
    given = on.put(tree)
    held = kdtree.expand_mask(given, "qlen").clone()
    full = on.array(reference.expand_mask(tree, "full", prefix_lens=prefix))
    lens, predict = on.array(prefix), on.array(rng.integers(0, 3, (3, 9)))

    def work(held, full, lens, predict):
        made = interop.tree_of(interop.read_mask(held, "qlen", 9), draft_tokens=predict)
        words = interop.visibility_of(interop.read_mask(full, "full", 9, prefix_lens=lens))
        return words, interop.sglang_mask(made), interop.sglang_accept(made, predict)[:3]

    arguments = held, full, lens, predict
    compiled = torch.compile(work, backend="aot_eager", fullgraph=True)
    assert_same(on.get(compiled(*arguments)), on.get(work(*arguments)))


def test_runs_in_a_cuda_graph(on, rng):
    if not on.cuda:
        pytest.skip("CUDA graphs are CUDA's")
    prefix, tree = whole_trees(rng, 4, 9)
    given = on.put(tree)
    held = kdtree.expand_mask(given, "qlen").clone()
    full = on.array(reference.expand_mask(tree, "full", prefix_lens=prefix))
    lens, predict = on.array(prefix), on.array(rng.integers(0, 3, (4, 9)))

    def work():
        words = interop.visibility_of(interop.read_mask(held, "qlen", 9))
        again = interop.visibility_of(interop.read_mask(full, "full", 9, prefix_lens=lens))
        return (
            words,
            again,
            interop.sglang_accept(interop.tree_of(held, draft_tokens=predict), predict)[:3],
        )

    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = work()
    graph.replay()
    assert_same(on.get(got), on.get(work()))
    assert_same(on.get(got[0]), tree.visibility)
