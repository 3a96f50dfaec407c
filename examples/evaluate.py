"""What the example claims, measured on held-out prompts: python examples/evaluate.py

- Lossless: greedy texts of plain decoding, the chain and every tree are the same. A pass over a
  tree rounds otherwise than one over a token (how much is measured, too), so where the target's own
  best two logits lie closer than TIE, either may be chosen; texts that part there are counted as
  near-ties, any others as wrong.
- Acceptance: tokens a target pass, for every method.
- Batches: requests of different lengths, decoded together, have the texts that they have alone.
- Sampling (--sampling RUNS): the first three tokens of many runs follow the law of plain sampling,
  and with the same seeds they are plain sampling's.
"""

from __future__ import annotations

import os

# The products are small: one BLAS thread is enough, and does not spin against kdtree's threads.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import argparse
import json
import math
import sys
from collections import Counter
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from kdtree import viz
from tiny_mla.engine import (
    METHODS,
    PLAIN,
    TREES,
    Decoder,
    Method,
    load_models,
    load_tokenizer,
)
from tiny_mla.ops import NumpyOps, TorchOps

#: Of two logits. Rounding was seen to move one by 0.002 on a CPU and 0.0035 on an H200.
TIE = 0.01

PROMPTS = Path(__file__).parent / "tiny_mla" / "prompts.jsonl"


class Lab:
    """The models on a device, and decoders of one capacity for them."""

    def __init__(self, device: str, capacity: int, batch: int) -> None:
        ops = NumpyOps() if device == "cpu" else TorchOps(device)
        self.target, self.drafter = load_models(ops)
        self.capacity, self.batch = capacity, batch
        self.judge = self.decoder(PLAIN, 1)

    def decoder(self, method: Method, batch: int, temperature: float = 0.0) -> Decoder:
        return Decoder(
            self.target,
            self.drafter,
            method,
            batch=batch,
            capacity=self.capacity,
            temperature=temperature,
        )

    def rounding(self, prompts: Sequence[list[int]]) -> float:
        """The most that a logit differs between a pass over one token and the root of a tree."""
        tree = self.decoder(TREES[-1], 1)
        moved = [abs(self.judge.next_logits(p) - tree.next_logits(p)).max() for p in prompts]
        return round(float(max(moved)), 6)

    def compare(
        self, prompts: Sequence[list[int]], want: Sequence[list[int]], got: Sequence[list[int]]
    ) -> dict[str, Any]:
        """How many texts are the same, how many part at a near-tie, how many are wrong."""
        counts = {"same": 0, "near_ties": 0, "wrong": 0}
        gaps = []
        for prompt, a, b in zip(prompts, want, got, strict=True):
            at = next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), None)
            if at is None:
                counts["same"] += 1
                continue
            logits = self.judge.next_logits([*prompt, *a[:at]])
            gap = float(logits.max() - min(logits[a[at]], logits[b[at]]))
            gaps.append(round(gap, 6))
            counts["near_ties" if gap < TIE else "wrong"] += 1
        return counts | {"gaps": gaps}


def verdict(counts: dict[str, Any]) -> str:
    """The result of `Lab.compare` in words."""
    text = f"{counts['same']} the same"
    if counts["near_ties"]:
        text += f", {counts['near_ties']} part at near-ties"
    if counts["wrong"]:
        text += f", {counts['wrong']} WRONG"
    return text + (f" (best two logits apart by {counts['gaps']})" if counts["gaps"] else "")


def greedy(lab: Lab, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
    results: dict[str, Any] = {}
    plain: list[list[int]] = []
    for method in METHODS:
        decoder = lab.decoder(method, lab.batch)
        texts: list[list[int]] = []
        emitted, passes, seconds = 0, 0, 0.0
        for start in range(0, len(prompts), lab.batch):
            run = decoder.run(prompts[start : start + lab.batch], tokens)
            texts += run.tokens
            emitted, passes = emitted + run.emitted, passes + run.passes
            seconds += run.seconds
        plain = plain or texts
        gain, speed = emitted / passes, len(prompts) * tokens / seconds
        counts = lab.compare(prompts, plain, texts)
        results[method.name] = {
            "tokens_a_pass": round(gain, 4),
            "tokens_a_second": round(speed, 1),
        } | counts
        print(
            f"{method.name:8} {gain:5.2f} tokens a pass, {speed:6.0f} a second; texts:",
            verdict(counts),
            flush=True,
        )
    return results


def alone(lab: Lab, prompts: list[list[int]], tokens: int, method: Method) -> dict[str, Any]:
    """Prompts of different lengths in one batch against each in a batch of its own."""
    together = lab.decoder(method, len(prompts)).run(prompts, tokens).tokens
    single = lab.decoder(method, 1)
    return lab.compare(prompts, [single.run([p], tokens).tokens[0] for p in prompts], together)


def first_tokens(
    lab: Lab, prompt: list[int], method: Method, temperature: float, seeds: range
) -> list[tuple[int, ...]]:
    """The first three tokens of a run with each seed."""
    batch = min(256, len(seeds))
    decoder = lab.decoder(method, batch, temperature)
    found: list[tuple[int, ...]] = []
    for start in range(0, len(seeds), batch):
        part = seeds[start : start + batch]
        found += map(tuple, decoder.run([prompt] * len(part), 3, part).tokens)
    return found


def tail(chi_square: float, freedom: int) -> float:
    """P(a chi-square variable is larger), by Wilson and Hilferty's cube root."""
    share = 2 / (9 * freedom)
    z = ((chi_square / freedom) ** (1 / 3) - (1 - share)) / math.sqrt(share)
    return 0.5 * math.erfc(z / math.sqrt(2))


def same_law(a: Sequence[Hashable], b: Sequence[Hashable]) -> float:
    """p of the two-sample chi-square test; outcomes seen fewer than 10 times are one."""
    total = Counter(a) + Counter(b)
    often = {outcome for outcome, n in total.items() if n >= 10}
    ca, cb = (Counter(x if x in often else None for x in sample) for sample in (a, b))
    chi_square = 0.0
    outcomes = ca.keys() | cb.keys()
    for outcome in outcomes:
        both = ca[outcome] + cb[outcome]
        for count, size in ((ca[outcome], len(a)), (cb[outcome], len(b))):
            expected = both * size / (len(a) + len(b))
            chi_square += (count - expected) ** 2 / expected
    return tail(chi_square, len(outcomes) - 1)


def follows(sample: Sequence[int], law: np.ndarray[Any, Any]) -> float:
    """p of the chi-square test of tokens against their probabilities; rare ones are one."""
    often = np.flatnonzero(law * len(sample) >= 5)
    counts = np.bincount(sample, minlength=len(law))
    seen = np.append(counts[often], len(sample) - counts[often].sum())
    expected = np.append(law[often], 1 - law[often].sum()) * len(sample)
    return tail(float(((seen - expected) ** 2 / expected).sum()), len(often))


def sampling(lab: Lab, prompt: list[int], runs: int, temperature: float = 0.8) -> dict[str, Any]:
    logits = lab.judge.next_logits(prompt).astype(np.float64) / temperature
    law = np.exp(logits - logits.max())
    law /= law.sum()
    plain = first_tokens(lab, prompt, PLAIN, temperature, range(runs))
    own = first_tokens(lab, prompt, TREES[0], temperature, range(runs, 2 * runs))
    same = first_tokens(lab, prompt, TREES[0], temperature, range(min(runs, 256)))
    return {
        "runs": runs,
        "different_outcomes": len(set(plain)),
        "p_three_tokens": round(same_law(plain, own), 4),
        "p_first_token": round(follows([text[0] for text in own], law), 4),
        "same_seeds_differ": sum(a != b for a, b in zip(same, plain, strict=False)),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="measure what the example claims")
    parser.add_argument("--prompts", type=int, default=200, help="held-out prompts (at most 256)")
    parser.add_argument("--tokens", type=int, default=128, help="new tokens of each")
    parser.add_argument("--batch", type=int, default=8, help="requests at once")
    parser.add_argument("--device", default="cpu", help="cpu (NumPy), or torch's: cuda")
    parser.add_argument("--sampling", type=int, default=0, metavar="RUNS")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="tokens a pass by budget")
    args = parser.parse_args()
    tokenizer = load_tokenizer()
    lines = PROMPTS.read_text().splitlines()[: args.prompts]
    prompts = [tokenizer.encode(json.loads(line)["text"]) for line in lines]
    lab = Lab(args.device, max(map(len, prompts)) + args.tokens, args.batch)
    result: dict[str, Any] = {"device": args.device, "prompts": len(prompts), "batch": args.batch}
    result["greedy"] = greedy(lab, prompts, args.tokens)
    result["alone"] = alone(lab, prompts[:8], args.tokens, TREES[-1])
    print("8 requests together and each alone:", verdict(result["alone"]), flush=True)
    result["rounding"] = lab.rounding(prompts)
    print(
        f"near-ties: best two logits less than {TIE} apart; rounding moved a logit by up to "
        f"{result['rounding']} between a pass over one token and a pass over a tree",
        flush=True,
    )
    if args.sampling:
        result["sampling"] = sampling(lab, tokenizer.encode("def read_"), args.sampling)
        print(
            "{runs} samples by trees of 8, chi-square: three tokens against as many plain samples, "
            "p = {p_three_tokens}; the first against the softmax, p = {p_first_token}; with equal "
            "seeds {same_seeds_differ} texts differ from plain's".format(**result["sampling"]),
            flush=True,
        )
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")
    methods = result["greedy"]
    if args.plot:
        gains = {name: m["tokens_a_pass"] for name, m in methods.items()}
        others = {m.name: gains[m.name] for m in METHODS if m not in TREES}
        viz.plot_acceptance(args.plot, {m.budget: gains[m.name] for m in TREES}, others)
    gain = methods["tree 64"]["tokens_a_pass"] / methods["chain"]["tokens_a_pass"]
    print(f"a tree of 64 emits {gain:.2f} times the chain's tokens a pass")
    return int(result["alone"]["wrong"] or any(m["wrong"] for m in methods.values()))


if __name__ == "__main__":
    sys.exit(main())
