"""A stage's process: `python -m spec_compat.pipeline STAGE --directory RUN`.

`-m` imports spec_compat first, which arms the patches. Then, started by a runner (`--events`), a
thread begins that ends the process group once the runner is gone; only then is the stage imported.
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

    from spec_compat.pipeline.entry import main

    sys.exit(main())
