"""Apply, roll back, undo: what stands in the modules after each, and what the report says."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest

from tests.unit.world import RUN, World

ARM = "import spec_compat, speculators.gen as gen\n"
UNTOUCHED = Path(__file__).parents[1] / "live" / "untouched.py"
PATCH = 'patch = Patch(module="speculators.gen", when={"speculators": ">=0.3"})\n'


def replacing(*factories: str) -> str:
    return PATCH + "".join(map(dedent, factories))


def test_a_method_is_replaced_and_undone(world: World) -> None:
    world.patch()
    got = world.run(
        ARM
        + """
raw = gen.Generator.__dict__["run"].__wrapped__
before = [gen.Generator().run(), states()]
spec_compat.undo("extract/run")
answer([*before, gen.Generator().run(), gen.Generator.__dict__["run"] is raw, states()])
"""
    )
    assert got == [
        "patched original",
        {"extract/run": "applied"},
        "original",
        True,
        {"extract/run": "undone"},
    ]


@pytest.mark.parametrize(
    ("qualname", "factory", "call", "before", "after"),
    [
        (
            "Generator.size",
            "def make(original, module):\n"
            "    return staticmethod(lambda: original.__func__() + 1)\n",
            "gen.Generator().size()",
            1,
            2,
        ),
        (
            "Generator.name",
            "def make(original, module):\n"
            "    return classmethod(lambda cls: original.__func__(cls).upper())\n",
            "gen.Generator.name()",
            "Generator",
            "GENERATOR",
        ),
        (
            "Generator.inherited",
            "def make(original, module):\n    return lambda self: 'sub of ' + original(self)\n",
            "gen.Generator().inherited()",
            "base",
            "sub of base",
        ),
        (
            "count",
            "def make(original, module):\n    return lambda n: 2 * original(n)\n",
            "gen.count(3)",
            3,
            6,
        ),
    ],
    ids=["staticmethod", "classmethod", "inherited", "function"],
)
def test_each_kind_of_target_is_replaced_and_put_back_as_it_was(
    world: World, qualname: str, factory: str, call: str, before: object, after: object
) -> None:
    world.patch("extract/it", replacing(f'@patch.replace("{qualname}")\n{factory}'))
    got = world.run(
        f"""
import speculators.gen as gen
raw = {{k: dict(vars(o)) for k, o in [("m", gen), ("g", gen.Generator), ("b", gen.Base)]}}
import spec_compat
patched = {call}
spec_compat.undo()
same = raw == {{k: dict(vars(o)) for k, o in [("m", gen), ("g", gen.Generator), ("b", gen.Base)]}}
answer([patched, {call}, same])
"""
    )
    assert got == [after, before, True]


def test_an_inherited_method_is_set_on_the_subclass_alone(world: World) -> None:
    text = (
        '@patch.replace("Generator.inherited")\ndef f(original, module):\n    return lambda s: 1\n'
    )
    world.patch("extract/it", replacing(text))
    assert world.run(ARM + "answer([gen.Generator().inherited(), gen.Base().inherited()])") == [
        1,
        "base",
    ]


TWO = """
    class Meta(type):
        def __setattr__(cls, name, value):
            if name == "{refused}":
                raise RuntimeError("no " + name)
            super().__setattr__(name, value)

    class Guarded(metaclass=Meta):
        def first(self):
            return 1

        def second(self):
            return 2

    def third():
        return 3
"""
ALL_THREE = """
    @patch.replace("third")
    def third(original, module):
        return lambda: 30

    @patch.replace("Guarded.first")
    def first(original, module):
        return lambda self: 10

    @patch.replace("Guarded.second")
    def second(original, module):
        return lambda self: 20
"""


@pytest.mark.parametrize(
    ("refused", "values", "state"),
    [
        ("", [30, 10, 20], "applied"),
        ("second", [3, 1, 2], "failed"),
        ("first", [3, 1, 2], "failed"),
    ],
)
def test_all_replacements_of_a_patch_or_none(
    world: World, refused: str, values: list[int], state: str
) -> None:
    world.write("speculators/gen.py", TWO.format(refused=refused))
    world.patch("extract/it", replacing(ALL_THREE))
    calls = "[gen.third(), gen.Guarded().first(), gen.Guarded().second()]"
    assert world.run(ARM + f"answer([{calls}, states()])") == [values, {"extract/it": state}]


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("missing", "speculators.gen has no missing"),
        ("Generator.missing", "speculators.gen has no Generator.missing"),
        ("Missing.run", "speculators.gen has no class Missing"),
    ],
)
def test_a_target_that_is_gone_is_moved_and_nothing_is_set(
    world: World, target: str, reason: str
) -> None:
    gone = f'@patch.replace("{target}")\ndef gone(original, module):\n    return original\n'
    count = '@patch.replace("count")\ndef count(original, module):\n    return lambda n: -1\n'
    world.patch("extract/it", replacing(count, gone))
    got = world.run(
        ARM + "o, = spec_compat.report().outcomes; answer([gen.count(1), o.state, o.reason])"
    )
    assert got[:2] == [1, "moved"]
    assert got[2].startswith(reason)
    assert "extract/it: moved" in world.stderr


@pytest.mark.parametrize(
    ("verdict", "state"),
    [
        ("NEEDED", "applied"),
        ('already_fixed("it is fixed")', "not-needed"),
        ('moved("it moved")', "moved"),
        ("1 / 0", "failed"),
        ("None", "failed"),
    ],
)
def test_the_probe_decides(world: World, verdict: str, state: str) -> None:
    probe = f"@patch.probe\ndef needed(module):\n    return {verdict}\n"
    world.patch(
        "extract/it",
        replacing(
            probe, '@patch.replace("count")\ndef c(original, module):\n    return lambda n: -1\n'
        ),
    )
    got = world.run(ARM + "answer([gen.count(1), states()])")
    assert got == [-1 if state == "applied" else 1, {"extract/it": state}]


@pytest.mark.parametrize(
    ("qualname", "reason"),
    [("SchedulerConfig.__init__", "belongs to vllm.config"), ("Thing.run", "belongs to vllm")],
)
def test_a_class_that_speculators_only_imports_is_left_alone(
    world: World, qualname: str, reason: str
) -> None:
    world.write(
        "speculators/gen.py",
        """
        from vllm.config import SchedulerConfig
        class Thing: __module__ = "vllm.thing"; run = print
        """,
    )
    world.patch(
        "extract/it", replacing(f'@patch.replace("{qualname}")\ndef f(o, m):\n    return o\n')
    )
    got = world.run(ARM + "o, = spec_compat.report().outcomes; answer([o.state, o.reason])")
    assert got[0] == "failed"
    assert reason in got[1]


def test_a_name_that_speculators_imports_from_vllm_is_replaced_in_speculators_alone(
    world: World,
) -> None:
    """vLLM is never modified, also when its own object is what the name held."""
    world.write("vllm/other.py", "from vllm.config import SchedulerConfig")
    world.write("speculators/user.py", "from vllm.config import SchedulerConfig")
    text = """
        @patch.replace("SchedulerConfig")
        def config(original, module):
            return lambda **kwargs: original(block_size=16, **kwargs)
    """
    world.patch("extract/it", replacing(text))
    got = world.run(
        """
import speculators.gen as gen, speculators.user, vllm.config, vllm.other
before = vllm.config.SchedulerConfig
import spec_compat
answer([
    states(),
    gen.SchedulerConfig().block_size,
    vllm.config.SchedulerConfig is before,
    vllm.other.SchedulerConfig is before,
    speculators.user.SchedulerConfig is before,
])
"""
    )
    assert got == [{"extract/it": "applied"}, 16, True, True, True]


def test_arming_twice_wraps_once(world: World) -> None:
    world.patch()
    assert (
        world.run(ARM + "spec_compat.arm(); spec_compat.arm(); answer(gen.Generator().run())")
        == "patched original"
    )


def test_two_patches_of_one_name_stack_in_order_and_undo_in_reverse(world: World) -> None:
    world.patch("extract/a")
    second = """
        patch = Patch(module="speculators.gen", when={}, after=("extract/a",))

        @patch.replace("Generator.run")
        def run(original, module):
            return lambda self: "second " + original(self)
    """
    world.patch("extract/b", second)
    got = world.run(
        ARM
        + """
run = gen.Generator().run
seen = [run(), states()]
spec_compat.undo("extract/a")
seen += [gen.Generator().run(), states()]
spec_compat.undo()
answer([*seen, gen.Generator().run(), states()])
"""
    )
    assert got == [
        "second patched original",
        {"extract/a": "applied", "extract/b": "applied"},
        "second patched original",
        {"extract/a": "foreign", "extract/b": "applied"},
        "original",
        {"extract/a": "undone", "extract/b": "undone"},
    ]


@pytest.mark.parametrize(
    ("overwrite", "checked", "undone"),
    [
        ("functools.wraps(ours)(lambda self: ours(self))", "applied", "foreign"),
        ("lambda self: 'theirs'", "lost", "foreign"),
    ],
    ids=["wrapped", "overwritten"],
)
def test_a_foreign_layer_is_noticed_and_never_stripped(
    world: World, overwrite: str, checked: str, undone: str
) -> None:
    world.patch()
    got = world.run(
        ARM
        + f"""
import functools
ours = gen.Generator.run
theirs = gen.Generator.run = {overwrite}
seen = states()["extract/run"]
spec_compat.undo()
answer([seen, states()["extract/run"], gen.Generator.run is theirs])
"""
    )
    assert got == [checked, undone, True]


def test_a_proxy_as_a_replacement_is_refused(world: World) -> None:
    text = """
        from functools import partial

        @patch.replace("count")
        def count(original, module):
            return partial(original, 1)
    """
    world.patch("extract/it", replacing(text))
    got = world.run(ARM + "o, = spec_compat.report().outcomes; answer([o.state, o.reason])")
    assert got[0] == "failed"
    assert "does not pickle by name" in got[1]


@pytest.mark.parametrize("library", ["pickle", "cloudpickle"])
def test_what_pickled_by_name_still_does(world: World, library: str) -> None:
    """vLLM sends bound methods to its workers; a name of speculators' stands for our object."""
    pytest.importorskip(library)
    text = """
        @patch.replace("Generator.run")
        def run(original, module):
            def anything(self):
                return "patched"
            return anything

        @patch.replace("Generator.name")
        def name(original, module):
            @classmethod
            def anything(cls):
                return "named"
            return anything

        @patch.replace("Generator.inherited")
        def inherited(original, module):
            @wraps(original)
            def inherited(self):
                return "patched"
            return inherited

        @patch.replace("SchedulerConfig")
        def config(original, module):
            @wraps(original, updated=())
            def build(*args):
                return original(*args)
            return build
    """
    world.patch("extract/it", replacing(text))
    got = world.run(
        ARM
        + f"""
import {library} as library
things = [gen.Generator.run, gen.Generator.name.__func__, gen.Generator.inherited,
          gen.SchedulerConfig]
answer([states()["extract/it"], gen.Generator.name.__func__.__qualname__]
       + [library.loads(library.dumps(t)) is t for t in (things[0], *things[2:])]
       + [library.loads(library.dumps(gen.Generator().run))()])
"""
    )
    assert got == ["applied", "Generator.name", True, True, True, "patched"]


def test_classes_and_modules_carry_no_mark(world: World) -> None:
    """vLLM asserts that a worker extension adds no attribute that its worker class has."""
    names = "[sorted(vars(gen)), sorted(vars(gen.Generator))]"
    world.patch()
    before = world.run(f"import speculators.gen as gen\nanswer({names})")
    assert world.run(ARM + f"answer({names})") == before


def test_require_names_each_missing_patch_with_its_reason(world: World) -> None:
    world.patch("extract/run")
    world.patch("extract/gone", replacing('@patch.replace("gone")\ndef f(o, m):\n    return o\n'))
    world.patch("train/later", RUN.replace("speculators.gen", "speculators.user"))
    got = world.run(
        ARM
        + """
from spec_compat.errors import RequiredPatchMissing
def missing(*ids, **options):
    try:
        spec_compat.require(*ids, **options)
    except RequiredPatchMissing as error:
        return [line.split()[:2] for line in str(error).splitlines()[1:]]
answer([
    missing("extract/run"), missing("extract/gone"), missing(stage="extract"),
    missing(stage="train"), missing(stage="train", scope="worker"),
])
"""
    )
    gone, later = ["extract/gone", "moved"], ["train/later", "armed"]
    assert got == [None, [gone], [gone], [later], None]


def test_an_optional_patch_is_never_required(world: World) -> None:
    text = 'patch = Patch(module="speculators.gen", when={}, severity="optional")\n'
    world.patch("extract/it", text + '@patch.replace("gone")\ndef f(o, m):\n    return o\n')
    got = world.run(ARM + "spec_compat.require(stage='extract'); answer(states())")
    assert got == {"extract/it": "moved"}
    assert "extract/it" not in world.stderr


@pytest.mark.parametrize(
    ("release", "said"),
    [
        ("0.99.0", "vllm 0.99.0 is newer than "),
        ("0.16.1.dev12+gabc", "vllm 0.16.1.dev12+gabc is no release; it is taken for 0.16.0"),
        ("0.16.0", ""),
    ],
)
def test_what_is_assumed_of_a_release_is_said_once_and_the_probe_decides(
    world: World, release: str, said: str
) -> None:
    world.patch()
    world.write("vllm/_version.py", f"__version__ = version = '{release}'\n")
    code = ARM + (
        "import multiprocessing\n"
        "child = multiprocessing.get_context('fork').Process(target=spec_compat.report)\n"
        "child.start(); child.join()\n"
        "answer(states())\n"
    )
    assert world.run(code) == {"extract/run": "applied"}
    lines = [line for line in world.stderr.splitlines() if line.startswith("vllm ")]
    assert [said in line for line in lines] == [True] * bool(said)


PROVIDES = """
    from types import ModuleType

    patch = Patch(module="speculators", when={"speculators": ">=0.3"})

    @patch.provide("flag")
    def flag(absent, module):
        return (absent, module.__name__)

    @patch.provide_import("vllm.hashing")
    def hashing(absent, module):
        made = ModuleType("vllm.hashing")
        made.digest = "sha256"
        return made
"""


def test_a_name_and_a_module_are_provided_before_what_follows_is_imported_and_taken_back(
    world: World,
) -> None:
    """The package itself triggers the patch, though its import is what armed it."""
    world.patch("extract/run", PROVIDES)
    world.write("speculators/late.py", "from vllm.hashing import digest")
    got = world.run(
        """
import spec_compat
from speculators.late import digest
import speculators
before = [digest, speculators.flag, states()]
spec_compat.undo()
answer([*before, hasattr(speculators, "flag"), "vllm.hashing" in sys.modules, states()])
"""
    )
    applied, undone = {"extract/run": "applied"}, {"extract/run": "undone"}
    assert got == ["sha256", [None, "speculators"], applied, False, False, undone]


def test_a_name_that_exists_is_not_provided(world: World) -> None:
    world.patch("extract/run", PROVIDES)
    world.write("speculators/__init__.py", "flag = 'its own'")
    got = world.run("import spec_compat, speculators\nanswer([speculators.flag, states()])")
    assert got == ["its own", {"extract/run": "moved"}]


@pytest.mark.parametrize(
    ("file", "reason"),
    [
        ("vllm/hashing.py", "vllm.hashing exists"),  # though nobody has imported it yet
        ("vllm/hashing/__init__.py", "vllm.hashing exists"),
        ("vllm/__init__.py", "vllm.hashing exists"),
    ],
)
def test_a_name_that_can_be_imported_is_not_provided(world: World, file: str, reason: str) -> None:
    world.patch("extract/run", PROVIDES)
    world.write(file, "hashing = 'its own'")
    got = world.run(
        "import spec_compat, speculators\nfrom vllm import hashing\n"
        "(outcome,) = spec_compat.report().outcomes\n"
        "answer([outcome.state, outcome.reason, getattr(hashing, 'hashing', hashing),"
        " hasattr(speculators, 'flag')])"
    )
    assert got == ["moved", reason, "its own", False]


def test_a_name_of_sys_modules_that_vllm_did_not_make_is_found(world: World) -> None:
    """By what tests/live/test_untouched.py looks with."""
    world.patch("extract/run", PROVIDES)
    got = world.run(
        f"""
sys.path.insert(0, {str(UNTOUCHED.parent)!r})
import vllm.config, spec_compat, {UNTOUCHED.stem}
before = {UNTOUCHED.stem}.made_up()
import speculators
answer([before, {UNTOUCHED.stem}.made_up(), {UNTOUCHED.stem}.declared()])
"""
    )
    assert got == [[], ["vllm.hashing"], ["vllm.hashing"]]


def test_a_method_is_provided_and_taken_back(world: World) -> None:
    text = """
        @patch.provide("Generator.stop")
        def stop(absent, module):
            return lambda self: [absent, module.__name__]
    """
    world.patch("extract/run", replacing(text))
    got = world.run(
        ARM
        + """
seen = [gen.Generator().stop(), states()]
spec_compat.undo()
answer([*seen, hasattr(gen.Generator, "stop"), states()])
"""
    )
    applied, undone = {"extract/run": "applied"}, {"extract/run": "undone"}
    assert got == [[None, "speculators.gen"], applied, False, undone]


@pytest.mark.parametrize("name", ["Generator.run", "Generator.inherited"])
def test_a_method_that_exists_is_not_provided(world: World, name: str) -> None:
    text = f"""
        @patch.provide("{name}")
        def method(absent, module):
            return lambda self: "ours"
    """
    world.patch("extract/run", replacing(text))
    assert world.run(ARM + "answer(states())") == {"extract/run": "moved"}


def test_a_provided_name_that_is_overwritten_is_lost(world: World) -> None:
    world.patch("extract/run", PROVIDES)
    got = world.run(
        "import spec_compat, speculators\nspeculators.flag = 'another'\nanswer(states())"
    )
    assert got == {"extract/run": "lost"}
