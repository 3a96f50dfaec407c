"""kdtree in SGLang, which stays as it is: `load` is an entry point of its plugin group.

SGLang calls it in every process. It registers two things: the attention backend `kdtree_mla`, for
decoding and for the verification of draft trees of MLA models, and the speculative algorithm
`DDTREE`, which makes such trees of a DFlash drafter's block:

    python -m sglang.launch_server --model-path ... \\
        --attention-backend triton --decode-attention-backend kdtree_mla \\
        --speculative-algorithm EAGLE --speculative-eagle-topk 4 ... \\
        --speculative-attention-mode decode --speculative-draft-attention-backend triton

    ... --speculative-algorithm DDTREE --speculative-draft-model-path ... \\
        --speculative-num-draft-tokens 65 --speculative-attention-mode decode

Before it touches anything it compares what each builds on with `contract`: on an SGLang that
differs it declines with the reason, and serving goes on without. `python -m kdtree sglang` tells.
"""

from __future__ import annotations

# pyright: reportMissingImports=false
import importlib.metadata
import logging
import os
from collections.abc import Callable

from kdtree.sglang import contract

__all__ = ["ALGORITHM", "BACKEND", "GROUP", "SUPPORTED", "info", "load"]

#: The names that server arguments take.
BACKEND = "kdtree_mla"
ALGORITHM = "DDTREE"
#: SGLang's group of entry points.
GROUP = "sglang.srt.plugins"

FLAGS = (
    f"--attention-backend triton --decode-attention-backend {BACKEND} "
    "--speculative-attention-mode decode --speculative-draft-attention-backend triton"
)
ALGORITHM_FLAGS = (
    f"{FLAGS} --speculative-algorithm {ALGORITHM} --speculative-draft-model-path ... "
    "--speculative-num-draft-tokens 65 --page-size 64"
)

#: What is served, and what is declined with the reason when the server starts.
SUPPORTED = [
    ("model", "dense MLA, 512 + 64 wide", "other attention, other widths, DSA"),
    ("cache", "bf16, f16, fp8 e4m3, with a scale", "other types, `--enable-unified-memory`"),
    ("`--page-size`", "powers of two from 1 to 128", "others"),
    (
        "`--speculative-algorithm`",
        "none, EAGLE, EAGLE3, NEXTN, STANDALONE, DFLASH, DDTREE",
        "NGRAM, UNO, DSPARK, FROZEN_KV_MTP",
    ),
    ("`--speculative-num-draft-tokens`", "1 to 65", "more"),
    ("attention", "decoding, verification", "prefill, drafters: name another backend"),
    (
        "batches over GPUs",
        "tensor parallel",
        "`--dcp-size`, two-batch overlap, `--enable-pdmux`",
    ),
    (
        "DDTREE: drafter",
        "plain DFlash, blocks of up to the draft tokens",
        "DFlash2, LiLiCorr, Domino",
    ),
    (
        "DDTREE: sampling",
        "greedy, temperature, top-k, top-p, min-p, seeds, penalties, grammars, log-probs",
        "",
    ),
    (
        "DDTREE: server",
        "tensor parallel, overlap schedule",
        "`--page-size 1`, `--pp-size`, `--enable-dp-attention`, "
        "`--speculative-draft-window-size`, `--speculative-adaptive`, acceptance thresholds, "
        "`--enable-return-routed-experts`, `--speculative-num-steps` or "
        "`--speculative-eagle-topk` above 1, `SGLANG_SIMULATE_ACC_LEN`",
    ),
]

logger = logging.getLogger(__name__)


def load() -> dict[str, list[str]]:
    """The entry point: hooks kdtree in. By name, why something is not; also logged."""
    left_out = {BACKEND: contract.differences()}
    _try(left_out[BACKEND], _register_backend)
    # The algorithm verifies on the backend.
    reasons = contract.differences(algorithm=True) + left_out[BACKEND]
    left_out[ALGORITHM] = list(dict.fromkeys(reasons))
    _try(left_out[ALGORITHM], _register_algorithm)
    for name, reasons in left_out.items():
        if reasons:
            logger.warning(
                "%s stays out of SGLang, which is not as kdtree knows it: %s",
                name,
                "; ".join(reasons),
            )
    return left_out


def _try(reasons: list[str], register: Callable[[], None]) -> None:
    """Where nothing is against it yet; what SGLang has against it is a reason too."""
    if not reasons:
        try:
            register()
        except Exception as error:
            reasons.append(f"{type(error).__name__}: {error}")


def _register_algorithm() -> None:
    from kdtree.sglang import ddtree

    ddtree.register()


def _register_backend() -> None:
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


def info() -> int:
    """`python -m kdtree sglang`: what is hooked, and why not. Exit status 1 unless all is."""
    try:
        version = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        print("SGLang is not installed")
        return 1
    print(f"SGLang {version} (kdtree was tested with {contract.VERSION})")
    alone = _left_out()
    left_out = {BACKEND: alone, ALGORITHM: alone} if alone else load()
    for kind, name, flags in (
        ("attention backend", BACKEND, FLAGS),
        ("speculative algorithm", ALGORITHM, ALGORITHM_FLAGS),
    ):
        print(f"  {kind} {name}: {'not hooked' if left_out[name] else 'hooked'}")
        for reason in left_out[name] or [f"use: {flags}"]:
            print(f"    {reason}")
    return 1 if any(left_out.values()) else 0


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
