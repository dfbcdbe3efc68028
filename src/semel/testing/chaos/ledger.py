"""What happened in a chaos run, told by the workers and noted outside of semel: deliveries, runs, faults."""

from typing import Literal, TypeAlias

from msgspec import Struct, field

from semel.testing.chaos.messages import Phase

__all__ = ["ChaosLedger", "FaultNote", "HandlerCall", "Stage", "WorkerLedger"]

Stage: TypeAlias = Literal["received", "claimed", "running", "returned", "recorded"]
"""How far a delivery was when a fault hit it."""


class HandlerCall(Struct):
    """One run of the handler."""

    key: str
    worker: int
    """The worker's number; a replaced worker has its own."""
    attempt: int
    began_s: float
    lines: list[int] = field(default_factory=list)
    """The lines that it reached, in order."""
    ended_s: float | None = None
    error: str = ""
    cut_s: float | None = None
    """When its worker was killed, if it had not ended by then."""
    halted_line: int = 0
    """The line that it was about to run when it was killed; 0: it was killed elsewhere."""

    @property
    def returned(self) -> bool:
        """Whether the handler came to its end."""
        return self.ended_s is not None and not self.error

    @property
    def lines_run(self) -> list[int]:
        """The lines that have run, or at least begun."""
        return [line for line in self.lines if line != self.halted_line]


class FaultNote(Struct):
    """One fault that happened."""

    kind: str
    at_s: float
    worker: int
    key: str = ""
    """The event that it was planned for; empty: none."""
    phase: Phase | None = None
    line: int = 0
    lasted_s: float = 0.0
    hit: dict[str, Stage] = field(default_factory=dict)
    """Every event that it hit, and how far its delivery was."""

    @property
    def end_s(self) -> float:
        """When it was over."""
        return self.at_s + self.lasted_s


class WorkerLedger(Struct):
    """The deliveries and runs of one worker process."""

    number: int
    began_s: float
    ended_s: float | None = None
    in_hand: dict[str, str] = field(default_factory=dict)
    """Keys by position."""
    calls: dict[str, HandlerCall] = field(default_factory=dict)
    """By the name of the run."""
    halted: tuple[str, Phase] | None = None

    def stages(self) -> dict[str, Stage]:
        """Return how far each event in hand is."""
        stages: dict[str, Stage] = dict.fromkeys(self.in_hand.values(), "received")
        for call in self.calls.values():
            if call.ended_s is None:
                stages[call.key] = "running" if call.lines else "claimed"
            elif call.key in stages and not call.error:
                stages[call.key] = "returned"
        if self.halted is not None and self.halted[1] == "recorded":
            stages[self.halted[0]] = "recorded"
        return stages


class ChaosLedger(Struct):
    """Everything that happened."""

    workers: list[WorkerLedger] = field(default_factory=list)
    calls: dict[str, list[HandlerCall]] = field(default_factory=dict)
    """By key, in the order of their beginning."""
    faults: list[FaultNote] = field(default_factory=list)
    deliveries: dict[str, int] = field(default_factory=dict)
    dead: dict[str, str] = field(default_factory=dict)
    """The reason of each event that became a dead letter."""
    file: str = ""
    line_first: int = 0
    line_last: int = 0

    def running(self) -> int:
        """Return how many runs of living workers have not ended."""
        return sum(
            call.ended_s is None
            for worker in self.workers
            if worker.ended_s is None
            for call in worker.calls.values()
        )
