"""The protocol in other words: a slow, plain model that knows nothing of the library it judges.

Times are microseconds. A record is a dict; what is over is really deleted, and only its fence is remembered.
Answers are plain tuples.
"""

from typing import Any

Name = tuple[str, str, str]
Answer = tuple[Any, ...]

GRAVE_US = 12 * 3600 * 10**6
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
    ) -> Answer:
        entry = self.age(name, now)
        if entry is None or entry["kind"] == "grave":
            if refuse_late and happened is not None and now - happened > window:
                return ("late", now - happened)
            end = now + window if sliding else now + lease + window
            self.entries[name] = {
                "kind": "running", "owner": owner, "fence": self.next_fence(name, now), "lease_end": now + lease,
                "attempt": 1, "seen": now, "print": print_, "notes": [], "payload": payload, "value": None,
                "careful": careful, "sliding": sliding, "end": NEVER if careful or payload is not None else end,
            }  # fmt: skip
            return self.granted(name)
        if self.another_payload(print_, entry["print"]):
            return ("mismatch",)
        if entry["kind"] in ("done", "failed"):
            return ("known", entry["kind"], entry["value"], entry["fence"], entry["since"], entry["seen"])
        if entry["kind"] == "unknown":
            return ("unknown", entry["since"])
        if entry["lease_end"] > now:
            if entry["kind"] == "running" and entry["owner"] == owner:
                self.move_lease(entry, now + lease)
                return self.granted(name)
            return ("busy", entry["lease_end"] - now, entry["payload"] is not None)
        entry |= {
            "kind": "running",
            "owner": owner,
            "fence": self.next_fence(name, now),
            "lease_end": now + lease,
            "attempt": entry["attempt"] + 1,
            "print": print_ if print_ is not None else entry["print"],
            "payload": entry["payload"] if entry["payload"] is not None else payload,
        }
        if careful or entry["payload"] is not None:
            entry["end"] = NEVER
        elif not sliding:
            entry["end"] = now + lease + window
        return self.granted(name)

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
    ) -> Answer:
        """Done, or failed for good."""
        entry = self.age(name, now)
        if entry is None:
            end = fence + window + (0 if sliding else lease)
            if end > now:
                self.entries[name] = {
                    "kind": kind, "owner": owner, "fence": fence, "lease_end": 0, "attempt": 1, "seen": fence,
                    "print": None, "notes": [], "payload": None, "value": value, "careful": False,
                    "sliding": sliding, "end": end, "since": now,
                }  # fmt: skip
                self.fences[name] = max(self.fences.get(name, 0), fence)
            return ("recreated", now)
        if not self.holds(entry, owner, fence):
            return ("lost",)
        if entry["kind"] == kind:
            return ("already", entry["since"])
        if entry["kind"] not in ("running", "unknown"):
            return ("lost",)
        if not entry["sliding"]:
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
        return self.bury(now, name)

    def resolve(
        self, now: int, name: Name, fence: int, *, absent: bool, value: bytes | None, window: int
    ) -> Answer:
        entry = self.age(name, now)
        if entry is None or entry["kind"] != "unknown" or entry["fence"] != fence:
            return ("lost",)
        if absent:
            return self.bury(now, name)
        entry |= {"kind": "done", "value": value, "since": now, "end": now + window, "payload": None}
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
        )

    def mark(self, now: int, scope: tuple[str, str], keys: list[str], window: int) -> Answer:
        firsts = []
        for key in keys:
            name = (*scope, key)
            firsts.append(self.marks.get(name, 0) <= now)
            if firsts[-1]:
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

    def bury(self, now: int, name: Name) -> Answer:
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
