"""--config: a YAML file overrides the recipe and is overridden by the command line. Each run writes such a file."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import train
from opendit.config.command_line import NO_CHANGE, parse, to_yaml
from opendit.config.flags import flags_of, to_dict, value_of
from opendit.config.train import TrainConfig

TINY = "--model DiT-Ti/4 --data_path mock --image_size 32 --vae none --num_classes 3 --batch_size 2 --num_workers 0"


def write(tmp_path, text: str) -> str:
    (tmp_path / "my.yaml").write_text(text)
    return str(tmp_path / "my.yaml")


def test_the_file_is_over_the_recipe_and_under_the_command_line(tmp_path):
    file = write(
        tmp_path,
        "recipe: digits\nlr: 1e-4\nbatch-size: 8\nuse_video: false\nenable_flashattn: true\nema_decay: [0.9, 0.99]\n"
        "edm_mean: -1.5\nmax_steps: null\nvae: none\n",
    )
    flags = parse(TrainConfig, ["--batch_size", "16", "--config", file])
    assert flags.lr == 1e-4 and flags.batch_size == 16 and flags.ema_decay == [0.9, 0.99] and flags.edm_mean == -1.5
    assert flags.enable_flashattn and not flags.use_video and flags.data_path == "digits" and flags.max_steps == 2600
    assert flags.given >= {"lr", "batch_size", "recipe", "use_video"} and "max_steps" not in flags.given


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("batch_sise: 3", "--batch_sise: no such flag; did you mean --batch_size?"),
        ("lr: fast", "--lr fast: no number; give a number above 0"),
        ("use_video: 1", "use_video 1: a switch; give true or false"),
        ("lr: true", "--lr True: no number"),
        ("plugin: fspd", "--plugin fspd: not known; give one of zero2, gemini, ddp, fsdp; did you mean fsdp?"),
        ("[lr, 3]", "must be flags and their values"),
        ("config: other.yaml", "without another config"),
        ("lr: 1\nlr: 2", "line 2"),
        ("lr: !!python/name:os.system ''", "line 1"),
        ("a: &a [1\n", "line"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_file(text, says, tmp_path, capsys):
    file = write(tmp_path, text)
    with pytest.raises(SystemExit) as ended:
        parse(TrainConfig, ["--config", file])
    said = capsys.readouterr().err
    assert ended.value.code == 2 and said.count("\n") == 1 and f"--config {file}" in said and says in said


def test_a_file_that_is_not_there_is_one_line(tmp_path, capsys):
    with pytest.raises(SystemExit):
        parse(TrainConfig, ["--config", str(tmp_path / "none.yaml")])
    assert capsys.readouterr().err.count("\n") == 1


def test_values_are_checked_as_those_of_the_command_line_are(tmp_path):
    flags = parse(TrainConfig, ["--config", write(tmp_path, "batch_size: 0")])
    with pytest.raises(ValueError, match="--batch_size 0: out of range"):
        flags.resolve(1, has_gpu=True)


def test_a_run_writes_a_file_that_repeats_it(tmp_path):
    train.main([*TINY.split(), "--max_steps", "1", "--lr", "3e-4", "--sample_every", "0", "--outputs", f"{tmp_path}/a"])
    (run,) = (tmp_path / "a").glob("0*")
    train.main(["--config", str(run / "config.yaml"), "--outputs", f"{tmp_path}/b"])
    (again,) = (tmp_path / "b").glob("0*")
    logs = [(folder / "log.jsonl").read_text().split('"loss": ')[1].split(",")[0] for folder in (run, again)]
    assert logs[0] == logs[1]
    assert (again / "config.yaml").read_text() == (run / "config.yaml").read_text()


KEPT = [item for item in flags_of(TrainConfig) if item.name not in NO_CHANGE]
NUMBERS = [item for item in KEPT if (takes := value_of(item)) is not None and takes.kind is not str]
SWITCHES = [item.name for item in flags_of(TrainConfig) if value_of(item) is None]


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_what_is_written_is_what_is_read(data, tmp_path_factory):
    words = []
    for item in data.draw(st.lists(st.sampled_from(NUMBERS), max_size=6, unique_by=lambda item: item.name)):
        kind = value_of(item).kind
        number = st.integers(0, 10**9) if kind is int else st.floats(allow_nan=False, allow_infinity=False)
        words += [f"--{item.name}", repr(data.draw(number))]
    for name in data.draw(st.lists(st.sampled_from(SWITCHES), max_size=4, unique=True)):
        words.append(f"--{'no_' * data.draw(st.booleans())}{name}")
    words += [
        "--data_path",
        data.draw(st.sampled_from(["1:30", "2020-01-01", "no", "-x", "null", "a: b", "#c", "\u00fc"])),
    ]
    flags = parse(TrainConfig, words)
    file = tmp_path_factory.getbasetemp() / "written.yaml"
    file.write_text(to_yaml(flags))
    read = parse(TrainConfig, ["--config", str(file)])
    assert to_dict(read) | {"config": None} == to_dict(flags) and read.given - {"config"} == flags.given
