"""Models named by their Hugging Face repository, with a fake hub and the cache's real layout."""

import hashlib
import shutil
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

from opendit.common import hub
from opendit.config.architectures import name_of_folder

COMMIT, OLDER = "0123456789abcdef" * 2 + "01234567", "f" * 40
FILES = {
    "model_index.json": "{}",
    "transformer/config.json": '{"_class_name": "FluxTransformer2DModel"}',
    "transformer/diffusion_pytorch_model-00001-of-00002.safetensors": "weights",
    "transformer/diffusion_pytorch_model.safetensors.index.json": "{}",
    "text_encoder/model.fp16.safetensors": "half",
    "text_encoder/pytorch_model.bin": "pickle",
    "tokenizer/vocab.json": "{}",
    "tokenizer/merges.txt": "a b",
    "tokenizer_2/spiece.model": "pieces",
    "transformer/code.py": "import os",
    "flux1-dev.safetensors": "all of it again",
    "README.md": "words",
}


def failing(kind: type, status: int = 404):
    def fail(*_, **__):
        response = SimpleNamespace(headers={}, status_code=status, request=None)
        error = kind.__new__(kind)
        Exception.__init__(error, "a long\nstory")
        error.response = response
        raise error

    return fail


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """Replace the hub by a repository with :data:`FILES` at two commits; return the list of network calls."""
    asked: list[tuple[str, str | None]] = []
    cache = tmp_path / "hub"

    def snapshot_download(repository, revision=None, allow_patterns=(), ignore_patterns=(), local_files_only=False):
        commit = {None: COMMIT, "main": COMMIT, "older": OLDER}.get(revision, revision)
        folder = cache / f"models--{repository.replace('/', '--')}" / "snapshots" / commit
        if not local_files_only:
            asked.append((repository, revision))
            for name, content in FILES.items():
                wanted = any(fnmatch(name, pattern) for pattern in allow_patterns)
                if wanted and not any(fnmatch(name, pattern) for pattern in ignore_patterns):
                    blob = folder.parents[1] / "blobs" / hashlib.sha256(content.encode()).hexdigest()
                    blob.parent.mkdir(parents=True, exist_ok=True)
                    blob.write_text(content)
                    (folder / name).parent.mkdir(parents=True, exist_ok=True)
                    (folder / name).unlink(missing_ok=True)
                    (folder / name).symlink_to(blob)
        elif not folder.is_dir():
            raise FileNotFoundError(folder)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.setattr(hub, "probe_hub", lambda endpoint: None)
    hub.download_snapshot.cache_clear()
    monkeypatch.chdir(tmp_path)
    return asked


def test_names_of_the_hub_and_other_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outputs/run").mkdir(parents=True)
    assert hub.on_hub("black-forest-labs/FLUX.1-dev") == ("black-forest-labs/FLUX.1-dev", None)
    assert hub.on_hub("Wan-AI/Wan2.1@refs/pr/3") == ("Wan-AI/Wan2.1", "refs/pr/3")
    assert hub.on_hub(f"a/b@{COMMIT}") == ("a/b", COMMIT)
    others = ("outputs/run", "a", "a/b/c", "../b", "/a/b", "a/b@", "a/b@../x", "a/b@x y", "./a/b", "~/b", "a//b")
    assert not any(map(hub.on_hub, others))


def test_only_what_is_read_is_fetched_and_its_hashes_are_known(stand_in):
    folder = Path(hub.fetched("some/FLUX.1-x@older", "--pretrained", True))
    assert stand_in == [("some/FLUX.1-x", "older")]
    found = hub.origin(folder / "transformer")
    assert (found["repository"], found["commit"]) == ("some/FLUX.1-x", OLDER) and found == hub.origin(folder)
    assert not {name for name in found["files"] if name.endswith((".bin", ".py", ".md")) or "fp16" in name}
    assert set(FILES) - set(found["files"]) == {
        "text_encoder/model.fp16.safetensors",
        "text_encoder/pytorch_model.bin",
        "transformer/code.py",
        "flux1-dev.safetensors",
        "README.md",
    }
    assert all(value == hashlib.sha256(FILES[name].encode()).hexdigest() for name, value in found["files"].items())
    assert name_of_folder(folder) == name_of_folder(folder / "transformer") == "flux/FLUX.1-x"


def test_a_cache_without_links_and_a_folder_elsewhere(stand_in, tmp_path):
    folder = Path(hub.fetched("a/b", "--ckpt", True))
    linked = hub.origin(folder)
    for path in [path for path in folder.rglob("*") if path.is_symlink()]:
        content = path.read_bytes()
        path.unlink()
        path.write_bytes(content)
    assert hub.origin(folder) == linked
    shutil.copytree(folder, tmp_path / "copy")
    assert hub.origin(tmp_path / "copy") is None and hub.folder_name(tmp_path / "copy") == "copy"


def test_what_a_run_or_a_revision_pins_needs_no_network(stand_in):
    with pytest.raises(ValueError, match="^--pretrained a/b: doesn't exist; .*add --download") as error:
        hub.fetched("a/b", "--pretrained", False, COMMIT)
    assert "\n" not in str(error.value) and not stand_in
    folder = hub.fetched("a/b", "--pretrained", True)
    assert hub.fetched("a/b", "--pretrained", False, COMMIT) == hub.fetched(f"a/b@{COMMIT}", "--ckpt", True) == folder
    assert len(stand_in) == 1
    with pytest.raises(ValueError, match="add --download"):  # another revision than the run's
        hub.fetched("a/b@older", "--pretrained", False, COMMIT)
    hub.fetched("a/b", "--pretrained", True)  # again in this process
    assert len(stand_in) == 1
    hub.download_snapshot.cache_clear()
    hub.fetched("a/b", "--pretrained", True)  # asks the hub for the newest commit
    assert len(stand_in) == 2
    assert hub.fetched(folder, "--pretrained", True) == folder


@pytest.mark.parametrize(
    ("raised", "message"),
    [
        (GatedRepoError, "is gated; accept its terms"),
        (RepositoryNotFoundError, "there is no a/b on the hub, or it is private"),
        (RevisionNotFoundError, "a/b on the hub has no revision older"),
        (ConnectionError, r"the hub can't be reached, or broke off \(ConnectionError: a long story\)"),
        (KeyError, "the hub can't be reached, or broke off"),
    ],
)
def test_what_goes_wrong_is_one_line(stand_in, monkeypatch, raised, message):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", failing(raised))
    with pytest.raises(ValueError, match=f"^--ckpt a/b@older: .*{message}") as error:
        hub.fetched("a/b@older", "--ckpt", True)
    assert "\n" not in str(error.value)


def test_offline_and_repositories_of_something_else_are_one_line(stand_in, monkeypatch):
    monkeypatch.setitem(FILES, "model_index.json", FILES.pop("model_index.json"))
    with monkeypatch.context() as patch:
        patch.delitem(FILES, "model_index.json")
        with pytest.raises(ValueError, match="^--ckpt a/b: a/b on the hub has no model_index.json or config.json"):
            hub.fetched("a/b", "--ckpt", True)
    monkeypatch.undo()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ValueError, match=r"^--ckpt no/such: the hub can't be reached.*HF_HUB_OFFLINE is set"):
        hub.fetched("no/such", "--ckpt", True)
