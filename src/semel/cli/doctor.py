"""`semel doctor`: problems of a store, its outbox and its sources, and how to fix them."""

import asyncio
import sys
from collections.abc import Iterator, Sequence
from time import perf_counter

from semel.cli.options import JsonOption, SourcesOption, StoreOption, settings_for, sources_of
from semel.cli.output import FAILED, UNAVAILABLE, CommandExit, console, print_json, print_rows, table
from semel.cli.store_access import existing
from semel.errors import SemelError
from semel.observe.doctor import Finding, examine, of_source
from semel.observe.formatting import redact
from semel.windows import duration_us

__all__ = ["doctor"]

_SIGNS = {"ok": "ok", "warning": "! warning", "error": "!! error"}


def doctor(store: StoreOption = None, source: SourcesOption = None, *, as_json: JsonOption = False) -> None:
    """Connect to the store, its outbox and the sources, look for problems, and say how to fix them.

    Looks at versions, schema, clocks, latency, rights, indexes, replicas, durability, clean-up, stuck claims, messages
    that are not published, and the brokers of --from. Changes and consumes nothing. Exit codes: 0 nothing is
    broken (there may be warnings), 1 something is, 69 the store or a broker does not answer.
    """
    settings = settings_for(store=store)
    target = existing(settings)
    findings = [_redact(each) for each in examine(target)]
    silent = (
        [target.name]
        if any(each.check == "connection" and each.level == "error" for each in findings)
        else []
    )
    if not silent:
        findings += map(_redact, _outbox(settings.store))
    lease_us = duration_us(settings.lease)
    for url in sources_of(source, settings):
        looked = [_redact(each) for each in _source(url, lease_us)]
        silent += [looked[0].what] if looked[0].level == "error" else []
        findings += looked
    errors = [each for each in findings if each.level == "error"]
    if as_json:
        document = [
            {"check": each.check, "level": each.level, "what": each.what, "fix": each.fix or None}
            for each in findings
        ]
        print_json({"store": target.name, "healthy": not errors, "findings": document})
    else:
        _print(findings)
    if silent:
        raise CommandExit(f"{silent[0]} cannot be used", UNAVAILABLE)
    if errors:
        raise CommandExit(f"{len(errors)} of {len(findings)} findings are errors", FAILED)


def _outbox(url: str) -> list[Finding]:
    from semel.outbox.tables import examine as examine_outbox

    return asyncio.run(examine_outbox(url))


def _source(url: str, lease_us: int) -> Iterator[Finding]:
    from semel.brokers.probes import look_at

    began = perf_counter()
    try:
        facts = asyncio.run(look_at(url))
    except SemelError as error:
        yield Finding(
            "source",
            "error",
            str(error),
            "check that the broker is up, the source exists and this user may read it",
        )
        return
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
