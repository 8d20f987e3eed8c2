"""The function that newer releases of transformers lack is the one that older ones have."""

import pytest
import torch

from spec_compat.patches.extract.attention_mask import causal_mask

pytestmark = pytest.mark.live


@pytest.mark.parametrize("past", [0, 3])
@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("window", [None, 2])
def test_it_is_that_of_transformers_4(past: int, padded: bool, window: int | None) -> None:
    theirs = pytest.importorskip("transformers.modeling_attn_mask_utils")
    states = torch.zeros(2, 5, 8, dtype=torch.bfloat16)
    kept = torch.ones(2, past + 5)
    kept[1, :2] = 0
    arguments = (kept if padded else None, (2, 5), states, past)
    expected = theirs._prepare_4d_causal_attention_mask(*arguments, sliding_window=window)
    assert torch.equal(causal_mask(*arguments, sliding_window=window), expected)
