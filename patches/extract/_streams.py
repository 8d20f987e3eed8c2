"""The streams of a verifier's decoder layers, taken by forward hooks while a step runs.

A decoder layer of vLLM returns `(hidden, residual)`, and the stream after it is their sum, except
in families whose layers return the sum already beside the residual (Cohere, EXAONE 4). Which of the
two it is, is measured: the final norm of the last layer's stream must be what the model returned.
"""

from collections.abc import Callable
from typing import Any

WRAPPED_AS = ("language_model", "thinker", "llm", "model", "decoder", "text_model", "transformer")
FINAL_NORMS = ("norm", "final_layernorm", "ln_f", "final_norm")
MAX_ERROR = 0.02  # relative L2; bf16 noise is below 0.01, a wrong reading is above 0.5

Reading = Callable[[Any, Any], Any]
READINGS: dict[str, Reading] = {
    "hidden + residual": lambda hidden, residual: hidden + residual,
    "hidden": lambda hidden, residual: hidden.clone(),
}


def find_decoder(model: Any) -> Any:
    """The module that holds the decoder layers, found by walking into the wrappers around it."""
    path, node = [type(model).__name__], model
    while not hasattr(node, "layers"):
        step = next((name for name in WRAPPED_AS if hasattr(node, name)), None)
        if step is None:
            raise ValueError(f"no decoder layers in {type(model).__name__}; tried {'.'.join(path)}")
        path, node = [*path, step], getattr(node, step)
    return node


class Streams:
    """Takes the stream after each of `layer_ids`, and after the last layer, while `active`.

    `taken` has them by layer id, [tokens of the step, hidden] in the model's dtype, on its device.
    """

    def __init__(self, model: Any, layer_ids: list[int]) -> None:
        self.active = False  # a warm-up run computes on whatever the memory holds
        self.taken: dict[int, Any] = {}
        self.read: Reading | None = None
        decoder = find_decoder(model)
        norms = (getattr(decoder, name, None) for name in FINAL_NORMS)
        self.norm = next(norm for norm in norms if norm is not None)
        self.last = len(decoder.layers) - 1
        for layer_id in {*layer_ids, self.last}:
            decoder.layers[layer_id].register_forward_hook(self._hook(layer_id))
        model.register_forward_hook(self._measure)

    def _hook(self, layer_id: int) -> Callable[..., None]:
        def take(layer: Any, inputs: Any, output: Any) -> None:
            if not self.active:
                return
            hidden, residual = output if isinstance(output, tuple) else (output, None)
            if residual is None:
                self.taken[layer_id] = hidden.clone()
            elif self.read is None:
                self.taken[layer_id] = (hidden.clone(), residual.clone())
            else:
                self.taken[layer_id] = self.read(hidden, residual)

        return take

    def _measure(self, model: Any, inputs: Any, output: Any) -> None:
        """Choose the reading whose final norm is what the model returned."""
        pair = self.taken.get(self.last)
        if self.read is not None or not isinstance(pair, tuple):
            return
        returned = output[0] if isinstance(output, tuple) else output
        size = returned.float().norm()
        errors = {
            name: float((self.norm(read(*pair)) - returned).float().norm() / size)
            for name, read in READINGS.items()
        }
        right = [name for name, error in errors.items() if error <= MAX_ERROR]
        if not right:
            raise RuntimeError(
                f"the decoder layers of {type(model).__name__} cannot be read: the final norm of "
                f"the last layer's stream is not what the model returns; relative errors {errors}"
            )
        self.taken = {k: READINGS[right[0]](*pair) for k, pair in self.taken.items()}
        if len(right) == 1:
            self.read = READINGS[right[0]]
