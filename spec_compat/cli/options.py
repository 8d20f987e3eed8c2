"""The options of the pipeline as command-line options, made from the one model that has them."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin

import typer
from pydantic.fields import FieldInfo

from spec_compat.pipeline.run.config import RunConfig, flag

NUMBERS = {int: "<int>", float: "<float>"}


def with_run_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command every option of RunConfig; it gets those that were given as `flags`.

    The command's own parameters stay, before them or after them as it declares them.
    """

    def wrapper(**values: Any) -> None:
        own = {name: values.pop(name) for name in parameters}
        flags = {name: value for name, value in values.items() if value not in (None, [])}
        command(flags=flags, **own)

    signature = inspect.signature(command, eval_str=True)
    parameters = {n: p for n, p in signature.parameters.items() if n != "flags"}
    options = [_parameter(name, field) for name, field in RunConfig.model_fields.items()]
    wrapper.__signature__ = inspect.Signature([*parameters.values(), *options])  # type: ignore[attr-defined]
    wrapper.__annotations__ = {p.name: p.annotation for p in (*parameters.values(), *options)}
    wrapper.__name__, wrapper.__doc__ = command.__name__, command.__doc__
    return wrapper


def _parameter(name: str, field: FieldInfo) -> inspect.Parameter:
    """A keyword parameter whose default says only whether the option was given."""
    kind, metavar = _type(field.annotation)
    written = f"{flag(name)}/--no-{name.replace('_', '-')}" if kind is bool else flag(name)
    option = typer.Option(
        written, help=_help(field), show_default=False, readable=False, metavar=metavar
    )
    annotation = Annotated[kind | None, option]  # type: ignore[valid-type]
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation
    )


def _type(annotation: Any) -> tuple[Any, str | None]:
    """What typer parses, and what help calls it: a list for what may be repeated.

    Text where RunConfig can say in its own words what is wrong with it.
    """
    if get_origin(annotation) in (Union, types.UnionType):
        annotation = next(a for a in get_args(annotation) if a is not type(None))
    if get_origin(annotation) is tuple:
        return (list[str] if get_args(annotation)[0] is str else str), None
    if annotation in NUMBERS:
        return str, NUMBERS[annotation]
    return (annotation if annotation in (bool, Path) else str), None


def _help(field: FieldInfo) -> str:
    text = field.description or ""
    if field.is_required() or field.default is None or isinstance(field.default, bool):
        return text
    return f"{text.removesuffix('.')} (default: {field.default})."
