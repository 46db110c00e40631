"""The MB/s in a run's log match the sizes of the files that it reads."""

import json

import pytest

import train
from opendit.data.shards.program import make_indexes
from tests.data.shards.tars import captioned, picture, write_tar

COMMON = "--model DiT-Ti/4 --image_size 16 --vae none --batch_size 4 --max_steps 3 --log_every 1 --no_save".split()


@pytest.mark.parametrize("workers", [0, 1])
def test_bytes_a_second_times_seconds_are_the_sizes_of_the_files(tmp_path, no_ranks, workers):
    (tmp_path / "pictures").mkdir()
    for i in range(12):  # one epoch
        (tmp_path / "pictures" / f"{i}.png").write_bytes(picture(i, size=(16 + i, 20)))
    assert bytes_in_log(tmp_path, "pictures", workers) == sum(
        path.stat().st_size for path in (tmp_path / "pictures").iterdir()
    )


def test_bytes_of_tars_are_those_of_pictures_and_captions(tmp_path, no_ranks):
    (tmp_path / "tars").mkdir()
    members = captioned(12)
    write_tar(tmp_path / "tars" / "t.tar", members)
    make_indexes(str(tmp_path / "tars"), num_workers=1)
    assert bytes_in_log(tmp_path, "tars", 1, "--cross_attention") == sum(len(content) for _, content in members)


def bytes_in_log(folder, data, workers, *more) -> int:
    flags = ["--data_path", str(folder / data), "--num_workers", str(workers), "--outputs", str(folder / "runs")]
    train.main([*COMMON, *"--sample_every 0".split(), *flags, *more])
    log = (folder / "runs" / "000-DiT-Ti-4" / "log.jsonl").read_text()
    lines = [json.loads(line) for line in log.splitlines()]
    assert len(lines) == 3
    return round(sum(line["read_mb_per_s"] * 1e6 * 4 / line["samples_per_s"] for line in lines))
