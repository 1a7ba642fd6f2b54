"""Write a captured model as a program, and compare the program with the model.

A float or quantized model comes in; `export` writes it, compares the program with it on the example inputs in a fresh process, and keeps it only if
they agree. `formats` writes each format, `onnx_graph` converts to ONNX (and so to OpenVINO). Open `export` first.
"""
