"""Whether speculators' calls bind on a vLLM release, with and without the patches, from snapshots.

For a pair of releases the modules of vLLM and of speculators are built out of their snapshots:
functions and classes that have the signatures and do nothing. The patches' own probes and factories
run on them, and then every call that speculators makes is made, with stand-ins for its arguments.
Neither torch, vLLM nor speculators is imported.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from spec_compat import changes, registry
from spec_compat.patching import Patch, Probe, Verdict
from spec_compat.versions import Environment, Release
from tests.contract.upstream.snapshots import snapshot
from tests.contract.upstream.standins import Anything, decorated, function, klass, torch

GENERATOR = "speculators.data_generation.vllm_hidden_states_generator"
WORKER = "speculators.data_generation.custom_worker"
# What generate() calls no longer once it is patched: a step is computed by spec_compat.capture.
UNCALLED = ("MultiprocExecutor.execute_model", "MultiprocExecutor.sample_tokens")


class Pair:
    """A release of speculators on a release of vLLM, made of their snapshots.

    `verdicts`: what each patch's probe says, for every patch that is meant for this speculators;
    `nominated`: the ids of those that are meant for this vLLM too. `breaks`: what does not import
    or does not bind, a line each, in the order of the source.
    """

    def __init__(self, speculators: str, vllm: str, patched: bool = True) -> None:
        self.speculators, self.vllm, self.patched = speculators, vllm, patched
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
            return decorated(function(name, entry["signature"], module), entry)
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
                changes.commit(changes.prepare(patch, module))
        except Exception as error:
            self.verdicts[patch.id] = Probe(Verdict.MOVED, f"{type(error).__name__}: {error}")

    def _call_everything(self) -> None:
        made = dict[str, Any]()
        for call in self.line["calls"]:
            file = call["at"].partition(".py")[0]
            module = sys.modules[f"speculators.data_generation.{file}"]
            path = call.get("call") or call["read"]
            if self.patched and path in UNCALLED:
                continue
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
