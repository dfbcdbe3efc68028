"""Messages as CloudEvents: the types of the `cloudevents` package, in binary and structured mode, of every binding.

The package makes up an id and a time where none came; what is made here has what was sent, or is refused. Imported
only for a handler that is annotated with a type of that package: nobody else needs the extra.
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
"""What the package raises for attributes that are wrong, JSON that is no object, and times beyond any calendar."""
_format = JSONFormat()


def reads(wanted: type) -> Callable[[Arrival], Any]:
    """What turns a message into the kind of event that is wanted. It raises `ValueError` for one that is none."""
    if BaseCloudEvent not in wanted.__mro__:
        raise UsageError(
            f"{wanted.__module__}.{wanted.__qualname__} is of the package's old interface; annotate the handler"
            " with cloudevents.core.v1.event.CloudEvent"
        )

    def made(attributes: dict[str, Any], data: Any) -> Any:
        """An event of what was sent, and of nothing else."""
        missing = [name for name in _REQUIRED if not attributes.get(name)]
        if missing:
            raise ValueError(f"it has no {' and no '.join(missing)}")
        # The protocol stands for whichever version came.
        kind: Any = get_event_factory_for_version(attributes["specversion"]) if abstract else wanted
        timeless = "time" not in attributes
        event = kind(attributes, data)
        if timeless:
            del event.get_attributes()["time"]
        return event

    def read(arrival: Arrival) -> Any:
        try:
            return _event(arrival, made)
        except _NO_EVENT as error:
            raise ValueError(str(error)) from error

    abstract = wanted is BaseCloudEvent
    return read


def _event(arrival: Arrival, made: Callable[[dict[str, Any], Any], Any]) -> Any:
    headers = arrival.by_name
    content_type = next((found for name in _CONTENT_TYPES if (found := headers.get(name))), None)
    attributes: dict[str, Any] = dict(attributes_of(headers))
    if not attributes or _STRUCTURED.match(content_type or ""):
        return _format.read(made, arrival.body)
    if content_type is not None:
        attributes.setdefault("datacontenttype", content_type)
    if "time" in attributes:
        attributes["time"] = instant(attributes["time"])
    return made(attributes, _format.read_data(arrival.body, attributes.get("datacontenttype")))
