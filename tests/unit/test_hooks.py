"""When a patch lands: import order, half-imported modules, reloads, aliases, child processes."""

from __future__ import annotations

from textwrap import dedent

import pytest

from spec_compat.report import Report
from tests.unit.world import RUN, World

CALL = "gen.Generator().run()"
COUNT = """
    patch = Patch(module="speculators.gen", when={"speculators": ">=0.3"})

    @patch.replace("count")
    def count(original, module):
        return lambda n: -n
"""


@pytest.mark.parametrize(
    ("order", "late"),
    [
        ("import spec_compat, speculators.gen as gen", False),
        ("import speculators, spec_compat, speculators.gen as gen", False),
        ("import speculators.gen as gen, spec_compat", True),
        ("import spec_compat.plugin, speculators.gen as gen, spec_compat", False),
    ],
)
def test_the_order_of_imports_does_not_matter(world: World, order: str, late: bool) -> None:
    world.patch()
    got = world.run(
        f"""
{order}
before, = spec_compat.report().outcomes
called = {CALL}
spec_compat.undo()
after, = spec_compat.report().outcomes
answer([called, before.state, before.late, after.state, after.late])
"""
    )
    assert got == ["patched original", "applied", late, "undone", late]


def test_importing_spec_compat_imports_no_target(world: World) -> None:
    world.patch()
    got = world.run(
        "import spec_compat\n"
        "answer([states(), [m for m in sys.modules if m.startswith(('speculators', 'vllm'))]])"
    )
    assert got == [{"extract/run": "armed"}, []]


@pytest.mark.parametrize("retry", ["spec_compat.report()", "import speculators.user"])
def test_a_half_imported_module_is_pending_and_retried(world: World, retry: str) -> None:
    """The target itself imports spec_compat, before it has defined what is replaced."""
    world.patch()
    world.patch("extract/user", RUN.replace("speculators.gen", "speculators.user"))
    world.write(
        "speculators/gen.py",
        """
        import spec_compat
        during = spec_compat.engine.engine._outcomes["extract/run"].state
        class Generator:
            def run(self):
                return "original"
        """,
    )
    world.write("speculators/user.py", "class Generator:\n    def run(self): pass")
    got = world.run(
        f"import speculators.gen as gen\nimport spec_compat\n{retry}\n"
        "o = spec_compat.engine.engine._outcomes['extract/run']\n"
        f"answer([gen.during, o.state, o.late, {CALL}])"
    )
    assert got == ["pending", "applied", True, "patched original"]
    assert world.stderr == ""


def test_pending_at_a_checkpoint_is_a_problem(world: World) -> None:
    world.patch()
    world.write(
        "speculators/gen.py",
        """
        import spec_compat
        report = spec_compat.report()
        during = [o.state for o in report.problems()]
        class Generator:
            def run(self):
                return "original"
        """,
    )
    assert world.run("import speculators.gen as gen\nanswer(gen.during)") == ["pending"]
    assert "half-imported" in world.stderr


BROKEN = {
    "the probe": "@patch.probe\ndef needed(module):\n    raise OSError('broken')\n",
    "a factory": "@patch.replace('count')\ndef f(original, module):\n    raise OSError('broken')\n",
}


@pytest.mark.parametrize("part", BROKEN)
def test_an_error_in_a_patch_never_reaches_the_import(world: World, part: str) -> None:
    world.patch("extract/run", dedent(RUN) + BROKEN[part])
    got = world.run(
        f"import spec_compat, speculators.gen as gen\n"
        f"o, = spec_compat.report().outcomes; answer([{CALL}, gen.count(1), o.state, o.reason])"
    )
    assert got == ["original", 1, "failed", "OSError: broken"]
    assert "extract/run: failed: OSError: broken" in world.stderr


def test_an_error_around_a_patch_does_not_reach_the_import_either(world: World) -> None:
    """Here it is the report that fails: the reason is no string, and JSON has no word for it."""
    text = "@patch.probe\ndef needed(module):\n    return already_fixed(object())\n"
    world.patch("extract/run", dedent(RUN) + text)
    code = "import spec_compat, speculators.gen"
    world.run(code, SPEC_COMPAT_REPORT_DIR=str(world.reports))
    assert "the hook after the import of speculators.gen failed" in world.stderr
    world.run(code, fails=True, SPEC_COMPAT_REPORT_DIR=str(world.reports), SPEC_COMPAT_STRICT="1")


@pytest.mark.parametrize("part", BROKEN)
def test_strict_raises_in_place(world: World, part: str) -> None:
    world.patch("extract/run", dedent(RUN) + BROKEN[part])
    code = "import spec_compat, speculators.gen"
    world.run(code, fails=True, SPEC_COMPAT_STRICT="1")
    assert "RequiredPatchMissing: extract/run: failed: OSError: broken" in world.stderr
    world.run(code)


def test_an_import_that_fails_is_patched_when_it_is_tried_again(world: World) -> None:
    world.patch()
    text = (world.site / "speculators/gen.py").read_text()
    world.write("speculators/gen.py", "import os\nif 'BREAK' in os.environ: 1 / 0\n" + text)
    got = world.run(
        f"""
import os, spec_compat
os.environ["BREAK"] = "1"
try:
    import speculators.gen
except ZeroDivisionError:
    del os.environ["BREAK"]
import speculators.gen as gen
answer({CALL})
"""
    )
    assert got == "patched original"


@pytest.mark.parametrize(
    "again",
    [
        "importlib.reload(gen)",
        "del sys.modules['speculators.gen']; importlib.import_module('speculators.gen')",
        "del sys.modules['speculators.gen']",
        "gen.Generator.run = lambda self: 'theirs'",
        "del gen.Generator",
    ],
)
def test_what_undoes_a_patch_behind_our_back_is_lost(world: World, again: str) -> None:
    world.patch()
    got = world.run(
        f"""
import importlib, spec_compat, speculators.gen as gen
before = states()
{again}
report = spec_compat.report()
answer([before, states(), [o.id for o in report.problems()]])
"""
    )
    assert got == [{"extract/run": "applied"}, {"extract/run": "lost"}, ["extract/run"]]
    assert "extract/run: lost" in world.stderr


def test_python_m_runs_a_watched_module(world: World) -> None:
    world.patch()
    got = world.run(
        "import runpy, spec_compat\n"
        "answer(runpy.run_module('speculators.gen', run_name='__main__')['count'](2))"
    )
    assert got == 2


def test_the_module_keeps_its_own_loader(world: World) -> None:
    world.patch()
    got = world.run(
        "import inspect, spec_compat, speculators.gen as gen\n"
        "names = [type(gen.__loader__).__name__, type(gen.__spec__.loader).__name__]\n"
        "answer([*names, 'class Base' in inspect.getsource(gen)])"
    )
    assert got == ["SourceFileLoader", "SourceFileLoader", True]


def test_no_lock_is_held_while_a_probe_imports(world: World) -> None:
    """Another thread imports a watched module meanwhile, and the probe waits for it."""
    world.write("speculators/other.py", "def count(n): return n")
    text = """
        @patch.probe
        def needed(module):
            import importlib, threading
            threads = [threading.Thread(target=importlib.import_module, args=["speculators.other"])]
            threads[0].start()
            threads[0].join(timeout=10)
            return moved("deadlock") if threads[0].is_alive() else NEEDED
    """
    world.patch("extract/run", dedent(RUN) + dedent(text))
    world.patch("extract/other", COUNT.replace("speculators.gen", "speculators.other"))
    assert world.run("import spec_compat, speculators.gen\nanswer(states())") == {
        "extract/other": "applied",
        "extract/run": "applied",
    }


@pytest.mark.parametrize(
    ("order", "aliases"),
    [
        ("import spec_compat, speculators.user as user, speculators.gen as gen", 0),
        ("import speculators.user as user, speculators.gen as gen, spec_compat", 1),
    ],
    ids=["early", "late"],
)
def test_names_imported_from_the_target_follow_it(world: World, order: str, aliases: int) -> None:
    world.patch("extract/it", COUNT)
    got = world.run(
        f"""
{order}
o, = spec_compat.report().outcomes
patched = [gen.count(1), user.count(1)]
spec_compat.undo()
answer([patched, o.reason, [gen.count(1), user.count(1)]])
"""
    )
    assert got == [[-1, -1], f"needed, {aliases} aliases", [1, 1]]


def test_aliases_outside_speculators_are_not_ours_to_change(world: World) -> None:
    world.patch("extract/it", COUNT)
    world.write("theirs.py", "from speculators.gen import count")
    world.write("vllm/theirs.py", "from speculators.gen import count")
    got = world.run(
        "import theirs, vllm.theirs, speculators.gen as gen\n"
        "original = gen.count\n"
        "import spec_compat\n"
        "answer([gen.count(1), original(1), theirs.count(1), vllm.theirs.count(1)])"
    )
    assert got == [-1, 1, 1, 1]


def test_the_plugin_can_be_called_any_number_of_times(world: World) -> None:
    world.patch()
    got = world.run(
        "from spec_compat.plugin import register\nregister()\nimport speculators.gen as gen\n"
        f"register(); register()\nanswer({CALL})"
    )
    assert got == "patched original"


@pytest.mark.parametrize(
    ("patch", "env", "message"),
    [
        ("patch = 1 / 0", {}, "division by zero"),
        ("import no_such_module", {}, "no_such_module"),
        ("patch = None", {}, "extract/bad: a patch file defines one `patch`"),
        (RUN, {"SPEC_COMPAT_DISABLE": "extract/bat"}, "did you mean extract/bad?"),
        (RUN, {"SPEC_COMPAT_ASSUME_VLLM": "dev"}, "SPEC_COMPAT_ASSUME_VLLM=dev: not a release"),
    ],
)
def test_the_plugin_never_breaks_the_process_that_loads_it(
    world: World, patch: str, env: dict[str, str], message: str
) -> None:
    world.patch("extract/bad", patch)
    load = "from spec_compat.plugin import register; register()"
    world.run(load, **env)
    assert f"no patch is armed: {message}" in world.stderr or message in world.stderr
    world.run("import spec_compat; spec_compat.require()", fails=True, **env)
    assert message in world.stderr
    world.run(load, fails=True, SPEC_COMPAT_STRICT="1", **env)


CHILD = """
    import multiprocessing, sys

    def work(out):
        import speculators.gen as gen
        from spec_compat.plugin import register
        register()
        out.put(gen.Generator().run())

    if __name__ == "__main__":
        import spec_compat
        {before}
        context = multiprocessing.get_context("{method}")
        out = context.Queue()
        child = context.Process(target=work, args=[out], name="VllmWorker-0")
        child.start()
        answer([child.pid, out.get(timeout=30)])
        child.join()
"""


@pytest.mark.parametrize("method", ["spawn", "fork"])
@pytest.mark.parametrize("before", ["pass", "import speculators.gen"], ids=["early", "late"])
def test_a_child_is_patched_and_proves_it(world: World, method: str, before: str) -> None:
    world.patch("extract/run", RUN.replace("when=", 'scope="worker", when='))
    pid, called = world.run(
        dedent(CHILD).format(method=method, before=before),
        SPEC_COMPAT_REPORT_DIR=str(world.reports),
    )
    assert called == "patched original"
    child = [o for o in Report.merge(world.reports).outcomes if o.role == "VllmWorker-0"]
    assert [(o.pid, o.id, o.state) for o in child] == [(pid, "extract/run", "applied")]


def test_a_forked_child_reports_what_it_inherited(world: World) -> None:
    """vLLM does not call its plugins again in a child that was forked after they were loaded."""
    world.patch()
    code = dedent(CHILD).format(method="fork", before="import speculators.gen")
    world.run(
        code.replace("        register()\n", "").replace("    register()\n", ""),
        SPEC_COMPAT_REPORT_DIR=str(world.reports),
    )
    roles = {o.role: o.state for o in Report.merge(world.reports).outcomes}
    assert roles == {"driver": "applied", "VllmWorker-0": "applied"}


def test_a_fork_while_another_thread_holds_the_lock(world: World) -> None:
    world.patch()
    got = world.run(
        """
import os, threading, spec_compat, speculators.gen
held, release = threading.Event(), threading.Event()
def hold():
    with spec_compat.engine.engine._lock:
        held.set()
        release.wait()
thread = threading.Thread(target=hold)
thread.start()
held.wait()
pid = os.fork()
if pid == 0:
    import faulthandler
    faulthandler.dump_traceback_later(10, exit=True)
    os._exit(0 if states() == {"extract/run": "applied"} else 3)
status = os.waitpid(pid, 0)[1]
release.set()
answer(status)
"""
    )
    assert got == 0
