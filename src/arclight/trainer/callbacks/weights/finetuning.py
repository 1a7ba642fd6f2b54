"""Freeze parts of a model, and unfreeze them at a later epoch.

Users subclass `BaseFinetuning` or pass `BackboneFinetuning`, as in Lightning. Checkpoints hold each optimizer's parameter groups by names
of parameters, under Lightning's keys; a resume makes the groups again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from arclight._intervals import NonNegativeFloat, NonNegativeInt, PositiveFloat, check
from arclight.fabric.errors import MisconfigurationError
from arclight.fabric.rank_zero import rank_zero_warn
from arclight.trainer.callback import Callback

if TYPE_CHECKING:
    from arclight.trainer.module import Module
    from arclight.trainer.trainer import Trainer

log = logging.getLogger(__name__)

Modules = nn.Module | Iterable["Modules"]


def multiplicative(epoch: int) -> float:
    """Return the default growth of the backbone's learning rate: doubled every epoch."""
    return 2.0


class BaseFinetuning(Callback):
    """Base of finetuning: override :meth:`freeze_before_training`, :meth:`finetune_function`.

    The first runs before ``configure_optimizers``, which should then take only parameters that require gradients; the
    second at the start of every epoch, once per optimizer, and adds what it unfreezes with
    :meth:`unfreeze_and_add_param_group`. A resume makes the added groups again before the optimizers' state is put back.
    """

    def __init__(self) -> None:
        self._internal_optimizer_metadata: dict[int, list[dict[str, Any]]] = {}
        self._thawed: dict[str, Any] = {}
        """Names of parameters and batch norms in training after the newest epoch's finetune_function, and that epoch."""
        self._restarting = False

    def freeze_before_training(self, pl_module: Module) -> None:
        """Freeze what is not to be trained at first."""
        raise NotImplementedError(f"{type(self).__name__} must define freeze_before_training")

    def finetune_function(self, pl_module: Module, epoch: int, optimizer: Optimizer) -> None:
        """Unfreeze what is to be trained from ``epoch`` on."""
        raise NotImplementedError(f"{type(self).__name__} must define finetune_function")

    # -- hooks -----------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: Module, stage: str) -> None:
        if stage == "fit":  # groups of a fit before are not those of this one's optimizers; a resume brings its own
            self._internal_optimizer_metadata, self._thawed, self._restarting = {}, {}, False
        self.freeze_before_training(pl_module)

    def on_fit_start(self, trainer: Trainer, pl_module: Module) -> None:
        if not self._restarting:
            return
        parameters = dict(pl_module.named_parameters())
        for index, optimizer in enumerate(trainer.optimizers):
            if groups := self._internal_optimizer_metadata.get(index):
                optimizer.param_groups = [{**g, "params": [parameters[name] for name in g["params"]]} for g in groups]
        for name in self._thawed.get("parameters", []):
            parameters[name].requires_grad = True
        for name in self._thawed.get("norms", []):
            _set_tracking(pl_module.get_submodule(name), True)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: Module) -> None:
        resumed, self._restarting = self._restarting, False
        if resumed and trainer.current_epoch == self._thawed.get("epoch"):
            return  # the run that saved had begun this epoch already
        names = {id(parameter): name for name, parameter in pl_module.named_parameters()}
        for index, optimizer in enumerate(trainer.optimizers):
            before = len(optimizer.param_groups)
            self.finetune_function(pl_module, trainer.current_epoch, optimizer)
            known = self._internal_optimizer_metadata.setdefault(index, [])
            new = optimizer.param_groups[before:] if known else optimizer.param_groups
            known += [{**g, "params": [names[id(p)] for p in g["params"]]} for g in new]
        self._thawed = {
            "epoch": trainer.current_epoch,
            "parameters": [name for name, parameter in pl_module.named_parameters() if parameter.requires_grad],
            "norms": [
                name
                for name, part in pl_module.named_modules()
                if isinstance(part, _BatchNorm) and part.track_running_stats
            ],
        }

    def state_dict(self) -> dict[str, Any]:
        return {"internal_optimizer_metadata": self._internal_optimizer_metadata, "thawed": self._thawed}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._internal_optimizer_metadata = {
            int(index): list(groups) for index, groups in state_dict["internal_optimizer_metadata"].items()
        }
        self._thawed = dict(state_dict.get("thawed", {}))  # Lightning's checkpoints have none
        if not self._thawed:
            groups = [group for groups in self._internal_optimizer_metadata.values() for group in groups]
            self._thawed = {"parameters": [name for group in groups for name in group["params"]]}
        self._restarting = True

    # -- parts of a model ------------------------------------------------------------------------------------------

    @staticmethod
    def flatten_modules(modules: Modules) -> list[nn.Module]:
        """List the modules within ``modules`` that have own parameters or no children.

        ``modules``: one, or nested iterables of them.
        """
        if isinstance(modules, nn.ModuleDict):
            modules = modules.values()
        if isinstance(modules, Iterable):
            inside = [part for module in modules for part in BaseFinetuning.flatten_modules(module)]
        else:
            inside = list(modules.modules())
        return list(dict.fromkeys(part for part in inside if part._parameters or not list(part.children())))

    @staticmethod
    def filter_params(modules: Modules, train_bn: bool = True, requires_grad: bool = True) -> Iterator[nn.Parameter]:
        """Yield the parameters with this ``requires_grad``; of batch norms only if ``train_bn``."""
        for module in BaseFinetuning.flatten_modules(modules):
            if train_bn or not isinstance(module, _BatchNorm):
                yield from (p for p in module.parameters(recurse=False) if p.requires_grad == requires_grad)

    @staticmethod
    def make_trainable(modules: Modules) -> None:
        """Require gradients of the parameters, and let batch norms track statistics again."""
        for module in BaseFinetuning.flatten_modules(modules):
            _set_trainable(module, True)

    @staticmethod
    def freeze_module(module: nn.Module) -> None:
        """Freeze the parameters that ``module`` itself holds; batch norms stop tracking."""
        _set_trainable(module, False)

    @staticmethod
    def freeze(modules: Modules, train_bn: bool = True) -> None:
        """Freeze all parameters, but make those of batch norms trainable if ``train_bn``."""
        for module in BaseFinetuning.flatten_modules(modules):
            _set_trainable(module, train_bn and isinstance(module, _BatchNorm))

    @staticmethod
    def filter_on_optimizer(optimizer: Optimizer, params: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Return the ``params`` that ``optimizer`` lacks, with a warning about the others."""
        present = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        params = list(params)
        new = [parameter for parameter in params if id(parameter) not in present]
        if len(new) < len(params):
            rank_zero_warn(
                "The provided params to be frozen already exist within another group of this optimizer: "
                f"{len(params) - len(new)} are skipped. Did you init your optimizer in `configure_optimizers` with "
                f"{type(optimizer).__name__}(filter(lambda p: p.requires_grad, self.parameters()), ...)?"
            )
        return new

    @staticmethod
    def unfreeze_and_add_param_group(
        modules: Modules,
        optimizer: Optimizer,
        lr: float | None = None,
        initial_denom_lr: float = 10.0,
        train_bn: bool = True,
    ) -> None:
        """Unfreeze ``modules`` and give their parameters to ``optimizer`` as a group of their own.

        Its learning rate is ``lr``, by default that of the first group divided by ``initial_denom_lr``.
        """
        BaseFinetuning.make_trainable(modules)
        rate = optimizer.param_groups[0]["lr"] / initial_denom_lr if lr is None else float(lr)
        parameters = BaseFinetuning.filter_params(modules, train_bn=train_bn, requires_grad=True)
        if new := BaseFinetuning.filter_on_optimizer(optimizer, parameters):
            optimizer.add_param_group({"params": new, "lr": rate})


def _set_tracking(module: nn.Module, tracking: bool) -> None:
    if isinstance(module, _BatchNorm):
        module.track_running_stats = tracking


def _set_trainable(module: nn.Module, trainable: bool) -> None:
    _set_tracking(module, trainable)
    for parameter in module.parameters(recurse=False):
        parameter.requires_grad = trainable


class BackboneFinetuning(BaseFinetuning):
    """Train the module's ``backbone`` from epoch ``unfreeze_backbone_at_epoch`` on.

    Its learning rate begins at ``backbone_initial_lr``, by default ``backbone_initial_ratio_lr`` times that of the first
    group, and is multiplied by ``lambda_func(epoch + 1)`` in every later epoch, with ``should_align`` up to that of the first group.
    ``train_bn``: whether its batch norms are trained. ``verbose`` logs both rates, rounded to ``rounding`` digits.
    ``initial_denom_lr`` is kept for callers of :meth:`unfreeze_and_add_param_group`.
    """

    def __init__(
        self,
        unfreeze_backbone_at_epoch: int = 10,
        lambda_func: Callable[[int], float] = multiplicative,
        backbone_initial_ratio_lr: float = 10e-2,
        backbone_initial_lr: float | None = None,
        should_align: bool = True,
        initial_denom_lr: float = 10.0,
        train_bn: bool = True,
        verbose: bool = False,
        rounding: int = 12,
    ) -> None:
        super().__init__()
        check("unfreeze_backbone_at_epoch", unfreeze_backbone_at_epoch, NonNegativeInt)
        check("backbone_initial_ratio_lr", backbone_initial_ratio_lr, NonNegativeFloat)
        check("backbone_initial_lr", backbone_initial_lr, NonNegativeFloat | None)
        check("initial_denom_lr", initial_denom_lr, PositiveFloat)
        check("rounding", rounding, NonNegativeInt)
        self.unfreeze_backbone_at_epoch, self.lambda_func = unfreeze_backbone_at_epoch, lambda_func
        self.backbone_initial_ratio_lr, self.backbone_initial_lr = backbone_initial_ratio_lr, backbone_initial_lr
        self.should_align, self.initial_denom_lr, self.train_bn = should_align, initial_denom_lr, train_bn
        self.verbose, self.rounding = verbose, rounding
        self.previous_backbone_lr: float | None = None

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "previous_backbone_lr": self.previous_backbone_lr}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.previous_backbone_lr = state_dict["previous_backbone_lr"]
        super().load_state_dict(state_dict)

    def setup(self, trainer: Trainer, pl_module: Module, stage: str) -> None:
        _check_backbone(pl_module)
        if stage == "fit":
            self.previous_backbone_lr = None
        super().setup(trainer, pl_module, stage)

    def freeze_before_training(self, pl_module: Module) -> None:
        self.freeze(pl_module.backbone)

    def finetune_function(self, pl_module: Module, epoch: int, optimizer: Optimizer) -> None:
        rate = optimizer.param_groups[0]["lr"]
        if epoch < self.unfreeze_backbone_at_epoch:
            return
        if epoch == self.unfreeze_backbone_at_epoch or self.previous_backbone_lr is None:
            given = self.backbone_initial_lr
            backbone_rate = rate * self.backbone_initial_ratio_lr if given is None else given
            self.unfreeze_and_add_param_group(
                pl_module.backbone,
                optimizer,
                backbone_rate,
                train_bn=self.train_bn,
                initial_denom_lr=self.initial_denom_lr,
            )
        else:
            backbone_rate = self.lambda_func(epoch + 1) * self.previous_backbone_lr
            if self.should_align:
                backbone_rate = min(backbone_rate, rate)
            optimizer.param_groups[-1]["lr"] = backbone_rate
        self.previous_backbone_lr = backbone_rate
        if self.verbose:
            log.info("Current lr: %s, Backbone lr: %s", round(rate, self.rounding), round(backbone_rate, self.rounding))


def _check_backbone(module: Module) -> None:
    if not isinstance(getattr(module, "backbone", None), nn.Module):
        raise MisconfigurationError(
            f"The LightningModule should have a nn.Module `backbone` attribute; {type(module).__name__} has none"
        )
