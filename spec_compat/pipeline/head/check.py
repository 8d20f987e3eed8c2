"""Whether a head's weights, its config.json, its verifier and the installed vLLM fit together.

Reads files only: neither torch nor vLLM is imported.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from packaging.version import Version

from spec_compat import registry, versions
from spec_compat.errors import UserError
from spec_compat.patching import Patch
from spec_compat.pipeline.inputs import verifier
from spec_compat.versions import matches

WEIGHTS, CONFIG = "model.safetensors", "config.json"
AUX_LAYERS = 3
DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
MAPPINGS = {"d2t": ("I64", np.int64), "t2d": ("BOOL", np.bool_)}
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

Tensors = dict[str, dict[str, Any]]
Array = NDArray[Any]


@dataclass(frozen=True)
class Head:
    """A head as it lies on disk; d2t int64 [draft] and t2d bool [vocabulary] where it has them."""

    config: dict[str, Any]
    tensors: Tensors
    d2t: Array | None
    t2d: Array | None


def read(directory: Path) -> Head:
    """Read a head's config and weights' header. Raises UserError where there are none."""
    if not directory.is_dir():
        raise UserError(f"{directory}: no such directory")
    for name in (CONFIG, WEIGHTS):
        if not (directory / name).is_file():
            raise UserError(f"{directory}: no {name}; is this the directory of a head?")
    weights = directory / WEIGHTS
    try:
        config = json.loads((directory / CONFIG).read_text(encoding="utf-8"))
        tensors = header(weights)
        return Head(config, tensors, *(_array(weights, tensors, name) for name in MAPPINGS))
    except (ValueError, struct.error, KeyError) as error:
        raise UserError(f"{directory}: {CONFIG} or {WEIGHTS} is not readable: {error}") from None


def check(directory: Path) -> tuple[Head, list[str]]:
    """A head and all that is wrong with it. Raises UserError for a wrong path."""
    head = read(directory)
    found = problems(head)
    return head, found if _missing(head.config) else [*found, *verifier_problems(head.config)]


def problems(head: Head) -> list[str]:
    """What in the head contradicts itself, or what vLLM's loader will not find; one line each."""
    found = _missing(head.config)
    if found:
        return found
    found += [*_config_problems(head.config), *_weight_problems(head)]
    if head.d2t is not None and head.t2d is not None:
        found += mapping_problems(head.d2t, head.t2d)
    return found


def mapping_problems(d2t: Array, t2d: Array) -> list[str]:
    """Whether d2t, offsets from a draft id to its token, and t2d, its marks, are one mapping.

    Drafts are ordered as their tokens are: the trainer cuts the verifier's lm_head with t2d.
    """
    if int(t2d.sum()) != len(d2t):
        return [f"t2d marks {int(t2d.sum())} tokens, d2t maps {len(d2t)}"]
    wrong = np.flatnonzero(np.arange(len(d2t)) + d2t != np.flatnonzero(t2d))
    if not len(wrong):
        return []
    first = int(wrong[0])
    return [
        f"d2t and t2d disagree for {len(wrong)} of {len(d2t)} draft tokens: {first} is mapped to "
        f"{first + int(d2t[first])}, t2d has it at {int(np.flatnonzero(t2d)[first])}"
    ]


def verifier_problems(config: Mapping[str, Any]) -> list[str]:
    """Where the head and the verifier that it names do not belong together."""
    name = config["speculators_config"]["verifier"]["name_or_path"]
    try:
        whole = verifier.read_config(name)
    except UserError as error:
        return [f"the verifier cannot be read: {str(error).removeprefix('--model ')}"]
    theirs = verifier.language(whole)
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


def serving_problems(
    architectures: list[str], release: Version, on_cpu: bool, sure: bool = False
) -> list[str]:
    """Why this release of vLLM cannot serve such a verifier with EAGLE-3, and which ones can.

    What is known is in serving.toml. A patch that SPEC_COMPAT_ENABLE names counts. An architecture
    that is not there may be served all the same, by a newer release or by way of transformers: with
    `sure` nothing is said of it.
    """
    found = []
    first, patch = _first(architectures), _patch(architectures)
    by_patch = patch and matches(release, patch.when["vllm"]) and patch.id in registry.enabled()
    known = first is not None or patch is not None
    if not (first and release >= first) and not by_patch and (known or not sure):
        found.append(f"this is vLLM {release}; {served_by(architectures)}")
    cpu = versions.table("serving.toml")["cpu"]
    if on_cpu and release < Version(cpu):
        found.append(f"this is vLLM {release}; {cpu} is the first that serves EAGLE-3 on a CPU")
    return found


def served_by(architectures: list[str]) -> str:
    """Which releases of vLLM serve EAGLE-3 for a verifier of these architectures."""
    first, patch, names = _first(architectures), _patch(architectures), ", ".join(architectures)
    said = f"{first} is the first" if first else "no vLLM is known"
    said += f" that serves {names} with EAGLE-3" if first else f" to serve {names} with EAGLE-3"
    if patch:
        said += f"; SPEC_COMPAT_ENABLE={patch.stage} teaches it to {patch.when['vllm']}"
    return said


def _first(architectures: list[str]) -> Version | None:
    known = versions.table("serving.toml")["architectures"].items()
    return next((Version(v) for v, names in known if set(names) & set(architectures)), None)


def _patch(architectures: list[str]) -> Patch | None:
    known = versions.table("serving.toml")["patches"].items()
    return next((registry.get(i) for i, names in known if set(names) & set(architectures)), None)


def header(file: Path) -> Tensors:
    """Shape, dtype and place of each tensor in a safetensors file."""
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        content: Tensors = json.loads(stream.read(length))
    content.pop("__metadata__", None)
    return content


def _array(file: Path, tensors: Tensors, name: str) -> Array | None:
    dtype, kind = MAPPINGS[name]
    if tensors.get(name, {}).get("dtype") != dtype:
        return None
    begin, end = tensors[name]["data_offsets"]
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        stream.seek(8 + length + begin)
        return np.frombuffer(stream.read(end - begin), kind)


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
        found = there.get(name, {}).get("shape")
        # vLLM shares the verifier's embeddings with a head that brings none.
        if found != shape and not (found is None and name == "embed_tokens.weight"):
            yield f"{name} is {found}, the config asks for {shape}"
    for name in sorted(there.keys() - expected.keys()):
        yield f"{name}: vLLM's loader knows no such tensor"
    for name, (dtype, _kind) in MAPPINGS.items():
        if name in there and there[name]["dtype"] != dtype:
            yield f"{name} is {there[name]['dtype']}, not {dtype}"
    dtypes = sorted({t["dtype"] for name, t in there.items() if name not in MAPPINGS})
    if len(dtypes) > 1 or not set(dtypes) <= DTYPES.keys():
        yield f"the weights are {', '.join(dtypes)}, not of one floating-point dtype"
    elif dtypes and head.config.get("dtype") not in (None, DTYPES[dtypes[0]]):
        yield f"dtype is {head.config['dtype']}, the weights are {DTYPES[dtypes[0]]}"


def expected_shapes(config: dict[str, Any]) -> dict[str, list[int]]:
    """Every tensor that vLLM's Eagle3LlamaForCausalLM takes, by the names of speculators."""
    layer = config["transformer_layer_config"]
    hidden, draft = layer["hidden_size"], config["draft_vocab_size"]
    inner, width = layer["intermediate_size"], layer["head_dim"]
    target = config.get("target_hidden_size")
    target = target if isinstance(target, int) and target else hidden
    query, key = (layer[f"num_{kind}_heads"] * width for kind in ("attention", "key_value"))
    shapes = {
        "fc.weight": [hidden, len(config["eagle_aux_hidden_state_layer_ids"]) * target],
        "embed_tokens.weight": [layer["vocab_size"], hidden],
        "norm.weight": [hidden],
        "lm_head.weight": [draft, hidden],
        "d2t": [draft],
        "t2d": [layer["vocab_size"]],
    }
    for index in range(layer["num_hidden_layers"]):
        # The first layer's attention sees the token's embedding beside the state.
        taken = hidden if index else 2 * hidden
        block = {
            "self_attn.q_proj.weight": [query, taken],
            "self_attn.k_proj.weight": [key, taken],
            "self_attn.v_proj.weight": [key, taken],
            "self_attn.o_proj.weight": [hidden, query],
            "mlp.gate_proj.weight": [inner, hidden],
            "mlp.up_proj.weight": [inner, hidden],
            "mlp.down_proj.weight": [hidden, inner],
            "input_layernorm.weight": [hidden],
            "post_attention_layernorm.weight": [hidden],
        }
        if index == 0:
            block["hidden_norm.weight"] = [hidden]
        for part, flag in (("self_attn", "attention_bias"), ("mlp", "mlp_bias")):
            if layer.get(flag):
                weights = [name for name in block if name.startswith(part)]
                block |= {n.replace(".weight", ".bias"): block[n][:1] for n in weights}
        shapes |= {f"layers.{index}.{name}": shape for name, shape in block.items()}
    return shapes


def _inherited(layer: Mapping[str, Any]) -> dict[str, Any]:
    """What a head's layer has of the verifier's."""
    theta, scaling = rope(layer)
    fields = {key: layer.get(key) for key in ("vocab_size", "hidden_size")}
    return {**fields, "rope_theta": theta, "rope_scaling": scaling}


def rope(layer: Mapping[str, Any]) -> tuple[float | None, dict[str, Any] | None]:
    """Base and scaling of a layer's rotary embedding, wherever a release of transformers has them.

    The scaling is one that a Llama layer has the same of in transformers and in vLLM: None for the
    default, and without what is for images, for a part of the head or for latent attention.
    """
    written = _mapping(layer.get("rope_parameters")) or _mapping(layer.get("rope_scaling"))
    # One for each kind of layer: the head's attention is full.
    found = dict(_mapping(written.get("full_attention")) or written)
    theta = found.pop("rope_theta", None) or layer.get("rope_theta")
    kind = found.pop("type", None)
    kind = found.pop("rope_type", None) or kind
    for key in ("mrope_section", "mrope_interleaved", "partial_rotary_factor"):
        found.pop(key, None)
    if kind in (None, "default", "mrope"):
        return theta, None
    if kind == "yarn":
        # transformers would scale the attention by these two; vLLM does so for DeepSeek alone.
        for key in ("mscale", "mscale_all_dim"):
            found.pop(key, None)
        found.setdefault("original_max_position_embeddings", layer.get("max_position_embeddings"))
    return theta, {**found, "rope_type": "longrope" if kind == "su" else kind}


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
