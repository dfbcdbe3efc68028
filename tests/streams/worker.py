"""A deduplication in a process of its own that stops itself before its first transaction, as a long pause would."""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from semel.streams import Dedup


class Stalls(Dedup):
    """Has decided about a batch and holds it in its hand; then nothing of it runs until it is woken."""

    stalled = Path()

    def _transact(self, *arguments: Any) -> Any:
        if not self.stalled.exists():
            self.stalled.touch()
            os.kill(os.getpid(), signal.SIGSTOP)
        return super()._transact(*arguments)


def main(source: str, to: str, state: str, stalled: str) -> None:
    dedup = Stalls(source, to, key="id", state=state)
    dedup.stalled = Path(stalled)
    signal.signal(signal.SIGTERM, lambda *_: dedup.stop())
    dedup.run()
    counts = dedup.counts
    sys.stdout.write(json.dumps({"aborts": counts.aborts, "passed": counts.passed}))


if __name__ == "__main__":
    main(*sys.argv[1:])
