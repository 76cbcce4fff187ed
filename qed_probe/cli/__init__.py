"""The command line: each command parses, calls one library function and says where the result is."""

import logging
import signal
import sys
import traceback
import warnings
from types import FrameType

import typer

from qed_probe.errors import CheckFailed, QedProbeError

# typer exports the leaves of its usage errors but, in no version, their common base.
UsageError: type[typer.BadParameter] = typer.BadParameter.__mro__[1]

# An import and safetensors may take an interrupt for an error of their own; zarr leaves coroutines that Python warns of.
_FINISHED_FIRST = {"importlib", "safetensors", "zarr"}


def main() -> int:
    """Run ``qed-probe`` on this process's arguments and return its exit status; whatever goes wrong is told in one line."""
    warnings.formatwarning = _one_line
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # and not ignored, as behind nohup
        signal.signal(signal.SIGINT, _interrupt)
    logging.basicConfig(format="qed-probe: %(message)s")
    try:
        from qed_probe.cli.app import app

        status: int = app(sys.argv[1:] or ["--help"], standalone_mode=False) or 0
    except (KeyboardInterrupt, typer.Abort):
        status = 130
    except UsageError as error:
        context = error.ctx.command_path if error.ctx else "qed-probe"
        return _fail(f"{error.format_message()} ({context} --help says more)", 2)
    except CheckFailed as error:
        return _fail(str(error), 1)
    except (QedProbeError, OSError) as error:
        if not _interrupted(error):
            return _fail(str(error), 2)
        status = 130
    except (ValueError, RuntimeError) as error:
        if (values := _read_from(error)) is None:
            raise
        return _fail(f"{values}: expected values as they were written, found damaged ones: {error}", 2)
    if status == 130:  # newer versions of typer return it, older ones raise Abort
        signal.setitimer(signal.ITIMER_REAL, 0)  # whoever asked twice is not asked for again
        typer.echo("qed-probe: interrupted", err=True)
    return status


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Stop, but not within `_FINISHED_FIRST`: then ask again soon."""
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] in _FINISHED_FIRST:
            signal.signal(signal.SIGALRM, _interrupt)
            signal.setitimer(signal.ITIMER_REAL, 0.02)
            return
        frame = frame.f_back
    raise KeyboardInterrupt


def _interrupted(error: BaseException | None) -> bool:
    """Whether an error is what an interrupt made of cleaning up: shutil.rmtree may close a file twice."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def _read_from(error: BaseException) -> str | None:
    """The array of a store within whose reading an error came up, if it did."""
    import zarr

    for frame, _ in traceback.walk_tb(error.__traceback__):
        array = frame.f_locals.get("self")
        if isinstance(array, zarr.Array) and frame.f_code.co_name == "__getitem__":
            return str(array.store_path).removeprefix("file://")
    return None


def _one_line(message: Warning | str, *_: object, **__: object) -> str:
    return f"qed-probe: warning: {' '.join(str(message).split())}\n"


def _fail(message: str, status: int) -> int:
    typer.echo(f"qed-probe: error: {' '.join(message.split())}", err=True)
    return status
