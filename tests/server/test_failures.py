"""What fails is grouped, counted and acted on in bulk: asked first, written down, and never another tenant's."""

import asyncio
import html
import re
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import redis

import semel
from semel.brokers.source import Arrival, DeadLetterInfo, source_for
from semel.core.commands import Claim, Settle
from semel.errors import UsageError
from semel.outbox.message import Message
from semel.runtime.process import new_owner
from semel.server.app import create_app
from semel.server.dashboard import snapshots
from semel.server.dashboard.auth import COOKIE
from semel.server.settings import ServeSettings
from semel.stores.sqlite import SqliteStore
from semel.testing import ManualClock
from semel.types import Done, ErrorInfo
from tests.server.scenes import some_workers, troubles
from tests.server.test_dashboard_acts import OURS, audit, post
from tests.server.tools import Running, serving, session_of, token_for
from tests.services import redis as redis_service
from tests.waiting import await_true

WITHIN_S = 60.0
DAY_US = 86400 * 10**6


@pytest.fixture
def place(tmp_path: Path) -> str:
    """A store with failures of three hours."""
    troubles(tmp_path / "semel.db")
    return f"sqlite:///{tmp_path}/semel.db?synchronous=normal"


@pytest.fixture
def running(place: str) -> Iterator[Running]:
    with serving(ServeSettings(auth="none", store=place, port=0)) as made:
        yield made


def text_of(running: Running, path: str, **headers: str) -> str:
    """A page as text, with what it says in attributes left out."""
    answer = running.client.get(f"/ui/{path}", headers=headers, timeout=WITHIN_S)
    assert answer.status_code == 200, answer.text
    return re.sub(r"\s+", " ", html.unescape(re.sub("<[^>]*>", " ", answer.text)))


def as_of(running: Running) -> str:
    """The time at which the page of failures was counted."""
    found = re.search(r'name="as_of" value="(\d+)"', running.client.get("/ui/failures").text)
    assert found is not None
    return found[1]


def badge(running: Running) -> int:
    found = re.search(r'data-count="failing"[^>]*>([\d,]+)<', running.client.get("/ui/events").text)
    assert found is not None
    return int(found[1].replace(",", ""))


def test_failures_are_grouped_by_consumer_and_error(running: Running) -> None:
    told = text_of(running, "failures")
    for group in (
        "3 events Undecided wallet httpx.ReadTimeout no answer from the ledger within 10 s",
        "12 events Given up billing shop.bank.CardRefused",
        "31 events Failing billing shop.bank.Unavailable the bank answered 503",
        "1 event Journal expired billing no receiver runs it",
        "1 event Given up warehouse KeyError 'sku'",
    ):
        assert group in told, (group, told)
    assert "web-2:312:77aa01f3" in told
    assert "All 52 Undecided 3 Given up 13 Journal expired 1 Failing 35" in told
    assert badge(running) == 52
    assert told.index("Undecided wallet") < told.index("Given up billing") < told.index("Failing billing")
    only = text_of(running, "failures?consumer=billing&kind=shop.bank.CardRefused")
    assert "12 events" in only
    assert "31 events" not in only


def test_forgetting_a_group_leaves_the_others_and_what_has_changed_since(
    running: Running, place: str
) -> None:
    before = as_of(running)
    held = running.claim(
        "ord_2026117801"
    )  # one of those that wait: it fails once more after the page was made
    assert held["outcome"] == "claimed"
    running.end("release", held["claim"], kind="shop.bank.Unavailable", error="again")
    group = f"status=waiting&tenant=&consumer=billing&kind=shop.bank.Unavailable&as_of={before}"
    assert post(running, "failures", f"verb=resolve&{group}")[0] == 422
    assert post(running, "failures", f"verb=forget&{group.replace('as_of=', 'x=')}")[0] == 422
    status, location = post(running, "failures", f"verb=forget&{group}")
    assert status == 303
    assert location == "/ui/failures?done=forget&count=30&changed=0&left=0"
    told = text_of(running, location.removeprefix("/ui/"))
    assert "30 events forgotten: the next delivery runs. It is in the audit." in told
    assert "1 event Failing billing shop.bank.Unavailable again" in told
    assert "12 events Given up billing" in told
    assert audit(running).count(" forget consumer billing key ord_20261178") == 30
    with semel.open(place, consumer="billing") as billing:
        record = billing.records.lookup("ord_2026117801")
        assert record is not None
        assert record.attempt == 2


def test_undecided_events_are_resolved_together_with_a_value(running: Running, place: str) -> None:
    group = f"status=unknown&consumer=wallet&kind=httpx.ReadTimeout&as_of={as_of(running)}"
    assert post(running, "failures", f"verb=resolve&to=done&value=%7Bnot+json&{group}")[0] == 422
    assert post(running, "failures", f"verb=resolve&{group}")[0] == 422
    assert text_of(running, "failures").count("3 events Undecided wallet") == 1
    form = f"verb=resolve&to=done&value=%7B%22receipt%22%3A+7%7D&{group}"
    assert post(running, "failures", form)[1].startswith("/ui/failures?done=resolve&count=3&")
    with semel.open(place, consumer="wallet", mode="quarantine") as wallet:
        assert wallet.run("ord_2026117700", dict[str, int]) == Done({"receipt": 7}, replayed=True)
    assert audit(running).count("resolve to done consumer wallet") == 3


def test_one_undecided_event_takes_a_value_and_says_where_it_must_come_from(
    running: Running, place: str
) -> None:
    store = SqliteStore(place.partition(":///")[2].partition("?")[0])
    store.open()
    some_workers(store)
    store.close()
    shown = text_of(running, "event/wallet/ord_2026117701")
    assert "It happened?" in shown
    assert "the queue, producer or HTTP client that sent it must deliver it again" in shown
    running.client.get("/ui/consumer/billing")
    assert await_true(
        lambda: "it must be delivered again from orders" in text_of(running, "event/billing/ord_2026117750"),
        WITHIN_S,
    )
    with semel.open(place, consumer="wallet", mode="quarantine") as wallet:
        record = wallet.records.lookup("ord_2026117701")
        assert record is not None
        form = f"to=done&fence={record.fence}&value=%22paid%22"
        assert post(running, "decide/wallet/ord_2026117701", form)[0] == 303
        assert wallet.run("ord_2026117701", str) == Done("paid", replayed=True)


def test_a_claim_is_released_by_hand_and_its_worker_is_refused(running: Running) -> None:
    held = running.claim("stuck")
    running.client.get("/ui/failures")
    path = "release/billing/stuck"
    fence = re.search(r'name="fence" value="(\d+)"', running.client.get("/ui/event/billing/stuck").text)
    assert fence is not None
    assert post(running, path, f"fence={fence[1]}")[0] == 409
    assert post(running, path, "fence=1&force=yes")[0] == 409
    assert post(running, path, f"fence={fence[1]}&force=yes")[0] == 303
    assert running.end("complete", held["claim"], value=1)["outcome"] == "lost"
    assert "release consumer billing key stuck" in audit(running)
    again = running.claim("stuck")
    assert (again["outcome"], again["attempt"]) == ("claimed", 2)
    assert "released by hand" in text_of(running, "event/billing/stuck")


def test_claims_of_silent_workers_are_released_together(tmp_path: Path) -> None:
    minute_ago = ManualClock(time.time_ns() // 1000 - 60 * 10**6)
    store = SqliteStore(tmp_path / "semel.db", clock=minute_ago)
    store.open()
    store.send([Claim(("", "billing", f"k{at}"), new_owner(), 10**6, DAY_US) for at in range(3)])
    store.close()
    with serving(ServeSettings(auth="none", store=f"sqlite:///{tmp_path}/semel.db", port=0)) as running:
        told = text_of(running, "failures")
        assert "3 events Worker silent billing its worker went silent" in told
        assert "Silent 3: the lease is over" in text_of(running, "flight")
        group = f"status=silent&consumer=billing&kind=its+worker+went+silent&as_of={as_of(running)}"
        assert post(running, "failures", f"verb=release&{group}")[1].startswith(
            "/ui/failures?done=release&count=3&"
        )
        assert audit(running).count("release consumer billing") == 3
        assert await_true(lambda: "Waiting for a retry 3 released" in text_of(running, "flight"), WITHIN_S)


def test_what_runs_and_what_waits_are_lists_of_their_own_and_all_counts_agree(running: Running) -> None:
    for key in ("a", "b"):
        running.claim(key)
    assert await_true(lambda: "Running 2, the oldest first" in text_of(running, "flight"), WITHIN_S)
    told = text_of(running, "flight")
    assert "Waiting for a retry 35 released" in told
    assert "smtplib.SMTPServerDisconnected" in told
    assert "not before" in told
    assert "Counted at" in told
    live = running.client.get("/ui/parts/flight").text
    shown = running.client.get("/ui/parts/held").text
    at = re.compile(r'datetime="([^"]+)" data-clock')
    if at.findall(live) == at.findall(shown):  # the same snapshot
        assert re.search(r"claimed</span></a></dt><dd>3<", shown)  # two that run, one journaled
        assert re.search(r"released</span></a></dt><dd>35<", shown)
    header = re.search(r'data-count="in_flight">(\d+)<', running.client.get("/ui/flight").text)
    assert header is not None
    assert header[1] == "2"


def test_of_too_many_failures_some_are_shown_and_all_are_counted(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "ROWS_MAX", 5)
    with serving(ServeSettings(auth="none", store=place, port=0)) as running:
        told = text_of(running, "failures")
        assert "too many to list" in told
        assert re.search(r"\d\+ events Given up billing", told)  # at least as many
        assert "Given up 13" in told


def test_stuck_messages_of_the_outbox_are_failures(running: Running, tmp_path: Path) -> None:
    with semel.open(f"sqlite:///{tmp_path}/semel.db", consumer="shop", mode="inbox") as shop:
        connection = sqlite3.connect(tmp_path / "semel.db", isolation_level=None)
        connection.execute("BEGIN")
        for name in ("first", "second"):
            shop.outbox(connection).publish(Message("order.placed", {"n": 1}), name=name)
        connection.execute("COMMIT")
        connection.execute("UPDATE semel_outbox SET state = 2, error = 'refused' WHERE name = 'first'")
        connection.execute(
            "UPDATE semel_outbox SET created_at = created_at - 3600000000 WHERE name = 'second'"
        )
        connection.close()
    told = text_of(running, "failures")
    assert "1 message Outbox, given up" in told
    assert "refused" in told
    assert "1 message Outbox, stuck" in told
    assert "is semel relay running?" in told
    assert "Outbox 2" in told
    checked = text_of(running, "parts/doctor")
    assert "error outbox 1 message was given up" in checked
    assert checked.index("error outbox") < checked.index("ok connection"), "trouble first"


def test_a_journaled_event_is_tried_again_by_its_receiver(running: Running, place: str) -> None:
    store = SqliteStore(place.partition(":///")[2].partition("?")[0])
    store.open()
    claimed, owner = ("", "ticks", "tick_1"), new_owner()
    (granted,) = store.send((Claim(claimed, owner, 10**7, DAY_US, journal=b"j{}"),))
    error = ErrorInfo("builtins.ValueError", "unknown currency")
    store.send((Settle(claimed, owner, granted.fence, "released", error=error),))
    store.close()
    assert "next try by its receiver, now 1 journaled" in text_of(running, "failures?consumer=ticks")
    assert "ticks journaled 1 by its receiver, now ValueError" in text_of(running, "flight")
    assert "1 with its next delivery" in text_of(running, "flight"), "others wait for their sender"


# --- dead letters -----------------------------------------------------------------------------------


class Stream:
    """A stream of Redis whose consumer gave some messages up."""

    def __init__(self, name: str) -> None:
        self.url = f"{redis_service.place('streams').partition('?')[0]}?stream={name}&group=g"
        self.name = name

    def bury(self, *letters: DeadLetterInfo) -> None:
        async def write() -> None:
            source = source_for(self.url)
            await source.open()
            try:
                for letter in letters:
                    headers = {"message_id": letter.key}
                    arrival = Arrival(transport="redis", headers=headers, body=b"{}", position="0-1")
                    await source.dead_letter(arrival, letter)
            finally:
                await source.close()

        asyncio.run(write())

    def messages(self) -> list[Any]:
        with redis.Redis.from_url(self.url.partition("?")[0]) as client:
            return [fields[b"message_id"].decode() for _, fields in client.xrange(self.name)]


def letter(key: str, fence: int = 0, **more: str) -> DeadLetterInfo:
    told: dict[str, Any] = {
        "reason": "failed",
        "error": "app.Refused: no such card",
        "at": "2026-11-17T09:00:00+00:00",
    }
    return DeadLetterInfo(consumer="billing", key=key, fence=fence, **told | more)


def test_dead_letters_are_listed_and_replayed(place: str, tmp_path: Path) -> None:
    stream = Stream(f"t-{new_owner().hex()}")
    settings = ServeSettings(auth="none", store=place, port=0, dead_letters=(stream.url,))
    with semel.open(place, consumer="billing") as billing:
        record = billing.records.lookup("ord_2026117750")
        assert record is not None
    stream.bury(
        letter("ord_2026117750", record.fence),
        letter("ord_2026117751", 1),  # settled since
        letter("odd", reason="mismatch", error=""),
    )
    with serving(settings) as running:
        told = text_of(running, "failures")
        assert "2 letters Dead letters billing" in told
        assert "app.Refused no such card" in told
        assert "needs a new key" in told
        assert "2 dead letters" in told
        assert "Dead letters 3" in told
        assert "2 dead letters are of an event above, and count once" in told
        assert badge(running) == 53  # two of the letters are of events that were given up

        assert "among the dead letters of" in text_of(running, "event/billing/ord_2026117750")
        assert post(running, "dead-letters", "source=redis://elsewhere")[0] == 422
        status, location = post(
            running,
            "dead-letters",
            f"source={quote(stream.url)}&consumer=billing&reason=failed&kind=app.Refused",
        )
        assert (status, location) == (303, "/ui/failures?done=replay&count=1&changed=1&left=0")
        told = text_of(running, location.removeprefix("/ui/"))
        assert "1 dead letter published again." in told
        assert "1 letter was refused" in told
        assert "1 letter Dead letters billing" in told
        assert stream.messages() == ["ord_2026117750"]
        assert running.claim("ord_2026117750")["outcome"] == "claimed"
        assert "dlq replay consumer billing key ord_2026117750" in audit(running)

        form = f"verb=drop&source={quote(stream.url)}&consumer=billing"  # what is settled would stay for ever
        assert post(running, "dead-letters", f"{form}&reason=failed&kind=app.Refused")[1].startswith(
            "/ui/failures?done=drop&count=1&changed=0"
        )
        status, location = post(running, "dead-letters", f"{form}&reason=mismatch&kind=")
        assert (status, location) == (303, "/ui/failures?done=drop&count=1&changed=0&left=0")
        told = text_of(running, location.removeprefix("/ui/"))
        assert "1 dead letter dropped. It is in the audit." in told
        assert "Dead letters billing" not in told
        assert "dlq drop consumer billing key ord_2026117751" in audit(running)
        assert stream.messages() == ["ord_2026117750"], "nothing was published"


def test_a_broker_that_cannot_be_read_is_reported_and_a_wrong_url_refused(place: str) -> None:
    away = "redis://:wrench7@127.0.0.1:1/0?stream=s&group=g"
    with serving(ServeSettings(auth="none", store=place, port=0, dead_letters=(away,))) as running:
        told = text_of(running, "failures")
        assert "12 events Given up billing" in told
        assert await_true(lambda: "The broker cannot be read" in text_of(running, "failures"), WITHIN_S)
        assert "wrench7" not in running.client.get("/ui/failures").text
    with pytest.raises(UsageError, match="there is no source for gopher"):
        create_app(ServeSettings(auth="none", store=place, dead_letters=("gopher://x",)))


# --- tenants and roles ------------------------------------------------------------------------------


def fail(store: SqliteStore, tenant: str, key: str, to: Any) -> None:
    claimed, owner = (tenant, "billing", key), new_owner()
    (granted,) = store.send((Claim(claimed, owner, 10**7, DAY_US, quarantine=to == "unknown"),))
    error = ErrorInfo("app.Refused", f"secret of {tenant}", worker=f"host-of-{tenant}:1:ff")
    store.send((Settle(claimed, owner, granted.fence, to, None, DAY_US, 10**7, error=error),))


def test_a_tenant_neither_sees_nor_touches_what_is_another_s(tmp_path: Path) -> None:
    stream = Stream(f"t-{new_owner().hex()}")
    stream.bury(letter("a-letter"))
    store = SqliteStore(tmp_path / "semel.db", synchronous="NORMAL")
    store.open()
    for tenant in ("acme", "rival"):
        for to in ("failed", "unknown", "released"):
            fail(store, tenant, f"{tenant}-{to}", to)
    who = {
        "rival": token_for(store, "rival", "admin")[0],
        "acme reads": token_for(store, "acme", "read")[0],
        "all read": token_for(store, None, "read")[0],
    }
    store.close()
    settings = ServeSettings(store=f"sqlite:///{tmp_path}/semel.db", port=0, dead_letters=(stream.url,))
    with serving(settings) as running:
        cookies = {name: f"{COOKIE}={session_of(running, token)}" for name, token in who.items()}
        pages = (
            "failures",
            "parts/failures",
            "flight",
            "events",
            "consumer/billing",
            "parts/workers/billing",
            "",
        )
        for path in (
            *pages,
            "failures?consumer=billing",
            "consumer/billing?tenant=acme",
            "parts/tail?tail_prefix=a",
        ):
            shown = running.client.get(f"/ui/{path}", headers={"cookie": cookies["rival"]}).text
            assert "acme" not in shown, path
            assert "a-letter" not in shown
            assert stream.name not in shown
        own = text_of(running, "failures", cookie=cookies["rival"])
        assert "All 3 " in own
        assert "secret of rival" in own
        now = "9" * 16
        for verb, status in (("forget", "failed"), ("resolve&to=absent", "unknown"), ("forget", "waiting")):
            form = f"verb={verb}&status={status}&tenant=acme&consumer=billing&kind=app.Refused&as_of={now}"
            answer = running.client.post(
                "/ui/failures", content=form, headers=OURS | {"cookie": cookies["rival"]}
            )
            assert "count=1&" in answer.headers["location"]  # its own
        assert (
            running.client.post(
                "/ui/dead-letters", content="source=redis://x", headers=OURS | {"cookie": cookies["rival"]}
            ).status_code
            == 403
        )
        for name, seen in (("acme reads", 3), ("all read", 4)):
            told = running.client.get("/ui/failures", headers={"cookie": cookies[name]}).text
            assert f"All</a> <b>{seen}" in told or re.search(rf"All <b>{seen}</b>", told)
            for hidden in ("secret of", "acme-failed", "a-letter", "as_of", "no such card"):
                assert hidden not in told, (name, hidden)
            assert "app.Refused" in told
            assert "#" in told
    with semel.open(f"sqlite:///{tmp_path}/semel.db", consumer="billing", tenant="acme") as billing:
        assert {record.key for record in billing.records.list()} == {
            f"acme-{to}" for to in ("failed", "unknown", "released")
        }


def test_the_live_list_is_filtered_and_tells_readers_no_keys(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "semel.db", synchronous="NORMAL")
    store.open()
    admin, reader = token_for(store, "", "admin")[0], token_for(store, "", "read")[0]
    store.close()
    with serving(ServeSettings(store=f"sqlite:///{tmp_path}/semel.db", port=0), admin) as running:
        for key in ("order-1", "order-1", "mail-2"):
            held = running.claim(key)
            if held["outcome"] == "claimed":
                running.end("complete", held["claim"], value=1)
        cookies = {
            name: f"{COOKIE}={session_of(running, token)}"
            for name, token in (("admin", admin), ("read", reader))
        }

        def rows(query: str, who: str = "admin") -> list[str]:
            shown = running.client.get(f"/ui/parts/tail?{query}", headers={"cookie": cookies[who]}).text
            return re.findall(r'<span class="state (\w+)">', shown)

        assert rows("tail_prefix=order-") == ["duplicate", "done", "claimed"]
        assert rows("tail_what=done") == ["done", "done"]
        assert rows("tail_consumer=other") == []
        assert rows("tail_prefix=nothing", "read") == rows("", "read") != []
        shown = running.client.get("/ui/events", headers={"cookie": cookies["read"]}).text
        assert "order-1" not in shown
        assert "tail_prefix" not in shown


def test_search_finds_keys_that_begin_with_a_key(running: Running) -> None:
    for key in ("k1", "k10", "k11"):
        running.claim(key)
    assert "Keys that begin with it" in text_of(running, "events?q=k1")
    told = text_of(running, "events?q=k1&begins=yes")
    assert "3 events with keys that begin with it" in told
