"""Write the blocking twin of each async module: `NAME.py` is generated from `NAME_async.py`.

    python tools/async_to_sync.py          write the twins
    python tools/async_to_sync.py --check  write nothing; fail if a twin differs from its source

The tool drops `async` and `await` and renames names as `rename` does, in code, docstrings and comments. Comments
in the source mark the other differences, on the line concerned:

    self._keep(loop)  # sync: drop          leave this statement out, with its block if it has one
    import asyncio  # sync: import time     write this line in the twin instead
    # sync: self._lock = Lock()             a line that only the twin has
"""

import argparse
import ast
import io
import keyword
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).resolve().parent.parent / "src" / "semel"
PAIRS = (
    "client/records",
    "client/verbs",
    "inbox/inbox",
    "stores/http/store",
    "stores/migrating/store",
    "stores/postgres/pool",
    "stores/postgres/store",
    "stores/redis/connections",
    "stores/redis/pipeline",
    "stores/redis/store",
    "stores/tiered/redis_cache",
    "stores/tiered/store",
)
"""The generated modules, by their path without `.py`."""

NAMES = {
    "AWAITABLE": "BLOCKING",
    "__aenter__": "__enter__",
    "__aexit__": "__exit__",
    "__aiter__": "__iter__",
    "__anext__": "__next__",
    "aclose": "close",
    "acommitted": "committed",
    "aconnect": "connect",
    "aconnect_behind": "connect_behind",
    "aconverse": "converse",
    "adrive": "drive",
    "adrive_many": "drive_many",
    "aexists": "exists",
    "amake_partitions": "make_partitions",
    "aopen": "open",
    "arefresh": "refresh",
    "arefresh_behind": "refresh_behind",
    "aretry": "retry",
    "asend": "send",
    "asynccontextmanager": "contextmanager",
    "awaitable": "blocking",
    "push_async_callback": "callback",
}
"""Names that do not follow the rule of `AsyncX` and `x_async`."""
WORD = re.compile(r"[A-Za-z_]\w*")
DIRECTIVE = re.compile(r"# sync: ?(?P<text>.*)$")
DROPPED = {"async", "await"}


def rename(name: str) -> str:
    """Return the twin's name for a name: `AsyncX` is `X`, `x_async` is `x`, and others are in `NAMES`."""
    if name in NAMES:
        return NAMES[name]
    if re.match(r"_?Async[A-Z]", name):
        return name.replace("Async", "", 1)
    return name.removesuffix("_async")


def convert(text: str) -> str:
    """Return the text of the twin, not yet formatted."""
    tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    lines = rewrite(text, tokens).splitlines(keepends=True)
    ends = statement_ends(text)
    dropped: set[int] = set()
    for token in tokens:
        found = DIRECTIVE.match(token.string) if token.type == tokenize.COMMENT else None
        if found is None:
            continue
        number = token.start[0]
        if found["text"] != "drop":
            indent = token.line[: len(token.line) - len(token.line.lstrip())]
            lines[number - 1] = f"{indent}{found['text']}".rstrip() + "\n"
        elif number in ends:
            dropped.update(range(number, ends[number] + 1))
        else:
            raise SystemExit(f"line {number}: `sync: drop` belongs on the first line of a statement")
    return "".join(line for number, line in enumerate(lines, 1) if number not in dropped)


def statement_ends(text: str) -> dict[int, int]:
    """Return the last line of each statement by its first line, decorators included."""
    ends: dict[int, int] = {}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.stmt):
            first = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", ()))])
            assert node.end_lineno is not None
            ends[first] = max(ends.get(first, 0), node.end_lineno)
    return ends


def rewrite(text: str, tokens: list[tokenize.TokenInfo]) -> str:
    """Return the text without `async`, `await` and `Awaitable`, with renamed names; lines, layout and comments stay."""
    gone = {*awaitables(tokens), *groups(tokens)}
    lines = text.splitlines(keepends=True)
    rewritten: list[str] = []
    at = (1, 0)
    for place, token in enumerate(tokens):
        rewritten.append(between(lines, at, token.start))
        at = token.end
        if token.type == tokenize.NAME and token.string in DROPPED:
            at = (token.end[0], token.end[1] + len(" "))
        elif token.type == tokenize.NAME and place not in gone:
            sleeps = [each.string for each in tokens[place : place + 3]] == ["asyncio", ".", "sleep"]
            rewritten.append("time" if sleeps else rename(token.string))
        elif token.type in (tokenize.STRING, tokenize.COMMENT):
            rewritten.append(WORD.sub(lambda word: rename(word.group()), token.string))
        elif place not in gone:
            rewritten.append(token.string)
    return "".join(rewritten)


def between(lines: list[str], start: tuple[int, int], end: tuple[int, int]) -> str:
    """Return the text between two tokens, given by their positions."""
    if start[0] == end[0]:
        return lines[start[0] - 1][start[1] : end[1]] if start[0] <= len(lines) else ""
    rest = lines[start[0] - 1][start[1] :] + "".join(lines[start[0] : end[0] - 1])
    return rest + (lines[end[0] - 1][: end[1]] if end[0] <= len(lines) else "")


def awaitables(tokens: list[tokenize.TokenInfo]) -> Iterator[int]:
    """Yield the tokens to drop with `Awaitable`: its brackets if it has some, its comma if it is imported."""
    for place, token in enumerate(tokens):
        if token.type != tokenize.NAME or token.string != "Awaitable":
            continue
        yield place
        if tokens[place + 1].string == ",":
            yield place + 1
        elif tokens[place + 1].string == "[":
            yield place + 1
            yield closing(tokens, place + 1)


def groups(tokens: list[tokenize.TokenInfo]) -> Iterator[int]:
    """Yield the parentheses around a call that were needed only for its `await`: `(await f())[0]`."""
    for place, token in enumerate(tokens):
        if token.string != "(" or tokens[place + 1].string != "await":
            continue
        before = tokens[place - 1]
        is_call = before.string in (")", "]") or (
            before.type == tokenize.NAME and not keyword.iskeyword(before.string)
        )
        end = closing(tokens, place)
        if not is_call and is_primary(tokens[place + 2 : end]):
            yield place
            yield end


def is_primary(tokens: list[tokenize.TokenInfo]) -> bool:
    """Return whether the tokens are only names, dots and brackets, which need no parentheses."""
    depth = 0
    for token in tokens:
        depth -= token.string in (")", "]", "}")
        plain = token.type == tokenize.NAME and not keyword.iskeyword(token.string)
        if not depth and not plain and token.string not in (".", "(", ")", "[", "]"):
            return False
        depth += token.string in ("(", "[", "{")
    return True


def closing(tokens: list[tokenize.TokenInfo], opening: int) -> int:
    """Return the index of the bracket that closes the one at `opening`."""
    depth = 0
    for place in range(opening, len(tokens)):
        if tokens[place].type == tokenize.OP:
            depth += (tokens[place].string in ("(", "[", "{")) - (tokens[place].string in (")", "]", "}"))
        if not depth:
            return place
    raise SystemExit("a bracket is not closed")


def twin_of(pair: str) -> str:
    """Return the formatted text of a twin, as the repository contains it."""
    source, target = SOURCE / f"{pair}_async.py", SOURCE / f"{pair}.py"
    note = f"# Generated by tools/async_to_sync.py from {source.name}: change that file, then run `make format`.\n"
    text = note + convert(source.read_text(encoding="utf-8"))
    for options in (["check", "--fix-only", "--quiet", "--select=I"], ["format"]):
        command = [sys.executable, "-m", "ruff", *options, f"--stdin-filename={target}", "-"]
        text = subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout
    return text


def main() -> int:
    """Write or compare all twins. Returns how many differ from their sources."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--check", action="store_true", help="write nothing, and fail if a twin differs")
    only_check = parser.parse_args().check
    stale = 0
    for pair in PAIRS:
        target, text = SOURCE / f"{pair}.py", twin_of(pair)
        if target.exists() and target.read_text(encoding="utf-8") == text:
            continue
        if only_check:
            stale += 1
            print(
                f"{target.name} differs from its source {target.stem}_async.py; run `make format`",
                file=sys.stderr,
            )
        else:
            target.write_text(text, encoding="utf-8")
            print(f"wrote {target.name}")
    return min(stale, 1)


if __name__ == "__main__":
    sys.exit(main())
