"""The augmentation chains do what the libraries of the reference code do, and draw only from the generator given."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from poem.parts import augment
from poem.parts.augment import Augment, AugMix, Jitter

NEUTRAL = Jitter(
    brightness=(1, 1),
    contrast=(1, 1),
    saturation=(1, 1),
    hue=(0, 0),
    gamma=(1, 1),
    degrees=0,
    translate=0,
    scale=(1, 1),
    flip=0,
)
CHAINS: list[Augment] = [Jitter(), Jitter.cotta(), AugMix(views=8), AugMix(views=8, pre="crop")]
ids = ["roid", "cotta", "augmix-resized-crop", "augmix-crop"]


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def pictures(n: int = 2, size: tuple[int, int] = (24, 30), channels: int = 3) -> Tensor:
    """Noise with exact blacks, whites and greys in it, where hue and gamma have their corner cases."""
    images = torch.rand(n, channels, *size, generator=seeded(7))
    images[..., :3, :] = torch.tensor([0.0, 1.0, 0.5])[:, None]
    images[:, :1, 3:6, :] = 1.0
    return images


def smooth(size: int = 32) -> Tensor:
    """Left-right symmetric, so that flips leave it in place."""
    x = torch.linspace(-1, 1, size)
    bump = torch.exp(-(x[:, None] ** 2 + x[None] ** 2))
    return torch.stack([bump, 0.2 + 0.5 * bump, 0.8 - 0.6 * bump])[None]


def photo(size: tuple[int, int] = (40, 48)) -> Tensor:
    """8-bit levels with a histogram that is neither flat nor full."""
    noise = torch.rand(1, 3, *size, generator=seeded(3))
    return (20 + 190 * noise**2).round()


def pil_op(name: str, levels: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    image_module = pytest.importorskip("PIL.Image")
    ops = pytest.importorskip("PIL.ImageOps")
    np = pytest.importorskip("numpy")
    picture = image_module.fromarray(levels[0].permute(1, 2, 0).byte().numpy())
    done = getattr(ops if hasattr(ops, name) else picture, name)(
        *([picture] if hasattr(ops, name) else []), *args, **kwargs
    )
    return torch.from_numpy(np.array(done)).permute(2, 0, 1)[None].float()


# Against torchvision


@pytest.mark.parametrize(
    ("name", "factor"),
    [
        (name, factor)
        for name, factors in {
            "brightness": (0.6, 1.4),
            "contrast": (0.7, 1.3),
            "saturation": (0.5, 1.5),
            "hue": (-0.06, 0.06, 0.4, -0.5),
            "gamma": (0.7, 1.3),
        }.items()
        for factor in factors
    ],
)
def test_a_colour_op_equals_torchvision(name: str, factor: float) -> None:
    functional = pytest.importorskip("torchvision.transforms.functional")
    images = pictures()
    ours = augment._COLOUR[name](images, factor)
    assert (ours - images).abs().max() > 0.01
    torch.testing.assert_close(ours, getattr(functional, f"adjust_{name}")(images, factor), atol=1e-5, rtol=0)


@pytest.mark.parametrize("channels", [1, 3])
def test_contrast_equals_torchvision_for_grey_images_too(channels: int) -> None:
    functional = pytest.importorskip("torchvision.transforms.functional")
    images = pictures(channels=channels)
    torch.testing.assert_close(
        augment._COLOUR["contrast"](images, 0.7), functional.adjust_contrast(images, 0.7), atol=1e-5, rtol=0
    )


@pytest.mark.parametrize(("angle", "right", "down", "scale"), [(12.0, 0, 0, 1.0), (0, 3, -2, 1.0), (-15, 2, 1, 0.9)])
@pytest.mark.parametrize("size", [(32, 32), (25, 32), (33, 21)])
@pytest.mark.parametrize("padding", ["reflect", "edge"])
def test_affine_equals_torchvisions_pad_affine_crop(
    padding: str, size: tuple[int, int], angle: float, right: int, down: int, scale: float
) -> None:
    functional = pytest.importorskip("torchvision.transforms.functional")
    images = pictures(size=size)
    padded = functional.pad(images, [size[1] // 2, size[0] // 2], padding_mode=padding)
    bilinear = functional.InterpolationMode.BILINEAR
    moved = functional.affine(padded, angle, [right, down], scale, [0.0, 0.0], interpolation=bilinear)
    theirs = functional.center_crop(moved, list(size))
    ours = augment._affine(images, angle, right, down, scale, padding, 0)
    assert (ours - images).abs().max() > 0.1
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


def test_affine_beyond_the_padding_is_zero() -> None:
    moved = augment._affine(torch.ones(1, 3, 16, 16), 0.0, 20, 0, 1.0, "edge", 0)
    assert moved[..., :12].eq(0).all()
    assert moved[..., 12:].eq(1).all()


@pytest.mark.parametrize("sigma", [0.001, 0.3, 0.5])
def test_blur_equals_torchvision(sigma: float) -> None:
    functional = pytest.importorskip("torchvision.transforms.functional")
    images = pictures()
    ours = augment._blur(F.pad(images, (2, 2, 2, 2), mode="reflect"), sigma)
    torch.testing.assert_close(ours, functional.gaussian_blur(images, [5, 5], [sigma, sigma]), atol=1e-5, rtol=0)


@pytest.mark.parametrize("chain", [Jitter(degrees=15), Jitter.cotta()], ids=["roid", "cotta"])
def test_jitter_equals_the_chain_spelled_out_in_torchvision(chain: Jitter) -> None:
    functional = pytest.importorskip("torchvision.transforms.functional")
    images, size = pictures(size=(32, 32)), 32
    rng = seeded(5)
    chance = torch.rand(11, generator=rng, dtype=torch.float64).tolist()
    ranges = (chain.brightness, chain.contrast, chain.saturation, chain.hue, chain.gamma)
    factors = [low + (high - low) * at for (low, high), at in zip(ranges, chance, strict=False)]
    out = images
    for op in torch.randperm(5, generator=rng).tolist():
        name = ("brightness", "contrast", "saturation", "hue", "gamma")[op]
        out = getattr(functional, f"adjust_{name}")(out, factors[op])
    out = functional.pad(out, [size // 2, size // 2], padding_mode=chain.padding)
    shift = [round((2 * at - 1) * 2 * size / 16) for at in chance[6:8]]
    out = functional.affine(
        out,
        (2 * chance[5] - 1) * 15,
        shift,
        0.9 + 0.2 * chance[8],
        [0.0, 0.0],
        interpolation=functional.InterpolationMode.BILINEAR,
    )
    if chain.blur is not None:
        sigma = chain.blur[0] + (chain.blur[1] - chain.blur[0]) * chance[9]
        out = functional.gaussian_blur(out, [5, 5], [sigma, sigma])
    out = functional.center_crop(out, [size, size])
    if chance[10] < 0.5:
        out = functional.hflip(out)
    if chain.noise:
        out = out + chain.noise * torch.randn(out.shape, generator=rng)
    torch.testing.assert_close(chain(images, seeded(5)), out.clamp(0, 1), atol=2e-4, rtol=0)


# Against Pillow


@pytest.mark.parametrize(
    ("name", "args", "strength", "tolerance"),
    [
        ("autocontrast", (), 1.0, 1),
        ("equalize", (), 1.0, 0),
        ("posterize", (4,), 1.0, 0),
        ("solarize", (256 - 25,), 1.0, 0),
        ("solarize", (256 - 12,), -0.5, 0),
    ],
)
def test_a_level_op_equals_pillow(name: str, args: tuple[int, ...], strength: float, tolerance: int) -> None:
    levels = photo()
    levels[..., 0, :] = 251.0 - torch.arange(48)  # every level around the solarize thresholds
    theirs = pil_op(name, levels, *args)
    assert (theirs - levels).abs().max() > 1
    ours = augment._OPS[name](levels, torch.tensor([strength], dtype=torch.float64))
    assert (ours - theirs).abs().max() <= tolerance


@pytest.mark.parametrize("name", ["autocontrast", "equalize"])
@pytest.mark.parametrize("colours", [1, 2])
def test_a_level_op_equals_pillow_on_images_of_few_colours(name: str, colours: int) -> None:
    levels = torch.full((1, 3, 20, 20), 90.0)
    levels[..., :3, :] += 10.0 * (colours - 1)
    ours = augment._OPS[name](levels, torch.ones(1, dtype=torch.float64))
    torch.testing.assert_close(ours, pil_op(name, levels))


@pytest.mark.parametrize("strength", [0.9, -0.9, 0.5])
@pytest.mark.parametrize("name", ["rotate", "shear-x", "shear-y", "translate-x", "translate-y"])
def test_a_geometric_op_equals_pillow(name: str, strength: float) -> None:
    image_module = pytest.importorskip("PIL.Image")
    levels = photo((60, 72))
    how = {"resample": image_module.Resampling.BILINEAR, "fillcolor": (128, 128, 128)}
    slope = 0.03 * strength
    matrices = {
        "shear-x": (1, slope, 0, 0, 1, 0),
        "shear-y": (1, 0, 0, slope, 1, 0),
        "translate-x": (1, 0, int(strength * 72 / 30), 0, 1, 0),
        "translate-y": (1, 0, 0, 0, 1, int(strength * 60 / 30)),
    }
    if name == "rotate":
        theirs = pil_op("rotate", levels, int(3 * strength), **how)
    else:
        theirs = pil_op("transform", levels, (72, 60), image_module.Transform.AFFINE, matrices[name], **how)
    ours = augment._OPS[name](levels, torch.tensor([strength], dtype=torch.float64))
    assert (ours - levels).abs().max() > 1
    assert ours.eq(ours.round()).all()
    assert ((ours - theirs).abs() <= 1).float().mean() > 0.999  # a pixel on the rim may fall on either side


def test_flat_regions_keep_their_level_under_geometry() -> None:
    levels = torch.full((2, 3, 50, 50), 77.0)
    turned = augment._OPS["rotate"](levels, torch.tensor([0.9, -0.9], dtype=torch.float64))
    assert turned[..., 5:-5, 5:-5].eq(77).all()


# Properties


@pytest.mark.parametrize("chain", CHAINS, ids=ids)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_chain_keeps_range_shape_and_dtype(chain: Augment, dtype: torch.dtype) -> None:
    images = pictures(n=1).to(dtype)
    views = chain(images, seeded())
    assert views.shape[1:] == images.shape[1:]
    assert len(views) == (8 if isinstance(chain, AugMix) else 1)
    assert views.dtype == dtype
    assert views.min() >= 0
    assert views.max() <= 1
    assert not torch.equal(views[:1], images)


@pytest.mark.parametrize("chain", CHAINS, ids=ids)
def test_the_same_seed_gives_the_same_views_and_another_seed_others(chain: Augment) -> None:
    images = pictures(n=1)
    assert torch.equal(chain(images, seeded(1)), chain(images, seeded(1)))
    assert not torch.equal(chain(images, seeded(1)), chain(images, seeded(2)))


@pytest.mark.parametrize("chain", CHAINS, ids=ids)
def test_only_the_given_generator_is_drawn_from_and_the_input_stays(chain: Augment) -> None:
    images, rng = pictures(n=1), seeded()
    kept, state, start = images.clone(), torch.get_rng_state(), rng.get_state()
    chain(images, rng)
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(rng.get_state(), start)
    assert torch.equal(images, kept)


@pytest.mark.parametrize("chain", CHAINS, ids=ids)
def test_float64_agrees_with_float32(chain: Augment) -> None:
    images = pictures(n=1)
    single, double = chain(images, seeded()).double(), chain(images.double(), seeded())
    # AugMix: float error may move single pixels across a level, no more.
    assert ((single - double).abs() < 2e-4).double().mean() > 0.995


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a second device")
@pytest.mark.parametrize("chain", CHAINS, ids=ids)
def test_devices_agree(chain: Augment) -> None:
    images = pictures(n=1)
    here, there = chain(images, seeded()), chain(images.cuda(), seeded())
    assert there.device.type == "cuda"
    assert ((here - there.cpu()).abs() < 2e-4).double().mean() > 0.995


def test_neutral_jitter_is_the_identity() -> None:
    images = pictures()
    torch.testing.assert_close(NEUTRAL(images, seeded()), images, atol=1e-4, rtol=0)
    torch.testing.assert_close(NEUTRAL(images.double(), seeded()), images.double(), atol=1e-7, rtol=0)


def test_jitter_shares_one_draw_over_the_batch() -> None:
    twins = pictures(n=1).expand(3, -1, -1, -1)
    out = Jitter()(twins, seeded())
    torch.testing.assert_close(out[0], out[2])
    torch.testing.assert_close(Jitter()(twins[:1], seeded())[0], out[0])


def test_jitter_noise_differs_from_pixel_to_pixel_and_has_the_stated_deviation() -> None:
    images = torch.full((4, 3, 32, 32), 0.5)
    out = dataclasses.replace(NEUTRAL, noise=0.01)(images, seeded())
    assert abs(float((out - images).std()) - 0.01) < 1e-3
    assert not torch.equal(out[0], out[1])


def test_jitter_flips_half_the_time() -> None:
    ramp = torch.linspace(0, 1, 8).expand(1, 3, 8, 8)
    chain, rng = dataclasses.replace(NEUTRAL, flip=0.5), seeded()
    flipped = sum(int(chain(ramp, rng)[0, 0, 0, 0] > 0.5) for _ in range(200))
    assert 70 < flipped < 130


@pytest.mark.parametrize("channels", [1, 2, 5])
def test_other_channel_counts_skip_saturation_and_hue(channels: int) -> None:
    images = pictures(channels=channels)
    wild = dataclasses.replace(NEUTRAL, saturation=(0, 0), hue=(0.3, 0.3))
    torch.testing.assert_close(wild(images, seeded()), images, atol=1e-4, rtol=0)
    assert Jitter()(images, seeded()).shape == images.shape
    assert AugMix(views=2)(images[:1], seeded()).shape == (2, channels, 24, 30)


def test_cotta_is_roids_chain_with_edges_blur_and_noise() -> None:
    assert Jitter.cotta() == dataclasses.replace(Jitter(), padding="edge", blur=(0.001, 0.5), noise=0.005)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    size=st.tuples(st.integers(1, 20), st.integers(1, 20)),
    channels=st.sampled_from([1, 3, 4]),
    padding=st.sampled_from(["reflect", "edge"]),
    spread=st.floats(0, 3),
)
def test_jitter_stays_in_range_whatever_comes_in(
    seed: int, size: tuple[int, int], channels: int, padding: Literal["reflect", "edge"], spread: float
) -> None:
    images = 0.5 + spread * torch.randn(2, channels, *size, generator=seeded(seed))
    out = Jitter(padding=padding, blur=(0.001, 0.5), noise=0.05, degrees=180, scale=(0.3, 3))(images, seeded(seed))
    assert out.shape == images.shape
    assert out.isfinite().all()
    assert out.min() >= 0
    assert out.max() <= 1


def test_augmix_views_differ_and_their_mean_is_near_the_image() -> None:
    image = smooth()
    views = AugMix(views=64, pre="crop")(image, seeded())
    apart = (views[:, None] - views[None]).abs().amax((2, 3, 4)) + torch.eye(64)
    assert apart.min() > 1e-3
    inner = (slice(None), slice(None), slice(6, -6), slice(6, -6))
    assert (views.mean(0, keepdim=True) - image)[inner].abs().mean() < 0.05
    assert (views - image)[inner].abs().mean() > 0.01


def test_augmix_resized_crops_are_parts_of_the_image() -> None:
    ramp = torch.linspace(0, 255, 64).expand(1, 1, 64, 64)
    crops = augment._crops(ramp, "resized-crop", 200, seeded())
    spans = (crops[:, 0, 0, -1] - crops[:, 0, 0, 0]) / 255
    assert crops.shape == (200, 1, 64, 64)
    assert 0.2 < spans.min() < 0.35  # the square root of 8 %, times the square root of the aspect
    assert spans.max() > 0.95


def test_augmix_padded_crops_shift_by_at_most_four() -> None:
    image = torch.arange(100.0).view(1, 1, 10, 10) + 1
    crops = augment._crops(image, "crop", 500, seeded())
    zeros = crops.eq(0)
    for side in (-1, -2):
        assert set(zeros.all(side).sum(-1).flatten().tolist()) == {0, 1, 2, 3, 4}


def test_augmix_weights_sum_to_one_and_follow_their_laws() -> None:
    weights = augment._mixing_weights(20_000, 3, seeded())
    torch.testing.assert_close(weights.sum(1), torch.ones(20_000, dtype=torch.float64))
    assert weights.min() >= 0
    own = weights[:, 0]
    shares = weights[:, 1:] / (1 - own[:, None])
    assert abs(float(own.mean()) - 1 / 2) < 0.01
    assert abs(float(own.var()) - 1 / 12) < 0.005  # Beta(1, 1)
    assert (shares.mean(0) - 1 / 3).abs().max() < 0.01
    assert (shares.var(0) - 1 / 18).abs().max() < 0.005  # Dirichlet(1, 1, 1)


def test_mixing_commutes_with_normalisation() -> None:
    weights = augment._mixing_weights(1, 3, seeded())[0]
    parts = torch.rand(4, 3, 8, 8, generator=seeded(), dtype=torch.float64)
    mixed = (weights[:, None, None, None] * parts).sum(0)
    normalised_first = (weights[:, None, None, None] * (parts - 0.45) / 0.22).sum(0)
    torch.testing.assert_close((mixed - 0.45) / 0.22, normalised_first)


# Errors


def test_wrong_input_is_refused_with_the_way_out() -> None:
    with pytest.raises(ValueError, match="call AugMix once per image"):
        AugMix()(pictures(n=2), seeded())
    for chain in CHAINS:
        with pytest.raises(ValueError, match=r"images\.float\(\) / 255"):
            chain(torch.zeros(1, 3, 8, 8, dtype=torch.uint8), seeded())


def test_wrong_settings_are_refused() -> None:
    wrong: Any = "mirror"
    with pytest.raises(ValueError, match="'reflect' or 'edge'"):
        Jitter(padding=wrong)
    with pytest.raises(ValueError, match="expected blur to be"):
        Jitter(blur=(0.0, 0.5))
    with pytest.raises(ValueError, match="'resized-crop' or 'crop'"):
        AugMix(pre=wrong)
    with pytest.raises(ValueError, match="expected views to be an integer of at least 1"):
        AugMix(views=0)
