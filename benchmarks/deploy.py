"""Quantized programs: their speed beside float ones and other ways to quantize, one thread, and what rounding costs.

(a) YOLOv5s at 320 pixels, random weights, one image: PyTorch, float32 and int8 programs in ONNX Runtime and OpenVINO, OpenVINO's
bfloat16, the placement of torchao's X86InductorQuantizer in ONNX Runtime, and ONNX Runtime's own `quantize_static`. Calls take turns;
figures are medians of ratios within a turn, by the time of the process's own CPU; `*_over_*` is a ratio of speeds, except
`ort_int8_over_static`, which is one of times. (b) A token of a language program with 4-bit weights, as in `language_programs`, after 64
others. (c) Points of three tasks on drawn digits (accuracy of images and of sequences, average precision of scenes; one seed) that the
int8 program loses to the float model; `ptq_metric_drop` is the worst. (d) Scenes with 4-bit weights and activations, simulated:
`qat_metric_drop` is what is lost after training with rounding, `w4a4_metric_drop` before it, `w4a4_loss_won_back` the share of that loss
that training wins back, and `float_metric_gain` what as many steps give the float model: means over orders of the training data. (e)
Decibels of a network of batch norms with an epsilon of 1e-3 after training with rounding and conversion, against the trained network;
torchao's own calls beside it.
"""

from __future__ import annotations

import argparse
import copy
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from arclight.deploy import Int8, LowBit, Program, convert, export, prepare_qat, quantize
from arclight.deploy.capture import quiet
from arclight.deploy.parity import compare
from arclight.fabric.extras import require
from arclight.vision import build_model
from benchmarks.deploy_tasks import BATCH, Task, normed, small_inputs, tasks
from benchmarks.language_programs import FASTEST, decode_ratios, fastest
from benchmarks.results import SPREAD, Ratio, paired, parser, publish, timed_in_turns, versions

Figures = dict[str, float | Ratio]
Rows = list[tuple[str, ...]]
HEADER = ("what", "value", f"beside; of times: {SPREAD}")
ANY_NOISE = -50.0
"""Least decibels of models that are scored by their metric instead."""


def main(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    rows: Rows = []
    figures: Figures = {}
    for part in (speed, decode, accuracy, batch_norms):
        found_rows, found_figures = part(options.quick)
        rows += found_rows
        figures |= found_figures
    publish(
        "deploy", "Quantized programs", HEADER, rows, figures, options=options,
        packages=versions("torch", "torchao", "onnxruntime", "openvino", "arclight-torch"),
        notes="\n".join((__doc__.split("\n\n", 1)[1].strip(), busy())),
    )  # fmt: skip


def busy() -> str:
    """Say how busy the machine is, beside this process."""
    load, processors = os.getloadavg()[1], os.cpu_count()
    shared = ": the machine was shared with other work" if load > 1.5 else ""
    return f"The load average was {load:.1f} on {processors} processors{shared}."


# -- speed ---------------------------------------------------------------------------------------------------------


def speed(quick: bool) -> tuple[Rows, Figures]:
    """Return the CPU time of a detector's call in each program, and ratios of them."""
    name, side = ("yolov5n", 64) if quick else ("yolov5s", 320)
    model, batches = _detector(name, side)
    with tempfile.TemporaryDirectory() as folder:
        programs = _programs(model, batches, Path(folder))
        image = batches[0][:1]
        calls: dict[str, Callable[[], Any]] = {"eager": lambda: _called(model, image)}
        calls |= {label: lambda program=program: program(image) for label, program in programs.items()}  # type: ignore[misc]
        times = timed_in_turns(calls, 3 if quick else 25)
    rows = []
    for label, own in times.items():
        beside = "1" if label == "eager" else f"{paired(times['eager'], own)} of eager's speed"
        rows.append((f"{name}, {side} px, {label}: CPU ms", f"{1000 * sorted(own)[len(own) // 2]:.1f}", beside))
    int8 = times["OpenVINO int8"]
    return rows, {
        "int8_over_eager": paired(times["eager"], int8),
        "int8_over_ort_fp32": paired(times["ONNX Runtime float32"], int8),
        "int8_over_bf16": paired(times["OpenVINO bfloat16"], int8),
        "ort_int8_over_stock": paired(times["ONNX Runtime, stock placement"], times["ONNX Runtime int8"]),
        "ort_int8_over_static": paired(times["ONNX Runtime int8"], times["ONNX Runtime quantize_static"]),
        "ort_int8_over_eager": paired(times["eager"], times["ONNX Runtime int8"]),
    }


@torch.no_grad()
def _called(model: nn.Module, image: Tensor) -> Any:
    return model(image)


def _detector(name: str, side: int) -> tuple[nn.Module, list[Tensor]]:
    """Build a detector of random weights whose batch norms have seen images, and the images."""
    torch.manual_seed(0)
    model = build_model(name).train()
    coarse = torch.rand(4, 3, side // 16, side // 16, generator=torch.Generator().manual_seed(1))
    batches = list(nn.functional.interpolate(coarse, side, mode="bilinear").split(2))
    with torch.no_grad():
        for batch in batches:
            model(batch)
    return model.eval().requires_grad_(False), batches


def _programs(model: nn.Module, batches: list[Tensor], folder: Path) -> dict[str, Program]:
    """Write the model in every way; each program runs on one thread, on one image."""
    image = batches[0][:1]
    files = {kind: folder / f"{kind}.onnx" for kind in ("float", "int8", "openvino", "stock", "static")}
    fixed: dict[str, Any] = {"example_inputs": image, "input_names": ["images"], "dynamic_batch": False}
    export(model, files["float"], **fixed)
    export(quantize(model, batches, example=image), files["int8"], **fixed)
    export(quantize(model, batches, example=image, target="openvino"), files["openvino"], **fixed)
    _write_stock(model, batches, files["stock"])
    _write_static(files["float"], batches, files["static"])
    ways = {
        "ONNX Runtime float32": ("float", "onnxruntime"), "OpenVINO float32": ("float", "openvino"),
        "OpenVINO bfloat16": ("float", "openvino-bf16"), "OpenVINO int8": ("openvino", "openvino"),
        "ONNX Runtime int8": ("int8", "onnxruntime"), "ONNX Runtime, stock placement": ("stock", "onnxruntime"),
        "ONNX Runtime quantize_static": ("static", "onnxruntime"),
    }  # fmt: skip
    return {
        label: Program.load(files[kind], threads=1, device="cpu", runtime=runtime)  # type: ignore[arg-type]
        for label, (kind, runtime) in ways.items()
    }


def _write_stock(model: nn.Module, batches: list[Tensor], path: Path) -> None:
    """Quantize by torchao's own calls and its quantizer for x86, and write what they make, which `export` would refuse."""
    pt2e = require("torchao.quantization.pt2e.quantize_pt2e", extra="deploy")
    image = (batches[0][:1],)
    with torch.no_grad(), quiet():
        prepared = pt2e.prepare_pt2e(torch.export.export(copy.deepcopy(model), image).module(), _x86_quantizer())
        for batch in batches:
            for one in batch.split(1):
                prepared(one)
        torch.onnx.export(
            pt2e.convert_pt2e(prepared), image, path, dynamo=True, external_data=False, verbose=False,
            input_names=["images"],
        )  # fmt: skip


def _x86_quantizer(*, is_qat: bool = False) -> Any:
    x86 = require("torchao.quantization.pt2e.quantizer.x86_inductor_quantizer", extra="deploy")
    return x86.X86InductorQuantizer().set_global(x86.get_default_x86_inductor_quantization_config(is_qat=is_qat))


def _write_static(source: Path, batches: list[Tensor], path: Path) -> None:
    """Quantize a float32 file by ONNX Runtime: unsigned activations, signed weights, a scale per channel."""
    tools = require("onnxruntime.quantization", extra="deploy")
    shapes = require("onnxruntime.quantization.shape_inference", extra="deploy")

    class Images(tools.CalibrationDataReader):  # type: ignore[misc, name-defined]
        images: Iterator[Tensor] = (one for batch in batches for one in batch.split(1))

        def get_next(self) -> dict[str, Any] | None:
            image = next(self.images, None)
            return None if image is None else {"images": image.numpy()}

    onnx = require("onnx", extra="deploy")
    unsealed, inferred = path.with_name("unsealed.onnx"), path.with_name("inferred.onnx")
    graph = onnx.load(str(source))
    del graph.metadata_props[:]  # the seal is of another file
    onnx.save(graph, str(unsealed))
    shapes.quant_pre_process(str(unsealed), str(inferred), skip_symbolic_shape=True)
    tools.quantize_static(
        str(inferred), str(path), Images(), per_channel=True, weight_type=tools.QuantType.QInt8,
        activation_type=tools.QuantType.QUInt8,
    )  # fmt: skip


def decode(quick: bool) -> tuple[Rows, Figures]:
    """Return the speed of a token in language programs with 4-bit weights."""
    found, ratios = decode_ratios(quick, names=[FASTEST], lengths=((1, 32 if quick else 64),))
    rows = [(f"language model, {call}, {label}: tokens/s", rate, ratio) for call, label, rate, ratio in found]
    return rows, {"w4_decode_over_eager": fastest(ratios, "decode")}


# -- what rounding costs -------------------------------------------------------------------------------------------


def accuracy(quick: bool) -> tuple[Rows, Figures]:
    """Return what int8 programs lose on three tasks, and what training with 4 bits wins back on one."""
    made = tasks(quick)
    rows, drops = [], []
    for name, task in made.items():
        before = task.score(task.model)
        with tempfile.TemporaryDirectory() as folder:
            quantized = quantize(task.model, task.calibration, recipe=Int8(min_sqnr_db=ANY_NOISE))
            program = export(quantized, Path(folder) / "int8.onnx", example_inputs=task.calibration[0])
            after = task.score(program)
        rows.append((f"{name}, int8 program: points", f"{after:.2f}", f"{before:.2f} in float32"))
        drops.append(before - after)
    more, figures = _low_bits(made["scenes"], quick)
    return rows + more, {"ptq_metric_drop": max(drops), **figures}


def _low_bits(task: Task, quick: bool) -> tuple[Rows, Figures]:
    """Return what 4 bits cost scenes, what training with them wins back, and what the same steps give the float model."""
    recipe = LowBit(activation_bits=4, min_sqnr_db=ANY_NOISE)
    before, after = task.score(task.model), task.score(quantize(task.model, task.calibration, recipe=recipe))
    epochs, seeds = (1, (0,)) if quick else (4, (0, 1, 2))
    scores: dict[str, list[float]] = {"rounded": [], "float": []}
    for seed in seeds:
        model = copy.deepcopy(task.model).train().requires_grad_(True)
        prepared = prepare_qat(model, task.train[0][:BATCH], recipe=recipe)
        scores["rounded"].append(task.score(convert(task.fit(prepared, epochs, 1e-3, seed=seed))))
        scores["float"].append(task.score(task.fit(model, epochs, 1e-3, seed=seed)))
    means = {kind: sum(found) / len(found) for kind, found in scores.items()}
    spans = {
        kind: f"mean; {min(found):.2f} to {max(found):.2f} by the order of the data" for kind, found in scores.items()
    }
    trained = means["rounded"]
    rows = [
        ("scenes, 4-bit weights and activations: points", f"{after:.2f}", f"{before:.2f} in float32"),
        ("the same after training with rounding: points", f"{trained:.2f}", spans["rounded"]),
        ("the float model after as many steps: points", f"{means['float']:.2f}", spans["float"]),
    ]
    figures: Figures = {
        "w4a4_metric_drop": before - after, "qat_metric_drop": before - trained,
        "float_metric_gain": means["float"] - before,
    }  # fmt: skip
    if before > after:
        figures["w4a4_loss_won_back"] = (trained - after) / (before - after)
    return rows, figures


def batch_norms(quick: bool) -> tuple[Rows, Figures]:
    """Return how close a converted network is to the trained one, if epsilon matters to it."""
    passes, x = 20 if quick else 300, small_inputs()
    prepared = prepare_qat(normed(passes), x)
    with torch.no_grad():
        for _ in range(3):
            prepared(x)
    prepared.eval()
    ours = convert(prepared).sqnr_db
    stock = _stock_decibels(normed(passes), x)
    rows = [("batch norms of epsilon 1e-3, converted: dB", f"{ours:.1f}", f"{stock:.1f} by torchao's own calls")]
    return rows, {"qat_bn_sqnr_db": ours, "stock_bn_sqnr_db": stock}


@torch.no_grad()
def _stock_decibels(model: nn.Module, x: Tensor) -> float:
    pt2e = require("torchao.quantization.pt2e.quantize_pt2e", extra="deploy")
    modes = require("torchao.quantization.pt2e", extra="deploy")
    with quiet():
        prepared = pt2e.prepare_qat_pt2e(torch.export.export(model, (x,)).module(), _x86_quantizer(is_qat=True))
        modes.move_exported_model_to_eval(prepared)
        prepared(x)
        converted = pt2e.convert_pt2e(prepared)
    model.eval()
    return compare([model(x)], [converted(x)])["0"].sqnr_db


if __name__ == "__main__":
    main(parser(__doc__.split("\n")[0]).parse_args())
