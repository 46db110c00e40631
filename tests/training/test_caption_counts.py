"""Before training, the log counts captions that the text encoder cuts or that say nothing, for every data source."""

import json
from itertools import cycle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import preprocess
import sample
import train
from opendit.data import build_dataset
from opendit.data.base import BadSample, Description, MediaDataset
from opendit.data.captions import caption_rows, count_captions, says_nothing, stands_for_nothing
from opendit.encoders.text import fitting_tokens
from opendit.models.conditioning import encode_bytes
from tests.encoders.test_text import save_clip
from tests.encoders.test_vae import small_vae
from tests.ranks import run_ranks, several_programs

TINY = (
    "--model DiT-Ti/4 --vae none --image_size 16 --batch_size 8 --num_workers 0 --sample_every 0 --log_every 1 "
    "--mixed_precision fp32 --lr 1e-2"
).split()
LONG = "A photograph taken in the early morning light, wide angle, of a place where a"  # 77 bytes


def table(folder: Path, *captions: str, rows: int = 8, name: str = "a.csv") -> Path:
    """Write a CSV of pictures that repeats these captions in turn."""
    folder.mkdir(exist_ok=True)
    lines = ["path,text"]
    for row, caption in zip(range(rows), cycle(captions), strict=False):
        Image.new("RGB", (32, 32), (row * 30 % 256, 0, 0)).save(folder / f"{row}.png")
        lines.append(f'{row}.png,"{caption}"')
    (folder / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder / name


def run(outputs: Path, data: Path | str, *more: str, steps: int = 1) -> Path:
    train.main([*TINY, "--data_path", str(data), "--outputs", str(outputs), "--max_steps", str(steps), *more])
    return max(outputs.iterdir())


def tokens_of(folder: Path) -> int:
    """Return the number of text tokens that both config.json and the weights of a run name."""
    (found,) = {
        json.dumps(each) for each in _values(json.loads((folder / "config.json").read_text()), "max_text_tokens")
    }
    return json.loads(found)


def _values(tree, name: str) -> list:
    if isinstance(tree, list):
        return [found for each in tree for found in _values(each, name)]
    if isinstance(tree, dict):
        return [v for k, v in tree.items() if k == name] + [f for v in tree.values() for f in _values(v, name)]
    return []


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "log.jsonl").read_text().splitlines()]


def said(capsys) -> list[str]:
    return [
        line
        for line in capsys.readouterr().out.splitlines()
        if "note: captions" in line or line.startswith("captions: ")
    ]


# ------------------------------------------------------------------------------------------ what is counted


class Texts(MediaDataset):
    def __init__(self, texts):
        self.texts, self.asked = texts, 0

    def __len__(self):
        return len(self.texts)

    def describe(self):
        return Description(text="texts", sample_shape=(1,), conditioning="text")

    def caption(self, row):
        self.asked += 1
        if self.texts[row] is None:
            raise BadSample(f"row {row}", "no caption")
        return self.texts[row]


@given(st.lists(st.none() | st.text() | st.sampled_from(["nan", " None ", "", "\u200b", "a cat"]), max_size=40))
def test_counts_are_those_of_one_caption_after_the_other(texts):
    found = count_captions(Texts(texts))
    there = [text for text in texts if text is not None]
    longest = max((len(text.encode("utf-8", "replace")) + 1 for text in there), default=0)
    assert found.longest == longest and found.counted == found.rows == len(texts)
    assert found.unreadable == len(texts) - len(there)
    assert found.empty == sum(says_nothing(text) for text in there)
    assert found.missing.total() == sum(text.strip().lower() in ("nan", "none") for text in there) or any(
        map(stands_for_nothing, there)
    )
    for limit in (1, 5, longest - 1, longest):
        # Compare with what the encoder keeps.
        if limit >= 1:
            kept = [int((encode_bytes([text], limit) > 1).sum()) for text in there]
            full = [len(text.encode("utf-8", "replace")) for text in there]
            assert found.over(limit) == sum(k < f for k, f in zip(kept, full, strict=True))


@pytest.mark.parametrize("caption", ["", "  ", "\n\t", "\u200b", "\ufeff", "\u3000", ".", '""', "--", "\xa0"])
def test_what_says_nothing(caption):
    assert says_nothing(caption)


@pytest.mark.parametrize("caption", ["nan", "NaN", " None", "NULL", "n/a", "N/A", "#N/A", "<NA>", "'nan'", "undefined"])
def test_what_stands_for_a_missing_value(caption):
    assert stands_for_nothing(caption) and not says_nothing(caption)


@pytest.mark.parametrize("caption", ["a", "none of it", "Nana", "😀", "中文", "7", "a nan"])
def test_what_says_something(caption):
    assert not stands_for_nothing(caption) and not says_nothing(caption)


def test_the_length_that_fits():
    assert [fitting_tokens(n) for n in (0, 1, 64, 65, 128, 129, 449, 512, 513, 10**6)] == [
        64, 64, 64, 128, 128, 192, 512, 512, 512, 512,
    ]  # fmt: skip


class Many:
    """A hundred million captions that are made when read."""

    def __len__(self):
        return 10**8

    def __getitem__(self, row):
        return "nan" if row % 2 else "x" * 70


def test_of_many_some_are_looked_up_in_lots_over_all_of_them():
    data = Texts(Many())
    found = count_captions(data)
    assert data.asked == found.counted <= 10_000 and found.counted > 9_000
    assert found.among == f"of the {found.counted:,} looked at among 100,000,000"
    assert found.missing == {"nan": found.counted // 2} and found.longest == 71
    rows = caption_rows(data)
    lots = np.flatnonzero(np.diff(rows) > 1)
    assert rows[0] == 0 and rows[-1] == 10**8 - 1 and (np.diff(rows) > 0).all() and len(lots) <= 100
    assert len(caption_rows(data, 300)) <= 300


# ------------------------------------------------------------------------------------------ the bytes encoder


def test_sets_that_differ_late_train_apart_and_the_length_is_kept(tmp_path, no_ranks, capsys):
    one, other = (table(tmp_path / letter, LONG + " " + letter * 200) for letter in "ab")
    runs = [run(tmp_path / f"run {data.parent.name}", data, steps=4) for data in (one, other)]
    assert losses(runs[0]) != losses(runs[1])
    lines = said(capsys)
    assert len(lines) == 2 and all("--text_encoder bytes takes 320 tokens" in line for line in lines)
    assert all("the longest of 8 has 279" in line and "0.png" in line for line in lines)
    assert tokens_of(runs[0]) == 320
    # A resumed run keeps its length, though shorter captions would need less.
    short = table(tmp_path / "short", "short")
    resumed = run(tmp_path / "run a", short, "--load", "latest", steps=5)
    assert tokens_of(resumed) == 320 and len(losses(resumed)) == 5 and not said(capsys)
    # A run that starts from these weights keeps the length, too; a flag overrides it.
    assert tokens_of(run(tmp_path / "again", short, "--pretrained", str(runs[0]))) == 320
    assert tokens_of(run(tmp_path / "flag", short, "--pretrained", str(runs[0]), "--max_text_tokens", "9")) == 9


def test_what_a_flag_or_earlier_weights_cut_is_said(tmp_path, no_ranks, capsys):
    data = table(tmp_path / "a", LONG, "short")
    before = run(tmp_path / "before", data, "--max_text_tokens", "64")  # as all runs of earlier versions began
    cut = "captions: 4 of 8 are longer than the 64 tokens of --text_encoder bytes, and are cut; the longest has 78"
    (line,) = said(capsys)
    assert cut in line and line.endswith("; --max_text_tokens 78 takes them whole")
    for more in (["--load", "latest", "--outputs", str(tmp_path / "before")], ["--pretrained", str(before)]):
        found = run(tmp_path / "before" if more[0] == "--load" else tmp_path / "new", data, *more, steps=2)
        assert tokens_of(found) == 64 and cut in said(capsys)[0]


def test_a_very_long_caption_is_cut_at_the_most_and_said(tmp_path, no_ranks, capsys):
    data = table(tmp_path / "a", "word " * 400, "short")
    assert tokens_of(run(tmp_path / "run", data)) == 512
    taken, cut = said(capsys)
    assert "takes 512 tokens" in taken and "4 of 8 are longer than the 512 tokens" in cut and "2,000" in cut
    train.main([*TINY, "--data_path", str(data), "--max_steps", "1", "--dry_run", "1"])
    assert said(capsys) == [taken, cut]


def test_captions_that_say_nothing_are_counted(tmp_path, no_ranks, capsys):
    data = table(tmp_path / "a", "nan", "NaN", "None", "", "  ", "a cat", "N/A", "a dog")
    run(tmp_path / "run", data)
    empty, missing = said(capsys)
    assert "captions: 2 of 8 are empty" in empty and "3.png" in empty
    assert "captions: 4 of 8 are words for a missing value" in missing and "nan: 1" in missing and "0.png" in missing
    validation = table(tmp_path / "b", LONG, "null")
    run(tmp_path / "run 2", table(tmp_path / "c", "fine"), "--validate_path", str(validation), "--validate_every", "1")
    missing, cut = said(capsys)
    assert "captions of --validate_path: 4 of 8 are words" in missing and "are longer than the 64 tokens" in cut
    preprocess.main(["check", str(data), "--output", str(tmp_path / "out.csv"), "--num_workers", "1"])
    out = capsys.readouterr().out
    assert "empty caption: 2" in out and "captions: 4 of 6 are words for a missing value" in out
    preprocess.main(["check", str(validation), "--output", str(tmp_path / "out.csv"), "--num_workers", "1"])
    assert "the longest of 8 has 77 bytes" in (out := capsys.readouterr().out) and "takes 128 tokens" in out
    preprocess.main(["look", str(data), "--output", str(tmp_path / "look"), "--num_workers", "1"])
    out = capsys.readouterr().out
    assert "captions: 2 of 8 are empty" in out and "captions: 4 of 8 are words for a missing value" in out
    assert "captions: 4 of 8 are words for a missing value" in (tmp_path / "look" / "look.html").read_text()


def test_words_that_clip_and_t5_will_cut_are_estimated_without_them(tmp_path, capsys):
    data = table(tmp_path / "a", "word " * 75, "word " * 76, "word " * 119, "word " * 120)
    preprocess.main(["check", str(data), "--output", str(tmp_path / "out.csv"), "--num_workers", "1"])
    out = capsys.readouterr().out
    assert "6 of 8 at least, by their words, are longer than the 77 tokens of --text_encoder clip" in out
    assert "2 of 8 at least, by their words, are longer than the 120 tokens of --text_encoder t5" in out


# ------------------------------------------------------------------------------------------ other sources


def test_tars_and_blends_are_counted_as_tables_are(tmp_path, no_ranks, capsys):
    data = table(tmp_path / "a", LONG, "nan", "fine")
    preprocess.main(["shards", "--data_path", str(data), "--output", str(tmp_path / "tars"), "--num_workers", "1"])
    of_table, of_tars = (count_captions(build_dataset(str(path), 16, seed=0)) for path in (data, tmp_path / "tars"))
    assert of_table.tokens == of_tars.tokens and of_table.missing == of_tars.missing == {"nan": 3}
    assert of_tars.longest_at != of_table.longest_at and "tar" in of_tars.longest_at
    other = table(tmp_path / "b", "None")
    capsys.readouterr()
    folder = run(tmp_path / "run", f"{tmp_path / 'tars'}:1,{other}:9")
    missing, taken = said(capsys)
    assert "captions: 11 of 16 are words for a missing value (None: 8, nan: 3)" in missing
    assert "takes 128 tokens, for the longest of 16 has 78" in taken and tokens_of(folder) == 128


def test_a_frozen_encoders_captions_are_counted_by_its_tokenizer(tmp_path, no_ranks, capsys):
    from transformers import AutoTokenizer

    save_clip(tmp_path / "clip")
    small_vae().save_pretrained(tmp_path / "vae")
    texts = ["a seven", "word " * 9, "word " * 7 + "nan", "none"]
    data = table(tmp_path / "a", *texts)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "clip")
    lengths = [len(tokenizer(text).input_ids) for text in texts]
    over, longest = 2 * sum(n > 30 for n in lengths), max(lengths)
    assert 0 < over < 8
    clip = ["--text_encoder", str(tmp_path / "clip")]
    run(tmp_path / "run", data, *clip)
    missing, cut = said(capsys)
    assert "2 of 8 are words for a missing value (none: 2)" in missing
    assert f"{over} of 8 are longer than the 30 tokens of --text_encoder" in cut and f"longest has {longest}" in cut

    vae = ["--vae", str(tmp_path / "vae")]
    cache = ["latents", "--data_path", str(data), *vae, "--image_size", "16", "--output", str(tmp_path / "cache")]
    preprocess.main([*cache, *clip, "--num_workers", "0"])
    lines = said(capsys)
    assert len(lines) == 2 and f"{over} of 8 are longer than the 30 tokens" in lines[1]
    size = json.loads((tmp_path / "cache" / "index.json").read_text())["sizes"][0]
    assert size["captions"] == {"rows": 8, "counted": 8, "longest": longest, "cut": over}
    latents = ["--model", "DiT-Ti/2", "--image_size", "16", *vae, *clip]
    run(tmp_path / "run 2", tmp_path / "cache", *latents)
    missing, cut = said(capsys)
    assert f"{over} of the 8 looked at among 8 were cut to the 30 tokens" in cut and "none: 2" in missing
    before = build_dataset(str(tmp_path / "cache"), 16, seed=0).fingerprint().identity
    index = json.loads((tmp_path / "cache" / "index.json").read_text())
    del index["sizes"][0]["captions"]  # as written by an earlier version
    (tmp_path / "cache" / "index.json").write_text(json.dumps(index))
    assert build_dataset(str(tmp_path / "cache"), 16, seed=0).fingerprint().identity == before
    run(tmp_path / "run 3", tmp_path / "cache", *latents)
    assert "did not count those that it cut to the 30 tokens" in said(capsys)[1]


def test_prompts_that_are_cut_are_said(tmp_path, no_ranks, capsys):
    folder = run(tmp_path / "run", table(tmp_path / "a", "short"))
    capsys.readouterr()
    how = ["--cfg_scale", "2", "--num_sampling_steps", "1", "--output", str(tmp_path / "drawn")]
    sample.main(["--ckpt", str(folder), "--prompt", LONG, "short", "--negative_prompt", LONG, *how])
    out = capsys.readouterr().out
    assert "captions: 1 of 2 are longer than the 64 tokens that the model takes, and are cut; the longest has 78" in out
    assert "--negative_prompt: 1 of 1 are longer" in out


def _train(mesh, argv: list[str]) -> None:
    several_programs()
    train.main(argv)


def test_ranks_agree_on_the_length_that_one_counts(tmp_path):
    data = table(tmp_path / "a", LONG)
    argv = [
        *TINY,
        "--data_path",
        str(data),
        "--outputs",
        str(tmp_path / "run"),
        "--max_steps",
        "1",
        "--batch_size",
        "4",
    ]
    run_ranks(2, _train, argv)
    assert tokens_of(max((tmp_path / "run").iterdir())) == 128
