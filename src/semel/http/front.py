"""What the middlewares of both kinds have in common: a client prepared by the rules, and what it remembers."""

from operator import attrgetter
from typing import Generic, TypeVar

from semel.aclient import AsyncSemel
from semel.client import Semel
from semel.http.rules import MAX_AGE, Rules, keeps_errors, prepared, window_s_of

__all__ = ["Front"]

C = TypeVar("C", Semel, AsyncSemel)


class Front(Generic[C]):
    """The client behind a middleware; an exchange's `payload` is what its requests are told apart by."""

    def __init__(self, client: C, rules: Rules | None) -> None:
        self.rules: Rules = rules or Rules()
        self.client: C = prepared(client, self.rules, attrgetter("payload"))
        self.keeps_errors: bool = keeps_errors(self.client, self.rules)
        self._methods = frozenset(self.rules.methods)

    def max_age(self) -> tuple[bytes, bytes]:
        """The header that says how long keys are remembered."""
        return MAX_AGE, b"%d" % window_s_of(self.client)
