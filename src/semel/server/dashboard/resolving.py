"""Turn an operator's decision about an undecided event into a command: whether it happened, and with which value."""

import re

import msgspec

from semel.codec import encode
from semel.core.commands import Resolve, StoreSettings
from semel.server.dashboard.store_reader import DEFAULT_WINDOW_US
from semel.server.problems import HttpProblem
from semel.types import Id
from semel.windows import resolve

__all__ = ["resolve_item"]

FENCE = re.compile("[0-9]{1,16}")


def resolve_item(
    record_id: Id, fence: int, event_type: str, form: dict[str, str], settings: StoreSettings
) -> Resolve:
    """Return the command. Raises `HttpProblem` if the form has no decision, or a value that is not JSON."""
    window = resolve(settings.windows, *record_id[:2], event_type, DEFAULT_WINDOW_US)
    to = form.get("to", "")
    if to == "absent":
        return Resolve(record_id, fence, "absent", None, window)
    if to == "done":
        return Resolve(record_id, fence, "done", encode(_value(form.get("value", ""))), window)
    raise HttpProblem(422, "invalid", "choose whether it happened: done or absent")


def _value(text: str) -> object:
    """Return the value that duplicates are answered with; an empty field is null."""
    if not text.strip():
        return None
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError) as error:
        raise HttpProblem(
            422, "invalid", f"the value is not JSON ({error}); write a text in quotation marks"
        ) from None
