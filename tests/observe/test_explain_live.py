"""What `explain` says of servers that are really set up wrong, and of sources that do not fit."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from semel.observe.explain import Explanation, explain
from semel.observe.probes import SourceFacts, SourceProbe, probe, weaknesses, window_warnings
from semel.stores.registry import store_for
from tests.cli.shell import semel
from tests.services import postgres, redis
from tests.waiting import await_true

HOUR = 3600 * 10**6
DAY = 24 * HOUR


def explained(url: str, **options: Any) -> Explanation:
    store: Any = store_for(url)
    store.open()
    try:
        given = {"window_us": DAY, "lease_us": 30 * 10**6, "live": weaknesses(store), **options}
        return explain(store, "lease", **given)
    finally:
        store.close()


def told(result: Explanation, words: str) -> tuple[bool, str]:
    """Whether what is said with these words breaks the table, and what to change."""
    (weakness,) = [each for each in result.weaknesses if words in each.what]
    return weakness.breaks, weakness.fix


# --- Redis --------------------------------------------------------------------------------------


def test_redis_that_evicts(tmp_path: Path) -> None:
    with redis.own(tmp_path, maxmemory_policy="allkeys-lru", maxmemory="50mb") as own:
        result = explained(f"{own.url}?allow_eviction=true")
        assert told(result, "eviction (allkeys-lru)")[0] is True
        assert "noeviction" in told(result, "eviction (allkeys-lru)")[1]
        assert not result.holds
        answer = semel(
            "explain", "--store", f"{own.url}?allow_eviction=true", "--require", "lease", cwd=tmp_path
        )
        assert answer.code == 1
        refused = semel("explain", "--store", own.url, cwd=tmp_path)
        assert refused.code == 78
        assert "evicts keys" in refused.err


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"appendonly": "no", "save": ""}, "no persistence"),
        ({"appendonly": "no", "save": "60 1"}, "snapshots only"),
    ],
)
def test_redis_that_forgets(tmp_path: Path, settings: dict[str, Any], words: str) -> None:
    with redis.own(tmp_path, **settings) as own:
        result = explained(own.url)
    assert told(result, words) == (True, "CONFIG SET appendonly yes")
    assert not result.satisfies("lease")


def test_redis_that_lasts(tmp_path: Path) -> None:
    with redis.own(tmp_path) as own:
        result = explained(own.url)
    assert result.holds
    assert result.satisfies("lease")


@pytest.fixture
def followed(tmp_path: Path) -> Iterator[tuple[Any, Any]]:
    """A master and its replica."""
    with redis.own(tmp_path) as master, redis.own(tmp_path, replicaof=f"127.0.0.1 {master.port}") as replica:
        assert await_true(lambda: b"state=online" in info(master) and b"offset=0" not in info(master), 30)
        yield master, replica


def info(own: Any) -> bytes:
    said = own.ask("INFO", "replication")
    return (
        json.dumps(said).replace('"', "").replace(": ", "=").encode()
        if isinstance(said, dict)
        else bytes(said)
    )


def test_a_redis_replica_follows_behind(followed: tuple[Any, Any]) -> None:
    master, replica = followed
    store: Any = store_for(master.url)
    store.open()
    try:
        (seen,) = probe(store).replicas
        assert seen.name == f"127.0.0.1:{replica.port}"
        assert not seen.synchronous
    finally:
        store.close()
    result = explained(master.url)
    assert told(result, "follows behind")[0] is False
    assert "wait_replicas" in told(result, "follows behind")[1]


def test_who_waits_for_a_redis_replica_is_told_what_is_left(followed: tuple[Any, Any]) -> None:
    """No advice that was followed already: settles are safe unless logged, claims are not."""
    master, _ = followed
    result = explained(f"{master.url}?wait_replicas=1")
    assert told(result, "only if they were logged as not replicated in time;") == (False, "")
    assert not any("behind" in weakness.what for weakness in result.weaknesses)
    result = explained(f"{master.url}?wait_replicas=2")
    assert told(result, "settles wait for 2 replicas") == (False, "")


# --- PostgreSQL ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def spoiled() -> Iterator[postgres.Own]:
    """A server of this module's own, to be started with bad settings."""
    with postgres.own() as own:
        yield own


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("synchronous_commit", "off", "synchronous_commit is off"),
        ("fsync", "off", "fsync is off"),
        ("full_page_writes", "off", "full_page_writes is off"),
    ],
)
def test_postgres_that_may_lose(spoiled: postgres.Own, name: str, value: str, words: str) -> None:
    assert explained(spoiled.url).holds
    spoiled.stop()
    spoiled.start(**{name: value})
    try:
        result = explained(spoiled.url)
        assert told(result, words)[0] is True
        assert name in told(result, words)[1]
        assert not result.satisfies("lease")
    finally:
        spoiled.restart()


def test_a_postgres_replica_follows_behind() -> None:
    with postgres.own() as own:
        explained(own.url)
        standby = own.standby(own.folder.parent / "standby")
        try:
            assert await_true(
                lambda: bool(
                    postgres.execute(own.url, "SELECT 1 FROM pg_stat_replication WHERE state = 'streaming'")
                ),
                30,
            )
            breaks, fix = told(explained(own.url), "follows behind")
            assert breaks is False
            assert "synchronous_standby_names" in fix
        finally:
            standby.stop()


# --- sources, keys, tenants ---------------------------------------------------------------------


def source(**facts: Any) -> SourceProbe:
    return SourceProbe(sources=(SourceFacts(**facts),))


def test_the_horizon_is_known_only_if_every_source_has_told_it() -> None:
    known, unknown = SourceFacts(horizon_s=60), SourceFacts()
    told = [SourceProbe(sources=each).horizon_known for each in ((), (known,), (unknown,), (known, unknown))]
    assert told == [False, True, False, False]


def test_a_window_that_is_off_is_warned_of() -> None:
    assert "the window is off" in window_warnings(SourceFacts(horizon_s=60), 0, "billing")[0]


@pytest.mark.parametrize(
    ("around", "words", "breaks"),
    [
        (source(horizon_s=14 * 86400), "for which the source may send again", True),
        (source(horizon_s=math.inf), "the source may send again for ever", True),
        (source(redrive_s=4 * 86400), "for which dead letters of the source may be put back", True),
        (source(deadline_s=10), "while the dead attempt's lease still runs, is turned away", False),
        (source(deadline_s=10, deliveries_max=3, buries="d"), "all of them within the lease", True),
        (source(deliveries_max=3), "puts it nowhere", True),
        (source(deliveries_max=30), "puts it nowhere", False),
        (source(deliveries_max=3, buries="dead"), "it goes to dead without", False),
        (source(content_ids=True), "hashes of the content", True),
        (SourceProbe(keys="content"), "hashes of the content", True),
        (SourceProbe(keys="position"), "positions in the source", False),
        (SourceProbe(tenants=True), "Several tenants share the consumer", True),
    ],
)
def test_what_does_not_fit_is_told(tmp_path: Path, around: SourceProbe, words: str, breaks: bool) -> None:
    url = f"sqlite:///{tmp_path}/events.db"
    assert told(explained(url, around=around), words)[0] is breaks
    suits = SourceFacts(horizon_s=86400, redrive_s=3600, deadline_s=30, deliveries_max=20, buries="dead")
    fits = SourceProbe(sources=(suits,), tenants=True, tenant="acme", keys="given")
    assert explained(url, around=fits).weaknesses == ()
    assert explained(url, around=fits).satisfies("lease")


def test_a_known_horizon_replaces_the_guess_of_a_day(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/events.db"
    guessed = explained(url, window_us=HOUR)
    assert told(guessed, "shorter than a day")[0] is False
    assert explained(url, window_us=HOUR, around=source(horizon_s=1800)).weaknesses == ()


@pytest.mark.parametrize(
    ("options", "words", "code"),
    [
        (
            ["--redelivers-for", "4d"],
            "The window of 24h is shorter than the 96h for which the source may send again",
            1,
        ),
        (["--redrive-after", "14d"], "dead letters of the source may be put back", 1),
        (["--visibility", "10s"], "The lease of 30s is longer than the 10s", 0),
        (["--keys", "content"], "hashes of the content", 1),
        (["--tenants"], "Several tenants", 1),
        (["--tenants", "--tenant", "acme"], "", 0),
    ],
)
def test_from_the_command_line(tmp_path: Path, options: list[str], words: str, code: int) -> None:
    answer = semel("explain", "--require", "lease", "--json", *options, cwd=tmp_path)
    assert answer.code == code
    assert words in answer.out
    fixes = [each["fix"] for each in answer.json()["weakened_by"]]
    assert all(fixes)


def test_the_fix_is_printed(tmp_path: Path) -> None:
    answer = semel("explain", "--redelivers-for", "4d", cwd=tmp_path)
    assert "Change: semel window set CONSUMER 106h" in answer.out


def test_a_wrong_duration_is_a_usage_error(tmp_path: Path) -> None:
    assert semel("explain", "--visibility", "soon", cwd=tmp_path).code == 2
