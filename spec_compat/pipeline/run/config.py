"""Every option of a run, as a field of RunConfig; read from flags, TOML and the run's manifest."""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ByteSize, ConfigDict, Field, ValidationError, field_validator

from spec_compat.errors import UserError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# Rows longer than this are cut, unless the verifier takes less.
SEQ_LENGTH = 2048
DRAFT_VOCAB_SIZE = 32_000
# The attention mask of the draft head is built from blocks of this many tokens.
MASK_BLOCK = 128


class RunConfig(BaseModel):
    """Every option of the pipeline. Defaults are those of speculators' scripts."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=False, allow_inf_nan=False
    )

    model: str = Field(..., description="Verifier: a local directory or a Hugging Face id.")
    data: tuple[str, ...] = Field(
        ...,
        description="Conversations: a .json or .jsonl file, sharegpt, ultrachat or "
        "open-perfectblend. May be given several times.",
        min_length=1,
    )
    output: Path = Field(..., description="The run directory; a run that is in it is continued.")

    seq_length: int | None = Field(
        None,
        description=f"Longest row in tokens (default: {SEQ_LENGTH}, or what the verifier takes).",
        ge=2,
    )
    max_samples: int | None = Field(
        None, description="Rows taken from each dataset (default: all).", ge=1
    )
    assistant_pattern: str | None = Field(
        None,
        description="Regular expression of an assistant's turn (default: from the chat template).",
    )
    turn_dropout: bool = Field(False, description="Keep a random number of turns of every row.")
    seed: int = Field(0, description="Seed of every random choice.", ge=0, lt=2**32)
    num_preprocessing_workers: int | None = Field(
        None, description="Processes that tokenize (default: 8, or one for each CPU).", ge=1
    )
    hf_cache_dir: Path | None = Field(
        None,
        description="Where downloaded datasets are kept (default: a directory of the run).",
    )
    trust_remote_code: bool = Field(
        False, description="Allow a verifier that brings Python code of its own."
    )

    layer_ids: tuple[int, ...] | None = Field(
        None,
        description="Four layers, as 2,15,27,29: three for the head's input, then the last "
        "(default: 2, n/2, n-3, n-1).",
    )
    batch_size: int = Field(
        256, description="Most rows that the verifier computes in one step.", ge=1, le=256
    )
    storage: Literal["rows", "shards"] = Field(
        "rows",
        description="A data_{i}.pt for each row, as speculators reads them, or rows together in "
        "safetensors.",
    )
    storage_dtype: Literal["verifier", "fp8"] = Field(
        "verifier", description="Hidden states as they are, or in shards as fp8: half the bytes."
    )
    storage_compression: Literal["none", "zstd"] = Field(
        "none", description="Compress the hidden states in shards, without loss."
    )
    sink_buffers: int | None = Field(
        None,
        description="Steps whose hidden states the host holds until they are written "
        "(default: 3 to 8, in 2 GiB where that is enough).",
        ge=2,
    )
    on_bad_row: Literal["stop", "skip"] = Field(
        "stop",
        description="What to do with a row that fails its proof: stop, or skip it and report it.",
    )
    max_bad_rows: int = Field(10, description="With skip: stop after more than this many.", ge=0)
    tensor_parallel_size: int = Field(1, description="Tensor parallel size of the verifier.", ge=1)
    gpu_memory_utilization: float = Field(
        0.8, description="Share of each GPU that vLLM may take.", gt=0, le=1
    )

    max_disk: ByteSize | None = Field(
        None,
        description="Refuse more hidden states than this, as 500GB (default: no limit).",
    )
    on_full_disk: Literal["pause", "stop"] = Field(
        "pause", description="Where space runs out: pause until there is some, or stop."
    )
    server_url: str = Field(
        "http://localhost:8000", description="Where a vLLM server may be holding the GPUs."
    )
    stop_server_cmd: str | None = Field(
        None, description="Shell command that stops that server before the GPUs are needed."
    )
    restart_server_cmd: str | None = Field(
        None, description="Shell command that starts it again at the end, also after a failure."
    )

    draft_vocab_size: int | None = Field(
        None,
        description=f"Tokens that the head can draft (default: {DRAFT_VOCAB_SIZE}, or the "
        "verifier's).",
        ge=1,
    )

    epochs: int = Field(20, description="Epochs.", ge=1)
    lr: float = Field(1e-4, description="Peak learning rate.", gt=0)
    train_dtype: Literal["float32", "tf32", "bf16"] | None = Field(
        None,
        description="Precision of the matrix products in training; weights, optimizer and loss are "
        "in float32 (default: bf16 where the GPU has it, else float32).",
    )
    ttt_steps: int = Field(3, description="Tokens drafted in a row while training.", ge=1)
    ttt_step_loss_decay: float = Field(
        1.0,
        description="Weight of each drafted token's loss, relative to the one before.",
        gt=0,
        le=1,
    )
    use_off_policy_tokens: bool = Field(
        False, description="Feed the row's own tokens, not the drafted ones, at each TTT step."
    )
    num_layers: int = Field(1, description="Decoder layers of the head.", ge=1)
    draft_heads: int | None = Field(
        None, description="Attention heads of the head (default: the verifier's).", ge=1
    )
    draft_kv_heads: int | None = Field(
        None, description="Key and value heads of the head (default: the verifier's).", ge=1
    )
    draft_head_dim: int | None = Field(
        None,
        description="Width of an attention head (default: the verifier's; of MLA, v_head_dim).",
        ge=1,
    )
    draft_intermediate_size: int | None = Field(
        None,
        description="Width of the head's MLP (default: that of the verifier's dense layers).",
        ge=1,
    )
    noise_std: float = Field(0.05, description="Uniform noise added to the hidden states.", ge=0)
    total_seq_len: int | None = Field(
        None,
        description=f"Tokens in one training batch, a multiple of {MASK_BLOCK} "
        "(default: 8192, less on little data).",
        ge=MASK_BLOCK,
        multiple_of=MASK_BLOCK,
    )
    val_ratio: float = Field(0.1, description="Share of the rows kept for validation.", gt=0, lt=1)
    num_workers: int | None = Field(
        None, description="Processes that load rows (default: 8, or one for each CPU).", ge=0
    )
    train_gpus: int | None = Field(None, description="GPUs to train on (default: all).", ge=1)

    verifier_name: str | None = Field(
        None, description="Name of the verifier in the head's config.json (default: --model)."
    )

    @field_validator("max_disk", mode="before")
    @classmethod
    def _check_max_disk(cls, value: Any) -> Any:
        # ByteSize reads how the text begins and leaves the rest: 1,000GB would be one byte.
        if isinstance(value, str) and not re.fullmatch(r"\s*\d*\.?\d+\s*\w*\s*", value):
            raise ValueError("a size, as 500GB")
        return value

    @field_validator("assistant_pattern")
    @classmethod
    def _check_assistant_pattern(cls, value: str | None) -> str | None:
        try:
            groups = re.compile(value).groups if value is not None else 1
        except re.error as error:
            raise ValueError(f"a regular expression ({error})") from None
        if not groups:
            raise ValueError("a regular expression with the assistant's text in parentheses")
        return value

    @field_validator("server_url")
    @classmethod
    def _check_server_url(cls, value: str) -> str:
        try:
            parts = urlsplit(value)
            whole = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:
            whole = False
        if not whole:
            raise ValueError("an address, as http://localhost:8000")
        return value

    @field_validator("layer_ids", mode="before")
    @classmethod
    def _split_layer_ids(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        return tuple(part for part in re.split(r"[,\s]+", value.strip(" []()")) if part)


class ResolvedConfig(RunConfig):
    """The options once verifier and data have been looked at: what was left open is decided."""

    seq_length: int
    layer_ids: tuple[int, ...]
    draft_vocab_size: int


# What an option was before there was one: a run of an older release goes on with these.
DEFAULTS = {
    name: field.default for name, field in RunConfig.model_fields.items() if not field.is_required()
}


def load(
    flags: Mapping[str, Any],
    file: Path | None = None,
    earlier: Mapping[str, Any] | None = None,
) -> RunConfig:
    """Build the options of a run.

    Flags win over the TOML file, which wins over `earlier`, the options of the run that the output
    directory holds. Raises UserError, naming the option and where it was given.
    """
    from_file = read_toml(file) if file else {}
    merged = {**(earlier or {}), **from_file, **flags}
    try:
        return RunConfig.model_validate(merged)
    except ValidationError as error:
        raise UserError(_first_problem(error, flags, file, from_file)) from None


def read_toml(file: Path) -> dict[str, Any]:
    """Options of a TOML file, keys with dashes or underscores. Raises UserError."""
    try:
        table = tomllib.loads(file.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise UserError(f"--config {file}: {error.strerror or error}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"--config {file}: not TOML: {error}") from None
    options: dict[str, Any] = {}
    for key, value in table.items():
        option = key.replace("-", "_")
        if option in options:
            raise UserError(f"--config {file}: {option!r} is there twice, with - and with _")
        options[option] = value
    for key in options:
        if key not in RunConfig.model_fields:
            near = difflib.get_close_matches(key, RunConfig.model_fields, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise UserError(f"--config {file}: no option is called {key!r}{hint}")
    if isinstance(options.get("data"), str):
        options["data"] = [options["data"]]
    return options


def flag(option: str) -> str:
    """The option as it is written on the command line."""
    return "--" + option.replace("_", "-")


def _first_problem(
    error: ValidationError,
    flags: Mapping[str, Any],
    file: Path | None,
    from_file: Mapping[str, Any],
) -> str:
    problem = error.errors()[0]
    option = str(problem["loc"][0])
    if problem["type"] == "missing":
        return f"{flag(option)} is missing: {RunConfig.model_fields[option].description}"
    place = flag(option)
    if option not in flags and option in from_file:
        place = f"{file}: {option}"
    message = problem["msg"].removeprefix("Value error, ")
    return f"{place}: {message[0].lower()}{message[1:]}, not {problem['input']!r}"
