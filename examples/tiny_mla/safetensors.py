"""The safetensors format, as much of it as the example needs: float16 arrays in one file.

Eight bytes of header length, a JSON header with each array's dtype, shape and place, the data.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np


def load(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Every array of the file, by name."""
    raw = path.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:start])
    header.pop("__metadata__", None)
    arrays = {}
    for name, entry in header.items():
        if entry["dtype"] != "F16":
            raise ValueError(f"{path}: {name}: expected dtype F16, got {entry['dtype']}")
        begin, end = entry["data_offsets"]
        values = np.frombuffer(raw[start + begin : start + end], "<f2")
        arrays[name] = values.reshape(entry["shape"])
    return arrays


def save(path: Path, arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
    """Write arrays as float16."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    chunks, place = [], 0
    for name, values in arrays.items():
        data = np.ascontiguousarray(values, "<f2").tobytes()
        header[name] = {
            "dtype": "F16",
            "shape": list(values.shape),
            "data_offsets": [place, place + len(data)],
        }
        chunks.append(data)
        place += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(chunks))
