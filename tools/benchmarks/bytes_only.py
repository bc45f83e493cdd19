"""A client that sends and counts bytes, and does nothing else.

bytes_only.py PORT RATE REQUESTS uvloop|asyncio < REQUEST

Sends the HTTP request on its input at Poisson times on kept-alive connections, and looks for the
last chunk of each answer, at the load generator's priority: what any client in Python on this event
loop costs.
"""

import asyncio
import random
import sys

import uvloop

from slo_bench.harness.load_generator.machine import before_other_programs


class Connection(asyncio.Protocol):
    """A connection that carries one request at a time."""

    def __init__(self, client):
        self.client = client

    def connection_made(self, transport):
        self.transport = transport
        transport.write(self.client.request)

    def data_received(self, data):
        self.client.received += len(data)
        if data.endswith(b"0\r\n\r\n"):
            self.client.idle.append(self)
            self.client.ended()


class Client:
    """Sends all requests and waits for the last answer."""

    def __init__(self, port, rate_rps, requests, request):
        self.port, self.rate_rps, self.left, self.request = port, rate_rps, requests, request
        self.idle, self.received, self.open = [], 0, requests

    async def run(self):
        self.loop = asyncio.get_running_loop()
        self.over = self.loop.create_future()
        self.due_s = self.loop.time()
        self.send()
        await self.over
        for connection in self.idle:
            connection.transport.close()

    def send(self):
        self.left -= 1
        if self.idle:
            self.idle.pop().transport.write(self.request)
        else:
            connection = self.loop.create_connection(
                lambda: Connection(self), "127.0.0.1", self.port
            )
            self.connecting = self.loop.create_task(connection)
        if self.left:
            self.due_s += random.expovariate(self.rate_rps)
            self.loop.call_later(max(0.0, self.due_s - self.loop.time()), self.send)

    def ended(self):
        self.open -= 1
        if not self.open:
            self.over.set_result(None)


if __name__ == "__main__":
    random.seed(1)
    port, rate_rps, requests, loop = sys.argv[1:]
    client = Client(int(port), float(rate_rps), int(requests), sys.stdin.buffer.read())
    with before_other_programs():
        {"asyncio": asyncio, "uvloop": uvloop}[loop].run(client.run())
    print(client.received)
