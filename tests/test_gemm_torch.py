"""The torch GEMM provider under the contract's suite."""

from commbackend.testing import GemmSuite


class TestTorchMM(GemmSuite):
    provider = "commbackend.gemm.torch_mm:TorchMM"
