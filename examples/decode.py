"""Decode text with a small MLA model, plainly, by a chain and by trees: the same text each time.

    python examples/decode.py "class TestRead"
    python examples/decode.py "def encode(" "import os" --temperature 0.8 --seed 7
    python examples/decode.py "class TestRead" --tree tree.svg --plot acceptance.svg

Green tokens were drafted and accepted; what stands in the terminal's own colour is the target's.
On a CPU this needs NumPy alone; `--device cuda` needs torch.
"""

from __future__ import annotations

import os

# The products are small: one BLAS thread is enough, and does not spin against kdtree's threads.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import argparse
import sys
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

from kdtree import viz
from tiny_mla.engine import METHODS, PLAIN, TREES, Decoder, Method, Run, load_models, load_tokenizer
from tiny_mla.ops import NumpyOps, TorchOps
from tiny_mla.shares import shares
from tiny_mla.tokenizer import Tokenizer


class Screen:
    """Where text streams to; colours and the moving progress line only on a terminal."""

    def __init__(self, tokenizer: Tokenizer, wanted: int) -> None:
        self.pieces = tokenizer.pieces
        self.wanted = wanted
        self.terminal = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
        self.color = self.terminal and "NO_COLOR" not in os.environ
        self.drawn = 0.0

    def paint(self, code: str, text: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self.color and text else text

    def tokens(self, run: list[int]) -> str:
        """The tokens of a pass: those that were drafted and accepted, then the target's own."""
        drafted, own = (
            b"".join(self.pieces[t] for t in part).decode(errors="replace")
            for part in (run[:-1], run[-1:])
        )
        return self.paint("32", drafted) + own

    def progress(self, name: str, tokens: int, passes: int, *, last: bool = False) -> None:
        now = time.perf_counter()
        if not self.terminal or (now - self.drawn < 0.05 and not last):
            return
        self.drawn = now
        share = min(1.0, tokens / self.wanted)
        bar = "━" * int(32 * share)
        line = f"{name:8} {self.paint('32', bar)}{self.paint('2', '─' * (32 - len(bar)))}"
        more = f"{min(tokens, self.wanted):4}/{self.wanted} tokens, {passes} rounds"
        print(f"\r{line} {more}", end="\n" if last else "", flush=True)


class Picture:
    """A round's tree, kept on the host; the next round may write over the device's arrays."""

    def __init__(self, decoder: Decoder) -> None:
        def copy(record: Any) -> Any:
            arrays = {f.name: getattr(record, f.name) for f in fields(record)}
            return type(record)(**{n: decoder.ops.numpy(x).copy() for n, x in arrays.items()})

        self.tree, self.accept = copy(decoder.tree), copy(decoder.accept)
        self.deep = int(self.accept.accept_token_num[0]) >= 4


def decode(
    screen: Screen,
    decoder: Decoder,
    prompts: list[list[int]],
    tokens: int,
    seeds: list[int],
    texts: list[str] | None,
) -> tuple[Run, list[Picture]]:
    """One method's run; streams the first text and shows the others after it where `texts`."""
    runs: list[list[list[int]]] = [[] for _ in prompts]
    done = [0] * len(prompts)
    trees: list[Picture] = []

    def watch(news: list[list[int]]) -> None:
        for i, new in enumerate(news):
            new = new[: tokens - done[i]]  # the last pass may give more than asked for
            done[i] += len(new)
            if new:
                runs[i].append(new)
        if texts is None:
            screen.progress(decoder.method.name, min(done), len(runs[0]))
        elif news[0]:
            print(screen.tokens(runs[0][-1]), end="", flush=True)
        if decoder.method.budget and not (trees and trees[-1].deep):
            trees.append(Picture(decoder))

    if texts is not None:
        print(screen.paint("2", f"── {decoder.method.name} " + "─" * 60))
        print(screen.paint("1", texts[0]), end="", flush=True)
    run = decoder.run(prompts, tokens, seeds, watch)
    if texts is None:
        screen.progress(decoder.method.name, tokens, run.rounds, last=True)
    else:
        print()
        for text, parts in zip(texts[1:], runs[1:], strict=True):
            print(screen.paint("2", "─" * 72))
            print(screen.paint("1", text) + "".join(map(screen.tokens, parts)))
        print(screen.paint("2", "─" * 72), flush=True)
    return run, trees


def table(rows: list[list[str]]) -> str:
    """Columns as wide as they need, the first to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            [row[0].ljust(widths[0])]
            + [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        )
        for row in rows
    ]
    lines.insert(1, "─" * len(lines[0]))
    return "\n".join(lines)


def report(runs: dict[Method, Run], spent: dict[Method, dict[str, float]]) -> str:
    """What each method gave, and where its rounds spent their time."""
    results = [["", "tokens/pass", "accepted", "passes", "seconds", "tokens/s", "same text"]]
    for method, run in runs.items():
        tokens = sum(map(len, run.tokens))
        results.append(
            [
                method.name,
                f"{run.tokens_a_pass:.2f}",
                f"{run.tokens_a_pass - 1:.2f}",
                str(run.passes),
                f"{run.seconds:.2f}",
                f"{tokens / run.seconds:.0f}",
                "yes" if run.tokens == runs[PLAIN].tokens else "no",
            ]
        )
    parts = [["share of", *spent[PLAIN]]] + [
        [method.name, *(f"{100 * share:.1f} %" for share in names.values())]
        for method, names in spent.items()
    ]
    note = "no: the target's best two logits were nearer than rounding; evaluate.py counts that\n"
    odd = any(row[-1] == "no" for row in results)
    return f"{table(results)}\n{note if odd else ''}\n{table(parts)}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description="decode text plainly, by a drafted chain and by draft trees"
    )
    parser.add_argument("prompt", nargs="+", help="the beginnings; several are one batch")
    parser.add_argument("--tokens", type=int, default=256, help="new tokens (default 256)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 (default): greedy")
    parser.add_argument("--seed", type=int, default=0, help="of the sampling")
    parser.add_argument("--device", default="cpu", help="cpu (NumPy), or one of torch's: cuda")
    parser.add_argument("--show", choices=("last", "all", "none"), default="last")
    parser.add_argument("--tree", type=Path, metavar="FILE", help="a draft tree, as SVG")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="tokens a pass by budget")
    args = parser.parse_args()
    if not 1 <= args.tokens <= 3000:
        parser.error(f"--tokens: expected 1..3000, got {args.tokens}")
    if not 0 <= args.temperature < float("inf"):
        parser.error(f"--temperature: expected a number from 0 up, got {args.temperature}")
    ops = NumpyOps() if args.device == "cpu" else TorchOps(args.device)
    tokenizer = load_tokenizer()
    target, drafter = load_models(ops)
    prompts = [tokenizer.encode(text) or [tokenizer.separator] for text in args.prompt]
    longest = max(map(len, prompts))
    if longest > 800:
        parser.error(f"prompt: expected up to 800 tokens, got {longest}")
    seeds = [args.seed + i for i in range(len(prompts))]
    screen = Screen(tokenizer, args.tokens)

    runs: dict[Method, Run] = {}
    decoders: dict[Method, Decoder] = {}
    pictures: list[Picture] = []
    for method in METHODS:
        decoder = decoders[method] = Decoder(
            *(target, drafter, method),
            batch=len(prompts),
            capacity=longest + args.tokens,
            temperature=args.temperature,
        )
        shown = args.show == "all" or (args.show == "last" and method is METHODS[-1])
        runs[method], trees = decode(
            screen, decoder, prompts, args.tokens, seeds, args.prompt if shown else None
        )
        pictures = trees or pictures

    def label(token: int) -> str:
        return tokenizer.pieces[token].decode(errors="replace")

    if args.tree:
        picture = pictures[-1]
        print(viz.tree_text(picture.tree, picture.accept, label=label, color=screen.color), "\n")
        svg = viz.tree_svg(picture.tree, picture.accept, label=label)
        args.tree.write_text(svg, encoding="utf-8")
    # After all that is timed: a profiler slows what it watches.
    spent = {m: shares(decoder, prompts, seeds, runs[m]) for m, decoder in decoders.items()}
    print(report(runs, spent))
    if args.plot:
        others = {m.name: run.tokens_a_pass for m, run in runs.items() if m not in TREES}
        viz.plot_acceptance(args.plot, {m.budget: runs[m].tokens_a_pass for m in TREES}, others)
    return 0


if __name__ == "__main__":
    sys.exit(main())
