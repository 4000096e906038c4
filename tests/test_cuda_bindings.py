"""What only the real binding modules can show, without a GPU: names, structs, and that the kernels compile."""

from __future__ import annotations

import inspect
import re
from types import SimpleNamespace
from typing import Any

import pytest
from fake_cuda import FakeCuda

from commbackend.errors import HeapExhausted, Unavailable
from commbackend.gpu import copy_kernels
from commbackend.gpu import driver as cuda_driver
from commbackend.gpu.copy_kernels import compile_source, moves
from commbackend.gpu.driver import Driver, DriverError


def _bindings() -> tuple[Any, Any]:
    try:
        return cuda_driver.import_bindings()
    except Unavailable as e:
        pytest.skip(str(e))


class _Recorder:
    """The real driver module, its functions replaced: arguments are real structs, nothing is called."""

    def __init__(self, real: Any) -> None:
        self.real, self.calls = real, []

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.real, name)
        if not name.startswith("cu") or name[2].islower():
            return found

        def call(*args: Any) -> tuple[Any, ...]:
            declared = found.__doc__.split("\n")[0].split("(", 1)[1].rsplit(")", 1)[0]
            declared = re.sub(r"\[[^\]]*\]", "", declared)
            assert len(args) == len([p for p in declared.split(",") if p.strip()]), (name, args, declared)
            self.calls.append(name)
            results = {
                "cuCtxGetStreamPriorityRange": (0, -5), "cuMemGetInfo": (1, 2),
                "cuDeviceGetUuid": (SimpleNamespace(bytes=b"u" * 16),),
                "cuDeviceGetUuid_v2": (SimpleNamespace(bytes=b"u" * 16),),
                "cuIpcGetMemHandle": (self.real.CUipcMemHandle(),),
            }  # fmt: skip
            section = found.__doc__.split("Returns\n-------\n")[1].split("See Also")[0]
            nothing = re.search(r"^\w+ : ", section, re.M) is None
            return (self.real.CUresult.CUDA_SUCCESS, *(() if nothing else results.get(name, (7,))))

        return call


def test_every_call_of_the_table_fits_the_real_bindings() -> None:
    """Names, numbers of arguments and struct fields, as the installed cuda-bindings has them."""
    api, nvrtc = _bindings()
    recorder = _Recorder(api)
    d = Driver(0, api=recorder, nvrtc=nvrtc)
    d.open()
    samples = {
        "name": "MULTIPROCESSOR_COUNT", "args": (1, 2), "image": b"x", "code": api.CUresult(2), "call": "cuInit",
        "handle": 3, "module": 3, "event": 3, "kernel": 3,
    }  # fmt: skip
    skipped = {"tensor", "strided_copy", "current_stream", "call", "error", "close", "open"}
    for name, method in inspect.getmembers(d, inspect.ismethod):
        if name.startswith("_") or name in skipped:
            continue
        parameters = list(inspect.signature(method).parameters)
        args = [samples.get(p, 5) for p in parameters]
        if name == "ipc_open":
            args = [bytes(64)]
        if name == "kernel":
            args = [3, "cb_copy"]
        method(*args)
    assert "available 1" in str(d.error("cuMemCreate", api.CUresult.CUDA_ERROR_OUT_OF_MEMORY, 9))
    d.close()
    made = set(recorder.calls)
    missing = {n for n in vars(FakeCuda) if re.match(r"cu[A-Z]", n)} - made - {"cuStreamWaitEvent", "cuDeviceGetUuid"}
    assert not missing, f"the fake has calls that Driver does not make: {missing}"


def test_errors_carry_call_code_size_rank_device_and_hint() -> None:
    """F101, on codes of the real enum where it is installed, else of the fake."""
    code = FakeCuda.CUresult
    fake = SimpleNamespace(
        **{n: lambda *a: (0,) for n in ("cuInit", "cuMemcpyAsync", "cuMemcpy2DAsync", "cuStreamWriteValue64")},
        cuStreamWaitValue64=None, cuLaunchKernel=None, cuDeviceGet=lambda n: (0, n), CUDA_MEMCPY2D=SimpleNamespace,
        CUstreamWaitValue_flags=SimpleNamespace(CU_STREAM_WAIT_VALUE_GEQ=0),
        CUmemorytype=SimpleNamespace(CU_MEMORYTYPE_UNIFIED=4), cuMemGetInfo=lambda: (0, 1234, 5678),
    )  # fmt: skip
    d = Driver(3, rank=5, api=fake, nvrtc=None, batch=lambda *_: 0)
    error = d.error("cuMemMap", code.CUDA_ERROR_NOT_PERMITTED, 4096)
    assert isinstance(error, DriverError) and (error.call, error.code) == ("cuMemMap", "CUDA_ERROR_NOT_PERMITTED")
    for word in ("cuMemMap of 4096 bytes", "CUDA_ERROR_NOT_PERMITTED (800)", "rank 5", "cuda:3", "IMEX"):
        assert word in str(error)
    full = d.error("cuMemCreate", code.CUDA_ERROR_OUT_OF_MEMORY, 99)
    assert isinstance(full, HeapExhausted) and "needed 99 bytes, available 1234" in str(full)
    assert "CUresult 12345" in str(d.error("cuInit", 12345))


@pytest.mark.parametrize("capability", [80, 89, 90, 100])
def test_kernels_compile_without_a_gpu(capability: int) -> None:
    _, nvrtc = _bindings()
    try:
        image = compile_source(nvrtc, capability)
    except Unavailable as e:
        if "cannot be loaded" in str(e):
            pytest.skip(str(e))
        raise
    assert image[:4] == b"\x7fELF"
    for name in copy_kernels.KERNELS:
        assert name.encode() in image
    with pytest.raises(Unavailable, match="cannot compile"):
        compile_source(nvrtc, capability, "nonsense")


def test_kernels_order_memory_at_system_scope() -> None:
    """The waiter acquires and the raiser releases, both at system scope, after a fence; waits have a deadline."""
    wait = re.search(r"cb_wait\(.*?\n}\n", copy_kernels.SOURCE, re.S)[0]
    up = re.search(r"cb_raise\(.*?\n}\n", copy_kernels.SOURCE, re.S)[0]
    assert "ld.acquire.sys" in copy_kernels.SOURCE and "st.release.sys" in copy_kernels.SOURCE
    assert up.index("__threadfence_system()") < up.index("store_release(slot")
    assert "load_acquire(slot)" in wait and "timeout_ns" in wait and "poison" in wait and "__nanosleep" in wait


def test_moves_cover_every_element_once() -> None:
    """Against a walk over all indices, for random shapes and strides."""
    import itertools
    import random

    rng = random.Random(5)
    for _ in range(400):
        shape = tuple(rng.randint(1, 4) for _ in range(rng.randint(0, 4)))
        strides = []
        for _ in range(2):
            acc, made = 1, []
            for n in reversed(shape):
                made.append(acc)
                acc = acc * n + rng.choice([0, 0, 3])
            strides.append(tuple(reversed(made)))
        plan = moves(shape, strides[0], strides[1], 2)
        if plan is None:
            continue
        copied = []
        for m in plan:
            for row in range(m.rows):
                at = (m.dst + row * m.dst_pitch, m.src + row * m.src_pitch)
                copied += [(at[0] + i, at[1] + i) for i in range(m.row_nbytes)]
        wanted = []
        for index in itertools.product(*(range(n) for n in shape)):
            d, s = (2 * sum(i * k for i, k in zip(index, st, strict=True)) for st in strides)
            wanted += [(d, s), (d + 1, s + 1)]
        assert sorted(copied) == sorted(wanted), (shape, strides)
