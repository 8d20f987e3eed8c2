"""Makes vLLM's configuration of a server for a verifier with a head, with the patch and without."""

import sys
from typing import Any

import spec_compat


def configuration(model: str, head: str) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    speculative = {"method": "eagle3", "model": head, "num_speculative_tokens": 3}
    arguments = EngineArgs(model=model, trust_remote_code=True, speculative_config=speculative)
    return arguments.create_engine_config().speculative_config


def graphs(config: Any) -> int:
    """How many compiled graphs heads of two different sets of layers have."""
    written = config.draft_model_config.hf_config
    hashes = set()
    for layers in ([1, 2, 3], [2, 4, 5]):
        written.eagle_aux_hidden_state_layer_ids = layers
        hashes.add(config.compute_hash())
    return len(hashes)


def main(model: str, head: str) -> None:
    config = configuration(model, head)
    print("with:", graphs(config), "graphs")
    spec_compat.undo("serve/eagle3-config")
    print("without:", graphs(config), "graphs")
    configuration(model, head)


if __name__ == "__main__":
    main(*sys.argv[1:])
