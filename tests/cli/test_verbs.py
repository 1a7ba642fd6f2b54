"""data, checkpoint, scan and doctor."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from arclight import checkpoint
from arclight._installed import pip_install
from arclight.cli.commands import doctor
from arclight.cli.commands.scan import listing

Typed = Callable[[str], tuple[int, str, str]]


def test_data_qris_draws_a_data_set_that_check_accepts(typed: Typed) -> None:
    pytest.importorskip("cv2")
    status, out, _ = typed("data qris --out photos --count 6 --seed 5 --size 160")
    assert status == 0
    assert "6 images" in out
    status, out, _ = typed("data check photos/data.yaml --json report.json")
    assert status == 0
    report = json.loads(Path("report.json").read_text())
    assert report["train"]["images"] + report["val"]["images"] == 6
    assert "train:" in out

    status, _, err = typed("data qris --out photos --count 6")
    assert (status, err[:10]) == (2, "arclight: ")


def test_data_check_names_what_is_wrong_and_fails(typed: Typed) -> None:
    pytest.importorskip("cv2")
    typed("data qris --out photos --count 6 --seed 5 --size 160")
    label = next(Path("photos/labels/train").glob("*.txt"))
    label.write_text("0 0.5 0.5 nonsense 0.1\n")
    status, out, _ = typed("data check photos/data.yaml")
    assert status == 1
    assert f"{label.name}:1" in out
    assert not list(Path("photos").rglob("*.cache.npz"))


def test_checkpoints_are_inspected_verified_and_converted(typed: Typed) -> None:
    model = {"layer.weight": torch.arange(6.0).reshape(2, 3)}
    checkpoint.save("one", {"model": model, "progress": {"steps": 7}})
    status, out, _ = typed("checkpoint inspect one --json")
    assert status == 0
    assert json.loads(out)["parameters"] == 6
    assert "one" in typed("checkpoint inspect one")[1]
    assert typed("checkpoint verify one") == (0, "one is sound: every file is what was written\n", "")
    assert typed("checkpoint convert one out.safetensors") == (0, "wrote out.safetensors\n", "")
    assert torch.equal(load_file("out.safetensors")["layer.weight"], model["layer.weight"])

    damaged = next(Path("one").glob("*.safetensors"))
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\xff")
    status, out, _ = typed("checkpoint verify one")
    assert status == 1
    assert damaged.name in out


def test_scan_reads_payment_codes(typed: Typed) -> None:
    pytest.importorskip("zxingcpp")
    segno, qris = pytest.importorskip("segno"), pytest.importorskip("arclight.vision.qris")
    text = qris.build(merchant_name="WARUNG SENJA", city="BANDUNG", mcc="5812", nmid="ID1020021181745")
    Path("photos").mkdir()
    segno.make(text, error="m").save("photos/payment.png", scale=8, border=4)
    segno.make("https://example.org", error="m").save("photos/link.png", scale=8, border=4)
    Path("photos/broken.png").write_text("not an image")
    status, out, err = typed("scan photos --json codes.json")
    assert status == 0
    assert "2 images, 2 codes found, 2 read, 1 are payment codes (QRIS), 1 files skipped" in " ".join(out.split())
    assert "WARUNG SENJA" in out
    codes = json.loads(Path("codes.json").read_text())
    (payment,), (link,) = codes["photos/payment.png"], codes["photos/link.png"]
    fields = {"corners_px", "box_xyxy_px", "confidence", "text", "kind", "payload", "problems"}
    assert set(payment) == set(link) == fields
    assert (payment["kind"], payment["text"], payment["payload"]["merchant_name"]) == ("qris", text, "WARUNG SENJA")
    assert (link["kind"], link["text"], link["payload"]) == ("other", "https://example.org", None)

    status, _, err = typed("scan nowhere.jpg")
    assert (status, err[:10]) == (2, "arclight: ")


def test_control_sequences_in_codes_are_escaped() -> None:
    from rich.console import Console

    code = {
        "corners_px": [[0, 0], [9, 0], [9, 9], [0, 9]],
        "box_xyxy_px": [0.0, 0.0, 9.0, 9.0],
        "confidence": 0.9,
        "text": "\x1b[2J[red]hello[/red]",
        "kind": "text",
        "payload": None,
        "problems": ["tag 63 at 9: \x07 wrong"],
    }
    console = Console(force_terminal=True, record=True, width=100)
    with console.capture() as captured:
        console.print(listing("photo.jpg", [code]))
        console.print(listing("empty.jpg", []))
    shown = captured.get()
    assert "\x1b[2J" not in shown
    assert "\x07" not in shown
    assert "[red]hello[/red]" in shown
    assert "no code" in shown


def test_doctor_describes_this_machine(typed: Typed) -> None:
    status, out, err = typed("doctor --json")
    assert (status, err) == (0, "")
    facts = json.loads(out)
    assert facts["software"]["torch"] == torch.__version__
    assert facts["cpu"]["usable cores"] > 0
    assert any(package.startswith("onnxruntime ") for package in facts["extras"]["deploy"])
    status, out, _ = typed("doctor")
    assert status == 0
    assert facts["cpu"]["model"][:10] in out


def test_doctor_gives_reasons_for_slow_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.platform, "machine", lambda: "x86_64")
    facts = {
        "software": {"torch's CUDA": "none"},
        "cpu": {"instruction sets": ["AVX2"], "torch's threads": 8, "usable cores": 2.0},
        "accelerators": {},
        "room": {"disk free GiB": 1.0, "shared memory GiB": 0.06},
        "extras": {"vision": ["segno MISSING", "zxing-cpp 2.3"]},
    }
    said = "\n".join(doctor.advice(facts))
    for word in (
        "No GPU",
        "bfloat16",
        "VNNI",
        "8 threads on 2",
        "/dev/shm",
        "disk",
        f"segno not installed: {pip_install('vision')}",
    ):
        assert word in said
    facts["cpu"] = {"instruction sets": ["AVX2", "VNNI", "BF16"], "torch's threads": 2, "usable cores": 2.0}
    facts |= {"accelerators": {"cuda:0": "H200"}, "room": {"disk free GiB": 90.0}, "extras": {"vision": ["segno 1.6"]}}
    assert doctor.advice(facts) == []
