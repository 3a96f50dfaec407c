"""What `python -m kdtree` shows: the library, what it was built for, and what is in this machine.

The standard library alone, and the C library through ctypes: it works where NumPy is missing, where
there is no driver, and where the package is broken, and says so.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import platform
import re
from pathlib import Path
from typing import Any

from kdtree import _lib, ctypes_api

__all__ = ["collect", "info", "text"]


def info(*, as_json: bool = False) -> int:
    """Prints the facts. Returns an exit status: 1 when nothing could be computed here."""
    facts = collect()
    print(json.dumps(facts, indent=2) if as_json else text(facts))
    return 0 if facts["loaded"] and facts["extension_error"] is None else 1


def collect() -> dict[str, Any]:
    """The facts, ready for JSON. What is missing is None, with an `..._error` beside it."""
    facts: dict[str, Any] = {
        "loaded": False,
        "error": None,
        "library": None,
        "max_qlen": None,
        "abi_version": None,
        "version": None,
        "commit": None,
        "cuda_archs": None,
        "cuda_toolkit": None,
    }
    try:
        facts["library"] = str(ctypes_api.library_path())
        facts["max_qlen"] = ctypes_api.max_qlen()
        facts["abi_version"] = ctypes_api.abi_version()
        facts.update(ctypes_api.build_info())
        facts["loaded"] = True
    except (ImportError, OSError, ValueError) as error:
        facts["error"] = str(error)
    facts.update(_machine() if facts["loaded"] else _no_machine("the library is not loaded"))
    broken = getattr(_lib.core, "load_error", None)
    facts["extension_error"] = None if broken is None else str(broken)
    facts["python"] = platform.python_version()
    facts["platform"] = f"{platform.system()} {platform.machine()}"
    facts["numpy"] = _installed("numpy")
    facts["torch"] = _installed("torch")
    facts["package"] = str(Path(__file__).parent)
    return facts


def _machine() -> dict[str, Any]:
    try:
        first = ctypes_api.device_info(0)
    except (RuntimeError, ValueError, TypeError, MemoryError) as error:
        return _no_machine(str(error))
    gpus = []
    for index in range(first["device_count"]):
        gpu: dict[str, Any] = {"index": index}
        try:
            found = first if index == 0 else ctypes_api.device_info(index)
            gpu["name"] = found["name"]
            gpu["sm"] = "sm_{}{}".format(*found["compute_capability"])
            gpu["sms"] = found["num_sms"]
            gpu["memory_bytes"] = found["total_memory"]
            gpu["path"] = found["path"] or None
            gpu["reason"] = found["reason"] or None
        except (RuntimeError, ValueError, TypeError, MemoryError) as error:
            gpu.update(name=None, sm=None, sms=None, memory_bytes=None, path=None)
            gpu["reason"] = str(error)
        gpus.append(gpu)
    cuda = first["driver_version"]
    return {
        "driver": _kernel_driver(),
        "driver_cuda": f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else None,
        "gpus": gpus,
        "gpus_error": None if gpus else first["reason"] or "no GPU",
    }


def _no_machine(reason: str) -> dict[str, Any]:
    return {"driver": _kernel_driver(), "driver_cuda": None, "gpus": [], "gpus_error": reason}


def _kernel_driver() -> str | None:
    try:
        line = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    found = re.search(r"Kernel Module\s.*?(\d+\.[\d.]+)", line)
    return found[1] if found else None


def _installed(module: str) -> str | None:
    """The version of a package, which is not imported; None: it cannot be."""
    try:
        if importlib.util.find_spec(module) is None:
            return None
    except (ImportError, ValueError):
        return None
    try:
        return importlib.metadata.version(module)
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"


def text(facts: dict[str, Any]) -> str:
    """The facts for reading; the first line is the verdict on the library."""
    name = "libkdtree_kernels_c"
    if facts["loaded"]:
        lines = [f"{name} loaded OK. MAX_QLEN={facts['max_qlen']}"]
        archs = ", ".join(f"sm_{arch}" for arch in facts["cuda_archs"].split(","))
        archs = re.sub(r"sm_(\d+)-virtual", r"compute_\1 (PTX)", archs)
        rows = [
            (
                "version",
                f"{facts['version']}, commit {facts['commit']}, ABI {facts['abi_version']}",
            ),
            ("architectures", archs),
            ("built with", f"CUDA toolkit {facts['cuda_toolkit']}"),
        ]
    else:
        lines = [f"{name} could not be loaded: {facts['error']}"]
        rows = []
    driver = facts["driver"] or ("version unknown" if facts["driver_cuda"] else "none found")
    cuda = f", for CUDA up to {facts['driver_cuda']}" if facts["driver_cuda"] else ""
    rows.append(("driver", driver + cuda))
    if not facts["gpus"]:
        rows.append(("GPU", f"none usable ({facts['gpus_error']}); CPU memory is served"))
    for gpu in facts["gpus"]:
        path = f"takes the {gpu['path']} path" if gpu["path"] else f"no path: {gpu['reason']}"
        if gpu["name"] is None:
            rows.append((f"GPU {gpu['index']}", path))
            continue
        size = f"{gpu['memory_bytes'] / 2**30:.1f} GiB"
        rows.append(
            (
                f"GPU {gpu['index']}",
                f"{gpu['name']}, {gpu['sm']}, {gpu['sms']} SMs, {size}: {path}",
            )
        )
    error = facts["extension_error"]
    rows += [
        ("Python", f"{facts['python']}, {facts['platform']}"),
        ("NumPy", facts["numpy"] or "not installed"),
        ("torch", facts["torch"] or "not installed"),
        ("extension", "loaded" if error is None else f"could not be loaded: {error}"),
        ("library", facts["library"] or "not found"),
        ("package", facts["package"]),
    ]
    lines += [f"  {label:<14} {value}" for label, value in rows]
    return "\n".join(lines)
