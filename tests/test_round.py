"""Ops one after the other, as an engine calls them: nothing is read back in between."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from typing import Any

import kdtree
import numpy as np
import pytest
from kdtree import ctypes_api, reference
from kdtree.records import Accept, DraftTopK, Tree
from support import (
    ATTN_ERROR,
    BF16,
    F16,
    FULL,
    Backend,
    DLPackArray,
    TorchBackend,
    assert_close,
    assert_same,
    missing_backends,
    relative_error,
    torch,
)

needs_cuda = pytest.mark.skipif(
    "torch-cuda" in missing_backends(), reason=missing_backends().get("torch-cuda", "")
)

B, L, K, BUDGET, VOCAB, HEADS, PAGE, LAYERS = 5, 6, 8, 20, 500, 4, 16, 3
Q = BUDGET + 1
SCALE = 192**-0.5
REPLAYS = 10_000 if FULL else 200  # of a captured round


@pytest.mark.parametrize("name", ["torch", "torch-cuda", "cupy"])
def test_backends_present(name):
    """Shows which backends this run went without, and why."""
    if name in missing_backends():
        pytest.skip(missing_backends()[name])


# ---- one round


@dataclass
class State:
    """Everything that a round reads; kv_caches is changed in place."""

    draft_logits: Any  # [B,L,V]
    roots: Any
    prefix_lens: Any
    q: Any
    kv_caches: Any  # [layers,pages,page,576]
    block_table: Any
    target_logits: Any  # [B,Q,V]
    seeds: Any


@dataclass
class Result:
    top: DraftTopK
    tree: Tree
    links: Tree
    mask: Any
    out: Any
    lse: Any
    sampled: Accept
    best: DraftTopK
    accept: Accept


def new_state(rng: np.random.Generator, dtype: Any) -> State:
    prefix = rng.integers(0, 100, B).astype(np.int32)
    width = (100 + Q + PAGE - 1) // PAGE
    needed = -(-(prefix + Q) // PAGE)
    pages = B * width
    order = rng.permutation(pages)
    table = np.full((B, width), 2**31 - 1, np.int32)
    for b in range(B):
        table[b, : needed[b]] = order[b * width : b * width + needed[b]]
    roots = rng.integers(0, VOCAB, B)
    roots[rng.integers(B)] = -1  # a spare row of the batch
    few = np.where(np.arange(VOCAB) < 6, 6, 0)  # tokens that drafts and targets agree on
    return State(
        draft_logits=(2 * rng.standard_normal((B, L, VOCAB)) + few).astype(np.float32),
        roots=roots,
        prefix_lens=prefix,
        q=rng.standard_normal((B, Q, HEADS, 576)).astype(dtype),
        kv_caches=rng.standard_normal((LAYERS, pages, PAGE, 576)).astype(dtype),
        block_table=table,
        target_logits=(rng.standard_normal((B, Q, VOCAB)) + few).astype(np.float32),
        seeds=rng.integers(0, 2**62, B),
    )


def one_round(s: State, out: Result | None = None, **options: Any) -> Result:
    """options: stream, workspace. With `out`, no op allocates."""

    def to(name: str) -> dict[str, Any]:
        return options_of_all | ({} if out is None else {"out": getattr(out, name)})

    workspace = options.pop("workspace", None)
    options_of_all = options
    top = kdtree.draft_topk(s.draft_logits, K, root_tokens=s.roots, **to("top"))
    tree = kdtree.build_ddtree(
        top.logprobs, top.ids, s.roots, s.prefix_lens, budget=BUDGET, **to("tree")
    )
    links = kdtree.tree_links(
        tree.parents,
        tree.num_nodes,
        prefix_lens=s.prefix_lens,
        draft_tokens=tree.draft_tokens,
        **to("links"),
    )
    mask = kdtree.expand_mask(links, "packed32", **to("mask"))
    attended, lse = kdtree.verify_attn(
        *(s.q, s.kv_caches[0], s.block_table, s.prefix_lens, links.visibility),
        num_nodes=tree.num_nodes,
        sm_scale=SCALE,
        return_lse=True,
        workspace=workspace,
        lse=None if out is None else out.lse,
        **to("out"),
    )
    sampled = kdtree.tree_accept_logits(
        tree, s.target_logits, temperature=0.7, seeds=s.seeds, **to("sampled")
    )
    best = kdtree.draft_topk(s.target_logits, 1, **to("best"))
    accept = kdtree.tree_accept(links, first_column(best.ids), **to("accept"))
    kdtree.commit_kv(s.kv_caches, s.block_table, s.prefix_lens, accept, **options)
    return Result(top, tree, links, mask, attended, lse, sampled, best, accept)


def first_column(ids: Any) -> Any:
    if hasattr(ids, "__getitem__"):
        return ids[..., 0]
    if ids.__dlpack_device__()[0] != 1:
        import cupy

        return cupy.from_dlpack(ids)[..., 0]
    return DLPackArray(np.from_dlpack(ids)[..., 0])  # kdtree's own array object


def check_round(s: State, r: Result, after: Any) -> None:
    """Each op against the oracle on what the op before it made; all NumPy."""
    top = reference.draft_topk(s.draft_logits, K, root_tokens=s.roots)
    assert_same(r.top.ids, top.ids)
    assert_close(r.top.logprobs, top.logprobs, atol=2e-5)
    tree = reference.build_ddtree(r.top.logprobs, r.top.ids, s.roots, s.prefix_lens, budget=BUDGET)
    assert_same(r.tree, tree, "tree")
    for name in ("depths", "positions", "next_token", "next_sibling", "visibility"):
        assert_same(getattr(r.links, name), getattr(tree, name), f"links.{name}")
    assert_same(r.mask, reference.expand_mask(tree, "packed32"), "mask")
    out, lse = reference.verify_attn(
        *(s.q, s.kv_caches[0], s.block_table, s.prefix_lens, tree.visibility),
        num_nodes=tree.num_nodes,
        sm_scale=SCALE,
        return_lse=True,
    )
    assert relative_error(r.out, out) <= ATTN_ERROR
    assert_close(r.lse, lse, atol=2e-3)
    sampled = reference.tree_accept_logits(tree, s.target_logits, temperature=0.7, seeds=s.seeds)
    assert_same(r.sampled, sampled, "sampled")
    assert_same(r.best.ids[..., 0], s.target_logits.argmax(axis=-1))
    accept = reference.tree_accept(tree, s.target_logits.argmax(axis=-1))
    assert_same(r.accept, accept, "accept")
    caches = s.kv_caches.copy()
    reference.commit_kv(caches, s.block_table, s.prefix_lens, accept)
    assert_same(after, caches, "kv_caches")


def get(backend: Backend, r: Result) -> Result:
    return Result(*(backend.get(getattr(r, e.name)) for e in fields(r)))


def test_one_round(backend, rng):
    accepted = 0
    for _ in range(5):
        s = new_state(rng, F16)
        given = backend.put(s)
        r = get(backend, one_round(given))
        check_round(s, r, backend.numpy(given.kv_caches))
        accepted += int(r.accept.accept_token_num.sum())
    assert accepted > 10  # the rounds had something to commit


def test_the_next_round_sees_what_was_committed(backend, rng):
    """Attention of a tree's path equals plain decoding over the rows that commit_kv moved."""
    s = new_state(rng, F16)
    s.roots[:] = 3
    given = backend.put(s)
    r = get(backend, one_round(given))
    n = r.accept.accept_token_num
    assert n.max() > 0
    last = r.accept.accept_index[np.arange(B), n]
    out, _ = backend.get(
        kdtree.verify_attn(
            backend.array(np.ascontiguousarray(s.q[np.arange(B), last][:, None])),
            given.kv_caches[0],
            given.block_table,
            backend.array(s.prefix_lens + n),
            sm_scale=SCALE,
            return_lse=True,
        )
    )
    assert relative_error(out[:, 0], r.out[np.arange(B), last].astype(np.float64)) < 1e-3


def test_tree_with_a_stop_rule_and_chain_through_the_round(backend, rng):
    s = new_state(rng, F16)
    cost = np.linspace(0, 1.5, Q).astype(np.float32)
    top = kdtree.draft_topk(backend.array(s.draft_logits), K)
    tree = kdtree.build_ddtree(
        *(top.logprobs, top.ids, backend.array(s.roots), backend.array(s.prefix_lens)),
        budget=BUDGET,
        chain_seed=True,
        node_cost=backend.array(cost),
        base_cost=1.0,
    )
    out = kdtree.verify_attn(
        *backend.put((s.q, s.kv_caches[0], s.block_table, s.prefix_lens)),
        tree.visibility,
        num_nodes=tree.num_nodes,
        sm_scale=SCALE,
    )
    top, tree, out = backend.get((top, tree, out))
    want = reference.build_ddtree(
        *(top.logprobs, top.ids, s.roots, s.prefix_lens),
        budget=BUDGET,
        chain_seed=True,
        node_cost=cost,
        base_cost=1.0,
    )
    assert_same(tree, want)
    want_out = reference.verify_attn(
        *(s.q, s.kv_caches[0], s.block_table, s.prefix_lens, tree.visibility),
        num_nodes=tree.num_nodes,
        sm_scale=SCALE,
    )
    assert relative_error(out, want_out) <= ATTN_ERROR


def test_the_library_of_the_results(backend, rng):
    r = one_round(backend.put(new_state(rng, F16)))
    kind = {"numpy": "numpy", "torch": "torch", "torch-cuda": "torch"}.get(backend.name)
    for x in (r.top.ids, r.tree.scores, r.links.depths, r.mask, r.out, r.accept.accept_tokens):
        assert hasattr(x, "__dlpack__")
        assert hasattr(x, "__dlpack_device__")
        if kind:
            assert type(x).__module__ == kind


def test_fork(rng):
    """A child that was forked after the library was loaded, and had worked, works."""
    s = new_state(rng, F16)
    one_round(new_state(rng, F16))
    child = os.fork()
    if child == 0:
        try:
            before = State(*(getattr(s, e.name).copy() for e in fields(s)))
            check_round(before, one_round(s), s.kv_caches)
            os._exit(0)
        except BaseException:  # whatever it was, the child must not go on with the tests
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0


# ---- CUDA: graphs, streams, devices


def copies(s: State) -> State:
    return State(*(getattr(s, e.name).clone() for e in fields(s)))


def outputs_like(r: Any) -> Any:
    """Arrays to write results into, filled with rubbish; shared ones stay shared."""
    made: dict[int, Any] = {}

    def like(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            if id(x) not in made:
                made[id(x)] = torch.full_like(x, 77)
            return made[id(x)]
        if isinstance(x, tuple):
            return tuple(like(item) for item in x)
        if isinstance(x, (DraftTopK, Tree, Accept, Result)):
            return type(x)(**{e.name: like(getattr(x, e.name)) for e in fields(x)})
        return x

    return like(r)


@needs_cuda
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("preallocated", [True, False])
def test_graph_replay_with_new_contents(rng, dtype, preallocated):
    backend = TorchBackend("cuda")
    states = [new_state(rng, dtype) for _ in range(4)]
    given = [backend.put(s) for s in states]
    live = copies(given[0])
    warm = one_round(copies(given[0]))
    out = outputs_like(warm) if preallocated else None
    size = kdtree.verify_attn_workspace(B, Q, HEADS, backend.device())
    workspace = torch.empty(size, dtype=torch.uint8, device="cuda") if preallocated else None
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    results = []
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.graph(graph):
            captured = one_round(live, out, workspace=workspace)
        for new in given[1:]:
            for e in fields(live):
                getattr(live, e.name).copy_(getattr(new, e.name))
            graph.replay()
            kept = outputs_like(captured)
            for e in fields(captured):
                copy_into(getattr(kept, e.name), getattr(captured, e.name))
            results.append((kept, live.kv_caches.clone()))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    for s, (r, caches) in zip(states[1:], results, strict=True):
        r = get(backend, r)
        check_round(s, r, backend.numpy(caches))
        on_cpu = State(*(np.copy(getattr(s, e.name)) for e in fields(s)))
        eager = one_round(on_cpu)
        assert_same(r.accept, eager.accept, "accept of the eager CPU round")
        assert_same(r.tree.visibility, eager.tree.visibility)
        assert_same(backend.numpy(caches), on_cpu.kv_caches)


def copy_into(to: Any, x: Any) -> None:
    if isinstance(x, torch.Tensor):
        to.copy_(x)
    elif x is not None:
        for e in fields(x):
            copy_into(getattr(to, e.name), getattr(x, e.name))


class StreamProtocol:
    def __init__(self, stream: Any) -> None:
        self._handle = stream.cuda_stream

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._handle


@needs_cuda
@pytest.mark.parametrize("how", ["current", "object", "int", "protocol"])
def test_side_stream(rng, how):
    """The round waits for what its stream holds, and only its stream has to be waited for."""
    backend = TorchBackend("cuda")
    s = new_state(rng, F16)
    given = backend.put(s)
    late = State(*(torch.zeros_like(getattr(given, e.name)) for e in fields(s)))
    outputs = outputs_like(one_round(copies(given)))
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)  # a tenth of a second, before the inputs arrive
        for e in fields(s):
            getattr(late, e.name).copy_(getattr(given, e.name))
        if how == "current":
            r = one_round(late, outputs)
    if how != "current":
        handle = {
            "object": stream,
            "int": stream.cuda_stream,
            "protocol": StreamProtocol(stream),
        }[how]
        r = one_round(late, outputs, stream=handle)
    stream.synchronize()
    check_round(s, get(backend, r), backend.numpy(late.kv_caches))


@needs_cuda
@pytest.mark.parametrize("links", [kdtree.tree_links, ctypes_api.tree_links])
def test_memory_of_results_on_another_stream(links):
    """Nothing of the current stream writes it before the op has, or still reads it then."""
    n = 4_096
    parents = torch.full((n, 65), -1, dtype=torch.int32, device="cuda")
    used = torch.full((n,), 65, dtype=torch.int32, device="cuda")
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)  # a tenth of a second
    links(parents, used, stream=side)  # dropped before it runs
    others = [torch.full((n, 65), 7, device="cuda") for _ in range(8)]
    torch.cuda.synchronize()
    assert all((other == 7).all() for other in others)

    given = torch.full((n, 65), 3, device="cuda")
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)
    more = given + 1
    del given  # its memory is free again, but has yet to be read
    tree = links(parents, used, stream=side)
    torch.cuda.synchronize()
    assert (more == 4).all()
    assert (tree.next_token == -1).all()


@pytest.mark.skipif("cupy" in missing_backends(), reason=missing_backends().get("cupy", ""))
def test_cupy_results_are_cupys_and_stay_on_its_stream(rng):
    import cupy

    logits, late = cupy.asarray(rng.standard_normal((8, 6, 500))), cupy.zeros((8, 6, 500), "f4")
    roots, prefix = cupy.arange(8), cupy.zeros(8, "i4")
    parents, used = cupy.full((5_000, 65), -1, "i4"), cupy.full(5_000, 65, "i4")
    kept = kdtree.tree_links(parents, used)

    def draft(logits):
        top = kdtree.draft_topk(logits, 16)
        return kdtree.build_ddtree(top.logprobs, top.ids, roots, prefix, budget=20)

    want = draft(logits.astype("f4"))
    cupy.cuda.Device().synchronize()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        for _ in range(50):
            kdtree.tree_links(parents, used, out=kept)
        late[...] = logits
        tree = draft(late)
        stream.synchronize()
    assert isinstance(tree.parents, cupy.ndarray)
    for field in fields(Tree):
        assert_same(getattr(tree, field.name).get(), getattr(want, field.name).get(), field.name)


def test_results_may_be_dropped_at_once(backend):
    """Their memory stays until the device, busy with earlier calls, has written it."""
    n = 5_000
    parents, used = backend.put((np.full((n, 65), -1, np.int32), np.full(n, 65, np.int32)))
    kept = kdtree.tree_links(parents, used)
    for _ in range(10):
        for _ in range(8):
            kdtree.tree_links(parents, used, out=kept)
        kdtree.tree_links(parents[:9], used[:9])
    assert (backend.numpy(kept.next_token) == -1).all()


@needs_cuda
def test_the_current_device_stays(rng):
    backend = TorchBackend("cuda")
    for device in range(torch.cuda.device_count()):
        with torch.cuda.device(device):
            given = backend.put(new_state(rng, F16))
            one_round(given)
            assert torch.cuda.current_device() == device
    torch.cuda.synchronize()


@needs_cuda
def test_arrays_of_another_device_than_the_current_one(rng):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    backend = TorchBackend("cuda:1")
    s = new_state(rng, F16)
    given = backend.put(s)
    with torch.cuda.device(0):
        r = one_round(given)
        assert torch.cuda.current_device() == 0
    torch.cuda.synchronize(1)
    check_round(s, get(backend, r), backend.numpy(given.kv_caches))


@needs_cuda
def test_cuda_equals_cpu_to_the_bit_in_integers(rng):
    backend = TorchBackend("cuda")
    for _ in range(5):
        s = new_state(rng, F16)
        given = backend.put(s)
        r = get(backend, one_round(given))
        same_top = kdtree.build_ddtree(
            r.top.logprobs, r.top.ids, s.roots, s.prefix_lens, budget=BUDGET
        )
        assert_same(r.tree, same_top)
        accept = kdtree.tree_accept_logits(r.tree, s.target_logits, temperature=0.7, seeds=s.seeds)
        assert_same(r.sampled, accept)


# ---- kdtree.Round


def new_round(backend: Backend, like: Any = None, **options: Any) -> kdtree.Round:
    """Of the shape of a State; like: an array of the backend."""
    like = backend.array(np.zeros(1, np.int32)) if like is None else like
    dtype = backend.array(np.zeros(1, F16)).dtype
    sizes: dict[str, Any] = {"batch": B, "depth": L, "k": K, "budget": BUDGET, "heads": HEADS}
    return kdtree.Round(like, **(sizes | {"dtype": dtype, "sm_scale": SCALE} | options))


def run_round(r: kdtree.Round, s: State, **sampling: Any) -> kdtree.Round:
    r.draft(s.draft_logits, s.roots, s.prefix_lens)
    r.verify(s.q, s.kv_caches[0], s.block_table, s.prefix_lens)
    r.accept(s.target_logits, **sampling)
    r.commit(s.kv_caches, s.block_table, s.prefix_lens)
    return r


def arrays_of(r: kdtree.Round) -> tuple[Any, ...]:
    return r.top, r.tree, r.out, r.lse, r.accepted


@pytest.fixture
def round_backend(backend):
    if backend.name == "dlpack":
        pytest.skip("whoever has arrays of another library brings the buffers of each op")
    return backend


@pytest.mark.parametrize("options", [{}, {"chain_seed": True}, {"kv_split": 64}, "stop"], ids=str)
def test_round_equals_the_ops(round_backend, rng, options):
    backend = round_backend
    attention = options if "kv_split" in options else {}
    drafting = {} if attention else options
    if options == "stop":
        cost = np.linspace(0, 1.5, Q).astype(np.float32)
        drafting = {"node_cost": backend.array(cost), "base_cost": 1.0}
    r = new_round(backend, vocab_size=VOCAB - 3, **drafting, **attention)
    for sampled in (False, True, False):  # rounds after one another, in the same buffers
        s = new_state(rng, F16)
        mine, given = backend.put(s), backend.put(s)
        temperature = np.linspace(0, 1, B).astype(np.float32)
        sampling = {"temperature": backend.array(temperature), "seeds": mine.seeds}
        run_round(r, mine, **(sampling if sampled else {}))

        top = kdtree.draft_topk(
            given.draft_logits, K, vocab_size=VOCAB - 3, root_tokens=given.roots
        )
        tree = kdtree.build_ddtree(
            top.logprobs, top.ids, given.roots, given.prefix_lens, budget=BUDGET, **drafting
        )
        out, lse = kdtree.verify_attn(
            *(given.q, given.kv_caches[0], given.block_table, given.prefix_lens, tree.visibility),
            num_nodes=tree.num_nodes,
            sm_scale=SCALE,
            return_lse=True,
            **attention,
        )
        accept = kdtree.tree_accept_logits(
            tree, given.target_logits, vocab_size=VOCAB - 3, **(sampling if sampled else {})
        )
        kdtree.commit_kv(given.kv_caches, given.block_table, given.prefix_lens, accept)
        assert_same(backend.get(arrays_of(r)), backend.get((top, tree, out, lse, accept)))
        assert_same(backend.numpy(mine.kv_caches), backend.numpy(given.kv_caches))


def test_round_accepts_token_ids_and_other_trees(round_backend, rng):
    backend = round_backend
    s = new_state(rng, F16)
    given = backend.put(s)
    r = new_round(backend)
    r.draft(given.draft_logits, given.roots, given.prefix_lens)
    tree = backend.get(r.tree)
    parents = np.where(np.arange(Q) < tree.num_nodes[:, None], np.arange(-1, Q - 1), -1)
    parents = parents.astype(np.int32)
    tokens = s.target_logits.argmax(-1)
    for other in (parents, tree.parents):
        r.tree = kdtree.tree_links(
            backend.array(other), r.tree.num_nodes, draft_tokens=r.tree.draft_tokens
        )
        want = reference.tree_links(other, tree.num_nodes, draft_tokens=tree.draft_tokens)
        want = reference.tree_accept(want, tokens)
        assert_same(backend.get(r.accept(backend.array(tokens))), want)


def test_round_of_fewer_requests(round_backend, rng):
    backend = round_backend
    whole = new_round(backend)
    few = whole.rows(3)
    s = backend.put(new_state(rng, F16))
    for e in fields(s):
        if e.name != "kv_caches":
            setattr(s, e.name, getattr(s, e.name)[:3])
    caches = backend.array(backend.numpy(s.kv_caches))
    run_round(few, s)
    s.kv_caches = caches
    assert_same(backend.get(arrays_of(few)), backend.get(arrays_of(run_round(whole.rows(3), s))))
    top = kdtree.draft_topk(s.draft_logits, K, root_tokens=s.roots)
    assert_same(backend.get(few.top), backend.get(top))
    assert_same(backend.numpy(whole.top.ids)[:3], backend.numpy(few.top.ids))  # its memory


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
@pytest.mark.parametrize("batch", [B, 2])
def test_round_of_shards(round_backend, rng, ranks, batch):
    """Ranks as threads: all have the same tree and tokens, those of the whole vocabulary."""
    backend, width = round_backend, -(-VOCAB // ranks)
    s = new_state(rng, F16)
    s.draft_logits = rng.integers(0, 3, s.draft_logits.shape).astype(np.float32)  # ties
    s.target_logits = rng.integers(0, 3, s.target_logits.shape).astype(np.float32)
    sent, barrier = [None] * ranks, threading.Barrier(ranks, timeout=60)

    def columns(x: Any, rank: int) -> Any:
        """A rank's columns; what is past the vocabulary must not matter."""
        past = np.full((*x.shape[:-1], ranks * width - VOCAB), 9, np.float32)
        part = np.concatenate([x, past], -1)[:batch, ..., rank * width : (rank + 1) * width]
        return backend.array(part)

    def run(rank: int) -> Any:
        passes: list[Any] = []

        def all_gather(received: Any, piece: Any) -> None:
            sent[rank] = piece
            barrier.wait()
            for i in range(ranks):
                received[i * len(piece) : (i + 1) * len(piece)] = sent[i]
            barrier.wait()

        try:
            r = new_round(
                backend,
                vocab_size=VOCAB,
                shards=ranks,
                vocab_start=rank * width,
                all_gather=all_gather,
            ).rows(batch)
            roots, prefix_lens = backend.put((s.roots[:batch], s.prefix_lens[:batch]))
            for given in (roots, None):  # which changes no token
                r.draft(columns(s.draft_logits, rank), roots, prefix_lens)
                r.accept(columns(s.target_logits, rank), root_tokens=given)
                passes.append(backend.get((r.top, r.tree, r.accepted)))
            assert_same(passes[1], passes[0])
            return passes[1]
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(ranks) as pool:
        results = list(pool.map(run, range(ranks)))
    for other in results[1:]:
        assert_same(other, results[0])
    top, tree, accept = results[0]
    want = reference.draft_topk(s.draft_logits[:batch], K, root_tokens=s.roots[:batch])
    assert_same(top.ids, want.ids)
    assert_close(top.logprobs, want.logprobs, atol=2e-5)
    want = reference.build_ddtree(
        top.logprobs, top.ids, s.roots[:batch], s.prefix_lens[:batch], budget=BUDGET
    )
    assert_same(tree, want)
    assert_same(accept, reference.tree_accept_logits(tree, s.target_logits[:batch]))


@pytest.mark.parametrize("shared", [False, True])
def test_round_of_plain_decoding(round_backend, rng, shared):
    """No draft: trees of a root alone."""

    def all_gather(received: Any, sent: Any) -> None:
        received[:] = sent

    backend = round_backend
    s = new_state(rng, F16)
    r = new_round(backend, depth=0, budget=0, all_gather=all_gather if shared else None)
    nothing = backend.array(np.zeros((B, 0, VOCAB), np.float32))
    tree = backend.get(r.draft(nothing, *backend.put((s.roots, s.prefix_lens))))
    assert_same(tree.num_nodes, (s.roots >= 0).astype(np.int32))
    first = s.target_logits[:, :1]
    accept = backend.get(r.accept(backend.array(first)))
    assert_same(accept.accept_tokens, np.where(s.roots[:, None] >= 0, first.argmax(-1), -1))


def test_round_refuses(rng):
    backend = Backend()
    r = new_round(backend)
    s = new_state(rng, F16)
    gather = {"shards": 2, "all_gather": lambda received, sent: None}
    for error, name, call in [
        (TypeError, "like", lambda: new_round(backend, DLPackArray(np.zeros(1)))),
        (TypeError, "like", lambda: new_round(backend, [0])),
        (ValueError, "batch", lambda: new_round(backend, batch=0)),
        (TypeError, "batch", lambda: new_round(backend, batch=2.0)),
        (TypeError, "batch", lambda: new_round(backend, batch=True)),
        (ValueError, "depth", lambda: new_round(backend, depth=-1)),
        (ValueError, "k", lambda: new_round(backend, k=65)),
        (ValueError, "budget", lambda: new_round(backend, budget=65)),
        (ValueError, "heads", lambda: new_round(backend, heads=129)),
        (TypeError, "dtype", lambda: new_round(backend, dtype=np.float32)),
        (ValueError, "shards", lambda: new_round(backend, shards=0)),
        (TypeError, "all_gather", lambda: new_round(backend, shards=2)),
        (TypeError, "all_gather", lambda: new_round(backend, all_gather=3)),
        (ValueError, "batch", lambda: r.rows(B + 1)),
        (ValueError, "logits", lambda: r.draft(s.draft_logits[1:], s.roots, s.prefix_lens)),
        (ValueError, "logits", lambda: r.draft(s.draft_logits[:, 1:], s.roots, s.prefix_lens)),
        (TypeError, "logits", lambda: r.draft(None, s.roots, s.prefix_lens)),
        (ValueError, "root_tokens", lambda: r.draft(s.draft_logits, s.roots[1:], s.prefix_lens)),
        (
            ValueError,
            "q",
            lambda: r.verify(s.q[:, :, 1:], s.kv_caches[0], s.block_table, s.prefix_lens),
        ),
        (ValueError, "target", lambda: r.accept(s.target_logits[:, 1:])),
        (ValueError, "temperature", lambda: r.accept(s.target_logits[..., 0], temperature=0.5)),
        (ValueError, "seeds", lambda: r.accept(s.target_logits[..., 0], seeds=s.seeds)),
        (
            ValueError,
            "temperature",
            lambda: new_round(backend, **gather).accept(s.target_logits, temperature=1.0),
        ),
        (ValueError, "seeds", lambda: r.accept(s.target_logits, temperature=0.5)),
        (TypeError, "target_predict", lambda: r.accept(s.target_logits[..., 0])),
        (ValueError, "block_table", lambda: r.commit(s.kv_caches, None, s.prefix_lens)),
    ]:
        with pytest.raises(error, match=rf"^{name}: expected"):
            call()


def test_round_dtypes():
    r = new_round(Backend(), dtype=BF16.type)
    assert r.out.dtype == BF16
    assert new_round(Backend(), dtype=BF16).out.dtype == BF16
    if torch:
        like = torch.zeros(1)
        assert new_round(Backend(), like, dtype=torch.bfloat16).out.dtype == torch.bfloat16
        with pytest.raises(TypeError, match="like: expected a CPU or CUDA tensor, got one on meta"):
            new_round(Backend(), like.to("meta"), dtype=torch.bfloat16)


@needs_cuda
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_round_in_a_graph(rng, dtype):
    """A whole round, captured once: each of many replays equals the eager CPU round."""
    backend, held = TorchBackend("cuda"), 50
    gpu = new_round(backend, dtype=backend.array(np.zeros(1, dtype)).dtype)
    cpu = new_round(Backend(), dtype=dtype)
    live = backend.put(new_state(rng, dtype))
    temperature = np.linspace(0, 1, B).astype(np.float32)
    sampling = {"temperature": backend.array(temperature), "seeds": live.seeds}
    run_round(gpu, live, **sampling)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run_round(gpu, live, **sampling)

    accepted = 0
    for _ in range(REPLAYS // held):
        states = [new_state(rng, dtype) for _ in range(held)]
        given = [backend.put(s) for s in states]
        results = [outputs_like(arrays_of(gpu)) for _ in states]
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for new, result in zip(given, results, strict=True):
                copy_into(live, new)
                graph.replay()
                for to, x in zip(result, arrays_of(gpu), strict=True):
                    copy_into(to, x)
                new.kv_caches.copy_(live.kv_caches)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        for s, new, result in zip(states, given, results, strict=True):
            top, tree, out, lse, accept = backend.get(result)
            cpu.draft(s.draft_logits, s.roots, s.prefix_lens)
            assert_same(top.ids, cpu.top.ids)
            assert_close(top.logprobs, cpu.top.logprobs, atol=2e-5)
            # From here on the same log-probs, to the bit: rounding may order near-ties otherwise.
            kdtree.build_ddtree(
                top.logprobs, top.ids, s.roots, s.prefix_lens, budget=BUDGET, out=cpu.tree
            )
            assert_same(tree, cpu.tree)
            cpu.verify(s.q, s.kv_caches[0], s.block_table, s.prefix_lens)
            assert relative_error(out, cpu.out.astype(np.float64)) <= 2 * ATTN_ERROR
            assert_close(lse, cpu.lse, atol=2e-3)
            cpu.accept(s.target_logits, temperature=temperature, seeds=s.seeds)
            assert_same(accept, cpu.accepted)
            cpu.commit(s.kv_caches, s.block_table, s.prefix_lens)
            assert_same(backend.numpy(new.kv_caches), s.kv_caches)
            accepted += int(accept.accept_token_num.sum())
    assert accepted > REPLAYS
