#!/usr/bin/env python3
"""Builds the source distribution, and from it one wheel for each Python named.

    scripts/build.py --python python3.11 --python python3.12 --out dist

The wheels hold the code of a release unless --archs says otherwise, and are repaired
(scripts/repair.py): the same steps that make a release, without its container. Needs the packages
of the dependency group `release`. A CUDA toolkit is not needed, and used only where CUDACXX names
one.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from repair import repair

ROOT = Path(__file__).parents[1]
#: Would change the code that compilers make.
FLAGS = {"CFLAGS", "CPPFLAGS", "CXXFLAGS", "CUDAFLAGS", "LDFLAGS", "CMAKE_ARGS"}
FLAGS |= {"NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS", "SKBUILD_CMAKE_ARGS"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--python", action="append", default=[], help="build a wheel for this one")
    parser.add_argument("--archs", default="release", help='KDTREE_CUDA_ARCH, e.g. "90;120"')
    parser.add_argument("--out", type=Path, default=Path("dist"), help="default: dist")
    options = parser.parse_args()
    for path in build(options.out, options.python, options.archs):
        print(path)


def build(out: Path, pythons: list[str], archs: str) -> list[Path]:
    """The paths of the source distribution and the wheels."""
    sdist = build_sdist(out)
    return [sdist, *(build_wheel(sdist, out, python, archs) for python in pythons)]


def build_sdist(out: Path) -> Path:
    with tempfile.TemporaryDirectory() as folder:
        run(sys.executable, "-m", "build", "--sdist", "--outdir", folder, str(ROOT))
        (made,) = Path(folder).iterdir()
        out.mkdir(parents=True, exist_ok=True)
        return Path(made.replace(out / made.name))


def build_wheel(sdist: Path, out: Path, python: str, archs: str) -> Path:
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(sdist) as archive:
            archive.extractall(folder, filter="data")
        (source,) = Path(folder).iterdir()
        setting = f"--config-settings=cmake.define.KDTREE_CUDA_ARCH={archs}"
        run(python, "-m", "pip", "wheel", "--no-deps", "-w", f"{folder}/raw", setting, str(source))
        (raw,) = Path(folder, "raw").iterdir()
        return repair(raw, out)


def run(*command: str) -> None:
    """Runs quietly; what was printed is shown if it fails."""
    environment = {name: value for name, value in os.environ.items() if name not in FLAGS}
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode:
        sys.exit(f"{done.stdout}\n{' '.join(command)}: failed with status {done.returncode}")


if __name__ == "__main__":
    main()
