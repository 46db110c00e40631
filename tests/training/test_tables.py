"""Fixed position tables are always computed. Tables in a file are ignored."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

import sample
import train
from opendit.checkpoint.pretrained import load_pretrained, other_tables
from opendit.export.__main__ import main as export
from opendit.models.conditioning import TextConfig
from opendit.models.dit import DiTConfig
from opendit.models.variants import VDiTConfig
from opendit.models.zoo import build_model, empty_model
from tests.checkpoint.test_resume import assert_same_bits
from tests.models.packs import assert_same, samples, with_vectors
from tests.models.test_dit import randomised
from tests.training.test_resume_finds import list_anew

COMMON = (
    "--mixed_precision fp32 --batch_size 4 --num_workers 0 --log_every 1 --sample_every 0 --lr 1e-3 --ckpt_every 1"
).split()
MODELS = {
    "pictures": "--model DiT-Ti/2 --image_size 8 --vae none".split(),
    "clips": (
        "--model vDiT-Ti/122 --data_path mock --image_size 64 --use_video --num_frames 4 --text_encoder bytes"
    ).split(),
}
SPOILT = {
    "rounded": lambda table: table.bfloat16().float(),
    "interpolated": lambda table: F.interpolate(table[:, ::2].mT, table.shape[1], mode="linear").mT.contiguous(),
}
NAMES = {"pictures": ["pos_embed"], "clips": ["pos_embed", "temporal_embed", "text_encoder.positions"]}


def run_to(steps: int, outputs: Path, *flags: str) -> Path:
    train.main([*COMMON, *flags, "--max_steps", str(steps), "--outputs", str(outputs)])
    (run,) = outputs.iterdir()
    return run / "checkpoints"


def losses(checkpoints: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (checkpoints.parent / "log.jsonl").read_text().splitlines()]


def spoil(source: Path, target: Path, names: list[str], how) -> Path:
    """Write a copy of a weights file with other tables."""
    with safe_open(source, "pt") as file:
        metadata = file.metadata()
    state = load_file(source)
    for name in names:
        state[name] = how(state[name])
    save_file(state, target, metadata=metadata)
    return target


@pytest.fixture(scope="module")
def bases(tmp_path_factory) -> dict[str, Path]:
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            patch.delenv(name, raising=False)
        for name, flags in MODELS.items():
            found[name] = run_to(1, tmp_path_factory.mktemp(name), *flags) / "step_0000001" / "model.safetensors"
    return found


@pytest.mark.parametrize("how", SPOILT)
@pytest.mark.parametrize("kind", MODELS)
def test_a_resume_has_the_tables_that_the_run_began_with(kind, how, bases, tmp_path, no_ranks, capsys):
    file = spoil(bases[kind], tmp_path / "base.safetensors", NAMES[kind], SPOILT[how])
    flags = [*MODELS[kind], "--pretrained", str(file)]
    whole = run_to(4, tmp_path / "whole", *flags)
    said = [line for line in capsys.readouterr().out.splitlines() if "is not the computed one" in line]
    assert [line.split()[4] for line in said] == NAMES[kind] and all(str(file) in line for line in said)
    run_to(2, tmp_path / "parts", *flags)
    parts = run_to(4, tmp_path / "parts", *MODELS[kind], "--load", "latest")
    assert losses(parts) == losses(whole) and len(losses(whole)) == 4
    assert_same_bits(whole / "latest", parts / "latest")
    # A file with the computed tables starts the same run.
    capsys.readouterr()
    assert losses(run_to(1, tmp_path / "plain", *MODELS[kind], "--pretrained", str(bases[kind]))) == losses(whole)[:1]
    assert "is not the computed one" not in capsys.readouterr().out


def test_a_checkpoint_with_other_tables_says_so_where_it_goes_on_and_where_it_is_drawn(
    bases, tmp_path, no_ranks, capsys
):
    checkpoints = run_to(1, tmp_path / "runs", *MODELS["pictures"])
    folder = checkpoints / "step_0000001"
    for name in ("model.safetensors", "ema.safetensors"):
        spoil(folder / name, folder / name, ["pos_embed"], SPOILT["rounded"])
    list_anew(folder)
    capsys.readouterr()
    how = ["--class_labels", "1", "--cfg_scale", "1", "--num_sampling_steps", "1", "--output", str(tmp_path / "drawn")]
    sample.main(["--ckpt", str(folder), *how])
    assert capsys.readouterr().out.count("its table pos_embed is not the computed one") == 1
    run_to(2, tmp_path / "runs", *MODELS["pictures"], "--load", "latest")
    assert capsys.readouterr().out.count("its table pos_embed is not the computed one") == 1
    fixed = load_file(checkpoints / "step_0000002" / "ema.safetensors")
    loaded, _ = load_pretrained(folder)
    assert not other_tables(loaded.config, fixed)
    assert not other_tables(loaded.config, dict(loaded.named_buffers()))


def test_exports_hold_the_computed_tables(bases, tmp_path, capsys):
    file = spoil(bases["clips"], tmp_path / "base.safetensors", NAMES["clips"], SPOILT["rounded"])
    export(["opendit", "--ckpt", str(file), "--output", str(tmp_path / "out.safetensors")])
    assert capsys.readouterr().out.count("is not the computed one") == 3
    found, wanted = load_file(tmp_path / "out.safetensors"), load_file(bases["clips"])
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


CONFIGS = {
    "pictures": (DiTConfig((8, 8), 2, 3, 48, 2, 2, num_classes=3), [(8, 8), (8, 8)], [(12, 10), (8, 8), (4, 6)]),
    "clips": (
        VDiTConfig((4, 8, 8), (2, 2, 2), 3, 48, 2, 2, text=TextConfig("bytes", 8, 5, True)),
        [(4, 8, 8), (4, 8, 8)],
        [(6, 8, 10), (4, 8, 8), (1, 12, 4)],
    ),
}


def with_other_tables(model) -> dict[str, Tensor]:
    names = dict(model.named_buffers())
    return {name: SPOILT["rounded"](t) if name in names else t.clone() for name, t in model.state_dict().items()}


@pytest.mark.parametrize("assign", (False, True))
@pytest.mark.parametrize("kind", CONFIGS)
def test_packs_of_any_shapes_are_the_plain_path(kind, assign):
    """The model is loaded from a state dict with other tables, which must not change."""
    config, one_shape, several = CONFIGS[kind]
    torch.manual_seed(0)
    model = with_vectors(randomised(build_model(config)))
    state = with_other_tables(model)
    before = {name: tensor.clone() for name, tensor in state.items()}
    loaded = build_model(config)
    loaded.load_state_dict(state, assign=assign)
    assert all(torch.equal(state[name], tensor) for name, tensor in before.items())
    assert all(torch.equal(a, b) for a, b in zip(loaded.buffers(), model.buffers(), strict=True))
    for sizes in (one_shape, several):
        given = samples(config, sizes)
        assert_same(given.packed(loaded.double(), padding=3), given.one_by_one(model.double()), 1e-6)
        loaded.float(), model.float()


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_table_of_another_size_has_the_same_rows(kind):
    config = CONFIGS[kind][0]
    model = build_model(config)
    grid = config.grid
    larger = model.positions((*grid[:-2], grid[-2] + 1, grid[-1] + 2))
    rows = larger.view(*grid[:-2], grid[-2] + 1, grid[-1] + 2, -1)[..., : grid[-2], : grid[-1], :]
    assert torch.allclose(rows.reshape(1, -1, larger.shape[-1]), model.positions(grid), atol=1e-7)


def test_a_model_of_the_meta_device_gets_them(tmp_path):
    config = CONFIGS["clips"][0]
    assert not other_tables(config, dict(empty_model(config, parameters=False).named_buffers()))
    with torch.device("meta"):
        model = build_model(config)
    model.load_state_dict(with_other_tables(randomised(build_model(config))), assign=True)
    assert not other_tables(config, {name: table for name, table in model.named_buffers() if not table.is_meta})
