"""A guard is its own operation: two functions with the same keys share no record."""

import functools
import inspect
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

import semel
from semel import Done
from semel.keys.limits import KEY_BYTES_MAX
from tests.client.clients import Either, Place, in_thread

pytestmark = pytest.mark.anyio


async def call(client: Either, guarded: Any, *args: Any) -> Any:
    return await (in_thread(guarded, *args) if client.sync else guarded(*args))


async def test_two_functions_with_the_same_key_both_run(client: Either) -> None:
    ran: list[str] = []

    def charge(order: str) -> int:
        ran.append("charge")
        return 1

    def ship(order: str) -> str:
        ran.append("ship")
        return "sent"

    charged, shipped = (client.inner.guard(key="order")(client.handler(fn)) for fn in (charge, ship))
    for _ in range(2):
        assert await call(client, charged, "order-1") == 1
        assert await call(client, shipped, "order-1") == "sent"
    assert ran == ["charge", "ship"]


async def test_the_record_says_whose_it_is(client: Either, place: Place) -> None:
    def charge(order: str) -> str:
        return semel.current().key

    guarded = client.inner.guard(key="order")(client.handler(charge))
    key = f"{__name__}.test_the_record_says_whose_it_is.<locals>.charge::order-1"
    assert guarded.key("order-1") == key
    assert await call(client, guarded, "order-1") == key
    record = place.record(key)
    assert record is not None
    assert record.state == "done"


async def test_a_given_name_survives_a_rename_and_is_shared_on_purpose(client: Either) -> None:
    def charge(order: str) -> int:
        return 1

    def charge_card(order: str) -> int:
        return 2

    guard = client.inner.guard(key="order", name="charge")
    assert await call(client, guard(client.handler(charge)), "a") == 1
    assert await call(client, guard(client.handler(charge_card)), "a") == 1


async def test_run_is_scoped_by_the_consumer_alone(client: Either) -> None:
    assert await client.run("a", lambda: 1) == Done(1)
    assert await client.run("a", lambda: 2) == Done(1, replayed=True)


async def test_run_with_a_guarded_function_keeps_two_records_and_runs_it_once(client: Either) -> None:
    ran: list[str] = []

    def charge(order: str) -> int:
        ran.append(order)
        return 1

    guarded = client.inner.guard(key="order", name="charge")(client.handler(charge))
    run = client.inner.run
    assert await call(client, run, "a", guarded, "a") == Done(1)
    assert await call(client, run, "a", guarded, "a") == Done(1, replayed=True)
    assert await call(client, guarded, "a") == 1
    assert await call(client, run, "another", guarded, "a") == Done(1)
    assert ran == ["a"]


@pytest.mark.parametrize("kind", ["lambda", "partial", "object"])
def test_what_has_no_name_of_its_own_needs_one(kind: str) -> None:
    class Charge:
        def __call__(self, order: str) -> str:
            return order

    def charge(gateway: str, order: str) -> str:
        return order

    fn: Any = {
        "lambda": lambda order: order,
        "partial": functools.partial(charge, "visa"),
        "object": Charge(),
    }[kind]
    with semel.open("memory:", consumer="billing") as once:
        with pytest.raises(semel.errors.UsageError, match="add name="):
            once.guard(key="order")(fn)
        guarded = once.guard(key="order", name="charge")(fn)
        assert guarded("a") == "a"
        assert guarded.key("a") == "charge::a"


@pytest.mark.parametrize("name", ["", "a b", "a:b", "a\nb", "x" * 201])
def test_a_name_must_be_readable_in_a_key(name: str) -> None:
    with (
        semel.open("memory:", consumer="billing") as once,
        pytest.raises(semel.errors.UsageError, match="name"),
    ):
        once.guard(key="order", name=name)(lambda order: 1)


def test_two_functions_of_one_name_are_refused() -> None:
    with semel.open("memory:", consumer="billing") as once:

        def define(*, first: bool) -> Any:
            if first:

                @once.guard(key="order")
                def charge(order: str) -> int:
                    return 1
            else:

                @once.guard(key="order")
                def charge(order: str) -> int:
                    return 2

            return charge

        one = define(first=True)
        with pytest.raises(semel.errors.UsageError, match="share their records; add name="):
            define(first=False)
        again = define(first=True)  # the same function, defined once more
        assert [one("a"), again("a")] == [1, 1]


def test_a_function_is_guarded_once_by_one_client() -> None:
    with semel.open("memory:", consumer="billing") as once:

        @once.guard(key="order")
        def charge(order: str) -> int:
            return 1

        with pytest.raises(semel.errors.UsageError, match="already"):
            once.guard(key="order")(charge)


def test_name_and_key_share_the_room_of_a_key() -> None:
    with semel.open("memory:", consumer="billing") as once:
        guarded = once.guard(key="order", name="charge")(lambda order: 1)
        longest = "x" * (KEY_BYTES_MAX - len("charge::"))
        assert guarded(longest) == 1
        with pytest.raises(semel.errors.KeyInvalid, match="513 bytes"):
            guarded(longest + "x")


@pytest.mark.parametrize("key", ["", 5, None])
def test_a_bad_key_is_refused_before_it_is_scoped(key: Any) -> None:
    with semel.open("memory:", consumer="billing") as once:
        guarded = once.guard(key=lambda order: order, name="charge")(lambda order: 1)
        with pytest.raises((semel.errors.KeyMissing, semel.errors.KeyInvalid)):
            guarded(key)


def test_ids_with_a_time_are_found_behind_the_name(tmp_path: Path) -> None:
    policy = semel.Policy(late="hold")
    store = f"sqlite:///{tmp_path}/events.db"
    with semel.open(store, consumer="billing", ids="uuid7", policy=policy) as once:
        guarded = once.guard(key="order", name="charge")(lambda order: 1)
        with pytest.raises(semel.errors.KeyInvalid, match="UUID"):
            guarded("order-1")


SCRIPT = """
    import multiprocessing, sys
    import semel

    once = semel.open("memory:", consumer="billing")

    @once.guard(key="order")
    def charge(order): ...

    def tell(_):
        return charge.key("a")

    if __name__ == "__main__":
        print(charge.key("a"))
        if "spawn" in sys.argv:
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                print(pool.map(tell, [0])[0])
"""


@pytest.mark.parametrize(
    ("how", "names"),
    [
        (["billing.py"], ["billing.charge::a"]),
        (["-m", "billing"], ["billing.charge::a"]),
        (["billing.py", "spawn"], ["billing.charge::a"] * 2),
        (["-m", "billing", "spawn"], ["billing.charge::a"] * 2),
        (["-c", "import billing; print(billing.charge.key('a'))"], ["billing.charge::a"]),
        (["-m", "shop.till"], ["shop.till.charge::a"]),
    ],
    ids=["script", "module", "script-child", "module-child", "imported", "package"],
)
def test_a_script_has_the_name_by_which_it_is_imported(
    tmp_path: Path, how: list[str], names: list[str]
) -> None:
    (tmp_path / "shop").mkdir()
    for path in (tmp_path / "billing.py", tmp_path / "shop" / "till.py"):
        path.write_text(textwrap.dedent(SCRIPT), encoding="utf-8")
    done = subprocess.run([sys.executable, *how], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.split() == names


# --- methods ---


class Till:
    once = semel.open("memory:", consumer="till")

    def __init__(self) -> None:
        self.paid: list[str] = []

    @once.guard(key="order")
    def pay(self, order: str) -> int:
        """Pay the order."""
        self.paid.append(order)
        return len(self.paid)

    @once.guard(key="order")
    @classmethod
    def guard_above(cls, order: str) -> str:
        return f"{cls.__name__} {order}"

    @classmethod
    @once.guard(key="order")
    def guard_below(cls, order: str) -> str:
        return f"{cls.__name__} {order}"

    @once.guard(key="order")
    @staticmethod
    def static_above(order: str) -> str:
        return order

    @staticmethod
    @once.guard(key="order")
    def static_below(order: str) -> str:
        return order


def test_a_guarded_method_is_the_method() -> None:
    till = Till()
    assert (till.pay.__name__, till.pay.__doc__) == ("pay", "Pay the order.")
    assert list(inspect.signature(till.pay).parameters) == ["order"]
    assert list(inspect.signature(Till.pay).parameters) == ["self", "order"]
    assert till.pay.__wrapped__.__self__ is till  # type: ignore[attr-defined]
    assert till.pay.key("a") == f"{__name__}.Till.pay::a"
    assert [till.pay("a"), till.pay("a"), Till.pay(till, "a")] == [1, 1, 1]
    assert till.pay.call("a") == Done(1, replayed=True)
    assert till.paid == ["a"]


@pytest.mark.parametrize("name", ["guard_above", "guard_below"])
def test_class_methods(name: str) -> None:
    for method in (getattr(Till, name), getattr(Till(), name)):
        assert method("a") == "Till a"
        assert method.__name__ == name
        # Since Python 3.13 a classmethod binds the class for the call only, not for attributes of what it wraps.
        bound = () if name == "guard_above" or sys.version_info < (3, 13) else (Till,)
        assert isinstance(method.call(*bound, "a"), Done)


@pytest.mark.parametrize("name", ["static_above", "static_below"])
def test_static_methods(name: str) -> None:
    for method in (getattr(Till, name), getattr(Till(), name)):
        assert method("a") == "a"
        assert method.__name__ == name
        assert isinstance(method.call("a"), Done)
