"""Every call that speculators makes binds on every vLLM release, once the patches have adapted it.

Both are built out of snapshots (tests/contract/upstream): only the patches are imported.
"""

from __future__ import annotations

import sys
from functools import cache

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from spec_compat import registry
from spec_compat.patching import Verdict
from tests.contract.upstream.pair import Pair
from tests.contract.upstream.snapshots import releases

PAIRS = [(s, v) for s in releases("speculators") for v in releases("vllm")]
BY_RUNNING = {"train/loss-mask-shift"}  # its probe runs speculators' code, which is not here
# Where speculators' calls bind without any patch: the releases that it was made for.
MADE_FOR = {"0.3.0": "==0.11.0", "0.4.0": ">=0.12,<0.17", "0.4.0.1": ">=0.12,<0.17"}


@cache
def pair(speculators: str, vllm: str, patched: bool = True) -> Pair:
    return Pair(speculators, vllm, patched)


@pytest.mark.parametrize(("speculators", "vllm"), PAIRS)
def test_every_call_binds(speculators: str, vllm: str) -> None:
    assert pair(speculators, vllm).breaks == []


@pytest.mark.parametrize(("speculators", "vllm"), PAIRS)
def test_without_the_patches_they_bind_only_where_speculators_was_made_for(
    speculators: str, vllm: str
) -> None:
    bare = pair(speculators, vllm, patched=False)
    assert (not bare.breaks) == (Version(vllm) in SpecifierSet(MADE_FOR[speculators]))


@pytest.mark.parametrize(("speculators", "vllm"), PAIRS)
def test_a_patch_is_needed_wherever_its_range_says_so(speculators: str, vllm: str) -> None:
    met = pair(speculators, vllm)
    found = {patch_id: met.verdicts[patch_id] for patch_id in met.nominated - BY_RUNNING}
    assert {k: p for k, p in found.items() if p.verdict is not Verdict.NEEDED} == {}
    assert found


def test_every_patch_of_speculators_is_met_somewhere() -> None:
    met = {patch_id for s, v in PAIRS for patch_id in pair(s, v).nominated}
    ours = [patch for patch in registry.patches() if patch.module.startswith("speculators")]
    # Of transformers there is no snapshot.
    assert met == {patch.id for patch in ours if "transformers" not in patch.when}


def test_no_module_of_the_snapshots_stays_behind() -> None:
    before = dict(sys.modules)
    Pair("0.3.0", "0.16.0")
    assert {name for name in sys.modules if name not in before} == set()
    assert all(sys.modules[name] is module for name, module in before.items())
