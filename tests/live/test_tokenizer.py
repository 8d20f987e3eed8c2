"""A tokenizer or config that cannot be loaded is the model's fault, not that of the data."""

import shutil
from pathlib import Path

import pytest

from spec_compat.errors import UserError
from spec_compat.pipeline import prepare

pytestmark = pytest.mark.live


@pytest.mark.parametrize("content", [None, "", "{}"])
def test_one_line_names_the_model(tiny_llama: Path, tmp_path: Path, content: str | None) -> None:
    model = Path(shutil.copytree(tiny_llama, tmp_path / "model"))
    prepare.check_loads(str(model), False)
    (model / "tokenizer.json").unlink()
    if content is not None:
        (model / "tokenizer.json").write_text(content)
    with pytest.raises(UserError, match=r"model: its tokenizer cannot be loaded: .") as caught:
        prepare.check_loads(str(model), False)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("what", "file", "code", "says"),
    [
        ("config", "configuration_kimi_k25.py", None, "configuration_kimi_k25.py"),
        ("config", "configuration_kimi_k25.py", "raise RuntimeError('a\\nb')", "a$"),
        ("config", "configuration_kimi_k25.py", "raise KeyError", "KeyError$"),
        ("tokenizer", "tokenization_kimi.py", "import no_such_package", "no_such_package"),
    ],
)
def test_code_of_its_own_that_fails_is_said_before_rows_are_made(
    what: str, file: str, code: str | None, says: str, mini_kimi: Path, tmp_path: Path
) -> None:
    model = Path(shutil.copytree(mini_kimi, tmp_path / "model"))
    (model / file).write_text(code) if code else (model / file).unlink()
    with pytest.raises(UserError, match=rf"model: its {what} cannot be loaded: .*{says}") as caught:
        prepare.check_loads(str(model), True)
    assert "\n" not in str(caught.value)
