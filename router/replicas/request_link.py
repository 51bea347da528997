"""The request connection to one replica: a ZeroMQ DEALER socket in an event loop.

Encodes and decodes messages, and reports when the connection is established and when it is lost. Makes no decisions and
never blocks: `send` returns False for a message that the connection cannot take at once.

A link lasts for one connection. `immediate` keeps messages from queueing for an absent peer, and reconnecting is off:
a request sent to a dead process must not reach its successor on the same address. A loss is detected by the socket
monitor (a killed process closes its sockets at once) and by ZMTP heartbeats (a frozen process or host). libzmq answers
heartbeats in its own thread, so a long step does not look like a crash.
"""

import asyncio
import logging
from math import inf
from typing import Protocol

import msgspec
import zmq

from ...events.follow.handshake import WATCHED, Connection, Handshakes
from ...events.follow.socket_reader import SocketReader
from ...events.security.curve_keys import KeyPair, new_pair, protect_client
from ...replica.messages import Reply, Request

log = logging.getLogger(__name__)

SEND_HIGH_WATER_MARK = 10_000
#: A larger frame closes the connection. The largest replies are a whole prompt's logprobs.
MAX_REPLY_BYTES = 1024 * 1024 * 1024
#: A peer that answers no ping within the timeout is lost, so a frozen replica stays in use for at most the sum of both,
#: 0.95 s. libzmq's thread answers without Python's GIL, so a busy replica answers too: with 1 s, no replica was dropped
#: by mistake at a load average of 60 on two cores. Shorter times were not tried: a virtual machine's own pauses reach
#: hundreds of milliseconds.
PING_INTERVAL_MS = 250
PING_TIMEOUT_MS = 700

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)

RequestSocket = zmq.Socket[bytes]
RequestContext = zmq.Context[RequestSocket]


class LinkSink(Protocol):
    """The user of a link. All calls come from the loop's thread."""

    def connected(self) -> None:
        """Messages can be sent from now on."""

    def lost(self) -> None:
        """The connection was lost or could not be established. Called once, as the last callback."""

    def reply(self, reply: Reply) -> None:
        """The replica sent a reply."""

    def unreadable(self, reason: str) -> None:
        """A reply could not be decoded and was dropped."""


class ReplicaLink:
    """One connection to one replica. Created and used in the loop's thread."""

    def __init__(
        self,
        endpoint: str,
        router_id: str,
        sink: LinkSink,
        *,
        context: RequestContext,
        loop: asyncio.AbstractEventLoop,
        handshakes: Handshakes | None = None,
        keys: KeyPair | None = None,
        curve_key: str = "",
    ) -> None:
        """`handshakes` keeps the connection history of this replica across several links.

        `keys` is the router's key pair; `curve_key` is the replica's public key, empty for no encryption.
        """
        self._endpoint = endpoint
        self._sink = sink
        self._loop = loop
        self._closed = False
        self._connected = False
        self._handshakes = handshakes or Handshakes()
        self._socket = _request_socket(context, router_id)
        if curve_key:
            protect_client(self._socket, keys or new_pair(), curve_key.encode())
        self._monitor: RequestSocket = self._socket.get_monitor_socket(WATCHED | zmq.EVENT_CLOSED)
        self._readers = [
            SocketReader(loop, self._socket, self._on_reply),
            SocketReader(loop, self._monitor, self._on_monitor),
        ]
        try:
            self._socket.connect(endpoint)
        except zmq.ZMQError as error:
            log.error("link_unusable endpoint=%s error=%s", endpoint, error)
            loop.call_soon(self._lose)

    def send(self, message: Request) -> bool:
        """Send a message. Returns False if the connection cannot take it now or the message cannot be encoded."""
        if self._closed or not self._connected:
            return False
        try:
            payload = _encoder.encode(message)
        except (OverflowError, ValueError) as error:  # an exception here would drop other requests' messages
            log.error("message_unsendable endpoint=%s error=%s", self._endpoint, error)
            return False
        return self._readers[0].send((payload,))

    def drain_soon(self) -> None:
        """Handle what has arrived in the loop's next iteration."""
        for reader in self._readers:
            reader.drain_soon()

    def close(self) -> None:
        """Close the sockets; queued messages still get 200 ms to leave. No callbacks follow. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for reader in self._readers:
            reader.close()
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close()

    def _on_reply(self, frames: list[bytes]) -> None:
        try:
            reply = _decoder.decode(frames[-1])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            self._sink.unreadable(str(error))
            return
        self._sink.reply(reply)

    def _on_monitor(self, frames: list[bytes]) -> None:
        match self._handshakes.observe(frames):
            case Connection.READY:
                self._connected = True
                self._sink.connected()
            case Connection.LOST:
                self._readers[0].drain(inf)  # deliver the replica's last replies first
                self._lose()

    def _lose(self) -> None:
        if not self._closed:
            self.close()
            self._sink.lost()


def _request_socket(context: RequestContext, router_id: str) -> RequestSocket:
    sock = context.socket(zmq.DEALER)
    sock.identity = router_id.encode()
    sock.linger = 200  # ms; an Abort sent just before the router stops still gets out
    sock.immediate = True
    sock.reconnect_ivl = -1
    sock.set(zmq.SNDHWM, SEND_HIGH_WATER_MARK)
    sock.set(zmq.MAXMSGSIZE, MAX_REPLY_BYTES)
    sock.set(zmq.RCVHWM, 0)  # unlimited: the replica must never wait for the router; a step's tokens are small
    sock.set(zmq.HEARTBEAT_IVL, PING_INTERVAL_MS)
    sock.set(zmq.HEARTBEAT_TIMEOUT, PING_TIMEOUT_MS)
    return sock
