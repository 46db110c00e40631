"""Test that preprocess.py shards converts latents in safetensors files, which versions before tars wrote.

``tests/test_formats.py`` converts caches that such a version wrote.
"""

import json
import random
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import preprocess
from opendit.data import DataError, SampleKey, build_dataset
from opendit.data.shards.program import make_shards
from tests.data.shards.tars import latents_in
from tests.data.test_latents import codec, make, pictures  # noqa: F401
from tests.data.test_video_latents import VIDEO, csv, vae  # noqa: F401
from tests.data.test_video_latents import codec as clip_codec  # noqa: F401
from tests.data.test_video_latents import make as make_clips


def as_files(tars, output, sizes=(1, 4)):
    """Write the latents of a folder of tars as version 1 did, in files of random lengths."""
    output.mkdir()
    (index,) = json.loads((tars / "index.json").read_text())["sizes"]
    entries, lengths = [], random.Random(0)
    for key in sorted({shard.get("shape_key", 0) for shard in index["shards"]}):
        mine = [shard for shard in index["shards"] if shard.get("shape_key", 0) == key]
        left = [(row, *parts) for shard in mine for row, parts in latents_in(tars / shard["file"]).items()]
        while left:
            count = min(len(left), lengths.randint(*sizes))
            rows, tensors, beside = zip(*left[:count], strict=True)
            del left[:count]
            file = {name: [one[name] for one in tensors] for name in tensors[0]}
            content = {"rows": torch.tensor(rows), "moments": torch.stack(file["moments"])}
            if "tokens" in file:
                ends = torch.tensor([len(tokens) for tokens in file["tokens"]]).cumsum(0)
                content |= {"tokens": torch.cat(file["tokens"]), "token_ends": ends}
                content["pooled"] = torch.stack(file["pooled"])
            if index.get("conditioning") == "text":
                ends = torch.tensor(list(map(len, beside))).cumsum(0)
                content |= {"captions": torch.tensor(list(b"".join(beside)), dtype=torch.uint8), "caption_ends": ends}
                content["labels"] = torch.zeros(count, dtype=torch.int64)
            else:
                content["labels"] = torch.tensor(list(map(int, beside)))
            path = output / f"latents-{len(entries):05d}-of-99999.safetensors"
            settings = {**index["settings"], "version": 1, "shard_size": 4}
            skipped = index["skipped"] if not entries else []
            save_file(content, path, {"opendit": json.dumps({"settings": settings, "skipped": skipped})})
            entries.append({"file": path.name, "count": count, "bytes": path.stat().st_size})
            entries[-1] |= {"shape_key": key} if "video" in index else {}
    if "text" in index:
        shutil.copy(tars / "empty-caption.safetensors", output)
    plain = {name: value for name, value in index.items() if name != "checksums"}
    (output / "index.json").write_text(
        json.dumps({"format": "opendit-latents", "version": 1, **plain, "shards": entries})
    )
    return output


@pytest.fixture(params=["pictures", "clips"])
def old(request, tmp_path, pictures, codec, csv, clip_codec):  # noqa: F811
    """Return (tars, the same latents in files, options to open them)."""
    if request.param == "pictures":
        make(pictures, codec, tmp_path / "made")
    else:
        make_clips(csv, clip_codec, tmp_path / "made")
    return (
        tmp_path / "made",
        as_files(tmp_path / "made", tmp_path / "old"),
        {} if request.param == "pictures" else VIDEO,
    )


def test_nothing_is_lost(old, tmp_path):
    made, files, how = old
    make_shards(str(files), str(tmp_path / "new"), num_workers=2)
    found, expected = (build_dataset(str(folder), 16, seed=0, **how) for folder in (tmp_path / "new", made))
    names = "conditioning class_names sample_shape random_flip vae scaling_factor shift_factor text_encoder max_tokens"
    for name in names.split():
        assert getattr(found.describe(), name) == getattr(expected.describe(), name)
    assert found.index["skipped"] == expected.index["skipped"] and len(found) == len(expected)
    assert len(found.shards) == len(list(files.glob("latents-*.safetensors")))
    for row in range(len(found)):
        one, other = (data[SampleKey(row, 5, row)] for data in (found, expected))
        assert torch.equal(one.x, other.x) and (one.y, one.text) == (other.y, other.text)
        assert found.shapes().key(row) == expected.shapes().key(row)
        assert one.embedding is None or all(map(torch.equal, one.embedding, other.embedding))
    assert how == {} or all(map(torch.equal, found.empty_caption, expected.empty_caption))


def test_a_stopped_conversion_goes_on_to_the_same_bytes(old, tmp_path):
    _, files, _ = old
    make_shards(str(files), str(tmp_path / "new"), num_workers=1)
    expected = {path.name: path.read_bytes() for path in (tmp_path / "new").iterdir()}
    assert len(list((tmp_path / "new").glob("*.tar"))) > 1
    for name in sorted(expected)[2:]:
        (tmp_path / "new" / name).unlink()  # as a kill after the first tar leaves it
    make_shards(str(files), str(tmp_path / "new"), num_workers=2)
    assert {path.name: path.read_bytes() for path in (tmp_path / "new").iterdir()} == expected
    with pytest.raises(ValueError, match="these latents lie in tars already; train with them"):
        make_shards(str(tmp_path / "new"), str(tmp_path / "again"))


def test_every_program_names_the_command(old, tmp_path, capsys, pictures, codec):  # noqa: F811
    _, files, how = old
    advice = f"holds latents in safetensors files, .* python preprocess.py shards --data_path {files} --output TARS"
    with pytest.raises(ValueError, match=f"--data_path {files}: {advice}"):
        build_dataset(str(files), 16, seed=0, **how)
    with pytest.raises(ValueError, match=f"--output {files}: {advice}; or name another folder"):
        make(pictures, codec, files)
    assert preprocess.main(["look", str(files), "--output", str(tmp_path / "look")]) == 2
    assert "python preprocess.py shards --data_path" in capsys.readouterr().err
    (files / "index.json").unlink()
    with pytest.raises(ValueError, match="holds unfinished latents in safetensors files of an earlier version"):
        build_dataset(str(files), 16, seed=0, **how)


def edit(files, number, **entry):
    index = json.loads((files / "index.json").read_text())
    index["shards"][number].update(entry)
    (files / "index.json").write_text(json.dumps(index))


def shorten(files, path):
    path.write_bytes(path.read_bytes()[:-1])


def drop(files, path, **changed):
    tensors = {name: value for name, value in (load_file(path) | changed).items() if value is not None}
    save_file(tensors, path, {"opendit": as_metadata(path)})


def as_metadata(path):
    size = int.from_bytes(path.read_bytes()[:8], "little")
    return json.loads(path.read_bytes()[8 : 8 + size])["__metadata__"]["opendit"]


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda files, path: path.unlink(), "00001-of-99999.safetensors is missing or damaged"),
        (shorten, "00001-of-99999.safetensors is missing or damaged"),
        (lambda files, path: edit(files, 1, sha256="0" * 64), "is damaged: its checksum is not the index's"),
        (lambda files, path: drop(files, path, labels=None), "is damaged: KeyError: 'labels'"),
        (lambda files, path: drop(files, path, rows=torch.arange(99)), "is damaged: ValueError: zip"),
    ],
)
def test_damage_is_named(old, tmp_path, spoil, says):
    _, files, _ = old
    spoil(files, sorted(files.glob("latents-*.safetensors"))[1])
    with pytest.raises(DataError, match=says):
        make_shards(str(files), str(tmp_path / "new"), num_workers=1)
    assert not (tmp_path / "new" / "index.json").exists()
