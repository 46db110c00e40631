"""Close connections that are open without asking for anything, so that they keep nobody else out."""

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

MOST_SILENT = 128  # connections at a time that have not sent a request
REQUEST_S = 10  # from the opening of a connection, or its last answer, to the end of a request's headers


class PatientProtocol(H11Protocol):
    """uvicorn's HTTP/1.1, where a connection that sends no request is closed after a time, and the one that has been
    silent for the longest also when there are too many. uvicorn itself waits for the first request forever."""

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
        """Begin to wait, unless a request is being answered. One that comes byte by byte gets no more time."""
        if self.transport.is_closing() or (self.cycle is not None and not self.cycle.response_complete):
            return self._stop_waiting()
        if self._silence is not None:
            return
        self._silence = self.loop.call_later(REQUEST_S, self.transport.abort)
        silent = [each for each in self.connections if isinstance(each, PatientProtocol) and each._silence is not None]
        if len(silent) > MOST_SILENT:
            longest = min(silent, key=lambda each: each._silence.when() if each._silence else 0)
            longest._stop_waiting()  # it is lost a little later, and must not be found once more
            longest.transport.abort()

    def _stop_waiting(self) -> None:
        if self._silence is not None:
            self._silence.cancel()
            self._silence = None
