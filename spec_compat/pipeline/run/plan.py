"""A run with every question answered: options filled in, verifier and data looked at."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path

from spec_compat.errors import UserError
from spec_compat.pipeline.head.geometry import HeadGeometry, expected_shapes
from spec_compat.pipeline.inputs import conversations
from spec_compat.pipeline.inputs.conversations import FileCheck
from spec_compat.pipeline.inputs.verifier import Verifier
from spec_compat.pipeline.inputs.weights import Progress, Weights
from spec_compat.pipeline.rows import zstd
from spec_compat.pipeline.run.config import DRAFT_VOCAB_SIZE, SEQ_LENGTH, ResolvedConfig, RunConfig
from spec_compat.pipeline.system.disk import expanded

NAME_BYTES = 100
# Of a head's tensors those that training leaves alone.
FROZEN = ("embed_tokens.weight", "d2t", "t2d")
PRESETS = ("sharegpt", "ultrachat", "open-perfectblend")


@dataclass(frozen=True)
class Dataset:
    """One --data: a local file, or one of the presets; `name` is its directory in the run."""

    name: str
    source: str

    @property
    def is_local(self) -> bool:
        return self.source not in PRESETS


@dataclass(frozen=True)
class Plan:
    """What will be run; `checks` has an entry for every local file.

    `weights` are files of the verifier's whose content is known, until `read_weights` all of them.
    """

    config: ResolvedConfig
    verifier: Verifier
    datasets: tuple[Dataset, ...]
    checks: dict[str, FileCheck]
    weights: dict[str, Weights]

    def read_weights(self, progress: Progress = lambda done, total: None) -> None:
        """Read what is not known of the verifier's weights. Raises UserError."""
        found = self.verifier.read_weights(self.weights, progress)
        self.weights.clear()
        self.weights.update(found)

    @property
    def bytes_per_token(self) -> int:
        """Size on disk of one token's states; what zstd saves of it is not known before."""
        layers, hidden = len(self.config.layer_ids), self.verifier.geometry.hidden_size
        if self.config.storage_dtype == "fp8":
            return layers * (hidden + 4)  # a scale in float32
        return layers * hidden * 2

    @property
    def trained_parameters(self) -> int:
        """Of the head; 0 where the verifier's config.json does not tell its widths."""
        config, hidden = self.config, self.verifier.geometry.hidden_size
        layer = {
            "vocab_size": self.verifier.geometry.vocab_size,
            "hidden_size": hidden,
            "intermediate_size": config.draft_intermediate_size,
            "num_hidden_layers": config.num_layers,
            "num_attention_heads": config.draft_heads,
            "num_key_value_heads": config.draft_kv_heads,
            "head_dim": config.draft_head_dim,
        }
        if not all(layer.values()):
            return 0
        shapes = expected_shapes(
            {
                "transformer_layer_config": layer,
                "draft_vocab_size": config.draft_vocab_size,
                "eagle_aux_hidden_state_layer_ids": config.layer_ids[:-1],
            }
        )
        return sum(math.prod(shape) for name, shape in shapes.items() if name not in FROZEN)

    @property
    def sources(self) -> dict[str, str]:
        """What the run is made from: digests of the model and of each local file."""
        digests = {f"data {d.name}": d.source for d in self.datasets if not d.is_local}
        digests |= {f"data {name}": check.sha256 for name, check in self.checks.items()}
        return {"model": self.model, **digests}

    @cached_property
    def model(self) -> str:
        """The verifier's digest; its weights are read for it."""
        self.read_weights()
        return self.verifier.digest(self.weights)


def make(config: RunConfig, weights: Mapping[str, Weights] | None = None) -> Plan:
    """Look at the verifier and the data, and fill in the options. Raises UserError.

    `weights` are what an earlier run knew of the verifier's.
    """
    verifier = Verifier(config.model, config.trust_remote_code)
    verifier.check()
    geometry = verifier.geometry
    layer_ids = config.layer_ids or geometry.default_layer_ids
    geometry.check_layer_ids(layer_ids)
    _check_storage(config)
    draft_vocab_size = config.draft_vocab_size or min(DRAFT_VOCAB_SIZE, geometry.vocab_size)
    if draft_vocab_size > geometry.vocab_size:
        raise UserError(
            f"--draft-vocab-size {draft_vocab_size}: the verifier has only "
            f"{geometry.vocab_size} tokens"
        )
    resolved = ResolvedConfig.model_validate(
        {
            **config.model_dump(),
            "model": verifier.name_or_path,
            "data": _sources(config.data),
            "output": expanded(config.output).resolve(),
            "hf_cache_dir": config.hf_cache_dir and expanded(config.hf_cache_dir),
            "seq_length": _fit(config.seq_length, geometry.max_length),
            "layer_ids": layer_ids,
            "draft_vocab_size": draft_vocab_size,
            **_head(config, HeadGeometry.of(verifier)),
        }
    )
    datasets = name_datasets(resolved.data)
    checks = {d.name: conversations.check(Path(d.source)) for d in datasets if d.is_local}
    return Plan(resolved, verifier, datasets, checks, dict(weights or {}))


def _head(config: RunConfig, derived: HeadGeometry) -> dict[str, int | None]:
    """The options of the head's geometry: what is asked for, else the verifier's. UserError."""
    heads = config.draft_heads or derived.heads
    # As many as there are heads, where those that the verifier has do not fit another number.
    kv_heads = derived.kv_heads if heads == derived.heads else heads
    geometry = HeadGeometry(
        heads,
        config.draft_kv_heads or kv_heads,
        config.draft_head_dim or derived.head_dim,
        config.draft_intermediate_size or derived.intermediate_size,
    )
    geometry.check()
    return {f"draft_{name}": value for name, value in asdict(geometry).items()}


def _check_storage(config: RunConfig) -> None:
    for option, value in (("storage-dtype", "fp8"), ("storage-compression", "zstd")):
        chosen = getattr(config, option.replace("-", "_")) == value
        if chosen and config.storage != "shards":
            raise UserError(f"--{option} {value}: only shards hold it; add --storage shards")
    if config.storage_compression == "zstd" and not zstd.available():
        raise UserError(
            "--storage-compression zstd: this Python has no zstd; pip install backports.zstd"
        )


def name_datasets(sources: tuple[str, ...]) -> tuple[Dataset, ...]:
    """A directory name for each source: the file's stem, with a number where two are alike."""
    datasets: list[Dataset] = []
    for source in sources:
        stem = source if source in PRESETS else _directory_name(source)
        taken = {dataset.name for dataset in datasets}
        name, number = stem, 1
        while name in taken:
            number += 1
            name = f"{stem}-{number}"
        datasets.append(Dataset(name, source))
    return tuple(datasets)


def _directory_name(source: str) -> str:
    """No name leads out of the run, none is hidden, and none is too long with what is added."""
    name = re.sub(r"[^\w.-]+", "_", Path(source).stem).lstrip(".")
    return name.encode()[:NAME_BYTES].decode(errors="ignore") or "data"


def _sources(given: tuple[str, ...]) -> tuple[str, ...]:
    """Whatever the order in which they are given, it is the same run."""
    sources = sorted(map(_source, given))
    for source, following in pairwise(sources):
        if source == following:  # what is held out would be trained on
            raise UserError(f"--data {source}: given twice")
    return tuple(sources)


def _source(data: str) -> str:
    if data in PRESETS:
        return data
    path = expanded(data)
    if path.suffix not in conversations.SUFFIXES:
        raise UserError(f"--data {data}: neither a .json or .jsonl file nor {', '.join(PRESETS)}")
    if not path.is_file():
        raise UserError(f"--data {data}: no such file")
    return str(path.resolve())


def _fit(seq_length: int | None, max_length: int | None) -> int:
    """The longest row that fits: the generator samples one token more than it is given."""
    if max_length is None:
        return seq_length or SEQ_LENGTH
    if seq_length is not None and seq_length > max_length:
        raise UserError(f"--seq-length {seq_length}: the verifier takes {max_length} tokens")
    return min(seq_length or SEQ_LENGTH, max_length - 1)
