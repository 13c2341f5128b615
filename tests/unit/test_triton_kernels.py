"""The Triton kernel without a GPU: in Triton's interpreter, bit for bit beside the native library, and compiled for GPUs.

The interpreter computes with numpy, so the arithmetic is tested, and not what a compiler makes of it. That is what the
machine code is looked at for: no operation may be fused, approximate or flush denormals, and accesses must be wide.
"""

from __future__ import annotations

import importlib.util
import logging
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from covering import by_day
from updates import DTYPES, RULES, UNITS, Rule, Work, assert_close_to_float64, random_bits, same, training

from zerorun.ops import native, on_cuda, single_pass
from zerorun.ops.rounding import MasterFormat, Origin, Rounding
from zerorun.optim import optimizers as optim
from zerorun.report import software

triton = pytest.importorskip("triton")

from triton.backends.nvidia import compiler as nvidia  # noqa: E402
from triton.runtime import interpreter  # noqa: E402

from zerorun.ops import triton_kernels  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy tells of every overflow and NaN
ALL_RULES = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
SIZES = (1, 2, 15, 1023, 1024, 1025, 2500)
OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}
CUDA = torch.device("cuda", 0)
STATES_OF = (
    (native.ADAM, 2),
    (native.ADAGRAD, 1),
    (native.LION, 1),
    (native.SGD, 1),
    (native.SGD, 0),
    (native.ADAM_SAGE, 3),
    (native.SOPHIA, 2),
    (native.CURVATURE, 1),
)


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Any]:
    """A copy of the module with kernels for the interpreter: when one is defined, this is decided for good."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        spec = importlib.util.spec_from_file_location("zerorun.ops.interpreted", triton_kernels.__file__)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        patch.setattr(interpreter, "_patch_lang", once_in_a_launch(interpreter._patch_lang))
        yield module.Kernels()


def once_in_a_launch(patch_lang: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The interpreter gives the language its own functions for a launch, and again for each function that the kernel calls.

    There is nothing left to give then, and looking for it takes three quarters of the time.
    """
    given = []

    def patched(function: Any) -> Any:
        if given:
            return None
        scope = patch_lang(function)
        given.append(restore := scope.restore)
        scope.restore = lambda: (given.clear(), restore())
        return scope

    return patched


@pytest.fixture
def on_cpu(interpreted: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let the kernel update CPU tensors."""
    monkeypatch.setattr(native, "library", lambda: interpreted)
    return interpreted


def both(rule: Rule, start: Work, kernels: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, Any]]:
    """(result of the native library, result of the kernel) of each tensor."""
    if native.library() is None:
        pytest.skip("there is no native library to compare with; the comparison with float64 does without")
    here, there = start.copy(), start.copy()
    rule.run(here)
    with monkeypatch.context() as patch:
        patch.setattr(native, "library", lambda: kernels)
        rule.run(there)
    yield from zip(here.results(), there.results(), strict=True)


def same_in_triton(rule: Rule, one: torch.Tensor, other: torch.Tensor) -> bool:
    """``same``, but for the sign of zeros where Triton's interpreter before 3.7 takes a constant -0.0 for 0.0."""
    if rule is RULES["adam, no betas"] and one.is_floating_point():
        one, other = one + 0.0, other + 0.0
    return same(one, other)


@pytest.mark.each_value
@ALL_RULES
@pytest.mark.parametrize("kind", [training, random_bits])
@pytest.mark.parametrize("coefficient", [1.0, 0.37])
def test_close_to_float64(rule: Rule, kind: Callable[..., Work], coefficient: float, on_cpu: Any) -> None:
    before = replace(kind(rule, 20_000), coefficient=coefficient)
    after = before.copy()
    rule.run(after)
    assert_close_to_float64(rule, before, after, UNITS)


@ALL_RULES
def test_bits_of_the_native_library(rule: Rule, interpreted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any bits in, with denormals, infinities and NaN; all dtypes."""
    for dtype in DTYPES:
        for kind, out in ((random_bits(rule, 6561), torch.zeros(6561, dtype=dtype)), (training(rule, 6561), None)):
            start = replace(kind, gradient=kind.gradient.to(dtype), coefficient=0.37, out=out)
            for one, other in both(rule, start, interpreted, monkeypatch):
                assert same_in_triton(rule, one, other)


@pytest.mark.each_value
@ALL_RULES
@pytest.mark.parametrize("kind", MasterFormat)
@pytest.mark.parametrize("rows", [0, 13])
def test_bits_of_weights_in_bf16(
    rule: Rule, kind: MasterFormat, rows: int, interpreted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any bits in; noise whose positions begin below 2^32 and end above it."""
    noise = Origin(0, 6561, "name", (1 << 32) - 3000, rows, 29, 5).noise(7)
    start = random_bits(rule, 6561)
    weight, rest = kind.parts(start.weight)
    states = tuple(state.bfloat16() for state in start.states)
    wide = replace(start, weight=weight, states=states, rounding=Rounding(rest, noise), out=torch.zeros(6561).bfloat16())
    for one, other in both(rule, wide, interpreted, monkeypatch):
        assert same_in_triton(rule, one, other)


@ALL_RULES
def test_a_coefficient_that_is_not_finite_writes_nothing(rule: Rule, on_cpu: Any) -> None:
    start = training(rule, 2500)
    start.out = torch.zeros(2500, dtype=torch.bfloat16)
    for useless in (float("nan"), float("inf"), -float("inf")):
        skipped = replace(start.copy(), coefficient=torch.tensor(useless))
        rule.run(skipped)
        assert all(map(same, skipped.results(), start.results()))
    done = replace(start.copy(), coefficient=torch.tensor(0.37))
    rule.run(done)
    assert not same(done.weight, start.weight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_gradient_is_converted_exactly(dtype: torch.dtype, on_cpu: Any) -> None:
    gradient = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    weight = torch.zeros(2**16)
    single_pass.sgd(weight, gradient, lr=1.0)
    assert same(weight, 0.0 - gradient.float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_outputs_are_rounded_to_nearest_even(dtype: torch.dtype, on_cpu: Any) -> None:
    """Every number of the type, and halfway to the next one, and one fp32 unit to either side of that."""
    integers = torch.arange(-(2**15), 2**15, dtype=torch.int32)
    numbers, following = (integers.add(more).to(torch.int16).view(dtype).float() for more in (0, 1))
    middle = ((numbers.double() + following.double()) / 2).float()
    infinity = torch.tensor(float("inf"))
    weight = torch.cat([numbers, middle, torch.nextafter(middle, infinity), torch.nextafter(middle, -infinity)])
    out = torch.zeros_like(weight, dtype=dtype)
    single_pass.sgd(weight, torch.zeros_like(weight), out=out, lr=0.0)
    assert same(out, weight.to(dtype))


@ALL_RULES
def test_every_length_and_any_start(rule: Rule, on_cpu: Any) -> None:
    """Nothing outside is touched, and a place in a tensor makes no difference."""
    whole = replace(training(rule, 3000), out=torch.zeros(3000, dtype=torch.bfloat16))
    whole.gradient = whole.gradient.bfloat16()
    done = whole.copy()
    rule.run(done)
    for numel, start in [(0, 0), *((numel, start) for numel in SIZES for start in (0, 1, 3))]:
        inner, part = slice(start, start + numel), whole.copy()
        assert part.out is not None
        rule.run(
            Work(part.weight[inner], part.gradient[inner], tuple(state[inner] for state in part.states), part.out[inner])
        )
        for result, all_done, untouched in zip(part.results(), done.results(), whole.results(), strict=True):
            assert torch.equal(result[:start], untouched[:start])
            assert torch.equal(result[start + numel :], untouched[start + numel :])
            assert same(result[inner], all_done[inner])


def test_the_curvature_has_the_bits_of_the_native_library(interpreted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any bits in; the weight stays."""
    start = random_bits(RULES["sophia"], 6561)
    done = []
    for library in (native.library(), interpreted):
        if library is None:
            pytest.skip("there is no native library to compare with")
        monkeypatch.setattr(native, "library", lambda library=library: library)
        work = start.copy()
        single_pass.curvature(work.weight, work.gradient.half(), work.states[1], beta2=0.9, coefficient=0.37)
        assert same(work.weight, start.weight) and same(work.states[0], start.states[0])
        done.append(work.states[1])
    assert same(*done) and not same(done[0], start.states[1])


def test_autograd_notices_an_update(on_cpu: Any) -> None:
    weight = torch.ones(3, requires_grad=True)
    product = (weight * weight).sum()
    single_pass.sgd(weight, torch.ones(3), lr=0.1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


# -- machine code ------------------------------------------------------------------------------------------------------


def compiled(
    rule: int,
    states: int,
    gradient: str,
    out: str | None,
    capability: int,
    *,
    aligned: bool = True,
    coupled: bool = False,
    kept_as: str = "*fp32",
    weight: str = "*fp32",
    rest: str = "",
    noise: bool = False,
) -> Any:
    """The kernel for a GPU that need not be there. ``gradient``, ``out``, ``kept_as``: Triton's names of pointers.

    States that are ``kept_as`` bytes are in blocks. ``rest``: what a weight in bf16 has beside it.
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = triton_kernels._update
    signature = dict.fromkeys(kernel.arg_names, "fp32")
    states_here = ("first", "second", "third")
    scales = ("first_scale", "second_scale", "third_scale", "maps")
    signature |= dict.fromkeys(("weight", "coefficient", *scales), "*fp32") | dict.fromkeys(states_here, kept_as)
    signature |= {"gradient": gradient, "numel": "i64", "words": "*i32", "weight": weight, "rest": "*i16"}
    signature |= dict.fromkeys(triton_kernels._KEYS, "i32") | dict.fromkeys(("start", "row", "whole_row", "column"), "i64")
    constants: dict[str, Any] = {"RULE": rule, "NESTEROV": False, "COUPLED": coupled, "BLOCK": 1024}
    constants |= {"ADDED": rest == "kahan", "IN_ROWS": noise, "ROUGH": not rest} | ({} if rest else {"rest": None})
    constants |= {} if noise else dict.fromkeys(triton_kernels._KEYS)
    constants |= {"FIRST_SIGNED": True, "SECOND_SIGNED": False, "THIRD_SIGNED": True}
    constants |= {"third_scale": None} if kept_as == "*u8" else dict.fromkeys((*scales, "words"))
    constants |= dict.fromkeys(states_here[states:]) | ({} if out else {"out": None})
    signature |= {"out": out or ""} | dict.fromkeys(constants, "constexpr")
    pointers = [place for place, name in enumerate(kernel.arg_names) if signature[name].startswith("*")]
    attributes = {(place,): [["tt.divisibility", 16]] for place in pointers if aligned}
    return triton.compile(
        ASTSource(kernel, signature, constants, attributes),
        target=GPUTarget("cuda", capability, 32),
        options=OPTIONS,
    )


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.parametrize("capability", by_day((80, 90), 90))
@pytest.mark.parametrize("coupled", by_day((False, True), True))
@pytest.mark.parametrize(
    ("gradient", "weight"), by_day((("*i16", "*i16"), ("*fp16", "*fp16"), ("*fp32", None)), ("*i16", "*i16"))
)
def test_machine_code_rounds_as_the_source_says(
    capability: int, coupled: bool, gradient: str, weight: str | None, cache: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nobody looks at what ptxas makes of so many kernels. It is run in the tests below.
    monkeypatch.setattr(nvidia.CUDABackend, "make_cubin", lambda *given: b"")
    for rule, states in STATES_OF:
        ptx = compiled(rule, states, gradient, weight, capability, coupled=coupled).asm["ptx"]
        assert not re.findall(r"\bfma\.|approx|\.ftz|div\.full|(mul|add|sub)\.f(32|64)", ptx)
        assert ("sqrt.rn.f32" in ptx) == (rule in (native.ADAM, native.ADAGRAD, native.ADAM_SAGE))
        assert ("div.rn.f32" in ptx) == (rule in (native.ADAM, native.ADAGRAD))
        assert ("div.rn.f64" in ptx) == (rule in (native.ADAM_SAGE, native.SOPHIA))


def test_machine_code_of_states_in_few_bits(cache: None) -> None:
    """The maximum of a block goes through no other memory than what its warps share, and nothing is approximate."""
    for kept_as in ("*u8", "*i16"):
        ptx = compiled(native.ADAM, 2, "*i16", "*i16", 90, kept_as=kept_as).asm["ptx"]
        assert not re.findall(r"\bfma\.|approx|\.ftz|div\.full|(mul|add|sub)\.f(32|64)", ptx)
        assert ".local" not in ptx


@pytest.mark.parametrize("rest", by_day(("", "kahan", "remainder"), "remainder"))
def test_machine_code_of_weights_in_bf16(rest: str, cache: None) -> None:
    """Rows of tensor ranks are divided in integers, and nothing goes through other memory."""
    ptx = compiled(native.ADAM, 2, "*i16", None, 90, kept_as="*i16", weight="*i16", rest=rest, noise=True).asm["ptx"]
    assert not re.findall(r"\bfma\.|approx|\.ftz|div\.full|(mul|add|sub)\.f(32|64)", ptx)
    assert ".local" not in ptx and ".shared" not in ptx


def test_machine_code_accesses_16_bytes_at_a_time(cache: None) -> None:
    """Of each of four fp32 tensors in whole blocks, and through no other memory; single elements if unaligned."""
    ptx = compiled(native.ADAM, 2, "*i16", "*i16", 90).asm["ptx"]
    wide = [len(re.findall(rf"{access}\.global\.v4\.b32", ptx)) for access in ("ld", "st")]
    assert wide == [6, 6] and ".shared" not in ptx
    unaligned = compiled(native.ADAM, 2, "*i16", "*i16", 90, aligned=False).asm["ptx"]
    assert not re.findall(r"global\.v[24]", unaligned)


def test_places_are_counted_in_64_bits(cache: None) -> None:
    code = compiled(native.SGD, 0, "*i16", "*i16", 90).asm["ttir"]
    assert re.search(r"muli .* : i64", code) and not re.search(r"muli .* : (tensor<\d+x)?i32", code)


def test_constants_are_not_compiled_in(interpreted: Any) -> None:
    """Steps of any learning rate and length use one kernel: what makes another is in the arguments' types alone."""
    kernel = triton_kernels._update
    compiled_in = {name for name, param in zip(kernel.arg_names, kernel.params, strict=True) if param.is_constexpr}
    flags = {"FIRST_SIGNED", "SECOND_SIGNED", "THIRD_SIGNED", "NESTEROV", "COUPLED", "ROUGH", "ADDED", "IN_ROWS"}
    assert compiled_in == {"RULE", "BLOCK", *flags}
    (numel,) = (param for param in kernel.params if param.name == "numel")
    assert numel.do_not_specialize
    calls: list[dict[str, Any]] = []

    class Grid:
        def __getitem__(self, grid: Any) -> Any:
            return lambda *args, **kwargs: calls.append(kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_kernels, "_update", Grid())
        patch.setattr(native, "library", lambda: triton_kernels.Kernels())
        for rule in RULES.values():
            rule.run(training(rule, 8))
    others = (*compiled_in, "num_warps", "enable_fp_fusion")
    assert all(type(value) is float for call in calls for key, value in call.items() if key not in others)
    assert all({key: call[key] for key in OPTIONS} == OPTIONS for call in calls)  # as it is compiled above


# -- which is used -----------------------------------------------------------------------------------------------------


class Placed(torch.Tensor):
    """A CPU tensor that says it is on a GPU."""

    device = CUDA  # type: ignore[assignment]


@pytest.fixture
def forgetful() -> Iterator[None]:
    on_cuda._outcome.cache_clear()
    on_cuda._warn.cache_clear()
    yield
    on_cuda._outcome.cache_clear()
    on_cuda._warn.cache_clear()


def test_kernels_are_tried_before_use(interpreted: Any) -> None:
    on_cuda._try(interpreted, torch.device("cpu"))

    class Wrong:
        def update(self, rule: int, operands: Any, constants: dict[str, float]) -> None:
            operands.weight.fill_(3.0)

    with pytest.raises(RuntimeError, match="went to"):
        on_cuda._try(Wrong(), torch.device("cpu"))


def test_without_kernels_torch_is_used_and_one_warning_says_so(
    forgetful: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(found: Any, device: torch.device) -> None:
        raise RuntimeError("no compiler\nand more")

    monkeypatch.setattr(on_cuda, "_try", fail)
    with caplog.at_level(logging.WARNING, "zerorun"):
        threads = [threading.Thread(target=on_cuda.kernels, args=(torch.device("cuda", i % 2),)) for i in range(6)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
    assert on_cuda.kernels(CUDA) is None and "RuntimeError: no compiler)" in on_cuda.status(CUDA)
    assert len(caplog.records) == 1 and "no compiler. torch's" in caplog.records[0].getMessage()
    built = optim.build_optimizer("AdamW", {"lr": 0.1}, [{"params": [torch.ones(4).as_subclass(Placed)]}])
    assert isinstance(built, single_pass.Adam)  # by torch, chunk by chunk


@pytest.mark.parametrize("name", ["AdamW", "Adam", "Adagrad", "Lion", "SGD"])
def test_gpu_tensors_are_updated_in_one_pass(
    name: str, forgetful: None, interpreted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_cuda, "kernels", lambda device: interpreted)
    tensor = torch.ones(4).as_subclass(Placed)
    assert isinstance(optim.build_optimizer(name, {}, [{"params": [tensor]}]), single_pass.SinglePassOptimizer)
    if name != "Lion":
        built = optim.build_optimizer(name, {"maximize": True}, [{"params": [tensor]}])
        assert not isinstance(built, single_pass.SinglePassOptimizer)


def test_step_counts_stay_on_the_host(on_cpu: Any) -> None:
    """Also those of older checkpoints, which may be numbers."""
    param = torch.ones(3, requires_grad=True)
    optimizer = single_pass.Adam([param], lr=0.1)
    param.grad = torch.ones(3)
    optimizer.step()
    optimizer.state[param]["step"] = 4
    optimizer.step()
    assert optimizer.state[param]["step"].device.type == "cpu" and float(optimizer.state[param]["step"]) == 5.0


def test_the_report_says_what_runs_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    (without,) = (op for op in software._native_ops() if op["name"] == "native optimizer")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(on_cuda, "status", lambda device: f"one kernel, tried on {device}")
    assert software._native_optimizer()["why"] == f"{without['why']}; on CUDA: one kernel, tried on cuda:0"
