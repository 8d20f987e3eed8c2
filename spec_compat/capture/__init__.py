"""Captures hidden states inside vLLM's worker, proves them, and hands them to a storage."""
