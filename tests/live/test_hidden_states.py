"""The states that the patched generator returns are those of the rows it was given."""

import random
from pathlib import Path

import pytest
import torch

from tests.conftest import Script
from tests.live.oracle import relative_errors

pytestmark = [pytest.mark.live, pytest.mark.slow]

MAX_MODEL_LEN = 512
LENGTHS = [1, 2, 15, 16, 17, 100, MAX_MODEL_LEN - 1]
TOLERANCE = 0.02  # relative L2; bf16 leaves about 0.01, neighbouring layers differ by 0.4


def random_rows(lengths: list[int], vocabulary: int) -> list[list[int]]:
    draw = random.Random(0)
    return [[draw.randrange(3, vocabulary) for _ in range(length)] for length in lengths]


def assert_states(
    generate: Script,
    model: Path,
    rows: list[list[int]],
    layer_ids: list[int],
    after_final_norm: float = TOLERANCE,
    **options: object,
) -> None:
    """`after_final_norm` is the tolerance of the last layer, which Hugging Face has normed."""
    process = generate(model, rows, layer_ids=layer_ids, max_model_len=MAX_MODEL_LEN, **options)
    assert process.returncode == 0, process.stderr[-3000:]
    states = torch.load(process.states, weights_only=True)
    errors = list(relative_errors(model, rows, layer_ids, states))
    assert len(errors) == len(rows) * len(layer_ids)
    for row, layer_id, error in errors:
        allowed = after_final_norm if layer_id == max(layer_ids) else TOLERANCE
        assert error < allowed, f"row {row}, layer {layer_id}: relative error {error:.4f}"


@pytest.mark.parametrize("verifier", ["tiny_llama", "tiny_qwen3"])
def test_states_equal_hugging_face(
    verifier: str, generate: Script, request: pytest.FixtureRequest
) -> None:
    model = request.getfixturevalue(verifier)
    assert_states(generate, model, random_rows(LENGTHS, 512), [2, 4, 5, 7])


def test_states_of_a_real_model_equal_hugging_face(generate: Script, smollm2: Path) -> None:
    """Its last layers cancel large values: bf16 is 7 % from float32 there, two bf16 runs 3 %."""
    rows = random_rows(LENGTHS, 49152)
    assert_states(generate, smollm2, rows, [2, 15, 27, 29], after_final_norm=0.05)


def test_two_tensor_parallel_workers_return_the_same(generate: Script, tiny_llama: Path) -> None:
    assert_states(
        generate,
        tiny_llama,
        random_rows(LENGTHS, 512),
        [2, 4, 5, 7],
        tensor_parallel_size=2,
        env={"VLLM_CPU_OMP_THREADS_BIND": "nobind"},
    )


def test_300_rows_in_one_call_come_back_in_order(generate: Script, tiny_llama: Path) -> None:
    """Over the 32 sequences and the 8,192 tokens of a step; the second call follows the first."""
    lengths = [1 + (37 * row) % (MAX_MODEL_LEN - 1) for row in range(300)]
    assert_states(generate, tiny_llama, random_rows(lengths, 512), [2, 4, 5, 7], calls=2)


def test_layers_come_back_in_the_order_they_were_asked_for(
    generate: Script, tiny_llama: Path
) -> None:
    assert_states(generate, tiny_llama, random_rows([40, 3], 512), [5, 2, 4, 7])
