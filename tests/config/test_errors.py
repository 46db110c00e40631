"""Every error that users can see has the form ``error: --flag value: what is wrong; what to do``.

The tests check all exception texts in the source that name a flag, as far as they are visible there, and the lines
that real commands print."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from opendit.cli import command
from opendit.config import console
from tests.config.test_light import ROOT

SOURCES = [*sorted((ROOT / "opendit").rglob("*.py")), *(ROOT / f"{name}.py" for name in command.SCRIPTS)]
# A flag, perhaps with its value, a colon, what is wrong, a semicolon, what to do. Braces stand for filled-in values.
NAMED = re.compile(r"(--\w*(\{\}\w*)*|\{flag\w*\})[^:;]*: \S.*; \S.*[^.]", re.DOTALL)
# Texts that begin otherwise but name a flag: what is wrong, a semicolon, what to do.
HELPED = re.compile(r"[^;]*\S; \S.*[^.]", re.DOTALL)
FLAG = re.compile(r"--[a-z]")
# A flag before the text of another exception or of a function, which is not visible here.
PASSED_ON = re.compile(r"(--\w*(\{\})?|\{flag\w*\})( [\w{}]+)?(:( is)?)? \{\}")
WAITING = {("opendit/models/dit.py", "--positions learned: {} patches, but positions for {}")}


def template(node: ast.expr) -> str | None:
    """Return a text with {} for values and {flag} for a variable that holds a flag. None if it is not visible."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(_part(part) for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = template(node.left), template(node.right)
        return None if left is None and right is None else f"{'{}' if left is None else left}{right or '{}'}"
    return None


def _part(part: ast.expr) -> str:
    if isinstance(part, ast.Constant):
        return str(part.value)
    value = part.value
    named = ast.unparse(value).rpartition(".")[2] in ("flag", "flag_name", "shown")
    return "{flag}" if named else "{}"


def texts(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, template) for every exception raised with a text, and for both branches of a conditional text."""
    for node in ast.walk(ast.parse(source)):
        if not (isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args):
            continue
        first = node.exc.args[0]
        for branch in (first.body, first.orelse) if isinstance(first, ast.IfExp) else (first,):
            if (text := template(branch)) is not None:
                yield node.lineno, text


def fits(text: str) -> bool:
    """Return True if a message has the right form, whether it names a flag or not."""
    if text.startswith(("--", "{flag}")):
        return bool(NAMED.fullmatch(text) or PASSED_ON.fullmatch(text))
    return not FLAG.search(text) or HELPED.fullmatch(text) is not None


def test_every_text_that_names_a_flag_has_the_shape():
    found, wrong = [], []
    for path in SOURCES:
        name = str(path.relative_to(ROOT))
        for line, text in texts(path.read_text(encoding="utf-8")):
            found.append((name, text))
            if not fits(text) and (name, text) not in WAITING:
                wrong.append(f"{name}:{line}: {text}")
    assert not wrong, "should be '--flag value: what is wrong; what to do':\n" + "\n".join(wrong)
    assert WAITING <= set(found) and sum(FLAG.search(text) is not None for _, text in found) > 150


@pytest.mark.parametrize(
    ("text", "good"),
    [
        ("--lr {}: out of range; give a number above 0", True),
        ("{flag} {}: doesn't exist; give {}", True),
        ("--{}: does nothing without --lora; add that, or leave it out", True),
        ("{} is a folder; give --output another place", True),
        ("a shape of {}", True),  # it names no flag
        ("--lr {} must be above 0", False),
        ("--lr {}: must be above 0", False),
        ("--lr {} is wrong; give another", False),
        ("--lr {}: out of range; give another.", False),
        ("the loss is not finite: lower --lr", False),
    ],
)
def test_the_check_tells_good_from_bad(text, good):
    assert fits(text) == good
    assert [text for _, text in texts(f"raise ValueError({text!r} if x else f'--a {{b}}')")] == [text, "--a {}"]


# Command line -> the printed line without "error: "
LINES = {
    "sample --output new/one.PNG": "--output new/one.PNG: is a file's name; give a folder",
    "train --lr nan": "--lr nan: out of range; give a number above 0 and at most 1e+38",
    "train --lr abc": "--lr abc: no number; give a number above 0 and at most 1e+38",
    "train --batch_size 1.5": "--batch_size 1.5: no whole number; give a whole number from 1 to 65,536",
    "train --plugin zero3": "--plugin zero3: not known; give one of zero2, gemini, ddp, fsdp; did you mean zero2?",
    "train --bacth_size 4": (
        "--bacth_size: no such flag; did you mean --batch_size? (opendit train --help all shows all)"
    ),
    "train --learning_rate 1e-4": "--learning_rate: no such flag; here it is --lr (opendit train --help all shows all)",
    "train --trainer.max-train-steps=4": (
        "--trainer.max_train_steps: no such flag; here it is --max_steps (opendit train --help all shows all)"
    ),
    "train --instance_prompt cat": (
        "--instance_prompt: no such flag; here it is --caption_prefix (opendit train --help all shows all)"
    ),
    "train --qqq": "--qqq: no such flag; opendit train --help all shows all",  # no flag is similar
    "train --vae ema --image_size 100": (
        "--image_size 100: does not divide by 16 (--vae ema: 8, patch of DiT-XL/2: 2); use 96"
    ),
    "train --data_path digits --image_size 100": (
        "--image_size 100: does not divide by 16 (--vae ema: 8, patch of DiT-XL/2: 2); use 96"
    ),
    "train --caption_extension .txt": (
        "--caption_extension: no such flag; captions are read from name.txt, name.caption or a table (docs/data.md) "
        "(opendit train --help all shows all)"
    ),
    "sample --ckpt pictures/a.pt --lora pictures/a.pt 0.8": (
        "--lora 0.8: is no path; a weight follows its path after a colon, as PATH:0.8"
    ),
    "preprocess look --data_path pictures": (
        "--data_path: no such flag; write the path without a flag (opendit preprocess look --help all shows all)"
    ),
    "export lora --ckpt x --output y --format peft": "--format peft: not known; give one of diffusers, comfyui, kohya",
    "foo": "foo: no such command; opendit --help lists all",
    "train --model DiT-S/2 --plugin fsdp --dry_run 8 --tensor_parallel_size 4": (
        "--tensor_parallel_size 4: the 6 heads of --model DiT-S/2 can't be divided by it; use 2, 3, 6"
    ),
    "train --model DiT-Ti/2 --plugin fsdp --dry_run 8 --pipeline_parallel_size 8": (
        "--pipeline_parallel_size 8: the 4 blocks of --model DiT-Ti/2 make at most 4 stages; use 4 or less"
    ),
    "train --load pictures": (
        "--load pictures: no checkpoint there; give a .safetensors or .pt file, a checkpoint folder or a run folder, "
        "or a pipeline"
    ),
    "sample --guidance_scale 3": (
        "--guidance_scale: no such flag; here it is --cfg_scale (opendit sample --help all shows all)"
    ),
    "sample --ckpt ./flux/model_index.json": (
        "--ckpt ./flux/model_index.json: is a part of a pipeline; give its folder, flux"
    ),
    "sample --ckpt pictures/note": (
        "--ckpt pictures/note: no checkpoint there; give a .safetensors or .pt file, a checkpoint folder or a run "
        "folder, or a pipeline"
    ),
    "export meta --ckpt latest --output y": (
        "--ckpt latest: no run with a checkpoint under --outputs ./outputs; give a path"
    ),
    "train --batch-size": "--batch_size: no value; give a whole number from 1 to 65,536",
    "train --outputs": "--outputs: no value; give --outputs FOLDER",
    "train --outputs ''": "--outputs '': empty; give a name",
    "train --fp8 yes": "--fp8 yes: takes no value; write --fp8, or --no_fp8",
    "train --no_fp8=1": "--no_fp8: takes no value; write --no_fp8",
    "train optim.lr=1e-4": "optim.lr=1e-4: no flag; did you mean --lr 1e-4? (opendit train --help all shows all)",
    "train 4": "4: a value without a flag; write --name value (opendit train --help all shows all)",
    "train --recipe digit": "--recipe digit: no such recipe; did you mean digits? (--recipe list shows all)",
    "train --vae emma": "--vae emma: doesn't exist; did you mean ema? Or give ema, mse, none or a folder with a VAE",
    "train --data_path digit": (
        "--data_path digit: doesn't exist; did you mean digits? Or give digits, or a folder or CSV that does"
    ),
    "train --data_path picturs": (
        "--data_path picturs: doesn't exist; did you mean pictures? Or give digits, or a folder or CSV that does"
    ),
    "train --lora_alpha 3": "--lora_alpha: does nothing without --lora; add that, or leave it out",
    "train --average power:0.5": (
        "--average power:0.5: not power: and different widths between 0.01 and 0.28; give power:0.05,0.10"
    ),
    "train --muon_momentum 0.9": "--muon_momentum: does nothing without --optimizer muon; add that, or leave it out",
    "train --optimizer adamw8bit --plugin fsdp --offload state": "--optimizer adamw8bit: does not work with --offload "
    "state, which keeps AdamW's moments in host memory; leave one of them out",
    "train --optimizer muon --plugin gemini --mixed_precision bf16": "--optimizer muon: does not work with --plugin "
    "gemini, which cuts whole layers into chunks for all processes; leave one of them out",
    "train --lora 4": "--lora: adds to trained weights; say which with --pretrained",
    "train --use_video --pretrained ./nowhere/a": "--pretrained ./nowhere/a: doesn't exist; name a file or folder that "
    "does",
    "train --use_video": "--use_video: --model DiT-XL/2 takes pictures; clips need a vDiT, e.g. vDiT-XL/222",
    "train --model vDiT-S/222": "--model vDiT-S/222: takes clips; add --use_video",
    "train --sequence_parallel_size 2": (
        "--sequence_parallel_size 2: needs 2 processes and there is one; start it with torchrun --standalone "
        "--nproc_per_node=2, or leave the flag out"
    ),
    "train --ema_decay 0.9 0.9": "--ema_decay 0.9 0.9: a decay is given twice; give each once",
    "train --load nowhere": "--load nowhere: doesn't exist; give latest, a run folder or a checkpoint folder",
    "train --help optimiser": "--help optimiser: no such heading or flag; did you mean optimizer?",
    "sample --ckpt nowhere": (
        "--ckpt nowhere: doesn't exist; give a .safetensors or .pt file, a checkpoint folder or a run "
        "folder, or a pipeline"
    ),
    "sample --ckpt pictures": (
        "--ckpt pictures: no checkpoint there; give a .safetensors or .pt file, a checkpoint folder or a run "
        "folder, or a pipeline"
    ),
    "sample --cfg_interval 3 1": "--cfg_interval 3 1: no two noise levels; give LOW HIGH with 0 <= LOW < HIGH",
    "sample --cfg_parallel --cfg_scale 1": (
        "--cfg_parallel: --cfg_scale 1 is no guidance and has one half; leave one of them out"
    ),
    "sample --cache tailor:3": (
        "--cache tailor:3: no such form; give first_block[:THRESHOLD] or taylor:K[:ORDER], as taylor:3"
    ),
    "sample --npz pictures": "--npz pictures: is a folder; name a file in it",
    "evaluate --metrics fidd": (
        "--metrics fidd: not known; give one of fid, sfid, is, pr, kid, fvd, motion, accuracy, direction, "
        "copies, clip_score; did you mean fid?"
    ),
    "evaluate --metrics fid": "--metrics fid: compares samples with others; give --reference PATH",
    "evaluate --samples pictures --batch_size 3": "--batch_size: does nothing with --samples; leave one of them out",
    "evaluate plot nowhere": "RUN nowhere: doesn't exist; give a run, the folder of an evaluation, or a results.jsonl",
    "preprocess latent": "latent: no such command; did you mean latents?",
    "preprocess latents --output x": "--data_path: missing; give --data_path PATH",
    "preprocess latents --data_path digits --output x --vae none": (
        "--vae none: has no latents to cache; train on the pictures themselves"
    ),
    "preprocess check nowhere --output x": "CSV nowhere: doesn't exist; give a CSV of path,text, or a folder",
    "preprocess shards --data_path pictures --output x --shard_size 3XB": (
        "--shard_size 3XB: no size; give one such as 200MB or 1GB"
    ),
    "export difusers --ckpt x --output y": (
        "FORMAT difusers: not known; give one of diffusers, meta, opendit, lora; did you mean diffusers?"
    ),
    "export meta --output y": "--ckpt: missing; give --ckpt PATH",
    "export opendit --ckpt pictures/a.pt --output y": "--output y: the format opendit is a .safetensors file; name one",
    "models DiT-XL/3": None,  # too long for this table
    "models --world 0": "--world 0: out of range; give a whole number from 1 to 1,048,576",
    "page --outputs nowhere": "--outputs nowhere: no such folder; name the one that train.py wrote its runs to",
    "links --gpus_per_node 0": "--gpus_per_node 0: out of range; give a whole number from 1 to 4,096",
    "completion fish": "SHELL fish: not known; give one of bash, zsh, tcsh; did you mean zsh?",
    "sampel": "sampel: no such command; did you mean sample?",
}


@pytest.mark.parametrize("line", LINES)
def test_the_line_of_a_real_command(line, tmp_path, monkeypatch, capsys, no_ranks):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "a.pt").touch()
    (tmp_path / "pictures" / "note").write_text("no weights")
    words = [word.strip("'") for word in line.split()]
    try:
        code = command.main(words)
    except SystemExit as stop:
        code = stop.code
    said = capsys.readouterr().err
    assert code == 2 and said.startswith("error: ") and said.count("\n") == 1
    assert LINES[line] is None or said == f"error: {LINES[line]}\n"
    assert re.fullmatch(r"error: \S.*?: \S.*; \S.*[^.]\n", said)
    assert console.name_of("train.py") == "train.py"


def test_errors_are_printed_in_one_place():
    """Only the console and the supervisor of several ranks print lines that begin with ``error:``."""
    others = {
        str(path.relative_to(ROOT))
        for path in SOURCES
        if re.search(r"""f?["'](\\n)?(\{[^"']*\})?error: """, Path(path).read_text(encoding="utf-8"))
    }
    assert others == {"opendit/config/console.py", "opendit/parallel/supervisor.py"}
