"""The README's example runs as printed, and its two commands are CI's."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from kdtree.sglang import SUPPORTED

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"


def test_example_runs() -> None:
    found = re.search(r"<!-- readme-example.*?```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert found
    done = subprocess.run(
        [sys.executable, "-c", found[1]], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("(2, 17, 8, 512) ")


def test_what_is_supported_in_sglang_is_what_the_code_says() -> None:
    rows = "".join(f"| {' | '.join(row)} |\n" for row in SUPPORTED)
    assert (
        f"| | served | declined, with the reason |\n|---|---|---|\n{rows}\n" in README.read_text()
    )


@pytest.mark.parametrize("path", [".ci/run", ".github/workflows/ci.yml"])
def test_ci_calls_the_test_command(path: str) -> None:
    assert "-m pytest" in README.read_text()
    assert re.search(r"-m pytest$|ci/run$", (ROOT / path).read_text(), re.MULTILINE)
