"""The examples do what they say: the same text however it is drafted, on every device present.

KDTREE_TEST_FULL=1 runs them at full size. transformers' DeepseekV3ForCausalLM decodes with our ops
as well, where transformers is installed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import kdtree
import numpy as np
import pytest
from support import missing_backends

EXAMPLES = Path(__file__).parents[1] / "examples"
FULL = os.environ.get("KDTREE_TEST_FULL") == "1"

devices = pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=pytest.mark.skipif(
                "torch-cuda" in missing_backends(), reason=missing_backends().get("torch-cuda", "")
            ),
        ),
    ],
)


def run(script: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / script), *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=3600 if FULL else 300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@devices
def test_what_evaluate_shows(tmp_path, device):
    prompts, tokens, runs = (200, 128, 20_000) if FULL else (8, 32, 256)
    run(
        "evaluate.py",
        *("--device", device, "--prompts", str(prompts), "--tokens", str(tokens)),
        *("--sampling", str(runs), "--json", str(tmp_path / "result.json")),
    )
    result = json.loads((tmp_path / "result.json").read_text())

    # The same text, but for near-ties of the target, which are rare.
    methods = result["greedy"]
    assert list(methods) == ["plain", "chain", "tree 8", "tree 16", "tree 32", "tree 64"]
    for m in methods.values():
        assert m["wrong"] == 0
        assert m["same"] + m["near_ties"] == prompts
        assert m["near_ties"] <= 0.05 * prompts
    # Two logits may both move, so that the near-ties are of evaluate.TIE, 0.01.
    assert result["rounding"] < 0.005
    # 8 requests at once and each alone.
    assert result["alone"]["wrong"] == 0
    assert result["alone"]["same"] >= 7
    # Larger trees accept no less.
    gains = [m["tokens_a_pass"] for m in methods.values()]
    assert gains[0] == 1
    assert gains[-1] >= (1.2 if FULL else 1) * gains[1]
    if FULL:
        assert gains[2:] == sorted(gains[2:])
    # Sampling: the seeds are fixed, so these numbers are too.
    sampling = result["sampling"]
    assert sampling["different_outcomes"] > 50
    assert sampling["p_three_tokens"] > 0.001
    assert sampling["p_first_token"] > 0.001
    assert sampling["same_seeds_differ"] <= 2


@devices
def test_decode(tmp_path, device):
    tree, plot = tmp_path / "tree.svg", tmp_path / "plot.svg"
    text = run(
        "decode.py",
        *("def read_", "class Stack", "--tokens", "40", "--device", device),
        *("--tree", str(tree), "--plot", str(plot)),
    )
    assert "\x1b" not in text  # colours are for terminals
    assert "def read_" in text
    assert "class Stack" in text
    table = [line for line in text.splitlines() if line.endswith(("yes", "no"))]
    assert [line.split()[-1] for line in table] == ["yes"] * 6
    assert "share of" in text
    assert tree.read_text().startswith("<svg")
    assert plot.read_text().startswith("<svg")


def test_decode_samples(tmp_path):
    options = ("x = ", "--tokens", "24", "--temperature", "0.8", "--show", "all", "--seed")
    first, again, other = (run("decode.py", *options, seed) for seed in ("7", "7", "8"))

    def texts(printed: str) -> list[str]:
        return printed.split("tokens/pass")[0].split("── ")[1:]

    assert texts(first) == texts(again)
    assert texts(first) != texts(other)


@pytest.mark.parametrize(
    "arguments", [("x", "--tokens", "0"), ("x", "--temperature", "-1"), ("x" * 4000,)]
)
def test_decode_refuses(arguments):
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "decode.py"), *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 2
    assert "expected" in done.stderr


# ---- transformers

# Asked of the metadata: where it is installed, an import that fails is a failure, not a skip.
TRANSFORMERS = version("transformers") if find_spec("transformers") else None
PAGE, QLEN = 16, 25


class Attention:
    """What DeepseekV3Attention.forward does, with the cache and the attention of a round."""

    def __init__(self, model: Any, batch: int, capacity: int) -> None:
        import torch

        config, each = model.config, -(-capacity // PAGE)
        shape = (config.num_hidden_layers, batch * each, PAGE, 576)
        self.torch = torch
        self.cache = torch.zeros(shape, dtype=torch.float16, device=model.device)
        pages = torch.arange(batch * each, dtype=torch.int32, device=model.device)
        self.table = pages.flip(0).reshape(batch, each).contiguous()
        self.prefix_lens = torch.zeros(batch, dtype=torch.int32, device=model.device)
        self.visibility: Any = None
        self.num_nodes: Any = None
        for layer in model.model.layers:
            layer.self_attn.forward = partial(self.forward, layer.self_attn)

    def forward(
        self, m: Any, hidden_states: Any, position_embeddings: Any, *_: Any, **__: Any
    ) -> tuple[Any, None]:
        from transformers.models.deepseek_v3 import modeling_deepseek_v3 as modeling

        torch = self.torch
        batch, qlen, _ = hidden_states.shape
        nope, value = m.qk_nope_head_dim, m.v_head_dim
        q = m.q_b_proj(m.q_a_layernorm(m.q_a_proj(hidden_states)))
        q = q.view(batch, qlen, m.num_heads, m.qk_head_dim)
        kv = m.kv_a_proj_with_mqa(hidden_states)
        latent = m.kv_a_layernorm(kv[..., : m.kv_lora_rank])
        q_rope, k_rope = modeling.apply_rotary_pos_emb_interleave(
            q[..., nope:], kv[..., None, m.kv_lora_rank :], *position_embeddings, unsqueeze_dim=2
        )
        # The rows of the tree's slots, at prefix + slot.
        positions = self.prefix_lens[:, None].long() + torch.arange(qlen, device=q.device)
        rows = self.table.gather(1, positions // PAGE).long() * PAGE + positions % PAGE
        cache = self.cache[m.layer_idx]
        cache.view(-1, 576)[rows] = torch.cat([latent, k_rope[:, :, 0]], -1).half()

        per_head = m.kv_b_proj.weight.view(m.num_heads, nope + value, m.kv_lora_rank)
        absorbed = torch.einsum("bqhn,hnc->bqhc", q[..., :nope], per_head[:, :nope])
        out = kdtree.verify_attn(
            absorbed.half(),
            cache,
            self.table,
            self.prefix_lens,
            self.visibility,
            num_nodes=self.num_nodes,
            sm_scale=m.scaling,
            q_rope=q_rope.half().contiguous(),
        )
        out = torch.einsum("bqhc,hvc->bqhv", out.float(), per_head[:, nope:])
        return m.o_proj(out.reshape(batch, qlen, -1)), None


@devices
@pytest.mark.skipif(
    TRANSFORMERS is None or int(TRANSFORMERS.split(".")[0]) < 5,
    reason=f"needs transformers 5, installed: {TRANSFORMERS}",
)
def test_transformers_deepseek_v3(device):
    """Another author's model over our ops: the text of its own greedy generate()."""
    import torch
    import transformers

    torch.manual_seed(12)  # the best two logits of these texts are never closer than 0.009
    config = transformers.DeepseekV3Config(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=32,
        num_hidden_layers=3,
        first_k_dense_replace=1,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=48,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        qk_nope_head_dim=32,
        v_head_dim=32,
        initializer_range=0.15,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    model = transformers.DeepseekV3ForCausalLM(config).to(device).eval()
    batch, new = 3, 40
    lengths = [5, 23, 12]
    prompts = [torch.randint(96, (n,)).to(device) for n in lengths]
    with torch.no_grad():
        whole = [
            model.generate(p[None], max_new_tokens=new + 8, do_sample=False, use_cache=True)[0]
            for p in prompts
        ]
    capacity = max(lengths) + new + 2 * QLEN
    ours = Attention(model, batch, capacity)

    def logits(tokens: Any, positions: Any) -> Any:
        with torch.no_grad():
            return model(tokens, position_ids=positions, use_cache=False).logits

    # The prompts but their last token, which is the first root.
    width = max(lengths) - 1
    tokens = torch.zeros(batch, width, dtype=torch.int64, device=device)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt) - 1] = prompt[:-1]
    ours.num_nodes = torch.tensor([n - 1 for n in lengths], dtype=torch.int32, device=device)
    logits(tokens, torch.arange(width, device=device).expand(batch, -1))
    ours.prefix_lens += ours.num_nodes

    texts = [p.tolist() for p in prompts]
    rng = torch.Generator().manual_seed(1)
    rounds, accepted = 0, 0
    while any(len(t) < n + new for t, n in zip(texts, lengths, strict=True)):
        # A drafter that knows what comes, but not for sure.
        draft = torch.randn(batch, 7, 96, generator=rng).to(device)
        for b, text in enumerate(texts):
            ahead = whole[b][len(text) : len(text) + 7]
            draft[b, torch.arange(len(ahead)), ahead] += 2.5
        done = [len(t) >= n + new for t, n in zip(texts, lengths, strict=True)]
        roots = [-1 if end else t[-1] for end, t in zip(done, texts, strict=True)]
        top = kdtree.draft_topk(draft, 8)
        tree = kdtree.build_ddtree(
            top.logprobs,
            top.ids,
            torch.tensor(roots, device=device),
            ours.prefix_lens,
            budget=QLEN - 1,
        )
        ours.visibility, ours.num_nodes = tree.visibility, tree.num_nodes
        accept = kdtree.tree_accept_logits(tree, logits(tree.draft_tokens, tree.positions))
        kdtree.commit_kv(ours.cache, ours.table, ours.prefix_lens, accept)
        for b, text in enumerate(texts):
            n = int(accept.accept_token_num[b])
            if not done[b]:
                text += accept.accept_tokens[b, : n + 1].tolist()
                ours.prefix_lens[b] += n + 1
                accepted += n
                rounds += 1
    assert accepted > rounds  # trees were of use
    for text, want, n in zip(texts, whole, lengths, strict=True):
        np.testing.assert_array_equal(text[: n + new], want[: n + new].tolist())
