"""What is installed: names, versions, exports, dependencies, and what importing it does."""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import kdtree
import pytest
from kdtree import _lib, ctypes_api

ROOT = Path(__file__).parents[1]
LIBRARY = ctypes_api.library_path()
EXTENSION = Path(_lib.core.__file__)


def python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd="/", capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# ---- importing


def test_import_is_fast() -> None:
    code = "import time; start = time.perf_counter(); import kdtree; "
    code += "print(time.perf_counter() - start)"
    seconds = statistics.median(float(python(code)) for _ in range(7))
    assert seconds < 0.2


def test_import_imports_no_array_library_and_touches_no_cuda() -> None:
    python("""if True:
        import sys
        import kdtree
        for name in ("numpy", "torch", "ml_dtypes", "cupy"):
            assert name not in sys.modules, name
        maps = open("/proc/self/maps").read()
        assert "kdtree_kernels_c" in maps
        for name in ("libcuda", "libcudart", "libnvidia"):
            assert name not in maps, name
        """)


def test_survives_fork() -> None:
    """An op in the parent, whatever threads that starts, then one in the child."""
    python("""if True:
        import os, signal
        import numpy as np
        import kdtree

        def attend():
            q = np.ones((4, 33, 8, 576), np.float16)
            cache = np.ones((4 * 5, 64, 576), np.float16)
            table = np.arange(20, dtype=np.int32).reshape(4, 5)
            lens = np.full(4, 250, np.int32)
            return kdtree.verify_attn(q, cache, table, lens, sm_scale=0.01)

        def in_child():
            child = os.fork()
            if child == 0:
                signal.alarm(30)  # a hang ends as a failure
                ok = False
                try:
                    ok = bool((attend() == 1).all())
                finally:
                    os._exit(0 if ok else 1)
            assert os.waitpid(child, 0)[1] == 0

        in_child()
        assert (attend() == 1).all()
        in_child()
        assert (attend() == 1).all()
        """)


# ---- the binaries


def tool(name: str, *arguments: str | Path) -> str:
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"no {name}")
    return subprocess.run([path, *arguments], check=True, capture_output=True, text=True).stdout


def test_exports() -> None:
    lines = tool("nm", "-D", "--defined-only", LIBRARY).splitlines()
    names = {line.split()[-1] for line in lines}
    assert names == set(ctypes_api.header().functions)


@pytest.mark.parametrize("path", [LIBRARY, EXTENSION], ids=["library", "extension"])
def test_needs(path: Path) -> None:
    needed = set(re.findall(r"\(NEEDED\).*\[(.*)\]", tool("readelf", "-d", path)))
    system = r"(libc|libm|libstdc\+\+|libgcc_s|libpthread|libdl|librt|ld-linux-x86-64)\.so\.\d+"
    others = {name for name in needed if not re.fullmatch(system, name)}
    assert others == (set() if path == LIBRARY else {LIBRARY.name})


def test_extension_finds_the_library_beside_it() -> None:
    assert re.search(r"\(R(UN)?PATH\).*\[\$ORIGIN\]", tool("readelf", "-d", EXTENSION))
    assert EXTENSION.parent == LIBRARY.parent


# ---- files, versions, names


def test_files() -> None:
    assert (Path(kdtree.__file__).parent / "py.typed").is_file()
    assert (LIBRARY.parent / "_core.pyi").is_file()
    assert ctypes_api.header_path() == LIBRARY.parent / "include" / "kdtree.h"


@pytest.mark.parametrize(
    ("installed", "committed"),
    [("include/kdtree.h", "src/kdtree.h"), ("_core.pyi", "python/kdtree/_core.pyi")],
)
def test_what_is_installed_is_what_is_committed(installed: str, committed: str) -> None:
    if not (ROOT / "src").is_dir():
        pytest.skip("the tests are not in a source tree")
    assert (LIBRARY.parent / installed).read_text() == (ROOT / committed).read_text()


def test_versions() -> None:
    version = kdtree.__version__
    assert importlib.metadata.version("kdtree-kernels") == version
    assert ctypes_api.build_info()["version"] == version
    project = ROOT / "pyproject.toml"
    if project.is_file():
        found = re.search(r'^version = "(.*)"$', project.read_text(), re.MULTILINE)
        assert found is not None
        assert found[1] == version


def test_limits() -> None:
    assert kdtree.MAX_QLEN == _lib.core.MAX_QLEN == ctypes_api.max_qlen()
    assert kdtree.MAX_K == _lib.core.MAX_K


@pytest.mark.parametrize("name", kdtree.__all__)
def test_public_names_are_documented(name: str) -> None:
    value = getattr(kdtree, name)
    if isinstance(value, int):
        source = Path(kdtree.__file__).read_text()
        assert re.search(rf"^#: .+\n{name} = ", source, re.MULTILINE)
        return
    assert value.__doc__
    if not isinstance(value, type):
        arguments = value.__code__.co_varnames[: value.__code__.co_argcount]
        for argument in arguments:
            assert f"{argument}:" in value.__doc__, argument


def test_star_import_gives_the_public_names() -> None:
    namespace: dict[str, object] = {}
    exec("from kdtree import *", namespace)
    assert set(namespace) - {"__builtins__"} == set(kdtree.__all__)
