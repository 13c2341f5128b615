"""Values on the wire as int8 codes with a scale for each block: errors, bits, bytes, and what is not finite."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from zerorun.distributed import quantised_blocks
from zerorun.distributed.quantised_blocks import BLOCK, add_decoded, coded_bytes, decode, decode_parts, encode

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def there_and_back(values: torch.Tensor, bounds: list[int] | None = None) -> torch.Tensor:
    """Through the codes of the parts between ``bounds``."""
    bounds = bounds or [0, values.numel()]
    coded = torch.full((coded_bytes(values.numel()),), 77, dtype=torch.uint8)
    for low, high in pairwise(bounds):
        encode(values[low:high], coded[coded_bytes(low) : coded_bytes(high)])
    full = torch.full_like(values, float("nan"))
    decode_parts(coded, bounds, full)
    return full


def values_of(blocks: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Blocks of many magnitudes."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.logspace(-4, 3, blocks)[:, None]
    return (torch.randn(blocks, BLOCK, generator=generator) * sizes).to(dtype).view(-1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_error_is_larger_than_half_a_code(dtype: torch.dtype) -> None:
    values = values_of(64, dtype)
    found = there_and_back(values)
    largest = values.view(-1, BLOCK).double().abs().amax(1, keepdim=True)
    error = (found.double() - values.double()).view(-1, BLOCK).abs()
    rounding = torch.finfo(dtype).eps / 2 * largest  # of the value that is written, and in fp32 on the way
    assert (error <= largest / 254 * (1 + 1e-6) + rounding).all()
    assert dtype == torch.bfloat16 or (error / largest).amax() > 0.99 / 254


def test_the_rms_error_of_normal_values_is_under_one_percent() -> None:
    values = torch.randn(256 * BLOCK, generator=torch.Generator().manual_seed(1))
    error = there_and_back(values) - values
    assert 0.006 < error.square().mean().sqrt() < 0.008  # step / sqrt(12), with a step of some 2.9 / 127
    assert error.mean().abs() < 1e-4


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_codes_can_say_comes_back_bit_for_bit(dtype: torch.dtype) -> None:
    codes = torch.randint(-127, 128, (8, BLOCK), generator=torch.Generator().manual_seed(0))
    codes[:, 5] = 127
    codes[3] = 0
    values = (codes * 2.0 ** torch.arange(-6, 2)[:, None]).to(dtype).view(-1)
    assert torch.equal(there_and_back(values), values)


def test_the_sender_reads_what_the_others_read_and_again_the_same() -> None:
    values = values_of(6)
    once = there_and_back(values)
    assert torch.equal(there_and_back(once), once)


@pytest.mark.parametrize("bounds", ([0, 2, 4, 6], [0, 0, 5, 6], [0, 6, 6], [0, 1, 3, 6]))
@pytest.mark.parametrize("stretch", (quantised_blocks._STRETCH, 2 * BLOCK))
def test_parts_are_as_the_whole(bounds: list[int], stretch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    values = values_of(6)
    expected = there_and_back(values)
    monkeypatch.setattr(quantised_blocks, "_STRETCH", stretch)
    assert torch.equal(there_and_back(values, [BLOCK * bound for bound in bounds]), expected)


@pytest.mark.parametrize("wrong", (float("nan"), float("inf"), -float("inf")))
def test_what_is_not_finite_stays_so_in_its_block_only(wrong: float) -> None:
    values = values_of(3)
    values[BLOCK + 7] = wrong
    found = there_and_back(values).view(3, BLOCK)
    assert not found[1].isfinite().any()
    assert found[[0, 2]].isfinite().all()


def test_tiny_and_large_values() -> None:
    tiny = torch.full((BLOCK,), 1e-44)
    assert there_and_back(tiny).sub(tiny).abs().max() <= 1e-44
    large = torch.full((BLOCK,), 3.4e38)
    assert there_and_back(large).isfinite().all()
    assert torch.equal(there_and_back(torch.zeros(BLOCK)), torch.zeros(BLOCK))


def test_bytes_are_65_for_64_values() -> None:
    assert coded_bytes(0) == 0
    assert coded_bytes(64 * BLOCK) == 65 * BLOCK


def by_chance(values: torch.Tensor, bits: int, seed: int) -> torch.Tensor:
    coded = torch.empty(coded_bytes(values.numel(), bits), dtype=torch.uint8)
    encode(values, coded, bits, torch.Generator().manual_seed(seed))
    found = torch.empty_like(values)
    decode(coded, found, bits)
    return found


@pytest.mark.parametrize("bits", (8, 4))
def test_the_mean_error_of_rounding_by_chance_is_0(bits: int) -> None:
    """Over seeds, for each element: within 5 standard deviations, which are at most half a scale."""
    values, seeds = values_of(4), 400
    scale = values.view(4, BLOCK).abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
    errors = torch.stack([by_chance(values, bits, seed) - values for seed in range(seeds)]).view(seeds, 4, BLOCK) / scale
    assert errors.abs().max() < 1 + 1e-4
    assert errors.mean(0).abs().max() < 5 * 0.5 / seeds**0.5
    assert errors.mean().abs() < 5 * 0.5 / (seeds * values.numel()) ** 0.5
    assert torch.equal(by_chance(values, bits, 3), by_chance(values, bits, 3))
    assert not torch.equal(by_chance(values, bits, 3), by_chance(values, bits, 4))


@pytest.mark.parametrize("bits", (8, 4))
def test_strided_values_have_the_codes_of_packed_ones_and_are_added(bits: int) -> None:
    values = values_of(12).view(3, 2, 2 * BLOCK)
    packed, turned = (torch.empty(*shape, coded_bytes(2 * BLOCK, bits), dtype=torch.uint8) for shape in ((3, 2), (2, 3)))
    encode(values, packed, bits)
    encode(values.transpose(0, 1), turned, bits)
    assert torch.equal(packed.transpose(0, 1), turned)
    alone, total = torch.empty_like(values), torch.ones_like(values)
    decode(packed, alone, bits)
    add_decoded(turned, total.transpose(0, 1), bits)
    assert torch.equal(total, 1 + alone)
    largest = values.unflatten(-1, (2, BLOCK)).abs().amax(-1, keepdim=True) / (2**bits - 2)
    assert ((alone - values).unflatten(-1, (2, BLOCK)).abs() <= largest * (1 + 1e-4)).all()


@pytest.mark.parametrize("wrong", (float("nan"), float("inf")))
def test_no_gradient_that_is_not_finite_becomes_finite(wrong: float) -> None:
    for bits in (8, 4):
        values = values_of(3)
        values[BLOCK + 7] = wrong
        found = by_chance(values, bits, 0).view(3, BLOCK)
        assert not found[1].isfinite().any()
        assert found[[0, 2]].isfinite().all()


def test_bytes_of_4_bits_are_33_for_64_values() -> None:
    assert coded_bytes(64 * BLOCK, 4) == 33 * BLOCK
