"""Rounds of agreement over ZeroMQ, which comes with the engine: rank 0 hears all and tells all."""

from __future__ import annotations

import json
from typing import Any

import zmq

from .agreement import AgreementError

ROUND_TIMEOUT_S = 300.0
"""A process that is silent for so long is gone; then the engine had better end than go on alone."""


class Star:
    """An `Agreement`. Messages are JSON, so that nothing that arrives can be more than data."""

    def __init__(self, rank: int, num_processes: int, socket: zmq.Socket[bytes]) -> None:
        self._rank = rank
        self._num_processes = num_processes
        self._socket = socket
        self._round = 0

    @classmethod
    def listen(cls, num_processes: int, host: str) -> tuple[Star, int]:
        """Rank 0, and the port on which it can be reached."""
        socket = zmq.Context.instance().socket(zmq.ROUTER)
        port = socket.bind_to_random_port(f"tcp://{host}")
        return cls(0, num_processes, socket), port

    @classmethod
    def connect(cls, rank: int, num_processes: int, host: str, port: int) -> Star:
        """Another rank."""
        socket = zmq.Context.instance().socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, str(rank).encode())
        socket.connect(f"tcp://{host}:{port}")
        return cls(rank, num_processes, socket)

    def exchange(self, said: Any) -> list[Any]:
        """See `Agreement`. AgreementError if somebody is silent for ROUND_TIMEOUT_S, or in another round."""
        self._round += 1
        return self._gather(said) if self._rank == 0 else self._ask(said)

    def close(self) -> None:
        """Leave."""
        self._socket.close(linger=1000)

    def _gather(self, said: Any) -> list[Any]:
        heard = {0: said}
        while len(heard) < self._num_processes:
            identity, message = self._receive()
            heard[int(identity)] = self._unpack(message)
        answer = self._pack([heard[rank] for rank in range(self._num_processes)])
        for rank in range(1, self._num_processes):
            self._socket.send_multipart([str(rank).encode(), answer])
        return [heard[rank] for rank in range(self._num_processes)]

    def _ask(self, said: Any) -> list[Any]:
        self._socket.send(self._pack(said))
        (message,) = self._receive()
        heard: list[Any] = self._unpack(message)
        return heard

    def _receive(self) -> list[bytes]:
        if not self._socket.poll(int(ROUND_TIMEOUT_S * 1000)):
            raise AgreementError(f"no word from the other processes for {ROUND_TIMEOUT_S:.0f} s")
        parts: list[bytes] = self._socket.recv_multipart()
        return parts

    def _pack(self, content: Any) -> bytes:
        return json.dumps([self._round, content]).encode()

    def _unpack(self, message: bytes) -> Any:
        number, content = json.loads(message)
        if number != self._round:
            raise AgreementError(f"another process is in round {number}, this one in {self._round}")
        return content


def join(rank: int, num_processes: int, host: str) -> Star:
    """The star of all processes of this engine. Every process calls it at the same point of its start, before any step:
    the port travels by a collective."""
    import numpy as np
    from jax.experimental.multihost_utils import broadcast_one_to_all

    star, port = Star.listen(num_processes, host) if rank == 0 else (None, 0)
    port = int(broadcast_one_to_all(np.int32(port)))
    return star or Star.connect(rank, num_processes, host, port)
