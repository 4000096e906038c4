"""What Megatron's tests share: ranks with Megatron's groups, models built the stock way and with our projections, and
training steps of both. The model, and what stands in for torch.cuda on a CPU, are those of the example.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import commbackend
from commbackend.testing import run_ranks

_spec = importlib.util.spec_from_file_location("megatron_gpt", Path(__file__).parents[1] / "examples/megatron_gpt.py")
assert _spec is not None and _spec.loader is not None
gpt = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(gpt)
gpt.SEQUENCE, gpt.HIDDEN = 16, 32

#: With sizes this small the automatic choice would multiply in one product: what is tested is the overlapped form.
OVERLAPPED = {"shm": "push", "gloo": "collective"}


def _rank(rank: int, group: Any, fn: Callable[..., Any], tp: int, folder: str, te_stand_in: bool, args: Any) -> Any:
    warnings.simplefilter("ignore")  # Megatron's imports say at length which optional packages are missing
    store = dist.FileStore(str(Path(folder) / "gloo"), group.size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=group.size, timeout=timedelta(seconds=100))
    if te_stand_in:
        import te_world

        te_world.install()
    from megatron.core import parallel_state

    with ExitStack() as leaving:
        leaving.callback(dist.destroy_process_group)
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)
        leaving.enter_context(gpt.cpu_stand_ins())
        return fn(*args)


def megatron_ranks(
    fn: Callable[..., Any], size: int, tp: int, folder: Path, *args: Any, te_stand_in: bool = False
) -> list[Any]:
    """``fn(*args)`` in ``size`` processes with Megatron's groups of ``tp`` ranks. Results by rank."""
    return run_ranks(_rank, size, fn, tp, str(folder), te_stand_in, args, timeout_s=115.0)


def tp_group() -> Any:
    from megatron.core import parallel_state

    return parallel_state.get_tensor_model_parallel_group()


def connect(transport: str, **settings: Any) -> Any:
    """A communicator of this rank's tensor-parallel group."""
    schedule = OVERLAPPED.get(transport, "auto")
    return commbackend.init(tp_group(), device="cpu", transport=transport, schedule=schedule, **settings)


def stock_spec(**options: Any) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    return get_gpt_layer_local_spec(**options)


def model(config: Any, spec: Any, **options: Any) -> nn.Module:
    """The example's model with biases that are not zero: the same on ranks that hold the same, and for every spec."""
    made = gpt.gpt_model(config, spec, **options)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if name.endswith("bias"):
                cut = getattr(parameter, "tensor_model_parallel", False)
                size = config.tensor_model_parallel_size if cut else 1
                full = torch.randn(size * parameter.shape[0], generator=generator)
                parameter.copy_(full.chunk(size)[tp_group().rank() if cut else 0])
    return made


def wrapped(config: Any, spec: Any) -> nn.Module:
    """The model in Megatron's DistributedDataParallel, which gives its parameters main_grad."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    return DistributedDataParallel(config, DistributedDataParallelConfig(), model(config, spec))


def two_micro_batches(model: nn.Module) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Losses, and main_grad of all parameters as the optimizer gets them."""
    from megatron.core import parallel_state
    from megatron.core.distributed import finalize_model_grads

    model.zero_grad_buffer()
    losses = []
    for seed in (1, 2):
        loss = gpt.loss_of(model, 10 * parallel_state.get_data_parallel_rank() + seed)
        loss.backward()
        losses.append(loss.detach())
    finalize_model_grads([model])
    return losses, {n: p.main_grad.clone() for n, p in model.named_parameters()}


def one_batch(model: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss, and gradients as autograd leaves them, of a model without a wrapper."""
    model.zero_grad()
    loss = gpt.loss_of(model, 5)
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters()}


def apart(got: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    """The largest difference; names must be equal."""
    assert got.keys() == want.keys(), sorted(got.keys() ^ want.keys())
    return max((got[n] - want[n]).abs().max().item() for n in want)
