"""Scenarios about probes: what `semel explain`, `semel doctor` and the warnings of `semel consume` read of a broker."""

from math import inf

from semel.brokers.source import Arrival
from semel.errors import SourceRefused
from semel.observe.doctor import of_source
from semel.observe.probes import of_patience, window_warnings
from semel.testing.broker_conditions import Conditions, condition
from semel.testing.broker_scene import Scene, messages_of
from semel.testing.contract.harness import check, equal

__all__: list[str] = []

HOUR_US = 3_600_000_000
LEASE_US = 30_000_000


@condition
async def a_probe_reads_and_changes_nothing(suite: Conditions) -> None:
    """It names the source as the runner does; messages stay where they are, and are no delivery further."""
    broker = await suite.broker()
    scene = Scene(broker)
    counts: list[int] = []

    async def handler(message: Arrival) -> None:
        counts.append(message.deliveries)

    try:
        await broker.send(messages_of("a", "b"))
        facts = await suite.probe(broker)
        equal(facts.name, broker.source().name, "the name of the source")
        equal(await broker.count_unsettled(), 2, "messages of the broker")
        async with scene.running(handler):
            await suite.probe(broker)  # beside a consumer that runs
            await scene.wait_until_settled()
        check(set(counts) <= {0, 1}, f"the probe consumed: deliveries {counts}")
        equal(len(counts), 2, "handled messages")
    finally:
        await broker.close()


@condition
async def a_probe_with_wrong_credentials_is_refused(suite: Conditions) -> None:
    """`SourceRefused`, for which commands exit with 78: no time heals it, unlike a broker that does not answer."""
    for probe in suite.probes_with_wrong_credentials():
        try:
            await probe
        except SourceRefused as error:
            check("wrong" not in str(error), f"the error tells no password: {error}")
        else:
            raise AssertionError("the probe was not refused")


@condition
async def a_window_shorter_than_the_horizon_is_warned_of(suite: Conditions) -> None:
    """The warning of `semel consume` names the window in force; an unknown horizon is said to be unknown."""
    broker = await suite.broker()
    try:
        facts = await suite.probe(broker)
    finally:
        await broker.close()
    known_s = facts.horizon_s
    if known_s is None:
        said = window_warnings(facts, HOUR_US, "billing")
        check(len(said) == 1 and "unknown" in said[0] and "1h" in said[0], f"what is said: {said}")
        return
    short_us = HOUR_US if known_s == inf else round(known_s * 1e6) // 2
    said = window_warnings(facts, short_us, "billing")
    check(any("The window of" in line and "Change:" in line for line in said), f"what is said: {said}")
    if known_s < inf:
        longest_s = max(known_s, facts.redrive_s or 0.0)
        equal(window_warnings(facts, round(longest_s * 1.1e6), "billing"), [], "warnings of a longer window")


@condition
async def doctor_names_what_explain_names(suite: Conditions) -> None:
    """A broker that gives messages up by itself: each weakness is a finding of both, with a fix."""
    facts = await suite.probe_of_hasty_broker()
    check(facts.deliveries_max is not None, "the broker's own limit of deliveries is read")
    weaknesses = [*facts.weaknesses, *of_patience(facts, LEASE_US)]
    check(
        any(
            f"gives a message up after {facts.deliveries_max} deliveries" in each.what for each in weaknesses
        ),
        f"explain names the limit: {weaknesses}",
    )
    found = {each.what: each for each in of_source(facts, 0.0, LEASE_US)}
    for each in weaknesses:
        check(each.what in found, f"doctor does not name: {each.what}")
        check(bool(each.fix) and found[each.what].fix == each.fix, f"a fix is named: {each.what}")
        check(found[each.what].level in ("warning", "error"), f"the level of: {each.what}")
