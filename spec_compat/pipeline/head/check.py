"""Whether a head's weights, its config.json and its verifier fit together.

Reads files only: neither torch nor vLLM is imported.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from numpy.typing import NDArray
from safetensors import SafetensorError

from spec_compat.errors import UserError
from spec_compat.pipeline.head.geometry import expected_shapes, mapping_problems, rope
from spec_compat.pipeline.inputs.verifier import Verifier
from spec_compat.pipeline.inputs.weights import opened

WEIGHTS, CONFIG = "model.safetensors", "config.json"
AUX_LAYERS = 3
DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
MAPPINGS = {"d2t": "I64", "t2d": "BOOL"}
# What vLLM reads of config.json (its SpeculatorsConfig), and the draft model's own geometry.
REQUIRED: Mapping[str, type] = {
    "speculators_model_type": str,
    "speculators_config.proposal_methods.0.speculative_tokens": int,
    "speculators_config.verifier.name_or_path": str,
    "draft_vocab_size": int,
    "eagle_aux_hidden_state_layer_ids": list,
    "transformer_layer_config.model_type": str,
    **{
        f"transformer_layer_config.{key}": int
        for key in (
            "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
            "num_attention_heads", "num_key_value_heads", "head_dim",
        )
    },
}  # fmt: skip


class Tensor(NamedTuple):
    """A tensor by the header of its file."""

    dtype: str
    shape: list[int]


@dataclass(frozen=True)
class Head:
    """A head as it lies on disk; d2t int64 [draft] and t2d bool [vocabulary] where it has them."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    d2t: NDArray[Any] | None
    t2d: NDArray[Any] | None


def read_head(directory: Path) -> Head:
    """Read a head's config and weights' header. Raises UserError where there are none."""
    if not directory.is_dir():
        raise UserError(f"{directory}: no such directory")
    for name in (CONFIG, WEIGHTS):
        if not (directory / name).is_file():
            raise UserError(f"{directory}: no {name}; is this the directory of a head?")
    try:
        config = json.loads((directory / CONFIG).read_text(encoding="utf-8"))
        with opened(directory / WEIGHTS) as weights:
            slices = {name: weights.get_slice(name) for name in weights.keys()}  # noqa: SIM118
            tensors = {n: Tensor(part.get_dtype(), part.get_shape()) for n, part in slices.items()}
            mappings = {
                name: weights.get_tensor(name)
                for name, dtype in MAPPINGS.items()
                if name in tensors and tensors[name].dtype == dtype
            }
        return Head(config, tensors, mappings.get("d2t"), mappings.get("t2d"))
    except (OSError, ValueError, SafetensorError) as error:
        raise UserError(
            f"{directory}: {CONFIG} or {WEIGHTS} is not readable ({error}); copy or export it anew"
        ) from None


def check_head(directory: Path) -> tuple[Head, list[str]]:
    """A head and all that is wrong with it. Raises UserError for a wrong path."""
    head = read_head(directory)
    found = head_problems(head)
    return head, found if _missing(head.config) else [*found, *verifier_problems(head.config)]


def head_problems(head: Head) -> list[str]:
    """What in the head contradicts itself, or what vLLM's loader will not find; one line each."""
    found = _missing(head.config)
    if found:
        return found
    found += [*_config_problems(head.config), *_weight_problems(head)]
    if head.d2t is not None and head.t2d is not None:
        found += mapping_problems(head.d2t, head.t2d)
    return found


def verifier_problems(config: Mapping[str, Any]) -> list[str]:
    """Where the head and the verifier that it names do not belong together."""
    try:
        theirs = Verifier(config["speculators_config"]["verifier"]["name_or_path"]).text_config
    except UserError as error:
        return [f"the verifier cannot be read: {error.message}"]
    ours, found = _inherited(config["transformer_layer_config"]), []
    for key, other in _inherited(theirs).items():
        own = ours[key]
        # A config.json may rely on its class's default.
        if own != other and not (other is None and key != "rope_scaling"):
            found.append(f"{key} is {own}, the verifier's is {other}")
    layers, key = theirs.get("num_hidden_layers"), "eagle_aux_hidden_state_layer_ids"
    if isinstance(layers, int) and not all(1 <= layer_id <= layers for layer_id in config[key]):
        found.append(f"{key} is {config[key]}, the verifier's ids are from 1 to {layers}")
    return found


def _missing(config: dict[str, Any]) -> list[str]:
    found = []
    for path, kind in REQUIRED.items():
        value: Any = config
        for key in path.split("."):
            if isinstance(value, list):
                value = value[int(key)] if key.isdigit() and int(key) < len(value) else None
            else:
                value = value.get(key) if isinstance(value, dict) else None
        if not isinstance(value, kind):
            found.append(f"{path} is {value}")
    if found:
        return found
    ids = config["eagle_aux_hidden_state_layer_ids"]
    if not all(isinstance(layer_id, int) for layer_id in ids):
        found.append(f"eagle_aux_hidden_state_layer_ids is {ids}")
    layer = config["transformer_layer_config"]
    for key in ("rope_parameters", "rope_scaling"):
        if not isinstance(layer.get(key), dict | None):
            found.append(f"transformer_layer_config.{key} is {layer[key]}")
    return found


def _config_problems(config: dict[str, Any]) -> Iterator[str]:
    if config["speculators_model_type"] != "eagle3":
        yield f"speculators_model_type is {config['speculators_model_type']}, not eagle3"
    layer = config["transformer_layer_config"]
    if layer["model_type"] != "llama":
        yield "transformer_layer_config is not of model_type llama"
    if (activation := layer.get("hidden_act", "silu")) != "silu":
        yield f"hidden_act is {activation}, vLLM's Llama layer knows silu alone"
    ids = config["eagle_aux_hidden_state_layer_ids"]
    if len(ids) != AUX_LAYERS or ids != sorted(set(ids)):
        yield f"eagle_aux_hidden_state_layer_ids is {ids}, not {AUX_LAYERS} ascending layers"


def _weight_problems(head: Head) -> Iterator[str]:
    expected = expected_shapes(head.config)
    there = {name.replace("midlayer.", "layers.0."): t for name, t in head.tensors.items()}
    for name, shape in expected.items():
        found = there[name].shape if name in there else None
        # vLLM shares the verifier's embeddings with a head that brings none.
        if found != shape and not (found is None and name == "embed_tokens.weight"):
            yield f"{name} is {found}, the config asks for {shape}"
    for name in sorted(there.keys() - expected.keys()):
        yield f"{name}: vLLM's loader knows no such tensor"
    for name, dtype in MAPPINGS.items():
        if name in there and there[name].dtype != dtype:
            yield f"{name} is {there[name].dtype}, not {dtype}"
    dtypes = sorted({t.dtype for name, t in there.items() if name not in MAPPINGS})
    if len(dtypes) > 1 or not set(dtypes) <= DTYPES.keys():
        yield f"the weights are {', '.join(dtypes)}, not of one floating-point dtype"
    elif dtypes and head.config.get("dtype") not in (None, DTYPES[dtypes[0]]):
        yield f"dtype is {head.config['dtype']}, the weights are {DTYPES[dtypes[0]]}"


def _inherited(layer: Mapping[str, Any]) -> dict[str, Any]:
    """What a head's layer has of the verifier's."""
    theta, scaling = rope(layer)
    fields = {key: layer.get(key) for key in ("vocab_size", "hidden_size")}
    return {**fields, "rope_theta": theta, "rope_scaling": scaling}
