#!/usr/bin/env python3
"""Extraction to the disk against vLLM's own prefill, and against the other ways, on the same rows.

    python -m scripts.bench_extract --geometry smollm2 --rows 8 --length 500
    PYTHONPATH=SITE python -m scripts.bench_extract --geometry qwen3-8b --rows 64 --length 2047

Cases, each in a process of its own; the first five can be joined by a plus, as raw+extract, and
are then measured in turns, so that what else the machine does meets all of them alike:
  raw           vLLM's LLM.generate with max_tokens=1: the prefill that all others need as well
  extract       this project: proven rows in data_{i}.pt
  shards        the same with --storage shards
  fp8, zstd     and with --storage-dtype fp8, or with --storage-compression zstd
  memory        shards with 1, 10 and 100 times as many short rows: peak memory against rows
  generate      speculators' generate() with this project's patches, one torch.save a row
  speculators   speculators alone (what this vLLM lacks of it is put in place), the same
  transformers  output_hidden_states, the layers copied to the host, nothing written
  native        vLLM's extract_hidden_states with ExampleHiddenStatesConnector

It needs no installation: a checkout, vLLM and speculators are enough.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scripts import measure

CASES = (
    "raw", "extract", "shards", "fp8", "zstd", "memory",
    "generate", "speculators", "transformers", "native",
)  # fmt: skip
OURS = ("extract", "shards", "fp8", "zstd")
OTHERS = ("raw", "generate", "speculators", "transformers", "native")
# What else an 8B of Qwen3 says of itself; the weights are random, only their shapes count.
GEOMETRIES: dict[str, dict[str, Any]] = {
    "qwen3-8b": {
        "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 12288,
        "vocab_size": 151936, "max_position_embeddings": 40960,
    },
    "tiny": {
        "hidden_size": 128, "num_hidden_layers": 8, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 256,
        "vocab_size": 1024, "max_position_embeddings": 4096,
    },
}  # fmt: skip
BATCH = 8  # rows in a call of speculators' generate(), its scripts' default
TOKENS = 8192  # of a step: what speculators' generator allows
MEMORY_ROWS = (1, 10, 100)
MEMORY_LENGTH = 16
Run = Callable[[list[list[int]]], int]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--geometry", choices=["smollm2", *GEOMETRIES], default="smollm2")
    parser.add_argument("--model", type=Path, help="a local verifier, in place of --geometry")
    parser.add_argument("--rows", type=measure.count, default=8)
    parser.add_argument("--length", type=measure.count, default=500, help="tokens of a row")
    parser.add_argument(
        "--other-rows", type=measure.count, help="rows of the other ways, where not --rows"
    )
    parser.add_argument("--mixed", action="store_true", help="rows of 1/16 of --length up to it")
    parser.add_argument("--repeats", type=measure.count, default=2)
    parser.add_argument("--tensor-parallel-size", type=measure.count, default=1)
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.8)
    parser.add_argument("--sink-buffers", type=measure.count)
    measure.scratch(parser)
    given = measure.options(parser, CASES, joined=("raw", *OURS))
    if given.case in OTHERS[1:]:
        given.rows = given.other_rows or given.rows
    if given.case:
        run_case(given)
    records = measure.run_cases(given)
    report(given, records)
    return any("failed" in record for record in records)


def report(given: argparse.Namespace, records: list[measure.Record]) -> None:
    speed = ("case", "rows", "tokens", "seconds", "tokens_per_second", "gb_per_second")
    measure.table(records, (*speed, "bytes_per_token", "cpu_seconds"))
    measure.table(records, ("case", "rows", "host_mib", "gpu_mib", "what"))
    best: dict[str, float] = {}
    for record in records:
        if record.get("what") == "speed":
            case = record["case"]
            best[case] = max(best.get(case, 0.0), record["tokens_per_second"])
    ratios = {}
    for ours in OURS:
        for other in OTHERS:
            if ours in best and other in best:
                ratios[f"{ours}/{other}"] = best[ours] / best[other]
    measure.finish("extract", given, records, ratios)


def run_case(given: argparse.Namespace) -> None:
    model, dummy = verifier(given)
    alone = {
        "memory": memory,
        "generate": generate,
        "speculators": speculators,
        "transformers": transformers,
        "native": native,
    }
    if given.case in alone:
        alone[given.case](given, model, dummy)
    else:
        timed(given, model, joined(given, model, dummy))
    sys.stdout.flush()
    os._exit(0)  # engines do not always let go; the parent ends what is left


# ------------------------------------------------------------------------------------- the rows


def rows(given: argparse.Namespace, vocabulary: int, seed: int) -> list[list[int]]:
    """Random token ids: what they are changes nothing in a prefill's cost."""
    draw = random.Random(seed)  # noqa: S311
    shortest = given.length // 16 if given.mixed else given.length
    lengths = [draw.randint(max(1, shortest), given.length) for _ in range(given.rows)]
    return [[draw.randrange(3, vocabulary) for _ in range(length)] for length in lengths]


def timed(given: argparse.Namespace, model: Path, runs: dict[str, Run]) -> None:
    """Time each `run(rows)` in turns; it returns the bytes that it wrote to _output()."""
    vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
    few = max(1, min(given.rows // 8, 2 * TOKENS // given.length))
    for repeat in range(given.repeats):
        for case, run in runs.items():
            batch = rows(given, vocabulary, 1 + repeat)
            tokens = sum(map(len, batch))
            _empty(_output(given))
            run([ids[::-1] for ids in batch[:few]])  # warm
            _empty(_output(given))
            begun, cpu = time.perf_counter(), measure.cpu_seconds()
            size = run(batch)
            seconds = time.perf_counter() - begun
            measure.record(
                case=case,
                what="speed",
                rows=len(batch),
                tokens=tokens,
                seconds=seconds,
                cpu_seconds=measure.cpu_seconds() - cpu,
                tokens_per_second=tokens / seconds,
                gb_per_second=size / seconds / 1e9,
                bytes_per_token=size / tokens,
            )


def layer_ids(model: Path) -> list[int]:
    layers = json.loads((model / "config.json").read_text())["num_hidden_layers"]
    return [2, layers // 2, layers - 3, layers - 1]


def verifier(given: argparse.Namespace) -> tuple[Path, bool]:
    """The model's directory, and whether its weights are made up when it is loaded."""
    if given.model:
        return given.model, False
    if given.geometry == "smollm2":
        from examples.demo import model

        return model.verifier(), False
    path = given.scratch / given.geometry
    if not (path / "tokenizer_config.json").is_file():
        write_model(path, GEOMETRIES[given.geometry])
    return path, True


def write_model(path: Path, geometry: dict[str, Any]) -> None:
    from tokenizers import Tokenizer, models

    path.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "dtype": "bfloat16",
        "torch_dtype": "bfloat16", "hidden_act": "silu", "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0, "initializer_range": 0.02, "attention_bias": False,
        "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1,
        **geometry,
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(config))
    words = {"<s>": 0, "</s>": 1, "<unk>": 2, **{f"w{i}": i for i in range(3, 300)}}
    Tokenizer(models.WordLevel(words, unk_token="<unk>")).save(str(path / "tokenizer.json"))  # noqa: S106
    (path / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": "<s>",
                "eos_token": "</s>",
                "unk_token": "<unk>",
                "pad_token": "</s>",
                "model_max_length": geometry["max_position_embeddings"],
            }
        )
    )


# ------------------------------------------------------------------------------------ the cases


def joined(given: argparse.Namespace, model: Path, dummy: bool) -> dict[str, Run]:
    names = given.case.split("+")
    runs = {"raw": raw(given, model, dummy)} if "raw" in names else {}
    if ours := [name for name in names if name != "raw"]:
        generator = _patched_generator(given, model, dummy, given.length)
        runs |= {case: _extractor(given, generator, case) for case in ours}
    return runs


def raw(given: argparse.Namespace, model: Path, dummy: bool) -> Run:
    from vllm import SamplingParams

    engine = _engine(given, model, dummy)
    sampling = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)

    def run(batch: list[list[int]]) -> int:
        prompts = [{"prompt_token_ids": ids} for ids in batch]
        done = engine.generate(prompts, sampling, use_tqdm=False)
        if [len(output.outputs[0].token_ids) for output in done] != [1] * len(batch):
            raise RuntimeError("not every prompt has its token")
        return 0

    return run


def memory(given: argparse.Namespace, model: Path, dummy: bool) -> None:
    """Short rows, whose number grows; each file is removed as soon as it is reported."""
    generator = _patched_generator(given, model, dummy, MEMORY_LENGTH)
    run = _extractor(given, generator, given.case)
    draw = random.Random(0)  # noqa: S311
    run([[5] * MEMORY_LENGTH] * (2 * TOKENS // MEMORY_LENGTH))
    measure.record(what="after the warm-up", rows=2 * TOKENS // MEMORY_LENGTH)
    for times in MEMORY_ROWS:
        count = times * given.rows
        run([[draw.randrange(3, 300) for _ in range(MEMORY_LENGTH)] for _ in range(count)])
        measure.record(what=f"{count} rows of {MEMORY_LENGTH} tokens", rows=count)


def generate(given: argparse.Namespace, model: Path, dummy: bool) -> None:
    import spec_compat  # noqa: F401

    _speculators_alone(given, model, dummy)


def speculators(given: argparse.Namespace, model: Path, dummy: bool) -> None:
    """Its Request lost an argument in vLLM 0.17.1; without an accelerator it finds no memory."""
    os.environ["VLLM_PLUGINS"] = ""
    _speculators_alone(given, model, dummy)


def transformers(given: argparse.Namespace, model: Path, dummy: bool) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if dummy:
        torch.set_default_dtype(torch.bfloat16)
        with device:
            model_on_device: Any = AutoModelForCausalLM.from_config(
                AutoConfig.from_pretrained(model), attn_implementation="sdpa"
            )
        torch.set_default_dtype(torch.float32)
    else:
        model_on_device = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    model_on_device = model_on_device.to(device).eval()
    ids = layer_ids(model)

    def run(batch: list[list[int]]) -> int:
        longest_first = sorted(batch, key=len, reverse=True)
        for begin in range(0, len(batch), BATCH):
            part = longest_first[begin : begin + BATCH]
            width = len(part[0])
            tokens = torch.tensor([row + [0] * (width - len(row)) for row in part], device=device)
            with torch.inference_mode():
                output = model_on_device(
                    tokens, output_hidden_states=True, use_cache=False, logits_to_keep=1
                )
                states = [output.hidden_states[layer_id + 1].cpu() for layer_id in ids]
            del output, states
        return 0

    timed(given, model, {given.case: run})


def native(given: argparse.Namespace, model: Path, dummy: bool) -> None:
    from vllm import SamplingParams

    directory = _empty(_output(given))
    served = [layer_id + 1 for layer_id in layer_ids(model)]
    engine = _engine(
        given,
        model,
        dummy,
        speculative_config={
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": served}},
        },
        kv_transfer_config={
            "kv_connector": "ExampleHiddenStatesConnector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"shared_storage_path": str(directory)},
        },
    )
    sampling = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)

    def run(batch: list[list[int]]) -> int:
        engine.generate([{"prompt_token_ids": i} for i in batch], sampling, use_tqdm=False)
        return _size(directory)

    timed(given, model, {given.case: run})


# ------------------------------------------------------------------------------ what they run on


def _engine(given: argparse.Namespace, model: Path, dummy: bool, **more: Any) -> Any:
    from vllm import LLM

    return LLM(
        model=str(model),
        load_format="dummy" if dummy else "auto",
        dtype="bfloat16",
        enforce_eager=True,
        enable_prefix_caching=False,
        block_size=16,  # speculators' own
        max_model_len=given.length + 16,
        max_num_batched_tokens=max(TOKENS, given.length + 16),
        max_num_seqs=256,
        tensor_parallel_size=given.tensor_parallel_size,
        gpu_memory_utilization=given.gpu_memory_utilization,
        **more,
    )


def _patched_generator(*arguments: Any) -> Any:
    import spec_compat

    generator = _generator(*arguments)
    spec_compat.require(stage="extract", scope="driver")
    return generator


def _generator(given: argparse.Namespace, model: Path, dummy: bool, length: int) -> Any:
    from speculators.data_generation import vllm_hidden_states_generator as module

    if dummy:
        load_config = module.LoadConfig
        module.LoadConfig = lambda: load_config(load_format="dummy")
    return module.VllmHiddenStatesGenerator(
        str(model),
        layer_ids=layer_ids(model),
        max_model_len=length + 1,
        gpu_memory_utilization=given.gpu_memory_utilization,
        tensor_parallel_size=given.tensor_parallel_size,
    )


def _extractor(given: argparse.Namespace, generator: Any, case: str) -> Run:
    from spec_compat.capture.orders import PreparedRow
    from spec_compat.capture.prefill import Prefill, Step, pack
    from spec_compat.pipeline.rows import storage

    kinds = {
        "shards": storage.Shards(),
        "fp8": storage.Shards(fp8=True),
        "zstd": storage.Shards(compressed=True),
        "memory": storage.Shards(),
    }
    kind = kinds.get(case, storage.RowFiles())
    directory = _empty(_output(given))

    def run(batch: list[list[int]]) -> int:
        if getattr(generator, "opened", None) != case:  # else its sink is another case's
            generator.opened, generator.prefill = case, Prefill(generator, kind, given.sink_buffers)
        prefill = generator.prefill
        steps = pack([len(ids) for ids in batch], prefill.tokens, 256)
        rows = [PreparedRow(ids, [1] * len(ids)) for ids in batch]
        size = written = 0
        for answer in prefill.run(
            Step(str(directory), {row: rows[row] for row in step}, step) for step in steps
        ):
            if answer.failure or answer.refused:
                raise RuntimeError(f"{answer.failure} {answer.refused[:1]}")
            size += sum(file.size for file in answer.written)
            written += sum(len(file.rows) for file in answer.written)
            if case == "memory":
                for file in answer.written:
                    (directory / file.name).unlink()
        if written != len(batch):
            raise RuntimeError(f"{written} of {len(batch)} rows were written")
        return size

    return run


def _speculators_alone(given: argparse.Namespace, model: Path, dummy: bool) -> None:
    import torch
    from speculators.data_generation import vllm_hidden_states_generator as module

    if given.case == "speculators":
        request = module.Request
        module.Request = lambda *args, eos_token_id=None, **kwargs: request(*args, **kwargs)
        if not torch.cuda.is_available():
            module.mem_get_info = lambda: (1 << 32, 1 << 32)
    generator = _generator(given, model, dummy, given.length)
    directory = _output(given)

    def run(batch: list[list[int]]) -> int:
        for begin in range(0, len(batch), BATCH):
            for number, row in enumerate(generator.generate(batch[begin : begin + BATCH])):
                row["loss_mask"] = torch.ones(len(row["input_ids"]), dtype=torch.long)
                torch.save(row, directory / f"data_{begin + number}.pt")
        return _size(directory)

    timed(given, model, {given.case: run})


def _output(given: argparse.Namespace) -> Path:
    directory: Path = given.scratch / "rows"
    return directory


def _empty(directory: Path) -> Path:
    """The directory, with nothing in it."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    return directory


def _size(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())


if __name__ == "__main__":
    sys.exit(main())
