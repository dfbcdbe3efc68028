"""One of several processes that race for the same keys of a SQLite file: `python -m tests.contract.racer FILE`.

Says `ready`, waits for a line, claims and marks every key, and prints which it won.
"""

import json
import os
import sys

from semel.core.commands import Claim, Granted, Mark
from semel.stores.sqlite import SqliteStore

KEYS = [f"key {number}" for number in range(60)]
MINUTE_US = 60 * 1_000_000


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> None:
    store = SqliteStore(sys.argv[1], synchronous="NORMAL")
    store.open()
    say("ready")
    sys.stdin.readline()
    claimed = []
    for key in KEYS:
        (answer,) = store.send([Claim(("", "claims", key), os.urandom(16), MINUTE_US, MINUTE_US)])
        if isinstance(answer, Granted):
            claimed.append(key)
    (marked,) = store.send([Mark("", "marks", KEYS, MINUTE_US)])
    store.close()
    say(json.dumps({"claimed": claimed, "marked": marked.firsts}))


if __name__ == "__main__":
    main()
