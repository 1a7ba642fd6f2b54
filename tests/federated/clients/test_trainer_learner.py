"""A client's rounds are one fit: the same bits as centralised training, whatever happens between and within rounds."""

from __future__ import annotations

import copy
import multiprocessing
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.federated.clients.sites import (
    Net,
    Rows,
    centralised,
    evaluate_order,
    fit_order,
    optimizer_state,
    weights_of,
)
from torch.utils.data import DataLoader

from arclight import Callback
from arclight.federated.clients.client import Client
from arclight.federated.clients.trainer_learner import TrainerLearner, trainer_factory
from arclight.federated.errors import CancelledError, FederatedError, ProtocolError
from arclight.optim.schedules import cosine

CPU = {"accelerator": "cpu"}


def quiet(steps: int, loss: float | None) -> None:
    pass


def learner_of(folder: Path, module: Net, seed: int | None = 5, **options: Any) -> TrainerLearner:
    return TrainerLearner(module, Rows(), trainer_factory(**{**CPU, **options}), folder, seed=seed)


def rounds(
    learner: TrainerLearner, weights: dict[str, torch.Tensor], count: int, steps: int
) -> dict[str, torch.Tensor]:
    """FedAvg of one client with rate 1 that sends weights: the server's next weights are what was sent."""
    for number in range(count):
        outcome = learner.fit(fit_order(number, steps, number * steps), weights, quiet)
        weights = {**weights, **{key: outcome.tensors[key] for key in outcome.tensors}}
    return weights


def assert_equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for key, value in left.items():
        assert torch.equal(value, right[key]), key


# 9 batches an epoch: rounds end within epochs, windows and at epochs' ends.
@pytest.mark.parametrize(
    ("norm", "options"),
    [
        pytest.param(norm, options, marks=() if norm == ("accumulate_grad_batches" in options) else pytest.mark.slow)
        for norm in (False, True)
        for options in ({}, {"accumulate_grad_batches": 2}, {"gradient_clip_val": 0.1}, {"val_check_interval": 5})
    ],
)
def test_one_client_is_centralised_training(tmp_path: Path, norm: bool, options: dict[str, Any]) -> None:
    torch.manual_seed(1)
    whole, module = Net(norm), Net(norm)
    begin = weights_of(whole)
    module.load_state_dict({name: torch.zeros_like(value) for name, value in module.state_dict().items()})
    trainer = centralised(tmp_path, whole, Rows(), 35, seed=5, **options)
    learner = learner_of(tmp_path / "client", module, **options)
    weights = rounds(learner, begin, count=5, steps=7)
    assert_equal(weights, weights_of(whole))
    for mine, central in zip(optimizer_state(learner.trainer), optimizer_state(trainer), strict=True):
        assert_equal(mine, central)


def test_training_leaves_global_random_state_unchanged(tmp_path: Path) -> None:
    """Two clients in one process do not draw each other's random numbers, nor those of whoever runs them."""
    ends = []
    for together in (False, True):
        torch.manual_seed(1)
        first, second = Net(), Net()
        begin = weights_of(first)
        learners = [learner_of(tmp_path / f"{together}{i}", module) for i, module in enumerate((first, second))]
        torch.manual_seed(3)
        random.seed(3)
        before = torch.get_rng_state()
        a = learners[0].fit(fit_order(0, 6, 0), begin, quiet)
        if together:
            learners[1].fit(fit_order(0, 11, 0), begin, quiet)
        assert torch.equal(torch.get_rng_state(), before)
        a = learners[0].fit(fit_order(1, 6, 6), {key: a.tensors[key] for key in a.tensors}, quiet)
        ends.append({key: a.tensors[key] for key in a.tensors})
    assert_equal(*ends)


def test_evaluation_disturbs_nothing(tmp_path: Path) -> None:
    ends = []
    for evaluating in (False, True):
        torch.manual_seed(1)
        module = Net(norm=True)
        begin = weights_of(module)
        learner = learner_of(tmp_path / str(evaluating), module)
        zeros = {key: torch.zeros_like(value) for key, value in begin.items()}
        weights = begin
        for number in range(3):
            if evaluating:
                outcome = learner.evaluate(evaluate_order(number), zeros)
                assert outcome.samples == 36
                assert outcome.metrics["val/loss"] == pytest.approx(0.6931472)  # two classes, no weights
            outcome = learner.fit(fit_order(number, 5, 5 * number), weights, quiet)
            # no personal weights here, but the running statistics stay the client's if the server has none
            weights = {key: value for key, value in weights.items() if "running" not in key and "tracked" not in key}
            weights |= {key: outcome.tensors[key] for key in outcome.tensors if key in weights}
        ends.append({key: outcome.tensors[key] for key in outcome.tensors})
    assert_equal(*ends)


class Watched(Rows):
    """Data whose order for validation is drawn while ``inside`` is set, and until ``done`` is."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.done, self.patience_s = threading.Event(), threading.Event(), 2.0

    def val_dataloader(self) -> Any:
        return DataLoader(self.rows, 5, sampler=self)

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[int]:
        self.inside.set()
        self.done.wait(self.patience_s)
        return iter(range(len(self.rows)))


def test_measuring_in_another_thread_disturbs_nothing(tmp_path: Path) -> None:
    """A server that measures draws from the generators that the client in its process has just seeded for its first fit."""

    def trained(measuring: bool) -> dict[str, torch.Tensor]:
        torch.manual_seed(1)
        module, data = Net(), Watched()
        begin = weights_of(module)
        learner = learner_of(tmp_path / str(measuring), module)
        server = TrainerLearner(Net(), data, trainer_factory(**CPU), tmp_path / f"server-{measuring}")
        thread = threading.Thread(target=server.evaluate, args=(evaluate_order(0), begin))
        train = learner.trainer.fit

        def fit(*arguments: Any, **named: Any) -> None:
            if measuring:
                thread.start()
                data.inside.wait(0.5)  # in vain, where threads take turns
            train(*arguments, **named)

        learner.trainer.fit = fit  # type: ignore[method-assign]
        outcome = learner.fit(fit_order(0, 5, 0), begin, quiet)
        data.done.set()
        if measuring:
            thread.join(60)
            assert data.inside.is_set()
        return {key: outcome.tensors[key] for key in outcome.tensors}

    assert_equal(trained(measuring=False), trained(measuring=True))


def test_measuring_in_another_thread_does_not_disturb_what_is_built(tmp_path: Path) -> None:
    """Weights that do not travel stay as ``build`` drew them."""

    def built(measuring: bool) -> dict[str, torch.Tensor]:
        server = TrainerLearner(Net(), data := Watched(), trainer_factory(**CPU), tmp_path / f"server-{measuring}")
        thread = threading.Thread(target=server.evaluate, args=(evaluate_order(0), weights_of(Net())))

        def build() -> tuple[Net, Rows]:
            torch.manual_seed(1)
            if measuring:
                thread.start()
                data.inside.wait(0.5)  # in vain, where threads take turns
            return Net(), Rows()

        learner = Client("a", build=build, trainer=CPU).learner(tmp_path / f"client-{measuring}")
        assert isinstance(learner, TrainerLearner)
        data.done.set()
        if measuring:
            thread.join(60)
            assert data.inside.is_set()
        return weights_of(learner.module)

    assert_equal(built(measuring=False), built(measuring=True))


def _measure(learner: TrainerLearner, weights: dict[str, torch.Tensor]) -> None:
    learner.evaluate(evaluate_order(0), weights)


def test_a_fork_beside_a_thread_that_measures_can_do_so_too(tmp_path: Path) -> None:
    learner, data, weights = learner_of(tmp_path / "own", Net()), Watched(), weights_of(Net())
    server = TrainerLearner(Net(), data, trainer_factory(**CPU), tmp_path / "server")
    data.patience_s = 60.0
    thread = threading.Thread(target=_measure, args=(server, weights))
    thread.start()
    assert data.inside.wait(60)
    child = multiprocessing.get_context("fork").Process(target=_measure, args=(learner, weights))
    child.start()
    child.join(30)
    code = child.exitcode
    child.kill()
    data.done.set()
    thread.join(60)
    assert code == 0


def test_an_evaluation_is_that_of_the_given_weights(tmp_path: Path) -> None:
    torch.manual_seed(1)
    module, other = Net(), Net()
    learner = learner_of(tmp_path, module)
    learner.fit(fit_order(0, 3, 0), weights_of(module), quiet)
    measured = learner.evaluate(evaluate_order(0), weights_of(other)).metrics
    x, y = Rows().rows.tensors
    other.eval()
    with torch.no_grad():
        accuracy = (other.net(x).argmax(1) == y).float().mean().item()
    assert measured["val/accuracy"] == pytest.approx(accuracy)


@pytest.mark.parametrize("killed_at", [1, 4, 9, 10])
def test_a_broken_round_goes_on_from_its_journal(tmp_path: Path, killed_at: int) -> None:
    """At most ``checkpoint_every_steps`` steps are done again, and the end has the same bits."""
    torch.manual_seed(1)
    begin = weights_of(Net())
    clean, broken = learner_of(tmp_path / "clean", Net()), learner_of(tmp_path / "broken", Net())
    first = [learner.fit(fit_order(0, 5, 0), begin, quiet) for learner in (clean, broken)]
    weights = {key: first[0].tensors[key] for key in first[0].tensors}
    order = fit_order(1, 10, 5, checkpoint_every_steps=3)
    wanted = clean.fit(order, weights, quiet)

    class Killed(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 5 + killed_at:
                raise MemoryError("no room")

    broken.trainer.callbacks.insert(0, Killed())
    with pytest.raises(MemoryError):
        broken.fit(order, weights, quiet)

    class Count(Callback):
        steps = 0

        def on_train_batch_end(self, *_: Any) -> None:
            self.steps += 1

    count = Count()
    again = learner_of(tmp_path / "broken", Net(), callbacks=count)  # another process would make it anew
    found = again.fit(order, weights, quiet)
    assert count.steps == 10 - (killed_at - 1) // 3 * 3, "what the journal had is not done again"
    assert_equal({k: found.tensors[k] for k in found.tensors}, {k: wanted.tensors[k] for k in wanted.tensors})
    assert (found.samples, found.steps) == (wanted.samples, wanted.steps)
    for mine, other in zip(optimizer_state(again.trainer), optimizer_state(clean.trainer), strict=True):
        assert_equal(mine, other)


def test_a_round_that_was_finished_is_not_trained_again(tmp_path: Path) -> None:
    torch.manual_seed(1)
    begin = weights_of(Net())
    order = fit_order(0, 7, 0)
    outcome = learner_of(tmp_path, Net()).fit(order, begin, quiet)
    wanted, counts = {k: outcome.tensors[k] for k in outcome.tensors}, (outcome.samples, outcome.steps, outcome.metrics)
    steps: list[int] = []
    learner = learner_of(tmp_path, Net())
    again = learner.fit(order, begin, lambda done, loss: steps.append(done))
    assert steps == []
    assert_equal({k: again.tensors[k] for k in again.tensors}, wanted)
    assert (again.samples, again.steps) == counts[:2]
    # and the next round goes on as if nothing had been
    reference = learner_of(tmp_path / "reference", Net())
    rounds_of = [reference, learner]
    reference.fit(order, begin, quiet)
    ends = [each.fit(fit_order(1, 4, 7), wanted, quiet) for each in rounds_of]
    assert_equal(*({k: end.tensors[k] for k in end.tensors} for end in ends))


def test_a_finished_round_that_is_asked_for_again_costs_no_state(tmp_path: Path) -> None:
    """Not even where nothing is saved."""
    torch.manual_seed(1)
    begin = weights_of(Net())
    ends = []
    for again in (False, True):
        learner = learner_of(tmp_path / str(again), Net())
        first = learner.fit(fit_order(1, 7, 0, checkpoint_every_steps=0), begin, quiet)
        weights = {key: first.tensors[key] for key in first.tensors}
        if again:
            repeated = learner.fit(fit_order(1, 7, 0, checkpoint_every_steps=0), begin, quiet)
            assert_equal({key: repeated.tensors[key] for key in repeated.tensors}, weights)
            assert repeated.samples == first.samples
        second = learner.fit(fit_order(2, 7, 7, checkpoint_every_steps=0), weights, quiet)
        ends.append({key: second.tensors[key] for key in second.tensors})
        assert not (tmp_path / str(again) / "states").exists()
    assert_equal(*ends)


def test_rounds_trained_by_another_process_are_continued(tmp_path: Path) -> None:
    """Two workers take turns with one client: neither goes on from what it remembers of earlier rounds."""
    torch.manual_seed(1)
    begin = weights_of(Net())
    alone, turns = learner_of(tmp_path / "alone", Net()), [learner_of(tmp_path / "both", Net()) for _ in range(2)]
    left, right = begin, begin
    for number in range(1, 6):
        one = alone.fit(fit_order(number, 4, 4 * number - 4), left, quiet)
        left = {key: one.tensors[key] for key in one.tensors}
        other = turns[number % 2].fit(fit_order(number, 4, 4 * number - 4), right, quiet)
        right = {key: other.tensors[key] for key in other.tensors}
    assert_equal(left, right)


def test_a_damaged_state_gives_way_to_the_one_before(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(1)
    begin = weights_of(Net())
    learner = learner_of(tmp_path, Net())
    for number in range(3):
        outcome = learner.fit(fit_order(number, 4, 4 * number), begin, quiet)
    wanted = {key: outcome.tensors[key] for key in outcome.tensors}

    def names() -> list[str]:
        return sorted(path.name for path in (tmp_path / "states").iterdir())

    assert names() == ["000002-round-1-step-4", "000003-round-2-step-4"]
    (tmp_path / "states" / names()[1] / "model.safetensors").write_bytes(b"x" * 100)
    again = learner_of(tmp_path, Net())
    outcome = again.fit(fit_order(2, 4, 8), begin, quiet)
    assert "is damaged" in caplog.text
    assert_equal({key: outcome.tensors[key] for key in outcome.tensors}, wanted)
    assert names() == ["000002-round-1-step-4", "000004-round-2-step-4"], "the damaged one is gone"
    for name in names():
        (tmp_path / "states" / name / "model.safetensors").write_bytes(b"x" * 100)
    with pytest.raises(FederatedError, match="none of the 2 saved states"):
        learner_of(tmp_path, Net()).fit(fit_order(1, 4, 4), begin, quiet)


def test_a_cancelled_round_ends_and_does_no_harm(tmp_path: Path) -> None:
    torch.manual_seed(1)
    begin = weights_of(Net())
    learner = learner_of(tmp_path, Net())
    first = learner.fit(fit_order(0, 4, 0), begin, quiet)
    weights = {key: first.tensors[key] for key in first.tensors}

    def cancel(steps: int, loss: float | None) -> None:
        if steps == 3:
            raise CancelledError("the round is over")

    with pytest.raises(CancelledError, match="the round is over"):
        learner.fit(fit_order(1, 50, 4), weights, cancel)
    assert learner.trainer.global_step <= 8
    after = learner.fit(fit_order(2, 4, 4), weights, quiet)
    reference = learner_of(tmp_path / "reference", Net())
    reference.fit(fit_order(0, 4, 0), begin, quiet)
    wanted = reference.fit(fit_order(2, 4, 4), weights, quiet)
    assert_equal({k: after.tensors[k] for k in after.tensors}, {k: wanted.tensors[k] for k in wanted.tensors})


def test_a_client_that_skipped_rounds_goes_by_the_clock_of_the_run(tmp_path: Path) -> None:
    begin = weights_of(Net())
    learner = learner_of(tmp_path, Net())
    for round, clock in ((0, 0), (4, 40), (3, 10)):
        learner.fit(fit_order(round, 5, clock), begin, quiet)
        assert learner.trainer.global_step == clock + 5
        rate = 1e-2 * cosine(clock + 5, total_steps=60, warmup=5, final=0.1)
        assert learner.trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(rate)


def test_personal_frozen_and_randomised_weights(tmp_path: Path) -> None:
    torch.manual_seed(1)
    module = Net()
    begin = {key: value + 1 for key, value in weights_of(module).items()}
    learner = learner_of(tmp_path, module)

    def train(number: int, **keep: Any) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        outcome = learner.fit(fit_order(number, 2, 2 * number, local_policy=keep, seed=9), begin, quiet)
        return {key: outcome.tensors[key] for key in outcome.tensors}, weights_of(module)

    sent, after = train(0, masks={"personal": ["net.4."]})
    assert list(sent) == ["model/net.0.weight", "model/net.0.bias"]
    own = after["model/net.4.weight"]
    assert not torch.equal(own, begin["model/net.4.weight"]), "personal weights are trained"
    assert (own - begin["model/net.4.weight"]).abs().max() < 0.1, "the server's are the first"
    sent, after = train(1, masks={"personal": ["net.4."]})
    assert 0 < (after["model/net.4.weight"] - own).abs().max() < 0.1, "they go on from where they were"
    sent, after = train(2, masks={"frozen": ["net.0.weight"]})
    assert list(sent) == ["model/net.0.bias", "model/net.4.weight", "model/net.4.bias"]
    assert torch.equal(after["model/net.0.weight"], begin["model/net.0.weight"])
    assert module.net[0].weight.requires_grad
    ends = [train(number, masks={"randomised": ["net.0.*"]}, reset_optimizer=True) for number in (3, 4)]
    assert all(list(sent) == ["model/net.4.weight", "model/net.4.bias"] for sent, _ in ends)
    assert ends[0][1]["model/net.0.weight"].abs().max() < 0.5, "drawn anew: the server's are beyond 1"
    with pytest.raises(ProtocolError, match="no masks 'frozn'"):
        train(5, masks={"frozn": ["net.0.*"]})


def test_moments_travel_when_asked_for(tmp_path: Path) -> None:
    begin = weights_of(Net())
    learner, other = learner_of(tmp_path / "a", Net()), learner_of(tmp_path / "b", Net(), seed=8)
    names = [name for name, _ in Net().named_parameters()]
    send = tuple(f"{kind}/{name}" for kind in ("model", "exp_avg", "exp_avg_sq") for name in names)
    keep = {"moments": ["exp_avg", "exp_avg_sq"]}
    outcome = learner.fit(fit_order(0, 5, 0, local_policy=keep), begin, quiet)
    sent = {key: outcome.tensors[key] for key in outcome.tensors}
    assert set(sent) == set(send), "what is averaged is sent"
    for name, entries in zip(names, optimizer_state(learner.trainer), strict=True):
        assert torch.equal(sent[f"exp_avg/{name}"], entries["exp_avg"])
    seen = {}

    class Look(Callback):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            seen.setdefault("state", copy.deepcopy(optimizer_state(trainer)))

    other.trainer.callbacks.insert(0, Look())
    back = other.fit(fit_order(1, 2, 5, local_policy=keep), sent, quiet)
    assert set(back.tensors) == set(send)
    for name, entries in zip(names, seen["state"], strict=True):
        assert torch.equal(sent[f"exp_avg_sq/{name}"], entries["exp_avg_sq"])
        assert entries["step"] == 5


def test_trainer_limits_that_end_a_round_early_are_refused(tmp_path: Path) -> None:
    learner = learner_of(tmp_path, Net(), max_steps=6)
    begin = weights_of(Net())
    learner.fit(fit_order(0, 4, 0), begin, quiet)
    with pytest.raises(FederatedError, match="came to its end after 2 of 4 steps of round 1"):
        learner.fit(fit_order(1, 4, 4), begin, quiet)


def test_loaders_will_do(tmp_path: Path) -> None:
    """In the place of a data module: the same bits."""
    torch.manual_seed(1)
    begin = weights_of(Net())
    data = Rows()
    ends = []
    for number, given in enumerate((data, data.train_dataloader(), (data.train_dataloader(), data.val_dataloader()))):
        learner = TrainerLearner(Net(), given, trainer_factory(**CPU), tmp_path / str(number), seed=5)
        outcome = learner.fit(fit_order(1, 11, 0), begin, quiet)
        ends.append({key: outcome.tensors[key] for key in outcome.tensors})
    assert_equal(ends[0], ends[1])
    assert_equal(ends[0], ends[2])
    assert learner.evaluate(evaluate_order(1), begin).samples == 36
    with pytest.raises(FederatedError, match="has no validation_step or no validation data"):
        TrainerLearner(Net(), data.train_dataloader(), trainer_factory(**CPU), tmp_path / "none").evaluate(
            evaluate_order(1), begin
        )
