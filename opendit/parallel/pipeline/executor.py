"""Runs a rank's share of a schedule: receives, passes, sends."""

from collections.abc import Callable, Sequence
from typing import Any, cast

from torch import Tensor

from opendit.parallel.pipeline.links import Links
from opendit.parallel.pipeline.schedule import Action, received, sent

AHEAD = 1  # receives of so many further passes are posted before one is computed
Pass = Callable[[Action, Tensor | None], Tensor | None]


def execute(
    actions: Sequence[Action], links: Links, chunks: int, compute: Pass, key_of: Callable[[int], tuple[Any, ...]]
) -> None:
    """Works through ``actions``; all ranks of the pipeline call it with theirs.

    Args:
        compute: one pass: gets what was received for it (None: the model's input, or the loss) and returns what is to
            be sent (activations, or the gradient of the pass's input; not looked at where nothing is).
        key_of: of a micro-batch's number: what all micro-batches have in common whose activations are alike.
    """
    incoming = [received(action, links.rank, links.ranks, chunks) for action in actions]
    posted: dict[int, tuple[Any, ...]] = {}

    def post(place: int) -> None:
        message = incoming[place]
        if place not in posted and message is not None:
            posted[place] = links.post(message, key_of(actions[place].micro_batch))

    for place, action in enumerate(actions):
        post(place)
        for further in range(place + 1, min(len(actions), place + 1 + AHEAD)):
            message = incoming[further]
            if message is not None and links.known(message, key_of(actions[further].micro_batch)):
                post(further)
        value = None
        if place in posted:
            value, work = posted.pop(place)
            work.wait()
        result = compute(action, value)
        del value
        message = sent(action, links.rank, links.ranks, chunks)
        if message is not None:
            links.send(message, cast(Tensor, result), action.chunk, key_of(action.micro_batch))
        del result
    links.finish()
