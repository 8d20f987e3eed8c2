"""What the pipeline must know of the verifier, read from its config.json before anything heavy."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from spec_compat.errors import UserError
from spec_compat.pipeline.system import atomic
from spec_compat.pipeline.system.disk import expanded

# Files read so far, and files to read.
Progress = Callable[[int, int], None]
COMMIT = re.compile(r"[0-9a-f]{40}")
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
INDEX = "model.safetensors.index.json"
# What decides, beside the weights and config.json, what a verifier computes.
CODE = ("configuration_*.py", "modeling_*.py", "*quant*_config.json", INDEX)
READERS = 8
# vLLM multiplies the context by the factor of every other kind of RoPE scaling.
UNSCALED_ROPE = ("su", "longrope", "llama3")
# Where a model names classes of its own, in files beside it.
CODE_FILES = (
    "config.json",
    "tokenizer_config.json",
    "preprocessor_config.json",
    "processor_config.json",
)
# Where a wrapper's config has the language model's, beside those of the images and sounds.
NESTED = ("thinker_config", "text_config", "llm_config", "language_config")
# What no verifier can be without.
WIDTHS = ("num_hidden_layers", "hidden_size", "vocab_size")
# What names the class of a tokenizer or a processor.
CLASSES = ("tokenizer_class", "image_processor_type", "feature_extractor_type", "processor_class")
# vLLM's attention on GPUs takes heads whose size is a multiple of the first, up to the second.
HEAD_SIZES = (8, 256)


@dataclass(frozen=True)
class HeadGeometry:
    """Widths of the draft head's decoder layer; None where the verifier's config.json is silent."""

    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    intermediate_size: int | None = None


class Weights(NamedTuple):
    """A file of weights: its SHA-256, and what the file system said of it when that was taken.

    The time of the last change of any kind, unlike that of the content, cannot be set back.
    """

    bytes: int
    mtime_ns: int
    ctime_ns: int
    sha256: str

    @classmethod
    def of(cls, file: Path, stopped: Callable[[], bool] = lambda: False) -> Weights:
        """Read it, until that is stopped. Raises UserError when it cannot be."""
        try:
            there = file.stat()
            digest = atomic.sha256(file, stopped)
        except OSError as error:
            raise UserError(f"--model {file}: {(error.strerror or str(error)).lower()}") from None
        return cls(there.st_size, there.st_mtime_ns, there.st_ctime_ns, digest)

    def is_of(self, file: Path) -> bool:
        """Whether the file is as it was."""
        there = file.stat()
        return self[:3] == (there.st_size, there.st_mtime_ns, there.st_ctime_ns)


@dataclass(frozen=True)
class Verifier:
    """Geometry of the language model; `max_length` is the context in tokens, None without limit.

    `head` is what a draft head for it has where nothing else is asked for.
    """

    num_layers: int
    hidden_size: int
    vocab_size: int
    max_length: int | None
    architectures: tuple[str, ...]
    head: HeadGeometry = field(default_factory=HeadGeometry)

    @property
    def default_layer_ids(self) -> tuple[int, ...]:
        return (2, self.num_layers // 2, self.num_layers - 3, self.num_layers - 1)


def read(model: str, trust_remote_code: bool = False) -> Verifier:
    """Read the verifier's geometry. Raises UserError when this cannot be a verifier."""
    config_file = _config_file(model)
    config = _read_json(config_file)
    if not trust_remote_code and (named := brings_code(model)):
        raise UserError(
            f"--model {model}: it brings Python code of its own ({named}), which would be run; "
            "pass --trust-remote-code if you trust it"
        )
    directory = config_file.parent
    if expanded(model).is_dir():
        _check_files(directory, trust_remote_code)
    text = language(config)
    if wrong := [key for key in WIDTHS if key in text and not isinstance(text[key], int)]:
        raise UserError(f"--model {model}: {wrong[0]} is {text[wrong[0]]!r}, not a number")
    if not all(key in text for key in WIDTHS):
        text = _complete(model, trust_remote_code)
    _check_rope(model, text, trust_remote_code)
    return Verifier(
        num_layers=text["num_hidden_layers"],
        hidden_size=text["hidden_size"],
        vocab_size=text["vocab_size"],
        max_length=_max_length(text, directory / "tokenizer_config.json"),
        architectures=tuple(config.get("architectures") or ()),
        head=_head_geometry(text),
    )


def text_config(model: str, trust_remote_code: bool) -> Any:
    """The config of the language model, apart from its wrapper.

    A config class that comes with the model says nothing to transformers' models: where
    transformers has the architecture itself, the config is of its class.
    """
    import transformers

    auto = transformers.AutoConfig
    config = auto.from_pretrained(model, trust_remote_code=trust_remote_code).get_text_config()
    while inner := next(filter(None, (getattr(config, name, None) for name in NESTED)), None):
        config = inner
    if not type(config).__module__.startswith("transformers."):
        for name in config.architectures or ():
            if known := getattr(transformers, name, None):
                values = config.to_dict()
                values.pop("auto_map", None)
                return known.config_class.from_dict(values)
    return config


def language(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config.json that is of the language model; itself without a wrapper."""
    inner = next((config[name] for name in NESTED if isinstance(config.get(name), Mapping)), None)
    return config if inner is None else language(inner)


def check_head(geometry: HeadGeometry) -> None:
    """Raises UserError for a head that vLLM would not serve."""
    heads, kv_heads, size = geometry.heads, geometry.kv_heads, geometry.head_dim
    if heads and kv_heads and heads % kv_heads:
        raise UserError(f"--draft-kv-heads {kv_heads}: {heads} heads cannot share them evenly")
    step, largest = HEAD_SIZES
    if size and (size % step or size > largest):
        raise UserError(
            f"--draft-head-dim {size}: vLLM's attention takes multiples of {step} up to {largest}"
        )


def read_config(model: str) -> dict[str, Any]:
    """The verifier's config.json as it is. Raises UserError when there is none."""
    return _read_json(_config_file(model))


def directory(model: str) -> Path:
    """Where the verifier's files are: --model, or the commit of a download."""
    return _config_file(model).parent


def commit(directory: Path) -> str:
    """The commit that a directory of the hub's cache holds; empty for any other directory."""
    cached = directory.parent.name == "snapshots" and directory.parents[1].name.startswith("models")
    return directory.name if cached and COMMIT.fullmatch(directory.name) else ""


def weights(
    model: str, known: Mapping[str, Weights], progress: Progress = lambda done, total: None
) -> dict[str, Weights]:
    """The files of a local verifier's weights by name; those not `known` as they are now are read.

    A download of the hub has none: it is known by its commit, and its weights may come only later.
    Raises UserError for a file that cannot be read.
    """
    place = directory(model)
    if commit(place):
        return {}
    files = weight_files(place)
    found = {f.name: known[f.name] for f in files if f.name in known and known[f.name].is_of(f)}
    unread = [file for file in files if file.name not in found]
    stopped = threading.Event()
    with ThreadPoolExecutor(READERS) as readers:
        reading = [readers.submit(Weights.of, file, stopped.is_set) for file in unread]
        try:
            for done, file in enumerate(unread):
                found[file.name] = reading[done].result()
                progress(done + 1, len(unread))
        except BaseException:  # a Ctrl-C would wait for the files that are being read
            stopped.set()
            readers.shutdown(wait=False, cancel_futures=True)
            raise
    return found


def weight_files(place: Path) -> list[Path]:
    """Those that the index names, where there is one: the same weights may lie there once more."""
    index = place / INDEX
    named = _read_json(index).get("weight_map", {}).values() if index.is_file() else ()
    return sorted(place / name for name in set(named)) or sorted(place.glob("*.safetensors"))


def fingerprint(model: str, of: Mapping[str, Weights]) -> str:
    """Digest of what a verifier computes: config, weights and code, wherever its files lie."""
    place = directory(model)
    if known := commit(place):
        return known
    digest = hashlib.sha256((place / "config.json").read_bytes())
    for file in sorted({file for pattern in CODE for file in place.glob(pattern)}):
        digest.update(f"{file.name} {atomic.sha256(file)}\n".encode())
    for name in sorted(of):
        digest.update(f"{name} {of[name].sha256}\n".encode())
    return digest.hexdigest()


def weight_bytes(model: str) -> int:
    """Size of the model's weights, as its index has them; 0 where that is not known yet.

    Beside its shards a model may have the same weights once more (consolidated.safetensors).
    """
    whole = expanded(model)
    index = _file(model, INDEX)
    if index is None:
        return sum(file.stat().st_size for file in whole.glob("*.safetensors"))
    content = _read_json(index)
    shards = [index.parent / name for name in set(content.get("weight_map", {}).values())]
    if all(shard.is_file() for shard in shards):
        return sum(shard.stat().st_size for shard in shards)
    return int(content.get("metadata", {}).get("total_size", 0))


def check_layer_ids(layer_ids: tuple[int, ...], num_layers: int) -> None:
    """Four different layers in ascending order, as the worker returns them by depth."""
    written = ",".join(map(str, layer_ids))
    if len(layer_ids) != 4:
        raise UserError(f"--layer-ids {written}: four ids are needed, not {len(layer_ids)}")
    for layer_id in layer_ids:
        if not 0 <= layer_id < num_layers:
            raise UserError(
                f"--layer-ids {written}: {layer_id} is out of range, the verifier has layers 0 "
                f"to {num_layers - 1}"
            )
    if list(layer_ids) != sorted(set(layer_ids)):
        raise UserError(f"--layer-ids {written}: the ids must be different and ascending")


def _config_file(model: str) -> Path:
    path = expanded(model)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise UserError(f"--model {model}: no config.json in this directory")
        return path / "config.json"
    if path.exists():
        raise UserError(f"--model {model}: this is a file, not a model's directory")
    if not HUB_ID.fullmatch(model):
        raise UserError(f"--model {model}: no such directory")

    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(model, "config.json", etag_timeout=10))
    except Exception as error:
        cause = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(
            f"--model {model}: no such directory, and not available as a Hugging Face id ({cause})"
        ) from None


def brings_code(model: str) -> str:
    """The first of the model's files that needs Python code of its own; empty when none does.

    Where transformers has the class itself, as for many older repositories, it runs no other.
    """
    for name in CODE_FILES:
        file = _file(model, name)
        if file is None:
            continue
        content = _read_json(file)
        if any("auto_map" in part and not _known(part) for part in (content, language(content))):
            return name
    return ""


def offers_code(model: str) -> bool:
    """Whether it has Python code of its own for what transformers does without."""
    files = filter(None, (_file(model, name) for name in CODE_FILES))
    parts = (part for content in map(_read_json, files) for part in (content, language(content)))
    return any("auto_map" in part for part in parts) and not brings_code(model)


def _known(content: Mapping[str, Any]) -> bool:
    """Whether transformers itself has the class of a config, a tokenizer or a processor."""
    import transformers

    if kind := content.get("model_type"):
        return kind in transformers.CONFIG_MAPPING
    classes = [content[key] for key in CLASSES if content.get(key)]
    return bool(classes) and set(classes) <= set(dir(transformers))


def _file(model: str, name: str) -> Path | None:
    """A file of the model, where it has it."""
    directory = expanded(model)
    if directory.is_dir():
        return directory / name if (directory / name).is_file() else None

    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(model, name, etag_timeout=10))
    except Exception:
        return None


def _check_files(directory: Path, trust_remote_code: bool) -> None:
    """Refuse a local directory that speculators would fail on later."""
    index = directory / INDEX
    shards = {"model.safetensors"}
    if index.is_file():
        shards = set(_read_json(index).get("weight_map", {}).values())
    for shard in sorted(shards):
        if not (directory / shard).is_file():
            raise UserError(f"--model {directory}: no {shard} in this directory")
    for shard in sorted(shards):
        _check_length(directory / shard)
    if not trust_remote_code and not _has_chat_template(directory):
        raise UserError(f"--model {directory}: its tokenizer has no chat template")


def _check_length(file: Path) -> None:
    """Refuse a safetensors file that is not as long as its header has it."""
    try:
        there = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(length) if length < there else b"")
        tensors = (value for name, value in header.items() if name != "__metadata__")
        whole = 8 + length + max((tensor["data_offsets"][1] for tensor in tensors), default=0)
    except OSError as error:
        raise UserError(f"--model {file}: {(error.strerror or str(error)).lower()}") from None
    except (ValueError, LookupError, TypeError, AttributeError):
        raise UserError(f"--model {file}: cut, or no safetensors file; copy it anew") from None
    if there != whole:
        raise UserError(
            f"--model {file}: it has {there:,} bytes, by its header {whole:,}; copy it anew"
        )


def _has_chat_template(directory: Path) -> bool:
    if (directory / "chat_template.jinja").is_file() or (
        directory / "chat_template.json"
    ).is_file():
        return True
    tokenizer_config = directory / "tokenizer_config.json"
    return tokenizer_config.is_file() and "chat_template" in _read_json(tokenizer_config)


def _complete(model: str, trust_remote_code: bool) -> Mapping[str, Any]:
    """The config as transformers reads it, for a config.json that relies on a class's defaults."""
    text = text_config(model, trust_remote_code)
    if missing := [key for key in WIDTHS if not hasattr(text, key)]:
        raise UserError(f"--model {model}: its config has no {missing[0]}")
    values: dict[str, Any] = text.to_dict()
    values.update({key: getattr(text, key) for key in ("num_hidden_layers", "hidden_size")})
    return values


def _check_rope(model: str, text: Mapping[str, Any], trust_remote_code: bool) -> None:
    """Refuse a config.json whose rope_theta the installed transformers, and so vLLM, would not see.

    transformers 5 writes it under rope_parameters; the classes of transformers 4 do not look there,
    have a rope_theta of their own, and vLLM takes that one.
    """
    written = (text.get("rope_parameters") or {}).get("rope_theta")
    if written is None or text.get("rope_theta") == written:
        return
    taken = getattr(text_config(model, trust_remote_code), "rope_theta", written)
    if taken != written:
        raise UserError(
            f"--model {model}: config.json has rope_theta {written:g} under rope_parameters alone, "
            f"where transformers 4 and its vLLM do not look: they would take {taken:g}; write it "
            "beside them as rope_theta too"
        )


def _head_geometry(text: Mapping[str, Any]) -> HeadGeometry:
    """The verifier's own widths; of latent attention (MLA), those of what a head adds to a token.

    Keys and queries of MLA are wider by the part that carries the position, and `head_dim`, where a
    config has it, is the width of that part alone.
    """

    def number(key: str) -> int | None:
        value = text.get(key)
        return value if isinstance(value, int) else None

    heads = number("num_attention_heads")
    head_dim = number("v_head_dim" if number("kv_lora_rank") else "head_dim")
    head_dim = head_dim or (text["hidden_size"] // heads if heads else None)
    kv_heads = number("num_key_value_heads") or heads
    return HeadGeometry(heads, kv_heads, head_dim, number("intermediate_size"))


def _max_length(text: Mapping[str, Any], tokenizer_config: Path) -> int | None:
    """The context that vLLM will derive from the model's and the tokenizer's config."""
    limits = [text.get("max_position_embeddings")]
    if tokenizer_config.is_file():
        limits.append(_read_json(tokenizer_config).get("model_max_length"))
    known = [int(limit) for limit in limits if limit]
    if not known:
        return None
    limit = min(known)
    rope = text.get("rope_scaling") or text.get("rope_parameters") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in UNSCALED_ROPE and rope.get("factor"):
        if kind == "yarn":
            limit = rope.get("original_max_position_embeddings", limit)
        limit = int(limit * rope["factor"])
    return limit


def _read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: not readable as JSON: {error}") from None
    if not isinstance(value, dict):
        raise UserError(f"{file}: not a JSON object")
    return value
