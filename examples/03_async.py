"""The same verbs, awaited. Ten concurrent duplicates wait for the first one and share its value."""

import asyncio

import semel

runs = 0


async def charge(order: str) -> int:
    """Charge; it takes a while, like real work."""
    global runs
    runs += 1
    await asyncio.sleep(0.05)
    return len(order)


async def main() -> None:
    """Ten deliveries of one event at the same time."""
    async with semel.aopen("sqlite:///events.db", consumer="billing") as once:
        outcomes = await asyncio.gather(*(once.run("order-1", charge, "order-1") for _ in range(10)))
    print("values", {outcome.value for outcome in outcomes if isinstance(outcome, semel.Done)})
    print("runs", runs)


asyncio.run(main())

# prints:
# values {7}
# runs 1
