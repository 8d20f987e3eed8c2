"""Patches for the train stage: speculators' trainer and draft model."""
