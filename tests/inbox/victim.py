"""A process that handles events through an inbox, and dies by SIGKILL between two steps of its choosing.

It forks for every death, so that the drivers are loaded once. It prints each step when a redelivery after the
death there has been handled.
"""

import os
import signal
import sys
from collections.abc import Callable

from tests.inbox.bench import Bench
from tests.inbox.kinds import KINDS, had, run

STEPS = ("connected", "begun", "marked", "applied", "stored", "committed")


async def handle(bench: Bench, key: str, reached: Callable[[str], None]) -> None:
    """One event: mark, effect and value in one transaction; `reached` is told after each step."""
    async with bench.client(lock_wait_s=30) as client, bench.connection() as connection:
        held = client.inbox(connection.handle)
        reached("connected")
        await connection.begin()
        reached("begun")
        if await had(held.first(key)):
            reached("marked")
            await bench.credit(connection)
            reached("applied")
            await had(held.store(key, f"value of {key}"))
            reached("stored")
        await connection.commit()
        reached("committed")


def child(work: Callable[[], None]) -> int:
    """Run it in a fork; how that ended."""
    pid = os.fork()
    if not pid:
        try:
            work()
        except BaseException:  # noqa: BLE001 - whatever it is, the parent shall know
            sys.excepthook(*sys.exc_info())
            os._exit(1)
        os._exit(0)
    return os.waitpid(pid, 0)[1]


def main(kind: str, url: str, store_url: str, wallet: str) -> None:
    bench = Bench.at(KINDS[kind], url, store_url, wallet)

    def deliver(key: str, die_at: str) -> None:
        def reached(step: str) -> None:
            if step == die_at:
                os.kill(os.getpid(), signal.SIGKILL)

        run(handle(bench, key, reached), sync=bench.kind.sync)

    for step in STEPS:
        ended = child(lambda step=step: deliver(f"killed when {step}", step))  # type: ignore[misc]
        assert os.WTERMSIG(ended) == signal.SIGKILL, ended
        for _ in range(2):
            assert child(lambda step=step: deliver(f"killed when {step}", "")) == 0  # type: ignore[misc]
        print(step, flush=True)  # noqa: T201 - the test reads it


if __name__ == "__main__":
    main(*sys.argv[1:])
