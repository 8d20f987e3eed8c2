"""The snapshots, support.toml and the documentation of the patches say the same."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from spec_compat import registry, versions
from spec_compat.support import support
from tests.contract.upstream.snapshots import PATCHES, imports, releases, snapshot

RELEASES = releases("vllm")
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
    return lambda taken: re.search(text, found(taken)) is None


def member(path: str, name: str) -> Holds:
    return lambda taken: name in taken["symbols"].get(path, {}).get("members", {})


def fact(name: str) -> Holds:
    return lambda taken: name in taken["facts"]


def serves(*architectures: str) -> Holds:
    return lambda taken: set(architectures) <= set(taken["eagle3"])


def asks(taken: Mapping[str, Any], pattern: str) -> bool:
    """Whether vLLM's wheel asks for such a transformers."""
    return re.search(pattern, taken["requires"]["transformers"]) is not None


SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
SCHEDULER_CONFIG = "vllm.config:SchedulerConfig"
CACHE_CONFIG = "vllm.config:CacheConfig"
GROUPS = "vllm.v1.core.kv_cache_utils:get_kv_cache_config_from_groups"
PLANNED = "vllm.v1.core.kv_cache_planning:get_kv_cache_config_from_groups"
HASHING = "vllm.utils.hashing:get_hash_fn_by_name"
LLAMA = "vllm.model_executor.models.llama:LlamaModel"
PRELOADED = "a worker on a CPU looks at LD_PRELOAD"
refuses = fact("a worker on a CPU refuses to start without it")
# Each release that a patch's docstring names: what is so from it on, and not before.
CLAIMS: dict[tuple[str, str], Holds] = {
    ("extract/block-size", "0.18.0"): member(CACHE_CONFIG, "user_specified_block_size"),
    ("extract/block-size", "0.29.0"): fact("blocks on a CPU are multiples of 32"),
    ("extract/cache-config", "0.12.0"): has(CACHE_CONFIG, "enable_prefix_caching=True"),
    ("extract/capture", "0.11.1"): member(LLAMA, "embed_input_ids"),
    ("extract/executor", "0.11.1"): lambda taken: all(
        fact(name)(taken)
        for name in ("a step waits for sample_tokens", "a single reply is no list")
    ),
    ("extract/hashing", "0.11.1"): lambda taken: HASHING in taken["symbols"],
    ("extract/kv-cache-config", "0.12.0"): lacks(GROUPS, "kv_cache_specs"),
    ("extract/kv-cache-config", "0.20.0"): lacks(CACHE_CONFIG, "cpu_kvcache_space_bytes"),
    ("extract/kv-cache-layout", "0.29.0"): fact("the layout must be resolved"),
    ("extract/kv-cache-layout", "0.33.0"): has(
        "vllm.v1.executor.multiproc_executor:MultiprocExecutor",
        "cp_kv_cache_interleave_size",
        "set_kv_cache_layout",
    ),
    ("extract/kv-cache-planning", "0.33.0"): lambda taken: PLANNED in taken["symbols"],
    ("extract/model-runner", "0.22.0"): fact("the second model runner is some models' default"),
    ("extract/preload", "0.18.0"): fact(PRELOADED),
    ("extract/preload", "0.19.0"): lambda taken: fact(PRELOADED)(taken) and not refuses(taken),
    ("extract/request", "0.17.0"): lacks("vllm.v1.request:Request", "eos_token_id"),
    ("extract/scheduler", "0.11.1"): has(SCHEDULER, r"\bblock_size[,)]"),
    ("extract/scheduler", "0.23.0"): fact("the scheduler's block size is compared"),
    ("extract/scheduler-config", "0.12.0"): has(SCHEDULER_CONFIG, r"is_encoder_decoder[,)]"),
    ("extract/scheduler-config", "0.14.0"): has(SCHEDULER_CONFIG, "async_scheduling=None"),
    ("extract/torch-name", "0.19.1"): lambda taken: asks(taken, r"[!>]=5\."),
    ("extract/torch-name", "0.24.0"): lambda taken: asks(taken, r">=5\."),
    ("serve/deepseek-eagle3", "0.18.0"): serves("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"),
    ("serve/kimi-k25-eagle3", "0.18.0"): serves("KimiK25ForConditionalGeneration"),
    ("extract/warm-up", "0.27.0"): lambda taken: not fact("initialize_from_config warms up")(taken),
}
# Named for another reason: the release that speculators copied from, the last one before a change,
# the one that was run.
NAMED = {
    ("extract/capture", "0.11.0"),
    ("extract/executor", "0.11.0"),
    ("extract/executor", "0.32.0"),  # seen there, not with 0.16
    ("extract/hashing", "0.11.0"),
    ("extract/model-runner", "0.20.2"),
    ("extract/preload", "0.18.1"),
    ("extract/warm-up", "0.26.0"),
    ("serve/eagle3-config", "0.17.0"),
    ("serve/eagle3-config", "0.18.0"),
}


@pytest.mark.parametrize(("patch_id", "release"), CLAIMS)
def test_what_a_patch_says_began_with_a_release_did(patch_id: str, release: str) -> None:
    holds = CLAIMS[patch_id, release]
    found = [other for other in RELEASES if holds(snapshot("vllm", other))]
    assert found == [other for other in RELEASES if Version(other) >= Version(release)]


def test_every_release_in_a_docstring_is_checked_here() -> None:
    named = {
        (patch.id, release)
        for patch in registry.patches()
        for release in re.findall(r"(?<![\d.])0\.\d\d\.\d\b", patch.doc)
    }
    assert named == {*CLAIMS, *NAMED}


def test_where_a_range_begins_or_ends_something_began() -> None:
    """Else a range that is too wide or too narrow by a release would be nobody's fault."""
    said = {(patch_id, Version(release)) for patch_id, release in {*CLAIMS, *NAMED}}
    for patch in (patch for patch in registry.patches() if not patch.opt_in):
        for clause in SpecifierSet(patch.when.get("vllm", "")):
            bound = Version(clause.version)
            oldest = clause.operator == ">=" and bound == Version("0.11")
            assert oldest or (patch.id, bound) in said, f"{patch.id}: {clause}"


def test_what_a_patch_imports_from_vllm_is_in_a_snapshot() -> None:
    found = imports(PATCHES.rglob("*.py"))
    names = {f"{module}:{name}" for module, name in found}
    taken = {name for release in RELEASES for name in snapshot("vllm", release)["symbols"]}
    assert names <= taken  # else: python -m tests.contract.upstream vllm ...


def test_there_is_a_snapshot_of_every_release_that_is_known_and_of_no_other() -> None:
    for package in ("speculators", "vllm"):
        rows = getattr(support(), package)
        known = [release for row in rows for release in (row["version"], *row.get("same", ()))]
        assert sorted(known, key=Version) == releases(package)


def test_support_asks_for_what_the_wheels_ask_for() -> None:
    for row in support().vllm:
        taken = snapshot("vllm", row["version"])
        torch = re.sub(r"==|\+cpu", "", taken["requires"]["torch"])
        found = (taken["python"], torch, taken["requires"]["transformers"])
        assert (row["python"], row["torch"], row["transformers"]) == found, row["version"]
        assert taken["torch_cuda"] == f"=={row['torch_cuda']}", row["version"]
    for row in support().speculators:
        taken = snapshot("speculators", row["version"])
        for name, specifier in taken["requires"].items():
            assert set(row[name].split(",")) == set(specifier.split(",")), row["version"]


def test_patch_releases_stand_with_another_exactly_where_they_do_not_differ_from_it() -> None:
    rows = support().vllm
    for row in rows:
        for release in row.get("same", ()):
            assert reached(release) == reached(row["version"]), release
    for row, newer in pairwise(rows):
        if Version(row["version"]).release[:2] == Version(newer["version"]).release[:2]:
            assert reached(row["version"]) != reached(newer["version"]), newer["version"]


def reached(release: str) -> tuple[Any, ...]:
    taken = snapshot("vllm", release)
    return taken["symbols"], taken["facts"], taken["config_forbids"]


@pytest.mark.parametrize("release", RELEASES)
def test_the_capture_finds_what_it_reads(release: str) -> None:
    taken = snapshot("vllm", release)
    reads = {
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner": "input_batch requests execute_model",
        "vllm.v1.worker.gpu_input_batch:InputBatch": "req_ids",
        "vllm.v1.core.sched.output:SchedulerOutput": "num_scheduled_tokens "
        "total_num_scheduled_tokens finished_req_ids",
        "vllm.v1.outputs:ModelRunnerOutput": "req_ids sampled_token_ids",
        "vllm.v1.core.sched.scheduler:Scheduler": "running requests finished_req_ids",
        "vllm.v1.kv_cache_interface:KVCacheConfig": "num_blocks kv_cache_groups",
        "vllm.v1.executor.multiproc_executor:MultiprocExecutor": "collective_rpc",
        "vllm.v1.worker.gpu_worker:Worker": "execute_model",
    }
    if fact("a step waits for sample_tokens")(taken):
        reads["vllm.v1.worker.gpu_worker:Worker"] += " sample_tokens"
    if Version(release) >= Version("0.17"):  # before it the V2 model runner is nobody's default
        reads["vllm.v1.worker.gpu.model_runner:GPUModelRunner"] = "execute_model_state"
        reads["vllm.v1.worker.gpu.input_batch:InputBatch"] = "req_ids"
    for path, names in reads.items():
        members = taken["symbols"][path]["members"]
        fields = re.findall(r"\w+", members["__init__"])
        assert set(names.split()) <= {*members, *fields}, path


def test_serving_names_the_first_release_that_implements_eagle3_for_a_verifier() -> None:
    """Or the one that no longer compares the model_type with a list."""
    for release, architectures in versions.table("serving.toml")["architectures"].items():
        before = RELEASES[max(RELEASES.index(release) - 1, 0)]
        assert set(architectures) <= set(snapshot("vllm", release)["eagle3"]), release
        if release not in ("0.11.0", "0.22.0"):
            earlier = set(architectures) & set(snapshot("vllm", before)["eagle3"])
            assert not earlier, (release, earlier)


# Wrappers whose language model may be of several model types, by which releases before 0.22.0 go.
UNDECIDED = {
    "InternS1ProForConditionalGeneration", "LightOnOCRForConditionalGeneration",
    "MistralLarge3ForCausalLM", "OpenCUAForConditionalGeneration",
}  # fmt: skip
DRAFTS_AND_BACKENDS = ("Eagle", "DFlash", "PEagle", "Peagle", "Transformers")


def test_serving_knows_every_verifier_of_the_newest_release() -> None:
    """A head for one that it does not know would be called unserved."""
    named = {
        name
        for name in snapshot("vllm", RELEASES[-1])["eagle3"]
        if name.endswith(("ForCausalLM", "ForConditionalGeneration"))
        and not name.startswith(DRAFTS_AND_BACKENDS)
    }
    known = {a for names in versions.table("serving.toml")["architectures"].values() for a in names}
    assert named - known == UNDECIDED
