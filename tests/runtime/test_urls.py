"""Options in URLs: every store, cache, source and sink reads them alike, and refuses them in the same words."""

from collections.abc import Callable
from typing import Any, Literal

import pytest
from msgspec import Struct

from semel.brokers.source import source_for
from semel.errors import PolicyInvalid
from semel.outbox.sinks import sink_for
from semel.runtime.urls import read_options, struct_options
from semel.stores import store_for
from semel.stores.tiered import tiered

KINDS = {"name": str, "count": int, "wait_s": float, "strict": bool, "start": Literal["first", "last"]}


class Options(Struct, kw_only=True):
    stream: str
    wait_s: float = 1.0


def open_cache(url: str) -> Any:
    return tiered(cache=url, truth="memory:")


Open = Callable[[str], Any]
URLS: list[tuple[Open, str, str]] = [
    (store_for, "memory:?compact=true", "records_max"),
    (store_for, "sqlite:///x.db?adopt=true", "busy_wait_s"),
    (store_for, "postgresql://u:s3cret@h/db?pool_max=2", "schema"),
    (store_for, "redis://u:s3cret@h?prefix=a", "answer_s"),
    (store_for, "https://:s3cret@h?answer_s=1", "token_file"),
    (store_for, "tiered:?cache=memory:&truth=memory:&cache_window=1h", "cache_window"),
    (open_cache, "memory:?copies_max=5", "bytes_max"),
    (open_cache, "redis://u:s3cret@h?prefix=a", "answer_s"),
    (source_for, "kafka://h/t?group=g", "tombstones"),
    (source_for, "amqp://u:s3cret@h?queue=q", "prefetch"),
    (source_for, "nats://u:s3cret@h?stream=s&durable=d", "deadline_s"),
    (source_for, "sqs://eu-west-1/q?dead=d", "endpoint"),
    (source_for, "redis://u:s3cret@h?stream=s&group=g", "trim_s"),
    (sink_for, "kafka://h?topic=t", "topic"),
    (sink_for, "amqp://u:s3cret@h?exchange=x", "routing_key"),
    (sink_for, "nats://u:s3cret@h?subject=s", "subject"),
    (sink_for, "sqs://eu-west-1/q?endpoint=http://h", "region"),
    (sink_for, "redis://u:s3cret@h?stream=s", "length_max"),
]


def refusal_of(open_url: Open, url: str) -> str:
    with pytest.raises(PolicyInvalid) as refused:
        open_url(url)
    assert "s3cret" not in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize(
    ("open_url", "url", "known"), URLS, ids=[f"{o.__name__} {u[:8]}" for o, u, _ in URLS]
)
def test_every_url_refuses_options_in_the_same_words(open_url: Open, url: str, known: str) -> None:
    open_url(url)
    scheme = url.partition(":")[0]
    unknown = refusal_of(open_url, f"{url}&nonsense=1")
    assert unknown.startswith(f"{scheme}: has no option nonsense; its options are ")
    assert known in unknown
    near = refusal_of(open_url, f"{url}&{known}x=1")
    assert near.startswith(f"{scheme}: has no option {known}x; did you mean {known}? Its options are ")
    repeated = url.partition("?")[2].partition("&")[0]
    name = repeated.partition("=")[0]
    assert refusal_of(open_url, f"{url}&{repeated}") == f"{scheme}: has the option {name} twice; give it once"
    assert refusal_of(open_url, f"{url}&loose") == f"{scheme}: write options as ?name=value&name=value"


def test_texts_become_what_they_mean() -> None:
    url = "x://h?name=&count=12&wait_s=1.5&strict=Yes&start=last"
    assert read_options(url, KINDS) == {
        "name": "",
        "count": 12,
        "wait_s": 1.5,
        "strict": True,
        "start": "last",
    }
    assert read_options("x://h", KINDS, given={"count": 3}) == {"count": 3}
    assert read_options("x://h?sslmode=a%20b", KINDS, others={"sslmode"}) == {"sslmode": "a b"}


@pytest.mark.parametrize(
    ("option", "advice"),
    [
        ("count=1.5", "x: count is '1.5'; it must be a whole number"),
        ("wait_s=soon", "x: wait_s is 'soon'; it must be a number"),
        ("strict=", "x: strict is ''; it must be true or false"),
        ("start=middle", "x: start is 'middle'; it must be first or last"),
        ("name=a#b", "x: a URL ends with its options; write # as %23"),
    ],
)
def test_a_wrong_value_says_what_is_right(option: str, advice: str) -> None:
    assert refusal_of(lambda url: read_options(url, KINDS), f"x://h?{option}") == advice


def test_a_value_given_by_name_is_checked_too() -> None:
    with pytest.raises(PolicyInvalid, match="start is 'middle'; it must be first or last"):
        read_options("x://h", KINDS, given={"start": "middle"})
    with pytest.raises(PolicyInvalid, match="has the option count twice"):
        read_options("x://h?count=1", KINDS, given={"count": 2})
    with pytest.raises(PolicyInvalid, match="has no option cont; did you mean count"):
        read_options("x://h", KINDS, given={"cont": 2})


def test_a_required_option_is_asked_for() -> None:
    assert struct_options("x://h?stream=a", Options) == Options(stream="a")
    with pytest.raises(PolicyInvalid, match="x: needs the option stream"):
        struct_options("x://h?wait_s=3", Options)
