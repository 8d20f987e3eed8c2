"""Files, processes, disks and units: what knows nothing of a run."""
