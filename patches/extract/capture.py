"""Hidden states are captured by hooks on the decoder layers, and belong to requests.

Symptom  AttributeError: 'LlamaModel' object has no attribute 'get_input_embeddings', at warm-up.
         ValueError: Model X does not support hidden state extraction, for models that vLLM cannot
         serve EAGLE-3 for, and for every multimodal wrapper. Silent: what a model does outside its
         layers (embedding multipliers, attention scaling) is skipped; layers come back in
         ascending order whatever order was asked for.
Cause    The worker extension replaces the inner model's forward by a copy of Llama's as it was in
         vLLM 0.11.0. `get_input_embeddings` became `embed_input_ids` in 0.11.2
         (vllm-project/vllm#27583).
Fix      The model's own forward runs; forward hooks take each layer's stream. Whether that stream
         is `hidden + residual` or `hidden` alone is measured on the first step: the final norm of
         the last layer's stream must be what the model returned. Tokens are assigned to requests
         in the order in which the model runner has them in its batch.
Remove when the in-process generator of speculators 0.3 and 0.4 is no longer supported.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any

from spec_compat.patching import Patch

patch = Patch(
    module="speculators.data_generation.custom_worker",
    when={"speculators": ">=0.3,<0.4", "vllm": ">=0.11.2"},
    scope="worker",
    upstream="vllm-project/speculators#279",
)

WRAPPED_AS = ("language_model", "thinker", "llm", "model", "decoder", "text_model", "transformer")
FINAL_NORMS = ("norm", "final_layernorm", "ln_f", "final_norm")
MAX_ERROR = 0.02  # relative L2; bf16 noise is below 0.01, a wrong reading is above 0.5


def find_decoder(model: Any) -> Any:
    """The module that holds the decoder layers, found by walking into the wrappers around it."""
    path, node = [type(model).__name__], model
    while not hasattr(node, "layers"):
        step = next((name for name in WRAPPED_AS if hasattr(node, name)), None)
        if step is None:
            raise ValueError(f"no decoder layers in {type(model).__name__}; tried {'.'.join(path)}")
        path, node = [*path, step], getattr(node, step)
    return node


READINGS: dict[str, Callable[[Any, Any], Any]] = {
    "hidden + residual": lambda hidden, residual: hidden + residual,
    "hidden": lambda hidden, residual: hidden.clone(),
}


class LayerCapture:
    """Collects the streams of `layer_ids` in one worker, and cuts them into rows by request."""

    def __init__(self, runner: Any, layer_ids: list[int], *, store: bool) -> None:
        self.runner = runner
        self.layer_ids = list(layer_ids)
        self.store = store
        self.decoder = find_decoder(runner.model)
        self.last = len(self.decoder.layers) - 1
        self.step = False
        self.read: Callable[[Any, Any], Any] | None = None
        self.streams: dict[int, Any] = {}
        self.partial: dict[str, list[Any]] = {}
        self.complete: dict[str, list[Any]] = {}
        for layer_id in {*layer_ids, self.last}:
            self.decoder.layers[layer_id].register_forward_hook(self._hook(layer_id))
        runner.model.register_forward_hook(self._measure)
        self._execute = runner.execute_model
        runner.execute_model = self.execute_model

    def _hook(self, layer_id: int) -> Callable[..., None]:
        def take(layer: Any, inputs: Any, output: Any) -> None:
            if not self.step:  # a warm-up run computes on whatever the memory holds
                return
            hidden, residual = output if isinstance(output, tuple) else (output, None)
            if residual is None:
                self.streams[layer_id] = hidden.clone()
            elif self.read is None:
                self.streams[layer_id] = (hidden.clone(), residual.clone())
            else:
                self.streams[layer_id] = self.read(hidden, residual)

        return take

    def _measure(self, model: Any, inputs: Any, output: Any) -> None:
        """Choose the reading whose final norm is what the model returned."""
        pair = self.streams.get(self.last)
        if self.read is not None or not isinstance(pair, tuple):
            return
        returned = output[0] if isinstance(output, tuple) else output
        norm = next(getattr(self.decoder, name) for name in FINAL_NORMS if hasattr(self.decoder, name))
        errors = {
            name: float((norm(read(*pair)) - returned).float().norm() / returned.float().norm())
            for name, read in READINGS.items()
        }
        right = [name for name, error in errors.items() if error <= MAX_ERROR]
        if not right:
            raise RuntimeError(
                f"the decoder layers of {type(model).__name__} cannot be read: the final norm of "
                f"the last layer's stream is not what the model returns; relative errors {errors}"
            )
        self.streams = {k: READINGS[right[0]](*pair) for k, pair in self.streams.items()}
        if len(right) == 1:
            self.read = READINGS[right[0]]

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        self.step = True
        output = self._execute(scheduler_output, *args, **kwargs)
        self.step = False
        if self.store and scheduler_output.total_num_scheduled_tokens:
            self._assign(scheduler_output.num_scheduled_tokens)
        self.streams = {}
        return output

    def _assign(self, num_scheduled_tokens: dict[str, int]) -> None:
        start = 0
        for request_id in self.runner.input_batch.req_ids:
            stop = start + num_scheduled_tokens[request_id]
            chunk = [self.streams[i][start:stop].to("cpu", copy=True) for i in self.layer_ids]
            self._append(request_id, chunk)
            start = stop

    def _append(self, request_id: str, chunk: list[Any]) -> None:
        import torch

        request = self.runner.requests[request_id]
        if request.num_computed_tokens == 0:  # a first chunk, or a fresh start after preemption
            row = chunk
        else:
            row = [torch.cat(pair) for pair in zip(self.partial[request_id], chunk, strict=True)]
        if len(row[0]) != request.num_computed_tokens + len(chunk[0]):
            raise RuntimeError(f"request {request_id}: captured tokens do not follow each other")
        done = len(row[0]) >= request.num_prompt_tokens
        self.partial.pop(request_id, None)
        (self.complete if done else self.partial)[request_id] = row

    def take(self) -> dict[str, list[Any]]:
        complete, self.complete = self.complete, {}
        return complete


@patch.replace("HiddenStatesWorkerExtension._setup_hidden_states_capture")
def setup(original: Callable[..., Any], module: ModuleType) -> Callable[..., Any]:
    def _setup_hidden_states_capture(self: Any, layer_ids: list[int]) -> str:
        store = module.get_tp_group().rank_in_group == 0
        self._capture = LayerCapture(self.model_runner, layer_ids, store=store)
        return "extract/capture"

    return _setup_hidden_states_capture


@patch.replace("HiddenStatesWorkerExtension._reset_capture")
def reset(original: Callable[..., Any], module: ModuleType) -> Callable[..., Any]:
    def _reset_capture(self: Any) -> None:
        self._capture.partial, self._capture.complete = {}, {}

    return _reset_capture


@patch.replace("HiddenStatesWorkerExtension._get_captured_states")
def get(original: Callable[..., Any], module: ModuleType) -> Callable[..., Any]:
    def _get_captured_states(self: Any) -> dict[str, list[Any]]:
        """Rows whose prefill is complete: request id -> one bf16 tensor [tokens, hidden] a layer."""
        taken: dict[str, list[Any]] = self._capture.take()
        return taken

    return _get_captured_states
