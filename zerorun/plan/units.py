"""Units: which parameters are unsharded, resharded and reduced together.

[Note: choosing units]
A unit is entered and left through its module's forward, so units are never nested: a policy takes the outermost modules
that fit. A module without a forward of its own is never called, so its children take its place. The parameters of no other
unit, and every parameter that two units share (tied weights), belong to the root unit, which stays unsharded from the
beginning of a forward to the end of its backward. So does a parameter that a script has registered, because modules
outside of its unit use it.

A *leaf* is a module that is gathered whole, because not every child of it runs in each forward: a layer of experts. No unit
begins inside a leaf. One that is in no unit is one.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from torch import nn

from ..distributed.tensor_shard import numel_on_a_rank, shards_of
from ..errors import ConfigError, ConfigProblem
from .parameter_kinds import members, own_members, packed_buffers

ROOT = "root"
_WRAPPER = "_orig_mod."  # what torch.compile puts in names


# Attributes that scripts set: of a module that is a leaf (accelerate looks for this one), and of a registered parameter.
LEAF_MARK, EXTERNAL_MARK = "_z3_leaf", "_used_elsewhere"


@dataclass(frozen=True)
class LeafModules:
    """Which modules are leaves, besides those that a script has marked: by class, by name, by the end of the name."""

    classes: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    suffixes: tuple[str, ...] = ()

    def has(self, name: str, module: nn.Module) -> bool:
        """True if ``module``, of this name in the model, is a leaf."""
        if getattr(module, LEAF_MARK, False) or name in self.names or name.endswith(self.suffixes):
            return True
        return bool(self.classes) and not {*names_of(type(module))}.isdisjoint(self.classes)


def stored_name(name: str) -> str:
    """Return the name for everybody of what ``named_parameters`` or ``state_dict`` of this rank's model call ``name``."""
    return name.replace(_WRAPPER, "")


def names_of(kind: type) -> tuple[str, str]:
    """The name of a class, without its module and with it."""
    return kind.__name__, f"{kind.__module__}.{kind.__qualname__}"


@dataclass(frozen=True)
class UnitPolicy:
    """How to cut a model into units. ``kind``: by_block, by_block_and_size, by_block_group, size_based or classes."""

    kind: str = "by_block"
    block_count: int = 2  # blocks per unit, for by_block_group
    numel: int = 50_000_000  # elements, for size_based and by_block_and_size
    classes: tuple[str, ...] = ()
    leaves: LeafModules = LeafModules()


@dataclass
class UnitSpec:
    """A unit before it has memory: the modules that enter it and the parameters it owns."""

    name: str
    modules: list[nn.Module]
    params: list[tuple[str, nn.Parameter]] = field(default_factory=list)
    shares_slots: bool = True  # False: an embedding or head, which keeps a slot of its own


def choose_units(module: nn.Module, policy: UnitPolicy, tensor_ranks: int = 1) -> list[UnitSpec]:
    """Cut ``module`` into units by ``policy``; the root unit comes first. Raises ConfigError for unknown classes.

    ``tensor_ranks``: those that divide layers. All of them come to the same units.

    Parameters that stay apart (parameter_kinds.py) are in no unit; of wrappers, their members are.
    """
    specs = _with_leaves(module, _candidates(module, policy, tensor_ranks), policy.leaves)
    around: dict[int, set[int]] = defaultdict(set)
    for index, spec in enumerate(specs):
        for submodule in (submodule for part in spec.modules for submodule in part.modules()):
            around[id(submodule)].add(index)
    owners: dict[int, set[int]] = defaultdict(set)
    for submodule in module.modules():
        for tensor in own_members(submodule):
            owners[id(tensor)] |= around.get(id(submodule), {-1})
    root = UnitSpec(ROOT, [module])
    for name, param in (*module.named_parameters(), *packed_buffers(module).items()):
        for path, tensor in members(param):
            holders = owners.pop(id(tensor), None)
            if holders is not None:
                alone = len(holders) == 1 and not getattr(param, EXTERNAL_MARK, False)
                owner = next(iter(holders)) if alone else -1
                (specs[owner] if owner >= 0 else root).params.append((name + path, tensor))
    return [root, *(spec for spec in specs if spec.params)]


def _candidates(module: nn.Module, policy: UnitPolicy, tensor_ranks: int) -> list[UnitSpec]:
    if policy.kind == "classes":
        return _by_class(module, policy.classes)
    if policy.kind == "size_based":
        found: list[UnitSpec] = []
        _by_size(module, "", lambda part: _numel(part, tensor_ranks) >= policy.numel, found, is_root=True)
        return found
    blocks = repeated_blocks(module)
    if policy.kind == "by_block_group":
        return _grouped(blocks, policy.block_count)
    specs = [UnitSpec(name, [block]) for name, block in blocks]
    if policy.kind == "by_block_and_size":
        taken = {id(part) for _, block in blocks for part in block.modules()}
        for name, part in module.named_modules():
            leaf = id(part) not in taken and part is not module and not list(part.children())
            if leaf and has_forward(part) and _numel(part, tensor_ranks) >= policy.numel:
                specs.append(UnitSpec(name, [part], shares_slots=False))
    return specs


def _with_leaves(module: nn.Module, specs: list[UnitSpec], leaves: LeafModules) -> list[UnitSpec]:
    """Return ``specs`` without the modules inside leaves, and with the outermost leaves that are in none of them."""
    found: dict[str, nn.Module] = {}
    for name, part in module.named_modules():
        if leaves.has(name, part) and not any(f"{name}.".startswith(f"{outer}." if outer else "") for outer in found):
            found[name] = part
    if not found:
        return specs
    taken = {id(part) for spec in specs for member in spec.modules for part in member.modules()}
    apart = {name: part for name, part in found.items() if id(part) not in taken and _has_elements(part)}
    inside = {id(part) for leaf in apart.values() for part in leaf.modules()}
    for name, part in apart.items():
        if not has_forward(part):
            raise ConfigError([_without_forward(name, part, "zero_optimization.leaf_module")])
    kept = [replace(spec, modules=[part for part in spec.modules if id(part) not in inside]) for spec in specs]
    kept += [UnitSpec(name, [part]) for name, part in apart.items() if part is not module]
    order = {id(part): number for number, part in enumerate(module.modules())}
    return sorted((spec for spec in kept if spec.modules), key=lambda spec: order[id(spec.modules[0])])


def _numel(module: nn.Module, tensor_ranks: int) -> int:
    shards = shards_of(module)
    return sum(numel_on_a_rank(param, shards.get(id(param)), tensor_ranks) for param in module.parameters())


def _has_elements(module: nn.Module) -> bool:
    """True also where all of them are on other tensor ranks."""
    return any(param.numel() for param in module.parameters()) or bool(shards_of(module))


def _children(module: nn.Module, prefix: str) -> list[tuple[str, nn.Module]]:
    return [(f"{prefix}{name}", child) for name, child in module.named_children()]


def repeated_blocks(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return (name, block) for the members of the outermost lists in which a class with parameters occurs at least twice.

    A member without a forward, such as the inner list of a list of lists, is replaced by its own members.

    In a model that is cut into pipeline stages, a list may be short: there, a module that contains modules with parameters
    is a block even if its class occurs only once.
    """
    return list(_blocks(module, "", set()))


def layerdrop_of(model: nn.Module) -> float:
    """Return the probability by which a transformers ``model`` in training leaves out a block; 0 if it leaves out none."""
    found = [getattr(part, "layerdrop", 0.0) for part in (getattr(model, "config", None), *model.modules())]
    return max(value for value in found if isinstance(value, int | float))


def _blocks(module: nn.Module, prefix: str, seen: set[int]) -> Iterator[tuple[str, nn.Module]]:
    is_list = isinstance(module, (nn.ModuleList, nn.Sequential))
    members = _callable_members(module, prefix) if is_list else _children(module, prefix)
    children = [(name, child) for name, child in members if id(child) not in seen]
    repeated: set[type] = set()
    elsewhere = is_list and any(getattr(child, "is_elsewhere", False) for child in module.children())
    cut = elsewhere or getattr(module, "is_cut", False)
    if cut or is_list:
        counts = Counter(type(child) for _, child in children if _has_elements(child))
        repeated = {kind for kind, count in counts.items() if count >= 2}
    if cut:
        made = [child for _, child in children if any(_has_elements(part) for part in child.children())]
        repeated |= {type(child) for child in made if has_forward(child)}
    for name, child in children:
        seen.add(id(child))
        if type(child) in repeated and _has_elements(child):
            yield name, child
        else:
            yield from _blocks(child, f"{name}.", seen)


def _callable_members(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the children; a child without a forward is replaced by its own children, recursively."""
    for name, child in _children(module, prefix):
        if has_forward(child):
            yield name, child
        else:
            yield from _callable_members(child, f"{name}.")


def has_forward(module: nn.Module) -> bool:
    """False for lists, dicts and other modules that only hold parameters or modules, so that hooks on them never run."""
    return getattr(module.forward, "__func__", None) is not nn.Module.forward


def _grouped(blocks: Sequence[tuple[str, nn.Module]], count: int) -> list[UnitSpec]:
    """Group neighbouring blocks of one list, ``count`` to a unit."""
    specs: list[UnitSpec] = []
    last_parent, filled = None, 0
    for name, block in blocks:
        parent = name.rpartition(".")[0]
        if parent != last_parent or filled == count:
            specs.append(UnitSpec(name, []))
            last_parent, filled = parent, 0
        specs[-1].modules.append(block)
        filled += 1
    return specs


def _by_class(module: nn.Module, classes: Sequence[str]) -> list[UnitSpec]:
    specs: list[UnitSpec] = []
    inside: set[int] = set()
    found: set[str] = set()
    for name, part in module.named_modules():
        found.add(type(part).__name__)
        if id(part) in inside or type(part).__name__ not in classes or part is module:
            continue
        if not has_forward(part):
            raise ConfigError([_without_forward(name, part)])
        inside.update(id(sub) for sub in part.modules())
        specs.append(UnitSpec(name, [part]))
    missing = [name for name in classes if name not in found]
    parts = any(getattr(part, "is_cut", False) or getattr(part, "is_elsewhere", False) for part in module.modules())
    if missing and not parts:  # other pipeline stages may have them
        raise ConfigError(
            [
                ConfigProblem(
                    "zero_optimization.unit_policy",
                    missing,
                    "the model has no module of this class.",
                    f"name classes out of {sorted(found)}, or use 'by_block'.",
                )
            ]
        )
    return specs


def _without_forward(name: str, part: nn.Module, key: str = "zero_optimization.unit_policy") -> ConfigProblem:
    inner = sorted({type(child).__name__ for _, child in _callable_members(part, "") if _has_elements(child)})
    return ConfigProblem(
        key,
        type(part).__name__,
        f"{name!r} is of this class, which has no forward: it is never called, so nothing would gather its parameters.",
        f"name the classes that are called in it, out of {inner}.",
    )


def _by_size(
    module: nn.Module, prefix: str, is_large: Callable[[nn.Module], bool], found: list[UnitSpec], *, is_root: bool
) -> bool:
    """Find the smallest modules that are large, bottom up. Return True if ``module`` contains a unit."""
    before = len(found)
    holds = False
    for name, child in _children(module, prefix):
        holds = _by_size(child, f"{name}.", is_large, found, is_root=False) or holds
    if not holds and not is_root and has_forward(module) and is_large(module):
        found.insert(before, UnitSpec(prefix[:-1], [module]))
        return True
    return holds
