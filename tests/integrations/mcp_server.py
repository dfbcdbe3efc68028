"""An MCP server for tests: `python -m tests.integrations.mcp_server FOLDER [PORT]`, on stdio or HTTP."""

import os
import signal
import sys
from pathlib import Path

from mcp.server.mcpserver import MCPServer

import semel
from semel.integrations.mcp import carry_meta, once_tool
from tests.waiting import until

FOLDER = Path(sys.argv[1])
once = semel.aopen(f"sqlite:///{FOLDER}/tools.db", consumer="tools", mode="quarantine", lease="1s")
server = MCPServer("shop", middleware=[carry_meta])


def book(line: str) -> int:
    with (FOLDER / "ledger").open("a") as ledger:
        ledger.write(line + "\n")
    return len((FOLDER / "ledger").read_text().splitlines())


@server.tool()
@once_tool(once)
async def refund(order: str, cents: int) -> str:
    """Refund an order."""
    return f"refund {book(order)}: {cents}"


@server.tool()
@once_tool(once)
async def dies(order: str) -> str:
    """Has its effect, and kills the server before the answer."""
    book(order)
    os.kill(os.getpid(), signal.SIGKILL)
    return "never"


@server.tool()
@once_tool(once)
async def slow(order: str) -> str:
    """Has its effect, and answers when the test says so."""
    number = book(order)
    await until((FOLDER / "go").exists)
    return f"slow {number}"


if __name__ == "__main__":
    if len(sys.argv) > 2:
        server.run("streamable-http", port=int(sys.argv[2]))
    else:
        server.run("stdio")
