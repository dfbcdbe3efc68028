"""Sources that workers were seen with: whose dead letters can be read, and whose address the service lacks."""

from collections.abc import Iterable, Sequence
from urllib.parse import parse_qsl, urlencode, urlunsplit

from semel.brokers import source_for
from semel.errors import SemelError
from semel.observe.workers import SeenWorker
from semel.runtime.urls import parse_url

__all__ = ["sort_sources"]

HIDDEN = "***"
"""What heartbeats have in place of a secret."""
LOOKS_HIDE = ("sqs",)
"""Schemes that are only read if the service was told to: each look hides their letters from others for a while."""
SOURCES_MAX = 50
"""The most sources whose dead letters are read."""


def sort_sources(
    workers: Iterable[SeenWorker], listed: Sequence[str], store: str
) -> tuple[list[str], list[str]]:
    """Return the sources of workers that are not among the listed ones: URLs that can be read, and others.

    One can be read if the service has the address of its server, with a password if that needs one: from a listed
    source, or from the store.
    """
    known = {_place(url) for url in listed}
    found: list[str] = []
    missing: list[str] = []
    for seen in dict.fromkeys(url for worker in workers for url in worker.urls):
        try:
            place = _place(seen)
            url = None if place in known else _with_secrets(seen, (*listed, store))
        except SemelError:  # of another version, or its driver is not installed here
            place, url = (seen, ""), None
        if place in known:
            continue
        known.add(place)
        if url is not None and len(listed) + len(found) < SOURCES_MAX:
            found.append(url)
        else:
            missing.append(seen)
    return found, missing


def _place(url: str) -> tuple[str, str]:
    """Return what two URLs of the same queue, topic or stream share."""
    return source_for(url).name, parse_url(url).path.strip("/")


def _with_secrets(seen: str, given: Iterable[str]) -> str | None:
    """Return the URL with the credentials of a given one of the same server; `None` if there is none."""
    parts = parse_url(seen)
    if parts.scheme in LOOKS_HIDE:
        return None
    for url in given:
        own = parse_url(url)
        if (own.scheme, _server(own.netloc)) != (parts.scheme, _server(parts.netloc)):
            continue
        secrets = dict(parse_qsl(own.query))
        options = [
            (name, secrets.get(name, HIDDEN) if text == HIDDEN else text)
            for name, text in parse_qsl(parts.query, keep_blank_values=True)
        ]
        if all(text != HIDDEN for _, text in options):
            return urlunsplit(parts._replace(netloc=own.netloc, query=urlencode(options)))
    return None


def _server(netloc: str) -> str:
    return netloc.rpartition("@")[2].lower()
