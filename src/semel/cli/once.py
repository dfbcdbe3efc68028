"""`semel once`: run a command once for a key; a duplicate gets its exit code and output again."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from semel.cli.options import (
    ConsumerOption,
    LeaseOption,
    StoreOption,
    TenantOption,
    WindowOption,
    client_options,
    ending_on_signals,
    parse_bytes,
    parse_duration_us,
    settings_for,
    size_text,
)
from semel.cli.output import DUPLICATE, FAILED, TRY_LATER, UNAVAILABLE, USAGE, CommandExit, say

if TYPE_CHECKING:
    from semel.cli.child_process import ProcessResult
    from semel.types import Outcome

__all__ = ["once"]

OUTPUT_BYTES_MAX = 480 * 1024
"""Limit of each output: both together must fit into the largest value that a store keeps."""
ATTEMPTS_MAX = 1_000_000
"""A failed command may run again any number of times."""


class CommandFailed(Exception):
    """The command exited with a code other than 0, or was stopped: it may run again."""

    def __init__(self, code: int) -> None:
        super().__init__(f"exit code {code}")
        self.code = code


class Stopped(BaseException):
    """A signal came while no command was running."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.code: int = 128 + number


def once(  # noqa: PLR0913, PLR0917 - one parameter for each option
    command: Annotated[
        list[str],
        typer.Argument(
            metavar="COMMAND",
            help="The command with its arguments; -- may precede it.",
        ),
    ],
    key: Annotated[
        str, typer.Option("--key", "-k", metavar="KEY", help="Runs with the same key count as one.")
    ],
    store: StoreOption = None,
    consumer: ConsumerOption = None,
    tenant: TenantOption = None,
    window: WindowOption = None,
    lease: LeaseOption = None,
    wait: Annotated[
        str, typer.Option("--wait", metavar="DURATION", help="How long to wait for a run that is in flight.")
    ] = "0s",
    run_max: Annotated[
        str,
        typer.Option("--run-max", metavar="DURATION", help="Stop renewing the claim after this time."),
    ] = "12h",
    output_max: Annotated[
        str,
        typer.Option("--output-max", metavar="SIZE", help="How much of stdout and of stderr is kept, each."),
    ] = "64KiB",
    keep_failures: Annotated[  # noqa: FBT002 - a switch
        bool, typer.Option("--keep-failures", help="Remember a failed run too, instead of running it again.")
    ] = False,
    no_replay: Annotated[  # noqa: FBT002 - a switch
        bool,
        typer.Option(
            "--no-replay", help="A duplicate exits with 3 and does not print the output of the first run."
        ),
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Do not report a replay on stderr.")] = False,  # noqa: FBT002
) -> int:
    """Run a command once for a key. Exits with the command's own code, first or replayed.

    While it runs elsewhere: 75. A command that fails is released and runs again, unless --keep-failures. If this
    process dies the command dies with it, and the key is free again when the lease is over.
    """
    import semel

    output_bytes_max = parse_bytes(output_max, "--output-max")
    if output_bytes_max > OUTPUT_BYTES_MAX:
        raise CommandExit(f"--output-max is at most {size_text(OUTPUT_BYTES_MAX)}", USAGE)
    settings = settings_for(store=store, consumer=consumer, tenant=tenant, window=window, lease=lease)
    policy = semel.Policy(
        wait_s=parse_duration_us(wait, "--wait") / 1e6,
        run_max_s=parse_duration_us(run_max, "--run-max") / 1e6,
        max_attempts=ATTEMPTS_MAX,
        value_bytes_max=1024 * 1024,
    )
    client = semel.open(settings.store, policy=policy, **client_options(settings, "once"))
    run = CommandRun(command, output_bytes_max, keep_failures=keep_failures)
    try:
        with ending_on_signals(Stopped), client:
            outcome = client.run(key, run)
    except Stopped as stopped:
        return stopped.code
    return OnceResult(key, no_replay=no_replay, say=None if quiet else say).code(outcome, run.ended)


class CommandRun:
    """The handler: runs the command, and returns its exit code and captured output."""

    def __init__(self, command: list[str], output_bytes_max: int, *, keep_failures: bool) -> None:
        self._command = command
        self._output_bytes_max = output_bytes_max
        self._keep_failures = keep_failures
        self.ended: ProcessResult | None = None

    def __call__(self) -> dict[str, Any]:
        """Run the command. Raises `CommandFailed` if it may run again."""
        import semel
        from semel.cli.child_process import Child

        current = semel.current()
        child = Child(self._command, output_bytes_max=self._output_bytes_max, lost=lambda: current.lost)
        self.ended = ended = child.run()
        if ended.signalled:
            raise CommandFailed(128 + ended.signalled)
        if ended.lost or (ended.code and not self._keep_failures):
            raise CommandFailed(ended.code)
        return {
            "code": ended.code,
            "stdout": ended.stdout.data,
            "stderr": ended.stderr.data,
            "cut": [name for name in ("stdout", "stderr") if getattr(ended, name).cut],
        }


class OnceResult:
    """Turns an outcome into an exit code, and prints the first run's output for a replay."""

    def __init__(self, key: str, *, no_replay: bool, say: Callable[[str], None] | None) -> None:
        self._key = key
        self._no_replay = no_replay
        self._say = say or (lambda _: None)

    def code(self, outcome: "Outcome[Any]", ended: "ProcessResult | None") -> int:
        """Return the exit code. Raises `CommandExit` with a message for other outcomes."""
        from semel.types import Busy, Done, Errored, Failed, Lost, Unavailable

        match outcome:
            case Done(value, replayed=True, kept=kept):
                return self._replay(value if kept else None)
            case Done(value, recorded=recorded):
                if not recorded:
                    raise CommandExit(
                        f"{self._key}: the command ran (exit code {value['code']}), but the store could not be reached;"
                        " it may run again",
                        UNAVAILABLE,
                    )
                code: int = value["code"]
                return code
            case Busy(retry_after_s):
                raise CommandExit(
                    f"{self._key} is in flight; its lease ends in {retry_after_s:.1f} s", TRY_LATER
                )
            case _ if ended is not None and ended.lost:
                raise CommandExit(
                    f"{self._key}: the claim was lost, so the command was terminated", TRY_LATER
                )
            case Lost():
                raise CommandExit(
                    f"{self._key}: the command ran, but another run took the key over", TRY_LATER
                )
            case Errored(CommandFailed() as failed):
                return failed.code
            case Errored(error) | Failed(error):
                raise CommandExit(f"{self._key}: {error}", FAILED)
            case Unavailable(error):
                raise CommandExit(str(error), UNAVAILABLE)
            case _:
                raise CommandExit(f"{self._key}: {outcome}", FAILED)

    def _replay(self, value: dict[str, Any] | None) -> int:
        import sys

        if self._no_replay:
            self._say(f"semel: {self._key} was done before")
            return DUPLICATE
        if value is None:
            self._say(f"semel: replayed {self._key}; its output was not kept")
            return 0
        self._say(f"semel: replayed {self._key}; it ran before and ended with {value['code']}")
        for stream, name in ((sys.stdout, "stdout"), (sys.stderr, "stderr")):
            stream.flush()
            stream.buffer.write(value[name])
            stream.buffer.flush()
            if name in value["cut"]:
                self._say(f"semel: only the first {size_text(len(value[name]))} of its {name} were kept")
        code: int = value["code"]
        return code
