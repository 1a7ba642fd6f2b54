"""From a trained module to a program: quantize, export, run and benchmark any ``nn.Module``.

>>> quantized = quantize(model, calibration_batches)
>>> program = export(quantized, "model.onnx", example_inputs=images)
>>> program(images)
"""

from typing import TYPE_CHECKING

from arclight._lazy import lazy

if TYPE_CHECKING:
    from arclight.deploy.benchmarking import Table as Table
    from arclight.deploy.benchmarking import benchmark as benchmark
    from arclight.deploy.errors import ExportError as ExportError
    from arclight.deploy.errors import ProgramError as ProgramError
    from arclight.deploy.errors import QuantizeError as QuantizeError
    from arclight.deploy.exporting import export as export
    from arclight.deploy.processing import Processing as Processing
    from arclight.deploy.program import Program as Program
    from arclight.deploy.program import TensorSpec as TensorSpec
    from arclight.deploy.quantization import QuantizedModel as QuantizedModel
    from arclight.deploy.quantization import quantize as quantize
    from arclight.deploy.settings import Int8 as Int8

__getattr__, __dir__, __all__ = lazy(
    __name__,
    {
        "ExportError": "arclight.deploy.errors",
        "Int8": "arclight.deploy.settings",
        "Processing": "arclight.deploy.processing",
        "Program": "arclight.deploy.program",
        "ProgramError": "arclight.deploy.errors",
        "QuantizeError": "arclight.deploy.errors",
        "QuantizedModel": "arclight.deploy.quantization",
        "Table": "arclight.deploy.benchmarking",
        "TensorSpec": "arclight.deploy.program",
        "benchmark": "arclight.deploy.benchmarking",
        "export": "arclight.deploy.exporting",
        "quantize": "arclight.deploy.quantization",
    },
)
