"""`semel explain --dedup` and `semel doctor --dedup`: whether the contract of a deduplication holds."""

import sys
from collections.abc import Iterator
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from semel.cli.options import text
from semel.cli.output import BAD_CONFIGURATION, USAGE, CommandExit, console, print_json, print_rows, table
from semel.observe.doctor import Finding
from semel.observe.formatting import plural, redact
from semel.windows import window_us

if TYPE_CHECKING:
    from semel.cli.settings import CliSettings
    from semel.streams.examine import DedupExamination

__all__ = [
    "CONTRACT",
    "DedupKeyOption",
    "DedupMarksOption",
    "DedupOption",
    "DedupToOption",
    "explain_dedup",
    "find_in_dedup",
    "refuse_without_dedup",
]

CONTRACT = (
    "An event and its copies must be in one partition: same message key, same partitioner."
    " Java's clients and librdkafka's have different ones; --repartition where producers do not keep to it."
)
PROMISE = (
    "Every id of the input is in the output once within the window, in order per message key, for readers with"
    " isolation.level=read_committed; whichever instance is killed, paused, cut off or loses its disk."
)

DedupOption = Annotated[
    str | None,
    typer.Option(
        "--dedup",
        metavar="URL",
        callback=text,
        show_default=False,
        help="Look at a semel dedup instead of a store: the URL of its --from. Give its other options too.",
    ),
]
DedupToOption = Annotated[
    str, typer.Option("--to", metavar="TOPIC", callback=text, help="With --dedup: the topic that it writes.")
]
DedupKeyOption = Annotated[
    str | None,
    typer.Option("--key", metavar="PATH", callback=text, help="With --dedup: where it reads the id."),
]
DedupMarksOption = Annotated[
    str, typer.Option("--marks", metavar="TOPIC", callback=text, help="With --dedup: the topic of its marks.")
]


def refuse_without_dedup(**given: str | None) -> None:
    """Raise a usage error for options that only make sense with `--dedup`."""
    for name, value in given.items():
        if value:
            raise CommandExit(f"--{name} is an option of a deduplication; give --dedup URL too", USAGE)


def _examine(
    settings: "CliSettings", url: str, *, to: str, key: str | None, marks: str
) -> "tuple[DedupExamination, str]":
    """Return what the brokers say, and the window in words."""
    from semel.cli.consume import quiet_clients

    try:
        from semel.streams.examine import examine_dedup, window_text
    except ImportError as error:
        raise CommandExit(str(error), BAD_CONFIGURATION) from None
    quiet_clients()
    asked_us = window_us(settings.window) if settings.is_set("window") else 0
    found = examine_dedup(url, to=to, key=key, marks=marks, window_us=asked_us)
    return found, window_text(found, asked_us)


def explain_dedup(
    settings: "CliSettings", url: str, *, to: str, key: str | None, marks: str, as_json: bool
) -> None:
    """Print what the deduplication promises, the contract, and what breaks it."""
    found, window = _examine(settings, url, to=to, key=key, marks=marks)
    if as_json:
        print_json(_document(found))
        return
    broken = sum(each.breaks for each in found.weaknesses)
    facts = [
        ("dedup", redact(found.name)),
        *(("topic", f"{name}: {plural(count, 'partition')}") for name, count in found.partitions.items()),
        ("window", window),
        ("instances", f"{found.members:,} now, {plural(found.waiting, 'record waits', 'records wait')}"),
        ("promise", PROMISE),
        ("contract", CONTRACT),
        *(("found", each) for each in found.notes),
        (
            "holds",
            f"NO: {plural(broken, 'finding breaks', 'findings break')} it" if broken else _verdict(found),
        ),
    ]
    weakened = [
        (
            "breaks it" if each.breaks else "weakened by",
            f"{each.what} Change: {each.fix}." if each.fix else each.what,
        )
        for each in found.weaknesses
    ]
    if not sys.stdout.isatty():
        print_rows((), [*facts, *weakened])
        return
    console().print(table(("", ""), [*facts, *weakened]))


def _verdict(found: "DedupExamination") -> str:
    if found.repartitioned:
        return "yes"
    return (
        f"as far as {plural(found.looked, 'record')} of the input tell"
        if found.looked
        else "unknown: no records"
    )


def _document(found: "DedupExamination") -> dict[str, Any]:
    return {
        "dedup": redact(found.name),
        "partitions": found.partitions,
        "marks": found.marks,
        "started": found.started,
        "marks_kept_s": None if found.kept_us is None else found.kept_us / 1e6,
        "repartitioned": found.repartitioned,
        "instances": found.members,
        "waiting": found.waiting,
        "looked_at": found.looked,
        "promise": PROMISE,
        "contract": CONTRACT,
        "notes": list(found.notes),
        "weakened_by": [
            {"what": each.what, "breaks": each.breaks, "fix": each.fix or None} for each in found.weaknesses
        ],
        "holds": found.holds,
    }


def find_in_dedup(
    settings: "CliSettings", url: str, *, to: str, key: str | None, marks: str
) -> Iterator[Finding]:
    """Yield the findings of `semel doctor` about a deduplication."""
    began = perf_counter()
    found, window = _examine(settings, url, to=to, key=key, marks=marks)
    took_ms = (perf_counter() - began) * 1000
    yield Finding("dedup", "ok", f"{found.name} answered all questions in {took_ms:.0f} ms; window: {window}")
    counts = ", ".join(f"{name} {count}" for name, count in found.partitions.items())
    if found.partitions.get(found.marks, found.partitions[found.source]) == found.partitions[found.source]:
        yield Finding("partitions", "ok", f"partitions: {counts}")
    for each in found.weaknesses:
        yield Finding("dedup", "error" if each.breaks else "warning", each.what, each.fix)
    for note in found.notes:
        yield Finding("dedup", "ok", note)
    idle = found.started and found.waiting and not found.members
    yield Finding(
        "group",
        "warning" if idle else "ok",
        f"{plural(found.members, 'instance runs', 'instances run')},"
        f" {plural(found.waiting, 'record waits', 'records wait')}",
        "start an instance of semel dedup" if idle else "",
    )
