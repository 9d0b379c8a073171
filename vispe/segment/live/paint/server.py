"""HTTP server of the paint window: local only, with a secret token in the address."""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import Any
from urllib.parse import parse_qs, urlsplit

from vispe.errors import VispeError, is_out_of_memory
from vispe.segment.live.paint.session import Paint, StaleWindow

HOST = "127.0.0.1"
_LARGEST = 32 << 20  # upper bound of a request in bytes
_ASSETS = {"/paint.js": "text/javascript", "/style.css": "text/css"}
_HEADERS = {
    # no external resources, and no embedding in other pages
    "Content-Security-Policy": (
        "default-src 'self'; img-src 'self' data: blob:; object-src 'none'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    ),
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_log = logging.getLogger(__name__)


class Server(ThreadingHTTPServer):
    """Serves one window on 127.0.0.1, at a port chosen by the operating system.

    Args:
        paint: the session.
        port: 0 for any free port.

    Attributes:
        address: URL with the token, which grants access.
    """

    daemon_threads = True

    def __init__(self, paint: Paint, port: int = 0) -> None:
        super().__init__((HOST, port), _Handler)
        self.paint, self.token = paint, secrets.token_urlsafe(24)
        self.hosts = {f"{name}:{self.server_port}" for name in (HOST, "localhost")}

    @property
    def address(self) -> str:
        """URL of the window."""
        return f"http://{HOST}:{self.server_port}/?token={self.token}"


class _Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"
    timeout = 15  # seconds of inactivity until a connection is closed

    def do_GET(self) -> None:
        path = self._allowed()
        if path is None:
            return None
        if path == "/":
            text = files(__package__).joinpath("page.html").read_text(encoding="utf-8")
            self._send(text.replace("TOKEN", self.server.token).encode(), "text/html; charset=utf-8")
        elif path in _ASSETS:
            self._send(files(__package__).joinpath(path[1:]).read_bytes(), f"{_ASSETS[path]}; charset=utf-8")
        elif path == "/image.png":
            query = parse_qs(urlsplit(self.path).query)
            number = query.get("image", [""])[0]
            if number and not (number.isascii() and number.isdecimal() and len(number) < 10):
                return self._refuse(HTTPStatus.BAD_REQUEST, "image must be an integer.")
            shown = int(number) if number else None
            self._guarded(lambda: self._send(self.server.paint.image_png(shown), "image/png"))
        elif path == "/state":
            self._answer(self.server.paint.state)
        else:
            self._refuse(HTTPStatus.NOT_FOUND, "page not found.")
        return None

    def do_POST(self) -> None:
        path = self._allowed()
        if path is None:
            return
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdecimal()):
            return self._refuse(HTTPStatus.BAD_REQUEST, "Content-Length must be an integer.")
        if len(length) > 12 or int(length) > _LARGEST:
            return self._refuse(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "there are too many scribbles. Undo some."
            )
        body = self.rfile.read(int(length))
        if self.headers.get_content_type() != "application/json":
            return self._refuse(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "only JSON is accepted.")
        try:
            content = json.loads(body or b"{}")
            if not isinstance(content, dict):
                raise ValueError("no object")
        except (ValueError, RecursionError):  # RecursionError: deeply nested JSON
            return self._refuse(HTTPStatus.BAD_REQUEST, "the request is not a JSON object.")
        if path == "/update":
            return self._answer(lambda: self.server.paint.update(content))
        if path == "/show":
            return self._answer(lambda: self.server.paint.show(content))
        if path == "/save":
            return self._answer(lambda: {"files": self.server.paint.save(content)})
        self._refuse(HTTPStatus.NOT_FOUND, "page not found.")
        return None

    def _allowed(self) -> str | None:
        """Return the path of a request from this window; reject all others."""
        # reject DNS rebinding and cross-origin requests
        origin = self.headers.get("Origin")
        foreign = origin is not None and origin not in {f"http://{host}" for host in self.server.hosts}
        if self.headers.get("Host") not in self.server.hosts or foreign:
            self._refuse(HTTPStatus.FORBIDDEN, "access is restricted to the window on this machine.")
            return None
        try:
            url = urlsplit(self.path)
        except ValueError:
            self._refuse(HTTPStatus.BAD_REQUEST, "invalid URL.")
            return None
        token = parse_qs(url.query).get("token", [""])[0]
        if not secrets.compare_digest(token.encode(), self.server.token.encode()):
            self._refuse(
                HTTPStatus.FORBIDDEN, "the URL lacks its token. Copy the complete URL from the terminal."
            )
            return None
        return url.path

    def _answer(self, work: Any) -> None:
        self._guarded(lambda: self._json(work()))

    def _guarded(self, send: Any) -> None:
        """Send a response, or an error message."""
        try:
            send()
        except StaleWindow as error:
            self._refuse(HTTPStatus.CONFLICT, str(error))
        except (VispeError, OSError) as error:
            self._refuse(HTTPStatus.UNPROCESSABLE_ENTITY, str(error))
        except Exception as error:
            # report unexpected errors to the window; the log has the traceback
            _log.exception("painting failed")
            summary = "out of memory. Crop the image." if is_out_of_memory(error) else type(error).__name__
            self._refuse(HTTPStatus.INTERNAL_SERVER_ERROR, f"unexpected: {summary}")

    def _json(self, content: Mapping[str, Any]) -> None:
        self._send(json.dumps(content).encode(), "application/json")

    def _refuse(self, status: HTTPStatus, reason: str) -> None:
        self.close_connection = True
        self._send(json.dumps({"error": reason}).encode(), "application/json", status)

    def _send(self, body: bytes, kind: str, status: HTTPStatus = HTTPStatus.OK) -> None:
        self.send_response(status)
        for name, value in {**_HEADERS, "Content-Type": kind, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        try:
            self.wfile.write(body)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:
        """Disable logging: the logged URL would contain the token."""
        del format, args
