"""Tools in real MCP servers, on stdio and HTTP: replies are cut, servers killed, clients try again: one effect."""

import asyncio
import inspect
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from mcp import Client, StdioServerParameters

import semel
from semel.errors import KeyMissing, NotApplied, OutcomeUnknown, PayloadMismatch, UsageError
from semel.integrations.mcp import KEY, RUN, once_tool, tool_scope
from tests.services import server
from tests.waiting import until

ROOT = Path(__file__).resolve().parents[2]
WITHIN_S = 60.0


def stdio(folder: Path) -> StdioServerParameters:
    arguments = ["-m", "tests.integrations.mcp_server", "mcp", str(folder)]
    return StdioServerParameters(command=sys.executable, args=arguments, cwd=ROOT)


async def call(client: Client, tool: str, arguments: dict[str, Any], **meta: str) -> tuple[bool, str]:
    named = {{"key": KEY, "run": RUN}[name]: value for name, value in meta.items()}
    sent: Any = client.call_tool(tool, arguments, meta=named)  # type: ignore[arg-type]
    answer = await asyncio.wait_for(sent, WITHIN_S)
    return bool(answer.is_error), answer.content[0].text


def ledger(folder: Path) -> list[str]:
    path = folder / "ledger"
    return path.read_text().splitlines() if path.exists() else []


@pytest.mark.slow
def test_on_stdio_a_killed_server_leaves_the_call_undecided(tmp_path: Path) -> None:
    async def first() -> None:
        async with Client(stdio(tmp_path)) as client:
            one = await call(client, "refund", {"order": "a", "cents": 5}, run="r1")
            two = await call(client, "refund", {"cents": 5, "order": "a"}, run="r1")
            assert one == two == (False, "refund 1: 5")
            assert await call(client, "refund", {"order": "a", "cents": 5}, run="r2") == (
                False,
                "refund 2: 5",
            )
            wrong, said = await call(client, "refund", {"order": "a", "cents": 5})
            assert wrong
            assert KEY in said
            reached.append("the call that kills")
            await call(client, "dies", {"order": "d"}, key="k1")

    reached: list[str] = []
    with suppress(Exception):  # its server is dead
        asyncio.run(first())
    assert (reached, ledger(tmp_path)) == (["the call that kills"], ["a", "a", "d"])

    async def again() -> None:
        async with Client(stdio(tmp_path)) as client:

            async def undecided() -> bool:
                wrong, said = await call(client, "dies", {"order": "d"}, key="k1")
                assert wrong
                return "ended without a result" in said  # once its lease is over

            await until(undecided)
            assert await call(client, "refund", {"order": "a", "cents": 5}, run="r1") == (
                False,
                "refund 1: 5",
            )

    asyncio.run(again())
    assert ledger(tmp_path) == ["a", "a", "d"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mcp", "fastmcp"])
def test_on_http_a_cut_reply_and_a_killed_server_have_one_effect(tmp_path: Path, kind: str) -> None:
    port = server.free_port()
    address = f"http://127.0.0.1:{port}/mcp"

    def start() -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-m", "tests.integrations.mcp_server", kind, str(tmp_path), str(port)]
        with (tmp_path / "log").open("ab") as log:
            return subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)

    async def cut() -> None:
        await until(lambda: answers(port))
        async with Client(address) as client:
            waiting = asyncio.create_task(call(client, "slow", {"order": "s"}, run="r"))
            await until(lambda: ledger(tmp_path) == ["s"])
            waiting.cancel()  # the reply is cut: nobody hears it
            with suppress(BaseException):
                await waiting
        (tmp_path / "go").touch()
        async with Client(address) as client:
            answer = await call(client, "slow", {"order": "s"}, run="r")
            assert ledger(tmp_path) == ["s"]
            # The transport decides whether a client that is gone cancels the tool: then it is undecided.
            assert answer == (False, "slow 1") or "ended without a result" in answer[1]
            wrong, said = await call(client, "refund", {"order": "a", "cents": 5})
            assert wrong
            assert KEY in said
            await call(client, "dies", {"order": "d"}, key="k1")

    async def again() -> None:
        await until(lambda: answers(port))
        async with Client(address) as client:

            async def undecided() -> bool:
                wrong, said = await call(client, "dies", {"order": "d"}, key="k1")
                assert wrong
                return "ended without a result" in said  # once its lease is over

            await until(undecided)

    running = start()
    try:
        with suppress(Exception):  # the server is killed in the last call
            asyncio.run(cut())
        assert running.wait(WITHIN_S) == -signal.SIGKILL, (tmp_path / "log").read_text()[-3000:]
        running = start()
        asyncio.run(again())
    finally:
        running.kill()
        running.wait()
    assert ledger(tmp_path) == ["s", "d"]


async def answers(port: int) -> bool:
    with suppress(OSError):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.close()
        await writer.wait_closed()
        return True
    return False


def test_tools_without_mcp() -> None:
    sent: list[str] = []
    with semel.open("memory:", consumer="tools", mode="quarantine") as once:

        @once_tool(once)
        def mail(to: str, text: str = "hello") -> str:
            sent.append(to)
            if to == "nobody":
                raise NotApplied
            if to == "broken":
                raise TimeoutError
            return f"{to}: {text}"

        with pytest.raises(KeyMissing, match=RUN):
            mail("ada")
        with tool_scope(run="1"):
            assert mail("ada") == mail(to="ada", text="hello") == "ada: hello"
            for _ in range(2):
                with pytest.raises(NotApplied):
                    mail("nobody")
            with pytest.raises(TimeoutError):
                mail("broken")
            with pytest.raises(OutcomeUnknown):
                mail("broken")
        with tool_scope(run="1", caller="eve"):
            mail("ada")
        with tool_scope(key="k"):
            mail("bob")
            with pytest.raises(PayloadMismatch):
                mail("bob", "other")
        assert sent == ["ada", "nobody", "nobody", "broken", "ada", "bob"]


def test_frameworks_read_the_tool_as_it_was_written() -> None:
    with semel.open("memory:", consumer="tools", mode="quarantine") as once:

        @once_tool(once)
        def mail(to: str, text: str = "hello") -> str:
            """Send a mail."""
            return f"{to}: {text}"

        assert (mail.__name__, mail.__doc__) == ("mail", "Send a mail.")
        assert str(inspect.signature(mail)) == "(to: str, text: str = 'hello') -> str"
        assert get_type_hints(mail) == {"to": str, "text": str, "return": str}
        with tool_scope(run="thread"):  # two calls of one wish have two ids of their own, which are not seen
            assert mail("ada") == mail("ada")


def test_a_mode_that_repeats_has_to_be_chosen() -> None:
    with semel.open("memory:", consumer="tools") as once:
        with pytest.raises(UsageError, match="quarantine"):
            once_tool(once)
        once_tool(once, repeats=True)
