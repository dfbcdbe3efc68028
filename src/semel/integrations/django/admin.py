"""The records in Django's admin: a list to look at, without any way to change one."""

from datetime import UTC, datetime
from itertools import islice
from typing import TYPE_CHECKING, Any, get_args

from django.contrib import admin  # type: ignore[import-untyped]
from django.core.exceptions import PermissionDenied  # type: ignore[import-untyped]
from django.template.response import TemplateResponse  # type: ignore[import-untyped]

from semel.errors import SemelError
from semel.integrations.django.client import client
from semel.integrations.django.models import DjangoRecord
from semel.types import Record, State

if TYPE_CHECKING:

    class ModelAdmin:
        """Django has no types; these are the parts that are used here."""

        model: Any
        opts: Any
        admin_site: Any

        def has_view_permission(self, request: Any) -> bool:
            """Whether the user may look."""
            ...

else:
    ModelAdmin = admin.ModelAdmin

__all__ = ["RecordAdmin"]

SHOWN_MAX = 200
"""How many records one page shows; the search narrows it."""


class RecordAdmin(ModelAdmin):
    """Lists records by state and by the beginning of their key. Values and payloads are not shown."""

    def has_add_permission(self, request: Any) -> bool:  # noqa: ARG002 - Django's signature
        """No."""
        return False

    def has_change_permission(self, request: Any, obj: Any = None) -> bool:  # noqa: ARG002
        """No."""
        return False

    def has_delete_permission(self, request: Any, obj: Any = None) -> bool:  # noqa: ARG002
        """No."""
        return False

    def get_queryset(self, request: Any) -> Any:  # noqa: ARG002
        """Return nothing: there is no table, so there is no page for one record."""
        return self.model.objects.none()

    def changelist_view(self, request: Any, extra_context: Any = None) -> Any:
        """Show the list. A store that does not answer is a message on the page, not an error."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        states = get_args(State)
        state, prefix = request.GET.get("state", ""), request.GET.get("prefix", "")
        rows: list[dict[str, Any]] = []
        problem = ""
        try:
            found = client().records.list(state=state if state in states else None, prefix=prefix)
            rows = [_row(each) for each in islice(found, SHOWN_MAX + 1)]
        except SemelError as error:
            problem = str(error)
        context = {
            **self.admin_site.each_context(request),
            "title": "Records",
            "opts": self.opts,
            "rows": rows[:SHOWN_MAX],
            "more": len(rows) > SHOWN_MAX,
            "problem": problem,
            "states": states,
            "state": state,
            "prefix": prefix,
            **(extra_context or {}),
        }
        request.current_app = self.admin_site.name
        return TemplateResponse(request, "semel/admin_records.html", context)


def _row(record: Record) -> dict[str, Any]:
    return {
        "key": record.id[-1],
        "state": record.state,
        "attempt": record.attempt,
        "first_seen": _time(record.first_seen_us),
        "settled_at": _time(record.settled_at_us),
        "error": f"{record.errors[-1].kind}: {record.errors[-1].message}" if record.errors else "",
    }


def _time(us: int) -> datetime | None:
    return datetime.fromtimestamp(us / 1e6, UTC) if us else None


admin.site.register(DjangoRecord, RecordAdmin)
