"""A batch of deliveries: one claim for all, each with an outcome of its own."""

import semel
from semel import Delivery

once = semel.open("sqlite:///events.db", consumer="stock")


def book(item: str) -> str:
    """Take an item from the shelf."""
    if item == "broken":
        raise RuntimeError("the shelf fell down")
    return f"booked {item}"


deliveries = [
    Delivery(key="e1", body="lamp"),
    Delivery(key="e2", body="broken"),
    Delivery(key="e1", body="lamp"),
    Delivery(key="e3", body="chair"),
]
for delivery, outcome in zip(deliveries, once.run_many(deliveries, book), strict=True):
    print(delivery.key, type(outcome).__name__, getattr(outcome, "value", getattr(outcome, "error", "")))
once.close()

# prints:
# e1 Done booked lamp
# e2 Errored the shelf fell down
# e1 Done booked lamp
# e3 Done booked chair
