"""What the patches that change vLLM make of its releases, without vLLM."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from spec_compat import registry
from spec_compat.patching import Verdict


def module(**names: Any) -> Any:
    made = ModuleType("vllm.fake")
    vars(made).update(names)
    return made


def forward(self, input_ids, positions, intermediate_tensors, inputs_embeds=None): ...


def layer(self, positions, hidden_states, residual, llama_4_scaling=None): ...


def other(self, hidden_states): ...


@pytest.mark.parametrize(
    ("inner", "of_a_layer", "there", "verdict"),
    [
        (forward, layer, {}, Verdict.NEEDED),
        (forward, layer, {"supports_eagle3": True}, Verdict.ALREADY_FIXED),
        (other, layer, {}, Verdict.MOVED),
        (forward, other, {}, Verdict.MOVED),
    ],
)
def test_a_model_is_patched_where_it_is_called_as_it_was(
    inner: Any, of_a_layer: Any, there: dict[str, bool], verdict: Verdict
) -> None:
    found = module(
        DeepseekV2ForCausalLM=SimpleNamespace(**there),
        DeepseekV2Model=SimpleNamespace(forward=inner),
        DeepseekV2DecoderLayer=SimpleNamespace(forward=of_a_layer),
    )
    assert registry.get("serve/deepseek-eagle3").examine(found).verdict is verdict


@pytest.mark.parametrize("name", ["KimiK25", "KimiVL"])
def test_a_wrapper_is_patched_until_vllm_does_it(name: str) -> None:
    patch = registry.get(f"serve/{'kimi-k25' if name == 'KimiK25' else 'kimi-vl'}-eagle3")
    for there, verdict in (({}, Verdict.NEEDED), ({"supports_eagle3": 1}, Verdict.ALREADY_FIXED)):
        wrapper = SimpleNamespace(**there)
        found = module(**{f"{name}ForConditionalGeneration": wrapper})
        assert patch.examine(found).verdict is verdict


class Config:
    """As in vLLM 0.16, but for what has nothing to do with the list."""

    method = "eagle3"

    def __init__(self, model_type: str, layers: list[int] | None = None) -> None:
        text = SimpleNamespace(model_type=model_type)
        self.target_model_config = SimpleNamespace(hf_text_config=text)
        written = {"eagle_aux_hidden_state_layer_ids": layers} if layers else {}
        self.draft_model_config = SimpleNamespace(hf_config=SimpleNamespace(**written))

    def _verify_args(self) -> bool:
        supported = ["llama", "qwen", "minicpm"]
        return any(name in self.target_model_config.hf_text_config.model_type for name in supported)

    def compute_hash(self) -> str:
        return "eagle3"


@pytest.fixture
def patched(monkeypatch: pytest.MonkeyPatch) -> type[Config]:
    patch = registry.get("serve/eagle3-config")
    found = module(SpeculativeConfig=Config)
    assert patch.examine(found).verdict is Verdict.NEEDED
    monkeypatch.setitem(globals(), "any", patch.factories["any"](None, found))
    replacement = patch.factories["SpeculativeConfig.compute_hash"](Config.compute_hash, found)
    monkeypatch.setattr(Config, "compute_hash", replacement)
    return Config


@pytest.mark.parametrize(
    ("model_type", "accepted"),
    [
        ("llama", True),
        ("deepseek_v2", True),
        ("deepseek_v3", True),
        ("kimi_k2", True),
        ("deepseek_vl_v2", False),
        ("mamba", False),
    ],
)
def test_the_list_has_deepseeks_language_models_in_it(
    patched: type[Config], model_type: str, accepted: bool
) -> None:
    assert patched(model_type)._verify_args() is accepted


def test_any_is_what_it_was_for_everybody_else(patched: type[Config]) -> None:
    ours = globals()["any"]
    assert ours([0, 1]) is True
    assert ours([]) is False
    assert ours(name == "x" for name in "abc") is False


def test_other_layers_are_another_graph(patched: type[Config]) -> None:
    hashes = {patched("llama", layers).compute_hash() for layers in ([1, 2], [1, 3], None)}
    assert len(hashes) == 3
    assert patched("llama", [1, 2]).compute_hash() in hashes


def test_a_list_that_has_them_is_left_alone() -> None:
    class Fixed:
        def _verify_args(self) -> bool:
            return any(name in "kimi_k2" for name in ["llama", "deepseek_v2", "deepseek_v3"])

    class Otherwise:
        def _verify_args(self) -> bool:
            return "llama" in "kimi_k2"

    class OfALocalName:
        def _verify_args(self) -> bool:
            model_type = "kimi_k2"
            return any(name in model_type for name in ["llama", "qwen"])

    examine = registry.get("serve/eagle3-config").examine
    assert examine(module(SpeculativeConfig=OfALocalName)).verdict is Verdict.MOVED
    assert examine(module(SpeculativeConfig=Fixed)).verdict is Verdict.ALREADY_FIXED
    assert examine(module(SpeculativeConfig=Otherwise)).verdict is Verdict.MOVED
