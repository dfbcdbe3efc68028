"""Render the figures of the exploration into docs/explain/how-it-is-proved.md.

`python -m tests.simulation.render_exploration` explores every scene and writes them; the tests compare.
"""

import re
import sys
from collections.abc import Mapping
from pathlib import Path

from semel.testing.explore import SCENES, Explored, ExploredScene, explore

PAGE = Path(__file__).resolve().parents[2] / "docs" / "explain" / "how-it-is-proved.md"
BEGIN = "<!-- Rendered by `python -m tests.simulation.render_exploration`; do not edit. -->"
END = "<!-- End of the rendered part. -->"
HEAD = ("| scene | what it is about | states | moves | longest |", "|---|---|---|---|---|")


def row(scene: ExploredScene, result: Explored) -> str:
    """One line of the table."""
    return f"| `{scene.name}` | {scene.about} | {result.states:,} | {result.moves:,} | {result.depth} |"


def page(text: str, results: Mapping[str, Explored] | None) -> str:
    """The page with the figures of a run; without a run, as it would be with the figures that it has."""
    before, rest = text.split(BEGIN)
    inside, after = rest.split(END)
    if results is None:
        rows = re.findall(r"^\| `.*$", inside, re.MULTILINE)
        numbers = [line.split(" | ")[2] for line in rows]
        total = sum(int(number.replace(",", "")) for number in numbers)
    else:
        rows = [row(SCENES[name], result) for name, result in results.items()]
        total = sum(result.states for result in results.values())
    sums = f"Together {total:,} states, and every promise holds in each."
    table = "\n".join([*HEAD, *rows])
    return f"{before}{BEGIN}\n\n{table}\n\n{sums}\n\n{END}{after}"


def main() -> int:
    """Explore, and write the page."""
    results = {name: explore(name) for name in SCENES}
    broken = [name for name, result in results.items() if result.violation is not None]
    if broken:
        sys.stderr.write(f"a promise is broken in {', '.join(broken)}: the page was not written\n")
        return 1
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), results), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
