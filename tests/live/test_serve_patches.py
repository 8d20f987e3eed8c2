"""vLLM 0.16 and 0.17 serve EAGLE-3 for DeepSeek's language models once they are asked to."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from spec_compat import registry
from tests import kimi
from tests.conftest import run_script
from tests.live import zoo
from tests.live.test_layer_ids import check_served

pytestmark = [pytest.mark.live, pytest.mark.slow]

SCRIPT = Path(__file__).with_name("aux_states.py")
ENABLED = {"SPEC_COMPAT_ENABLE": "serve", **kimi.ENVIRONMENT}


@pytest.fixture(scope="module")
def tiny_deepseek(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the scaling of the attention that a layer is told of by the model around it."""
    (member,) = (member for member in zoo.TEXT_MODELS if member.family == "DeepSeek-V3")
    scaling = {"original_max_position_embeddings": 16, "beta": 0.5}
    member = replace(member, config={**member.config, "llama_4_scaling": scaling})
    return member.build(tmp_path_factory.mktemp("models") / "deepseek")


@pytest.mark.parametrize(
    ("verifier", "placeholder"), [("tiny_deepseek", None), ("mini_kimi", 163_605)]
)
def test_a_head_is_served_the_states_it_was_trained_on(
    verifier: str, placeholder: int | None, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    run_script(SCRIPT, request.getfixturevalue(verifier), tmp_path / "out.pt", env=ENABLED)
    found = torch.load(tmp_path / "out.pt", weights_only=True)
    assert found["supported"] == [True, True]
    assert found["undone"] == [False, False]
    assert (found["defaults"], found["placeholder"]) == ((2, 4, 5), placeholder)
    assert found["refusal"] == "EAGLE-3 states before layers (8,): there are 0 to 7"
    check_served(found)


class Layer(torch.nn.Module):
    """As vLLM calls a decoder layer; each adds another number to the stream."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def forward(self, positions: Any, hidden: Any, residual: Any, scaling: Any) -> Any:
        stream = hidden if residual is None else hidden + residual
        return stream * 0 + self.number, stream


class Model(torch.nn.Module):
    """Layers 0 to 7, of which this rank has those from `start_layer` on."""

    def __init__(self, start_layer: int, layers: tuple[int, ...]) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(map(Layer, range(8)))
        self.config, self.aux_hidden_state_layers = SimpleNamespace(), layers
        self.start_layer, self.end_layer = start_layer, 8

    def embed_input_ids(self, input_ids: Any) -> Any:
        return torch.zeros(len(input_ids), 2)

    def norm(self, hidden: Any, residual: Any) -> Any:
        return hidden + residual, residual


@pytest.mark.parametrize("start", [0, 3])
def test_the_function_compiles_as_a_whole_on_a_stage_of_a_pipeline_too(start: int) -> None:
    """The stream before layer k is the sum of the numbers below k; vLLM compiles with fullgraph."""
    group = SimpleNamespace(is_first_rank=start == 0, is_last_rank=True)
    module: Any = SimpleNamespace(get_pp_group=lambda: group)
    make = registry.get("serve/deepseek-eagle3").factories["DeepseekV2Model.forward"]
    forward: Any = make(Model.forward, module)
    model, ids = Model(start, (3, 5, 7)), torch.arange(4)
    before = {"hidden_states": torch.full((4, 2), 2.0), "residual": torch.full((4, 2), 1.0)}
    compiled = torch.compile(forward, fullgraph=True, backend="eager")
    for run in (forward, compiled):
        hidden, states = run(model, ids, ids, before if start else None)
        assert [state.unique().tolist() for state in states] == [[3.0], [10.0], [21.0]]
        assert hidden.unique().tolist() == [28.0]
