"""Keys: what makes two deliveries the same event.

The producer chooses the key, once per event; the consumer finds it and never invents one.

Making keys: `uuid4`, `uuid7` (minted once, stored with the intent), `of` (follows from the event's own parts).
Reading them: `path`, `header`, `body`, `cloudevent`; by explicit choice only, `content` and `sliding`.
Finding them: `find` and `Identity` look in every place where producers put them, in one order.
Limits: `check`, `check_consumer`.
"""

from semel.keys.canonical import dumps as canonical_json
from semel.keys.extract import (
    Body,
    Content,
    Extractor,
    Header,
    KeySpec,
    Path,
    body,
    content,
    extractor,
    header,
    path,
)
from semel.keys.identity import CloudEvent, FoundKey, Identity, Origin, cloudevent, find
from semel.keys.limits import (
    CONSUMER_BYTES_MAX,
    KEY_BYTES_MAX,
    NAMESPACE_BYTES_MAX,
    check,
    check_consumer,
    check_namespace,
)
from semel.keys.message import Envelope, Headers, Incoming
from semel.keys.schemes import of, uuid4, uuid7
from semel.keys.sliding import EventTime, Sliding, sliding

__all__ = [
    "CONSUMER_BYTES_MAX",
    "KEY_BYTES_MAX",
    "NAMESPACE_BYTES_MAX",
    "Body",
    "CloudEvent",
    "Content",
    "Envelope",
    "EventTime",
    "Extractor",
    "FoundKey",
    "Header",
    "Headers",
    "Identity",
    "Incoming",
    "KeySpec",
    "Origin",
    "Path",
    "Sliding",
    "body",
    "canonical_json",
    "check",
    "check_consumer",
    "check_namespace",
    "cloudevent",
    "content",
    "extractor",
    "find",
    "header",
    "of",
    "path",
    "sliding",
    "uuid4",
    "uuid7",
]
