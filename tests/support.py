"""What the tests share: the array libraries, canaried outputs, comparisons, and random inputs.

A test is written in NumPy and runs on every backend present: `backend.array` takes a NumPy array
to the backend, `backend.numpy` brings one back. `call` runs an op both ways, with arrays of its
own and into canaried `out=`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
from kdtree import reference
from kdtree.records import Tree

try:
    import torch
except ImportError:
    torch = None  # type: ignore[assignment]
try:
    import cupy
except ImportError:
    cupy = None

Array = npt.NDArray[Any]

FULL = os.environ.get("KDTREE_TEST_FULL") == "1"  # every case of every grid: many minutes

BF16 = np.dtype(ml_dtypes.bfloat16)
FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
F16 = np.dtype(np.float16)
F32 = np.dtype(np.float32)
NATIVE = {np.dtype(t) for t in "?bBhHiIlLefd"}  # what every array library has


# ---- array libraries


class Backend:
    """NumPy; the others override what differs."""

    name = "numpy"
    cuda = False

    def supports(self, dtype: npt.DTypeLike) -> bool:
        return True

    def array(self, x: Array) -> Any:
        return x.copy()

    def numpy(self, x: Any) -> Array:
        assert type(x) is np.ndarray, type(x)
        return x.copy()

    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Any:
        """Memory that costs nothing until it is touched, where the machine has such."""
        return np.empty(shape, dtype)

    def view(self, raw: Any, offset: int, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Any:
        """Part of a flat uint8 array of this backend as an array of another dtype."""
        size = math.prod(shape) * np.dtype(dtype).itemsize
        return raw[offset : offset + size].view(dtype).reshape(shape)

    def device(self) -> Any:
        return "cpu"

    # -- arguments and results of an op, whole
    def put(self, x: Any) -> Any:
        return _map(self.array, np.ndarray, x)

    def get(self, x: Any) -> Any:
        return _map(self.numpy, object, x)


class DLPackArray:
    """A producer that is neither NumPy nor torch: DLPack and nothing else."""

    def __init__(self, array: Array) -> None:
        self._array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._array.__dlpack_device__()

    def __getitem__(self, index: Any) -> DLPackArray:
        return DLPackArray(self._array[index])


class DLPackBackend(Backend):
    name = "dlpack"

    def supports(self, dtype: npt.DTypeLike) -> bool:
        return np.dtype(dtype) in NATIVE  # NumPy exports no bfloat16 or float8

    def array(self, x: Array) -> Any:
        return DLPackArray(x.copy())

    def numpy(self, x: Any) -> Array:
        return np.from_dlpack(x).copy()

    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Any:
        return DLPackArray(np.empty(shape, dtype))

    def view(self, raw: Any, offset: int, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Any:
        return DLPackArray(super().view(raw._array, offset, shape, dtype))


class TorchBackend(Backend):
    def __init__(self, device: str = "cpu") -> None:
        self.name = "torch" if device == "cpu" else "torch-cuda"
        self.cuda = device != "cpu"
        self._device = torch.device(device)
        self._dtypes = {BF16: torch.bfloat16, FP8: torch.float8_e4m3fn}

    def array(self, x: Array) -> Any:
        # torch.from_numpy knows neither of ml_dtypes' dtypes.
        plain = x.view(np.dtype(f"i{x.itemsize}")) if x.dtype in self._dtypes else x
        bits = torch.from_numpy(np.array(plain, order="C")).to(self._device)
        return bits.view(self._dtypes[x.dtype]) if x.dtype in self._dtypes else bits

    def numpy(self, x: Any) -> Array:
        assert isinstance(x, torch.Tensor)
        assert x.device.type == self._device.type
        for dtype, torch_dtype in self._dtypes.items():
            if x.dtype == torch_dtype:
                bits = torch.int16 if dtype == BF16 else torch.uint8
                return np.array(x.contiguous().view(bits).cpu().numpy()).view(dtype)
        return np.array(x.cpu().numpy())

    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Any:
        return torch.empty(shape, dtype=self._dtype(dtype), device=self._device)

    def view(self, raw: Any, offset: int, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Any:
        size = math.prod(shape) * np.dtype(dtype).itemsize
        return raw[offset : offset + size].view(self._dtype(dtype)).reshape(shape)

    def _dtype(self, dtype: npt.DTypeLike) -> Any:
        dtype = np.dtype(dtype)
        return self._dtypes.get(dtype) or torch.from_numpy(np.zeros(1, dtype)).dtype

    def device(self) -> Any:
        return torch.empty(0, device=self._device).device  # with its index


class CupyBackend(Backend):
    name = "cupy"
    cuda = True

    def supports(self, dtype: npt.DTypeLike) -> bool:
        return np.dtype(dtype) in NATIVE

    def array(self, x: Array) -> Any:
        return cupy.asarray(np.asarray(x, order="C"))

    def numpy(self, x: Any) -> Array:
        return np.asarray((x if isinstance(x, cupy.ndarray) else cupy.from_dlpack(x)).get())

    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Any:
        return cupy.empty(shape, dtype)

    def device(self) -> Any:
        return "cuda:0"


def missing_backends() -> dict[str, str]:
    """Backends that this machine lacks, and why."""
    reasons = {}
    if torch is None:
        reasons["torch"] = "torch is not installed"
    if torch is None or not torch.cuda.is_available():
        reasons["torch-cuda"] = "torch sees no CUDA device" if torch else reasons["torch"]
    if cupy is None:
        reasons["cupy"] = "CuPy is not installed"
    elif not cupy.cuda.is_available():
        reasons["cupy"] = "CuPy sees no CUDA device"
    return reasons


def backends() -> list[Backend]:
    makers: dict[str, Callable[[], Backend]] = {
        "numpy": Backend,
        "dlpack": DLPackBackend,
        "torch": TorchBackend,
        "torch-cuda": lambda: TorchBackend("cuda"),
        "cupy": CupyBackend,
    }
    missing = missing_backends()
    return [make() for name, make in makers.items() if name not in missing]


def devices() -> list[Backend]:
    """NumPy, and one library with CUDA arrays where there is one."""
    return [b for b in backends() if b.name in ("numpy", "torch-cuda")]


def _map(f: Callable[[Any], Any], kind: type, x: Any) -> Any:
    """f over the arrays inside records, tuples and lists; other things as they are."""
    if x is None or isinstance(x, (str, int, float)):
        return x
    if isinstance(x, (tuple, list)):
        return type(x)(_map(f, kind, item) for item in x)
    if is_dataclass(x) and not isinstance(x, type):
        return replace(x, **{e.name: _map(f, kind, getattr(x, e.name)) for e in fields(x)})
    return f(x) if isinstance(x, kind) else x


# ---- outputs that show where they were written


class Canary:
    """An output in the middle of a patterned buffer."""

    PAD, BYTE = 256, 0xA5

    def __init__(self, backend: Backend, shape: tuple[int, ...], dtype: npt.DTypeLike) -> None:
        self.backend = backend
        self.size = math.prod(shape) * np.dtype(dtype).itemsize
        self.raw = backend.array(np.full(self.size + 2 * self.PAD, self.BYTE, np.uint8))
        self.array = backend.view(self.raw, self.PAD, shape, dtype)

    def _bytes(self) -> Array:
        return self.backend.numpy(self.raw) == self.BYTE

    def check(self) -> None:
        """Nothing was written around the output."""
        same = self._bytes()
        assert same[: self.PAD].all(), "written before the output"
        assert same[self.PAD + self.size :].all(), "written past the output"

    def check_untouched(self) -> None:
        assert self._bytes().all(), "the output was written"


class CanaryRecord:
    """A record (or one array) of canaried outputs, shaped as `like`, which is NumPy."""

    def __init__(self, backend: Backend, like: Any) -> None:
        self.canaries: list[Canary] = []

        def make(x: Array) -> Any:
            self.canaries.append(Canary(backend, x.shape, x.dtype))
            return self.canaries[-1].array

        self.record = _map(make, np.ndarray, like)

    def check(self) -> None:
        for canary in self.canaries:
            canary.check()

    def check_untouched(self) -> None:
        for canary in self.canaries:
            canary.check_untouched()


def call(backend: Backend, op: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """The op's result as NumPy, after showing that `out=` gives the same and no input changed."""
    skip_unsupported(backend, args, options)
    given, given_options = backend.put(args), {k: backend.put(v) for k, v in options.items()}
    result = backend.get(op(*given, **given_options))
    # What an op passes through is not an output.
    passed = {"parents", "num_nodes", "draft_tokens"} if op.__name__ == "tree_links" else set()
    like = replace(result, **dict.fromkeys(passed)) if passed else result
    out = CanaryRecord(backend, like)
    again = op(*given, out=out.record, **given_options)
    out.check()
    assert again is out.record
    assert_same(backend.get(again), result)
    assert_same(backend.get(given), args)
    assert_same({k: backend.get(v) for k, v in given_options.items()}, options)
    return result


def skip_unsupported(backend: Backend, *values: Any) -> None:
    """Skips the test where the backend has no such dtype."""
    import pytest

    for value in values:
        if isinstance(value, (tuple, list)):
            skip_unsupported(backend, *value)
        elif isinstance(value, dict):
            skip_unsupported(backend, *value.values())
        elif isinstance(value, np.ndarray) and not backend.supports(value.dtype):
            pytest.skip(f"{backend.name} has no {value.dtype}")


# ---- comparisons


def assert_same(got: Any, want: Any, name: str = "result") -> None:
    """Equal in shape, dtype and every bit (-0 and NaN included)."""
    if isinstance(want, dict):
        for key in want:
            assert_same(got[key], want[key], f"{name}[{key!r}]")
    elif isinstance(want, (tuple, list)):
        assert len(got) == len(want)
        for i, (g, w) in enumerate(zip(got, want, strict=True)):
            assert_same(g, w, f"{name}[{i}]")
    elif is_dataclass(want):
        for e in fields(want):
            assert_same(getattr(got, e.name), getattr(want, e.name), f"{name}.{e.name}")
    elif isinstance(want, np.ndarray):
        assert isinstance(got, np.ndarray), f"{name}: {type(got)}"
        assert got.dtype == want.dtype, f"{name}: {got.dtype}, expected {want.dtype}"
        assert got.shape == want.shape, f"{name}: {got.shape}, expected {want.shape}"
        bits = np.dtype(f"u{want.dtype.itemsize}")
        differ = np.ascontiguousarray(got).view(bits) != np.ascontiguousarray(want).view(bits)
        if differ.any():
            at = tuple(int(i[0]) for i in np.nonzero(differ))
            raise AssertionError(
                f"{name}{list(at)}: {got[at]!r}, expected {want[at]!r}; {differ.sum()} differ"
            )
    else:
        assert got == want, f"{name}: {got!r}, expected {want!r}"


def assert_close(got: Array, want: Array, *, atol: float, rtol: float = 0, name: str = "") -> None:
    """Close where finite, and infinite in the same places."""
    assert got.shape == want.shape, f"{name}: {got.shape}, expected {want.shape}"
    a, b = got.astype(np.float64), want.astype(np.float64)
    finite = np.isfinite(b)
    error = np.abs(np.where(finite, a, 0) - np.where(finite, b, 0))
    wrong = ~(error <= atol + rtol * np.abs(np.where(finite, b, 0))) | (~finite & (a != b))
    if wrong.any():
        at = tuple(int(i[0]) for i in np.nonzero(wrong))
        raise AssertionError(f"{name}{list(at)}: {a[at]}, expected {b[at]}; {wrong.sum()} differ")


def relative_error(got: Array, want: Array) -> float:
    """|got - want| / |want| over the whole array; infinite if anything is not finite."""
    a, b = got.astype(np.float64), want.astype(np.float64)
    if not np.isfinite(a).all():
        return math.inf
    size = float(np.linalg.norm(b))
    return float(np.linalg.norm(a - b)) / size if size else float(np.linalg.norm(a))


# ---- random inputs


def draft_rows(
    rng: np.random.Generator, batch: int, depth: int, k: int, *, ties: bool, dead: float = 0.0
) -> tuple[Array, Array]:
    """(logprobs, ids) of a drafter: rows descend; `ties` makes equal sums the rule."""
    if ties:
        logprobs = -rng.integers(0, 6, (batch, depth, k)) / np.float32(4)
    else:
        logprobs = -rng.gamma(1.5, 1.5, (batch, depth, k))
    logprobs = -np.sort(-logprobs.astype(np.float32), axis=-1)
    if dead:
        # What follows the first dead candidate must not matter, whatever it is.
        holes = rng.random((batch, depth, k)) < dead / k
        logprobs[holes] = np.where(rng.random(holes.sum()) < 0.5, -np.inf, np.nan)
    ids = rng.integers(0, 163_840, (batch, depth, k))
    return logprobs, ids


def random_parents(rng: np.random.Generator, batch: int, qlen: int) -> Array:
    """Whole trees of Q slots each, from bushy to deep."""
    parents = np.full((batch, qlen), -1, np.int32)
    for b in range(batch):
        reach = rng.integers(1, qlen + 1)
        for slot in range(1, qlen):
            parents[b, slot] = rng.integers(max(0, slot - reach), slot)
    return parents


def random_trees(rng: np.random.Generator, batch: int, qlen: int, vocab: int) -> Tree:
    """Trees with few token ids, so that siblings repeat and walks go deep; some are padding."""
    num_nodes = rng.integers(0, qlen + 1, batch).astype(np.int32)
    parents = random_parents(rng, batch, qlen)
    parents[np.arange(qlen) >= num_nodes[:, None]] = -1
    tokens = rng.integers(0, vocab, (batch, qlen))
    prefix_lens = rng.integers(0, 1000, batch).astype(np.int32)
    return reference.tree_links(parents, num_nodes, prefix_lens=prefix_lens, draft_tokens=tokens)


@dataclass
class AttnCase:
    """Arguments of verify_attn, with everything that must not be read poisoned."""

    q: Array
    kv_cache: Array
    block_table: Array | None
    prefix_lens: Array
    visibility: Array | None
    options: dict[str, Any]

    @property
    def args(self) -> tuple[Any, ...]:
        return self.q, self.kv_cache, self.block_table, self.prefix_lens, self.visibility

    def reference(self) -> tuple[Array, Array]:
        return reference.verify_attn(*self.args, **self.options, return_lse=True)


WILD = np.array([2**31 - 1, -7, -(2**31), 1 << 24], np.int32)  # table entries to keep away from


def attn_case(
    rng: np.random.Generator,
    *,
    prefix_lens: Any,
    qlen: int,
    heads: int,
    page_size: int = 64,
    dtype: Any = F16,
    kv_dtype: Any = None,
    visibility: str = "tree",
    num_nodes: Any = None,
    rope: bool = False,
    csr: bool = False,
    pages: int = 0,
) -> AttnCase:
    """visibility: "tree", "any" (not triangular: any slot sees any other) or "causal" (None)."""
    prefix_lens = np.asarray(prefix_lens, np.int32)
    batch = len(prefix_lens)
    kv_dtype = np.dtype(kv_dtype or dtype)
    used = np.full(batch, qlen) if num_nodes is None else np.clip(num_nodes, 0, qlen)
    words: Array | None = None
    if visibility == "tree":
        words = reference.tree_links(random_parents(rng, batch, qlen), used).visibility
        # Bits at num_nodes or above are ignored, as are the words of unused slots.
        noise = np.where(used > 64, 0, np.int64(-1) << np.clip(used - 1, 0, 63))
        words |= noise[:, None]
    elif visibility == "any":
        words = rng.integers(-(2**63), 2**63, (batch, qlen))
        words |= 1 << (np.maximum(np.arange(qlen), 1) - 1)  # each slot sees itself
        if qlen == 65:
            words[:, 1] |= np.int64(-(2**63))  # slot 1 sees node 64
    # A request's pages: those of its prefix and used slots are real, the others wild.
    needed = -(-(prefix_lens + used) // page_size)
    width = int(-(-(prefix_lens.max(initial=0) + qlen) // page_size))
    pages = max(pages, int(needed.sum()) + 2)
    order = rng.permutation(pages)
    table = rng.choice(WILD, (batch, width))
    cache = np.full((pages, page_size, 576), np.nan, kv_dtype)
    flat = cache.reshape(-1, 576)
    start = 0
    for b in range(batch):
        own = order[start : start + needed[b]]
        start += needed[b]
        table[b, : needed[b]] = own
        if used[b] == 0:
            table[b] = rng.choice(WILD, width)
            continue
        sees = reference._sees(None if words is None else words[b], int(used[b]), qlen)
        seen = prefix_lens[b] + np.flatnonzero(sees.any(axis=0))
        positions = np.concatenate([np.arange(prefix_lens[b]), seen])
        rows = own[positions // page_size] * page_size + positions % page_size
        flat[rows] = rng.standard_normal((len(rows), 576), np.float32).astype(kv_dtype)
    options: dict[str, Any] = {"sm_scale": 576**-0.5}
    if num_nodes is not None:
        options["num_nodes"] = np.asarray(num_nodes, np.int32)
    if kv_dtype == FP8:
        options["kv_scale"] = 0.75
    q = (2 * rng.standard_normal((batch, qlen, heads, 576), np.float32)).astype(dtype)
    if rope:
        q, options["q_rope"] = q[..., :512].copy(), q[..., 512:].copy()
    case = AttnCase(q, cache, table, prefix_lens, words, options)
    if csr:
        assert page_size == 1
        counts = prefix_lens + qlen
        rows = [table[b, : counts[b]] for b in range(batch)]
        options["kv_indptr"] = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        options["kv_indices"] = np.concatenate([np.zeros(0, np.int32), *rows])
        case.block_table = None
    return case


def run_attn(backend: Backend, op: Callable[..., Any], case: AttnCase) -> tuple[Array, Array]:
    """(out, lse) as NumPy, after showing that out=, lse= and workspace= give the same bits."""
    skip_unsupported(backend, case.args, case.options)
    args = backend.put(case.args)
    options = {k: backend.put(v) for k, v in case.options.items()}
    out, lse = backend.get(op(*args, **options, return_lse=True))
    canary = CanaryRecord(backend, (out, lse))
    alone = op(*args, **options, out=canary.record[0], lse=canary.record[1])
    canary.check()
    assert_same(backend.get(alone), out)
    assert_same(backend.get(canary.record), (out, lse))
    return out, lse


ATTN_ERROR = 2.5e-3  # of out, relative, against float64 on the same inputs


def check_attn(backend: Backend, op: Callable[..., Any], case: AttnCase) -> None:
    """Against the oracle, request by request."""
    out, lse = run_attn(backend, op, case)
    want_out, want_lse = case.reference()
    assert out.dtype == case.q.dtype
    assert lse.dtype == F32
    for b in range(len(case.prefix_lens)):
        error = relative_error(out[b], want_out[b])
        assert error <= ATTN_ERROR, f"request {b}: relative error {error:.2e}"
    assert_close(lse, want_lse, atol=2e-3, rtol=1e-4, name="lse")
