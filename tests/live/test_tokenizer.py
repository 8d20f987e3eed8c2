"""A tokenizer or config that cannot be loaded is the model's fault, not that of the data."""

import json
import shutil
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from spec_compat.errors import UserError
from spec_compat.pipeline.inputs.verifier import Verifier
from spec_compat.pipeline.run import plan
from spec_compat.pipeline.stages import tokenization as prepare
from spec_compat.pipeline.run.config import RunConfig
from spec_compat.pipeline.run.events import Events
from spec_compat.pipeline.run.layout import Layout
from tests import tiny_models

pytestmark = pytest.mark.live


@pytest.mark.parametrize("content", [None, "", "{}"])
def test_one_line_names_the_model(tiny_llama: Path, tmp_path: Path, content: str | None) -> None:
    model = Path(shutil.copytree(tiny_llama, tmp_path / "model"))
    prepare.check_loads(Verifier(str(model)))
    (model / "tokenizer.json").unlink()
    if content is not None:
        (model / "tokenizer.json").write_text(content)
    with pytest.raises(UserError, match=r"model: its tokenizer cannot be loaded: .") as caught:
        prepare.check_loads(Verifier(str(model)))
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
        prepare.check_loads(Verifier(str(model), trust_remote_code=True))
    assert "\n" not in str(caught.value)


def test_ids_beyond_the_verifiers_embeddings_are_refused(tiny_llama: Path, tmp_path: Path) -> None:
    """As of tokens that were added to the tokenizer alone: vLLM's worker would end at them."""
    model = Path(shutil.copytree(tiny_llama, tmp_path / "model"))
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "vocab_size": 100}))
    data = tiny_models.write_conversations(tmp_path / "talks.jsonl", 4)
    given = {"model": str(model), "data": [str(data)], "output": tmp_path / "run"}
    chosen = plan.make(RunConfig.model_validate(given))
    layout = Layout(tmp_path / "run")
    layout.logs.mkdir(parents=True)
    (scratch := tmp_path / "scratch").mkdir()
    job: Any = SimpleNamespace(
        config=chosen.config, layout=layout, events=Events(), verifier=chosen.verifier
    )
    with pytest.raises(UserError, match=r"model: its tokenizer gives the id \d+, and it has embe"):
        prepare.prepare_dataset(job, chosen.datasets[0], tmp_path / "prepared", scratch, Random(0))
