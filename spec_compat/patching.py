"""The patch API. Beside it a patch file imports capture, files, precision and wrappers alone.

A patch file defines one module-level `patch = Patch(...)`, at most one probe, and one factory for
each name that it replaces or provides. Nothing here imports the packages that are patched.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import Enum
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any, Literal, TypeVar

if TYPE_CHECKING:
    from pathlib import Path
    from random import Random

# The column by which the pipeline numbers rows, and prepare/loss-mask names those that it reports.
ROW_COLUMN = "spec_compat_row"

Scope = Literal["driver", "worker"]
Severity = Literal["required", "optional"]
Factory = Callable[[Any, ModuleType], object]
ProbeFunction = Callable[[ModuleType], "Probe"]

_F = TypeVar("_F", bound=Factory)
_P = TypeVar("_P", bound=ProbeFunction)


class Verdict(str, Enum):
    """What a probe found in the module at hand."""

    NEEDED = "needed"
    ALREADY_FIXED = "already fixed"
    MOVED = "moved"


@dataclass(frozen=True)
class Probe:
    """A verdict with its reason, one line for the report."""

    verdict: Verdict
    reason: str = ""


NEEDED = Probe(Verdict.NEEDED)


def already_fixed(reason: str) -> Probe:
    """The module does by itself what the patch is for; nothing is replaced."""
    return Probe(Verdict.ALREADY_FIXED, reason)


def moved(reason: str) -> Probe:
    """The module is not what the patch was written against; nothing is replaced, loudly."""
    return Probe(Verdict.MOVED, reason)


def parameters(function: object) -> frozenset[str]:
    """Parameter names of a callable or a class; empty when it has no signature."""
    try:
        return frozenset(inspect.signature(function).parameters)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return frozenset()


def mentions(function: object) -> frozenset[str]:
    """The names, attributes and texts in a function's code and in that of the functions inside it.

    Decorators around the function are looked through. Empty for what has no Python code.
    """
    found, codes = set[str](), [getattr(inspect.unwrap(function), "__code__", None)]  # type: ignore[arg-type]
    while codes:
        if (code := codes.pop()) is not None:
            found.update(code.co_names)
            found.update(value for value in code.co_consts if isinstance(value, str))
            codes += [value for value in code.co_consts if isinstance(value, CodeType)]
    return frozenset(found)


def without_accelerator(module: ModuleType) -> Probe:
    """A probe: the patch is for machines without an accelerator. `module` has the name `torch`."""
    if module.torch.accelerator.is_available():
        return already_fixed("an accelerator is present")
    return NEEDED


def overlay(module: ModuleType, **names: object) -> ModuleType:
    """A view of a module in which some names differ; the module itself stays as it is."""
    view = ModuleType(module.__name__, f"{module.__name__}, seen through a patch")
    vars(view).update(names, __wrapped__=module, __getattr__=lambda name: getattr(module, name))
    return view


def trusts_remote_code() -> bool:
    """Whether Python code that comes with a model may run.

    The pipeline says so with SPEC_COMPAT_TRUST_REMOTE_CODE (`1` or `0`); in a script of somebody's
    own it is unset, and what speculators does for its vLLM holds: it may.
    """
    return os.environ.get("SPEC_COMPAT_TRUST_REMOTE_CODE") != "0"


def asking_for_trust(auto: Any) -> Any:
    """A class like transformers' AutoConfig whose every load is told `trusts_remote_code()`."""

    class Asking(auto):  # type: ignore[misc]
        @classmethod
        def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
            return auto.from_pretrained(
                *args, **{**kwargs, "trust_remote_code": trusts_remote_code()}
            )

    return Asking


@dataclass(frozen=True)
class Preparation:
    """What the prepare stage tells the patch prepare/loss-mask; a script may, too.

    `reported` is the file that gets a JSON object for each row that is left out. `draws` is where
    the seed of turn dropout comes from; the module `random` where it is None.
    """

    reported: Path | None = None
    draws: Random | None = None


_preparation = ContextVar[Preparation]("preparation")


def preparation() -> Preparation:
    """What holds in this thread."""
    return _preparation.get(Preparation())


@contextmanager
def preparing(told: Preparation) -> Iterator[None]:
    """Have `preparation()` give `told` while the block runs."""
    token = _preparation.set(told)
    try:
        yield
    finally:
        _preparation.reset(token)


class BadRows(RuntimeError):  # noqa: N818
    """Rows of a `generate()` call whose hidden states are not theirs: `reasons` by row number."""

    def __init__(self, reasons: Mapping[int, str]) -> None:
        self.reasons = dict(reasons)
        first = min(self.reasons)
        super().__init__(
            f"{len(self.reasons)} rows failed their check; row {first} of the call: "
            f"{self.reasons[first]}"
        )


@dataclass(kw_only=True, eq=False)
class Patch:
    """What to replace in one module, for which releases, and how to tell that it is needed.

    `module` is the dotted name whose import triggers the patch; it lies inside speculators (inside
    vllm only for patches of the serve stage, inside transformers or torchvision only to provide a
    name). `when` maps distribution names to version specifiers, which nominate the patch
    (`{"speculators": ">=0.3,<0.4", "vllm": ">=0.12"}`); the probe decides. `scope` is the process
    in which the patch matters. A `required` patch that is not in place is a problem, an `optional`
    one is not. `after` lists the ids of patches that apply before this one.
    The registry fills in `id` and `doc` from the file's path and docstring.
    """

    module: str
    when: Mapping[str, str]
    scope: Scope = "driver"
    severity: Severity = "required"
    upstream: str = ""
    after: tuple[str, ...] = ()
    id: str = field(default="", init=False)
    doc: str = field(default="", init=False)
    factories: dict[str, Factory] = field(default_factory=dict, init=False)
    provided: set[str] = field(default_factory=set, init=False)
    importable: set[str] = field(default_factory=set, init=False)
    examine: ProbeFunction = field(default_factory=lambda: lambda module: NEEDED, init=False)

    @property
    def stage(self) -> str:
        """First element of the id: prepare, extract, train or serve."""
        return self.id.partition("/")[0]

    @property
    def opt_in(self) -> bool:
        """Whether it changes vLLM itself: then it is off unless SPEC_COMPAT_ENABLE names it."""
        return self.stage == "serve"

    @property
    def target(self) -> str:
        """`module:qualname, qualname`, for people."""
        return f"{self.module}:{', '.join(self.factories)}"

    def probe(self, function: _P) -> _P:
        """Decorator for the function that looks at the imported module and returns a Probe.

        Without one the patch is needed wherever all its targets exist.
        """
        self.examine = function
        return function

    def replace(self, qualname: str) -> Callable[[_F], _F]:
        """Decorator for a factory `(original, module) -> replacement` of `module:qualname`.

        The original is the raw object out of its owner's `__dict__`: a staticmethod or classmethod
        arrives as such, and what the factory returns is set as it is. All replacements of a patch
        are made before the first is set; they are set together or not at all.
        """

        def register(factory: _F) -> _F:
            if qualname in self.factories:
                raise ValueError(f"{qualname!r} is replaced twice by one patch")
            self.factories[qualname] = factory
            return factory

        return register

    def provide(self, name: str) -> Callable[[_F], _F]:
        """Decorator for a factory `(None, module) -> object` of a name that does not exist.

        `Class.attr` is an attribute of a class in `module`, any other a name in `module`. Where it
        exists, the patch has moved.
        """
        self.provided.add(name)
        return self.replace(name)

    def provide_import(self, name: str) -> Callable[[_F], _F]:
        """Decorator for a factory `(None, module) -> object` that `name` can be imported as.

        `name` is dotted, and neither a module nor a name in one: `package.module`, or
        `package.module.function`, which `from package.module import function` then finds. Only
        sys.modules gets it; the module or package before the last dot stays as it is. Where the
        name exists, the patch has moved.
        """
        self.importable.add(name)
        return self.replace(name)
