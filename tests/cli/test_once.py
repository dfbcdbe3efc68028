"""`semel once`: the command's own code, first or replayed; and whoever dies, no command runs unclaimed."""

import os
import signal
import subprocess
import threading
from pathlib import Path

import pytest

import semel as library
from tests.cli.processes import ROOT, SEMEL, WITHIN_S, Terminal, alive, run_page, semel, start, warm
from tests.waiting import await_true

__all__ = ["warm"]

pytestmark = [pytest.mark.usefixtures("warm"), pytest.mark.slow]

KEY = ("once", "--key", "k", "--store", "sqlite:///jobs.db")
SHORT = (*KEY, "--lease", "2s")
COUNT = "echo run >> runs; "
"""What a command leaves behind each time it runs."""


def sh(script: str) -> tuple[str, ...]:
    return ("--", "sh", "-c", script)


def runs(folder: Path) -> int:
    path = folder / "runs"
    return path.read_text().count("run") if path.exists() else 0


def pid_in(path: Path, running: subprocess.Popen[bytes]) -> int:
    """The process id that a command has written there, once it has."""
    assert await_true(
        lambda: running.poll() is not None or (path.exists() and path.read_text().endswith("\n"))
    )
    return int(path.read_text())


def test_a_duplicate_gets_the_code_and_the_output_again(tmp_path: Path) -> None:
    script = COUNT + r"printf 'out \377\n'; echo err >&2"
    first = semel(*KEY, *sh(script), cwd=tmp_path)
    assert (first.returncode, first.stdout, first.stderr) == (0, b"out \xff\n", b"err\n")
    again = semel(*KEY, *sh(script), cwd=tmp_path)
    assert (again.returncode, again.stdout) == (0, b"out \xff\n")
    assert again.stderr == b"semel: replayed k; it ran before and ended with 0\nerr\n"
    quiet = semel(*KEY, "--quiet", *sh(script), cwd=tmp_path)
    assert (quiet.returncode, quiet.stdout, quiet.stderr) == (0, b"out \xff\n", b"err\n")
    refused = semel(*KEY, "--no-replay", *sh(script), cwd=tmp_path)
    assert (refused.returncode, refused.stdout) == (3, b"")
    assert runs(tmp_path) == 1


def test_the_default_store_and_another_consumer(tmp_path: Path) -> None:
    semel("once", "--key", "k", *sh(COUNT), cwd=tmp_path)
    assert (tmp_path / "semel.db").exists()
    semel("once", "--key", "k", "--consumer", "other", *sh(COUNT), cwd=tmp_path)
    semel("once", "--key", "k", *sh(COUNT), cwd=tmp_path, SEMEL_CONSUMER="other")
    assert runs(tmp_path) == 2


def test_a_failure_runs_again_unless_it_is_kept(tmp_path: Path) -> None:
    for _ in range(2):
        assert semel(*KEY, *sh(COUNT + "exit 7"), cwd=tmp_path).returncode == 7
    assert runs(tmp_path) == 2
    kept = semel(*KEY, "--keep-failures", *sh(COUNT + "echo bad; exit 8"), cwd=tmp_path)
    assert (kept.returncode, kept.stdout) == (8, b"bad\n")
    again = semel(*KEY, *sh(COUNT), cwd=tmp_path)
    assert (again.returncode, again.stdout) == (8, b"bad\n")
    assert runs(tmp_path) == 3


def test_commands_that_cannot_run_or_die(tmp_path: Path) -> None:
    missing = semel(*KEY, "--", "no-such-command", cwd=tmp_path)
    assert (missing.returncode, b"no-such-command" in missing.stderr) == (127, True)
    (tmp_path / "plain").write_text("no program")
    assert semel(*KEY, "--", "./plain", cwd=tmp_path).returncode == 126
    assert semel(*KEY, *sh("kill -9 $$"), cwd=tmp_path).returncode == 137
    assert semel("once", "--key", "k", cwd=tmp_path).returncode == 2
    assert semel("once", "--", "true", cwd=tmp_path).returncode == 2
    assert semel("once", "--key", "", "--", "true", cwd=tmp_path).returncode == 2
    assert semel(*KEY, "--output-max", "1MiB", "--", "true", cwd=tmp_path).returncode == 2
    (tmp_path / "jobs.db").unlink()
    (tmp_path / "jobs.db").mkdir()
    assert semel(*KEY, "--", "true", cwd=tmp_path).returncode == 78


def test_arguments_and_stdin_pass_through(tmp_path: Path) -> None:
    told = semel(
        *KEY, "--", "sh", "-c", 'cat; printf "%s|" "$@"', "x", "-k", "--", "a b", cwd=tmp_path, given=b"in "
    )
    assert told.stdout == b"in -k|--|a b|"


def test_the_command_needs_no_dashes(tmp_path: Path) -> None:
    # Everything from the first word on is the command's own, options that semel has too included.
    spoken = semel(
        *KEY, "sh", "-c", 'printf "%s|" "$@"', "x", "--key", "K", "-q", "--", "--help", cwd=tmp_path
    )
    assert (spoken.returncode, spoken.stdout) == (0, b"--key|K|-q|--|--help|")
    assert semel("once", "-k", "other", "-q", "sh", "-c", "exit 7", cwd=tmp_path).returncode == 7
    silent = semel("once", "-k", "other", "--quiet", "--keep-failures", "sh", "-c", "exit 8", cwd=tmp_path)
    assert (silent.returncode, silent.stderr) == (8, b"")
    assert semel("once", "-k", "none", cwd=tmp_path).returncode == 2


def test_a_long_output_is_shown_whole_and_kept_in_part(tmp_path: Path) -> None:
    script = "head -c 300000 /dev/zero | tr '\\0' x"
    assert len(semel(*KEY, "--output-max", "1KiB", *sh(script), cwd=tmp_path).stdout) == 300_000
    again = semel(*KEY, *sh(script), cwd=tmp_path)
    assert again.stdout == b"x" * 1024
    assert b"only the first 1 KiB of its stdout were kept" in again.stderr


def test_in_flight_is_said_or_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "gate")
    with start(*KEY, *sh(COUNT + "cat gate; echo done"), cwd=tmp_path) as first:
        assert await_true(lambda: runs(tmp_path))
        busy = semel(*KEY, *sh(COUNT), cwd=tmp_path)
        assert busy.returncode == 75
        assert busy.stderr.startswith(b"semel: k is in flight; its lease ends in ")
        with start(*KEY, "--wait", "60s", *sh(COUNT), cwd=tmp_path) as waiting:
            (tmp_path / "gate").write_text("")
            out, _ = waiting.communicate(timeout=WITHIN_S)
            assert (waiting.returncode, out) == (0, b"done\n")
        assert first.wait(WITHIN_S) == 0
    assert runs(tmp_path) == 1


def test_a_command_longer_than_its_lease_keeps_its_claim(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "gate")
    with start(*SHORT, *sh(COUNT + "cat gate"), cwd=tmp_path) as first:
        assert await_true(lambda: runs(tmp_path))
        threading.Event().wait(5)  # two leases and a half
        assert semel(*SHORT, *sh(COUNT), cwd=tmp_path).returncode == 75
        (tmp_path / "gate").write_text("")
        assert first.wait(WITHIN_S) == 0
    assert runs(tmp_path) == 1


def test_output_is_shown_while_it_comes(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "gate")
    with start(*KEY, *sh("echo early; cat gate"), cwd=tmp_path) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == b"early\n"
        (tmp_path / "gate").write_text("late\n")
        assert running.stdout.read() == b"late\n"
        assert running.wait(WITHIN_S) == 0


# --- signals and deaths ---


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_forwarded_and_the_key_is_free_when_the_command_has_ended(
    tmp_path: Path, number: int
) -> None:
    script = "trap 'echo told > told; exit 0' TERM INT; " + COUNT + "while :; do sleep 0.05; done"
    with start(*KEY, *sh(script), cwd=tmp_path) as running:
        assert await_true(lambda: runs(tmp_path))
        running.send_signal(number)
        assert running.wait(WITHIN_S) == 128 + number
    assert (tmp_path / "told").read_text() == "told\n"
    assert semel(*KEY, *sh(COUNT), cwd=tmp_path).returncode == 0
    assert runs(tmp_path) == 2


def test_a_signal_while_waiting_for_the_key(tmp_path: Path) -> None:
    with library.open(f"sqlite:///{tmp_path / 'jobs.db'}", consumer="once") as client:
        claim = client.claim("k")
        assert isinstance(claim, library.Claimed)
        with start(*KEY, "--wait", "60s", *sh(COUNT), cwd=tmp_path) as waiting:
            assert await_true(lambda: has_opened_store(waiting))
            waiting.send_signal(signal.SIGTERM)
            assert waiting.wait(WITHIN_S) == 143
        assert isinstance(client.complete(claim), library.Completed)
    assert runs(tmp_path) == 0


def has_opened_store(running: subprocess.Popen[bytes]) -> bool:
    folder = Path(f"/proc/{running.pid}/fd")
    try:
        return any(link.readlink().name == "jobs.db" for link in folder.iterdir())
    except OSError:
        return False


def test_if_the_wrapper_is_killed_the_command_dies_with_all_it_started(tmp_path: Path) -> None:
    script = COUNT + "sleep 600 & echo $! > grandchild; echo $$ > child; wait"
    with start(*SHORT, *sh(script), cwd=tmp_path) as running:
        child = pid_in(tmp_path / "child", running)
        grandchild = pid_in(tmp_path / "grandchild", running)
        assert alive(child)
        assert alive(grandchild)
        running.kill()
        assert await_true(lambda: not alive(child) and not alive(grandchild))
        running.wait(WITHIN_S)
    assert semel(*SHORT, "--wait", "30s", *sh(COUNT + "echo again"), cwd=tmp_path).stdout == b"again\n"
    assert runs(tmp_path) == 2


def test_a_lost_claim_ends_the_command(tmp_path: Path) -> None:
    script = "trap 'exit 0' TERM; (trap '' TERM; sleep 600) & echo $! > grandchild; echo $$ > child; wait"
    with start(*SHORT, *sh(script), cwd=tmp_path) as running:
        child = pid_in(tmp_path / "child", running)
        grandchild = pid_in(tmp_path / "grandchild", running)
        with library.open(f"sqlite:///{tmp_path / 'jobs.db'}", consumer="once") as client:
            client.records.forget("k", force=True)
        _, said = running.communicate(timeout=WITHIN_S)
        assert running.returncode == 75
        assert said == b"semel: k: the claim was lost, so the command was terminated\n"
        assert await_true(lambda: not alive(child) and not alive(grandchild))


def test_a_closed_pipe_reaches_the_command(tmp_path: Path) -> None:
    with start(*KEY, "--", "yes", cwd=tmp_path) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == b"y\n"
        running.stdout.close()
        assert running.wait(WITHIN_S) == 141


# --- in a terminal ---


def test_the_command_may_ask_and_gets_ctrl_c_itself(tmp_path: Path) -> None:
    script = 'echo ready; read answer; echo "said $answer"; sleep 600'
    terminal = Terminal([*SEMEL, *KEY, *sh(script)], tmp_path)
    assert await_true(lambda: "ready" in terminal.said)
    terminal.type("yes\n")
    assert await_true(lambda: "said yes" in terminal.said)
    terminal.type("\x03")
    assert terminal.wait() == 130


def test_ctrl_z_stops_both_and_both_go_on(tmp_path: Path) -> None:
    script = "echo ready; read answer; echo done"
    terminal = Terminal([*SEMEL, *KEY, *sh(script)], tmp_path)
    assert await_true(lambda: "ready" in terminal.said)
    terminal.type("\x1a")
    assert await_true(
        lambda: Path(f"/proc/{terminal.process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    )
    terminal.process.send_signal(signal.SIGCONT)
    terminal.type("\n")
    assert terminal.wait() == 0
    assert "done" in terminal.said


def test_the_page_says_what_it_says(tmp_path: Path) -> None:
    answers = list(run_page(ROOT / "docs/howto/run-a-job-once.md", tmp_path))
    assert len(answers) >= 5
    for command, expected, said in answers:
        assert said == expected, command
