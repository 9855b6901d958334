"""How a bad input reaches the person: one clear line and a non-zero exit.

Anything a person can mend (a missing file, a wrong row, a full disk) is raised as `UserError`; the scripts run
their main function through `run`, which prints that line without a traceback. Every other exception is a defect
of this project and keeps its traceback.
"""

import os
import sys
from collections.abc import Callable

EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130
OWN_CODE = "it brings its own code; look at it, then pass --trust-remote-code"  # and was not allowed to run it


class UserError(Exception):
    """A problem that the person who started the program can mend; the message says what and how."""


def run(main: Callable[[], int | None]) -> None:
    """Call `main` and leave the process with its exit status; `UserError` becomes one line on standard error."""
    try:
        status = main() or 0
    except UserError as error:
        print("error: " + " ".join(str(error).split("\n")), file=sys.stderr, flush=True)
        status = EXIT_BAD_INPUT
    except KeyboardInterrupt:
        status = EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader of our output went away (`| head`)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    if sys.stdout is not None:  # it may have been closed by whoever started us
        sys.stdout.flush()
    sys.exit(status)
