"""A server process for the tests: the real application over a detector that finds codes with zxing-cpp."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import cv2
import numpy as np
import zxingcpp

from arclight.serve import Limits, create_app
from arclight.serve.server import run
from arclight.vision.results.detections import Detections


def find_codes(image: np.ndarray, *, imagine: bool = False) -> Detections:
    """Every QR code that zxing-cpp locates, as a detector would report it, and one that is not there."""
    corners = [
        [(point.x, point.y) for point in (at.top_left, at.top_right, at.bottom_right, at.bottom_left)]
        for at in (code.position for code in zxingcpp.read_barcodes(image))
    ]
    xyxy = [[*np.min(points, axis=0), *np.max(points, axis=0)] for points in corners]
    confidence = [0.9] * len(xyxy) + [0.3] * imagine
    xyxy += [[0, 0, 90, 90]] * imagine
    boxes = np.array(xyxy, np.float32).reshape(-1, 4)
    return Detections.from_arrays(boxes, confidence, [0] * len(boxes), names=["qr_code"], image=image)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--limits", default="{}", help="fields of Limits, JSON")
    parser.add_argument("--gate", type=Path, help="a file without which no detection ends")
    parser.add_argument("--calls", type=Path, help="a file that grows by one byte with each photo detected")
    parser.add_argument("--fault", action="store_true", help="the first photo meets a fault of the detector")
    parser.add_argument("--imagine", action="store_true", help="also report a code in the top left corner")
    parser.add_argument("--api-key")
    options = parser.parse_args()
    cv2.setNumThreads(1)
    faults = [RuntimeError("a detail for the log")] if options.fault else []

    def detector(image: np.ndarray) -> Detections:
        if image.shape[0] == 64:  # the warm-up
            return find_codes(image)
        if options.calls:
            with options.calls.open("ab") as log:
                log.write(b".")
        if faults:
            raise faults.pop()
        while options.gate and not options.gate.exists():
            time.sleep(0.01)
        return find_codes(image, imagine=options.imagine)

    limits = Limits(**json.loads(options.limits))
    app = create_app(
        detector,
        program="zxing",
        precision="none",
        limits=limits,
        api_key=options.api_key,
        insecure=options.host == "0.0.0.0",
    )
    run(app, host=options.host, port=options.port, limits=limits, has_key=options.api_key is not None)


if __name__ == "__main__":
    main()
