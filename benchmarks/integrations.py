"""Training steps of frameworks on CPUs, stock against fused, over several transports.

    OMP_NUM_THREADS=1 python benchmarks/integrations.py --json benchmarks/results/DATE/NAME-integrations.json
    python benchmarks/integrations.py --framework megatron --transport shm --seconds 20

Both forms are built from one seed in the same processes, and their steps (forward and backward) alternate, so that both
see the same load; a step's time is that of the slowest rank. To add a framework, add a function to FRAMEWORKS: it is
called on every rank, with torch.distributed up and the group's communicator made, and returns a step.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import commbackend
from commbackend.bench import facts
from commbackend.testing import run_ranks

Step = Callable[[], None]
ROOT = Path(__file__).parents[1]
HIDDEN, SEQUENCE, BATCH, LAYERS = 512, 256, 2, 2


def _example(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# -- frameworks -------------------------------------------------------------------------------------------------------
@contextlib.contextmanager
def megatron(sequence_parallel: bool) -> Iterator[Callable[[bool], Step]]:
    """Megatron-Core's GPT model with local layers, as in examples/megatron_gpt.py."""
    gpt = _example("megatron_gpt")
    gpt.SEQUENCE, gpt.BATCH = SEQUENCE, BATCH
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    from commbackend.integrations.megatron import layer_spec

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())
    options = {"num_layers": LAYERS, "hidden_size": HIDDEN, "num_attention_heads": 8}
    with gpt.cpu_stand_ins():
        config = gpt.gpt_config(dist.get_world_size(), sequence_parallel, **options)

        def make(fused: bool) -> Step:
            model = gpt.gpt_model(config, layer_spec("local", strict=True) if fused else get_gpt_layer_local_spec())

            def step() -> None:
                model.zero_grad()
                gpt.loss_of(model, 1).backward()

            return step

        def group() -> Any:
            return parallel_state.get_tensor_model_parallel_group()

        make.group = group  # type: ignore[attr-defined]
        yield make
    parallel_state.destroy_model_parallel()


@contextlib.contextmanager
def dtensor() -> Iterator[Callable[[bool], Step]]:
    """The model of examples/dtensor_fsdp.py, sequence parallel; torch's styles gather once for q, k and v, too."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor import parallel as torchs

    example = _example("dtensor_fsdp")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tokens = torch.randint(64, (BATCH, SEQUENCE + 1), generator=torch.Generator().manual_seed(0))
    gather = torchs.PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
    back = torchs.RowwiseParallel(output_layouts=Shard(1))
    columns = ("attention.wq", "attention.wk", "attention.wv", "feed_forward.w1", "feed_forward.w3")
    stock = {**example.PLAN, "layers.*.attention": gather, "layers.*.feed_forward": gather}
    stock |= {f"layers.*.{name}": torchs.ColwiseParallel() for name in columns}
    stock |= {f"layers.*.{name}": back for name in ("attention.wo", "feed_forward.w2")}
    stock["head"] = torchs.ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())

    def make(fused: bool) -> Step:
        torch.manual_seed(0)
        model = example.Model(vocabulary=64, hidden=HIDDEN, layers=LAYERS)
        torchs.parallelize_module(model, mesh, example.PLAN if fused else stock)

        def step() -> None:
            model.zero_grad()
            logits = model(tokens[:, :-1])
            torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()

        return step

    yield make


@contextlib.contextmanager
def transformers() -> Iterator[Callable[[bool], Step]]:
    """A Llama of Hugging Face transformers, random weights, sharded by transformers' own code."""
    from torch.distributed.device_mesh import init_device_mesh
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    from commbackend.integrations.transformers import tp_plan

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    sizes = {"hidden_size": HIDDEN, "intermediate_size": 3 * HIDDEN, "num_hidden_layers": LAYERS, "vocab_size": 64}
    tokens = torch.randint(64, (BATCH, SEQUENCE), generator=torch.Generator().manual_seed(0))

    def make(fused: bool) -> Step:
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(num_attention_heads=8, pad_token_id=0, **sizes))
        plan = {**model.tp_plan, **(tp_plan(model, strict=True) if fused else {})}
        apply_tensor_parallelism(model, mesh, model._expand_parallel_plan(plan))

        def step() -> None:
            model.zero_grad()
            model(input_ids=tokens, labels=tokens).loss.backward()

        return step

    yield make


#: Name -> a context that yields ``make(fused) -> step``; ``make.group()`` is the group that is fused, else the default.
FRAMEWORKS: Mapping[str, Callable[[], Any]] = {
    "megatron": lambda: megatron(False),
    "megatron, sequence parallel": lambda: megatron(True),
    "dtensor, sequence parallel": dtensor,
    "transformers": transformers,
}


# -- measuring --------------------------------------------------------------------------------------------------------
def _timed(step: Step) -> float:
    """Milliseconds of one step, of the slowest rank."""
    dist.barrier()
    start = time.perf_counter()
    step()
    took = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    return 1e3 * took.item()


def _rank(rank: int, group: Any, frameworks: list[str], transports: list[str], seconds: float, folder: str) -> Any:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "store"), group.size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=group.size, timeout=timedelta(seconds=300))
    cases = []
    for name in frameworks:
        with FRAMEWORKS[name]() as make:
            for transport in transports:
                cases.append({"framework": name, "transport": transport, **_compare(make, transport, seconds)})
    dist.destroy_process_group()
    return cases


def _compare(make: Any, transport: str, seconds: float) -> dict[str, Any]:
    group = make.group() if hasattr(make, "group") else None
    with commbackend.init(group, device="cpu", transport=transport) as comm:
        steps = {"stock": make(False), "fused": make(True)}
        samples: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(2):
            for step in steps.values():
                step()
        rounds = 0
        going = torch.tensor([time.monotonic() + seconds])  # rank 0's clock decides for all
        more = torch.ones(1)
        while bool(more):
            for name in sorted(steps, reverse=bool(rounds % 2)):
                samples[name].append(_timed(steps[name]))
            rounds += 1
            more.fill_(float(rounds < 5 or (time.monotonic() < going.item() and rounds < 1000)))
            dist.broadcast(more, 0)
        stats = comm.stats()
        ratios = [f / s for f, s in zip(samples["fused"], samples["stock"], strict=True)]
        return {
            "samples_ms": {name: [round(v, 3) for v in values] for name, values in samples.items()},
            "median_ms": {name: round(statistics.median(values), 3) for name, values in samples.items()},
            "fused over stock, median of pairs": round(statistics.median(ratios), 4),
            "calls": {**stats["overlapped_by_op"], **{f"fallback: {k}": n for k, n in stats["fallback_by_op"].items()}},
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--framework", action="append", choices=sorted(FRAMEWORKS), help="default: all")
    parser.add_argument("--transport", action="append", help="default: shm and gloo")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=20.0, help="for each framework and transport")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    frameworks, transports = options.framework or list(FRAMEWORKS), options.transport or ["shm", "gloo"]
    report = {
        "format": "commbackend-integrations-1",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": ["python", "benchmarks/integrations.py", *sys.argv[1:]],
        "machine": facts.machine(),
        "versions": facts.versions(),
        "sizes": {"hidden": HIDDEN, "sequence": SEQUENCE, "batch": BATCH, "layers": LAYERS, "ranks": options.ranks},
    }
    with tempfile.TemporaryDirectory() as folder:
        deadline_s = 120 + len(frameworks) * len(transports) * (3 * options.seconds + 120)
        args = (frameworks, transports, options.seconds, folder)
        report["cases"] = run_ranks(_rank, options.ranks, *args, timeout_s=deadline_s)[0]
    print("| framework | transport | stock ms | fused ms | fused / stock |\n|---|---|---|---|---|")
    for case in report["cases"]:
        stock, fused = case["median_ms"]["stock"], case["median_ms"]["fused"]
        ratio = case["fused over stock, median of pairs"]
        print(f"| {case['framework']} | {case['transport']} | {stock:.1f} | {fused:.1f} | {ratio:.3f} |")
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
