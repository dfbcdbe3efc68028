"""The entry point of `semel`: checks the extra `cli`, runs a command, maps errors to exit codes."""

import importlib.util
import sys
import traceback

from semel.runtime.extras import install_command

__all__ = ["main"]

NEEDED = ("typer", "rich", "pydantic_settings")
"""Modules that the extra `cli` installs."""


def main() -> int:
    """Run the command line; returns its exit code. Expected errors are one line on stderr, never a traceback."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        print(
            f"semel: the command line needs {', '.join(missing)}; install the extra: {install_command('cli')}",
            file=sys.stderr,
        )
        return 78
    from semel.cli.output import forgiving, quiet_stdout

    forgiving(sys.stdout)
    forgiving(sys.stderr)
    try:
        code = _run()
        sys.stdout.flush()
    except BrokenPipeError:  # `semel list | head -1`: the reader closed the pipe
        quiet_stdout()
        return 0
    except KeyboardInterrupt:
        return 130
    return code


def _run() -> int:
    """Run the command and return its exit code, whatever it raises."""
    import typer
    from typer.exceptions import TyperException

    from semel.cli import output
    from semel.cli.app import app
    from semel.errors import SemelError

    try:
        answer = app(standalone_mode=False, prog_name="semel")
    except output.CommandExit as stop:
        return _report_error(str(stop), stop.code)
    except SemelError as error:
        return _report_error(str(error), output.code_of(error))
    except TyperException as error:
        return _report_misuse(error)
    except typer.Abort:
        return output.INTERRUPTED
    except (BrokenPipeError, KeyboardInterrupt):
        raise
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return _report_error(f"{where}{error.strerror or error}", output.FAILED)
    except Exception as error:  # noqa: BLE001 - whatever it is, the user gets a line and not a stack
        return _report_error(
            f"unexpected {type(error).__name__}: {error}; semel --debug ... shows where", output.FAILED
        )
    return answer if isinstance(answer, int) else output.OK


def _report_error(message: str, code: int) -> int:
    from semel.cli.options import Globals
    from semel.cli.output import say
    from semel.observe.formatting import redact

    if Globals.debug:
        say(redact(traceback.format_exc()))
    say(redact(f"semel: {message}"))
    return code


def _report_misuse(error: object) -> int:
    """Report a wrong option or argument and name the help. Without any argument, print the help."""
    from semel.cli.output import USAGE, say

    context = getattr(error, "ctx", None)
    message = error.format_message()  # type: ignore[attr-defined]
    if type(error).__name__ == "NoArgsIsHelpError":
        print(message, file=sys.stderr)
        return USAGE
    message = message.replace("Value error, ", "").replace("Input should", "it should")
    say(f"semel: {message[:1].lower()}{message[1:].rstrip('.')}")
    say(f"Try: {context.command_path if context else 'semel'} --help")
    return USAGE
