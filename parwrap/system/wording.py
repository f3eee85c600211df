"""Words that depend on a number, for printed lines and error messages."""

from __future__ import annotations

__all__ = ["counted"]


def counted(number: int, what: str) -> str:
    """``number`` of ``what``, a noun in the singular whose plural is regular.

    >>> counted(1, "sample"), counted(2, "batch")
    ('1 sample', '2 batches')
    """
    return f"{number} {what if number == 1 else what + ('es' if what.endswith(('ch', 's')) else 's')}"
