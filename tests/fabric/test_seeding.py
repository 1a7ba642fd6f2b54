"""Seeds of one device."""

import torch

from arclight.fabric.seeding import seed_device


def test_seed_device_draws_as_manual_seed_and_leaves_other_devices_alone() -> None:
    torch.manual_seed(7)
    wanted, seeded = torch.rand(3), torch.cuda._lazy_seed_tracker.manual_seed_all_cb
    seed_device(7, torch.device("cpu"))
    assert torch.equal(torch.rand(3), wanted)
    assert torch.initial_seed() == 7
    assert torch.cuda._lazy_seed_tracker.manual_seed_all_cb is seeded
