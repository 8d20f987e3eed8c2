"""The loss in pieces is speculators' own: losses, gradients, drafts and accuracy, on a CPU."""

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

import spec_compat  # noqa: F401
from tests.live.test_train_patches import new_head

pytestmark = pytest.mark.live

LENGTHS = (61, 128, 3, 40)
STEPS = 3
# A mask for each case, of a batch of 256 tokens of which 232 are in a row.
MASKS = {
    "packed rows": [(20, 61), (70, 120), (150, 189), (191, 192), (200, 232)],
    "gaps of one": [(5, 9), (10, 14), (15, 16), (17, 30), (254, 256)],
    "one place": [(100, 101)],
    "the first place": [(0, 1)],
    "all places": [(0, 256)],
    "no target": [],
}


@pytest.fixture(scope="module")
def head(tiny_llama: Path) -> Any:
    torch.manual_seed(0)
    made = new_head(tiny_llama)
    torch.nn.init.normal_(made.lm_head.weight, std=0.3)
    return made.double()


@pytest.fixture(params=[1, 1 << 22], ids=["many pieces", "one piece"], autouse=True)
def _piece(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    from spec_compat.patches.train import _loss

    monkeypatch.setitem(_loss.PIECE, "cpu", request.param * 64 * 256)


def batch(mask: list[tuple[int, int]], lengths: tuple[int, ...] = LENGTHS) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    n, hidden = 256, 64
    chosen = torch.zeros(1, n, dtype=torch.long)
    for begin, end in mask:
        chosen[0, begin:end] = 1
    positions = torch.cat([torch.arange(length) for length in lengths])
    states = torch.randn(1, n, 4 * hidden, generator=generator, dtype=torch.float64)
    return {
        "hidden_states": states[..., : 3 * hidden],
        "verifier_last_hidden_states": states[..., 3 * hidden :],
        "input_ids": torch.randint(0, 512, (1, n), generator=generator),
        "loss_mask": chosen,
        "lengths": torch.tensor(lengths),
        "position_ids": torch.nn.functional.pad(positions, (0, n - len(positions)))[None],
    }


def outcome(forward: Any, head: Any, given: dict[str, Any], **options: Any) -> dict[str, Any]:
    head.zero_grad()
    drafts, loss, metrics = forward(head, **given, ttt_steps=STEPS, **options)
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in head.named_parameters() if p.grad is not None}
    return {"drafts": drafts, "loss": loss.detach(), "metrics": metrics, "gradients": gradients}


def same_gradients(found: dict[str, Any], expected: dict[str, Any], share: float = 1e-6) -> None:
    assert found["gradients"].keys() == expected["gradients"].keys()
    for name, gradient in expected["gradients"].items():
        error = (found["gradients"][name] - gradient).norm()
        assert error <= share * gradient.norm() + 1e-12, name


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("teacher", [False, True], ids=["own tokens", "given tokens"])
def test_losses_gradients_and_metrics_are_speculators_own(
    head: Any, mask: list[tuple[int, int]], teacher: bool
) -> None:
    options = {"use_off_policy_tokens": teacher, "ttt_step_loss_decay": 0.8}
    upstream = inspect.unwrap(type(head).forward)
    expected = outcome(upstream, head, batch(mask), **options)
    found = outcome(type(head).forward, head, batch(mask), **options)
    # The norms, and the sum of the losses upstream, are float32 in both.
    close: Any = {"rtol": 1e-6, "atol": 1e-12, "check_dtype": False}
    torch.testing.assert_close(found["loss"], expected["loss"], **close)
    torch.testing.assert_close(found["metrics"], expected["metrics"], **close)
    same_gradients(found, expected)
    learnt = batch(mask)["loss_mask"][0].bool()
    for step in range(STEPS):
        counted = learnt[step:].nonzero()[:, 0]
        drafts = [every["drafts"][step][0, counted] for every in (found, expected)]
        assert drafts[0].tolist() == drafts[1].tolist()


def test_without_a_mask_every_place_is_learnt(head: Any) -> None:
    given = batch([]) | {"loss_mask": None}
    upstream = inspect.unwrap(type(head).forward)
    expected, found = (outcome(f, head, given) for f in (upstream, type(head).forward))
    torch.testing.assert_close(
        found["loss"], expected["loss"], rtol=1e-6, atol=0, check_dtype=False
    )
    same_gradients(found, expected)


def test_validation_has_the_same_losses_and_no_gradients(head: Any) -> None:
    given = batch(MASKS["packed rows"])
    with torch.no_grad():
        _, expected, _ = inspect.unwrap(type(head).forward)(head, **given)
        _, found, metrics = head(**given)
    assert not found.requires_grad
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0, check_dtype=False)
    torch.testing.assert_close(metrics["loss"], found)


def test_states_where_nothing_is_learnt_change_no_loss(head: Any) -> None:
    """They are read as keys and values of those after them, never as targets."""
    given = batch(MASKS["packed rows"])
    _, before, _ = head(**given)
    given["verifier_last_hidden_states"][0, ~given["loss_mask"][0].bool()] = 1e3
    _, after, _ = head(**given)
    torch.testing.assert_close(after, before)


def test_bfloat16_gradients_are_near(head: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    given = batch(MASKS["packed rows"])
    exact = outcome(type(head).forward, head, given)
    monkeypatch.setenv("SPEC_COMPAT_TRAIN_DTYPE", "bf16")
    single = head.float()
    narrow = outcome(
        type(head).forward,
        single,
        {k: v.float() if v.is_floating_point() else v for k, v in given.items()},
    )
    head.double()
    torch.testing.assert_close(narrow["loss"].double(), exact["loss"], rtol=2e-3, atol=0)
    assert {g.dtype for g in narrow["gradients"].values()} == {torch.float32}
    same_gradients(narrow, exact, 0.03)
