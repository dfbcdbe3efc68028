"""Signals that end a command as Ctrl-C does, so that it leaves nothing behind."""

import signal

__all__ = ["ending_on_signals"]


class ending_on_signals:  # noqa: N801 - reads as what it does: with ending_on_signals()
    """SIGTERM and SIGHUP raise `SystemExit`, unless they are ignored."""

    def __enter__(self) -> None:
        def end(number: int, _frame: object) -> None:
            raise SystemExit(128 + number)

        heeded = [
            number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) != signal.SIG_IGN
        ]
        self._before = {number: signal.signal(number, end) for number in heeded}

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
