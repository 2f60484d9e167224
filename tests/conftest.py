from __future__ import annotations

import relume  # noqa: F401 (before torch: it sets how torch's threads wait)
