"""Draw text as a picture of a terminal: `semel demo | python tools/terminal_picture.py docs/images/demo.svg`."""

import sys
from html import escape
from pathlib import Path

COLUMNS = 84
CHAR_PX, LINE_PX, MARGIN_PX = 8.4, 19, 20


def picture(text: str) -> str:
    """Return the SVG. Long lines are broken at a space; the lines `lost` and `twice` stand out."""
    lines = [part for line in text.rstrip().splitlines() for part in broken(line)]
    width, height = round(COLUMNS * CHAR_PX + 2 * MARGIN_PX), (len(lines) + 2) * LINE_PX + MARGIN_PX
    drawn = "\n".join(
        f'<text x="{MARGIN_PX}" y="{(number + 3) * LINE_PX}" fill="{colour(line)}">{escape(line)}</text>'
        for number, line in enumerate(lines)
    )
    dots = "".join(
        f'<circle cx="{MARGIN_PX + 18 * at}" cy="20" r="6" fill="{fill}"/>'
        for at, fill in enumerate(("#ff5f57", "#febc2e", "#28c840"))
    )
    style = "font: 14px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; white-space: pre"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img">\n'
        f"<title>What the demo prints</title>\n<style>text {{ {style} }}</style>\n"
        f'<rect width="100%" height="100%" rx="8" fill="#161b22"/>\n{dots}\n{drawn}\n</svg>\n'
    )


def broken(line: str) -> list[str]:
    """Return the line in parts that fit."""
    parts = []
    while len(line) > COLUMNS:
        at = line.rfind(" ", 0, COLUMNS)
        parts.append(line[:at])
        line = "  " + line[at + 1 :]
    return [*parts, line]


def colour(line: str) -> str:
    """Return the colour of a line: green for what counts, pale for what it was done with."""
    if line.startswith(("lost", "twice", "inbox:", "lease:")):
        return "#7ee787"
    return "#ffa657" if line.startswith(("killed", "paused")) else "#e6edf3"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(picture(sys.stdin.read()), encoding="utf-8")
