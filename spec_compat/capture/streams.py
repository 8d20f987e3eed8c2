"""The residual stream after each decoder layer, taken by forward hooks while a step runs.

A decoder layer of vLLM returns `(hidden, residual)`, and the stream after it is their sum, except
in families whose layers return the sum already, alone (Granite) or beside the residual (Cohere).
Which of the two it is, is measured on the first step: the stream after the last layer, through the
final norm, must be what the model returned. The next layer must also be given exactly what a layer
returned: a model that alters the stream between its layers is refused.
"""

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

LAYERS = ("layers", "h", "blocks")
INSIDE = (
    "language_model", "thinker", "llm", "text_model", "model", "decoder", "transformer", "gpt_neox",
    "encoder", "layers",
)  # fmt: skip
FINAL_NORMS = (
    "norm", "final_layernorm", "final_layer_norm", "ln_f", "norm_f", "final_norm", "embedding_norm",
)  # fmt: skip
MAX_ERROR = 0.02  # relative L2; bf16 noise is below 0.01, a wrong reading is above 0.5

Stream = Callable[[Any, Any], Any]
READINGS: dict[str, Stream] = {
    "hidden": lambda hidden, residual: hidden.clone(),
    "hidden + residual": lambda hidden, residual: hidden + residual,
}


def find_decoder(model: Any, num_layers: int) -> tuple[str, Any, Any]:
    """The module that holds the `num_layers` decoder layers: its path, itself and the layers.

    Only modules that lead to text are entered. Raises ValueError with every path that was tried.
    """
    tried = []
    for path, module in _text_modules(model):
        children = dict(module.named_children())
        lists = (children[name] for name in LAYERS if name in children)
        layers = next((child for child in lists if hasattr(child, "__len__")), None)
        if layers is not None and len(layers) == num_layers:
            return path, module, layers
        tried.append(path if layers is None else f"{path} ({len(layers)} layers)")
    raise ValueError(
        f"{type(model).__name__} has no module with {num_layers} decoder layers where they are "
        f"known to be; tried {', '.join(dict.fromkeys(tried))}"
    )


def _text_modules(model: Any) -> Iterator[tuple[str, Any]]:
    """The model, and the modules in which its decoder may be; what the model names comes first."""
    root = type(model).__name__
    yield root, model
    named = _language_model(model)
    if named is not None:
        path = next(name for name, module in model.named_modules() if module is named)
        yield from _descend(f"{root}.{path}", named)
    yield from _descend(root, model)


def _language_model(model: Any) -> Any:
    if not hasattr(model, "get_language_model"):
        return None
    try:
        named = model.get_language_model()
    except NotImplementedError:
        # vLLM's own default for wrappers that do not name it; the walk finds it by its name.
        return None
    return None if named is model else named


def _descend(path: str, module: Any) -> Iterator[tuple[str, Any]]:
    yield path, module
    children = dict(module.named_children())
    for name in INSIDE:
        if name in children:
            yield from _descend(f"{path}.{name}", children[name])


def _final_norm(model: Any, path: str) -> Any:
    """The norm beside the layers; PLaMo keeps it one module further out."""
    names = path.split(".")[1:]
    owners = [model.get_submodule(".".join(names[:depth])) for depth in range(len(names), -1, -1)]
    norms = (getattr(owner, name, None) for owner in owners for name in FINAL_NORMS)
    norm = next((norm for norm in norms if norm is not None), None)
    if norm is None:
        raise ValueError(f"{path} has no final norm; looked for {', '.join(FINAL_NORMS)}")

    def apply(stream: Any) -> Any:
        normed = norm(stream)
        return normed[0] if isinstance(normed, tuple) else normed

    return apply


class Streams:
    """Takes the stream after each of `layer_ids`, and after the last layer, while `active`.

    `taken` has them by layer id, [tokens of the step, hidden] in the model's dtype, on its device.
    `norm` turns a stream after the last layer into what the model returns for it. `path` and
    `reading` say where the decoder was found, and how its layers are read once that is measured.
    """

    def __init__(self, model: Any, layer_ids: list[int], num_layers: int) -> None:
        self.active = False  # a warm-up run computes on whatever the memory holds
        self.taken: dict[int, Any] = {}
        self.reading = ""
        if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
            raise ValueError(
                f"hidden states of {type(model).__name__} cannot be extracted: its decoder attends "
                "to an encoder, for which rows of tokens have no input"
            )
        self.path, _, layers = find_decoder(model, num_layers)
        self.norm = _final_norm(model, self.path)
        self.name = type(model).__name__
        self.last = num_layers - 1
        self._altered: dict[str, set[int]] = {"hidden": set(), "residual": set()}
        for layer_id in sorted({*layer_ids, self.last}):
            if type(layers[layer_id]).__name__ == "PPMissingLayer":
                raise ValueError(
                    f"layer {layer_id} of {self.name} is on another pipeline stage: hidden states "
                    "are extracted with pipeline_parallel_size=1, use tensor parallelism"
                )
            layers[layer_id].register_forward_hook(self._hook(layer_id))
            if layer_id < self.last:
                hook = self._compare(layer_id)
                layers[layer_id + 1].register_forward_pre_hook(hook, with_kwargs=True)
        model.forward = self._measured(model.forward)

    def _hook(self, layer_id: int) -> Callable[..., None]:
        def take(layer: Any, inputs: Any, output: Any) -> None:
            if not self.active:
                return
            if layer_id in self.taken:
                raise ValueError(
                    f"{self.name} runs layer {layer_id} twice in a step: it has no one stream"
                )
            hidden, residual = _pair(output)
            if self.reading:
                self.taken[layer_id] = READINGS[self.reading](hidden, residual)
            else:
                residual = None if residual is None else residual.clone()
                self.taken[layer_id] = (hidden.clone(), residual)

        return take

    def _compare(self, layer_id: int) -> Callable[..., None]:
        """Before the layer after it: is that given what layer `layer_id` returned?"""

        def compare(layer: Any, args: Any, kwargs: Any) -> None:
            if not self.active or self.reading or layer_id not in self.taken:
                return
            given = [one for one in (*args, *kwargs.values()) if hasattr(one, "shape")]
            for name, tensor in zip(self._altered, self.taken[layer_id], strict=True):
                if not any(_same(tensor, one) for one in given):
                    self._altered[name].add(layer_id)

        return compare

    def _measured(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """The model's forward, a hook on which would not run where vLLM replaces `__call__`."""

        @wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            output = forward(*args, **kwargs)
            if self.active and not self.reading:
                self._measure(output[0] if isinstance(output, tuple) else output)
            return output

        return run

    def _measure(self, returned: Any) -> None:
        """Choose the reading whose last stream leads to what the model returned.

        The smallest error wins: a stream that is counted twice is the same after the final norm,
        but for what its last layer added.
        """
        hidden, residual = self.taken[self.last]
        if hidden.shape != returned.shape:  # Gemma 3n has four streams
            raise ValueError(
                f"hidden states of {self.name} cannot be extracted: its layers return "
                f"{list(hidden.shape)}, the model returns {list(returned.shape)}: no one stream"
            )
        fits = {}
        for reading, read in READINGS.items():
            if reading == "hidden" or residual is not None:
                stream = read(hidden, residual)
                fits[reading, "normed"] = _fit(self.norm(stream), returned)
                fits[reading, "raw"] = (_error(stream, returned), 1.0)
        (reading, returns), (error, scale) = min(fits.items(), key=lambda item: item[1])
        if not error <= MAX_ERROR:
            found = ", ".join(f"{' '.join(key)} {error:.2g}" for key, (error, _) in fits.items())
            raise ValueError(
                f"hidden states of {self.name} cannot be extracted: its layers' streams are not "
                f"known, for none leads to what the model returns (relative errors: {found})"
            )
        self._check_handing_on(reading)
        self.reading = reading
        self.taken = {k: READINGS[reading](*pair) for k, pair in self.taken.items()}
        if returns == "raw":  # this model leaves its final norm to compute_logits
            self.norm = lambda stream: stream
        elif abs(scale - 1) > MAX_ERROR:  # MiniCPM scales what lm_head gets
            norm = self.norm
            self.norm = lambda stream: norm(stream) * scale

    def _check_handing_on(self, reading: str) -> None:
        """Refuse a model whose streams change between one layer and the next."""
        parts = ("hidden",) if reading == "hidden" else ("hidden", "residual")
        if altered := set[int]().union(*(self._altered[part] for part in parts)):
            layer_id = min(altered)
            raise ValueError(
                f"hidden states of {self.name} cannot be extracted: layer {layer_id + 1} is given "
                f"something else than layer {layer_id} returns"
            )


def _pair(output: Any) -> tuple[Any, Any]:
    """What a layer returned as (hidden, residual); other things beside them are not streams.

    Layers of transformers, which vLLM runs for models that it has no class for, have a batch of one
    step.
    """
    hidden, *rest = output if isinstance(output, tuple) else (output,)
    if hidden.dim() == 3 and len(hidden) == 1:
        hidden = hidden[0]
    residual = rest[0] if rest else None
    return hidden, residual if getattr(residual, "shape", None) == hidden.shape else None


def _same(returned: Any, given: Any) -> bool:
    if returned is None or returned.numel() != given.numel():
        return False
    return bool((returned == given.view_as(returned)).all())


def _error(ours: Any, returned: Any) -> float:
    """Relative L2 distance."""
    return float((ours - returned).float().norm() / returned.float().norm())


def _fit(ours: Any, returned: Any) -> tuple[float, float]:
    """The relative L2 distance of what is nearest among the multiples of `ours`, and its factor."""
    scale = float((ours.float() * returned.float()).sum() / ours.float().square().sum())
    return _error(ours * scale, returned), scale
