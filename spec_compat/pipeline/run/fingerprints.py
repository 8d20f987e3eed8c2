"""What a stage's result depends on beside options and data: each thing by its name, with a value.

The names are for people: when a value changes, the stage is done again and says the name.
"""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

from spec_compat import registry, versions
from spec_compat.pipeline.inputs.verifier import Verifier
from spec_compat.pipeline.run.layout import Stage

# Whose releases decide what a stage makes; torch and CUDA only move the last bits.
PACKAGES: Mapping[Stage, tuple[str, ...]] = {
    "prepare": ("speculators", "transformers", "tokenizers"),
    "extract": ("speculators", "vllm"),
    "map": ("speculators",),
    "train": ("speculators",),
    "export": (),
}
# What patches run of spec_compat; patching itself only sets them.
SHARED_WITH_PATCHES = ("capture", "wrappers")
TEMPLATES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates/*")
TOKENIZERS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "*.py",  # a tokenizer may import any of them
)
TOKENIZER_STAGES: tuple[Stage, ...] = ("prepare", "map")


def of(stage: Stage, verifier: Verifier) -> dict[str, str]:
    """Releases, patches and tokenizer files of a stage."""
    found = {name: _release(name) for name in PACKAGES[stage]} | _patches(stage)
    if stage in TOKENIZER_STAGES:
        found["the tokenizer"] = _digest(verifier, TOKENIZERS)
    if stage == "prepare":
        found["the chat template"] = _digest(verifier, (*TEMPLATES, "tokenizer_config.json"), True)
    return found


def _release(name: str) -> str:
    release = versions.detect([name]).releases.get(name) if name in versions.SOURCES else None
    if release is not None:
        return str(release)
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def _patches(stage: Stage) -> dict[str, str]:
    """The code of the patches that apply, and of what they import; a comment does not count."""
    directory = _directory("spec_compat.patches") / stage
    planned = registry.plan(versions.detect())
    ids = [item.patch.id for item in planned if item.applies and item.patch.stage == stage]
    files = [directory.parent / f"{patch_id.replace('-', '_')}.py" for patch_id in ids]
    files += sorted(directory.glob("_[!_]*.py"))
    files += sorted({shared for file in files for shared in _shared(file)})
    return {f"the patch {stage}/{file.stem.replace('_', '-')}": _code(file) for file in files}


def _shared(file: Path) -> list[Path]:
    """The files of spec_compat whose code a patch file runs: a module, or a package as a whole."""
    nodes = ast.walk(ast.parse(file.read_text(encoding="utf-8")))
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom) and not node.level]
    names = {f"{node.module}.{alias.name}" for node in imports for alias in node.names}
    root = _directory("spec_compat")
    found: list[Path] = []
    for part in SHARED_WITH_PATCHES:
        if any(f"{name}.".startswith(f"spec_compat.{part}.") for name in names):
            package = root / part
            found += package.glob("[!_]*.py") if package.is_dir() else [root / f"{part}.py"]
    return found


def _directory(package: str) -> Path:
    return Path(next(iter(import_module(package).__path__)))


def _code(file: Path) -> str:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and _is_docstring(body[0]):
            body[0] = ast.Pass()
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _digest(verifier: Verifier, patterns: Iterable[str], template: bool = False) -> str:
    """Digest of the files of these names; a tokenizer_config counts for its template or the rest.

    A download of the hub is known by its commit: its files may come only later.
    """
    if verifier.commit:
        return verifier.commit
    digest = hashlib.sha256()
    for file in sorted({file for pattern in patterns for file in verifier.directory.glob(pattern)}):
        if file.name == "tokenizer_config.json":
            content = _part(file, lambda key: (key == "chat_template") == template)
        else:
            content = file.read_bytes()
        digest.update(f"{file.name} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def _part(file: Path, wanted: Callable[[str], bool]) -> bytes:
    try:
        config: dict[str, Any] = json.loads(file.read_bytes())
    except ValueError:
        return file.read_bytes()
    return json.dumps({k: v for k, v in config.items() if wanted(k)}, sort_keys=True).encode()
