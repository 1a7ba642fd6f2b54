"""Recovery of a site after a power failure, also if the server has lost its files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from tests.federated.clients.sites import Net, Rows, fit_order, weights_of

from arclight.federated.blobs import folder
from arclight.federated.blobs.folder import FolderStore
from arclight.federated.blobs.manifest_io import write_blobs
from arclight.federated.clients.client_store import ClientStore
from arclight.federated.clients.executor import ClientRunner
from arclight.federated.clients.trainer_learner import TrainerLearner, trainer_factory
from arclight.federated.errors import CancelledError
from arclight.federated.protocol import Fit, Update


class Disk:
    """Notes what waited for the disk; a power failure leaves of other files what was not on it yet: nothing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch, self._waited, fsync = monkeypatch, set[int](), os.fsync

        def noted(descriptor: int) -> None:
            self._waited.add(os.fstat(descriptor).st_ino)
            fsync(descriptor)

        monkeypatch.setattr(os, "fsync", noted)

    def fails(self, site: Path) -> None:
        for file in [path for path in site.rglob("*") if path.is_file()]:
            if file.stat().st_ino not in self._waited:
                file.write_bytes(bytes(file.stat().st_size))
        self._patch.setattr(folder, "running_since", lambda: "another time")


class Site:
    """The process that trains the client "c"."""

    def __init__(self, path: Path) -> None:
        self.folder = ClientStore(path / "c", "c", "r")
        torch.manual_seed(11)
        make = trainer_factory(accelerator="cpu")
        self.learner = TrainerLearner(Net(), Rows(), make, path / "c", seed=5)
        self.work, self.store = ClientRunner(self.learner, path / "c", "c"), FolderStore(path / "weights")

    def order(self, round: int, **more: object) -> Fit:
        """Rounds begin from the same weights: what others do to them is not what this is about."""
        torch.manual_seed(1)
        manifest = write_blobs(weights_of(Net()), self.store, kind="weights")
        return fit_order(
            round, 6, 6 * (round - 1), base=manifest.digest, weights=manifest, checkpoint_every_steps=2, **more
        )

    def fit(self, order: Fit, stop: int = 1000) -> Update:
        def progress(steps: int, loss: float | None) -> None:
            if steps >= stop:
                raise CancelledError("the power is gone")

        update = self.work.fit(order, self.store, progress)
        assert update is not None
        return update


@pytest.mark.parametrize("overlap", [0, 1])
def test_an_update_that_both_sides_lost_is_the_same_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overlap: int
) -> None:
    """With overlap the client is within the round after it: from there its training cannot go back."""
    undisturbed = Site(tmp_path / "undisturbed")
    orders = [undisturbed.order(round, overlap=overlap, residual_slot=round % (overlap + 1)) for round in (1, 2)]
    expected = [undisturbed.fit(order).manifest for order in orders]

    disk = Disk(monkeypatch)
    site = Site(tmp_path / "site")
    orders = [site.order(round, overlap=overlap, residual_slot=round % (overlap + 1)) for round in (1, 2)]
    assert site.fit(orders[0]).manifest == expected[0]
    if overlap:
        with pytest.raises(CancelledError):
            site.fit(orders[1], stop=5)
    disk.fails(tmp_path / "site" / "c")
    again = Site(tmp_path / "site")
    assert [again.fit(order).manifest for order in orders] == expected
