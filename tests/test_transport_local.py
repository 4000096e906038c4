"""The local transport: the contract's suite, plain and with injected faults, then what is its own."""

from commbackend.testing import TransportSuite, run_threads


class TestLocal(TransportSuite):
    transport = "commbackend.transports.local:LocalTransport"
    runner = staticmethod(run_threads)


class TestLocalReordering(TestLocal):
    options = {"seed": 7, "reorder": True, "delay_s": 0.0005, "peer_view": False, "source": "symmetric"}
