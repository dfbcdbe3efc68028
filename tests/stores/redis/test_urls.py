"""URLs, options, and what must never be shown."""

import pytest

import semel
from semel.core.protocols import AsyncStore, HasAsyncTwin, Store
from semel.errors import PolicyInvalid, StoreUnavailable
from semel.stores.redis import AsyncRedisStore, RedisStore, from_url
from semel.stores.registry import store_for
from tests.services.server import free_port

SECRET = "s3cret-w%40rd"


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("redis://localhost", "redis://localhost:6379/0"),
        ("redis://localhost:7000/3", "redis://localhost:7000/3"),
        ("rediss://example.org/1", "rediss://example.org:6379/1"),
        ("valkey://localhost/2?prefix=a", "valkey://localhost:6379/2"),
        ("redis://[::1]:7000", "redis://[::1]:7000/0"),
        ("redis+cluster://a:1,b,c:3", "redis+cluster://a:1,b:6379,c:3"),
        ("redis+sentinel://a,b:2/main/4", "redis+sentinel://a:26379,b:2/main/4"),
        (f"redis://user:{SECRET}@localhost/0", "redis://localhost:6379/0"),
    ],
)
def test_a_url_names_a_store(url: str, name: str) -> None:
    store = store_for(url)
    assert isinstance(store, Store)
    assert isinstance(store, HasAsyncTwin)
    assert store.name == name
    twin = store.twin()
    assert isinstance(twin, AsyncStore)
    assert twin.name == name
    assert "s3cret" not in repr(store) + repr(twin) + str(store.name)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("redis://localhost?prefx=a", "did you mean prefix"),
        ("redis://localhost?nonsense=1", "its options are prefix"),
        ("redis://localhost?allow_eviction=perhaps", "true or false"),
        ("redis://localhost?wait_replicas=many", "must be a whole number"),
        ("redis://localhost?wait_replicas=-1", "between 0 and"),
        ("redis://localhost?on_store_lost=cry", "continue or fail"),
        ("redis://localhost?prefix=a{b}", "prefix is"),
        ("redis://localhost?prefix=a*", "prefix is"),
        ("redis://localhost?prefix=a&prefix=b", "twice"),
        ("redis://localhost/zero", "a database is a number"),
        ("redis+cluster://localhost/1", "a cluster has only 0"),
        ("redis+sentinel://localhost", "does not name the master"),
        ("redis:///0", "not a Redis URL"),
        ("redis://a b:x", "is not a host"),
    ],
)
def test_a_wrong_url_says_what_is_wrong(url: str, message: str) -> None:
    with pytest.raises(PolicyInvalid, match=message):
        from_url(url)


def test_a_password_is_shown_nowhere() -> None:
    for url in (f"redis://:{SECRET}@localhost/x", f"redis://u:{SECRET}@localhost?nonsense=1"):
        with pytest.raises(PolicyInvalid) as raised:
            from_url(url)
        assert "s3cret" not in str(raised.value)
    store = RedisStore(f"redis://u:{SECRET}@127.0.0.1:{free_port()}/0", connect_s=1.0)
    with pytest.raises(StoreUnavailable) as unavailable:
        store.open()
    assert "s3cret" not in str(unavailable.value) + repr(unavailable.value.__cause__)
    with pytest.raises(PolicyInvalid) as refused:
        from_url("redis+sentinel://localhost/main?sentinel_password=s3cret&nonsense=1")
    assert "s3cret" not in str(refused.value)


def test_options_may_be_given_by_name() -> None:
    store = RedisStore("redis://localhost/0", prefix="mine", on_store_lost="fail")
    assert store._core.options.prefix == "mine"
    with pytest.raises(PolicyInvalid, match="twice"):
        RedisStore("redis://localhost/0?prefix=a", prefix="b")
    with pytest.raises(PolicyInvalid, match="did you mean"):
        AsyncRedisStore("redis://localhost/0", prefixx="b")


def test_opening_does_no_io() -> None:
    once = semel.open(f"redis://127.0.0.1:{free_port()}/0", consumer="billing")
    with pytest.raises(StoreUnavailable, match="cannot be reached"):
        once.claim("key")
    once.close()
