"""Instances that are killed, stopped and woken while records flow; local state is wiped. Every id is there once."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.cli.processes import ROOT, environment
from tests.streams.scene import Stream, end, kill
from tests.waiting import WITHIN_S, await_true

pytestmark = [pytest.mark.slow, pytest.mark.service]

SOAK = "SEMEL_SOAK" in os.environ
SETTLE_S = 120.0


@pytest.fixture
def stream(tmp_path: Path) -> Iterator[Stream]:
    made = Stream(tmp_path, partitions=4)
    yield made
    made.close()


def deliveries(events: int, chance: random.Random) -> list[str]:
    """Ids with a third of copies, near and far."""
    ids = [f"e{n}" for n in range(events)]
    mixed = [*ids, *chance.sample(ids, events // 3)]
    chance.shuffle(mixed)
    return mixed


def is_settled(stream: Stream, ids: set[str]) -> bool:
    return set(stream.passed()) == ids


def storm(stream: Stream, events: int, kills: int) -> None:
    """Two instances, one of them killed again and again, its state wiped every second time."""
    chance = random.Random(11)
    sent = deliveries(events, chance)
    share = -(-len(sent) // (kills + 1))
    instances = [stream.start("--batch", "200", state=f"s{n}") for n in range(2)]
    try:
        for number in range(kills):
            seen = len(stream.read(isolation="read_uncommitted")) if _exists(stream) else 0
            stream.send(*sent[number * share : (number + 1) * share])
            # Killed amid work: some of what was just sent is written, committed or not.
            assert await_true(lambda seen=seen: _exists(stream) and _ends(stream) > seen, WITHIN_S)  # type: ignore[misc]
            victim = number % 2
            kill(instances[victim])
            if number % 2:
                shutil.rmtree(stream.folder / f"s{victim}", ignore_errors=True)
            instances[victim] = stream.start("--batch", "200", state=f"s{victim}")
        stream.send(*sent[kills * share :])
        assert await_true(lambda: is_settled(stream, set(sent)), SETTLE_S)
        for each in instances:
            said = end(each)
            assert each.returncode in (0, -signal.SIGTERM), said  # one of them may still be starting
    finally:
        for each in instances:
            kill(each)
    assert Counter(stream.passed()) == Counter(set(sent)), "lost or twice"


def _exists(stream: Stream) -> bool:
    return stream.output in stream.admin.list_topics(timeout=30).topics


def _ends(stream: Stream) -> int:
    return len(stream.read(isolation="read_uncommitted"))


@pytest.mark.timeout(0 if SOAK else 300)
@pytest.mark.usefixtures("every_kafka")
def test_two_instances_killed_with_9_and_their_state_wiped(stream: Stream) -> None:
    storm(stream, *((100_000, 20) if SOAK else (1500, 3)))


@pytest.mark.usefixtures("every_kafka")
def test_a_stopped_instance_that_wakes_up_after_others_took_over_writes_nothing(stream: Stream) -> None:
    ids = [f"e{n}" for n in range(40)]
    stream.send(*ids)
    stalled = stream.folder / "stalled"
    arguments = [stream.url, stream.output, str(stream.folder / "zombie"), str(stalled)]
    zombie = subprocess.Popen(
        [sys.executable, "-m", "tests.streams.worker", *arguments],
        cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert await_true(stalled.exists, WITHIN_S)
        with stream.running() as other:
            assert await_true(lambda: _exists(stream) and is_settled(stream, set(ids)), WITHIN_S)
            zombie.send_signal(signal.SIGCONT)
            stream.send("later")
            assert await_true(lambda: "later" in stream.passed(), WITHIN_S)
            end(other)
        stream.send(*ids, "last")
        assert await_true(lambda: "last" in stream.passed(), WITHIN_S), (
            "it works again, as a member like any other"
        )
        zombie.send_signal(signal.SIGTERM)
        said, told = zombie.communicate(timeout=60)
    finally:
        kill(zombie)
    assert Counter(stream.passed()) == Counter([*ids, "later", "last"]), told
    assert json.loads(said)["aborts"] >= 1, "its transaction was refused"


def test_partitions_move_while_records_flow(stream: Stream) -> None:
    chance = random.Random(3)
    sent = deliveries(900, chance)
    with ExitStack() as stack:
        stream.send(*sent[:400])
        first = stack.enter_context(stream.running())
        assert await_true(lambda: _exists(stream) and len(stream.passed()) > 0, WITHIN_S)
        second = stack.enter_context(stream.running())
        stream.send(*sent[400:800])
        assert await_true(lambda: is_settled(stream, set(sent[:800])), SETTLE_S)
        assert "received" in end(first, signal.SIGINT)
        assert first.returncode == 130
        stream.send(*sent[800:], *sent[:200])
        assert await_true(lambda: is_settled(stream, set(sent)), SETTLE_S)
        end(second)
    assert stream.run(state="third").counts.passed == 0
    assert Counter(stream.passed()) == Counter(set(sent))
