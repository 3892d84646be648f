"""Kernels for the symmetric products of Newton-Schulz, one module per compiler, all behind ``contract``.

Importing this package imports no compiler: each backend loads its own when it is first used, and names what is missing.
"""

from __future__ import annotations
