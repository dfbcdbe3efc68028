"""Tools of LangChain and of OpenAI agents: models that lose a reply call their tool again, with another id."""

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

from agents import Agent, Model, ModelResponse, Runner, Usage, function_tool
from langchain_core.tools import tool
from openai.types.responses import ResponseFunctionToolCall, ResponseOutputMessage, ResponseOutputText

import semel
from semel.integrations.mcp import once_tool, tool_scope

once = semel.open(os.environ["STORE"], consumer="tools", mode="quarantine")
aonce = semel.aopen(os.environ["STORE"], consumer="tools", mode="quarantine")
LEDGER = Path(os.environ["LEDGER"])


def write(line: str) -> str:
    with LEDGER.open("a") as ledger:
        ledger.write(line + "\n")
    return f"refunded {line}"


@tool  # type: ignore[untyped-decorator]
@once_tool(once, name="chain.refund")
def chain_refund(order: str, cents: int) -> str:
    """Refund an order."""
    return write(f"chain:{order}:{cents}")


@function_tool  # type: ignore[untyped-decorator]
@once_tool(aonce, name="agent.refund")
async def agent_refund(order: str, cents: int) -> str:
    """Refund an order."""
    return write(f"agent:{order}:{cents}")


class Forgetful(Model):  # type: ignore[misc]
    """A model that calls its tool twice, with two ids, and then says what it read."""

    async def get_response(self, *args: Any, input: Any, **options: Any) -> ModelResponse:  # noqa: A002 - their name
        answers = [each["output"] for each in input if each.get("type") == "function_call_output"]
        said: Any = ResponseFunctionToolCall(
            type="function_call",
            name="agent_refund",
            call_id=f"call-{len(answers)}",
            arguments='{"order": "o-1", "cents": 500}',
        )
        if len(answers) == 2:
            text = ResponseOutputText(type="output_text", text="; ".join(answers), annotations=[])
            said = ResponseOutputMessage(
                id="m", type="message", role="assistant", status="completed", content=[text]
            )
        return ModelResponse(output=[said], usage=Usage(), response_id=None)

    def stream_response(self, *args: Any, **options: Any) -> Any:
        raise NotImplementedError


def call_chain(run: str) -> None:
    with tool_scope(run=run):
        for call in ("call-1", "call-2"):
            asked = {"order": "o-1", "cents": 500}
            answer = chain_refund.invoke(
                {"name": "chain_refund", "args": asked, "id": call, "type": "tool_call"}
            )
            sys.stdout.write(f"{answer.tool_call_id}: {answer.content}\n")


async def run_agent(run: str) -> None:
    with tool_scope(run=run):
        ended = await Runner.run(Agent(name="shop", model=Forgetful(), tools=[agent_refund]), "refund o-1")
    sys.stdout.write(f"{ended.final_output}\n")
    await aonce.close()


if __name__ == "__main__":
    call_chain("thread-1")
    call_chain("thread-2")
    asyncio.run(run_agent("thread-1"))
    once.close()
