"""Create data sets that Energon has prepared, and record the samples that Energon reads from them.

    pip install megatron-energon==7.4.1 && python tests/data/energon/make_fixtures.py

The results are in the folder ``prepared``. The tests compare with ``expected.json`` there, so they do not need Energon,
which installs 35 other packages.
"""

import hashlib
import io
import json
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
from PIL import Image

HERE = Path(__file__).parent / "prepared"
SIDE = 8


def png(seed: int) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def write_tar(path: Path, members: list[tuple[str, bytes]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


def energon(folder: Path, *flags: str) -> None:
    words = [sys.executable, "-m", "megatron.energon.cli.main", "prepare", str(folder), "--non-interactive"]
    subprocess.run([*words, "--no-progress", "--num-workers", "1", *flags], check=True, stdout=subprocess.DEVNULL)


def captions() -> None:
    """Write a captioned set with irregular samples.

    It has alternative endings and JSON fields, masks before pictures, samples without a caption or picture, other
    members, tars in folders, an excluded tar and excluded samples.
    """
    folder = HERE / "captions"
    number = 0
    for tar in range(4):
        members = [("__meta__/about.json", b"{}"), ("README", b"no ending")] if tar == 0 else []
        for _ in range(3 + tar):
            key = f"a/{number:03d}"
            members.append((f"{key}.mask.png", png(1000 + number)))
            members.append((f"{key}.{'JPG' if number == 8 else 'jpg' if number % 2 else 'png'}", png(number)))
            text = {"texts": [{"en": f"nested {number}"}]} if number % 3 else {"texts": []}
            if number != 5:
                members.append((f"{key}.json", json.dumps(text).encode()))
            if number % 3 == 0:
                members.append((f"{key}.txt", f"plain {number}".encode()))
            number += 1
        write_tar(folder / "parts" / f"{tar:02d}.tar", members)
    fields = {"image": "jpg,png", "caption": "json[texts][0][en],txt"}
    flags = ["--sample-type", "CaptioningSample", "--field-map", json.dumps(fields)]
    energon(folder, "--split-parts", "train:parts/{00..02}.tar", "--split-parts", "val:parts/03.tar", *flags)
    split = folder / ".nv-meta" / "split.yaml"
    split.write_text(
        split.read_text().replace("exclude: []", "exclude: ['parts/{01..01}.tar', 'parts/02.tar/a/{009,010}']")
    )
    (folder / ".nv-meta" / "whole.yaml").write_text("split_parts: {train: ['parts/{00..03}.tar']}\n")


def classes() -> None:
    folder = HERE / "classes"
    for tar in range(5):
        keys = range(4 * tar, 4 * tar + 4)
        write_tar(
            folder / f"{tar}.tar",
            [part for i in keys for part in ((f"{i}.png", png(100 + i)), (f"{i}.cls", str(i % 3).encode()))],
        )
    fields = ["--sample-type", "ImageClassificationSample", "--field-map", '{"image": "png", "label": "cls"}']
    energon(folder, "--split-ratio", "3,1,1", *fields)


def crude() -> None:
    """Write a crude set with a list of parts that excludes txt."""
    folder = HERE / "crude"
    for tar in range(2):
        members = []
        for i in range(5 * tar, 5 * tar + 5):
            members += [(f"{i}.jpg", png(200 + i)), (f"{i}.txt", b"not this one")]
            members.append((f"{i}.json", json.dumps({"caption": f"crude {i}"}).encode()))
        write_tar(folder / f"{tar}.tar", members)
    energon(folder, "--split-ratio", "1,0,0", "--sample-type", "CrudeWebdataset")
    with (folder / ".nv-meta" / "dataset.yaml").open("a") as file:
        file.write("part_filter: [jpg, json]\nsubflavors: {kind: crude}\n")
    code = "def sample_loader(raw):\n    return dict(image=raw['jpg'], caption=raw['json']['caption'].upper())\n"
    (folder / ".nv-meta" / "sample_loader.py").write_text(
        code + "\n\ndef part_filter(part):\n    return part != 'txt'\n"
    )
    (folder / ".nv-meta" / "loader.yaml").write_text(
        "sample_type: {__module__: megatron.energon, __class__: CaptioningSample}\n"
        "sample_loader: sample_loader.py:sample_loader\npart_filter: sample_loader.py:part_filter\n"
    )


BLENDS = {
    "two.yaml": """
__module__: megatron.energon
__class__: MetadatasetV2
splits:
  train:
    blend:
      - {weight: 3, path: ./captions}
      - {weight: 1, path: ./captions, split_part: val, subset: {range: [1, end]}, subflavors: {kind: late}}
      - {weight: 4, path: ./nested.yaml}
  val: {path: ./captions}
""",
    "nested.yaml": """
__module__: megatron.energon
__class__: MetadatasetV2
splits:
  train:
    blend:
      - {weight: 1, path: ./crude, subset: {range: [0%, 50%]}}
      - {weight: 2, path: ./captions, split_config: whole.yaml, subset: {range: [2, 11]}}
    subset: {range: [25%, 100%]}
""",
    "epochs.yaml": """
__module__: megatron.energon
__class__: MetadatasetV2
splits:
  train:
    blend_epochized:
      - {repetitions: 2, path: captions}
      - {repetitions: 0.5, path: crude}
""",
    "one.yaml": """
__module__: megatron.energon
__class__: Metadataset
splits:
  train:
    datasets:
      - {weight: 0.25, path: captions, subflavor: first}
      - {weight: 0.75, path: crude, split_part: train}
  val:
    datasets:
      - {path: captions}
""",
}


def seen_by_energon() -> dict:
    """Return what Energon reads: {name: {split: [{share, samples: [[key, SHA-256 of the pixels, caption or
    class]]}]}}."""
    from megatron.energon import WorkerConfig, get_loader
    from megatron.energon.dataset_config import get_dataset_from_config
    from megatron.energon.epathlib import EPath
    from megatron.energon.flavors.webdataset.sample_decoder import SampleDecoder
    from megatron.energon.metadataset.loader import load_dataset

    config = WorkerConfig(rank=0, world_size=1, num_workers=0)
    skipped = []
    config.global_error_handler = lambda error, sample, *rest: skipped.append(error)

    def samples(dataset) -> list:
        dataset._decoder = SampleDecoder(image_decode="rgb8")
        found = []
        for sample in get_loader(dataset.build()):
            get = sample.get if isinstance(sample, dict) else lambda name, sample=sample: getattr(sample, name, None)
            image = get("jpg") if isinstance(sample, dict) else get("image")
            text = get("json")["caption"] if isinstance(sample, dict) else get("caption")
            text = int(get("label")) if text is None else text
            found.append([get("__key__"), hashlib.sha256(np.asarray(image).tobytes()).hexdigest(), text])
            assert get("txt") is None
        return found

    out = {}
    for name in ("captions", "classes", "crude"):
        out[name] = {}
        for split in ("train", "val", "test"):
            try:
                dataset = get_dataset_from_config(HERE / name, split_part=split, training=False, worker_config=config)
            except Exception as error:
                print(f"{name} {split}: {type(error).__name__} {error}")
                continue
            out[name][split] = [{"share": None, "samples": samples(dataset)}]
    for name in BLENDS:
        out[name] = {}
        for split in ("train", "val"):
            loader = load_dataset(EPath(HERE / name))
            try:
                loaded = loader.get_datasets(training=False, split_part=split, worker_config=config)
            except KeyError:
                continue
            parts = []
            for each in loaded.datasets:
                share = each.weight if each.weight is not None else each.repetitions
                parts.append({"share": share, "samples": samples(each.dataset), "subflavors": each.dataset.subflavors})
            out[name][split] = parts
    return out


def main() -> None:
    shutil.rmtree(HERE, ignore_errors=True)
    for make in (captions, classes, crude):
        make()
    for name, text in BLENDS.items():
        (HERE / name).write_text(text.lstrip())
    seen = seen_by_energon()
    (HERE / "expected.json").write_text(json.dumps(seen, indent=1) + "\n")


if __name__ == "__main__":
    main()
