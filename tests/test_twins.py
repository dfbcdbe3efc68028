"""The modules that are generated: each is what its source gives, and the rules do what they say."""

import pytest

from tools.async_to_sync import PAIRS, SOURCE, convert, twin_of

RULES = [
    ("async def f() -> None:\n    await g()\n", "def f() -> None:\n    g()\n"),
    (
        "async with a() as b:\n    async for c in b:\n        d\n",
        "with a() as b:\n    for c in b:\n        d\n",
    ),
    ("x: AsyncStore = _AsyncThing()\n", "x: Store = _Thing()\n"),
    ('def f() -> "AsyncStore": ...\n', 'def f() -> "Store": ...\n'),
    ("await store.asend(items)\n", "store.send(items)\n"),
    ("await asyncio.sleep(1)\n", "time.sl" + "eep(1)\n"),
    ("from a.b_async import AsyncC\n", "from a.b import C\n"),
    ("from a import Awaitable, B\n", "from a import  B\n"),
    ("f: Callable[[int], Awaitable[list[T]]]\n", "f: Callable[[int], list[T]]\n"),
    ("return (await f(x, y=(1, 2)))[0]\n", "return f(x, y=(1, 2))[0]\n"),
    ("return (await f() or g())[0]\n", "return (f() or g())[0]\n"),
    ("g((await f()).x)\n", "g(f().x)\n"),
    ("g(await f())\n", "g(f())\n"),
    ('"""Say `aretry`, not retry."""\n', '"""Say `retry`, not retry."""\n'),
    ("# what AsyncStore awaits\n", "# what Store awaits\n"),
    ("await a()  # why\n", "a()  # why\n"),
    ("a = 1\nb = 2  # sync: drop\n", "a = 1\n"),
    ("a = 1\n@d  # sync: drop\nasync def f():\n    pass\nb = 2\n", "a = 1\nb = 2\n"),
    ("if a:\n    await b()  # sync: c()\n", "if a:\n    c()\n"),
    ("if a:\n    # sync: b()\n    c()\n", "if a:\n    b()\n    c()\n"),
    ('x = "# sync: drop"\n', 'x = "# sync: drop"\n'),
]


@pytest.mark.parametrize(("source", "twin"), RULES)
def test_each_rule(source: str, twin: str) -> None:
    assert convert(source) == twin


def test_a_statement_is_dropped_by_its_first_line_alone() -> None:
    with pytest.raises(SystemExit, match="line 2"):
        convert("f(\n    1,  # sync: drop\n)\n")


@pytest.mark.parametrize("pair", PAIRS)
def test_every_generated_module_is_what_its_source_gives(pair: str) -> None:
    target = SOURCE / f"{pair}.py"
    assert target.read_bytes() == twin_of(pair).encode(), f"{target} is stale; run `make format`"


@pytest.mark.parametrize("pair", PAIRS)
def test_a_generated_module_says_so_in_its_first_line(pair: str) -> None:
    first = (SOURCE / f"{pair}.py").read_text(encoding="utf-8").partition("\n")[0]
    assert first.startswith("# Generated")
    assert f"from {pair.rpartition('/')[2]}_async.py" in first
