"""Engine of --plugin gemini: ZeRO stage 3 by Colossal-AI's Gemini."""

import math

import torch
from torch import Tensor

from opendit.kernels.eight_bit_moments import EightBits
from opendit.parallel.engines import BoosterEngine, StepResult
from opendit.parallel.layout import Cut, Layout


class GeminiEngine(BoosterEngine):
    """Engine with ZeRO stage 3. Gemini joins parameters to chunks and divides every chunk among the ranks. A rank's
    shard of a parameter is the overlap with the rank's range of the chunk."""

    plugin = "gemini"
    whole = False
    no_graph = "Gemini fetches and frees weights from the host (--plugin gemini)"

    def _locate(self):
        manager = self.optimizer.chunk_manager
        self._skipped = False
        self._watch_skips()
        self._slices, self._optimizer_keys, cuts = {}, dict.fromkeys(self.shapes), {}
        by_name = dict(self.model.named_parameters())
        for name in self.shapes:
            chunk = manager.get_chunk(by_name[name])
            info = chunk.tensors_info[by_name[name]]
            if chunk.keep_gathered:
                cuts[name], origin, ranges = [], 0, [(info.offset, info.end)] * self.mesh.world_size
            else:
                begin = [rank * chunk.shard_size for rank in range(self.mesh.world_size)]
                ranges = [_overlap(info.offset, info.end, b, b + chunk.shard_size) for b in begin]
                held = tuple(((start - info.offset, stop - info.offset),) for start, stop in ranges)
                cuts[name], origin = [Cut("world", None, held)], begin[self.mesh.rank]
            start, stop = ranges[self.mesh.rank]
            self._slices[name] = (chunk, slice(start - origin, stop - origin))
        self.layout = Layout(self.mesh, self.shapes, cuts)
        real_to_name = {id(p): n for n, p in by_name.items()}
        for number, fake in self.optimizer.id_to_fake_params.items():
            self._optimizer_keys[real_to_name[id(self.optimizer.id_to_real_params[number])]] = fake

    def _watch_skips(self) -> None:
        mixin = self.optimizer.mix_precision_mixin
        decide = mixin.should_skip_step

        def decide_and_note() -> bool:
            self._skipped = decide()
            return self._skipped

        mixin.should_skip_step = decide_and_note

    def _step(self) -> StepResult:
        scale = self.scaler_state().get("scale", 1.0)
        self.optimizer.step()
        if self._skipped:
            # Discard non-finite gradients. Otherwise Gemini would add the next micro-batch's gradients to them.
            self.optimizer.chunk_manager.accumulating_grads = False
            return self._on_host(math.inf, scale)
        return self._on_host(self.optimizer._current_grad_norm / scale, scale)

    def master(self, name: str) -> Tensor:
        # Read the fp32 chunk. The half-precision chunk is not valid, because Gemini reuses its memory for gradients.
        chunk, where = self._slices[name]
        return chunk.paired_chunk.payload[where].view(self.layout.local(name).shape)

    def _moments(self, name: str) -> dict[str, Tensor | EightBits]:
        key = self._optimizer_keys[name]
        if key is not None and key not in self.adam.state:
            key.data = self.master(name)  # set again, because the optimizer empties this tensor between steps
            self.adam.init_state(key)
        return super()._moments(name)

    @torch.no_grad()
    def finish_loading(self) -> None:
        for chunk in self.optimizer.chunk16_set:
            chunk.payload.copy_(chunk.paired_chunk.payload)

    def _scaler(self):
        return getattr(self.optimizer.mix_precision_mixin, "grad_scaler", None)


ENGINE = GeminiEngine


def _overlap(start: int, stop: int, low: int, high: int) -> tuple[int, int]:
    """Return the intersection of [start, stop) and [low, high); (start, start) if it is empty."""
    first, last = max(start, low), min(stop, high)
    return (first, last) if first < last else (start, start)
