"""Windows are data: per consumer and event type, changed while everything runs."""

import semel
from semel import Policy

once = semel.open("sqlite:///events.db", consumer="shop", window="payments")

once.windows.set("orders", event_type="order.created")
once.windows.set("off", event_type="page.viewed")
print({event_type: f"{us / 3.6e9:g}h" for event_type, us in once.windows.list().items()})

views = once.using(Policy(event_type="page.viewed"))
print(
    [views.run("view-1", lambda: "counted") for _ in range(2)] == [views.run("view-1", lambda: "counted")] * 2
)
print("default", once.windows.get() / 3.6e9, "h")
once.close()

# prints:
# {'order.created': '4h', 'page.viewed': '0h'}
# True
# default 24.0 h
