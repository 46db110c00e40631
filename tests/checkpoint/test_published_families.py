"""Public models' folders written by diffusers are read, exported, and loaded by diffusers again."""

import json

import pytest
import torch

from opendit.checkpoint.foreign import is_published, open_published
from opendit.checkpoint.matched import fill
from opendit.export.__main__ import main
from opendit.models.families import FAMILIES
from opendit.models.families.public_config import public_config
from opendit.models.zoo import empty_model
from tests.models.families.oracles import ORACLES, ours


@pytest.mark.parametrize("family", ORACLES)
def test_a_folder_is_read_and_goes_back_without_a_changed_bit(family, tmp_path):
    oracle = ORACLES[family](torch.bfloat16)
    oracle.module.save_pretrained(tmp_path / "small" / "transformer", max_shard_size="20KB")
    assert len(list((tmp_path / "small" / "transformer").glob("*.safetensors"))) > 2
    about = FAMILIES[family]
    index = {"_class_name": about.pipelines[0], "transformer": ["diffusers", about.network], **about.components}
    (tmp_path / "small" / "model_index.json").write_text(json.dumps(index))
    assert is_published(tmp_path / "small") and not is_published(tmp_path)
    opened = open_published(tmp_path / "small", FAMILIES)
    assert opened.family.name == family
    model = empty_model(public_config(family, opened.config, oracle.shape[1:]), parameters=False)
    fill(model, opened.tensors())
    expected = ours(oracle, torch.bfloat16).state_dict()
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.bfloat16 and torch.equal(parameter, expected[name]), name
    argv = ["diffusers", "--ckpt", str(tmp_path / "small"), "--base", str(tmp_path / "small"), "--output"]
    for size in ("30KB", "1GB"):
        output = tmp_path / size
        main([*argv, str(output), "--max_shard_size", size])
        assert json.loads((output / "transformer" / "config.json").read_text()) == opened.config
        loaded, report = type(oracle.module).from_pretrained(
            output, subfolder="transformer", torch_dtype=torch.bfloat16, output_loading_info=True
        )
        assert not any(report.values()), report
        state = loaded.state_dict()
        assert state.keys() == oracle.module.state_dict().keys()
        for name, tensor in oracle.module.state_dict().items():
            assert torch.equal(state[name].to(tensor.dtype), tensor), name
