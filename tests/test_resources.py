"""What the kernels in the library take, as cuobjdump tells, where it is installed.

Dynamic shared memory is not in there: static_asserts beside the kernels bound it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest
from kdtree import ctypes_api

#: Bytes of shared memory that a block may have.
LIMITS = {
    "80": 166_912, "86": 101_376, "89": 101_376, "90": 232_448, "100": 232_448, "120": 101_376,
    "121": 101_376,
}  # fmt: skip


def test_no_kernel_spills_and_shared_memory_fits() -> None:
    wheel = Path(sysconfig.get_path("purelib"), "nvidia", "cu13", "bin")
    tool = shutil.which("cuobjdump", path=os.pathsep.join((os.environ["PATH"], str(wheel))))
    if tool is None:
        pytest.skip("cuobjdump is not installed")
    done = subprocess.run(
        [tool, "--dump-resource-usage", str(ctypes_api.library_path())],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    claimed = ctypes_api.build_info()["cuda_archs"].split(",")
    built = {re.sub("[af]$", "", arch) for arch in claimed if not arch.endswith("-virtual")}
    seen = set()
    arch = ""
    for line in done.stdout.splitlines():
        if match := re.match(r"arch = sm_(\d+)", line):
            arch = match[1]
        elif match := re.match(r" Function (\S+):", line):
            name = match[1]
        elif match := re.match(r"  REG:\d+ STACK:(\d+) SHARED:(\d+) LOCAL:(\d+) ", line):
            stack, shared, local = map(int, match.groups())
            assert (stack, local) == (0, 0), f"{name} of sm_{arch} spills"
            assert shared <= LIMITS[arch], f"{name} of sm_{arch}"
            seen.add(arch)
    assert seen == built
