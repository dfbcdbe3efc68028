"""How `--help` looks: whole summaries, readable placeholders, examples."""

import re
from collections.abc import Callable
from typing import Any, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

__all__ = ["EXAMPLES", "App", "HelpGroup"]

EXAMPLES: dict[str, tuple[str, ...]] = {
    "chaos": (
        "semel chaos app:charge --store sqlite:///chaos.db --effects app:count --minutes 2 --report chaos.html",
        "semel chaos app:credit --mode inbox --store postgresql://localhost/test --seed 7 --rounds 3",
    ),
    "demo": ("semel demo", "semel demo --control --seed 7"),
    "filter": (
        "semel filter --key id events.jsonl > new.jsonl",
        "semel filter --key order.id --store sqlite:///seen.db --output new.jsonl events.jsonl.gz",
    ),
    "once": (
        "semel once --key nightly-2026-11-15 -- ./export.sh --fast",
        "semel once --key import-7 --wait 10m --keep-failures -- ./import.sh",
    ),
    "consume": (
        "semel consume app:handle --from 'redis://localhost/0?stream=orders&group=billing'",
        "semel consume app:handle --from 'amqp://localhost/?queue=orders' --store sqlite:///events.db --until-idle",
    ),
    "dedup": (
        "semel dedup --from 'kafka://localhost:9092/in?group=g' --to kafka://localhost:9092/out --key id",
        "semel dedup --from 'kafka://localhost:9092/in?group=g' --to out --key id --time ts --late drop --until-idle",
    ),
    "show": ("semel show evt_1", "semel show evt_1 --consumer billing --json"),
    "list": (
        "semel list --state failed --older-than 1h",
        "semel list --prefix order- --consumer billing --json",
        "semel list --consumer semel.audit",
    ),
    "forget": ("semel forget evt_1 --consumer billing", "semel forget evt_1 --force --yes"),
    "resolve": (
        'semel resolve evt_7 --fence 1794787589483465 --done --value \'{"mail": "sent"}\'',
        "semel resolve evt_8 --fence 1794787589483466 --absent",
    ),
    "purge": ("semel purge --dry-run", "semel purge --watch --every 10m"),
    "stats": ("semel stats --store sqlite:///events.db", "semel stats --watch --every 5s"),
    "relay": (
        "semel relay --from sqlite:///app.db --to stdout: --until-empty",
        "semel relay --from postgresql://localhost/app --to kafka://localhost:9092 --metrics 9000",
    ),
    "listen": (
        "semel listen wss://feed.example.com/events app:handle",
        "semel listen ws://localhost:8000/feed --persist sqlite:///events.db --key meta.id",
    ),
    "serve": ("semel serve", "semel serve --host 0.0.0.0 --port 8787 --store postgresql://localhost/app"),
    "migrate": (
        "semel migrate --store sqlite:///events.db",
        "semel migrate --store postgresql://localhost/app --sql",
    ),
    "explain": (
        "semel explain --mode lease --sink keyed",
        "semel explain --from sqs://eu-west-1/orders --consumer billing --require lease",
    ),
    "doctor": ("semel doctor --store sqlite:///events.db", "semel doctor --json"),
    "advise": (
        "semel advise /var/log/semel --consumer billing --plot lags.svg",
        "semel advise --metrics http://localhost:9000/metrics",
    ),
    "audit": (
        "semel audit 'events/*.parquet' --key id --time ts",
        "semel audit events.jsonl --key id --time ts --content customer,amount --json",
    ),
    "import": (
        "semel import postgresql://localhost/app --table processed_events --key event_id --consumer billing",
        "semel import redis://localhost/0 --pattern 'processed:*' --consumer billing --store sqlite:///billing.db",
    ),
    "move status": ("semel move status --old redis://localhost/0 --new postgresql://localhost/app",),
    "move close": ("semel move close --old redis://localhost/0 --new postgresql://localhost/app",),
    "move finish": (
        "semel move finish --old redis://localhost/0 --new postgresql://localhost/app --window 24h",
    ),
    "history": ("semel history /var/log/semel --key evt_1", "semel history /var/log/semel --since 7d --json"),
    "bench": ("semel bench --store sqlite:///events.db --seconds 60", "semel bench --json"),
    "window set": (
        "semel window set billing 24h",
        "semel window set billing off --type heartbeat",
        "semel window set billing 7d --existing --yes",
    ),
    "window get": ("semel window get billing", "semel window get billing --type heartbeat --json"),
    "window list": ("semel window list", "semel window list --consumer billing"),
    "window unset": ("semel window unset billing --type heartbeat",),
    "consumer list": ("semel consumer list --store sqlite:///events.db",),
    "consumer show": ("semel consumer show billing",),
    "consumer set-mode": ("semel consumer set-mode billing quarantine",),
    "config show": ("semel config show", "semel config show --json"),
    "dlq list": ("semel dlq list --from 'redis://localhost/0?stream=orders&group=billing'",),
    "dlq show": ("semel dlq show 1731700000000-0 --from 'redis://localhost/0?stream=orders&group=billing'",),
    "dlq drop": (
        "semel dlq drop 1731700000000-0 --yes --from 'redis://localhost/0?stream=orders&group=billing'",
    ),
    "dlq replay": (
        "semel dlq replay 1731700000000-0 --from 'redis://localhost/0?stream=orders&group=billing'",
        "semel dlq replay --all --yes --from 'redis://localhost/0?stream=orders&group=billing'",
    ),
    "outbox list": ("semel outbox list --store sqlite:///app.db", "semel outbox list --dead --json"),
    "outbox show": ("semel outbox show 019a8f0e-5d0c-7c3e-8f5a-2b1d6c7e9f00",),
    "outbox retry": ("semel outbox retry --all", "semel outbox retry 019a8f0e-5d0c-7c3e-8f5a-2b1d6c7e9f00"),
    "outbox drop": ("semel outbox drop 019a8f0e-5d0c-7c3e-8f5a-2b1d6c7e9f00 --yes",),
    "token create": (
        "semel token create ann --role read",
        "semel token create shop --tenant shop --role write --expires 90d",
    ),
    "token list": ("semel token list",),
    "token rotate": ("semel token rotate 7f31a34c715d17a5 --grace 7d",),
    "token revoke": ("semel token revoke 7f31a34c715d17a5 --yes",),
}


F = TypeVar("F", bound=Callable[..., Any])
_NUMBER = re.compile(r"<(?:int|float)(?: range)?>")


class HelpCommand(TyperCommand):
    """A command whose help ends with examples."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the words of the usage line: `KEY` for required arguments, `[KEY]` for optional ones."""
        return [piece.replace("{", "").replace("}", "") for piece in super().collect_usage_pieces(ctx)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments without their types, and the options with `N` for a number."""
        records: dict[str, list[tuple[str, str]]] = {"argument": [], "option": []}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                kind = param.param_type_name
                records[kind].append(_argument(*record) if kind == "argument" else _option(*record))
        for kind, title in (("argument", "Arguments"), ("option", "Options")):
            if records[kind]:
                with formatter.section(title):
                    formatter.write_dl(records[kind])

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the examples, each on a line that can be copied."""
        lines = EXAMPLES.get(ctx.command_path.partition(" ")[2], ())
        if lines:
            with formatter.section("Examples"):
                formatter.write("".join(f"{'':{formatter.current_indent}}{line}\n" for line in lines))


class HelpGroup(TyperGroup):
    """A group that lists its commands with their whole summaries."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write each command with the first paragraph of its help."""
        found = ((name, self.get_command(ctx, name)) for name in self.list_commands(ctx))
        rows = [(name, _summary(each.help or "")) for name, each in found if each and not each.hidden]
        if rows:
            with formatter.section("Commands"):
                formatter.write_dl(rows)


class App(typer.Typer):
    """A group of commands with this help format."""

    def __init__(self, *, cls: type[TyperGroup] = HelpGroup, **more: Any) -> None:
        super().__init__(cls=cls, no_args_is_help=True, rich_markup_mode=None, **more)

    def command(self, name: str | None = None, **more: Any) -> Callable[[F], F]:
        """Add a command, as `typer.Typer.command` does."""
        return super().command(name, **({"cls": HelpCommand} | more))


def _summary(text: str) -> str:
    return " ".join(text.partition("\n\n")[0].split())


def _argument(name: str, text: str) -> tuple[str, str]:
    """Return an argument's name without its type, and its help with the allowed words."""
    name, _, kind = name.partition(" <")
    choices = f" One of {kind.rstrip('>').replace('|', ', ')}." if "|" in kind else ""
    return name.upper() if choices else name, text.replace("  [", f"{choices}  [", 1)


def _option(name: str, text: str) -> tuple[str, str]:
    return _NUMBER.sub("N", name), text
