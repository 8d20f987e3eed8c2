"""The whole pipeline on a small real model: `python -m spec_compat.demo`."""
