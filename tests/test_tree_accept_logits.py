from __future__ import annotations

from dataclasses import replace

import kdtree
import numpy as np
import pytest
from kdtree import reference
from kdtree.records import Tree
from support import BF16, F16, F32, FULL, assert_same, call, random_trees


def check(backend, tree, logits, **options):
    """Equal tokens; with a temperature, except where the best two are as good as tied."""
    got = call(backend, kdtree.tree_accept_logits, tree, logits, **options)
    want = reference.tree_accept_logits(tree, logits, **options)
    batch, _, vocab = logits.shape
    columns = min(options.get("vocab_size") or vocab, vocab)
    heat = np.broadcast_to(np.float32(options.get("temperature", 0)), batch)
    ties = 0
    for b in range(batch):
        differ = np.flatnonzero(got.accept_tokens[b] != want.accept_tokens[b])
        if not len(differ):
            assert_same(got.accept_index[b], want.accept_index[b])
            assert got.accept_token_num[b] == want.accept_token_num[b]
            continue
        assert heat[b] > 0, f"request {b}: {got.accept_tokens[b]}, expected {want.accept_tokens[b]}"
        step = differ[0]
        slot = want.accept_index[b, step]
        assert slot == got.accept_index[b, step] >= 0
        position = step if tree.positions is None else int(tree.positions[b, slot])
        score = logits[b, slot, :columns].astype(np.float64) / float(heat[b])
        score += reference.gumbel(int(options["seeds"][b]), position, columns)
        assert score[got.accept_tokens[b, step]] > np.nanmax(score) - 1e-4
        ties += 1
    assert ties <= batch / 100 + 1
    return got


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("vocab", [1, 3, 64, 1001, 20_000])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_against_the_oracle(backend, rng, dtype, vocab, temperature):
    tree = random_trees(rng, 12, 9, min(vocab, 3))
    logits = rng.standard_normal((12, 9, vocab)).astype(np.float32)
    logits[..., :3] += np.log(vocab)  # so that walks go on
    options = {"temperature": temperature}
    if temperature:
        options["seeds"] = rng.integers(-(2**63), 2**63, 12)
    check(backend, tree, logits.astype(dtype), **options)


def test_the_vocabulary_of_the_models(device, rng):
    tree = random_trees(rng, 4, 3, 3)
    logits = rng.standard_normal((4, 3, 163_840)).astype(BF16)
    logits[..., 163_000:] = 100
    check(device, tree, logits, vocab_size=163_000)
    seeds = np.arange(4)
    check(device, tree, logits, vocab_size=163_000, temperature=1.0, seeds=seeds)


def test_lowest_id_on_ties_and_nan_as_minus_infinity(backend):
    nan, inf = np.nan, np.inf
    logits = np.array(
        [
            [[1, 3, 3, 3]],
            [[nan, -1, nan, -1]],
            [[-inf, -inf, -5, -inf]],
            [[nan, nan, nan, nan]],
            [[-inf, nan, -inf, -inf]],
            [[-0.0, 0.0, -1, 0.0]],
        ],
        np.float32,
    )
    tree = random_trees(np.random.default_rng(0), 6, 1, 4)
    tree.num_nodes[:] = 1
    got = check(backend, tree, logits)
    assert got.accept_tokens[:, 0].tolist() == [1, 1, 2, -1, -1, 0]
    seeds = np.arange(6)
    got = check(backend, tree, logits, temperature=1.0, seeds=seeds)
    assert got.accept_tokens[2:5, 0].tolist() == [2, -1, -1]


def test_a_row_without_a_finite_logit_ends_the_walk(backend):
    tree = reference.tree_links(
        np.array([[-1, 0, 1, 2]], np.int32),
        np.array([4], np.int32),
        draft_tokens=np.array([[7, 1, -1, 0]]),
    )
    logits = np.array([[[0, 1], [np.nan, -np.inf], [1, 0], [1, 0]]], np.float32)
    got = check(backend, tree, logits)
    assert got.accept_tokens.tolist() == [[1, -1, -1, -1]]
    assert got.accept_index.tolist() == [[0, 1, -1, -1]]


def test_rows_that_are_not_visited_may_hold_nan(backend, rng):
    tree = random_trees(rng, 30, 20, 2)
    logits = rng.standard_normal((30, 20, 50)).astype(np.float32)
    logits[..., :2] += 5
    want = check(backend, tree, logits)
    for b in range(30):
        unseen = np.setdiff1d(np.arange(20), want.accept_index[b])
        logits[b, unseen] = np.nan
    assert_same(check(backend, tree, logits), want)


def test_temperature_as_an_array(backend, rng):
    tree = random_trees(rng, 8, 6, 2)
    logits = rng.standard_normal((8, 6, 40)).astype(np.float32)
    logits[..., :2] += 3
    heat = np.array([0, 1, -1, np.nan, 0.3, 1e-7, 2, -0.0], np.float32)
    seeds = rng.integers(0, 2**62, 8)
    got = check(backend, tree, logits, temperature=heat, seeds=seeds)
    greedy = check(backend, tree, logits)
    for b in (0, 2, 3, 5, 7):
        assert_same(got.accept_tokens[b], greedy.accept_tokens[b])


def test_low_temperature_is_greedy(backend, rng):
    tree = random_trees(rng, 8, 6, 2)
    logits = rng.permutation(8 * 6 * 40).reshape(8, 6, 40).astype(np.float32)
    seeds = rng.integers(0, 2**62, 8)
    got = check(backend, tree, logits, temperature=1e-5, seeds=seeds)
    assert_same(got, check(backend, tree, logits))


# ---- the law


def draws(device, logits, seeds, positions, temperature=1.0):
    """One token for each pair of seed and position, from one row of logits."""
    count = len(seeds)
    none = np.full((count, 1), -1)
    tree = Tree(
        draft_tokens=np.zeros((count, 1), int),
        next_token=none,
        next_sibling=none,
        positions=positions[:, None],
        num_nodes=np.ones(count, np.int32),
    )
    rows = np.broadcast_to(logits.astype(np.float32), (count, 1, len(logits)))
    got = kdtree.tree_accept_logits(
        *device.put((tree, np.array(rows))), temperature=temperature, seeds=device.array(seeds)
    )
    return device.numpy(got.accept_tokens)[:, 0]


def chi_square(seen, law):
    expected = seen.sum() * law
    return float(((seen - expected) ** 2 / expected).sum())


LIMIT = {3: 16.27, 15: 37.70}  # 0.1 % tail by degrees of freedom; the draws are fixed


@pytest.mark.parametrize("vary", ["seed", "position"])
@pytest.mark.parametrize("logits", [[0, 0, 0, 0], [2, 1, 0, -2], [-1, 3, 0.5, 0]], ids=str)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_a_million_draws_follow_the_law(device, vary, logits, temperature):
    count = 1 << 20
    if temperature != 1 and not FULL:
        count >>= 4
    logits = np.array(logits, np.float64)
    running = np.arange(count) + 12345
    fixed = np.full(count, 7)
    seeds, positions = (running, fixed) if vary == "seed" else (fixed, running)
    tokens = draws(device, logits, seeds, positions, temperature)
    law = np.exp(logits / temperature)
    law /= law.sum()
    assert chi_square(np.bincount(tokens, minlength=4), law) < LIMIT[3]


@pytest.mark.parametrize("step", ["seed", "position"])
def test_neighbouring_draws_are_independent(device, step):
    count = 1 << 18
    logits = np.array([0.5, 0, 0, -0.5])
    law = np.exp(logits) / np.exp(logits).sum()
    running = np.arange(count)
    fixed = np.full(count, 3)
    seeds, positions = (running, fixed) if step == "seed" else (fixed, running)
    tokens = draws(device, logits, seeds, positions)
    pairs = np.bincount(tokens[0::2] * 4 + tokens[1::2], minlength=16)
    assert chi_square(pairs, np.outer(law, law).ravel()) < LIMIT[15]


def test_tokens_do_not_depend_on_the_batch_slot(backend, rng):
    tree = random_trees(rng, 40, 8, 2)
    logits = rng.standard_normal((40, 8, 300)).astype(np.float32)
    logits[..., :2] += 5
    seeds = rng.integers(0, 2**62, 40)
    options = {"temperature": 1.0}
    want = check(backend, tree, logits, seeds=seeds, **options)
    order = rng.permutation(40)
    mixed = replace(
        tree,
        **{n: getattr(tree, n)[order] for n in vars(tree) if getattr(tree, n) is not None},
    )
    got = check(backend, mixed, logits[order], seeds=seeds[order], **options)
    assert_same(got.accept_tokens, want.accept_tokens[order])


def test_a_tree_draws_what_plain_decoding_draws(backend, rng):
    tree = random_trees(rng, 30, 12, 2)
    logits = rng.standard_normal((30, 12, 100)).astype(np.float32)
    logits[..., :2] += 4
    seeds = rng.integers(0, 2**62, 30)
    got = check(backend, tree, logits, temperature=0.8, seeds=seeds)
    for b in range(30):
        n = int(got.accept_token_num[b]) + 1 if tree.num_nodes[b] else 0
        slots = got.accept_index[b, :n]
        alone = Tree(
            draft_tokens=np.zeros((n, 1), int),
            next_token=np.full((n, 1), -1),
            next_sibling=np.full((n, 1), -1),
            positions=tree.positions[b, slots][:, None],
            num_nodes=np.ones(n, np.int32),
        )
        one = check(
            backend, alone, logits[b, slots][:, None], temperature=0.8, seeds=np.repeat(seeds[b], n)
        )
        assert_same(one.accept_tokens[:, 0], got.accept_tokens[b, :n])


def test_without_positions_the_depth_counts(backend, rng):
    tree = random_trees(rng, 20, 8, 2)
    logits = rng.standard_normal((20, 8, 30)).astype(np.float32)
    logits[..., :2] += 3
    seeds = rng.integers(0, 2**62, 20)
    tree.positions = None
    want = check(backend, tree, logits, temperature=1.0, seeds=seeds)
    tree.positions = tree.depths.astype(np.int64)
    assert_same(check(backend, tree, logits, temperature=1.0, seeds=seeds), want)


def test_strided_logits_are_used_as_they_are(backend, rng):
    tree = random_trees(rng, 4, 5, 2)
    whole = rng.standard_normal((8, 7, 99)).astype(np.float32)
    view = (slice(None, None, 2), slice(1, 6), slice(3, 83))
    for options in ({}, {"temperature": 0.9, "seeds": np.arange(4)}):
        want = reference.tree_accept_logits(tree, whole[view], **options)
        given = {k: backend.put(v) for k, v in options.items()}
        got = kdtree.tree_accept_logits(backend.put(tree), backend.array(whole)[view], **given)
        assert_same(backend.get(got), want)


@pytest.mark.parametrize("batch", [20, 40, 70, 140])
@pytest.mark.parametrize("live", ["most", "few"])
def test_batches_with_padding(device, rng, batch, live):
    """On CUDA the live requests share the GPU's blocks, wherever in the batch they are."""
    tree = random_trees(rng, batch, 4, 2)
    if live == "few":
        tree.num_nodes[rng.permutation(batch)[4:]] = 0
    logits = rng.standard_normal((batch, 4, 20_000), np.float32)
    logits[..., :2] += 10
    check(device, tree, logits.astype(F16))
    heat = rng.choice([0, 0.7], batch).astype(np.float32)
    check(device, tree, logits.astype(F16), temperature=heat, seeds=np.arange(batch))


@pytest.mark.parametrize("batch", [0, 1])
def test_small_batches(backend, rng, batch):
    tree = random_trees(rng, batch, 4, 2)
    check(backend, tree, rng.standard_normal((batch, 4, 10)).astype(np.float32))
