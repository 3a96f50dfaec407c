from __future__ import annotations

import kdtree
import numpy as np
import pytest
from kdtree import reference
from support import BF16, F16, F32, FULL, assert_close, assert_same, call


def check(backend, logits, k, **options):
    got = call(backend, kdtree.draft_topk, logits, k, **options)
    want = reference.draft_topk(logits, k, **options)
    assert_same(got.ids, want.ids, "ids")
    assert got.logprobs.dtype == got.lse.dtype == F32
    assert_close(got.logprobs, want.logprobs, atol=2e-5, rtol=1e-6, name="logprobs")
    assert_close(got.lse, want.lse, atol=2e-5, rtol=1e-6, name="lse")
    return got


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("vocab", [1, 2, 31, 64, 1000, 4097, 32_000])
def test_against_the_oracle(backend, rng, dtype, vocab):
    logits = (4 * rng.standard_normal((2, 3, vocab))).astype(dtype)
    for k in {1, min(vocab, 5), min(vocab, 64)}:
        check(backend, logits, k)
        check(backend, logits, k, normalize=False)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_the_vocabulary_of_the_models(device, rng, dtype):
    logits = (3 * rng.standard_normal((16 if FULL else 3, 163_840))).astype(dtype)
    check(device, logits, 64, vocab_size=163_000)


@pytest.mark.parametrize("rows", [2, 280])  # so many that one block of the GPU takes a whole row
@pytest.mark.parametrize("order", ["rising", "falling", "last", "equal"])
def test_orders_that_fill_a_candidate_buffer(device, order, rows):
    # Every element beats all before it, or none does.
    vocab = 20_000
    row = np.arange(vocab, dtype=np.float32)
    if order == "falling":
        row = row[::-1].copy()
    elif order == "last":
        row = np.where(row < vocab - 64, 0, row).astype(np.float32)
    elif order == "equal":
        row = np.ones_like(row)
    check(device, np.tile([row, -row], (rows // 2, 1)), 64, normalize=False)


def test_equal_logits_take_the_smallest_ids(backend, rng):
    logits = rng.integers(-2, 2, (5, 3000)).astype(np.float32)
    logits[1] = 1
    logits[2] = np.where(rng.random(3000) < 0.5, 0.0, -0.0)  # equal, whatever the sign
    got = check(backend, logits, 40)
    assert got.ids[1].tolist() == got.ids[2].tolist() == list(range(40))


def test_nan_and_infinities(backend, rng):
    logits = rng.standard_normal((7, 500)).astype(np.float32)
    logits[0, rng.random(500) < 0.9] = np.nan
    logits[1] = np.nan
    logits[2] = -np.inf
    logits[3, 3:] = -np.inf
    logits[4, ::2] = -np.nan
    logits[5, :] = np.where(np.arange(500) == 77, 0, -np.inf)
    logits[6, 99] = np.inf
    got = check(backend, logits, 8)
    assert got.lse[6] == np.inf
    assert got.logprobs[6].tolist() == [0] + 7 * [-np.inf]
    assert np.isneginf(got.lse[1:3]).all()
    assert np.isneginf(got.logprobs[1:3]).all()
    assert got.logprobs[5, 0] == 0
    assert got.ids[5, 0] == 77


def test_large_logits_do_not_overflow(backend):
    logits = np.array([[3e38, 2.9e38, -3e38], [-3e38, -3e38, -3e38], [88, 89, 90]], np.float32)
    check(backend, logits, 3, normalize=False)
    got = check(backend, logits[2:], 3)
    assert np.exp(got.logprobs).sum() == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("vocab_start", [0, 1000, 2**33])
def test_padding_columns_are_never_chosen(backend, rng, vocab_start):
    logits = rng.standard_normal((4, 130)).astype(np.float32)
    logits[:, 100:] = 50
    logits[1, 110] = np.nan
    for real in (100, 20, 1, 0, -5):
        vocab_size = max(vocab_start + real, 0)
        got = check(backend, logits, 32, vocab_start=vocab_start, vocab_size=vocab_size)
        assert (got.ids < vocab_size).all()
        assert (got.ids[:, max(real, 0) :] == -1).all()
    check(backend, logits, 32, vocab_start=vocab_start, vocab_size=vocab_start + 5000)


def some_live(rng, logits, live, dtype=np.int64):
    """Root tokens of which `live`, anywhere, are no padding; the others' logits are poisoned."""
    padding = np.ones(len(logits), bool)
    padding[rng.permutation(len(logits))[:live]] = False
    poison = rng.choice(np.array([np.nan, np.inf, -np.inf, 6e4], logits.dtype), logits.shape[1:])
    logits[padding] = poison
    negative = -1 - rng.integers(0, 9, len(logits))
    return np.where(padding, negative, rng.integers(0, 9, len(logits))).astype(dtype)


@pytest.mark.parametrize("roots", [np.int32, np.int64])
@pytest.mark.parametrize("lead", [(1,), (7,), (5, 3), (66, 2, 2), (0, 3)], ids=str)
def test_padding_requests(backend, rng, lead, roots):
    for share in (0.0, 0.1, 0.5, 1.0):
        logits = rng.standard_normal((*lead, 3000)).astype(np.float32)
        given = some_live(rng, logits, round(share * lead[0]), roots)
        for normalize in (True, False):
            got = check(backend, logits, 9, normalize=normalize, vocab_start=5, root_tokens=given)
            assert (got.ids[given < 0] == -1).all()
            assert np.isneginf(got.logprobs[given < 0]).all()
            assert np.isneginf(got.lse[given < 0]).all()


# On a GPU 4, 2 or 1 blocks a row, and several rows a block.
@pytest.mark.parametrize("live", [0, 1, 4, 8, 17, 40, 64])
@pytest.mark.parametrize("kind", ["normal", "ties", "rising"])
def test_live_requests_of_a_captured_graph(device, rng, kind, live):
    dtype, vocab = (F16, 163_840) if FULL else (F32, 9_001)  # odd: rows start anywhere
    shape = (64, 5, vocab)
    logits = 3 * rng.standard_normal(shape) if kind == "normal" else rng.integers(0, 2, shape)
    if kind == "rising":  # fills every list of candidates
        logits = np.broadcast_to(np.arange(vocab) % 60_000, shape)
    logits = logits.astype(dtype)
    roots = some_live(rng, logits, live)
    check(device, logits, 64, normalize=kind != "rising", root_tokens=roots)


@pytest.mark.parametrize("rows", [3, 60, 180])  # a block of the GPU takes a long row, or several do
@pytest.mark.parametrize("kind", ["normal", "rising"])
def test_long_rows(device, rng, kind, rows):
    logits = 3 * rng.standard_normal((rows, 90_001)).astype(np.float32)
    if kind == "rising":  # overflows the list whatever floor is found on the way
        logits.sort(axis=-1)
    check(device, logits, 64)
    roots = some_live(rng, logits, rows - 2)
    check(device, logits, 64, root_tokens=roots)


@pytest.mark.parametrize("vocab", [600, 5_000])  # a block a row or several
def test_more_requests_than_are_looked_at_at_once(device, rng, vocab):
    logits = rng.standard_normal((777, 3, vocab)).astype(np.float32)
    for live in (1, 30, 400, 777):
        given = logits.copy()
        roots = some_live(rng, given, live, np.int32)
        check(device, given, 5, root_tokens=roots)


def test_very_many_requests(device, rng):
    logits = rng.standard_normal((5000, 1, 300)).astype(np.float32)
    roots = some_live(rng, logits, 70)
    check(device, logits, 5, root_tokens=roots)


def test_padding_requests_of_strided_logits(device, rng):
    wide = rng.standard_normal((4, 300, 20_011)).astype(np.float32)
    given = device.array(wide)[:, ::2, 7:20_003]
    logits = wide[:, ::2, 7:20_003].copy()
    for live in (0, 1, 2, 4):
        roots = np.where(np.arange(4) < live, 1, -1)
        got = device.get(kdtree.draft_topk(given, 20, root_tokens=device.array(roots)))
        want = reference.draft_topk(logits, 20, root_tokens=roots)
        assert_same(got.ids, want.ids)
        assert_close(got.logprobs, want.logprobs, atol=2e-5)
        assert_close(got.lse, want.lse, atol=2e-5)


@pytest.mark.parametrize("lead", [(), (0,), (1,), (3, 0, 2), (2, 1, 3, 1, 2, 2)], ids=str)
def test_leading_dimensions(backend, rng, lead):
    check(backend, rng.standard_normal((*lead, 50)).astype(np.float32), 7)


def test_strided_rows_are_used_as_they_are(backend, rng):
    whole = rng.standard_normal((4, 6, 300)).astype(np.float32)
    want = reference.draft_topk(whole[::2, 1:5:3, 7:207], 9)
    view = backend.array(whole)[::2, 1:5:3, 7:207]
    got = backend.get(kdtree.draft_topk(view, 9))
    assert_same(got.ids, want.ids)
    assert_close(got.logprobs, want.logprobs, atol=2e-5)


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_rows_at_odd_addresses(backend, rng, dtype):
    if not backend.supports(dtype):
        pytest.skip(f"{backend.name} has no {dtype}")
    whole = rng.standard_normal((5, 1003)).astype(dtype)
    got = backend.get(kdtree.draft_topk(backend.array(whole)[:, 1:], 16))
    assert_same(got.ids, reference.draft_topk(whole[:, 1:], 16).ids)


def test_many_rows(device, rng):
    check(device, rng.standard_normal((70_000, 8)).astype(np.float32), 2)
