"""The command `tfm`: from the process's start to its exit status. Light, so that Ctrl-C is quiet from the first moment.

Exit statuses: 0 done, 1 could not do it, 2 wrong usage, 130 stopped by Ctrl-C (143 by SIGTERM, 129 by SIGHUP), 141
nobody reads stdout any more.
"""

import atexit
import gc
import os
import sys
from typing import TYPE_CHECKING

from tfm.cli import interrupt

if TYPE_CHECKING:
    from tfm.cli.output import Output

YOUNG_OBJECTS = 100_000  # so many more before garbage is looked for: a start makes more than that, and no garbage
DONE, FAILED, WRONG_USAGE, NOBODY_READS = 0, 1, 2, 141


def main() -> int:
    """Run the command line; gives the exit status. Whatever is not foreseen is reported as a bug, in one line."""
    gc.set_threshold(YOUNG_OBJECTS, 10, 10)
    # NumPy's BLAS starts a thread for each processor, which spins: 0.1 s of processor time in every process. tfm has
    # kernels of its own.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    ended: list[int] = []
    atexit.register(_end_at_once, ended)  # what is registered first is done last
    ended.append(_main())
    return ended[0]


def _main() -> int:
    interrupt.be_quiet()
    _fill_closed_streams()
    if not _debugging():
        sys.excepthook = _report_bug
    try:
        return _run(sys.argv[1:])
    except KeyboardInterrupt:
        return interrupt.Stop().status
    except BrokenPipeError:
        _drop_stdout()
        return NOBODY_READS


def _run(arguments: list[str]) -> int:
    from tfm.cli.app import complete_in_shell
    from tfm.cli.output import Output

    if sys.stdout is not None:
        sys.stdout.reconfigure(encoding="utf-8", errors="replace")  # type: ignore[union-attr]
    output = Output()
    stop = interrupt.listen(lambda: _last_words(output))
    if "_TFM_COMPLETE" in os.environ:
        return complete_in_shell(os.environ["_TFM_COMPLETE"])
    try:
        status = _invoke(arguments, output)
    except KeyboardInterrupt:
        output.last_words()
        return stop.status
    return status if stop.number is None else stop.status  # also when something failed then: the terminal may be gone


def _invoke(arguments: list[str], output: "Output") -> int:
    """The command line's command, and what there is to say when it cannot be done; the exit status."""
    import click

    from tfm.cli.app import app, explain
    from tfm.cli.output import say
    from tfm.engine.errors import TfmError

    try:
        with app.make_context("tfm", arguments, obj=output) as context:
            app.invoke(context)
    except click.exceptions.Exit as end:
        if end.exit_code == DONE and sys.stdout is None:  # help and the version: click prints them nowhere
            say("tfm: stdout: found closed; allowed: a file, a pipe or a terminal to write the result to")
            return FAILED
        return end.exit_code
    except click.UsageError as error:
        say(explain(error))
        return WRONG_USAGE
    except BrokenPipeError:
        raise
    except (TfmError, OSError) as error:
        output.begin_stderr_line()
        if _debugging():
            import traceback

            say(traceback.format_exc().rstrip())
        say(f"tfm: {error if isinstance(error, TfmError) else _in_words(error)}")
        if isinstance(error, OSError):
            _drop_stdout()  # it may be the one that is full
        return FAILED
    return DONE


def _end_at_once(ended: list[int]) -> None:
    """After everything else that is done at exit: leave the rest to the system, which takes memory back faster.

    To take the interpreter apart lasted 45 ms of a start of 340 ms. Not when an exception ended it.
    """
    if ended:
        for stream in (sys.stdout, sys.stderr):
            try:
                if stream is not None:
                    stream.flush()
            except OSError:  # a terminal that was closed: what a line editor left in the buffer goes nowhere
                ended[0] = ended[0] or FAILED
        os._exit(ended[0])


def _last_words(output: "Output") -> None:
    """Before the process is ended from the side, which passes over what is done at exit."""
    output.last_words()
    if "tfm.engine.store" in sys.modules:
        from tfm.engine.store import remove_run_folder

        remove_run_folder()


def _in_words(error: OSError) -> str:
    return f"{error.filename}: {error.strerror}" if error.filename else f"stdout: {error.strerror}"


def _debugging() -> bool:
    return os.environ.get("TFM_DEBUG", "") not in ("", "0")


def _report_bug(kind: type[BaseException], error: BaseException, trace: object) -> None:
    """The last resort for an exception that nobody foresaw."""
    from tfm.cli.output import say

    if isinstance(error, MemoryError):
        say("tfm: memory: not enough; use a smaller model, lower --ctx or --kv-type q8")
        return
    reason = " ".join(str(error).split()) or "no reason given"
    say(f"tfm: a bug in tfm: {kind.__name__}: {reason}; TFM_DEBUG=1 shows where it happened, please report it")


def _fill_closed_streams() -> None:
    """Give a closed stdin, stdout or stderr to /dev/null: or else the next file that is opened would take its place."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


def _drop_stdout() -> None:
    """Let what is still buffered go nowhere, or Python complains about it at exit."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.close(null)
