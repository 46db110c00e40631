"""Damaged, swapped, incomplete or forged sharded checkpoints are refused in one line, and the previous one is found."""

import copy
import json
import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from opendit.checkpoint import tensor_set
from opendit.checkpoint.load import find_checkpoint
from opendit.checkpoint.pretrained import read_newest, read_weights
from opendit.checkpoint.save import Checkpoints
from opendit.checkpoint.schema import INDEX_FILE
from opendit.checkpoint.tensor_set import (
    ShardedTensor,
    ShardIndex,
    damage,
    index_from,
    index_text,
    open_set,
    read_index,
    read_manifest,
    write_manifest,
)
from opendit.common.json_models import checked
from opendit.common.tensor_files import open_safetensors, write_tensors
from opendit.config.parallel_sizes import ParallelDims
from opendit.parallel.layout import Shard
from opendit.parallel.mesh import Mesh, init_mesh
from tests.checkpoint.test_shards import MODEL, SETS, counters, engine_with, expected_state, save
from tests.parallel.test_layout import mesh_of
from tests.parallel.test_runs import divided, taken
from tests.ranks import context, free_port, run_ranks

ALONE = mesh_of(ParallelDims(), 0)


def two_steps(mesh: Mesh, folder: Path) -> None:
    state = expected_state()
    save(mesh, folder, "zero2", True, state, step=5)
    save(mesh, folder, "zero2", True, state, step=6)


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> Path:
    """Return a run with sharded checkpoints of steps 5 and 6 from two ranks."""
    folder = tmp_path_factory.mktemp("two") / "000-DiT-Ti-2"
    run_ranks(2, two_steps, folder)
    return folder


@pytest.fixture
def run(two, tmp_path) -> Path:
    return Path(shutil.copytree(two, tmp_path / two.name, symlinks=True))


def found(run: Path, which: str = "") -> Path:
    return find_checkpoint(str(run / which), "", MODEL, ALONE).folder


def refused(run: Path, file: Path) -> None:
    """Check that the newest checkpoint is refused in one line with ``file``, and that the previous one is found."""
    checkpoints = run / "checkpoints"
    newest, before = checkpoints / "step_0000006", checkpoints / "step_0000005"
    with pytest.raises(ValueError) as refusal:
        found(run, "checkpoints/step_0000006")
    message = str(refusal.value)
    assert str(file) in message and f"intact is --load {before}" in message and "\n" not in message, message
    assert found(run) == before
    which = file.name.split("-shard")[0].split(".")[0]
    if which in ("ema", "model"):
        notes: list[str] = []
        assert read_newest(run, which, notes).path == before / f"{which}.shards.json"
        assert str(file) in notes[0] and str(before) in notes[0]
        with pytest.raises(ValueError, match=f"take {before}"):
            read_weights(newest / f"{which}.shards.json")


def reseal(folder: Path) -> None:
    """Write a manifest that matches the changed files, like somebody who changes them on purpose."""
    from opendit.common.utils import sha256_of

    names = read_manifest(folder)
    files = {n: {"bytes": (folder / n).stat().st_size, "sha256": sha256_of(folder / n)} for n in names}
    write_manifest(folder, 3, files)


def test_both_are_intact_and_found(run):
    assert found(run) == run / "checkpoints" / "step_0000006"
    assert found(run, "checkpoints/step_0000005") == run / "checkpoints" / "step_0000005"


@pytest.mark.parametrize("some", [("manifest", "state", "ema.", "ema-"), ("ema_", "exp_avg", "model")], ids=" ".join)
def test_every_file_truncated_flipped_missing_or_of_another_step(run, some):
    newest, before = run / "checkpoints" / "step_0000006", run / "checkpoints" / "step_0000005"
    names = sorted(path.name for path in newest.iterdir())
    assert len(names) == 2 + len(SETS) * 3  # the manifest, the state, and for each set an index and two shards
    for name in (name for name in names if name.startswith(some)):
        path = newest / name
        content = path.read_bytes()
        middle = len(content) // 2
        flipped = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
        for damaged in (content[:-1], flipped, None, (before / name).read_bytes()):
            path.unlink()
            if damaged is not None:
                path.write_bytes(damaged)
            if damaged != content and not (name == "manifest.json" and damaged == (before / name).read_bytes()):
                refused(run, path)
            path.write_bytes(content)
    assert found(run) == newest


def test_a_shard_of_another_step_or_set_is_named_even_under_a_manifest_that_fits(run):
    newest, before = run / "checkpoints" / "step_0000006", run / "checkpoints" / "step_0000005"
    name = "ema-shard-00001-of-00002.safetensors"
    content = (newest / name).read_bytes()
    for other in (before / name, newest / name.replace("ema", "exp_avg")):
        shutil.copy(other, newest / name)
        reseal(newest)
        refused(run, newest / name)
    (newest / name).write_bytes(content)
    for which in ("ema", "exp_avg_sq"):  # a set's index and shards from another step
        kept = {path.name: path.read_bytes() for path in newest.glob(f"{which}[-.]*")}
        for path in before.glob(f"{which}[-.]*"):
            shutil.copy(path, newest)
        reseal(newest)
        with pytest.raises(ValueError, match=f"{which}.shards.json is not the index of step 6"):
            found(run, "checkpoints/step_0000006")
        assert found(run) == before
        for name, content in kept.items():
            (newest / name).write_bytes(content)


FORGED = {
    "a path out of the folder": lambda i: rename(i, "../outside.safetensors"),
    "an absolute path": lambda i: rename(i, "/etc/passwd"),
    "a file that is not listed": lambda i: rename(i, "other.safetensors"),
    "the other's shard": lambda i: shards(i).update(dict(zip(shards(i), reversed(shards(i).values()), strict=True))),
    "a shard twice": lambda i: shards(i).update(dict.fromkeys(shards(i), next(iter(shards(i).values())))),
    "a shard left out": lambda i: shards(i).popitem(),
    "another shape": lambda i: first(i)["shape"].reverse(),
    "a larger shape": lambda i: first(i)["shape"].__setitem__(0, 10**9),
    "another dtype": lambda i: first(i).update(dtype="F16"),
    "a range beyond the end": lambda i: next(iter(shards(i).values()))[0].__setitem__(2, 10**12),
    "a range that ends before it begins": lambda i: next(iter(shards(i).values()))[0].__setitem__(1, 10**6),
    "a dimension that there is not": lambda i: next(iter(shards(i).values()))[0].__setitem__(0, 5),
    "another step": lambda i: i.update(step=5),
    "another set": lambda i: i.update(set="model"),
    "another version": lambda i: i.update(version=2),
    "more than is understood": lambda i: i.update(more=1),
    "no tensors": lambda i: i.update(tensors=[]),
}


def first(index: dict) -> dict:
    return index["tensors"]["blocks.0.attn.qkv.weight"]


def shards(index: dict) -> dict:
    return first(index)["shards"]


def rename(index: dict, name: str) -> None:
    shards(index)[name] = shards(index).pop(next(iter(shards(index))))


@pytest.mark.parametrize("form", FORGED)
def test_a_forged_index_is_refused_under_a_manifest_that_fits(form, run):
    newest = run / "checkpoints" / "step_0000006"
    path = newest / "ema.shards.json"
    index = json.loads(path.read_text())
    FORGED[form](index)
    path.write_text(json.dumps(index))
    (run.parent / "outside.safetensors").write_bytes(b"")
    reseal(newest)
    with pytest.raises(ValueError) as refusal:
        found(run, "checkpoints/step_0000006")
    assert "\n" not in str(refusal.value) and str(newest) in str(refusal.value)
    assert found(run) == run / "checkpoints" / "step_0000005"


def test_a_link_out_of_the_run_is_not_followed(run):
    newest = run / "checkpoints" / "step_0000006"
    shard = newest / "ema-shard-00000-of-00002.safetensors"
    shard.symlink_to(shard.rename(run.parent / "outside.safetensors"))
    refused(run, shard)


def test_values_that_are_not_finite_stop_every_rank(run):
    newest = run / "checkpoints" / "step_0000006"
    shard = newest / "exp_avg-shard-00001-of-00002.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(shard).items()}
    tensors["blocks.1.mlp.fc2.weight"].view(-1)[-1] = float("nan")  # in rank 1's part
    with safe_open(shard, "pt") as file:
        metadata = file.metadata()
    write_tensors(shard, tensors, metadata)
    reseal(newest)
    messages = run_ranks(2, not_finite, newest)
    assert messages[0] == messages[1] and "blocks.1.mlp.fc2.weight is not finite" in messages[0]


def not_finite(mesh: Mesh, checkpoint: Path) -> str:
    from opendit.checkpoint.load import load_checkpoint

    engine, ema = engine_with(mesh, "zero2", None)
    with pytest.raises(FloatingPointError) as stop:
        load_checkpoint(find_checkpoint(str(checkpoint), "", MODEL, mesh), engine, ema)
    return str(stop.value)


# ------------------------------------------------------------------------------------------ the index


def index_of(shape, written) -> ShardIndex:
    shards = {f"f{i}.safetensors": Shard(taken_shape(shape, s), tuple(s)) for i, s in enumerate(written)}
    shards = {file: shard for file, shard in shards.items() if shard.numel}
    return ShardIndex("ema", 3, {"a.weight": ShardedTensor("F32", shape, shards)}, {"format": "pt"})


def taken_shape(shape, slices) -> tuple[int, ...]:
    for dim, ranges in slices:
        length = sum(stop - start for start, stop in ranges)
        shape = (length,) if dim is None else (*shape[:dim], length, *shape[dim + 1 :])
    return shape


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(divided(1))
def test_an_index_is_the_same_when_it_is_written_and_read(case):
    index = index_of(case[0], case[1][0])
    again = index_from(checked(json.loads(index_text(index)), INDEX_FILE, "i"))
    assert again == index and index_text(again) == index_text(index)
    again.check_cover()


@settings(max_examples=300, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(divided(1), st.data())
def test_a_changed_index_is_refused_or_still_a_cover(case, data):
    shape, (written,) = case
    value = json.loads(index_text(index_of(shape, written)))
    entry = value["tensors"]["a.weight"]
    edges = [(cut, i) for cuts in entry["shards"].values() for cut in cuts for i in range(len(cut))]
    edges += [(entry["shape"], i) for i in range(len(entry["shape"]))]
    inner, place = data.draw(st.sampled_from(edges)) if edges else (entry, "dtype")
    new = data.draw(st.sampled_from([None, -1, 0, 1, 2, 7, 2**40, 2**62, 1.0, "0", [], True]))
    assert index_from(checked(copy.deepcopy(value), INDEX_FILE, "i"))  # it is valid before the change
    inner[place] = new
    try:
        index = index_from(checked(value, INDEX_FILE, "i"))
        if sum(index.bytes_in().values()) > 4 * 10**4:  # refused before counting: no file is this large
            raise ValueError("the files are smaller")
        index.check_cover()
    except ValueError:
        return
    tensor = index.tensors["a.weight"]
    held = [taken(torch.arange(tensor.numel).view(tensor.shape).numpy(), s.slices) for s in tensor.shards.values()]
    assert sorted(i for part in held for i in part.tolist()) == list(range(tensor.numel))


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(divided())
def test_files_of_any_division_are_read_in_any_other(tmp_path_factory, case):
    shape, (written, wanted) = case
    folder, index = tmp_path_factory.mktemp("set"), index_of(shape, written)
    full = torch.randn(shape)
    for file, shard in index.tensors["a.weight"].shards.items():
        part = torch.from_numpy(taken(full.numpy(), shard.slices)).view(shard.shape)
        save_file({"a.weight": part.contiguous()}, folder / file, metadata=index.metadata_of(file))
    (folder / "ema.shards.json").write_text(index_text(index))
    with open_set(folder / "ema.shards.json") as tensors:
        tensors.check_files()
        assert torch.equal(tensors["a.weight"], full)
        for slices in wanted:
            shard = Shard(taken_shape(shape, slices), tuple(slices))
            read = tensors.read("a.weight", shard)
            assert read.shape == shard.shape and torch.equal(read, shard.take(full))
    shutil.rmtree(folder)


def test_only_the_files_that_are_needed_are_opened(run, monkeypatch):
    step = run / "checkpoints" / "step_0000006"
    with open_set(step / "model.shards.json") as tensors:
        whole = tensors["blocks.0.mlp.fc1.weight"]
    opened = []

    def open_file(path):
        opened.append(path.name)
        return open_safetensors(path)

    monkeypatch.setattr(tensor_set, "open_safetensors", open_file)
    tensors = open_set(step / "model.shards.json")
    rows = Shard((10, whole.shape[1]), ((0, ((10, 20),)),))  # rows from rank 0's half
    assert torch.equal(tensors.read("blocks.0.mlp.fc1.weight", rows), whole[10:20])
    assert opened == ["model-shard-00000-of-00002.safetensors"]


def test_an_index_of_files_that_are_too_small_is_refused_before_anything_is_counted(run):
    """Column runs need memory for each row, so rows that no file can hold must be refused first."""
    folder = run / "checkpoints" / "step_0000006"
    (folder / "manifest.json").unlink()
    shards = {
        "model-shard-00000-of-00002.safetensors": [[1, 0, 1]],
        "model-shard-00001-of-00002.safetensors": [[1, 1, 2]],
    }
    tensors = {"a": {"dtype": "F32", "shape": [1 << 40, 2], "shards": shards}}
    value = {"version": 1, "set": "model", "step": 6, "metadata": {}, "tensors": tensors}
    (folder / "model.shards.json").write_text(json.dumps(value))
    with pytest.raises(ValueError, match="should hold 4,398,046,511,104 of tensors"):
        read_index(folder / "model.shards.json")


# ------------------------------------------------------------------------------------------ kills


def save_for_ever(rank: int, port: int, folder: Path) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1")
    os.environ["MASTER_PORT"] = str(port)
    torch.set_num_threads(1)
    mesh = init_mesh()
    engine, ema = engine_with(mesh, "zero2", expected_state())
    info = {"model": MODEL, "config": engine.module.config.to_dict()}
    checkpoints = Checkpoints(folder / "checkpoints", engine, ema, info, sharded=True, keep=3)
    for step in range(1, 10_000):
        for name in engine.shapes:  # every number equals the step
            engine.load_master(name, torch.full(engine.shapes[name], float(step)))
        checkpoints.save(counters(step))


@pytest.mark.timeout(600)
def test_ten_kills_leave_the_checkpoint_before_or_the_new_one(tmp_path):
    """Two ranks save repeatedly and are killed at random moments, mostly during a save."""
    rng, inside, checkpoints = random.Random(0), 0, tmp_path / "run" / "checkpoints"
    for kill in range(10):
        port = free_port()
        ranks = [context().Process(target=save_for_ever, args=(r, port, tmp_path / "run")) for r in range(2)]
        for rank in ranks:
            rank.start()
        try:
            newest = max((int(path.name[5:]) for path in checkpoints.glob("step_*")), default=0)
            end = time.monotonic() + 120
            while not any(int(path.name[5:]) >= 2 for path in checkpoints.glob("step_*")) or not any(
                checkpoints.glob(".step_*.incomplete")
            ):
                assert time.monotonic() < end and all(rank.is_alive() for rank in ranks), newest
                time.sleep(0.002)
            time.sleep(rng.random() * 0.05)
            os.kill(ranks[kill % 2].pid, signal.SIGKILL)
        finally:
            for rank in ranks:
                rank.kill()
                rank.join()
        inside += any(checkpoints.glob(".step_*"))
        kept = find_checkpoint(str(tmp_path / "run"), "", MODEL, ALONE)
        assert not kept.damaged and damage(kept.folder) is None
        with open_set(kept.folder / "model.shards.json") as tensors:
            assert all((tensors[n] == kept.state["step"]).all() for n in tensors if n != "pos_embed")
        shutil.rmtree(tmp_path / "run")
    assert inside >= 5
