"""Initialise a model from the weights of another, shard by shard, under any plugin."""

from collections.abc import Mapping

import torch
from torch import Tensor

from opendit.checkpoint.tensor_set import TensorSet
from opendit.models.adapt import Adaptation
from opendit.models.dit import DiT
from opendit.models.parameter_names import canonical_name
from opendit.parallel.engines import Values
from opendit.parallel.layout import Shard


class FirstWeights:
    """The values of any shard of any parameter, as an adaptation says: a slice of a tensor of the file, which alone is
    read of it, a slice of a small tensor that was made of one, or initial values.

    state: the file's tensors. initial: gives the initial values of any shard, by the parameter's canonical name.
    """

    def __init__(self, start: Adaptation, state: Mapping[str, Tensor], initial: Values):
        self._stored, self._made, self._state, self._initial = start.stored, start.made, state, initial

    def __call__(self, name: str, shard: Shard) -> Tensor:
        """A shard of a parameter, (shard.shape) fp32 in host memory; it may be a view of the file.

        Raises ValueError or OSError if the file is not as it was when it was opened."""
        name = canonical_name(name)
        if name in self._stored:
            return read_shard(self._state, self._stored[name], shard).float()
        return shard.take(self._made[name]) if name in self._made else self._initial(name, shard)

    @torch.no_grad()
    def fill(self, model: DiT) -> None:
        """Sets all parameters of a model that is whole and in memory."""
        for name, parameter in model.named_parameters():
            parameter.copy_(self(name, Shard(tuple(parameter.shape), ())))


def read_shard(state: Mapping[str, Tensor], name: str, shard: Shard) -> Tensor:
    """A shard of a file's tensor in its stored dtype, of which alone is read; it may be a view of the file."""
    return state.read(name, shard) if isinstance(state, TensorSet) else shard.take(state[name])
