"""What is asked of a server before it is used: who it is, what it would forget, and whether it may be trusted."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import semel
from semel.errors import PolicyInvalid, StoreRefused, StoreUnavailable, UsageError
from semel.observe.explain import explain
from semel.stores.redis import RedisStore, from_url
from semel.stores.redis.server_checks import version_text
from tests.services import redis, server
from tests.stores.redis.tools import claim, finish, kinds, opened
from tests.stores.shells import InLoop

Opened = Callable[..., contextlib.AbstractContextManager[Any]]


@pytest.fixture(params=["sync", "async"])
def either(request: pytest.FixtureRequest) -> Opened:
    """Opens a store of either colour."""

    @contextlib.contextmanager
    def either(url: str, **options: Any) -> Iterator[Any]:
        store: Any = RedisStore(url, **options)
        if request.param == "async":
            store = InLoop(store.twin())
        try:
            store.open()
            yield store
        finally:
            store.close()

    return either


# --- TLS ----------------------------------------------------------------------------------------


def test_a_server_with_tls_is_trusted_by_its_authority(either: Opened, tmp_path: Path) -> None:
    with redis.own(tmp_path, redis.OwnWithTls, tls_auth_clients="no") as own:
        with either(own.url, ca_file=str(own.certificate)) as store:
            finish(store, "key")
            assert kinds(store.send([claim("key")])) == ["Known"]
        with pytest.raises(StoreUnavailable, match=r"(?i)certificate"), either(own.url):
            pass
        with either(own.url, verify=False) as store:
            assert kinds(store.send([claim("key")])) == ["Known"]
        plain = own.url.replace("rediss:", "redis:")
        with pytest.raises(StoreUnavailable), either(plain, answer_s=1.0, connect_s=1.0):
            pass


def test_a_certificate_for_another_host_is_not_enough(either: Opened, tmp_path: Path) -> None:
    class Elsewhere(redis.OwnWithTls):
        def start(self) -> None:
            redis.certify(self.folder / "server.crt", self.folder / "server.key", "DNS:elsewhere.example")
            super().start()

        def _answers(self) -> bool:
            return b"Ready to accept connections" in (self.folder / "log").read_bytes()

    with (
        redis.own(tmp_path, Elsewhere, tls_auth_clients="no") as own,
        pytest.raises(StoreUnavailable, match="cannot be reached"),
        either(own.url, ca_file=str(own.certificate)),
    ):
        pass


def test_a_server_may_want_our_certificate(either: Opened, tmp_path: Path) -> None:
    with redis.own(tmp_path, redis.OwnWithTls, tls_auth_clients="yes") as own:
        key = own.folder / "server.key"
        mine = {"cert_file": str(own.certificate), "key_file": str(key)}
        with either(own.url, ca_file=str(own.certificate), **mine) as store:
            finish(store, "key")
        with pytest.raises(StoreUnavailable), either(own.url, ca_file=str(own.certificate)):
            pass
    with pytest.raises(PolicyInvalid, match="both cert_file and key_file"):
        from_url("rediss://localhost?cert_file=a.pem")


# --- what it is ---------------------------------------------------------------------------------


def test_a_replica_is_refused(either: Opened, tmp_path: Path) -> None:
    with (
        redis.own(tmp_path) as master,
        redis.own(tmp_path, replicaof=f"127.0.0.1 {master.port}") as replica,
        pytest.raises(StoreRefused, match="is a replica"),
        either(replica.url),
    ):
        pass


def test_a_node_of_a_cluster_is_refused(either: Opened, tmp_path: Path) -> None:
    with (
        redis.own(tmp_path, cluster_enabled="yes", cluster_port=str(server.free_port())) as node,
        pytest.raises(StoreRefused, match=r"redis\+cluster"),
        either(node.url),
    ):
        pass


@pytest.mark.parametrize(
    ("settings", "found", "said"),
    [
        ({"appendfsync": "always"}, ("aof", "always"), "nothing either"),
        ({"appendfsync": "everysec"}, ("aof", "everysec"), "the last second or two"),
        ({"appendfsync": "no"}, ("aof", "no"), "up to half a minute"),
        ({"appendonly": "no", "save": "3600 1"}, ("rdb", ""), "snapshots only"),
        ({"appendonly": "no"}, ("none", ""), "no persistence"),
    ],
)
def test_what_the_server_would_forget_is_told(
    tmp_path: Path, settings: dict[str, Any], found: tuple[str, str], said: str
) -> None:
    with redis.own(tmp_path, **settings) as own, opened(own.url) as store:
        facts = store.facts()
        assert (facts.persistence, facts.fsync) == found
        assert said in facts.costs[0]
        assert store.capabilities.durable is (found[0] == "aof")


def test_a_cluster_tells_its_state(tmp_path: Path) -> None:
    with opened(redis.cluster(tmp_path)) as store:
        facts = store.facts()
        assert (facts.cluster, facts.masters) == ("ok", 3)


def test_explain_prints_what_was_found(tmp_path: Path) -> None:
    """Also of a store that is closed by now, as on the command line."""
    with redis.own(tmp_path, maxmemory_policy="allkeys-lru") as own:
        with opened(own.url, allow_eviction=True, marks="compact") as store:
            pass
        told = explain(store, "mark", window_us=10**12, lease_us=1)
        said = [weakness.what for weakness in told.weaknesses]
        assert any("eviction (allkeys-lru)" in text for text in said)
        assert any("1 in 10^16" in text for text in said)
        assert not told.holds
    with redis.own(tmp_path) as own:
        with opened(own.url) as store:
            pass
        assert explain(store, "lease", window_us=10**12, lease_us=1).holds


# --- journals -----------------------------------------------------------------------------------


def test_a_journal_needs_a_server_that_lasts(tmp_path: Path) -> None:
    """Already at the first call, before which nothing is known of the server."""
    delivery = semel.Delivery(key="key", body="b", journal="payload")
    uses: list[Callable[[semel.Semel], object]] = [
        lambda once: once.claim("key", journal="payload"),
        lambda once: once.claim_many([delivery]),
        lambda once: once.run_many([delivery], print),
    ]
    with redis.own(tmp_path, appendonly="no") as own:
        for use in uses:
            with semel.open(own.url, consumer="c") as once, pytest.raises(UsageError, match="journal"):
                use(once)
        assert own.ask("KEYS", "semel:{*}:*") == []
    with redis.own(tmp_path) as own, semel.open(own.url, consumer="c") as once:
        assert isinstance(once.claim("key", journal="payload"), semel.Claimed)


@pytest.mark.anyio
async def test_a_journal_needs_a_server_that_lasts_in_a_loop_too(tmp_path: Path) -> None:
    with redis.own(tmp_path, appendonly="no") as own:
        once = semel.aopen(own.url, consumer="c")
        with pytest.raises(UsageError, match="journal"):
            await once.claim("key", journal="payload")
        await once.close()
        once = semel.aopen(own.url, consumer="c")
        with pytest.raises(UsageError, match="journal"):
            await once.claim_many([semel.Delivery(key="key", body="b", journal="payload")])
        await once.close()
        assert own.ask("KEYS", "semel:{*}:*") == []


def test_valkey_is_called_by_its_own_version() -> None:
    told = {"redis_version": "7.2.4", "valkey_version": "8.1.1"}
    assert version_text(told) == "Valkey 8.1.1"
    assert version_text({"redis_version": "7.2.4"}) == "Redis 7.2.4"
