"""torch.ops.kdtree: torch's own checks, torch.compile, CUDA graphs, and the answers of kdtree."""

from __future__ import annotations

import functools
import importlib
import os
import time
from collections.abc import Callable
from dataclasses import astuple
from typing import Any

import kdtree
import numpy as np
import pytest
from support import F16, TorchBackend, assert_same, attn_case, missing_backends, random_trees

os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # no pool of workers for one kernel
torch = pytest.importorskip("torch", reason="torch is not installed")
torch_ops = importlib.import_module("kdtree.torch_ops")
ops = torch.ops.kdtree


@pytest.fixture(params=["torch", "torch-cuda"])
def on(request: pytest.FixtureRequest) -> TorchBackend:
    if request.param in missing_backends():
        pytest.skip(missing_backends()[request.param])
    return TorchBackend("cpu" if request.param == "torch" else "cuda")


class Sample:
    """One call in both forms: kdtree's own answer, the required inputs, and the options."""

    def __init__(self, want: Any, inputs: tuple[Any, ...], **options: Any) -> None:
        self.want = tuple(x for x in (want if isinstance(want, tuple) else (want,)))
        self.inputs = inputs
        self.options = options
        self.scratch: tuple[Any, ...] = ()

    def outputs(self) -> tuple[Any, ...]:
        """What the .out form fills, and the workspace where it has one."""
        return tuple(torch.full_like(x, 1) for x in (*self.want, *self.scratch))


def samples(on: TorchBackend) -> dict[str, list[Sample]]:
    """Of every op that has two forms."""
    rng = np.random.default_rng(7)
    tensor = on.array
    logits = tensor(rng.standard_normal((3, 2, 50), np.float32))
    top = kdtree.draft_topk(logits, 5)
    shards = [
        kdtree.draft_topk(part, 5, vocab_start=25 * i, normalize=False)
        for i, part in enumerate(logits.split(25, dim=-1))
    ]
    stacked = [torch.stack([getattr(s, e) for s in shards]) for e in ("logprobs", "ids", "lse")]
    roots = tensor(np.array([3, -1, 5]))
    live = kdtree.draft_topk(logits, 5, root_tokens=roots)
    prefix = tensor(np.array([4, 9, 0], np.int32))
    cost = tensor(np.linspace(0, 1, 9, dtype=np.float32))
    given = on.put(random_trees(rng, 4, 7, 3))
    start = tensor(np.array([0, 2, 7, 100], np.int32))
    links = ("depths", "positions", "next_token", "next_sibling", "visibility")
    linked = [
        tuple(getattr(kdtree.tree_links(given.parents, given.num_nodes, **o), e) for e in links)
        for o in ({}, {"prefix_lens": start})
    ]
    predict = tensor(rng.integers(0, 3, (4, 7)))
    target = tensor(rng.standard_normal((4, 7, 20), np.float32))
    heat = tensor(np.array([0, 0.5, 1, 2], np.float32))
    seeds = tensor(rng.integers(0, 1 << 60, 4))
    walk = (given.draft_tokens, given.next_token, given.next_sibling, given.num_nodes)
    words = (given.visibility, given.num_nodes)
    paged = attn_case(
        rng, prefix_lens=[5, 0, 33], qlen=6, heads=2, page_size=8, num_nodes=[6, 0, 3]
    )
    rows = attn_case(rng, prefix_lens=[7, 2], qlen=3, heads=1, page_size=1, csr=True, rope=True)
    attention = []
    for case in (paged, rows):
        inputs, options = on.put(case.args), {k: on.put(v) for k, v in case.options.items()}
        scale = options.pop("sm_scale")
        want = kdtree.verify_attn(*inputs, sm_scale=scale, return_lse=True, **options)
        attention.append(Sample(want, (*inputs, scale), **options))
    half = tensor(np.array([0.5], np.float32))
    inputs, nodes = on.put(paged.args), on.put(paged.options["num_nodes"])
    want = kdtree.verify_attn(*inputs, sm_scale=0.1, num_nodes=nodes, kv_scale=0.5, return_lse=True)
    attention.append(Sample(want, (*inputs, 0.1), num_nodes=nodes, kv_scale_array=half))
    for sample in attention:
        size = kdtree.verify_attn_workspace(*sample.inputs[0].shape[:3], on.device())
        sample.scratch = (torch.empty(size, dtype=torch.uint8, device=on.device()),)
    return {
        "draft_topk": [
            Sample(astuple(top), (logits, 5)),
            Sample(astuple(shards[1]), (logits[..., 25:], 5), vocab_start=25, normalize=False),
            Sample(astuple(live), (logits, 5), root_tokens=roots),
        ],
        "merge_topk": [Sample(astuple(kdtree.merge_topk(*stacked)), tuple(stacked))],
        "build_ddtree": [
            Sample(
                astuple(kdtree.build_ddtree(top.logprobs, top.ids, roots, prefix, **o)),
                (top.logprobs, top.ids, roots, prefix),
                **o,
            )
            for o in (
                {"budget": 8},
                {"budget": 8, "chain_seed": True, "node_cost": cost, "base_cost": 1.0},
            )
        ],
        "tree_links": [
            Sample(linked[0], (given.parents, given.num_nodes)),
            Sample(linked[1], (given.parents, given.num_nodes), prefix_lens=start),
        ],
        "expand_mask": [
            Sample(kdtree.expand_mask(given, layout), (*words, layout))
            for layout in ("qlen", "packed32")
        ],
        "verify_attn": attention,
        "tree_accept": [
            Sample(astuple(kdtree.tree_accept(given, predict)), (*walk, predict)),
        ],
        "tree_accept_logits": [
            Sample(
                astuple(kdtree.tree_accept_logits(given, target, temperature=t, seeds=seeds)),
                (*walk, given.positions, target),
                **o,
                seeds=seeds,
            )
            for t, o in (
                (None, {}),
                (0.7, {"temperature": 0.7}),
                (heat, {"temperature_array": heat}),
            )
        ],
    }


PAIRS = sorted(set(torch_ops.NAMES) - {"commit_kv"})


def test_every_op_is_there():
    made = {name for name in kdtree.__all__ if name.islower()} - {"verify_attn_workspace"}
    assert set(torch_ops.NAMES) == made
    assert all(hasattr(ops, name) for name in made)


@pytest.mark.parametrize("name", PAIRS)
def test_both_forms_answer_as_kdtree_does(on, name):
    for sample in samples(on)[name]:
        got = getattr(ops, name)(*sample.inputs, **sample.options)
        assert_same(on.get(got if isinstance(got, tuple) else (got,)), on.get(sample.want))
        out = sample.outputs()
        assert getattr(ops, name).out(*sample.inputs, *out, **sample.options) is None
        assert_same(on.get(out[: len(sample.want)]), on.get(sample.want))


@pytest.mark.parametrize("name", PAIRS)
def test_opcheck(on, name):
    for sample in samples(on)[name]:
        torch.library.opcheck(getattr(ops, name).default, sample.inputs, sample.options)
        given = (*sample.inputs, *sample.outputs())
        torch.library.opcheck(getattr(ops, name).out, given, sample.options)


def commit_inputs(on: TorchBackend) -> tuple[Any, ...]:
    rng = np.random.default_rng(3)
    layers = [on.array(rng.standard_normal((6, 4, 8), np.float32)) for _ in range(3)]
    table = on.array(np.array([[0, 3, 5], [4, 1, 2]], np.int32))
    prefix = on.array(np.array([5, 2], np.int32))
    index = on.array(np.array([[0, 2, 3, -1], [0, -1, -1, -1]], np.int32))
    return layers, table, prefix, index, on.array(np.array([2, 0], np.int32))


def test_commit_kv(on):
    layers, table, prefix, index, count = commit_inputs(on)
    want = [layer.clone() for layer in layers]
    kdtree.commit_kv(want, table, prefix, kdtree.Accept(accept_index=index, accept_token_num=count))
    torch.library.opcheck(ops.commit_kv.default, (layers, table, prefix, index, count))
    ops.commit_kv(layers, table, prefix, index, count)
    assert_same(on.get(layers), on.get(want))
    assert not torch.equal(layers[0], commit_inputs(on)[0][0])


def test_full_mask(on):
    given = on.put(random_trees(np.random.default_rng(1), 3, 5, 3))
    prefix = on.array(np.array([2, 0, 4], np.int32))
    out = torch.zeros(5 * (6 + 3 * 5), dtype=torch.bool, device=on.device())
    want = out.clone()
    kdtree.expand_mask(given, "full", prefix_lens=prefix, out=want)
    ops.expand_mask.out(given.visibility, given.num_nodes, "full", out, prefix)
    assert_same(on.get(out), on.get(want))
    with pytest.raises(ValueError, match="layout: expected 'qlen' or 'packed32'"):
        ops.expand_mask(given.visibility, given.num_nodes, "full", prefix)
    for device in (on.device(), "meta"):
        with pytest.raises(ValueError, match=r"visibility: expected shape \[B, Q\]"):
            ops.expand_mask(given.visibility[0].to(device), given.num_nodes.to(device), "qlen")


def test_refusals_name_the_argument(on):
    q, cache, table, prefix, words, scale = samples(on)["verify_attn"][0].inputs
    with pytest.raises(ValueError, match=r"visibility: expected shape \[B, Q\] = \[3, 6\]"):
        ops.verify_attn(q, cache, table, prefix, words[:2], scale)
    half = on.array(np.array([0.5], np.float32))
    with pytest.raises(ValueError, match="kv_scale: expected None beside kv_scale_array"):
        ops.verify_attn(q, cache, table, prefix, words, scale, kv_scale=2.0, kv_scale_array=half)
    heat = on.array(np.ones(4, np.float32))
    walk = samples(on)["tree_accept_logits"][0].inputs
    with pytest.raises(ValueError, match="temperature: expected None beside temperature_array"):
        ops.tree_accept_logits(*walk, 0.5, heat)


# ---- a whole round, compiled and captured

BUDGET, K, SCALE = 12, 4, 192**-0.5


def new_round(on: TorchBackend, seed: int) -> list[Any]:
    rng = np.random.default_rng(seed)
    prefix = rng.integers(0, 40, 3).astype(np.int32)
    return on.put(
        [
            rng.standard_normal((3, 5, 60), np.float32),  # draft logits
            rng.integers(0, 60, 3),  # roots
            prefix,
            rng.standard_normal((3, BUDGET + 1, 2, 576)).astype(F16),  # q
            rng.permutation(12).reshape(3, 4).astype(np.int32),  # block table
            np.arange(3),  # seeds
            rng.standard_normal((3, BUDGET + 1, 60), np.float32),  # target logits
            rng.standard_normal((12, 16, 576)).astype(F16),  # two layers of cache
            rng.standard_normal((12, 16, 576)).astype(F16),
        ]
    )


def one_round(draft, roots, prefix, q, table, seeds, target, first, second):
    logprobs, ids, _ = ops.draft_topk(draft, K)
    tree = ops.build_ddtree(logprobs, ids, roots, prefix, BUDGET)
    draft_tokens, parents, _, positions, *links, visibility, _, num_nodes = tree
    attn, _ = ops.verify_attn(q, first, table, prefix, visibility, SCALE, num_nodes)
    mask = ops.expand_mask(visibility, num_nodes, "packed32")
    again = ops.tree_links(parents, num_nodes, prefix)
    walk = (draft_tokens, *links, num_nodes)
    accept = ops.tree_accept_logits(*walk, positions, target, 0.5, None, seeds)
    best, _, _ = ops.draft_topk(target, 1)
    other = ops.tree_accept(*walk, ops.draft_topk(target, 1)[1][..., 0])
    ops.commit_kv([first, second], table, prefix, accept[0], accept[1])
    return (*tree, attn, mask, *again, *accept, best, *other)


def filled_round(draft, roots, prefix, q, table, seeds, target, first, second, out, workspace):
    """The same without an allocation; `out` is what the first returned of each op."""
    top, tree, attn, mask, accept, best, other = out
    ops.draft_topk.out(draft, K, *top)
    ops.build_ddtree.out(top[0], top[1], roots, prefix, *tree, BUDGET)
    draft_tokens, _, _, positions, *links, visibility, _, num_nodes = tree
    ops.verify_attn.out(q, first, table, prefix, visibility, SCALE, *attn, workspace, num_nodes)
    ops.expand_mask.out(visibility, num_nodes, "packed32", mask)
    walk = (draft_tokens, *links, num_nodes)
    ops.tree_accept_logits.out(*walk, positions, target, *accept, 0.5, None, seeds)
    ops.draft_topk.out(target, 1, *best)
    ops.tree_accept.out(*walk, best[1][..., 0], *other)
    ops.commit_kv([first, second], table, prefix, accept[0], accept[1])


def outputs_of_round(on: TorchBackend, state: list[Any]) -> tuple[list[Any], Any]:
    draft, roots, prefix, q, table, _, target, first, _ = state
    top = ops.draft_topk(draft, K)
    tree = ops.build_ddtree(top[0], top[1], roots, prefix, BUDGET)
    attn = ops.verify_attn(q, first, table, prefix, tree[6], SCALE, tree[8])
    mask = ops.expand_mask(tree[6], tree[8], "packed32")
    best = ops.draft_topk(target, 1)
    walk = (tree[0], tree[4], tree[5], tree[8])
    accept, other = (ops.tree_accept(*walk, best[1][..., 0]) for _ in range(2))
    bytes = kdtree.verify_attn_workspace(3, BUDGET + 1, 2, on.device())
    workspace = torch.empty(bytes, dtype=torch.uint8, device=on.device())
    return [top, tree, attn, mask, accept, best, other], workspace


@pytest.mark.parametrize("backend_name", ["aot_eager", "inductor"])
def test_compiles_in_one_graph(on, backend_name):
    torch._dynamo.reset()
    compiled = torch.compile(one_round, fullgraph=True, backend=backend_name)
    for seed in range(2):
        state, same = new_round(on, seed), new_round(on, seed)
        got, want = compiled(*state), one_round(*same)
        assert_same(on.get(got), on.get(want))
        assert_same(on.get(state), on.get(same))  # the caches too, which commit_kv changed


def test_the_filling_form_compiles_in_one_graph(on):
    torch._dynamo.reset()
    out, workspace = outputs_of_round(on, new_round(on, 0))
    want, _ = outputs_of_round(on, new_round(on, 0))
    compiled = torch.compile(filled_round, fullgraph=True, backend="inductor")
    state, same = new_round(on, 1), new_round(on, 1)
    compiled(*state, out, workspace)
    filled_round(*same, want, workspace)
    assert_same(on.get(out), on.get(want))
    assert_same(on.get(state), on.get(same))


def test_dynamic_shapes_compile_once(on):
    torch._dynamo.reset()
    seen = 0

    def count(graph: Any, inputs: Any) -> Any:
        nonlocal seen
        seen += 1
        return graph

    compiled = torch.compile(
        lambda logits: ops.draft_topk(logits, 3), fullgraph=True, backend=count, dynamic=True
    )
    for rows in (2, 5, 9):
        logits = torch.randn(rows, 40, device=on.device())
        assert_same(on.get(compiled(logits)), on.get(ops.draft_topk(logits, 3)))
    assert seen == 1


def test_the_filling_form_allocates_nothing(on, monkeypatch):
    state = new_round(on, 0)
    out, workspace = outputs_of_round(on, state)

    def refuse(*args: Any, **options: Any) -> Any:
        raise AssertionError("an allocation")

    monkeypatch.setattr(torch, "empty", refuse)  # what the binding allocates tensors with
    filled_round(*state, out, workspace)
    with pytest.raises(AssertionError, match="an allocation"):
        one_round(*state)


def test_replays_in_a_cuda_graph(on):
    if not on.cuda:
        pytest.skip("CUDA graphs are CUDA's")
    state = new_round(on, 0)
    out, workspace = outputs_of_round(on, state)
    filled_round(*new_round(on, 9), out, workspace)  # every kernel is loaded
    one_round(*new_round(on, 9))
    torch.cuda.synchronize()
    returned: list[Any] = []
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        filled_round(*state, out, workspace)
        returned += one_round(*state)
    for seed in range(1, 4):
        fresh = new_round(on, seed)
        for held, new in zip(state, fresh, strict=True):
            held.copy_(new)
        graph.replay()
        want, _ = outputs_of_round(on, fresh)
        filled_round(*fresh, want, workspace)
        assert_same(on.get(out), on.get(want))
        assert_same(on.get(returned), on.get(list(one_round(*fresh))))
        assert_same(on.get(state), on.get(fresh))


@functools.cache  # torch.ops holds on to an op longer than a library that is dropped keeps it alive
def op_that_does_nothing() -> tuple[Any, Any]:
    """Of tree_accept.out's arguments, with the library that it lives in."""
    library = torch.library.Library("kdtree_test", "FRAGMENT")
    library.define(str(ops.tree_accept.out._schema).replace("kdtree::tree_accept.out", "nothing"))
    for device in ("CPU", "CUDA"):
        library.impl("nothing", lambda *args: None, device)
    return library, torch.ops.kdtree_test.nothing.default


def quickest(call: Callable[[], Any]) -> float:
    """Microseconds a call, in the quietest of many short windows."""
    best = float("inf")
    for _ in range(100):
        start = time.perf_counter()
        for _ in range(50):
            call()
        best = min(best, time.perf_counter() - start)
    return best / 50 * 1e6


def test_a_call_costs_torchs_dispatch_and_little_else(on):
    """Of 8 tensors by position: beside kdtree's own function, and an op that does nothing."""
    tree = on.put(random_trees(np.random.default_rng(0), 1, 4, 3))
    predict = torch.zeros(1, 4, dtype=torch.int64, device=on.device())
    accept = kdtree.tree_accept(tree, predict)
    given = (tree.draft_tokens, tree.next_token, tree.next_sibling, tree.num_nodes, predict)
    given += (accept.accept_index, accept.accept_token_num, accept.accept_tokens)
    _, nothing = op_that_does_nothing()
    fill = ops.tree_accept.out
    dispatch = quickest(lambda: nothing(*given))
    alone = quickest(lambda: kdtree.tree_accept(tree, predict, out=accept))
    assert quickest(lambda: fill(*given)) < alone + 1.5 * dispatch
