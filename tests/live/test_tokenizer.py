"""A tokenizer that cannot be loaded is the model's fault, not that of the data."""

import shutil
from pathlib import Path

import pytest

from spec_compat.errors import UserError
from spec_compat.pipeline import prepare

pytestmark = pytest.mark.live


@pytest.mark.parametrize("content", [None, "", "{}"])
def test_one_line_names_the_model(tiny_llama: Path, tmp_path: Path, content: str | None) -> None:
    model = Path(shutil.copytree(tiny_llama, tmp_path / "model"))
    prepare.check_tokenizer(str(model), False)
    (model / "tokenizer.json").unlink()
    if content is not None:
        (model / "tokenizer.json").write_text(content)
    with pytest.raises(UserError, match=r"model: its tokenizer cannot be loaded: .") as caught:
        prepare.check_tokenizer(str(model), False)
    assert "\n" not in str(caught.value)
