"""--log_to, with fake wandb and mlflow libraries that record what they get."""

import os
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from unittest.mock import patch

import pytest

import train
from tests.training.test_train import TINY, log_of
from tests.training.test_validation import same_bits

FLAGS = [*TINY, *"--batch_size 4 --max_steps 2 --sample_steps 2 --sample_every 2".split()]


class Wandb:
    """A fake of the part of wandb that is called. Settings and Image keep their arguments."""

    def __init__(self, fails=False):
        self.started, self.lines, self.finished, self.fails = [], [], 0, fails
        self.Settings, self.Image = SimpleNamespace, lambda image: image.size

    def init(self, *, id, **given):
        self.started.append({"id": id, **given})
        return SimpleNamespace(id=id or "made", define_metric=self.define_metric, log=self.log, finish=self.finish)

    def define_metric(self, name, step_metric):
        assert (name, step_metric) == ("*", "step")

    def log(self, values):
        if self.fails:
            raise RuntimeError("the library is broken")
        self.lines.append(values)

    def finish(self):
        self.finished += 1


class Mlflow:
    """A fake of the part of mlflow's client that is called."""

    def __init__(self):
        self.uris, self.experiments, self.runs, self.metrics, self.images = [], {}, {}, [], []

    def __call__(self, tracking_uri):
        self.uris.append(tracking_uri)
        return self

    def get_experiment_by_name(self, name):
        return self.experiments.get(name)

    def create_experiment(self, name, artifact_location):
        self.experiments[name] = SimpleNamespace(experiment_id="7", artifact_location=artifact_location)
        return "7"

    def create_run(self, experiment, run_name):
        assert experiment == "7"
        self.runs["r0"] = SimpleNamespace(params={}, status="RUNNING", name=run_name)
        return SimpleNamespace(info=SimpleNamespace(run_id="r0"))

    def update_run(self, run_id, status):
        self.runs[run_id].status = status

    set_terminated = update_run

    def get_run(self, run_id):
        return SimpleNamespace(data=SimpleNamespace(params=dict(self.runs[run_id].params)))

    def log_batch(self, run_id, metrics=(), params=()):
        assert len(params) <= 100 and self.runs[run_id].status == "RUNNING"
        for key, value in params:
            assert key not in self.runs[run_id].params, "a parameter can't be changed"
            self.runs[run_id].params[key] = value
        self.metrics += metrics

    def log_image(self, run_id, image, key, step):
        self.images.append((key, step, image.size))


@pytest.fixture
def libraries(monkeypatch):
    """Replace wandb and mlflow with fakes, return (wandb, mlflow client), and remove their environment variables."""
    wandb, mlflow, client = Wandb(), ModuleType("mlflow"), Mlflow()
    wandb.__spec__, mlflow.__spec__ = ModuleSpec("wandb", None), ModuleSpec("mlflow", None)
    entities = ModuleType("mlflow.entities")
    entities.Metric, entities.Param = (lambda *fields: fields), (lambda key, value: (key, value))
    mlflow.MlflowClient, mlflow.entities = client, entities
    for name, module in {"wandb": wandb, "mlflow": mlflow, "mlflow.entities": entities}.items():
        monkeypatch.setitem(sys.modules, name, module)
    with patch.dict(os.environ):
        for name in [name for name in os.environ if name.startswith(("WANDB_", "MLFLOW_"))]:
            del os.environ[name]
        yield wandb, client


def test_both_get_what_the_log_and_tensorboard_get_and_go_on_after_a_resume(libraries, tmp_path, no_ranks, capsys):
    wandb, mlflow = libraries
    argv = [*FLAGS, *"--validate_path digits --validate_every 2 --log_to wandb mlflow --outputs".split(), str(tmp_path)]
    train.main(argv)
    train.main([*argv, "--max_steps", "4", "--load", "latest"])
    run = tmp_path / "000-DiT-Ti-2"
    lines, said = log_of(run), capsys.readouterr().out
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    for line in lines:
        logged = {k: v for each in wandb.lines if each["step"] == line["step"] for k, v in each.items()}
        tracked = {key: value for key, value, _, step in mlflow.metrics if step == line["step"]}
        for key in ("loss", "grad_norm", "lr", *(["val_loss"] if "val_loss" in line else [])):
            assert logged[key] == tracked[key] == line[key]
    pictures = [(key, step, size) for key, step, size in mlflow.images]
    assert [picture[:2] for picture in pictures] == [(k, s) for s in (2, 4) for k in ("held-out loss", "samples")]
    assert [each for each in wandb.lines if "samples" in each][0]["samples"] == pictures[1][2]
    # By default nothing is sent, and a resumed run is the same run.
    assert [start["mode"] for start in wandb.started] == ["offline"] * 2
    assert [start["id"] for start in wandb.started] == [None, "made"] and wandb.finished == 2
    assert wandb.started[0]["config"]["batch_size"] == 4 and wandb.started[0]["dir"] == str(run)
    assert mlflow.uris == [f"sqlite:///{tmp_path}/mlflow.db"] * 2 and os.environ["MLFLOW_DISABLE_TELEMETRY"] == "true"
    assert mlflow.experiments["opendit"].artifact_location == f"file://{tmp_path}/mlartifacts"
    assert list(mlflow.runs) == ["r0"] and mlflow.runs["r0"].status == "FINISHED"
    assert mlflow.runs["r0"].params["batch_size"] == "4"
    assert f"wandb sync {run}/wandb/offline-run-*" in said and "mlflow ui --backend-store-uri sqlite:///" in said


def test_servers_are_those_of_the_environment(libraries, tmp_path, no_ranks):
    wandb, mlflow = libraries
    os.environ.update(
        WANDB_MODE="online", WANDB_PROJECT="mine", MLFLOW_TRACKING_URI="http://there", MLFLOW_EXPERIMENT_NAME="e"
    )
    train.main([*FLAGS, "--log_to", "wandb", "mlflow", "--sample_every", "0", "--outputs", str(tmp_path)])
    assert wandb.started[0]["mode"] == "online" and wandb.started[0]["project"] == "mine"
    assert mlflow.uris == ["http://there"] and mlflow.experiments["e"].artifact_location is None


def test_a_broken_library_ends_no_run_and_changes_no_weight(libraries, tmp_path, no_ranks, capsys):
    libraries[0].fails = True
    with pytest.raises(SystemExit) as stop:
        train.main([*FLAGS, "--log_to", "wandb", "--outputs", str(tmp_path)])
    said = capsys.readouterr().out
    assert stop.value.code == 1 and said.count("wandb NOT WRITTEN, RuntimeError: the library is broken") == 1
    train.main([*FLAGS, "--outputs", str(tmp_path)])
    assert same_bits(tmp_path / "000-DiT-Ti-2", tmp_path / "001-DiT-Ti-2")


def test_a_library_that_is_missing_is_named_before_any_work(tmp_path, no_ranks, capsys):
    with patch("importlib.util.find_spec", lambda name: None), pytest.raises(SystemExit):
        train.main([*FLAGS, "--log_to", "mlflow", "--outputs", str(tmp_path)])
    assert "--log_to mlflow: needs the package mlflow; pip install mlflow" in capsys.readouterr().err
    assert not any(tmp_path.iterdir())
