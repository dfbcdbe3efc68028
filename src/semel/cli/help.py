"""How `--help` looks: whole summaries, readable placeholders, examples."""

import re
from collections.abc import Callable
from typing import Any, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

from semel.cli.examples import EXAMPLES

__all__ = ["App", "HelpGroup"]

F = TypeVar("F", bound=Callable[..., Any])
_NUMBER = re.compile(r"<(?:int|float)(?: range)?>")


class HelpCommand(TyperCommand):
    """A command whose help ends with examples."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """The words of the usage line: `KEY` for what must be given, `[KEY]` for what may be."""
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
    """A group of commands whose help looks as described here."""

    def __init__(self, *, cls: type[TyperGroup] = HelpGroup, **more: Any) -> None:
        super().__init__(cls=cls, no_args_is_help=True, rich_markup_mode=None, **more)

    def command(self, name: str | None = None, **more: Any) -> Callable[[F], F]:
        """Add a command, as `typer.Typer.command` does."""
        return super().command(name, **({"cls": HelpCommand} | more))


def _summary(text: str) -> str:
    return " ".join(text.partition("\n\n")[0].split())


def _argument(name: str, text: str) -> tuple[str, str]:
    """An argument's name without its type; where it is one of several words, the help lists them."""
    name, _, kind = name.partition(" <")
    choices = f" One of {kind.rstrip('>').replace('|', ', ')}." if "|" in kind else ""
    return name.upper() if choices else name, text.replace("  [", f"{choices}  [", 1)


def _option(name: str, text: str) -> tuple[str, str]:
    return _NUMBER.sub("N", name), text
