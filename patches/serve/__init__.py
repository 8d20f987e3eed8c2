"""Patches that change vLLM itself, each off unless SPEC_COMPAT_ENABLE names it or the stage."""
