"""`semel doctor`: problems of a store, its outbox and its sources, and how to fix them."""

import asyncio
import sys
from collections.abc import Iterator, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any

from semel.cli.dedup_checks import (
    DedupKeyOption,
    DedupMarksOption,
    DedupOption,
    DedupToOption,
    find_in_dedup,
    refuse_without_dedup,
)
from semel.cli.options import JsonOption, SourcesOption, StoreOption, WindowOption, settings_for, sources_of
from semel.cli.output import FAILED, UNAVAILABLE, CommandExit, code_of, console, print_json, print_rows, table
from semel.cli.store_access import existing
from semel.errors import SemelError
from semel.observe.doctor import Finding, examine, of_source
from semel.observe.formatting import redact
from semel.windows import duration_us

if TYPE_CHECKING:
    from semel.cli.settings import CliSettings

__all__ = ["doctor"]

SOURCE_FIX = "check that the broker is up, the source exists and this user may read it"
_SIGNS = {"ok": "ok", "warning": "! warning", "error": "!! error"}


def doctor(
    store: StoreOption = None,
    source: SourcesOption = None,
    dedup: DedupOption = None,
    to: DedupToOption = "",
    key: DedupKeyOption = None,
    marks: DedupMarksOption = "",
    window: WindowOption = None,
    *,
    as_json: JsonOption = False,
) -> None:
    """Connect to the store, its outbox and the sources, look for problems, and say how to fix them.

    Looks at versions, schema, clocks, latency, rights, indexes, replicas, durability, clean-up, stuck claims, messages
    that are not published, and the brokers of --from; with --dedup, instead, at the topics, records and group of a
    deduplication. Changes and consumes nothing. Exit codes: 0 nothing is
    broken (there may be warnings), 1 something is, 69 the store or a broker does not answer, 78 a broker refuses.
    """
    settings = settings_for(store=store, window=window)
    if dedup is not None:
        _examine_dedup(settings, dedup, to=to, key=key, marks=marks, as_json=as_json)
        return
    refuse_without_dedup(to=to, key=key, marks=marks, window=window)
    target = existing(settings)
    findings = [_redact(each) for each in examine(target)]
    unusable: list[tuple[str, int]] = []
    if any(each.check == "connection" and each.level == "error" for each in findings):
        unusable.append((f"{target.name} cannot be used", UNAVAILABLE))
    if not unusable:
        findings += map(_redact, _outbox(settings.store))
    lease_us = duration_us(settings.lease)
    for url in sources_of(source, settings):
        try:
            findings += map(_redact, _source(url, lease_us))
        except SemelError as error:
            what = redact(str(error))
            findings.append(Finding("source", "error", what, SOURCE_FIX))
            unusable.append((what, code_of(error)))
    _report(findings, {"store": target.name}, unusable, as_json=as_json)


def _examine_dedup(settings: "CliSettings", url: str, *, as_json: bool, **options: Any) -> None:
    findings: list[Finding] = []
    unusable: list[tuple[str, int]] = []
    try:
        findings += map(_redact, find_in_dedup(settings, url, **options))
    except SemelError as error:
        what = redact(str(error))
        findings.append(Finding("dedup", "error", what, SOURCE_FIX))
        unusable.append((what, code_of(error)))
    _report(findings, {"dedup": redact(url)}, unusable, as_json=as_json)


def _report(
    findings: list[Finding], subject: dict[str, str], unusable: list[tuple[str, int]], *, as_json: bool
) -> None:
    """Print the findings, and end with the code of the worst."""
    errors = [each for each in findings if each.level == "error"]
    if as_json:
        document = [
            {"check": each.check, "level": each.level, "what": each.what, "fix": each.fix or None}
            for each in findings
        ]
        print_json({**subject, "healthy": not errors, "findings": document})
    else:
        _print(findings)
    if unusable:
        raise CommandExit(*unusable[0])
    if errors:
        raise CommandExit(f"{len(errors)} of {len(findings)} findings are errors", FAILED)


def _outbox(url: str) -> list[Finding]:
    from semel.outbox.tables import examine as examine_outbox

    return asyncio.run(examine_outbox(url))


def _source(url: str, lease_us: int) -> Iterator[Finding]:
    from semel.brokers.probes import look_at
    from semel.cli.consume import quiet_clients

    quiet_clients()
    began = perf_counter()
    facts = asyncio.run(look_at(url))
    yield from of_source(facts, perf_counter() - began, lease_us)


def _print(findings: Sequence[Finding]) -> None:
    rows = [(_SIGNS[each.level], each.check, each.what, each.fix) for each in findings]
    if not sys.stdout.isatty():
        print_rows((), rows)
        return
    drawn = [(sign, check, f"{what}\nTo fix it: {fix}" if fix else what) for sign, check, what, fix in rows]
    console().print(table(("", "CHECK", "FOUND"), drawn))


def _redact(finding: Finding) -> Finding:
    return Finding(finding.check, finding.level, redact(finding.what), redact(finding.fix))
