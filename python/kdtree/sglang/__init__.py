"""kdtree in SGLang, which stays as it is: `load` is an entry point of its plugin group.

SGLang calls it in every process. It registers the attention backend `kdtree_mla`, for decoding and
for the verification of draft trees of MLA models:

    python -m sglang.launch_server --model-path ... \\
        --attention-backend triton --decode-attention-backend kdtree_mla \\
        --speculative-algorithm EAGLE --speculative-eagle-topk 4 ... \\
        --speculative-attention-mode decode --speculative-draft-attention-backend triton

Before it touches anything it compares what it builds on with `contract`: on an SGLang that differs
it declines with the reason, and serving goes on without it. `python -m kdtree sglang` tells.
"""

from __future__ import annotations

# pyright: reportMissingImports=false
import importlib.metadata
import logging
import os

from kdtree.sglang import contract

__all__ = ["BACKEND", "GROUP", "info", "load"]

#: The name that server arguments take.
BACKEND = "kdtree_mla"
#: SGLang's group of entry points.
GROUP = "sglang.srt.plugins"

FLAGS = (
    f"--attention-backend triton --decode-attention-backend {BACKEND} "
    "--speculative-attention-mode decode --speculative-draft-attention-backend triton"
)

logger = logging.getLogger(__name__)


def load() -> list[str]:
    """The entry point: hooks kdtree in, or returns (and logs) why not."""
    reasons = contract.differences()
    if reasons:
        logger.warning(
            "kdtree stays out of SGLang, which is not as kdtree knows it: %s", "; ".join(reasons)
        )
        return reasons
    from sglang.srt.arg_groups.choices import (
        ATTENTION_BACKEND_CHOICES,
        add_attention_backend_choices,
    )
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.models.deepseek_common.attention_backend_handler import (
        AttentionBackendRegistry,
        _dispatch_mla_subtype,
    )
    from sglang.srt.models.deepseek_common.utils import FORWARD_ABSORB_CORE_ATTENTION_BACKENDS

    from kdtree.sglang.mla import create_backend

    register_attention_backend(BACKEND)(create_backend)
    AttentionBackendRegistry.register(BACKEND, _dispatch_mla_subtype)
    if BACKEND not in ATTENTION_BACKEND_CHOICES:
        add_attention_backend_choices([BACKEND])
    # The models of this list hand over the two parts of q and k, which they would otherwise copy
    # into one.
    if BACKEND not in FORWARD_ABSORB_CORE_ATTENTION_BACKENDS:
        FORWARD_ABSORB_CORE_ATTENTION_BACKENDS.append(BACKEND)
    return []


def info() -> int:
    """`python -m kdtree sglang`: what is hooked, and why not. Exit status 1 when nothing is."""
    try:
        version = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        print("SGLang is not installed")
        return 1
    print(f"SGLang {version} (kdtree was tested with {contract.VERSION})")
    reasons = _left_out() or load()
    state = "not hooked" if reasons else "hooked"
    print(f"  attention backend {BACKEND}: {state}")
    for reason in reasons:
        print(f"    {reason}")
    if not reasons:
        print(f"  use: {FLAGS}")
    return 1 if reasons else 0


def _left_out() -> list[str]:
    """Why SGLang would not come to `load` by itself."""
    found = importlib.metadata.entry_points(group=GROUP)
    name = next((entry.name for entry in found if entry.value == f"{__name__}:load"), None)
    if name is None:
        return [f"the installed package has no entry point in the group {GROUP}"]
    allowed = os.environ.get("SGLANG_PLUGINS", "")
    if allowed and name not in [one.strip() for one in allowed.split(",")]:
        return [f"SGLANG_PLUGINS={allowed} leaves out the plugin {name}"]
    return []
