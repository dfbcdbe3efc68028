"""A filter never says "no" of what it saw within its window, and is wrong as often as it says."""

import logging
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semel.errors import PolicyInvalid, StoreRefused
from semel.stores.bloom import Bloom, Filter
from semel.stores.bloom.filter import _HEAD
from semel.testing import ManualClock

WINDOW_S = 90
SCALE = 10 if os.environ.get("SEMEL_SOAK") else 1


def ids(count: int, salt: int = 0) -> list[bytes]:
    chance = random.Random(salt)
    return [chance.randbytes(16) for _ in range(count)]


def made(clock: ManualClock, **options: Any) -> Bloom:
    known: dict[str, Any] = {"capacity": 1000, "window": WINDOW_S, "clock": clock}
    return Bloom(**(known | options))


# --- what it remembers --------------------------------------------------------------------------


@settings(max_examples=60 * SCALE, deadline=None)
@given(
    steps=st.integers(1, 7),
    waits=st.lists(st.integers(0, 40_000_000), min_size=1, max_size=30),
    start=st.integers(0, 10**9),
)
def test_nothing_inside_the_window_is_forgotten(steps: int, waits: list[int], start: int) -> None:
    clock = ManualClock(10**15 + start)
    bloom = made(clock, steps=steps)
    added: list[tuple[int, bytes]] = []
    for number, wait in enumerate(waits):
        clock.advance(us=wait)
        now = clock.now_us()
        live = [each for at, each in added if now - at < WINDOW_S * 10**6]
        assert all(bloom.maybe_many(live))
        each = number.to_bytes(16)
        bloom.add_many([each])
        added.append((now, each))


@pytest.mark.parametrize("steps", [1, 2, 3, 7])
def test_nor_at_the_very_end_of_it(steps: int) -> None:
    step_us = WINDOW_S * 10**6 // steps
    for offset in (0, 1, step_us // 2, step_us - 1):
        clock = ManualClock(step_us * 10**7 + offset)
        bloom = made(clock, steps=steps)
        bloom.add_many(ids(10))
        for _ in range(steps):  # it rotates at every chance it gets
            clock.advance(us=(WINDOW_S * 10**6 - 1) // steps)
            assert all(bloom.maybe_many(ids(10)))


def test_what_is_older_than_the_window_and_a_step_is_forgotten() -> None:
    clock = ManualClock()
    bloom = made(clock)
    bloom.add_many(ids(100))
    clock.advance(WINDOW_S + WINDOW_S / 3)
    assert not any(bloom.maybe_many(ids(100)))
    assert bloom.fullness().ids == 0


def test_a_clock_that_steps_back_forgets_nothing() -> None:
    clock = ManualClock()
    bloom = made(clock)
    bloom.add_many(ids(100))
    clock.step_back(10 * WINDOW_S)
    assert all(bloom.maybe_many(ids(100)))
    bloom.add_many(ids(100, 1))
    clock.advance(10 * WINDOW_S)  # and is set right again
    assert all(bloom.maybe_many(ids(100) + ids(100, 1)))
    clock.advance(WINDOW_S / 3)
    assert all(bloom.maybe_many(ids(100, 1)))


def test_generations_are_bounded() -> None:
    clock = ManualClock()
    bloom = made(clock, steps=3)
    for number in range(50):
        bloom.add_many(ids(10, number))
        clock.advance(WINDOW_S / 3)
    assert bloom.fullness().generations == 4


# --- how wrong it is ----------------------------------------------------------------------------


@pytest.mark.parametrize("error_rate", [0.01, 0.001])
def test_it_is_wrong_as_often_as_asked_for_and_takes_two_bytes_each(error_rate: float) -> None:
    clock = ManualClock()
    capacity = 60_000
    bloom = made(clock, capacity=capacity, error_rate=error_rate)
    held = 0
    for number in range(4):  # a full window, and the step that is on its way out
        bloom.add_many(ids(capacity // 3, number))
        held += capacity // 3
        clock.advance(WINDOW_S / 3 if number < 3 else 0)
    strangers = ids(200_000, 99)
    wrong = sum(bloom.maybe_many(strangers)) / len(strangers)
    full = bloom.fullness()
    assert wrong <= 1.5 * error_rate
    assert full.false_positive_ratio == pytest.approx(wrong, rel=0.35)
    assert full.ids == pytest.approx(held, rel=0.02)
    assert not full.saturated
    assert full.bytes_used / held <= 2.2


def test_more_than_it_is_made_for_is_told() -> None:
    bloom = made(ManualClock(), capacity=300)
    bloom.add_many(ids(100))
    assert not bloom.fullness().saturated
    bloom.add_many(ids(1000, 1))
    full = bloom.fullness()
    assert full.saturated
    assert full.false_positive_ratio > 0.05
    bloom.add_many(ids(100_000, 2))
    assert bloom.fullness().fill_ratio == 1.0
    assert all(bloom.maybe_many(ids(100)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"capacity": 0}, "capacity"),
        ({"capacity": 10**11}, "capacity"),
        ({"capacity": 1.5}, "capacity"),
        ({"capacity": True}, "capacity"),
        ({"error_rate": 0.0}, "error_rate"),
        ({"error_rate": 0.5}, "error_rate"),
        ({"error_rate": float("nan")}, "error_rate"),
        ({"steps": 0}, "steps"),
        ({"steps": 33}, "steps"),
        ({"window": 0.000001}, "longer"),
    ],
)
def test_settings_that_make_no_filter_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PolicyInvalid, match=message):
        made(ManualClock(), **options)


def test_only_digests_are_taken() -> None:
    bloom = made(ManualClock())
    with pytest.raises(PolicyInvalid, match="16 bytes"):
        bloom.add_many([b"short"])
    with pytest.raises(PolicyInvalid, match="16 bytes"):
        bloom.maybe_many([b"\0" * 17])
    assert bloom.maybe_many([]) == []
    assert isinstance(bloom, Filter)


# --- on disk ------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, ManualClock]:
    clock = ManualClock()
    bloom = made(clock, path=tmp_path / "seen.bloom")
    bloom.add_many(ids(50))
    clock.advance(WINDOW_S / 3)
    bloom.add_many(ids(50, 1))
    bloom.close()
    return tmp_path / "seen.bloom", clock


def test_what_was_saved_is_known_again(saved: tuple[Path, ManualClock]) -> None:
    path, clock = saved
    again = made(clock, path=path)
    again.open()
    assert all(again.maybe_many(ids(50) + ids(50, 1)))
    clock.advance(WINDOW_S - 1)
    assert all(again.maybe_many(ids(50, 1)))
    clock.advance(WINDOW_S)
    assert not any(made(clock, path=path).maybe_many(ids(50) + ids(50, 1)))


def test_another_process_hashes_alike(saved: tuple[Path, ManualClock]) -> None:
    """Python's own hash differs in every process."""
    path, clock = saved
    script = (
        "import random, sys; from semel.stores.bloom import Bloom; from semel.testing import ManualClock\n"
        f"bloom = Bloom(capacity=1000, window={WINDOW_S}, clock=ManualClock({clock.now_us()}), path=sys.argv[1])\n"
        "chance = random.Random(0); print(sum(bloom.maybe_many([chance.randbytes(16) for _ in range(50)])))"
    )
    env = {**os.environ, "PYTHONHASHSEED": "1234"}
    told = subprocess.run(
        [sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=True, env=env
    )
    assert told.stdout.strip() == "50"


def test_a_file_with_a_byte_changed_or_cut_off_is_never_trusted(
    saved: tuple[Path, ManualClock], caplog: pytest.LogCaptureFixture
) -> None:
    path, clock = saved
    whole = path.read_bytes()
    places = [*range(10, _HEAD.size + 40), len(whole) // 2, len(whole) - 1]
    broken = [whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in places]
    broken += [b"", whole[:5], whole[: _HEAD.size], whole[:-1], whole + b"\0"]
    for content in broken:
        path.write_bytes(content)
        bloom = made(clock, path=path)
        with caplog.at_level(logging.WARNING, "semel"):
            bloom.open()
        assert bloom.damaged
        assert not any(bloom.maybe_many(ids(50)))
    assert "begins empty" in caplog.text


def test_another_file_is_refused_and_left_as_it_is(saved: tuple[Path, ManualClock], tmp_path: Path) -> None:
    path, clock = saved
    foreign = tmp_path / "letter.txt"
    foreign.write_text("Dear reader, this is no filter at all, and must not be overwritten.")
    with pytest.raises(StoreRefused, match="not a filter of semel"):
        made(clock, path=foreign).open()
    with pytest.raises(StoreRefused, match="not a filter of semel"):
        made(clock, path=foreign).add_many(ids(1))
    assert foreign.read_text().startswith("Dear reader")
    with pytest.raises(StoreRefused, match=r"other settings .*capacity 1000.* not capacity 999"):
        made(clock, path=path, capacity=999).open()
    content = bytearray(path.read_bytes())
    content[8:10] = b"\0\2"
    path.write_bytes(content)
    with pytest.raises(StoreRefused, match="another version"):
        made(clock, path=path).open()
    with pytest.raises(StoreRefused, match="cannot be read"):
        made(clock, path=tmp_path).open()


def test_a_save_that_fails_leaves_the_old_file(
    saved: tuple[Path, ManualClock], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, clock = saved
    before = path.read_bytes()
    bloom = made(clock, path=path)
    bloom.add_many(ids(10, 5))

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            bloom.save()
    assert path.read_bytes() == before
    assert [each.name for each in path.parent.iterdir()] == [path.name]
    bloom.save()
    assert path.read_bytes() != before
    with pytest.raises(PolicyInvalid, match="no path"):
        made(clock).save()


# --- filled at once -----------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 3, 7])
def test_a_window_of_ids_at_once_keeps_the_error_rate(steps: int) -> None:
    clock = ManualClock(10**15)
    bloom = made(clock, steps=steps, capacity=20_000, error_rate=0.01)
    known = ids(20_000)
    bloom.add_many(known)
    assert all(bloom.maybe_many(known))
    wrong = sum(bloom.maybe_many(ids(20_000, salt=1)))
    assert wrong < 20_000 * 0.01 * 1.5, f"{wrong} of 20,000 new ids look known"
    bloom.add_many(known)  # the same again takes no room
    assert bloom.fullness().generations <= steps + 1
    clock.advance(WINDOW_S)
    assert all(bloom.maybe_many(known)), "still inside the window"
    clock.advance(3 * WINDOW_S)
    assert not any(bloom.maybe_many(known)), "forgotten after it"


def test_far_more_ids_than_it_was_made_for_take_no_more_memory() -> None:
    bloom = made(ManualClock(10**15), capacity=1000)
    bloom.add_many(ids(50_000))
    assert all(bloom.maybe_many(ids(50_000)))
    assert bloom.fullness().generations <= 2 * 3 + 1
