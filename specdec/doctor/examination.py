"""Is this machine fit to run? python -m specdec.doctor: a line for each thing, and the way out where it is wrong.

A check is a function of plain values, so that any machine can be described to it; a section gathers the values of this
one and imports what it needs itself, so that a broken package costs its section and no other. Nothing is fetched, and
nothing is left behind but the kernels, which are built where they are not yet. Exits with 1 where a line says `fail`.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from importlib.metadata import Distribution, PackageNotFoundError, distribution, version
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from packaging.requirements import Requirement

    from specdec.measurement.results import Hardware

PROJECT = "specdec-lab"
MEMORY_BYTES = 2_500_000_000
"""The embedded model in float32 with the libraries takes 1.1 GB, and 2.4 where a tie is judged in float64."""
ROOM_BYTES = 1_000_000_000
"""Free disk for the embedded model while it is converted, or for a thousand runs."""
_MEMORY_INFO = Path("/proc/meminfo")
_CONTAINER = Path("/sys/fs/cgroup")
_NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
_THREAD_LIMITS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


class Level(StrEnum):
    """fail: something will not run. warn: it runs, but slower, or with less than one may expect."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Finding:
    """One line: what was looked at, what was found, and the way out; only `ok` may do without one."""

    level: Level
    subject: str
    fact: str
    remedy: str = ""

    def __post_init__(self) -> None:
        if self.level != Level.OK and not self.remedy:
            raise ValueError(f"{self.subject} is wrong ({self.fact}), yet no way out is given")

    def __str__(self) -> str:
        return f"{self.level:<4}  {self.subject:<13}  {self.fact}" + (f"; {self.remedy}" if self.remedy else "")


Section = Callable[[], Iterable[Finding]]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m specdec.doctor", description=__doc__)
    parser.add_argument("--results", type=Path, default=Path("results"), help="the folder runs will be written to")
    options = parser.parse_args(arguments)

    def outputs() -> Iterator[Finding]:
        yield place("results", options.results, ROOM_BYTES, "set results_dir to a folder you may write to")

    failed = False
    for finding in examine([installation, machine, gpus, caches, outputs]):
        print(finding, flush=True)
        failed |= finding.level == Level.FAIL
    return int(failed)


def examine(sections: Iterable[Section]) -> Iterator[Finding]:
    """What every section finds. One whose packages are missing or broken is a finding itself."""
    for section in sections:
        try:
            yield from section()
        except (ImportError, OSError) as error:
            remedy = "install into a fresh environment: make setup"
            yield Finding(Level.FAIL, section.__name__, f"can't be examined ({error})", remedy)


# What is installed


def installation(project: str = PROJECT) -> Iterator[Finding]:
    """Python and every package against the ranges that the installed distribution declares."""
    try:
        own = distribution(project)
    except PackageNotFoundError:
        fact = "not installed, so no version is checked"
        yield Finding(Level.WARN, project, fact, "pip install -e . in the checkout")
        return
    yield Finding(Level.OK, project, own.version)
    yield python(platform.python_version(), own.metadata["Requires-Python"])
    yield from map(package, requirements(own))
    for name in own.metadata.get_all("Provides-Extra") or ():
        yield extra(name, requirements(own, name))


def requirements(own: Distribution, extra_name: str = "") -> list[Requirement]:
    """What the distribution requires on this machine, or what one of its extras adds."""
    from packaging.requirements import Requirement

    listed = [Requirement(line) for line in own.requires or ()]

    def applies(requirement: Requirement, to: str) -> bool:
        return requirement.marker is None or requirement.marker.evaluate({"extra": to})

    return [line for line in listed if applies(line, extra_name) and not (extra_name and applies(line, ""))]


def python(running: str, allowed: str) -> Finding:
    """The interpreter against `Requires-Python`."""
    from packaging.specifiers import SpecifierSet

    if SpecifierSet(allowed).contains(running, prereleases=True):
        return Finding(Level.OK, "python", f"{running} ({allowed})")
    return Finding(Level.FAIL, "python", f"{running} is outside {allowed}", "make setup PYTHON=python3.13, say")


def package(requirement: Requirement) -> Finding:
    """A package against the range declared for it."""
    found, remedy = installed_version(requirement.name), f"pip install '{requirement.name}{requirement.specifier}'"
    if found is None:
        return Finding(Level.FAIL, requirement.name, "not installed", remedy)
    if not requirement.specifier.contains(found, prereleases=True):
        return Finding(Level.WARN, requirement.name, f"{found} is outside {requirement.specifier}", remedy)
    return Finding(Level.OK, requirement.name, f"{found} ({requirement.specifier})")


def extra(name: str, required: Sequence[Requirement]) -> Finding:
    """What an optional extra lacks. Lacking it is no fault: nothing but what is named after it needs it."""
    lacking = [line for line in map(package, required) if line.level != Level.OK]
    if not lacking:
        return Finding(Level.OK, f"[{name}]", "complete")
    facts = ", ".join(line.subject if line.level == Level.FAIL else f"{line.subject} {line.fact}" for line in lacking)
    level = Level.WARN if any(line.level == Level.WARN for line in lacking) else Level.OK
    return Finding(
        level, f"[{name}]", f"optional, lacks {facts}", f"pip install -e '.[{name}]' in the checkout adds it"
    )


def installed_version(name: str) -> str | None:
    """None where the package is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


# What it runs on


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
        return Finding(Level.OK, "memory", f"{_size(total)}; what of it is free, this system does not say")
    fact = f"{_size(available)} of {_size(total)} available"
    if available < MEMORY_BYTES:
        remedy = "close other programs, or use target.dtype=bfloat16, which takes half"
        return Finding(Level.WARN, "memory", f"{fact}, the embedded model may need {_size(MEMORY_BYTES)}", remedy)
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
    fact = f"{what}, {_size(free)} of {_size(total)} free"
    try:
        resolve_device(name, torch.bfloat16)
    except UsageError:
        return Finding(Level.WARN, name, f"{fact}, no bfloat16", "target.dtype=float16, or float32")
    return Finding(Level.OK, name, fact)


# Where files lie


def caches() -> Iterator[Finding]:
    """The toolkit's cache with the embedded models, and the hub's."""
    from huggingface_hub import constants

    from specdec.machine.folders import cache_root
    from specdec.models.loading.embedded import EMBEDDED, directory_of, is_intact

    root = cache_root()
    directories = {name: directory_of(model, root) for name, model in EMBEDDED.items()}
    yield cache(root, complete=all(map(is_intact, directories.values())), chosen="SPECDEC_CACHE" in os.environ)
    for name, directory in directories.items():
        yield embedded(name, directory)
    yield hub(Path(constants.HF_HUB_CACHE), constants.HF_HUB_OFFLINE)


def cache(root: Path, complete: bool, chosen: bool) -> Finding:
    """The toolkit's cache. complete: everything in it is made already, so that it need not be written to."""
    found = place("cache", root, 0 if complete else ROOM_BYTES, "set SPECDEC_CACHE to a folder you may write to")
    if complete and found.level == Level.FAIL:
        found = replace(found, level=Level.WARN)
    return replace(found, fact=f"{found.fact} ({'SPECDEC_CACHE' if chosen else 'SPECDEC_CACHE is not set'})")


def embedded(name: str, directory: Path) -> Finding:
    """An embedded model: ready, damaged, or not made yet."""
    from importlib.util import find_spec

    from specdec.models.loading.embedded import is_intact

    if is_intact(directory):
        size = sum(path.stat().st_size for path in directory.iterdir())
        return Finding(Level.OK, name, f"converted and intact, {_size(size)} in {directory}")
    state = "damaged" if directory.exists() else "not made yet"
    remedy = "the next run fetches and converts it, which takes a package index once"
    if find_spec("pip") is None:
        return Finding(Level.FAIL, name, f"{state}, and pip, which would fetch it, is missing", "python -m ensurepip")
    return Finding(Level.WARN, name, f"{state}: {directory}", remedy)


def hub(folder: Path, offline: bool) -> Finding:
    """The model hub's cache. Whether the hub is in reach is not tried."""
    held = {kind: len([*folder.glob(f"{kind}--*")]) for kind in ("models", "datasets")}
    policy = "set: nothing is fetched" if offline else "not set: what lacks is fetched when asked for"
    counts = f"{held['models']} models and {held['datasets']} datasets"
    return Finding(Level.OK, "hub cache", f"{counts} in {folder}; HF_HUB_OFFLINE is {policy}")


def place(subject: str, folder: Path, wanted_bytes: int, remedy: str) -> Finding:
    """Whether a folder, or what exists of the path to it, can be written to and has room."""
    try:
        whole = folder.absolute()
        existing = next(path for path in (whole, *whole.parents) if path.exists())
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(b"room for a byte")
        free = shutil.disk_usage(existing).free
    except OSError as error:
        return Finding(Level.FAIL, subject, f"{folder} can't be written to ({error.strerror})", remedy)
    if free < wanted_bytes:
        fact = f"{folder} has only {_size(free)} free of the {_size(wanted_bytes)} that may be needed"
        return Finding(Level.WARN, subject, fact, f"make room, or {remedy}")
    return Finding(Level.OK, subject, f"{folder}, writable, {_size(free)} free")


def _size(num_bytes: int | None) -> str:
    return "an unknown amount" if num_bytes is None else f"{num_bytes / 1e9:.1f} GB"
