"""The whole pipeline on a small real model: `python -m spec_compat.demo`."""

STOPPED = "error: stopped; the same command goes on from here"
