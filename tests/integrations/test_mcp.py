"""Tools in real MCP servers, on stdio and HTTP: replies are cut, servers killed, clients try again: one effect."""

import asyncio
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

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
    arguments = ["-m", "tests.integrations.mcp_server", str(folder)]
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
def test_on_http_a_cut_reply_costs_nothing(tmp_path: Path) -> None:
    port = server.free_port()
    command = [sys.executable, "-m", "tests.integrations.mcp_server", str(tmp_path), str(port)]
    with (tmp_path / "log").open("wb") as log:
        running = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)

    async def scene() -> None:
        address = f"http://127.0.0.1:{port}/mcp"
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

    try:
        asyncio.run(scene())
    finally:
        running.kill()
        running.wait()


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


def test_a_mode_that_repeats_has_to_be_chosen() -> None:
    with semel.open("memory:", consumer="tools") as once:
        with pytest.raises(UsageError, match="quarantine"):
            once_tool(once)
        once_tool(once, repeats=True)
