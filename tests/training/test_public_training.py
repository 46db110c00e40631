"""Training of public models by train.py, from the folder of a pipeline to a picture and to a folder that diffusers
loads: tiny FLUX.1, Z-Image and Wan 2.1."""

import json

import numpy as np
import pytest
from PIL import Image

import train
from opendit.data.size_cache import FOLDER
from opendit.data.video_file import write_mp4
from tests.encoders.published_folders import write_pipeline

FAMILIES = ("flux", "z_image", "wan")
SIZES = {"z_image": {"dim": 48, "n_heads": 6, "n_kv_heads": 6}}  # an MLP that two ranks can divide
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
    """Return a folder with the pipeline of every family, and with pictures and clips of equal and unequal sizes."""
    root, random = tmp_path_factory.mktemp("public"), np.random.default_rng(0)
    for name in FAMILIES:
        write_pipeline(root / name, name, **SIZES.get(name, {}))
    for kind, sides in (("equal", [(64, 64)] * 8), ("unequal", [(64, 64), (48, 80), (32, 32), (64, 32)] * 3)):
        for suffix in ("png", "mp4"):
            rows = ["path,text"]
            for number, size in enumerate(sides):
                path = root / f"{kind}-{number}.{suffix}"
                if suffix == "png":
                    Image.fromarray(random.integers(0, 256, (*size, 3), np.uint8)).save(path)
                else:
                    half = tuple(side // 2 for side in size)
                    write_mp4(path, random.integers(0, 256, (6, *half, 3), np.uint8), 8)
                rows.append(f'{path.name},"{WORDS[number % 4]}"')
            (root / f"{kind}-{suffix}.csv").write_text("\n".join(rows) + "\n")
    return root


def flags_of(folders, name, data="equal", *, load=False):
    """Return the flags of a run of a family; ``load``: of one that goes on without --pretrained."""
    folder = folders / name
    clips = "--use_video --num_frames 5 --image_size 32" if name == "wan" else "--image_size 64"
    found = (
        f"--data_path {folders}/{data}-{'mp4' if name == 'wan' else 'png'}.csv {clips} --num_workers 0 --log_every 1 "
        "--warmup_steps 0 --lr 1e-3 --sample_every 0 --ckpt_every 0 --global_seed 5 --mixed_precision fp32 "
        "--label_drop 0.2 --max_text_tokens 48"
    )
    start = f"--vae {folder}/vae --text_encoder {folder}" if load else f"--pretrained {folder}"
    return [*found.split(), *start.split()]


def run(folders, name, outputs, *more, steps=STEPS, data="equal", load=False):
    """Train, and return the run's folder."""
    argv = [*flags_of(folders, name, data, load=load), "--outputs", str(outputs), "--max_steps", str(steps), *more]
    train.main(argv)
    return sorted(outputs.glob("0*"))[-1]


def losses(folder):
    return [json.loads(line)["loss"] for line in (folder / "log.jsonl").read_text().splitlines()]
