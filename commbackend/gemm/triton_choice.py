"""Tile shapes of the polling GEMM, and which one a problem gets: a small table that was measured, not searched at run
time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from ..contract import GemmProblem

__all__ = ["FP8", "GENERAL", "RESERVED_SMS", "TileConfig", "choose"]

#: SMs that a polling launch leaves free unless told otherwise.
RESERVED_SMS = 4
FP8 = ("float8_e4m3fn", "float8_e5m2")


@dataclass(frozen=True, slots=True)
class TileConfig:
    """Shape of the kernel: a tile is ``bm`` x ``bn``, taken in steps of ``bk``.

    Attributes:
        stages, warps: As Triton means them.
        group: Row blocks that share columns of b in L2.
        split: Store the tile in two halves: half the shared memory for the result.
        device_maps: Tensor maps are made by the kernel instead of by the host; its launches must not overlap then.
        ctas: Tiles in flight on one SM; what one does between two tiles hides behind the other.
    """

    bm: int
    bn: int
    bk: int
    stages: int
    warps: int
    group: int = 8
    split: bool = False
    device_maps: bool = False
    ctas: int = 1

    def shared_nbytes(self, itemsize: int, out_itemsize: int, *, bulk: bool = True) -> int:
        """Estimate of the shared memory needed, from above. Without TMA the result reuses the operands' space, and one
        stage is in registers.
        """
        tile = self.bm * self.bn * out_itemsize // (2 if self.split else 1)
        step = (self.bm + self.bn) * self.bk * itemsize
        return self.ctas * ((self.stages * step + tile if bulk else max((self.stages - 1) * step, tile)) + 256)


class _Tiles(NamedTuple):
    """What there is to choose from on one kind of GPU.

    Attributes:
        small: For launches whose tiles all run at once, tried in this order.
        large: For all others.
        heavy: The same from ``_HEAVY`` multiply-adds on.
    """

    small: tuple[TileConfig, ...]
    large: TileConfig
    heavy: TileConfig


_ONE_WARPGROUP, _WIDE_TILE = TileConfig(64, 128, 128, 4, 4), TileConfig(128, 256, 64, 3, 8)
_TWO_AN_SM = TileConfig(128, 128, 64, 3, 4, split=True, ctas=2)
# Measured on an H200 (torch 2.11, triton 3.6). bf16: m = 64...8192, n = 3584...12288, k = 1792...12288, consuming,
# producing and folding one or two chunks of one peer. What is chosen is within 4 % of the best of ten shapes, mostly
# within 1 % (but 8 % for 64 rows x 7168 in two segments). Two tiles an SM hide an epilogue with addends (20 % at 512 x
# 8192) and win up to 5 % where the chip is short of power; 128 x 256 wins by 1-2 % between, and by 2-3 % with addends
# that come through a tensor map (benchmarks/results/2026-12-01/h200-gemm-fold.json).
# fp8, 2048 and 8192 x 8192 x 7168: 256 x 128 is 9 % better with exact sums, 128 x 256 is 3 % better without.
_HOPPER = _Tiles(
    (_ONE_WARPGROUP, TileConfig(128, 128, 64, 4, 4), TileConfig(64, 256, 64, 4, 4, split=True), _TWO_AN_SM),
    _WIDE_TILE,
    _TWO_AN_SM,
)
_SMALL_FP8 = (_ONE_WARPGROUP, TileConfig(128, 128, 128, 4, 8))
_TALL_FP8, _WIDE_FP8 = TileConfig(256, 128, 128, 4, 8, split=True), TileConfig(128, 256, 128, 3, 8)
_HOPPER_EXACT_FP8 = _Tiles(_SMALL_FP8, _TALL_FP8, _TALL_FP8)
_HOPPER_FAST_FP8 = _Tiles(_SMALL_FP8, _WIDE_FP8, _WIDE_FP8)
# Never measured.
_BLACKWELL_WIDE, _AMPERE_WIDE = TileConfig(128, 256, 64, 3, 8, split=True), TileConfig(128, 256, 32, 4, 8, split=True)
_BLACKWELL = _Tiles((TileConfig(128, 128, 64, 4, 4),), _BLACKWELL_WIDE, _BLACKWELL_WIDE)
_AMPERE = _Tiles(
    (TileConfig(64, 128, 32, 4, 4, split=True), TileConfig(128, 128, 32, 4, 8, split=True)), _AMPERE_WIDE, _AMPERE_WIDE
)
_ADA_FP8 = _Tiles((), TileConfig(128, 128, 64, 3, 8), TileConfig(128, 128, 64, 3, 8))
#: For any layout, on any GPU.
GENERAL = TileConfig(64, 64, 32, 2, 4)
_HEAVY = 1 << 38


def choose(
    problem: GemmProblem, capability: int, shared_nbytes: int, sms: int = 132, exact_fp8: bool = True
) -> TileConfig:
    """Return the tile shape for ``problem`` on a GPU of ``sms`` SMs, as deep as its shared memory allows."""
    fp8, out_itemsize = problem.dtype in FP8, 4 if problem.out_dtype == "float32" else 2
    if capability >= 90:
        wide = _BLACKWELL if capability >= 100 else _HOPPER
        tiles = (_HOPPER_EXACT_FP8 if exact_fp8 else _HOPPER_FAST_FP8) if fp8 else wide
    else:
        tiles = _ADA_FP8 if fp8 else _AMPERE
    heavy = problem.m * problem.n * problem.k >= _HEAVY
    at_once = [c for c in tiles.small if _tiles(problem, c) <= c.ctas * (sms - RESERVED_SMS)]
    # What follows the second serves GPUs with less shared memory.
    for config in (*at_once, tiles.heavy if heavy else tiles.large, *reversed(tiles.small)):
        for stages in range(config.stages, 1, -1):
            fitted = replace(config, stages=stages)
            if fitted.shared_nbytes(1 if fp8 else 2, out_itemsize, bulk=capability >= 90) <= shared_nbytes:
                return fitted
    return GENERAL


def _tiles(problem: GemmProblem, config: TileConfig) -> int:
    """Tiles of a launch; one that polls is taken for three segments, as they end in tiles of their own: half of the
    rows and two quarters.
    """
    segments = (problem.m // 2, problem.m // 4, problem.m // 4) if problem.polls else (problem.m,)
    return sum(-(-max(m, 1) // config.bm) for m in segments) * -(-problem.n // config.bn)
