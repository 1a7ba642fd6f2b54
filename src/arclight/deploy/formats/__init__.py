"""Write a captured model as a program file, and compare the program with the model.

A float or quantized model comes in; `export` writes it, compares the program with it on real inputs, and keeps it only if they
agree. `onnx_graph` is the ONNX side: conversion, and the kernels that a runtime makes of it. Open `export` first.
"""
