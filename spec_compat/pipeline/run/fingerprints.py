"""What a stage's result depends on beside options and data: each thing by its name, with a value.

The names are for people: when a value changes, the stage is done again and says the name.
"""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Callable, Iterable
from functools import cache
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from spec_compat import registry, versions
from spec_compat.pipeline.inputs.verifier import Verifier
from spec_compat.pipeline.run.plan import Plan

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
CODE = ("the patch ", "the module ")


def releases(packages: Iterable[str]) -> dict[str, str]:
    return {name: _release(name) for name in packages}


def tokenizer(plan: Plan) -> dict[str, str]:
    found = {"the tokenizer": _digest(plan.verifier, TOKENIZERS)}
    if plan.verifier.offers_code:  # with its own code it is another tokenizer
        found["--trust-remote-code"] = json.dumps(plan.config.trust_remote_code)
    return found


def chat_template(plan: Plan) -> dict[str, str]:
    files = (*TEMPLATES, "tokenizer_config.json")
    return {"the chat template": _digest(plan.verifier, files, template=True)}


def patches(stage: str) -> dict[str, str]:
    """The code of the stage's patches that apply, and of the modules that they import.

    A comment or a docstring in one does not count.
    """
    directory = package("spec_compat.patches")
    planned = registry.plan(versions.detect())
    ids = [item.patch.id for item in planned if item.applies and item.patch.stage == stage]
    files = [directory / f"{patch_id.replace('-', '_')}.py" for patch_id in ids]
    files += sorted((directory / stage).glob("_[!_]*.py"))
    found = {f"{CODE[0]}{stage}/{f.stem.replace('_', '-')}": _code(f) for f in files}
    modules = {name for file in files for name in _imported(file)}
    return found | {f"{CODE[1]}{name}": _code(_file(name)) for name in sorted(modules)}


def is_code(name: str) -> bool:
    """Whether an input of this name is the code of a patch or of a module."""
    return name.startswith(CODE)


@cache
def _imported(file: Path) -> frozenset[str]:
    """Modules of spec_compat that a file imports, directly or not, but for the patch API."""
    nodes = ast.walk(ast.parse(file.read_text("utf-8")))
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom) and not node.level]
    named = [(node.module or "", alias.name) for node in imports for alias in node.names]
    ours = [names for names in named if names[0].startswith("spec_compat.")]
    found = {name for names in ours for name in (names[0], ".".join(names)) if _is_module(name)}
    found -= {"spec_compat.patching"}
    return frozenset(found).union(*(_imported(_file(name)) for name in found))


@cache
def _is_module(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # a name in a module that is no package
        return False


def _file(module: str) -> Path:
    spec = find_spec(module)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(module)
    return Path(spec.origin)


def _release(name: str) -> str:
    release = versions.detect([name]).releases.get(name) if name in versions.SOURCES else None
    if release is not None:
        return str(release)
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def package(name: str) -> Path:
    return Path(next(iter(import_module(name).__path__)))


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
