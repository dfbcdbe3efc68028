"""The Idempotency-Key middleware as Django middleware: it knows the user, and works for Django REST Framework."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from django.http import HttpResponse  # type: ignore[import-untyped]
from django.urls import Resolver404, resolve  # type: ignore[import-untyped]

from semel.client.client import Semel
from semel.errors import StoreClosed, StoreUnavailable
from semel.http.responses import Reply
from semel.http.rules import (
    Front,
    RequestRefused,
    Rules,
    answer,
    caller_unknown,
    digest_of_credentials,
    is_stranger,
    key_in,
    record_key,
    too_large,
    verdict,
)
from semel.integrations.django.client import client, settings_of
from semel.types import Outcome, Unavailable

__all__ = ["IdempotencyMiddleware", "caller_of"]


def caller_of(request: Any) -> str | None:
    """Return the caller: the user that Django knows, else a digest of `Authorization`; `None` without either."""
    user = getattr(request, "user", None)
    if user is not None and user.is_authenticated:
        return f"user-{user.pk}"
    return digest_of_credentials(request.headers.get("Authorization", "").encode("latin-1", "replace"))


class IdempotencyMiddleware(Front[Semel]):
    """Run a request once for its Idempotency-Key; a retry gets the first one's response.

    Derive from it to set `rules`, or to answer `caller` in another way. With `ATOMIC_REQUESTS` the view's transaction
    is committed before the record is completed. A streamed response is not kept.
    """

    def __init__(self, get_response: Callable[[Any], Any]) -> None:
        chosen = settings_of()
        super().__init__(client(), Rules(required=chosen["REQUIRED"], preset=chosen["PRESET"]))
        self.get_response: Callable[[Any], Any] = get_response

    def caller(self, request: Any) -> str | None:
        """Return the name of the caller; `None`: the request is refused with 401."""
        return caller_of(request)

    def __call__(self, request: Any) -> Any:
        """Guard a request, or pass it on."""
        field = request.headers.get("Idempotency-Key")
        if request.method not in self._methods or (field is None and not self.rules.required):
            return self.get_response(request)
        try:
            key = key_in(self.rules, [] if field is None else [field.encode("latin-1", "replace")])
            assert key is not None
            if (whose := self.caller(request)) is None:
                raise caller_unknown(self.rules)
            if int(request.META.get("CONTENT_LENGTH") or 0) > self.rules.request_bytes_max:
                raise too_large(self.rules)
        except RequestRefused as refusal:
            return _response(refusal.reply)
        exchange = DjangoExchange(self, request)
        return self._guard(exchange, record_key(request.method, self._route(request), whose, key))

    def _route(self, request: Any) -> str:
        """Return the pattern of the request's path, such as `orders/<int:id>`; the path itself if none fits."""
        if not self.rules.keeping.by_path:
            with suppress(Resolver404):
                return str(resolve(request.path_info).route)
        return str(request.path_info)

    def _guard(self, exchange: "DjangoExchange", key: str) -> Any:
        try:
            outcome: Outcome[Any] = self.client.run(key, _serve, exchange)
            if is_stranger(outcome):
                with suppress(StoreUnavailable):  # it expires with its window
                    self.client.records.forget(key, state="claimed")
        except (StoreUnavailable, StoreClosed) as error:
            outcome = Unavailable(error)
        if type(outcome) is Unavailable and self.rules.fail_open:
            return self.get_response(exchange.request)
        reply = answer(self.rules, outcome, exchange.own)
        if reply is exchange.own:
            name, value = self.max_age()
            exchange.response[name.decode()] = value.decode()
            return exchange.response
        return _response(Reply(reply.status, [*reply.headers, self.max_age()], reply.body))


class DjangoExchange:
    """One keyed request and its response."""

    def __init__(self, middleware: IdempotencyMiddleware, request: Any) -> None:
        self.request: Any = request
        path, query = request.path.encode(), request.META.get("QUERY_STRING", "").encode()
        self.payload: bytes = middleware.rules.payload(path, query, request.body)
        self.response: Any = None
        self.own: Reply | None = None
        self._middleware = middleware

    def run(self) -> Any:
        """Call the view; returns the value for the record."""
        rules = self._middleware.rules
        self.response = response = self._middleware.get_response(self.request)
        headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in response.items()]
        long = response.streaming or len(response.content) > rules.response_bytes_max
        self.own = Reply(response.status_code, headers, b"" if response.streaming else response.content)
        return verdict(rules, response.status_code, None if long else self.own)


def _serve(exchange: DjangoExchange) -> Any:
    return exchange.run()


def _response(reply: Reply) -> Any:
    response = HttpResponse(reply.body, status=reply.status)
    del response["Content-Type"]
    for name, value in reply.headers:
        response[name.decode("latin-1")] = value.decode("latin-1")
    return response
