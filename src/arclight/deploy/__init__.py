"""Quantize, export, run, compare and benchmark any trained ``nn.Module``.

A module and example inputs come in; `quantizing` rounds it to few bits, `formats` writes it as a program that is compared with it, and `programs`
runs and times what was written; `verifying` checks any quantizer, `comparison` compares any two networks or programs. `capture`, its `failures` and
`parity` are shared by these. `deployment` says what a trained ``Module`` ships, for ``arclight export`` and ``quantize``. Open `formats.export`
first.

>>> quantized = quantize(model, calibration_batches)
>>> program = export(quantized, "model.onnx", example_inputs=images)
>>> program(images)
"""

from typing import TYPE_CHECKING

from arclight._lazy import lazy

if TYPE_CHECKING:
    from arclight.deploy.comparison import compare as compare
    from arclight.deploy.errors import ExportError as ExportError
    from arclight.deploy.errors import ProgramError as ProgramError
    from arclight.deploy.errors import QuantizeError as QuantizeError
    from arclight.deploy.formats.export import export as export
    from arclight.deploy.programs.benchmark import Table as Table
    from arclight.deploy.programs.benchmark import benchmark as benchmark
    from arclight.deploy.programs.processing import Processing as Processing
    from arclight.deploy.programs.program import Program as Program
    from arclight.deploy.programs.session import TensorSpec as TensorSpec
    from arclight.deploy.quantizing.callback import QuantizationAwareTraining as QuantizationAwareTraining
    from arclight.deploy.quantizing.ptq import QuantizedModel as QuantizedModel
    from arclight.deploy.quantizing.ptq import quantize as quantize
    from arclight.deploy.quantizing.qat import convert as convert
    from arclight.deploy.quantizing.qat import prepare_qat as prepare_qat
    from arclight.deploy.settings import BFloat16 as BFloat16
    from arclight.deploy.settings import DynamicInt8 as DynamicInt8
    from arclight.deploy.settings import Int8 as Int8
    from arclight.deploy.settings import LowBit as LowBit
    from arclight.deploy.settings import WeightOnly as WeightOnly
    from arclight.deploy.verifying.verify import verify_quantizer as verify_quantizer

__getattr__, __dir__, __all__ = lazy(
    __name__,
    {
        "BFloat16": "arclight.deploy.settings",
        "DynamicInt8": "arclight.deploy.settings",
        "ExportError": "arclight.deploy.errors",
        "Int8": "arclight.deploy.settings",
        "LowBit": "arclight.deploy.settings",
        "Processing": "arclight.deploy.programs.processing",
        "Program": "arclight.deploy.programs.program",
        "ProgramError": "arclight.deploy.errors",
        "QuantizationAwareTraining": "arclight.deploy.quantizing.callback",
        "QuantizeError": "arclight.deploy.errors",
        "QuantizedModel": "arclight.deploy.quantizing.ptq",
        "Table": "arclight.deploy.programs.benchmark",
        "TensorSpec": "arclight.deploy.programs.session",
        "WeightOnly": "arclight.deploy.settings",
        "benchmark": "arclight.deploy.programs.benchmark",
        "compare": "arclight.deploy.comparison",
        "convert": "arclight.deploy.quantizing.qat",
        "export": "arclight.deploy.formats.export",
        "prepare_qat": "arclight.deploy.quantizing.qat",
        "quantize": "arclight.deploy.quantizing.ptq",
        "verify_quantizer": "arclight.deploy.verifying.verify",
    },
)
