"""The whole pipeline on a small real model: `make demo`."""

STOPPED = "error: stopped; the same command goes on from here"
