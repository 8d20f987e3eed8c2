"""The stages of a run, a module each, and what only one of them needs.

A stage's module has its constant, its result and `run(job)`. The runner imports all of them, so
they import torch, vLLM and speculators in functions only.
"""

from spec_compat.pipeline.run.stage import Stages
from spec_compat.pipeline.stages.export import EXPORT
from spec_compat.pipeline.stages.extract import EXTRACT
from spec_compat.pipeline.stages.map import MAP
from spec_compat.pipeline.stages.prepare import PREPARE
from spec_compat.pipeline.stages.train import TRAIN

STAGES: Stages = (PREPARE, EXTRACT, MAP, TRAIN, EXPORT)

__all__ = ["EXPORT", "EXTRACT", "MAP", "PREPARE", "STAGES", "TRAIN"]
