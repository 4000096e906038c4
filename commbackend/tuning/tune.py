"""``commbackend tune``: measure what steps cost here, and which candidates are fastest for the calls of a model.

Two levels, both collective and both only when asked:

* ``measure_costs``: products, copies, flags and sums of this machine and transport, in seconds: the table by which
  ``cost`` predicts any plan.
* ``tune``: for every call, the candidates that the table ranks first, the rule's own choice and the sequence are run in
  turns, and the fastest is kept; the sequence where nothing is more than 2 % faster. Every time is the slowest rank's
  median, agreed on by all ranks, so that all keep the same.

Results go to the cache (``choices``), where the next run of the same kind finds them, or to a file.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import logging
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .. import schedules
from ..commands.record import sizes
from ..config import cache_folder, launcher
from ..errors import CommBackendError, ConfigError, Unsupported
from ..ops.unfused import unfused
from ..plan import Knobs, Problem
from . import explaining
from .choices import Choices, Entry, cache_path, identity, save
from .cost import predict
from .costs import CostTable, Topology
from .keys import key_of

if TYPE_CHECKING:
    from torch import Tensor

    from ..communicator import Communicator

__all__ = ["Call", "agreed", "calls_of_file", "main", "measure_costs", "ranked", "topology_of", "tune"]

log = logging.getLogger("commbackend")

#: A layer's name, the phase of its call, and the call.
Call = tuple[str, str, Problem]
#: Measures one call on this rank: its time in microseconds.
Clock = Callable[[Callable[[], object]], float]
#: A candidate must beat the sequence by more than this, or the sequence is kept.
_MARGIN = 0.02
_LEAST_ROUNDS, _MOST_ROUNDS = 5, 50
#: GPU cycles of a sleep that hides the launches of one call: about 0.3 ms.
_SLEEP_CYCLES = 500_000


def topology_of(comm: Communicator) -> Topology:
    """The domains of a communicator's ranks, as proven when it was made."""
    return explaining.topology_of(comm.choice.hosts if comm.choice is not None else (), comm.size)


def agreed(comm: Communicator, values: Sequence[float]) -> list[float]:
    """Every value's largest over ranks: the same list on all of them. Collective."""
    if comm.size == 1:
        return list(values)
    form = struct.Struct(f"<{len(values)}d")
    raws = comm.group.exchange(form.pack(*values), what="tuning")
    if any(len(raw) != form.size for raw in raws):
        raise CommBackendError("ranks tune different calls: pass the same ones, in the same order, on all ranks")
    return [max(column) for column in zip(*(form.unpack(raw) for raw in raws), strict=True)]


# -- one call
def host_clock(call: Callable[[], object]) -> float:
    """Time of a call on a CPU, microseconds."""
    start = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - start) / 1e3


def device_clock(call: Callable[[], object]) -> float:
    """Time of a call on a GPU by events, its launches hidden behind a sleep, microseconds."""
    import torch

    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    torch.cuda._sleep(_SLEEP_CYCLES)
    begin.record()
    call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e3


def _clock(comm: Communicator) -> Clock:
    return device_clock if comm.device.type == "cuda" else host_clock


def _tensors(comm: Communicator, problem: Problem) -> dict[str, Tensor]:
    """Random tensors for a call, by the names its program gives them."""
    import torch

    program = schedules.program(problem, comm.rank, comm.caps, schedules.default_knobs(problem, comm.caps))
    found = {}
    for b in program.buffers:
        if b.space in ("input", "output"):
            values = torch.randn(b.rows, b.cols, device=comm.device) / max(1, b.cols) ** 0.5
            found[b.name] = values.to(getattr(torch, b.dtype))
    return found


def ranked(comm: Communicator, problem: Problem, costs: CostTable | None, most: int) -> list[Knobs]:
    """The candidates worth measuring: the rule's choice, the sequence, and the ``most`` that ``costs`` puts first.

    The same on all ranks where ``costs`` is.
    """
    caps, where = comm.caps, topology_of(comm)
    polls = comm.config.polling != "never" and comm.chooser.polls(problem.dtype)
    legal = schedules.candidates(problem, caps, polls)
    if where.domain < comm.size:  # in turn round the group, or the own host first
        legal += [dataclasses.replace(k, domain=where.domain) for k in legal]
    kept = [comm.chooser.knobs(problem), schedules.default_knobs(problem, caps, polls)]
    kept += [k for k in legal if k.schedule in ("sequence", "one_shot_kernel")]
    if costs is None:
        predicted = [(float(i), k) for i, k in enumerate(legal)]
    else:
        predicted = sorted(
            ((predict(problem, caps, k, costs, where).time_us, k) for k in legal), key=lambda p: (p[0], str(p[1]))
        )
    return list(dict.fromkeys([*kept, *(k for _, k in predicted[:most])]))


def tune(
    comm: Communicator,
    calls: Iterable[Call],
    *,
    costs: CostTable | None = None,
    seconds: float = 1.0,
    most: int = 6,
    clock: Clock | None = None,
) -> Choices:
    """Measure ``calls`` and use what was fastest from now on. Collective: all ranks pass the same calls.

    Args:
        costs: Ranks the candidates; None: the communicator's own table, or no ranking.
        seconds: Time for each call, all candidates together.
        most: Candidates beside the rule's choice and the sequence.
        clock: How a rank times one call; None: the host's clock on CPUs, events on GPUs.

    Returns:
        All choices of the communicator, the new ones included; the same on all ranks.

    Raises:
        Unsupported: ``torch.use_deterministic_algorithms(True)`` holds: what is measured may differ from run to run.
    """
    import torch

    if torch.are_deterministic_algorithms_enabled():
        raise Unsupported(
            "tune: torch.use_deterministic_algorithms(True) holds, and measured choices may differ from run to run;"
            " tune without it, export the choices, and load the file (choices=)"
        )
    chooser = comm.chooser
    known = chooser.choices or Choices(machine=identity(comm))
    costs = costs or known.costs
    entries = []
    for layer, phase, problem in calls:
        with chooser.within(layer, phase):
            found = _fastest(comm, problem, ranked(comm, problem, costs, most), seconds, clock or _clock(comm))
        entries.append(dataclasses.replace(found, layer=layer, phase=phase if layer else ""))
    chooser.use(known.merged([*_for_any_layer(entries), *entries], costs))
    assert chooser.choices is not None
    return chooser.choices


def _stock_serves(comm: Communicator, problem: Problem) -> bool:
    """Whether torch.distributed's own collectives may serve ``problem``: gathers move bytes, but sums have an order."""
    known = problem.op == "all_gather_matmul" or (
        comm.config.numerics == "library" and problem.op in ("matmul_reduce_scatter", "matmul_all_reduce")
    )
    return known and comm.size > 1 and comm.stock.reaches


def _fastest(comm: Communicator, problem: Problem, knobs: Sequence[Knobs], seconds: float, clock: Clock) -> Entry:
    """Run the candidates in turns and keep the fastest. Collective."""
    tensors = _tensors(comm, problem)
    times: list[list[float]] = [[] for _ in knobs]
    stock_times: list[float] = []
    stock = _stock_serves(comm, problem)

    def turn(note: bool) -> float:
        began = time.perf_counter()
        for i, candidate in enumerate(knobs):
            comm.chooser.set(problem, candidate)
            comm.barrier()
            us = clock(lambda: comm.run(problem, tensors))
            if note:
                times[i].append(us)
        if stock:
            comm.barrier()
            us = clock(lambda: unfused(comm, problem, tensors, stock=True))
            if note:
                stock_times.append(us)
        return time.perf_counter() - began

    try:
        turn(False)
        round_s = agreed(comm, [turn(False)])[0]
        for _ in range(max(_LEAST_ROUNDS, min(_MOST_ROUNDS, int(seconds / max(round_s, 1e-6))))):
            turn(True)
    finally:
        comm.chooser.set(problem, None)
    medians = agreed(comm, [statistics.median(t) for t in times])
    best = _best(list(zip(medians, knobs, strict=True)))
    if stock and (stock_us := agreed(comm, [statistics.median(stock_times)])[0]) < best[0]:
        sequence = next((k for k in knobs if k.schedule == "sequence"), best[1])
        others = sorted((us, str(k)) for us, k in zip(medians, knobs, strict=True))
        named = tuple((k, us) for us, k in others)
        return Entry(key_of(problem).text, sequence, us=stock_us, others=named, stock=True)
    others = sorted((us, str(k)) for us, k in zip(medians, knobs, strict=True) if k != best[1])
    entry = Entry(key_of(problem).text, best[1], us=best[0], others=tuple((k, us) for us, k in others))
    after = "; ".join(f"{k} {us:.1f}" for us, k in others)
    log.info("commbackend: tuned %s: %s %.1f us; %s", sizes(problem), best[1], best[0], after)
    return entry


def _best(measured: Sequence[tuple[float, Knobs]]) -> tuple[float, Knobs]:
    """The fastest, or the sequence where nothing is clearly faster."""
    best = min(measured, key=lambda m: (m[0], str(m[1])))
    sequence = next((m for m in measured if m[1].schedule == "sequence"), None)
    return sequence if sequence is not None and sequence[0] <= best[0] * (1 + _MARGIN) else best


def _for_any_layer(entries: Sequence[Entry]) -> list[Entry]:
    """For calls outside the layers that were named: of the layers' choices for one key, the one of the longest call."""
    longest: dict[str, Entry] = {}
    for e in entries:
        if e.key not in longest or e.us > longest[e.key].us:
            longest[e.key] = e
    return [dataclasses.replace(e, layer="", phase="") for e in longest.values()]


# -- what steps cost
def measure_costs(comm: Communicator, dtypes: Sequence[str], *, clock: Clock | None = None) -> CostTable:
    """Measure products, copies, flags and sums here, in a few seconds. Collective; the same table on all ranks."""
    clock = clock or _clock(comm)
    cuda = comm.device.type == "cuda"
    products = {dtype: _products(comm, dtype, clock, cuda) for dtype in dtypes}
    copies = [n << 10 for n in ((4, 256, 4096, 65536) if cuda else (4, 64, 1024, 8192))]
    local = _copies(comm, copies, clock)
    link = _gathers(comm, copies, clock, local) if comm.size > 1 else local
    barrier_us = agreed(comm, [_median(lambda: host_clock(comm.barrier), 20)])[0] if comm.size > 1 else 0.0
    table = CostTable(
        device=identity(comm)["device"],
        sources={"all": f"measured over {comm.transport} by commbackend tune"},
        gemm=products,
        copy={"local": local, "link": link},
        launch_us=2.0 if cuda else 1.0,
        signal_us=1.5 if cuda else 2.0,
        wait_us=1.5 if cuda else 2.0,
        flags={"link": 2.0 if cuda else min(barrier_us / 4, 20.0), "network": barrier_us / 2},
        reduce_gbyte_s=_sums(comm, clock),
        gemm_slowdown=1.03 if cuda else 2.0,  # on a CPU whoever copies takes a core from the product
        polling_factor=1.1,
        tile=(128, 256) if cuda else (),
        units=_multiprocessors(comm) if cuda else 0,
        base_us=0.0,
    )
    table.validate()
    return table


def _median(sample: Callable[[], float], count: int) -> float:
    return statistics.median(sample() for _ in range(count))


def _multiprocessors(comm: Communicator) -> int:
    import torch

    return int(torch.cuda.get_device_properties(comm.device).multi_processor_count)


def _products(comm: Communicator, dtype: str, clock: Clock, cuda: bool) -> list[tuple[int, int, int, float]]:
    import torch

    shapes = [(m, n, k) for m in (128, 1024, 8192) for n, k in ((1024, 4096), (4096, 1024), (8192, 8192))]
    if not cuda:
        shapes = [(m, n, k) for m in (64, 256, 1024) for n, k in ((512, 1024), (1024, 512))]
    found = []
    for m, n, k in shapes:
        a, b = (torch.randn(*s, device=comm.device).to(getattr(torch, dtype)) for s in ((m, k), (n, k)))
        out = torch.empty(m, n, dtype=a.dtype, device=comm.device)
        multiply = functools.partial(torch.mm, a, b.t(), out=out)
        multiply()
        found.append((m, n, k, _median(functools.partial(clock, multiply), 5)))
    return [(*shape[:3], us) for shape, us in zip(found, agreed(comm, [f[3] for f in found]), strict=True)]


def _copies(comm: Communicator, nbytes: Sequence[int], clock: Clock) -> list[tuple[float, float]]:
    import torch

    times = []
    for n in nbytes:
        src, dst = (torch.ones(n, dtype=torch.uint8, device=comm.device) for _ in range(2))
        times.append(_median(functools.partial(clock, functools.partial(dst.copy_, src)), 7))
    return _growing(nbytes, agreed(comm, times))


def _gathers(
    comm: Communicator, nbytes: Sequence[int], clock: Clock, local: Sequence[tuple[float, float]]
) -> list[tuple[float, float]]:
    """Copies to a peer, from what a gather in the caller's lane takes beyond its copies within the rank."""
    times = []
    for n, (_, own_us) in zip(nbytes, local, strict=True):
        problem = Problem("all_gather", (n // 1024,) * comm.size, k=1024, dtype="uint8")
        tensors = _tensors_of_bytes(comm, problem)
        samples = []
        for _ in range(9):
            comm.barrier()
            samples.append(clock(functools.partial(comm.run, problem, tensors)))
        times.append(max((statistics.median(samples[2:]) - own_us) / (comm.size - 1), own_us / 2))
    return _growing(nbytes, agreed(comm, times))


def _tensors_of_bytes(comm: Communicator, problem: Problem) -> dict[str, Tensor]:
    import torch

    rows = {"x": problem.rows[0], "out": problem.total}
    return {name: torch.ones(r, problem.k, dtype=torch.uint8, device=comm.device) for name, r in rows.items()}


def _growing(nbytes: Sequence[int], times: Sequence[float]) -> list[tuple[float, float]]:
    """Points of a table: time never falls with size, and what noise made equal grows a little."""
    found: list[tuple[float, float]] = []
    for n, us in zip(nbytes, times, strict=True):
        found.append((float(n), max(us, found[-1][1] * 1.0001 if found else us)))
    return found


def _sums(comm: Communicator, clock: Clock) -> float:
    """Bytes that a sum of two reads and writes, 1e9 a second."""
    import torch

    from ..execution.reduction import reduce_into

    rows = [torch.ones(1024, 1024, device=comm.device) for _ in range(3)]
    us = agreed(comm, [_median(lambda: clock(lambda: reduce_into(rows[0], rows[1:], None)), 7)])[0]
    return 3 * rows[0].nbytes / us / 1e3


# -- calls to tune
def calls_of_file(path: str | Path, size: int) -> list[Call]:
    """Read the layers of a model: ``{"layers": [{"name", "op", "k", "n", "rows", "dtype"}]}``.

    ``rows`` is a list of M, the rows of all ranks together; ``n`` a number or a list; ``dtype`` defaults to bfloat16,
    ``name`` to no name.

    Raises:
        ConfigError: The file, or a layer in it, is something else; it is named.
    """
    from ..layout import split

    try:
        raw = json.loads(Path(path).read_text(encoding="utf-8"))
        found: list[Call] = []
        for number, layer in enumerate(raw["layers"]):
            n = layer.get("n", [])
            wide = (int(n),) if isinstance(n, int) else tuple(map(int, n))
            for m in layer["rows"]:
                rows, dtype = split(int(m), size), str(layer.get("dtype", "bfloat16"))
                made = Problem(str(layer["op"]), rows, k=int(layer["k"]), n=wide, dtype=dtype)
                if (reason := schedules.malformed(made)) is not None:
                    raise ValueError(f"layer {number}: {reason}")
                found.append((str(layer.get("name", "")), "forward", made))
    except (OSError, KeyError, TypeError, ValueError, AttributeError, RecursionError) as e:
        raise ConfigError(f"{path} is not a list of layers: {type(e).__name__}: {e}") from e
    return found


# -- the command
def main(argv: Sequence[str] | None = None) -> int:
    """``commbackend tune``. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="commbackend tune",
        description="Measure what steps cost here and which schedules are fastest, and keep it for later runs: torchrun"
        " --nproc-per-node 2 -m commbackend tune --shapes model.json; or commbackend tune --ranks 2 --shapes FILE.",
    )
    parser.add_argument("--shapes", metavar="FILE", help="layers to tune, JSON (docs/tuning.md); default: costs alone")
    parser.add_argument("--ranks", type=int, default=0, help="start so many ranks here (default: the launcher's)")
    parser.add_argument("--transport", default="", help="default: chosen automatically")
    parser.add_argument("--device", default="", help="cpu or cuda (default: cuda if there is one)")
    parser.add_argument("--dtypes", default="", help="for the costs (default: those of the layers, or bfloat16)")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each call (default 1)")
    parser.add_argument("--most", type=int, default=6, help="candidates beside the rule's choice and the sequence")
    parser.add_argument("--out", metavar="FILE", help="write the choices here instead of the cache")
    parser.add_argument("--json", action="store_true", help="print the choices as JSON")
    options = parser.parse_args(argv)
    if options.ranks and launcher().size == 1:
        return _start(options.ranks, list(sys.argv[1:] if argv is None else argv))
    try:
        return _main(options)
    except CommBackendError as e:
        print(f"commbackend tune: {type(e).__name__}: {e}", file=sys.stderr)
        return 2


def _start(ranks: int, arguments: Sequence[str]) -> int:
    """Run this command as ``ranks`` ranks on this host."""
    if ranks < 1:
        print(f"commbackend tune: --ranks {ranks}: 1 or more", file=sys.stderr)
        return 2
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    rest = [a for a in arguments if a != "tune"]
    return subprocess.run([*command, "-m", "commbackend", "tune", *rest], check=False).returncode


def _main(options: argparse.Namespace) -> int:
    import commbackend

    wanted = {k: v for k, v in (("transport", options.transport),) if v}
    with commbackend.init(device=options.device or None, choices="off", **wanted) as comm:
        calls = calls_of_file(options.shapes, comm.size) if options.shapes else []
        dtypes = [d for d in options.dtypes.split(",") if d] or sorted({p.dtype for _, _, p in calls}) or ["bfloat16"]
        if comm.off:
            raise ConfigError("transport is off: there is nothing to tune")
        machine = identity(comm)
        began = time.perf_counter()
        costs = measure_costs(comm, dtypes)
        took_s = time.perf_counter() - began
        comm.chooser.use(Choices(machine=machine, costs=costs))
        found = tune(comm, calls, costs=costs, seconds=options.seconds, most=options.most)
        if comm.rank == 0:
            folder = cache_folder()
            if folder is None and not options.out:
                raise ConfigError("this user has no home to cache in: set XDG_CACHE_HOME, or give --out")
            path = Path(options.out) if folder is None or options.out else cache_path(folder, machine)
            save(found, path)
            print(found.to_json() if options.json else _text(found, costs, took_s))
            print(f"written: {path}", file=sys.stderr)
    return 0


def _text(found: Choices, costs: CostTable, took_s: float) -> str:
    rate = max(2.0 * m * n * k / us for v in costs.gemm.values() for m, n, k, us in v) / 1e6
    head = f"costs of {costs.device}, measured in {took_s:.1f} s: products up to {rate:,.2f} TFLOP/s, copies to a peer"
    lines = [head + ", ".join(f" {n / 2**20:g} MiB {us:,.0f} us" for n, us in costs.copy["link"])]
    for e in found.entries:
        if e.layer or not any(o.layer and o.key == e.key for o in found.entries):
            others = ", ".join(f"{name} {us:,.1f}" for name, us in e.others[:4])
            lines.append(f"{e.layer or '-'}: {e.key}: {e.knobs} {e.us:,.1f} us; others: {others or 'none'}")
    return "\n".join(lines)
