"""How often a message has failed, where no record counts it."""

from collections import OrderedDict

__all__ = ["FailureCounts"]

KEYS_MAX = 10_000
"""How many failing messages are remembered; the longest forgotten one begins anew."""


class FailureCounts:
    """Failures by key: the broker's count where it gives one, or what was seen in this process, whichever is more."""

    def __init__(self) -> None:
        self._failures: OrderedDict[str, int] = OrderedDict()

    def failed(self, key: str, deliveries: int) -> int:
        """Another failure; returns which attempt it was."""
        attempt = max(self.attempts(key) + 1, deliveries)
        self.note(key, attempt)
        return attempt

    def note(self, key: str, attempt: int) -> None:
        """Remember that this attempt failed."""
        self._failures.pop(key, None)
        self._failures[key] = attempt
        if len(self._failures) > KEYS_MAX:
            self._failures.popitem(last=False)

    def attempts(self, key: str) -> int:
        """How many attempts failed, as far as is known here."""
        return self._failures.get(key, 0)

    def __contains__(self, key: str) -> bool:
        return key in self._failures

    def forget(self, key: str) -> None:
        """It is dealt with."""
        self._failures.pop(key, None)
