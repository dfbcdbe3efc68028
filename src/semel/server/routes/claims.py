"""`/v1/claims`: the protocol for curl and for languages without a client."""

import base64
import binascii
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import msgspec
from fastapi import APIRouter, FastAPI, Request
from msgspec.structs import replace
from starlette.responses import Response

from semel.client.items import ItemBuilder, time_us
from semel.codec import encode
from semel.core.commands import Answer, Claim, Granted, Item, Known, Renew, Settle
from semel.core.ids import idempotency_key
from semel.errors import ValueInvalid
from semel.observe.formatting import error_of, readable
from semel.policy import Policy
from semel.server.problems import HttpProblem
from semel.server.requests import (
    ClaimAsked,
    ClaimHandle,
    ClaimOutcome,
    ClaimOutcomes,
    ClaimsAsked,
    Completing,
    Ending,
    Failing,
    Releasing,
    Renewing,
    SettleReplies,
    SettleReply,
)
from semel.server.routes.base import Asked, Document, answer, authorize, beside_loop, many, read
from semel.server.service import check_any_done
from semel.server.slow_lane import answer_bytes
from semel.stores.http.encoding import ItemRefusal
from semel.types import Busy, Completed, ErrorInfo, Late, Lost, Mismatch, Renewed, Unavailable, Unknown
from semel.windows import resolve

__all__ = ["add"]

CLAIM: dict[str, Any] = {"consumer": "billing", "claims": [{"key": "evt_1"}], "lease": "30s", "window": "24h"}
CLAIMED: dict[str, Any] = {
    "outcomes": [
        {
            "key": "evt_1",
            "outcome": "claimed",
            "claim": "l6diaWxsaW5n...",
            "fence": 1731700000000000,
            "attempt": 1,
        }
    ]
}
HELD = "l6diaWxsaW5n..."
FAILURE = "reported"
"""The kind of a failure that a caller reports: it has no class here."""

_handle = msgspec.msgpack.Decoder(ClaimHandle)
_pack = msgspec.msgpack.Encoder()
_claims = msgspec.json.Decoder(ClaimsAsked)


class Completions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Claims to complete."""

    claims: list[Completing]


class Failures(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Claims to fail."""

    claims: list[Failing]


class Releases(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Claims to release."""

    claims: list[Releasing]


class Renewals(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Claims to renew."""

    claims: list[Renewing]


ENDS: dict[str, tuple[Any, str, Any]] = {
    "complete": (Completions, "The effect has happened: remember it", {"claim": HELD, "value": {"ok": True}}),
    "renew": (Renewals, "Prolong the lease", {"claim": HELD}),
    "release": (Releases, "Release a claim; the event may run again", {"claim": HELD, "delay_s": 5}),
    "fail": (
        Failures,
        "Fail an event for good: every duplicate gets the failure",
        {"claim": HELD, "error": "no such card"},
    ),
}


def add(app: FastAPI, document: Document) -> None:
    """Add the routes."""
    routes = APIRouter(prefix="/v1/claims", tags=["claims"])

    @routes.post(
        "",
        summary="Claim events before processing them",
        **document.operation(
            takes=ClaimsAsked, gives=ClaimOutcomes, example=CLAIM, answer=CLAIMED, also=(409,)
        ),
    )
    async def claims(request: Request) -> Response:
        """`claimed`: process it, then complete. `done`: a duplicate, with the first one's value. `busy`: come back."""
        return await claim_many(request)

    for name, (shape, summary, example) in ENDS.items():
        _add_end(routes, document, name, shape, summary, example)
    app.include_router(routes)


def _add_end(
    routes: APIRouter, document: Document, name: str, shape: Any, summary: str, example: Any
) -> None:
    decoder = msgspec.json.Decoder(shape)
    about = document.operation(takes=shape, gives=SettleReplies, example={"claims": [example]}, also=(409,))

    @routes.post(f"/{name}", name=name, summary=summary, **about)
    async def end(request: Request) -> Response:
        return await end_many(request, (await read(request, decoder)).claims)


async def claim_many(request: Request) -> Response:
    """Claim events of one consumer; a second claim of a key in one request is busy."""
    ask = authorize(request, "write")
    said = await read(request, _claims)
    many(len(said.claims), ask.service, ask.caller)
    limits = ask.service.settings.limits
    plan = ItemBuilder(
        consumer=said.consumer,
        tenant=ask.tenant,
        window=said.window,
        lease=said.lease,
        mode="lease",
        policy=Policy(value_bytes_max=limits.value_bytes_max),
    )
    mode = await ask.service.mode(ask.caller, ask.tenant, said.consumer)
    runtime = ask.service.runtime
    await ask.service.moves.refresh()
    if any(each.journal is not None for each in said.claims) and not runtime.store.capabilities.durable:
        raise HttpProblem(422, "misused", "a journal needs a store that outlives its process")
    claims = [_claim(plan, runtime.windows, each, quarantine=mode == "quarantine") for each in said.claims]
    answers = await ask.service.carry_out(ask.caller, claims)
    check_any_done(answers)
    base_us = plan.window_us({}, "")

    def show() -> Response:
        shown = cache(readable)  # equal values are decoded once
        pairs = zip(claims, answers, strict=True)
        return answer(ClaimOutcomes([_outcome(*pair, base_us, shown) for pair in pairs]))

    return await beside_loop(show, sum(map(answer_bytes, answers)), ask.service)


def _claim(plan: ItemBuilder, stored: Any, each: ClaimAsked, *, quarantine: bool) -> Claim:
    made = plan.claim(
        stored,
        each.key,
        None if each.fingerprint is None else each.fingerprint.encode(),
        event_type=each.event_type,
        event_time_us=time_us(each.event_time),
        journal=each.journal,
    )
    owner = made.owner if each.owner is None else bytes.fromhex(each.owner)
    return replace(made, owner=owner, quarantine=quarantine)


def _outcome(
    claim: Claim, found: Answer, window_us: int, shown: Callable[[bytes | None], tuple[Any, str]]
) -> ClaimOutcome:
    key = claim.id[2]
    match found:
        case Granted():
            held = ClaimHandle(
                claim.id[1], key, claim.owner, found.fence, claim.lease_us, window_us, claim.event_type
            )
            return ClaimOutcome(
                key,
                "claimed",
                claim=base64.urlsafe_b64encode(_pack.encode(held)).decode(),
                fence=found.fence,
                attempt=found.attempt,
                lease_s=claim.lease_us / 1e6,
                idempotency_key=idempotency_key(claim.id),
                journal=None if found.journal is None else shown(found.journal)[0],
            )
        case Known(state="done"):
            value, form = shown(found.value)
            return ClaimOutcome(key, "done", value=value, kept=form != "not_kept", fence=found.fence)
        case Known():
            return ClaimOutcome(key, "failed", error=error_of(found.value))
        case Busy():
            return ClaimOutcome(key, "busy", retry_after_s=found.retry_after_s, recoverable=found.recoverable)
        case Mismatch():
            return ClaimOutcome(key, "mismatch", detail="the key was used before with another fingerprint")
        case Late():
            return ClaimOutcome(key, "late", age_s=found.age_s)
        case Unknown():
            return ClaimOutcome(key, "unknown", detail="the outcome of an attempt is unknown; resolve it")
        case ItemRefusal():
            after_s = found.retry_after_s or None
            return ClaimOutcome(key, "refused", detail=found.detail, retry_after_s=after_s)
        case _:
            return ClaimOutcome(
                key, "unavailable", detail="the store gave no answer; send the same claim again"
            )


async def end_many(request: Request, endings: Sequence[Ending]) -> Response:
    """Complete, fail, release or renew claims by their handles."""
    ask = authorize(request, "write")
    many(len(endings), ask.service, ask.caller)
    await ask.service.moves.refresh()
    items = [_item(ask, each) for each in endings]
    answers = await ask.service.carry_out(ask.caller, items)
    check_any_done(answers)
    return answer(SettleReplies([_verdict(*pair) for pair in zip(items, answers, strict=True)]))


def _item(ask: Asked, ending: Ending) -> Item:
    held = _claim_handle(ending.claim)
    place = (ask.tenant, held.consumer, held.key)
    if isinstance(ending, Renewing):
        return Renew(place, held.owner, held.fence, held.lease_us)
    window_us = resolve(
        ask.service.runtime.windows, ask.tenant, held.consumer, held.event_type, held.window_us
    )

    def settle(to: Any, value: bytes | None = None, **more: Any) -> Settle:
        return Settle(
            place, held.owner, held.fence, to, value, window_us=window_us, lease_us=held.lease_us, **more
        )

    match ending:
        case Completing():
            return settle("done", _value(ending.value, ask.service.settings.limits.value_bytes_max))
        case Failing():
            return settle("failed", encode([ending.kind or FAILURE, ending.error]), error=_error(ending))
        case Releasing():
            return settle(
                "released",
                delay_us=round(ending.delay_s * 1e6),
                count_attempt=ending.count_attempt,
                error=_error(ending) if ending.error or ending.kind else None,
            )


def _error(ending: Failing | Releasing) -> ErrorInfo:
    return ErrorInfo(ending.kind or FAILURE, ending.error, ending.traceback, ending.worker)


def _value(value: Any, bytes_max: int) -> bytes | None:
    """Encode a value. The effect has happened, so a value that cannot be stored must not prevent the completion."""
    try:
        return encode(value, None, bytes_max)
    except ValueInvalid:
        return None


def _claim_handle(text: str) -> ClaimHandle:
    try:
        return _handle.decode(base64.urlsafe_b64decode(text))
    except (binascii.Error, msgspec.MsgspecError, ValueError) as error:
        raise HttpProblem(422, "invalid", "the handle is not one of this server") from error


def _verdict(item: Item, found: Answer) -> SettleReply:
    match found:
        case Completed():
            kept = found.kept and not (isinstance(item, Settle) and item.to == "done" and item.value is None)
            return SettleReply("completed", already=found.already, recreated=found.recreated, kept=kept)
        case Renewed():
            return SettleReply("renewed", lease_s=item.lease_us / 1e6 if isinstance(item, Renew) else None)
        case Lost():
            return SettleReply("lost", detail="another attempt took over; nothing was overwritten")
        case ItemRefusal():
            after_s = found.retry_after_s or None
            return SettleReply("refused", detail=found.detail, retry_after_s=after_s)
        case Unavailable() | _:
            return SettleReply("unavailable", detail="the store gave no answer; send the same again")
