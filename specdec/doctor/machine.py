"""What runs will run on: revision, processor, kernels, memory, load and GPUs."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from specdec.doctor.findings import Finding, Level, gigabytes

if TYPE_CHECKING:
    import torch

    from specdec.measurement.results import Hardware

MEMORY_BYTES = 2_500_000_000
"""The embedded model in float32 with the libraries takes 1.1 GB, and 2.4 where a tie is judged in float64."""
_MEMORY_INFO = Path("/proc/meminfo")
_CONTAINER = Path("/sys/fs/cgroup")
_NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
_THREAD_LIMITS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def machine() -> Iterator[Finding]:
    """Processor, threads, kernels, memory and load."""
    import torch

    from specdec.measurement.results import collect_provenance

    provenance = collect_provenance("", [], "", torch.get_num_threads())
    hardware = provenance.hardware
    yield revision(provenance.git_sha, provenance.revision)
    yield cpu(hardware, quota_cores(), os.environ)
    yield from kernels()
    yield memory(*memory_bytes(hardware.memory_bytes))
    yield load(os.getloadavg()[0], hardware.num_cores)


def revision(git_sha: str | None, label: str) -> Finding:
    """What runs will carry as the revision of the code."""
    if git_sha is None:
        return Finding(Level.WARN, "revision", "unknown, so runs record none", "run from a git checkout, with git")
    if label.endswith("-dirty"):
        return Finding(Level.WARN, "revision", label, "commit before a run that others shall make again")
    return Finding(Level.OK, "revision", label)


def cpu(hardware: Hardware, quota: float | None, environment: Mapping[str, str]) -> Finding:
    """Threads in use against cores that may be used. quota: cores' worth of time a container grants."""
    threads, cores = hardware.num_threads or hardware.num_cores, hardware.num_cores
    usable = cores if quota is None else min(cores, max(1, int(quota)))
    if threads > usable:
        fact = f"{hardware}, of which {usable} can run at once: threads wait for each other"
        return Finding(Level.WARN, "cpu", fact, f"hardware.num_threads={usable}")
    limits = [f"{name}={environment[name]}" for name in _THREAD_LIMITS if name in environment]
    if threads < usable and limits:
        fact = f"{hardware}: {limits[0]} leaves cores idle"
        return Finding(Level.WARN, "cpu", fact, f"unset it, or hardware.num_threads={usable}")
    return Finding(Level.OK, "cpu", str(hardware))


def quota_cores(container: Path = _CONTAINER) -> float | None:
    """Cores' worth of time that a container may use (cgroup v2); None without a limit."""
    limit = container / "cpu.max"
    quota, period = limit.read_text().split() if limit.is_file() else ("max", "1")
    return None if quota == "max" else int(quota) / int(period)


def kernels() -> Iterator[Finding]:
    """What multiplies weights stored in float32 and in bfloat16 on this processor, tried out."""
    import torch

    from specdec.kernels import build
    from specdec.models.native.linear import compute_dtype, linear

    built = build()
    if built.library is not None:
        yield Finding(Level.OK, "kernels", f"built by {built.compiler}")
    else:
        fact = f"not built, so that steps take longer: {built.reason}"
        yield Finding(Level.WARN if built.remedy else Level.OK, "kernels", fact, built.remedy)

    remedy = "pip install --force-reinstall torch, within the range above"
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        try:
            product, computing = linear(torch.ones(16, 32, dtype=dtype)), compute_dtype(dtype, torch.device("cpu"))
            right = bool((product(torch.ones(1, 32, dtype=computing)) == 32).all())
        except (RuntimeError, AttributeError) as error:
            yield Finding(Level.FAIL, name, f"products can't be computed ({error})", remedy)
            continue
        if not right:
            yield Finding(Level.FAIL, name, f"products by {type(product).__name__} are wrong", remedy)
        else:
            yield Finding(Level.OK, name, f"products by {type(product).__name__}{_meaning(dtype, computing)}")


def _meaning(stored: torch.dtype, computing: torch.dtype) -> str:
    if stored == computing:
        return ""
    wide = str(computing).removeprefix("torch.")
    return f"; weights are stored in it and computed with in {wide} (on a GPU everything is in it)"


def memory_bytes(
    total: int | None, info: Path = _MEMORY_INFO, container: Path = _CONTAINER
) -> tuple[int | None, int | None]:
    """(total, available), neither above a container's limit (cgroup v2); None where the system does not say."""
    lines = info.read_text().splitlines() if info.is_file() else []
    available = next((1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), None)
    limit = container / "memory.max"
    word = limit.read_text().strip() if limit.is_file() else "max"
    if word == "max":
        return total, available
    return min(total or int(word), int(word)), min(available or int(word), int(word))


def memory(total: int | None, available: int | None) -> Finding:
    """Memory against what the embedded model needs."""
    if available is None:
        return Finding(Level.OK, "memory", f"{gigabytes(total)}; what of it is free, this system does not say")
    fact = f"{gigabytes(available)} of {gigabytes(total)} available"
    if available < MEMORY_BYTES:
        remedy = "close other programs, or use target.dtype=bfloat16, which takes half"
        return Finding(Level.WARN, "memory", f"{fact}, the embedded model may need {gigabytes(MEMORY_BYTES)}", remedy)
    return Finding(Level.OK, "memory", fact)


def load(busy: float, cores: int) -> Finding:
    """The load average of the last minute. Every thread waits for the slowest, so one busy core is too many."""
    fact = f"{busy:.2f} of {cores} cores busy over the last minute"
    if busy > max(0.5, 0.05 * cores):
        remedy = "stop or wait for what else runs (see top)"
        return Finding(Level.WARN, "load", f"{fact}: timings would be too slow and too noisy", remedy)
    return Finding(Level.OK, "load", fact)


def gpus() -> Iterator[Finding]:
    """Every CUDA device that torch sees."""
    import torch

    if not torch.cuda.is_available():
        yield no_gpu(torch.__version__, driver=_NVIDIA_DRIVER.exists())
        return
    yield from map(gpu, range(torch.cuda.device_count()))


def no_gpu(torch_version: str, driver: bool) -> Finding:
    """driver: an NVIDIA driver is loaded, so that there should be one."""
    if not driver:
        return Finding(Level.OK, "gpu", "no GPU: target.device=cpu")
    fact = f"an NVIDIA driver is loaded, but torch {torch_version} sees no GPU"
    remedy = "install a CUDA build of torch that fits the driver and check CUDA_VISIBLE_DEVICES, or target.device=cpu"
    return Finding(Level.WARN, "gpu", fact, remedy)


def gpu(index: int) -> Finding:
    """A CUDA device, tried out in both dtypes."""
    import torch

    from specdec.errors import UsageError
    from specdec.models.loading.model import resolve_device

    name = f"cuda:{index}"
    properties = torch.cuda.get_device_properties(index)
    what = f"{properties.name}, compute capability {properties.major}.{properties.minor}"
    try:
        resolve_device(name, torch.float32)
    except UsageError:
        remedy = "install a torch built for it, or target.device=cpu"
        return Finding(Level.FAIL, name, f"{what}: torch {torch.__version__} can't compute on it", remedy)
    free, total = torch.cuda.mem_get_info(index)
    fact = f"{what}, {gigabytes(free)} of {gigabytes(total)} free"
    try:
        resolve_device(name, torch.bfloat16)
    except UsageError:
        return Finding(Level.WARN, name, f"{fact}, no bfloat16", "target.dtype=float16, or float32")
    return Finding(Level.OK, name, fact)
