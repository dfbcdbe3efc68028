"""`semel dlq`: list, show, replay and drop dead letters."""

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from semel.cli.help import App
from semel.cli.options import (
    ConsumerOption,
    JsonOption,
    StoreOption,
    TenantOption,
    YesOption,
    settings_for,
    text,
)
from semel.cli.output import NOT_FOUND, USAGE, CommandExit, confirm, print_json, print_rows, say
from semel.observe.formatting import plural, redact

if TYPE_CHECKING:
    from semel.brokers.dead_letters import DeadLetter, DeadLetterQueue
    from semel.cli.settings import CliSettings
    from semel.types import Mode

__all__ = ["dlq"]

LOOK_MAX = 10_000
"""How many dead letters are searched for one id."""

dlq: App = App()

Source = Annotated[
    str,
    typer.Option("--from", metavar="URL", help="The source of the dead letters, as for semel consume."),
]


@dlq.command("list")
def list_dead(
    source: Source,
    limit: Annotated[int, typer.Option("--limit", min=1, max=LOOK_MAX, help="How many at most.")] = 100,
    *,
    as_json: JsonOption = False,
) -> None:
    """List the oldest dead letters with their keys and errors."""

    async def look(queue: "DeadLetterQueue") -> None:
        found = await queue.look(limit)
        if as_json:
            print_json({"dead": [_document(dead) for dead in found]})
            return
        rows = [
            (dead.id, dead.letter.reason, dead.letter.consumer, dead.letter.key, dead.letter.error)
            for dead in found
        ]
        print_rows(("id", "reason", "consumer", "key", "error"), rows)
        if not found:
            say("no dead letters")

    _at(source, look)


@dlq.command("show")
def show_dead(
    source: Source,
    id_: Annotated[str, typer.Argument(metavar="ID", help="As listed.")],
    *,
    as_json: JsonOption = False,
) -> None:
    """Show one dead letter: headers, body, and the stack of the error."""

    async def look(queue: "DeadLetterQueue") -> None:
        dead = await _the(queue, id_)
        if as_json:
            print_json(
                _document(dead)
                | {"stack": dead.letter.stack, "headers": dead.original(), "body": _text(dead)}
            )
            return
        facts = [*_document(dead).items(), *dead.original().items(), ("body", _text(dead) or "")]
        print_rows(("", ""), [(name, str(value)) for name, value in facts if value != ""])
        if dead.letter.stack:
            say(dead.letter.stack.rstrip())

    _at(source, look)


@dlq.command("replay")
def replay_dead(
    source: Source,
    ids: Annotated[list[str] | None, typer.Argument(metavar="ID", help="As listed; or --all.")] = None,
    store: StoreOption = None,
    consumer: ConsumerOption = None,
    tenant: TenantOption = None,
    new_key: Annotated[
        str | None, typer.Option("--new-key", metavar="KEY", callback=text, help="Run it as another event.")
    ] = None,
    *,
    every: Annotated[bool, typer.Option("--all", help="Every dead letter that can be replayed.")] = False,
    yes: YesOption = False,
) -> int:
    """Replay dead letters: forget the failure, publish the message again, remove the dead letter.

    The store's audit first records who did it.
    """
    from semel.brokers.dead_letters import replay
    from semel.client.client import aopen
    from semel.errors import UsageError

    if bool(ids) == every or (new_key is not None and len(ids or ()) != 1):
        raise CommandExit("give ids or --all; --new-key goes with one id", USAGE)
    if every:
        confirm("Replay every dead letter?", yes=yes)
    settings = settings_for(store=store, consumer=consumer, tenant=tenant)
    refused = 0

    async def put_back(queue: "DeadLetterQueue") -> None:
        nonlocal refused
        chosen = await queue.look(LOOK_MAX) if every else [await _the(queue, each) for each in ids or ()]
        for dead in chosen:
            name = settings.consumer or dead.letter.consumer or "consume"
            key = dead.letter.key if new_key is None else new_key
            mode = _note(settings, name, "dlq replay", key=key, letter=dead.id, source=redact(source))
            async with aopen(settings.store, consumer=name, tenant=settings.tenant or "", mode=mode) as once:
                try:
                    await replay(queue, dead, once, new_key=new_key)
                except UsageError as error:
                    refused += 1
                    say(f"{dead.id}: {error}")
                else:
                    say(f"{dead.id}: published again")

    _at(source, put_back)
    return 1 if refused else 0


@dlq.command("drop")
def drop_dead(
    source: Source,
    ids: Annotated[list[str] | None, typer.Argument(metavar="ID", help="As listed; or --all.")] = None,
    store: StoreOption = None,
    consumer: ConsumerOption = None,
    tenant: TenantOption = None,
    *,
    every: Annotated[bool, typer.Option("--all", help="Every dead letter.")] = False,
    yes: YesOption = False,
) -> None:
    """Drop dead letters: their messages are lost, and the records of their events stay as they are.

    The store's audit first records who did it.
    """
    if bool(ids) == every:
        raise CommandExit("give ids or --all", USAGE)
    confirm("Drop every dead letter?" if every else f"Drop {plural(len(ids or ()), 'dead letter')}?", yes=yes)
    settings = settings_for(store=store, consumer=consumer, tenant=tenant)

    async def remove(queue: "DeadLetterQueue") -> None:
        chosen = await queue.look(LOOK_MAX) if every else [await _the(queue, each) for each in ids or ()]
        for dead in chosen:
            name = settings.consumer or dead.letter.consumer or "consume"
            _note(settings, name, "dlq drop", key=dead.letter.key, letter=dead.id, source=redact(source))
            await queue.remove(dead)
            say(f"{dead.id}: dropped")

    _at(source, remove)


def _note(settings: "CliSettings", consumer: str, action: str, **details: str) -> "Mode":
    """Write the action into the store's audit. Returns the mode that the store has for the consumer."""
    from semel.cli.store_access import open_store

    with open_store(settings) as reach:
        reach.note(settings.tenant or "", action, consumer=consumer, **details)
        return reach.read_settings().modes.get((settings.tenant or "", consumer), "lease")


def _at(url: str, work: Callable[["DeadLetterQueue"], Awaitable[None]]) -> None:
    from semel.brokers import source_for
    from semel.runtime.process import asyncio

    async def open_and_work() -> None:
        source: Any = source_for(url)
        await getattr(source, "visit", source.open)()  # the recorded mode may differ from the settings
        try:
            await work(source)
        finally:
            await source.close()

    asyncio.run(open_and_work())


async def _the(queue: "DeadLetterQueue", id_: str) -> "DeadLetter":
    for dead in await queue.look(LOOK_MAX):
        if dead.id == id_:
            return dead
    raise CommandExit(f"no dead letter {id_!r}; semel dlq list shows them", NOT_FOUND)


def _document(dead: "DeadLetter") -> dict[str, Any]:
    letter = dead.letter
    return {
        "id": dead.id,
        "reason": letter.reason,
        "consumer": letter.consumer,
        "key": letter.key,
        "attempts": letter.attempts,
        "fence": letter.fence,
        "error": letter.error,
        "worker": letter.worker,
        "at": letter.at,
        "body_at": letter.body_at,
    }


def _text(dead: "DeadLetter") -> str | None:
    return None if dead.body is None else dead.body.decode("utf-8", "backslashreplace")
