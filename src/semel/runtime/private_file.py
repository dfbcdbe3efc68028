"""Create database files for their owner alone: they hold keys, values and payloads."""

import os
import stat

__all__ = ["create_private"]


def create_private(path: str | os.PathLike[str]) -> bool:
    """Create the file for its owner alone, if there is none; SQLite gives its log the same mode. Returns if it did.

    The file is created without being opened: closing it here would drop the locks that another thread just took on it.
    """
    try:
        os.mknod(path, stat.S_IFREG | 0o600)
    except OSError:  # the file exists, or SQLite will report the error
        return False
    return True
