"""The stored rows of a run, looked at once more: all of them without a model, some with one."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import load_file
from torch import Tensor

from spec_compat.capture.prefill import WINDOW
from spec_compat.errors import UserError
from spec_compat.pipeline.inputs.verifier import Verifier
from spec_compat.pipeline.rows import storage
from spec_compat.pipeline.rows.index import Index
from spec_compat.pipeline.rows.prepared import Prepared, bad_rows, fault
from spec_compat.pipeline.rows.row import Row, RowRef, StoredRow
from spec_compat.pipeline.run import manifest
from spec_compat.pipeline.run.config import ResolvedConfig
from spec_compat.pipeline.run.layout import Layout
from spec_compat.pipeline.run.plan import name_datasets
from spec_compat.pipeline.stages import EXTRACT, STAGES
from spec_compat.pipeline.system import atomic
from spec_compat.pipeline.system.units import size

# Relative L2 errors of a token's state: of a row's median token, and of its worst. In bf16 two
# right implementations differ by 0.5 to 1.5 %; the state of another token, layer or row by 50 % and
# more. In a mixture of experts a near-tie sends a token to another expert: the median counts alone.
# What is stored in fp8 is off by 2.6 % more.
MEDIAN, WORST, FP8_MEDIAN = 0.03, 0.2, 0.05
EMBEDDINGS = "model.embed_tokens.weight"
PLAIN = (torch.bfloat16, torch.float16, torch.float32)
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
WITHOUT = "--samples 0 checks without the verifier"
# Beside the weights, transformers needs room for a row's states and logits.
HEADROOM = 1.2

Progress = Callable[[str, int, int], None]


@dataclass
class Verification:
    """What was looked at, and one line for each thing found wrong.

    `errors` has, for each layer id, the largest median and the largest worst error of the rows
    that were recomputed.
    """

    rows: int = 0
    tokens: int = 0
    recomputed: int = 0
    errors: dict[int, tuple[float, float]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def verify(root: Path, samples: int = 4, progress: Progress = lambda *_: None) -> Verification:
    """Check every stored row of a run, and recompute `samples` of them with transformers.

    `progress` is told what is being done, the rows done and their number. Raises UserError when
    there is no such run, or when the verifier to recompute with does not fit into memory.
    """
    layout, config = _run(root)
    verifier = Verifier(config.model, config.trust_remote_code)
    if samples:
        _check_memory(verifier)
    found, sound = Verification(), list[tuple[str, StoredRow]]()
    datasets = {d.name: Prepared(layout.prepared(d.name)) for d in name_datasets(config.data)}
    total = sum(map(len, datasets.values()))
    dtype: torch.dtype | None = None
    for name, prepared in datasets.items():
        index = Index(layout.rows(name))
        left_out = bad_rows(layout.rows(name))
        for number, row in enumerate(prepared):
            if number in left_out:
                continue
            where = layout.relative(index.directory / _holder(index, number))
            try:
                loaded = _load(index, number)
                dtype = dtype or loaded.hidden_states[0].dtype
                problem = fault(loaded, row, len(config.layer_ids), dtype)
            except _UnreadableError as error:
                problem = str(error)
            if problem:
                found.problems.append(f"{where}: {problem}")
            else:
                file = index.directory / index.holder(number)
                sound.append((where, StoredRow(RowRef(name, number), file, len(row.ids))))
            found.rows += 1
            found.tokens += len(row.ids)
            progress("checking", found.rows, total)
    found.problems += _altered(layout)
    samples = min(samples, len(sound))
    if samples:
        chosen = random.Random(config.seed).sample(sound, samples)  # noqa: S311
        _recompute(chosen, verifier, config, found, progress)
    return found


def _altered(layout: Layout) -> list[str]:
    """Files of all stages that are not what the manifest recorded."""
    there = manifest.find(layout.root, STAGES)
    problems = []
    for record in there.stages.values() if there else ():
        for name, digest in record.result.outputs.items() if record.result else ():
            file = layout.root / name
            if not file.is_file():
                problems.append(f"{name}: the file is missing")
            elif record.finished and atomic.sha256(file) != digest:
                problems.append(f"{name}: its checksum is not the one recorded")
    return problems


class _UnreadableError(Exception):
    """A row's file is not what was written."""


def _run(root: Path) -> tuple[Layout, ResolvedConfig]:
    if not root.is_dir():
        raise UserError(f"{root}: no such directory")
    if not Layout(root).manifest.is_file():
        raise UserError(f"{root}: not the directory of a run: it has no manifest.json")
    there = manifest.find(root, STAGES)
    if there is None or there.record(EXTRACT) is None:
        raise UserError(f"{root}: no rows have been extracted in this directory")
    return Layout(root.resolve()), ResolvedConfig.model_validate(there.options)


def _holder(index: Index, number: int) -> str:
    """Where a row lies in its dataset, for people."""
    if number not in index:
        return f"row {number}"
    name = index.holder(number)
    return name if len(index.files[name].rows) == 1 else f"{name}, row {number}"


def _load(index: Index, number: int) -> Row:
    if number not in index:
        raise _UnreadableError("it is not in the index of the dataset")
    file = index.directory / index.holder(number)
    if not file.is_file():
        raise _UnreadableError("the file is missing")
    if _digest(file, file.stat().st_mtime_ns) != index.files[file.name].sha256:
        raise _UnreadableError("its checksum is not the one recorded")
    try:
        return storage.load(file, number).decoded()
    except Exception as error:
        raise _UnreadableError(f"it cannot be loaded: {str(error).splitlines()[0]}") from None


@lru_cache(WINDOW)
def _digest(file: Path, written: int) -> str:
    """A shard is read once for all of its rows: no more shards than WINDOW have rows between."""
    return atomic.sha256(file)


def _check_memory(verifier: Verifier) -> None:
    needed = HEADROOM * verifier.weight_bytes
    where, free = "memory", psutil.virtual_memory().available
    if torch.cuda.is_available():
        where, free = "GPU memory", torch.cuda.mem_get_info()[0]
    if needed > free:
        raise verifier.error(
            f"to recompute rows needs {size(needed)} of {where}, {size(free)} are free; {WITHOUT}"
        )


def _recompute(
    rows: list[tuple[str, StoredRow]],
    verifier: Verifier,
    config: ResolvedConfig,
    found: Verification,
    progress: Progress,
) -> None:
    progress("loading the verifier", 0, len(rows))
    oracle = Oracle(verifier)
    allowed = FP8_MEDIAN if config.storage_dtype == "fp8" else MEDIAN
    for done, (where, (ref, file, _)) in enumerate(rows):
        row = storage.load(file, ref.number).decoded()
        states = oracle.states(row.input_ids, config.layer_ids)
        for layer_id, stored, right in zip(
            config.layer_ids, row.hidden_states, states, strict=True
        ):
            if layer_id == oracle.last:
                stored = oracle.normed(stored)
            median, worst = errors(stored, right)
            before = found.errors.get(layer_id, (0.0, 0.0))
            found.errors[layer_id] = max(before[0], median), max(before[1], worst)
            if not (median <= allowed and (oracle.has_experts or worst <= WORST)):
                found.problems.append(
                    f"{where}: the states of layer {layer_id} are not the "
                    f"verifier's; off by {median:.1%} in the median token, {worst:.1%} in the worst"
                )
        found.recomputed += 1
        progress("recomputing", done + 1, len(rows))


def errors(stored: Tensor, right: Tensor) -> tuple[float, float]:
    """Relative L2 error of the median and of the worst token; both tensors are [tokens, hidden]."""
    stored, right = stored.float(), right.float().to(stored.device)
    error = (stored - right).norm(dim=-1) / right.norm(dim=-1)
    return float(error.median()), float(error.max())


class Oracle:
    """The verifier in transformers, in the dtype of its checkpoint."""

    def __init__(self, verifier: Verifier) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model: Any = _loaded(verifier).to(self.device)
        text = self.model.config.get_text_config()
        self.last = text.num_hidden_layers - 1
        self.has_experts = any(getattr(text, name, None) for name in EXPERTS)

    def states(self, input_ids: Tensor, layer_ids: tuple[int, ...]) -> list[Tensor]:
        """The states [tokens, hidden] after each layer; those after the last are normed."""
        ids = input_ids.to(self.device)[None]
        with torch.inference_mode():
            output = self.model(
                ids, attention_mask=torch.ones_like(ids), output_hidden_states=True, use_cache=False
            )
        return [output.hidden_states[layer_id + 1][0] for layer_id in layer_ids]

    def normed(self, states: Tensor) -> Tensor:
        """What `states` gives for the last layer, from states as they are stored."""
        with torch.inference_mode():
            normed: Tensor = self.model.get_decoder().norm(states.to(self.device))
        return normed.cpu()


def _loaded(verifier: Verifier) -> Any:
    """The verifier. Raises UserError where transformers, or code of its own, does not load it."""
    try:
        return _with_code(verifier) if verifier.brings_code else _known(verifier.name_or_path)
    except UserError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno:  # of the disk
            raise
        cause = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise verifier.error(
            f"transformers cannot recompute its rows ({cause}); {WITHOUT}"
        ) from error


def _known(model: str) -> Any:
    """The verifier in transformers' own class, whole where that is a wrapper's."""
    from transformers import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
    )

    auto: Any = AutoModelForCausalLM
    if type(AutoConfig.from_pretrained(model)) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        auto = AutoModelForImageTextToText
    return auto.from_pretrained(model, dtype="auto")


def _with_code(verifier: Verifier) -> Any:
    """The language model of a verifier that brings code, in transformers' own class if it has one.

    That code may want packages that are not there, and of a wrapper only one part is needed.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

    text = copy.deepcopy(verifier.hf_text_config)
    known = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(text), None)
    if known is None:
        return AutoModelForCausalLM.from_pretrained(
            verifier.name_or_path, dtype="auto", trust_remote_code=verifier.trust_remote_code
        )
    # A wrapper puts something before the names of its language model's weights.
    wrapper = verifier.tensor(EMBEDDINGS).removesuffix(EMBEDDINGS)
    weights: dict[str, Tensor] = {}
    for file in verifier.weight_files:
        tensors = load_file(file).items()
        weights |= {n.removeprefix(wrapper): w for n, w in tensors if n.startswith(wrapper)}
    for name, weight in sorted(weights.items()):
        if weight.dtype not in PLAIN:
            raise verifier.error(
                f"{wrapper}{name} is quantised, which transformers would not see; {WITHOUT}"
            )
    loaded, told = known.from_pretrained(
        None, config=text, state_dict=weights, dtype="auto", output_loading_info=True
    )
    if missing := sorted(told["missing_keys"]):  # which transformers makes up, in silence
        raise verifier.error(f"transformers finds no {missing[0]} among its weights; {WITHOUT}")
    return loaded
