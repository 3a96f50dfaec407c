#!/usr/bin/env python3
"""Runs tests/test_sglang*.py against the real SGLang, on a machine that may have no GPU.

SGLang pins CUDA builds of everything that it can use. Nothing of that is needed to register a
backend, resolve server arguments or attend on CPU tensors, so this installs its wheel without its
dependencies into an environment of its own, with CPU-capable torch and the few packages that its
modules import. The environment is kept and used again until the lists below change.

    scripts/sglang_bed.py                     # kdtree as it stands in this tree
    scripts/sglang_bed.py --wheel dist/*.whl  # or a wheel of it
    scripts/sglang_bed.py -- -k trees         # what follows -- is pytest's
    KDTREE_TEST_FULL=1 scripts/sglang_bed.py  # 10,000 trees against SGLang's kernels: ten minutes
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# For Python 3.11 and 3.12, of which SGLang has wheels.
ALONE = ["sglang==0.5.23", "torchvision==0.29.1"]
WHOLE = [
    "torch==2.13.0",
    "triton==3.9.0",
    "transformers==5.19.0",
    "aiohttp==3.14.5",
    "apache-tvm-ffi==0.1.11",
    "compressed-tensors==0.20.1",
    "dill==0.4.1",
    "einops==0.8.2",
    "gguf==0.19.0",
    "ipython==9.18.1",
    "msgspec==0.23.0",
    "openai==3.57.0",
    "orjson==3.13.0",
    "partial-json-parser==0.2.1.1.post7",
    "pillow==13.0.0",
    "psutil==7.2.2",
    "pybase64==1.5.1",
    "pydantic==2.14.4",
    "pyzmq==27.3.0",
    "requests==2.34.2",
    "sentencepiece==0.2.3",
    "setproctitle==1.3.8",
    "uvicorn==0.54.0",
    "fastapi==0.165.0",
    "xxhash==4.1.0",
    "zstandard==0.25.0",
    "pytest==9.2.0",
    "hypothesis==6.170.17",
    "ml_dtypes==0.6.0",
]

# torchvision's compiled part belongs to another torch, and its Python part stops at the schemas of
# the two ops that it has shape rules for. This defines them when it is imported.
SCHEMAS = """\
import sys


class TorchvisionSchemas:
    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            global library  # schemas go with it
            library = torch.library.Library("torchvision", "DEF")
            for op in ("nms", "qnms"):
                library.define(f"{op}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


sys.meta_path.insert(0, TorchvisionSchemas())
"""


def environment(python: str, folder: Path) -> Path:
    """The Python of an environment with SGLang and without kdtree; made where it is not there."""
    made = hashlib.sha256("\n".join([python, *ALONE, *WHOLE, SCHEMAS]).encode()).hexdigest()[:16]
    venv = folder / made
    inside = venv / "bin/python"
    done = venv / "complete"
    if done.exists():
        return inside
    subprocess.run([python, "-m", "venv", "--clear", str(venv)], check=True)
    pip = [str(inside), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, *WHOLE], check=True)
    subprocess.run([*pip, "--no-deps", *ALONE], check=True)
    site = subprocess.run(
        [inside, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    (Path(site) / "sitecustomize.py").write_text(SCHEMAS)
    done.touch()
    return inside


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", default=sys.executable, help="3.11 or 3.12; default: this one")
    parser.add_argument("--wheel", help="a wheel of kdtree; default: this tree is built")
    parser.add_argument(
        "--cache",
        type=Path,
        default=Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "kdtree-sglang",
        help="where environments are kept",
    )
    parser.add_argument("pytest", nargs="*", help="arguments of pytest, after --")
    options = parser.parse_args()
    python = environment(options.python, options.cache)
    subprocess.run(
        [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps",
         "--force-reinstall", options.wheel or str(ROOT)],
        check=True,
    )  # fmt: skip
    # SGLang's Triton kernels run in the interpreter where there is no GPU.
    environ = {"TRITON_INTERPRET": "1", **os.environ}
    tests = sorted(map(str, (ROOT / "tests").glob("test_sglang*.py")))
    command = [python, "-m", "pytest", *tests, *options.pytest]
    return subprocess.run(command, cwd=ROOT, env=environ).returncode


if __name__ == "__main__":
    sys.exit(main())
