"""A model without a table: the place of the records in the admin, and its permission, `semel.view_djangorecord`."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    Model = object  # Django has no types
else:
    from django.db.models import Model

__all__ = ["DjangoRecord"]


class DjangoRecord(Model):
    """The records of the consumer in `SEMEL`; they are in semel's store, and nothing is read through this model."""

    class Meta:
        """No table, and only the permission to look."""

        managed: bool = False
        app_label: str = "semel"
        default_permissions: tuple[str, ...] = ("view",)
        verbose_name: str = "record"
        verbose_name_plural: str = "records"

    def __str__(self) -> str:
        """Return its name; there are no instances."""
        return "record"
