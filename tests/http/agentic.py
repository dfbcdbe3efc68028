"""What a server of the Agentic Commerce Protocol answers, asked in every framework."""

from collections.abc import Callable
from typing import Any

Post = Callable[[str, Any, str | None], tuple[int, dict[str, str], Any]]
"""Path, raw JSON and key to status, headers (lower case) and document."""


def check(post: Post, ran: list[str]) -> None:
    """Ask an endpoint `/checkouts/<id>`, which notes the id and answers 201 with how often it ran."""
    status, _, error = post("/checkouts/a", b"{}", None)
    assert (status, error["type"], error["code"]) == (400, "invalid_request", "idempotency_key_required")
    assert error["message"]
    status, headers, first = post("/checkouts/a", b'{"items": [1, 2], "tip": 1.0}', "k1")
    assert (status, first, "idempotent-replayed" in headers) == (201, {"ran": 1}, False)
    status, headers, again = post("/checkouts/a", b'{"tip":1,"items":[1,2]}', "k1")  # the same JSON
    assert (status, again, headers["idempotent-replayed"]) == (201, first, "true")
    status, headers, error = post("/checkouts/a", b'{"tip": 1, "items": [2, 1]}', "k1")
    assert (status, error["code"]) == (422, "idempotency_conflict")
    assert headers["content-type"] == "application/json"
    assert post("/checkouts/b", b"{}", "k1")[2] == {"ran": 2}  # another path: another key
    assert ran == ["a", "b"]
