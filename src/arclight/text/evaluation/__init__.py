"""Evaluate a language model on local question files.

In: files as their authors publish them, named in a suite (`suite_settings`); out: scores with bootstrap errors. `questions` reads the
files and writes prompts, `answers` extracts and compares what a model generates, `suite` runs all. Open `suite` first.
"""
