"""One of several processes that attack the same keys: `python -m tests.stores.postgres.attacker URL ROLE`.

Says `ready`, waits for a line, does its part and prints what it won as JSON.
"""

import json
import os
import random
import signal
import sys
from collections.abc import Sequence
from typing import Any

from semel.core.commands import Claim, Granted, Item, Mark, Settle
from semel.stores.postgres import PostgresStore, from_url
from semel.types import Completed

_GIVEN = os.environ.get("ATTACKED_KEYS")
KEYS = _GIVEN.split(",") if _GIVEN else [f"key {number}" for number in range(200)]
MINUTE_US = 60 * 1_000_000
SHORT_US = 300_000


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def race(store: PostgresStore, size_max: int = 40) -> dict[str, Any]:
    """Claim every key in batches of any size and order, settle what was won, and mark."""
    keys = random.sample(KEYS, len(KEYS))
    won: list[str] = []
    done: list[str] = []
    while keys:
        size = random.randint(1, size_max)
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


def die(store: PostgresStore, moment: str, *, singly: bool) -> dict[str, Any]:
    """Claim all keys with a short lease and be killed before, or after, they are settled."""
    claims = [Claim(("", "claims", key), os.urandom(16), SHORT_US, MINUTE_US) for key in KEYS]
    answers = send(store, claims, singly=singly)
    if moment == "settled":
        settles = [
            Settle(claim.id, claim.owner, answer.fence, "done", b"jdone", MINUTE_US)
            for claim, answer in zip(claims, answers, strict=True)
        ]
        send(store, settles, singly=singly)
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


def send(store: PostgresStore, items: Sequence[Item], *, singly: bool) -> list[Any]:
    """All at once, or one call for each."""
    if singly:
        return [store.send([item])[0] for item in items]
    return store.send(items)


def main() -> None:
    store = from_url(sys.argv[1])
    store.open()
    say("ready")
    sys.stdin.readline()
    role = sys.argv[2]
    if role.startswith("race"):
        result = race(store, 1 if role == "race-singly" else 40)
    else:
        result = die(store, role.removesuffix("-singly"), singly=role.endswith("-singly"))
    store.close()
    say(json.dumps(result))


if __name__ == "__main__":
    main()
