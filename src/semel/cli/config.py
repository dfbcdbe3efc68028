"""`semel config`: the settings in force, and where each came from."""

from semel.cli.help import App
from semel.cli.options import (
    ConsumerOption,
    JsonOption,
    LeaseOption,
    ModeOption,
    StoreOption,
    TenantOption,
    WindowOption,
    serve_options,
    settings_for,
)
from semel.cli.output import print_json, print_rows, redacted

__all__ = ["config"]

config: App = App()


@config.callback()
def _config() -> None:
    """Look at the settings."""


@config.command("show")
def show_config(
    store: StoreOption = None,
    consumer: ConsumerOption = None,
    tenant: TenantOption = None,
    window: WindowOption = None,
    lease: LeaseOption = None,
    mode: ModeOption = None,
    *,
    as_json: JsonOption = False,
) -> None:
    """Show every setting with its value and its origin; passwords in URLs are hidden.

    The first that has a value wins: flag, SEMEL_* variable, file named by a SEMEL_*_FILE variable, semel.toml, default.
    """
    settings = settings_for(
        store=store, consumer=consumer, tenant=tenant, window=window, lease=lease, mode=mode
    )
    shown = {
        begin + name: (redacted(value) if isinstance(value, str) else value, found.origin(name))
        for begin, found in (("", settings), ("serve.", serve_options()))
        for name, value in found.model_dump().items()
    }
    if as_json:
        print_json({name: {"value": value, "origin": origin} for name, (value, origin) in shown.items()})
        return
    rows = [(name, "" if value is None else str(value), origin) for name, (value, origin) in shown.items()]
    print_rows(("SETTING", "VALUE", "FROM"), rows)
