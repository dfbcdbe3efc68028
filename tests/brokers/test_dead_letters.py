"""`semel dlq` on every broker: listed, shown, replayed, and those who work are not disturbed."""

import asyncio
import json
import zlib
from pathlib import Path
from typing import Any

import pytest

import semel
from semel.brokers import Arrival, Route, Runner
from semel.brokers.dead_letters import DeadLetter, headers_of, letter_for, replay
from semel.brokers.source import DeadLetterInfo
from semel.policy import Policy
from semel.testing.broker_contract import Sent
from tests.audits import audit_entries
from tests.brokers.places import Made, fifo, kafka, nats, rabbitmq, redis, sqs, work_queue
from tests.cli.processes import semel as semel_program
from tests.cli.processes import warm
from tests.waiting import until

__all__ = ["warm"]  # a fixture


@pytest.mark.slow
@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("made", [redis, nats, kafka, rabbitmq, sqs, fifo])
def test_dead_letters_are_listed_shown_and_replayed(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    asyncio.run(scene(made, tmp_path))


async def scene(made: Made, folder: Path) -> None:
    broker, url = await made()
    ran: list[tuple[str, bytes]] = []
    broken = True

    async def charge(message: Arrival) -> None:
        if broken:
            raise ValueError("no")
        ran.append((semel.current().key, message.body))

    async def dlq(*arguments: str) -> tuple[int, Any]:
        ended = await asyncio.to_thread(semel_program, "dlq", *arguments, "--from", url, cwd=folder)
        return ended.returncode, json.loads(ended.stdout) if ended.stdout else ended.stderr.decode()

    async def work() -> None:
        policy = semel.Policy(permanent=(ValueError,))
        async with semel.aopen(f"sqlite:///{folder}/a.db", consumer="billing", policy=policy) as once:
            runner = Runner(broker.source(), [Route(charge, once=once)])
            running = asyncio.create_task(runner.run())
            async with asyncio.timeout(60):
                while await broker.count_unsettled():  # noqa: ASYNC110 - the broker's own word counts
                    await asyncio.sleep(0.1)
            runner.stop()
            await running

    await broker.send([Sent("a", b'{"n":1}', lane="l"), Sent("b", b'{"n":2}', lane="l")])
    await work()
    code, listed = await dlq("list", "--json")
    letters = {letter["key"]: letter for letter in listed["dead"]}
    assert (code, set(letters)) == (0, {"a", "b"})
    assert {(each["reason"], each["error"]) for each in letters.values()} == {("failed", "ValueError: no")}
    code, shown = await dlq("show", letters["a"]["id"], "--json")
    assert (code, shown["body"], "Traceback" in shown["stack"]) == (0, '{"n":1}', True)
    assert (await dlq("replay", "nonsense", "--store", "sqlite:///a.db"))[0] == 5
    code, said = await dlq("replay", letters["a"]["id"], "--store", "sqlite:///a.db")
    assert (code, "published again" in said) == (0, True)
    (written,) = audit_entries(f"sqlite:///{folder}/a.db")
    assert (written.action, written.details["consumer"], written.details["key"]) == (
        "dlq replay",
        "billing",
        "a",
    )
    assert (written.details["letter"], "@" in written.actor) == (letters["a"]["id"], True)
    code, listed = await dlq("list", "--json")
    assert [letter["key"] for letter in listed["dead"]] == ["b"], "the other letter stays"
    broken = False
    await work()
    assert ran == [("a", b'{"n":1}')], "the same key as before, once"
    code, said = await dlq("drop", listed["dead"][0]["id"], "--yes", "--store", "sqlite:///a.db")
    assert (code, "dropped" in said) == (0, True)
    assert [each.action for each in audit_entries(f"sqlite:///{folder}/a.db")] == ["dlq replay", "dlq drop"]
    code, listed = await dlq("list", "--json")
    assert not listed["dead"]
    await work()
    assert len(ran) == 1, "its message is lost"
    await broker.close()


@pytest.mark.slow
@pytest.mark.parametrize(("made", "size"), [(work_queue, 1_048_300), (sqs, 262_100), (fifo, 262_100)])
def test_a_body_near_the_limit_is_replayed_as_it_was(
    made: Made, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    body = json.dumps(["naïve", "x" * (size - 16)], ensure_ascii=False).encode()
    ran: list[tuple[str, bytes]] = []
    broken = True

    async def charge(message: Arrival) -> None:
        if broken:
            raise ValueError("no")
        ran.append((semel.current().key, bytes(message.body)))

    async def scene() -> None:
        nonlocal broken
        broker, _ = await made()
        policy = semel.Policy(permanent=(ValueError,), retry_delay_s=0.05)
        async with semel.aopen("memory:", consumer="billing", policy=policy) as once:

            async def work() -> None:
                runner = Runner(broker.source(), [Route(charge, once=once)])
                running = asyncio.create_task(runner.run())
                await until(lambda: runner.counts.acked)
                runner.stop()
                await running

            await broker.send([Sent("a", body)])
            await work()
            source: Any = broker.source()
            await source.open()
            [dead] = await source.look(10)
            assert (dead.letter.key, dead.letter.error, dead.body) == ("a", "ValueError: no", body)
            await replay(source, dead, once)
            await source.close()
            broken = False
            await work()
        await broker.close()

    asyncio.run(scene())
    assert ran == [("a", body)], "the same key as before, once"


def test_a_body_is_decompressed_only_if_semel_can_have_compressed_it() -> None:
    letter = DeadLetterInfo(reason="failed", consumer="c", body_encoding="zlib")
    headers = headers_of(letter)
    assert DeadLetter.from_message("1", headers, zlib.compress(b"body")).body == b"body"
    bomb = zlib.compress(bytes(70 * 1024 * 1024), 1)
    for foreign in (b"", b"no zlib", zlib.compress(b"body")[:-1], bomb):
        assert DeadLetter.from_message("1", headers, foreign).body == foreign
    assert DeadLetter.from_message("1", {}, zlib.compress(b"body")).body == zlib.compress(b"body")


def test_a_letter_has_only_the_kind_if_no_errors_are_kept() -> None:
    letter = letter_for("failed", "billing", "evt_1", ValueError("card 4242"), Policy(keep_errors=False))
    assert letter.error == "builtins.ValueError: the message was not kept"
    assert letter.stack == ""
    assert "4242" in letter_for("failed", "billing", "evt_1", ValueError("card 4242"), Policy()).error
