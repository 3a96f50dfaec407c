"""The scripts of a release: every check of scripts/verify.py is seen failing on a broken wheel.

KDTREE_WHEEL names the wheel to break; without it, a wheel in dist/ is taken.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
import shutil
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = ROOT / "scripts"
if not SCRIPTS.is_dir():
    pytest.skip("the tests are not in a source tree", allow_module_level=True)
sys.path.insert(0, str(SCRIPTS))
pytest.importorskip("elftools", reason="needs the dependency group `release`")

import check_tag  # noqa: E402
import reproduce  # noqa: E402
import verify  # noqa: E402

Files = dict[str, bytes]
Edit = Callable[[verify.Wheel, Files], None]


@pytest.fixture(scope="module")
def wheel() -> verify.Wheel:
    named = os.environ.get("KDTREE_WHEEL")
    paths = [Path(named)] if named else sorted((ROOT / "dist").glob("*manylinux*.whl"))
    if not paths:
        pytest.skip("no wheel: build one (scripts/build.py), or name one in KDTREE_WHEEL")
    return verify.Wheel(paths[-1])


def write(
    wheel: verify.Wheel, path: Path, files: Files, *, time: int = 0, mode: int = 0o644
) -> None:
    """A wheel with these files, and a true RECORD unless one is among the changes."""
    record = f"{wheel.info}/RECORD"
    if files[record] == wheel.files[record]:
        lines = []
        for name, data in files.items():
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            lines.append(f"{name},," if name == record else f"{name},sha256={digest},{len(data)}")
        files[record] = "\n".join(lines).encode()
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for index, (name, data) in enumerate(files.items()):
            entry = zipfile.ZipInfo(name, (2026, 1, 2, 3, 4, time * index % 60))
            entry.external_attr = (0o644 if index else mode) << 16
            archive.writestr(entry, data, zipfile.ZIP_DEFLATED)


def change(name: str, old: bytes, new: bytes) -> Edit:
    """An edit: `old`, a pattern, becomes `new`. {info}, {lib} and {ext} stand for names."""

    def edit(wheel: verify.Wheel, files: Files) -> None:
        path = name.format(info=wheel.info, lib=verify.LIBRARY, ext=wheel.extension)
        changed, count = re.subn(old, new, files[path], count=1, flags=re.DOTALL)
        assert count == 1, f"{path} has no {old!r}"
        assert path.endswith(".so") <= (len(changed) == len(files[path]))
        files[path] = changed

    return edit


def remove(name: str) -> Edit:
    def edit(wheel: verify.Wheel, files: Files) -> None:
        del files[name.format(info=wheel.info)]

    return edit


def add(name: str, data: bytes) -> Edit:
    def edit(wheel: verify.Wheel, files: Files) -> None:
        files[name.format(info=wheel.info)] = data

    return edit


def no_device_code(wheel: verify.Wheel, files: Files) -> None:
    section = wheel.elf(verify.LIBRARY).get_section_by_name(".nv_fatbin")
    data = bytearray(files[verify.LIBRARY])
    start = section["sh_offset"]
    data[start : start + section["sh_size"]] = bytes(section["sh_size"])
    files[verify.LIBRARY] = bytes(data)


def less_device_code(wheel: verify.Wheel, files: Files) -> None:
    """The first code of the first object swallows the second."""
    data = bytearray(files[verify.LIBRARY])
    first = data.index(struct.pack("<IHH", 0xBA55ED50, 1, 16)) + 16  # after the object's header
    header, size = struct.unpack_from("<IQ", data, first + 4)
    other_header, other_size = struct.unpack_from("<IQ", data, first + header + size + 4)
    struct.pack_into("<Q", data, first + 8, size + other_header + other_size)
    files[verify.LIBRARY] = bytes(data)


def other_name(wheel: verify.Wheel, files: Files) -> None:
    other = "cpython-312-x86_64-linux-gnu" if wheel.abi == "abi3" else "abi3"
    files[f"kdtree/_core.{other}.so"] = files.pop(wheel.extension)


SBOM = "{info}/sboms/kdtree-kernels.cdx.json"
HEADER = "kdtree/include/kdtree.h"
#: The check, what is done to the wheel, and what the check must say of it.
BROKEN: list[tuple[str, Edit, str]] = [
    ("files", change("{info}/RECORD", rb"kdtree/tree\.py", b"kdtree/shrub.py"), "differ in"),
    ("files", change("{info}/RECORD", rb"sha256=...", b"sha256=abc"), "not as in RECORD"),
    ("files", add("tests/test_tree.py", b""), "does not belong"),
    ("files", remove("{info}/licenses/LICENSE"), "LICENSE is missing"),
    ("versions", change("kdtree/_version.py", rb'"(.*)"', rb'"9.\1"'), "'kdtree.__version__': '9."),
    ("versions", change("{info}/METADATA", rb"Version: 0", b"Version: 9"), "'METADATA': '9."),
    ("versions", change("{lib}", rb'\{"version": ".', b'{"version": "9'), "'library': '9."),
    ("versions", change("{lib}", rb'"commit": "....', b'"commit": "none'), "names no commit"),
    ("versions", change(SBOM, rb'"uid": "....', b'"uid": "0000'), "SBOM has commit"),
    ("stable_abi", other_name, "in a wheel tagged"),
    ("platform", add("kdtree_kernels.libs/libz.so.1", b""), "grafted"),
    ("exports", change("{lib}", rb"\0kdtree_free\0", b"\0kdtree_tree\0"), "lacks ['kdtree_free']"),
    ("exports", change("{ext}", rb"\0PyInit__core\0", b"\0PyInit__cure\0"), "['PyInit__cure']"),
    ("exports", change(HEADER, rb"kdtree_free\(", b"kdtree_tree("), "exports besides"),
    ("needs", change("{lib}", rb"\0libm\.so\.6\0", b"\0libz.so.1\0"), "needs ['libz.so.1']"),
    ("needs", change("{ext}", rb"\0\$ORIGIN\0", b"\0/opt/ab\0"), "looks in ['/opt/ab']"),
    ("symbol_versions", change("{lib}", rb"\0GLIBC_2\.\d\d\0", b"\0GLIBC_2.99\0"), "GLIBC_2.99"),
    ("symbol_versions", change("{ext}", rb"\0CXXABI_1\.3\.\d\0", b"\0CXXABI_1.9.9\0"), "1.9.9"),
    (
        "architectures",
        change("{lib}", rb'"cuda_archs": "..', b'"cuda_archs": "99'),
        "the library says",
    ),
    ("architectures", less_device_code, "some objects lack"),
    ("architectures", no_device_code, "holds []"),
    ("types", remove("kdtree/py.typed"), "py.typed is missing"),
    ("types", change("kdtree/_core.pyi", rb"def commit_kv", b"def commit"), "committed stub"),
    ("header", remove(HEADER), "is missing"),
    ("header", change(HEADER, rb"65", b"64"), "not the committed one"),
    ("size", add("kdtree/large.bin", os.urandom(verify.MAX_BYTES)), "the limit is"),
    ("sbom", remove(SBOM), "is missing"),
    ("sbom", change(SBOM, rb"\{", b""), "not JSON"),
    ("sbom", change(SBOM, rb"CycloneDX", b"SPDX"), "bomFormat is SPDX"),
    ("sbom", change(SBOM, rb'"version": 1,', b'"version": 1, "serialNumber": 7,'), "serialNumber"),
    ("sbom", change(SBOM, rb'"lifecycles"', b'"timestamp": 7, "lifecycles"'), "timestamp"),
    ("sbom", change(SBOM, rb'"bom-ref": "nanobind"', b'"bom-ref": "boost"'), "the components"),
    ("sbom", change(SBOM, rb'"name": "nanobind"', b'"name": ""'), "nanobind: no name"),
    (
        "sbom",
        change(SBOM, rb'archs", "value": "..', b'archs", "value": "99'),
        "architectures are",
    ),
    ("readme", change("{info}/METADATA", rb"text/markdown", b"text/x-rst"), "twine"),
]


@pytest.mark.parametrize("name", verify.CHECKS)
def test_passes(wheel: verify.Wheel, name: str) -> None:
    assert verify.CHECKS[name](wheel)


@pytest.mark.parametrize(
    ("name", "edit", "message"), BROKEN, ids=[f"{name}-{message}" for name, _, message in BROKEN]
)
def test_fails_on_a_broken_wheel(
    wheel: verify.Wheel, tmp_path: Path, name: str, edit: Edit, message: str
) -> None:
    path = tmp_path / wheel.path.name
    files = dict(wheel.files)
    edit(wheel, files)
    write(wheel, path, files)
    with pytest.raises(verify.Failure, match=re.escape(message)):
        verify.CHECKS[name](verify.Wheel(path))


@pytest.mark.parametrize(
    ("name", "tags", "message"),
    [
        ("stable_abi", "cp310-abi3-{platform}", "abi3audit"),
        ("stable_abi", "cp310-cp39-{platform}", "does not fit"),
        ("platform", "{python}-{abi}-linux_x86_64", "not repaired"),
        ("platform", "{python}-{abi}-manylinux_2_17_x86_64", "auditwheel finds"),
        ("symbol_versions", "{python}-{abi}-manylinux_2_5_x86_64", "does not promise"),
    ],
)
def test_fails_on_a_wrong_tag(
    wheel: verify.Wheel, tmp_path: Path, name: str, tags: str, message: str
) -> None:
    made = tags.format(python=wheel.python, abi=wheel.abi, platform=wheel.platform)
    path = tmp_path / f"{wheel.name}-{wheel.version}-{made}.whl"
    files = dict(wheel.files)
    data = files.pop(wheel.extension)
    # abi3audit looks into what is named so.
    files["kdtree/_core.abi3.so" if "abi3" in tags else "kdtree/_core.cpython.so"] = data
    write(wheel, path, files)
    with pytest.raises(verify.Failure, match=message):
        verify.CHECKS[name](verify.Wheel(path))


@pytest.mark.parametrize(("time", "mode"), [(2, 0o644), (0, 0o600)])
def test_fails_on_time_stamps_and_modes(
    wheel: verify.Wheel, tmp_path: Path, time: int, mode: int
) -> None:
    path = tmp_path / wheel.path.name
    write(wheel, path, dict(wheel.files), time=time, mode=mode)
    with pytest.raises(verify.Failure, match=r"several time stamps|mode 600"):
        verify.CHECKS["time_stamps"](verify.Wheel(path))


def test_every_check_is_seen_failing() -> None:
    elsewhere = {"time_stamps"}
    assert {broken[0] for broken in BROKEN} | elsewhere == set(verify.CHECKS)


def test_a_release_promises_more(
    wheel: verify.Wheel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = verify.Wheel(wheel.path, release=True)
    monkeypatch.setattr(verify, "RELEASE_GLIBC", 5)
    with pytest.raises(verify.Failure, match="a release is manylinux_2_5, this is"):
        verify.CHECKS["platform"](release)
    (tmp_path / "cmake").mkdir()
    cmake = tmp_path / "cmake" / "CudaCompiler.cmake"
    cmake.write_text('set(KDTREE_RELEASE_ARCH "70;75")')
    monkeypatch.setattr(verify, "ROOT", tmp_path)
    with pytest.raises(verify.Failure, match="a release has 70;75, this is"):
        verify.CHECKS["architectures"](release)
    monkeypatch.setattr(release, "build_info", {**wheel.build_info, "commit": f"{'0' * 40}-dirty"})
    with pytest.raises(verify.Failure, match="built from uncommitted files"):
        verify.CHECKS["versions"](release)


def test_command(wheel: verify.Wheel, tmp_path: Path) -> None:
    path = tmp_path / wheel.path.name
    files = dict(wheel.files)
    remove("kdtree/py.typed")(wheel, files)
    write(wheel, path, files)
    done = subprocess.run(
        [sys.executable, SCRIPTS / "verify.py", path], capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "FAIL  types" in done.stdout
    assert "1 checks failed" in done.stdout


# ---- the same bytes


def test_compare(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    assert reproduce.compare(*folders) == 1  # nothing is not the same
    for folder in folders:
        (folder / "x.txt").write_text("same\n")
    assert reproduce.compare(*folders) == 0
    (folders[1] / "y.txt").write_text("more\n")
    assert reproduce.compare(*folders) == 1
    (folders[0] / "y.txt").write_text("less\n")
    assert reproduce.compare(*folders) == 1
    shown = capfd.readouterr().out
    assert "DIFFERENT" in shown
    assert "-less" in shown  # diffoscope's
    assert "+more" in shown


# ---- the tag


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The files that decide whether a tag may be released, as they must be."""
    version = check_tag.setting((ROOT / "pyproject.toml").read_text(), "version")
    image = f'manylinux-x86_64-image = "quay.io/x/y:1@sha256:{"0" * 64}"'
    (tmp_path / "pyproject.toml").write_text(f'version = "{version}"\n{image}\n')
    (tmp_path / "CHANGELOG.md").write_text(f"# Changelog\n\n## {version} (2026-12-24)\n")
    return tmp_path


def test_tag_may_be_released(tree: Path) -> None:
    version = check_tag.setting((tree / "pyproject.toml").read_text(), "version")
    assert check_tag.problems(f"v{version}", tree) == []


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        ("pyproject.toml", 'version = "', 'version = "9', "the tag is"),
        ("CHANGELOG.md", "(2026-12-24)", "(unreleased)", "no heading"),
        ("pyproject.toml", "@sha256:", "", "pinned by its tag alone"),
    ],
)
def test_tag_is_refused(tree: Path, file: str, old: str, new: str, message: str) -> None:
    version = check_tag.setting((tree / "pyproject.toml").read_text(), "version")
    path = tree / file
    path.write_text(path.read_text().replace(old, new))
    assert message in check_tag.problems(f"v{version}", tree)[0]


# ---- the workflows


def test_actions_are_pinned_by_commit() -> None:
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        for use in re.findall(r"uses: (.+)", path.read_text()):
            assert re.fullmatch(r"\$/\S+|[\w./-]+@[0-9a-f]{40} # v[\d.]+", use), f"{path}: {use}"


def test_workflows_have_no_findings() -> None:
    program = shutil.which("zizmor", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if program is None:
        pytest.skip("no zizmor")
    command = [program, "--offline", "--quiet", "--persona=pedantic", ROOT / ".github"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
