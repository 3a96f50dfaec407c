"""The build backend: scikit-build-core, and what it takes to get the same bytes everywhere.

A source distribution records the commit that it was made of and that commit's time. Whatever
builds a wheel, from the checkout or from the source distribution, takes both from there: the commit
is compiled in, the time stamps the files.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from scikit_build_core import build as scikit_build
from scikit_build_core.build import (
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

#: In a source distribution: the commit, and its time in seconds since 1970, a line each. CMake
#: reads it too.
RECORD = Path("COMMIT")

Settings = dict[str, Any] | None


def build_sdist(sdist_directory: str, config_settings: Settings = None) -> str:
    with same_bytes() as commit:
        checkout = Path(".git").exists()
        if checkout:
            RECORD.write_text(commit)
        try:
            return scikit_build.build_sdist(sdist_directory, config_settings)
        finally:
            if checkout:
                RECORD.unlink()


def build_wheel(
    wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None
) -> str:
    # Not passed on: prepared metadata lack the SBOM, which comes with the build.
    with same_bytes():
        return scikit_build.build_wheel(wheel_directory, config_settings)


def build_editable(
    wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None
) -> str:
    return scikit_build.build_editable(wheel_directory, config_settings)


@contextmanager
def same_bytes() -> Iterator[str]:
    """Sets what would show in the result: the mode of new files and SOURCE_DATE_EPOCH."""
    commit = read_commit()
    umask = os.umask(0o022)
    if commit:
        os.environ.setdefault("SOURCE_DATE_EPOCH", commit.split()[1])
    try:
        yield commit
    finally:
        os.umask(umask)


def read_commit() -> str:
    """The text of RECORD; empty where there is neither a checkout nor a record."""
    if not Path(".git").exists():
        return RECORD.read_text() if RECORD.exists() else ""
    try:
        commit = git("describe", "--always", "--dirty", "--exclude=*", "--abbrev=40")
        return f"{commit}\n{git('log', '-1', '--format=%ct')}\n"
    except (OSError, subprocess.CalledProcessError):
        return ""


def git(*arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], check=True, stdout=subprocess.PIPE, text=True
    ).stdout.strip()
