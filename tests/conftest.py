from __future__ import annotations

from collections.abc import Iterator

import pytest

import relume  # noqa: F401 (before torch: it sets how torch's threads wait)


@pytest.fixture(scope="session", autouse=True)
def unmeasured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What was measured of this computer decides nothing: tests, and processes they start, find an empty cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield
