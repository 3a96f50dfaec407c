"""What every op does with arguments that it cannot take: a ValueError or TypeError that names the
argument, before anything is launched, with the outputs untouched.

OPS holds a valid call of each op, in NumPy, with "tree.depths" for a record's field. Each test
spoils one argument of it.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import kdtree
import numpy as np
import pytest
from kdtree import reference
from kdtree.records import Accept, DraftTopK, Tree
from support import F16, Backend, Canary, DLPackArray, TorchBackend, attn_case, random_trees, torch


@dataclass
class Op:
    function: Callable[..., Any]
    arguments: dict[str, Any]  # valid ones; arrays and dotted names as said above
    outputs: dict[str, tuple[tuple[int, ...], Any]]  # name: shape, dtype
    out_record: type | None = None
    free: dict[str, set[int]] = field(default_factory=dict)  # dimensions of any size
    optional: set[str] = field(default_factory=set)  # arrays that may be None
    own_rank: set[str] = field(default_factory=set)  # arrays whose rank is theirs to choose
    in_place: set[str] = field(default_factory=set)  # arrays that the op writes
    any_dtype: set[str] = field(default_factory=set)

    def arrays(self) -> list[str]:
        return [name for name, x in self.arguments.items() if isinstance(x, np.ndarray)]


def make_ops() -> dict[str, Op]:
    rng = np.random.default_rng(0)
    b, q, k, depth, vocab, i32, i64, f32 = 3, 5, 4, 3, 20, np.int32, np.int64, np.float32
    tree = random_trees(rng, b, q, 3)
    tree.num_nodes[:] = q
    prefix = np.array([7, 0, 20], i32)
    bq = (b, q)
    links = {
        "out.depths": (bq, i32),
        "out.positions": (bq, i64),
        "out.next_token": (bq, i64),
        "out.next_sibling": (bq, i64),
        "out.visibility": (bq, i64),
    }
    topk = {"out.logprobs": ((b, k), f32), "out.ids": ((b, k), i64), "out.lse": ((b,), f32)}
    accept = {
        "out.accept_index": (bq, i32),
        "out.accept_token_num": ((b,), i32),
        "out.accept_tokens": (bq, i64),
    }
    walk = {
        f"tree.{name}": getattr(tree, name)
        for name in ("draft_tokens", "next_token", "next_sibling", "num_nodes")
    }
    attn = attn_case(rng, prefix_lens=prefix, qlen=q, heads=2, page_size=4, num_nodes=[q] * b)
    split = attn_case(rng, prefix_lens=prefix, qlen=q, heads=2, page_size=1, rope=True, csr=True)
    attn_outputs = {"out": ((b, q, 2, 512), F16), "lse": ((b, q, 2), f32)}
    walked = reference.tree_accept(tree, rng.integers(0, 3, bq))
    commit = {
        "accept.accept_index": walked.accept_index,
        "accept.accept_token_num": walked.accept_token_num,
    }
    caches = [rng.standard_normal((20, 4, 8)).astype(F16) for _ in range(2)]
    table = rng.permutation(20)[:18].reshape(b, 6).astype(i32)
    return {
        "draft_topk": Op(
            kdtree.draft_topk,
            {"logits": rng.standard_normal((b, vocab)).astype(f32), "k": k},
            topk,
            DraftTopK,
            free={"logits": {0, 1}},
            own_rank={"logits"},
        ),
        "draft_topk, root_tokens": Op(
            kdtree.draft_topk,
            {
                "logits": rng.standard_normal((b, depth, vocab)).astype(f32),
                "k": k,
                "root_tokens": np.array([3, -1, 5]),
            },
            {
                "out.logprobs": ((b, depth, k), f32),
                "out.ids": ((b, depth, k), i64),
                "out.lse": ((b, depth), f32),
            },
            DraftTopK,
            free={"logits": {2}},
            optional={"root_tokens"},
            own_rank={"logits"},
        ),
        "merge_topk": Op(
            kdtree.merge_topk,
            {
                "values": rng.standard_normal((2, b, k)).astype(f32),
                "ids": rng.integers(0, 99, (2, b, k)),
                "lse": rng.standard_normal((2, b)).astype(f32),
            },
            topk,
            DraftTopK,
            own_rank={"values"},
        ),
        "build_ddtree": Op(
            kdtree.build_ddtree,
            {
                "logprobs": -np.sort(rng.random((b, depth, k)).astype(f32)),
                "ids": rng.integers(0, 99, (b, depth, k)),
                "root_tokens": rng.integers(0, 99, b),
                "prefix_lens": prefix,
                "node_cost": np.zeros(q, f32),
                "base_cost": 1.0,
                "budget": q - 1,
            },
            links
            | {
                "out.draft_tokens": (bq, i64),
                "out.parents": (bq, i32),
                "out.scores": (bq, f32),
                "out.num_nodes": ((b,), i32),
            },
            Tree,
        ),
        "tree_links": Op(
            kdtree.tree_links,
            {
                "parents": tree.parents,
                "num_nodes": tree.num_nodes,
                "prefix_lens": prefix,
                "draft_tokens": tree.draft_tokens,
            },
            links,
            Tree,
            optional={"prefix_lens", "draft_tokens"},
        ),
        "expand_mask": Op(
            kdtree.expand_mask,
            {
                "tree.visibility": tree.visibility,
                "tree.num_nodes": tree.num_nodes,
                "layout": "full",
                "prefix_lens": prefix,
            },
            {"out": ((q * (int(prefix.sum()) + b * q),), np.bool_)},
        ),
        "verify_attn": Op(
            kdtree.verify_attn,
            {
                "q": attn.q,
                "kv_cache": attn.kv_cache,
                "block_table": attn.block_table,
                "prefix_lens": attn.prefix_lens,
                "visibility": attn.visibility,
                "num_nodes": attn.options["num_nodes"],
                "kv_scale": np.ones(1, f32),
                "sm_scale": 0.1,
            },
            attn_outputs,
            free={"kv_cache": {0, 1}, "block_table": {1}},
            optional={"visibility", "num_nodes", "kv_scale"},
            own_rank={"kv_cache", "kv_scale"},
        ),
        "verify_attn, CSR": Op(
            kdtree.verify_attn,
            {
                "q": split.q,
                "kv_cache": split.kv_cache,
                "block_table": None,
                "prefix_lens": split.prefix_lens,
                "visibility": split.visibility,
                "q_rope": split.options["q_rope"],
                "kv_indptr": split.options["kv_indptr"],
                "kv_indices": split.options["kv_indices"],
                "sm_scale": 0.1,
            },
            attn_outputs,
            free={"kv_cache": {0}, "kv_indices": {0}},
            optional={"visibility", "q_rope"},  # without q_rope, q has another width
            own_rank={"kv_cache"},
        ),
        "tree_accept": Op(
            kdtree.tree_accept,
            walk | {"target_predict": rng.integers(0, 3, bq)},
            accept,
            Accept,
        ),
        "tree_accept_logits": Op(
            kdtree.tree_accept_logits,
            walk
            | {
                "tree.positions": tree.positions,
                "logits": rng.standard_normal((b, q, vocab)).astype(f32),
                "temperature": np.ones(b, f32),
                "seeds": rng.integers(0, 99, b),
            },
            accept,
            Accept,
            free={"logits": {2}},
            optional={"tree.positions", "temperature"},
        ),
        "commit_kv": Op(
            kdtree.commit_kv,
            commit
            | {
                "kv_caches[0]": caches[0],
                "kv_caches[1]": caches[1],
                "block_table": table,
                "prefix_lens": prefix,
            },
            {},
            free={"block_table": {1}, "accept.accept_index": {1}},
            in_place={"kv_caches[0]", "kv_caches[1]"},
            any_dtype={"kv_caches[0]", "kv_caches[1]"},
            own_rank={"kv_caches[0]"},
        ),
        "commit_kv, cache_loc": Op(
            kdtree.commit_kv,
            commit
            | {
                "kv_caches": np.stack(caches),
                "block_table": None,
                "prefix_lens": None,
                "cache_loc": rng.permutation(80)[: b * q].reshape(bq),
            },
            {},
            free={"kv_caches": {0, 1, 2, 3}},
            in_place={"kv_caches"},
            any_dtype={"kv_caches"},
        ),
    }


OPS = make_ops()
INPUTS = [(op, name) for op, spec in OPS.items() for name in spec.arrays()]
OUTPUTS = [(op, name) for op, spec in OPS.items() for name in spec.outputs]


def invoke(op: Op, arguments: dict[str, Any]) -> Any:
    """The call, with dotted and indexed names gathered into records and lists."""
    records: dict[str, dict[str, Any]] = {}
    keywords: dict[str, Any] = {}
    for name, x in arguments.items():
        if "." in name:
            record, part = name.split(".")
            records.setdefault(record, {})[part] = x
        elif name.endswith("]"):
            keywords.setdefault(name.split("[")[0], []).append(x)
        else:
            keywords[name] = x
    for record, parts in records.items():
        if record == "accept":
            keywords[record] = Accept(**{"accept_tokens": None, **parts})
        else:
            keywords[record] = (Tree if record == "tree" else op.out_record)(**parts)
    return op.function(**keywords)


def short(name: str) -> str:
    """How the C library, which knows no records, calls a field."""
    return name.split(".")[-1]


class Call:
    """A valid call on a backend, with canaried outputs."""

    def __init__(self, backend: Backend, name: str) -> None:
        self.backend, self.op = backend, OPS[name]
        self.valid = self.op.arguments
        for x in self.valid.values():
            if isinstance(x, np.ndarray) and not backend.supports(x.dtype):
                pytest.skip(f"{backend.name} has no {x.dtype}")
        self.arguments = {key: backend.put(x) for key, x in self.valid.items()}
        self.canaries = {
            key: Canary(backend, shape, dtype) for key, (shape, dtype) in self.op.outputs.items()
        }
        self.outputs = {key: canary.array for key, canary in self.canaries.items()}

    def refused(self, argument: str, **changes: Any) -> None:
        """The call with changes (by argument name) raises, says which argument, writes nothing."""
        spoiled = self.arguments | self.outputs | changes.pop("to", {}) | changes
        with pytest.raises((ValueError, TypeError)) as caught:
            invoke(self.op, spoiled)
        assert argument.split("[")[0] in str(caught.value), str(caught.value)
        assert "expected" in str(caught.value)
        for canary in self.canaries.values():
            canary.check_untouched()
        for name in self.op.in_place:
            if self.arguments[name] is spoiled[name]:
                got = self.backend.numpy(self.arguments[name])
                assert got.tobytes() == self.valid[name].tobytes(), f"{name} was written"


@pytest.fixture
def op() -> str:
    raise AssertionError("each test that takes `call` is parametrised over `op`")


@pytest.fixture
def call(backend: Backend, op: str) -> Call:
    return Call(backend, op)


@pytest.mark.parametrize("op", OPS)
def test_the_calls_are_valid(call):
    invoke(call.op, call.arguments | call.outputs)
    for canary in call.canaries.values():
        canary.check()
        assert not (canary.backend.numpy(canary.raw)[256:-256] == canary.BYTE).all()


# ---- inputs


@pytest.mark.parametrize(("op", "name"), INPUTS)
def test_input_of_another_rank(call, name):
    x = call.valid[name]
    if name not in call.op.own_rank:
        call.refused(name, to={name: call.backend.array(x[None])})
        call.refused(name, to={name: call.backend.array(x[..., None])})
    if x.ndim > 1 or name not in call.op.own_rank:
        call.refused(name, to={name: call.backend.array(np.array(x.ravel()[0]))})


@pytest.mark.parametrize("layout", ["dimensions", "strides", "dtype"])
def test_a_refused_array_is_let_go(layout):
    memory = bytearray(80)
    if layout == "dimensions":
        array = np.frombuffer(memory, np.float32).reshape((1,) * 12 + (20,))
    elif layout == "strides":
        array = np.frombuffer(memory, [("x", np.float32), ("y", np.uint8)])["x"]
    else:
        array = np.frombuffer(memory, np.float64)
    with pytest.raises((TypeError, ValueError), match=r"^logits: expected"):
        kdtree.draft_topk(array, 1)
    del array
    gc.collect()
    memory.append(0)  # a BufferError while somebody holds it


@pytest.mark.parametrize("op", ["draft_topk", "merge_topk"])
def test_more_leading_dimensions_than_there_can_be(call):
    name = "logits" if "logits" in call.valid else "values"
    x = call.valid[name]
    call.refused(name, to={name: call.backend.array(x.reshape(*[1] * 6, *x.shape))})


@pytest.mark.parametrize(("op", "name"), INPUTS)
def test_input_of_another_shape(call, name):
    x = call.valid[name]
    free = call.op.free.get(name, set())
    if name == "tree.visibility" and call.backend.cuda:
        free = free | {1}  # the caller's `out` of layout "full" may be of any size: Q is too
    for dim in set(range(x.ndim)) - free:
        for other in (np.repeat(x, 2, axis=dim), np.take(x, [], axis=dim)):
            # Another batch size or width may be named by the argument that disagrees with it.
            with pytest.raises((ValueError, TypeError), match="expected"):
                invoke(
                    call.op,
                    call.arguments | call.outputs | {name: call.backend.array(other)},
                )
            for canary in call.canaries.values():
                canary.check_untouched()


@pytest.mark.parametrize(("op", "name"), INPUTS)
def test_input_of_another_dtype(call, name):
    x = np.nan_to_num(call.valid[name].astype(np.float64), nan=0)
    if name in call.op.any_dtype:
        if call.backend.name == "numpy":
            call.refused(name, to={name: x.astype(object)})
            call.refused(name, to={name: x.astype(np.clongdouble)})  # 32 bytes
    else:
        for dtype in (np.float64, np.int16, np.bool_):
            call.refused(name, to={name: call.backend.array(x.astype(dtype))})
    if name.startswith("kv_caches["):  # one dtype for all layers
        call.refused("kv_caches", to={name: call.backend.array(x.astype(np.float32))})
        call.refused("kv_caches", to={name: call.backend.array(x.astype(np.int16))})


@pytest.mark.parametrize(("op", "name"), INPUTS)
@pytest.mark.parametrize(
    "other", [None, "text", 3, [1, 2], object()], ids=lambda x: type(x).__name__
)
def test_input_that_is_no_array(call, name, other):
    fine = other is None and name in call.op.optional
    scalar = name in ("temperature", "kv_scale") and other == 3
    if not fine and not scalar:
        call.refused(name, to={name: other})


@pytest.mark.parametrize(("op", "name"), INPUTS)
def test_input_strided_in_its_innermost_dimension(call, name):
    x = call.valid[name]
    if x.shape[-1] == 1:
        pytest.skip("one element has no stride")
    wide = call.backend.array(np.repeat(x, 2, axis=-1))
    call.refused(name, to={name: wide[..., ::2]})


@pytest.mark.parametrize(("op", "name"), INPUTS)
def test_input_on_another_device(call, name):
    if not call.backend.cuda:
        pytest.skip("CPU arrays have one device")
    call.refused(name, to={name: call.valid[name]})
    call.refused(name, to={name: DLPackArray(call.valid[name])})


# Of the imaginary part of a complex number, which is a negative view where that is conjugate.
IMAGINARY = torch and (torch.float16, torch.float32)


@pytest.mark.parametrize(("op", "name"), INPUTS)
def test_input_without_plain_memory(call, name):
    if not isinstance(call.backend, TorchBackend):
        pytest.skip("torch's own kinds of tensors")
    x = call.arguments[name]
    if x.dtype.is_floating_point:
        call.refused(name, to={name: x.clone().requires_grad_()})
        call.refused(name, to={name: torch.complex(x.float(), x.float()).conj()})
    if x.dtype in IMAGINARY:
        call.refused(name, to={name: torch._neg_view(x)})
    call.refused(name, to={name: x.to("meta")})
    call.refused(name, to={name: fake(x)})
    call.refused(name, to={name: x.to_sparse()})


def fake(x: Any) -> Any:
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode().from_tensor(x)


@pytest.mark.parametrize(("op", "name"), INPUTS)
def test_numpy_oddities(backend, op, name):
    if backend.name != "numpy":
        pytest.skip("NumPy's own kinds of arrays")
    call = Call(backend, op)
    x = call.valid[name]
    if name not in call.op.any_dtype:
        call.refused(name, to={name: x.astype(x.dtype.newbyteorder())})
        call.refused(name, to={name: x.astype(object)})
        odd = np.zeros(x.nbytes + 1, np.uint8)[1:].view(x.dtype).reshape(x.shape)
        odd[...] = x
        if (op, name) != ("tree_links", "draft_tokens"):  # carried over, not read
            call.refused(short(name), to={name: odd})  # not aligned to its own size
            with pytest.raises(ValueError, match="in multiples of"):
                invoke(call.op, call.arguments | call.outputs | {name: odd})
    read_only = x.copy()
    read_only.flags.writeable = False
    if name in call.op.in_place:
        call.refused(name, to={name: read_only})
    else:
        invoke(call.op, call.arguments | call.outputs | {name: read_only})


def test_read_only_producer(backend):
    if backend.name != "dlpack":
        pytest.skip("about DLPack's flag")
    call = Call(backend, "draft_topk")
    x = call.valid["logits"].copy()
    x.flags.writeable = False
    invoke(call.op, call.arguments | call.outputs | {"logits": DLPackArray(x)})


# ---- outputs


@pytest.mark.parametrize(("op", "name"), OUTPUTS)
def test_output_of_another_rank_or_shape(call, name):
    shape, dtype = call.op.outputs[name]
    others = [(1, *shape), (*shape, 1), (*shape[:-1], shape[-1] + 1), (*shape[:-1], shape[-1] - 1)]
    if len(shape) > 1:
        others += [(shape[0] + 1, *shape[1:]), (math.prod(shape),)]
    if call.op.function is kdtree.expand_mask and call.backend.cuda:
        others = others[:2]  # its size is the host's knowledge
    for other in others:
        out = Canary(call.backend, other, dtype)
        call.refused(name, to={name: out.array})
        out.check_untouched()


@pytest.mark.parametrize(("op", "name"), OUTPUTS)
def test_output_of_another_dtype(call, name):
    shape, dtype = call.op.outputs[name]
    for other in (np.int32, np.int64, np.float32, np.float64, np.uint8):
        if np.dtype(other) != np.dtype(dtype):
            out = Canary(call.backend, shape, other)
            call.refused(name, to={name: out.array})
            out.check_untouched()


@pytest.mark.parametrize(("op", "name"), OUTPUTS)
def test_output_that_is_not_contiguous(call, name):
    shape, dtype = call.op.outputs[name]
    wide = Canary(call.backend, (*shape[:-1], 2 * shape[-1]), dtype)
    call.refused(name, to={name: wide.array[..., ::2]})
    if len(shape) > 1:
        call.refused(name, to={name: wide.array[..., : shape[-1]]})
    wide.check_untouched()


@pytest.mark.parametrize(("op", "name"), OUTPUTS)
def test_output_that_is_read_only(call, name):
    shape, dtype = call.op.outputs[name]
    out = np.zeros(shape, dtype)
    out.flags.writeable = False
    if call.backend.name == "numpy":
        call.refused(name, to={name: out})
    elif call.backend.name == "dlpack":
        call.refused(name, to={name: DLPackArray(out)})
    else:
        pytest.skip("torch and CuPy have no read-only arrays")
    assert not out.any()


@pytest.mark.parametrize(("op", "name"), OUTPUTS)
@pytest.mark.parametrize("other", [None, "text", 3, [1, 2]], ids=lambda x: type(x).__name__)
def test_output_that_is_no_array(call, name, other):
    if other is not None or "." in name:  # a record holds them all; `out` and `lse` may be None
        call.refused(name, to={name: other})


@pytest.mark.parametrize(("op", "name"), OUTPUTS)
def test_output_on_another_device(call, name):
    if not call.backend.cuda:
        pytest.skip("CPU arrays have one device")
    shape, dtype = call.op.outputs[name]
    out = np.zeros(shape, dtype)
    call.refused(name, to={name: out})
    call.refused(name, to={name: DLPackArray(out)})
    assert not out.any()


@pytest.mark.skipif(torch is None, reason="torch is not installed")
def test_error_of_a_tensor_itself():
    class Broken(torch.Tensor):
        def is_neg(self):
            raise RuntimeError("a broken tensor")

    with pytest.raises(RuntimeError, match="a broken tensor"):
        kdtree.draft_topk(torch.zeros(2, 9).as_subclass(Broken), 3)


@pytest.mark.parametrize(("op", "name"), OUTPUTS)
def test_output_without_plain_memory(call, name):
    if not isinstance(call.backend, TorchBackend):
        pytest.skip("torch's own kinds of tensors")
    x = call.outputs[name]
    if x.dtype.is_floating_point:
        call.refused(name, to={name: x.clone().requires_grad_()})
    if x.dtype in IMAGINARY:
        call.refused(name, to={name: torch._neg_view(x)})
    call.refused(name, to={name: x.to("meta")})
    call.refused(name, to={name: fake(x)})


def aliases() -> Iterator[tuple[str, str, str]]:
    """(op, output, the argument or other output that shares its memory)."""
    for op, spec in OPS.items():
        names = list(spec.outputs)
        for i, name in enumerate(names):
            for other in [*spec.arrays(), *names[i + 1 :]]:
                yield op, name, other


@pytest.mark.parametrize(("op", "name", "other"), list(aliases()))
def test_output_that_overlaps(call, name, other):
    shape, dtype = call.op.outputs[name]
    if other in call.op.outputs:
        other_shape, other_dtype = call.op.outputs[other]
        content = np.zeros(other_shape, other_dtype)
    else:
        content = call.valid[other]
    size = np.dtype(dtype).itemsize * math.prod(shape)
    for lag in (0, 32):
        if lag >= min(size, content.nbytes) - 8:
            continue
        # In one buffer: first `lag` bytes of the other's, then both.
        memory = np.zeros(512 + size + content.nbytes, np.uint8)
        memory[256 : 256 + content.nbytes] = np.frombuffer(content.tobytes(), np.uint8)
        raw = call.backend.array(memory)
        shared = call.backend.view(raw, 256, content.shape, content.dtype)
        out = call.backend.view(raw, 256 + lag, shape, dtype)
        call.refused(short(name), to={name: out, other: shared})
        assert (call.backend.numpy(raw) == memory).all(), "shared memory was written"


def test_caches_that_overlap_what_directs_them(backend):
    call = Call(backend, "commit_kv")
    for other in ("block_table", "prefix_lens", "accept.accept_index", "accept.accept_token_num"):
        content = call.valid[other]
        cache = call.valid["kv_caches[1]"]
        memory = np.zeros(cache.nbytes, np.uint8)
        memory[: content.nbytes] = np.frombuffer(content.tobytes(), np.uint8)
        raw = backend.array(memory)
        spoiled = {
            "kv_caches[1]": backend.view(raw, 0, cache.shape, cache.dtype),
            other: backend.view(raw, 0, content.shape, content.dtype),
        }
        call.refused("kv_caches", to=spoiled)
        assert (backend.numpy(raw) == memory).all()


# ---- records and scalars


@pytest.mark.parametrize(
    ("op", "name"), [(op, "out") for op, spec in OPS.items() if spec.out_record]
)
@pytest.mark.parametrize("other", [{}, 3, (None, None, None), Accept, "another"], ids=str)
def test_out_that_is_no_record_of_its_kind(call, name, other):
    if other == "another":
        other = DraftTopK(None, None, None) if call.op.out_record is not DraftTopK else Tree()
    with pytest.raises(TypeError, match="out: expected"):
        invoke(call.op, call.arguments | {"out": other})


@pytest.mark.parametrize(
    ("op", "name"),
    [
        ("expand_mask", "tree"),
        ("tree_accept", "tree"),
        ("tree_accept_logits", "tree"),
        ("commit_kv", "accept"),
    ],
)
@pytest.mark.parametrize(
    "other", [None, {}, np.zeros(3), DraftTopK(1, 2, 3)], ids=lambda x: type(x).__name__
)
def test_argument_that_is_no_record_of_its_kind(call, name, other):
    arguments = {k: x for k, x in call.arguments.items() if not k.startswith(name)}
    with pytest.raises(TypeError, match=f"{name}: expected"):
        invoke(call.op, arguments | call.outputs | {name: other})
    for canary in call.canaries.values():
        canary.check_untouched()


NAN, INF = math.nan, math.inf
SCALARS: dict[str, dict[str, list[Any]]] = {
    "draft_topk": {
        "k": [0, -1, 21, 65, 2**70, 2.0, "4", None, True],
        "vocab_start": [2**70, 1.5, "0", None],
        "vocab_size": [-1, 2**70, 1.5, "0"],
        "normalize": [None, "yes", 1, 2.0],
    },
    "build_ddtree": {
        "budget": [-1, 65, 2**70, 2.0, "4", None, 3],  # 3: node_cost has 5 entries
        "chain_seed": [None, "yes", 1],
        "base_cost": [NAN, INF, -INF, "1", None],
    },
    "expand_mask": {"layout": ["", "QLEN", "full ", None, 3, b"qlen"]},
    "verify_attn": {
        "sm_scale": [NAN, INF, "1", None, [1.0]],
        "kv_scale": [NAN, INF, "1", [1.0]],
        "kv_split": [0, -64, 63, 65, 2**70, 64.0, "64"],
        "return_lse": [None, "yes", 1],
    },
    "tree_accept_logits": {
        "temperature": [-1.0, NAN, -INF, "1", [1.0]],
        "vocab_size": [-1, 2**70, 1.5, "0"],
    },
}


@pytest.mark.parametrize(
    ("op", "name", "value"),
    [(op, name, value) for op, names in SCALARS.items() for name in names for value in names[name]],
)
def test_scalars(call, name, value):
    call.refused(name if value != 3 or name != "budget" else "node_cost", to={name: value})


@pytest.mark.parametrize("op", list(OPS))
@pytest.mark.parametrize("stream", ["0", 1.5, -1, 2**70, object()], ids=lambda x: type(x).__name__)
def test_streams(call, stream):
    call.refused("stream", stream=stream)


@pytest.mark.parametrize("op", ["tree_accept_logits"])
def test_temperature_without_seeds(call):
    call.refused("seeds", seeds=None)
    call.refused("seeds", seeds=None, temperature=0.5)
    invoke(call.op, call.arguments | call.outputs | {"seeds": None, "temperature": 0.0})


@pytest.mark.parametrize("op", ["build_ddtree"])
def test_node_cost_goes_with_base_cost(call):
    call.refused("base_cost", base_cost=None)
    call.refused("node_cost", node_cost=None)


@pytest.mark.parametrize("op", ["expand_mask"])
def test_full_needs_prefix_lens(call):
    call.refused("prefix_lens", prefix_lens=None)


@pytest.mark.parametrize("op", ["verify_attn"])
def test_block_table_or_csr(call):
    csr = Call(call.backend, "verify_attn, CSR")
    table, ptr, rows = (
        call.arguments["block_table"],
        csr.arguments["kv_indptr"],
        csr.arguments["kv_indices"],
    )
    call.refused("block_table", block_table=None)
    call.refused("kv_ind", kv_indptr=ptr, kv_indices=rows)
    call.refused("kv_ind", kv_indptr=ptr)
    csr.refused("kv_ind", kv_indices=None)
    csr.refused("kv_ind", kv_indptr=None)
    csr.refused("kv_ind", block_table=table)
    call.refused("kv_cache", block_table=None, kv_indptr=ptr, kv_indices=rows)  # page size 4


@pytest.mark.parametrize("op", ["commit_kv"])
def test_block_table_or_cache_loc(call):
    loc = Call(call.backend, "commit_kv, cache_loc").arguments["cache_loc"]
    call.refused("block_table", block_table=None)
    call.refused("cache_loc", cache_loc=loc)
    call.refused("prefix_lens", prefix_lens=None)


# ---- limits


def filled(backend: Backend, shape: tuple[int, ...], dtype: Any) -> Any:
    return backend.array(np.zeros(shape, dtype))


def test_more_than_65_slots(backend):
    def a(*shape: int, dtype: Any = np.int64) -> Any:
        return filled(backend, shape, dtype)

    used = a(2, dtype=np.int32)
    tree = Tree(
        **dict.fromkeys(("draft_tokens", "next_token", "next_sibling", "visibility"), a(2, 66)),
        num_nodes=used,
    )
    index = Accept(a(2, 66, dtype=np.int32), used, None)
    cache = a(9, 16, 8, dtype=F16)
    for attempt in (
        lambda: kdtree.tree_links(a(2, 66, dtype=np.int32), used),
        lambda: kdtree.tree_links(a(2, 0, dtype=np.int32), used),
        lambda: kdtree.expand_mask(tree, "qlen"),
        lambda: kdtree.tree_accept(tree, a(2, 66)),
        lambda: kdtree.tree_accept_logits(tree, a(2, 66, 4, dtype=np.float32)),
        lambda: kdtree.commit_kv([cache], a(2, 9, dtype=np.int32), used, index),
        lambda: kdtree.verify_attn(
            a(2, 66, 1, 576, dtype=F16),
            a(9, 16, 576, dtype=F16),
            a(2, 9, dtype=np.int32),
            used,
            sm_scale=1.0,
        ),
    ):
        with pytest.raises(ValueError, match=r"1\.\.65"):
            attempt()


@pytest.mark.parametrize("k", [0, 65])
def test_k_out_of_range(backend, k):
    def a(*shape: int, dtype: Any = np.float32) -> Any:
        return filled(backend, shape, dtype)

    for attempt in (
        lambda: kdtree.draft_topk(a(2, 100), k),
        lambda: kdtree.merge_topk(a(2, 3, k), a(2, 3, k, dtype=np.int64), a(2, 3)),
        lambda: kdtree.build_ddtree(
            a(2, 3, k), a(2, 3, k, dtype=np.int64), *[a(2, dtype=np.int32)] * 2
        ),
    ):
        with pytest.raises(ValueError, match=r"1\.\.64"):
            attempt()


@pytest.mark.parametrize(
    ("argument", "heads", "page_size", "pages"),
    [
        ("q", 0, 16, 4),
        ("q", 129, 16, 4),
        ("kv_cache", 2, 3, 4),
        ("kv_cache", 2, 0, 4),
        ("kv_cache", 2, 256, 4),
        ("kv_cache", 2, 96, 4),
        ("kv_cache", 2, 16, 0),
    ],
)
def test_attention_limits(backend, argument, heads, page_size, pages):
    with pytest.raises(ValueError, match=f"{argument}|heads"):
        kdtree.verify_attn(
            filled(backend, (1, 1, heads, 576), F16),
            filled(backend, (pages, page_size, 576), F16),
            filled(backend, (1, 1), np.int32),
            filled(backend, (1,), np.int32),
            sm_scale=1.0,
        )


@pytest.mark.parametrize("name", ["q", "kv_cache", "q_rope"])
def test_attention_needs_16_byte_strides_and_bases(backend, name):
    call = Call(backend, "verify_attn, CSR")
    x = call.valid[name]
    wide = backend.array(np.concatenate([x, x], axis=-1))
    call.refused(name, to={name: wide[..., 4 : 4 + x.shape[-1]]})  # a base 8 bytes off
    wide = backend.array(np.concatenate([x, x[..., :4]], axis=-1))
    call.refused(name, to={name: wide[..., : x.shape[-1]]})  # strides 8 bytes off


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.float32])
def test_workspace(backend, dtype):
    call = Call(backend, "verify_attn")
    if dtype != np.uint8:
        call.refused("workspace", workspace=filled(backend, (1 << 20,), dtype))
    else:
        call.refused("workspace", workspace=filled(backend, (1 << 10, 1 << 10), dtype))
        call.refused("workspace", workspace=filled(backend, (1 << 21,), dtype)[::2])
        call.refused("workspace", workspace="text")
        if backend.cuda:
            call.refused("workspace", workspace=filled(backend, (0,), dtype))
            call.refused("workspace", workspace=np.zeros(1 << 20, np.uint8))


@pytest.mark.parametrize(
    ("sizes", "named"),
    [
        ((-1, 1, 1), "B|batch"),
        ((1, 0, 1), "Q|qlen"),
        ((1, 66, 1), "Q|qlen"),
        ((1, 1, 0), "H|heads"),
        ((1, 1, 129), "H|heads"),
        ((1.5, 1, 1), "B|batch"),
        ((1, "1", 1), "Q|qlen"),
        ((1, 1, None), "H|heads"),
    ],
)
def test_workspace_sizes(backend, sizes, named):
    with pytest.raises((ValueError, TypeError), match=f"^({named}): expected"):
        kdtree.verify_attn_workspace(*sizes, backend.device())


@pytest.mark.parametrize("device", ["", "gpu", "cuda:x", "cuda:-1", None, 0, "mps"])
def test_workspace_device(device):
    with pytest.raises((ValueError, TypeError), match="device"):
        kdtree.verify_attn_workspace(1, 1, 1, device)


@pytest.mark.parametrize("op", ["commit_kv"])
def test_layers(call):
    first = call.arguments["kv_caches[0]"]
    for layers in ([], (), "text", 3, None, {}, [first, None], [None]):
        arguments = {k: x for k, x in call.arguments.items() if not k.startswith("kv_caches")}
        with pytest.raises((ValueError, TypeError), match="kv_caches"):
            invoke(call.op, arguments | {"kv_caches": layers})


@pytest.mark.parametrize("op", ["commit_kv"])
def test_layers_of_other_strides(call):
    x = call.valid["kv_caches[1]"]
    wide = call.backend.array(np.concatenate([x, x], axis=-1))[..., :8]
    call.refused("kv_caches", to={"kv_caches[1]": wide})
