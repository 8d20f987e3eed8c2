"""The script of a user of speculators 0.3.0: rows of token ids in, hidden states out."""

import json
import sys
from pathlib import Path

import torch

import spec_compat  # noqa: F401
from speculators.data_generation.vllm_hidden_states_generator import VllmHiddenStatesGenerator


def main(request: Path, states: Path) -> None:
    options = json.loads(request.read_text())
    rows = options.pop("rows")
    calls = options.pop("calls", 1)
    generator = VllmHiddenStatesGenerator(**options)
    for _ in range(calls):
        results = generator.generate(rows)
    torch.save([row["hidden_states"] for row in results], states)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
