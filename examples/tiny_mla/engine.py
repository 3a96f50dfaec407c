"""The decoding loop: draft, build the tree, verify, accept, commit. Everything stays on the device.

One round of a batch, for plain decoding (no draft), chains (one candidate a position) and trees:

    drafter         block of 15 masks             -> logits of the next 15 tokens
    draft_topk      logits                        -> candidates of each position
    build_ddtree    candidates                    -> tree (plain: its root alone; chain: K = 1)
    target          the tree's tokens             -> logits of every slot, drafter's features
      verify_attn   in every layer of both models
    tree_accept_logits                            -> accepted slots, new tokens
    commit_kv       every layer of both models, one call

The host reads nothing of it; a caller that prints reads lengths and new tokens. On a GPU the round
is captured once as a CUDA graph and replayed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kdtree
import numpy as np

from tiny_mla.cache import PAGE, PagedCache
from tiny_mla.drafter import BLOCK, Drafter
from tiny_mla.model import Attend, Layer, Target, load
from tiny_mla.ops import Array, Ops
from tiny_mla.tokenizer import Tokenizer

WEIGHTS = Path(__file__).parent / "weights"


def load_models(ops: Ops) -> tuple[Target, Drafter]:
    """The trained pair of this folder."""
    target = Target(*load(WEIGHTS / "target", ops), ops)
    return target, Drafter(*load(WEIGHTS / "drafter", ops), target)


def load_tokenizer() -> Tokenizer:
    return Tokenizer.load(Path(__file__).parent / "tokenizer.json")


@dataclass(frozen=True)
class Method:
    """How a round drafts: the most nodes of a tree, and the candidates a position."""

    name: str
    budget: int
    candidates: int

    @property
    def slots(self) -> int:
        return self.budget + 1


PLAIN = Method("plain", 0, 1)
CHAIN = Method("chain", BLOCK - 1, 1)
TREES = tuple(Method(f"tree {budget}", budget, min(budget, 32)) for budget in (8, 16, 32, 64))
METHODS = (PLAIN, CHAIN, *TREES)


@dataclass
class Run:
    """What decoding a batch gave."""

    tokens: list[list[int]]  # of each request, as many as were asked for
    emitted: int  # with what the last rounds gave beyond
    passes: int  # target passes of single requests
    rounds: int
    seconds: float  # without the prompts

    @property
    def tokens_a_pass(self) -> float:
        return self.emitted / self.passes


class Decoder:
    """Decodes batches of up to `batch` requests, up to `capacity` prompt and new tokens each."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        method: Method,
        *,
        batch: int,
        capacity: int,
        temperature: float = 0.0,
    ) -> None:
        self.target, self.drafter, self.method = target, drafter, method
        self.ops = ops = target.ops
        self.batch, self.temperature = batch, temperature
        # Past its last token a request may write a tree's slots, and a spare row once more.
        self.margin = 2 * max(method.slots, BLOCK)
        config = target.config
        self.layers = config.num_hidden_layers
        self.cache = PagedCache(
            self.layers + len(drafter.layers),
            batch,
            capacity + self.margin,
            config.kv_lora_rank + config.qk_rope_head_dim,
            ops,
        )
        self.slots = ops.asarray(np.arange(method.slots))
        self.block = ops.asarray(np.arange(BLOCK))
        self.requests = ops.asarray(np.arange(batch))
        # Nodes of a block see each other, whatever their order.
        self.sees_block = ops.zeros((batch, BLOCK), ops.int64) + ((1 << (BLOCK - 1)) - 1)
        # The state of the requests.
        self.roots = ops.zeros((batch,), ops.int64) - 1  # last token; -1: done, or no request
        self.prefix_lens = ops.zeros((batch,), ops.int32)  # tokens before the root
        self.lengths = ops.zeros((batch,), ops.int64)  # tokens emitted
        self.limits = ops.zeros((batch,), ops.int64)  # tokens wanted
        self.passes = ops.zeros((batch,), ops.int64)
        self.seeds = ops.zeros((batch,), ops.int64)
        self.text = ops.zeros((batch, capacity + self.margin), ops.int64)
        self.tree: Any = None  # of the last round, for those who want to look
        self.logits: Any = None
        self.accept: Any = None
        self.round: Callable[[], None] = ops.capture(self._round)

    def _attend(
        self, first_layer: int, places: Array, prefix_lens: Array, visibility: Array, nodes: Array
    ) -> Attend:
        """The layers' attention over the cache, after adding the new rows to it."""

        def attend(index: int, layer: Layer, q_nope: Array, q_rope: Array, rows: Array) -> Array:
            self.cache.write(first_layer + index, places, rows)
            q = self.ops.concat([layer.absorb(q_nope), q_rope])
            q = self.ops.cast(q, self.ops.float16)
            attended = kdtree.verify_attn(
                q.reshape(self.batch, -1, *q.shape[1:]),
                self.cache.rows[first_layer + index],
                self.cache.table,
                prefix_lens,
                visibility,
                num_nodes=nodes,
                sm_scale=layer.config.sm_scale,
                kv_split=PAGE,  # a request's bits depend on no other request
            )
            return layer.values(self.ops.cast(attended, self.ops.float32).reshape(*q.shape[:2], -1))

        return attend

    def _run_target(self, tokens: Array, positions: Array, attend: Attend, places: Array) -> Array:
        """Logits [R,V]; the drafter's context rows go to the cache as well."""
        positions = positions.reshape(-1)
        logits, features = self.target(tokens.reshape(-1), positions, attend)
        if self.method.budget:
            for index, rows in enumerate(self.drafter.context(features, positions)):
                self.cache.write(self.layers + index, places, rows)
        return logits

    def _draft(self) -> kdtree.DraftTopK:
        """Candidates of the next BLOCK - 1 positions; none when decoding plainly."""
        if not self.method.budget:
            shape = (self.batch, 0, 1)
            return kdtree.DraftTopK(
                self.ops.zeros(shape, self.ops.float32), self.ops.zeros(shape, self.ops.int64), None
            )
        nodes = self.ops.cast((self.roots >= 0) * BLOCK, self.ops.int32)
        places = self.cache.locate(self.prefix_lens, self.block)
        attend = self._attend(self.layers, places, self.prefix_lens, self.sees_block, nodes)
        logits = self.drafter(
            self.roots * (self.roots >= 0),
            (self.prefix_lens[:, None] + self.block).reshape(-1),
            attend,
        )
        return kdtree.draft_topk(logits, self.method.candidates)

    def _round(self) -> None:
        top = self._draft()
        tree = kdtree.build_ddtree(
            top.logprobs, top.ids, self.roots, self.prefix_lens, budget=self.method.budget
        )
        places = self.cache.locate(self.prefix_lens, self.slots)
        attend = self._attend(0, places, self.prefix_lens, tree.visibility, tree.num_nodes)
        logits = self._run_target(tree.draft_tokens, tree.positions, attend, places)
        logits = logits.reshape(self.batch, self.method.slots, -1)
        accept = kdtree.tree_accept_logits(
            tree, logits, temperature=self.temperature, seeds=self.seeds
        )
        kdtree.commit_kv(self.cache.rows, self.cache.table, self.prefix_lens, accept)
        self._advance(accept)
        self.tree, self.logits, self.accept = tree, logits, accept

    def _advance(self, accept: kdtree.Accept) -> None:
        """The new tokens to the text; the bonus is the next root. Nothing moves for spare rows."""
        ops, alive = self.ops, self.roots >= 0
        last = ops.cast(accept.accept_token_num, ops.int64)
        # What is written past the bonus is overwritten by the next round.
        self.text[self.requests[:, None], self.lengths[:, None] + self.slots] = accept.accept_tokens
        emitted = (last + 1) * alive
        self.lengths += emitted
        self.passes += alive
        self.prefix_lens += ops.cast(emitted, ops.int32)
        bonus = accept.accept_tokens[self.requests, last]
        self.roots[...] = ops.where(self.lengths < self.limits, bonus, -1)

    def start(
        self, prompts: Sequence[Sequence[int]], new_tokens: int, seeds: Sequence[int] | None = None
    ) -> None:
        """Takes requests in, in place of those before, and runs the target over their prompts."""
        ops, spare = self.ops, self.batch - len(prompts)
        if spare < 0 or not all(prompts):
            raise ValueError(f"expected up to {self.batch} prompts of one token or more")

        def per_request(values: Sequence[int], rest: int) -> Array:
            return ops.asarray(np.array([*values, *[rest] * spare]))

        for request in range(self.batch):
            self.cache.release(request)
        for request, prompt in enumerate(prompts):
            self.cache.reserve(request, len(prompt) + new_tokens + self.margin)
        self.roots[...] = per_request([prompt[-1] for prompt in prompts], -1)
        self.prefix_lens[...] = per_request([len(prompt) - 1 for prompt in prompts], 0)
        self.limits[...] = per_request([new_tokens] * len(prompts), 0)
        self.seeds[...] = per_request(seeds if seeds is not None else range(len(prompts)), 0)
        for counter in (self.lengths, self.passes):
            counter[...] = 0

        # Everything but a prompt's last token, which is the first root, in chunks of a page.
        width = max(len(prompt) for prompt in prompts) - 1
        tokens = np.zeros((self.batch, -(-width // PAGE) * PAGE), np.int64)
        for line, prompt in zip(tokens, prompts, strict=False):
            line[: len(prompt) - 1] = prompt[:-1]
        slots = ops.asarray(np.arange(PAGE))
        for begin in range(0, width, PAGE):
            before = ops.zeros((self.batch,), ops.int32) + begin
            counts = [min(max(len(prompt) - 1 - begin, 0), PAGE) for prompt in prompts]
            nodes = ops.cast(per_request(counts, 0), ops.int32)
            places = self.cache.locate(before, slots)
            attend = self._attend(0, places, before, None, nodes)
            chunk = ops.asarray(tokens[:, begin : begin + PAGE])
            self._run_target(chunk, before[:, None] + slots, attend, places)

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        new_tokens: int,
        seeds: Sequence[int] | None = None,
        watch: Callable[[list[list[int]]], None] | None = None,
    ) -> Run:
        """Decodes until every request has `new_tokens`.

        watch: told, after every round, each request's new tokens, the bonus last. Without it the
        lengths are looked at every eighth round only.
        """
        self.start(prompts, new_tokens, seeds)
        self.ops.wait()
        begun, rounds, seen = time.perf_counter(), 0, [0] * len(prompts)
        while min(seen) < new_tokens:
            self.round()
            rounds += 1
            if watch is None and rounds % 8 and rounds < new_tokens:
                continue
            lengths = self.ops.numpy(self.lengths).tolist()[: len(prompts)]
            if watch:
                text = self.ops.numpy(self.text)
                watch(
                    [
                        text[i, a:b].tolist()
                        for i, (a, b) in enumerate(zip(seen, lengths, strict=True))
                    ]
                )
            seen = lengths
        self.ops.wait()
        seconds = time.perf_counter() - begun
        text = self.ops.numpy(self.text)
        return Run(
            [text[i, :new_tokens].tolist() for i in range(len(prompts))],
            int(self.ops.numpy(self.lengths)[: len(prompts)].sum()),
            int(self.ops.numpy(self.passes)[: len(prompts)].sum()),
            rounds,
            seconds,
        )

    def next_logits(self, prompt: Sequence[int]) -> np.ndarray[Any, Any]:
        """The target's logits [V] after a prompt."""
        self.start([prompt], 1)
        self.round()
        return self.ops.numpy(self.logits)[0, 0]
