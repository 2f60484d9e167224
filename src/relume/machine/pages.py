"""Pages, the unit of direct reads."""

from __future__ import annotations

#: What O_DIRECT asks of offsets, lengths and addresses.
PAGE = 4096


def whole_pages(num_bytes: int) -> int:
    """`num_bytes` rounded up to whole pages."""
    return -(-num_bytes // PAGE) * PAGE
