"""The verifier out of the wheel: converted for real, and asked for real."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from examples.demo import model

pytestmark = [pytest.mark.live, pytest.mark.slow]

ASK = """
import json, sys
from pathlib import Path
from examples.demo.answers import answer
text, = answer(Path(sys.argv[1]), (sys.argv[2],))
Path(sys.argv[3]).write_text(json.dumps(text))
"""


@pytest.fixture(scope="module")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPEC_COMPAT_CACHE", str(tmp_path_factory.mktemp("cache")))
        return model.verifier()


def test_the_conversion_is_whole_and_alone_in_the_cache(verifier: Path) -> None:
    assert model.is_whole(verifier)
    assert [path.name for path in verifier.parent.iterdir()] == [model.NAME]


@pytest.mark.parametrize(
    ("in_gguf", "in_checkpoint"),
    [
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("blk.29.ffn_down.weight", "model.layers.29.mlp.down_proj.weight"),
    ],
)
def test_the_weights_are_those_of_the_gguf(
    verifier: Path, in_gguf: str, in_checkpoint: str
) -> None:
    import torch
    from gguf import GGUFReader, dequantize
    from safetensors.torch import load_file

    (tensor,) = [t for t in GGUFReader(model.gguf_path()).tensors if t.name == in_gguf]
    expected = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type)).to(torch.bfloat16)
    assert torch.equal(load_file(verifier / "model.safetensors")[in_checkpoint], expected)


def test_config_and_tokenizer_say_what_the_model_was_trained_with(verifier: Path) -> None:
    from transformers import AutoConfig, AutoTokenizer

    config = AutoConfig.from_pretrained(verifier)
    assert (config.rope_theta, config.tie_word_embeddings) == (100_000.0, True)
    assert (config.num_hidden_layers, config.hidden_size, config.vocab_size) == (30, 576, 49_152)
    tokenizer = AutoTokenizer.from_pretrained(verifier)
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert tokenizer.tokenize("12 cats") == ["1", "2", "Ġcats"]


def test_the_capital_of_france(verifier: Path, tmp_path: Path) -> None:
    said = tmp_path / "answer.json"
    command = [
        sys.executable,
        "-c",
        ASK,
        str(verifier),
        "What is the capital of France?",
        str(said),
    ]
    subprocess.run(command, check=True)
    assert json.loads(said.read_text()) == "The capital of France is Paris."
