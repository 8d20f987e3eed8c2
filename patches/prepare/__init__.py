"""Patches for the prepare stage: tokenisation and loss masks."""
