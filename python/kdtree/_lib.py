"""The compiled module, or the reason why there is none.

A load failure is kept and raised, with its cause, at the first use: `import kdtree` and
`python -m kdtree` work without a loadable library and can say what is wrong.
"""

from __future__ import annotations

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

#: `stream=` of every op: a cudaStream_t as an int, or an object with `cuda_stream` (torch) or
#: `__cuda_stream__` (CUDA's stream protocol). None: the current stream of the arrays' library.
Stream = Any


def record(name: str, value: object, kind: type[RecordT]) -> RecordT:
    """`value` as the record type that an argument needs."""
    if not isinstance(value, kind):
        expected = f"kdtree.{kind.__name__}"
        got = "None" if value is None else f"{type(value).__module__}.{type(value).__qualname__}"
        raise TypeError(f"{name}: expected a {expected}, got {got}")
    return value


__all__ = ["Array", "ArrayT", "Stream", "core", "record"]
