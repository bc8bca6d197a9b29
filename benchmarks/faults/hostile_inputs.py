"""Bad or odd inputs by name, each with what must come of it: the right answer, or one clear error."""

from __future__ import annotations

import contextlib
import io
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import poem
from poem import parts, zoo

INPUTS: dict[str, Callable[[], str]] = {}
CLEAR = (ValueError, TypeError, RuntimeError, OSError)


def first_line(error: BaseException) -> str:
    """What an error says, in one line."""
    return (str(error).splitlines() or [type(error).__name__])[0][:160]


def right(name: str) -> Callable[[Callable[[], None]], None]:
    """The answer must be right: an AssertionError is a silent wrong answer."""

    def add(act: Callable[[], None]) -> None:
        def outcome() -> str:
            try:
                act()
            except AssertionError as error:
                return f"silent: {first_line(error)}"
            except Exception as error:
                return f"traceback: {type(error).__name__}: {first_line(error)}"
            return "right"

        INPUTS[name] = outcome

    return add


def refused(name: str, act: Callable[[], Any]) -> None:
    """One clear error must come."""

    def outcome() -> str:
        try:
            act()
        except CLEAR as error:
            return f"error: {first_line(error)}"
        except BaseException as error:
            return f"traceback: {type(error).__name__}: {first_line(error)}"
        return "silent: accepted"

    INPUTS[name] = outcome


def command(name: str, *words: str, files: Callable[[Path], None] | None = None) -> None:
    """A command line that must end with an error of a line or two, and no traceback; `{}` is a folder of its own."""

    def outcome() -> str:
        from poem.cli.main import main

        with tempfile.TemporaryDirectory() as folder:
            if files is not None:
                files(Path(folder))
            said = io.StringIO()
            try:
                with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
                    code = main([word.replace("{}", folder) for word in words])
            except SystemExit as error:
                code = error.code if isinstance(error.code, int) else 1
            except BaseException as error:
                return f"traceback: {type(error).__name__}: {first_line(error)}"
        lines = [line for line in said.getvalue().splitlines() if line.strip()]
        if not code:
            return "silent: exit code 0"
        return f"error: {lines[-1][:160].replace(folder, '...') if lines else 'without a word'}"

    INPUTS[name] = outcome


def images(count: int = 8, seed: int = 0, side: int = 32) -> Tensor:
    """Random images."""
    return torch.rand(count, 3, side, side, generator=torch.Generator().manual_seed(seed))


def net(kind: str = "gn") -> Any:
    """A small trained network."""
    return zoo.load(f"digits-{kind}")[0]


class Around(nn.Module):
    """A network with something before it."""

    def __init__(self, kind: str = "gn") -> None:
        super().__init__()
        self.inner = net(kind)

    def before(self, x: Tensor) -> Tensor:
        """What is done to the images first."""
        return x

    def forward(self, x: Tensor) -> Tensor:
        """The logits."""
        out: Tensor = self.inner(self.before(x))
        return out


LOOSE: dict[str, Any] = {"lr": 0.01, "threshold": 2.0}


def compare(one: nn.Module, other: nn.Module, method: str = "poem", batches: int = 3, **more: Any) -> None:
    """Two networks that compute the same must answer the same under an adapter."""
    adapters = [poem.adapt(each, method, **{**LOOSE, **more}) for each in (one, other)]
    for seed in range(batches):
        first, second = (adapter(images(seed=seed)) for adapter in adapters)
        assert torch.equal(first, second), f"off by {float((first - second).abs().max()):.3g}"
    assert adapters[0].totals.updates > 0, "nothing was learnt"


# Networks.


@right("a stem that runs on tiles from the second batch on")
def _() -> None:
    class Tiles(nn.Module):
        def __init__(self, always: bool) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.always, self.batches = always, 0
            self.conv = nn.Conv2d(3, 8, 4, 4)
            self.rest = nn.Sequential(nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 12, 3), nn.BatchNorm2d(12))
            self.fc = nn.Linear(12, 10)

        def forward(self, x: Tensor) -> Tensor:
            if self.batches or self.always:
                x = torch.cat([self.conv(tile) for tile in x.chunk(4, dim=2)], dim=2)
            else:
                x = self.conv(x)
            out: Tensor = self.fc(self.rest(x).mean((2, 3)))
            return out

    one, other = Tiles(False).eval(), Tiles(True).eval()
    adapters = [poem.adapt(each, "tent*", lr=0.1) for each in (one, other)]
    for seed in range(4):
        found = [adapter(images(seed=seed)) for adapter in adapters]
        one.batches += 1
        far = float((found[0] - found[1]).abs().max())
        assert far < 1e-4, f"off by {far:.3g}"


@right("a network that writes into its input")
def _() -> None:
    class Writing(Around):
        def before(self, x: Tensor) -> Tensor:
            return x.sub_(0.5)

    class Copying(Around):
        def before(self, x: Tensor) -> Tensor:
            return x - 0.5

    compare(Writing(), Copying())


@right("a network that writes into its input through .data")
def _() -> None:
    class Writing(Around):
        def before(self, x: Tensor) -> Tensor:
            x.data.sub_(0.5)
            return x

    class Copying(Around):
        def before(self, x: Tensor) -> Tensor:
            return x - 0.5

    compare(Writing(), Copying())


@right("a second head named in logits=")
def _() -> None:
    model, other = Around(), Around()
    model.head, other.head = nn.Linear(10, 10), nn.Linear(10, 10)  # type: ignore[assignment]
    other.load_state_dict(model.state_dict())
    one = poem.adapt(model, "tent", parameters=parts.Everything(), lr=0.1, logits=lambda out: model.head(out))  # type: ignore[operator]
    two = poem.adapt(nn.Sequential(other, other.head), "tent", parameters=parts.Everything(), lr=0.1)  # type: ignore[arg-type]
    for seed in range(3):
        torch.testing.assert_close(one(images(seed=seed)), two(images(seed=seed)))


@right("an Everything() recipe exported with a second head named in logits=")
def _() -> None:
    model = Around()
    model.head = nn.Linear(10, 10)  # type: ignore[assignment]
    adapter = poem.adapt(model, "tent", parameters=parts.Everything(), lr=0.1, logits=lambda out: model.head(out))  # type: ignore[operator]
    adapter(images())
    with adapter.frozen():
        far = float((adapter.export()(images(seed=1)) - adapter(images(seed=1))).abs().max())
    assert far < 1e-4, f"off by {far:.3g}"


@right("a layer behind torch.compile")
def _() -> None:
    one, other = Around("bn"), Around("bn")
    other.inner = torch.compile(other.inner, backend="eager")
    compare(one, other)


def _scripted() -> None:
    model = nn.Sequential(torch.jit.script(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))), net())
    poem.adapt(model, "tent")(images())


refused("a scripted child", _scripted)
refused("a lazy layer", lambda: poem.adapt(nn.Sequential(nn.LazyConv2d(3, 1), net()), "tent"))


class Fewer(Around):
    """Answers fewer images than it gets."""

    def forward(self, x: Tensor) -> Tensor:
        """The logits."""
        out: Tensor = self.inner(x)[:-1]
        return out


for _method in ("source", "tent", "poem"):
    refused(f"a model that answers fewer images than it got, under {_method}",
            lambda method=_method: poem.adapt(Fewer(), method)(images()))  # fmt: skip


class Line(nn.Module):
    """A network of one or three spatial dimensions."""

    def __init__(self, dims: int) -> None:
        super().__init__()
        conv: Any = {1: nn.Conv1d, 3: nn.Conv3d}[dims]
        norm: Any = {1: nn.BatchNorm1d, 3: nn.BatchNorm3d}[dims]
        self.stages = nn.Sequential(
            *[nn.Sequential(conv(a, b, 3, 2, 1), norm(b), nn.ReLU()) for a, b in ((2, 8), (8, 12), (12, 16))]
        )
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        """The logits."""
        out: Tensor = self.head(self.stages(x).flatten(2).mean(2))
        return out


def _lines() -> None:
    for dims in (1, 3):

        @right(f"a network of {dims} spatial dimensions")
        def _(dims: int = dims) -> None:
            adapter = poem.adapt(Line(dims).eval(), "poem", mean=[0.5] * 2, std=[0.5] * 2, **LOOSE)
            assert adapter(torch.rand(8, 2, *[12] * dims)).shape == (8, 5)
            assert adapter.totals.updates > 0

        for method in ("deyo", "roid", "memo", "cotta"):
            refused(f"{method} on {dims} spatial dimensions",
                    lambda dims=dims, method=method: poem.adapt(
                        Line(dims).eval(), method, mean=[0.5] * 2, std=[0.5] * 2
                    )(torch.rand(8, 2, *[12] * dims)))  # fmt: skip


_lines()


@right("a replaced norm layer is told, not ignored")
def _() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.LazyLinear(5)).eval()
    model(images())
    adapter = poem.adapt(model, "tent")
    adapter(images())
    model[1] = nn.BatchNorm2d(4).eval()
    try:
        adapter(images())
    except RuntimeError:
        return
    raise AssertionError("it went on without the layer")


class Broken(Around):
    """One answer of the batch is not a number."""

    def forward(self, x: Tensor) -> Tensor:
        """The logits."""
        out: Tensor = self.inner(x) + torch.where(torch.arange(len(x)) == 1, torch.nan, 0.0)[:, None]
        return out


def _broken() -> None:
    for method in ("source", "lame", "tent", "poem"):

        @right(f"an answer that is not finite, under {method}, is noted")
        def _(method: str = method) -> None:
            adapter = poem.adapt(Broken("bn"), method)
            adapter(images())
            assert any("NaN" in note for note in adapter.last.notes), "no note"


_broken()


@right("an update that moves nothing is noted")
def _() -> None:
    class Rounded(Around):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.inner(x).round()
            return out

    adapter = poem.adapt(Rounded("bn"), "tent")
    adapter(images())
    assert any("changed nothing" in note for note in adapter.last.notes), "no note"


@right("reset() after a failed proof is a fresh adapter")
def _() -> None:
    adapter, fresh = poem.adapt(net("bn"), "poem", **LOOSE), poem.adapt(net("bn"), "poem", **LOOSE)
    adapter(images())
    adapter._network.doubles = False
    adapter.reset()
    adapter(images()), fresh(images())
    assert adapter.last.forwards_computed == fresh.last.forwards_computed, "two passes where one is enough"


# States.


def _states() -> None:
    def loaded(**giver: Any) -> Callable[[], None]:
        def act() -> None:
            maker = poem.adapt(net("bn"), "eta", preset="cifar", **giver)
            maker(images(64))
            poem.adapt(net("bn"), "eta", preset="cifar").load_state_dict(maker.state_dict())

        return act

    refused("a state made with another mean and std", loaded(mean=[0.5] * 3, std=[0.5] * 3))
    refused("a state made with a class mask", loaded(classes=[1, 2, 3, 4]))

    def foreign() -> None:
        adapter = poem.adapt(net("bn"), "eta", preset="cifar")
        adapter(images(64))
        state = adapter.state_dict()
        state["tensors"]["memory/select.mean"] = torch.zeros(10)
        adapter.load_state_dict(state)

    refused("a state with memory that no part has", foreign)

    def broken() -> None:
        adapter = poem.adapt(net("bn"), "tent")
        state = adapter.state_dict()
        key = next(iter(state["tensors"]))
        state["tensors"][key] = torch.full_like(state["tensors"][key], torch.nan)
        adapter.load_state_dict(state)

    refused("a state with NaN in it", broken)


_states()

# Settings of parts, from Python and from text.

for _text in (
    "NormAffine('exclude')", "Everything('none')", "AdaptBranch(combine='both')", "Prior('x')",
    "Laplacian(affinity='foo')", "LossAverageBelow(of='middle')", "CrossEntropy('mine')", "SGD(float('nan'))",
    "MeanTeacher(float('nan'))", "EveryCalls(0)", "SGD(-1.0)", "SAM(-0.1)", "Mixed(2.0)", "RunningMean(-0.1)",
    "StochasticRestore(3.0)", "NotRedundant(float('nan'))", "PLPDAbove('0.2')", "Patches(0)", "Explore(2.5)",
    "AverageWithSource(float('inf'))", "Adam(betas=(0.9,))",
):  # fmt: skip
    refused(f"the part {_text}", lambda text=_text: eval(text, {**vars(parts), "float": float}))

for _text in (
    "SGD(**{'momentum': 0.5})", "SGD(momentum=0.1, momentum=0.2)", "SGD(1/0)", "SGD(*(1,))", "(" * 500 + ")" * 500,
    "NormAffine('exclude')", "SGD(1e400)", "SGD(-1)",
):  # fmt: skip

    def _parse(text: str = _text) -> Any:
        from poem.recipes.text import parse

        return parse(text)

    refused(f"the text {_text[:40]}", _parse)

for _name, _settings in {
    "classes=[1.0, 1.4]": {"classes": [1.0, 1.4]},
    "mean with NaN": {"mean": [float("nan")] * 3, "std": [1.0] * 3},
    "std with Inf": {"mean": [0.0] * 3, "std": [float("inf")] * 3},
    "batch_size=2.5": {"batch_size": 2.5},
    "batch_size=NaN": {"batch_size": float("nan")},
    "batch_size=True": {"batch_size": True},
    "lr=NaN": {"lr": float("nan")},
    "lr=-1": {"lr": -1.0},
    "seed='a'": {"seed": "a"},
}.items():
    refused(f"adapt({_name})", lambda settings=_settings: poem.adapt(net(), "tent", **settings))


# Facts.


@right("LAME's bandwidth for three images")
def _() -> None:
    from poem.parts import Laplacian

    angles = torch.tensor([0.0, 60.0, 180.0]).deg2rad()
    kernel = Laplacian(5)._kernel(torch.stack([angles.cos(), angles.sin()], 1))
    # The third of min(5, 3) neighbours, oneself the first, is the farthest: at 2, the root of 3, and 2.
    width = (2 + 3**0.5 + 2) / 3
    torch.testing.assert_close(kernel[0, 1], torch.tensor(-1 / (2 * width**2)).exp())


@right("importance weights of a second head")
def _() -> None:
    model = net("bn")
    data = images(32)
    heads = [lambda out: out, lambda out: out.flip(1) * torch.linspace(1, 5, 10)]
    adapters = [poem.adapt(model, "eata", source_data=data, logits=head) for head in heads]
    first, second = (each._state.prepared["minimise.second.importance"] for each in adapters)
    assert not torch.equal(first, second), "the first head's"


@right("importance weights of a loader whose data changed")
def _() -> None:
    data = torch.utils.data.TensorDataset(images(32))
    loader = torch.utils.data.DataLoader(data, batch_size=16)
    model = net("bn")
    first = poem.adapt(model, "eata", source_data=loader)._state.prepared["minimise.second.importance"]
    data.tensors = (images(32, seed=7),)
    second = poem.adapt(model, "eata", source_data=loader)._state.prepared["minimise.second.importance"]
    assert not torch.equal(first, second), "those of the old data"


def _shuffled() -> None:
    data = torch.utils.data.TensorDataset(images(96), torch.arange(96) % 10)
    loader = torch.utils.data.DataLoader(data, batch_size=16, shuffle=True)
    poem.evaluate(net("bn"), loader, ["source", "tent", "bn"])


refused("evaluate with a loader that shuffles", _shuffled)

# Files and commands.


def _pictures(kind: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        from PIL import Image

        levels = np.linspace(0, 1, 64 * 64).reshape(64, 64)
        if kind == "16 bit":
            picture = Image.fromarray((levels * 65535).astype(np.uint16))
        elif kind == "float":
            picture = Image.fromarray(levels.astype(np.float32) * 1000)
        else:
            picture = Image.fromarray((levels * (2**31 - 1)).astype(np.int32))
        picture.save(folder / ("x.tiff" if kind == "float" else "x.png" if kind == "16 bit" else "x.tiff"))

    return write


def _reads() -> None:
    for kind in ("16 bit", "int32", "float"):

        @right(f"a picture of {kind} is scaled or refused, not blank")
        def _(kind: str = kind) -> None:
            from PIL import Image

            try:
                from poem.streams.loading.decode import decode
            except ImportError:  # an older tree
                decode = None  # type: ignore[assignment]
            with tempfile.TemporaryDirectory() as name:
                _pictures(kind)(Path(name))
                path = next(Path(name).iterdir())
                try:
                    picture = decode(path.read_bytes(), str(path)) if decode else Image.open(path).convert("RGB")
                except ValueError:
                    return
                assert np.asarray(picture).std() > 20, "blank"


_reads()


def _result(content: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        for place in (folder / "results", folder / "results" / "cells" / "aa" / "bb"):
            place.mkdir(parents=True)
            (place / "a.json").write_text(content)

    return write


def _photos(folder: Path) -> None:
    from PIL import Image

    (folder / "in").mkdir()
    for number in range(4):
        Image.fromarray(np.full((32, 32, 3), 60 * number, dtype=np.uint8)).save(folder / "in" / f"{number}.png")


PREDICT = ("predict", "{}/in", "--model", "digits-bn")
command("predict --device banana", *PREDICT, "--device", "banana", files=_photos)
command("predict --device cuda without one", *PREDICT, "--device", "cuda", files=_photos)
command("predict --resize 100000000", *PREDICT, "--resize", "100000000", files=_photos)
command("predict --batch-size 0", *PREDICT, "--batch-size", "0", files=_photos)
command("predict --out onto a folder", *PREDICT, "--out", "{}/in", files=_photos)
command("predict of a folder that is not there", "predict", "{}/nowhere", "--model", "digits-bn")
RUN = ("run", "--base", "digits-bn", "--data", "digits-test", "--method", "tent")
command("run --device banana", *RUN, "--device", "banana")
command("run --set changes.lr=nan", *RUN, "--set", "changes.lr=nan")
command("run --set batch_size=0", *RUN, "--set", "batch_size=0")
command("run --set n=-1", *RUN, "--set", "n=-1")
command("run of a method that is not there", *RUN[:-1], "tentt")
command("run --out into a file's folder", *RUN, "--out", "{}/results/a.json/b.json", files=_result("{}"))
command("report of a result with metrics []", "report", "{}/results", files=_result(json.dumps({"metrics": []})))
command("report of a file that is no JSON", "report", "{}/results", files=_result("\x00\x01"))
command("report of JSON nested 100,000 deep", "report", "{}/results", files=_result("[" * 100_000))
command("compare of a folder that is not there", "compare", "{}/a", "{}/b")
command("bench of a suite that is binary", "bench", "{}/results/a.json", files=_result("\x00\x01"))
command("corrupt --severity 9", "corrupt", "{}/in", "{}/out", "--severities", "9", files=_photos)
command(
    "corrupt of a corruption that is not there", "corrupt", "{}/in", "{}/out", "--corruptions", "fogg", files=_photos
)


def _link(folder: Path) -> None:
    (folder / "target").write_text("mine")
    (folder / "out.json").symlink_to(folder / "target")


@right("write_atomic follows no link")
def _() -> None:
    from poem._util.files import write_atomic

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _link(folder)
        with contextlib.suppress(OSError, ValueError):
            write_atomic(folder / "out.json", "new")
        assert (folder / "target").read_text() == "mine", "written through the link"
        left = [each for each in folder.iterdir() if each.name not in ("target", "out.json")]
        assert not left, "a temporary file stayed"


def _no_fifo() -> None:
    from poem._util.files import write_atomic

    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "pipe"
        os.mkfifo(path)
        write_atomic(path, "new")


refused("write_atomic onto a pipe", _no_fifo)
