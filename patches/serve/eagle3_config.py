"""A speculative configuration accepts DeepSeek's language models as verifiers of EAGLE-3.

Symptom  ValueError: Eagle3 is only supported for ['llama', ...] models, for a DeepSeek or Kimi
         verifier, before anything is loaded. Silent, in 0.16: a compiled graph that gives out the
         states of other layers is taken from the cache.
Cause    `_verify_args` compares the verifier's model_type with a list, which has these from 0.18.0
         on. The layers are part of the graph's key from 0.17.0 on.
Fix      The function asks `any(name in model_type for name in list)`; the name `any` in its module
         says yes for these model types too. (pydantic keeps the function itself, so that to replace
         it in the class would change nothing.) It sees `self` among the locals of the generator
         that it is given, which the probe looks for. The layers are added to the key. Where the
         probe says moved, the way out is vLLM 0.18.0 or newer, which needs no patch.
Remove when vLLM 0.17 is no longer supported.
"""

import builtins
import inspect
from collections.abc import Callable, Iterable
from functools import wraps
from hashlib import sha256
from types import CodeType, ModuleType
from typing import Any

from spec_compat.patching import NEEDED, Patch, Probe, already_fixed, moved

patch = Patch(module="vllm.config.speculative", when={"vllm": ">=0.16,<0.18"})

MODEL_TYPES = ("deepseek_v2", "deepseek_v3", "kimi_k2")


@patch.probe
def needed(module: ModuleType) -> Probe:
    code = module.SpeculativeConfig._verify_args.__code__
    constants = str(code.co_consts)
    if "deepseek_v3" in constants:
        return already_fixed("the list has them")
    asking = [
        inner
        for inner in code.co_consts
        if isinstance(inner, CodeType)
        and "self" in inner.co_freevars
        and "model_type" in inner.co_names
    ]
    if "'llama'" not in constants or "any" not in code.co_names or not asking:
        return moved("_verify_args compares the model_type in another way")
    return NEEDED


@patch.provide("any")
def accepting(absent: None, module: ModuleType) -> Callable[[Iterable[Any]], bool]:
    def any(values: Iterable[Any]) -> bool:
        asking = inspect.isgenerator(values) and inspect.getgeneratorlocals(values).get("self")
        if not isinstance(asking, module.SpeculativeConfig):
            return builtins.any(values)
        model_type = asking.target_model_config.hf_text_config.model_type
        return builtins.any(values) or builtins.any(name in model_type for name in MODEL_TYPES)

    return any


@patch.replace("SpeculativeConfig.compute_hash")
def compute_hash(original: Callable[..., str], module: ModuleType) -> Callable[..., str]:
    @wraps(original)
    def with_layers(self: Any) -> str:
        head = self.method == "eagle3" and self.draft_model_config
        layers = getattr(head and head.hf_config, "eagle_aux_hidden_state_layer_ids", None)
        return sha256(f"{original(self)} {layers}".encode()).hexdigest()

    return with_layers
