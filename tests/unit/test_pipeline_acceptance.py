"""How accepted drafts are counted, in training and of what a server did."""

from typing import Any

import pytest
import torch

from spec_compat.pipeline.head import acceptance, serve


def counted(tokens: list[list[int]], right: list[int], **rows: list[int]) -> list[list[int]]:
    positions = torch.tensor(rows.get("positions", list(range(len(right)))))
    mask = torch.tensor(rows.get("mask", [1] * len(right))).bool()
    found = acceptance.chain(torch.tensor(tokens), torch.tensor(right), mask, positions)
    return found[[0, 2]].tolist()


def test_a_chain_holds_as_long_as_every_token_of_it_is_right() -> None:
    right = [5, 6, 7, 8]
    # The second step drafts, at each position, the verifier's choice of the position after it.
    assert counted([[5, 6, 7, 8], [6, 7, 8, 0]], right) == [[3, 2], [3, 2]]
    assert counted([[5, 0, 7, 8], [6, 7, 8, 0]], right) == [[2, 1], [3, 2]]
    assert counted([[5, 6, 7, 8], [6, 0, 8, 0]], right) == [[3, 1], [3, 2]]


def test_no_server_drafts_the_first_token_of_a_turn() -> None:
    tokens, right = [[5, 6, 7, 8, 9], [6, 7, 8, 9, 0]], [5, 6, 7, 8, 9]
    assert counted(tokens, right, mask=[0, 1, 1, 1, 1]) == [[3, 2], [3, 2]]
    assert counted(tokens, right, mask=[0, 1, 1, 0, 1]) == [[1, 0], [1, 0]]


def test_a_draft_counts_within_one_turn_of_one_row() -> None:
    tokens = [[5, 6, 7, 8, 9, 3], [6, 7, 8, 9, 3, 0], [7, 8, 9, 3, 0, 0]]
    right = [5, 6, 7, 8, 9, 3]
    assert counted(tokens, right, mask=[1, 1, 1, 0, 1, 1]) == [[3, 1, 0], [3, 1, 0]]
    assert counted(tokens, right, positions=[1, 2, 3, 1, 2, 3]) == [[4, 2, 0], [4, 2, 0]]


def test_a_turn_that_ends_is_left_out_of_what_follows_too() -> None:
    """Both chains that reach a second step hold: 100 %, not the 100 % of 67 % that is 150 %."""
    tokens, right = torch.tensor([[0, 6, 7, 0], [0, 7, 8, 0]]), torch.tensor([5, 6, 7, 8])
    found = acceptance.chain(tokens, right, torch.ones(4).bool(), torch.arange(4))
    assert found.tolist() == [[2, 2], [3, 2], [3, 2]]


def test_own_tokens_are_those_that_the_verifier_would_have_said() -> None:
    ids, right = torch.tensor([4, 5, 6, 7, 8, 9]), torch.tensor([5, 0, 7, 8, 9, 0])

    def own(mask: list[int], positions: list[int]) -> list[int]:
        on = torch.tensor(mask).bool()
        found: list[int] = acceptance.own(ids, right, on, torch.tensor(positions)).tolist()
        return found

    assert own([1] * 6, [1, 2, 3, 4, 5, 6]) == [4, 5]  # what follows the last is not known
    assert own([1, 1, 1, 0, 0, 1], [1, 2, 3, 4, 5, 6]) == [2, 3]
    assert own([1] * 6, [1, 2, 3, 1, 2, 3]) == [3, 4]  # 7 begins another row


def results(answers: list[list[int]], **drafted: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    plain = {
        "tokens": [[1, 2, 3]],
        "logprobs": [[{"1": -0.1}, {"2": -0.7, "9": -0.8, "8": -1.9}, {"3": 0.0}]],
    }
    counters = {"num_drafts": 4, "num_accepted_tokens": 3, "num_accepted_tokens_per_pos": [2, 1]}
    return plain, {"tokens": answers, **counters, **drafted}


def test_acceptance_is_per_draft() -> None:
    served = serve.compare(*results([[1, 2, 3]]))
    assert served.acceptance == [0.5, 0.25]
    assert served.acceptance_length == 1.75
    assert (served.near_ties, served.different) == (0, 0)


@pytest.mark.parametrize(
    ("answer", "near_ties", "different"),
    [
        ([1, 9, 4], 1, 0),  # as likely as the verifier's own
        ([1, 8, 3], 0, 1),
        ([1, 4, 3], 0, 1),  # not among the likely ones
        ([1, 2], 0, 1),
    ],
)
def test_another_answer_is_no_near_tie(answer: list[int], near_ties: int, different: int) -> None:
    served = serve.compare(*results([answer]))
    assert (served.near_ties, served.different) == (near_ties, different)


def test_a_head_that_never_drafted_is_no_division_by_zero() -> None:
    none = {"num_drafts": 0, "num_accepted_tokens": 0, "num_accepted_tokens_per_pos": [0, 0]}
    served = serve.compare(*results([[1, 2, 3]], **none))
    assert (served.acceptance, served.acceptance_length) == ([0.0, 0.0], 1.0)
