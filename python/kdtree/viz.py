"""Draft trees and acceptance as pictures: terminal text and SVG, with nothing but NumPy.

    print(kdtree.viz.tree_text(tree, accept, label=tokenizer.decode))
    Path("tree.svg").write_text(kdtree.viz.tree_svg(tree, accept, label=tokenizer.decode))

Both lay a tree out the same way: a first child, the best one, goes on in its parent's line; its
siblings start lines of their own below. They read the arrays back to the host.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, Literal

import numpy as np

from kdtree.records import Accept, Tree

__all__ = ["acceptance_svg", "plot_acceptance", "tree_svg", "tree_text"]

#: "auto" follows the reader's colour scheme (a media query; plain viewers show the light one).
Theme = Literal["auto", "light", "dark"]
#: What a token is called: its id -> text.
Label = Callable[[int], str]

_VISIBLE = {" ": "·", "\n": "⏎", "\t": "⇥", "\r": "␍", "": "∅"}


def _host(x: Any) -> np.ndarray[Any, Any]:
    """A host copy of an array of any library."""
    if hasattr(x, "cpu"):  # torch
        x = x.cpu()
    elif hasattr(x, "get"):  # CuPy
        x = x.get()
    return np.asarray(x) if hasattr(x, "__array__") else np.from_dlpack(x)


def _show(text: str) -> str:
    """White space made visible, control characters escaped."""
    if not text:
        return _VISIBLE[""]
    shown = "".join(_VISIBLE.get(c, c if c.isprintable() else f"\\x{ord(c):02x}") for c in text)
    return shown if len(shown) <= 18 else shown[:17] + "…"


@dataclass
class _Node:
    label: str
    score: float
    depth: int
    line: int  # of the layout
    children: list[int]
    accepted: bool


def _layout(
    tree: Tree, accept: Accept | None, request: int, label: Label | None
) -> tuple[list[_Node], list[int]]:
    """The used slots, each with its line; and the slots in the order of the lines, depth first."""
    count = int(_host(tree.num_nodes)[request])
    if count == 0:
        raise ValueError(f"request: expected one with a tree, got {request}, a padding request")
    tokens, parents = _host(tree.draft_tokens)[request], _host(tree.parents)[request]
    scores = np.zeros(count) if tree.scores is None else _host(tree.scores)[request]
    walked: set[int] = set()
    if accept is not None:
        accepted = int(_host(accept.accept_token_num)[request])
        walked = set(_host(accept.accept_index)[request, : accepted + 1].tolist())
    nodes = [
        _Node(
            _show(str(tokens[i]) if label is None else label(int(tokens[i]))),
            float(scores[i]),
            *(0, 0, []),
            i in walked,
        )
        for i in range(count)
    ]
    for i in range(1, count):
        parent = int(parents[i])
        if not 0 <= parent < i:
            raise ValueError(f"tree.parents: expected 0..{i - 1} in slot {i}, got {parent}")
        nodes[parent].children.append(i)
        nodes[i].depth = nodes[parent].depth + 1
    order, stack, line = [], [0], -1
    while stack:
        i = stack.pop()
        first = i > 0 and nodes[int(parents[i])].children[0] == i
        line += not first
        nodes[i].line = line
        order.append(i)
        stack += reversed(nodes[i].children)
    return nodes, order


def _bonus(accept: Accept | None, request: int, label: Label | None) -> str | None:
    """The token that the target adds after the accepted ones."""
    if accept is None:
        return None
    last = int(_host(accept.accept_token_num)[request])
    token = int(_host(accept.accept_tokens)[request, last])
    return _show(str(token) if label is None else label(token)) if token >= 0 else None


def _summary(nodes: list[_Node], accept: Accept | None, bonus: str | None) -> str:
    text = f"{len(nodes) - 1} nodes"
    if accept is not None:
        text += f", {sum(node.accepted for node in nodes) - 1} accepted"
        text += "" if bonus is None else f', then "{bonus}" from the target'
    return text


def tree_text(
    tree: Tree,
    accept: Accept | None = None,
    *,
    request: int = 0,
    label: Label | None = None,
    color: bool = True,
) -> str:
    """A request's draft tree as lines for a terminal.

    A line ends with the score, the sum of log-probs, of its last node. Accepted tokens are bold
    green; without colour they stand in brackets. The last line counts, and names the bonus.

    Args:
        tree: of which draft_tokens, parents, num_nodes and, if present, scores are read.
        accept: marks the accepted path.
        request: the row of the batch.
        label: the text of a token; default: its id.
        color: with ANSI colours, which suit dark and light terminals.
    """
    nodes, order = _layout(tree, accept, request, label)

    def paint(code: str, text: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if color and text else text

    lines: list[str] = []
    # Junctions and what still hangs from them: (column, siblings to come).
    waiting: list[tuple[int, list[int]]] = []
    column, text = 0, ""

    def finish(last: int) -> None:
        score = paint("2", f"  {nodes[last].score:.2f}") if tree.scores is not None else ""
        lines.append(text + score)

    def rule(ahead: list[int], shape: str) -> str:
        return paint("32" if any(nodes[i].accepted for i in ahead) else "2", shape)

    previous = -1
    for i in order:
        node = nodes[i]
        if previous >= 0 and node.line != nodes[previous].line:
            finish(previous)
            while not waiting[-1][1]:
                waiting.pop()
            text, column = "", 0
            for at, ahead in waiting[:-1]:
                if ahead:
                    text += " " * (at - column) + rule(ahead, "│")
                    column = at + 1
            at, ahead = waiting[-1]
            assert ahead.pop(0) == i
            shape = ("├" if ahead else "╰") + "─ "
            text += " " * (at - column) + rule([i, *ahead], shape)
            column = at + 3
        name = f"[{node.label}]" if node.accepted and not color else node.label
        text += paint("1;32", name) if node.accepted else name
        column += len(name)
        if node.children:
            ahead = node.children[1:]
            text += " " + rule(node.children, "┬ " if ahead else "─ ")
            waiting.append((column + 1, list(ahead)))
            column += 3
        previous = i
    finish(previous)
    lines.append(paint("2", _summary(nodes, accept, _bonus(accept, request, label))))
    return "\n".join(lines)


# ---- SVG

# name: (light, dark)
_COLORS = {
    "ground": ("#ffffff", "#0d1117"),
    "ink": ("#1f2328", "#e6edf3"),
    "quiet": ("#656d76", "#8d96a0"),
    "line": ("#afb8c1", "#484f58"),
    "box": ("#f6f8fa", "#161b22"),
    "go": ("#1a7f37", "#3fb950"),
    "go-box": ("#dafbe1", "#12361f"),
    "other": ("#0969da", "#58a6ff"),
}


def _style(theme: Theme) -> str:
    rules = [
        (".ground", "fill", "ground"),
        (".ink", "fill", "ink"),
        (".quiet", "fill", "quiet"),
        (".go-ink", "fill", "go"),
        (".other-ink", "fill", "other"),
        (".box", "fill", "box"),
        (".box", "stroke", "line"),
        (".go-box", "fill", "go-box"),
        (".go-box", "stroke", "go"),
        (".bonus", "stroke", "go"),
        (".edge", "stroke", "line"),
        (".go-edge", "stroke", "go"),
        (".other-edge", "stroke", "other"),
        (".dot", "fill", "go"),
        (".dot", "stroke", "ground"),
    ]

    def sheet(which: int) -> str:
        return "".join(f"{at}{{{what}:{_COLORS[name][which]}}}" for at, what, name in rules)

    fixed = (
        "text{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace}"
        ".edge,.go-edge,.other-edge,.bonus{fill:none}"
        ".bonus{stroke-dasharray:3 2}"
    )
    base = sheet(1 if theme == "dark" else 0)
    dark = f"@media (prefers-color-scheme:dark){{{sheet(1)}}}" if theme == "auto" else ""
    return f"<style>{fixed}{base}{dark}</style>"


def _document(width: float, height: float, title: str, theme: Theme, body: list[str]) -> str:
    w, h = math.ceil(width), math.ceil(height)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{w}" height="{h}" '
        f'viewBox="0 0 {w} {h}" role="img" aria-label="{escape(title)}">'
    )
    ground = f'<rect class="ground" width="{w}" height="{h}" rx="6"/>'
    return (
        "\n".join([head, f"<title>{escape(title)}</title>", _style(theme), ground, *body])
        + "\n</svg>\n"
    )


def _text(x: float, y: float, text: str, kind: str, size: float, more: str = "") -> str:
    return (
        f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" font-size="{size}" '
        f'xml:space="preserve"{more}>{escape(text)}</text>'
    )


def tree_svg(
    tree: Tree,
    accept: Accept | None = None,
    *,
    request: int = 0,
    label: Label | None = None,
    theme: Theme = "auto",
) -> str:
    """A request's draft tree as SVG: tokens, under each its score, the accepted path in green.

    Args:
        tree, accept, request, label: as for `tree_text`.
        theme: "auto" follows the reader's colour scheme; "light" or "dark" fixes one.
    """
    nodes, _ = _layout(tree, accept, request, label)
    bonus = _bonus(accept, request, label)
    end = max((i for i, node in enumerate(nodes) if node.accepted), default=-1)
    character, row, high, gap, margin = 7.3, 40.0, 20.0, 26.0, 16.0

    def wide(text: str) -> float:
        return max(34.0, character * len(text) + 12)

    columns = [0.0] * (2 + max(node.depth for node in nodes))
    for node in nodes:
        columns[node.depth] = max(columns[node.depth], wide(node.label))
    if bonus is not None and end >= 0:
        columns[nodes[end].depth + 1] = max(columns[nodes[end].depth + 1], wide(bonus))
    left = [margin]
    for width in columns:
        left.append(left[-1] + width + gap)

    def place(i: int) -> tuple[float, float]:
        """Left and middle of a node's box."""
        return left[nodes[i].depth], margin + high / 2 + row * nodes[i].line

    edges: list[tuple[bool, str]] = []
    boxes: list[str] = []
    for i, node in enumerate(nodes):
        x, y = place(i)
        width = wide(node.label)
        kind = "go-box" if node.accepted else "box"
        boxes.append(
            f'<rect class="{kind}" x="{x:.1f}" y="{y - high / 2:.1f}" width="{width:.1f}" '
            f'height="{high:g}" rx="5"/>'
        )
        weight = ' font-weight="bold"' if node.accepted else ""
        boxes.append(_text(x + 6, y + 4, node.label, "ink", 12, weight))
        if i and tree.scores is not None:
            boxes.append(_text(x + 6, y + high / 2 + 10, f"{node.score:.2f}", "quiet", 9))
        for child in node.children:
            cx, cy = place(child)
            begin = x + width
            turn = cx - gap / 2
            path = f"M{begin:.1f} {y:.1f}H{cx:.1f}"
            if cy != y:
                path = f"M{begin:.1f} {y:.1f}H{turn - 5:.1f}q5 0 5 5V{cy - 5:.1f}q0 5 5 5H{cx:.1f}"
            edges.append((node.accepted and nodes[child].accepted, path))
    if bonus is not None and end >= 0:
        # Where a child has that place, the legend alone names the bonus.
        x, y = place(end)
        begin, width = x + wide(nodes[end].label), wide(bonus)
        bx = left[nodes[end].depth + 1]
        taken = any(n.line == nodes[end].line and n.depth > nodes[end].depth for n in nodes)
        if not taken:
            edges.append((True, f"M{begin:.1f} {y:.1f}H{bx:.1f}"))
            boxes.append(
                f'<rect class="bonus" x="{bx:.1f}" y="{y - high / 2:.1f}" width="{width:.1f}" '
                f'height="{high:g}" rx="5"/>'
            )
            boxes.append(_text(bx + 6, y + 4, bonus, "go-ink", 12))
    edges.sort()  # the accepted path over the others
    lines = [
        f'<path class="{"go-edge" if go else "edge"}" stroke-width="{1.2 + go}" d="{path}"/>'
        for go, path in edges
    ]
    bottom = margin + row * (1 + max(node.line for node in nodes)) + 22
    legend = _summary(nodes, accept, bonus)
    legend += "; under a token: sum of log-probs" if tree.scores is not None else ""
    lines.append(_text(margin, bottom - 14, legend, "quiet", 11))
    width = max(left[-1] - gap, margin + 6.7 * len(legend)) + margin
    return _document(width, bottom, f"draft tree of {len(nodes) - 1} nodes", theme, lines + boxes)


def _ticks(top: float) -> list[float]:
    """Round numbers from 0 to `top`, about five."""
    step = 10 ** math.floor(math.log10(top / 4))
    step *= next(m for m in (1, 2, 2.5, 5, 10) if top / (m * step) <= 6)
    return [step * i for i in range(int(top / step) + 1)]


def acceptance_svg(
    tokens: Mapping[int, float],
    references: Mapping[str, float] | None = None,
    *,
    theme: Theme = "auto",
) -> str:
    """Tokens a target pass against the trees' budget, as SVG.

    Args:
        tokens: budget -> tokens a pass.
        references: name -> tokens a pass of what has no budget, such as the chain: dashed lines.
        theme: as for `tree_svg`.
    """
    if not tokens:
        raise ValueError("tokens: expected at least one budget, got none")
    references = references or {}
    budgets = sorted(tokens)
    top = 1.1 * max([*tokens.values(), *references.values()])
    width, height, x0, x1, y0, y1 = 560, 320, 56, 470, 276, 44

    def x(i: int) -> float:
        return (
            (x0 + x1) / 2
            if len(budgets) == 1
            else x0 + 24 + (x1 - x0 - 48) * i / (len(budgets) - 1)
        )

    def y(value: float) -> float:
        return y0 + (y1 - y0) * value / top

    body = [_text(x0 - 40, 26, "tokens a target pass, by node budget of the tree", "ink", 13)]
    for tick in _ticks(top):
        at = y(tick)
        body.append(f'<path class="edge" stroke-width="0.6" d="M{x0} {at:.1f}H{x1}"/>')
        body.append(_text(x0 - 8, at + 4, f"{tick:g}", "quiet", 11, ' text-anchor="end"'))
    for name, value in references.items():
        at = y(value)
        body.append(
            f'<path class="other-edge" stroke-width="1.5" stroke-dasharray="6 4" '
            f'd="M{x0} {at:.1f}H{x1}"/>'
        )
        body.append(_text(x1 + 8, at + 4, f"{name} {value:.2f}", "other-ink", 12))
    points = [(x(i), y(tokens[budget])) for i, budget in enumerate(budgets)]
    line = "L".join(f"{px:.1f} {py:.1f}" for px, py in points)
    body.append(f'<path class="go-edge" stroke-width="2.5" stroke-linejoin="round" d="M{line}"/>')
    middle = ' text-anchor="middle"'
    for budget, (px, py) in zip(budgets, points, strict=True):
        body.append(f'<circle class="dot" stroke-width="2" cx="{px:.1f}" cy="{py:.1f}" r="5"/>')
        body.append(_text(px, py - 11, f"{tokens[budget]:.2f}", "go-ink", 12, middle))
        body.append(_text(px, y0 + 20, f"{budget}", "quiet", 12, middle))
    body.append(_text((x0 + x1) / 2, y0 + 38, "budget", "quiet", 12, middle))
    return _document(width, height, "tokens a target pass by node budget", theme, body)


def plot_acceptance(
    path: str | Path, tokens: Mapping[int, float], references: Mapping[str, float] | None = None
) -> None:
    """Writes the plot of `acceptance_svg`; another suffix than .svg is drawn by matplotlib."""
    path = Path(path)
    if path.suffix == ".svg":
        path.write_text(acceptance_svg(tokens, references), encoding="utf-8")
        return
    try:
        drawing: Any = importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise ImportError(
            f"{path.name}: formats other than .svg need matplotlib, which is not installed"
        ) from error
    figure = drawing.Figure(figsize=(5.6, 3.2), layout="constrained")
    axes = figure.subplots()
    budgets: Sequence[int] = sorted(tokens)
    axes.plot(
        range(len(budgets)),
        [tokens[b] for b in budgets],
        "o-",
        color=_COLORS["go"][0],
        label="tree",
    )
    for name, value in (references or {}).items():
        axes.axhline(value, linestyle="--", color=_COLORS["other"][0])
        axes.annotate(f"{name} {value:.2f}", (0, value), (2, 3), textcoords="offset points")
    axes.set_xticks(range(len(budgets)), [str(b) for b in budgets])
    axes.set(xlabel="budget", ylabel="tokens a target pass")
    axes.set_ylim(bottom=0)
    figure.savefig(path, dpi=200)
