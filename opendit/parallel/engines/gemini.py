"""ZeRO stage 3, by Colossal-AI's Gemini."""

import math

import torch

from opendit.parallel.engines.base import Engine, StepResult


class GeminiEngine(Engine):
    """ZeRO stage 3 by chunks: a parameter's piece is where it overlaps this rank's shard of its chunk."""

    whole = False
    no_graph = "Gemini fetches and frees weights from the host (--plugin gemini)"

    def _locate(self):
        manager = self.optimizer.chunk_manager
        self._skipped = False
        self._watch_skips()
        self.spans, self._slices, self._holders = {}, {}, dict.fromkeys(self.shapes)
        by_name = dict(self.model.named_parameters())
        for name in self.shapes:
            chunk = manager.get_chunk(by_name[name])
            info = chunk.tensors_info[by_name[name]]
            ranks = range(self.mesh.world_size)
            begin = [0 if chunk.keep_gathered else r * chunk.shard_size for r in ranks]
            size = chunk.chunk_size if chunk.keep_gathered else chunk.shard_size
            low = [max(info.offset, b) for b in begin]
            high = [max(lo, min(info.end, b + size)) for lo, b in zip(low, begin, strict=True)]
            self.spans[name] = [
                (min(lo - info.offset, info.end - info.offset), hi - info.offset) if hi > lo else (0, 0)
                for lo, hi in zip(low, high, strict=True)
            ]
            mine, origin = self.mesh.rank, begin[self.mesh.rank]
            self._slices[name] = (chunk, slice(low[mine] - origin, high[mine] - origin))
        real_to_name = {id(p): n for n, p in by_name.items()}
        for number, fake in self.optimizer.id_to_fake_params.items():
            self._holders[real_to_name[id(self.optimizer.id_to_real_params[number])]] = fake

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
            # Without this the next micro-batch would be added to the bad gradients.
            self.optimizer.chunk_manager.accumulating_grads = False
            return self._on_host(math.inf, scale)
        return self._on_host(self.optimizer._current_grad_norm / scale, scale)

    def master(self, name):
        # Read the fp32 chunk, never its half-precision pair: that one's memory is reused for gradients.
        chunk, where = self._slices[name]
        return chunk.paired_chunk.payload[where]

    def moments(self, name):
        holder = self._holders[name]
        if holder is not None and holder not in self.adam.state:
            holder.data = self.master(name)  # the optimizer leaves it empty between steps
            self.adam.init_state(holder)
        return super().moments(name)

    @torch.no_grad()
    def load_master(self, name, full):
        self.master(name).copy_(full.reshape(-1)[slice(*self.span(name))])

    @torch.no_grad()
    def finish_loading(self):
        for chunk in self.optimizer.chunk16_set:
            chunk.payload.copy_(chunk.paired_chunk.payload)

    def _scaler(self):
        return getattr(self.optimizer.mix_precision_mixin, "grad_scaler", None)
