"""The window's server: on this machine only, and only for who has the address with its token."""

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

from vispe.errors import VispeError, is_memory
from vispe.segment.live.paint.session import Paint, StaleWindow

HOST = "127.0.0.1"
_LARGEST = 32 << 20  # bytes of what the window sends
_PARTS = {"/paint.js": "text/javascript", "/style.css": "text/css"}
_HEADERS = {
    # nothing is fetched from elsewhere, and no other page may show this one
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
    """Serves one window on 127.0.0.1, at a port that the system chooses.

    Args:
        paint: what is painted.
        port: 0 for any that is free.

    Attributes:
        address: with the token; whoever has it may paint.
    """

    daemon_threads = True

    def __init__(self, paint: Paint, port: int = 0) -> None:
        super().__init__((HOST, port), _Handler)
        self.paint, self.token = paint, secrets.token_urlsafe(24)
        self.hosts = {f"{name}:{self.server_port}" for name in (HOST, "localhost")}

    @property
    def address(self) -> str:
        """The address of the window."""
        return f"http://{HOST}:{self.server_port}/?token={self.token}"


class _Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"
    timeout = 15  # seconds without a byte, after which a connection ends

    def do_GET(self) -> None:
        path = self._allowed()
        if path is None:
            return
        if path == "/":
            text = files(__package__).joinpath("page.html").read_text(encoding="utf-8")
            self._send(text.replace("TOKEN", self.server.token).encode(), "text/html; charset=utf-8")
        elif path in _PARTS:
            self._send(files(__package__).joinpath(path[1:]).read_bytes(), f"{_PARTS[path]}; charset=utf-8")
        elif path == "/image.png":
            self._guarded(lambda: self._send(self.server.paint.picture(), "image/png"))
        elif path == "/state":
            self._answer(self.server.paint.state)
        else:
            self._refuse(HTTPStatus.NOT_FOUND, "there is no such page.")

    def do_POST(self) -> None:
        path = self._allowed()
        if path is None:
            return
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdecimal()):
            return self._refuse(HTTPStatus.BAD_REQUEST, "Content-Length must be a whole number.")
        if len(length) > 12 or int(length) > _LARGEST:
            return self._refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "the strokes are too many; undo some.")
        body = self.rfile.read(int(length))
        if self.headers.get_content_type() != "application/json":
            return self._refuse(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "only JSON is taken.")
        try:
            content = json.loads(body or b"{}")
            if not isinstance(content, dict):
                raise ValueError("no object")
        except (ValueError, RecursionError):  # texts that are nested thousands deep
            return self._refuse(HTTPStatus.BAD_REQUEST, "what was sent is no JSON object.")
        if path == "/update":
            return self._answer(lambda: self.server.paint.update(content))
        if path == "/save":
            return self._answer(lambda: {"files": self.server.paint.save(content)})
        self._refuse(HTTPStatus.NOT_FOUND, "there is no such page.")
        return None

    def _allowed(self) -> str | None:
        """Return the path of a request from this window; refuse any other."""
        # a name that someone lets point here, and pages of others, must not reach the server
        origin = self.headers.get("Origin")
        foreign = origin is not None and origin not in {f"http://{host}" for host in self.server.hosts}
        if self.headers.get("Host") not in self.server.hosts or foreign:
            self._refuse(HTTPStatus.FORBIDDEN, "this address is for the window on this machine only.")
            return None
        try:
            found = urlsplit(self.path)
        except ValueError:
            self._refuse(HTTPStatus.BAD_REQUEST, "this is no address.")
            return None
        given = parse_qs(found.query).get("token", [""])[0]
        if not secrets.compare_digest(given.encode(), self.server.token.encode()):
            self._refuse(
                HTTPStatus.FORBIDDEN, "the address lacks its token; copy it whole from the terminal."
            )
            return None
        return found.path

    def _answer(self, work: Any) -> None:
        self._guarded(lambda: self._json(work()))

    def _guarded(self, send: Any) -> None:
        """Send an answer, or say what went wrong."""
        try:
            send()
        except StaleWindow as error:
            self._refuse(HTTPStatus.CONFLICT, str(error))
        except (VispeError, OSError) as error:
            self._refuse(HTTPStatus.UNPROCESSABLE_ENTITY, str(error))
        except Exception as error:
            # the window must not hang on what was not foreseen; the log has it all
            _log.exception("painting failed")
            short = "out of memory; take a part of the image." if is_memory(error) else type(error).__name__
            self._refuse(HTTPStatus.INTERNAL_SERVER_ERROR, f"unexpected: {short}")

    def _json(self, content: Mapping[str, Any]) -> None:
        self._send(json.dumps(content).encode(), "application/json")

    def _refuse(self, status: HTTPStatus, why: str) -> None:
        self.close_connection = True
        self._send(json.dumps({"error": why}).encode(), "application/json", status)

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
        """Say nothing: the address in the log would hold the token."""
        del format, args
