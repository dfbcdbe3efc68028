"""The handler under the real Lambda runtime client, which a small Runtime API feeds."""

import json
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import Queue
from typing import Any

import pytest

import semel
from semel.integrations.aws_lambda import sqs_handler
from tests.cli.processes import ROOT, environment

pytestmark = pytest.mark.slow
WITHIN_S = 30.0


class RuntimeApi:
    """The two ends of the Runtime API that the client uses: the next invocation, and its answer."""

    def __init__(self) -> None:
        self._events: Queue[Any] = Queue()
        self._answers: Queue[Any] = Queue()
        api = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                event = api._events.get()
                body = json.dumps(event).encode()
                self.send_response(200)
                self.send_header("Lambda-Runtime-Aws-Request-Id", "request")
                self.send_header("Lambda-Runtime-Deadline-Ms", str(int((time.time() + 60) * 1000)))
                self.send_header("Lambda-Runtime-Invoked-Function-Arn", "arn:aws:lambda:::function:f")
                self.send_header("Lambda-Runtime-Trace-Id", "Root=1-5bef4de7-ad49b0e87f6ef6c87fc2e700")
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def do_POST(self) -> None:
                said = self.rfile.read(int(self.headers["Content-Length"]))
                self.send_response(202)
                self.send_header("Content-Length", "0")
                self.end_headers()
                api._answers.put((self.path.rpartition("/")[2], json.loads(said)))

            def log_message(self, *_arguments: Any) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self._thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server.server_address[1]}"

    def invoke(self, *records: dict[str, Any]) -> Any:
        self._events.put({"Records": list(records)})
        kind, answer = self._answers.get(timeout=WITHIN_S)
        assert kind == "response", answer
        return [each["itemIdentifier"] for each in answer["batchItemFailures"]]

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self._thread.join()


@contextmanager
def function(folder: Path) -> Iterator[RuntimeApi]:
    with closing(sqlite3.connect(folder / "ledger.db")) as ledger, ledger:
        ledger.execute("CREATE TABLE ledger (key TEXT)")
    api = RuntimeApi()
    process = subprocess.Popen(
        [sys.executable, "-m", "awslambdaric", "tests.integrations.function.handler"],
        cwd=ROOT,
        env=environment(
            AWS_LAMBDA_RUNTIME_API=api.address,
            SEMEL_TEST_FOLDER=str(folder),
            AWS_LAMBDA_FUNCTION_NAME="f",
            AWS_LAMBDA_FUNCTION_VERSION="1",
            AWS_LAMBDA_FUNCTION_MEMORY_SIZE="128",
            AWS_LAMBDA_LOG_GROUP_NAME="g",
            AWS_LAMBDA_LOG_STREAM_NAME="s",
        ),
    )
    try:
        yield api
    finally:
        process.kill()
        process.wait()
        api.close()


def record(
    number: int, key: str, order: str = "", *, group: str = "", broken: bool = False
) -> dict[str, Any]:
    attributes = {"ApproximateReceiveCount": "1"} | ({"MessageGroupId": group} if group else {})
    return {
        "messageId": f"m{number}",
        "body": json.dumps({"order": order or key, "broken": broken}),
        "attributes": attributes,
        "messageAttributes": {"message_id": {"stringValue": key, "dataType": "String"}} if key else {},
        "eventSource": "aws:sqs",
    }


def ledger(folder: Path) -> list[str]:
    with closing(sqlite3.connect(folder / "ledger.db")) as connection, connection:
        return [key for (key,) in connection.execute("SELECT key FROM ledger")]


def test_only_what_is_not_done_is_reported(tmp_path: Path) -> None:
    with function(tmp_path) as api:
        first = api.invoke(record(1, "a"), record(2, "b", broken=True), record(3, "a"), record(4, ""))
        again = api.invoke(record(1, "a"), record(2, "b"), record(5, "c"))
    assert first == ["m2", "m4"], "the failed one, and the one without a key: a messageId is none"
    assert again == []
    assert sorted(ledger(tmp_path)) == ["a", "b", "b", "c"]


def test_what_is_behind_a_failure_of_its_group_is_left_to_come_again(tmp_path: Path) -> None:
    with function(tmp_path) as api:
        failed = api.invoke(
            record(1, "x1", group="x"),
            record(2, "x2", group="x", broken=True),
            record(3, "y1", group="y"),
            record(4, "x3", group="x"),
        )
    assert failed == ["m2", "m4"]
    assert sorted(ledger(tmp_path)) == ["x1", "x2", "y1"]


def test_a_body_that_does_not_read_is_reported() -> None:
    @sqs_handler(semel.open("memory:", consumer="billing"))
    def handler(paid: dict[str, int]) -> None: ...

    bad = record(1, "a") | {"body": "no json"}
    assert handler({"Records": [bad]}, None) == {"batchItemFailures": [{"itemIdentifier": "m1"}]}
