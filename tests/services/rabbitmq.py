"""RabbitMQ for tests: from `SEMEL_TEST_RABBITMQ_URL`, an installed server, or the package manager."""

import os
import secrets
import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.services import packages, programs, server
from tests.services.nats import answers
from tests.services.server import Missing, State
from tests.waiting import await_true

READY_S = 120.0


def url() -> str:
    """The one server of this run; tests use queues of their own."""
    found: str = server.shared("rabbitmq", _start)["url"]
    return found


COUNT = """
Count = fun(Name) ->
  case rabbit_amqqueue:lookup(rabbit_misc:r(<<"/">>, queue, Name)) of
    {ok, Queue} ->
      case amqqueue:get_type(Queue) of
        rabbit_quorum_queue ->
          Total = fun rabbit_fifo:query_messages_total/1,
          {ok, {_, Found}, _} = ra:local_query(amqqueue:get_pid(Queue), Total),
          Found;
        _ -> proplists:get_value(messages, rabbit_amqqueue:info(Queue, [messages]))
      end;
    _ -> 0
  end
end,
Sum = fun() -> lists:sum([Count(list_to_binary(Name)) || Name <- string:lexemes("%s", " ")]) end,
Look = fun
  Again(0) -> Sum();
  Again(Times) -> case Sum() of 0 -> timer:sleep(100), Again(Times - 1); Found -> Found end
end,
Look(4).
"""
"""Over AMQP a server tells how many messages are ready, not how many are delivered. A message whose delay is over is
for a moment in neither queue, so nothing counts as nothing only if it stays so."""


def messages(queues: Sequence[str]) -> int:
    """How many messages these queues hold, ready or delivered, as the queues themselves say."""
    return int(_evaluate(COUNT % " ".join(queues)))


CLOSE = """
{ok, Queue} = rabbit_amqqueue:lookup(rabbit_misc:r(<<"/">>, queue, <<"%s">>)),
Connections = [Connection || Consumer <- rabbit_amqqueue:consumers(Queue),
  {connection, Connection} <- rabbit_channel:info(element(1, Consumer), [connection])],
[rabbit_networking:close_connection(Connection, "maintenance") || Connection <- Connections],
length(Connections).
"""


def close_connections(queue: str) -> None:
    """Have the server close the connections of the consumers of a queue, and no others."""
    assert int(_evaluate(CLOSE % queue)) > 0


def management() -> str:
    """The address of the management API, switched on while the server runs. Skips where the server is not ours."""
    state = server.shared("rabbitmq", _start)
    if "env" not in state:
        pytest.skip("the management API of a server that was given is not ours to switch on")
    with packages.locked("semel-rabbitmq-management"):
        port = state["management"]
        if not answers(port):
            file = Path(state["env"]["RABBITMQ_ENABLED_PLUGINS_FILE"])
            file.write_text("[rabbitmq_management].\n", encoding="ascii")
            _evaluate(
                f"application:set_env(rabbitmq_management, tcp_config, [{{port, {port}}}]),"
                f'{{ok, _, _}} = rabbit_plugins:ensure("{file}"), done.'
            )
            assert await_true(lambda: answers(port), READY_S)
    return f"http://127.0.0.1:{port}"


def _evaluate(expression: str) -> str:
    """Evaluate Erlang in the server; returns the result as text.

    By `erl_call`, which comes with Erlang: `rabbitmqctl` needs seconds of processor time for each answer.
    """
    state = server.shared("rabbitmq", _start)
    node, me = state["env"]["RABBITMQ_NODENAME"], f"semel-{os.urandom(6).hex()}"
    cookie = (Path(state["env"]["HOME"]) / ".erlang.cookie").read_text(encoding="ascii")
    ended = subprocess.run(
        # -h: a name of its own, or two that ask at once are taken for one, and refused.
        [state["call"], "-h", me, "-sname", node, "-c", cookie, "-e"],
        input=f"{expression}\n", env=state["env"], capture_output=True, text=True, check=True, timeout=READY_S,
    )  # fmt: skip
    assert ended.stdout.startswith("{ok, "), ended.stdout
    return ended.stdout.removeprefix("{ok, ").removesuffix("}")


def stopped(state: State) -> None:
    """The run is over. Its script passes SIGTERM on to the server."""
    for pid in state["processes"]:
        server.end(pid, signal.SIGTERM)


def _start(folder: Path) -> State:
    given = programs.given("rabbitmq-server")
    if given:
        return {"url": given}
    script = Path(programs.find_or_install("rabbitmq-server"))
    epmd, call = shutil.which("epmd"), shutil.which("erl_call")
    if epmd is None or call is None:
        raise Missing(
            "install epmd and erl_call, which come with Erlang (Debian: apt-get install erlang-base)"
        )
    port, names, between = server.free_port(), server.free_port(), server.free_port()
    own = {
        "PATH": os.environ["PATH"],
        "HOME": str(folder),
        "ERL_EPMD_PORT": str(names),
        "ERL_EPMD_ADDRESS": "127.0.0.1",
        "RABBITMQ_CONF_ENV_FILE": os.devnull,
        "RABBITMQ_NODENAME": f"semel{port}@localhost",
        "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
        "RABBITMQ_NODE_PORT": str(port),
        "RABBITMQ_DIST_PORT": str(between),
        "RABBITMQ_MNESIA_BASE": str(folder / "data"),
        "RABBITMQ_LOG_BASE": str(folder / "logs"),
        "RABBITMQ_LOGS": "-",
        "RABBITMQ_ENABLED_PLUGINS_FILE": str(folder / "plugins"),
        "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "+sbwt none +S 1 -rabbit quorum_tick_interval 100",
        **{name: value for name, value in os.environ.items() if name.startswith("SEMEL_TEST_")},
    }
    # Several programs of Erlang start at once: one that reads what another has half made refuses it.
    cookie = folder / ".erlang.cookie"
    cookie.write_text(secrets.token_hex(10), encoding="ascii")
    cookie.chmod(0o400)
    log = folder / "log"
    register = server.spawn(
        [epmd, "-port", str(names), "-address", "127.0.0.1"], folder / "epmd.log", env=own
    )
    pid = server.spawn([str(script)], log, env=own)
    try:
        server.await_ready(lambda: _is_ready(pid, port, log), "rabbitmq-server", log, READY_S)
    except BaseException:
        stopped({"processes": [pid, register]})
        raise
    return {
        "url": f"amqp://guest:guest@127.0.0.1:{port}/",
        "processes": [pid, register],
        "stop": __name__,
        "management": server.free_port(),
        "env": own,
        "call": call,
    }


def _is_ready(pid: int, port: int, log: Path) -> bool:
    if not server.is_alive(pid):
        raise Missing(f"rabbitmq-server ended: {log.read_text(encoding='utf-8', errors='replace')[-2000:]}")
    return answers(port) and "completed with" in log.read_text(encoding="utf-8", errors="replace")
