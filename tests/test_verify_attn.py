"""verify_attn against float64, with everything that must not be read poisoned (see attn_case)."""

from __future__ import annotations

import itertools

import kdtree
import numpy as np
import pytest
from kdtree import ctypes_api
from support import (
    ATTN_ERROR,
    BF16,
    F16,
    F32,
    FP8,
    FULL,
    AttnCase,
    Canary,
    assert_close,
    assert_same,
    attn_case,
    backends,
    check_attn,
    devices,
    relative_error,
    run_attn,
    skip_unsupported,
)

HEADS = [1, 2, 5, 8, 16, 64, 128]
QLENS = [1, 2, 17, 33, 63, 64, 65]
RAGGED = [0, 1, 63, 64, 65, 129, 300]
PREFIXES = [[0], [1], [62], [63], [64], [65], [66], [1000], [8192], RAGGED]
PAGES = [1, 16, 64, 128]
DTYPES = [(BF16, BF16), (F16, F16), (BF16, FP8), (F16, FP8)]
VISIBILITY = ["tree", "any", "causal"]


def with_paths(backends):
    """The backends, and the CUDA ones again with the portable kernels where the GPU has its own."""
    for backend in backends:
        yield pytest.param((backend, ""), id=backend.name)
        if backend.cuda and ctypes_api.device_info(0)["path"] != "sm80":
            yield pytest.param((backend, "sm80"), id=f"{backend.name}-sm80")


@pytest.fixture(params=with_paths(backends()))
def backend(request, monkeypatch):
    backend, path = request.param
    monkeypatch.setenv("KDTREE_FORCE_PATH", path)
    return backend


@pytest.fixture(params=with_paths(devices()))
def device(request, monkeypatch):
    backend, path = request.param
    monkeypatch.setenv("KDTREE_FORCE_PATH", path)
    return backend


def grid():
    """Every (heads, Q) pair by turns with every prefix, page size and dtype; FULL: all of them."""
    if FULL:
        shapes = itertools.product(HEADS, QLENS, PREFIXES, PAGES)
    else:
        shapes = (
            (heads, qlen, PREFIXES[(3 * i + j) % 10], PAGES[(i + j) % 4])
            for (i, heads), (j, qlen) in itertools.product(enumerate(HEADS), enumerate(QLENS))
        )
    for n, (heads, qlen, prefix, page_size) in enumerate(shapes):
        # Products of query rows and keys: what the CPU and the oracle take time for.
        if FULL or heads * qlen * (sum(prefix) + qlen * len(prefix)) < 1_000_000:
            yield pytest.param(
                *(heads, qlen, prefix, page_size, DTYPES[n % 4], VISIBILITY[n // 2 % 3]),
                id=f"H{heads}-Q{qlen}-prefix{'+'.join(map(str, prefix))}-page{page_size}",
            )


@pytest.mark.parametrize(
    ("heads", "qlen", "prefix", "page_size", "dtypes", "visibility"), list(grid())
)
def test_grid(device, rng, heads, qlen, prefix, page_size, dtypes, visibility):
    dtype, kv_dtype = dtypes
    case = attn_case(
        rng,
        prefix_lens=prefix,
        qlen=qlen,
        heads=heads,
        page_size=page_size,
        dtype=dtype,
        kv_dtype=kv_dtype,
        visibility=visibility,
    )
    check_attn(device, kdtree.verify_attn, case)


@pytest.mark.parametrize("qlen", [1, 33, 65])
@pytest.mark.parametrize("prefix", [8192, 1000])
def test_long_prefixes(device, rng, qlen, prefix):
    case = attn_case(rng, prefix_lens=[prefix, 3], qlen=qlen, heads=2, dtype=BF16)
    check_attn(device, kdtree.verify_attn, case)


@pytest.mark.parametrize("form", ["pages", "rope", "csr", "int64 csr"])
@pytest.mark.parametrize("visibility", VISIBILITY)
def test_every_form(backend, rng, form, visibility):
    case = attn_case(
        rng,
        prefix_lens=[7, 0, 130, 64, 12],
        qlen=9,
        heads=4,
        page_size=1 if "csr" in form else 16,
        visibility=visibility,
        num_nodes=[9, 4, 1, 0, 200],
        rope=form == "rope",
        csr="csr" in form,
    )
    if form == "int64 csr":
        case.options["kv_indices"] = case.options["kv_indices"].astype(np.int64)
    check_attn(backend, kdtree.verify_attn, case)


@pytest.mark.parametrize("page_size", [1, 2, 4, 8, 16, 32, 64, 128])
def test_every_page_size(backend, rng, page_size):
    case = attn_case(rng, prefix_lens=[0, 40, 260], qlen=5, heads=3, page_size=page_size)
    check_attn(backend, kdtree.verify_attn, case)


@pytest.mark.parametrize("heads", range(1, 129, 1 if FULL else 6))
def test_every_head_count(device, rng, heads):
    case = attn_case(rng, prefix_lens=[20, 70], qlen=3, heads=heads, dtype=BF16)
    check_attn(device, kdtree.verify_attn, case)


@pytest.mark.parametrize("qlen", range(1, 66, 1 if FULL else 5))
def test_every_tree_size(device, rng, qlen):
    case = attn_case(rng, prefix_lens=[20, 64 - qlen % 64], qlen=qlen, heads=2, visibility="any")
    check_attn(device, kdtree.verify_attn, case)


def test_slot_1_sees_node_64(backend, rng):
    case = attn_case(rng, prefix_lens=[3], qlen=65, heads=2)
    assert case.visibility is not None
    case.visibility[0, 1] |= np.int64(-(2**63))
    seen = check_only_slot(backend, case, 1)
    case.visibility[0, 1] &= np.int64(2**63 - 1)
    assert relative_error(check_only_slot(backend, case, 1), seen) > 0.01


def check_only_slot(backend, case, slot):
    out, _ = run_attn(backend, kdtree.verify_attn, case)
    want = case.reference()[0][0, slot]
    assert relative_error(out[0, slot], want) <= ATTN_ERROR
    return out[0, slot]


@pytest.mark.parametrize("num_nodes", [[0, 0], [-5, 3], [1, 2**31 - 1]])
def test_padding_and_clamped_num_nodes(backend, rng, num_nodes):
    case = attn_case(rng, prefix_lens=[90, 10], qlen=4, heads=2, num_nodes=num_nodes)
    check_attn(backend, kdtree.verify_attn, case)


def test_unused_rows_are_finite_and_see_the_prefix_and_the_root(backend, rng):
    case = attn_case(rng, prefix_lens=[30], qlen=6, heads=2, num_nodes=[2])
    out, lse = run_attn(backend, kdtree.verify_attn, case)
    want_out, want_lse = case.reference()
    assert relative_error(out[0, 2:], want_out[0, 2:]) <= ATTN_ERROR
    assert_close(lse[0, 2:], want_lse[0, 2:], atol=2e-3)


def test_one_key_is_its_value(backend, rng):
    case = attn_case(rng, prefix_lens=[0], qlen=1, heads=3)
    out, _ = run_attn(backend, kdtree.verify_attn, case)
    key = case.kv_cache.reshape(-1, 576)[~np.isnan(case.kv_cache.reshape(-1, 576)).any(axis=1)]
    assert_same(out[0, 0], np.repeat(key[:, :512], 3, axis=0))


@pytest.mark.parametrize("scale", [0.0, 1e-4, 40.0])
def test_flat_and_peaked_softmax(backend, rng, scale):
    case = attn_case(rng, prefix_lens=[500, 2], qlen=3, heads=2)
    case.options["sm_scale"] = scale * 576**-0.5
    check_attn(backend, kdtree.verify_attn, case)


def test_scores_that_rise_along_the_prefix(device, rng):
    # The running maximum changes with every key, so every rescale counts.
    case = attn_case(rng, prefix_lens=[300], qlen=2, heads=2, page_size=128, dtype=BF16)
    table, prefix = case.block_table, 300
    assert table is not None
    positions = np.arange(prefix)
    case.q[...] = 1
    case.kv_cache[table[0, positions // 128], positions % 128, 512:] = (
        positions[:, None] / 4
    ).astype(BF16)
    case.options["sm_scale"] = 1 / 64
    check_attn(device, kdtree.verify_attn, case)


@pytest.mark.parametrize("q_dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("scale", ["absent", "float", "array"])
def test_fp8_cache(backend, rng, q_dtype, scale):
    case = attn_case(rng, prefix_lens=[200, 1], qlen=17, heads=4, dtype=q_dtype, kv_dtype=FP8)
    if scale == "absent":
        del case.options["kv_scale"]
    elif scale == "array":
        case.options["kv_scale"] = np.array([0.03125 * 3], np.float32)
    check_attn(backend, kdtree.verify_attn, case)


@pytest.mark.parametrize("heads", [3, 8])
def test_queries_beyond_f16_over_an_fp8_cache(device, rng, heads):
    case = attn_case(rng, prefix_lens=[200, 1], qlen=2, heads=heads, dtype=BF16, kv_dtype=FP8)
    case.q[:, :, ::2] = (case.q[:, :, ::2].astype(F32) * 2**20).astype(BF16)
    case.options["sm_scale"] *= 2**-20
    check_attn(device, kdtree.verify_attn, case)


def test_every_fp8_value(backend):
    # One key a request: the output is the key, exactly.
    bits = np.arange(256, dtype=np.uint8)
    values = bits[~np.isnan(bits.view(FP8).astype(np.float32))].view(FP8)
    cache = np.zeros((2, 1, 576), FP8)
    cache[:, 0, : len(values)] = values
    args = (
        np.zeros((2, 1, 1, 576), BF16),
        cache,
        np.array([[0], [1]], np.int32),
        np.zeros(2, np.int32),
    )
    skip_unsupported(backend, args)
    out = backend.numpy(kdtree.verify_attn(*backend.put(args), sm_scale=1.0))
    got = out[0, 0, 0, : len(values)].astype(np.float32)
    assert np.array_equal(got, values.astype(np.float32))  # -0 may come as 0


@pytest.mark.parametrize("kv_dtype", [BF16, FP8], ids=str)
def test_kv_scale_of_any_cache(device, rng, kv_dtype):
    case = attn_case(rng, prefix_lens=[64], qlen=4, heads=2, dtype=BF16, kv_dtype=kv_dtype)
    case.options["kv_scale"] = 2.5
    check_attn(device, kdtree.verify_attn, case)


# ---- layouts


def test_cache_of_four_dimensions(backend, rng):
    case = attn_case(rng, prefix_lens=[100], qlen=4, heads=2)
    want = run_attn(backend, kdtree.verify_attn, case)
    case.kv_cache = case.kv_cache[:, :, None, :]
    assert_same(run_attn(backend, kdtree.verify_attn, case), want)


def test_strided_inputs_are_used_as_they_are(backend, rng):
    case = attn_case(rng, prefix_lens=[100, 5], qlen=4, heads=3, num_nodes=[4, 2])
    want = run_attn(backend, kdtree.verify_attn, case)
    q = np.full((2, 8, 4, 640), np.nan, F16)
    q[:, ::2, 1:, 64:] = case.q
    cache = np.full((len(case.kv_cache), 3, 64, 592), np.nan, F16)  # a layer of three
    cache[:, 1, :, 8:584] = case.kv_cache
    table = np.full((2, 9), 2**31 - 1, np.int32)
    table[:, 3 : 3 + case.block_table.shape[1]] = case.block_table
    words = np.full((4, 7), -1)
    words[::2, 2:6] = case.visibility
    q, cache, table, words = backend.put((q, cache, table, words))
    got = kdtree.verify_attn(
        q[:, ::2, 1:, 64:],
        cache[:, 1, :, 8:584],
        table[:, 3 : 3 + case.block_table.shape[1]],
        backend.array(case.prefix_lens),
        words[::2, 2:6],
        num_nodes=backend.array(case.options["num_nodes"]),
        sm_scale=case.options["sm_scale"],
        return_lse=True,
    )
    assert_same(backend.get(got), want)


def test_q_rope_with_strides_of_its_own(backend, rng):
    case = attn_case(rng, prefix_lens=[70], qlen=3, heads=2)
    want = run_attn(backend, kdtree.verify_attn, case)[0]
    whole = backend.array(case.q)
    table, prefix, words = backend.put((case.block_table, case.prefix_lens, case.visibility))
    got = kdtree.verify_attn(
        whole[..., :512],
        backend.array(case.kv_cache),
        table,
        prefix,
        words,
        q_rope=whole[..., 512:],
        **case.options,
    )
    assert_same(backend.numpy(got), want)


def test_tables_wider_than_needed_and_shared_pages(backend, rng):
    case = attn_case(rng, prefix_lens=[64, 64], qlen=2, heads=2)
    case.block_table = np.pad(case.block_table, [(0, 0), (0, 40)], constant_values=-7)
    case.block_table[1, 0] = case.block_table[0, 0]  # a shared prefix page
    check_attn(backend, kdtree.verify_attn, case)


def test_return_forms(backend, rng):
    case = attn_case(rng, prefix_lens=[10], qlen=2, heads=2)
    args = backend.put(case.args)
    out = kdtree.verify_attn(*args, **case.options)
    pair = kdtree.verify_attn(*args, **case.options, return_lse=True)
    assert_same(backend.get(pair)[0], backend.numpy(out))
    lse = Canary(backend, (1, 2, 2), F32)
    kdtree.verify_attn(*args, **case.options, lse=lse.array)
    lse.check()
    assert_same(backend.numpy(lse.array), backend.get(pair)[1])


@pytest.mark.parametrize("kv_split", [None, 64, 256])
def test_workspace(backend, rng, kv_split):
    case = attn_case(rng, prefix_lens=[3000, 17], qlen=17, heads=8, num_nodes=[17, 5])
    case.options["kv_split"] = kv_split
    want = run_attn(backend, kdtree.verify_attn, case)
    size = kdtree.verify_attn_workspace(2, 17, 8, backend.device())
    assert isinstance(size, int)
    assert size >= 0
    workspace = Canary(backend, (size,), np.uint8)
    for _ in range(2):  # what an earlier call left there does not matter
        got = kdtree.verify_attn(
            *backend.put(case.args),
            **{k: backend.put(v) for k, v in case.options.items()},
            workspace=workspace.array,
            return_lse=True,
        )
        assert_same(backend.get(got), want)
        workspace.check()


# ---- bits


@pytest.mark.parametrize("kv_split", [64, 128, 1024])
def test_kv_split_makes_bits_independent_of_neighbours(backend, rng, kv_split):
    case = attn_case(
        rng, prefix_lens=[900, 5, 0, 333, 64, 2000], qlen=5, heads=4, num_nodes=[5, 5, 2, 5, 0, 1]
    )
    case.options["kv_split"] = kv_split
    together = run_attn(backend, kdtree.verify_attn, case)
    for b in range(6):
        alone = AttnCase(
            *(case.q[b : b + 1], case.kv_cache, case.block_table[b : b + 1]),
            *(case.prefix_lens[b : b + 1], case.visibility[b : b + 1]),
            case.options | {"num_nodes": case.options["num_nodes"][b : b + 1]},
        )
        got = run_attn(backend, kdtree.verify_attn, alone)
        assert_same(got, tuple(x[b : b + 1] for x in together), f"request {b}")
    shuffled = rng.permutation(6)
    mixed = AttnCase(
        *(case.q[shuffled], case.kv_cache, case.block_table[shuffled]),
        *(case.prefix_lens[shuffled], case.visibility[shuffled]),
        case.options | {"num_nodes": case.options["num_nodes"][shuffled]},
    )
    got = run_attn(backend, kdtree.verify_attn, mixed)
    assert_same(got, tuple(x[shuffled] for x in together))


def test_kv_split_in_a_large_batch(device, rng):
    """Partial results are merged in one order, however many rows there are."""
    case = attn_case(rng, prefix_lens=[700, 10] * 12, qlen=17, heads=5)
    case.options["kv_split"] = 64
    together = run_attn(device, kdtree.verify_attn, case)
    few = AttnCase(
        *(case.q[:2], case.kv_cache, case.block_table[:2], case.prefix_lens[:2]),
        *(case.visibility[:2], case.options),
    )
    got = run_attn(device, kdtree.verify_attn, few)
    assert_same(got, tuple(x[:2] for x in together))


def test_kv_split_changes_rounding_only(device, rng):
    case = attn_case(rng, prefix_lens=[1500, 10], qlen=9, heads=4, dtype=BF16)
    for kv_split in (None, 64, 192, 4096):
        case.options["kv_split"] = kv_split
        check_attn(device, kdtree.verify_attn, case)


def test_bits_do_not_depend_on_what_is_not_seen(backend, rng):
    case = attn_case(rng, prefix_lens=[77, 130], qlen=7, heads=2, num_nodes=[7, 3])
    want = run_attn(backend, kdtree.verify_attn, case)
    case.kv_cache = np.where(np.isnan(case.kv_cache), F16.type(60000), case.kv_cache)
    assert_same(run_attn(backend, kdtree.verify_attn, case), want)


# ---- what whole tiles of 64 rows leave over

#: Heads and Q that leave 1, 2, 5, 8, 9, 15, 16 and 17 rows.
REST = [(1, 65), (2, 33), (5, 65), (8, 17), (9, 65), (5, 29), (16, 17), (9, 9)]


@pytest.mark.parametrize(("heads", "qlen"), REST)
@pytest.mark.parametrize(("page_size", "dtype"), [(1, F16), (16, BF16), (64, F16)], ids=str)
@pytest.mark.parametrize("visibility", VISIBILITY)
def test_rest_of_few_rows(device, rng, heads, qlen, page_size, dtype, visibility):
    """Pinned, so that the rest is a tile of its own kind whatever the batch is."""
    case = attn_case(
        rng,
        prefix_lens=[400, 0, 63, 129, 5],
        qlen=qlen,
        heads=heads,
        page_size=page_size,
        dtype=dtype,
        visibility=visibility,
        num_nodes=[qlen, qlen, 2, qlen - 1, 0],
    )
    case.options["kv_split"] = 128
    check_attn(device, kdtree.verify_attn, case)


@pytest.mark.parametrize(("heads", "qlen"), [(1, 65), (8, 17), (16, 17)])
@pytest.mark.parametrize("scale", [0.0, -1.0, 40.0])
def test_rest_under_any_scale(device, rng, heads, qlen, scale):
    case = attn_case(rng, prefix_lens=[500, 2], qlen=qlen, heads=heads, dtype=BF16)
    case.options |= {"kv_split": 256, "sm_scale": scale * 576**-0.5}
    check_attn(device, kdtree.verify_attn, case)


@pytest.mark.parametrize(("heads", "qlen"), [(1, 65), (8, 17), (16, 17)])
def test_bits_of_a_rest_do_not_depend_on_neighbours(device, rng, heads, qlen):
    case = attn_case(rng, prefix_lens=[300, 10] * 30, qlen=qlen, heads=heads)
    case.options["kv_split"] = 64
    together = run_attn(device, kdtree.verify_attn, case)
    two = AttnCase(
        *(case.q[:2], case.kv_cache, case.block_table[:2], case.prefix_lens[:2]),
        *(case.visibility[:2], case.options),
    )
    got = run_attn(device, kdtree.verify_attn, two)
    assert_same(got, tuple(x[:2] for x in together))


@pytest.mark.parametrize(("heads", "qlen"), [(1, 65), (8, 17), (16, 17)])
def test_rest_in_a_large_batch(device, rng, heads, qlen):
    """Without kv_split it takes many requests to be a tile of its own kind."""
    case = attn_case(rng, prefix_lens=[70, 0, 200, 64] * 20, qlen=qlen, heads=heads, dtype=BF16)
    check_attn(device, kdtree.verify_attn, case)


# ---- sizes


@pytest.mark.parametrize(
    ("page_size", "kv_dtype"), [(1, F16), (8, F16), (64, F16), (64, FP8)], ids=str
)
@pytest.mark.parametrize(
    "prefix_lens",
    [[4641, 0, 1730, 63, 64, 300, 5000, 1], [900] * 8, [0] * 8, [3000, *([0] * 11)], [17] * 40],
    ids=["ragged", "uniform", "empty", "one long", "many"],
)
@pytest.mark.parametrize(("heads", "qlen"), [(8, 65), (2, 17), (1, 20)])
def test_ragged_batches(device, rng, prefix_lens, page_size, kv_dtype, heads, qlen):
    """Keys are shared out over the whole GPU: of 9 tiles, of one, and of half a one a request."""
    num_nodes = rng.integers(1, qlen + 1, len(prefix_lens))
    num_nodes[2], num_nodes[-1], num_nodes[4] = qlen, 0, 0  # padding in the middle and at the end
    case = attn_case(
        rng,
        prefix_lens=prefix_lens,
        qlen=qlen,
        heads=heads,
        page_size=page_size,
        kv_dtype=kv_dtype,
        visibility="any",
        num_nodes=num_nodes.astype(np.int32),
    )
    out, lse = run_attn(device, kdtree.verify_attn, case)
    want_out, want_lse = case.reference()
    for b, used in enumerate(num_nodes):
        if used:
            assert relative_error(out[b, :used], want_out[b, :used]) <= ATTN_ERROR
        else:
            assert not out[b].any()
    assert_close(lse[:, 0], want_lse[:, 0], atol=2e-3)


def test_new_lengths_in_a_graph(device, rng):
    if not device.cuda:
        pytest.skip("CUDA graphs are CUDA's")
    torch = pytest.importorskip("torch")
    case = attn_case(rng, prefix_lens=[3000, 900, 4000, 70], qlen=33, heads=8, visibility="causal")
    args = device.put(case.args)

    def attend():
        return kdtree.verify_attn(*args, **case.options, return_lse=True)

    attend()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = attend()
    for prefix_lens in [[10, 900, 1, 70], [0, 0, 4000, 0], [3000, 900, 4000, 70]]:
        args[3].copy_(device.array(np.array(prefix_lens, np.int32)))
        graph.replay()
        assert_same(device.get(captured), device.get(attend()), str(prefix_lens))
    check_attn(device, kdtree.verify_attn, case)


@pytest.mark.parametrize("batch", [0, 1, 65_537])
def test_batch_sizes_at_q_1(device, rng, batch):
    case = attn_case(
        rng,
        prefix_lens=[0, 3, 17, 1][: min(batch, 4)],
        qlen=1,
        heads=1,
        page_size=16,
        num_nodes=None,
    )
    turns = np.arange(batch) % max(min(batch, 4), 1)
    many = AttnCase(
        *(case.q[turns], case.kv_cache, case.block_table[turns]),
        *(case.prefix_lens[turns], case.visibility[turns], case.options),
    )
    out, lse = run_attn(device, kdtree.verify_attn, many)
    assert out.shape == (batch, 1, 1, 512)
    assert lse.shape == (batch, 1, 1)
    want_out, want_lse = case.reference()
    if batch:
        assert relative_error(out, want_out[turns]) <= ATTN_ERROR
        assert_close(lse, want_lse[turns], atol=2e-3)


@pytest.mark.parametrize("kv_dtype", [BF16, FP8], ids=str)
@pytest.mark.parametrize("form", ["pages", "csr"])
def test_cache_rows_past_four_million(device, rng, kv_dtype, form):
    """Offsets past 2^31 elements. Untouched pages of a CPU cache cost no memory."""
    page_size = 1 if form == "csr" else 64
    pages = 4_200_000 // page_size
    free = free_bytes(device)
    if free is not None and free < 16 * 2**30:
        pytest.skip(f"needs 16 GB of GPU memory, {free / 2**30:.0f} free")
    case = attn_case(
        *(rng,),
        prefix_lens=[100, 70],
        qlen=5,
        heads=2,
        page_size=page_size,
        dtype=BF16,
        kv_dtype=kv_dtype,
        csr=form == "csr",
    )
    want_out, want_lse = case.reference()
    # The pages in use move to the far end of a large cache.
    few, far = len(case.kv_cache), pages - len(case.kv_cache)
    cache = device.empty((pages, page_size, 576), kv_dtype)
    cache[far:] = device.array(case.kv_cache)
    options = {k: device.put(v) for k, v in case.options.items()}
    if form == "csr":
        rows = case.options["kv_indices"]
        moved = np.where((rows >= 0) & (rows < few), rows + far, rows)
        options["kv_indices"] = device.array(moved)
        table = None
    else:
        moved = np.where((case.block_table >= 0) & (case.block_table < few), far, 0)
        table = device.array((case.block_table + moved.astype(np.int64)).astype(np.int32))
    out, lse = device.get(
        kdtree.verify_attn(
            *(device.array(case.q), cache, table),
            *device.put((case.prefix_lens, case.visibility)),
            **options,
            return_lse=True,
        )
    )
    assert relative_error(out, want_out) <= ATTN_ERROR
    assert_close(lse, want_lse, atol=2e-3)


def free_bytes(device):
    """Free GPU memory; None on CPU."""
    if not device.cuda:
        return None
    import torch

    return torch.cuda.mem_get_info()[0]


@pytest.mark.parametrize("wild", ["block_table", "prefix_lens", "kv_indices", "kv_indptr"])
def test_contents_that_lead_outside(backend, rng, wild):
    """On CPU an error; on CUDA, where the host cannot know, harmless to the other requests."""
    csr = wild.startswith("kv_")
    case = attn_case(
        rng, prefix_lens=[100, 100, 70], qlen=3, heads=2, page_size=1 if csr else 64, csr=csr
    )
    want = case.reference()[0][0]
    if wild == "block_table":
        case.block_table[1:] = [2**31 - 1, -7]
    elif wild == "prefix_lens":
        case.prefix_lens[1:] = [-1, 1000]  # negative, and past the table
    elif wild == "kv_indices":
        case.options["kv_indices"][110:] = 2**31 - 1
    else:
        case.options["kv_indptr"][2:] = [-5, 2**31 - 1]
    args = backend.put(case.args)
    options = {k: backend.put(v) for k, v in case.options.items()}
    if backend.cuda:
        out = backend.numpy(kdtree.verify_attn(*args, **options))
        assert relative_error(out[0], want) <= ATTN_ERROR
    else:
        out = Canary(backend, (3, 3, 2, 512), F16)
        with pytest.raises(ValueError, match=wild):
            kdtree.verify_attn(*args, **options, out=out.array)
        out.check_untouched()
