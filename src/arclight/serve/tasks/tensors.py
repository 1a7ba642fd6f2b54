"""Decode and encode tensors of the Open Inference Protocol, as JSON or binary data.

`batching` calls `decode`, `compute` and `encode` for ``/v2/models/NAME/infer``, `app` calls `described`, `models` and `pool` warm programs up by
`zeros`, and `openapi` lists `DATATYPES`. Fields and datatypes are the protocol's (KServe v2) and stay. Requests are untrusted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import orjson

from arclight.deploy.errors import ProgramError
from arclight.deploy.programs.session import dtype_name
from arclight.serve.admission import Refusal, one_sentence, size_text
from arclight.serve.settings import Limits

if TYPE_CHECKING:
    from arclight.deploy import Program
    from arclight.deploy.programs.session import TensorSpec

DATATYPES = {
    "float32": "FP32", "float64": "FP64", "float16": "FP16", "int64": "INT64", "int32": "INT32", "int16": "INT16", "int8": "INT8",
    "uint64": "UINT64", "uint32": "UINT32", "uint16": "UINT16", "uint8": "UINT8", "bool": "BOOL",
}  # fmt: skip
_DTYPES = {datatype: np.dtype(dtype) for dtype, datatype in DATATYPES.items()}
_MAX_DIMENSIONS = 32
_ELEMENTS: dict[str, set[type]] = {"b": {bool}, "i": {int}, "u": {int}, "f": {int, float}}
"""Types of JSON values that a kind of data type accepts."""
QUIET: Any = {"over": "ignore"}
"""Arguments of the ``np.errstate`` that callers of `decode` set, once for all requests of a batch."""
_WIDEST: dict[str, type] = {"b": np.bool_, "i": np.int64, "u": np.uint64}
_FORMATS = {"openvino": "ir", "executorch": "pte"}
"""Formats whose name in a platform, ``RUNTIME_FORMAT``, is not ours: OpenVINO calls its own the intermediate representation, ExecuTorch's file is a .pte."""
JSON_SIZE = "Inference-Header-Content-Length"
"""Header that gives the number of bytes of JSON before the binary tensors."""


class TensorRequest(NamedTuple):
    """Inputs in the program's order, and wanted outputs by name: True for bytes, False for JSON."""

    id: str | None
    inputs: list[np.ndarray[Any, Any]]
    outputs: dict[str, bool]


def described(program: Program, version: str, name: str) -> dict[str, Any]:
    """Return the metadata of a model as the protocol has it: -1 stands for any size."""
    return {
        "name": name,
        "versions": [version],
        "platform": f"{program.runtime}_{_FORMATS.get(program.format, program.format)}",
        "inputs": [_described(spec) for spec in program.inputs],
        "outputs": [_described(spec) for spec in program.outputs],
    }


def _described(spec: TensorSpec) -> dict[str, Any]:
    shape = [size if isinstance(size, int) else -1 for size in spec.shape]
    return {"name": spec.name, "datatype": DATATYPES.get(spec.dtype, spec.dtype), "shape": shape}


def decode(body: bytes | bytearray, json_size: bytes | None, program: Program, limits: Limits) -> TensorRequest:
    """Decode the body of an inference request.

    A floating-point number too large for its type becomes infinity, as in NumPy, which warns of it outside of `QUIET`.
    Raises Refusal 400 for whatever the program cannot take, 413 for long JSON.
    """
    size = len(body) if json_size is None else _json_size(json_size, len(body))
    if size > limits.json_bytes:
        raise Refusal(
            413,
            f"The request's JSON is larger than {size_text(limits.json_bytes)}; send the tensors as bytes behind it, see {JSON_SIZE}.",
        )
    try:
        request = orjson.loads(body if json_size is None else body[:size])
    except ValueError:
        raise Refusal(400, "The request is not JSON; send an object with a list 'inputs'.") from None
    if not isinstance(request, dict) or not _is_objects(request.get("inputs")):
        raise Refusal(400, "The request has no list 'inputs' of objects; send one object for each input.")
    if not isinstance(request.get("id", ""), str):
        raise Refusal(400, "The request's 'id' is not a text; leave it out or send a text.")
    binary = b"" if json_size is None else bytes(body[size:])
    return TensorRequest(
        request.get("id"), _inputs(request["inputs"], binary, program, limits), _outputs(request, program)
    )


def _json_size(text: bytes, most: int) -> int:
    if not (text.isdigit() and len(text) < 12 and int(text) <= most):
        raise Refusal(400, f"The header {JSON_SIZE} must be a number of bytes up to {most}, the size of the body.")
    return int(text)


def _is_objects(value: Any) -> bool:
    return type(value) is list and set(map(type, value)) <= {dict}


def _parameters(item: dict[str, Any]) -> dict[str, Any]:
    found = item.get("parameters", {})
    if not isinstance(found, dict):
        raise Refusal(400, "A field 'parameters' is not an object; leave it out or send an object.")
    return found


def _inputs(given: list[dict[str, Any]], binary: bytes, program: Program, limits: Limits) -> list[np.ndarray[Any, Any]]:
    found: dict[str, np.ndarray[Any, Any]] = {}
    specs = {spec.name: spec for spec in program.inputs}
    for item in given:
        name, datatype = item.get("name"), item.get("datatype")
        shape: Any = item.get("shape")
        if type(name) is not str or name not in specs or name in found:
            raise Refusal(400, f"The model takes the inputs {', '.join(specs)}, each once, not {str(name)[:40]!r}.")
        if not _is_shape(shape):
            raise Refusal(
                400, f"The shape of input {name!r} must be a list of at most {_MAX_DIMENSIONS} whole numbers from 0."
            )
        dtype = _DTYPES.get(datatype) if type(datatype) is str else None
        if dtype is None:
            raise Refusal(400, f"The datatype of input {name!r} must be one of {', '.join(_DTYPES)}.")
        size = _parameters(item).get("binary_data_size")
        if size is None:
            array = _from_json(item.get("data"), dtype, name)
        else:
            array, binary = _from_bytes(size, binary, dtype, name)
        if array.size != math.prod(shape):
            raise Refusal(400, f"Input {name!r} has {array.size} elements, which do not fill its shape {shape[:8]}.")
        if not array.size and math.prod(filter(None, shape)) * dtype.itemsize > limits.body_bytes:
            # NumPy fails on such a shape, or outputs of its other sizes fill the memory
            raise Refusal(400, f"Input {name!r} is empty, and its other sizes are too large: {shape[:8]}.")
        found[name] = array.reshape(shape)
        _check(specs[name], found[name])
    if missing := [name for name in specs if name not in found]:
        raise Refusal(400, f"The model takes the inputs {', '.join(specs)}; {missing[0]!r} is missing.")
    if binary:
        raise Refusal(400, f"The body has {len(binary)} bytes that belong to no input; see binary_data_size.")
    return [found[name] for name in specs]


def _is_shape(value: Any) -> bool:
    if type(value) is not list or len(value) > _MAX_DIMENSIONS or not set(map(type, value)) <= {int}:
        return False
    return not value or (min(value) >= 0 and max(value) < 2**31)


def _check(spec: TensorSpec, array: np.ndarray[Any, Any]) -> None:
    try:
        spec.check(array)
    except ProgramError as error:
        raise Refusal(400, one_sentence(error)) from None


def _from_json(data: Any, dtype: np.dtype[Any], name: str) -> np.ndarray[Any, Any]:
    if type(data) is not list:
        raise _wrong_data(name, dtype)
    while data and type(data[0]) is list:
        if any(type(row) is not list or len(row) != len(data[0]) for row in data):
            raise _wrong_data(name, dtype)
        data = list(chain.from_iterable(data))
    # Types first: for one long text among numbers NumPy would reserve as many bytes for each of them.
    if not set(map(type, data)) <= _ELEMENTS[dtype.kind]:
        raise _wrong_data(name, dtype)
    try:
        if dtype.kind == "f":
            return np.array(data, dtype)
        array: np.ndarray[Any, Any] = np.array(data, _WIDEST[dtype.kind])
    except OverflowError:
        raise _wrong_data(name, dtype) from None
    if dtype.kind in "iu" and array.size:
        bounds = np.iinfo(dtype)
        if int(array.min()) < bounds.min or int(array.max()) > bounds.max:
            raise _wrong_data(name, dtype)
    return array.astype(dtype)


def _wrong_data(name: str, dtype: np.dtype[Any]) -> Refusal:
    return Refusal(400, f"The data of input {name!r} must be a list of numbers that {dtype} can hold.")


def _from_bytes(size: Any, binary: bytes, dtype: np.dtype[Any], name: str) -> tuple[np.ndarray[Any, Any], bytes]:
    if type(size) is not int or not 0 <= size <= len(binary) or size % dtype.itemsize:
        raise Refusal(
            400,
            f"binary_data_size of input {name!r} must be whole elements of {dtype} within the {len(binary)} bytes left.",
        )
    values = np.frombuffer(binary[:size], np.uint8 if dtype.kind == "b" else dtype.newbyteorder("<"))
    return values.astype(dtype), binary[size:]


def _outputs(request: dict[str, Any], program: Program) -> dict[str, bool]:
    names = [spec.name for spec in program.outputs]
    binary = _parameters(request).get("binary_data_output", False) is True
    wanted = request.get("outputs")
    if wanted is None or wanted == []:
        return dict.fromkeys(names, binary)
    if not _is_objects(wanted):
        raise Refusal(400, "The field 'outputs' is not a list of objects; leave it out for all outputs.")
    for item in wanted:
        if item.get("name") not in names:
            raise Refusal(400, f"The model has the outputs {', '.join(names)}, not {str(item.get('name'))[:40]!r}.")
    return {item["name"]: _parameters(item).get("binary_data", binary) is True for item in wanted}


def compute(program: Program, inputs: list[np.ndarray[Any, Any]]) -> list[np.ndarray[Any, Any]]:
    """Run the program on inputs that fit it; raises Refusal 400."""
    try:
        computed = program(*inputs)
    except ProgramError as error:  # sizes that only the runtime can judge, such as of a reshape
        raise Refusal(400, one_sentence(error)[:400]) from None
    return [np.asarray(value) for value in (computed if isinstance(computed, tuple) else (computed,))]


def encode(
    request: TensorRequest, values: Sequence[np.ndarray[Any, Any]], program: Program, name: str, version: str
) -> tuple[bytes, int | None]:
    """Return the body of an answer, and the bytes of its JSON if binary tensors follow."""
    arrays = {spec.name: value for spec, value in zip(program.outputs, values, strict=True)}
    outputs, pieces = [], []
    for output, is_binary in request.outputs.items():
        array = arrays[output]
        dtype = dtype_name(array.dtype)
        item = {"name": output, "datatype": DATATYPES.get(dtype, dtype), "shape": array.shape}
        if is_binary:
            pieces.append(np.ascontiguousarray(array, array.dtype.newbyteorder("<")).tobytes())
            outputs.append({**item, "parameters": {"binary_data_size": len(pieces[-1])}})
        else:
            outputs.append({**item, "data": np.ascontiguousarray(array.ravel())})
    answer = {"model_name": name, "model_version": version, "outputs": outputs}
    if request.id is not None:
        answer["id"] = request.id
    head = orjson.dumps(answer, _listed, orjson.OPT_SERIALIZE_NUMPY)
    return b"".join([head, *pieces]), len(head) if pieces else None


def zeros(program: Program) -> list[np.ndarray[Any, Any]]:
    """Return inputs of zeros for a program, with size 1 in each dynamic dimension."""
    return [
        np.zeros([size if isinstance(size, int) else 1 for size in spec.shape], spec.dtype) for spec in program.inputs
    ]


def _listed(value: Any) -> Any:
    """Return the elements of an array whose type orjson does not write itself, as a list.

    orjson writes NaN and infinity as null.
    """
    if not isinstance(value, np.ndarray):
        raise TypeError(f"a {type(value).__name__} is nothing that JSON holds")
    return value.tolist()
