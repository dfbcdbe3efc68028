"""Without a decorator: every delivery has an outcome, and `match` handles them all."""

import semel
from semel import Busy, Done, Errored, Failed, Late, Lost, Mismatch, Policy, Unavailable, Unknown

once = semel.open("memory:", consumer="mailer", policy=Policy(permanent=(ValueError,)))


def send(address: str) -> str:
    """Send a mail; an address without an @ will never work, however often it is tried."""
    if "@" not in address:
        raise ValueError(f"no address: {address}")
    return f"sent to {address}"


for key, address in [
    ("m1", "ada@example.org"),
    ("m1", "ada@example.org"),
    ("m2", "nowhere"),
    ("m2", "nowhere"),
]:
    match once.run(key, send, address):
        case Done(value, replayed):
            print(key, "replayed:" if replayed else "done:", value)
        case Failed(error, replayed):
            print(key, "failed for good", "earlier" if replayed else "now")
        case Errored(error, attempt):
            print(key, "attempt", attempt, "failed, will be tried again:", error)
        case Busy(retry_after_s):
            print(key, "is being handled elsewhere, try again in", retry_after_s)
        case Mismatch() | Lost() | Late() | Unknown() | Unavailable() as other:
            print(key, other)
once.close()

# prints:
# m1 done: sent to ada@example.org
# m1 replayed: sent to ada@example.org
# m2 failed for good now
# m2 failed for good earlier
