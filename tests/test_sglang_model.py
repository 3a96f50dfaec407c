"""SGLang's own DeepSeek-V3, in small and with random weights, over draft trees: `kdtree_mla` beside
SGLang's Triton backend. scripts/sglang_bed.py runs this."""

from __future__ import annotations

import importlib.util
import json
import socket
import sys
from types import ModuleType, SimpleNamespace

import kdtree
import numpy as np
import pytest
from support import random_parents

if importlib.util.find_spec("sglang") is None:
    pytest.skip("SGLang is not installed: see scripts/sglang_bed.py", allow_module_level=True)

import torch
from test_sglang import DEVICE, FLAGS, MODEL, QLEN, Setting, close, mode, needs_kernels

YARN = {
    "type": "yarn",
    "rope_type": "deepseek_yarn",
    "factor": 40,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
}
# Without experts, whose kernels a CPU may lack; nothing in them is about attention.
DENSE = {**MODEL, "rope_scaling": YARN, "first_k_dense_replace": MODEL["num_hidden_layers"]}
# Triton's interpreter has no bfloat16 products.
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float16


@pytest.fixture(scope="module")
def sglang(tmp_path_factory):
    """SGLang as rank 0 of one, with its groups."""
    from sglang.srt import plugins, runtime_context
    from sglang.srt.distributed import parallel_state
    from sglang.srt.layers.attention import attention_registry
    from sglang.srt.server_args import prepare_server_args

    plugins.load_plugins()
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(DENSE))
    names = ["--model-path", str(folder), "--speculative-draft-model-path", str(folder)]
    arguments = prepare_server_args([*names, *FLAGS])
    ranks = runtime_context.SpawnRanks(world_rank=0, gpu_id=0)
    runtime_context.publish(arguments, role="scheduler", ranks=ranks)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    parallel_state.init_distributed_environment(
        world_size=1, rank=0, local_rank=0, distributed_init_method=address, backend="gloo"
    )
    parallel_state.initialize_model_parallel()
    yield SimpleNamespace(
        arguments=arguments,
        context=runtime_context,
        backends=attention_registry.ATTENTION_BACKENDS,
    )
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()


@pytest.fixture(scope="module")
def model(sglang):
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.models.deepseek_v2 import DeepseekV3ForCausalLM

    with pytest.MonkeyPatch.context() as patch:
        if DEVICE == "cpu":  # where its rotary embedding imports vLLM's
            for name in ("vllm", "vllm._custom_ops"):
                patch.setitem(sys.modules, name, ModuleType(name))
            patch.setattr(sys.modules["vllm._custom_ops"], "rotary_embedding", None, raising=False)
        torch.set_default_dtype(DTYPE)
        try:
            with torch.device(DEVICE):
                made = DeepseekV3ForCausalLM(
                    ModelConfig.from_server_args(sglang.arguments).hf_config
                )
        finally:
            torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    for name, weight in made.named_parameters():
        weight.data.fill_(1) if "norm" in name else weight.data.normal_(0, 0.05)
    for layer in made.model.layers:
        attention = layer.self_attn
        up = attention.kv_b_proj.weight.view(attention.num_local_heads, 256, 512)
        attention.w_kc, attention.w_vc = up[:, :128], up[:, 128:].transpose(1, 2)
    for module in made.modules():  # torch's, instead of kernels that are not there everywhere
        if hasattr(module, "forward_native"):
            module.forward = module.forward_native
    return made


@needs_kernels
@pytest.mark.parametrize("topk", [4, 1])
def test_the_model_is_the_same_on_both_backends(sglang, model, rng, topk):
    """Trees, and chains, which neither backend needs a mask for."""
    from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
    from sglang.srt.speculative.dflash_info import DFlashVerifyInput

    prefix = np.array([40, 3])
    with sglang.context.get_spec().override(speculative_eagle_topk=topk):
        s = Setting(sglang, 16, DTYPE)
        triton = sglang.backends["triton"](s.runner)
    s.fill(rng, prefix, QLEN)
    lens = torch.from_numpy(prefix).to(DEVICE)
    parents = random_parents(rng, 2, QLEN)
    if topk == 1:
        parents[:] = np.arange(QLEN) - 1
    tree = kdtree.tree_links(
        torch.from_numpy(parents).to(DEVICE),
        torch.full((2,), QLEN, dtype=torch.int32, device=DEVICE),
        prefix_lens=lens.int(),
    )
    seen = kdtree.expand_mask(tree, "qlen")
    s.ours.verify_mask.buffer[: seen.numel()] = seen.flatten()
    before = [torch.ones(QLEN, count, dtype=torch.bool, device=DEVICE) for count in prefix]
    whole = torch.cat([torch.cat(part, 1).flatten() for part in zip(before, seen, strict=True)])
    spec = DFlashVerifyInput(None, tree.positions.flatten(), QLEN, custom_mask=whole)
    rows = torch.arange(1, 3, device=DEVICE)
    slots = lens[:, None] + torch.arange(QLEN, device=DEVICE)
    out = s.table[rows[:, None], slots].long().flatten()
    batch = s.batch(mode("TARGET_VERIFY"), rows, lens, out, spec)
    batch.input_ids = torch.from_numpy(rng.integers(0, MODEL["vocab_size"], 2 * QLEN)).to(DEVICE)
    batch.positions = tree.positions.flatten()
    translator = s.runner.kv_index_translator
    translator.own_plan(batch).bind(batch, translator)
    cache = [torch.randn(buffer.shape).to(DTYPE) for buffer in s.pool.kv_buffer]
    states, written = [], []
    for backend, route in ((s.hybrid, "decode"), (triton, "prefill")):
        for buffer, start in zip(s.pool.kv_buffer, cache, strict=True):
            buffer.copy_(start)
        with (
            torch.inference_mode(),
            sglang.context.get_spec().override(speculative_attention_mode=route),
            forward_context(ForwardContext(attn_backend=backend)),
        ):
            backend.init_forward_metadata(batch)
            states.append(model.model(batch.input_ids, batch.positions, batch))
        written.append(s.pool.kv_buffer[1][out].clone())
        name = model.model.layers[1].self_attn.current_attention_backend
        assert name == ("kdtree_mla" if route == "decode" else "triton")
    assert close(*states)
    assert close(*written)
    assert not close(states[0][:QLEN], states[0][QLEN:])
