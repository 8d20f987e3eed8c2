"""The rows of a dataset: prepared tokens, stored hidden states, and the index of their files."""
