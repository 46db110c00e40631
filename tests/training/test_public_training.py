"""train.py on tiny public models, from a pipeline's folder to pictures and to a folder that diffusers loads."""

import hashlib
import json
import re
import shutil
from dataclasses import replace

import huggingface_hub
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import opendit
import preprocess
import sample
import train
from opendit.checkpoint.pretrained import read_info
from opendit.common import hub
from opendit.config.architectures import commit_of_run
from opendit.config.command_line import parse
from opendit.config.names import PLUGINS
from opendit.config.train import TrainConfig
from opendit.data.row_arrays import FOLDER
from opendit.data.video_files import write_mp4
from opendit.diffusion.objectives import objective_from_dict
from opendit.diffusion.objectives.flow import FlowObjective
from opendit.diffusion.random import initial_noise
from opendit.encoders.conditioner import PublishedConditioner
from opendit.encoders.published_text import load_published_text
from opendit.export.__main__ import main as export
from opendit.models.conditioning import TextConfig
from opendit.models.families.public_config import family_of, public_config
from opendit.parallel.hardware import H200
from opendit.training.auto_parallel import Circumstances, data_of
from opendit.training.data_plan import fit_captions, open_data, shape_samples, text_before
from opendit.training.memory import Setup, estimate, largest_batch, parts
from opendit.training.micro_batch import MicroBatch
from opendit.training.model_plan import encoder_bytes, plan_model
from tests.encoders.published_folders import write_pipeline
from tests.models.packs import unpack_patches
from tests.numbers import off_by
from tests.ranks import run_ranks, several_programs
from train import EagerPasses

FAMILIES = ("flux", "z_image", "wan", "qwen_image", "flux2_klein")
SIZES = {"z_image": {"dim": 48, "n_heads": 6, "n_kv_heads": 6}}  # two ranks can divide this MLP
STEPS = 4
WORDS = ("seven", "a seven of many words, and so of more than thirty two tokens", "", "one")


@pytest.fixture(scope="module", autouse=True)
def sizes(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER, str(tmp_path_factory.mktemp("sizes")))
        patch.setattr("opendit.parallel.supervisor.close_mesh", lambda: None)
        yield


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return a folder with every family's pipeline, and with pictures and clips of equal and unequal sizes."""
    return write_folders(tmp_path_factory.mktemp("public"), FAMILIES)


def write_folders(root, families):
    """Write and return such a folder with these families."""
    random = np.random.default_rng(0)
    for name in families:
        write_pipeline(root / name, name, **SIZES.get(name, {}))
    for kind, sides in (("equal", [(64, 64)] * 8), ("unequal", [(64, 64), (48, 80), (32, 32), (64, 32)] * 3)):
        for suffix in ("png", "mp4"):
            rows = ["path,text"]
            for number, size in enumerate(sides):
                path = root / f"{kind}-{number}.{suffix}"
                if suffix == "png":
                    Image.fromarray(random.integers(0, 256, (*size, 3), np.uint8)).save(path)
                else:
                    write_mp4(path, random.integers(0, 256, (6, *size, 3), np.uint8), 8)
                rows.append(f'{path.name},"{WORDS[number % 4]}"')
            (root / f"{kind}-{suffix}.csv").write_text("\n".join(rows) + "\n")
    return root


def flags_of(folders, name, data="equal", *, load=False):
    """Return a family's flags. With ``load``, they are for resuming; the run knows its base, VAE and text encoders."""
    folder = folders / name
    clips = "--use_video --num_frames 5 --image_size 32" if name == "wan" else "--image_size 64"
    found = (
        f"--data_path {folders}/{data}-{'mp4' if name == 'wan' else 'png'}.csv {clips} --num_workers 0 --log_every 1 "
        "--warmup_steps 0 --lr 1e-3 --sample_every 0 --ckpt_every 0 --global_seed 5 --mixed_precision fp32 "
        "--label_drop 0.2 --max_text_tokens 48"
    )
    return [*found.split(), *([] if load else ["--pretrained", str(folder)])]


def run(folders, name, outputs, *more, steps=STEPS, data="equal", load=False):
    """Train, and return the run's folder."""
    argv = [*flags_of(folders, name, data, load=load), "--outputs", str(outputs), "--max_steps", str(steps), *more]
    train.main(argv)
    return sorted(outputs.glob("0*"))[-1]


def losses(folder):
    return [json.loads(line)["loss"] for line in (folder / "log.jsonl").read_text().splitlines()]


class Runs(dict):
    """Runs by family. Each run is made when it is first needed."""

    def __init__(self, make):
        self.make = make

    def __missing__(self, name):
        self[name] = self.make(name)
        return self[name]


@pytest.fixture(scope="module")
def whole(folders, tmp_path_factory):
    """Return every family's run in one process. A step is an epoch of the same eight samples."""
    how = f"--batch_size 8 --ckpt_every {STEPS // 2}".split()
    return Runs(lambda name: run(folders, name, tmp_path_factory.mktemp(name), *how))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_run_resumes_bit_for_bit_with_and_without_its_folder(folders, whole, name, tmp_path, capsys):
    half = STEPS // 2
    run(folders, name, tmp_path, "--batch_size", "8", steps=half)
    again = run(folders, name, tmp_path, "--batch_size", "8", "--load", "latest", steps=half + 1)
    run(folders, name, tmp_path, "--batch_size", "8", "--load", str(again), load=True)
    assert "note: resume" not in capsys.readouterr().out
    assert losses(again) == losses(whole[name])
    for file in ("model", "ema", "optimizer_000"):
        one, other = (load_file(each / f"checkpoints/latest/{file}.safetensors") for each in (whole[name], again))
        assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one), file


@pytest.mark.parametrize("name", FAMILIES)
def test_a_checkpoint_holds_the_published_configuration(folders, whole, name):
    info = read_info(whole[name] / "checkpoints/latest/ema.safetensors")
    published = json.loads((folders / name / "transformer/config.json").read_text())
    assert info["config"]["published"] == published and info["config"]["max_tokens"] == 48
    assert (
        info["model"] == f"{name}/{name}"
        and info["objective"] == read_info(folders / name / "model_index.json")["objective"]
    )


def test_a_set_is_learned_by_heart(folders, tmp_path):
    """The held-out losses at fixed noise are of the training samples here."""
    data = tmp_path / "same.csv"
    data.write_text((folders / "equal-png.csv").read_text().replace("equal-", f"{folders}/equal-"))
    more = f"--batch_size 8 --lr 1e-2 --validate_path {data} --validate_every 20 --ema_decay 0.5 --sample_every 20"
    found = run(folders, "z_image", tmp_path / "out", *more.split(), "--sample_steps", "2", steps=40)
    lines = [json.loads(line) for line in (found / "log.jsonl").read_text().splitlines()]
    held_out = [line["val_loss"] for line in lines if line.get("val_loss")]
    first, last = (np.mean([line["loss"] for line in part]) for part in (lines[:5], lines[-5:]))
    assert len(held_out) == 2 and held_out[1] < held_out[0] and last < 0.9 * first, (first, last, held_out)
    assert [path.name for path in sorted((found / "samples").iterdir())] == ["0000020.png", "0000040.png"]


WAYS = {
    "zero2": "--batch_size 4",
    "tensor": "--batch_size 8 --tensor_parallel_size 2",
    "sequence": "--batch_size 8 --sequence_parallel_size 2",
    "pipeline": "--batch_size 4 --grad_accumulation 2 --pipeline_parallel_size 2",
}
DRAWN = "--sample_every 4 --sample_steps 2"
# Captions of Z-Image vary in length, and pipeline stages have to agree on it. Packs use fsdp.
JOBS = [
    *((name, way, WAYS[way], "equal") for way in ("zero2", "tensor", "sequence") for name in ("z_image", "wan")),
    ("wan", "pipeline", WAYS["pipeline"], "equal"),
    ("flux", "tensor", WAYS["tensor"], "equal"),
    ("flux", "pipeline", f"{WAYS['pipeline']} {DRAWN}", "equal"),
    ("z_image", "pipeline and grids", f"{WAYS['pipeline']} {DRAWN}", "equal"),
    ("wan", "packs", "--pack_tokens 16 --plugin fsdp", "unequal"),
    ("wan", "packs in sequence", "--pack_tokens 16 --grad_accumulation 2 --sequence_parallel_size 2", "unequal"),
    ("z_image", "packs", "--pack_tokens 192 --plugin fsdp", "unequal"),
]


def programs(mesh, folders, outputs) -> None:
    several_programs()
    for name, way, more, data in JOBS:
        run(folders, name, outputs / f"{name}, {way}", *more.split(), data=data)


# Captions of FLUX.1 and Z-Image are tokens in the packs: 48, or 64 a sample when filled to a multiple of 32.
PACKS = {
    "wan": "--pack_tokens 16 --grad_accumulation 2",
    "flux": "--pack_tokens 192 --grad_accumulation 2",
    "z_image": "--pack_tokens 192 --grad_accumulation 2",
    "qwen_image": "--pack_tokens 192 --grad_accumulation 2",
    "flux2_klein": "--pack_tokens 160 --grad_accumulation 2",
}


@pytest.fixture(scope="module")
def packed(folders, tmp_path_factory):
    """Return every family's run on packs in one process."""
    return Runs(lambda name: run(folders, name, tmp_path_factory.mktemp("packs"), *PACKS[name].split(), data="unequal"))


def test_two_ranks_have_the_curve_of_one(folders, whole, packed, tmp_path):
    run_ranks(2, programs, folders, tmp_path)
    for name, way, more, _ in JOBS:
        (found,) = (tmp_path / f"{name}, {way}").glob("0*")
        wanted = losses((packed if "packs" in way else whole)[name])
        assert len(losses(found)) == STEPS and off_by(losses(found), wanted) < 2e-5, (name, way)
        assert len([*found.glob("samples/*.png")]) == (DRAWN in more), (name, way)


@pytest.mark.parametrize("name", FAMILIES)
def test_packs_have_the_curve_of_samples_one_by_one(folders, packed, name, tmp_path, monkeypatch):
    sizes = []

    def one_by_one(self, pack):
        found = []
        patches = (unpack_patches(x, pack.segments) for x in (pack.x0, pack.noise))
        for number, (x0, noise) in enumerate(zip(*patches, strict=True)):
            rows = slice(number, number + 1)
            found.append(true_losses(self, MicroBatch(x0[None], pack.t[rows], noise[None], pack.condition[rows])))
            sizes.append(tuple(x0.shape))
        return torch.cat(found)

    true_losses = EagerPasses.losses
    monkeypatch.setattr(EagerPasses, "losses", one_by_one)
    alone = run(folders, name, tmp_path, *PACKS[name].split(), data="unequal")
    assert len(set(sizes)) > 1 and len(sizes) > 2 * STEPS, sizes
    assert off_by(losses(packed[name]), losses(alone)) < 1e-5


@pytest.mark.parametrize("name", ["flux", "z_image"])
def test_pictures_of_unequal_sizes_are_trained_by_buckets(folders, tmp_path, name, monkeypatch):
    """A micro-batch has one size. FLUX.1's times are shifted by the number of tokens."""
    seen, times = [], FlowObjective.times

    def of(self, seed, step, index, tokens=None):
        seen.extend(tokens)
        return times(self, seed, step, index, tokens)

    monkeypatch.setattr(FlowObjective, "times", of)
    found = run(folders, name, tmp_path, "--bucket_tokens", "32", data="unequal")
    assert all(0.1 < loss < 10 for loss in losses(found)) and len(set(seen)) > 1
    objective = objective_from_dict(read_info(found / "checkpoints/latest/ema.safetensors")["objective"])
    few, many = (objective.times(0, 0, torch.arange(4), [number] * 4) for number in (256, 4096))
    assert (many > few).all() == (name == "flux")


def test_a_dropped_caption_is_the_empty_one(folders):
    """Z-Image's captions are not padded, and the empty caption is shorter than most."""
    for name in FAMILIES:
        text = family_of(name).text
        encoder = load_published_text(folders / name, family_of(name), device="cpu", max_tokens=48)
        config = TextConfig(name, encoder.width, 48, cross_attention=name == "wan")
        conditioner = PublishedConditioner(config, torch.device("cpu"), encoder, 3.5 if text.pooled else None)
        y, null = conditioner.encode(["a seven, seven", "one"]), conditioner.encode([""])
        dropped = conditioner.drop(y, torch.tensor([True, False]))
        for field, own, empty in zip(dropped.tensors(), y.tensors(), null.padded(y.shape[1]).tensors(), strict=True):
            assert torch.equal(field[1], own[1]) and torch.equal(field[:1], empty)


def pixels_of(drawn):
    return np.stack([np.asarray(picture) for picture in drawn]).astype(int)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_run_is_drawn_from_and_exported(folders, whole, name, tmp_path, capsys):
    """sample.py and opendit.load draw the same from the run, and the exported folder holds the run's weights."""
    folder, clips = folders / name, name == "wan"
    encoders = {"vae": str(folder / "vae"), "text_encoder": str(folder)}
    argv = ["diffusers", "--ckpt", str(whole[name]), "--output", str(tmp_path / "tuned")]
    with pytest.raises(SystemExit):
        export(argv)
    assert "error: --base: left out" in capsys.readouterr().err
    export([*argv, "--base", str(folder)])
    how = {"steps": 3, "guidance": 2.0, "seed": 1, **({"frames": 5, "size": 32} if clips else {"size": 64})}
    pipe = opendit.load(whole[name], **encoders)
    drawn = pixels_of(getattr(each, "frames", each) for each in pipe(["seven", "a"], **how))
    tuned = opendit.load(tmp_path / "tuned", **encoders)
    assert tuned.config.published == pipe.config.published
    for key, weight in tuned.model.state_dict().items():
        assert torch.equal(weight, pipe.model.state_dict()[key]), key
    size = "--num_frames 5 --use_video" if clips else ""
    argv = f"--prompt seven a --seed 1 --num_sampling_steps 3 --cfg_scale 2 --npz {tmp_path}/drawn.npz {size}".split()
    for flag, value in encoders.items():
        argv += [f"--{flag}", value]
    sample.main(["--ckpt", str(whole[name]), *argv, "--output", str(tmp_path / "drawn")])
    found = np.load(tmp_path / "drawn.npz")["arr_0"].astype(int)
    assert found.shape == drawn.shape and np.abs(found - drawn).max() <= 1 and found.std() > 1


def test_diffusers_draws_the_same_latents_of_an_exported_run(folders, whole, tmp_path):
    from diffusers import ZImagePipeline

    argv = f"diffusers --ckpt {whole['z_image']} --base {folders}/z_image --output {tmp_path}/tuned"
    export(argv.split())
    theirs = ZImagePipeline.from_pretrained(tmp_path / "tuned")
    pipe = opendit.load(whole["z_image"], vae=str(folders / "z_image/vae"), text_encoder=str(folders / "z_image"))
    ours = []
    settings = {"steps": 3, "guidance": 2.0, "size": 64, "seed": 1}
    pipe(["seven"], **settings, callback=lambda step, latents: ours.append(latents.clone()))
    noise = initial_noise(1, torch.arange(1), (4, 8, 8))
    expected = theirs(
        "seven",
        height=64,
        width=64,
        num_inference_steps=3,
        guidance_scale=2.0,
        latents=noise,
        output_type="latent",
    ).images
    assert (ours[-1] - expected).abs().max() < 1e-4 * expected.abs().max()


@pytest.mark.parametrize("name", FAMILIES)
def test_a_dry_run_plans_a_public_model(folders, name, capsys):
    argv = [*flags_of(folders, name), "--max_steps", "2"]
    train.main([*argv, "--dry_run", "2", "--batch_size", "4"])
    train.main([*argv, "--dry_run", "2", "--parallel", "auto", "--global_batch_size", "8"])
    _, whole, chosen = capsys.readouterr().out.split("nothing was built")
    assert "4 x 2 ranks x 1 micro-batches = 8" in whole and f"{name}/{name}" in chosen
    assert "--plugin" in whole  # the choice is printed before its own figures


def test_plans_look_at_samples_of_the_size_that_the_folder_gives(folders):
    flags = parse(TrainConfig, ["--pretrained", str(folders / "z_image"), "--data_path", "mock"])
    dataset = data_of(flags, Circumstances(1, 1, 1.0, H200, has_gpu=False))
    assert dataset.sample_shape == (8, 128, 128)  # means and deviations at 1024 px


REFUSED = [
    ("flux", "--vae none", "--vae none: has 3 channels, flux/flux takes 4"),
    ("flux", "--vae {root}/wan/vae", "is a AutoencoderKLWan, not an AutoencoderKL"),
    ("z_image", "--data_path digits", "--pretrained: needs captions, and --data_path digits has none; put name.txt"),
    ("flux", "--text_encoder {root}/z_image", "_class_name is 'ZImagePipeline', not FluxPipeline"),
    ("flux", "--text_encoder bytes", "--text_encoder: flux/flux has none of its own; give the folder of its pipeline"),
    ("flux", "--model DiT-S/2", "holds flux/flux; leave the flag out"),
    ("flux", "--model flux/other", "holds flux/flux; leave the flag out"),
    ("flux", "--objective ddpm", "is a flow model; leave the flag out"),
    ("flux", "--cross_attention", "--cross_attention: {root}/flux says itself how its network is built"),
    ("flux", "--max_text_tokens 600", "--max_text_tokens 600: out of range of flux/flux; give 512 at most"),
    ("flux", "--image_size 40", "--image_size 40: does not divide by 16"),
    ("flux", "--use_video --num_frames 5", "takes pictures"),
    ("wan", "--given_frames first", "--given_frames first: wan/wan takes none; leave it out"),
    (
        "z_image",
        "--pack_tokens 64 --max_text_tokens 40",
        "its caption up to 64 more; raise it to 80 at least",
    ),
    ("wan", "--sequence_parallel_type ring --sequence_parallel_size 1 --positions learned", "--positions: "),
]


@pytest.mark.parametrize("name, more, message", REFUSED, ids=lambda part: part if "-" in part else "")
def test_what_does_not_work_is_refused_in_one_line(folders, name, more, message, refusal, tmp_path):
    argv = [*flags_of(folders, name), "--batch_size", "4", "--outputs", str(tmp_path)]
    argv += more.format(root=folders).split()
    assert message.format(root=folders) in refusal(argv)


@pytest.mark.parametrize("more", ["--image_size 256", "--image_size 128 --bucket_tokens 64 --max_upscale 9"])
def test_pictures_larger_than_the_table_of_positions_are_refused(folders, more, refusal, tmp_path):
    folder = write_pipeline(tmp_path / "sd3", "sd3")
    argv = f"--pretrained {folder} --data_path {folders}/unequal-png.csv --batch_size 4 {more} --outputs {tmp_path}/out"
    assert re.search("--image_size: (11|16) patches .* has positions for 8$", refusal(argv.split()))


def test_ranks_do_not_share_packs_with_captions(folders):
    flags, _ = parse(TrainConfig, [*flags_of(folders, "flux"), "--pack_tokens", "192"]).resolve(1, True)
    data = open_data(flags)
    config = plan_model(flags, data).config
    with pytest.raises(ValueError, match="ranks can't share the packs of a model whose captions are tokens"):
        shape_samples(replace(flags, sequence_parallel_size=2), data, config)


def damage_config(folder):
    (folder / "transformer/config.json").write_text('{"_class_name": "FluxTransformer2DModel"}')


def damage_weights(folder):
    path = folder / "transformer/diffusion_pytorch_model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def damage_vae(folder):
    (folder / "vae/config.json").unlink()


def damage_text(folder):
    (folder / "text_encoder_2/model.safetensors").unlink()


@pytest.mark.parametrize(
    "damage, message",
    [
        (damage_config, "transformer/config.json: 'in_channels' is missing"),
        (damage_weights, "transformer/diffusion_pytorch_model.safetensors"),
        (damage_vae, "vae"),
        (damage_text, "text_encoder_2"),
    ],
)
def test_a_damaged_folder_is_refused_in_one_line(folders, damage, message, refusal, tmp_path):
    shutil.copytree(folders / "flux", tmp_path / "flux")
    damage(tmp_path / "flux")
    argv = [*flags_of(folders, "flux"), "--batch_size", "4", "--outputs", str(tmp_path / "out")]
    argv += ["--pretrained", str(tmp_path / "flux")]
    assert message in refusal(argv)


def test_a_name_alone_is_no_model(folders, refusal, tmp_path):
    argv = [*flags_of(folders, "flux", load=True), "--outputs", str(tmp_path), "--model", "flux/flux"]
    for more in ([], ["--load", "latest"]):
        assert "--model flux/flux: is read from a folder; give that to --pretrained" in refusal([*argv, *more])


def test_cuda_graphs_and_recomputed_blocks_on_a_cpu(folders, whole, tmp_path, capsys):
    found = run(folders, "z_image", tmp_path, *"--batch_size 8 --enable_cuda_graph --grad_checkpoint".split())
    assert "off: it needs a CUDA GPU" in capsys.readouterr().out
    assert off_by(losses(found), losses(whole["z_image"])) < 1e-6


def test_a_model_of_the_hub(folders, tmp_path, monkeypatch, capsys):
    """A stub downloads the model once. The run records its origin, and resuming needs neither hub nor flag."""
    commit, asked = "0123456789" * 4, []
    snapshot = tmp_path / "cache/models--some--Flux.1/snapshots" / commit

    def snapshot_download(repository, revision=None, **how):
        asked.append((repository, revision, how.get("local_files_only", False)))
        if not snapshot.exists():
            shutil.copytree(folders / "flux", snapshot)
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.setattr(hub, "probe_hub", lambda endpoint: None)
    hub.download_snapshot.cache_clear()
    flags = [flag for flag in flags_of(folders, "flux") if flag not in ("--pretrained", str(folders / "flux"))]
    flags += ["--outputs", str(tmp_path / "out"), "--batch_size", "8"]
    with pytest.raises(SystemExit):
        train.main([*flags, "--max_steps", "1", "--pretrained", "some/Flux.1"])
    assert "--pretrained some/Flux.1: doesn't exist;" in capsys.readouterr().err and not asked
    train.main([*flags, "--max_steps", "1", "--pretrained", "some/Flux.1", "--download"])
    assert asked == [("some/Flux.1", None, False)]
    (found,) = (tmp_path / "out").iterdir()
    assert found.name == "000-flux-Flux.1"

    def origin():
        state = json.loads((found / "checkpoints/latest/state.json").read_text())
        assert state["fingerprint"]["hub"] == json.loads((found / "config.json").read_text())["hub"]
        return state["fingerprint"]["hub"]

    expected = origin()
    assert (expected["repository"], expected["commit"]) == ("some/Flux.1", commit)
    weights = "transformer/diffusion_pytorch_model.safetensors"
    assert expected["files"][weights] == hashlib.sha256((snapshot / weights).read_bytes()).hexdigest()
    encoders = ["--vae", f"{snapshot}/vae", "--text_encoder", str(snapshot)]
    train.main([*flags, "--max_steps", "2", "--load", str(found), *encoders])
    assert len(asked) == 1 and origin() == expected and len(losses(found)) == 2
    # A run or checkpoint gives the commit if the same model is named again, as with --lora.
    assert commit_of_run(found, "some/Flux.1") == commit_of_run(found / "checkpoints/latest", "some/Flux.1") == commit
    assert commit_of_run(found, "some/Other") is None and commit_of_run(tmp_path, "some/Flux.1") is None
    with pytest.raises(SystemExit):
        sample.main(["--ckpt", "some/Other"])
    assert "--ckpt some/Other: doesn't exist; name a file or folder" in capsys.readouterr().err


def test_encoders_that_stay_stand_in_the_estimate(folders, tmp_path, capsys):
    """Uncached, the estimate has T5 and CLIP in bf16 and the VAE in fp32. Cached, only the VAE, for drawing samples."""

    def held(*more):
        flags = parse(TrainConfig, [*flags_of(folders, "flux"), *more])
        flags, _ = flags.resolve(1, True)
        dataset = open_data(flags)
        flags, _ = fit_captions(flags, dataset, text_before(flags))
        return encoder_bytes(flags, plan_model(flags, dataset).config, dataset)

    def weights(name):
        return sum(
            tensor.numel()
            for path in (folders / "flux" / name).glob("*.safetensors")
            for tensor in load_file(path).values()
        )

    vae, text = 4 * weights("vae"), 2 * (weights("text_encoder") + weights("text_encoder_2"))
    assert held() == text + vae
    source = ["--data_path", str(folders / "equal-png.csv"), "--image_size", "64", "--max_text_tokens", "48"]
    preprocess.main(["latents", "--pretrained", str(folders / "flux"), *source, "--output", str(tmp_path / "cache")])
    cached = "--data_path", str(tmp_path / "cache")
    assert held(*cached) == 0 and held(*cached, "--sample_every", "5") == vae
    config = public_config("flux", json.loads((folders / "flux/transformer/config.json").read_text()))
    for plugin in PLUGINS:
        setup = Setup(plugin=plugin, world=4)
        more = replace(setup, encoders=7 << 30)
        assert estimate(config, more, 2).total - estimate(config, setup, 2).total == 7 << 30
        assert largest_batch(config, more, 80 << 30) <= largest_batch(config, setup, 80 << 30)
    assert "(of text and pixels 7.00)" in parts(estimate(config, more, 2))
