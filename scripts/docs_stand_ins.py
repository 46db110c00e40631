"""Make stand-ins for the files of a reader, so that the commands of the documentation pages can be run.

The stand-ins are small pictures, clips, tables and runs made from the built-in digits, and encoders with random weights
instead of the hub's encoders.
"""

import csv
import io
import itertools
import json
import shutil
import tarfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from PIL import Image

SIDE = 64
PICTURES = 100
CAPTIONS = ("a seven moving left", "a three moving up", "a zero moving right", "a four moving down")
SMALL_RUN = "--max_steps 1 --batch_size 2 --num_workers 0 --sample_steps 2".split()
CLIP_FLAGS = "--use_video --num_frames 16 --frame_interval 3 --image_size 256".split()
Maker = Callable[["StandIns", Path], None]
MAKERS: dict[str, tuple[str, Maker]] = {}  # name -> ending of the file's name, function that makes the file


def maker(ending: str = "") -> Callable[[Maker], Maker]:
    """Register a function that makes the stand-in with the function's name, plus ``ending`` as its file name."""

    def register(make: Maker) -> Maker:
        MAKERS[make.__name__] = ending, make
        return make

    return register


class StandIns:
    """The stand-ins in a folder. Each stand-in is made when it is first requested.

    Args:
        run: function that runs a command of the repository.
    """

    def __init__(self, folder: Path, run: Callable[[list[str]], None]):
        self.folder, self.run = folder, run
        folder.mkdir(parents=True, exist_ok=True)

    def at(self, name: str) -> Path:
        ending, make = MAKERS[name]
        path = self.folder / f"{name}{ending}"
        if not path.exists():
            make(self, path)
        return path

    def train(self, path: Path, *flags: str) -> None:
        """Train for one step on a batch of two samples, with the run folder at ``path``."""
        outputs = path.with_name(f"{path.name}_outputs")
        shutil.rmtree(outputs, ignore_errors=True)
        self.run(["python", "train.py", *flags, *SMALL_RUN, "--outputs", str(outputs)])
        next(outputs.glob("000-*")).rename(path)


def write_table(path: Path, media: list[Path]) -> None:
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["path", "text"])
        table.writerows(zip(map(str, media), itertools.cycle(CAPTIONS)))


@maker()
def pictures(here: StandIns, path: Path) -> None:
    from sklearn.datasets import load_digits

    for number, digit in enumerate(cast(Any, load_digits()).images[:PICTURES]):
        file = path / ("cat", "dog")[number % 2] / f"{number:04d}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((digit * 15.9).astype(np.uint8)).convert("RGB").resize((SIDE, SIDE)).save(file)


@maker(".png")
def picture(here: StandIns, path: Path) -> None:
    Image.open(next(here.at("pictures").rglob("*.jpg"))).save(path)


@maker()
def demo(here: StandIns, path: Path) -> None:
    words = ["python", "preprocess.py", "demo", "--output", str(path), "--clips", "12", "--size", "256"]
    here.run(words)


@maker()
def clips(here: StandIns, path: Path) -> None:
    shutil.copytree(here.at("demo"), path, ignore=shutil.ignore_patterns("*.csv"))
    for number, clip in enumerate(sorted(path.rglob("*.mp4"))):
        clip.with_suffix(".txt").write_text(CAPTIONS[number % len(CAPTIONS)])


@maker(".mp4")
def clip(here: StandIns, path: Path) -> None:
    shutil.copy(next(here.at("demo").rglob("*.mp4")), path)


@maker(".csv")
def table(here: StandIns, path: Path) -> None:
    write_table(path, sorted(here.at("demo").rglob("*.mp4")))


@maker(".csv")
def captioned(here: StandIns, path: Path) -> None:
    write_table(path, sorted(here.at("pictures").rglob("*.jpg"))[20:])


@maker(".csv")
def others(here: StandIns, path: Path) -> None:
    write_table(path, sorted(here.at("pictures").rglob("*.jpg"))[:20])


@maker(".csv")
def mixed(here: StandIns, path: Path) -> None:
    write_table(path, sorted(here.at("demo").rglob("*.mp4")) + sorted(here.at("pictures").rglob("*.jpg"))[:12])


@maker(".txt")
def prompts(here: StandIns, path: Path) -> None:
    path.write_text("\n".join(CAPTIONS) + "\n")


@maker()
def tars(here: StandIns, path: Path) -> None:
    path.mkdir()
    files = sorted(here.at("pictures").rglob("*.jpg"))
    for number in range(2):
        with tarfile.open(path / f"{number:06d}.tar", "w") as tar:
            for file in files[number::2]:
                tar.add(file, file.name)


@maker()
def latent_tars(here: StandIns, path: Path) -> None:
    """Write a tar of latents of 256-pixel pictures, in the format that other programs write."""
    path.mkdir()
    random = np.random.default_rng(0)
    with tarfile.open(path / "000000.tar", "w") as tar:
        for number in range(PICTURES):
            content = io.BytesIO()
            np.savez(content, moments=random.normal(0, 0.5, (8, 32, 32)).astype(np.float16))
            for ending, member in (("npz", content.getvalue()), ("cls", str(number % 2).encode())):
                info = tarfile.TarInfo(f"{number:04d}.{ending}")
                info.size = len(member)
                tar.addfile(info, io.BytesIO(member))


@maker()
def energon(here: StandIns, path: Path) -> None:
    """Write an energon data set without a sample type (CrudeWebdataset), as ``energon prepare`` does, with JSON
    captions."""
    notes = path / ".nv-meta"
    notes.mkdir(parents=True)
    files = sorted(here.at("pictures").rglob("*.jpg"))
    (notes / ".info.json").write_text(json.dumps({"shard_counts": {"0.tar": len(files)}}))
    (notes / "split.yaml").write_text("split_parts: {train: [0.tar], val: [], test: []}\nexclude: []\n")
    (notes / "dataset.yaml").write_text("__module__: megatron.energon\n__class__: CrudeWebdataset\n")
    with tarfile.open(path / "0.tar", "w", format=tarfile.USTAR_FORMAT) as tar:
        for number, file in enumerate(files):
            caption = CAPTIONS[number % len(CAPTIONS)]
            captions = json.dumps({"caption": caption, "captions": {"en": caption}}).encode()
            for ending, content in (("jpg", file.read_bytes()), ("json", captions)):
                info = tarfile.TarInfo(f"{file.stem}.{ending}")
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))


@maker(".yaml")
def metadataset(here: StandIns, path: Path) -> None:
    """Write an energon metadataset that contains the folder ``coyo`` next to it."""
    words = {"__module__": "megatron.energon", "__class__": "MetadatasetV2", "splits": {"train": {"path": "./coyo"}}}
    path.write_text(json.dumps(words))  # JSON is valid YAML


@maker(".csv")
def many(here: StandIns, path: Path) -> None:
    write_table(path, sorted(here.at("demo").rglob("*.mp4")) * 1000)


@maker()
def more(here: StandIns, path: Path) -> None:
    shutil.copytree(here.at("pictures"), path)
    (path / "dog").rename(path / "hound")


@maker(".safetensors")
def weights(here: StandIns, path: Path) -> None:
    words = ["python", "-m", "opendit.export", "opendit", "--ckpt", str(here.at("meta")), "--model", "DiT-Ti/2"]
    here.run([*words, "--output", str(path)])


@maker()
def latents(here: StandIns, path: Path) -> None:
    words = ["python", "preprocess.py", "latents", "--data_path", str(here.at("pictures")), "--output", str(path)]
    here.run([*words, "--num_workers", "0"])


@maker()
def imagenet(here: StandIns, path: Path) -> None:
    shutil.copytree(here.at("pictures"), path)
    (path / "cat").rename(path / "tench")
    (path / "dog").rename(path / "golden retriever")


@maker()
def run(here: StandIns, path: Path) -> None:
    here.train(path, "--model", "DiT-Ti/2", "--num_classes", "1000", "--data_path", str(here.at("imagenet")))


@maker()
def meanflow_run(here: StandIns, path: Path) -> None:
    flags = ["--model", "DiT-Ti/2", "--data_path", str(here.at("pictures")), "--objective", "meanflow"]
    here.train(path, *flags, "--average", "power:0.05,0.10")


@maker()
def lora_run(here: StandIns, path: Path) -> None:
    flags = ["--model", "DiT-Ti/2", "--num_classes", "1000", "--data_path", str(here.at("latents"))]
    here.train(path, *flags, "--pretrained", str(here.at("run")), "--lora", "4")


@maker()
def clips_run(here: StandIns, path: Path) -> None:
    flags = ["--model", "vDiT-Ti/222", "--data_path", str(here.at("table")), "--given_frames", "random"]
    here.train(path, *flags, *CLIP_FLAGS)


@maker()
def digits_run(here: StandIns, path: Path) -> None:
    here.train(path, "--recipe", "digits")


@maker()
def digits_run_with_samples(here: StandIns, path: Path) -> None:
    shutil.copytree(here.at("digits_run"), path)
    shutil.copy(here.at("digits_samples"), path / "digits.npz")


@maker()
def digits_clips_run(here: StandIns, path: Path) -> None:
    here.train(path, "--recipe", "digits_video", "--data_path", str(here.at("table")), "--global_batch_size", "2")


@maker(".npz")
def digits_samples(here: StandIns, path: Path) -> None:
    words = ["python", "sample.py", "--ckpt", str(here.at("digits_run")), "--num_samples", "40", "--npz", str(path)]
    here.run([*words, "--num_sampling_steps", "2", "--output", str(path.with_name("drawn"))])


@maker(".npz")
def samples(here: StandIns, path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (24, SIDE, SIDE, 3), dtype=np.uint8)
    np.savez(path, arr_0=noise, arr_1=np.arange(24) % 2)


@maker(".npz")
def reference(here: StandIns, path: Path) -> None:
    """Write statistics of random features in the format of ADM's files, for the stand-in for Inception."""
    generator = np.random.default_rng(1)
    values = {}
    for suffix, width in (("", FEATURES), ("_s", SPATIAL)):
        features = generator.normal(size=(4 * width, width))
        values[f"mu{suffix}"], values[f"sigma{suffix}"] = features.mean(0), np.cov(features, rowvar=False)
    np.savez(path, **values, arr_0=generator.integers(0, 256, (40, SIDE, SIDE, 3), dtype=np.uint8))


@maker(".pt")
def meta(here: StandIns, path: Path) -> None:
    words = ["python", "-m", "opendit.export", "meta", "--ckpt", str(here.at("run")), "--output", str(path)]
    here.run(words)


@maker()
def diffusers(here: StandIns, path: Path) -> None:
    words = ["python", "-m", "opendit.export", "diffusers", "--ckpt", str(here.at("run")), "--output", str(path)]
    here.run(words)


@maker()
def vision_encoder(here: StandIns, path: Path) -> None:
    """Write a small DINOv2 with random weights."""
    from transformers import Dinov2Config, Dinov2Model

    config = Dinov2Config(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, image_size=SIDE, patch_size=4)
    Dinov2Model(config).save_pretrained(path)


FEATURES, SPATIAL = 12, 20


class Inception(torch.nn.Module):
    """Stand-in with the interface of TorchScript's Inception. Its features are random projections of a few pixels."""

    def __init__(self):
        super().__init__()
        self.mixing = torch.nn.Parameter(torch.randn(48, FEATURES, generator=torch.Generator().manual_seed(0)))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        x = torch.nn.functional.adaptive_avg_pool2d(x.float() / 127.5 - 1, (4, 4)).flatten(1)
        pool = torch.tanh(x @ self.mixing / 4)
        return {"pool": pool, "spatial": x[:, :20].contiguous(), "logits": pool[:, :10]}


def save_encoders(hub: Path, torch_home: Path) -> None:
    """Write small encoders with random weights to the cache folders of the hub's encoders and of Inception."""
    from diffusers import AutoencoderKL
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, T5Config, T5EncoderModel
    from transformers.utils.logging import disable_progress_bar

    from opendit.encoders import text
    from opendit.encoders.vae import HUB

    def snapshot(repository: str, commit: str) -> Path:
        path = hub / f"models--{repository.replace('/', '--')}" / "snapshots" / commit
        path.mkdir(parents=True, exist_ok=True)
        return path

    disable_progress_bar()
    torch.manual_seed(0)
    blocks = dict(down_block_types=["DownEncoderBlock2D"] * 4, up_block_types=["UpDecoderBlock2D"] * 4)
    sizes: dict[str, Any] = dict(
        block_out_channels=[4] * 4, norm_num_groups=2, layers_per_block=1, latent_channels=4, sample_size=256
    )
    vae = AutoencoderKL(**blocks, **sizes, scaling_factor=0.18215)
    for repository, commit in HUB.values():
        vae.save_pretrained(snapshot(repository, commit))

    repository, commit, (_, width, _) = text.HUB["t5"]
    pieces = [
        ("<pad>", 0.0),
        ("</s>", 0.0),
        ("<unk>", 0.0),
        *((letter, -5.0) for letter in "▁abcdefghijklmnopqrstuvwxyz"),
    ]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=2))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    special = {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(snapshot(repository, commit))
    config = T5Config(vocab_size=len(pieces), d_model=width, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
    T5EncoderModel(config).save_pretrained(snapshot(repository, commit))

    checkpoints = torch_home / "hub" / "checkpoints"
    checkpoints.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript, the format of FID's Inception, is deprecated
        torch.jit.script(Inception()).save(str(checkpoints / "inception-2015-12-05.pt"))
