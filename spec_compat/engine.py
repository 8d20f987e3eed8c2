"""Applies the patches of this process, keeps the ledger, and undoes on request.

How names are replaced and put back is in `changes`. No lock is held while foreign code (a probe, a
factory, an import) runs.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from types import ModuleType

from spec_compat import __version__, hooks, registry, versions
from spec_compat.changes import ABSENT, LOADED, Change, commit, locate, prepare, put_back, rebind
from spec_compat.errors import RequiredPatchMissing, TargetMoved
from spec_compat.patching import Patch, Scope, Verdict
from spec_compat.report import IN_PLACE, Outcome, Report, State, append, role

log = logging.getLogger("spec_compat")


def strict() -> bool:
    """Whether SPEC_COMPAT_STRICT asks to raise in place instead of recording."""
    return os.environ.get("SPEC_COMPAT_STRICT") == "1"


class Engine:
    """The patches of one process: their outcomes, and the changes behind them.

    The public methods are those of the package, and documented there; all but `arm` are called
    after it. `releases` are those that were found when it was armed, None before.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._patches: dict[str, Patch] = {}
        self._waiting: dict[str, Patch] = {}
        self._changes: dict[str, list[Change]] = {}
        self._outcomes: dict[str, Outcome] = {}
        self._reported: dict[str, Outcome] = {}
        self._environment: dict[str, str] = {}
        self.releases: versions.Environment | None = None
        self._pid = 0
        os.register_at_fork(after_in_child=self._after_fork)

    def arm(self) -> Report:
        if self.releases:
            return self.report()
        hooks.disarm()
        self._plan()
        for patch in list(self._waiting.values()):
            hooks.watch(patch.module, partial(self._imported, patch.module))
            if patch.module in sys.modules and hooks.imported(patch.module) is None:
                self._record(patch, "pending", "its module is half-imported", late=True)
        self._catch_up()
        return self._flush()

    def report(self) -> Report:
        self._catch_up()
        for patch in self._patches.values():
            self._verify(patch)
            if self._state(patch) == "pending":
                log.warning("%s: %s", patch.id, self._outcomes[patch.id].reason)
        return self._flush()

    def require(self, *ids: str, stage: str | None = None, scope: Scope | None = None) -> None:
        named = {registry.get(patch_id).id for patch_id in ids}
        missing = [
            outcome
            for outcome in self.report().outcomes
            if outcome.state not in IN_PLACE
            and (outcome.id in named if named else outcome.is_asked_for(scope, stage))
        ]
        if missing:
            width = max(len(outcome.id) for outcome in missing)
            rows = [f"  {o.id:{width}}  {o.state:10}  {o.reason} ({o.target})" for o in missing]
            raise RequiredPatchMissing("\n".join(["patches that must be in place are not:", *rows]))

    def undo(self, *ids: str) -> None:
        chosen = {registry.get(patch_id).id for patch_id in ids} or set(self._patches)
        for patch_id in reversed([*self._waiting, *self._changes]):
            if patch_id in chosen:
                self._undo(self._patches[patch_id])
        self._flush()

    def _plan(self) -> None:
        names = set(versions.PAIR).union(*(patch.when for patch in registry.patches()))
        environment = versions.detect(sorted(names))
        planned = registry.plan(environment)
        self._patches = {item.patch.id: item.patch for item in planned}
        self._waiting = {item.patch.id: item.patch for item in planned if item.applies}
        for item in planned:
            state: State = "armed" if item.applies else "failed" if item.undecided else "skipped"
            self._record(item.patch, state, item.reason, quiet=item.undecided in versions.PAIR)
        for line in registry.overrides():
            log.warning(line)
        found = {name: str(release) for name, release in environment.releases.items()}
        python = ".".join(map(str, sys.version_info[:3]))
        self._environment = {"spec_compat": __version__, "python": python, **found}
        self.releases = environment

    def _imported(self, name: str, module: ModuleType) -> None:
        """The hook after an import. If it raised, the import would fail."""
        try:
            for patch in self._patches.values():
                if patch.module == name:
                    self._settle(patch, module, late=False)
                    self._verify(patch)
            self._catch_up()
            self._flush()
        except Exception:
            if strict():
                raise
            log.exception("the hook after the import of %s failed", name)

    def _catch_up(self) -> None:
        """Settle patches whose module came without the hook: imported earlier, or half-imported."""
        for patch in list(self._waiting.values()):
            module = hooks.imported(patch.module)
            if module is not None:
                self._settle(patch, module, late=True)

    def _settle(self, patch: Patch, module: ModuleType, *, late: bool) -> None:
        if self._waiting.pop(patch.id, None) is None:  # done, or another thread is at it
            return
        cause: Exception | None = None
        try:
            state, reason = self._apply(patch, module)
        except TargetMoved as error:
            state, reason = "moved", str(error)
        except Exception as error:
            state, reason, cause = "failed", f"{type(error).__name__}: {error}", error
        self._record(patch, state, reason, late=late)
        if strict() and self._outcomes[patch.id].is_problem:
            raise RequiredPatchMissing(f"{patch.id}: {state}: {reason}") from cause

    def _apply(self, patch: Patch, module: ModuleType) -> tuple[State, str]:
        probe = patch.examine(module)
        if probe.verdict is Verdict.ALREADY_FIXED:
            return "not-needed", probe.reason
        if probe.verdict is Verdict.MOVED:
            return "moved", probe.reason
        changes = prepare(patch, module)
        with self._lock:
            commit(changes)
            aliases = sum(rebind(c, c.original, c.replacement) for c in changes)
            self._changes[patch.id] = changes
        return "applied", f"{probe.reason or 'needed'}, {aliases} aliases"

    def _verify(self, patch: Patch) -> None:
        """Record an applied patch as lost when its names lead to something else by now."""
        module = hooks.imported(patch.module)
        half_imported = module is None and patch.module in sys.modules
        if self._state(patch) != "applied" or half_imported:
            return
        for change in self._changes[patch.id]:
            if module is None or not self._stands(change, module):
                reason = f"{change.qualname} was overwritten, or its module imported again"
                self._record(patch, "lost", reason)
                return

    def _stands(self, change: Change, module: ModuleType) -> bool:
        """Whether the name leads to our replacement, directly or through wrappers around it."""
        if change.original is ABSENT:
            owner = change.owner
            known = owner in (module, LOADED) or vars(module).get(owner.__name__) is owner
            return known and vars(owner).get(change.attr) is change.replacement
        try:
            current = locate(module, change.qualname)[2]
        except TargetMoved:
            return False
        below = {id(c.replacement): c.original for cs in self._changes.values() for c in cs}
        seen = set[int]()
        while current is not change.replacement and id(current) not in seen:
            seen.add(id(current))
            current = below.get(id(current), getattr(current, "__wrapped__", current))
        return current is change.replacement

    def _undo(self, patch: Patch) -> None:
        if self._waiting.pop(patch.id, None) is not None:
            self._record(patch, "undone", "before its module was imported")
            return
        with self._lock:
            changes = self._changes[patch.id]
            strangers = [c.attr for c in changes if vars(c.owner).get(c.attr) is not c.replacement]
            if not strangers:
                put_back(self._changes.pop(patch.id))
                for change in changes:
                    rebind(change, change.replacement, change.original)
        if strangers:
            self._record(patch, "foreign", f"someone else replaced {', '.join(strangers)} after us")
        else:
            self._record(patch, "undone", "on request")

    def _state(self, patch: Patch) -> State:
        return self._outcomes[patch.id].state

    def _record(
        self, patch: Patch, state: State, reason: str, *, late: bool = False, quiet: bool = False
    ) -> None:
        before = self._outcomes.get(patch.id)
        late = late or (before is not None and before.late)
        what = (patch.id, state, patch.stage, patch.scope, patch.severity, patch.target, reason)
        outcome = Outcome(*what, late, os.getpid(), role(), time.time())
        with self._lock:
            self._outcomes[patch.id] = outcome
        quiet = quiet or state == "pending"  # pending: once it is so at a checkpoint
        level = logging.WARNING if outcome.is_problem and not quiet else logging.DEBUG
        log.log(level, "%s: %s: %s (%s)", patch.id, state, reason, outcome.role)

    def _flush(self) -> Report:
        """Report what is new to the directory; in a new process, all that it inherited."""
        with self._lock:
            new_process = self._pid != os.getpid()
            if new_process:
                self._pid, self._reported = os.getpid(), {}
                for outcome in list(self._outcomes.values()):
                    self._outcomes[outcome.id] = replace(outcome, pid=self._pid, role=role())
            report = Report(dict(self._environment), tuple(self._outcomes.values()))
            new = [o for o in report.outcomes if self._reported.get(o.id) is not o]
            self._reported = dict(self._outcomes)
        if new_process:
            log.info(report.summary())
        directory = os.environ.get("SPEC_COMPAT_REPORT_DIR")
        if directory and new:
            try:
                append(directory, self._environment, new)
            except OSError as error:
                log.warning("SPEC_COMPAT_REPORT_DIR: cannot write the report: %s", error)
        return report

    def _after_fork(self) -> None:
        """The lock may have been held; and a child that multiprocessing names later reports."""
        self._lock = threading.RLock()
        if util := sys.modules.get("multiprocessing.util"):
            util.register_after_fork(self, Engine._flush)


engine = Engine()
