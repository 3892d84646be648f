"""What stops the interpreter."""

from __future__ import annotations

__all__ = ["OutOfBoundsError", "MisalignedError", "PtxError", "UnsupportedError"]


class PtxError(Exception):
    """The program cannot go on; the message ends with the instruction."""


class OutOfBoundsError(PtxError):
    """An access outside the elements of every tensor, or outside shared memory."""


class MisalignedError(PtxError):
    """An address that is no multiple of the size of the access."""


class UnsupportedError(PtxError):
    """Something that this interpreter does not know."""
