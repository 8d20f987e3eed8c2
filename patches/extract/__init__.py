"""Patches for the extract stage: speculators' in-process generator and its vLLM worker."""
