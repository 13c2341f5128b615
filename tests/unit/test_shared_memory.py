"""Which parameters share memory that an update would change."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from zerorun.errors import ModelError
from zerorun.model_setup.shared_memory import refuse_shared_memory


def bare(**tensors: torch.Tensor) -> nn.Module:
    """A module with these parameters; those named frozen... are frozen, and those named buffer... are buffers."""
    module = nn.Module()
    for name, tensor in tensors.items():
        if name.startswith("buffer"):
            module.register_buffer(name, tensor)
        else:
            module.register_parameter(name, nn.Parameter(tensor, requires_grad=not name.startswith("frozen")))
    return module


def by_data() -> nn.Module:
    model = bare(a=torch.rand(4, 3), b=torch.rand(4, 3))
    model.b.data = model.a.data
    return model


def one_inside_another() -> nn.Module:
    flat = torch.rand(100)
    return bare(a=flat, b=flat[10:11], c=torch.rand(3))


def far_reaching() -> nn.Module:
    """What overlaps is not next to each other."""
    flat = torch.rand(100)
    return bare(a=flat, frozen_b=torch.rand(3), frozen_c=flat[3:4], d=torch.rand(9))


def with_a_buffer() -> nn.Module:
    weight = torch.rand(6)
    return bare(a=weight, buffer_b=weight[2:4])


def of_another_dtype() -> nn.Module:
    memory = torch.zeros(16, dtype=torch.uint8)
    return bare(a=memory[:8].view(torch.float32), b=memory[4:].view(torch.bfloat16))


def columns_that_cross() -> nn.Module:
    packed = torch.rand(5, 9)
    return bare(a=packed[:, :4], b=packed[:, 4:6], c=packed[:, 5:])


def a_row_and_a_column() -> nn.Module:
    packed = torch.rand(5, 9)
    return bare(a=packed[:, 3], frozen_b=packed[2])


@pytest.mark.parametrize(
    ("build", "names"),
    (
        (by_data, ("a", "b")),
        (one_inside_another, ("a", "b")),
        (far_reaching, ("a", "frozen_c")),
        (with_a_buffer, ("a", "buffer_b")),
        (of_another_dtype, ("a", "b")),
        (columns_that_cross, ("b", "c")),
        (a_row_and_a_column, ("a", "frozen_b")),
    ),
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_memory_of_a_trained_parameter_is_its_own(build: Callable[[], nn.Module], names: tuple[str, str]) -> None:
    model = build()
    with pytest.raises(ModelError) as found:
        refuse_shared_memory(model, [id(param) for param in model.parameters()])
    assert f"{names[0]!r} and {names[1]!r} share memory" in str(found.value)
    assert "assign the Parameter itself" in str(found.value)


def slices_of_one_buffer() -> nn.Module:
    packed = torch.rand(60)
    return bare(a=packed[:20].view(4, 5), b=packed[20:30], frozen_c=packed[30:40], buffer_d=packed[40:])


def columns_of_one_matrix() -> nn.Module:
    packed = torch.rand(5, 9)
    return bare(a=packed[:, :4], b=packed[:, 4:6], c=packed[:, 6:].t(), frozen_d=torch.rand(3))


def even_and_odd() -> nn.Module:
    packed = torch.rand(12)
    return bare(a=packed[::2], b=packed[1::2])


def one_parameter_twice() -> nn.Module:
    model = bare(a=torch.rand(4, 3))
    model.inner = nn.Linear(3, 4)
    model.inner.weight = model.a
    return model


def frozen_ones() -> nn.Module:
    value = torch.rand(4)
    return bare(a=torch.rand(4), frozen_b=value, frozen_c=value, buffer_d=value[1:])


def without_memory() -> nn.Module:
    return bare(a=torch.empty(4, device="meta"), b=torch.empty(4, device="meta"), c=torch.empty(0), d=torch.empty(0))


def repeated() -> nn.Module:
    return bare(a=torch.rand(()).expand(7), b=torch.rand(1, 3).expand(5, 3))


@pytest.mark.parametrize(
    "build",
    (
        slices_of_one_buffer,
        columns_of_one_matrix,
        even_and_odd,
        one_parameter_twice,
        frozen_ones,
        without_memory,
        repeated,
    ),
)
def test_what_no_update_would_change_is_let_be(build: Callable[[], nn.Module]) -> None:
    model = build()
    refuse_shared_memory(model, [id(param) for param in model.parameters() if param.requires_grad])


def test_what_the_optimizer_has_not_does_not_change() -> None:
    refuse_shared_memory(by_data(), [])
