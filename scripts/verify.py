#!/usr/bin/env python3
"""Checks what a wheel holds against what it promises, and fails loudly.

    scripts/verify.py WHEEL...             each check's finding, and exit status 1 if one failed
    scripts/verify.py --release WHEEL...   also what only a release promises

Run it in the source tree that the wheel was built from: the header and the stub must be its own.
Needs the packages of the dependency group `release`; nothing from the network, no GPU.
"""

from __future__ import annotations

import argparse
import base64
import csv
import functools
import hashlib
import importlib.resources
import io
import json
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection
from elftools.elf.sections import SymbolTableSection

ROOT = Path(__file__).parents[1]
LIBRARY = "kdtree/libkdtree_kernels_c.so"
RELEASE_GLIBC = 28  # manylinux_2_28, or older
MAX_BYTES = 15 * 2**20
#: What every Linux system with glibc has.
SYSTEM = r"(libc|libm|libstdc\+\+|libgcc_s|libpthread|libdl|librt|ld-linux-x86-64)\.so\.\d+"


class Failure(Exception):
    """What a wheel promises and does not keep."""


def expect(holds: bool, text: str) -> None:
    if not holds:
        raise Failure(text)


class Wheel:
    """A wheel file, read once."""

    def __init__(self, path: Path, *, release: bool = False) -> None:
        self.path, self.release = path, release
        with zipfile.ZipFile(path) as archive:
            self.entries = archive.infolist()
            self.files = {
                entry.filename: archive.read(entry) for entry in self.entries if not entry.is_dir()
            }
        fields = path.name.removesuffix(".whl").split("-")
        if len(fields) != 5:
            sys.exit(f"{path.name}: expected name-version-python-abi-platform.whl")
        self.name, self.version, self.python, self.abi, self.platform = fields
        self.info = f"{self.name}-{self.version}.dist-info"

    def read(self, name: str) -> bytes:
        expect(name in self.files, f"{name} is missing")
        return self.files[name]

    def text(self, name: str) -> str:
        return self.read(name).decode()

    @functools.cached_property
    def extension(self) -> str:
        names = [n for n in self.files if re.fullmatch(r"kdtree/_core\..*so", n)]
        expect(len(names) == 1, f"expected one kdtree/_core…so, got {names}")
        return names[0]

    @property
    def binaries(self) -> tuple[str, str]:
        return LIBRARY, self.extension

    def elf(self, name: str) -> ELFFile:
        return ELFFile(io.BytesIO(self.read(name)))

    @functools.cached_property
    def build_info(self) -> dict[str, str]:
        """What kdtree_build_info() returns, without running it."""
        found = re.search(rb'\{"version": "[^\0]*"\}', self.read(LIBRARY))
        if found is None:
            raise Failure(f"{LIBRARY} holds no build information")
        info: dict[str, str] = json.loads(found[0])
        return info


CHECKS: dict[str, Callable[[Wheel], str]] = {}


def check(function: Callable[[Wheel], str]) -> Callable[[Wheel], str]:
    """Registers a check: it returns what it found, or raises Failure."""
    CHECKS[function.__name__] = function
    return function


@check
def files(wheel: Wheel) -> str:
    """RECORD lists every file with its hash, and nothing is there that does not belong."""
    listed = {}
    record = f"{wheel.info}/RECORD"
    for name, digest, _ in csv.reader(wheel.text(record).splitlines()):
        listed[name] = digest
    expect(
        listed.keys() == wheel.files.keys(),
        f"RECORD and archive differ in {sorted(listed.keys() ^ wheel.files.keys())}",
    )
    for name, data in wheel.files.items():
        sum256 = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        expect(name == record or listed[name] == f"sha256={sum256}", f"{name}: not as in RECORD")
        known = name.startswith(("kdtree/", f"{wheel.info}/")) and not name.endswith(".pyc")
        expect(known, f"{name} does not belong in the wheel")
    expect(wheel.read(f"{wheel.info}/licenses/LICENSE") != b"", "the licence is empty")
    return f"{len(wheel.files)}, as recorded"


@check
def time_stamps(wheel: Wheel) -> str:
    """One time for all, the commit's, and modes that depend on no umask."""
    times = {entry.date_time for entry in wheel.entries}
    expect(len(times) == 1, f"several time stamps: {sorted(times)}")
    for entry in wheel.entries:
        mode = entry.external_attr >> 16 & 0o777
        expect(mode in (0o644, 0o755), f"{entry.filename}: mode {mode:o}")
    return "{}-{:02}-{:02} {:02}:{:02}:{:02}".format(*times.pop())


@check
def versions(wheel: Wheel) -> str:
    """One version and one commit, in the name, the metadata, Python, the library and the SBOM."""
    metadata = re.search(r"^Version: (.+)$", wheel.text(f"{wheel.info}/METADATA"), re.MULTILINE)
    python = re.search(r'__version__ = "(.+)"', wheel.text("kdtree/_version.py"))
    component = bill(wheel)["metadata"]["component"]
    found = {
        "name": wheel.version,
        "METADATA": metadata and metadata[1],
        "kdtree.__version__": python and python[1],
        "library": wheel.build_info["version"],
        "SBOM": component["version"],
    }
    expect(len(set(found.values())) == 1, f"the versions differ: {found}")
    commit = wheel.build_info["commit"]
    expect(
        re.fullmatch(r"[0-9a-f]{40}(-dirty)?", commit) is not None,
        f"the library names no commit: {commit}",
    )
    expect(
        not (wheel.release and commit.endswith("dirty")), f"built from uncommitted files: {commit}"
    )
    (recorded,) = component["pedigree"]["commits"]
    expect(recorded["uid"] == commit, f"the SBOM has commit {recorded['uid']}, not {commit}")
    return f"{wheel.version}, commit {commit}"


@check
def stable_abi(wheel: Wheel) -> str:
    """An abi3 wheel uses nothing but the stable ABI (abi3audit --strict)."""
    stable = wheel.extension.endswith(".abi3.so")
    expect(stable == (wheel.abi == "abi3"), f"{wheel.extension} in a wheel tagged {wheel.abi}")
    if not stable:
        expect(wheel.abi == wheel.python, f"the ABI tag {wheel.abi} does not fit {wheel.python}")
        return f"not claimed; {wheel.abi} alone"
    tool("abi3audit", "--strict", "--verbose", str(wheel.path))
    return f"nothing beyond {wheel.python}'s"


@check
def platform(wheel: Wheel) -> str:
    """auditwheel finds the tag that the name has, and nothing was grafted in."""
    claimed = [part for part in wheel.platform.split(".") if re.match(r"manylinux_\d", part)]
    expect(claimed != [], f"the platform tag is {wheel.platform}: not repaired")
    grafted = [name for name in wheel.files if ".libs/" in name]
    expect(not grafted, f"grafted libraries: {grafted}")
    found = json.loads(tool("auditwheel", "show", "--json", str(wheel.path)))["overall_tag"]
    expect(found in claimed, f"the name says {wheel.platform}, auditwheel finds {found}")
    minor = int(found.split("_")[2])
    expect(
        not wheel.release or minor <= RELEASE_GLIBC,
        f"a release is manylinux_2_{RELEASE_GLIBC}, this is {found}",
    )
    return str(found)


@check
def exports(wheel: Wheel) -> str:
    """The library exports what kdtree.h declares; the extension exports its init function."""
    declared = set(
        re.findall(r"KDTREE_API [^;(]*?(kdtree_\w+)\(", wheel.text("kdtree/include/kdtree.h"))
    )
    for name, want in ((LIBRARY, declared), (wheel.extension, {"PyInit__core"})):
        got = {
            symbol.name
            for section in wheel.elf(name).iter_sections()
            if isinstance(section, SymbolTableSection) and section.name == ".dynsym"
            for symbol in section.iter_symbols()
            if symbol["st_shndx"] != "SHN_UNDEF"
        }
        expect(
            got == want,
            f"{name}: lacks {sorted(want - got)}, exports besides {sorted(got - want)}",
        )
    return f"{len(declared)} functions"


@check
def needs(wheel: Wheel) -> str:
    """The binaries need system libraries and each other, found beside the extension."""
    for name in wheel.binaries:
        tags = [
            tag
            for section in wheel.elf(name).iter_sections()
            if isinstance(section, DynamicSection)
            for tag in section.iter_tags()
        ]
        needed = {tag.needed for tag in tags if tag.entry.d_tag == "DT_NEEDED"}
        others = {library for library in needed if not re.fullmatch(SYSTEM, library)}
        own = set() if name == LIBRARY else {Path(LIBRARY).name}
        expect(others == own, f"{name}: needs {sorted(others)}, expected {sorted(own)}")
        paths = {tag.runpath for tag in tags if tag.entry.d_tag == "DT_RUNPATH"}
        paths |= {tag.rpath for tag in tags if tag.entry.d_tag == "DT_RPATH"}
        allowed = set() if name == LIBRARY else {"$ORIGIN"}
        expect(paths == allowed, f"{name}: looks in {sorted(paths)}, expected {sorted(allowed)}")
    return "system libraries alone"


@check
def symbol_versions(wheel: Wheel) -> str:
    """No newer glibc, libstdc++ or libgcc than the platform tag stands for."""
    policies = json.loads(
        (importlib.resources.files("auditwheel.policy") / "manylinux-policy.json").read_text()
    )
    allowed = {
        policy["name"] + "_x86_64": policy["symbol_versions"].get("x86_64") for policy in policies
    }
    limits = next((allowed[tag] for tag in wheel.platform.split(".") if tag in allowed), None)
    if limits is None:
        raise Failure(f"no policy is known for {wheel.platform}")
    highest: dict[str, tuple[int, ...]] = {}
    for name in wheel.binaries:
        for section in wheel.elf(name).iter_sections():
            if not isinstance(section, GNUVerNeedSection):
                continue
            for _, versions_needed in section.iter_versions():
                for version in versions_needed:
                    family, _, number = version.name.partition("_")
                    expect(
                        number in limits.get(family, ()),
                        f"{name}: needs {version.name}, which {wheel.platform} does not promise",
                    )
                    parts = tuple(map(int, number.split(".")))
                    highest[family] = max(highest.get(family, parts), parts)
    return ", ".join(f"{k} {'.'.join(map(str, v))}" for k, v in sorted(highest.items()))


@check
def architectures(wheel: Wheel) -> str:
    """The library holds code for what it says, in every object (cuobjdump)."""
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder, "library.so")
        library.write_bytes(wheel.read(LIBRARY))
        listing = tool("cuobjdump", "--list-elf", "--list-ptx", str(library))
    counts: dict[str, int] = {}
    for number, kind in re.findall(r"\.sm_(\d+)[af]?\.(cubin|ptx)$", listing, re.MULTILINE):
        arch = number if kind == "cubin" else f"{number}-virtual"
        counts[arch] = counts.get(arch, 0) + 1
    claimed = wheel.build_info["cuda_archs"].split(",")
    expect(
        sorted(counts) == sorted(re.sub("[af]$", "", arch) for arch in claimed),
        f"the library says {claimed}, holds {sorted(counts)}",
    )
    expect(len(set(counts.values())) == 1, f"some objects lack an architecture: {counts}")
    if wheel.release:
        cmake = (ROOT / "cmake" / "CudaCompiler.cmake").read_text()
        found = re.search(r'set\(KDTREE_RELEASE_ARCH "(.*)"\)', cmake)
        expect(
            found is not None and found[1].split(";") == claimed,
            f"a release has {found and found[1]}, this is {claimed}",
        )
    return ", ".join(claimed)


@check
def types(wheel: Wheel) -> str:
    """py.typed is there, and the stub that the built module gave is the committed one."""
    wheel.read("kdtree/py.typed")
    committed = (ROOT / "python" / "kdtree" / "_core.pyi").read_text()
    expect(wheel.text("kdtree/_core.pyi") == committed, "_core.pyi is not the committed stub")
    return "py.typed, the committed stub"


@check
def header(wheel: Wheel) -> str:
    """kdtree.h is there, as committed."""
    committed = (ROOT / "src" / "kdtree.h").read_text()
    expect(wheel.text("kdtree/include/kdtree.h") == committed, "kdtree.h is not the committed one")
    return "kdtree.h, as committed"


@check
def size(wheel: Wheel) -> str:
    """Under 15 MiB."""
    bytes_ = wheel.path.stat().st_size
    expect(bytes_ < MAX_BYTES, f"{bytes_} bytes, the limit is {MAX_BYTES}")
    return f"{bytes_ / 2**20:.2f} MiB of 15"


@check
def sbom(wheel: Wheel) -> str:
    """A CycloneDX document that names what is linked in, and holds no time and no random number."""
    document = bill(wheel)
    for field, want in (("bomFormat", "CycloneDX"), ("specVersion", "1.6"), ("version", 1)):
        expect(document.get(field) == want, f"{field} is {document.get(field)}, expected {want}")
    for field, place in (("serialNumber", document), ("timestamp", document["metadata"])):
        expect(field not in place, f"{field} differs from build to build")
    main = document["metadata"]["component"]
    parts = {"kdtree-kernels", "cuda-runtime", "nanobind"}
    described = [main, *document["components"]]
    expect({c["bom-ref"] for c in described} == parts, f"expected the components {sorted(parts)}")
    for component in described:
        complete = all(component.get(field) for field in ("name", "version", "licenses"))
        expect(complete, f"{component['bom-ref']}: no name, version or licence")
    expect({d["ref"] for d in document["dependencies"]} == parts, "dependencies are incomplete")
    archs = main["properties"][0]["value"]
    expect(archs == wheel.build_info["cuda_archs"], f"architectures are {archs}")
    return f"CycloneDX 1.6, {len(described)} components"


@check
def readme(wheel: Wheel) -> str:
    """The README renders on a package index (twine check --strict)."""
    tool("twine", "check", "--strict", str(wheel.path))
    return "renders"


def bill(wheel: Wheel) -> dict[str, Any]:
    try:
        document: dict[str, Any] = json.loads(
            wheel.read(f"{wheel.info}/sboms/kdtree-kernels.cdx.json")
        )
    except ValueError as error:
        raise Failure(f"the SBOM is not JSON: {error}") from error
    return document


def tool(name: str, *arguments: str) -> str:
    """Runs a program installed beside this Python."""
    tools = Path(sysconfig.get_path("purelib"), "nvidia", "cu13", "bin")  # cuobjdump's
    places = (str(Path(sys.executable).parent), str(tools))
    environment = {**os.environ, "PATH": os.pathsep.join((*places, os.environ["PATH"]))}
    done = subprocess.run(
        ["/usr/bin/env", name, *arguments],
        env=environment,
        capture_output=True,
        text=True,
    )
    expect(done.returncode == 0, f"{name}: {(done.stdout + done.stderr).strip()}")
    return done.stdout


def main() -> int:
    parser = argparse.ArgumentParser(description="Checks wheels; see the file's head.")
    parser.add_argument("wheels", type=Path, nargs="+", metavar="WHEEL")
    parser.add_argument("--release", action="store_true", help="also what a release promises")
    options = parser.parse_args()
    failures = 0
    for path in options.wheels:
        print(path.name)
        wheel = Wheel(path, release=options.release)
        for name, function in CHECKS.items():
            try:
                print(f"  ok    {name:<15} {function(wheel)}", flush=True)
            except Failure as failure:
                failures += 1
                print(f"  FAIL  {name:<15} {failure}", flush=True)
    print(f"{failures} checks failed" if failures else "every check passed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
