"""What people were bitten by elsewhere (field cases F001...F103), and where each is proven here as far as CPUs allow.

Where a case and ``rows=`` differ, ``rows=`` holds: declared differences of rows work, others raise CollectiveMismatch.

F001  other rows at every call              test_ops_sweep.py::test_rows_change_at_every_call
                                            test_ops_errors.py::test_extent_does_not_divide
F002  sizes and ranks, odd ones too         test_ops_sweep.py::test_sampled_sizes  test_ops_sweep.py::test_all_sizes
F003  shape of the gathered input           test_ops_sweep.py::test_gathered_has_its_shape_for_any_n
F005  layouts of inputs                     test_ops_plain.py::test_layouts  test_gloo.py::test_layouts
F006  strided tensors, in place             test_field_cases.py::test_f006_strided_tensors_reduced_in_place
F008  ranks that disagree                   test_ops_errors.py::test_ranks_disagree
                                            test_field_cases.py::test_f008_random_mismatches
F009  zero rows on some ranks               test_ops_sweep.py::test_empty_extents
                                            test_field_cases.py::test_f009_zero_rows_on_one_rank
F011  zero rows in backward                 test_ops_autograd.py::test_zero_rows_join_every_backward
F012  every dtype is gathered               test_ops_plain.py::test_gather_of_every_dtype
                                            test_ops_plain.py::test_types_without_sums
F013  no partial output                     test_ops_unfused.py::test_every_element_is_written
F015  messages beyond 2 and 4 GiB           test_transport_shm.py::test_messages_beyond_32_bits
                                            test_gloo.py::test_long_messages_go_in_pieces
F017  sizes of memory, refused politely     test_field_cases.py::test_f017_sizes_beyond_any_memory
F019  launchers                             test_group.py::test_mpirun_two_jobs_at_once
                                            test_group.py::test_torchrun_two_jobs_at_once
                                            test_group.py::test_variables_of_torch
                                            test_group.py::test_slurm_variables_on_one_host
                                            test_field_cases.py::test_f019_spawned_processes
F020  somebody else's MPI, or none          test_group.py::test_mpi4py
                                            test_mpi_transport.py::test_mpi_of_the_application_is_used_and_left_alone
                                            test_mpi_transport.py::test_named_it_is_started_and_automatic_choice_starts_nothing
                                            test_packaging.py::test_commands_without_rich_matplotlib_and_mpi4py
F022  ranks that do not share a host        test_hostlink.py::test_a_rank_in_another_namespace
                                            test_group.py::test_hosts_are_proven_not_named
F023  proper subgroups                      test_group.py::test_process_groups_meshes_names
                                            test_ops_groups.py::test_overlapping_subgroups_at_once
F024  dialects of launchers                 test_config.py::test_dialects
F025  two jobs, one port                    test_group.py::test_mpirun_two_jobs_at_once
                                            test_group.py::test_torchrun_two_jobs_at_once
                                            test_group.py::test_a_port_in_use_names_its_holder
F026  own name is loopback                  test_two_hosts.py::test_own_name_is_loopback
                                            test_gloo.py::test_several_hosts_choose_an_interface
F028  a collective that a subset calls      test_field_cases.py::test_f028_a_subset_calls_a_collective
                                            test_reliability_flight.py::test_a_timeout_names_all_late_ranks
                                            test_group.py::test_a_timeout_names_all_who_have_not_come
F031  strangers while ranks connect         test_reliability.py::test_strangers
F032  a failure at a step of init           test_reliability.py::test_a_failure_at_a_step_of_init
F034  equal names, two hosts                test_two_hosts.py::test_equal_names_two_interfaces_and_shm_refused
                                            test_group.py::test_hosts_are_proven_not_named
F035  only what was proven is reached       test_hostlink.py::test_a_rank_in_another_namespace
                                            test_topology.py::test_pairs_are_tried
F037  GPUs are UUIDs                        test_userbuffers_fake.py::test_identity_is_the_uuid_whatever_the_ordinals
                                            test_topology.py::test_gpus_are_known_by_uuid
F038  a pair whose import fails       test_mnnvl_fake.py::test_one_pair_that_fails_takes_the_whole_group_down_this_path
F039  no partial mapping                    test_userbuffers_fake.py::test_no_partial_mapping_is_left
F041  probes are pairwise                   test_select.py::test_a_connect_that_fails_moves_all
F042  one rank cannot use a transport       test_reliability.py::test_falling_back_is_agreed_and_said_once
                                            test_topology.py::test_one_failing_rank_moves_all_and_leaves_nothing
F043  no IMEX channel                 test_mnnvl_fake.py::test_without_an_imex_channel_the_reason_says_what_to_provide
F044  environment is read, never written    test_import_rule.py::test_nobody_writes_the_environment
                                            test_select.py::test_one_rank_without_it_moves_all
F047  two ranks on one GPU                  test_userbuffers_fake.py::test_two_ranks_on_one_gpu_need_leave
                                            test_field_cases.py::test_f047_two_ranks_on_one_gpu
F049  a link that changes a byte            test_transport_shm.py::test_one_wrong_bit_is_refused_on_all_ranks
                                            test_gloo.py::test_reach_is_proven_with_bytes
F050  a connect that never answers          test_select.py::test_a_connect_that_never_answers_ends
F053  a tiny /dev/shm                       test_transport_shm.py::test_dev_shm_of_one_mebibyte
F054  memory is checked before it is taken  test_transport_shm.py::test_memory_is_checked_before_it_is_taken
                                            test_doctor.py::test_report_of_one_process
F055  a rank that ends first                test_bad_input.py::test_programs_that_never_close
F056  kills leave no names                  test_transport_shm.py::test_random_kills
                                            test_transport_shm.py::test_kills_while_connecting_and_closing
F059  ptrace denied                         test_reliability.py::test_ptrace_denied_few_files_little_locked_memory
F061  init and close, many times            test_field_cases.py::test_f061_two_hundred_communicators
                                            test_reliability.py::test_cycles_return_to_the_baseline
F068  overlapping groups                    test_ops_groups.py::test_overlapping_subgroups_at_once
F070  several threads                       test_ops_groups.py::test_two_threads_on_one_communicator
                                            test_bad_input.py::test_a_second_thread_is_refused
                                            test_field_cases.py::test_f070_a_communicator_for_each_thread
F072  one suite for all transports          test_transport_mutants.py::test_every_hook_has_a_mutant
F073  delays at every step                  test_field_cases.py::test_f073_delays_before_every_step
F076  a stuck rank                          test_bad_input.py::test_a_rank_lost_in_a_training_step
                                            test_bad_input.py::test_closing_after_a_fault_waits_for_nobody
F077  who is late, and where all are        test_reliability_flight.py::test_a_timeout_names_all_late_ranks
                                            test_reliability.py::test_stops
F078  a timeout is no result                test_bad_input.py::test_a_rank_lost_in_a_training_step
F079  no wait without a deadline            test_static_deadlines.py::test_no_wait_without_a_deadline
F080  a killed rank                         test_transport_shm.py::test_random_kills
                                            test_reliability.py::test_kills
                                            test_gloo.py::test_a_death_is_named_by_all
F082  abort from another thread             test_field_cases.py::test_f082_abort_during_every_op
F084  versions and settings agree           test_select.py::test_ranks_of_other_versions
                                            test_select.py::test_ranks_configured_apart
F085  same bits on all ranks                test_ops_reduce.py::test_same_bits_on_all_ranks
                                            test_plan_schedules.py::test_sums_run_in_rank_order
F087  known answers                         test_ops_plain.py::test_known_answers
F090  error against fp64                    test_ops_sweep.py::test_error_against_fp64
F091  overlap can be insisted upon          test_fallback.py::test_stats_count_and_overlap_can_be_required
F093  fallbacks are counted                 test_fallback.py::test_the_fallback_matrix_is_what_happens
                                            test_ops_unfused.py::test_products_without_schedules
F094  groups made before or after           test_group.py::test_process_groups_meshes_names
                                            test_fallback.py::test_any_group_serves_whenever_it_was_made
                                            test_field_cases.py::test_f019_spawned_processes
F099  nothing else is installed             test_packaging.py::test_import_where_nothing_else_is_installed
                                            test_packaging.py::test_missing_torch_is_one_clear_line
F102  received bytes are not executed       test_import_rule.py::test_received_bytes_are_never_executed
                                            test_static_security.py::test_nothing_received_is_executed
                                            test_hostlink.py::test_frames_are_parsed_safely
F103  nobody listens to the world           test_gloo.py::test_one_host_listens_on_loopback_alone
                                            test_reliability.py::test_nobody_listens_beyond_loopback
                                            test_group.py::test_variables_of_torch
                                            test_two_hosts.py::test_equal_names_two_interfaces_and_shm_refused
"""

from __future__ import annotations

import ast
import os
import random
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from ops_world import CPU, ints, same, spmd
from torch.distributed import HashStore

from commbackend import ops, schedules
from commbackend.communicator import Communicator
from commbackend.config import resolve
from commbackend.errors import CollectiveMismatch, CommAborted, CommTimeout, HeapExhausted, Unavailable
from commbackend.group import Group
from commbackend.plan import Problem
from commbackend.testing import run_ranks, run_threads
from commbackend.transports.shm import ShmTransport

HERE = Path(__file__).parent


def test_the_table_names_tests_that_exist():
    named = re.findall(r"(test_\w+\.py)::(test_\w+)", __doc__)
    assert len(named) > 60
    for file in {f for f, _ in named}:
        there = {n.name for n in ast.walk(ast.parse((HERE / file).read_text())) if isinstance(n, ast.FunctionDef)}
        missing = {t for f, t in named if f == file} - there
        assert not missing, (file, missing)


def test_f006_strided_tensors_reduced_in_place():
    """The caller's own tensor holds the sum, and what lies between its elements is untouched."""

    def body(comm):
        for view in (lambda b: b.t(), lambda b: b[::2, 1::3], lambda b: b[:, 2:5], lambda b: b.flip(0)[1:]):
            bases = [ints(r, 8, 9) for r in range(comm.size)]
            mine, want = bases[comm.rank], sum(bases)
            untouched = mine.clone()
            view(untouched).fill_(0)
            x = view(mine)
            x.copy_(ops.all_reduce(x, comm))
            same(x, view(want))
            view(mine).fill_(0)
            if view(bases[0]).data_ptr() == view(mine).data_ptr() or comm.rank:
                same(mine, untouched)

    spmd(body, 2)


def test_f008_random_mismatches():
    """Two ranks make two random calls: the same bits as one process if they agree, else the same error on both."""
    dtypes = [torch.float32, torch.float64, torch.bfloat16]

    def call(kind, m, k, dtype, comm):
        x = ints(1, m, k, dtype=dtype)
        if kind == "agm":
            return ops.all_gather_matmul(x, ints(2, 3, k, dtype=dtype), comm)
        if kind == "mrs":
            return ops.matmul_reduce_scatter(x, ints(2, 3, k, dtype=dtype), comm)
        if kind == "barrier":
            return comm.barrier()
        return {"ag": ops.all_gather, "rs": ops.reduce_scatter, "ar": ops.all_reduce}[kind](x, comm)

    def draw(rng):
        return rng.choice(["agm", "mrs", "ag", "rs", "ar", "barrier"]), rng.choice([2, 4]), 3, rng.choice(dtypes)

    store, outcomes = HashStore(), set()

    def body(rank, _group):
        for case in range(150):
            rng = random.Random(case)
            first, second = draw(rng), draw(rng)
            if case % 5 == 0:
                second = first
            group = Group.from_store(store, rank, 2, timeout_s=20.0, name=str(case))
            comm = Communicator(group, resolve(transport="local", timeout_s=10.0), CPU)
            agree = first == second or first[0] == second[0] == "barrier"
            try:
                call(*(first, second)[rank], comm)
                assert agree, (case, first, second)
            except CollectiveMismatch as e:
                assert not agree and "rank 0 called" in str(e) and "rank 1 called" in str(e), (case, first, second, e)
            outcomes.add(agree)
            comm.close()

    run_threads(body, 2, timeout_s=60)
    assert outcomes == {True, False}


def test_f009_zero_rows_on_one_rank():
    """Declared, they are rows like others; undeclared, a mismatch on all ranks."""

    def body(comm):
        counts = tuple(0 if r == 1 else 4 for r in range(comm.size))
        mine, w = ints(comm.rank, counts[comm.rank], 3), ints(9, 5, 3)
        full = torch.cat([ints(r, n, 3) for r, n in enumerate(counts)])
        same(ops.all_gather_matmul(mine, w, comm, rows=counts), full @ w.t())
        only = tuple(8 if r == 1 else 0 for r in range(comm.size))
        x = ints(3, 8, 3)
        same(ops.reduce_scatter(x, comm, rows=only), (comm.size * x)[: only[comm.rank]])
        with pytest.raises(CollectiveMismatch, match="rank 1 called all_gather_matmul rows=0x3"):
            ops.all_gather_matmul(mine, w, comm)

    spmd(body, 3)


def test_f017_sizes_beyond_any_memory():
    """Plans count in whole numbers of any size; what cannot be had is refused on all ranks with both numbers."""

    def body(comm):
        rows = (2**20 // comm.size,) * comm.size
        problem = Problem("all_gather_matmul", rows, 1, 2**14, (2**14,), "float32")
        need = schedules.program(problem, comm.rank, comm.caps, comm.knobs(problem)).heap_nbytes()
        assert isinstance(need, int) and need >= 4 * 2**34 // comm.size > 2**32
        with pytest.raises(HeapExhausted) as caught:
            comm.reserve(2**40, 2**10, torch.float32)
        asked, available = (int(n) for n in re.findall(r"\d{4,}", str(caught.value))[:2])
        assert asked >= 4 * 2**50 > available
        assert ops.all_reduce(torch.ones(2), comm).tolist() == [2.0, 2.0]

    spmd(body, 2)


SPAWNED = """
import os, sys, torch, torch.distributed as dist, torch.multiprocessing as mp
import commbackend
from commbackend import ops

def worker(rank, size, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=size)
    before = commbackend.init(name="before", device="cpu")
    odd = dist.new_group([1, 2])
    late = commbackend.init(odd, device="cpu") if rank else None
    dist.destroy_process_group()
    for comm in filter(None, (before, late)):
        assert ops.all_reduce(torch.ones(2), comm).tolist() == [comm.size] * 2
        comm.close()

if __name__ == "__main__":
    mp.spawn(worker, args=(3, sys.argv[1]), nprocs=3)
"""


def test_f019_spawned_processes(tmp_path):
    """torch.multiprocessing; a subgroup made later; destroy_process_group before close (F094)."""
    (tmp_path / "spawned.py").write_text(SPAWNED)
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMI", "SLURM_", "RANK", "WORLD_SIZE"))}
    env = {**kept, "PYTHONPATH": str(HERE.parent), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(tmp_path / "spawned.py"), str(tmp_path / "store")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0 and done.stderr == "", done.stderr


def test_f028_a_subset_calls_a_collective():
    """Reserving memory is collective: those who come name those who do not, in time."""
    absent, gone = (1, 3), threading.Event()

    def body(rank, group):
        comm = Communicator(group, resolve(transport="local", timeout_s=0.5), CPU)
        if rank in absent:
            assert gone.wait(20)
        start = time.monotonic()
        with pytest.raises(CommTimeout) as caught:
            comm.reserve(64, 64, torch.float32)
        gone.set()
        comm.close()
        assert time.monotonic() - start < 0.5 * 1.1 + 0.3
        assert caught.value.rank in absent and caught.value.op == ("" if rank in absent else "reserve"), caught.value
        assert f"rank {caught.value.rank} in reserve" in str(caught.value)

    run_threads(body, 4)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.gpu
def test_f047_two_ranks_on_one_gpu():
    run_ranks(one_gpu, 2)


def one_gpu(rank, group):
    with pytest.raises(Unavailable, match="allow_shared_device"):
        Communicator(group, resolve(transport="userbuffers"), torch.device("cuda", 0))


def cycles(rank, group):
    def held():
        maps = Path("/proc/self/maps").read_text()
        return (
            len(os.listdir("/proc/self/fd")),
            threading.active_count(),
            maps.count("commbackend"),
            maps.count("memfd"),
        )

    counts = []
    for i in range(200):
        if i in (20, 199):
            counts.append(held())
        own = Group.from_store(group.store, rank, group.size, timeout_s=20.0, name=str(i))
        with Communicator(own, resolve(transport="gloo" if i % 10 == 0 else "shm", lanes=1), CPU) as comm:
            x = torch.ones(4, 4, requires_grad=True)
            ops.all_gather_matmul(x, torch.ones(4, 4), comm).sum().backward()
    return counts


def test_f061_two_hundred_communicators():
    """Descriptors, threads and mappings are back where they were."""
    before = {n for n in os.listdir("/dev/shm") if "commbackend" in n}
    for first, last in run_ranks(cycles, 2, timeout_s=90):
        assert first == last
    assert {n for n in os.listdir("/dev/shm") if "commbackend" in n} <= before


def threads_apart(rank, group):
    """Two communicators on one group, each used by a thread of its own, in whatever order."""
    names = ("first", "second")
    groups = [Group.from_store(group.store, rank, group.size, timeout_s=20.0, name=n) for n in names]
    comms = [Communicator(g, resolve(transport="shm", timeout_s=20.0, lanes=1), CPU) for g in groups]
    wrong = []

    def run(comm, seed):
        rng = random.Random(seed)
        for i in range(150):
            if rng.random() < 0.3:
                time.sleep(rng.random() * 2e-3)
            x, w = torch.full((2, 3), float(i + rank)), torch.ones(2, 3)
            out = ops.matmul_reduce_scatter(ops.all_gather_matmul(x, w, comm), torch.ones(3, 2), comm)
            if not torch.equal(out, torch.full((2, 3), 6.0 * group.size * (i + rank))):
                wrong.append((comm.group.name, i, out))

    threads = [threading.Thread(target=run, args=(c, 10 * rank + j)) for j, c in enumerate(comms)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(40)
        assert not t.is_alive()
    for comm in comms:
        comm.close()
    return wrong


def test_f070_a_communicator_for_each_thread():
    assert run_ranks(threads_apart, 2, timeout_s=60) == [[], []]


def test_f073_delays_before_every_step():
    """Whichever rank is late at whichever step, a buffer is not used again before its readers are through."""
    wrong = []

    def body(comm):
        rng = random.Random(comm.rank)
        comm.recorder = lambda *_: time.sleep(rng.random() * 1e-3) if rng.random() < 0.5 else None
        for i in range(100):
            m = 1 + i % 5
            xs = [ints(100 * i + r, m, 4) for r in range(comm.size)]
            w = ints(i, 4, 4)
            got = ops.all_gather_matmul(xs[comm.rank], w, comm)
            full = torch.cat(xs) @ w.t()
            summed = ops.matmul_reduce_scatter(got, w, comm)
            part = comm.size * (full @ w.t())[comm.rank * m : (comm.rank + 1) * m]
            if not torch.equal(got, full) or not torch.equal(summed, part):
                wrong.append((i, comm.rank))
            got.fill_(float("nan"))

    spmd(body, 3)
    assert not wrong


OPS = {
    "all_gather": lambda c: ops.all_gather(torch.ones(4, 4), c),
    "reduce_scatter": lambda c: ops.reduce_scatter(torch.ones(4, 4), c),
    "all_reduce": lambda c: ops.all_reduce(torch.ones(4, 4), c),
    "all_gather_matmul": lambda c: ops.all_gather_matmul(torch.ones(4, 4), torch.ones(4, 4), c),
    "matmul_reduce_scatter": lambda c: ops.matmul_reduce_scatter(torch.ones(4, 4), torch.ones(4, 4), c),
    "matmul_all_reduce": lambda c: ops.matmul_all_reduce(torch.ones(4, 4), torch.ones(4, 4), c),
    "barrier": lambda c: c.barrier(),
}


def aborted(rank, group):
    """Rank 0 waits in every op for rank 1, which does not come; another thread ends that; a new group works."""
    for name, call in OPS.items():
        own = Group.from_store(group.store, rank, group.size, timeout_s=20.0, name=name)
        comm = Communicator(own, resolve(transport="shm", timeout_s=20.0), CPU)
        call(comm)
        start = time.monotonic()
        if rank == 0:
            threading.Timer(0.1, comm.abort, ["enough"]).start()
            with pytest.raises(CommAborted, match="enough") as caught:
                call(comm)
            assert caught.value.op == name and 0.05 < time.monotonic() - start < 2.0
        else:
            while comm._engine.transport.fault is None and time.monotonic() < start + 10:
                time.sleep(0.005)
            with pytest.raises(CommAborted, match="rank 0 aborted"):
                call(comm)
        comm.close()


def test_f082_abort_during_every_op():
    assert ShmTransport.caps.abortable
    run_ranks(aborted, 2, timeout_s=60)
