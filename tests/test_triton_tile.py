"""The polling GEMM without a GPU: kernels compiled for real targets and their PTX read, the host side on a fake
driver, numerics in Triton's interpreter."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from commbackend.contract import DeviceSlotTable, GemmProblem, GemmSegment, Slot, SlotTable
from commbackend.errors import CommAborted, CommTimeout, ShapeError, Unavailable, Unsupported
from commbackend.gemm.triton_launch import Runtime, compile_offline, parameters
from commbackend.gemm.triton_reduce import ReduceKernel
from commbackend.gemm.triton_segments import LAUNCH_WORDS, SEGMENT_WORDS
from commbackend.gemm.triton_tile import RESERVED_SMS, Kernel, TileConfig, TritonTile, Variant, choose, specify

triton = pytest.importorskip("triton", reason="triton is not installed here")

CPU = torch.device("cpu")
BF16 = torch.bfloat16


# -- what the compiler makes of it
# ---------------------------------------------------------------------------------------
WIDE, DEEP = TileConfig(128, 256, 64, 3, 8, split=True), TileConfig(128, 256, 64, 4, 8, split=True, device_maps=True)
PAIRED = TileConfig(128, 128, 64, 3, 4, split=True, ctas=2)
AMPERE, GENERAL = TileConfig(128, 256, 32, 4, 8, split=True), TileConfig(64, 64, 32, 2, 4)
# dtypes, load, b_cols, even_k, exact, polls, bias, addends, scales, config
VARIANTS = {
    "sm_90 fold": (90, Variant(BF16, BF16, "bulk", False, False, False, True, True, True, False, WIDE)),
    "sm_90 two an SM": (90, Variant(BF16, BF16, "bulk", False, False, False, True, True, True, False, PAIRED)),
    "sm_90 device maps": (90, Variant(BF16, BF16, "bulk", True, False, False, True, False, False, False, DEEP)),
    "sm_100": (100, Variant(BF16, BF16, "bulk", False, False, False, True, False, False, False, WIDE)),
    "sm_80": (80, Variant(BF16, BF16, "vector", False, True, False, True, False, True, False, AMPERE)),
    "sm_80 general": (80, Variant(BF16, BF16, "strided", False, False, False, True, False, False, False, GENERAL)),
}
TOKENS = re.compile(
    r"ld\.acquire\.sys|st\.release\.sys\.global\.b64 \[addr\]|atom\.acq_rel\.gpu|bar\.sync|fence\.proxy\.async;"
    r"|cp\.async\.bulk\.wait_group 0|cp\.async\.bulk\.tensor\.2d\.(?:shared|global)|cp\.async\.c[ag]\."
)


def compiled(name: str) -> Any:
    capability, variant = VARIANTS[name]
    kernel, types, constants, aligned = specify(variant)
    c = variant.config
    return compile_offline(kernel, types, constants, aligned, capability, warps=c.warps, stages=c.stages)


def check_order(ptx: str, bulk: bool) -> tuple[int, int]:
    """Assert the memory order that the kernel's head promises; return how many waits and raises there are."""
    words = [m.group() for m in TOKENS.finditer(ptx)]
    waits = raises = 0
    for i, word in enumerate(words):
        if word == "ld.acquire.sys":
            waits += 1
            wanted = ["bar.sync", "fence.proxy.async;"] if bulk else ["bar.sync"]
            assert words[i + 1 : i + 1 + len(wanted)] == wanted, f"after an acquire: {words[i + 1 : i + 3]}"
        if word == "atom.acq_rel.gpu" and words[i + 1 : i + 2] == ["st.release.sys.global.b64 [addr]"]:
            raises += 1
            wanted = ["cp.async.bulk.wait_group 0", "fence.proxy.async;", "bar.sync"] if bulk else ["bar.sync"]
            assert words[i - len(wanted) : i] == wanted, f"before a release: {words[max(0, i - 3) : i]}"
    loads = [i for i, w in enumerate(words) if w.startswith(("cp.async.bulk.tensor.2d.shared", "cp.async.c"))]
    assert not loads or words.index("ld.acquire.sys") < loads[0], "operands are loaded before the first wait"
    return waits, raises


@pytest.mark.parametrize("name", VARIANTS)
def test_memory_order(name: str) -> None:
    """Acquire, barrier, proxy fence, loads; stores complete, proxy fence, barrier, count, release. For every segment
    loop of both phases."""
    ptx, bulk = compiled(name).asm["ptx"], VARIANTS[name][1].load == "bulk"
    waits, raises = check_order(ptx, bulk)
    assert waits == raises == 2
    loads = r"cp\.async\.bulk\.tensor\.2d\.shared" if bulk else r"cp\.async\.c[ag]\.|ld\.global"
    assert re.search(loads, ptx)
    # The check sees what is missing.
    for gone in ["fence.proxy.async;", "cp.async.bulk.wait_group 0;"] if bulk else ["bar.sync"]:
        with pytest.raises(AssertionError):
            check_order(ptx.replace(gone, ""), bulk)


@pytest.mark.parametrize("name", ["sm_90 fold", "sm_90 two an SM", "sm_80", "sm_100"])
def test_no_spills(name: str, tmp_path: Path) -> None:
    """Registers suffice: nothing lives on the stack, and as many CTAs as intended fit on one SM."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not tool.exists():
        pytest.skip(f"triton {triton.__version__} ships no cuobjdump")
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(compiled(name).asm["cubin"])
    said = subprocess.run([str(tool), "-res-usage", str(cubin)], capture_output=True, text=True, check=True, timeout=60)
    found = re.search(r"REG:(\d+) STACK:(\d+)", said.stdout + said.stderr)
    assert found and int(found.group(2)) == 0, said.stdout
    config = VARIANTS[name][1].config
    assert config.ctas * config.warps * 32 * int(found.group(1)) <= 65536, said.stdout


def test_parameters_of_maps_are_never_read() -> None:
    """Triton passes shape and strides after every map; the launcher leaves them zero because no kernel looks at
    them."""
    ptx = compiled("sm_90 fold").asm["ptx"]
    kernel, types, constants, _ = specify(VARIANTS["sm_90 fold"][1])
    at, extras = 0, []
    for name in [n for n in kernel.arg_names if n not in constants]:
        is_map = types[name].startswith("tensordesc")
        extras += list(range(at + 1, at + 5)) if is_map else []
        at += 5 if is_map else 1
    assert parameters(ptx) == at + 2 and len(extras) == 24
    read = {int(x) for x in re.findall(r"ld\.param[^;]*gemm_kernel_param_(\d+)", ptx)}
    assert read and not read & set(extras)


# -- the host side
# -------------------------------------------------------------------------------------------------------
class FakeDriver:
    """CPU memory in the place of a GPU's; launches are recorded."""

    def __init__(self, capability: int = 90, sms: int = 132) -> None:
        self._capability, self._sms = capability, sms
        self.launches: list[tuple[int, int, int]] = []
        self.maps: list[tuple[Any, ...]] = []
        self.loads = self.uploads = self.beside = 0
        self.followed: list[tuple[int, int]] = []
        self.captures: set[int] = set()

    def capability(self) -> int:
        return self._capability

    def multiprocessors(self) -> int:
        return self._sms

    def shared_nbytes(self) -> int:
        return 227 << 10

    def load(self, cubin: bytes, name: str, shared_nbytes: int) -> int:
        assert cubin[:4] == b"\x7fELF"
        self.loads += 1
        return self.loads

    def launch(self, function: int, grid: int, threads: int, shared_nbytes: int, stream: int, params: int) -> None:
        self.launches.append((grid, stream, params))

    def encode(
        self, into: int, kind: int, address: int, rows: int, cols: int, ld_nbytes: int, box: Any, swizzle: int
    ) -> None:
        assert into % 64 == 0 and address % 16 == 0 and ld_nbytes % 16 == 0 and rows > 0 and cols > 0
        self.maps.append((address, rows, cols, ld_nbytes, box))
        ctypes.memset(into, 0xAB, 128)

    def upload(self, dst: int, src: bytes, stream: int) -> None:
        self.uploads += 1
        ctypes.memmove(dst, src, len(src))

    def upload_now(self, dst: int, src: bytes) -> None:
        self.beside += 1
        ctypes.memmove(dst, src, len(src))

    def follow(self, stream: int, other: int) -> None:
        self.followed.append((stream, other))

    def current_stream(self) -> int:
        return 77

    def capturing(self, stream: int) -> bool:
        return stream in self.captures


class Words(DeviceSlotTable):
    words = 64

    def read(self, writer: int, word: int) -> int:
        return 0

    def close(self) -> None: ...

    def address(self, writer: int, word: int) -> int:
        return 1_000_000 + 1000 * writer + 8 * word

    def peer_address(self, peer: int, word: int) -> int:
        return 2_000_000 + 1000 * peer + 8 * word


class Blind(SlotTable):
    def read(self, writer: int, word: int) -> int:
        return 0

    def close(self) -> None: ...


SMALL = TileConfig(64, 64, 64, 2, 4)
WORDS = Words()


@pytest.fixture(scope="module")
def compiled_once() -> TritonTile:
    """A provider whose kernels are compiled; tests take fresh drivers of the same runtime."""
    provider = TritonTile(config=SMALL, runtime=Runtime(FakeDriver(), CPU))
    provider.prepare(PROBLEM)
    return provider


PROBLEM = GemmProblem(256, 128, 64, "bfloat16", "bfloat16", "cuda", polls=True, addends=True)


@pytest.fixture
def driver(compiled_once: TritonTile) -> FakeDriver:
    fake = FakeDriver()
    compiled_once.runtime.driver = fake
    compiled_once._tables._driver = fake  # type: ignore[union-attr]
    return fake


@pytest.fixture
def kernel(compiled_once: TritonTile, driver: FakeDriver) -> Kernel:
    return compiled_once.prepare(PROBLEM)


def values(launch: tuple[int, int, int], kernel: Kernel, layout: str = "nt") -> dict[str, int]:
    """Arguments of a launch as the kernel will see them (pointers and integers alike 8 bytes)."""
    loaded = kernel._kernels[layout][0]
    order = [n for n in specify_names() if n in loaded.names or n in loaded.maps]
    found, at = {}, 0
    for name in order:
        address = ctypes.c_uint64.from_address(launch[2] + 8 * at).value
        if name not in loaded.maps:
            found[name] = ctypes.c_int64.from_address(address).value
        at += 5 if name in loaded.maps else 1
    return found


def specify_names() -> Sequence[str]:
    from commbackend.gemm.triton_kernels import gemm_kernel

    names: Sequence[str] = gemm_kernel.arg_names
    return names


def table_of(v: dict[str, int]) -> list[list[int]]:
    """The segments' words of a launch's table, as they stand in memory."""
    base = v["table"] + 8 * LAUNCH_WORDS
    read = lambda at, n: list((ctypes.c_int64 * n).from_address(at))  # noqa: E731
    return [read(base + 8 * SEGMENT_WORDS * i, SEGMENT_WORDS) for i in range(v["segments"])]


def words_at(address: int, count: int) -> list[int]:
    return list((ctypes.c_int64 * count).from_address(address))


def gathered(seq: int, rows: Sequence[int] = (64, 100, 0, 30)) -> list[GemmSegment]:
    """Own rows in x, the others in a heap; segment i > 0 waits for word i of rank i."""
    x, heap = TENSORS["x"], TENSORS["heap"]
    segments, at = [GemmSegment(x[: rows[0]], TENSORS["w"], TENSORS["out"][: rows[0]])], rows[0]
    for i, n in enumerate(rows[1:], 1):
        part = slice(at, at + n)
        ready = ((i, Slot(WORDS, i, seq)),)
        segments.append(GemmSegment(heap[part], TENSORS["w"], TENSORS["out"][part], ready=ready))
        at += n
    return segments


TENSORS = {
    name: torch.zeros(*shape, dtype=BF16)
    for name, shape in {
        "x": (128, 64), "heap": (256, 64), "w": (128, 64), "w2": (128, 64), "out": (256, 128), "send": (256, 128),
    }.items()
}  # fmt: skip


def test_a_gathered_product_is_one_launch(kernel: Kernel, driver: FakeDriver) -> None:
    """Own rows and gathered rows are two phases of one launch; the table says where each segment is and what it waits
    for."""
    kernel(gathered(9))
    (launch,) = driver.launches
    v = values(launch, kernel)
    assert launch[1] == 77 and (v["split"], v["segments"], v["seals"], v["base"]) == (1, 4, 1, 9)
    rows = table_of(v)
    assert [r[:4] for r in rows] == [[64, 0, 0, 0], [100, 0, 0, 2], [0, 0, 0, 6], [30, 100, 100, 6]]
    for i, r in enumerate(rows):
        assert r[4] == (1 if i else 0) and r[6] == 0
        if i:
            assert words_at(r[5], 4) == [WORDS.address(i, i), 0, i, i]
    assert len({r[11] for r in rows}) == 4 and all(words_at(r[11], 1) == [0] for r in rows)
    heap, out = TENSORS["heap"], TENSORS["out"]
    assert (heap[64:].data_ptr(), 130, 64, 128, (64, 64)) in driver.maps
    assert (out[64:].data_ptr(), 130, 128, 256, (64, 64)) in driver.maps


def test_done_slots_and_addends(kernel: Kernel, driver: FakeDriver) -> None:
    """Send buffer first, own rows last with addends: one launch, every list in place."""
    heap, w, send, out = TENSORS["heap"], TENSORS["w"], TENSORS["send"], TENSORS["out"]
    adds = (torch.zeros(64, 128, dtype=BF16), torch.zeros(64, 256, dtype=BF16)[:, :128])
    kernel([
        GemmSegment(heap[64:128], w, send[64:128], done=((1, Slot(WORDS, 3, 5)), (2, Slot(WORDS, 4, 7)))),
        GemmSegment(heap[:64], w, out[:64], addends=adds, ready=((1, Slot(WORDS, 9, 4)),)),
    ])  # fmt: skip
    v = values(driver.launches[0], kernel)
    first, second = table_of(v)
    assert len(driver.launches) == 1 and v["split"] == 1
    lists = words_at(first[7], 4)
    assert first[6] == 2 and lists[0::2] == [WORDS.peer_address(1, 3), WORDS.peer_address(2, 4)]
    assert [v["base"] + d for d in lists[1::2]] == [5, 7]
    # The map of addends covers the first one's memory; the other lies elsewhere.
    assert second[8] == 2
    assert words_at(second[9], 6) == [adds[0].data_ptr(), 128, 0, adds[1].data_ptr(), 256, -1]
    assert (adds[0].data_ptr(), 64, 128, 256, (64, 64)) in driver.maps
    assert v["base"] + words_at(second[5], 4)[1] == 4


def test_ten_thousand_calls_compile_and_upload_nothing(
    compiled_once: TritonTile, kernel: Kernel, driver: FakeDriver
) -> None:
    """Sequence numbers grow through 1 and multiples of 16: the same kernels, the same table, the same maps."""
    kernel(gathered(0))
    before = compiled_once.compilations, driver.loads, driver.uploads, len(driver.maps)
    heap, words = TENSORS["heap"], [((i, Slot(WORDS, i, 0)),) for i in range(4)]
    segments = gathered(0)
    for seq in range(1, 10_001):
        for i in range(1, 4):
            segments[i].ready = ((i, Slot(WORDS, i, seq)),)
        kernel(segments)
    assert (compiled_once.compilations, driver.loads, driver.uploads, len(driver.maps)) == before
    assert len(driver.launches) == 10_001 and values(driver.launches[-1], kernel)["base"] == 10_000
    assert len(words) == 4 and heap.is_contiguous()


def test_sm_limit_and_reserve(kernel: Kernel, driver: FakeDriver) -> None:
    """A launch with slots leaves the reserve free; an explicit limit is kept; never more CTAs than tiles."""
    w, big = TENSORS["w"], torch.zeros(64 * 132, 64, dtype=BF16)
    out = torch.zeros(64 * 132, 128, dtype=BF16)
    kernel([GemmSegment(big, w, out, done=((0, Slot(WORDS, 0, 1)),))])
    kernel([GemmSegment(big, w, out)])
    kernel([GemmSegment(big, w, out)], sm_limit=10)
    kernel(gathered(3))
    assert [launch[0] for launch in driver.launches] == [132 - RESERVED_SMS, 132, 10, 8]


def test_other_weights_are_other_launches(kernel: Kernel, driver: FakeDriver) -> None:
    """Order is kept: segments of another b come in a launch of their own, a third memory of a too."""
    x, heap, out, send = (TENSORS[n] for n in ("x", "heap", "out", "send"))
    a, b = TENSORS["w"], TENSORS["w2"]
    kernel(
        [GemmSegment(x[:64], a, out[:64]), GemmSegment(x[:64], b, send[:64]), GemmSegment(heap[:64], b, send[64:128])]
    )
    assert [values(launch, kernel)["segments"] for launch in driver.launches][-1] == 2 and len(driver.launches) == 2
    third = torch.zeros(64, 64, dtype=BF16)
    driver.launches.clear()
    kernel([GemmSegment(t[:64], a, out[i * 64 : i * 64 + 64]) for i, t in enumerate((x, heap, third))])
    assert len(driver.launches) == 2


def test_captured_launches_have_tables_of_their_own(
    compiled_once: TritonTile, kernel: Kernel, driver: FakeDriver
) -> None:
    """Written beside the capture, shared with no eager launch (a graph may be replayed on any stream), never given
    away."""
    kernel(gathered(1, (64, 32)), stream=5)
    eager = values(driver.launches[-1], kernel)
    driver.captures.add(5)
    before = driver.uploads
    kernel(gathered(2, (64, 32)), stream=5, epoch=4096)
    kept = values(driver.launches[-1], kernel)
    assert kept["epoch"] == 4096 and kept["table"] != eager["table"]
    assert [r[:5] for r in table_of(kept)] == [[64, 0, 0, 0, 0], [32, 0, 0, 2, 1]]
    assert all(kept["table"] < r[5] < kept["table"] + 8 * 2048 for r in table_of(kept))
    assert (driver.uploads, driver.beside) == (before, 1), "a copy was captured"
    kernel(gathered(3, (64, 32)), stream=5, epoch=4096)
    assert values(driver.launches[-1], kernel)["table"] == kept["table"] and driver.beside == 1
    driver.captures.clear()
    for i in range(300):
        kernel(gathered(1, (64, 1 + i % 60, 1 + i // 60)), stream=5)
        assert values(driver.launches[-1], kernel)["table"] != kept["table"]
    driver.followed.clear()
    for i in range(200):
        kernel(gathered(1, (64, 1 + i % 60, 1 + i // 60)), stream=6)
    assert (6, 5) in driver.followed, "a table of another stream is taken only behind that stream's work"
    driver.captures.add(5)
    with pytest.raises(Unsupported, match="all 128 launch tables are in use, 1 of them by captured graphs"):
        kernel(gathered(1, (64, 61)), stream=5)


def test_faults_are_raised_and_sticky(compiled_once: TritonTile, kernel: Kernel, driver: FakeDriver) -> None:
    """The host's mirror of the record becomes an exception with peer, word, wanted and seen, at every call until
    cleared."""
    host = compiled_once.runtime.fault.host
    host[:5] = torch.tensor([1, 3, 12, 9, 8])
    for _ in range(2):
        with pytest.raises(CommTimeout, match="rank 3: word 12 is 8, wanted 9") as e:
            kernel(gathered(9))
        assert (e.value.rank, e.value.wanted, e.value.seen) == (3, 9, 8)
    host[:5] = torch.tensor([2, 1, 0, 9, 1 << 62])
    with pytest.raises(CommAborted, match="rank 1"):
        compiled_once.check()
    assert not driver.launches
    compiled_once.runtime.fault.clear()
    kernel(gathered(9))
    assert len(driver.launches) == 1


def test_a_bias_of_own_rows_alone_is_one_launch(compiled_once: TritonTile, driver: FakeDriver) -> None:
    """Segments with and without the bias share a launch, in any order; another bias comes in one of its own."""
    heap, w, send, out = (TENSORS[n] for n in ("heap", "w", "send", "out"))
    one, other = torch.zeros(128, dtype=BF16), torch.zeros(128, dtype=BF16)
    kernel = compiled_once.prepare(dataclasses.replace(PROBLEM, bias=True))
    peers = GemmSegment(heap[64:128], w, send[64:128], done=((1, Slot(WORDS, 3, 5)),))
    for segments in (
        [peers, GemmSegment(heap[:64], w, out[:64], one)],
        [GemmSegment(heap[:64], w, out[:64], one), peers],
    ):
        driver.launches.clear()
        kernel(segments)
        (launch,) = driver.launches
        v = values(launch, kernel)
        assert v["bias"] == one.data_ptr()
        assert [r[12] for r in table_of(v)] == [int(s.bias is not None) for s in segments]
    driver.launches.clear()
    kernel([GemmSegment(heap[:64], w, out[:64], one), peers, GemmSegment(heap[64:128], w, out[64:128], other)])
    assert len(driver.launches) == 2 and values(driver.launches[-1], kernel)["bias"] == other.data_ptr()
    kernel([peers])
    assert values(driver.launches[-1], kernel)["bias"] == 0


def test_bad_segments(kernel: Kernel, driver: FakeDriver) -> None:
    """Each is refused before anything is launched."""
    x, w, out = TENSORS["x"], TENSORS["w"], TENSORS["out"]
    bad = {
        "want \\(rows, k\\)": GemmSegment(x, w, out),
        "prepared for bfloat16": GemmSegment(x.half(), w.half(), out[:128].half()),
        "column stride": GemmSegment(x, w, torch.zeros(128, 128, dtype=BF16).t()),
        "bias, addends, scales, slots": GemmSegment(x, w, out[:128], bias=torch.zeros(128, dtype=BF16)),
        "addend": GemmSegment(x, w, out[:128], addends=(out[:64],)),
        "no device address": GemmSegment(x, w, out[:128], ready=((0, Slot(Blind(), 0, 1)),)),
    }
    for text, segment in bad.items():
        with pytest.raises(ShapeError, match=text):
            kernel([segment])
    assert not driver.launches


def test_layouts(kernel: Kernel, driver: FakeDriver) -> None:
    """Aligned operands take the fast variants, b by columns its own, the rest the general one."""
    x, out = TENSORS["x"], TENSORS["out"]
    chosen = {}
    for name, a, b in (
        ("nt", x, torch.zeros(128, 64, dtype=BF16)), ("nn", x, torch.zeros(64, 128, dtype=BF16).t()),
        ("strided", torch.zeros(64, 128, dtype=BF16).t(), torch.zeros(128, 64, dtype=BF16)),
        ("strided", torch.zeros(128, 65, dtype=BF16)[:, :64], torch.zeros(128, 64, dtype=BF16)),
        ("strided", x[:, :63], torch.zeros(128, 63, dtype=BF16)), ("strided", x[:1].expand(128, 64), torch.zeros(128,
        64, dtype=BF16)),
    ):  # fmt: skip
        kernel([GemmSegment(a, b, out[:128])])
        loaded = kernel._kernels[name][0]
        params = ctypes.addressof(loaded._params)
        chosen[name] = driver.launches[-1][2] == params
        assert chosen[name], f"{name}: another variant was launched"
    assert set(chosen) == {"nt", "nn", "strided"}


def test_supports_and_probe() -> None:
    """Reasons in one line; no CUDA device here."""
    provider = TritonTile(runtime=Runtime(FakeDriver(80), CPU))
    for change, text in (
        ({"device": "cpu"}, "CUDA"), ({"dtype": "float64"}, "float64"), ({"out_dtype": "float16"},
        "bfloat16 or float32"),
        ({"dtype": "float8_e4m3fn", "k": 24}, "k % 16"), ({"dtype": "float8_e4m3fn"}, "scales"), ({"scales": True},
        "fp8"),
    ):  # fmt: skip
        fields = {"m": 16, "n": 64, "k": 64, "dtype": "bfloat16", "out_dtype": "bfloat16", "device": "cuda"} | change
        reason = provider.supports(GemmProblem(**fields))  # type: ignore[arg-type]
        assert reason and text in reason, (change, reason)
    assert provider.supports(GemmProblem(3, 5, 7, "float16", "float32", "cuda", polls=True)) is None
    with pytest.raises(Unsupported, match="float64"):
        provider.prepare(GemmProblem(3, 5, 7, "float64", "float64", "cuda"))
    fp8 = GemmProblem(16, 64, 64, "float8_e5m2", "bfloat16", "cuda", scales=True)
    with pytest.raises(Unsupported, match=r"this device has 8\.0"):
        provider.prepare(fp8)
    with pytest.raises(Unavailable, match="CUDA"):
        TritonTile.probe(CPU)
    if not torch.cuda.is_available():
        with pytest.raises(Unavailable, match="no CUDA device"):
            TritonTile.probe(torch.device("cuda"))


@pytest.mark.parametrize("shared_kib", [99, 163, 227])
@pytest.mark.parametrize("capability", [80, 86, 89, 90, 100, 120])
def test_choice_fits(capability: int, shared_kib: int) -> None:
    """Whatever the problem, the chosen tile fits in shared memory; wide products get wide tiles where there is room."""
    for dtype in ("bfloat16", "float8_e4m3fn"):
        for m in (1, 64, 512, 8192):
            for out in ("bfloat16", "float32"):
                problem = GemmProblem(m, 8192, 7168, dtype, out, "cuda", scales=dtype != "bfloat16")
                config = choose(problem, capability, shared_kib << 10)
                sizes = 1 if dtype != "bfloat16" else 2, 4 if out == "float32" else 2
                assert config.shared_nbytes(*sizes, bulk=capability >= 90) <= shared_kib << 10
                if m == 8192 and shared_kib == 227:
                    assert config.bm * config.bn >= 128 * 128


def test_reduce_arguments() -> None:
    """What was not prepared, or does not fit, is refused."""
    kernel = ReduceKernel(Runtime(FakeDriver(), CPU), BF16, 2)
    a = torch.zeros(4, 8, dtype=BF16)
    with pytest.raises(ShapeError, match="prepared for 2"):
        kernel(a, [a])
    with pytest.raises(ShapeError, match="partial 1"):
        kernel(a, [a, a.float()])
    with pytest.raises(Unsupported, match="17 partials"):
        ReduceKernel(Runtime(FakeDriver(), CPU), BF16, 18)
    with pytest.raises(ShapeError, match="bias"):
        kernel(a, [a, a], bias=a)
    with pytest.raises(Unsupported, match="float64"):
        ReduceKernel(Runtime(FakeDriver(), CPU), torch.float64, 2)


def test_what_was_measured_is_chosen() -> None:
    """On an H200: small launches in one wave, two tiles an SM where an epilogue is to be hidden, wide tiles between."""
    wanted = {
        (64, 7168, 8192, "consume"): (64, 256, 1), (64, 4096, 1792, "fold"): (64, 128, 1),
        (512, 3584, 4096, "consume"): (128, 128, 1), (512, 8192, 3584, "fold"): (128, 128, 2),
        (2048, 8192, 3584, "fold"): (128, 256, 1), (2048, 8192, 3584, "produce"): (128, 256, 1),
        (4096, 7168, 8192, "consume"): (128, 256, 1), (8192, 12288, 12288, "consume"): (128, 128, 2),
    }  # fmt: skip
    for (m, n, k, form), shape in wanted.items():
        problem = GemmProblem(m, n, k, "bfloat16", "bfloat16", "cuda", polls=True, addends=form == "fold")
        config = choose(problem, 90, 227 << 10)
        assert (config.bm, config.bn, config.ctas) == shape, (m, n, k, form)
    fp8 = GemmProblem(8192, 8192, 7168, "float8_e4m3fn", "bfloat16", "cuda", scales=True)
    assert [choose(fp8, 90, 227 << 10, exact_fp8=exact).bm for exact in (True, False)] == [256, 128]
    few = GemmProblem(512, 3584, 4096, "bfloat16", "bfloat16", "cuda", polls=True)
    assert choose(few, 90, 227 << 10, sms=64) != choose(few, 90, 227 << 10)


# -- numbers
# -------------------------------------------------------------------------------------------------------------
def test_interpreted() -> None:
    """The kernels' arithmetic, with the real host side, in Triton's interpreter (a process of its own: the switch is
    read at import)."""
    root = Path(__file__).parents[1]
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(root)}
    said = subprocess.run(
        [sys.executable, "-W", "ignore", str(root / "tests" / "triton_interpreted.py")],
        env=env, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert said.returncode == 0, said.stdout[-2000:] + said.stderr[-4000:]
    assert said.stdout.count("ok ") == 18
