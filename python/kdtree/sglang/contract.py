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
_HANDLER = _SRT + "models.deepseek_common.attention_backend_handler:"
_FORWARD = "self q k v layer forward_batch save_kv_cache kwargs"

#: Callables by module and name, and their parameters.
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

#: Other names, and the type of what they stand for.
VALUES = {
    _SRT + "arg_groups.choices:ATTENTION_BACKEND_CHOICES": list,
    _SRT + "arg_groups.choices:add_attention_backend_choices": object,
    _SRT + "models.deepseek_common.utils:FORWARD_ABSORB_CORE_ATTENTION_BACKENDS": list,
    _BACKEND + "verify_mask": property,
    _SRT + "mem_cache.kv_index_translator:KVIndexTranslator.reads_are_translated": property,
    _SRT + "speculative.eagle_utils:TreeMaskMode.QLEN_ONLY": int,
}


def differences() -> list[str]:
    """What is not as kdtree needs it, each reason once; empty when everything is."""
    found: dict[str, None] = {}
    for name in [*SIGNATURES, *VALUES]:
        try:
            value = _resolve(name)
        except Exception as error:  # whatever importing SGLang's modules may raise
            found[f"{type(error).__name__}: {error}"] = None
            continue
        if name in VALUES:
            kind = VALUES[name]
            if not isinstance(value, kind):
                found[f"{name} is a {type(value).__name__}, expected a {kind.__name__}"] = None
            continue
        got = " ".join(inspect.signature(value).parameters)
        if got != SIGNATURES[name]:
            found[f"{name} takes ({_listed(got)}), expected ({_listed(SIGNATURES[name])})"] = None
    return list(found)


def _resolve(name: str) -> Any:
    module, _, path = name.partition(":")
    value: Any = importlib.import_module(module)
    for part in path.split("."):
        value = getattr(value, part)
    return value


def _listed(parameters: str) -> str:
    return parameters.replace(" ", ", ")
