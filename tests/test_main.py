"""`python -m kdtree`, its check and its bench, whole and broken installations alike."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kdtree
import numpy as np
import pytest
from kdtree import check, ctypes_api, reference

PACKAGE = ctypes_api.library_path().parent
LOADED = "libkdtree_kernels_c loaded OK. MAX_QLEN=65"
OPS = {name for name in kdtree.__all__ if name.islower()} - {"verify_attn_workspace"}
BROKEN = "libkdtree_kernels_c could not be loaded: "

# Runs `python -m kdtree` with some modules hidden, installed or not.
HIDING = """
import runpy, sys
hidden = sys.argv.pop(1).split(",")
class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in hidden:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Hide())
runpy.run_module("kdtree", run_name="__main__", alter_sys=True)
"""


def run(
    *arguments: str, first_path: Path | None = None, hide: str = ""
) -> subprocess.CompletedProcess[str]:
    env = dict(os.environ)
    if first_path is not None:
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(first_path), env.get("PYTHONPATH")]))
    start = ["-c", HIDING, hide] if hide else ["-m", "kdtree"]
    return subprocess.run(
        [sys.executable, *start, *arguments],
        env=env,
        cwd="/",  # not the source tree
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.fixture
def copied(tmp_path: Path) -> Callable[..., Path]:
    """A folder with a copy of the installed package, without some files."""

    def copy(*without: str) -> Path:
        ignore = shutil.ignore_patterns("__pycache__", *without)
        for folder in map(Path, kdtree.__path__):  # two of them where it is installed editable
            shutil.copytree(folder, tmp_path / "kdtree", ignore=ignore, dirs_exist_ok=True)
        return tmp_path

    return copy


# ---- python -m kdtree


def test_sglang_that_is_not_there() -> None:
    done = run("sglang", hide="sglang")
    assert done.returncode == 1, done.stderr
    assert done.stdout == "SGLang is not installed\n" or "kdtree_mla: not hooked" in done.stdout


def test_info() -> None:
    done = run()
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == LOADED
    text = done.stdout
    assert kdtree.__version__ in text
    for label in ("architectures", "built with", "driver", "GPU", "Python", "NumPy", "torch"):
        assert any(line.split(label)[0].isspace() for line in lines[1:] if label in line), label
    assert str(ctypes_api.library_path()) in text
    assert f"NumPy          {np.__version__}" in text


def test_info_json() -> None:
    done = run("--json")
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["loaded"] is True
    assert facts["max_qlen"] == 65
    assert facts["version"] == kdtree.__version__
    assert facts["numpy"] == np.__version__
    assert facts["library"] == str(ctypes_api.library_path())
    count = ctypes_api.device_info()["device_count"]
    assert len(facts["gpus"]) == count
    for gpu in facts["gpus"]:
        assert gpu["path"] or gpu["reason"]
    if count == 0:
        assert facts["gpus_error"]


def test_info_without_numpy() -> None:
    done = run(hide="numpy,torch,ml_dtypes")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == LOADED
    assert "NumPy          not installed" in done.stdout


@pytest.mark.parametrize("command", ["check", "bench"])
def test_commands_without_numpy_say_so(command: str) -> None:
    done = run(command, hide="numpy,torch,ml_dtypes")
    assert done.returncode == 1
    assert "numpy" in done.stderr
    assert "Traceback" not in done.stderr


def test_info_imports_neither_numpy_nor_the_extension(copied: Callable[..., Path]) -> None:
    """The diagnosis stands on the C library alone: without _core it still works, and says so."""
    done = run(first_path=copied("_core*.so"))
    assert done.returncode == 1
    assert done.stdout.splitlines()[0] == LOADED
    assert "extension      could not be loaded: " in done.stdout
    assert "Traceback" not in done.stderr


def test_info_without_the_library(copied: Callable[..., Path]) -> None:
    folder = copied("*.so")
    done = run(first_path=folder)
    assert done.returncode == 1
    assert done.stdout.startswith(BROKEN)
    assert str(folder) in done.stdout.splitlines()[0]
    assert "Traceback" not in done.stderr
    facts = json.loads(run("--json", first_path=folder).stdout)
    assert facts["loaded"] is False
    assert str(folder) in facts["error"]


def test_info_with_a_broken_library(copied: Callable[..., Path]) -> None:
    folder = copied()
    for path in (folder / "kdtree").glob("*.so"):
        path.write_bytes(b"\x7fELF but no library")
    done = run(first_path=folder)
    assert done.returncode == 1
    assert done.stdout.startswith(BROKEN)
    assert "Traceback" not in done.stderr


def test_info_without_the_header(copied: Callable[..., Path]) -> None:
    folder = copied("kdtree.h")
    done = run(first_path=folder)
    assert done.returncode == 1
    assert done.stdout.startswith(BROKEN)
    assert "kdtree.h" in done.stdout.splitlines()[0]


def test_unknown_command() -> None:
    done = run("clean")
    assert done.returncode == 2
    assert "clean" in done.stderr


# ---- check


def test_check() -> None:
    done = run("check")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1].startswith("OK: ")
    for op in OPS:
        assert any(op in line and " ok " in line for line in lines), op


def test_bench_with_a_broken_library_says_so(copied: Callable[..., Path]) -> None:
    done = run("bench", "build", "--device", "cpu", "--quick", first_path=copied("*.so"))
    assert done.returncode == 1
    assert "could not be loaded" in done.stderr
    assert "Traceback" not in done.stderr


def test_check_with_a_broken_library(copied: Callable[..., Path]) -> None:
    done = run("check", first_path=copied("*.so"))
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1].startswith("FAILED: ")
    assert "Traceback" not in done.stderr


@pytest.fixture
def only_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "_backends", lambda: iter([check._Backend("numpy cpu", kdtree)]))


@pytest.mark.usefixtures("only_numpy")
def test_check_finds_a_wrong_integer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = reference.tree_accept

    def wrong(*args: Any, **options: Any) -> Any:
        accept = right(*args, **options)
        accept.accept_token_num[3] += 1
        return accept

    monkeypatch.setattr(reference, "tree_accept", wrong)
    assert check.run() == 1
    lines = capsys.readouterr().out.splitlines()
    line = next(line for line in lines if line.split()[0] == "tree_accept")
    assert "FAILED" in line
    assert "accept_token_num[3]: got " in line
    assert lines[-1].startswith("FAILED: 1 ")


@pytest.mark.usefixtures("only_numpy")
def test_check_finds_a_wrong_float(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = reference.verify_attn

    def wrong(*args: Any, **options: Any) -> Any:
        out, lse = right(*args, **options)
        out[2, 5, 7, 300] += 1
        return out, lse

    monkeypatch.setattr(reference, "verify_attn", wrong)
    assert check.run() == 1
    line = next(x for x in capsys.readouterr().out.splitlines() if x.split()[0] == "verify_attn")
    assert "result[0][2, 5, 7, 300]: got " in line


def test_check_finds_other_bits_in_a_second_run() -> None:
    runs: list[int] = []

    def unsteady(*args: Any) -> Any:
        accept = kdtree.tree_accept(*args)
        runs.append(0)
        accept.accept_tokens[0, -1] = -len(runs)
        return accept

    backend = check._Backend("unsteady", SimpleNamespace(tree_accept=unsteady))  # type: ignore[arg-type]
    cases = [case for case in check._cases() if case.op == "tree_accept"]
    problem, _ = check._check_op(backend, cases)
    assert problem is not None
    assert "a second run gave other bits" in problem


# ---- bench


def test_bench(tmp_path: Path) -> None:
    saved = tmp_path / "all.json"
    done = run("bench", "--device", "cpu", "--quick", "--json", str(saved))
    assert done.returncode == 0, done.stdout + done.stderr
    facts = json.loads(saved.read_text())
    assert facts["device"] == "cpu"
    assert facts["matrix_flops_per_s"] > 0
    assert facts["copy_bytes_per_s"] > 0
    assert all(us > 0 for us in facts["call_us"].values())
    ops = {row["op"] for row in facts["rows"]}
    assert ops == OPS | {"round"}
    shapes = [row["shape"] for row in facts["rows"]]
    for variant in ("page size 1", "page size 16", "fp8 cache", "ragged", "even", "7 rows, greedy"):
        assert any(variant in shape for shape in shapes), variant
    for row in facts["rows"]:
        assert row["us"] > 0
        assert row["bytes"] > 0
        assert row["floor_us"] > 0
        assert all(us > 0 for us in row["rivals_us"].values())

    done = run("bench", "build", "commit", "--device", "cpu", "--quick", "--compare", str(saved))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "x before" in done.stdout
    assert "commit_kv" in done.stdout
    assert "verify_attn" not in done.stdout


def test_bench_tells_of_its_files_before_it_measures(tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    other.write_text("{}")
    for arguments, reason in (
        (("--compare", str(tmp_path / "none.json")), "No such file"),
        (("--compare", str(other)), "other.json: expected what --json writes"),
        (("--json", str(tmp_path / "none" / "all.json")), "No such file"),
    ):
        done = run("bench", "build", "--device", "cpu", "--quick", *arguments)
        assert done.returncode == 1
        assert reason in done.stdout
        assert "build_ddtree" not in done.stdout
        assert "Traceback" not in done.stderr


def test_bench_without_torch_has_no_rivals_of_it() -> None:
    done = run("bench", "topk", "--device", "cpu", "--quick", hide="torch")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "draft_topk" in done.stdout
    assert "torch topk" not in done.stdout


def test_bench_cuda_without_cuda_says_so() -> None:
    if ctypes_api.device_info()["device_count"] > 0:
        pytest.skip("this machine has a GPU")
    done = run("bench", "--device", "cuda")
    assert done.returncode == 1
    assert "CUDA" in done.stdout
    assert "Traceback" not in done.stderr
