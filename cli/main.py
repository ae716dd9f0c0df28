"""The command `tfm`: from the process's start to its exit status. Light, so that Ctrl-C is quiet from the first moment.

Exit statuses: 0 done, 1 could not do it, 2 wrong usage, 130 stopped by Ctrl-C (143 by SIGTERM, 129 by SIGHUP, 131 by
SIGQUIT), 141 nobody reads stdout any more.
"""

import signal

if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # where it is ignored (a shell's &) it stays so
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until there is more to end, Ctrl-C simply ends the process

import atexit
import errno
import gc
import os
import sys
from contextlib import suppress

from tfm.cli import interrupt
from tfm.cli.output import Output, say

YOUNG_OBJECTS = 100_000  # so many more before garbage is looked for: a start makes more than that, and no garbage
DONE, FAILED, WRONG_USAGE, NOBODY_READS = 0, 1, 2, 141
MEMORY = "memory: not enough; use a smaller model or a shorter context, or allow this process more (ulimit -v)"
LIBRARY = "memory: a library cannot be loaded; allow this process more (ulimit -v)"
THREADS = "threads: this process may start no more; allow it more processes or memory (ulimit -u, ulimit -v)"
FILES = "open files: this process may have no more; raise the limit (ulimit -n)"
SCARCE = {errno.EMFILE: FILES, errno.ENFILE: FILES, errno.ENOMEM: MEMORY}
NOT_LOADED = {"failed to map segment": LIBRARY, "cannot allocate memory": LIBRARY, "error 24": FILES}
"""In the words of the loader of shared libraries; llvmlite has other ones, and keeps these as the error's context."""


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
    if sys.stdout is not None:
        sys.stdout.reconfigure(encoding="utf-8", errors="replace")  # type: ignore[union-attr]
    output = Output()
    stop = interrupt.listen(lambda: _last_words(output))
    try:
        status = _invoke(arguments, output)
    except (KeyboardInterrupt, RuntimeError) as error:
        # Python 3.11 wraps what comes up while a class is made, in __set_name__.
        if not isinstance(error, KeyboardInterrupt) and not isinstance(error.__cause__, KeyboardInterrupt):
            raise
        output.last_words()
        return stop.status
    return status if stop.number is None else stop.status  # also when something failed then: the terminal may be gone


def _invoke(arguments: list[str], output: Output) -> int:
    """The command line's command, or what a shell completes, and what there is to say when it cannot be done; the exit
    status."""
    import click

    from tfm.cli.app import app, complete_in_shell, explain
    from tfm.engine.errors import TfmError

    try:
        if "_TFM_COMPLETE" in os.environ:
            return _status_of_click(complete_in_shell(os.environ["_TFM_COMPLETE"]))
        with app.make_context("tfm", arguments, obj=output) as context:
            app.invoke(context)
    except click.exceptions.Exit as end:
        return _status_of_click(end.exit_code)
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


def _status_of_click(status: int) -> int:
    """Of help, the version and completion: where stdout is closed, click prints them nowhere and says nothing."""
    if status == DONE and sys.stdout is None:
        say("tfm: stdout: found closed; allowed: a file, a pipe or a terminal to write the result to")
        return FAILED
    return status


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


def _last_words(output: Output) -> None:
    """Before the process is ended from the side, which passes over what is done at exit."""
    output.last_words()
    if "tfm.engine.store" in sys.modules:
        from tfm.engine.store import remove_run_folder

        remove_run_folder()


def _in_words(error: OSError) -> str:
    scarce = _what_is_scarce(error)
    if scarce is not None:
        return scarce
    if error.errno is None:  # not the system's, but a library's: a part of an installation is missing or damaged
        return " ".join(str(error).split()) or type(error).__name__
    return f"{error.filename}: {error.strerror}" if error.filename else f"stdout: {error.strerror}"


def _debugging() -> bool:
    return os.environ.get("TFM_DEBUG", "") not in ("", "0")


def _report_bug(kind: type[BaseException], error: BaseException, trace: object) -> None:
    """The last resort for an exception that nobody foresaw."""
    scarce = _what_is_scarce(error)
    if scarce is not None:
        say(f"tfm: {scarce}")
        return
    reason = " ".join(str(error).split()) or "no reason given"
    say(f"tfm: a bug in tfm: {kind.__name__}: {reason}; TFM_DEBUG=1 shows where it happened, please report it")


def _what_is_scarce(error: BaseException) -> str | None:
    """What the system has too little of, or allows too little of; None for all other errors."""
    if isinstance(error, MemoryError):
        return MEMORY
    if isinstance(error, OSError) and error.errno is not None:
        return SCARCE.get(error.errno)
    if isinstance(error, ImportError | OSError):
        said = f"{error} {error.__context__}".lower()
        return next((scarce for words, scarce in NOT_LOADED.items() if words in said), None)
    return THREADS if isinstance(error, RuntimeError) and str(error) == "can't start new thread" else None


def _fill_closed_streams() -> None:
    """Give a closed stdin, stdout or stderr to /dev/null: or else the next file that is opened would take its place."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


def _drop_stdout() -> None:
    """Let what is still buffered go nowhere, or Python complains about it at exit."""
    with suppress(OSError):  # no more files can be opened; then what complains at exit is passed over there
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.close(null)
