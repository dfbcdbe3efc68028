"""What somebody meets in the first hour: wrong stores, names in messages that can be used again, clean output."""

import json
import re
import shlex
import sqlite3
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import typer

import semel as library
from semel.cli.app import app
from semel.cli.help import EXAMPLES
from semel.stores.registry import store_for
from semel.stores.sqlite.store import SqliteStore
from tests.cli.render_reference import FOLDER, command_paths
from tests.cli.shell import ROOT, semel, terminal
from tests.services import postgres

READING = (
    ["list"],
    ["show", "evt_1"],
    ["stats"],
    ["purge"],
    ["purge", "--dry-run"],
    ["doctor"],
    ["forget", "evt_1", "--yes"],
    ["resolve", "evt_1", "--fence", "1", "--done"],
    ["window", "list"],
    ["window", "set", "billing", "1h"],
    ["consumer", "list"],
    ["consumer", "show", "billing"],
    ["consumer", "set-mode", "billing", "mark"],
    ["token", "list"],
    ["token", "revoke", "abc", "--yes"],
    ["outbox", "list"],
    ["outbox", "retry", "--all"],
)
"""Commands that need a store which is there."""


# --- stores that were never made ------------------------------------------------------------------


@pytest.mark.parametrize("command", READING, ids=" ".join)
def test_a_store_that_was_never_made_is_refused_and_not_created(command: list[str], tmp_path: Path) -> None:
    answer = semel(*command, "--store", "sqlite:///typo.db", cwd=tmp_path)
    assert (answer.code, answer.out) == (5, "")
    assert answer.err.startswith("semel: sqlite:///typo.db does not exist; name another with --store")
    assert list(tmp_path.iterdir()) == []


def test_a_relay_does_not_wait_at_a_file_that_it_made_itself(tmp_path: Path) -> None:
    answer = semel("relay", "--from", "sqlite:///typo.db", "--until-empty", cwd=tmp_path)
    assert (answer.code, answer.out) == (5, "")
    assert answer.err.startswith("semel: sqlite:///typo.db does not exist; name another with --from")
    assert list(tmp_path.iterdir()) == []


def test_the_command_that_is_suggested_makes_the_store(tmp_path: Path) -> None:
    refused = semel("list", "--store", "sqlite:///my%20typo.db", cwd=tmp_path)
    assert refused.code == 5
    suggested = shlex.split(refused.err.partition("create it with: semel ")[2])
    assert semel(*suggested, cwd=tmp_path).code == 0
    assert (tmp_path / "my typo.db").exists()


# --- names that can be typed ----------------------------------------------------------------------


@pytest.mark.parametrize("path", ["semel.db", "/var/lib/a b.db", "a%20b?c#d.db", "ü/ö.db", "..//x.db"])
def test_the_name_of_a_sqlite_store_is_a_url_that_opens_it(path: str) -> None:
    store = SqliteStore(path)
    again = store_for(store.name)
    assert isinstance(again, SqliteStore)
    assert (again.path, again.name) == (store.path, store.name)


def test_the_name_of_tiers_is_a_url_that_opens_them() -> None:
    tiers = library.tiered(cache="memory:", truth="sqlite:///a&b.db", cache_window="90m")
    assert tiers.name == "tiered:?cache=memory:&truth=sqlite:///a%26b.db&cache_window=90m"
    again = store_for(tiers.name)
    assert again.name == tiers.name


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("postgresql://me:secret@db/app", "postgresql://db/app"),
        ("postgresql://db:5433/app?schema=mine", "postgresql://db:5433/app?schema=mine"),
        ("postgresql:///app?host=/run/pg&port=5433", "postgresql:///app?host=/run/pg&port=5433"),
        ("postgresql://a:1,b:2/app", "postgresql://a:1,b:2/app"),
        ("postgresql://a,b/app", "postgresql://a,b/app"),
        ("postgresql://[::1]:5433/app", "postgresql://[::1]:5433/app"),
    ],
)
def test_the_name_of_a_postgresql_store_is_a_url_that_names_it(url: str, name: str) -> None:
    assert store_for(url).name == name
    assert store_for(name).name == name


# --- a database of another application -------------------------------------------------------------


def test_a_database_of_another_application_says_what_to_add_to_the_url(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "app.db") as connection:
        connection.execute("CREATE TABLE orders (id INTEGER)")
    connection.close()
    refused = semel("list", "--store", "sqlite:///app.db", cwd=tmp_path)
    assert refused.code == 78
    assert "add ?adopt=true to its URL" in refused.err
    taken = semel("migrate", "--store", "sqlite:///app.db?adopt=true", cwd=tmp_path)
    assert taken.code == 0, taken.err
    assert semel("list", "--store", "sqlite:///app.db", cwd=tmp_path).code == 0


@pytest.mark.parametrize("name", ["folder", "text.db", "none/semel.db"])
def test_what_can_be_no_store_is_a_matter_of_configuration(name: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "text.db").write_text("this is no database\n" * 10, encoding="utf-8")
    for command in (["migrate"], ["once", "--key", "k", "true"]):
        answer = semel(*command, cwd=tmp_path, env={"SEMEL_STORE": f"sqlite:///{name}"})
        assert (answer.code, answer.out) == (78, ""), answer.err
    assert (tmp_path / "text.db").read_text(encoding="utf-8").startswith("this is no database")


def test_a_look_at_a_database_makes_no_tables_in_it() -> None:
    schema = f"never_made_{uuid4().hex}"
    url = f"{postgres.url()}?schema={schema}"
    answer = semel("list", "--store", url, cwd=ROOT)
    assert (answer.code, answer.out) == (5, "")
    assert f"?schema={schema} does not exist" in answer.err
    count = f"SELECT count(*) FROM pg_namespace WHERE nspname = '{schema}'"
    assert postgres.execute(postgres.url(), count) == [(0,)]
    assert semel("migrate", "--store", url, cwd=ROOT).code == 0
    assert semel("list", "--store", url, cwd=ROOT).code == 0


# --- list, stats and modes ------------------------------------------------------------------------


def test_a_list_of_80_columns_splits_no_word_and_no_time(place: Path) -> None:
    key = "8a4d7c1e-5f0b-4d3a-9e6f-000000000001"
    with library.open(f"sqlite:///{place}/events.db", consumer="billing") as billing:
        billing.run(key, str)
    with terminal("list", "--consumer", "billing", cwd=place, columns=80) as shown:
        assert shown.end() == 0
    lines = [line.rstrip() for line in shown.text.splitlines()]
    assert lines[0].split() == ["KEY", "CONSUMER", "STATE", "TRY", "AGE", "EXPIRES"]
    assert len(lines) == 8, lines[6:]
    assert max(map(len, lines)) <= 80
    (line,) = [line for line in lines if line.startswith(key)]
    assert line.split()[1:4] == ["billing", "done", "1"]
    assert {line.split()[2] for line in lines[1:]} == {"done", "failed", "released", "running"}


def test_a_list_shows_the_last_error_where_it_fits(place: Path) -> None:
    with terminal("list", "--consumer", "billing", cwd=place, columns=80) as shown:
        assert shown.end() == 0
    assert "LAST ERROR" in shown.text.splitlines()[0]
    assert max(len(line.rstrip()) for line in shown.text.splitlines()) <= 80


def test_a_wide_list_shows_the_time_too(place: Path) -> None:
    with terminal("list", "--consumer", "billing", cwd=place, columns=120) as shown:
        assert shown.end() == 0
    assert re.search(r"evt_done +billing +done +1 +\d{4}-\d\d-\d\d \d\d:\d\d:\d\d +\d", shown.text)


def test_records_of_semel_itself_are_listed_on_demand(place: Path) -> None:
    assert semel("token", "create", "ann", cwd=place).code == 0
    assert semel("forget", "evt_running", "--force", "--yes", cwd=place).code == 0

    def owners(*args: str) -> set[str]:
        found = semel("list", "--json", *args, cwd=place).json()
        return {
            name
            for each in found["records"]
            for name in (each["tenant"], each["consumer"])
            if "semel." in name
        }

    assert owners() == set()
    assert owners("--limit", "3") == set()
    assert owners("--internal") == {"semel.tokens", "semel.audit"}
    assert owners("--tenant", "semel.tokens") == {"semel.tokens"}
    assert owners("--consumer", "semel.audit") == {"semel.audit"}
    consumers = semel("consumer", "list", cwd=place).out
    assert "semel." not in consumers
    assert "billing" in consumers


def _findings(place: Path) -> list[dict[str, str]]:
    found: list[dict[str, str]] = semel("doctor", "--json", cwd=place).json()["findings"]
    return found


def test_records_of_semel_itself_are_no_part_of_the_totals(place: Path) -> None:
    before = semel("stats", "--json", cwd=place).json()
    assert semel("token", "create", "ann", cwd=place).code == 0
    assert semel("forget", "evt_running", "--force", "--yes", cwd=place).code == 0
    after = semel("stats", "--json", cwd=place).json()
    assert after["states"] == {**before["states"], "claimed": before["states"]["claimed"] - 1}
    assert after["consumers"] == {**before["consumers"], "billing": before["consumers"]["billing"] - 1}
    (told,) = [each["what"] for each in _findings(place) if each["check"] == "consumers"]
    listed = semel("consumer", "list", "--json", cwd=place).json()["consumers"]
    assert sum(int(number) for number in re.findall(r"\d+", told)) == len(listed)
    asked = semel("stats", "--tenant", "semel.tokens", "--json", cwd=place).json()
    assert asked["consumers"]["tokens"] == 1


def test_a_limit_counts_what_is_listed(tmp_path: Path) -> None:
    assert semel("token", "create", "ann", cwd=tmp_path).code == 0
    assert semel("token", "create", "bob", cwd=tmp_path).code == 0
    with library.open(f"sqlite:///{tmp_path}/semel.db", consumer="billing") as billing:
        billing.run_many([library.Delivery(key=f"evt_{n}", body=n) for n in range(5)], str)
    listed = semel("list", "--limit", "5", cwd=tmp_path)
    assert len(listed.out.splitlines()) == 5
    assert len(semel("list", "--limit", "3", "--json", cwd=tmp_path).json()["records"]) == 3


def test_only_marks_is_not_nothing(tmp_path: Path) -> None:
    with library.open(f"sqlite:///{tmp_path}/semel.db", consumer="metrics", mode="mark") as metrics:
        metrics.mark_many(["a", "b"])
    answer = semel("list", cwd=tmp_path)
    assert (answer.code, answer.out) == (0, "")
    assert answer.err.startswith("No records, but 2 marks: ")
    assert semel("list", "--state", "done", cwd=tmp_path).err == ""


def test_what_failed_and_was_released_does_not_keep_a_mode(tmp_path: Path) -> None:
    assert semel("once", "--key", "k", "sh", "-c", "exit 7", cwd=tmp_path).code == 7
    states = semel("stats", "--json", cwd=tmp_path).json()["states"]
    assert states == {"claimed": 0, "released": 1, "done": 0, "failed": 0, "unknown": 0}
    shown = semel("consumer", "show", "once", "--json", cwd=tmp_path).json()
    assert (shown["claimed"], shown["released"], shown["unknown"]) == (0, 1, 0)
    switched = semel("consumer", "set-mode", "once", "quarantine", cwd=tmp_path)
    assert (switched.code, switched.err) == (
        0,
        "Consumer 'once' works in mode quarantine now (before: lease).\n",
    )


# --- filter with a wrong key ----------------------------------------------------------------------


def numbered(count: int, **more: str) -> str:
    return "".join(json.dumps({"id": n, **more}) + "\n" for n in range(count))


@pytest.mark.parametrize("malformed", ["keep", "drop"])
def test_a_misspelt_key_stops_the_filter_before_anything_is_written(malformed: str, tmp_path: Path) -> None:
    command = ("filter", "--store", "sqlite:///seen.db", "--output", "out.jsonl", "--malformed", malformed)
    stopped = semel(*command, "--key", "order_id", cwd=tmp_path, stdin=numbered(1001, sum="1"))
    assert (stopped.code, stopped.out) == (1, "")
    assert "none of the first 1,000 lines has a key at 'order_id'; the first line has id, sum." in stopped.err
    assert (tmp_path / "out.jsonl").read_bytes() == b""
    right = semel(*command, "--key", "id", cwd=tmp_path, stdin=numbered(1001))
    assert (right.code, right.err) == (0, "1,001 lines: 1,001 passed on, 0 duplicates dropped\n")
    assert (tmp_path / "out.jsonl").read_text(encoding="utf-8") == numbered(1001)


def test_one_key_among_the_first_thousand_is_enough(tmp_path: Path) -> None:
    given = "\n" + "oops\n" * 999 + '{"id": 1}\n' + "oops\n" * 2000
    answer = semel("filter", "--key", "id", cwd=tmp_path, stdin=given)
    assert answer.code == 0
    assert answer.out == given[1:]


def test_a_short_input_without_a_key_is_passed_on_with_a_warning(tmp_path: Path) -> None:
    answer = semel("filter", "--key", "typo", cwd=tmp_path, stdin=numbered(999))
    assert (answer.code, answer.out) == (0, numbered(999))
    assert "no line has a key at 'typo'; the first line has id; is --key right?\n" in answer.err


def test_a_switch_passes_lines_without_a_key_on(tmp_path: Path) -> None:
    answer = semel("filter", "--key", "typo", "--no-key-check", cwd=tmp_path, stdin=numbered(3000))
    assert (answer.code, answer.out) == (0, numbered(3000))


def test_text_that_is_no_json_stops_content_keys_too(tmp_path: Path) -> None:
    answer = semel("filter", "--content", cwd=tmp_path, stdin="plain text\n" * 1000)
    assert (answer.code, answer.out) == (1, "")
    assert "none of the first 1,000 lines has a key; the first line is not JSON." in answer.err
    assert semel("filter", "--key", "id", cwd=tmp_path, stdin="").code == 0


# --- help -----------------------------------------------------------------------------------------

COMMANDS = [words for words in command_paths() if words]
GROUPS = {words[0] for words in COMMANDS if len(words) > 1}
LEAVES = [words for words in COMMANDS if len(words) > 1 or words[0] not in GROUPS]


def test_every_command_has_examples_and_no_other_has() -> None:
    assert {" ".join(words) for words in LEAVES} == set(EXAMPLES)


@pytest.mark.parametrize(
    ("words", "line"), [(words, line) for words in LEAVES for line in EXAMPLES[" ".join(words)]]
)
def test_an_example_is_one_that_the_command_takes(words: tuple[str, ...], line: str) -> None:
    first, *rest = shlex.split(line.partition(" > ")[0])
    assert (first, tuple(rest[: len(words)])) == ("semel", words)
    command: Any = typer.main.get_command(app)
    for word in words:
        command = command.commands[word]
    command.make_context("semel", rest[len(words) :])


def test_help_has_readable_placeholders_and_whole_summaries() -> None:
    for page in FOLDER.glob("*.md"):
        text = page.read_text(encoding="utf-8")
        assert not re.search(r"range>|<(int|float|str|Path|list)\b|\]\.\.\.\]|\{[A-Z]", text), page.name
        assert not re.search(r"^  \w.*\.\.\.$", text, re.MULTILINE), page.name
