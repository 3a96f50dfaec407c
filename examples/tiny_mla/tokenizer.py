"""A byte-pair tokenizer: 256 bytes, learned merges, and one mark between files."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from functools import cached_property, lru_cache
from itertools import pairwise
from pathlib import Path

#: What merges never cross: an indented line break, a word, a number, a run of signs, spaces.
WORDS = re.compile(r"\n[ \n]*| ?[A-Za-z]+| ?[0-9]+| ?[^\sA-Za-z0-9]+| +(?= )|\s")

Pair = tuple[int, int]


def join(ids: Sequence[int], pair: Pair, new: int) -> list[int]:
    """`ids` with every `pair`, from the left, replaced by `new`."""
    out: list[int] = []
    for i in ids:
        if out and out[-1] == pair[0] and i == pair[1]:
            out[-1] = new
        else:
            out.append(i)
    return out


def learn(texts: Iterable[str], vocab_size: int) -> list[Pair]:
    """The merges: again and again the most frequent pair, the smallest one on ties."""
    counts = Counter(word for text in texts for word in WORDS.findall(text))
    words = [list(word.encode()) for word in counts]
    weights = list(counts.values())
    pairs: Counter[Pair] = Counter()
    where: defaultdict[Pair, set[int]] = defaultdict(set)
    for w, ids in enumerate(words):
        for pair in pairwise(ids):
            pairs[pair] += weights[w]
            where[pair].add(w)
    merges: list[Pair] = []
    for new in range(256, vocab_size - 1):
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(best)
        for w in where[best]:
            for pair in pairwise(words[w]):
                pairs[pair] -= weights[w]
            words[w] = join(words[w], best, new)
            for pair in pairwise(words[w]):
                pairs[pair] += weights[w]
                where[pair].add(w)
    return merges


class Tokenizer:
    """Text to ids and back. Ids: bytes, then merges in the order learned, then `separator`."""

    def __init__(self, merges: Sequence[Pair]) -> None:
        self.merges = [(left, right) for left, right in merges]
        self.rank = {pair: 256 + i for i, pair in enumerate(self.merges)}
        self.separator = 256 + len(self.merges)
        self.vocab_size = self.separator + 1
        self.word = lru_cache(maxsize=1 << 16)(self._word)

    @classmethod
    def load(cls, path: Path) -> Tokenizer:
        return cls(json.loads(path.read_text())["merges"])

    def save(self, path: Path) -> None:
        path.write_text(json.dumps({"merges": self.merges}, separators=(",", ":")) + "\n")

    def _word(self, word: str) -> list[int]:
        ids = list(word.encode())
        while len(ids) > 1:
            found = [self.rank[p] for p in pairwise(ids) if p in self.rank]
            if not found:
                break
            first = min(found)
            ids = join(ids, self.merges[first - 256], first)
        return ids

    def encode(self, text: str) -> list[int]:
        return [i for word in WORDS.findall(text) for i in self.word(word)]

    @cached_property
    def pieces(self) -> list[bytes]:
        """The bytes of each id."""
        pieces = [bytes([i]) for i in range(256)]
        for left, right in self.merges:
            pieces.append(pieces[left] + pieces[right])
        return [*pieces, b""]

    def decode(self, ids: Iterable[int]) -> str:
        return b"".join(self.pieces[i] for i in ids).decode(errors="replace")
