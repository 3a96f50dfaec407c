"""The ops of kdtree as `torch.ops.kdtree.*`, for torch.compile, CUDA graphs and other engines.

Importing this module registers them. `torch.ops.kdtree.NAME` returns new tensors;
`torch.ops.kdtree.NAME.out` takes its results after the required inputs, fills them, allocates
nothing and returns nothing. A record of kdtree is its fields here, one by one, and what an op only
hands through (the parents of `tree_links`) is left out. What the arguments mean stands in the
docstrings of kdtree's functions; where those take a float or an array, there are two arguments.

They take CPU and CUDA tensors, run on the current stream, and have no gradient. A call takes what
kdtree's own function takes, and torch's dispatch of it: 1 us, 0.2 us an argument by position, and
0.5 us one by keyword. Where neither torch.compile nor the dispatcher needs it, call the function.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from kdtree._lib import core

__all__ = ["NAMES"]

Tensor = torch.Tensor
#: What a call fills, in the schema's order; None: new tensors are made.
Outputs: TypeAlias = "tuple[Tensor, ...] | None"
I32, I64, F32 = torch.int32, torch.int64, torch.float32

#: The ops that are registered.
NAMES: list[str] = []

#: An output of the .out form that the other form does not return.
SCRATCH = "workspace"

_torch: Any = torch.library  # not all of it is typed
_library = _torch.Library("kdtree", "DEF")


def _define(schema: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> None:
    name = "kdtree::" + schema[: schema.index("(")]
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    for key in ("CPU", "CUDA"):
        _torch.impl(name, key, kernel, lib=_library)
    _torch.register_fake(name, fake, lib=_library)


def _nothing(*args: Any, **options: Any) -> None:
    """The fake of an op that only fills its arguments."""


def _op(
    name: str,
    inputs: str,
    options: str,
    outputs: str,
    kernel: Callable[..., Any],
    fake: Callable[..., Any],
) -> None:
    """Both forms. The kernel takes a tuple of the outputs, or None, then inputs and options."""
    fields = outputs.split()
    given = [f"Tensor(a{i}!) {field}" for i, field in enumerate(fields)]
    returned = ", ".join("Tensor" for field in fields if field != SCRATCH)
    tail = [options] if options else []
    first, rest = _parameters(inputs), _parameters(options)
    passed = ", ".join(parameter.split("=")[0] for parameter in first + rest)
    # With a signature of its own for each op: a shared one that cuts `*args` up takes longer.
    scope: dict[str, Any] = {"kernel": kernel}
    exec(
        f"def make({', '.join(first + rest)}):\n"
        f"    return kernel(None, {passed})\n"
        f"def fill({', '.join(first + fields + rest)}):\n"
        f"    kernel(({', '.join(fields)},), {passed})\n",
        scope,
    )
    _define(f"{name}({', '.join([inputs, *tail])}) -> ({returned})", scope["make"], fake)
    _define(f"{name}.out({', '.join([inputs, *given, *tail])}) -> ()", scope["fill"], _nothing)
    NAMES.append(name)


def _parameters(arguments: str) -> list[str]:
    """Python's of a schema's: without the types."""
    return [each.split(" ")[-1] for each in arguments.split(", ") if each]


def _empty(like: Tensor, *results: tuple[Any, torch.dtype]) -> Any:
    made = [like.new_empty(shape, dtype=dtype) for shape, dtype in results]
    return tuple(made) if len(made) > 1 else made[0]


# ---- one op after the other: the compiled function behind the schema's arguments, and the shapes.


def _draft_topk(
    out: Outputs,
    logits: Tensor,
    k: int,
    vocab_start: int,
    vocab_size: int | None,
    normalize: bool,
    root_tokens: Tensor | None,
) -> Any:
    return core.draft_topk(logits, k, vocab_start, vocab_size, normalize, root_tokens, out, None)


def _draft_topk_shapes(logits: Tensor, k: int, *args: Any, **options: Any) -> Any:
    rows = list(logits.shape[:-1])
    return _empty(logits, ([*rows, k], F32), ([*rows, k], I64), (rows, F32))


_op(
    "draft_topk",
    "Tensor logits, int k",
    "int vocab_start=0, int? vocab_size=None, bool normalize=True, Tensor? root_tokens=None",
    "logprobs ids lse",
    _draft_topk,
    _draft_topk_shapes,
)


def _merge_topk(out: Outputs, values: Tensor, ids: Tensor, lse: Tensor) -> Any:
    return core.merge_topk(values, ids, lse, out, None)


def _merge_topk_shapes(values: Tensor, ids: Tensor, lse: Tensor) -> Any:
    rows = list(values.shape[1:])
    return _empty(values, (rows, F32), (rows, I64), (rows[:-1], F32))


_op(
    "merge_topk",
    "Tensor values, Tensor ids, Tensor lse",
    "",
    "logprobs merged_ids merged_lse",
    _merge_topk,
    _merge_topk_shapes,
)


def _build_ddtree(
    out: Outputs,
    logprobs: Tensor,
    ids: Tensor,
    root_tokens: Tensor,
    prefix_lens: Tensor,
    budget: int,
    chain_seed: bool,
    node_cost: Tensor | None,
    base_cost: float | None,
) -> Any:
    return core.build_ddtree(
        logprobs,
        ids,
        root_tokens,
        prefix_lens,
        budget,
        chain_seed,
        node_cost,
        base_cost,
        out,
        None,
    )


def _build_ddtree_shapes(
    logprobs: Tensor,
    ids: Tensor,
    root_tokens: Tensor,
    prefix_lens: Tensor,
    budget: int = 64,
    *args: Any,
    **options: Any,
) -> Any:
    batch = logprobs.shape[0]
    slots = [batch, budget + 1]
    dtypes = (I64, I32, I32, I64, I64, I64, I64, F32)
    return _empty(logprobs, *((slots, dtype) for dtype in dtypes), ([batch], I32))


_op(
    "build_ddtree",
    "Tensor logprobs, Tensor ids, Tensor root_tokens, Tensor prefix_lens",
    "int budget=64, bool chain_seed=False, Tensor? node_cost=None, float? base_cost=None",
    "draft_tokens parents depths positions next_token next_sibling visibility scores num_nodes",
    _build_ddtree,
    _build_ddtree_shapes,
)


def _tree_links(
    out: Outputs, parents: Tensor, num_nodes: Tensor, prefix_lens: Tensor | None
) -> Any:
    return core.tree_links(parents, num_nodes, prefix_lens, None, out, None)


def _tree_links_shapes(parents: Tensor, *args: Any, **options: Any) -> Any:
    return _empty(parents, *((parents.shape, dtype) for dtype in (I32, I64, I64, I64, I64)))


_op(
    "tree_links",
    "Tensor parents, Tensor num_nodes",
    "Tensor? prefix_lens=None",
    "depths positions next_token next_sibling visibility",
    _tree_links,
    _tree_links_shapes,
)


def _expand_mask(
    out: Outputs,
    visibility: Tensor,
    num_nodes: Tensor,
    layout: str,
    prefix_lens: Tensor | None,
) -> Any:
    if out is None:
        _check_layout(layout)
    (mask,) = out or (None,)
    return core.expand_mask(visibility, num_nodes, layout, prefix_lens, mask, None)


def _check_layout(layout: str) -> None:
    if layout not in ("qlen", "packed32"):
        raise ValueError(
            "layout: expected 'qlen' or 'packed32' ('full' has a size that only expand_mask.out "
            f"can know), got {layout!r}"
        )


def _expand_mask_shapes(visibility: Tensor, num_nodes: Tensor, layout: str, *args: Any) -> Any:
    _check_layout(layout)
    if visibility.ndim != 2:
        raise ValueError(f"visibility: expected shape [B, Q], got {list(visibility.shape)}")
    batch, qlen = visibility.shape
    if layout == "qlen":
        return _empty(visibility, ([batch, qlen, qlen], torch.bool))
    return _empty(visibility, ([batch, qlen, (qlen + 31) // 32], torch.int32))


_op(
    "expand_mask",
    "Tensor visibility, Tensor num_nodes, str layout",
    "Tensor? prefix_lens=None",
    "mask",
    _expand_mask,
    _expand_mask_shapes,
)


def _verify_attn(
    out: Outputs,
    q: Tensor,
    kv_cache: Tensor,
    block_table: Tensor | None,
    prefix_lens: Tensor,
    visibility: Tensor | None,
    sm_scale: float,
    num_nodes: Tensor | None,
    q_rope: Tensor | None,
    kv_scale: float | None,
    kv_scale_array: Tensor | None,
    kv_split: int | None,
    kv_indptr: Tensor | None,
    kv_indices: Tensor | None,
) -> Any:
    if kv_scale is not None and kv_scale_array is not None:
        raise ValueError("kv_scale: expected None beside kv_scale_array, got both")
    attn, lse, workspace = out or (None, None, None)
    return core.verify_attn(
        q,
        kv_cache,
        block_table,
        prefix_lens,
        visibility,
        num_nodes,
        sm_scale,
        q_rope,
        kv_scale if kv_scale_array is None else kv_scale_array,
        kv_split,
        kv_indptr,
        kv_indices,
        attn,
        lse,
        out is None,
        workspace,
        None,
    )


def _verify_attn_shapes(q: Tensor, *args: Any, **options: Any) -> Any:
    rows = list(q.shape[:3])
    return _empty(q, ([*rows, 512], q.dtype), (rows, F32))


_op(
    "verify_attn",
    "Tensor q, Tensor kv_cache, Tensor? block_table, Tensor prefix_lens, Tensor? visibility, "
    "float sm_scale",
    "Tensor? num_nodes=None, Tensor? q_rope=None, float? kv_scale=None, "
    "Tensor? kv_scale_array=None, int? kv_split=None, Tensor? kv_indptr=None, "
    "Tensor? kv_indices=None",
    f"attn lse {SCRATCH}",
    _verify_attn,
    _verify_attn_shapes,
)


def _tree_accept(
    out: Outputs,
    draft_tokens: Tensor,
    next_token: Tensor,
    next_sibling: Tensor,
    num_nodes: Tensor,
    target_predict: Tensor,
) -> Any:
    return core.tree_accept(
        draft_tokens, next_token, next_sibling, num_nodes, target_predict, out, None
    )


def _accept_shapes(draft_tokens: Tensor, *args: Any, **options: Any) -> Any:
    slots = draft_tokens.shape
    return _empty(draft_tokens, (slots, I32), ([slots[0]], I32), (slots, I64))


_op(
    "tree_accept",
    "Tensor draft_tokens, Tensor next_token, Tensor next_sibling, Tensor num_nodes, "
    "Tensor target_predict",
    "",
    "accept_index accept_token_num accept_tokens",
    _tree_accept,
    _accept_shapes,
)


def _tree_accept_logits(
    out: Outputs,
    draft_tokens: Tensor,
    next_token: Tensor,
    next_sibling: Tensor,
    num_nodes: Tensor,
    positions: Tensor | None,
    logits: Tensor,
    temperature: float | None,
    temperature_array: Tensor | None,
    seeds: Tensor | None,
    vocab_size: int | None,
) -> Any:
    if temperature is not None and temperature_array is not None:
        raise ValueError("temperature: expected None beside temperature_array, got both")
    return core.tree_accept_logits(
        draft_tokens,
        next_token,
        next_sibling,
        num_nodes,
        positions,
        logits,
        temperature if temperature_array is None else temperature_array,
        seeds,
        vocab_size,
        out,
        None,
    )


_op(
    "tree_accept_logits",
    "Tensor draft_tokens, Tensor next_token, Tensor next_sibling, Tensor num_nodes, "
    "Tensor? positions, Tensor logits",
    "float? temperature=None, Tensor? temperature_array=None, Tensor? seeds=None, "
    "int? vocab_size=None",
    "accept_index accept_token_num accept_tokens",
    _tree_accept_logits,
    _accept_shapes,
)


def _commit_kv(
    kv_caches: list[Tensor],
    block_table: Tensor | None,
    prefix_lens: Tensor | None,
    accept_index: Tensor,
    accept_token_num: Tensor,
    cache_loc: Tensor | None = None,
) -> None:
    core.commit_kv(
        kv_caches, block_table, prefix_lens, accept_index, accept_token_num, cache_loc, None
    )


_define(  # in place: there is nothing to return
    "commit_kv(Tensor(a!)[] kv_caches, Tensor? block_table, Tensor? prefix_lens, "
    "Tensor accept_index, Tensor accept_token_num, Tensor? cache_loc=None) -> ()",
    _commit_kv,
    _nothing,
)
NAMES.append("commit_kv")
