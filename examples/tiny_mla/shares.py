"""Where a round's time goes, told by a profiler, so that neither the round nor its graph knows.

On a CPU cProfile has the seconds inside each of kdtree's calls, on a GPU torch's profiler those of
every kernel of the replayed graph, by its name. The rest is the models and the loop's own state.
"""

from __future__ import annotations

import cProfile
from collections.abc import Callable, Iterator, Sequence
from types import CodeType

from tiny_mla.engine import Decoder, Run

OPS = ("draft_topk", "build_ddtree", "verify_attn", "tree_accept_logits", "commit_kv")
REST = "models and state"


def shares(
    decoder: Decoder, prompts: Sequence[list[int]], seeds: Sequence[int], run: Run
) -> dict[str, float]:
    """Each op's part of the time of up to 16 rounds from the middle of a run."""
    half = len(run.tokens[0]) // 2
    begun = [prompt + text[:half] for prompt, text in zip(prompts, run.tokens, strict=True)]
    decoder.start(begun, len(run.tokens[0]) - half, seeds)

    def rounds() -> None:
        for _ in range(max(1, min(16, run.rounds // 2))):
            decoder.round()
        decoder.ops.wait()

    seconds = dict.fromkeys((*OPS, REST), 0.0)
    for name, spent in kernels(rounds) if decoder.ops.on_gpu else calls(rounds):
        seconds[name] += spent
    whole = sum(seconds.values())
    return {name: spent / whole for name, spent in seconds.items()}


def calls(work: Callable[[], None]) -> Iterator[tuple[str, float]]:
    """Seconds in kdtree's functions, and what is left of the whole."""
    profile = cProfile.Profile()
    profile.runcall(work)
    for entry in profile.getstats():
        yield REST, entry.inlinetime
        name = entry.code.co_name if isinstance(entry.code, CodeType) else ""
        if name in OPS:
            yield name, entry.totaltime
            yield REST, -entry.totaltime


def kernels(work: Callable[[], None]) -> Iterator[tuple[str, float]]:
    """Seconds of the GPU's kernels and copies; ours are named after their ops, but attention's."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as trace:
        work()
    for kernel in trace.key_averages():
        if kernel.device_type == DeviceType.CUDA:
            ours = next((op for op in OPS if op in kernel.key), "verify_attn")
            name = ours if "kdtree" in kernel.key else REST
            yield name, kernel.self_device_time_total / 1e6
