"""Timing, peaks, and the table that a run prints."""

import gc
import json
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from speed.floor import synchronize


@dataclass
class Measurement:
    """One line of the table. Ratios are of this very run.

    Example: Measurement("rollout", "Qwen3-1.7B, 256 rows, 256 each", seconds=1.4, tokens=65536,
             peak_gb=21.0, against_generate=6.1, of_floor=0.43)
    """

    part: str
    case: str
    seconds: float
    tokens: int | None = None
    peak_gb: float | None = None
    reply_tokens: int | None = None
    """For the price: reply tokens that this work yields. None if it is not work on replies alone."""
    against_vllm: float | None = None
    """How many times faster than vLLM hacrl is on the same replies."""
    against_generate: float | None = None
    """How many times faster than transformers' generate on the same rows and lengths."""
    against_trl: float | None = None
    """How many times faster than the same phase of TRL's GRPOTrainer."""
    of_floor: float | None = None
    """Floor over time: 1 is the best that the device could do."""
    note: str = ""
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def tokens_per_s(self) -> float | None:
        return self.tokens / self.seconds if self.tokens else None

    def price_of_million(self, hourly: float | None) -> float | None:
        """What a million reply tokens cost at this price of an hour of the device."""
        if hourly is None or not self.reply_tokens:
            return None
        return hourly * self.seconds / 3600 * 1e6 / self.reply_tokens


class Log:
    """Collects measurements: prints each one and writes all of them after each."""

    def __init__(self, out: Path | None, hourly: float | None = None) -> None:
        self.out = out
        self.hourly = hourly
        """Price of an hour of the device."""
        self.measurements: list[Measurement] = []
        self.facts: dict[str, Any] = environment()
        self.failed: list[str] = []
        self._start = time.perf_counter()

    def say(self, text: str) -> None:
        print(f"[{time.perf_counter() - self._start:6.1f}s] {text}", flush=True)

    def add(self, measurement: Measurement) -> Measurement:
        self.measurements.append(measurement)
        self.say(" | ".join(self._cells(measurement)) + _facts_text(measurement.facts))
        self.write()
        return measurement

    def write(self) -> None:
        if self.out is None:
            return
        rows = [
            {
                **asdict(m),
                "tokens_per_s": m.tokens_per_s,
                "price_of_million": m.price_of_million(self.hourly),
            }
            for m in self.measurements
        ]
        whole = {"environment": self.facts, "failed": self.failed, "measurements": rows}
        self.out.parent.mkdir(parents=True, exist_ok=True)
        self.out.write_text(json.dumps(whole, indent=1) + "\n")

    def table(self) -> str:
        head = ["part", "case", "s", "tokens/s", "of floor", "x vLLM", "x TRL", "x generate"]
        head += ["price of 1M reply tokens"] * (self.hourly is not None) + ["peak GB", ""]
        lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
        lines += ["| " + " | ".join(self._cells(m)) + " |" for m in self.measurements]
        return "\n".join(lines)

    def _cells(self, m: Measurement) -> list[str]:
        price = [_shown(m.price_of_million(self.hourly), ".3g")] * (self.hourly is not None)
        return [
            m.part,
            m.case,
            _shown(m.seconds, ".3g" if m.seconds < 100 else ".0f"),
            _shown(m.tokens_per_s, ",.0f"),
            _shown(m.of_floor, ".1%"),
            _shown(m.against_vllm, ".2f"),
            _shown(m.against_trl, ".2f"),
            _shown(m.against_generate, ".2f"),
            *price,
            _shown(m.peak_gb, ".1f"),
            m.note,
        ]


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _facts_text(facts: dict[str, Any]) -> str:
    shown = [f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in facts.items()]
    return f"  ({'; '.join(shown)})" if shown else ""


def environment() -> dict[str, Any]:
    import transformers

    cuda = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if cuda else _processor(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if "model name" in line)
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


@dataclass(frozen=True)
class Timed:
    """What a piece of work took: the median of its runs, the first one (captures and compiles
    included), the peak of device memory and the last run's result."""

    seconds: float
    first: float
    spread: float
    peak_gb: float | None
    result: Any


def timed(
    work: Callable[[int], Any],
    device: torch.device,
    *,
    repeats: int = 3,
    enough: float = 30.0,
    warm: int = 1,
    before: Callable[[], None] = lambda: None,
) -> Timed:
    """`work(0)` `warm` times to warm up, then `work(i)` up to `repeats` times, until `enough` seconds
    are spent. `before` is called before each of them and not timed."""
    before()
    first, result = once(partial(work, 0), device) if warm else (0.0, None)
    for _ in range(warm - 1):
        before()
        work(0)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    seconds: list[float] = []
    while len(seconds) < repeats and (not seconds or sum(seconds) + seconds[-1] < enough):
        before()
        took, result = once(partial(work, len(seconds) + 1), device)
        seconds.append(took)
    spread = (max(seconds) - min(seconds)) / median(seconds)
    return Timed(median(seconds), first, spread, peak_gb(device), result)


def once(work: Callable[[], Any], device: torch.device) -> tuple[float, Any]:
    """Seconds and result."""
    synchronize(device)
    start = time.perf_counter()
    result = work()
    synchronize(device)
    return time.perf_counter() - start, result


def peak_gb(device: torch.device) -> float | None:
    return torch.cuda.max_memory_allocated(device) / 1e9 if device.type == "cuda" else None


def alloc_retries(device: torch.device) -> int:
    """How often torch found no room and gave its cached memory back first, which takes long."""
    if device.type != "cuda":
        return 0
    return int(torch.cuda.memory_stats(device).get("num_alloc_retries", 0))


def reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def free(device: torch.device) -> None:
    """After the caller dropped its models."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
