"""Render the figures of docs/explain/how-it-is-proved.md that come from kept runs.

Those are the mutants, the histories, the failovers and the soak.
`python -m tests.simulation.render_proof` writes them from the files that those runs left; the tests compare. The
figures of the exploration are those of `render_exploration`, which runs it.
"""

import re
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator

import msgspec

from benchmarks.soak_page import Soak
from semel.testing.explore import MUTANTS, Explored, explore, scene_of
from tests.contract.test_machine_mutants import EQUIVALENT
from tests.histories.measure import FILE as HISTORIES_FILE
from tests.histories.measure import KeptHistories
from tests.simulation import mutant_table
from tests.simulation.render_exploration import PAGE
from tests.stores.redis.failover import FILE as FAILOVERS_FILE
from tests.stores.redis.failover import KeptFailovers

ROOT = PAGE.parents[2]
SOAK = ROOT / "benchmarks" / "results" / "soak.json"
PROTOCOLS = re.compile(r"^\| ([^|`]+) \| `([a-z-]+)` \| .* \| [0-9]+ \|$", re.MULTILINE)


def protocol_row(mutant: str, result: Explored) -> str:
    """One line of the table of broken protocols."""
    assert result.violation is not None
    return f"| {mutant} | `{scene_of(mutant)}` | {result.violation.kind} | {len(result.path)} |"


def protocols(text: str) -> Iterator[str]:
    """The table as it is on the page: each row is compared by the test that explores the mutant."""
    yield from ("| broken on purpose | scene | promise | moves |", "|---|---|---|---|")
    rows = {found[1]: found[0] for found in PROTOCOLS.finditer(text)}
    for mutant in MUTANTS:
        yield rows.get(mutant, f"| {mutant} | | | |")


def machine(_text: str) -> Iterator[str]:
    """What became of each change of the machine."""
    fates = mutant_table.read()
    killed = [fate for fate in fates.values() if fate.scene]
    same = [fate for fate in fates.values() if not fate.scene and not fate.differs_in]
    left = [fate for fate in fates.values() if not fate.scene and fate.differs_in]
    kinds = Counter(fate.kind for fate in killed)
    yield from _wrap(
        f"Of {len(fates)} changes, {len(killed)} break a promise in some schedule: "
        + ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
        + f". {len(same)} give the same answer to everything that any schedule asks, mostly because the scenes have no"
        f" event times and no sliding windows. {len(left)} differ and break no promise: they change what no promise"
        " is about, such as a time in an answer, or need more faults than these bounds allow. The contract finds out"
        f" all of both but {len(EQUIVALENT)}."
    )
    yield ""
    yield from (
        "| function | changes | break a promise | same answers | differ, no promise broken |",
        "|---|---|---|---|---|",
    )
    for function in dict.fromkeys(name.partition(": ")[0] for name in fates):
        mine = [fate for name, fate in fates.items() if name.startswith(f"{function}: ")]
        counts = (len(mine), *(sum(each in part for each in mine) for part in (killed, same, left)))
        yield f"| `{function}` | {' | '.join(map(str, counts))} |"
    yield ""
    yield from ("These are the same protocol, for a reason:", "")
    for name, reason in EQUIVALENT.items():
        yield from textwrap.wrap(f"- `{name.partition(': ')[0]}`: {reason}", 99, subsequent_indent="  ")


def histories(_text: str) -> Iterator[str]:
    """The table of the recorded histories."""
    kept = msgspec.json.decode(HISTORIES_FILE.read_bytes(), type=KeptHistories)
    yield "| store | calls | without an answer | at the same time as another | faults | keys decided |"
    yield "|---" * 6 + "|"
    for row in kept.rows:
        decided = f"{row.keys - row.undecided} of {row.keys}"
        yield (
            f"| {row.store} | {row.calls:,} | {row.unanswered:,} | {row.overlapping:,} | {row.faults} | {decided} |"
        )
    yield ""
    yield from _wrap(
        f"The run of {kept.on}. The machine explains every answer of the keys that were decided; a key with many"
        " lost replies may have too many orders to try them all."
    )


def failovers(_text: str) -> Iterator[str]:
    """The table of what failovers of Redis lost, under what `explain` says."""
    kept = msgspec.json.decode(FAILOVERS_FILE.read_bytes(), type=KeptFailovers)
    yield from ("This is what `semel explain` says of it:", "")
    for waits, explained in dict.fromkeys((row.wait_replicas, row.explained) for row in kept.rows):
        yield from textwrap.wrap(f"- `wait_replicas={waits}`: {explained}", 99, subsequent_indent="  ")
    yield ""
    yield "| | the replica | `wait_replicas` | completed | reported | lost | lost unreported |"
    yield "|---" * 7 + "|"
    for row in kept.rows:
        yield (
            f"| {row.place} | {row.replica} | {row.wait_replicas} | {row.completed} | {row.reported} | {row.lost} |"
            f" {row.unreported} |"
        )
    yield ""
    yield f"The run of {kept.on}."


def soak(_text: str) -> Iterator[str]:
    """The table and the picture of the soak."""
    kept = msgspec.json.decode(SOAK.read_bytes(), type=Soak)
    low, high = kept.loads
    yield from _wrap(
        f"The run of {kept.on}: {kept.rate:g} new events a second at each place for {kept.minutes:g} minutes, each"
        f" delivered at least twice, on {kept.cores} cores with a load of {low:.0f} to {high:.0f} by other work."
    )
    yield ""
    yield (
        "| place | events | deliveries | effects | lost | twice | wrong | p50, ms | p99, ms"
        " | memory grew | descriptors grew |"
    )
    yield "|---" * 11 + "|"
    for place in kept.places:
        total = place.total
        memory = place.growth(lambda each: each.worker_kb + each.server_kb)
        descriptors = place.growth(lambda each: each.worker_descriptors + each.server_descriptors)
        yield (
            f"| {place.name} | {total.events:,} | {total.calls:,} | {place.effects:,} | {place.lost} |"
            f" {place.doubled} | {total.wrong} | {total.p50_us / 1e3:.1f} | {total.p99_us / 1e3:.1f} |"
            f" {memory:+.1%} | {descriptors:+.1%} |"
        )
    yield ""
    yield "![latency, memory and descriptors over time](../../benchmarks/results/soak.svg)"


def _wrap(text: str) -> list[str]:
    return textwrap.wrap(text, 99, break_on_hyphens=False, break_long_words=False)


PARTS: dict[str, Callable[[str], Iterator[str]]] = {
    "protocols": protocols,
    "machine": machine,
    "histories": histories,
    "failovers": failovers,
    "soak": soak,
}


def markers(name: str) -> tuple[str, str]:
    """The comments around a part."""
    return (
        f"<!-- Rendered by `python -m tests.simulation.render_proof`: {name}. -->",
        f"<!-- End of {name}. -->",
    )


def render(text: str) -> str:
    """The page with every part as it should be."""
    for name, part in PARTS.items():
        begin, end = markers(name)
        before, rest = text.split(begin)
        _, after = rest.split(end)
        text = f"{before}{begin}\n\n" + "\n".join(part(text)) + f"\n\n{end}{after}"
    return text


def main() -> int:
    """Explore the broken protocols, and write the page."""
    text = PAGE.read_text(encoding="utf-8")
    begin, end = markers("protocols")
    before, rest = text.split(begin)
    rows = [protocol_row(mutant, explore(scene_of(mutant), mutant=mutant)) for mutant in MUTANTS]
    text = before + begin + "\n" + "\n".join(rows) + "\n" + end + rest.split(end)[1]
    PAGE.write_text(render(text), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
