"""One of several processes on the same keys: `python -m tests.stores.redis.racer URL race|alone|hold`.

Says `ready` and waits for a line. `race`: claims, completes and marks every key, and prints what it won.
`alone`: the same, one item at a time.
`hold`: claims the keys it is told, line by line, says so, and never completes them: it is there to be killed.
"""

import json
import os
import sys

from semel.core.commands import Claim, Granted, Mark, Settle
from semel.stores.redis import RedisStore

KEYS = [f"key {number}" for number in range(200)]
BATCH = 20
MINUTE_US = 60 * 1_000_000
SHORT_US = 100_000


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def race(store: RedisStore, size: int) -> None:
    sys.stdin.readline()
    claimed: list[str] = []
    marked: list[str] = []
    order = KEYS if os.getpid() % 2 else KEYS[::-1]
    for start in range(0, len(order), size):
        some = order[start : start + size]
        claims = [Claim(("", "claims", key), os.urandom(16), MINUTE_US, MINUTE_US) for key in some]
        granted = [
            (claim, answer)
            for claim, answer in zip(claims, store.send(claims), strict=True)
            if isinstance(answer, Granted)
        ]
        store.send(
            [
                Settle(claim.id, claim.owner, answer.fence, "done", b"r", MINUTE_US, MINUTE_US)
                for claim, answer in granted
            ]
        )
        claimed += [claim.id[2] for claim, _ in granted]
        (marks,) = store.send([Mark("", "marks", some, MINUTE_US)])
        marked += [key for key, first in zip(some, marks.firsts, strict=True) if first]
    say(json.dumps({"claimed": claimed, "marked": marked}))


def hold(store: RedisStore) -> None:
    for line in sys.stdin:
        key = line.rstrip("\n")
        (answer,) = store.send([Claim(("", "claims", key), os.urandom(16), SHORT_US, MINUTE_US)])
        say(json.dumps({"fence": answer.fence, "attempt": answer.attempt}))


def main() -> None:
    store = RedisStore(sys.argv[1])
    store.open()
    say("ready")
    if sys.argv[2] in ("race", "alone"):
        race(store, BATCH if sys.argv[2] == "race" else 1)
    else:
        hold(store)
    store.close()


if __name__ == "__main__":
    main()
