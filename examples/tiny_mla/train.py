"""Train the target and the drafter: about four minutes on one H200.

    python -m tiny_mla.data DATA && python -m tiny_mla.train DATA OUT      (in examples/)

1. The target learns the text: next-token prediction in the plain, unabsorbed form.
2. The target writes: continuations of random pieces of the training text, half of them greedy,
   half sampled, since it is the target's own text that the drafter has to foresee.
3. The drafter learns from that text and the frozen target's features: blocks at random anchors,
   all at once, each seeing the context before its anchor and itself. Near positions weigh more,
   as in DFlash: a token counts only when all before it in the block were right.

Without --steps the number of steps follows from --seconds and the machine's speed; losses.json
says what it was.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tiny_mla import drafter as drafting
from tiny_mla import safetensors
from tiny_mla.drafter import BLOCK, Drafter
from tiny_mla.model import Attend, Config, Layer, Target
from tiny_mla.ops import TorchOps
from tiny_mla.tokenizer import Tokenizer

Weights = dict[str, Tensor]


def new_weights(shapes: dict[str, tuple[int, ...]], depth: int, ops: TorchOps) -> Weights:
    """Norms 1, matrices normal with 0.02, those that add to the residual stream less."""
    weights = {}
    for name, shape in shapes.items():
        into_stream = name.endswith(("o_proj.weight", "down_proj.weight"))
        scale = 0.02 / math.sqrt(2 * depth) if into_stream else 0.02
        norm = name.endswith("norm.weight")
        values = torch.ones(shape) if norm else torch.randn(shape) * scale
        weights[name] = values.to(ops.device).requires_grad_()
    return weights


def layer_shapes(name: str, c: Config) -> dict[str, tuple[int, ...]]:
    heads, d = c.num_attention_heads, c.hidden_size
    return {
        f"{name}.input_layernorm.weight": (d,),
        f"{name}.self_attn.q_proj.weight": (heads * (c.qk_nope_head_dim + c.qk_rope_head_dim), d),
        f"{name}.self_attn.kv_a_proj_with_mqa.weight": (c.kv_lora_rank + c.qk_rope_head_dim, d),
        f"{name}.self_attn.kv_a_layernorm.weight": (c.kv_lora_rank,),
        f"{name}.self_attn.kv_b_proj.weight": (
            heads * (c.qk_nope_head_dim + c.v_head_dim),
            c.kv_lora_rank,
        ),
        f"{name}.self_attn.o_proj.weight": (d, heads * c.v_head_dim),
        f"{name}.post_attention_layernorm.weight": (d,),
        f"{name}.mlp.gate_proj.weight": (c.intermediate_size, d),
        f"{name}.mlp.up_proj.weight": (c.intermediate_size, d),
        f"{name}.mlp.down_proj.weight": (d, c.intermediate_size),
    }


def target_shapes(c: Config) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (c.vocab_size, c.hidden_size),
        "model.norm.weight": (c.hidden_size,),
    }
    for i in range(c.num_hidden_layers):
        shapes |= layer_shapes(f"model.layers.{i}", c)
    return shapes


def drafter_shapes(c: Config) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "fuse.weight": (c.hidden_size, len(Target.FEATURE_LAYERS) * c.hidden_size),
        "feature_norm.weight": (c.hidden_size,),
        "mask.weight": (c.hidden_size,),
        "norm.weight": (c.hidden_size,),
    }
    for i in range(c.num_hidden_layers):
        shapes |= layer_shapes(f"layers.{i}", c)
    return shapes


def unabsorbed(layer: Layer, rows: Tensor, keys: int) -> tuple[Tensor, Tensor]:
    """Heads' keys [B,H,keys,nope+64] and values [B,H,keys,v] of cache rows [B*keys,576]."""
    c = layer.config
    kv = (rows[..., : c.kv_lora_rank] @ layer.kv_b.T).reshape(
        -1, keys, c.num_attention_heads, c.qk_nope_head_dim + c.v_head_dim
    )
    nope, value = kv[..., : c.qk_nope_head_dim], kv[..., c.qk_nope_head_dim :]
    rope = rows[..., c.kv_lora_rank :].reshape(-1, keys, 1, c.qk_rope_head_dim).to(kv.dtype)
    key = torch.cat([nope, rope.expand(-1, -1, c.num_attention_heads, -1)], -1)
    return key.transpose(1, 2), value.transpose(1, 2)


def attention(layer: Layer, q: Tensor, k: Tensor, v: Tensor, **mask: Any) -> Tensor:
    """softmax(q k) v -> [B * queries, H, v]; values are padded to the keys' width for speed."""
    width = v.shape[-1]
    v = F.pad(v, (0, k.shape[-1] - width))
    out = F.scaled_dot_product_attention(q.to(k.dtype), k, v, scale=layer.config.sm_scale, **mask)
    return out.transpose(1, 2)[..., :width].flatten(0, 1)


def causal(length: int) -> Attend:
    """Sequences of `length`, one after the other in the rows."""

    def attend(_: int, layer: Layer, q_nope: Tensor, q_rope: Tensor, rows: Tensor) -> Tensor:
        k, v = unabsorbed(layer, rows, length)
        q = torch.cat([q_nope, q_rope.to(q_nope.dtype)], -1).unflatten(0, (-1, length))
        return attention(layer, q.transpose(1, 2), k, v, is_causal=True)

    return attend


def blocks(context: list[Tensor], length: int, anchors: Tensor) -> Attend:
    """Blocks at anchors [B,A] over contexts of `length`: each sees what is before, and itself."""
    batch, count = anchors.shape
    own = torch.arange(count * BLOCK, device=anchors.device) // BLOCK
    before = (
        torch.arange(length, device=anchors.device) < anchors.repeat_interleave(BLOCK, 1)[..., None]
    )
    same = (own[:, None] == own).expand(batch, -1, -1)
    mask = torch.cat([before, same], -1)[:, None]

    def attend(index: int, layer: Layer, q_nope: Tensor, q_rope: Tensor, rows: Tensor) -> Tensor:
        every = torch.cat(
            [context[index].unflatten(0, (batch, length)), rows.unflatten(0, (batch, -1))], 1
        )
        k, v = unabsorbed(layer, every.flatten(0, 1), every.shape[1])
        q = torch.cat([q_nope, q_rope.to(q_nope.dtype)], -1).unflatten(0, (batch, -1))
        return attention(layer, q.transpose(1, 2), k, v, attn_mask=mask)

    return attend


class Optimizer:
    """AdamW with warm-up and a linear decay to zero; the number of steps given or timed."""

    def __init__(
        self, weights: Weights, rate: float, steps: int, seconds: float, ops: TorchOps
    ) -> None:
        matrices = [w for w in weights.values() if w.ndim > 1]
        vectors = [w for w in weights.values() if w.ndim == 1]
        groups = [
            {"params": matrices, "weight_decay": 0.1},
            {"params": vectors, "weight_decay": 0.0},
        ]
        self.adam = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=True)
        self.weights = list(weights.values())
        self.rate, self.steps, self.seconds, self.ops = rate, steps, seconds, ops
        self.warmup = 200

    def run(self, loss_of: Callable[[], Tensor], report: Callable[[int, float], None]) -> None:
        """Descend `loss_of()`; report the loss now and then."""
        step, probe = 0, 40  # the first steps, of which the later half is timed
        started = time.perf_counter()
        while self.steps == 0 or step < self.steps:
            if self.steps == 0 and step == probe // 2:
                self.ops.wait()
                half = time.perf_counter()
            if self.steps == 0 and step == probe:
                self.ops.wait()
                now = time.perf_counter()
                left = self.seconds - (now - started)
                self.steps = probe + max(0, int(left / ((now - half) / (probe - probe // 2))))
            share = min(1.0, (step + 1) / self.warmup)
            if self.steps:
                share = min(share, (self.steps - step) / (0.8 * self.steps))
            for group in self.adam.param_groups:
                group["lr"] = self.rate * share
            loss = loss_of()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.weights, 1.0)
            self.adam.step()
            self.adam.zero_grad()
            step += 1
            if step % max(1, self.steps // 20 if self.steps else 10**9) == 0:
                report(step, loss.item())


def windows(ids: Tensor, batch: int, length: int, random: torch.Generator) -> Tensor:
    """Random pieces [batch, length] of the text."""
    starts = torch.randint(len(ids) - length, (batch,), generator=random, device=ids.device)
    return ids[starts[:, None] + torch.arange(length, device=ids.device)].long()


def next_token_loss(target: Target, tokens: Tensor) -> Tensor:
    """Mean over [B, T+1] tokens, each but the first predicted from those before it."""
    batch, length = tokens.shape[0], tokens.shape[1] - 1
    positions = torch.arange(length, device=tokens.device).repeat(batch)
    logits, _ = target(tokens[:, :-1].flatten(), positions, causal(length))
    return F.cross_entropy(logits.float(), tokens[:, 1:].flatten())


@torch.no_grad()
def write(
    target: Target, prompts: Tensor, lengths: Tensor, length: int, temperature: Tensor
) -> Tensor:
    """The target's continuations [B, length] of prompts [B, P], of which `lengths` are given.

    Plain decoding in the absorbed form over a dense cache.
    """
    batch, device, c = len(prompts), prompts.device, target.config
    width = c.kv_lora_rank + c.qk_rope_head_dim
    cache = torch.zeros(
        c.num_hidden_layers, batch, length, width, dtype=torch.float16, device=device
    )
    tokens = torch.zeros(batch, length, dtype=torch.int64, device=device)
    tokens[:, : prompts.shape[1]] = prompts

    for t in range(length - 1):

        def attend(
            i: int, layer: Layer, q_nope: Tensor, q_rope: Tensor, rows: Tensor, t: int = t
        ) -> Tensor:
            cache[i, :, t] = rows
            seen = cache[i, :, : t + 1]
            q = torch.cat([layer.absorb(q_nope), q_rope], -1).to(seen.dtype)
            scores = (q @ seen.transpose(1, 2)).float() * c.sm_scale
            latent = scores.softmax(-1).to(seen.dtype) @ seen[..., : c.kv_lora_rank]
            return layer.values(latent.float())

        positions = torch.full((batch,), t, device=device)
        logits, _ = target(tokens[:, t], positions, attend)
        logits = logits.float()
        noise = -torch.empty_like(logits).exponential_().clamp_(min=1e-20).log()
        chosen = (logits + temperature[:, None] * noise).argmax(-1)
        tokens[:, t + 1] = torch.where(t + 1 < lengths, tokens[:, t + 1], chosen)
    return tokens


def draft(target: Target, drafter: Drafter, tokens: Tensor, anchors: Tensor) -> Tensor:
    """Logits [B, A, BLOCK-1, V] of the blocks at anchors [B,A] of texts [B,T]."""
    batch, length = tokens.shape
    positions = torch.arange(length, device=tokens.device).repeat(batch)
    with torch.no_grad():
        _, features = target(tokens.flatten(), positions, causal(length))
    context = drafter.context(features, positions)
    places = anchors[..., None] + torch.arange(BLOCK, device=tokens.device)
    logits = drafter(
        tokens.gather(1, anchors).flatten(), places.flatten(), blocks(context, length, anchors)
    )
    return logits.unflatten(0, anchors.shape)


def following(tokens: Tensor, anchors: Tensor) -> Tensor:
    """The BLOCK - 1 tokens after each anchor: [B, A, BLOCK-1]."""
    places = anchors[..., None] + torch.arange(1, BLOCK, device=tokens.device)
    return tokens.gather(1, places.flatten(1)).reshape(places.shape)


@torch.no_grad()
def chain_tokens(logits: Tensor, truth: Tensor) -> tuple[float, list[float]]:
    """Mean tokens a pass of the top-1 chain, and each position's accuracy."""
    right = logits.argmax(-1) == truth
    accepted = right.long().cumprod(-1).sum(-1).float().mean().item()
    return 1 + accepted, [round(x, 4) for x in right.float().mean((0, 1)).tolist()]


def main() -> None:
    parser = argparse.ArgumentParser(description="train the tiny target and its drafter")
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch", type=int, default=64, help="target: sequences a step")
    parser.add_argument("--length", type=int, default=512, help="target: tokens a sequence")
    parser.add_argument("--steps", type=int, nargs=2, default=(0, 0), help="target, drafter")
    parser.add_argument(
        "--seconds", type=float, nargs=2, default=(100.0, 240.0), help="of the target, of it all"
    )
    parser.add_argument("--texts", type=int, default=65536, help="texts that the target writes")
    parser.add_argument("--texts-batch", type=int, default=8192, help="written at once")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    ops = TorchOps(args.device)
    random = torch.Generator(ops.device).manual_seed(args.seed)
    amp = torch.autocast(ops.device.type, torch.bfloat16)
    tokenizer = Tokenizer.load(args.data / "tokenizer.json")
    train, held = (
        torch.from_numpy(np.load(args.data / f"{split}.npy").astype(np.int16)).to(ops.device)
        for split in ("train", "heldout")
    )
    result: dict[str, Any] = {
        "data": json.loads((args.data / "data.json").read_text()),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if args.device == "cuda" else args.device,
        "seed": args.seed,
    }
    begun = time.perf_counter()

    def log(*words: object) -> None:
        print(f"{time.perf_counter() - begun:6.1f} s", *words, flush=True)

    def save(folder: Path, config: Config, weights: Weights, **more: object) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        config.save(folder / "config.json", **more)
        arrays = {name: w.detach().float().cpu().numpy() for name, w in weights.items()}
        safetensors.save(folder / "model.safetensors", arrays)
        (args.out / "losses.json").write_text(json.dumps(result, indent=2) + "\n")

    # 1. The target.
    config = Config(vocab_size=tokenizer.vocab_size)
    weights = new_weights(target_shapes(config), config.num_hidden_layers, ops)
    numbers = sum(w.numel() for w in weights.values())
    log(f"target: {numbers} weights")

    def target_loss() -> Tensor:
        with amp:
            tokens = windows(train, args.batch, args.length + 1, random)
            return next_token_loss(Target(config, weights, ops), tokens)

    def evaluation(ids: Tensor) -> float:
        fixed = torch.Generator(ops.device).manual_seed(1)
        with torch.no_grad(), amp:
            target = Target(config, weights, ops)
            parts = [
                next_token_loss(target, windows(ids, args.batch, args.length + 1, fixed))
                for _ in range(8)
            ]
        return round(torch.stack(parts).mean().item(), 4)

    curve: list[tuple[int, float, float]] = []

    def target_report(step: int, loss: float) -> None:
        curve.append((step, round(loss, 4), evaluation(held)))
        log("target step, train loss, held-out loss:", *curve[-1])

    optimizer = Optimizer(weights, 3e-3, args.steps[0], args.seconds[0], ops)
    optimizer.run(target_loss, target_report)
    result["target"] = {
        "weights": numbers,
        "steps": optimizer.steps,
        "batch": args.batch,
        "length": args.length,
        "train_loss": evaluation(train),
        "heldout_loss": evaluation(held),
        "curve": curve,
    }
    save(args.out / "target", config, weights, **config.hugging_face())

    # 2. Its own texts. From here on the target is what was saved: float16 weights.
    weights = {name: w.detach().half().float() for name, w in weights.items()}
    target = Target(config, weights, ops)
    length = 256

    def texts(ids: Tensor, count: int, greedy: float) -> Iterator[Tensor]:
        for start in range(0, count, args.texts_batch):
            size = min(args.texts_batch, count - start)
            given = torch.randint(16, 65, (size,), generator=random, device=ops.device)
            warm = torch.rand(size, generator=random, device=ops.device) >= greedy
            prompts = windows(ids, size, 64, random)
            with torch.autocast(ops.device.type, torch.float16, enabled=args.device == "cuda"):
                tokens = write(target, prompts, given, length, 0.8 * warm.float())
            yield tokens.short()

    written = torch.cat(list(texts(train, args.texts, 0.5)))
    probes = torch.cat(list(texts(held, max(1, args.texts // 64), 1.0))).long()
    log(f"the target wrote {written.numel()} tokens; from a held-out beginning:")
    for row in probes[:3].tolist():
        print("-" * 40, tokenizer.decode(row), sep="\n", flush=True)

    # 3. The drafter.
    small = drafting.CONFIG
    own = new_weights(drafter_shapes(small), small.num_hidden_layers, ops)
    numbers = sum(w.numel() for w in own.values())
    log(f"drafter: {numbers} weights")
    near = torch.exp(-torch.arange(BLOCK - 1, device=ops.device) / 7.0)
    anchors_each, texts_each = 16, 2 * args.batch

    def drafter_loss() -> Tensor:
        rows = torch.randint(len(written), (texts_each,), generator=random, device=ops.device)
        tokens = written[rows].long()
        anchors = torch.randint(
            8, length - BLOCK, (texts_each, anchors_each), generator=random, device=ops.device
        )
        with amp:
            logits = draft(target, Drafter(small, own, target), tokens, anchors)
            loss = F.cross_entropy(
                logits.flatten(0, 2).float(),
                following(tokens, anchors).flatten(),
                reduction="none",
            )
        return (loss.unflatten(0, (-1, BLOCK - 1)) * near).mean() / near.mean()

    def foresight() -> tuple[float, list[float]]:
        """Over the target's greedy continuations of held-out beginnings."""
        fixed = torch.Generator(ops.device).manual_seed(1)
        tokens = probes[: 4 * texts_each]
        anchors = torch.randint(
            64, length - BLOCK, (len(tokens), anchors_each), generator=fixed, device=ops.device
        )
        with torch.no_grad(), amp:
            logits = draft(target, Drafter(small, own, target), tokens, anchors)
        return chain_tokens(logits, following(tokens, anchors))

    track: list[tuple[int, float, float]] = []

    def drafter_report(step: int, loss: float) -> None:
        track.append((step, round(loss, 4), round(foresight()[0], 3)))
        log("drafter step, loss, held-out chain tokens a pass:", *track[-1])

    left = args.seconds[1] - (time.perf_counter() - begun)
    optimizer = Optimizer(own, 3e-3, args.steps[1], left, ops)
    optimizer.run(drafter_loss, drafter_report)
    tokens_a_pass, accuracy = foresight()
    result["drafter"] = {
        "weights": numbers,
        "steps": optimizer.steps,
        "batch": texts_each,
        "anchors": anchors_each,
        "texts": len(written),
        "loss": track[-1][1] if track else None,
        "heldout_chain_tokens_a_pass": round(tokens_a_pass, 4),
        "heldout_accuracy_by_position": accuracy,
        "curve": track,
    }
    save(args.out / "drafter", small, own)
    log("done", json.dumps({k: result[k] for k in ("device", "torch")}))


if __name__ == "__main__":
    main()
