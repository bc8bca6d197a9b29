"""Bad input, met before anything has changed: what was expected, what came, what to type."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from poem._util.integers import as_integer, plain_scalar
from poem.engine.anatomy import WITHOUT_NORMS, is_norm
from poem.engine.model_input import EMBED, ModelInput
from poem.parts.base import Need
from poem.parts.fields import LARGEST
from poem.recipes.recipe import Recipe

log = logging.getLogger("poem")
UNEDITED = "use a method that does not edit its input, such as 'tent', 'eata', 'sar' or 'poem'"
ZERO_SHOT = (
    "wrap its image tower, with the texts' features as the last layer: class ZeroShot(nn.Module), forward(self, x): "
    "return self.scale.exp() * F.normalize(self.images(x), dim=-1) @ self.texts.T; examples/05_clip.py has it whole"
)
"""What to type where a model compares images with texts."""


def model(module: nn.Module) -> nn.Module:
    """The module to borrow; wrappers that hide it are refused or opened."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"expected an nn.Module from images to logits, got {type(module).__name__}")
    if isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise TypeError(f"expected a plain module, got {type(module).__name__}; adapt model.module, one per device")
    if isinstance(module, torch.jit.ScriptModule):
        raise TypeError(
            "expected a module whose layers can be reached, got a ScriptModule; adapt the module it came from"
        )
    if _two_towers(module):
        raise TypeError(
            f"expected a module from images to logits, got {type(module).__name__}, which compares images with texts; "
            f"{ZERO_SHOT}"
        )
    inner = getattr(module, "_orig_mod", None)
    if isinstance(inner, nn.Module):
        log.info("adapting the module inside torch.compile's wrapper")
        module = inner
    for name, child in module.named_modules():
        if isinstance(child, torch.jit.ScriptModule):
            raise TypeError(
                f"expected modules whose layers can be reached, but {name!r} is a ScriptModule; put the module it was "
                "made from in its place"
            )
    for name, parameter in module.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise ValueError(f"{name} has no shape yet; run one batch through the model, then adapt it")
        if parameter.dtype == torch.float16 and parameter.device.type == "cpu":
            raise ValueError(f"expected float32 or bfloat16 on the CPU, got float16 in {name}; call model.float()")
        if parameter.is_inference():
            raise ValueError(f"{name} was made under inference_mode and cannot learn; build the model outside it")
    return module


def _two_towers(module: nn.Module) -> bool:
    """Whether a model such as CLIP embeds images and texts, and its forward wants both."""
    names = (("get_image_features", "get_text_features"), ("encode_image", "encode_text"))
    towers = any(all(callable(getattr(module, name, None)) for name in pair) for pair in names)
    return towers and any(name in ("input_ids", "text") for name in inspect.signature(module.forward).parameters)


def batch_size(given: int | None) -> int | None:
    """The configured batch size as a plain integer, where one is given."""
    size = as_integer(given)
    if given is not None and (size is None or not 1 <= size <= LARGEST):
        raise ValueError(
            f"expected a batch size, an integer of at least 1, got {given!r}; leave it out to take the first batch's"
        )
    return size


def seed(given: int) -> int:
    """A seed that torch's generators take, as a plain integer."""
    found = as_integer(given)
    if found is None or not -LARGEST <= found < 2**64:
        raise ValueError(f"expected an integer seed, got {given!r}; leave it out for 0")
    return found


def indices(classes: Sequence[int] | Tensor | None) -> list[int] | None:
    """A class mask as different plain indices, in the order given."""
    if classes is None:
        return None
    remedy = "pass them as in classes=[3, 1, 8]"
    if isinstance(classes, str) or not isinstance(classes, Iterable):
        raise ValueError(f"expected classes as integer indices into the logits, got {classes!r}; {remedy}")
    found: list[int] = []
    for each in classes:
        if isinstance(plain_scalar(each), bool):
            raise ValueError("expected classes as indices into the logits, got truth values; use mask.nonzero()[:, 0]")
        index = as_integer(each)
        if index is None:
            raise ValueError(f"expected classes as integer indices into the logits, got {each!r}; {remedy}")
        found.append(index)
    if not found or len(set(found)) < len(found) or min(found) < 0 or max(found) > LARGEST:
        raise ValueError(f"expected classes as different indices into the logits, got {found[:8]}")
    return found


def normalisation(
    needed: bool,
    name: str,
    mean: Sequence[float] | None,
    std: Sequence[float] | None,
    channels: int | None,
    spatial: int | None = 2,
) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    """Mean and std as plain numbers, one per channel, where they are given; methods that augment need them."""
    if (mean is None) != (std is None):
        raise ValueError("expected mean and std together, got one of them; pass both, or neither")
    if mean is None or std is None:
        if needed and spatial not in (2, None):
            raise ValueError(
                f"{name} augments images, and the network convolves over {spatial} dimension{'s' * (spatial != 1)}; "
                f"{UNEDITED}"
            )
        if needed:
            raise ValueError(
                f"{name} augments images in [0, 1] and needs the normalisation inside: pass images in [0, 1], mean= "
                "and std= (for a model that takes [0, 1] as it is: mean=(0, 0, 0), std=(1, 1, 1)). For other input "
                f"than images {UNEDITED}"
            )
        return None
    centre, spread = _finite_numbers(mean), _finite_numbers(std)
    if len(centre) != len(spread) or not centre or (channels is not None and len(centre) not in (1, channels)):
        raise ValueError(f"expected mean and std with one value per channel ({channels}), got {mean} and {std}")
    if min(spread) <= 0:
        raise ValueError(f"expected std above 0, got {std}")
    return centre, spread


def _finite_numbers(given: Sequence[float]) -> tuple[float, ...]:
    """The numbers of a mean or std, NumPy's and torch's too."""
    try:
        found = [float(plain_scalar(each)) for each in given]
    except (TypeError, ValueError):
        found = [math.nan]
    if isinstance(given, str) or not all(map(math.isfinite, found)):
        raise ValueError(f"expected mean and std as finite numbers, one per channel, got {given!r}")
    return tuple(found)


def something_moves(recipe: Recipe, module: nn.Module, names: list[str], branch: list[str]) -> None:
    """A recipe that learns has something to move, and its branch too."""
    kind = type(module).__name__
    if recipe.branch is not None and not any(map(is_norm, module.modules())):
        raise ValueError(f"{kind} has no norm layer for the adapt branch; {WITHOUT_NORMS}")
    if recipe.learns and not names:
        raise ValueError(f"{recipe.parameters!r} matched no parameter of {kind}; try parameters=Everything()")
    if recipe.branch is not None and not branch:
        raise ValueError(f"no norm layer of {kind} lies beyond the split; pass split= to name an earlier module")
    if recipe.step.per_sample:
        holders = ((name, module.get_submodule(name.rpartition(".")[0])) for name in names)
        other = next((name for name, holder in holders if not is_norm(holder)), None)
        if other is not None:
            raise ValueError(
                f"{recipe.step!r} clips scale and shift of norm layers, got {other!r} of {recipe.parameters!r}; pass "
                f"parameters=NormAffine(), or step={recipe.step.optimiser!r}"
            )


def still_here(unloaded: bool) -> None:
    """An adapter that gave its model back cannot be used again."""
    if unloaded:
        raise RuntimeError("this adapter was unloaded; make a new one with poem.adapt(model, ...)")


def images(batch: Tensor, module: nn.Module) -> Tensor:
    """A batch that the network can take, free of inference mode: floating point, on its device, the batch axis first.

    `odd_shape` tells whether its shape is one that the network's first convolution takes.
    """
    if not isinstance(batch, Tensor):
        remedy = "use torch.from_numpy" if type(batch).__name__ == "ndarray" else "adapter.stream(loader) takes loaders"
        raise TypeError(f"expected a tensor of images, got {type(batch).__name__}; {remedy}")
    if not batch.is_floating_point():
        raise ValueError(_not_floating(batch, module))
    if batch.dim() < 2 or len(batch) == 0:
        raise ValueError(f"expected at least one image, got shape {tuple(batch.shape)}")
    first = next(module.parameters(), None)
    if first is not None and first.dtype == torch.float16 and first.device.type == "cpu":
        raise ValueError("expected float32 or bfloat16 on the CPU, got a float16 model; call model.float()")
    if first is not None and first.device != batch.device:
        raise ValueError(
            f"expected images on {first.device}, where the model is, got {batch.device}; use images.to(...)"
        )
    return batch.clone() if batch.is_inference() else batch.detach()


def odd_shape(batch: Tensor, channels: int | None, spatial: int | None) -> str | None:
    """What is wrong with a batch for a network whose first convolution takes such input; None where nothing is.

    A guess: the network may reshape its input before that convolution, which a pass shows.
    """
    if channels is None or channels > 16:  # the network folds pixels into channels before its first convolution
        return None
    shape = tuple(batch.shape)
    if spatial is not None and spatial != 2 and batch.dim() != 2 + spatial:
        return f"expected a batch of {2 + spatial} dimensions, (batch, {channels}, ...), got shape {shape}"
    if spatial == 2 and batch.dim() != 4:
        remedy = "; for one image use x.unsqueeze(0)" if batch.dim() == 3 else ""
        return f"expected images of shape (batch, {channels}, height, width), got {shape}{remedy}"
    if batch.shape[1] != channels:
        last = batch.shape[-1] == channels and batch.dim() == 4
        remedy = (
            "; use x.permute(0, 3, 1, 2)"
            if last
            else "; use x.expand(-1, 3, -1, -1)"
            if batch.shape[1] == 1 and batch.dim() == 4
            else ""
        )
        return f"expected {channels} channels, got {batch.shape[1]} in shape {shape}{remedy}"
    return None


def _not_floating(batch: Tensor, module: nn.Module) -> str:
    """What to do with integers: bytes of images are divided, token ids embedded."""
    if batch.dtype != torch.uint8 and any(isinstance(each, nn.Embedding) for each in module.modules()):
        return f"expected floating-point input, got {batch.dtype}: token ids have no gradient; {EMBED}"
    return f"expected floating-point images, got {batch.dtype}; divide by 255: x.float() / 255"


def further(given: ModelInput, module: nn.Module, recipe: Recipe, name: str) -> None:
    """Arguments beside the batch: on the model's device, finite, and with rows for all that the recipe learns from."""
    first = next(module.parameters(), None)
    for key, value in given.further.items():
        if not isinstance(value, Tensor):
            continue
        if first is not None and value.device != first.device:
            raise ValueError(f"expected {key} on {first.device}, where the model is, got {value.device}; move it there")
        if value.is_floating_point() and value.dim() > 0 and bool(value.isnan().any()):
            raise ValueError(f"expected {key} without NaN, got some; nothing was learnt")
    along = given.along
    if along and (recipe.views is not None or recipe.recover.each_image):
        part = recipe.views if recipe.views is not None else recipe.recover
        raise ValueError(
            f"{name} learns from other images than the batch's own ({part!r}), for which {along[0]!r} has no rows; "
            f"leave it out, or {UNEDITED}"
        )


def pictures(batch: Tensor, part: object, name: str) -> None:
    """Images, for methods that shuffle, cover or augment them."""
    if batch.dim() != 4:
        raise ValueError(
            f"{name} needs images (batch, channels, height, width) for {part!r}, got shape {tuple(batch.shape)}; "
            f"{UNEDITED}"
        )
    grid = getattr(part, "grid", 1)
    if min(batch.shape[2:]) < grid:
        raise ValueError(
            f"{name} cuts images into {grid} x {grid} tiles ({part!r}), got images of {tuple(batch.shape[2:])} pixels; "
            f"pass larger ones, or {UNEDITED}"
        )


def finite(batch: Tensor) -> None:
    """No NaN, no infinity; names the first sample that has one."""
    sound = batch.flatten(1).isfinite().all(1)
    if not bool(sound.all()):
        bad = [int(i) for i in (~sound).nonzero()[:, 0]]
        more = f" ({len(bad)} samples: {', '.join(map(str, bad[:5]))}{' ...' if len(bad) > 5 else ''})"
        raise ValueError(f"expected finite images, got NaN or Inf in sample {bad[0]}{more}; nothing was learnt")


class FiniteCheck:
    """`finite`, begun before the passes over a batch and read after them.

    On a GPU the answer is copied to the host while the passes run: reading it waits for the check alone.
    """

    def __init__(self, batch: Tensor) -> None:
        self._batch = batch
        self._found: Tensor | None = None
        if batch.is_cuda:
            self._found = batch.isfinite().all().to("cpu", non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(batch.device))

    def read(self) -> None:
        """An error if the batch was not finite."""
        if self._found is not None:
            self._copied.synchronize()
            if bool(self._found):
                return
        finite(self._batch)


def unit_range(batch: Tensor, name: str) -> None:
    """Images in [0, 1], for methods that augment them."""
    low, high = float(batch.min()), float(batch.max())
    if low < -1e-3 or high > 1 + 1e-3:
        raise ValueError(
            f"{name} augments images and expects them in [0, 1], got [{low:.3g}, {high:.3g}]; pass raw images, and let "
            "mean= and std= normalise inside"
        )


def not_bytes(batch: Tensor) -> None:
    """Where mean and std are ours to apply, images come in [0, 1], not in 0..255."""
    high = float(batch.max())
    if high > 16:
        raise ValueError(
            f"expected images in [0, 1], which mean= and std= normalise inside, got values up to {high:.0f}; "
            "divide by 255"
        )


def classes(found: int, before: int | None) -> None:
    """The number of classes does not change under way."""
    if before is not None and found != before:
        raise ValueError(f"expected {before} classes as before, got {found}; call adapter.reset() for another task")


def several_logits(recipe: Recipe, one_logit: bool) -> None:
    """A model with one logit suits every part of the recipe."""
    part = recipe.first_with(Need.SEVERAL_LOGITS)
    if one_logit and part is not None:
        raise ValueError(
            f"{part!r} needs a model with several logits, got one per image, with which its gradient is always zero; "
            "use another method, such as 'tent' or 'poem'"
        )


def _short(value: Any) -> str:
    """Numbers as they were written, and not a thousand of them."""
    if isinstance(value, list) and all(isinstance(each, float | int) for each in value):
        more = f", ... {len(value)} in all" if len(value) > 8 else ""
        return f"[{', '.join(f'{each:.6g}' for each in value[:8])}{more}]"
    return repr(value)


def _difference(key: str, mine: Any, other: Any) -> str:
    """What differs; of two recipes only the fields that do."""
    if isinstance(mine, dict) and isinstance(other, dict):
        fields = [name for name in mine if mine[name] != other.get(name)]
        return "; ".join(f"expected {key} with {name} {mine[name]}, got {other.get(name)}" for name in fields)
    return f"expected {key} {_short(mine)}, got {_short(other)}"


def selection(mask: Tensor, among: Tensor, select: Any) -> None:
    """A mask of truth values, one per sample."""
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.shape != among.shape:
        came = f"{mask.dtype} {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(f"expected {select!r} to return a mask of bool {tuple(among.shape)}, got {came}")


def state(new: Any, mine: dict[str, Any]) -> None:
    """A state that this adapter can take over."""
    if not isinstance(new, dict) or "schema" not in new:
        raise ValueError("expected a state from adapter.state_dict(), got something else")
    for key, remedy in (
        ("schema", "this version reads only its own; run the stream again to make a new one"),
        ("recipe", f"make the adapter with method {new.get('method')!r} and the same settings"),
        ("source", "load the same weights into the model first"),
        ("mean", "pass the same mean="),
        ("std", "pass the same std="),
        ("mask", "pass the same classes="),
        ("prepared", "pass the same source_data="),
    ):
        if key not in new or new[key] != mine[key]:
            raise ValueError(f"{_difference(key, mine[key], new.get(key))}; {remedy}")
    strange = sorted(set(new) - set(mine))
    if strange:
        raise ValueError(f"expected a state with {sorted(mine)}, got {strange[:3]} besides")
    for key in mine:
        if key not in new:
            raise ValueError(f"expected {key!r} in the state, which lacks it; was it cut short?")
    for key, least in (("calls", 0), ("batch_size", 1), ("classes", 1)):
        value, optional = new[key], key != "calls"
        if not (value is None and optional) and (
            isinstance(value, bool) or not isinstance(value, int) or value < least
        ):
            raise ValueError(f"expected {key} to be an integer of at least {least}, got {value!r}")
    image = new["image"]
    if image is not None and not (isinstance(image, list) and all(type(each) is int and each > 0 for each in image)):
        raise ValueError(f"expected image to be the shape of one image or None, got {image!r}")
    rng = new["rng"]
    if not isinstance(rng, Tensor) or rng.dtype != mine["rng"].dtype or rng.shape != mine["rng"].shape:
        raise ValueError("expected the random state of a torch.Generator in the state, got something else")
    if not isinstance(new["tensors"], dict) or not all(isinstance(each, Tensor) for each in new["tensors"].values()):
        raise ValueError("expected tensors by name in the state, got something else")


def same_batch_size(theirs: int | None, given: int | None) -> None:
    """The learning rate follows the batch size: one that was given is not overruled by a state."""
    if given is not None and theirs not in (None, given):
        raise ValueError(
            f"expected a state of batch_size={given}, as the adapter was made with, got {theirs}; leave it out to go "
            "on with the state's"
        )


def state_tensors(new: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Exactly the tensors that the recipe keeps, in their shapes, and all finite."""
    strange = sorted(set(new) - set(expected))
    if strange:
        raise ValueError(f"expected only tensors that this recipe keeps, got {strange[:3]} besides")
    missing = sorted(set(expected) - set(new))
    if missing:
        raise ValueError(f"expected tensors {missing[:3]} in the state, which it lacks; was it cut short?")
    for key, tensor in expected.items():
        other = new[key]
        kind = other.is_floating_point() == tensor.is_floating_point()  # what parts remember has the logits' dtype
        if other.shape != tensor.shape or not (other.dtype == tensor.dtype or (kind and key.startswith("memory/"))):
            came = f"{tuple(other.shape)} ({other.dtype})"
            raise ValueError(f"expected {key} of shape {tuple(tensor.shape)} ({tensor.dtype}), got {came}")
        if not bool(other.isfinite().all()):
            raise ValueError(f"expected finite numbers in {key}, got NaN or Inf; the state is broken")
