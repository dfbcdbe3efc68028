"""A function that runs once per order: a duplicate gets the first receipt back."""

from dataclasses import dataclass

import semel

once = semel.open("sqlite:///events.db", consumer="billing", window="24h")


@dataclass
class Order:
    """An order, which may arrive twice."""

    id: str
    cents: int


@dataclass
class Receipt:
    """The result of a charge."""

    order: str
    charge: int


charges = 0


@once.guard(key="order.id")
def charge(order: Order) -> Receipt:
    """Charge the card."""
    global charges
    charges += 1
    return Receipt(order.id, 1000 + charges)


order = Order("order-1", 4200)
print(charge(order))
print(charge(order))
print("charged", charges, "time(s)")
once.close()

# prints:
# Receipt(order='order-1', charge=1001)
# Receipt(order='order-1', charge=1001)
# charged 1 time(s)
