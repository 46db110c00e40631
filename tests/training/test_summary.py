"""The summary at the end of a run names only what exists, and the command that it suggests works."""

from types import SimpleNamespace

import pytest

from opendit.common import safe_files
from opendit.data.mock import MockDataset
from opendit.data.order import BatchSchedule, BucketSchedule
from opendit.data.packs import PackSchedule
from opendit.training import summary


def spec(folder, **more):
    flags = SimpleNamespace(save=True, outputs=str(folder.parent), model="DiT-Ti/2", max_steps=5, epochs=1400)
    info = {"vae": "ema", "text_encoder": None, **more.pop("info", {})}
    rest = dict(
        dataset=None, lora=None, codec=object(), last_step=5, first_step=0, model_config=SimpleNamespace(text=None)
    )
    rest["schedule"] = BatchSchedule(8, 2, 0)
    return SimpleNamespace(flags=flags, folder=folder, info=lambda: info, **{**rest, **more})


def say(spec, capsys, newest=None, failures=(), lost=(), complete=True) -> str:
    counted = safe_files.WriteFailures()
    for what in lost:
        with counted.survive(what):
            raise OSError(28, "full")
    log = SimpleNamespace(lost=0, waiting=len(lost))
    board = SimpleNamespace(complete=complete)
    monitor = SimpleNamespace(last={"step": 5, "loss": 0.5}, failures=counted, log_file=log, boards={}, board=board)
    spec.monitor, spec.checkpoints = monitor, SimpleNamespace(newest=newest, failures=list(failures))
    summary.summarise(spec)
    return capsys.readouterr().out


def test_nothing_is_named_that_is_not_there(tmp_path, capsys):
    folder = tmp_path / "000-DiT-Ti-2"
    (folder / "samples").mkdir(parents=True)
    said = say(spec(folder), capsys, failures=["step 5: full"], lost=["log.jsonl", "samples"], complete=False)
    assert "None" not in said and "checkpoint   none was saved" in said and "NOT SAVED    step 5: full" in said
    for row in ("next", "pictures", "curves", "log  "):
        assert f"  {row}" not in said
    assert "NOT WRITTEN  log.jsonl once, samples once; the exit code is 1" in said


def test_many_failed_saves_take_one_line(tmp_path, capsys):
    failures = [f"step {step}: rank 0: full" for step in (1, 2, 3)]
    said = say(spec(tmp_path), capsys, newest=tmp_path, failures=failures)
    assert "NOT SAVED   3 times; the last at step 3: rank 0: full\n" in said and "step 2" not in said


@pytest.mark.parametrize(
    ("more", "free", "said"),
    [
        ({}, 5 * 20_000, None),  # 1,000 weights with two moments and two averages: 20,000 bytes a checkpoint
        ({}, 5 * 20_000 - 1, "but 5 checkpoints take about 0.00 GiB; make room, or keep fewer by --ckpt_keep"),
        ({"ckpt_keep": 2}, 3 * 20_000, None),
        ({"ckpt_keep": 2}, 3 * 20_000 - 1, "but 3 checkpoints take about 0.00 GiB; make room"),
        ({"ckpt_every": 0}, 20_000 - 1, "but its checkpoint takes about 0.00 GiB; make room"),
        ({"save": False}, 0, None),
    ],
)
def test_too_full_a_disk_is_noted_at_the_start(tmp_path, monkeypatch, more, free, said):
    monkeypatch.setattr(summary.shutil, "disk_usage", lambda folder: SimpleNamespace(free=free))
    values = {"save": True, "ckpt_every": 10, "ckpt_keep": 0, "outputs": "outputs", **more}
    average = SimpleNamespace(decays=(0.05, 0.1))
    run = SimpleNamespace(flags=SimpleNamespace(**values), folder=tmp_path, ema=average, first_step=0, last_step=45)
    note = summary.short_of_disk(run, 1000)
    assert note == (said and f"disk: 0.00 GiB are free under outputs, {said}")


def test_what_is_there_is_named_with_a_command_that_works(tmp_path, capsys):
    folder = tmp_path / "my runs" / "000-DiT-Ti-2"
    (folder / "samples").mkdir(parents=True)
    (folder / "samples" / "0000005.png").touch()
    (folder / "log.jsonl").write_text("{}\n")
    newest = folder / "checkpoints" / "step_0000005"
    said = say(spec(folder), capsys, newest=newest)
    assert "NOT" not in said and f"pictures    {folder}/samples" in said and f"log         {folder}/log.jsonl" in said
    assert f"curves      tensorboard --logdir '{folder}/tensorboard'" in said
    assert said.rstrip().endswith(f"python sample.py --ckpt '{folder}'")


@pytest.mark.parametrize(
    ("more", "end"),
    [
        ({"info": {"vae": "/a vae"}}, " --vae '/a vae'"),
        ({"codec": None, "info": {"vae": "/vae"}}, " --vae /vae  (the latents' VAE was not at hand)"),
        (
            {"info": {"text_encoder": "/t5"}, "model_config": SimpleNamespace(text=SimpleNamespace(inside=False))},
            " --text_encoder /t5",
        ),
        ({"dataset": MockDataset.__new__(MockDataset), "codec": None}, None),
    ],
)
def test_the_next_command_names_what_sample_py_would_ask_for(more, end, tmp_path):
    said = summary.what_next(spec(tmp_path, **more), 5, tmp_path / "x")
    assert said is None if end is None else said == f"python sample.py --ckpt {tmp_path}{end}"


def test_a_lora_of_a_public_model_is_drawn_with_beside_its_folder(tmp_path):
    found = spec(tmp_path, lora=object())
    vars(found.flags).update(model="wan/Wan", use_video=True, pretrained="my models/Wan")
    said = summary.what_next(found, 5, tmp_path / "x")
    assert said == f"python sample.py --use_video --ckpt 'my models/Wan' --lora {tmp_path} --prompt WORDS"


def test_a_stopped_run_goes_on_by_latest_or_by_its_name(tmp_path):
    for number in ("000", "001"):
        (tmp_path / f"{number}-DiT-Ti-2" / "checkpoints" / "step_0000003").mkdir(parents=True)
        (tmp_path / f"{number}-DiT-Ti-2" / "checkpoints" / "step_0000003" / "state.json").touch()
    for number, load in (("000", str(tmp_path / "000-DiT-Ti-2")), ("001", "latest")):
        said = summary.what_next(spec(tmp_path / f"{number}-DiT-Ti-2"), 3, tmp_path)
        assert said == f"the same command with --load {load} goes on to step 5"


def test_of_packs_how_often_samples_were_seen(tmp_path, capsys):
    folder = tmp_path / "000-DiT-Ti-2"
    folder.mkdir()
    assert "seen" not in say(spec(folder), capsys)
    # Steps of four samples; step 5 ends with sample 20, and there are 6 samples in all.
    schedule = PackSchedule([4] * 6, 8, 2, 0)
    times = [sum((schedule.rows(step) for step in range(5)), []).count(row) for row in range(6)]
    said = say(spec(folder, schedule=schedule), capsys)
    parts = [f"{times.count(n)} seen {n} x" for n in sorted(set(times), reverse=True)]
    assert len(parts) > 1 and f"  samples     {', '.join(parts)}\n" in said


def test_of_buckets_what_fills_no_step(tmp_path, capsys):
    folder = tmp_path / "000-DiT-Ti-2"
    folder.mkdir()
    schedule = BucketSchedule([0] * 7 + [1] * 6, 2, 1, 0)
    given = spec(folder, schedule=schedule)
    assert "samples " not in say(given, capsys)
    given.flags.max_steps, given.flags.epochs = None, 3
    drawn = sum(len(schedule.rows(step)) for step in range(5))
    assert f"  samples     {drawn} of the 39 of 3 passes; the rest fill no step\n" in say(given, capsys)
