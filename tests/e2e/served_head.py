"""A server of vLLM with a head for its verifier: its configuration, with the patch and without it,
and what it drafts.

vLLM 0.16 asserts on a CPU that nothing is speculated. Here that assertion is left out, and with it
what needs a GPU: to measure its memory, and the copy of the drafts that a second step would check.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import spec_compat

SPECULATIVE = {
    "method": "eagle3",
    "num_speculative_tokens": 1,
    "disable_padded_drafter_batch": True,  # the other way takes kernels of a GPU
}
OPTIONS = {
    "trust_remote_code": True,
    "max_model_len": 256,
    "max_num_seqs": 1,
    "block_size": 16,
    "enforce_eager": True,
    "enable_prefix_caching": False,
    "limit_mm_per_prompt": {"image": 0},
}


def configuration(model: str, head: str) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    speculative = {**SPECULATIVE, "model": head}
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


def speculate_on_a_cpu() -> None:
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.worker import cpu_model_runner, cpu_worker
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    class Runner(cpu_model_runner.CPUModelRunner):
        load_model = GPUModelRunner.load_model

        def __init__(self, vllm_config: Any, device: Any) -> None:
            with cpu_model_runner._torch_cuda_wrapper():
                GPUModelRunner.__init__(self, vllm_config, device)
            self.use_cuda_graph = self.cascade_attn_enabled = False
            self._postprocess_tensors()

        def _copy_draft_token_ids_to_cpu(self, *args: Any) -> None: ...

    cpu_worker.CPUModelRunner = Runner
    CpuPlatform.get_current_memory_usage = classmethod(lambda cls, device=None: 0)


def drafts(model: str, head: str, prompts: list[list[int]]) -> dict[str, Any]:
    """For each prompt the token that the verifier samples, and what the head drafts after it."""
    from vllm import LLM, SamplingParams

    speculate_on_a_cpu()
    server = LLM(model, speculative_config={**SPECULATIVE, "model": head}, **OPTIONS)
    core = server.llm_engine.engine_core.engine_core
    runner = core.model_executor.driver_worker.worker.model_runner
    drafted: list[int] = []
    propose: Callable[..., Any] = runner.drafter.propose

    def watched(**given: Any) -> Any:
        proposed = propose(**given)
        drafted.extend(proposed.flatten().tolist())
        return proposed

    runner.drafter.propose = watched
    # After the second token, which ends the answer, nothing is drafted.
    asked = [{"prompt_token_ids": prompt} for prompt in prompts]
    answers = server.generate(asked, SamplingParams(max_tokens=1, temperature=0, ignore_eos=True))
    return {
        "layers": runner.model.language_model.model.aux_hidden_state_layers,
        "placeholder": runner.drafter.model.config.image_token_index,
        "sampled": [answer.outputs[0].token_ids[0] for answer in answers],
        "drafted": drafted,
    }


def main(model: str, head: str, prompts: Path, out: Path) -> None:
    config = configuration(model, head)
    print("with:", graphs(config), "graphs")
    out.write_text(json.dumps(drafts(model, head, json.loads(prompts.read_text()))))
    spec_compat.undo("serve/eagle3-config")
    print("without:", graphs(config), "graphs")
    configuration(model, head)


if __name__ == "__main__":
    main(*sys.argv[1:3], *map(Path, sys.argv[3:]))
