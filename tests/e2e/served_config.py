"""Makes vLLM's configuration of a server for a verifier with a head; prints what it says of it."""

import sys


def main(model: str, head: str) -> None:
    from vllm.engine.arg_utils import EngineArgs

    speculative = {"method": "eagle3", "model": head, "num_speculative_tokens": 3}
    arguments = EngineArgs(model=model, trust_remote_code=True, speculative_config=speculative)
    config = arguments.create_engine_config().speculative_config
    assert config
    first = config.compute_hash()
    config.draft_model_config.hf_config.eagle_aux_hidden_state_layer_ids = [1, 2, 3]
    print("accepted", "of other layers" if config.compute_hash() != first else "of any layers")


if __name__ == "__main__":
    main(*sys.argv[1:])
