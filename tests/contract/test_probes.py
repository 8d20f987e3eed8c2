"""A patch that could be unnecessary, or wrong, without anybody noticing has a probe."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from spec_compat import registry
from spec_compat.patching import Patch, Verdict, mentions

# The required patches without a probe, each with what notices that it is not needed or not right.
UNPROBED = {
    "extract/capture": "each row that it captures is proven by lm_head against vLLM's own token; "
    "a name that is gone is moved",
    "extract/executor": "nothing of the generate() that it replaces runs, and every row is proven",
    "extract/hashing": "it is for one release, and the name must not exist: else it is moved",
    "extract/kv-cache-config": "its targets are names that the generator imports, moved when they "
    "go; an argument that vLLM does not take, or misses, is a TypeError",
    "extract/layer-count": "the language model's config of a language model's config is that one",
    "extract/model-runner": "capture reads the order of either runner, and proves every row",
    "extract/preload": "it is for two releases; the variable that it sets is read by nothing else "
    "in a worker that runs already",
    "extract/scheduler": "every row is proven and has all of its tokens; an argument that vLLM "
    "does not take, or misses, is a TypeError",
}


def test_every_required_patch_has_a_probe_or_a_reason_why_it_needs_none() -> None:
    bare = Patch(module="speculators", when={}).examine
    without = {
        patch.id
        for patch in registry.patches()
        if patch.severity == "required" and patch.examine.__code__ is bare.__code__
    }
    assert without == UNPROBED.keys()


def code(*names: str, texts: tuple[str, ...] = ()) -> Any:
    """A function that uses these names and texts."""
    namespace: dict[str, Any] = {}
    body = [f"    self.{name}" for name in names] + [f"    getattr(self, {t!r})" for t in texts]
    exec("\n".join(["def function(self):", *body, "    pass"]), namespace)  # noqa: S102
    return namespace["function"]


def head(setup: Any, forward: Any) -> Any:
    return SimpleNamespace(
        Eagle3DraftModel=SimpleNamespace(_setup_embeddings_and_lm_heads=setup, forward=forward)
    )


LOGITS = ("logit_scale", "logits_scaling", "dim_model_base", "final_logit_softcapping")
TARGETS = code("verifier_lm_head")
NORMED = code("verifier_lm_head", "verifier_norm")
FOUND: dict[str, list[tuple[Any, Verdict]]] = {
    "train/logit-scale": [
        (head(TARGETS, TARGETS), Verdict.NEEDED),
        (head(code(texts=LOGITS), TARGETS), Verdict.ALREADY_FIXED),
        (head(TARGETS, code("verifier_lm_head", "logit_scale")), Verdict.MOVED),
        (head(TARGETS, code("lm_head")), Verdict.MOVED),
    ],
    "train/verifier-norm": [
        (head(TARGETS, TARGETS), Verdict.NEEDED),
        # Whatever it is made of, it may be Llama's; the verifier's own is right in its place.
        (head(NORMED, NORMED), Verdict.NEEDED),
        (head(NORMED, TARGETS), Verdict.MOVED),
        (head(code("verifier_lm_head", "target_norm"), TARGETS), Verdict.MOVED),
        (head(code("lm_head"), TARGETS), Verdict.MOVED),
    ],
    "train/sharded-norms": [
        (
            SimpleNamespace(Trainer=SimpleNamespace(setup_model=code("reset_parameters"))),
            Verdict.NEEDED,
        ),
        (SimpleNamespace(Trainer=SimpleNamespace(setup_model=code("to_empty"))), Verdict.MOVED),
    ],
    "extract/sliding-window": [
        (SimpleNamespace(CacheConfig=lambda sliding_window: None), Verdict.NEEDED),
        (SimpleNamespace(CacheConfig=lambda block_size: None), Verdict.MOVED),
    ],
    "extract/scheduler-config": [
        (
            SimpleNamespace(
                SchedulerConfig=lambda max_num_seqs, is_encoder_decoder, async_scheduling: None
            ),
            Verdict.NEEDED,
        ),
        (
            SimpleNamespace(SchedulerConfig=lambda max_num_seqs, async_scheduling: None),
            Verdict.NEEDED,
        ),
        (SimpleNamespace(SchedulerConfig=lambda async_scheduling: None), Verdict.MOVED),
    ],
    "extract/trust-remote-code": [
        (SimpleNamespace(AutoConfig=1, AutoTokenizer=1), Verdict.NEEDED),
        (SimpleNamespace(AutoConfig=1, AutoTokenizer=1, AutoProcessor=1), Verdict.MOVED),
    ],
    "prepare/trust-remote-code": [
        (SimpleNamespace(AutoTokenizer=1), Verdict.NEEDED),
        (SimpleNamespace(AutoProcessor=1), Verdict.MOVED),
    ],
    "prepare/open-perfectblend": [
        (SimpleNamespace(DATASET_CONFIGS={"sharegpt": 1}), Verdict.NEEDED),
        (SimpleNamespace(DATASET_CONFIGS={"open-perfectblend": 1}), Verdict.ALREADY_FIXED),
    ],
}


@pytest.mark.parametrize(
    ("patch_id", "module", "verdict"),
    [(patch_id, *case) for patch_id, cases in FOUND.items() for case in cases],
)
def test_a_probe_says_what_it_found(patch_id: str, module: Any, verdict: Verdict) -> None:
    probe = registry.get(patch_id).examine(module)
    assert probe.verdict is verdict
    assert bool(probe.reason) == (probe.verdict is not Verdict.NEEDED)


@pytest.mark.parametrize(
    ("parameters", "names", "verdict"),
    [
        ("layer_names, model_path", ("_resolve_file", "safe_open", "EntryNotFoundError"), "needed"),
        ("layer_names, model_path", ("_resolve_file", "safe_open"), "moved"),
        (
            "layer_names, model_path, revision",
            ("_resolve_file", "safe_open", "EntryNotFoundError"),
            "moved",
        ),
    ],
)
def test_the_weights_are_found_by_what_their_loader_is_made_of(
    parameters: str, names: tuple[str, ...], verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loading = ModuleType("speculators_loading")
    vars(loading).update(dict.fromkeys(names))
    exec(f"def load_model_layers({parameters}): pass", vars(loading))  # noqa: S102
    monkeypatch.setitem(sys.modules, loading.__name__, loading)
    probe = registry.get("train/verifier-weights").examine(loading)
    assert probe.verdict.value == verdict


@pytest.mark.parametrize(("there", "verdict"), [(0, "needed"), (3, "needed"), (4, "already fixed")])
def test_functions_that_came_back_are_not_provided(
    there: int, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where only some did, the names that exist make the patch moved; see test_engine."""
    patch = registry.get("extract/kv-cache-planning")
    utilities = ModuleType("vllm.v1.core.kv_cache_utils")
    names = [name.rpartition(".")[2] for name in sorted(patch.importable)]
    vars(utilities).update(dict.fromkeys(names[:there]))
    monkeypatch.setitem(sys.modules, utilities.__name__, utilities)
    assert patch.examine(ModuleType("speculators")).verdict.value == verdict


def test_what_a_function_mentions_is_found_below_decorators_and_inside_it() -> None:
    def outer(self: Any) -> Any:
        return lambda: self.inner("text")

    def wrapped(self: Any) -> Any:
        return outer(self)

    wrapped.__wrapped__ = outer  # type: ignore[attr-defined]
    assert {"inner", "text"} <= mentions(wrapped)
    assert mentions(len) == frozenset()
