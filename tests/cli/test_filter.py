"""`semel filter`: first sightings in order, unchanged; killed anywhere it repeats a little and loses nothing."""

import gzip
import json
import os
import signal
import subprocess
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

import semel as library
from semel.cli.filter import Keys, LineFilter, Malformed, _marking
from semel.cli.line_io import Block, LineWriter
from semel.stores.sqlite import SqliteStore
from semel.stores.sqlite.stream import marking
from tests.cli.processes import ROOT, SEMEL, WITHIN_S, Terminal, environment, run_page, semel, start, warm
from tests.waiting import await_true

__all__ = ["warm"]

pytestmark = pytest.mark.usefixtures("warm")

SEEN = ("--store", "sqlite:///seen.db")


def lines(*ids: object) -> bytes:
    return b"".join(json.dumps({"id": each, "n": n}).encode() + b"\n" for n, each in enumerate(ids))


def ids(output: bytes) -> list[object]:
    return [json.loads(line)["id"] for line in output.splitlines()]


def passed(*arguments: str, cwd: Path, given: bytes = b"") -> bytes:
    ended = semel("filter", *arguments, cwd=cwd, given=given)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_first_sightings_pass_in_order_and_unchanged(tmp_path: Path) -> None:
    given = (
        b'{"id": "b", "text": "caf\\u00e9"}\n'
        b'  {"text":"caf\xc3\xa9" , "id":"a"}\r\n'
        b'{"id":"b"}\n'
        b'{"id":"\\u0061"}\n'
        b'{"id":"c","id2":{"id":"x"}}'
    )
    kept = given.splitlines(keepends=True)
    ended = semel("filter", "--key", "id", cwd=tmp_path, given=given)
    assert ended.stdout == kept[0] + kept[1] + kept[4] + b"\n"
    assert ended.stderr == b"5 lines: 3 passed on, 2 duplicates dropped\n"
    assert ended.returncode == 0
    assert list(tmp_path.iterdir()) == []


def test_files_plain_and_gzipped_and_stdin_are_one_stream(tmp_path: Path) -> None:
    (tmp_path / "one.jsonl").write_bytes(lines("a", "b").rstrip(b"\n"))
    (tmp_path / "two.jsonl.gz").write_bytes(gzip.compress(lines("b", "c")) + gzip.compress(lines("d")))
    given = gzip.compress(lines("d", "e", "a"))
    output = passed("--key", "id", "one.jsonl", "two.jsonl.gz", "-", cwd=tmp_path, given=given)
    assert ids(output) == ["a", "b", "c", "d", "e"]


def test_a_pipe_may_have_a_name(tmp_path: Path) -> None:
    with start("filter", "--key", "id", "/dev/stdin", cwd=tmp_path) as running:
        output, _ = running.communicate(lines("a", "a", "b"), timeout=WITHIN_S)
    assert (running.returncode, ids(output)) == (0, ["a", "b"])


def test_it_remembers_across_runs_by_consumer(tmp_path: Path) -> None:
    assert ids(passed("--key", "id", *SEEN, cwd=tmp_path, given=lines("a", "b"))) == ["a", "b"]
    assert ids(passed("--key", "id", *SEEN, cwd=tmp_path, given=lines("b", "c"))) == ["c"]
    assert ids(passed("--key", "id", *SEEN, "--consumer", "x", cwd=tmp_path, given=lines("b"))) == ["b"]
    assert ids(passed("--key", "id", *SEEN, "--tenant", "t", cwd=tmp_path, given=lines("b"))) == ["b"]
    with library.open(f"sqlite:///{tmp_path / 'seen.db'}", consumer="filter", mode="mark") as client:
        assert client.mark("c") is False


def test_it_forgets_when_the_window_is_over(tmp_path: Path) -> None:
    short = ("--key", "id", *SEEN, "--window", "20ms")
    assert ids(passed(*short, cwd=tmp_path, given=lines("a"))) == ["a"]
    assert ids(passed(*short, cwd=tmp_path, given=lines("a"))) == ["a"]  # starting took longer than that
    assert ids(passed("--key", "id", "--window", "off", cwd=tmp_path, given=lines("a", "a"))) == ["a", "a"]


def test_keys_by_path_number_and_content(tmp_path: Path) -> None:
    given = b'{"o":{"id":7}}\n{"o":{"id":"7"}}\n{"o":{"id":8}}\n'
    assert passed("--key", "o.id", cwd=tmp_path, given=given) == b'{"o":{"id":7}}\n{"o":{"id":8}}\n'
    given = b'{"ids":["a","b"]}\n{"ids":["a","c"]}\n'
    assert passed("--key", "ids.0", cwd=tmp_path, given=given) == b'{"ids":["a","b"]}\n'
    given = b'{"a":1,"b":2.50}\n{"b":2.5, "a":1}\n{"a":1}\n[1]\n'
    assert passed("--content", cwd=tmp_path, given=given) == b'{"a":1,"b":2.50}\n{"a":1}\n[1]\n'


BAD = {
    2: b"{not json",
    3: b'{"other": 1}',
    4: b'{"id": true}',
    5: b'{"id": ""}',
    6: b'{"id": "\xff"}',
    7: b'{"id": "d", "text": "\xff"}',
    8: b'{"id": "' + b"x" * 600 + b'"}',
    9: b'{"id": "e"} {"id": "f"}',
    10: b'{"id": null}',
    11: b'{"id": "\\u0001"}',
    12: b'{"id": "z", "more": "' + b"x" * 3000 + b'"}',
}


@pytest.mark.parametrize("choice", ["keep", "drop"])
def test_malformed_lines_are_named_and_kept_or_dropped(tmp_path: Path, choice: str) -> None:
    good, again = b'{"id":"a"}', b'{"id": "a" }'
    (tmp_path / "in.jsonl").write_bytes(b"\n".join([good, *BAD.values(), b"", again, b'{"id":"b"}']))
    ended = semel(
        "filter", "--key", "id", "--malformed", choice, "--line-max", "2KiB", "in.jsonl", cwd=tmp_path
    )
    assert ended.returncode == 0
    kept = list(BAD.values()) if choice == "keep" else []
    assert ended.stdout == b"\n".join([good, *kept, b'{"id":"b"}']) + b"\n"
    said = ended.stderr.decode()
    for number in BAD:
        assert f"in.jsonl:{number}: " in said
    assert said.count("in.jsonl:") == len(BAD)
    assert f"{len(BAD)} malformed {'kept' if choice == 'keep' else 'dropped'}, 1 blank dropped" in said


def test_a_malformed_line_can_end_it_after_what_stood_before(tmp_path: Path) -> None:
    fail = ("--key", "id", *SEEN, "--malformed", "fail")
    ended = semel("filter", *fail, cwd=tmp_path, given=lines("a", "b") + b"bad\n" + lines("c"))
    assert (ended.returncode, ids(ended.stdout)) == (1, ["a", "b"])
    assert b"stdin:3: " in ended.stderr
    assert ids(passed(*fail, cwd=tmp_path, given=lines("a", "b", "c"))) == ["c"]


def test_a_line_too_long_to_hold_goes_through_in_parts(tmp_path: Path) -> None:
    huge = b'{"id":"h","text":"' + b"x" * 9_000_000 + b'"}\n'
    given = lines("a") + huge + lines("b", "a")
    few = ("--key", "id", "--line-max", "64KiB")
    ended = semel("filter", *few, cwd=tmp_path, given=given)
    assert ended.stdout == lines("a") + huge + lines("b")
    assert ended.stderr.count(b"stdin:2: ") == 1
    assert ended.stderr.endswith(b"4 lines: 3 passed on, 1 duplicate dropped, 1 malformed kept\n")
    assert passed(*few, "--malformed", "drop", cwd=tmp_path, given=given) == lines("a") + lines("b")
    assert passed(*few, cwd=tmp_path, given=huge[:-1]) == huge
    assert passed("--key", "id", cwd=tmp_path, given=huge + huge) == huge


def test_counts_for_programs_and_quiet(tmp_path: Path) -> None:
    given = lines("a", "a") + b"\nbad\n"
    ended = semel("filter", "--key", "id", "-q", "--stats-json", "s.json", cwd=tmp_path, given=given)
    assert ended.stderr.count(b"\n") == 1  # the malformed line
    told = json.loads((tmp_path / "s.json").read_bytes())
    assert told == {"lines": 4, "passed": 2, "duplicates": 1, "malformed": 1, "blank": 1}


def test_what_is_wrong_is_said(tmp_path: Path) -> None:
    assert semel("filter", cwd=tmp_path, given=b"").returncode == 2
    assert semel("filter", "--key", "id", "--content", cwd=tmp_path, given=b"").returncode == 2
    assert semel("filter", "--key", "a..b", cwd=tmp_path, given=b"").returncode == 2
    assert semel("filter", "--key", "id", "--line-max", "lots", cwd=tmp_path, given=b"").returncode == 2
    missing = semel("filter", "--key", "id", "none.jsonl", cwd=tmp_path)
    assert (missing.returncode, missing.stderr) == (1, b"semel: none.jsonl: No such file or directory\n")
    (tmp_path / "one.jsonl").write_bytes(lines("a"))
    half = semel("filter", "--key", "id", "one.jsonl", "none.jsonl", cwd=tmp_path)
    assert (half.returncode, half.stdout) == (1, lines("a"))
    assert half.stderr.startswith(b"1 line: 1 passed on")
    unknown = semel("filter", "--key", "id", "--store", "nonesuch:", cwd=tmp_path, given=lines("a"))
    assert (unknown.returncode, unknown.stdout) == (78, b"")
    (tmp_path / "seen.db").write_text("no database at all" * 100)
    refused = semel("filter", "--key", "id", *SEEN, cwd=tmp_path, given=lines("a"))
    assert (refused.returncode, refused.stdout) == (78, b"")
    (tmp_path / "cut.gz").write_bytes(gzip.compress(os.urandom(100_000))[:-2000])
    assert semel("filter", "--key", "id", "-q", "cut.gz", cwd=tmp_path).returncode == 1


def test_lines_of_a_live_pipe_do_not_wait_for_more(tmp_path: Path) -> None:
    with start("filter", "--key", "id", *SEEN, cwd=tmp_path) as running:
        assert running.stdin is not None
        assert running.stdout is not None
        for line in (lines("a"), lines("b")):
            running.stdin.write(line)
            running.stdin.flush()
            assert running.stdout.readline() == line
        running.send_signal(signal.SIGINT)
        assert running.wait(WITHIN_S) == 130
        assert running.stderr is not None
        assert running.stderr.read().endswith(b" passed on, 0 duplicates dropped\n")


# --- crashes ---


def test_a_closed_pipe_ends_it_quietly_with_nothing_marked(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_bytes(lines(*range(20_000)))
    with start("filter", "--key", "id", *SEEN, "in.jsonl", cwd=tmp_path) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == lines(0)
        running.stdout.close()
        assert running.wait(WITHIN_S) == 141
        assert running.stderr is not None
        assert running.stderr.read() == b""
    assert passed("--key", "id", *SEEN, "in.jsonl", cwd=tmp_path) == (tmp_path / "in.jsonl").read_bytes()


class BrokenSink(LineWriter):
    def __init__(self) -> None:
        """Nothing to open."""

    def write(self, data: bytes) -> None:
        raise BrokenPipeError

    def settle(self) -> None:
        """Never reached."""


class ListSink(BrokenSink):
    def __init__(self) -> None:
        self.written = b""

    def write(self, data: bytes) -> None:
        self.written += data

    def settle(self) -> None:
        """Nothing to do."""


def test_lines_that_were_not_written_are_not_marked(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "seen.db")
    with closing(store), library.open(store, consumer="filter", mode="mark") as client:
        sieve = LineFilter(client, _marking(client, ""), Keys("id", 1000), Malformed.KEEP, print)
        with pytest.raises(BrokenPipeError):
            sieve.take(Block("x", 1, lines("a", "b")), BrokenSink())
        sink = ListSink()
        sieve.take(Block("x", 1, lines("a", "b", "a")), sink)
        sieve.take(Block("x", 1, lines("b")), sink)
        assert sink.written == lines("a", "b")


def test_marks_are_seen_by_others_only_after_the_block(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "seen.db", busy_wait_s=0)
    other = SqliteStore(tmp_path / "seen.db")
    with (
        closing(store),
        closing(other),
        library.open(store, consumer="filter", mode="mark") as client,
        library.open(other, consumer="filter", mode="mark") as rival,
    ):
        assert client.mark("a")

        def fail_in_the_middle() -> None:
            with marking(store, "", "filter", 10**9) as mark:
                assert mark(["a", "b"]) == [False, True]
                assert rival.records.lookup("b") is None
                raise RuntimeError

        with pytest.raises(RuntimeError):
            fail_in_the_middle()
        with marking(store, "", "filter", 10**9) as mark:
            assert mark(["b"]) == [True]
        assert rival.records.lookup("b") is not None
        assert rival.mark_many(["b", "c"]) == [False, True]


def size_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def grew(path: Path, size: int) -> bool:
    return size_of(path) > size


@pytest.mark.slow
def test_killed_in_mid_stream_again_and_again_nothing_is_lost(tmp_path: Path) -> None:
    pieces = [lines(*range(at, at + 400), at) for at in range(0, 2400, 400)]
    command = ("filter", "--key", "id", *SEEN, "-q", "-o", "out.jsonl")
    out = tmp_path / "out.jsonl"
    for last in (
        1,
        2,
        3,
        4,
    ):  # each run comes a piece further, and no run knows how far the marks came before
        with start(*command, cwd=tmp_path) as running:
            assert running.stdin is not None
            for piece in pieces[:last]:
                running.stdin.write(piece)
                running.stdin.flush()
            size = size_of(out)
            running.stdin.write(pieces[last])
            running.stdin.flush()
            assert await_true(partial(grew, out, size))
            running.kill()
            assert running.wait(WITHIN_S) == -signal.SIGKILL
    with start(*command, cwd=tmp_path) as running:
        running.communicate(b"".join(pieces), timeout=WITHIN_S)
        assert running.returncode == 0
    seen = [int(str(each)) for each in ids(out.read_bytes())]
    assert sorted(set(seen)) == list(range(2400))
    assert len(seen) < 2 * 2400 * 4
    assert passed("--key", "id", *SEEN, cwd=tmp_path, given=b"".join(pieces)) == b""


def test_output_is_added_to_and_half_a_line_is_cut_off(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    out.write_bytes(lines("a") + b'{"id":"b","te')
    ended = semel("filter", "--key", "id", "-o", "out.jsonl", cwd=tmp_path, given=lines("b"))
    assert b"cut 13 bytes of an unfinished line" in ended.stderr
    assert (ended.stdout, out.read_bytes()) == (b"", lines("a") + lines("b"))
    out.write_bytes(b'{"id":"whole"}')
    passed("--key", "id", "-o", "out.jsonl", cwd=tmp_path, given=lines("b"))
    assert ids(out.read_bytes()) == ["whole", "b"]
    out.write_bytes(b"notes of somebody else")
    passed("--key", "id", "-o", "out.jsonl", cwd=tmp_path, given=lines("b"))
    assert out.read_bytes() == b"notes of somebody else\n" + lines("b")
    assert semel("filter", "--key", "id", "-o", "out.jsonl", "out.jsonl", cwd=tmp_path).returncode == 2


# --- the display, and its bounds ---


def test_a_bar_for_files_on_a_terminal(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_bytes(lines(*range(1000)))
    command = [*SEMEL, "filter", "--key", "id", "-o", "out.jsonl", "in.jsonl"]
    terminal = Terminal(command, tmp_path)
    assert terminal.wait() == 0
    assert "━" in terminal.said
    assert "1,000 lines: 1,000 passed on" in terminal.said
    quiet = Terminal([*command, "--quiet"], tmp_path)
    assert (quiet.wait(), quiet.said) == (0, "")


def peak_bytes(count: int, folder: Path) -> int:
    source = folder / f"{count}.jsonl"
    source.write_bytes(lines(*(f"{n:0100d}" for n in range(count))))
    command = [*SEMEL, "filter", "--key", "id", "-q", "--store", f"sqlite:///{count}.db", source.name]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, env=environment()) as running:
        _, status, usage = os.wait4(running.pid, 0)
        running.returncode = status
    assert status == 0
    return usage.ru_maxrss * 1024


@pytest.mark.slow
def test_memory_is_constant_with_sqlite(tmp_path: Path) -> None:
    assert peak_bytes(250_000, tmp_path) < peak_bytes(100_000, tmp_path) + 20_000_000


@pytest.mark.slow
def test_the_page_says_what_it_says(tmp_path: Path) -> None:
    answers = list(run_page(ROOT / "docs/howto/filter-a-stream.md", tmp_path))
    assert len(answers) >= 5
    for command, expected, said in answers:
        assert said == expected, command
