"""The server dies before its log is on disk: a claim that was not waited for is gone, everything else is there."""

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from semel.core.commands import Claim, Granted, Known, Lookup, Mark, Marked, Settle
from semel.observe.explain import explain
from semel.stores.postgres import PostgresStore, from_url
from semel.types import Absent, Busy, Completed, Lost
from tests.faults.table import ONCE, POWER_FAILS, TWICE
from tests.services import postgres
from tests.services.postgres import Own

SECOND_US = 10**6
DAY_US = 86_400 * SECOND_US


@pytest.fixture
def own() -> Iterator[Own]:
    with postgres.own() as mine:
        yield mine


def claim(key: str, **more: Any) -> Claim:
    return Claim(("", "c", key), os.urandom(16), 600 * SECOND_US, DAY_US, **more)


def settle(item: Claim, granted: Any) -> Settle:
    return Settle(item.id, item.owner, granted.fence, "done", b"j1", DAY_US)


def keep_the_log_in_memory(own: Own) -> None:
    """Stop everything that writes the log to disk, except commits that are waited for."""
    postgres.execute(own.url, "ALTER SYSTEM SET autovacuum = off")
    postgres.execute(own.url, "SELECT pg_reload_conf()")
    ((writer,),) = postgres.execute(
        own.url, "SELECT pid FROM pg_stat_activity WHERE backend_type = 'walwriter'"
    )
    os.kill(writer, signal.SIGSTOP)


def was_waited_for(own: Own, store: PostgresStore, items: list[Any]) -> bool:
    """Send claims or a settle, and return whether their commit was on disk when they were answered."""
    ((before,),) = postgres.execute(own.url, "SELECT pg_current_wal_insert_lsn()::text")
    assert all(isinstance(answer, Granted | Completed) for answer in store.send(items))
    ((waited,),) = postgres.execute(own.url, f"SELECT pg_current_wal_flush_lsn() > '{before}'::pg_lsn")
    return bool(waited)


@pytest.mark.slow
def test_only_claims_that_were_not_waited_for_are_lost(own: Own) -> None:
    waiting, hasty = PostgresStore(own.url), PostgresStore(own.url, durable_claims=False)
    hasty.send([claim("consumer")])  # so that the consumer is known, and single claims take their short way
    waiting.send([claim("consumer 2")])
    keep_the_log_in_memory(own)

    done = claim("done")
    (granted,) = hasty.send([done])
    assert was_waited_for(own, hasty, [settle(done, granted)])
    many = [claim("done 1"), claim("done 2")]
    assert was_waited_for(own, hasty, [settle(*each) for each in zip(many, hasty.send(many), strict=True)])
    assert hasty.send([Mark("", "m", ["mark"], DAY_US)]) == [Marked([True])]
    kept = {
        "waited for": (waiting, [claim("waited for")]),
        "waited for, many": (waiting, [claim("waited for, many"), claim("of two")]),
        "quarantined": (hasty, [claim("quarantined", quarantine=True), claim("beside it")]),
        "journaled": (hasty, [claim("journaled", journal=b"payload")]),
    }
    assert {name: was_waited_for(own, *each) for name, each in kept.items()} == dict.fromkeys(kept, True)
    lost = [claim("single"), claim("one of two"), claim("two of two"), claim("alone")]
    grants = [*hasty.send(lost[:1]), *hasty.send(lost[1:3]), *hasty.send(lost[3:])]
    assert all(isinstance(answer, Granted) for answer in grants)
    waiting.close()
    hasty.close()
    own.restart(signal.SIGKILL)
    hasty.open()

    known = hasty.send([claim("done"), claim("done 1"), claim("done 2")])
    assert [type(each) for each in known] == [Known] * 3
    assert hasty.send([Mark("", "m", ["mark"], DAY_US)]) == [Marked([False])]
    for _, items in kept.values():
        assert all(isinstance(answer, Busy) for answer in hasty.send([claim(item.id[2]) for item in items]))
    assert [type(each) for each in hasty.send([Lookup(item.id) for item in lost])] == [Absent] * 4
    # Another worker runs the event before the lease of the first is over: the first learns that at its end.
    single, alone = lost[0], lost[3]
    again = claim("single")
    (second,) = hasty.send([again])
    assert isinstance(second, Granted)
    assert second.fence > grants[0].fence
    assert isinstance(hasty.send([settle(single, grants[0])])[0], Lost)
    assert isinstance(hasty.send([settle(again, second)])[0], Completed)
    # Nobody else came: the completion is recorded without its claim.
    assert isinstance(hasty.send([settle(alone, grants[3])])[0], Completed)
    assert isinstance(hasty.send([claim("alone")])[0], Known)
    hasty.close()
    # What the page says about it.
    assert POWER_FAILS["before the effect; the worker goes on, and the event comes again"] == (ONCE, TWICE)
    assert POWER_FAILS["before the effect; the worker goes on alone"] == (ONCE, ONCE)
    assert POWER_FAILS["after the completion"] == (ONCE, ONCE)


@pytest.mark.parametrize(("mode", "told"), [("lease", 1), ("quarantine", 0), ("mark", 0), ("inbox", 0)])
def test_explain_says_what_a_power_failure_costs(mode: Any, told: int) -> None:
    url = "postgresql://localhost/app?durable_claims=false"
    said = explain(from_url(url), mode, window_us=DAY_US, lease_us=SECOND_US).weaknesses
    found = [each for each in said if "durable_claims=False" in each.what]
    assert [each.breaks for each in found] == [False] * told
    default = explain(from_url("postgresql://localhost/app"), mode, window_us=DAY_US, lease_us=SECOND_US)
    assert not any("durable_claims" in each.what for each in default.weaknesses)
