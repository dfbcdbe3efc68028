"""Check the kind of ids that a client declares against its mode and policy."""

from semel.core.ids import OPAQUE, check_kind
from semel.errors import PolicyInvalid
from semel.policy import Policy
from semel.types import Mode

__all__ = ["check_ids"]

IDS_MODES: tuple[Mode, ...] = ("lease", "observe", "mark", "inbox")
"""The modes whose consumers may declare the kind of their ids."""


def check_ids(ids: str, mode: Mode, policy: Policy) -> str:
    """Return the kind of ids as it is recorded. Raises `PolicyInvalid` if the mode or policy does not allow ids."""
    if mode not in IDS_MODES:
        raise PolicyInvalid(
            f"ids={ids!r} is for mode {', '.join(IDS_MODES)}, not {mode!r}: records of declared ids are removed with"
            " their partition, and records of this mode must not be"
        )
    if policy.refresh_on_sight:
        raise PolicyInvalid(
            f"ids={ids!r} does not go with Policy.refresh_on_sight: records of declared ids are removed with their"
            " partition, however late they were seen"
        )
    if ids == OPAQUE and mode != "mark":
        raise PolicyInvalid(
            f"ids={ids!r} is for mode 'mark', not {mode!r}: the partition of a record depends on the time in its id"
        )
    if policy.inbox_table is not None:
        raise PolicyInvalid(
            f"ids={ids!r} does not go with Policy.inbox_table: the rows of {policy.inbox_table.name} are yours to lay"
            " out and to remove"
        )
    if policy.late == "run" and mode != "mark":  # marks have no Late: they are looked up by their arrival
        raise PolicyInvalid(
            f"ids={ids!r} needs Policy(late='hold') or 'reject': an id older than the stored records, or from the"
            " future, is answered Late, because the store cannot know whether it ran"
        )
    return check_kind(ids)
