"""The app's configuration: its name, and its checks."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    AppConfig = object  # Django has no types
else:
    from django.apps import AppConfig


class SemelConfig(AppConfig):
    """`semel.integrations.django` in `INSTALLED_APPS`."""

    name: str = "semel.integrations.django"
    label: str = "semel"
    verbose_name: str = "semel"
    default: bool = True

    def ready(self) -> None:
        """Register the checks of `manage.py check`."""
        from semel.integrations.django import checks

        checks.register()
