"""A run directory: its options, plan, manifest, and the loop over the stages."""
