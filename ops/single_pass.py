"""Optimizer updates in one pass over memory, as functions of flat tensors and as optimizers.

One pass unscales and clips the gradient (one coefficient), decays and updates the fp32 weight and its fp32 states, and
writes the weight rounded to the dtype that the model computes in. In mixed precision with Adam that is 28 bytes per
element, where casting up, updating and casting down takes 40. Weight and states may also be kept in bf16 (rounding.py), or
states in 8 bits (state_format.py). Formulas, state names and group keys are those of ``torch.optim``. On a CPU the native
library does it (native.py), on a GPU a Triton kernel (on_cuda.py); elsewhere, and without them, torch does
(torch_updates.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from inspect import signature
from typing import Any, cast, overload

import torch
from torch import Tensor

from . import native, on_cuda, torch_updates
from .rounding import NEAREST, Origin, Rounding
from .state_format import BLOCK, SCALE, Blocks, State, StateFormat, StatePart, held, keep_state
from .update_operands import Operands, Updates

ENDLESS = 2.0**100  # as a number of steps: any decay below 1, to this power, is 0

# -- functions ---------------------------------------------------------------------------------------------------------
#
# Tensors are as Operands says, and so is ``coefficient``, which multiplies the gradient. Its tensor is not changed.
# ``rounding``: of what is kept in bf16, also the weight.


_left_to_torch: set[str] = set()  # device types; what ranks have agreed on holds for the whole process


def _library(operands: Operands) -> Updates | None:
    """Return what runs the update; None for torch."""
    return _library_on(operands.weight.device)


def _library_on(device: torch.device) -> Updates | None:
    if device.type in _left_to_torch:
        return None
    if device.type == "cuda":
        return on_cuda.kernels(device)
    return native.library() if device.type == "cpu" else None


def is_native(device: torch.device) -> bool:
    """Return True if updates on ``device`` are not torch's, which are rounded differently. Builds what they need."""
    return _library_on(device) is not None


def leave_to_torch(device: torch.device) -> None:
    """Let torch run updates on all devices of this type from here on, as it does where nothing else can."""
    _left_to_torch.add(device.type)


@torch.no_grad()
def adam(
    weight: Tensor,
    gradient: Tensor,
    exp_avg: State,
    exp_avg_sq: State,
    out: Tensor | None = None,
    *,
    step: int,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    decoupled: bool = True,
    bias_correction: bool = True,
    coefficient: float | Tensor = 1.0,
    rounding: Rounding = NEAREST,
) -> None:
    """Adam (Kingma & Ba 2015, arXiv:1412.6980); with ``decoupled``, AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101).

    ``step``: the number of this step, from 1. Without ``bias_correction`` the moments are used uncorrected, as after
    infinitely many steps.
    """
    operands = Operands(weight, gradient, (exp_avg, exp_avg_sq), out, coefficient, rounding)
    (beta1, beta2), library = betas, _library(operands)
    steps = float(step) if bias_correction else ENDLESS
    if library is None:
        how = {"lr": lr, "beta1": beta1, "beta2": beta2, "eps": eps, "weight_decay": weight_decay}
        torch_updates.adam(operands, step=steps, decoupled=decoupled, **how)
        return
    correction = (1 - beta2**steps) ** 0.5
    constants = {
        "keep": 1 - lr * weight_decay if decoupled else 1.0,
        "decay": 0.0 if decoupled else weight_decay,
        "rate": lr * correction / (1 - beta1**steps),
        "blend": _blend(beta1),
        "second_keep": beta2,
        "second_blend": 1 - beta2,
        "eps": eps * correction,
    }
    library.update(native.ADAM, operands, constants)


def _blend(beta: float) -> float:
    """The constant by which the kernels average with ``beta``: from the nearer end, like torch's lerp."""
    return 1 - beta if beta > 0.5 else -beta


@torch.no_grad()
def adagrad(
    weight: Tensor,
    gradient: Tensor,
    sum: State,
    out: Tensor | None = None,
    *,
    step: int,
    lr: float,
    lr_decay: float = 0.0,
    eps: float = 1e-10,
    weight_decay: float = 0.0,
    coefficient: float | Tensor = 1.0,
    rounding: Rounding = NEAREST,
) -> None:
    """Adagrad (Duchi, Hazan & Singer 2011, JMLR 12) with torch's decay of the learning rate. ``step``: from 1."""
    operands = Operands(weight, gradient, (sum,), out, coefficient, rounding)
    rate, library = lr / (1 + (step - 1) * lr_decay), _library(operands)
    if library is None:
        torch_updates.adagrad(operands, rate=rate, eps=eps, weight_decay=weight_decay)
    else:
        library.update(native.ADAGRAD, operands, {"decay": weight_decay, "rate": rate, "eps": eps})


@torch.no_grad()
def lion(
    weight: Tensor,
    gradient: Tensor,
    exp_avg: State,
    out: Tensor | None = None,
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.99),
    weight_decay: float = 0.0,
    coefficient: float | Tensor = 1.0,
    rounding: Rounding = NEAREST,
) -> None:
    """Lion: Chen et al. 2023, arXiv:2302.06675, Alg. 2.

    The weight moves by ``lr`` in the direction sign(beta1 m + (1 - beta1) g), where m is ``exp_avg``, whatever the size of
    the gradient g. The paper therefore uses a learning rate 3 to 10 times smaller than for AdamW, and a decay larger by
    that factor.
    """
    operands = Operands(weight, gradient, (exp_avg,), out, coefficient, rounding)
    (beta1, beta2), library = betas, _library(operands)
    if library is None:
        torch_updates.lion(operands, lr=lr, beta1=beta1, beta2=beta2, weight_decay=weight_decay)
        return
    constants = {
        "keep": 1 - lr * weight_decay,
        "rate": lr,
        "momentum": beta1,
        "blend": 1 - beta1,
        "second_keep": beta2,
        "second_blend": 1 - beta2,
    }
    library.update(native.LION, operands, constants)


@torch.no_grad()
def sgd(
    weight: Tensor,
    gradient: Tensor,
    momentum_buffer: State | None = None,
    out: Tensor | None = None,
    *,
    lr: float,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    first: bool = False,
    coefficient: float | Tensor = 1.0,
    rounding: Rounding = NEAREST,
) -> None:
    """SGD as in ``torch.optim.SGD`` (``nesterov``: Sutskever et al. 2013). Without a buffer there is no momentum.

    ``first``: this is the first step. The buffer, still all zeros, becomes the gradient, whatever the dampening.
    """
    states = () if momentum_buffer is None else (momentum_buffer,)
    operands = Operands(weight, gradient, states, out, coefficient, rounding)
    blend, library = 1.0 if first else 1 - dampening, _library(operands)
    if library is None:
        how = {"lr": lr, "momentum": momentum, "blend": blend, "weight_decay": weight_decay}
        torch_updates.sgd(operands, **how, nesterov=nesterov)
        return
    constants = {"decay": weight_decay, "rate": lr, "momentum": momentum, "blend": blend, "nesterov": int(nesterov)}
    library.update(native.SGD, operands, constants)


@torch.no_grad()
def adam_sage(
    weight: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    exp_avg_sensitivity: Tensor,
    out: Tensor | None = None,
    *,
    step: int,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    beta3: float = 0.75,
    eps: float = 1e-6,
    weight_decay: float = 0.0,
    coefficient: float | Tensor = 1.0,
    rounding: Rounding = NEAREST,
) -> None:
    """AdamW-SAGE: Liang et al., "No Parameters Left Behind", ICLR 2022.

    AdamW's step of an element is multiplied by |I - J| / (J + eps^2), where I = |weight * gradient| is its sensitivity, and
    J the moving average of that with ``beta3``, corrected for its bias. So the first step, ``step`` 1, only decays.
    """
    operands = Operands(weight, gradient, (exp_avg, exp_avg_sq, exp_avg_sensitivity), out, coefficient, rounding)
    (beta1, beta2), library = betas, _library(operands)
    if library is None:
        how = {"lr": lr, "beta1": beta1, "beta2": beta2, "beta3": beta3, "eps": eps, "weight_decay": weight_decay}
        torch_updates.adam_sage(operands, step=step, **how)
        return
    correction = (1 - beta2**step) ** 0.5
    constants = {
        "keep": 1 - lr * weight_decay,
        "rate": lr * correction / (1 - beta1**step),
        "blend": _blend(beta1),
        "second_keep": beta2,
        "second_blend": 1 - beta2,
        "eps": eps * correction,
        "third_keep": beta3,
        "third_past": 1 - beta3 ** (step - 1),
        "third_eps": eps * (1 - beta3**step) ** 0.5,
    }
    library.update(native.ADAM_SAGE, operands, constants)


@torch.no_grad()
def sophia(
    weight: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    hessian: Tensor,
    out: Tensor | None = None,
    *,
    lr: float,
    betas: tuple[float, float] = (0.965, 0.99),
    rho: float = 0.04,
    bs: float,
    eps: float = 1e-15,
    weight_decay: float = 0.0,
    coefficient: float | Tensor = 1.0,
    rounding: Rounding = NEAREST,
) -> None:
    """Sophia-G: Liu et al. 2023, arXiv:2305.14342, Alg. 3, with the learning rate of its authors' code (theirs times rho).

    The weight moves by lr * clip(exp_avg / (rho * bs * hessian + eps), 1), after decoupled decay. ``hessian`` is an average
    of squared gradients, see :func:`curvature`, and ``bs`` the number of tokens that these gradients were averaged over.
    """
    operands = Operands(weight, gradient, (exp_avg, hessian), out, coefficient, rounding)
    scale, library = rho * bs, _library(operands)
    if library is None:
        torch_updates.sophia(operands, lr=lr, beta1=betas[0], scale=scale, eps=eps, weight_decay=weight_decay)
        return
    constants = {"keep": 1 - lr * weight_decay, "rate": lr, "blend": _blend(betas[0]), "second_keep": scale, "eps": eps}
    library.update(native.SOPHIA, operands, constants)


@torch.no_grad()
def curvature(
    weight: Tensor,
    gradient: Tensor,
    hessian: Tensor,
    *,
    beta2: float = 0.99,
    coefficient: float | Tensor = 1.0,
    rounding: Rounding = NEAREST,
) -> None:
    """Average the square of ``gradient`` into ``hessian``: the Gauss-Newton-Bartlett estimate of arXiv:2305.14342, Alg. 2.

    ``gradient``: that of the mean loss against labels which were drawn from what the model predicts. The weight stays.
    """
    operands = Operands(weight, gradient, (hessian,), None, coefficient, rounding)
    library = _library(operands)
    if library is None:
        torch_updates.curvature(operands, beta2=beta2)
    else:
        library.update(native.CURVATURE, operands, {"second_keep": beta2, "second_blend": 1 - beta2})


# -- optimizers --------------------------------------------------------------------------------------------------------


Where = Callable[[Tensor], Tensor]


class SinglePassOptimizer(torch.optim.Optimizer):
    """The base of the optimizers below. Parameters are contiguous fp32 or bf16 tensors of any shape.

    These attributes say what else the pass does. A step does not change gradients.

    - ``coefficient`` multiplies all gradients up to the end of the next :meth:`step`, which may find out only on the device
      that it is not finite, and write nothing (see Operands). Whoever learns of it calls :meth:`take_back`.
    - ``gradients``: parameter -> its gradient (as many elements, fp32, bf16 or fp16); without one, ``param.grad`` is used.
    - ``outputs``: parameter -> the tensor for its new value, rounded (as many elements, fp32, bf16 or fp16).
    - ``formats``: parameter -> the format of its states; without one, ``default_format`` decides.
    - ``rests``: parameter in bf16 -> the tensor that keeps what it leaves out (as many elements, bf16 or int16).
    - ``origins``: parameter -> what of the model's parameters it consists of. Where that is known, its states in bf16 are
      rounded by chance, and so is the parameter itself if it is in bf16 and has no rest.
    - ``state_home``: called with a parameter, the number of a state and one of its parts; makes that part, all zeros. If it
      has as many elements as the parameter, it has its shape, too; otherwise it is 1-D.

    A step raises what :class:`Operands` raises, and ValueError for a group to which a checkpoint gave an unknown variant.
    """

    # torch's own wrapper imports torch._dynamo to switch itself off: 75 MB, and a second for every process.
    add_param_group = cast(
        Any, getattr(torch.optim.Optimizer.add_param_group, "__wrapped__", torch.optim.Optimizer.add_param_group)
    )

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        for key in ("lr", "lr_decay", "eps", "weight_decay", "momentum", "initial_accumulator_value", "rho"):
            if not defaults.get(key, 0) >= 0:
                raise ValueError(f"{key} must be at least 0, got {defaults[key]}")
        betas = defaults.get("betas", (0, 0))
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas must be two numbers in [0, 1), got {betas}")
        super().__init__(params, defaults)
        self.__setstate__({})

    @property
    def state(self) -> defaultdict[Tensor, dict[str, Any]]:  # type: ignore[override]
        """Parameter -> its state, once ``before_access`` and ``settle`` have returned."""
        self.before_access()
        self.settle()
        return self._held

    @state.setter
    def state(self, state: defaultdict[Tensor, dict[str, Any]]) -> None:
        self._held = state

    before_access: Callable[[], None] = staticmethod(lambda: None)  # waits for updates that go on in the background
    settle: Callable[[], None] = staticmethod(lambda: None)  # learns whether the device has written in the last step

    @property
    def overflow(self) -> bool:
        """True if the last step was skipped, as whoever calls :meth:`step` has told. Known once ``settle`` has returned."""
        self.settle()
        return self._overflow

    @overflow.setter
    def overflow(self, overflow: bool) -> None:
        self._overflow = overflow

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({key: value for key, value in state.items() if key != "state"})
        if "state" in state:
            self.state = state["state"]
        self.coefficient: float | Tensor = getattr(self, "coefficient", 1.0)
        self._overflow = getattr(self, "_overflow", False)
        self._stepped: list[tuple[Tensor, list[str]]] = []  # of the last step: parameter, the states that it made
        self.gradients: dict[Tensor, Tensor] = getattr(self, "gradients", {})
        self.outputs: dict[Tensor, Tensor] = getattr(self, "outputs", {})
        self.formats: dict[Tensor, StateFormat] = getattr(self, "formats", {})
        self.rests: dict[Tensor, Tensor] = getattr(self, "rests", {})
        self.origins: dict[Tensor, tuple[Origin, ...]] = getattr(self, "origins", {})
        self.state_home: Callable[[Tensor, int, StatePart], Tensor] = getattr(self, "state_home", _zeros)
        for param, states in self._held.items():  # torch casts what it loads to the parameter's dtype
            for key in [key for key in states if key + SCALE in states]:
                states[key] = states[key].to(torch.uint8)
            parts = self.format_of(param).parts
            for key in states.keys() & self._states(self.defaults).keys() if len(parts) == 1 else ():
                states[key] = states[key].to(parts[0].dtype)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient; the others and their states stay as they are."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._stepped.clear()
        for group in self.param_groups:
            for param in group["params"]:
                gradient = self.gradients.get(param, param.grad)
                if gradient is not None:
                    had = set(self._held.get(param, ()))
                    settings, out = self._prepare(param, group), self.outputs.get(param)
                    self.update(param, gradient, out, settings, self.coefficient)
                    self._stepped.append((param, [key for key in self._held.get(param, ()) if key not in had]))
        self.coefficient = 1.0
        return loss

    @torch.no_grad()
    def take_back(self) -> None:
        """Forget the last :meth:`step`, of which the device has written nothing: step counts, and states that it made."""
        for param, made in self._stepped:
            state = self._held.get(param, {})
            if "step" in state:
                state["step"] -= 1
            for key in made:
                del state[key]
            if made and not state:
                del self._held[param]
        self._stepped.clear()

    @torch.no_grad()
    def prepare(self, params: Iterable[Tensor]) -> list[dict[str, Any]]:
        """Make the states that ``params`` lack. Return a copy of each one's group settings, for a later :meth:`update`.

        Raises ValueError for a tensor that is in no group.
        """
        groups = {id(param): group for group in self.param_groups for param in group["params"]}
        found = []
        for param in params:
            if id(param) not in groups:
                raise ValueError(f"not a parameter of this optimizer: a tensor of shape {tuple(param.shape)}")
            found.append(self._prepare(param, groups[id(param)]))
        return found

    def _prepare(self, param: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        for variant in ("amsgrad", "maximize", "differentiable"):
            if group.get(variant):
                name = type(self).__name__
                twin = getattr(torch.optim, name, None)
                other = f", or use torch.optim.{name}" if twin and variant in signature(twin).parameters else ""
                reason = f"{variant} is set in a parameter group, which zerorun's {name} does not have."
                raise ValueError(f"{reason} Remedy: unset it there{other}.")
        first = False
        for number, (key, start) in enumerate(self._states(group).items()):
            if self._held[param].get(key) is None:
                for part in self.format_of(param).parts:
                    self._held[param][key + part.key] = self.state_home(param, number, part)
                if start:
                    keep_state(self._held[param], key, torch.full_like(param, start, dtype=torch.float32).reshape(-1))
                first = True
        kept = {key: value for key, value in group.items() if key != "params"}
        return {**kept, "lr": float(group["lr"]), "first": first}

    def format_of(self, param: Tensor) -> StateFormat:
        """Return the format of the states of ``param``."""
        return self.formats.get(param, self.default_format(param.numel()))

    def default_format(self, numel: int, *, is_embedding: bool = False) -> StateFormat:
        """Return the format for the states of a parameter with ``numel`` elements, not of a part of it."""
        return StateFormat.FP32

    def inherit(self, param: Tensor, parts: Iterable[Tensor]) -> None:
        """Let ``parts``, into which ``param`` was cut, have what is known of it besides its state."""
        pieces = list(parts)
        self.formats |= dict.fromkeys(pieces, self.format_of(param))
        self.formats.pop(param, None)
        rest, origins, end = self.rests.pop(param, None), self.origins.pop(param, None), 0
        for piece in pieces:
            low, end = end, end + piece.numel()
            if rest is not None:
                self.rests[piece] = rest.view(-1)[low:end]
            if origins is not None:
                self.origins[piece] = tuple(found for origin in origins if (found := origin.within(low, end)))

    def state_count(self) -> int:
        """Return how many states of its own size a parameter has, at most."""
        return max(len(self._states(group)) for group in self.param_groups)

    def _states(self, group: dict[str, Any]) -> dict[str, float]:
        """Return name -> initial value for the states of a parameter of ``group``."""
        return dict.fromkeys(self._state_names, 0.0)

    @torch.no_grad()
    def update(
        self,
        param: Tensor,
        gradient: Tensor,
        out: Tensor | None,
        settings: dict[str, Any],
        coefficient: float | Tensor,
        where: Where | None = None,
    ) -> None:
        """Step ``param`` alone, at any time and on any thread. ``settings``: from :meth:`prepare`.

        ``where``: maps ``param`` and each of its states to the tensor that stands for it now.
        """
        there = _itself if where is None else where
        states = [_flat_state(_operand(self._held[param], key), there) for key in self._states(settings)]
        options = self._options(param, settings)
        out = None if out is None else _flat("output", out)
        tensors = _flat("tensor", there(param)), _flat("gradient", gradient), states, out
        for cut, rounding in self._roundings(param, there, lambda: options.get("step") or self._count(param)):
            weight, new, own, rounded = (_cut(tensor, cut) for tensor in tensors)
            self._function(weight, new, *own, out=rounded, coefficient=coefficient, rounding=rounding, **options)

    def _roundings(
        self, param: Tensor, where: Where, number: Callable[[], int], purpose: str = ""
    ) -> Iterator[tuple[slice, Rounding]]:
        """Yield (elements of the flattened ``param``, how they are rounded) for each call of an update of it.

        ``number``: gives that of the update. ``purpose``: of another update with the same number.
        """
        rest = _flat("rest", where(self.rests[param])) if param in self.rests else None
        if param not in self.origins:
            yield slice(None), Rounding(rest)
            return
        step = number()
        for origin in self.origins[param]:
            cut = slice(origin.offset, origin.offset + origin.numel)
            yield cut, Rounding(None if rest is None else rest[cut], origin.noise(step, purpose))

    _function: Callable[..., None]  # one of those above; takes weight, gradient and states
    _state_names: tuple[str, ...] = ()
    _settings: tuple[str, ...]  # those that ``_function`` takes
    _counts = True  # ``_function`` takes the number of the step

    def _options(self, param: Tensor, settings: dict[str, Any]) -> dict[str, Any]:
        """Return the other arguments of ``_function`` for this step of ``param``."""
        taken = {name: settings[name] for name in self._settings}
        return {**taken, "step": self._count(param)} if self._counts else taken

    def _count(self, param: Tensor) -> int:
        """Count a step of ``param``, and return its number."""
        state = self._held[param]
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32)
        # A loaded count may be on a GPU, for which every step would wait.
        state["step"] = torch.as_tensor(state["step"], dtype=torch.float32, device="cpu")
        state["step"] += 1
        return int(state["step"])


def _zeros(param: Tensor, number: int, part: StatePart) -> Tensor:
    return part.zeros(param)


def _operand(states: dict[str, Any], key: str) -> State:
    return held(states, key) if key + SCALE in states else states[key]


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _cut(part: Any, cut: slice) -> Any:
    """Return these elements of a flat tensor, of a state in blocks, which must begin with a block, or of a list of them."""
    if part is None or cut == slice(None):
        return part
    if isinstance(part, list):
        return [_cut(one, cut) for one in part]
    if isinstance(part, Blocks):
        return Blocks(part.codes[cut], part.scale[cut.start // BLOCK : -(-cut.stop // BLOCK)], part.signed)
    return part[cut]


def _flat_state(state: State, where: Where) -> State:
    if isinstance(state, Blocks):
        return Blocks(_flat("tensor", where(state.codes)), where(state.scale), state.signed)
    return _flat("tensor", where(state))


def _flat(name: str, tensor: Tensor) -> Tensor:
    if tensor.layout is torch.strided and not tensor.is_contiguous():
        shape, strides = tuple(tensor.shape), tensor.stride()
        raise ValueError(f"the {name} of shape {shape} has strides {strides}; single-pass updates need contiguous tensors")
    return tensor.detach().view(-1) if tensor.layout is torch.strided else tensor


class Adam(SinglePassOptimizer):
    """Adam or, by default, AdamW: see :func:`adam`. States ``step`` (0-dim fp32, on the CPU), ``exp_avg``, ``exp_avg_sq``.

    Unlike in torch's AdamW, the weight decay is 0 by default, as in DeepSpeed.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        decoupled_weight_decay: bool = True,
        bias_correction: bool = True,
    ) -> None:
        defaults = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}
        how = {"decoupled_weight_decay": decoupled_weight_decay, "bias_correction": bias_correction}
        super().__init__(params, {**defaults, **how})

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:  # a checkpoint of torch's Adam lacks it
            group.setdefault("bias_correction", True)

    _function = staticmethod(adam)
    _state_names = ("exp_avg", "exp_avg_sq")
    _settings = ("lr", "betas", "eps", "weight_decay", "bias_correction")

    def _options(self, param: Tensor, settings: dict[str, Any]) -> dict[str, Any]:
        return {**super()._options(param, settings), "decoupled": settings["decoupled_weight_decay"]}


class Adam8bit(Adam):
    """Adam or, by default, AdamW, whose states take two bytes and a 64th per element: see state_format.py.

    Parameters with less than ``min_8bit_size`` elements have fp32 states. So have, with ``fp32_embeddings``, those of
    ``nn.Embedding`` modules, where this class is told which they are (``default_format``): rows of an embedding get
    gradients that differ by orders of magnitude, and share scales.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        decoupled_weight_decay: bool = True,
        bias_correction: bool = True,
        min_8bit_size: int = 4096,
        fp32_embeddings: bool = True,
    ) -> None:
        if not min_8bit_size >= 0:
            raise ValueError(f"min_8bit_size must be at least 0, got {min_8bit_size}")
        self.min_8bit_size, self.fp32_embeddings = min_8bit_size, fp32_embeddings
        how = {"decoupled_weight_decay": decoupled_weight_decay, "bias_correction": bias_correction}
        super().__init__(params, lr, betas, eps, weight_decay, **how)

    def default_format(self, numel: int, *, is_embedding: bool = False) -> StateFormat:
        small = numel < self.min_8bit_size or (is_embedding and self.fp32_embeddings)
        return StateFormat.FP32 if small else StateFormat.BLOCK8


class Adagrad(SinglePassOptimizer):
    """See :func:`adagrad`. States ``step`` (0-dim fp32, on the CPU) and ``sum``.

    As in torch, ``initial_accumulator_value`` is that of all groups, whatever a group says.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
    ) -> None:
        defaults = {"lr": lr, "lr_decay": lr_decay, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "initial_accumulator_value": initial_accumulator_value})

    def _states(self, group: dict[str, Any]) -> dict[str, float]:
        return {"sum": self.defaults["initial_accumulator_value"]}

    _function = staticmethod(adagrad)
    _settings = ("lr", "lr_decay", "eps", "weight_decay")


class Lion(SinglePassOptimizer):
    """See :func:`lion`. State ``exp_avg``. The defaults are the paper's."""

    def __init__(
        self, params: Any, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay})

    _function = staticmethod(lion)
    _state_names = ("exp_avg",)
    _settings = ("lr", "betas", "weight_decay")
    _counts = False


class SGD(SinglePassOptimizer):
    """See :func:`sgd`. State ``momentum_buffer``, if there is momentum."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
    ) -> None:
        if nesterov and (momentum <= 0 or dampening != 0):
            raise ValueError(f"nesterov needs momentum and no dampening, got {momentum} and {dampening}")
        defaults = {"lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "nesterov": nesterov})

    def _states(self, group: dict[str, Any]) -> dict[str, float]:
        return {"momentum_buffer": 0.0} if group["momentum"] else {}

    _function = staticmethod(sgd)
    _settings = ("lr", "momentum", "dampening", "weight_decay", "nesterov", "first")
    _counts = False


class AdamSAGE(SinglePassOptimizer):
    """See :func:`adam_sage`. States ``step`` (0-dim fp32, on the CPU), ``exp_avg``, ``exp_avg_sq`` and
    ``exp_avg_sensitivity``.

    The defaults are those of the authors' code. They found the best ``beta3`` between 0.6 and 0.9, with learning rates 2 to
    5 times larger than for AdamW.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        beta3: float = 0.75,
        eps: float = 1e-6,
        weight_decay: float = 0.0,
    ) -> None:
        if not 0 <= beta3 < 1:
            raise ValueError(f"beta3 must be in [0, 1), got {beta3}")
        if not eps > 0:
            raise ValueError(f"eps must be above 0, as its square is all that some elements are divided by; got {eps}")
        super().__init__(
            params, {"lr": lr, "betas": tuple(betas), "beta3": beta3, "eps": eps, "weight_decay": weight_decay}
        )

    _function = staticmethod(adam_sage)
    _state_names = ("exp_avg", "exp_avg_sq", "exp_avg_sensitivity")
    _settings = ("lr", "betas", "beta3", "eps", "weight_decay")


class Sophia(SinglePassOptimizer):
    """Sophia-G, see :func:`sophia`. States ``exp_avg`` and ``hessian``, which :meth:`update_curvature` fills.

    ``bs``: the number of tokens of a step, over all ranks and micro-batches. ``update_interval``: a new estimate of the
    curvature is due after so many steps. The other defaults are those of the authors' code.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.965, 0.99),
        rho: float = 0.04,
        weight_decay: float = 0.1,
        *,
        bs: float,
        eps: float = 1e-15,
        update_interval: int = 10,
    ) -> None:
        for name, value in (("bs", bs), ("eps", eps)):
            if not value > 0:
                raise ValueError(f"{name} must be above 0, got {value}")
        if update_interval != int(update_interval) or update_interval < 1:
            raise ValueError(f"update_interval must be a whole number from 1 on, got {update_interval}")
        defaults = {"lr": lr, "betas": tuple(betas), "rho": rho, "weight_decay": weight_decay, "bs": bs, "eps": eps}
        super().__init__(params, {**defaults, "update_interval": int(update_interval)})

    _function = staticmethod(sophia)
    _state_names = ("exp_avg", "hessian")
    _settings = ("lr", "betas", "rho", "bs", "eps", "weight_decay")
    _counts = False

    @torch.no_grad()
    def update_curvature(
        self,
        param: Tensor,
        gradient: Tensor,
        settings: dict[str, Any],
        coefficient: float | Tensor,
        where: Where | None = None,
    ) -> None:
        """Average the square of ``coefficient`` times ``gradient`` into the curvature of ``param``.

        ``settings``: from :meth:`prepare`. ``where``: as for :meth:`update`.
        """
        there, beta2 = _itself if where is None else where, settings["betas"][1]
        hessian = _flat("state", there(self._held[param]["hessian"]))
        tensors = [_flat("tensor", there(param)), _flat("gradient", gradient), hessian]
        number = partial(int, self._held[param].get("step", 0))
        for cut, rounding in self._roundings(param, there, number, "curvature"):
            curvature(*_cut(tensors, cut), beta2=beta2, coefficient=coefficient, rounding=rounding)
