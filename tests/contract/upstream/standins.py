"""Stand-ins for what a snapshot describes: they have the signatures, and do nothing."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from functools import cache, wraps
from types import ModuleType
from typing import Any


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
        content[member] = decorated(made, shape)
    init = content.get("__init__") if decorators else None
    defaults = inspect.signature(init).parameters if init else {}
    for field, parameter in defaults.items():
        if parameter.default is not parameter.empty:
            content.setdefault(field, parameter.default)
    return type(name, (), content)


def decorated(made: Any, shape: Mapping[str, Any]) -> Any:
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
