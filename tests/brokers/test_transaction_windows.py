"""Transaction mode, struck in every window of the table, on the real broker: redelivered, and sent again.

The rows of the table are about both: what the group delivers again because its offset did not move, and a copy that
the producer sent, in the same partition.
"""

import asyncio
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from semel.brokers.kafka.batch import Piece
from semel.brokers.kafka.transactions import KafkaTransaction
from semel.brokers.kafka.transactor import Where
from semel.client.claims import Claimed
from semel.stores.memory.store import MemoryStore
from tests.brokers.scenes import Died, Scene, woken, worker
from tests.brokers.topics import Pipe
from tests.faults.table import GUARANTEES, Cell

ROWS = {"transaction": False, "transaction, marks": True}
STALLED = {"stalled_before_effect": "before", "stalled_after_effect": "after"}
TOGETHER = 5
WITHIN_S = 100.0
ANSWERS = ThreadPoolExecutor(TOGETHER, thread_name_prefix="answers")
"""Where commits are answered that nobody waits for."""

pytestmark = pytest.mark.slow


class Hasty:
    """A producer whose first commit gets no answer in time; what was sent is under way all the same.

    The client library is not made to time out in the midst of it: it aborts the process for that now and then.
    """

    def __init__(self, writer: Any, *, gives_up: bool) -> None:
        self._writer = writer
        self._gives_up = gives_up
        self.unanswered = 0
        self._under_way: Future[None] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._writer, name)

    def commit_transaction(self, wait_s: float) -> None:
        if self._under_way is not None:
            self._under_way.result()
        elif self.unanswered:
            self._writer.commit_transaction(wait_s)
        else:
            self.unanswered += 1
            self._under_way = ANSWERS.submit(self._writer.commit_transaction, wait_s)
            if self._gives_up:
                raise Died
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT, "no answer", False, True))
        self._under_way = None


class Struck(KafkaTransaction):
    """Something happens to it in one window."""

    window = ""
    writer: Hasty | None = None
    late: Sequence[Claimed] = ()

    async def _claim(self, pieces: Sequence[Piece]) -> None:
        if self.window in ("before_claim", "claim_late"):
            raise Died
        await super()._claim(pieces)
        if self.window == "after_claim":
            raise Died
        if self.window == "claim_reply_lost":
            self.window = ""
            self._holdings.drop(pieces)
            for piece in pieces:
                piece.again_s, piece.runs = 0.05, False
        if self.window.startswith("effect"):
            self.writer = Hasty(self.source._writer, gives_up=self.window == "effect_late")
            self.source._writer = self.writer

    async def _record(self, pieces: Sequence[Piece], committed: Collection[Where]) -> None:
        claims = [piece.claim for piece in pieces if piece.claim is not None]
        if self.window == "after_effect":
            raise Died
        if self.window == "complete_late":
            self.late = claims
            raise Died
        if self.window == "complete_reply_lost":
            await self._once.complete_many(claims)
        await super()._record(pieces, committed)


async def measured(window: str, *, marks: bool, folder: Path) -> Cell:
    """The outputs of one event that is struck once, redelivered, and sent again."""
    pipe = await asyncio.to_thread(Pipe, 1)
    scene = Scene(pipe)
    await scene.send("a")
    if window in STALLED:
        await stalled(scene, STALLED[window], marks=marks, folder=folder)
    else:
        await struck(scene, window, marks=marks)
    found = await asyncio.to_thread(pipe.outputs)
    assert set(found) == {"a"}
    await scene.send("a")
    await scene.until_settled(marks=marks)
    assert await asyncio.to_thread(pipe.outputs) == found, "one more copy changed something"
    await pipe.close()
    return Cell(found["a"])


async def struck(scene: Scene, window: str, *, marks: bool) -> None:
    transaction = scene.transaction(kind=Struck, marks=marks)
    assert isinstance(transaction, Struck)
    transaction.window = window
    running = asyncio.create_task(transaction.run())
    settled = asyncio.create_task(scene.pipe.settled())
    await asyncio.wait([running, settled], return_when=asyncio.FIRST_COMPLETED)
    transaction.stop()
    try:
        await running
    except Died:
        settled.cancel()
    else:
        assert window in ("claim_reply_lost", "effect_reply_lost", "complete_reply_lost", "store_lost")
    if window.startswith("effect"):
        assert transaction.writer is not None
        assert transaction.writer.unanswered == 1
    if window == "claim_late":
        assert isinstance(await scene.client().claim("a"), Claimed)  # whoever sent it is not there any more
    await scene.until_settled(marks=marks)
    if window == "store_lost":
        scene.store = MemoryStore()
    await scene.send("a")
    await scene.until_settled(marks=marks)
    if window == "complete_late":
        await transaction.route.once.complete_many(transaction.late)


async def stalled(scene: Scene, where: str, *, marks: bool, folder: Path) -> None:
    """A process is stopped past its lease and its session; others get the event again, and a copy of it."""
    scene.store = f"sqlite:///{folder}/{where}-{marks}.db"
    file = folder / f"{where}-{marks}"
    with worker(scene, stall=str(file), stall_at=where, marks=scene.pipe.marks if marks else "") as zombie:
        while not file.exists():  # noqa: ASYNC110 - another process makes it
            await asyncio.sleep(0.02)
        await scene.send("a")
        await scene.until_settled(marks=marks)
        await woken(zombie)


@pytest.mark.parametrize("row", ROWS)
def test_a_transaction_struck_in_any_window_costs_what_the_table_says(row: str, tmp_path: Path) -> None:
    async def all_of_them() -> dict[str, Cell | None]:
        turns = asyncio.Semaphore(TOGETHER)

        async def one(window: str) -> Cell:
            async with turns:
                return await measured(window, marks=ROWS[row], folder=tmp_path)

        windows = [window for window, cell in GUARANTEES[row].items() if cell is not None]
        async with asyncio.timeout(WITHIN_S):
            cells = await asyncio.gather(*map(one, windows))
        return dict(zip(windows, cells, strict=True))

    found = asyncio.run(all_of_them())
    assert found == {window: cell for window, cell in GUARANTEES[row].items() if cell is not None}
