"""How the program starts, refuses and ends: versions, wrong input, exit codes, pipes and interrupts."""

import os
import re
import signal
import sqlite3
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import semel as library
from semel.runtime.extras import install_command
from tests.cli.shell import PATIENCE_S, cold, environment, semel

ROOT = Path(__file__).resolve().parents[2]
BLOCKED = "import sys; sys.modules['typer'] = None; from semel.cli.main import main; sys.exit(main())"


def test_version_and_help(tmp_path: Path) -> None:
    assert cold("--version", cwd=tmp_path).out == f"semel {library.__version__}\n"
    helped = cold("--help", cwd=tmp_path)
    assert helped.code == 0
    assert helped.out.startswith("Usage: semel [OPTIONS] COMMAND")
    assert "--install-completion" in helped.out
    bare = cold(cwd=tmp_path)
    assert (bare.code, bare.out) == (2, "")
    assert "Usage: semel" in bare.err


def test_the_command_is_installed_by_its_name() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["scripts"] == {"semel": "semel.cli.main:main"}
    needed = {re.split(r"[>=<]", each)[0] for each in project["optional-dependencies"]["cli"]}
    assert {"typer", "rich", "pydantic-settings"} <= needed


def test_without_its_extra_it_says_which_one() -> None:
    answer = subprocess.run([sys.executable, "-c", BLOCKED], capture_output=True, text=True, check=False)
    assert answer.returncode == 78
    hint = install_command("cli")
    assert answer.stderr == f"semel: the command line needs typer; install the extra: {hint}\n"


def test_completion_is_offered(tmp_path: Path) -> None:
    answer = cold(
        cwd=tmp_path, env={"_SEMEL_COMPLETE": "complete_bash", "COMP_WORDS": "semel wi", "COMP_CWORD": "1"}
    )
    assert answer.out.split() == ["window"]


def test_a_cold_start_answers_as_the_warm_one(place: Path) -> None:
    for command in (
        ["show", "evt_failed", "--json"],
        ["show", b"\xff"],
        ["list", "--store", "sqlite:///none.db"],
    ):
        started = cold(*command, cwd=place, env={"SEMEL_TENANT": ""})
        forked = semel(*command, cwd=place, env={"SEMEL_TENANT": ""})
        age = re.compile(r'"age_s": .*')
        assert age.sub("", started.out) == age.sub("", forked.out)
        assert (started.code, started.err) == (forked.code, forked.err)


WRONG: list[tuple[list[str | bytes], int, str]] = [
    (["lits"], 2, "Did you mean 'list', 'listen'?"),
    (["list", "--prefixx", "a"], 2, "no such option: --prefixx"),
    (["list", "--limit", "-1"], 2, "'--limit': it should be greater than or equal to 0"),
    (["list", "--limit", "many"], 2, "'--limit'"),
    (["list", "--state", "finished"], 2, "'--state': 'finished' is not one of 'claimed'"),
    (["purge", "--every", "5"], 2, "'--every': '5' is not a duration"),
    (["stats", "--every", "1ms"], 2, "'--every': 1ms is too often"),
    (["once", "-k", "k", "--wait", "5", "true"], 2, "'--wait': '5' is not a duration"),
    (["once", "-k", "k", "--run-max", "5", "true"], 2, "'--run-max': '5' is not a duration"),
    (["once", "-k", "k", "--output-max", "5x", "true"], 2, "'--output-max': '5x' is not a size"),
    (["filter", "-k", "id", "--line-max", "much"], 2, "'--line-max': 'much' is not a size"),
    (["migrate", "--store", "sqlite:////proc/none.db"], 69, "none.db cannot be opened"),
    (["list", "--older-than", "5 minutes"], 2, "is not a duration; write it like 24h"),
    (["list", "--prefix", b"\xff\xfe"], 2, "is not UTF-8"),
    (["show", b"\xff"], 2, "is not UTF-8"),
    (["show", "a\nb"], 2, "control character"),
    (["show", "k" * 513], 2, "allowed are 1 to 512"),
    (["show", ""], 2, "allowed are 1 to 512"),
    (["list", "--consumer", "c" * 129], 2, "allowed are 1 to 128"),
    (["resolve", "k", "--done", "--fence", "1", "--window", "soon"], 2, "--window: 'soon' is not a duration"),
    (["explain", "--mode", "leese"], 2, "--mode"),
    (["--log-level", "loud", "list"], 2, "--log-level"),
    (["list", "--store", "events.db"], 78, "is not a store URL"),
    (["list", "--store", "carrier-pigeon:"], 78, "no store answers to carrier-pigeon:"),
    (["list", "--store", "sqlite://events.db"], 78, "write sqlite:///relative.db"),
    (["list", "--store", "sqlite:///events.db?sync=full"], 78, "has no option sync"),
    (["list", "--store", "sqlite:///none.db"], 5, "does not exist; name another with --store"),
    (["show", "k", "--store", "sqlite:///empty.db"], 5, "does not exist"),
    (["list", "--store", "sqlite:///text.db"], 78, "is not an SQLite database"),
    (["list", "--store", "sqlite:///short.db"], 78, "is damaged"),
    (["list", "--store", "sqlite:///."], 78, "is a folder"),
    (["--config", "none.toml", "list"], 78, "none.toml does not exist"),
]


@pytest.mark.parametrize(("command", "code", "said"), WRONG, ids=lambda part: str(part)[:60])
def test_wrong_input_is_one_clear_line(place: Path, command: list[str | bytes], code: int, said: str) -> None:
    (place / "empty.db").touch()
    (place / "text.db").write_text("no database\n" * 20, encoding="utf-8")
    whole = (place / "events.db").read_bytes()
    (place / "short.db").write_bytes(whole[: len(whole) // 2])
    files = {path.name: path.stat().st_size for path in place.iterdir()}
    answer = semel(*command, cwd=place)
    assert (answer.code, answer.out) == (code, "")
    assert said in answer.err
    assert answer.err.startswith("semel: ")
    assert "Traceback" not in answer.err
    assert len(answer.err.splitlines()) <= 2
    left = {path.name: path.stat().st_size for path in place.iterdir()}
    assert {name: left.get(name) for name in files} == files
    assert set(left) - set(files) <= {"events.db-wal", "events.db-shm"}


def test_a_locked_store_is_unavailable(place: Path) -> None:
    locked = sqlite3.connect(place / "events.db", isolation_level=None)
    locked.execute("BEGIN IMMEDIATE")
    url = "sqlite:///events.db?busy_wait_s=0.05"
    refused = semel("window", "set", "billing", "1h", "--store", url, cwd=place)
    looked = semel("show", "evt_failed", "--store", url, cwd=place)
    locked.close()
    assert (refused.code, refused.out) == (69, "")
    assert refused.err.startswith("semel: ")
    assert looked.code == 0


def test_debug_shows_where_an_error_came_from(tmp_path: Path) -> None:
    answer = semel("--debug", "list", "--store", "pigeon://me:hunter2@coop/", cwd=tmp_path)
    assert answer.code == 78
    assert "Traceback" in answer.err
    assert "hunter2" not in answer.err


def test_a_reader_that_has_had_enough_ends_it_quietly(place: Path) -> None:
    with library.open(f"sqlite:///{place / 'events.db'}", consumer="many") as many:
        many.run_many([library.Delivery(key=f"{n:0500}", body=n) for n in range(400)], str)
    process = subprocess.Popen(
        [sys.executable, "-m", "semel", "list", "--limit", "0"],
        cwd=place,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(PATIENCE_S) == 0


@pytest.mark.parametrize("command", [["stats", "--watch"], ["purge", "--watch"]], ids=" ".join)
def test_an_interrupt_ends_it_with_130(place: Path, command: list[str]) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "semel", *command],
        cwd=place,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert process.stdout is not None
    assert process.stdout.readline()
    os.kill(process.pid, signal.SIGINT)
    assert b"Traceback" not in process.stdout.read()
    process.stdout.close()
    assert process.wait(PATIENCE_S) == 130


def test_what_the_output_cannot_say_is_escaped(place: Path) -> None:
    with library.open(f"sqlite:///{place / 'events.db'}", consumer="many") as many:
        many.run("gr\u00fc\u00dfe\u009b31m", str)
    answer = cold("list", "--consumer", "many", cwd=place, env={"PYTHONIOENCODING": "ascii"})
    assert answer.code == 0
    assert answer.out.startswith("gr\\xfc\\xdfe\\x9b31m\t")
