"""Norm layers by our kernels and by torch's, layer by layer, and where a step of POEM spends its time.

    python benchmarks/norm_kernels.py                  # tables and profiles, about a minute on a GPU
    python benchmarks/norm_kernels.py --only layers    # or: relu, blended, steps
    python benchmarks/norm_kernels.py --limit          # besides, the compiled forward that sets the limit: minutes
    python benchmarks/norm_kernels.py --sweep          # sizes of tiles against each other

The layers are those of ResNet-50 with group norm, and of ViT-B/16, at batch 64 and doubled. `bytes` is the time that
the least traffic takes at 4 TB/s: forward reads the input and writes the output, backward reads the input and the
gradient and writes one. `torch` is the layer under autocast, its output in the layout and precision of the next layer.
`blended` are the batch norms of ResNet-50 with the statistics of `auto`, five copies of the batch and of one image,
without a gradient: beside our three kernels the part as it is in `parts/`, and `bn`, the kernels of batch norm over as
many rows, which is what the copies would cost with statistics of the batch; `bytes` reads the input twice.
The rows of `relu` are batch norm with the batch's and with given statistics, and group norm, each with an in-place ReLU
after it, and with the addition of a residual block and then ReLU: `ours` has them inside the kernel, `apart` is our
kernel, and then torch adds and clips. With the addition `bytes` also reads what is added; backward also reads the
output and writes that operand's gradient.
On a CPU the kernels are interpreted, and sizes are small: that only shows that the script runs.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src")]

import torch  # noqa: E402

CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before it is first imported

from torch import Tensor, nn  # noqa: E402

import poem  # noqa: E402
from poem.accelerate import batch_norm, blended, sample_norms  # noqa: E402
from poem.engine.acceleration import Acceleration  # noqa: E402
from poem.engine.norm_layers import ForwardContext, PatchedNorm  # noqa: E402
from poem.parts import Blended, Everyone  # noqa: E402

DEVICE = "cuda" if CUDA else "cpu"
BF16, LAST = torch.bfloat16, torch.channels_last
BANDWIDTH = 4e12  # bytes per second
RESNET50 = {  # channels, side: how many layers
    (64, 112): 1, (64, 56): 6, (256, 56): 4, (128, 56): 1, (128, 28): 7, (512, 28): 5,
    (256, 28): 1, (256, 14): 11, (1024, 14): 7, (512, 14): 1, (512, 7): 5, (2048, 7): 4,
}  # fmt: skip
RELU50 = {  # those of them that a ReLU follows
    (64, 112): 1, (64, 56): 6, (128, 56): 1, (128, 28): 7, (256, 28): 1, (256, 14): 11, (512, 14): 1, (512, 7): 5,
}  # fmt: skip
ADD50 = {(256, 56): 3, (512, 28): 4, (1024, 14): 6, (2048, 7): 3}  # and those that an addition and a ReLU follow
BUFFERS = 4  # inputs in turn, so that the cache does not hold them all

Call = Callable[[int], Any]


@dataclass(frozen=True)
class Layer:
    """A norm layer with its input's shape, and how often it is in its network."""

    name: str
    shape: tuple[int, ...]
    count: int
    halves: int
    dtype: torch.dtype

    @property
    def groups(self) -> int | None:
        """Of a group norm; None for a layer norm."""
        return 32 if len(self.shape) == 4 else None

    def inputs(self) -> list[Tensor]:
        """Several, as the network would hand them in."""
        made = [torch.randn(self.shape, device=DEVICE).to(self.dtype) for _ in range(BUFFERS)]
        return [each.contiguous(memory_format=LAST) if each.dim() == 4 else each for each in made]

    def least_ms(self) -> tuple[float, float]:
        """What the traffic costs, forward and backward."""
        numbers, wide = torch.Size(self.shape).numel(), torch.empty(0, dtype=self.dtype).element_size()
        return tuple(1000 * numbers * each / BANDWIDTH for each in (wide + 2, 2 * wide + 2))  # type: ignore[return-value]


def layers(batch: int) -> list[Layer]:
    """Every kind of layer, at the batch and doubled."""
    found = []
    for halves in (1, 2):
        rows = batch * halves
        kinds = RESNET50.items() if CUDA else [((64, 6), 1), ((128, 3), 1)]
        for (channels, side), count in kinds:
            name = f"group norm {channels:4d} x {side:3d}²"
            found.append(Layer(name, (rows, channels, side, side), count, halves, BF16))
        for dtype in (torch.float32, BF16):
            name = f"layer norm 197 x 768 {str(dtype)[6:]}"
            found.append(Layer(name, (rows, 197 if CUDA else 5, 768), 25, halves, dtype))
    return found


def timed(call: Call, calls: int = 12) -> float:
    """Milliseconds of a call, replayed from a CUDA graph so that the host costs nothing."""
    if not CUDA:
        start = time.perf_counter()
        call(0)
        return 1000 * (time.perf_counter() - start)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for turn in range(3):
            call(turn)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for turn in range(calls):
            call(turn)
    graph.replay()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(3):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 3 / calls


def measured(layer: Layer, *, ours: bool) -> tuple[float, float]:
    """Milliseconds forward, and backward."""
    inputs = [each.requires_grad_() for each in layer.inputs()]
    channels = layer.shape[1 if layer.groups else -1]
    affine = [torch.ones(channels, device=DEVICE, requires_grad=True) for _ in range(2 * layer.halves)]
    given = torch.randn_like(inputs[0], dtype=BF16)

    def forward(turn: int) -> Tensor:
        x = inputs[turn % BUFFERS]
        if ours:
            y: Tensor = sample_norms.Normed.apply(x, None, 1e-5, layer.groups, False, *affine)
            return y
        halves = []
        with torch.autocast(DEVICE, dtype=BF16):
            for part, weight, bias in zip(x.chunk(layer.halves), affine[::2], affine[1::2], strict=True):
                if layer.groups:
                    halves.append(nn.functional.group_norm(part, layer.groups, weight, bias))
                else:
                    halves.append(nn.functional.layer_norm(part, (channels,), weight, bias))
        whole = torch.cat(halves) if layer.halves > 1 else halves[0]
        whole = whole.to(BF16)
        return whole.contiguous(memory_format=LAST) if layer.groups else whole

    def both(turn: int) -> Any:
        return torch.autograd.grad(forward(turn), [inputs[turn % BUFFERS], *affine], given)

    with torch.no_grad():
        there = timed(forward)
    return there, timed(both) - there


def table(batch: int) -> None:
    """A row per layer, and sums over each network."""
    print(f"{'milliseconds':34s} {'forward':>34s} {'backward':>34s}")
    print(f"{'layer, batch':34s}" + f"{'bytes':>9s} {'ours':>8s} {'share':>6s} {'torch':>8s}" * 2)
    sums: dict[str, list[float]] = {}
    for layer in layers(batch):
        least, mine, theirs = layer.least_ms(), measured(layer, ours=True), measured(layer, ours=False)
        row = [number for way in range(2) for number in (least[way], mine[way], theirs[way])]
        show(f"{layer.name}, {layer.shape[0]}", row)
        kind = "ResNet-50, all 53" if layer.groups else f"ViT-B/16, all 25, {str(layer.dtype)[6:]}"
        total = sums.setdefault(f"{kind}, {layer.shape[0]}", [0.0] * 6)
        total[:] = [one + layer.count * other for one, other in zip(total, row, strict=True)]
    for name, total in sums.items():
        show(name, total)


def with_relu(kind: str, shape: tuple[int, ...], halves: int, *, add: bool, inside: bool) -> tuple[float, float]:
    """Milliseconds forward, and backward, of a norm layer and the ReLU after it, or the addition and the ReLU."""
    made = [torch.randn(shape, device=DEVICE).to(BF16).contiguous(memory_format=LAST) for _ in range(2 * BUFFERS)]
    inputs = [each.requires_grad_() for each in made]
    affine = [torch.ones(shape[1], device=DEVICE, requires_grad=True) for _ in range(2 * halves)]
    given, constant = torch.randn_like(inputs[0]), torch.ones(shape[1], device=DEVICE)

    def read(turn: int) -> list[Tensor]:
        return [inputs[turn % BUFFERS], *([inputs[BUFFERS + turn % BUFFERS]] if add else [])]

    def forward(turn: int) -> Tensor:
        x, *others = read(turn)
        other = others[0] if others and inside else None
        if kind == "group norm":
            y: Tensor = sample_norms.Normed.apply(x, other, 1e-5, 32, inside, *affine)
        elif kind == "batch norm":
            y = batch_norm.Normed.apply(x, other, 1e-5, inside, *affine)
        else:
            y = batch_norm.NormedBy.apply(x, other, constant, constant, 1e-5, inside, *affine)
        if inside:
            return y
        for each in others:
            y += each
        return nn.functional.relu(y, inplace=True)

    def both(turn: int) -> Any:
        return torch.autograd.grad(forward(turn), [*read(turn), *affine], given)

    with torch.no_grad():
        there = timed(forward)
    return there, timed(both) - there


def relu_table(batch: int) -> None:
    """A row per layer of ResNet-50 with what follows it inside its kernel and apart, and sums over these layers."""
    for add, kinds in ((False, RELU50), (True, ADD50)):
        print(
            f"\n{'milliseconds, with ' + ('addition, ' if add else '') + 'ReLU':34s} {'forward':>34s} {'backward':>34s}"
        )
        print(f"{'layer, batch':34s}" + f"{'bytes':>9s} {'ours':>8s} {'share':>6s} {'apart':>8s}" * 2)
        for kind in ("batch norm", "given stats", "group norm"):
            for halves in (1, 2):
                total = [0.0] * 6
                for (channels, side), count in kinds.items() if CUDA else [((64, 6), 1)]:
                    shape = (batch * halves, channels, side, side)
                    least = Layer(kind, shape, count, halves, BF16).least_ms()
                    more = (3 / 2, 5 / 3) if add else (1, 1)  # tensors that are read and written
                    mine, apart = (with_relu(kind, shape, halves, add=add, inside=inside) for inside in (True, False))
                    row = [number for way in range(2) for number in (least[way] * more[way], mine[way], apart[way])]
                    show(f"{kind} {channels:4d} x {side:3d}², {shape[0]}", row)
                    total = [one + count * other for one, other in zip(total, row, strict=True)]
                show(f"{kind}, all {sum(kinds.values())}, {batch * halves}", total)


def show(name: str, row: list[float]) -> None:
    """A line: least, ours, the share of the bandwidth, torch's; forward and backward."""
    parts = [(row[at], row[at + 1], row[at] / row[at + 1], row[at + 2]) for at in (0, 3)]
    print(f"{name:34s}" + "".join(f"{a:9.4f} {b:8.4f} {c:6.0%} {d:8.4f}" for a, b, c, d in parts), flush=True)


def blended_table(batch: int) -> None:
    """A row per batch norm with the statistics of `auto`, at the batch and at one image, and sums over ResNet-50."""
    statistics = Blended()
    print(f"{'milliseconds, five copies':34s}{'bytes':>9s} {'ours':>8s} {'share':>6s} {'part':>8s} {'bn':>8s}")
    for images in (batch, 1):
        total = [0.0] * 4
        for (channels, side), count in RESNET50.items() if CUDA else [((64, 6), 1), ((128, 3), 1)]:
            shape = (statistics.copies * images, channels, side, side)
            row = blended_measured(statistics, shape)
            total = [one + count * other for one, other in zip(total, row, strict=True)]
            show_blended(f"blended {channels:4d} x {side:3d}², {images}", row)
        show_blended(f"ResNet-50, all 53, {images}", total)


def blended_measured(statistics: Blended, shape: tuple[int, ...]) -> list[float]:
    """Milliseconds: the least that the traffic takes, our kernels, the part, and batch norm's kernels."""
    made = [torch.randn(shape, device=DEVICE).to(BF16).contiguous(memory_format=LAST) for _ in range(BUFFERS)]
    layer = nn.BatchNorm2d(shape[1]).to(DEVICE).requires_grad_(False)
    context = ForwardContext(statistics, {}, copies=statistics.copies)
    norm = PatchedNorm("norm", layer, lambda: context, Acceleration(), swappable=False)
    context.memory = {key: each.clone() for key, each in statistics.start_layer("norm", norm).items()}
    affine = (layer.weight, layer.bias)

    def ours(turn: int) -> Any:
        return blended.fused(norm, made[turn % BUFFERS], context, "norm")

    def part(turn: int) -> Any:
        return statistics.normalised(norm, made[turn % BUFFERS], None, context.memory, "norm")

    def bn(turn: int) -> Any:
        return batch_norm.kernels().normed(made[turn % BUFFERS], [affine], 1e-5)

    with torch.no_grad():
        assert ours(0) is not None, "our kernels take the layer"
        least = 1000 * 6 * torch.Size(shape).numel() / BANDWIDTH
        return [least, *(timed(call) for call in (ours, part, bn))]


def show_blended(name: str, row: list[float]) -> None:
    """A line: least, ours, the share of the bandwidth, the part's, batch norm's."""
    least, ours, part, bn = row
    print(f"{name:34s}{least:9.4f} {ours:8.4f} {least / ours:6.0%} {part:8.4f} {bn:8.4f}", flush=True)


@contextmanager
def settings(module: Any, **values: int) -> Iterator[None]:
    """Constants of the kernels, until the block ends."""
    before = {name: getattr(module, name) for name in values}
    for name, value in values.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


def sweep(batch: int) -> None:
    """Sums over ResNet-50 and ViT-B/16 for several sizes of tiles."""
    group, layer = sample_norms.kernels()
    doubled = [each for each in layers(batch) if each.halves == 2]
    cases: list[tuple[Any, dict[str, int]]] = [
        (group, {"WORKERS": workers, "TILE": tile, "LARGEST": largest})
        for workers, tile, largest in (
            (528, 4096, 8192), (264, 4096, 8192), (1056, 4096, 8192), (2112, 4096, 8192), (528, 2048, 4096),
            (1056, 2048, 4096), (528, 4096, 4096), (528, 8192, 8192), (0, 4096, 8192),
        )
    ]  # fmt: skip
    cases += [
        (layer, {"WORKERS": workers, "TILE": tile})
        for workers, tile in (
            (528, 4096),
            (264, 4096),
            (1056, 4096),
            (1056, 2048),
            (528, 2048),
            (1056, 1024),
            (528, 8192),
        )
    ]
    for module, values in cases:
        with settings(module, **values):
            total = [0.0, 0.0]
            for each in doubled:
                if (each.groups is not None) == (module is group) and (each.groups or each.dtype == torch.float32):
                    found = measured(each, ours=True)
                    total = [one + each.count * other for one, other in zip(total, found, strict=True)]
        print(
            f"{module.__name__.split('.')[-1]:20s} {values}: forward {total[0]:.3f}, backward {total[1]:.3f} ms",
            flush=True,
        )


def resnet50_gn() -> nn.Module:
    """With 32 groups, random weights."""
    from torchvision.models import resnet50

    model: nn.Module = resnet50(weights=None, norm_layer=lambda width: nn.GroupNorm(32, width))
    return model.to(memory_format=LAST)


def vit_b16() -> nn.Module:
    """Of timm, or of torchvision where that is not installed."""
    try:
        import timm
    except ImportError:
        from torchvision.models import vit_b_16

        model: nn.Module = vit_b_16(weights=None)
        nn.init.normal_(model.heads.head.weight, std=0.02)  # type: ignore[union-attr, arg-type]  # zeros as it comes
        return model
    made: nn.Module = timm.create_model("vit_base_patch16_224")
    return made


def step(
    name: str, make: Callable[[], nn.Module], batch: int, forwards: float, *, limit: bool, size: int = 224
) -> None:
    """Images per second of POEM with one update, captured in bf16, and the dearest kernels of a call."""
    torch.manual_seed(0)
    model = make().to(DEVICE).eval()
    images = [torch.rand(batch, 3, size, size, device=DEVICE) for _ in range(4)]
    adapter = poem.adapt(model, "poem", select=Everyone(), rounds=1, precision="bf16", fast=True)
    start = time.perf_counter()
    for turn in range(8 if CUDA else 1):
        adapter(images[turn % 4])
    sync()
    warm = time.perf_counter() - start
    speed = rate(adapter, images)
    print(f"\n{name}, batch {batch}: POEM {speed:.0f} images/s, warm-up {warm:.1f} s")
    print(f"  notes: {adapter.last.notes}")
    norms = [module for module in model.modules() if sample_norms.kind_of(module) is not None]
    print(f"  {len(norms)} norm layers, of {sorted({type(each).__module__ for each in norms})}")
    if limit:
        compiled = torch.compile(model)

        @torch.no_grad()
        def forward(x: Tensor) -> Tensor:
            with torch.autocast(DEVICE, dtype=BF16):
                answer: Tensor = compiled(x.contiguous(memory_format=LAST))
                return answer

        for turn in range(4):
            forward(images[turn])
        bare = rate(forward, images)
        print(f"  compiled forward {bare:.0f} images/s: POEM has {speed / (bare / forwards):.0%} of 1/{forwards}")
    profile(adapter, images)


def sync() -> None:
    """Wait for the device."""
    if CUDA:
        torch.cuda.synchronize()


def rate(call: Callable[[Tensor], Any], images: list[Tensor], calls: int = 30) -> float:
    """Images per second, without stops."""
    sync()
    start, calls = time.perf_counter(), calls if CUDA else 1
    for turn in range(calls):
        call(images[turn % len(images)])
    sync()
    return calls * len(images[0]) / (time.perf_counter() - start)


def profile(call: Callable[[Tensor], Any], images: list[Tensor], calls: int = 3) -> None:
    """The 15 dearest kernels of a call."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    with profiler(activities=[ProfilerActivity.CUDA if CUDA else ProfilerActivity.CPU], acc_events=True) as seen:
        for turn in range(calls if CUDA else 1):
            call(images[turn])
        sync()
    spent: dict[str, tuple[float, int]] = {}
    for event in seen.key_averages():
        took = event.self_device_time_total if CUDA else event.self_cpu_time_total
        before = spent.get(event.key, (0.0, 0))
        spent[event.key] = before[0] + took, before[1] + event.count
    total = sum(took for took, _ in spent.values())
    print(f"  {total / 1000 / calls:.2f} ms of kernels per call")
    for name, (took, count) in sorted(spent.items(), key=lambda item: -item[1][0])[:15]:
        print(f"  {took / total:6.1%} {took / 1000 / calls:8.3f} ms {count / calls:6.0f} x  {name[:110]}", flush=True)


def main() -> None:
    """Print it."""
    asked = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    asked.add_argument("--only", choices=["layers", "relu", "blended", "steps"])
    asked.add_argument("--net", choices=["resnet50-gn", "vit-b16"], help="for steps: this one alone")
    asked.add_argument("--batch", type=int, default=64 if CUDA else 2)
    asked.add_argument("--limit", action="store_true", help="compile the forward pass that sets the limit")
    asked.add_argument("--sweep", action="store_true", help="sizes of tiles against each other, and nothing else")
    given = asked.parse_args()
    if not CUDA:
        sample_norms.DEVICES = blended.DEVICES = batch_norm.DEVICES = ("cpu",)
    if not all(each.TRITON.work(torch.device(DEVICE)) for each in (sample_norms, blended, batch_norm)):
        sys.exit("expected Triton and a device that it compiles for; the warning above says what is missing")
    if given.sweep:
        sweep(given.batch)
        return
    if given.only in (None, "layers"):
        table(given.batch)
    if given.only in (None, "relu"):
        relu_table(given.batch)
    if given.only in (None, "blended"):
        blended_table(given.batch)
    if given.only in (None, "steps"):
        for name, make, forwards in (("resnet50-gn", resnet50_gn, 3.45), ("vit-b16", vit_b16, 3.25)):
            if given.net in (None, name):
                step(name, make, given.batch, forwards, limit=given.limit)


if __name__ == "__main__":
    main()
