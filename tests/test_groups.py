"""The bodies that CPU and GPU share, run by 32 lanes: as fibers, where a divergent collective
aborts, and as threads under ThreadSanitizer, where a missing sync is a data race. Both programs of
tests/cpp also prove that they catch what they are for."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
COMPILER = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")


def build(source: Path, program: Path, *options: str) -> None:
    assert COMPILER is not None
    command = [*COMPILER.split(), "-std=c++20", "-O1", "-Wall", "-Wextra", "-ffp-contract=off"]
    command += [f"-I{ROOT / 'src'}", *options, str(source), "-o", str(program), "-pthread"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def run(program: Path) -> None:
    result = subprocess.run([str(program)], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, f"status {result.returncode}\n{result.stdout}{result.stderr}"


def has_thread_sanitizer(folder: Path) -> bool:
    """It may not be installed, or not start under the machine's address layout."""
    (folder / "probe.cpp").write_text("int main() {}\n")
    try:
        build(folder / "probe.cpp", folder / "probe", "-fsanitize=thread")
        run(folder / "probe")
    except AssertionError:
        return False
    return True


pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason="no C++ compiler"),
    pytest.mark.skipif(not (ROOT / "src/tree").is_dir(), reason="no source tree beside the tests"),
]


def test_as_fibers(tmp_path: Path) -> None:
    build(ROOT / "tests/cpp/fibers.cpp", tmp_path / "fibers")
    run(tmp_path / "fibers")


def test_as_threads(tmp_path: Path) -> None:
    if not has_thread_sanitizer(tmp_path):
        pytest.skip("no ThreadSanitizer")
    build(ROOT / "tests/cpp/threads.cpp", tmp_path / "threads", "-fsanitize=thread", "-g")
    run(tmp_path / "threads")
