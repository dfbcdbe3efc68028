"""`semel move`: an operator closes the old store and finishes the move, each when it is safe."""

from contextlib import closing
from pathlib import Path

import semel as library
from tests.cli.shell import Ended, semel

STORES = ("--old", "sqlite:///old.db", "--new", "sqlite:///new.db")


def move(folder: Path, verb: str, *more: str) -> Ended:
    return semel("move", verb, *STORES, *more, cwd=folder)


def test_a_move_is_closed_and_finished_by_an_operator(tmp_path: Path) -> None:
    old, new = f"sqlite:///{tmp_path / 'old.db'}", f"sqlite:///{tmp_path / 'new.db'}"
    nothing = move(tmp_path, "status")
    assert (nothing.code, "no such consumer is moving" in nothing.err) == (5, True)
    store = library.migrating(old=old, new=new)
    with closing(store), library.open(store, consumer="billing", window="1s") as once:
        once.run("evt_1", str)
    # The names of both stores in the notes are those of the processes, so the operator's paths are theirs, too.
    both = ("--old", old, "--new", new)
    status = semel("move", "status", *both, "--json", cwd=tmp_path).json()
    assert status == {"moves": [{"tenant": "", "consumer": "billing", "state": "moving", "closed_at": None}]}
    early = semel("move", "finish", *both, cwd=tmp_path)
    assert (early.code, "not closed yet" in early.err) == (75, True)
    assert semel("move", "close", *both, cwd=tmp_path).code == 0
    assert "closed" in semel("move", "status", *both, cwd=tmp_path).out
    early = semel("move", "finish", *both, "--window", "1s", cwd=tmp_path)
    assert (early.code, "is over in" in early.err) == (75, True)
    refused = semel("once", "--store", old, "-c", "billing", "--key", "evt_2", "--", "true", cwd=tmp_path)
    assert (refused.code, "has moved to" in refused.err) == (78, True)
    assert "moving in" not in semel("window", "list", "--store", new, cwd=tmp_path).out
