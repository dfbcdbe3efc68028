"""`semel relay` and `semel outbox`, the real program."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from semel import Message
from tests.audits import audit_entries
from tests.cli.shell import Ended, Warm, environment, semel
from tests.outbox.tools import Place

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module", autouse=True)
def _end_the_warm_program() -> Iterator[None]:
    yield
    Warm.end()


def run(place: Place, *arguments: str) -> Ended:
    return semel(*arguments, cwd=place.path.parent)


def relay(place: Place, *more: str, to: str = "stdout:") -> Ended:
    return run(place, "relay", "--from", place.url, "--to", to, "--until-empty", *more)


def test_a_relay_prints_what_waits(place: Place) -> None:
    ids = place.orders(2, 2)
    answer = relay(place)
    assert answer.code == 0, answer.err
    events = [json.loads(line) for line in answer.out.splitlines()]
    assert [event["id"] for event in events] == ids
    assert events[0]["data"] == {"order": 0, "n": 0}
    assert "Published 4;" in answer.err
    assert relay(place).out == ""


def test_dead_messages_are_listed_shown_retried_and_dropped(place: Place) -> None:
    first, second = place.orders(1, 2)
    nowhere = "http://127.0.0.1:9/hook"
    secret = place.path.parent / "secret"
    secret.write_text("whsec_" + "c2VjcmV0" * 4 + "\n")
    answer = relay(place, "--attempts", "1", "--private", "--secret-file", str(secret), to=nowhere)
    assert answer.code == 0, answer.err
    assert "1 message given up" in answer.err
    listed = run(place, "outbox", "list", "--store", place.url, "--json").json()["messages"]
    assert [(each["id"], each["state"], each["attempts"]) for each in listed] == [
        (first, "dead", 1),
        (second, "pending", 0),
    ]
    dead = run(place, "outbox", "list", "--store", place.url, "--dead")
    assert dead.out.split("\t")[:4] == [first, "order.moved", "dead", "1"]
    shown = run(place, "outbox", "show", first, "--store", place.url, "--json").json()
    assert shown["error"]
    assert shown["payload"] == '{"order":0,"n":0}'
    assert run(place, "outbox", "retry", second, "--store", place.url).code == 5
    assert run(place, "outbox", "retry", "--all", "--store", place.url).code == 0
    assert run(place, "outbox", "drop", first, "--store", place.url).code == 2
    assert run(place, "outbox", "drop", first, "--store", place.url, "--yes").code == 0
    written = audit_entries(place.url)
    assert [(each.action, each.details["ids"]) for each in written] == [
        ("outbox retry", second),
        ("outbox retry", "all that are dead"),
        ("outbox drop", first),
    ]
    assert all("@" in each.actor for each in written)
    printed = relay(place)
    assert [json.loads(line)["id"] for line in printed.out.splitlines()] == [second]
    done = run(place, "outbox", "list", "--store", place.url, "--all", "--json").json()["messages"]
    assert [each["state"] for each in done] == ["dropped", "published"]


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["outbox", "show", str(uuid4())], 5),
        (["outbox", "show", "nonsense"], 2),
        (["outbox", "retry"], 2),
        (["outbox", "drop"], 2),
        (["outbox", "list", "--dead", "--all"], 2),
        (["outbox", "list", "--store", "memory:"], 78),
        (["outbox", "list", "--store", "sqlite:///not-there.db"], 5),
        (["relay", "--to", "pigeon:"], 78),
        (["relay", "--to", "https://example.com/"], 78),
        (["relay", "--to", "https://example.com/", "--secret-file", "not-there"], 78),
    ],
)
def test_exit_codes(sqlite_place: Place, arguments: list[str], code: int) -> None:
    if "--store" not in arguments and arguments[0] == "outbox":
        arguments = [*arguments, "--store", sqlite_place.url]
    if arguments[0] == "relay":
        arguments = [*arguments, "--from", sqlite_place.url]
    answer = run(sqlite_place, *arguments)
    assert answer.code == code, answer.err
    assert "Traceback" not in answer.err


def test_sigterm_drains(sqlite_place: Place, tmp_path: Path) -> None:
    sqlite_place.write(Message("one"))
    process = subprocess.Popen(
        [sys.executable, "-m", "semel", "relay", "--from", sqlite_place.url, "--to", "stdout:"],
        cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert json.loads(process.stdout.readline())["type"] == "one"
    sqlite_place.write(Message("two"))
    assert json.loads(process.stdout.readline())["type"] == "two"
    process.send_signal(signal.SIGTERM)
    _, words = process.communicate(timeout=60)
    assert process.returncode == 0, words
    assert "Published 2;" in words
