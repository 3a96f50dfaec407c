"""A paged cache for all layers of the target and the drafter, and its allocator.

A request owns pages of 64 rows, listed in its line of the block table. The pages for the longest
text that it may write are reserved before it starts, so that a round allocates nothing and can be
captured in a CUDA graph. Page 0 belongs to nobody: table entries that no request owns name it, and
what spare slots write lands there.
"""

from __future__ import annotations

import numpy as np

from tiny_mla.ops import Array, Ops

PAGE = 64


class PagedCache:
    """rows: float16 [layers, pages, PAGE, width]; table: int32 [batch, pages a request]."""

    def __init__(self, layers: int, batch: int, capacity: int, width: int, ops: Ops) -> None:
        """Room for `batch` requests of `capacity` tokens each."""
        each = -(-capacity // PAGE)
        self.ops, self.layers = ops, layers
        self.rows = ops.zeros((layers, 1 + batch * each, PAGE, width), ops.float16)
        self.table = ops.zeros((batch, each), ops.int32)
        self._flat = self.rows.reshape(layers, -1, width)
        self._slots = ops.asarray(np.arange(batch)[:, None])
        self._free = list(range(batch * each, 0, -1))
        self._owned: list[list[int]] = [[] for _ in range(batch)]

    def reserve(self, request: int, tokens: int) -> None:
        """Gives the request pages for `tokens` positions; it must own none."""
        count = -(-tokens // PAGE)
        if self._owned[request]:
            raise ValueError(f"request {request} already owns pages")
        if count > min(len(self._free), self.table.shape[1]):
            raise MemoryError(f"request {request} needs {count} pages, {len(self._free)} are free")
        self._owned[request] = [self._free.pop() for _ in range(count)]
        line = self._owned[request] + [0] * (self.table.shape[1] - count)
        self.table[request] = self.ops.asarray(line, self.ops.int32)

    def release(self, request: int) -> None:
        """Takes the request's pages back."""
        self._free += reversed(self._owned[request])
        self._owned[request] = []
        self.table[request] = 0

    def locate(self, prefix_lens: Array, slots: Array) -> Array:
        """Flat rows [B * S] of positions prefix_lens[b] + slots[s]."""
        positions = prefix_lens[:, None] + slots
        pages = self.ops.cast(self.table[self._slots, positions // PAGE], self.ops.int64)
        return (pages * PAGE + positions % PAGE).reshape(-1)

    def write(self, layer: int, places: Array, rows: Array) -> None:
        """Puts rows [R, width] at the flat places [R] of a layer."""
        self._flat[layer][places] = self.ops.cast(rows, self.ops.float16)
