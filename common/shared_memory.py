"""Host memory that several processes map: an anonymous file, without a name in any file system, gone with its last
process. The ring of the capture (common/ring.py) and the batches of the training (common/feed_process.py) lie in it.
"""

import mmap
import os

import torch

from common.errors import UserError

PAGE = 4096  # bytes


def sized(descriptor: int, nbytes: int, what: str, advice: str) -> None:
    """Give an anonymous file its size. UserError as `mapped`."""
    try:
        os.ftruncate(descriptor, nbytes)
    except (OSError, OverflowError) as error:
        raise refusal(f"have {what}", nbytes, error, advice) from None


def mapped(path: str, nbytes: int, what: str, advice: str) -> torch.Tensor:
    """uint8 [nbytes]: the memory at `path`, /proc/PID/fd/N. UserError names `what` it is and what to do, `advice`."""
    try:
        with open(path, "r+b", buffering=0) as file:
            return torch.frombuffer(mmap.mmap(file.fileno(), nbytes), dtype=torch.uint8)
    except (OSError, OverflowError) as error:
        raise refusal(f"map {what}", nbytes, error, advice) from None


def lock_pages(memory: torch.Tensor, what: str, advice: str) -> None:
    """Keep the memory where it is, so that a GPU copies from and to it while others work. UserError as `mapped`."""
    try:
        torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), len(memory), 0))
    except RuntimeError as error:
        raise refusal(f"page-lock {what}", len(memory), error, advice) from None


def refusal(what: str, nbytes: int, error: Exception, advice: str) -> UserError:
    return UserError(f"cannot {what} of {nbytes / 1e9:.3g} GB ({getattr(error, 'strerror', None) or error}); {advice}")


def unlock_pages(memory: torch.Tensor) -> None:
    """Before it is unmapped. No copy of the device may be under way."""
    torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(memory.data_ptr()))
