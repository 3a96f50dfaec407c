"""`python -m kdtree bench`: how far each op is from what the machine can do, and from its rivals.

Medians of many runs on random data. On CUDA (through torch) events time each run, after a write
that empties the L2 cache. The floor of a run is max(FLOPs / matrix rate, bytes / copy rate), with
both rates measured in the same process. Rivals are what a user could run instead, called as a user
would, launches included; one that is not installed is simply not there.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import kdtree
from kdtree import ctypes_api, reference
from kdtree.records import Accept, DraftTopK, Tree

__all__ = ["run"]

SCALE = 192**-0.5
VOCAB = 163_840
LAYERS = 61
DEPTH, CANDIDATES, PAGE = 15, 64, 64
OURS_CAUSAL = "kdtree, causal"  # no rival, but what a tree's mask costs
Work = Callable[[], Any]


@dataclasses.dataclass
class Row:
    """One op at one shape: the bytes and FLOPs that it cannot avoid, and its rivals."""

    op: str
    shape: str
    work: Work
    bytes: int
    flops: int = 0
    rivals: dict[str, Work] = dataclasses.field(default_factory=dict)


# ---- the device


class Cpu:
    """NumPy arrays and the wall clock. Rivals run in torch where it is installed.

    They get float32 instead of float16, in which torch is much slower on a CPU.
    """

    name = "cpu"
    budget_s = 0.3  # of one measurement
    half = "float16"  # dtype of queries, caches and logits
    matrix_dtype = "float32"

    def __init__(self, quick: bool) -> None:
        self.quick = quick
        self.said: set[str] = set()
        self.rng = np.random.default_rng(0)
        try:
            self.torch: Any = importlib.import_module("torch")
        except (ImportError, OSError):
            self.torch = None

    def say(self, text: str) -> None:
        """Why something is missing, once."""
        if text not in self.said:
            self.said.add(text)
            print(f"  ({text})")

    def description(self) -> str:
        return f"{os.cpu_count()} {platform.machine()} CPUs, NumPy {np.__version__}"

    def array(self, x: np.ndarray[Any, Any]) -> Any:
        return x

    def normal(self, *shape: int) -> Any:
        return self.rng.standard_normal(shape, np.float32).astype(np.float16)

    def fp8(self, x: Any) -> Any:
        """The array in float8_e4m3fn; None where NumPy has no such type."""
        try:
            return x.astype(importlib.import_module("ml_dtypes").float8_e4m3fn)
        except ImportError:
            return None

    def empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        return np.empty(shape, dtype)

    def graph(self, work: Work) -> Work:
        """The same work as one CUDA graph, where there are such."""
        return work

    def rival(self, x: Any) -> Any:
        """The array as a torch tensor, for a rival; None without torch."""
        if self.torch is None:
            return None
        tensor = self.torch.from_numpy(x)
        return tensor.float() if tensor.is_floating_point() else tensor

    def numpy(self, x: Any) -> np.ndarray[Any, Any]:
        return np.asarray(x)

    def ceilings(self) -> tuple[float, float]:
        """(FLOP/s of a matrix product, bytes/s of a copy)."""
        n = 1024 if self.quick else 2048
        a = self.rng.standard_normal((n, n), np.float32)
        source = self.rng.integers(0, 255, 64 << 20 if self.quick else 256 << 20, np.uint8)
        target = np.empty_like(source)
        matrix = self.time(lambda: a @ a)
        copy = self.time(lambda: np.copyto(target, source))
        return 2 * n**3 / matrix, 2 * source.nbytes / copy

    def time(self, work: Work) -> float:
        """Median seconds of a run."""
        work()
        first = self._clock(work)
        runs = max(3, min(100, int(self.budget_s * (0.2 if self.quick else 1) / first)))
        return statistics.median(self._clock(work) for _ in range(runs))

    @staticmethod
    def _clock(work: Work) -> float:
        start = time.perf_counter()
        work()
        return max(time.perf_counter() - start, 1e-9)


class Cuda(Cpu):
    """torch tensors on its current GPU, and events."""

    name = "cuda"
    half = "bfloat16"
    matrix_dtype = "bfloat16"

    def __init__(self, quick: bool) -> None:
        super().__init__(quick)
        if self.torch is None or not self.torch.cuda.is_available():
            raise RuntimeError("--device cuda needs torch with a CUDA device")
        self.torch.manual_seed(0)
        l2 = self.torch.cuda.get_device_properties().L2_cache_size
        # Long enough to write that the launches of the next run hide behind it.
        self.flush = self.torch.empty(max(2 * l2, 256 << 20), dtype=self.torch.uint8, device="cuda")

    def description(self) -> str:
        path = ctypes_api.device_info(self.torch.cuda.current_device())["path"]
        return f"{self.torch.cuda.get_device_name()}, {path} path, torch {self.torch.__version__}"

    def array(self, x: np.ndarray[Any, Any]) -> Any:
        return self.torch.from_numpy(x).cuda()

    def normal(self, *shape: int) -> Any:
        return self.torch.randn(shape, device="cuda", dtype=self.torch.bfloat16)

    def fp8(self, x: Any) -> Any:
        return x.to(self.torch.float8_e4m3fn)

    def empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        return self.torch.empty(shape, dtype=getattr(self.torch, dtype), device="cuda")

    def graph(self, work: Work) -> Work:
        work()
        graph = self.torch.cuda.CUDAGraph()
        with self.torch.cuda.graph(graph):
            work()
        return lambda: graph.replay()

    def rival(self, x: Any) -> Any:
        return x

    def numpy(self, x: Any) -> np.ndarray[Any, Any]:
        return np.asarray(x.cpu())

    def ceilings(self) -> tuple[float, float]:
        n = 8192
        a, b = self.normal(n, n), self.normal(n, n)
        source = self.torch.randint(0, 255, (1 << 30,), dtype=self.torch.uint8, device="cuda")
        target = self.torch.empty_like(source)
        matrix = self.time(lambda: a @ b)
        copy = self.time(lambda: target.copy_(source))
        return 2 * n**3 / matrix, 2 * source.numel() / copy

    def time(self, work: Work) -> float:
        cuda = self.torch.cuda
        for _ in range(3):
            work()
        cuda.synchronize()
        start = time.perf_counter()
        work()
        cuda.synchronize()
        first = max(time.perf_counter() - start, 1e-5)
        runs = max(5, min(20 if self.quick else 100, int(self.budget_s / first)))
        events = [[cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(runs)]
        for i, (begin, end) in enumerate(events):
            self.flush.fill_(i % 251)
            begin.record()
            work()
            end.record()
        cuda.synchronize()
        times: list[float] = [begin.elapsed_time(end) for begin, end in events]
        return statistics.median(times) / 1e3


# ---- the ops


@dataclasses.dataclass
class Attention:
    """Arguments of verify_attn: a random tree a request, pages in random order."""

    lens: list[int]  # positions before the root
    heads: int
    qlen: int
    page: int = PAGE
    fp8: bool = False
    note: str = ""

    def __post_init__(self) -> None:
        self.batch = len(self.lens)
        self.totals = np.array(self.lens, np.int32) + self.qlen
        self.pages = -(-self.totals // self.page)  # of each request
        same = len(set(self.lens)) == 1
        self.shape = f"B{self.batch} H{self.heads} Q{self.qlen} "
        self.shape += f"KV{self.lens[0]}" if same else f"KV{min(self.lens)}..{max(self.lens)}"
        self.shape += self.note

    def make(self, d: Cpu) -> None:
        """Draws the arrays."""
        B, Q = self.batch, self.qlen
        parents = [-1, *(int(d.rng.integers(max(0, i - 6), i)) for i in range(1, Q))]
        tree = reference.tree_links(np.array([parents] * B, np.int32), np.full(B, Q, np.int32))
        self.mask = reference.expand_mask(tree, "qlen")[0]
        self.words = d.array(tree.visibility)
        self.q = d.normal(B, Q, self.heads, 576)
        self.cache = d.normal(int(self.pages.sum()), self.page, 576)
        table = np.zeros((B, int(self.pages.max())), np.int32)
        self.indices = d.rng.permutation(int(self.pages.sum())).astype(np.int32)
        for row, chosen in zip(table, np.split(self.indices, self.pages.cumsum()), strict=False):
            row[: len(chosen)] = chosen
        self.table = d.array(table)


def attn(d: Cpu) -> Iterator[Row]:
    """verify_attn; FLOPs of both products over every key, bytes of the cache once, of q and out."""
    shapes = [
        (1, 8, 65, 8192), (1, 8, 65, 65536), (8, 8, 65, 8192), (32, 8, 65, 8192), (32, 8, 65, 1024),
        (8, 16, 65, 8192), (8, 64, 65, 8192), (1, 64, 65, 32768), (2, 128, 65, 8192),
        (32, 8, 17, 8192), (32, 8, 1, 8192), (64, 64, 1, 8192), (1, 8, 1, 131072),
    ]  # fmt: skip
    lens = [4641, 45118, 1730, 1696, *d.rng.integers(1000, 9000, 28).tolist()]
    if d.name == "cpu":
        shapes = [(1, 8, 65, 2048), (1, 8, 17, 2048), (1, 8, 1, 2048), (4, 16, 1, 1024)]
        lens = [46, 451, 17, 100]
    if d.quick:
        shapes = [(1, 8, 17, 256)] if d.name == "cpu" else shapes[:1] + shapes[3:4] + shapes[10:11]
    cases = [Attention([KV] * B, H, Q) for B, H, Q, KV in shapes]
    B, H, Q, KV = (8, 8, 65, 8192) if d.name == "cuda" else shapes[0]
    cases += [
        Attention([KV] * B, H, Q, page=1, note=", page size 1"),
        Attention([KV] * B, H, Q, page=16, note=", page size 16"),
        Attention([KV] * B, H, Q, fp8=True, note=", fp8 cache"),
        Attention([KV] * 4 * B, H, 1, fp8=True, note=", fp8 cache"),
        Attention(lens, H, Q, note=", ragged"),
        Attention([sum(lens) // len(lens)] * len(lens), H, Q, note=", even"),
    ]
    for case in cases:
        case.make(d)
        cache: Any = case.cache
        if case.fp8:
            cache = d.fp8(cache)
            if cache is None:
                continue
        out = d.empty((case.batch, case.qlen, case.heads, 512), d.half)
        size = kdtree.verify_attn_workspace(case.batch, case.qlen, case.heads, d.name)
        first = (case.q, cache, case.table, d.array(np.array(case.lens, np.int32)))
        options: Any = {"sm_scale": SCALE, "out": out, "workspace": d.empty((size,), "uint8")}

        def masked(args: Any = (*first, case.words), options: Any = options) -> object:
            return kdtree.verify_attn(*args, **options)

        def causal(args: Any = first, options: Any = options) -> object:
            return kdtree.verify_attn(*args, **options)

        rivals: dict[str, Work] = {OURS_CAUSAL: causal}
        if not case.fp8:  # the rivals' fp8 caches have other layouts
            rivals |= _attn_rivals(d, case, masked, causal)
        tokens = int(case.totals.sum())
        rows = case.batch * case.qlen * case.heads
        yield Row(
            "verify_attn",
            case.shape,
            masked,
            bytes=tokens * 576 * (1 if case.fp8 else 2) + rows * (576 + 512) * 2,
            flops=2 * case.heads * case.qlen * tokens * (576 + 512),
            rivals=rivals,
        )


def _attn_rivals(d: Cpu, case: Attention, masked: Work, causal: Work) -> dict[str, Work]:
    """Rivals whose output agrees with ours; why one is missing is printed."""
    peers: list[Callable[[Cpu, Attention], dict[str, Work]]] = [_torch_matmul]
    if d.name == "cuda":
        peers += [_flash_mla, _fa3, _flashinfer]
    rivals: dict[str, Work] = {}
    for peer in peers:
        try:
            found = peer(d, case)
            for name, work in found.items():
                ours = d.rival((causal if name.endswith("causal") else masked)()).float()
                off = float((work().reshape(ours.shape).float() - ours).norm() / ours.norm())
                if not off < 0.02:
                    d.say(f"{name}: another result, by {off:.2g}, at {case.shape}")
            rivals |= found
        except Exception as error:  # not installed, or not for this GPU or shape
            d.say(f"{peer.__name__.strip('_')}: {type(error).__name__}: {str(error)[:150]}")
    return rivals


def _torch_matmul(d: Cpu, case: Attention) -> dict[str, Work]:
    B, Q, H, total = case.batch, case.qlen, case.heads, int(case.totals[0])
    if d.torch is None or len(set(case.lens)) > 1 or B * H * Q * total > 3e8:
        return {}  # its scores must fit
    torch = d.torch
    rows = _latents(d, case)
    flat = d.rival(case.q).transpose(1, 2).reshape(B, H * Q, 576)
    bias = torch.zeros(Q, total, dtype=flat.dtype, device=flat.device)
    bias[:, total - Q :].masked_fill_(~d.rival(d.array(case.mask)), -math.inf)
    bias = bias.repeat(H, 1).expand(B, -1, -1)

    def work() -> object:
        scores = torch.baddbmm(bias, flat, rows.transpose(1, 2), alpha=SCALE)
        return (scores.softmax(-1) @ rows[..., :512]).view(B, H, Q, 512).transpose(1, 2)

    return {"torch matmul": work}


def _latents(d: Cpu, case: Attention) -> Any:
    """The cache as contiguous rows [B, longest, 576]."""
    cache, table = d.rival(case.cache), d.rival(case.table)
    rows = cache[table.long()].reshape(case.batch, -1, 576)
    return rows[:, : int(case.totals.max())].contiguous()


# The peers know the causal mask only: the same work, another result.


def _flash_mla(d: Cpu, case: Attention) -> dict[str, Work]:
    if case.page != 64:
        raise ValueError(f"has no page size {case.page}")
    peer = importlib.import_module("flash_mla")
    metadata, _ = peer.get_mla_metadata()
    lens = d.array(case.totals)
    options = {"softmax_scale": SCALE, "causal": True, "use_legacy": True}

    def work() -> object:
        return peer.flash_mla_with_kvcache(
            case.q, case.cache.unsqueeze(2), case.table, lens, 512, metadata, None, **options
        )[0]

    work()
    return {"FlashMLA, causal": work}


def _fa3(d: Cpu, case: Attention) -> dict[str, Work]:
    peer = importlib.import_module("fa3_fwd_interface")
    rows = _latents(d, case)[:, :, None]
    k, v = rows[..., 512:].contiguous(), rows[..., :512].contiguous()
    q_rope, q_latent = case.q[..., 512:].contiguous(), case.q[..., :512].contiguous()
    lens = d.array(case.totals)
    options = {"softmax_scale": SCALE, "causal": True}

    works: list[Work] = []
    for splits in (0, 1, 4, 16):  # its own choice is not always its best

        def work(splits: int = splits) -> object:
            return peer.flash_attn_with_kvcache(
                q_rope, k, v, qv=q_latent, cache_seqlens=lens, num_splits=splits, **options
            )

        try:
            work()
        except RuntimeError:
            if splits == 16 and not works:
                raise
            continue
        works.append(work)
    return {"FA3, causal": min(works, key=d.time)}


def _flashinfer(d: Cpu, case: Attention) -> dict[str, Work]:
    peer = importlib.import_module("flashinfer")
    torch = d.torch
    B, Q, H = case.batch, case.qlen, case.heads
    q_indptr = d.array(np.arange(0, (B + 1) * Q, Q, dtype=np.int32))
    kv_indptr = d.array(np.concatenate([[0], case.pages.cumsum()]).astype(np.int32))
    indices, lens = d.array(case.indices), d.array(case.totals)
    q_latent = case.q[..., :512].reshape(B * Q, H, 512).contiguous()
    q_rope = case.q[..., 512:].reshape(B * Q, H, 64).contiguous()
    latent, rope = case.cache[..., :512].contiguous(), case.cache[..., 512:].contiguous()
    rivals: dict[str, Work] = {}
    for backend in ("fa3", "fa2"):
        scratch = torch.empty(512 << 20, dtype=torch.int8, device="cuda")
        wrapper = peer.mla.BatchMLAPagedAttentionWrapper(scratch, backend=backend)
        wrapper.plan(
            q_indptr, kv_indptr, indices, lens, H, 512, 64, case.page, True, SCALE,
            torch.bfloat16, torch.bfloat16,
        )  # fmt: skip

        def work(wrapper: Any = wrapper) -> object:
            return wrapper.run(q_latent, q_rope, latent, rope)

        try:
            work()
        except RuntimeError as error:  # a GPU that this backend is not for
            d.say(f"flashinfer {backend}: {str(error)[:150]}")
            continue
        rivals[f"FlashInfer {backend}, causal"] = work
    return rivals


def call_us(d: Cpu) -> dict[str, float]:
    """Microseconds of the host for a verify_attn with nothing to launch, by how it is called.

    Its arrays are checked and handed over, and that is all: what a call costs over the kernel.
    """
    q, cache = d.normal(0, 65, 8, 576), d.normal(1, PAGE, 576)
    table, lens, nodes = (d.array(np.zeros(shape, np.int32)) for shape in ((0, 1), (0,), (0,)))
    words, out = d.array(np.zeros((0, 65), np.int64)), d.empty((0, 65, 8, 512), d.half)
    scratch = d.empty((16,), "uint8")

    def function() -> None:
        for _ in range(1000):
            kdtree.verify_attn(
                q, cache, table, lens, words, num_nodes=nodes, sm_scale=SCALE, out=out,
                workspace=scratch,
            )  # fmt: skip

    ways = {"kdtree.verify_attn": function}
    if d.torch is not None:
        importlib.import_module("kdtree.torch_ops")
        fill = d.torch.ops.kdtree.verify_attn.out
        lse = d.empty((0, 65, 8), "float32")
        head = [d.torch.as_tensor(x) for x in (q, cache, table, lens, words)]
        tail = [d.torch.as_tensor(x) for x in (out, lse, scratch, nodes)]

        def op() -> None:
            for _ in range(1000):
                fill(*head, SCALE, *tail)

        ways["torch.ops.kdtree.verify_attn.out"] = op
    times = 20 if d.quick else 200
    return {way: min(d._clock(calls) for _ in range(times)) * 1e3 for way, calls in ways.items()}


def topk(d: Cpu) -> Iterator[Row]:
    """draft_topk and merge_topk: bytes of the logits, once."""
    for B in (1,) if d.name == "cpu" or d.quick else (1, 8, 32):
        depth = 2 if d.name == "cpu" else DEPTH
        logits = d.normal(B, depth, VOCAB)
        out = kdtree.draft_topk(logits, CANDIDATES)

        def work(logits: Any = logits, out: DraftTopK = out) -> object:
            return kdtree.draft_topk(logits, CANDIDATES, out=out)

        dense = d.rival(logits)

        def by_torch(logits: Any = dense) -> object:
            wide = logits.float()
            values, ids = d.torch.topk(wide, CANDIDATES, dim=-1)
            return values - d.torch.logsumexp(wide, -1, keepdim=True), ids

        rivals: dict[str, Work] = {"torch topk+logsumexp": by_torch} if d.torch else {}
        shape = f"B{B} L{depth} K{CANDIDATES} V{VOCAB}"
        yield Row("draft_topk", shape, work, B * depth * VOCAB * 2, rivals=rivals)

        shards = 8
        values = -np.sort(-d.rng.standard_normal((shards, B, depth, CANDIDATES), np.float32))
        ids = d.rng.permutation(values.size).reshape(values.shape)
        lse = values[..., 0] + 1
        parts = tuple(d.array(x) for x in (values, ids, lse))
        merged = kdtree.merge_topk(*parts)

        def merge(parts: Any = parts, out: DraftTopK = merged) -> object:
            return kdtree.merge_topk(*parts, out=out)

        shape = f"S{shards} B{B} L{depth} K{CANDIDATES}"
        yield Row("merge_topk", shape, merge, values.size * 12 + lse.size * 4)
    if d.name == "cpu" or d.quick:
        return
    B = 64  # of a captured graph
    logits = d.normal(B, DEPTH, VOCAB)
    out = kdtree.draft_topk(logits, CANDIDATES)
    for live in (4, B):
        roots = d.array(np.where(np.arange(B) < live, 1, -1))

        def live_ones(logits: Any = logits, roots: Any = roots, out: DraftTopK = out) -> object:
            return kdtree.draft_topk(logits, CANDIDATES, root_tokens=roots, out=out)

        shape = f"B{B}, {live} live, L{DEPTH} K{CANDIDATES} V{VOCAB}"
        yield Row("draft_topk", shape, live_ones, live * DEPTH * VOCAB * 2)


def _drafts(d: Cpu, batch: int) -> tuple[Any, ...]:
    """Arguments of build_ddtree, as a good drafter gives them: a few likely candidates a row."""
    logits = 3 * d.rng.standard_normal((batch, DEPTH, VOCAB // 16), np.float32)
    top = reference.draft_topk(logits, CANDIDATES)
    roots = d.rng.integers(0, VOCAB, batch)
    lens = np.full(batch, 8192, np.int32)
    return tuple(d.array(x) for x in (top.logprobs, top.ids, roots, lens))


_TREE_BYTES = 5 * 8 + 3 * 4  # of one slot of a Tree


def build(d: Cpu) -> Iterator[Row]:
    """build_ddtree, tree_links, expand_mask: bytes of the candidates and of the tree."""
    for B in (1,) if d.quick else (1, 64):
        drafts = _drafts(d, B)
        for budget in (16, 64):
            tree = kdtree.build_ddtree(*drafts, budget=budget)

            def work(drafts: Any = drafts, budget: int = budget, out: Tree = tree) -> object:
                return kdtree.build_ddtree(*drafts, budget=budget, out=out)

            def by_heap(logprobs: Any = drafts[0], budget: int = budget) -> object:
                rows = d.numpy(logprobs).tolist()  # from the device, as a builder on the host does
                return [reference._best_first(r, budget, False, None) for r in rows]

            size = B * (DEPTH * CANDIDATES * 12 + (budget + 1) * _TREE_BYTES)
            shape = f"B{B} L{DEPTH} K{CANDIDATES} budget {budget}"
            yield Row("build_ddtree", shape, work, size, rivals={"Python heap": by_heap})

        def links(tree: Tree = tree) -> object:
            return kdtree.tree_links(tree.parents, tree.num_nodes, out=tree)

        mask = kdtree.expand_mask(tree, "qlen")

        def expand(tree: Tree = tree, out: Any = mask) -> object:
            return kdtree.expand_mask(tree, "qlen", out=out)

        yield Row("tree_links", f"B{B} Q65", links, B * 65 * 40)
        yield Row("expand_mask", f"B{B} Q65 qlen", expand, B * 65 * (8 + 65))


def _accept_some(d: Cpu, tree: Tree, logits: Any) -> np.ndarray[Any, Any]:
    """The target's tokens that accept the first 6 nodes of a tree with a seeded chain.

    They become the likeliest of their logits. Padding requests have none.
    """
    links, tokens = d.numpy(tree.next_token), d.numpy(tree.draft_tokens)
    target = np.full(links.shape, -1)
    for b in range(len(links)):
        slot = 0
        for _ in range(6):
            child = int(links[b, slot])
            if child < 0:
                break
            target[b, slot] = tokens[b, child]
            logits[b, slot, int(tokens[b, child])] = 60.0
            slot = child
    return target


def accept(d: Cpu) -> Iterator[Row]:
    """tree_accept, tree_accept_logits, 6 accepted tokens: bytes of the 7 rows visited."""
    for B in (1,) if d.name == "cpu" or d.quick else (1, 8, 32):
        tree = kdtree.build_ddtree(*_drafts(d, B), budget=64, chain_seed=True)
        logits = d.normal(B, 65, VOCAB)
        predicted = d.array(_accept_some(d, tree, logits))
        out = kdtree.tree_accept(tree, predicted)
        visited = int(d.numpy(out.accept_token_num).sum()) + B

        def walk(tree: Tree = tree, target: Any = predicted, out: Accept = out) -> object:
            return kdtree.tree_accept(tree, target, out=out)

        def greedy(tree: Tree = tree, logits: Any = logits, out: Accept = out) -> object:
            return kdtree.tree_accept_logits(tree, logits, out=out)

        heat = {"temperature": 0.7, "seeds": d.array(np.arange(B))}

        def sampled(
            tree: Tree = tree, logits: Any = logits, out: Accept = out, heat: Any = heat
        ) -> object:
            return kdtree.tree_accept_logits(tree, logits, **heat, out=out)

        dense = d.rival(logits)

        def argmax(logits: Any = dense) -> object:
            return logits.argmax(-1)

        def multinomial(logits: Any = dense) -> object:
            weights = (logits.float() / 0.7).softmax(-1)
            return d.torch.multinomial(weights.flatten(0, 1), 1)

        shape = f"B{B} Q65 V{VOCAB}, {visited} rows"
        size = visited * VOCAB * 2
        yield Row("tree_accept", f"B{B} Q65", walk, B * 65 * 8 * 5)
        for label, work, name, rival in (
            ("greedy", greedy, "torch argmax", argmax),
            ("sampled", sampled, "torch multinomial", multinomial),
        ):
            rivals: dict[str, Work] = {name: rival} if d.torch else {}
            yield Row("tree_accept_logits", f"{shape}, {label}", work, size, rivals=rivals)


def commit(d: Cpu) -> Iterator[Row]:
    """commit_kv: every moved row is read and written, in every layer."""
    layers = 4 if d.name == "cpu" else LAYERS
    for B in (1,) if d.quick else (1, 8, 32):
        pages = 4  # of a request; the tree's rows cross a page
        caches = [d.normal(B * pages, PAGE, 576) for _ in range(layers)]
        table = d.rng.permutation(B * pages).astype(np.int32).reshape(B, pages)
        lens = np.full(B, 100, np.int32)
        index = np.full((B, 65), -1, np.int32)
        index[:, :7] = [0, 1, 3, 9, 20, 41, 50]  # the first two stay where they are
        record = Accept(
            accept_index=d.array(index),
            accept_token_num=d.array(np.full(B, 6, np.int32)),
            accept_tokens=None,
        )
        args = (caches, d.array(table), d.array(lens), record)

        def work(args: Any = args) -> None:
            kdtree.commit_kv(*args)

        def places(slots: Any, table: Any = table) -> Any:
            at = 100 + slots  # [n] -> flat rows of all requests
            return d.array((table[:, at // PAGE].astype(np.int64) * PAGE + at % PAGE).ravel())

        rivals: dict[str, Work] = {}
        if d.torch:
            source, to = d.rival(places(index[0, 2:7])), d.rival(places(np.arange(2, 7)))
            flats = [d.rival(cache).view(-1, 576) for cache in caches]

            def by_layer(flats: Any = flats, source: Any = source, to: Any = to) -> None:
                for flat in flats:
                    flat[to] = flat[source]

            rivals["torch gather+scatter"] = by_layer
        moved = 5 * B * layers * 1152
        yield Row("commit_kv", f"B{B} {layers} layers, 6 accepted", work, 2 * moved, rivals=rivals)


def round_(d: Cpu) -> Iterator[Row]:
    """draft_topk, build_ddtree, tree_accept_logits, commit_kv: one CUDA graph.

    Spare rows of a graph that was captured for more requests should cost little. There are also
    rounds that start at draft_topk's result.
    """
    layers, vocab = (LAYERS, VOCAB) if d.name == "cuda" else (4, VOCAB // 16)
    pages = 4
    for B, live in ((1, 1), (4, 4), (8 if d.name == "cpu" else 64, 4)):
        if d.quick and B > 1:
            continue
        drafts = d.normal(B, DEPTH, vocab)
        drafts *= 3
        logits = d.normal(B, 65, vocab)
        roots = d.array(np.where(np.arange(B) < live, 1, -1))
        lens = d.array(np.full(B, 100, np.int32))
        table = d.array(d.rng.permutation(B * pages).astype(np.int32).reshape(B, pages))
        caches = [d.normal(B * pages, PAGE, 576) for _ in range(layers)]
        top = kdtree.draft_topk(drafts, CANDIDATES)
        options: dict[str, Any] = {"budget": 64, "chain_seed": True}
        tree = kdtree.build_ddtree(top.logprobs, top.ids, roots, lens, **options)
        _accept_some(d, tree, logits)
        accepted = kdtree.tree_accept_logits(tree, logits)

        def rest(
            a: Any = (top, roots, lens, options, tree, logits, accepted, caches, table),
        ) -> None:
            top, roots, lens, options, tree, logits, accepted, caches, table = a
            kdtree.build_ddtree(top.logprobs, top.ids, roots, lens, **options, out=tree)
            kdtree.tree_accept_logits(tree, logits, out=accepted)
            kdtree.commit_kv(caches, table, lens, accepted)

        def whole(
            drafts: Any = drafts, roots: Any = roots, top: DraftTopK = top, rest: Work = rest
        ) -> None:
            kdtree.draft_topk(drafts, CANDIDATES, root_tokens=roots, out=top)
            rest()

        size = live * (7 * vocab * 2 + DEPTH * CANDIDATES * 12 + 65 * _TREE_BYTES)
        shape = f"B{B}, {live} live"
        yield Row(
            "round", f"{shape}, from draft_topk", d.graph(whole), size + live * DEPTH * vocab * 2
        )
        yield Row("round", f"{shape}, from build_ddtree", d.graph(rest), size)


OPS: dict[str, Callable[[Cpu], Iterator[Row]]] = {
    "attn": attn,
    "topk": topk,
    "build": build,
    "accept": accept,
    "commit": commit,
    "round": round_,
}


# ---- the table


def run(
    ops: Sequence[str] = ("all",),
    *,
    device: str | None = None,
    quick: bool = False,
    save: Path | None = None,
    compare: Path | None = None,
) -> int:
    """Measures and prints. Returns an exit status."""
    if device is None:
        try:
            torch = importlib.import_module("torch")
            device = "cuda" if torch.cuda.is_available() else "cpu"
        except (ImportError, OSError):
            device = "cpu"
    try:
        before = {} if compare is None else _read(compare)
        if save is not None:
            save.touch()  # what cannot be written is told before, not after the measuring
        d = Cuda(quick) if device == "cuda" else Cpu(quick)
    except (OSError, ValueError, RuntimeError) as error:
        print(error)
        return 1
    ops = list(OPS) if "all" in ops else ops
    matrix, copy = d.ceilings()
    print(f"kdtree {kdtree.__version__} on {d.description()}")
    print(f"ceilings: matrix product {matrix / 1e12:.4g} TFLOP/s, copy {copy / 1e9:.4g} GB/s")
    print("x rival: kdtree's time over that of its best rival; rivals in us")
    head = f"{'op':<18} {'shape':<42} {'us':>9} {'TFLOP/s':>8} {'GB/s':>7} {'MB':>8} {'GFLOP':>8} "
    head += f"{'x floor':>8}" + (f" {'x before':>8}" if before else "")
    print(head + f" {'x rival':>8}  rivals")
    rows: list[dict[str, Any]] = []
    facts: dict[str, Any] = {
        "device": d.name,
        "machine": d.description(),
        "quick": quick,
        "matrix_flops_per_s": matrix,
        "copy_bytes_per_s": copy,
        "call_us": call_us(d) if "attn" in ops else None,
        "rows": rows,
    }
    for row in (row for name in ops for row in OPS[name](d)):
        result = {
            "op": row.op,
            "shape": row.shape,
            "us": d.time(row.work) * 1e6,
            "bytes": row.bytes,
            "flops": row.flops,
            "floor_us": max(row.flops / matrix, row.bytes / copy) * 1e6,
            "rivals_us": {rival: d.time(work) * 1e6 for rival, work in row.rivals.items()},
        }
        rows.append(result)
        print(_line(result, before), flush=True)
        if save is not None:  # after every row: a rival may take the process down
            _save(save, facts)
    if facts["call_us"]:  # again: other work on the host doubles it for seconds
        facts["call_us"] = {way: min(us, facts["call_us"][way]) for way, us in call_us(d).items()}
        each = ", ".join(f"{way} {us:.2f} us" for way, us in facts["call_us"].items())
        print(f"the host's time for 8 or 9 arrays and no requests: {each}")
        if save is not None:
            _save(save, facts)
    return 0


def _save(path: Path, facts: dict[str, Any]) -> None:
    saved = {"kdtree": ctypes_api.build_info(), **facts}
    path.write_text(json.dumps(saved, indent=2) + "\n", encoding="utf-8")


def _read(path: Path) -> dict[tuple[str, str], float]:
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        return {(row["op"], row["shape"]): row["us"] for row in facts["rows"]}
    except (ValueError, TypeError, LookupError) as error:
        raise ValueError(f"{path}: expected what --json writes, got {error!r}") from error


def _line(result: dict[str, Any], before: dict[tuple[str, str], float]) -> str:
    us, flops, size = result["us"], result["flops"], result["bytes"]
    rate = f"{flops / us / 1e6:.3g}" if flops else "-"
    line = (
        f"{result['op']:<18} {result['shape']:<42} {us:>9.1f} {rate:>8} {size / us / 1e3:>7.4g} "
        f"{size / 1e6:>8.4g} {flops / 1e9 if flops else 0:>8.4g} {us / result['floor_us']:>8.2f}"
    )
    if before:
        old = before.get((result["op"], result["shape"]))
        line += f" {us / old:>8.2f}" if old else f" {'new':>8}"
    rivals = result["rivals_us"]
    best = min((value for name, value in rivals.items() if name != OURS_CAUSAL), default=None)
    line += f" {us / best:>8.2f}" if best else f" {'-':>8}"
    return line + "  " + ", ".join(f"{name} {value:.1f}" for name, value in rivals.items())
