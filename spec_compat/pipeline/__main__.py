"""A stage's process: `python -m spec_compat.pipeline STAGE --directory RUN`.

It watches its runner before it does anything else. Importing spec_compat arms the patches before
anything that they wait for is imported.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

# For a stage without a runner to end by itself.
GRACE_SECONDS = 5.0


def outlive_no_runner() -> None:
    """Wait for the end of standard input, which the runner holds, and end the process group.

    The runner was killed: nobody else would end this stage, its workers and loaders.
    """
    while os.read(0, 1):
        pass
    os.killpg(0, signal.SIGTERM)
    time.sleep(GRACE_SECONDS)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    if "--events" in sys.argv:
        threading.Thread(target=outlive_no_runner, daemon=True).start()

    from spec_compat.pipeline.stages.entry import main

    sys.exit(main())
