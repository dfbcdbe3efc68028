"""The hooks of a command that runs handlers: metrics over HTTP, figures for the dashboard, hooks of `semel.toml`."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer
from msgspec import Struct, field

from semel.cli.options import load_handler, text
from semel.cli.output import BAD_CONFIGURATION, USAGE, CommandExit, say
from semel.errors import SemelError
from semel.observe.limited_log import TakeoverLog

__all__ = ["NO_ROLLUPS", "MetricsOption", "Observing", "observing", "serve_metrics"]

if TYPE_CHECKING:
    from semel.cli.settings import CliSettings
    from semel.observe.prometheus import PrometheusHook
    from semel.observe.rollups import RollupHook

MetricsOption = Annotated[
    str | None,
    typer.Option(
        "--metrics",
        metavar="[HOST]:PORT",
        callback=text,
        help="Serve Prometheus metrics at /metrics; without a host, on loopback only.",
    ),
]
NO_ROLLUPS = ("memory:", "http:", "https:")
"""Stores without figures of this process: nobody else reads a memory, and a service counts its callers itself."""


class Observing(Struct):
    """The hooks of one command."""

    hooks: list[Callable[[Any], object]] = field(default_factory=list[Callable[[Any], object]])
    metrics: "PrometheusHook | None" = None
    """The hook whose metrics are served, if any are."""
    rollups: "RollupHook | None" = None
    """The hook that writes the dashboard's figures and heartbeats, if one does."""

    def name_sources(self, urls: Sequence[str]) -> None:
        """Name the sources in the heartbeats, without passwords: the dashboard can then find their dead letters."""
        if self.rollups is not None:
            self.rollups.name_sources(urls)


@contextmanager
def observing(settings: "CliSettings", metrics: str | None, *, adopts: bool = False) -> Iterator[Observing]:
    """Yield the hooks of a command; at the end, write the rest of the figures and stop serving metrics.

    `adopts`: the tables may stand beside an application's own.
    """
    made = Observing()
    closing: list[Callable[[], object]] = []
    if metrics is not None:
        made.metrics, close = serve_metrics(metrics)
        made.hooks.append(made.metrics)
        closing.append(close)
    made.hooks += [TakeoverLog(), *_named_hooks(settings.hooks)]
    if settings.rollups and not settings.store.startswith(NO_ROLLUPS):
        from semel.observe.rollups import RollupHook
        from semel.stores.registry import store_for

        store = store_for(settings.store)
        if adopts and hasattr(store, "adopt"):
            store.adopt()
        made.rollups = rollups = RollupHook(store, owned=True)
        made.hooks.append(rollups)
        closing.append(rollups.close)
    try:
        yield made
    finally:
        for close in closing:
            close()


def _named_hooks(named: str | list[str]) -> list[Callable[[Any], object]]:
    """Load the hooks that the settings name; a class is called without arguments."""
    specs = named.split(",") if isinstance(named, str) else named
    hooks: list[Callable[[Any], object]] = []
    for spec in (each.strip() for each in specs):
        if not spec:
            continue
        try:
            found = load_handler(spec)
            hook = found() if isinstance(found, type) else found
        except SemelError as error:
            raise CommandExit(f"hooks: {error}", BAD_CONFIGURATION) from error
        if not callable(hook):
            raise CommandExit(
                f"hooks: {spec} is no hook; a hook is called with each event", BAD_CONFIGURATION
            )
        hooks.append(hook)
    return hooks


def serve_metrics(address: str) -> "tuple[PrometheusHook, Callable[[], object]]":
    """Serve metrics. Returns their hook, and a function that stops serving."""
    host, _, port = address.rpartition(":")
    if not port.isdecimal() or int(port) >= 2**16:
        raise CommandExit(
            f"{address!r} is not an address; write --metrics :9108, or --metrics 0.0.0.0:9108", USAGE
        )
    try:
        from semel.observe.prometheus import PrometheusHook
    except ImportError as error:
        raise CommandExit(str(error), BAD_CONFIGURATION) from None
    from prometheus_client import CollectorRegistry, start_http_server

    registry = CollectorRegistry()
    hook = PrometheusHook(registry)
    try:
        served, thread = start_http_server(int(port), host.strip("[]") or "127.0.0.1", registry)
    except OSError as error:
        raise CommandExit(f"--metrics {address}: {error}", BAD_CONFIGURATION) from None
    say(f"Metrics at port {served.server_port}.")

    def close() -> None:
        served.shutdown()
        served.server_close()
        thread.join()

    return hook, close
