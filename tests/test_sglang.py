"""kdtree in a real SGLang: its plugin loader, its arguments, its pools, its kernels as oracles.

Needs SGLang, which pins nearly everything: scripts/sglang_bed.py makes an environment for it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import logging
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any
from unittest import mock

import kdtree
import numpy as np
import pytest
from support import FULL, random_parents, relative_error

if importlib.util.find_spec("sglang") is None:
    pytest.skip("SGLang is not installed: see scripts/sglang_bed.py", allow_module_level=True)

import torch
from kdtree import interop, reference
from kdtree import sglang as plugin

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HEADS, SCALE = 8, 192**-0.5
TOPK, STEPS, QLEN = 4, 3, 16

FLAGS = [
    *("--load-format", "dummy", "--skip-tokenizer-init", "--device", DEVICE),
    *("--attention-backend", "triton", "--decode-attention-backend", "kdtree_mla"),
    *("--speculative-attention-mode", "decode"),
    *("--speculative-draft-attention-backend", "triton", "--speculative-algorithm", "EAGLE"),
    *("--speculative-num-steps", str(STEPS), "--speculative-eagle-topk", str(TOPK)),
    *("--speculative-num-draft-tokens", str(QLEN)),
]

MODEL = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "kv_lora_rank": 512,
    "q_lora_rank": 128,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
    "rope_theta": 10000,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "bfloat16",
    "num_nextn_predict_layers": 1,
}


@pytest.fixture(scope="module")
def sglang(tmp_path_factory):
    """SGLang after its own load_plugins(), with server arguments of a small model published."""
    from sglang.srt import plugins, runtime_context
    from sglang.srt.layers.attention import attention_registry
    from sglang.srt.server_args import prepare_server_args

    plugins.load_plugins()
    model = tmp_path_factory.mktemp("model")
    (model / "config.json").write_text(json.dumps(MODEL))
    names = ["--model-path", str(model), "--speculative-draft-model-path", str(model)]
    arguments = prepare_server_args([*names, *FLAGS])
    runtime_context.publish(arguments, role="scheduler")
    return SimpleNamespace(
        plugins=plugins,
        arguments=arguments,
        context=runtime_context,
        backends=attention_registry.ATTENTION_BACKENDS,
    )


# ---- loading


def test_the_plugin_loads_and_arguments_accept_the_name(sglang):
    assert plugin.BACKEND in sglang.backends
    assert sglang.arguments.decode_attention_backend == plugin.BACKEND
    assert sglang.context.attention_backends() == ("triton", plugin.BACKEND)


def test_the_model_takes_the_absorbed_path_and_hands_over_two_parts(sglang):
    from sglang.srt.models.deepseek_common import attention_backend_handler as handlers
    from sglang.srt.models.deepseek_common.utils import FORWARD_ABSORB_CORE_ATTENTION_BACKENDS

    handler = handlers.AttentionBackendRegistry.get_handler(plugin.BACKEND)
    assert handler(SimpleNamespace(), None) == handlers.AttnForwardMethod.MLA
    assert FORWARD_ABSORB_CORE_ATTENTION_BACKENDS.count(plugin.BACKEND) == 1
    assert not any(plugin.load().values())  # again, as in every process of a server
    assert FORWARD_ABSORB_CORE_ATTENTION_BACKENDS.count(plugin.BACKEND) == 1


def test_a_changed_signature_makes_it_decline(sglang, monkeypatch, caplog):
    from sglang.srt.arg_groups import choices
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

    monkeypatch.delitem(sglang.backends, plugin.BACKEND)
    monkeypatch.setattr(choices, "ATTENTION_BACKEND_CHOICES", ["triton"])
    monkeypatch.setattr(MLATokenToKVPool, "set_kv_buffer", lambda self, layer, rows: None)
    monkeypatch.setattr(sglang.plugins, "_plugins_loaded", False)
    with caplog.at_level(logging.WARNING, logger="kdtree.sglang"):
        sglang.plugins.load_plugins()  # SGLang goes on
    assert plugin.BACKEND not in sglang.backends
    assert choices.ATTENTION_BACKEND_CHOICES == ["triton"]
    assert "triton" in sglang.backends
    message, other = [r.message for r in caplog.records if r.name == "kdtree.sglang"]
    assert "kdtree_mla stays out of SGLang" in message
    assert "DDTREE stays out of SGLang" in other  # it verifies there
    assert "set_kv_buffer takes (self, layer, rows), expected (self, layer, loc_info," in message


@pytest.mark.parametrize("name", ["verify_mask", "init_forward_metadata_in_graph"])
def test_a_missing_name_makes_it_decline(sglang, monkeypatch, name):
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

    monkeypatch.delattr(AttentionBackend, name)
    (reason,) = plugin.load()[plugin.BACKEND]
    assert name in reason


def test_the_command_says_what_is_hooked():
    def run(**environ: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "kdtree", "sglang"],
            env={**os.environ, **environ},
            capture_output=True,
            text=True,
            timeout=300,
        )

    done = run()
    assert done.returncode == 0, done.stderr
    assert f"attention backend {plugin.BACKEND}: hooked" in done.stdout
    assert f"speculative algorithm {plugin.ALGORITHM}: hooked" in done.stdout
    assert plugin.FLAGS in done.stdout
    assert plugin.ALGORITHM_FLAGS in done.stdout
    done = run(SGLANG_PLUGINS="other")
    assert done.returncode == 1
    assert "SGLANG_PLUGINS=other leaves out the plugin kdtree" in done.stdout


# ---- trees of EAGLE, as its draft stage hands them over


def eagle_trees(rng: np.random.Generator, batch: int, topk: int, steps: int, qlen: int) -> Any:
    """(parent_list, selected_index, parents): candidates of a beam of `topk`, best `qlen` - 1.

    Candidate numbers count through the steps; row r of the parent list is the candidate whose
    children are numbers r * topk and on, and row 0 the root.
    """
    lists = np.zeros((batch, topk * (steps - 1) + 1), np.int64)
    chosen = np.zeros((batch, qlen - 1), np.int64)
    parents = np.full((batch, qlen), -1, np.int32)
    for b in range(batch):
        scores = -rng.exponential(size=topk)
        beam, rows, start = np.arange(topk), [-1], 0
        for _ in range(steps - 1):
            beam = start + np.argsort(-scores[start:], kind="stable")[:topk]
            rows += list(beam)
            start = len(scores)
            children = scores[beam][:, None] - rng.exponential(size=(topk, topk))
            scores = np.concatenate([scores, children.ravel()])
        lists[b] = rows
        chosen[b] = np.sort(np.argsort(-scores, kind="stable")[: qlen - 1])
        place = {int(candidate): slot + 1 for slot, candidate in enumerate(chosen[b])}
        for candidate, slot in place.items():
            row = candidate // topk
            parents[b, slot] = 0 if row == 0 else place[int(lists[b, row])]
    return lists, chosen, parents


needs_kernels = pytest.mark.skipif(
    DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1",
    reason="SGLang's Triton kernels need a GPU or TRITON_INTERPRET=1",
)


def sglang_build(lists, chosen, prefix, topk, steps, qlen, mask, mode) -> tuple[Any, ...]:
    """SGLang's (positions, retrieve_index, next_token, next_sibling); the mask is filled."""
    from sglang.kernels.ops.speculative.spec_tree import sgl_build_tree_kernel_triton

    batch = len(prefix)
    positions = torch.zeros(batch * qlen, dtype=torch.int64, device=DEVICE)
    links = torch.full((3, batch, qlen), -1, dtype=torch.int64, device=DEVICE)
    sgl_build_tree_kernel_triton(
        *(torch.from_numpy(x).to(DEVICE) for x in (lists, chosen)),
        *(prefix, mask, positions, *links, topk, steps, qlen, mode),
    )
    return positions, *links


# 10,000 trees in all, of these (topk, steps, Q).
SHAPES = [(2, 2, 4), (3, 2, 6), (2, 4, 8), (4, 3, 8), (4, 2, 12), (8, 2, 16)]


@needs_kernels
@pytest.mark.parametrize(("topk", "steps", "qlen"), SHAPES)
def test_links_and_walk_of_random_trees_are_sglangs(sglang, rng, topk, steps, qlen):
    from sglang.kernels.ops.speculative.spec_tree import TreeMaskMode, verify_tree_greedy_triton

    total = {4: 3000, 6: 2500, 8: 1500, 12: 800, 16: 700}[qlen] if FULL else 20
    batch = min(total, 100)
    for _ in range(total // batch):
        lists, chosen, parents = eagle_trees(rng, batch, topk, steps, qlen)
        prefix = torch.from_numpy(rng.integers(0, 50, batch)).to(DEVICE)
        tokens = torch.from_numpy(rng.integers(0, 3, (batch, qlen))).to(DEVICE)
        num_nodes = torch.full((batch,), qlen, dtype=torch.int32, device=DEVICE)
        tree = kdtree.tree_links(
            torch.from_numpy(parents).to(DEVICE),
            num_nodes,
            prefix_lens=prefix.int(),
            draft_tokens=tokens,
        )
        masks = {
            TreeMaskMode.QLEN_ONLY: torch.ones(batch * qlen * qlen, dtype=torch.bool),
            TreeMaskMode.FULL_MASK: torch.ones(qlen * int((prefix + qlen).sum()), dtype=torch.bool),
        }
        for mode, mask in masks.items():
            mask = mask.to(DEVICE)
            built = sglang_build(lists, chosen, prefix, topk, steps, qlen, mask, mode)
            assert torch.equal(built[0].view(batch, qlen), tree.positions)
            for got, want in zip(built[1:], interop.sglang_retrieve(tree), strict=True):
                assert torch.equal(got, want)
            layout = "qlen" if mode == TreeMaskMode.QLEN_ONLY else "full"
            seen = interop.read_mask(mask, layout, qlen, prefix_lens=prefix)
            assert torch.equal(interop.visibility_of(seen), tree.visibility)
            assert torch.equal(interop.parents_of(seen), tree.parents)
        predict = torch.from_numpy(rng.integers(0, 3, (batch, qlen))).to(DEVICE)
        theirs = (
            torch.zeros(batch * qlen, dtype=torch.int32, device=DEVICE),
            torch.full((batch, steps + 1), -1, dtype=torch.int32, device=DEVICE),
            torch.zeros(batch, dtype=torch.int32, device=DEVICE),
        )
        verify_tree_greedy_triton(*theirs, tokens, *interop.sglang_retrieve(tree), predict)
        ours = interop.sglang_accept(tree, predict, depth=steps + 1)
        for got, want in zip(ours[:3], theirs, strict=True):
            assert torch.equal(got, want)
        assert int(ours[2].max()) > 0


@needs_kernels
@pytest.mark.parametrize(("depth", "k", "qlen"), [(2, 4, 5), (5, 4, 16), (7, 8, 33), (15, 16, 65)])
def test_best_first_trees_are_sglangs(sglang, rng, monkeypatch, depth, k, qlen):
    """build_ddtree is its UNO builder, where no scores tie, and links are those of that tree."""
    if importlib.util.find_spec("flashinfer") is None:  # whose top_k the module imports
        monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace(top_k=None))
    uno = importlib.import_module("sglang.kernels.ops.speculative.uno_tree")
    from sglang.kernels.ops.speculative.spec_tree import TreeMaskMode

    batch, width = 500 if FULL else 30, k * (depth - 1) + 1
    # Multiples of 2^-12, whose sums are exact in the builder's float32.
    grid = np.cumsum(rng.integers(1, 6000, (batch, depth, k)), -1)
    logprobs = torch.from_numpy((grid / -4096).astype(np.float32)).to(DEVICE)
    ids = torch.from_numpy(rng.integers(0, 1000, (batch, depth, k))).to(DEVICE)
    prefix = torch.from_numpy(rng.integers(0, 50, batch)).to(DEVICE)
    roots = torch.full((batch,), 7, device=DEVICE)
    tree = kdtree.build_ddtree(logprobs, ids, roots, prefix.int(), budget=qlen - 1)

    new = {"dtype": torch.int64, "device": DEVICE}
    tokens, edges = torch.zeros((2, batch, qlen - 1), **new)
    lists = torch.zeros((batch, width), **new)
    search = torch.zeros((batch, qlen), dtype=torch.int32, device=DEVICE)
    uno._build_tree_kernel[(batch,)](
        *(ids, logprobs, tokens, edges, lists, search, search.float()),
        *(*ids.stride(), *logprobs.stride(), width),
        NUM_DEPTHS=depth, K=k, Q=qlen, BLOCK_CANDIDATES=1 << (qlen * k - 1).bit_length(),
    )  # fmt: skip
    # Those without a tie, up to the node that just does not belong any more.
    more = reference.build_ddtree(
        *(logprobs.cpu().numpy(), ids.cpu().numpy(), roots.cpu().numpy()),
        prefix.int().cpu().numpy(),
        budget=min(qlen, kdtree.MAX_QLEN - 1),
    )
    apart = torch.from_numpy((np.diff(more.scores[:, 1:]) < 0).all(1)).to(DEVICE)
    assert apart.float().mean() > 0.8
    assert torch.equal(tokens[apart], tree.draft_tokens[apart, 1:])
    assert torch.equal((edges // k)[apart], tree.parents[apart, 1:].long())

    mask = torch.ones(batch * qlen * qlen, dtype=torch.bool, device=DEVICE)
    built = sglang_build(
        *(x.cpu().numpy() for x in (lists, edges)),
        *(prefix, k, depth, qlen, mask, TreeMaskMode.QLEN_ONLY),
    )
    assert torch.equal(built[0].view(batch, qlen)[apart], tree.positions[apart])
    for got, want in zip(built[1:], interop.sglang_retrieve(tree), strict=True):
        assert torch.equal(got[apart], want[apart])


# ---- attention, on SGLang's own pools


class Setting:
    """Pools and a layer of SGLang's, requests in them, and the backend that SGLang builds for its
    arguments: a hybrid, in which torch-native prefills, and kdtree_mla decodes and verifies."""

    def __init__(
        self,
        sglang: Any,
        page_size: int,
        dtype: torch.dtype = torch.bfloat16,
        algorithm: Any = None,
        *,
        tokens: int = 4096,
        context: int = 200,
        heads: int = HEADS,
    ) -> None:
        from sglang.srt.configs.model_config import ModelConfig
        from sglang.srt.layers.radix_attention import RadixAttention
        from sglang.srt.mem_cache.kv_index_translator import KVIndexTranslator
        from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool, ReqToTokenPool
        from sglang.srt.model_executor.model_runner_components import attention_backend_setup
        from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

        self.page_size = page_size
        self.requests = ReqToTokenPool(
            size=80, max_context_len=context, device=DEVICE, enable_memory_saver=False
        )
        self.pool = MLATokenToKVPool(
            size=tokens,
            page_size=page_size,
            dtype=dtype,
            kv_lora_rank=512,
            qk_rope_head_dim=64,
            layer_num=2,
            device=DEVICE,
            enable_memory_saver=False,
        )
        translator = KVIndexTranslator(
            req_to_token=self.requests.req_to_token,
            token_to_kv_pool_allocator=None,
            token_to_kv_pool=self.pool,
            page_size=page_size,
            device=DEVICE,
        )
        self.runner = SimpleNamespace(
            device=DEVICE,
            page_size=page_size,
            req_to_token_pool=self.requests,
            token_to_kv_pool=self.pool,
            kv_index_translator=translator,
            model_config=ModelConfig.from_server_args(sglang.arguments),
            spec_algorithm=algorithm or SpeculativeAlgorithm.from_string("EAGLE"),
            use_mla_backend=True,
            is_draft_worker=False,
            draft_attention_backend=None,
            kv_cache_dtype=dtype,
            # what SGLang's Triton backend reads beside
            gpu_id=0,
            token_to_kv_pool_allocator=None,
            sliding_window_size=None,
            decode_num_tokens_per_req=lambda: (
                sglang.context.get_spec().speculative_num_draft_tokens
            ),
        )
        with sglang.context.get_exec().kernel.override(attention_backend="torch_native"):
            self.hybrid = attention_backend_setup.get_attention_backend(model_runner=self.runner)
        self.native, self.ours = self.hybrid.prefill_backend, self.hybrid.decode_backend
        self.layer = RadixAttention(heads, 576, SCALE, 1, layer_id=1, v_head_dim=512)

    def fill(self, rng: np.random.Generator, prefix: np.ndarray, extra: int) -> None:
        """Requests 1, 2, ... with their pages, and keys for what is before the root."""
        page = self.page_size
        needed = -(-(prefix + extra) // page)
        pages = 1 + rng.permutation(self.pool.size // page)  # page 0 takes the padding's writes
        self.table = self.requests.req_to_token
        self.table.zero_()
        start = 0
        for b, count in enumerate(needed):
            own = pages[start : start + count]
            start += count
            rows = (own[:, None] * page + np.arange(page)).ravel()
            self.table[b + 1, : len(rows)] = torch.from_numpy(rows).int()
        noise = torch.randn(self.pool.kv_buffer[1].shape).to(self.pool.dtype)
        self.pool.kv_buffer[1].copy_(noise.view(self.pool.store_dtype))

    def batch(self, mode: Any, rows: Any, lens: Any, out: Any, spec: Any = None) -> Any:
        from sglang.srt.model_executor.forward_batch_info import ForwardBatch

        return ForwardBatch(
            forward_mode=mode,
            batch_size=len(rows),
            input_ids=torch.zeros(len(out), dtype=torch.int64, device=DEVICE),
            req_pool_indices=rows,
            seq_lens=lens,
            out_cache_loc=out,
            seq_lens_sum=int(lens.sum()),
            spec_info=spec,
        )

    def run(self, backend: Any, batch: Any, q: Any, k: Any = None, **parts: Any) -> torch.Tensor:
        v = None if k is None else k[..., :512]
        return backend.forward(q, k, v, self.layer, batch, save_kv_cache=k is not None, **parts)


def randn(rng: np.random.Generator, *shape: int) -> torch.Tensor:
    return torch.from_numpy(rng.standard_normal(shape, np.float32)).bfloat16().to(DEVICE)


def close(got: torch.Tensor, want: torch.Tensor) -> bool:
    return relative_error(got.float().cpu().numpy(), want.float().cpu().numpy()) < 1e-2


def mode(name: str) -> Any:
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    return getattr(ForwardMode, name)


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_decoding_equals_torch_native(sglang, rng, page_size):
    s = Setting(sglang, page_size)
    assert type(s.hybrid).__name__ == "HybridAttnBackend"
    assert type(s.native).__name__ == "TorchNativeAttnBackend"
    lens = np.array([1, 2, 17, 64, 65, 190])
    s.fill(rng, lens, 0)
    rows = torch.arange(1, 7, device=DEVICE)
    out = s.table[rows, torch.from_numpy(lens - 1)].long()
    batch = s.batch(mode("DECODE"), rows, torch.from_numpy(lens).to(DEVICE), out)
    q, k = randn(rng, 6, HEADS * 576), randn(rng, 6, 1, 576)
    s.hybrid.init_forward_metadata(batch)
    got = s.run(s.hybrid, batch, q, k)
    assert torch.equal(s.pool.kv_buffer[1][out], k)  # it stored the new keys
    s.native.init_forward_metadata(batch)
    assert close(got, s.run(s.native, batch, q))


def verification(s: Setting, rng: np.random.Generator, prefix: np.ndarray) -> Any:
    """A batch of EAGLE trees to verify, whose mask is in the backend's buffer, as words."""
    from sglang.kernels.ops.speculative.spec_tree import TreeMaskMode
    from sglang.srt.speculative.eagle_info import EagleVerifyInput

    count = len(prefix)
    lists, chosen, parents = eagle_trees(rng, count, TOPK, STEPS, QLEN)
    lens = torch.from_numpy(prefix).to(DEVICE)
    held = s.hybrid.verify_mask
    assert held.mode == TreeMaskMode.QLEN_ONLY
    assert held.fits(count)
    held.buffer.fill_(True)
    positions, *links = sglang_build(lists, chosen, lens, TOPK, STEPS, QLEN, held.buffer, held.mode)
    spec = EagleVerifyInput(
        draft_token=torch.zeros(count * QLEN, dtype=torch.int64, device=DEVICE),
        custom_mask=held.buffer,
        positions=positions,
        retrieve_index=links[0],
        retrieve_next_token=links[1],
        retrieve_next_sibling=links[2],
        retrieve_cum_len=None,
        spec_steps=STEPS,
        topk=TOPK,
        draft_token_num=QLEN,
        capture_hidden_mode=None,
        seq_lens_sum=None,
        seq_lens_cpu=None,
    )
    rows = torch.arange(1, count + 1, device=DEVICE)
    slots = torch.from_numpy(prefix[:, None] + np.arange(QLEN)).to(DEVICE)
    out = s.table[rows[:, None], slots].long().flatten()
    return s.batch(mode("TARGET_VERIFY"), rows, lens, out, spec), parents


def path_by_path(s: Setting, batch: Any, parents: np.ndarray, q: torch.Tensor) -> torch.Tensor:
    """Torch-native attention has no tree mask: each slot decodes as a request of its own, whose
    tokens are the prefix and the slot's ancestors."""
    outs = []
    scratch = 70  # rows of req_to_token that hold no request
    for b in range(len(parents)):
        prefix = int(batch.seq_lens[b])
        own = s.table[int(batch.req_pool_indices[b])].clone()
        for slot in range(QLEN):
            path = [slot]
            while path[0]:
                path.insert(0, int(parents[b, path[0]]))
            s.table[scratch, :prefix] = own[:prefix]
            s.table[scratch, prefix : prefix + len(path)] = own[prefix + torch.tensor(path)]
            lens = torch.tensor([prefix + len(path)], device=DEVICE)
            rows = torch.tensor([scratch], device=DEVICE)
            one = s.batch(mode("DECODE"), rows, lens, rows)
            s.native.init_forward_metadata(one)
            at = b * QLEN + slot
            outs.append(s.run(s.native, one, q[at : at + 1]))
    return torch.cat(outs)


@needs_kernels
@pytest.mark.parametrize("page_size", [1, 16])
def test_verification_of_trees_equals_torch_native(sglang, rng, page_size):
    s = Setting(sglang, page_size)
    prefix = np.array([1, 40, 129])
    s.fill(rng, prefix, QLEN)
    batch, parents = verification(s, rng, prefix)
    q, k = randn(rng, 3 * QLEN, HEADS * 576), randn(rng, 3 * QLEN, 1, 576)
    s.hybrid.init_forward_metadata(batch)
    got = s.run(s.hybrid, batch, q, k)
    want = path_by_path(s, batch, parents, q)
    assert close(got, want)
    # The two parts apart, as the model hands them over: the same bits.
    whole = q.view(-1, HEADS, 576)
    nope = whole[..., :512].transpose(0, 1).contiguous().transpose(0, 1)
    again = s.run(s.hybrid, batch, nope, q_rope=whole[..., 512:])
    assert torch.equal(again, got)
    # And the keys too, where SGLang's kernel stores them.
    s.pool.kv_buffer[1][batch.out_cache_loc] = 0
    parts = {"q_rope": whole[..., 512:], "k_rope": k[..., 512:]}
    assert torch.equal(s.run(s.hybrid, batch, nope, k[..., :512], **parts), got)
    # The tree is not a chain: the mask mattered.
    s.ours.forward_metadata.words = None
    assert not close(s.run(s.hybrid, batch, q), want)


def microseconds(call: Any) -> float:
    """Of the device, with a cold L2 and the host ahead."""
    flush = torch.empty(1 << 28, dtype=torch.uint8, device=DEVICE)
    times = []
    for _ in range(20):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush.fill_(1)
        torch.cuda._sleep(1_000_000)
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(1000 * start.elapsed_time(end))
    return float(np.median(times))


@needs_kernels
@pytest.mark.parametrize("heads", [8, 16])
@pytest.mark.parametrize("count", [1, 8, 32] if DEVICE == "cuda" else [2])
def test_verification_equals_sglangs_triton_backend(sglang, rng, capsys, count, heads):
    """Trees of 64 nodes after 8192 tokens where there is a GPU, and then ten times faster."""
    from sglang.srt.speculative.dflash_info import DFlashVerifyInput

    cuda = DEVICE == "cuda"
    prefix, qlen = (8192, 65) if cuda else (40, 9)
    # Triton's interpreter has no bfloat16 products.
    dtype = torch.bfloat16 if cuda else torch.float16
    room = -(-(prefix + qlen) // 64) * 64
    with sglang.context.get_spec().override(speculative_num_draft_tokens=qlen):
        s = Setting(sglang, 64, dtype, tokens=count * room, context=room + 2 * qlen, heads=heads)
        triton = sglang.backends["triton"](s.runner)
    s.fill(rng, np.full(count, prefix), qlen)
    lens = torch.full((count,), prefix, device=DEVICE)
    tree = kdtree.tree_links(
        torch.from_numpy(random_parents(rng, count, qlen)).to(DEVICE),
        torch.full((count,), qlen, dtype=torch.int32, device=DEVICE),
        prefix_lens=lens.int(),
    )
    seen = kdtree.expand_mask(tree, "qlen")
    s.ours.verify_mask.buffer[: seen.numel()] = seen.flatten()
    whole = torch.ones(count, qlen, prefix + qlen, dtype=torch.bool, device=DEVICE)
    whole[..., prefix:] = seen
    spec = DFlashVerifyInput(None, tree.positions.flatten(), qlen, custom_mask=whole.flatten())
    rows = torch.arange(1, count + 1, device=DEVICE)
    slots = lens[:, None] + torch.arange(qlen, device=DEVICE)
    out = s.table[rows[:, None], slots].long().flatten()
    batch = s.batch(mode("TARGET_VERIFY"), rows, lens, out, spec)
    translator = s.runner.kv_index_translator
    translator.own_plan(batch).bind(batch, translator)
    q = randn(rng, count * qlen, heads * 576).to(dtype)
    k = s.pool.get_key_buffer(1)[out]
    times, results = [], []
    for backend in (s.ours, triton):
        backend.init_forward_metadata(batch)

        def call(backend: Any = backend) -> torch.Tensor:
            return backend.forward(q, k, k[..., :512], s.layer, batch, save_kv_cache=False)

        results.append(call())
        times.append(microseconds(call) if cuda else 0)
    assert close(*results)
    if cuda:
        with capsys.disabled():
            print(f"\n{count} x {heads} heads: kdtree_mla {times[0]:.0f} us, triton {times[1]:.0f}")
        assert times[1] > 10 * times[0]


def test_verification_of_a_chain_equals_torch_native(sglang, rng):
    """One candidate a step: causal attention, which torch-native's prefill has."""
    with sglang.context.get_spec().override(speculative_eagle_topk=1):
        s = Setting(sglang, 16)
    assert not s.ours.verify_mask.is_read
    prefix = np.array([1, 40, 129])
    s.fill(rng, prefix, QLEN)
    lens = torch.from_numpy(prefix).to(DEVICE)
    rows = torch.arange(1, 4, device=DEVICE)
    slots = lens[:, None] + torch.arange(QLEN, device=DEVICE)
    out = s.table[rows[:, None], slots].long().flatten()
    spec = SimpleNamespace(draft_token_num=QLEN, custom_mask=s.ours.verify_mask.buffer)
    batch = s.batch(mode("TARGET_VERIFY"), rows, lens, out, spec)
    q, k = randn(rng, 3 * QLEN, HEADS * 576), randn(rng, 3 * QLEN, 1, 576)
    s.hybrid.init_forward_metadata(batch)
    got = s.run(s.hybrid, batch, q, k)
    batch = s.batch(mode("EXTEND"), rows, lens + QLEN, out)
    batch.extend_prefix_lens, batch.extend_seq_lens = lens, torch.full_like(lens, QLEN)
    s.hybrid.init_forward_metadata(batch)
    assert close(got, s.run(s.hybrid, batch, q))


@needs_kernels
def test_an_fp8_cache(sglang, rng):
    s = Setting(sglang, 16, torch.float8_e4m3fn)
    prefix = np.array([30])
    s.fill(rng, prefix, QLEN)
    batch, parents = verification(s, rng, prefix)
    q, k = randn(rng, QLEN, HEADS * 576), randn(rng, QLEN, 1, 576)
    s.hybrid.init_forward_metadata(batch)
    assert close(s.run(s.hybrid, batch, q, k), path_by_path(s, batch, parents, q))
    s.layer.k_scale, s.layer.k_scale_float = torch.tensor(0.5, device=DEVICE), 0.5
    scaled = s.run(s.hybrid, batch, q, k)
    stored = s.pool.get_key_buffer(1)[batch.out_cache_loc].float()
    assert torch.equal(stored, (k / 0.5).to(torch.float8_e4m3fn).float())
    rows = kdtree.verify_attn(
        q.view(1, QLEN, HEADS, 576),
        s.pool.get_key_buffer(1).view(-1, 16, 576),
        s.ours.forward_metadata.block_table,
        s.ours.forward_metadata.prefix_lens,
        s.ours.forward_metadata.words,
        sm_scale=SCALE,
        kv_scale=0.5,
    )
    assert torch.equal(scaled, rows.view(QLEN, -1))


@needs_kernels
def test_graph_buffers_keep_their_place(sglang, rng):
    """What a CUDA graph would replay: the device half of the metadata, on the batch captured."""
    s = Setting(sglang, 16)
    s.hybrid.init_cuda_graph_state(max_bs=5, max_num_tokens=5 * QLEN)
    assert s.hybrid.get_cuda_graph_seq_len_fill_value() == 1
    prefix = np.array([3, 60, 100])
    s.fill(rng, prefix, QLEN)
    captured, _ = verification(s, rng, prefix)
    s.hybrid.init_forward_metadata_out_graph(captured, in_capture=True)
    s.hybrid.init_forward_metadata_in_graph(captured)
    first = s.ours.forward_metadata
    held = [x.data_ptr() for x in (first.block_table, first.prefix_lens, first.words)]
    prefix = np.array([90, 4, 33])
    s.fill(rng, prefix, QLEN)
    batch, parents = verification(s, rng, prefix)
    s.hybrid.init_forward_metadata_out_graph(batch)
    captured.seq_lens.copy_(batch.seq_lens)
    s.hybrid.init_forward_metadata_in_graph(captured)
    now = s.ours.forward_metadata
    assert [x.data_ptr() for x in (now.block_table, now.prefix_lens, now.words)] == held
    q, k = randn(rng, 3 * QLEN, HEADS * 576), randn(rng, 3 * QLEN, 1, 576)
    assert close(s.run(s.hybrid, batch, q, k), path_by_path(s, batch, parents, q))


E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# By row of plugin.SUPPORTED, and what its two cells list: settings that are served, and settings
# that are not, with the reason.
Served = dict[str, list[dict[str, Any]]]
Declined = dict[str, list[tuple[dict[str, Any], str]]]
ONLY = "verifies EAGLE, EAGLE3, NEXTN, STANDALONE, DFLASH"
TRUTH: dict[str, tuple[Served, Declined]] = {
    "model": (
        {"dense MLA": [{}], "512 + 64 wide": [{}]},
        {
            "other attention": [({"runner.use_mla_backend": False}, "serves MLA models")],
            "other widths": [
                ({"pool.kv_lora_rank": 256}, r"serves dense MLA of 512 \+ 64, got 256 \+ 64$")
            ],
            "DSA": [({"pool.use_dsa": True}, "with sparse attention")],
        },
    ),
    "cache": (
        {
            "bf16": [{"pool.dtype": torch.bfloat16}],
            "f16": [{"pool.dtype": torch.float16}],
            "fp8 e4m3": [{"pool.dtype": E4M3}],
            "with a scale": [],  # test_an_fp8_cache
        },
        {
            "other types": [
                ({"pool.dtype": d}, f"serves caches of .*, got {d}") for d in (torch.float32, E5M2)
            ],
            "`--enable-unified-memory`": [
                (
                    {"runner.kv_index_translator": SimpleNamespace(reads_are_translated=True)},
                    "does not serve the unified memory pool",
                )
            ],
        },
    ),
    "`--page-size`": (
        {"powers of two from 1 to 128": [{"runner.page_size": 1 << bit} for bit in range(8)]},
        {"others": [({"runner.page_size": n}, f"up to 128, got {n}") for n in (3, 48, 256)]},
    ),
    "`--speculative-algorithm`": (
        {
            "none": [{"runner.spec_algorithm": None}],
            **{
                name: [{"runner.spec_algorithm": name}]
                for name in ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "DFLASH", "DDTREE")
            },
        },
        {
            name: [({"runner.spec_algorithm": name}, ONLY)]
            for name in ("NGRAM", "UNO", "DSPARK", "FROZEN_KV_MTP")
        },
    ),
    "`--speculative-num-draft-tokens`": (
        {"1 to 65": [{"spec.speculative_num_draft_tokens": count} for count in (1, 65)]},
        {"more": [({"spec.speculative_num_draft_tokens": 66}, r"of 1\.\.65, got 66")]},
    ),
    "attention": (
        {"decoding": [{}], "verification": [{}]},
        {
            "prefill": [
                (
                    {"exec.kernel.attention_backend": plugin.BACKEND},
                    "add --prefill-attention-backend",
                )
            ],
            "drafters: name another backend": [
                ({"runner.is_draft_worker": True}, "add --speculative-draft-attention-backend")
            ],
        },
    ),
    "batches over GPUs": (
        {"tensor parallel": [{"parallel.attn_tp_size": HEADS}]},
        {
            "`--dcp-size`": [({"parallel.attn_dcp_size": 2}, "decode context parallelism")],
            "two-batch overlap": [
                ({"exec.overlap.enable_two_batch_overlap": True}, "without two-batch overlap")
            ],
            "`--enable-pdmux`": [
                ({"disagg.enable_pdmux": True}, "without two-batch overlap or pdmux")
            ],
        },
    ),
}


@contextlib.contextmanager
def changed(sglang: Any, s: Setting, change: dict[str, Any]) -> Any:
    from kdtree.sglang import mla
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    with contextlib.ExitStack() as stack:
        for path, value in change.items():
            holder, *inner, name = path.split(".")
            if name == "spec_algorithm":
                value = SpeculativeAlgorithm.from_string(value)
            if holder in ("runner", "pool"):
                setattr(getattr(s, holder), name, value)
            elif holder == "parallel":  # SGLang's override() checks the groups too
                sizes = SimpleNamespace(**{"attn_dcp_size": 1, "attn_tp_size": 1, name: value})
                stack.enter_context(mock.patch.object(mla, "get_parallel", return_value=sizes))
            else:
                context = getattr(sglang.context, f"get_{holder}")()
                for part in inner:
                    context = getattr(context, part)
                stack.enter_context(context.override(**{name: value}))
        yield sglang.backends[plugin.BACKEND]


@pytest.mark.parametrize("row", TRUTH)
def test_what_is_supported_is_true(sglang, row):
    served, declined = TRUTH[row]
    for change in itertools.chain(*served.values()):
        s = Setting(sglang, 16)
        with changed(sglang, s, change) as make:
            assert type(make(s.runner)).__name__ == "KdtreeMLABackend"
    for change, reason in itertools.chain(*declined.values()):
        s = Setting(sglang, 16)
        with (
            changed(sglang, s, change) as make,
            pytest.raises(ValueError, match=f"^{plugin.BACKEND} .*{reason}"),
        ):
            make(s.runner)


def test_every_cell_of_what_is_supported_is_tested():
    from test_sglang_ddtree import TRUTH as OF_ALGORITHM

    tested = {**TRUTH, **OF_ALGORITHM}
    listed = [
        (row, ", ".join(served), ", ".join(declined)) for row, (served, declined) in tested.items()
    ]
    assert listed == plugin.SUPPORTED


def test_other_forwards_are_refused(sglang, rng):
    s = Setting(sglang, 16)
    one = torch.ones(1, dtype=torch.int64, device=DEVICE)
    batch = s.batch(mode("EXTEND"), one, one, one)
    with pytest.raises(ValueError, match="decodes and verifies, got a forward of EXTEND"):
        s.ours.init_forward_metadata(batch)
    batch = s.batch(mode("DECODE"), one, one, one)
    s.ours.init_forward_metadata(batch)
    q = randn(rng, 1, HEADS * 576)
    with pytest.raises(ValueError, match="does not know what a layer asks for: sinks"):
        s.run(s.ours, batch, q, sinks=one)
