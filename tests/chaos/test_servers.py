"""Chaos on stores and brokers with servers: the proxy cuts them off, and brokers redeliver by themselves."""

import uuid
from collections.abc import Callable
from contextlib import closing
from typing import Any

import psycopg
import pytest
import redis

from semel.errors import PolicyInvalid
from semel.testing.chaos.brokers import KafkaTopic
from semel.testing.pytest_plugin import Chaos
from tests.chaos import handlers
from tests.services import kafka, postgres
from tests.services import redis as redis_servers

pytestmark = [pytest.mark.slow, pytest.mark.service]

LEASE_S = 1.0


def test_redis_is_cut_off_and_loses_replies(chaos: Chaos, tmp_path: object) -> None:
    report = chaos(
        handlers.charge, store=redis_servers.place(tmp_path), effects=handlers.count, lease_s=LEASE_S
    )
    report.check()
    assert not report.lost
    assert {"store cut off", "reply lost", "kill", "pause", "ack lost"} <= set(report.faults_by_kind)
    assert report.not_injected == []


@pytest.mark.parametrize("handler", [handlers.credit, handlers.acredit])
def test_an_inbox_on_postgresql_has_every_effect_once(
    chaos: Chaos, tmp_path: object, handler: Callable[..., Any]
) -> None:
    with psycopg.connect(postgres.url(), autocommit=True) as connection:
        connection.execute("CREATE TABLE IF NOT EXISTS credits (event TEXT)")
    report = chaos(
        handler,
        mode="inbox",
        store=postgres.place(tmp_path),
        effects="sql:SELECT event, count(*) FROM credits GROUP BY event",
        lease_s=LEASE_S,
    )
    report.check(strict=True)
    assert {"store cut off", "reply lost", "kill", "pause"} <= set(report.faults_by_kind)


def test_a_stream_of_redis_delivers_again_by_itself(chaos: Chaos, tmp_path: object) -> None:
    url = redis_servers.place(tmp_path)
    server = url.partition("?")[0]
    stream = f"orders-{uuid.uuid4().hex[:8]}"
    source = f"{server}?stream={stream}&group=billing"
    report = chaos(handlers.acharge, source=source, events=20, effects=handlers.count, lease_s=LEASE_S)
    report.check()
    assert not report.lost
    assert report.faults_by_kind["kill"] >= 4
    with redis.Redis.from_url(server) as client:
        assert client.xlen(stream) == 0
        client.xadd(stream, {"data": "1"})
    with pytest.raises(PolicyInvalid, match=f"the stream {stream} holds 1 messages"):
        chaos(handlers.acharge, source=source)


@pytest.mark.timeout(300)
def test_a_topic_of_kafka_delivers_again_by_itself(chaos: Chaos) -> None:
    from confluent_kafka.cimpl import NewTopic

    topic = f"orders-{uuid.uuid4().hex[:8]}"
    for made in kafka.admin().create_topics([NewTopic(topic, 3, 1)]).values():
        made.result(60)
    source = f"kafka://{kafka.servers()}/{topic}?group={topic}"
    report = chaos(
        handlers.charge, source=source, events=8, faults=("kill",), effects=handlers.count, lease_s=LEASE_S
    )
    report.check()
    assert not report.lost
    assert report.faults_by_kind["kill"] >= 3
    with pytest.raises(PolicyInvalid, match="--effects"):
        chaos(handlers.charge, source=source, sink="keyed")
    with closing(KafkaTopic(source)) as emptied:
        assert emptied.count() == 0
