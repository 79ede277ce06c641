"""Every network builds, has the size it is known by, and computes finite, varied outputs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch.utils._pytree import tree_leaves

from benchmarks.models import NETWORKS, call, load

if TYPE_CHECKING:
    from collections.abc import Iterator

PARAMETERS = {  # at full depth: what the literature and the public implementations state
    "resnet18": 11_689_512,
    "resnet50": 25_557_032,
    "wide_resnet50_2": 68_883_240,
    "inception_v3": 23_834_568,
    "densenet121": 7_978_856,
    "mobilenet_v2": 3_504_872,
    "dcgan": 3_576_704,
    "deeplab_v3": 39_638_869,
    "bert_base": 109_482_240,
    "gpt2": 124_439_808,
    "llama": 137_841_408,
    "opt_1_3b": 1_315_758_080,
    "mistral_7b": 7_110_660_096,
    "efficientnet_b7": 66_347_960,
    "mobilenet_v3_large": 5_483_032,
    "efficientnet_b0": 5_288_548,
    "regnet_y_400mf": 4_344_144,
    "swin_t": 28_288_354,
    "convnext_t": 28_589_128,
    "vit_s": 21_813_504,
    "resnext50": 25_028_904,
    "resnet3d18": 33_371_472,
    "dcgan_discriminator": 2_765_568,
    "bert_large": 335_141_888,
}

OUTPUTS = {  # shape of the first output at batch 1
    "inception_v3": (1, 1000),
    "dcgan": (1, 3, 64, 64),
    "deeplab_v3": (1, 21, 224, 224),
    "bert_tiny": (1, 128, 512),
    "vit": (1, 257, 768),
    "detr": (1, 100, 92),
    "unet": (1, 4, 32, 32),
    "unet_narrow_heads": (1, 4, 32, 32),
    "dcgan_discriminator": (1, 1),
    "c1d_1": (1, 128, 128),
    "c2d_1": (1, 64, 112, 112),
    "c3d_1": (1, 64, 8, 112, 112),
    "gmm_2": (1, 512, 32),
    "grp_1": (1, 128, 28, 28),
    "dil_1": (1, 64, 109, 109),
    "dep_2": (1, 64, 56, 56),
    "t2d_4": (1, 3, 64, 64),
    "cap_1": (1, 4, 128, 8, 8),
    "nrm_4": (1,),
    "cbr_3": (1, 256, 14, 14),
    "tbs_3": (1, 12, 64, 64),
}

TOO_BIG_TO_RUN = {"opt_1_3b", "mistral_7b"}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _tensors(name: str, **settings: object) -> list[torch.Tensor]:
    layers = 1 if NETWORKS[name].depth else None
    module, inputs = load(name, layers=layers, **settings)
    with torch.inference_mode():
        return [x for x in tree_leaves(call(module, inputs)) if isinstance(x, torch.Tensor)]


@pytest.mark.parametrize("name", sorted(PARAMETERS))
def test_full_depth_has_the_published_number_of_parameters(name: str) -> None:
    network = NETWORKS[name]
    with torch.device("meta"):
        module = network.build(layers=network.depth)
    assert sum(p.numel() for p in module.parameters()) == PARAMETERS[name]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", sorted(NETWORKS.keys() - TOO_BIG_TO_RUN))
def test_outputs_are_finite_and_varied(name: str) -> None:
    outputs = _tensors(name)
    assert tuple(outputs[0].shape) == OUTPUTS.get(name, tuple(outputs[0].shape))
    if outputs[0].numel() == 1:  # varied it is from sample to sample
        outputs = _tensors(name, batch=8)
    for output in outputs:
        assert output.isfinite().all()
        assert 1e-2 < output.std() < 100


@pytest.mark.parametrize("name", ["mobilenet_v2", "bert_tiny"])
def test_the_seed_decides_weights_and_inputs(name: str) -> None:
    first, again, other = (_tensors(name, seed=seed)[0] for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.allclose(first, other)


def test_loading_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    load("dcgan", seed=3)
    assert torch.equal(torch.rand(3), expected)


def test_eager_and_fused_attention_agree() -> None:
    fused, eager = (_tensors("bert_tiny", attention=kind)[0] for kind in ("sdpa", "eager"))
    torch.testing.assert_close(fused, eager, rtol=1e-4, atol=1e-4)


def test_bfloat16_keeps_rotary_frequencies_in_float32() -> None:
    module, inputs = load("llama", dtype=torch.bfloat16, layers=1, batch=4)
    kept = {b.dtype for n, b in module.named_buffers() if n.endswith("inv_freq")}
    assert kept == {torch.float32}
    assert {p.dtype for p in module.parameters()} == {torch.bfloat16}
    assert isinstance(inputs, dict)
    assert inputs["input_ids"].shape == (4, 128)


def test_layers_are_refused_where_there_are_none() -> None:
    with pytest.raises(ValueError, match="no repeated layers"):
        load("resnet50", layers=2)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(KeyError, match="resnet50"):
        load("resnet51")


def test_capsules_multiply_matrices() -> None:
    """The convolution of channels is the sum over places of products of pixels' matrices."""
    module, (x,) = load("cap_4", batch=2)
    found = call(module, (x,))
    pixels = x.unflatten(2, (16, 4))  # N, row, capsule, inner, height, width
    weights = module.votes.weight.unflatten(0, (16, 4)).unflatten(2, (16, 4))
    padded = torch.nn.functional.pad(pixels, (1, 1, 1, 1))
    expected = torch.zeros(2, 4, 16, 4, 8, 8)
    for i in range(3):
        for j in range(3):
            at = padded[..., i : i + 8, j : j + 8]
            expected += torch.einsum("nrckhw,opck->nrophw", at, weights[..., i, j])
    torch.testing.assert_close(found, expected.flatten(2, 3), rtol=1e-4, atol=1e-4)
