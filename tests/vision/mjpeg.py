"""A camera on loopback: endless JPEG frames over HTTP, which a test cuts and restores."""

from __future__ import annotations

import http.server
import threading
import time
from types import TracebackType

import cv2
import numpy as np


class Camera:
    """Serves frames of 64 x 48 pixels whose grey level counts up by 4 from 8, modulo 240, or one ``picture`` (BGR)."""

    def __init__(
        self,
        period_s: float = 0.01,
        frames: int | None = None,
        *,
        once: bool = False,
        picture: np.ndarray | None = None,
    ) -> None:
        self.period_s, self.frames, self.once, self.picture = period_s, frames, once, picture
        """Seconds from frame to frame; frames of one connection, without end for None; whether it takes one connection only."""
        self.sent = 0
        self.connections = 0
        self.refusing = False
        self.cut = threading.Event()
        camera = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def log_message(self, *arguments: object) -> None:
                pass

            def do_GET(self) -> None:
                if camera.refusing:
                    self.send_error(503)
                    return
                camera.connections += 1
                camera.refusing = camera.once
                self.send_response(200)
                self.send_header("Content-Type", "multipart/x-mixed-replace; boundary=frame")
                self.end_headers()
                camera.stream(self.wfile)

        class Server(http.server.ThreadingHTTPServer):
            daemon_threads = True

        self.server = Server(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server.server_address[1]}/stream"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True)

    def stream(self, file) -> None:
        count = 0
        try:
            while not self.cut.is_set() and (self.frames is None or count < self.frames):
                grey = np.full((48, 64, 3), (8 + 4 * self.sent) % 240, np.uint8)
                frame = grey if self.picture is None else self.picture
                data = cv2.imencode(".jpg", frame)[1].tobytes()
                head = b"--frame\r\nContent-Type: image/jpeg\r\nContent-Length: %d\r\n\r\n" % len(data)
                file.write(head + data + b"\r\n")
                self.sent += 1
                count += 1
                time.sleep(self.period_s)
        except OSError:
            pass  # the reader has closed its end

    def __enter__(self) -> Camera:
        self.thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cut.set()
        self.server.shutdown()
        self.server.server_close()
