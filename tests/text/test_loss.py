"""Cross-entropy in chunks beside float64 and torch's own, whole and over a vocabulary in parts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore

from arclight.text.loss import IGNORED, cross_entropy, cross_entropy_of_logits


def example(rows: int = 75, width: int = 32, vocabulary: int = 300) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, rows // 3, width, generator=generator)
    weight = torch.randn(vocabulary, width, generator=generator)
    labels = torch.randint(0, vocabulary, hidden.shape[:2], generator=generator)
    labels[0, :4] = IGNORED
    return hidden, weight, labels


def reference(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, ...]:
    h, w = hidden.double().requires_grad_(), weight.double().requires_grad_()
    loss = F.cross_entropy((h @ w.T).flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
    return loss.detach(), *torch.autograd.grad(loss, (h, w))


@pytest.mark.parametrize("chunk", [7, 75, None])
def test_loss_and_gradients_equal_float64(chunk: int | None) -> None:
    hidden, weight, labels = example()
    h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    loss = cross_entropy(h, w, labels, chunk=chunk)
    (loss / 3).backward()
    want, dh, dw = reference(hidden, weight, labels)
    torch.testing.assert_close(loss.double(), want, rtol=1e-6, atol=0)
    torch.testing.assert_close(h.grad.double() * 3, dh, rtol=0, atol=1e-5)
    torch.testing.assert_close(w.grad.double() * 3, dw, rtol=0, atol=2e-5)
    torch.testing.assert_close(cross_entropy_of_logits(hidden @ weight.T, labels), loss.detach())


def test_in_bfloat16_the_loss_stays_within_a_thousandth() -> None:
    hidden, weight, labels = example()
    with torch.autocast("cpu", torch.bfloat16):
        loss = cross_entropy(hidden.requires_grad_(), weight.requires_grad_(), labels)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(
        float(reference(hidden.detach(), weight.detach(), labels)[0]), rel=1e-3
    )
    assert weight.grad.dtype == torch.float32


def test_without_valid_labels_the_loss_is_zero_and_has_no_gradient() -> None:
    hidden, weight, labels = example()
    hidden.requires_grad_()
    loss = cross_entropy(hidden, weight, torch.full_like(labels, IGNORED))
    loss.backward()
    assert float(loss.detach()) == 0
    assert not hidden.grad.any()


def test_capped_logits() -> None:
    hidden, weight, labels = example()
    h = hidden.clone().requires_grad_()
    loss = cross_entropy(h, weight, labels, softcap=5.0)
    loss.backward()
    same = hidden.double().requires_grad_()
    capped = 5 * ((same @ weight.double().T) / 5).tanh()
    want = F.cross_entropy(capped.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
    want.backward()
    torch.testing.assert_close(loss.double(), want, rtol=1e-6, atol=0)
    torch.testing.assert_close(h.grad.double(), same.grad, rtol=0, atol=1e-5)


@pytest.mark.parametrize("label", [-1, -101, 300, 2**40])
def test_a_label_outside_of_the_vocabulary_is_refused(label: int) -> None:
    hidden, weight, labels = example()
    labels[1, 2] = label
    with pytest.raises(IndexError, match=f"label {label} is outside of the vocabulary of 300"):
        cross_entropy(hidden, weight, labels)


def test_a_label_outside_of_the_vocabulary_gives_nan_on_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("arclight.text.loss._check_labels", lambda *_: None)  # as for a device that is not asked
    hidden, weight, labels = example()
    labels[1, 2], labels[2, 1] = 300, -1
    h = hidden.clone().requires_grad_()
    loss = cross_entropy(h, weight, labels, chunk=7)
    loss.backward()
    assert loss.isnan()
    wrong = torch.zeros_like(labels, dtype=torch.bool)
    wrong[1, 2] = wrong[2, 1] = True
    assert h.grad[wrong].isnan().all()
    assert h.grad[~wrong].isfinite().all()


@pytest.fixture
def two_processes() -> Iterator[None]:
    """The first of two processes whose messages go nowhere."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    torch.distributed.destroy_process_group()


def test_a_label_in_another_ranks_shard_is_accepted(two_processes: None, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, labels = example()
    mesh = init_device_mesh("cpu", (2,))
    rows = DTensor.from_local(weight[:150], mesh, [Shard(0)], run_check=False)
    labels[:] = 200  # a row of the second process's
    assert cross_entropy(hidden, rows, labels).isfinite()
    labels[1, 2] = 300  # nobody's
    with pytest.raises(IndexError, match="label 300 is outside of the vocabulary of 300"):
        cross_entropy(hidden, rows, labels)
    monkeypatch.setattr("arclight.text.loss._check_labels", lambda *_: None)
    assert cross_entropy(hidden, rows, labels).isnan()


def test_a_second_derivative_is_refused() -> None:
    hidden, weight, labels = example()
    h = hidden.clone().requires_grad_()
    with pytest.raises(RuntimeError, match="no second derivative: use cross_entropy_of_logits"):
        torch.autograd.grad(cross_entropy(h, weight, labels), h, create_graph=True)
    (first,) = torch.autograd.grad(cross_entropy_of_logits(h @ weight.T, labels), h, create_graph=True)
    first.square().sum().backward()
    assert h.grad.any()


def test_a_vocabulary_of_one_token_costs_nothing() -> None:
    hidden, weight, labels = example(vocabulary=1)
    h, w = hidden.requires_grad_(), weight.requires_grad_()
    loss = cross_entropy(h, w, labels)
    loss.backward()
    assert float(loss.detach()) == 0
    assert not h.grad.any()
    assert not w.grad.any()


@pytest.mark.parametrize(("sizes", "placements"), [((2,), [Shard(1)]), ((2, 1), [Shard(0), Shard(0)])])
def test_a_weight_cut_in_other_ways_than_by_rows_is_refused(
    two_processes: None, sizes: tuple[int, ...], placements: list[Shard]
) -> None:
    hidden, weight, labels = example()
    mesh = init_device_mesh("cpu", sizes)
    cut = DTensor.from_local(weight, mesh, placements, run_check=False)
    with pytest.raises(ValueError, match="the loss needs it cut by rows over one dimension"):
        cross_entropy(hidden, cut, labels)


def test_rows_that_do_not_divide_by_the_processes_are_refused(two_processes: None) -> None:
    hidden, weight, labels = example(vocabulary=301)
    mesh = init_device_mesh("cpu", (2,))
    rows = DTensor.from_local(
        weight[:151], mesh, [Shard(0)], run_check=False, shape=weight.shape, stride=weight.stride()
    )
    with pytest.raises(ValueError, match="a vocabulary of 301 does not divide by 2"):
        cross_entropy(hidden, rows, labels)
