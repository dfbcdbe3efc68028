"""One of several processes that attack the same keys: `python -m tests.stores.postgres.attacker URL ROLE`.

Says `ready`, waits for a line, does its part and prints what it won as JSON.
"""

import json
import os
import random
import signal
import sys
from typing import Any

from semel.core.commands import Claim, Granted, Mark, Settle
from semel.stores.postgres import PostgresStore, from_url
from semel.types import Completed

_GIVEN = os.environ.get("ATTACKED_KEYS")
KEYS = _GIVEN.split(",") if _GIVEN else [f"key {number}" for number in range(200)]
MINUTE_US = 60 * 1_000_000
SHORT_US = 300_000


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def race(store: PostgresStore) -> dict[str, Any]:
    """Claim every key in batches of any size and order, settle what was won, and mark."""
    keys = random.sample(KEYS, len(KEYS))
    won: list[str] = []
    done: list[str] = []
    while keys:
        size = random.randint(1, 40)
        some, keys = keys[:size], keys[size:]
        claims = [Claim(("", "claims", key), os.urandom(16), MINUTE_US, MINUTE_US) for key in some]
        granted = [
            (claim, answer)
            for claim, answer in zip(claims, store.send(claims), strict=True)
            if isinstance(answer, Granted)
        ]
        won += [claim.id[2] for claim, _ in granted]
        settles = [
            Settle(claim.id, claim.owner, answer.fence, "done", window_us=MINUTE_US)
            for claim, answer in granted
        ]
        done += [
            settle.id[2]
            for settle, answer in zip(settles, store.send(settles), strict=True)
            if answer == Completed(at_us=answer.at_us)
        ]
    keys = random.sample(KEYS, len(KEYS))
    (marked,) = store.send([Mark("", "marks", keys, MINUTE_US)])
    return {
        "won": won,
        "done": done,
        "marked": [k for k, first in zip(keys, marked.firsts, strict=True) if first],
    }


def die(store: PostgresStore, moment: str) -> dict[str, Any]:
    """Claim all keys with a short lease and be killed before, or after, they are settled."""
    claims = [Claim(("", "claims", key), os.urandom(16), SHORT_US, MINUTE_US) for key in KEYS]
    answers = store.send(claims)
    if moment == "settled":
        store.send(
            [
                Settle(claim.id, claim.owner, answer.fence, "done", b"jdone", MINUTE_US)
                for claim, answer in zip(claims, answers, strict=True)
            ]
        )
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


def main() -> None:
    store = from_url(sys.argv[1])
    store.open()
    say("ready")
    sys.stdin.readline()
    role = sys.argv[2]
    result = race(store) if role == "race" else die(store, role)
    store.close()
    say(json.dumps(result))


if __name__ == "__main__":
    main()
