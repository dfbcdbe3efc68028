"""A batch of items over HTTP: in order, in both formats, and in parts that the server takes."""

import os
from pathlib import Path

from semel.core.commands import Admit, Claim, Count, Granted, Item, Known, Lookup, Settle
from semel.server.settings import Limits, ServeSettings
from semel.stores.http import encoding
from semel.stores.http.store import HttpStore
from semel.types import Busy, Completed, Record
from tests.server.tools import Running, serving


def claim(key: str, lease_us: int = 30 * 10**6) -> Claim:
    return Claim(("", "billing", key), os.urandom(16), lease_us, 10**9)


def test_items_on_one_record_are_carried_out_in_order(service: Running) -> None:
    store = HttpStore(service.address)
    first = claim("ordered")
    (granted,) = store.send([first])
    done = Settle(first.id, first.owner, granted.fence, "done", b"jnull", 10**9, first.lease_us)
    answers = store.send([claim("ordered"), done, claim("ordered"), Lookup(first.id)])
    assert [type(each) for each in answers] == [Busy, Completed, Known, Record]
    store.close()


def test_both_formats_say_the_same(service: Running) -> None:
    items: list[Item] = [claim("formats"), Admit("", "billing", "lease"), Count("")]
    packed = service.client.post(
        "/v1/items",
        content=encoding.batch_of([encoding.encode_item(each) for each in items]),
        headers={"content-type": encoding.ITEMS_MSGPACK},
    )
    assert packed.headers["content-type"] == encoding.ITEMS_MSGPACK
    json = service.post("/v1/items", [{"type": "lookup", "id": ["", "billing", "formats"]}])
    assert json.headers["content-type"] == "application/json"
    granted, mode, stats = encoding.answers_from(packed.content)
    (record,) = encoding.answers_from(json.content, packed=False)
    assert (record.fence, record.owner, mode) == (granted.fence, items[0].owner, "lease")  # type: ignore[union-attr]
    assert stats.consumers["billing"] >= 1


def test_a_large_batch_goes_in_parts(tmp_path: Path) -> None:
    limits = Limits(body_bytes_max=64 * 1024, batch_items_max=100)
    with serving(
        ServeSettings(auth="none", store=f"sqlite:///{tmp_path}/semel.db", port=0, limits=limits)
    ) as running:
        store = HttpStore(running.address)
        assert all(isinstance(each, Granted) for each in store.send([claim(f"k{at}") for at in range(350)]))
        assert _count(running) == 4 + 1
        held = [claim(f"v{at}") for at in range(5)]
        ends = [
            Settle(each.id, each.owner, granted.fence, "done", b"r" + bytes(30_000), 10**9, each.lease_us)
            for each, granted in zip(held, store.send(held), strict=True)
        ]
        assert all(isinstance(each, Completed) for each in store.send(ends))
        store.close()


def _count(running: Running) -> int:
    """Requests for items so far, and this look."""
    page = running.client.get("/metrics").text
    line = next(each for each in page.splitlines() if 'requests_total{route="/v1/items"' in each)
    return int(float(line.rpartition(" ")[2])) + 1


def test_one_callers_lease_does_not_cost_another_its_claim(service: Running) -> None:
    store = HttpStore(service.address)
    refused, granted = store.send([claim("too long", 10**12), claim("fine")])
    assert isinstance(granted, Granted)
    assert "lease_us" in str(refused.error)
    store.close()
