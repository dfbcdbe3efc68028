"""The protocol in other words: a slow, plain model that knows nothing of the library it judges.

Times are microseconds. A record is a dict; what is over is really deleted, and only its fence is remembered.
Answers are plain tuples.
"""

from typing import Any

Name = tuple[str, str, str]
Answer = tuple[Any, ...]

GRAVE_US = 12 * 3600 * 10**6
FUTURE_US = 5 * 60 * 10**6
NEVER = None


class Model:
    def __init__(self) -> None:
        self.entries: dict[Name, dict[str, Any]] = {}
        self.fences: dict[Name, int] = {}
        self.marks: dict[Name, int] = {}

    # --- time ---

    def age(self, name: Name, now: int) -> dict[str, Any] | None:
        """Let time do to one record what it does; what is left of it."""
        entry = self.entries.get(name)
        if entry is None:
            return None
        if entry["kind"] == "running" and entry["lease_end"] <= now and entry["careful"]:
            entry |= {"kind": "unknown", "since": entry["lease_end"], "end": NEVER}
        leased = entry["kind"] in ("running", "free") and entry["lease_end"] > now
        if entry["end"] is not NEVER and entry["end"] <= now and not leased:
            del self.entries[name]
            return None
        return entry

    def next_fence(self, name: Name, now: int) -> int:
        self.fences[name] = max(self.fences.get(name, 0) + 1, now)
        return self.fences[name]

    # --- verbs ---

    def claim(
        self,
        now: int,
        name: Name,
        owner: bytes,
        lease: int,
        window: int,
        *,
        print_: bytes | None = None,
        happened: int | None = None,
        refuse_late: bool = False,
        payload: bytes | None = None,
        careful: bool = False,
        sliding: bool = False,
        gap: int | None = None,
        refresh: bool = False,
    ) -> Answer:
        """With a `gap`, events of one name that happened at least so far apart are different ones."""
        entry = self.age(name, now)
        gap = None if happened is None else gap
        mine = {"owner": owner, "lease": lease, "window": window, "print": print_, "payload": payload,
                "careful": careful, "sliding": sliding, "happened": happened, "gap": gap}  # fmt: skip
        if entry is not None and gap is not None and happened is not None and entry.get("moment") is not None:
            distance = happened - entry["moment"]
            if distance <= -gap:
                return ("late", now - happened)
            if distance >= gap:
                return self.wait_for(entry, now, lease, gap) or self.begin(now, name, mine, refuse_late)
        if entry is None or entry["kind"] == "grave":
            return self.begin(now, name, mine, refuse_late)
        if self.another_payload(print_, entry["print"]):
            return ("mismatch",)
        if entry["kind"] in ("done", "failed"):
            if refresh and entry["moment"] is None and entry["end"] < now + window:
                entry["end"] = now + window
            return ("known", entry["kind"], entry["value"], entry["fence"], entry["since"], entry["seen"])
        if entry["kind"] == "unknown":
            return ("unknown", entry["since"])
        if entry["lease_end"] > now:
            if entry["kind"] == "running" and entry["owner"] == owner:
                self.move_lease(entry, now + lease)
                return self.granted(name)
            return ("busy", entry["lease_end"] - now, entry["payload"] is not None)
        return self.take_over(now, name, entry, mine)

    def begin(self, now: int, name: Name, mine: dict[str, Any], refuse_late: bool) -> Answer:
        happened, window, lease = mine["happened"], mine["window"], mine["lease"]
        timed = mine["gap"] is not None
        too_old = refuse_late and happened is not None and now - happened > window
        if timed:
            too_old = not -FUTURE_US <= now - happened <= window - mine["gap"]
        if too_old:
            return ("late", now - happened)
        last = happened + window if timed else None
        end = last if timed else now + window if mine["sliding"] else now + lease + window
        self.entries[name] = {
            "kind": "running", "owner": mine["owner"], "fence": self.next_fence(name, now), "lease_end": now + lease,
            "attempt": 1, "seen": now, "print": mine["print"], "notes": [], "payload": mine["payload"],
            "value": None, "careful": mine["careful"], "sliding": mine["sliding"],
            "moment": happened if timed else None, "last": last,
            "end": NEVER if mine["careful"] or mine["payload"] is not None else end,
        }  # fmt: skip
        return self.granted(name)

    def take_over(self, now: int, name: Name, entry: dict[str, Any], mine: dict[str, Any]) -> Answer:
        entry |= {
            "kind": "running",
            "owner": mine["owner"],
            "fence": self.next_fence(name, now),
            "lease_end": now + mine["lease"],
            "attempt": entry["attempt"] + 1,
            "print": mine["print"] if mine["print"] is not None else entry["print"],
            "payload": entry["payload"] if entry["payload"] is not None else mine["payload"],
            "careful": mine["careful"],
        }
        if mine["gap"] is not None and entry["moment"] is None:
            entry |= {"moment": mine["happened"], "last": mine["happened"] + mine["window"]}
        entry["sliding"] = mine["sliding"] or entry["moment"] is not None
        if mine["careful"] or entry["payload"] is not None:
            entry["end"] = NEVER
        elif entry["moment"] is not None:
            entry["end"] = entry["last"]
        elif not mine["sliding"]:
            entry["end"] = now + mine["lease"] + mine["window"]
        return self.granted(name)

    def wait_for(self, entry: dict[str, Any], now: int, lease: int, gap: int) -> Answer | None:
        """What keeps another event from following this one; nothing, once it is settled or given up."""
        if entry["kind"] == "unknown":
            return ("unknown", entry["since"])
        if entry["kind"] not in ("running", "free"):
            return None
        if entry["lease_end"] > now:
            return ("busy", entry["lease_end"] - now, False)
        if entry["end"] is NEVER:
            return ("busy", lease, False)
        left = entry["lease_end"] + gap - now
        return ("busy", left, False) if left > 0 else None

    def renew(
        self,
        now: int,
        name: Name,
        owner: bytes,
        fence: int,
        lease: int,
        note: tuple[str, bytes | None] | None = None,
    ) -> Answer:
        entry = self.age(name, now)
        if entry is None or entry["kind"] != "running" or not self.holds(entry, owner, fence):
            return ("lost",)
        self.move_lease(entry, now + lease)
        if note is not None and note[0] not in [known for known, _ in entry["notes"]]:
            entry["notes"].append(note)
        return ("renewed", entry["lease_end"])

    def complete(
        self,
        now: int,
        name: Name,
        owner: bytes,
        fence: int,
        kind: str,
        value: bytes | None,
        *,
        lease: int,
        window: int,
        sliding: bool,
        moment: int | None = None,
    ) -> Answer:
        """Done, or failed for good."""
        entry = self.age(name, now)
        if entry is None:
            end = fence + window + (0 if sliding else lease) if moment is None else moment + window
            if end > now:
                self.entries[name] = {
                    "kind": kind, "owner": owner, "fence": fence, "lease_end": 0, "attempt": 1, "seen": fence,
                    "print": None, "notes": [], "payload": None, "value": value, "careful": False,
                    "sliding": sliding, "end": end, "since": now, "moment": moment,
                    "last": None if moment is None else end,
                }  # fmt: skip
                self.fences[name] = max(self.fences.get(name, 0), fence)
            return ("recreated", now)
        if not self.holds(entry, owner, fence):
            return ("lost",)
        if entry["kind"] == kind:
            return ("already", entry["since"])
        if entry["kind"] not in ("running", "unknown"):
            return ("lost",)
        if entry["moment"] is not None:
            end = entry["last"]
        elif not entry["sliding"]:
            end = now + window
        elif entry["end"] is NEVER:
            end = entry["seen"] + window
        else:
            end = entry["end"]
        entry |= {"kind": kind, "value": value, "since": now, "end": end, "payload": None}
        return ("completed", now)

    def release(
        self, now: int, name: Name, owner: bytes, fence: int, *, delay: int, give_back: bool
    ) -> Answer:
        entry = self.age(name, now)
        if entry is None or entry["kind"] != "running" or not self.holds(entry, owner, fence):
            return ("lost",)
        self.move_lease(entry, now + delay)
        entry |= {"kind": "free", "owner": b"", "attempt": entry["attempt"] - (1 if give_back else 0)}
        return ("completed", now)

    def quarantine(self, now: int, name: Name, owner: bytes, fence: int) -> Answer:
        entry = self.age(name, now)
        if entry is None or not self.holds(entry, owner, fence):
            return ("lost",)
        if entry["kind"] == "unknown":
            return ("already", entry["since"])
        if entry["kind"] != "running":
            return ("lost",)
        entry |= {"kind": "unknown", "since": now, "end": NEVER}
        return ("completed", now)

    def forget(
        self, now: int, name: Name, *, force: bool = False, fence: int | None = None, state: str | None = None
    ) -> Answer:
        if self.marks.get(name, 0) > now:
            del self.marks[name]
            return ("forgotten",)
        entry = self.age(name, now)
        if entry is None or entry["kind"] == "grave":
            return ("absent",)
        if (fence is not None and fence != entry["fence"]) or state not in (None, self.state(entry)):
            return ("lost",)
        if entry["kind"] == "running" and entry["lease_end"] > now and not force:
            return ("busy", entry["lease_end"] - now, entry["payload"] is not None)
        return self.forget_entry(now, name)

    def resolve(
        self, now: int, name: Name, fence: int, *, absent: bool, value: bytes | None, window: int
    ) -> Answer:
        entry = self.age(name, now)
        if entry is None or entry["kind"] != "unknown" or entry["fence"] != fence:
            return ("lost",)
        if absent and entry["payload"] is None:
            return self.forget_entry(now, name)
        if absent:
            fence = self.next_fence(name, now)
            entry |= {
                "kind": "free",
                "owner": b"",
                "fence": fence,
                "lease_end": now,
                "attempt": 0,
                "notes": [],
            }
            return ("forgotten",)
        end = now + window if entry["moment"] is None else entry["last"]
        entry |= {"kind": "done", "value": value, "since": now, "end": end, "payload": None}
        return ("completed", now)

    def lookup(self, now: int, name: Name) -> Answer:
        if self.marks.get(name, 0) > now:
            return ("mark", self.marks[name])
        entry = self.age(name, now)
        if entry is None or entry["kind"] == "grave":
            return ("absent",)
        return (
            self.state(entry),
            entry["owner"],
            entry["fence"],
            entry["attempt"],
            entry["seen"],
            entry["end"],
            entry["lease_end"] if self.state(entry) == "claimed" else None,
            entry["value"],
            entry["print"],
            tuple(entry["notes"]),
            entry["payload"],
            entry["moment"],
        )

    def mark(
        self, now: int, scope: tuple[str, str], keys: list[str], window: int, *, refresh: bool = False
    ) -> Answer:
        firsts = []
        for key in keys:
            name = (*scope, key)
            firsts.append(self.marks.get(name, 0) <= now)
            if firsts[-1] or (refresh and self.marks[name] < now + window):
                self.marks[name] = now + window
        return ("marked", firsts)

    # --- parts ---

    def granted(self, name: Name) -> Answer:
        entry = self.entries[name]
        return (
            "granted",
            entry["fence"],
            entry["attempt"],
            entry["lease_end"],
            entry["seen"],
            tuple(entry["notes"]),
            entry["payload"],
        )

    def forget_entry(self, now: int, name: Name) -> Answer:
        fence = self.next_fence(name, now)
        self.entries[name] = {"kind": "grave", "owner": b"", "fence": fence, "end": now + GRAVE_US}
        return ("forgotten",)

    def move_lease(self, entry: dict[str, Any], lease_end: int) -> None:
        if entry["end"] is not NEVER and not entry["sliding"]:
            entry["end"] += lease_end - entry["lease_end"]
        entry["lease_end"] = lease_end

    def holds(self, entry: dict[str, Any], owner: bytes, fence: int) -> bool:
        return bool(owner) and entry["owner"] == owner and entry["fence"] == fence

    def state(self, entry: dict[str, Any]) -> str:
        return "claimed" if entry["kind"] in ("running", "free") else str(entry["kind"])

    def another_payload(self, mine: bytes | None, stored: bytes | None) -> bool:
        return mine is not None and stored is not None and mine[:1] == stored[:1] and mine != stored
