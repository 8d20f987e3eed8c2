"""Whether speculators' calls bind on a vLLM release, with and without the patches, from snapshots.

For a pair of releases the modules of vLLM and of speculators are built out of their snapshots:
functions and classes that have the signatures and do nothing. The patches' own probes and factories
run on them, and then every call that speculators makes is made, with stand-ins for its arguments.
Neither torch, vLLM nor speculators is imported.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, wraps
from pathlib import Path
from types import ModuleType
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from spec_compat import engine, registry
from spec_compat.patching import Patch, Probe, Verdict
from spec_compat.versions import Environment, Release

_PARAMETER = re.compile(r"[*\w]+(?:=[^,)]*)?")
GENERATOR = "speculators.data_generation.vllm_hidden_states_generator"
WORKER = "speculators.data_generation.custom_worker"
ROOT = Path(__file__).resolve().parents[3]
SNAPSHOTS = ROOT / "tests" / "contract" / "snapshots"
PATCHES = ROOT / "patches"


def releases(package: str) -> list[str]:
    """The releases that there are snapshots of, oldest first."""
    found = (file.stem.removeprefix(f"{package}-") for file in SNAPSHOTS.glob(f"{package}-*.json"))
    return sorted(found, key=Version)


@cache
def snapshot(package: str, release: str) -> dict[str, Any]:
    """What `python -m tests.contract.upstream` wrote."""
    content: dict[str, Any] = json.loads((SNAPSHOTS / f"{package}-{release}.json").read_text())
    return content


def imports(files: Iterable[Path]) -> Iterator[tuple[str, str]]:
    """Module and name for each name of vLLM that Python files import, or read out of a module."""
    for file in files:
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm"):
                yield from ((str(node.module), alias.name) for alias in node.names)
            elif isinstance(node, ast.Attribute) and ast.unparse(node.value).startswith("vllm."):
                yield ast.unparse(node.value), node.attr


class Anything:
    """A value of which nothing is known: a number, a callable, a class, with every attribute."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()

    def __repr__(self) -> str:
        return "..."

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return Anything()

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type]:
        return (Anything,)

    def __getitem__(self, key: Any) -> Any:
        return Anything()

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __len__(self) -> int:
        return 0

    def __bool__(self) -> bool:
        return True

    def __lt__(self, other: Any) -> bool:
        return False

    __gt__ = __le__ = __ge__ = __lt__

    def __add__(self, other: Any) -> Any:
        return Anything()

    __sub__ = __mul__ = __floordiv__ = __truediv__ = __mod__ = __or__ = __and__ = __add__
    __radd__ = __rsub__ = __rmul__ = __rfloordiv__ = __ror__ = __rand__ = __add__

    def __int__(self) -> int:
        return 1

    __index__ = __int__


@cache
def _signature(text: str) -> inspect.Signature:
    namespace = dict[str, Any]()
    exec(f"def function{text}: pass", namespace)  # noqa: S102
    return inspect.signature(namespace["function"])


def function(name: str, signature: str, module: str, ignores_unknown: bool = False) -> Any:
    """A function of this signature that does nothing; unknown keywords are refused, or ignored."""
    binds, last = _signature(signature), name.rpartition(".")[2]

    def call(*args: Any, **kwargs: Any) -> Any:
        if ignores_unknown:
            kwargs = {key: value for key, value in kwargs.items() if key in binds.parameters}
        try:
            binds.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{name}(): {error}") from None
        return None if last == "__init__" else Anything()

    call.__signature__ = binds  # type: ignore[attr-defined]
    call.__module__, call.__qualname__, call.__name__ = module, name, last
    return call


def klass(name: str, entry: Mapping[str, Any], module: str, config_forbids: bool = True) -> type:
    """A class with the snapshot's methods; its other attributes are anything."""
    decorators = entry.get("dataclass", [])
    forbids = any("forbid" in text for text in decorators) or (
        config_forbids and any(text.partition("(")[0] == "config" for text in decorators)
    )
    content: dict[str, Any] = {"__module__": module}
    for member, described in entry["members"].items():
        shape = described if isinstance(described, dict) else {"signature": described}
        if not shape.get("signature"):
            content[member] = Anything()
            continue
        ignores = member == "__init__" and bool(decorators) and not forbids
        made = function(f"{name}.{member}", shape["signature"], module, ignores)
        content[member] = _decorated(made, shape)
    init = content.get("__init__") if decorators else None
    defaults = inspect.signature(init).parameters if init else {}
    for field, parameter in defaults.items():
        if parameter.default is not parameter.empty:
            content.setdefault(field, parameter.default)
    return type(name, (), content)


def _decorated(made: Any, shape: Mapping[str, Any]) -> Any:
    """As the decorators leave it: staticmethod, classmethod, or wrapped by something else."""
    if names := shape.get("uses"):
        # A probe looks at the names in the code of the function that the decorators wrap.
        made.__code__ = made.__code__.replace(co_names=(*made.__code__.co_names, *names.split()))
    for decorator in reversed(shape.get("decorators", [])):
        if decorator in ("staticmethod", "classmethod"):
            made = {"staticmethod": staticmethod, "classmethod": classmethod}[decorator](made)
        elif decorator.partition("(")[0] not in ("property", "abstractmethod", "override"):
            made = wraps(made)(lambda *args, inner=made, **kwargs: inner(*args, **kwargs))
    return made


def torch() -> ModuleType:
    """`torch` where there is no accelerator."""
    module = ModuleType("torch")
    for name in ("cuda", "accelerator", "npu"):
        part = ModuleType(f"torch.{name}")
        vars(part).update(is_available=lambda: False, __getattr__=lambda name: Anything())
        setattr(module, name, part)
    vars(module)["__getattr__"] = lambda name: Anything()
    return module


class Pair:
    """A release of speculators on a release of vLLM, made of their snapshots.

    `verdicts`: what each patch's probe says, for every patch that is meant for this speculators;
    `nominated`: the ids of those that are meant for this vLLM too. `breaks`: what does not import
    or does not bind, a line each, in the order of the source.
    """

    def __init__(self, speculators: str, vllm: str, patched: bool = True) -> None:
        self.speculators, self.vllm = speculators, vllm
        self.line, self.release = snapshot("speculators", speculators), snapshot("vllm", vllm)
        self.verdicts: dict[str, Probe] = {}
        self.breaks: list[str] = []
        self._executed: set[str] = set()
        found = {"speculators": speculators, "vllm": vllm}
        releases = {n: Release(n, Version(v), v, {}) for n, v in found.items()}
        planned = [
            item
            for item in registry.plan(Environment(releases))
            if item.patch.module.startswith("speculators")
            and Version(speculators) in SpecifierSet(item.patch.when["speculators"])
        ]
        self.planned = [(item.patch, patched and item.applies) for item in planned]
        self.nominated = {item.patch.id for item in planned if item.applies}
        with self._loaded():
            targets = {patch.module for patch, _ in self.planned} | {GENERATOR, WORKER}
            for name in sorted(targets & self.line["modules"].keys(), key=_depth):
                self._module(name)
            self._call_everything()

    @contextmanager
    def _loaded(self) -> Iterator[None]:
        """The snapshots' modules in sys.modules, in place of real ones."""
        roots = ("speculators", "vllm", "torch")
        real = {k: v for k, v in sys.modules.items() if k.partition(".")[0] in roots}
        for name in real:
            del sys.modules[name]
        sys.modules["torch"] = torch()
        for path, entry in self.release["symbols"].items():
            module, _, name = path.partition(":")
            self._package(module)
            if name:
                setattr(sys.modules[module], name, self._made(name, entry, module))
        try:
            yield
        finally:
            for name in [n for n in sys.modules if n.partition(".")[0] in roots]:
                del sys.modules[name]
            sys.modules.update(real)

    def _package(self, name: str) -> ModuleType:
        """A module in sys.modules, and those above it."""
        if name not in sys.modules:
            module = ModuleType(name)
            module.__path__ = []
            sys.modules[name] = module
            parent, _, last = name.rpartition(".")
            if parent:
                setattr(self._package(parent), last, module)
        return sys.modules[name]

    def _made(self, name: str, entry: Mapping[str, Any], module: str) -> Any:
        if entry["kind"] == "function":
            return _decorated(function(name, entry["signature"], module), entry)
        if entry["kind"] == "class":
            return klass(name, entry, module, self.release["config_forbids"])
        return Anything()

    def _module(self, name: str) -> ModuleType:
        """A module of speculators, after its code and then its patches have run."""
        if name in self._executed:
            return sys.modules[name]
        self._executed.add(name)
        entry, module = self.line["modules"][name], self._package(name)
        for alias, path in entry["imports"].items():
            setattr(module, alias, self._imported(path))
        for defined, described in entry["names"].items():
            setattr(module, defined, self._made(defined, described, name))
        for patch, applies in self.planned:
            if patch.module == name:
                self._meet(patch, module, applies)
        return module

    def _imported(self, path: str) -> Any:
        """What `from home import name` gives; a name that vLLM does not have is a break."""
        home, _, name = path.rpartition(".")
        if home in self.line["modules"]:
            return getattr(self._module(home), name, Anything())
        if path in sys.modules:
            return sys.modules[path]
        if path.partition(".")[0] != "vllm":
            return Anything()
        if home not in sys.modules:
            self.breaks.append(f"import: {name}: no {home}")
        elif not hasattr(sys.modules[home], name):
            self.breaks.append(f"import: {name}: not in {home}")
        return getattr(sys.modules.get(home), name, Anything())

    def _meet(self, patch: Patch, module: ModuleType, apply: bool) -> None:
        try:
            self.verdicts[patch.id] = probe = patch.examine(module)
            if apply and probe.verdict is Verdict.NEEDED:
                engine.commit(engine.prepare(patch, module))
        except Exception as error:
            self.verdicts[patch.id] = Probe(Verdict.MOVED, f"{type(error).__name__}: {error}")

    def _call_everything(self) -> None:
        made = dict[str, Any]()
        for call in self.line["calls"]:
            file = call["at"].partition(".py")[0]
            module = sys.modules[f"speculators.data_generation.{file}"]
            path = call.get("call") or call["read"]
            owner, _, method = path.partition(".")
            holder = (
                made.get(owner, Anything()) if "call" in call and method else getattr(module, owner)
            )
            try:
                target = getattr(holder, method) if method else holder
                if "call" in call:
                    result = target(*map(_value, call["args"]), **_values(call["keywords"]))
                    made.setdefault(path, result)
                    self._check_rpc(call)
            except Exception as error:
                self.breaks.append(f"{call['at']}: {path}: {type(error).__name__}: {error}")

    def _check_rpc(self, call: Mapping[str, Any]) -> None:
        """A method that is called by its name exists in the worker or in speculators' extension."""
        if not call["call"].endswith(".collective_rpc"):
            return
        name = ast.literal_eval(call["args"][0])
        worker = self.release["symbols"]["vllm.v1.worker.gpu_worker:Worker"]["members"]
        extension = sys.modules[WORKER]
        if name not in worker and not hasattr(extension.HiddenStatesWorkerExtension, name):
            raise AttributeError(f"no worker has {name}")


def _depth(name: str) -> tuple[int, str]:
    """Packages come before the modules in them, as they are imported."""
    return name.count("."), name


def _value(text: str) -> Any:
    return Anything() if text == "..." else ast.literal_eval(text)


def _values(texts: Mapping[str, str]) -> dict[str, Any]:
    return {name: _value(text) for name, text in texts.items()}


def report(new: str, old: str) -> Iterator[str]:
    """What moved between two releases of vLLM, and which patch file to open; a line each."""
    before, after = snapshot("vllm", old), snapshot("vllm", new)
    yield f"vLLM {old} -> {new}"
    yield from _moved(_flat(before), _flat(after))
    for line in releases("speculators"):
        then, now = Pair(line, old), Pair(line, new)
        for patch_id in sorted(then.verdicts.keys() | now.verdicts.keys()):
            said = [_said(pair, patch_id) for pair in (then, now)]
            if said[0] != said[1]:
                yield f"speculators {line}: {_file(patch_id)}: {said[0]} -> {said[1]}"
        for text in now.breaks:
            yield f"speculators {line}: {text}{_adapters(text, line)}"


def _flat(taken: Mapping[str, Any]) -> dict[str, str]:
    """Symbol, or symbol and member, to its signature."""
    flat = dict.fromkeys(taken["facts"], "so")
    for path, entry in taken["symbols"].items():
        flat[path] = entry.get("signature", entry["kind"])
        flat |= {f"{path}.{name}": text for name, text in entry.get("members", {}).items()}
    return flat


def _moved(before: Mapping[str, str], after: Mapping[str, str]) -> Iterator[str]:
    for name in sorted(before.keys() | after.keys()):
        if name not in after:
            yield f"  gone     {name}"
        elif name not in before:
            yield f"  new      {name}{after[name] if '(' in after[name] else ''}"
        elif before[name] != after[name]:
            parts = [
                re.findall(r"[*\w]+(?:=[^,]*)?", text.strip("()"))
                for text in (before[name], after[name])
            ]
            less = [f"-{part}" for part in parts[0] if part not in parts[1]]
            more = [f"+{part}" for part in parts[1] if part not in parts[0]]
            yield f"  changed  {name}: {' '.join(less + more) or 'order of parameters'}"


def _said(pair: Pair, patch_id: str) -> str:
    probe = pair.verdicts[patch_id]
    asked = "" if patch_id in pair.nominated else " (not in its range)"
    return probe.verdict.value + (f": {probe.reason}" if probe.reason else "") + asked


def _file(patch_id: str) -> str:
    return f"patches/{patch_id.replace('-', '_')}.py"


def _adapters(text: str, line: str) -> str:
    """The patches that replace the name that a break is about."""
    name = text.split(": ")[1].partition(".")[0]
    found = [
        _file(patch.id)
        for patch in registry.patches()
        if name in patch.factories and Version(line) in SpecifierSet(patch.when["speculators"])
    ]
    return f" [{', '.join(found) or 'no patch replaces ' + name}]"
