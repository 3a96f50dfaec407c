"""The text: Python's own standard library, as installed with Python 3.11.7 (PSF licence).

    python -m tiny_mla.data OUT     (in examples/, with that Python)

writes OUT/train.npy and OUT/heldout.npy (token ids of all files, in the order of their paths, a
separator before each), tokenizer.json and prompts.jsonl. Files go to the held-out side by a hash
of their path, so the split is the same on every machine. Nothing held out was ever seen by the
tokenizer or the models. The files tokenizer.json and prompts.jsonl of this folder were made so.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import random
import sysconfig
from pathlib import Path

import numpy as np

from tiny_mla.tokenizer import Tokenizer, learn

#: Not prose or programs but tables, other people's work, or test inputs meant to be odd.
LEFT_OUT = ("site-packages/", "encodings/", "lib2to3/tests/data/", "pydoc_data/", "config-")
PROMPTS = 256


def read(stdlib: Path) -> dict[str, str]:
    """Path -> text of every source file that is used, in the order of the paths."""
    texts = {}
    for path in sorted(stdlib.rglob("*.py"), key=lambda p: p.relative_to(stdlib).as_posix()):
        name = path.relative_to(stdlib).as_posix()
        if name.startswith(LEFT_OUT):
            continue
        try:
            text = path.read_bytes().decode("utf-8").replace("\r\n", "\n")
        except UnicodeDecodeError:  # test inputs of the tokenizer's encodings
            continue
        if text.strip():
            texts[name] = text
    return texts


def held_out(name: str) -> bool:
    """About one file in twenty."""
    return hashlib.sha256(name.encode()).digest()[0] < 13


def prompts(texts: dict[str, str], tokenizer: Tokenizer) -> list[dict[str, str]]:
    """PROMPTS beginnings: from the start of a random line, 16 to 64 tokens."""
    rng = random.Random(0)
    found: list[dict[str, str]] = []
    names = list(texts)
    while len(found) < PROMPTS:
        name = rng.choice(names)
        lines = texts[name].split("\n")
        start = rng.randrange(len(lines))
        ids = tokenizer.encode("\n".join(lines[start : start + 40]))[: rng.randint(16, 64)]
        text = tokenizer.decode(ids)
        if len(ids) >= 16 and text.isascii() and text.strip() and tokenizer.encode(text) == ids:
            found.append({"file": name, "text": text})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="make the training data")
    parser.add_argument("out", type=Path)
    parser.add_argument("--vocab", type=int, default=1024)
    args = parser.parse_args()
    texts = read(Path(sysconfig.get_paths()["stdlib"]))
    train = {name: text for name, text in texts.items() if not held_out(name)}
    held = {name: text for name, text in texts.items() if held_out(name)}
    tokenizer = Tokenizer(learn(train.values(), args.vocab))
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(args.out / "tokenizer.json")
    summary: dict[str, object] = {"python": platform.python_version()}
    for split, part in (("train", train), ("heldout", held)):
        ids: list[int] = []
        for text in part.values():
            ids += [tokenizer.separator, *tokenizer.encode(text)]
        array = np.array(ids, np.uint16)
        np.save(args.out / f"{split}.npy", array)
        summary[split] = {
            "files": len(part),
            "characters": sum(map(len, part.values())),
            "tokens": len(ids),
            "sha256": hashlib.sha256(array.tobytes()).hexdigest(),
        }
    with (args.out / "prompts.jsonl").open("w") as file:
        for prompt in prompts(held, tokenizer):
            file.write(json.dumps(prompt) + "\n")
    (args.out / "data.json").write_text(json.dumps(summary, indent=2) + "\n")
    print(json.dumps(summary, indent=2))


if __name__ == "__main__":
    main()
