"""Ops one after the other, as an engine calls them: nothing is read back in between."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from typing import Any

import kdtree
import numpy as np
import pytest
from kdtree import reference
from kdtree.records import Accept, DraftTopK, Tree
from support import (
    ATTN_ERROR,
    BF16,
    F16,
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
    top = kdtree.draft_topk(s.draft_logits, K, **to("top"))
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
    top = reference.draft_topk(s.draft_logits, K)
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
    """Arrays to write a Result into, filled with rubbish; shared ones stay shared."""
    made: dict[int, Any] = {}

    def like(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            if id(x) not in made:
                made[id(x)] = torch.full_like(x, 77)
            return made[id(x)]
        if isinstance(x, (DraftTopK, Tree, Accept)):
            return type(x)(**{e.name: like(getattr(x, e.name)) for e in fields(x)})
        return x

    return Result(*(like(getattr(r, e.name)) for e in fields(r)))


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
