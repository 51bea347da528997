"""The other servers of http_layers.py: an ASGI application and a server on h11. Does not import homing, because it runs
in the peers' virtual environment.

    python tests/bench/http_layers_peer.py PORT    the server on h11
"""

import asyncio
import sys
from typing import Any

ANSWER = b'{"choices":[{"message":{"role":"assistant","content":"' + b"token " * 55 + b'"}}]}'
LENGTH = str(len(ANSWER)).encode()


async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
    """The minimal ASGI application that gives this answer."""
    if scope["type"] != "http":
        return
    while (await receive()).get("more_body"):
        pass
    headers = [(b"content-type", b"application/json"), (b"content-length", LENGTH)]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": ANSWER})


def serve(port: int) -> None:
    """Give the same answer with an asyncio protocol over h11, in pure Python."""
    import h11
    import uvloop

    class Connection(asyncio.Protocol):
        """One client."""

        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            self.transport: Any = transport
            self.http = h11.Connection(h11.SERVER)

        def data_received(self, data: bytes) -> None:
            self.http.receive_data(data)
            while (event := self.http.next_event()) not in (h11.NEED_DATA, h11.PAUSED):
                if isinstance(event, h11.EndOfMessage):
                    head = h11.Response(status_code=200, headers=[("content-length", LENGTH)])
                    parts = [self.http.send(each) for each in (head, h11.Data(data=ANSWER), h11.EndOfMessage())]
                    self.transport.write(b"".join(parts))
                    if self.http.our_state is h11.MUST_CLOSE:
                        self.transport.close()
                        return
                    self.http.start_next_cycle()

    async def main() -> None:
        server = await asyncio.get_running_loop().create_server(Connection, "127.0.0.1", port)
        await server.serve_forever()

    uvloop.run(main())


if __name__ == "__main__":
    serve(int(sys.argv[1]))
