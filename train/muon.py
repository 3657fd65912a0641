"""torch.optim.Muon for the matrices of hidden layers, with AdamW for all other parameters, as one optimiser.

Jordan et al., https://kellerjordan.github.io/posts/muon. Its updates are scaled to the size of AdamW's (Liu et al.,
arXiv 2502.16982, section 2.2), so that both use the same learning rate and weight decay.
"""

from __future__ import annotations

from typing import Any

import torch

from train.errors import TrainError

Group = dict[str, Any]


class MuonAdamW(torch.optim.Optimizer):
    """Muon for groups with `muon`, AdamW for the others."""

    def __init__(
        self, groups: list[Group], lr: float, momentum: float, betas: tuple[float, float], fused: bool
    ) -> None:
        """`momentum`: Muon's, `betas`: AdamW's.

        Raises:
            TrainError: this torch has no Muon, or the model has no matrices for it.
        """
        if not hasattr(torch.optim, "Muon"):
            raise TrainError(
                f"--optimizer muon needs torch.optim.Muon, which torch {torch.__version__} lacks; use an image with "
                f"torch 2.9 or newer, or --optimizer adamw"
            )
        mine, others = ([group for group in groups if group["muon"] == muon] for muon in (True, False))
        if not mine:
            raise TrainError(
                "--optimizer muon: the model has no linear layers except its classifier; Muon is for transformers: "
                "use sgd or adamw"
            )
        self._muon = torch.optim.Muon(mine, lr=lr, momentum=momentum, adjust_lr_fn="match_rms_adamw")
        self._adamw = torch.optim.AdamW(others, lr=lr, betas=betas, fused=fused)
        super().__init__([*self._muon.param_groups, *self._adamw.param_groups], {})
        self._share()

    def _share(self) -> None:
        """Make both optimisers use this optimiser's groups and state."""
        for part, muon in ((self._muon, True), (self._adamw, False)):
            part.state = self.state
            part.param_groups = [group for group in self.param_groups if group["muon"] == muon]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # no closure, so no loss to return
        assert closure is None, "MuonAdamW takes no closure"
        self._muon.step()  # type: ignore[no-untyped-call]  # torch's stub
        self._adamw.step()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._share()
