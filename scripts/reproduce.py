#!/usr/bin/env python3
"""Shows that anyone gets the same bytes.

    scripts/reproduce.py --python python3.11 --out dist

builds the checked-out commit twice: in two folders, at two times, with other TMPDIRs, umasks, time
zones and languages, and compares the SHA-256 of the source distributions and the wheels.

    scripts/reproduce.py --released kdtree_kernels-….whl --tag v0.1.0

rebuilds a released wheel from its tag and compares the two. The bytes also depend on the compilers
and on the Python, so do it in the container that made the release (see README.md); what differs is
named.

    scripts/reproduce.py --compare FOLDER FOLDER

compares what was built already. Exit status 1 and a diffoscope report where bytes differ.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def main() -> int:
    parser = argparse.ArgumentParser(description="Builds twice and compares; see the file's head.")
    parser.add_argument("--python", action="append", default=[], help="a wheel for this one, too")
    parser.add_argument("--archs", default="release", help='KDTREE_CUDA_ARCH, e.g. "90;120"')
    parser.add_argument("--out", type=Path, help="keep what was built here")
    parser.add_argument("--released", type=Path, metavar="WHEEL", help="a wheel to rebuild")
    parser.add_argument("--tag", help="the tag it was released from")
    parser.add_argument("--compare", type=Path, nargs=2, metavar="FOLDER", help="build nothing")
    options = parser.parse_args()
    if options.compare:
        return compare(*options.compare)
    if (options.released is None) != (options.tag is None):
        parser.error("--released and --tag go together")
    pythons = [str(Path(shutil.which(python) or python).absolute()) for python in options.python]
    with tempfile.TemporaryDirectory() as work:
        if options.released is not None:
            return rebuild(options.released, options.tag, Path(work), pythons)
        if git("status", "--porcelain"):
            print("uncommitted changes are left out")
        common = ("HEAD", pythons or [sys.executable], options.archs)
        first = build(Path(work, "a"), *common, 0o022, "UTC", "C")
        second = build(Path(work, "another-folder"), *common, 0o077, "Asia/Tokyo", "C.UTF-8")
        status = compare(first, second)
        if options.out:
            shutil.copytree(first, options.out, dirs_exist_ok=True)
        return status


def build(
    work: Path, commit: str, pythons: list[str], archs: str, umask: int, zone: str, language: str
) -> Path:
    """Builds a fresh clone with its own scripts; the folder with the result."""
    print(f"building {commit} with umask {umask:03o}, TZ {zone}", flush=True)
    source, out, scratch = work / "source", work / "out", work / "scratch"
    before = os.umask(umask)
    try:
        scratch.mkdir(parents=True)
        git("clone", "--quiet", "--no-hardlinks", str(ROOT), str(source))
        revision = git("rev-parse", f"{commit}^{{commit}}")
        git("-C", str(source), "checkout", "--quiet", "--detach", revision)
        environment = {**os.environ, "TMPDIR": str(scratch), "TZ": zone, "LC_ALL": language}
        environment.pop("SOURCE_DATE_EPOCH", None)
        script = str(source / "scripts" / "build.py")
        command = [sys.executable, script, "--out", str(out), "--archs", archs]
        for python in pythons:
            command += ["--python", python]
        if subprocess.run(command, cwd=work, env=environment).returncode:
            sys.exit("the build failed")
    finally:
        os.umask(before)
    return out


def git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", ROOT, *arguments], check=True, stdout=subprocess.PIPE, text=True
    )
    return done.stdout.strip()


def rebuild(released: Path, tag: str, work: Path, pythons: list[str]) -> int:
    interpreter = re.search(r"-cp(\d)(\d+)-", released.name)
    if interpreter is None:
        sys.exit(f"{released.name}: not the name of a kdtree wheel")
    pythons = pythons or ["python{}.{}".format(*interpreter.groups())]
    theirs = bill(released)
    archs = theirs["metadata"]["component"]["properties"][0]["value"]
    out = build(work, tag, pythons, archs, 0o022, "UTC", "C")
    (ours,) = out.glob("*.whl")
    tools = {
        path: [f"{t['name']} {t['version']}" for t in bill(path)["metadata"]["tools"]["components"]]
        for path in (released, ours)
    }
    if tools[released] != tools[ours]:
        print(f"the release was built with {', '.join(tools[released])}")
        print(f"this machine has           {', '.join(tools[ours])}")
    if released.name != ours.name:
        print(f"the names differ: here it is {ours.name}")
    theirs_alone = work / "released"
    theirs_alone.mkdir()
    shutil.copy(released, theirs_alone / ours.name)
    return compare(theirs_alone, out, only="*.whl")


def bill(wheel: Path) -> dict[str, Any]:
    """The SBOM of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith("/sboms/kdtree-kernels.cdx.json"))
        document: dict[str, Any] = json.loads(archive.read(name))
        return document


def compare(first: Path, second: Path, only: str = "*") -> int:
    """Prints each file's SHA-256; 1 if the folders hold other files or bytes."""
    folders = [{p.name: p for p in sorted(folder.glob(only))} for folder in (first, second)]
    if list(folders[0]) != list(folders[1]) or not folders[0]:
        print(f"NOT THE SAME FILES: {list(folders[0])} and {list(folders[1])}")
        return 1
    status = 0
    for name, path in folders[0].items():
        sums = [hashlib.sha256(p.read_bytes()).hexdigest() for p in (path, folders[1][name])]
        if sums[0] == sums[1]:
            print(f"{sums[0]}  {name}  same bytes twice")
        else:
            status = 1
            print(f"{sums[0]}  {name}\n{sums[1]}  {name}  DIFFERENT")
            explain(path, folders[1][name])
    return status


def explain(first: Path, second: Path) -> None:
    program = shutil.which("diffoscope", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if program is None:
        print("(diffoscope would show where: install the dependency group `release`)")
        return
    sys.stdout.flush()
    subprocess.run(
        [program, "--no-progress", "--max-text-report-size", "20000", first, second],
        check=False,
    )


if __name__ == "__main__":
    sys.exit(main())
