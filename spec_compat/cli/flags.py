"""Command-line options, made of the fields of RunConfig (pipeline/run/config.py)."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import typer
from pydantic.fields import FieldInfo

from spec_compat.pipeline.run.config import RunConfig, flag

# In help only: values stay text, so that RunConfig says in its own words what is wrong with one.
METAVARS = {int: "<int>", float: "<float>", Path: "<path>"}


def with_run_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command every option of RunConfig; it gets those that were given as `flags`.

    The command's own parameters come before them.
    """

    def wrapper(**values: Any) -> None:
        given = {name: values.pop(name) for name in RunConfig.model_fields}
        flags = {name: value for name, value in given.items() if value not in (None, [])}
        command(flags=flags, **values)

    own = inspect.signature(command, eval_str=True).parameters.values()
    parameters = [parameter for parameter in own if parameter.name != "flags"]
    parameters += [_parameter(name, field) for name, field in RunConfig.model_fields.items()]
    wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {p.name: p.annotation for p in parameters}
    wrapper.__name__, wrapper.__doc__ = command.__name__, command.__doc__
    return wrapper


def _parameter(name: str, field: FieldInfo) -> inspect.Parameter:
    """A keyword parameter whose default says only whether the option was given."""
    kind: Any = field.annotation
    if get_origin(kind) in (Union, UnionType):  # X | None
        kind = get_args(kind)[0]
    parsed = {bool: bool, tuple[str, ...]: list[str]}.get(kind, str)
    written = f"{flag(name)}/{flag('no_' + name)}" if kind is bool else flag(name)
    option = typer.Option(
        written, help=_help(field), show_default=False, metavar=METAVARS.get(kind)
    )
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[parsed | None, option],
    )


def _help(field: FieldInfo) -> str:
    text = field.description or ""
    if field.is_required() or field.default is None or isinstance(field.default, bool):
        return text
    return f"{text.removesuffix('.')} (default: {field.default})."
