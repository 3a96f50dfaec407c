"""The target: a dense decoder in the DeepSeek-V3 form, multi-head latent attention throughout.

A token's key and value in a layer are one row of 576 numbers: a latent of 512, normed, from which
each head's key and value follow by `kv_b_proj`, and a rotary key of 64 that all heads share. In
the absorbed form a head's query goes through its part of `kv_b_proj` instead, so that the cache
holds nothing but rows, and the attention is over them: `kdtree.verify_attn`.

Weights and configuration carry the names of Hugging Face's DeepseekV3ForCausalLM, which loads them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np

from tiny_mla import safetensors
from tiny_mla.ops import Array, Ops

#: attend(layer index, layer, q_nope [R,H,nope], q_rope [R,H,64], rows [R,576]) -> [R,H,v].
#: `rows` are the new tokens' own; the callee keeps them and knows what each row may see.
Attend = Callable[[int, "Layer", Array, Array, Array], Array]
#: cos and sin, [R,32] each.
Rope = tuple[Array, Array]


@dataclass(frozen=True)
class Config:
    """Sizes, by the names of DeepseekV3Config."""

    vocab_size: int = 1024
    hidden_size: int = 256
    intermediate_size: int = 640
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    qk_nope_head_dim: int = 64
    qk_rope_head_dim: int = 64
    v_head_dim: int = 64
    kv_lora_rank: int = 512
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 4096

    @property
    def sm_scale(self) -> float:
        """Of the keys before absorption: the width that was trained, not 576."""
        return float((self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5)

    def save(self, path: Path, **more: object) -> None:
        path.write_text(json.dumps(more | asdict(self), indent=2) + "\n")

    def hugging_face(self) -> dict[str, object]:
        """What else DeepseekV3Config needs to mean this model."""
        return {
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
            "q_lora_rank": None,
            "first_k_dense_replace": self.num_hidden_layers,
            "num_key_value_heads": self.num_attention_heads,
            "rope_interleave": True,
            "rope_scaling": None,
            "attention_bias": False,
            "hidden_act": "silu",
            "tie_word_embeddings": True,
            "bos_token_id": None,
            "eos_token_id": None,
            "dtype": "float16",
        }

    @classmethod
    def load(cls, path: Path) -> Config:
        values = json.loads(path.read_text())
        return cls(**{f.name: values[f.name] for f in fields(cls)})


def load(folder: Path, ops: Ops) -> tuple[Config, dict[str, Array]]:
    """A folder's config.json and model.safetensors, the weights in float32."""
    weights = safetensors.load(folder / "model.safetensors")
    return Config.load(folder / "config.json"), {
        name: ops.asarray(values.astype(np.float32)) for name, values in weights.items()
    }


def rope_table(config: Config, ops: Ops) -> Rope:
    """cos and sin of every position; made in float64, so the same on every device."""
    pairs = config.qk_rope_head_dim // 2
    turns = config.rope_theta ** -(np.arange(pairs) / pairs)
    angles = np.arange(config.max_position_embeddings)[:, None] * turns
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    return ops.asarray(cos), ops.asarray(sin)


def rotate(x: Array, rope: Rope, ops: Ops) -> Array:
    """Rotary embedding of neighbouring pairs; the result keeps evens first, then odds."""
    cos, sin = rope
    even, odd = x[..., 0::2], x[..., 1::2]
    return ops.concat([even * cos - odd * sin, odd * cos + even * sin])


class Layer:
    """One decoder layer over rows of any batch: R tokens, whose attention `attend` provides."""

    def __init__(self, weights: Mapping[str, Array], name: str, config: Config, ops: Ops) -> None:
        def weight(part: str) -> Array:
            return weights[f"{name}.{part}.weight"]

        self.config, self.ops = config, ops
        heads, nope = config.num_attention_heads, config.qk_nope_head_dim
        self.input_norm = weight("input_layernorm")
        self.q = weight("self_attn.q_proj").T
        self.kv_a = weight("self_attn.kv_a_proj_with_mqa").T
        self.kv_norm = weight("self_attn.kv_a_layernorm")
        self.kv_b = weight("self_attn.kv_b_proj")  # [H * (nope + v), latent]
        per_head = self.kv_b.reshape(heads, nope + config.v_head_dim, config.kv_lora_rank)
        self.w_uk = per_head[:, :nope]  # [H, nope, latent]
        self.w_uv = per_head[:, nope:].swapaxes(1, 2)  # [H, latent, v]
        self.o = weight("self_attn.o_proj").T
        self.mlp_norm = weight("post_attention_layernorm")
        self.gate, self.up = weight("mlp.gate_proj").T, weight("mlp.up_proj").T
        self.down = weight("mlp.down_proj").T

    def rows(self, x: Array, rope: Rope) -> Array:
        """What the cache keeps of each token: [R,576]."""
        kv, latent = x @ self.kv_a, self.config.kv_lora_rank
        normed = self.ops.rms_norm(kv[..., :latent], self.kv_norm, self.config.rms_norm_eps)
        return self.ops.concat([normed, rotate(kv[..., latent:], rope, self.ops)])

    def absorb(self, q_nope: Array) -> Array:
        """Queries in the latent's space: [R,H,nope] -> [R,H,512]."""
        return (q_nope.swapaxes(0, 1) @ self.w_uk).swapaxes(0, 1)

    def values(self, latent: Array) -> Array:
        """Heads' values of an attended latent: [R,H,512] -> [R,H,v]."""
        return (latent.swapaxes(0, 1) @ self.w_uv).swapaxes(0, 1)

    def __call__(self, index: int, x: Array, rope: Rope, attend: Attend) -> Array:
        c, ops = self.config, self.ops
        h = ops.rms_norm(x, self.input_norm, c.rms_norm_eps)
        q = (h @ self.q).reshape(len(h), c.num_attention_heads, -1)
        cos, sin = rope
        q_rope = rotate(q[..., c.qk_nope_head_dim :], (cos[:, None], sin[:, None]), ops)
        q_nope = q[..., : c.qk_nope_head_dim]
        attended = attend(index, self, q_nope, q_rope, self.rows(h, rope))
        x = x + attended.reshape(len(h), -1) @ self.o
        h = ops.rms_norm(x, self.mlp_norm, c.rms_norm_eps)
        return x + (ops.silu(h @ self.gate) * (h @ self.up)) @ self.down


class Target:
    """The model whose text is decoded."""

    #: Hidden states after these layers are the drafter's features.
    FEATURE_LAYERS = (0, 2, 3)

    def __init__(self, config: Config, weights: Mapping[str, Array], ops: Ops) -> None:
        self.config, self.ops = config, ops
        self.embedding = weights["model.embed_tokens.weight"]
        self.norm = weights["model.norm.weight"]
        self.rope = rope_table(config, ops)
        self.layers = [
            Layer(weights, f"model.layers.{i}", config, ops)
            for i in range(config.num_hidden_layers)
        ]

    def head(self, x: Array, norm: Array) -> Array:
        """Logits; the embedding is tied."""
        return self.ops.rms_norm(x, norm, self.config.rms_norm_eps) @ self.embedding.T

    def rope_at(self, positions: Array) -> Rope:
        cos, sin = self.rope
        return cos[positions], sin[positions]

    def __call__(self, tokens: Array, positions: Array, attend: Attend) -> tuple[Array, Array]:
        """R tokens at their positions -> logits [R,V] and features [R, 3 * hidden]."""
        x, rope = self.embedding[tokens], self.rope_at(positions)
        features = []
        for index, layer in enumerate(self.layers):
            x = layer(index, x, rope, attend)
            if index in self.FEATURE_LAYERS:
                features.append(x)
        return self.head(x, self.norm), self.ops.concat(features)
