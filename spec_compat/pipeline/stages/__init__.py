"""The stages of a run, a module each, and what only one of them needs."""
