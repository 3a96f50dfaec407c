"""`python -m kdtree check`: every op on every device here against `kdtree.reference`.

Small inputs from a fixed seed, chosen to tell: exact ties, NaN, padding requests, broken trees,
wild table entries, NaN in whatever must not be read. Integers must be equal, floats within the
bound that is printed beside their error, and a second run must give the same bits.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import time
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

import kdtree
from kdtree import ctypes_api, reference
from kdtree.records import Accept

__all__ = ["run"]

Array = npt.NDArray[Any]


def run() -> int:
    """Prints one line per op and device, and a verdict. Returns an exit status."""
    start = time.perf_counter()
    failures = 0
    print(f"kdtree {kdtree.__version__}, every op against kdtree.reference")

    def report(what: str, where: str, problem: str | None, note: str = "") -> None:
        nonlocal failures
        failures += problem is not None
        verdict = f"ok      {note}" if problem is None else f"FAILED  {problem}"
        print(f"  {what:<20} {where:<20} {verdict}".rstrip(), flush=True)

    report("kdtree.h", "C library", _header_problem(), "struct sizes, functions, ABI version")
    cases = list(_cases())
    names = list(dict.fromkeys(case.op for case in cases))
    for backend in _backends():
        for name in names:
            problem, note = _check_op(backend, [case for case in cases if case.op == name])
            report(name, backend.name, problem, note)
    seconds = time.perf_counter() - start
    if failures:
        print(f"FAILED: {failures} of the lines above, in {seconds:.1f} s")
        return 1
    print(f"OK: every op is right on every device here, in {seconds:.1f} s")
    return 0


def _header_problem() -> str | None:
    try:
        return "; ".join(ctypes_api.layout_mismatches()) or None
    except (ImportError, OSError, ValueError) as error:
        return str(error)


# ---- cases


@dataclasses.dataclass(frozen=True)
class _Typed:
    """Values of a dtype that plain NumPy lacks, or a choice of dtype: float32 inside."""

    values: Array
    dtype: str


@dataclasses.dataclass(frozen=True)
class _Case:
    op: str
    label: str
    args: tuple[Any, ...]
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    bound: float = 0.0  # of a float result's error

    @functools.cached_property
    def want(self) -> dict[str, Array]:
        """What the reference says."""

        def take(x: Any) -> Any:
            return np.array(x.values if isinstance(x, _Typed) else x)

        return dict(_flat(_call(reference, self, take)))


def _cases() -> Iterator[_Case]:
    rng = np.random.default_rng(20)
    yield from _topk_cases(rng)
    yield from _tree_cases(rng)
    yield from _attention_cases(rng)
    yield from _accept_cases(rng)
    yield from _commit_cases(rng)


def _coarse(x: Array, dtype: str) -> _Typed:
    """Rounded to what bfloat16 can hold, so that every side computes on the same numbers."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32) & np.uint32(0xFFFF0000)
    return _Typed(bits.view(np.float32), dtype)


def _topk_cases(rng: np.random.Generator) -> Iterator[_Case]:
    ties = rng.integers(-40, 40, (2, 3, 5003)).astype(np.float32) / 4
    ties[0, 1, ::7] = np.nan
    ties[1, 0] = -np.inf
    for dtype in ("float32", "float16", "bfloat16"):
        yield _Case("draft_topk", f"{dtype}, ties", (_coarse(ties, dtype), 64), bound=1e-5)
    shard = {"vocab_start": 5003, "vocab_size": 5003 + 40, "normalize": False}
    yield _Case("draft_topk", "a padded shard", (_coarse(ties, "float32"), 64), shard, 1e-5)
    many = rng.standard_normal((40, 5, 5003)).astype(np.float32)
    roots = {"root_tokens": np.where(np.arange(40) % 9 == 2, 7, -1)}
    many[roots["root_tokens"] < 0] = np.nan
    yield _Case("draft_topk", "padding requests", (_coarse(many, "float16"), 64), roots, 1e-5)
    shards = [
        reference.draft_topk(
            ties[..., start : start + 1700], 16, vocab_start=start, normalize=False
        )
        for start in range(0, 5003, 1700)
    ]
    stacked = (np.stack([getattr(s, f) for s in shards]) for f in ("logprobs", "ids", "lse"))
    yield _Case("merge_topk", "3 shards", tuple(stacked), bound=1e-5)


def _drafts(rng: np.random.Generator, batch: int, depth: int, k: int) -> tuple[Array, ...]:
    """Arguments of build_ddtree: full of exact ties, some dead candidates, one padding request."""
    logprobs = -np.sort(rng.integers(0, 12, (batch, depth, k)).astype(np.float32) / 4, axis=-1)
    logprobs[0] = -np.sort(rng.gamma(1.5, 1.0, (depth, k)), axis=-1)
    logprobs[1, -1, 2:] = -np.inf
    logprobs[2, 1, 1:] = np.nan
    roots = rng.integers(0, 163_840, batch)
    roots[-1] = -1
    prefixes = rng.integers(0, 150, batch).astype(np.int32)
    return logprobs, rng.integers(0, 12, (batch, depth, k)), roots, prefixes


def _tree_cases(rng: np.random.Generator) -> Iterator[_Case]:
    drafts = _drafts(rng, 6, 7, 8)
    options: dict[str, Any]
    for budget, chain in ((64, False), (64, True), (5, True), (0, False)):
        options = {"budget": budget, "chain_seed": chain}
        label = f"budget {budget}, chain_seed {chain}"
        yield _Case("build_ddtree", label, drafts, options)
    cost = np.linspace(0, 0.4, 33, dtype=np.float32)
    options = {"budget": 32, "node_cost": cost, "base_cost": 1.0}
    yield _Case("build_ddtree", "node_cost", drafts, options)

    parents = rng.integers(-1, 65, (4, 65)).astype(np.int32)  # mostly cycles and orphans
    parents[0] = np.maximum(np.arange(65) - rng.integers(1, 7, 65), -1)
    parents[1] = np.arange(-1, 64)
    nodes = np.array([65, 64, 65, 0], np.int32)
    prefixes = np.array([0, 9, 2**31 - 70, 5], np.int32)
    tokens = rng.integers(0, 9, (4, 65))
    yield _Case("tree_links", "broken parents", (parents, nodes), {"prefix_lens": prefixes})
    links = reference.tree_links(parents, nodes, draft_tokens=tokens)
    short = np.array([3, 0, 70, 1], np.int32)
    for layout in ("qlen", "packed32", "full"):
        options = {"prefix_lens": short} if layout == "full" else {}
        yield _Case("expand_mask", layout, (links, layout), options)


def _attention_cases(rng: np.random.Generator) -> Iterator[_Case]:
    tree = reference.build_ddtree(*_drafts(rng, 4, 7, 8))
    prefixes = np.array([0, 63, 150, 40], np.int32)
    page = 16
    width = -(-(150 + 65) // page)
    table = np.full((4, width), 2**31 - 1, np.int32)  # wild where nothing may look
    pages = rng.permutation(4 * width).astype(np.int32)
    cache = np.full((4 * width, page, 576), np.nan, np.float32)
    for b, (prefix, used) in enumerate(zip(prefixes, tree.num_nodes, strict=True)):
        if used == 0:
            continue
        count = -(-int(prefix + used) // page)
        table[b, :count] = pages[b * width : b * width + count]
        at = np.arange(prefix + used)
        rows = table[b, at // page], at % page
        cache[rows] = rng.standard_normal((len(at), 576), np.float32)
    q = 2 * rng.standard_normal((4, 65, 8, 576), np.float32)
    options = {"num_nodes": tree.num_nodes, "sm_scale": 192**-0.5, "return_lse": True}
    for dtype in ("float16", "bfloat16"):
        args = (_coarse(q, dtype), _coarse(cache, dtype), table, prefixes, tree.visibility)
        yield _Case("verify_attn", f"{dtype}, tree", args, options, 2.5e-3)
        parts = (_coarse(q[..., :512], dtype), *args[1:3], prefixes, None)
        causal = {**options, "q_rope": _coarse(q[..., 512:], dtype), "kv_split": 64}
        yield _Case("verify_attn", f"{dtype}, causal, q_rope", parts, causal, 2.5e-3)
        quarters = np.clip(np.round(cache * 4) / 4, -3.5, 3.5)  # exact in e4m3
        eight = (args[0], _Typed(quarters, "float8_e4m3fn"), *args[2:])
        scaled = {**options, "kv_scale": 0.75}
        yield _Case("verify_attn", f"{dtype}, e4m3 cache", eight, scaled, 2.5e-3)
        # Plain decoding, for which there are kernels of their own.
        one = {"num_nodes": np.minimum(tree.num_nodes, 1)}
        for case, label, more in ((args, "one slot", options), (eight, "one slot, e4m3", scaled)):
            roots = (_coarse(q[:, :1], dtype), *case[1:4], None)
            yield _Case("verify_attn", f"{dtype}, {label}", roots, {**more, **one}, 2.5e-3)
    # CSR: the same rows one by one.
    at = np.arange(150 + 65)
    listing = table[:, at // page].astype(np.int64) * page + at % page
    counts = prefixes + 65
    listed = {
        **options,
        "kv_indptr": np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
        "kv_indices": np.concatenate([listing[b, :n] for b, n in enumerate(counts)]),
    }
    flat = _coarse(cache.reshape(-1, 1, 576), "float16")
    csr = (_coarse(q, "float16"), flat, None, prefixes, tree.visibility)
    yield _Case("verify_attn", "float16, CSR", csr, listed, 2.5e-3)


def _accept_cases(rng: np.random.Generator) -> Iterator[_Case]:
    tree = reference.build_ddtree(*_drafts(rng, 6, 7, 8))
    target = rng.integers(0, 12, (6, 65))
    for b in range(6):  # a long walk, whatever the draw
        slot = int(tree.num_nodes[b]) - 1
        while slot > 0:
            parent = int(tree.parents[b, slot])
            target[b, parent] = tree.draft_tokens[b, slot]
            slot = parent
    yield _Case("tree_accept", "trees", (tree, target))
    wild = dataclasses.replace(tree, next_sibling=rng.integers(-(2**40), 2**40, (6, 65)))
    wild.next_token = rng.integers(-3, 68, (6, 65))
    yield _Case("tree_accept", "wild links", (wild, target))

    logits = rng.integers(-12, 12, (6, 65, 1003)).astype(np.float32) / 4
    logits[0, 0, ::3] = np.nan
    logits[1, 0] = -np.inf
    for b in range(2, 6):
        for slot in range(65):
            logits[b, slot, target[b, slot]] += 6
    seeds = rng.integers(-(2**63), 2**63, 6)
    heat = np.array([1, 0.5, 0, 0.7, 2, 1], np.float32)
    for dtype in ("float32", "float16", "bfloat16"):
        args = (tree, _coarse(logits, dtype))
        yield _Case("tree_accept_logits", f"{dtype}, argmax", args)
        options = {"temperature": heat, "seeds": seeds, "vocab_size": 1000}
        yield _Case("tree_accept_logits", f"{dtype}, sampled", args, options)


def _commit_cases(rng: np.random.Generator) -> Iterator[_Case]:
    accept = Accept(
        accept_index=np.array([[0, 3, 4, -1], [0, 1, 2, 3], [0, 2, -1, -1], [-1] * 4], np.int32),
        accept_token_num=np.array([2, 3, 1, 0], np.int32),
        accept_tokens=np.zeros((4, 4), np.int64),
    )
    accept.accept_index[0, 2] = 3  # two destinations of one row
    prefixes = np.array([14, 0, 21, 3], np.int32)
    table = rng.permutation(12).astype(np.int32).reshape(4, 3)
    layers = [rng.standard_normal((12, 16, 72), np.float32).astype(np.float16) for _ in range(5)]
    yield _Case("commit_kv", "block_table", (layers, table, prefixes, accept))
    places = rng.permutation(12 * 16)[:16].reshape(4, 4)
    places[1, 2] = 10**12  # outside
    options = {"cache_loc": places}
    yield _Case("commit_kv", "cache_loc", (np.stack(layers), None, None, accept), options)


# ---- devices


class _Backend:
    """NumPy on the CPU; the others override what differs."""

    def __init__(self, name: str, ops: ModuleType) -> None:
        self.name = name
        self.ops = ops
        self.bits = {"bfloat16": np.uint16, "float8_e4m3fn": np.uint8}
        try:
            self.extra: Any = importlib.import_module("ml_dtypes")
        except ImportError:
            self.extra = None

    def has(self, dtype: str) -> bool:
        return dtype not in self.bits or self.extra is not None

    def array(self, x: Array) -> Any:
        return x.copy()

    def typed(self, x: _Typed) -> Any:
        return x.values.astype(getattr(self.extra, x.dtype, x.dtype))

    def numpy(self, x: Any) -> Array:
        if x.dtype.name in self.bits:
            return np.asarray(x).astype(np.float32)
        return np.array(x)


class _Torch(_Backend):
    def __init__(self, torch: ModuleType, device: str) -> None:
        super().__init__(f"torch {device}", kdtree)
        self.torch, self.device = torch, device

    def has(self, dtype: str) -> bool:
        return True

    def array(self, x: Array) -> Any:
        return self.torch.tensor(x, device=self.device)

    def typed(self, x: _Typed) -> Any:
        return self.array(x.values).to(getattr(self.torch, x.dtype))

    def numpy(self, x: Any) -> Array:
        if x.dtype in (self.torch.bfloat16, self.torch.float8_e4m3fn):
            x = x.float()
        return np.array(x.cpu())


class _Cupy(_Backend):
    def __init__(self, cupy: ModuleType, device: int) -> None:
        super().__init__(f"cupy cuda:{device}", kdtree)
        self.cupy, self.device = cupy, device

    def has(self, dtype: str) -> bool:
        return dtype not in self.bits

    def array(self, x: Array) -> Any:
        with self.cupy.cuda.Device(self.device):
            return self.cupy.asarray(x)

    def typed(self, x: _Typed) -> Any:
        return self.array(x.values.astype(x.dtype))

    def numpy(self, x: Any) -> Array:
        return np.array(self.cupy.from_dlpack(x).get())


def _backends() -> Iterator[_Backend]:
    yield _Backend("numpy cpu", kdtree)
    yield _Backend("numpy cpu, ctypes", ctypes_api)
    try:
        torch = importlib.import_module("torch")
    except (ImportError, OSError) as error:
        print(f"  (no torch: {error})")
    else:
        yield _Torch(torch, "cpu")
        if torch.cuda.is_available():
            for device in range(torch.cuda.device_count()):
                yield _Torch(torch, f"cuda:{device}")
    try:
        cupy = importlib.import_module("cupy")
    except (ImportError, OSError):
        return
    if cupy.cuda.is_available():
        for device in range(cupy.cuda.runtime.getDeviceCount()):
            yield _Cupy(cupy, device)


# ---- comparison


def _map(f: Callable[[Any], Any], x: Any) -> Any:
    """f over the arrays inside records, lists and tuples; scalars as they are."""
    if isinstance(x, dict):
        return {key: _map(f, value) for key, value in x.items()}
    if isinstance(x, (list, tuple)):
        return type(x)(_map(f, value) for value in x)
    if dataclasses.is_dataclass(x) and not isinstance(x, (type, _Typed)):
        return type(x)(**_map(f, vars(x)))
    return x if x is None or isinstance(x, (str, int, float)) else f(x)


def _flat(x: Any, name: str = "result") -> Iterator[tuple[str, Any]]:
    """(name, array) of every array inside."""
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        for key, value in vars(x).items():
            yield from _flat(value, key)
    elif isinstance(x, (list, tuple)):
        for i, value in enumerate(x):
            yield from _flat(value, f"{name}[{i}]")
    elif x is not None:
        yield name, x


def _call(ops: Any, case: _Case, take: Callable[[Any], Any]) -> Any:
    """The result of an op; commit_kv's is the cache that it moved rows in."""
    args, options = _map(take, case.args), _map(take, case.options)
    result = getattr(ops, case.op)(*args, **options)
    return args[0] if result is None else result


def _check_op(backend: _Backend, cases: list[_Case]) -> tuple[str | None, str]:
    """(the first problem or None, a note on the error seen)."""
    worst, bound, skipped = 0.0, 0.0, set()
    for case in cases:
        needs = {x.dtype for x in (*case.args, *case.options.values()) if isinstance(x, _Typed)}
        missing = {dtype for dtype in needs if not backend.has(dtype)}
        if missing:
            skipped |= missing
            continue
        try:
            error = _check_case(backend, case)
        except AssertionError as problem:
            return f"{case.label}: {problem}", ""
        except Exception as problem:  # whatever it is, the other lines still tell something
            return f"{case.label}: {type(problem).__name__}: {problem}", ""
        worst, bound = max(worst, error), max(bound, case.bound)
    notes = [f"error {worst:.1e}, at most {bound:.1e}"] if bound else ["equal"]
    if skipped:
        notes.append(f"without {', '.join(sorted(skipped))}")
    return None, "; ".join(notes)


def _check_case(backend: _Backend, case: _Case) -> float:
    def take(x: Any) -> Any:
        return backend.typed(x) if isinstance(x, _Typed) else backend.array(x)

    options = case.options
    if case.op == "expand_mask" and case.args[1] == "full":
        # On CUDA only the caller knows the size, so that `out` is given everywhere.
        size = int((65 * (options["prefix_lens"] + 65)).sum())
        options = {**options, "out": np.ones(size, np.bool_)}
    given = dataclasses.replace(case, options=options)
    got = dict(_flat(_map(backend.numpy, _call(backend.ops, given, take))))
    again = dict(_flat(_map(backend.numpy, _call(backend.ops, given, take))))
    worst = 0.0
    for name, expected in case.want.items():
        worst = max(worst, _compare(name, got[name], expected, case.bound))
        if got[name].tobytes() != again[name].tobytes():
            raise AssertionError(f"{name}: a second run gave other bits")
    return worst


def _compare(name: str, got: Array, want: Array, bound: float) -> float:
    """The error, relative to the array's size where that is above 1; raises past `bound`."""
    if got.shape != want.shape:
        raise AssertionError(f"{name}: shape {got.shape}, expected {want.shape}")
    if bound == 0 or not np.issubdtype(want.dtype, np.floating):
        differ, error = ~((got == want) | ((got != got) & (want != want))), 0.0
    else:
        a, b = got.astype(np.float64), want.astype(np.float64)
        finite = np.isfinite(b)
        apart = np.where(finite, np.abs(np.where(finite, a, 0) - np.where(finite, b, 0)), 0)
        wild = np.where(finite, ~np.isfinite(a), a != b)
        # The whole array's relative error, and no element off by more than ten times that.
        size = max(float(np.sqrt(np.mean(np.square(b[finite])))) if finite.any() else 0.0, 1e-30)
        error = float(np.sqrt(np.mean(np.square(apart[finite])))) / size if finite.any() else 0.0
        differ = wild | ~(apart <= 10 * bound * np.maximum(size, np.abs(np.where(finite, b, 0))))
        if error > bound and not differ.any():
            differ = apart == apart.max()
    if differ.any():
        at = tuple(int(i[0]) for i in np.nonzero(differ))
        raise AssertionError(
            f"{name}{list(at)}: got {got[at]!r}, expected {want[at]!r} "
            f"({int(differ.sum())} of {differ.size} differ, error {error:.1e})"
        )
    return error
