"""Build the items, tasks and flows that both clients send to a store; and read the answers.

`ItemBuilder` knows one consumer and one policy and does no I/O: the two clients differ only in how they wait.
"""

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

from semel.codec import decode, encode, encode_reason
from semel.core import flows
from semel.core.commands import (
    Claim,
    ClaimAnswer,
    Flow,
    Granted,
    Mark,
    Marked,
    Raised,
    Renew,
    Returned,
    Scan,
    Settle,
)
from semel.core.error_info import describe, encode_failure
from semel.core.ids import check_ids, holds_time, time_in
from semel.core.ids import fingerprint as fingerprint_of
from semel.core.protocols import AsyncStore, Store
from semel.core.settlement import NotStarted, Settlement, Task, settlement_for
from semel.errors import ModeMismatch, PolicyInvalid, StoreUncertain, UsageError, ValueInvalid
from semel.keys.limits import check as check_key
from semel.keys.limits import check_consumer
from semel.keys.sliding import Sliding
from semel.policy import LEASE_MAX_S, LEASE_MIN_S, Policy, check_fits
from semel.runtime.handlers import return_type
from semel.runtime.process import inspect, new_owner, worker_name
from semel.types import Delivery, ErrorInfo, Id, Mode, Outcome, Record, Unavailable
from semel.windows import OFF, Duration, duration_us, exact_text, resolve, window_us

__all__ = ["ClientTask", "ItemBuilder", "ObserveCounts", "marks_of", "time_us"]

T = TypeVar("T")

MODES: tuple[Mode, ...] = ("inbox", "lease", "quarantine", "mark", "transaction", "observe")
META_BYTES_MAX = 4096


class ObserveCounts(msgspec.Struct):
    """The counts of observe mode: how often handlers ran, and how many of those runs were duplicates."""

    runs: int = 0
    duplicates: int = 0


class ClientTask(Task, frozen=True):
    """A task as a client runs it."""

    handler: Any = None
    """The function behind `call`; reports and warnings name it."""
    delivery: Delivery[Any] | None = None
    """Where the task comes from; `None`: from a call."""
    flow: Callable[[Task], Flow[Outcome[Any]]] = flows.once
    """How the task is handled in its consumer's mode."""


class ItemBuilder:
    """Builds the items of one consumer with one policy."""

    def __init__(
        self,
        *,
        consumer: str,
        tenant: str,
        window: Duration,
        lease: Duration,
        mode: Mode,
        policy: Policy,
        ids: str | None = None,
    ) -> None:
        if mode not in MODES:
            raise PolicyInvalid(f"mode {mode!r} is unknown; choose one of {', '.join(MODES)}")
        if not isinstance(policy, Policy):
            raise PolicyInvalid(f"policy is a {type(policy).__name__}; write policy=semel.Policy(lease_s=30)")
        check_fits(
            mode,
            probe=policy.probe is not None,
            on_unavailable=policy.on_unavailable,
            refresh_on_sight=policy.refresh_on_sight,
        )
        self.ids: str = "" if ids is None else check_ids(ids, mode, policy)
        self.tenant: str = tenant if not tenant else check_consumer(tenant)
        self.consumer: str = check_consumer(consumer)
        self.mode: Mode = mode
        self.policy: Policy = policy
        self.observed: ObserveCounts = ObserveCounts()
        self.guards: dict[str, tuple[str, int]] = {}
        """Where the guarded functions are defined, by the names of their records."""
        self.warns_not_kept: bool = True
        self.source: str = ""
        """Where deliveries come from that name no source; only hooks get it."""
        self.warned: set[str] = set()
        """Handlers that were warned about because their values could not be kept."""
        self._default_us: int = window_us(window if policy.window_s is None else policy.window_s)
        self.lease_us: int = duration_us(lease if policy.lease_s is None else policy.lease_s)
        if not LEASE_MIN_S * 1e6 <= self.lease_us <= LEASE_MAX_S * 1e6:
            raise PolicyInvalid(f"a lease of {lease!r} is out of bounds; use {LEASE_MIN_S * 1000:g}ms to 12h")
        if policy.run_max_s * 1e6 < self.lease_us:
            raise PolicyInvalid(
                f"lease {self.lease_us / 1e6:g}s is longer than Policy.run_max_s {policy.run_max_s:g}; raise run_max_s"
            )
        self._base = (window, lease)
        self._refuse_late: bool = policy.late != "run"
        self._refresh: bool = policy.refresh_on_sight
        self._quarantine: bool = mode == "quarantine"
        self._flow: Callable[[Task], Flow[Outcome[Any]]] = self._flow_of_mode()
        self.probe_awaits: bool = policy.probe is not None and inspect.iscoroutinefunction(policy.probe)

    def using(self, policy: Policy) -> "ItemBuilder":
        """Return a builder for the same consumer with another policy."""
        window, lease = self._base
        plan = ItemBuilder(
            consumer=self.consumer,
            tenant=self.tenant,
            window=window,
            lease=lease,
            mode=self.mode,
            policy=policy,
            ids=self.ids or None,
        )
        plan.observed = self.observed
        plan.guards, plan.warned, plan.source = self.guards, self.warned, self.source
        return plan

    def id(self, key: str) -> Id:
        """Return the record's id. Raises `KeyInvalid`."""
        key = check_key(key)
        self.check_times((key,))
        return (self.tenant, self.consumer, key)

    def check_times(self, keys: Sequence[str]) -> None:
        """Check that the keys are ids of the declared kind. Raises `KeyInvalid`."""
        if holds_time(self.ids):
            for key in keys:
                time_in(self.ids, key)

    def check_live(self, stored: Mapping[tuple[str, str, str], int], live_us: int) -> None:
        """Check that the partitions outlive the windows of their records. Raises `PolicyInvalid`."""
        if not self.ids or not live_us:
            return
        mine = [us for scope, us in stored.items() if scope[:2] == (self.tenant, self.consumer)]
        longest = max(self._default_us, *mine, 0)
        if longest >= live_us:
            raise PolicyInvalid(
                f"a window of {exact_text(longest)} is not shorter than the {live_us / 1e6:g}s that partitions live;"
                " shorten it, or open the store with a longer partition_live (window + longest outage)"
            )

    def check_store(self, store: Store | AsyncStore) -> None:
        """Check that the store can keep the client's own window, as the policy wants it. Raises `PolicyInvalid`."""
        store.capabilities.check_window(self._default_us, store.name, refresh=self._refresh)

    def with_event_type(self, delivery: Delivery[Any]) -> Delivery[Any]:
        """Return the delivery with the event type that its record has: its own, else the policy's."""
        kind = self.policy.event_type
        return delivery if delivery.event_type or not kind else replace(delivery, event_type=kind)

    def window_us(self, stored: Mapping[tuple[str, str, str], int], event_type: str) -> int:
        """Return the window of an event type: the stored one, else the client's own."""
        if not stored:
            return self._default_us
        return resolve(stored, self.tenant, self.consumer, event_type, self._default_us)

    def check_probe(self) -> None:
        """Raise `UsageError` for an async probe in a blocking client, before anything is claimed."""
        if self.probe_awaits:
            raise UsageError(
                "Policy.probe is an async def, which this client cannot await: use a def, or semel.aopen()"
            )

    def require(self, *modes: Mode) -> None:
        """Raise `ModeMismatch` if the consumer's mode is none of these."""
        if self.mode not in modes:
            raise ModeMismatch(
                f"consumer {self.consumer!r} works in mode {self.mode!r}; this call is for {' or '.join(modes)}"
            )

    def with_fingerprints(self, deliveries: Sequence[Delivery[T]]) -> Sequence[Delivery[T]]:
        """Return the deliveries; those without a fingerprint get the policy's fingerprint of their body."""
        take = self.policy.fingerprint
        if take is None:
            return deliveries
        return [
            each if each.fingerprint is not None else replace(each, fingerprint=take(each.body))
            for each in deliveries
        ]

    # --- items ---

    def claim(
        self,
        stored: Mapping[tuple[str, str, str], int],
        key: str,
        fingerprint: bytes | None = None,
        sliding_us: int | None = None,
        event_type: str = "",
        event_time_us: int | None = None,
        journal: Any = None,
        meta: Mapping[str, str] | None = None,
        lateness_us: int | None = None,
    ) -> Claim:
        """Build a claim of this consumer, with a new owner."""
        event_type = event_type or self.policy.event_type
        apart_us = 0
        if lateness_us is not None and sliding_us is not None:
            if event_time_us is None:
                raise UsageError(
                    f"{key!r} has a sliding window by event time, and no event time; pass event_time"
                )
            if self._refresh:
                raise UsageError(
                    f"no sighting moves the window by event time of {key!r}; leave out refresh_on_sight"
                )
            self.require("lease", "quarantine", "observe")
            apart_us, sliding_us = sliding_us, sliding_us + lateness_us
        if sliding_us is not None:
            window_us = sliding_us
        else:
            window_us = self.window_us(stored, event_type) if stored else self._default_us
        claim = Claim(
            (self.tenant, self.consumer, check_key(key)) if not self.ids else self.id(key),
            new_owner(),
            self.lease_us,
            window_us,
            None if fingerprint is None else fingerprint_of(fingerprint),
            event_type,
            event_time_us,
            self._refuse_late,
            None if journal is None else self._encode_journal(journal),
            None if meta is None else _encode_meta(meta),
            self._quarantine,
            sliding_us is not None,
            apart_us,
        )
        return replace(claim, refresh=True) if self._refresh else claim

    def _encode_journal(self, journal: Any) -> bytes:
        """Encode a payload. It must decode to an equal value: the handler that takes the claim over gets it."""
        return encode(journal, None, self.policy.value_bytes_max, as_plain_data=False)

    def claim_for_delivery(
        self, stored: Mapping[tuple[str, str, str], int], delivery: Delivery[Any]
    ) -> Claim:
        """Build the claim of a delivery."""
        return self.claim(
            stored,
            delivery.key,
            delivery.fingerprint,
            delivery.sliding_us,
            delivery.event_type,
            delivery.event_time_us,
            delivery.journal,
            delivery.meta,
            delivery.lateness_us,
        )

    def settle(
        self, claim: Claim, granted: Granted, to: Any, value: bytes | None = None, **more: Any
    ) -> Settle:
        """Build the settle that ends a claim."""
        return Settle(
            claim.id,
            claim.owner,
            granted.fence,
            to,
            value,
            claim.window_us,
            claim.lease_us,
            claim.sliding,
            event_time_us=claim.event_time_us if claim.apart_us else None,
            **more,
        )

    def completion(self, claim: Claim, granted: Granted, value: Any) -> Settle:
        """Build the settle to `done`. A value that cannot be kept is left out: the effect has happened."""
        try:
            kept = encode(value, None, self.policy.value_bytes_max) if self.policy.keep_value else None
        except ValueInvalid as error:
            kept = encode_reason(error)
        return self.settle(claim, granted, "done", kept)

    def failure(self, claim: Claim, granted: Granted, error: BaseException | str) -> Settle:
        """Build the settle to `failed`, with the stored part of the error."""
        error = _as_error(error)
        return self.settle(
            claim, granted, "failed", encode_failure(error, self.policy), error=self.describe(error)
        )

    def describe(self, error: BaseException | str | None) -> ErrorInfo | None:
        """Return what the record keeps of an attempt's error."""
        if error is None or isinstance(error, NotStarted):
            return None
        return describe(_as_error(error), self.policy, worker_name)

    def release(
        self,
        claim: Claim,
        granted: Granted,
        delay_s: float,
        *,
        count_attempt: bool,
        error: BaseException | str | None = None,
    ) -> Settle:
        """Build the settle that releases a claim; the key can be claimed again after the delay."""
        delay_us = duration_us(delay_s)
        if delay_us > LEASE_MAX_S * 1e6:
            raise PolicyInvalid(f"delay_s is {delay_s}; it must lie between 0 and {LEASE_MAX_S:g}")
        return self.settle(
            claim,
            granted,
            "released",
            delay_us=delay_us,
            count_attempt=count_attempt,
            error=self.describe(error),
        )

    def leaving(self, claim: Claim, granted: Granted, error: BaseException | None) -> Settlement:
        """Build the settlement of a claim at the end of its `with` block."""
        ran = Returned(None) if error is None else Raised(error, interrupted=not isinstance(error, Exception))
        return settlement_for(ran, Task(claim, _nothing, self.policy), granted.attempt)

    def renewal(self, claim: Claim, granted: Granted) -> Renew:
        """Build the renewal of a claim's lease, from now."""
        return Renew(claim.id, claim.owner, granted.fence, claim.lease_us)

    def mark(
        self, stored: Mapping[tuple[str, str, str], int], keys: Sequence[str], event_type: str = ""
    ) -> Mark:
        """Build the mark of distinct keys."""
        self.check_times(keys)
        window = self.window_us(stored, event_type or self.policy.event_type)
        return Mark(self.tenant, self.consumer, list(keys), window, self._refresh)

    # --- tasks ---

    def task(
        self,
        windows: Mapping[tuple[str, str, str], int],
        key: str,
        call: Callable[[], Any],
        handler: Any,
        fingerprint: bytes | None = None,
        event_type: str = "",
        meta: Mapping[str, str] | None = None,
        sliding: Sliding | None = None,
        event_time_us: int | None = None,
    ) -> ClientTask:
        """Build the task of one call."""
        # Every call passes here, so the usual annotation is read without a call; `return_type` reads all others.
        try:
            returns = handler.__annotations__.get("return")
        except Exception:  # noqa: BLE001 - no function, or an annotation that names nothing
            returns = return_type(handler)
        else:
            if returns is Any or not (returns is None or isinstance(returns, type)):  # text, or text inside
                returns = return_type(handler)
        if sliding is None:
            claim = self.claim(windows, key, fingerprint, None, event_type, None, None, meta)
        else:
            sliding_us, lateness_us = sliding.window_us, sliding.lateness_us
            claim = self.claim(
                windows, key, fingerprint, sliding_us, event_type, event_time_us, None, meta, lateness_us
            )
        flow = self._flow if claim.window_us != OFF else flows.run_unrecorded
        return ClientTask(claim, call, self.policy, returns, None, worker_name, handler, None, flow)

    def delivery_task(
        self,
        windows: Mapping[tuple[str, str, str], int],
        delivery: Delivery[T],
        handler: Callable[[T], Any],
        returns: Any,
        before_fail: Callable[[BaseException, Granted], Any] | None = None,
        owner: bytes | None = None,
    ) -> ClientTask:
        """Build the task of one delivery. `returns`: the handler's return type.

        `owner`: of an earlier task for the same delivery, whose claim may have been granted without an answer.
        """
        claim = self.claim_for_delivery(windows, delivery)
        if owner is not None:
            claim = replace(claim, owner=owner)
        flow = self._flow if claim.window_us != OFF else flows.run_unrecorded
        call = partial(handler, delivery.body)
        return ClientTask(
            claim, call, self.policy, returns, before_fail, worker_name, handler, delivery, flow
        )

    def _flow_of_mode(self) -> Callable[[Task], Flow[Outcome[Any]]]:
        match self.mode:
            case "lease" | "quarantine":
                return flows.once
            case "mark":
                return self._mark_then_run
            case "observe":
                return self._run_observed
            case _:
                return self._refuse_to_run

    def _mark_then_run(self, task: Task) -> Flow[Outcome[Any]]:
        claim = task.claim
        mark = Mark(self.tenant, self.consumer, [claim.id[2]], claim.window_us, self._refresh)
        return flows.mark_then_run(mark, task)

    def _run_observed(self, task: Task) -> Flow[Outcome[Any]]:
        self.observed.runs += 1
        return flows.run_observed(task, self._count)

    def _count(self, answer: ClaimAnswer) -> None:
        if not isinstance(answer, Unavailable):
            self.observed.duplicates += 1

    def _refuse_to_run(self, _task: Task) -> Flow[Outcome[Any]]:
        way = "a KafkaTransaction" if self.mode == "transaction" else "once.inbox(connection)"
        raise ModeMismatch(
            f"consumer {self.consumer!r} works in mode {self.mode!r}: its effects run in a transaction; use {way}"
        )

    def orphans(self, limit: int) -> Scan:
        """Build the scan for journaled claims of this consumer whose owner is gone."""
        return Scan(self.tenant, self.consumer, orphaned=True, limit=limit)

    def recovery(
        self, stored: Mapping[tuple[str, str, str], int], handler: Callable[[Any], Any]
    ) -> Callable[[Record], ClientTask]:
        """Return the function that builds an orphan's task: a new claim, no waiting, the journaled payload."""
        policy = replace(self.policy, wait_s=0)

        def task(record: Record) -> ClientTask:
            claim = self.claim(stored, record.key, event_type=record.event_type)
            payload = None if record.journal is None else decode(record.journal)
            call = partial(handler, payload)
            return ClientTask(claim, call, policy, return_type(handler), None, worker_name, handler)

        return task


def marks_of(answer: Marked | Unavailable) -> list[bool]:
    """Return which keys were new. Raises `StoreUncertain` without an answer: a guess would lose or repeat events."""
    if isinstance(answer, Unavailable):
        raise StoreUncertain(
            f"a mark got no answer, so it may be written or not: {answer.error}"
        ) from answer.error
    return answer.firsts


def time_us(event_time: datetime | None) -> int | None:
    """Return the microseconds since the epoch of an aware datetime."""
    if event_time is None:
        return None
    if event_time.tzinfo is None:
        raise UsageError("event_time has no time zone, so it names no instant; give it one, such as UTC")
    return round(event_time.timestamp() * 1e6)


def _encode_meta(meta: Mapping[str, str]) -> bytes:
    try:
        encoded = msgspec.json.encode(msgspec.convert(meta, dict[str, str]))
    except msgspec.ValidationError as error:
        raise UsageError(f"metadata is a mapping of text to text, not {meta!r}: {error}") from error
    if len(encoded) > META_BYTES_MAX:
        raise UsageError(f"metadata takes {len(encoded)} bytes, more than {META_BYTES_MAX}; keep less of it")
    return encoded


def _as_error(error: BaseException | str) -> BaseException:
    return RuntimeError(error) if isinstance(error, str) else error


def _nothing() -> None:
    """Do nothing: the handler of a claim that the caller settles."""
