"""Where and how `benchmarks/speed.py` measures: the device, its images, and the clock."""

from __future__ import annotations

import copy
import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from _speed_nets import convolutional, network
from torch import Tensor, nn

Row = dict[str, Any]
Call = Callable[[Tensor], Tensor]


@dataclass
class Place:
    """Where it runs, how long, and on which images."""

    device: str
    size: int
    seconds: float

    def sync(self) -> None:
        """Wait for the device."""
        if self.device == "cuda":
            torch.cuda.synchronize()

    def images(self, net: str, batch: int, *, unit: bool = False, plain: bool = False) -> list[Tensor]:
        """Eight batches on the device, in the network's layout."""
        rng = torch.Generator(self.device).manual_seed(0)
        draw = torch.rand if unit else torch.randn
        layout = torch.channels_last if convolutional(net) and not plain else torch.contiguous_format
        shape = (batch, 3, self.size, self.size)
        return [draw(shape, generator=rng, device=self.device).to(memory_format=layout) for _ in range(8)]

    def model(self, net: str, *, plain: bool = False) -> nn.Module:
        """A copy of the network on the device, in its layout."""
        model = copy.deepcopy(network(net)[0]).to(self.device)
        return model.to(memory_format=torch.channels_last) if convolutional(net) and not plain else model

    def clean(self, *, peaks: bool = True) -> None:
        """Forget what the last row left, with its peaks or without."""
        gc.collect()
        if self.device == "cuda":
            torch.cuda.empty_cache()
            if peaks:
                torch.cuda.reset_peak_memory_stats()

    def kept(self) -> Row:
        """What is still held after an adapter was unloaded, in MiB: beside what was loaded, memory not given back."""
        if self.device != "cuda":
            return {}
        now = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        return {"unloaded_mib": round(now[0] / 2**20), "unloaded_reserved_mib": round(now[1] / 2**20)}

    def memory(self) -> Row:
        """Peak since `clean`, in MiB; what the CPU's allocator holds is not known."""
        if self.device != "cuda":
            return {"peak_allocated_mib": None, "peak_reserved_mib": None}
        peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        return {"peak_allocated_mib": round(peaks[0] / 2**20), "peak_reserved_mib": round(peaks[1] / 2**20)}

    def timed(self, call: Call, images: list[Tensor], warming: Call | None = None) -> Row:
        """Warm-up, with a call of its own where one is given, then latencies, then a run without stops."""
        turns = in_turn(images)
        warm = self.warmed(warming or call, turns)
        least = 10 if self.device == "cuda" else 3
        times: list[float] = []
        while len(times) < least or (sum(times) < self.seconds and len(times) < 2000):
            times.append(self.once(call, next(turns)))
        middle = statistics.median(times)
        count = max(least, min(2000, math.ceil(self.seconds / middle)))
        self.sync()
        start = time.perf_counter()
        for _ in range(count):
            call(next(turns))
        self.sync()
        spent = time.perf_counter() - start
        return {
            "median_ms": 1000 * middle, "p99_ms": 1000 * sorted(times)[math.ceil(0.99 * len(times)) - 1],
            "calls": len(times), "images_per_s": count * len(images[0]) / spent, "run_calls": count,
            "warm_up_calls": len(warm), "warm_up_s": sum(warm), "slowest_call_s": max(warm),
        }  # fmt: skip

    def once(self, call: Call, images: Tensor) -> float:
        """Seconds of one call, begun and ended with the device at rest."""
        self.sync()
        start = time.perf_counter()
        call(images)
        self.sync()
        return time.perf_counter() - start

    def warmed(self, call: Call, turns: Iterator[Tensor]) -> list[float]:
        """Calls until three in a row are near the fastest: whatever is captured or compiled has been."""
        times: list[float] = []
        least, most = (6, 40) if self.device == "cuda" else (2, 6)
        while len(times) < least or (len(times) < most and max(times[-3:]) > 1.5 * min(times)):
            times.append(self.once(call, next(turns)))
        return times


def in_turn(images: list[Tensor]) -> Iterator[Tensor]:
    while True:
        yield from images
