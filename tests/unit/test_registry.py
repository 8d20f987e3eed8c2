"""Discovery, validation and planning of patch files."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from textwrap import dedent
from types import ModuleType

import pytest
from packaging.version import Version

from spec_compat import registry
from spec_compat.errors import PatchConflict, UnknownPatch
from spec_compat.patching import Patch
from spec_compat.versions import Environment, Release
from tests.unit.world import HEADER

TARGET = '@patch.replace("{}")\ndef make(original, module):\n    return original\n'


def source(target: str = "f", **options: object) -> str:
    given = {"module": "speculators.gen", "when": {"speculators": ">=0.3"}, **options}
    arguments = ", ".join(f"{name}={value!r}" for name, value in given.items())
    return f"patch = Patch({arguments})\n" + TARGET.format(target)


def provides(name: str) -> str:
    return source().replace("patch.replace", "patch.provide").replace('"f"', f'"{name}"')


def imports(name: str) -> str:
    return provides(name).replace("patch.provide", "patch.provide_import")


@pytest.fixture
def discover(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[object]:
    """A function from {path: source} to the patches, in order."""
    package = ModuleType("fake_patches")
    package.__path__ = [str(tmp_path)]

    def found(files: Mapping[str, str]) -> tuple[Patch, ...]:
        for path, text in files.items():
            file = tmp_path / path
            file.parent.mkdir(exist_ok=True)
            (file.parent / "__init__.py").touch()
            file.write_text(dedent(HEADER) + dedent(text))
        return registry.ordered(registry.discover(package))

    sys.modules[package.__name__] = package
    yield found
    for name in [name for name in sys.modules if name.split(".")[0] == package.__name__]:
        del sys.modules[name]


def test_the_id_is_the_path_with_dashes(discover) -> None:
    files = {"extract/a_b.py": '"""Why."""\n' + source(), "train/c.py": source("g")}
    files["extract/_not_a_patch.py"] = "raise AssertionError"
    patches = discover(files)
    assert [(p.id, p.stage) for p in patches] == [("extract/a-b", "extract"), ("train/c", "train")]


def test_the_docstring_travels_with_the_patch(discover, tmp_path: Path) -> None:
    (tmp_path / "extract").mkdir()
    (tmp_path / "extract/__init__.py").touch()
    text = '"""Symptom  it fails."""\nfrom spec_compat.patching import Patch\n' + source()
    (tmp_path / "extract/a.py").write_text(text)
    assert [p.doc for p in discover({})] == ["Symptom  it fails."]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"extract/a.py": ""}, "extract/a: a patch file defines one `patch`; found none"),
        ({"extract/a.py": source().replace("patch", "it", 1)}, "name 'patch' is not defined"),
        ({"extract/a.py": source() + "other = patch"}, r"extract/a: .* found \['patch', 'other'\]"),
        ({"extract/a.py": source().split("\n")[0]}, "extract/a: replaces nothing"),
        ({"extract/a.py": source(module="torch.nn")}, "torch.nn is outside speculators"),
        ({"extract/a.py": source(module="vllm.config")}, "vllm.config is outside speculators"),
        ({"extract/a.py": source(module="transformers.x")}, "is outside speculators"),
        ({"extract/a.py": source(module="torchvision.io")}, "is outside speculators"),
        ({"extract/a.py": source(module="speculators_x")}, "is outside speculators"),
        ({"serve/a.py": source(module="torch")}, "torch is outside speculators and vllm"),
        ({"extract/a.py": provides("vllm.config")}, "provide_import is for what is imported"),
        ({"extract/a.py": provides("vllm.config.Class.run")}, "neither a name nor `Class.attr`"),
        ({"train/a.py": provides("a.b.c")}, "provides a.b.c, neither a name nor `Class.attr`"),
        ({"extract/a.py": imports("torch.new")}, "in transformers, vllm, not torch.new"),
        ({"extract/a.py": imports("vllm")}, "provide_import is for dotted names"),
        ({"extract/a.py": imports("vllm.a-b")}, "provide_import is for dotted names"),
        ({"extract/a.py": source(when={"numpy": ">1"})}, "`when` knows vllm, .*, not numpy"),
        ({"extract/a.py": source(when={"vllm": "0.16"})}, "extract/a: `when`: Invalid specifier"),
        ({"extract/a.py": source(after=("extract/b",))}, "extract/b, which is no patch"),
        (
            {"extract/a.py": source(), "extract/b.py": source()},
            "extract/b and extract/a both replace speculators.gen:f",
        ),
        (
            {
                "extract/a.py": source("f", after=("extract/b",)),
                "extract/b.py": source("g", after=("extract/a",)),
            },
            "`after` goes in a circle: extract/a -> extract/b -> extract/a"
            "|`after` goes in a circle: extract/b -> extract/a -> extract/b",
        ),
        (
            {
                "extract/a.py": source(),
                "extract/b.py": "from fake_patches.extract.a import patch",
            },
            "extract/b: its `patch` is that of extract/a",
        ),
    ],
)
def test_a_bad_patch_file_is_refused(discover, files: dict[str, str], message: str) -> None:
    with pytest.raises((PatchConflict, NameError), match=message):
        discover(files)


@pytest.mark.parametrize(
    ("after", "order"),
    [
        ({}, ["a", "b", "c"]),
        ({"a": ["c"]}, ["b", "c", "a"]),
        ({"a": ["b"], "b": ["c"]}, ["c", "b", "a"]),
        ({"c": ["a", "b"]}, ["a", "b", "c"]),
    ],
)
def test_after_decides_and_then_the_id(discover, after, order: list[str]) -> None:
    files = {
        f"extract/{name}.py": source(name, after=tuple(f"extract/{n}" for n in after.get(name, ())))
        for name in "cab"
    }
    assert [p.id for p in discover(files)] == [f"extract/{name}" for name in order]


def test_two_patches_of_one_name_are_accepted_when_one_comes_after_the_other(discover) -> None:
    files = {"extract/a.py": source(after=("extract/b",)), "extract/b.py": source()}
    assert [p.id for p in discover(files)] == ["extract/b", "extract/a"]


def test_serve_patches_may_reach_into_vllm(discover) -> None:
    assert [p.module for p in discover({"serve/a.py": source(module="vllm.config")})] == [
        "vllm.config"
    ]


@pytest.fixture
def shipped(discover, monkeypatch: pytest.MonkeyPatch) -> tuple[Patch, ...]:
    files = {
        "extract/old.py": source("a", when={"speculators": "<0.3", "vllm": ">=0.1"}),
        "extract/both.py": source("b", when={"speculators": ">=0.3,<0.4", "vllm": ">=0.12"}),
        "train/any.py": source("c", when={}),
    }
    patches: tuple[Patch, ...] = discover(files)
    monkeypatch.setattr(registry, "patches", lambda: patches)
    monkeypatch.delenv("SPEC_COMPAT_DISABLE", raising=False)
    return patches


def environment(**raw: str | None) -> Environment:
    return Environment(
        {name: Release(name, Version(v) if v else None, v or "dev", {}) for name, v in raw.items()}
    )


@pytest.mark.parametrize(
    ("installed", "both"),
    [
        ({"speculators": "0.3.0", "vllm": "0.16.0"}, (True, "for speculators 0.3.0, vllm 0.16.0")),
        ({"speculators": "0.4.0", "vllm": "0.16.0"}, (False, "speculators 0.4.0 is not in")),
        ({"speculators": "0.3.0", "vllm": "0.11.0"}, (False, "vllm 0.11.0 is not in >=0.12")),
        ({"speculators": "0.3.0"}, (False, "vllm is not installed")),
        ({"speculators": "0.3.0", "vllm": None}, (False, "vllm does not know its release (dev)")),
        ({"speculators": None, "vllm": "0.11.0"}, (False, "vllm 0.11.0 is not in >=0.12")),
    ],
)
def test_the_plan_says_what_applies_and_why(
    shipped: tuple[Patch, ...], installed: dict[str, str | None], both: tuple[bool, str]
) -> None:
    planned = {item.patch.id: item for item in registry.plan(environment(**installed))}
    assert list(planned) == ["extract/both", "extract/old", "train/any"]
    assert planned["extract/both"].applies is both[0]
    assert planned["extract/both"].reason.startswith(both[1])
    assert bool(planned["extract/both"].undecided) is ("does not know" in both[1])
    assert planned["train/any"].applies


@pytest.mark.parametrize(
    ("value", "applying"),
    [
        ("", ["extract/both", "train/any"]),
        ("1", []),
        ("train/any", ["extract/both"]),
        (" train/any , extract/both,", []),
    ],
)
def test_disabled_patches_do_not_apply(
    shipped: tuple[Patch, ...],
    monkeypatch: pytest.MonkeyPatch,
    value: str,
    applying: list[str],
) -> None:
    monkeypatch.setenv("SPEC_COMPAT_DISABLE", value)
    planned = registry.plan(environment(speculators="0.3.0", vllm="0.16.0"))
    assert [item.patch.id for item in planned if item.applies] == applying
    assert {i.reason for i in planned if i.patch.id in registry.disabled()} <= {
        "disabled by SPEC_COMPAT_DISABLE"
    }


@pytest.mark.parametrize(
    ("value", "applying"),
    [
        ("", ["train/any"]),
        ("serve/a", ["serve/a", "train/any"]),
        ("serve/b", ["serve/a", "serve/b", "train/any"]),
        (" serve , ", ["serve/a", "serve/b", "serve/c", "train/any"]),
    ],
)
def test_what_changes_vllm_applies_only_where_it_is_asked_for(
    discover, monkeypatch: pytest.MonkeyPatch, value: str, applying: list[str]
) -> None:
    """With what it comes after."""
    after = {"b": ("serve/a",), "c": ("serve/b",)}
    files = {
        f"serve/{n}.py": source(n, module="vllm.config", when={}, after=after.get(n, ()))
        for n in "abc"
    }
    patches = discover({**files, "train/any.py": source("c", when={})})
    monkeypatch.setattr(registry, "patches", lambda: patches)
    monkeypatch.setenv("SPEC_COMPAT_ENABLE", value)
    planned = registry.plan(environment())
    assert sorted(item.patch.id for item in planned if item.applies) == applying
    off = {item.reason for item in planned if not item.applies}
    assert off <= {"off unless SPEC_COMPAT_ENABLE=serve"}
    monkeypatch.setenv("SPEC_COMPAT_DISABLE", "serve/a")
    assert "serve/a" not in {item.patch.id for item in registry.plan(environment()) if item.applies}


@pytest.mark.parametrize("wrong", ["serve/c", "train/any", "train", "1"])
def test_only_what_changes_vllm_can_be_asked_for(
    discover, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    files = {"serve/a.py": source(module="vllm.config", when={}), "train/any.py": source("c")}
    patches = discover(files)
    monkeypatch.setattr(registry, "patches", lambda: patches)
    monkeypatch.setenv("SPEC_COMPAT_ENABLE", wrong)
    with pytest.raises(UnknownPatch, match=f"SPEC_COMPAT_ENABLE: .*'{wrong}'"):
        registry.plan(environment())


@pytest.mark.parametrize(
    ("unknown", "hint"),
    [
        ("train/anny", "did you mean train/any"),
        ("both", "did you mean extract/both"),
        ("zzz", "`spec-compat list`"),
    ],
)
def test_an_unknown_id_is_an_error_that_suggests(
    shipped: tuple[Patch, ...], monkeypatch: pytest.MonkeyPatch, unknown: str, hint: str
) -> None:
    with pytest.raises(UnknownPatch, match=hint):
        registry.get(unknown)
    monkeypatch.setenv("SPEC_COMPAT_DISABLE", f"train/any,{unknown}")
    with pytest.raises(UnknownPatch, match=f"SPEC_COMPAT_DISABLE: .*'{unknown}'.*{hint}"):
        registry.plan(environment())


ROOT = Path(__file__).parents[2]
FILES = sorted(ROOT.joinpath("patches").glob("*/*.py"))
# What runs in vLLM's worker beside the patches.
ENGINE = sorted(ROOT.joinpath("spec_compat/capture").glob("*.py"))


def test_the_shipped_patches_are_all_accepted() -> None:
    shipped = {file.relative_to(file.parents[1]).with_suffix("") for file in FILES}
    ids = {str(path).replace("_", "-") for path in shipped if not path.name.startswith("_")}
    assert {patch.id for patch in registry.patches()} == ids


@pytest.mark.parametrize(
    "file", [*FILES, *ENGINE], ids=lambda file: f"{file.parent.name}/{file.name}"
)
def test_a_shipped_patch_imports_what_patches_may_and_the_standard_library(file: Path) -> None:
    """At its top: a patch file is imported in every process, whether its target is there or not."""
    names = set[str]()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            dots = "." * node.level
            names |= {dots + (node.module or alias.name) for alias in node.names}
    foreign = {name for name in names if name.split(".")[0] not in sys.stdlib_module_names}
    beside = {name for name in foreign if name.startswith("._")}
    ours = {
        f"spec_compat.{name}" for name in ("patching", "capture", "files", "precision", "wrappers")
    }
    assert {name for name in foreign - beside if ".".join(name.split(".")[:2]) not in ours} == set()
