"""`semel listen` and `semel relay` while the other side is away, or refuses."""

import signal
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

import semel as library
from tests.cli.processes import WITHIN_S, semel, start
from tests.services import nats, rabbitmq, redis
from tests.services.server import NOBODY

pytestmark = pytest.mark.slow

AWAY = {
    "listen": ["listen", f"ws://127.0.0.1:{NOBODY}/feed", "app:note", "--store", "sqlite:///s.db"],
    "kafka": ["relay", "--from", "sqlite:///s.db", "--to", f"kafka://127.0.0.1:{NOBODY}/t"],
    "rabbitmq": ["relay", "--from", "sqlite:///s.db", "--to", f"amqp://127.0.0.1:{NOBODY}/"],
    "nats": ["relay", "--from", "sqlite:///s.db", "--to", f"nats://127.0.0.1:{NOBODY}"],
    "redis": ["relay", "--from", "sqlite:///s.db", "--to", f"redis://127.0.0.1:{NOBODY}/0"],
}


@pytest.fixture(autouse=True)
def app(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text("def note(event):\n    print(event.id, flush=True)\n")
    with library.open(f"sqlite:///{tmp_path}/s.db", consumer="c") as once:
        once.run("k", int)


@pytest.mark.parametrize("command", AWAY)
def test_an_outage_is_reported_once_and_sigterm_ends_it(command: str, tmp_path: Path) -> None:
    with start(*AWAY[command], cwd=tmp_path) as process:
        try:
            assert process.stderr is not None
            said = []
            for line in process.stderr:
                said.append(line)
                if b"cannot be reached" in line:
                    break
            process.send_signal(signal.SIGTERM)
            _, rest = process.communicate(timeout=WITHIN_S)
        finally:
            process.kill()
    assert process.returncode == 0
    assert b"".join((*said, rest)).count(b"cannot be reached") == 1


@pytest.mark.parametrize("broker", ["rabbitmq", "rabbitmq, vhost", "nats", "redis"])
def test_a_relay_that_is_refused_exits_with_78(broker: str, tmp_path: Path) -> None:
    url = {
        "rabbitmq": lambda: rabbitmq.url().replace("guest:guest", "guest:wrong"),
        "rabbitmq, vhost": lambda: f"{rabbitmq.url()}missing",
        "nats": lambda: nats.secured().replace("//", "//semel:wrong@"),
        "redis": lambda: (
            redis.place("relay").partition("?")[0].replace("redis://", "redis://somebody:wrong@")
        ),
    }[broker]()
    ended = semel("relay", "--from", "sqlite:///s.db", "--to", url, cwd=tmp_path)
    assert ended.returncode == 78, ended.stderr
    assert b"refuses" in ended.stderr


def test_a_table_of_somebody_elses_is_refused_before_anything_is_heard(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "rows.db")) as file:
        file.execute("CREATE TABLE events (event_id TEXT, event_type TEXT, payload TEXT)")
    listen = ["listen", f"ws://127.0.0.1:{NOBODY}/feed", "app:note", "--store", "sqlite:///s.db"]
    persist = ["--persist", "sqlite:///rows.db"]
    ended = semel(*listen, *persist, cwd=tmp_path)
    assert ended.returncode == 78
    assert b"it has no tenant, type" in ended.stderr
    ended = semel(*listen, *persist, "--columns", "type=event_type,tenant=", cwd=tmp_path)
    assert ended.returncode == 78
    assert b"would hold an event twice: CREATE UNIQUE INDEX" in ended.stderr
