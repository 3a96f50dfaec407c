"""The C ABI as a caller without our compiled module sees it."""

from __future__ import annotations

import ctypes
import inspect
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import kdtree
import numpy as np
import pytest
from kdtree import ctypes_api, reference
from kdtree.records import Accept, DraftTopK, Tree
from support import (
    BF16,
    F16,
    F32,
    Array,
    Backend,
    assert_close,
    assert_same,
    attn_case,
    backends,
    call,
    check_attn,
    draft_rows,
    missing_backends,
    random_parents,
    random_trees,
)

OPS = [name.removeprefix("kdtree_").removesuffix("_params") for name in ctypes_api.header().structs]


@pytest.fixture(
    params=[b for b in backends() if b.name in ("numpy", "torch", "torch-cuda")],
    ids=lambda backend: backend.name,
)
def library(request: pytest.FixtureRequest) -> Backend:
    """Each array library that ctypes_api takes."""
    return request.param


# ---- layout


def test_every_op_is_declared_and_exported() -> None:
    header = ctypes_api.header()
    assert len(OPS) == 11
    for op in OPS:
        assert f"kdtree_{op}" in header.functions
    for name in header.functions:
        assert getattr(ctypes_api.library(), name)


def test_library_agrees_about_struct_sizes() -> None:
    assert ctypes_api.layout_mismatches() == []


def test_a_struct_of_another_size_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    header = ctypes_api.header()
    name = "kdtree_tree_links_params"
    fields = [*header.structs[name]._fields_, ("more", ctypes.c_int64)]
    longer = type(name, (ctypes.Structure,), {"_fields_": fields})
    changed = replace(header, structs={**header.structs, name: longer})
    monkeypatch.setattr(ctypes_api, "header", lambda: changed)
    assert len(ctypes_api.layout_mismatches()) == 1
    assert name in ctypes_api.layout_mismatches()[0]


def test_c_compiler_lays_out_the_structs_alike(tmp_path: Path) -> None:
    cc = shutil.which("cc")
    if cc is None:
        pytest.skip("no C compiler (cc)")
    want, lines = [], []
    for name, struct in ctypes_api.header().structs.items():
        lines.append(f'  printf("{name} %zu\\n", sizeof({name}));')
        want.append(f"{name} {ctypes.sizeof(struct)}")
        for member, *_ in struct._fields_:
            lines.append(
                f'  printf("{name}.{member} %zu %zu\\n", offsetof({name}, {member}), '
                f"sizeof((({name} *)0)->{member}));"
            )
            field = getattr(struct, member)
            want.append(f"{name}.{member} {field.offset} {field.size}")
    for constant, value in ctypes_api.header().constants.items():
        lines.append(f'  printf("{constant} %d\\n", (int){constant});')
        want.append(f"{constant} {value}")
    source = tmp_path / "layout.c"
    source.write_text(
        "#include <stddef.h>\n#include <stdio.h>\n#include <kdtree.h>\n"
        "int main(void) {\n" + "\n".join(lines) + "\n  return 0;\n}\n"
    )
    include = ctypes_api.header_path().parent
    program = tmp_path / "layout"
    command = [cc, "-std=c99", "-pedantic", "-Wall", "-Werror", f"-I{include}", "-o", program]
    subprocess.run([*command, source], check=True)
    out = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    assert out.split("\n")[:-1] == want


def test_c_program_runs_against_the_library(tmp_path: Path) -> None:
    """The library and header are enough for C: no Python, no CUDA toolkit."""
    cc = shutil.which("cc")
    if cc is None:
        pytest.skip("no C compiler (cc)")
    source = tmp_path / "links.c"
    source.write_text(
        """
#include <stdio.h>
#include <kdtree.h>
int main(void) {
  int32_t parents[3] = {-1, 0, 1}, num_nodes = 3, depths[3];
  int64_t positions[3], next_token[3], next_sibling[3], visibility[3];
  kdtree_tree_links_params p = {sizeof(p), 1, 0, 1, 3, parents, 3, &num_nodes, NULL,
                                depths, positions, next_token, next_sibling, visibility};
  if (kdtree_tree_links(&p, NULL) != KDTREE_OK) return 1;
  printf("%d %d\\n", depths[2], (int)visibility[2]);
  p.qlen = 66;
  if (kdtree_tree_links(&p, NULL) != KDTREE_ERROR_VALUE) return 2;
  puts(kdtree_last_error());
  return 0;
}
"""
    )
    library = ctypes_api.library_path()
    program = tmp_path / "links"
    command = [
        cc,
        "-Wall",
        "-Werror",
        f"-I{ctypes_api.header_path().parent}",
        source,
        "-o",
        program,
    ]
    subprocess.run([*command, library, f"-Wl,-rpath,{library.parent}"], check=True)
    out = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    first, second = out.splitlines()
    assert first == "2 3"
    assert "qlen" in second
    assert "66" in second


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("const void *a;", ["a"]),
        ("int32_t a, b;", ["a", "b"]),
        ("int64_t a[N_PLACES], b;", ["a", "b"]),
        ("void *const *a; /* int b; */", ["a"]),
        ("char a[16];", ["a"]),
    ],
)
def test_parser(text: str, names: list[str]) -> None:
    text = text.replace("N_PLACES", "KDTREE_PLACES")
    parsed = ctypes_api.parse_header(
        f"#define KDTREE_PLACES 6\ntypedef struct kdtree_x_params {{ {text} }} kdtree_x_params;"
    )
    assert [name for name, *_ in parsed.structs["kdtree_x_params"]._fields_] == names


def test_parser_refuses_what_it_does_not_know() -> None:
    with pytest.raises(ValueError, match="not understood"):
        ctypes_api.parse_header("typedef struct kdtree_x { int (*f)(void); } kdtree_x;")


@pytest.mark.parametrize("op", [op for op in OPS if op != "device_info"])
def test_signatures_are_those_of_the_public_ops(op: str) -> None:
    mine = inspect.signature(getattr(ctypes_api, op)).parameters.values()
    public = inspect.signature(getattr(kdtree, op)).parameters.values()
    assert [(p.name, p.kind, p.default) for p in mine] == [
        (p.name, p.kind, p.default) for p in public
    ]


# ---- the library itself


def test_about_the_library() -> None:
    assert ctypes_api.abi_version() == ctypes_api.header().constants["KDTREE_ABI_VERSION"]
    assert ctypes_api.max_qlen() == kdtree.MAX_QLEN == 65
    assert ctypes_api.header().constants["KDTREE_MAX_K"] == kdtree.MAX_K
    info = ctypes_api.build_info()
    assert sorted(info) == ["commit", "cuda_archs", "cuda_toolkit", "version"]
    assert ctypes_api.status_string(0) == "ok"


def test_device_info() -> None:
    info = ctypes_api.device_info()
    if info["device_count"] == 0:
        assert info["reason"]
        assert info["path"] == ""
    else:
        assert info["name"]
        assert info["num_sms"] > 0
        assert info["path"] or info["reason"]


def test_cuda_without_a_device_is_an_error() -> None:
    if ctypes_api.device_info()["device_count"] > 0:
        pytest.skip("this machine has a GPU")
    with pytest.raises(RuntimeError, match=r"driver|GPU"):
        ctypes_api.verify_attn_workspace(1, 1, 1, "cuda:0")


# ---- the ops


def expect_topk(got: DraftTopK, want: DraftTopK) -> None:
    assert_same(got.ids, want.ids)
    assert_close(got.logprobs, want.logprobs, atol=1e-5)
    assert_close(got.lse, want.lse, atol=1e-5)


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
def test_draft_topk(library: Backend, rng: np.random.Generator, dtype: Any) -> None:
    logits = (rng.integers(-30, 30, (2, 3, 701)) / 4).astype(dtype)
    options: dict[str, Any]
    for options in (
        {},
        {"vocab_start": 100, "vocab_size": 790, "normalize": False},
        {"root_tokens": np.array([-1, 3])},
        {"root_tokens": np.array([5, -2], np.int32), "normalize": False},
    ):
        got = call(library, ctypes_api.draft_topk, logits, 17, **options)
        expect_topk(got, reference.draft_topk(logits, 17, **options))
    expect_topk(
        call(library, ctypes_api.draft_topk, logits[0, 0], 64),
        reference.draft_topk(logits[0, 0], 64),
    )


def test_merge_topk(library: Backend, rng: np.random.Generator) -> None:
    logits = (rng.integers(-30, 30, (2, 3, 600)) / 4).astype(F32)
    parts = [
        reference.draft_topk(logits[..., i : i + 200], 9, vocab_start=i, normalize=False)
        for i in (0, 200, 400)
    ]
    stacked = [np.stack([getattr(p, f) for p in parts]) for f in ("logprobs", "ids", "lse")]
    got = call(library, ctypes_api.merge_topk, *stacked)
    expect_topk(got, reference.draft_topk(logits, 9))


@pytest.mark.parametrize("chain_seed", [False, True])
def test_build_ddtree(library: Backend, rng: np.random.Generator, chain_seed: bool) -> None:
    logprobs, ids = draft_rows(rng, 5, 6, 7, ties=True, dead=0.5)
    roots = np.array([3, 0, -1, 9, 163_839])
    lens = np.array([0, 1, 2, 100_000, 7], np.int32)
    args = (logprobs, ids.astype(np.int32), roots, lens)
    got = call(library, ctypes_api.build_ddtree, *args, budget=40, chain_seed=chain_seed)
    assert_same(got, reference.build_ddtree(*args, budget=40, chain_seed=chain_seed))
    options: dict[str, Any] = {"node_cost": np.linspace(0, 1, 41, dtype=F32), "base_cost": 2.0}
    got = call(library, ctypes_api.build_ddtree, *args, budget=40, **options)
    assert_same(got, reference.build_ddtree(*args, budget=40, **options))


def test_tree_links(library: Backend, rng: np.random.Generator) -> None:
    args = (random_parents(rng, 3, 65), np.array([65, 30, 0], np.int32))
    options = {
        "prefix_lens": np.array([5, 6, 7], np.int32),
        "draft_tokens": rng.integers(0, 9, (3, 65)),
    }
    got = call(library, ctypes_api.tree_links, *args, **options)
    assert_same(got, reference.tree_links(*args, **options))


@pytest.mark.parametrize("layout", ["qlen", "packed32", "full"])
def test_expand_mask(library: Backend, rng: np.random.Generator, layout: str) -> None:
    tree = random_trees(rng, 3, 33, 5)
    lens = np.array([5, 0, 7], np.int32)
    options = {"prefix_lens": lens} if layout == "full" else {}
    want = reference.expand_mask(tree, layout, **options)
    tree = Tree(visibility=tree.visibility, num_nodes=tree.num_nodes)
    if layout != "full":
        assert_same(call(library, ctypes_api.expand_mask, tree, layout), want)
        return
    out = library.array(np.ones_like(want))
    mask = ctypes_api.expand_mask(
        library.put(tree), layout, prefix_lens=library.array(lens), out=out
    )
    assert mask is out
    assert_same(library.numpy(out), want)


def test_verify_attn(library: Backend, rng: np.random.Generator) -> None:
    lens = [0, 5, 64, 131]
    check_attn(library, ctypes_api.verify_attn, attn_case(rng, prefix_lens=lens, qlen=17, heads=5))
    check_attn(
        library,
        ctypes_api.verify_attn,
        attn_case(rng, prefix_lens=lens, qlen=65, heads=2, rope=True, num_nodes=[65, 0, 9, 1]),
    )
    check_attn(
        library,
        ctypes_api.verify_attn,
        attn_case(rng, prefix_lens=lens, qlen=3, heads=2, page_size=1, csr=True),
    )


def test_verify_attn_e4m3(library: Backend, rng: np.random.Generator) -> None:
    case = attn_case(
        rng, prefix_lens=[40, 3], qlen=9, heads=4, dtype=BF16, kv_dtype="float8_e4m3fn"
    )
    check_attn(library, ctypes_api.verify_attn, case)
    case.options["kv_scale"] = np.array([0.75], F32)
    check_attn(library, ctypes_api.verify_attn, case)


def test_verify_attn_with_workspace(library: Backend, rng: np.random.Generator) -> None:
    case = attn_case(rng, prefix_lens=[300, 3], qlen=9, heads=4)
    size = ctypes_api.verify_attn_workspace(2, 9, 4, library.device())
    assert (size > 0) == library.cuda
    scratch = library.empty((size,), np.uint8)
    args = library.put(case.args)
    got = ctypes_api.verify_attn(*args, **case.options, workspace=scratch)
    assert_same(library.numpy(got), library.numpy(ctypes_api.verify_attn(*args, **case.options)))


def test_tree_accept(library: Backend, rng: np.random.Generator) -> None:
    tree, target = random_trees(rng, 4, 20, 3), rng.integers(0, 3, (4, 20))
    got = call(library, ctypes_api.tree_accept, tree_for_walk(tree), target.astype(np.int32))
    assert_same(got, reference.tree_accept(tree, target))


def tree_for_walk(tree: Tree) -> Tree:
    return Tree(
        draft_tokens=tree.draft_tokens,
        next_token=tree.next_token,
        next_sibling=tree.next_sibling,
        positions=tree.positions,
        num_nodes=tree.num_nodes,
    )


def test_tree_accept_logits(library: Backend, rng: np.random.Generator) -> None:
    tree = random_trees(rng, 4, 20, 40)
    logits = rng.standard_normal((4, 20, 40), F32)
    got = call(library, ctypes_api.tree_accept_logits, tree_for_walk(tree), logits)
    assert_same(got, reference.tree_accept_logits(tree, logits))
    seeds = rng.integers(-(2**63), 2**63, 4)
    for temperature in (0.8, np.array([1, 0, 0.5, 2], F32)):
        options = {"temperature": temperature, "seeds": seeds, "vocab_size": 37}
        got = call(library, ctypes_api.tree_accept_logits, tree_for_walk(tree), logits, **options)
        assert_same(got, reference.tree_accept_logits(tree, logits, **options))


@pytest.mark.parametrize("form", ["list", "stacked", "cache_loc"])
def test_commit_kv(library: Backend, rng: np.random.Generator, form: str) -> None:
    accept = Accept(
        accept_index=np.array([[0, 2, 3, -1], [0, 1, 2, 3]], np.int32),
        accept_token_num=np.array([2, 3], np.int32),
        accept_tokens=np.zeros((2, 4), np.int64),
    )
    layers = [rng.standard_normal((6, 8, 1, 32), F32) for _ in range(3)]
    caches: Any = layers if form != "stacked" else np.stack(layers)
    args: tuple[Any, ...] = (rng.permutation(6).astype(np.int32).reshape(2, 3),)
    args += (np.array([6, 15], np.int32), accept)
    options: dict[str, Any] = {}
    if form == "cache_loc":
        args = (None, None, accept)
        options["cache_loc"] = rng.permutation(48)[:8].reshape(2, 4)
    given = library.put(caches)
    ctypes_api.commit_kv(
        given, *library.put(args), **{k: library.put(v) for k, v in options.items()}
    )
    reference.commit_kv(caches, *args, **options)
    assert_same(library.get(given), caches)


def test_strided_inputs_are_used_as_they_are(library: Backend, rng: np.random.Generator) -> None:
    wide = rng.standard_normal((4, 5, 90), F32)
    expect_topk(
        library.get(ctypes_api.draft_topk(library.array(wide)[::2, 1:, 3:80], 5)),
        reference.draft_topk(wide[::2, 1:, 3:80], 5),
    )


def test_streams(rng: np.random.Generator) -> None:
    if "torch-cuda" in missing_backends():
        pytest.skip(missing_backends()["torch-cuda"])
    import torch

    stream = torch.cuda.Stream()
    logits = torch.randn(8, 1000, device="cuda")
    case = attn_case(rng, prefix_lens=[300], qlen=9, heads=4)
    cuda = next(b for b in backends() if b.name == "torch-cuda")
    args = cuda.put(case.args)
    torch.cuda.synchronize()
    for given in (stream, stream.cuda_stream):
        top = ctypes_api.draft_topk(logits, 4, stream=given)
        out = ctypes_api.verify_attn(*args, **case.options, stream=given)
        stream.synchronize()
        assert torch.equal(top.ids, logits.topk(4).indices)
        assert_same(cuda.numpy(out), cuda.numpy(ctypes_api.verify_attn(*args, **case.options)))


# ---- errors


def topk_args() -> dict[str, Any]:
    return {"logits": np.zeros((2, 9), F32), "k": 3}


def out_of(**changes: Array) -> DraftTopK:
    fields: dict[str, Any] = {
        "logprobs": np.empty((2, 3), F32),
        "ids": np.empty((2, 3), np.int64),
        "lse": np.empty(2, F32),
    }
    return DraftTopK(**{**fields, **changes})


READ_ONLY = np.empty((2, 3), F32)
READ_ONLY.flags.writeable = False


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"logits": [1.0]}, TypeError, "logits: expected a NumPy array"),
        ({"logits": None}, TypeError, "logits: .* got None"),
        ({"logits": np.zeros((2, 9), np.int32)}, TypeError, "logits: expected dtype .* got int32"),
        ({"logits": np.zeros((2, 9), ">f4")}, TypeError, "logits: .* byte order"),
        ({"logits": np.zeros((9, 9), F32).T}, ValueError, "logits: .* dense"),
        ({"logits": np.zeros((1,) * 8, F32)}, ValueError, "logits: .* leading"),
        ({"logits": np.zeros((), F32)}, ValueError, "logits: expected shape"),
        (
            {"root_tokens": np.zeros(3, int)},
            ValueError,
            r"root_tokens: expected shape \[B\] = \[2\]",
        ),
        ({"root_tokens": np.zeros(2, F32)}, TypeError, "root_tokens: expected dtype"),
        (
            {"root_tokens": np.zeros(1, int), "logits": np.zeros(9, F32)},
            ValueError,
            r"logits: expected \[B, ..., V\] with root_tokens",
        ),
        ({"k": 0}, ValueError, "k: expected 1..9, got 0"),
        ({"k": 1.5}, TypeError, "k: expected an int"),
        ({"k": True}, TypeError, "k: expected an int"),
        ({"normalize": 1}, TypeError, "normalize: expected a bool"),
        ({"vocab_size": -2}, ValueError, "vocab_size"),
        ({"stream": "0"}, TypeError, "stream: "),
        ({"stream": -1}, ValueError, "stream: "),
        ({"out": 3}, TypeError, r"out: expected a kdtree\.DraftTopK"),
        ({"out": out_of(ids=np.empty((2, 4), np.int64))}, ValueError, r"out\.ids: expected shape"),
        ({"out": out_of(ids=np.empty((2, 3), np.int32))}, TypeError, r"out\.ids: expected dtype"),
        ({"out": out_of(ids=np.empty((3, 2), np.int64).T)}, ValueError, r"out\.ids: .* contiguous"),
        ({"out": out_of(logprobs=READ_ONLY)}, ValueError, r"out\.logprobs: .* read-only"),
    ],
)
def test_errors_name_the_argument(changes: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ctypes_api.draft_topk(**{**topk_args(), **changes})


def test_the_library_names_what_only_it_checks() -> None:
    """A status becomes an exception with the library's own words."""
    memory = np.zeros((2, 9), F32)
    out = out_of(logprobs=memory.reshape(-1)[:6].reshape(2, 3))
    with pytest.raises(ValueError, match="overlap") as caught:
        ctypes_api.draft_topk(memory, 3, out=out)
    assert str(caught.value) == ctypes_api.last_error()


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_torch_tensors_that_are_no_plain_memory() -> None:
    torch = pytest.importorskip("torch")
    from torch._subclasses.fake_tensor import FakeTensorMode

    with pytest.raises(ValueError, match=r"logits: .* requires_grad"):
        ctypes_api.draft_topk(torch.zeros(2, 9, requires_grad=True), 3)
    with pytest.raises(TypeError, match=r"logits: expected CPU or CUDA memory, got meta"):
        ctypes_api.draft_topk(torch.zeros(2, 9, device="meta"), 3)
    with FakeTensorMode(), pytest.raises(TypeError, match=r"logits: .* memory"):
        ctypes_api.draft_topk(torch.zeros(2, 9), 3)


def test_a_wrong_member_is_not_taken_silently() -> None:
    call = ctypes_api._Call("tree_links", "parents", np.zeros((1, 1), np.int32), None)
    with pytest.raises(AttributeError, match="no member"):
        call.set(parent=1)


def test_missing_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An ImportError at the first use that says where it looked, or what the loader said."""
    monkeypatch.setattr(kdtree, "__path__", [str(tmp_path)])
    ctypes_api.library.cache_clear()
    try:
        with pytest.raises(ImportError, match=re.escape(str(tmp_path))):
            ctypes_api.max_qlen()
        (tmp_path / "libkdtree_kernels_c.so").write_bytes(b"not a library")
        with pytest.raises(ImportError, match="could not be loaded") as caught:
            ctypes_api.max_qlen()
        assert isinstance(caught.value.__cause__, OSError)
    finally:
        ctypes_api.library.cache_clear()
