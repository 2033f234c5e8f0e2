"""Everything that transcode raises on purpose.

* TranscodeError          exit 1
  * CheckpointError       the folder is no sound checkpoint: files, headers, index, config
  * FormatError           the tensors are in no encoding that can be read here
  * LayoutError           the tensors do not fit the layout asked for
  * DestinationError      the destination cannot be written as asked
  * Mismatch              exit 3: the output does not mean what the source means
  * LossError             exit 4: something would be lost that was not allowed
"""

from typing import ClassVar


class TranscodeError(Exception):
    """The base of all others; the command line prints it on one line, without a traceback."""

    exit_code: ClassVar[int] = 1


class CheckpointError(TranscodeError):
    """The folder is no sound checkpoint: a file, a header, the index or the config is wrong."""


class FormatError(TranscodeError):
    """The tensors are in no encoding that can be read here, or they contradict each other."""


class LayoutError(TranscodeError):
    """The tensors do not fit the layout asked for."""


class DestinationError(TranscodeError):
    """The destination exists, is the source, holds another plan's work, or has no room."""


class Mismatch(TranscodeError):
    """The output does not mean what the source means."""

    exit_code = 3


class LossError(TranscodeError):
    """Something would be lost that was not allowed to be lost."""

    exit_code = 4
