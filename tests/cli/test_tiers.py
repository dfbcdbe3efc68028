"""Tiers in `semel.toml`: every command goes through the same cache as the clients."""

from pathlib import Path

import pytest

import semel as library
from tests.cli.shell import semel
from tests.services import redis
from tests.stores.tiered.places import PATIENT


@pytest.fixture
def cache(tmp_path: Path) -> str:
    """A folder's configuration with a cache in front of a file; its URL."""
    url = redis.place(tmp_path) + PATIENT
    (tmp_path / "semel.toml").write_text(
        f'consumer = "jobs"\n[store]\ncache = "{url}"\ntruth = "sqlite:///truth.db"\ncache_window = "30m"\n',
        encoding="utf-8",
    )
    return url


def test_a_table_of_tiers_is_a_store_for_every_command(cache: str, tmp_path: Path) -> None:
    for expected in (0, 3):
        ran = semel("once", "--key", "nightly", "--no-replay", "--", "true", cwd=tmp_path)
        assert ran.code == expected, ran.err
    counted = semel("stats", "--json", cwd=tmp_path).json()
    assert counted["states"]["done"] == 1
    assert (counted["tiers"]["cache_hits"], counted["tiers"]["truth_asked"]) == (1, 1)
    assert "tier cache_hits\t1\n" in semel("stats", cwd=tmp_path).out
    assert semel("forget", "nightly", "--yes", cwd=tmp_path).code == 0
    again = semel("once", "--key", "nightly", "--no-replay", "--", "true", cwd=tmp_path)
    assert again.code == 0, again.err  # the cache has forgotten too
    assert "tiered:?cache=" in semel("show", "unknown", cwd=tmp_path).err
    assert "CREATE TABLE" in semel("migrate", "--sql", cwd=tmp_path).out


def test_another_store_leaves_the_cache_alone(cache: str, tmp_path: Path) -> None:
    """The copies of one truth are no answers for another."""
    semel("once", "--key", "nightly", "--", "true", cwd=tmp_path)
    other = semel(
        "once", "--store", "sqlite:///b.db", "--key", "nightly", "--no-replay", "--", "true", cwd=tmp_path
    )
    assert other.code == 0, other.err
    assert semel("stats", "--json", "--store", "sqlite:///b.db", cwd=tmp_path).json()["tiers"] == {}


def test_passwords_in_tiers_are_hidden(tmp_path: Path) -> None:
    (tmp_path / "semel.toml").write_text(
        '[store]\ncache = "redis+sentinel://me:hunter2@cache/main/0?answer_s=1&sentinel_password=hunter4"\ntruth = "postgresql://me:hunter3@db/app"\n',
        encoding="utf-8",
    )
    for answer in (semel("config", "show", cwd=tmp_path), semel("config", "show", "--json", cwd=tmp_path)):
        assert "hunter" not in answer.out
        assert "sentinel://me:***@cache/main/0?answer_s=1" in answer.out


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ('cache = "memory:"', "a cache and a truth"),
        ('cache = "memory:"\ntruth = "memory:"\nwindow = "1h"', "no option window"),
    ],
)
def test_tables_that_are_no_tiers_are_refused(table: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "semel.toml").write_text(f"[store]\n{table}\n", encoding="utf-8")
    answer = semel("stats", cwd=tmp_path)
    assert answer.code == 78
    assert message in answer.err
    assert "semel.toml: store" in answer.err


def test_explain_says_what_a_cache_changes(cache: str, tmp_path: Path) -> None:
    told = semel("explain", cwd=tmp_path)
    assert told.code == 0
    assert "1800 s: use the same tiers everywhere" in " ".join(told.out.split())
    url = "tiered:?cache=memory:&truth=sqlite:///truth.db"
    told = semel("explain", "--store", url, cwd=tmp_path)
    assert "each process's own memory" in " ".join(told.out.split())
    assert library.tiered(cache="memory:", truth="sqlite:///truth.db").capabilities.transactional is False
    assert semel("explain", "--store", url, "--mode", "inbox", cwd=tmp_path).code == 78
