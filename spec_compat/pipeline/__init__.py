"""From conversations to a draft head that vLLM serves: prepare, extract, map, train, export.

Every stage delegates to speculators' own functions and runs in a process of its own.
"""
