#!/usr/bin/env python3
"""Says whether the checked-out tree may be released under a tag.

    scripts/check_tag.py v0.1.0

The tag names the version of pyproject.toml, the changelog has a dated entry for it, and the
container of the wheels is pinned by its digest.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def problems(tag: str, root: Path = ROOT) -> list[str]:
    project = (root / "pyproject.toml").read_text()
    version = setting(project, "version")
    found = []
    if tag != f"v{version}":
        found.append(f"the tag is {tag}, the version in pyproject.toml {version}")
    heading = rf"^## {re.escape(version)} \(\d{{4}}-\d\d-\d\d\)$"
    if re.search(heading, (root / "CHANGELOG.md").read_text(), re.MULTILINE) is None:
        found.append(f"CHANGELOG.md has no heading `## {version} (YYYY-MM-DD)`")
    image = setting(project, "manylinux-x86_64-image")
    if re.search(r"@sha256:[0-9a-f]{64}$", image) is None:
        found.append(
            f"{image} is pinned by its tag alone: append the digest that the last step of the "
            "workflow `wheels` shows (@sha256:…) in pyproject.toml"
        )
    return found


def setting(project: str, name: str) -> str:
    match = re.search(rf'^{name} = "(.*)"$', project, re.MULTILINE)
    if match is None:
        raise SystemExit(f"pyproject.toml: no {name}")
    return match[1]


if __name__ == "__main__":
    wrong = problems(sys.argv[1])
    print("\n".join(wrong) or f"{sys.argv[1]} may be released")
    sys.exit(1 if wrong else 0)
