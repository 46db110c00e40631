"""scripts/run_docs.py: how it changes a page's commands, and a few quick commands from the README."""

import re
from pathlib import Path

import pytest

from scripts import docs_settings, run_docs
from scripts.docs_commands import commands, files, python_blocks
from scripts.docs_stand_ins import MAKERS

ROOT = Path(__file__).resolve().parents[1]
PAGE = """
# Title
```bash
# a comment; and more
python one.py --flag "two words" \\
    --more   # remarks
A="--x 1"
torchrun two.py $A && three $HOME
```
| look | `python preprocess.py look DATA`, then `--flag` |
```python
# my_file.py, of yours
x = 1
```
```python
import my_file
```
"""


def test_commands_of_a_page_have_their_lines_and_variables():
    assert commands(PAGE) == [
        (5, ["python", "one.py", "--flag", "two words", "--more"]),
        (8, ["torchrun", "two.py", "--x", "1"]),
        (10, ["python", "preprocess.py", "look", "DATA"]),
    ]
    assert files(PAGE) == {"my_file.py": "# my_file.py, of yours\nx = 1\n"}
    assert python_blocks(PAGE) == [(16, "import my_file\n")]


@pytest.mark.parametrize(
    "command, kind, words",
    [
        ("bash install.sh", "not run", "bash install.sh"),
        ("bash train_img.sh", "not run", "bash train_img.sh"),
        (
            "python train.py --model DiT-XL/2 --batch_size 128 --max_steps 1",
            "run",
            "python train.py --model DiT-Ti/2 --batch_size 2 --max_steps 1 --num_workers 0 --sample_steps 2",
        ),
        (
            "torchrun --nproc_per_node=8 train.py --model DiT-XL/2 --data_path CSV --tensor_parallel_size 4",
            "dry",
            "python train.py --model DiT-XL/2 --data_path many.csv --tensor_parallel_size 4 --dry_run 8",
        ),
        (
            "python train.py --recipe pretrain_7b --dry_run 64",
            "dry",
            "python train.py --recipe pretrain_7b --dry_run 64",
        ),
        (
            "torchrun --nproc_per_node 8 sample.py --ckpt outputs/000-vDiT-XL-222 --num_samples 50000",
            "run",
            "torchrun --nproc_per_node 2 sample.py --ckpt outputs/000-vDiT-Ti-222 --num_samples 4 "
            "--num_sampling_steps 6",
        ),
        ("opendit evaluate --samples a.npz", "run", "opendit evaluate --samples a.npz"),
    ],
)
def test_what_is_run_of_a_command(command, kind, words):
    attempt = run_docs.prepared(command.split())
    assert (attempt.kind, attempt.words) == (kind, words.split())


def test_slow_commands_are_run_when_asked_for():
    assert run_docs.prepared(["bash", "train_video.sh"], slow=True).kind == "run"


def test_a_stand_in_that_can_not_be_made_fails_its_page_alone(monkeypatch, tmp_path, capsys):
    def refuse(runner, page, chosen, log):
        raise run_docs.StandInError("python train.py: error: no")

    monkeypatch.setattr(run_docs, "save_encoders", lambda hub, torch_home: None)
    monkeypatch.setattr(run_docs, "run_page", refuse)
    assert run_docs.main(["--pages", "docs/data.md", "docs/video.md", "--keep", str(tmp_path)]) == 1
    *_, first, second, counts = capsys.readouterr().out.splitlines()
    assert first == "failed  docs/data.md: python train.py: error: no" and second.startswith("failed  docs/video.md")
    assert counts == "0 ok, 0 dry run, 2 failed, 0 not run"


def test_every_stand_in_that_a_page_is_given_can_be_made_and_is_named_by_the_page():
    for page, given in docs_settings.GIVEN.items():
        text = (ROOT / page).read_text()
        for name, stand_in in given.items():
            assert name in text and stand_in in MAKERS, (page, name)


def test_every_reason_not_to_run_is_that_of_a_command():
    pages = ["README.md", *(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md"))]
    texts = [run_docs.shlex.join(words) for page in pages for _, words in commands((ROOT / page).read_text())]
    texts += [code for page in pages for _, code in python_blocks((ROOT / page).read_text())]
    for pattern, reason in docs_settings.SLOW + docs_settings.NOT_RUN:
        assert any(re.search(pattern, text) for text in texts), (pattern, reason)


def test_a_command_that_fails_is_told_with_its_error(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(run_docs, "save_encoders", lambda hub, torch_home: None)
    lines = ["python train.py --recipe list", "python train.py --recipe nothing_such", "sleep 9", "false > gone/file"]
    (tmp_path / "page.md").write_text("\n".join(["```bash", *lines, "```", ""]))
    monkeypatch.setattr(run_docs, "read_page", lambda name: (tmp_path / name).read_text())
    assert run_docs.main(["--pages", "page.md", "--keep", str(tmp_path / "kept"), "--limit", "5"]) == 1
    good, bad, slow, redirected, counts = capsys.readouterr().out.splitlines()[-5:]
    assert good.startswith("ok ") and good.endswith("page.md:2  python train.py --recipe list")
    assert bad.startswith("failed ") and "error: --recipe nothing_such" in bad and "exit code 2" in bad
    assert "it took more than 5 s" in slow and "No such file or directory" in redirected
    assert counts == "1 ok, 0 dry run, 3 failed, 0 not run"
    assert (tmp_path / "kept" / "page" / "train.py").exists()
    assert "digits_video" in (tmp_path / "kept" / "logs" / "page-00.txt").read_text()


QUICK = r"preprocess\.py (?:folder|look|shards|index)|opendit\.models|--recipe list|--dry_run"


def test_quick_commands_of_the_readme_run(monkeypatch, capsys):
    monkeypatch.setattr(run_docs, "save_encoders", lambda hub, torch_home: None)  # these commands use none
    code = run_docs.main(["--pages", "README.md", "--only", QUICK])
    told = capsys.readouterr().out
    assert code == 0 and told.splitlines()[-1] == "7 ok, 1 dry run, 0 failed, 0 not run", told
