"""The app's configuration: its name, and its checks."""

from django.apps import AppConfig  # type: ignore[import-untyped]


class SemelConfig(AppConfig):  # type: ignore[misc]
    """`semel.integrations.django` in `INSTALLED_APPS`."""

    name = "semel.integrations.django"
    label = "semel"
    verbose_name = "semel"
    default = True

    def ready(self) -> None:
        """Register the checks of `manage.py check`."""
        from semel.integrations.django import checks

        checks.register()
