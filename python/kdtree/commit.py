"""`commit_kv`: the accepted tokens' KV rows to their final places, in every layer."""

from __future__ import annotations

from collections.abc import Sequence

from kdtree._lib import Array, Stream, core, record
from kdtree.records import Accept

__all__ = ["commit_kv"]


def commit_kv(
    kv_caches: Sequence[Array] | Array,
    block_table: Array | None,
    prefix_lens: Array | None,
    accept: Accept,
    *,
    cache_loc: Array | None = None,
    stream: Stream = None,
) -> None:
    """In every layer, move the row of slot accept_index[b,i] to position prefix_lens[b] + i.

    For i in 0..accept_token_num[b], in place, all layers in one launch; all rows are read before
    any is written. Rows outside the cache are left alone, and a slot of -1, all that a padding
    request has, moves nothing.

    Args:
        kv_caches: a list of [pages, page_size, D] (or [pages, page_size, 1, D]), one a layer, of
            one shape, dtype (any) and strides, D dense; or one stacked array [layers, ...].
        block_table: int32 [B,M], page of each page_size positions; None with cache_loc.
        prefix_lens: int32 [B], positions before the root; may be None with cache_loc.
        accept: of which accept_index and accept_token_num are read.
        cache_loc: int64 [B,Q], the flat row (page * page_size + place) of each tree slot: the row
            of slot accept_index[b,i] goes to cache_loc[b,i].
        stream: see `kdtree`.

    Raises:
        ValueError, TypeError: naming the argument, before anything is launched.
    """
    record("accept", accept, Accept)
    core.commit_kv(
        kv_caches,
        block_table,
        prefix_lens,
        accept.accept_index,
        accept.accept_token_num,
        cache_loc,
        stream,
    )
