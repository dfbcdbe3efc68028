"""What is shown on a terminal: tables, live displays, questions, colours."""

import re
from pathlib import Path

import semel as library
from tests.cli.shell import semel, terminal


def test_a_table_on_a_terminal(place: Path) -> None:
    with terminal("list", "--state", "failed", cwd=place) as shown:
        assert shown.end() == 0
    assert re.search(r"KEY +CONSUMER +STATE", shown.text)
    assert re.search(r"evt_failed +billing +failed", shown.text)
    assert "\x1b[1m" in shown.raw


def test_no_color_means_no_escapes(place: Path) -> None:
    with terminal("list", "--state", "failed", cwd=place, env={"NO_COLOR": "1"}) as shown:
        assert shown.end() == 0
    assert "evt_failed" in shown.raw
    assert "\x1b" not in shown.raw


def test_markup_and_escapes_in_a_key_are_text(place: Path) -> None:
    with library.open(f"sqlite:///{place / 'events.db'}", consumer="odd") as odd:
        odd.run("[red]\u009b31m[/red]", str)
    with terminal("show", "[red]\u009b31m[/red]", cwd=place) as shown:
        assert shown.end() == 0
    assert "[red]\\x9b31m[/red]" in shown.text


def test_stats_follow_the_store(place: Path) -> None:
    with terminal("stats", "--watch", "--every", "100ms", cwd=place) as shown:
        shown.until(r"consumer billing +6")
        with library.open(f"sqlite:///{place / 'events.db'}", consumer="billing") as billing:
            billing.run("evt_new", str)
        shown.until(r"consumer billing +7")
        shown.type("\x03")
        assert shown.end() == 130
    assert "Traceback" not in shown.raw


def test_purge_goes_on_until_it_is_interrupted(place: Path) -> None:
    with terminal("purge", "--watch", "--every", "100ms", cwd=place) as shown:
        shown.until(r"removed \d+ expired records?, \d+ in all; next in 100ms")
        shown.until(r"removed 0 expired records, \d+ in all")
        shown.type("\x03")
        assert shown.end() == 130
    assert "Traceback" not in shown.raw


def test_forget_asks(place: Path) -> None:
    with terminal("forget", "evt_failed", cwd=place) as shown:
        shown.until(r"Forget 'evt_failed' .*\[y/N\]")
        shown.type("n\n")
        assert shown.end() == 1
    assert semel("show", "evt_failed", cwd=place).code == 0
    with terminal("forget", "evt_failed", cwd=place) as shown:
        shown.until(r"\[y/N\]")
        shown.type("y\n")
        assert shown.end() == 0
    assert semel("show", "evt_failed", cwd=place).code == 5


def test_an_interrupted_question_changes_nothing(place: Path) -> None:
    with terminal("forget", "evt_failed", cwd=place) as shown:
        shown.until(r"\[y/N\]")
        shown.type("\x03")
        assert shown.end() == 130
    assert semel("show", "evt_failed", cwd=place).code == 0


def test_explain_is_compact(place: Path) -> None:
    with terminal("explain", "--store", "memory:", cwd=place) as shown:
        assert shown.end() == 0
    assert re.search(r"WHAT HAPPENS +EFFECTS IN THE END", shown.text)
    assert re.search(r"! +memory: forgets all", shown.text)
    assert all(len(line) <= 100 for line in shown.text.splitlines())


def test_an_empty_list_says_so_to_whoever_looks(place: Path) -> None:
    with terminal("list", "--prefix", "nothing-like-it", cwd=place) as shown:
        shown.until("No such records.")
    assert semel("list", "--prefix", "nothing-like-it", cwd=place).err == ""
