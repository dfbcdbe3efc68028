"""Which sources of workers can be read with the addresses that the service has."""

from semel.observe.workers import SeenWorker
from semel.server.dashboard.known_sources import sort_sources


def seen(*urls: str) -> list[SeenWorker]:
    """One worker with these sources."""
    return [SeenWorker(host="h", pid=1, version="1", consumers=(), in_flight=0, seen_us=1, urls=urls)]


def test_a_source_on_the_server_of_the_store_is_read_with_its_password() -> None:
    found, missing = sort_sources(
        seen("redis://:***@cache:6379/1?stream=orders&group=billing"), (), "redis://:secret@cache:6379/0"
    )
    assert found == ["redis://:secret@cache:6379/1?stream=orders&group=billing"]
    assert not missing


def test_a_source_on_another_server_is_named_once() -> None:
    url = "redis://other:6379/0?stream=orders&group=billing"
    assert sort_sources(seen(url, url), (), "postgresql://db/app") == ([], [url])
    assert sort_sources(seen(url), (), "rediss://other:6379/0") == ([], [url])


def test_a_listed_source_is_not_read_twice() -> None:
    listed = "redis://:secret@cache:6379/1?stream=orders&group=billing&deadline_s=5"
    same = "redis://:***@cache:6379/1?stream=orders&group=billing"
    assert sort_sources(seen(same), (listed,), "sqlite:///x.db") == ([], [])


def test_what_is_no_source_here_is_only_named() -> None:
    assert sort_sources(seen("carrier-pigeon://loft"), (), "sqlite:///x.db") == (
        [],
        ["carrier-pigeon://loft"],
    )
    queue = "sqs://eu-central-1/orders"
    assert sort_sources(seen(queue), ("sqs://eu-central-1/other",), "sqlite:///x.db") == ([], [queue])
