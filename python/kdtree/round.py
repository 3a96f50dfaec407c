"""`Round`: the buffers of a tree-speculation round, made once, and its steps in order."""

from __future__ import annotations

import copy
import math
import operator
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from kdtree._lib import Array, core
from kdtree.accept import tree_accept, tree_accept_logits
from kdtree.attention import verify_attn
from kdtree.commit import commit_kv
from kdtree.draft import draft_topk, merge_topk
from kdtree.records import Accept, DraftTopK, Tree
from kdtree.tree import build_ddtree

__all__ = ["Exchange", "Round"]


class Round:
    """One round of up to `batch` requests: every buffer, and the four steps that fill them.

        draft     draft_topk, build_ddtree      -> top, tree
        verify    verify_attn, once a layer     -> out, lse
        accept    tree_accept_logits            -> accepted
        commit    commit_kv                     -> the KV caches, all layers

    A step is the ops beside it, called on the caller's current stream with the fields below as
    `out=`, and nothing more. It allocates nothing and reads nothing back, so that a CUDA graph
    captures a round as it stands. Any op may be called by hand in its place, with the same
    fields, as ``kdtree.draft_topk(logits, r.k, root_tokens=roots, out=r.top)``. A tree built
    elsewhere is assigned to `tree`.

    Tensor parallel: where each of `shards` ranks has a slice of the vocabulary and some of the
    heads, give every rank a Round with its `vocab_start` and an `all_gather`. `draft` and `accept`
    take the rank's slice of the logits and gather once each: `draft` the top-K of the slice,
    `accept` the largest logit of every slot. What a rank computes from there on follows from what
    was gathered, so all have the same tree and the same tokens without a broadcast, even where
    what they were meant to have in common differs in the last bit. Candidates and accepted tokens
    are those of the whole vocabulary; log-probs are within rounding of them.

    Attributes, beside the arguments, which keep their names:
        top: DraftTopK [B,L,K].
        tree: Tree [B,Q], Q = budget + 1.
        out: `dtype` [B,Q,H,512], of the layer that `verify` ran last.
        lse: float32 [B,Q,H], likewise.
        workspace: uint8, scratch of verify_attn.
        accepted: Accept [B,Q].
        predicted: DraftTopK [B,Q,1], the target's token of every slot. This and the next two
            are None without an all_gather.
        draft_exchange, accept_exchange: what the ranks tell each other.
    """

    top: DraftTopK
    tree: Tree
    out: Any
    lse: Any
    workspace: Any
    accepted: Accept
    draft_exchange: Exchange | None
    accept_exchange: Exchange | None
    predicted: Any

    def __init__(
        self,
        like: Array,
        *,
        batch: int,
        depth: int,
        k: int,
        budget: int,
        heads: int,
        dtype: Any,
        sm_scale: float,
        kv_split: int | None = None,
        chain_seed: bool = False,
        node_cost: Array | None = None,
        base_cost: float | None = None,
        vocab_size: int | None = None,
        shards: int = 1,
        vocab_start: int = 0,
        all_gather: Callable[[Any, Any], Any] | None = None,
    ) -> None:
        """Makes the buffers. Arguments that are not described here are those of the ops.

        Args:
            like: any array of the caller's: NumPy, CuPy or torch. The buffers come from its
                library and lie on its device.
            batch: most requests, B.
            depth: drafted positions, L.
            k: candidates a position, K.
            budget: most nodes of a tree, 0..64.
            heads: query heads of this rank, H.
            dtype: of queries and `out`: the library's bfloat16 or float16.
            vocab_size: of the whole vocabulary, of drafter and target.
            shards: ranks that share the vocabulary.
            vocab_start: id of column 0 of this rank's logits.
            all_gather: called with (received uint8 [shards * bytes], sent uint8 [bytes]), to
                fill the first with what every rank sent, in the order of the ranks, on the current
                stream: torch.distributed.all_gather_into_tensor does (all_gather_single by its
                name in torch 2.13). Needed with shards > 1.

        Raises:
            ValueError, TypeError: naming the argument.
        """
        self.batch = _int("batch", batch, 1)
        self.depth = _int("depth", depth, 0)
        self.k = _int("k", k, 1, core.MAX_K)
        self.budget = _int("budget", budget, 0, core.MAX_QLEN - 1)
        self.heads = _int("heads", heads, 1, 128)
        self.shards = _int("shards", shards, 1)
        self.sm_scale, self.kv_split = sm_scale, kv_split
        self.chain_seed, self.node_cost, self.base_cost = chain_seed, node_cost, base_cost
        self.vocab_start, self.vocab_size = vocab_start, vocab_size
        if not callable(all_gather) and (self.shards > 1 or all_gather is not None):
            raise TypeError(f"all_gather: expected a function, got {_type_name(all_gather)}")
        self.all_gather: Any = all_gather

        library = _library(like)
        qlen = self.budget + 1
        rows, slots = (self.batch, self.depth), (self.batch, qlen)
        self.top = library.topk(rows, self.k)
        self.tree = Tree(
            draft_tokens=library.empty(slots, "int64"),
            parents=library.empty(slots, "int32"),
            depths=library.empty(slots, "int32"),
            positions=library.empty(slots, "int64"),
            next_token=library.empty(slots, "int64"),
            next_sibling=library.empty(slots, "int64"),
            visibility=library.empty(slots, "int64"),
            scores=library.empty(slots, "float32"),
            num_nodes=library.empty((self.batch,), "int32"),
        )
        self.out = library.empty((*slots, self.heads, 512), _half_name(dtype))
        self.lse = library.empty((*slots, self.heads), "float32")
        kind, ordinal = like.__dlpack_device__()
        bytes_of_batch = (  # fewer requests may be cut into more splits
            core.verify_attn_workspace(b, qlen, self.heads, kind, ordinal, kv_split is None)
            for b in range(1, self.batch + 1)
        )
        self.workspace = library.empty((max(bytes_of_batch),), "uint8")
        self.accepted = Accept(
            accept_index=library.empty(slots, "int32"),
            accept_token_num=library.empty((self.batch,), "int32"),
            accept_tokens=library.empty(slots, "int64"),
        )
        self.draft_exchange = self.accept_exchange = self.predicted = None
        if all_gather:
            self.draft_exchange = Exchange.new(library, self.shards, rows, self.k)
            self.accept_exchange = Exchange.new(library, self.shards, slots, 1)
            self.predicted = library.topk(slots, 1)

    def rows(self, batch: int) -> Round:
        """The same buffers, for the first `batch` requests: for graphs of smaller batches."""
        part = copy.copy(self)
        part.batch = _int("batch", batch, 1, self.batch)
        for name in ("top", "tree", "out", "lse", "accepted", "predicted"):
            setattr(part, name, _first(getattr(self, name), part.batch))
        for name in ("draft_exchange", "accept_exchange"):
            exchange: Exchange | None = getattr(self, name)
            setattr(part, name, exchange and exchange.rows(part.batch))
        return part

    def draft(self, logits: Array, root_tokens: Array, prefix_lens: Array) -> Tree:
        """Drafter logits to trees: `draft_topk` (and `merge_topk`), then `build_ddtree`.

        Args:
            logits: [B,L,V], or [B,L,columns of this rank].
            root_tokens, prefix_lens: as for `build_ddtree`. What the logits of a padding request
                are does not matter.
        """
        _lead("logits", logits, "[B, L, V]", self.batch, self.depth)
        if self.draft_exchange:
            self._gather_topk(logits, self.draft_exchange, self.top, root_tokens)
        else:
            draft_topk(
                logits,
                self.k,
                vocab_size=self.vocab_size,
                root_tokens=root_tokens,
                out=self.top,
            )
        return build_ddtree(
            self.top.logprobs,
            self.top.ids,
            root_tokens,
            prefix_lens,
            budget=self.budget,
            chain_seed=self.chain_seed,
            node_cost=self.node_cost,
            base_cost=self.base_cost,
            out=self.tree,
        )

    def verify(
        self,
        q: Array,
        kv_cache: Array,
        block_table: Array | None,
        prefix_lens: Array,
        *,
        q_rope: Array | None = None,
        kv_scale: float | Array | None = None,
        kv_indptr: Array | None = None,
        kv_indices: Array | None = None,
    ) -> Any:
        """Attention of one layer over the trees: `verify_attn`. The next layer overwrites `out`."""
        _lead("q", q, "[B, Q, H, 576 or 512]", self.batch, self.budget + 1, self.heads)
        return verify_attn(
            q,
            kv_cache,
            block_table,
            prefix_lens,
            self.tree.visibility,
            num_nodes=self.tree.num_nodes,
            sm_scale=self.sm_scale,
            q_rope=q_rope,
            kv_scale=kv_scale,
            kv_split=self.kv_split,
            kv_indptr=kv_indptr,
            kv_indices=kv_indices,
            out=self.out,
            lse=self.lse,
            workspace=self.workspace,
        )

    def accept(
        self,
        target: Array,
        *,
        temperature: float | Array | None = None,
        seeds: Array | None = None,
        root_tokens: Array | None = None,
    ) -> Accept:
        """The walk along the target's tokens: `tree_accept_logits` or `tree_accept`.

        Args:
            target: logits [B,Q,V], or token ids [B,Q]. With an all_gather, logits are
                [B,Q,columns of this rank] and the walk is greedy (a slot without a finite logit
                gives its first token, not -1); to sample, gather the logits and call
                `tree_accept_logits`.
            temperature, seeds: as for `tree_accept_logits`.
            root_tokens: those given to `draft`. Read with an all_gather and logits only: each rank
                then leaves out the slots of padding requests, which saves time and changes no
                token. Else the tree tells.
        """
        shape = _lead("target", target, "[B, Q] or [B, Q, V]", self.batch, self.budget + 1)
        exchange = self.accept_exchange if len(shape) > 2 else None
        if len(shape) > 2 and exchange is None:
            return tree_accept_logits(
                self.tree,
                target,
                temperature=temperature,
                seeds=seeds,
                vocab_size=self.vocab_size,
                out=self.accepted,
            )
        for name, value in (("temperature", temperature), ("seeds", seeds)):
            if value is not None:
                raise ValueError(
                    f"{name}: expected None with token ids or a slice of the logits, whose walk is "
                    f"greedy, got {_type_name(value)}"
                )
        if exchange is not None:
            self._gather_topk(target, exchange, self.predicted, root_tokens)
            target = self.predicted.ids[..., 0]
        return tree_accept(self.tree, target, out=self.accepted)

    def commit(
        self,
        kv_caches: Any,
        block_table: Array | None,
        prefix_lens: Array | None,
        *,
        cache_loc: Array | None = None,
    ) -> None:
        """The accepted rows to their places, in every layer: `commit_kv`."""
        commit_kv(kv_caches, block_table, prefix_lens, self.accepted, cache_loc=cache_loc)

    def _gather_topk(
        self, logits: Array, exchange: Exchange, out: Any, root_tokens: Array | None
    ) -> None:
        """The top-k of the whole vocabulary, from this rank's columns of it."""
        draft_topk(
            logits,
            exchange.k,
            vocab_start=self.vocab_start,
            vocab_size=self.vocab_size,
            normalize=False,
            root_tokens=root_tokens,
            out=exchange.mine,
        )
        self.all_gather(exchange.received, exchange.sent)
        merge_topk(exchange.all.logprobs, exchange.all.ids, exchange.all.lse, out=out)


class Exchange:
    """What the ranks tell each other in one all-gather: the top-k of each one's columns.

    Attributes:
        sent: uint8 [bytes], of this rank.
        received: uint8 [shards * bytes], of all ranks in their order.
        mine: DraftTopK [...], which lies in `sent`.
        all: DraftTopK [shards, ...], which lies in `received`.
    """

    def __init__(
        self, library: _Library, sent: Any, received: Any, shape: tuple[int, ...], k: int
    ) -> None:
        """Takes what it needs of flat memory."""
        self._library, self._memory, self._shape, self.k = library, (sent, received), shape, k
        size, shards = self.size(shape, k), received.shape[0] // sent.shape[0]
        self.sent = sent[:size]
        self.received = received[: shards * size]
        self.mine = self._candidates(self.sent)
        self.all = self._candidates(self.received.reshape(shards, size))

    @classmethod
    def new(cls, library: _Library, shards: int, shape: tuple[int, ...], k: int) -> Exchange:
        size = cls.size(shape, k)
        sent, received = library.empty((size,), "uint8"), library.empty((shards * size,), "uint8")
        return cls(library, sent, received, shape, k)

    @staticmethod
    def size(shape: tuple[int, ...], k: int) -> int:
        """Bytes of a piece, so that the arrays of the next one are aligned; never 0."""
        return (math.prod(shape) * (12 * k + 4) // 16 + 1) * 16

    def rows(self, batch: int) -> Exchange:
        return Exchange(self._library, *self._memory, (batch, *self._shape[1:]), self.k)

    def _candidates(self, pieces: Any) -> DraftTopK:
        """The arrays of pieces [..., bytes], one after the other."""
        lead, begin = pieces.shape[:-1], 0

        def take(name: str, size: int, *shape: int) -> Any:
            nonlocal begin
            end = begin + size * math.prod(shape)
            view = pieces[..., begin:end].view(self._library.dtype(name)).reshape(*lead, *shape)
            begin = end
            return view

        ids = take("int64", 8, *self._shape, self.k)
        logprobs = take("float32", 4, *self._shape, self.k)
        return DraftTopK(logprobs, ids, take("float32", 4, *self._shape))


class _Library(NamedTuple):
    """How an array library makes arrays beside one of its own."""

    dtype: Callable[[str], Any]
    empty: Callable[[tuple[int, ...], str], Any]

    def topk(self, shape: tuple[int, ...], k: int) -> DraftTopK:
        return DraftTopK(
            logprobs=self.empty((*shape, k), "float32"),
            ids=self.empty((*shape, k), "int64"),
            lse=self.empty(shape, "float32"),
        )


def _library(like: Any) -> _Library:
    torch = sys.modules.get("torch")  # an array of a library that is not loaded cannot be
    if torch is not None and isinstance(like, torch.Tensor):
        if like.device.type not in ("cpu", "cuda"):
            raise TypeError(f"like: expected a CPU or CUDA tensor, got one on {like.device}")

        def dtype(name: str) -> Any:
            return getattr(torch, name)

        return _Library(
            dtype, lambda shape, name: torch.empty(shape, dtype=dtype(name), device=like.device)
        )
    for library in (sys.modules.get("numpy"), sys.modules.get("cupy")):
        if library is not None and isinstance(like, library.ndarray):
            return _Library(library.dtype, library.empty)
    raise TypeError(f"like: expected a NumPy, CuPy or torch array, got {_type_name(like)}")


def _type_name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _half_name(dtype: Any) -> str:
    """The name of a library's 16-bit float type."""
    name = getattr(dtype, "name", None) or getattr(dtype, "__name__", None) or str(dtype)
    name = name.removeprefix("torch.")
    if name not in ("bfloat16", "float16"):
        raise TypeError(f"dtype: expected bfloat16 or float16, got {dtype!r}")
    return name


def _int(name: str, value: Any, low: int, high: int | None = None) -> int:
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None:
        raise TypeError(f"{name}: expected an int, got {_type_name(value)}")
    if number < low or (high is not None and number > high):
        limits = f"at least {low}" if high is None else f"{low}..{high}"
        raise ValueError(f"{name}: expected {limits}, got {number}")
    return number


def _lead(name: str, array: Any, text: str, *sizes: int) -> tuple[int, ...]:
    """The shape of an input whose first dimensions are the round's."""
    if not hasattr(array, "shape"):
        raise TypeError(f"{name}: expected an array, got {_type_name(array)}")
    shape = tuple(array.shape)
    if shape[: len(sizes)] != sizes:
        raise ValueError(
            f"{name}: expected shape {text} that begins with {list(sizes)}, got {list(shape)}"
        )
    return shape


def _first(x: Any, batch: int) -> Any:
    """A record or an array, cut to its first requests."""
    if isinstance(x, (DraftTopK, Tree, Accept)):
        return type(x)(**{name: _first(array, batch) for name, array in vars(x).items()})
    return None if x is None else x[:batch]
