#!/usr/bin/env python3
"""What `import spec_compat` and arming the patches cost, in milliseconds.

    python -m scripts.bench_import

Each figure is the median of fresh processes; Python's own start is left out.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time

from scripts import measure

CASES = ("import", "arm")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=measure.count, default=7)
    given = measure.options(parser, CASES)
    if given.case:
        run_case(given)
    wanted = given.cases
    given.cases = ",".join(case for case in wanted.split(",") for _ in range(given.processes))
    found = measure.run_cases(given)
    given.cases = wanted
    records = [record for record in found if "failed" in record]
    for case in wanted.split(","):
        if ms := [record["ms"] for record in found if record["case"] == case and "ms" in record]:
            records.append({"case": case, "ms": statistics.median(ms), "processes": len(ms)})
    measure.table(records, ("case", "ms", "processes"))
    measure.finish("import", given, records, {})
    return any("failed" in record for record in records)


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
