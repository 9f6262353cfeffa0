"""vLLM samplers that are wrong on purpose; tests name them by import path."""

from __future__ import annotations

from typing import Any

from hacrl.sampling.vllm import VllmSampler


class SkipsSync(VllmSampler):
    """Takes the start weights and no others."""

    def _sync(self) -> None:
        if self.syncs == 0:
            super()._sync()


class IsNeverTold(VllmSampler):
    """As if the policy had forgotten to say that its weights changed."""

    def weights_changed(self) -> None:
        pass


class LeavesTiedHead(VllmSampler):
    """Right at the start; later the head keeps what it had, as after vLLM's own reload on the CPU."""

    def _renew_tied_head(self, worker: Any) -> None:
        if self.syncs == 0:
            super()._renew_tied_head(worker)


class NeverRenewsTiedHead(VllmSampler):
    """vLLM's own reload from the start on."""

    def _renew_tied_head(self, worker: Any) -> None:
        pass


class FailsToReload(VllmSampler):
    """The second sync breaks in the middle."""

    def _renew_tied_head(self, worker: Any) -> None:
        if self.syncs:
            raise ValueError("no memory left")
        super()._renew_tied_head(worker)
