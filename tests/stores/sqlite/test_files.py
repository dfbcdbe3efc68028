"""What may be opened, what is refused, and that what is refused is not touched."""

import os
import shutil
import sqlite3
from pathlib import Path

import pytest

from semel.core.commands import Claim, Lookup, ReadSettings, Settle
from semel.core.ids import digest
from semel.errors import PolicyInvalid, StoreClosed, StoreRefused, StoreUnavailable
from semel.stores.sqlite import SqliteStore, from_url, schema, schema_sql
from semel.stores.sqlite.encoding import EPOCH_US
from semel.stores.sqlite.schema import APPLICATION_ID, network_mount
from semel.types import ErrorInfo
from tests.stores.sqlite.tools import claim, finish, hashes, hold, line, lookup, process, say


def made(path: Path) -> None:
    store = SqliteStore(path)
    store.open()
    finish(store, "k")
    store.close()


def others_database(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE wallet (id INTEGER PRIMARY KEY, balance INTEGER)")
    connection.execute("INSERT INTO wallet VALUES (1, 100)")
    connection.commit()
    connection.close()


def refused(path: Path, match: str, *, adopt: bool = False) -> None:
    before = hashes(path.parent)
    with pytest.raises(StoreRefused, match=match):
        SqliteStore(path, adopt=adopt).open()
    assert hashes(path.parent) == before


def test_a_new_file_is_marked_as_semels_and_leaves_one_file(tmp_path: Path) -> None:
    made(tmp_path / "a.db")
    assert list(hashes(tmp_path)) == ["a.db"]
    connection = sqlite3.connect(tmp_path / "a.db")
    assert connection.execute("PRAGMA application_id").fetchone() == (APPLICATION_ID,)
    assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    connection.close()


@pytest.mark.parametrize("content", [b"hello", b"x" * 5000, b"SQLite format 3\x00", b"\x00" * 4096])
def test_no_database(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.db").write_bytes(content)
    refused(tmp_path / "a.db", "not an SQLite database")
    refused(tmp_path / "a.db", "not an SQLite database", adopt=True)


def test_an_empty_file_is_new(tmp_path: Path) -> None:
    (tmp_path / "a.db").touch()
    made(tmp_path / "a.db")


def test_damaged_schema(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    made(path)
    content = bytearray(path.read_bytes())
    content[100:4096] = b"\xaa" * 3996
    path.write_bytes(content)
    refused(path, "damaged")


def test_cut_short(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    made(path)
    path.write_bytes(path.read_bytes()[:8192])
    refused(path, "damaged or cut short")


def test_a_page_found_damaged_later(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    store = SqliteStore(path)
    store.open()
    store.send([claim(f"k{number}", event_type="x" * 50) for number in range(500)])
    store.close()
    content = bytearray(path.read_bytes())
    connection = sqlite3.connect(f"file:{path}?immutable=1", uri=True)
    roots = [
        root
        for (root,) in connection.execute("SELECT rootpage FROM sqlite_master WHERE name LIKE '%records%'")
    ]
    connection.close()
    for root in roots:
        content[(root - 1) * 4096 : root * 4096] = b"\xff" * 4096
    path.write_bytes(content)
    store.open()
    with pytest.raises(StoreRefused, match="is damaged"):
        store.send([claim("k1")])
    with pytest.raises(StoreRefused, match="is damaged"):
        lookup(store, "k1")
    store.close()


def test_a_database_of_another_application(tmp_path: Path) -> None:
    others_database(tmp_path / "a.db")
    refused(tmp_path / "a.db", "another application")


def test_a_newer_schema(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    made(path)
    connection = sqlite3.connect(path)
    connection.execute("UPDATE semel_meta SET value = 99 WHERE name = 'schema_version'")
    connection.commit()
    connection.close()
    refused(path, "schema version 99.*use a newer semel")


def test_a_newer_schema_that_is_still_in_the_log(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    made(path)
    connection = sqlite3.connect(path)
    connection.execute("UPDATE semel_meta SET value = 99 WHERE name = 'schema_version'")
    connection.commit()
    before = hashes(tmp_path)
    with pytest.raises(StoreRefused, match="schema version 99"):
        SqliteStore(path).open()
    after = hashes(tmp_path)
    assert (after["a.db"], after["a.db-wal"]) == (before["a.db"], before["a.db-wal"])
    connection.close()


def test_adopting_leaves_the_others_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    others_database(path)
    store = SqliteStore(path, adopt=True)
    store.open()
    finish(store, "k")
    assert lookup(store, "k").state == "done"
    store.close()
    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA application_id").fetchone() == (0,)
    assert connection.execute("PRAGMA journal_mode").fetchone() == ("delete",)
    assert connection.execute("SELECT * FROM wallet").fetchall() == [(1, 100)]
    connection.close()
    again = SqliteStore(path)  # once adopted it needs no permission
    assert lookup(again, "k").state == "done"
    again.close()


def test_an_adopted_file_waits_for_its_applications_transactions(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    others_database(path)
    store = SqliteStore(path, adopt=True, busy_wait_s=0.05)
    store.open()
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("BEGIN EXCLUSIVE")
    with pytest.raises(StoreUnavailable, match="held the lock"):
        store.send([claim("k")])
    with pytest.raises(StoreUnavailable, match="held the lock"):
        lookup(store, "k")
    connection.execute("COMMIT")
    hold(store, "k")
    connection.close()
    store.close()


def test_places_that_cannot_hold_a_store(tmp_path: Path) -> None:
    with pytest.raises(StoreRefused, match="does not exist; create it"):
        SqliteStore(tmp_path / "no" / "a.db").open()
    assert not (tmp_path / "no").exists()
    with pytest.raises(StoreRefused, match="is a folder"):
        SqliteStore(tmp_path).open()


@pytest.mark.parametrize("denied", ["a.db", ""])
def test_a_place_without_rights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, denied: str) -> None:
    """Told by the system, not by trying: rights do not bind root, who may run this."""
    made(tmp_path / "a.db")
    allowed = os.access
    monkeypatch.setattr(
        os, "access", lambda path, mode: Path(path) != tmp_path / denied and allowed(path, mode)
    )
    refused(tmp_path / "a.db", "rights" if denied else "cannot be written")


MOUNTS = """\
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
30 22 0:40 / /srv/share rw - nfs4 files:/export rw
31 30 8:2 / /srv/share/local rw - xfs /dev/sdb1 rw
32 22 0:41 / /mnt/my\\040disk rw - fuse.sshfs me@files: rw
33 22 0:42 / /mnt/c rw - 9p drvfs rw
nonsense
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/var/lib/a.db", None),
        ("/srv/share/a.db", "nfs4"),
        ("/srv/share/deep/er/a.db", "nfs4"),
        ("/srv/shared/a.db", None),
        ("/srv/share/local/a.db", None),
        ("/mnt/my disk/a.db", "fuse.sshfs"),
        ("/mnt/c/a.db", "9p"),
    ],
)
def test_network_file_systems_are_told_by_their_mount(path: str, kind: str | None) -> None:
    assert network_mount(MOUNTS, path) == kind


def test_a_network_file_system_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("semel.stores.sqlite.schema.network_mount", lambda mounts, path: "nfs4")
    refused(tmp_path / "a.db", r"network file system \(nfs4\)")


def test_the_schema_is_the_sum_of_its_migrations(tmp_path: Path) -> None:
    made(tmp_path / "a.db")
    by_hand = sqlite3.connect(tmp_path / "b.db")
    by_hand.executescript(schema_sql())
    opened = sqlite3.connect(tmp_path / "a.db")
    query = "SELECT type, name, tbl_name, sql FROM sqlite_master ORDER BY type, name"
    assert opened.execute(query).fetchall() == by_hand.execute(query).fetchall()
    versions = "SELECT value FROM semel_meta WHERE name = 'schema_version'"
    assert opened.execute(versions).fetchone() == by_hand.execute(versions).fetchone() == (schema.VERSION,)
    assert list(schema.migrations()) == list(range(1, schema.VERSION + 1))
    names = {name for (name,) in opened.execute("SELECT name FROM sqlite_master WHERE sql IS NOT NULL")}
    assert all(name.startswith("semel_") for name in names)
    opened.close()
    by_hand.close()


def test_a_file_of_an_older_version_keeps_its_records(tmp_path: Path) -> None:
    path, place = tmp_path / "a.db", ("", "c", "old")
    connection = sqlite3.connect(path)
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    for number in (1, 2):
        connection.executescript(schema.migrations()[number])
    connection.executescript(
        "INSERT INTO semel_consumers (id, tenant, consumer) VALUES (1, '', 'c');"
        "INSERT INTO semel_records (digest, consumer_id, owner, fence, lease, expires, key)"
        f" VALUES (x'{digest(place).hex()}', 1, x'{'0a' * 16}', 1 - {EPOCH_US}, 60000000, NULL, 'old');"
    )
    connection.close()
    store = SqliteStore(path)
    store.open()
    (before,) = store.send([Lookup(place)])
    assert (before.state, before.errors) == ("claimed", ())
    (granted,) = store.send([Claim(place, b"n" * 16, 60_000_000, 60_000_000)])
    assert granted.attempt == 2
    info = ErrorInfo("app.Refused", "no")
    store.send([Settle(place, b"n" * 16, granted.fence, "released", error=info)])
    (after,) = store.send([Lookup(place)])
    assert [(each.attempt, each.kind) for each in after.errors] == [(1, "lease ended"), (2, "app.Refused")]
    store.close()


def test_a_schema_made_by_hand_is_used(tmp_path: Path) -> None:
    connection = sqlite3.connect(tmp_path / "a.db")
    connection.executescript(schema_sql())
    connection.close()
    made(tmp_path / "a.db")


FIRST_START = """
import sys
from semel.core.commands import Admit, Claim
from semel.stores.sqlite import SqliteStore
store = SqliteStore(sys.argv[1])
print("ready", flush=True)
input()
store.open()
print(store.send([Claim(("", "c", sys.argv[2]), b"o" * 16, 10**9, 10**9)])[0].attempt, flush=True)
store.close()
"""


def test_several_processes_start_on_a_new_file_at_once(tmp_path: Path) -> None:
    with (
        process(FIRST_START, tmp_path / "a.db", 1) as one,
        process(FIRST_START, tmp_path / "a.db", 2) as two,
        process(FIRST_START, tmp_path / "a.db", 3) as three,
    ):
        children = [one, two, three]
        assert [line(child) for child in children] == ["ready"] * 3
        for child in children:
            say(child)
        assert [line(child) for child in children] == ["1"] * 3
        for child in children:
            assert child.wait(10) == 0


DIES_IN_ITS_FIRST_COMMIT = """
import os, sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("PRAGMA cache_size = 1")  # pages are written to the file before the commit
connection.execute("BEGIN IMMEDIATE")
for number in range(200):
    connection.execute(f"CREATE TABLE semel_half_{number} (x)")
print("written", flush=True)
input()
"""


def test_what_a_killed_writer_left_half_done_is_undone(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    with process(DIES_IN_ITS_FIRST_COMMIT, path) as child:
        assert line(child) == "written"
        child.kill()
        child.wait()
    assert path.stat().st_size
    assert (tmp_path / "a.db-journal").exists()
    made(path)


def test_a_file_removed_or_replaced_under_a_running_store_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    store = SqliteStore(path)
    store.open()
    finish(store, "k")
    shutil.copy(path, tmp_path / "b.db")
    path.rename(tmp_path / "c.db")
    with pytest.raises(StoreRefused, match="removed or replaced"):
        store.send([claim("new")])
    (tmp_path / "b.db").rename(path)
    with pytest.raises(StoreRefused, match="removed or replaced"):
        store.send([claim("new")])
    store.close()


def test_closed_and_opened_again(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "a.db")
    hold(store, "k")  # the first use opens
    store.open()
    store.close()
    store.close()
    with pytest.raises(StoreClosed, match="is closed"):
        store.send([claim("k")])
    with pytest.raises(StoreClosed, match="is closed"):
        store.send([ReadSettings()])
    store.open()
    assert lookup(store, "k").state == "claimed"
    store.close()
    SqliteStore(tmp_path / "never.db").close()
    assert not (tmp_path / "never.db").exists()


def test_urls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert from_url("sqlite:///events.db").path == str(tmp_path / "events.db")
    assert from_url("sqlite:///events.db").name == "sqlite:///events.db"
    assert from_url(f"sqlite:///{tmp_path}/my%20events.db").path == f"{tmp_path}/my events.db"
    store = from_url("sqlite:///x.db?synchronous=normal&readable_keys=false&adopt=true&busy_wait_s=0.5")
    settings = (store.synchronous, store.readable_keys, store._adopt, store._busy_wait_s)
    assert settings == ("NORMAL", False, True, 0.5)


@pytest.mark.parametrize(
    ("url", "advice"),
    [
        ("sqlite:///:memory:", "use memory:"),
        ("sqlite://", "three|four slashes"),
        ("sqlite:///", "use memory:"),
        ("sqlite:events.db", "sqlite:///relative.db"),
        ("sqlite://host/events.db", "four slashes"),
        ("sqlite:///x.db?sychronous=full", "did you mean synchronous"),
        ("sqlite:///x.db?colour=red", "its options are synchronous"),
        ("sqlite:///x.db?synchronous=off", "FULL or NORMAL"),
        ("sqlite:///x.db?adopt=maybe", "true or false"),
        ("sqlite:///x.db?adopt=true&adopt=false", "twice"),
        ("sqlite:///x.db?busy_wait_s=long", "must be a number"),
        ("sqlite:///x.db?busy_wait_s=-1", "between 0 and"),
    ],
)
def test_wrong_urls_say_what_is_right(url: str, advice: str) -> None:
    with pytest.raises(PolicyInvalid, match=advice):
        from_url(url)
