"""Close connections that send no request, so that idle connections can't block other users."""

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

MOST_SILENT = 128  # maximum number of open connections that wait for a request
# seconds within which a request's headers must arrive, from the opening of the connection or the last answer
REQUEST_S = 10


class PatientProtocol(H11Protocol):
    """HTTP/1.1 protocol of uvicorn that closes silent connections.

    A connection that sends no request is closed after ``REQUEST_S``. If more than ``MOST_SILENT`` connections are
    silent, the one that has been silent longest is closed. uvicorn itself waits for the first request forever.
    """

    _silence: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._wait_for_request()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._wait_for_request()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._wait_for_request()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _wait_for_request(self) -> None:
        """Start the timer, unless a request is being answered. A request whose headers arrive slowly gets no extra
        time."""
        if self.transport.is_closing() or (self.cycle is not None and not self.cycle.response_complete):
            return self._stop_waiting()
        if self._silence is not None:
            return
        self._silence = self.loop.call_later(REQUEST_S, self.transport.abort)
        silent = [each for each in self.connections if isinstance(each, PatientProtocol) and each._silence is not None]
        if len(silent) > MOST_SILENT:
            longest = min(silent, key=lambda each: each._silence.when() if each._silence else 0)
            # stop its timer now, so that this connection is not chosen again before its closing is reported
            longest._stop_waiting()
            longest.transport.abort()

    def _stop_waiting(self) -> None:
        if self._silence is not None:
            self._silence.cancel()
            self._silence = None
