from __future__ import annotations

import kdtree
import numpy as np
import pytest
from kdtree import reference
from kdtree.records import DraftTopK
from support import assert_close, assert_same, call


def shards_of(logits, shards, k, vocab_size):
    """The un-normalized top-k of each part of the vocabulary, stacked."""
    width = logits.shape[-1] // shards
    parts = [
        reference.draft_topk(
            logits[..., s * width : (s + 1) * width],
            k,
            vocab_start=s * width,
            vocab_size=vocab_size,
            normalize=False,
        )
        for s in range(shards)
    ]
    return [np.stack([getattr(p, f) for p in parts]) for f in ("logprobs", "ids", "lse")]


def check(backend, values, ids, lse) -> DraftTopK:
    got = call(backend, kdtree.merge_topk, values, ids, lse)
    want = reference.merge_topk(values, ids, lse)
    assert_same(got.ids, want.ids, "ids")
    assert_close(got.logprobs, want.logprobs, atol=2e-5, rtol=1e-6, name="logprobs")
    assert_close(got.lse, want.lse, atol=2e-5, rtol=1e-6, name="lse")
    return got


@pytest.mark.parametrize("shards", [1, 2, 3, 8, 16])
@pytest.mark.parametrize("k", [1, 7, 64])
@pytest.mark.parametrize("ties", [False, True])
def test_equals_the_unsharded_answer(backend, rng, shards, k, ties):
    logits = rng.standard_normal((2, 3, shards * 70)).astype(np.float32)
    if ties:
        logits = np.round(logits)
    vocab_size = shards * 70 - 90  # the last shard may be nothing but padding
    whole = reference.draft_topk(logits, k, vocab_size=vocab_size)
    got = check(backend, *shards_of(logits, shards, k, vocab_size))
    assert_same(got.ids, whole.ids)
    assert_close(got.logprobs, whole.logprobs, atol=2e-5)


def test_ids_as_int32(backend, rng):
    values, ids, lse = shards_of(rng.standard_normal((4, 80)).astype(np.float32), 4, 6, 80)
    got = check(backend, values, ids.astype(np.int32), lse)
    assert got.ids.dtype == np.int64


def test_empty_places_and_dead_rows(backend):
    inf = np.inf
    values = np.array([[[1, -inf, -inf], [-inf] * 3], [[-inf, -inf, -inf], [-inf] * 3]], np.float32)
    ids = np.array([[[5, 3, -1], [-1] * 3], [[2, -1, -1], [8, 9, -1]]])
    lse = np.array([[1, -inf], [-inf, -inf]], np.float32)
    got = check(backend, values, ids, lse)
    assert got.ids.tolist() == [[5, 2, 3], [8, 9, -1]]
    assert np.isneginf(got.lse[1])
    assert np.isneginf(got.logprobs[1]).all()


@pytest.mark.parametrize("lead", [(), (0,), (2, 1, 3, 1, 2, 2)], ids=str)
def test_leading_dimensions(backend, rng, lead):
    logits = rng.standard_normal((*lead, 60)).astype(np.float32)
    check(backend, *shards_of(logits, 3, 4, 60))


def test_strided_inputs_are_used_as_they_are(backend, rng):
    values, ids, lse = shards_of(rng.standard_normal((8, 90)).astype(np.float32), 3, 10, 90)
    want = reference.merge_topk(values[::2, 1::2, :6], ids[::2, 1::2, :6], lse[::2, 1::2])
    some = backend.array(np.pad(lse[::2, 1::2], [(0, 0), (1, 2)]))[:, 1:-2]
    values, ids = backend.put((values, ids))
    got = backend.get(kdtree.merge_topk(values[::2, 1::2, :6], ids[::2, 1::2, :6], some))
    assert_same(got.ids, want.ids)
    assert_close(got.logprobs, want.logprobs, atol=2e-5)


def test_draft_topk_of_shards_on_the_device(backend, rng):
    """The tensor-parallel path, op to op."""
    logits = rng.standard_normal((3, 400)).astype(np.float32)
    parts = [
        kdtree.draft_topk(backend.array(part), 12, vocab_start=100 * s, normalize=False)
        for s, part in enumerate(np.split(logits, 4, axis=-1))
    ]
    stacked = [
        backend.array(np.stack([backend.numpy(getattr(p, f)) for p in parts]))
        for f in ("logprobs", "ids", "lse")
    ]
    got = backend.get(kdtree.merge_topk(*stacked))
    whole = backend.get(kdtree.draft_topk(backend.array(logits), 12))
    assert_same(got.ids, whole.ids)
    assert_close(got.logprobs, whole.logprobs, atol=2e-5)
