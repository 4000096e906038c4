"""The shm transport: the contract's suite, then what is its own."""

from commbackend.testing import TransportSuite


class TestShm(TransportSuite):
    transport = "commbackend.transports.shm:ShmTransport"
