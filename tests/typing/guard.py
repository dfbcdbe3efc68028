"""What a type checker knows about `guard`: the signature stays, values and outcomes have the right types.

Nothing here runs. Each `type: ignore` marks a call that must be refused: were it accepted, mypy's
warn_unused_ignores would report the comment.
"""

from typing import assert_type

import semel
from semel import AsyncGuarded, AsyncSemel, Guarded, Outcome, Policy, Semel


class Order:
    id: str
    cents: int


class Receipt:
    number: str


def guard_on_def(once: Semel) -> None:
    @once.guard(key="order.id")
    def charge(order: Order, *, currency: str = "EUR") -> Receipt:
        return Receipt()

    assert_type(charge(Order()), Receipt)
    assert_type(charge(Order(), currency="USD"), Receipt)
    assert_type(charge.call(Order(), currency="USD"), Outcome[Receipt])
    assert_type(charge.key(Order()), str)

    charge()  # type: ignore[call-arg]
    charge("evt_1")  # type: ignore[arg-type]
    charge(Order(), currency=978)  # type: ignore[arg-type]
    charge(Order(), "USD")  # type: ignore[call-arg]
    charge.call(Order(), colour="red")  # type: ignore[call-arg]


def guard_with_a_callable(once: Semel) -> None:
    @once.guard(key=lambda order, **_: order.id, policy=Policy(wait_s=0))
    def charge(order: Order) -> Receipt:
        return Receipt()

    assert_type(charge(Order()), Receipt)
    once.guard("order.id")  # type: ignore[call-arg]


async def guard_on_async_def(once: Semel, aonce: AsyncSemel) -> None:
    @once.guard(key="order.id")
    async def by_the_twin(order: Order) -> Receipt:
        return Receipt()

    @aonce.guard(key="order.id")
    async def charge(order: Order) -> Receipt:
        return Receipt()

    assert_type(await by_the_twin(Order()), Receipt)
    assert_type(await charge(Order()), Receipt)
    assert_type(await charge.call(Order()), Outcome[Receipt])

    await charge()  # type: ignore[call-arg]
    await charge(1)  # type: ignore[arg-type]

    @aonce.guard(key="order.id")  # type: ignore[arg-type]
    def blocks(order: Order) -> Receipt:
        return Receipt()


def guard_by_hand(once: Semel, aonce: AsyncSemel) -> None:
    def charge(order: Order, /) -> Receipt:
        return Receipt()

    async def acharge(order: Order, /) -> Receipt:
        return Receipt()

    assert_type(once.guard(key="order.id")(charge), Guarded[[Order], Receipt])
    assert_type(once.guard(key="order.id")(acharge), AsyncGuarded[[Order], Receipt])
    assert_type(aonce.guard(key="order.id")(acharge), AsyncGuarded[[Order], Receipt])


class Till:
    once = semel.open("memory:", consumer="billing")
    aonce = semel.aopen("memory:", consumer="billing")

    @once.guard(key="order.id", name="pay", event_type="payment", meta={"shop": "1"})
    def pay(self, order: Order) -> Receipt:
        return Receipt()

    @aonce.guard(key="order.id", meta=lambda self, order: {"cents": str(order.cents)})
    async def apay(self, order: Order) -> Receipt:
        return Receipt()

    @classmethod
    @once.guard(key="order.id")
    def of_class(cls, order: Order) -> Receipt:
        return Receipt()

    @staticmethod
    @once.guard(key="order.id")
    def static(order: Order) -> Receipt:
        return Receipt()


async def methods(till: Till) -> None:
    assert_type(till.pay(Order()), Receipt)
    assert_type(till.pay.call(order=Order()), Outcome[Receipt])
    assert_type(till.pay.key(Order()), str)
    assert_type(Till.pay(till, Order()), Receipt)
    assert_type(await till.apay(Order()), Receipt)
    assert_type(till.pay.__name__, str)
    assert_type(Till.static(Order()), Receipt)

    till.pay()  # type: ignore[call-arg]
    till.pay("evt_1")  # type: ignore[arg-type]
    await till.apay(1)  # type: ignore[arg-type]
    Till.static(1)  # type: ignore[arg-type]


def run_with_words(once: Semel) -> None:
    def total(cents: int, *, tax: float) -> int:
        return cents

    assert_type(once.run("k", total, 1, tax=0.2, event_type="payment", meta={"a": "b"}), Outcome[int])
    assert_type(once.run("k", total, 1, tax=0.2, meta={"a": "b"}), Outcome[int])
    once.run("k", total, "1", tax=0.2)  # type: ignore[arg-type]
    once.run("k", total, 1, tax=0.2, meta="a")  # type: ignore[call-arg]


def doors() -> None:
    assert_type(semel.open("memory:", consumer="billing"), Semel)
    assert_type(semel.aopen("memory:", consumer="billing"), AsyncSemel)
    semel.open("memory:")  # type: ignore[call-arg]
    semel.open("memory:", consumer="billing", mode="twice")  # type: ignore[arg-type]
    _ = semel.no_such_name  # type: ignore[attr-defined]
