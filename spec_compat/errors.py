"""The errors that spec_compat raises; the CLI prints a `UserError` as it is and exits with 2."""
# ruff: noqa: N818  (the names say what is wrong; they are all errors)

from __future__ import annotations

from collections.abc import Iterable


class SpecCompatError(Exception):
    """Base of all errors that spec_compat raises on purpose."""


class UserError(SpecCompatError):
    """What was asked for cannot be done: the message names the thing, the place and the remedy.

    `option` is the field of the run's config that the message is about; as text, the error begins
    with the flag of that name.
    """

    def __init__(self, message: str, option: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.option = option

    def __str__(self) -> str:
        flag = f"--{self.option.replace('_', '-')} " if self.option else ""
        return flag + self.message


class UnknownPatch(UserError):
    """No patch has this id; the message suggests ids that look like it."""

    def __init__(self, patch_id: str, known: Iterable[str], place: str = "") -> None:
        from difflib import get_close_matches  # here: `import spec_compat` has no use for it

        near = get_close_matches(patch_id, sorted(known), n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else "`spec-compat list` shows all ids"
        super().__init__(f"{place + ': ' if place else ''}no patch is called {patch_id!r}; {hint}")


class RequiredPatchMissing(UserError):
    """A patch is not in place at a checkpoint; the message is a table of those missing."""


class PatchConflict(SpecCompatError):
    """A patch file that the registry refuses: malformed, out of bounds, or at odds with another."""


class TargetMoved(SpecCompatError):
    """A name that a patch replaces does not exist in the module at hand."""
