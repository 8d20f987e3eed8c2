"""The snapshots, support.toml and the documentation of the patches say the same."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import contract
import pytest
from packaging.version import Version

from spec_compat import registry, versions
from spec_compat.support import support

RELEASES = contract.releases("vllm")
Holds = Callable[[Mapping[str, Any]], bool]


def signature(path: str, member: str = "__init__") -> Callable[[Mapping[str, Any]], str]:
    """The signature of `module:function`, or of a member of `module:Class`; "" without it."""

    def find(taken: Mapping[str, Any]) -> str:
        entry = taken["symbols"].get(path, {})
        return str(entry.get("signature") or entry.get("members", {}).get(member, ""))

    return find


def has(path: str, text: str, member: str = "__init__") -> Holds:
    found = signature(path, member)
    return lambda taken: re.search(text, found(taken)) is not None


def lacks(path: str, text: str, member: str = "__init__") -> Holds:
    found = signature(path, member)
    return lambda taken: bool(found(taken)) and re.search(text, found(taken)) is None


def member(path: str, name: str) -> Holds:
    return lambda taken: name in taken["symbols"].get(path, {}).get("members", {})


def fact(name: str) -> Holds:
    return lambda taken: name in taken["facts"]


SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
SCHEDULER_CONFIG = "vllm.config:SchedulerConfig"
CACHE_CONFIG = "vllm.config:CacheConfig"
GROUPS = "vllm.v1.core.kv_cache_utils:get_kv_cache_config_from_groups"
LLAMA = "vllm.model_executor.models.llama:LlamaModel"
# Each release that a patch's docstring names: what is so from it on, and not before.
CLAIMS: dict[tuple[str, str], Holds] = {
    ("extract/cache-config", "0.12.0"): has(CACHE_CONFIG, "enable_prefix_caching=True"),
    ("extract/capture", "0.11.1"): member(LLAMA, "embed_input_ids"),
    ("extract/executor", "0.11.1"): fact("a step waits for sample_tokens"),
    ("extract/kv-cache-config", "0.12.0"): lacks(GROUPS, "kv_cache_specs"),
    ("extract/reply-shape", "0.11.1"): fact("a single reply is no list"),
    ("extract/scheduler", "0.11.1"): has(SCHEDULER, r"\bblock_size[,)]"),
    ("extract/scheduler-config", "0.12.0"): has(SCHEDULER_CONFIG, r"is_encoder_decoder[,)]"),
    ("extract/scheduler-config", "0.14.0"): has(SCHEDULER_CONFIG, "async_scheduling=None"),
}
# Releases that are named for something else than a change in vLLM.
NAMED = {("extract/capture", "0.11.0")}


@pytest.mark.parametrize(("patch_id", "release"), CLAIMS)
def test_what_a_patch_says_began_with_a_release_did(patch_id: str, release: str) -> None:
    holds = CLAIMS[patch_id, release]
    found = [other for other in RELEASES if holds(contract.snapshot("vllm", other))]
    assert found == [other for other in RELEASES if Version(other) >= Version(release)]


def test_every_release_in_a_docstring_is_checked_here() -> None:
    named = {
        (patch.id, release)
        for patch in registry.patches()
        for sentence in re.split(r"(?<=\w)\.\s|;|\n\w", patch.doc)
        if "speculators" not in sentence or "vLLM" in sentence
        for release in re.findall(r"\b0\.\d\d\.\d\b", sentence)
    }
    assert named == {*CLAIMS, *NAMED}


def test_there_is_a_snapshot_of_every_release_that_is_known_and_of_no_other() -> None:
    for package in ("speculators", "vllm"):
        rows = getattr(support(), package)
        known = [release for row in rows for release in (row["version"], *row.get("same", ()))]
        assert sorted(known, key=Version) == contract.releases(package)


def test_support_asks_for_what_the_wheels_ask_for() -> None:
    for row in support().vllm:
        taken = contract.snapshot("vllm", row["version"])
        torch = re.sub(r"==|\+cpu", "", taken["requires"]["torch"])
        found = (taken["python"], torch, taken["requires"]["transformers"])
        assert (row["python"], row["torch"], row["transformers"]) == found, row["version"]
    for row in support().speculators:
        taken = contract.snapshot("speculators", row["version"])
        for name, specifier in taken["requires"].items():
            assert set(row[name].split(",")) == set(specifier.split(",")), row["version"]


def test_patch_releases_that_stand_with_another_do_not_differ_from_it() -> None:
    for row in support().vllm:
        for release in row.get("same", ()):
            assert reached(release) == reached(row["version"]), release
        others = [other for other in support().vllm if other is not row]
        minor = [o for o in others if o["version"].split(".")[:2] == row["version"].split(".")[:2]]
        assert all(reached(o["version"]) != reached(row["version"]) for o in minor)


def reached(release: str) -> tuple[Any, ...]:
    taken = contract.snapshot("vllm", release)
    return taken["symbols"], taken["facts"], taken["config_forbids"]


def test_serving_names_verifiers_that_implement_eagle3() -> None:
    for release, architectures in versions.table("serving.toml")["architectures"].items():
        implemented = contract.snapshot("vllm", release)["eagle3"]
        assert set(architectures) <= set(implemented), release
