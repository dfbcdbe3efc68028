"""Messages as CloudEvents: the types of the `cloudevents` package, in binary and structured mode, of every binding.

The package invents a missing id and time; here an event without an id is refused and no time is invented. Imported
only for a handler that is annotated with a type of that package: only that needs the extra.
"""

import re
from collections.abc import Callable
from typing import Any

from cloudevents.core.base import BaseCloudEvent
from cloudevents.core.bindings.common import get_event_factory_for_version
from cloudevents.core.exceptions import BaseCloudEventException
from cloudevents.core.formats.json import JSONFormat

from semel.brokers.source import Arrival
from semel.errors import UsageError
from semel.keys.identity import attributes_of, instant

__all__ = ["reads"]

_CONTENT_TYPES = ("content-type", "content_type")
_REQUIRED = ("specversion", "id", "source", "type")
_STRUCTURED = re.compile(r"application/cloudevents\b(?!-batch)", re.IGNORECASE)
_NO_EVENT = (BaseCloudEventException, AttributeError, TypeError, OverflowError, OSError)
"""The package's errors for wrong attributes, JSON that is not an object, and impossible times."""
_format = JSONFormat()


def reads(wanted: type) -> Callable[[Arrival], Any]:
    """Return a function that decodes a message as this type of event. It raises `ValueError` for other messages."""
    if BaseCloudEvent not in wanted.__mro__:
        raise UsageError(
            f"{wanted.__module__}.{wanted.__qualname__} is of the package's old interface; annotate the handler"
            " with cloudevents.core.v1.event.CloudEvent"
        )

    def build_event(attributes: dict[str, Any], data: Any) -> Any:
        """Build an event from the sent attributes only."""
        missing = [name for name in _REQUIRED if not attributes.get(name)]
        if missing:
            raise ValueError(f"it has no {' and no '.join(missing)}")
        # The protocol class means any version.
        kind: Any = get_event_factory_for_version(attributes["specversion"]) if abstract else wanted
        timeless = "time" not in attributes
        event = kind(attributes, data)
        if timeless:
            del event.get_attributes()["time"]
        return event

    def read(arrival: Arrival) -> Any:
        try:
            return _event(arrival, build_event)
        except _NO_EVENT as error:
            raise ValueError(str(error)) from error

    abstract = wanted is BaseCloudEvent
    return read


def _event(arrival: Arrival, build: Callable[[dict[str, Any], Any], Any]) -> Any:
    headers = arrival.by_name
    content_type = next((found for name in _CONTENT_TYPES if (found := headers.get(name))), None)
    attributes: dict[str, Any] = dict(attributes_of(headers))
    if not attributes or _STRUCTURED.match(content_type or ""):
        return _format.read(build, arrival.body)
    if content_type is not None:
        attributes.setdefault("datacontenttype", content_type)
    if "time" in attributes:
        attributes["time"] = instant(attributes["time"])
    return build(attributes, _format.read_data(arrival.body, attributes.get("datacontenttype")))
