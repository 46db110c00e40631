"""Copy pretrained weights into an undivided model in memory. A run does the same shard by shard (FirstWeights)."""

from collections.abc import Sequence

import torch

from opendit.models.dit import DiT, DiTConfig
from opendit.models.finetuning import Adaptation, adapt
from opendit.models.zoo import Weights


@torch.no_grad()
def taken_over(model: DiT, weights: Weights, found: DiTConfig, class_names: Sequence[str] = ()) -> Adaptation:
    """Copy the weights of a model ``found`` that fit into ``model``. All other values of ``model`` stay."""
    own = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    start = adapt(model, weights, found, class_names, fresh=own.__getitem__)
    for name, tensor in model.state_dict().items():
        if name in start.made:
            tensor.copy_(start.made[name])
        elif name in start.stored:
            tensor.copy_(weights.state[start.stored[name]])
    return start
