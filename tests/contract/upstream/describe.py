"""What griffe reads in the sources of a release, as plain data: kinds, signatures, members."""

from __future__ import annotations

import ast
from textwrap import dedent
from typing import Any

import griffe

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
DATACLASS = ("dataclass", "dataclasses.dataclass", "config")


def describe(thing: Tree) -> dict[str, Any]:
    """Kind, signature, members, and where it is defined."""
    if thing.is_alias:
        try:
            found = thing.final_target
        except (griffe.AliasResolutionError, griffe.CyclicAliasError):
            return {"kind": "import", "from": thing.target_path}
        return {**describe(found), "from": found.path}
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
        return f"{name}={literal(target.value)}"
    words = {word.arg: ast.unparse(word.value) for word in value.keywords}
    if words.get("init") == "False":
        return ""
    if value.args:
        words["default"] = ast.unparse(value.args[0])
    if not {"default", "default_factory"} & words.keys():
        return name
    return f"{name}={literal(words.get('default', '...'))}"


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
            parts.append(parameter.name + (f"={literal(default)}" if default is not None else ""))
    return f"({', '.join(parts)})"


def literal(value: object) -> str:
    text = str(value)
    try:
        ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return "..."
    return text if len(text) <= 80 else "..."


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
