"""The command line. Commands import what they need only when they run."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Entry point: 0 done, 1 failed with one line, 2 wrong usage, 130 interrupted."""
    try:
        from relume.cli.app import app
        from relume.cli.terminal import fail
        from relume.core import RelumeError
        from relume.machine.limits import soft_limit

        if not sys.stderr.isatty():
            os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # progress is for terminals
        try:
            app()
        except RelumeError as error:
            fail(str(error))
        except BrokenPipeError:
            # Whoever read the output has gone: nothing to tell, but what was asked for was not delivered.
            sys.stdout = None
            sys.exit(1)
        except OSError as error:
            sys.stdout = None
            fail(f"the output cannot be written ({error.strerror})")
        except (MemoryError, SystemError, ImportError) as error:  # how torch says that it cannot be loaded
            limits = {name: soft_limit(name) for name in ("RLIMIT_AS", "RLIMIT_DATA")}
            tight = [f"{name} of {limit // 2**20}MiB" for name, limit in limits.items() if limit is not None]
            if not tight or isinstance(error, ModuleNotFoundError):
                raise
            reason = (str(error).strip() or type(error).__name__).splitlines()[-1]
            fail(f"memory ran out before a model was opened ({reason}): raise {' and '.join(tight)}")
    except KeyboardInterrupt:
        sys.exit(130)
