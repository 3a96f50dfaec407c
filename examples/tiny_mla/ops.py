"""The few array operations in which NumPy and torch differ.

The models are written once, in operators and methods that both libraries share (`@`, `*`,
`reshape`, `swapaxes`, indexing); what is spelled differently is here, twice. NumPy is enough to
decode on a CPU; torch serves the GPU and the training.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

Array = Any  # numpy.ndarray or torch.Tensor


class Ops(Protocol):
    """What the models and the decoding loop ask of an array library."""

    on_gpu: bool
    float16: Any
    float32: Any
    int32: Any
    int64: Any

    def asarray(self, values: Any, dtype: Any = None) -> Array: ...
    def zeros(self, shape: Sequence[int], dtype: Any) -> Array: ...
    def cast(self, x: Array, dtype: Any) -> Array: ...
    def concat(self, parts: Sequence[Array], axis: int = -1) -> Array: ...
    def where(self, condition: Array, x: Any, y: Any) -> Array: ...
    def rms_norm(self, x: Array, weight: Array, eps: float) -> Array: ...
    def silu(self, x: Array) -> Array: ...
    def numpy(self, x: Array) -> np.ndarray[Any, Any]: ...
    def wait(self) -> None: ...
    def capture(self, step: Callable[[], None]) -> Callable[[], None]: ...


class NumpyOps:
    """NumPy, on the CPU."""

    on_gpu = False
    float16, float32, int32, int64 = np.float16, np.float32, np.int32, np.int64

    def asarray(self, values: Any, dtype: Any = None) -> Array:
        return np.asarray(values, dtype=dtype)

    def zeros(self, shape: Sequence[int], dtype: Any) -> Array:
        return np.zeros(shape, dtype)

    def cast(self, x: Array, dtype: Any) -> Array:
        return x.astype(dtype, copy=False)

    def concat(self, parts: Sequence[Array], axis: int = -1) -> Array:
        return np.concatenate(parts, axis)

    def where(self, condition: Array, x: Any, y: Any) -> Array:
        return np.where(condition, x, y)

    def rms_norm(self, x: Array, weight: Array, eps: float) -> Array:
        square = np.einsum("...i,...i->...", x, x)[..., None] / np.float32(x.shape[-1])
        return x * (1 / np.sqrt(square + np.float32(eps))) * weight

    def silu(self, x: Array) -> Array:
        half = np.float32(0.5)
        return x * (half + half * np.tanh(half * x))

    def numpy(self, x: Array) -> np.ndarray[Any, Any]:
        return np.asarray(x)

    def wait(self) -> None:
        """Nothing is ever pending."""

    def capture(self, step: Callable[[], None]) -> Callable[[], None]:
        return step


class TorchOps:
    """torch, on any of its devices."""

    def __init__(self, device: str = "cpu") -> None:
        import torch

        self.torch, self.device = torch, torch.device(device)
        self.on_gpu = self.device.type == "cuda"
        self.float16, self.float32 = torch.float16, torch.float32
        self.int32, self.int64 = torch.int32, torch.int64

    def asarray(self, values: Any, dtype: Any = None) -> Array:
        return self.torch.asarray(values, dtype=dtype, device=self.device)

    def zeros(self, shape: Sequence[int], dtype: Any) -> Array:
        return self.torch.zeros(*shape, dtype=dtype, device=self.device)

    def cast(self, x: Array, dtype: Any) -> Array:
        return x.to(dtype)

    def concat(self, parts: Sequence[Array], axis: int = -1) -> Array:
        return self.torch.cat(list(parts), axis)

    def where(self, condition: Array, x: Any, y: Any) -> Array:
        return self.torch.where(condition, x, y)

    def rms_norm(self, x: Array, weight: Array, eps: float) -> Array:
        return self.torch.nn.functional.rms_norm(x.float(), x.shape[-1:], weight, eps)

    def silu(self, x: Array) -> Array:
        return self.torch.nn.functional.silu(x)

    def numpy(self, x: Array) -> np.ndarray[Any, Any]:
        return np.asarray(x.cpu())

    def wait(self) -> None:
        """Until the device has done all that was asked of it."""
        if self.on_gpu:
            self.torch.cuda.synchronize()

    def capture(self, step: Callable[[], None]) -> Callable[[], None]:
        """The step as one CUDA graph; run now a few times, so it must do nothing yet."""
        if not self.on_gpu:
            return step
        torch = self.torch
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        return graph.replay
