"""SQS for tests: from `SEMEL_TEST_SQS_URL`, or ElasticMQ by Maven and Java."""

from pathlib import Path

from tests.services import java, programs, server
from tests.services.nats import answers
from tests.services.server import State

HEAP_MB = 256


def url() -> str:
    """The endpoint of this run's server; tests use queues of their own."""
    found: str = server.shared("sqs", _start)["url"]
    return found


def _start(folder: Path) -> State:
    given = programs.given("elasticmq")
    if given:
        return {"url": given}
    run = java.command("elasticmq", HEAP_MB)
    port, log = server.free_port(), folder / "log"
    settings = folder / "elasticmq.conf"
    settings.write_text(
        f'node-address {{ protocol = http, host = localhost, port = {port}, context-path = "" }}\n'
        f'rest-sqs {{ enabled = true, bind-port = {port}, bind-hostname = "127.0.0.1" }}\n'
        "rest-stats { enabled = false }\n"
    )
    pid = server.spawn([*run[:1], f"-Dconfig.file={settings}", *run[1:], "org.elasticmq.server.Main"], log)
    server.await_ready(lambda: answers(port), "elasticmq", log)
    return {"url": f"http://127.0.0.1:{port}", "pids": [pid]}
