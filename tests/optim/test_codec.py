"""8-bit codes: the maps follow the format, and a code is the nearest value that is not too large."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch

from vescale_ray.optim.eight_bit.codec import Codebook, dynamic_values, root_codebook, root_values, signed_codebook

CPU = torch.device("cpu")


def test_code_maps_are_pinned_by_hash() -> None:
    # The first two are bitsandbytes' maps (create_dynamic_map in bitsandbytes/functional.py); the third is our own.
    pinned = {"signed": "e732639a65f497b4", "unsigned": "305f002cc11278fb", "root": "6f444f111326a0f8"}
    maps = {"signed": dynamic_values(True), "unsigned": dynamic_values(False), "root": root_values()}
    assert {name: hashlib.sha256(values.numpy().tobytes()).hexdigest()[:16] for name, values in maps.items()} == pinned
    for values in maps.values():
        assert values.shape == (256,) and (values.diff() > 0).all() and values.abs().max() == 1


def test_square_root_map_has_no_zero_and_bounded_relative_steps() -> None:
    values = root_values().double()
    assert values.min() > 1e-7 and 0.0 not in values
    steps = values[1:] / values[:-1]
    assert steps.max() < 1.25, "a divisor would be off by more than an eighth"
    assert steps[values[1:] > 0.1].max() < 1.032


BOOKS = [(signed_codebook(CPU), 1.25), (Codebook(dynamic_values(True), CPU), 1e9), (root_codebook(CPU), 1e9)]


@pytest.mark.parametrize(("codebook", "most_over"), BOOKS, ids=["signed", "signed without a limit", "root"])
def test_code_is_nearest_value_within_limit_even_at_borders(codebook: Codebook, most_over: float) -> None:
    values = codebook.values.numpy().astype(np.float64)
    low = 0.0 if values[0] > 0 else -1.0
    generator = torch.Generator().manual_seed(0)
    spread = torch.rand(20000, generator=generator) * torch.exp(-20 * torch.rand(20000, generator=generator))
    signs = torch.where(torch.rand(20000, generator=generator) < 0.5, low, 1.0)
    borders = codebook.borders[:-1]
    near = torch.cat([borders, borders.nextafter(torch.tensor(2.0)), borders.nextafter(torch.tensor(-2.0)), codebook.values])
    x = torch.cat([spread * signs, near, torch.tensor([0.0, 1.0, 1e-40, low])])
    distance = np.abs(values[None, :] - x.numpy().astype(np.float64)[:, None])
    codes = codebook.encode(x).numpy().astype(np.int64)
    chosen = np.take_along_axis(distance, codes[:, None], 1)[:, 0]
    # Borders are FP32, so within half a unit in their last place either side is accepted.
    size, slack = np.abs(x.numpy().astype(np.float64)), 1 + 2.0**-22
    least = np.where(np.abs(values)[None, :] <= most_over * size[:, None] / slack, distance, np.inf).min(axis=1)
    assert (chosen <= least + size * 2.0**-23).all()
    assert (np.abs(values[codes]) <= np.maximum(most_over * size * slack, values[0])).all()
    assert torch.equal(codebook.encode(x).to(torch.int64), torch.bucketize(x, codebook.borders[:-1]))


@pytest.mark.parametrize("codebook", [signed_codebook(CPU), root_codebook(CPU)], ids=["signed", "root"])
def test_every_code_survives_decoding_and_encoding(codebook: Codebook) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(codebook.encode(codebook.decode(codes)), codes)


def test_map_with_two_borders_in_one_table_cell_is_refused() -> None:
    with pytest.raises(ValueError, match="two borders of this map lie in one cell"):
        Codebook(dynamic_values(signed=False), CPU)


def test_codes_of_a_normal_distribution_are_as_near_as_published() -> None:
    # Mean absolute error of N(0, 1) with bitsandbytes' signed dynamic map in flat blocks of 256: 8.6e-3.
    x = torch.randn(400, 256, generator=torch.Generator().manual_seed(1))
    scale = x.abs().amax(1, keepdim=True)
    codebook = signed_codebook(CPU)
    back = codebook.decode(codebook.encode((x / scale).view(-1))).view_as(x) * scale
    assert 8e-3 < (back - x).abs().mean() < 9.2e-3
