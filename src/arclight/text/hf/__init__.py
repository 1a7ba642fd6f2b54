"""Models to and from Hugging Face folders: config.json, safetensors in shards, tokenizer.json. Nothing is downloaded.

A folder comes in through `read` (`arclight.text.from_hf`), a model goes out through `write` (`arclight.text.to_hf`). What a
family's settings and tensors are called there says its table, in `families` or, if it has experts, `moe_families`; `registry`
lists them all, and `state_keys` is the language of these tables. Open `families` first.
"""
