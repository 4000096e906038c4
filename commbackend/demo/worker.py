"""One rank of the demo: ``python -m commbackend.demo.worker``, started by the demo itself, torchrun, mpirun or srun.

Everything it has to tell goes to ``<log>-rank<rank>.jsonl``, one JSON object a line, flushed at once: so it reads the
same under every launcher, and what a killed rank did last is there too.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

import commbackend

from ..commands.trace import Trace, overlap
from ..communicator import Communicator
from ..config import launcher
from ..errors import CommBackendError
from ..nn import reduce_replicated_grads
from .model import LanguageModel, ModelConfig, batch
from .parallel import parallelize

__all__ = ["main"]

#: Exit status of a rank that saw a communication error, as opposed to a bug (1).
EXIT_FAULT = 3
LEARNING_RATE = 1e-3
Phase: TypeAlias = Callable[[str], AbstractContextManager[Any]]
WARMUP_STEPS = 10


def main(argv: Sequence[str] | None = None) -> int:
    """Train for some steps and log them. Returns the exit status."""
    options = _parser().parse_args(argv)
    device = torch.device(options.device)
    if device.type == "cuda":
        # One GPU a rank; with --share-gpu several ranks meet on one.
        device = torch.device("cuda", max(launcher().local_rank, 0) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    if options.single:
        return _Worker(options, device, None).run()
    if launcher().dialect == "openmpi" and importlib.util.find_spec("mpi4py") is not None:
        importlib.import_module("mpi4py.MPI")  # ranks of several hosts meet over it
    overrides: dict[str, Any] = {} if options.transport == "auto" else {"transport": options.transport}
    if device.type == "cpu":
        # Where ranks share all cores the default is no copy lane; the demo is there to show one at work.
        overrides["lanes"] = 1
    if options.share_gpu:
        overrides["allow_shared_device"] = True
    comm = commbackend.init(device=device, **overrides)
    return _Worker(options, device, comm).run()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m commbackend.demo.worker", description=__doc__)
    parser.add_argument("--single", action="store_true", help="the whole model in this process, without commbackend")
    parser.add_argument("--transport", default="auto")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--share-gpu", action="store_true", help="let several ranks use one GPU")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of this rank")
    parser.add_argument("--log", required=True, help="path that the log files' names begin with")
    parser.add_argument("--trace-step", type=int, default=-1, help="record this step's timeline")
    parser.add_argument("--die-rank", type=int, default=-1, help="this rank kills itself ...")
    parser.add_argument("--die-step", type=int, default=-1, help="... in the middle of this step")
    return parser


class _Worker:
    def __init__(self, options: argparse.Namespace, device: torch.device, comm: Communicator | None) -> None:
        torch.set_num_threads(options.threads)
        self.options, self.comm = options, comm
        self.rank, self.size = (comm.rank, comm.size) if comm else (0, 1)
        self.device = device
        self._log = open(f"{options.log}-rank{self.rank}.jsonl", "w", encoding="utf-8")  # noqa: SIM115 - closed in run()

    def log(self, event: str, **values: Any) -> None:
        """Write one line; ``at_ns`` stands on the host's monotonic clock."""
        self._log.write(json.dumps({"event": event, "at_ns": time.monotonic_ns(), **values}) + "\n")
        self._log.flush()

    def run(self) -> int:
        """Train; a communication error is logged and ends this rank with EXIT_FAULT."""
        try:
            self._train()
            if self.comm is not None:
                self.comm.close()
            self.log("done")
            return 0
        except CommBackendError as e:
            self.log("error", type=type(e).__name__, message=str(e), peer=getattr(e, "rank", -1))
            return EXIT_FAULT
        finally:
            if self.comm is not None:
                self.comm.close()
            self._log.close()

    def _train(self) -> None:
        options, config = self.options, ModelConfig()
        model = LanguageModel(config, options.seed)
        if self.comm is not None:
            parallelize(model, self.comm)
        model.to(self.device)
        # A larger eps than usual: gradients at the level of rounding would otherwise be blown up to full steps, and two
        # right runs drift apart.
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.0
        )
        parameters = sum(p.numel() for p in model.parameters())
        about: dict[str, Any] = {}
        if self.comm is not None and self.comm.choice is not None:
            about = {"transport": self.comm.transport, "why": self.comm.choice.why()}
        self.log("start", rank=self.rank, size=self.size, pid=os.getpid(), parameters=parameters, **about)
        for step in range(options.steps):
            if step == options.die_step and self.rank == options.die_rank:
                self._die_in_the_middle(model)
            for group in optimizer.param_groups:
                group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / WARMUP_STEPS)
            start = time.perf_counter()
            if step == options.trace_step:
                loss = self._traced_step(model, optimizer, step)
            else:
                loss = self._step(model, optimizer, step, nullcontext)
            self.log("step", step=step, loss=loss, seconds=time.perf_counter() - start)
        if self.comm is not None:
            self.log("stats", stats=self.comm.stats(), explained=self.comm.explain())

    def _traced_step(self, model: LanguageModel, optimizer: torch.optim.Optimizer, step: int) -> float:
        """One step with the recorder on; the others pay nothing for it."""
        trace = Trace(self.rank)
        if self.comm is not None:
            self.comm.recorder = trace
        loss = self._step(model, optimizer, step, trace.phase)
        if self.comm is not None:
            self.comm.recorder = None
        trace.save(f"{self.options.log}-rank{self.rank}.trace.json")
        found = overlap(trace.spans)
        self.log("overlap", **dataclasses.asdict(found), share=found.share)
        return loss

    def _step(self, model: LanguageModel, optimizer: torch.optim.Optimizer, step: int, phase: Phase) -> float:
        config = model.config
        tokens, targets = (self._shard(t).to(self.device) for t in batch(config, self.options.seed, step))
        optimizer.zero_grad()
        with phase("forward"):
            logits = model(tokens)
            # Own tokens over everyone's: the ranks' losses add up to the mean, and so do their gradients.
            summed = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
            loss = summed / (config.sequence * config.batch)
        with phase("backward"):
            loss.backward()
        if self.comm is not None:
            with phase("replicated gradients"):
                reduce_replicated_grads(model, self.comm)
        with phase("optimizer"):
            optimizer.step()
        total = loss.detach().reshape(1)
        if self.comm is not None:
            total = commbackend.all_reduce(total, group=self.comm)
        return float(total)

    def _shard(self, tokens: Tensor) -> Tensor:
        """This rank's positions of the sequence."""
        return tokens.tensor_split(self.size)[self.rank]

    def _die_in_the_middle(self, model: LanguageModel) -> None:
        """Arrange that this process is killed inside the forward pass, as by the kernel's out-of-memory killer."""

        def kill(*_: object) -> None:
            self.log("dying")
            os.kill(os.getpid(), signal.SIGKILL)

        blocks = list(model.blocks.children())
        blocks[len(blocks) // 2].register_forward_pre_hook(kill)


if __name__ == "__main__":
    sys.exit(main())
