"""Extracts a row, and takes vLLM's own auxiliary states of the same pass for the ids + 1."""

import sys
from pathlib import Path
from typing import Any

import torch

import spec_compat  # noqa: F401
from speculators.data_generation.vllm_hidden_states_generator import VllmHiddenStatesGenerator

LAYER_IDS = [2, 4, 5, 7]
ROW = list(range(3, 90))


def watch(worker: Any, served_ids: list[int]) -> None:
    """Make the model return what an EAGLE-3 head is served, and keep it."""
    model = worker.model_runner.model
    model.set_aux_hidden_state_layers(tuple(served_ids))

    def keep(model: Any, inputs: Any, output: Any) -> Any:
        hidden, worker.aux_states = output
        return hidden

    model.register_forward_hook(keep)


def aux_states(worker: Any) -> list[Any]:
    return [states[: len(ROW)].cpu() for states in worker.aux_states]


def main(model: str, out: Path) -> None:
    generator = VllmHiddenStatesGenerator(model, layer_ids=LAYER_IDS, max_model_len=512)
    generator.executor.collective_rpc(watch, args=([i + 1 for i in LAYER_IDS[:-1]],))
    (row,) = generator.generate([ROW])
    (served,) = generator.executor.collective_rpc(aux_states)
    torch.save({"captured": row["hidden_states"], "served": served}, out)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
