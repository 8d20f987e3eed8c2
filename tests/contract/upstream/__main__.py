"""Takes snapshots of releases, and reports what a new release of vLLM moves.

    python -m tests.contract.upstream vllm 0.33.0 ...         # into tests/contract/snapshots
    python -m tests.contract.upstream speculators 0.4.0.1 ...
    python -m tests.contract.upstream --report 0.34.0 0.33.0  # what moved, which patch to open

Wheels are read from the package index that pip is set to; a few MB of each are fetched.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys

from packaging.version import Version

from spec_compat.support import support
from tests.contract.upstream.report import report
from tests.contract.upstream.snapshots import ROOT, releases, snapshot
from tests.contract.upstream.take import take


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.contract.upstream", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("package", choices=("vllm", "speculators"), nargs="?")
    parser.add_argument("releases", nargs="*", metavar="RELEASE")
    parser.add_argument("--report", nargs=2, metavar=("NEW", "OLD"))
    options = parser.parse_args()
    if not options.releases and not options.report:
        parser.error("name a package and its releases, or --report NEW OLD")
    known = releases("vllm")
    missing = [("vllm", release) for release in options.report or () if release not in known]
    for package, release in [(options.package, name) for name in options.releases] + missing:
        try:
            print(take(package, release).relative_to(ROOT), flush=True)
        except subprocess.CalledProcessError:
            sys.exit(f"no wheel of {package} {release}")
    if options.report:
        print("\n".join(report(*options.report)))
        if support().known("vllm", Version(options.report[0])) != options.report[0]:
            print(f"\nfor spec_compat/support.toml:\n\n{row(options.report[0])}")


def row(release: str) -> str:
    """The entry of a vLLM release in support.toml."""
    content = snapshot("vllm", release)
    torch = re.sub(r"==|\+cpu", "", content["requires"]["torch"])
    values = {"version": release, "python": content["python"], "torch": torch}
    values["torch_cuda"] = content["torch_cuda"].removeprefix("==")
    values["transformers"] = content["requires"]["transformers"]
    return "[[vllm]]\n" + "\n".join(f'{key} = "{value}"' for key, value in values.items())


if __name__ == "__main__":
    main()
