"""Entry point of `launcher` and `python -m launcher`. Ctrl-C has its exit code even during imports."""

import atexit
import gc
import io
import os
import sys
import threading

STOPPED = 5  # errors.StoppedByUser, whose module is not loaded yet
_WRITING = threading.RLock()


class _Stream(io.TextIOWrapper):
    """stdout or stderr. At exit it belongs to the main thread: Python aborts if another thread is inside a write."""

    def write(self, text: str) -> int:
        with _WRITING:
            return super().write(text)

    def flush(self) -> None:
        with _WRITING:
            super().flush()


def main() -> None:
    try:
        _open_streams()
        _use_utf8()
        gc.disable()  # of what imports make nothing is garbage; cli.main switches it on again
        from launcher.cli.main import main as run

        run()
    except KeyboardInterrupt:
        sys.stderr.write("launcher: stopped; nothing was started\n")
        sys.exit(STOPPED)


def _open_streams() -> None:
    """Open /dev/null in place of streams that the caller has closed (`>&-`): a connection would get their number."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            while os.open(os.devnull, os.O_RDWR) < number:
                pass
            setattr(sys, name, open(number, "w" if number else "r"))  # noqa: PTH123, SIM115 - a number, for the whole process


def _use_utf8() -> None:
    """Use UTF-8 for job files, file names and output, whatever the locale. Python chooses its encoding at its start, so
    restart it if it chose another one. Programs of a run keep the caller's settings.
    """
    again = "utf8" not in sys._xoptions  # noqa: SLF001 - documented; otherwise -X utf8=0 would loop forever
    if sys.getfilesystemencoding() != "utf-8" and again and sys.executable:
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])  # noqa: S606 - no shell
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):  # its encoding, of PYTHONIOENCODING, may lack characters
            encoding, by_line = stream.encoding, stream.line_buffering
            setattr(sys, name, _Stream(stream.detach(), encoding, "backslashreplace", line_buffering=by_line))
    atexit.register(_WRITING.acquire)


if __name__ == "__main__":
    main()
