"""How a row is named."""

import pytest

from spec_compat.pipeline.rows.row import RowRef


@pytest.mark.parametrize("text", ["talks/17", "gen/talks/data_17.pt"])
def test_a_row_is_named_by_dataset_and_number_and_as_earlier_runs_did(text: str) -> None:
    assert RowRef.parse(text) == RowRef("talks", 17)
    assert str(RowRef("talks", 17)) == "talks/17"


@pytest.mark.parametrize("text", ["", "talks", "17", "talks/x", "gen/talks/data_17.pt.part"])
def test_other_text_names_no_row(text: str) -> None:
    with pytest.raises(ValueError, match="not the name of a row"):
        RowRef.parse(text)
