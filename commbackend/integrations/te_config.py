"""Reads the tp-comm-overlap YAML of TransformerEngine and Megatron, so that a tuned file keeps its meaning.

    proj_fprop: {method: pipeline, num_splits: 4}
    fc1_fprop: {method: ring_exchange, aggregate: 1}

Its sections are GEMMs: a buffer (qkv, proj, fc1, fc2: Megatron's ``tp_comm_buffer_name``, here the layer's name) and a
pass (fprop, dgrad, wgrad). Of every key one of three things is said, and nothing is dropped in silence:

* it is *honoured*: it becomes a wish for ``Communicator.configure`` (schedule, chunks, polls, blocks);
* it is *met*: what it asks for is so in any case, and the reason is kept;
* it is *refused*, with what to write instead: ConfigError, or a warning with ``refused="warn"``.

What differs: TransformerEngine has one GEMM a section, while a backward pass here is one call (the gather or scatter
with both products), so that ``dgrad`` speaks for the whole call and ``wgrad`` has nothing left to choose.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError, Unavailable

if TYPE_CHECKING:
    from ..communicator import Communicator

__all__ = ["GEMMS", "METHODS", "OverlapConfig", "Wish", "load", "parse"]

log = logging.getLogger("commbackend")

#: Section -> (layer, phase, operation, methods that it may name). With SP: columns gather and rows scatter in forward.
GEMMS: Mapping[str, tuple[str, str, str, tuple[str, ...]]] = {
    f"{layer}_{gemm}": (layer, phase, op, methods)
    for layers, gemm, phase, op, methods in (
        (("qkv", "fc1"), "fprop", "forward", "all_gather_matmul", ("ring_exchange",)),
        (("qkv", "fc1"), "dgrad", "backward", "dgrad_reduce_scatter", ("bulk", "ring_exchange", "pipeline")),
        (("qkv", "fc1"), "wgrad", "backward", "dgrad_reduce_scatter", ("bulk",)),
        (("proj", "fc2"), "fprop", "forward", "matmul_reduce_scatter", ("pipeline", "ring_exchange")),
        (("proj", "fc2"), "dgrad", "backward", "all_gather_matmul", ("ring_exchange",)),
        (("proj", "fc2"), "wgrad", "backward", "all_gather_matmul", ("external",)),
    )
    for layer in layers
}
#: Every method that TransformerEngine has.
METHODS = ("ring_exchange", "pipeline", "bulk", "external")

_ONE_CALL = "a backward pass is one call, whose gather, products and scatter overlap"
_NO_KERNEL = "bytes move by copy engines (GPU) or worker threads (CPU), not by kernels that take SMs"
#: Keys that are whole numbers, with their bounds.
_INTEGERS = {
    "num_sm": (1, 132 * 8),
    "cga_size": (1, 16),
    "num_splits": (1, 32),
    "comm_priority": (-100, 100),
    "gemm_priority": (-100, 100),
}
_FLAGS = ("set_sm_margin", "aggregate", "atomic_gemm", "use_ce", "fp8_buf", "pipeline_rs_overlap_first_gemm")
_KEYS = ("method", *_INTEGERS, *_FLAGS, "is_reduce_scatter")


@dataclass(frozen=True)
class Wish:
    """What one section asks for: the arguments of ``Communicator.configure``."""

    layer: str
    phase: str
    op: str
    knobs: tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class OverlapConfig:
    """A file that was read.

    Attributes:
        wishes: What is honoured.
        met: "section.key = value: why it holds in any case".
        refused: "section.key = value: why not; what to write".
        aggregated: Sections whose ``aggregate`` halves the number of products: (layer, phase, op).
    """

    wishes: tuple[Wish, ...] = ()
    met: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    aggregated: tuple[tuple[str, str, str], ...] = ()

    def apply(self, comm: Communicator) -> None:
        """Tell ``comm`` what was asked for. Local, but all ranks must do the same. Nothing with ``transport="off"``."""
        if comm.off:
            return
        for wish in self.wishes:
            knobs = dict(wish.knobs)
            if knobs.get("schedule") == "push" and not comm.caps.one_sided:
                knobs["schedule"] = "collective"  # over a library of collectives, a ring's step is one of them
            comm.configure(wish.layer, phase=wish.phase, op=wish.op, **knobs)
        for layer, phase, op in self.aggregated:
            comm.configure(layer, phase=phase, op=op, blocks=max(1, comm.size // 2))


@dataclass
class _Reader:
    """Collects what a file says, section by section."""

    wishes: list[Wish] = field(default_factory=list)
    met: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    aggregated: list[tuple[str, str, str]] = field(default_factory=list)

    def section(self, name: str, values: Mapping[str, Any]) -> None:
        layer, phase, op, methods = GEMMS[name]
        for key in values:
            if key not in _KEYS:
                raise ConfigError(f"{name}.{key}: unknown key{_close(str(key), _KEYS)}; known: {', '.join(_KEYS)}")
        method = values.get("method", methods[0])
        if method not in METHODS:
            raise ConfigError(f"{name}.method = {method!r}: one of {', '.join(METHODS)} is needed")
        if method not in methods:
            instead = f"write method: {' or '.join(methods)}"
            self._refuse(name, "method", method, "this product cannot be overlapped so", instead)
            return
        knobs: dict[str, Any] = {}
        if "method" in values:
            if method in ("bulk", "external"):
                self._meet(name, "method", method, _ONE_CALL)
            else:
                knobs["schedule"] = "push"
        for key, raw in values.items():
            if key != "method":
                self._key(name, key, _value(name, key, raw), method, knobs)
        if knobs:
            self.wishes.append(Wish(layer, phase, op, tuple(sorted(knobs.items()))))

    def _key(self, name: str, key: str, value: int, method: str, knobs: dict[str, Any]) -> None:
        layer, phase, op, _ = GEMMS[name]
        free = method in ("bulk", "external")
        match key:
            case "num_splits":
                if method == "pipeline":
                    knobs["chunks"] = value
                else:
                    self._meet(name, key, value, f"{method} has no splits in TransformerEngine either")
            case "atomic_gemm":
                if free:
                    self._meet(name, key, value, f"{method} has no atomic form in TransformerEngine either")
                else:
                    knobs["polls"] = bool(value)
            case "aggregate":
                if value and method == "ring_exchange":
                    self.aggregated.append((layer, phase, op))
                else:
                    self._meet(name, key, value, "chunks are multiplied as they arrive")
            case "num_sm" | "cga_size" | "set_sm_margin":
                self._meet(name, key, value, _NO_KERNEL)
            case "use_ce":
                if value:
                    self._meet(name, key, value, _NO_KERNEL)
                else:
                    self._refuse(name, key, value, _NO_KERNEL, "leave use_ce out, or write 1")
            case "fp8_buf":
                if value:
                    why = "what moves has the type of the operands, and layers run stock where that is fp8 of a recipe"
                    self._refuse(name, key, value, why, "leave fp8_buf out, or write 0")
                else:
                    self._meet(name, key, value, "what moves has the type of the operands")
            case "comm_priority" | "gemm_priority":
                if value:
                    why = "copy lanes run on streams of high priority and products on the caller's stream"
                    self._refuse(name, key, value, why, f"leave {key} out, or write 0")
                else:
                    self._meet(name, key, value, "0 is the library's choice")
            case "pipeline_rs_overlap_first_gemm":
                self._meet(name, key, value, "rows leave as soon as the first product has finished them")
            case "is_reduce_scatter":
                scatters = name.endswith("fprop") == (layer in ("proj", "fc2"))
                if bool(value) == scatters or method == "bulk":
                    self._meet(name, key, value, _ONE_CALL)
                else:
                    what = "scatters" if scatters else "gathers"
                    self._refuse(name, key, value, f"this product {what}", "leave is_reduce_scatter out")

    def _meet(self, name: str, key: str, value: Any, why: str) -> None:
        self.met.append(f"{name}.{key} = {value}: {why}")

    def _refuse(self, name: str, key: str, value: Any, why: str, instead: str) -> None:
        self.refused.append(f"{name}.{key} = {value}: {why}; {instead}")


def load(path: str | Path, *, refused: str = "raise") -> OverlapConfig:
    """Read a tp-comm-overlap YAML file. Local.

    Raises:
        ConfigError: As ``parse``; also if the file cannot be read.
        Unavailable: pyyaml is not installed.
    """
    try:
        import yaml
    except ImportError as e:
        raise Unavailable("reading a tp-comm-overlap file needs pyyaml", "pip install pyyaml") from e
    try:
        # The plain loader: a file makes numbers, strings, lists and dicts, never objects.
        found = yaml.safe_load(Path(path).read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as e:
        raise ConfigError(f"tp-comm-overlap file {path}: {e}") from e
    return parse(found, refused=refused, where=str(path))


def parse(sections: Any, *, refused: str = "raise", where: str = "tp-comm-overlap") -> OverlapConfig:
    """Read the sections of a file, or the ``ub_cfgs`` of a program. Local.

    Args:
        sections: {"qkv_fprop": {"method": ..., ...}, ...}; None or {} asks for nothing.
        refused: "raise" or "warn": what happens with keys that cannot be honoured.
        where: For messages.

    Raises:
        ConfigError: A section, key or value is unknown; with ``refused="raise"`` also if something is refused: the
            message lists all of it, with what to write instead.
    """
    if refused not in ("raise", "warn"):
        raise ConfigError(f"refused={refused!r}: 'raise' or 'warn' is needed")
    if not isinstance(sections or {}, Mapping):
        raise ConfigError(f"{where}: {type(sections).__name__}: sections such as 'qkv_fprop: ...' are needed")
    reader = _Reader()
    for name, values in (sections or {}).items():
        if name not in GEMMS:
            raise ConfigError(f"{where}: unknown section {name!r}{_close(str(name), GEMMS)}; known: {', '.join(GEMMS)}")
        if not isinstance(values or {}, Mapping):
            raise ConfigError(f"{where}: {name}: {values!r}: keys such as 'method: ring_exchange' are needed")
        try:
            reader.section(name, values or {})
        except ConfigError as e:
            raise ConfigError(f"{where}: {e}") from None
    if reader.refused:
        text = f"{where}: cannot be honoured:\n  " + "\n  ".join(reader.refused)
        if refused == "raise":
            raise ConfigError(f"{text}\n(refused='warn' reads the file without these lines)")
        log.warning("commbackend: %s", text)
    return OverlapConfig(tuple(reader.wishes), tuple(reader.met), tuple(reader.refused), tuple(reader.aggregated))


def _value(name: str, key: str, raw: Any) -> int:
    """The value of a key as a number; files write 0, 1, true and false alike."""
    low, high = _INTEGERS.get(key, (0, 1))
    if not isinstance(raw, int) or not low <= raw <= high or (key in _INTEGERS and isinstance(raw, bool)):
        wanted = f"an integer {low}...{high}" if key in _INTEGERS else "0, 1, true or false"
        raise ConfigError(f"{name}.{key} = {raw!r}: {wanted} is needed")
    return int(raw)


def _close(name: str, known: Any) -> str:
    found = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {found[0]}?)" if found else ""
