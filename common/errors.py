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
LOST_RANK = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")  # as gloo and NCCL say it
ONE_OF_SEVERAL = os.environ.get("RANK") if os.environ.get("WORLD_SIZE", "1") != "1" else None  # under torchrun
OWN_CODE = "it brings its own code; look at it, then pass --trust-remote-code"  # and was not allowed to run it


class UserError(Exception):
    """A problem that the person who started the program can mend; the message says what and how."""


def complain(text: str) -> None:
    who = "error" if ONE_OF_SEVERAL is None else f"error of rank {ONE_OF_SEVERAL}"
    print(f"{who}: " + " ".join(text.split("\n")), file=sys.stderr, flush=True)


def run(main: Callable[[], int | None]) -> None:
    """Call `main` and leave the process with its exit status; `UserError` becomes one line on standard error."""
    try:
        status = main() or 0
    except UserError as error:
        complain(str(error))
        status = EXIT_BAD_INPUT
    except RuntimeError as error:
        if ONE_OF_SEVERAL is None or not any(text in str(error) for text in LOST_RANK):
            raise
        complain("the connection to another rank broke; that rank's own message says why")
        status = EXIT_BAD_INPUT
    except KeyboardInterrupt:
        status = EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader of our output went away (`| head`)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    if sys.stdout is not None:  # it may have been closed by whoever started us
        sys.stdout.flush()
    sys.exit(status)
