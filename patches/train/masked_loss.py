"""The loss takes more time and memory than the layers, most of it where nothing is learnt.

Symptom  None but the time and the memory: with 32,000 draft tokens and batches of 8,192, each of
         several tensors of [tokens, draft vocabulary] in float32 takes 1 GB, for each TTT step.
Cause    `Eagle3DraftModel.forward` has lm_head, the verifier's lm_head, two softmaxes, the KL
         divergence and two argmaxes over all positions, multiplies by the loss mask at the end, and
         keeps what the backward pass needs until then. It normalises the targets at each TTT step.
         It waits for the device to add up the lengths of the rows.
Fix      A forward with the same results but for rounding. Heads and loss run at the positions whose
         target is learnt (and those that the accuracy counts), a piece of them at a time, with
         their gradients; targets once a batch. A draft is computed where a later step or a target
         needs it; elsewhere it is token 0, which nothing reads: a position's later steps attend to
         the first step of those before it, and to itself. The layers are compiled alone. A batch
         may have the mask on the host too, as numpy's `learnt`, which the trainer does not move to
         the device: then nothing waits for the device, which else counts the positions.
Remove when speculators 0.3 and 0.4 are no longer supported.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any

from spec_compat.patching import NEEDED, Patch, Probe, mentions, moved, parameters

from ._loss import Distilled, Places, at, compiled, distillation, logits, places, split

patch = Patch(
    module="speculators.models.eagle3.core",
    when={"speculators": ">=0.3,<0.5"},
    after=("train/eager-forward",),
)

ARGUMENTS = {
    "hidden_states",
    "input_ids",
    "lengths",
    "loss_mask",
    "position_ids",
    "verifier_last_hidden_states",
    "ttt_steps",
    "ttt_step_loss_decay",
    "use_off_policy_tokens",
}

PARTS = {
    "compute_metrics",
    "embed_tokens",
    "extend_mask_for_draft_tokens",
    "fc",
    "layers",
    "lm_head",
    "norm",
    "rotary_emb",
    "verifier_lm_head",
}


@patch.probe
def needed(module: ModuleType) -> Probe:
    if not parameters(module.Eagle3DraftModel.forward) >= ARGUMENTS:
        return moved("Eagle3DraftModel.forward takes other parameters")
    if missing := sorted(PARTS - mentions(module.Eagle3DraftModel.forward)):
        return moved(f"Eagle3DraftModel.forward does not use {', '.join(missing)}")
    return NEEDED


@patch.replace("Eagle3DraftModel.forward")
def forward(original: Callable[..., Any], module: ModuleType) -> Callable[..., Any]:
    torch = module.torch

    @wraps(original)
    def forward(
        self: Any,
        hidden_states: Any,  # [1, n, 3 * hidden]
        input_ids: Any,  # [1, n]
        lengths: Any = None,  # [rows]
        loss_mask: Any = None,  # [1, n]
        position_ids: Any = None,  # [1, n]
        verifier_last_hidden_states: Any = None,  # [1, n, hidden]
        ttt_steps: int = 3,
        ttt_step_loss_decay: float = 1.0,
        use_off_policy_tokens: bool = False,
        learnt: Any = None,  # numpy's bool [n]: where loss_mask is not zero, for no wait
        **kwargs: Any,
    ) -> Any:
        if verifier_last_hidden_states is None:
            given = (lengths, loss_mask, position_ids, None, ttt_steps, ttt_step_loss_decay)
            return original(self, hidden_states, input_ids, *given, use_off_policy_tokens, **kwargs)
        n, device = hidden_states.shape[1], hidden_states.device
        mask = torch.ones(n, device=device) if loss_mask is None else loss_mask[0]
        if position_ids is None:
            position_ids = 1 + torch.arange(n, device=device)[None]
        there = mask if learnt is None else torch.from_numpy(learnt)
        where = places(torch, there, ttt_steps, device)
        layers = Layers(module, self, lengths, n, device, kwargs)
        # As wide at the first step as it is at those after it.
        hidden, ids, states = self.fc(hidden_states).to(self.fc.weight.dtype), input_ids, []
        for step in range(ttt_steps):
            hidden = layers(ids, hidden, position_ids + step)
            states.append(lm_head_inputs(torch, self.norm, hidden[0], where.targets - step))
            if use_off_policy_tokens:
                ids = torch.nn.functional.pad(input_ids[:, step + 1 :], (0, step + 1))
            elif step + 1 < ttt_steps:
                ids = draft_inputs(torch, self, hidden[0], where.fed)
        wide = torch.promote_types(self.lm_head.weight.dtype, torch.float32)
        weights = loss_weights(torch, mask.to(wide), where, ttt_steps, ttt_step_loss_decay)
        targets = at(verifier_last_hidden_states[0], where.targets)
        found = distilled(torch, self, states, targets, weights)
        drafts, right = scattered(torch, where, found, n)
        metrics = accuracy(mask, right)
        metrics.update({f"loss_{k}": loss for k, loss in enumerate(found.losses.detach())})
        loss = found.losses.sum()
        return list(drafts[:, None]), loss, {**metrics, "loss": loss.detach().clone()}

    return forward


class Layers:
    """The head's layers, step after step, with the keys and values of the steps before."""

    def __init__(
        self, module: ModuleType, head: Any, lengths: Any, n: int, device: Any, more: Any
    ) -> None:
        torch = module.torch
        self._extend = module.extend_mask_for_draft_tokens
        self._arange = torch.arange
        self._head, self._more, self._steps = head, more, 0
        self._cache = module.DynamicCache(config=head.config.transformer_layer_config)
        self._compile = compiled if device.type == "cuda" else lambda function: function
        if lengths is None:
            lengths = torch.tensor([n], device=device)
        attends = mask_mod(torch, lengths.to(device), n)
        make = self._compile(module.create_block_mask)
        self._mask = make(attends, B=None, H=None, Q_LEN=n, KV_LEN=n, device=device)

    def __call__(self, ids: Any, hidden: Any, positions: Any) -> Any:
        """hidden [1, n, hidden] after the tokens beside them, ids [1, n]."""
        n = hidden.shape[1]
        if self._steps:
            self._mask = self._extend(self._mask)
        places = self._arange(n * self._steps, n * (self._steps + 1), device=hidden.device)
        self._steps += 1
        run = self._compile(run_layers)
        return run(self._head, ids, hidden, self._mask, positions, self._cache, places, self._more)


def run_layers(
    head: Any, ids: Any, hidden: Any, mask: Any, positions: Any, cache: Any, places: Any, more: Any
) -> Any:
    import torch

    with torch.no_grad():
        embedded = head.embed_tokens(ids)
    hidden = torch.cat([embedded, hidden], dim=-1)
    rotary = head.rotary_emb(hidden, positions)
    for layer in head.layers:
        hidden = layer(
            hidden,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            cache_position=places,
            position_embeddings=rotary,
            **more,
        )
    return hidden


def mask_mod(torch: ModuleType, lengths: Any, n: int) -> Callable[..., Any]:
    """The mask: the places before in the same row at the first step, and itself at every step."""
    ends = lengths.cumsum(0)
    row = torch.searchsorted(ends, torch.arange(n, device=lengths.device), right=True)
    row = torch.where(row < len(lengths), row, -1)  # the rest of the batch is in no row

    def attends(batch: Any, head: Any, query: Any, key: Any) -> Any:
        place = key % n
        within = (query >= key) & (row[query] == row[place]) & (row[query] != -1)
        return within | (place == query)

    return attends


def lm_head_inputs(torch: ModuleType, norm: Any, hidden: Any, places: Any) -> Any:
    """What lm_head is given at some places of hidden [n, hidden]: [m, hidden], autocast's dtype."""
    if not hidden.is_cuda:
        return normed_at(norm, hidden, places, narrow(torch, hidden))
    torch._dynamo.maybe_mark_dynamic(places, 0)
    return compiled(normed_at)(norm, hidden, places, narrow(torch, hidden))


def normed_at(norm: Any, hidden: Any, places: Any, dtype: Any) -> Any:
    return norm(at(hidden, places)).to(dtype)


def narrow(torch: ModuleType, tensor: Any) -> Any:
    """The dtype of products with a tensor here: autocast's, where that is on."""
    kind = tensor.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else tensor.dtype


def draft_inputs(torch: ModuleType, head: Any, hidden: Any, fed: Any) -> Any:
    """The tokens that the head drafts, as the verifier numbers them, [1, n]; 0 where not `fed`."""
    drafts = torch.zeros(len(hidden) + 1, dtype=torch.long, device=hidden.device)
    with torch.no_grad():
        states = lm_head_inputs(torch, head.norm, hidden, fed)
        weight = head.lm_head.weight.to(states.dtype)
        for piece in split(len(fed), len(weight), hidden.device.type):
            # The last draft takes what is padded.
            drafts[fed[piece]] = logits(torch, states[piece], weight).argmax(dim=-1)
    drafts = drafts[None, :-1]
    return drafts if head.d2t is None else drafts + head.d2t[drafts]


def loss_weights(torch: ModuleType, mask: Any, where: Places, steps: int, decay: float) -> Any:
    """What the divergence of each place counts at each step, [steps, m] in the mask's dtype.

    At step k the first k places have no draft, and the loss is the mean over those that are learnt.
    """
    of_place = torch.where(where.targets >= 0, at(mask, where.targets), 0)
    rows = []
    for step in range(steps):
        scale = decay**step / (mask[step:].sum() + 1e-5)
        rows.append(torch.where(where.targets >= step, of_place, 0) * scale)
    return torch.stack(rows)


def distilled(
    torch: ModuleType, head: Any, states: list[Any], targets: Any, weights: Any
) -> Distilled:
    """The losses of normed states [m, hidden] of each step against the verifier's last ones."""
    weight, verifier, dtype = head.lm_head.weight, head.verifier_lm_head, states[0].dtype
    fixed = verifier.weight.to(dtype)
    # 0.4 has the verifier's norm beside its head, 0.3 has it as a hook of the head.
    norm = getattr(head, "verifier_norm", lambda states: states)

    def of_targets(piece: slice) -> Any:
        return verifier(norm(targets[piece])).to(weights.dtype)

    learning = torch.is_grad_enabled() and weight.requires_grad
    # Its hooks stay what they are, and its logits are not rounded to bfloat16.
    verifier.forward = lambda normed: logits(torch, normed.to(dtype), fixed)
    try:
        with torch.autocast(weight.device.type, enabled=False):
            found = distillation().apply(weight, weights, of_targets, learning, *states)
    finally:
        del verifier.forward
    return Distilled(*found)


def scattered(torch: ModuleType, where: Places, found: Distilled, n: int) -> tuple[Any, Any]:
    """Drafts [steps, n], 0 where there is no target; whether they are the verifier's choice."""
    steps = len(found.drafts)
    drafts = torch.zeros(steps, n + 1, dtype=torch.long, device=found.drafts.device)
    right = torch.zeros(steps, n + 1, dtype=torch.bool, device=found.drafts.device)
    for step in range(steps):
        places = where.targets - step
        places = torch.where(places < 0, n, places)  # the last one takes what has no place
        drafts[step, places] = found.drafts[step]
        right[step, places] = found.drafts[step] == found.choices
    return drafts[:, :-1], right[:, :-1]


def accuracy(mask: Any, right: Any) -> dict[str, Any]:
    """speculators' own measures: see its compute_accuracy."""
    metrics, holds = {}, mask != 0
    for step, of_step in enumerate(right):
        n = len(mask) - step
        holds = holds[:n]
        before = holds.sum()
        holds = holds & of_step[:n]
        learnt = mask[step:] != 0
        found = (holds & learnt).sum()
        metrics[f"full_acc_{step}"] = found / (learnt.sum() + 1e-5)
        metrics[f"cond_acc_{step}"] = found / (before + 1e-5)
    return metrics
