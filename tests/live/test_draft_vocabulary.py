"""Which tokens the head can draft."""

import pytest

pytestmark = [pytest.mark.live]


def test_the_end_token_is_in_the_draft_vocabulary_however_rare_it_is() -> None:
    from speculators.train.vocab_mapping import build_vocab_mappings_from_distribution

    from spec_compat.pipeline.stages.map import with_special_tokens_first

    frequencies = {token: 100 + token for token in range(10, 30)} | {2: 1, 3: 5}
    _, by_count = build_vocab_mappings_from_distribution(frequencies, 8, 64)
    assert not by_count[2]
    ranked = with_special_tokens_first(frequencies, added_tokens={1, 2})
    _, t2d = build_vocab_mappings_from_distribution(ranked, 8, 64)
    assert t2d[2]
    assert not t2d[1], "a special token that no assistant's turn holds takes no place"
    assert not t2d[3]
