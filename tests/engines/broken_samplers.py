"""vLLM samplers with defects; tests name them by import path."""

from typing import Any

from hacrl.sampling.vllm import VllmSampler


class SkipsSync(VllmSampler):
    """Loads the initial weights only."""

    def _sync(self) -> None:
        if self.syncs == 0:
            super()._sync()


class MissesChanges(VllmSampler):
    """As if the policy did not call weights_changed."""

    def weights_changed(self) -> None:
        pass


class LeavesTiedHead(VllmSampler):
    """The initial sync is complete; later ones leave a tied head, like vLLM's reload on the CPU."""

    def _renew_tied_head(self, worker: Any) -> None:
        if self.syncs == 0:
            super()._renew_tied_head(worker)


class NeverRenewsTiedHead(VllmSampler):
    """vLLM's reload without the fix for tied heads."""

    def _renew_tied_head(self, worker: Any) -> None:
        pass


class FailsToReload(VllmSampler):
    """The second sync fails half way."""

    def _renew_tied_head(self, worker: Any) -> None:
        if self.syncs:
            raise ValueError("no memory left")
        super()._renew_tied_head(worker)
