"""The moves from a state: every step that a worker, the network, time or an operator may take next."""

from collections.abc import Callable
from itertools import combinations
from typing import Any

from msgspec.structs import replace

from semel.core.commands import (
    Ask,
    Claim,
    Granted,
    Invoke,
    Mark,
    Pause,
    Raised,
    Renew,
    Returned,
    Settle,
    Sleep,
    Unwatch,
    Watch,
)
from semel.core.machine import decide, standing
from semel.errors import ClaimLost, NotApplied
from semel.testing._exploration.scenes import BARRED, BATCHES, COSTS, Move
from semel.testing._exploration.stage import EFFECTED, GONE, LOST, OLD_COPY, STALLED, ExploredStage, LateSend
from semel.testing._simulation.handler import Leave, part_of
from semel.testing._simulation.store import NO_ANSWER, Commit, describe
from semel.testing._simulation.worker import PermanentError, TransientError
from semel.testing._simulation.world import LEASE_US
from semel.types import Busy, Lost, Mismatch, Renewed

CLAIM_LOST = Raised(ClaimLost("noticed by the handler"), lost=True)
NO_ANSWER_OF_SINK = Raised(TransientError("the sink did not answer"))
REFUSED = Raised(TransientError("the sink knows a newer fence"))
FAILED = Raised(TransientError("too late"))
NOT_APPLIED = Raised(NotApplied("not now"))
ERRORED = Raised(TransientError("not now"))
DECLINED = Raised(PermanentError("never"))
SKEW_US = 2 * LEASE_US
"""How wrong the clock of a worker is, where a mutant uses it."""


class Moves:
    """Finds the moves of the state on a stage, and makes one."""

    def __init__(self, stage: ExploredStage) -> None:
        self.stage = stage
        self._barred: frozenset[str] = frozenset()
        self._makers: dict[str, Callable[[Move], None]] = {
            "send": lambda move: self._answer(move.seat, self._apply(move.seat, self._item(move.seat))),
            "lose the request": lambda move: self._leave_unanswered(move.seat),
            "lose the reply": self._lose_reply,
            "send late": self._send_late,
            "die": self._die,
            "die after sending": self._die_after,
            "die, send late": self._die_late,
            "act": self._act,
            "notice the loss": lambda move: self._raise(move.seat, CLAIM_LOST),
            "fail for good": lambda move: stage.advance(move.seat, DECLINED),
            "fail": lambda move: stage.advance(move.seat, NOT_APPLIED),
            "be killed": self._die,
            "stall": self._stall,
            "raise before": lambda move: self._raise(move.seat, ERRORED),
            "refuse before": lambda move: self._raise(move.seat, NOT_APPLIED),
            "lose the sink's reply": self._lose_sink,
            "reach the sink late": self._reach_late,
            "return": lambda move: stage.advance(
                move.seat, Returned(stage.position(move.seat).command.value)
            ),
            "raise after": lambda move: self._raise(move.seat, FAILED),
            "ask": self._ask,
            "no answer of the probe": lambda move: stage.advance(move.seat, NO_ANSWER_OF_SINK),
            "go on": lambda move: stage.advance(move.seat, answer=True),
            "stop waiting": lambda move: stage.advance(move.seat, answer=False),
            "end": self._end,
            "renew late": self._renew_late,
            "lose both requests": lambda move: self._batch(move, applied=0),
            "lose both replies": lambda move: self._batch(move, applied=2),
            "lose the second": lambda move: self._batch(move, applied=1),
            "send both late": lambda move: self._batch(move, applied=-1),
            "arrive": self._arrive,
            "tick": self._tick,
            "purge": lambda _move: stage.store.purge(),
            "flush": self._flush,
            "step back": self._step_back,
            "forget": self._forget,
            "forget by force": self._forget,
            "resolve": self._resolve,
        }

    # --- which moves there are ---

    def all(self) -> list[Move]:
        """Return every move of the state, always in the same order."""
        stage = self.stage
        self._bar()
        found = [
            move for seat, place in enumerate(stage.seats) if place.position != GONE for move in self.of(seat)
        ]
        found += [Move("arrive", number) for number in range(len(stage.late))]
        found += self._batches()
        found += self._world()
        return found

    def _bar(self) -> None:
        """Bar the faults that are used up."""
        self._barred = BARRED[tuple([budget > 0 for budget in self.stage.left.values()])]

    def of(self, seat: int) -> list[Move]:
        """Return the moves of one worker; the first is the one without a fault."""
        stage = self.stage
        at = stage.position(seat)
        command = at.command
        kinds: tuple[str, ...]
        if command is None:
            kinds = ("end", "die")
        elif type(command) is Invoke:
            kinds = self._handler_moves(seat)
        elif type(command) is Leave:
            kinds = ("return", "raise after", "die")
            if stage.seats[seat].flags & LOST:
                kinds = (*kinds, "notice the loss")
        elif type(command) is Ask:
            kinds = ("ask", "die")
            if stage.mode.quarantine:
                kinds = ("ask", "no answer of the probe", "die")
        elif type(command) is Sleep:
            kinds = ("stop waiting", "go on") if self._may_wake(seat) else ("stop waiting",)
        elif type(command) is Pause:
            kinds = ("stop waiting", "go on")
        else:
            kinds = ("send", "lose the request", "lose the reply", "send late", "die after sending", "die, send late")  # fmt: skip # noqa: E501
            if at.before is not None or stage.flaws.ack_on_receipt:
                kinds = (*kinds, "die")
        if stage.left["late"] and stage.holds(seat):
            kinds = (*kinds, "renew late")
        return [Move(kind, seat) for kind in kinds if kind not in self._barred]

    def _handler_moves(self, seat: int) -> tuple[str, ...]:
        stage = self.stage
        place, at = stage.seats[seat], stage.position(seat)
        kind = stage.event_of(place.program).kind
        if kind == "killer":
            return ("be killed",)
        noticed = place.flags & LOST or stage.world.now >= place.deadline_us
        if noticed and at.granted is not None and not place.flags & STALLED:
            return "notice the loss", "die"
        if kind == "permanent":
            return "fail for good", "die"
        if kind == "poison":
            return "fail", "die"
        faults = ("raise before", "refuse before", "lose the sink's reply", "reach the sink late", "die")
        return ("act", *faults) if place.flags & STALLED else ("act", "stall", *faults)

    def _may_wake(self, seat: int) -> bool:
        """Whether another try would be answered otherwise: a sleeper that wakes for nothing is where it was."""
        stage = self.stage
        claim = stage.position(seat).claim
        assert claim is not None
        answer, _ = decide(stage.store.records.get(claim.id), stage.own(seat, claim), stage.store.now())
        return type(answer) is not Busy

    def _batches(self) -> list[Move]:
        stage = self.stage
        if not stage.scene.together:
            return []
        keys, found = len(stage.messages), []
        for first in range(0, len(stage.seats), keys):
            both = [
                seat
                for seat in range(first, first + keys)
                if stage.seats[seat].position != GONE and type(stage.position(seat).command) is Settle
            ]
            if len(both) == keys:
                found += [Move(kind, first, tuple(both)) for kind in BATCHES if kind not in self._barred]
        return found

    def _world(self) -> list[Move]:
        stage = self.stage
        left, store, found = stage.left, stage.store, []
        if left["ticks"]:
            held = stage.holders()
            found = [
                Move("tick", others=stalled)
                for size in range(min(left["stalls"], len(held)) + 1)
                for stalled in combinations(held, size)
            ]
        if left["purges"] and not all(
            stage.flaws.spared_by_purge(record, store.now()) for record in store.records.values()
        ):
            found.append(Move("purge"))
        if left["flushes"] and (store.records or store.marks):
            found.append(Move("flush"))
        if left["steps_back"]:
            found.append(Move("step back"))
        if left["forgets"] or left["resolves"]:
            found += self._operators()
        return found

    def _operators(self) -> list[Move]:
        stage, found = self.stage, []
        for number, event in enumerate(stage.events):
            record = standing(stage.store.records.get(event.id), stage.store.now())
            if record is not None and record.state != "forgotten" and stage.left["forgets"]:
                found += [Move("forget", number), Move("forget by force", number)]
            if record is not None and record.state == "unknown" and stage.left["resolves"]:
                found.append(Move("resolve", number))
        return found

    # --- how they are made ---

    def make(self, move: Move) -> None:
        """Make a move, and the local steps that follow it. Raises `Violation` if a promise is broken."""
        stage = self.stage
        for name in COSTS.get(move.kind, ()):
            stage.left[name] -= 1
        if move.kind == "tick":
            stage.left["stalls"] -= len(move.others)
        elif stage.flaws.ack_on_receipt and move.kind != "arrive" and move.seat >= 0:
            self._receive(move.seat)
        if stage.world.trace is not None:
            stage.world.note(self._tell(move))
        self._makers[move.kind](move)
        self._settle_down()

    def _receive(self, seat: int) -> None:
        program = self.stage.seats[seat].program
        if program < len(self.stage.acked):
            self.stage.acked[program] = True

    def _settle_down(self) -> None:
        """Take the steps that concern nobody else: a watch, a pause with nothing to decide, an end with no ack."""
        stage = self.stage
        for seat in range(len(stage.seats)):
            while (index := stage.seats[seat].position) != GONE:
                command = stage.positions[index].command
                if type(command) in (Watch, Unwatch):
                    stage.advance(seat, None)
                elif type(command) is Pause and (command.owner or not command.wait_s):
                    in_time = bool(command.owner) and stage.world.now < stage.seats[seat].deadline_us
                    stage.advance(seat, in_time)
                elif command is None and not (stage.left["kills"] and self._acks(seat)):
                    self._end(Move("end", seat))
                else:
                    break

    def _tell(self, move: Move) -> str:
        stage = self.stage
        name = stage.attempts[move.seat].name if move.seat >= 0 else "the world"
        if move.kind == "arrive":
            late = stage.late[move.seat]
            return f"{stage.attempts[late.seat].name}: {describe(late.item)} arrives late"
        if move.kind == "tick":
            who = ", ".join(stage.attempts[seat].name for seat in move.others)
            return f"a lease passes{who and ', and no renewal of ' + who}"
        if move.kind in ("purge", "flush", "step back", "forget", "forget by force", "resolve"):
            return f"the store: {move.kind}"
        command = stage.position(move.seat).command
        what = "" if command is None else f" {describe(command)}"
        return f"{name}:{what} {move.kind}"

    def _note(self, seat: int, text: str) -> None:
        self.stage.world.note(f"  {self.stage.attempts[seat].name}: {text}")

    # --- requests to the store ---

    def _item(self, seat: int) -> Any:
        return self.stage.own(seat, self.stage.position(seat).command)

    def _apply(self, seat: int, item: Any) -> Any:
        stage = self.stage
        attempt = stage.attempt(seat)
        if type(item) is Commit:
            item = Commit(item.id, attempt)
        if type(item) is Claim:
            attempt.claim = item
        skew = SKEW_US if stage.flaws.client_clock and seat % 2 else 0
        answer = stage.store.apply(item, attempt, skew)
        if stage.world.trace is not None:
            self._note(seat, f"{describe(item)} -> {describe(answer)}")
        return answer

    def _answer(self, seat: int, answer: Any) -> None:
        stage = self.stage
        command = stage.position(seat).command
        if type(answer) is Granted:
            deadline = stage.world.now + command.lease_us
            stage.seats[seat] = stage.seats[seat]._replace(deadline_us=deadline)
        stage.advance(seat, answer)

    def _leave_unanswered(self, seat: int) -> None:
        if type(self.stage.position(seat).command) is not Claim:
            self.stage.touch(seat)
        self.stage.advance(seat, NO_ANSWER)

    def _lose_reply(self, move: Move) -> None:
        self._apply(move.seat, self._item(move.seat))
        self._leave_unanswered(move.seat)

    def _send_late(self, move: Move) -> None:
        self._post(move.seat, self.stage.position(move.seat).command)
        self._leave_unanswered(move.seat)

    def _post(self, seat: int, item: Any) -> None:
        granted = self.stage.position(seat).granted
        if type(item) is Commit:
            item = Commit(item.id, None)  # equal commits make equal states
        elif type(item) is Mark:
            item = replace(item, keys=tuple(item.keys))  # as a part of a state it must have a hash
        self.stage.late.append(LateSend(seat, 0 if granted is None else granted.fence, item))

    def _batch(self, move: Move, applied: int) -> None:
        for number, seat in enumerate(move.others):
            if applied < 0:
                self._post(seat, self.stage.position(seat).command)
            elif number < applied:
                self._apply(seat, self._item(seat))
            self._leave_unanswered(seat)

    def _arrive(self, move: Move) -> None:
        stage = self.stage
        late = stage.late.pop(move.seat)
        if isinstance(late.item, str):
            self._reach_sink(late.seat, late.item, late.fence)
        else:
            self._apply(late.seat, stage.own(late.seat, late.item))

    def _renew_late(self, move: Move) -> None:
        at = self.stage.position(move.seat)
        assert at.claim is not None
        assert at.granted is not None
        self._post(move.seat, Renew(at.claim.id, at.claim.owner, at.granted.fence, at.claim.lease_us))

    # --- deaths ---

    def _die(self, move: Move) -> None:
        stage = self.stage
        keys = len(stage.messages)
        first = move.seat - move.seat % keys
        for seat in range(first, first + keys) if stage.scene.together else (move.seat,):
            if stage.seats[seat].position not in (GONE, stage.programs[stage.seats[seat].program].root.index):
                stage.touch(seat)
                stage.end(seat)
            elif seat == move.seat:
                stage.end(seat)

    def _die_after(self, move: Move) -> None:
        self._apply(move.seat, self._item(move.seat))
        self.stage.touch(move.seat)
        self._die(move)

    def _die_late(self, move: Move) -> None:
        self._post(move.seat, self.stage.position(move.seat).command)
        self.stage.touch(move.seat)
        self._die(move)

    # --- the handler ---

    def _reach_sink(self, seat: int, part: str, fence: int) -> bool:
        stage = self.stage
        attempt = stage.attempt(seat)
        attempt.granted = Granted(fence, 1, 0, 0) if fence else None
        before = attempt.event.effects
        applied = stage.sink.apply(attempt, part)
        place = stage.seats[seat]
        if attempt.event.effects > before:
            number = stage.events.index(attempt.event)
            payloads = stage.payloads[number] | {place.program}
            stage.payloads[number] = payloads
            if len(payloads) > 1 and not attempt.event.forgets:
                stage.violate("payload", f"{attempt.event.payload}: two payloads of one key had an effect")
        return applied

    def _act(self, move: Move) -> None:
        stage, seat = self.stage, move.seat
        at = stage.position(seat)
        applied = self._reach_sink(seat, part_of(at.command), 0 if at.granted is None else at.granted.fence)
        place = stage.seats[seat]
        if applied:
            stage.seats[seat] = place._replace(flags=place.flags | EFFECTED)
        stage.advance(seat, Returned(part_of(at.command)) if applied else REFUSED)

    def _raise(self, seat: int, ran: Raised) -> None:
        self.stage.touch(seat)
        self.stage.advance(seat, ran)

    def _stall(self, move: Move) -> None:
        self.stage.touch(move.seat)
        place = self.stage.seats[move.seat]
        self.stage.seats[move.seat] = place._replace(flags=place.flags | STALLED)

    def _lose_sink(self, move: Move) -> None:
        at = self.stage.position(move.seat)
        self._reach_sink(move.seat, part_of(at.command), 0 if at.granted is None else at.granted.fence)
        self._raise(move.seat, NO_ANSWER_OF_SINK)

    def _reach_late(self, move: Move) -> None:
        self._post(move.seat, part_of(self.stage.position(move.seat).command))
        self._raise(move.seat, NO_ANSWER_OF_SINK)

    def _ask(self, move: Move) -> None:
        stage = self.stage
        at = stage.position(move.seat)
        if stage.mode.quarantine:
            last = at.seen_fence if at.granted is None else at.granted.fence
        else:
            assert at.granted is not None
            last = at.granted.fence - 1
        answer = stage.sink.probe(stage.event_of(stage.seats[move.seat].program), last)
        if stage.world.trace is not None:
            self._note(move.seat, f"the probe answers {answer}")
        stage.advance(move.seat, Returned(answer))

    # --- the runner ---

    def _acks(self, seat: int) -> bool:
        stage = self.stage
        place = stage.seats[seat]
        if place.flags & OLD_COPY or place.program >= len(stage.acked):
            return False
        return stage.mode.acks(stage.position(seat).outcome)

    def _end(self, move: Move) -> None:
        stage, seat = self.stage, move.seat
        outcome = stage.position(seat).outcome
        attempt = stage.attempt(seat)
        acks = self._acks(seat)
        if stage.world.trace is not None:
            self._note(seat, f"{outcome}{', acknowledged' if acks else ''}")
        if not stage.mode.suppresses:
            stage.referee.on_observed_run(attempt, outcome)
        elif acks and type(outcome) is not Mismatch:
            stage.referee.on_ack(attempt, outcome)
            if stage.left["resolves"] == stage.bounds.resolves:  # an operator's decision has no value
                stage.referee.on_outcome(attempt.event, outcome)
        if acks and not stage.mode.journal:
            stage.acked[stage.seats[seat].program] = True
        stage.end(seat)

    # --- time and operators ---

    def _tick(self, move: Move) -> None:
        """Let a lease pass. Keepers renew in the middle of it, except those of workers that stall."""
        stage = self.stage
        held = stage.holders()
        stage.world.now += LEASE_US // 2
        for seat in held:
            at, place = stage.position(seat), stage.seats[seat]
            assert at.claim is not None
            assert at.granted is not None
            if seat in move.others:
                stage.touch(seat)
                continue
            item = Renew(at.claim.id, at.claim.owner, at.granted.fence, at.claim.lease_us)
            answer = self._apply(seat, stage.own(seat, item))
            if type(answer) is Renewed:
                stage.seats[seat] = place._replace(deadline_us=stage.world.now + LEASE_US)
            elif type(answer) is Lost:
                stage.seats[seat] = place._replace(flags=place.flags | LOST)
        stage.world.now += LEASE_US // 2 + 1

    def _flush(self, _move: Move) -> None:
        self.stage.store.flush()
        self.stage.world.now += 1  # no server is there again in the same microsecond

    def _step_back(self, _move: Move) -> None:
        self.stage.store.offset_us -= LEASE_US // 2

    def _forget(self, move: Move) -> None:
        event = self.stage.events[move.seat]
        if self.stage.store.forget(event, force=move.kind == "forget by force"):
            self._publish_again(event)

    def _resolve(self, move: Move) -> None:
        """Resolve as an operator who asks the sink; its answer is final."""
        stage = self.stage
        event = stage.events[move.seat]
        record = stage.store.records[event.id]
        stage.sink.probe(event, record.fence)
        if stage.store.resolve(event):
            self._publish_again(event)

    def _publish_again(self, event: Any) -> None:
        """Send the event in a new message, as who forgets a record does: an ack of a running delivery is of the old."""
        stage = self.stage
        for program, message in enumerate(stage.messages):
            if message is event:
                stage.acked[program] = False
        for seat, place in enumerate(stage.seats):
            root = stage.programs[place.program].root.index
            if place.position not in (GONE, root) and stage.event_of(place.program) is event:
                stage.seats[seat] = place._replace(flags=place.flags | OLD_COPY)
