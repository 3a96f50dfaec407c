"""The drafter: block diffusion in the DFlash form, all future positions in one pass.

A block is the last emitted token and 15 masks. Its tokens see each other, in both directions, and
the context: the target's own hidden states of every token before the block, fused into one
feature, from which each layer makes a cache row. So the drafter has the target's kind of cache,
filled by the target's pass, and its attention is `kdtree.verify_attn` too: the block is a tree
whose nodes all see each other. Embedding and output head are the target's.
"""

from __future__ import annotations

from collections.abc import Mapping

from tiny_mla.model import Attend, Config, Layer, Target
from tiny_mla.ops import Array

#: Slots of a block: the anchor and the masks behind it.
BLOCK = 16

CONFIG = Config(
    intermediate_size=320,
    num_hidden_layers=2,
    qk_nope_head_dim=32,
    v_head_dim=32,
)


class Drafter:
    """Proposes the BLOCK - 1 tokens after the last one, each position on its own."""

    def __init__(self, config: Config, weights: Mapping[str, Array], target: Target) -> None:
        self.config, self.target, self.ops = config, target, target.ops
        self.fuse = weights["fuse.weight"].T
        self.feature_norm = weights["feature_norm.weight"]
        self.mask = weights["mask.weight"]
        self.norm = weights["norm.weight"]
        self.layers = [
            Layer(weights, f"layers.{i}", config, self.ops) for i in range(config.num_hidden_layers)
        ]

    def context(self, features: Array, positions: Array) -> list[Array]:
        """Each layer's cache rows [R,576] of tokens that the target has seen."""
        fused = features @ self.fuse
        fused = self.ops.rms_norm(fused, self.feature_norm, self.config.rms_norm_eps)
        rope = self.target.rope_at(positions)
        return [layer.rows(fused, rope) for layer in self.layers]

    def __call__(self, anchors: Array, positions: Array, attend: Attend) -> Array:
        """Anchors [B], the blocks' positions [B * BLOCK] -> logits [B, BLOCK - 1, V]."""
        first = self.target.embedding[anchors][:, None]
        masks = self.mask + 0 * first  # one for each block
        x = self.ops.concat([first] + [masks] * (BLOCK - 1), 1).reshape(len(positions), -1)
        rope = self.target.rope_at(positions)
        for index, layer in enumerate(self.layers):
            x = layer(index, x, rope, attend)
        x = x.reshape(len(anchors), BLOCK, -1)[:, 1:]
        return self.target.head(x.reshape(-1, x.shape[-1]), self.norm).reshape(
            len(anchors), BLOCK - 1, -1
        )
