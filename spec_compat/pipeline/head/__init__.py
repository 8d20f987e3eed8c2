"""The draft head: its files, the verifier's targets for it, and how it is served."""
