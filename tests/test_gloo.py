"""The gloo transport: the conformance suite, and what is its own."""

from __future__ import annotations

from commbackend.testing import TransportSuite


class TestGloo(TransportSuite):
    transport = "commbackend.transports.torch_dist:GlooTransport"
