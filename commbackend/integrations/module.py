"""``parallelize``: tensor parallelism for any ``nn.Module``, by a plan that says what becomes of which submodule.

    model = commbackend.parallelize(model, {
        "layers.*.attn.{q,k,v}_proj": "column",     # braces: called with one input, they share one gather
        "layers.*.attn": divided("num_heads"),
        "layers.*.attn.o_proj": "row",
        "layers.*.mlp.{gate,up}_proj": "column",
        "layers.*.mlp.down_proj": "row",
        "lm_head": "column_joined",
    }, group)

Modules are replaced in place and keep their names, so ``state_dict`` has the keys of the stock model; parallel weights
are this rank's part, (out features, in features) as in ``torch.nn.Linear``. ``commbackend.nn.load_full`` loads a stock
checkpoint and ``full_state_dict`` makes one.
"""

from __future__ import annotations

import fnmatch
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from .. import ops
from ..communicator import Communicator, resolve_communicator
from ..errors import ConfigError, ShapeError, Unsupported
from ..nn import mark_replicated
from ..nn.linear import ColumnParallelLinear, Marked, ParallelModule, RowParallelLinear, Shared, column_parallel
from ..ops.gradients import WgradSink
from .sharing import SharedInput, share

__all__ = ["Style", "divided", "full_state_dict", "parallelize"]

#: What becomes of a module: a name (see ``parallelize``), or ``f(module, its name, communicator)`` that returns the
#: module to put in its place, or None to leave it; or several of them.
Style: TypeAlias = "str | Callable[[nn.Module, str, Communicator], nn.Module | None]"

_STYLES = ("column", "row", "column_joined", "split", "join", "replicated")


def parallelize(
    model: nn.Module,
    plan: Mapping[str, Style | Sequence[Style]],
    group: Any = None,
    *,
    sequence_parallel: bool = False,
    dim: int = 0,
    save: str = "shard",
    wgrad: WgradSink = None,
) -> nn.Module:
    """Spread the linear layers of ``model`` over the ranks of ``group``, as ``plan`` says, in place. Collective where
    the group has no communicator yet, local otherwise; all ranks pass models of the same weights.

    Args:
        plan: Names of submodules to styles. A name may hold ``*`` (within one level), and ``{a,b}``: those modules of
            one parent are columns of one input, which is gathered, and whose gradient is exchanged, once for all.
            "column" (``nn.Linear``): this rank computes some of the out features.
            "row" (``nn.Linear``): this rank has some of the in features; results are summed.
            "column_joined" (``nn.Linear``): a column whose results are joined to all out features, such as logits.
            "split": after this module each rank goes on with its part along ``dim``, such as after an embedding.
            "join": after this module ranks have the whole along ``dim`` again, such as after the last norm. Parameters
            of its own (not of modules in it) are "replicated".
            "replicated": parameters are whole, but see this rank's positions only, such as norms in between.
            (The last three do nothing without ``sequence_parallel``, so that one plan serves both.)
            Or a callable, see ``Style``; ``divided`` makes one for numbers of heads. Or several of these.
        sequence_parallel: Activations before columns and after rows are split along ``dim`` (as "split" and "join"
            make them) instead of replicated. Call ``commbackend.nn.reduce_replicated_grads(model)`` after backward.
        dim: The sequence dimension: 0 for (sequence, batch, hidden), 1 for (batch, sequence, hidden).
        save, wgrad: As of ``nn.ColumnParallelLinear``.

    Returns:
        ``model``, or what took its place where the plan names it (by "").

    Raises:
        ConfigError: A name matches nothing, or a module twice; a style is unknown; a weight is shared.
        ShapeError: Features do not divide by the ranks; the message names the module and the number.
        Unsupported: A module is no plain ``nn.Linear``, or has hooks or parametrizations that would be lost.
        Nothing is changed then, but by callables that had been called.
    """
    weight = next(iter(model.parameters()), None)
    device = weight.device if weight is not None and not weight.is_meta else None
    comm = resolve_communicator(group, device=device)
    options = {"group": comm, "sequence_parallel": sequence_parallel, "wgrad": wgrad}
    column = {**options, "gather_dim": dim, "save": save}
    make: dict[Style, Callable[[nn.Linear], nn.Module]] = {
        "column": lambda linear: _parallel(_Column, linear, **column),
        "column_joined": lambda linear: _parallel(_JoinedColumn, linear, **column),
        "row": lambda linear: _parallel(RowParallelLinear, linear, **options, scatter_dim=dim),
    }
    chosen, owners = _match(model, plan), _owners(model)
    every = [(name, style) for name, (styles, _) in chosen.items() for style in styles]
    linears = [(n, s, _linear(n, s, model.get_submodule(n), comm, owners)) for n, s in every if s in make]
    made: dict[str, nn.Module] = {}
    for name, style in every:
        if callable(style) and (replacement := style(model.get_submodule(name), name, comm)) is not None:
            made[name] = replacement
    made |= {name: make[style](linear) for name, style, linear in linears}
    for name, style in every if sequence_parallel else ():
        _boundary(made.get(name, model.get_submodule(name)), style, comm, dim)
    root = made.pop("", model)
    for name, replacement in made.items():
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, replacement)
    labels: dict[str, list[str]] = {}
    for name, (_, label) in chosen.items():
        labels.setdefault(label, []).append(name)
    for names in labels.values():
        members = [m for n in names if isinstance(m := made.get(n), _Column)]
        if len(members) > 1:
            share(_called(model, names[0]), members)
    return root


def divided(*attributes: str) -> Callable[[nn.Module, str, Communicator], None]:
    """Return a style that divides integers a module counts by, such as ``num_heads``, by the number of ranks.

    Raises (when the plan is applied):
        ShapeError: One does not divide, or is no integer; the message names module, attribute and number.
    """

    def style(module: nn.Module, name: str, comm: Communicator) -> None:
        values = {a: getattr(module, a, None) for a in attributes}
        for attribute, value in values.items():
            if not isinstance(value, int) or value % comm.size:
                raise ShapeError(f"parallelize: {name}.{attribute}={value!r} does not divide by the {comm.size} ranks")
        for attribute, value in values.items():
            setattr(module, attribute, value // comm.size)  # type: ignore[operator]

    return style


@torch.no_grad()
def full_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Return the whole weights of a model that holds parallel layers, by the stock model's names. Collective: every
    rank gets all of them, as new tensors on the model's device.
    """
    owners = dict(model.named_modules())
    whole: dict[str, Tensor] = {}
    for m in owners.values():
        if isinstance(m, Marked):
            m.mark_again()
    for name, held in model.state_dict(keep_vars=True).items():
        owner, cut = owners[name.rpartition(".")[0]], getattr(held, "partition_dim", -1)
        if hasattr(held, "full_tensor"):
            held = held.full_tensor()  # of FSDP2's shards
        if cut >= 0 and isinstance(owner, ParallelModule):
            whole[name] = ops.all_gather(held.detach(), owner.comm, dim=cut)
        else:
            whole[name] = held.detach().clone() if isinstance(held, Tensor) else held
    return whole


# -- what the plan names ----------------------------------------------------------------------------------------------


def _match(model: nn.Module, plan: Mapping[str, Style | Sequence[Style]]) -> dict[str, tuple[tuple[Style, ...], str]]:
    """Module name -> its styles, and a label that modules which share an input have in common."""
    names = [name for name, _ in model.named_modules(remove_duplicate=False)]
    chosen: dict[str, tuple[tuple[Style, ...], str]] = {}
    for pattern, given in plan.items():
        styles: tuple[Style, ...] = (given,) if isinstance(given, str) or callable(given) else tuple(given)
        for style in styles:
            if not callable(style) and style not in _STYLES:
                known = ", ".join(_STYLES)
                raise ConfigError(f"parallelize: {pattern!r}: style {style!r} is none of {known}, nor a callable")
        alternatives = [re.compile(_regex(p)) for p in _braces(pattern)]
        found = [n for n in names if any(a.fullmatch(n) for a in alternatives)]
        if not found:
            close = ", ".join(fnmatch.filter(names, f"*{pattern.rpartition('.')[2]}*")[:5]) or ", ".join(names[1:6])
            raise ConfigError(f"parallelize: {pattern!r} matches no module; there are {close}, ...")
        for name in found:
            if name in chosen:
                raise ConfigError(f"parallelize: {name!r} is matched twice, the second time by {pattern!r}")
            shared = len(alternatives) > 1 and "column" in styles
            chosen[name] = styles, f"{pattern} {name.rpartition('.')[0]}" if shared else name
    return chosen


def _braces(pattern: str) -> list[str]:
    found = re.search(r"\{([^{}]*)\}", pattern)
    if found is None:
        return [pattern]
    return [
        q for choice in found[1].split(",") for q in _braces(pattern[: found.start()] + choice + pattern[found.end() :])
    ]


def _regex(pattern: str) -> str:
    return re.escape(pattern).replace(r"\*", r"[^.]*")


def _owners(model: nn.Module) -> dict[int, list[str]]:
    """Parameter -> the names it has in the model."""
    found: dict[int, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        found.setdefault(id(p), []).append(name)
    return found


def _called(model: nn.Module, name: str) -> nn.Module:
    """The module around ``name`` whose forward calls it: lists and dicts have none."""
    parent = model.get_submodule(name.rpartition(".")[0])
    return _called(model, name.rpartition(".")[0]) if isinstance(parent, (nn.ModuleList, nn.ModuleDict)) else parent


def _linear(name: str, style: Style, module: nn.Module, comm: Communicator, owners: dict[int, list[str]]) -> nn.Linear:
    """Refuse what would not be the same layer in parallel."""
    if not isinstance(module, nn.Linear) or type(module).forward is not nn.Linear.forward:
        raise Unsupported(
            f"parallelize: {name} is a {type(module).__name__}: {style!r} is for torch.nn.Linear; pass a callable"
        )
    hooks = [h for h in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks") if getattr(module, h)]
    if hooks or hasattr(module, "parametrizations"):
        raise Unsupported(f"parallelize: {name} has {', '.join(hooks) or 'parametrizations'}, which would be lost")
    for p in module.parameters():
        others = [n for n in owners[id(p)] if n.rpartition(".")[0] != name]
        if others:
            raise ConfigError(f"parallelize: {name} shares a parameter with {', '.join(others)}: untie it first")
    what, features = ("in_features", module.in_features) if style == "row" else ("out_features", module.out_features)
    if features % comm.size:
        raise ShapeError(f"parallelize: {name}.{what}={features} does not divide by the {comm.size} ranks")
    return module


def _parallel(kind: type[ColumnParallelLinear] | type[RowParallelLinear], linear: nn.Linear, **options: Any) -> Any:
    weight = linear.weight
    if weight.is_meta:
        factory: dict[str, Any] = {"device": weight.device, "dtype": weight.dtype}
        made = kind(linear.in_features, linear.out_features, linear.bias is not None, **options, **factory)
    else:
        made = kind.from_linear(linear, **options)
    for ours, theirs in zip(made.parameters(), linear.parameters(), strict=True):
        ours.requires_grad_(theirs.requires_grad)
    return made.train(linear.training)


def _boundary(module: nn.Module, style: Style, comm: Communicator, dim: int) -> None:
    # Partials of this module's functions: copies of the model keep them, and share the communicator.
    if style == "split":
        module.register_forward_hook(functools.partial(_at_end, _Split, Shared(comm), dim))
    elif style == "join":
        module.register_forward_hook(functools.partial(_at_end, _Join, Shared(comm), dim))
        mark_replicated(module, recurse=False)
    elif style == "replicated":
        mark_replicated(module)


def _at_end(function: Any, shared: Shared, dim: int, module: nn.Module, args: Any, out: Any) -> Any:
    return function.apply(out, shared.comm, dim)


# -- layers -----------------------------------------------------------------------------------------------------------


class _Column(ColumnParallelLinear):
    """A column layer that may share its input with others."""

    shared: SharedInput | None = None

    def alike(self) -> tuple[Any, ...]:
        """As of ``sharing.Member``: the plan gives all that share the same options."""
        return self.comm, self.weight.dtype

    def forward(self, x: Tensor, rows: Sequence[int] | None = None) -> Tensor:
        if self.shared is None:
            return super().forward(x, rows)
        how = None if rows is None else tuple(rows)
        return self.shared.product(self, x, lambda members: column_parallel(x, *members, rows=rows), how)


class _JoinedColumn(ColumnParallelLinear):
    """A column layer whose results are joined along the out features."""

    def forward(self, x: Tensor, rows: Sequence[int] | None = None) -> Tensor:
        out: Tensor = _Join.apply(super().forward(x, rows), self.comm, -1)  # type: ignore[no-untyped-call]
        return out


class _Split(torch.autograd.Function):
    """This rank's part of a replicated tensor; the whole gradient is gathered from the ranks' parts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator, dim: int) -> Tensor:
        ctx.comm, ctx.dim = comm, dim
        return _own(x, comm, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return ops.all_gather(grads[0].contiguous(), ctx.comm, dim=ctx.dim), None, None


class _Join(torch.autograd.Function):
    """The whole of the ranks' parts; of a replicated gradient each rank takes its part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator, dim: int) -> Tensor:
        ctx.comm, ctx.dim = comm, dim
        return ops.all_gather(x, comm, dim=dim)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _own(grads[0], ctx.comm, ctx.dim), None, None


def _own(x: Tensor, comm: Communicator, dim: int) -> Tensor:
    extent = x.shape[dim]
    if extent % comm.size:
        raise ShapeError(f"parallelize: dim {dim} of {tuple(x.shape)} does not divide by the {comm.size} ranks")
    part = extent // comm.size
    return x.narrow(dim, comm.rank * part, part).clone()
