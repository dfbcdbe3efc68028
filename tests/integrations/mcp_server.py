"""An MCP server for tests, on stdio or HTTP: `python -m tests.integrations.mcp_server mcp|fastmcp FOLDER [PORT]`."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import semel
from semel.integrations.mcp import carry_meta, once_tool
from tests.waiting import until

KIND, FOLDER = sys.argv[1], Path(sys.argv[2])
once = semel.aopen(f"sqlite:///{FOLDER}/tools.db", consumer="tools", mode="quarantine", lease="1s")
server: Any
if KIND == "fastmcp":
    from fastmcp import FastMCP

    server = FastMCP("shop", middleware=[carry_meta])  # type: ignore[list-item]  # any callable is middleware
else:
    from mcp.server.mcpserver import MCPServer

    server = MCPServer("shop", middleware=[carry_meta])


def book(line: str) -> int:
    with (FOLDER / "ledger").open("a") as ledger:
        ledger.write(line + "\n")
    return len((FOLDER / "ledger").read_text().splitlines())


@server.tool()  # type: ignore[untyped-decorator]  # either of two classes
@once_tool(once)
async def refund(order: str, cents: int) -> str:
    """Refund an order."""
    return f"refund {book(order)}: {cents}"


@server.tool()  # type: ignore[untyped-decorator]  # either of two classes
@once_tool(once)
async def dies(order: str) -> str:
    """Has its effect, and kills the server before the answer."""
    book(order)
    os.kill(os.getpid(), signal.SIGKILL)
    return "never"


@server.tool()  # type: ignore[untyped-decorator]  # either of two classes
@once_tool(once)
async def slow(order: str) -> str:
    """Has its effect, and answers when the test says so."""
    number = book(order)
    await until((FOLDER / "go").exists)
    return f"slow {number}"


if __name__ == "__main__":
    options: dict[str, Any] = {"show_banner": False} if KIND == "fastmcp" else {}
    if len(sys.argv) > 3:
        server.run("streamable-http", port=int(sys.argv[3]), **options)
    else:
        server.run("stdio", **options)
