"""What kdtree builds on in SGLang, compared with the SGLang that is there.

Names and parameters alone, as they are in the release named below; what they mean is not visible
from outside, so a release with the same ones is taken as known.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any

__all__ = ["VERSION", "differences"]

#: The release that the tests run with.
VERSION = "0.5.23"

_SRT = "sglang.srt."
_BACKEND = _SRT + "layers.attention.base_attn_backend:AttentionBackend."
_POOL = _SRT + "mem_cache.memory_pool:"
_ALGORITHM = _SRT + "speculative.spec_info:SpeculativeAlgorithm."
_DFLASH = _SRT + "speculative.dflash_worker_v2:DFlashWorkerV2."
_VERIFY = _SRT + "speculative.dflash_info:DFlashVerifyInput"
_HANDLER = _SRT + "models.deepseek_common.attention_backend_handler:"
_FORWARD = "self q k v layer forward_batch save_kv_cache kwargs"

#: Callables by module and name, and their parameters: what the attention backend builds on.
SIGNATURES = {
    _SRT + "layers.attention.attention_registry:register_attention_backend": "name",
    _HANDLER + "AttentionBackendRegistry.register": "backend_name handler_func",
    _HANDLER + "_dispatch_mla_subtype": "attn forward_batch",
    _BACKEND + "init_forward_metadata": "self forward_batch",
    _BACKEND + "init_forward_metadata_out_graph": "self forward_batch in_capture",
    _BACKEND + "init_forward_metadata_in_graph": "self forward_batch",
    _BACKEND + "init_cuda_graph_state": "self max_bs max_num_tokens",
    _BACKEND + "get_cuda_graph_seq_len_fill_value": "self",
    _BACKEND + "update_verify_buffers_to_fill_after_draft": "self spec_info cuda_graph_bs",
    _BACKEND + "forward": _FORWARD,
    _BACKEND + "forward_decode": _FORWARD,
    _BACKEND + "forward_extend": _FORWARD,
    _POOL + "MLATokenToKVPool.get_key_buffer": "self layer_id",
    _POOL + "MLATokenToKVPool.set_kv_buffer": (
        "self layer loc_info cache_k cache_v layer_id_override"
    ),
    _POOL + "MLATokenToKVPool.set_mla_kv_buffer": (
        "self layer loc_info cache_k_nope cache_k_rope layer_id_override"
    ),
    _POOL + "KVWriteLoc.for_batch": "forward_batch swa_loc full_loc",
    _SRT + "layers.attention.verify_mask:VerifyMask": "buffer mode max_bs is_read",
    _SRT + "runtime_context:attention_backends": "",
    _SRT + "runtime_context:get_disagg": "",
    _SRT + "runtime_context:get_exec": "",
    _SRT + "runtime_context:get_spec": "",
    _SRT + "runtime_context:get_parallel": "",
    _ALGORITHM + "is_none": "self",
    _ALGORITHM + "is_eagle": "self",
    _ALGORITHM + "is_frozen_kv_mtp": "self",
    _ALGORITHM + "is_standalone": "self",
    _ALGORITHM + "is_dflash": "self",
}

#: What the speculative algorithm builds on.
ALGORITHM_SIGNATURES = {
    _ALGORITHM + "from_string": "name",
    _ALGORITHM + "register": "name supports_overlap validate_server_args spec_class",
    _SRT + "speculative.spec_info:CustomSpecAlgo": (
        "name factory supports_overlap validate_server_args"
    ),
    _SRT + "speculative.spec_info:CustomSpecAlgo.handle_server_args": "self server_args",
    _DFLASH + "__init__": "self server_args gpu_id nccl_port target_worker",
    _DFLASH + "init_attention_backends": "self",
    _DFLASH + "init_cuda_graphs": "self",
    _DFLASH + "prewarm_sampling": "self",
    _DFLASH + "_maybe_build_draft_sampler": "self",
    _DFLASH + "_validate_phase1_sampling_support": "self batch",
    _DFLASH + "_can_skip_verify_logits": "self batch sampling_info",
    _DFLASH + "_draft_write_ids": "self plan",
    _DFLASH + "_make_next_draft_input_decode": "self bonus_tokens new_seq_lens",
    _DFLASH + "_append_target_hidden_to_draft_kv_by_loc": (
        "self target_hidden cache_loc positions cache_loc_2d commit_lens extend_lens"
    ),
    _DFLASH + "forward_batch_generation": (
        "self batch on_publish grammar_barrier pp_proxy_tensors"
    ),
    _SRT + "speculative.dflash_worker_v2:_resolve_dflash_embedding_module": (
        "draft_model target_model"
    ),
    _SRT + "speculative.dflash_utils:apply_dflash_verify_logits_adjustments": (
        "next_token_logits sampling_info draft_token_num"
    ),
    _SRT + "speculative.dflash_utils:is_dense_head_weight": "weight",
    _SRT + "speculative.dflash_utils:parse_dflash_draft_config": "draft_hf_config",
    _SRT + "speculative.dflash_utils:DFlashDraftConfig.resolve_block_size": "self default",
    _VERIFY: (
        "draft_token positions draft_token_num topk custom_mask capture_hidden_mode "
        "num_tokens_per_req ragged_verify_layout live_seq_lens_cpu "
        "candidate_max_seq_len_upper_bound kv_loc_plan kv_loc_cols"
    ),
    _VERIFY + ".prepare_for_verify": "self batch target_worker defer_metadata_init",
    _SRT + "mem_cache.kv_index_translator:KVIndexTranslator.plan": (
        "self req_pool_indices seq_lens seq_lens_cpu write_virtual read_extent write_slots "
        "translated_writes"
    ),
    _SRT + "mem_cache.kv_loc_plan:KVLocPlan.bind": "self batch reader cols",
    _SRT + "managers.tp_worker:TpModelWorker.forward_batch_generation": (
        "self batch forward_batch pp_proxy_tensors is_verify skip_attn_backend_init "
        "capture_hidden_mode return_kv_loc_plan"
    ),
    _SRT + "model_executor.forward_batch_info:enable_num_token_non_padded": "",
    _SRT + "layers.logits_processor:LogitsProcessor.is_deferred_shard": "self logits",
    _SRT + "layers.logits_processor:LogitsProcessor.finish_deferred_gather": "self logits",
    _SRT + "layers.logits_processor:LogitsProcessor.deferred_argmax": "self logits",
    _SRT + "layers.logprob_processor:compute_spec_logprobs": (
        "batch logits_output predict accept_index chain_stride"
    ),
    _SRT + "speculative.spec_utils:GrammarTree.from_device": (
        "retrieve_next_token retrieve_next_sibling draft_token"
    ),
    _SRT + "speculative.spec_utils:build_grammar_vocab_mask": (
        "reqs tree sampling_info device barrier"
    ),
    _SRT + "speculative.spec_utils:draft_tp_context": "layout",
    _SRT + "speculative.spec_tp_sync:SpecTpSync.sync": "self site values",
    _SRT + "speculative.spec_sampling_mask:SpeculativeSamplingMaskCapture.from_logits": (
        "sampling_info next_token_logits draft_input draft_token_num bs greedy_mask"
    ),
    _SRT + "speculative.spec_sampling_mask:SpeculativeSamplingMaskCapture.build_output": (
        "self out_tokens commit_lens"
    ),
    _SRT + "lora.layers:unwrap_lora_layer": "module",
}

#: Other names, and the type of what they stand for.
VALUES: dict[str, type] = {
    _SRT + "arg_groups.choices:ATTENTION_BACKEND_CHOICES": list,
    _SRT + "arg_groups.choices:add_attention_backend_choices": object,
    _SRT + "models.deepseek_common.utils:FORWARD_ABSORB_CORE_ATTENTION_BACKENDS": list,
    _BACKEND + "verify_mask": property,
    _SRT + "mem_cache.kv_index_translator:KVIndexTranslator.reads_are_translated": property,
    _SRT + "speculative.eagle_utils:TreeMaskMode.QLEN_ONLY": int,
}
ALGORITHM_VALUES: dict[str, type] = {
    _SRT + "speculative.spec_tp_sync:SpecTpSyncSite.DFLASH_ACCEPT_GREEDY": int,
    _SRT + "speculative.spec_tp_sync:SpecTpSyncSite.DFLASH_ACCEPT_SAMPLE": int,
    _SRT + "model_executor.forward_batch_info:ForwardMode.TARGET_VERIFY": int,
    _SRT + "model_executor.forward_batch_info:CaptureHiddenMode.FULL": int,
    _SRT + "environ:envs.SGLANG_SIMULATE_ACC_LEN": object,
}
#: Fields that the algorithm fills, and attributes that the worker's __init__ leaves it.
ALGORITHM_FIELDS = {
    _SRT + "model_executor.forward_batch_info:ForwardBatch": (
        "forward_mode batch_size input_ids req_pool_indices seq_lens out_cache_loc seq_lens_sum "
        "seq_lens_cpu positions input_embeds spec_algorithm spec_info capture_hidden_mode "
        "num_token_non_padded global_num_token_non_padded_cpu can_run_decode_cuda_graph"
    ),
    _SRT + "managers.scheduler:GenerationBatchResult": (
        "logits_output next_token_ids accept_lens can_run_cuda_graph next_draft_input "
        "speculative_num_draft_tokens new_seq_lens routed_experts_output indexer_topk_output"
    ),
}
ALGORITHM_ATTRIBUTES = {
    _DFLASH + "__init__": (
        "model_runner draft_parallel_layout draft_model_runner draft_model selector lilicorr "
        "_is_domino block_size _mask_token_id _noise_embed_scale _draft_block_spec_info "
        "_target_logits_processor _tp_sync"
    ),
}


def differences(*, algorithm: bool = False) -> list[str]:
    """What is not as the backend, or the algorithm, needs it; each reason once."""
    signatures = ALGORITHM_SIGNATURES if algorithm else SIGNATURES
    values = ALGORITHM_VALUES if algorithm else VALUES
    found: dict[str, None] = {}
    for name in [*signatures, *values]:
        try:
            value = _resolve(name)
        except Exception as error:  # whatever importing SGLang's modules may raise
            found[f"{type(error).__name__}: {error}"] = None
            continue
        if name in values:
            kind = values[name]
            if not isinstance(value, kind):
                found[f"{name} is a {type(value).__name__}, expected a {kind.__name__}"] = None
            continue
        if not callable(value):
            found[f"{name} is a {type(value).__name__}, expected a callable"] = None
            continue
        got = " ".join(inspect.signature(value).parameters)
        if got != signatures[name]:
            found[f"{name} takes ({_listed(got)}), expected ({_listed(signatures[name])})"] = None
    for table, names_of in (
        (ALGORITHM_FIELDS, lambda value: inspect.signature(value).parameters),
        (ALGORITHM_ATTRIBUTES, lambda value: value.__code__.co_names),
    ):
        for name, needed in table.items() if algorithm else ():
            try:
                missing = set(needed.split()) - set(names_of(_resolve(name)))
            except Exception as error:
                found[f"{type(error).__name__}: {error}"] = None
                continue
            if missing:
                found[f"{name} is without {', '.join(sorted(missing))}"] = None
    return list(found)


def _resolve(name: str) -> Any:
    module, _, path = name.partition(":")
    value: Any = importlib.import_module(module)
    for part in path.split("."):
        value = getattr(value, part)
    return value


def _listed(parameters: str) -> str:
    return parameters.replace(" ", ", ")
