"""Clocks for the benchmark: device time with a cold L2 cache, and host time of one call."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

Call = Callable[[], object]

# Larger than the L2 cache of every supported card: writing it evicts what the last call left there.
FLUSH_BYTES = 256 * 2**20

# Before each measurement. Without it the kernels of one after the other draw more power than the
# card may: it lowers its clock, by so much as happens to have been measured before.
REST_S = 0.25

# Launches queue up to about a thousand deep; a full queue would make the host wait for the GPU.
HOST_BATCH = 100


class Clock:
    """Times calls on one device; on the CPU both clocks read wall time."""

    def __init__(
        self, device: torch.device, warmup: int, iters: int, rest_s: float = REST_S
    ) -> None:
        self.device = device
        self.warmup = warmup
        self.iters = iters
        self.on_gpu = device.type == "cuda"
        self.rest_s = rest_s if self.on_gpu else 0.0
        self.flush_bytes = FLUSH_BYTES if self.on_gpu else 0
        self._flush: torch.Tensor | None = None
        if self.on_gpu:
            self._flush = torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device=device)

    def synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def spin(self, seconds: float = 0.5) -> None:
        """Keep the device busy so that its clocks have risen before the first measurement."""
        if self._flush is None:
            return
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            for _ in range(20):
                self._flush.zero_()
            self.synchronize()

    def device_ms(self, call: Call) -> float:
        """Median time of one call in ms, L2 flushed before each, warm-up calls not counted.

        The flush also gives the host time to queue the call, so that short kernels are not timed
        together with the launch that feeds them.
        """
        time.sleep(self.rest_s)
        for _ in range(self.warmup):
            call()
        self.synchronize()
        if self._flush is None:
            return statistics.median(self._wall_ms(call) for _ in range(self.iters))
        starts = [torch.cuda.Event(enable_timing=True) for _ in range(self.iters)]
        ends = [torch.cuda.Event(enable_timing=True) for _ in range(self.iters)]
        for start, end in zip(starts, ends, strict=True):
            self._flush.zero_()
            start.record()
            call()
            end.record()
        self.synchronize()
        return statistics.median(s.elapsed_time(e) for s, e in zip(starts, ends, strict=True))

    def host_us(self, call: Call, calls: int) -> float:
        """Median time in us the host spends in one call that it does not wait for."""
        times: list[int] = []
        self.synchronize()
        while len(times) < calls:
            for _ in range(min(HOST_BATCH, calls - len(times))):
                begin = time.perf_counter_ns()
                call()
                times.append(time.perf_counter_ns() - begin)
            self.synchronize()
        return statistics.median(times) / 1e3

    @staticmethod
    def _wall_ms(call: Call) -> float:
        begin = time.perf_counter_ns()
        call()
        return (time.perf_counter_ns() - begin) / 1e6
