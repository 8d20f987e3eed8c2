"""Rows come back in the order of their ids as strings.

Symptom  None: with more than ten rows in a call, `generate()` returns row 10 before row 2, and the
         loss masks that the caller keeps by position land on other rows.
Cause    The generator of 0.4 collects its results over `sorted(request ids)`, and the ids are
         "req_0_2", "req_0_10" (fixed upstream in fe2ddba5, which no release contains).
Fix      `generate` puts the rows back where they belong, and compares each with the ids given.
Remove when the in-process generator of speculators 0.4 is no longer supported.
"""

from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any

from spec_compat.patching import Patch

patch = Patch(
    module="speculators.data_generation.vllm_hidden_states_generator",
    when={"speculators": ">=0.4,<0.5"},
    upstream="vllm-project/speculators@fe2ddba5",
)


@patch.replace("VllmHiddenStatesGenerator.generate")
def generate(original: Callable[..., Any], module: ModuleType) -> Callable[..., Any]:
    @wraps(original)
    def in_order(self: Any, token_ids: Any) -> list[dict[str, Any]]:
        results = original(self, token_ids)
        rows = dict(zip(sorted(range(len(results)), key=str), results, strict=True))
        for number, given in enumerate(token_ids):
            row = rows[number]["input_ids"].tolist()
            if row != list(given)[: len(row)]:
                raise RuntimeError(f"row {number} of the call came back as another row")
        return [rows[number] for number in range(len(results))]

    return in_order
