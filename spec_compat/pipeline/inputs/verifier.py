"""What the pipeline knows of the verifier, read from its files before anything heavy."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from spec_compat.errors import UserError
from spec_compat.pipeline.inputs import hub, weights
from spec_compat.pipeline.inputs.geometry import WIDTHS, Geometry, max_length
from spec_compat.pipeline.inputs.weights import INDEX, SINGLE, Progress, Weights
from spec_compat.pipeline.system import atomic
from spec_compat.pipeline.system.disk import expanded
from spec_compat.wrappers import text_config

CONFIG, TOKENIZER_CONFIG = "config.json", "tokenizer_config.json"
# What decides, beside the weights and config.json, what a verifier computes.
CODE = ("configuration_*.py", "modeling_*.py", "*quant*_config.json", INDEX)
# Where a model names classes of its own, in files beside it.
CODE_FILES = (CONFIG, TOKENIZER_CONFIG, "preprocessor_config.json", "processor_config.json")
# What names the class of a tokenizer or a processor.
CLASSES = ("tokenizer_class", "image_processor_type", "feature_extractor_type", "processor_class")
TEMPLATES = ("chat_template.jinja", "chat_template.json")


@dataclass(frozen=True)
class Verifier:
    """A model by its directory or Hub id. Each property reads its files once, when it is asked for.

    `trust_remote_code` says whether Python code that comes with the model may run. All properties
    raise UserError where a file is missing, unreadable or out of reach.
    """

    model: str
    trust_remote_code: bool = False

    def error(self, problem: str) -> UserError:
        """An error about this verifier, for its user."""
        return UserError(f"{self.model}: {problem}", option="model")

    @cached_property
    def is_local(self) -> bool:
        return expanded(self.model).is_dir()

    @property
    def name_or_path(self) -> str:
        """What a library is given to load: the absolute directory, or the Hub id."""
        return str(self.directory) if self.is_local else self.model

    @cached_property
    def directory(self) -> Path:
        """The absolute directory of its files; of a Hub id, that of a commit in the Hub's cache."""
        path = expanded(self.model)
        if self.is_local:
            return path.resolve()
        if path.exists():
            raise self.error("this is a file, not a model's directory")
        if not hub.ID.fullmatch(self.model):
            raise self.error("no such directory")
        try:
            return hub.download(self.model, CONFIG).parent
        except Exception as error:
            raise self.error(
                f"no such directory, and not available as a Hugging Face id ({hub.cause(error)})"
            ) from None

    @cached_property
    def commit(self) -> str:
        """The commit of a download of the Hub; empty for any other directory."""
        return hub.commit(self.directory)

    def file(self, name: str) -> Path | None:
        """The file of this name; None where the model has none. One of the Hub is downloaded."""
        if self.is_local:
            file = self.directory / name
            return file if file.is_file() else None
        commit = self.commit
        try:
            return hub.find(self.model, name, commit or None)
        except Exception as error:
            raise self.error(
                f"whether it has a {name} is not known ({hub.cause(error)}); try again, or go on "
                "with what has been downloaded by HF_HUB_OFFLINE=1"
            ) from None

    @cached_property
    def config(self) -> dict[str, Any]:
        """config.json as it is."""
        file = self.file(CONFIG)
        if file is None:
            raise self.error(f"no {CONFIG} in this directory")
        return _read_json(file)

    @property
    def architectures(self) -> tuple[str, ...]:
        return tuple(self.config.get("architectures") or ())

    @cached_property
    def text_config(self) -> Mapping[str, Any]:
        """The language model's part of config.json, as it is written."""
        return text_config(self.config)

    @cached_property
    def full_text_config(self) -> Mapping[str, Any]:
        """The same with its class's defaults, where it leaves out a width."""
        text = self.text_config
        if wrong := [key for key in WIDTHS if key in text and not isinstance(text[key], int)]:
            raise self.error(f"{wrong[0]} is {text[wrong[0]]!r}, not a number")
        if all(key in text for key in WIDTHS):
            return text
        known = self.hf_text_config
        if missing := [key for key in WIDTHS if not hasattr(known, key)]:
            raise self.error(f"its config has no {missing[0]}")
        return {**known.to_dict(), **{key: getattr(known, key) for key in WIDTHS}}

    @cached_property
    def hf_text_config(self) -> Any:
        """The language model's config as an object of transformers; not to be changed.

        A config class that comes with the model says nothing to transformers' models: where
        transformers has the architecture itself, the config is of its class.
        """
        import transformers

        auto = transformers.AutoConfig
        whole = auto.from_pretrained(self.name_or_path, trust_remote_code=self.trust_remote_code)
        config = text_config(whole.get_text_config())
        if not type(config).__module__.startswith("transformers."):
            for name in config.architectures or ():
                if known := getattr(transformers, name, None):
                    values = config.to_dict()
                    values.pop("auto_map", None)
                    return known.config_class.from_dict(values)
        return config

    @cached_property
    def geometry(self) -> Geometry:
        text = self.full_text_config
        tokenizer_config = self.file(TOKENIZER_CONFIG)
        length = max_length(text, _read_json(tokenizer_config) if tokenizer_config else {})
        layers, hidden, vocabulary = (text[width] for width in WIDTHS)
        return Geometry(layers, hidden, vocabulary, length)

    @cached_property
    def brings_code(self) -> str:
        """The first of its files that needs Python code of its own; empty when none does.

        Where transformers has the class itself, as for many older repositories, it runs no other.
        """
        for name, parts in self._code_files.items():
            if any("auto_map" in part and not _known(part) for part in parts):
                return name
        return ""

    @cached_property
    def offers_code(self) -> bool:
        """Whether it has Python code of its own for what transformers does without."""
        parts = (part for parts in self._code_files.values() for part in parts)
        return any("auto_map" in part for part in parts) and not self.brings_code

    @cached_property
    def _code_files(self) -> dict[str, tuple[Mapping[str, Any], Mapping[str, Any]]]:
        """Each file that may name classes: its content, and the language model's part of that."""
        files = {name: self.file(name) for name in CODE_FILES}
        contents = {name: _read_json(file) for name, file in files.items() if file}
        return {name: (content, text_config(content)) for name, content in contents.items()}

    @cached_property
    def weights_index(self) -> dict[str, Any]:
        """The index of the weights; empty where they are one file."""
        file = self.file(INDEX)
        return _read_json(file) if file else {}

    @cached_property
    def weight_map(self) -> Mapping[str, str]:
        """The file of each tensor."""
        if files := self.weights_index.get("weight_map"):
            return dict(files)
        single = self.file(SINGLE)
        if single is None:
            raise self.error(f"no {SINGLE} among its files")
        return dict.fromkeys(weights.tensor_names(single), SINGLE)

    def file_of(self, tensor: str) -> Path:
        """The file that has this tensor; one of the Hub is downloaded."""
        if tensor not in self.weight_map:
            raise self.error(f"no {tensor} among its weights")
        file = self.file(self.weight_map[tensor])
        if file is None:
            raise self.error(f"no {self.weight_map[tensor]} among its files")
        return file

    @cached_property
    def weight_files(self) -> list[Path]:
        """Those that the index names, where there is one: the same weights may lie there twice."""
        named = set(self.weights_index.get("weight_map", {}).values())
        files = sorted(self.directory / name for name in named)
        return files or sorted(self.directory.glob("*.safetensors"))

    @cached_property
    def weight_bytes(self) -> int:
        """Size of the weights, of a download by its index; 0 where that is not known yet."""
        if all(file.is_file() for file in self.weight_files):
            return sum(file.stat().st_size for file in self.weight_files)
        return int(self.weights_index.get("metadata", {}).get("total_size", 0))

    def read_weights(
        self, known: Mapping[str, Weights], progress: Progress = lambda done, total: None
    ) -> dict[str, Weights]:
        """The files of a local verifier's weights by name; those not `known` are read.

        A download of the Hub has none: it is known by its commit, and its weights may come only
        later.
        """
        return {} if self.commit else weights.read(self.weight_files, known, progress)

    def digest(self, of: Mapping[str, Weights]) -> str:
        """Digest of what it computes: config, weights and code, wherever its files lie."""
        if self.commit:
            return self.commit
        digest = hashlib.sha256((self.directory / CONFIG).read_bytes())
        for file in sorted({file for pattern in CODE for file in self.directory.glob(pattern)}):
            digest.update(f"{file.name} {atomic.sha256(file)}\n".encode())
        for name in sorted(of):
            digest.update(f"{name} {of[name].sha256}\n".encode())
        return digest.hexdigest()

    def tensor(self, suffix: str) -> str:
        """The one tensor whose name ends so and that is no part of a decoder layer."""
        names = [n for n in self.weight_map if f".{n}".endswith(f".{suffix}")]
        found = [name for name in names if ".layers." not in name]
        if len(found) != 1:
            raise self.error(f"{len(found)} of its weights are called {suffix}")
        return found[0]

    def check(self) -> None:
        """Raises UserError for what no stage can use, and for code that is not trusted."""
        if not self.config:
            raise self.error(f"its {CONFIG} is empty")
        if not self.trust_remote_code and self.brings_code:
            raise self.error(
                f"it brings Python code of its own ({self.brings_code}), which would be run; "
                "pass --trust-remote-code if you trust it"
            )
        if self.is_local:
            self._check_files()
        self._check_rope(self.full_text_config)

    def _check_files(self) -> None:
        """Refuse a local directory that speculators would fail on later."""
        names = set(self.weights_index.get("weight_map", {}).values()) or {SINGLE}
        files = {name: self.file(name) for name in sorted(names)}
        for name, file in files.items():
            if file is None:
                raise self.error(f"no {name} in this directory")
        for file in filter(None, files.values()):
            weights.tensor_names(file)
        if not (self.trust_remote_code or self._has_chat_template()):
            raise self.error("its tokenizer has no chat template")

    def _has_chat_template(self) -> bool:
        file = self.file(TOKENIZER_CONFIG)
        return any(self.file(name) for name in TEMPLATES) or (
            file is not None and "chat_template" in _read_json(file)
        )

    def _check_rope(self, text: Mapping[str, Any]) -> None:
        """Refuse a config.json whose rope_theta the installed transformers would not see.

        transformers 5 writes it under rope_parameters; the classes of transformers 4 do not look
        there, have a rope_theta of their own, and vLLM takes that one.
        """
        written = (text.get("rope_parameters") or {}).get("rope_theta")
        if written is None or text.get("rope_theta") == written:
            return
        taken = getattr(self.hf_text_config, "rope_theta", written)
        if taken != written:
            raise self.error(
                f"config.json has rope_theta {written:g} under rope_parameters alone, where "
                f"transformers 4 and its vLLM do not look: they would take {taken:g}; write it "
                "beside them as rope_theta too"
            )


def _known(content: Mapping[str, Any]) -> bool:
    """Whether transformers itself has the class of a config, a tokenizer or a processor."""
    import transformers

    if kind := content.get("model_type"):
        return kind in transformers.CONFIG_MAPPING
    classes = [content[key] for key in CLASSES if content.get(key)]
    return bool(classes) and set(classes) <= set(dir(transformers))


def _read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: not readable as JSON: {error}") from None
    if not isinstance(value, dict):
        raise UserError(f"{file}: not a JSON object")
    return value
