"""Every op through the C ABI alone: ctypes, kdtree.h and the shared library.

Same names and keywords as `kdtree`'s ops, NumPy arrays and torch tensors (CPU or CUDA) in, the same
records out. It is here to prove the ABI and to show a caller from C which member holds what; it
does not use the compiled module `kdtree._core`. Struct layouts, constants and prototypes are read
from the installed header, so that there is one source of them.

Importing this module needs the standard library alone and loads nothing; a library that cannot be
loaded is an ImportError, with its cause, at the first use.
"""

from __future__ import annotations

import ctypes
import functools
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kdtree
from kdtree._lib import parse_device
from kdtree.records import Accept, DraftTopK, Tree

__all__ = [
    "Header",
    "abi_version",
    "build_ddtree",
    "build_info",
    "commit_kv",
    "device_info",
    "draft_topk",
    "expand_mask",
    "header",
    "header_path",
    "last_error",
    "layout_mismatches",
    "library",
    "library_path",
    "max_qlen",
    "merge_topk",
    "parse_header",
    "status_string",
    "tree_accept",
    "tree_accept_logits",
    "tree_links",
    "verify_attn",
    "verify_attn_workspace",
]


# ---- the header


@dataclass(frozen=True)
class Header:
    """What kdtree.h declares.

    Attributes:
        constants: the values of its #defines and enumerators.
        structs: its structs as ctypes classes, members in order.
        functions: (result type, argument types) of its functions.
    """

    constants: dict[str, int]
    structs: dict[str, type[ctypes.Structure]]
    functions: dict[str, tuple[Any, list[Any]]]


_SCALARS: dict[str, Any] = {
    "char": ctypes.c_char,
    "double": ctypes.c_double,
    "float": ctypes.c_float,
    "int": ctypes.c_int,
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
}


def parse_header(text: str) -> Header:
    """The declarations of kdtree.h: plain structs of scalars, pointers and arrays, no more."""
    text = re.sub(r"/\*.*?\*/", " ", text, flags=re.DOTALL)
    constants = {
        name: int(value)
        for name, value in re.findall(r"(?:#define\s+)?\b(KDTREE_\w+)(?:\s|=)+(\d+)\b", text)
    }
    structs: dict[str, type[ctypes.Structure]] = {}
    for name, body in re.findall(r"typedef struct (\w+) \{(.*?)\} \1;", text, re.DOTALL):
        members: list[tuple[str, Any]] = []
        for declaration in filter(str.strip, body.split(";")):
            base, *more = declaration.split(",")  # "int64_t a, b[N]", "void *const *c"
            kind, first = _split_declarator(base)
            for member in (first, *map(str.strip, more)):
                match = re.fullmatch(r"(\w+)(?:\[(\w+)\])?", member)
                if match is None:
                    raise ValueError(f"{name}: not understood: {' '.join(declaration.split())}")
                count = match[2]
                size = None if count is None else constants.get(count) or int(count)
                members.append((match[1], kind if size is None else kind * size))
        structs[name] = type(name, (ctypes.Structure,), {"_fields_": members})
    functions = {
        name: (
            _ctype(result),
            [_split_declarator(one)[0] for one in arguments.split(",") if one.strip() != "void"],
        )
        for result, name, arguments in re.findall(
            r"KDTREE_API ([\w\s*]*?)(kdtree_\w+)\(([^)]*)\);", text
        )
    }
    return Header(constants, structs, functions)


def _split_declarator(text: str) -> tuple[Any, str]:
    """Splits `const int32_t *parents` into (c_void_p, "parents")."""
    match = re.fullmatch(r"\s*(.*?)(\w+(?:\[\w+\])?)\s*", text, re.DOTALL)
    if match is None:
        raise ValueError(f"kdtree.h: not understood: {' '.join(text.split())}")
    return _ctype(match[1]), match[2]


def _ctype(text: str) -> Any:
    words = text.replace("*", " * ").split()
    if "*" in words:
        return ctypes.c_char_p if words == ["const", "char", "*"] else ctypes.c_void_p
    return _SCALARS[words[-1]]


def header_path() -> Path:
    """kdtree.h: the installed one, else, in a source tree, src/kdtree.h."""
    return _find("include/kdtree.h", Path(__file__).parents[2] / "src" / "kdtree.h")


def library_path() -> Path:
    """libkdtree_kernels_c.so beside the package."""
    return _find("libkdtree_kernels_c.so")


def _find(name: str, *otherwise: Path) -> Path:
    # An editable install has a second folder: the one with what was compiled.
    places = [*(Path(folder) / name for folder in kdtree.__path__), *otherwise]
    for path in places:
        if path.is_file():
            return path
    raise ImportError(f"{name}: expected in {' or '.join(str(p.parent) for p in places)}")


@functools.cache
def header() -> Header:
    """The parsed header."""
    return parse_header(header_path().read_text(encoding="utf-8"))


# ---- the library


@functools.cache
def library() -> ctypes.CDLL:
    """The loaded library, with the prototypes of the header.

    Raises:
        ImportError: it could not be loaded, or is of another ABI version than the header.
    """
    path = library_path()
    try:
        loaded = ctypes.CDLL(str(path))
    except OSError as error:
        raise ImportError(f"libkdtree_kernels_c could not be loaded: {error}") from error
    declared = header()
    for name, (result, arguments) in declared.functions.items():
        try:
            function = getattr(loaded, name)
        except AttributeError as error:
            raise ImportError(f"{path} lacks {name}, which kdtree.h declares") from error
        function.restype, function.argtypes = result, arguments
    version, expected = loaded.kdtree_abi_version(), declared.constants["KDTREE_ABI_VERSION"]
    if version != expected:
        raise ImportError(f"{path} has ABI version {version}, kdtree.h has {expected}")
    return loaded


def _text(function: str, *arguments: Any) -> str:
    value: bytes = getattr(library(), function)(*arguments)
    return value.decode(errors="replace")


def abi_version() -> int:
    """KDTREE_ABI_VERSION of the library."""
    return int(library().kdtree_abi_version())


def max_qlen() -> int:
    """Most tree slots of a request, root included."""
    return int(library().kdtree_max_qlen())


def last_error() -> str:
    """What this thread's last failed call said; "" before any."""
    return _text("kdtree_last_error")


def status_string(status: int) -> str:
    """A status in words."""
    return _text("kdtree_status_string", status)


def build_info() -> dict[str, str]:
    """version, commit, cuda_archs and cuda_toolkit of the library."""
    info: dict[str, str] = json.loads(_text("kdtree_build_info"))
    return info


def device_info(device_id: int = 0) -> dict[str, Any]:
    """One GPU and the code path that it would take, or why there is none. Starts the driver."""
    params = _new("kdtree_device_info_params")
    params.device_id = device_id
    _check(library().kdtree_device_info(ctypes.byref(params)))
    return {
        "device_count": params.device_count,
        "driver_version": params.driver_version,
        "name": params.name.decode(errors="replace"),
        "compute_capability": (params.cc_major, params.cc_minor),
        "num_sms": params.num_sms,
        "total_memory": params.total_memory,
        "path": params.path.decode(errors="replace"),
        "reason": params.reason.decode(errors="replace"),
    }


def layout_mismatches() -> list[str]:
    """Structs whose size the library gives otherwise than the header; empty when they agree."""
    wrong = []
    for name, struct in header().structs.items():
        params = struct()  # struct_size 0: refused, with the size that was expected
        arguments = [ctypes.byref(params), None]
        function = getattr(library(), name.removesuffix("_params"))
        status = function(*arguments[: len(function.argtypes)])
        found = re.search(r"struct_size: expected (\d+)", last_error()) if status else None
        if found is None or int(found[1]) != ctypes.sizeof(struct):
            size = "no size" if found is None else found[1]
            wrong.append(f"{name}: {ctypes.sizeof(struct)} by kdtree.h, {size} by the library")
    return wrong


def _new(struct: str) -> Any:
    params = header().structs[struct]()
    params.struct_size = ctypes.sizeof(params)
    return params


def _check(status: int) -> None:
    """A failed call's status as an exception, with the library's message."""
    constants = header().constants
    if status == constants["KDTREE_OK"]:
        return
    kinds: dict[int, type[Exception]] = {
        constants["KDTREE_ERROR_VALUE"]: ValueError,
        constants["KDTREE_ERROR_TYPE"]: TypeError,
        constants["KDTREE_ERROR_MEMORY"]: MemoryError,
    }
    raise kinds.get(status, RuntimeError)(last_error() or status_string(status))


# ---- arrays


_IDS = ("int32", "int64")
_LOGITS = ("bfloat16", "float16", "float32")
_DTYPE_CODES = {
    "int32": "KDTREE_I32",
    "int64": "KDTREE_I64",
    "float16": "KDTREE_F16",
    "bfloat16": "KDTREE_BF16",
    "float32": "KDTREE_F32",
    "float8_e4m3fn": "KDTREE_F8E4M3",
}
_CPU, _CUDA = 1, 2  # DLPack's device types


@dataclass(frozen=True)
class _View:
    """An array as the library sees it."""

    name: str
    data: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in elements
    dtype: str
    item_size: int
    device: tuple[int, int]  # DLPack's type and ordinal
    owner: Any  # the array itself

    def expect(self, dtypes: Sequence[str], device: tuple[int, int]) -> None:
        if self.dtype not in dtypes:
            expected = " or ".join(dtypes)
            raise TypeError(f"{self.name}: expected dtype {expected}, got {self.dtype}")
        if self.device != device:
            texts = ["cpu" if kind == _CPU else f"cuda:{i}" for kind, i in (device, self.device)]
            raise ValueError(f"{self.name}: expected device {texts[0]}, got {texts[1]}")

    def expect_dense(self, first: int) -> None:
        """Dimensions from `first` on (negative: from the end) are contiguous."""
        if self.strides[first:] != _dense(self.shape)[first:] and 0 not in self.shape:
            what = "a contiguous array" if first == 0 else "a dense innermost dimension"
            raise ValueError(
                f"{self.name}: expected {what}, got strides {list(self.strides)} "
                f"for shape {list(self.shape)}"
            )


def _dense(shape: Sequence[int]) -> tuple[int, ...]:
    strides, size = [], 1
    for n in reversed(shape):
        strides.append(size)
        size *= n
    return tuple(reversed(strides))


def _instance(value: object, module: str, name: str) -> bool:
    """isinstance, for a module that may not have been imported."""
    kind = getattr(sys.modules.get(module), name, None)
    return kind is not None and isinstance(value, kind)


def _view(name: str, x: Any, *, writable: bool = False) -> _View:
    if _instance(x, "numpy", "ndarray"):
        if x.dtype.hasobject:
            raise TypeError(f"{name}: expected an array of numbers, got dtype {x.dtype}")
        if any(stride % x.itemsize for stride in x.strides):
            raise ValueError(f"{name}: expected strides in whole elements, got {x.strides} bytes")
        data, readonly = x.__array_interface__["data"]
        if writable and readonly:
            raise ValueError(f"{name}: expected a writable array, got a read-only one")
        strides = [stride // x.itemsize for stride in x.strides]
        dtype = x.dtype.name if x.dtype.isnative else f"{x.dtype.name} of another byte order"
        item_size, device = x.itemsize, (_CPU, 0)
    elif _instance(x, "torch", "Tensor"):
        if x.requires_grad:
            raise ValueError(f"{name}: expected a tensor without gradient, got requires_grad=True")
        if x.is_conj() or x.is_neg():
            raise ValueError(f"{name}: expected plain memory, got a conjugate or negative view")
        if x.device.type not in ("cpu", "cuda"):
            raise TypeError(f"{name}: expected CPU or CUDA memory, got {x.device}")
        try:
            data = x.data_ptr()
            if data == x.storage_offset() * x.element_size():  # a fake tensor: no storage under it
                data = 0
        except RuntimeError as error:
            raise TypeError(f"{name}: expected a tensor with memory, got: {error}") from error
        strides, dtype = list(x.stride()), str(x.dtype).removeprefix("torch.")
        item_size = x.element_size()
        device = (_CUDA, x.device.index) if x.device.type == "cuda" else (_CPU, 0)
    else:
        got = "None" if x is None else f"{type(x).__module__}.{type(x).__qualname__}"
        raise TypeError(f"{name}: expected a NumPy array or a torch tensor, got {got}")
    shape = tuple(x.shape)
    if data == 0 and 0 not in shape:
        raise TypeError(f"{name}: expected an array with memory, got one without")
    # The stride of a dimension of one element means nothing.
    strides = [s if n > 1 else d for n, s, d in zip(shape, strides, _dense(shape), strict=True)]
    return _View(name, data, shape, tuple(strides), dtype, item_size, device, x)


def _stream(stream: Any, device: tuple[int, int]) -> int | None:
    """The cudaStream_t of an int or a stream object; None: torch's current one."""
    if stream is None:
        if device[0] == _CPU:
            return None
        stream = sys.modules["torch"].cuda.current_stream(device[1])
    handle = stream
    if hasattr(stream, "cuda_stream"):
        handle = stream.cuda_stream
    elif hasattr(stream, "__cuda_stream__"):
        protocol = stream.__cuda_stream__
        pair = protocol() if callable(protocol) else protocol  # (version, handle)
        handle = pair[1] if isinstance(pair, tuple) and len(pair) == 2 else None
    if isinstance(handle, bool) or not isinstance(handle, int):
        raise TypeError(
            "stream: expected an int handle or an object with cuda_stream or __cuda_stream__, "
            f"got {type(stream).__qualname__}"
        )
    if not 0 <= handle < 1 << 64:
        raise ValueError(f"stream: expected a cudaStream_t handle, got {handle}")
    return handle


class _Call:
    """One call of an op: its params, filled member by member, on the device of its first array.

    Shapes are written in symbols, "B Q 576"; "..." is any number of dimensions. A symbol stands
    for one size throughout the call: that of the first array that has it.
    """

    def __init__(self, op: str, name: str, first: Any, stream: Any) -> None:
        self.op = op
        self.params = _new(f"kdtree_{op}_params")
        self.like = _view(name, first)
        self.device = self.like.device
        self.stream = _stream(stream, self.device)
        self.set(device_type=self.device[0], device_id=self.device[1])
        self.sizes: dict[str, int] = {}
        self.lead = 0  # dimensions of "..."
        self.keep: list[Any] = []  # what the params point to

    def set(self, **members: Any) -> None:
        for name, value in members.items():
            if not self.has(name):  # ctypes would take any attribute
                raise AttributeError(f"kdtree_{self.op}_params has no member {name}")
            setattr(self.params, name, value)

    def has(self, member: str) -> bool:
        return hasattr(type(self.params), member)

    def symbols(self, pattern: str) -> list[str]:
        lead = " ".join(f"lead{i}" for i in range(self.lead))
        return pattern.replace("...", lead).split()

    def size(self, symbol: str) -> int | None:
        return int(symbol) if symbol.isdigit() else self.sizes.get(symbol)

    def bind(self, x: _View, pattern: str) -> list[str]:
        """Checks a shape, and gives the symbols that are new in it their sizes."""
        if "..." in pattern and not self.sizes:
            self.lead = max(0, len(x.shape) - len(pattern.split()) + 1)
            most = header().constants["KDTREE_MAX_LEAD_DIMS"]
            if self.lead > most:
                raise ValueError(
                    f"{x.name}: expected at most {most} leading dimensions, got {self.lead}"
                )
        symbols = self.symbols(pattern)
        sizes = [self.size(symbol) for symbol in symbols]
        if len(sizes) != len(x.shape) or any(
            size not in (None, n) for size, n in zip(sizes, x.shape, strict=True)
        ):
            known = ", ".join(
                s if n is None else str(n) for s, n in zip(symbols, sizes, strict=True)
            )
            raise ValueError(
                f"{x.name}: expected shape [{', '.join(pattern.split())}] = [{known}], "
                f"got {list(x.shape)}"
            )
        self.sizes.update((s, n) for s, n in zip(symbols, x.shape, strict=True) if not s.isdigit())
        return symbols

    def input(
        self, member: str, name: str, value: Any, dtypes: str | Sequence[str], pattern: str
    ) -> _View:
        """Checks an array; fills `member`, and its _dtype and its _stride_<symbol>s if it has any.

        The innermost dimension has no stride: it is dense.
        """
        x = _view(name, value)
        x.expect((dtypes,) if isinstance(dtypes, str) else dtypes, self.device)
        symbols = self.bind(x, pattern)
        x.expect_dense(-1)
        self.keep.append(x)
        self.set(**{member: x.data})
        if self.has(f"{member}_dtype"):
            self.set(**{f"{member}_dtype": header().constants[_DTYPE_CODES[x.dtype]]})
        for symbol, stride in zip(symbols, x.strides, strict=True):
            if self.has(f"{member}_stride_{symbol.lower()}"):
                self.set(**{f"{member}_stride_{symbol.lower()}": stride})
        return x

    def output(self, member: str, name: str, value: Any, dtype: str, pattern: str) -> Any:
        """The caller's array, or a new one of the library and device of the first array."""
        if value is None:
            shape = tuple(self.size(symbol) for symbol in self.symbols(pattern))
            owner = self.like.owner
            if _instance(owner, "numpy", "ndarray"):
                # bfloat16 is ml_dtypes', and an input has brought it.
                kind = owner.dtype if dtype == self.like.dtype else dtype
                value = sys.modules["numpy"].empty(shape, kind)
            else:
                value = self.empty(shape, dtype)
        x = _view(name, value, writable=True)
        x.expect((dtype,), self.device)
        self.bind(x, pattern)
        x.expect_dense(0)
        self.keep.append(x)
        self.set(**{member: x.data})
        return value

    def empty(self, shape: tuple[int | None, ...], dtype: str) -> Any:
        """torch memory for work on the call's stream, and what follows on torch's current one."""
        torch = sys.modules["torch"]
        device = self.like.owner.device
        options = {"dtype": getattr(torch, dtype), "device": device}
        current = torch.cuda.current_stream(device) if self.device[0] == _CUDA else None
        if current is None or current.cuda_stream == self.stream:
            return torch.empty(shape, **options)
        with torch.cuda.stream(torch.cuda.ExternalStream(self.stream, device)):
            value = torch.empty(shape, **options)
        value.record_stream(current)
        return value

    def run(self) -> None:
        op = getattr(library(), f"kdtree_{self.op}")
        _check(op(ctypes.byref(self.params), self.stream))


def _int(name: str, value: Any, low: int, high: int) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name}: expected an int, got {type(value).__qualname__}")
    number = int(value.__index__())
    if not low <= number <= high:
        raise ValueError(f"{name}: expected {low}..{high}, got {number}")
    return number


def _bool(name: str, value: Any) -> bool:
    if not isinstance(value, bool) and not _instance(value, "numpy", "bool_"):
        raise TypeError(f"{name}: expected a bool, got {type(value).__qualname__}")
    return bool(value)


def _float(name: str, value: Any) -> float:
    if isinstance(value, (bool, str)) or not hasattr(value, "__float__"):
        raise TypeError(f"{name}: expected a float, got {type(value).__qualname__}")
    return float(value)


_I64 = 2**63 - 1


def _vocab_size(value: int | None) -> int:
    return -1 if value is None else _int("vocab_size", value, 0, _I64)


def _is_array(value: Any) -> bool:
    return _instance(value, "numpy", "ndarray") or _instance(value, "torch", "Tensor")


def _expect(name: str, value: Any, kind: type[Any]) -> None:
    if not isinstance(value, kind):
        raise TypeError(f"{name}: expected a kdtree.{kind.__name__}, got {type(value).__name__}")


def _field(out: Any, name: str) -> Any:
    """A record's array; the record itself may be None, a field of it may not."""
    if out is None:
        return None
    value = getattr(out, name)
    if value is None:
        raise TypeError(f"out.{name}: expected an array, got None")
    return value


# ---- the ops


def draft_topk(
    logits: Any,
    k: int,
    *,
    vocab_start: int = 0,
    vocab_size: int | None = None,
    normalize: bool = True,
    root_tokens: Any = None,
    out: DraftTopK | None = None,
    stream: Any = None,
) -> DraftTopK:
    """`kdtree.draft_topk` through the C ABI."""
    call = _Call("draft_topk", "logits", logits, stream)
    x = call.input("logits", "logits", logits, _LOGITS, "... V")
    lead, vocab = call.lead, call.sizes["V"]
    call.sizes["K"] = _int("k", k, 1, min(header().constants["KDTREE_MAX_K"], vocab))
    call.params.lead_dims[:lead] = x.shape[:-1]
    call.params.logits_lead_strides[:lead] = x.strides[:-1]
    call.set(
        lead_ndim=lead,
        vocab=vocab,
        vocab_start=_int("vocab_start", vocab_start, -_I64 - 1, _I64),
        vocab_size=_vocab_size(vocab_size),
        k=call.sizes["K"],
        normalize=_bool("normalize", normalize),
    )
    if root_tokens is not None:
        if lead == 0:
            raise ValueError("logits: expected [B, ..., V] with root_tokens, got 1 dimension")
        call.sizes["B"] = x.shape[0]
        call.input("root_tokens", "root_tokens", root_tokens, _IDS, "B")
    return _run_topk(call, out, ("logprobs", "ids", "lse"))


def merge_topk(
    values: Any, ids: Any, lse: Any, *, out: DraftTopK | None = None, stream: Any = None
) -> DraftTopK:
    """`kdtree.merge_topk` through the C ABI."""
    call = _Call("merge_topk", "values", values, stream)
    views = {
        "values": call.input("values", "values", values, "float32", "S ... K"),
        "ids": call.input("ids", "ids", ids, _IDS, "S ... K"),
        "lse": call.input("lse", "lse", lse, "float32", "S ..."),
    }
    lead = call.lead
    for name, x in views.items():
        call.set(**{f"{name}_shard_stride": x.strides[0]})
        getattr(call.params, f"{name}_lead_strides")[:lead] = x.strides[1 : lead + 1]
    call.params.lead_dims[:lead] = views["values"].shape[1 : lead + 1]
    k = _int("values: K", call.sizes["K"], 1, header().constants["KDTREE_MAX_K"])
    call.set(lead_ndim=lead, shards=call.sizes["S"], k=k)
    return _run_topk(call, out, ("logprobs", "out_ids", "out_lse"))


def _run_topk(call: _Call, out: DraftTopK | None, members: tuple[str, str, str]) -> DraftTopK:
    if out is not None:
        _expect("out", out, DraftTopK)
    logprobs, ids, lse = members
    result = DraftTopK(
        logprobs=call.output(logprobs, "out.logprobs", _field(out, "logprobs"), "float32", "... K"),
        ids=call.output(ids, "out.ids", _field(out, "ids"), "int64", "... K"),
        lse=call.output(lse, "out.lse", _field(out, "lse"), "float32", "..."),
    )
    call.run()
    return result if out is None else out


_TREE = {  # dtype and shape of every field
    "draft_tokens": ("int64", "B Q"),
    "parents": ("int32", "B Q"),
    "depths": ("int32", "B Q"),
    "positions": ("int64", "B Q"),
    "next_token": ("int64", "B Q"),
    "next_sibling": ("int64", "B Q"),
    "visibility": ("int64", "B Q"),
    "scores": ("float32", "B Q"),
    "num_nodes": ("int32", "B"),
}
_LINKS = ("depths", "positions", "next_token", "next_sibling", "visibility")


def _tree_outputs(call: _Call, out: Tree | None, names: Sequence[str]) -> dict[str, Any]:
    if out is not None:
        _expect("out", out, Tree)
    return {
        name: call.output(name, f"out.{name}", _field(out, name), *_TREE[name]) for name in names
    }


def build_ddtree(
    logprobs: Any,
    ids: Any,
    root_tokens: Any,
    prefix_lens: Any,
    *,
    budget: int = 64,
    chain_seed: bool = False,
    node_cost: Any = None,
    base_cost: float | None = None,
    out: Tree | None = None,
    stream: Any = None,
) -> Tree:
    """`kdtree.build_ddtree` through the C ABI."""
    call = _Call("build_ddtree", "logprobs", logprobs, stream)
    call.input("logprobs", "logprobs", logprobs, "float32", "B L K")
    call.input("ids", "ids", ids, _IDS, "B L K")
    call.input("root_tokens", "root_tokens", root_tokens, _IDS, "B")
    call.input("prefix_lens", "prefix_lens", prefix_lens, "int32", "B")
    budget = _int("budget", budget, 0, header().constants["KDTREE_MAX_QLEN"] - 1)
    call.sizes["Q"] = budget + 1
    if (node_cost is None) != (base_cost is None):
        name = "node_cost" if node_cost is None else "base_cost"
        raise ValueError(f"{name}: expected it together with the other of the two, got None")
    if node_cost is not None:
        call.input("node_cost", "node_cost", node_cost, "float32", "Q")
        call.set(base_cost=_float("base_cost", base_cost))
    call.set(
        batch=call.sizes["B"],
        depth=call.sizes["L"],
        k=call.sizes["K"],
        budget=budget,
        chain_seed=_bool("chain_seed", chain_seed),
    )
    fields = _tree_outputs(call, out, tuple(_TREE))
    call.run()
    return Tree(**fields) if out is None else out


def tree_links(
    parents: Any,
    num_nodes: Any,
    *,
    prefix_lens: Any = None,
    draft_tokens: Any = None,
    out: Tree | None = None,
    stream: Any = None,
) -> Tree:
    """`kdtree.tree_links` through the C ABI."""
    call = _Call("tree_links", "parents", parents, stream)
    call.input("parents", "parents", parents, "int32", "B Q")
    call.input("num_nodes", "num_nodes", num_nodes, "int32", "B")
    if prefix_lens is not None:
        call.input("prefix_lens", "prefix_lens", prefix_lens, "int32", "B")
    if draft_tokens is not None:  # carried over, not read
        tokens = _view("draft_tokens", draft_tokens)
        tokens.expect(_IDS, call.device)
        call.bind(tokens, "B Q")
    call.set(batch=call.sizes["B"], qlen=call.sizes["Q"])
    fields = _tree_outputs(call, out, _LINKS)
    call.run()
    fields |= {"parents": parents, "num_nodes": num_nodes, "draft_tokens": draft_tokens}
    tree = Tree() if out is None else out
    for name in vars(tree):
        setattr(tree, name, fields.get(name))
    return tree


def expand_mask(
    tree: Tree, layout: str, *, prefix_lens: Any = None, out: Any = None, stream: Any = None
) -> Any:
    """`kdtree.expand_mask` through the C ABI."""
    _expect("tree", tree, Tree)
    call = _Call("expand_mask", "tree.visibility", tree.visibility, stream)
    call.input("visibility", "tree.visibility", tree.visibility, "int64", "B Q")
    call.input("num_nodes", "tree.num_nodes", tree.num_nodes, "int32", "B")
    if layout not in ("qlen", "full", "packed32"):
        raise ValueError(f"layout: expected 'qlen', 'full' or 'packed32', got {layout!r}")
    qlen = call.sizes["Q"]
    if prefix_lens is not None:
        call.input("prefix_lens", "prefix_lens", prefix_lens, "int32", "B")
        if layout == "full" and call.device[0] == _CPU:
            call.sizes["N"] = sum(qlen * (max(int(n), 0) + qlen) for n in prefix_lens)
    elif layout == "full":
        raise ValueError("prefix_lens: expected an int32 [B] array for layout 'full', got None")
    dtype, pattern = "bool", "B Q Q"
    if layout == "packed32":
        call.sizes["W"] = -(-qlen // 32)
        dtype, pattern = "int32", "B Q W"
    elif layout == "full":
        pattern = "N"
        if out is None and call.device[0] != _CPU:
            raise ValueError("out: expected a flat bool array for layout 'full' on CUDA, got None")
    mask = call.output("out", "out", out, dtype, pattern)
    call.set(
        batch=call.sizes["B"],
        qlen=qlen,
        layout=header().constants[f"KDTREE_MASK_{layout.upper()}"],
        out_numel=mask.numel() if hasattr(mask, "numel") else mask.size,
    )
    call.run()
    return mask


def verify_attn(
    q: Any,
    kv_cache: Any,
    block_table: Any,
    prefix_lens: Any,
    visibility: Any = None,
    *,
    num_nodes: Any = None,
    sm_scale: float,
    q_rope: Any = None,
    kv_scale: Any = None,
    kv_split: int | None = None,
    kv_indptr: Any = None,
    kv_indices: Any = None,
    out: Any = None,
    lse: Any = None,
    return_lse: bool = False,
    workspace: Any = None,
    stream: Any = None,
) -> Any:
    """`kdtree.verify_attn` through the C ABI."""
    call = _Call("verify_attn", "q", q, stream)
    query = call.input(
        "q", "q", q, ("bfloat16", "float16"), "B Q H 576" if q_rope is None else "B Q H 512"
    )
    if q_rope is not None:
        call.input("q_rope", "q_rope", q_rope, query.dtype, "B Q H 64")
    cache = call.input(
        "kv_cache",
        "kv_cache",
        kv_cache,
        (query.dtype, "float8_e4m3fn"),
        "P S 1 576" if getattr(kv_cache, "ndim", 0) == 4 else "P S 576",
    )
    if block_table is not None:
        if kv_indptr is not None or kv_indices is not None:
            raise ValueError("block_table: expected None with kv_indptr and kv_indices")
        call.input("block_table", "block_table", block_table, "int32", "B M")
        call.set(block_table_width=call.sizes["M"])
    else:
        call.sizes["B+1"] = call.sizes["B"] + 1
        call.input("kv_indptr", "kv_indptr", kv_indptr, "int32", "B+1")
        call.input("kv_indices", "kv_indices", kv_indices, _IDS, "rows")
        call.set(kv_indices_len=call.sizes["rows"])
    call.input("prefix_lens", "prefix_lens", prefix_lens, "int32", "B")
    if visibility is not None:
        call.input("visibility", "visibility", visibility, "int64", "B Q")
    if num_nodes is not None:
        call.input("num_nodes", "num_nodes", num_nodes, "int32", "B")
    if _is_array(kv_scale):
        scale = _view("kv_scale", kv_scale)
        scale.expect(("float32",), call.device)
        if any(n != 1 for n in scale.shape):
            raise ValueError(f"kv_scale: expected one element, got shape {list(scale.shape)}")
        call.set(kv_scale_ptr=scale.data)
    else:
        call.set(kv_scale=1.0 if kv_scale is None else _float("kv_scale", kv_scale))
    call.set(
        batch=call.sizes["B"],
        qlen=call.sizes["Q"],
        heads=call.sizes["H"],
        kv_dtype=header().constants[_DTYPE_CODES[cache.dtype]],
        num_pages=call.sizes["P"],
        page_size=call.sizes["S"],
        kv_stride_page=cache.strides[0],
        kv_stride_row=cache.strides[1],
        sm_scale=_float("sm_scale", sm_scale),
        kv_split=0 if kv_split is None else _int("kv_split", kv_split, 1, _I64),
    )
    result = call.output("out", "out", out, query.dtype, "B Q H 512")
    if _bool("return_lse", return_lse) or lse is not None:
        lse = call.output("lse", "lse", lse, "float32", "B Q H")
    if workspace is None and call.device[0] == _CUDA:
        workspace = _workspace(call, no_kv_split=kv_split is None)
    if workspace is not None:
        scratch = _view("workspace", workspace, writable=True)
        scratch.expect(("uint8",), call.device)
        call.bind(scratch, "bytes")
        scratch.expect_dense(0)
        call.set(workspace=scratch.data, workspace_bytes=scratch.shape[0])
    call.run()
    return (result, lse) if return_lse else result


def _workspace(call: _Call, no_kv_split: bool) -> Any:
    sizes = call.sizes["B"], call.sizes["Q"], call.sizes["H"]
    return call.empty((_workspace_bytes(*sizes, call.device, no_kv_split),), "uint8")


def _workspace_bytes(
    batch: int, qlen: int, heads: int, device: tuple[int, int], no_kv_split: bool = False
) -> int:
    params = _new("kdtree_verify_attn_workspace_params")
    params.device_type, params.device_id = device
    params.batch, params.qlen, params.heads = batch, qlen, heads
    params.no_kv_split = no_kv_split
    size = ctypes.c_int64()
    params.bytes = ctypes.addressof(size)
    _check(library().kdtree_verify_attn_workspace(ctypes.byref(params), None))
    return size.value


def verify_attn_workspace(B: int, Q: int, H: int, device: Any) -> int:
    """`kdtree.verify_attn_workspace` through the C ABI."""
    sizes = [
        _int(name, value, -_I64 - 1, _I64) for name, value in zip("BQH", (B, Q, H), strict=True)
    ]
    return _workspace_bytes(sizes[0], sizes[1], sizes[2], parse_device(device))


def tree_accept(
    tree: Tree, target_predict: Any, *, out: Accept | None = None, stream: Any = None
) -> Accept:
    """`kdtree.tree_accept` through the C ABI."""
    _expect("tree", tree, Tree)
    call = _Call("tree_accept", "target_predict", target_predict, stream)
    call.input("target_predict", "target_predict", target_predict, _IDS, "B Q")
    return _run_accept(call, tree, out)


def tree_accept_logits(
    tree: Tree,
    logits: Any,
    *,
    temperature: Any = None,
    seeds: Any = None,
    vocab_size: int | None = None,
    out: Accept | None = None,
    stream: Any = None,
) -> Accept:
    """`kdtree.tree_accept_logits` through the C ABI."""
    _expect("tree", tree, Tree)
    call = _Call("tree_accept_logits", "logits", logits, stream)
    call.input("logits", "logits", logits, _LOGITS, "B Q V")
    if tree.positions is not None:
        call.input("positions", "tree.positions", tree.positions, "int64", "B Q")
    if _is_array(temperature):
        call.input("temperature_ptr", "temperature", temperature, "float32", "B")
    elif temperature is not None:
        call.set(temperature=_float("temperature", temperature))
    if seeds is not None:
        call.input("seeds", "seeds", seeds, "int64", "B")
    call.set(vocab=call.sizes["V"], vocab_size=_vocab_size(vocab_size))
    return _run_accept(call, tree, out)


def _run_accept(call: _Call, tree: Tree, out: Accept | None) -> Accept:
    for name in ("draft_tokens", "next_token", "next_sibling"):
        call.input(name, f"tree.{name}", getattr(tree, name), _IDS, "B Q")
    call.input("num_nodes", "tree.num_nodes", tree.num_nodes, "int32", "B")
    call.set(batch=call.sizes["B"], qlen=call.sizes["Q"])
    if out is not None:
        _expect("out", out, Accept)
    fields = {
        name: call.output(name, f"out.{name}", _field(out, name), dtype, pattern)
        for name, dtype, pattern in (
            ("accept_index", "int32", "B Q"),
            ("accept_token_num", "int32", "B"),
            ("accept_tokens", "int64", "B Q"),
        )
    }
    call.run()
    return Accept(**fields) if out is None else out


def commit_kv(
    kv_caches: Any,
    block_table: Any,
    prefix_lens: Any,
    accept: Accept,
    *,
    cache_loc: Any = None,
    stream: Any = None,
) -> None:
    """`kdtree.commit_kv` through the C ABI."""
    _expect("accept", accept, Accept)
    stacked = _is_array(kv_caches)
    if (stacked and kv_caches.ndim == 0) or len(kv_caches) == 0:
        raise ValueError("kv_caches: expected at least one layer, got none")
    call = _Call("commit_kv", "kv_caches[0]", kv_caches[0], stream)
    pattern = "P S 1 D" if len(call.like.shape) == 4 else "P S D"
    layers = []
    for i, cache in enumerate(kv_caches):
        layer = _view(f"kv_caches[{i}]", cache, writable=True)
        layer.expect((call.like.dtype,), call.device)
        call.bind(layer, pattern)
        layer.expect_dense(-1)
        if layer.strides != call.like.strides:
            raise ValueError(
                f"{layer.name}: expected the strides of kv_caches[0] {list(call.like.strides)}, "
                f"got {list(layer.strides)}"
            )
        layers.append(layer)
    pointers = (ctypes.c_void_p * len(layers))(*(layer.data for layer in layers))
    call.input("accept_index", "accept.accept_index", accept.accept_index, "int32", "B Q")
    call.input("accept_token_num", "accept.accept_token_num", accept.accept_token_num, "int32", "B")
    if (block_table is None) == (cache_loc is None):
        raise ValueError("block_table: expected an array, or None together with cache_loc")
    if prefix_lens is not None or cache_loc is None:
        call.input("prefix_lens", "prefix_lens", prefix_lens, "int32", "B")
    if block_table is not None:
        call.input("block_table", "block_table", block_table, "int32", "B M")
        call.set(block_table_width=call.sizes["M"])
    else:
        call.input("cache_loc", "cache_loc", cache_loc, "int64", "B Q")
    call.set(
        batch=call.sizes["B"],
        qlen=call.sizes["Q"],
        kv_caches=ctypes.addressof(pointers),
        num_layers=len(layers),
        num_pages=call.sizes["P"],
        page_size=call.sizes["S"],
        row_elements=call.sizes["D"],
        kv_stride_page=call.like.strides[0],
        kv_stride_row=call.like.strides[1],
        element_size=call.like.item_size,
    )
    call.run()
