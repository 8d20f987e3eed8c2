"""Hidden states are captured by hooks on the decoder layers, belong to requests, and prove it.

Symptom  AttributeError: 'LlamaModel' object has no attribute 'get_input_embeddings', at warm-up.
         ValueError: Model X does not support hidden state extraction, for models that vLLM cannot
         serve EAGLE-3 for, and for every multimodal wrapper. Silent: what a model does outside its
         layers (embedding multipliers, attention scaling) is skipped; layers come back in
         ascending order whatever order was asked for.
Cause    The worker extension replaces the inner model's forward by a copy of Llama's as it was in
         vLLM 0.11.0. `get_input_embeddings` became `embed_input_ids` in 0.11.1
         (vllm-project/vllm#27583).
Fix      The model's own forward runs; forward hooks take each layer's stream. Whether that stream
         is `hidden + residual` or `hidden` alone is measured on the first step: the final norm of
         the last layer's stream must be what the model returned. Tokens are assigned to requests
         in the order in which the model runner has them in its batch. A row is given out only if
         its states are finite and if lm_head(norm(last state)) gives the token that vLLM sampled:
         to `generate()`, which fetches it from the CPU after each step, or to the pipeline's sink
         (see _sink), which the worker writes its files through.
Remove when the in-process generator of speculators 0.3 and 0.4 is no longer supported.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any

from spec_compat.capture.proof import contradiction, gaps
from spec_compat.capture.sink import Place, Sink
from spec_compat.capture.streams import Streams
from spec_compat.patching import Patch

patch = Patch(
    module="speculators.data_generation.custom_worker",
    when={"speculators": ">=0.3,<0.5", "vllm": ">=0.11"},
    scope="worker",
    upstream="vllm-project/speculators#279",
)


def batch_order(runner: Any) -> list[str]:
    """Request ids in the order in which a step, before it is sampled, has their tokens."""
    if hasattr(runner, "input_batch"):
        return list(runner.input_batch.req_ids)
    return list(runner.execute_model_state.input_batch.req_ids)  # the V2 model runner


class LayerCapture:
    """Takes the streams of `layer_ids` in one worker, and cuts them into rows by request.

    Only tensor-parallel rank 0 keeps rows; the others take part in the proof, whose logits are
    gathered from all ranks. Every state that `take` gives out is [tokens, hidden] in the model's
    dtype, on the CPU. A step that comes with an order goes to `sink` instead, on the device.
    """

    def __init__(self, runner: Any, layer_ids: list[int], *, keep: bool) -> None:
        self.runner = runner
        self.layer_ids = list(layer_ids) if keep else []
        num_layers = runner.model_config.get_num_layers(runner.parallel_config)
        self.streams = Streams(runner.model, self.layer_ids, num_layers)
        self.prompts: dict[str, int] = {}
        self.partial: dict[str, list[Any]] = {}
        self.complete: dict[str, list[Any]] = {}
        self.last_states: dict[str, Any] = {}
        self.sink: Sink | None = None
        self.awaited = False  # the second model runner warms up with requests of its own
        self._execute = runner.execute_model
        runner.execute_model = self.execute_model

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.awaited:
            return self._execute(scheduler_output, *args, **kwargs)
        self.streams.active = True
        output = self._execute(scheduler_output, *args, **kwargs)
        self.streams.active = False
        if scheduler_output.total_num_scheduled_tokens:
            self._assign(scheduler_output)
        self.streams.taken = {}
        return output

    def _assign(self, step: Any) -> None:
        places = self._places(step)
        if self.sink is not None and self.sink.order is not None:
            self.sink.take(places, self.sink.order)
            return
        for place in places:
            states = [self.streams.taken[i][place.start : place.stop] for i in self.layer_ids]
            chunk = [layer.to("cpu", copy=True) for layer in states]
            row = self._append(place.request_id, place.first, chunk)
            if place.done:
                last = self.streams.taken[self.streams.last]
                self.last_states[place.request_id] = last[place.stop - 1]
            (self.complete if place.done else self.partial)[place.request_id] = row

    def _places(self, step: Any) -> list[Place]:
        new, cached = step.scheduled_new_reqs, step.scheduled_cached_reqs
        self.prompts.update({request.req_id: len(request.prompt_token_ids) for request in new})
        computed = {request.req_id: request.num_computed_tokens for request in new}
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        places, start = [], 0
        for request_id in batch_order(self.runner):
            stop = start + step.num_scheduled_tokens[request_id]
            first = computed[request_id]
            done = first + stop - start >= self.prompts[request_id]
            if done:
                del self.prompts[request_id]
            places.append(Place(request_id, start, stop, first, done))
            start = stop
        return places

    def _append(self, request_id: str, num_computed: int, chunk: list[Any]) -> list[Any]:
        import torch

        before = self.partial.pop(request_id, None)
        if num_computed == 0:  # a first chunk, or a fresh start after a preemption
            return chunk
        if before is None or any(len(layer) != num_computed for layer in before):
            raise RuntimeError(f"request {request_id}: captured chunks do not follow each other")
        return [torch.cat(pair) for pair in zip(before, chunk, strict=True)]

    def take(self, tokens: dict[str, int]) -> dict[str, Any]:
        """Completed rows by request id; one that fails against `tokens` is replaced by the reason.

        `tokens` are those that vLLM sampled greedily after each row's last position.
        """
        rows: dict[str, Any] = self.complete
        states, self.complete, self.last_states = self.last_states, {}, {}
        if unsampled := rows.keys() - tokens.keys():
            raise RuntimeError(f"vLLM sampled no token for {sorted(unsampled)}")
        finite = {r: all(bool(layer.isfinite().all()) for layer in row) for r, row in rows.items()}
        rows.update(self._contradictions(states, tokens) if states else {})
        return {r: row if finite[r] else "NaN or infinity in its states" for r, row in rows.items()}

    def _contradictions(self, states: dict[str, Any], tokens: dict[str, int]) -> dict[str, str]:
        """Rows whose last state, through final norm and lm_head, gives another token."""
        import torch

        normed = self.streams.norm(torch.stack(list(states.values())))
        logits = self.runner.model.compute_logits(normed)
        if logits is None:  # gathered on another rank
            return {}
        sampled = [tokens[request] for request in states]
        proofs = gaps(logits, torch.tensor(sampled, device=logits.device)).tolist()
        return {
            request: reason
            for request, (gap, theirs), token in zip(states, proofs, sampled, strict=True)
            if (reason := contradiction(gap, theirs, token))
        }


@patch.replace("HiddenStatesWorkerExtension._setup_hidden_states_capture")
def setup(original: Callable[..., Any], module: ModuleType) -> Callable[..., Any]:
    def _setup_hidden_states_capture(self: Any, layer_ids: list[int]) -> str:
        keep = module.get_tp_group().rank_in_group == 0
        self._capture = LayerCapture(self.model_runner, layer_ids, keep=keep)
        return "extract/capture"

    return _setup_hidden_states_capture


@patch.replace("HiddenStatesWorkerExtension._reset_capture")
def reset(original: Callable[..., Any], module: ModuleType) -> Callable[..., Any]:
    def _reset_capture(self: Any) -> None:
        capture = self._capture
        capture.awaited = True
        capture.prompts, capture.partial = {}, {}
        capture.complete, capture.last_states = {}, {}

    return _reset_capture


@patch.replace("HiddenStatesWorkerExtension._get_captured_states")
def get(original: Callable[..., Any], module: ModuleType) -> Callable[..., Any]:
    def _get_captured_states(self: Any, tokens: dict[str, int]) -> dict[str, Any]:
        rows: dict[str, Any] = self._capture.take(tokens)
        return rows

    return _get_captured_states
