"""Corruptions: compared with the numbers of the public generators (benchmarks/reference_corruptions.py)."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from poem.streams import CORRUPTIONS, EXTRA, corrupt, frost_source, orders, profile_of
from poem.streams.corruptions import frost as _frost
from poem.streams.corruptions.digital import pixelate, pixelate_torch
from poem.streams.corruptions.jpeg import jpeg, jpeg_torch
from poem.streams.corruptions.levels import TABLE
from poem.streams.corruptions.random_numbers import ImageRandom
from poem.streams.shift import Shift

REFERENCE: dict[str, Any] = json.loads((Path(__file__).parents[1] / "data" / "corruptions.json").read_text())
ALL = CORRUPTIONS + EXTRA
CERTAIN = sorted({key.split("/")[0] for key in REFERENCE["certain"]})
CHANCE = sorted({key.split("/")[0] for key in REFERENCE["chance"]})
RINGS = 6


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # small tensors: on a busy machine waiting for a second thread costs more than it saves
    yield
    torch.set_num_threads(threads)


def scene(size: int, index: int) -> NDArray[np.uint8]:
    """The image that the reference script made the numbers from."""
    y, x = np.mgrid[0:size, 0:size] / size
    planes = []
    for channel in range(3):
        waves = np.sin(2 * np.pi * ((index + 1) * x + (channel + 1) * y + 0.1 * index))
        chirp = np.sin(40 * x * y * (index + 1) + channel)
        grain = np.sin(12.9898 * size * x + 78.233 * size * y + 37 * index + channel) * 43758.5453
        plane = 118 + 70 * waves + 28 * chirp + 16 * (grain - np.floor(grain) - 0.5)
        plane = np.where((abs(x - 0.3) < 0.12) & (abs(y - 0.6) < 0.2), 25 + 15 * channel, plane)
        planes.append(np.where((x - 0.7) ** 2 + (y - 0.35) ** 2 < 0.03, 235 - 30 * index + 8 * channel, plane))
    levels: NDArray[np.uint8] = np.stack(planes, -1).round().clip(0, 255).astype(np.uint8)
    return levels


def scenes(size: int) -> NDArray[np.uint8]:
    return np.stack([scene(size, index) for index in range(4)])


def tensors(size: int, count: int = 4) -> Tensor:
    return torch.from_numpy(scenes(size)).permute(0, 3, 1, 2).contiguous()[torch.arange(count) % 4]


def spectrum(change: NDArray[np.float64]) -> NDArray[np.float64]:
    luma = change @ np.array([0.299, 0.587, 0.114])
    power = np.abs(np.fft.fft2(luma)) ** 2 / luma.size
    frequency = np.hypot(*np.meshgrid(*[np.fft.fftfreq(luma.shape[0])] * 2))
    ring = np.minimum((frequency * 2 * RINGS).astype(int), RINGS)
    ring[0, 0] = -1
    return np.array([np.log10(power[ring == at].mean() + 1e-3) for at in range(RINGS)])


@pytest.mark.parametrize("size", [224, 32])
@pytest.mark.parametrize("name", CERTAIN)
def test_deterministic_corruptions_equal_the_public_generators(name: str, size: int) -> None:
    step = REFERENCE["step"][str(size)]
    lattice = slice(step // 2, None, step)
    images = scenes(size)
    for severity in range(1, 6):
        theirs = np.frombuffer(base64.b64decode(REFERENCE["certain"][f"{name}/{size}/{severity}"]), np.uint8)
        ours = corrupt(images, name, severity)
        assert (ours != images).any()
        points = ours[:, lattice, lattice].astype(float)
        apart = np.abs(points - theirs.reshape(points.shape)).mean((1, 2, 3))
        assert apart.max() <= 0.6, (severity, apart)  # the promise is 2


@pytest.mark.parametrize("size", [224, 32])
@pytest.mark.parametrize("name", CHANCE)
def test_random_corruptions_agree_in_mean_deviation_and_spectrum(name: str, size: int) -> None:
    images = scenes(size)
    draws = 6 if size == 224 else 24
    for severity in (1, 3, 5):
        kept = REFERENCE["chance"][f"{name}/{size}/{severity}"]
        outs = corrupt(np.concatenate([images] * draws), name, severity, seed=7).astype(float)
        rows = np.array([[out.mean(), out.std(), *spectrum(out - images[at % 4])] for at, out in enumerate(outs)])
        noise = 4 * np.hypot(np.array(kept["error"]), rows.std(0) / len(rows) ** 0.5)
        drawn_ice = name == "frost" and frost_source() != "imagecorruptions"
        room = np.array([3.0, 3.0] + [0.2 if drawn_ice else 0.1] * RINGS)
        apart = np.abs(rows.mean(0) - np.array(kept["mean"]))
        assert (apart <= room + noise).all(), (severity, apart.round(2), (room + noise).round(2))


@pytest.fixture
def _drawn_frost(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Our own textures, whether the photographs are installed or not."""
    monkeypatch.setattr(_frost, "_photograph_folder", lambda: None)
    _frost.textures.cache_clear()
    yield
    _frost.textures.cache_clear()


@pytest.mark.usefixtures("_drawn_frost")
@pytest.mark.parametrize("size", [224, 64, 32])
def test_drawn_frost_has_the_strength_histogram_and_spectrum_of_the_photographs(size: int) -> None:
    """Crop by crop on one grid, texture by texture, so that no draw has a say."""
    shares, theirs = REFERENCE["frost"]["shares"], REFERENCE["frost"]["crops"][str(size)]
    levels = [TABLE["frost"].level(profile_of(size), severity) for severity in range(1, 6)]
    images = np.stack([scene(size, at % 4) for at in range(49)]).astype(float)
    changes, powers = [], []
    for texture, kept in zip(_frost.textures(levels[0][2], size, size), theirs, strict=True):
        tops, lefts = (((np.arange(7) + 0.5) * (side - size) / 7).astype(int) for side in texture.shape[1:])
        planes = texture.permute(1, 2, 0).numpy()
        crops = np.stack([planes[top : top + size, left : left + size] for top in tops for left in lefts]).astype(float)
        luma = crops @ np.array([0.299, 0.587, 0.114])
        changes.append(
            [
                ((np.floor((keep * images + cover * crops).clip(0, 255)) - images) ** 2).mean()
                for keep, cover, _ in levels
            ]
        )
        assert np.abs(np.array(changes[-1]) / kept["change"] - 1).max() <= 0.1, (changes[-1], kept["change"])
        assert abs(luma.mean() - kept["mean"]) <= 4
        assert abs(luma.var((1, 2)).mean() ** 0.5 / kept["within"] - 1) <= 0.15
        assert abs(luma.mean((1, 2)).std() - kept["between"]) <= 6
        assert np.abs(np.quantile(luma, shares) - kept["levels"])[1:-1].max() <= 12
        powers.append(np.mean([10 ** spectrum(crop) for crop in crops], 0))
        assert np.abs(np.log10(powers[-1]) - kept["spectrum"]).max() <= 0.25
    change = np.mean(changes, 0) / np.mean([kept["change"] for kept in theirs], 0)
    power = np.mean(powers, 0) / np.mean([10 ** np.array(kept["spectrum"]) for kept in theirs], 0)
    assert np.abs(change - 1).max() <= 0.03, change
    assert np.abs(np.log10(power)).max() <= 0.13, power


@pytest.mark.usefixtures("_drawn_frost")
def test_drawn_frost_has_the_stored_statistics_and_channel_correlations() -> None:
    looks = REFERENCE["frost"]["looks"]
    assert frost_source() == "generated-2", "another drawing is another version"
    assert list(_frost.QUANTILES) == REFERENCE["frost"]["shares"]
    for look, kept, texture in zip(_frost.STATISTICS, looks, _frost.textures(1, 32, 32), strict=True):
        assert [list(look.size), list(map(list, look.levels)), list(look.power)] == [
            kept["size"], kept["levels"], kept["power"],
        ]  # fmt: skip
        assert texture.shape == (3, *look.size)
        (_, red_green, red_blue), (*_, green_blue), _ = np.corrcoef(texture.flatten(1).numpy())
        assert np.abs(np.array([red_green, red_blue, green_blue]) - kept["colours"]).max() <= 0.1


@pytest.mark.parametrize("name", ALL)
def test_the_result_does_not_depend_on_the_batch(name: str) -> None:
    for size in (32, 64):
        images = tensors(size, 7)
        whole = corrupt(images, name, 4, seed=3)
        parts = [corrupt(images[at : at + 2], name, 4, seed=3, ids=range(at, min(at + 2, 7))) for at in range(0, 7, 2)]
        assert torch.equal(whole, torch.cat(parts))
        backwards = corrupt(images.flip(0), name, 4, seed=3, ids=list(range(6, -1, -1)))
        assert torch.equal(whole, backwards.flip(0))


@pytest.mark.parametrize("name", CHANCE)
def test_random_numbers_depend_on_the_seed_and_the_id_alone(name: str) -> None:
    images = tensors(64, 1).expand(6, -1, -1, -1)
    state = torch.get_rng_state()
    first = corrupt(images, name, 5, seed=1)
    assert torch.equal(torch.get_rng_state(), state)  # the caller's generator stays where it was
    torch.rand(3)
    assert torch.equal(first, corrupt(images, name, 5, seed=1))
    assert not torch.equal(first, first.roll(1, 0))
    assert not torch.equal(first, corrupt(images, name, 5, seed=2))
    named = corrupt(images[:3], name, 5, seed=1, ids=["dog/1.jpg", "cat/7.jpg", "dog/1.jpg"])
    assert torch.equal(named[0], named[2])
    assert not torch.equal(named[0], named[1])


@pytest.mark.parametrize("name", ALL)
def test_the_output_has_the_type_of_the_input(name: str) -> None:
    image = pytest.importorskip("PIL.Image")
    images = tensors(32, 3)
    before = images.clone()
    out = corrupt(images, name, 2)
    assert torch.equal(images, before)
    assert (out.dtype, out.shape) == (torch.uint8, images.shape)
    array = images.permute(0, 2, 3, 1).numpy()
    rows = corrupt(array, name, 2)
    assert isinstance(rows, np.ndarray)
    assert (rows == out.permute(0, 2, 3, 1).numpy()).all()
    pictures = corrupt([image.fromarray(one) for one in array], name, 2)
    assert all((np.array(one) == row).all() for one, row in zip(pictures, rows, strict=True))
    assert (np.array(corrupt(image.fromarray(array[0]), name, 2)) == rows[0]).all()
    floats = corrupt(images.double() / 255, name, 2)
    assert floats.dtype == torch.float64
    assert floats.min() >= 0
    assert floats.max() <= 1
    assert (floats * 255 - out).abs().max() <= 1.01  # uint8 results are cut, floats keep their fraction
    grey = corrupt(images[:, :1], name, 2)
    assert grey.shape == (3, 1, 32, 32)


@pytest.mark.parametrize("name", ALL)
def test_the_change_grows_with_severity(name: str) -> None:
    images = tensors(224, 2)
    apart = [(corrupt(images, name, severity).float() - images).abs().mean().item() for severity in range(1, 6)]
    assert min(apart) > 0
    if name in CERTAIN + ["gaussian_noise", "shot_noise", "impulse_noise", "speckle_noise"] and name != "saturate":
        assert apart == sorted(apart)  # others waver with the draw, or by the generators' own choice of levels


def test_odd_sizes_and_empty_batches_work() -> None:
    images = torch.randint(0, 256, (2, 3, 37, 50), dtype=torch.uint8)
    for name in ALL:
        assert corrupt(images, name, 5).shape == images.shape
        assert corrupt(images[:0], name, 5).shape == (0, 3, 37, 50)
        large = corrupt(images[:1].repeat(1, 1, 8, 6), name, 1)  # beyond the sparse zoom, and most frost textures
        assert large.shape == (1, 3, 296, 300)


def test_jpeg_and_pixelate_in_torch_equal_pillow_to_the_byte() -> None:
    pytest.importorskip("PIL")
    for shape in ((2, 3, 64, 64), (2, 3, 37, 50), (1, 1, 40, 33)):
        noise = torch.randint(0, 256, shape, dtype=torch.uint8)
        smooth = torch.nn.functional.interpolate(noise[..., :5, :5].float(), shape[-2:], mode="bilinear").byte()
        for images in (noise, smooth):
            for quality in (7, 25, 50, 80, 95):
                assert torch.equal(jpeg(images, quality), jpeg_torch(images, quality))
            for share in (0.25, 0.6, 0.95):
                few = [max(int(side * share), 1) for side in shape[-2:]]
                draws = ImageRandom(range(len(images)), "", images.device)
                assert torch.equal(pixelate(images, draws, share), pixelate_torch(images, *few))


def test_glass_blur_equals_the_pixel_by_pixel_loop() -> None:
    """Follow the generators' loop pixel by pixel, with the same draws."""
    from poem.streams.corruptions import blur as _blur

    images = tensors(32, 2).float()
    reach, rounds = 2, 3
    ours = _blur.glass_blur(images, ImageRandom([0, 1], "glass", images.device), 1e-16, reach, rounds)
    draws = ImageRandom([0, 1], "glass", images.device)
    theirs = images.clone()
    for _ in range(rounds):
        shift = draws.integers(-reach, reach, 2, 32, 32)
        for image, (down, right) in zip(theirs, shift, strict=True):
            for y in range(32 - reach, reach, -1):
                for x in range(32 - reach, reach, -1):
                    image[:, y, x] = image[:, y + int(down[y, x]), x + int(right[y, x])]
    assert not torch.equal(ours, images)
    assert torch.equal(ours, theirs)


def test_random_numbers_are_uniform_and_normal() -> None:
    draws = ImageRandom(range(20), "test", torch.device("cpu"))
    uniform, normal = draws.uniform(20_000).double(), draws.normal(20_000).double()
    assert abs(uniform.mean() - 1 / 2) < 0.002
    assert abs(uniform.var() - 1 / 12) < 0.001
    for power, moment in ((1, 0), (2, 1), (3, 0), (4, 3)):
        assert abs((normal**power).mean() - moment) < 0.04
    beyond = (normal.abs() > 3).double().mean()
    assert 0.8 < beyond / 0.0027 < 1.2
    assert torch.corrcoef(normal).triu(1).abs().max() < 0.04  # images know nothing of each other


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", ALL)
def test_cuda_agrees_with_the_cpu(name: str) -> None:
    for size in (32, 224):
        images = tensors(size, 3)
        apart = (corrupt(images.cuda(), name, 3).cpu().int() - corrupt(images, name, 3).int()).abs()
        if name == "zoom_blur":  # a mean over many zooms, whose sums a GPU rounds otherwise
            assert apart.max() <= 1
            assert (apart > 0).float().mean() < 1e-4
        else:
            assert not apart.any()


def test_profile_is_the_nearest_size_and_can_be_named() -> None:
    assert [profile_of(size) for size in (28, 32, 47, 48, 64, 96, 143, 144, 224, 600)] == [
        "cifar", "cifar", "cifar", "tiny-imagenet", "tiny-imagenet", "tiny-imagenet", "tiny-imagenet", "imagenet",
        "imagenet", "imagenet",
    ]  # fmt: skip
    images = tensors(64)
    plain = corrupt(images, "contrast", 1)
    assert torch.equal(plain, corrupt(images, "contrast", 1, profile="tiny-imagenet"))
    assert not torch.equal(plain, corrupt(images, "contrast", 1, profile="cifar"))


@pytest.mark.parametrize("severity", [0, 6, -1, 2.5, 5.0, np.float64(5), True, np.True_, "3", None])
def test_other_severities_are_refused(severity: Any) -> None:
    with pytest.raises(ValueError, match=r"expected severity 1, 2, 3, 4 or 5, got"):
        corrupt(tensors(32), "fog", severity)
    with pytest.raises(ValueError, match=r"expected severity 1 to 5, got"):
        Shift("fog", severity)


def test_integers_of_every_type_give_the_same_result() -> None:
    """NumPy's integers come out of index arrays; True and 5.0 would make other draws under the same name."""
    images = tensors(32)
    plain = corrupt(images, "gaussian_noise", 5, seed=3, ids=[7, 8, 9, 10])
    kinds: list[Any] = [np.int64, np.uint8, torch.tensor]
    for number in kinds:
        ids: Any = [number(each) for each in (7, 8, 9, 10)]
        assert torch.equal(corrupt(images, "gaussian_noise", number(5), seed=number(3), ids=ids), plain)
        shift = Shift("fog", number(5))
        assert type(shift.severity) is int
        assert shift == Shift("fog", 5)
    for ids in ([True, 1, 2, 3], [0.0, 1, 2, 3], np.arange(4.0)):
        with pytest.raises(ValueError, match=r"expected 4 ids, one int or str per image, got 4 of"):
            corrupt(images, "fog", 5, ids=ids)
    for seed in (0.0, True, "0"):
        with pytest.raises(ValueError, match=r"expected an integer seed, got"):
            corrupt(images, "fog", 5, seed=seed)  # type: ignore[arg-type]


def test_corruption_names_are_the_keys_of_the_table() -> None:
    """Names stand once, apart from the functions, so that orders need not load these."""
    assert tuple(TABLE) == CORRUPTIONS + EXTRA
    assert (len(CORRUPTIONS), len(EXTRA)) == (15, 4)
    assert CORRUPTIONS is orders.CORRUPTIONS
    assert EXTRA is orders.EXTRA


def test_bad_input_is_an_error_with_what_was_expected() -> None:
    images = tensors(32)
    with pytest.raises(ValueError, match=r"got 'gausian_noise'; did you mean gaussian_noise"):
        corrupt(images, "gausian_noise", 1)
    with pytest.raises(ValueError, match=r"the names are gaussian_noise, shot_noise"):
        corrupt(images, "xyz", 1)
    with pytest.raises(ValueError, match=r"expected profile imagenet, tiny-imagenet, cifar or None, got 'svhn'"):
        corrupt(images, "fog", 1, profile="svhn")
    with pytest.raises(ValueError, match=r"got shape \(3, 32, 32\); for one image pass image\[None\]"):
        corrupt(images[0], "fog", 1)
    with pytest.raises(ValueError, match=r"pass images.permute"):
        corrupt(images.permute(0, 2, 3, 1), "fog", 1)
    with pytest.raises(ValueError, match=r"for one image pass image\[None\]"):
        corrupt(scene(32, 0), "fog", 1)
    with pytest.raises(ValueError, match=r"got torch.int64; pass images.to"):
        corrupt(images.long(), "fog", 1)
    with pytest.raises(ValueError, match=r"in \[0, 1\], got .* corrupt before normalisation"):
        corrupt(images.float(), "fog", 1)
    with pytest.raises(ValueError, match=r"in \[0, 1\], got nan"):
        corrupt(torch.full((1, 3, 32, 32), torch.nan), "fog", 1)
    with pytest.raises(ValueError, match=r"expected 4 ids, one int or str per image, got 3"):
        corrupt(images, "fog", 1, ids=[1, 2, 3])
    with pytest.raises(ValueError, match=r"got str"):
        corrupt("image.png", "fog", 1)
