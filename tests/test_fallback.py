"""Fused, or stock with a counted reason: what all adapters share (F091), what is documented of it (F093), on groups of
any origin (F094).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dtensor_world import gloo_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import parallelize_module

import commbackend
from commbackend import ops
from commbackend.errors import Unsupported
from commbackend.integrations.dtensor import ColwiseParallel, RowwiseParallel
from commbackend.integrations.fallback import OFF, fused_by, refuse, require_overlap, supports

DOCS = Path(__file__).parents[1] / "docs" / "integrations.md"


class Quantised(torch.Tensor):
    pass


def _said(call: Any) -> str:
    try:
        call()
        return ""
    except Unsupported as e:
        return str(e)


def _reasons(rank: int) -> dict[str, Any]:
    x, w = torch.ones(4, 8), torch.ones(6, 8)
    found: dict[str, Any] = {"none": supports(x, w), "bf16": supports(x.bfloat16(), w.bfloat16())}
    found["types"] = supports(x.bfloat16(), w)
    with torch.autocast("cpu", torch.bfloat16):
        found["autocast"] = supports(x.bfloat16(), w)
    found["integers"] = supports(x.int(), w.int())
    found["subclass"] = supports(x, w.as_subclass(Quantised))
    found["sparse"] = supports(x, w.to_sparse())
    found["meta"] = supports(x, w.to("meta"))
    found["shape"] = supports(x, torch.ones(6, 9))
    found["alone"] = supports(x, w, dist.new_subgroups(1)[0])
    comm = commbackend.init(device="cpu")
    assert fused_by("matmul_all_reduce", x, w, None) is comm
    assert fused_by("matmul_all_reduce", x, w, None, reason="an option") is None
    assert fused_by("matmul_all_reduce", x, torch.ones(6, 9), comm) is None
    found["counted"] = comm.stats()["fallback_by_op"]
    found["strict"] = _said(
        lambda: fused_by("matmul_all_reduce", x, w, comm, reason="an option", strict=True, layer="mlp.down")
    )
    refuse(comm, "matmul_all_reduce", OFF, strict=True)  # what was asked for does not raise
    return found


def test_reasons_are_named_and_counted(tmp_path: Path) -> None:
    for found in gloo_ranks(_reasons, 2, tmp_path):
        assert found["none"] is found["bf16"] is found["autocast"] is None
        for case, text in {
            "types": "input is torch.bfloat16, weight is torch.float32",
            "integers": "products of torch.int32",
            "subclass": "the weight is a Quantised",
            "sparse": "layout torch.sparse",
            "meta": "the weight is on meta",
            "shape": "shapes of input and weight do not fit",
            "alone": "one rank",
        }.items():
            assert text in found[case], (case, found[case])
        assert found["counted"] == {
            "matmul_all_reduce/an option": 1,
            "matmul_all_reduce/shapes of input and weight do not fit": 1,
        }
        assert "matmul_all_reduce of mlp.down cannot be fused: an option" in found["strict"]


def insisted(rank: int) -> bool:
    mesh = init_device_mesh("cpu", (2,))
    styles = {"0": ColwiseParallel(input_layouts=Shard(0)), "2": RowwiseParallel(output_layouts=Shard(0))}
    model = parallelize_module(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)), mesh, styles)
    with require_overlap(mesh):
        model(torch.randn(512, 64)).sum().backward()
    before = commbackend.stats(mesh)
    assert before["overlapped"] > 0 and before["fallback"] == 0
    said = r"no call overlapped: .*all_gather_matmul/sequence \(2\)"
    with pytest.raises(Unsupported, match=said) as raised, require_overlap(mesh):
        model(torch.randn(4, 64)).sum().backward()
    assert "matmul_reduce_scatter/sequence (1)" in str(raised.value)
    after = commbackend.stats(mesh)
    assert after["overlapped"] == before["overlapped"] and after["fallback"] == 4
    with pytest.raises(Unsupported, match="no call came to this communicator"), require_overlap(mesh):
        pass
    return True


def test_stats_count_and_overlap_can_be_required(tmp_path: Path) -> None:  # F091
    """Calls that overlap are counted apart from those that do not; a step without any overlap is an error."""
    assert all(gloo_ranks(insisted, 2, tmp_path))


def _required(rank: int) -> bool:
    with require_overlap():
        fused_by("matmul_all_reduce", torch.ones(4, 8), torch.ones(6, 8), None, reason="an option")
    return True


def test_off_was_asked_for(tmp_path: Path) -> None:
    assert all(gloo_ranks(_required, 2, tmp_path, transport="off"))


def _groups(rank: int) -> dict[str, Any]:
    """Groups made before and after the first communicator, as groups and as slices of a mesh, each with its own."""
    x, w = torch.full((2, 4), float(rank)), torch.ones(3, 4)
    early = dist.new_group([rank // 2 * 2, rank // 2 * 2 + 1], use_local_synchronization=True)
    commbackend.init(device="cpu")
    late = dist.new_group([rank % 2, rank % 2 + 2], use_local_synchronization=True)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    found = {
        name: (fused_by("matmul_all_reduce", x, w, group) is not None, ops.matmul_all_reduce(x, w, group)[0, 0].item())
        for name, group in {"early": early, "late": late, "tp": mesh["tp"], "dp": (mesh, "dp"), "world": None}.items()
    }
    dist.destroy_process_group(late)  # before its communicator, which must not mind
    commbackend.init(early, device="cpu").close()
    again = commbackend.init(early, device="cpu")
    found["again"] = (True, ops.matmul_all_reduce(x, w, again)[0, 0].item())
    return found


def test_any_group_serves_whenever_it_was_made(tmp_path: Path) -> None:  # F094
    for rank, found in enumerate(gloo_ranks(_groups, 4, tmp_path)):
        neighbours, strided = 4.0 * (rank // 2 * 4 + 1), 4.0 * (rank % 2 * 2 + 2)
        assert found == {
            "early": (True, neighbours),
            "tp": (True, neighbours),
            "late": (True, strided),
            "dp": (True, strided),
            "world": (True, 4.0 * 6),
            "again": (True, neighbours),
        }


#: Columns of the documented matrix: transport and rows of a shard.
COLUMNS = {
    "`shm`, shards of 8 rows": ("shm", 8),
    "`shm`, shards of 512 rows": ("shm", 512),
    "`gloo`": ("gloo", 8),
    "`off`": ("off", 8),
}


def documented() -> dict[str, dict[str, str]]:
    """The matrix of the page: operation -> column -> what happens."""
    lines = [line for line in DOCS.read_text().splitlines() if line.startswith("|")]
    start = next(i for i, line in enumerate(lines) if line.startswith("| operation |"))
    names = [cell.strip() for cell in lines[start].strip("|").split("|")][1:]
    found = {}
    for line in lines[start + 2 :]:
        operation, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        if len(cells) != len(names):
            break
        found[operation.strip("`")] = dict(zip(names, cells))
    return found


def outcomes(rank: int, rows: int) -> dict[str, str]:
    """Operation -> what ``stats`` says of a call of it."""
    comm = commbackend.init(dist.group.WORLD, device="cpu")
    found: dict[str, str] = {}

    def seen(call: Any, *operations: str, of: str = "") -> None:
        before = comm.stats()
        call()
        after = comm.stats()
        for operation in operations:
            prefix = operation + "/"
            said: set[str] = set()
            for kind in ("overlapped_by_op", "fallback_by_op"):
                new = [n for n, c in after[kind].items() if n.startswith(prefix) and c > before[kind].get(n, 0)]
                reasons = {n.removeprefix(prefix) for n in new}
                said |= {"overlapped"} if kind == "overlapped_by_op" and new else set()
                said |= {r.replace("sequence", "in sequence") for r in reasons} if kind == "fallback_by_op" else set()
            (found[operation + of],) = said

    part, whole = torch.randn(rows, 64, requires_grad=True), torch.randn(2 * rows, 64, requires_grad=True)
    w = torch.randn(64, 64, requires_grad=True)
    seen(lambda: ops.all_gather(part, comm).sum().backward(), "all_gather", "reduce_scatter")
    seen(lambda: ops.all_reduce(whole, comm), "all_reduce")
    gathered = ("all_gather_matmul", "dgrad_reduce_scatter")
    seen(lambda: ops.all_gather_matmul(part, w, comm).sum().backward(), *gathered)
    seen(lambda: ops.all_gather_matmul(part[:, :32], w, comm, dim=1), "all_gather_matmul", of=", last dimension")
    seen(lambda: ops.matmul_reduce_scatter(whole, w, comm), "matmul_reduce_scatter")
    seen(lambda: ops.matmul_all_reduce(whole, w, comm), "matmul_all_reduce")
    seen(lambda: ops.column_parallel_linear(whole, w, comm).sum().backward(), "dgrad_all_reduce")
    return found


@pytest.mark.parametrize("column", COLUMNS)
def test_the_fallback_matrix_is_what_happens(tmp_path: Path, column: str) -> None:  # F093
    """Every operation over every transport that CI has, and what stands in for what is not overlapped."""
    transport, rows = COLUMNS[column]
    table = documented()
    (first, second) = gloo_ranks(outcomes, 2, tmp_path, rows, transport=transport)
    assert first == second
    assert {operation: cells[column] for operation, cells in table.items()} == first


def test_every_fallback_reason_of_an_adapter_has_no_numbers() -> None:
    """Reasons are keys of ``stats``: one that changed with every shape would grow without end."""
    source = Path(__file__).parents[1] / "commbackend" / "integrations" / "dtensor.py"
    reasons = re.findall(r'return f?"(the (?:input|output)[^"]*)"', source.read_text())
    assert len(reasons) >= 4
    assert not [r for r in reasons if ".shape" in r or "size" in r]
