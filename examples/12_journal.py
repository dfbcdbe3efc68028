"""A source that never sends again: the payload is kept with the claim, and any instance takes over."""

import threading

import semel
from semel import Claimed

first = semel.open("sqlite:///events.db", consumer="sockets", lease="100ms")
second = semel.open("sqlite:///events.db", consumer="sockets", lease="100ms")

claim = first.claim("evt-1", journal={"temperature": 21})
assert isinstance(claim, Claimed)
first.close()  # the instance that claimed dies before it does anything

recovered: list[object] = []
waiting = threading.Event()
while not recovered:  # every instance does this now and then
    second.sweep(recovered.append)
    waiting.wait(0.02)
print(recovered)
print(second.claim("evt-1"))
second.close()

# prints:
# [{'temperature': 21}]
# Done(value=None, replayed=True)
