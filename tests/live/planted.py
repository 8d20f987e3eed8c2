"""Plants a fault in vLLM's worker, extracts, and prints which rows were refused."""

import json
import sys
from typing import Any

from transformers import AutoTokenizer

import spec_compat  # noqa: F401
from spec_compat.patching import BadRows
from speculators.data_generation.vllm_hidden_states_generator import VllmHiddenStatesGenerator

TEXTS = (
    "The capital of France is Paris, and the capital of Italy is",
    "A triangle has three sides. A square has",
    "To boil an egg, put it into a pot of cold water and",
    "import json\n\nwith open(path) as stream:\n    content = json.",
    "Once upon a time there was a small dragon who",
    "Water freezes at zero degrees Celsius and boils at one hundred",
    "The opposite of hot is cold, and the opposite of big is",
    "Monday, Tuesday, Wednesday, Thursday,",
)


def shift(streams: dict[int, Any]) -> dict[int, Any]:
    """Every row gets the states of the position before."""
    return {layer: states.roll(1, dims=0) for layer, states in streams.items()}


def swap(streams: dict[int, Any]) -> dict[int, Any]:
    """The batch in the reverse order: every row gets states of others."""
    return {layer: states.flip(0) for layer, states in streams.items()}


def wrong_layer(streams: dict[int, Any]) -> dict[int, Any]:
    """The last layer's states are those of the middle layer."""
    layers = sorted(streams)
    return {**streams, layers[-1]: streams[layers[1]]}


def last_of_another(streams: dict[int, Any]) -> dict[int, Any]:
    """The batch's last token has, after the last layer, the state of its first one."""
    last = max(streams)
    states = streams[last].clone()
    states[-1] = states[0]
    return {**streams, last: states}


def not_finite(streams: dict[int, Any]) -> dict[int, Any]:
    """One value of the batch's last token, in a layer between, is infinite."""
    between = sorted(streams)[1]
    states = streams[between].clone()
    states[-1, -1] = float("inf")
    return {**streams, between: states}


FAULTS = {
    fault.__name__: fault for fault in (shift, swap, wrong_layer, last_of_another, not_finite)
}


def plant(worker: Any, name: str) -> None:
    capture = worker._capture
    hand_over = capture._hand_over

    def faulty(*step: Any) -> None:
        capture.streams.taken = FAULTS[name](capture.streams.taken)
        hand_over(*step)

    capture._hand_over = faulty


def main(model: str) -> None:
    rows = AutoTokenizer.from_pretrained(model)(list(TEXTS))["input_ids"]
    generator = VllmHiddenStatesGenerator(model, layer_ids=[2, 15, 27, 29], max_model_len=512)
    refused: dict[str, dict[int, str]] = {"nothing": {}}
    generator.generate(rows)
    for name in FAULTS:
        generator.executor.collective_rpc(unplant)
        generator.executor.collective_rpc(plant, args=(name,))
        try:
            generator.generate(rows)
        except BadRows as error:
            refused[name] = error.reasons
    print(json.dumps(refused))


def unplant(worker: Any) -> None:
    vars(worker._capture).pop("_hand_over", None)


if __name__ == "__main__":
    main(sys.argv[1])
