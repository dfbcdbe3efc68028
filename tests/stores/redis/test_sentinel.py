"""Behind sentinels: the master dies, its replica takes over, and nothing that reached it is lost."""

import asyncio
import signal
from pathlib import Path
from typing import Any

import pytest

from semel.core.commands import Granted
from semel.stores.redis import RedisStore
from semel.types import Completed
from tests.services import redis, server
from tests.stores.redis.tools import claim, done, kinds, opened
from tests.stores.shells import InLoop
from tests.waiting import await_true


@pytest.mark.slow
@pytest.mark.parametrize("colour", ["sync", "async"])
def test_a_failover_goes_unnoticed_but_for_its_time(tmp_path: Path, colour: str) -> None:
    with redis.trio(tmp_path) as trio:
        store: Any = RedisStore(trio.url, wait_replicas=1, wait_replicas_s=2.0, retry_s=5.0)
        if colour == "async":
            store = InLoop(store.twin())
        store.open()
        inner = getattr(store, "inner", store)
        try:
            facts = inner.facts() if colour == "sync" else store._wait(inner.facts())
            assert facts.replicas == 1
            assert any("failover" in cost for cost in facts.costs)
            keys = [f"key {number}" for number in range(50)]
            claims = [claim(key) for key in keys]
            answers = store.send(claims)
            ends = store.send([done(held, one) for held, one in zip(claims, answers, strict=True)])
            assert all(isinstance(end, Completed) for end in ends)
            assert inner.unreplicated == 0
            server.end(trio.pids[0], signal.SIGKILL)
            held = claim("after")
            found: list[Granted] = []

            def try_once() -> bool:
                (answer,) = store.send([held])
                if isinstance(answer, Granted):
                    found.append(answer)
                return bool(found)

            assert await_true(try_once, 30)
            assert found[0].attempt == 1
            assert kinds(store.send([claim(key) for key in keys])) == ["Known"] * 50
            assert inner.stores_lost == 0
            assert inner._core.map.masters == (("127.0.0.1", trio.replica),)
        finally:
            store.close()


def test_sentinels_that_know_no_such_master_say_so(tmp_path: Path) -> None:
    from semel.errors import StoreUnavailable

    with redis.trio(tmp_path) as trio:
        with pytest.raises(StoreUnavailable, match="no sentinel names a working master"):
            RedisStore(trio.url.replace(redis.SERVICE, "another")).open()
        with opened(trio.url) as store:
            assert kinds(store.send([claim("key")])) == ["Granted"]
            asyncio.run(_in_a_loop(store))


async def _in_a_loop(store: RedisStore) -> None:
    twin = store.twin()
    await twin.aopen()
    assert kinds(await twin.asend([claim("key")])) == ["Busy"]
    await twin.aclose()
