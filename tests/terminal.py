"""A command on a pseudo-terminal, as a user has it in front of them."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

RELUME = Path(sys.executable).parent / "relume"


class Terminal:
    """A process on a pseudo-terminal."""

    def __init__(
        self, *arguments: object, environment: dict[str, str] | None = None, size: tuple[int, int] = (40, 100)
    ) -> None:
        self.pid, self.descriptor = pty.fork()
        if self.pid == 0:
            variables = (environment or dict(os.environ)) | {"TERM": "xterm-256color"}
            os.execve(RELUME, [str(RELUME), *map(str, arguments)], variables)
        fcntl.ioctl(self.descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))
        self.output = ""

    def read_until(self, text: str, timeout: float = 30.0) -> None:
        deadline = time.monotonic() + timeout
        while text not in self.output:
            assert time.monotonic() < deadline, f"{text!r} did not appear in {self.output!r}"
            self._read()

    def write(self, text: str) -> None:
        os.write(self.descriptor, text.encode())

    def wait(self) -> int:
        while self._read():
            pass
        _, status = os.waitpid(self.pid, 0)
        os.close(self.descriptor)
        return os.waitstatus_to_exitcode(status)

    def _read(self) -> bool:
        ready, _, _ = select.select([self.descriptor], [], [], 0.2)
        if not ready:
            return True
        try:
            data = os.read(self.descriptor, 65536)
        except OSError:  # the other end is closed
            return False
        self.output += data.decode(errors="replace")
        return bool(data)


def run(*arguments: object, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    """The command without a terminal, to its end."""
    return subprocess.run(
        [str(RELUME), *map(str, arguments)], capture_output=True, text=True, input=stdin, check=False, timeout=120
    )
