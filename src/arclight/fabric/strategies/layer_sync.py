"""Synchronise layers over the global batch, as torch's SyncBatchNorm does.

``sync_batchnorm=True`` of a Trainer chooses `TorchSyncBatchNorm` (`selection`), a plugin may be another `LayerSync`; `ddp`, alone, applies
it before it wraps the module. Names are Lightning's and stay.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import nn


class LayerSync(ABC):
    """Replace layers by ones that synchronise over processes, and back."""

    @abstractmethod
    def apply(self, model: nn.Module) -> nn.Module:
        """Return ``model`` with synchronised layers; parameters are kept."""

    @abstractmethod
    def revert(self, model: nn.Module) -> nn.Module:
        """Revert :meth:`apply`."""


class TorchSyncBatchNorm(LayerSync):
    """Normalise over the global batch by torch's SyncBatchNorm. Not on CPUs."""

    def apply(self, model: nn.Module) -> nn.Module:
        converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        return converted

    def revert(self, model: nn.Module) -> nn.Module:
        if isinstance(model, nn.SyncBatchNorm):
            return _plain(model)
        for name, layer in model.named_children():
            setattr(model, name, self.revert(layer))
        return model


class _BatchNorm(nn.modules.batchnorm._BatchNorm):
    """Batch normalisation of any number of dimensions, which a SyncBatchNorm no longer knows."""

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"batch normalisation needs at least 2 dimensions (batch, channels), got {input.dim()}")


def _plain(layer: nn.SyncBatchNorm) -> nn.Module:
    plain = _BatchNorm(layer.num_features, layer.eps, layer.momentum, layer.affine, layer.track_running_stats)
    plain.weight, plain.bias, plain.training = layer.weight, layer.bias, layer.training
    plain.running_mean, plain.running_var = layer.running_mean, layer.running_var
    plain.num_batches_tracked = layer.num_batches_tracked
    return plain
