"""One HTTP connection, within bounds: how many there are at once, and how long one may take to ask for something."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from .errors import error_body


class BoundedProtocol(H11Protocol):
    """uvicorn's protocol; beyond `max_connections`, or what fits, a new connection is told so and closed, and one that
    has not sent a whole request head within `head_timeout_s` is closed too. On the server's loop.
    """

    max_connections = 512
    most_that_fit = max_connections  # into the descriptors that the process may have
    head_timeout_s = 20.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has connected."""
        super().connection_made(transport)
        most = min(self.max_connections, self.most_that_fit)
        if len(self.connections) > most:
            transport.write(_refusal(f"{most} connections are open"))
            transport.close()
            return
        self._expect_request()

    def on_response_complete(self) -> None:
        """The next request may come; one that came before the answer was complete has been begun already."""
        answered = self.cycle
        super().on_response_complete()
        if self.cycle is answered:
            self._expect_request()

    def _expect_request(self) -> None:
        self.loop.call_later(self.head_timeout_s, self._close_unless_asked, self.cycle)

    def _close_unless_asked(self, last: RequestResponseCycle | None) -> None:
        if self.cycle is last and not self.transport.is_closing():
            self.transport.close()


def _refusal(reason: str) -> bytes:
    body: dict[str, Any] = error_body(503, f"the server is full: {reason}")
    content = json.dumps(body).encode()
    head = (
        "HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\n"
        f"connection: close\r\ncontent-length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content
