"""The compiled module, or the reason why there is none.

A load failure is kept and raised, with its cause, at the first use: `import kdtree` and
`python -m kdtree` work without a loadable library and can say what is wrong.
"""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    import kdtree._core as core
else:
    import importlib

    try:
        core = importlib.import_module("kdtree._core")
    except ImportError as error:

        class _Unavailable:
            """Stands for the compiled module; every use raises the load error."""

            load_error = error

            def __getattr__(self, name: str) -> Any:
                raise ImportError(
                    f"kdtree's compiled library could not be loaded: {self.load_error}"
                ) from self.load_error

        core = _Unavailable()


class Array(Protocol):
    """A NumPy array, a torch tensor (CPU or CUDA) or any other DLPack producer."""

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...

    def __dlpack_device__(self) -> tuple[Any, Any]: ...


ArrayT = TypeVar("ArrayT", bound=Array)
RecordT = TypeVar("RecordT")

#: `stream=` of every op: see `kdtree`.
Stream = Any


def record(name: str, value: object, kind: type[RecordT]) -> RecordT:
    """`value` as the record type that an argument needs."""
    if not isinstance(value, kind):
        expected = f"kdtree.{kind.__name__}"
        got = "None" if value is None else f"{type(value).__module__}.{type(value).__qualname__}"
        raise TypeError(f"{name}: expected a {expected}, got {got}")
    return value


def parse_device(device: object) -> tuple[int, int]:
    """DLPack's (device type, ordinal) of a torch.device, "cpu" or "cuda:N"."""
    found = re.fullmatch(r"cpu(?::0)?|cuda(?::([0-9]{1,9}))?", str(device))
    if found is None:
        raise ValueError(f"device: expected a torch.device, 'cpu' or 'cuda:N', got {device!r}")
    if found[0].startswith("cpu"):
        return 1, 0
    if found[1] is not None:
        return 2, int(found[1])
    torch = sys.modules.get("torch")  # its current device, as torch.device("cuda") means it
    return 2, torch.cuda.current_device() if torch and torch.cuda.is_available() else 0


__all__ = ["Array", "ArrayT", "Stream", "core", "parse_device", "record"]
