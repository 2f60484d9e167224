"""Sizes from the configuration alone, against the published ones."""

from __future__ import annotations

import pytest

from checkpoints import LLADA2, LLADA22, SDAR, make_tensors
from relume.model.families import FAMILIES
from relume.model.sizes import model_sizes
from relume.synth.shapes import make_shape

GIB = 2**30


@pytest.mark.parametrize(
    ("name", "num_tensors", "total", "outside_gib", "expert_mib"),
    [
        ("llada2-mini", 14_813, 16.256e9, 1.78, 6),
        ("llada2-flash", 24_161, 102_889_705_216, 5.65, 24),
    ],
)
def test_published_sizes(name: str, num_tensors: int, total: float, outside_gib: float, expert_mib: int) -> None:
    shape = make_shape(name)
    sizes = model_sizes(shape.family, shape.config)
    assert sizes.num_tensors == num_tensors
    assert sizes.total == pytest.approx(total, rel=1e-9 if isinstance(total, int) else 1e-4)
    assert sizes.outside_experts * 2 / GIB == pytest.approx(outside_gib, abs=0.005)
    assert sizes.per_expert * 2 == expert_mib * 2**20


def test_sdar_size() -> None:
    shape = make_shape("sdar-30b")
    assert model_sizes(shape.family, shape.config).total == pytest.approx(30.53e9, rel=1e-3)


@pytest.mark.parametrize("config", [LLADA2, LLADA22, SDAR])
def test_sizes_are_those_of_the_tensors(config: dict[str, object]) -> None:
    family = FAMILIES["llada2" if config["model_type"] == "llada2_moe" else "sdar"]
    tensors = make_tensors(config)
    sizes = model_sizes(family, family.read_config(config, {}))
    assert sizes.total == sum(tensor.numel() for tensor in tensors.values())
    assert sizes.num_tensors == len(tensors)
