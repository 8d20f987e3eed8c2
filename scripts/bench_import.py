#!/usr/bin/env python3
"""What `import spec_compat` and arming the patches cost, in milliseconds.

    python scripts/bench_import.py

Each figure is the median of fresh processes; Python's own start is left out.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time

import measure

CASES = ("import", "arm")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=7)
    given = measure.options(parser, CASES)
    if given.case:
        run_case(given)
    wanted, records = given.cases.split(","), []
    for case in wanted:
        given.cases = ",".join([case] * given.processes)
        found = [record["ms"] for record in measure.run_cases(given)]
        records.append({"case": case, "ms": statistics.median(found), "processes": len(found)})
    measure.table(records, ("case", "ms", "processes"))
    given.cases = ",".join(wanted)
    measure.finish("import", given, records, {})
    return 0


def run_case(given: argparse.Namespace) -> None:
    begun = time.perf_counter()
    import spec_compat

    imported = time.perf_counter()
    spec_compat.arm()
    armed = time.perf_counter()
    seconds = imported - begun if given.case == "import" else armed - imported
    measure.record(ms=1000 * seconds)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
