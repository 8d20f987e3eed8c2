"""`python -m spec_compat.cli` is `spec-compat`."""

from spec_compat.cli import main

main()
