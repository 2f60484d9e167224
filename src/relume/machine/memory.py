"""Memory that this process takes."""

from __future__ import annotations

import resource
import sys


def peak_rss_bytes() -> int:
    """The largest resident set that this process ever had, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
