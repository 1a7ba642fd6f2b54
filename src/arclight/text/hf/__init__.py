"""Models to and from Hugging Face folders: config.json, safetensors in shards, tokenizer.json. Nothing is downloaded.

Its two functions are `arclight.text.from_hf` and `arclight.text.to_hf`.
"""
