"""Extracts a row, and takes vLLM's own auxiliary states of the same pass for the ids + 1."""

import sys
from pathlib import Path
from typing import Any

import torch

import spec_compat
from spec_compat import registry
from speculators.data_generation.vllm_hidden_states_generator import VllmHiddenStatesGenerator

LAYER_IDS = [2, 4, 5, 7]
ROW = list(range(3, 90))


def watch(worker: Any) -> None:
    """Keep what the model returns from now on."""

    def keep(model: Any, inputs: Any, output: Any) -> Any:
        worker.returned = output if isinstance(output, tuple) else (output, [])
        return worker.returned[0]

    worker.model_runner.model.register_forward_hook(keep)


def supported(worker: Any, undone: list[str]) -> list[bool]:
    """Whether vLLM takes the model, and Kimi-VL, for verifiers of EAGLE-3 without these patches."""
    from vllm.model_executor.models import kimi_vl
    from vllm.model_executor.models.interfaces import supports_eagle3

    if undone:
        spec_compat.undo(*undone)
    # It is a protocol: an object has to have its names, whatever its class is.
    other = object.__new__(kimi_vl.KimiVLForConditionalGeneration)
    return [supports_eagle3(model) for model in (worker.model_runner.model, other)]


def ask(worker: Any, served_ids: list[int]) -> dict[str, Any]:
    """Make the model return what an EAGLE-3 head is served; what else a server asks it for."""
    model = worker.model_runner.model
    model.set_aux_hidden_state_layers(tuple(served_ids))
    return {
        "defaults": model.get_eagle3_aux_hidden_state_layers(),
        "placeholder": getattr(model.config, "image_token_index", None),
    }


def refusal(worker: Any, served_ids: list[int]) -> str:
    try:
        worker.model_runner.model.set_aux_hidden_state_layers(tuple(served_ids))
    except ValueError as error:
        return str(error)
    return ""


def returned(worker: Any) -> tuple[Any, list[Any]]:
    hidden, states = worker.returned
    return hidden[: len(ROW)].cpu(), [state[: len(ROW)].cpu() for state in states]


def main(model: str, out: Path) -> None:
    generator = VllmHiddenStatesGenerator(model, layer_ids=LAYER_IDS, max_model_len=512)
    workers = generator.executor.collective_rpc
    workers(watch)
    found: dict[str, Any] = {}
    (found["supported"],) = workers(supported, args=([],))
    generator.generate([ROW])
    ((found["without"], _),) = workers(returned)
    found.update(*workers(ask, args=([i + 1 for i in LAYER_IDS[:-1]],)))
    (row,) = generator.generate([ROW])
    found["captured"] = row["hidden_states"]
    ((found["returned"], found["served"]),) = workers(returned)
    (found["refusal"],) = workers(refusal, args=([LAYER_IDS[-1] + 1],))
    patches = [patch.id for patch in registry.patches() if patch.opt_in]
    (found["undone"],) = workers(supported, args=(patches,))
    torch.save(found, out)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
