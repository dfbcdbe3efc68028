"""Read the setting that says what is kept of the errors of attempts."""

from typing import Any

from semel.errors import PolicyInvalid
from semel.runtime.process import load_object

__all__ = ["read_error_settings"]


def read_error_settings(text: str) -> dict[str, Any]:
    """Return the arguments of a `Policy` for `keep`, `none`, or the `module:function` that redacts errors.

    Raises `PolicyInvalid` for anything else.
    """
    if text == "keep":
        return {}
    if text == "none":
        return {"keep_errors": False}
    if ":" not in text:
        raise PolicyInvalid(
            f"errors is {text!r}; it must be keep, none, or the function that redacts them: app:hide"
        )
    return {"redact_error": load_object(text)}
