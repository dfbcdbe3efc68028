"""`semel doctor`: what is wrong with a store, and how to mend it."""

import sys

from semel.cli.exits import FAILED, NOT_FOUND, UNAVAILABLE, Stop
from semel.cli.options import JsonOption, StoreOption, settings_for
from semel.cli.output import console, print_json, print_rows, redacted, table
from semel.cli.reach import exists, found
from semel.observe.doctor import Finding, examine

__all__ = ["doctor"]

_SIGNS = {"ok": "ok", "warning": "! warning", "error": "!! error"}


def doctor(store: StoreOption = None, *, as_json: JsonOption = False) -> None:
    """Connect to the store and look for what is wrong; say how to mend it.

    Looks at versions, schema, clocks, latency, rights, indexes, replicas, durability, clean-up and stuck claims, and
    changes no record. Exit codes: 0 nothing is broken (there may be warnings), 1 something is, 69 the store does not
    answer.
    """
    target = found(settings_for(store=store))
    if not exists(target):
        raise Stop(f"{target.name} does not exist; create it with: semel migrate", NOT_FOUND)
    findings = [_redacted(each) for each in examine(target)]
    errors = [each for each in findings if each.level == "error"]
    if as_json:
        document = [
            {"check": each.check, "level": each.level, "what": each.what, "fix": each.fix or None}
            for each in findings
        ]
        print_json({"store": target.name, "healthy": not errors, "findings": document})
    else:
        rows = [(_SIGNS[each.level], each.check, each.what, each.fix) for each in findings]
        if sys.stdout.isatty():
            console().print(table(("", "CHECK", "FOUND", "TO MEND IT"), rows))
        else:
            print_rows((), rows)
    if any(each.check == "connection" for each in errors):
        raise Stop(f"{target.name} cannot be used", UNAVAILABLE)
    if errors:
        raise Stop(f"{len(errors)} of {len(findings)} findings are errors", FAILED)


def _redacted(finding: Finding) -> Finding:
    return Finding(finding.check, finding.level, redacted(finding.what), finding.fix)
