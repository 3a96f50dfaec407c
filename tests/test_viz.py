"""kdtree.viz: what the pictures say, and that they are well formed in both themes."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from itertools import pairwise

import kdtree
import numpy as np
import pytest
from kdtree import reference, viz
from kdtree.records import Accept, Tree
from support import random_parents

SVG = "{http://www.w3.org/2000/svg}"


def names(token: int) -> str:
    return "abcdefghijklmnopqrstuvwxyz"[token]


@pytest.fixture
def picture() -> tuple[Tree, Accept]:
    """a - b - c, a - b - d, a - e; the target walks b, d, then z."""
    parents = np.array([[-1, 0, 1, 0, 1]], np.int32)
    tree = reference.tree_links(
        parents,
        np.array([5], np.int32),
        prefix_lens=np.array([9], np.int32),
        draft_tokens=np.array([[0, 1, 2, 4, 3]]),
    )
    tree.scores = np.array([[0, -0.5, -1.25, -2, -2.5]], np.float32)
    accept = kdtree.tree_accept(tree, np.array([[1, 3, 25, 25, 25]]))
    return tree, accept


def test_text(picture):
    tree, accept = picture
    assert viz.tree_text(tree, accept, label=names, color=False).splitlines() == [
        "[a] ┬ [b] ┬ c  -1.25",
        "    │     ╰─ [d]  -2.50",
        "    ╰─ e  -2.00",
        '4 nodes, 2 accepted, then "z" from the target',
    ]


def test_text_without_accept_and_scores(picture):
    tree, _ = picture
    tree.scores = None
    assert viz.tree_text(tree, color=False).splitlines() == [
        "0 ┬ 1 ┬ 2",
        "  │   ╰─ 3",
        "  ╰─ 4",
        "4 nodes",
    ]


def test_colour_adds_nothing_but_colour(picture):
    tree, accept = picture
    plain = viz.tree_text(tree, None, label=names, color=False)
    colored = viz.tree_text(tree, None, label=names)
    assert colored != plain
    assert re.sub(r"\x1b\[[0-9;]*m", "", colored) == plain
    assert "\x1b[1;32md\x1b[0m" in viz.tree_text(tree, accept, label=names)


def test_white_space_is_visible(picture):
    tree, _ = picture
    text = viz.tree_text(tree, label=lambda token: "\n \x1b\t"[: token % 5], color=False)
    assert "⏎·\\x1b⇥" in text
    assert "\x1b" not in text
    assert "∅" in text


@pytest.mark.parametrize("theme", ["auto", "light", "dark"])
def test_svg(picture, theme):
    tree, accept = picture
    svg = viz.tree_svg(tree, accept, label=lambda token: "<&" + names(token), theme=theme)
    root = ET.fromstring(svg)
    texts = [e.text for e in root.iter(f"{SVG}text")]
    assert [t for t in texts if t and t.startswith("<&")] == [
        "<&a",
        "<&b",
        "<&c",
        "<&e",
        "<&d",
        "<&z",
    ]
    assert {"-0.50", "-1.25", "-2.00", "-2.50"} <= set(texts)
    boxes = [e.get("class") for e in root.iter(f"{SVG}rect")]
    assert boxes.count("go-box") == 3
    assert boxes.count("box") == 2
    assert boxes.count("bonus") == 1
    assert ("prefers-color-scheme:dark" in svg) == (theme == "auto")
    width, height = float(root.get("width", 0)), float(root.get("height", 0))
    for box in root.iter(f"{SVG}rect"):
        assert float(box.get("x", 0)) + float(box.get("width", 0)) <= width
        assert float(box.get("y", 0)) + float(box.get("height", 0)) <= height


def test_every_node_of_large_trees_is_there_once(backend, rng):
    parents = random_parents(rng, 3, 65)
    tokens = rng.permuted(np.tile(np.arange(100, 165), (3, 1)), axis=1)
    tree = reference.tree_links(
        parents,
        np.array([65, 65, 1], np.int32),
        prefix_lens=np.zeros(3, np.int32),
        draft_tokens=tokens,
    )
    given = backend.put(tree)
    for b, count in ((0, 65), (1, 65), (2, 1)):
        *lines, summary = viz.tree_text(given, request=b, color=False).splitlines()
        assert summary == f"{count - 1} nodes"
        found = [int(x) for line in lines for x in re.findall(r"\d+", line)]
        assert sorted(found) == sorted(tokens[b, :count].tolist())
        assert lines == [line.rstrip() for line in lines]
        # Each line but the first hangs from a junction above it.
        for above, line in pairwise(lines):
            at = max(line.find("├"), line.find("╰"))
            assert above[at] in "┬├│"
        root = ET.fromstring(viz.tree_svg(given, request=b))
        places = [
            (box.get("x"), box.get("y"))
            for box in root.iter(f"{SVG}rect")
            if box.get("class") == "box"
        ]
        assert len(set(places)) == count


def test_padding_request(picture):
    tree, _ = picture
    tree.num_nodes = np.array([0], np.int32)
    with pytest.raises(ValueError, match="request: expected one with a tree, got 0"):
        viz.tree_text(tree)


def test_broken_parents(picture):
    tree, _ = picture
    tree.parents = np.array([[-1, 0, 3, 0, 1]], np.int32)
    with pytest.raises(ValueError, match=r"tree.parents: expected 0..1 in slot 2, got 3"):
        viz.tree_svg(tree)


def test_acceptance_plot(tmp_path):
    file = tmp_path / "plot.svg"
    viz.plot_acceptance(file, {8: 3.5, 64: 4.75, 16: 4.0}, {"chain": 3.25})
    root = ET.parse(file).getroot()
    texts = [e.text for e in root.iter(f"{SVG}text")]
    assert {"3.50", "4.00", "4.75", "chain 3.25", "8", "16", "64"} <= set(texts)
    dots = [(float(e.get("cx", 0)), float(e.get("cy", 0))) for e in root.iter(f"{SVG}circle")]
    assert dots == sorted(dots)
    assert [y for _, y in dots] == sorted((y for _, y in dots), reverse=True)


def test_one_budget_and_none():
    assert "<circle" in viz.acceptance_svg({8: 2.0})
    with pytest.raises(ValueError, match="tokens: expected at least one budget"):
        viz.acceptance_svg({})


def test_png_needs_matplotlib(tmp_path):
    file = tmp_path / "plot.png"
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        with pytest.raises(ImportError, match=r"plot.png: .* need matplotlib"):
            viz.plot_acceptance(file, {8: 2.0, 16: 3.0}, {"chain": 1.5})
        return
    viz.plot_acceptance(file, {8: 2.0, 16: 3.0}, {"chain": 1.5})
    assert file.read_bytes().startswith(b"\x89PNG")
