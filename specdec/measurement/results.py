"""Where runs live and what is written beside them.

A run's folder appears under `<experiment>/runs/` by one rename when everything in it has been written, so a run is
finished exactly when its folder holds metadata.json. Leftovers of interrupted runs begin with a dot.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from specdec.errors import UsageError
from specdec.machine.processor import cpu_model
from specdec.measurement import traces
from specdec.measurement.traces import Frames, replacing
from specdec.version import __version__

LOSSLESS = ("equal", "tie", "fault", "declared")
"""What comparing a greedy arm with the plain one can say: the same tokens; a first difference at a near-tie; a
difference that is a fault; a rule that declares itself lossy. None: sampled, so not compared."""
_ROOM_BYTES = 4 << 20
"""Tried out before a run begins: an ordinary run takes about one megabyte."""
PACKAGES = ("torch", "transformers", "accelerate", "numpy", "pandas", "hydra-core")


@dataclass(frozen=True)
class ArmMetadata:
    """One decoding setup of a run. The first arm of a run is plain decoding.

    tokenwise: drafts are chains verified token by token, so that accepted ÷ examined estimates alpha.
    synthetic: the drafter's or verifier's acceptance is set, not earned.
    """

    drafter: str
    verifier: str
    controller: str
    num_draft_tokens: int | None
    synthetic: bool = False
    lossless: str | None = None
    tokenwise: bool = True

    def __post_init__(self) -> None:
        if self.lossless not in (None, *LOSSLESS):
            raise UsageError(f"lossless={self.lossless!r} is unknown; it is one of {', '.join(LOSSLESS)}, or None")


@dataclass(frozen=True)
class Hardware:
    """The machine. `num_threads` are those the run computed with; None where unknown."""

    cpu: str
    num_cores: int
    num_threads: int | None
    memory_bytes: int | None
    gpu: str | None

    def __str__(self) -> str:
        threads = "" if self.num_threads is None else f", {self.num_threads} threads"
        return self.gpu or f"{self.cpu}, {self.num_cores} cores{threads}"


@dataclass(frozen=True)
class Provenance:
    """What one needs to make a result again. `date` is UTC, ISO 8601."""

    command: str
    git_sha: str | None
    git_dirty: bool
    packages: dict[str, str]
    python: str
    hardware: Hardware
    seeds: list[int]
    prompts_sha256: str
    date: str

    @property
    def revision(self) -> str:
        """Short git SHA, with `-dirty` where the tree had changes."""
        return (self.git_sha or "unknown")[:10] + ("-dirty" if self.git_dirty else "")


@dataclass(frozen=True)
class RunMetadata:
    """metadata.json: one (workload, temperature) and its arms, plain first.

    skipped_arms: arm → why it did not run. failures: arm → request → what went wrong; a failed request has
    no row in any table.
    """

    run_id: str
    experiment: str
    workload: str
    tier: str
    temperature: float
    model: str
    dtype: str
    arms: dict[str, ArmMetadata]
    provenance: Provenance
    config: dict[str, Any] = field(default_factory=dict)
    skipped_arms: dict[str, str] = field(default_factory=dict)
    failures: dict[str, dict[str, str]] = field(default_factory=dict)

    @property
    def plain_arm(self) -> str:
        """The arm that every speedup is measured against."""
        return next(iter(self.arms))

    def to_json(self) -> str:
        """Indented JSON, arms in order."""
        return json.dumps(asdict(self), indent=2, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> RunMetadata:
        """The inverse of `to_json`."""
        data = json.loads(text)
        provenance = data["provenance"]
        provenance["hardware"] = Hardware(**provenance["hardware"])
        data["provenance"] = Provenance(**provenance)
        data["arms"] = {name: ArmMetadata(**arm) for name, arm in data["arms"].items()}
        return cls(**data)


@dataclass(frozen=True)
class Run:
    """A finished run: its folder and metadata; the tables are read when asked for."""

    folder: Path
    metadata: RunMetadata

    def frames(self) -> Frames:
        """The run's tables, checked."""
        return traces.read(self.folder)


def run_id(config: Mapping[str, Any], prompts_sha256: str) -> str:
    """12 hex digits that identify a result: the hash of resolved config, prompts and package version.

    The version stands for the code: a git SHA would throw a half-finished reference run away for every edited
    comment. The SHA is in the provenance, and a report says so when its runs come from several.
    `config` must hold nothing that leaves the result unchanged (folders, progress bars).
    """
    identity = {"config": config, "prompts": prompts_sha256, "version": __version__}
    try:
        canonical = json.dumps(identity, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise UsageError(f"the config of a run must be plain JSON values, resolved: {error}") from error
    return sha256(canonical)[:12]


def sha256(text: str) -> str:
    """Hex digest of UTF-8 text."""
    return hashlib.sha256(text.encode()).hexdigest()


def run_folder(folder: Path, run: str) -> Path:
    """Where the run `run` of an experiment's folder lives."""
    return folder / "runs" / run


def is_finished(folder: Path, run: str) -> bool:
    """Whether the run has been written completely."""
    return (run_folder(folder, run) / "metadata.json").is_file()


def prepare_folder(folder: Path) -> None:
    """Make a folder for results. Raises `UsageError` where it can't be written to, or has not the room for a run."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(_ROOM_BYTES))
    except OSError as error:
        raise _cannot_write(folder, error) from error


def _cannot_write(folder: Path, error: OSError) -> UsageError:
    return UsageError(
        f"results can't be written to {folder} ({error.strerror}); make room, or name a folder you may write to, and "
        "run the same command again: finished runs stay"
    )


def write_run(folder: Path, metadata: RunMetadata, frames: Frames) -> Path:
    """Write a finished run whole: its folder appears by one rename. Returns the folder.

    Call it inside `run_lock`. Raises `TraceError` where the tables contradict themselves and `UsageError` where
    the run exists already or the folder can't be written.
    """
    traces.check(frames)
    prepare_folder(folder / "runs")
    final = run_folder(folder, metadata.run_id)
    if is_finished(folder, metadata.run_id):
        raise UsageError(f"run {metadata.run_id} is already in {folder}; delete {final} to run it again")
    shutil.rmtree(final, ignore_errors=True)
    partial = Path(tempfile.mkdtemp(dir=final.parent, prefix=f".{metadata.run_id}.", suffix=".partial"))
    try:
        traces.write(frames, partial)
        (partial / "metadata.json").write_text(metadata.to_json(), encoding="utf-8")
        partial.chmod(0o755)
        partial.replace(final)
    except OSError as error:
        raise _cannot_write(folder, error) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return final


def load_runs(folder: Path) -> list[Run]:
    """The finished runs of an experiment, sorted by workload, temperature and id; leftovers are ignored."""
    paths = sorted(folder.glob("runs/[!.]*/metadata.json"))
    runs = [Run(path.parent, RunMetadata.from_json(path.read_text(encoding="utf-8"))) for path in paths]
    return sorted(runs, key=lambda run: (run.metadata.workload, run.metadata.temperature, run.metadata.run_id))


def write_text(path: Path, text: str) -> None:
    """Write a small file whole or not at all."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


@contextmanager
def run_lock(folder: Path, run: str) -> Iterator[None]:
    """Hold a run of this experiment against other processes, and clear what an interrupted one left.

    Raises `UsageError` at once where another process holds it.
    """
    runs = folder / "runs"
    prepare_folder(runs)
    with _held(runs / f".{run}.lock", f"run {run} is being written by another process; wait for it or stop it"):
        for leftover in runs.glob(f".{run}.*.partial"):
            shutil.rmtree(leftover, ignore_errors=True)
        yield


@contextmanager
def timed_lock(device: str, shared: bool = False, folder: Path | None = None) -> Iterator[None]:
    """Keep a device, machine-wide, from timing two runs at once.

    device: "cpu" holds each core this process may run on, so runs pinned to other cores go on; "cuda:0" holds
    that GPU. shared: the user allows several at once. folder: where the locks lie, the machine's temporary
    folder unless given. Raises `UsageError` at once where another timed run holds a part.
    """
    place = folder or Path(tempfile.gettempdir())
    with ExitStack() as stack:
        for part in [] if shared else _device_parts(device):
            refusal = f"another timed run is using {part} of this machine; wait for it, or allow sharing by request"
            stack.enter_context(_held(place / f"specdec-timed-{part}.lock", refusal))
        yield


def collect_provenance(
    command: str, seeds: Sequence[int], prompts_sha256: str, num_threads: int | None = None, gpu: str | None = None
) -> Provenance:
    """Everything about this process and machine that a result should carry."""
    here = Path(__file__).parent
    hardware = Hardware(cpu_model(), len(_cores()), num_threads, _memory_bytes(), gpu)
    return Provenance(
        command=command,
        git_sha=_git(here, "rev-parse", "HEAD"),
        git_dirty=bool(_git(here, "status", "--porcelain", "--untracked-files=no")),
        packages={"specdec-lab": __version__, **{name: _version(name) for name in PACKAGES}, **_compiler()},
        python=platform.python_version(),
        hardware=hardware,
        seeds=list(seeds),
        prompts_sha256=prompts_sha256,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _compiler() -> dict[str, str]:
    """What `specdec.kernels` were built with; nothing where they were not."""
    from specdec.kernels import build  # with torch, which who only reads results can do without

    compiler = build().compiler
    return {"cc": compiler} if compiler else {}


@contextmanager
def _held(path: Path, refusal: str) -> Iterator[None]:
    lock = FileLock(path, timeout=0, mode=0o666)
    try:
        lock.acquire()
    except Timeout as error:
        raise UsageError(refusal) from error
    except OSError as error:
        raise UsageError(f"the lock {path} can't be opened ({error.strerror}); remove it or allow sharing") from error
    try:
        yield
    finally:
        lock.release()


def _device_parts(device: str) -> list[str]:
    """Names of what a timed run occupies: cores, or a GPU as the machine numbers it."""
    kind, _, index = device.partition(":")
    if kind == "cpu":
        return [f"core{core}" for core in _cores()]
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    number = int(index or 0)
    return [f"{kind}{visible[number] if kind == 'cuda' and number < len(visible) else number}"]


def _cores() -> list[int]:
    """Cores this process may run on; all of them where the system does not say."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _git(folder: Path, *arguments: str) -> str | None:
    """Output of a git command in the folder; None without git or outside a repository."""
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
