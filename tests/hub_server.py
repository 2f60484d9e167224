"""A model hub on localhost: the few HTTP calls that downloading a snapshot makes."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """One repository `org/model` at two revisions, and what clients asked for.

    `cut_after` ends the first transfer of each file after that many bytes.
    """

    folder: Path
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)  # method, file, range
    cut_after: int | None = None
    url: str = ""

    def downloaded(self) -> list[str]:
        return [name for method, name, _ in self.requests if method == "GET" and not name.startswith("/api")]


@contextmanager
def serve_hub(folder: Path) -> Iterator[Hub]:
    hub = Hub(folder)
    cut: set[str] = set()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            """Keep the tests' output clean."""

        def do_HEAD(self) -> None:
            self.answer(body=False)

        def do_GET(self) -> None:
            self.answer(body=True)

        def answer(self, body: bool) -> None:  # noqa: PLR0911
            parts = self.path.split("?")[0].strip("/").split("/")
            if parts[:1] == ["api"]:
                hub.requests.append((self.command, self.path, None))
                if parts[2:4] != ["org", "model"] or parts[-1] not in {"main", "v2", COMMIT}:
                    kind = "RevisionNotFound" if parts[2:4] == ["org", "model"] else "RepoNotFound"
                    return self.reply(404, b"{}", {"X-Error-Code": kind})
                if "tree" in parts:
                    tree = [
                        {"type": "file", "path": p.name, "size": p.stat().st_size, "oid": "0" * 40}
                        for p in sorted(folder.iterdir())
                    ]
                    return self.reply(200, json.dumps(tree).encode())
                names = [{"rfilename": path.name} for path in sorted(folder.iterdir())]
                content = {"id": "org/model", "sha": COMMIT, "siblings": names, "private": False, "gated": False}
                return self.reply(200, json.dumps(content).encode())
            path = folder / parts[-1]
            wanted = self.headers.get("Range")
            hub.requests.append((self.command, path.name, wanted))
            if parts[:2] != ["org", "model"] or not path.exists():
                return self.reply(404, b"", {"X-Error-Code": "EntryNotFound"})
            data = path.read_bytes()
            headers = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": COMMIT}
            headers["Accept-Ranges"] = "bytes"
            if wanted:
                start = int(wanted.removeprefix("bytes=").split("-")[0])
                headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
                return self.reply(206, data[start:], headers, body)
            if body and hub.cut_after is not None and path.name not in cut and len(data) > hub.cut_after:
                cut.add(path.name)
                self.send_response(200)
                for key, value in (headers | {"Content-Length": str(len(data))}).items():
                    self.send_header(key, value)
                self.end_headers()
                self.wfile.write(data[: hub.cut_after])
                self.wfile.flush()
                self.connection.close()
                self.close_connection = True
                return None
            return self.reply(200, data, headers, body)

        def reply(
            self, status: int, data: bytes, headers: dict[str, str] | None = None, body: bool = True
        ) -> None:
            self.send_response(status)
            for key, value in ({"Content-Length": str(len(data))} | (headers or {})).items():
                self.send_header(key, value)
            self.end_headers()
            if body:
                self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
