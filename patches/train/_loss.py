"""The distillation loss of an EAGLE-3 head, at the positions that have one, in pieces.

For hidden states x of the head, its lm_head W and target probabilities p of the verifier, the loss
of a position is KL(p || softmax(x W')). Its gradient for the logits is softmax(x W') - p, so both
gradients are computed beside the loss, piece by piece, and no logits outlive their piece.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

# Logits that are alive at a time: a quarter of a GiB of float32 on a GPU, a CPU's cache otherwise.
PIECE = {"cuda": 1 << 26, "cpu": 1 << 22}
# Places are padded to a multiple of this, with places that weigh nothing: no batch has none.
MULTIPLE = 64


class Places(NamedTuple):
    """Places of targets in a packed batch, int64 [m], ascending; -1 where it is padded."""

    targets: Any
    fed: Any


def places(torch: ModuleType, mask: Any, steps: int, device: Any) -> Places:
    """Where targets are needed, and where drafts are needed as inputs of later steps.

    `mask`, [n], is not zero where the verifier's choice is learnt. At step k the draft of place s
    has the target of place s + k. A place s with a loss of its own is drafted for at all steps, for
    the accuracy counts it further on: so the places after it, s + k, have targets too.
    """
    own = mask != 0
    needed = own.clone()
    for step in range(1, steps):
        needed[step:] |= own[:-step]
    fed = torch.zeros_like(needed)
    for step in range(1, steps):
        fed[:-step] |= needed[step:]
    return Places(*(_indices(torch, chosen, device) for chosen in (needed, fed)))


def _indices(torch: ModuleType, chosen: Any, device: Any) -> Any:
    """The places that are chosen, on the device; it is not waited for if they are on the CPU."""
    found = chosen.nonzero()[:, 0]
    missing = -len(found) % MULTIPLE or (0 if len(found) else MULTIPLE)
    found = torch.nn.functional.pad(found, (0, missing), value=-1)
    if device.type != "cuda" or found.is_cuda:
        return found
    return found.pin_memory().to(device, non_blocking=True)


def at(values: Any, places: Any) -> Any:
    """Rows of values [n, ...]; of any row where the place is none."""
    return values.index_select(0, places.clamp_min(0))


def logits(torch: ModuleType, states: Any, weight: Any) -> Any:
    """states [c, hidden] times weight [vocabulary, hidden], not rounded to bfloat16 again."""
    if states.dtype not in (torch.bfloat16, torch.float16):
        return states @ weight.T
    if states.is_cuda:
        return torch.mm(states, weight.T, out_dtype=torch.float32)
    return (states @ weight.T).float()


def split(length: int, vocabulary: int, device: str) -> list[slice]:
    """Slices of equal length, but for the last, of at most PIECE logits each."""
    pieces = -(-length * vocabulary // PIECE.get(device, PIECE["cuda"]))
    size = -(-length // pieces)
    return [slice(begin, min(begin + size, length)) for begin in range(0, length, size)]


def likelihoods(torch: ModuleType, targets: Any) -> tuple[Any, Any, Any]:
    """softmax of target logits [c, v], its negative entropy [c], and the likeliest entry [c]."""
    logarithms = targets.log_softmax(dim=-1)
    shares = logarithms.exp()
    return shares, (shares * logarithms).sum(dim=-1), targets.argmax(dim=-1)


def compare(
    torch: ModuleType, given: Any, shares: Any, negentropy: Any, weights: Any, dtype: Any
) -> tuple[Any, Any, Any]:
    """Of logits [c, v]: KL divergences [c], their weighted gradients [c, v], choices [c]."""
    normalizer = given.logsumexp(dim=-1)
    divergence = negentropy + normalizer - (shares * given).sum(dim=-1)
    gradient = ((given - normalizer[:, None]).exp() - shares) * weights[:, None]
    return divergence, gradient.to(dtype), given.argmax(dim=-1)


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    import torch

    made: Callable[..., Any] = torch.compile(function)
    return made


def run(torch: ModuleType, function: Callable[..., Any], *args: Any) -> Any:
    """`function`, compiled once for pieces of any length where there is a GPU."""
    if not args[0].is_cuda:
        return function(torch, *args)
    for arg in args:
        if isinstance(arg, torch.Tensor):
            torch._dynamo.maybe_mark_dynamic(arg, 0)
    return compiled(function)(torch, *args)


class Distilled(NamedTuple):
    """Sums of weighted losses [steps], choices of the head [steps, m], of the verifier [m]."""

    losses: Any
    drafts: Any
    choices: Any


@cache
def distillation() -> Any:
    """The autograd function; torch is imported when the first loss is computed."""
    import torch

    class Distillation(torch.autograd.Function):
        """(weight [v, h], weights [steps, m], targets, learning, *states [m, h]) -> Distilled.

        `targets` gives the target logits, [c, v], of a slice of the m places. `learning`: whether
        gradients are needed.
        """

        @staticmethod
        def forward(
            ctx: Any,
            weight: Any,
            weights: Any,
            targets: Callable[[slice], Any],
            learning: bool,
            *states: Any,
        ) -> tuple[Any, Any, Any]:
            narrow = weight.detach().to(states[0].dtype)
            length, vocabulary = len(states[0]), len(weight)
            drafts = torch.empty(weights.shape, dtype=torch.long, device=weight.device)
            choices = torch.empty(length, dtype=torch.long, device=weight.device)
            losses = weights.new_zeros(len(states))
            gradients = [torch.empty_like(s) for s in states] if learning else []
            total = torch.zeros_like(weight) if learning else None
            for piece in split(length, vocabulary, weight.device.type):
                shares, negentropy, choices[piece] = run(torch, likelihoods, targets(piece))
                for step, given in enumerate(states):
                    made = logits(torch, given[piece], narrow)
                    of_step = weights[step, piece]
                    divergence, gradient, drafts[step, piece] = run(
                        torch, compare, made, shares, negentropy, of_step, narrow.dtype
                    )
                    losses[step] += (divergence * of_step).sum()
                    if learning:
                        torch.mm(gradient, narrow, out=gradients[step][piece])
                        _add_product(torch, total, gradient.T, given[piece])
            ctx.total = total
            ctx.save_for_backward(*gradients)
            ctx.mark_non_differentiable(drafts, choices)
            return losses, drafts, choices

        @staticmethod
        def backward(ctx: Any, of_losses: Any, *_: Any) -> tuple[Any, ...]:
            gradients = ctx.saved_tensors
            scaled = [g * of.to(g.dtype) for g, of in zip(gradients, of_losses, strict=True)]
            total, ctx.total = ctx.total, None
            # In place, for it is large. All steps add up to one loss: they have one gradient.
            return total.mul_(of_losses[0]), None, None, None, *scaled

    return Distillation


def _add_product(torch: ModuleType, total: Any, left: Any, right: Any) -> None:
    """total += left @ right, without rounding the product to the factors' dtype on a GPU."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    elif left.is_cuda:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total.add_(left @ right)
