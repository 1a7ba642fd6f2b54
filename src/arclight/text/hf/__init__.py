"""Convert models from and to Hugging Face folders: config.json, safetensors, tokenizer.json.

Nothing is downloaded. A folder comes in through `read` (`arclight.text.from_hf`), a model goes out through `write`
(`arclight.text.to_hf`). The table of a family, in `families` or for experts in `moe_families`, maps the names of its
settings and tensors; `registry` lists all tables, and `state_keys` defines their entries for tensors. Open `families` first.
"""
