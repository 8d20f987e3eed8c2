"""What a row's last state says against the token that vLLM sampled after it.

In bf16 two right computations of a logit differ by 0 or 1 units in the last place, so that tokens
may differ where two logits nearly tie; if rows were swapped, the gap is dozens of units.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

MAX_GAP = 4


def gaps(logits: Tensor, sampled: Tensor) -> Tensor:
    """float32 [rows, 2]: the gap in units in the last place of bf16, and the token of the logits.

    `logits` [rows, vocabulary] are those of the last states, `sampled` int64 [rows] what vLLM
    chose. Nothing here waits for the device.
    """
    import torch

    logits = logits.float()
    best, token = logits.max(dim=-1)
    unit = torch.exp2(best.abs().clamp_min(1e-30).log2().floor() - 7)  # bf16: 8 bits
    gap = (best - logits.gather(1, sampled[:, None])[:, 0]) / unit
    return torch.stack([gap, token.float()], dim=1)


def contradiction(gap: float, token: float, sampled: int) -> str:
    """Why a row with this gap is refused, empty when it is not."""
    if gap <= MAX_GAP:
        return ""
    return (
        f"its last state gives token {token:.0f}, vLLM sampled {sampled}; the "
        f"logits differ by {gap:.0f} units in the last place"
    )
