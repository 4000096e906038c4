"""What users do wrong or suffer: the documented error, on every rank that waits, in time, and nothing stays behind.

Wrong arguments of the ops are in test_ops_errors, wrong settings in test_config and test_select.
"""

from __future__ import annotations

import copy
import os
import pickle
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import traceback
from pathlib import Path

import pytest
import torch
from ops_world import CPU, ints, spmd
from torch.distributed import HashStore

from commbackend import communicator, nn, ops
from commbackend.communicator import Communicator, init
from commbackend.config import resolve
from commbackend.errors import CollectiveMismatch, CommAborted, CommTimeout, ConcurrentUse, PeerDied, ShapeError
from commbackend.group import Group
from commbackend.testing import run_ranks, run_threads
from commbackend.tuning import chooser

ROOT = Path(__file__).resolve().parent.parent


def raised(call, *errors):
    with pytest.raises(errors) as caught:
        call()
    return caught.value


# -- arguments


@pytest.mark.parametrize("rows", [(4.5, 4.0), 4, "44", (4, None), (), (4,) * 100_000], ids=lambda r: str(r)[:12])
def test_rows_that_are_no_counts(rows):
    """Nothing is rounded or read as digits, and the message stays short."""

    def body(comm):
        error = raised(lambda: ops.all_gather(torch.ones(4, 4), comm, rows=rows), ShapeError)
        assert "each of the 2 ranks" in str(error) and len(str(error)) < 500
        assert ops.all_gather(torch.ones(4, 4), comm, rows=torch.tensor([4, 4])).shape == (8, 4)

    spmd(body, 2)


def test_operands_that_are_none():
    def body(comm):
        x, w = torch.ones(4, 4), torch.ones(4, 4)
        for dim in (None, 0.0, "0"):
            raised(lambda dim=dim: ops.all_gather(x, comm, dim=dim), ShapeError)
        assert "weight 0 is NoneType" in str(raised(lambda: ops.all_gather_matmul(x, None, comm), ShapeError))
        assert "bias 0 is int" in str(raised(lambda: ops.all_gather_matmul(x, w, comm, bias=1), ShapeError))
        for rows, dtype in ((-1, torch.float32), (4, "float32")):
            raised(lambda rows=rows, dtype=dtype: comm.reserve(rows, 4, dtype), ShapeError)
        assert ops.all_reduce(x, comm)[0, 0] == 2

    spmd(body, 2)


# -- order


def test_closing_while_others_call():
    """Not a wait until the deadline, but the same clear error on both sides, with the call it is about."""

    def body(comm):
        call = comm.close if comm.rank == 0 else lambda: ops.all_reduce(torch.ones(3), comm)
        start = time.monotonic()
        error = raised(call, CollectiveMismatch)
        assert time.monotonic() - start < 5
        assert "rank 0 called close" in str(error) and "rank 1 called all_reduce" in str(error)
        assert error.seq == 1 and error.op in ("close", "all_reduce")

    spmd(body, 2)


def busy(comm, then):
    """``then(comm)`` at rank 0 while a call of another of its threads waits for rank 1; what both said."""
    said = []
    if comm.rank == 1:
        assert comm.go.wait(20)
        return [type(e) for e in [attempt(lambda: ops.all_reduce(torch.ones(2), comm))]]
    caller = threading.Thread(target=lambda: said.append(attempt(lambda: ops.all_reduce(torch.ones(2), comm))))
    caller.start()
    while not comm._busy.locked():
        time.sleep(0.001)
    time.sleep(0.05)
    said.insert(0, attempt(lambda: then(comm)))
    comm.go.set()
    caller.join(20)
    return [type(s) for s in said]


def attempt(call):
    try:
        return call()
    except Exception as e:
        return e


@pytest.mark.parametrize("then", ["barrier", "reserve"])
def test_a_second_thread_is_refused(then):
    """F070: also where it asks for something that is not an op."""
    go = threading.Event()

    def body(comm):
        comm.go = go
        return busy(comm, lambda c: c.barrier() if then == "barrier" else c.reserve(4, 4, torch.float32))

    assert spmd(body, 2) == [[ConcurrentUse, torch.Tensor], [torch.Tensor]]


def test_closing_while_another_thread_calls():
    """The call is aborted, here and at the peer; the communicator is gone at once."""
    go = threading.Event()

    def body(comm):
        comm.go = go
        return busy(comm, lambda c: c.close())

    assert spmd(body, 2) == [[type(None), CommAborted], [CommAborted]]


def test_two_threads_ask_for_one_group(monkeypatch):
    """``init`` is idempotent also where its first call has not returned yet."""
    connect = communicator.connect

    def slow(*args):
        time.sleep(0.2)
        return connect(*args)

    monkeypatch.setattr(communicator, "connect", slow)
    group, made = Group.from_store(HashStore(), 0, 1), []
    threads = [threading.Thread(target=lambda: made.append(init(group, device="cpu"))) for _ in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(20)
    assert len(made) == 3 and len(set(map(id, made))) == 1
    made[0].close()


# -- long runs


def many_shapes(rank, group):
    with Communicator(group, resolve(transport="shm", timeout_s=20.0), CPU) as comm:
        comm.reserve(64, 8, torch.float32)
        for m in [*range(40), 0, 39]:
            x = torch.full((m, 8), rank + 1.0)
            assert ops.all_reduce(x, comm).sum() == 3 * m * 8
        return len(comm._bound), len(comm.chooser._known), len(comm._supported)


def test_shapes_that_never_return_are_forgotten(monkeypatch):
    for module in (communicator, chooser):
        monkeypatch.setattr(module, "_KEPT", 8)
    assert run_threads(many_shapes, 2) == [(8, 8, 8)] * 2


def long_run(rank, group):
    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20

    with Communicator(group, resolve(transport="shm", timeout_s=20.0), CPU) as comm:
        x = torch.ones(8)
        for _ in range(500):
            ops.all_reduce(x, comm)
        before, descriptors = resident(), len(os.listdir("/proc/self/fd"))
        for _ in range(10_000):
            ops.all_reduce(x, comm)
        return resident() - before, len(os.listdir("/proc/self/fd")) - descriptors


def test_ten_thousand_calls_leak_nothing():
    for grown_mib, opened in run_ranks(long_run, 2, timeout_s=60):
        assert grown_mib < 2 and opened == 0


def test_a_failed_communicator_does_not_hoard():
    """Its error is raised again by every call; callers' tensors must not hang on to it."""

    def body(comm):
        comm.abort("a test")
        lengths = []
        for _ in range(3):
            error = raised(lambda: ops.all_reduce(torch.ones(2), comm), CommAborted)
            lengths.append(len(traceback.extract_tb(error.__traceback__)))
        return lengths

    for lengths in spmd(body, 2):
        assert len(set(lengths)) == 1, lengths


# -- layers


def test_copies_and_pickles_of_layers(tmp_path):
    def body(comm):
        layer = nn.GatedMLP(8, 8, group=comm, sequence_parallel=True)
        x = ints(1, 4, 8, dtype=torch.float32)
        twin = copy.deepcopy(layer)
        assert twin.comm is comm and torch.equal(twin(x), layer(x))
        for save in (pickle.dumps, lambda m: torch.save(m, tmp_path / f"m{comm.rank}"), copy.deepcopy):
            what = comm if save is copy.deepcopy else layer
            assert "belongs to its process" in str(raised(lambda save=save, what=what: save(what), TypeError))
        torch.save(layer.state_dict(), tmp_path / f"s{comm.rank}")
        twin.load_state_dict(torch.load(tmp_path / f"s{comm.rank}"))

    spmd(body, 2)


def test_one_weight_many_uses():
    """Tied to two layers, given twice to one op, and being the input itself."""

    def body(comm):
        w, x = torch.ones(4, 4, requires_grad=True), torch.ones(4, 4)
        ops.matmul_reduce_scatter(ops.all_gather_matmul(x, w, comm), w, comm).sum().backward()
        tied, w.grad = w.grad, None
        a, b = ops.all_gather_matmul(x, (w, w), comm)
        (a + 2 * b).sum().backward()
        twice, w.grad = w.grad, None
        ops.all_gather_matmul(w, w, comm).sum().backward()
        return [g[0, 0].item() for g in (tied, twice, w.grad)]

    # tied: as second weight 2 ranks' rows of 4s (8 * 4), as first 8 rows times the sum of w over 4 outputs.
    assert spmd(body, 2) == [[64.0, 24.0, 16.0]] * 2


def test_a_sink_or_hook_that_raises_breaks_nothing():
    def body(comm):
        def boom(*_):
            raise ValueError("boom")

        x, w = torch.ones(4, 4, requires_grad=True), torch.ones(4, 4, requires_grad=True)
        raised(lambda: ops.all_gather_matmul(x, w, comm, wgrad=boom).sum().backward(), ValueError)
        h = x * 2
        h.register_hook(boom)
        raised(lambda: ops.all_gather_matmul(h, w, comm).sum().backward(), ValueError)
        assert ops.all_reduce(torch.ones(2), comm).tolist() == [2.0, 2.0]

    spmd(body, 2)


# -- deaths and stops in the middle of a training step


def training(rank, group, transport, victim, how, pids):
    """Steps until something happens; the victim ``how``s itself in the backward of its step 3."""
    config = resolve(transport=transport, timeout_s=1.5)
    comm = Communicator(group, config, CPU)
    if rank == victim:
        Path(pids).write_text(str(os.getpid()))
    model = nn.GatedMLP(16, 24, group=comm, sequence_parallel=True)
    step = 0
    if rank == victim:
        model.gate_proj.weight.register_hook(lambda g: os.kill(os.getpid(), how) if step == 3 else None)
    start = 0.0
    try:
        for step in range(20):  # noqa: B007 - the hook reads it
            start = time.monotonic()
            model(torch.ones(4, 16, requires_grad=True)).sum().backward()
        raise AssertionError("nothing happened")
    except (PeerDied, CommTimeout) as e:
        took_s, first = time.monotonic() - start, e
    assert first.rank == victim and first.op and first.seq > 0 and f"rank {victim}" in str(first), first
    # Sticky: whatever is called next says the same, at once, and returns no tensor.
    assert type(raised(lambda: model(torch.ones(4, 16)), type(first))) is type(first)
    start = time.monotonic()
    comm.close()
    closed_s = time.monotonic() - start
    threads = [t.name for t in threading.enumerate() if t.name.startswith("commbackend")]
    if how == signal.SIGSTOP and rank == (victim + 1) % group.size:
        time.sleep(0.5)  # the others are through as well
        os.kill(int(Path(pids).read_text()), signal.SIGCONT)
    return type(first).__name__, took_s, closed_s, threads


@pytest.mark.parametrize("transport", ["shm", "gloo"])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=lambda s: s.name)
def test_a_rank_lost_in_a_training_step(transport, how, tmp_path):
    """F076, F078, F080: survivors raise in time and name the rank; closing takes no time; nothing stays."""
    before = set(os.listdir("/dev/shm"))
    args = (transport, 2, how, str(tmp_path / "pid"))
    if how == signal.SIGKILL:
        results = run_ranks(training, 3, *args, expect_death=[2])[:2]
        assert {name for name, *_ in results} == {"PeerDied"}
        assert all(took_s < 1.0 for _, took_s, *_ in results), results
    else:
        # The stopped rank goes on after the others have given it up, and is told.
        results = run_ranks(training, 3, *args)
        assert {name for name, *_ in results} == {"CommTimeout"}
        assert all(1.0 < took_s < 1.5 * 1.1 + 0.3 for _, took_s, *_ in results[:2]), results
    assert all(closed_s < 2.0 and not threads for *_, closed_s, threads in results), results
    assert not {n for n in set(os.listdir("/dev/shm")) - before if "commbackend" in n}


# -- whole programs: how they start and how they end

EXITS = """
import os, signal, sys, threading, time
import torch
import torch.distributed as dist
import commbackend
from commbackend import ops
rank = int(os.environ["RANK"])
one = torch.ones(2)
def init(transport, **more):
    return commbackend.init(transport=transport, timeout_s=5.0, device="cpu", name=transport, **more)
def attempt(call):
    try:
        return call()
    except (Exception, KeyboardInterrupt) as e:
        print(type(e).__name__, e, flush=True)
{body}
print("END", rank, flush=True)
"""


def program(tmp_path, body, size=2, launcher="env", flags=(), **more):
    """Run ``body`` in ``size`` launched processes: (exit codes, stdouts, stderrs), and what stayed behind."""
    script = tmp_path / "program.py"
    script.write_text(EXITS.format(body=textwrap.dedent(body)))
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMI", "SLURM_", "PRTE_"))}
    temporary = tmp_path / "tmp"
    temporary.mkdir(exist_ok=True)
    with socket.create_server(("127.0.0.1", 0)) as s:
        port = s.getsockname()[1]
    jobs = []
    for rank in range(size):
        if launcher == "slurm":  # processes of one host that meet in a directory
            who = dict(SLURM_PROCID=rank, SLURM_LOCALID=rank, SLURM_STEP_ID=0, SLURM_JOB_ID=os.getpid())
            who |= dict(SLURM_STEP_NUM_TASKS=size, SLURM_STEP_NUM_NODES=1)
            script.write_text(EXITS.format(body=textwrap.dedent(body)).replace('"RANK"', '"SLURM_PROCID"'))
        else:
            who = dict(RANK=rank, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        env = {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TMPDIR": str(temporary)}
        env |= {k: str(v) for k, v in {**who, **more}.items()}
        command = [sys.executable, *flags, str(script)]
        jobs.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    try:
        said = [job.communicate(timeout=60) for job in jobs]
    finally:
        for job in jobs:
            job.kill()
    assert list(temporary.glob("commbackend*")) == []
    return [job.returncode for job in jobs], [out for out, _ in said], [err for _, err in said]


def test_programs_that_never_close(tmp_path):
    """F055: exit code 0 and not a word, whoever ends first, also with warnings as errors."""
    codes, _, errors = program(
        tmp_path,
        """
        for transport in ("shm", "gloo"):
            c = init(transport)
            x = torch.ones(4, 4, requires_grad=True)
            ops.all_gather_matmul(x, torch.ones(4, 4, requires_grad=True), c).sum().backward()
        time.sleep(0.5 * rank)
        """,
        3,
        flags=("-W", "error"),
    )
    assert codes == [0, 0, 0] and errors == ["", "", ""], errors


def test_one_rank_is_interrupted_or_ended(tmp_path):
    """Ctrl-C in a call leaves it at once and tells the peers; SIGTERM is a death like any other."""
    codes, outs, errors = program(
        tmp_path,
        """
        a, b = init("shm"), init("gloo")
        for c in (a, b):
            if rank == 1:
                threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
                start = time.monotonic()
                attempt(lambda: ops.all_reduce(one, c))
                assert time.monotonic() - start < 4
            else:
                time.sleep(0.8)
                attempt(lambda: ops.all_reduce(one, c))
        c = init("shm") if attempt(a.close) is None else None
        if rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(20)
        attempt(lambda: ops.all_reduce(one, c))
        """,
    )
    assert codes == [0, -signal.SIGTERM], (outs, errors)
    assert outs[1].count("KeyboardInterrupt") == 2
    assert outs[0].count("CommAborted rank 1 aborted the communicator: KeyboardInterrupt") == 2, outs[0]
    assert "PeerDied rank 1 died" in outs[0] and "all_reduce" in outs[0]


@pytest.mark.parametrize("last", ["", "os.kill(os.getpid(), signal.SIGKILL) if rank == 0 else attempt(comm.barrier)"])
def test_the_meeting_place_is_left_clean(last, tmp_path):
    """Where ranks of one host met in a directory, who leaves last removes it: also without ``close``, or when rank 0
    was killed. (``program`` looks.)
    """
    codes, outs, _ = program(tmp_path, f'comm = init("shm")\nops.all_reduce(one, comm)\n{last}', 3, "slurm")
    assert codes == [-9 if last else 0, 0, 0], outs


def test_closing_after_a_fault_waits_for_nobody(tmp_path):
    """F076: rank 0 serves the launcher's store, but has nobody to wait for."""
    codes, outs, errors = program(
        tmp_path,
        """
        c = init("shm")
        ops.all_reduce(one, c)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        attempt(lambda: ops.all_reduce(one, c))
        start = time.monotonic()
        c.close()
        print("CLOSED", time.monotonic() - start < 2.0)
        """,
    )
    assert codes == [0, -9] and "CLOSED True" in outs[0], (outs, errors)


def test_children_of_a_program(tmp_path):
    """Workers of a data loader, and a fork that uses what it inherited, or makes its own."""
    codes, outs, errors = program(
        tmp_path,
        """
        from torch.utils.data import DataLoader, TensorDataset
        from torch.distributed import HashStore
        from commbackend.group import Group
        alone = Group.from_store(HashStore(), 0, 1)
        mine = commbackend.init(alone, device="cpu")
        for transport in ("shm", "gloo"):
            c = init(transport)
            for (batch,) in DataLoader(TensorDataset(torch.arange(8.0)), batch_size=4, num_workers=2):
                total = ops.all_reduce(batch, c)
            assert total.tolist() == [8.0, 10.0, 12.0, 14.0]
            child = os.fork()
            if child == 0:
                attempt(lambda: ops.all_reduce(one, c))
                c.abort()
                c.close()
                again = commbackend.init(alone, device="cpu")
                assert again is not mine and ops.all_reduce(one, again).tolist() == [1.0, 1.0]
                again.close()
                sys.exit(5)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
            assert ops.all_reduce(one, c).tolist() == [2.0, 2.0]
            c.close()
        """,
    )
    assert codes == [0, 0], errors
    assert all(out.count("CommAborted this communicator was made in process") == 2 for out in outs), outs
