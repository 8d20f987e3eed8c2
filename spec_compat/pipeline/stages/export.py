"""The stage export: the last checkpoint as a head for vLLM, with the config that it needs."""

from __future__ import annotations

import json
import shutil

from spec_compat.pipeline.head.check import CONFIG, DTYPES, WEIGHTS, head_problems, read_head
from spec_compat.pipeline.run.manifest import Result, digest_of
from spec_compat.pipeline.run.plan import Plan
from spec_compat.pipeline.run.stage import Job, Stage
from spec_compat.pipeline.stages.train import TRAIN
from spec_compat.pipeline.system import atomic


class Exported(Result):
    """`epoch` is the one that the head is from, counted from 1."""

    epoch: int


def inputs(plan: Plan) -> dict[str, str]:
    """Without a name, the verifier's place is written into the head's config."""
    return {"--verifier-name": json.dumps(plan.config.verifier_name or plan.config.model)}


EXPORT = Stage(
    name="export",
    result=Exported,
    writes=("head",),
    after=(TRAIN,),
    options=("verifier_name",),
    inputs=inputs,
    public=False,
)


def run(job: Job) -> Exported:
    """Write `head/`. Raises RuntimeError when weights and config do not belong together."""
    layout = job.layout
    epochs = sorted(int(d.name) for d in layout.checkpoints.iterdir() if d.name.isdigit())
    checkpoint = layout.checkpoints / str(epochs[-1])
    job.events.doing(f"exporting epoch {epochs[-1] + 1}")
    head = read_head(checkpoint)
    config = head.config
    # The trainer's dtype, and the Python code that it saves beside the weights, stay behind.
    config["dtype"] = DTYPES[head.tensors["fc.weight"].dtype]
    config.pop("auto_map", None)
    if problems := head_problems(head):
        raise RuntimeError(f"{checkpoint}: {'; '.join(problems)}")
    verifier = config["speculators_config"]["verifier"]
    verifier["name_or_path"] = job.config.verifier_name or job.config.model
    with atomic.replacing_directory(layout.head) as directory:
        shutil.copyfile(checkpoint / WEIGHTS, directory / WEIGHTS)
        (directory / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    files = sorted(layout.head.iterdir())
    outputs = {layout.relative(file): atomic.sha256(file) for file in files}
    size = sum(file.stat().st_size for file in files)
    return Exported(digest=digest_of(outputs), outputs=outputs, bytes=size, epoch=epochs[-1] + 1)
